"""The placement service as a process: contends for the lease, watches the nodes, and plans while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from services.placement.active import ActivePlacement
from services.placement.backends.interface import ScalingBackend
from services.placement.backends.local import LocalBackend
from services.placement.checkpoints import Checkpoints, read_shape
from services.placement.metrics import NatsMetrics, PlacementMetrics
from services.placement.registry import Registry
from services.placement.remembered import Remembered
from services.placement.replacing import Search, replacement_settings
from services.placement.searching import search_elsewhere
from shared.bus.interface import Bus, BusError, Watch
from shared.messages.catalogue import ADAPTERS, MODELS, NODES, buckets_declared_by
from shared.messages.channels import Role
from shared.messages.cluster import AdapterSpec, ModelSpec, NodeInfo
from shared.models.checkpoint import CheckpointShape
from shared.models.spec import check_spec
from shared.runtime.lease import Lease
from shared.runtime.settings import PlacementSettings, SettingsError, default_id
from shared.runtime.telemetry import Telemetry


def scaling_backend(bus: Bus, settings: PlacementSettings) -> ScalingBackend:
    """`SettingsError` if the settings' cannot be used here."""
    match settings.scaling_backend:
        case "local":
            return LocalBackend(bus)
        case "kubernetes":
            from services.placement.backends.api_server import ApiServer
            from services.placement.backends.kubernetes import KubernetesBackend

            return KubernetesBackend(ApiServer.in_cluster(), settings.kubernetes_workload)
    raise SettingsError(f"TIDEWAY_SCALING_BACKEND={settings.scaling_backend!r}: expected local or kubernetes")


class PlacementService:
    """One replica. Any number may run; one of them is active. `read`: how a checkpoint's shape is found (blocking).
    `backend`: in place of the settings'. `search`: for a placement."""

    def __init__(
        self,
        bus: Bus,
        settings: PlacementSettings,
        telemetry: Telemetry,
        read: Callable[[str], CheckpointShape] = read_shape,
        backend: ScalingBackend | None = None,
        search: Search = search_elsewhere,
    ) -> None:
        self.placement_id = settings.placement_id or default_id("placement")
        self._seeds = settings.model_specs()
        for seed in self._seeds:
            try:
                check_spec(seed)
            except BusError as error:
                raise SettingsError(f"TIDEWAY_MODELS: {error.info.message}") from None
        if settings.interval_s <= 0:
            raise SettingsError(f"TIDEWAY_INTERVAL_S={settings.interval_s:g}: expected more than 0")
        replacement_settings(settings)
        self._search = search
        self._backend = backend or scaling_backend(bus, settings)
        self._bus = bus
        self._settings = settings
        self._telemetry = telemetry
        self._metrics = PlacementMetrics(telemetry.registry)
        self._nats_metrics = NatsMetrics(telemetry.registry)
        self._looking: asyncio.Task[None] | None = None
        self._checkpoints = Checkpoints(self._wake, read)
        self._remembered = Remembered(settings.models_file, MODELS, msgspec.json.Decoder(list[ModelSpec]))
        adapters_file = f"{settings.models_file}.adapters" if settings.models_file else ""
        self._remembered_adapters = Remembered(adapters_file, ADAPTERS, msgspec.json.Decoder(list[AdapterSpec]))
        self._lease = Lease(bus, "placement", self.placement_id, self._on_gain, self._on_lose)
        self._nodes: Watch[NodeInfo] | None = None
        self._active: ActivePlacement | None = None

    @property
    def is_active(self) -> bool:
        return self._active is not None and self._active.is_open and self._lease.is_held

    async def start(self) -> None:
        # Also those that are not used here: the other services may not make them.
        for bucket in buckets_declared_by(Role.PLACEMENT):
            await self._bus.key_value(bucket)
        self._nodes = await (await self._bus.key_value(NODES)).watch(lambda *_: self._wake())
        await self._remembered.follow(self._bus, lambda: self._active is not None)
        await self._remembered_adapters.follow(self._bus, lambda: self._active is not None)
        await self._lease.start()
        self._looking = asyncio.create_task(self._nats_metrics.run(self._bus), name="streams of NATS")

    async def stop(self) -> None:
        """Hands over to a standby at once, if there is one. May be called twice."""
        if self._active is not None and self._lease.is_held:
            await self._active.flush()
        await self._lease.stop()
        await self._remembered.stop()
        await self._remembered_adapters.stop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._nodes is not None:
            await self._nodes.stop()
        await self._backend.close()

    def _registered(self) -> dict[str, NodeInfo]:
        return dict(self._nodes.entries) if self._nodes is not None else {}

    def _wake(self) -> None:
        if self._active is not None:
            self._active.wake()

    async def _on_gain(self, _term: int) -> None:
        self._active = ActivePlacement(
            bus=self._bus,
            settings=self._settings,
            seeds=self._seeds,
            metrics=self._metrics,
            tracer=self._telemetry.tracer,
            registry=Registry(self._settings, self._checkpoints, self._remembered, self._remembered_adapters),
            backend=self._backend,
            registered=self._registered,
            is_leader=lambda: self._lease.is_held,
            search=self._search,
        )
        await self._active.open()
        self._metrics.is_leader.set(1)

    async def _on_lose(self) -> None:
        self._metrics.is_leader.set(0)
        if self._active is not None:
            active, self._active = self._active, None
            await active.close()
