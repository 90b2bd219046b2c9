"""Who may take a request, in order: ranks the instances of each lane again only where they changed and may come first.

Ranks depend on the instance alone, so they are kept ordered (`CandidateIndex`), and a report costs the same at 1,000
instances as at 10. Work is done only for what changed, and only while something waits: `touch`, `on_report` and `relieve`
note an instance, `woken` has those that were noted ranked again when they come first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from shared.costs.model import prompt_s
from shared.engines.capabilities import asked
from shared.messages.cluster import LoadReport
from shared.policies.dispatch import (
    NUM_CACHED,
    DispatchKey,
    DispatchPolicy,
)
from shared.policies.prefix_fetch import Fetch, fetch_of, is_cheaper
from shared.scheduling.cluster import ClusterView, InstanceState, ServedModel
from shared.scheduling.in_flight import InFlightLedger
from shared.scheduling.prefixes import NOT_HELD, Held, PrefixIndex
from shared.scheduling.queue import Lane
from shared.scheduling.requests import TrackedRequest
from shared.scheduling.standing import Figures, Standing

MAX_HOLDERS = 32
"""Instances with the longest prefixes of a prompt, of which the freest are looked at."""


MIN_BOUNDS = 64
"""Bounds of an index that it keeps without looking for those that do not hold any more."""


class CandidateIndex:
    """Candidates in order of rank. `rank_of(instance_id)` is asked again only for ids that were named since; None: the
    instance is no candidate now. A sorted list, so that the first few are looked at where they stand: a change costs two
    searches in it, and nothing until somebody asks.

    Most changes of load make no instance the best one, and are not even named. An instance is looked at where it would
    stand at best (`hint`), and is ranked when it comes first, if `version_of` it is not what it was when it was ranked.
    `on_ranked` says that it stands where it belongs: whatever would be better than that has to be named from now on. As few
    instances ever come that far, a hint moves nothing until somebody looks as far as it points.
    """

    def __init__(
        self,
        rank_of: Callable[[str], DispatchKey | None],
        version_of: Callable[[str], object] | None = None,
        on_ranked: Callable[[str], None] | None = None,
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        """`admits`: whether `rank_of` gives a rank; None: that is asked."""
        self._rank_of = rank_of
        self.admits = admits or (lambda instance_id: rank_of(instance_id) is not None)
        """Whether an instance is a candidate now, as `in` says, but nobody is ranked."""
        self._version_of = version_of
        self._on_ranked = on_ranked
        self._touched: set[str] = set()
        self._hinted: dict[str, float] = {}
        """Since the last look."""
        self._pending: dict[str, float] = {}
        """Instances that may stand too far back: the first number of their rank at best."""
        self._bounds: list[tuple[float, str]] = []
        """The same as a heap, with others that do not hold any more."""
        self._versions: dict[str, object] = {}
        self._ranks: dict[str, DispatchKey] = {}
        self._ordered: list[tuple[float, DispatchKey, str]] = []
        """Each rank with its first number before it, which decides nearly always and is compared soonest."""

    def touch(self, instance_id: str) -> None:
        """Something about the instance changed."""
        self._touched.add(instance_id)

    def touch_all(self, instance_ids: Collection[str]) -> None:
        self._touched.update(instance_ids)

    def worsen(self, instance_id: str) -> None:
        """Ranks an instance for the worse if the first number of its rank is not above 0: then it is ranked when it
        comes first."""
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
        at, ordered, bounds, version_of = 0, self._ordered, self._bounds, self._version_of
        while True:
            while bounds and (at >= len(ordered) or bounds[0][0] <= ordered[at][0]):
                self._follow_bound()
            if at >= len(ordered):
                return None
            instance_id = ordered[at][2]
            if version_of is not None and self._versions.get(instance_id) is not version_of(instance_id):
                self._rank(instance_id)  # which moves it further back, if at all
            elif is_fit(instance_id):
                return instance_id
            else:
                at += 1

    def ranked(self, instance_ids: Iterable[str]) -> list[str]:
        """Those of these that are candidates, in the order of `best`. It ranks all of them."""
        return sorted((name for name in instance_ids if name in self), key=lambda name: (self._ranks[name], name))

    def _follow_bound(self) -> None:
        """Ranks the instance of the least bound, which comes first at best, if it may still stand too far back."""
        bound, instance_id = heappop(self._bounds)
        if self._pending.get(instance_id) == bound:
            self._rank(instance_id)

    def _refresh(self) -> None:
        if self._hinted:
            ranks, versions, pending, bounds = self._ranks, self._versions, self._pending, self._bounds
            for instance_id, bound in self._hinted.items():
                versions.pop(instance_id, None)
                known = ranks.get(instance_id)
                if known is None or not bound > known[0]:  # where it is equal, the rest of the rank may be better
                    pending[instance_id] = bound
                    heappush(bounds, (bound, instance_id))
                else:
                    pending.pop(instance_id, None)
            self._hinted.clear()
            if len(bounds) > 2 * len(pending) + MIN_BOUNDS:
                bounds[:] = [(bound, instance_id) for instance_id, bound in pending.items()]
                heapify(bounds)
        for instance_id in self._touched:
            self._rank(instance_id)
        self._touched.clear()

    def _is_stale(self, instance_id: str) -> bool:
        if self._version_of is None:
            return False
        if instance_id not in self._ranks:
            return instance_id in self._pending
        return self._versions.get(instance_id) is not self._version_of(instance_id)

    def _rank(self, instance_id: str) -> None:
        rank = self._rank_of(instance_id)
        self._pending.pop(instance_id, None)
        if self._on_ranked is not None:
            self._on_ranked(instance_id)
        self._place(instance_id, rank)
        if rank is None:
            self._versions.pop(instance_id, None)
        elif self._version_of is not None:
            self._versions[instance_id] = self._version_of(instance_id)

    def _place(self, instance_id: str, rank: DispatchKey | None) -> None:
        before = self._ranks.get(instance_id)
        if rank is not None and rank[0] != rank[0]:  # not a number has no place in an order
            rank = (inf, *rank[1:])
        if before == rank:
            return
        if before is not None:
            del self._ordered[bisect_left(self._ordered, (before[0], before, instance_id))]
        if rank is None:
            del self._ranks[instance_id]
        else:
            self._ranks[instance_id] = rank
            insort(self._ordered, (rank[0], rank, instance_id))


class _Indexes(NamedTuple):
    """The candidates of a lane, as requests of normal and of high priority see them, and those that are behind
    (tenants.py)."""

    normal: CandidateIndex
    high: CandidateIndex
    behind: CandidateIndex


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
        """Bounds of instances that became better than was told: how an online request ranks them at best."""
        self._told: dict[str, tuple[float, float]] = {}
        """The bounds that the indexes were told since they last ranked the instance."""
        self._woken: dict[Lane, None] = {}
        """In the order in which they were woken."""
        self._standings: dict[str, Standing] = {}
        """Standings of instances about which nothing was noted since."""

    def wake(self, lane: Lane) -> None:
        """Something waits in the lane."""
        lanes = self._lanes_of_model.setdefault(lane.model, {})
        if lane not in lanes:
            indexes = lanes[lane] = _Indexes(
                self._new_index(lane, False), self._new_index(lane, True), self._new_index(lane, False, is_behind=True)
            )
            for instance_id, state in self._cluster:
                if lane.model in state.ready:
                    for index in indexes:
                        index.touch(instance_id)
        self._woken[lane] = None

    def touch(self, instance_id: str, before: Iterable[str] = ()) -> None:
        """Something changed about an instance. `before`: the models that it served until now, where that changed."""
        self._standings.pop(instance_id, None)
        self._touched.add(instance_id)
        for model in before:
            for lane, indexes in self._lanes_of_model.get(model, {}).items():
                for index in indexes:
                    index.touch(instance_id)
                self._woken[lane] = None

    def on_report(self, instance_id: str, report: LoadReport) -> None:
        """Notes a report after which only the instance's load differs: it is as free as its report says, at best."""
        self._standings.pop(instance_id, None)
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
            self.on_report(instance_id, state.report)
        else:
            self.touch(instance_id)

    def worsen(self, instance_id: str, state: InstanceState) -> None:
        """A request was sent there."""
        self._standings.pop(instance_id, None)
        for model in state.ready:
            for indexes in self._lanes_of_model.get(model, {}).values():
                for index in indexes:
                    index.worsen(instance_id)

    def wake_again(self, lanes: Iterable[Lane]) -> None:
        """Lanes from `woken` that were not looked through."""
        self._woken.update(dict.fromkeys(lanes))

    def woken(self) -> list[Lane]:
        """Lanes in which something came to wait, or about whose instances something was noted, since the last call."""
        if self._touched or self._reported:
            self._note_changes()
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def index(self, lane: Lane, is_high: bool, is_behind: bool = False) -> CandidateIndex:
        indexes = self._lanes_of_model[lane.model][lane]
        if is_high:
            return indexes.high
        return indexes.behind if is_behind else indexes.normal

    def _note_changes(self) -> None:
        """Notes changes in all lanes: which models an instance serves is looked at when it is ranked."""
        for lanes in self._lanes_of_model.values():
            for lane, indexes in lanes.items():
                for index in indexes:
                    index.touch_all(self._touched)
                    if not lane.is_online:
                        index.touch_all(self._reported)
                if lane.is_online:
                    indexes.normal.hint(self._bounds)
                    indexes.high.hint(self._bounds_high)
                    indexes.behind.hint(self._bounds)
                self._woken[lane] = None
        self._touched.clear()
        self._reported.clear()
        self._bounds.clear()
        self._bounds_high.clear()

    def _new_index(self, lane: Lane, is_high: bool, *, is_behind: bool = False) -> CandidateIndex:
        rank_of = partial(self.rank, lane, is_high, is_behind=is_behind)
        admits = partial(self._admits, lane, is_high, is_behind)
        if not self._policy.ranks_by_freeness or not lane.is_online:
            return CandidateIndex(rank_of, admits=admits)
        return CandidateIndex(rank_of, self._version_of, self._on_ranked, admits)

    def _version_of(self, instance_id: str) -> object:
        state = self._cluster.get(instance_id)
        return state.report if state is not None else None

    def _on_ranked(self, instance_id: str) -> None:
        self._told.pop(instance_id, None)

    # ---------------------------------------------------------------------------------------------------- rank

    def rank(self, lane: Lane, is_high: bool, instance_id: str, *, is_behind: bool = False) -> DispatchKey | None:
        """None: it may take no request of the lane."""
        state = self._cluster.get(instance_id)
        if state is None or not state.is_candidate or lane.model not in state.ready:
            return None
        if lane.is_online:
            standing = self.standing(instance_id, state)
            limit = 2 * self._max_waiting if is_high else self._max_waiting
            # How many of these come is bounded by their being behind.
            has_room = is_behind or standing.num_waiting(lane.model) < limit
            return self._policy.rank(standing.view(is_high)) if has_room else None
        room = self.offline_room(lane.model, instance_id, state)
        return (-room, state.last_turn) if room > 0 else None

    def _admits(self, lane: Lane, is_high: bool, is_behind: bool, instance_id: str) -> bool:
        """Whether `rank` gives it a rank."""
        state = self._cluster.get(instance_id)
        if state is None or not state.is_candidate or lane.model not in state.ready:
            return False
        return (is_behind and lane.is_online) or self.has_room(lane, instance_id, state, is_high=is_high)

    def has_room(self, lane: Lane, instance_id: str, state: InstanceState, *, is_high: bool = False) -> bool:
        """Whether one more request of the lane may go there; what is in flight counts as waiting there. Offline requests
        do not stand in the way of online ones, which go first on the instance too."""
        if not lane.is_online:
            return self.offline_room(lane.model, instance_id, state) > 0
        limit = 2 * self._max_waiting if is_high else self._max_waiting
        return self.standing(instance_id, state).num_waiting(lane.model) < limit

    def offline_room(self, model: str, instance_id: str, state: InstanceState) -> int:
        """Offline tokens that could be sent there; at most 0: none."""
        return state.load.offline_room(model) - self._ledger.offline_tokens(instance_id, model)

    def standing(self, instance_id: str, state: InstanceState) -> Standing:
        """Standing of an instance that has reported."""
        standing = self._standings.get(instance_id)
        if standing is None or standing.report is not state.report:
            standing = self._standings[instance_id] = Standing(instance_id, state, self._ledger)
        return standing


