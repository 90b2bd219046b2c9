"""Engine counters and ended requests as Prometheus shows them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.worker.instance.building import build_engine, host_pool_merged
from services.worker.instance.coserving_telemetry import CoServingTelemetry
from services.worker.node.machine import free_memory_bytes
from shared.costs.live import PRIOR
from shared.costs.model import CostSource, KnownCosts
from shared.engine.counters import EngineCounters
from shared.engine.requests import Ended
from shared.messages.cluster import InstancePlan
from shared.messages.requests import FinishReason, RequestClass
from shared.policies.speculation import GateState
from shared.runtime.settings import InstanceSettings, SettingsError
from tests.shared.engine.fake_executor import request


class Shown:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.telemetry = CoServingTelemetry("i", self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        """The value of `tideway_instance_<name>`."""
        if "klass" in labels:
            labels["class"] = labels.pop("klass")
        return self.registry.get_sample_value(f"tideway_instance_{name}", {"engine": "i", **labels})


def test_where_step_times_are_from_is_shown() -> None:
    shown = Shown()
    for source in (CostSource.NONE, CostSource.LIVE, CostSource.STORED):
        shown.telemetry.on_costs("m", KnownCosts(PRIOR, 1.5, source))
        values = {other: shown("cost_model", model_name="m", source=str(other)) for other in CostSource}
        assert values == {other: float(other == source) for other in CostSource}
    assert shown("cost_model_scale", model_name="m") == 1.5


def test_a_model_begins_at_zero_and_leaves_nothing_behind() -> None:
    shown = Shown()
    shown.telemetry.set_model("m")
    assert shown("moved_bytes_total", model_name="m") == 0
    shown.telemetry.on_costs("m", KnownCosts(PRIOR, 1.5, CostSource.PROFILED))
    shown.telemetry.on_costs("n", KnownCosts(PRIOR, 1.5, CostSource.PROFILED))
    for _ in range(2):
        shown.telemetry.remove_model("m")
    gone, kept = ({"model_name": name, "source": "profiled"} for name in "mn")
    assert (shown("cost_model", **gone), shown("cost_model", **kept)) == (None, 1)
    assert shown("cost_model_scale", model_name="m") is None
    assert shown("cost_model_error", model_name="m", percentile="99") is None


def test_counters_advance_by_what_was_added_since() -> None:
    shown, counters = Shown(), EngineCounters()
    sizes = {"m": 100, "n": 10}
    shown.telemetry.on_counters(counters, sizes, 0.0)
    for times in (1, 2):
        counters.preemptions["memory", "checkpointed"] += 2
        counters.steps_suspended += 3
        counters.checkpointed_blocks["m"] += 4
        counters.restored_blocks["n"] += 5
        counters.recomputed_tokens += 7
        counters.recomputed_partial_tokens += 6
        counters.harvested_tokens += 8
        for _ in range(2):
            shown.telemetry.on_counters(counters, sizes, 0.25)
        assert shown("preemptions_total", cause="memory", mode="checkpointed") == 2 * times
        assert shown("interrupted_steps_total", event="suspended") == 3 * times
        assert shown("interrupted_steps_total", event="discarded") == 0
        assert shown("checkpointed_bytes_total", model_name="m") == 400 * times
        assert shown("restored_bytes_total", model_name="n") == 50 * times
        assert shown("recomputed_tokens_total", part="partial_block") == 6 * times
        assert shown("recomputed_tokens_total", part="whole_block") == 1 * times
        assert shown("computed_tokens_total", klass="offline") == 8 * times
        assert shown("computed_tokens_total", klass="online") == 0
        assert shown("host_pool_use") == 0.25
    counters.checkpointed_blocks["gone"] += 1
    shown.telemetry.on_counters(counters, sizes, 0.0)
    assert shown("checkpointed_bytes_total", model_name="gone") == 0


def ended(klass: RequestClass = RequestClass.ONLINE, **fields: Any) -> Ended:
    """First token after 1.0 s on the instance, 0.1 s per token after it; objectives 1.5 s and 0.11 s."""
    of_request = {
        name: fields.pop(name) for name in ("waited_s", "prior", "ttft_s", "ttft_objective_s") if name in fields
    }
    sent = request("r", [1, 2], 11, request_class=klass, **of_request)
    values = {
        "reason": FinishReason.LENGTH, "num_prompt_tokens": 2, "num_output_tokens": 11, "num_cached_tokens": 0,
        "num_preemptions": 0, "arrived_s": 10.0, "submitted_s": 10.0, "first_planned_s": 10.5,
        "first_token_s": 11.0, "ended_s": 12.0, "ttft_objective_s": 1.5, "tpot_objective_s": 0.11,
    }  # fmt: skip
    return Ended(request=sent, **values | fields)


@pytest.mark.parametrize(
    ("one", "ttft", "tpot"),
    [
        (ended(), "met", "met"),
        (ended(arrived_s=9.4), "missed", "met"),
        (ended(ended_s=12.2), "met", "missed"),
        (ended(num_output_tokens=1), "met", None),
        (ended(first_token_s=None), "missed", None),
        (ended(first_token_s=None, ended_s=11.0, reason=FinishReason.CANCELLED), None, None),
        (ended(first_token_s=None, ended_s=11.0, reason=FinishReason.DEADLINE), "missed", None),
        # moved: its times came with it, and so did what it had waited for when it left
        (ended(prior=bytes(20), waited_s=1.6, num_migrations=1), "met", "met"),
        (ended(prior=bytes(20), waited_s=1.6, num_migrations=1, ended_s=12.2), "met", "missed"),
        (ended(first_token_s=None, ended_s=11.0, reason=FinishReason.CANCELLED, waited_s=1.0), None, None),
        # placed again after 3 s, of which the first token took 1.2 s; and after 4 s, with one that took 1.6 s
        (ended(prior=bytes(20), ttft_s=1.2, arrived_s=7.0, num_output_tokens=101), "met", "met"),
        (ended(prior=bytes(20), ttft_s=1.2, arrived_s=7.0), "met", "missed"),
        (ended(prior=bytes(20), ttft_s=1.6, arrived_s=6.0, num_output_tokens=101), "missed", "met"),
        (ended(RequestClass.OFFLINE), None, None),
        (ended(RequestClass.OFFLINE, ttft_objective_s=1.2), "met", None),
    ],
)
def test_objectives_met_and_missed(one: Ended, ttft: str | None, tpot: str | None) -> None:
    shown = Shown()
    shown.telemetry.on_ended(one)
    klass = str(one.request.request_class)
    for objective, expected in (("ttft", ttft), ("tpot", tpot)):
        for outcome in ("met", "missed"):
            value = shown("slo_total", model_name="a", klass=klass, objective=objective, outcome=outcome)
            assert value == (1 if outcome == expected else None), (objective, outcome)
    told = one.stats()
    is_met = {"met": True, "missed": False, None: None}
    assert (told.is_ttft_met, told.is_tpot_met) == (is_met[ttft], is_met[tpot])
    assert told.latency_s == one.ended_s - one.arrived_s, "over all of its life"
    assert told.is_whole == (one.request.ttft_s < 0)
    own_ttft_s = -1.0 if one.first_token_s is None else one.first_token_s - one.arrived_s
    assert told.ttft_s == (own_ttft_s if told.is_whole else one.request.ttft_s)


def test_budget_use_counts_steps_that_were_limited() -> None:
    shown = Shown()
    shown.telemetry.on_step("m", 0.5, math.inf)
    shown.telemetry.on_step("m", 0.08, 0.1)
    assert shown("budget_use_sum", model_name="m") == pytest.approx(0.8)
    assert shown("budget_use_count", model_name="m") == 1


def test_host_memory_follows_the_pool_within_what_is_free() -> None:
    plan = InstancePlan("i", "n", [], pool_bytes=64 << 20, merged_bytes=1 << 20)
    assert host_pool_merged(InstanceSettings(), plan, "cpu") == 64
    assert host_pool_merged(InstanceSettings(host_memory_bytes=0), plan, "cpu") == 0
    assert host_pool_merged(InstanceSettings(host_memory_bytes=(5 << 20) + 1), plan, "cuda") == 5
    vast = InstancePlan("i", "n", [], pool_bytes=1 << 50, merged_bytes=1 << 20)
    assert host_pool_merged(InstanceSettings(), vast, "cpu") == 0
    assert 0 < host_pool_merged(InstanceSettings(), vast, "cuda") <= free_memory_bytes() >> 20


@pytest.mark.parametrize("name", ["order_policy", "co_serving", "interruption", "profile"])
def test_unknown_policies_are_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(SettingsError, match=f"TIDEWAY_{name.upper()}='nonsense': (expected one of |unknown )"):
        build_engine(InstanceSettings(**{name: "nonsense"}), 4, "cpu")


def test_guessed_tokens_are_counted_by_the_names_of_vllm() -> None:
    shown, counters = Shown(), EngineCounters()
    shown.telemetry.set_model("m")
    counters.drafts["m"], counters.drafted_tokens["m"], counters.accepted_tokens["m"] = 2, 8, 5
    for _ in range(2):
        shown.telemetry.on_counters(counters, {"m": 1}, 0.0)
    labels = {"engine": "i", "model_name": "m"}
    values = [
        shown.registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", labels)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert values == [2, 8, 5]


def test_whether_a_draft_model_drafts_is_shown_by_size_of_batch() -> None:
    shown = Shown()
    shown.telemetry.on_speculation("m", {1: (GateState.DRAFTS, 1.5), 3: (GateState.WAITS, 0.9)})

    def state(batch: str, name: str) -> float | None:
        labels = {"engine": "i", "model_name": "m", "batch": batch, "state": name}
        return shown.registry.get_sample_value("tideway_instance_speculation", labels)

    assert [state("1", name) for name in ("off", "trial", "on")] == [0, 0, 1] and state("3", "off") == 1
    labels = {"engine": "i", "model_name": "m", "batch": "1"}
    assert shown.registry.get_sample_value("tideway_instance_speculation_gain", labels) == 1.5
    shown.telemetry.remove_model("m")
    assert state("1", "on") is None


def test_a_lookup_of_more_tokens_than_are_compared_is_refused() -> None:
    with pytest.raises(SettingsError, match="TIDEWAY_PROMPT_LOOKUP_MIN=5 is more than"):
        build_engine(InstanceSettings(prompt_lookup=4, prompt_lookup_min=5), 4, "cpu")
    assert build_engine(InstanceSettings(prompt_lookup=4), 4, "cpu").steps.max_in_flight == 1
