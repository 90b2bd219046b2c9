"""Whatever happens to instances, scheduler and NATS: each stream shows every token once, or ends with a clear error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.streams import placing, recovery, stream
from shared import streams
from shared.bus.codec import encode, sealed
from shared.bus.interface import ServiceError
from shared.messages.catalogue import GATEWAY_EVENTS, GATEWAY_FRAMES, INSTANCE_EXITED, SCHEDULER_ANNOUNCE
from shared.messages.cluster import InstanceExited, LeaseHolder, ModelSpec
from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    ReplayReply,
    RequestClass,
    TokenFrame,
    pack_tokens,
)
from shared.messages.timeline import EventKind, RequestEvent, RequestEvents
from shared.runtime.settings import BusSettings
from shared.streams import MAX_SUSPICIONS
from tests.conftest import NatsServer
from tests.gateway.conftest import MODEL, Reader, Stack, running_stack
from tests.gateway.peer import prior_tokens, until
from tests.stalls import Stopwatch

TEXT = "one two three four five six"


@pytest.fixture
async def manual(stack: Stack, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Frames come when the test says so; however long that takes, none but an impatient one takes a stream for quiet."""
    if "impatient" not in request.fixturenames:
        monkeypatch.setattr(stream, "QUIET_S", 60.0)
        monkeypatch.setattr(recovery, "QUIET_S", 60.0)
    stack.peer.automatic = False
    return stack


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "TICK_S", 0.02)
    monkeypatch.setattr(stream, "QUIET_S", 0.2)
    monkeypatch.setattr(recovery, "QUIET_S", 0.2)
    monkeypatch.setattr(recovery, "NATS_LOSS_LIMIT_S", 1.0)
    monkeypatch.setattr(placing, "PATIENCE_S", 0.6)
    monkeypatch.setattr(placing, "RECOVERY_PATIENCE_S", 1.0)
    monkeypatch.setattr(placing, "SCHEDULER_TIMEOUT_S", 0.3)


async def begun(stack: Stack, num_tokens: int = 3, **options: str) -> tuple[Reader, GenerationRequest, list[int]]:
    """A stream of TEXT whose first tokens have reached the client."""
    tokens = [*stack.ids(TEXT), stack.eos]
    number = len(stack.peer.submitted)
    reader = stack.read(stream_options={"include_usage": True})
    request = await stack.next_request(number)
    stack.peer.emit(request, 0, tokens[:num_tokens], **options)
    await until(lambda: reader.text == stack.tokenizer.decode(tokens[:num_tokens]), "first tokens")
    return reader, request, tokens


async def finished_whole(reader: Reader, tokens: list[int]) -> None:
    await reader.end()
    assert reader.text == TEXT
    assert reader.is_complete
    assert reader.error is None
    assert reader.chunks[-1]["usage"]["completion_tokens"] == len(tokens)


def continue_from_prior(stack: Stack, request: GenerationRequest, tokens: list[int], sender: str = "b") -> None:
    prior = prior_tokens(request)
    assert prior == tokens[: len(prior)]
    stack.peer.emit(request, len(prior), tokens[len(prior) :], FinishReason.STOP, sender=sender)


async def test_a_lost_instance_is_replaced_without_a_repeated_or_missing_token(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    manual.peer.num_cached_tokens = 99
    manual.peer.lose(request, request.epoch)
    manual.peer.lose(request, request.epoch)
    again = await manual.next_request(1)
    assert (again.request_id, again.epoch, prior_tokens(again)) == (request.request_id, PLACEMENT_EPOCHS, tokens[:3])
    assert again.sampling == request.sampling
    assert again.waited_s > 0
    assert again.timeout_s < 600
    manual.peer.emit(request, 3, tokens[3:5], sender="a")  # the old owner is not dead after all
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 2, "the same loss counts once"
    assert reader.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("how", ["exited", "vanished", "restarted"])
async def test_an_instance_that_disappears_loses_its_streams(manual: Stack, how: str) -> None:
    reader, _, tokens = await begun(manual)
    if how == "exited":
        manual.peer.bus.publish(INSTANCE_EXITED, InstanceExited("a", "another incarnation", "node", -9))
        manual.peer.bus.publish(INSTANCE_EXITED, InstanceExited("a", "1", "node", -9))
    elif how == "vanished":
        await manual.peer.remove_instance("a")
    else:
        await manual.peer.add_instance("a", MODEL, incarnation="2")
    again = await manual.next_request(1)
    assert again.epoch == PLACEMENT_EPOCHS
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)


