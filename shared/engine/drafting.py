"""Tokens that a step guesses behind those that it computes anyway, and what becomes of them: by looking them up
(shared/policies/prompt_lookup.py), or by a draft model (shared/policies/speculation.py) for sequences of which nothing is
found.

Drafts need all tokens of a sequence to be known, so only those that no other step in flight computes have any, and a step
with drafts is not followed by another before it has returned: until then nobody knows where its sequences stand. Where
steps are planned ahead, one that would have drafts worth waiting for is planned when the step before it has returned.

While the step runs, a sequence counts as if it had none: rejected drafts have been written to slots after its computed
tokens, which are computed again later.

A draft model has KV of its own, in blocks of the model's that belong to the sequence while the pool has plenty
(`Allocator.make_draft_room`). It follows a sequence only where it drafts: what it lacks it computes when it is to, in parts
where that is much. A sequence that is preempted or moves loses this KV.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from shared.costs.model import CostModel, StepShape, shape_of
from shared.engine.batch import Batch, PlannedStep
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.plan import NO_TOKEN, ModelDraft, StepResult
from shared.engine.sequence import Sequence, State
from shared.policies.prompt_lookup import Guess, LookupSettings, PromptLookup, draft_lengths, may_pay
from shared.policies.speculation import (
    EXPECTED_OUTPUT_TOKENS,
    TRIAL_ACCEPTANCE_RATE,
    DraftCandidate,
    GateState,
    Speculator,
    StepRoom,
    choose_drafts,
)

WAIT_GAIN = 0.25
"""Expected tokens of drafts over those of the step without them, from which on a step is not planned ahead."""


MAX_CATCH_UP_TOKENS = 2
"""Beside which a step's time says what drafts cost: after one of which all drafts were kept, two are missing."""


