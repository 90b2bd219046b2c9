"""Incremental detokenisation: never half a character, never a stop string, never the same text twice.

Pure. `Detokenizer` turns tokens into text pieces, `StopStrings` decides how much of the text may be shown. Both run on the
event loop: what a token alone is as text is remembered, so that most tokens cost less than handing them to a thread would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 32
"""A character has at most 4 bytes, so at most 4 tokens; a longer run without one is garbage and is shown as such."""


class Decoding:
    """How a tokenizer makes text of ids, for all of its streams: the text of each token alone is remembered."""

    __slots__ = ("_alone", "decode", "joins_bytes")

    def __init__(self, decode: Callable[[list[int]], str], *, joins_bytes: bool = False) -> None:
        """`decode`: ids to text. `joins_bytes`: it puts the bytes of all tokens together and reads them as UTF-8, as
        byte-level BPE does, so that what are whole characters alone are the same anywhere behind whole characters."""
        self.decode = decode
        self.joins_bytes = joins_bytes
        self._alone: dict[int, str] = {}

    def alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.decode([token_id])
        return text


class Detokenizer:
    """Incremental decoding by a sliding window (the method of text-generation-inference and vLLM).

    The window holds the tokens of the last shown piece as context, because decoders look at neighbours (a SentencePiece
    decoder drops the space of the first token it sees), and the tokens not shown yet. What the window decodes to, less
    what its context decodes to, is the new piece; it waits while it ends in an incomplete character.
    """

    __slots__ = ("_context_text", "_decoding", "_hidden_ids", "_num_context", "_window")

    def __init__(self, decoding: Decoding, hidden_ids: frozenset[int]) -> None:
        """`hidden_ids`: special tokens, which have no text."""
        self._decoding = decoding
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; often all of its own, sometimes none."""
        if token_id in self._hidden_ids:
            return ""
        decoding = self._decoding
        if decoding.joins_bytes and len(self._window) == self._num_context:
            piece = decoding.alone(token_id)
            if piece and REPLACEMENT not in piece:
                self._window = [token_id]
                self._num_context, self._context_text = 1, piece
                return piece
        self._window.append(token_id)
        text = decoding.decode(self._window)
        num_pending = len(self._window) - self._num_context
        if text.endswith(REPLACEMENT) and num_pending <= MAX_PENDING_TOKENS:
            return ""
        piece = text[len(self._context_text) :]
        if piece:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            is_one = self._num_context == 1
            self._context_text = decoding.alone(self._window[0]) if is_one else decoding.decode(self._window)
        elif num_pending > MAX_PENDING_TOKENS:
            del self._window[self._num_context :]  # ids without a text of their own
        return piece

    def flush(self) -> str:
        """What is pending at the end, less an incomplete last character."""
        piece = ""
        if len(self._window) > self._num_context:
            piece = self._decoding.decode(self._window)[len(self._context_text) :].rstrip(REPLACEMENT)
        self._window = []
        self._num_context, self._context_text = 0, ""
        return piece


class StopStrings:
    """Finds the stop string whose last character comes first (of several ending there, the longest), however the text
    is cut into pieces, and holds back what may become part of one."""

    __slots__ = ("_held", "_include", "_stops", "matched", "num_released")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.num_released = 0
        """Characters released so far."""
        self.matched: str | None = None
        """The stop string that was found."""

    def feed(self, piece: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string is complete). After True nothing more may be fed."""
        if not self._stops:
            self.num_released += len(piece)
            return piece, False
        text = self._held + piece
        if match := self._first_match(text):
            start, end = match
            self.matched = text[start:end]
            return self._release(text[: end if self._include else start], ""), True
        num_held = self._num_held(text)
        cut = len(text) - num_held
        return self._release(text[:cut], text[cut:]), False

    def skip(self, piece: str) -> str:
        """Shows a piece in which stop strings do not count."""
        return self._release(self._held + piece, "")

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self._release(self._held, "")

    def _release(self, shown: str, held: str) -> str:
        self._held = held
        self.num_released += len(shown)
        return shown

    def _first_match(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop))
        return best

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
