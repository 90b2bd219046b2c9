"""Which instances migrate requests out, and to which (Llumnix, OSDI'24, section 4.4.3, with hysteresis and bounds).

An instance whose migration freeness falls below `low` is a source until it rises to `release`. The least free source is
paired with a free destination: at most one pair out of an instance and one into it. A pair lives while the source remains
one and the destination can take requests. The source chooses which request moves.

A pair must be a gain for the request that would move next, of virtual usage v (as a share of the pool):

    (u - v)^2 + (w + v)^2  <  u^2 + w^2         u, w: of source and destination, which keeps `least_left` decode steps
    u - v  >=  w + v                            unless a request waits for memory: the destination does not become fuller

So at constant load each move lowers the sum of squares, and moves come to an end. What a destination must keep falls with
the source's need, from `low` to half of it: a request that waits, or is about to be preempted, is worth more than others'
reserve. A running request gets no token while prompts are computed. So the predicted time of the destination's prompts may
exceed the source's by little, unless the source is memory-bound. To begin, a destination must be freer than that by a
factor of `high` / `low`.

Models that share an instance take turns, and a request that is the only one of its model costs all others there a turn
(token_cost.py). So a request moves only to where it costs no more turns than where it is, unless a request waits for memory
or the source has high-priority requests. Compared are, for the first of its next requests that has a destination, the
`NUM_COMPARED` freest and those that hold most of its prefix. Of those with nearly the lowest cost, the one that holds most
of the prefix is taken, or the freest: what is held there is not copied. A late prompt goes to where its first token comes
soonest, cached part included.

The first request that waits for memory counts at both ends, in the one sum that every move lowers. With a second sum without
it, moves would lower the two sums in turn: requests would go in circles, and the waiting one would starve. The destination
refuses as well (`Reservations`), because a head may have come since its report.

A draining instance migrates out to every instance that can take requests, whatever the load. Only numbers per instance are
used. `touch` is constant work and is called for every report. A step looks at sources, pairs and, only if a source has no
destination, at all instances. It comes in slices, between which the host may do more urgent work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge, nlargest
from itertools import chain, islice, takewhile
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

from shared.costs.model import prompt_s
from shared.messages.cluster import NextMove
from shared.messages.migration import AbortReason, MigrationReason
from shared.policies.token_cost import Resident, cheap, own_and_turns_s
from shared.policies.virtual_usage import left_of

BACKOFF_S = 0.5
"""After a failed move; doubles with each further failure."""
MAX_BACKOFF_S = 30.0
BURST_S = 0.2
"""The bound on pairings is a token bucket that holds as many as come in this time."""
MAX_DRAIN_DESTINATIONS = 32
"""Named to a draining instance."""
MOST_PROMPTS_S = 0.25
"""Seconds by which a destination may be busy with prompts for longer than the source."""
MAX_CHECKED = 48
"""Pairs that a step checks for still being a gain, those first that were not checked for longest: with hundreds of pairs,
all other work would wait for the checks."""

NUM_COMPARED = 8
"""Destinations whose costs are compared for a source."""
MAX_HOLDERS = 8
"""Instances that are looked at, beside the freest, since they hold most of a request's prefix."""
MAX_MOVES = 4
"""Requests of a source, each of another model, whose prefixes are looked for, until one of them has a destination."""
MAX_LOOKED = 64
"""Destinations, freest first, that are looked at for a source until `NUM_COMPARED` are found to which a move is a gain."""
MAX_LOOKS = 1024
"""Most destinations looked at for all sources of a step, so that steps take a small share of the scheduler's time.
Sources that get no look come first in the next step."""
LATE_SHARE = 0.25
"""Share of these looks that is kept for late prompts."""
MAX_SLICE = 32
"""Instances looked at in one slice, except for what one source needs: one or two milliseconds, because dispatches wait."""
DESTINATIONS_OF_VIEW = 16
"""Finding the freest among this many takes as long as looking at one."""

LEAST_SOONER_S = 0.25
"""A prompt moves only to where it would begin at least this much sooner, by predicted times."""

LINK_FAILURES = frozenset({AbortReason.TRANSFER_FAILED, AbortReason.UNREACHABLE, AbortReason.DEADLINE})
"""Either end may be at fault."""
DESTINATION_FAILURES = frozenset({AbortReason.REFUSED, AbortReason.MISMATCH, AbortReason.DESTINATION_LOST})


