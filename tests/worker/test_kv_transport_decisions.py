"""Tickets, rates and the wire format of the KV transport: pure code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.kv_transport import wire
from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.leases import Leases
from services.worker.kv_transport.rates import Bandwidth, TokenBucket
from services.worker.kv_transport.staging import KvPool
from services.worker.kv_transport.ucx import uses_cuda


class LeaseMachine(RuleBasedStateMachine):
    """Against a model that keeps every ticket for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(memory_s=10.0)
        self.now = 0.0
        self.deadlines: dict[bytes, float] = {}
        self.used: set[bytes] = set()
        self.released: set[bytes] = set()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(lifetime=st.sampled_from([0.5, 2.0, 5.0]))
    def grant(self, lifetime: float) -> None:
        ticket = len(self.deadlines).to_bytes(16, "little")
        self.leases.grant(ticket, self.now + lifetime)
        self.deadlines[ticket] = self.now + lifetime

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data())
    def redeem(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.deadlines)))
        live = self.deadlines[ticket] > self.now
        good = live and ticket not in self.used | self.released
        try:
            assert self.leases.redeem(ticket, self.now) == self.deadlines[ticket]
            assert good
            self.used.add(ticket)
        except TransferError as error:
            assert not good
            if live:
                assert error.reason is TransferReason.TICKET_USED
            elif self.deadlines[ticket] + 10.0 <= self.now:
                assert error.reason is TransferReason.TICKET_UNKNOWN

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.deadlines)))
        self.leases.release(ticket)
        self.released.add(ticket)

    @invariant()
    def counts_what_is_live(self) -> None:
        self.leases.expire(self.now)
        live = {ticket for ticket, deadline in self.deadlines.items() if deadline > self.now} - self.released
        assert len(self.leases) == len(live)


TestLeases = LeaseMachine.TestCase


def test_an_expired_ticket_is_reported_once_and_refused_as_expired() -> None:
    leases = Leases()
    leases.grant(b"a", 1.0)
    leases.grant(b"b", 5.0)
    assert leases.expire(0.9) == []
    assert leases.expire(1.0) == [b"a"]
    assert leases.expire(2.0) == []
    with pytest.raises(TransferError) as caught:
        leases.redeem(b"a", 2.0)
    assert caught.value.reason is TransferReason.TICKET_EXPIRED
    with pytest.raises(ValueError, match="once"):
        leases.grant(b"b", 9.0)


@given(
    rate=st.floats(1.0, 1e9),
    burst=st.floats(0.0, 1e6),
    takes=st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.0, 10.0)), min_size=1, max_size=30),
)
def test_no_more_than_rate_and_burst_leaves_a_bucket(rate: float, burst: float, takes: list[tuple[int, float]]) -> None:
    bucket, now, first, total, latest = TokenBucket(rate, burst), 7.0, 7.0, 0, 0.0
    for num_bytes, pause in takes:
        now += pause
        leaves = now + bucket.take(num_bytes, now)
        total += num_bytes
        assert leaves >= latest - 1e-6 * max(1.0, latest)  # in order
        latest = max(latest, leaves)
        assert total <= burst + rate * (latest - first) + 1e-6 * (total + rate * latest)


def test_a_bucket_without_a_rate_never_waits_and_can_get_one() -> None:
    bucket = TokenBucket(None, 10)
    assert bucket.take(1 << 40, 0.0) == 0.0
    bucket.set_rate(100.0, 1.0)
    assert bucket.take(10, 1.0) == 0.0
    assert bucket.take(50, 1.0) == pytest.approx(0.5)
    bucket.set_rate(1000.0, 1.0)
    assert bucket.take(50, 1.0) == pytest.approx(0.1)
    for rate, burst in ((0.0, 1), (1.0, -1)):
        with pytest.raises(ValueError, match="bucket"):
            TokenBucket(rate, burst)


def test_bandwidth_follows_change_and_ignores_nothing_sent() -> None:
    bandwidth = Bandwidth(window_bytes=1000)
    bandwidth.add(0, 5.0)
    assert bandwidth.bytes_s is None
    bandwidth.add(100, 1.0)
    assert bandwidth.bytes_s == pytest.approx(100.0)
    for _ in range(60):
        bandwidth.add(100, 0.1)
    assert bandwidth.bytes_s == pytest.approx(1000.0, rel=0.05)


@given(
    payload=st.binary(min_size=1, max_size=64).flatmap(
        lambda unit: st.integers(1, 400).map(lambda times: (unit * times)[:20_000])
    ),
    place=st.integers(0, 1 << 30),
    change=st.integers(1, 255),
)
def test_the_checksum_sees_every_changed_byte(payload: bytes, place: int, change: int) -> None:
    data = np.frombuffer(payload, dtype=np.uint8).copy()
    before = wire.checksum(data, wire.LINE_BYTES)
    data[place % len(data)] ^= change
    assert wire.checksum(data, wire.LINE_BYTES) != before


def test_the_checksum_sees_lines_that_changed_places() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (4, 4096), dtype=np.uint8)
    before = wire.checksum(rows.reshape(-1), 64)
    assert wire.checksum(rows[[1, 0, 2, 3]].reshape(-1), 64) != before
    shifted = np.roll(rows.reshape(-1), 8)
    assert wire.checksum(shifted, 64) != before


@pytest.mark.parametrize("block_bytes", [24_640, 64 << 10, 300_000 & ~7, 1 << 20])
def test_all_ways_to_sum_blocks_agree(block_bytes: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(block_bytes).integers(0, 256, (12, block_bytes), dtype=np.uint8))
    pool, copy = KvPool(rows), KvPool(torch.zeros_like(rows))
    staging = torch.empty(7 * block_bytes, dtype=torch.uint8)
    blocks = range(3, 10)
    run = pool.run_of(blocks)
    assert isinstance(run, np.ndarray)
    total = pool.checksum(run, 512)
    assert pool.gather(blocks, staging, 512) == total
    assert copy.scatter(blocks, staging, 512) == total
    assert pool.checksum(staging, 512) == total  # as on a GPU
    assert wire.device_checksum(staging, 512, 3) == wire.checksum(staging.numpy(), 512, 3)
    assert pool.run_of([3, 5]) is None
    assert pool.run_of([4, 3]) is None


def test_cuda_is_used_where_ucx_has_the_transport_for_it() -> None:
    host = (
        "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n#      resource 5  :  md 4  dev 0  flags -- cma/memory\n"
    )
    device = host + "#      resource 6  :  md 5  dev 3  flags -- cuda_copy/cuda\n"
    assert uses_cuda(True, device)
    assert not uses_cuda(False, device), "UCX_TLS forbids it"
    assert not uses_cuda(True, host)
    assert not uses_cuda(True, host + "#      resource 6  :  md 5  dev 3  flags -- cuda_ipc/cuda\n")


def test_control_messages_survive_the_wire() -> None:
    for message in (
        wire.Open(1 << 40, b"t" * 16, 9, 24_640, 5, 512),
        wire.Accept(3),
        wire.Sent(4, 7, 0xFFFFFFFF, aborted=True),
        wire.Ended(4, TransferReason.CORRUPTED, 12, 0xFFFFFFFF, "x" * 200),
        wire.Cancel(5),
    ):
        assert wire.decode_control(wire.encode_control(message)) == message
    with pytest.raises(LinkError):
        wire.decode_control(np.full(wire.CONTROL_BYTES, 255, dtype=np.uint8))
