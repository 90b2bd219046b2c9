"""What other threads may ask of an engine that a loop drives: the lower half of engine_loop.py.

Each call takes the lock, which is never held longer than one plan or apply (well under a millisecond), and wakes the loop
where there may be something new to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.cost_model import KnownCosts
from shared.engine.counters import EngineCounters
from shared.engine.engine import Engine
from shared.engine.load import InstanceLoad
from shared.engine.moving import MoveCandidate, PinnedBlocks, Reservation
from shared.engine.sequence import State
from shared.messages.cluster import ExecutionStatistics
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import ErrorInfo, GenerationRequest, HeldRequest


class EngineCalls:
    def __init__(self, engine: Engine, clock: Callable[[], float], interrupt: Callable[[int], None]) -> None:
        """`interrupt(step_id)` stops a step that runs, from any thread."""
        self._engine = engine
        self._clock = clock
        self._interrupt_step = interrupt
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.leaving_models: frozenset[str] = frozenset()
        """Models that are to lose their requests: while there are any, only those requests leave."""

    def now(self) -> float:
        return self._clock()

    @contextmanager
    def locked(self) -> Iterator[Engine]:
        """The engine, for as long as nobody else may touch it: be quick."""
        with self._lock:
            yield self._engine

    @contextmanager
    def _changing(self) -> Iterator[Engine]:
        """Likewise, and then the loop looks again."""
        with self._lock:
            yield self._engine
        self._wake.set()

    def _interrupt(self, now: float) -> None:
        """Under the lock, so that no later step is planned before the executor knows."""
        step_id = self._engine.take_interrupt(now)
        if step_id is not None:
            self._interrupt_step(step_id)

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        with self._changing() as engine:
            now = self._clock()
            refused = engine.submit(request, now)
            self._interrupt(now)
        return refused

    def cancel(self, request_id: str) -> None:
        with self._changing() as engine:
            engine.cancel(request_id, self._clock())

    def held_requests(self) -> list[HeldRequest]:
        """One that is leaving counts until it has left."""
        with self._lock:
            return [
                HeldRequest(
                    sequence.request.request_id,
                    sequence.request.gateway_id,
                    sequence.request.epoch,
                    sequence.model,
                    sequence.num_tokens,
                    sequence.state == State.RUNNING or (sequence.state == State.LEAVING and bool(sequence.blocks)),
                    sequence.is_online,
                )
                for sequence in self._engine.all_held()
            ]

    def held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        with self._lock:
            sequence = self._engine.held(request_id)
            return None if sequence is None else sequence.request.epoch

    def num_held(self, model: str | None = None) -> int:
        with self._lock:
            return sum(1 for sequence in self._engine.all_held() if model is None or sequence.model == model)

    # ------------------------------------------------------------------------------------------------- state

    def load(self) -> InstanceLoad:
        with self._lock:
            return self._engine.load(self._clock())

    def cost_models(self) -> dict[str, KnownCosts]:
        """Of each model that has one."""
        with self._lock:
            return self._engine.cost_models()

    @property
    def counters(self) -> EngineCounters:
        """They go on growing; to be read only."""
        return self._engine.counters

    def used_share(self) -> float:
        """Share of the KV pool that sequences hold, 0 to 1."""
        with self._lock:
            return self._engine.pool.used_merged() / self._engine.pool.num_merged

    def host_used_share(self) -> float:
        """Share of the host memory that checkpoints hold, 0 to 1."""
        with self._lock:
            pool = self._engine.planner.host.pool
            return 0.0 if pool is None else pool.used_merged() / pool.num_merged

    def set_statistics(self, statistics: list[ExecutionStatistics]) -> None:
        with self._lock:
            for of_model in statistics:
                self._engine.set_statistics(of_model)

    def clear_prefix_cache(self) -> None:
        with self._lock:
            self._engine.clear_prefix_cache()

    # ----------------------------------------------------- moves: see `Engine` (shared/engine/moves.py) for each

    def move_candidates(self, include_offline: bool = False) -> list[MoveCandidate]:
        leaving = self.leaving_models
        with self._lock:
            candidates = self._engine.move_candidates(self._clock(), include_offline or bool(leaving))
        return [found for found in candidates if not leaving or found.request.model in leaving]

    def pin(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        with self._lock:
            return self._engine.pin(request_id, first_block)

    def unpin(self, pinned: PinnedBlocks) -> None:
        with self._changing() as engine:
            engine.unpin(pinned)

    def take_out(self, request_id: str) -> bool:
        with self._changing() as engine:
            return engine.take_out(request_id, self._clock())

    def pin_rest(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        with self._lock:
            return self._engine.pin_rest(request_id, first_block)

    def seal(self, request_id: str) -> bool:
        with self._lock:
            return self._engine.seal(request_id)

    def put_back(self, request_id: str, epoch: int | None = None) -> None:
        with self._changing() as engine:
            now = self._clock()
            engine.put_back(request_id, now, epoch)
            self._interrupt(now)

    def drop_moved(self, request_id: str) -> bool:
        with self._changing() as engine:
            return engine.drop_moved(request_id, self._clock())

    def end_move(self, request_id: str) -> None:
        with self._lock:
            self._engine.end_move(request_id, self._clock())

    def reserve(self, query: PreAllocate) -> Reservation | ErrorInfo:
        with self._changing() as engine:
            return engine.reserve(query, self._clock())

    def busy_s(self) -> float:
        with self._lock:
            return self._engine.busy_s(self._clock())

    def adopt(self, commit: Commit) -> ErrorInfo | None:
        """An offline step that runs gives way to an online request."""
        with self._changing() as engine:
            now = self._clock()
            refused = engine.adopt(commit, now)
            self._interrupt(now)
        return refused

    def release(self, migration_id: str) -> None:
        with self._changing() as engine:
            engine.release(migration_id)
