"""Tokens that a step guesses behind those that it computes anyway (shared/policies/prompt_lookup.py), and what becomes of
them.

Drafts need all tokens of a sequence to be known, so only those that no other step in flight computes have any, and a step
with drafts is not followed by another before it has returned: until then nobody knows where its sequences stand. Where
steps are planned ahead, one that would have drafts worth waiting for is planned when the step before it has returned.

While the step runs, a sequence counts as if it had none: rejected drafts have been written to slots after its computed
tokens, which are computed again later.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from shared.costs.model import CostModel, StepShape
from shared.engine.batch import Batch
from shared.engine.memory.blocks import BlockPool
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import Sequence
from shared.policies.prompt_lookup import Guess, LookupSettings, PromptLookup, draft_lengths, may_pay

WAIT_GAIN = 0.25
"""Expected tokens of drafts over those of the step without them, from which on a step is not planned ahead."""


class Drafting:
    def __init__(self, settings: LookupSettings, pool: BlockPool) -> None:
        self._settings = settings
        self._pool = pool

    @property
    def is_on(self) -> bool:
        return self._settings.num_tokens > 0

    def add(self, queue: ModelQueue, batch: Batch) -> list[tuple[int, list[int]]]:
        """The drafts of a step that is full otherwise, within what is left of its limits."""
        num_sampled, budget = sum(batch.samples), batch.budget
        if budget.tokens_left < 1 or not may_pay(queue.cost_model, budget.shape, num_sampled):
            return []
        known = [
            (index, sequence)
            for index, (sequence, count) in enumerate(zip(batch.sequences, batch.counts, strict=True))
            if count == 1 and sequence.total == len(sequence.tokens) + 1
        ]
        found, lengths, _ = self._choose(
            queue.cost_model, budget.shape, num_sampled, known, budget.tokens_left, budget.left_s
        )
        drafts = []
        for (index, sequence), length in zip(found, lengths, strict=True):
            if length:
                length = self._make_room(sequence, length, batch)
            if length:
                assert sequence.lookup is not None
                drafts.append((index, sequence.lookup.draft(sequence.tokens, length)))
                first = batch.starts[index] + 1
                budget.take_decodes(length, sum(range(first, first + length)))
        return drafts

    def awaits(self, queues: Iterable[ModelQueue]) -> bool:
        """Whether the step after those in flight would have drafts worth waiting for them."""
        for queue in queues:
            running = [sequence for of_class in queue.running for sequence in of_class.values()]
            in_flight = list(
                enumerate(sequence for sequence in running if sequence.in_flight and sequence.is_in_decode)
            )
            shape = StepShape(0, 0.0, len(in_flight), sum(sequence.num_computed for _, sequence in in_flight))
            if not in_flight or not may_pay(queue.cost_model, shape, len(in_flight)):
                continue
            _, _, expected = self._choose(queue.cost_model, shape, len(in_flight), in_flight, sys.maxsize, math.inf)
            if expected > WAIT_GAIN * len(in_flight):
                return True
        return False

    def _choose(
        self,
        cost_model: CostModel | None,
        shape: StepShape,
        num_sampled: int,
        sequences: list[tuple[int, Sequence]],
        tokens_left: int,
        left_s: float,
    ) -> tuple[list[tuple[int, Sequence]], list[int], float]:
        """Those of which something can be guessed, how many tokens, and how many of all are expected to be kept."""
        found, guesses = [], []
        for entry in sequences:
            sequence = entry[1]
            # The token after the last draft is sampled too.
            most = min(self._settings.num_tokens, sequence.max_total - sequence.total)
            if sequence.request.sampling.grammar:
                # What a grammar allows after a draft is known when the draft is: later than the step begins.
                continue
            if sequence.request.prompt_lookup >= 0:
                most = min(most, sequence.request.prompt_lookup)
            if most < 1:
                continue
            if sequence.lookup is None:
                sequence.lookup = PromptLookup(self._settings)
            if sequence.lookup.follow(sequence.tokens):
                found.append(entry)
                guesses.append(Guess(sequence.num_computed, sequence.lookup.hit_rate, most))
        lengths, expected = draft_lengths(cost_model, shape, num_sampled, guesses, tokens_left, left_s)
        return found, lengths, expected

    def _make_room(self, sequence: Sequence, length: int, batch: Batch) -> int:
        """Blocks that it would need soon anyway, if nobody gives one up for them. How many drafts have a slot."""
        missing = sequence.num_computed + length - sequence.capacity
        if missing > 0:
            blocks = self._pool.allocate(sequence.model, -(-missing // sequence.block_size))
            if blocks is None:
                return length - missing
            sequence.blocks.extend(blocks)
            sequence.capacity += len(blocks) * sequence.block_size
            batch.new_blocks.append((sequence.row, blocks))
        return length
