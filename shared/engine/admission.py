"""Waiting sequences on their way into a step: who begins to run, with how much of its prompt, and who waits for room that
another one before it lacks. The sequence `stuck` of the allocator is the first one for which there was none."""

from __future__ import annotations

from bisect import bisect_left

from shared.costs.model import prompt_s
from shared.engine.batch import Batch
from shared.engine.favours import Favours
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue
from shared.engine.plan import NewSequence
from shared.engine.sequence import PriorityClass, Sequence, State
from shared.messages.timeline import EventKind
from shared.policies.roles import most_chunk

MIN_ONLINE_CHUNK = 16
"""Tokens."""


class Admission:
    """The rules by which sequences get rows, blocks and tokens of a step."""

    def __init__(self, memory: Allocator, favours: Favours) -> None:
        self._memory = memory
        self._queues = memory.queues
        self._favours = favours

    def admit(
        self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float, first: set[str]
    ) -> None:
        """Waiting sequences of the rank, in order, until one does not fit: nobody overtakes a head of its own model that
        lacks room, nor one of another if that would wait for longer. `first`: tenants whose prompts share the step with
        nobody else's."""
        self.admit_restored(queue, priority_class, batch, now, decodes=False)
        self.admit_waiting(queue, priority_class, batch, now, first)

    def admit_waiting(
        self,
        queue: ModelQueue,
        priority_class: PriorityClass,
        batch: Batch,
        now: float,
        first: set[str],
        before: Sequence | None = None,
    ) -> None:
        """`before`: only those whose tenant goes before that of a running one."""
        waiting = queue.waiting[priority_class]
        if before is not None and not (waiting and self._memory.tenants(before).are_several):
            return
        self._memory.sort(waiting, now)
        while waiting and self._has_budget(priority_class, batch):
            sequence = waiting[0]
            if not batch.handover_left and sequence.number in queue.handing_over:
                return
            tenants = self._memory.tenants(sequence)
            if first and batch.has_chunk and sequence.tenant not in first:
                return
            if before is not None and tenants.key(sequence.tenant) >= tenants.key(before.tenant):
                return
            if self._is_behind_stuck(sequence, now):
                return
            num_kept = (
                self._memory.demand.num_rows
                if self._memory.demand is not None and priority_class == PriorityClass.OFFLINE
                else 0
            )
            has_row = self._memory.num_free_rows > num_kept or self._memory.make_row(sequence, now)
            if not has_row or not self._memory.allocate_prompt(queue, sequence, now):
                if not self._comes_after_stuck(sequence, now):
                    self._memory.stuck = sequence
                return
            waiting.remove(sequence)
            sequence.row = self._memory.take_row()
            if sequence.state == State.RESTORING:
                queue.restoring[sequence.number] = sequence
            else:
                self._run(queue, sequence, batch, now)
            if tenants.are_several:
                self._memory.sort(waiting, now)

    def admit_restored(
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
        return self.least_chunk(priority_class, batch) > 0 or batch.budget.fits_prefill(1, 0) > 0

    def _run(self, queue: ModelQueue, sequence: Sequence, batch: Batch, now: float) -> None:
        """A sequence that has row and blocks begins to run, with a chunk of at least a token: what its row is to hold
        travels with a step that computes it."""
        self._memory.count_recomputed(sequence)
        sequence.state = State.RUNNING
        queue.running[sequence.priority_class][sequence.number] = sequence
        if sequence.first_planned_s is None:
            sequence.first_planned_s = now
            self._promise(queue, sequence, now)
        numbers = (sequence.num_computed, sequence.total - sequence.num_computed)
        self._memory.events.add(sequence, EventKind.ADMITTED, now, numbers=numbers)
        request, blocks = sequence.request, list(sequence.blocks)
        tokens = request.prompt + sequence.packed_output
        adapter = "" if request.adapter is None else request.adapter.version
        batch.new_sequences.append(
            NewSequence(sequence.row, tokens, sequence.num_prompt, request.sampling, blocks, adapter)
        )
        self.add_prefill(sequence, batch, max(1, self.least_chunk(PriorityClass(sequence.priority_class), batch)))

    def _promise(self, queue: ModelQueue, sequence: Sequence, now: float) -> None:
        """Its tenant owes the whole prompt from now on, so that the next one to begin is another tenant's."""
        if queue.cost_model is not None:
            start = sequence.num_computed
            sequence.promised_s = prompt_s(queue.cost_model.prompt_cost, sequence.total - start, start)
            if sequence.is_online:
                self._favours.note(sequence, queue.cost_model.fixed_s + sequence.promised_s, now)
            self._memory.tenants(sequence).promise(sequence.tenant, sequence.promised_s)

    def add_prefill(self, sequence: Sequence, batch: Batch, at_least: int) -> None:
        wanted = sequence.total - sequence.num_computed
        is_handed_over = sequence.number in self._queues[sequence.model].handing_over
        if is_handed_over:
            wanted = min(wanted, max(at_least, min(most_chunk(wanted), batch.handover_left)))
        fitting = batch.budget.fits_prefill(wanted, sequence.num_computed)
        count = min(wanted, batch.budget.tokens_left, max(fitting, at_least))
        if count > 0:
            batch.add_chunk(sequence, count)
            if is_handed_over:
                batch.handover_left = max(0, batch.handover_left - count) if batch.samples[-1] else 0

    @staticmethod
    def least_chunk(priority_class: PriorityClass, batch: Batch) -> int:
        """Online prompts go on even where the decodes alone break their objective: one chunk a step."""
        return MIN_ONLINE_CHUNK if priority_class != PriorityClass.OFFLINE and not batch.has_chunk else 0

    def waits_for_offline(self) -> bool:
        """Whether an online sequence waits for what offline ones hold."""
        stuck = self._memory.stuck_online
        if stuck is None:
            return False
        if not self._memory.num_free_rows:
            return self._memory.num_offline_rows() > 0
        needed = self._memory.num_wanted_blocks(stuck)
        return self._memory.pool.num_available(stuck.model) < needed and self._memory.could_have(stuck.model, needed)

    def waits_for_share(self, now: float) -> bool:
        """Whether an online sequence waits for the share of its model or tenant, of which others' online ones hold some."""
        stuck = self._memory.stuck_online
        return stuck is not None and self.gets_share(stuck, now)

    def gets_share(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting online sequence lacks what others' online ones hold beyond their shares, perhaps in flight."""
        memory, needed = self._memory, self._memory.num_wanted_blocks(sequence)
        if not memory.num_free_rows and any(memory.beyond_row_shares(sequence, now)):
            return True
        if memory.pool.num_available(sequence.model) >= needed:
            return False
        victims = list(memory.beyond_shares(sequence, needed, now))
        return bool(victims) and memory.reaches(sequence.model, [*memory.offline_holders(), *victims], needed)

    def finds_room(self, queue: ModelQueue, sequence: Sequence, now: float) -> bool:
        """Whether a waiting online sequence would be admitted, as far as that can be told."""
        memory, needed = self._memory, self._memory.num_wanted_blocks(sequence)
        has_room = memory.num_free_rows > 0 and memory.pool.num_available(queue.name) >= needed
        may_hold = memory.may_hold(queue.name, needed, sequence.priority_class)
        return has_room and may_hold and not self._is_behind_stuck(sequence, now)

    def _is_behind_stuck(self, sequence: Sequence, now: float) -> bool:
        """Whether it is not admitted because one before it in the order lacks room."""
        stuck = self._memory.stuck
        if stuck is None or not self._overtakes(sequence, now):
            return False
        return stuck.model == sequence.model or self._delays(stuck, sequence)

    def _overtakes(self, sequence: Sequence, now: float) -> bool:
        """Whether one before it lacks room that is not what its own model can have in any case."""
        stuck = self._memory.stuck
        is_of_other = stuck is not None and stuck.model != sequence.model
        if sequence.is_online and is_of_other and self._memory.is_below_share(sequence.model):
            return False
        return self._comes_after_stuck(sequence, now)

    def _comes_after_stuck(self, sequence: Sequence, now: float) -> bool:
        """Whether one before it in the order lacks room."""
        stuck = self._memory.stuck
        if stuck is None or stuck is sequence or stuck.state != State.WAITING:
            return False
        return self._memory.order_key(sequence, now) > self._memory.order_key(stuck, now)

    def _delays(self, stuck: Sequence, sequence: Sequence) -> bool:
        """Whether more of those that run would have to end before the first has room, if the second had what it wants."""
        memory = self._memory
        running = [s for q in self._queues.values() for c in ONLINE_CLASSES for s in q.running[c].values()]
        running.sort(key=lambda s: len(s.blocks) / self._queues[s.model].shape.blocks_per_merged, reverse=True)
        offline, needed = memory.offline_holders(), memory.num_wanted_blocks(stuck)
        num_to_end = bisect_left(
            range(len(running) + 1),
            True,
            key=lambda num: memory.reaches(stuck.model, [*offline, *running[:num]], needed),
        )
        per_merged = {name: queue.shape.blocks_per_merged for name, queue in self._queues.items()}
        merged = -(-memory.num_wanted_blocks(sequence) // per_merged[sequence.model])
        needed += merged * per_merged[stuck.model]
        # Where it needs nobody's end it lacks something else, or its turn has come.
        return not num_to_end or not memory.reaches(stuck.model, [*offline, *running[:num_to_end]], needed)
