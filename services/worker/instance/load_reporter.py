"""Reports of an instance, native or on another's engine, to the scheduler of how loaded it is, and when they are sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shared.bus.interface import Bus
from shared.engine.load_reports import (
    HEARTBEAT_S,
    MOST_DRIFT_INTERVAL_S,
    REPORT_INTERVAL_S,
    drift_interval_s,
)
from shared.messages.catalogue import LOAD_REPORTS
from shared.messages.cluster import LoadReport, ReportLoad
from shared.runtime.tasks import set_within


class LoadReporter:
    """Publishes a report at each piece of news, at most one every `REPORT_INTERVAL_S`; while requests only decode, as often
    as the load drifts; and at each heartbeat."""

    def __init__(self, bus: Bus, take: Callable[[], LoadReport]) -> None:
        """`take`: the next report."""
        self._bus = bus
        self._take = take
        self._changed = asyncio.Event()
        self._published_s = float("-inf")
        self._drift_s = MOST_DRIFT_INTERVAL_S

    def touch(self) -> None:
        """There is news: it is published soon."""
        self._changed.set()

    def on_asked(self, asked: ReportLoad) -> None:
        """Somebody looks on."""
        asyncio.get_running_loop().call_later(random.random() * asked.within_s, self.touch)

    def on_step(self, *, is_news: bool) -> None:
        """A step has ended, with news or with tokens alone."""
        if is_news or self._bus.now() - self._published_s >= self._drift_s:
            self._changed.set()

    def publish(self) -> None:
        """Publishes a report now."""
        self._published_s = self._bus.now()
        report = self._take()
        self._drift_s = drift_interval_s(report)
        self._bus.publish(LOAD_REPORTS, report)

    async def keep(self) -> None:
        """Publishes reports until it is cancelled."""
        while True:
            await set_within(self._changed, HEARTBEAT_S)
            self._changed.clear()
            self.publish()
            await asyncio.sleep(REPORT_INTERVAL_S)
