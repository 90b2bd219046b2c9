"""The bus in one process, for tests and simulations: same contract as NATS, seeded delays, faults on command.

    hub = MemoryHub(seed=7)
    bus = hub.connect("gateway-1")
    hub.faults = Faults(drop_rate=0.1)
    hub.partition("gateway-1"); hub.heal(); hub.kill(); hub.start(keep_store=False)

Messages are really encoded and decoded. Time is the event loop's, so on a `VirtualTimeLoop` it is virtual. A connection's
messages arrive in the order sent, as on TCP; which requests, drops and delays happen depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from shared.bus.codec import ERROR_HEADER, UNREADABLE, decode_reply, decoder, encode
from shared.bus.interface import Bus, BusError, KeyValue, ObjectStore, StreamUse, Subscription
from shared.bus.metrics import bus_metrics, subject_pattern
from shared.bus.serving import EndpointServer
from shared.messages.channels import (
    Bucket,
    Endpoint,
    ObjectBucket,
    Topic,
)
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.telemetry import current_traceparent
from tests.memory_storage import MemoryKeyValue, MemoryObjectStore, MemoryStore, MemoryWatch

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1024 * 1024
"""NATS's default."""
MAX_BUFFERED = 65536
"""Publications kept while disconnected."""
CALL_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 3.0
_TICK_S = 1e-6
"""Between two arrivals at one connection, to keep them in order."""


@dataclass
class Faults:
    delay_s: tuple[float, float] = (0.0001, 0.0005)
    """Delay of one message, uniformly drawn."""
    drop_rate: float = 0.0
    """Share of dropped published messages, requests and replies; JetStream's calls are never dropped."""
    duplicate_rate: float = 0.0


@dataclass
class _Subject:
    handlers: list[tuple[MemoryBus, Callable[[bytes], None]]] = field(default_factory=list)
    servers: list[tuple[MemoryBus, EndpointServer]] = field(default_factory=list)


