"""What an instance reports of its load.

Freeness is Llumnix's (section 4.4; formulas: virtual_usage.py). Online requests count; offline work yields at once and is
no load. Where there are several models, what each holds and needs counts as whole merged blocks, since what is left of one
is of no use to the others; beside these count what cannot be moved together (memory/compaction.py) and the least shares of
models that hold less. What is on its way counts at both ends until it is handed over: a sequence that is leaving still has
its blocks and may come back; blocks reserved for one that comes are taken from whoever else could have had them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from math import ceil, inf

import msgspec

from shared.costs.model import StepShape
from shared.engine.late_prompts import late_prompts
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue
from shared.engine.reservations import Reserved
from shared.engine.sequence import PriorityClass, Sequence
from shared.messages.cluster import KEY_BYTES, ModelLoad, NextMove, mark_positions
from shared.policies.virtual_usage import (
    decode_steps,
    dispatch_virtual_usage,
    freeness,
    headroom,
    ideal_load_tokens,
    migration_virtual_usage,
)

MAX_MOVES = 64
"""Requests told of where all are to leave."""

HOARD_S = 4.0
"""An instance holds at most so many seconds of offline work that it has not begun, so that none idles while another has too
much of it."""

UNSERVED_S = 2.0
"""A model whose offline work had no turn for so long has no room for more."""

GIVE_UP_S = 5.0
"""`give_up_s` of an engine whose requests somebody places again."""

LEAST_IDEAL_SHARE = 0.125
"""Share of the pool that may be used beside requests of high priority, whatever the cost model says."""

UNKNOWN_IDEAL_SHARE = 0.25
"""Assumed share where there is no cost model."""


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one moment, in merged blocks where blocks are meant."""

    dispatch_freeness: float
    free_merged: float
    """Merged blocks that any model could have, after blocks were moved together if need be; not counted what offline work
    would give up."""
    num_running: int
    models: tuple[ModelLoad, ...]
    dispatch_freeness_high: float = 0.0
    """Freeness as a request of high priority sees it: without headroom."""
    migration_freeness: float = 0.0
    """Decode steps."""
    scaling_freeness: float = 0.0
    """Decode steps."""
    num_high: int = 0
    next_moves: tuple[NextMove, ...] = ()
    """Cooldowns aside."""
    running_freeness: float = inf
    """Decode steps."""
    prompts_s: float = 0.0
    """Before the prompt of one more online request is begun."""
    ttft_s: float = 0.0
    """Objective of a first token."""
    tpot_s: float = 0.0
    """Objective of each later one."""
    late_starts_s: float = 0.0
    """Seconds until the first waiting prompt that cannot meet its objective here is begun; 0: there is none."""
    late_move: NextMove | None = None


