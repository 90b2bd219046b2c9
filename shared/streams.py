"""The output of one request as this gateway has it: which tokens are known, and who may add to them.

Pure: no clock, no I/O. Rules:
- An entry of a lower epoch than the highest seen is dropped, whoever sent it. A higher epoch takes over.
- An epoch belongs to the instance that spoke first in it; what another one says in it is dropped.
- Tokens are taken only at the expected position: what is known already is trimmed off, a gap changes nothing and asks
  for a replay. So no token is ever shown twice, lost, or out of order, whatever the bus does.
- An ended stream never changes again.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto

import msgspec

from shared.messages.requests import (
    PLACE_AGAIN_CODES,
    UNKNOWN_LOGPROB,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    RequestTiming,
    SamplingParams,
    StreamPosition,
    TokenEntry,
    TokenLogprob,
    next_placement,
)


class Outcome(Enum):
    """What an entry did to the stream."""

    NEWS = auto()
    """New tokens, the end, or both."""
    NOTHING = auto()
    """Everything in it was known."""
    STALE = auto()
    """Its sender does not own the request any more."""
    GAP = auto()
    """Tokens before it are missing: a replay is needed."""
    GIVEN_UP = auto()
    """Its owner does not continue the request: it must be placed again."""


MAX_SUSPICIONS = 5
"""Instances in a row that may crash over a request, without a token of it in between. If one more does, it fails."""
PAUSE_S, MAX_PAUSE_S = 0.1, 1.0
"""Before a request is placed again without a new token since it was the last time: for each time in a row, and at most."""


class Loss(Enum):
    """What follows from the loss of an owner."""

    IGNORED = auto()
    """Another owner has the request already, or it had ended."""
    COMPLETE = auto()
    """All tokens had come: it has ended now."""
    PLACE = auto()
    """It must be placed again, in the epoch that is the state's now, after `pause_s`."""


def gives_up(entry: TokenEntry) -> bool:
    """Whether the sender does not continue the request though it is not over. A stream that a gateway cancels is closed
    there at the same moment, so a cancel that it sees was meant for an earlier owner."""
    reason = entry.finish_reason
    return reason is FinishReason.CANCELLED or (
        reason is FinishReason.ERROR and entry.error is not None and entry.error.code in PLACE_AGAIN_CODES
    )