class InstanceView(NamedTuple):
    """An instance as rebalancing sees it, by its last report and its entry in the registry."""

    instance_id: str
    freeness: float
    """Migration freeness, in decode steps; +inf where nothing runs or waits."""
    num_running: int
    """Running online requests."""
    num_counted: int
    """Requests in its virtual usage: the running ones, and the first waiting one."""
    total_tokens: float
    """Tokens that its KV pool holds."""
    models: frozenset[str]
    """Those it serves."""
    leaving: frozenset[str] = frozenset()
    """Models whose requests must leave, whatever the load: all if it drains, otherwise those being unloaded."""
    can_give: bool = True
    """It has requests, and its KV can be moved."""
    can_take: bool = True
    next_moves: tuple[NextMove, ...] = ()
    """The running request of each model that it would migrate out first, in the order in which it would."""
    num_high: int = 0
    """Online requests of high priority."""
    residents: Sequence[Resident] = ()
    running_freeness: float = math.inf
    """Decode steps, without the waiting requests."""
    prompts_s: float = 0.0
    """Predicted time of the prompts still to be computed there, and of the steps in flight."""
    late_move: NextMove | None = None
    """The first waiting prompt that would be too late."""
    late_starts_s: float = 0.0
    """The time until that begins (0: there is none)."""
    prompt_costs: Mapping[str, tuple[float, float]] = {}
    """`ModelLoad.prompt_cost` of its models; a model that is not named has an unknown cost."""

    @property
    def spare_tokens(self) -> float:
        """Beside the virtual usage; below 0 if demand exceeds the pool."""
        return left_of(self.total_tokens, self.freeness, self.num_running)

    @property
    def usage_tokens(self) -> float:
        return max(0.0, self.total_tokens - self.spare_tokens)

    @property
    def typical_tokens(self) -> float:
        """Virtual usage of a typical request here."""
        return self.usage_tokens / max(1, self.num_counted)

    def next_to(self, destination: InstanceView) -> NextMove | None:
        """The request that would move there first: of a model that is served there."""
        return next((move for move in self.next_moves if move.model in destination.models), None)

    def first_token_s(self, starts_s: float, move: NextMove, num_held: int) -> float:
        """Time at which the prompt has its first token here if it begins after `starts_s`, with `num_held` of its tokens
        cached."""
        num_left = max(1, move.num_tokens - num_held)
        return starts_s + prompt_s(self.prompt_costs.get(move.model, (0.0, 0.0)), num_left, num_held)


ViewOf = Callable[[str], "InstanceView | None"]


class Held(Protocol):
    """Tokens of one request that instances have in their prefix caches."""

    def get(self, instance_id: str, default: int, /) -> int: ...
    def longest(self) -> Iterable[tuple[str, int]]:
        """Instances and how much they hold, those that hold most first."""


class HeldByNobody:
    def get(self, _instance_id: str, default: int, /) -> int:
        return default

    def longest(self) -> Iterable[tuple[str, int]]:
        return ()


class Destination(NamedTuple):
    """An instance that may receive requests: alive, ready and reachable."""

    instance_id: str
    freeness: float
    models: frozenset[str]


def is_memory_bound(source: InstanceView, low: float) -> bool:
    """Whether running requests will soon be preempted there."""
    return source.running_freeness < low / 2


def is_gain(source: InstanceView, destination: InstanceView, low: float) -> bool:
    """Whether moving the next request of the source (if unknown, a typical one) lowers the sum of squared usage and leaves
    the destination what it must keep."""
    if not (source.total_tokens > 0 and destination.total_tokens > 0):
        return False
    if destination.prompts_s > source.prompts_s + MOST_PROMPTS_S and not is_memory_bound(source, low):
        return False
    move = source.next_to(destination)
    v = source.typical_tokens if move is None else move.num_tokens
    if not destination.spare_tokens - v >= least_left(source.freeness, low) * (destination.num_running + 1):
        return False
    u, u_after = source.usage_tokens / source.total_tokens, (source.usage_tokens - v) / source.total_tokens
    w, w_after = (
        tokens / destination.total_tokens for tokens in (destination.usage_tokens, destination.usage_tokens + v)
    )
    return u_after**2 + w_after**2 < u**2 + w**2 and (u_after >= w_after or not source.freeness > 0)


