"""How one placement becomes another while it serves. Pure: time (seconds, Unix) is an argument, and whoever hosts this
publishes the instances that it answers and shows what came of them (SeaLLM, section 5).

    change = begin(number, reason, before, target, now_s)
    while not change.is_over:
        change, instances = advance(change, instances, view, now_s, fits, settings)

| stage     | event                                          | next                                     |
|-----------|------------------------------------------------|------------------------------------------|
| fetch     | all nodes have the weights that they will load | change                                   |
| fetch     | a node cannot fetch, is gone, or takes too long | rolled_back (nothing had changed)        |
| change    | a step is possible                             | change, with other instances             |
| change    | all is as the target has it                    | settle                                   |
| change    | an instance fails, a node is gone, a step takes too long, the target fits no more | roll_back |
| settle    | all serves for `settle_s`                      | carried_out                              |
| settle    | an instance fails or is away for as long as a step may take, a node is gone | roll_back   |
| roll_back | a step is possible                             | roll_back, with other instances          |
| roll_back | all is as it was before                        | rolled_back                              |
| roll_back | a step takes too long                          | rolled_back (node agents go on trying)   |

Everything that is known stands in `PlanChange` and the instances, which are stored together: who leads next goes on.

A step is another set of instances that the nodes are to bring about. Models are loaded, and instances started, before others
are unloaded and stopped. What serves a model is taken away only while enough others that serve it are *ready*, at least one.
Where every instance that is to go has a model that nobody else has, that model is put elsewhere for the time (a detour); and
where memory has no room for that either, it is interrupted: last of all, and its requests wait for its next instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shared.messages.cluster import InstancePlan, ModelSpec, PlanChange, instance_devices

Fits = Callable[[InstancePlan, Sequence[ModelSpec]], bool]
"""Whether a running instance, with the KV pool that it has, can hold these models at once."""

KEPT_SHARE = 0.75
"""Share of the instances that serve a model that stay while others are made anew, if there are several."""


class CarryOutSettings(msgspec.Struct, frozen=True, kw_only=True):
    fetch_s: float = 3600.0
    """A download of hundreds of gigabytes takes no longer."""
    step_s: float = 600.0
    """Time for an instance to drain, start, and load its models."""
    settle_s: float = 3.0


class Held(NamedTuple):
    """What an instance shows of itself."""

    num_ranks: int
    models: Mapping[str, str]
    """Name -> loading | ready | unloading | failed"""
    is_draining: bool = False


class View(NamedTuple):
    """The nodes and instances at one moment."""

    held: Mapping[str, Held]
    """By instance id, of all that are alive."""
    fetched: Collection[tuple[str, str]] = ()
    """(node, source)"""
    fetch_problems: Mapping[tuple[str, str], str] = {}
    problems: Mapping[str, str] = {}
    """Instance id -> why it does not become what it should be."""
    gone_nodes: Collection[str] = ()
    is_certain: bool = True
    """False: a checkpoint was not read yet, or a node is away for a moment, so `Fits` may say no of what fits."""


Progress = tuple[PlanChange, list[InstancePlan]]


def begin(
    number: int,
    reason: str,
    before: Sequence[InstancePlan],
    target: Sequence[InstancePlan],
    now_s: float,
    unready: Collection[tuple[str, str]] = (),
) -> PlanChange:
    """`unready`: (model, instance id) pairs that do not serve now. Where the change leaves one as it is, and it cannot be
    loaded, that is no fault of the change, which does not wait for it."""
    had = {place.instance_id: place for place in before}
    return PlanChange(
        number=number, reason=reason, stage="fetch", begun_s=now_s, stage_s=now_s, step_s=now_s,
        before=_sorted(before), target=_sorted(target),
        unready=[
            f"{spec.name} on {want.instance_id}"
            for want in target
            if (have := had.get(want.instance_id)) is not None and _is_same_process(have, want)
            for spec in want.models
            if spec in have.models and (spec.name, want.instance_id) in unready
        ],
    )  # fmt: skip


def to_fetch(change: PlanChange) -> dict[str, list[str]]:
    """By node, the sources of models that will be loaded there and were not before."""
    had = {(place.instance_id, spec.source) for place in change.before for spec in place.models}
    fetch: dict[str, set[str]] = {}
    for place in change.target:
        for spec in place.models:
            if (place.instance_id, spec.source) not in had:
                fetch.setdefault(place.node_id, set()).add(spec.source)
    return {node: sorted(sources) for node, sources in sorted(fetch.items())}


def advance(
    change: PlanChange,
    running: Sequence[InstancePlan],
    view: View,
    now_s: float,
    fits: Fits,
    settings: CarryOutSettings,
) -> Progress:
    """The next state, and the instances that are to run. `running`: those of the last answer (at the start: `before`)."""
    match change.stage:
        case "fetch":
            return _fetching(change, running, view, now_s, settings)
        case "change" | "settle":
            cause, failure = _failure(change, running, view, now_s, fits, settings)
            if cause:
                return advance(abandon(change, cause, failure, now_s), running, view, now_s, fits, settings)
            if change.stage == "change":
                return _step(change, running, change.target, view, now_s, fits)
            if not _is_reached(change, running, view):
                # An instance was lost and is being started again: it settles anew.
                return _replace(change, stage_s=now_s), list(running)
            if now_s - change.stage_s >= settings.settle_s:
                change = _replace(change, stage="carried_out", stage_s=now_s)
            return change, list(running)
        case "roll_back":
            before = _way_back(change, running, view, fits)
            if now_s - change.step_s >= settings.step_s:
                failure = f"{change.failure}; its roll-back took more than {settings.step_s:.0f} s for a step"
                return _replace(change, stage="rolled_back", stage_s=now_s, failure=failure), before
            return _step(change, running, before, view, now_s, fits)
    return change, list(running)


def abandon(change: PlanChange, cause: str, failure: str, now_s: float) -> PlanChange:
    """It is to be rolled back. One that has changed nothing yet is over at once."""
    if change.is_over or change.stage == "roll_back":
        return change
    stage = "rolled_back" if change.stage == "fetch" else "roll_back"
    return _replace(change, stage=stage, stage_s=now_s, step_s=now_s, cause=cause, failure=failure, detours=[])


def forget(change: PlanChange, running: Sequence[InstancePlan], names: Collection[str]) -> Progress:
    """Models that were removed meanwhile: no instance has them, now or in the end."""

    def left(places: Iterable[InstancePlan]) -> list[InstancePlan]:
        return [place for place in (_without(place, names) for place in places) if place.models]

    return _replace(change, before=left(change.before), target=left(change.target)), left(running)


# ------------------------------------------------------------------------------------------------------- stages


def _fetching(
    change: PlanChange, running: Sequence[InstancePlan], view: View, now_s: float, settings: CarryOutSettings
) -> Progress:
    wanted = [(node, source) for node, sources in to_fetch(change).items() for source in sources]
    missing = [pair for pair in wanted if pair not in view.fetched]
    if gone := sorted({place.node_id for place in change.target}.intersection(view.gone_nodes)):
        change = abandon(change, "node_gone", f"{', '.join(gone)} is gone", now_s)
    elif problem := next((pair for pair in missing if pair in view.fetch_problems), None):
        failure = f"{problem[0]} cannot fetch {problem[1]}: {view.fetch_problems[problem]}"
        change = abandon(change, "fetch", failure, now_s)
    elif not missing:
        change = _replace(change, stage="change", stage_s=now_s, step_s=now_s)
    elif now_s - change.stage_s >= settings.fetch_s:
        failure = f"{missing[0][0]} has not fetched {missing[0][1]} in {settings.fetch_s:.0f} s"
        change = abandon(change, "timeout", failure, now_s)
    return change, list(running)


def _failure(
    change: PlanChange,
    running: Sequence[InstancePlan],
    view: View,
    now_s: float,
    fits: Fits,
    settings: CarryOutSettings,
) -> tuple[str, str]:
    """Its cause, and why; empty: there is none."""
    if gone := sorted({place.node_id for place in change.target}.intersection(view.gone_nodes)):
        return "node_gone", f"{', '.join(gone)} is gone"
    before = {place.instance_id: place for place in change.before}
    for place in running:
        # What was so before is no fault of the change.
        if (problem := view.problems.get(place.instance_id)) and before.get(place.instance_id) != place:
            return "instance", f"{place.instance_id} {problem}"
    if change.stage == "change" and view.is_certain:
        # Adapters were added since, say.
        for place in change.target:
            if not fits(place, place.models):
                return "no_room", f"{place.instance_id} has no room any more for {', '.join(sorted(_names(place)))}"
    is_waiting = change.stage == "change" or not _is_reached(change, running, view)
    if is_waiting and now_s - change.step_s >= settings.step_s:
        late = [place.instance_id for place in running if not _serves(change, place, view)]
        left = sorted(_going(change, running, view))
        return "timeout", f"{', '.join(late + left) or 'a step'} took more than {settings.step_s:.0f} s"
    return "", ""


def _step(
    change: PlanChange,
    running: Sequence[InstancePlan],
    goal: Sequence[InstancePlan],
    view: View,
    now_s: float,
    fits: Fits,
) -> Progress:
    is_reached = _is_reached(change, running, view)
    if is_reached and _sorted(running) == _sorted(goal):
        stage = "settle" if change.stage == "change" else "rolled_back"
        return _replace(change, stage=stage, stage_s=now_s, step_s=now_s), list(running)
    step = _Step(change, running, goal, view, fits)
    if not (step.add() or step.take_away()) and is_reached and view.is_certain and not step.detour():
        step.interrupt()
    after = step.instances()
    if after == _sorted(running):
        return change, after
    change = _replace(
        change, step_s=now_s, steps=[*change.steps, *step.told], detours=change.detours + step.detours,
        interrupted=sorted({*change.interrupted, *step.interrupted}),
    )  # fmt: skip
    return change, after


def _serves(change: PlanChange, place: InstancePlan, view: View) -> bool:
    held = view.held.get(place.instance_id)
    if held is None or held.is_draining or held.num_ranks != place.group.num_ranks:
        return False
    states = {
        name: "ready" if state == "failed" and f"{name} on {place.instance_id}" in change.unready else state
        for name, state in held.models.items()
    }
    return states == dict.fromkeys(_names(place), "ready")


def _going(change: PlanChange, running: Iterable[InstancePlan], view: View) -> set[str]:
    """Instances of this change that are alive but are not to run."""
    known = {place.instance_id for place in (*change.before, *change.target)}
    return (known & view.held.keys()) - {place.instance_id for place in running}


def _is_reached(change: PlanChange, running: Sequence[InstancePlan], view: View) -> bool:
    return all(_serves(change, place, view) for place in running) and not _going(change, running, view)


def _way_back(change: PlanChange, running: Sequence[InstancePlan], view: View, fits: Fits) -> list[InstancePlan]:
    """What a roll-back goes to: what was before, without nodes that are gone. A model that only these had stays where it has
    come to be, as far as that leaves the rest its devices and memory."""
    goal = {place.instance_id: place for place in change.before if place.node_id not in view.gone_nodes}
    taken = set().union(*(instance_devices(i, place.group.num_ranks) for i, place in goal.items()))
    left = {spec.name for place in goal.values() for spec in place.models}
    homeless = {spec.name for place in change.before for spec in place.models} - left
    for place in running:
        stays, was = _without(place, _names(place) - homeless), goal.get(place.instance_id)
        if place.node_id in view.gone_nodes or not stays.models:
            continue
        if was is None and not taken & instance_devices(place.instance_id, place.group.num_ranks):
            goal[place.instance_id] = stays
        elif was is not None and _is_same_process(place, was) and fits(was, [*was.models, *stays.models]):
            goal[place.instance_id] = _with(was, stays.models)
    return _sorted(goal.values())


# -------------------------------------------------------------------------------------------------------- steps


def _is_same_process(left: InstancePlan, right: InstancePlan) -> bool:
    """Whether models may come and go without a restart."""
    return (left.group, left.pool_bytes, left.merged_bytes) == (right.group, right.pool_bytes, right.merged_bytes)


def _names(place: InstancePlan | None) -> set[str]:
    return set() if place is None else {spec.name for spec in place.models}


def _with(place: InstancePlan, specs: Iterable[ModelSpec]) -> InstancePlan:
    by_name = {spec.name: spec for spec in (*place.models, *specs)}
    return msgspec.structs.replace(place, models=[by_name[name] for name in sorted(by_name)])


def _without(place: InstancePlan, names: Collection[str]) -> InstancePlan:
    return msgspec.structs.replace(place, models=[spec for spec in place.models if spec.name not in names])


class _Step:
    """Step from what is to run now to what is to run next. Each method changes something, or answers False."""

    def __init__(
        self,
        change: PlanChange,
        running: Sequence[InstancePlan],
        goal: Sequence[InstancePlan],
        view: View,
        fits: Fits,
    ) -> None:
        self._change, self._view, self._fits = change, view, fits
        self._now = {place.instance_id: place for place in running}
        self._goal = {place.instance_id: place for place in goal}
        self._wanted = {spec.name for place in goal for spec in place.models}
        self.told: list[str] = []
        self.detours: list[str] = []
        self.interrupted: list[str] = []

    def instances(self) -> list[InstancePlan]:
        return _sorted(self._now.values())

    # ---------------------------------------------------------------------------------------- what takes nothing

    def add(self) -> bool:
        """Instances start whose devices are free, and models are loaded where there is room."""
        num_told = len(self.told)
        for instance_id, want in sorted(self._goal.items()):
            have = self._now.get(instance_id)
            if have is None:
                if not self._taken() & instance_devices(instance_id, want.group.num_ranks):
                    self._now[instance_id] = want
                    self.told.append(f"start {instance_id} with {', '.join(sorted(_names(want)))}")
            elif _is_same_process(have, want):
                for spec in want.models:
                    if spec.name not in _names(self._now[instance_id]) and self._has_room(instance_id, spec):
                        self._load(instance_id, spec)
        return len(self.told) > num_told

    def _taken(self) -> set[tuple[str, int]]:
        """Devices of what runs, is to run, or has not ended yet."""
        taken = [instance_devices(i, place.group.num_ranks) for i, place in self._now.items()]
        taken += [instance_devices(i, held.num_ranks) for i, held in self._view.held.items()]
        return set().union(*taken)

    def _has_room(self, instance_id: str, spec: ModelSpec) -> bool:
        place, held = self._now[instance_id], self._view.held.get(instance_id)
        # What is still being unloaded takes memory as well.
        leaving = (held.models.keys() - _names(place) - {spec.name}) if held is not None else set()
        known = {s.name: s for p in (*self._change.before, *self._change.target) for s in p.models}
        if leaving - known.keys():
            return False  # it was removed meanwhile: nobody knows what it takes
        return self._fits(place, [*place.models, spec, *(known[name] for name in sorted(leaving))])

    def _load(self, instance_id: str, spec: ModelSpec) -> None:
        self._now[instance_id] = _with(self._now[instance_id], [spec])
        self.told.append(f"load {spec.name} on {instance_id}")

    # ---------------------------------------------------------------------------------------- what takes away

    def take_away(self) -> bool:
        """Whatever is not to be, as long as enough others serve its models. Whole instances first: only when none can go are
        single models unloaded, and of those the ones first whose room another model waits for."""
        for instance_id in sorted(self._now):
            if self._is_to_end(instance_id) and all(
                self._is_spare(name, instance_id) for name in self._at(instance_id)
            ):
                self._end(instance_id)
        if self.told:
            return True
        for is_waited_for in (True, False):
            for instance_id in sorted(self._now):
                want = self._goal.get(instance_id)
                if want is None or self._is_to_end(instance_id):
                    continue
                if bool(_names(want) - self._at(instance_id)) is is_waited_for:
                    extra = sorted(self._at(instance_id) - _names(want) - self._needed_detours(instance_id))
                    self._unload(instance_id, [name for name in extra if self._is_spare(name, instance_id)])
            if self.told:
                return True
        return False

    def _at(self, instance_id: str) -> set[str]:
        return _names(self._now[instance_id])

    def _is_to_end(self, instance_id: str) -> bool:
        want = self._goal.get(instance_id)
        return want is None or not _is_same_process(self._now[instance_id], want)

    def _serving(self, name: str) -> set[str]:
        """Instances that are to serve it, and do."""
        return {i for i, place in self._now.items() if name in _names(place) and self._is_ready(i, name)}

    def _is_ready(self, instance_id: str, name: str) -> bool:
        held = self._view.held.get(instance_id)
        return (
            held is not None
            and not held.is_draining
            and held.num_ranks == self._now[instance_id].group.num_ranks
            and held.models.get(name) == "ready"
        )

    def _is_spare(self, name: str, instance_id: str) -> bool:
        """Whether the model can be taken from there. One that does not serve there is missed by nobody; but an instance of
        which nothing is heard for a moment may serve."""
        serving = self._serving(name)
        if name not in self._wanted:
            return True
        if instance_id not in serving:
            return self._is_heard_of(instance_id) and name not in self._needed_detours(instance_id)
        ends = (self._change.before, self._change.target)
        num = min(sum(name in _names(place) for place in places) for places in ends)
        return len(serving) > max(1, min(num - 1, math.ceil(KEPT_SHARE * num)))

    def _is_heard_of(self, instance_id: str) -> bool:
        view, place = self._view, self._now[instance_id]
        if instance_id in view.held or instance_id in view.problems or place.node_id in view.gone_nodes:
            return True
        # One that this change has started need not have served yet.
        return self._change.stage == "roll_back" and not any(
            had.instance_id == instance_id and _is_same_process(had, place) for had in self._change.before
        )

    def _needed_detours(self, instance_id: str) -> set[str]:
        """Models that are there for the time in which no instance serves them that is to go on doing so."""
        return {
            name
            for name in self._at(instance_id)
            if f"{name} on {instance_id}" in self._change.detours
            and not any(
                name in _names(self._goal.get(other)) and not self._is_to_end(other) for other in self._serving(name)
            )
        }

    def _end(self, instance_id: str) -> None:
        del self._now[instance_id]
        again = " (it is started anew)" if instance_id in self._goal else ""
        self.told.append(f"drain and stop {instance_id}{again}")

    def _unload(self, instance_id: str, names: Sequence[str]) -> None:
        if not names:
            return
        if self._at(instance_id) == set(names):
            # An instance without any model does not show whether it is well.
            self._end(instance_id)
            return
        self._now[instance_id] = _without(self._now[instance_id], names)
        self.told += [f"unload {name} from {instance_id}" for name in names]

    # ------------------------------------------------------------------------------------------- when all is stuck

    def _stuck(self) -> list[tuple[str, list[str]]]:
        """Instances that hold something which is to go, and the models for which it cannot; those with the fewest first."""
        found = []
        for instance_id in sorted(self._now):
            going = self._at(instance_id)
            if not self._is_to_end(instance_id):
                going = going - _names(self._goal[instance_id])
            if names := sorted(name for name in going if not self._is_spare(name, instance_id)):
                found.append((instance_id, names))
        return sorted(found, key=lambda pair: (len(pair[1]), pair[0]))

    def detour(self) -> bool:
        """The models that hold up one instance go elsewhere for the time; each at most once to each place in a change."""
        for instance_id, names in self._stuck():
            before, moves = dict(self._now), []
            for name in names:
                spec = next(spec for spec in self._now[instance_id].models if spec.name == name)
                others = [i for i in self._now if i != instance_id and name not in self._at(i)]
                others = [i for i in others if f"{name} on {i}" not in self._change.detours and self._has_room(i, spec)]
                # Best where it stays for longest: on an instance that is not to end.
                if not (place := min(others, key=lambda i: (self._is_to_end(i), i), default="")):
                    break
                self._now[place] = _with(self._now[place], [spec])
                moves.append(f"{name} on {place}")
            if len(moves) == len(names):
                self.detours += moves
                self.told += [f"load {move}, for the time in which it is nowhere else" for move in moves]
                return True
            self._now = before
        return False

    def interrupt(self) -> None:
        """Nothing else is left to do."""
        for instance_id, names in self._stuck()[:1]:
            self.interrupted += [name for name in names if self._serving(name) == {instance_id}]
            if self._is_to_end(instance_id):
                self._end(instance_id)
            else:
                self._unload(instance_id, names)
            self.told[-1] += f"; {', '.join(names)} wait{'s' * (len(names) == 1)}: memory has no other room"


def _sorted(places: Iterable[InstancePlan]) -> list[InstancePlan]:
    return sorted(places, key=lambda place: place.instance_id)


def _replace(change: PlanChange, **values: object) -> PlanChange:
    return msgspec.structs.replace(change, **values)