async def test_an_instance_that_gives_up_a_request(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    manual.peer.emit(request, 3, [], FinishReason.ERROR, error=ErrorInfo(ErrorCode.DRAINING, "leaving"))
    again = await manual.next_request(1)
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)


async def test_the_last_entry_was_lost_with_its_instance(manual: Stack) -> None:
    tokens = [*manual.ids(TEXT), manual.eos]
    reader = manual.read(stream_options={"include_usage": True})
    request = await manual.next_request()
    manual.peer.emit(request, 0, tokens)
    await until(lambda: reader.text == TEXT, "text")
    manual.peer.lose(request, 0)
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 1


async def test_no_number_of_lost_instances_alone_ends_a_request(monkeypatch: pytest.MonkeyPatch, manual: Stack) -> None:
    monkeypatch.setattr(streams, "MAX_PAUSE_S", 0.0)
    reader, request, tokens = await begun(manual)
    for number in range(4 * MAX_SUSPICIONS):
        manual.peer.lose(request, number * PLACEMENT_EPOCHS)
        request = await manual.next_request(number + 1)
    continue_from_prior(manual, request, tokens)
    await finished_whole(reader, tokens)


@pytest.mark.parametrize("first", ["scheduler", "node"])
async def test_a_request_over_which_every_instance_crashes_fails(
    monkeypatch: pytest.MonkeyPatch, manual: Stack, first: str
) -> None:
    """Whoever tells first of the crash."""
    monkeypatch.setattr(streams, "MAX_PAUSE_S", 0.0)
    reader, request, _ = await begun(manual)
    for number in range(MAX_SUSPICIONS + 1):
        exited = InstanceExited("a", "1", "node", -11, ("another", request.request_id))
        if first == "node":
            manual.peer.bus.publish(INSTANCE_EXITED, exited)
        manual.peer.lose(request, number * PLACEMENT_EPOCHS)
        await until(lambda n=number: len(manual.peer.submitted) > n + 1 or reader.error, "placed again")
        if first == "scheduler":
            manual.peer.bus.publish(INSTANCE_EXITED, exited)
    await reader.end()
    assert reader.error is not None
    assert reader.error["code"] == "instances_crashed" and "6 instances in turn" in reader.error["message"]
    await until(lambda: request.request_id in manual.peer.cancelled, "cancelled wherever it is")


