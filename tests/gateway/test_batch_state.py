"""The pure parts of batches: states, windows, books, lines, retries, grants."""

from __future__ import annotations

import asyncio
import codecs
from array import array

import msgspec
import openai.types
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.batch.grants import take
from services.gateway.batch.reading import InputError, _split
from services.gateway.batch.state import (
    MAX_WINDOW_S,
    TERMINAL,
    Attempts,
    BatchFiles,
    LineBook,
    LinePlan,
    Pace,
    advance,
    conclude,
    expire,
    failed,
    is_terminal,
    predicted_finish_s,
    window_s,
)
from services.gateway.batch.validation import LineChecker, estimated_tokens
from services.gateway.openai.replies import BatchObject, FileObject
from services.gateway.openai.schemas import ChatMessage, ChatRequest, CompletionRequest, ContentPart
from shared.messages.batches import (
    BatchLineResult,
    BatchProblem,
    BatchRecord,
    OfflineDemand,
)
from shared.messages.requests import ErrorCode
from shared.scheduling.batch_feed import Account, Ticket

RECORD = BatchRecord(
    batch_id="batch_1",
    tenant="",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    deadline_s=100.0,
    status="validating",
    created_s=0.0,
)
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", *sorted(TERMINAL))


def test_the_objects_have_the_fields_of_the_openai_package() -> None:
    batch = {field.name for field in msgspec.structs.fields(BatchObject)}
    assert batch - {"predicted_finish_at", "waiting_for"} == set(openai.types.Batch.model_fields)
    file = {field.name for field in msgspec.structs.fields(FileObject)}
    assert file == set(openai.types.FileObject.model_fields) - {"status_details"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86400),
        ("10m", 600),
        ("30s", 30),
        ("1h30m", 5400),
        ("1d2h3m4s", 93784),
        ("30d", MAX_WINDOW_S),
        ("", None),
        ("0s", None),
        ("31d", None),
        ("24", None),
        ("h", None),
        ("1m1h", None),
        ("-1h", None),
        ("１h", None),
    ],
)
def test_windows(text: str, seconds: int | None) -> None:
    assert window_s(text) == seconds


@given(st.lists(st.tuples(st.sampled_from(("advance", "expire", "conclude", "failed")), st.sampled_from(STATUSES))))
def test_no_state_is_left_that_has_ended(events: list[tuple[str, str]]) -> None:
    record, seen = RECORD, ["validating"]
    for now_s, (event, status) in enumerate(events, 1):
        before = record
        if event == "advance":
            record = advance(record, status, now_s)
        elif event == "expire":
            record = expire(record, now_s)
        elif event == "conclude":
            record = conclude(record, BatchFiles("out", "err"), now_s)
        else:
            record = failed(record, [BatchProblem("x", "y")], now_s)
        if is_terminal(before):
            assert record is before
        if record.status != before.status:
            seen.append(record.status)
            assert record.status_s[record.status] == now_s
    assert len(seen) == len(set(seen)), "no state is entered twice"
    if record.status == "completed":
        assert seen == ["validating", "in_progress", "finalizing", "completed"]
    if record.status == "cancelled":
        assert seen[-2] == "cancelling"


def test_what_has_expired_does_not_complete() -> None:
    record = expire(advance(RECORD, "in_progress", 1), 2)
    assert record.status == "finalizing"
    record = conclude(record, BatchFiles("a"), 3)
    assert (record.status, record.output_file_id, record.error_file_id) == ("expired", "a", "")


def plan(tokens: list[int], models: list[int] | None = None) -> LinePlan:
    models = models or [0] * len(tokens)
    return LinePlan([f"m{i}" for i in range(max(models) + 1)], array("H", models), array("i", tokens))


