"""Which models on demand are loaded: which to wake, which to put away, and why one has to wait. Pure: time (seconds, any one
clock) is an argument.

    Demands         what is known of each model on demand, from the scheduler's reports, the registry and the plan
    decide(...)     one decision over them: what is to be loaded from now on

- A model that has had no request for its `idle_s` is put away, whether or not somebody needs its memory.
- A model that requests wait for is woken, those with online requests before those that only batches want, in the order in
  which they were wanted first. Where there is no room, others make it: the least recently used first, and no more than are
  needed.
- Never put away is a model with online requests, on instances or in the queue, one that is being loaded, and one that has
  served for less than `LEAST_RESIDENCY_S`. Batches give way to online requests: their lines wait in the queue.
- One that was used within its `idle_s` goes for the online requests of another only when those have waited, all of them
  together, for as long as it takes to load it again. That is the rule for renting or buying skis (Karlin, Manasse, Rudolph
  and Sleator, 1988, "Competitive snoopy caching"): whatever comes, no more than twice the time is lost that would be lost by
  who knows the future. Models that take turns so change places at most so often as their loading is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages.cluster import ModelDemand, WhyAsleep

LEAST_RESIDENCY_S = 2.0
"""Time for the requests that a model was woken for: by then they have been dispatched."""
FIRST_LOAD_S = 5.0
"""Load time of a model that was never loaded yet, as far as is known."""
FAILED_S = 10.0
"""A model that could not be loaded is given up after so long without requests: the next one tries again."""
UNREADY_S = 60.0
"""A model without requests that no instance has come to serve for so long: its node may be gone, and with it its place."""
STALE_S = 5.0
"""Without a report of the scheduler for so long, nobody knows what is in use."""


NO_DEMAND = ModelDemand(model="")


class OnDemandModel(NamedTuple):
    """What is known of one at some moment. Times are of the caller's clock."""

    name: str
    idle_s: float
    is_awake: bool
    """It is in the plan; the next two are about that."""
    ready_s: float | None = None
    """Since when an instance serves it; None: none does."""
    is_failed: bool = False
    """No instance could load it, and none is about to."""
    used_s: float = 0.0
    """Time at which it last had a request, or was configured or planned."""
    wanted_s: float = math.inf
    """Since when requests wait for it."""
    demand: ModelDemand = NO_DEMAND
    waited_s: float = 0.0
    """Waiting time of its online requests, summed until now."""
    load_s: float = FIRST_LOAD_S
    """Seconds that loading it takes."""

    @property
    def is_wanted(self) -> bool:
        return self.demand.num_online + self.demand.num_offline > 0

    @property
    def has_online(self) -> bool:
        return self.demand.num_online + self.demand.num_held_online > 0

    @property
    def is_idle(self) -> bool:
        return not (self.is_wanted or self.has_online or self.demand.num_held_offline)


@dataclass
class Decision:
    """`awake`: the models that are to be in the plan."""

    awake: frozenset[str]
    asleep: dict[str, WhyAsleep]
    """All others."""
    woken: list[str] = field(default_factory=list)
    put_away: dict[str, str] = field(default_factory=dict)
    """Cause of each: idle | room | failed."""
    due_s: float = math.inf
    """Time at which time alone may change it."""


def decide(models: Collection[OnDemandModel], now: float, fits: Callable[[frozenset[str]], bool]) -> Decision:
    """`fits(names)`: whether there is memory for these beside all that is always loaded. More models never fit better."""
    awake = {model.name for model in models if model.is_awake}
    decision = Decision(frozenset(), {})
    for model in models:
        if model.is_awake and (due_s := _idle_due_s(model)) < math.inf:
            if due_s <= now:
                awake.discard(model.name)
                decision.put_away[model.name] = "failed" if model.is_failed else "idle"
            else:
                decision.due_s = min(decision.due_s, due_s)
    asleep = {model.name: WhyAsleep.IDLE for model in models if model.name not in awake}
    wanted = [model for model in models if model.is_wanted and not model.is_awake]
    for model in sorted(wanted, key=lambda m: (not m.demand.num_online, m.wanted_s, m.name)):
        victims, why, due_s = _make_room(model, [m for m in models if m.name in awake], awake, now, fits)
        decision.due_s = min(decision.due_s, due_s)
        if why is not None:
            asleep[model.name] = why
            continue
        for victim in victims:
            decision.put_away[victim] = "room"
            asleep[victim] = WhyAsleep.IDLE
        awake = (awake - set(victims)) | {model.name}
        del asleep[model.name]
        decision.woken.append(model.name)
    decision.awake, decision.asleep = frozenset(awake), asleep
    return decision


def _idle_due_s(model: OnDemandModel) -> float:
    """Time at which it is to be put away though nobody needs its memory; inf: not while things are as they are."""
    if not model.is_idle:
        return math.inf
    if model.is_failed:
        return model.used_s + FAILED_S
    if model.ready_s is None:
        return model.used_s + max(model.idle_s, UNREADY_S)
    return max(model.used_s + model.idle_s, model.ready_s + LEAST_RESIDENCY_S)


