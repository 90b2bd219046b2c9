"""What gateways and schedulers rely on, of instances of every engine, as far as its `lacks` say that it can."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.bus.interface import BusError
from shared.engines import capabilities
from shared.messages.admin import Drain
from shared.messages.catalogue import (
    INSTANCE_CANCEL,
    INSTANCE_DRAIN,
    INSTANCE_HELD,
    INSTANCE_REPLAY,
    INSTANCE_SUBMIT,
)
from shared.messages.requests import (
    PLACE_AGAIN_CODES,
    Adapter,
    Cancel,
    ErrorCode,
    FinishReason,
    ListHeldRequests,
    ReplayQuery,
    RequestClass,
    StreamPosition,
    pack_tokens,
    unpack_tokens,
)
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.engines.engine_stage import KINDS, instance_of
from tests.worker.instance_stage import IDS


@pytest.fixture(params=KINDS)
async def stage(request, nats_settings):
    async with instance_of(request.param, nats_settings) as stage:
        yield stage


async def ask(stage, endpoint, query):
    return await stage.bus.request(endpoint.at(**IDS), query, timeout_s=5)


async def test_a_request_streams_its_tokens_and_ends_and_is_reported(stage):
    sent = request("r1", [1, 2, 3, 4, 5], 20)
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1") == expected_output(sent, 600)
    end = stage.end("r1")
    assert end.finish_reason == FinishReason.LENGTH and end.timing.decode_s > 0
    await stage.until(lambda: any("r1" in report.ended for report in stage.reports))
    assert any("r1" in report.admitted for report in stage.reports)
    finished = [f for report in stage.reports for f in report.finished]
    assert [(f.model, f.prompt_tokens, f.output_tokens) for f in finished] == [("a", 5, 20)]


async def test_a_stop_token_ends_it(stage):
    free = expected_output(request("r0", [9, 8], 40), 600)
    sent = request("r1", [9, 8], 40, stop_token_ids=(free[12],))
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1") == expected_output(sent, 600)
    assert stage.end("r1").finish_reason == FinishReason.STOP


async def test_requests_beyond_the_rows_wait_and_all_end(stage):
    sent = [request(f"r{i}", [i, 2, 3], 10) for i in range(40)]
    await asyncio.gather(*(stage.submit(one) for one in sent))
    await stage.until(lambda: all(stage.end(one.request_id) for one in sent))
    assert all(stage.output(one.request_id) == expected_output(one, 600) for one in sent)


async def test_a_request_goes_on_after_its_prior_output(stage):
    whole = expected_output(request("r1", [1, 2, 3], 60), 600)
    await stage.submit(request("r1", [1, 2, 3], 60, epoch=64, prior=pack_tokens(whole[:25])))
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1", offset=25) == whole[25:]


async def test_refusals_are_typed(stage):
    lacks = frozenset(stage.info.lacks)
    adapted = request("x4", [1], 5, adapter=Adapter("x", "1", "/nowhere"))
    cases = {
        ErrorCode.GONE: request("x1", [1], 5, model="nobody"),
        ErrorCode.TOO_LONG: request("x2", [1] * 700, 5),
        ErrorCode.BAD_REQUEST: adapted if capabilities.refusal(adapted, lacks) else request("x3", [], 5),
    }
    for code, sent in cases.items():
        with pytest.raises(BusError) as refused:
            await ask(stage, INSTANCE_SUBMIT, sent)
        assert refused.value.code == code


async def test_cancel_ends_a_request_and_frees_what_it_held(stage):
    sent = request("r1", [1, 2], 500)
    await stage.submit(sent)
    await stage.until(lambda: len(stage.output("r1")) > 3)
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").finish_reason == FinishReason.CANCELLED
    assert stage.output("r1") == expected_output(sent, 600)[: len(stage.output("r1"))]
    assert (await ask(stage, INSTANCE_HELD, ListHeldRequests())).requests == []
    num_tokens = len(stage.output("r1"))
    await asyncio.sleep(0.1)
    assert len(stage.output("r1")) == num_tokens < 500


async def test_a_deadline_ends_a_request_with_its_reason(stage):
    await stage.submit(request("r1", [1, 2], 590, timeout_s=0.1))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)
    if stage.end("r1").finish_reason == FinishReason.DEADLINE:
        assert stage.end("r1").error.code == ErrorCode.DEADLINE


async def test_the_same_epoch_again_changes_nothing_and_a_higher_one_replaces(stage):
    sent = request("r1", [1, 2, 3], 400)
    await stage.submit(sent)
    await stage.submit(sent)
    await stage.until(lambda: len(stage.output("r1")) > 5)
    prior = expected_output(sent, 600)[:5]
    await stage.submit(msgspec.structs.replace(sent, epoch=64, prior=pack_tokens(prior)))
    await stage.until(lambda: stage.end("r1"))
    stage.entries = [entry for entry in stage.entries if entry.epoch == 64]
    assert stage.output("r1", offset=5) == expected_output(sent, 600)[5:]


async def test_replay_gives_what_a_gateway_missed(stage):
    sent = request("r1", [1, 2, 3], 30)
    await stage.submit(sent)
    await stage.until(lambda: stage.end("r1"))
    positions = [StreamPosition("r1", 0, 10), StreamPosition("r1", 7, 0), StreamPosition("nobody", 0, 0)]
    reply = await ask(stage, INSTANCE_REPLAY, ReplayQuery(positions))
    (entry,) = reply.entries
    assert (entry.offset, unpack_tokens(entry.tokens)) == (10, expected_output(sent, 600)[10:])
    assert entry.finish_reason == FinishReason.LENGTH
    assert reply.unknown == ["r1", "nobody"]


async def test_what_is_held_is_listed_and_loads_the_instance(stage):
    await stage.submit(request("r1", [1, 2], 500))
    await stage.submit(request("r2", [3], 500, request_class=RequestClass.OFFLINE))
    held = {one.request_id: one for one in (await ask(stage, INSTANCE_HELD, ListHeldRequests())).requests}
    assert held["r1"].is_online and not held["r2"].is_online and held["r1"].model == "a"
    await stage.until(lambda: any(m.num_offline == 1 for report in stage.reports for m in report.models))
    await stage.until(lambda: stage.reports[-1].num_running == 2)
    assert stage.reports[-1].dispatch_freeness < float("inf")


async def test_a_drained_instance_ends_what_it_holds_or_gives_it_up_and_takes_no_more(stage):
    await stage.submit(request("r1", [1, 2], 500))
    await stage.until(lambda: len(stage.output("r1")) > 3)
    await ask(stage, INSTANCE_DRAIN, Drain(0.05))
    with pytest.raises(BusError) as refused:
        await ask(stage, INSTANCE_SUBMIT, request("r2", [1], 5))
    assert refused.value.code == ErrorCode.DRAINING
    await asyncio.wait_for(stage.service.drained.wait(), 20)
    end = stage.end("r1")
    if end is not None and end.finish_reason == FinishReason.ERROR:
        assert end.error.code in PLACE_AGAIN_CODES
    assert stage.info.state == "draining"
