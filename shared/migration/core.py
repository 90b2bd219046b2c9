"""The decisions of one instance's migrations, out of it and into it. No I/O; times are arguments.

Who gives requests away, and to whom, is said by the scheduler (`on_rebalance`, a lease), and by the instance itself for a
model that is to leave it (`give_away`): two orders, of which neither knows the other. Which requests go, and in which order,
is the engine's (`Engine.migration_candidates`).

A host hands in messages, effects of the engine, the registry's changes and the time (`next_wakeup`) as calls (calls.py), and
carries out `take_commands` after each. What the decisions ask of what is around them are questions (questions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from shared.engine.calls import EndMigration
from shared.engine.driver import StepStats
from shared.engine.handover import Detached, MigrationCandidate, PromptChunk
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.cluster import InstanceInfo, MigrationOutcome
from shared.messages.migration import AbortMigration, AbortReason, Committed, MigrationReason, Rebalance, Reserved
from shared.messages.requests import Cancel, ErrorInfo, GenerationRequest, MigratedRequest
from shared.migration.backup import BackupSource
from shared.migration.calls import Call
from shared.migration.commands import Command, Fault, NotHandedOver, Tell
from shared.migration.fetching import PrefixFetches
from shared.migration.holding import BackupHolder
from shared.migration.incoming import IncomingMigrations
from shared.migration.limits import DRAIN_CONCURRENCY, can_take, max_at_once
from shared.migration.outgoing import OutgoingMigration, Site
from shared.migration.questions import (
    Around,
    Candidates,
    HandoffCandidate,
    Held,
    IsDraining,
    LateCandidates,
    NewId,
    Peer,
    Peers,
)
from shared.migration.source import Event, may_migrate
from shared.policies.kv_backup import BackupSettings
from shared.recording import Recorder

T = TypeVar("T")

POLL_S = 0.02
"""While requests are to leave and none can, candidates are looked for so often."""
RETRY_S = 0.5
"""A destination that failed is left out for so long."""
FORWARD_S = 60.0
"""Cancels and replays for a request that has moved are passed on for so long."""
DISOWN_S = 600.0
"""A destination that was taken for dead is told so if it comes back within this time."""
PEER_WAIT_S = 0.5
"""A request that is to be handed over waits for so long until the registry has its decoder."""
OWN_LEASE_S = 1.0
"""Lease for a model's requests that leave because it is unloaded; renewed at half of it."""
DEFAULT_STEP_S = 0.05
"""Step time of a model that has made no step yet."""
STEP_WEIGHT = 0.1
"""Weight of the newest step in the mean."""
MAX_COMMIT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Most bytes of the tokens that travel in a Commit."""

_DESTINATION_FAULTS = (
    AbortReason.REFUSED,
    AbortReason.MISMATCH,
    AbortReason.UNREACHABLE,
    AbortReason.DESTINATION_LOST,
    AbortReason.TRANSFER_FAILED,
    AbortReason.DEADLINE,
)
"""After these another destination may do better."""


class _Order(msgspec.Struct, frozen=True):
    """Order to give requests away."""

    destinations: list[str]
    """Instance ids, in the order in which they are tried."""
    reason: MigrationReason
    until_s: float
    max_concurrent: int
    model: str = ""
    """Model whose requests leave; empty: those of all models."""
    preferred: Mapping[str, str] = {}
    """`Rebalance.preferred`; it holds for requests of all orders."""


class _Departure(msgspec.Struct):
    """A request that is to go to the first of some destinations that takes it."""

    candidate: MigrationCandidate
    request: GenerationRequest
    left: list[InstanceInfo]
    """Destinations that have not been tried."""
    reason: MigrationReason
    migration: OutgoingMigration | None = None


class MigrationCore:
    def __init__(
        self,
        around: Around,
        *,
        instance_id: str,
        address: str | None,
        max_migrations: int,
        max_stages: int,
        rate_share: float,
        backup_classes: str = "off",
        backup_min_tokens: int = 512,
        fetches: bool = False,
        record: Recorder | None = None,
    ) -> None:
        """`address`: of the KV transport; None: there is none. `max_migrations`: out of the instance at once, and into it.
        `backup_classes`, `backup_min_tokens`: as of `BackupSettings`. `fetches`: prefixes are given to others.
        `record` is given each call before it is carried out, what it returns and the commands that are taken."""
        self._around = around
        self._record = record
        self._max_migrations = max_migrations
        self._commands: list[Command] = []
        self._step_s: dict[str, float] = {}
        self._site = Site(
            instance_id=instance_id,
            around=around,
            address=address,
            rate_share=rate_share,
            max_stages=max_stages,
            step_s=lambda model: self._step_s.get(model, DEFAULT_STEP_S),
            is_there=self._is_there,
            say=self._commands.append,
        )
        self.incoming = IncomingMigrations(self._site, max_migrations)
        self.backups = BackupSource(self._site, BackupSettings(backup_classes, backup_min_tokens))
        self.holder = BackupHolder(self._site)
        self.fetches = PrefixFetches(self._site, self.holder, gives=fetches)
        self.lease: _Order | None = None
        """The scheduler's."""
        self._own: dict[str, _Order] = {}
        """By model that is to leave."""
        self._leaving: dict[str, float] = {}
        """Models that lose their requests, and when each was last offered to others."""
        self._look_s = 0.0
        """Time at which candidates are looked for next."""
        self._departures: dict[str, _Departure] = {}
        """By request id."""
        self._outgoing: dict[str, OutgoingMigration] = {}
        """By migration id, until they are at rest."""
        self._awaited: dict[str, tuple[float, PromptChunk]] = {}
        """By request id: those that are to be handed over to an instance that the registry does not have yet, and until
        when that is waited for."""
        self._moved: dict[str, tuple[float, MigratedRequest]] = {}
        self._disowned: dict[str, tuple[float, InstanceInfo]] = {}
        """By migration id: destinations that were lost after Commit had been sent to them."""
        self._failed_until_s: dict[str, float] = {}
        """By destination."""
        self._stays_until_s: dict[str, float] = {}
        """By request id: one that did not move for a reason of its own, so that others get their turn."""
        self._is_stopping = False

    def apply(self, call: Call[T], now: float) -> T:
        if self._record is None:
            return call.on(self, now)
        self._record(call, now)
        answer = call.on(self, now)
        if answer is not None:
            self._record(answer, now)
        return answer

    def take_commands(self, now: float) -> list[Command]:
        """What is to be done now, in this order."""
        commands = self._commands[:]
        self._commands.clear()
        if commands and self._record is not None:
            self._record(commands, now)
        return commands

    # ------------------------------------------------------------------------------------------------- state

    @property
    def num_migrating_out(self) -> int:
        """Requests."""
        return len(self._departures)

    @property
    def num_migrating_in(self) -> int:
        return self.incoming.num_in_progress

    def needs_peers(self, now: float) -> bool:
        """Whether the host has to tell of changes in the registry."""
        has_disowned = any(until_s > now for until_s, _ in self._disowned.values())
        return self.lease is not None or bool(self._departures or self._awaited) or has_disowned

    def outgoing_of(self, request_id: str) -> OutgoingMigration | None:
        departure = self._departures.get(request_id)
        return None if departure is None else departure.migration

    def step_s(self, model: str) -> float:
        """Mean seconds of the model's recent decode steps."""
        return self._site.step_s(model)

    def moved(self, request_id: str, now: float) -> MigratedRequest | None:
        """Record of whom a request was handed over to lately."""
        until_s, moved = self._moved.get(request_id, (0.0, None))
        return moved if until_s > now else None

    def forward_cancel(self, request_id: str, now: float) -> None:
        """Passes a cancel on to the new owner, if the request has moved lately. With the epoch it goes no further than
        there, and not for ever to and fro between two that each believe the other."""
        if (moved := self.moved(request_id, now)) is not None:
            self._commands.append(Tell("", moved.instance_id, Cancel(request_id, moved.epoch)))

    # ------------------------------------------------------------------------------------------------- orders

    def on_rebalance(self, rebalance: Rebalance, now: float) -> None:
        """The scheduler's order, in place of its last one."""
        self.lease = None
        if rebalance.destinations:
            until_s = now + rebalance.lease_s
            self.lease = _Order(
                rebalance.destinations,
                rebalance.reason,
                until_s,
                rebalance.max_concurrent,
                preferred=rebalance.preferred,
            )
        self._look_s = now

    def end_drain(self) -> None:
        """The instance is not to become empty after all: what the scheduler said to that end is over before its lease."""
        if self.lease is not None and self.lease.reason is MigrationReason.DRAIN:
            self.lease = None

    def give_away(self, model: str, now: float) -> None:
        """The model is to leave: its requests go to others that serve it, the ones with the fewest of them first. Holds for
        `OWN_LEASE_S`, until `stop_giving` at most; to be called again and again."""
        if now - self._leaving.get(model, -OWN_LEASE_S) < OWN_LEASE_S / 2:
            return
        self._leaving[model] = now
        destinations = sorted(
            (loaded.num_running + loaded.num_waiting, info.instance_id)
            for info in self._around.ask(Peers())
            if info.instance_id != self._site.instance_id and can_take(info, {model})
            for loaded in info.models
            if loaded.name == model
        )
        names = [name for _, name in destinations]
        self._own[model] = _Order(names, MigrationReason.DRAIN, now + OWN_LEASE_S, DRAIN_CONCURRENCY, model)
        self._look_s = now

    def stop_giving(self, model: str) -> None:
        """It has none any more, or stays after all."""
        self._leaving.pop(model, None)
        self._own.pop(model, None)

    def _look(self, now: float) -> None:
        """Begins what may begin now."""
        if self.lease is not None and now >= self.lease.until_s:
            self.lease = None
        self._own = {model: order for model, order in self._own.items() if now < order.until_s}
        orders = [*self._own.values(), *([] if self.lease is None else [self.lease])]
        if not self._is_stopping:
            for order in orders:
                while self._begin_one(order, now):
                    pass
        self._look_s = now + POLL_S

    def _begin_one(self, order: _Order, now: float) -> bool:
        """Begins a migration, if one may begin and some request can leave."""
        num_out = sum(departure.reason is not MigrationReason.HANDOFF for departure in self._departures.values())
        if num_out >= min(order.max_concurrent, max_at_once(order.reason, self._max_migrations)):
            return False
        named = (self._around.ask(Peer(name)) for name in order.destinations if name != self._site.instance_id)
        destinations = [info for info in named if info is not None]
        if not any(self._may_take(destination, now) for destination in destinations):
            return False
        for candidate in self._candidates(order, now):
            held = candidate.request
            if (order.model and held.model != order.model) or not self._may_go(candidate, now):
                continue
            ordered = self._in_order(held.request_id, destinations)
            fitting = [destination for destination in ordered if self._fits(candidate, destination, now)]
            here = self._around.ask(Held(held.request_id)) if fitting else None
            if here is None or here.request.epoch != held.epoch:
                continue
            departure = _Departure(candidate, here.request, fitting, order.reason)
            self._departures[held.request_id] = departure
            self._try_next(departure, now)
            return True
        return False

    def _in_order(self, request_id: str, destinations: list[InstanceInfo]) -> list[InstanceInfo]:
        """Destinations as the request is to try them."""
        name = "" if self.lease is None else self.lease.preferred.get(request_id, "")
        first = self._around.ask(Peer(name)) if name not in ("", self._site.instance_id) else None
        return destinations if first is None else [first, *(info for info in destinations if info.instance_id != name)]

    def _candidates(self, order: _Order, now: float) -> list[MigrationCandidate]:
        include_offline = order.reason is MigrationReason.DRAIN or self._around.ask(IsDraining())
        if order.reason is MigrationReason.PROMPTS and not include_offline:
            return self._around.ask(LateCandidates(now))
        return self._around.ask(Candidates(now, include_offline))

    def _may_go(self, candidate: MigrationCandidate, now: float) -> bool:
        held = candidate.request
        return (
            held.request_id not in self._departures
            and may_migrate(held.epoch)
            and self._stays_until_s.get(held.request_id, 0.0) <= now
            and 4 * held.num_tokens <= MAX_COMMIT_BYTES
        )

    def _is_there(self, destination: InstanceInfo) -> bool:
        info = self._around.ask(Peer(destination.instance_id))
        return info is not None and info.incarnation == destination.incarnation

    def _may_take(self, destination: InstanceInfo, now: float) -> bool:
        return destination.state == "ready" and self._failed_until_s.get(destination.instance_id, 0.0) <= now

    def _fits(self, candidate: MigrationCandidate, destination: InstanceInfo, now: float) -> bool:
        with_kv = bool(candidate.num_blocks)
        if not self._may_take(destination, now) or (with_kv and self._site.address is None):
            return False
        return can_take(destination, {candidate.request.model}, with_kv)

    # ------------------------------------------------------------------------------------------------- out of here

    def _try_next(self, departure: _Departure, now: float) -> None:
        while departure.left:
            destination, request = departure.left.pop(0), departure.request
            held = self._around.ask(Held(request.request_id))
            if not self._is_there(destination) or held is None or held.request.epoch != request.epoch:
                continue
            migration_id = self._around.ask(NewId())
            migration = departure.migration = OutgoingMigration(
                self._site,
                migration_id,
                departure.candidate,
                request,
                held.block_size,
                destination,
                departure.reason,
                now,
            )
            self._outgoing[migration_id] = migration
            self._drive(migration, now, migration.begin)
            return
        del self._departures[departure.request.request_id]

    def _drive(self, migration: OutgoingMigration, now: float, step: Callable[..., None], *arguments: Any) -> None:
        """Whatever fails in it, the request is left to one owner."""
        was_over = migration.outcome is not None
        try:
            step(*arguments, now)
        except Exception as error:
            self._commands.append(Fault(migration.migration_id, error))
            # As if the destination were lost: at any point this leaves the request here.
            migration.feed(Event.DESTINATION_LOST, now)
        if migration.outcome is not None and not was_over:
            self._on_over(migration, now)

    def _on_over(self, migration: OutgoingMigration, now: float) -> None:
        outcome = migration.outcome
        assert outcome is not None
        if migration.is_given_up:
            return
        self._forget(now)
        if outcome.is_migrated:
            moved = MigratedRequest(outcome.request_id, outcome.destination_id, outcome.epoch)
            self._moved[outcome.request_id] = (now + FORWARD_S, moved)
            return
        if outcome.reason in _DESTINATION_FAULTS:
            self._failed_until_s[outcome.destination_id] = now + RETRY_S
        else:
            self._stays_until_s[outcome.request_id] = now + RETRY_S
        if migration.is_disowned:
            self._disowned[migration.migration_id] = (now + DISOWN_S, migration.destination)

    def _forget(self, now: float) -> None:
        self._failed_until_s = {key: value for key, value in self._failed_until_s.items() if value > now}
        self._stays_until_s = {key: value for key, value in self._stays_until_s.items() if value > now}
        self._moved = {key: value for key, value in self._moved.items() if value[0] > now}
        self._disowned = {key: value for key, value in self._disowned.items() if value[0] > now}

    def on_rest(self, migration_id: str, now: float) -> None:
        """After `WindUp`: nothing of the migration is under way here any more."""
        migration = self._outgoing.pop(migration_id)
        migration.on_rest()
        outcome, departure = migration.outcome, self._departures[migration.request_id]
        assert outcome is not None
        # A request that has been paused once in vain is left alone for a while.
        is_over = outcome.is_migrated or migration.was_paused or outcome.epoch != departure.request.epoch
        if is_over or self._is_stopping or outcome.reason not in _DESTINATION_FAULTS:
            departure.left.clear()
        departure.migration = None
        self._try_next(departure, now)
        self._look_s = now

    def on_room(self, migration_id: str, stage: int, reply: Reserved | ErrorInfo | None, now: float) -> None:
        """The answer to PreAllocate; None: whether it was heard is not known."""
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, migration.on_room, stage, reply)

    def on_committed(self, migration_id: str, reply: Committed | ErrorInfo | None, now: float) -> None:
        """The answer to Commit, likewise."""
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, migration.on_committed, reply)

    def on_owned(self, migration_id: str, owns: bool | None, now: float) -> None:
        """The answer to Owns; None: it does not say."""
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, migration.on_owned, owns)

    def on_connected(self, migration_id: str, stage: int, is_connected: bool, now: float) -> None:
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, migration.on_connected, stage, is_connected)

    def on_sent(self, migration_id: str, is_sent: bool, now: float) -> None:
        """The blocks of a stage are at the destination, or will not be."""
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, migration.on_sent, is_sent)

    def feed(self, migration_id: str, event: Event, reason: AbortReason | None, now: float) -> None:
        """Something else happened to a migration out of here."""
        if (migration := self._outgoing.get(migration_id)) is not None:
            self._drive(migration, now, partial(migration.feed, event, reason=reason))

    # ---------------------------------------------------------------------------------------------- handoffs

    def on_prompt_chunk(self, chunk: PromptChunk, now: float) -> None:
        """A part of the prompt of a request was computed that is to be handed over: it is pushed at once."""
        if (departure := self._departures.get(chunk.request_id)) is None:
            self._hand_over(chunk, now)
        elif departure.migration is not None:
            self._drive(departure.migration, now, departure.migration.on_chunk)

    def _hand_over(self, chunk: PromptChunk, now: float) -> None:
        """Begins, or says that the request stays. It makes no token here until one or the other."""
        request_id = chunk.request_id
        can_go = not self._is_stopping and self._site.address is not None and chunk.decoder != self._site.instance_id
        destination = self._around.ask(Peer(chunk.decoder)) if can_go else None
        if destination is None and can_go:
            until_s, _ = self._awaited.setdefault(request_id, (now + PEER_WAIT_S, chunk))
            if until_s > now:
                return
        self._awaited.pop(request_id, None)
        here = self._around.ask(Held(request_id))
        if here is None or request_id in self._departures:
            return
        reason = AbortReason.STOPPED if self._is_stopping else AbortReason.UNREACHABLE
        if destination is not None:
            reason = self._begin_handoff(here.request, destination, now)
        if request_id not in self._departures:
            self._around.apply(EndMigration(request_id))
            outcome = MigrationOutcome(request_id, chunk.decoder, here.request.epoch, False, reason)
            self._commands.append(NotHandedOver("", outcome, here.request))

    def _begin_handoff(self, request: GenerationRequest, destination: InstanceInfo, now: float) -> AbortReason:
        """Begins it if it can; says why it could not."""
        candidate = self._around.ask(HandoffCandidate(request.request_id))
        if candidate is None or 4 * candidate.request.num_tokens > MAX_COMMIT_BYTES:
            return AbortReason.NOT_WORTH  # the decoder is not at fault
        if self._fits(candidate, destination, now):
            departure = _Departure(candidate, request, [destination], MigrationReason.HANDOFF)
            self._departures[request.request_id] = departure
            self._try_next(departure, now)
        return AbortReason.REFUSED

    def _look_for_decoders(self, now: float) -> None:
        for _, chunk in list(self._awaited.values()):
            self._hand_over(chunk, now)

    # --------------------------------------------------------------------------- from the engine and the registry

    def on_ended(self, request_id: str, now: float) -> None:
        """The request has ended here."""
        self._awaited.pop(request_id, None)
        if (ending := self.outgoing_of(request_id)) is not None:
            self.feed(ending.migration_id, Event.GONE, AbortReason.ENDED, now)

    def on_detached(self, taken: Detached, now: float) -> None:
        if (leaving := self.outgoing_of(taken.request_id)) is not None:
            self._drive(leaving, now, leaving.on_detached, taken)
        self.incoming.on_detached(taken)

    def on_step(self, stats: StepStats, now: float) -> None:
        """A step has ended. The mean is of those that only decode: what a request waits for each token."""
        model, seconds = stats.model, stats.duration_s
        if stats.num_tokens == sum(stats.num_decodes):
            known = self._step_s.get(model)
            self._step_s[model] = seconds if known is None else known + STEP_WEIGHT * (seconds - known)
        ended_s = now if stats.ended_s is None else stats.ended_s
        planned_s = ended_s - seconds if stats.planned_s is None else stats.planned_s
        self.incoming.on_step(model, planned_s, ended_s)
        self.backups.on_step(now)

    def on_instance(self, instance_id: str, info: InstanceInfo | None, now: float) -> None:
        """The registry entry of an instance changed, or is gone."""
        self._forget(now)
        for migration in list(self._outgoing.values()):
            destination = migration.destination
            is_lost = info is None or info.incarnation != destination.incarnation
            if destination.instance_id == instance_id and is_lost:
                self.feed(migration.migration_id, Event.DESTINATION_LOST, None, now)
        if info is None:
            return
        if self._awaited:
            self._look_for_decoders(now)
        for migration_id, (_, destination) in list(self._disowned.items()):
            if destination.instance_id != instance_id:
                continue
            del self._disowned[migration_id]
            if destination.incarnation == info.incarnation:
                # It lives, and may have what this instance went on with.
                abort = AbortMigration(migration_id, AbortReason.DESTINATION_LOST)
                self._commands.append(Tell(migration_id, instance_id, abort))

    # --------------------------------------------------------------------------------------------- time, the end

    def next_wakeup(self) -> float | None:
        """Time at which `on_time` is due, if nothing else happens before."""
        found = [migration.next_wakeup() for migration in self._outgoing.values()]
        found += [self.incoming.next_wakeup(), self.holder.next_wakeup()]
        if not self._is_stopping:
            found.append(self.backups.next_wakeup())
        if self.lease is not None or self._own:
            found.append(self._look_s)
        found += [until_s for until_s, _ in self._awaited.values()]
        return min((at for at in found if at is not None), default=None)

    def on_time(self, now: float) -> None:
        for migration in list(self._outgoing.values()):
            self._drive(migration, now, migration.on_time)
        self.incoming.on_time(now)
        self.holder.on_time(now)
        if not self._is_stopping:
            is_quiet = not self._departures and not self.incoming.num_in_progress
            self.backups.on_time(now, is_quiet and self.backups.is_on and not self._around.ask(IsDraining()))
        if self._awaited:
            self._look_for_decoders(now)
        if (self.lease is not None or self._own) and now >= self._look_s:
            self._look(now)

    def stop(self, now: float) -> None:
        """Nothing more begins, and what can be aborted is."""
        self._is_stopping = self.holder.is_stopping = self.fetches.is_stopping = True
        self.lease, self._own = None, {}
        self._look_for_decoders(now)
        for migration in list(self._outgoing.values()):
            if migration.machine.may_be_withdrawn:
                self.feed(migration.migration_id, Event.WITHDRAWN, None, now)

    def give_up(self, now: float) -> list[str]:
        """The process ends before it is known what became of these requests."""
        left = [migration for migration in self._outgoing.values() if migration.outcome is None]
        for migration in left:
            self.feed(migration.migration_id, Event.GIVEN_UP, None, now)
        self.backups.end(now)
        return [migration.request_id for migration in left]
