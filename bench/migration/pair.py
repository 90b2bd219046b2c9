"""Two real instances on a real NATS; this process plays their gateway and their scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import (
    CLEAR_PREFIX_CACHE,
    GATEWAY_FRAMES,
    INSTANCE_CANCEL,
    INSTANCE_REBALANCE,
    INSTANCE_SUBMIT,
    INSTANCES,
    LOAD_REPORTS,
)
from shared.messages.cluster import InstanceInfo, InstancePlan, LoadReport, MigrationOutcome, ModelSpec
from shared.messages.migration import MigrationReason, Rebalance
from shared.messages.requests import (
    Cancel,
    ClearPrefixCache,
    GenerationRequest,
    Priority,
    SamplingParams,
    TokenFrame,
    next_placement,
    pack_tokens,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer

REPOSITORY = Path(__file__).resolve().parents[2]
GATEWAY = "bench"
MODEL = "model"
START_TIMEOUT_S = 300.0
MOVE_TIMEOUT_S = 60.0


@dataclass
class Stream:
    """One request as its gateway sees it."""

    request: GenerationRequest
    owner: str
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Time at which each token came, and below who sent it."""
    senders: list[str] = field(default_factory=list)
    has_ended: bool = False


class Pair:
    """Instances "a" and "b" with one model each. Use as an asynchronous context."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        pool_bytes: int,
        merged_bytes: int,
        environment: dict[str, str] | None = None,
        ends: Sequence[dict[str, str]] = ({}, {}),
        affinity: Affinity | None = None,
    ) -> None:
        """`ends`: what each has in its environment to see its GPU (bench/devices.py); empty on CPU."""
        self._ends = dict(zip(("a", "b"), ends, strict=True))
        self._checkpoint = checkpoint
        self._pool_bytes = pool_bytes
        self._merged_bytes = merged_bytes
        self._environment = environment or {}
        self._affinity = affinity or Affinity()
        self.streams: dict[str, Stream] = {}
        self.outcomes: list[MigrationOutcome] = []
        self.instances: dict[str, InstanceInfo] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._changed = asyncio.Event()
        self._num_submitted = 0

    async def __aenter__(self) -> Pair:
        self._nats = NatsServer()
        self._folder = tempfile.TemporaryDirectory(prefix="tideway-migration-")
        for name in ("a", "b"):
            self._start(name)
        self._bus = await NatsBus.connect(BusSettings(nats_url=self._nats.url), "bench", GATEWAY)
        await self._bus.subscribe(GATEWAY_FRAMES.at(gateway_id=GATEWAY), self._on_frame)
        await self._bus.subscribe(LOAD_REPORTS, self._on_report)
        self._watch = await (await self._bus.key_value(INSTANCES)).watch(self._on_instance)
        await self.wait_for(self._is_ready, "both instances to be ready", START_TIMEOUT_S)
        self._affinity.pin_service(self._nats.pid)
        for process in self._processes.values():
            self._affinity.pin_service(process.pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.stop()
        await self._bus.close()
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._nats.close()
        self._folder.cleanup()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (Path(self._folder.name) / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str) -> None:
        plan = InstancePlan(name, name, [ModelSpec(MODEL, str(self._checkpoint))], self._pool_bytes, self._merged_bytes)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
            "TIDEWAY_NATS_URL": self._nats.url,
            "TIDEWAY_NODE_ID": name,
            "TIDEWAY_INSTANCE_ID": name,
            "TIDEWAY_PLAN": msgspec.json.encode(plan).decode(),
            "TIDEWAY_DEVICE": "cuda" if self._ends[name] else "cpu",
            **self._ends[name],
            "TIDEWAY_NUM_THREADS": "1",
            "TIDEWAY_PROFILE": "off",
            "TIDEWAY_HOST_MEMORY_BYTES": "0",
            "TIDEWAY_MIGRATION_COOLDOWN_S": "0",
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        with open(Path(self._folder.name) / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "services.worker.instance.main"],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
            )

    def _is_ready(self) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"instance {name} exited\n{self.log(name)}")
        ready = [info for info in self.instances.values() if info.state == "ready"]
        return len(ready) == len(self._processes)

    # ------------------------------------------------------------------------------------------------- events

    def _on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        if info is None:
            self.instances.pop(instance_id, None)
        else:
            self.instances[instance_id] = info
        self._changed.set()

    def _on_report(self, report: LoadReport) -> None:
        self.outcomes.extend(report.migrations)
        self._changed.set()

    def _on_frame(self, frame: TokenFrame) -> None:
        now = time.perf_counter()
        for entry in frame.entries:
            stream = self.streams.get(entry.request_id)
            if stream is None or entry.epoch < stream.epoch:
                continue
            stream.epoch, stream.owner = entry.epoch, frame.sender
            new = unpack_tokens(entry.tokens)[len(stream.tokens) - entry.offset :]
            stream.tokens.extend(new)
            stream.times_s.extend([now] * len(new))
            stream.senders.extend([frame.sender] * len(new))
            if entry.finish_reason is not None:
                stream.has_ended = True
                if entry.error is not None:
                    raise RuntimeError(f"{entry.request_id}: {entry.error}")
        self._changed.set()

    async def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Raises `TimeoutError` with what the instances said last."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logs = "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self._processes)
            raise TimeoutError(f"waited {timeout_s:g} s for {what}\n{self.outcomes[-3:]}\n{logs}") from None

    # ------------------------------------------------------------------------------------------------ requests

    async def submit(
        self, instance: str, prompt: list[int], max_tokens: int, *, priority: Priority = Priority.NORMAL
    ) -> Stream:
        self._num_submitted += 1
        request = GenerationRequest(
            request_id=f"r{self._num_submitted}",
            gateway_id=GATEWAY,
            model=MODEL,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            priority=priority,
        )
        stream = self.streams[request.request_id] = Stream(request, instance)
        await self._bus.request(INSTANCE_SUBMIT.at(instance_id=instance), request, timeout_s=10.0)
        return stream

    async def decoded(self, stream: Stream, num_more: int, timeout_s: float = 300.0) -> None:
        """Waits for so many more tokens."""
        wanted = len(stream.tokens) + num_more
        await self.wait_for(lambda: len(stream.tokens) >= wanted or stream.has_ended, f"{num_more} tokens", timeout_s)
        if stream.has_ended:
            raise RuntimeError(f"{stream.request.request_id} ended after {len(stream.tokens)} tokens")

    def forget_caches(self) -> None:
        """So that no block is found at the destination."""
        self._bus.publish(CLEAR_PREFIX_CACHE, ClearPrefixCache())

    async def move(self, stream: Stream) -> MigrationOutcome:
        """Has the stream's owner give one request away (the stream must be its first choice), and waits until the other
        instance has made two tokens."""
        source = stream.owner
        destination = "b" if source == "a" else "a"
        self.forget_caches()
        self.outcomes.clear()
        topic = INSTANCE_REBALANCE.at(instance_id=source)
        self._bus.publish(topic, Rebalance([destination], MigrationReason.BALANCE, MOVE_TIMEOUT_S))
        await self.wait_for(lambda: stream.owner == destination, "the move")
        self._bus.publish(topic, Rebalance([], MigrationReason.BALANCE, 0.0))
        await self.wait_for(lambda: self.outcomes, "the move's outcome")
        await self.decoded(stream, 2)
        return self.outcomes[0]

    async def place_again(self, stream: Stream) -> None:
        """What happens without migration: the other instance computes prompt and output so far again."""
        source = stream.owner
        destination = "b" if source == "a" else "a"
        self.forget_caches()
        stream.epoch = next_placement(stream.epoch)
        request = msgspec.structs.replace(stream.request, epoch=stream.epoch, prior=pack_tokens(stream.tokens))
        self._bus.publish(INSTANCE_CANCEL.at(instance_id=source), Cancel(request.request_id))
        await self._bus.request(INSTANCE_SUBMIT.at(instance_id=destination), request, timeout_s=10.0)
        await self.decoded(stream, 2)

    async def cancel(self, stream: Stream) -> None:
        del self.streams[stream.request.request_id]
        for name in self._processes:
            self._bus.publish(INSTANCE_CANCEL.at(instance_id=name), Cancel(stream.request.request_id))
        await self._bus.round_trip_s()


def pause_s(stream: Stream) -> tuple[float, float]:
    """(longest gap between the last token of one sender and the first of the next, median gap beside it) of the stream's
    last hand-over, seconds."""
    hand_over = max(i for i in range(1, len(stream.senders)) if stream.senders[i] != stream.senders[i - 1])
    gap_s = stream.times_s[hand_over] - stream.times_s[hand_over - 1]
    first = max(1, hand_over - 40)
    steps = sorted(stream.times_s[i] - stream.times_s[i - 1] for i in range(first, hand_over))
    return gap_s, steps[len(steps) // 2]


def _cpu_ticks(pid: int) -> dict[int, int]:
    """Processor time of each thread of a process, in clock ticks."""
    ticks = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


class Affinity:
    """Which threads run on which core. `is_on` False, or only one core: nothing is pinned.

    On a machine of a few cores the copies of a migration and the steps of the instances would otherwise share them as the
    kernel likes, and what is measured is that. The engine's thread (the one that computes) of both instances gets one core;
    everything else (event loops, transport, NATS, this process) the other.
    """

    def __init__(self, is_on: bool = True) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.is_on = is_on and len(self.cores) > 1
        self.compute = {self.cores[0]}
        self.services = set(self.cores[1:2])

    def pin_service(self, pid: int) -> None:
        """All threads that the process has and will start."""
        if self.is_on:
            for thread in _cpu_ticks(pid):
                os.sched_setaffinity(thread, self.services)

    def pin_busiest(self, pid: int, window_s: float = 1.0) -> int:
        """The thread of the process that computes right now goes to the cores of computing. Returns its id."""
        before = _cpu_ticks(pid)
        time.sleep(window_s)
        after = _cpu_ticks(pid)
        busiest = max(after, key=lambda thread: after[thread] - before.get(thread, 0))
        if self.is_on:
            os.sched_setaffinity(busiest, self.compute)
        return busiest

    def release(self, pid: int) -> None:
        """The opposite of `pin_service`; processes inherit what their parent has."""
        for thread in _cpu_ticks(pid):
            os.sched_setaffinity(thread, self.cores)

    def describe(self) -> str:
        if not self.is_on:
            return "nothing pinned"
        return f"engine threads on core {sorted(self.compute)}, everything else on {sorted(self.services)}"
