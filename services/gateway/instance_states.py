"""What is shown of instances: the registry's entries, and what they reported of their load."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.gateway.cluster_loads import HeardLoad
from services.gateway.context import GatewayContext
from shared.messages.admin import InstanceLoad, InstanceModel, InstanceState
from shared.messages.cluster import InstanceInfo, ModelLoad


def instance_states(context: GatewayContext, loads: Mapping[str, HeardLoad]) -> list[InstanceState]:
    """Of those alive. `loads`: as far as they were heard."""
    now = context.bus.now()
    return [_instance(info, loads.get(instance_id), now) for instance_id, info in sorted(context.catalog.alive.items())]


def _instance(info: InstanceInfo, heard: HeardLoad | None, now: float) -> InstanceState:
    return InstanceState(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        node_id=info.node_id,
        state=info.state,
        device=info.device,
        pid=info.pid,
        models=_models(info, heard),
        num_merged=info.num_merged,
        merged_bytes=info.merged_bytes,
        metrics_port=info.metrics_port,
        kv_address=info.kv_address,
        migration=bool(info.kv_address),
        load=None if heard is None else _load(info, heard, now),
    )


def _models(info: InstanceInfo, heard: HeardLoad | None) -> list[InstanceModel]:
    """Counts are those of the last report, else of the registry."""
    reported: dict[str, ModelLoad] = {} if heard is None else {load.model: load for load in heard.report.models}
    return [
        InstanceModel(
            name=loaded.name,
            state=loaded.state,
            max_model_len=loaded.max_model_len,
            page_tokens=loaded.page_tokens,
            slots_per_merged=loaded.slots_per_merged,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            error=loaded.error,
            cost_model=loaded.cost_model,
        )
        for loaded in info.models
        for counts in [reported.get(loaded.name, loaded)]
    ]


def _load(info: InstanceInfo, heard: HeardLoad, now: float) -> InstanceLoad:
    report = heard.report
    used = 1.0 - report.free_merged / info.num_merged if info.num_merged else None
    return InstanceLoad(
        age_s=now - heard.heard_s,
        pool_use=None if used is None else min(1.0, max(0.0, used)),
        num_running=report.num_running,
        num_waiting=sum(load.num_waiting for load in report.models),
        num_offline=sum(load.num_offline for load in report.models),
        num_high=report.num_high,
        dispatch_freeness=report.dispatch_freeness if math.isfinite(report.dispatch_freeness) else None,
        migration_freeness=report.migration_freeness if math.isfinite(report.migration_freeness) else None,
        num_moving_out=report.num_moving_out,
        num_moving_in=report.num_moving_in,
        num_moved_out=report.num_moved_out,
        num_moved_in=report.num_moved_in,
    )
