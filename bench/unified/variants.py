"""The whole system, and the same with one part of it switched off at a time; what is compared, as a table. Pure.

| paper | parts |
|---|---|
| SeaLLM | several models on a group, the order by doubling budgets, placement that follows the traffic |
| none | requests of a model that gather on few of the instances that it shares |
| ConServe | batches in the background, within what the objectives leave, offline steps that are suspended |
| Llumnix | requests that move while they run |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from bench.fidelity.workloads import MIXES
from bench.reporting import table_of
from shared.placement.baselines import alpaserve, dedicated, muxserve
from shared.placement.estimator import estimate
from shared.placement.plan import DEFAULT_SLO_SCALE, Plan, plan_of
from shared.placement.problem import Problem
from shared.placement.search import search
from shared.simulation.itl import Itl

POPULARITY = {"small": 4.0, "medium": 2.0, "large": 1.0}
"""Shares of requests. Where all models are asked for alike, instances of one model each have the largest batches: nothing
is left to share."""
MIX = msgspec.structs.replace(MIXES[1], models=POPULARITY)
"""Mix of three models on three instances."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    placement: Literal["search", "dedicated", "alpaserve", "muxserve"] = "search"
    """Whose. Dedicated: each model has instances of its own on as many devices; live, search begins with all models on all
    instances."""
    harvests: bool = True
    """Batches run in the background; else they wait for another time."""
    co_serving: str = "slo"
    interruption: str = "suspend"
    migration: str = "auto"
    order_policy: str = "doubling_budget"
    dispatch_policy: str = "first_token"
    is_adaptive: bool = True
    """The placement follows the traffic."""
    is_interval_fixed: bool = False
    """Whether the interval stays; else it becomes shorter and longer."""
    least_share: float = 0.25
    """Share of the KV pool that is divided evenly over an instance's models; 1: fixed partitions."""


WHOLE = Variant(name="all parts")
VARIANTS = (
    WHOLE,
    Variant(name="no sharing: dedicated instances", placement="dedicated", is_adaptive=False),
    Variant(name="first come, first served", order_policy="fcfs"),
    Variant(name="to the freest instance, whatever model", dispatch_policy="freeness"),
    Variant(name="no adaptive replacement", is_adaptive=False),
    Variant(name="no migration", migration="off"),
    Variant(name="no harvest: batches wait", harvests=False),
    Variant(name="no SLO budget for batches", co_serving="priority_only"),
    Variant(name="no suspension", interruption="off"),
    Variant(
        name="none of the parts", placement="dedicated", is_adaptive=False, order_policy="fcfs",
        dispatch_policy="freeness", migration="off", co_serving="priority_only", interruption="off",
    ),
)  # fmt: skip
BASELINES = (
    Variant(
        name="as AlpaServe: its placement, first come first served, nothing moves", placement="alpaserve",
        is_adaptive=False, order_policy="fcfs", dispatch_policy="fewest_requests", migration="off",
        co_serving="priority_only", interruption="off",
    ),
    Variant(
        name="as MuxServe, in turn: its placement, round robin, nothing moves", placement="muxserve", is_adaptive=False,
        order_policy="round_robin", dispatch_policy="fewest_requests", migration="off", co_serving="priority_only",
        interruption="off",
    ),
    Variant(name="placement at fixed intervals", is_interval_fixed=True),
    Variant(name="round robin", order_policy="round_robin"),
    Variant(name="fixed partitions of KV", least_share=1.0),
)  # fmt: skip
"""Others, as far as settings (docs/design/policies.md) and a plan make the system like them, and parts of others in the
place of one; only where they are asked for. MuxServe's models share a device's cores at the same time, which runs in
bench/sharing alone."""


def placed(variant: Variant, problem: Problem) -> Plan:
    """Raises `NoPlacement`."""
    match variant.placement:
        case "dedicated":
            return dedicated(problem, estimate)
        case "alpaserve":
            return alpaserve(problem, partial(estimate, order="fcfs"))
        case "muxserve":
            return plan_of(unit.group for unit in muxserve(problem))
    return search(problem).plan


