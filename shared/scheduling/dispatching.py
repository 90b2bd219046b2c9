"""Matches queued requests with instances: who is next, and where it goes.

A request waits here until an instance that serves its model is free enough, so that order stays a decision over the whole
cluster; an instance holds few waiting requests of a model, just so many that it never runs dry. Work is done only for what
changed, and only while something waits: `touch` and `on_report` note an instance, and `picks` ranks those that were noted
again in the lanes of their models, if they may have come first, and looks at woken lanes only.

Online requests go by the dispatch policy, as if no offline request were there: those yield. By first token, a request
goes, of the freest instances that have the memory for it now and for those that run there to grow a while, to the one that
will begin its prompt first, by the cost models of the instances; by freeness to the freest of them. One that
fits nowhere now, but into what instances have in pieces, goes where least is missing and waits at the head of that
instance's queue: its demand makes the instance give requests away (`rebalancing`), so that the pieces come together.
Meanwhile nobody else is let in there, so this is for few instances at once; other requests that fit nowhere wait in the
queue, and those that fit pass them, but not for long: one that has waited `OVERDUE_S` goes to an instance in any case.
One of high priority sees an instance as if no headroom were kept there; and an instance with as many waiting requests as
it may have takes as many again of high priority, which it lets in first.

Offline requests go where the most room for them is reported, minus what was sent there since, and nowhere without any; the
last one may overdraw it, so that a long request is not passed by for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import NamedTuple, cast

from shared.cost_model import prompt_s
from shared.messages.cluster import LoadReport
from shared.policies.dispatch import (
    DISPATCH_POLICIES,
    GRAIN_S,
    NUM_TIMED,
    TIMED_POLICY,
    CandidateIndex,
    DispatchView,
    InFlight,
    InFlightLedger,
    PrefixAffinity,
    Rank,
    by_freeness,
    freeness_with_ledger,
    soonest,
)
from shared.policies.ordering import ModelView
from shared.scheduling.cluster import ClusterView, InstanceState
from shared.scheduling.harvest import OfflineLedger
from shared.scheduling.queue import GlobalQueue, Head, Lane, lane_of
from shared.scheduling.requests import TrackedRequest

LOOKAHEAD = 16
"""How many requests of a lane are tried where the first ones fit on no instance that is free: with pools of different
sizes the head may need the largest, and must not hold up those that do not."""
OVERDUE_S = 5.0
"""A request that fits nowhere is passed by others for so long at most."""
NUM_FREEST = 64
"""How many of the freest instances are looked at for one that a long request fits into."""


class _Indexes(NamedTuple):
    """The candidates of a lane, as requests of normal and of high priority see them."""

    normal: CandidateIndex
    high: CandidateIndex

    def touch(self, instance_id: str) -> None:
        self.normal.touch(instance_id)
        self.high.touch(instance_id)

    def worsen(self, instance_id: str) -> None:
        """A request was sent there."""
        self.normal.worsen(instance_id)
        self.high.worsen(instance_id)


class Dispatcher:
    def __init__(
        self,
        cluster: ClusterView,
        queue: GlobalQueue,
        *,
        policy: str,
        max_waiting_per_model: int,
        cache_affinity_merged: float,
        growth_steps: float = 0.0,
        max_gathering_share: float = 1.0,
    ) -> None:
        if policy not in DISPATCH_POLICIES:
            raise ValueError(f"unknown dispatch policy {policy!r}; there are {', '.join(DISPATCH_POLICIES)}")
        self.queue = queue
        self.ledger = InFlightLedger()
        self._offline = OfflineLedger()
        self._cluster = cluster
        self._policy = DISPATCH_POLICIES[policy]
        self._is_timed = policy == TIMED_POLICY
        self._max_waiting = max_waiting_per_model
        self._affinity = PrefixAffinity() if self._policy is by_freeness else None
        self._affinity_merged = cache_affinity_merged
        self._growth_steps = growth_steps
        self._max_gathering_share = max_gathering_share
        self._gathering: set[str] = set()
        """Instances where a request waits for memory."""
        self._held_back: dict[Lane, tuple[int, int]] = {}
        """Since `picks` began: of the lane's last request that found no room and stays, its tokens, now and at most."""
        self._lanes_of_model: dict[str, dict[Lane, _Indexes]] = {}
        self._touched: set[str] = set()
        self._reported: set[str] = set()
        self._bounds: dict[str, float] = {}
        self._bounds_high: dict[str, float] = {}
        """Of instances that became better than was told: how an online request ranks them at best."""
        self._told: dict[str, tuple[float, float]] = {}
        """The bounds that the indexes were told since they last ranked the instance."""
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
            indexes = lanes[lane] = _Indexes(self._new_index(lane, False), self._new_index(lane, True))
            for instance_id, state in self._cluster:
                if lane.model in state.ready:
                    indexes.touch(instance_id)
        self._woken[lane] = None

    def touch(self, instance_id: str, before: Iterable[str] = ()) -> None:
        """Something changed about an instance. `before`: the models that it served until now, where that changed."""
        self._touched.add(instance_id)
        for model in before:
            self._touch_lanes(model, instance_id)

    def on_report(self, report: LoadReport) -> None:
        """Likewise, where all that changed is the instance's load."""
        instance_id = report.instance_id
        self._reported.add(instance_id)
        if report.dispatch_freeness < 0 and any(load.num_waiting_online for load in report.models):
            self._gathering.add(instance_id)
        elif instance_id in self._gathering and not self.ledger.num_requests(instance_id):
            self._gathering.remove(instance_id)
        if self._policy is not by_freeness:
            self._touched.add(instance_id)
        else:
            self._bound(report)

    def relieve(self, instance_id: str) -> None:
        """Something is not in flight to the instance any more: it is as free as its report says, at best."""
        state = self._cluster.get(instance_id)
        if state is not None and state.report is not None and self._policy is by_freeness:
            self._reported.add(instance_id)
            self._bound(state.report)
        else:
            self._touched.add(instance_id)

    def _bound(self, report: LoadReport) -> None:
        """Notes an instance that may have become better, and by how much at most."""
        instance_id = report.instance_id
        normal, high = -report.dispatch_freeness, -report.dispatch_freeness_high
        if not (normal <= 0 and high <= 0) and self.ledger.num_requests(instance_id):
            # Each request in flight takes a share of what is missing, so it may even look better than it says.
            self._touched.add(instance_id)
            return
        told = self._told.get(instance_id)
        if told is not None and normal >= told[0] and high >= told[1]:
            return
        if normal == normal and high == high:
            self._told[instance_id] = (normal, high)
            self._bounds[instance_id], self._bounds_high[instance_id] = normal, high
        else:  # not a number
            self._touched.add(instance_id)

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
        if not len(self.queue):
            return
        self._note_changes()
        lanes = [lane for lane in self._woken if lane in self.queue and self._has_candidates(lane)]
        self._woken.clear()
        self._held_back.clear()
        while lanes:
            head = None
            if len(lanes) > 1:
                head = cast(Head, self.queue.order.pick_model(self._candidates(lanes, now), now))
            lane = lanes[0] if head is None else head.lane
            pick = self._pick(lane, now)
            if pick is not None:
                if head is not None:
                    self.queue.order.on_turn(head)
                yield pick
            if pick is None or lane not in self.queue:
                lanes.remove(lane)

    # ------------------------------------------------------------------------------------------------ one pick

    def _candidates(self, lanes: list[Lane], now: float) -> list[ModelView]:
        """Of lanes in which something waits, the heads of the best class."""
        heads = [Head(lane, self.queue.first(lane, now)[0], self._last_pick.get(lane.model, -1)) for lane in lanes]
        best = min(head.rank() for head in heads)
        return [head for head in heads if head.rank() == best]

    def _pick(self, lane: Lane, now: float) -> tuple[TrackedRequest, str] | None:
        indexes = self._indexes(lane)
        for limit in (1, LOOKAHEAD):
            for tracked in self.queue.first(lane, now, limit)[limit > 1 :]:
                index = indexes.high if tracked.is_high else indexes.normal
                if tracked.deadline_s > now and (instance_id := self._choose(tracked, index, now)) is not None:
                    self._take(tracked, instance_id)
                    return tracked, instance_id
                if index.is_empty():
                    return None  # whoever has no room for this one has none for those after it
        return None

    def _choose(self, tracked: TrackedRequest, index: CandidateIndex, now: float) -> str | None:
        may_wait = now - tracked.submitted_s <= OVERDUE_S
        if may_wait and self._is_held_back(tracked):
            return None
        is_fit = self._fits(tracked)
        best = index.best(is_fit)
        if best is None or self._affinity is None or tracked.request is None or not tracked.is_online:
            return best
        least = self._missing(tracked, best)
        if self._is_timed:
            able = [name for name in index.first(NUM_TIMED, is_fit) if self._missing(tracked, name) <= 0]
            if able:
                best = able[soonest([self._start_s(name, now) for name in able])]
                least = self._missing(tracked, best)
        if least > 0:
            missing: dict[str, float] = {}

            def is_enough(instance_id: str) -> bool:
                if not is_fit(instance_id):
                    return False
                missing[instance_id] = self._missing(tracked, instance_id)
                return missing[instance_id] <= 0 or len(missing) == NUM_FREEST

            index.best(is_enough)
            best = min(missing, key=missing.__getitem__)
            least = missing[best]
            if least > 0 and may_wait and not self._may_gather(tracked, list(missing)):
                return None
        owner = self._affinity.likely_owner(tracked.model, tracked.request.prompt)
        if owner is not None and owner != best and owner in index and is_fit(owner):
            missing_there = self._missing(tracked, owner)
            if missing_there <= max(0.0, least) and self._is_worth_it(tracked, owner, best, now):
                best, least = owner, missing_there
        if least > 0:
            self._gathering.add(best)
        return best

    def _is_worth_it(self, tracked: TrackedRequest, owner: str, best: str, now: float) -> bool:
        """Whether the cache of the prompt's likely owner outweighs that it is less free, and saves more time than is waited
        for it."""
        is_high = tracked.is_high
        if self._is_timed:
            saved_s = self._prompt_s(tracked, best)
            if self._start_s(owner, now) > self._start_s(best, now) + max(GRAIN_S, saved_s):
                return False
        lag = self._view(self._state(best), best, is_high).freeness - self._affinity_merged
        return self._view(self._state(owner), owner, is_high).freeness >= lag

    def _start_s(self, instance_id: str, now: float) -> float:
        """Predicted time until the prompt of one more request is begun there, those in flight counted in."""
        state = self._state(instance_id)
        report = state.report
        assert report is not None
        return max(0.0, report.prompts_s - (now - state.heard_s)) + self.ledger.prompts_s(instance_id)

    def _prompt_s(self, tracked: TrackedRequest, instance_id: str) -> float:
        """Predicted time of the request's prompt there."""
        report = self._state(instance_id).report
        assert report is not None
        costs = (load.prompt_cost for load in report.models if load.model == tracked.model)
        return prompt_s(next(costs, (0.0, 0.0)), tracked.num_tokens)

    def _may_gather(self, tracked: TrackedRequest, freest: list[str]) -> bool:
        """Whether one more instance may get memory together, for a request that fits nowhere; else it is held back."""
        if self._max_gathering_share >= 1.0:
            return True
        limit = max(1, int(self._max_gathering_share * self._cluster.num_serving(tracked.model)))
        if len(self._gathering) >= limit:
            self._gathering = {name for name in self._gathering if self._cluster.get(name) is not None}
        if len(self._gathering) < limit and self._is_there_in_pieces(tracked, freest):
            return True
        self._held_back[lane_of(tracked)] = (tracked.num_tokens, tracked.num_tokens_at_most)
        return False

    def _is_there_in_pieces(self, tracked: TrackedRequest, freest: list[str]) -> bool:
        """Whether the instances have together what it needs, beside all that waits for them: else one would keep memory
        idle for it until enough requests end."""
        demand = self._state(freest[0]).ready[tracked.model].demand_merged(tracked.num_tokens)
        left = [self._state(name).freeness(for_high=True).left_merged for name in freest]
        in_flight = sum(self.ledger.demand_merged(name) for name in freest)
        return sum(merged for merged in left if merged > -inf) - in_flight >= demand

    def _is_held_back(self, tracked: TrackedRequest) -> bool:
        """Room only gets less while requests are picked: who needs no less than another that found none finds none."""
        least = self._held_back.get(lane_of(tracked))
        return least is not None and tracked.num_tokens >= least[0] and tracked.num_tokens_at_most >= least[1]

    def _missing(self, tracked: TrackedRequest, instance_id: str) -> float:
        """Merged blocks that the instance would have to get free before the request could run, and all that run there
        could grow; at most 0: none. The headroom of high priority is memory too, if need be."""
        state = self._state(instance_id)
        served = state.ready[tracked.model]
        demand = served.demand_merged(tracked.num_tokens)
        num_others = state.load.num_running + self.ledger.num_requests(instance_id)
        if num_others and served.tokens_per_merged:
            growth = self._growth_steps * (num_others + 1) / served.tokens_per_merged
            demand += min(growth, max(0.0, served.num_merged - demand))
        return demand + self.ledger.demand_merged(instance_id) - state.freeness(for_high=True).left_merged

    def _fits(self, tracked: TrackedRequest) -> Callable[[str], bool]:
        model, num_tokens = tracked.model, tracked.num_tokens_at_most
        return lambda instance_id: self._state(instance_id).ready[model].fits(num_tokens)

    def _take(self, tracked: TrackedRequest, instance_id: str) -> None:
        self.queue.remove(tracked)
        self._num_picked += 1
        state = self._state(instance_id)
        state.last_turn = self._last_pick[tracked.model] = self._num_picked
        demand = state.ready[tracked.model].demand_merged(tracked.num_tokens)
        entry = InFlight(tracked.model, tracked.is_online, demand, self._prompt_s(tracked, instance_id))
        self.ledger.add(tracked.request_id, instance_id, entry)
        if not tracked.is_online:
            self._offline.add(tracked.request_id, instance_id, tracked.model, tracked.num_tokens_at_most)
        if self._affinity is not None and tracked.request is not None:
            self._affinity.record(tracked.model, tracked.request.prompt, instance_id)
        for model in state.ready:
            for indexes in self._lanes_of_model.get(model, {}).values():
                indexes.worsen(instance_id)

    def _indexes(self, lane: Lane) -> _Indexes:
        return self._lanes_of_model[lane.model][lane]

    def _touch_lanes(self, model: str, instance_id: str) -> None:
        for lane, indexes in self._lanes_of_model.get(model, {}).items():
            indexes.touch(instance_id)
            self._woken[lane] = None

    def _has_candidates(self, lane: Lane) -> bool:
        indexes = self._indexes(lane)
        return not indexes.normal.is_empty() or (self.queue.has_high(lane) and not indexes.high.is_empty())

    def _note_changes(self) -> None:
        """Of all lanes: which models an instance serves is looked at when it is ranked."""
        if not self._touched and not self._reported:
            return
        for lanes in self._lanes_of_model.values():
            for lane, indexes in lanes.items():
                indexes.normal.touch_all(self._touched)
                indexes.high.touch_all(self._touched)
                if lane.is_online:
                    indexes.normal.hint(self._bounds)
                    indexes.high.hint(self._bounds_high)
                else:
                    indexes.normal.touch_all(self._reported)
                self._woken[lane] = None
        self._touched.clear()
        self._reported.clear()
        self._bounds.clear()
        self._bounds_high.clear()

    def _new_index(self, lane: Lane, is_high: bool) -> CandidateIndex:
        rank_of = partial(self._rank, lane, is_high)
        if self._policy is not by_freeness or not lane.is_online:
            return CandidateIndex(rank_of)
        return CandidateIndex(rank_of, self._version_of, self._on_ranked)

    def _version_of(self, instance_id: str) -> object:
        state = self._cluster.get(instance_id)
        return state.report if state is not None else None

    def _on_ranked(self, instance_id: str) -> None:
        self._told.pop(instance_id, None)

    # ---------------------------------------------------------------------------------------------------- rank

    def _state(self, instance_id: str) -> InstanceState:
        state = self._cluster.get(instance_id)
        assert state is not None, f"{instance_id} is ranked but not in the registry"
        return state

    def _rank(self, lane: Lane, is_high: bool, instance_id: str) -> Rank | None:
        state = self._cluster.get(instance_id)
        if state is None or not state.is_candidate or lane.model not in state.ready:
            return None
        if lane.is_online:
            has_room = self.has_room(lane, instance_id, state, is_high=is_high)
            return self._policy(self._view(state, instance_id, is_high)) if has_room else None
        room = self._offline_room(lane.model, instance_id, state)
        return (-room, state.last_turn) if room > 0 else None

    def has_room(self, lane: Lane, instance_id: str, state: InstanceState, *, is_high: bool = False) -> bool:
        """Whether one more request of the lane may go there; what is in flight counts as waiting there. Offline requests
        do not stand in the way of online ones, which go first on the instance too."""
        if not lane.is_online:
            return self._offline_room(lane.model, instance_id, state) > 0
        in_flight = self.ledger.num_waiting(instance_id, lane.model, online_only=True)
        limit = 2 * self._max_waiting if is_high else self._max_waiting
        return state.load.num_waiting_online.get(lane.model, 0) + in_flight < limit

    def _offline_room(self, model: str, instance_id: str, state: InstanceState) -> int:
        """Offline tokens that could be sent there; at most 0: none."""
        return state.load.offline_room.get(model, 0) - self._offline.num_tokens(instance_id, model)

    def _view(self, state: InstanceState, instance_id: str, is_high: bool) -> DispatchView:
        report = state.report
        assert report is not None
        in_flight = self.ledger.num_requests(instance_id) - self._offline.num_requests(instance_id)
        freeness = freeness_with_ledger(state.freeness(is_high), self.ledger.demand_merged(instance_id), in_flight)
        return DispatchView(freeness, state.load.num_requests + in_flight, state.last_turn)
