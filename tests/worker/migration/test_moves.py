"""Requests that move between instances of one process, over a real NATS and in-process links."""

from __future__ import annotations

import asyncio
import itertools

import torch

from shared.messages.catalogue import INSTANCE_CANCEL
from shared.messages.migration import MigrationReason
from shared.messages.requests import (
    Cancel,
    FinishReason,
    MigratedRequest,
    RequestClass,
)
from shared.migration.limits import pool_of
from tests.shared.engine.fake_executor import expected_output, request

PROMPT = list(range(50))


def metric(party, name: str, **labels: str) -> float:
    return party.telemetry.registry.get_sample_value(name, labels) or 0.0


async def test_a_running_request_moves_and_its_stream_goes_on(make) -> None:
    group = await make()
    sent = request("r1", PROMPT, 200)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 20)
    group.source.rebalance("b")
    await group.until(lambda: group.source.outcomes)
    outcome = group.source.outcomes[0]
    assert outcome.is_migrated and (outcome.epoch, outcome.destination_id) == (1, "b")
    assert group.source.service.core.moved("r1", group.source.bus.now()) == MigratedRequest("r1", "b", 1)
    await group.ended(sent, owner="b")
    commit, num_output = group.destination.adopted[0]
    assert num_output > 20 and commit.request.epoch == 1 and commit.progress.num_computed >= 70
    assert len(group.destination.ended) == 1 and not group.source.ended


async def test_counts_and_pause_are_measured(make) -> None:
    group = await make()
    sent = request("r1", PROMPT, 200)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 20)
    group.source.rebalance("b")
    await group.ended(sent, owner="b")
    source, destination = group.source, group.destination
    assert metric(source, "tideway_migrations_total", direction="out", reason="balance", outcome="moved") == 1
    assert metric(destination, "tideway_migrations_total", direction="in", reason="", outcome="moved") == 1
    assert metric(source, "tideway_migration_pause_seconds_count", end="source") == 1
    assert metric(destination, "tideway_migration_pause_seconds_count", end="destination") == 1
    for party, direction in ((source, "out"), (destination, "in")):
        assert metric(party, "tideway_migration_bytes_total", direction=direction) >= 70 * 4
        assert metric(party, "tideway_migrations_in_progress", direction=direction) == 0
    assert metric(source, "tideway_migration_stages_sum") >= 2


async def test_what_the_destination_holds_is_counted_and_not_sent(make) -> None:
    group = await make()
    before, sent = request("before", PROMPT, 2), request("r1", PROMPT, 200)
    group.destination.submit(before)
    await group.ended(before)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 20)
    group.source.rebalance("b")
    await group.ended(sent, owner="b")
    num_held = metric(group.source, "tideway_migration_held_blocks_total")
    assert num_held == len(PROMPT) // group.source.loop.ask(lambda engine: engine.memory.queues["a"].shape.block_size)


async def test_a_waiting_request_moves_by_commit_alone(make) -> None:
    group = await make(source={"num_merged": 20})
    long, waiting = request("long", [7] * 150, 60), request("waiting", [9] * 120, 40)
    group.source.submit(long)
    await group.until(lambda: group.progress(long) > 2)
    group.source.submit(waiting)
    await asyncio.sleep(0.02)
    group.source.rebalance("b")
    await group.until(lambda: group.destination.adopted)
    assert group.destination.adopted[0][0].request.request_id == "waiting"
    assert group.destination.adopted[0][0].num_blocks == 0
    group.source.rebalance()
    await group.ended(long, waiting)
    assert group.gateway.owners["waiting"][1] == "b"


