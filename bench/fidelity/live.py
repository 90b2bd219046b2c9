"""The whole stack on this machine: NATS, gateway, scheduler, placement, a node agent with instances of one thread each,
every engine's calls recorded, and a client that sends over HTTP at given times."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench import emulated as emulation
from bench.coserving.testbed import make_checkpoint
from bench.fidelity.observed import Observed, observe
from bench.fidelity.workloads import EMULATED_MODELS, MODELS, VOCABULARY, Served
from bench.reporting import take_precedence
from bench.stack import add_tokenizer
from shared import recording
from shared.engine.calls import SetCostModel
from shared.engine.recording import CALLS
from shared.runtime.settings import SchedulerSettings, load
from tests.e2e.stack import Stack
from tideway.bench.arrivals import Poisson
from tideway.bench.client import Connections, Target, make_body, send
from tideway.bench.prompts import TokensPerWord
from tideway.bench.records import RequestRecord
from tideway.bench.runner import Run
from tideway.bench.workload import PlannedRequest, StreamSpec

_STREAM = StreamSpec(name="fidelity", models=dict.fromkeys(MODELS, 1.0), arrivals=Poisson(rate_rps=1.0))
"""Says nothing: requests are planned elsewhere."""
DRAIN_S = 120.0
"""After the last arrival, for all to end."""
PROFILE_TIMEOUT_S = 180.0


class RunFailed(Exception):
    """A request did not get its tokens."""


class LiveStack:
    """`environment`: settings for all services; `precedence`: a niceness of all processes, see
    `reporting.take_precedence`; 0: none; `emulated`: a kind of device whose step times the instances have
    (bench/emulated.py); "": this machine's. Used with `with`."""

    def __init__(
        self, environment: dict[str, str], *, num_instances: int = 2, precedence: int = 0, emulated: str = ""
    ) -> None:
        self._precedence = precedence
        self._num_instances = num_instances
        self._folder = tempfile.TemporaryDirectory(prefix="tideway-fidelity-")
        root = Path(self._folder.name)
        models = {}
        for number, (name, shape) in enumerate(MODELS.items()):
            models[name] = str(make_checkpoint(root / name, emulation.tiny(number, **shape) if emulated else shape))
            add_tokenizer(root / name, VOCABULARY)
        self._recordings = root / "engine"
        environment = environment | {
            "TIDEWAY_NUM_THREADS": "1",
            "TIDEWAY_RECORD_FILE": str(self._recordings),
            "TIDEWAY_RECORD_MAX_BYTES": str(1 << 30),
        }
        self.settings = load(SchedulerSettings, environment)
        if emulated:
            environment |= emulation.environment(root, emulated, EMULATED_MODELS)
        worker = emulation.WORKER if emulated else ()
        self._stack = Stack(models, num_instances=num_instances, environment=environment, worker=worker)
        self._models = models

    def __enter__(self) -> LiveStack:
        try:
            self._stack.wait_ready()
            if self._precedence:
                take_precedence(os.getpid(), self._precedence)
            self._stack.wait_until(self._are_profiled, "cost models of all", PROFILE_TIMEOUT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        self._folder.cleanup()

    def _are_profiled(self) -> bool:
        paths = self._paths()
        return len(paths) == self._num_instances and all(_told(path) >= set(self._models) for path in paths)

    def _paths(self) -> list[Path]:
        return sorted(self._recordings.parent.glob(f"{self._recordings.name}.worker-*"))

    def observed(self) -> list[Observed]:
        """What each instance did so far."""
        return [observe(path.read_bytes()) for path in self._paths()]

    def send(self, requests: Sequence[PlannedRequest], *, seed: int = 0) -> tuple[list[Served], float, float]:
        """At their times, until all have ended. Returns what became of them, when the run began on the machine's monotonic
        clock, and by how many seconds at most the client's own event loop was late. Raises `RunFailed` where one had not
        all of its tokens."""
        return asyncio.run(self._send(requests, seed))

    async def _send(self, requests: Sequence[PlannedRequest], seed: int) -> tuple[list[Served], float, float]:
        target = Target(url=self._stack.url, ignore_eos=True, vocabulary=VOCABULARY)
        bodies = {one.request_id: make_body(one, _STREAM, target, TokensPerWord(), seed) for one in requests}
        async with Connections(num_ready=min(64, len(requests))) as connections:

            async def send_one(request: PlannedRequest, record: RequestRecord, now: object) -> None:
                await send(connections, target, bodies.pop(request.request_id), record, run.now)

            run = Run(requests, send_one, duration_s=None, drain_s=DRAIN_S)
            records = await run.run(asyncio.Event())
            began_s = time.monotonic() - run.now()
        planned = {one.request_id: one for one in requests}
        for record in records:
            if record.error or record.output_tokens != planned[record.request_id].output_tokens:
                raise RunFailed(f"{record.request_id}: {record.output_tokens} tokens, {record.error_message!r}")
        served = [
            Served(one.model, one.arrival_s, one.first_token_s or 0.0, one.last_token_s or 0.0, one.output_tokens)
            for one in sorted(records, key=lambda record: record.request_id)
        ]
        return served, began_s, run.lateness().loop_max_s


def _told(path: Path) -> set[str]:
    """Models whose cost models the engine was told."""
    told = set()
    for record in recording.records(path.read_bytes()):
        if isinstance(record, recording.Applied) and isinstance(call := CALLS.decode(record.call), SetCostModel):
            told.add(call.name)
    return told
