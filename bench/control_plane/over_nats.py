"""The scheduler as a process of its own, fed through a real NATS server by instances that exist as messages alone.

The scheduler has one core to itself, if the machine has two; this process and the server share the rest. What is measured
at the scheduler is its processor time and the reports that it counted; dispatches are timed here, from the submission to
the arrival at the instance, so twice over NATS and including what this process is late by.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from random import Random

import httpx
import msgspec
import nats
import numpy as np
from nats.aio.msg import Msg

from bench.control_plane.fleet import REPORTS_PER_S, Fleet, encode
from bench.reporting import processor_s
from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import INSTANCES, LOAD_REPORTS, PREFIX, SCHEDULER_ANNOUNCE, SCHEDULER_SUBMIT
from shared.messages.cluster import LeaseHolder
from shared.messages.requests import Accepted, GenerationRequest, HeldRequests
from shared.settings import BusSettings
from tests.conftest import NatsServer, free_port

TICK_S = 0.005
WARM_UP_S = 4.0
REGISTRY_INTERVAL_S = 1.0
START_TIMEOUT_S = 60.0


class OverNats(msgspec.Struct, frozen=True, kw_only=True):
    num_instances: int
    seconds: float
    sent_per_s: float
    """Reports that this process managed to send."""
    handled_per_s: float
    cpu_share: float
    """Of one core: the scheduler's processor time, in all threads."""
    num_requests: int
    num_refused: int
    wait_p50_ms: float
    wait_p99_ms: float
    num_rebalance_messages: int
    stall_p99_ms: float
    stall_max_ms: float
    """How long a process that only sleeps waited for the scheduler's core meanwhile (`witness`)."""
    load_average: float
    """Of the machine at the end: what else ran."""


