"""Every invariant of an engine, as assertions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shared.engine.batch import PlannedStep
from shared.engine.handover import PinnedBlocks
from shared.engine.memory.allocator import Allocator
from shared.engine.memory.blocks import BlockPool
from shared.engine.model_queue import ModelQueue
from shared.engine.reservations import Reserved
from shared.engine.sequence import Handover, Sequence, State


def check_engine(
    memory: Allocator,
    held: Mapping[str, Sequence],
    in_flight: Mapping[int, PlannedStep],
    pinned: Iterable[PinnedBlocks] = (),
    reserved: Iterable[Reserved] = (),
) -> None:
    """AssertionError if anything is not as it should be."""
    steps = [*in_flight.values(), *([memory.suspended] if memory.suspended else [])]
    flying = {id(s): s for step in steps for s in step.sequences if s.state == State.ENDED}
    rows = [owner.row for owner in (*held.values(), *flying.values()) if owner.row >= 0]
    rows += [owner.row for owner in reserved if owner.row >= 0]
    assert len(rows) == len(set(rows))
    assert sorted([*rows, *memory.free_rows]) == list(range(len(rows) + memory.num_free_rows))
    _check_references(memory, [*held.values(), *flying.values()], pinned, reserved)
    for queue in memory.queues.values():
        _check_queue(queue, held)
    for sequence in held.values():
        assert sequence.in_flight == sum(s is sequence for step in steps for s in step.sequences)
        assert sequence.num_checkpointing >= 0
        assert sequence.draft_blocks or not sequence.num_drafted
        assert sequence.row >= 0 or not sequence.draft_blocks
    if memory.suspended is not None:
        live = [sequence for sequence in memory.suspended.sequences if sequence.state != State.ENDED]
        assert live == list(memory.queues[memory.suspended.plan.model].suspended.values())
    interruptible = [step for step in in_flight.values() if step.plan.is_interruptible]
    assert not interruptible or len(in_flight) == 1 or interruptible == list(in_flight.values())[-1:]


def _check_references(
    memory: Allocator, sequences: list[Sequence], pinned: Iterable[PinnedBlocks], reserved: Iterable[Reserved]
) -> None:
    device, host = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for sequence in sequences:
        device[sequence.model] += sequence.blocks + sequence.draft_blocks
        host[sequence.model] += sequence.restore[1]
    moving = [(owner.on_host, owner.model, owner.blocks) for owner in pinned]
    moving += [(owner.on_host, owner.model, owner.blocks) for owner in reserved]
    for on_host, model, blocks in moving:
        (host if on_host else device)[model] += blocks
    for model, block in memory.compaction.references():
        device[model].append(block)
    for is_device, model, block in memory.host.references():
        (device if is_device else host)[model].append(block)
    for pool, expected in ((memory.pool, device), (memory.host.pool, host)):
        if pool is not None:
            _check_pool(pool, memory.queues, expected)
        else:
            assert not any(expected.values())


def _check_pool(pool: BlockPool, names: Iterable[str], expected: Mapping[str, list[int]]) -> None:
    """`expected`: the blocks of each model, one that has several references as often."""
    pool.check()
    for name in names:
        references = pool.references(name)
        counts = [0] * len(references)
        for block in expected.get(name, ()):
            counts[block] += 1
        assert references == counts, f"references of the blocks of {name}"


def _check_queue(queue: ModelQueue, held: Mapping[str, Sequence]) -> None:
    running = [sequence for of_class in queue.running for sequence in of_class.values()]
    waiting = [sequence for of_class in queue.waiting for sequence in of_class]
    for sequence in [*running, *queue.suspended.values()]:
        assert sequence.state == State.RUNNING and sequence.row >= 0
        assert sequence.capacity == len(sequence.blocks) * queue.shape.block_size
        assert len(sequence.host_blocks) <= len(sequence.hashes)
        if not sequence.is_spoilt:
            assert sequence.num_computed <= sequence.capacity
            assert sequence.num_computed < sequence.total <= sequence.max_total
    for sequence in waiting:
        assert sequence.state == State.WAITING and sequence.row < 0 and not sequence.blocks
    for sequence in (*queue.restoring.values(), *queue.restored.values()):
        assert sequence.state == State.RESTORING and sequence.row >= 0 and sequence.blocks
    for sequence in queue.leaving.values():
        assert sequence.state == State.LEAVING and (sequence.row >= 0) == bool(sequence.blocks)
        assert sequence.is_spoilt or sequence.num_computed < sequence.total
        assert sequence.handover != Handover.FROZEN or not sequence.in_flight
    for sequence in queue.all_held():
        assert (sequence.state == State.LEAVING) == (sequence.number in queue.leaving)
        assert sequence.handover != Handover.FROZEN or sequence.state == State.LEAVING
        assert held[sequence.request.request_id] is sequence
