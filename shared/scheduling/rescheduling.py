"""Turns pairs of instances (`shared.policies.rebalancing`) into messages: who gives requests to whom, and for how long.

A source is told at once when its pair begins, again while it lives, each time with a lease of a few intervals, and once
more when it ends. A leader that vanishes leaves leases behind that run out by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shared.messages.cluster import LoadReport, NextMove, mark_keys
from shared.messages.migration import MigrationReason, Rebalance
from shared.migration.limits import DRAIN_CONCURRENCY
from shared.policies.catalogue import REBALANCE_POLICIES
from shared.policies.rebalancing import Destination, Held, InstanceView, Pair, Slices, next_slice, preferred
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Action, Paired, SendRebalance
from shared.scheduling.cluster import ClusterView, InstanceState
from shared.scheduling.roles import Roles

LEASE_INTERVALS = 3
MIN_LEASE_S = 0.5
SOON_S = 0.05
"""Between two looks, where reports cross a threshold."""
LOOK_S = 1e-4
"""Least time between two looks for each instance of the cluster, so that looks take a small share of the scheduler's
time."""
GIVEN_S = 10.0
"""After an instance was last told to give requests away, word of where they went may still be missing."""


class _HeldByDecoders(NamedTuple):
    """`Held`, of which instances that compute prompts for others are no destinations: they hold what they have computed."""

    held: Held
    roles: Roles

    def get(self, instance_id: str, default: int, /) -> int:
        return self.held.get(instance_id, default)

    def longest(self) -> Iterable[tuple[str, int]]:
        return (one for one in self.held.longest() if self.roles.is_decoder(one[0]))


class Rescheduler:
    def __init__(
        self,
        settings: SchedulerSettings,
        cluster: ClusterView,
        roles: Roles,
        held_of: Callable[[NextMove, float], Held],
    ) -> None:
        """`held_of`: what instances hold of a request in their prefix caches, at a time."""
        self._roles = roles
        self.is_on = settings.migration != "off"
        policy = REBALANCE_POLICIES.find(settings.rebalance_policy)
        self.policy = policy(settings.rebalance_low, settings.rebalance_high, settings.max_migrations_per_s)
        self._cluster = cluster
        self._held_of = held_of
        self._interval_s = settings.rebalance_interval_s
        self._told_s: dict[str, float] = {}
        """Time at which each source was told of its pair."""
        self._gave_s: dict[str, float] = {}
        """Time at which each instance that was ever a source was last told to be one."""
        self._next_s: float | None = None
        self._last_s = -self._interval_s
        self._slices: Slices | None = None
        """Slices of the look that is under way."""
        self._ended: list[Pair] = []
        """In this look. Their sources are told at its end: most have another pair by then."""

    def _between_s(self, least_s: float) -> float:
        """Time from one look to the next, in a cluster of this size."""
        return max(least_s, LOOK_S * len(self._cluster))

    @property
    def _lease_s(self) -> float:
        return max(MIN_LEASE_S, LEASE_INTERVALS * self._between_s(self._interval_s))

    def next_wakeup(self) -> float | None:
        return self._next_s

    def has_given(self, instance_id: str, now: float) -> bool:
        """Whether requests may have moved away from the instance lately."""
        return now - self._gave_s.get(instance_id, -GIVEN_S) < GIVEN_S

    def on_report(self, report: LoadReport, state: InstanceState, now: float) -> None:
        """Constant work: most reports change no pair."""
        if not self.is_on:
            return
        if state.leaving:
            self.on_registry(report.instance_id, state, now)
        if self.policy.touch(report.instance_id, report.migration_freeness, report.late_starts_s):
            self._wake(now)
        for outcome in report.migrations:
            reason = None if outcome.is_migrated else outcome.reason
            self.policy.on_move(report.instance_id, outcome.destination_id, reason, now)

    def on_registry(self, instance_id: str, state: InstanceState | None, now: float) -> None:
        if state is None:
            self.policy.forget(instance_id)
            self._gave_s.pop(instance_id, None)
        elif state.leaving and self.is_on and self.policy.drain(instance_id):
            self._wake(now)

    def due(self, now: float) -> list[Action]:
        """What to tell whom, if it is time to look. A look at many instances comes in slices, each at the next call."""
        if self._slices is None:
            if self._next_s is None or now < self._next_s:
                return []
            self._last_s = now
            self._slices = self.policy.slices(
                now, self._view_of, self._destinations_above, lambda move: self._held_by(move, now)
            )
        changes, is_over = next_slice(self._slices)
        actions: list[Action] = []
        self._ended += changes.ended
        if is_over:
            for pair in self._ended:
                if pair.source not in self.policy.pairs:
                    self._told_s.pop(pair.source, None)
                    actions.append(SendRebalance(pair.source, Rebalance([], pair.reason, 0.0)))
            self._ended.clear()
        for pair in changes.begun:
            view = self._view_of(pair.source)
            freeness = view.freeness if view else 0.0
            actions.append(Paired(pair.source, list(pair.destinations), pair.reason, freeness))
            self._told_s.pop(pair.source, None)
        if is_over:
            self._slices = None
            self._next_s = None if self.policy.is_idle else self._last_s + self._between_s(self._interval_s)
            return actions + self._tell(self.policy.pairs.values(), now)
        self._next_s = now
        return actions + self._tell(changes.begun, now)

    def _tell(self, pairs: Iterable[Pair], now: float) -> list[Action]:
        """The sources, but for those that were told of their pair just now."""
        # A little early, so that rounding does not put it off to the look after this one.
        again_s = 0.9 * self._lease_s / LEASE_INTERVALS
        actions: list[Action] = []
        for pair in pairs:
            if now - self._told_s.get(pair.source, -again_s) >= again_s:
                self._told_s[pair.source] = self._gave_s[pair.source] = now
                actions.append(SendRebalance(pair.source, self._message(pair, now)))
        return actions

    def _message(self, pair: Pair, now: float) -> Rebalance:
        destinations = list(pair.destinations)
        if pair.reason != MigrationReason.DRAIN:
            return Rebalance(destinations, pair.reason, self._lease_s)
        return Rebalance(destinations, pair.reason, self._lease_s, DRAIN_CONCURRENCY, self._preferred(pair, now))

    def _preferred(self, pair: Pair, now: float) -> dict[str, str]:
        """By request that is to leave: where it is to go if it can. Requests whose common prefix nobody else holds go to one
        place."""
        view = self._view_of(pair.source)
        found: dict[str, str] = {}
        place_of: dict[bytes, str] = {}
        for move in () if view is None else view.next_moves:
            keys = mark_keys(move)
            name = preferred(move, pair.source, self._view_of, self._held_by(move, now))
            name = name or next((place_of[key] for key in reversed(keys) if key in place_of), None)
            if name is not None:
                found[move.request_id] = name
            for key in keys:
                place_of.setdefault(key, name or pair.destinations[0])
        return found

    def _wake(self, now: float) -> None:
        """A look is due soon, and at most so often."""
        at = max(now, self._last_s + self._between_s(SOON_S))
        self._next_s = at if self._next_s is None else min(self._next_s, at)

    def _held_by(self, move: NextMove, now: float) -> Held:
        held = self._held_of(move, now)
        return _HeldByDecoders(held, self._roles) if self._roles.is_split else held

    def _view_of(self, instance_id: str) -> InstanceView | None:
        state = self._cluster.get(instance_id)
        return state.rebalancing_view() if state is not None else None

    def _destinations_above(self, freeness: float) -> list[Destination]:
        found = [
            Destination(instance_id, report.migration_freeness, state.names)
            for instance_id, state in self._cluster
            if (report := state.report) is not None and report.migration_freeness >= freeness and state.can_take
        ]
        if not self._roles.is_split:
            return found
        # Requests that decode do not go to where prompts are computed, unless no other has room for their model.
        decoders = {one.instance_id for one in found if self._roles.is_decoder(one.instance_id)}
        decoded = frozenset[str]().union(*(one.models for one in found if one.instance_id in decoders))
        return [one for one in found if one.instance_id in decoders or not one.models <= decoded]
