"""An instance alone on a real NATS: the test plays scheduler, gateway and node agent (instance_stage.py)."""

from __future__ import annotations

import asyncio
import math
import os
import threading

import msgspec
import pytest
import torch

from services.worker.instance.models import InstanceModels
from shared.bus.interface import BusError
from shared.engine.load_reports import HEARTBEAT_S
from shared.messages.admin import Drain, LoadModel, UnloadModel
from shared.messages.catalogue import (
    EXECUTION_STATISTICS,
    INSTANCE_CANCEL,
    INSTANCE_DRAIN,
    INSTANCE_HELD,
    INSTANCE_LOAD_MODEL,
    INSTANCE_REPLAY,
    INSTANCE_SUBMIT,
    INSTANCE_UNLOAD_MODEL,
    REPORT_LOAD,
)
from shared.messages.cluster import ExecutionStatistics, ExecutionStatisticsReport, ModelSpec, ReportLoad
from shared.messages.requests import (
    Cancel,
    ErrorCode,
    FinishReason,
    ListHeldRequests,
    ReplayQuery,
    RequestClass,
    StreamPosition,
    TokenEntry,
    pack_tokens,
    unpack_tokens,
)
from shared.models.checkpoint import CheckpointError, CheckpointMissing
from tests.shared.engine.fake_executor import expected_output, request
from tests.stalls import Stopwatch
from tests.worker.instance_stage import IDS, LAME, SteppedExecutor, instance_on


@pytest.fixture
async def stage(nats_settings):
    async with instance_on(nats_settings) as stage:
        yield stage


async def test_a_request_streams_its_tokens_and_ends(stage):
    sent = request("r1", [1, 2, 3, 4, 5], 20)
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    end = stage.end("r1")
    assert stage.output("r1") == expected_output(sent, 600)
    assert end.finish_reason == FinishReason.LENGTH and end.timing.decode_s > 0
    await stage.until(lambda: any("r1" in report.ended for report in stage.reports))
    assert any("r1" in report.admitted for report in stage.reports)
    finished = [f for report in stage.reports for f in report.finished]
    assert [(f.model, f.prompt_tokens, f.output_tokens) for f in finished] == [("a", 5, 20)]


async def test_it_reports_its_load_when_it_is_asked(stage):
    await stage.until(lambda: stage.reports)
    with Stopwatch() as watch:
        for _ in range(6):
            num_reports = len(stage.reports)
            stage.bus.publish(REPORT_LOAD, ReportLoad(within_s=0.05))
            await stage.until(lambda num=num_reports: len(stage.reports) > num)
    assert watch.seconds < 3 * HEARTBEAT_S, "heartbeats would take twice as long"


async def test_many_requests_share_frames(stage):
    stage.executor.gate.clear()
    sent = [request(f"r{i}", [i, 2, 3], 10) for i in range(20)]
    await asyncio.gather(*(stage.submit(one) for one in sent))
    stage.executor.gate.set()
    await stage.until(lambda: all(stage.end(one.request_id) for one in sent))
    assert all(stage.output(one.request_id) == expected_output(one, 600) for one in sent)


async def test_refusals_are_typed(stage):
    cases = {
        ErrorCode.GONE: request("x1", [1], 5, model="nobody"),
        ErrorCode.TOO_LONG: request("x2", [1] * 700, 5),
        ErrorCode.BAD_REQUEST: request("x3", [], 5),
    }
    for code, sent in cases.items():
        with pytest.raises(BusError) as refused:
            await stage.bus.request(INSTANCE_SUBMIT.at(**IDS), sent, timeout_s=5)
        assert refused.value.code == code


@pytest.mark.parametrize("is_broken", [False, True])
async def test_logits_that_are_not_finite_end_their_request_or_the_instance(stage, caplog, is_broken):
    """The instance where a prompt of no request fares likewise: the weights here or the device are at fault."""
    stage.executor.is_broken = is_broken
    await stage.submit(request("sound", [1, 2], 30))
    await stage.submit(request("lame", [1, LAME, 2], 30))
    await stage.until(lambda: stage.end("lame"))
    assert stage.end("lame").error.code == ErrorCode.NOT_FINITE
    if is_broken:
        async with asyncio.timeout(30):
            await stage.service.failed.wait()
        assert "the logits of 'a' are NaN, whatever the prompt" in stage.service.problems()[0]
        return
    await stage.until(lambda: stage.end("sound") and "those of other tokens are" in caplog.text)
    assert len(stage.output("sound")) == 30 and not stage.service.failed.is_set()


