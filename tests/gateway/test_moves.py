"""A request that moves between instances: its stream follows, and whatever its owners do afterwards changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.streams import recovery
from shared.messages.catalogue import INSTANCE_EXITED
from shared.messages.cluster import InstanceExited, ModelSpec
from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    FinishReason,
    GenerationRequest,
    MigratedRequest,
    ReplayReply,
)
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Reader, Stack, running_stack
from tests.gateway.peer import prior_tokens, until
from tests.gateway.test_recovery import begun, continue_from_prior, finished_whole, impatient

__all__ = ["impatient"]


@pytest.fixture
async def manual(stack: Stack) -> AsyncIterator[Stack]:
    """Two instances that serve the model; nothing is answered by itself."""
    await stack.peer.add_instance("b", MODEL)
    await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")
    stack.peer.automatic = False
    yield stack


def leave(stack: Stack, instance_id: str, exit_code: int = 0) -> None:
    stack.peer.bus.publish(INSTANCE_EXITED, InstanceExited(instance_id, "1", "node", exit_code))


async def moved(stack: Stack) -> tuple[Reader, GenerationRequest, list[int]]:
    """A stream that has gone from instance a to b after three tokens, and the gateway knows."""
    reader, request, tokens = await begun(stack)
    stack.peer.emit(request, 3, [], sender="b", epoch=1)
    await until(lambda: owner_of(stack, request) == "b", "the new owner")
    return reader, request, tokens


def owner_of(stack: Stack, request: GenerationRequest) -> str | None:
    return stack.gateway.context.table.streams[request.request_id].owner


async def test_a_stream_follows_its_request(manual: Stack) -> None:
    reader, request, tokens = await moved(manual)
    manual.peer.emit(request, 3, [tokens[0]], sender="a", epoch=0)  # a frame that was under way
    manual.peer.emit(request, 3, [tokens[0]], sender="c", epoch=1)  # somebody else in the owner's epoch
    leave(manual, "a", exit_code=-9)
    await manual.peer.remove_instance("a")
    manual.peer.emit(request, 3, tokens[3:], FinishReason.STOP, sender="b", epoch=1)
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 1, "who handed the request over lost nothing"
    assert manual.peer.instance_cancelled == [], "a would pass a cancel on to b"
    assert manual.peer.replay_queries == []
    assert "tideway_gateway_moved_streams_total 1.0" in (await manual.client.get("/metrics")).text


async def test_a_new_owner_that_dies_is_replaced_beyond_all_its_placement(manual: Stack) -> None:
    reader, request, tokens = await moved(manual)
    manual.peer.emit(request, 3, tokens[3:5], sender="b", epoch=1)
    manual.peer.lose(request, 0)  # an old story: the scheduler had not heard of the move
    leave(manual, "b", exit_code=-9)
    again = await manual.next_request(1)
    assert (again.epoch, prior_tokens(again)) == (PLACEMENT_EPOCHS, tokens[:5])
    manual.peer.emit(request, 5, tokens[5:], FinishReason.STOP, sender="a", epoch=2)
    continue_from_prior(manual, again, tokens, sender="a")
    await finished_whole(reader, tokens)


async def test_what_the_new_owner_is_ahead_of_is_asked_of_it(manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    manual.peer.replays["b"] = ReplayReply([manual.peer.entry(request, 3, tokens[3:7], epoch=1)], [])
    manual.peer.emit(request, 6, [], sender="b", epoch=1)  # the last frames of a are lost
    await until(lambda: reader.text == manual.tokenizer.decode(tokens[:7]), "tokens by replay")
    [(instance_id, query)] = manual.peer.replay_queries
    assert (instance_id, query.positions[0].epoch, query.positions[0].next_offset) == ("b", 1, 3)
    manual.peer.emit(request, 7, tokens[7:], FinishReason.STOP, sender="b", epoch=1)
    await finished_whole(reader, tokens)


async def test_an_owner_tells_whom_it_handed_the_request_to(impatient: None, manual: Stack) -> None:
    reader, request, tokens = await begun(manual)
    await manual.peer.add_instance("c", MODEL)
    rest = manual.peer.entry(request, 3, tokens[3:], FinishReason.STOP, epoch=2)
    manual.peer.replays = {  # all frames of the new owners are lost
        "a": ReplayReply([], [], [MigratedRequest(request.request_id, "b", 1)]),
        "b": ReplayReply([], [], [MigratedRequest(request.request_id, "c", 2)]),
        "c": ReplayReply([rest], []),
    }
    await finished_whole(reader, tokens)
    asked = [(instance_id, query.positions[0].epoch) for instance_id, query in manual.peer.replay_queries]
    assert asked == [("a", 0), ("b", 1), ("c", 2)]
    assert len(manual.peer.submitted) == 1


@pytest.mark.parametrize("destination", ["b", "nobody"], ids=["does not know it", "is not there"])
async def test_a_request_whose_new_owner_is_none_is_placed_again(
    impatient: None, manual: Stack, destination: str
) -> None:
    reader, request, tokens = await begun(manual)
    moved_on = MigratedRequest(request.request_id, destination, PLACEMENT_EPOCHS + 1)
    manual.peer.replays["a"] = ReplayReply([], [request.request_id], [moved_on])
    again = await manual.next_request(1)
    assert again.epoch == 2 * PLACEMENT_EPOCHS, "it outranks whom the request was handed to"
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)


async def test_an_owner_that_names_nobody_who_is_there_and_says_nothing_new_has_lost_the_request(
    impatient: None, manual: Stack
) -> None:
    reader, request, tokens = await begun(manual)
    manual.peer.replays["a"] = ReplayReply([], [], [MigratedRequest(request.request_id, "nobody", 0)])
    again = await manual.next_request(1)
    assert again.epoch == PLACEMENT_EPOCHS
    continue_from_prior(manual, again, tokens)
    await finished_whole(reader, tokens)


async def test_who_handed_a_request_over_is_not_taken_for_its_owner(impatient: None, manual: Stack) -> None:
    """No scheduler answers; of those that are then asked for the stream, one says whither it has moved, which is no news."""
    reader, request, tokens = await begun(manual)
    await manual.peer.stop_scheduler()
    rest = manual.peer.entry(request, 3, tokens[3:], FinishReason.STOP, epoch=1)
    manual.peer.replays = {
        "a": ReplayReply([], [], [MigratedRequest(request.request_id, "b", 0)]),
        "b": ReplayReply([rest], []),
    }
    manual.gateway.context.table.streams[request.request_id].owned_by(None)
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 1


@pytest.mark.parametrize("how", ["exited", "vanished"])
async def test_an_owner_leaves_in_order_before_its_successor_has_spoken(manual: Stack, how: str) -> None:
    reader, request, tokens = await begun(manual)
    if how == "exited":
        leave(manual, "a")
    else:
        await manual.peer.add_instance("a", MODEL, state="draining")
        await manual.peer.remove_instance("a")
        await until(lambda: "a" not in manual.gateway.context.catalog.instances, "removal")
    manual.peer.emit(request, 3, tokens[3:4], sender="a", epoch=0)  # its last frame, which comes late
    manual.peer.emit(request, 4, tokens[4:], FinishReason.STOP, sender="b", epoch=1)
    await finished_whole(reader, tokens)
    assert len(manual.peer.submitted) == 1


async def test_an_owner_leaves_in_order_and_nobody_speaks(
    impatient: None, nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs) as stack:
        stack.peer.automatic = False
        await stack.peer.add_instance("b", MODEL)
        first, request, tokens = await begun(stack)
        second, other, _ = await begun(stack)
        await stack.peer.stop_scheduler()
        await stack.peer.remove_instance("a", is_clean=False)
        rest = stack.peer.entry(request, 3, tokens[3:], FinishReason.STOP, epoch=1)
        stack.peer.replays["b"] = ReplayReply([rest], [other.request_id])
        leave(stack, "a")
        await finished_whole(first, tokens)
        await until(lambda: "b" in stack.peer.submitted_to, "the one that nobody has is placed again")
        [again] = stack.peer.submitted_to["b"]
        assert again.request_id == other.request_id
        assert again.epoch >= PLACEMENT_EPOCHS
        continue_from_prior(stack, again, tokens)
        await finished_whole(second, tokens)


async def test_requests_that_cannot_be_placed_are_in_nobodys_way(
    impatient: None, monkeypatch: pytest.MonkeyPatch, nats_settings: BusSettings, checkpoint: Path
) -> None:
    monkeypatch.setattr(recovery, "MAX_CONCURRENT_RECOVERIES", 1)
    specs = [ModelSpec(name, str(checkpoint)) for name in (MODEL, "other")]
    async with running_stack(nats_settings, specs) as stack:
        stack.peer.automatic = False
        await stack.peer.add_instance("b", MODEL)
        reader, _, tokens = await begun(stack)
        stuck = stack.read(model="other")
        request = await stack.next_request(1)
        stack.peer.emit(request, 0, tokens[:1])
        await until(lambda: stuck.text, "first token")
        await stack.peer.stop_scheduler()
        await stack.peer.remove_instance("a")
        await until(lambda: "b" in stack.peer.submitted_to, "placed again beside one that waits")
        continue_from_prior(stack, stack.peer.submitted_to["b"][0], tokens)
        await finished_whole(reader, tokens)
        await stuck.end()
        assert stuck.error is not None and stuck.error["code"] == "unavailable"
