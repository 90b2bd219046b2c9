"""A step: while it is being filled, and while it runs."""

from __future__ import annotations

from shared.engine.plan import ModelDraft, NewSequence, StepPlan
from shared.engine.sequence import Sequence
from shared.policies.roles import MOST_CHUNK
from shared.policies.token_budget import StepBudget


class Batch:
    """The columns of a step while it is being filled."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.new_sequences: list[NewSequence] = []
        self.new_blocks: list[tuple[int, list[int]]] = []
        self.num_online_decodes = 0
        self.num_offline_decodes = 0
        self.has_chunk = False
        """Whether it holds part of a prompt."""
        self.handover_left = MOST_CHUNK
        """Tokens that it may still hold of prompts that are handed over, which are computed one after the other: side by
        side, all of them would end late."""
        self.drafts: list[tuple[int, list[int]]] = []
        self.model_drafts: list[ModelDraft] = []
        self.draft_s = 0.0
        """Predicted time of the draft model."""

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """The next `count` uncomputed tokens of a sequence."""
        self.has_chunk = True
        self.budget.take_prefill(count, sequence.num_computed)
        self.sequences.append(sequence)
        self.starts.append(sequence.num_computed)
        self.counts.append(count)
        sequence.num_computed += count
        sequence.in_flight += 1
        samples = sequence.num_computed == sequence.total
        self.samples.append(samples)
        if samples:
            sequence.total += 1


class PlannedStep:
    """A step in flight or suspended: the plan and the sequences behind its columns."""

    __slots__ = (
        "charged",
        "done_share",
        "draft_s",
        "generations",
        "interrupted_s",
        "is_interrupted",
        "is_long",
        "is_part",
        "lost_s",
        "plan",
        "planned_s",
        "predicted_s",
        "ran_s",
        "scale",
        "sequences",
        "suspended_s",
    )

    def __init__(self, plan: StepPlan, sequences: list[Sequence], now: float, predicted_s: float, scale: float) -> None:
        self.plan = plan
        self.sequences = sequences
        self.generations = [sequence.generation for sequence in sequences]
        self.charged: set[int] = set()
        """The columns whose service was charged before its end."""
        self.planned_s = now
        """Time at which it was planned, or its resumption."""
        self.predicted_s = predicted_s
        """Predicted seconds of the whole step; 0: unknown."""
        self.draft_s = 0.0
        """What of it the draft model takes."""
        self.is_long = False
        """It takes several times as long as its decodes alone would."""
        self.scale = scale
        """The live correction in the prediction."""
        self.is_interrupted = False
        """It was asked to suspend itself at the next safepoint."""
        self.is_part = False
        """Only some layers of the suspended step are being run, or were run last, between online steps."""
        self.lost_s = 0.0
        """Spare time beside online steps that was not used while it was suspended."""
        self.ran_s = 0.0
        """Execution time before the suspension."""
        self.done_share = 0.0
        """Share of its layers that were done when it was suspended."""
        self.suspended_s = 0.0
        """Time at which it was suspended."""
        self.interrupted_s = 0.0
        """Time at which it was suspended for the sake of an online request, which parts of it stop for by themselves."""

    def roll_back(self) -> None:
        """Takes back what was counted as computed when it was planned; as no later step was planned upon it, the counts are
        exact, and rows and blocks are as they were before (their content at these positions is computed again)."""
        for sequence, generation, start, samples in zip(
            self.sequences, self.generations, self.plan.starts, self.plan.samples, strict=True
        ):
            sequence.in_flight -= 1
            if sequence.generation == generation:
                sequence.num_computed = start
                sequence.total -= samples
