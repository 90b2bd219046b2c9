"""The instance's side of token streams: frames for gateways, and everything needed to send a part of them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from shared.messages.requests import (
    UNKNOWN_LOGPROB,
    GenerationRequest,
    StreamPosition,
    TokenEntry,
    TokenFrame,
    TokenLogprob,
    next_placement,
)

MAX_FRAME_ENTRIES = 512
"""Keeps a frame under the bus's message limit even with log-probabilities."""
ENTRY_BYTES = 1024
"""Size of an entry at most, without log-probabilities of a prompt."""
KEPT_S = 60.0
"""How long at least the output of a request that has ended is there for a gateway that missed its last frame."""
MAX_ENDED_PROMPT_BYTES = 64 << 20
"""Most bytes of log-probabilities of prompts of requests that have ended."""


def _prompt_bytes(entry: TokenEntry) -> int:
    return len(entry.logprobs[0].prompt) if entry.logprobs else 0


def cut(entry: TokenEntry, room_bytes: int) -> tuple[TokenEntry, int]:
    """The entry with as many of its tokens as fit into `room_bytes`, and the bytes that they take. One that was cut has no
    end yet; whoever asked asks again from there."""
    num_tokens = len(entry.tokens) // 4
    if not num_tokens:
        return entry, 0
    token_bytes, prompt_bytes = 4, _prompt_bytes(entry)
    if entry.logprobs:
        token_bytes += 16 + 15 * max(len(logprob.top_ids) for logprob in entry.logprobs)
    fitting = max(0, room_bytes - prompt_bytes) // token_bytes
    if fitting >= num_tokens:
        return entry, num_tokens * token_bytes + prompt_bytes
    part = msgspec.structs.replace(
        entry,
        tokens=entry.tokens[: 4 * fitting],
        logprobs=entry.logprobs[:fitting],
        finish_reason=None,
        error=None,
        timing=None,
    )
    return part, fitting * token_bytes + (prompt_bytes if fitting else 0)


class _EndedRequests:
    """Each with its whole output and its end, so that a gateway that missed the last frame can ask again. Bounded in number
    and age; time is an argument."""

    def __init__(self, keep_s: float, max_requests: int = 4096) -> None:
        self._max_requests = max_requests
        self._keep_s = keep_s
        self._entries: OrderedDict[str, tuple[float, TokenEntry]] = OrderedDict()
        self._prompt_bytes = 0

    def add(self, entry: TokenEntry, now: float) -> None:
        """`entry`: offset 0, all output tokens, the finish reason."""
        self._drop(entry.request_id)
        self._entries[entry.request_id] = (now, entry)
        self._prompt_bytes += _prompt_bytes(entry)
        while self._entries:
            oldest_id, (added_s, _) = next(iter(self._entries.items()))
            is_in_bounds = len(self._entries) <= self._max_requests and self._prompt_bytes <= MAX_ENDED_PROMPT_BYTES
            if is_in_bounds and now - added_s <= self._keep_s:
                break
            self._drop(oldest_id)

    def _drop(self, request_id: str) -> None:
        if (found := self._entries.pop(request_id, None)) is not None:
            self._prompt_bytes -= _prompt_bytes(found[1])

    def get(self, request_id: str) -> TokenEntry | None:
        found = self._entries.get(request_id)
        return found[1] if found else None


class _Live(msgspec.Struct):
    """Output of a request that has not ended, as entries showed it."""

    epoch: int
    tokens: bytearray
    first_offset: int
    logprobs: list[TokenLogprob]
    num_cached_tokens: int
    num_brought: int = 0
    """Tokens among them that another instance made."""

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.tokens) // 4

    def is_continued_by(self, entry: TokenEntry) -> bool:
        """In the same epoch, or in a higher one of the same placement where a move did not come to pass."""
        if entry.epoch == self.epoch:
            return True
        same_placement = next_placement(entry.epoch) == next_placement(self.epoch)
        return same_placement and entry.epoch > self.epoch and entry.offset == self.next_offset