class Drafting:
    def __init__(self, settings: LookupSettings, max_drafts: int, memory: Allocator) -> None:
        """`max_drafts`: of the draft model, for a sequence in a step; 0: it drafts none."""
        self._settings = settings
        self._max_drafts = max_drafts
        self._memory = memory
        self._pool = memory.pool
        self.speculators: dict[str, Speculator] = {}
        """Speculators of the models that have a draft model."""

    def add_model(self, queue: ModelQueue) -> None:
        if queue.shape.draft is not None and self._max_drafts:
            self.speculators[queue.name] = Speculator()

    def remove_model(self, name: str) -> None:
        self.speculators.pop(name, None)

    @property
    def is_on(self) -> bool:
        return self._settings.num_tokens > 0 or bool(self.speculators)

    def add(self, queue: ModelQueue, batch: Batch) -> None:
        """Adds drafts to a step that is full otherwise, within what is left of its limits."""
        if batch.budget.tokens_left < 1:
            return
        state = self._turn(queue, batch)
        if state is GateState.WAITS and not self._settings.num_tokens:
            return
        known = [
            (index, sequence)
            for index, (sequence, count) in enumerate(zip(batch.sequences, batch.counts, strict=True))
            if count == 1 and sequence.total == len(sequence.tokens) + 1
        ]
        if self._settings.num_tokens:
            batch.drafts = self._looked_up(queue, batch, known)
        if state is not GateState.WAITS:
            guessed = {index for index, _ in batch.drafts}
            others = [entry for entry in known if entry[0] not in guessed]
            self._add_model_drafts(queue, batch, others, is_trial=state is GateState.TRIES)

    def _looked_up(
        self, queue: ModelQueue, batch: Batch, known: list[tuple[int, Sequence]]
    ) -> list[tuple[int, list[int]]]:
        num_sampled, budget = sum(batch.samples), batch.budget
        if not may_pay(queue.cost_model, budget.shape, num_sampled):
            return []
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
            speculator = self.speculators.get(queue.name)
            running = [sequence for of_class in queue.running for sequence in of_class.values()]
            in_flight = list(
                enumerate(sequence for sequence in running if sequence.in_flight and sequence.is_in_decode)
            )
            shape = StepShape(0, 0.0, len(in_flight), sum(sequence.num_computed for _, sequence in in_flight))
            if in_flight and speculator is not None and speculator.is_worth_waiting(len(in_flight), WAIT_GAIN):
                return True
            if not self._settings.num_tokens or not in_flight or not may_pay(queue.cost_model, shape, len(in_flight)):
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

    # ------------------------------------------------------------------------------------------- draft model

    def _turn(self, queue: ModelQueue, batch: Batch) -> GateState:
        """Whether the draft model drafts for the step."""
        if (speculator := self.speculators.get(queue.name)) is None:
            return GateState.WAITS
        num_sampled = sum(batch.samples)
        state = speculator.gate(num_sampled).take_turn()
        # A trial says something where all that is computed are decodes.
        return GateState.WAITS if state is GateState.TRIES and num_sampled < len(batch.samples) else state

    def _add_model_drafts(
        self, queue: ModelQueue, batch: Batch, known: list[tuple[int, Sequence]], *, is_trial: bool
    ) -> None:
        speculator, budget = self.speculators[queue.name], batch.budget
        num_sampled = sum(batch.samples)
        entries = [entry for entry in known if self._most_drafts(queue, entry[1]) > 0]
        if not entries:
            return
        candidates = [
            DraftCandidate(
                context_tokens=(start := batch.starts[index]),
                num_missing=start + 1 - sequence.num_drafted,
                acceptance_rate=self._rate(speculator, sequence, is_trial=is_trial),
                most=self._most_drafts(queue, sequence),
                remaining=min(sequence.max_total - sequence.total, sequence.num_output + EXPECTED_OUTPUT_TOKENS),
            )
            for index, sequence in entries
        ]
        room = StepRoom(budget.shape, num_sampled, budget.tokens_left, budget.left_s)
        saving = speculator.saving(num_sampled)
        choice = choose_drafts(
            queue.cost_model, speculator.costs, room, candidates, saving, is_trial=is_trial
        )  # fmt: skip
        if not any(choice.computes):
            speculator.gate(num_sampled).on_nothing()
        num_added = 0
        for (index, sequence), one, count, length in zip(
            entries, candidates, choice.computes, choice.lengths, strict=True
        ):
            if not count or not self._memory.make_draft_room(sequence, sequence.num_drafted + count + length):
                continue
            length = self._make_room(sequence, length, batch) if length else 0
            batch.model_drafts.append(
                ModelDraft(index, sequence.num_drafted, count, length, list(sequence.draft_blocks))
            )
            if length:
                batch.drafts.append((index, [NO_TOKEN] * length))
                first = one.context_tokens + 1
                budget.take_decodes(length, sum(range(first, first + length)))
                num_added += length
        if batch.model_drafts:
            batch.draft_s = choice.predicted_s
        speculator.note_expected(num_sampled, choice.expected if num_added else 0.0)

    def _most_drafts(self, queue: ModelQueue, sequence: Sequence) -> int:
        assert queue.shape.draft is not None
        most = min(self._max_drafts, sequence.max_total - sequence.total)
        if sequence.request.prompt_lookup >= 0:
            most = min(most, sequence.request.prompt_lookup)
        return min(most, queue.shape.draft.max_model_len - sequence.total)

    @staticmethod
    def _rate(speculator: Speculator, sequence: Sequence, *, is_trial: bool) -> float:
        rate = speculator.acceptance_rate if sequence.draft_rate < 0 else sequence.draft_rate
        return max(rate, TRIAL_ACCEPTANCE_RATE) if is_trial else rate

    def observe(self, queue: ModelQueue, step: PlannedStep, result: StepResult, kept: list[int]) -> None:
        """What a step says of the draft model and of its drafts. `kept`: how many of each of the plan's drafts."""
        speculator = self.speculators.get(queue.name)
        if speculator is None:
            return
        plan, num = step.plan, len(step.plan.rows)
        if not plan.model_drafts:
            if not plan.drafts and sum(plan.num_decodes) == num and not step.suspended_s:
                speculator.gate(num).on_plain(step.ran_s, step.predicted_s or step.ran_s)
            return
        kept_of = {index: num for (index, _), num in zip(plan.drafts, kept, strict=True)}
        for one in plan.model_drafts:
            sequence = step.sequences[one.column]
            if sequence.generation != step.generations[one.column] or sequence.state is State.ENDED:
                continue
            end = one.start + one.count
            # Its last draft it has not computed itself.
            sequence.num_drafted = min(end + max(0, one.num_drafts - 1), end + kept_of.get(one.column, 0))
            if one.num_drafts:
                rate = speculator.acceptance_rate if sequence.draft_rate < 0 else sequence.draft_rate
                sequence.draft_rate = speculator.observe(one.num_drafts, kept_of[one.column], rate)
        self._observe_passes(speculator, step, result)
        shape = shape_of(plan.starts, plan.counts)
        if shape.prefill_tokens or step.suspended_s or len(plan.samples) != sum(plan.samples):
            return
        predicted_s = step.ran_s if queue.cost_model is None else queue.cost_model.predict(shape)
        is_usual = all(one.count <= MAX_CATCH_UP_TOKENS for one in plan.model_drafts)
        speculator.gate(num).on_drafted(step.ran_s, predicted_s, 1 + sum(kept) / num, is_usual=is_usual)

    @staticmethod
    def _observe_passes(speculator: Speculator, step: PlannedStep, result: StepResult) -> None:
        """The first pass, and the last of the others: one says as much as the next."""
        drafts, passes_s = step.plan.model_drafts, result.draft_passes_s
        if not passes_s:
            return
        speculator.costs.observe(shape_of([one.start for one in drafts], [one.count for one in drafts]), passes_s[0])
        if len(passes_s) > 1:
            last = len(passes_s) - 1
            starts = [one.start + one.count + last - 1 for one in drafts if one.num_drafts > last]
            speculator.costs.observe(shape_of(starts, [1] * len(starts)), passes_s[last])