class _Way(NamedTuple):
    """What a request would take where its model is served in one way."""

    served: ServedModel
    fits: bool
    """Whether it can grow to its end there."""
    demand_merged: float
    tokens_per_merged: int
    free_merged: float
    """Merged blocks of an empty pool beside it."""
    held: Held
    """Tokens of the prompt in caches of blocks of that size."""


class Seen:
    """An instance as a request finds it (`Candidate`)."""

    __slots__ = (
        "cached_tokens",
        "demand_merged",
        "fetch",
        "in_flight_merged",
        "instance_id",
        "left_merged",
        "missing_merged",
        "model",
        "prompt_s",
        "start_s",
        "state",
        "token_s",
        "view",
    )

    def __init__(self, instance_id: str, figures: Figures, way: _Way, by: CandidatesFor) -> None:
        (
            self.state, self.view, _, num_others, in_flight_merged, left_merged, share_left_merged, prompts_s, sent_s,
            heard_s, prompt_cost, fetch_token_s, self.token_s,
        ) = figures  # fmt: skip
        served, _, demand_merged, tokens_per_merged, free_merged, held = way
        self.instance_id = instance_id
        self.model = by.model
        self.demand_merged = demand_merged
        self.in_flight_merged = in_flight_merged
        self.left_merged = left_merged
        missing = demand_merged
        if num_others and tokens_per_merged:
            growth = by.growth_steps * (num_others + 1) / tokens_per_merged
            missing += growth if growth < free_merged else free_merged
        missing = missing + in_flight_merged - left_merged
        if missing > 0 and demand_merged <= share_left_merged:
            missing = 0.0  # the instance admits it, whatever others wait for
        self.missing_merged = missing
        start_s = prompts_s - (by.now - heard_s)
        self.start_s = sent_s + start_s if start_s > 0 else sent_s
        self.cached_tokens = num_there = held.get(instance_id, 0)
        """Tokens of the prompt that are likely in its prefix cache."""
        self.prompt_s = 0.0  # its cost is not known
        self.fetch: Fetch | None = None
        """What of the prompt is to be fetched from another instance; None: nothing."""
        if prompt_cost is not None:
            self.prompt_s = prompt_s(prompt_cost, by.num_tokens - num_there, num_there)
            if fetch_token_s:
                self._consider_fetch(prompt_cost, served.block_size, by)

    def _consider_fetch(self, prompt_cost: tuple[float, float], block_size: int, by: CandidatesFor) -> None:
        """Has the prompt's beginning fetched, where that is faster."""
        longest = by.longest_given(block_size)
        if longest is None or longest[0] == self.instance_id:
            return
        fetch = fetch_of(*longest[:2], self.cached_tokens, longest[2])
        if fetch is not None:
            rest_s = prompt_s(prompt_cost, by.num_tokens - fetch.num_tokens, fetch.num_tokens)
            if is_cheaper(fetch, self.prompt_s, rest_s):
                self.fetch, self.prompt_s = fetch, fetch.seconds + rest_s

    @property
    def step_s(self) -> float:
        """Predicted seconds of the decode steps of its model there; 0: not known."""
        for name, num, (one_s, request_s) in self.state.load.residents:
            if name == self.model:
                return one_s + num * request_s
        return 0.0

    @property
    def ttft_s(self) -> float:
        """Objective of a first token there; 0: none is told."""
        return 0.0 if self.state.report is None else self.state.report.ttft_s


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
        self._request = request.request if request.is_online or request.is_rescued else None
        self._asked = frozenset() if request.request is None else asked(request.request)
        self._index = index
        self._cluster = cluster
        self._prefixes = prefixes
        self._held_tokens: dict[int, Held] = {}
        """By block size."""
        self._given: dict[int, tuple[str, int, float] | None] = {}
        """By block size: `longest_given`."""
        self._ways: dict[ServedModel, _Way] = {}
        self._way: _Way | None = None
        """The last one that was asked for."""
        self._seen: dict[str, Seen | None] = {}
        self._owners: list[Seen] | None = None
        self._is_allowed: Callable[[str], bool] | None = None
        self._among: Collection[str] | None = None

    def narrow(self, is_allowed: Callable[[str], bool], among: Collection[str] | None = None) -> None:
        """Lets only instances of these ids be candidates from now on. `among`: all of them, where they are few: the others
        are not looked at."""
        self._is_allowed, self._among, self._owners = is_allowed, among, None

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

        if self._among is None:
            self._index.best(is_last)
        else:
            next(filter(is_last, self._index.ranked(self._among)), None)
        return found

    def cached(self, limit: int) -> list[Seen]:
        if self._owners is None:
            able = (name for _, _, name in sorted(self._longest(), reverse=True) if self._index.admits(name))
            self._owners = [seen for name in islice(able, NUM_CACHED) if (seen := self._fitting(name)) is not None]
        return self._owners[:limit]

    def _longest(self) -> list[tuple[int, float, str]]:
        """Tokens held, freeness as reported, and the instance: of some of those that have the longest prefixes."""
        found, state_of = [], self._cluster.get
        for held in self._all_held_tokens():
            for name, num_tokens in islice(held.longest(), MAX_HOLDERS):
                state = state_of(name)
                if state is not None and (report := state.report) is not None:
                    found.append((num_tokens, report.dispatch_freeness, name))
        return found

    def held_tokens(self, block_size: int) -> Held:
        """Tokens of the prompt that instances with blocks of that size have in their caches."""
        held = self._held_tokens.get(block_size)
        if held is None:
            held = NOT_HELD
            if self._prefixes is not None and self._request is not None:
                held = self._prefixes.held_tokens(self._request, block_size, self.now)
            self._held_tokens[block_size] = held
        return held

    def longest_given(self, block_size: int) -> tuple[str, int, float] | None:
        """The instance that has the most of the prompt and gives it to others, how many tokens, and what one takes from
        there, in seconds; None: nobody gives any."""
        if block_size not in self._given:
            self._given[block_size] = None
            for name, num_tokens in islice(self.held_tokens(block_size).longest(), NUM_CACHED):
                state = self._cluster.get(name)
                if state is None or state.report is None or not state.can_take:
                    continue
                if token_s := self.ranking.standing(name, state).fetch_token_s(self.model):
                    self._given[block_size] = name, num_tokens, token_s
                    break
        return self._given[block_size]

    def _all_held_tokens(self) -> list[Held]:
        """Tokens held, for each size that blocks of the model have somewhere."""
        ways, _ = self._cluster.ways(self.model)
        return [self.held_tokens(block_size) for block_size in {way.block_size for way in ways}]

    def _fitting(self, instance_id: str) -> Seen | None:
        """The instance as the request sees it; None: it is not to go there, or cannot grow to its end there."""
        if self._is_allowed is not None and not self._is_allowed(instance_id):
            return None
        if instance_id not in self._seen:
            state = self._cluster.get(instance_id)
            assert state is not None, f"{instance_id} is ranked but not in the registry"
            figures = self.ranking.standing(instance_id, state).figures(self.model, self.is_high)
            way = self._way
            if way is None or way.served is not figures.served:
                way = self._way = self._way_of(figures.served)
            self._seen[instance_id] = Seen(instance_id, figures, way, self) if way.fits else None
        return self._seen[instance_id]

    def _way_of(self, served: ServedModel) -> _Way:
        way = self._ways.get(served)
        if way is None:
            fits = served.fits(self._num_tokens_at_most) and not self._asked & served.lacks
            demand_merged = served.demand_merged(self.num_tokens)
            free_merged = max(0.0, served.num_merged - demand_merged)
            held = self.held_tokens(served.block_size)
            way = self._ways[served] = _Way(served, fits, demand_merged, served.tokens_per_merged, free_merged, held)
        return way
