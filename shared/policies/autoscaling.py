"""How many instances there should be: keeps each model's mean freeness within bounds (Llumnix, OSDI'24, section 4.4.3).

    mean freeness of a model < low                                  for a period -> one more instance
    mean freeness of every model, with one instance less, >= high   for a period -> drain the one with fewest requests
    demand while an instance is being drained                       for a period -> keep that one after all

Freeness is in decode steps until the KV pool is full, as a normal request sees it. The mean of a model is over the
instances that serve it. An idle instance, whose freeness has no bound, counts `IDLE_BOUNDS` times `high`, as does whatever
is freer: enough that idle ones let others go, not so much that one of them hides many that are full.

Where requests of a model wait before they reach any instance, its freeness does not matter: the instances are short of
something other than memory. A model that nobody serves is not free: nothing is drained beside it. (It asks for nothing
either: why nobody serves it, one more instance rarely mends. Nor does a model that is to be on so many instances and is.)

One thing at a time: nothing is decided while an instance comes or goes, and for a settling time after, so that what is
measured is the effect of what was done. At a constant load that cannot go to and fro, because an instance leaves only
where the rest stays above `high`, and `low` is less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.policies.virtual_usage import left_of

IDLE_BOUNDS = 2.0
CARRY_OUT_S = 600.0
"""For an instance to start and load its models, the largest of which take minutes, or to drain. After it the attempt counts
as failed."""
RETRY_S = 30.0
"""After an attempt that was refused or failed."""


@dataclass(frozen=True)
class ScalingBounds:
    low: float
    high: float
    period_s: float
    min_instances: int = 1
    max_instances: int = 0
    """0: no bound here."""
    settle_s: float = 10.0
    """After something was done."""

    def __post_init__(self) -> None:
        assert self.low < self.high, "between the bounds nothing is done"
        assert self.min_instances >= 1
        assert not self.max_instances or self.min_instances <= self.max_instances


class Member(NamedTuple):
    """An instance that serves and is to stay."""

    instance_id: str
    models: frozenset[str]
    """Those that it serves."""
    freeness: float
    """Scaling freeness, in decode steps; +inf when idle."""
    num_running: int
    """Online requests in its batch: what the freeness was divided by."""
    num_requests: int
    """Online ones that it has."""
    pool_tokens: float
    """What its whole KV pool holds."""


@dataclass(frozen=True)
class Fleet:
    """The instances at one moment. Those that somebody else drains are in none of the three."""

    members: Sequence[Member]
    starting: Collection[str] = ()
    """Instances that serve nothing yet, and are about to."""
    leaving: Collection[str] = ()
    """Instances that drain because of a `Shrink`: the one that was named, or another that had to be taken for it."""
    unserved: Collection[str] = ()
    """Models that should be served and are not."""
    queued: Collection[str] = ()
    """Models of which online requests wait for an instance to take them."""
    settled: Collection[str] = ()
    """Models that are on as many instances as they are to be: they would not be on one more."""
    failed: Collection[str] = ()
    """Instances that serve nothing and are not about to: their models cannot be loaded."""


class Grow(NamedTuple):
    """There should be so many instances."""

    num_instances: int


class Shrink(NamedTuple):
    """This one should be drained."""

    instance_id: str


class Keep(NamedTuple):
    """This one should not be drained after all."""

    instance_id: str


Decision = Grow | Shrink | Keep


def mean_freeness(members: Collection[Member], cap: float) -> float:
    """+inf for none."""
    return _mean([min(member.freeness, cap) for member in members])


def mean_without(members: Collection[Member], leaving: Member, cap: float) -> float:
    """As it would be with the requests of `leaving`, and what they use, spread evenly over the others; -inf where there
    are none."""
    others = [member for member in members if member.instance_id != leaving.instance_id]
    if not others:
        return -math.inf
    used = max(0.0, leaving.pool_tokens - _free_tokens(leaving)) / len(others)
    num_running = leaving.num_running / len(others)
    if not leaving.num_requests:
        return mean_freeness(others, cap)
    return _mean([min((_free_tokens(m) - used) / max(1.0, m.num_running + num_running), cap) for m in others])


def _free_tokens(member: Member) -> float:
    return left_of(member.pool_tokens, member.freeness, member.num_running)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.inf


class _Attempt(NamedTuple):
    decision: Decision
    begun_s: float
    num_instances: int
    """Members that there shall be in the end."""


class Autoscaling:
    """Call `decide` about once a second; what it returns counts as asked for."""

    def __init__(self, bounds: ScalingBounds) -> None:
        self.bounds = bounds
        self._cap = IDLE_BOUNDS * bounds.high
        self._short_since: dict[str, float] = {}
        """Models that need more, "" for the least number of instances."""
        self._spare_since: float | None = None
        self._starting: dict[str, tuple[float, float]] = {}
        """When instances that serve nothing yet were first and last seen so."""
        self._attempt: _Attempt | None = None
        self._quiet_until_s = -math.inf

    @property
    def attempt(self) -> Decision | None:
        """What is being carried out."""
        return self._attempt.decision if self._attempt is not None else None

    def refused(self, now: float) -> None:
        """What was decided last cannot be done."""
        if self._attempt is not None:
            self._end_attempt(now, RETRY_S)

    def decide(self, fleet: Fleet, now: float) -> Decision | None:
        starting = self._recent(fleet.starting, now)
        self._follow_attempt(fleet, now)
        if now < self._quiet_until_s:
            return None
        attempt = self._attempt.decision if self._attempt is not None else None
        if isinstance(attempt, Grow | Keep) or (attempt is None and starting):
            self._forget()
            return None
        num_active = len(fleet.members) + len(fleet.starting)
        is_short = self._is_short(fleet, num_active, now)
        if isinstance(attempt, Shrink):
            if is_short and fleet.leaving:
                return self._begin(Keep(min(fleet.leaving)), len(fleet.members) + 1, now)
            return None
        if is_short:
            num_useless = len(fleet.starting) + len(fleet.failed)
            wanted = max(len(fleet.members) + num_useless + 1, self.bounds.min_instances)
            if not self.bounds.max_instances or wanted <= self.bounds.max_instances:
                return self._begin(Grow(wanted), wanted - num_useless, now)
            return None
        if (spare := self._spare(fleet, num_active, now)) is not None:
            return self._begin(Shrink(spare), len(fleet.members) - 1, now)
        return None

    # --------------------------------------------------------------------------------------------- attempts

    def _begin(self, decision: Decision, num_instances: int, now: float) -> Decision:
        self._forget()
        self._attempt = _Attempt(decision, now, num_instances)
        return decision

    def _follow_attempt(self, fleet: Fleet, now: float) -> None:
        if self._attempt is None:
            return
        decision, begun_s, num_instances = self._attempt
        if isinstance(decision, Shrink):
            is_done = len(fleet.members) <= num_instances and not fleet.leaving
        else:
            is_done = len(fleet.members) >= num_instances
        if is_done:
            self._end_attempt(now, self.bounds.settle_s)
        elif now >= begun_s + CARRY_OUT_S:
            self._end_attempt(now, RETRY_S)

    def _end_attempt(self, now: float, quiet_s: float) -> None:
        self._forget()
        self._attempt = None
        self._quiet_until_s = now + quiet_s

    def _forget(self) -> None:
        """What was measured does not hold any more."""
        self._short_since = {}
        self._spare_since = None

    def _recent(self, starting: Collection[str], now: float) -> list[str]:
        """Without those that will not get to serve. One that comes back soon, as its process crashes again and again, has
        been starting since it first did."""
        self._starting |= {i: (self._starting.get(i, (now, now))[0], now) for i in starting}
        self._starting = {i: times for i, times in self._starting.items() if now < times[1] + CARRY_OUT_S}
        return [i for i in starting if now < self._starting[i][0] + CARRY_OUT_S]

    # ------------------------------------------------------------------------------------------ measurements

    def _is_short(self, fleet: Fleet, num_active: int, now: float) -> bool:
        """Whether more has been needed for a period."""
        serving = _by_model(fleet.members)
        short = {m for m, members in serving.items() if mean_freeness(members, self._cap) < self.bounds.low}
        short |= serving.keys() & set(fleet.queued)
        short -= set(fleet.settled)
        if num_active < self.bounds.min_instances:
            short.add("")
        self._short_since = {model: self._short_since.get(model, now) for model in short}
        return any(now >= since + self.bounds.period_s for since in self._short_since.values())

    def _spare(self, fleet: Fleet, num_active: int, now: float) -> str | None:
        """An instance that could have been done without for a period."""
        found = None
        if num_active > self.bounds.min_instances and not self._short_since and not fleet.unserved:
            serving = _by_model(fleet.members)
            by_id = sorted(fleet.members, key=lambda m: m.instance_id, reverse=True)
            for member in sorted(by_id, key=lambda m: m.num_requests):
                if all(mean_without(serving[model], member, self._cap) >= self.bounds.high for model in member.models):
                    found = member.instance_id
                    break
        if found is None:
            self._spare_since = None
            return None
        self._spare_since = now if self._spare_since is None else self._spare_since
        return found if now >= self._spare_since + self.bounds.period_s else None


def _by_model(members: Sequence[Member]) -> Mapping[str, list[Member]]:
    serving: dict[str, list[Member]] = {}
    for member in members:
        for model in member.models:
            serving.setdefault(model, []).append(member)
    return serving
