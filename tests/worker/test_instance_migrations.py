"""Requests that come to an instance and leave it: the test plays the other instance, the scheduler and the gateway. KV stays
where it is here (test_migration_e2e.py moves it): requests move before they have any."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.worker.instance import models as instance_models
from services.worker.kv_transport import KvTransport, TransferError, TransferReason
from shared.bus.interface import ServiceError
from shared.bus.nats_bus import NatsBus
from shared.engine.engine import Engine
from shared.messages.admin import UnloadModel
from shared.messages.catalogue import (
    INSTANCE_CANCEL,
    INSTANCE_COMMIT,
    INSTANCE_HELD,
    INSTANCE_OWNS,
    INSTANCE_REPLAY,
    INSTANCE_UNLOAD_MODEL,
)
from shared.messages.cluster import MigrationOutcome
from shared.messages.migration import (
    Commit,
    Committed,
    MigrationReason,
    OwnsQuery,
    SequenceProgress,
)
from shared.messages.requests import (
    Cancel,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    ListHeldRequests,
    MigratedRequest,
    Priority,
    ReplayQuery,
    ReplayReply,
    RequestClass,
    StreamPosition,
    pack_tokens,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.instance_peer import LONG_PROMPT, OTHER_PROMPT, Peer, held, local_transport, rebalance
from tests.worker.instance_stage import IDS, SlabExecutor, Stage, instance_on


@pytest.fixture
async def stage(nats_settings: BusSettings) -> AsyncIterator[Stage]:
    async with instance_on(nats_settings) as stage:
        yield stage


@pytest.fixture
async def peer(stage: Stage, nats_settings: BusSettings) -> AsyncIterator[Peer]:
    bus = await NatsBus.connect(nats_settings, service="instance", service_id="node-1")
    peer = Peer(bus)
    await peer.start()
    await stage.until(lambda: "node-1" in stage.service._migrations.peers())
    yield peer
    await bus.close()


async def replay(stage: Stage, *positions: StreamPosition) -> ReplayReply:
    return await stage.bus.request(INSTANCE_REPLAY.at(**IDS), ReplayQuery(list(positions)), timeout_s=5)


def as_migrated(sent: GenerationRequest, num_output: int, epoch: int = 1) -> tuple[GenerationRequest, list[int]]:
    """The request as a Commit carries it after so many tokens, and its whole output."""
    expected = expected_output(sent, 600)
    return msgspec.structs.replace(sent, epoch=epoch, prior=pack_tokens(expected[:num_output])), expected


async def commit(stage: Stage, moved: GenerationRequest, migration_id: str = "m1") -> Committed:
    sent = Commit(migration_id, "node-1", moved, SequenceProgress())
    return await stage.bus.request(INSTANCE_COMMIT.at(**IDS), sent, timeout_s=5)


async def give_away_one(stage: Stage, peer: Peer) -> GenerationRequest:
    """`r1` waits because `r0` fills the pool, and moves."""
    await stage.submit_and_hold(request("r0", LONG_PROMPT, 150))
    waiting = request("r1", OTHER_PROMPT, 100, epoch=64)
    await stage.submit(waiting)
    rebalance(stage)
    stage.executor.gate.set()
    await stage.until(lambda: any(report.migrations for report in stage.reports))
    return waiting


# ------------------------------------------------------------------------------------------------------- in


async def test_an_adopted_request_goes_on_in_its_new_epoch_at_its_offset(stage: Stage) -> None:
    moved, expected = as_migrated(request("r1", [1, 2, 3], 30), 12)
    assert await commit(stage, moved) == Committed("r1", 1)
    await stage.until(lambda: stage.end("r1"))
    first = stage.entries[0]
    assert (first.epoch, first.offset, first.tokens) == (1, 12, b""), "its gateway learns of the new owner at once"
    assert all(entry.epoch == 1 for entry in stage.entries)
    assert stage.output("r1", offset=12) == expected[12:]
    await stage.until(lambda: any("r1" in report.ended for report in stage.reports))
    (told,) = [one for report in stage.reports for one in report.migrated_in]
    assert (told.request_id, told.epoch, told.gateway_id, told.num_tokens) == ("r1", 1, "gateway", 15)
    assert (told.running, told.is_online) == (False, True)
    assert not any("r1" in report.admitted for report in stage.reports)
    (finished,) = [one for report in stage.reports for one in report.finished]
    assert (finished.prompt_tokens, finished.output_tokens) == (3, 30)


async def test_what_is_held_here_in_that_epoch_already_is_not_adopted_again(stage: Stage) -> None:
    """A destination that was taken for dead owns a copy in an older epoch than its source goes on in, and may offer it back
    in the very epoch that the source has."""
    moved, expected = as_migrated(request("r1", [1, 2, 3], 60), 12, epoch=2)
    await commit(stage, moved)
    await stage.until(lambda: len(stage.output("r1", offset=12)) > 5)
    older, _ = as_migrated(request("r1", [1, 2, 3], 60), 4, epoch=2)
    with pytest.raises(ServiceError) as refused:
        await commit(stage, older, "m2")
    assert refused.value.code == ErrorCode.CONFLICT
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1", offset=12) == expected[12:]


async def test_the_new_owner_replays_the_whole_output(stage: Stage) -> None:
    moved, expected = as_migrated(request("r1", [1, 2, 3], 30), 12)
    await commit(stage, moved)
    await stage.until(lambda: stage.end("r1"))
    reply = await replay(stage, StreamPosition("r1", 1, 0))
    assert unpack_tokens(reply.entries[0].tokens) == expected
    assert reply.entries[0].finish_reason == FinishReason.LENGTH
    reply = await replay(stage, StreamPosition("r1", 0, 0))
    assert reply.moved == [MigratedRequest("r1", "node-0", 1)], "whoever asks in an older epoch hears of the newer one"


async def test_a_replay_from_before_its_placement_here_has_what_it_was_placed_with(stage: Stage) -> None:
    """Its gateway may be another one by now, which knows nothing of it."""
    placed, expected = as_migrated(request("r1", [1, 2, 3], 400), 12, epoch=64)
    stage.executor.gate.clear()
    await stage.submit(placed)
    reply = await replay(stage, StreamPosition("r1", 64, 12))
    assert reply.entries[0].tokens == b"", "it has not begun yet"
    stage.executor.gate.set()
    await stage.until(lambda: stage.entries)
    stage.executor.gate.clear()
    reply = await replay(stage, StreamPosition("r1", 64, 12), StreamPosition("r1", 64, 5))
    assert unpack_tokens(reply.entries[0].tokens)[0] == expected[12]
    assert unpack_tokens(reply.entries[1].tokens)[:8] == expected[5:13] and reply.unknown == []


async def test_a_commit_again_has_no_effect_and_owns_is_yes(stage: Stage) -> None:
    moved, expected = as_migrated(request("r1", [1, 2, 3], 30), 12)
    stage.executor.gate.clear()
    assert await commit(stage, moved) == await commit(stage, moved)
    query = OwnsQuery("m1", "r1", 1)
    assert (await stage.bus.request(INSTANCE_OWNS.at(**IDS), query, timeout_s=5)).owns
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1", offset=12) == expected[12:]
    assert sum(len(report.migrated_in) for report in stage.reports) == 1


async def test_a_draining_instance_takes_nothing_over(stage: Stage) -> None:
    stage.service.intake.is_draining = True
    with pytest.raises(ServiceError) as refused:
        await commit(stage, as_migrated(request("r1", [1], 5), 2)[0])
    assert refused.value.code == ErrorCode.DRAINING
    assert not await held(stage) and not stage.entries


# ------------------------------------------------------------------------------------------------------ out


async def test_a_request_that_moved_is_reported_and_answered_for(stage: Stage, peer: Peer) -> None:
    waiting = await give_away_one(stage, peer)
    (taken,) = peer.commits
    assert (taken.request.request_id, taken.request.epoch, taken.source_id) == ("r1", 65, "node-0")
    assert (taken.request.prompt, taken.num_blocks) == (waiting.prompt, 0)
    (outcome,) = [move for report in stage.reports for move in report.migrations]
    assert outcome == MigrationOutcome("r1", "node-1", 65, True)
    assert await held(stage) == {"r0"}
    await stage.until(lambda: stage.end("r0"), 20)
    assert stage.output("r0") == expected_output(request("r0", LONG_PROMPT, 150), 600)
    ended = [name for report in stage.reports for name in report.ended]
    assert "r1" not in ended and not any(entry.request_id == "r1" for entry in stage.entries)
    last = stage.reports[-1]
    assert (last.num_migrating_out, last.num_migrated_out, last.num_migrated_in) == (0, 1, 0)


async def test_a_request_is_held_until_its_new_owner_has_said_so(stage: Stage, peer: Peer) -> None:
    peer.may_answer.clear()
    giving = asyncio.create_task(give_away_one(stage, peer))
    await stage.until(lambda: peer.commits)
    reply = await stage.bus.request(INSTANCE_HELD.at(**IDS), ListHeldRequests(), timeout_s=5)
    (leaving,) = [one for one in reply.requests if one.request_id == "r1"]
    assert (leaving.epoch, leaving.running) == (64, False)
    await stage.until(lambda: stage.reports[-1].num_migrating_out == 1)
    peer.may_answer.set()
    await giving
    assert "r1" not in await held(stage)


async def test_replay_and_cancel_for_a_request_that_moved_go_where_it_is(stage: Stage, peer: Peer) -> None:
    await give_away_one(stage, peer)
    positions = [StreamPosition("r1", epoch, 0) for epoch in (64, 65, 66)]
    reply = await replay(stage, *positions)
    owner = MigratedRequest("r1", "node-1", 65)
    assert (reply.entries, reply.moved, reply.unknown) == ([], [owner, owner], ["r1"])
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1", epoch=64))
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1"))
    await stage.until(lambda: peer.cancels)
    assert [cancel.request_id for cancel in peer.cancels] == ["r1"], "one for an epoch of here is not passed on"


async def test_a_request_that_moved_is_not_begun_again_in_an_older_epoch(stage: Stage, peer: Peer) -> None:
    waiting = await give_away_one(stage, peer)
    await stage.submit(waiting)
    assert await held(stage) == {"r0"}
    later = msgspec.structs.replace(waiting, epoch=128)
    await stage.submit(later)
    assert await held(stage) == {"r0", "r1"}
    reply = await replay(stage, StreamPosition("r1", 64, 0), StreamPosition("r1", 128, 0))
    assert reply.moved == [MigratedRequest("r1", "node-0", 128)] and len(reply.entries) == 1


async def test_one_that_comes_back_is_this_instances_again(stage: Stage, peer: Peer) -> None:
    waiting = await give_away_one(stage, peer)
    await stage.until(lambda: stage.end("r0"), 20)
    back, expected = as_migrated(waiting, 20, epoch=66)
    await commit(stage, back)
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1", offset=20) == expected[20:]
    reply = await replay(stage, StreamPosition("r1", 66, 0), StreamPosition("r1", 65, 0))
    assert unpack_tokens(reply.entries[0].tokens) == expected
    assert reply.moved == [MigratedRequest("r1", "node-0", 66)]
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1"))
    await replay(stage)
    assert not peer.cancels, "it would come back for ever"


async def test_a_cancel_with_an_epoch_spares_what_is_held_in_a_higher_one(stage: Stage) -> None:
    stage.executor.gate.clear()
    await stage.submit(request("r1", [1, 2], 100, epoch=64))
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1", epoch=63))
    assert await held(stage) == {"r1"}
    stage.bus.publish(INSTANCE_CANCEL.at(**IDS), Cancel("r1", epoch=64))
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").finish_reason == FinishReason.CANCELLED  # type: ignore[union-attr]


async def test_one_that_is_refused_goes_on_here(stage: Stage, peer: Peer) -> None:
    peer.refuses = True
    await stage.submit_and_hold(request("r0", LONG_PROMPT, 20))
    sent = request("r1", OTHER_PROMPT, 20)
    await stage.submit(sent)
    rebalance(stage, lease_s=0.5)
    stage.executor.gate.set()
    await stage.until(lambda: stage.end("r1"), 20)
    assert stage.output("r1") == expected_output(sent, 600)
    outcomes = [move for report in stage.reports for move in report.migrations if move.request_id == "r1"]
    assert all(not move.is_migrated and move.epoch == 0 for move in outcomes)


async def test_a_model_that_is_unloaded_gives_its_requests_away(stage: Stage, peer: Peer) -> None:
    await stage.submit_and_hold(request("r0", LONG_PROMPT, 20))
    await stage.submit(request("r1", OTHER_PROMPT, 20, request_class=RequestClass.OFFLINE))
    await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a", grace_s=10), timeout_s=5)
    stage.executor.gate.set()
    await stage.until(lambda: peer.commits)
    assert peer.commits[0].request.request_id == "r1"
    await stage.until(lambda: not stage.info.models)
    assert stage.end("r0") and stage.executor.removed == ["a"]
    assert stage.service._migrations._service.core._leaving == {}


async def test_an_unload_in_vain_leaves_the_schedulers_order_as_it_is(
    stage: Stage, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_models, "DETACH_TIMEOUT_S", 0.1)
    core = stage.service._migrations._service.core
    peer.refuses = True
    await stage.submit_and_hold(request("r0", LONG_PROMPT, 20))
    await stage.submit(request("r1", OTHER_PROMPT, 20))
    rebalance(stage, lease_s=60.0)
    await stage.until(lambda: core.lease is not None)
    with monkeypatch.context() as broken:
        broken.setattr(Engine, "remove_model", lambda *_: False)
        await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a", grace_s=0.5), timeout_s=5)
        await stage.until(lambda: core._leaving)
        stage.executor.gate.set()
        await stage.until(lambda: stage.info.models and stage.info.models[0].state == "failed")
    assert core._leaving == {}
    assert core.lease is not None and core.lease.reason is MigrationReason.BALANCE


# ----------------------------------------------------------------------------------------- reports, transport


async def test_load_reports_have_the_freeness_that_rebalancing_needs(stage: Stage) -> None:
    stage.executor.gate.clear()
    await stage.submit(request("r1", [1] * 100, 50, priority=Priority.HIGH))
    await stage.submit(request("r2", [2] * 100, 50))
    await stage.until(lambda: {"r1", "r2"} <= {name for report in stage.reports for name in report.admitted})
    report, load = stage.reports[-1], stage.service._loop.ask(Engine.load)
    assert report.num_high == load.num_high == 1
    assert report.migration_freeness == load.migration_freeness != 0.0
    assert report.scaling_freeness == load.scaling_freeness != 0.0
    assert report.dispatch_freeness_high == load.dispatch_freeness_high != 0.0


async def metric(stage: Stage, name: str) -> float | None:
    value: float | None = stage.telemetry.registry.get_sample_value(name, {"engine": "node-0"})
    return value


async def test_the_registry_names_the_kv_transport_where_there_is_one(nats_settings: BusSettings) -> None:
    async with instance_on(nats_settings, executor=SlabExecutor(), open_transport=local_transport) as stage:
        await stage.until(lambda: stage.info.kv_address == "local:1")
        assert await metric(stage, "tideway_migration_available") == 1
        transport = stage.service._migrations._transport
        assert transport.block_bytes("device/a") is not None and transport.block_bytes("host/a") is None
        await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a", grace_s=10), timeout_s=5)
        await stage.until(lambda: not stage.info.models)
        assert transport.block_bytes("device/a") is None


@pytest.mark.parametrize("problem", ["unusable", "import", "off", "hangs"])
async def test_without_a_usable_transport_the_instance_says_so_and_serves(
    nats_settings: BusSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr("services.worker.instance.migrations.OPEN_TIMEOUT_S", 0.1)

    async def open_transport() -> KvTransport:
        if problem == "unusable":
            raise TransferError(TransferReason.UNUSABLE, "no transport exists")
        if problem == "import":
            raise ImportError("libucp.so.0: cannot open shared object file")
        assert problem == "hangs"
        await asyncio.sleep(3600)
        raise AssertionError

    fields = {"migration": "off"} if problem == "off" else {}
    with caplog.at_level(logging.WARNING):
        async with instance_on(nats_settings, open_transport=open_transport, **fields) as stage:
            sent = request("r1", [1, 2, 3], 20)
            await stage.submit(sent)
            await stage.until(lambda: stage.end("r1"))
            assert stage.output("r1") == expected_output(sent, 600)
            await stage.until(lambda: "requests do not move" in caplog.text)
            assert stage.info.kv_address == "" and not stage.service.problems()
            assert await metric(stage, "tideway_migration_available") == 0
            # without KV they still move
            assert await commit(stage, as_migrated(request("r2", [1], 5), 2)[0]) == Committed("r2", 1)
    (warning,) = [record for record in caplog.records if "requests do not move" in record.message]
    expected = {
        "unusable": "no transport exists",
        "import": "libucp.so.0",
        "off": "the settings say so",
        "hangs": "0.1 s",
    }
    assert expected[problem] in warning.message
