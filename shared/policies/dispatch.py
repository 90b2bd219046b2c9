"""Policies that choose where a queued online request goes: each policy is a small object without state.

A policy ranks an instance by itself, and chooses for a request among candidates. Other modules
(`shared.scheduling.dispatching`) decide which may take a request, track what is in flight to them, and keep them in order.

A request waits for memory, for prompts before its own, and for its own prompt. `FirstToken` looks at instances that have
the memory: the `NUM_TIMED` freest, and those with the prompt's beginning in their caches. It compares the predicted time to
the first token, without the cached part of the prompt. Where that is equal, it compares what is left to compute, and what
the request's tokens cost there: models that share an instance take turns, so the fewer places a model's requests are in,
the larger are its batches and the fewer the turns (token_cost.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from shared.policies.token_cost import MARGIN, first_cheap, is_as_cheap
from shared.policies.virtual_usage import left_of

DispatchKey = tuple[float, ...]

NUM_TIMED = 16
GRAIN_S = 0.1
"""Predicted times that differ by less are as good as equal."""
SPARED_S = 0.005
"""Saving this much prompt time does not justify a less free instance; nor does saving a tenth of what is left, because
each instance learns costs by itself."""
MOST_UNEVEN = 1.25
"""Most that a token may cost where the prompt is cached, times the least: a shared prefix must not gather all requests."""
NUM_CACHED = 8
"""Number of instances looked at that have part of a prompt in their caches."""
NUM_FREEST = 64
"""Number of the freest instances looked at for one that a long request fits into."""


class DispatchView(NamedTuple):
    """What an instance is ranked by, including load in flight to it."""

    freeness: float
    """Merged blocks per running request; higher is freer."""
    num_requests: int
    """Running, waiting and in flight."""
    last_turn: int
    """Number of the last dispatch to it, counted over the cluster; 0 before the first."""


class Wanted(Protocol):
    """A waiting online request."""

    @property
    def model(self) -> str: ...
    @property
    def num_prompt(self) -> int:
        """Tokens."""

    @property
    def num_tokens(self) -> int:
        """Known so far: prompt and the output that the client has."""

    @property
    def num_tokens_at_most(self) -> int: ...
    @property
    def is_high(self) -> bool:
        """Whether it has high priority."""

    @property
    def arrived_s(self) -> float:
        """Time at which it arrived at the system."""


class Candidate(Protocol):
    """An instance that may take the request, as the request would find it: its last report, and what is in flight to it."""

    @property
    def instance_id(self) -> str: ...
    @property
    def view(self) -> DispatchView: ...
    @property
    def demand_merged(self) -> float:
        """Merged blocks that the request would take there with the tokens known so far."""

    @property
    def in_flight_merged(self) -> float:
        """Merged blocks that requests in flight will take."""

    @property
    def left_merged(self) -> float:
        """Merged blocks beside the virtual usage, as reported, including the headroom of high priority. Below 0 if demand
        exceeds the pool."""

    @property
    def missing_merged(self) -> float:
        """Merged blocks that must become free before the request could run and all that run there could grow for a while.
        At most 0: none."""

    @property
    def start_s(self) -> float:
        """Predicted time until its prompt would begin."""

    @property
    def prompt_s(self) -> float:
        """Predicted time of its prompt, without the part cached there."""

    @property
    def token_s(self) -> float:
        """`token_cost_s` of it there, among the online requests; 0: not known."""


class Candidates(Protocol):
    """All instances that may take a request: at least one."""

    may_wait: bool
    """Whether the request may still be left in the queue, to be passed by others."""

    def first(self, limit: int, until: Callable[[Candidate], bool] | None = None) -> Sequence[Candidate]:
        """In the order of their ranks, up to `limit` or the first for which `until` is true. Cost: the number returned."""

    def cached(self, limit: int) -> Sequence[Candidate]:
        """Those with the longest cached prefixes of the prompt, longest first."""

    @property
    def num_defragmenting(self) -> int:
        """Instances where a request waits for memory."""

    @property
    def num_serving(self) -> int:
        """Instances that serve the model, candidates or not."""


class DispatchParameters(NamedTuple):
    max_defragmenting_share: float = 1.0
    """Share of a model's instances, at least one, on which requests may wait for memory at once."""


class DispatchPolicy:
    """The first by rank takes each request."""

    ranks_by_freeness: ClassVar[bool] = False
    """Whether the first number of `rank` is the negative freeness. An instance is then ranked only when it may come first,
    not with each report."""
    asks_for_cached: ClassVar[bool] = False
    """Whether `choose` asks for cached prefixes, which costs a hash for each block of a prompt."""

    def __init__(self, parameters: DispatchParameters) -> None:
        self.parameters = parameters

    def rank(self, view: DispatchView) -> DispatchKey:
        """The place of an instance among the others, smallest first, whatever the request is."""
        raise NotImplementedError

    def choose(self, request: Wanted, candidates: Candidates) -> Candidate | None:
        """The instance that takes the request, or None: it waits for room. Until something changes, `choose` is then not
        called for requests of its model that need no less, now and at most, and that may wait."""
        return candidates.first(1)[0]


