"""What every implementation of the KV transport does: both ends in one process, over UCX and over in-process links."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.worker.kv_transport import (
    KvTransport,
    LocalHub,
    LocalNetwork,
    Network,
    TransferError,
    TransferReason,
    TransportLimits,
    UcxNetwork,
    ucx,
)
from services.worker.kv_transport.faults import NO_FAULTS, FaultPoint, Faults
from services.worker.kv_transport.local import LocalLink
from services.worker.kv_transport.staging import StagingPair
from services.worker.kv_transport.telemetry import TransferMetrics

SLOT_BYTES, STRIDE_BYTES, NUM_SLOTS = 24_640, 24_704, 64
LAYOUTS = ["fused", "runs", "lone"]
LIMITS = TransportLimits(
    chunk_bytes=5 * SLOT_BYTES, checked_bytes=4096, drain_s=0.3, first_ticket_s=0.3, rate_fraction=None
)

Make = Callable[..., Awaitable[KvTransport]]


def pool(seed: int, stride_bytes: int = STRIDE_BYTES) -> torch.Tensor:
    """`[NUM_SLOTS, SLOT_BYTES]` uint8 of random bytes, with gaps between the slots as in the KV slab."""
    data = np.random.default_rng(seed).integers(0, 256, (NUM_SLOTS, stride_bytes), dtype=np.uint8)
    return torch.from_numpy(data)[:, :SLOT_BYTES]


def laid_out(layout: str, seed: int) -> torch.Tensor:
    """`runs`: neighbours are one run of memory; else there are gaps."""
    return pool(seed, SLOT_BYTES if layout == "runs" else STRIDE_BYTES)


def limits_of(layout: str) -> TransportLimits:
    """`lone`: each slot is a message, straight from pool to pool."""
    return replace(LIMITS, lone_slot_bytes=SLOT_BYTES) if layout == "lone" else LIMITS


@pytest.fixture(params=["local", "ucx"])
def new_network(request: pytest.FixtureRequest) -> Callable[[], Network]:
    hub = LocalHub()
    if request.param == "local":
        return lambda: LocalNetwork(hub)
    pytest.importorskip("ucxx")
    return lambda: UcxNetwork("127.0.0.1")


@pytest.fixture
async def make(new_network: Callable[[], Network]) -> AsyncIterator[Make]:
    made: list[KvTransport] = []

    async def make_one(
        rows: torch.Tensor | None = None, *, limits: TransportLimits = LIMITS, faults: Faults = NO_FAULTS
    ) -> KvTransport:
        transport = KvTransport(new_network(), limits, faults=faults)
        await transport.open()
        made.append(transport)
        transport.register("m", pool(0) if rows is None else rows)
        return transport

    yield make_one
    for transport in made:
        await transport.close()
        assert transport.num_active == 0


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def refusal(work: Awaitable[object]) -> TransferReason:
    with pytest.raises(TransferError) as caught:
        await work
    return caught.value.reason


class At(Faults):
    """Does something at one point, the first `times` times."""

    def __init__(
        self, point: FaultPoint, action: Callable[[np.ndarray | None], Awaitable[None]], times: int = 1
    ) -> None:
        self.point, self.action, self.times = point, action, times
        self.reached = asyncio.Event()

    async def at(self, point: FaultPoint, payload: np.ndarray | None = None) -> None:
        if point is self.point and self.times:
            self.times -= 1
            self.reached.set()
            await self.action(payload)


class Stall(At):
    def __init__(self, point: FaultPoint) -> None:
        self.go = asyncio.Event()

        async def wait(_: np.ndarray | None) -> None:
            await self.go.wait()

        super().__init__(point, wait)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
async def test_bytes_arrive_equal_and_only_where_they_should(make: Make, seed: int, layout: str) -> None:
    chosen = random.Random(seed)
    mine, theirs = laid_out(layout, 1), laid_out(layout, 2)
    before = theirs.clone()
    source, destination = await make(mine, limits=limits_of(layout)), await make(theirs)
    count = chosen.choice([1, 4, 5, 6, 10, 11, 37, NUM_SLOTS])
    from_slots, to_slots = chosen.sample(range(NUM_SLOTS), count), chosen.sample(range(NUM_SLOTS), count)
    if layout == "runs":  # to scattered slots, from scattered slots, to a run
        first = NUM_SLOTS - count
        from_slots, to_slots = (
            (list(range(first, NUM_SLOTS)), to_slots),
            (from_slots, list(range(first, NUM_SLOTS))),
            (list(range(count)), list(range(first, NUM_SLOTS))),
        )[seed % 3]
    incoming = destination.expect("m", to_slots, deadline_s=5)
    sent = await source.send(destination.address, incoming.ticket, "m", from_slots, deadline_s=5)
    received = await incoming.wait()
    assert sent.num_bytes == received.num_bytes == count * SLOT_BYTES
    assert sent.checksum == received.checksum
    before[to_slots] = mine[from_slots]
    assert torch.equal(theirs, before)
    assert source.bandwidth_bytes_s(destination.address) is not None


async def test_several_transfers_at_once_in_both_directions(make: Make) -> None:
    rows = [pool(3), pool(4)]
    expected = [rows[0].clone(), rows[1].clone()]
    ends = [await make(rows[0]), await make(rows[1])]
    work = []
    for number in range(12):
        near, far = (0, 1) if number % 2 else (1, 0)
        from_slots = range(5 * (number // 2), 5 * (number // 2) + 5)
        to_slots = [slot + 30 for slot in from_slots]
        expected[far][to_slots] = rows[near][list(from_slots)]
        incoming = ends[far].expect("m", to_slots, deadline_s=8)
        work += [
            ends[near].send(ends[far].address, incoming.ticket, "m", list(from_slots), deadline_s=8),
            incoming.wait(),
        ]
    await asyncio.gather(*work)
    assert torch.equal(rows[0], expected[0])
    assert torch.equal(rows[1], expected[1])


async def test_a_wrong_ticket_is_refused_and_its_connection_closed(make: Make) -> None:
    source, destination = await make(), await make()
    reason = await refusal(source.send(destination.address, b"guess", "m", [1], deadline_s=3))
    assert reason is TransferReason.TICKET_UNKNOWN
    await until(lambda: not destination.num_connections and not source.num_connections)


async def test_a_connection_that_shows_no_ticket_is_closed(make: Make, new_network: Callable[[], Network]) -> None:
    destination = await make()
    stranger = new_network()
    await stranger.open(lambda link: None)
    link = await stranger.connect(destination.address)
    await until(lambda: destination.num_connections == 1)
    await until(lambda: destination.num_connections == 0)
    await link.abort()
    await stranger.close()


async def test_a_ticket_is_good_once(make: Make) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", [3], deadline_s=3)
    await source.send(destination.address, incoming.ticket, "m", [1], deadline_s=3)
    again = source.send(destination.address, incoming.ticket, "m", [2], deadline_s=3)
    assert await refusal(again) is TransferReason.TICKET_USED


async def test_an_expectation_nobody_fills_ends_at_its_deadline(make: Make) -> None:
    source, destination = await make(), await make()
    incoming = destination.expect("m", [3], deadline_s=0.1)
    assert await refusal(incoming.wait()) is TransferReason.DEADLINE
    assert destination.num_active == 0
    late = source.send(destination.address, incoming.ticket, "m", [1], deadline_s=3)
    assert await refusal(late) is TransferReason.TICKET_EXPIRED


@pytest.mark.parametrize("slots", [[1, 2], [1]])
async def test_both_ends_must_mean_the_same_slots(make: Make, slots: list[int]) -> None:
    source, destination = await make(torch.zeros(4, 128, dtype=torch.uint8)), await make()
    incoming = destination.expect("m", [3], deadline_s=3)
    failed = source.send(destination.address, incoming.ticket, "m", slots, deadline_s=3)
    assert await refusal(failed) is TransferReason.MISMATCH
    assert await refusal(incoming.wait()) is TransferReason.MISMATCH
    for bad in ([NUM_SLOTS], [-1], []):
        with pytest.raises(TransferError):
            destination.expect("m", bad, deadline_s=1)


@pytest.mark.parametrize("layout", ["fused", "runs"])
@pytest.mark.parametrize("point", [FaultPoint.OPENED, FaultPoint.CHUNK_ARRIVED, FaultPoint.BEFORE_END])
async def test_a_peer_that_never_receives_costs_no_more_than_the_deadline(
    make: Make, point: FaultPoint, layout: str
) -> None:
    stall = Stall(point)
    theirs = laid_out(layout, 2)
    source, destination = await make(laid_out(layout, 1)), await make(theirs, faults=stall)
    incoming = destination.expect("m", range(20), deadline_s=0.4)
    started = time.monotonic()
    failed = source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=0.4)
    assert await refusal(failed) is TransferReason.DEADLINE
    assert time.monotonic() - started < 0.8
    assert await refusal(incoming.wait()) is TransferReason.DEADLINE
    assert time.monotonic() - started < 2.5
    before = theirs.clone()
    stall.go.set()
    await until(lambda: source.num_active == destination.num_active == 0)
    assert torch.equal(theirs, before)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_changed_byte_is_noticed_and_the_slots_are_zeroed(make: Make, layout: str) -> None:
    async def change(payload: np.ndarray | None) -> None:
        assert payload is not None
        payload[len(payload) // 3] ^= 4

    mine, theirs = laid_out(layout, 5), laid_out(layout, 6)
    expected = theirs.clone()
    expected[:12] = 0
    source = await make(mine, limits=limits_of(layout))
    destination = await make(theirs, faults=At(FaultPoint.CHUNK_ARRIVED, change))
    incoming = destination.expect("m", range(12), deadline_s=3)
    sent = source.send(destination.address, incoming.ticket, "m", range(12), deadline_s=3)
    assert await refusal(sent) is TransferReason.CORRUPTED
    assert await refusal(incoming.wait()) is TransferReason.CORRUPTED
    assert torch.equal(theirs, expected)
    retry = destination.expect("m", range(12), deadline_s=3)
    await source.send(destination.address, retry.ticket, "m", range(12), deadline_s=3)
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

    async def harm(payload: np.ndarray | None) -> None:
        assert payload is not None
        DAMAGES[damage](payload, slice(start, start + 8192))

    checked_bytes = TransportLimits().checked_bytes
    mine, theirs = laid_out(layout, 5), laid_out(layout, 6)
    source = await make(mine, limits=replace(limits_of(layout), checked_bytes=checked_bytes))
    destination = await make(theirs, faults=At(FaultPoint.CHUNK_ARRIVED, harm))
    incoming = destination.expect("m", range(12), deadline_s=3)
    sent = source.send(destination.address, incoming.ticket, "m", range(12), deadline_s=3)
    assert await refusal(sent) is TransferReason.CORRUPTED
    assert await refusal(incoming.wait()) is TransferReason.CORRUPTED
    assert not theirs[:12].any()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_transfer_that_its_source_aborts_leaves_zeros(make: Make, layout: str) -> None:
    stall = Stall(FaultPoint.CHUNK_READY)
    theirs = laid_out(layout, 7)
    source = await make(laid_out(layout, 8), limits=limits_of(layout), faults=stall)
    destination = await make(theirs)
    incoming = destination.expect("m", range(40), deadline_s=5)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=5))
    await stall.reached.wait()
    sending.cancel()
    stall.go.set()
    assert await refusal(incoming.wait()) is TransferReason.CANCELLED
    assert not theirs[:40].any() and theirs[40:].any()


async def test_staging_is_made_beside_the_event_loop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a device takes milliseconds to get."""
    threads: list[threading.Thread] = []
    make_buffer = StagingPair._make

    def noting(self: StagingPair) -> torch.Tensor:
        threads.append(threading.current_thread())
        return make_buffer(self)

    monkeypatch.setattr(StagingPair, "_make", noting)
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=5)
    await source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=5)
    assert len(threads) == 4 and threading.main_thread() not in threads


