"""Migrations of one instance, in both directions: the bus side.

While a scheduler's Rebalance holds, requests leave for its destinations, a bounded number at once; whatever peers send is
taken in. Each migration is outgoing.py's or incoming.py's; who may leave and in which order is the engine's
(`Engine.move_candidates`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from services.worker.engine_loop import EngineLoop
from services.worker.kv_transport import KvTransport
from services.worker.migration.faults import FaultPoints
from services.worker.migration.host import MigrationHost
from services.worker.migration.incoming import IncomingMigrations
from services.worker.migration.outgoing import OutgoingMigration
from services.worker.migration.peer import Site
from services.worker.migration.telemetry import MigrationTelemetry
from services.worker.peers import can_take
from shared.bus.interface import Bus, Subscription
from shared.engine.driver import StepStats
from shared.engine.moving import MoveCandidate, TakenOut
from shared.engine.requests import Ended, Output
from shared.messages.catalogue import (
    INSTANCE_ABORT,
    INSTANCE_CANCEL,
    INSTANCE_COMMIT,
    INSTANCE_OWNS,
    INSTANCE_PRE_ALLOCATE,
    INSTANCE_REBALANCE,
)
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.cluster import InstanceInfo, MoveOutcome
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    MoveReason,
    Rebalance,
)
from shared.messages.requests import Cancel, GenerationRequest, MovedRequest
from shared.migration.limits import max_at_once
from shared.migration.source import Event, may_move
from shared.settings import InstanceSettings
from shared.tasks import TaskSet, set_within
from shared.telemetry import Telemetry

log = logging.getLogger(__name__)

POLL_S = 0.02
"""While a Rebalance holds and nothing can leave, candidates are looked for so often."""
RETRY_S = 0.5
"""A destination that failed is left out for so long."""
FORWARD_S = 60.0
"""Cancels and replays for a request that has moved are passed on for so long."""
DISOWN_S = 600.0
"""A destination that was taken for dead is told so if it comes back within this time."""
STOP_S = 5.0
"""For Commits under way, when the instance stops."""
DEFAULT_STEP_S = 0.05
"""Of a model that has made no step yet."""
STEP_WEIGHT = 0.1
"""Of the newest step in the mean."""
MAX_COMMIT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Of the tokens that travel in a Commit."""

_DESTINATION_FAULTS = (
    AbortReason.REFUSED,
    AbortReason.MISMATCH,
    AbortReason.UNREACHABLE,
    AbortReason.DESTINATION_LOST,
    AbortReason.TRANSFER_FAILED,
    AbortReason.DEADLINE,
)
"""After these another destination may do better."""


