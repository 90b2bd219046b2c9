"""SeaLLM's service monitor (section 3) as a part of the placement that leads: the log of requests, what is measured over an
interval of it, and its copy in JetStream.

    PLACEMENT_REQUESTS (the scheduler's rows) -> RequestLog -> REQUEST_LOG
    PLACEMENT_TRAFFIC -> ModelTraffic of each model

Rows are told until they are acknowledged, and stored before that, or as soon as NATS can: a restart or a change of leader
forgets none then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.placement.live_problem import measured_prediction
from services.placement.metrics import PlacementMetrics
from shared.bus.interface import Bus, BusError, KeyValue, ServiceError, Subscription
from shared.messages.admin import Done
from shared.messages.catalogue import PLACEMENT_REQUESTS, PLACEMENT_TRAFFIC, REQUEST_LOG
from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.messages.requests import ErrorCode
from shared.messages.traffic import (
    LEAST_INTERVAL_S,
    MAX_INTERVAL_S,
    GetTraffic,
    ModelTraffic,
    RequestRows,
    StoredTraffic,
    TrafficReply,
)
from shared.monitor.request_log import SLOT_S, RequestLog
from shared.monitor.summary import traffic_by_model
from shared.placement.stretches import evidence_s

if TYPE_CHECKING:
    from shared.placement.plan import Prediction
    from shared.placement.problem import Traffic

logger = logging.getLogger(__name__)

SHOWN_S = 60.0
"""Seconds that metrics cover."""
SHOW_INTERVAL_S = 5.0
"""Between two looks at them: with some ten thousand requests in the log each takes a tenth of a second."""
MAX_SEARCHED = 500_000
"""Requests of all the traffic that a search is given: arrays of them are made on the event loop, in a tenth of a second."""
FREED_SHARE = 0.25
"""Share of the log's time that is given up, from the oldest on, where the store is full."""


