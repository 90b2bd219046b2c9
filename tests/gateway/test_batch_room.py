"""Who may have the room for the results of batches: reserved before a batch begins, the last of it for the first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from services.gateway.batch import reading as batch_input
from services.gateway.batch import records as batches
from services.gateway.batch import runner as batch_runner
from services.gateway.batch import service as batch_service
from services.gateway.batch.records import Batches, first_begun, fits, outstanding_bytes
from services.gateway.batch.runner import BatchRun
from shared.bus.interface import BusError, Room
from shared.bus.nats_bus import NatsBus
from shared.messages.batches import BatchLineResult, BatchRecord, StoredFile
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.settings import BusSettings
from tests.gateway.batching import echo, ended, leftovers, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

STORE_BYTES = 100_000


def record(name: str, status: str = "in_progress", reserved: int = 0, **fields) -> BatchRecord:
    return BatchRecord(
        batch_id=f"batch_{name}",
        tenant="",
        endpoint="",
        input_file_id="",
        completion_window="24h",
        deadline_s=1e12,
        status=status,
        created_s=0.0,
        reserved_bytes=reserved,
        **fields,
    )


def test_what_is_outstanding_is_the_open_lines_share() -> None:
    assert outstanding_bytes(record("a", reserved=1000, num_total=10, num_completed=3, num_failed=2)) == 500
    assert outstanding_bytes(record("a", "validating", reserved=1000)) == 1000
    assert outstanding_bytes(record("a", "finalizing", reserved=1000, num_total=10)) == 0


@pytest.mark.parametrize(
    ("needed", "used", "others", "expected"),
    [
        (60, 0, [], True),
        (75, 0, [], True),
        (60, 0, [60], False),
        (15, 0, [60], True),
        (16, 0, [60], False),
        (10, 70, [], False),
        (200, 0, [], True),
        (200, 25, [], True),
        (200, 26, [], False),
        (200, 0, [1], False),
    ],
)
def test_who_may_begin_in_a_store_of_100(needed: int, used: int, others: list[int], expected: bool) -> None:
    assert fits(needed, Room(used, 100), [record(str(n), reserved=n) for n in others]) is expected


def test_the_first_is_the_one_that_runs_for_longest() -> None:
    records = [
        record("c", status_s={"in_progress": 2.0}),
        record("b", status_s={"in_progress": 1.0}),
        record("a", status_s={"in_progress": 1.0}),
        record("z", "finalizing", status_s={"in_progress": 0.5}),
    ]
    assert first_begun(records) == "batch_a"
    assert first_begun(records[3:]) is None


@dataclass
class Store:
    one: Batches
    two: Batches


@pytest.fixture
async def store(nats_settings: BusSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """Store as two gateways see it."""
    monkeypatch.setattr(batches, "RESULTS_BYTES", STORE_BYTES)
    buses = [await NatsBus.connect(nats_settings, service="gateway", service_id=f"g{n}") for n in range(2)]
    stores = [Batches(bus) for bus in buses]
    for each in stores:
        await each.start()
        await each.watch(lambda key, value: None)
    yield Store(*stores)
    for bus in buses:
        await bus.close()


async def test_of_two_gateways_that_reserve_at_once_one_has_the_room(store: Store) -> None:
    for n in range(6):
        names = [f"batch_{n}a", f"batch_{n}b"]
        for name in names:
            await store.one.create(record(name.removeprefix("batch_"), "validating"))
        got = await asyncio.gather(store.one.reserve(names[0], 100, 0), store.two.reserve(names[1], 100, 0))
        assert sum(got) <= 1, "60 % of the store each"
        reserved = [(await store.one.record(name)).reserved_bytes for name in names]
        assert reserved == [60_000 if has else 0 for has in got]
        if not any(got):
            assert await store.one.reserve(names[0], 100, 0)
        for name in names:
            await store.one.change(name, lambda r: msgspec.structs.replace(r, status="cancelled"))
        await until(lambda: all(not each._others("") for each in (store.one, store.two)), "both see it")


async def test_the_last_room_is_for_the_first(store: Store) -> None:
    for number, name in enumerate(("old", "young")):
        await store.one.create(record(name, status_s={"in_progress": float(number)}))
    await until(lambda: len(store.one._known) == 2, "both are known")
    await store.one.create_result("batch_old", 0, BatchLineResult(True, b"x" * 80_000))
    await store.one.take_room("batch_old", 1000)
    with pytest.raises(BusError) as raised:
        await store.one.take_room("batch_young", 1000)
    assert raised.value.code is ErrorCode.OVERLOADED
    with pytest.raises(batches.ResultsFull):
        await store.one.create_result("batch_old", 1, BatchLineResult(True, b"x" * 30_000))
    with pytest.raises(BusError) as raised:
        await store.one.create_result("batch_young", 1, BatchLineResult(True, b"x" * 30_000))
    assert not isinstance(raised.value, batches.ResultsFull)


@pytest.fixture
async def small(nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr(batches, "RESULTS_BYTES", STORE_BYTES)
    monkeypatch.setattr(batches, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(batch_runner, "ROOM_INTERVAL_S", 0.1)
    monkeypatch.setattr(batch_runner, "PROGRESS_INTERVAL_S", 0.1)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        echo(stack)
        yield stack


async def test_two_batches_that_do_not_fit_together_run_one_after_the_other(small: Stack) -> None:
    client = small.openai()
    small.peer.grant_tokens = 0
    lines = [line(i, max_tokens=1, prompt=str(i)) for i in range(90)]
    both = [await start(client, lines) for _ in range(2)]
    held = small.gateway.context.batches
    await until(lambda: {r.status for r in held._known.values()} == {"validating", "in_progress"}, "one has begun")
    small.peer.grant_tokens = 1_000_000
    done = [await reach(client, batch.id, ended) for batch in both]
    assert [(batch.status, batch.request_counts.completed) for batch in done] == [("completed", 90)] * 2
    early, late = sorted(done, key=lambda batch: batch.in_progress_at)
    assert late.in_progress_at >= early.finalizing_at
    assert await leftovers(small) == []


async def test_batches_whose_estimates_are_too_low_do_not_stop_each_other(
    small: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they need more than the store; the younger waits for the older."""
    monkeypatch.setattr(batches, "LINE_BYTES", 1)
    monkeypatch.setattr(batches, "TOKEN_BYTES", 0)
    client = small.openai()
    small.peer.grant_tokens = 0
    both = [await start(client, [line(i) for i in range(90)]) for _ in range(2)]
    for batch in both:
        await reach(client, batch.id, lambda b: b.status == "in_progress")
    small.peer.grant_tokens = 1_000_000
    done = [await reach(client, batch.id, ended) for batch in both]
    assert [(batch.status, batch.request_counts.completed) for batch in done] == [("completed", 90)] * 2


