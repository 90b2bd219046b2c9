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
from typing import NamedTuple

import httpx
import msgspec

from bench import emulated as emulation
from bench.coserving.testbed import make_checkpoint
from bench.fidelity.observed import Observed, observe
from bench.fidelity.workloads import EMULATED_MODELS, MODELS, VOCABULARY, Served, tenant_of
from bench.reporting import busiest_thread_s, take_precedence, tree_processor_s
from bench.stack import add_tokenizer
from shared import recording
from shared.engine.calls import SetCostModel
from shared.engine.recording import CALLS
from shared.messages.timeline import RequestTimelines, SequenceTimeline
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
TENANT_HEADER = "x-tideway-tenant"
MOST_REQUESTS = 1 << 12
"""Requests of a run: so many timelines the gateway keeps, among which it looks for each by its HTTP request's id."""
DRAIN_S = 120.0
"""After the last arrival, for all to end."""
PROFILE_TIMEOUT_S = 180.0


class RunFailed(Exception):
    """A request did not get its tokens."""


class Sent(NamedTuple):
    """What became of a run's requests."""

    served: list[Served]
    arrivals_s: list[float]
    """Seconds from the beginning of the run until the gateway had each."""
    start_s: float
    """The run's beginning on the machine's monotonic clock."""
    client_late_s: float
    """Seconds by which the client's own event loop was late at most."""
    services_s: float
    """Processor time of services and client: of all processes beneath this one, without the threads that compute steps."""


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
            "TIDEWAY_MAX_TIMELINES": str(MOST_REQUESTS),
            "TIDEWAY_TRUST_TENANT_HEADER": "1",
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
        found = self._recordings.parent.glob(f"{self._recordings.name}.worker-*")
        return sorted(path for path in found if path.suffix != ".migrations")

    def observed(self) -> list[Observed]:
        """What each instance did so far."""
        return [observe(path.read_bytes()) for path in self._paths()]

    def send(self, requests: Sequence[PlannedRequest], *, seed: int = 0) -> Sent:
        """Sends them at their times, until all have ended. Served and arrivals are in the order of the requests' ids.
        Raises `RunFailed` where one had not all of its tokens."""
        return asyncio.run(self._send(requests, seed))

    def _services_s(self) -> float:
        steps_s = sum(busiest_thread_s(instance["pid"]) for instance in self._stack.instances())
        return tree_processor_s(os.getpid()) - steps_s

    async def _send(self, requests: Sequence[PlannedRequest], seed: int) -> Sent:
        target = Target(url=self._stack.url, ignore_eos=True, vocabulary=VOCABULARY)
        if len(requests) > MOST_REQUESTS:
            raise RunFailed(
                f"{len(requests)} requests: the gateway keeps the times of {MOST_REQUESTS}; shorten --seconds"
            )
        bodies = {one.request_id: make_body(one, _STREAM, target, TokensPerWord(), seed) for one in requests}
        for one in requests:
            if tenant := tenant_of(one):
                bodies[one.request_id].headers[TENANT_HEADER] = tenant
        async with Connections(num_ready=min(64, len(requests))) as connections:

            async def send_one(request: PlannedRequest, record: RequestRecord, now: object) -> None:
                await send(connections, target, bodies.pop(request.request_id), record, run.now)

            run, before_s = Run(requests, send_one, duration_s=None, drain_s=DRAIN_S), self._services_s()
            records = await run.run(asyncio.Event())
            services_s, began_s = self._services_s() - before_s, time.monotonic() - run.now()
        planned = {one.request_id: one for one in requests}
        for record in records:
            if record.error or record.output_tokens != planned[record.request_id].output_tokens:
                raise RunFailed(f"{record.request_id}: {record.output_tokens} tokens, {record.error_message!r}")
        unix_s, served, arrivals_s = time.time() - time.monotonic() + began_s, [], []
        with httpx.Client(base_url=self._stack.url) as client:
            for record in sorted(records, key=lambda record: record.request_id):
                timeline = _timeline(client, record.request_id)
                assert timeline.ttft_s is not None, "it has its tokens"
                arrivals_s.append(timeline.arrived_s - unix_s)
                served.append(
                    Served(
                        record.model, record.arrival_s, record.first_token_s or 0.0, record.last_token_s or 0.0,
                        record.output_tokens, server_ttft_s=timeline.ttft_s,
                    )
                )  # fmt: skip
        return Sent(served, arrivals_s, began_s, run.lateness().loop_max_s, services_s)


def _timeline(client: httpx.Client, request_id: str) -> SequenceTimeline:
    """What the gateway noted of a request that has ended."""
    answer = client.get(f"/admin/requests/{request_id}")
    answer.raise_for_status()
    (found,) = msgspec.json.decode(answer.content, type=RequestTimelines).requests
    return found


def _told(path: Path) -> set[str]:
    """Models whose cost models the engine was told."""
    told = set()
    for record in recording.records(path.read_bytes()):
        if isinstance(record, recording.Applied) and isinstance(call := CALLS.decode(record.call), SetCostModel):
            told.add(call.name)
    return told