def _make_room(
    model: OnDemandModel,
    others: list[OnDemandModel],
    awake: Collection[str],
    now: float,
    fits: Callable[[frozenset[str]], bool],
) -> tuple[list[str], WhyAsleep | None, float]:
    """Whom to put away for it, or why it has to wait, and when that may change."""
    with_it = frozenset(awake) | {model.name}
    if fits(with_it):
        return [], None, math.inf
    if not fits(frozenset({model.name})):
        return [], WhyAsleep.NO_ROOM, math.inf
    may_go: list[tuple[float, str]] = []
    may_go_soon: list[tuple[float, str]] = []
    for other in sorted(others, key=lambda m: (m.used_s, m.name)):
        is_coming = other.ready_s is None and not other.is_failed and now < other.used_s + UNREADY_S
        if other.has_online or is_coming:
            continue
        if not model.demand.num_online and not other.is_idle:
            continue
        due_s = _may_go_s(other, model, now)
        (may_go if due_s <= now else may_go_soon).append((due_s, other.name))
    gone: list[str] = []
    for _, name in may_go:
        gone.append(name)
        if fits(with_it - set(gone)):
            return _needed(gone, with_it, fits), None, math.inf
    later = [name for _, name in may_go_soon]
    if not fits(with_it - {*gone, *later}):
        return [], WhyAsleep.ROOM_IN_USE, math.inf
    why = WhyAsleep.RECENTLY_USED if model.demand.num_online else WhyAsleep.ONLINE_FIRST
    return [], why, min((due_s for due_s, _ in may_go_soon), default=math.inf)


def _may_go_s(other: OnDemandModel, model: OnDemandModel, now: float) -> float:
    """Time at which it may be put away for the requests of `model`, if no more come."""
    if other.ready_s is None:
        return now
    served_s, idle_s = other.ready_s + LEAST_RESIDENCY_S, other.used_s + other.idle_s
    if not model.demand.num_online:
        return max(served_s, idle_s)
    worth_s = now + max(0.0, other.load_s - model.waited_s) / model.demand.num_online
    return max(served_s, min(idle_s, worth_s))


def _needed(gone: list[str], with_it: frozenset[str], fits: Callable[[frozenset[str]], bool]) -> list[str]:
    """Without those that turned out to be in nobody's way, the most recently used first."""
    kept = list(gone)
    for name in reversed(gone[:-1]):
        fewer = [other for other in kept if other != name]
        if fits(with_it - set(fewer)):
            kept = fewer
    return kept


@dataclass
class _Known:
    idle_s: float
    used_s: float
    ready_s: float | None = None
    is_failed: bool = False
    wanted_s: float = math.inf
    woken_s: float | None = None
    """Time at which it was woken, until it is ready; likewise what it was woken from."""
    woken_from: str = ""
    load_s: float = FIRST_LOAD_S
    demand: ModelDemand = NO_DEMAND


class Wake(NamedTuple):
    """A model that became ready."""

    model: str
    tier: str
    """host | disk: where its weights were."""
    seconds: float
    """Since requests waited for it, or it was planned."""


class Demands:
    """What is known of the models on demand. Whoever owns it tells it what it hears, and asks for `models`."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._heard_s = -math.inf

    def configure(self, idle_s: Mapping[str, float], now: float) -> None:
        """These are on demand, each with its `idle_s`."""
        self._known = {name: self._known.get(name) or _Known(seconds, now) for name, seconds in idle_s.items()}
        for name, seconds in idle_s.items():
            self._known[name].idle_s = seconds

    def hear(self, demands: Iterable[ModelDemand], now: float) -> bool:
        """The scheduler's report. Returns whether a model is asked for that nobody serves."""
        reported = {demand.model: demand for demand in demands}
        self._heard_s = now
        is_urgent = False
        for name, known in self._known.items():
            known.demand = reported.get(name, NO_DEMAND)
            if name in reported:
                known.used_s = now
            if not known.demand.num_online + known.demand.num_offline:
                known.wanted_s = math.inf
            elif known.wanted_s == math.inf:
                known.wanted_s = now
                is_urgent |= known.ready_s is None
        return is_urgent

    def see(self, states: Mapping[str, Collection[str]], now: float) -> list[Wake]:
        """The states that each model has on instances (`LoadedModel.state`). Returns those that have become ready."""
        wakes = []
        for name, known in self._known.items():
            of_model = states.get(name, ())
            known.is_failed = "failed" in of_model and not {"ready", "loading", "unloading"} & set(of_model)
            if "ready" not in of_model:
                known.ready_s = None
            elif known.ready_s is None:
                known.ready_s = now
                if known.woken_s is not None:
                    known.load_s = max(0.0, now - known.woken_s)
                    wakes.append(Wake(name, known.woken_from, now - min(known.woken_s, known.wanted_s)))
                    known.woken_s = None
        return wakes

    def wake(self, name: str, tier: str, now: float) -> None:
        """It is in the plan from now on. `tier`: host | disk."""
        known = self._known[name]
        known.woken_s, known.woken_from, known.used_s, known.ready_s = now, tier, now, None

    def has_online(self, name: str) -> bool:
        """Whether online requests for it wait or run, as was heard last."""
        known = self._known.get(name)
        return known is not None and known.demand.num_online + known.demand.num_held_online > 0

    def is_wanted(self, names: Collection[str]) -> bool:
        """Whether requests wait for one of these, as was heard last."""
        return any(name in names and known.wanted_s < math.inf for name, known in self._known.items())

    def is_known(self, now: float) -> bool:
        """Whether the scheduler says what is in use."""
        return now - self._heard_s <= STALE_S

    def models(self, awake: Collection[str], now: float) -> list[OnDemandModel]:
        """`awake`: those in the plan."""
        since_s = max(0.0, now - self._heard_s) if self._heard_s > -math.inf else 0.0
        return [
            OnDemandModel(
                name=name,
                idle_s=known.idle_s,
                is_awake=name in awake,
                ready_s=known.ready_s,
                is_failed=known.is_failed,
                used_s=known.used_s,
                wanted_s=known.wanted_s,
                demand=known.demand,
                waited_s=known.demand.waited_s + since_s * known.demand.num_online,
                load_s=known.load_s,
            )
            for name, known in sorted(self._known.items())
        ]
