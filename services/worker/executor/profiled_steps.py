"""Which steps a profile measures, and the rows of an executor that they share. No torch, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from shared.costs.model import StepShape, shape_of
from shared.engine.plan import ModelShape


class Work(NamedTuple):
    """What a step computes: of each sequence the tokens in its cache and those computed. One token is a decode."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def shape(self) -> StepShape:
        return shape_of(list(self.starts), list(self.counts))

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences after the step."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]


def work_of(sequences: list[tuple[int, int]]) -> Work:
    """Work of a step, from (tokens in the cache, tokens computed) of each sequence; the longest comes first, so that
    works share rows."""
    starts, counts = zip(*sorted(sequences, key=lambda sequence: (-sum(sequence), sequence)), strict=True)
    return Work(starts, counts)


@dataclass(frozen=True)
class Extent:
    """How much is measured. Works beyond the executor's room are left out."""

    decodes: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    chunk_contexts: tuple[int, ...]
    num_mixed: int
    """Random works among the fitted ones."""
    num_held_out: int
    """Other random works, for the error."""
    time_s: float
    """Time for all; what is left of the works by then is left out."""
    max_step_s: float
    """Works that take longer are left out."""
    num_repeats: int


BRIEF = Extent((1, 4, 16, 64), (64, 512), (16, 64, 256), (0, 512), 6, 8, time_s=5.0, max_step_s=0.25, num_repeats=7)
FULL = Extent(
    (1, 2, 4, 8, 16, 32, 64, 128, 256), (32, 256, 1024, 4096), (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    (0, 256, 1024, 4096), 40, 40, time_s=180.0, max_step_s=10.0, num_repeats=15,
)  # fmt: skip
ESSENTIAL = Extent((1, 4), (64, 256), (8, 32), (0, 128), 0, 0, 0.0, 0.0, 0)
"""Measured however long it takes: without these the coefficients are not determined."""


class Rows:
    """How long the sequence of each row must be for all works admitted; within what the executor has."""

    def __init__(self, num_rows: int, num_blocks: int, shape: ModelShape, max_step_tokens: int) -> None:
        self.num_rows, self._max_blocks, self.shape = num_rows, num_blocks, shape
        self._max_step_tokens = max_step_tokens
        self.lengths: list[int] = []

    def blocks_of(self, lengths: list[int]) -> list[int]:
        return [-(-length // self.shape.block_size) for length in lengths]

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_of(self.lengths))

    def admit(self, work: Work) -> bool:
        """Whether there is room for the work, which is then kept for it."""
        lengths = [max(pair) for pair in zip_longest(self.lengths, work.lengths, fillvalue=0)]
        admitted = (
            len(lengths) <= self.num_rows
            and max(lengths) <= self.shape.max_model_len
            and sum(work.counts) <= self._max_step_tokens
            and sum(self.blocks_of(lengths)) <= self._max_blocks
        )
        if admitted:
            self.lengths = lengths
        return admitted


def grid(extent: Extent, draw: random.Random) -> list[Work]:
    """Decodes alone, chunks alone, and each chunk with decodes; contexts of a batch spread evenly around their mean."""
    works = []

    def decodes(num: int, mean: int) -> list[tuple[int, int]]:
        return [(round(start), 1) for start in np.linspace(0.25 * mean, 1.75 * mean, num)] if num > 1 else [(mean, 1)]

    for num in extent.decodes:
        for mean in extent.decode_contexts:
            works.append(work_of(decodes(num, mean)))
    for chunk in extent.chunks:
        for context in extent.chunk_contexts:
            works.append(work_of([(context, chunk)]))
        beside = decodes(draw.choice(extent.decodes), draw.choice(extent.decode_contexts))
        works.append(work_of([*beside, (draw.choice(extent.chunk_contexts), chunk)]))
    return works


def random_works(extent: Extent, draw: random.Random, rows: Rows, count: int) -> list[Work]:
    """`count` works for which there is room, if so many are found; sizes spread over orders of magnitude, most mixed."""
    most, max_length = min(rows.num_rows, max(extent.decodes)), rows.shape.max_model_len
    works: list[Work] = []
    for _ in range(50 * count):
        if len(works) == count:
            break
        num_decodes = _spread(draw, 1, most) if draw.random() < 0.8 else 0
        mean = _spread(draw, 16, min(max_length // 2, max(extent.decode_contexts)))
        sequences = [(min(round(mean * draw.uniform(0.25, 1.75)), max_length - 1), 1) for _ in range(num_decodes)]
        for _ in range(draw.choice((0, 1, 1, 2)) if num_decodes else 1):
            start = draw.choice((0, draw.randrange(1 + max(extent.chunk_contexts))))
            sequences.append((start, _spread(draw, 4, max(extent.chunks))))
        work = work_of(sequences)
        if rows.admit(work):
            works.append(work)
    return works


def _spread(draw: random.Random, least: int, most: int) -> int:
    """Draws from `least` to `most`, each order of magnitude alike."""
    return int(least * max(1.0, most / least) ** draw.random() + 0.5)
