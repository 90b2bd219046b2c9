"""Replacements by the placement service, on a real NATS server. Node agents decide as real ones do; their instances, the
scheduler and the search are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.placement import active as active_module
from services.placement import fleet as fleet_module
from services.placement import replacing as replacing_module
from shared.bus.interface import ServiceError
from shared.messages.admin import ChangePlan, GetReplacement, ReplacementState
from shared.messages.catalogue import (
    PLACEMENT_CHANGE_PLAN,
    PLACEMENT_REPLACEMENT,
    PLACEMENT_REQUESTS,
    REPLACEMENT,
    SCHEDULER_DEMAND,
)
from shared.messages.cluster import (
    DemandReport,
    DeviceGroup,
    InstancePlan,
    ModelDemand,
    ModelSpec,
    PlacementPlan,
    PlanChange,
)
from shared.messages.requests import ErrorCode
from shared.messages.traffic import Outcome, RequestRow, RequestRows, request_number
from shared.placement.carry_out import CarryOutSettings
from shared.placement.plan import Group, Horizon, ModelPrediction, Plan, Prediction, Proposal, Trial
from shared.placement.planner import Planner
from shared.placement.problem import Problem
from shared.placement.replacement import Replacement
from shared.placement.rollout import why_no_larger_pools
from shared.runtime.settings import BusSettings, SettingsError
from shared.runtime.telemetry import start_telemetry
from tests.placement.node_agent import ScriptedNode
from tests.placement.test_scaling import drain, scale
from tests.placement.test_service import Cluster, cluster, placement, sources, until, where

__all__ = ["cluster", "sources"]

APART = Plan((Group("n", (0,), ("a",)), Group("n", (1,), ("b",))))
TOGETHER = Plan((Group("n", (0, 1), ("a", "b", "c")),))


def predicted(attainment: float, num_requests: int = 30) -> Prediction:
    model = ModelPrediction(
        num_requests=num_requests, attainment=attainment, normalised_latency=2.0, mean_latency_s=1.0, p99_latency_s=2.0
    )
    return Prediction(attainment=attainment, normalised_latency=2.0, models={"a": model})


def finds(plan: Plan, problems: list[Problem] | None = None) -> Callable[[Problem], Awaitable[Proposal]]:
    async def search(problem: Problem) -> Proposal:
        if problems is not None:
            problems.append(problem)
        return Proposal(plan=plan, prediction=predicted(1.0), incumbent=predicted(0.5), rejected=())

    return search


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_module, "TICK_S", 0.1)
    monkeypatch.setattr(active_module, "DEBOUNCE_S", 0.02)
    monkeypatch.setattr(replacing_module, "CarryOutSettings", lambda: CarryOutSettings(step_s=5.0, settle_s=0.3))


@pytest.fixture
async def node(cluster: Cluster) -> AsyncIterator[ScriptedNode]:
    node = ScriptedNode(cluster.bus, "n")
    await node.start()
    yield node
    await node.stop()


async def tell_requests(cluster: Cluster, num: int = 30, age_s: float = 15.0, latency_s: float = 7.5) -> None:
    """Alone they take 0.1 s, and may take half a second."""
    rows = [
        RequestRow(
            request_number(f"{latency_s} {i}"), i % 2, True, age_s, 100, Outcome.FINISHED, 20, latency_s, 0.1, 0.1
        )
        for i in range(num)
    ]
    await cluster.bus.request(PLACEMENT_REQUESTS, RequestRows("scheduler-1", ["a", "b"], rows), timeout_s=5.0)


async def ask(cluster: Cluster, action: str) -> ReplacementState:
    return await cluster.bus.request(PLACEMENT_CHANGE_PLAN, ChangePlan(action), timeout_s=5.0)  # type: ignore[arg-type]


async def show(cluster: Cluster) -> ReplacementState:
    return await cluster.bus.request(PLACEMENT_REPLACEMENT, GetReplacement(), timeout_s=5.0)


async def ended(cluster: Cluster, number: int = 1) -> PlanChange:
    def change() -> PlanChange | None:
        found = cluster.plans[-1].change
        return found if found is not None and found.number == number and found.is_over else None

    found: PlanChange = await until(change)
    return found


async def served(cluster: Cluster, node: ScriptedNode, expected: dict[str, set[str]]) -> None:
    await until(lambda: node.models == expected and where(cluster.plans[-1]) == expected)


EVERYWHERE = {"n-0": {"a", "b"}, "n-1": {"a", "b"}}


async def come_apart(cluster: Cluster, node: ScriptedNode) -> None:
    """From everywhere to `APART`, which the search is to find."""
    await served(cluster, node, EVERYWHERE)
    await tell_requests(cluster)
    await ask(cluster, "apply")
    assert (await ended(cluster)).stage == "carried_out"
    await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})


async def test_what_is_applied_stays_and_can_be_rolled_back(
    nats_settings: BusSettings,
    cluster: Cluster,
    node: ScriptedNode,
    sources: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems: list[Problem] = []
    models = {name: sources[name] for name in "ab"}
    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    async with placement(nats_settings, models, search=finds(APART, problems), telemetry=telemetry):
        await served(cluster, node, EVERYWHERE)
        with pytest.raises(ServiceError, match="no replacement was carried out"):
            await ask(cluster, "roll_back")
        await ask(cluster, "apply")
        await until_problem(cluster, "no request came")
        await tell_requests(cluster)
        assert (await ask(cluster, "apply")).searching
        change = await ended(cluster)
        assert change.stage == "carried_out" and change.steps and not change.interrupted, change
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})
        assert not node.ever_missing
        (problem,) = problems
        assert problem.incumbent == Plan((Group("n", (0,), ("a", "b")), Group("n", (1,), ("a", "b"))))
        assert (problem.traffic.num_requests, problem.nodes[0].num_devices) == (30, 2)
        assert {key for model in problem.models for key in model.costs} == {("cpu", 1), ("cpu", 2)}
        state = await show(cluster)
        assert state.predicted == predicted(1.0) and state.proposal is not None and state.proposal.is_worth
        value = telemetry.registry.get_sample_value
        assert value("tideway_placement_replacements_total", {"end": "carried_out"}) == 1
        assert value("tideway_placement_searches_total", {"outcome": "better"}) == 1
        assert value("tideway_placement_searches_total", {"outcome": "failed"}) == 1
        # A new model goes on one group, and disturbs no other.
        await cluster.add(ModelSpec("c", sources["c"]))
        await until(lambda: sum("c" in names for names in node.models.values()) == 1)
        assert cluster.plans[-1].is_chosen
    async with placement(nats_settings, models, name="placement-2", search=finds(APART)) as service:
        await until(lambda: service.is_active)
        version = cluster.plans[-1].version
        await asyncio.sleep(0.5)
        assert cluster.plans[-1].version == version, "a restart changes nothing"
        assert (await show(cluster)).predicted == predicted(1.0), "what was predicted is remembered"
        await cluster.remove("c")
        await cluster.remove("b")
        await cluster.add(ModelSpec("b", sources["c"]))
        with monkeypatch.context() as patched:
            patched.setattr(Planner, "fits", lambda *_: False)
            with pytest.raises(ServiceError, match="n-0 has no room for a, b at once"):
                await ask(cluster, "roll_back")
        await ask(cluster, "roll_back")
        change = await ended(cluster, 2)
        assert change.stage == "carried_out" and not cluster.plans[-1].is_chosen
        await served(cluster, node, EVERYWHERE)
        defined = {(spec.name, spec.source) for place in cluster.plans[-1].instances for spec in place.models}
        assert defined == {("a", sources["a"]), ("b", sources["c"])}, "as it is configured now"
        assert not node.ever_missing - {"b", "c"}


async def until_problem(cluster: Cluster, text: str) -> None:
    for _ in range(100):
        if text in (await show(cluster)).problem:
            return
        await asyncio.sleep(0.05)
    raise AssertionError((await show(cluster)).problem)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Prediction]:
    """What was measured, at each look into an interval."""
    found: list[Prediction] = []
    watch = Replacement.watch

    def look(core: Replacement, now_s: float, measured: Prediction) -> None:
        found.append(measured)
        watch(core, now_s, measured)

    monkeypatch.setattr(Replacement, "watch", look)
    return found


async def test_an_interval_ends_early_where_attainment_falls(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str], looks: list[Prediction]
) -> None:
    is_well = True

    async def search(problem: Problem) -> Proposal:
        assert problem.incumbent is not None
        gains = Horizon(
            seconds=60.0, num_requests=60, stay_attainment=0.5, change_attainment=0.9, free_attainment=1.0,
            attainment_error=0.05, stay_latency=2.0, change_latency=2.0, free_latency=2.0, latency_error=0.1,
        )  # fmt: skip
        return Proposal(
            plan=problem.incumbent if is_well else APART, prediction=predicted(1.0), rejected=(),
            incumbent=predicted(1.0 if is_well else 0.5),
            # Searched with the traffic of twice the time that the change takes.
            trial=Trial(
                change_s=30.0, lost_device_s=1.0, moved_bytes=0, interrupted=[], horizons=[gains] * 2, busier_gain=0.5
            ),
        )  # fmt: skip

    models = {name: sources[name] for name in "ab"}
    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    value = telemetry.registry.get_sample_value
    async with placement(
        nats_settings, models, search=search, telemetry=telemetry, replacement="auto", replacement_least_s=0.3,
        replacement_interval_s=1000.0,
    ):  # fmt: skip
        await served(cluster, node, EVERYWHERE)
        while (await show(cluster)).searching:  # as the node came
            await asyncio.sleep(0.05)
        await tell_requests(cluster, 60, age_s=0.2, latency_s=0.1)
        await ask(cluster, "search")
        await until(lambda: value("tideway_placement_searches_total", {"outcome": "kept"}) == 1)
        looks.clear()
        await until(lambda: len(looks) == 3)
        assert {one.models["a"].attainment for one in looks} == {1.0}
        state = await show(cluster)
        assert state.interval_s == 1000.0 and not state.searching, "who serves as predicted is left alone"
        is_well = False
        await tell_requests(cluster, 60, age_s=1.0, latency_s=1.0)
        change = await ended(cluster)
        assert change.stage == "carried_out" and "100.0% was predicted" in change.reason
        assert change.reason.startswith("attainment fell to ")
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})
        assert (await show(cluster)).interval_s == 0.3, "the next intervals are short"
        assert value("tideway_placement_verdicts_total", {"cause": "pays"}) == 1


async def test_devices_become_one_group_and_an_interruption_is_told(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, search=finds(TOGETHER), replacement="auto"):
        await served(cluster, node, EVERYWHERE)
        await tell_requests(cluster)
        await cluster.add(ModelSpec("c", sources["c"]))
        change = await ended(cluster)
        assert change.reason.startswith("model c was added") and change.stage == "carried_out"
        assert change.interrupted == ["a", "b", "c"] and "memory has no other room" in " ".join(change.steps)
        await served(cluster, node, {"n-0": {"a", "b", "c"}})
        assert cluster.plans[-1].instances[0].group.num_ranks == 2
        await ask(cluster, "search")
        again = await ask_until_kept(cluster)
        assert "is the one that runs" in again.proposal.verdict if again.proposal is not None else False
        assert not (await ask(cluster, "apply")).searching, "that is known already"
        assert cluster.plans[-1].change is not None and cluster.plans[-1].change.number == 1


async def test_a_plan_that_leaves_models_out_is_not_carried_out(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, search=finds(Plan((Group("n", (0,), ("a",)),)))):
        await served(cluster, node, EVERYWHERE)
        await tell_requests(cluster)
        await ask(cluster, "apply")
        await until_problem(cluster, "b would be on no group")
        with pytest.raises(ServiceError, match="b would be on no group"):
            await ask(cluster, "apply")
        assert cluster.plans[-1].change is None and not node.ever_missing


async def set_plan(cluster: Cluster, *groups: tuple[tuple[int, ...], str]) -> ReplacementState:
    """Sets a plan of (devices, models)."""
    change = ChangePlan("set", tuple(Group("n", devices, tuple(models)) for devices, models in groups))
    return await cluster.bus.request(PLACEMENT_CHANGE_PLAN, change, timeout_s=5.0)


async def test_a_plan_that_an_operator_sets_is_carried_out_without_any_traffic(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, replacement="off"):
        await served(cluster, node, EVERYWHERE)
        await set_plan(cluster, ((1,), "b"), ((0,), "aba"))
        change = await ended(cluster)
        assert (change.stage, change.reason) == ("carried_out", "an operator set the plan")
        await served(cluster, node, {"n-0": {"a", "b"}, "n-1": {"b"}})
        untouched = cluster.plans[-1].instances[0]
        await set_plan(cluster, ((0,), "ab"), ((1,), "b"))
        assert cluster.plans[-1].change == change, "it runs already"
        await cluster.add(ModelSpec("c", sources["c"]))
        await until(lambda: sum("c" in names for names in node.models.values()) == 1)
        with pytest.raises(ServiceError, match="c would be on no group: add it to one, or unload it first"):
            await set_plan(cluster, ((0,), "ab"), ((1,), "b"))
        await set_plan(cluster, ((0, 1), "abc"))
        assert (await ended(cluster, 2)).stage == "carried_out"
        await served(cluster, node, {"n-0": {"a", "b", "c"}})
        await ask(cluster, "roll_back")
        assert (await ended(cluster, 3)).stage == "carried_out"
        assert cluster.plans[-1].instances[0].pool_bytes == untouched.pool_bytes


async def test_a_plan_that_runs_already_is_kept_once_it_is_set(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    async with placement(nats_settings, {"a": sources["a"]}):
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"a"}})
        await set_plan(cluster, ((0,), "a"), ((1,), "a"))
        assert (await ended(cluster)).stage == "carried_out" and cluster.plans[-1].is_chosen
        assert not node.ever_missing
        await cluster.add(ModelSpec("b", sources["b"]))
        await until(lambda: sum("b" in names for names in node.models.values()) == 1)
        await asyncio.sleep(0.5)
        assert sum("b" in names for names in node.models.values()) == 1, "a new model is not put everywhere"


async def test_a_plan_that_is_set_ends_the_search_that_is_under_way(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    ended_early = asyncio.Event()

    async def endless(problem: Problem) -> Proposal:
        try:
            await asyncio.Event().wait()
        finally:
            ended_early.set()
        raise AssertionError

    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    async with placement(nats_settings, {name: sources[name] for name in "ab"}, search=endless, telemetry=telemetry):
        await served(cluster, node, EVERYWHERE)
        await tell_requests(cluster)
        assert (await ask(cluster, "search")).searching
        with pytest.raises(ServiceError, match="b would be on no group"):
            await set_plan(cluster, ((0,), "a"))
        assert (await show(cluster)).searching and not ended_early.is_set()
        await set_plan(cluster, ((0,), "a"), ((1,), "b"))
        await asyncio.wait_for(ended_early.wait(), 5)
        assert (await ended(cluster)).stage == "carried_out" and not (await show(cluster)).searching
        superseded = {"outcome": "superseded"}
        assert telemetry.registry.get_sample_value("tideway_placement_searches_total", superseded) == 1


async def test_a_chosen_plan_returns_with_the_instance_that_was_drained(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    apart = {"n-0": {"a"}, "n-1": {"b"}}
    async with placement(nats_settings, {name: sources[name] for name in "ab"}):
        await served(cluster, node, EVERYWHERE)
        await set_plan(cluster, ((0,), "a"), ((1,), "b"))
        assert (await ended(cluster)).stage == "carried_out"
        await served(cluster, node, apart)
        for number in (2, 3):  # once more: what was home stays so
            await drain(cluster, "n-0")
            await served(cluster, node, {"n-1": {"a", "b"} if number == 2 else {"a", "b", "c"}})
            if number == 2:
                await cluster.add(ModelSpec("c", sources["c"]))
            await until(lambda: "c" in node.models["n-1"])
            await drain(cluster, "n-0", undo=True)
            change = await ended(cluster, number)
            assert (change.stage, change.reason, change.interrupted) == ("carried_out", "n-0 came back", [])
            await served(cluster, node, apart | {"n-1": {"b", "c"}})
            assert not cluster.plans[-1].home
            with pytest.raises(ServiceError, match="n-0 came back"):
                await ask(cluster, "roll_back")
        await drain(cluster, "n-0")
        await served(cluster, node, {"n-1": {"a", "b", "c"}})
        await set_plan(cluster, ((1,), "abc"))
        await ended(cluster, 4)
        await drain(cluster, "n-0", undo=True)
        await asyncio.sleep(0.5)
        await served(cluster, node, {"n-1": {"a", "b", "c"}})
        assert cluster.plans[-1].change is not None and cluster.plans[-1].change.number == 4, "that plan has no n-0"


async def test_who_went_to_a_free_device_leaves_it_when_the_instance_is_back(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    node.num_devices = 3
    async with placement(nats_settings, {name: sources[name] for name in "ab"}):
        await until(lambda: len(cluster.plans[-1].instances) == 3 if cluster.plans else False)
        await set_plan(cluster, ((0,), "a"), ((1,), "b"))
        assert (await ended(cluster)).stage == "carried_out"
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})
        await drain(cluster, "n-0")
        await served(cluster, node, {"n-1": {"b"}, "n-2": {"a"}})
        await drain(cluster, "n-0", undo=True)
        change = await ended(cluster, 2)
        assert change.stage == "carried_out" and not change.interrupted
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})


async def test_two_instances_of_a_chosen_plan_come_back_one_after_the_other(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    node.num_devices = 3
    async with placement(nats_settings, {name: sources[name] for name in "abc"}):
        await until(lambda: len(cluster.plans[-1].instances) == 3 if cluster.plans else False)
        await set_plan(cluster, ((0,), "a"), ((1,), "b"), ((2,), "c"))
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}, "n-2": {"c"}})
        assert (await ended(cluster)).stage == "carried_out"
        await drain(cluster, "n-0")
        await drain(cluster, "n-1")
        await served(cluster, node, {"n-2": {"a", "b", "c"}})
        await drain(cluster, "n-1", undo=True)
        await served(cluster, node, {"n-1": {"b"}, "n-2": {"a", "c"}})
        assert (await ended(cluster, 2)).stage == "carried_out"
        await drain(cluster, "n-0", undo=True)
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}, "n-2": {"c"}})
        assert (await ended(cluster, 3)).stage == "carried_out" and not cluster.plans[-1].home


async def test_a_plan_that_does_not_fit_is_not_set(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    node.memory_bytes = 20 << 20
    async with placement(nats_settings, {"a": sources["a"]}):
        await until(lambda: cluster.plans and not cluster.plans[-1].instances)
        with pytest.raises(
            ServiceError, match=r"'a' does not fit on n-0: 'a' needs \d+ MiB \(.*free of 10 MiB"
        ) as refused:
            await set_plan(cluster, ((0,), "a"))
        assert refused.value.info.param == "groups"


async def test_no_search_is_made_where_instances_are_pipelines(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    node.num_devices, node.groups = 1, (DeviceGroup(("cpu", "cpu"), 2),)
    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    async with placement(nats_settings, {"a": sources["a"]}, search=finds(APART), telemetry=telemetry):
        await served(cluster, node, {"n-0": {"a"}})
        await tell_requests(cluster)
        await ask(cluster, "search")
        await until_problem(cluster, "instances of n are pipelines (TIDEWAY_PIPELINE_PARALLEL)")
        value = telemetry.registry.get_sample_value
        await until(lambda: value("tideway_placement_verdicts_total", {"cause": "pipelines"}) == 1)


async def test_what_an_operator_does_during_a_search_is_not_undone_by_what_it_finds(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    plan, may_end = APART, asyncio.Event()

    async def search(problem: Problem) -> Proposal:
        await may_end.wait()
        return await finds(plan)(problem)

    async def carried_out(number: int) -> None:
        may_end.set()
        await ask(cluster, "apply")
        assert (await ended(cluster, number)).stage == "carried_out"
        await served(cluster, node, {group.instance_id: set(group.models) for group in plan.groups})

    async def begin() -> None:
        may_end.clear()
        await ask(cluster, "apply")

    async def refused() -> None:
        before = cluster.plans[-1]
        may_end.set()
        await until_problem(cluster, "models, nodes or drained instances changed")
        assert cluster.plans[-1] == before

    async with placement(nats_settings, {name: sources[name] for name in "ab"}, search=search):
        await served(cluster, node, EVERYWHERE)
        await tell_requests(cluster)
        await carried_out(1)
        plan = Plan((Group("n", (0,), ("a", "b")),))
        await begin()
        await cluster.remove("b")
        await cluster.add(ModelSpec("b", sources["c"]))
        await served(cluster, node, {"n-0": {"a"}, "n-1": {"b"}})
        await refused()
        await carried_out(2)
        plan = APART
        await begin()
        await drain(cluster, "n-1")
        await refused()


async def ask_until_kept(cluster: Cluster) -> ReplacementState:
    for _ in range(100):
        state = await show(cluster)
        if state.proposal is not None and not state.proposal.is_worth:
            return state
        await asyncio.sleep(0.05)
    raise AssertionError(await show(cluster))


async def test_a_model_that_cannot_be_loaded_rolls_back_with_its_reason(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    plans: list[Plan] = []

    async def search(problem: Problem) -> Proposal:
        return await finds(plans[0])(problem)

    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    async with placement(nats_settings, {"a": sources["a"]}, search=search, telemetry=telemetry):
        await until(lambda: node.models == {"n-0": {"a"}, "n-1": {"a"}})
        await cluster.add(ModelSpec("b", sources["b"], replicas=1))
        await until(lambda: any("b" in names for names in node.models.values()))
        before = where(cluster.plans[-1])
        here, there = (0, 1) if "b" in before["n-0"] else (1, 0)
        plans.append(Plan(tuple(sorted([Group("n", (here,), ("a",)), Group("n", (there,), ("b",))]))))
        node.failing = {"b"}
        await tell_requests(cluster)
        await ask(cluster, "apply")
        change = await ended(cluster)
        assert (change.stage, change.cause) == ("rolled_back", "instance"), change
        assert change.failure == f"n-{there} could not load 'b': no such tensor"
        assert where(cluster.plans[-1]) == before and not cluster.plans[-1].is_chosen
        assert not node.ever_missing
        value = telemetry.registry.get_sample_value
        # It is counted after the change has been published.
    await until(lambda: value("tideway_placement_roll_backs_total", {"cause": "instance"}) == 1)


async def test_a_model_that_had_failed_before_holds_no_change_up(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    plans: list[Plan] = []

    async def search(problem: Problem) -> Proposal:
        return await finds(plans[0])(problem)

    node.failing = {"c"}
    async with placement(nats_settings, {name: sources[name] for name in "ab"}, search=search):
        await served(cluster, node, EVERYWHERE)
        await cluster.add(ModelSpec("c", sources["c"], replicas=1))
        await until(lambda: node.failed)
        (failed,) = node.failed
        here = int(failed.removeprefix("n-"))
        plans.append(Plan(tuple(sorted([Group("n", (here,), ("a", "c")), Group("n", (1 - here,), ("b",))]))))
        await tell_requests(cluster)
        await ask(cluster, "apply")
        change = await ended(cluster)
        assert (change.stage, change.failure, change.unready) == ("carried_out", "", [f"c on {failed}"])
        await until(lambda: node.models == {failed: {"a"}, f"n-{1 - here}": {"b"}})
        assert not node.ever_missing


async def test_a_node_that_is_lost_takes_no_model_with_it_that_has_come_elsewhere(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fleet_module, "GRACE_S", 0.3)
    plans = [Plan((Group("m", (0,), ("b",)), Group("n", (0,), ("a",))))]
    plans.append(Plan((Group("m", (0,), ("a",)), Group("n", (0,), ("b",)))))

    async def search(problem: Problem) -> Proposal:
        return await finds(plans.pop(0))(problem)

    other = ScriptedNode(cluster.bus, "m")
    await other.start()
    async with placement(nats_settings, {name: sources[name] for name in "ab"}, search=search):
        await until(lambda: node.models | other.models == EVERYWHERE | {"m-0": {"a", "b"}, "m-1": {"a", "b"}})
        await tell_requests(cluster)
        await ask(cluster, "apply")
        assert (await ended(cluster)).stage == "carried_out"
        other.is_loading = False
        await ask(cluster, "apply")
        await until(lambda: node.models == {"n-0": {"a", "b"}})
        seen = len(cluster.plans)
        await other.stop()
        change = await ended(cluster, 2)
        assert (change.stage, change.cause, change.failure) == ("rolled_back", "node_gone", "m is gone")
        await served(cluster, node, {"n-0": {"a", "b"}})
        assert all(where(plan)["n-0"] == {"a", "b"} for plan in cluster.plans[seen:])


async def test_a_proposal_too_large_to_be_stored_is_known_while_it_leads(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], node: ScriptedNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(replacing_module, "STORED_SHARE", 0.0)
    bucket = await cluster.bus.key_value(REPLACEMENT)
    async with placement(nats_settings, {name: sources[name] for name in "ab"}, search=finds(APART)):
        await come_apart(cluster, node)
        assert (await show(cluster)).proposal is not None
        for _ in range(100):
            entry = await bucket.get("current")
            if entry is not None and entry.value.predicted == predicted(1.0):
                break
            await asyncio.sleep(0.05)
        assert entry is not None and entry.value.predicted == predicted(1.0) and entry.value.proposal is None


async def test_a_model_that_is_added_meanwhile_is_told_to_wait_and_is_placed_afterwards(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, search=finds(APART)):
        await come_apart(cluster, node)
        node.is_loading = False
        await ask(cluster, "roll_back")
        await until(lambda: cluster.plans[-1].change.stage == "change" and cluster.plans[-1].change.steps)
        await cluster.add(ModelSpec("on-demand", sources["c"], on_demand=True))
        await cluster.add(ModelSpec("c", sources["c"]))
        await until(lambda: cluster.plans[-1].unplaced == {"c": "it is placed when the replacement is over"})
        node.is_loading = True
        assert (await ended(cluster, 2)).stage == "carried_out"
        await served(cluster, node, {"n-0": {"a", "b", "c"}, "n-1": {"a", "b", "c"}})
        assert not cluster.plans[-1].unplaced


async def test_a_change_that_fetches_weights_gives_way_to_a_model_that_requests_wait_for(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, search=finds(APART)):
        await come_apart(cluster, node)
        await cluster.add(ModelSpec("c", sources["c"], on_demand=True))
        node.is_fetching = False
        await ask(cluster, "roll_back")
        await until(lambda: cluster.plans[-1].change.stage == "fetch")
        for _ in range(50):
            demand = ModelDemand(model="c", num_online=1, waited_s=0.1)
            cluster.bus.publish(SCHEDULER_DEMAND, DemandReport("scheduler", [demand]))
            await asyncio.sleep(0.1)
            if any("c" in names for names in where(cluster.plans[-1]).values()):
                break
        change = cluster.plans[-1].change
        assert change is not None and (change.stage, change.cause) == ("rolled_back", "superseded")
        assert any("c" in names for names in where(cluster.plans[-1]).values())


async def test_weights_that_cannot_be_fetched_change_nothing(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}
    async with placement(nats_settings, models, search=finds(APART)):
        await come_apart(cluster, node)
        node.fetch_problems = {sources["b"]: "the disk is full"}
        await ask(cluster, "roll_back")
        change = await ended(cluster, 2)
        assert (change.stage, change.cause) == ("rolled_back", "fetch") and "the disk is full" in change.failure
        assert not change.steps and where(cluster.plans[-1]) == {"n-0": {"a"}, "n-1": {"b"}}
        assert cluster.plans[-1].is_chosen and not cluster.plans[-1].fetch


async def test_the_next_leader_goes_on_with_a_change_and_an_operator_may_stop_it(
    nats_settings: BusSettings, cluster: Cluster, node: ScriptedNode, sources: dict[str, str]
) -> None:
    models = {name: sources[name] for name in "ab"}

    def stage() -> str:
        change = cluster.plans[-1].change
        return change.stage if change is not None else ""

    async with placement(nats_settings, models, search=finds(APART)) as first:
        await come_apart(cluster, node)
        node.is_fetching = False
        await ask(cluster, "roll_back")
        await until(lambda: stage() == "fetch")
        with pytest.raises(ServiceError) as caught:
            await ask(cluster, "search")
        assert caught.value.code is ErrorCode.CONFLICT
        await scale(cluster, 2)
        assert stage() == "fetch", "there are two already: nothing follows from it"
        assert first.is_active
    node.is_fetching = True
    async with placement(nats_settings, models, name="placement-2", search=finds(APART)):
        change = await ended(cluster, 2)
        assert (change.stage, change.undoes) == ("carried_out", 1)
        await served(cluster, node, EVERYWHERE)
        node.is_fetching = False
        await tell_requests(cluster, 40)
        await ask(cluster, "apply")
        # Both are everywhere already: nothing is fetched, so the change is under way at once.
        change = await ended(cluster, 3)
        assert change.stage == "carried_out"
        await ask(cluster, "roll_back")
        await until(lambda: stage() == "fetch")
        await ask(cluster, "roll_back")
        change = await ended(cluster, 4)
        assert (change.stage, change.cause) == ("rolled_back", "operator")
        assert where(cluster.plans[-1]) == {"n-0": {"a"}, "n-1": {"b"}}


async def test_settings_are_checked(nats_settings: BusSettings) -> None:
    for wrong in ({"replacement": "always"}, {"replacement_least_s": 9.0, "replacement_most_s": 1.0}):
        with pytest.raises(SettingsError, match="TIDEWAY_REPLACEMENT"):
            async with placement(nats_settings, **wrong):
                pass


def test_larger_pools_are_not_asked_for_where_the_plan_has_them_or_they_were_rolled_back() -> None:
    has, larger = (InstancePlan("node-0-0", "node-0", [], pool_bytes, 1) for pool_bytes in (10, 20))

    def why_not(stage: str, tried: InstancePlan) -> str:
        change = PlanChange(
            number=1, reason="", stage=stage, begun_s=0.0, stage_s=0.0, step_s=0.0, before=[has], target=[tried],
            failure="no memory",
        )  # fmt: skip
        plan = PlacementPlan(version=2, instances=[has], change=change)
        return why_no_larger_pools(plan, [larger])

    assert why_not("carried_out", has) == why_not("rolled_back", has) == ""
    assert "no memory" in why_not("rolled_back", larger)
    assert why_no_larger_pools(PlacementPlan(version=1, instances=[has]), [has])
