"""Connections, pools, staging and transfers of every implementation come and go: cancelled, closed, bounded, counted."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.worker.kv_transport import (
    KvTransport,
    Network,
    TransferError,
    TransferReason,
    TransportLimits,
    UcxNetwork,
    ucx,
)
from services.worker.kv_transport.faults import FaultPoint, Faults
from services.worker.kv_transport.links import Buffer
from services.worker.kv_transport.staging import StagingPair
from services.worker.kv_transport.telemetry import TransferMetrics
from tests.stalls import Stopwatch
from tests.worker.kv_transport.conftest import (
    BLOCK_BYTES,
    LAYOUTS,
    LIMITS,
    Make,
    Stall,
    laid_out,
    limits_of,
    pool,
    refusal,
    until,
)
from tests.worker.kv_transport.local import LocalHub, LocalLink, LocalNetwork


async def test_staging_is_made_beside_the_event_loop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a device takes milliseconds to get."""
    threads: list[threading.Thread] = []
    make_buffer = StagingPair._make

    def noting(self: StagingPair) -> torch.Tensor:
        threads.append(threading.current_thread())
        return make_buffer(self)

    monkeypatch.setattr(StagingPair, "_make", noting)
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=30)
    assert len(threads) == 4 and threading.main_thread() not in threads


async def test_what_is_known_of_a_peer_goes_with_its_connection(make: Make) -> None:
    """Else the rate would for ever be that of the fastest that ever was."""
    source, destination = await make(), await make()
    incoming = destination.expect("m", range(20), deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", range(20), deadline_s=30)
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
        await ends[0].connect(other.address, deadline_s=30)
    abort, together = LocalLink.abort, asyncio.Barrier(5)

    async def with_the_others(self: LocalLink) -> None:
        async with asyncio.timeout(20):
            await together.wait()
        await abort(self)

    monkeypatch.setattr(LocalLink, "abort", with_the_others)
    ends[0]._network.close = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    await ends[0].close()
    monkeypatch.undo()
    for other in ends[1:]:
        await other.close()


async def test_ucx_is_loaded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ucxx")
    threads: list[threading.Thread] = []
    new_context = ucx._new_context

    def noting(options: Mapping[str, str]) -> object:
        threads.append(threading.current_thread())
        return new_context(options)

    monkeypatch.setattr(ucx, "_new_context", noting)
    networks = [UcxNetwork("127.0.0.1") for _ in range(3)]
    await asyncio.gather(*(network.open(lambda link: None) for network in networks))
    for network in networks:
        await network.close()
    assert len(threads) == 1 and threads[0] is not threading.main_thread(), "one context, made in another thread"
    assert not ucx._Runtime._by_loop


@pytest.mark.parametrize("error", [None, ImportError("no cuda.core")])
async def test_device_memory_needs_a_context_for_the_thread_of_ucx(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ucxx")
    monkeypatch.setattr(ucx, "uses_cuda", lambda is_allowed, info: True)
    monkeypatch.setattr(ucx, "_make_cuda_context", lambda: error)
    network = UcxNetwork("127.0.0.1")
    await network.open(lambda link: None)
    assert network.reads_device == (error is None)
    await network.close()


async def test_ucx_reads_device_memory_only_where_it_can() -> None:
    """ucxx says that it does wherever it is not forbidden: then memory of a GPU would be read as if it were the host's."""
    pytest.importorskip("ucxx")
    for uses_device in (True, False):
        network = UcxNetwork("127.0.0.1", uses_device=uses_device)
        await network.open(lambda link: None)
        assert network.reads_device == (uses_device and torch.cuda.is_available())
        await network.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_cancelled_transfer_frees_everything_and_the_connection_lives(
    make: Make, side: str, layout: str
) -> None:
    stall = Stall(FaultPoint.CHUNK_READY)
    theirs = laid_out(layout, 7)
    source = await make(laid_out(layout, 8), limits=limits_of(layout), faults=stall)
    destination = await make(theirs)
    incoming = destination.expect("m", range(40), deadline_s=30)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=30))
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
    again = destination.expect("m", [0], deadline_s=30)
    await source.send(destination.address, again.ticket, "m", [9], deadline_s=30)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after_chunks", [0, 1, 3, 7])
