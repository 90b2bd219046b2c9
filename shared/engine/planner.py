"""The next step of one instance: continuous batching with chunked prefill under one token budget.

Order of authority: online before offline and high before normal, always; then the ordering policy picks the model and
the order within a class; then, of that model, decodes first and prefill chunks after, until the token budget, the rows or
the KV pool are used up. Where slots are short, lower ranks and later arrivals are preempted by recompute: their slots are
freed (full blocks stay findable in the prefix cache) and they wait again. A sequence that a step in flight computes is
never a victim, because that step still writes its slots.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from shared.engine.kv_blocks import BlockPool, root_hash
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.engine.sequence import Rank, Sequence, State
from shared.messages import pack_tokens
from shared.policies.ordering import OrderingPolicy
from shared.policies.token_budget import TokenBudgetPolicy


class ModelQueue:
    """The sequences of one model, by rank: waiting ones in order, running ones by arrival number."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.name = shape.name
        self.root = root_hash(shape.name)
        self.waiting: tuple[list[Sequence], ...] = tuple([] for _ in Rank)
        self.running: tuple[dict[int, Sequence], ...] = tuple({} for _ in Rank)
        self.last_planned_step = -1

    def all_running(self) -> Iterator[Sequence]:
        for of_rank in self.running:
            yield from of_rank.values()

    def all_waiting(self) -> Iterator[Sequence]:
        for of_rank in self.waiting:
            yield from of_rank

    @property
    def num_running(self) -> int:
        return sum(len(of_rank) for of_rank in self.running)

    @property
    def num_waiting(self) -> int:
        return sum(len(of_rank) for of_rank in self.waiting)

    def has_work(self, rank: Rank) -> bool:
        """Whether a sequence of the rank waits, or runs and has something to compute now."""
        if self.waiting[rank]:
            return True
        return any(sequence.total < sequence.max_total for sequence in self.running[rank].values())


class PlannedStep:
    """A step in flight: the plan and the sequences behind its columns."""

    __slots__ = ("generations", "plan", "sequences")

    def __init__(self, plan: StepPlan, sequences: list[Sequence], generations: list[int]) -> None:
        self.plan = plan
        self.sequences = sequences
        self.generations = generations