async def test_cancel_ends_a_request_within_a_step(stage):
    sent = request("r1", [1, 2], 500)
    await stage.submit(sent)
    await stage.until(lambda: len(stage.output("r1")) > 3)
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").finish_reason == FinishReason.CANCELLED
    assert stage.output("r1") == expected_output(sent, 600)[: len(stage.output("r1"))]
    assert len(stage.output("r1")) < 500


async def test_deadline_ends_a_request_with_its_reason(stage):
    stage.executor.gate.clear()
    await stage.submit(request("r1", [1, 2], 500, timeout_s=0.2))
    await asyncio.sleep(0.3)
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").finish_reason == FinishReason.DEADLINE
    assert stage.end("r1").error.code == ErrorCode.DEADLINE


async def test_bus_answers_while_a_step_runs(stage):
    """Torch work does not stall bus traffic: submit and held are answered while a step is held back."""
    await stage.submit(request("r1", [1, 2], 50))
    stage.executor.gate.clear()
    await asyncio.sleep(0.02)
    with Stopwatch() as watch:
        await stage.submit(request("r2", [3], 5))
        held = await stage.bus.request(INSTANCE_HELD.at(**IDS), ListHeldRequests(), timeout_s=5)
    assert {one.request_id for one in held.requests} >= {"r2"}
    assert watch.seconds < 0.5


async def test_same_epoch_again_is_accepted_without_effect_and_a_higher_one_replaces(stage):
    stage.executor.gate.clear()
    sent = request("r1", [1, 2, 3], 12)
    await stage.submit(sent)
    await stage.submit(sent)
    prior = expected_output(sent, 600)[:5]
    stage.entries.extend([TokenEntry(request_id="r1", epoch=1, offset=0, tokens=pack_tokens(prior))])
    await stage.submit(msgspec.structs.replace(sent, epoch=1, prior=pack_tokens(prior)))
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"))
    stage.entries = [entry for entry in stage.entries if entry.epoch == 1]
    assert stage.output("r1") == expected_output(sent, 600)


async def test_replay_gives_what_a_gateway_missed(stage):
    sent = request("r1", [1, 2, 3], 30)
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    expected = expected_output(sent, 600)
    positions = [StreamPosition("r1", 0, 10), StreamPosition("r1", 7, 0), StreamPosition("nobody", 0, 0)]
    reply = await stage.bus.request(INSTANCE_REPLAY.at(**IDS), ReplayQuery(positions), timeout_s=5)
    (entry,) = reply.entries
    assert (entry.offset, unpack_tokens(entry.tokens)) == (10, expected[10:])
    assert entry.finish_reason == FinishReason.LENGTH
    assert reply.unknown == ["r1", "nobody"]


async def test_a_gateway_that_does_not_know_the_epoch_gets_all_of_a_request(stage):
    first = request("r1", [1, 2, 3], 30)
    whole = expected_output(first, 600)
    sent = request("r1", [1, 2, 3], 30, epoch=64, prior=pack_tokens(whole[:5]))
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    positions = [StreamPosition("r1", 0, 0), StreamPosition("nobody", 0, 0)]
    query = ReplayQuery(positions, is_of_any_epoch=True)
    reply = await stage.bus.request(INSTANCE_REPLAY.at(**IDS), query, timeout_s=5)
    (entry,) = reply.entries
    assert (entry.epoch, entry.offset, unpack_tokens(entry.tokens)) == (64, 0, whole)
    assert reply.unknown == ["nobody"]


async def test_replay_of_a_live_request(stage):
    sent = request("r1", [1, 2, 3], 500)
    await stage.submit(sent)
    await stage.until(lambda: len(stage.output("r1")) > 20)
    reply = await stage.bus.request(INSTANCE_REPLAY.at(**IDS), ReplayQuery([StreamPosition("r1", 0, 4)]), timeout_s=5)
    (entry,) = reply.entries
    tokens = unpack_tokens(entry.tokens)
    assert entry.finish_reason is None and len(tokens) > 10
    assert tokens == expected_output(sent, 600)[4 : 4 + len(tokens)]