async def test_blocks_are_not_written_after_the_end_of_a_cancelled_transfer(
    make: Make, layout: str, after_chunks: int
) -> None:
    theirs = laid_out(layout, 9)
    reached = asyncio.Event()
    num_arrived = 0

    class Count(Faults):
        async def at(self, point: FaultPoint, payload: Buffer | None = None) -> None:
            nonlocal num_arrived
            num_arrived += point is FaultPoint.CHUNK_ARRIVED
            if num_arrived >= after_chunks and point is not FaultPoint.BEFORE_END:
                reached.set()

    source = await make(laid_out(layout, 8), limits=limits_of(layout))
    destination = await make(theirs, faults=Count())
    incoming = destination.expect("m", range(60), deadline_s=30)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(60), deadline_s=30))
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
    incoming = destination.expect("m", [7], deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", [9], deadline_s=30)
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
    waiting, running = (destination.expect("m", range(20), deadline_s=30) for _ in range(2))
    sending = asyncio.create_task(source.send(destination.address, running.ticket, "m", range(20), deadline_s=30))
    await stall.reached.wait()
    (source if side == "source" else destination).unregister("m")
    if side == "source":
        waiting.cancel()
    stall.go.set()
    for work in (sending, running.wait(), waiting.wait()):
        assert await refusal(work) is TransferReason.CANCELLED


async def test_staging_is_bounded_and_waiting_for_it_ends_at_the_deadline(make: Make) -> None:
    one = TransportLimits(chunk_bytes=BLOCK_BYTES, max_transfers=1, drain_s=0.3)
    stall = Stall(FaultPoint.CHUNK_READY)
    source, destination = await make(limits=one, faults=stall), await make()
    first, second = (destination.expect("m", [block], deadline_s=30) for block in (1, 2))
    sending = asyncio.create_task(source.send(destination.address, first.ticket, "m", [1], deadline_s=30))
    await stall.reached.wait()
    waiting = source.send(destination.address, second.ticket, "m", [2], deadline_s=0.2)
    assert await refusal(waiting) is TransferReason.DEADLINE
    stall.go.set()
    await sending
    second.cancel()


async def test_an_address_without_a_listener_is_unreachable(make: Make) -> None:
    source, gone = await make(), await make()
    await gone.close()
    reason = await refusal(source.send(gone.address, b"t" * 16, "m", [1], deadline_s=30))
    assert reason is TransferReason.UNREACHABLE


async def test_a_destination_that_closes_is_noticed(make: Make) -> None:
    stall = Stall(FaultPoint.CHUNK_ARRIVED)
    source, destination = await make(), await make(faults=stall)
    incoming = destination.expect("m", range(40), deadline_s=30)
    sending = asyncio.create_task(source.send(destination.address, incoming.ticket, "m", range(40), deadline_s=30))
    await stall.reached.wait()
    await destination.close()
    assert await refusal(sending) in (TransferReason.PEER_LOST, TransferReason.CLOSED)
    assert await refusal(incoming.wait()) is TransferReason.CLOSED
    with pytest.raises(TransferError):
        destination.expect("m", [1], deadline_s=1)


async def test_concurrent_transfers_share_the_rate_limit(make: Make) -> None:
    source, destination = await make(), await make()
    rate = 40 * BLOCK_BYTES / 0.2
    started = time.monotonic()
    source._bucket.set_rate(rate, asyncio.get_running_loop().time())
    with Stopwatch() as watch:
        incoming = [destination.expect("m", range(20 * i, 20 * i + 20), deadline_s=30) for i in range(3)]
        await asyncio.gather(
            *(source.send(destination.address, one.ticket, "m", range(20), deadline_s=30) for one in incoming)
        )
    assert time.monotonic() - started > 0.18 and watch.seconds < 1.5


async def test_metrics_tell_bytes_reasons_and_bandwidth(new_network: Callable[[], Network]) -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    ends = [KvTransport(new_network(), LIMITS, metrics=TransferMetrics(registry)) for registry in registries]
    for transport in ends:
        await transport.open()
        transport.register("m", pool(1))
    for registry, direction in itertools.product(registries, ("out", "in")):
        for name in ("bytes_total", "seconds_sum", "seconds_count"):
            known = registry.get_sample_value(f"tideway_kv_transfer_{name}", {"direction": direction})
            assert known == 0, "a rate over the first transfer needs what was before it"
    source, destination = ends
    incoming = destination.expect("m", [1, 2], deadline_s=30)
    await source.send(destination.address, incoming.ticket, "m", [3, 4], deadline_s=30)
    await incoming.wait()
    cancelled = destination.expect("m", [1], deadline_s=30)
    cancelled.cancel()
    late = source.send(destination.address, cancelled.ticket, "m", [1], deadline_s=30)
    assert await refusal(late) is TransferReason.TICKET_USED
    for registry, direction, reason in ((registries[0], "out", "ticket_used"), (registries[1], "in", "cancelled")):

        def value(name: str, registry: CollectorRegistry = registry, **labels: str) -> float | None:
            return registry.get_sample_value(f"tideway_kv_transfer_{name}", labels)

        assert value("bytes_total", direction=direction) == 2 * BLOCK_BYTES
        assert value("seconds_count", direction=direction) == 1
        assert value("transfers_total", direction=direction, reason="done") == 1
        assert value("transfers_total", direction=direction, reason=reason) == 1
    for transport in ends:
        await transport.close()
    assert registries[0].get_sample_value("tideway_kv_transfer_connections") == 0
