"""Autoscaling in the scheduler: the cluster's view in, calls to placement out; off unless `settings.autoscale`.

    check_settings(settings)                                         at the start of the process; SettingsError
    scaler.due(cluster, queued, now, replicas, work, pressure)       about once a second: the actions
    call_of(action)                                                  the PLACEMENT_... endpoint, and what it is asked
    scaler.answered(released, now)                                   what placement said

`cluster`: the ClusterView. `queued`: online requests in the global queue, per model. `replicas`: of the models that are to
be on so many instances. `work`: `Dispatcher.prompt_work`; `pressure`: `GrantBook.pressure`. What comes of an action is seen
in the registry. A new leader does not know what the one before has begun: it measures for a period before it does anything.
Placement remembers which instances it drained for scaling, and brings those back first when there should be more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shared.messages.admin import DrainInstance, ScaleInstances
from shared.messages.catalogue import PLACEMENT_DRAIN_INSTANCE, PLACEMENT_SCALE_INSTANCES
from shared.messages.channels import Endpoint
from shared.messages.cluster import PlacementPlan
from shared.policies.autoscaling import Autoscaling, Fleet, Grow, Keep, Member, ScalingBounds, Shrink
from shared.policies.catalogue import SCALING_POLICIES
from shared.runtime.settings import SchedulerSettings, SettingsError
from shared.scheduling.actions import CancelDrain, DrainAction, ScaleUp, ScalingAction
from shared.scheduling.cluster import ClusterView, InstanceState

NOTHING: Mapping[str, float] = {}
CALL_TIMEOUT_S = 15.0
"""Placement may have to ask node agents, or the API server of Kubernetes."""


def call_of(action: ScalingAction) -> tuple[Endpoint[Any, PlacementPlan], ScaleInstances | DrainInstance]:
    """How placement is asked for it."""
    match action:
        case ScaleUp(num_instances):
            return PLACEMENT_SCALE_INSTANCES, ScaleInstances(num_instances, is_for_scaling=True)
        case DrainAction(instance_id):
            return PLACEMENT_DRAIN_INSTANCE, DrainInstance(instance_id, is_for_scaling=True)
        case CancelDrain(instance_id):
            return PLACEMENT_DRAIN_INSTANCE, DrainInstance(instance_id, is_undone=True, is_for_scaling=True)


def check_settings(settings: SchedulerSettings) -> None:
    if settings.scale_low >= settings.scale_high:
        raise SettingsError(f"TIDEWAY_SCALE_LOW={settings.scale_low:g}: expected less than TIDEWAY_SCALE_HIGH")
    if settings.max_instances < 0 or 0 < settings.max_instances < settings.min_instances:
        raise SettingsError(
            f"TIDEWAY_MAX_INSTANCES={settings.max_instances}: expected 0 or TIDEWAY_MIN_INSTANCES or more"
        )


class Scaler:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._policy: Autoscaling | None = None
        if settings.autoscale:
            bounds = ScalingBounds(
                settings.scale_low,
                settings.scale_high,
                settings.scale_period_s,
                settings.min_instances,
                settings.max_instances,
                settle_s=settings.scale_period_s,
            )
            self._policy = SCALING_POLICIES.find(settings.scaling_policy)(bounds)
        self._own_drains: set[str] = set()

    def due(
        self,
        cluster: ClusterView,
        queued: Mapping[str, int],
        now: float,
        replicas: Mapping[str, int],
        work: Mapping[str, float] = NOTHING,
        pressure: Mapping[str, float] = NOTHING,
    ) -> list[ScalingAction]:
        if self._policy is None:
            return []
        match self._policy.decide(self._fleet(cluster, queued, replicas, work, pressure), now):
            case Grow(num_instances):
                return [ScaleUp(num_instances)]
            case Shrink(instance_id):
                return [DrainAction(instance_id)]
            case Keep(instance_id):
                return [CancelDrain(instance_id)]
        return []

    def answered(self, released: Sequence[str] | None, now: float) -> None:
        if released is not None:
            # Not always the instance that was asked for: Kubernetes takes the last pod of a StatefulSet.
            self._own_drains.update(released)
        elif self._policy is not None:
            self._policy.refused(now)

    def _fleet(
        self,
        cluster: ClusterView,
        queued: Mapping[str, int],
        replicas: Mapping[str, int],
        work: Mapping[str, float],
        pressure: Mapping[str, float],
    ) -> Fleet:
        members: list[Member] = []
        starting, failed, leaving, known = [], [], [], set()
        named: set[str] = set()
        num_placed: Counter[str] = Counter()
        for instance_id, state in cluster:
            if not state.is_alive:
                continue
            known.add(instance_id)
            if state.is_draining:
                if instance_id in self._own_drains:
                    leaving.append(instance_id)
                continue
            named |= {model.name for model in state.info.models}
            num_placed.update(model.name for model in state.info.models if model.state in ("loading", "ready"))
            if state.report is not None and state.ready:
                members.append(_member(instance_id, state))
            elif state.ready or any(model.state == "loading" for model in state.info.models):
                starting.append(instance_id)
            else:
                failed.append(instance_id)
        # Until its drain shows in the registry an instance is a member, whose drain must not be forgotten.
        self._own_drains &= known
        served = {model for member in members for model in member.models}
        waiting = {model: number for model, number in queued.items() if number}
        settled = {model for model, number in replicas.items() if num_placed[model] >= number}
        return Fleet(
            members, starting, leaving, (named | waiting.keys()) - served, waiting, settled, failed, work, pressure
        )


def _member(instance_id: str, state: InstanceState) -> Member:
    load, report = state.load, state.report
    assert report is not None
    scaling_freeness = report.scaling_freeness
    # Models differ in the tokens of a merged block: the pool counts as what it holds of the largest blocks.
    per_merged = min(served.tokens_per_merged for served in state.ready.values())
    freeness = -math.inf if math.isnan(scaling_freeness) else scaling_freeness
    return Member(
        instance_id,
        frozenset(state.ready),
        freeness,
        load.num_running,
        load.num_requests,
        float(per_merged * state.info.num_merged),
        report.prompts_s / report.ttft_s if report.ttft_s else 0.0,
        load.residents,
        report.tpot_s,
    )