class _Totals:
    """Online work, in merged blocks."""

    def __init__(self, queues: Mapping[str, ModelQueue]) -> None:
        self._queues = queues
        self._held = dict.fromkeys(queues, 0)
        self._wanted = dict.fromkeys(queues, 0)
        """Blocks of each model: of those that run, leave or come, and of those that wait."""
        self.high = 0.0
        """The part of all that requests of high priority hold or need."""
        self.step = self.waiting_step = 0.0
        """What one token for each that runs takes; for one that waits or arrives, of the model where that is most."""
        self.num_running = self.num_high = 0
        self.runs_normal = False

    def run(self, num_sequences: int, num_blocks: int, priority_class: PriorityClass, queue: ModelQueue) -> None:
        shape = queue.shape
        self._held[queue.name] += num_blocks
        self.step += num_sequences / shape.tokens_per_merged
        self.num_running += num_sequences
        self._note_priority(priority_class, num_blocks / shape.blocks_per_merged, num_sequences)
        self.runs_normal |= priority_class == PriorityClass.ONLINE_NORMAL and num_sequences > 0

    def arrive(self, num_blocks: int, priority_class: PriorityClass, queue: ModelQueue) -> None:
        """No step makes a token for it yet, and it is not among the running requests of the report: its blocks count, but
        nothing is divided by it."""
        shape = queue.shape
        self._held[queue.name] += num_blocks
        self.waiting_step = max(self.waiting_step, 1 / shape.tokens_per_merged)
        self._note_priority(priority_class, num_blocks / shape.blocks_per_merged)

    def wait(self, sequences: list[Sequence], priority_class: PriorityClass, queue: ModelQueue) -> None:
        if not sequences:
            return
        shape = queue.shape
        needed = [_num_blocks(sequence) for sequence in sequences]
        self._wanted[queue.name] += sum(needed)
        self.waiting_step = max(self.waiting_step, 1 / shape.tokens_per_merged)
        for num_blocks in needed if priority_class == PriorityClass.ONLINE_HIGH else ():
            self._note_priority(priority_class, num_blocks / shape.blocks_per_merged)

    def _note_priority(self, priority_class: int, usage: float, num_sequences: int = 1) -> None:
        if priority_class == PriorityClass.ONLINE_HIGH:
            self.num_high += num_sequences
            self.high += usage

    @property
    def running(self) -> float:
        return sum(map(self._merged, self._queues, self._held.values()))

    @property
    def waiting(self) -> float:
        """What those that wait need beside it."""
        return sum(map(self._merged, self._queues, map(self.num_blocks, self._queues))) - self.running

    def head(self, sequence: Sequence | None) -> float:
        """What this one needs beside it."""
        if sequence is None:
            return 0.0
        held, model = self._held[sequence.model], sequence.model
        return self._merged(model, held + _num_blocks(sequence)) - self._merged(model, held)

    def num_blocks(self, name: str) -> int:
        """Blocks of a model, with those that its waiting ones need."""
        return self._held[name] + self._wanted[name]

    def kept(self, least_merged: int) -> float:
        """What is left of the least shares of the others than a model, for the model to which that leaves least."""
        if not least_merged:
            return 0.0
        left = [max(0.0, least_merged - self._merged(name, self.num_blocks(name))) for name in self._queues]
        return sum(left) - min(left, default=0.0)

    def _merged(self, name: str, num_blocks: int) -> float:
        share = num_blocks / self._queues[name].shape.blocks_per_merged
        return share if len(self._queues) == 1 else ceil(share)


