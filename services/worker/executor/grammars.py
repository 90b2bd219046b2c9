"""Which tokens may come next in sequences whose output follows a grammar, found beside the steps.

A grammar is compiled in a thread, when its first request comes (`compile`). A sequence's matcher is made of it and of its
output so far when it takes a row, so nothing but the request travels when it is preempted, moved or placed again. What a
step has sampled is handed to another thread (`advance`), which makes the masks for the tokens after it while the next step
runs; they are waited for just before that one samples (`Guides.masks`). The library, llguidance, works without the
interpreter's lock.

Where a draft model drafts, a matcher follows its tokens one by one (`DraftGuides`), for the masks of drafts and of what is
sampled after them, and is then taken back to where it was.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import llguidance
import llguidance.numpy
import numpy as np

from shared.engine.plan import NO_TOKEN
from shared.models.checkpoint import CheckpointError, describe, tokenizer_json

logger = logging.getLogger(__name__)

MAX_COMPILED = 128
"""Grammars of a model that are kept compiled."""
MAX_COMPILED_CHARACTERS = 1 << 20
"""Most characters of these together; compiled they take some hundred times as much."""
MAX_THREADS = 8
"""Threads that make the masks of one step."""
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
MAX_MASK_WAIT_S = 60.0
"""A grammar that takes longer than this for one token is given up."""


Compiled = Future[llguidance.LLMatcher | str]
"""A matcher at the beginning of an output, to be copied; or why the grammar cannot be followed."""


class Masks(NamedTuple):
    """Masks of one step's samples: bit t % 32 of word t // 32 says whether token t may come."""

    indices: np.ndarray
    """[G] int64, which of the samples have one."""
    words: np.ndarray
    """[G, ceil(vocab / 32)] int32"""

    def of(self, index: int) -> Masks | None:
        """Those of one sample, as of a step of it alone."""
        found = np.flatnonzero(self.indices == index)
        return Masks(np.zeros(1, np.int64), self.words[found]) if len(found) else None


@dataclass
class GrammarCounters:
    """They go on growing; written by one thread each."""

    compiled: int = 0
    compile_s: float = 0.0
    cached: int = 0
    """Sequences whose grammar was there, or being compiled, when they took a row."""
    masks: int = 0
    mask_s: float = 0.0
    """Seconds of the thread beside the steps."""
    replayed_tokens: int = 0
    """Output that matchers were brought through, of requests that came back or from elsewhere."""
    wait_s: float = 0.0
    """Seconds that steps waited for masks."""
    failures: int = 0


class Vocabulary:
    """A model's tokens as grammars see them, with the grammars compiled for it."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Blocking. Raises `CheckpointError` where the tokenizer cannot be used."""
        self.vocab_size = vocab_size
        self.eos_token_ids = [token for token in describe(folder).eos_token_ids if token < vocab_size]
        if not self.eos_token_ids:
            raise CheckpointError("the model has no end-of-sequence token, which the end of a grammar needs")
        try:
            self.tokenizer = llguidance.LLTokenizer(
                _tokenizer_json(folder), n_vocab=vocab_size, eos_token=self.eos_token_ids
            )
        except Exception as error:  # the library raises plain ValueError and more
            raise CheckpointError(f"the tokenizer of {folder} cannot be used with grammars: {error}") from error
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        """The least recently used first."""
        self._num_characters = 0

    def has(self, grammar: str) -> bool:
        """Whether it is compiled, or being so."""
        return grammar in self._compiled

    def compiled(self, grammar: str, begin: Callable[[], Compiled]) -> Compiled:
        """`begin` compiles it where it is not there."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = begin()
                self._num_characters += len(grammar)
                self._drop_old()
            self._compiled.move_to_end(grammar)
            return found

    def _drop_old(self) -> None:
        """Not those that are being compiled: they would be begun again."""
        for grammar, one in list(self._compiled.items()):
            if len(self._compiled) <= MAX_COMPILED and self._num_characters <= MAX_COMPILED_CHARACTERS:
                return
            if one.done():
                del self._compiled[grammar]
                self._num_characters -= len(grammar)


def _tokenizer_json(folder: Path) -> str:
    if (known := tokenizer_json(folder)) is not None:
        return known
    from transformers import AutoTokenizer  # seconds; only an older checkpoint needs it

    text: str = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str()
    return text


class _Guide:
    """Guide of one sequence, for as long as it has its row."""

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher | None = None
        """None: before it is made, and where it is of no more use."""
        self.mask: np.ndarray | None = None
        """[words] int32, for the next token; None: it has failed, or the output has ended."""
        self.vocabulary: Vocabulary | None = None
        self.error = ""
        self.ready: Future[None] = Future()


class _Chain:
    """Drafts of one sequence in a step."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        """Which of the step's samples come after each."""
        self.tokens: list[int] = []
        self.masks: list[np.ndarray | None] = []
        """Masks of what comes after each; None: nothing can, or need not."""


