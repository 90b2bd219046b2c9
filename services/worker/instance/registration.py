"""An instance's entry in the registry, native or on another's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.bus.interface import Bus, BusError, KeyValue
from shared.engine.load_reports import HEARTBEAT_S
from shared.messages.catalogue import INSTANCES
from shared.messages.cluster import InstanceInfo
from shared.runtime.tasks import set_within

log = logging.getLogger(__name__)


class Registration:
    """The entry is written at each change and at each heartbeat, from `open` on, and deleted by `end`."""

    def __init__(self, bus: Bus, instance_id: str, info: Callable[[], InstanceInfo]) -> None:
        """`info`: what the entry is to say now."""
        self._bus = bus
        self._id = instance_id
        self._info = info
        self._changed = asyncio.Event()
        self._registry: KeyValue[InstanceInfo] | None = None

    async def open(self) -> None:
        """Finds the bucket. Raises `BusError`."""
        self._registry = await self._bus.key_value(INSTANCES)

    def touch(self) -> None:
        """The entry changed: it is written now rather than at the next heartbeat."""
        self._changed.set()

    async def keep(self) -> None:
        """Writes the entry until it is cancelled."""
        assert self._registry is not None, "open comes first"
        while True:
            self._changed.clear()
            try:
                await self._registry.put(self._id, self._info())
            except BusError as error:
                log.warning("could not write the registry entry: %s", error)
            await set_within(self._changed, HEARTBEAT_S)

    async def end(self) -> None:
        """Deletes the entry, so that others need not wait until it expires."""
        if self._registry is not None:
            try:
                await self._registry.delete(self._id)
            except BusError as error:
                log.warning("the registry entry was left to expire: %s", error)
