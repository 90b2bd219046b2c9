"""MuxServe's placement (`shared.placement.baselines.muxserve`) in virtual time: each unit is a `SpatialGroup` with the KV
pool that placement reckons, under a problem's traffic.

    outcome = simulate(problem, muxserve(problem))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from shared.placement.baselines import NoPlacement, Unit, needs_of
from shared.placement.memory import Memory
from shared.placement.problem import Problem
from shared.policies.multiplexing import UNITS, Units
from shared.simulation.deployment import (
    Outcome,
    jobs_of,
    measured,
    models_of,
    node_of,
    requests_of,
    tell_progress,
)
from shared.simulation.events import Events
from shared.simulation.fleet import PATIENCE_S
from shared.simulation.itl import ItlHistogram
from shared.simulation.spatial import SpatialGroup, SpatialModel, submit


class SplitKv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MuxServe's KV cache, whose blocks are of one head of one layer."""

    block_size: Annotated[int, Meta(ge=1)] = 16
    """Tokens."""
    overhead: Annotated[float, Meta(ge=1)] = 1.02
    """Factor on steps for splitting KV: block tables that are sent whole are 1 % (`python -m bench.sharing kv`), and as
    much again for reads of less locality (assumed: SeaLLM's figure 9 shows an overhead, the text has no number)."""


def deploy(
    events: Events,
    problem: Problem,
    units: Sequence[Unit],
    kv: SplitKv | None = None,
    *,
    max_rows: int = 256,
    overlaps: bool = True,
    interference: float = 0.0,
) -> dict[str, SpatialGroup]:
    """Groups by model. `overlaps`: else each job has all compute units, so there is one at a time; `interference`: as for
    `SpatialGroup`. Raises `NoPlacement` where a pool does not hold a longest request of each of its models."""
    kv, needs, memory, groups = kv or SplitKv(), needs_of(problem), Memory(problem), dict[str, SpatialGroup]()
    for unit in units:
        node, size = node_of(problem, unit.group), unit.group.num_ranks
        held = models_of(problem, unit.group)
        geometry = memory.pool(unit.group.models, node, size)
        models = [
            SpatialModel(
                name=model.name, cost_model=model.costs[node.kind, size],
                units=unit.units[model.name] if overlaps else Units(UNITS, UNITS),
                block_size=kv.block_size, block_bytes=model.block_bytes * kv.block_size // model.block_size,
                max_model_len=model.max_model_len, demand=needs[model.name].rate_rps * model.block_bytes,
            )
            for model in held
        ]  # fmt: skip
        try:
            group = SpatialGroup(
                events, models, geometry.merged_bytes * geometry.num_merged, overhead=kv.overhead, max_rows=max_rows,
                interference=interference,
            )  # fmt: skip
        except ValueError as error:
            raise NoPlacement(f"{unit.group.instance_id}: {error}, each a request of its max_model_len") from None
        groups |= dict.fromkeys(unit.group.models, group)
    return groups


def simulate(
    problem: Problem,
    units: Sequence[Unit],
    kv: SplitKv | None = None,
    *,
    max_rows: int = 256,
    patience_s: float = PATIENCE_S,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Simulates as `deployment.simulate` does; offline requests are not sent. Raises `NoPlacement`."""
    events, interval_s = Events(), problem.traffic.interval_s
    groups = deploy(events, problem, units, kv, max_rows=max_rows)
    longest = {model.name: model.max_model_len for model in problem.models}
    rows, jobs = jobs_of(problem.traffic, longest, has_offline=False)
    records = submit(groups, jobs)
    tell_progress(events, interval_s, on_progress)
    is_over = events.run(
        lambda: events.now >= interval_s and not any(group.num_open for group in groups.values()),
        interval_s + patience_s,
    )
    seconds = max(events.now, interval_s)
    numbers = np.full(problem.traffic.num_requests, -1)
    numbers[rows] = np.arange(len(rows))
    busy_s = {unit.group.instance_id: sum(groups[unit.group.models[0]].busy_s.values()) for unit in units}
    device_s = {name: groups[name].busy_s[name] * unit.group.num_ranks for unit in units for name in unit.group.models}
    requests = requests_of(problem, jobs, records, numbers, events.now)
    itl = {name: groups[name].itl[name] for name in groups}
    found = measured(problem, requests, busy_s, device_s, seconds, itl)
    return Outcome(requests, found, is_over, ItlHistogram.merged(itl.values()))
