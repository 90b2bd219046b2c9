"""StreamState: the tokens a client sees are the true ones, once each and in order, whatever the bus does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEntry,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from shared.streams import MAX_PAUSE_S, MAX_SUSPICIONS, Loss, Outcome, StreamState

EOS = 2


A, B, C = "a", "b", "c"


def entry(offset: int, tokens: list[int], finish: FinishReason | None = None, epoch: int = 0, **fields) -> TokenEntry:
    return TokenEntry(
        request_id="r", epoch=epoch, offset=offset, tokens=pack_tokens(tokens), finish_reason=finish, **fields
    )


def state(max_tokens: int = 100, min_tokens: int = 0, logprobs: int = -1) -> StreamState:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(EOS,), logprobs=logprobs)
    return StreamState("r", sampling)


def request_of() -> GenerationRequest:
    sampling = SamplingParams(max_tokens=100)
    return GenerationRequest(request_id="r", gateway_id="g", model="m", prompt=b"", sampling=sampling, timeout_s=60.0)


def test_takes_tokens_in_order_and_trims_what_it_knows() -> None:
    stream = state()
    assert stream.accept(entry(0, [5, 6], num_cached_tokens=4), A) is Outcome.NEWS
    assert stream.accept(entry(0, [5, 6]), A) is Outcome.NOTHING
    assert stream.accept(entry(1, [6, 7, 8]), A) is Outcome.NEWS
    assert stream.tokens.tolist() == [5, 6, 7, 8]
    assert stream.accept(entry(5, [10]), A) is Outcome.GAP
    assert stream.tokens.tolist() == [5, 6, 7, 8]
    assert stream.accept(entry(4, [9, 10, EOS], FinishReason.STOP), A) is Outcome.NEWS
    assert stream.finish_reason is FinishReason.STOP
    assert stream.accept(entry(7, [1]), A) is Outcome.NOTHING
    assert stream.tokens.tolist() == [5, 6, 7, 8, 9, 10, EOS]
    assert stream.num_cached_tokens == 4


ENTRIES = st.builds(
    entry,
    offset=st.integers(0, 6),
    tokens=st.lists(st.integers(3, 9), max_size=3),
    finish=st.sampled_from([None, None, None, FinishReason.STOP, FinishReason.CANCELLED]),
    epoch=st.integers(0, 1),
)


@given(
    entries=st.lists(st.tuples(ENTRIES, st.sampled_from([A, B, None])), max_size=12), logprobs=st.sampled_from([-1, 0])
)
def test_extending_is_accepting_where_it_does_anything(entries, logprobs: int) -> None:
    plain, fast = state(logprobs=logprobs), state(logprobs=logprobs)
    for one, sender in entries:
        outcome = plain.accept(one, sender)
        if fast.extend(one, sender):
            assert outcome is Outcome.NEWS and plain.finish_reason is None
        else:
            assert fast.accept(one, sender) is outcome
        for name in StreamState.__slots__:
            assert getattr(fast, name) == getattr(plain, name), name


def test_the_owners_next_tokens_extend_a_stream() -> None:
    stream = state()
    stream.accept(entry(0, [5]), A)
    assert stream.extend(entry(1, [6]), A)
    assert not stream.extend(entry(1, [6]), A) and not stream.extend(entry(2, [7]), B)
    assert stream.tokens.tolist() == [5, 6]


def test_a_lower_epoch_is_stale_and_a_higher_one_takes_over() -> None:
    stream = state()
    stream.accept(entry(0, [5]), A)
    assert stream.accept(entry(1, [6], epoch=2, num_cached_tokens=7), A) is Outcome.NEWS
    assert stream.accept(entry(2, [7], epoch=1), A) is Outcome.STALE
    assert stream.tokens.tolist() == [5, 6]
    assert stream.num_cached_tokens == 0, "what a later owner finds in its cache is not the client's"
    assert stream.accept(entry(5, [7], epoch=3), A) is Outcome.GAP
    assert stream.epoch == 3


def test_an_epoch_belongs_to_the_instance_that_spoke_first_in_it() -> None:
    stream = state()
    assert stream.accept(entry(0, [5]), A) is Outcome.NEWS
    assert stream.accept(entry(1, [99]), B) is Outcome.STALE
    assert stream.accept(entry(1, [], FinishReason.CANCELLED), B) is Outcome.STALE, "its end is not the request's"
    assert stream.accept(entry(1, [6]), A) is Outcome.NEWS
    assert stream.owner == A
    assert stream.accept(entry(2, [], epoch=1), B) is Outcome.NOTHING
    assert (stream.owner, stream.epoch) == (B, 1), "an entry without tokens tells who has it now"
    assert stream.accept(entry(2, [7], epoch=0), A) is Outcome.STALE
    assert stream.accept(entry(2, [7], epoch=1), C) is Outcome.STALE
    assert stream.accept(entry(2, [8], epoch=1), B) is Outcome.NEWS
    assert stream.tokens.tolist() == [5, 6, 8]
    error = ErrorInfo(ErrorCode.DEADLINE, "too late")
    assert stream.accept(entry(3, [], FinishReason.DEADLINE, epoch=1, error=error), None) is Outcome.NEWS
    assert stream.finish_reason is FinishReason.DEADLINE, "a scheduler's word counts whoever owns the request"


def test_a_hand_over_that_was_told_of() -> None:
    stream = state()
    stream.accept(entry(0, [5]), A)
    assert stream.follow(B, 1)
    assert (stream.owner, stream.epoch) == (B, 1)
    assert not stream.follow(C, 1), "no news"
    assert stream.accept(entry(1, [6], epoch=0), A) is Outcome.STALE
    assert stream.accept(entry(0, [5, 6], epoch=1), B) is Outcome.NEWS
    assert stream.follow(A, 2), "and back"
    assert stream.lose(2) is Loss.PLACE
    assert not stream.follow(C, 3), "it is placed again already"
    stream.accept(entry(2, [EOS], FinishReason.STOP, epoch=PLACEMENT_EPOCHS), C)
    assert not stream.follow(A, 2 * PLACEMENT_EPOCHS), "it has ended"


def test_losing_an_owner_counts_once() -> None:
    stream = state()
    stream.accept(entry(0, [5]), A)
    assert stream.lose(0) is Loss.PLACE
    assert (stream.epoch, stream.owner) == (PLACEMENT_EPOCHS, None)
    assert stream.lose(0) is Loss.IGNORED, "told of the same loss again"
    assert stream.lose(3) is Loss.IGNORED, "wherever the last placement had moved"
    assert stream.lose(2 * PLACEMENT_EPOCHS + 4) is Loss.PLACE, "a later owner, of which no frame came"
    assert stream.epoch == 3 * PLACEMENT_EPOCHS


def test_a_request_outlives_any_number_of_owners_but_waits_longer_for_each_in_a_row() -> None:
    stream, no_turn = state(), ErrorInfo(ErrorCode.UNAVAILABLE, "online requests left it no turn for 5 s")
    pauses_s = []
    for number in range(2000):
        if number % 2:
            given_up = entry(0, [], FinishReason.ERROR, epoch=stream.epoch, error=no_turn)
            assert stream.accept(given_up, A) is Outcome.GIVEN_UP
        assert stream.lose(stream.epoch) is Loss.PLACE, number
        pauses_s.append(stream.pause_s)
    assert pauses_s[:3] == [0.0, 0.1, 0.2] and sorted(pauses_s) == pauses_s and pauses_s[-1] == MAX_PAUSE_S
    stream.accept(entry(0, [5], epoch=stream.epoch), A)
    assert stream.lose(stream.epoch) is Loss.PLACE and stream.pause_s == 0.0, "a token came in between"


def test_a_request_fails_over_which_many_instances_in_a_row_crash() -> None:
    stream = state()
    assert [stream.suspect() for _ in range(MAX_SUSPICIONS)] == [None] * MAX_SUSPICIONS
    stream.accept(entry(0, [5]), A)
    for number in range(MAX_SUSPICIONS):
        assert stream.suspect() is None, f"a token came in between: {number}"
        stream.lose(stream.epoch)
    error = stream.suspect()
    assert error is not None and error.code is ErrorCode.CRASHED
    assert error.message.startswith(f"{MAX_SUSPICIONS + 1} instances in turn crashed")
    stream.accept(entry(1, [EOS], FinishReason.STOP, epoch=stream.epoch), A)
    assert stream.suspect() is None, "it has ended"


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.DRAINING])
def test_tokens_count_that_come_with_the_word_that_the_request_is_given_up(code: ErrorCode) -> None:
    stream = state()
    stream.accept(entry(0, [5]), A)
    given_up = entry(0, [5, 6], FinishReason.ERROR, error=ErrorInfo(code, "not here"))
    assert stream.accept(given_up, A) is Outcome.GIVEN_UP
    assert list(stream.tokens) == [5, 6] and stream.finish_reason is None
    assert stream.lose(0) is Loss.PLACE and stream.num_losses == 1
    gap = msgspec.structs.replace(given_up, epoch=stream.epoch, offset=3)
    assert stream.accept(gap, A) is Outcome.GIVEN_UP and list(stream.tokens) == [5, 6]


def test_a_request_is_placed_again_with_its_tokens_and_the_time_that_it_has_left() -> None:
    stream, request = state(), request_of()
    stream.accept(entry(0, [5, 6]), A)
    stream.lose(0)
    again = stream.placed_again(request, 100.0, 103.0, 110.0)
    assert unpack_tokens(again.prior) == [5, 6] and again.epoch == PLACEMENT_EPOCHS
    assert (again.timeout_s, again.waited_s, again.ttft_s) == (request.timeout_s - 10.0, 10.0, 3.0)
    late = stream.placed_again(request, 100.0, None, 100.0 + 2 * request.timeout_s)
    assert 0 < late.timeout_s < 0.01 and late.ttft_s < 0, "its deadline has passed, no token had come"


def test_an_owner_lost_after_its_last_token_ends_the_stream() -> None:
    limited = state(max_tokens=2)
    limited.accept(entry(0, [5, 6]), A)
    assert limited.lose(0) is Loss.COMPLETE
    assert limited.finish_reason is FinishReason.LENGTH
    stopped = state()
    stopped.accept(entry(0, [5, EOS]), A)
    assert stopped.lose(0) is Loss.COMPLETE
    assert stopped.finish_reason is FinishReason.STOP
    early = state(min_tokens=2)
    early.accept(entry(0, [5, EOS]), A)
    assert early.lose(0) is Loss.PLACE, "an end before min_tokens is none"


def test_refusals_that_another_owner_can_make_good() -> None:
    for finish, code in [
        (FinishReason.CANCELLED, None),
        (FinishReason.ERROR, ErrorCode.DRAINING),
        (FinishReason.ERROR, ErrorCode.GONE),
    ]:
        stream = state()
        error = None if code is None else ErrorInfo(code, "x")
        assert stream.accept(entry(0, [], finish, error=error), A) is Outcome.GIVEN_UP
        assert stream.finish_reason is None
    stream = state()
    error = ErrorInfo(ErrorCode.TOO_LONG, "x")
    assert stream.accept(entry(3, [], FinishReason.ERROR, error=error), A) is Outcome.NEWS, "an error needs no replay"
    assert stream.error == error


def test_logprobs_run_beside_the_tokens() -> None:
    stream = state(logprobs=0)
    stream.accept(entry(0, [5, 6], logprobs=(TokenLogprob(-1.0), TokenLogprob(-2.0))), A)
    stream.accept(entry(1, [6, 7], logprobs=(TokenLogprob(-2.0), TokenLogprob(-3.0))), A)
    stream.accept(entry(3, [8]), A)
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
        outcome = stream.accept(each, f"owner {each.epoch}")
        after = stream.tokens.tolist()
        assert after[: len(before)] == before, "tokens are only ever added"
        assert stream.epoch >= epoch_before
        assert outcome is not Outcome.NEWS or len(after) > len(before) or stream.finish_reason is not None
        seen = after
        assert seen == TRUTH[: len(seen)]
    last_epoch = max(each.epoch for each in sent)
    last_owner = f"owner {last_epoch}"
    for _ in range(2):  # what the owner answers to a replay query, which may itself come twice
        position = stream.position
        assert position.next_offset == len(stream.tokens)
        stream.accept(
            entry(position.next_offset, TRUTH[position.next_offset :], FinishReason.STOP, last_epoch), last_owner
        )
    assert stream.tokens.tolist() == TRUTH
    assert stream.finish_reason is FinishReason.STOP


class Cluster:
    """Owners of one request, as they hand it on or lose it. Each makes other tokens than the others would (numerics differ),
    so what a client was shown fits together only if it comes from one line of owners.

    `sent`: (sender, entry) that may reach the gateway, in any order, any number of times.
    """

    def __init__(self) -> None:
        self.output: list[int] = []
        """Output of the owner that counts."""
        self.epoch, self.owner = 0, A
        self.sent: list[tuple[str, TokenEntry]] = []
        self._num_made = 0

    def make(self, count: int) -> None:
        offset = len(self.output)
        for _ in range(count):
            self._num_made += 1
            self.output.append(10 + self._num_made)
        self.sent.append((self.owner, entry(offset, self.output[offset:], epoch=self.epoch)))

    def intrude(self, instance: str, count: int) -> None:
        """Another instance runs the request in the owner's epoch, after the owner has begun."""
        if instance != self.owner:
            wrong = [1000 + i for i in range(count)]
            self.sent.append((instance, entry(len(self.output), wrong, FinishReason.STOP, self.epoch)))

    def move(self, instance: str, steps: int) -> None:
        """To another instance, or (after a hand-over of unknown outcome) back to itself."""
        self.epoch, self.owner = self.epoch + steps, instance
        self.sent.append((instance, entry(len(self.output), [], epoch=self.epoch)))

    def replay(self, offset: int) -> TokenEntry:
        return entry(offset, self.output[offset:], epoch=self.epoch)