async def test_a_batch_that_fills_the_store_alone_fails_with_what_it_has(
    small: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "FULL_PATIENCE_S", 0.5)
    client = small.openai()
    batch = await start(client, [line(i, logprobs=3) for i in range(160)])
    batch = await reach(client, batch.id, ended)
    assert batch.status == "failed" and [each.code for each in batch.errors.data] == ["storage_full"]
    output, errors = await read(client, batch.output_file_id), await read(client, batch.error_file_id)
    assert len(output) > 20 and len(output) + len(errors) == 160
    assert {each["error"]["code"] for each in errors} == {"storage_full"}
    assert await leftovers(small) == []


async def test_a_batch_that_can_never_fit_is_refused(small: Stack) -> None:
    client = small.openai()
    batch = await reach(client, (await start(client, [line(i) for i in range(170)])).id, ended)
    assert batch.status == "failed" and [each.code for each in batch.errors.data] == ["batch_too_large"]
    assert small.peer.submitted == []


async def test_a_batch_whose_lines_are_slow_keeps_its_place(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are progress too."""
    monkeypatch.setattr(batch_service, "MAX_OWNED", 1)
    monkeypatch.setattr(batch_service, "MAX_IDLE_S", 1.0)
    monkeypatch.setattr(batch_service, "CHECK_INTERVAL_S", 0.05)
    client, peer = stack.openai(), stack.peer
    peer.automatic = False
    first = await start(client, [line(0, max_tokens=100)])
    await until(lambda: peer.submitted, "the line is submitted")

    async def emit() -> None:
        for num_tokens in range(90):
            peer.emit(peer.submitted[0], num_tokens, [5])
            await asyncio.sleep(0.1)

    emitting = asyncio.create_task(emit())  # also while the second batch is on its way
    second = await start(client, [line(0)])
    await asyncio.sleep(2.5)
    assert (await client.batches.retrieve(second.id)).status == "validating"
    assert len(peer.submitted) == 1
    emitting.cancel()
    await reach(client, second.id, lambda b: b.status == "in_progress")  # no token comes any more
    assert (await client.batches.retrieve(first.id)).status == "in_progress"


async def test_progress_is_shown_after_a_fault_too(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "PROGRESS_INTERVAL_S", 0.05)
    faults = iter([RuntimeError("a fault in the code")])
    with_progress = BatchRun._with_progress

    def fault_once(run: BatchRun, given: BatchRecord) -> BatchRecord:
        if (fault := next(faults, None)) is not None:
            raise fault
        return msgspec.structs.replace(with_progress(run, given), predicted_finish_s=1234.0)

    monkeypatch.setattr(BatchRun, "_with_progress", fault_once)
    stack.peer.grant_tokens = 0
    batch = await start(stack.openai(), [line(0)])
    held = stack.gateway.context.batches._known
    await until(lambda: batch.id in held and held[batch.id].predicted_finish_s == 1234.0, "progress")
    assert next(faults, None) is None


async def test_files_that_find_no_room_are_put_together_ever_less_often(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo(stack)
    asked_at: list[float] = []
    files, register = stack.gateway.context.files, stack.gateway.context.files.register

    async def full_thrice(file: StoredFile) -> None:
        if file.purpose == "batch_output":
            asked_at.append(time.monotonic())
        if 0 < len(asked_at) <= 3:
            raise BusError(ErrorInfo(ErrorCode.OVERLOADED, "full"))
        await register(file)

    monkeypatch.setattr(files, "register", full_thrice)
    monkeypatch.setattr(batch_input, "RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr(batch_runner, "FIRST_ASSEMBLY_BACKOFF_S", 0.2)
    monkeypatch.setattr(batch_runner, "MAX_ASSEMBLY_BACKOFF_S", 0.3)
    client = stack.openai()
    batch = await reach(client, (await start(client, [line(0)])).id, ended)
    assert batch.status == "completed" and len(asked_at) == 4
    for earlier, later, least_s in zip(asked_at, asked_at[1:], (0.2, 0.3, 0.3), strict=False):
        assert least_s <= later - earlier < least_s + 4.0
