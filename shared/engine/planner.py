"""The next step of one instance: continuous batching with chunked prefill, online first, offline in what is left.

Who may delay whom, and by how much, is in docs/design/scheduling.md ("Order of authority"). Which model leads a step is
decided first (leaders.py). Of that model decodes come first and prefill chunks after, rank by rank, until the step's limits
(tokens, and predicted time where an objective is to be kept), the rows or the KV pool are used up. Who waits becomes part
of a step in admission.py. Memory: memory/allocator.py.
"""

from __future__ import annotations

import math
from typing import cast

from shared.costs.model import StepShape
from shared.engine.admission import MIN_ONLINE_CHUNK, Admission
from shared.engine.batch import Batch, PlannedStep
from shared.engine.drafting import Drafting
from shared.engine.favours import Favours
from shared.engine.leaders import Candidate, Leaders
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue
from shared.engine.plan import StepPlan
from shared.engine.sequence import PriorityClass, Sequence, State
from shared.policies.ordering import ModelView
from shared.policies.token_budget import Limits, StepBudget, TokenBudgetPolicy

LONG_STEPS = 2.0
"""A step that takes so many times as long as its decodes alone is long for a sequence that comes meanwhile."""


class Planner:
    """The choice of the next step of one instance, from what `memory` has."""

    def __init__(
        self,
        memory: Allocator,
        token_budget: TokenBudgetPolicy,
        drafting: Drafting,
        *,
        serves_offline: bool,
        may_interrupt: bool,
        mix_phases: bool,
        prefetch: bool,
        steps_in_flight: int,
        num_stages: int = 1,
    ) -> None:
        """`steps_in_flight`: at most. `num_stages`: the first stage of a pipeline knows a step's tokens when the last one
        has sampled them, so with several no sequence is in two steps at once, and steps share the sequences that decode
        among them."""
        classes = tuple(PriorityClass) if serves_offline else ONLINE_CLASSES
        favours = Favours(memory, steps_in_flight)
        self.leaders = Leaders(
            memory,
            favours,
            token_budget,
            classes,
            may_interrupt=may_interrupt,
            prefetch=prefetch,
            steps_in_flight=steps_in_flight,
            num_stages=num_stages,
        )
        self.last_limit_s = math.inf
        """What bounded the time of the step planned last."""
        self._admission = Admission(memory, favours)
        self._memory = memory
        self._queues = memory.queues
        self._ordering = memory.ordering
        self._favours = favours
        self._drafting = drafting
        self._classes = classes
        self._may_interrupt = may_interrupt
        self._mix_phases = mix_phases and memory.ordering.mixes_phases
        self._steps_in_flight = steps_in_flight
        self._num_stages = num_stages
        self._holds_offline = False
        """No offline sequence joins the step that is being planned."""

    def plan(
        self,
        step_id: int,
        now: float,
        begins_s: float,
        is_alone: bool,
        holds_offline: bool = False,
        ahead_s: float = 0.0,
    ) -> PlannedStep | None:
        """The next step, or None where nothing can run before a step in flight returns, a copy ends or a request
        arrives. `begins_s`: when it will begin, as far as is known; `is_alone`: no other step is in flight;
        `holds_offline`: no offline sequence joins it; `ahead_s`: predicted time of the longest step in flight."""
        self.leaders.begin(now, begins_s)
        # With steps always in flight, offline sequences would never be free to give their room up.
        self._holds_offline = holds_offline or (
            not is_alone and (self._memory.lacks_demanded() or self._admission.waits_for_offline())
        )
        if not is_alone and self._admission.waits_for_share(now):
            return None
        if not is_alone and self._num_stages == 1 and self._favours.waits_for(ahead_s, now):
            return None
        if not is_alone and self._drafting.is_on and self._drafting.awaits(self._queues.values()):
            return None
        for candidates in self.leaders.groups(begins_s, self._holds_offline):
            while candidates:
                picked, is_choice = candidates[0], len(candidates) > 1
                if is_choice:
                    picked = cast(Candidate, self._ordering.pick_model(cast(list[ModelView], candidates), begins_s))
                    picked = self.leaders.due_stream(picked, candidates, begins_s)
                candidates.remove(picked)
                queue, leading = picked.queue, picked.priority_class
                limits = self.leaders.limits(picked, begins_s)
                if limits.is_interruptible and not is_alone and self._num_stages == 1:
                    # It would keep the results of the step before it waiting; a short one does not.
                    if queue.cost_model is None:
                        continue
                    limits = limits._replace(limit_s=self.leaders.short_step_s(), is_interruptible=False)
                limits = self.leaders.limits_for_expected(queue, limits, begins_s)
                batch = self._fill(queue, leading, limits, now)
                may_go_on = self._mix_phases and (is_alone or not self._admission.waits_for_share(now))
                if not batch.sequences and may_go_on and self._favours.prompts(queue, leading):
                    # Those that were left out for the sake of prompts that turned out to lack room.
                    batch = self._fill_phases(queue, leading, limits, now, True, False)
                if batch.sequences:
                    queue.last_planned_step = step_id
                    if is_choice:
                        self._ordering.on_turn(picked)
                    self.leaders.take_turns(queue, leading, batch, begins_s)
                    self.last_limit_s = min(
                        limits.limit_s, math.inf if batch.sequences[-1].is_online else limits.offline_limit_s
                    )
                    return self._close(
                        step_id, queue, batch, limits.is_interruptible and leading == PriorityClass.OFFLINE, now
                    )
        return None

    def _fill(self, queue: ModelQueue, leading: PriorityClass, limits: Limits, now: float) -> Batch:
        """The batch of a model, rank by rank; empty if nothing of the leading rank can run."""
        if self._mix_phases:
            return self._fill_phases(queue, leading, limits, now, True, True)
        # Prompts first: who has been prefilled shares the steps of those who decode (Orca, vLLM before chunked prefill).
        phases = [(False, True), (True, False)]
        if self.leaders.is_urgent(queue, now):
            phases.reverse()
        batch = self._fill_phases(queue, leading, limits, now, *phases[0])
        return batch if batch.sequences else self._fill_phases(queue, leading, limits, now, *phases[1])

    def _fill_phases(
        self, queue: ModelQueue, leading: PriorityClass, limits: Limits, now: float, decodes: bool, prefills: bool
    ) -> Batch:
        batch = Batch(StepBudget(limits, queue.cost_model))
        for priority_class in self._classes:
            if priority_class > leading and not batch.sequences:
                break
            if priority_class == PriorityClass.OFFLINE:
                if self._holds_offline:
                    break
                batch.budget.begin_offline()
            favoured = self._favours.prompts(queue, priority_class) if prefills else []
            self._favours.make_room(queue, favoured, now)
            # Nobody is left out for the sake of a prompt that cannot be computed, now or when steps in flight have ended.
            favoured = [
                one
                for one in favoured
                if one.row >= 0 or self._admission.finds_room(queue, one, now) or self._admission.gets_share(one, now)
            ]
            chunks = (
                self._add_decodes(queue, priority_class, batch, now, decodes, favoured)
                if queue.running[priority_class]
                else []
            )
            first = {sequence.tenant for sequence in favoured}
            if not prefills or not (chunks or queue.waiting[priority_class] or queue.restored):
                continue
            # Who decoded elsewhere, or before it was preempted, has waited for a token already.
            self._admission.admit_restored(queue, priority_class, batch, now, decodes=True)
            # Prompts of high priority do not make the model's other streams stand still.
            kept = (
                queue.num_decoding(PriorityClass.ONLINE_NORMAL)
                if decodes and priority_class == PriorityClass.ONLINE_HIGH
                else 0
            )
            kept = max(0, min(kept, batch.budget.tokens_left - MIN_ONLINE_CHUNK))
            batch.budget.tokens_left -= kept
            for sequence in chunks:
                self._admission.admit_waiting(queue, priority_class, batch, now, first, before=sequence)
                if sequence.state == State.RUNNING and not (first and batch.has_chunk and sequence.tenant not in first):
                    self._admission.add_prefill(sequence, batch, self._admission.least_chunk(priority_class, batch))
            self._admission.admit(queue, priority_class, batch, now, first)
            batch.budget.tokens_left += kept
        return batch

    def _close(self, step_id: int, queue: ModelQueue, batch: Batch, is_interruptible: bool, now: float) -> PlannedStep:
        sequences = batch.sequences
        # Nothing online waits in a suspended step, and what runs online can be moved within the pool at any time.
        is_interruptible = is_interruptible and not sequences[0].is_online
        if self._drafting.is_on:
            self._drafting.add(queue, batch)
        predicted_s = 0.0 if queue.cost_model is None else queue.cost_model.predict(batch.budget.shape) + batch.draft_s
        if self._steps_in_flight > 1 and 0.0 < predicted_s <= self.leaders.short_step_s():
            # Better replayed as a graph, and with a second step planned behind it, than with safepoints.
            is_interruptible = False
        plan = StepPlan(
            step_id=step_id,
            model=queue.name,
            rows=[sequence.row for sequence in sequences],
            starts=batch.starts,
            counts=batch.counts,
            samples=batch.samples,
            new_sequences=batch.new_sequences,
            new_blocks=batch.new_blocks,
            num_decodes=(batch.num_online_decodes, batch.num_offline_decodes),
            is_interruptible=is_interruptible and self._may_interrupt,
            discards=self._memory.take_discards(),
            drafts=batch.drafts,
            model_drafts=batch.model_drafts,
        )
        step = PlannedStep(plan, sequences, now, predicted_s, queue.cost_scale)
        step.draft_s = batch.draft_s
        if queue.cost_model is not None:
            decodes = batch.budget.shape._replace(prefill_tokens=0, prefill_attention=0.0)
            step.is_long = predicted_s > LONG_STEPS * queue.cost_model.predict(decodes)
        return step

    def resume(self, now: float, stop_share: float) -> PlannedStep:
        """The suspended step, to be gone on with, up to a share of its layers."""
        step = self._memory.take_suspended()
        plan = step.plan
        step.plan = StepPlan(
            step_id=plan.step_id,
            model=plan.model,
            rows=plan.rows,
            starts=plan.starts,
            counts=plan.counts,
            samples=plan.samples,
            new_sequences=[],
            new_blocks=[],
            num_decodes=plan.num_decodes,
            is_interruptible=stop_share < 1.0 or not self._memory.has_online_work(),
            resumes=True,
            stop_share=stop_share,
            discards=self._memory.take_discards(),
            drafts=plan.drafts,
            model_drafts=plan.model_drafts,
        )
        step.planned_s = now
        step.is_interrupted = False
        self._queues[plan.model].offline_turn_s = now
        return step

    def _add_decodes(
        self,
        queue: ModelQueue,
        priority_class: PriorityClass,
        batch: Batch,
        now: float,
        decodes: bool,
        favoured: list[Sequence],
    ) -> list[Sequence]:
        """One token for each decoding sequence of the rank, but those that `favoured` prompts leave out; returns those with
        more than one left to compute. This loop is the planner's hot path."""
        running = list(queue.running[priority_class].values())
        self._memory.sort(running, now)
        if favoured and queue.cost_model is not None:
            missing = sum(sequence.total - sequence.num_computed for sequence in favoured)
            step_s = queue.cost_model.predict(StepShape(missing, missing * missing / 2))
            running = [
                sequence
                for sequence in running
                if not sequence.is_in_decode or not self._favours.may_be_left_out(sequence, favoured, step_s, now)
            ]
        if waiting := queue.handing_over:
            running = [one for one in running if not (one.number in waiting and one.is_in_decode)]
        prefills: list[Sequence] = []
        add_sequence, add_start = batch.sequences.append, batch.starts.append
        budget = batch.budget
        left = budget.tokens_left if decodes else 0
        if self._num_stages > 1:
            left = min(left, -(-len(running) // self._num_stages))
            # Beside steps of other models all may be back when the next of these is filled: who waited longest goes first.
            running = [sequence for sequence in running if not sequence.in_flight]
            running.sort(key=lambda sequence: sequence.last_ran_s)
        is_offline = priority_class == PriorityClass.OFFLINE
        if is_offline:
            # Online decodes are never left out for the sake of time: an objective that online alone breaks is broken.
            left = min(left, budget.fits_decodes([s.num_computed for s in running if s.total - s.num_computed == 1]))
        planned = context = 0
        for sequence in running:
            start, total = sequence.num_computed, sequence.total
            if total >= sequence.max_total:
                continue
            if total - start != 1:
                prefills.append(sequence)
                continue
            if planned == left:
                continue
            if start >= sequence.capacity and not self._grow(sequence, batch, now):
                continue
            sequence.num_computed = total
            sequence.total = total + 1
            sequence.in_flight += 1
            add_sequence(sequence)
            add_start(start)
            planned += 1
            context += start
        budget.take_decodes(planned, context)
        if is_offline:
            batch.num_offline_decodes += planned
        else:
            batch.num_online_decodes += planned
        batch.counts.extend([1] * planned)
        batch.samples.extend([True] * planned)
        return prefills

    def _grow(self, sequence: Sequence, batch: Batch, now: float) -> bool:
        """One more block for a decoding sequence, at the cost of later or lower ones if need be."""
        if sequence.state != State.RUNNING:
            return False
        blocks = self._memory.pool.allocate(sequence.model, 1)
        if blocks is None and self._memory.make_room(sequence, 1, now):
            blocks = self._memory.pool.allocate(sequence.model, 1)
        if blocks is None:
            # It keeps what it has and waits; a sequence before it in the order may take that as a victim's.
            return False
        sequence.blocks.extend(blocks)
        sequence.capacity += sequence.block_size
        batch.new_blocks.append((sequence.row, blocks))
        return True