@given(st.lists(st.tuples(st.integers(0, 19), st.booleans(), st.integers(0, 100)), max_size=60))
def test_a_book_counts_each_line_once(results: list[tuple[int, bool, int]]) -> None:
    book = LineBook(plan([50] * 20))
    first: dict[int, tuple[bool, int]] = {}
    for index, is_success, tokens in results:
        assert book.note(index, BatchLineResult(is_success, b"", tokens, 0, 1)) == (index not in first)
        first.setdefault(index, (is_success, tokens))
    assert book.num_completed == sum(ok for ok, _ in first.values())
    assert book.num_completed + book.num_failed == len(first) == len(book) - book.num_open
    assert book.input_tokens == sum(tokens for _, tokens in first.values())
    assert (book.unfinished_tokens(0) == 0) == (book.num_open == 0)
    behind = LineBook(plan([50] * 20)).counted(book.counted(RECORD))
    assert behind.num_completed == book.num_completed, "an owner that knows less takes nothing back"


def test_estimates_learn_from_what_came_out() -> None:
    book = LineBook(plan([1000] * 100))
    assert book.unfinished_tokens(0) == 100_000
    for index in range(50):
        book.note(index, BatchLineResult(True, b"", 50, 0, 50))
    assert 5_000 < book.unfinished_tokens(0) < 9_000


def test_the_slowest_model_decides_when_a_batch_is_done() -> None:
    book = LineBook(plan([100, 300], [0, 1]))
    assert predicted_finish_s(book, Pace(), {"m0": 10.0}, 5.0) is None
    assert predicted_finish_s(book, Pace(), {"m0": 10.0, "m1": 10.0}, 5.0) == 35.0
    book.note(1, BatchLineResult(False, b""))
    assert predicted_finish_s(book, Pace(), {"m0": 10.0}, 5.0) == 15.0


def test_a_batchs_own_pace_decides_as_soon_as_it_has_one() -> None:
    book, pace = LineBook(plan([100] * 10)), Pace()
    pace.sample(book, 0.0)
    pace.sample(book, 10.0)
    assert predicted_finish_s(book, pace, {"m0": 1000.0}, 10.0) == 11.0, "nothing is done yet"
    for index in range(5):
        book.note(index, BatchLineResult(True, b"", 50, 0, 50))
    pace.sample(book, 20.0)
    assert predicted_finish_s(book, pace, {"m0": 1000.0}, 20.0) == 40.0, "500 tokens in 20 s"
    pace.sample(book, 200.0)
    assert pace.seconds_left(0) is None, "that was long ago"


def test_what_is_not_the_lines_fault_is_tried_for_ever() -> None:
    attempts = Attempts()
    waits = [attempts.backoff_s(ErrorCode.OVERLOADED, 1.0) for _ in range(30)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == 15.0
    assert Attempts().backoff_s(ErrorCode.OVERLOADED, 0.0) == 0.25
    assert attempts.backoff_s(ErrorCode.DEADLINE, 1.0) is not None, "preempted for long"
    assert attempts.backoff_s(ErrorCode.INTERNAL, 1.0) is not None
    assert attempts.backoff_s(ErrorCode.INTERNAL, 1.0) is not None
    assert attempts.backoff_s(ErrorCode.INTERNAL, 1.0) is None
    assert Attempts().backoff_s(ErrorCode.TOO_LONG, 1.0) is None
    attempts = Attempts()
    assert [attempts.backoff_s(ErrorCode.UNAVAILABLE, 1.0, 3) is None for _ in range(3)] == [False, False, True]


@given(st.lists(st.binary(max_size=12), max_size=20), st.integers(1, 9), st.booleans())
@example([codecs.BOM_UTF8 + b"x", codecs.BOM_UTF8], 1, False)
@example([codecs.BOM_UTF8], 1, False)
def test_lines_do_not_depend_on_chunks(lines: list[bytes], chunk_bytes: int, has_last_end: bool) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    data = b"\n".join(lines) + (b"\n" if has_last_end else b"")

    async def chunks():
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]

    async def collect():
        return [line async for line in _split(chunks(), 100)]

    shown = [line.removeprefix(codecs.BOM_UTF8) if number == 0 else line for number, line in enumerate(lines)]
    expected = [(number, line) for number, line in enumerate(shown, 1) if line.strip()]
    found = asyncio.run(collect())
    assert [(line.number, line.raw) for line in found] == expected
    assert [line.index for line in found] == list(range(len(expected)))


