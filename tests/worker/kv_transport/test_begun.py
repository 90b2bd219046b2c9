"""Transfers that are begun before their blocks are known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.worker.kv_transport import KvTransport, Outgoing, TransferError, TransferReason
from services.worker.kv_transport.faults import FaultPoint, Faults
from services.worker.kv_transport.links import Buffer
from services.worker.kv_transport.telemetry import TransferMetrics
from tests.worker.kv_transport.conftest import IMPATIENT, LAYOUTS, Make, laid_out, limits_of, refusal, settle, until


class Opened(Faults):
    """The destination has said yes."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def at(self, point: FaultPoint, payload: Buffer | None = None) -> None:
        if point is FaultPoint.OPENED:
            self.reached.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self.reached.wait()


async def still_works(source: KvTransport, destination: KvTransport) -> None:
    """Over the connection that there was, and with nothing left of what was before."""
    await until(lambda: source.num_active == destination.num_active == 0)
    assert source.num_connections == destination.num_connections == 1
    again = destination.expect("m", [0], deadline_s=30)
    await source.send(destination.address, again.ticket, "m", [9], deadline_s=30)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_is_in_the_blocks_when_they_are_named_arrives(make: Make, layout: str) -> None:
    mine, theirs = laid_out(layout, 1), laid_out(layout, 2)
    opened = Opened()
    source, destination = await make(mine, limits=limits_of(layout)), await make(theirs, faults=opened)
    incoming = destination.expect("m", range(20), deadline_s=30)
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=30)
    await opened.wait()
    mine[30:50] = laid_out(layout, 3)[30:50]
    settle(mine)
    receipt = await source.complete(begun, range(30, 50), deadline_s=30)
    assert (await incoming.wait()).checksum == receipt.checksum
    assert torch.equal(theirs[:20], laid_out(layout, 3)[30:50])
    assert torch.equal(theirs[20:], laid_out(layout, 2)[20:])
    source.cancel(begun)
    await still_works(source, destination)


@pytest.mark.parametrize("ending", ["cancelled", "deadline", "lease", "destination", "unregistered"])
async def test_one_that_is_not_completed_leaves_nothing(make: Make, ending: str) -> None:
    theirs = laid_out("runs", 2)
    opened = Opened()
    source, destination = await make(), await make(theirs, faults=opened)
    await source.connect(destination.address, deadline_s=30)
    incoming = destination.expect("m", range(20), deadline_s=2.0 if ending == "lease" else 30.0)
    deadline_s = 2.0 if ending == "deadline" else 30.0
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=deadline_s)
    await opened.wait()
    if ending == "cancelled":
        source.cancel(begun)
    elif ending == "destination":
        incoming.cancel()
    elif ending == "unregistered":
        source.unregister("m")
    reason = TransferReason.DEADLINE if ending == "lease" else TransferReason.CANCELLED
    assert await refusal(incoming.wait()) is reason
    assert await refusal(source.complete(begun, range(20), deadline_s=30)) is reason
    source.cancel(begun)
    assert torch.equal(theirs[20:], laid_out("runs", 2)[20:])
    source.register("m", laid_out("fused", 1))
    await still_works(source, destination)


@pytest.mark.parametrize("who", ["source", "destination"])
async def test_an_end_that_closes_fails_what_was_begun(make: Make, who: str) -> None:
    opened = Opened()
    ends = {"source": await make(), "destination": await make(faults=opened)}
    source, destination = ends.values()
    incoming = destination.expect("m", range(20), deadline_s=30)
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=30)
    await opened.wait()
    await ends[who].close()
    lost = {who: TransferReason.CLOSED}
    assert await refusal(incoming.wait()) is lost.get("destination", TransferReason.PEER_LOST)
    await until(lambda: begun.task.done())
    assert await refusal(source.complete(begun, range(20), deadline_s=30)) is lost.get(
        "source", TransferReason.PEER_LOST
    )


async def test_a_peer_that_says_cancel_and_then_nothing_costs_no_more_than_the_deadline(make: Make) -> None:
    """What the destination stops is not yet over for the source."""
    opened = Opened()
    source, destination = await make(limits=IMPATIENT), await make(faults=opened)
    incoming = destination.expect("m", range(20), deadline_s=30)
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=1.5)
    await opened.wait()
    begun.stop()  # as by its Cancel
    connection = next(iter(source._connections))
    connection.outgoing[begun.transfer] = Outgoing(  # hears the rest
        address=begun.address,
        ticket=b"",
        pool=begun.pool,
        num_blocks=1,
        chunk_blocks=1,
        checked_bytes=8,
        is_limited=True,
    )
    connection.outgoing[-1] = begun
    await until(lambda: source.num_active == 0)
    assert await refusal(source.complete(begun, range(20), deadline_s=30)) is TransferReason.CANCELLED


async def test_each_is_counted_once(make: Make) -> None:
    registry = CollectorRegistry()
    source, destination = await make(metrics=TransferMetrics(registry)), await make()

    async def count(deadline_s: float, *, completes: bool) -> str:
        incoming = destination.expect("m", range(20), deadline_s=30)
        begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=deadline_s)
        await until(begun.accepted.done)
        if completes:
            await source.complete(begun, range(20), deadline_s=30)
        elif deadline_s > 1:
            source.cancel(begun)
        await until(begun.task.done)
        source.cancel(begun)
        with contextlib.suppress(TransferError):
            await source.complete(begun, range(20), deadline_s=30)
        samples = [s for family in registry.collect() for s in family.samples if s.labels.get("direction") == "out"]
        ended = {s.labels["reason"]: s.value for s in samples if s.name == "tideway_kv_transfer_transfers_total"}
        return " ".join(f"{reason}:{value:g}" for reason, value in sorted(ended.items()))

    assert await count(5, completes=True) == "done:1"
    assert await count(5, completes=False) == "cancelled:1 done:1"
    assert await count(1.0, completes=False) == "cancelled:1 deadline:1 done:1"
    refused = source.begin(destination.address, b"t" * 16, "m", 20, deadline_s=30)
    await until(refused.task.done)
    source.cancel(refused)
    failed = registry.get_sample_value
    labels = {"direction": "out", "reason": str(refused.failure.reason)}
    assert labels["reason"] != "cancelled" and failed("tideway_kv_transfer_transfers_total", labels) == 1


async def test_one_of_a_pool_that_was_taken_away_before_it_was_opened_sends_nothing(make: Make) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=30)
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=30)
    source.unregister("m")
    assert await refusal(source.complete(begun, range(20), deadline_s=30)) is TransferReason.CANCELLED
    incoming.cancel()


async def test_one_that_is_cancelled_at_once_does_not_use_its_ticket(make: Make) -> None:
    source, destination = await make(), await make()
    await source.connect(destination.address, deadline_s=30)
    incoming = destination.expect("m", range(20), deadline_s=30)
    source.cancel(source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=30))
    await source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=30)
    await incoming.wait()
    await still_works(source, destination)


@pytest.mark.parametrize("blocks", [range(19), range(50, 70)])
async def test_other_blocks_than_were_announced_are_refused(make: Make, blocks: Sequence[int]) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=30)
    begun = source.begin(destination.address, incoming.ticket, "m", 20, deadline_s=30)
    assert await refusal(source.complete(begun, blocks, deadline_s=30)) is TransferReason.MISMATCH
    with pytest.raises(TransferError, match="mismatch"):
        source.begin(destination.address, incoming.ticket, "m", 0, deadline_s=30)
    incoming.cancel()
    assert await refusal(incoming.wait()) is TransferReason.CANCELLED
    await until(lambda: source.num_active == destination.num_active == 0)
