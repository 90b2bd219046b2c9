"""Where a queued request goes: rank of the candidates, the in-flight ledger, and prefix affinity.

A dispatch policy is a function from a `DispatchView` of an instance to a rank; the smallest rank is chosen. Ranks depend
on the instance alone, so they are kept ordered and only what changed is ranked again (`CandidateIndex`): a report costs
the same at 1,000 instances as at 10.

Memory is one thing that a request waits for, prompts before its own are the other. Where several instances have the memory,
the choice is among the `NUM_TIMED` of smallest rank by predicted time to the first token (`soonest`).

The in-flight ledger holds what was dispatched to an instance and is not in its load reports yet (Llumnix's dispatch-time
local account). Without it a burst between two reports lands on one instance.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shared.policies.virtual_usage import left_of

Rank = tuple[float, ...]


class DispatchView(NamedTuple):
    """What a policy may know of a candidate. Load that is in flight to it is counted in."""

    freeness: float
    """Merged blocks per running request; higher is freer."""
    num_requests: int
    """Running, waiting and in flight."""
    last_turn: int
    """Number of the last dispatch that went there, counted over the cluster; 0 before the first."""


NUM_TIMED = 16
GRAIN_S = 0.1
"""Predicted times that differ by less are as good as equal."""


def soonest(starts_s: Sequence[float]) -> int:
    """Which of several candidates, in order of rank, takes a request: the first of those that begin its prompt within
    `GRAIN_S` of the soonest. `starts_s`: predicted, not empty."""
    limit_s = min(starts_s) + GRAIN_S
    return next(number for number, start_s in enumerate(starts_s) if start_s <= limit_s)


DispatchPolicy = Callable[[DispatchView], Rank]


def by_freeness(view: DispatchView) -> Rank:
    """Llumnix: the freest instance; among equals the one with fewer requests. Without migration this is INFaaS++."""
    return (-view.freeness, view.num_requests)


def by_fewest_requests(view: DispatchView) -> Rank:
    """Baseline: least outstanding requests."""
    return (view.num_requests,)


def by_turn(view: DispatchView) -> Rank:
    """Baseline: round robin (least recently chosen first, so instances that come and go keep the turn fair)."""
    return (view.last_turn,)


TIMED_POLICY = "first_token"
"""By freeness; and where there is memory, by `soonest`."""

DISPATCH_POLICIES: dict[str, DispatchPolicy] = {
    TIMED_POLICY: by_freeness,
    "freeness": by_freeness,
    "round_robin": by_turn,
    "fewest_requests": by_fewest_requests,
}


class ReportedFreeness(NamedTuple):
    """Of a load report."""

    freeness: float
    num_running: int
    """Online requests that run: what the freeness is divided by."""
    free_merged: float
    """Stands for the numerator where the report says +inf (idle)."""

    @property
    def left_merged(self) -> float:
        """Merged blocks beside the virtual usage; below 0 where more is asked for than there is."""
        if self.freeness != self.freeness:  # not a number
            return -math.inf
        return left_of(self.free_merged, self.freeness, self.num_running)


def freeness_with_ledger(reported: ReportedFreeness, ledger_merged: float, ledger_requests: int) -> float:
    """Dispatch freeness as if the requests in flight to the instance were already running there. `ledger_merged`: their
    demand, in merged blocks."""
    if reported.freeness != reported.freeness:  # not a number
        return -math.inf
    if ledger_requests == 0:
        return reported.freeness
    return (reported.left_merged - ledger_merged) / max(1, reported.num_running + ledger_requests)


class InFlight(NamedTuple):
    """One ledger entry."""

    model: str
    is_online: bool
    demand_merged: float
    prompt_s: float = 0.0
    """Predicted time of its prompt there."""


class InFlightLedger:
    """Requests dispatched to each instance that no report of it has named yet. A request is in flight to one instance at
    most. Few entries an instance (the bound on waiting requests), so sums are taken afresh and cannot drift."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, InFlight]] = {}
        self._instance_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._instance_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._instance_of

    def add(self, request_id: str, instance_id: str, entry: InFlight) -> None:
        assert request_id not in self._instance_of, f"{request_id} is in flight already"
        self._instance_of[request_id] = instance_id
        self._entries.setdefault(instance_id, {})[request_id] = entry

    def remove(self, request_id: str) -> str | None:
        """The instance to which it was in flight, or None if it was to none."""
        instance_id = self._instance_of.pop(request_id, None)
        if instance_id is not None:
            entries = self._entries[instance_id]
            del entries[request_id]
            if not entries:
                del self._entries[instance_id]
        return instance_id

    def where(self, request_id: str) -> str | None:
        return self._instance_of.get(request_id)

    def num_requests(self, instance_id: str) -> int:
        return len(self._entries.get(instance_id, ()))

    def num_waiting(self, instance_id: str, model: str, *, online_only: bool) -> int:
        """Entries of a model that count as waiting there."""
        entries = self._entries.get(instance_id)
        if not entries:
            return 0
        return len([e for e in entries.values() if e.model == model and (e.is_online or not online_only)])

    def demand_merged(self, instance_id: str) -> float:
        """Merged blocks that the online entries will take (offline work is not load)."""
        entries = self._entries.get(instance_id)
        if not entries:
            return 0.0
        return sum([entry.demand_merged for entry in entries.values() if entry.is_online])

    def prompts_s(self, instance_id: str) -> float:
        """Predicted time of the online entries' prompts."""
        entries = self._entries.get(instance_id)
        if not entries:
            return 0.0
        return sum([entry.prompt_s for entry in entries.values() if entry.is_online])