async def test_duplicates_gaps_and_old_epochs(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    entries = [manual.peer.entry(request, 3, tokens[3:7]), manual.peer.entry(request, 3, tokens[3:7])]
    manual.peer.send(request.gateway_id, TokenFrame("a", [entries[0], entries[1]]))
    manual.peer.emit(request, 1, tokens[1:5])
    rest = manual.peer.entry(request, 7, tokens[7:], FinishReason.STOP)
    manual.peer.replays["a"] = ReplayReply([rest], [])
    manual.peer.emit(request, 9, tokens[9:10])  # tokens 7 and 8 are missing
    await finished_whole(reader, tokens)
    [(instance_id, query)] = manual.peer.replay_queries
    assert instance_id == "a"
    assert [(p.request_id, p.epoch, p.next_offset) for p in query.positions] == [(request.request_id, 0, 7)]


async def test_a_frame_that_was_damaged_on_the_way_is_replayed(manual: Stack) -> None:
    """One flipped bit of a token would be another word."""
    reader, request, tokens = await begun(manual)
    frame = TokenFrame("a", [manual.peer.entry(request, 3, tokens[3:7])])
    body = bytearray(sealed(encode(frame)))
    body[body.index(pack_tokens(tokens[3:7]))] ^= 1
    manual.peer.bus._client.send(GATEWAY_FRAMES.at(gateway_id=request.gateway_id).subject, "", b"", bytes(body))
    manual.peer.replays["a"] = ReplayReply([manual.peer.entry(request, 3, tokens[3:], FinishReason.STOP)], [])
    manual.peer.emit(request, 7, tokens[7:9])
    await finished_whole(reader, tokens)
    [(_, query)] = manual.peer.replay_queries
    assert [p.next_offset for p in query.positions] == [3]
    await manual.until_metrics('tideway_bus_dropped_total{reason="damaged",subject="gateway.{gateway_id}.frames"} 1.0')


async def test_an_owner_of_an_old_epoch_is_told_to_stop(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    manual.peer.emit(request, 3, tokens[3:5], sender="b", epoch=PLACEMENT_EPOCHS)
    await until(lambda: reader.text == manual.tokenizer.decode(tokens[:5]), "the new owner's tokens")
    manual.peer.emit(request, 3, tokens[3:4], sender="a", epoch=0)
    await until(lambda: manual.peer.instance_cancelled, "cancel")
    assert manual.peer.instance_cancelled == [("a", request.request_id)]
    assert manual.peer.cancelled_epochs == [0], "and not what it may get in another epoch"
    manual.peer.emit(request, 5, tokens[5:], FinishReason.STOP, sender="b", epoch=PLACEMENT_EPOCHS)
    await finished_whole(reader, tokens)


async def test_a_silent_stream_is_asked_after(impatient: None, manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    rest = manual.peer.entry(request, 3, tokens[3:], FinishReason.STOP)
    manual.peer.replays["a"] = ReplayReply([rest], [])  # its frames were lost
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 1


async def test_a_silent_stream_that_its_instance_does_not_know_is_placed_again(impatient: None, manual: Stack) -> None:
    reader, _, tokens = await begun(manual)
    again = await manual.next_request(1)
    assert again.epoch == PLACEMENT_EPOCHS
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)


async def test_a_request_nobody_has_heard_of_is_submitted_again_in_its_epoch(impatient: None, manual: Stack) -> None:
    reader = manual.read()
    await manual.next_request()
    again = await manual.next_request(1)
    assert again.epoch == 0
    tokens = [*manual.ids(TEXT), manual.eos]
    manual.peer.emit(again, 0, tokens, FinishReason.STOP)
    await reader.end()
    assert reader.text == TEXT


async def test_an_instance_that_has_a_request_of_a_dead_scheduler_is_found(impatient: None, manual: Stack) -> None:
    reader = manual.read()
    request = await manual.next_request()
    await manual.peer.stop_scheduler()
    tokens = [*manual.ids(TEXT), manual.eos]
    manual.peer.replays["a"] = ReplayReply([manual.peer.entry(request, 0, tokens[:2])], [])
    await until(lambda: reader.text, "tokens by replay")
    manual.peer.emit(request, 2, tokens[2:], FinishReason.STOP)
    await reader.end()
    assert reader.text == TEXT
    assert not manual.peer.submitted_to


async def test_a_new_scheduler_hears_of_all_unfinished_requests(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    waiting = manual.read()
    queued = await manual.next_request(1)
    manual.peer.bus.publish(SCHEDULER_ANNOUNCE, LeaseHolder("second", 2))
    await until(lambda: len(manual.peer.submitted) == 4, "both announced")
    announced = {again.request_id: again for again in manual.peer.submitted[2:]}
    assert announced[request.request_id].epoch == 0
    assert prior_tokens(announced[request.request_id]) == tokens[:3]
    assert prior_tokens(announced[queued.request_id]) == []
    assert announced[request.request_id].ttft_s > 0 > announced[queued.request_id].ttft_s
    manual.peer.emit(request, 3, tokens[3:], FinishReason.STOP)
    manual.peer.emit(queued, 0, tokens, FinishReason.STOP)
    await finished_whole(reader, tokens)
    await waiting.end()
    assert waiting.is_complete


async def test_a_new_scheduler_that_refuses_for_good_ends_what_nobody_runs(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    waiting = manual.read()
    await manual.next_request(1)
    manual.peer.refusal = ServiceError.of(ErrorCode.TOO_LONG, "600 tokens were asked for", "max_tokens")
    manual.peer.bus.publish(SCHEDULER_ANNOUNCE, LeaseHolder("second", 2))
    await waiting.end()
    assert waiting.status == 400 and b"context_length_exceeded" in waiting.failed_body
    manual.peer.emit(request, 3, tokens[3:], FinishReason.STOP)
    await finished_whole(reader, tokens)


async def test_a_new_scheduler_hears_of_what_the_last_one_takes_with_its_last_word(
    monkeypatch: pytest.MonkeyPatch, manual: Stack
) -> None:
    monkeypatch.setattr("services.gateway.streams.stream.QUIET_S", 60.0)
    manual.peer.may_answer.clear()
    reader = manual.read()
    request = await manual.next_request()
    manual.peer.bus.publish(SCHEDULER_ANNOUNCE, LeaseHolder("second", 2))
    await asyncio.sleep(0.05)
    manual.peer.may_answer.set()
    await until(lambda: len(manual.peer.submitted) == 2, "announced though it was being placed")
    assert manual.peer.submitted[1].request_id == request.request_id
    manual.peer.emit(request, 0, [*manual.ids(TEXT), manual.eos], FinishReason.STOP)
    await reader.end()


async def test_without_a_scheduler_requests_go_straight_to_instances(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, scheduler=False, instance=False) as stack:
        stack.say(TEXT)
        await stack.peer.add_instance("busy", MODEL, num_running=5)
        await stack.peer.add_instance("idle", MODEL)
        await stack.peer.add_instance("other", "another-model")
        await stack.peer.add_instance("leaving", MODEL, state="draining")
        catalog = stack.gateway.context.catalog
        await until(lambda: len(catalog.instances) == 4, "instances")
        answer = await stack.post("/v1/completions", prompt="x", max_tokens=100)
        assert answer.json()["choices"][0]["text"] == TEXT
        assert set(stack.peer.submitted_to) == {"idle"}
        stack.peer.automatic = False
        reader = stack.read()
        await until(lambda: len(stack.peer.submitted_to["idle"]) == 2, "bypass")
        await stack.peer.remove_instance("idle")
        await until(lambda: "busy" in stack.peer.submitted_to, "placed again")
        [again] = stack.peer.submitted_to["busy"]
        assert again.epoch > 0, "its owner was known though no frame had come"
        stack.peer.emit(again, 0, [*stack.ids(TEXT), stack.eos], FinishReason.STOP, sender="busy")
        await reader.end()
        assert reader.text == TEXT
        metrics = (await stack.client.get("/metrics")).text
        assert "tideway_gateway_bypass_placements_total 3.0" in metrics


async def test_without_a_scheduler_a_lost_request_goes_to_who_keeps_its_kv(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, scheduler=False, instance=False) as stack:
        peer, catalog = stack.peer, stack.gateway.context.catalog
        await peer.add_instance("first", MODEL)
        await until(lambda: len(catalog.instances) == 1, "an instance")
        peer.automatic = False
        reader = stack.read()
        await until(lambda: peer.submitted_to.get("first"), "bypass")
        [request] = peer.submitted_to["first"]
        tokens = [*stack.ids(TEXT), stack.eos]
        peer.emit(request, 0, tokens[:3], sender="first")
        await peer.add_instance("holder", MODEL, num_running=5)
        await peer.add_instance("idle", MODEL)
        await until(lambda: len(catalog.instances) == 3 and reader.text, "others, and tokens")
        event = RequestEvent(request.request_id, request.epoch, EventKind.BACKED_UP, 0.0, "", "holder")
        peer.bus.publish(GATEWAY_EVENTS.at(gateway_id=request.gateway_id), RequestEvents("first", [event]))
        await peer.remove_instance("first")
        await until(lambda: len(peer.submitted_to) == 2, "placed again")
        assert "idle" not in peer.submitted_to
        [again] = peer.submitted_to["holder"]
        peer.emit(again, 3, tokens[3:], FinishReason.STOP, sender="holder")
        await reader.end()
        assert reader.text == TEXT


async def test_a_hung_scheduler_is_passed_by(impatient: None, stack: Stack) -> None:
    stack.say(TEXT)
    stack.peer.hang = True
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=100)
    assert answer.json()["choices"][0]["text"] == TEXT
    [request] = stack.peer.submitted_to["a"]
    assert request.epoch >= PLACEMENT_EPOCHS, "it outranks what the scheduler may have dispatched unseen"
    with Stopwatch() as watch:
        await stack.post("/v1/completions", prompt="x", max_tokens=100)
    assert watch.seconds < 0.3, "the next request does not wait for it"


async def test_nobody_can_take_a_request(impatient: None, nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, scheduler=False, instance=False) as stack:
        answer = await stack.post("/v1/completions", prompt="x")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        await stack.peer.add_instance("a", MODEL)
        await until(lambda: stack.gateway.context.catalog.instances, "instance")
        stack.peer.instance_refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
        answer = await stack.post("/v1/completions", prompt="x")
        assert answer.status_code == 429


async def test_a_client_that_hangs_up_is_cancelled_everywhere(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    await reader.hang_up()
    await until(lambda: manual.peer.cancelled and manual.peer.instance_cancelled, "cancels")
    assert manual.peer.cancelled == [request.request_id]
    assert manual.peer.instance_cancelled == [("a", request.request_id)]
    manual.peer.emit(request, 3, tokens[3:5])  # the cancel was lost: the instance goes on
    await until(lambda: len(manual.peer.instance_cancelled) == 2, "another cancel")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_hangs_up_before_the_first_token(manual: Stack, is_stream: bool) -> None:
    call = asyncio.create_task(manual.post("/v1/completions", prompt="x", stream=is_stream))
    request = await manual.next_request()
    call.cancel()
    await until(lambda: manual.peer.cancelled == [request.request_id], "cancel")
    await until(lambda: manual.gateway.context.admission.num_in_flight[RequestClass.ONLINE] == 0, "ticket")
    assert "tideway_gateway_disconnected_clients_total 1.0" in (await manual.client.get("/metrics")).text


async def test_a_client_that_hangs_up_while_its_request_is_placed(manual: Stack) -> None:
    manual.peer.hang = True
    call = asyncio.create_task(manual.post("/v1/completions", prompt="x", n=3))
    request = await manual.next_request(2)
    call.cancel()
    await until(lambda: len(set(manual.peer.cancelled)) == 3, "cancels")
    assert request.request_id in manual.peer.cancelled


async def test_overload(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, max_in_flight=3) as stack:
        stack.peer.automatic = False
        readers = [stack.read(), stack.read(n=2)]
        await stack.next_request(2)
        answer = await stack.post("/v1/completions", prompt="x")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        answer = await stack.post("/v1/completions", prompt="x", n=4)
        assert answer.status_code == 400, "it would never fit"
        for request in stack.peer.submitted:
            stack.peer.emit(request, 0, stack.ids("x"), FinishReason.STOP)
        for reader in readers:
            await reader.end()
            assert reader.is_complete
        stack.say("free again")
        stack.peer.automatic = True
        assert (await stack.post("/v1/completions", prompt="x")).status_code == 200


@pytest.fixture
async def own_nats(fresh_nats: NatsServer, checkpoint: Path) -> AsyncIterator[tuple[Stack, NatsServer]]:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(BusSettings(nats_url=fresh_nats.url), specs) as stack:
        stack.peer.automatic = False
        yield stack, fresh_nats


async def test_nats_is_killed_and_restarted_during_a_stream(own_nats: tuple[Stack, NatsServer]) -> None:
    stack, nats = own_nats
    reader, request, tokens = await begun(stack)
    nats.kill()
    await until(lambda: not stack.gateway.context.bus.is_connected, "loss noticed")
    stack.peer.replays["a"] = ReplayReply([stack.peer.entry(request, 3, tokens[3:], FinishReason.STOP)], [])
    await asyncio.to_thread(nats.start)
    await finished_whole(reader, tokens)


async def test_nats_away_too_long_ends_streams_with_an_error(
    impatient: None, own_nats: tuple[Stack, NatsServer]
) -> None:
    stack, nats = own_nats
    reader, _, tokens = await begun(stack)
    nats.kill()
    await reader.end()
    assert reader.text == stack.tokenizer.decode(tokens[:3])
    assert reader.error is not None
    assert reader.error["code"] == "unavailable"
    assert not reader.is_complete
    answer = await stack.post("/v1/completions", prompt="x")
    assert answer.status_code == 503
    assert (await stack.client.get("/health")).status_code == 200
    assert (await stack.client.get("/ready")).json()["problems"]
