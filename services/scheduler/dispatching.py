"""Matches queued requests with instances: who is next, and where it goes.

A request waits here until an instance that serves its model is free enough, so that order stays a decision over the whole
cluster; an instance holds few waiting requests of a model, just so many that it never runs dry. Work is done only for what
changed: `enqueue` wakes one lane, `touch` re-ranks one instance in its own lanes, `picks` looks at woken lanes only.

Online requests go by the dispatch policy, as if no offline request were there: those yield. Offline requests go where the
most room for them is reported, minus what was sent there since, and nowhere without any; the last one may overdraw it, so
that a long request is not passed by for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from services.scheduler.cluster import ClusterView, InstanceState
from services.scheduler.harvest import OfflineLedger
from services.scheduler.queue import GlobalQueue, Lane, lane_of
from services.scheduler.requests import TrackedRequest
from shared.policies.dispatch import (
    DISPATCH_POLICIES,
    CandidateIndex,
    DispatchView,
    InFlight,
    InFlightLedger,
    PrefixAffinity,
    Rank,
    by_freeness,
    freeness_with_ledger,
)
from shared.policies.ordering import ModelView

LOOKAHEAD = 16
"""How many requests of a lane are tried where the first ones fit on no instance that is free: with pools of different
sizes the head may need the largest, and must not hold up those that do not."""


class _Head(NamedTuple):
    """The first request of a lane, as the order policy sees a model that could run next (`ModelView`)."""

    lane: Lane
    first: TrackedRequest
    last_planned_step: int
    """Number of the last pick of the model."""

    @property
    def name(self) -> str:
        return self.lane.model

    def runnable(self) -> tuple[TrackedRequest]:
        """Its first alone: the rest of the lane comes after it in any case."""
        return (self.first,)

    def rank(self) -> tuple[bool, float]:
        """Online first, then high priority."""
        return (not self.lane.is_online, self.first.key[0])


class Dispatcher:
    def __init__(
        self,
        cluster: ClusterView,
        queue: GlobalQueue,
        *,
        policy: str,
        max_waiting_per_model: int,
        cache_affinity_merged: float,
    ) -> None:
        if policy not in DISPATCH_POLICIES:
            raise ValueError(f"unknown dispatch policy {policy!r}; there are {', '.join(DISPATCH_POLICIES)}")
        self.queue = queue
        self.ledger = InFlightLedger()
        self._offline = OfflineLedger()
        self._cluster = cluster
        self._policy = DISPATCH_POLICIES[policy]
        self._max_waiting = max_waiting_per_model
        self._affinity = PrefixAffinity() if self._policy is by_freeness else None
        self._affinity_merged = cache_affinity_merged
        self._lanes_of_model: dict[str, dict[Lane, CandidateIndex]] = {}
        self._woken: dict[Lane, None] = {}
        """In the order in which they were woken."""
        self._num_picked = 0
        self._last_pick: dict[str, int] = {}
        """For each model, the number of its last pick."""

    def enqueue(self, tracked: TrackedRequest, now: float) -> None:
        self.queue.push(tracked, now)
        lane = lane_of(tracked)
        lanes = self._lanes_of_model.setdefault(lane.model, {})
        if lane not in lanes:
            index = lanes[lane] = CandidateIndex(partial(self._rank, lane))
            for instance_id, state in self._cluster:
                if lane.model in state.ready:
                    index.touch(instance_id)
        self._woken[lane] = None

    def touch(self, instance_id: str, models: Iterable[str]) -> None:
        """Something changed about an instance, as far as it concerns `models`."""
        for model in models:
            for lane, index in self._lanes_of_model.get(model, {}).items():
                index.touch(instance_id)
                self._woken[lane] = None

    def settle(self, request_id: str) -> str | None:
        """Out of the in-flight ledger; where it was in flight to, or None."""
        self._offline.remove(request_id)
        return self.ledger.remove(request_id)

    def offline_room(self, models: Iterable[str]) -> dict[str, int | None]:
        """Tokens of new offline submissions that instances could take, below 0 if more wait here than they can; None for
        a model that nobody serves."""
        wanted = set(models)
        room: Counter[str] = Counter()
        for instance_id, state in self._cluster:
            if state.is_candidate:
                for model in wanted & state.ready.keys():
                    room[model] += max(0, self._offline_room(model, instance_id, state))
        return {m: room[m] - self.queue.num_tokens(Lane(m, False)) if m in room else None for m in wanted}

    def picks(self, now: float) -> Iterator[tuple[TrackedRequest, str]]:
        """Decides on every dispatch that is possible now, best place in the queue first over all woken lanes. A request
        leaves the queue and enters the ledger before it is yielded. One whose time is over is left in the queue."""
        lanes = [lane for lane in self._woken if lane in self.queue and len(self._index(lane))]
        self._woken.clear()
        while lanes:
            lane = lanes[0] if len(lanes) == 1 else self._next(lanes, now)
            pick = self._pick(lane, now)
            if pick is not None:
                yield pick
            if pick is None or lane not in self.queue:
                lanes.remove(lane)

    # ------------------------------------------------------------------------------------------------ one pick

    def _next(self, lanes: list[Lane], now: float) -> Lane:
        """Of lanes in which something waits, the one whose first request comes first of all."""
        heads = [_Head(lane, self.queue.first(lane, now)[0], self._last_pick.get(lane.model, -1)) for lane in lanes]
        best = min(head.rank() for head in heads)
        candidates: list[ModelView] = [head for head in heads if head.rank() == best]
        return Lane(self.queue.order.pick_model(candidates, now).name, not best[0])

    def _pick(self, lane: Lane, now: float) -> tuple[TrackedRequest, str] | None:
        index = self._index(lane)
        for limit in (1, LOOKAHEAD):
            for tracked in self.queue.first(lane, now, limit)[limit > 1 :]:
                if not len(index):
                    return None
                if tracked.deadline_s > now and (instance_id := self._choose(tracked, index)) is not None:
                    self._take(tracked, instance_id)
                    return tracked, instance_id
        return None

    def _choose(self, tracked: TrackedRequest, index: CandidateIndex) -> str | None:
        is_fit = self._fits(tracked)
        best = index.best(is_fit)
        if best is None or self._affinity is None or tracked.request is None or not tracked.is_online:
            return best
        owner = self._affinity.likely_owner(tracked.model, tracked.request.prompt)
        if owner is None or owner == best or owner not in index or not is_fit(owner):
            return best
        lag = self._view(self._state(best), best).freeness - self._affinity_merged
        return owner if self._view(self._state(owner), owner).freeness >= lag else best

    def _fits(self, tracked: TrackedRequest) -> Callable[[str], bool]:
        model, num_tokens = tracked.model, tracked.num_tokens_at_most
        return lambda instance_id: self._state(instance_id).ready[model].fits(num_tokens)

    def _take(self, tracked: TrackedRequest, instance_id: str) -> None:
        self.queue.remove(tracked)
        self._num_picked += 1
        state = self._state(instance_id)
        state.last_turn = self._last_pick[tracked.model] = self._num_picked
        demand = state.ready[tracked.model].demand_merged(tracked.num_tokens)
        self.ledger.add(tracked.request_id, instance_id, InFlight(tracked.model, tracked.is_online, demand))
        if not tracked.is_online:
            self._offline.add(tracked.request_id, instance_id, tracked.model, tracked.num_tokens_at_most)
        if self._affinity is not None and tracked.request is not None:
            self._affinity.record(tracked.model, tracked.request.prompt, instance_id)
        self._touch_index(instance_id, state)

    def _index(self, lane: Lane) -> CandidateIndex:
        return self._lanes_of_model[lane.model][lane]

    def _touch_index(self, instance_id: str, state: InstanceState) -> None:
        for model in state.ready:
            for index in self._lanes_of_model.get(model, {}).values():
                index.touch(instance_id)

    # ---------------------------------------------------------------------------------------------------- rank

    def _state(self, instance_id: str) -> InstanceState:
        state = self._cluster.get(instance_id)
        assert state is not None, f"{instance_id} is ranked but not in the registry"
        return state

    def _rank(self, lane: Lane, instance_id: str) -> Rank | None:
        state = self._cluster.get(instance_id)
        if state is None or not state.is_candidate or lane.model not in state.ready:
            return None
        if lane.is_online:
            return self._policy(self._view(state, instance_id)) if self.has_room(lane, instance_id, state) else None
        room = self._offline_room(lane.model, instance_id, state)
        return (-room, state.last_turn) if room > 0 else None

    def has_room(self, lane: Lane, instance_id: str, state: InstanceState) -> bool:
        """Whether one more request of the lane may go there; what is in flight counts as waiting there. Offline requests
        do not stand in the way of online ones, which go first on the instance too."""
        if not lane.is_online:
            return self._offline_room(lane.model, instance_id, state) > 0
        in_flight = self.ledger.num_waiting(instance_id, lane.model, online_only=True)
        return state.num_waiting_online.get(lane.model, 0) + in_flight < self._max_waiting

    def _offline_room(self, model: str, instance_id: str, state: InstanceState) -> int:
        """Offline tokens that could be sent there; at most 0: none."""
        return state.offline_room.get(model, 0) - self._offline.num_tokens(instance_id, model)

    def _view(self, state: InstanceState, instance_id: str) -> DispatchView:
        report = state.report
        assert report is not None
        in_flight = self.ledger.num_requests(instance_id) - self._offline.num_requests(instance_id)
        freeness = freeness_with_ledger(
            report.dispatch_freeness,
            report.num_running,
            report.free_merged,
            self.ledger.demand_merged(instance_id),
            in_flight,
        )
        return DispatchView(freeness, state.num_requests + in_flight, state.last_turn)