async def test_models_come_and_go_beside_running_requests(stage):
    running = request("r1", [1, 2, 3], 400)
    await stage.submit(running)
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(ModelSpec("b", "/models/b")), timeout_s=5)

    def state_of(name):
        info = stage.instances.entries["node-0"]
        return next((model.state for model in info.models if model.name == name), None)

    await stage.until(lambda: state_of("b") == "ready")
    sent = request("r2", [4, 5], 10, model="b")
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r2"))
    assert stage.output("r2") == expected_output(sent, 60)
    await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("b", grace_s=5), timeout_s=5)
    await stage.until(lambda: state_of("b") is None)
    assert stage.executor.removed == ["b"]
    await stage.until(lambda: stage.end("r1"), 20)
    assert stage.output("r1") == expected_output(running, 600)


async def test_models_are_read_with_the_priority_of_the_process(nats_settings):
    """With less of it, a thread that holds the interpreter's lock beside busy programs makes the whole instance wait."""
    found = []

    class Reading(SteppedExecutor):
        def prepare_model(self, spec):
            of_thread, of_process = (
                os.getpriority(os.PRIO_PROCESS, i) for i in (threading.get_native_id(), os.getpid())
            )
            found.append(of_thread - of_process)
            return super().prepare_model(spec)

    async with instance_on(nats_settings, executor=Reading()) as stage:
        await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(ModelSpec("b", "/models/b")), timeout_s=5)
        await stage.until(lambda: len(found) == 2)
        assert found == [0, 0]


async def test_weights_of_a_model_that_is_put_away_are_kept_until_it_is_loaded_forgotten_or_makes_room(stage):
    running = request("r1", [1, 2, 3], 300)
    await stage.submit(running)

    def state_of_b():
        info = stage.instances.entries["node-0"]
        return next((model.state for model in info.models if model.name == "b"), None)

    async def ask(endpoint, query, state):
        await stage.bus.request(endpoint.at(**IDS), query, timeout_s=5)
        await stage.until(lambda: state_of_b() == state)

    load, put_away = LoadModel(ModelSpec("b", "/models/b")), UnloadModel("b", grace_s=5, keeps_weights=True)
    await ask(INSTANCE_LOAD_MODEL, load, "ready")
    await ask(INSTANCE_UNLOAD_MODEL, put_away, "host")
    assert stage.executor.kept == {"b"}
    with pytest.raises(BusError) as refused:
        await stage.submit(request("r2", [4, 5], 10, model="b"))
    assert refused.value.code == ErrorCode.GONE
    stage.executor.removed.clear()
    await ask(INSTANCE_LOAD_MODEL, load, "ready")
    sent = request("r3", [4, 5], 10, model="b")
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r3"))
    assert stage.output("r3") == expected_output(sent, 60)
    await ask(INSTANCE_UNLOAD_MODEL, put_away, "host")
    await ask(INSTANCE_UNLOAD_MODEL, UnloadModel("b"), None)
    assert stage.executor.kept == set(), "it is configured no more"
    stage.executor.removed.clear()
    await ask(INSTANCE_LOAD_MODEL, load, "ready")
    await ask(INSTANCE_UNLOAD_MODEL, put_away, "host")
    stage.executor.kept.clear()
    await stage.until(lambda: state_of_b() is None)
    stage.executor.removed.clear()
    stage.executor.has_host_room = False
    await ask(INSTANCE_LOAD_MODEL, load, "ready")
    await ask(INSTANCE_UNLOAD_MODEL, put_away, None)
    await stage.until(lambda: stage.end("r1"), 20)
    assert stage.output("r1") == expected_output(running, 600)


@pytest.mark.parametrize(("error", "is_final"), [(CheckpointError("odd"), True), (CheckpointMissing("odd"), False)])
async def test_a_known_reason_is_told_in_a_line_and_whether_it_is_final(stage, monkeypatch, caplog, error, is_final):
    def fail(spec):
        raise error

    monkeypatch.setattr(stage.executor, "prepare_model", fail)
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(ModelSpec("b", "/models/b")), timeout_s=5)
    await stage.until(lambda: any(m.state == "failed" for m in stage.instances.entries["node-0"].models))
    [failed] = [m for m in stage.instances.entries["node-0"].models if m.state == "failed"]
    assert (failed.error, failed.is_final) == ("odd", is_final)
    [record] = [one for one in caplog.records if "could not be loaded" in one.message]
    assert record.exc_info is None


