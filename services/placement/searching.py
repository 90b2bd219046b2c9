"""A search in a process of its own, at low priority, so that neither the event loop nor what serves on this machine
waits."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context

from shared.placement.problem import Problem, ProblemError, Proposal

SEARCH_S = 900.0
"""After which it is given up."""
MAX_PROCESSES = 8
MAX_SIMULATED = 5_000
"""Requests for which the best plans are simulated as well: some hundred a second, five plans, far below `SEARCH_S`. Of
more the estimate must do."""


def _begin() -> None:
    os.nice(19)  # threads of models that are computed on CPU have 5
    os.setpgid(0, 0)  # with the processes that it starts


def _search(problem: Problem) -> Proposal:
    # A fifth of the time in which the service starts, and used in the search's process alone.
    from shared.placement.search import search
    from shared.simulation.deployment import predict

    num_devices = sum(node.num_devices for node in problem.nodes)
    # A small problem is solved before another process has imported numpy.
    num_processes = min(MAX_PROCESSES, os.cpu_count() or 1) if num_devices > 16 else 1
    evaluate = predict if problem.traffic.num_requests <= MAX_SIMULATED else None
    return search(problem, evaluate=evaluate, num_processes=num_processes)


async def search_elsewhere(problem: Problem) -> Proposal:
    """Raises `ProblemError` where nothing comes of it. When it is cancelled, the process and its own are killed."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(pool.submit(_search, problem)), SEARCH_S)
    except TimeoutError:
        raise ProblemError(f"the search took more than {SEARCH_S:.0f} s") from None
    except BrokenProcessPool:
        raise ProblemError("the search's process was killed") from None
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
