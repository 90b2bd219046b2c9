"""The scaler on the scheduler's view of the cluster."""

from __future__ import annotations

import math

import pytest

from shared.messages.admin import DrainInstance, ScaleInstances
from shared.messages.catalogue import PLACEMENT_DRAIN_INSTANCE, PLACEMENT_SCALE_INSTANCES
from shared.messages.cluster import (
    InstanceInfo,
    LoadedModel,
    LoadReport,
    ModelLoad,
)
from shared.runtime.settings import SchedulerSettings, SettingsError
from shared.scheduling.cluster import ClusterView
from shared.scheduling.scaling import CancelDrain, DrainAction, Scaler, ScaleUp, ScalingAction, call_of, check_settings
from tests.placement.test_fleet import Site

SETTINGS = SchedulerSettings(autoscale=True, scale_low=100.0, scale_high=500.0, scale_period_s=5.0, max_instances=3)


class Cluster:
    """A view of 1,000-token instances that serve one model."""

    def __init__(self) -> None:
        self.view = ClusterView(3.0)
        self._sequence = 0

    def show(self, instance_id: str, state: str = "ready", *, model_state: str = "ready") -> None:
        model = LoadedModel(name="m", state=model_state, max_model_len=2048, block_size=10, blocks_per_merged=2)
        info = InstanceInfo(
            instance_id=instance_id,
            incarnation="1",
            node_id="node",
            state=state,
            models=[model],
            num_merged=50,
            merged_bytes=1,
        )
        self.view.register(info, 0.0)

    def report(
        self, instance_id: str, freeness: float, num_running: int = 0, num_waiting: int = 0, **fields: float
    ) -> None:
        self._sequence += 1
        load = ModelLoad(
            model="m",
            num_running=num_running + 3,
            num_waiting=num_waiting,
            num_offline=3,
            num_waiting_online=num_waiting,
        )
        report = LoadReport(
            instance_id=instance_id,
            incarnation="1",
            sequence=self._sequence,
            dispatch_freeness=0.0,
            free_merged=0.0,
            num_running=num_running + 3,
            models=[load],
            admitted=[],
            ended=[],
            finished=[],
            scaling_freeness=freeness,
            **fields,
        )
        assert self.view.hear(report, 0.0) is not None

    def serving(self, **freeness: float) -> Cluster:
        for instance_id, value in freeness.items():
            self.show(instance_id)
            self.report(instance_id, value, 0 if math.isinf(value) else 4)
        return self


def run(
    scaler: Scaler, cluster: Cluster, begin: int, end: int, replicas: int | None = None, **queued: int
) -> list[tuple[int, ScalingAction]]:
    """`replicas`: of the model."""
    fixed = {} if replicas is None else {"m": replicas}
    found = []
    for now in range(begin, end):
        found += [(now, action) for action in scaler.due(cluster.view, queued, float(now), fixed)]
    return found


def test_off_unless_asked_for() -> None:
    scaler = Scaler(SchedulerSettings())
    assert run(scaler, Cluster().serving(a=0.0), 0, 100) == []
    scaler.answered(None, 1.0)


def test_more_instances_are_asked_for_and_a_refusal_is_remembered() -> None:
    scaler, cluster = Scaler(SETTINGS), Cluster().serving(a=20.0, b=50.0)
    assert run(scaler, cluster, 0, 6) == [(5, ScaleUp(3))]
    scaler.answered(None, 6.0)
    assert run(scaler, cluster, 6, 60) == [(41, ScaleUp(3))]
    scaler.answered([], 42.0)
    assert run(scaler, cluster, 60, 200) == []


def test_starting_silent_and_draining_instances_serve_nobody() -> None:
    cluster = Cluster().serving(a=20.0)
    cluster.show("starting", "starting", model_state="loading")
    assert run(Scaler(SETTINGS), cluster, 0, 60) == [], "one comes already"
    cluster.show("starting", "draining")
    assert run(Scaler(SETTINGS), cluster, 0, 6) == [(5, ScaleUp(2))]
    cluster.serving(dead=math.inf)
    cluster.view.mark_lost("dead")
    assert run(Scaler(SETTINGS), cluster, 0, 6) == [(5, ScaleUp(2))]


def test_the_least_loaded_is_drained_and_a_demand_brings_it_back() -> None:
    scaler, cluster = Scaler(SETTINGS), Cluster().serving(a=math.inf, b=math.inf)
    assert run(scaler, cluster, 0, 6) == [(5, DrainAction("b"))]
    scaler.answered(["b"], 6.0)
    cluster.show("b", "draining")
    cluster.report("a", 10.0, 4)
    assert run(scaler, cluster, 6, 30) == [(11, CancelDrain("b"))]


def test_whose_drain_it_is_only_placement_knows() -> None:
    """Scaling asks for a; placement drains c instead, and then an operator drains a."""
    scaler, cluster = Scaler(SETTINGS), Cluster().serving(a=math.inf, b=math.inf, c=math.inf)
    cluster.report("b", 990.0, 1)
    cluster.report("c", 990.0, 1)
    assert run(scaler, cluster, 0, 6) == [(5, DrainAction("a"))]
    scaler.answered(["c"], 6.0)
    cluster.show("a", "draining")
    cluster.show("c", "draining")
    cluster.report("b", 10.0, 4)
    assert run(scaler, cluster, 6, 30) == [(11, CancelDrain("c"))]


