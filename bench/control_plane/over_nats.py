"""The scheduler as a process of its own, fed through a real NATS server by instances that exist as messages alone.

The scheduler has one core to itself, if the machine has two; this process (the gateway), the instances' process and the
server share the rest. Dispatches are timed here, from the submission to the arrival of the dispatch at the instance, so
twice over NATS and including what this process is late by. Each process's share of a core is said beside; and how long an
echo takes meanwhile, from this process over NATS to that of the instances and back: the same way without a scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from random import Random

import httpx
import msgspec
import nats
import numpy as np
from nats.aio.msg import Msg

from bench.control_plane.fleet import Clients
from bench.control_plane.instances import COUNTS, ECHO, Counts
from bench.reporting import processor_s
from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import INSTANCES, PREFIX, SCHEDULER_ANNOUNCE, SCHEDULER_SUBMIT
from shared.messages.cluster import LeaseHolder
from shared.messages.requests import GenerationRequest
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer, free_port

WARM_UP_S = 12.0
ECHO_INTERVAL_S = 0.02
ECHO_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0


class OverNats(msgspec.Struct, frozen=True, kw_only=True):
    num_instances: int
    seconds: float
    sent_per_s: float
    """Reports that the instances managed to send."""
    handled_per_s: float
    cpu_share: float
    """The scheduler's processor time in all threads, as a share of one core; likewise those of the others."""
    server_cpu_share: float
    instances_cpu_share: float
    gateway_cpu_share: float
    num_requests: int
    num_refused: int
    wait_p50_ms: float
    wait_p99_ms: float
    wait_max_ms: float
    echo_p50_ms: float
    echo_p99_ms: float
    num_rebalance_messages: int
    stall_p99_ms: float
    stall_max_ms: float
    """How long a process that only sleeps waited for the scheduler's core meanwhile (`witness`)."""
    load_average: float
    """Load of the machine at the end: what else ran."""


