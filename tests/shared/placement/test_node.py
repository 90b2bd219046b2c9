"""The reconciler of the node agent, without processes: scripted events, and a simulated node driven by hypothesis."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.admin import Drain, LoadModel, UnloadModel
from shared.messages.cluster import (
    DeviceGroup,
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelSpec,
    PlacementPlan,
)
from shared.placement import node as node_state
from shared.placement.node import Action, Ask, Kill, NodeState, Start, Terminate, back_off_s, num_planned
from tests.seeds import examples

MIB = 1 << 20
GRACE_S = 30.0


def load(instance_id: str, model: ModelSpec) -> Ask:
    return Ask(instance_id, LoadModel(model))


def unload(instance_id: str, name: str) -> Ask:
    return Ask(instance_id, UnloadModel(name, GRACE_S))


def drain(instance_id: str) -> Ask:
    return Ask(instance_id, Drain(GRACE_S))


def undrain(instance_id: str) -> Ask:
    return Ask(instance_id, Drain(GRACE_S, is_undone=True))


def spec(name: str, version: int = 1) -> ModelSpec:
    return ModelSpec(name, f"/models/{name}-{version}")


def instance_plan(k: int, names: str = "a", pool: int = 8, merged: int = 2) -> InstancePlan:
    return InstancePlan(f"n-{k}", "n", [spec(name) for name in names], pool * MIB, merged * MIB)


def plan(version: int, *instances: InstancePlan) -> PlacementPlan:
    return PlacementPlan(version, list(instances))


def info(of: InstancePlan, *, state: str = "ready", models: dict[str, str] | None = None) -> InstanceInfo:
    """The registry entry of an instance that has loaded its models, or `models`: name -> state."""
    states = dict.fromkeys((s.name for s in of.models), "ready") if models is None else models
    loaded = [
        LoadedModel(name=name, state=s, error="no such file" if s == "failed" else "") for name, s in states.items()
    ]
    return InstanceInfo(instance_id=of.instance_id, incarnation="incarnation", node_id="n", state=state, models=loaded)


def started(*instances: InstancePlan) -> NodeState:
    """A node that has carried out plan 1 at time 1."""
    state = NodeState("n", GRACE_S)
    state.on_plan(plan(1, *instances))
    assert state.step(0.0) == [Start(instance) for instance in instances]
    for instance in instances:
        state.on_registry(instance.instance_id, info(instance), 1.0)
    assert state.step(1.0) == []
    assert state.plan_version == 1
    return state


def test_only_the_instances_of_this_node_are_started() -> None:
    elsewhere = InstancePlan("other-0", "other", [spec("a")], 8 * MIB, 2 * MIB)
    state = NodeState("n", GRACE_S)
    assert state.step(0.0) == []
    state.on_plan(plan(3, instance_plan(0), elsewhere))
    assert state.step(0.0) == [Start(instance_plan(0))]
    assert state.step(0.1) == []
    assert state.plan_version == 0
    assert state.num_by_phase() == {"absent": 0, "starting": 1, "ready": 0, "stopping": 0}
    state.on_registry("n-0", info(instance_plan(0), state="starting", models={"a": "loading"}), 1.0)
    assert state.step(1.0) == []
    state.on_registry("n-0", info(instance_plan(0)), 2.0)
    assert state.step(2.0) == []
    assert state.plan_version == 3


def test_only_changed_models_are_loaded_and_unloaded() -> None:
    state = started(instance_plan(0, "ab"), instance_plan(1, "ab"))
    state.on_plan(plan(2, instance_plan(0, "bc"), instance_plan(1, "ab")))
    assert state.step(2.0) == [unload("n-0", "a"), load("n-0", spec("c"))]
    assert state.step(3.0) == [], "the registry has not shown it yet"
    state.on_registry("n-0", info(instance_plan(0), models={"a": "unloading", "b": "ready", "c": "loading"}), 3.0)
    assert state.step(20.0) == [], "both are under way"
    assert state.plan_version == 0
    state.on_registry("n-0", info(instance_plan(0, "bc")), 21.0)
    assert state.step(21.0) == []
    assert state.plan_version == 2


def test_a_request_without_effect_is_repeated() -> None:
    state = started(instance_plan(0, "a"))
    state.on_plan(plan(2, instance_plan(0, "ab")))
    assert state.step(2.0) == [load("n-0", spec("b"))]
    assert state.step(2.0 + node_state.SETTLE_S - 0.1) == []
    assert state.step(2.0 + node_state.SETTLE_S) == [load("n-0", spec("b"))]


def test_a_model_that_fails_to_load_is_a_problem_and_tried_again_ever_less_often() -> None:
    state = started(instance_plan(0, "a"))
    state.on_plan(plan(2, instance_plan(0, "ab")))
    times = []
    for tenths in range(20, 2000):
        now = tenths / 10
        if state.step(now):
            times.append(now)
        state.on_registry("n-0", info(instance_plan(0), models={"a": "ready", "b": "failed"}), now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 29 < gaps[-1] < 31
    assert state.problems() == ["n-0 could not load 'b': no such file"]
    assert state.plan_version == 0
    state.on_plan(plan(3, instance_plan(0, "a")))
    assert state.step(300.0) == [unload("n-0", "b")]
    state.on_registry("n-0", info(instance_plan(0)), 301.0)
    assert (state.step(301.0), state.problems(), state.plan_version) == ([], [], 3)


def test_what_would_fail_again_is_not_loaded_again() -> None:
    state = started(instance_plan(0, "a"))
    state.on_plan(plan(2, instance_plan(0, "ab")))
    assert state.step(2.0) == [load("n-0", spec("b"))]
    bad = LoadedModel(name="b", state="failed", error="quantised", is_final=True)
    entry = info(instance_plan(0))
    state.on_registry("n-0", msgspec.structs.replace(entry, models=[*entry.models, bad]), 3.0)
    assert all(state.step(float(now)) == [] for now in range(3, 300))
    assert state.problems() == ["n-0 could not load 'b': quantised"]
    state.on_plan(plan(3, instance_plan(0, "a")))
    assert state.step(300.0) == [unload("n-0", "b")], "added again it is loaded again"


def test_a_model_that_waits_for_its_server_is_a_problem_and_left_alone() -> None:
    state = started(instance_plan(0, "a"))
    waiting = LoadedModel(name="a", state="loading", error="it is down")
    state.on_registry("n-0", msgspec.structs.replace(info(instance_plan(0)), models=[waiting]), 3.0)
    assert all(state.step(float(now)) == [] for now in range(3, 25))
    assert state.problems() == ["n-0 waits with 'a': it is down"]


def test_a_changed_source_is_unloaded_then_loaded() -> None:
    state = started(instance_plan(0, "a"))
    changed = InstancePlan("n-0", "n", [spec("a", 2)], 8 * MIB, 2 * MIB)
    state.on_plan(plan(2, changed))
    assert state.step(2.0) == [unload("n-0", "a")]
    state.on_registry("n-0", info(changed, state="starting", models={}), 2.5)
    assert state.step(2.5) == [load("n-0", spec("a", 2))]
    state.on_registry("n-0", info(changed), 4.0)
    assert state.step(4.0) == []
    assert state.plan_version == 2


def test_pools_change_by_a_restart_of_one_instance_at_a_time() -> None:
    state = started(instance_plan(0), instance_plan(1))
    new = [instance_plan(0, pool=6), instance_plan(1, pool=6)]
    state.on_plan(plan(2, *new))
    assert state.step(2.0) == [drain("n-0")]
    state.on_registry("n-0", info(new[0], state="draining"), 3.0)
    assert state.step(10.0) == []
    state.on_registry("n-0", None, 11.0)
    assert state.on_exit("n-0", "", 11.0) is False
    assert state.step(11.0) == [Start(new[0])], "at once: it was asked to end"
    assert state.step(12.0) == [], "n-1 waits until n-0 is there"
    state.on_registry("n-0", info(new[0], state="starting", models={"a": "loading"}), 13.0)
    assert state.step(13.0) == []
    state.on_registry("n-0", info(new[0]), 14.0)
    assert state.step(14.0) == [drain("n-1")]
    state.on_exit("n-1", "", 15.0)
    assert state.step(15.0) == [Start(new[1])]


def test_an_instance_of_anothers_engine_is_restarted_for_another_model_or_other_arguments() -> None:
    hosted = msgspec.structs.replace(instance_plan(0), models=[ModelSpec("a", "/a", engine="vllm")])
    state = started(hosted)
    model = ModelSpec("a", "/a", engine="vllm", engine_args="--enforce-eager")
    state.on_plan(plan(2, msgspec.structs.replace(hosted, models=[model])))
    assert state.step(2.0) == [drain("n-0")]


def test_an_instance_on_other_devices_is_restarted() -> None:
    state = started(instance_plan(0), instance_plan(1))
    named = msgspec.structs.replace(instance_plan(0), group=DeviceGroup(("GPU-aa",)))
    state.on_plan(plan(2, named, instance_plan(1)))
    assert state.step(2.0) == [], "it was left to the node, which has the one"
    state = started(named, instance_plan(1))
    state.on_plan(plan(2, msgspec.structs.replace(named, group=DeviceGroup(("GPU-bb",))), instance_plan(1)))
    assert state.step(2.0) == [drain("n-0")]


def test_nothing_is_loaded_beside_a_pool_that_is_to_shrink() -> None:
    state = started(instance_plan(0, "ab"), instance_plan(1, "ab"))
    state.on_plan(plan(2, instance_plan(0, "bc", pool=4), instance_plan(1, "bc", pool=4)))
    assert state.step(2.0) == [drain("n-0"), unload("n-1", "a")]


def test_an_instance_that_leaves_the_plan_is_drained_and_forgotten() -> None:
    state = started(instance_plan(0), instance_plan(1))
    state.on_plan(plan(2, instance_plan(0)))
    assert state.step(2.0) == [drain("n-1")]
    assert state.step(4.0) == []
    assert state.step(5.0) == [drain("n-1")], "it does not show that it drains"
    state.on_registry("n-1", info(instance_plan(1), state="draining"), 5.5)
    assert state.plan_version == 0
    late = 2.0 + GRACE_S + node_state.STOP_MARGIN_S
    assert state.step(late - 0.1) == []
    assert state.step(late) == [Terminate("n-1", "draining took too long")]
    assert state.step(late + node_state.STOP_MARGIN_S) == [Kill("n-1")]
    assert state.step(late + 100) == []
    assert state.on_exit("n-1", "was killed by SIGKILL", late + 101) is False
    assert state.step(late + 101) == []
    assert state.plan_version == 2


def test_an_instance_that_is_wanted_again_while_it_drains_goes_on() -> None:
    state = started(instance_plan(0), instance_plan(1))
    state.on_plan(plan(2, instance_plan(0)))
    assert state.step(2.0) == [drain("n-1")]
    state.on_plan(plan(3, instance_plan(0), instance_plan(1, "ab")))
    assert state.step(3.0) == [undrain("n-1")]
    assert state.step(3.5) == [], "what the registry shows is older"
    state.on_registry("n-1", info(instance_plan(1), state="draining"), 4.0)
    assert state.step(5.0) == []
    assert state.step(3.0 + node_state.SETTLE_S) == [undrain("n-1")], "it was lost"
    state.on_registry("n-1", info(instance_plan(1)), 7.0)
    assert state.step(8.0) == []
    assert state.step(9.0) == []
    assert state.step(9.1) == [load("n-1", spec("b"))], "up again, with a model to load"
    state.on_registry("n-1", info(instance_plan(1, "ab")), 9.5)
    assert (state.step(9.5), state.plan_version) == ([], 3)


def test_a_drain_that_cannot_be_undone_ends_in_a_start() -> None:
    state = started(instance_plan(0))
    state.on_plan(plan(2))
    assert state.step(2.0) == [drain("n-0")]
    state.on_plan(plan(3, instance_plan(0)))
    assert state.step(2.1) == [undrain("n-0")]
    assert state.on_exit("n-0", "exited with code 0", 2.2) is False, "it was asked to"
    assert state.step(2.2) == [Start(instance_plan(0))]


def test_a_drain_is_not_undone_for_another_pool_nor_after_sigterm_and_may_be_asked_for_again() -> None:
    state = started(instance_plan(0), instance_plan(1))
    state.on_plan(plan(2, instance_plan(1)))
    assert state.step(2.0) == [drain("n-0")]
    state.on_registry("n-0", info(instance_plan(0), state="draining"), 2.1)
    state.on_plan(plan(3, instance_plan(0, pool=4), instance_plan(1)))
    assert state.step(2.2) == []
    state.on_plan(plan(4, instance_plan(0), instance_plan(1)))
    assert state.step(2.3) == [undrain("n-0")]
    state.on_plan(plan(5, instance_plan(1)))
    assert state.step(2.4) == [drain("n-0")]
    late = 2.4 + GRACE_S + node_state.STOP_MARGIN_S
    assert state.step(late) == [Terminate("n-0", "draining took too long")]
    state.on_plan(plan(6, instance_plan(0), instance_plan(1)))
    assert state.step(late + 1) == []


def test_a_plan_that_changes_before_the_instance_serves_ends_it() -> None:
    state = NodeState("n", GRACE_S)
    state.on_plan(plan(1, instance_plan(0)))
    state.step(0.0)
    state.on_plan(plan(2, instance_plan(0, pool=4)))
    assert state.step(0.5) == [Terminate("n-0", "the plan changed before it served")]
    state.on_exit("n-0", "exited with code 0", 0.6)
    assert state.step(0.6) == [Start(instance_plan(0, pool=4))]


def test_crashes_are_followed_by_ever_longer_waits() -> None:
    assert [back_off_s(n) for n in (1, 2, 3, 4, 7, 8, 1000)] == [0.5, 1.0, 2.0, 4.0, 30.0, 30.0, 30.0]
    state = started(instance_plan(0))
    now = 10.0
    for expected_s in (0.5, 1.0, 2.0):
        assert state.on_exit("n-0", "was killed by SIGKILL", now) is True
        assert state.step(now + expected_s - 0.01) == []
        now += expected_s
        assert state.step(now) == [Start(instance_plan(0))]
    assert state.problems() == ["n-0 was killed by SIGKILL (3 times in a row)"]
    assert state.crashes()["n-0"].is_in_loop
    state.on_registry("n-0", info(instance_plan(0)), now)
    assert state.problems() == [] and state.crashes() == {}
    state.on_exit("n-0", "was killed by SIGKILL", now + 1)
    assert state.problems() == ["n-0 was killed by SIGKILL (4 times in a row)"]
    assert not state.crashes()["n-0"].is_in_loop, "it had been ready in between"
    state.step(now + 9)
    state.on_registry("n-0", info(instance_plan(0)), now + 9)
    now += 9
    now += node_state.HEALTHY_AFTER_S
    state.on_exit("n-0", "exited with code 1", now)
    assert state.step(now + 0.5) == [Start(instance_plan(0))], "it had been healthy in between"


def test_a_silent_instance_is_restarted_unless_the_bus_is_away() -> None:
    state = started(instance_plan(0))
    state.on_registry("n-0", None, 10.0)
    assert state.step(100.0, is_connected=False) == []
    assert state.step(100.0 + node_state.UNHEARD_S - 1) == []
    (action,) = state.step(100.0 + node_state.UNHEARD_S)
    assert action == Terminate("n-0", "was not heard of for 30 s")
    assert state.on_exit("n-0", "exited with code 0", 131.0) is True
    assert state.step(131.0) == []
    assert state.step(131.5) == [Start(instance_plan(0))]
    assert state.step(131.5 + node_state.START_TIMEOUT_S - 1) == []
    (action,) = state.step(131.5 + node_state.START_TIMEOUT_S)
    assert isinstance(action, Terminate)


# ------------------------------------------------------------------------------------------- a simulated node


@dataclasses.dataclass
class SimulatedProcess:
    plan: InstancePlan
    models: dict[str, str]
    busy: dict[str, float]
    """Model -> when its loading or unloading is done."""
    up_at: float
    exits_at: float | None = None
    draining: bool = False
    is_terminated: bool = False


class SimulatedNode:
    """Carries actions out as instances do, with delays; counts them."""

    def __init__(self, *, loses_requests: bool) -> None:
        self.state = NodeState("n", GRACE_S)
        self.processes: dict[str, SimulatedProcess] = {}
        self.counts: Counter[tuple[str, type, str]] = Counter()
        self.now = 0.0
        self._loses = loses_requests

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for instance_id, process in list(self.processes.items()):
                self._advance(instance_id, process)
            for action in self.state.step(self.now):
                self._carry_out(action)
            self._check()

    def crash(self, instance_id: str) -> None:
        if self.processes.pop(instance_id, None) is not None:
            self.state.on_registry(instance_id, None, self.now)
            self.state.on_exit(instance_id, "was killed by SIGKILL", self.now)

    def _advance(self, instance_id: str, process: SimulatedProcess) -> None:
        if process.exits_at is not None and self.now >= process.exits_at:
            del self.processes[instance_id]
            self.state.on_registry(instance_id, None, self.now)
            self.state.on_exit(instance_id, "exited with code 0", self.now)
            return
        for name, done_at in list(process.busy.items()):
            if self.now >= done_at:
                del process.busy[name]
                if process.models[name] == "loading":
                    process.models[name] = "ready"
                else:
                    del process.models[name]
        if self.now >= process.up_at and self.now % 1.0 == 0.0:
            ready = "ready" if "ready" in process.models.values() else "starting"
            shown = "draining" if process.draining else ready
            self.state.on_registry(instance_id, info(process.plan, state=shown, models=dict(process.models)), self.now)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Start):
            instance_id = action.plan.instance_id
            assert instance_id not in self.processes, "one process an instance"
            models = {s.name: "loading" for s in action.plan.models}
            busy = dict.fromkeys(models, self.now + 2.0)
            self.processes[instance_id] = SimulatedProcess(action.plan, models, busy, self.now + 0.75)
            self.counts[instance_id, Start, ""] += 1
            return
        process = self.processes[action.instance_id]
        query = action.query if isinstance(action, Ask) else action
        self.counts[action.instance_id, type(query), getattr(query, "name", "")] += 1
        total = sum(self.counts.values())
        if isinstance(action, Terminate | Kill):
            process.exits_at, process.is_terminated = self.now + 0.5, True
        elif self._loses and total % 3 == 0:
            return
        elif isinstance(query, Drain) and not query.is_undone:
            process.draining = True
            process.exits_at = self.now + 4.0
        elif isinstance(query, Drain):
            if process.draining and not process.is_terminated:
                process.draining, process.exits_at = False, None
        elif isinstance(query, UnloadModel) and process.models.get(query.name) == "ready":
            process.models[query.name] = "unloading"
            process.busy[query.name] = self.now + 1.5
        elif isinstance(query, LoadModel) and query.spec.name not in process.models:
            process.models[query.spec.name] = "loading"
            process.busy[query.spec.name] = self.now + 1.5

    def _check(self) -> None:
        phases = self.state.num_by_phase()
        assert phases["starting"] + phases["ready"] + phases["stopping"] == len(self.processes)


plans_strategy = st.lists(
    st.dictionaries(
        st.integers(0, 2),
        st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.sampled_from([4, 4, 8])),
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(30), deadline=None)
@given(plans_strategy, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=12), st.booleans())
def test_any_history_ends_in_the_last_plan(
    contents: list[dict[int, tuple[set[str], int]]], events: list[tuple[int, int]], loses_requests: bool
) -> None:
    plans = [
        plan(v + 1, *(instance_plan(k, "".join(sorted(names)), pool) for k, (names, pool) in sorted(of.items())))
        for v, of in enumerate(contents)
    ]
    node = SimulatedNode(loses_requests=loses_requests)
    waits = iter(events)
    for current in plans:
        node.state.on_plan(current)
        for k, quarters in itertools.islice(waits, 3):
            node.run(quarters * 0.25)
            node.crash(f"n-{k}")
    node.run(400.0)
    assert node.state.plan_version == len(plans)
    assert node.state.problems() == []
    for wanted in plans[-1].instances:
        process = node.processes[wanted.instance_id]
        assert process.models == {s.name: "ready" for s in wanted.models}
        assert (process.plan.pool_bytes, process.plan.merged_bytes) == (wanted.pool_bytes, wanted.merged_bytes)
    assert node.processes.keys() == {wanted.instance_id for wanted in plans[-1].instances}
    node.counts.clear()
    node.run(200.0)
    assert not node.counts, "a plan that is carried out leaves nothing to do"


@settings(max_examples=examples(30), deadline=None)
@given(plans_strategy, st.lists(st.integers(0, 60), min_size=4, max_size=4), st.booleans())
def test_what_stays_in_the_plan_is_never_touched(
    contents: list[dict[int, tuple[set[str], int]]], waits: list[int], loses_requests: bool
) -> None:
    node = SimulatedNode(loses_requests=loses_requests)
    always = instance_plan(9, "ab")
    for version, (of, quarters) in enumerate(zip(contents, waits, strict=False)):
        others = [instance_plan(k, "".join(sorted(names)), pool) for k, (names, pool) in sorted(of.items())]
        # Instance 8 keeps its pool and model "a"; others come and go around it.
        partly = instance_plan(8, "a" + "".join(sorted(of.get(0, (set(), 0))[0] - {"a"})))
        node.state.on_plan(plan(version + 1, *others, partly, always))
        node.run(quarters * 0.25 + 0.25)
    node.run(300.0)
    touched = {key: n for key, n in node.counts.items() if key[0] == "n-9"}
    assert touched == {("n-9", Start, ""): 1}
    assert node.counts["n-8", Start, ""] == 1
    assert node.counts["n-8", Drain, ""] == node.counts["n-8", Terminate, ""] == 0
    assert node.counts["n-8", UnloadModel, "a"] == 0


def test_ready_is_who_serves_the_models_that_are_planned() -> None:
    state = NodeState("n", GRACE_S)
    state.step(0.0)
    assert state.unready(60.0) == ["there is no placement plan yet"]
    state.on_plan(plan(1))
    assert state.unready(node_state.PLANNED_AFTER_S - 0.1) == ["nothing is planned here yet"]
    assert state.unready(node_state.PLANNED_AFTER_S) == [], "nothing is planned here"
    state.on_plan(plan(2, instance_plan(0, "ab"), instance_plan(1, "a")))
    assert state.unready(10.0) == ["n-0 is absent", "n-1 is absent"]
    state.step(10.0)
    state.on_registry("n-0", info(instance_plan(0), state="starting", models={"a": "loading", "b": "loading"}), 11.0)
    state.on_registry("n-1", info(instance_plan(1)), 11.0)
    assert state.unready(11.0) == ["n-0 is starting"]
    state.on_registry("n-0", info(instance_plan(0), models={"a": "ready", "b": "failed"}), 12.0)
    assert state.unready(12.0) == ["n-0 does not serve b"]
    failed = LoadedModel(name="b", state="failed", error="quantised", is_final=True)
    served = info(instance_plan(0))
    state.on_registry("n-0", msgspec.structs.replace(served, models=[*served.models, failed]), 12.0)
    assert state.unready(12.0) == [], "waiting does not help"
    state.on_registry("n-0", info(instance_plan(0, "ab")), 13.0)
    assert state.unready(13.0) == []
    state.on_plan(plan(3, instance_plan(0, "ab"), InstancePlan("n-1", "n", [spec("a", 2)], 8 * MIB, 2 * MIB)))
    assert state.unready(14.0) == ["n-1 does not serve a"], "the model's former source"


def test_one_that_crashes_in_a_loop_is_not_ready_until_it_stays() -> None:
    state, now = started(instance_plan(0)), 100.0
    for num_crashes in (1, 2):
        state.on_exit("n-0", "was killed by SIGKILL", now)
        assert state.unready(now) == ["n-0 is absent"]
        now += back_off_s(num_crashes)
        state.step(now)
        state.on_registry("n-0", info(instance_plan(0)), now)
        if num_crashes == 1:
            assert state.unready(now) == [], "once is no loop"
    assert state.unready(now) == ["n-0 was killed by SIGKILL (2 times in a row) and has just come back"]
    assert state.unready(now + node_state.HEALTHY_AFTER_S) == []


def test_an_instance_starts_when_no_other_has_its_devices_any_more() -> None:
    one, two = instance_plan(0), instance_plan(1)
    both = msgspec.structs.replace(instance_plan(0, "b"), group=DeviceGroup(("x", "y")))
    state = started(one, two)
    state.on_plan(plan(2, both))
    assert state.step(2.0) == [drain("n-0"), drain("n-1")]
    for k in (0, 1):
        state.on_registry(f"n-{k}", None, 3.0)
    assert state.on_exit("n-0", "", 3.0) is False
    assert state.step(3.0) == [], "n-1 still runs on the second device"
    state.on_exit("n-1", "", 4.0)
    assert state.step(4.0) == [Start(both)]
    state.on_plan(plan(3, one, two))
    assert [type(action) for action in state.step(5.0)] == [Terminate]
    assert num_planned(plan(4, both), "n") == 2


def test_models_on_demand_are_put_away_woken_and_forgotten() -> None:
    a, b, asleep = spec("a"), spec("b"), {"b": "idle"}
    state = started(instance_plan(0, "ab"))
    put_away = msgspec.structs.replace(plan(2, instance_plan(0, "a")), asleep=asleep)
    state.on_plan(put_away)
    assert state.step(2.0) == [Ask("n-0", UnloadModel("b", GRACE_S, keeps_weights=True))]
    state.on_registry("n-0", info(instance_plan(0), models={"a": "ready", "b": "host"}), 5.0)
    assert state.step(5.0) == [] and state.plan_version == 2 and state.unready(5.0) == []
    state.on_plan(plan(3, instance_plan(0, "ab")))
    assert state.step(6.0) == [load("n-0", b)] and state.plan_version == 0
    state.on_registry("n-0", info(instance_plan(0, "ab")), 7.0)
    assert state.step(7.0) == [] and state.plan_version == 3
    state.on_plan(put_away)
    state.step(8.0)
    state.on_registry("n-0", info(instance_plan(0), models={"a": "ready", "b": "host"}), 9.0)
    state.on_plan(plan(5, instance_plan(0, "a")))
    assert state.step(12.0) == [unload("n-0", "b")], "it is configured no more"
    assert a in state._desired["n-0"].models


def test_an_instance_without_models_carries_its_plan_out() -> None:
    empty = instance_plan(0, "")
    state = NodeState("n", GRACE_S)
    state.on_plan(msgspec.structs.replace(plan(1, empty), asleep={"a": "idle"}))
    assert state.step(0.0) == [Start(empty)]
    state.on_registry("n-0", info(empty, state="starting"), 1.0)
    assert state.step(1.0) == [] and state.plan_version == 1 and state.unready(10.0) == []


def test_what_is_put_away_leaves_before_another_is_loaded_in_its_place() -> None:
    state = started(instance_plan(0, "ac"))
    state.on_plan(msgspec.structs.replace(plan(2, instance_plan(0, "bc")), asleep={"a": "idle"}))
    put_away = Ask("n-0", UnloadModel("a", GRACE_S, keeps_weights=True))
    assert state.step(2.0) == [put_away]
    state.on_registry("n-0", info(instance_plan(0), models={"a": "unloading", "c": "ready"}), 3.0)
    assert state.step(10.0) == []
    state.on_registry("n-0", info(instance_plan(0), models={"a": "host", "c": "ready"}), 11.0)
    assert state.step(11.0) == [load("n-0", spec("b"))]