def is_sooner(source: InstanceView, destination: InstanceView, low: float, held: Held) -> bool:
    """Whether the source's late prompt would have its first token enough sooner there, in memory that requests there will
    not need. `held`: its tokens in prefix caches."""
    late = source.late_move
    if late is None or late.model not in destination.models or not destination.total_tokens > 0:
        return False
    here_s = source.first_token_s(source.late_starts_s, late, held.get(source.instance_id, 0))
    is_sooner = first_token_there_s(late, destination, held) + LEAST_SOONER_S < here_s
    return is_sooner and destination.spare_tokens - late.num_tokens >= low * (destination.num_running + 1)


def first_token_there_s(late: NextMove, destination: InstanceView, held: Held) -> float:
    """Predicted time of a late prompt's first token there."""
    return destination.first_token_s(destination.prompts_s, late, held.get(destination.instance_id, 0))


def choose(source: InstanceView, able: Sequence[InstanceView], move: NextMove | None, held: Held) -> InstanceView:
    """The best of destinations to which moving that request is a gain: the one that holds most of its prefix, among those
    where its tokens cost nearly the least; the first of equals. What is held there is not copied. `held`: tokens of it in
    prefix caches; `move`: None if no request is named."""
    costs_s = [0.0 if move is None else cost_there_s(source, view, move.model) for view in able]
    return max((able[number] for number in cheap(costs_s)), key=lambda view: held.get(view.instance_id, 0))


def preferred(move: NextMove, instance_id: str, view_of: ViewOf, held: Held) -> str | None:
    """The instance that a request which must leave another one is to try first: the one that holds most of its prefix among
    those that have the memory, or where nobody waits (usage counts what requests share once for each, so there may be more
    memory than it says); None: none holds any."""
    for name, _ in islice(held.longest(), MAX_HOLDERS):
        view = view_of(name) if name != instance_id else None
        if view is None or not view.can_take or move.model not in view.models:
            continue
        if view.num_counted == view.num_running or view.spare_tokens >= move.num_tokens:
            return name
    return None


def is_as_cheap_there(source: InstanceView, destination: InstanceView) -> bool:
    """Whether the next request would cost itself and others no more turns there than where it is. Requests that wait for
    memory and high priority matter more. Unknown costs do not prevent a move."""
    move = source.next_to(destination)
    if move is None or source.num_high or not source.freeness > 0:
        return True
    model = move.model
    here = own_and_turns_s(model, [(name, max(0, num - (name == model)), cost) for name, num, cost in source.residents])
    there = own_and_turns_s(model, destination.residents)
    return not (here[0] and there[0]) or there[1] <= here[1]


def cost_there_s(source: InstanceView, destination: InstanceView, model: str) -> float:
    """What a token of the source's request of that model would cost there: its turns, and a step of its model as long as in
    the source. 0: not known."""
    own_s, _ = own_and_turns_s(model, source.residents)
    there = own_and_turns_s(model, destination.residents)
    return own_s + there[1] if there[0] else 0.0


def least_left(freeness: float, low: float) -> float:
    """Decode steps that a destination keeps beside a request from a source with that freeness."""
    return low / 2 if not freeness > 0 else min(low, (low + freeness) / 2)


@dataclass(frozen=True, slots=True)
class Pair:
    source: str
    destinations: tuple[str, ...]
    """One; for a draining source all that can take requests, freest first."""
    reason: MigrationReason


class Changes(NamedTuple):
    begun: list[Pair]
    ended: list[Pair]


Slices = Generator[Changes, None, Changes]


def next_slice(slices: Slices) -> tuple[Changes, bool]:
    """Changes by the next slice, and whether it is the last one."""
    try:
        return next(slices), False
    except StopIteration as last:
        return cast(Changes, last.value), True


class _Backoff(NamedTuple):
    until_s: float
    num_failures: int


