"""The gateway as a whole: its parts put together, and the HTTP server that runs on the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import uvicorn

from services.gateway.access.admission import (
    Admission,
    KeyFiles,
    TenantPolicy,
    named_tenants,
    read_admin_keys,
    read_keys,
)
from services.gateway.access.key_uses import SharedKeyUses
from services.gateway.admin.audit import Audit
from services.gateway.admin.cluster_loads import ClusterLoads
from services.gateway.app import make_app
from services.gateway.batch.files import Files
from services.gateway.batch.records import Batches
from services.gateway.batch.service import BatchService
from services.gateway.console.history import History
from services.gateway.console.state import Console
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import BodyRoom
from services.gateway.http.ignored_fields import IgnoredFields
from services.gateway.http.limits import Connections, LimitedProtocol
from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import Catalog
from services.gateway.models.routes import Routes
from services.gateway.requests.kept_calls import KeptCalls
from services.gateway.requests.mirrors import Mirrors
from services.gateway.responses.background import Background
from services.gateway.responses.store import Responses
from services.gateway.streams.placing import Placer
from services.gateway.streams.stream_table import StreamTable
from services.gateway.streams.timelines import Timelines
from services.gateway.text.pool import TextPool
from services.gateway.text.tokenization import Tokenizers
from shared.bus.interface import Bus
from shared.runtime.settings import GatewaySettings, SettingsError, default_id
from shared.runtime.tasks import TaskSet
from shared.runtime.telemetry import Telemetry
from shared.runtime.tls import is_loopback, server_tls

logger = logging.getLogger(__name__)

BACKLOG = 2048
ENDING_S = 5.0
"""Time at a stop for what is left after all graces to be told so."""
OTHER_DESCRIPTORS = 256
"""Descriptors of the process that are no connections of clients."""
LEAST_CONNECTIONS = 64
"""With fewer a gateway would look ready, and serve next to nobody."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts like uvicorn's server on sockets that listen, which leaves clients a minute for the handshake of TLS."""
        loop, config = asyncio.get_running_loop(), self.config

        def create_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )

        timeout_s = None if config.ssl is None else self._handshake_timeout_s
        self.servers = [
            await loop.create_server(
                create_protocol, sock=sock, ssl=config.ssl, ssl_handshake_timeout=timeout_s, backlog=config.backlog
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's, see shared.runtime.service


class GatewayService:
    def __init__(self, bus: Bus, settings: GatewaySettings, telemetry: Telemetry) -> None:
        """Raises `SettingsError`."""
        gateway_id = settings.gateway_id or default_id("gateway")
        keys = read_keys(settings)
        metrics = GatewayMetrics(telemetry.registry, named_tenants(keys))
        tokenizers = Tokenizers(TextPool(settings, metrics))
        catalog = Catalog(bus, tokenizers)
        loads, batches = ClusterLoads(bus, catalog), Batches(bus)
        self._placer = Placer(bus, catalog, metrics, settings.max_submissions)
        timelines = Timelines(bus, gateway_id, settings.max_timelines, settings.timeline_s, catalog.objectives_ms)
        table = StreamTable(bus, gateway_id, catalog, self._placer, metrics, timelines)
        tenants = TenantPolicy(settings)
        self._key_uses = SharedKeyUses(bus, gateway_id, metrics)
        admission = Admission(keys, read_admin_keys(settings), settings.max_in_flight, tenants, self._key_uses)
        responses = Responses(bus, metrics, settings.max_responses_bytes)
        self.context = GatewayContext(
            gateway_id=gateway_id,
            settings=settings,
            bus=bus,
            telemetry=telemetry,
            metrics=metrics,
            admission=admission,
            connections=Connections(_within_descriptors(settings), metrics),
            bodies=BodyRoom(settings.max_body_bytes, settings.max_body_bytes_in_flight, IgnoredFields(metrics)),
            tokenizers=tokenizers,
            catalog=catalog,
            routes=Routes(bus, catalog),
            responses=responses,
            background=Background(responses, metrics),
            mirrors=Mirrors(),
            loads=loads,
            table=table,
            kept=KeptCalls(bus, gateway_id, table, metrics, settings, lambda: self._key_uses.gateways),
            timelines=timelines,
            files=Files(bus),
            batches=batches,
            audit=Audit(bus, gateway_id, metrics),
            console=Console(bus, gateway_id, catalog, loads, timelines, batches),
            history=History(bus, catalog, loads),
        )
        self._key_files = KeyFiles(settings, admission, metrics)
        self._batch_service = BatchService(self.context)
        self._tls = server_tls(settings)
        self.port = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Returns when HTTP requests are taken. Raises `SettingsError` where the port cannot be had."""
        context = self.context
        listener = _listen(context.settings.host, context.settings.port)
        self.port = listener.getsockname()[1]
        self._placer.start()
        await context.catalog.start(context.table.on_instance)
        await context.routes.start()
        await context.responses.start()
        await context.loads.start()
        await context.timelines.start()
        await context.table.start()
        await context.kept.start()
        await context.files.start()
        await context.batches.start()
        await context.audit.start()
        await context.history.start()
        await self._key_uses.start()
        await self._batch_service.start()
        tls = self._tls
        config = uvicorn.Config(
            make_app(context),
            http=functools.partial(LimitedProtocol, context.connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=context.settings.client_keep_alive_s,
            timeout_graceful_shutdown=int(context.settings.stop_grace_s + 2 * ENDING_S),
            backlog=BACKLOG,
            ssl_context_factory=(lambda *_: tls) if tls is not None else None,
        )
        self._server = _Server(config, context.settings.head_timeout_s)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._tasks.start(self._key_files.watch_forever(), "files of keys")
        self._tasks.start(context.connections.sweep_forever())
        self._tasks.start(context.history.record_forever(), "console history")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        self._say_who_may_enter()

    async def stop(self) -> None:
        """Is not ready for `leave_s`, during which it still serves all that comes; then takes no new connection, and lets
        answers finish for `stop_grace_s`; then ends them with an error. Those that are kept go on, and are resumed
        elsewhere."""
        settings = self.context.settings
        self.context.connections.is_leaving = True
        # Others may answer the lines meanwhile.
        await self._batch_service.stop()
        if self._server is not None and self._serving is not None:
            if not self._serving.done():
                await asyncio.sleep(settings.leave_s)
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=settings.stop_grace_s)
        await self.context.mirrors.stop()
        await self.context.kept.stop()
        await self.context.table.stop()
        await self.context.background.stop()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=ENDING_S)
        if self._server is not None and self._serving is not None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await self._serving
        await self._tasks.end_all()
        await self._key_uses.stop()
        self._placer.stop()
        await self.context.history.stop()
        await self.context.timelines.stop()
        await self.context.loads.stop()
        await self.context.routes.stop()
        await self.context.catalog.stop()
        await self.context.tokenizers.close()

    def _say_who_may_enter(self) -> None:
        settings = self.context.settings
        address = f"http{'s' if self._tls else ''}://{settings.host}:{self.port}"
        if not self.context.admission.is_open:
            logger.info("listening on %s; API keys are required", address)
        elif is_loopback(settings.host):
            logger.info("listening on %s; no API keys are configured, so every local process may use it", address)
        else:
            logger.warning(
                "listening on %s WITHOUT API KEYS: everybody who reaches this address may use the models%s. "
                "Set TIDEWAY_API_KEYS or TIDEWAY_API_KEYS_FILE.",
                address,
                "" if self.context.admission.has_admin_keys else " and the admin API",
            )


def _within_descriptors(settings: GatewaySettings) -> GatewaySettings:
    """No more connections than this process may have descriptors for. Raises `SettingsError` where those are too few."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or settings.max_connections <= limit - OTHER_DESCRIPTORS:
        return settings
    most = limit - OTHER_DESCRIPTORS
    if most < LEAST_CONNECTIONS:
        raise SettingsError(
            f"This process may have {limit} descriptors, of which a gateway needs {OTHER_DESCRIPTORS} for other things than "
            f"clients: raise the limit to {OTHER_DESCRIPTORS + LEAST_CONNECTIONS} or more (ulimit -n)."
        )
    logger.warning(
        "this process may have %d descriptors, so that it takes %d connections at most and not %d "
        "(TIDEWAY_MAX_CONNECTIONS); raise it with ulimit -n",
        limit,
        most,
        settings.max_connections,
    )
    return msgspec.structs.replace(settings, max_connections=most)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit it. asyncio sets it only on sockets made with an explicit protocol number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(
            f"The gateway cannot listen on {host}:{port}: {reason}. Choose another address with TIDEWAY_HOST and "
            "TIDEWAY_PORT."
        ) from None
