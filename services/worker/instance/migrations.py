"""What an instance has to do with requests that move: the transport of their KV, the migration service, and who has
to know of requests that come and go.

The transport opens beside everything else; an instance where it cannot be used serves requests all the same, and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from prometheus_client import Gauge

from services.worker.instance.models import KvUsers
from services.worker.instance.output_log import OutputLog
from services.worker.instance.peers import Peers
from services.worker.instance.telemetry import InstanceTelemetry
from services.worker.migration.service import Loop, MigrationService
from shared.bus.interface import Bus
from shared.engine import calls
from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.handover import Detached
from shared.engine.load_reports import NO_COPIES, LoadReports
from shared.messages.catalogue import GATEWAY_FRAMES
from shared.messages.cluster import InstanceInfo, KvCopies, MigrationOutcome
from shared.messages.migration import Commit, MigrationReason
from shared.messages.requests import (
    Cancel,
    GenerationRequest,
    MigratedRequest,
    TokenEntry,
    TokenFrame,
)
from shared.messages.timeline import EventKind, RequestEvent
from shared.migration.estimates import DEFAULT_BANDWIDTH_BYTES_S
from shared.migration.incoming import Intake, held_after
from shared.migration.limits import pool_of
from shared.policies.kv_backup import NO_BACKUP, BackupSettings
from shared.runtime.settings import InstanceSettings
from shared.runtime.tasks import TaskSet
from shared.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from services.worker.kv.kv_store import KvBlocks
    from services.worker.kv_transport.transport import KvTransport

log = logging.getLogger(__name__)

OpenTransport = Callable[[], Awaitable["KvTransport"]]
"""Opens the transport, or raises for whatever reason it cannot be used."""

OPEN_TIMEOUT_S = 60.0
"""Nobody waits for it, and one that has passed is not made good while the instance lives: a busy machine has to make it."""
PEERS_TIMEOUT_S = 2.0
CHANGED_SHARE = 0.25
"""By which the predicted time of a fetch may be off before it is told anew."""


class KvPools(Protocol):
    def block_rows(self, model: str, on_host: bool) -> KvBlocks:
        """`[num_blocks, block_bytes]` uint8: of a model's blocks, which stay where they are; no rows where there is no
        pool."""


class MovingLoop(Loop, Protocol):
    def held_epoch(self, request_id: str) -> int | None: ...


class MovingEvents(Protocol):
    """Timelines of requests that move."""

    def add(self, request: GenerationRequest, kind: EventKind, cause: str, place: str) -> None: ...

    def of_span(self, request_id: str) -> list[RequestEvent]: ...


class InstanceMigrations(KvUsers):
    """`open_transport` None: KV does not move, as where the settings say so."""

    def __init__(
        self,
        *,
        bus: Bus,
        settings: InstanceSettings,
        loop: MovingLoop,
        executor: KvPools,
        outputs: OutputLog,
        reports: LoadReports,
        metrics: InstanceTelemetry,
        events: MovingEvents,
        intake: Intake,
        telemetry: Telemetry,
        open_transport: OpenTransport | None,
        on_change: Callable[[], None],
        report_soon: Callable[[], None],
        backup: BackupSettings = NO_BACKUP,
        gives_prefixes: bool = False,
    ) -> None:
        """`on_change`: the registry entry is another; `report_soon`: there is something for the next load report."""
        self._bus = bus
        self._backup = backup
        self._gives_prefixes = gives_prefixes
        self._fetch_token_s: dict[str, float] = {}
        """By model, as the engine was told."""
        self._settings = settings
        self._loop = loop
        self._executor = executor
        self._outputs = outputs
        self._intake = intake
        self._reports = reports
        self._metrics = metrics
        self._events = events
        self._report_soon = report_soon
        self._on_change = on_change
        self._available = Gauge(
            "tideway_migration_available",
            "Whether requests move with their KV, 0 or 1",
            ("engine",),
            registry=telemetry.registry,
        ).labels(settings.instance_id)
        self._telemetry = telemetry
        self._open_transport = open_transport
        self._transport: KvTransport | None = None
        self._service: MigrationService | None = None
        self._models: set[str] = set()
        self._peers = Peers(bus, self._on_instance, self._needs_peers)
        self._starting = TaskSet()

    async def start(self) -> None:
        """Returns before requests can move."""
        self._starting.start(self._start_service(), "start of migrations")

    async def stop(self) -> None:
        """Ends migrations under way (those that are being committed first), then the transport."""
        await self._starting.end_all()
        if self._service is not None:
            await self._service.stop()
        if self._transport is not None:
            await self._transport.close()
        await self._peers.stop()

    async def _start_service(self) -> None:
        self._transport = await self._opened()
        for model in self._models:
            self._register(model)
        service = MigrationService(
            bus=self._bus,
            settings=self._settings,
            loop=self._loop,
            transport=self._transport,
            intake=self._intake,
            peers=self.peers,
            handovers=self,
            telemetry=self._telemetry,
            backup=self._backup,
            fetches=self._gives_prefixes,
        )
        await service.start()
        self._service = service
        self._available.set(self._transport is not None)
        self._on_change()

    async def _opened(self) -> KvTransport | None:
        reason = "the settings say so"
        if self._open_transport is not None and self._settings.migration != "off":
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    return await self._open_transport()
            except TimeoutError:
                reason = f"the KV transport did not open within {OPEN_TIMEOUT_S:g} s"
            # A library that cannot be used has many ways to say so, and none of them may end the instance.
            except Exception as error:
                reason = f"the KV transport cannot be used: {type(error).__name__}: {error}"
        log.warning("requests do not move to or from %s with their KV: %s", self._settings.instance_id, reason)
        return None

    # ------------------------------------------------------------------------------------------------- models

    def add_model(self, model: str) -> None:
        self._models.add(model)
        self._register(model)

    def give_away(self, model: str) -> None:
        if self._service is not None:
            self._service.give_away(model)

    def stop_giving(self, model: str) -> None:
        if self._service is not None:
            self._service.stop_giving(model)

    def end_drain(self) -> None:
        """The instance is not to become empty after all."""
        if self._service is not None:
            self._service.end_drain()

    def remove_model(self, model: str) -> None:
        self._models.discard(model)
        self._fetch_token_s.pop(model, None)
        if self._transport is not None:
            for on_host in (False, True):
                self._transport.unregister(pool_of(model, on_host))

    def _register(self, model: str) -> None:
        if self._transport is None:
            return
        for on_host in (False, True):
            rows = self._executor.block_rows(model, on_host)
            if len(rows):
                self._transport.register(pool_of(model, on_host), rows)

    # ------------------------------------------------------- who has to know of requests that come and go

    def on_adopted(self, commit: Commit, num_output: int) -> None:
        request, progress = commit.request, commit.progress
        self._tell(request.gateway_id, self._outputs.adopt(request, progress.num_cached_tokens))
        self._reports.migrated_in.append(held_after(commit))
        self._report_soon()

    def on_migration_begun(self, request: GenerationRequest, destination_id: str, reason: MigrationReason) -> None:
        self._events.add(request, EventKind.MIGRATING, reason, destination_id)

    def on_migration_ended(self, outcome: MigrationOutcome, request: GenerationRequest, taken: Detached | None) -> None:
        self._reports.migrations.append(outcome)
        if outcome.is_migrated:
            if taken is not None:
                self._metrics.spans.moved(taken, outcome.destination_id, self._events.of_span(outcome.request_id))
            num_new = self._outputs.give_up(outcome.request_id, outcome.epoch)
            self._metrics.on_migrated_away(request.public_model, num_new)
        else:
            self._events.add(request, EventKind.MIGRATION_ABORTED, outcome.reason, outcome.destination_id)
            if (entry := self._outputs.raise_epoch(outcome.request_id, outcome.epoch)) is not None:
                self._tell(request.gateway_id, entry)
        self._report_soon()

    def on_backed_up(self, request: GenerationRequest, holder_id: str) -> None:
        self._events.add(request, EventKind.BACKED_UP, "", holder_id)

    def on_blocks_found(self) -> None:
        self._report_soon()

    async def fetch(self, request: GenerationRequest) -> None:
        """Fetches the prefix that the request names, if that can be had soon."""
        if self._service is not None and self._gives_prefixes:
            await self._service.fetch(request, self._block_size_of(request.model))

    def _block_size_of(self, model: str) -> int:
        return self._loop.ask(lambda engine: engine.memory.queues[model].shape.block_size)

    def _tell_fetch_costs(self) -> None:
        """What a token's KV takes to another instance, by the bandwidth that was measured, if that has changed."""
        if self._transport is None or not self._gives_prefixes:
            return
        bandwidth = self._transport.usual_bandwidth_bytes_s or DEFAULT_BANDWIDTH_BYTES_S
        for model in self._models:
            block_bytes = self._transport.block_bytes(pool_of(model, True))
            if block_bytes is None:
                continue  # without host memory nothing could be put anywhere
            token_s = block_bytes / self._block_size_of(model) / bandwidth
            known_s = self._fetch_token_s.get(model, 0.0)
            if abs(token_s - known_s) > CHANGED_SHARE * known_s:
                self._fetch_token_s[model] = token_s
                self._loop.apply(calls.SetFetchCost(model, token_s))

    def measure(self, num_kept: int, kept_share: float) -> None:
        """See `MigrationService.measure`."""
        if self._service is not None:
            self._service.measure(num_kept, kept_share)
            self._tell_fetch_costs()

    def kv_copies(self) -> KvCopies:
        """See `MigrationService.kv_copies`."""
        return NO_COPIES if self._service is None else self._service.kv_copies()

    def _tell(self, gateway_id: str, entry: TokenEntry) -> None:
        frame = TokenFrame(self._intake.instance_id, [entry])
        self._bus.publish(GATEWAY_FRAMES.at(gateway_id=gateway_id), frame)

    # ------------------------------------------------------------------------------------------- the instance

    @property
    def kv_address(self) -> str:
        """The part of the transport's address that everybody may know, for the registry; empty where requests do not
        move with KV."""
        return "" if self._transport is None or self._service is None else self._transport.name

    @property
    def has_work(self) -> bool:
        """Whether migrations into or out of here are under way."""
        return any(self.num_migrating)

    @property
    def num_migrating(self) -> tuple[int, int]:
        """Migrations out of here and into here that are under way."""
        return (0, 0) if self._service is None else self._service.num_migrating

    def prepared(self, request: GenerationRequest) -> GenerationRequest:
        """The request as the engine is to have it: none that could not be handed over waits for that."""
        if request.decoder and not self.kv_address:
            return msgspec.structs.replace(request, decoder="")
        if request.decoder:
            # By the end of its first chunk the decoder is known.
            self._peers.entries()
        return request

    def on_effects(self, effects: Sequence[Effect], stats: StepStats | None) -> None:
        if self._service is not None:
            self._service.on_effects(effects)
            if stats is not None and not stats.is_suspended:
                self._service.on_step(stats)

    def on_cancel(self, cancel: Cancel) -> None:
        """Passes the cancel to the engine, or to whoever has the request now."""
        held_epoch = self._loop.held_epoch(cancel.request_id)
        if held_epoch is not None:
            if cancel.epoch is None or held_epoch <= cancel.epoch:
                self._loop.apply(calls.Cancel(cancel.request_id))
        elif cancel.epoch is None and self.handed_over(cancel.request_id) is not None:
            assert self._service is not None
            self._service.forward_cancel(cancel.request_id)

    def handed_over(self, request_id: str) -> MigratedRequest | None:
        """Who took a request over from here lately, if it has not come back since."""
        moved = None if self._service is None else self._service.core.moved(request_id, self._loop.now())
        return moved if moved is not None and moved.epoch > self.known_epoch(request_id) else None

    def owner(self, request_id: str, epoch: int) -> MigratedRequest | None:
        """Who has a request that is not here in `epoch` (any more): another, or this instance in a higher one."""
        moved = self.handed_over(request_id)
        if moved is None:
            moved = MigratedRequest(request_id, self._intake.instance_id, self.known_epoch(request_id))
        is_here = moved.instance_id == self._intake.instance_id
        return moved if moved.epoch > epoch or (moved.epoch == epoch and not is_here) else None

    def known_epoch(self, request_id: str) -> int:
        """The highest in which the request was here; -1: none is known."""
        held_epoch = self._loop.held_epoch(request_id)
        return max(self._outputs.epoch(request_id), -1 if held_epoch is None else held_epoch)

    def _needs_peers(self) -> bool:
        return self._service is not None and self._service.core.needs_peers(self._loop.now())

    def _on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        if self._service is not None:
            self._service.on_instance(instance_id, info)

    def peers(self) -> Mapping[str, InstanceInfo]:
        """The registry as it stands, this instance included; nothing where it has not been asked for of late: ask again
        soon."""
        return self._peers.entries()

    async def peers_known(self) -> None:
        """Until `peers` tells of all, if it can be known soon."""
        await self._peers.known(PEERS_TIMEOUT_S)
