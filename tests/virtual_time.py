"""An asyncio event loop in virtual time: when nothing is ready, its clock jumps to the next timer instead of waiting.

For tests and simulations of code that only waits for timers and for itself (such as services on a `MemoryBus`): an hour of
timeouts takes milliseconds, and runs are repeatable. Sockets and subprocesses have no place here; functions for an
executor run inline and take no virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Tasks wait, but nothing is ready and no timer is set: nothing can ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: advances the clock of its loop by the time that the loop would have waited."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            if timeout is None:
                tasks = "\n".join(f"  {task!r}" for task in asyncio.all_tasks(self.loop))
                raise DeadlockError(f"nothing is ready and no timer is set at t={self.loop.time():.3f} s:\n{tasks}")
            self.loop.advance(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 and is in virtual seconds."""

    def __init__(self, limit_s: float = float("inf")) -> None:
        self._now_s = 0.0
        self._limit_s = limit_s
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        # Timers fire up to one resolution early, which takes up the rounding of `now + (when - now)`.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
        if self._now_s > self._limit_s:
            raise TimeoutError(f"not done within {self._limit_s} virtual seconds")

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(coroutine: Coroutine[Any, Any, T], *, limit_s: float = float("inf")) -> T:
    """Runs `coroutine` to its end in virtual time and returns its result; `TimeoutError` after `limit_s` virtual
    seconds, `DeadlockError` if it can never end."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_s)) as runner:
        return runner.run(coroutine)