class MigrationService:
    def __init__(
        self,
        bus: Bus,
        settings: InstanceSettings,
        loop: EngineLoop,
        transport: KvTransport | None,
        host: MigrationHost,
        telemetry: Telemetry,
    ) -> None:
        """`transport`: open, with the models' pools registered as they come and go; None: only requests without KV move."""
        self._bus = bus
        self._settings = settings
        self._loop = loop
        self._host = host
        self._telemetry = MigrationTelemetry(telemetry)
        faults = FaultPoints(settings.fault_points)
        self._incoming = IncomingMigrations(host, loop, transport, self._telemetry, faults, settings.max_migrations)
        self._has_transport = transport is not None
        self._step_s: dict[str, float] = {}
        self._site = Site(
            instance_id=settings.instance_id,
            bus=bus,
            loop=loop,
            transport=transport,
            telemetry=self._telemetry,
            faults=faults,
            rate_share=settings.copy_rate_share,
            max_stages=settings.migration_max_stages,
            step_s=lambda model: self._step_s.get(model, DEFAULT_STEP_S),
            is_there=self._is_there,
        )
        self._lease: Rebalance | None = None
        self._lease_until_s = 0.0
        self._outgoing: dict[str, OutgoingMigration] = {}
        """By request id."""
        self._moves: dict[str, asyncio.Task[None]] = {}
        """Likewise; one that tries several destinations is one."""
        self._tasks = TaskSet()
        self._moved: dict[str, tuple[float, MovedRequest]] = {}
        self._disowned: dict[str, tuple[float, InstanceInfo]] = {}
        """By migration id: destinations that were lost after Commit had been sent to them."""
        self._failed_until_s: dict[str, float] = {}
        """By destination."""
        self._stays_until_s: dict[str, float] = {}
        """By request id: one that did not move for a reason of its own, so that others get their turn."""
        self._wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._giving = TaskSet()
        self._is_stopping = False

    # ----------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Serves its subjects."""
        bus, ids, incoming = self._bus, {"instance_id": self._settings.instance_id}, self._incoming
        self._subscriptions = [
            await bus.serve(INSTANCE_PRE_ALLOCATE.at(**ids), incoming.on_pre_allocate),
            await bus.serve(INSTANCE_COMMIT.at(**ids), incoming.on_commit),
            await bus.serve(INSTANCE_OWNS.at(**ids), incoming.on_owns),
            await bus.subscribe(INSTANCE_ABORT.at(**ids), incoming.on_abort),
            await bus.subscribe(INSTANCE_REBALANCE.at(**ids), self._on_rebalance),
        ]
        incoming.start()
        self._giving.start(self._give_away())

    async def stop(self) -> None:
        """Aborts what can be aborted, waits a bounded time for Commits under way, and frees what is reserved here."""
        self._is_stopping = True
        await self._giving.end_all()
        for migration in list(self._outgoing.values()):
            if migration.machine.may_be_withdrawn:
                migration.feed(Event.WITHDRAWN)
        if self._moves:
            await asyncio.wait(self._moves.values(), timeout=STOP_S)
        for migration in list(self._outgoing.values()):
            log.error("what became of request %s is unknown as the instance stops", migration.request_id)
            migration.feed(Event.GIVEN_UP)
        if self._moves:
            await asyncio.gather(*self._moves.values(), return_exceptions=True)
        if self._subscriptions:
            await self._incoming.stop()
        for subscription in self._subscriptions:
            await subscription.stop()

    @property
    def has_work(self) -> bool:
        """Whether a migration is under way, in or out."""
        return self.num_moving_out + self.num_moving_in > 0

    @property
    def needs_peers(self) -> bool:
        """Whether it has to hear of changes in the registry."""
        self._forget()
        return self._lease is not None or bool(self._moves or self._disowned)

    @property
    def num_moving_out(self) -> int:
        """Migrations under way."""
        return len(self._moves)

    @property
    def num_moving_in(self) -> int:
        return self._incoming.num_in_progress

    # ------------------------------------------------------------------------------------- from the instance

    def on_effects(self, effects: Iterable[Output | Ended | TakenOut]) -> None:
        """Of the engine, in order; outputs do not matter here."""
        for effect in effects:
            if isinstance(effect, TakenOut):
                if (leaving := self._outgoing.get(effect.request_id)) is not None:
                    leaving.on_taken_out(effect)
                self._incoming.disowned.on_taken_out(effect)
            elif isinstance(effect, Ended) and (ending := self._outgoing.get(effect.request.request_id)) is not None:
                ending.feed(Event.GONE, AbortReason.ENDED)

    def on_step(self, stats: StepStats) -> None:
        """A step has ended. The mean is of those that only decode: what a request waits for each token."""
        model, seconds = stats.model, stats.duration_s
        if stats.num_tokens == sum(stats.num_decodes):
            known = self._step_s.get(model)
            self._step_s[model] = seconds if known is None else known + STEP_WEIGHT * (seconds - known)
        self._incoming.on_step(model, self._loop.now() - seconds)

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """The registry entry of an instance changed, or is gone."""
        for migration in list(self._outgoing.values()):
            destination = migration.destination
            if destination.instance_id != instance_id:
                continue
            if info is None or info.incarnation != destination.incarnation:
                migration.feed(Event.DESTINATION_LOST)
        if info is None:
            return
        for migration_id, (_, destination) in list(self._disowned.items()):
            if destination.instance_id != instance_id:
                continue
            del self._disowned[migration_id]
            if destination.incarnation == info.incarnation:
                # It lives, and may have what this instance went on with.
                topic = INSTANCE_ABORT.at(instance_id=instance_id)
                self._bus.publish(topic, AbortMigration(migration_id, AbortReason.DESTINATION_LOST))

    def moved(self, request_id: str) -> MovedRequest | None:
        """To whom a request was handed over lately."""
        until_s, moved = self._moved.get(request_id, (0.0, None))
        return moved if until_s > self._loop.now() else None

    def forward_cancel(self, request_id: str) -> bool:
        """Passes a cancel on to the new owner; False where the request has not moved lately. With the epoch it goes no
        further than there, and not for ever to and fro between two that each believe the other."""
        if (moved := self.moved(request_id)) is None:
            return False
        self._bus.publish(INSTANCE_CANCEL.at(instance_id=moved.instance_id), Cancel(request_id, moved.epoch))
        return True

    # --------------------------------------------------------------------------------------------- giving away

    def _on_rebalance(self, rebalance: Rebalance) -> None:
        self._lease = rebalance if rebalance.destinations else None
        self._lease_until_s = self._loop.now() + rebalance.lease_s
        self._wake.set()

    async def _give_away(self) -> None:
        while True:
            self._wake.clear()
            lease = self._lease
            if lease is not None and self._loop.now() >= self._lease_until_s:
                lease = self._lease = None
            if lease is None:
                await self._wake.wait()
                continue
            if not self._begin_one(lease):
                await set_within(self._wake, POLL_S)

    def _begin_one(self, lease: Rebalance) -> bool:
        """Begins a migration, if one may begin and some request can leave."""
        most = max_at_once(lease.reason, self._settings.max_migrations)
        if len(self._moves) >= min(lease.max_concurrent, most):
            return False
        peers = self._host.peers()
        destinations = [
            peers[name] for name in lease.destinations if name in peers and name != self._settings.instance_id
        ]
        if not any(self._may_take(destination) for destination in destinations):
            return False
        include_offline = self._host.is_draining or lease.reason is MoveReason.DRAIN
        for candidate in self._candidates(include_offline):
            request_id = candidate.request.request_id
            if request_id in self._moves or not may_move(candidate.request.epoch):
                continue
            if self._stays_until_s.get(request_id, 0.0) > self._loop.now():
                continue
            if 4 * candidate.request.num_tokens > MAX_COMMIT_BYTES:
                continue
            fitting = [destination for destination in destinations if self._fits(candidate, destination)]
            if not fitting:
                continue
            request = self._held_request(request_id)
            if request is None or request.epoch != candidate.request.epoch:
                continue
            self._moves[request_id] = self._tasks.start(self._move(candidate, request, fitting, lease.reason))
            return True
        return False

    def _candidates(self, include_offline: bool) -> list[MoveCandidate]:
        leaving, now = self._host.leaving_models, self._loop.now()
        candidates = self._loop.ask(lambda engine: engine.move_candidates(now, include_offline or bool(leaving)))
        return [found for found in candidates if not leaving or found.request.model in leaving]

    def _is_there(self, destination: InstanceInfo) -> bool:
        """Whether that process is in the registry still."""
        info = self._host.peers().get(destination.instance_id)
        return info is not None and info.incarnation == destination.incarnation

    def _may_take(self, destination: InstanceInfo) -> bool:
        failed_until_s = self._failed_until_s.get(destination.instance_id, 0.0)
        return destination.state == "ready" and failed_until_s <= self._loop.now()

    def _fits(self, candidate: MoveCandidate, destination: InstanceInfo) -> bool:
        with_kv = bool(candidate.num_blocks)
        if not self._may_take(destination) or (with_kv and not self._has_transport):
            return False
        return can_take(destination, {candidate.request.model}, with_kv)

    def _held_request(self, request_id: str) -> GenerationRequest | None:
        sequence = self._loop.ask(lambda engine: engine.held(request_id))
        return None if sequence is None else sequence.request

    def _page_tokens(self, model: str) -> int:
        return self._loop.ask(lambda engine: engine.memory.queues[model].shape.page_tokens)

    async def _move(
        self,
        candidate: MoveCandidate,
        request: GenerationRequest,
        destinations: list[InstanceInfo],
        reason: MoveReason,
    ) -> None:
        """To the first of the destinations that takes it."""
        request_id = request.request_id
        try:
            page_tokens = self._page_tokens(request.model)
            for destination in destinations:
                if not self._is_there(destination):
                    continue
                migration = OutgoingMigration(
                    self._site, candidate, request, page_tokens, destination, reason, self._on_over
                )
                self._outgoing[request_id] = migration
                outcome = await migration.run()
                # A request that has been paused once in vain is left alone for a while.
                was_paused = candidate.is_running and not migration.machine.was_decoding
                if outcome.is_moved or was_paused or outcome.epoch != request.epoch or self._is_stopping:
                    return
                if outcome.reason not in _DESTINATION_FAULTS:
                    return
        finally:
            self._outgoing.pop(request_id, None)
            del self._moves[request_id]
            self._wake.set()

    def _on_over(self, migration: OutgoingMigration, outcome: MoveOutcome) -> None:
        if migration.is_given_up:
            return
        self._forget()
        now = self._loop.now()
        if outcome.is_moved:
            self._moved[outcome.request_id] = (
                now + FORWARD_S,
                MovedRequest(outcome.request_id, outcome.destination_id, outcome.epoch),
            )
        else:
            log.info("request %s did not move to %s: %s", outcome.request_id, outcome.destination_id, outcome.reason)
            if outcome.reason in _DESTINATION_FAULTS:
                self._failed_until_s[outcome.destination_id] = now + RETRY_S
            else:
                self._stays_until_s[outcome.request_id] = now + RETRY_S
            if migration.is_disowned:
                self._disowned[migration.migration_id] = (now + DISOWN_S, migration.destination)
        self._host.on_move_ended(outcome, migration.request, migration.taken)

    def _forget(self) -> None:
        now = self._loop.now()
        self._failed_until_s = {key: value for key, value in self._failed_until_s.items() if value > now}
        self._stays_until_s = {key: value for key, value in self._stays_until_s.items() if value > now}
        self._moved = {key: value for key, value in self._moved.items() if value[0] > now}
        self._disowned = {key: value for key, value in self._disowned.items() if value[0] > now}