async def test_what_is_known_of_a_peer_goes_with_its_connection(make: Make) -> None:
    """Else the rate would for ever be that of the fastest that ever was."""
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=5)
    await source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=5)
    assert source.bandwidth_bytes_s(destination.address)
    await destination.close()
    await until(lambda: not source.num_connections)
    assert source.bandwidth_bytes_s(destination.address) is None and not source._bandwidth


async def test_connections_are_closed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = LocalHub()
    ends = [KvTransport(LocalNetwork(hub), LIMITS) for _ in range(6)]
    for transport in ends:
        await transport.open()
    for other in ends[1:]:
        await ends[0].connect(other.address, deadline_s=3)
    abort = LocalLink.abort

    async def slowly(self: LocalLink) -> None:
        await asyncio.sleep(0.1)
        await abort(self)

    monkeypatch.setattr(LocalLink, "abort", slowly)
    started = time.monotonic()
    ends[0]._network.close = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    await ends[0].close()
    assert time.monotonic() - started < 0.35
    monkeypatch.undo()
    for other in ends[1:]:
        await other.close()


async def test_ucx_is_loaded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ucxx")
    threads: list[threading.Thread] = []
    new_context = ucx._new_context

    def noting() -> object:
        threads.append(threading.current_thread())
        return new_context()

    monkeypatch.setattr(ucx, "_new_context", noting)
    networks = [UcxNetwork("127.0.0.1") for _ in range(3)]
    await asyncio.gather(*(network.open(lambda link: None) for network in networks))
    for network in networks:
        await network.close()
    assert len(threads) == 1 and threads[0] is not threading.main_thread(), "one context, made in another thread"
    assert not ucx._Runtime._by_loop


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_cancelled_transfer_frees_everything_and_the_connection_lives(
    make: Make, side: str, layout: str
) -> None:
    stall = Stall(FaultPoint.CHUNK_READY)
    theirs = laid_out(layout, 7)
    source = await make(laid_out(layout, 8), limits=limits_of(layout), faults=stall)
    destination = await make(theirs)
    incoming = destination.expect("m", range(40), deadline_s=5)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=5))
    await stall.reached.wait()
    if side == "source":
        sending.cancel()
        stall.go.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
    else:
        incoming.cancel()
        stall.go.set()
        assert await refusal(sending) is TransferReason.CANCELLED
    assert await refusal(incoming.wait()) is TransferReason.CANCELLED
    before = theirs.clone()
    await until(lambda: source.num_active == destination.num_active == 0)
    assert torch.equal(theirs, before)
    assert source.num_connections == destination.num_connections == 1
    again = destination.expect("m", [0], deadline_s=3)
    await source.send(destination.address, again.ticket, "m", [9], deadline_s=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after_chunks", [0, 1, 3, 7])
async def test_slots_are_not_written_after_the_end_of_a_cancelled_transfer(
    make: Make, layout: str, after_chunks: int
) -> None:
    theirs = laid_out(layout, 9)
    reached = asyncio.Event()
    num_arrived = 0

    class Count(Faults):
        async def at(self, point: FaultPoint, payload: np.ndarray | None = None) -> None:
            nonlocal num_arrived
            num_arrived += point is FaultPoint.CHUNK_ARRIVED
            if num_arrived >= after_chunks and point is not FaultPoint.BEFORE_END:
                reached.set()

    source = await make(laid_out(layout, 8), limits=limits_of(layout))
    destination = await make(theirs, faults=Count())
    incoming = destination.expect("m", range(60), deadline_s=5)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(60), deadline_s=5))
    await reached.wait()
    incoming.cancel()
    assert await refusal(incoming.wait()) is TransferReason.CANCELLED
    theirs.zero_()
    assert await refusal(sending) is TransferReason.CANCELLED
    await until(lambda: source.num_active == destination.num_active == 0)
    assert not theirs.any()
    assert source.num_connections == destination.num_connections == 1