class _TokenBucket:
    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self.capacity = max(1, int(per_s * BURST_S))
        self._level = float(self.capacity)
        self._at_s = -math.inf

    def has_one(self, now: float) -> bool:
        if self._at_s > -math.inf:
            self._level = min(self.capacity, self._level + self._per_s * max(0.0, now - self._at_s))
        self._at_s = now
        return self._level >= 1.0

    def take(self) -> None:
        self._level -= 1.0


DestinationsAbove = Callable[[float], Iterable[Destination]]
HeldOf = Callable[[NextMove], Held]


def held_by_nobody(_move: NextMove) -> Held:
    return HeldByNobody()


_freeness_of: Callable[[Destination], float] = attrgetter("freeness")


class Rebalancer:
    """`max_in`: pairs into one instance at once (draining sources not counted)."""

    def __init__(self, low: float, high: float, pairings_per_s: float, *, max_in: int = 1) -> None:
        if not low < high:
            raise ValueError(f"the lower threshold must be below the higher one: {low} and {high}")
        self.low = low
        self.high = high
        self.release = low + (high - low) / 4
        self.pairs: dict[str, Pair] = {}
        """By source."""
        self._max_in = max_in
        self._sources: dict[str, float] = {}
        """Sources with their freeness."""
        self._late: dict[str, float] = {}
        """Instances with late prompts that could move, and when the first of them begins."""
        self._draining: set[str] = set()
        self._taking: Counter[str] = Counter()
        """Pairs into each instance, without those of draining sources."""
        self._backoffs: dict[str, _Backoff] = {}
        self._bucket = _TokenBucket(pairings_per_s)
        self._held_of: HeldOf = held_by_nobody
        """What instances hold of requests, in this step."""
        self._num_looks = 0
        """Destinations looked at in this step."""
        self._num_views = 0
        """Instances looked at in this slice of it."""
        self._in_vain_s: dict[str, float] = {}
        """Sources that found no destination while others wait for their turn, and when they last looked."""
        self._late_in_vain_s: dict[str, float] = {}
        """Sources with late prompts that found no destination, and when they last looked."""

    @property
    def is_idle(self) -> bool:
        """No step is needed until `touch` says so."""
        return not self._sources and not self._late and not self._draining and not self.pairs

    def touch(self, instance_id: str, freeness: float, late_starts_s: float = 0.0) -> bool:
        """A report came. True if a step should come soon: it may begin or end a pair. `late_starts_s`: of `InstanceView`."""
        is_late, was_late = late_starts_s > LEAST_SOONER_S, instance_id in self._late
        if is_late:
            self._late[instance_id] = late_starts_s
        else:
            self._late.pop(instance_id, None)
        return self._touch_memory(instance_id, freeness) or is_late != was_late

    def _touch_memory(self, instance_id: str, freeness: float) -> bool:
        if freeness < self.low:
            is_known = instance_id in self._sources
            self._sources[instance_id] = freeness
            return not is_known
        if instance_id in self._sources:
            if freeness < self.release:
                self._sources[instance_id] = freeness
                return False
            del self._sources[instance_id]
            return instance_id in self.pairs
        return instance_id in self._taking and not freeness >= self.low / 2

    def drain(self, instance_id: str) -> bool:
        """Requests have to leave the instance. True if that is news: a step should come soon."""
        is_known = instance_id in self._draining
        self._draining.add(instance_id)
        return not is_known

    def forget(self, instance_id: str) -> None:
        """The instance is gone. The next step ends the pair in which it is the source, later ones those into it."""
        self._backoffs.pop(instance_id, None)
        self._sources.pop(instance_id, None)
        self._late.pop(instance_id, None)
        self._in_vain_s.pop(instance_id, None)
        self._late_in_vain_s.pop(instance_id, None)
        self._draining.discard(instance_id)

    def on_move(self, source: str, destination: str, reason: str | None, now: float) -> None:
        """A move ended; `reason`: why it failed, None on success."""
        if reason is None:
            self._backoffs.pop(source, None)
            self._backoffs.pop(destination, None)
            return
        if reason in LINK_FAILURES or reason in DESTINATION_FAILURES:
            # A lack of room is news about its load, not a fault.
            self._fail(destination, now, may_double=reason != AbortReason.REFUSED)
        if reason in LINK_FAILURES:
            self._fail(source, now)

    def num_backing_off(self, now: float) -> int:
        return sum(backoff.until_s > now for backoff in self._backoffs.values())

    def step(
        self,
        now: float,
        view_of: ViewOf,
        destinations_above: DestinationsAbove,
        held_of: HeldOf = held_by_nobody,
    ) -> Changes:
        """Ends pairs that are over and begins new ones, as `slices` does, in one go."""
        changes, slices = Changes([], []), self.slices(now, view_of, destinations_above, held_of)
        while True:
            (begun, ended), is_over = next_slice(slices)
            changes.begun.extend(begun)
            changes.ended.extend(ended)
            if is_over:
                return changes

    def slices(
        self,
        now: float,
        view_of: ViewOf,
        destinations_above: DestinationsAbove,
        held_of: HeldOf = held_by_nobody,
    ) -> Slices:
        """Ends pairs that are over and begins new ones, in slices (`next_slice`). Between them, anything except this may be
        called. `view_of`: None for an instance that is gone or never reported; `destinations_above`: those with at least
        that freeness; `held_of`: what instances hold of a request in their prefix caches."""
        self._held_of = held_of
        self._num_looks = self._num_views = 0

        def view(instance_id: str) -> InstanceView | None:
            self._num_views += 1
            return view_of(instance_id)

        changes = Changes([], [])
        draining = self._still_draining(view)
        parts = (
            self._end_pairs(view, changes, now),
            self._pair_draining(draining, destinations_above, changes, now),
            self._pair_others(view, destinations_above, changes, now),
        )
        for _ in chain.from_iterable(parts):
            if self._num_views >= MAX_SLICE:
                yield Changes(changes.begun.copy(), changes.ended.copy())
                changes.begun.clear()
                changes.ended.clear()
                self._num_views = 0
        return changes

    # ------------------------------------------------------------------------------------------------ the parts

    def _end_pairs(self, view_of: ViewOf, changes: Changes, now: float) -> Iterator[None]:
        """Ends pairs that are over."""
        num_checked = 0
        for pair in list(self.pairs.values()):
            if self.pairs.get(pair.source) is not pair:
                continue
            is_drain = pair.source in self._draining
            sources = self._late if pair.reason == MigrationReason.PROMPTS else self._sources
            if pair.reason == MigrationReason.DRAIN:
                is_kept = is_drain
            elif is_drain or pair.source not in sources:
                is_kept = False
            elif num_checked == MAX_CHECKED:
                continue
            else:
                num_checked += 1
                is_kept = self._is_kept(pair, view_of, now)
                self.pairs[pair.source] = self.pairs.pop(pair.source)  # to the end
            if not is_kept:
                self._end(pair, changes)
            yield

    def _is_kept(self, pair: Pair, view_of: ViewOf, now: float) -> bool:
        source, destination = view_of(pair.source), view_of(pair.destinations[0])
        if source is None or destination is None or not source.can_give or not destination.can_take:
            return False
        if self._is_backing_off(pair.source, now) or self._is_backing_off(destination.instance_id, now):
            return False
        if pair.reason == MigrationReason.PROMPTS:
            return is_sooner(source, destination, self.low, self._held(source.late_move))
        return not source.models.isdisjoint(destination.models) and self._is_worth_it(source, destination)

    def _still_draining(self, view_of: ViewOf) -> list[InstanceView]:
        """The draining instances; the others are removed from the set."""
        draining = []
        for name in list(self._draining):
            view = view_of(name)
            if view is not None and view.can_give and view.leaving:
                draining.append(view)
            else:
                self._draining.discard(name)
        return draining

    def _pair_draining(
        self, draining: list[InstanceView], destinations_above: DestinationsAbove, changes: Changes, now: float
    ) -> Iterator[None]:
        """Destinations that back off come last: they are better than none."""
        draining = [source for source in draining if source.instance_id in self._draining]
        if not draining:
            return
        destinations = sorted(destinations_above(-math.inf), key=lambda destination: -destination.freeness)
        ordered = sorted(destinations, key=lambda destination: self._is_backing_off(destination.instance_id, now))
        for number, source in enumerate(sorted(draining)):
            able = [t.instance_id for t in ordered if t.instance_id != source.instance_id and source.leaving & t.models]
            # Several that drain at once begin with different ones.
            shift = number % len(able) if able else 0
            names = tuple((able[shift:] + able[:shift])[:MAX_DRAIN_DESTINATIONS])
            known = self.pairs.get(source.instance_id)
            if known is not None and not names:
                self._end(known, changes)
            elif names:
                pair = Pair(source.instance_id, names, MigrationReason.DRAIN)
                if known is None or set(known.destinations) != set(names):
                    changes.begun.append(pair)
                self.pairs[source.instance_id] = pair
        yield

    def _pair_others(
        self, view_of: ViewOf, destinations_above: DestinationsAbove, changes: Changes, now: float
    ) -> Iterator[None]:
        unpaired = [
            (self._in_vain_s.get(name, -math.inf), freeness, name)
            for name, freeness in self._sources.items()
            if self._may_begin(name, now)
        ]
        late = [
            (self._late_in_vain_s.get(name, -math.inf), -starts_s, name)
            for name, starts_s in self._late.items()
            if self._may_begin(name, now)
        ]
        if not (unpaired or late) or not self._bucket.has_one(now):
            return
        destinations = list(destinations_above(self.low / 2 if unpaired else self.low))
        groups = self._freest(destinations, now)
        self._num_views += len(destinations) // DESTINATIONS_OF_VIEW
        yield
        yield from self._pair_sources(sorted(unpaired), bool(late), groups, view_of, changes, now)
        yield from self._pair_late(sorted(late), groups, view_of, changes, now)

    def _pair_sources(
        self,
        unpaired: list[tuple[float, float, str]],
        are_late: bool,
        groups: list[list[Destination]],
        view_of: ViewOf,
        changes: Changes,
        now: float,
    ) -> Iterator[None]:
        """`are_late`: some looks are kept for late prompts."""
        max_looks = MAX_LOOKS * (1.0 - LATE_SHARE if are_late else 1.0)
        for _, _, name in unpaired:
            if self._num_looks >= max_looks or not groups or not self._bucket.has_one(now):
                return
            if name not in self._sources or not self._may_begin(name, now):
                continue
            source = view_of(name)
            if source is None or not source.can_give:
                del self._sources[name]
                continue
            bar = least_left(source.freeness, self.low) * self.high / self.low
            destination = self._destination_for(source, groups, bar, view_of, now)
            if destination is not None:
                self._bucket.take()
                self._begin(Pair(source.instance_id, (destination,), MigrationReason.BALANCE), changes)
            else:
                self._in_vain_s[name] = now
            yield
        self._in_vain_s.clear()

    def _pair_late(
        self,
        unpaired: list[tuple[float, float, str]],
        groups: list[list[Destination]],
        view_of: ViewOf,
        changes: Changes,
        now: float,
    ) -> Iterator[None]:
        """Sources whose prompts wait longest come first."""
        for _, _, name in unpaired:
            if self._num_looks >= MAX_LOOKS or not groups or not self._bucket.has_one(now):
                return
            source = view_of(name)
            if source is None or not source.can_give or name in self._taking or not self._may_begin(name, now):
                continue
            late, held = source.late_move, self._held(source.late_move)
            freest = list(self._looked_at(source, groups, self.low, view_of))
            holders = self._holders(source, held, self.low, freest, view_of, now)
            able = [view for view in (*freest, *holders) if is_sooner(source, view, self.low, held)]
            if late is not None and able:
                self._bucket.take()
                soonest = min(able, key=lambda view: first_token_there_s(late, view, held))
                self._begin(Pair(name, (soonest.instance_id,), MigrationReason.PROMPTS), changes)
            else:
                self._late_in_vain_s[name] = now
            yield
        self._late_in_vain_s.clear()

    def _freest(self, destinations: Iterable[Destination], now: float) -> list[list[Destination]]:
        """Grouped by models served, freest first: those that one source may look at in this step, whatever others take."""
        groups: dict[frozenset[str], list[Destination]] = {}
        able = [destination for destination in destinations if self._may_take(destination.instance_id)]
        if self._backoffs:
            able = [destination for destination in able if not self._is_backing_off(destination.instance_id, now)]
        for destination in able:
            groups.setdefault(destination.models, []).append(destination)
        return [nlargest(self._bucket.capacity + MAX_LOOKED, group, key=_freeness_of) for group in groups.values()]

    def _destination_for(
        self,
        source: InstanceView,
        groups: list[list[Destination]],
        bar: float,
        view_of: ViewOf,
        now: float,
    ) -> str | None:
        """The best of the freest destinations that serve a model of the source, and of those that hold most of a request's
        prefix, to which a move is a gain. The source's first request that has a destination decides; where no destination
        is for one of the first `MAX_MOVES`, the freest is taken."""
        if source.instance_id in self._taking:
            return None
        looked_at = self._looked_at(source, groups, bar, view_of)
        able = list(islice((view for view in looked_at if self._is_worth_it(source, view)), NUM_COMPARED))
        for move in source.next_moves[:MAX_MOVES]:
            held = self._held(move)
            holders = self._holders(source, held, bar, able, view_of, now)
            views = chain(able, (view for view in holders if self._is_worth_it(source, view)))
            if mine := [view for view in views if source.next_to(view) is move]:
                return choose(source, mine, move, held).instance_id
        return able[0].instance_id if able else None

    def _held(self, move: NextMove | None) -> Held:
        return HeldByNobody() if move is None else self._held_of(move)

    def _holders(
        self, source: InstanceView, held: Held, bar: float, known: list[InstanceView], view_of: ViewOf, now: float
    ) -> list[InstanceView]:
        """Instances with most of a request's prefix that may take requests, are as free as `bar` and not `known` yet."""
        names = {source.instance_id, *(view.instance_id for view in known)}
        found = []
        for name, _ in islice(held.longest(), MAX_HOLDERS):
            if name in names or not self._may_take(name) or self._is_backing_off(name, now):
                continue
            self._num_looks += 1
            view = view_of(name)
            if view is not None and view.can_take and view.freeness >= bar:
                found.append(view)
        return found

    def _looked_at(
        self,
        source: InstanceView,
        groups: list[list[Destination]],
        bar: float,
        view_of: ViewOf,
    ) -> Iterator[InstanceView]:
        """The freest, down to `bar`, that serve a model of the source and may take requests."""
        serving = [group for group in groups if not source.models.isdisjoint(group[0].models)]
        freest = takewhile(lambda each: each.freeness >= bar, merge(*serving, key=_freeness_of, reverse=True))
        others = (
            each for each in freest if each.instance_id != source.instance_id and self._may_take(each.instance_id)
        )
        for each in islice(others, MAX_LOOKED):
            self._num_looks += 1
            view = view_of(each.instance_id)
            if view is not None and view.can_take:
                yield view

    def _may_begin(self, name: str, now: float) -> bool:
        return name not in self.pairs and name not in self._draining and not self._is_backing_off(name, now)

    def _is_worth_it(self, source: InstanceView, destination: InstanceView) -> bool:
        return is_gain(source, destination, self.low) and is_as_cheap_there(source, destination)

    def _may_take(self, instance_id: str) -> bool:
        return instance_id not in self.pairs and self._taking[instance_id] < self._max_in

    def _begin(self, pair: Pair, changes: Changes) -> None:
        self.pairs[pair.source] = pair
        self._taking[pair.destinations[0]] += 1
        changes.begun.append(pair)

    def _end(self, pair: Pair, changes: Changes) -> None:
        del self.pairs[pair.source]
        changes.ended.append(pair)
        if pair.reason != MigrationReason.DRAIN:
            self._taking[pair.destinations[0]] -= 1
            if not self._taking[pair.destinations[0]]:
                del self._taking[pair.destinations[0]]

    def _is_backing_off(self, instance_id: str, now: float) -> bool:
        backoff = self._backoffs.get(instance_id)
        return backoff is not None and backoff.until_s > now

    def _fail(self, instance_id: str, now: float, may_double: bool = True) -> None:
        """Several moves that fail from one cause count once."""
        backoff = self._backoffs.get(instance_id)
        if backoff is not None and backoff.until_s > now:
            return
        is_recent = backoff is not None and now - backoff.until_s < MAX_BACKOFF_S
        num_failures = backoff.num_failures if backoff is not None and is_recent and may_double else 0
        until_s = now + min(MAX_BACKOFF_S, BACKOFF_S * 2**num_failures)
        self._backoffs[instance_id] = _Backoff(until_s, min(num_failures + 1, 10))