async def test_a_lack_of_memory_is_told_in_words(stage, monkeypatch):
    monkeypatch.setattr(stage.executor, "prepare_model", lambda spec: torch.zeros(10**15))
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(ModelSpec("b", "/models/b")), timeout_s=5)
    await stage.until(lambda: any(m.state == "failed" for m in stage.instances.entries["node-0"].models))
    [failed] = [m for m in stage.instances.entries["node-0"].models if m.state == "failed"]
    assert failed.error.startswith("there is not enough memory for it; a smaller max_model_len or quantized weights")


async def test_a_model_that_cannot_be_loaded_says_why_and_can_be_tried_again(stage):
    spec = ModelSpec("missing", "/models/missing")
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(spec), timeout_s=5)

    def failed():
        return [m for m in stage.instances.entries["node-0"].models if m.name == "missing" and m.state == "failed"]

    await stage.until(failed)
    assert "no such checkpoint" in failed()[0].error
    await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("missing"), timeout_s=5)
    await stage.until(lambda: not any(m.name == "missing" for m in stage.instances.entries["node-0"].models))


async def test_unload_ends_what_outlives_the_grace_period(stage):
    await stage.submit(request("r1", [1, 2, 3], 500))
    stage.executor.gate.clear()
    await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a", grace_s=0.1), timeout_s=5)
    await asyncio.sleep(0.2)
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").error.code == ErrorCode.GONE


@pytest.mark.parametrize("asks_to_unload", [True, False])
async def test_what_follows_an_unload_that_failed_is_carried_out(stage, monkeypatch, asks_to_unload):
    """Engine and executor hold the model still: what is forgotten only could never be loaded again."""
    detach = InstanceModels._detach

    async def fail(models, name, keeper):
        monkeypatch.setattr(InstanceModels, "_detach", detach)
        raise TimeoutError("its KV blocks are still in use")

    def states():
        return [m.state for m in stage.instances.entries["node-0"].models if m.name == "a"]

    monkeypatch.setattr(InstanceModels, "_detach", fail)
    await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a"), timeout_s=5)
    await stage.until(lambda: states() == ["failed"])
    if asks_to_unload:
        await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a"), timeout_s=5)
    else:
        with pytest.raises(BusError, match="is being unloaded"):
            load = LoadModel(ModelSpec("a", "/models/a"))
            await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), load, timeout_s=5)
    await stage.until(lambda: not states())
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(ModelSpec("a", "/models/a")), timeout_s=5)
    await stage.until(lambda: states() == ["ready"])


async def test_drain_refuses_new_requests_and_finishes_old_ones(stage):
    sent = request("r1", [1, 2, 3], 100)
    await stage.submit(sent)
    await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(grace_s=10), timeout_s=5)
    with pytest.raises(BusError) as refused:
        await stage.bus.request(INSTANCE_SUBMIT.at(**IDS), request("r2", [1], 5), timeout_s=5)
    assert refused.value.code == ErrorCode.DRAINING
    await stage.until(lambda: stage.instances.entries["node-0"].state == "draining")
    async with asyncio.timeout(10):
        await stage.service.drained.wait()
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1") == expected_output(sent, 600)


async def test_a_drain_that_is_undone_in_time_changes_nothing(stage):
    stage.executor.gate.clear()
    sent = request("r1", [1, 2, 3], 20)
    await stage.submit(sent)
    await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(grace_s=10), timeout_s=5)
    await stage.until(lambda: stage.info.state == "draining")
    await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(is_undone=True), timeout_s=5)
    await stage.until(lambda: stage.info.state == "ready")
    await stage.submit(request("r2", [1], 5))
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1") and stage.end("r2"))
    assert stage.output("r1") == expected_output(sent, 600)
    await asyncio.sleep(0.2)
    assert not stage.service.drained.is_set() and stage.info.state == "ready"
    await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(), timeout_s=5)
    async with asyncio.timeout(5):
        await stage.service.drained.wait()


@pytest.mark.parametrize("why", ["drained", "SIGTERM"])
async def test_a_drain_that_is_over_cannot_be_undone(stage, why):
    if why == "drained":
        await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(), timeout_s=5)
        async with asyncio.timeout(5):
            await stage.service.drained.wait()
    else:
        await stage.service.drain_before_exit()
    with pytest.raises(BusError) as refused:
        await stage.bus.request(INSTANCE_DRAIN.at(**IDS), Drain(is_undone=True), timeout_s=5)
    assert refused.value.code == ErrorCode.CONFLICT
    await stage.until(lambda: stage.info.state == "draining")


