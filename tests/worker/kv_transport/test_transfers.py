"""What every implementation of the KV transport does with a transfer: what arrives, and what is refused or noticed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.kv_transport import (
    KvTransport,
    Network,
    TransferError,
    TransferReason,
    TransportLimits,
    UcxNetwork,
)
from services.worker.kv_transport.faults import FaultPoint
from tests.stalls import Stopwatch
from tests.worker.kv_transport.conftest import (
    BLOCK_BYTES,
    IMPATIENT,
    LAYOUTS,
    NEEDS_CUDA,
    NUM_BLOCKS,
    Harm,
    Make,
    Stall,
    laid_out,
    limits_of,
    pool,
    refusal,
    settle,
    until,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
async def test_bytes_arrive_equal_and_only_where_they_should(make: Make, seed: int, layout: str) -> None:
    chosen = random.Random(seed)
    mine, theirs = laid_out(layout, 1), laid_out(layout, 2)
    before = theirs.clone()
    settle(theirs)
    source, destination = await make(mine, limits=limits_of(layout)), await make(theirs)
    count = chosen.choice([1, 4, 5, 6, 10, 11, 37, NUM_BLOCKS])
    from_blocks, to_blocks = chosen.sample(range(NUM_BLOCKS), count), chosen.sample(range(NUM_BLOCKS), count)
    if layout == "runs":  # to scattered blocks, from scattered blocks, to a run
        first = NUM_BLOCKS - count
        from_blocks, to_blocks = (
            (list(range(first, NUM_BLOCKS)), to_blocks),
            (from_blocks, list(range(first, NUM_BLOCKS))),
            (list(range(count)), list(range(first, NUM_BLOCKS))),
        )[seed % 3]
    incoming = destination.expect("m", to_blocks, deadline_s=30)
    sent = await source.send(destination.address, incoming.ticket, "m", from_blocks, deadline_s=30)
    received = await incoming.wait()
    assert sent.num_bytes == received.num_bytes == count * BLOCK_BYTES
    assert sent.checksum == received.checksum
    before[to_blocks] = mine[from_blocks]
    assert torch.equal(theirs, before)
    assert source.bandwidth_bytes_s(destination.address) is not None


async def test_several_transfers_at_once_in_both_directions(make: Make) -> None:
    rows = [pool(3), pool(4)]
    expected = [rows[0].clone(), rows[1].clone()]
    ends = [await make(rows[0]), await make(rows[1])]
    work = []
    for number in range(12):
        near, far = (0, 1) if number % 2 else (1, 0)
        from_blocks = range(5 * (number // 2), 5 * (number // 2) + 5)
        to_blocks = [block + 30 for block in from_blocks]
        expected[far][to_blocks] = rows[near][list(from_blocks)]
        incoming = ends[far].expect("m", to_blocks, deadline_s=30)
        work += [
            ends[near].send(ends[far].address, incoming.ticket, "m", list(from_blocks), deadline_s=30),
            incoming.wait(),
        ]
    await asyncio.gather(*work)
    assert torch.equal(rows[0], expected[0])
    assert torch.equal(rows[1], expected[1])


async def test_a_wrong_ticket_is_refused_and_its_connection_closed(make: Make) -> None:
    source, destination = await make(), await make()
    reason = await refusal(source.send(destination.address, b"guess", "m", [1], deadline_s=30))
    assert reason is TransferReason.TICKET_UNKNOWN
    await until(lambda: not destination.num_connections and not source.num_connections)


async def test_a_connection_that_shows_no_ticket_is_closed(make: Make, new_network: Callable[[], Network]) -> None:
    destination = await make(limits=IMPATIENT)
    stranger = new_network()
    await stranger.open(lambda link: None)
    link = await stranger.connect(destination.address)
    await until(lambda: destination.num_connections == 1)
    await until(lambda: destination.num_connections == 0)
    await link.abort()
    await stranger.close()


async def test_a_ticket_is_good_once(make: Make) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", [3], deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", [1], deadline_s=30)
    again = source.send(destination.address, incoming.ticket, "m", [2], deadline_s=30)
    assert await refusal(again) is TransferReason.TICKET_USED


async def test_a_ticket_is_good_for_the_peer_it_was_made_for(make: Make) -> None:
    source, thief, destination = await make(), await make(), await make()
    incoming = destination.expect("m", [3], deadline_s=30, peer=source.address)
    stolen = thief.send(destination.address, incoming.ticket, "m", [1], deadline_s=30)
    assert await refusal(stolen) is TransferReason.TICKET_OF_ANOTHER
    assert incoming.is_live
    await source.send(destination.address, incoming.ticket, "m", [1], deadline_s=30)
    await incoming.wait()
    await until(lambda: not thief.num_connections and destination.num_connections == 1)


async def test_an_expectation_nobody_fills_ends_at_its_deadline(make: Make) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", [3], deadline_s=0.1)
    assert await refusal(incoming.wait()) is TransferReason.DEADLINE
    assert destination.num_active == 0
    late = source.send(destination.address, incoming.ticket, "m", [1], deadline_s=30)
    assert await refusal(late) is TransferReason.TICKET_EXPIRED


@pytest.mark.parametrize("blocks", [[1, 2], [1]])
async def test_both_ends_must_mean_the_same_blocks(make: Make, blocks: list[int]) -> None:
    source, destination = await make(torch.zeros(4, 128, dtype=torch.uint8)), await make()
    incoming = destination.expect("m", [3], deadline_s=30)
    failed = source.send(destination.address, incoming.ticket, "m", blocks, deadline_s=30)
    assert await refusal(failed) is TransferReason.MISMATCH
    assert await refusal(incoming.wait()) is TransferReason.MISMATCH
    for bad in ([NUM_BLOCKS], [-1], []):
        with pytest.raises(TransferError):
            destination.expect("m", bad, deadline_s=1)


@pytest.mark.parametrize("layout", ["fused", "runs"])
@pytest.mark.parametrize("point", [FaultPoint.OPENED, FaultPoint.CHUNK_ARRIVED, FaultPoint.BEFORE_END])
async def test_a_peer_that_never_receives_costs_no_more_than_the_deadline(
    make: Make, point: FaultPoint, layout: str
) -> None:
    stall = Stall(point)
    theirs = laid_out(layout, 2)
    source = await make(laid_out(layout, 1), limits=IMPATIENT)
    destination = await make(theirs, limits=IMPATIENT, faults=stall)
    incoming = destination.expect("m", range(20), deadline_s=0.4)
    with Stopwatch() as watch:
        failed = source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=0.4)
        assert await refusal(failed) is TransferReason.DEADLINE
        assert watch.seconds < 0.8
        assert await refusal(incoming.wait()) is TransferReason.DEADLINE
    assert watch.seconds < 2.5
    before = theirs.clone()
    stall.go.set()
    await until(lambda: source.num_active == destination.num_active == 0)
    assert torch.equal(theirs, before)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_changed_byte_is_noticed_and_the_blocks_are_zeroed(make: Make, layout: str) -> None:
    def change(payload: np.ndarray) -> None:
        payload[len(payload) // 3] ^= 4

    mine, theirs = laid_out(layout, 5), laid_out(layout, 6)
    expected = theirs.clone()
    expected[:12] = 0
    settle(theirs)
    source = await make(mine, limits=limits_of(layout))
    destination = await make(theirs, faults=Harm(change))
    incoming = destination.expect("m", range(12), deadline_s=30)
    sent = source.send(destination.address, incoming.ticket, "m", range(12), deadline_s=30)
    assert await refusal(sent) is TransferReason.CORRUPTED
    assert await refusal(incoming.wait()) is TransferReason.CORRUPTED
    assert torch.equal(theirs, expected)
    retry = destination.expect("m", range(12), deadline_s=30)
    await source.send(destination.address, retry.ticket, "m", range(12), deadline_s=30)
    assert torch.equal(theirs[:12], mine[:12])


DAMAGES = {
    "lost": lambda payload, segment: payload[segment].fill(0),
    "repeated": lambda payload, segment: np.copyto(payload[segment], payload[: segment.stop - segment.start].copy()),
    "misplaced": lambda payload, segment: np.copyto(payload[segment], np.roll(payload[segment], 4096)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("start", [8192, 9001])
async def test_the_sums_of_the_default_notice_what_wires_do(make: Make, layout: str, damage: str, start: int) -> None:
    """A lost, repeated or misplaced segment of 8 KiB, which is the least that UCX sends over tcp."""

    def harm(payload: np.ndarray) -> None:
        DAMAGES[damage](payload, slice(start, start + 8192))

    checked_bytes = TransportLimits().checked_bytes
    mine, theirs = laid_out(layout, 5), laid_out(layout, 6)
    source = await make(mine, limits=replace(limits_of(layout), checked_bytes=checked_bytes))
    destination = await make(theirs, faults=Harm(harm))
    incoming = destination.expect("m", range(12), deadline_s=30)
    sent = source.send(destination.address, incoming.ticket, "m", range(12), deadline_s=30)
    assert await refusal(sent) is TransferReason.CORRUPTED
    assert await refusal(incoming.wait()) is TransferReason.CORRUPTED
    assert not theirs[:12].any()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_transfer_that_its_source_aborts_leaves_zeros(make: Make, layout: str) -> None:
    stall = Stall(FaultPoint.CHUNK_READY)
    theirs = laid_out(layout, 7)
    source = await make(laid_out(layout, 8), limits=limits_of(layout), faults=stall)
    destination = await make(theirs)
    incoming = destination.expect("m", range(40), deadline_s=30)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=30))
    await stall.reached.wait()
    sending.cancel()
    stall.go.set()
    assert await refusal(incoming.wait()) is TransferReason.CANCELLED
    assert not theirs[:40].any() and theirs[40:].any()


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("checked_bytes", [64, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("uses_device", [True, False])
@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
async def test_ends_may_keep_their_pools_in_other_kinds_of_memory(
    kinds: tuple[str, str], uses_device: bool, layout: str, checked_bytes: int
) -> None:
    """And a page-locked end may meet one whose link reads the GPU: the sums of both must agree."""
    mine, theirs = laid_out(layout, 1, kinds[0]), laid_out(layout, 2, kinds[1])
    limits = replace(limits_of(layout), checked_bytes=checked_bytes)
    source = KvTransport(UcxNetwork("127.0.0.1", uses_device=uses_device), limits)
    destination = KvTransport(UcxNetwork("127.0.0.1"))
    for transport, rows in ((source, mine), (destination, theirs)):
        await transport.open()
        transport.register("m", rows)
    incoming = destination.expect("m", range(40), deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", range(24, 64), deadline_s=30)
    assert torch.equal(theirs[:40].cpu(), mine[24:].cpu())
    for transport in (source, destination):
        await transport.close()
