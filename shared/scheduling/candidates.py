"""Who may take a request, in order: ranks the instances of each lane again only where they changed and may come first.

Ranks depend on the instance alone, so they are kept ordered (`CandidateIndex`), and a report costs the same at 1,000
instances as at 10. Work is done only for what changed, and only while something waits: `touch`, `on_report` and `relieve`
note an instance, `woken` has those that were noted ranked again when they come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from heapq import heapify, heappop, heappush, nlargest
from typing import NamedTuple

from shared.cost_model import prompt_s
from shared.messages.cluster import LoadReport
from shared.policies.dispatch import (
    DispatchKey,
    DispatchPolicy,
    DispatchView,
    freeness_with_ledger,
)
from shared.policies.token_cost import token_cost_s
from shared.scheduling.cluster import ClusterView, InstanceState
from shared.scheduling.in_flight import InFlightLedger
from shared.scheduling.prefixes import PrefixIndex
from shared.scheduling.queue import Lane
from shared.scheduling.requests import TrackedRequest


class CandidateIndex:
    """Candidates in order of rank. `rank_of(instance_id)` is asked again only for ids that were named since; None: the
    instance is no candidate now. A heap with lazy deletion: amortised O(log n) a change, and nothing until somebody asks.

    Most changes of load make no instance the best one, and are not even named. An instance stands where it would at best
    (`hint`), and is ranked when it comes first, if `version_of` it is not what it was when it was ranked. `on_ranked` says
    that it stands where it belongs: whatever would be better than that has to be named from now on.
    """

    def __init__(
        self,
        rank_of: Callable[[str], DispatchKey | None],
        version_of: Callable[[str], object] | None = None,
        on_ranked: Callable[[str], None] | None = None,
    ) -> None:
        self._rank_of = rank_of
        self._version_of = version_of
        self._on_ranked = on_ranked
        self._touched: set[str] = set()
        self._hinted: dict[str, float] = {}
        self._versions: dict[str, object] = {}
        self._ranks: dict[str, DispatchKey] = {}
        self._heap: list[tuple[DispatchKey, str]] = []

    def touch(self, instance_id: str) -> None:
        """Something about the instance changed."""
        self._touched.add(instance_id)

    def touch_all(self, instance_ids: Collection[str]) -> None:
        self._touched.update(instance_ids)

    def worsen(self, instance_id: str) -> None:
        """Likewise, for the worse if the first number of its rank is not above 0: then it is ranked when it comes first."""
        known = self._ranks.get(instance_id)
        if self._version_of is not None and known is not None and known[0] <= 0:
            self._versions.pop(instance_id, None)
        else:
            self._touched.add(instance_id)

    def hint(self, bounds: Mapping[str, float]) -> None:
        """The least that the first number of each one's rank can be now."""
        self._hinted.update(bounds)

    def is_empty(self) -> bool:
        return self.best(lambda _: True) is None

    def __contains__(self, instance_id: str) -> bool:
        self._refresh()
        if self._is_stale(instance_id):
            self._rank(instance_id)
        return instance_id in self._ranks

    def best(self, is_fit: Callable[[str], bool]) -> str | None:
        """The candidate of smallest rank among those that `is_fit`, which are asked about in order; ties go to the smaller
        id."""
        self._refresh()
        taken: list[tuple[DispatchKey, str]] = []
        found = None
        while self._heap:
            item = self._heap[0]
            rank, instance_id = item
            if self._ranks.get(instance_id) == rank and self._is_stale(instance_id):
                self._rank(instance_id)
                continue
            is_twice = bool(taken) and taken[-1] == item
            if self._ranks.get(instance_id) == rank and not is_twice:
                if is_fit(instance_id):
                    found = instance_id
                    break
                taken.append(item)
            heappop(self._heap)
        for item in taken:
            heappush(self._heap, item)
        return found

    def _refresh(self) -> None:
        if self._hinted:
            ranks, heap, versions = self._ranks, self._heap, self._versions
            for instance_id, bound in self._hinted.items():
                versions.pop(instance_id, None)
                known = ranks.get(instance_id)
                if known is None or not bound >= known[0]:
                    rank = ranks[instance_id] = (bound,)
                    heappush(heap, (rank, instance_id))
            self._hinted.clear()
        for instance_id in self._touched:
            self._rank(instance_id)
        self._touched.clear()
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, instance_id) for instance_id, rank in self._ranks.items()]
            heapify(self._heap)

    def _is_stale(self, instance_id: str) -> bool:
        if self._version_of is None or instance_id not in self._ranks:
            return False
        return self._versions.get(instance_id) is not self._version_of(instance_id)

    def _rank(self, instance_id: str) -> None:
        rank = self._rank_of(instance_id)
        if self._version_of is not None:
            self._versions[instance_id] = self._version_of(instance_id)
        if self._on_ranked is not None:
            self._on_ranked(instance_id)
        if rank is None:
            self._ranks.pop(instance_id, None)
            self._versions.pop(instance_id, None)
        elif self._ranks.get(instance_id) != rank:
            self._ranks[instance_id] = rank
            heappush(self._heap, (rank, instance_id))


