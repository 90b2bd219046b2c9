"""Which tokens may come next in sequences whose output follows a grammar, found beside the steps.

A sequence's matcher is made of its grammar and its output so far when it takes a row, so nothing but the request travels
when it is preempted, moved or placed again. What a step has sampled is handed to a thread (`advance`), which makes the masks
for the tokens after it while the next step runs; they are waited for just before that one samples (`Guides.masks`). The
library, llguidance, works without the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import llguidance
import llguidance.numpy
import numpy as np

from shared.checkpoint import CheckpointError, describe

logger = logging.getLogger(__name__)

MAX_COMPILED = 128
"""Grammars of a model that are kept compiled."""
MAX_COMPILED_CHARACTERS = 1 << 20
"""Of these together; compiled they take some hundred times as much."""
MAX_THREADS = 8
"""That make the masks of one step."""
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
MAX_MASK_WAIT_S = 60.0
"""A grammar that takes longer than this for one token is given up."""


class Masks(NamedTuple):
    """Of one step's samples: bit t % 32 of word t // 32 says whether token t may come."""

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
    """Grammars that had been compiled before."""
    masks: int = 0
    mask_s: float = 0.0
    """Of the thread beside the steps."""
    replayed_tokens: int = 0
    """Output that matchers were brought through, of requests that came back or from elsewhere."""
    wait_s: float = 0.0
    """That steps waited for masks."""
    failures: int = 0


class Vocabulary:
    """A model's tokens as grammars see them, with the grammars compiled for it. Of one thread, once it is made."""

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
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._num_characters = 0

    def matcher(self, grammar: str, counters: GrammarCounters) -> llguidance.LLMatcher:
        """At the beginning of the output. Raises `ValueError`."""
        found = self._compiled.get(grammar)
        if found is None:
            begun_s = time.perf_counter()
            found = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
            if found.is_error():
                raise ValueError(found.get_error())
            counters.compiled += 1
            counters.compile_s += time.perf_counter() - begun_s
            self._compiled[grammar] = found
            self._num_characters += len(grammar)
            while len(self._compiled) > MAX_COMPILED or self._num_characters > MAX_COMPILED_CHARACTERS:
                self._num_characters -= len(self._compiled.popitem(last=False)[0])
        else:
            counters.cached += 1
            self._compiled.move_to_end(grammar)
        return found.deep_copy()


def _tokenizer_json(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    from transformers import AutoTokenizer  # seconds; only an older checkpoint needs it

    text: str = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str()
    return text


class _Guide:
    """Of one sequence, for as long as it has its row."""

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher | None = None
        """None: before it is made, and where it is of no more use."""
        self.mask: np.ndarray | None = None
        """[words] int32, for the next token; None: it has failed, or the output has ended."""
        self.vocabulary: Vocabulary | None = None
        self.error = ""
        self.ready: Future[None]


class Guides:
    """Those of a step's samples."""

    def __init__(self, indices: list[int], guides: list[_Guide], counters: GrammarCounters) -> None:
        self.indices = indices
        self.guides = guides
        self.failed: list[tuple[int, str]] = []
        """(index among the samples, why): what is sampled for them means nothing."""
        self._counters = counters

    def masks(self) -> Masks | None:
        """Waits until they are made. None where none of them could be."""
        begun_s = time.perf_counter()
        due_s = begun_s + MAX_MASK_WAIT_S
        indices, words = [], []
        for index, guide in zip(self.indices, self.guides, strict=True):
            try:
                guide.ready.result(max(0.0, due_s - time.perf_counter()))
            except TimeoutError:
                guide.error = f"its next token was not found in {MAX_MASK_WAIT_S:g} s"
            except BaseException as error:  # a panic of the library is no Exception
                guide.error = str(error) or type(error).__name__
            if guide.error or guide.mask is None:
                self.failed.append((index, guide.error or "the output has ended"))
            else:
                indices.append(index)
                words.append(guide.mask)
        self._counters.wait_s += time.perf_counter() - begun_s
        return Masks(np.array(indices), np.stack(words)) if words else None


class GrammarRows:
    """The guides of the rows of an executor, whose thread calls all of this."""

    def __init__(self) -> None:
        self.counters = GrammarCounters()
        self._guides: dict[int, _Guide] = {}
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._threads: llguidance.LLExecutor | None = None

    def load(self, folder: Path, vocab_size: int) -> Vocabulary | str:
        """A model's, or why it serves all but grammars. Blocking, seconds where it is large; from any thread."""
        try:
            return Vocabulary(folder, vocab_size)
        except Exception as error:
            return str(error)

    def take(self, row: int, grammar: str, output: np.ndarray, vocabulary: Vocabulary | str) -> None:
        """A sequence takes the row. `output`: its tokens so far, int32."""
        self._guides.pop(row, None)
        if grammar:
            guide = self._guides[row] = _Guide()
            guide.ready = self._thread.submit(self._begin, guide, grammar, output.tolist(), vocabulary)

    def of(self, rows: np.ndarray) -> Guides | None:
        """The guides of a step's samples; None: none has one."""
        if not self._guides:
            return None
        found = [(index, self._guides[row]) for index, row in enumerate(rows.tolist()) if row in self._guides]
        return Guides([i for i, _ in found], [guide for _, guide in found], self.counters) if found else None

    def advance(self, guides: Guides, tokens: Sequence[int]) -> None:
        """`tokens`: all that the step has sampled."""
        steps = [(guide, tokens[i]) for i, guide in zip(guides.indices, guides.guides, strict=True) if not guide.error]
        ready = self._thread.submit(self._advance, steps)
        for guide, _ in steps:
            guide.ready = ready

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------- in the thread

    def _begin(self, guide: _Guide, grammar: str, output: list[int], vocabulary: Vocabulary | str) -> None:
        try:
            if isinstance(vocabulary, str):
                raise ValueError(vocabulary)
            guide.vocabulary = vocabulary
            guide.matcher = guide.vocabulary.matcher(grammar, self.counters)
            if output and not guide.matcher.consume_tokens(output):
                raise ValueError(f"the output so far does not follow it: {guide.matcher.get_error()}")
            self.counters.replayed_tokens += len(output)
        except BaseException as error:  # a panic of the library is no Exception
            self._fail(guide, str(error))
        else:
            self._make_masks([(guide, guide.matcher)])

    def _advance(self, steps: list[tuple[_Guide, int]]) -> None:
        going = []
        for guide, token in steps:
            guide.mask = None
            vocabulary, matcher = guide.vocabulary, guide.matcher
            if vocabulary is None or matcher is None:
                continue
            try:
                if token in vocabulary.eos_token_ids:
                    guide.matcher = None  # a step that was launched already may sample for it once more
                elif matcher.consume_token(token):
                    going.append((guide, matcher))
                else:
                    self._fail(guide, matcher.get_error() or f"token {token} does not follow")
            except BaseException as error:
                self._fail(guide, str(error))
        if going:
            self._make_masks(going)

    def _make_masks(self, going: list[tuple[_Guide, llguidance.LLMatcher]]) -> None:
        """Of sequences of one model."""
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