def _num_blocks(sequence: Sequence) -> int:
    return -(-sequence.total // sequence.block_size)


def instance_load(
    memory: Allocator,
    reserved: Iterable[Reserved],
    offline_tokens_per_s: float | None,
    high_priority_load: float,
    max_step_tokens: int,
    steps_s: float,
    spare_s: Callable[[str], float],
    now: float | None,
    ttft_s: float = 0.0,
    tpot_s: float = 0.0,
    given_away: Container[str] = (),
) -> InstanceLoad:
    """`offline_tokens_per_s`: lately computed; None: offline requests are not served. `high_priority_load`: share of the
    pool that is used beside requests of high priority; 0: from the cost models. `max_step_tokens`: limit of the step planned
    last. `steps_s`: until the steps in flight end that an online request would wait for. `spare_s`: for how long an offline
    step of a model may run beside online work (`Planner.offline_spare_s`). `ttft_s`, `tpot_s`: objectives where neither
    request nor model names one; 0: none. `given_away`: models of which all requests are to leave."""
    totals, pool = _Totals(memory.queues), memory.pool
    told = []
    for queue in memory.queues.values():
        num_decodes = num_blocks = 0
        for priority_class in ONLINE_CLASSES:
            held = _with_blocks(queue, priority_class)
            held_blocks = sum([len(sequence.blocks) for sequence in held])
            totals.run(len(held), held_blocks, priority_class, queue)
            totals.wait(queue.waiting[priority_class], priority_class, queue)
            num_decodes, num_blocks = num_decodes + len(held), num_blocks + held_blocks
        decode_cost = _decode_cost(queue, num_decodes, num_blocks * queue.shape.block_size)
        room = 0
        if offline_tokens_per_s is not None and _has_turns(memory, queue, spare_s, now):
            room = _offline_room(memory, queue, offline_tokens_per_s, max_step_tokens, spare_s)
        told.append((queue, room, decode_cost))
    for coming in reserved:
        if coming.is_load:
            totals.arrive(len(coming.blocks), coming.priority_class, memory.queues[coming.model])
    models = [
        _model_load(memory, queue, room, decode_cost, memory.share_left_merged(queue, totals.num_blocks(queue.name)))
        for queue, room, decode_cost in told
    ]
    free, stranded = pool.num_merged - pool.used_merged(), 0
    if len(memory.queues) > 1:
        kept_by = {name: memory.compaction.num_kept(name) for name in memory.queues}
        free = pool.num_merged - sum(kept_by.values())
        # Of what cannot be had, that which nobody needs.
        stranded = sum(kept - pool.least_merged(name) for name, kept in kept_by.items())
    num_merged = pool.num_merged - stranded - totals.kept(memory.least_merged())
    step = totals.step or totals.waiting_step
    kept = headroom(num_merged, _ideal_merged(memory, high_priority_load), totals.high)
    running, waiting, head = totals.running, totals.waiting, totals.head(_head(memory))
    usage = dispatch_virtual_usage(running, waiting, high_headroom=kept)
    for_high = dispatch_virtual_usage(running, waiting)
    late = None if now is None else next(late_prompts(memory.queues.values(), steps_s, now), None)
    moving = migration_virtual_usage(running, head, high_headroom=kept, runs_normal=totals.runs_normal)
    return InstanceLoad(
        dispatch_freeness=freeness(num_merged, usage, totals.num_running),
        free_merged=free,
        num_running=sum([model.num_running for model in models]),
        models=tuple(models),
        dispatch_freeness_high=freeness(num_merged, for_high, totals.num_running),
        migration_freeness=decode_steps(num_merged - moving, step),
        scaling_freeness=decode_steps(num_merged - usage, step),
        num_high=totals.num_high,
        next_moves=next_moves(memory, given_away),
        running_freeness=decode_steps(num_merged - running, step),
        prompts_s=steps_s + sum(queue.prompts_s() for queue in memory.queues.values()),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        late_starts_s=0.0 if late is None else late.starts_s,
        late_move=None if late is None else _move(memory, late.sequence),
    )


def next_moves(memory: Allocator, given_away: Container[str] = ()) -> tuple[NextMove, ...]:
    """`LoadReport.next_moves`, in the order of `Outgoing.candidates`."""
    leaving = [s for queue in memory.queues.values() if queue.name in given_away for s in queue.all_held()]
    leaving.sort(key=lambda sequence: (not sequence.is_online, *_moving_order(sequence)))
    staying = [queue for queue in memory.queues.values() if queue.name not in given_away]
    first: list[Sequence] = []
    for priority_class in reversed(ONLINE_CLASSES):
        if not first:
            running = [queue.running[priority_class].values() for queue in staying]
            first = [min(of_model, key=_moving_order) for of_model in running if of_model]
    told = [*leaving[:MAX_MOVES], *sorted(first, key=_moving_order)]
    return tuple(_move(memory, sequence) for sequence in told)


def _moving_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.num_moving_blocks, sequence.number


def _move(memory: Allocator, sequence: Sequence) -> NextMove:
    page, num_blocks = sequence.block_size, sequence.num_tokens // sequence.block_size
    hashes = sequence.extend_hashes(num_blocks, page, memory.queues[sequence.model].root)
    marks = b"".join(hashes[position - 1][:KEY_BYTES] for position in mark_positions(num_blocks))
    return NextMove(sequence.model, sequence.num_tokens, sequence.request.request_id, page, num_blocks, marks)


def _with_blocks(queue: ModelQueue, priority_class: PriorityClass) -> list[Sequence]:
    """Those of the rank that run, are about to, or are leaving."""
    others = (queue.restoring, queue.restored, queue.leaving)
    return [
        *queue.running[priority_class].values(),
        *(
            sequence
            for of_state in others
            if of_state
            for sequence in of_state.values()
            if sequence.priority_class == priority_class
        ),
    ]


def _head(memory: Allocator) -> Sequence | None:
    """The online sequence that is to be admitted next."""
    if (stuck := memory.stuck_online) is not None:
        return stuck
    for priority_class in ONLINE_CLASSES:
        heads = [queue.waiting[priority_class][0] for queue in memory.queues.values() if queue.waiting[priority_class]]
        if heads:
            return min(heads, key=lambda sequence: sequence.arrived_s)
    return None


def _ideal_merged(memory: Allocator, high_priority_load: float) -> float:
    """Merged blocks in use up to which decode runs near its ideal speed, for the model that slows down first."""
    total = memory.pool.num_merged
    if high_priority_load:
        return high_priority_load * total
    ideal = [
        ideal_load_tokens(queue.cost_model) / queue.shape.tokens_per_merged
        for queue in memory.queues.values()
        if queue.cost_model is not None and queue.is_cost_known
    ]
    return max(LEAST_IDEAL_SHARE * total, min(ideal)) if ideal else UNKNOWN_IDEAL_SHARE * total


def _model_load(
    memory: Allocator,
    queue: ModelQueue,
    offline_room_tokens: int,
    decode_cost: tuple[float, float],
    share_left_merged: float,
) -> ModelLoad:
    return ModelLoad(
        model=queue.name,
        num_running=queue.num_running,
        num_waiting=queue.num_waiting,
        num_offline=queue.num_offline,
        num_waiting_online=queue.num_waiting_of(True),
        offline_room_tokens=offline_room_tokens,
        budgets=memory.ordering.budgets(queue.all_held()),
        prompt_cost=(0.0, 0.0) if queue.cost_model is None else queue.cost_model.prompt_cost,
        decode_cost=decode_cost,
        fetch_token_s=queue.fetch_token_s,
        share_left_merged=share_left_merged,
    )


def _decode_cost(queue: ModelQueue, num_decodes: int, context_tokens: int) -> tuple[float, float]:
    """`ModelLoad.decode_cost`. `context_tokens`: of those that decode, together."""
    if queue.cost_model is None or not queue.is_cost_known:
        return 0.0, 0.0
    one_s = queue.cost_model.predict(StepShape(0, 0.0, 1, 0))
    all_s = queue.cost_model.predict(StepShape(0, 0.0, 1 + num_decodes, context_tokens))
    return one_s, (all_s - one_s) / max(1, num_decodes)


def _has_turns(memory: Allocator, queue: ModelQueue, spare_s: Callable[[str], float], now: float | None) -> bool:
    """Whether offline work of the model gets on here: what is held shows it, else what online objectives leave."""
    if not memory.has_online_work():
        return True
    if queue.num_offline:
        return now is None or now - queue.offline_turn_s <= UNSERVED_S
    return spare_s(queue.name) > 0.0


def _offline_room(
    memory: Allocator,
    queue: ModelQueue,
    tokens_per_s: float,
    max_step_tokens: int,
    spare_s: Callable[[str], float],
) -> int:
    """Offline tokens (prompt and output) that could be given beyond those held: what the free blocks hold or the model's
    part of some seconds of work, whichever is less, minus what waits here already; at least a step's worth, so that the
    instance never runs dry between two reports."""
    held = sum(
        sequence.max_total
        for sequence in (*queue.waiting[PriorityClass.OFFLINE], *queue.restoring.values(), *queue.restored.values())
        if not sequence.is_online
    )
    cost, step_tokens = queue.cost_model if queue.is_cost_known else None, max_step_tokens
    if cost is not None and not memory.has_online_work():
        shape = StepShape(max_step_tokens, max_step_tokens * max_step_tokens / 2)
        tokens_per_s = max(tokens_per_s, max_step_tokens / cost.predict(shape))
    elif cost is not None and (step_s := spare_s(queue.name)) < inf:
        step_tokens = min(max_step_tokens, cost.max_prefill_tokens(step_s - cost.fixed_s, StepShape(), 0))
    by_memory = memory.pool.num_available(queue.name) * queue.shape.block_size
    if not memory.num_free_rows:
        by_memory = 0
    num_sharing = 1 + sum(other.num_offline > 0 for other in memory.queues.values() if other is not queue)
    by_time = int(tokens_per_s * HOARD_S / num_sharing)
    return max(0, max(min(by_memory, by_time), step_tokens) - held)