class _Batch:
    """The columns of a step while it is being filled."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.new_sequences: list[NewSequence] = []
        self.new_blocks: list[tuple[int, list[int]]] = []
        self.num_online_decodes = 0
        self.num_offline_decodes = 0


class Planner:
    """Queues, rows and KV slots of one instance, and the choice of the next step."""

    def __init__(
        self, pool: BlockPool, num_rows: int, ordering: OrderingPolicy, token_budget: TokenBudgetPolicy
    ) -> None:
        self.pool = pool
        self.queues: dict[str, ModelQueue] = {}
        self.num_preemptions = 0
        self._ordering = ordering
        self._token_budget = token_budget
        self._stuck: Sequence | None = None
        """A waiting sequence that lacked room: nobody after it in the order, of any model, is admitted before it."""
        self._free_rows = list(range(num_rows - 1, -1, -1))

    # ---------------------------------------------------------------------------------------------- queues

    def order_key(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Total order over all sequences of the instance: smaller runs first and is preempted last."""
        return (sequence.rank, *self._ordering.key(sequence, now), sequence.number)

    def enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.state = State.WAITING
        waiting = self.queues[sequence.model].waiting[sequence.rank]
        insort(waiting, sequence, key=lambda other: self.order_key(other, now))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue for good; slots that a step in flight uses are freed when it returns."""
        queue = self.queues[sequence.model]
        if sequence.state == State.WAITING:
            queue.waiting[sequence.rank].remove(sequence)
        else:
            del queue.running[sequence.rank][sequence.number]
        sequence.state = State.ENDED
        if not sequence.in_flight:
            self.free(sequence)

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

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Takes slots and row from a running sequence; it waits again and recomputes what the cache has lost."""
        del self.queues[sequence.model].running[sequence.rank][sequence.number]
        self.free(sequence)
        sequence.num_computed = 0
        sequence.is_spoilt = False
        sequence.next_register = 0
        sequence.total = len(sequence.tokens)
        sequence.generation += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.enqueue(sequence, now)

    # ------------------------------------------------------------------------------------------------ plan

    def plan(self, step_id: int, now: float) -> PlannedStep | None:
        """The next step, or None where nothing can run before a step in flight returns or a request arrives."""
        for rank in Rank:
            candidates = [queue for queue in self.queues.values() if queue.has_work(rank)]
            while candidates:
                queue = candidates[0]
                if len(candidates) > 1:
                    queue = self.queues[self._ordering.pick_model(list(candidates), now).name]
                candidates.remove(queue)
                batch = self._fill(queue, rank, now)
                if batch.sequences:
                    queue.last_planned_step = step_id
                    return self._close(step_id, queue, batch)
        return None

    def _fill(self, queue: ModelQueue, leading: Rank, now: float) -> _Batch:
        """The batch of a model, rank by rank; empty if nothing of the leading rank can run."""
        num_decodes = len(queue.running[Rank.ONLINE_HIGH]) + len(queue.running[Rank.ONLINE_NORMAL])
        batch = _Batch(self._token_budget.budget_tokens(queue.name, num_decodes, now))
        for rank in Rank:
            if rank > leading and not batch.sequences:
                break
            prefills: list[Sequence] = []
            self._add_decodes(queue, rank, batch, prefills, now)
            for sequence in prefills:
                if sequence.state == State.RUNNING:
                    self._add_prefill(sequence, batch)
            self._admit(queue, rank, batch, now)
        return batch

    @staticmethod
    def _close(step_id: int, queue: ModelQueue, batch: _Batch) -> PlannedStep:
        sequences = batch.sequences
        plan = StepPlan(
            step_id,
            queue.name,
            [sequence.row for sequence in sequences],
            batch.starts,
            batch.counts,
            batch.samples,
            batch.new_sequences,
            batch.new_blocks,
            (batch.num_online_decodes, batch.num_offline_decodes),
        )
        return PlannedStep(plan, sequences, [sequence.generation for sequence in sequences])

    def _add_decodes(self, queue: ModelQueue, rank: Rank, batch: _Batch, prefills: list[Sequence], now: float) -> None:
        """One token for each decoding sequence of the rank; those with more than one left to compute are returned in
        `prefills`. This loop is the planner's hot path."""
        running = list(queue.running[rank].values())
        if not self._ordering.is_static:
            running.sort(key=lambda sequence: self.order_key(sequence, now))
        add_sequence, add_start = batch.sequences.append, batch.starts.append
        budget = batch.budget_tokens
        planned = 0
        for sequence in running:
            start, total = sequence.num_computed, sequence.total
            if total >= sequence.max_total:
                continue
            if total - start != 1:
                prefills.append(sequence)
                continue
            if planned == budget:
                break
            if start >= sequence.capacity and not self._grow(sequence, batch, now):
                continue
            sequence.num_computed = total
            sequence.total = total + 1
            sequence.in_flight += 1
            add_sequence(sequence)
            add_start(start)
            planned += 1
        batch.budget_tokens = budget - planned
        if rank == Rank.OFFLINE:
            batch.num_offline_decodes += planned
        else:
            batch.num_online_decodes += planned
        batch.counts.extend([1] * planned)
        batch.samples.extend([True] * planned)

    def _grow(self, sequence: Sequence, batch: _Batch, now: float) -> bool:
        """One more block for a decoding sequence, at the cost of later or lower ones if need be."""
        if sequence.state != State.RUNNING:
            return False
        slots = self.pool.allocate(sequence.model, 1)
        if slots is None and self._make_room(sequence, 1, now):
            slots = self.pool.allocate(sequence.model, 1)
        if slots is None:
            # It keeps what it has and waits; a sequence before it in the order may take that as a victim's.
            return False
        sequence.blocks.extend(slots)
        sequence.capacity += self.queues[sequence.model].shape.page_tokens
        batch.new_blocks.append((sequence.row, slots))
        return True

    def _add_prefill(self, sequence: Sequence, batch: _Batch) -> None:
        count = min(sequence.total - sequence.num_computed, batch.budget_tokens)
        if count > 0:
            self._add(sequence, count, batch)

    def _add(self, sequence: Sequence, count: int, batch: _Batch) -> None:
        batch.budget_tokens -= count
        batch.sequences.append(sequence)
        batch.starts.append(sequence.num_computed)
        batch.counts.append(count)
        sequence.num_computed += count
        sequence.in_flight += 1
        samples = sequence.num_computed == sequence.total
        batch.samples.append(samples)
        if samples:
            sequence.total += 1

    def _admit(self, queue: ModelQueue, rank: Rank, batch: _Batch, now: float) -> None:
        """Waiting sequences of the rank, in order, until one does not fit: nobody overtakes a head that lacks
        room, of whatever model."""
        waiting = queue.waiting[rank]
        if waiting and not self._ordering.is_static:
            waiting.sort(key=lambda sequence: self.order_key(sequence, now))
        while waiting and batch.budget_tokens > 0:
            sequence = waiting[0]
            if self._is_behind_stuck(sequence, now):
                return
            has_row = bool(self._free_rows) or self._make_row(sequence, now)
            if not has_row or not self._allocate_prompt(queue, sequence, now):
                self._stuck = sequence
                return
            waiting.remove(sequence)
            sequence.state = State.RUNNING
            sequence.row = self._free_rows.pop()
            queue.running[rank][sequence.number] = sequence
            if sequence.first_planned_s is None:
                sequence.first_planned_s = now
            batch.new_sequences.append(
                NewSequence(
                    sequence.row,
                    pack_tokens(sequence.tokens),
                    sequence.num_prompt,
                    sequence.request.sampling,
                    list(sequence.blocks),
                )
            )
            self._add_prefill(sequence, batch)

    def _is_behind_stuck(self, sequence: Sequence, now: float) -> bool:
        stuck = self._stuck
        if stuck is None or stuck is sequence or stuck.state != State.WAITING:
            return False
        return self.order_key(sequence, now) > self.order_key(stuck, now)

    def _allocate_prompt(self, queue: ModelQueue, sequence: Sequence, now: float) -> bool:
        """Slots for all known tokens, from the prefix cache where it has them. At least one token is computed."""
        page = queue.shape.page_tokens
        num_blocks = -(-sequence.total // page)
        cached = self.pool.find(queue.name, sequence.extend_hashes((sequence.total - 1) // page, page, queue.root))
        missing = num_blocks - len(cached)
        needed = missing + self._reserve_slots(queue)
        self.pool.retain(queue.name, cached)
        if self.pool.num_available(queue.name) < needed and not self._make_room(sequence, needed, now):
            self.pool.release(queue.name, cached)
            return False
        slots = self.pool.allocate(queue.name, missing)
        assert slots is not None
        sequence.blocks = cached + slots
        sequence.capacity = num_blocks * page
        sequence.num_computed = len(cached) * page
        sequence.next_register = sequence.num_computed + page
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _reserve_slots(self, queue: ModelQueue) -> int:
        """Slots left free at an admission, so that running sequences can grow a while before somebody is preempted."""
        if not any(other.num_running for other in self.queues.values()):
            return 0
        return max(1, self.pool.capacity_slots(queue.name) // 100)

    # ---------------------------------------------------------------------------------------------- victims

    def _make_room(self, sequence: Sequence, num_slots: int, now: float) -> bool:
        """Preempts, last in order first, until `num_slots` are available to the sequence's model. A running sequence may
        take from anybody after it; a waiting one only from lower ranks (online gives way to online only by priority).
        Nobody is preempted where all victims together would not do."""
        first_victim_rank = sequence.rank + 1 if sequence.state == State.WAITING else sequence.rank
        key = self.order_key(sequence, now)
        per_merged = self.queues[sequence.model].shape.slots_per_merged
        within_reach = float(self.pool.num_available(sequence.model))
        victims: list[tuple[tuple[float, ...], Sequence]] = []
        for queue in self.queues.values():
            for rank in range(first_victim_rank, len(Rank)):
                for victim in queue.running[rank].values():
                    victim_key = self.order_key(victim, now)
                    if not victim.in_flight and victim_key > key:
                        victims.append((victim_key, victim))
                        within_reach += len(victim.blocks) * per_merged / queue.shape.slots_per_merged
        if within_reach < num_slots:
            return False
        victims.sort(key=lambda entry: entry[0])
        while victims and self.pool.num_available(sequence.model) < num_slots:
            self.preempt(victims.pop()[1], now)
        return self.pool.num_available(sequence.model) >= num_slots

    def _make_row(self, sequence: Sequence, now: float) -> bool:
        """A row for a sequence of higher rank than some running one."""
        victims = [
            victim
            for queue in self.queues.values()
            for rank in range(sequence.rank + 1, len(Rank))
            for victim in queue.running[rank].values()
            if not victim.in_flight
        ]
        if not victims:
            return False
        self.preempt(max(victims, key=lambda victim: self.order_key(victim, now)), now)
        return True