class StreamState:
    """Tokens are the output only, in order; `logprobs` runs beside them where the request asked for it, else is empty."""

    __slots__ = (
        "_has_logprobs",
        "_max_tokens",
        "_min_tokens",
        "_num_suspicions",
        "_num_tokens_at_loss",
        "_num_tokens_at_suspicion",
        "_stop_token_ids",
        "epoch",
        "error",
        "finish_reason",
        "logprobs",
        "num_cached_tokens",
        "num_losses",
        "num_prompt_tokens",
        "owner",
        "request_id",
        "timing",
        "tokens",
    )

    def __init__(self, request_id: str, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.epoch = 0
        self.owner: str | None = None
        """The instance that has the request in this epoch, as far as is known."""
        self.tokens = array("i")
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.error: ErrorInfo | None = None
        self.timing: RequestTiming | None = None
        self.num_cached_tokens: int | None = None
        """Number that the first owner reported: a later placement finds its own earlier tokens in a cache, not the
        client's."""
        self.num_prompt_tokens = 0
        """Tokens of the prompt with its images, as its owner told; 0: it has none."""
        self.num_losses = 0
        """Owners lost in a row without a new token in between."""
        self._num_tokens_at_loss = -1
        self._num_suspicions = 0
        """Instances that crashed over it in a row without a new token in between."""
        self._num_tokens_at_suspicion = -1
        self._has_logprobs = sampling.logprobs >= 0
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(self.request_id, self.epoch, len(self.tokens))

    def extend(self, entry: TokenEntry, sender: str | None) -> bool:
        """`accept` of the next tokens of a stream that goes on, from its owner; False: they are none, nothing changed."""
        if (
            sender != self.owner
            or sender is None
            or entry.finish_reason is not None
            or entry.epoch != self.epoch
            or entry.offset != len(self.tokens)
            or not entry.tokens
            or self.finish_reason is not None
            or self.num_cached_tokens is None
            or self._has_logprobs
        ):
            return False
        self.tokens.frombytes(entry.tokens)
        return True

    def accept(self, entry: TokenEntry, sender: str | None) -> Outcome:
        """`sender`: the instance that speaks; None: a scheduler, which owns nothing and may end any request."""
        if self.finish_reason is not None:
            return Outcome.NOTHING
        if entry.epoch < self.epoch:
            return Outcome.STALE
        if entry.epoch > self.epoch:
            self.epoch, self.owner = entry.epoch, None
        if sender is not None and sender != self.owner:
            if self.owner is None:
                self.owner = sender
            else:
                return Outcome.STALE
        reason, is_given_up = entry.finish_reason, gives_up(entry)
        known = len(self.tokens) - entry.offset
        if known < 0 and not is_given_up and reason not in (FinishReason.ERROR, FinishReason.DEADLINE):
            return Outcome.GAP
        num_new = len(entry.tokens) // 4 - known
        if known >= 0 and num_new > 0:
            self.tokens.frombytes(entry.tokens[4 * known :] if known else entry.tokens)
            if self._has_logprobs:
                logprobs = entry.logprobs[known:]
                missing = num_new - len(logprobs)
                self.logprobs.extend(logprobs)
                self.logprobs.extend([UNKNOWN_LOGPROB] * missing)
            if self.num_cached_tokens is None:
                self.num_cached_tokens = entry.num_cached_tokens
        elif reason is None:
            return Outcome.NOTHING
        self.num_prompt_tokens = entry.num_prompt_tokens or self.num_prompt_tokens
        if is_given_up:
            return Outcome.GIVEN_UP
        if reason is not None:
            self.finish_reason = reason
            self.error = entry.error
            self.timing = entry.timing
        return Outcome.NEWS

    def follow(self, owner: str, epoch: int) -> bool:
        """The request was handed over to `owner`, in `epoch`. False: that is no news."""
        if self.finish_reason is not None or epoch <= self.epoch:
            return False
        self.epoch, self.owner = epoch, owner
        return True

    def lose(self, epoch: int) -> Loss:
        """The owner in `epoch` is gone. Told again of the same loss, this does nothing."""
        if self.finish_reason is not None or epoch < self.epoch:
            return Loss.IGNORED
        self.epoch = epoch
        if self._end_if_complete():
            return Loss.COMPLETE
        self.begin_placement()
        self.num_losses = self.num_losses + 1 if len(self.tokens) == self._num_tokens_at_loss else 1
        self._num_tokens_at_loss = len(self.tokens)
        return Loss.PLACE

    @property
    def pause_s(self) -> float:
        """Time from its last loss until it is placed again. However many owners are lost, that alone ends no request."""
        return min(MAX_PAUSE_S, PAUSE_S * max(0, self.num_losses - 1))

    def suspect(self) -> ErrorInfo | None:
        """An instance crashed while it computed the request, of which no token had come from there. Returns the error with
        which the request fails, if it is taken for the cause."""
        if self.finish_reason is not None:
            return None
        is_in_a_row = len(self.tokens) == self._num_tokens_at_suspicion
        self._num_suspicions = self._num_suspicions + 1 if is_in_a_row else 1
        self._num_tokens_at_suspicion = len(self.tokens)
        if self._num_suspicions <= MAX_SUSPICIONS:
            return None
        message = f"{self._num_suspicions} instances in turn crashed while they computed this request: it may be why."
        return ErrorInfo(ErrorCode.CRASHED, message)

    def placed_again(
        self, request: GenerationRequest, arrived_s: float, first_token_s: float | None, now: float
    ) -> GenerationRequest:
        """The request as its next owner gets it: with the tokens so far, and with its times counted up to `now`. Times are
        seconds of one clock; `first_token_s`: None where there was none."""
        return msgspec.structs.replace(
            request,
            epoch=self.epoch,
            prior=self.tokens.tobytes(),
            timeout_s=max(0.001, arrived_s + request.timeout_s - now),
            waited_s=max(0.0, now - arrived_s),
            ttft_s=-1.0 if first_token_s is None else first_token_s - arrived_s,
        )

    def begin_placement(self) -> None:
        """The next owner outranks everybody whom the last placement may have reached."""
        self.epoch, self.owner = next_placement(self.epoch), None

    def _end_if_complete(self) -> bool:
        """All tokens came but the entry that says so was lost with its sender."""
        if len(self.tokens) >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif len(self.tokens) > self._min_tokens and self.tokens[-1] in self._stop_token_ids:
            self.finish_reason = FinishReason.STOP
        return self.finish_reason is not None