async def test_a_pool_can_be_replaced_and_taken_away(make: Make) -> None:
    source, destination = await make(pool(1)), await make(pool(2))
    mine, theirs = pool(3), pool(4)
    source.register("m", mine)
    destination.register("m", theirs)
    incoming = destination.expect("m", [7], deadline_s=3)
    await source.send(destination.address, incoming.ticket, "m", [9], deadline_s=3)
    assert torch.equal(theirs[7], mine[9])
    source.register("other", torch.zeros(1, 64, dtype=torch.uint8))
    for transport in (source, destination):
        transport.unregister("m")
        transport.unregister("m")
    with pytest.raises(TransferError):
        destination.expect("m", [1], deadline_s=1)
    assert await refusal(source.send(destination.address, b"t" * 16, "m", [1], deadline_s=1)) is TransferReason.MISMATCH


@pytest.mark.parametrize("side", ["source", "destination"])
async def test_taking_a_pool_away_cancels_its_transfers(make: Make, side: str) -> None:
    stall = Stall(FaultPoint.CHUNK_READY)
    source, destination = await make(faults=stall), await make()
    waiting, running = (destination.expect("m", range(20), deadline_s=5) for _ in range(2))
    sending = asyncio.create_task(source.send(destination.address, running.ticket, "m", range(20), deadline_s=5))
    await stall.reached.wait()
    (source if side == "source" else destination).unregister("m")
    if side == "source":
        waiting.cancel()
    stall.go.set()
    for work in (sending, running.wait(), waiting.wait()):
        assert await refusal(work) is TransferReason.CANCELLED


