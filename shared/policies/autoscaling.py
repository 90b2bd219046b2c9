"""How many instances there should be: keeps each model's mean freeness within bounds (Llumnix, OSDI'24, section 4.4.3), and
the time that its prompts take and wait.

    one more    for a period    mean freeness of a model < low,
                                or its prompts wait for longer than the TTFT objective,
                                or they take more than `MOST_WORK` of its instances' time,
                                or a batch of it will miss its deadline
    one less    for a period    with one instance less, for every model: mean freeness >= high, prompts wait for at most
                                `SPARE_LATE` of the objective and take at most `SPARE_WORK`, with the streams' steps at most
                                `SPARE_TIME`, and all batches are in time: the instance with the fewest requests is drained
    kept        for a period    demand while an instance is being drained: that instance stays

Freeness is in decode steps until the KV pool is full, as a normal request sees it. The mean of a model covers the instances
that serve it. Idle instances, whose freeness is infinite, and any that are freer than that count as `IDLE_BOUNDS` times
`high`. Idle instances thus allow others to leave, but a single one does not hide many full ones.

If requests of a model wait before they reach any instance, its freeness does not matter: the instances are short of
something other than memory. A model that no instance serves is not free: nothing is drained meanwhile. It asks for nothing
either, because one more instance rarely helps it. A model that is on its fixed number of instances asks for nothing.

What batches need is known late: their throughput is a mean over half a minute, of lines that have ended, so after a change
it is that of the number before. One more counts it as that of the fewest instances in the last `GROWTH_LAG_S`, one less as
that of the most in the last `SHRINK_LAG_S`. Prompts take the same time whatever the number is; batches have the rest.

Growth is as large as the known load requires, up to `MAX_GROWTH` times the present number. Changes come one at a time:
nothing is decided while an instance comes or goes, nor for a settling time after, so measurements show the effect of the
last change. At constant load the number does not go to and fro, because an instance leaves only if the rest stays within
narrower bounds than those for growth. Unmeasured needs are learnt: if an instance was missed soon after it left, none leaves
for `HOLD_S`, and for twice as long each further time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.policies.token_cost import Resident
from shared.policies.virtual_usage import left_of

IDLE_BOUNDS = 2.0
CARRY_OUT_S = 600.0
"""Time for an instance to start and load its models (large ones take minutes), or to drain. Then the attempt has failed."""
RETRY_S = 30.0
"""After an attempt that was refused or failed."""

MOST_WORK, SPARE_WORK = 0.7, 0.5
"""Share of the instances' time that prompts may take: above the first there are too few instances; with one less, at
most the second. Decodes need the rest."""
SPARE_TIME = 0.8
"""Share of an instance's time that prompts and the streams' steps may take together with one instance less, unless it
adds nothing to the others' steps."""
WORK, WORK_BEHIND = 1.03, 1.3
"""Times the measured work of prompts that comes, as what is measured still has a little of before; and where they wait for
too long, since no more is sent than instances can take."""
SPARE_LATE = 0.5
SPARE_PRESSURE = 0.8
"""Share of their remaining time that batches may need with one instance less."""
GROWTH_LAG_S, SHRINK_LAG_S = 60.0, 120.0
"""Times for which the throughput of batches may be that of another number of instances. A batch that is late costs more than
an instance too many, so the first is the shorter one."""
LEAST_IDLE = 0.05
"""Share of instances' time that is left for batches at least."""
MAX_GROWTH = 4

REGRET_S = 120.0
"""A need for one more within this time means that the last instance left too early."""
HOLD_S, MAX_HOLD_S = 600.0, 3600.0


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
    """An instance that serves and stays."""

    instance_id: str
    models: frozenset[str]
    """Those that it serves."""
    freeness: float
    """Scaling freeness, in decode steps; +inf when idle."""
    num_running: int
    """Online requests in its batch: the divisor of the freeness."""
    num_requests: int
    """Its online requests."""
    pool_tokens: float
    """Tokens in its whole KV pool."""
    late: float = 0.0
    """Predicted time until one more prompt would begin, over the TTFT objective."""
    residents: Sequence[Resident] = ()
    """Its models with their online requests and the costs of their decode steps."""
    tpot_s: float = 0.0
    """TPOT objective; 0: not known."""


