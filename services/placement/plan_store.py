"""The plan as it is stored: written only over the version that was read last."""

from __future__ import annotations

import logging

from opentelemetry.trace import Tracer

from services.placement.metrics import PlacementMetrics
from shared.bus.interface import Bus, KeyValue, RevisionConflict, UnreadableEntry
from shared.messages.catalogue import PLANS
from shared.messages.cluster import PlacementPlan

logger = logging.getLogger(__name__)

PLAN_KEY = "current"


class PlanStore:
    def __init__(self, metrics: PlacementMetrics, tracer: Tracer) -> None:
        self.plan: PlacementPlan | None = None
        """Plan that was stored last, as far as is known here."""
        self._revision = 0
        self._is_certain = False
        """Whether what is stored is known: a write that failed may have had its effect."""
        self._metrics = metrics
        self._tracer = tracer
        self._bucket: KeyValue[PlacementPlan]

    async def open(self, bus: Bus) -> None:
        """Reads what is stored. Raises `BusError`."""
        self._bucket = await bus.key_value(PLANS)
        await self.refresh()

    async def refresh(self) -> None:
        """Reads what is stored where that is not certain. Raises `BusError`."""
        if not self._is_certain:
            try:
                entry = await self._bucket.get(PLAN_KEY)
            except UnreadableEntry as error:
                # Placement must lead nevertheless: who else writes one that can be read?
                logger.error(
                    "%s; a new plan is made, in which no instance is drained and models may change place", error
                )
                self._revision, self._is_certain = error.revision, True
                return
            self._revision = entry.revision if entry is not None else 0
            self.plan = entry.value if entry is not None else self.plan
            self._is_certain = True

    @property
    def current(self) -> PlacementPlan:
        """An empty one while there is none."""
        return self.plan or PlacementPlan(0, [])

    def node_ids(self) -> set[str]:
        """Those with a part of the plan."""
        return {instance.node_id for instance in self.plan.instances} if self.plan is not None else set()

    async def publish(self, new: PlacementPlan) -> bool:
        """False: another plan is stored than was thought; `plan` is that one now. Raises `BusError`."""
        with self._tracer.start_as_current_span("placement.publish_plan") as span:
            span.set_attribute("tideway.plan_version", new.version)
            self._is_certain = False
            try:
                if self._revision:
                    revision = await self._bucket.update(PLAN_KEY, new, self._revision)
                else:
                    revision = await self._bucket.create(PLAN_KEY, new)
            except RevisionConflict:
                # A write that was thought lost, or a server that lost its disk.
                await self.refresh()
                return False
        self.plan, self._revision, self._is_certain = new, revision, True
        self._metrics.num_plans.inc()
        num_models = len({spec.name for instance in new.instances for spec in instance.models})
        logger.info("plan %d: %d models on %d instances", new.version, num_models, len(new.instances))
        for name, reason in new.unplaced.items():
            logger.warning("model %r is not placed: %s", name, reason)
        return True