async def test_a_checkpoint_moves_from_host_memory_to_host_memory(make) -> None:
    group = await make(source={"num_merged": 20}, host_memory_bytes=1, checkpoint_start=0.0)
    offline = request("offline", [5] * 120, 80, request_class=RequestClass.OFFLINE)
    # One that may not move keeps the pool full.
    online = request("online", [6] * 180, 55, epoch=62)
    group.source.submit(offline)
    await group.until(lambda: group.progress(offline) > 8)
    group.source.submit(online)
    await group.until(lambda: group.progress(online) > 0)
    group.source.intake.is_draining = True
    group.source.rebalance("b", reason=MigrationReason.DRAIN, lease_s=2.0)
    await group.until(lambda: any(commit.on_host for commit, _ in group.destination.adopted))
    commit = next(commit for commit, _ in group.destination.adopted if commit.on_host)
    assert commit.request.request_id == "offline" and commit.num_blocks > 10
    await group.ended(offline, online)
    assert group.gateway.owners["offline"][1] == "b"
    ended = next(one for one in group.destination.ended if one.request.request_id == "offline")
    assert ended.restored_blocks >= commit.num_blocks - 1


async def test_blocks_of_another_size_are_refused(make) -> None:
    group = await make()
    group.destination.transport.register(pool_of("a", False), torch.zeros(8, 64, dtype=torch.uint8))
    sent = request("r1", PROMPT, 100)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b")
    await group.until(lambda: group.source.outcomes)
    assert group.source.outcomes[0].reason == "mismatch"
    await group.ended(sent, owner="a")


async def test_a_request_between_chunks_of_its_prompt_moves(make) -> None:
    group = await make(token_budget=16, step_s=0.01)
    sent = request("r1", list(range(400)), 20)
    group.source.submit(sent)
    await group.until(lambda: group.source.executor.num_steps > 5)
    group.source.rebalance("b")
    await group.until(lambda: group.destination.adopted)
    commit, num_output = group.destination.adopted[0]
    assert num_output == 0 and 0 < commit.progress.num_computed < 400
    await group.ended(sent, owner="b")


async def test_without_a_transport_only_requests_without_kv_move(make) -> None:
    group = await make(with_transport=False, source={"num_merged": 20})
    long, waiting = request("long", [7] * 150, 60), request("waiting", [9] * 120, 40)
    group.source.submit(long)
    await group.until(lambda: group.progress(long) > 2)
    group.source.submit(waiting)
    group.source.rebalance("b", lease_s=5.0)
    await group.ended(long, waiting)
    assert group.gateway.owners["long"][1] == "a" and group.gateway.owners["waiting"][1] == "b"


async def test_a_cancel_follows_the_request(make) -> None:
    group = await make()
    sent = request("r1", PROMPT, 500)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b")
    await group.until(lambda: group.source.outcomes)
    group.source.bus.publish(INSTANCE_CANCEL.at(instance_id="a"), Cancel("r1"))
    await group.until(lambda: "r1" in group.gateway.ends)
    assert group.gateway.ends["r1"].finish_reason == FinishReason.CANCELLED
    assert group.gateway.owners["r1"][1] == "b"
    known = group.gateway.tokens["r1"]
    assert known == expected_output(sent, 600)[: len(known)]
    await group.settled()


async def test_many_move_at_once_and_lose_nothing(make) -> None:
    group = await make(migration_cooldown_s=0.02, max_migrations=4, names="abc")
    sent = [request(f"r{i}", [i, *range(i * 3 % 40)], 40 + i * 5) for i in range(24)]
    for number, one in enumerate(sent):
        group.parties[number % 3].submit(one)

    async def stir() -> None:
        for number in itertools.count():
            party = group.parties[number % 3]
            others = [other.name for other in group.parties if other is not party]
            party.rebalance(*others, lease_s=0.05)
            await asyncio.sleep(0.02)

    stirring = asyncio.create_task(stir())
    await group.until(lambda: all(one.request_id in group.gateway.ends for one in sent))
    stirring.cancel()
    await group.ended(*sent)
    moved = sum(outcome.is_migrated for party in group.parties for outcome in party.outcomes)
    assert moved >= 3