async def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    async def chunks(data: bytes):
        yield data

    for end in (b"", b"\n"):
        found = [line.raw async for line in _split(chunks(b"\xef\xbb\xbf{}" + end), 100)]
        assert found == [b"{}"]
    assert [line async for line in _split(chunks(b"\xef\xbb\xbf\n"), 100)] == []


async def test_an_endless_line_is_not_collected() -> None:
    taken = 0

    async def chunks():
        nonlocal taken
        yield b"short\n"
        while True:
            taken += 1
            yield b"x" * 10

    with pytest.raises(InputError) as raised:
        async for _ in _split(chunks(), 100):
            pass
    assert (raised.value.code, raised.value.line, taken) == ("line_too_long", 2, 11)


def test_a_hopeless_file_is_not_read_to_its_end() -> None:
    checker = LineChecker("/v1/completions", 50_000, lambda model: True)
    number = 0
    while not checker.is_hopeless:
        number += 1
        checker.take(number, b"{")
    assert number == len(checker.problems) == 100


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (CompletionRequest(model="m", prompt=[1, 2, 3], max_tokens=10), 13),
        (CompletionRequest(model="m", prompt=[[1, 2], [3]], max_tokens=10, n=2), 43),
        (CompletionRequest(model="m", prompt="x" * 40), 27),
        (ChatRequest(model="m", messages=[ChatMessage("user", "x" * 24)], max_completion_tokens=5), 16),
        (ChatRequest(model="m", messages=[ChatMessage("user", [ContentPart("text", None)])], max_tokens=5), 10),
    ],
)
def test_estimates(body: CompletionRequest | ChatRequest, tokens: int) -> None:
    assert estimated_tokens(body) == tokens


async def test_grants_are_spent_in_order_and_do_not_add_up() -> None:
    asked: list[int] = []

    def demand(wanted: int) -> OfflineDemand:
        asked.append(wanted)
        return OfflineDemand("b", "", "m", wanted, 0, 0)

    account = Account(demand)
    gone: list[tuple[int, Ticket]] = []

    async def submit(tokens: int) -> None:
        gone.append((tokens, await take(account, tokens)))

    def sizes() -> list[int]:
        return [tokens for tokens, _ in gone]

    tasks = [asyncio.create_task(submit(tokens)) for tokens in (60, 50, 40, 30)]
    await asyncio.sleep(0)
    account.ask()
    account.grant(100)
    await asyncio.sleep(0)
    assert sizes() == [60, 50] and account.wanted_tokens == 70, "the last one overdraws"
    tasks[2].cancel()
    await asyncio.sleep(0)
    account.ask()
    assert asked == [180, 140], "what is on its way is asked for again, because the reply replaces it"
    account.grant(110)
    await asyncio.sleep(0)
    assert sizes() == [60, 50], "it was spent before"
    for _, taken in gone:
        taken.settle()
        taken.settle()
    account.ask()
    account.grant(1)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sizes() == [60, 50, 30] and asked[-1] == 30 and account.on_way == 30


async def test_what_is_taken_while_the_question_is_under_way_is_not_granted_twice() -> None:
    account = Account(lambda wanted: OfflineDemand("b", "", "m", wanted, 0, 0))
    account.grant(100)
    account.ask()
    taken = await take(account, 80)
    account.grant(100)
    assert account.credit == 20
    taken.settle()
    assert account.on_way == 0


async def test_nobody_waits_for_a_grant_that_will_cost_nothing() -> None:
    account = Account(lambda wanted: OfflineDemand("b", "", "m", wanted, 0, 0))
    waiting = asyncio.create_task(take(account, 80))
    await asyncio.sleep(0)
    account.set_free(True)
    (await waiting).settle()
    (await take(account, 80)).settle()
    account.set_free(False)
    later = asyncio.create_task(take(account, 80))
    await asyncio.sleep(0)
    assert not later.done()
    later.cancel()
