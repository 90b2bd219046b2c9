"""Matches queued requests with instances: who is next, and where it goes.

A request waits here until an instance that serves its model is free enough, so that order stays a decision over the whole
cluster; an instance holds few waiting requests of a model, just so many that it never runs dry. Work is done only for what
changed: `enqueue` wakes one lane, `touch` re-ranks one instance in its own lanes, `picks` looks at woken lanes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush

from services.scheduler.cluster import ClusterView, InstanceState
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

LOOKAHEAD = 16
"""How many requests of a lane are tried where the first ones fit on no instance that is free: with pools of different
sizes the head may need the largest, and must not hold up those that do not."""


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
        self._cluster = cluster
        self._policy = DISPATCH_POLICIES[policy]
        self._max_waiting = max_waiting_per_model
        self._affinity = PrefixAffinity() if self._policy is by_freeness else None
        self._affinity_merged = cache_affinity_merged
        self._lanes_of_model: dict[str, dict[Lane, CandidateIndex]] = {}
        self._woken: set[Lane] = set()
        self._num_picked = 0

    def enqueue(self, tracked: TrackedRequest, now: float) -> None:
        self.queue.push(tracked, now)
        lane = lane_of(tracked)
        lanes = self._lanes_of_model.setdefault(lane.model, {})
        if lane not in lanes:
            index = lanes[lane] = CandidateIndex(partial(self._rank, lane))
            for instance_id, state in self._cluster:
                if lane.model in state.ready:
                    index.touch(instance_id)
        self._woken.add(lane)

    def touch(self, instance_id: str, models: Iterable[str]) -> None:
        """Something changed about an instance, as far as it concerns `models`."""
        for model in models:
            for lane, index in self._lanes_of_model.get(model, {}).items():
                index.touch(instance_id)
                self._woken.add(lane)

    def picks(self, now: float) -> Iterator[tuple[TrackedRequest, str]]:
        """Decides on every dispatch that is possible now, best place in the queue first over all woken lanes. A request
        leaves the queue and enters the ledger before it is yielded. One whose time is over is left in the queue."""
        heads = [(first[0].key, lane) for lane in self._woken if (first := self.queue.first(lane))]
        self._woken.clear()
        heapify(heads)
        while heads:
            lane = heappop(heads)[1]
            if (pick := self._pick(lane, now)) is not None:
                yield pick
                if first := self.queue.first(lane):
                    heappush(heads, (first[0].key, lane))

    # ------------------------------------------------------------------------------------------------ one pick

    def _pick(self, lane: Lane, now: float) -> tuple[TrackedRequest, str] | None:
        index = self._lanes_of_model[lane.model][lane]
        for limit in (1, LOOKAHEAD):
            for tracked in self.queue.first(lane, limit)[limit > 1 :]:
                if not len(index):
                    return None
                if tracked.deadline_s > now and (instance_id := self._choose(tracked, index)) is not None:
                    self._take(tracked, instance_id)
                    return tracked, instance_id
        return None

    def _choose(self, tracked: TrackedRequest, index: CandidateIndex) -> str | None:
        is_fit = self._fits(tracked)
        best = index.best(is_fit)
        if best is None or self._affinity is None or tracked.request is None:
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
        state.last_turn = self._num_picked
        demand = state.ready[tracked.model].demand_merged(tracked.num_tokens)
        self.ledger.add(tracked.request_id, instance_id, InFlight(tracked.model, tracked.is_online, demand))
        if self._affinity is not None and tracked.request is not None:
            self._affinity.record(tracked.model, tracked.request.prompt, instance_id)
        self._touch_index(instance_id, state)

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
        if self.num_waiting(lane, instance_id, state) >= self._max_waiting:
            return None
        return self._policy(self._view(state, instance_id))

    def num_waiting(self, lane: Lane, instance_id: str, state: InstanceState) -> int:
        """Waiting requests of the lane's model, reported and in flight. Offline ones do not stand in the way of online
        ones, which go first on the instance too."""
        reported = state.num_waiting_online if lane.is_online else state.num_waiting
        in_flight = self.ledger.num_waiting(instance_id, lane.model, online_only=lane.is_online)
        return reported.get(lane.model, 0) + in_flight

    def _view(self, state: InstanceState, instance_id: str) -> DispatchView:
        report = state.report
        assert report is not None
        in_flight = self.ledger.num_requests(instance_id)
        freeness = freeness_with_ledger(
            report.dispatch_freeness,
            report.num_running,
            report.free_merged,
            self.ledger.demand_merged(instance_id),
            in_flight,
        )
        return DispatchView(freeness, state.num_requests + in_flight, state.last_turn)
