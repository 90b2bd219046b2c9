"""The next step of one instance: continuous batching with chunked prefill, online first, offline in what is left.

Order of authority: online before offline and high before normal, always; then the ordering policy picks the model and
the order within a class; then, of that model, decodes first and prefill chunks after, until the step's limits (tokens, and
predicted time where an objective is to be kept), the rows or the KV pool are used up. Memory: memory/allocator.py.
"""

from __future__ import annotations

import math
import sys
from typing import cast

from shared.cost_model import StepShape
from shared.engine.batch import Batch, PlannedStep
from shared.engine.candidate import Candidate
from shared.engine.drafting import Drafting
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue, Objectives
from shared.engine.plan import NewSequence, StepPlan
from shared.engine.sequence import PriorityClass, Sequence, State
from shared.messages.timeline import EventKind
from shared.policies.ordering import ModelView
from shared.policies.silence import URGENT_S, is_overfull, room_s
from shared.policies.token_budget import Limits, StepBudget, StepView, TokenBudgetPolicy

MIN_ONLINE_CHUNK = 16
"""Tokens."""

SHORT_STEP_SHARE = 0.02
"""Of the TTFT objective: a step that is shorter is not worth being interruptible where steps are planned ahead."""


EXPECTED_STEPS = 1.5
"""While a running sequence is about to come from another instance, and with its first step, a step takes so many times as
long as its decodes alone: prompts go on slowly."""
EXPECTED_S = 0.5
"""After it may be here, it is waited for like this for so long."""
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
        plans_ahead: bool,
        num_stages: int = 1,
    ) -> None:
        """`num_stages`: the first stage of a pipeline knows a step's tokens when the last one has sampled them, so with
        several no sequence is in two steps at once, and steps share the sequences that decode among them."""
        self._memory = memory
        self._queues = memory.queues
        self._ordering = memory.ordering
        self.last_limits = Limits(1)
        """Of the step planned last."""
        self.last_limit_s = math.inf
        """What bounded that step's time."""
        self._token_budget = token_budget
        self._drafting = drafting
        self._classes = tuple(PriorityClass) if serves_offline else ONLINE_CLASSES
        self._may_interrupt = may_interrupt
        self._mix_phases = mix_phases and memory.ordering.mixes_phases
        self._prefetch = prefetch
        self._plans_ahead = plans_ahead
        self._num_stages = num_stages
        self._holds_offline = False
        """No offline sequence joins the step that is being planned."""

    def online_need(self, now: float) -> tuple[float, float]:
        """The predicted time of the next steps of all runnable online sequences, and how soon the first of all that are
        online is due a token."""
        step_s = sum(
            queue.cost_model.predict(queue.online_shape(self.last_limits.max_tokens))
            for queue in self._queues.values()
            if queue.cost_model is not None and queue.has_online_work()
        )
        objectives = self._objectives(now)
        return step_s, min(objectives.slack_s, objectives.ttft_left_s)

    def spare_s(self, now: float) -> float:
        """What the objectives leave beside an online step."""
        objectives = self._objectives(now)
        limit_s = self._token_budget.offline_limit_s(objectives.slack_s, objectives.ttft_left_s)
        return max(0.0, limit_s - self.online_need(now)[0])

    def _objectives(self, now: float) -> Objectives:
        """Over all models."""
        found = [queue.objectives(now) for queue in self._queues.values()]
        return found[0] if len(found) == 1 else Objectives(*map(min, zip(*found, strict=True)))

    # -------------------------------------------------------------------------------------------------- plan

    def plan(
        self, step_id: int, now: float, begins_s: float, is_alone: bool, holds_offline: bool = False
    ) -> PlannedStep | None:
        """The next step, or None where nothing can run before a step in flight returns, a copy ends or a request
        arrives. `begins_s`: when it will begin, as far as is known; `is_alone`: no other step is in flight;
        `holds_offline`: no offline sequence joins it."""
        # With steps always in flight, offline sequences would never be free to give their room up.
        self._holds_offline = holds_offline or (
            not is_alone and (self._memory.lacks_demanded() or self._waits_for_offline())
        )
        if not is_alone and self._waits_for_share(now):
            return None
        if not is_alone and self._drafting.is_on and self._drafting.awaits(self._queues.values()):
            return None
        for priority_class in self._classes:
            if priority_class == PriorityClass.OFFLINE and self._holds_offline:
                break
            candidates = self._candidates(priority_class, begins_s)
            while candidates:
                picked, is_choice = candidates[0], len(candidates) > 1
                if is_choice:
                    picked = cast(Candidate, self._ordering.pick_model(cast(list[ModelView], candidates), begins_s))
                candidates.remove(picked)
                queue = picked.queue
                limits = self._limits(queue, priority_class, begins_s)
                if limits.is_interruptible and not is_alone and self._num_stages == 1:
                    # It would keep the results of the step before it waiting; a short one does not.
                    if queue.cost_model is None:
                        continue
                    limits = limits._replace(limit_s=self._short_step_s(), is_interruptible=False)
                limits = self._limits_for_expected(queue, limits, begins_s)
                batch = self._fill(queue, picked.priority_class, limits, now)
                if batch.sequences:
                    queue.last_planned_step = step_id
                    if is_choice:
                        self._ordering.on_turn(picked)
                    self.last_limit_s = min(
                        limits.limit_s, math.inf if batch.sequences[-1].is_online else limits.offline_limit_s
                    )
                    return self._close(
                        step_id, queue, batch, limits.is_interruptible and priority_class == PriorityClass.OFFLINE, now
                    )
        return None

    def _candidates(self, priority_class: PriorityClass, begins_s: float) -> list[Candidate]:
        """The models that could lead the step: those with work of the rank, and beside high priority those whose normal
        streams have stood still for as long as they may."""
        found = [
            Candidate(self._memory, queue, priority_class)
            for queue in self._queues.values()
            if queue.has_work(priority_class) and (self._prefetch or not queue.restoring)
        ]
        if found and priority_class == PriorityClass.ONLINE_HIGH:
            others = [queue for queue in self._queues.values() if all(queue is not one.queue for one in found)]
            found += [
                Candidate(self._memory, queue, PriorityClass.ONLINE_NORMAL)
                for queue in others
                if self._is_urgent(queue, begins_s)
            ]
        return found

    def _is_urgent(self, queue: ModelQueue, begins_s: float) -> bool:
        """Whether streams of the model have stood still for so long that they go first."""
        return self._ordering.bounds_silence and room_s([queue.streams(begins_s)]) < URGENT_S

    def _silence_limit_s(self, queue: ModelQueue, begins_s: float) -> float:
        """How long a step of the model may take without making a stream, of whatever model, stand still for longer than it
        may. Prompts make headway beside the model's own streams even where it is too late."""
        if not self._ordering.bounds_silence:
            return math.inf
        streams = {name: other.streams(begins_s) for name, other in self._queues.items()}
        least_s = streams[queue.name][1]
        serving_s = [each_s for _, each_s in streams.values()]
        if is_overfull(serving_s):
            # Prompts of a model without streams have steps as long as theirs.
            least_s = least_s or max(serving_s)
        return max(room_s(streams.values()), least_s)

    def _limits(self, queue: ModelQueue, leading: PriorityClass, begins_s: float) -> Limits:
        view = StepView(
            model=queue.name,
            now=begins_s,
            cost_model=queue.cost_model,
            is_online=leading != PriorityClass.OFFLINE,
            num_other_online=0,
            max_known_tokens=queue.max_known_tokens,
        )
        if view.is_online and queue.only_decodes:
            # Nothing can join them, and they are never left out for the sake of time.
            self.last_limits = self._token_budget.limits(view)
            return self.last_limits
        if not view.is_online:
            # Online sequences of the model cannot run now, or this step would be led by them.
            num_online = sum(other.has_online_work() or other.restores_online() for other in self._queues.values())
            view = view._replace(num_other_online=num_online)
        else:
            num_others = sum(other.has_online_work() for other in self._queues.values() if other is not queue)
            own = queue.objectives(begins_s)
            tpot_s, slack_s, ttft_left_s = own if len(self._queues) == 1 else self._objectives(begins_s)
            has_both = max(tpot_s, own.ttft_left_s) < math.inf
            view = view._replace(
                num_other_online=num_others,
                tpot_objective_s=tpot_s,
                slack_s=slack_s,
                ttft_left_s=ttft_left_s,
                own_ttft_left_s=own.ttft_left_s,
                online=queue.online_shape(sys.maxsize) if has_both else StepShape(),
            )
        limits = self._token_budget.limits(view)
        self.last_limits = limits._replace(limit_s=min(limits.limit_s, self._silence_limit_s(queue, begins_s)))
        return self.last_limits

    def _limits_for_expected(self, queue: ModelQueue, limits: Limits, begins_s: float) -> Limits:
        """The step ends when a sequence that comes may be here, or is a short one. One that may be interrupted is, then."""
        if queue.cost_model is None or limits.is_interruptible:
            return limits
        due_s = min((at for at in self._memory.expected.values() if begins_s < at + EXPECTED_S), default=math.inf)
        if any(other.has_restored_decodes() for other in self._queues.values()):
            due_s = begins_s
        if due_s == math.inf:
            return limits
        short_s = EXPECTED_STEPS * queue.cost_model.predict(queue.online_shape(0))
        return limits._replace(limit_s=min(limits.limit_s, max(short_s, due_s - begins_s)))

    def _fill(self, queue: ModelQueue, leading: PriorityClass, limits: Limits, now: float) -> Batch:
        """The batch of a model, rank by rank; empty if nothing of the leading rank can run."""
        if self._mix_phases:
            return self._fill_phases(queue, leading, limits, now, True, True)
        # Prompts first: who has been prefilled shares the steps of those who decode (Orca, vLLM before chunked prefill).
        phases = [(False, True), (True, False)]
        if self._is_urgent(queue, now):
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
            chunks = (
                self._add_decodes(queue, priority_class, batch, now, decodes) if queue.running[priority_class] else []
            )
            if not prefills or not (chunks or queue.waiting[priority_class] or queue.restored):
                continue
            # Who decoded elsewhere, or before it was preempted, has waited for a token already.
            self._admit_restored(queue, priority_class, batch, now, decodes=True)
            # Prompts of high priority do not make the model's other streams stand still.
            kept = (
                queue.num_decoding(PriorityClass.ONLINE_NORMAL)
                if decodes and priority_class == PriorityClass.ONLINE_HIGH
                else 0
            )
            kept = max(0, min(kept, batch.budget.tokens_left - MIN_ONLINE_CHUNK))
            batch.budget.tokens_left -= kept
            for sequence in chunks:
                if sequence.state == State.RUNNING:
                    self._add_prefill(sequence, batch, self._least_chunk(priority_class, batch))
            self._admit(queue, priority_class, batch, now)
            batch.budget.tokens_left += kept
        return batch

    def _close(self, step_id: int, queue: ModelQueue, batch: Batch, is_interruptible: bool, now: float) -> PlannedStep:
        sequences = batch.sequences
        # Nothing online waits in a suspended step, and what runs online can be moved within the pool at any time.
        is_interruptible = is_interruptible and not sequences[0].is_online
        drafts = self._drafting.add(queue, batch) if self._drafting.is_on else []
        predicted_s = 0.0 if queue.cost_model is None else queue.cost_model.predict(batch.budget.shape)
        if self._plans_ahead and 0.0 < predicted_s <= self._short_step_s():
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
            drafts=drafts,
        )
        step = PlannedStep(plan, sequences, now, predicted_s, queue.cost_scale)
        if queue.cost_model is not None:
            decodes = batch.budget.shape._replace(prefill_tokens=0, prefill_attention=0.0)
            step.is_long = predicted_s > LONG_STEPS * queue.cost_model.predict(decodes)
        return step

    def _short_step_s(self) -> float:
        """For which any online request can wait, though two such steps may be before it."""
        return SHORT_STEP_SHARE * min(queue.ttft_objective_s for queue in self._queues.values())

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
        )
        step.planned_s = now
        step.is_interrupted = False
        return step

    # ------------------------------------------------------------------------------------------------ filling

    def _add_decodes(
        self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float, decodes: bool
    ) -> list[Sequence]:
        """One token for each decoding sequence of the rank; returns those with more than one left to compute. This loop is
        the planner's hot path."""
        running = list(queue.running[priority_class].values())
        if not self._ordering.is_static:
            self._ordering.sort(running, now)
        prefills: list[Sequence] = []
        add_sequence, add_start = batch.sequences.append, batch.starts.append
        budget = batch.budget
        left = budget.tokens_left if decodes else 0
        if self._num_stages > 1:
            left = min(left, -(-len(running) // self._num_stages))
            running = [sequence for sequence in running if not sequence.in_flight]
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

    @staticmethod
    def _least_chunk(priority_class: PriorityClass, batch: Batch) -> int:
        """Online prompts go on even where the decodes alone break their objective: one chunk a step."""
        return MIN_ONLINE_CHUNK if priority_class != PriorityClass.OFFLINE and not batch.has_chunk else 0

    @staticmethod
    def _add_prefill(sequence: Sequence, batch: Batch, at_least: int) -> None:
        wanted = sequence.total - sequence.num_computed
        fitting = batch.budget.fits_prefill(wanted, sequence.num_computed)
        count = min(wanted, batch.budget.tokens_left, max(fitting, at_least))
        if count > 0:
            batch.add_chunk(sequence, count)

    def _admit(self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float) -> None:
        """Waiting sequences of the rank, in order, until one does not fit: nobody overtakes a head that lacks
        room, of whatever model."""
        self._admit_restored(queue, priority_class, batch, now, decodes=False)
        waiting = queue.waiting[priority_class]
        if waiting and not self._ordering.is_static:
            self._ordering.sort(waiting, now)
        while waiting and self._has_budget(priority_class, batch):
            sequence = waiting[0]
            if self._is_behind_stuck(sequence, now):
                return
            num_kept = (
                self._memory.demand.num_rows
                if self._memory.demand is not None and priority_class == PriorityClass.OFFLINE
                else 0
            )
            has_row = self._memory.num_free_rows > num_kept or self._memory.make_row(sequence, now)
            if not has_row or not self._memory.allocate_prompt(queue, sequence, now):
                self._memory.stuck = sequence
                return
            waiting.remove(sequence)
            sequence.row = self._memory.take_row()
            if sequence.state == State.RESTORING:
                queue.restoring[sequence.number] = sequence
            else:
                self._run(queue, sequence, batch, now)

    def _admit_restored(
        self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float, *, decodes: bool
    ) -> None:
        """`decodes`: those that lack one token alone."""
        for sequence in [restored for restored in queue.restored.values() if restored.priority_class == priority_class]:
            if decodes and not sequence.is_in_decode:
                continue
            if not self._has_budget(priority_class, batch):
                return
            del queue.restored[sequence.number]
            self._run(queue, sequence, batch, now)

    def _has_budget(self, priority_class: PriorityClass, batch: Batch) -> bool:
        """Whether a sequence of the rank could compute at least a token."""
        if batch.budget.tokens_left < 1:
            return False
        return self._least_chunk(priority_class, batch) > 0 or batch.budget.fits_prefill(1, 0) > 0

    def _run(self, queue: ModelQueue, sequence: Sequence, batch: Batch, now: float) -> None:
        """A sequence that has row and blocks begins to run, with a chunk of at least a token: what its row is to hold
        travels with a step that computes it."""
        self._memory.count_recomputed(sequence)
        sequence.state = State.RUNNING
        queue.running[sequence.priority_class][sequence.number] = sequence
        if sequence.first_planned_s is None:
            sequence.first_planned_s = now
        numbers = (sequence.num_computed, sequence.total - sequence.num_computed)
        self._memory.events.add(sequence, EventKind.ADMITTED, now, numbers=numbers)
        request, blocks = sequence.request, list(sequence.blocks)
        tokens = request.prompt + sequence.packed_output
        adapter = "" if request.adapter is None else request.adapter.version
        batch.new_sequences.append(
            NewSequence(sequence.row, tokens, sequence.num_prompt, request.sampling, blocks, adapter)
        )
        self._add_prefill(sequence, batch, max(1, self._least_chunk(PriorityClass(sequence.priority_class), batch)))

    def _waits_for_offline(self) -> bool:
        """Whether an online sequence waits for what offline ones hold."""
        stuck = self._memory.stuck_online
        if stuck is None:
            return False
        if not self._memory.num_free_rows:
            return self._memory.num_offline_rows() > 0
        needed = self._memory.num_wanted_blocks(stuck)
        return self._memory.pool.num_available(stuck.model) < needed and self._memory.could_have(stuck.model, needed)

    def _waits_for_share(self, now: float) -> bool:
        """Whether an online sequence waits for the least share of its model, of which others' online ones hold a part."""
        stuck = self._memory.stuck_online
        if stuck is None or not self._memory.least_merged():
            return False
        needed = self._memory.num_wanted_blocks(stuck)
        if self._memory.pool.num_available(stuck.model) >= needed:
            return False
        victims = list(self._memory.beyond_share(stuck, needed, now))
        return bool(victims) and self._memory.reaches(stuck.model, [*self._memory.offline_holders(), *victims], needed)

    def _is_behind_stuck(self, sequence: Sequence, now: float) -> bool:
        stuck = self._memory.stuck
        if stuck is None or stuck is sequence or stuck.state != State.WAITING:
            return False
        if sequence.is_online and stuck.model != sequence.model and self._memory.is_below_share(sequence.model):
            return False
        return self._memory.order_key(sequence, now) > self._memory.order_key(stuck, now)