class Online(msgspec.Struct, frozen=True):
    """An online request, as its user saw it. Seconds; inf: never."""

    latency_s: float
    ttft_s: float
    tpot_s: float
    """nan: of one token."""
    silence_s: float
    """The longest time between two of its tokens."""
    execution_s: float
    """Mean of its model."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a variant, over its runs."""

    variant: str
    num_requests: int
    num_failed: int
    """Without their answer when the run was over."""
    ttft_p99_s: float
    tpot_p99_s: float
    itl_p50_s: float
    """Median gap before each token of online streams after the first."""
    itl_p99_s: float
    itl_max_s: float
    normalised_latency: float
    attainment: float
    """Share that took at most `DEFAULT_SLO_SCALE` times the mean execution time of their model."""
    silence_p99_s: float
    silence_max_s: float
    offline_tokens_s: float
    """Prompts and answers of batches that were computed."""
    use: float
    """Share of the devices' time in which they compute."""
    migrations: int
    changes: int
    """Changes of the placement."""


def row(
    variant: Variant,
    online: Sequence[Online],
    *,
    itl: Itl,
    offline_tokens_s: float,
    use: float,
    migrations: int = 0,
    changes: int = 0,
) -> Row:
    latency, ttft, tpot, silence, execution = np.array([msgspec.structs.astuple(one) for one in online], float).T
    normalised, is_done = latency / execution, np.isfinite(latency)
    return Row(
        variant=variant.name,
        num_requests=len(online),
        num_failed=int((~is_done).sum()),
        ttft_p99_s=float(np.percentile(ttft, 99, method="higher")),
        tpot_p99_s=float(np.nanpercentile(tpot, 99)),
        itl_p50_s=itl.p50,
        itl_p99_s=itl.p99,
        itl_max_s=itl.max,
        normalised_latency=float(normalised[is_done].mean()),
        attainment=float((normalised <= DEFAULT_SLO_SCALE).mean()),
        silence_p99_s=float(np.percentile(silence, 99)),
        silence_max_s=float(silence.max()),
        offline_tokens_s=offline_tokens_s,
        use=use,
        migrations=migrations,
        changes=changes,
    )


def of_seeds(rows: Sequence[Row]) -> Row:
    """Row of one variant: counts added up, the longest of the longest silences, means of the rest."""
    values = {name: [getattr(one, name) for one in rows] for name in Row.__struct_fields__}
    counts = {name: sum(values[name]) for name in ("num_requests", "num_failed", "migrations", "changes")}
    longest = {name: max(values[name]) for name in ("silence_max_s", "itl_max_s")}
    named = {"variant": rows[0].variant} | longest | counts
    means = {name: float(np.mean(each)) for name, each in values.items() if name not in named}
    return Row(**named, **means)


def markdown(rows: Sequence[Row]) -> str:
    return "\n".join(
        table_of(
            [
                {
                    "": one.variant,
                    "attainment": f"{one.attainment:.3f}",
                    "normalised latency": one.normalised_latency,
                    "TTFT P99 s": one.ttft_p99_s,
                    "TPOT P99 ms": 1e3 * one.tpot_p99_s,
                    "ITL P50 ms": 1e3 * one.itl_p50_s,
                    "ITL P99 ms": 1e3 * one.itl_p99_s,
                    "ITL max ms": 1e3 * one.itl_max_s,
                    "silence P99 s": one.silence_p99_s,
                    "longest s": one.silence_max_s,
                    "offline tokens/s": f"{one.offline_tokens_s:,.0f}",
                    "use": f"{one.use:.2f}",
                    "moved": one.migrations,
                    "placements": one.changes,
                    "failed": one.num_failed,
                }
                for one in rows
            ]
        )
    )