async def test_staging_is_bounded_and_waiting_for_it_ends_at_the_deadline(make: Make) -> None:
    one = TransportLimits(chunk_bytes=SLOT_BYTES, max_transfers=1, drain_s=0.3)
    stall = Stall(FaultPoint.CHUNK_READY)
    source, destination = await make(limits=one, faults=stall), await make()
    first, second = (destination.expect("m", [slot], deadline_s=5) for slot in (1, 2))
    sending = asyncio.create_task(source.send(destination.address, first.ticket, "m", [1], deadline_s=5))
    await stall.reached.wait()
    waiting = source.send(destination.address, second.ticket, "m", [2], deadline_s=0.2)
    assert await refusal(waiting) is TransferReason.DEADLINE
    stall.go.set()
    await sending
    second.cancel()


async def test_an_address_without_a_listener_is_unreachable(make: Make) -> None:
    source, gone = await make(), await make()
    await gone.close()
    reason = await refusal(source.send(gone.address, b"t" * 16, "m", [1], deadline_s=8))
    assert reason is TransferReason.UNREACHABLE


async def test_a_destination_that_closes_is_noticed(make: Make) -> None:
    stall = Stall(FaultPoint.CHUNK_ARRIVED)
    source, destination = await make(), await make(faults=stall)
    incoming = destination.expect("m", range(40), deadline_s=5)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=5))
    await stall.reached.wait()
    await destination.close()
    assert await refusal(sending) in (TransferReason.PEER_LOST, TransferReason.CLOSED)
    assert await refusal(incoming.wait()) is TransferReason.CLOSED
    with pytest.raises(TransferError):
        destination.expect("m", [1], deadline_s=1)


