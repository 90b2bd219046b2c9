"""Work in the background of the event loop, and waits that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Set
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class TaskSet:
    """Tasks: kept until they end, their errors logged, but for those that are `told` to somebody else."""

    def __init__(self, *, told: type[Exception] | None = None) -> None:
        self._told = told
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name or getattr(work, "__qualname__", ""))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._told is None or not isinstance(error, self._told):
            log.error("task %r failed", task.get_name(), exc_info=error)

    def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_all(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def end_all(self, but: Set[asyncio.Task[Any] | None] = frozenset()) -> None:
        """Cancels them and waits until they have ended, those too that begin meanwhile; not the one that calls, nor those
        in `but`."""
        while tasks := self._tasks - {asyncio.current_task()} - but:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event is set, now or within `timeout_s`. (`asyncio.wait_for` may lose a cancellation that comes together
    with the event; `asyncio.timeout` does not.)"""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def true_within(is_true: Callable[[], bool], changed: asyncio.Event, timeout_s: float) -> bool:
    """Whether it is true, now or within `timeout_s`. `changed`: set whenever it may have become so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_true():
                changed.clear()
                await changed.wait()
    return is_true()
