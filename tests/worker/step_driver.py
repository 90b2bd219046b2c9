"""Drives an executor by hand-made step plans: a stand-in for the engine that can be told exactly what to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.worker.executor.executor import Executor
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.messages.requests import SamplingParams, TokenLogprob, pack_tokens


@dataclass
class Row:
    """A sequence and what the executor knows of it."""

    row: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    announced: bool = False
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: bytes = b""
    adapter: str = ""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """The sequences of one model, with blocks handed out in shuffled order from merged blocks it owns."""

    def __init__(self, executor: Executor, shape: ModelShape, merged: Sequence[int], seed: int = 0) -> None:
        self.executor, self.shape = executor, shape
        per = shape.blocks_per_merged
        self.free = [m * per + place for m in merged for place in range(per)]
        random.Random(seed).shuffle(self.free)
        self.step_id = 0

    def add(self, row: int, prompt: list[int], adapter: str = "", **sampling: Any) -> Row:
        """`adapter`: its version; `sampling`: fields of SamplingParams; greedy without any."""
        params = SamplingParams(**{"max_tokens": 1 << 20, "temperature": 0.0} | sampling)
        return Row(row, list(prompt), len(prompt), params, adapter=adapter)

    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Computes the next `count` tokens of each sequence; samples those that reach their end."""
        self.step_id += 1
        new: list[NewSequence] = []
        appended: list[tuple[int, list[int]]] = []
        for sequence, count in work:
            needed = -(-(sequence.computed + count) // self.shape.block_size) - len(sequence.blocks)
            blocks = [self.free.pop() for _ in range(needed)]
            sequence.blocks += blocks
            if not sequence.announced:
                sequence.announced = True
                packed = pack_tokens(sequence.tokens)
                blocks = list(sequence.blocks)
                new.append(
                    NewSequence(sequence.row, packed, sequence.num_prompt, sequence.sampling, blocks, sequence.adapter)
                )
            elif blocks:
                appended.append((sequence.row, blocks))
        samples = [s.computed + count == len(s.tokens) for s, count in work]
        plan = StepPlan(
            step_id=self.step_id,
            model=self.shape.name,
            rows=[s.row for s, _ in work],
            starts=[s.computed for s, _ in work],
            counts=[count for _, count in work],
            samples=samples,
            new_sequences=new,
            new_blocks=appended,
        )
        result = self.executor.execute(plan)
        assert result.error == "" and result.step_id == self.step_id
        assert len(result.tokens) == sum(samples)
        for index, packed in result.prompt_logprobs:
            work[index][0].prompt_logprobs += packed
        sampled = [sequence for (sequence, _), sample in zip(work, samples, strict=True) if sample]
        for sequence, count in work:
            sequence.computed += count
        for i, (sequence, token) in enumerate(zip(sampled, result.tokens, strict=True)):
            sequence.tokens.append(token)
            sequence.logprobs.append(result.logprobs[i] if result.logprobs else None)

    def decode(self, sequences: Sequence[Row], steps: int) -> None:
        for _ in range(steps):
            self.step([(s, 1) for s in sequences])

    def preempt(self, sequence: Row) -> None:
        """Gives up its blocks and row; it will be announced again with prompt and output."""
        self.free[:0] = sequence.blocks
        sequence.blocks, sequence.computed, sequence.announced = [], 0, False
