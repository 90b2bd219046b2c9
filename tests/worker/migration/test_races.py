"""Things that change while a migration is under way: the registry, the request itself, what the driver relies on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import shared.migration.core as core
import shared.migration.outgoing as outgoing_rules
from services.worker.instance.engine_loop import StepStats
from services.worker.kv_transport import Outgoing
from services.worker.migration.service import MigrationService
from shared.engine.calls import Call, Detach, Freeze, Pin, PinRest, Reserve
from shared.engine.handover import Detached
from shared.messages.catalogue import INSTANCE_CANCEL
from shared.messages.migration import PreAllocate
from shared.messages.requests import (
    Cancel,
    FinishReason,
    MigratedRequest,
    pack_tokens,
)
from shared.migration.commands import Stage
from shared.migration.core import DEFAULT_STEP_S, MigrationCore
from shared.migration.outgoing import OutgoingMigration
from shared.migration.source import LEAVE_S
from tests.shared.engine.fake_executor import request
from tests.worker.migration.conftest import Group
from tests.worker.migration.test_moves import PROMPT, metric


async def running(group: Group, num_tokens: int = 200):
    sent = request("r1", PROMPT, num_tokens)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    return sent


# ----------------------------------------------------------------------------------------------- the registry


async def test_a_destination_that_left_while_another_was_asked_is_not_tried(make) -> None:
    group = await make(names="abc", destination={"fault_points": "destination.commit:delay:0.2"}, step_s=0.01)
    sent = await running(group)
    group.destination.intake.is_draining = True
    third = group.parties[2]
    group.source.rebalance("b", "c")
    await group.until(lambda: group.source.service.core.outgoing_of("r1"))
    del group.source.registry["c"]
    group.source.service.on_instance("c", None)
    await group.until(lambda: group.source.outcomes)
    await group.ended(sent, owner="a")
    assert {outcome.destination_id for outcome in group.source.outcomes} == {"b"}
    assert not third.adopted


async def test_a_sealed_request_goes_on_where_the_loss_of_its_destination_was_not_heard(make, monkeypatch) -> None:
    monkeypatch.setattr(outgoing_rules, "COMMIT_S", 0.2)
    monkeypatch.setattr(outgoing_rules, "copy_deadline_s", lambda expected_s: 0.3)
    group = await make(destination={"fault_points": "destination.commit:delay:30"}, step_s=0.005)
    sent = await running(group)
    group.source.rebalance("b", lease_s=0.1)
    await group.until(lambda: (m := group.source.service.core.outgoing_of("r1")) and not m.machine.may_be_withdrawn)
    destination = group.destination
    destination.is_dead = True
    del group.source.registry["b"]
    await destination.bus.close()
    await group.until(lambda: group.source.outcomes)
    outcome = group.source.outcomes[0]
    assert (outcome.is_migrated, outcome.epoch, outcome.reason) == (False, 2, "destination_lost")
    await group.ended(sent, owner="a")
    await destination.transport.close()
    await asyncio.to_thread(destination.loop.stop, 5.0)


# ------------------------------------------------------------------------------------------------ the request


async def test_a_request_that_is_placed_anew_here_is_not_handed_over_in_its_old_epoch(make) -> None:
    late = {"fault_points": "destination.reserved:delay:0.3"}
    group = await make(destination=late, step_s=0.01, migration_max_stages=1)
    sent = await running(group)
    group.source.rebalance("b", lease_s=0.1)
    await group.until(lambda: group.source.service.core.outgoing_of("r1"))
    again = msgspec.structs.replace(sent, epoch=64, prior=pack_tokens(group.gateway.tokens["r1"]))
    group.gateway.owners["r1"] = (64, "a")
    group.source.submit(again)
    await group.until(lambda: group.source.outcomes)
    outcome = group.source.outcomes[0]
    assert not outcome.is_migrated and outcome.epoch == 0
    assert group.source.loop.held_epoch("r1") == 64 and not group.destination.adopted
    await group.ended(sent, owner="a")


async def test_a_running_request_without_its_kv_is_not_handed_over(make, monkeypatch) -> None:
    """It was preempted after it had left its batch: what the destination has of it is no use without the rest."""
    group = await make(step_s=0.005)
    sent = await running(group)
    on_detached = OutgoingMigration.on_detached

    def without_kv(self: OutgoingMigration, taken: Detached, now: float) -> None:
        progress = msgspec.structs.replace(taken.progress, num_computed=0)
        on_detached(self, msgspec.structs.replace(taken, progress=progress), now)

    monkeypatch.setattr(OutgoingMigration, "on_detached", without_kv)
    apply = group.source.loop.apply
    monkeypatch.setattr(group.source.loop, "apply", lambda call: None if isinstance(call, PinRest) else apply(call))
    group.source.rebalance("b", lease_s=0.1)
    await group.until(lambda: group.source.outcomes)
    assert (group.source.outcomes[0].is_migrated, group.source.outcomes[0].reason) == (False, "preempted")
    assert not group.destination.adopted
    await group.ended(sent, owner="a")


async def test_a_cancel_of_what_was_handed_over_names_its_epoch(make) -> None:
    """So that it spares a later placement of the request there."""
    group = await make(source={"fault_points": "source.answer:delay:0.2"}, step_s=0.005)
    sent = await running(group)
    group.source.rebalance("b", lease_s=0.1)
    await group.until(lambda: group.destination.adopted)
    group.source.bus.publish(INSTANCE_CANCEL.at(instance_id="a"), Cancel("r1"))
    await group.until(lambda: "r1" in group.gateway.ends)
    assert group.gateway.ends["r1"].finish_reason == FinishReason.CANCELLED
    assert group.destination.cancels == [Cancel("r1", 1)]
    assert group.progress(sent) < 200
    await group.settled()


async def test_a_cancel_does_not_go_to_and_fro(make) -> None:
    group = await make()
    far = group.source.loop.now() + 60
    for party, other, epoch in ((group.source, "b", 1), (group.destination, "a", 2)):
        party.service.core._moved["r1"] = (far, MigratedRequest("r1", other, epoch))
    group.source.bus.publish(INSTANCE_CANCEL.at(instance_id="a"), Cancel("r1"))
    await group.until(lambda: group.destination.cancels)
    await asyncio.sleep(0.05)
    assert [len(party.cancels) for party in group.parties] == [1, 1]


# ------------------------------------------------------------------------------------------------- the driver


async def test_room_for_the_last_blocks_is_kept_until_the_request_has_left_its_batch(make, monkeypatch) -> None:
    group = await make()
    asked: list[PreAllocate] = []
    apply = group.destination.loop.apply

    def noting(call: Call):
        if isinstance(call, Reserve):
            asked.append(call.query)
        return apply(call)

    monkeypatch.setattr(group.destination.loop, "apply", noting)
    sent = await running(group)
    group.source.rebalance("b")
    await group.ended(sent, owner="b")
    assert len(asked) > 1 and asked[-1].deadline_s == asked[0].deadline_s + LEAVE_S


async def test_the_transfer_of_the_last_blocks_is_open_when_the_request_leaves_its_batch(make, monkeypatch) -> None:
    opened: list[bool] = []
    on_detached, begun = OutgoingMigration.on_detached, MigrationService._begun

    def noting(self: OutgoingMigration, taken: Detached, now: float) -> None:
        opened.extend(one.accepted.done() for one in group.source.service._out[self.migration_id].begun.values())
        on_detached(self, taken, now)

    def beginning(self: MigrationService, stage: Stage, *rest: object) -> Outgoing:
        transfer = begun(self, stage, *rest)
        if stage.begins_s:
            transfer.accepted.add_done_callback(lambda _: gate.set())
        return transfer

    monkeypatch.setattr(OutgoingMigration, "on_detached", noting)
    monkeypatch.setattr(MigrationService, "_begun", beginning)
    group = await make(step_s=0.1)
    gate, apply = group.source.executor.gate, group.source.loop.apply

    def closing(call: Call):
        # The step that runs then lasts until the destination has answered, however slow the machine is.
        if isinstance(call, Detach):
            gate.clear()
        return apply(call)

    monkeypatch.setattr(group.source.loop, "apply", closing)
    sent = await running(group, 30)
    group.source.rebalance("b")
    await group.ended(sent, owner="b")
    assert opened == [True]


async def test_a_request_that_stays_leaves_no_transfer_open(make, monkeypatch) -> None:
    group = await make(source={"fault_points": "source.detached:fail"}, step_s=0.02)
    begun: list[Outgoing] = []
    begin = group.source.transport.begin
    monkeypatch.setattr(group.source.transport, "begin", lambda *a, **k: begun.append(begin(*a, **k)) or begun[-1])
    sent = await running(group, 100)
    group.source.rebalance("b", lease_s=0.05)
    await group.until(lambda: group.source.outcomes)
    assert not group.source.outcomes[0].is_migrated
    await group.until(lambda: begun and all(one.is_decided for one in begun), 2.0)
    await group.ended(sent, owner="a")


async def test_a_last_transfer_that_failed_before_the_request_left_keeps_it_here(make, monkeypatch) -> None:
    group = await make(step_s=0.1)
    transport = group.source.transport
    begin = transport.begin

    def with_a_bad_ticket(address: str, ticket: bytes, *rest, is_limited: bool, **fields) -> Outgoing:
        return begin(address, ticket if is_limited else b"t" * 16, *rest, is_limited=is_limited, **fields)

    monkeypatch.setattr(transport, "begin", with_a_bad_ticket)
    calls: list[Call] = []
    apply = group.source.loop.apply
    monkeypatch.setattr(group.source.loop, "apply", lambda call: calls.append(call) or apply(call))
    sent = await running(group, 30)
    group.source.rebalance("b", lease_s=0.05)
    await group.until(lambda: group.source.outcomes)
    assert group.source.outcomes[0].reason == "transfer_failed"
    await group.ended(sent, owner="a")
    assert Freeze("r1") not in calls and not group.destination.adopted


@pytest.mark.parametrize("is_there", [True, False], ids=["prefix at the destination", "nothing there"])
async def test_whether_a_move_is_worth_it_counts_what_the_destination_has(
    make, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "DEFAULT_STEP_S", 0.005)
    monkeypatch.setattr(MigrationCore, "on_step", lambda *_: None)
    group = await make(step_s=0.005, migration_rate_share=1e-6)  # 16 ms for a block
    first = request("first", PROMPT * 4, 2)
    if is_there:
        group.destination.submit(first)
        await group.ended(first)
    sent = request("r1", PROMPT * 4, 60)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b", lease_s=0.1)
    await group.until(lambda: group.source.outcomes)
    assert group.source.outcomes[0].reason == ("" if is_there else "not_worth")
    await group.ended(sent, owner="b" if is_there else "a")


async def test_an_error_in_the_driver_leaves_nothing_behind(make, monkeypatch) -> None:
    group = await make(step_s=0.005)
    sent = await running(group)

    apply = group.source.loop.apply

    def fail(call: Call):
        if isinstance(call, Pin):
            raise RuntimeError("a fault of the program")
        return apply(call)

    monkeypatch.setattr(group.source.loop, "apply", fail)
    group.source.rebalance("b", lease_s=0.05)
    await group.until(lambda: group.source.outcomes)
    assert not group.source.outcomes[0].is_migrated
    await group.until(lambda: not metric(group.source, "tideway_migrations_in_progress", direction="out"))
    await group.ended(sent, owner="a")


async def test_the_mean_step_is_of_steps_that_only_decode(make) -> None:
    core = (await make()).source.service.core
    core.on_step(StepStats("a", 512, (3, 0), 0.9), 0.0)
    assert core.step_s("a") == DEFAULT_STEP_S
    core.on_step(StepStats("a", 4, (3, 1), 0.01), 0.0)
    core.on_step(StepStats("a", 512, (3, 0), 0.9), 0.0)
    assert core.step_s("a") == 0.01