@dataclass(frozen=True)
class Fleet:
    """The instances at one moment, without those drained for other reasons."""

    members: Sequence[Member]
    starting: Collection[str] = ()
    """Instances that serve nothing yet, and are about to."""
    leaving: Collection[str] = ()
    """Instances that drain because of a `Shrink`: the named one, or another in its place."""
    unserved: Collection[str] = ()
    """Models that should be served and are not."""
    queued: Collection[str] = ()
    """Models whose online requests wait for an instance; a mapping says how many."""
    settled: Collection[str] = ()
    """Models on their fixed number of instances: they would not be on one more."""
    failed: Collection[str] = ()
    """Instances that serve nothing and are not about to: their models cannot be loaded."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Seconds of prompts that come per second, by model, including those that wait for an instance."""
    pressure: Mapping[str, float] = field(default_factory=dict)
    """Time that the batches of a model need at the present rate, over the time that they have."""


class Grow(NamedTuple):
    """There should be `num_instances` instances."""

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
    """The mean if the requests of `leaving`, and their memory, were spread evenly over the others; -inf without others."""
    others = [member for member in members if member.instance_id != leaving.instance_id]
    if not others:
        return -math.inf
    used = max(0.0, leaving.pool_tokens - _free_tokens(leaving)) / len(others)
    num_running = leaving.num_running / len(others)
    if not leaving.num_requests:
        return mean_freeness(others, cap)
    return _mean([min((_free_tokens(m) - used) / max(1.0, m.num_running + num_running), cap) for m in others])


def work_of(model: str, serving: Mapping[str, Sequence[Member]], work: Mapping[str, float], num_less: int = 0) -> float:
    """Share of the time of the model's instances that prompts of all models would take with `num_less` fewer instances."""
    on_each = {name: work.get(name, 0.0) / max(1, len(members) - num_less) for name, members in serving.items()}
    return _mean([sum(on_each[name] for name in member.models) for member in serving[model]])


def decodes_of(member: Member, leaving: Member | None, shares: Mapping[str, float]) -> float:
    """Share of a member's time that its streams take if each model with requests makes one step per TPOT objective; 0: not
    known. Of the requests of `leaving`, if that is not None, it takes `shares` of each model that both serve."""
    if not member.tpot_s:
        return 0.0
    steps = {model: (float(num), cost_s) for model, num, cost_s in member.residents}
    for model, num, cost_s in leaving.residents if leaving is not None else ():
        if model in member.models and model in shares:
            held, own_cost_s = steps.get(model, (0.0, cost_s))
            steps[model] = (held + shares[model] * num, own_cost_s if own_cost_s[0] else cost_s)
    return sum(min(1.0, n) * one_s + max(0.0, n - 1) * more_s for n, (one_s, more_s) in steps.values()) / member.tpot_s


def pressure_of(pressure: float, busy: float, num_then: int, num_now: int) -> float:
    """Pressure of batches with `num_now` instances, if it was measured with `num_then`. `busy`: instances' time that prompts
    take, in instances."""
    then, now = (max(number - busy, LEAST_IDLE * number) for number in (num_then, num_now))
    return pressure * then / now if now else math.inf


def num_in_time(pressure: float, busy: float, num_now: int) -> int:
    """Number of instances with which batches that have this pressure now would be in time."""
    return math.ceil(busy + pressure * max(num_now - busy, LEAST_IDLE * num_now) - 1e-9)


def num_wanted(members: Sequence[Member], num_queued: int, low: float) -> int:
    """Number of instances at which the present requests, and queued ones of the same size, have a freeness of `low`; 0: not
    known."""
    used = sum(member.pool_tokens - _free_tokens(member) for member in members)
    num_requests = sum(member.num_requests for member in members)
    used += num_queued * used / max(1, num_requests)
    num_requests += num_queued
    pool_tokens = _mean([member.pool_tokens for member in members])
    if not (math.isfinite(used) and pool_tokens > low):
        return 0
    wanted = math.ceil((used + low * num_requests) / pool_tokens)
    # With more instances than requests, each has to hold one.
    return wanted if wanted <= num_requests else max(num_requests, math.ceil(used / (pool_tokens - low)))


def _free_tokens(member: Member) -> float:
    return left_of(member.pool_tokens, member.freeness, member.num_running)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.inf


class _Attempt(NamedTuple):
    decision: Decision
    begun_s: float
    num_instances: int
    """Number of members in the end."""


