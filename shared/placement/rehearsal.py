"""A change of the placement before it is made: which groups would serve when, by the core that carries it out
(carry_out.py) and the times that draining, restarting and loading take. Pure.

    rehearsal = rehearse(problem, before, after)

Weights are taken to be fetched already: until they are, nothing changes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from shared.messages.cluster import InstancePlan
from shared.placement.carry_out import CarryOutSettings, Held, View, advance, begin, to_fetch
from shared.placement.execution import execution_s
from shared.placement.places import fits, incumbent_places, places
from shared.placement.plan import Group, Plan, group_of
from shared.placement.problem import ModelFacts, NodeFacts, Problem

MOST_STEPS = 10_000
"""Most steps of a rehearsal: each model of each group comes and goes a few times at most."""


DRAIN_LEAST_S, DRAIN_EXECUTIONS = 2.0, 3.0
"""All requests of an instance that is drained, or of a model that is unloaded, have ended or moved after this time and
so many mean execution times."""


class Episode(NamedTuple):
    """A group that takes requests of all its models for a time, in seconds from the beginning. What it has then it goes on
    with."""

    group: Group
    start_s: float = 0.0
    end_s: float = math.inf


class Rehearsal(NamedTuple):
    episodes: list[Episode]
    """In the order of their ends, the last ones without one."""
    seconds: float
    """Until all is as it is to be."""
    lost_device_s: float
    """Devices of the plan before, times seconds in which they serve nobody."""
    interrupted: list[str]
    """Models that no group serves for a time."""


def change_s(before: Plan | None, after: Plan, problem: Problem) -> float:
    """Seconds of a device that going from one plan to another takes: groups that are made anew restart and load all their
    models, others load what they lack."""
    nodes: dict[str, NodeFacts] = {node.node_id: node for node in problem.nodes}
    models: dict[str, ModelFacts] = {model.name: model for model in problem.models}
    held = {} if before is None else {(group.node_id, group.devices): group.models for group in before.groups}
    total = 0.0
    for group in after.groups:
        has = held.get((group.node_id, group.devices))
        there = {models[name].weights for name in has or () if name in models}
        weights = {models[name].weights: models[name].weight_bytes for name in group.models}
        load_s = sum(num for name, num in weights.items() if name not in there) / nodes[group.node_id].load_bytes_s
        # Each rank reads a p-th of the bytes, and all of them wait for that.
        total += load_s + (group.num_ranks * problem.times.restart_s if has is None else 0.0)
    return total


class _Instance:
    """One that is alive."""

    def __init__(self, place: InstancePlan, ready_s: float) -> None:
        self.place = place
        self.ready_s = {spec.name: ready_s for spec in place.models}
        """Time at which each of its models serves."""
        self.gone_s: dict[str, float] = {}
        """Time at which each model that is being unloaded is gone."""
        self.end_s = math.inf
        """Time at which it is empty and ends; inf: it is to stay."""
        self.serving: tuple[str, ...] = ()
        self.since_s = 0.0

    @property
    def is_draining(self) -> bool:
        return self.end_s < math.inf

    def state(self, name: str, now_s: float) -> str:
        if name in self.gone_s:
            return "unloading"
        return "ready" if self.ready_s[name] <= now_s else "loading"


def rehearse(problem: Problem, before: Plan, after: Plan) -> Rehearsal:
    """Groups of both plans must fit their nodes. A change that gets nowhere is over when `CarryOutSettings.step_s` says so,
    and its last episodes are what it began with."""
    running = incumbent_places(problem) if before == problem.incumbent else places(problem, before)
    target = places(problem, after, running)
    stage = _Stage(problem, running)
    change, can_hold, settings = begin(0, "", running, target, 0.0), fits(problem), CarryOutSettings()
    view = View({}, {(node, source) for node, sources in to_fetch(change).items() for source in sources})
    now_s = 0.0
    for _ in range(MOST_STEPS):
        was = change, running
        change, running = advance(change, running, view._replace(held=stage.held(now_s)), now_s, can_hold, settings)
        stage.bring_about(running, now_s)
        if change.is_over or change.stage == "settle":
            break
        if was == (change, running):
            now_s = min(stage.next_s(now_s), change.step_s + settings.step_s)
            stage.note(now_s)
    episodes = stage.episodes(now_s)
    devices = sum(group.num_ranks for group in before.groups)
    used_s = sum(one.group.num_ranks * (min(one.end_s, now_s) - min(one.start_s, now_s)) for one in episodes)
    return Rehearsal(episodes, now_s, max(0.0, devices * now_s - used_s), change.interrupted)


class _Stage:
    """The instances as they would be."""

    def __init__(self, problem: Problem, running: list[InstancePlan]) -> None:
        self._nodes = {node.node_id: node for node in problem.nodes}
        self._models = {model.name: model for model in problem.models}
        self._times = problem.times
        known = execution_s(problem)
        self._drain_s = {
            name: min(self._times.drain_s, DRAIN_LEAST_S + DRAIN_EXECUTIONS * known.get(name, 0.0))
            for name in self._models
        }
        self._instances = {place.instance_id: _Instance(place, 0.0) for place in running}
        self._over: list[Episode] = []
        self.note(0.0)

    def held(self, now_s: float) -> dict[str, Held]:
        return {
            instance_id: Held(
                one.place.group.num_ranks, {name: one.state(name, now_s) for name in one.ready_s}, one.is_draining
            )
            for instance_id, one in self._instances.items()
        }

    def bring_about(self, wanted: list[InstancePlan], now_s: float) -> None:
        places = {place.instance_id: place for place in wanted}
        for instance_id, one in self._instances.items():
            place = places.get(instance_id)
            if one.is_draining:
                continue
            if place is None:
                one.end_s = now_s + max((self._drain_s[name] for name in one.ready_s), default=0.0)
                continue
            names = [spec.name for spec in place.models]
            for name in names:
                if name not in one.ready_s:
                    one.ready_s[name] = now_s + self._load_s(place, [name])
            for name in one.ready_s.keys() - set(names) - one.gone_s.keys():
                one.gone_s[name] = now_s + self._drain_s[name]
            one.place = place
        for instance_id, place in places.items():
            if instance_id not in self._instances:
                start_s = self._times.restart_s + self._load_s(place, [spec.name for spec in place.models])
                self._instances[instance_id] = _Instance(place, now_s + start_s)
        self.note(now_s)

    def _load_s(self, place: InstancePlan, names: list[str]) -> float:
        rate = self._nodes[place.node_id].load_bytes_s * place.group.num_ranks
        weights = {self._models[name].weights: self._models[name].weight_bytes for name in names}
        return sum(weights.values()) / rate

    def next_s(self, now_s: float) -> float:
        """Time at which something is another than now."""
        coming = [math.inf]
        for one in self._instances.values():
            coming += [one.end_s, *one.ready_s.values(), *one.gone_s.values()]
        return min(at_s for at_s in coming if at_s > now_s)

    def note(self, now_s: float) -> None:
        """What has ended is gone, and who serves what is another."""
        for instance_id, one in list(self._instances.items()):
            for name in [name for name, at_s in one.gone_s.items() if at_s <= now_s]:
                del one.gone_s[name], one.ready_s[name]
            serving = tuple(sorted(name for name in one.ready_s if one.state(name, now_s) == "ready"))
            if one.is_draining:
                serving = ()
            if serving != one.serving:
                self._end_episode(one, now_s)
                one.serving, one.since_s = serving, now_s
            if one.end_s <= now_s:
                del self._instances[instance_id]

    def _end_episode(self, one: _Instance, now_s: float) -> None:
        # One that drains at once served until then.
        if one.serving and (now_s > one.since_s or not now_s):
            self._over.append(Episode(self._group(one), one.since_s, now_s))

    def _group(self, one: _Instance) -> Group:
        return msgspec.structs.replace(group_of(one.place), models=one.serving)

    def episodes(self, now_s: float) -> list[Episode]:
        still = [one for _, one in sorted(self._instances.items()) if one.serving]
        return self._over + [Episode(self._group(one), one.since_s) for one in still]
