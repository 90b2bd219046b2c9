"""Who holds the rows and slots of an instance, and who gives them up.

Where slots are short, lower ranks and later ones in the order are preempted: their slots are freed (full blocks stay
findable in the prefix cache, checkpointed ones in host memory) and they wait again. Among those that may be preempted, the
one that loses the least work goes first. A sequence that a step in flight computes is never a victim, because that step
still writes its slots; one of a suspended step only when nothing else will do, because then that step is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from shared.engine.batch import PlannedStep
from shared.engine.counters import EngineCounters
from shared.engine.host_kv import HostKv
from shared.engine.kv_blocks import BlockPool
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import Rank, Sequence, State
from shared.policies.checkpointing import victim_key
from shared.policies.ordering import OrderingPolicy


class Room:
    """Queues, rows and KV slots of one instance."""

    def __init__(self, num_merged: int, num_rows: int, num_host_merged: int, ordering: OrderingPolicy) -> None:
        self.pool = BlockPool(num_merged)
        self.counters = EngineCounters()
        self.host = HostKv(self.pool, num_host_merged, self.counters)
        self.queues: dict[str, ModelQueue] = {}
        self.ordering = ordering
        self.suspended: PlannedStep | None = None
        self._discards: list[int] = []
        """Suspended steps given up since the last plan."""
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def order_key(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Total order over all sequences of the instance: smaller runs first and is preempted last."""
        return (sequence.rank, *self.ordering.key(sequence, now), sequence.number)

    # ------------------------------------------------------------------------------------------------ queues

    def enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.state = State.WAITING
        waiting = self.queues[sequence.model].waiting[sequence.rank]
        insort(waiting, sequence, key=lambda other: self.order_key(other, now))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue for good; slots that a step in flight uses are freed when it returns."""
        self._take_out(sequence)
        sequence.state = State.ENDED
        self.host.release(sequence)
        if not sequence.in_flight:
            self.free(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        queue = self.queues[sequence.model]
        if sequence.state == State.WAITING:
            queue.waiting[sequence.rank].remove(sequence)
        elif sequence.state == State.RESTORING:
            self.host.abandon_restore(sequence)
            if queue.restored.pop(sequence.number, None) is None:
                del queue.restoring[sequence.number]
        elif queue.suspended.pop(sequence.number, None) is None:
            del queue.running[sequence.rank][sequence.number]

    def free(self, sequence: Sequence) -> None:
        """Gives row and slots back. Only without a step in flight that computes the sequence."""
        assert not sequence.in_flight
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.blocks:
            self.pool.release(sequence.model, sequence.blocks)
            sequence.blocks = []
            sequence.capacity = 0

    def preempt(self, sequence: Sequence, now: float, cause: str) -> None:
        """Takes slots and row from a sequence; it waits again and recomputes what neither cache nor host memory has."""
        if sequence.num_computed:
            is_checkpointed = sequence.num_checkpointed_blocks >= sequence.num_filled > 0
            self.counters.preemptions[cause, "checkpointed" if is_checkpointed else "recompute"] += 1
            sequence.peak_computed = max(sequence.peak_computed, min(sequence.num_computed, sequence.num_tokens))
            sequence.num_preemptions += 1
        self._take_out(sequence)
        self.free(sequence)
        sequence.num_computed = 0
        sequence.total = sequence.num_tokens
        sequence.is_spoilt = False
        self.enqueue(sequence, now)

    # ----------------------------------------------------------------------------------------- suspended steps

    def suspend(self, step: PlannedStep, share: float, now: float) -> None:
        """The step stopped at a safepoint; its sequences stay as they are until it is resumed or discarded."""
        if not step.is_part:
            self.counters.steps_suspended += 1
        step.done_share, step.suspended_s = share, now
        self.suspended = step
        queue = self.queues[step.plan.model]
        for sequence in step.sequences:
            sequence.num_suspensions += not step.is_part
            if sequence.state != State.ENDED:
                queue.suspended[sequence.number] = sequence
                del queue.running[sequence.rank][sequence.number]

    def take_suspended(self) -> PlannedStep:
        """The suspended step goes on, or is over: its sequences run again."""
        step, self.suspended = self.suspended, None
        assert step is not None
        queue = self.queues[step.plan.model]
        for sequence in queue.suspended.values():
            queue.running[sequence.rank][sequence.number] = sequence
        queue.suspended.clear()
        return step

    def discard_suspended(self, now: float) -> None:
        """Gives the suspended step up: its planned tokens are computed again."""
        step = self.take_suspended()
        self.counters.steps_discarded += 1
        self.counters.discarded_tokens += int(step.plan.num_tokens * step.done_share)
        self._discards.append(step.plan.step_id)
        step.roll_back()
        self.settle(step, now)

    def settle(self, step: PlannedStep, now: float) -> None:
        """The step is over; sequences that waited for that are freed, or preempted."""
        for sequence in step.sequences:
            if sequence.in_flight:
                continue
            if sequence.state == State.ENDED:
                self.free(sequence)
            elif sequence.is_spoilt:
                self.preempt(sequence, now, "failure")

    # ------------------------------------------------------------------------------------------------ victims

    def _victims(self, sequence: Sequence, key: tuple[float, ...], now: float) -> Iterator[Sequence]:
        """Those that may have to give way to the sequence. A running sequence may take from anybody after it; a waiting one
        only from lower ranks (online gives way to online only by priority)."""
        first_rank = sequence.rank + 1 if sequence.state == State.WAITING else sequence.rank
        for queue in self.queues.values():
            for rank in range(first_rank, len(Rank)):
                for victim in queue.running[rank].values():
                    if not victim.in_flight and self.order_key(victim, now) > key:
                        yield victim
            for victim in (*queue.restoring.values(), *queue.restored.values()):
                if victim.rank >= first_rank and self.order_key(victim, now) > key:
                    yield victim

    def make_room(self, sequence: Sequence, num_slots: int, now: float) -> bool:
        """Preempts until `num_slots` are available to the sequence's model. Nobody is preempted where all victims together
        would not do."""
        key = self.order_key(sequence, now)
        victims = list(self._victims(sequence, key, now))
        if self._within_reach(sequence.model, victims) < num_slots:
            if self.suspended is None or sequence.rank == Rank.OFFLINE:
                return False
            suspended = [held for queue in self.queues.values() for held in queue.suspended.values()]
            if self._within_reach(sequence.model, [*victims, *suspended]) < num_slots:
                return False
            self.discard_suspended(now)
            return self.make_room(sequence, num_slots, now)
        victims.sort(key=lambda victim: victim_key(victim, victim.page_tokens))
        for victim in victims:
            if self.pool.num_available(sequence.model) >= num_slots:
                break
            self.preempt(victim, now, "memory")
        return self.pool.num_available(sequence.model) >= num_slots

    def _within_reach(self, model: str, victims: list[Sequence]) -> float:
        """Slots that the model could have if all of them were preempted: not those that copies, or others with the same
        prefix, hold too."""
        held = Counter((victim.model, slot) for victim in victims for slot in victim.blocks)
        per_merged = self.queues[model].shape.slots_per_merged
        merged = sum(
            1 / self.queues[name].shape.slots_per_merged
            for (name, slot), count in held.items()
            if self.pool.num_references(name, slot) == count
        )
        return self.pool.num_available(model) + merged * per_merged

    def make_row(self, sequence: Sequence, now: float) -> bool:
        """A row for a sequence of higher rank than some running one."""
        victims = [
            victim
            for queue in self.queues.values()
            for of_rank in (*queue.running[sequence.rank + 1 :], queue.restoring, queue.restored)
            for victim in of_rank.values()
            if not victim.in_flight and victim.rank > sequence.rank
        ]
        if victims:
            self.preempt(max(victims, key=lambda victim: self.order_key(victim, now)), now, "rows")
            return True
        if self.suspended is None or sequence.rank == Rank.OFFLINE:
            return False
        self.discard_suspended(now)
        return self.make_row(sequence, now)