class InTurn(DispatchPolicy):
    """Baseline, round robin: least recently chosen first, so that instances that come and go keep the turn fair."""

    def rank(self, view: DispatchView) -> DispatchKey:
        return (view.last_turn,)


class FewestRequests(DispatchPolicy):
    """Baseline: least outstanding requests."""

    def rank(self, view: DispatchView) -> DispatchKey:
        return (view.num_requests,)


class Freest(DispatchPolicy):
    """Llumnix: the freest instance; among equals the one with fewer requests. Without migration this is INFaaS++.

    An instance with the memory precedes all without. If none has it, the request goes where least is missing, provided that
    few others wait for memory in this way and the freest instances together have enough in pieces.
    """

    ranks_by_freeness = True
    asks_for_cached = True

    def rank(self, view: DispatchView) -> DispatchKey:
        return (-view.freeness, view.num_requests)

    def choose(self, request: Wanted, candidates: Candidates) -> Candidate | None:
        best = self._favourite(request, candidates)
        least = best.missing_merged
        if least > 0:
            missing: list[float] = []

            def is_enough(candidate: Candidate) -> bool:
                missing.append(candidate.missing_merged)
                return missing[-1] <= 0

            freest = candidates.first(NUM_FREEST, is_enough)
            least = min(missing)
            best = freest[missing.index(least)]
            if least > 0 and candidates.may_wait and not self._may_defragment(freest, candidates):
                return None
        as_good = (owner for owner in candidates.cached(NUM_CACHED) if self._is_as_good(request, owner, best))
        return next(as_good, best)

    def _favourite(self, request: Wanted, candidates: Candidates) -> Candidate:
        """The best instance if it has the memory."""
        return candidates.first(1)[0]

    def _may_defragment(self, freest: Sequence[Candidate], candidates: Candidates) -> bool:
        """Whether one more instance may collect memory for a request that fits nowhere. The instances must have enough
        together, beyond all that waits for them; otherwise one would keep memory idle until enough requests end."""
        if (share := self.parameters.max_defragmenting_share) >= 1.0:
            return True
        if candidates.num_defragmenting >= max(1, int(share * candidates.num_serving)):
            return False
        left = sum(candidate.left_merged for candidate in freest if candidate.left_merged > -math.inf)
        return left - sum(candidate.in_flight_merged for candidate in freest) >= freest[0].demand_merged

    def _is_as_good(self, request: Wanted, owner: Candidate, best: Candidate) -> bool:
        """Whether an instance with part of the prompt in its cache is as free."""
        return owner.missing_merged <= max(0.0, best.missing_merged) and owner.view.freeness >= best.view.freeness


class FirstToken(Freest):
    """Chooses among the freest instances that have the memory, and those with the prompt's beginning in their caches.

    The predicted time of the first token decides: work before the prompt, plus its uncached part. Instances where its tokens
    cost much more than elsewhere are then excluded. Of those left with an equal time, the ones with the least left to
    compute count, so that others' prompts wait least. Of these it takes the freest where its tokens cost nearly the least,
    or where the cost is unknown. A high-priority request ignores the cost and goes where least runs.
    """

    def _favourite(self, request: Wanted, candidates: Candidates) -> Candidate:
        freest = candidates.first(NUM_TIMED)
        known = {candidate.instance_id for candidate in freest}
        others = [owner for owner in candidates.cached(NUM_CACHED) if owner.instance_id not in known]
        able = [candidate for candidate in (*freest, *others) if candidate.missing_merged <= 0]
        if not able:
            return freest[0]
        firsts_s = [candidate.start_s + candidate.prompt_s for candidate in able]
        latest_s = min(firsts_s) + GRAIN_S
        soon = [candidate for candidate, first_s in zip(able, firsts_s, strict=True) if first_s <= latest_s]
        if len(soon) == 1 or request.is_high:
            return soon[0]
        tokens_s = [candidate.token_s for candidate in soon]
        least_s = min((token_s for token_s in tokens_s if token_s > 0), default=0.0)
        even = [one for one in zip(soon, tokens_s, strict=True) if one[1] <= MOST_UNEVEN * least_s]
        shortest_s = min(candidate.prompt_s for candidate, _ in even)
        most_s = shortest_s + max(SPARED_S, MARGIN * shortest_s)
        spared = [one for one in even if one[0].prompt_s <= most_s]
        return spared[first_cheap([token_s for _, token_s in spared])][0]

    def _is_as_good(self, request: Wanted, owner: Candidate, best: Candidate) -> bool:
        is_cheap = request.is_high or is_as_cheap(owner.token_s, best.token_s)
        is_soon = owner.start_s + owner.prompt_s <= best.start_s + best.prompt_s + GRAIN_S
        return is_cheap and is_soon and owner.prompt_s <= best.prompt_s and super()._is_as_good(request, owner, best)


class ReportedFreeness(NamedTuple):
    """Freeness as in a load report."""

    freeness: float
    num_running: int
    """Running online requests: the divisor of the freeness."""
    free_merged: float
    """Stands for the numerator where the report says +inf (idle)."""

    @property
    def left_merged(self) -> float:
        """Merged blocks beside the virtual usage; below 0 if demand exceeds the pool."""
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
