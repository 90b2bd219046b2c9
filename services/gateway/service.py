"""The gateway as a whole: its parts put together, and the HTTP server that runs on the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator

import uvicorn

from services.gateway.admission import Admission, read_keys
from services.gateway.app import make_app
from services.gateway.batch_service import BatchService
from services.gateway.batches import Batches
from services.gateway.catalog import Catalog
from services.gateway.cluster_loads import ClusterLoads
from services.gateway.context import GatewayContext
from services.gateway.files import Files
from services.gateway.metrics import GatewayMetrics
from services.gateway.placing import Placer
from services.gateway.stream_table import StreamTable
from services.gateway.tokenization import Tokenizers
from shared.bus.interface import Bus
from shared.messages.cluster import InstanceInfo
from shared.settings import GatewaySettings, SettingsError, default_id
from shared.telemetry import Telemetry
from shared.tls import server_tls

logger = logging.getLogger(__name__)

BACKLOG = 2048
CLIENT_KEEP_ALIVE_S = 75
GRACE_S = 5.0
"""At a stop, open streams may go on for so long before they end with an error."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's, see shared.service


class GatewayService:
    def __init__(self, bus: Bus, settings: GatewaySettings, telemetry: Telemetry) -> None:
        """Raises `SettingsError`."""
        gateway_id = settings.gateway_id or default_id("gateway")
        metrics = GatewayMetrics(telemetry.registry)
        tokenizers = Tokenizers()
        catalog = Catalog(bus, tokenizers)
        self._placer = Placer(bus, catalog, metrics)
        table = StreamTable(bus, gateway_id, catalog, self._placer, metrics)
        admission = Admission(read_keys(settings), settings.admin_api_key, settings.max_in_flight)
        self.context = GatewayContext(
            gateway_id,
            settings,
            bus,
            telemetry,
            metrics,
            admission,
            tokenizers,
            catalog,
            ClusterLoads(bus, catalog),
            table,
            Files(bus),
            Batches(bus),
        )
        self._batch_service = BatchService(self.context)
        self._tls = server_tls(settings)
        self.port = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when HTTP requests are taken. Raises `SettingsError` where the port cannot be had."""
        context = self.context
        listener = _listen(context.settings.host, context.settings.port)
        self.port = listener.getsockname()[1]
        await context.catalog.start(self._on_instance)
        await context.loads.start()
        await context.table.start()
        await context.files.start()
        await context.batches.start()
        await self._batch_service.start()
        tls = self._tls
        config = uvicorn.Config(
            make_app(context),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=CLIENT_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GRACE_S),
            backlog=BACKLOG,
            ssl_context_factory=(lambda *_: tls) if tls is not None else None,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        self._say_who_may_enter()

    async def stop(self) -> None:
        """Takes no new connection, lets answers finish for `GRACE_S`, then ends them with an error."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=GRACE_S)
        await self._batch_service.stop()
        await self.context.table.stop()
        if self._serving is not None:
            await self._serving
        await self.context.loads.stop()
        await self.context.catalog.stop()
        self.context.tokenizers.close()

    def _on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        self.context.table.on_instance(instance_id, info)

    def _say_who_may_enter(self) -> None:
        settings = self.context.settings
        address = f"http{'s' if self._tls else ''}://{settings.host}:{self.port}"
        if not self.context.admission.is_open:
            logger.info("listening on %s; API keys are required", address)
        elif _is_loopback(settings.host):
            logger.info("listening on %s; no API keys are configured, so every local process may use it", address)
        else:
            logger.warning(
                "listening on %s WITHOUT API KEYS: everybody who reaches this address may use the models%s. "
                "Set TIDEWAY_API_KEYS or TIDEWAY_API_KEYS_FILE.",
                address,
                "" if settings.admin_api_key else " and the admin API",
            )


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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
