"""StreamState: the tokens a client sees are the true ones, once each and in order, whatever the bus does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streams import Outcome, StreamState
from shared.messages import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    SamplingParams,
    TokenEntry,
    TokenLogprob,
    pack_tokens,
)

EOS = 2


def entry(offset: int, tokens: list[int], finish: FinishReason | None = None, epoch: int = 0, **fields) -> TokenEntry:
    return TokenEntry("r", epoch, offset, pack_tokens(tokens), finish, **fields)


def state(max_tokens: int = 100, min_tokens: int = 0, logprobs: int = -1) -> StreamState:
    sampling = SamplingParams(max_tokens, min_tokens=min_tokens, stop_token_ids=(EOS,), logprobs=logprobs)
    return StreamState("r", sampling)


def test_takes_tokens_in_order_and_trims_what_it_knows() -> None:
    stream = state()
    assert stream.accept(entry(0, [5, 6], num_cached_tokens=4)) is Outcome.NEWS
    assert stream.accept(entry(0, [5, 6])) is Outcome.NOTHING
    assert stream.accept(entry(1, [6, 7, 8])) is Outcome.NEWS
    assert stream.tokens.tolist() == [5, 6, 7, 8]
    assert stream.accept(entry(5, [10])) is Outcome.GAP
    assert stream.tokens.tolist() == [5, 6, 7, 8]
    assert stream.accept(entry(4, [9, 10, EOS], FinishReason.STOP)) is Outcome.NEWS
    assert stream.finish_reason is FinishReason.STOP
    assert stream.accept(entry(7, [1])) is Outcome.NOTHING
    assert stream.tokens.tolist() == [5, 6, 7, 8, 9, 10, EOS]
    assert stream.num_cached_tokens == 4


def test_a_lower_epoch_is_stale_and_a_higher_one_takes_over() -> None:
    stream = state()
    stream.accept(entry(0, [5]))
    assert stream.accept(entry(1, [6], epoch=2, num_cached_tokens=7)) is Outcome.NEWS
    assert stream.accept(entry(2, [7], epoch=1)) is Outcome.STALE
    assert stream.tokens.tolist() == [5, 6]
    assert stream.num_cached_tokens == 0, "what a later owner finds in its cache is not the client's"
    assert stream.accept(entry(5, [7], epoch=3)) is Outcome.GAP
    assert stream.epoch == 3


def test_losing_an_owner_counts_once() -> None:
    stream = state()
    stream.accept(entry(0, [5]))
    assert stream.lose(0)
    assert stream.epoch == 1
    assert not stream.lose(0), "told of the same loss again"
    assert stream.lose(4), "a later owner, of which no frame came"
    assert stream.epoch == 5


def test_an_owner_lost_after_its_last_token_ends_the_stream() -> None:
    limited = state(max_tokens=2)
    limited.accept(entry(0, [5, 6]))
    assert not limited.lose(0)
    assert limited.finish_reason is FinishReason.LENGTH
    stopped = state()
    stopped.accept(entry(0, [5, EOS]))
    assert not stopped.lose(0)
    assert stopped.finish_reason is FinishReason.STOP
    early = state(min_tokens=2)
    early.accept(entry(0, [5, EOS]))
    assert early.lose(0), "an end before min_tokens is none"


def test_refusals_that_another_owner_can_make_good() -> None:
    for finish, code in [
        (FinishReason.CANCELLED, None),
        (FinishReason.ERROR, ErrorCode.DRAINING),
        (FinishReason.ERROR, ErrorCode.GONE),
    ]:
        stream = state()
        error = None if code is None else ErrorInfo(code, "x")
        assert stream.accept(entry(0, [], finish, error=error)) is Outcome.GIVEN_UP
        assert stream.finish_reason is None
    stream = state()
    error = ErrorInfo(ErrorCode.TOO_LONG, "x")
    assert stream.accept(entry(3, [], FinishReason.ERROR, error=error)) is Outcome.NEWS, "an error needs no replay"
    assert stream.error == error


def test_logprobs_run_beside_the_tokens() -> None:
    stream = state(logprobs=0)
    stream.accept(entry(0, [5, 6], logprobs=(TokenLogprob(-1.0), TokenLogprob(-2.0))))
    stream.accept(entry(1, [6, 7], logprobs=(TokenLogprob(-2.0), TokenLogprob(-3.0))))
    stream.accept(entry(3, [8]))
    assert [each.logprob for each in stream.logprobs] == [-1.0, -2.0, -3.0, -9999.0]


TRUTH = [*range(10, 40), EOS]


@st.composite
def owners(draw: st.DrawFn) -> list[TokenEntry]:
    """What several owners in turn send of the same output: each begins at or before where the last one was."""
    sent: list[TokenEntry] = []
    reached = 0
    num_owners = draw(st.integers(1, 4))
    for epoch in range(num_owners):
        position = draw(st.integers(0, reached))
        end = len(TRUTH) if epoch == num_owners - 1 else draw(st.integers(position, len(TRUTH) - 1))
        while position < end:
            count = draw(st.integers(1, min(5, end - position)))
            is_last = position + count == len(TRUTH)
            tokens = TRUTH[position : position + count]
            sent.append(entry(position, tokens, FinishReason.STOP if is_last else None, epoch))
            position += count
        reached = max(reached, position)
    return sent


@given(st.data())
def test_any_loss_duplication_and_reordering_with_replay_gives_the_true_tokens(data: st.DataObject) -> None:
    sent = data.draw(owners())
    num_deliveries = data.draw(st.integers(0, 2 * len(sent)))
    delivered = [data.draw(st.sampled_from(sent)) for _ in range(num_deliveries)]
    stream = state()
    seen: list[int] = []
    for each in delivered:
        before, epoch_before = stream.tokens.tolist(), stream.epoch
        outcome = stream.accept(each)
        after = stream.tokens.tolist()
        assert after[: len(before)] == before, "tokens are only ever added"
        assert stream.epoch >= epoch_before
        assert outcome is not Outcome.NEWS or len(after) > len(before) or stream.finish_reason is not None
        seen = after
        assert seen == TRUTH[: len(seen)]
    last_epoch = max(each.epoch for each in sent)
    for _ in range(2):  # what the owner answers to a replay query, which may itself come twice
        position = stream.position
        assert position.next_offset == len(stream.tokens)
        stream.accept(entry(position.next_offset, TRUTH[position.next_offset :], FinishReason.STOP, last_epoch))
    assert stream.tokens.tolist() == TRUTH
    assert stream.finish_reason is FinishReason.STOP