class _Indexes(NamedTuple):
    """The candidates of a lane, as requests of normal and of high priority see them."""

    normal: CandidateIndex
    high: CandidateIndex


class Ranking:
    """The candidates of all lanes."""

    def __init__(
        self, cluster: ClusterView, ledger: InFlightLedger, policy: DispatchPolicy, max_waiting_per_model: int
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._policy = policy
        self._max_waiting = max_waiting_per_model
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

    def wake(self, lane: Lane) -> None:
        """Something waits in the lane."""
        lanes = self._lanes_of_model.setdefault(lane.model, {})
        if lane not in lanes:
            indexes = lanes[lane] = _Indexes(self._new_index(lane, False), self._new_index(lane, True))
            for instance_id, state in self._cluster:
                if lane.model in state.ready:
                    indexes.normal.touch(instance_id)
                    indexes.high.touch(instance_id)
        self._woken[lane] = None

    def touch(self, instance_id: str, before: Iterable[str] = ()) -> None:
        """Something changed about an instance. `before`: the models that it served until now, where that changed."""
        self._touched.add(instance_id)
        for model in before:
            for lane, indexes in self._lanes_of_model.get(model, {}).items():
                indexes.normal.touch(instance_id)
                indexes.high.touch(instance_id)
                self._woken[lane] = None

    def on_report(self, report: LoadReport) -> None:
        """Likewise, where all that changed is the instance's load: it is as free as its report says, at best."""
        instance_id = report.instance_id
        self._reported.add(instance_id)
        normal, high = -report.dispatch_freeness, -report.dispatch_freeness_high
        # Below 0 each request in flight takes a share of what is missing, so it may even look better than it says.
        is_bound = (normal <= 0 and high <= 0) or not self._ledger.num_requests(instance_id)
        if not self._policy.ranks_by_freeness or not is_bound or normal != normal or high != high:
            self._touched.add(instance_id)
            return
        told = self._told.get(instance_id)
        if told is None or not (normal >= told[0] and high >= told[1]):
            self._told[instance_id] = (normal, high)
            self._bounds[instance_id], self._bounds_high[instance_id] = normal, high

    def relieve(self, instance_id: str) -> None:
        """Something is not in flight to the instance any more."""
        state = self._cluster.get(instance_id)
        if state is not None and state.report is not None:
            self.on_report(state.report)
        else:
            self._touched.add(instance_id)

    def worsen(self, instance_id: str, state: InstanceState) -> None:
        """A request was sent there."""
        for model in state.ready:
            for indexes in self._lanes_of_model.get(model, {}).values():
                indexes.normal.worsen(instance_id)
                indexes.high.worsen(instance_id)

    def woken(self) -> list[Lane]:
        """Lanes in which something came to wait, or about whose instances something was noted, since the last call."""
        if self._touched or self._reported:
            self._note_changes()
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def index(self, lane: Lane, is_high: bool) -> CandidateIndex:
        indexes = self._lanes_of_model[lane.model][lane]
        return indexes.high if is_high else indexes.normal

    def _note_changes(self) -> None:
        """Of all lanes: which models an instance serves is looked at when it is ranked."""
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
        rank_of = partial(self.rank, lane, is_high)
        if not self._policy.ranks_by_freeness or not lane.is_online:
            return CandidateIndex(rank_of)
        return CandidateIndex(rank_of, self._version_of, self._on_ranked)

    def _version_of(self, instance_id: str) -> object:
        state = self._cluster.get(instance_id)
        return state.report if state is not None else None

    def _on_ranked(self, instance_id: str) -> None:
        self._told.pop(instance_id, None)

    # ---------------------------------------------------------------------------------------------------- rank

    def rank(self, lane: Lane, is_high: bool, instance_id: str) -> DispatchKey | None:
        """None: it may take no request of the lane."""
        state = self._cluster.get(instance_id)
        if state is None or not state.is_candidate or lane.model not in state.ready:
            return None
        if lane.is_online:
            has_room = self.has_room(lane, instance_id, state, is_high=is_high)
            return self._policy.rank(self.view(instance_id, state, is_high)) if has_room else None
        room = self.offline_room(lane.model, instance_id, state)
        return (-room, state.last_turn) if room > 0 else None

    def has_room(self, lane: Lane, instance_id: str, state: InstanceState, *, is_high: bool = False) -> bool:
        """Whether one more request of the lane may go there; what is in flight counts as waiting there. Offline requests
        do not stand in the way of online ones, which go first on the instance too."""
        if not lane.is_online:
            return self.offline_room(lane.model, instance_id, state) > 0
        in_flight = self._ledger.num_waiting(instance_id, lane.model)
        limit = 2 * self._max_waiting if is_high else self._max_waiting
        return state.load.num_waiting_online.get(lane.model, 0) + in_flight < limit

    def offline_room(self, model: str, instance_id: str, state: InstanceState) -> int:
        """Offline tokens that could be sent there; at most 0: none."""
        return state.load.offline_room.get(model, 0) - self._ledger.offline_tokens(instance_id, model)

    def view(self, instance_id: str, state: InstanceState, is_high: bool) -> DispatchView:
        in_flight = self._ledger.num_online(instance_id)
        freeness = freeness_with_ledger(state.freeness(is_high), self._ledger.demand_merged(instance_id), in_flight)
        return DispatchView(freeness, state.load.num_requests + in_flight, state.last_turn)


class Seen:
    """An instance as a request finds it (`Candidate`). What nobody asks for is not worked out."""

    __slots__ = ("_by", "_missing", "instance_id", "state")

    def __init__(self, instance_id: str, state: InstanceState, by: CandidatesFor) -> None:
        self.instance_id = instance_id
        self.state = state
        self._by = by
        self._missing: float | None = None

    @property
    def view(self) -> DispatchView:
        return self._by.ranking.view(self.instance_id, self.state, self._by.is_high)

    @property
    def demand_merged(self) -> float:
        return self.state.ready[self._by.model].demand_merged(self._by.num_tokens)

    @property
    def in_flight_merged(self) -> float:
        return self._by.ledger.demand_merged(self.instance_id)

    @property
    def left_merged(self) -> float:
        return self.state.freeness(for_high=True).left_merged

    @property
    def missing_merged(self) -> float:
        if self._missing is None:
            by, state, instance_id = self._by, self.state, self.instance_id
            served = state.ready[by.model]
            demand = served.demand_merged(by.num_tokens)
            num_others = state.load.num_running + by.ledger.num_requests(instance_id)
            if num_others and (tokens_per_merged := served.tokens_per_merged):
                growth = by.growth_steps * (num_others + 1) / tokens_per_merged
                demand += min(growth, max(0.0, served.num_merged - demand))
            self._missing = demand + by.ledger.demand_merged(instance_id) - state.freeness(for_high=True).left_merged
        return self._missing

    @property
    def start_s(self) -> float:
        report = self.state.report
        assert report is not None
        passed_s = self._by.now - self.state.heard_s
        return max(0.0, report.prompts_s - passed_s) + self._by.ledger.prompts_s(self.instance_id)

    @property
    def prompt_s(self) -> float:
        report = self.state.report
        assert report is not None
        costs = (load.prompt_cost for load in report.models if load.model == self._by.model)
        cached = self.cached_tokens
        return prompt_s(next(costs, (0.0, 0.0)), self._by.num_tokens - cached, cached)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that are likely in its prefix cache."""
        return self._by.held_tokens(self.state.ready[self._by.model].block_size).get(self.instance_id, 0)

    @property
    def token_s(self) -> float:
        residents, by = self.state.load.residents, self._by
        if by.ledger.num_online(self.instance_id):
            num_sent = partial(by.ledger.num_waiting, self.instance_id)
            residents = [(model, num + num_sent(model), cost) for model, num, cost in residents]
        report = self.state.report
        num_high = 0 if by.is_high or report is None else report.num_high
        return token_cost_s(by.model, residents, num_high)


class CandidatesFor:
    """Those for one request (`Candidates`)."""

    def __init__(
        self,
        request: TrackedRequest,
        index: CandidateIndex,
        cluster: ClusterView,
        ranking: Ranking,
        ledger: InFlightLedger,
        prefixes: PrefixIndex | None,
        *,
        growth_steps: float,
        num_defragmenting: int,
        may_wait: bool,
        now: float,
    ) -> None:
        self.model, self.num_tokens, self.is_high = request.model, request.num_tokens, request.is_high
        self.ranking = ranking
        self.ledger = ledger
        self.growth_steps = growth_steps
        self.num_defragmenting = num_defragmenting
        self.may_wait = may_wait
        self.now = now
        self._num_tokens_at_most = request.num_tokens_at_most
        self._request = request.request if request.is_online else None
        self._index = index
        self._cluster = cluster
        self._prefixes = prefixes
        self._held_tokens: dict[int, dict[str, int]] = {}
        """By block size."""

    @property
    def num_serving(self) -> int:
        return self._cluster.num_serving(self.model)

    def first(self, limit: int, until: Callable[[Seen], bool] | None = None) -> list[Seen]:
        found: list[Seen] = []

        def is_last(instance_id: str) -> bool:
            seen = self._fitting(instance_id)
            if seen is None:
                return False
            found.append(seen)
            return len(found) == limit or (until is not None and until(seen))

        self._index.best(is_last)
        return found

    def cached(self, limit: int) -> list[Seen]:
        held = {name: num for of_size in self._all_held_tokens() for name, num in of_size.items()}
        longest = nlargest(limit, (name for name in held if name in self._index), key=held.__getitem__)
        return [seen for name in longest if (seen := self._fitting(name)) is not None]

    def held_tokens(self, block_size: int) -> dict[str, int]:
        """Of the prompt, that instances with blocks of that size have in their caches."""
        if self._prefixes is None or self._request is None:
            return {}
        if block_size not in self._held_tokens:
            self._held_tokens[block_size] = self._prefixes.held_tokens(self._request, block_size, self.now)
        return self._held_tokens[block_size]

    def _all_held_tokens(self) -> list[dict[str, int]]:
        """For each size that blocks of the model have somewhere."""
        ways, _ = self._cluster.ways(self.model)
        return [self.held_tokens(block_size) for block_size in {way.block_size for way in ways}]

    def _fitting(self, instance_id: str) -> Seen | None:
        """If the request can grow to its end there."""
        state = self._cluster.get(instance_id)
        assert state is not None, f"{instance_id} is ranked but not in the registry"
        is_fit = state.ready[self.model].fits(self._num_tokens_at_most)
        return Seen(instance_id, state, self) if is_fit else None