class Gateway:
    def __init__(self, bus: NatsBus, seed: int) -> None:
        self.num_refused = 0
        """Submissions refused, or not answered in time."""
        self.waits_s: list[float] = []
        self._bus = bus
        self._clients = Clients(seed)
        self._random = Random(seed)
        self._sent_s: dict[str, float] = {}
        self._decode = msgspec.msgpack.Decoder(GenerationRequest).decode
        self._submissions: set[asyncio.Task[None]] = set()

    async def submit(self, per_s: float) -> None:
        due_s = time.monotonic()
        while True:
            due_s += self._random.expovariate(per_s)
            if (delay_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(delay_s)
            request = self._clients.request()
            self._sent_s[request.request_id] = time.monotonic()
            task = asyncio.create_task(self._submit(request))
            self._submissions.add(task)
            task.add_done_callback(self._submissions.discard)

    async def _submit(self, request: GenerationRequest) -> None:
        try:
            await self._bus.request(SCHEDULER_SUBMIT, request, timeout_s=10.0)
        except BusError:
            self.num_refused += 1

    async def on_dispatch(self, message: Msg) -> None:
        """What the instances get comes here too."""
        if (sent_s := self._sent_s.pop(self._decode(message.data).request_id, None)) is not None:
            self.waits_s.append(time.monotonic() - sent_s)


async def _reports_handled(url: str, client: httpx.AsyncClient) -> float:
    text = (await client.get(url)).text
    return sum(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("tideway_scheduler_reports_total")
    )


class Echoes:
    """Asks again and again; each echo is waited for on its own, so that a late one delays none."""

    def __init__(self, peer: nats.NATS) -> None:
        self.waits_s: list[float] = []
        self._peer = peer
        self._under_way: set[asyncio.Task[None]] = set()

    async def ask(self) -> None:
        while True:
            task = asyncio.create_task(self._ask_once())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            await asyncio.sleep(ECHO_INTERVAL_S)

    async def _ask_once(self) -> None:
        sent_s = time.monotonic()
        with contextlib.suppress(nats.errors.TimeoutError):
            await self._peer.request(ECHO, timeout=ECHO_TIMEOUT_S)
        self.waits_s.append(time.monotonic() - sent_s)


def _percentile_ms(waits_s: list[float], percent: float) -> float:
    return 1000 * float(np.percentile(waits_s, percent)) if waits_s else float("inf")


async def _stalls_ms(core: int, seconds: float) -> tuple[float, float]:
    """Waits so long, and returns what the witness of that time says."""
    command = (sys.executable, "-m", "bench.control_plane.witness", str(core), str(seconds))
    witness = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await witness.communicate()
    finally:
        if witness.returncode is None:
            witness.kill()
    p99_ms, max_ms = map(float, output.split())
    return p99_ms, max_ms


async def over_nats(
    num_instances: int, seconds: float, requests_per_s: float, seed: int = 0, *, is_flat_out: bool = False
) -> OverNats:
    server = NatsServer()
    cores = sorted(os.sched_getaffinity(0))
    metrics_port = free_port()
    environment = {
        **os.environ,
        "TIDEWAY_NATS_URL": server.url,
        "TIDEWAY_METRICS_PORT": str(metrics_port),
        "TIDEWAY_LOG_LEVEL": "WARNING",
        "TIDEWAY_TRACE_SAMPLE_RATIO": "0",
    }
    bus = await NatsBus.connect(BusSettings(nats_url=server.url), "bench", "gateway")
    peer = await nats.connect(server.url)
    announced = asyncio.Event()

    def on_announce(_: LeaseHolder) -> None:
        announced.set()

    await bus.subscribe(SCHEDULER_ANNOUNCE, on_announce)
    await bus.key_value(INSTANCES)
    scheduler = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.scheduler", env=environment)
    processes: list[asyncio.subprocess.Process] = [scheduler]
    tasks: list[asyncio.Task[None]] = []
    try:
        if len(cores) > 1:
            os.sched_setaffinity(scheduler.pid, {cores[0]})
            for pid in (0, server.pid):
                os.sched_setaffinity(pid, set(cores[1:]))
        async with asyncio.timeout(START_TIMEOUT_S):
            await announced.wait()
        words = [str(server.port), str(num_instances), str(seed), *(["flat-out"] if is_flat_out else [])]
        command = (sys.executable, "-m", "bench.control_plane.instances", *words)
        processes.append(instances := await asyncio.create_subprocess_exec(*command))
        gateway = Gateway(bus, seed)
        await peer.subscribe(f"{PREFIX}.instance.*.submit", cb=gateway.on_dispatch)
        await _until_reported(peer)
        echoes = Echoes(peer)
        tasks = [asyncio.create_task(gateway.submit(requests_per_s)), asyncio.create_task(echoes.ask())]
        await asyncio.sleep(WARM_UP_S)
        url = f"http://127.0.0.1:{metrics_port}/metrics"
        pids = (scheduler.pid, server.pid, instances.pid, os.getpid())
        async with httpx.AsyncClient(timeout=10.0) as client:
            counts, handled = await _counts(peer), await _reports_handled(url, client)
            began_s, began_cpu_s = time.monotonic(), [processor_s(pid) for pid in pids]
            gateway.waits_s.clear()
            echoes.waits_s.clear()
            num_refused = gateway.num_refused
            stall_p99_ms, stall_max_ms = await _stalls_ms(cores[0], seconds)
            took_s = time.monotonic() - began_s
            shares = [(processor_s(pid) - before) / took_s for pid, before in zip(pids, began_cpu_s, strict=True)]
            waits_s, echoes_s = list(gateway.waits_s), list(echoes.waits_s)
            handled = await _reports_handled(url, client) - handled
            later = await _counts(peer)
        for task in tasks:
            if task.done():
                task.result()
        return OverNats(
            num_instances=num_instances,
            seconds=took_s,
            sent_per_s=(later.num_reports - counts.num_reports) / took_s,
            handled_per_s=handled / took_s,
            cpu_share=shares[0],
            server_cpu_share=shares[1],
            instances_cpu_share=shares[2],
            gateway_cpu_share=shares[3],
            num_requests=len(waits_s),
            num_refused=gateway.num_refused - num_refused,
            wait_p50_ms=_percentile_ms(waits_s, 50),
            wait_p99_ms=_percentile_ms(waits_s, 99),
            wait_max_ms=_percentile_ms(waits_s, 100),
            echo_p50_ms=_percentile_ms(echoes_s, 50),
            echo_p99_ms=_percentile_ms(echoes_s, 99),
            num_rebalance_messages=later.num_rebalances - counts.num_rebalances,
            stall_p99_ms=stall_p99_ms,
            stall_max_ms=stall_max_ms,
            load_average=os.getloadavg()[0],
        )
    finally:
        os.sched_setaffinity(0, set(cores))
        for task in tasks:
            task.cancel()
        for process in reversed(processes):
            process.kill()
            await process.wait()
        await peer.close()
        await bus.close()
        server.close()


async def _until_reported(peer: nats.NATS) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(nats.errors.NoRespondersError, nats.errors.TimeoutError):
                if (await _counts(peer)).num_reports:
                    return
            await asyncio.sleep(0.1)


async def _counts(peer: nats.NATS) -> Counts:
    answer = await peer.request(COUNTS, timeout=5.0)
    return msgspec.msgpack.decode(answer.data, type=Counts)
