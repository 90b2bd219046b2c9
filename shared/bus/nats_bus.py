"""The bus on a NATS server: connection, publish/subscribe and request/reply. JetStream is in `nats_key_value`
and `nats_objects`.

Deadlines travel as seconds left (`Tideway-Timeout`); a handler that is not done by then is cancelled and answered
DEADLINE. While disconnected, publications are buffered up to `MAX_PENDING_BYTES` and sent after the reconnect; requests
end with UNAVAILABLE at once, those in flight too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
from prometheus_client import CollectorRegistry

from shared.bus.codec import (
    TRACE_HEADER,
    UNREADABLE,
    DamagedError,
    decode_reply,
    decoder,
    encode,
    error_headers,
    opened,
    parse_headers,
    request_headers,
    sealed,
    timeout_of,
    trace_headers,
)
from shared.bus.interface import Bus, BusError, KeyValue, ObjectStore, StreamUse, Subscription
from shared.bus.metrics import BusMetrics, bus_metrics, subject_pattern
from shared.bus.micro import MicroService
from shared.bus.nats_client import DirectClient, NotPermittedError
from shared.bus.nats_key_value import NatsKeyValue
from shared.bus.nats_objects import NatsObjectStore
from shared.bus.nats_streams import Streams
from shared.bus.nats_watch import NatsWatch
from shared.bus.permissions import declared_streams, inbox_prefix, role_of
from shared.bus.serving import EndpointServer
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Topic
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.settings import BusSettings, SettingsError
from shared.runtime.telemetry import current_traceparent
from shared.runtime.tls import client_tls

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")

logger = logging.getLogger(__name__)

PING_INTERVAL_S, LONE_PING_INTERVAL_S = 0.8, 5
"""Intervals with other servers to go to, and with a lone one: to leave one that hangs would lose what is under way."""
MAX_OUTSTANDING_PINGS = 2
"""After three intervals without a pong the server is left."""
CONNECT_TIMEOUT_S = 1.5
FLUSH_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
"""Time for running handlers to end at `close`."""
COMPLAINT_INTERVAL_S = 10.0
"""Between two lines about the same missing server."""
RESTORE_RETRY_S = 0.2
RESTORE_WITHIN_S = 0.7
"""After a reconnect; a stream that cannot be had by then, as it has no leader, keeps nobody from what needs none."""


_FROM_JETSTREAM = b"\r\nNats-Stream:"


def unavailable(message: str) -> BusError:
    return BusError(ErrorInfo(ErrorCode.UNAVAILABLE, message))


def _address(url: str) -> str:
    """Host and port, without the credentials that a URL may hold."""
    try:
        parts = urlsplit(url if "://" in url else "nats://" + url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise ValueError
        return f"{parts.hostname}:{parts.port or 4222}"
    except ValueError:
        raise SettingsError("TIDEWAY_NATS_URL: expected nats://HOST:PORT, or several with commas between") from None


class _DirectSubscription:
    def __init__(self, client: DirectClient, sid: int) -> None:
        self._client = client
        self._sid = sid

    async def stop(self) -> None:
        self._client.unsubscribe_direct(self._sid)


class _ServedSubscription:
    def __init__(self, client: DirectClient, sid: int, server: EndpointServer, service: MicroService) -> None:
        self._client = client
        self._sid = sid
        self._server = server
        self._service = service

    async def stop(self) -> None:
        self._service.remove(self._server)
        await self._client.drain_direct([self._sid], FLUSH_TIMEOUT_S)


class NatsBus(Bus):
    """Made by `connect`."""

    def __init__(self, settings: BusSettings, service: str, service_id: str, metrics: BusMetrics) -> None:
        self._settings = settings
        self._name = f"tideway-{service}/{service_id}"
        self._urls = [url.strip() for url in settings.nats_url.split(",")]
        self._address = ", ".join(map(_address, self._urls))
        self._metrics = metrics
        self._client = DirectClient(self._on_disconnect)
        role = role_of(settings.nats_user)
        self._streams = Streams(
            self._client,
            None if role is None else declared_streams(role),
            num_replicas=settings.nats_replicas,
            wait_s=settings.nats_wait_s,
        )
        self._watches: set[NatsWatch[Any]] = set()
        self._service = MicroService(self._client, f"tideway-{service}", service_id)
        self._servers: dict[int, EndpointServer] = {}
        """By subscription id."""
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._restoring: asyncio.Task[None] | None = None
        self._last_complaint_s = -COMPLAINT_INTERVAL_S
        metrics.problems.set_function(lambda: len(self.problems) + len(self.damages))
        self._is_ready = False
        self._away_since_s = time.monotonic()
        self._is_closing = False

    @classmethod
    async def connect(
        cls, settings: BusSettings, service: str, service_id: str, registry: CollectorRegistry | None = None
    ) -> NatsBus:
        """Returns when NATS answers, however long that takes; says so in the log meanwhile. `SettingsError` if the URL
        or the files for TLS cannot be used."""
        bus = cls(settings, service, service_id, bus_metrics(registry))
        try:
            await bus._connect()
        except BaseException:
            await bus._client.close()
            raise
        return bus

    async def _connect(self) -> None:
        await self._client.connect(
            # In an order that is each process's own, and stays: nats-py would shuffle again at each loss, and might first
            # try the server that hangs.
            random.sample(self._urls, len(self._urls)),
            dont_randomize=True,
            name=self._name,
            user=self._settings.nats_user or None,
            password=self._settings.nats_password or None,
            tls=client_tls(self._settings),
            inbox_prefix=inbox_prefix(self._settings.nats_user),
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            max_reconnect_attempts=-1,
            # Drawn once a process, so that a cluster does not come back in one instant.
            reconnect_time_wait=random.uniform(0.2, 0.5),  # type: ignore[arg-type]
            connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]
            ping_interval=LONE_PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
        )
        self._pace_pings()
        self._service.start()
        await self._flush()
        self._set_ready(True)

    def _pace_pings(self) -> None:
        """By the servers that are known now, of which the server tells."""
        has_others = len(self._client.servers) > 1
        self._client.options["ping_interval"] = PING_INTERVAL_S if has_others else LONE_PING_INTERVAL_S

    def _set_ready(self, is_ready: bool) -> None:
        if self._is_ready and not is_ready:
            self._away_since_s = self.now()
        self._is_ready = is_ready
        self._metrics.connected.set(is_ready)

    # ---------------------------------------------------------------------------------------------- connection

    @property
    def is_connected(self) -> bool:
        """False also for a moment after a reconnect, in which buckets and watches are restored."""
        return self._is_ready and self._client.is_connected

    @property
    def away_s(self) -> float:
        # The client may know of a loss already that this bus is about to be told.
        return 0.0 if self._is_ready else self.now() - self._away_since_s

    @property
    def problems(self) -> list[str]:
        if not self.is_connected:
            return [f"not connected to NATS since {self.away_s:.0f} s"]
        # A copy: whoever scrapes metrics asks from another thread.
        found = [watch.problem for watch in list(self._watches)] + [self.storage_problem]
        return sorted(problem for problem in found if problem)

    @property
    def damages(self) -> list[str]:
        return self._streams.damages()

    @property
    def storage_problem(self) -> str:
        names = ", ".join(sorted(self._streams.unwritable))
        return f"NATS cannot store on its disk, which seems to be full ({names})" if names else ""

    @property
    def max_payload_bytes(self) -> int:
        return int(self._client.max_payload)

    def now(self) -> float:
        # Not the loop's clock: uvloop's stands still within a turn of the loop.
        return time.monotonic()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._metrics.slow_consumer.inc()
        if isinstance(error, NotPermittedError):
            self._metrics.refused.inc()
            logger.error("NATS refuses user %r the subject %s", self._settings.nats_user, error.subject)
            return
        if self._is_closing or isinstance(error, nats.errors.UnexpectedEOF):  # a loss is logged when it is handled
            return
        if self._client.is_connected:
            logger.warning("NATS: %s", str(error) or type(error).__name__)
        elif self.now() - self._last_complaint_s >= COMPLAINT_INTERVAL_S:
            self._last_complaint_s = self.now()
            logger.warning("waiting for NATS at %s: %s", self._address, str(error) or type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._client.lost_connection()

    def _on_disconnect(self) -> None:
        self._set_ready(False)
        for watch in self._watches:
            watch.pause()
        if self._restoring is not None:
            self._restoring.cancel()
        if not self._is_closing:
            logger.warning("lost the connection to NATS at %s", self._address)

    async def _on_reconnected(self) -> None:
        self._pace_pings()
        # In a task of its own: nats-py waits for this callback before it handles the next loss.
        self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def _restore(self) -> None:
        """After a reconnect nats-py has subscribed again; now buckets and watches, then the callbacks. What takes longer
        goes on behind them."""
        declaring = asyncio.get_running_loop().create_task(self._declare_again())
        try:
            work = [declaring, *(watch.reopen() for watch in list(self._watches))]
            await asyncio.wait(work, timeout=RESTORE_WITHIN_S)
            # Nothing else runs between this and the last callback: whoever sees the bus connected has been told.
            self._set_ready(True)
            self._metrics.reconnects.inc()
            logger.warning("connected to NATS at %s again", self._address)
            for callback in list(self._reconnect_callbacks):
                try:
                    callback()
                except Exception:
                    logger.exception("a reconnect callback failed")
            await declaring
        finally:
            declaring.cancel()

    async def _declare_again(self) -> None:
        """Until it succeeds. A new loss of connection cancels it."""
        while True:
            try:
                return await self._streams.declare_again()
            except BusError as error:
                # JetStream starts later than the server's socket.
                logger.info("JetStream is not ready: %s", error)
            except Exception:
                logger.exception("restoring buckets failed; trying again")
            await asyncio.sleep(RESTORE_RETRY_S)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._reconnect_callbacks.append(callback)
        return lambda: self._reconnect_callbacks.remove(callback)

    async def _flush(self) -> None:
        try:
            await self.round_trip_s()
        except BusError as error:
            # While disconnected there is nothing to flush: the reconnect subscribes.
            if error.code != ErrorCode.UNAVAILABLE:
                raise

    @property
    def streams(self) -> Streams:
        """JetStream's streams, for the operator's command, which moves them."""
        return self._streams

    async def stream_uses(self) -> dict[str, StreamUse]:
        return await self._streams.uses()

    async def _confirm(self, sid: int) -> None:
        """Until the server has a subscription. Raises `BusError` where it refuses it."""
        await self._flush()
        if refused := self._client.refused.get(sid):
            raise BusError(ErrorInfo(ErrorCode.NOT_PERMITTED, str(refused)))

    async def round_trip_s(self) -> float:
        started_s = self.now()
        try:
            await self._client.ping(FLUSH_TIMEOUT_S)
        except nats.errors.TimeoutError:
            raise BusError(ErrorInfo(ErrorCode.DEADLINE, f"NATS did not answer in {FLUSH_TIMEOUT_S} s")) from None
        except nats.errors.Error as error:
            raise unavailable(str(error)) from None
        return self.now() - started_s

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._restoring is not None:
            self._restoring.cancel()
        for watch in list(self._watches):
            watch.close()
        await self._client.drain_direct(self._servers, CLOSE_TIMEOUT_S)
        await asyncio.gather(*(server.wait_idle(CLOSE_TIMEOUT_S) for server in self._servers.values()))
        try:
            await self._client.ping(CLOSE_TIMEOUT_S)
            await self._client.close()
        except (nats.errors.Error, OSError) as error:
            logger.info("closed without flushing: %s", error)
            await self._client.close()
        self._set_ready(False)

    # --------------------------------------------------------------------------------------- publish/subscribe

    def publish(self, topic: Topic[M], message: M, *, traced: bool = False) -> None:
        body = sealed(encode(message))
        headers = trace_headers(current_traceparent()) if traced else b""
        if len(headers) + len(body) > self.max_payload_bytes:
            logger.error("a message of %d bytes on %s exceeds NATS's limit and is dropped", len(body), topic.subject)
            self._metrics.dropped.labels(subject_pattern(topic.subject), "too_large").inc()
        elif self._client.send(topic.subject, "", headers, body):
            self._metrics.published.labels(subject_pattern(topic.subject)).inc()
        else:
            self._metrics.dropped.labels(subject_pattern(topic.subject), "no_room").inc()

    async def subscribe(self, topic: Topic[M], handler: Callable[[M], None]) -> Subscription:
        decode = decoder(topic.type).decode
        pattern = subject_pattern(topic.subject)
        unreadable, damaged = (self._metrics.dropped.labels(pattern, why) for why in ("unreadable", "damaged"))

        def on_message(subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
            if self._is_redirected(topic.subject, subject, headers):
                return
            try:
                message = decode(opened(data))
            except UNREADABLE as error:
                (damaged if isinstance(error, DamagedError) else unreadable).inc()
                logger.error("a message on %s cannot be read: %s", topic.subject, error)
                return
            handler(message)

        sid = self._client.subscribe_direct(topic.subject, on_message)
        await self._confirm(sid)
        return _DirectSubscription(self._client, sid)

    def _is_redirected(self, expected: str, subject: bytes, headers: bytes | None) -> bool:
        """JetStream hands entries of a bucket to any subject that a reader of the bucket names, whatever that reader may
        publish: under the entry's own subject (a consumer), or with its origin in the headers (a direct get)."""
        is_own = subject.decode(errors="replace") == expected or "*" in expected
        if is_own and (headers is None or _FROM_JETSTREAM not in headers):
            return False
        self._metrics.dropped.labels(subject_pattern(expected), "redirected").inc()
        logger.error("a message on %s was not sent there but redirected from JetStream; it is ignored", expected)
        return True

    # ------------------------------------------------------------------------------------------- request/reply

    async def request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> R:
        return await self.send_request(endpoint, query, timeout_s=timeout_s)

    def send_request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> asyncio.Future[R]:
        started_s = self.now()
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        body = sealed(encode(query))
        headers = request_headers(timeout_s, current_traceparent())
        exchange = self._client.exchange(endpoint.subject, headers, body, timeout_s)

        def on_end(_: object) -> None:
            outcome = "ok"
            try:
                reply = self._reply(endpoint, exchange, len(body), timeout_s)
                if not result.done():
                    result.set_result(reply)
            except Exception as error:  # of whatever kind: nobody else tells who waits
                outcome = error.code if isinstance(error, BusError) else ErrorCode.INTERNAL
                if not result.done():
                    result.set_exception(error)
            pattern = subject_pattern(endpoint.subject)
            self._metrics.requests.labels(pattern, outcome).inc()
            self._metrics.request_seconds.labels(pattern).observe(self.now() - started_s)

        exchange.add_done_callback(on_end)
        return result

    def _reply(
        self,
        endpoint: Endpoint[Q, R],
        exchange: asyncio.Future[tuple[dict[bytes, bytes], bytes]],
        num_bytes: int,
        timeout_s: float,
    ) -> R:
        """What came of an exchange that is over; `num_bytes`: of the query."""
        subject = endpoint.subject
        try:
            fields, data = exchange.result()
        except nats.errors.NoRespondersError:
            raise unavailable(f"nobody serves {subject}") from None
        except nats.errors.MaxPayloadError:
            limit = self.max_payload_bytes
            message = f"a request of {num_bytes} bytes on {subject} exceeds NATS's limit of {limit} bytes"
            raise BusError(ErrorInfo(ErrorCode.BAD_REQUEST, message)) from None
        except nats.errors.TimeoutError:
            raise BusError(ErrorInfo(ErrorCode.DEADLINE, f"no reply on {subject} within {timeout_s:.3g} s")) from None
        except NotPermittedError as error:
            raise BusError(ErrorInfo(ErrorCode.NOT_PERMITTED, str(error))) from None
        except nats.errors.Error as error:
            raise unavailable(f"{subject}: {error}") from None
        reply: R = decode_reply(endpoint.reply, subject, fields, data)
        return reply

    async def serve(
        self, endpoint: Endpoint[Q, R], handler: Callable[[Q], Awaitable[R] | R], *, max_concurrency: int = 64
    ) -> Subscription:
        server = EndpointServer(endpoint, handler, max_concurrency, self._metrics)

        def on_request(subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
            if self._is_redirected(endpoint.subject, subject, headers):
                return
            reply_subject = reply.decode()

            def answer(body: bytes, error: ErrorInfo | None) -> None:
                if len(body) > self.max_payload_bytes:
                    message = f"the reply of {len(body)} bytes exceeds NATS's limit of {self.max_payload_bytes} bytes"
                    error = ErrorInfo(ErrorCode.INTERNAL, message)
                    body = sealed(encode(error))
                    logger.error("%s: %s", endpoint.subject, message)
                self._client.send(reply_subject, "", error_headers(error) if error else b"", body)

            if not reply:
                logger.warning("a message on %s asks for no reply and is ignored", endpoint.subject)
                return
            fields = parse_headers(headers) if headers else {}
            traceparent = fields.get(TRACE_HEADER, b"").decode(errors="replace")
            server.accept(data, timeout_of(fields), traceparent, answer)

        sid = self._client.subscribe_direct(endpoint.subject, on_request, server.queue_group)
        self._servers[sid] = server
        self._service.add(server)
        await self._confirm(sid)
        return _ServedSubscription(self._client, sid, server, self._service)

    # ----------------------------------------------------------------------------------------------- JetStream

    async def key_value(self, bucket: Bucket[M], *, max_bytes: int | None = None) -> KeyValue[M]:
        key_value = NatsKeyValue(self._streams, bucket, self.now, self._watches, max_bytes)
        await key_value.provide()
        return key_value

    async def object_store(self, bucket: ObjectBucket) -> ObjectStore:
        store = NatsObjectStore(self._streams, bucket)
        await store.provide()
        return store