class Guides:
    """Those of a step's samples."""

    def __init__(self, indices: list[int], guides: dict[int, _Guide], counters: GrammarCounters) -> None:
        """`indices`: of the first sample of each row; `guides`: by row."""
        self.indices = indices
        self.guides = list(guides.values())
        self.chains = [_Chain() for _ in indices]
        self._rows = list(guides)
        self.failed: list[tuple[int, str]] = []
        """(index among the samples, why): what is sampled for them means nothing."""
        self._counters = counters

    def add_draft(self, row: int, index: int) -> None:
        """One more sample of a row, after its next draft."""
        self.chains[self._rows.index(row)].indices.append(index)

    def begin_drafts(self) -> DraftGuides:
        """Waits for them: a draft model is about to draft for the rows."""
        self._wait()
        return DraftGuides(
            dict(zip(self._rows, zip(self.guides, self.chains, strict=True), strict=True)), self._counters
        )

    def masks(self) -> Masks | None:
        """Waits until they are made. None where none of them could be."""
        self._wait()
        indices, words = [], []
        for index, guide, chain in zip(self.indices, self.guides, self.chains, strict=True):
            if guide.error or guide.mask is None:
                self.failed.append((index, guide.error or "the output has ended"))
                continue
            indices.append(index)
            words.append(guide.mask)
            for after, mask in zip(chain.indices, chain.masks, strict=False):
                if mask is not None:
                    indices.append(after)
                    words.append(mask)
        return Masks(np.array(indices), np.stack(words)) if words else None

    def _wait(self) -> None:
        begun_s = time.perf_counter()
        due_s = begun_s + MAX_MASK_WAIT_S
        for guide in self.guides:
            try:
                guide.ready.result(max(0.0, due_s - time.perf_counter()))
            except TimeoutError:
                guide.error = f"its next token was not found in {MAX_MASK_WAIT_S:g} s"
            except BaseException as error:  # a panic of the library is no Exception
                guide.error = str(error) or type(error).__name__
        self._counters.wait_s += time.perf_counter() - begun_s

    def accepted(self, tokens: Sequence[int]) -> list[tuple[_Guide, list[int]]]:
        """What has been sampled for each, with what was sampled after the drafts that came true."""
        found = []
        for index, guide, chain in zip(self.indices, self.guides, self.chains, strict=True):
            taken = [tokens[index]]
            for after, draft in zip(chain.indices, chain.tokens, strict=False):
                if draft != taken[-1]:
                    break
                taken.append(tokens[after])
            found.append((guide, taken))
        return found


