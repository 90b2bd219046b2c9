"""One whole run against a server: plan, calibrate, send, watch, and assemble the result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from shared.messages.requests import RequestClass
from tideway.bench import server_metrics
from tideway.bench.arrivals import Closed
from tideway.bench.client import (
    BenchError,
    Body,
    Connections,
    Target,
    allow_many_files,
    calibrate,
    list_models,
    make_body,
    send,
)
from tideway.bench.prompts import TokensPerWord
from tideway.bench.records import RequestRecord
from tideway.bench.report import Result
from tideway.bench.runner import Run
from tideway.bench.summary import Distribution, summarize
from tideway.bench.workload import PlannedRequest, Workload, load_traces, plan_requests

OPEN_LOOP_CONNECTIONS = 100
"""Made ready for each stream of an open loop; more are made when they are needed."""
PROGRESS_INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
"""Between progress lines where the output is not a terminal."""
RECENT_S = 10.0
"""Over which the progress line takes its percentiles."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What one run needs to know beyond the workload."""

    target: Target
    place: str = ""
    """What to say of the target; empty: its URL."""
    api_key: str = ""
    """Key of streams that name no environment variable of their own."""
    drain_s: float = 60.0
    warmup_s: float = 0.0
    """Requests that arrive within it are sent and not counted."""
    metrics_urls: list[str] = []


async def discover_models(target: Target, api_key: str) -> list[str]:
    """Raises `BenchError`."""
    async with Connections() as connections:
        return await list_models(connections, target.url, api_key)


async def run_session(session: Session, workload: Workload, progress: TextIO | None = None) -> Result:
    """Runs the workload to its end or to SIGINT or SIGTERM.

    Raises `BenchError`, `WorkloadError`, `TraceError`, `OSError`.
    """
    planned = await asyncio.to_thread(lambda: plan_requests(workload, load_traces(workload)))
    if not planned:
        raise BenchError("the workload has no requests")
    if progress:
        print(f"Target: {session.place or session.target.url}", file=progress)
    allow_many_files()
    streams = {stream.name: stream for stream in workload.streams}
    keys = {name: _api_key(stream.api_key_env, session.api_key) for name, stream in streams.items()}
    key_of_model = {request.model: keys[request.stream] for request in reversed(planned)}
    async with Connections(num_ready=min(len(planned), _num_concurrent(workload))) as connections:
        rates: dict[str, TokensPerWord] = {}
        for model, api_key in sorted(key_of_model.items()):
            rates[model], has_usage = await calibrate(connections, session.target, model, workload.seed, api_key)
            if not has_usage and progress:
                print(f"{model}: the server reports no usage; tokens are counted by pieces", file=progress)
        bodies = {
            request.request_id: make_body(
                request,
                streams[request.stream],
                session.target,
                rates[request.model],
                workload.seed,
                keys[request.stream],
            )
            for request in planned
        }
        run = Run(
            planned,
            _sender(connections, session.target, bodies),
            duration_s=workload.duration_s,
            drain_s=session.drain_s,
        )
        series: dict[str, server_metrics.Series] = {}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        was_interrupted = await _watched(run, connections, session, series, progress)
    end_s = run.duration_s if run.duration_s is not None and not was_interrupted else None
    return Result(
        created=created,
        machine={"platform": platform.platform(), "num_cpus": os.cpu_count(), "python": platform.python_version()},
        target=msgspec.to_builtins(session.target) | {"drain_s": session.drain_s, "warmup_s": session.warmup_s},
        workload=msgspec.to_builtins(workload),
        num_planned=len(planned),
        lateness=run.lateness(),
        summary=summarize(run.records, start_s=session.warmup_s, end_s=end_s),
        tokens_per_word={model: (rate.base_tokens, rate.tokens_per_word) for model, rate in rates.items()},
        was_interrupted=was_interrupted,
        series=series,
        records=run.records,
    )


def _num_concurrent(workload: Workload) -> int:
    """How many requests are in flight at once: known for closed loops, a burst's worth for open ones."""
    arrivals = [stream.arrivals for stream in workload.streams]
    return sum(a.concurrency if isinstance(a, Closed) else OPEN_LOOP_CONNECTIONS for a in arrivals)


def _api_key(variable: str, default: str) -> str:
    if not variable:
        return default
    if not os.environ.get(variable):
        raise BenchError(f"the workload wants an API key in {variable}, which is not set")
    return os.environ[variable]


def _sender(connections: Connections, target: Target, bodies: dict[str, Body]) -> Any:
    async def send_one(request: PlannedRequest, record: RequestRecord, now: Callable[[], float]) -> None:
        # Popped: a long run's bodies are hundreds of megabytes that it need not keep.
        await send(connections, target, bodies.pop(request.request_id), record, now)

    return send_one


async def _watched(
    run: Run,
    connections: Connections,
    session: Session,
    series: dict[str, server_metrics.Series],
    progress: TextIO | None,
) -> bool:
    """Runs it with signals, metrics and the progress line around it; whether it was interrupted."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the main thread may; elsewhere a signal ends the process as ever.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, stop.set)
    watchers = [asyncio.create_task(server_metrics.collect(connections, session.metrics_urls, run.now, series))]
    if progress is not None:
        watchers.append(asyncio.create_task(_show_progress(run, progress)))
    try:
        await run.run(stop)
    finally:
        for task in watchers:
            task.cancel()
        for outcome in await asyncio.gather(*watchers, return_exceptions=True):
            if isinstance(outcome, Exception):
                print(f"tideway bench: {outcome!r} while watching the run", file=sys.stderr)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(number)
    return stop.is_set()


async def _show_progress(run: Run, out: TextIO) -> None:
    is_terminal = out.isatty()
    width = 0
    try:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S if is_terminal else LINE_INTERVAL_S)
            line = progress_line(run, run.now())
            if is_terminal:
                # Cut: of a line that is wrapped, \r would go back over its last part alone.
                line = line[: shutil.get_terminal_size().columns - 1]
                out.write("\r" + line.ljust(width))
                width = len(line)
            else:
                out.write(line + "\n")
            out.flush()
    finally:
        if width:
            out.write("\n")


def progress_line(run: Run, at_s: float) -> str:
    records = run.records
    failed = sum(bool(record.error) for record in records)
    done = sum(record.end_s is not None for record in records) - failed
    recent = [r for r in records if r.end_s is None or r.end_s >= at_s - RECENT_S]
    tokens = sum(sum(1 for t in reversed(r.token_times) if t >= at_s - RECENT_S) for r in recent)
    waited_for = [r for r in recent if r.request_class is RequestClass.ONLINE] or recent
    ttft = Distribution.of(record.ttft_s for record in waited_for)
    flight = ", ".join(f"{run.in_flight[name]} {name}" for name in RequestClass if run.in_flight[name]) or "none"
    return (
        f"{at_s:5.0f} s  sent {len(records)}  done {done}  failed {failed}  in flight {flight}  "
        f"{tokens / max(min(RECENT_S, at_s), 1e-9):.0f} pieces/s  "
        f"TTFT P50 {ttft.p50 * 1000:.0f} P99 {ttft.p99 * 1000:.0f} ms"
    )
