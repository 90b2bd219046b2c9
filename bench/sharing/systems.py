"""SeaLLM's cluster of A800, and the systems that are compared on it: each gets the same history to place services by, and
then the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from bench.sharing.workloads import Workload, draw, services
from shared.placement import baselines
from shared.placement.estimator import estimate
from shared.placement.execution import alone_s, least_group
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import HARDWARE
from shared.placement.problem import ModelFacts, Plan, Problem, Traffic
from shared.placement.replacement import ReplacementSettings
from shared.placement.search import search
from shared.simulation import multiplexed
from shared.simulation.deployment import Serving, deploy
from shared.simulation.events import Events
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Gateway, Job, Record
from shared.simulation.itl import Itl, ItlHistogram
from shared.simulation.migration import FleetMigrations
from shared.simulation.replacement import FleetReplacement
from shared.simulation.spatial import run

A800 = HARDWARE["A800-80G"]
NODE_DEVICES = 8
SEED = 101
SEARCH_S = 5.0
"""Seconds that a search takes, in virtual time."""
WHOLE_TOKENS = 8192


class System(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    placement: str
    """search | alpaserve | dedicated | dedicated_by_need | muxserve"""
    order: str = "fcfs"
    dispatch: str = "fewest_requests"
    is_late: bool = False
    """Requests wait in the scheduler until an instance has room; else they are sent to one at once."""
    migrates: bool = False
    least_share: float = 0.25
    """Share of the KV pool that is divided evenly over the models; 1: fixed partitions."""
    replacement: ReplacementSettings | None = None
    """None: the first placement stays."""
    mix_phases: bool = True
    """Prompts in chunks beside decodes; else steps are whole prompts, of `WHOLE_TOKENS` together, or decodes."""
    max_running: int = 256
    """Sequences of an instance at once."""
    overlaps: bool = True
    """Whether MuxServe's jobs run beside each other, on units of their own; else one after the other, on all."""
    interference: float = 0.0
    """By how much longer MuxServe's jobs take while others run beside them."""


ADAPTIVE = ReplacementSettings(initial_s=40.0, least_s=20.0, most_s=600.0)
"""The trace of rates runs thirty times faster than it was recorded; so do the intervals, as far as groups that restart in
seconds allow."""
FIXED = ReplacementSettings(initial_s=20.0, least_s=20.0, most_s=20.0)
TIDEWAY = System(
    name="tideway", placement="search", order="doubling_budget", dispatch="first_token", is_late=True, migrates=True,
    replacement=ADAPTIVE,
)  # fmt: skip
DEDICATED = System(name="vllm", placement="dedicated")
BY_NEED = System(name="vllm by need", placement="dedicated_by_need")
ALPASERVE = System(name="alpaserve", placement="alpaserve")
MUXSERVE = System(name="muxserve", placement="muxserve")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a system is given."""

    workload: Workload
    seed: int = SEED
    num_devices: int = 32
    history_s: float = 300.0
    run_s: float = 100.0


class Run(NamedTuple):
    """Run of one system, parallel over requests."""

    records: list[Record]
    services: tuple[str, ...]
    service: np.ndarray
    """[n] index into them."""
    execution_s: np.ndarray
    """Mean execution time of each request's service."""
    alone_s: np.ndarray
    """What each takes alone, on the fewest devices that hold its model."""
    placement: list[str]
    """At the beginning."""
    num_changes: int
    itl: Itl


def drawn(case: Case) -> tuple[Problem, Traffic]:
    """The problem under the history's traffic, and what comes then. Execution times are the services' profiles, of their
    requests on the fewest devices that hold the model."""
    known = services(case.workload)
    history, future = draw(case.workload, case.history_s, case.run_s, case.seed, known=known)
    nodes = tuple(
        node_facts(f"node-{number}", A800, min(NODE_DEVICES, case.num_devices - number * NODE_DEVICES))
        for number in range(math.ceil(case.num_devices / NODE_DEVICES))
    )
    models = tuple(
        model_facts(service.name, SHAPES[service.shape], [A800], max_model_len=case.workload.max_tokens)
        for service in known
    )
    problem = Problem(nodes=nodes, models=models, traffic=history)
    profiles = {
        service.name: float(_alone_s(problem, model, service.lengths).mean())
        for service, model in zip(known, models, strict=True)
    }
    return msgspec.structs.replace(problem, execution_s=profiles), future