class OutputLog:
    """Not thread-safe: the event loop owns it."""

    def __init__(self, keep_s: float = KEPT_S) -> None:
        """`keep_s`: how long outputs of requests that have ended are kept."""
        self._live: dict[str, _Live] = {}
        self._ended = _EndedRequests(max(KEPT_S, keep_s))

    def frames(self, sender: str, entries: list[TokenEntry], now: float) -> list[TokenFrame]:
        """Remembers the entries of one gateway and packs them into frames."""
        for entry in entries:
            self._remember(entry, now)
        frames, first, num_bytes = [], 0, 0
        for index, entry in enumerate(entries):
            entry_bytes = ENTRY_BYTES + _prompt_bytes(entry)
            if num_bytes + entry_bytes > MAX_FRAME_ENTRIES * ENTRY_BYTES:
                frames.append(TokenFrame(sender, entries[first:index]))
                first, num_bytes = index, 0
            num_bytes += entry_bytes
        return [*frames, TokenFrame(sender, entries[first:])] if entries else []

    def place(self, request: GenerationRequest) -> None:
        """The request was placed here. What was made of it elsewhere is replayed too, since its next gateway may know none
        of it."""
        if request.prior and self.epoch(request.request_id) < request.epoch:
            self.adopt(request, num_cached_tokens=0)

    def adopt(self, request: GenerationRequest, num_cached_tokens: int) -> TokenEntry:
        """The request goes on here with all its output so far as `prior`. Returns the entry without tokens from which its
        gateway knows the new owner. Log-probabilities do not travel: a replay of what was before has none."""
        num_output = len(request.prior) // 4
        logprobs = [UNKNOWN_LOGPROB] * num_output if request.sampling.logprobs >= 0 else []
        live = _Live(request.epoch, bytearray(request.prior), 0, logprobs, num_cached_tokens, num_brought=num_output)
        self._live[request.request_id] = live
        return TokenEntry(
            request_id=request.request_id,
            epoch=request.epoch,
            offset=num_output,
            tokens=b"",
            num_cached_tokens=num_cached_tokens,
        )

    def give_up(self, request_id: str, epoch: int) -> int:
        """The request belongs to another instance from `epoch` on. Returns the number of tokens that were made here."""
        live = self._live.get(request_id)
        if live is None or live.epoch >= epoch:
            return 0
        del self._live[request_id]
        return len(live.tokens) // 4 - live.num_brought

    def raise_epoch(self, request_id: str, epoch: int) -> TokenEntry | None:
        """The request goes on here in a higher epoch. Returns the entry that says so to its gateway; None where that is
        known, or nothing of it went out yet."""
        live = self._live.get(request_id)
        if live is None or live.epoch >= epoch:
            return None
        live.epoch = epoch
        return TokenEntry(
            request_id=request_id,
            epoch=epoch,
            offset=live.next_offset,
            tokens=b"",
            num_cached_tokens=live.num_cached_tokens,
        )

    def epoch(self, request_id: str) -> int:
        """The highest in which output of the request is known here; -1: none is."""
        live, ended = self._live.get(request_id), self._ended.get(request_id)
        return max(-1 if live is None else live.epoch, -1 if ended is None else ended.epoch)

    def _remember(self, entry: TokenEntry, now: float) -> None:
        live = self._live.get(entry.request_id)
        if live is not None and live.is_continued_by(entry):
            live.epoch = entry.epoch
        else:
            live = _Live(entry.epoch, bytearray(), entry.offset, [], entry.num_cached_tokens)
            self._live[entry.request_id] = live
        live.tokens += entry.tokens
        if entry.logprobs:
            live.logprobs.extend(entry.logprobs)
        if entry.finish_reason is not None:
            del self._live[entry.request_id]
            whole = msgspec.structs.replace(
                entry, offset=live.first_offset, tokens=bytes(live.tokens), logprobs=tuple(live.logprobs)
            )
            self._ended.add(whole, now)

    def replay_or_begin(self, position: StreamPosition, held_epoch: Callable[[str], int | None]) -> TokenEntry | None:
        """What `replay` gives, or an empty entry of a request that is held here in that epoch and of which nothing went out
        yet. `held_epoch`: by request id."""
        entry = self.replay(position)
        is_new = self.epoch(position.request_id) != position.epoch
        if entry is None and is_new and held_epoch(position.request_id) == position.epoch:
            return TokenEntry(
                request_id=position.request_id, epoch=position.epoch, offset=position.next_offset, tokens=b""
            )
        return entry

    def replay(self, position: StreamPosition) -> TokenEntry | None:
        """Everything from the position on (perhaps nothing new yet); None if the request is not known here in that
        epoch or was placed here with a prior output that reaches beyond the position."""
        live = self._live.get(position.request_id)
        if live is not None and live.epoch == position.epoch:
            entry = TokenEntry(
                request_id=position.request_id,
                epoch=live.epoch,
                offset=live.first_offset,
                tokens=bytes(live.tokens),
                logprobs=tuple(live.logprobs),
                num_cached_tokens=live.num_cached_tokens,
            )
        else:
            ended = self._ended.get(position.request_id)
            if ended is None or ended.epoch != position.epoch:
                return None
            entry = ended
        skip = position.next_offset - entry.offset
        if skip < 0:
            return None
        return msgspec.structs.replace(
            entry,
            offset=position.next_offset,
            tokens=entry.tokens[4 * skip :],
            logprobs=entry.logprobs[skip:] if entry.logprobs else (),
        )
