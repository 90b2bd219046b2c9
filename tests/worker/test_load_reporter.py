"""How often an instance reports its load, on a real NATS."""

from __future__ import annotations

import asyncio
import time

from services.worker.instance.load_reporter import LoadReporter
from shared.bus.nats_bus import NatsBus
from shared.engine.load import InstanceLoad
from shared.engine.load_reports import MOST_DRIFT_INTERVAL_S, LoadReports
from shared.messages.catalogue import LOAD_REPORTS
from shared.messages.cluster import LoadReport
from shared.runtime.settings import BusSettings

IDLE = InstanceLoad(dispatch_freeness=1.0, free_merged=1.0, num_running=0, models=())
DEADLINE_S = 20.0


async def test_news_is_reported_at_once_and_decoding_now_and_then(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, service="instance", service_id="node-0")
    peer = await NatsBus.connect(nats_settings, service="test", service_id="peer")
    heard: list[LoadReport] = []
    await peer.subscribe(LOAD_REPORTS, heard.append)
    reports = LoadReports("node-0", "i")
    reporter = LoadReporter(bus, lambda: reports.take(IDLE, 0, 0))
    task = asyncio.create_task(reporter.keep())
    try:
        began_s = time.monotonic()
        while len(heard) < 3:
            reporter.on_step(is_news=False)
            await asyncio.sleep(0.005)
            assert time.monotonic() - began_s < DEADLINE_S
        assert time.monotonic() - began_s >= 2 * MOST_DRIFT_INTERVAL_S * 0.9
        num_heard, began_s = len(heard), time.monotonic()
        while len(heard) < num_heard + 10:
            reporter.on_step(is_news=True)
            await asyncio.sleep(0.005)
            assert time.monotonic() - began_s < 10 * MOST_DRIFT_INTERVAL_S, "no sooner than without news"
    finally:
        task.cancel()
        await bus.close()
        await peer.close()