def _alone_s(problem: Problem, model: ModelFacts, lengths: np.ndarray) -> np.ndarray:
    group = least_group(problem, model)
    if group is None:
        raise baselines.NoPlacement(f"{model.name!r} fits no node")
    return alone_s(model.costs[group], lengths[:, 0], lengths[:, 1], A800.step_tokens)


def simulate(system: System, case: Case) -> Run:
    """Raises `NoPlacement`."""
    problem, future = drawn(case)
    jobs = jobs_of(future, case.workload.max_tokens)
    if system.placement == "muxserve":
        units = baselines.muxserve(problem)
        events, num_changes = Events(), 0
        groups = multiplexed.deploy(events, problem, units, overlaps=system.overlaps, interference=system.interference)
        records = run(events, groups, jobs)
        itl = ItlHistogram.merged(groups[name].itl[name] for name in groups)
        placement = [_shown(*unit) for unit in units]
    else:
        plan = place(system, problem)
        gateway, num_changes = _run_fleet(system, problem, plan, jobs, case.seed)
        records, itl = gateway.records, gateway.itl_of()
        placement = [_shown(group) for group in plan.groups]
    lengths = np.stack([future.prompt_tokens, future.output_tokens], axis=1)
    alone = np.zeros(future.num_requests)
    for index, name in enumerate(future.models):
        own = future.model == index
        alone[own] = _alone_s(problem, next(model for model in problem.models if model.name == name), lengths[own])
    means = np.array([problem.execution_s[name] for name in future.models])[future.model]
    return Run(records, future.models, future.model, means, alone, placement, num_changes, itl.summary())


def place(system: System, problem: Problem) -> Plan:
    match system.placement:
        case "dedicated":
            return baselines.dedicated(problem, estimate)
        case "dedicated_by_need":
            return baselines.dedicated_by_need(problem, estimate)
        case "alpaserve":
            # Chosen for the order in which it serves.
            return baselines.alpaserve(problem, partial(estimate, order="fcfs"))
        case _:
            return search(problem).plan


def jobs_of(traffic: Traffic, max_tokens: int) -> list[Job]:
    """Each may get as many tokens as the model allows: how long its answer is, is nobody's knowledge."""
    return [
        Job(at_s, prompt, output, model=traffic.models[model], max_tokens=max(output, max_tokens - prompt))
        for model, at_s, prompt, output in zip(
            traffic.model.tolist(), traffic.arrival_s.tolist(), traffic.prompt_tokens.tolist(),
            traffic.output_tokens.tolist(), strict=True,
        )
    ]  # fmt: skip


def _run_fleet(system: System, problem: Problem, plan: Plan, jobs: Sequence[Job], seed: int) -> tuple[Gateway, int]:
    serving = Serving(
        order_policy=system.order, dispatch_policy=system.dispatch, migration="auto" if system.migrates else "off",
        max_queued=1 << 20, max_waiting=1 << 20, least_share=system.least_share, mix_phases=system.mix_phases,
        token_budget=0 if system.mix_phases else WHOLE_TOKENS, max_running=system.max_running,
    )  # fmt: skip
    settings = serving.scheduler()
    if not system.is_late:
        settings = msgspec.structs.replace(
            settings, max_waiting_per_model=1 << 20, dispatch_growth_steps=0.0, max_defragmenting_share=1.0
        )
    fleet = Fleet(settings, seed=seed, migrations=FleetMigrations if system.migrates else None)
    deploy(fleet, problem, plan, serving)
    replacement = None
    if system.replacement is not None:
        replacement = FleetReplacement(
            fleet, problem, plan, search, settings=system.replacement, serving=serving, search_s=SEARCH_S,
            predicted=estimate(problem, plan),
        )  # fmt: skip
    gateway = fleet.run(jobs, patience_s=math.inf)
    return gateway, 0 if replacement is None else len(replacement.changes)


def _shown(group: baselines.Group, units: dict[str, baselines.Units] | None = None) -> str:
    names = group.models if units is None else [f"{name} ({own.prefill}/{own.decode})" for name, own in units.items()]
    return f"{group.instance_id} x{group.num_ranks}: {', '.join(names)}"