class PlacementMonitor:
    def __init__(
        self,
        bus: Bus,
        metrics: PlacementMetrics,
        models: Mapping[str, ModelSpec],
        is_leader: Callable[[], bool],
        slo_scale: float = 0.0,
        adapters: Mapping[str, AdapterSpec] | None = None,
    ) -> None:
        """`models`, `adapters`: those that are configured, as they are at each moment. `slo_scale`: of those without one of
        their own; 0: the default."""
        self._bus = bus
        self._metrics = metrics
        self._models = models
        self._adapters = {} if adapters is None else adapters
        self._is_leader = is_leader
        self._slo_scale = slo_scale
        self._wall_s = time.time() - bus.now()
        self._log = RequestLog(self.now())
        self._bucket: KeyValue[StoredTraffic]
        self._storing = asyncio.Lock()
        self._show_at = float("-inf")
        self._subscriptions: list[Subscription] = []

    def now(self) -> float:
        """Unix time, which does not jump while this placement leads."""
        return self._wall_s + self._bus.now()

    async def open(self) -> None:
        """Takes over what is stored, then serves. Raises `BusError`."""
        self._bucket = await self._bus.key_value(REQUEST_LOG)
        entries = await self._bucket.entries()
        self._log.load((entry.value for entry in entries.values()), self.now())
        self._subscriptions.append(await self._bus.serve(PLACEMENT_REQUESTS, self._on_requests))
        self._subscriptions.append(await self._bus.serve(PLACEMENT_TRAFFIC, self._on_get_traffic))
        logger.info("the service monitor has %d requests of before", self._log.num_requests)

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()

    # -------------------------------------------------------------------------------------------- what is measured

    def traffic(self, interval_s: float) -> Traffic:
        """What arrived in the last `interval_s` for the models that are configured."""
        bases = {name: spec.base for name, spec in self._adapters.items()}
        return self._log.traffic(self.now() - interval_s, self.now(), self._models, bases)

    def searched_s(self, window_s: float, all_s: float) -> tuple[float, float]:
        """Lengths of the times before now that a search is over, and that a plan of it is tried on: less than these where
        that would be too much."""
        now = self.now()
        since_s = self._log.since_s(now - all_s, now, MAX_SEARCHED)
        if since_s <= max(now - all_s, self._log.began_s):
            return window_s, all_s
        window_s = max(SLOT_S, min(window_s, (now - since_s) * window_s / evidence_s(window_s)))
        return window_s, max(window_s, now - since_s)

    def measured(self, interval_s: float) -> dict[str, ModelTraffic]:
        """By model: what its last `interval_s` were like. SLOs and normalised latencies are reckoned by `execution_s`."""
        now = self.now()
        scales = {name: spec.slo_scale or self._slo_scale for name, spec in sorted(self._models.items())}
        for name, adapter in sorted(self._adapters.items()):
            scales[name] = adapter.slo_scale or scales.get(adapter.base, self._slo_scale)
        return traffic_by_model(self._log, scales, now - interval_s, now)

    def prediction(self, interval_s: float) -> Prediction:
        """What was measured, in the form of what is predicted: an adapter's requests are its model's."""
        return measured_prediction(
            self.measured(interval_s), {name: spec.base for name, spec in self._adapters.items()}
        )

    def execution_s(self) -> dict[str, float]:
        """Mean execution time of each model's online requests over the whole log; without those that none is known of."""
        means = {name: self._log.mean_execution_s(name) for name in self._models}
        return {name: mean_s for name, mean_s in means.items() if mean_s}

    def show(self) -> None:
        """Shows the statistics to Prometheus, if that is due."""
        if self._bus.now() < self._show_at:
            return
        self._show_at = self._bus.now() + SHOW_INTERVAL_S
        self._metrics.show_log(self._log.num_requests, self._log.num_thinned, self._log.num_expired)
        for traffic in self.measured(SHOWN_S).values():
            self._metrics.show_traffic(traffic)

    # -------------------------------------------------------------------------------------------------- handlers

    async def _on_requests(self, told: RequestRows) -> Done:
        if not self._is_leader():
            raise ServiceError.of(ErrorCode.NOT_LEADER, "another placement leads")
        if told.num_dropped:
            logger.warning("%s had no room for %d rows of its requests", told.scheduler_id, told.num_dropped)
            self._metrics.num_dropped_rows.inc(told.num_dropped)
        self._log.add(told, self.now())
        try:
            await self.store()
        except BusError as error:
            logger.warning("requests are in the log and not stored yet, trying again: %s", error)
        return Done()

    async def _on_get_traffic(self, query: GetTraffic) -> TrafficReply:
        if not self._is_leader():
            raise ServiceError.of(ErrorCode.NOT_LEADER, "another placement leads")
        if not LEAST_INTERVAL_S <= query.interval_s <= MAX_INTERVAL_S:
            message = f"interval_s is {query.interval_s:g}: expected {LEAST_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
            raise ServiceError.of(ErrorCode.BAD_REQUEST, message, "interval_s")
        return TrafficReply(list(self.measured(query.interval_s).values()))

    # --------------------------------------------------------------------------------------------------- storing

    async def store(self) -> None:
        """What changed since the last call. Raises `BusError`; then it is due again."""
        async with self._storing:
            self._log.expire(self.now())
            await self._purge()
            changed = self._log.take_changed(self.now())
            left = list(changed)
            try:
                while left:
                    await self._bucket.put(left[-1], changed[left[-1]])
                    left.pop()
            except BaseException as error:
                self._log.keep_changed(left)
                if isinstance(error, BusError) and error.code is ErrorCode.OVERLOADED:
                    self._log.forget_oldest(FREED_SHARE)
                    await self._purge()
                raise

    async def _purge(self) -> None:
        while (slot := self._log.next_gone()) is not None:
            await self._bucket.purge(str(slot))
            self._log.purged(slot)
