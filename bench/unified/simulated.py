"""The variants in virtual time: 32 A800 in four nodes, eight services of four shapes, batches that never end.

Services, lengths, popularity and rates are those of bench/sharing; batches have SeaLLM's summaries as lines, of all services
alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from bench.sharing.systems import SEARCH_S, Case, drawn, jobs_of
from bench.sharing.workloads import Workload
from bench.unified.variants import Online, Row, Variant, placed, row
from shared.messages.requests import RequestClass
from shared.placement.estimator import estimate
from shared.placement.plan import Plan
from shared.placement.problem import Problem
from shared.placement.replacement import ReplacementSettings
from shared.placement.search import search
from shared.simulation.batches import Batches
from shared.simulation.deployment import Serving, deploy
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Gateway, Job
from shared.simulation.replacement import FleetReplacement

LINES_S = 7.0
"""Lines of each service, for each second of arrivals; more than any variant gets done."""
LINE_TOKENS = (1024, 128)
ADAPTIVE = ReplacementSettings(initial_s=30.0, least_s=20.0, most_s=600.0)
"""The trace of rates runs thirty times faster than it was recorded, and so do the intervals."""
PATIENCE_S = 120.0
"""After the last arrival; who has no answer by then has none."""


def case(*, seed: int, run_s: float, rate_rps: float, turn_s: float = math.inf) -> Case:
    return Case(workload=Workload(rate_rps=rate_rps, turn_s=turn_s), seed=seed, history_s=120.0, run_s=run_s)


def simulate(job: tuple[Variant, int, float, float, float]) -> Row:
    """`job`: variant, seed, seconds of arrivals, requests a second, seconds after which popularity is turned round. Raises
    `RunFailed`, `NoPlacement`."""
    variant, seed, run_s, rate_rps, turn_s = job
    return run(variant, case(seed=seed, run_s=run_s, rate_rps=rate_rps, turn_s=turn_s))


def serving(variant: Variant) -> Serving:
    return Serving(
        order_policy=variant.order_policy, dispatch_policy=variant.dispatch_policy, migration=variant.migration,
        co_serving=variant.co_serving, interruption=variant.interruption, least_share=variant.least_share,
    )  # fmt: skip


def _intervals(variant: Variant) -> ReplacementSettings:
    if variant.is_interval_fixed:
        return msgspec.structs.replace(ADAPTIVE, least_s=ADAPTIVE.initial_s, most_s=ADAPTIVE.initial_s)
    return ADAPTIVE


def run(variant: Variant, one: Case) -> Row:
    """Raises `RunFailed`, `NoPlacement`."""
    problem, future = drawn(one)
    plan, how = placed(variant, problem), serving(variant)
    fleet = how.fleet(one.seed)
    fleet.gateway.is_strict = False
    deploy(fleet, problem, plan, how)
    replacement = None
    if variant.is_adaptive:
        replacement = FleetReplacement(
            fleet, problem, plan, search, settings=_intervals(variant), serving=how, search_s=SEARCH_S,
            predicted=estimate(problem, plan),
        )  # fmt: skip
    use = _Use(fleet, plan, replacement)
    left = _send(fleet, jobs_of(future, one.workload.max_tokens))
    if variant.harvests:
        num_lines = math.ceil(LINES_S * future.interval_s)
        lines = [Job(0.0, *LINE_TOKENS, model=model.name) for _ in range(num_lines) for model in problem.models]
        Batches(fleet).begin_at(0.0, "batch", lines)
    limit_s = future.interval_s + PATIENCE_S
    fleet.events.at(limit_s, lambda: None)
    fleet.events.run(lambda: not left and fleet.events.now >= future.interval_s, limit_s)
    online, offline_tokens = _seen(fleet.gateway, problem)
    changes = 0 if replacement is None else sum(change.stage == "carried_out" for change in replacement.changes)
    migrations = sum(record.num_migrations for record in fleet.gateway.records)
    return row(
        variant, online, itl=fleet.gateway.itl_of().summary(), offline_tokens_s=offline_tokens / fleet.events.now,
        use=use.share, migrations=migrations, changes=changes,
    )  # fmt: skip


def _send(fleet: Fleet, jobs: Sequence[Job]) -> set[int]:
    """Returns those that have not ended, which goes on becoming fewer."""
    left: set[int] = set()
    for job in jobs:
        left.add(fleet.submit_at(job, left.discard))
    return left


def _seen(gateway: Gateway, problem: Problem) -> tuple[list[Online], int]:
    """Online requests, and the tokens of batches that were computed."""
    online, tokens = [], 0
    for job, record in zip(gateway.jobs, gateway.records, strict=True):
        if job.request_class is RequestClass.OFFLINE:
            tokens += record.num_tokens + (record.prompt_tokens if record.num_tokens else 0)
            continue
        is_done = record.ended_s >= 0 and not record.error
        online.append(
            Online(
                record.latency_s if is_done else math.inf,
                record.ttft_s if record.first_s >= 0 else math.inf,
                math.nan if record.tpot_s is None else record.tpot_s,
                record.longest_gap_s,
                problem.execution_s[job.model],
            )
        )
    return online, tokens


class _Use:
    """Share of the devices that compute, looked at once a second."""

    def __init__(self, fleet: Fleet, plan: Plan, replacement: FleetReplacement | None) -> None:
        self._fleet, self._plan, self._replacement = fleet, plan, replacement
        self._shares: list[float] = []
        self._look()

    @property
    def share(self) -> float:
        return float(np.mean(self._shares))

    def _look(self) -> None:
        plan = self._plan if self._replacement is None else self._replacement.plan
        devices = {group.instance_id: group.num_ranks for group in plan.groups}
        computing = {name for name, instance in self._fleet.instances.items() if instance.host.is_computing}
        total = sum(devices.values())
        self._shares.append(sum(num for name, num in devices.items() if name in computing) / total)
        self._fleet.events.after(1.0, self._look)