class Autoscaling:
    """Call `decide` about once a second; its result counts as requested."""

    def __init__(self, bounds: ScalingBounds) -> None:
        self.bounds = bounds
        self._cap = IDLE_BOUNDS * bounds.high
        self._short_since: dict[str, float] = {}
        """Models that need more, "" for the least number of instances."""
        self._spare_since: float | None = None
        self._starting: dict[str, tuple[float, float]] = {}
        """Times at which instances that serve nothing yet were first and last seen so."""
        self._attempt: _Attempt | None = None
        self._quiet_until_s = -math.inf
        self._is_refused = False
        """Whether the last attempt was refused: the next one asks for one more."""
        self._numbers: dict[str, list[tuple[float, int]]] = {}
        """By model: times at which the number of its instances changed, and the number since then."""
        self._shrunk_s = -math.inf
        """Time at which an instance last left."""
        self._hold_s = HOLD_S
        self._held_until_s = -math.inf

    @property
    def attempt(self) -> Decision | None:
        """The change in progress."""
        return self._attempt.decision if self._attempt is not None else None

    def refused(self, now: float) -> None:
        """The last decision cannot be applied."""
        if self._attempt is not None:
            self._is_refused = True
            self._end_attempt(now, RETRY_S)

    def decide(self, fleet: Fleet, now: float) -> Decision | None:
        starting = self._recent(fleet.starting, now)
        self._note_numbers(fleet, now)
        self._follow_attempt(fleet, now)
        if now < self._quiet_until_s:
            return None
        attempt = self._attempt.decision if self._attempt is not None else None
        if isinstance(attempt, Grow | Keep) or (attempt is None and starting):
            self._forget()
            return None
        num_active = len(fleet.members) + len(fleet.starting)
        short = self._short(fleet, num_active, now)
        if isinstance(attempt, Shrink):
            if short and fleet.leaving:
                self._regret(now)
                return self._begin(Keep(min(fleet.leaving)), len(fleet.members) + 1, now)
            return None
        if short:
            if now < self._shrunk_s + REGRET_S:
                self._regret(now)
            num_useless = len(fleet.starting) + len(fleet.failed)
            wanted = max(
                len(fleet.members) + num_useless + self._num_more(fleet, short, now), self.bounds.min_instances
            )
            if self.bounds.max_instances:
                wanted = min(wanted, self.bounds.max_instances)
            if wanted > len(fleet.members) + num_useless:
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
            self._is_refused = False
            self._shrunk_s = now if isinstance(decision, Shrink) else self._shrunk_s
            self._end_attempt(now, self.bounds.settle_s)
        elif now >= begun_s + CARRY_OUT_S:
            self._is_refused = True
            self._end_attempt(now, RETRY_S)

    def _end_attempt(self, now: float, quiet_s: float) -> None:
        self._forget()
        self._attempt = None
        self._quiet_until_s = now + quiet_s

    def _regret(self, now: float) -> None:
        """An instance that left, or was to leave, is missed."""
        self._held_until_s, self._shrunk_s = now + self._hold_s, -math.inf
        self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)

    def _forget(self) -> None:
        """Past measurements are no longer valid."""
        self._short_since = {}
        self._spare_since = None

    def _recent(self, starting: Collection[str], now: float) -> list[str]:
        """Without those that will not serve. An instance that returns soon, because its process crashes repeatedly, counts
        as starting since its first start."""
        self._starting |= {i: (self._starting.get(i, (now, now))[0], now) for i in starting}
        self._starting = {i: times for i, times in self._starting.items() if now < times[1] + CARRY_OUT_S}
        return [i for i in starting if now < self._starting[i][0] + CARRY_OUT_S]

    # ------------------------------------------------------------------------------------------ measurements

    def _note_numbers(self, fleet: Fleet, now: float) -> None:
        """Notes of each model how many instances it has had in the last `SHRINK_LAG_S`."""
        serving = _by_model(fleet.members)
        self._numbers = {model: self._numbers.get(model, []) for model in serving}
        for model, members in serving.items():
            numbers = self._numbers[model]
            if not numbers or numbers[-1][1] != len(members):
                numbers.append((now, len(members)))
            while len(numbers) > 1 and numbers[1][0] <= now - SHRINK_LAG_S:
                del numbers[0]

    def _pressure(
        self, model: str, serving: Mapping[str, Sequence[Member]], fleet: Fleet, now: float, num_less: int = 0
    ) -> float:
        """Pressure of a model's batches with that many instances less."""
        pressure = fleet.pressure.get(model, 0.0)
        if not pressure:
            return 0.0
        numbers, num = self._numbers[model], len(serving[model])
        if num_less:
            num_then = max(number for _, number in numbers)
        else:
            ends_s = [since_s for since_s, _ in numbers[1:]] + [math.inf]
            num_then = min(n for (_, n), end_s in zip(numbers, ends_s, strict=True) if end_s > now - GROWTH_LAG_S)
        return pressure_of(pressure, num * work_of(model, serving, fleet.work), num_then, num - num_less)

    def _short(self, fleet: Fleet, num_active: int, now: float) -> list[str]:
        """Models that have needed more instances for a period."""
        serving = _by_model(fleet.members)
        short = {model for model, members in serving.items() if self._lacks(model, members, serving, fleet, now)}
        short -= set(fleet.settled)
        if num_active < self.bounds.min_instances:
            short.add("")
        self._short_since = {model: self._short_since.get(model, now) for model in short}
        return [model for model, since in self._short_since.items() if now >= since + self.bounds.period_s]

    def _lacks(
        self, model: str, members: Sequence[Member], serving: Mapping[str, Sequence[Member]], fleet: Fleet, now: float
    ) -> bool:
        return (
            mean_freeness(members, self._cap) < self.bounds.low
            or model in fleet.queued
            or _mean([member.late for member in members]) > 1.0
            or WORK * work_of(model, serving, fleet.work) > MOST_WORK
            or self._pressure(model, serving, fleet, now) > 1.0
        )

    def _num_more(self, fleet: Fleet, short: Collection[str], now: float) -> int:
        """Number of instances that the neediest model asks for."""
        if self._is_refused:
            return 1
        serving, most = _by_model(fleet.members), 1
        for model in serving.keys() & set(short):
            members = serving[model]
            num_queued = fleet.queued.get(model, 0) if isinstance(fleet.queued, Mapping) else int(model in fleet.queued)
            share = work_of(model, serving, fleet.work)
            is_behind = num_queued > 0 or _mean([member.late for member in members]) > 1.0
            wanted = max(
                math.ceil(len(members) * min(share * (WORK_BEHIND if is_behind else WORK) / MOST_WORK, MAX_GROWTH)),
                num_in_time(self._pressure(model, serving, fleet, now), len(members) * share, len(members)),
                num_wanted(members, num_queued, self.bounds.low),
            )
            most = max(most, min(wanted, MAX_GROWTH * len(members)) - len(members))
        return most

    def _spare(self, fleet: Fleet, num_active: int, now: float) -> str | None:
        """An instance that was not needed for a period."""
        found = None
        may_go = num_active > self.bounds.min_instances and now >= self._held_until_s
        if may_go and not self._short_since and not fleet.unserved:
            serving = _by_model(fleet.members)
            by_id = sorted(fleet.members, key=lambda m: m.instance_id, reverse=True)
            for member in sorted(by_id, key=lambda m: m.num_requests):
                if all(self._is_spare(model, member, serving, fleet, now) for model in member.models):
                    # One with more requests would leave no more time than this one.
                    found = member.instance_id if self._leaves_time(member, serving, fleet) else None
                    break
        if found is None:
            self._spare_since = None
            return None
        self._spare_since = now if self._spare_since is None else self._spare_since
        return found if now >= self._spare_since + self.bounds.period_s else None

    def _is_spare(
        self, model: str, member: Member, serving: Mapping[str, Sequence[Member]], fleet: Fleet, now: float
    ) -> bool:
        members = serving[model]
        num_left = len(members) - 1
        return (
            mean_without(members, member, self._cap) >= self.bounds.high
            and sum(each.late for each in members) <= SPARE_LATE * num_left
            and work_of(model, serving, fleet.work, num_less=1) <= SPARE_WORK
            and self._pressure(model, serving, fleet, now, num_less=1) <= SPARE_PRESSURE
        )

    def _leaves_time(self, member: Member, serving: Mapping[str, Sequence[Member]], fleet: Fleet) -> bool:
        """Whether prompts and the streams' steps fit the others' time without it."""
        if not any(num for _, num, _ in member.residents):
            return True
        others = {one.instance_id: one for model in member.models for one in serving[model] if one is not member}
        shares = {model: 1 / max(1, len(serving[model]) - 1) for model in member.models}
        before, after = (_mean([decodes_of(one, each, shares) for one in others.values()]) for each in (None, member))
        work = max(work_of(model, serving, fleet.work, num_less=1) for model in member.models)
        return work + after <= SPARE_TIME or after <= before


def _by_model(members: Sequence[Member]) -> Mapping[str, list[Member]]:
    serving: dict[str, list[Member]] = {}
    for member in members:
        for model in member.models:
            serving.setdefault(model, []).append(member)
    return serving
