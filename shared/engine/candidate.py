"""A model that could lead the next step, as the ordering policy sees it (`ModelView`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import PriorityClass, Sequence


class Candidate:
    """Model with runnable sequences of one rank."""

    __slots__ = ("_memory", "limit_s", "priority_class", "queue")

    def __init__(self, memory: Allocator, queue: ModelQueue, priority_class: PriorityClass) -> None:
        self._memory = memory
        self.queue = queue
        self.priority_class = priority_class
        self.limit_s = math.inf
        """Most seconds of an offline step beside online work: what the objectives leave."""

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def last_planned_step(self) -> int:
        return self.queue.last_planned_step

    @property
    def pool_share(self) -> float:
        pool = self._memory.pool
        return pool.num_used(self.name) / (self.queue.shape.blocks_per_merged * pool.num_merged)

    @property
    def num_short(self) -> int:
        is_short = self._memory.stuck_online is not None and self._memory.num_free_rows > 0
        return len(self.queue.waiting[self.priority_class]) if is_short else 0

    def runnable(self) -> Iterable[Sequence]:
        return self.queue.runnable(self.priority_class)

    def streams(self, now: float) -> tuple[float, float]:
        return self.queue.streams(now)
