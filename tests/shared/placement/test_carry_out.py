"""How one placement becomes another: each row of the table, and whole changes in a small world with failures."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import DeviceGroup, InstancePlan, ModelSpec, PlanChange, instance_devices
from shared.placement.carry_out import (
    CarryOutSettings,
    Held,
    View,
    abandon,
    advance,
    begin,
    forget,
    to_fetch,
)

SETTINGS = CarryOutSettings(fetch_s=100, step_s=50, settle_s=3)
GRACE_S = 10
"""After which a node is known to be lost."""
ROOM = 3
"""Models that a device has memory for."""


def place(instance_id: str, models: str, num_ranks: int = 1, pool: int = 1) -> InstancePlan:
    """`models`: a letter each."""
    specs = [ModelSpec(name, f"/models/{name}") for name in sorted(models)]
    return InstancePlan(instance_id, instance_id.rpartition("-")[0], specs, pool, 1, DeviceGroup(("gpu",) * num_ranks))


def fits(instance: InstancePlan, specs: Sequence[ModelSpec]) -> bool:
    return len({spec.name for spec in specs}) <= ROOM * instance.group.num_ranks


def shown(places: Sequence[InstancePlan], **states: str) -> dict[str, Held]:
    """All ready, but for `states` of models."""
    return {
        p.instance_id: Held(p.group.num_ranks, {s.name: states.get(s.name, "ready") for s in p.models}) for p in places
    }


def names(instances: Sequence[InstancePlan]) -> dict[str, str]:
    return {p.instance_id: "".join(spec.name for spec in p.models) for p in instances}


def only_on(nodes: Collection[str], places: Sequence[InstancePlan]) -> set[str]:
    """Models that are on no other nodes."""
    all_names, others = (
        {spec.name for p in some for spec in p.models}
        for some in (places, [p for p in places if p.node_id not in nodes])
    )
    return all_names - others


def at(stage: str, before: list[InstancePlan], target: list[InstancePlan]) -> PlanChange:
    return msgspec.structs.replace(begin(1, "why", before, target, 0.0), stage=stage)


BEFORE, TARGET = [place("n-0", "a"), place("n-1", "b")], [place("n-0", "ab"), place("n-1", "b")]

FETCHED = View(shown(BEFORE), fetched={("n", "/models/b")})


@pytest.mark.parametrize(
    ("stage", "running", "view", "now_s", "next_stage", "instances", "failure"),
    [
        ("fetch", BEFORE, View(shown(BEFORE)), 99, "fetch", {"n-0": "a", "n-1": "b"}, ""),
        ("fetch", BEFORE, FETCHED, 99, "change", {"n-0": "a", "n-1": "b"}, ""),
        ("fetch", BEFORE, View(shown(BEFORE)), 100, "rolled_back", {"n-0": "a", "n-1": "b"}, "in 100 s"),
        ("fetch", BEFORE, View(shown(BEFORE), fetch_problems={("n", "/models/b"): "no such file"}), 1, "rolled_back",
         {"n-0": "a", "n-1": "b"}, "no such file"),
        ("fetch", BEFORE, View(shown(BEFORE), gone_nodes={"n"}), 1, "rolled_back", {"n-0": "a", "n-1": "b"}, "gone"),
        ("fetch", BEFORE, View(shown(BEFORE), gone_nodes={"other"}), 1, "fetch", {"n-0": "a", "n-1": "b"}, ""),
        ("change", BEFORE, View(shown(BEFORE)), 1, "change", {"n-0": "ab", "n-1": "b"}, ""),
        ("change", TARGET, View(shown(BEFORE)), 1, "change", {"n-0": "ab", "n-1": "b"}, ""),
        ("change", TARGET, View(shown(TARGET, b="loading")), 1, "change", {"n-0": "ab", "n-1": "b"}, ""),
        ("change", TARGET, View(shown(TARGET)), 1, "settle", {"n-0": "ab", "n-1": "b"}, ""),
        ("change", TARGET, View(shown(BEFORE)), 50, "roll_back", {"n-0": "a", "n-1": "b"}, "n-0 took more than 50 s"),
        ("change", TARGET, View(shown(BEFORE), problems={"n-0": "cannot load b"}), 1, "roll_back",
         {"n-0": "a", "n-1": "b"}, "n-0 cannot load b"),
        ("change", TARGET, View(shown(BEFORE), problems={"n-1": "is as it was"}), 1, "change",
         {"n-0": "ab", "n-1": "b"}, ""),
        ("settle", TARGET, View(shown(TARGET)), 2, "settle", {"n-0": "ab", "n-1": "b"}, ""),
        ("settle", TARGET, View(shown(TARGET)), 3, "carried_out", {"n-0": "ab", "n-1": "b"}, ""),
        ("settle", TARGET, View(shown(BEFORE)), 3, "settle", {"n-0": "ab", "n-1": "b"}, ""),
        ("settle", TARGET, View(shown(BEFORE)), 50, "roll_back", {"n-0": "a", "n-1": "b"}, "n-0 took more than 50 s"),
        ("settle", TARGET, View(shown(TARGET), problems={"n-0": "crashed"}), 3, "roll_back", {"n-0": "a", "n-1": "b"},
         "crashed"),
        ("roll_back", TARGET, View(shown(TARGET)), 1, "roll_back", {"n-0": "a", "n-1": "b"}, ""),
        ("roll_back", BEFORE, View(shown(TARGET)), 1, "roll_back", {"n-0": "a", "n-1": "b"}, ""),
        ("roll_back", BEFORE, View(shown(BEFORE)), 1, "rolled_back", {"n-0": "a", "n-1": "b"}, ""),
        ("roll_back", TARGET, View({}), 50, "rolled_back", {"n-0": "a", "n-1": "b"}, "roll-back took"),
        ("change", TARGET, View(shown(TARGET), gone_nodes={"n"}), 1, "roll_back", {}, "n is gone"),
        ("settle", TARGET, View(shown(TARGET), gone_nodes={"n"}), 1, "roll_back", {}, "n is gone"),
        ("roll_back", TARGET, View(shown(TARGET), gone_nodes={"n"}), 1, "roll_back", {}, ""),
        ("roll_back", [], View({}, gone_nodes={"n"}), 1, "rolled_back", {}, ""),
        ("roll_back", TARGET, View({}, gone_nodes={"n"}), 50, "rolled_back", {}, "roll-back took"),
        ("carried_out", TARGET, View({}), 999, "carried_out", {"n-0": "ab", "n-1": "b"}, ""),
        ("rolled_back", BEFORE, View({}), 999, "rolled_back", {"n-0": "a", "n-1": "b"}, ""),
    ],
)  # fmt: skip
def test_stages(
    stage: str, running: list[InstancePlan], view: View, now_s: float, next_stage: str, instances: dict[str, str],
    failure: str,
) -> None:  # fmt: skip
    change, after = advance(at(stage, BEFORE, TARGET), running, view, now_s, fits, SETTINGS)
    assert (change.stage, names(after)) == (next_stage, instances)
    assert failure in change.failure and bool(failure) == bool(change.failure)


@pytest.mark.parametrize(("stage", "after"), [("fetch", "rolled_back"), ("change", "roll_back"), ("settle", "roll_back"),
                                              ("carried_out", "carried_out"), ("roll_back", "roll_back")])  # fmt: skip
def test_a_change_can_be_abandoned(stage: str, after: str) -> None:
    assert abandon(at(stage, BEFORE, TARGET), "operator", "because", 5.0).stage == after


def test_what_is_not_heard_of_for_a_moment_may_serve() -> None:
    """`b` has not come to n-1 yet, and nobody knows what n-0 does."""
    before, target = [place("n-0", "ab"), place("n-1", "c")], [place("n-0", "a"), place("n-1", "bc")]
    running, held = [before[0], target[1]], shown([target[1]], b="loading")
    change = at("change", before, target)
    assert names(advance(change, running, View(held), 1.0, fits, SETTINGS)[1]) == {"n-0": "ab", "n-1": "bc"}
    crashed = View(held, problems={"n-0": "crashed"})
    assert names(advance(change, running, crashed, 1.0, fits, SETTINGS)[1]) == {"n-0": "a", "n-1": "bc"}


def test_an_instance_that_a_change_has_started_ends_with_its_roll_back_though_it_never_served() -> None:
    before = [place("n-0", "ab")]
    change = at("roll_back", before, [place("n-0", "a"), place("n-1", "b")])
    running = [before[0], place("n-1", "b")]
    assert names(advance(change, running, View(shown(before)), 1.0, fits, SETTINGS)[1]) == {"n-0": "ab"}
    was_there = at("roll_back", [*before, place("n-1", "bc")], [place("n-0", "abc"), place("n-1", "b")])
    running = [place("n-0", "abc"), place("n-1", "bc")]
    assert names(advance(was_there, running, View({}), 1.0, fits, SETTINGS)[1]) == names(running)


def test_nothing_is_interrupted_while_it_is_not_certain_what_fits() -> None:
    before, target = [place("n-0", "abc"), place("n-1", "def")], [place("n-0", "abf"), place("n-1", "dec")]
    change, view = at("change", before, target), View(shown(before))
    assert names(advance(change, before, view, 1.0, fits, SETTINGS)[1]) != names(before), "one of them waits"
    change, after = advance(change, before, view._replace(is_certain=False), 1.0, lambda *_: False, SETTINGS)
    assert (change.stage, names(after)) == ("change", names(before))


def test_what_has_no_room_any_more_is_rolled_back_before_a_model_is_interrupted() -> None:
    before, target = [place("n-0", "abc"), place("n-1", "def")], [place("n-0", "abf"), place("n-1", "dec")]
    change, after = advance(
        at("change", before, target), before, View(shown(before)), 1.0, lambda _, specs: len(specs) < 3, SETTINGS
    )
    assert (change.cause, names(after)) == ("no_room", names(before))
    assert "n-0 has no room any more for a, b, f" in change.failure


def test_a_model_that_was_removed_takes_its_room_until_it_is_unloaded() -> None:
    before, target = [place("n-0", "ab"), place("n-1", "c")], [place("n-0", "abc"), place("n-1", "c")]
    change = at("change", before, target)
    held = shown(before) | {"n-0": Held(1, {"a": "ready", "b": "ready", "x": "unloading"})}
    assert names(advance(change, before, View(held), 1.0, fits, SETTINGS)[1]) == names(before)
    assert names(advance(change, before, View(shown(before)), 1.0, fits, SETTINGS)[1]) == names(target)


def test_models_that_are_removed_are_in_neither_placement() -> None:
    change, running = forget(at("change", BEFORE, TARGET), TARGET, {"b"})
    assert names(change.before) == names(change.target) == names(running) == {"n-0": "a"}


def test_only_what_is_new_is_fetched() -> None:
    assert to_fetch(begin(1, "", BEFORE, TARGET, 0.0)) == {"n": ["/models/b"]}
    assert to_fetch(begin(1, "", TARGET, BEFORE, 0.0)) == {}


# ---------------------------------------------------------------------------------------------------- whole changes


@dataclass
class World:
    """Nodes that bring about what is published, a second at a time, as node agents do."""

    fates: random.Random
    failures: float = 0.0
    """Failures of an action of an instance."""
    held: dict[str, Held] = field(default_factory=dict)
    published: list[InstancePlan] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    lost: str = ""
    """A node that is no more."""
    gone: set[str] = field(default_factory=set)
    """Nodes that are known to be lost."""

    def lose(self, node: str) -> None:
        self.lost = node
        self.held = {i: held for i, held in self.held.items() if not i.startswith(f"{node}-")}

    def view(self) -> View:
        sources = {(p.node_id, spec.source) for p in self.published for spec in p.models}
        fetched = {(node, f"/models/{name}") for node in "nm" for name in "abcdefg"} | sources
        return View(dict(self.held), fetched, {}, dict(self.problems), set(self.gone))

    def turn(self) -> None:
        wanted = {p.instance_id: p for p in self.published if p.node_id != self.lost}
        self.problems = {i: text for i, text in self.problems.items() if i in wanted}
        for instance_id in list(self.held):
            if self.fates.random() < 0.3:
                continue  # late
            want, held = wanted.get(instance_id), self.held[instance_id]
            if want is None or want.group.num_ranks != held.num_ranks:
                if held.is_draining:
                    del self.held[instance_id]
                else:
                    self.held[instance_id] = held._replace(is_draining=True)
            elif self.fates.random() < self.failures / 4:
                del self.held[instance_id]  # it dies, and is started again
            else:
                self._load(instance_id, want, held)
        taken = set().union(*(instance_devices(i, held.num_ranks) for i, held in self.held.items()), set())
        for instance_id, want in wanted.items():
            devices = instance_devices(instance_id, want.group.num_ranks)
            if instance_id not in self.held and not devices & taken and self.fates.random() < 0.7:
                taken |= devices
                if self.fates.random() < self.failures:
                    self.problems[instance_id] = "does not start"
                else:
                    self.held[instance_id] = Held(want.group.num_ranks, {s.name: "loading" for s in want.models})

    def _load(self, instance_id: str, want: InstancePlan, held: Held) -> None:
        models = dict(held.models)
        for spec in want.models:
            if models.get(spec.name) == "loading" and self.fates.random() < self.failures:
                models[spec.name] = "failed"
                self.problems[instance_id] = f"could not load {spec.name}"
            elif models.get(spec.name) == "loading":
                models[spec.name] = "ready"
            elif spec.name not in models:
                models[spec.name] = "loading"
        for name in models.keys() - {spec.name for spec in want.models}:
            del models[name]
        self.held[instance_id] = held._replace(models=models, is_draining=False)
        assert len(models) <= ROOM * held.num_ranks, "memory is exceeded"

    def serving(self, name: str) -> set[str]:
        return {i for i, held in self.held.items() if held.models.get(name) == "ready" and not held.is_draining}


@dataclass
class Run:
    change: PlanChange
    instances: list[InstancePlan]
    unserved: set[str] = field(default_factory=set)
    """Models of both placements that were somewhere at the start, and that nobody served at some time."""
    gone: set[str] = field(default_factory=set)
    """Nodes that are known to be lost at its end."""


def carried_out(
    before: list[InstancePlan],
    target: list[InstancePlan],
    *,
    failures: float = 0.0,
    seed: int = 0,
    check: bool = True,
    failed: Collection[tuple[str, str]] = (),
    loss: tuple[str, int] = ("", 0),
) -> Run:
    """`failed`: (model, instance) pairs that are so from the beginning. `loss`: a node, and the second when it vanishes."""
    world = World(random.Random(seed), failures, shown(before), list(before))
    for name, instance_id in failed:
        held = world.held[instance_id]
        world.held[instance_id] = held._replace(models={**held.models, name: "failed"})
    change, instances = begin(1, "why", before, target, 0.0, failed), list(before)
    run = Run(change, instances)
    both = {s.name for p in before for s in p.models} & {s.name for p in target for s in p.models}
    for now_s in range(3000):
        # Also across a change of the leader: nothing but what is stored counts.
        change = msgspec.json.decode(msgspec.json.encode(change), type=PlanChange)
        if now_s == loss[1]:
            world.lose(loss[0])
        if now_s == loss[1] + GRACE_S:
            world.gone.add(loss[0])
        view = world.view()
        change, after = advance(change, instances, view, float(now_s), fits, SETTINGS)
        told, instances = instances, after
        devices = [d for p in instances for d in instance_devices(p.instance_id, p.group.num_ranks)]
        assert len(devices) == len(set(devices)) and all(p.models for p in instances)
        for name in both:
            serving = world.serving(name)
            # Where only a lost node had it, there may be no room for it beside what was before.
            is_kept = name not in change.interrupted and name not in only_on(world.gone, before)
            if check and is_kept and change.stage != "rolled_back":
                had, has = (
                    {p.instance_id for p in places if any(s.name == name for s in p.models)} & serving
                    for places in (told, instances)
                )
                assert has or not had, f"{name} is taken from all that serve it"
            if not serving:
                run.unserved.add(name)
        world.published = instances
        if change.is_over:
            break
        world.turn()
    run.change, run.instances, run.gone = change, instances, world.gone
    assert change.is_over, change
    return run


def test_two_instances_swap_their_models() -> None:
    run = carried_out([place("n-0", "a"), place("n-1", "b")], [place("n-0", "b"), place("n-1", "a")])
    assert run.change.stage == "carried_out" and not run.unserved
    assert run.change.steps == [
        "load b on n-0", "load a on n-1", "unload a from n-0", "unload b from n-1",
    ]  # fmt: skip


def test_a_full_instance_hands_its_models_over_first() -> None:
    run = carried_out([place("n-0", "abc"), place("n-1", "d")], [place("n-0", "ad"), place("n-1", "bc")])
    assert run.change.stage == "carried_out" and not run.unserved and not run.change.detours


def test_one_device_after_the_other_is_made_anew() -> None:
    before = [place(f"n-{k}", "a") for k in range(4)]
    run = carried_out(before, [place(f"n-{k}", "a", pool=2) for k in range(4)])
    assert run.change.stage == "carried_out" and not run.unserved
    assert [step.split()[0] for step in run.change.steps] == ["drain", "start"] * 4


def test_two_devices_become_a_group_while_a_third_serves() -> None:
    run = carried_out(
        [place("n-0", "a"), place("n-1", "b"), place("n-2", "c")], [place("n-0", "ab", 2), place("n-2", "c")]
    )
    assert run.change.stage == "carried_out" and not run.unserved, run.change.steps
    assert run.change.detours == ["a on n-2", "b on n-2"] and not run.change.interrupted


def test_where_there_is_no_room_a_model_waits_and_says_so() -> None:
    run = carried_out([place("n-0", "a"), place("n-1", "a")], [place("n-0", "a", 2)])
    assert run.change.stage == "carried_out" and run.unserved == {"a"} == set(run.change.interrupted)
    assert any("a waits: memory has no other room" in step for step in run.change.steps)


def test_groups_become_single_devices_and_move_between_nodes() -> None:
    before = [place("n-0", "ab", 2), place("m-0", "c", 2)]
    target = [place("n-0", "c"), place("n-1", "ac"), place("m-0", "ab"), place("m-1", "b")]
    run = carried_out(before, target)
    assert run.change.stage == "carried_out" and not run.unserved, run.change.steps


def test_a_model_that_cannot_be_loaded_rolls_all_back() -> None:
    before = [place("n-0", "a"), place("n-1", "b")]
    run = carried_out(before, [place("n-0", "ac"), place("n-1", "b")], failures=1.0, check=False)
    assert run.change.stage == "rolled_back" and run.change.failure
    assert names(run.instances) == {"n-0": "a", "n-1": "b"}


def test_a_model_that_had_failed_before_holds_no_change_up_that_leaves_it_where_it_is() -> None:
    before, failed = [place("n-0", "ab"), place("n-1", "a")], {("b", "n-0")}
    run = carried_out(before, [place("n-0", "abc"), place("n-1", "c")], failed=failed)
    assert run.change.stage == "carried_out", run.change
    run = carried_out(before, [place("n-0", "ab"), place("n-1", "ac")], failed=failed, failures=1.0)
    assert run.change.stage == "rolled_back" and "could not load c" in run.change.failure
    assert "roll-back took" not in run.change.failure
    # It is to be loaded there: by an instance that is made anew, or from elsewhere.
    for target in (place("n-0", "ab", pool=2), msgspec.structs.replace(before[0], models=[ModelSpec("b", "/other")])):
        assert begin(1, "", before, [target], 0.0, failed).unready == []


@pytest.mark.parametrize(
    ("left", "running", "rolled_back"),
    [
        ([place("n-1", "c")], [place("n-0", "ac"), place("n-1", "ac")], {"n-0": "a", "n-1": "ac"}),
        # It has no room beside what was there, or on its devices.
        ([place("n-1", "cde")], [place("n-1", "ac")], {"n-1": "cde"}),
        ([place("n-1", "c")], [place("n-0", "ac", 2)], {"n-1": "c"}),
    ],
)
def test_a_model_that_only_a_lost_node_had_stays_where_it_has_come_to_be(
    left: list[InstancePlan], running: list[InstancePlan], rolled_back: dict[str, str]
) -> None:
    change = at("change", [place("m-0", "a"), *left], [place("m-0", "c"), *running])
    held = shown(running)
    for now_s in range(5):
        change, running = advance(change, running, View(held, gone_nodes={"m"}), now_s, fits, SETTINGS)
        held = shown(running)
    assert (change.stage, change.cause, names(running)) == ("rolled_back", "node_gone", rolled_back)


@st.composite
def placements(draw: st.DrawFn) -> list[InstancePlan]:
    found = []
    for node in "nm":
        device = 0
        while device < 4:
            num_ranks = draw(st.sampled_from([1, 1, 1, 2, 4] if device == 0 else [1, 1, 2] if device == 2 else [1]))
            models = draw(st.sets(st.sampled_from("abcdefg"), max_size=ROOM))
            if models:
                pool = draw(st.integers(1, 2))
                found.append(place(f"{node}-{device}", "".join(models), num_ranks, pool))
            device += num_ranks
    return found


@settings(max_examples=60, deadline=None)
@given(before=placements(), target=placements(), seed=st.integers(0, 2**32))
def test_every_change_is_carried_out_and_a_model_is_missed_only_where_it_is_said(
    before: list[InstancePlan], target: list[InstancePlan], seed: int
) -> None:
    run = carried_out(before, target, seed=seed)
    assert run.change.stage == "carried_out", run.change
    assert names(run.instances) == names(target)
    assert run.unserved <= set(run.change.interrupted)


@settings(max_examples=60, deadline=None)
@given(before=placements(), target=placements(), failures=st.floats(0, 0.3), seed=st.integers(0, 2**32))
def test_with_failures_it_ends_carried_out_or_as_it_was(
    before: list[InstancePlan], target: list[InstancePlan], failures: float, seed: int
) -> None:
    run = carried_out(before, target, failures=failures, seed=seed)
    as_it_was = run.change.stage == "rolled_back"
    assert run.change.failure if as_it_was else run.change.stage == "carried_out"
    assert names(run.instances) == names(before if as_it_was else target)


@settings(max_examples=60, deadline=None)
@given(
    before=placements(), target=placements(), failures=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 2**32),
    loss_s=st.integers(1, 30),
)  # fmt: skip
def test_where_a_node_is_lost_it_ends_carried_out_or_as_it_was_without_that_node(
    before: list[InstancePlan], target: list[InstancePlan], failures: float, seed: int, loss_s: int
) -> None:
    run = carried_out(before, target, failures=failures, seed=seed, loss=("m", loss_s))
    if run.change.stage == "carried_out":
        assert not run.gone or all(p.node_id == "n" for p in target)
        assert names(run.instances) == names(target)
    else:
        lost = only_on(run.gone, before)
        rest = {i: models for i, all_ in names(run.instances).items() if (models := "".join(sorted(set(all_) - lost)))}
        assert rest == names([p for p in before if p.node_id not in run.gone])
        assert run.change.failure and (failures or "roll-back took" not in run.change.failure)
