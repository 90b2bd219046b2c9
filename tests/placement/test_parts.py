"""The pure parts around the planner: presence of nodes, traffic statistics, checks of requests."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.placement.checkpoints import Checkpoints
from services.placement.fleet import GRACE_S, NodePresence
from services.placement.live_problem import measured_prediction
from services.placement.metrics import PlacementMetrics
from services.placement.requests import check_length, check_quantization
from services.placement.statistics import TrafficStatistics
from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec, ModelStatistics, NodeInfo
from shared.messages.requests import ErrorCode
from shared.messages.traffic import MeanStd, ModelSummary, ModelTraffic
from shared.models.checkpoint import CheckpointError, CheckpointMissing, CheckpointShape
from shared.models.spec import check_spec

SHAPE = CheckpointShape(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_size=256,
    vocab_size=1000,
    max_model_len=512,
    dtype="float32",
    weight_bytes=1 << 20,
    eos_token_ids=(2,),
)


def node(node_id: str, **progress: object) -> NodeInfo:
    return NodeInfo(node_id=node_id, hostname="host", num_instances=2, memory_bytes=1 << 30, **progress)  # type: ignore[arg-type]


class TestNodePresence:
    def test_a_missing_node_is_held_for_its_grace(self) -> None:
        presence = NodePresence()
        both, one = {"a": node("a"), "b": node("b")}, {"b": node("b")}
        assert presence.view(both, {"a", "b"}, 0.0) == ([node("a"), node("b")], frozenset())
        assert presence.view(one, {"a", "b"}, 5.0) == ([node("b")], {"a"})
        assert presence.view(one, {"a", "b"}, 5.0 + GRACE_S - 0.1)[1] == {"a"}
        assert presence.view(one, {"a", "b"}, 5.0 + GRACE_S)[1] == frozenset()

    def test_a_node_that_comes_back_has_a_new_grace(self) -> None:
        presence = NodePresence()
        one = {"b": node("b")}
        presence.view(one, {"a"}, 0.0)
        presence.view({"a": node("a"), **one}, {"a"}, 9.0)
        assert presence.view(one, {"a"}, GRACE_S + 5.0)[1] == {"a"}

    def test_while_no_node_is_there_none_is_given_up(self) -> None:
        presence = NodePresence()
        assert presence.view({}, {"a", "b"}, 0.0)[1] == {"a", "b"}
        assert presence.view({}, {"a", "b"}, 1000.0)[1] == {"a", "b"}
        assert presence.view({"b": node("b")}, {"a", "b"}, 1001.0)[1] == {"a"}
        assert presence.view({"b": node("b")}, {"a", "b"}, 1001.0 + GRACE_S)[1] == frozenset()

    def test_progress_of_a_node_changes_nothing(self) -> None:
        presence = NodePresence()
        first = presence.view({"a": node("a")}, set(), 0.0)
        assert presence.view({"a": node("a", plan_version=7, problem="broken")}, set(), 1.0) == first


def report(model: str = "m", arrived: int = 2, finished: int = 1, tokens: int = 10, queued: int = 0) -> ModelStatistics:
    return ModelStatistics(
        model=model,
        interval_s=1.0,
        num_arrived=arrived,
        num_finished=finished,
        prompt_tokens=3 * tokens,
        output_tokens=tokens,
        queued_s=0.5 * finished,
        execution_s=2.0 * finished,
        num_queued=queued,
    )


class TestTrafficStatistics:
    def test_totals_and_queues(self) -> None:
        statistics = TrafficStatistics()
        statistics.add_model("m", report(arrived=100, finished=90, tokens=1000))
        assert statistics.take_changed() == []
        for second in range(1, 11):
            statistics.observe([report(queued=second), report("unknown")])
        totals = statistics.totals("m")
        assert (totals.num_arrived, totals.num_finished, totals.output_tokens) == (120, 100, 1100)
        assert totals.interval_s == 11.0
        assert statistics.take_changed() == [totals]
        assert statistics.num_queued("m") == 10
        statistics.observe([report("n")])
        assert statistics.num_queued("m") == 0, "it has no queue that is not in the report"

    def test_a_new_model_is_stored_at_once_and_a_removed_one_is_not(self) -> None:
        statistics = TrafficStatistics()
        statistics.add_model("m")
        statistics.add_model("n")
        statistics.remove_model("n")
        statistics.observe([report("n")])
        assert [totals.model for totals in statistics.take_changed()] == ["m"]

    def test_what_could_not_be_stored_is_due_again(self) -> None:
        statistics = TrafficStatistics()
        statistics.add_model("m")
        (totals,) = statistics.take_changed()
        statistics.keep_changed([totals.model, "gone"])
        assert statistics.take_changed() == [totals]
        assert statistics.take_changed() == []

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
    def test_nothing_is_lost_or_counted_twice(self, history: list[tuple[int, int]]) -> None:
        statistics = TrafficStatistics()
        statistics.add_model("m")
        for arrived, finished in history:
            statistics.observe([report(arrived=arrived, finished=finished)])
        totals = statistics.totals("m")
        assert (totals.num_arrived, totals.num_finished) == (sum(a for a, _ in history), sum(f for _, f in history))


class TestRequests:
    def test_sound_specs(self) -> None:
        check_spec(ModelSpec("org/Model-7b_v1.5:chat", "org/model"))
        check_spec(ModelSpec("m", "/m", dtype="bfloat16", max_model_len=512, replicas=1))
        check_length(ModelSpec("m", "/m", max_model_len=512), SHAPE)

    @pytest.mark.parametrize(
        ("spec", "param"),
        [
            (ModelSpec("", "/m"), "name"),
            (ModelSpec("a b", "/m"), "name"),
            (ModelSpec("-a", "/m"), "name"),
            (ModelSpec("a\n", "/m"), "name"),
            (ModelSpec("a/../b", "/m"), "name"),
            (ModelSpec("a/.", "/m"), "name"),
            (ModelSpec("a//b", "/m"), "name"),
            (ModelSpec("a/", "/m"), "name"),
            (ModelSpec("a" * 129, "/m"), "name"),
            (ModelSpec("m", " "), "source"),
            (ModelSpec("m", "/m", dtype="int8"), "dtype"),
            (ModelSpec("m", "/m", max_model_len=0), "max_model_len"),
            (ModelSpec("m", "/m", replicas=-1), "replicas"),
            (ModelSpec("m", "/m", slo_scale=0.5), "slo_scale"),
            (ModelSpec("m", "/m", slo_scale=1e9), "slo_scale"),
            (ModelSpec("m", "/m", quantization="int2"), "quantization"),
            (ModelSpec("m", "/m", engine="vllm", draft="/d"), "draft"),
            (ModelSpec("m", "/m", tool_format="xml"), "tool_format"),
        ],
    )
    def test_the_field_at_fault_is_named(self, spec: ModelSpec, param: str) -> None:
        with pytest.raises(ServiceError) as caught:
            check_spec(spec)
        assert (caught.value.code, caught.value.info.param) == (ErrorCode.BAD_REQUEST, param)

    def test_a_length_beyond_the_checkpoint(self) -> None:
        with pytest.raises(ServiceError, match="max_model_len is 513, but the checkpoint allows 512 tokens"):
            check_length(ModelSpec("m", "/m", max_model_len=513), SHAPE)

    def test_a_checkpoint_that_is_quantised_already(self) -> None:
        stored = msgspec.structs.replace(SHAPE, stored_as="awq")
        check_quantization(ModelSpec("m", "/m"), stored)
        with pytest.raises(ServiceError, match=r"quantised already \(awq\)") as caught:
            check_quantization(ModelSpec("m", "/m", quantization="int8"), stored)
        assert caught.value.info.param == "quantization"


class TestCheckpoints:
    async def test_a_failure_is_remembered_while_it_is_tried_again(self) -> None:
        answers: list[CheckpointShape | Exception] = [CheckpointMissing("no such folder"), SHAPE]
        may_read, changes = threading.Event(), []
        may_read.set()

        def read(_source: str) -> CheckpointShape:
            may_read.wait(10.0)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        checkpoints = Checkpoints(lambda: changes.append(1), read)
        assert (checkpoints.shape("/m"), checkpoints.problem("/m")) == (None, "")
        checkpoints.begin("/m")
        await checkpoints.wait(["/m"], 10.0)
        assert (checkpoints.shape("/m"), checkpoints.problem("/m")) == (None, "no such folder")
        may_read.clear()
        checkpoints.begin("/m")
        await checkpoints.wait(["/m"], 0.01)
        assert (checkpoints.shape("/m"), checkpoints.problem("/m")) == (None, "no such folder")
        may_read.set()
        await checkpoints.wait(["/m"], 10.0)
        assert (checkpoints.shape("/m"), checkpoints.problem("/m")) == (SHAPE, "")
        checkpoints.begin("/m")
        assert len(changes) == 2, "what is known is not read again"
        checkpoints.forget_all_but([])
        assert checkpoints.shape("/m") is None

    async def test_what_cannot_be_used_is_not_read_again_unless_it_is_added_again(self) -> None:
        answers: list[CheckpointShape | Exception] = [CheckpointError("quantised"), SHAPE]

        def read(_source: str) -> CheckpointShape:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        checkpoints = Checkpoints(lambda: None, read)
        for again, found in ((False, None), (False, None), (True, SHAPE)):
            checkpoints.begin("/m", again=again)
            await checkpoints.wait(["/m"], 10.0)
            assert checkpoints.shape("/m") == found
            assert checkpoints.problem("/m") == ("" if found else "quantised")

    async def test_an_unexpected_error_is_a_problem_too(self) -> None:
        def read(_source: str) -> CheckpointShape:
            raise PermissionError("not yours")

        changed = asyncio.Event()
        checkpoints = Checkpoints(changed.set, read)
        checkpoints.begin("/m")
        await asyncio.wait_for(changed.wait(), 10.0)
        assert checkpoints.problem("/m") == "'/m' cannot be read: PermissionError('not yours')"


def test_what_is_measured_is_of_requests_that_nobody_serves_too() -> None:
    waits = ModelSummary(interval_s=60.0, num_arrived=40, attainment=0.0, num_decided=30, normalised_latency=5.0)
    serves = ModelSummary(
        interval_s=60.0, num_arrived=12, num_finished=12, attainment=1.0, num_decided=10, normalised_latency=1.0
    )  # fmt: skip
    found = measured_prediction(
        {
            name: ModelTraffic(model=name, online=online, offline=ModelSummary(interval_s=60.0))
            for name, online in (("a", waits), ("b", serves), ("c", ModelSummary(interval_s=60.0)), ("lora", serves))
        },
        {"lora": "a"},
    )
    assert {name: model.num_requests for name, model in found.models.items()} == {"a": 40, "b": 10, "c": 0}
    assert (found.models["a"].attainment, found.models["a"].normalised_latency) == (0.25, 4.0), (
        "its adapter's are its own"
    )
    assert (found.attainment, found.normalised_latency) == (0.4, 3.4)
    fails = ModelSummary(interval_s=60.0, num_arrived=50, attainment=0.0, num_decided=50)
    found = measured_prediction(
        {
            name: ModelTraffic(model=name, online=online, offline=ModelSummary(interval_s=60.0))
            for name, online in (("a", fails), ("b", serves))
        },
        {},
    )
    assert (found.attainment, found.normalised_latency) == (pytest.approx(10 / 60), 1.0), "of those that have a latency"
    nothing = measured_prediction({}, {})
    assert (nothing.attainment, nothing.num_requests) == (1.0, 0)


def test_lengths_are_shown_with_mean_and_deviation_until_their_model_is_gone() -> None:
    registry = CollectorRegistry()
    metrics = PlacementMetrics(registry)
    online = ModelSummary(interval_s=60.0, prompt_tokens=MeanStd(900.0, 250.0), output_tokens=MeanStd(80.0, 40.0))
    metrics.show_traffic(ModelTraffic(model="a", online=online, offline=ModelSummary(interval_s=60.0)))

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"tideway_placement_model_{name}", {"model": "a", "class": "online"})

    names = ("mean_prompt_tokens", "std_prompt_tokens", "mean_output_tokens", "std_output_tokens")
    assert [shown(name) for name in names] == [900.0, 250.0, 80.0, 40.0]
    metrics.forget("a")
    assert shown("std_prompt_tokens") is None