async def test_concurrent_transfers_share_the_rate_limit(make: Make) -> None:
    source, destination = await make(), await make()
    rate = 40 * SLOT_BYTES / 0.2
    source.limit_rate(rate)
    started = time.monotonic()
    incoming = [destination.expect("m", range(20 * i, 20 * i + 20), deadline_s=5) for i in range(3)]
    await asyncio.gather(
        *(source.send(destination.address, one.ticket, "m", range(20), deadline_s=5) for one in incoming)
    )
    assert 0.18 < time.monotonic() - started < 1.5


async def test_metrics_tell_bytes_reasons_and_bandwidth(new_network: Callable[[], Network]) -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    ends = [KvTransport(new_network(), LIMITS, metrics=TransferMetrics(registry)) for registry in registries]
    for transport in ends:
        await transport.open()
        transport.register("m", pool(1))
    source, destination = ends
    incoming = destination.expect("m", [1, 2], deadline_s=3)
    await source.send(destination.address, incoming.ticket, "m", [3, 4], deadline_s=3)
    await incoming.wait()
    cancelled = destination.expect("m", [1], deadline_s=3)
    cancelled.cancel()
    late = source.send(destination.address, cancelled.ticket, "m", [1], deadline_s=3)
    assert await refusal(late) is TransferReason.TICKET_USED
    for registry, direction, reason in ((registries[0], "out", "ticket_used"), (registries[1], "in", "cancelled")):

        def value(name: str, registry: CollectorRegistry = registry, **labels: str) -> float | None:
            return registry.get_sample_value(f"tideway_kv_transfer_{name}", labels)

        assert value("bytes_total", direction=direction) == 2 * SLOT_BYTES
        assert value("seconds_count", direction=direction) == 1
        assert value("transfers_total", direction=direction, reason="done") == 1
        assert value("transfers_total", direction=direction, reason=reason) == 1
    for transport in ends:
        await transport.close()
    assert registries[0].get_sample_value("tideway_kv_transfer_connections") == 0
