"""The model of the chaos run, whose KV cell is a hash of the prefix, and its next token a function of the last cell; and its
executor, with real KV: bytes in one slab that all models share, as `KvStore` lays them out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from shared.engine.plan import CopyKind, EndedCopy, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import unpack_tokens

WORDS = 8
"""64-bit words of a KV cell."""
_MASK = (1 << 64) - 1
_FACTORS = np.arange(1, 2 * WORDS, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
VOCABULARY = 997
CELL_BYTES = 8 * WORDS
MERGED_BYTES = 2048
SHAPES = {"a": ModelShape("a", 8, 4, 640), "b": ModelShape("b", 4, 8, 640)}
assert all(s.block_size * s.blocks_per_merged * CELL_BYTES == MERGED_BYTES for s in SHAPES.values())
NO_OWNER = ""
PREFILL_TOKENS_S = 8000.0
"""A step takes so much longer for each token beyond one a sequence."""


def root(model: str) -> int:
    return int.from_bytes(model.encode().ljust(8, b"~")[:8], "little")


def extend(last: int, tokens: Iterable[int]) -> list[int]:
    """A link for each token, after `last`; never 0."""
    links = []
    for token in tokens:
        last = ((last ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        last = (last ^ (last >> 29)) or 1
        links.append(last)
    return links


def cells(links: np.ndarray) -> np.ndarray:
    """`[n]` uint64 -> `[n, WORDS]` uint64."""
    made: np.ndarray = links[:, None] * _FACTORS
    return made


def next_token(link: int) -> int:
    return (link >> 17) % VOCABULARY


def output(model: str, prompt: Sequence[int], max_tokens: int, stop: Iterable[int] = ()) -> list[int]:
    """What an undisturbed run makes."""
    stops = frozenset(stop)
    made: list[int] = []
    link = extend(root(model), prompt)[-1]
    while len(made) < max_tokens:
        made.append(next_token(link))
        if made[-1] in stops:
            break
        (link,) = extend(link, made[-1:])
    return made


class _Row:
    def __init__(self, model: str, tokens: list[int], blocks: list[int]) -> None:
        self.model = model
        self.tokens = tokens
        self.blocks = blocks
        self.links = np.array(extend(root(model), tokens), np.uint64)
        """Links of `tokens`."""

    def put(self, position: int, token: int) -> None:
        """What was there and after it was never true."""
        before = int(self.links[position - 1]) if position else root(self.model)
        self.tokens[position:] = [token]
        self.links = np.append(self.links[:position], np.uint64(extend(before, [token])[0]))


class ChaosExecutor:
    def __init__(self, num_merged: int, num_host_merged: int, step_s: float, on_wrong: Callable[[str], None]) -> None:
        """`on_wrong` is told, in the loop's thread, of each KV cell that holds something else than it should."""
        self._step_s = step_s
        self._on_wrong = on_wrong
        self._slab = np.zeros(num_merged * MERGED_BYTES, np.uint8)
        self._host_slab = np.zeros(num_host_merged * MERGED_BYTES, np.uint8)
        self._owners = [NO_OWNER] * num_merged
        self._rows: dict[int, _Row] = {}
        self._suspended: dict[int, StepPlan] = {}
        self._results: deque[StepResult] = deque()
        self._copied: deque[EndedCopy] = deque()
        self._on_copied: Callable[[], None] = lambda: None
        self._interrupted = threading.Event()
        self._running = -1

    # ------------------------------------------------------------------------------------------------- models

    def prepare_model(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def add_model(self, prepared: ModelSpec) -> ModelShape:
        return SHAPES[prepared.name]

    def is_sound(self, name: str) -> bool:
        return True

    def remove_model(self, name: str) -> None:
        self._owners = [NO_OWNER if owner == name else owner for owner in self._owners]

    def close(self) -> None:
        """Nothing is held."""

    # ------------------------------------------------------------------------------------------------- blocks

    def block_rows(self, model: str, on_host: bool) -> torch.Tensor:
        slab = self._host_slab if on_host else self._slab
        return torch.from_numpy(slab.reshape(-1, SHAPES[model].block_size * CELL_BYTES))

    def claim_blocks(self, model: str, blocks: list[int]) -> None:
        for merged in {block // SHAPES[model].blocks_per_merged for block in blocks}:
            if self._owners[merged] != model:
                self._owners[merged] = model
                self._slab[merged * MERGED_BYTES : (merged + 1) * MERGED_BYTES] = 0

    def _blocks(self, model: str, on_host: bool = False) -> np.ndarray:
        """`[num_blocks, block_size, WORDS]` uint64."""
        slab = self._host_slab if on_host else self._slab
        return slab.view(np.uint64).reshape(-1, SHAPES[model].block_size, WORDS)

    # ------------------------------------------------------------------------------------------------- steps

    def launch(self, plan: StepPlan) -> None:
        for step_id in plan.discards:
            self._suspended.pop(step_id, None)
        self._interrupted.clear()
        self._running = plan.step_id
        seconds = self._step_s + max(0, plan.num_tokens - len(plan.rows)) / PREFILL_TOKENS_S
        is_interrupted = self._interrupted.wait(seconds) and plan.is_interruptible
        self._running = -1
        share = 0.5 if is_interrupted and plan.stop_share >= 1.0 else plan.stop_share
        result = self._suspend(plan, share) if share < 1.0 else self._compute(plan)
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def interrupt(self, step_id: int) -> None:
        if step_id == self._running:
            self._interrupted.set()

    def _suspend(self, plan: StepPlan, share: float) -> StepResult:
        """Half of the layers have written."""
        self._change_rows(plan)
        for number, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._write(self._rows[number], start, np.zeros((count, WORDS), np.uint64))
        self._suspended[plan.step_id] = plan
        return StepResult(plan.step_id, [], suspended_share=share)

    def _compute(self, plan: StepPlan) -> StepResult:
        self._suspended.pop(plan.step_id, None)
        self._change_rows(plan)
        for number, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            row = self._rows[number]
            assert row.model == plan.model and len(row.tokens) >= start + count
            self._write(row, start, cells(row.links[start : start + count]))
        sampled = []
        for number, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            row, end = self._rows[number], start + count
            differences = self._differences(row, end)
            if samples:
                row.put(end, next_token(int(row.links[end - 1]) ^ differences))
                sampled.append(row.tokens[end])
        return StepResult(plan.step_id, sampled)

    def _change_rows(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self.claim_blocks(plan.model, new.blocks)
            self._rows[new.row] = _Row(plan.model, unpack_tokens(new.tokens), list(new.blocks))
        for number, blocks in plan.new_blocks:
            self.claim_blocks(plan.model, blocks)
            self._rows[number].blocks.extend(blocks)

    def _gather(self, row: _Row, end: int) -> np.ndarray:
        """Cells of the first `end` positions; `[at least end, WORDS]`."""
        num_blocks = -(-end // SHAPES[row.model].block_size)
        return self._blocks(row.model)[row.blocks[:num_blocks]].reshape(-1, WORDS)

    def _write(self, row: _Row, start: int, new: np.ndarray) -> None:
        page, blocks = SHAPES[row.model].block_size, self._blocks(row.model)
        positions = np.arange(start, start + len(new))
        blocks[np.array(row.blocks)[positions // page], positions % page] = new

    def _differences(self, row: _Row, end: int) -> int:
        """Attention reads all of these: 0 where they are what they should be, else something of what they are."""
        found = self._gather(row, end)[:end] ^ cells(row.links[:end])
        wrong = np.flatnonzero(found.any(axis=1))
        owners = {self._owners[block // SHAPES[row.model].blocks_per_merged] for block in row.blocks}
        if len(wrong) or owners != {row.model}:
            shown = ", ".join(map(str, wrong[:8]))
            self._on_wrong(f"{len(wrong)} of {end} cells ({shown}..) of model {row.model}; owners {owners}")
        return int(np.bitwise_or.reduce(found, axis=None))

    # ------------------------------------------------------------------------------------------------- copies

    def start_copy(self, copy: KvCopy) -> None:
        device, host = self._blocks(copy.model), self._blocks(copy.model, True)
        if copy.kind == CopyKind.MOVE:
            self.claim_blocks(copy.model, copy.target_blocks)
            device[copy.target_blocks] = device[copy.device_blocks]
            for number, index, block in copy.tables:
                self._rows[number].blocks[index] = block
        elif copy.kind == CopyKind.CHECKPOINT:
            host[copy.host_blocks] = device[copy.device_blocks]
        else:
            self.claim_blocks(copy.model, copy.device_blocks)
            device[copy.device_blocks] = host[copy.host_blocks]
        self._copied.append(EndedCopy(copy.copy_id, True))
        self._on_copied()

    def finished_copies(self) -> list[EndedCopy]:
        done = []
        while self._copied:
            done.append(self._copied.popleft())
        return done

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._on_copied = callback
