"""Prompts that wait here and cannot meet their objectives: another instance may begin them in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from typing import NamedTuple

from shared.costs.model import prompt_s
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue
from shared.engine.sequence import Sequence


class LatePrompt(NamedTuple):
    sequence: Sequence
    starts_s: float
    """Predicted time until it is begun here."""


def late_prompts(queues: Iterable[ModelQueue], steps_s: float, now: float) -> Iterator[LatePrompt]:
    """Online sequences that nothing was computed of and whose first token is predicted to come after it is due, in the order
    of their ranks and arrivals. `steps_s`: until the steps in flight end. None without a cost model or an objective."""
    known = [queue for queue in queues if queue.cost_model is not None]
    begun = chain.from_iterable(_begun(queue) for queue in known)
    starts_s = steps_s + sum(_prompt_s(queue, sequence) for queue, sequence in begun)
    for priority_class in ONLINE_CLASSES:
        waiting = ([(queue, sequence) for sequence in queue.waiting[priority_class]] for queue in known)
        for queue, sequence in merge(*waiting, key=lambda pair: pair[1].arrived_s):
            own_s = _prompt_s(queue, sequence)
            is_new = sequence.first_token_s is None and not sequence.host_blocks
            if is_new and now + starts_s + own_s > sequence.ttft_due_s:
                yield LatePrompt(sequence, starts_s)
            starts_s += own_s


def first_token_s(memory: Allocator, sequence: Sequence, begins_s: float) -> float | None:
    """Predicted time of the first token of one that waits here, or is to, if its prompt is begun after `begins_s`. What
    the prefix cache has of it is not computed. None without a cost model."""
    queue, page = memory.queues[sequence.model], sequence.block_size
    if queue.cost_model is None:
        return None
    cached = memory.pool.find(queue.name, sequence.extend_hashes(sequence.num_reusable // page, page, queue.root))
    num_cached = page * len(cached)
    return begins_s + prompt_s(queue.cost_model.prompt_cost, sequence.total - num_cached, num_cached)


def _begun(queue: ModelQueue) -> Iterator[tuple[ModelQueue, Sequence]]:
    running = chain.from_iterable(queue.running[priority_class].values() for priority_class in ONLINE_CLASSES)
    restored = (sequence for sequence in queue.restored.values() if sequence.is_online)
    return ((queue, sequence) for sequence in chain(running, restored) if sequence.total - sequence.num_computed > 1)


def _prompt_s(queue: ModelQueue, sequence: Sequence) -> float:
    assert queue.cost_model is not None
    num_left = sequence.total - sequence.num_computed
    return prompt_s(queue.cost_model.prompt_cost, num_left, sequence.num_computed)