INSTANCES = st.sampled_from([A, B, C])


@given(st.data())
def test_any_interleaving_of_owners_and_epochs_shows_one_line_of_tokens(data: st.DataObject) -> None:
    cluster, stream = Cluster(), state()
    cluster.make(1)
    stream.accept(cluster.sent[0][1], A)
    for _ in range(data.draw(st.integers(0, 30))):
        event = data.draw(st.sampled_from(["make", "move", "intrude", "deliver", "deliver", "replay", "told", "lose"]))
        before, epoch_before = stream.tokens.tolist(), stream.epoch
        if event == "make":
            cluster.make(data.draw(st.integers(1, 3)))
        elif event == "move":
            cluster.move(data.draw(INSTANCES), data.draw(st.integers(1, 2)))
        elif event == "intrude" and stream.epoch == cluster.epoch and stream.owner == cluster.owner:
            cluster.intrude(data.draw(INSTANCES), data.draw(st.integers(0, 3)))
        elif event == "deliver":
            sender, sent = data.draw(st.sampled_from(cluster.sent))
            stream.accept(sent, sender)
        elif event == "replay":
            stream.accept(cluster.replay(len(stream.tokens)), cluster.owner)
        elif event == "told":
            stream.follow(cluster.owner, cluster.epoch)
        elif event == "lose" and stream.lose(data.draw(st.integers(stream.epoch, cluster.epoch))) is Loss.PLACE:
            # The next owner goes on after what the client has; what the last one made beyond that is gone.
            cluster.output = stream.tokens.tolist()
            cluster.epoch, cluster.owner = stream.epoch, data.draw(INSTANCES)
            cluster.move(cluster.owner, 0)
        shown = stream.tokens.tolist()
        assert shown[: len(before)] == before, "tokens are only ever added"
        assert shown == cluster.output[: len(shown)], "and are those of the line of owners"
        assert stream.epoch >= epoch_before
        assert stream.finish_reason is None
    rest = [*cluster.output[len(stream.tokens) :], EOS]
    stream.accept(entry(len(stream.tokens), rest, FinishReason.STOP, cluster.epoch), cluster.owner)
    assert stream.tokens.tolist() == [*cluster.output, EOS]
    assert stream.finish_reason is FinishReason.STOP