class DraftGuides:
    """Guides of the rows for which a draft model drafts, in the thread of the steps: nothing else uses their matchers
    before the step is over."""

    def __init__(self, by_row: dict[int, tuple[_Guide, _Chain]], counters: GrammarCounters) -> None:
        self._by_row = by_row
        self._counters = counters
        self._num_consumed = dict.fromkeys(by_row, 0)

    def masks(self, rows: list[int]) -> Masks | None:
        """Masks of the next draft of each of these rows; None: none has one."""
        found = [(index, mask) for index, row in enumerate(rows) if (mask := self._mask(row)) is not None]
        return Masks(np.array([index for index, _ in found]), np.stack([mask for _, mask in found])) if found else None

    def _mask(self, row: int) -> np.ndarray | None:
        if row not in self._by_row:
            return None
        guide, chain = self._by_row[row]
        return chain.masks[-1] if chain.masks else guide.mask

    def advance(self, rows: list[int], tokens: Sequence[int]) -> None:
        """The draft of each of these rows."""
        for row, token in zip(rows, tokens, strict=True):
            if row in self._by_row:
                mask = self._mask_after(row, token)
                chain = self._by_row[row][1]
                chain.tokens.append(token)
                chain.masks.append(mask)

    def _mask_after(self, row: int, token: int) -> np.ndarray | None:
        guide, vocabulary = self._by_row[row][0], self._by_row[row][0].vocabulary
        is_over = self._mask(row) is None or token == NO_TOKEN
        if is_over or guide.error or guide.matcher is None or vocabulary is None or token in vocabulary.eos_token_ids:
            return None
        begun_s = time.perf_counter()
        words = llguidance.numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
        try:
            if not guide.matcher.consume_token(token):
                return None
            self._num_consumed[row] += 1
            llguidance.numpy.fill_next_token_bitmask(guide.matcher, words, 0)
        except BaseException as error:  # a panic of the library is no Exception
            guide.error = str(error) or type(error).__name__
            return None
        self._counters.masks += 1
        self._counters.mask_s += time.perf_counter() - begun_s
        mask: np.ndarray = words[0]
        return mask

    def end(self) -> None:
        """Takes the matchers back to before the drafts."""
        for row, num in self._num_consumed.items():
            guide = self._by_row[row][0]
            if num and guide.matcher is not None and not guide.matcher.rollback(num):
                guide.error = guide.matcher.get_error() or "it could not be taken back to before a draft"


