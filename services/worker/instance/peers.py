"""The other instances, as far as somebody asks for them.

Each writes its registry entry every second, and each that watches hears of all the others: a thousand that always watched
would send each other a million messages a second. So the registry is watched only while there is something to move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shared.bus.interface import Bus, BusError, Watch
from shared.messages.catalogue import INSTANCES
from shared.messages.cluster import InstanceInfo
from shared.runtime.tasks import set_within

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""Nobody has asked, and nothing needs it, for so long: then the watch ends."""

RETRY_S = 1.0
"""After the watch could not begin."""


class Peers:
    """`on_change(instance_id, info)`: as of a watch, while there is one; at its begin for all that are there.
    `is_needed()`: whether it must go on, asked or not."""

    def __init__(
        self, bus: Bus, on_change: Callable[[str, InstanceInfo | None], None], is_needed: Callable[[], bool]
    ) -> None:
        self._bus = bus
        self._on_change = on_change
        self._is_needed = is_needed
        self._watch: Watch[InstanceInfo] | None = None
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._asked_s = 0.0

    @property
    def is_watching(self) -> bool:
        return self._watch is not None

    def entries(self) -> Mapping[str, InstanceInfo]:
        """The registry as it stands; nothing until the watch is there, which begins now at the latest."""
        self._asked_s = self._bus.now()
        if self._task is None or self._task.done():
            self._opened.clear()
            self._task = asyncio.create_task(self._keep(), name="peers")
        return {} if self._watch is None else self._watch.entries

    async def known(self, timeout_s: float) -> None:
        """Until `entries` tells of all, for `timeout_s` at most."""
        self.entries()
        await set_within(self._opened, timeout_s)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        try:
            watch = await (await self._bus.key_value(INSTANCES)).watch(self._on_change)
        except BusError as error:
            log.warning("cannot see the other instances: %s", error)
            self._opened.set()
            await asyncio.sleep(RETRY_S)
            return
        self._watch = watch
        self._opened.set()
        try:
            while (left_s := self._asked_s + IDLE_S - self._bus.now()) > 0:
                await asyncio.sleep(left_s)
                if self._is_needed():
                    self._asked_s = self._bus.now()
        finally:
            self._watch = None
            await watch.stop()