class CandidateIndex:
    """Candidates in order of rank. `rank_of(instance_id)` is asked again only for ids that were named since; None: the
    instance is no candidate now. A heap with lazy deletion: amortised O(log n) a change, and nothing until somebody asks.

    Most changes of load make no instance the best one, and are not even named. An instance stands where it would at best
    (`hint`), and is ranked when it comes first, if `version_of` it is not what it was when it was ranked. `on_ranked` says
    that it stands where it belongs: whatever would be better than that has to be named from now on.
    """

    def __init__(
        self,
        rank_of: Callable[[str], Rank | None],
        version_of: Callable[[str], object] | None = None,
        on_ranked: Callable[[str], None] | None = None,
    ) -> None:
        self._rank_of = rank_of
        self._version_of = version_of
        self._on_ranked = on_ranked
        self._touched: set[str] = set()
        self._hinted: dict[str, float] = {}
        self._versions: dict[str, object] = {}
        self._ranks: dict[str, Rank] = {}
        self._heap: list[tuple[Rank, str]] = []

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
        return self.best(_everyone) is None

    def __contains__(self, instance_id: str) -> bool:
        self._refresh()
        if self._is_stale(instance_id):
            self._rank(instance_id)
        return instance_id in self._ranks

    def best(self, is_fit: Callable[[str], bool]) -> str | None:
        """The candidate of smallest rank among those that `is_fit`; ties go to the smaller id."""
        return next(iter(self.first(1, is_fit)), None)

    def first(self, limit: int, is_fit: Callable[[str], bool]) -> list[str]:
        """The `limit` candidates of smallest rank, in order, among those that `is_fit`."""
        self._refresh()
        taken: list[tuple[Rank, str]] = []
        found: list[str] = []
        while self._heap:
            item = self._heap[0]
            rank, instance_id = item
            if self._ranks.get(instance_id) == rank and self._is_stale(instance_id):
                self._rank(instance_id)
                continue
            is_twice = bool(taken) and taken[-1] == item
            if self._ranks.get(instance_id) == rank and not is_twice:
                if is_fit(instance_id):
                    found.append(instance_id)
                    if len(found) == limit:
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


def _everyone(_: str) -> bool:
    return True


class PrefixAffinity:
    """Guesses which instance has a prompt's prefix in its cache: the one to which a request with that prefix last went.

    Prompts are cut into chunks and chained hashes of the chunks are remembered, least recently used forgotten first.
    A guess that is wrong (evicted there, or a hash collision) costs the cache hit and nothing else.
    """

    def __init__(self, *, chunk_tokens: int = 64, max_chunks: int = 32, max_entries: int = 65536) -> None:
        self._chunk_bytes = 4 * chunk_tokens
        self._max_chunks = max_chunks
        self._max_entries = max_entries
        self._owners: OrderedDict[int, str] = OrderedDict()

    def record(self, model: str, prompt: bytes, instance_id: str) -> None:
        for key in self._keys(model, prompt):
            self._owners[key] = instance_id
            self._owners.move_to_end(key)
        while len(self._owners) > self._max_entries:
            self._owners.popitem(last=False)

    def likely_owner(self, model: str, prompt: bytes) -> str | None:
        """The instance believed to hold the longest prefix of `prompt` (packed token ids)."""
        owner = None
        for key in self._keys(model, prompt):
            known = self._owners.get(key)
            if known is None:
                break
            owner = known
        return owner

    def _keys(self, model: str, prompt: bytes) -> Iterator[int]:
        key: int = hash(model)
        for index in range(min(self._max_chunks, len(prompt) // self._chunk_bytes)):
            key = hash((key, prompt[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]))
            yield key
