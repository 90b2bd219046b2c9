"""Transports whose ends are in one process, over UCX and over in-process links, and what can be done to them. Where there
is a GPU also with pools on it: over links that read it, and through page-locked memory."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

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
from services.worker.kv_transport.faults import NO_FAULTS, FaultPoint, Faults
from services.worker.kv_transport.links import Buffer
from services.worker.kv_transport.staging import KvPool
from services.worker.kv_transport.telemetry import TransferMetrics
from tests.worker.kv_transport.local import LocalHub, LocalNetwork

BLOCK_BYTES, STRIDE_BYTES, NUM_BLOCKS = 24_640, 24_704, 64
LAYOUTS = ["fused", "runs", "lone"]
LIMITS = TransportLimits(
    chunk_bytes=5 * BLOCK_BYTES, checked_bytes=4096, drain_s=20.0, first_ticket_s=20.0, rate_fraction=None
)
"""Limits of peers that play along: both ends share a process, and each answer of theirs takes the threads of UCX and
the event loop their turns on a core, so that on a busy machine it may come a second late."""
IMPATIENT = replace(LIMITS, drain_s=0.3, first_ticket_s=0.3)
"""Limits of peers that do not."""

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

Make = Callable[..., Awaitable[KvTransport]]
_device = "cpu"
"""Device of the pools that a test makes; `new_network` sets it."""


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests with further parameters meet the layouts in turn, each network all of them; other combinations are long ones."""
    cases: dict[str, dict[str, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == Path(__file__).parent and "layout" in params and len(params) > 2:
            others = {name: value for name, value in params.items() if name != "layout"}
            cases[item.originalname][repr(others)].append(item)
    for of_test in cases.values():
        for number, layouts in enumerate(of_test.values()):
            layouts.pop(number % len(layouts))
            for item in layouts:
                item.add_marker(pytest.mark.long)


def pool(seed: int, stride_bytes: int = STRIDE_BYTES, device: str = "") -> torch.Tensor:
    """`[NUM_BLOCKS, BLOCK_BYTES]` uint8 of random bytes, with gaps between the blocks as in the KV slab."""
    data = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, stride_bytes), dtype=np.uint8)
    rows = torch.from_numpy(data).to(device or _device)[:, :BLOCK_BYTES]
    settle(rows)
    return rows


def settle(rows: torch.Tensor) -> None:
    """What the test has written is there before a transport reads it: that has a stream of its own."""
    if rows.is_cuda:
        torch.cuda.synchronize()


def laid_out(layout: str, seed: int, device: str = "") -> torch.Tensor:
    """`runs`: neighbours are one run of memory; else there are gaps."""
    return pool(seed, BLOCK_BYTES if layout == "runs" else STRIDE_BYTES, device)


def limits_of(layout: str) -> TransportLimits:
    """`lone`: each block is a message, straight from pool to pool."""
    return replace(LIMITS, lone_block_bytes=BLOCK_BYTES) if layout == "lone" else LIMITS


@pytest.fixture(
    params=[
        "local",
        "ucx",
        *(
            pytest.param(f"{way}, CUDA", marks=[pytest.mark.gpu, NEEDS_CUDA])
            for way in ("local", "ucx", "ucx page-locked")
        ),
    ]
)
def new_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Network]:
    way, _, device = request.param.partition(", ")
    if device:
        warm_up()
        monkeypatch.setitem(globals(), "_device", "cuda")
    hub = LocalHub()
    if way == "local":
        return lambda: LocalNetwork(hub)
    pytest.importorskip("ucxx")
    return lambda: UcxNetwork("127.0.0.1", uses_device=way == "ucx")


@functools.cache
def warm_up() -> None:
    """First uses of a GPU take longer than the deadlines of these tests."""
    zeros = torch.zeros(2, STRIDE_BYTES, dtype=torch.uint8, device="cuda")[:, :BLOCK_BYTES]
    settle(zeros)
    rows = KvPool(zeros)
    for device, pinned in (("cuda", False), ("cpu", True)):
        staging = torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
        assert rows.gather([0, 1], staging, 64) == rows.scatter([1, 0], staging, 64)
    rows.zero([0])


@pytest.fixture
async def make(new_network: Callable[[], Network]) -> AsyncIterator[Make]:
    made: list[KvTransport] = []

    async def make_one(
        rows: torch.Tensor | None = None,
        *,
        limits: TransportLimits = LIMITS,
        faults: Faults = NO_FAULTS,
        metrics: TransferMetrics | None = None,
    ) -> KvTransport:
        transport = KvTransport(new_network(), limits, faults=faults, metrics=metrics)
        await transport.open()
        made.append(transport)
        transport.register("m", pool(0) if rows is None else rows)
        return transport

    yield make_one
    for transport in made:
        await transport.close()
        assert transport.num_active == 0


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def refusal(work: Awaitable[object]) -> TransferReason:
    with pytest.raises(TransferError) as caught:
        await work
    return caught.value.reason


class At(Faults):
    """Does something at one point, the first `times` times."""

    def __init__(self, point: FaultPoint, action: Callable[[Buffer | None], Awaitable[None]], times: int = 1) -> None:
        self.point, self.action, self.times = point, action, times
        self.reached = asyncio.Event()

    async def at(self, point: FaultPoint, payload: Buffer | None = None) -> None:
        if point is self.point and self.times:
            self.times -= 1
            self.reached.set()
            await self.action(payload)


class Harm(At):
    """Changes the bytes of one chunk on its arrival."""

    def __init__(self, change: Callable[[np.ndarray], object]) -> None:
        async def harm(payload: Buffer | None) -> None:
            assert payload is not None
            if isinstance(payload, np.ndarray):
                change(payload)
                return
            harmed = payload.cpu()
            change(harmed.numpy())
            payload.copy_(harmed)
            torch.cuda.synchronize()

        super().__init__(FaultPoint.CHUNK_ARRIVED, harm)


class Stall(At):
    def __init__(self, point: FaultPoint) -> None:
        self.go = asyncio.Event()

        async def wait(_: Buffer | None) -> None:
            await self.go.wait()

        super().__init__(point, wait)
