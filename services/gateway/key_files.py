"""Files of keys, read again when they change: a file that cannot be used is told, and the keys there were stay."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from services.gateway.admission import Admission, read_admin_keys, read_keys
from services.gateway.metrics import GatewayMetrics
from shared.settings import GatewaySettings, SettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_S = 1.0


class KeyFiles:
    def __init__(self, settings: GatewaySettings, admission: Admission, metrics: GatewayMetrics) -> None:
        """The keys in `admission` are those of the files now."""
        self._settings = settings
        self._admission = admission
        self._metrics = metrics
        self._seen = self._marks()

    async def watch_forever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            marks, seen = await asyncio.to_thread(self._marks), self._seen
            self._seen = marks
            if marks[0] != seen[0]:
                await self._replace("API keys", read_keys, self._admission.set_keys)
            if marks[1] != seen[1]:
                await self._replace("admin keys", read_admin_keys, self._admission.set_admin_keys)

    def _marks(self) -> list[tuple[int, int, int] | None]:
        """What changes with a file; None: it is not there."""
        marks: list[tuple[int, int, int] | None] = []
        for name in (self._settings.api_keys_file, self._settings.admin_keys_file):
            try:
                found = os.stat(name)
            except OSError:
                marks.append(None)
            else:
                marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return marks

    async def _replace(
        self, kind: str, read: Callable[[GatewaySettings], dict[str, T]], put: Callable[[dict[str, T]], None]
    ) -> None:
        try:
            keys = await asyncio.to_thread(read, self._settings)
        except SettingsError as error:
            logger.error("the %s stay as they were: %s", kind, error)
            self._metrics.key_reloads.labels("refused").inc()
            return
        put(keys)
        self._metrics.key_reloads.labels("read").inc()
        logger.info("the %s were read again: %d", kind, len(keys))