class Publisher:
    """A bare connection to the server: many prepared messages at once for little of this process's time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answers = asyncio.create_task(self._answer(reader))

    @classmethod
    async def connect(cls, port: int) -> Publisher:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false}\r\n')
        return cls(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line == b"PING\r\n":
                self._writer.write(b"PONG\r\n")

    async def send(self, subject: str, bodies: list[bytes]) -> None:
        head = f"PUB {subject} ".encode()
        self._writer.write(b"".join(b"%b%d\r\n%b\r\n" % (head, len(body), body) for body in bodies))
        await self._writer.drain()

    async def close(self) -> None:
        self._answers.cancel()
        self._writer.close()


class Crowd:
    """All instances and one gateway."""

    def __init__(self, fleet: Fleet, publisher: Publisher, bus: NatsBus) -> None:
        self.fleet = fleet
        self.num_sent = 0
        self.num_rebalances = 0
        self.num_refused = 0
        """Submissions refused, or not answered in time."""
        self.waits_s: list[float] = []
        self._publisher = publisher
        self._bus = bus
        self._index = {name: index for index, name in enumerate(fleet.names)}
        self._sent_s: dict[str, float] = {}
        self._decode = msgspec.msgpack.Decoder(GenerationRequest).decode
        self._submissions: set[asyncio.Task[None]] = set()

    async def register(self) -> None:
        """Without waiting for acknowledgements: the entries are written again each second."""
        for index, name in enumerate(self.fleet.names):
            await self._publisher.send(f"$KV.{INSTANCES.name}.{name}", [encode(self.fleet.info(index))])

    async def keep_registered(self) -> None:
        while True:
            await self.register()
            await asyncio.sleep(REGISTRY_INTERVAL_S)

    async def report(self) -> None:
        began_s, num_instances = time.monotonic(), len(self.fleet.names)
        while True:
            now = time.monotonic()
            num_due = min(int((now - began_s) * REPORTS_PER_S * num_instances) - self.num_sent, 20 * num_instances)
            numbers = range(self.num_sent, self.num_sent + num_due)
            bodies = [self.fleet.report(number % num_instances, now) for number in numbers]
            self.num_sent += len(bodies)
            await self._publisher.send(LOAD_REPORTS.subject, bodies)
            await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - now)))

    async def submit(self, per_s: float, seed: int) -> None:
        random = Random(seed)
        due_s = time.monotonic()
        while True:
            due_s += random.expovariate(per_s)
            if (delay_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(delay_s)
            request = self.fleet.request()
            self._sent_s[request.request_id] = time.monotonic()
            task = asyncio.create_task(self._submit(request))
            self._submissions.add(task)
            task.add_done_callback(self._submissions.discard)

    async def _submit(self, request: GenerationRequest) -> None:
        try:
            await self._bus.request(SCHEDULER_SUBMIT, request, timeout_s=10.0)
        except BusError:
            self.num_refused += 1

    async def on_submit(self, message: Msg) -> None:
        name = message.subject.split(".")[3]
        request = self._decode(message.data)
        await message.respond(encode(Accepted(request.request_id)))
        if (sent_s := self._sent_s.pop(request.request_id, None)) is not None:
            self.waits_s.append(time.monotonic() - sent_s)
        self.fleet.accept(self._index[name], request.request_id)

    async def on_held(self, message: Msg) -> None:
        await message.respond(encode(HeldRequests([])))

    async def on_rebalance(self, message: Msg) -> None:
        self.num_rebalances += 1


async def _reports_handled(url: str, client: httpx.AsyncClient) -> float:
    text = (await client.get(url)).text
    return sum(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("tideway_scheduler_reports_total")
    )


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


async def over_nats(num_instances: int, seconds: float, requests_per_s: float, seed: int = 0) -> OverNats:
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
    publisher = await Publisher.connect(server.port)
    announced = asyncio.Event()

    def on_announce(_: LeaseHolder) -> None:
        announced.set()

    await bus.subscribe(SCHEDULER_ANNOUNCE, on_announce)
    await bus.key_value(INSTANCES)
    scheduler = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.scheduler", env=environment)
    tasks: list[asyncio.Task[None]] = []
    try:
        if len(cores) > 1:
            os.sched_setaffinity(scheduler.pid, {cores[0]})
            for pid in (0, server.pid):
                os.sched_setaffinity(pid, set(cores[1:]))
        async with asyncio.timeout(START_TIMEOUT_S):
            await announced.wait()
        fleet = Fleet(num_instances, seed)
        crowd = Crowd(fleet, publisher, bus)
        await peer.subscribe(f"{PREFIX}.instance.*.submit", cb=crowd.on_submit)
        await peer.subscribe(f"{PREFIX}.instance.*.held", cb=crowd.on_held)
        await peer.subscribe(f"{PREFIX}.instance.*.rebalance", cb=crowd.on_rebalance)
        await peer.flush()
        work = (crowd.keep_registered(), crowd.report(), crowd.submit(requests_per_s, seed))
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(WARM_UP_S)
        url = f"http://127.0.0.1:{metrics_port}/metrics"
        async with httpx.AsyncClient(timeout=10.0) as client:
            handled = await _reports_handled(url, client)
            began_s, cpu_s = time.monotonic(), processor_s(scheduler.pid)
            sent, messages = crowd.num_sent, crowd.num_rebalances
            crowd.waits_s.clear()
            stall_p99_ms, stall_max_ms = await _stalls_ms(cores[0], seconds)
            took_s = time.monotonic() - began_s
            cpu_s = processor_s(scheduler.pid) - cpu_s
            sent, waits_ms = crowd.num_sent - sent, 1000 * np.array(crowd.waits_s)
            handled = await _reports_handled(url, client) - handled
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        return OverNats(
            num_instances=num_instances,
            seconds=seconds,
            sent_per_s=sent / took_s,
            handled_per_s=handled / took_s,
            cpu_share=cpu_s / took_s,
            num_requests=len(waits_ms),
            num_refused=crowd.num_refused,
            wait_p50_ms=float(np.percentile(waits_ms, 50)) if len(waits_ms) else float("inf"),
            wait_p99_ms=float(np.percentile(waits_ms, 99)) if len(waits_ms) else float("inf"),
            num_rebalance_messages=crowd.num_rebalances - messages,
            stall_p99_ms=stall_p99_ms,
            stall_max_ms=stall_max_ms,
            load_average=os.getloadavg()[0],
        )
    finally:
        os.sched_setaffinity(0, set(cores))
        for task in tasks:
            task.cancel()
        scheduler.kill()
        await scheduler.wait()
        await publisher.close()
        await peer.close()
        await bus.close()
        server.close()