class GrammarRows:
    """The guides of the rows of an executor, whose thread calls this but where it says otherwise."""

    def __init__(self) -> None:
        self.counters = GrammarCounters()
        self._guides: dict[int, _Guide] = {}
        self._compiler = ThreadPoolExecutor(1, "compiler of grammars")
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._threads: llguidance.LLExecutor | None = None

    def load(self, folder: Path, vocab_size: int) -> Vocabulary | str:
        """A model's, or why it serves all but grammars. Blocking, seconds where it is large; from any thread."""
        try:
            return Vocabulary(folder, vocab_size)
        except Exception as error:
            return str(error)

    def compile(self, grammar: str, vocabulary: Vocabulary | str) -> Compiled:
        """Begins to, unless it has been. From any thread."""
        if isinstance(vocabulary, str):
            refused: Compiled = Future()
            refused.set_result(vocabulary)
            return refused
        return vocabulary.compiled(grammar, lambda: self._compiler.submit(self._compile, grammar, vocabulary.tokenizer))

    def take(self, row: int, grammar: str, output: np.ndarray, vocabulary: Vocabulary | str) -> None:
        """A sequence takes the row. `output`: its tokens so far, int32."""
        self._guides.pop(row, None)
        if grammar:
            guide, tokens = _Guide(), output.tolist()
            self._guides[row] = guide
            self.counters.cached += not isinstance(vocabulary, str) and vocabulary.has(grammar)

            def begin(compiled: Compiled) -> None:
                with suppress(CancelledError, RuntimeError):  # closed meanwhile
                    self._thread.submit(self._begin, guide, compiled.result(), tokens, vocabulary)

            self.compile(grammar, vocabulary).add_done_callback(begin)

    def of(self, rows: np.ndarray) -> Guides | None:
        """The guides of a step's samples, of which those of a row after the first come after its drafts; None: none has
        one."""
        if not self._guides:
            return None
        first: dict[int, int] = {}
        drafts: list[tuple[int, int]] = []
        for index, row in enumerate(rows.tolist()):
            if row not in self._guides:
                continue
            if row in first:
                drafts.append((row, index))
            else:
                first[row] = index
        if not first:
            return None
        guides = Guides(list(first.values()), {row: self._guides[row] for row in first}, self.counters)
        for row, index in drafts:
            guides.add_draft(row, index)
        return guides

    def advance(self, guides: Guides, tokens: Sequence[int]) -> None:
        """`tokens`: all that the step has sampled."""
        steps = [(guide, taken) for guide, taken in guides.accepted(tokens) if not guide.error]
        ready = self._thread.submit(self._advance, steps)
        for guide, _ in steps:
            guide.ready = ready

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ in the threads

    def _compile(self, grammar: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher | str:
        begun_s = time.perf_counter()
        try:
            made = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
            if made.is_error():
                return made.get_error() or "unknown reason"
        except BaseException as error:  # a panic of the library is no Exception
            return str(error) or type(error).__name__
        self.counters.compiled += 1
        self.counters.compile_s += time.perf_counter() - begun_s
        return made

    def _begin(
        self, guide: _Guide, compiled: llguidance.LLMatcher | str, output: list[int], vocabulary: Vocabulary | str
    ) -> None:
        try:
            if isinstance(compiled, str) or isinstance(vocabulary, str):
                raise ValueError(compiled)
            guide.vocabulary, guide.matcher = vocabulary, compiled.deep_copy()
            if output and not guide.matcher.consume_tokens(output):
                raise ValueError(f"the output so far does not follow it: {guide.matcher.get_error()}")
            self.counters.replayed_tokens += len(output)
            self._make_masks([(guide, guide.matcher)])
        except BaseException as error:
            self._fail(guide, str(error))
        finally:
            guide.ready.set_result(None)

    def _advance(self, steps: list[tuple[_Guide, list[int]]]) -> None:
        going = []
        for guide, tokens in steps:
            guide.mask = None
            if guide.vocabulary is None:
                continue
            for token in tokens:
                if guide.matcher is not None:
                    self._follow(guide, guide.matcher, token, guide.vocabulary)
            if guide.matcher is not None:
                going.append((guide, guide.matcher))
        if going:
            self._make_masks(going)

    def _follow(self, guide: _Guide, matcher: llguidance.LLMatcher, token: int, vocabulary: Vocabulary) -> None:
        try:
            if token in vocabulary.eos_token_ids or token == NO_TOKEN:
                guide.matcher = None  # a step that was launched already may sample for it once more
            elif not matcher.consume_token(token):
                self._fail(guide, matcher.get_error() or f"token {token} does not follow")
        except BaseException as error:
            self._fail(guide, str(error))

    def _make_masks(self, going: list[tuple[_Guide, llguidance.LLMatcher]]) -> None:
        """Makes the masks of sequences of one model."""
        begun_s = time.perf_counter()
        vocabulary = going[0][0].vocabulary
        assert vocabulary is not None
        words = llguidance.numpy.allocate_token_bitmask(len(going), vocabulary.vocab_size)
        try:
            if len(going) == 1:
                llguidance.numpy.fill_next_token_bitmask(going[0][1], words, 0)
            else:
                if self._threads is None:
                    self._threads = llguidance.LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))
                matchers = [(matcher, index) for index, (_, matcher) in enumerate(going)]
                llguidance.numpy.fill_next_token_bitmask_par(self._threads, matchers, words)
        except BaseException as error:  # the library panics, say
            for guide, _ in going:
                self._fail(guide, str(error))
            return
        for (guide, matcher), mask in zip(going, words, strict=True):
            if matcher.is_error():
                self._fail(guide, matcher.get_error())
            else:
                guide.mask = mask
        self.counters.masks += len(going)
        self.counters.mask_s += time.perf_counter() - begun_s

    def _fail(self, guide: _Guide, reason: str) -> None:
        reason = reason.removesuffix("<non-verbose/>").strip()
        logger.warning("a grammar cannot be followed: %s", reason)
        guide.error = reason or "unknown reason"
        guide.matcher = guide.mask = None
        self.counters.failures += 1
