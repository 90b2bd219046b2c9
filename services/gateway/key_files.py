"""Files of keys, read again when they change: a file that cannot be used is told, and the keys there were stay."""

from __future__ import annotations

import asyncio
import logging
import os

from services.gateway.admission import Admission, read_admin_keys, read_keys
from services.gateway.metrics import GatewayMetrics
from shared.settings import GatewaySettings, SettingsError

logger = logging.getLogger(__name__)

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
            marks = await asyncio.to_thread(self._marks)
            if marks != self._seen:
                self._seen = marks
                await self._read()

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

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(read_keys, self._settings)
            admin_keys = await asyncio.to_thread(read_admin_keys, self._settings)
            if not self._admission.is_open and not keys:
                raise SettingsError("there would be no API key left, and everybody could enter")
            if self._admission.has_admin_keys and not admin_keys:
                raise SettingsError("there would be no admin key left")
        except SettingsError as error:
            logger.error("the keys stay as they were: %s", error)
            self._metrics.key_reloads.labels("refused").inc()
            return
        self._admission.set_keys(keys, admin_keys)
        self._metrics.key_reloads.labels("read").inc()
        logger.info("keys were read again: %d API keys, %d admin keys", len(keys), len(admin_keys))