class MemoryHub:
    """Plays the NATS server."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.store = MemoryStore()
        self.is_up = True
        self._random = Random(seed)
        self._buses: dict[str, MemoryBus] = {}
        self._partitioned: set[str] = set()
        self._subjects: dict[str, _Subject] = {}

    def connect(self, name: str, registry: CollectorRegistry | None = None) -> MemoryBus:
        """`name` is what faults are addressed to; one bus a name."""
        assert name not in self._buses or self._buses[name].is_closed, f"{name} is connected already"
        self._buses[name] = MemoryBus(self, name, registry)
        return self._buses[name]

    # -------------------------------------------------------------------------------------------------- faults

    def partition(self, *names: str) -> None:
        """Nothing reaches these clients or comes from them, and they do not notice: their calls run into deadlines."""
        self._partitioned.update(names)

    def heal(self) -> None:
        self._partitioned.clear()

    def disconnect(self, *names: str) -> None:
        """Breaks these connections; the clients notice at once. They stay away until `reconnect`."""
        for name in names:
            self._buses[name].lose_connection()

    def reconnect(self, *names: str) -> None:
        assert self.is_up, "the server is down"
        for name in names:
            self._buses[name].restore_connection()

    def kill(self) -> None:
        """The server dies: all are disconnected, buckets that are not durable are lost."""
        self.is_up = False
        self.disconnect(*(name for name, bus in self._buses.items() if bus.is_connected))
        self.store.lose_memory()

    def start(self, *, keep_store: bool = True) -> None:
        """The server is back, with its durable state or none; clients reconnect within half a second."""
        self.is_up = True
        if not keep_store:
            self.store = MemoryStore()
        for bus in self._buses.values():
            if not bus.is_connected and not bus.is_closed:
                asyncio.get_running_loop().call_later(self._random.uniform(0.0, 0.5), bus.restore_connection)

    def is_cut_off(self, bus: MemoryBus) -> bool:
        return bus.name in self._partitioned

    # ------------------------------------------------------------------------------------------------ delivery

    def subject(self, subject: str) -> _Subject:
        return self._subjects.setdefault(subject, _Subject())

    def choose_server(self, subject: str) -> tuple[MemoryBus, EndpointServer] | None:
        servers = [(bus, server) for bus, server in self.subject(subject).servers if bus.is_connected]
        return self._random.choice(servers) if servers else None

    def send(self, sender: MemoryBus, receiver: MemoryBus, arrive: Callable[[], None]) -> None:
        """A message that may be lost or come twice."""
        copies = 0 if self._random.random() < self.faults.drop_rate else 1
        copies += self._random.random() < self.faults.duplicate_rate
        for _ in range(copies):
            self.transfer(sender, receiver, arrive)

    def transfer(self, sender: MemoryBus, receiver: MemoryBus, arrive: Callable[[], None]) -> None:
        """Calls `arrive` after a delay if both ends hold their connections until then."""
        if self.is_cut_off(sender):
            return
        loop = asyncio.get_running_loop()
        sessions = sender.session, receiver.session
        at_s = max(loop.time() + self._random.uniform(*self.faults.delay_s), receiver.last_arrival_s + _TICK_S)
        receiver.last_arrival_s = at_s

        def on_arrival() -> None:
            is_there = receiver.is_connected and not self.is_cut_off(receiver)
            if is_there and sessions == (sender.session, receiver.session):
                arrive()

        loop.call_at(at_s, on_arrival)


class _Registration:
    """A subscription: membership in a list of the hub."""

    def __init__(self, members: list[Any], member: Any) -> None:
        self._members = members
        self._member = member
        members.append(member)

    async def stop(self) -> None:
        if self._member in self._members:
            self._members.remove(self._member)


class MemoryBus(Bus):
    """Made by `MemoryHub.connect`."""

    def __init__(self, hub: MemoryHub, name: str, registry: CollectorRegistry | None) -> None:
        self.name = name
        self.session = 0
        """Grows with each connection; what was under way in an older one is lost."""
        self.last_arrival_s = 0.0
        self.is_closed = False
        self.watches: set[MemoryWatch[Any]] = set()
        self.hub = hub
        self._is_connected = hub.is_up
        self._away_since_s = 0.0
        self._metrics = bus_metrics(registry)
        self._metrics.connected.set(self._is_connected)
        self._servers: set[EndpointServer] = set()
        self._registrations: list[_Registration] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._buffered: list[tuple[str, bytes]] = []
        self._reconnect_callbacks: list[Callable[[], None]] = []

    # ---------------------------------------------------------------------------------------------- connection

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def away_s(self) -> float:
        return 0.0 if self._is_connected else self.now() - self._away_since_s

    @property
    def problems(self) -> list[str]:
        return [] if self._is_connected else ["not connected"]

    @property
    def storage_problem(self) -> str:
        return ""

    @property
    def max_payload_bytes(self) -> int:
        return MAX_PAYLOAD_BYTES

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def lose_connection(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        self._away_since_s = self.now()
        self.session += 1
        self._metrics.connected.set(0)
        for watch in self.watches:
            watch.pause()
        for future in self._waiting:
            if not future.done():
                future.set_exception(BusError(ErrorInfo(ErrorCode.UNAVAILABLE, "the connection was lost")))

    def restore_connection(self) -> None:
        if self._is_connected or self.is_closed or not self.hub.is_up:
            return
        self._is_connected = True
        self._metrics.connected.set(1)
        self._metrics.reconnects.inc()
        for watch in self.watches:
            watch.reopen()
        buffered, self._buffered = self._buffered, []
        for subject, body in buffered:
            self._send(subject, body)
        for callback in list(self._reconnect_callbacks):
            try:
                callback()
            except Exception:
                logger.exception("a reconnect callback failed")

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._reconnect_callbacks.append(callback)
        return lambda: self._reconnect_callbacks.remove(callback)

    async def call(self, operation: Callable[[], T]) -> T:
        """Runs `operation` at the hub, as a JetStream call: there and back with delays."""
        self._check_connected()
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def at_hub() -> None:
            try:
                result = operation()
            except BusError as error:
                self.hub.transfer(self, self, lambda raised=error: _fail(outcome, raised))  # type: ignore[misc]
            else:
                self.hub.transfer(self, self, lambda: _succeed(outcome, result))

        self.hub.transfer(self, self, at_hub)
        return await self._answer(outcome, CALL_TIMEOUT_S, "the server")

    def _check_connected(self) -> None:
        if not self._is_connected:
            raise BusError(ErrorInfo(ErrorCode.UNAVAILABLE, "not connected"))

    async def _answer(self, future: asyncio.Future[T], timeout_s: float, peer: str) -> T:
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            message = f"{peer} did not answer within {timeout_s:.3g} s"
            raise BusError(ErrorInfo(ErrorCode.DEADLINE, message)) from None
        finally:
            self._waiting.discard(future)

    async def stream_uses(self) -> dict[str, StreamUse]:
        """None: the hub has buckets, but no streams under them."""
        await self.call(lambda: None)
        return {}

    async def round_trip_s(self) -> float:
        started_s = self.now()
        await self.call(lambda: None)
        return self.now() - started_s

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for registration in self._registrations:
            await registration.stop()
        for watch in list(self.watches):
            await watch.stop()
        await asyncio.gather(*(server.wait_idle(CLOSE_TIMEOUT_S) for server in self._servers))
        if self._is_connected and not self.hub.is_cut_off(self):
            await self.round_trip_s()  # what was sent before has arrived by then
        self.lose_connection()

    # --------------------------------------------------------------------------------------- publish/subscribe

    def publish(self, topic: Topic[M], message: M, *, traced: bool = False) -> None:
        body = encode(message)
        pattern = subject_pattern(topic.subject)
        if len(body) > MAX_PAYLOAD_BYTES:
            logger.error("a message of %d bytes on %s is too large and is dropped", len(body), topic.subject)
            self._metrics.dropped.labels(pattern, "too_large").inc()
        elif self._is_connected:
            self._metrics.published.labels(pattern).inc()
            self._send(topic.subject, body)
        elif len(self._buffered) < MAX_BUFFERED and not self.is_closed:
            self._metrics.published.labels(pattern).inc()
            self._buffered.append((topic.subject, body))
        else:
            self._metrics.dropped.labels(pattern, "no_room").inc()

    def _send(self, subject: str, body: bytes) -> None:
        for receiver, handler in self.hub.subject(subject).handlers:
            self.hub.send(self, receiver, lambda handler=handler: handler(body))  # type: ignore[misc]

    async def subscribe(self, topic: Topic[M], handler: Callable[[M], None]) -> Subscription:
        decode = decoder(topic.type).decode
        handlers = self.hub.subject(topic.subject).handlers

        def on_message(body: bytes) -> None:
            if member not in handlers:
                return
            try:
                handler(decode(body))
            except UNREADABLE as error:
                self._metrics.dropped.labels(subject_pattern(topic.subject), "unreadable").inc()
                logger.error("a message on %s cannot be read: %s", topic.subject, error)
            except Exception:
                logger.exception("the handler of %s failed", topic.subject)

        member = (self, on_message)
        return self._register(handlers, member)

    def _register(self, members: list[Any], member: Any) -> Subscription:
        registration = _Registration(members, member)
        self._registrations.append(registration)
        return registration

    # ------------------------------------------------------------------------------------------- request/reply

    async def request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> R:
        pattern = subject_pattern(endpoint.subject)
        started_s = self.now()
        outcome = "ok"
        try:
            return await self._request(endpoint, query, timeout_s)
        except BusError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.requests.labels(pattern, outcome).inc()
            self._metrics.request_seconds.labels(pattern).observe(self.now() - started_s)

    def send_request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> asyncio.Future[R]:
        return asyncio.get_running_loop().create_task(self.request(endpoint, query, timeout_s=timeout_s))

    async def _request(self, endpoint: Endpoint[Q, R], query: Q, timeout_s: float) -> R:
        self._check_connected()
        subject = endpoint.subject
        body = encode(query)
        if len(body) > MAX_PAYLOAD_BYTES:
            message = f"a request of {len(body)} bytes on {subject} exceeds the limit of {MAX_PAYLOAD_BYTES} bytes"
            raise BusError(ErrorInfo(ErrorCode.BAD_REQUEST, message))
        outcome: asyncio.Future[tuple[bytes, ErrorInfo | None]] = asyncio.get_running_loop().create_future()
        chosen = self.hub.choose_server(subject)
        if chosen is None:
            unavailable = BusError(ErrorInfo(ErrorCode.UNAVAILABLE, f"nobody serves {subject}"))
            self.hub.transfer(self, self, lambda: _fail(outcome, unavailable))
        else:
            peer, server = chosen
            traceparent = current_traceparent()

            def answer(body: bytes, error: ErrorInfo | None) -> None:
                if len(body) > MAX_PAYLOAD_BYTES:
                    error = ErrorInfo(ErrorCode.INTERNAL, f"the reply of {len(body)} bytes exceeds the limit")
                    body = encode(error)
                if peer.is_connected:
                    self.hub.send(peer, self, lambda: _succeed(outcome, (body, error)))

            self.hub.send(self, peer, lambda: server.accept(body, timeout_s, traceparent, answer))
        data, error = await self._answer(outcome, timeout_s, subject)
        reply: R = decode_reply(endpoint.reply, subject, {ERROR_HEADER: b""} if error else {}, data)
        return reply

    async def serve(
        self, endpoint: Endpoint[Q, R], handler: Callable[[Q], Awaitable[R] | R], *, max_concurrency: int = 64
    ) -> Subscription:
        server = EndpointServer(endpoint, handler, max_concurrency, self._metrics)
        self._servers.add(server)
        return self._register(self.hub.subject(endpoint.subject).servers, (self, server))

    # ----------------------------------------------------------------------------------------------- JetStream

    async def key_value(self, bucket: Bucket[M], *, max_bytes: int | None = None) -> KeyValue[M]:
        await self.call(lambda: self.hub.store.bucket(bucket))
        return MemoryKeyValue(self, bucket)

    async def object_store(self, bucket: ObjectBucket) -> ObjectStore:
        await self.call(lambda: self.hub.store.objects(bucket))
        return MemoryObjectStore(self, bucket)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BusError) -> None:
    if not future.done():
        future.set_exception(error)
