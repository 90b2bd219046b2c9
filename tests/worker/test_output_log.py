"""What can be replayed, through moves in either direction."""

from __future__ import annotations

import msgspec
import pytest

from services.worker.instance.output_log import OutputLog, cut
from shared.messages.requests import (
    UNKNOWN_LOGPROB,
    FinishReason,
    StreamPosition,
    TokenEntry,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from tests.shared.engine.fake_executor import request


@pytest.fixture
def outputs() -> OutputLog:
    return OutputLog()


def emit(outputs: OutputLog, epoch: int, offset: int, tokens: list[int], end: bool = False) -> None:
    reason = FinishReason.LENGTH if end else None
    outputs.frames(
        "here",
        [TokenEntry(request_id="r", epoch=epoch, offset=offset, tokens=pack_tokens(tokens), finish_reason=reason)],
        now=1.0,
    )


def replayed(outputs: OutputLog, epoch: int, offset: int) -> tuple[int, list[int]] | None:
    entry = outputs.replay(StreamPosition("r", epoch, offset))
    if entry is None:
        return None
    assert entry.epoch == epoch
    return entry.offset, unpack_tokens(entry.tokens)


def test_an_adopted_request_is_replayed_from_its_beginning(outputs: OutputLog) -> None:
    adopted = request("r", [7, 8], 10, epoch=1, prior=pack_tokens([1, 2, 3]))
    entry = outputs.adopt(adopted, num_cached_tokens=2)
    assert (entry.request_id, entry.epoch, entry.offset, entry.tokens) == ("r", 1, 3, b"")
    assert entry.num_cached_tokens == 2
    assert replayed(outputs, 1, 0) == (0, [1, 2, 3])
    emit(outputs, 1, 3, [4])
    assert replayed(outputs, 1, 1) == (1, [2, 3, 4])
    emit(outputs, 1, 4, [5], end=True)
    assert replayed(outputs, 1, 0) == (0, [1, 2, 3, 4, 5])
    assert replayed(outputs, 0, 0) is None, "the source's epoch is not this instance's to answer"


@pytest.mark.parametrize("is_ended", [False, True])
def test_where_logprobs_are_wanted_those_of_before_are_unknown(outputs: OutputLog, is_ended: bool) -> None:
    outputs.adopt(request("r", [7], 10, epoch=1, prior=pack_tokens([1, 2]), logprobs=2), 0)
    assert replayed(outputs, 1, 1) == (1, [2])
    assert replayed(outputs, 1, 2) == (2, [])
    reason = FinishReason.LENGTH if is_ended else None
    entry = TokenEntry(
        request_id="r", epoch=1, offset=2, tokens=pack_tokens([3]), finish_reason=reason, logprobs=(TokenLogprob(-0.5),)
    )
    outputs.frames("here", [entry], 1.0)
    assert outputs.replay(StreamPosition("r", 1, 2)) == entry
    assert replayed(outputs, 1, 1) == (1, [2, 3])
    answer = outputs.replay(StreamPosition("r", 1, 1))
    assert answer is not None and answer.logprobs == (UNKNOWN_LOGPROB, TokenLogprob(-0.5))


def test_a_request_that_moved_away_is_given_up_unless_it_is_back(outputs: OutputLog) -> None:
    emit(outputs, 0, 0, [1, 2])
    assert outputs.give_up("r", 1) == 2
    assert outputs.epoch("r") == -1 and replayed(outputs, 0, 0) is None
    outputs.adopt(request("r", [7], 10, epoch=2, prior=pack_tokens([1, 2, 3])), 0)
    assert outputs.give_up("r", 1) == 0
    assert outputs.epoch("r") == 2 and replayed(outputs, 2, 0) == (0, [1, 2, 3])
    emit(outputs, 2, 3, [4, 5])
    assert outputs.give_up("r", 3) == 2, "made here since it came"


@pytest.mark.parametrize("told_first", [True, False])
def test_a_request_that_stays_in_a_higher_epoch_keeps_its_earlier_output(outputs: OutputLog, told_first: bool) -> None:
    emit(outputs, 0, 0, [1, 2])
    if told_first:
        entry = outputs.raise_epoch("r", 2)
        assert entry is not None and (entry.epoch, entry.offset, entry.tokens) == (2, 2, b"")
        emit(outputs, 2, 2, [3])
    else:
        emit(outputs, 2, 2, [3])
        assert outputs.raise_epoch("r", 2) is None, "its tokens have told it"
    assert replayed(outputs, 2, 0) == (0, [1, 2, 3])
    assert outputs.epoch("r") == 2
    assert outputs.raise_epoch("nobody", 2) is None


def test_another_placement_begins_anew(outputs: OutputLog) -> None:
    emit(outputs, 0, 0, [1, 2])
    emit(outputs, 64, 2, [3])
    assert replayed(outputs, 64, 2) == (2, [3])
    assert replayed(outputs, 64, 0) is None


def test_the_end_is_remembered_with_its_epoch(outputs: OutputLog) -> None:
    emit(outputs, 2, 0, [1], end=True)
    assert outputs.epoch("r") == 2
    again = msgspec.structs.replace(request("r", [7], 10), epoch=3)
    outputs.adopt(again, 0)
    assert outputs.epoch("r") == 3


def test_logprobs_of_prompts_go_into_frames_that_a_message_holds() -> None:
    logprob = TokenLogprob(-0.5, prompt=bytes(300_000))
    entries = [
        TokenEntry(request_id=f"r{i}", epoch=1, offset=0, tokens=pack_tokens([3]), logprobs=(logprob,))
        for i in range(3)
    ]
    outputs = OutputLog()
    frames = outputs.frames("here", entries, 1.0)
    assert [len(frame.entries) for frame in frames] == [1, 1, 1]
    entry = outputs.replay(StreamPosition("r0", 1, 0))
    assert entry is not None and entry.logprobs == (logprob,)
    assert cut(entry, 300_000) == (msgspec.structs.replace(entry, tokens=b"", logprobs=()), 0)
    assert cut(entry, 300_100)[0] == entry


def test_ended_requests_keep_few_bytes_of_prompts() -> None:
    outputs = OutputLog()
    logprob = TokenLogprob(-0.5, prompt=bytes(380_000))
    for i in range(200):
        entry = TokenEntry(
            request_id=f"r{i}",
            epoch=1,
            offset=0,
            tokens=pack_tokens([3]),
            logprobs=(logprob,),
            finish_reason=FinishReason.LENGTH,
        )
        outputs.frames("here", [entry], 1.0)
    kept = [i for i in range(200) if outputs.replay(StreamPosition(f"r{i}", 1, 0)) is not None]
    assert kept == list(range(200 - (64 << 20) // 380_000, 200))


def test_what_was_made_before_a_placement_is_replayed_too(outputs: OutputLog) -> None:
    placed = request("r", [7], 10, epoch=64, prior=pack_tokens([1, 2]))
    outputs.place(placed)
    emit(outputs, 64, 2, [3])
    outputs.place(placed)  # it was sent again
    assert replayed(outputs, 64, 0) == (0, [1, 2, 3])
    emit(outputs, 64, 3, [4], end=True)
    assert replayed(outputs, 64, 0) == (0, [1, 2, 3, 4])
    outputs.place(request("new", [7], 10))
    assert outputs.replay(StreamPosition("new", 0, 0)) is None


def test_outputs_of_requests_that_ended_are_kept_for_as_long_as_they_may_be_resumed() -> None:
    entry = TokenEntry(request_id="r", epoch=0, offset=0, tokens=pack_tokens([1]), finish_reason=FinishReason.STOP)
    for keep_s, is_kept in ((0.0, False), (300.0, True)):
        outputs = OutputLog(keep_s)
        outputs.frames("here", [entry], now=0.0)
        outputs.frames("here", [msgspec.structs.replace(entry, request_id="later")], now=200.0)
        assert (replayed(outputs, 0, 0) == (0, [1])) is is_kept