async def test_heartbeats_come_without_traffic(stage):
    stage.reports.clear()
    await stage.until(lambda: len(stage.reports) >= 2, 4)
    assert stage.reports[-1].sequence > stage.reports[0].sequence
    assert stage.reports[-1].dispatch_freeness == float("inf")


async def test_metrics_have_the_names_that_routers_read(stage):
    await stage.submit(request("r1", [1, 2, 3], 10))
    await stage.until(lambda: stage.end("r1"))
    import urllib.request

    port = stage.instances.entries["node-0"].metrics_port
    url = f"http://127.0.0.1:{port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:generation_tokens_total",
        "vllm:inter_token_latency_seconds_bucket",
        "tideway_instance_slo_total",
        "tideway_instance_computed_tokens_total",
        "tideway_instance_interrupted_steps_total",
        "tideway_instance_host_pool_use",
        "tideway_instance_steps_in_flight_bucket",
    ):
        assert name + "{" in text, name
    assert 'vllm:generation_tokens_total{engine="node-0",model_name="a"} 10.0' in text
    latencies = [line for line in text.splitlines() if line.startswith("vllm:") and "_seconds_count{" in line]
    assert latencies and all('class="online"' in line for line in latencies)


async def test_statistics_and_objectives_reach_the_engine(stage):
    spec = ModelSpec("b", "/models/b", ttft_ms=250, tpot_ms=0)
    await stage.bus.request(INSTANCE_LOAD_MODEL.at(**IDS), LoadModel(spec), timeout_s=5)
    told = []
    with stage.service._loop.locked() as engine:
        engine.charging.set_statistics = told.append
    statistics = [ExecutionStatistics("a", 2.0, 0.5, 9), ExecutionStatistics("b", 1.0, 0.1, 3)]
    stage.bus.publish(EXECUTION_STATISTICS, ExecutionStatisticsReport("s", statistics))
    await stage.until(lambda: told == statistics)

    def is_ready():
        return any(m.name == "b" and m.state == "ready" for m in stage.instances.entries["node-0"].models)

    await stage.until(is_ready)
    queues = engine.memory.queues
    assert (queues["b"].ttft_objective_s, queues["b"].tpot_objective_s) == (0.25, 0.11)
    assert (queues["a"].ttft_objective_s, queues["a"].tpot_objective_s) == (1.5, 0.11)


async def test_finished_requests_report_their_time_on_the_device(stage):
    await stage.submit(request("r1", [1, 2, 3], 10, request_class=RequestClass.OFFLINE))
    await stage.until(lambda: any(report.finished for report in stage.reports))
    (finished,) = [f for report in stage.reports for f in report.finished]
    assert 0 < finished.device_s <= finished.execution_s


async def test_the_registry_says_where_step_times_are_from_and_what_is_free(stage, caplog):
    caplog.set_level("INFO", logger="services.worker.instance.service")

    def shown() -> dict[str, str]:
        return {model.name: model.cost_model for model in stage.info.models if model.state == "ready"}

    await stage.until(lambda: "a" in shown())
    assert shown()["a"] == "none" and stage.info.dispatch_freeness == math.inf
    await stage.submit(request("r1", [1, 2, 3], 200))
    await stage.until(lambda: shown()["a"] == "live")
    assert "step times of a: live" in caplog.text


async def test_an_engine_that_fails_makes_the_instance_give_up(stage):
    def fail(plan):
        raise RuntimeError("device lost")

    stage.executor.launch = fail
    await stage.submit(request("r1", [1, 2, 3], 10))
    async with asyncio.timeout(10):
        await stage.service.failed.wait()
    assert "device lost" in stage.service.problems()[0]


async def test_a_replay_larger_than_a_message_is_cut_and_continues():
    from services.worker.instance.output_log import cut
    from shared.messages.requests import TokenLogprob

    logprob = TokenLogprob(-1.0, tuple(range(10**6, 10**6 + 20)), (-1.5,) * 20, 1)
    whole = TokenEntry(
        request_id="r1",
        epoch=0,
        offset=5,
        tokens=pack_tokens(list(range(500))),
        finish_reason=FinishReason.LENGTH,
        logprobs=(logprob,) * 500,
    )
    part, num_bytes = cut(whole, 50_000)
    assert part.finish_reason is None and part.offset == 5
    assert 0 < len(part.tokens) // 4 == len(part.logprobs) < 500
    assert len(msgspec.msgpack.encode(part)) <= num_bytes + 100 <= 50_100
    assert cut(whole, 10**7)[0] is whole