def test_the_drain_of_another_instance_than_asked_for_is_known_from_the_answer() -> None:
    scaler, cluster = Scaler(SETTINGS), Cluster().serving(a=math.inf, b=math.inf)
    assert run(scaler, cluster, 0, 6) == [(5, DrainAction("b"))]
    scaler.answered(["a"], 6.0)
    cluster.show("a", "draining")
    cluster.report("b", 10.0, 4)
    assert run(scaler, cluster, 6, 30) == [(11, CancelDrain("a"))]


def test_offline_work_is_no_load_and_a_queue_is_a_demand() -> None:
    cluster = Cluster().serving(a=math.inf)
    assert run(Scaler(SETTINGS), cluster, 0, 60) == []
    assert run(Scaler(SETTINGS), cluster, 0, 6, m=1) == [(5, ScaleUp(2))]
    assert run(Scaler(SETTINGS), cluster, 0, 60, m=0) == []


def test_an_unserved_model_keeps_instances_from_being_drained() -> None:
    cluster = Cluster().serving(a=math.inf, b=math.inf)
    assert run(Scaler(SETTINGS), cluster, 0, 60, other=1) == []


def test_the_calls() -> None:
    assert call_of(ScaleUp(3)) == (PLACEMENT_SCALE_INSTANCES, ScaleInstances(3, is_for_scaling=True))
    drain = DrainInstance("a", is_for_scaling=True)
    assert call_of(DrainAction("a")) == (PLACEMENT_DRAIN_INSTANCE, drain)
    undo = DrainInstance("a", is_undone=True, is_for_scaling=True)
    assert call_of(CancelDrain("a")) == (PLACEMENT_DRAIN_INSTANCE, undo)


@pytest.mark.parametrize(
    "values", [{"scale_low": 960.0}, {"max_instances": -1}, {"min_instances": 3, "max_instances": 2}]
)
def test_settings_that_contradict_each_other(values: dict[str, float]) -> None:
    check_settings(SchedulerSettings())
    with pytest.raises(SettingsError, match="expected"):
        check_settings(SchedulerSettings(**values))  # type: ignore[arg-type]


def test_a_model_that_is_where_it_is_to_be_asks_for_no_more_instances() -> None:
    cluster = Cluster().serving(a=20.0, b=20.0)
    assert run(Scaler(SETTINGS), cluster, 0, 60, replicas=2, m=5) == []
    assert run(Scaler(SETTINGS), cluster, 0, 6, replicas=3) == [(5, ScaleUp(3))]
    cluster.show("c", model_state="failed")
    assert run(Scaler(SETTINGS), cluster, 0, 60, replicas=3) == [], "more than four there may not be"
    cluster.show("c", model_state="loading")
    assert run(Scaler(SETTINGS), cluster, 0, 700, replicas=3) == []


@pytest.mark.parametrize("models", ["failed", "none"])
def test_an_instance_that_cannot_serve_is_not_waited_for(models: str) -> None:
    cluster = Cluster().serving(a=20.0)
    cluster.show("b", "starting", model_state="failed")
    if models == "none":
        cluster.view.register(
            InstanceInfo(
                instance_id="b",
                incarnation="1",
                node_id="node",
                state="starting",
                models=[],
                num_merged=50,
                merged_bytes=1,
            ),
            0.0,
        )
    assert run(Scaler(SETTINGS), cluster, 0, 6) == [(5, ScaleUp(3))], "one that serves, beside the one that does not"


def test_an_instance_that_has_not_reported_yet_is_waited_for() -> None:
    cluster = Cluster().serving(a=20.0)
    cluster.show("b")
    assert run(Scaler(SETTINGS), cluster, 0, 60) == []


async def test_a_demand_drains_nothing_that_placement_counts_and_the_scheduler_does_not_see() -> None:
    """Two of four instances have crashed, or are without a model."""
    site, scaler = Site([(2, 2), (2, 2)]), Scaler(SETTINGS)
    cluster = Cluster().serving(**{"n0-0": 20.0, "n0-1": 30.0})
    [(_, action)] = run(scaler, cluster, 0, 6)
    assert action == ScaleUp(3)
    _, query = call_of(action)
    assert isinstance(query, ScaleInstances)
    scaler.answered((await site.keeper.scale(query)).released, 6.0)
    assert len(site.active) == 4 and not site.stored.draining


def test_prompts_that_wait_on_the_instances_and_late_batches_are_a_demand() -> None:
    cluster = Cluster().serving(a=9e5, b=9e5)
    assert run(Scaler(SETTINGS), cluster, 0, 8) == [(5, DrainAction("b"))]
    for instance_id in "ab":
        cluster.report(instance_id, 9e5, 4, prompts_s=3.0, ttft_s=1.5)
    assert run(Scaler(SETTINGS), cluster, 0, 8) == [(5, ScaleUp(3))]
    cluster.serving(a=9e5, b=9e5)
    for of in ({"work": {"m": 1.5}}, {"pressure": {"m": 1.2}}):
        scaler = Scaler(SETTINGS)
        found = [action for now in range(8) for action in scaler.due(cluster.view, {}, float(now), {}, **of)]
        assert found == [ScaleUp(3)]


def test_an_instance_that_says_nothing_of_its_objective_is_not_late() -> None:
    cluster = Cluster().serving(a=9e5, b=9e5)
    for instance_id in "ab":
        cluster.report(instance_id, 9e5, 4, prompts_s=30.0)
    assert run(Scaler(SETTINGS), cluster, 0, 8) == [(5, DrainAction("b"))]
