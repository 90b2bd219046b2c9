"""One run: the engine in virtual time. A step takes what the cost model predicts, nothing else takes any time."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np

from bench.ordering.workloads import Setting, time_alone_s
from shared.costs.model import StepShape
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.policies.baselines import SkipJoinMlfq
from shared.runtime.settings import SchedulerSettings
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.gateway import Job
from shared.simulation.itl import ItlHistogram

WARM_SHARE, COOL_SHARE = 0.2, 0.1
"""Shares of a run's first and last requests, which do not count."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    latencies_s: list[float]
    """By job, from arrival to the last token."""
    max_itl_s: list[float]
    """By job, the longest time between two of its tokens."""
    itl: ItlHistogram
    """The gaps of all jobs."""
    end_s: float
    num_steps: int
    num_switches: int
    """Steps of another model than the step before."""
    num_preemptions: int


def simulate(setting: Setting, jobs: list[Job], order: str, *, mix_phases: bool, knows_times: bool = True) -> Run:
    """`knows_times`: finished requests' execution times reach the order; else it has the cost model's prediction alone."""
    configuration = Configuration(
        num_merged=setting.pool_tokens // setting.block_size, num_rows=setting.num_rows, ordering=order,
        token_budget=setting.max_step_tokens, steps_in_flight=1, max_waiting=len(jobs) + 1, co_serving="priority_only",
        interruption="off", mix_phases=mix_phases,
    )  # fmt: skip
    arguments = configuration.arguments()
    if order == "mlfq":
        # as FastServe has it: the first quantum is the shortest iteration, prefills are estimated for this device
        arguments["ordering"] = SkipJoinMlfq(
            quantum_s=setting.cost_model.predict(StepShape(num_decodes=1)),
            prefill_token_s=setting.cost_model.prefill_token_s,
        )
        arguments["ordering"].mixes_phases = mix_phases
    engine = Engine(**arguments)
    # Nothing waits in the scheduler: the order is the instance's alone.
    settings = SchedulerSettings(
        order_policy="fcfs", migration="off", max_queued=len(jobs) + 1, max_waiting_per_model=len(jobs) + 1,
        dispatch_growth_steps=0.0, max_defragmenting_share=1.0,
    )  # fmt: skip
    fleet = Fleet(settings, noise=0.0, control_s=0.0, tells_statistics=knows_times)
    models = [
        Model(
            shape=ModelShape(
                name=service.model, block_size=setting.block_size, blocks_per_merged=1, max_model_len=1 << 20
            ),
            cost_model=setting.cost_model,
        )
        for service in setting.services
    ]
    instance = fleet.add_instance("instance", Device(configuration=configuration), models, engine=engine)
    steps = list[str]()
    instance.on_step = lambda step: steps.append(step.plan.model)
    records = fleet.run(jobs, patience_s=math.inf).records
    return Run(
        latencies_s=[record.latency_s for record in records],
        max_itl_s=[record.longest_gap_s for record in records],
        itl=fleet.gateway.itl_of(),
        end_s=fleet.events.now,
        num_steps=len(steps),
        num_switches=sum(one != other for one, other in pairwise(["", *steps])),
        num_preemptions=engine.counters.num_preemptions,
    )


def mean_times_alone_s(setting: Setting, jobs: list[Job]) -> dict[str, float]:
    """SeaLLM's execution time of each service: what latencies are divided by, the same for all orders."""
    return {
        service.model: float(np.mean([time_alone_s(setting, job) for job in jobs if job.model == service.model]))
        for service in setting.services
    }


def normalised(run: Run, jobs: list[Job], alone_s: dict[str, float]) -> dict[str, np.ndarray]:
    """Normalised latencies of the requests that count: `alone` is latency over the model's mean time alone (SeaLLM's
    equation 1), `token` latency per output token, seconds."""
    first, end = int(len(jobs) * WARM_SHARE), int(len(jobs) * (1 - COOL_SHARE))
    counted = list(zip(run.latencies_s, jobs, strict=True))[first:end]
    return {
        "alone": np.array([latency / alone_s[job.model] for latency, job in counted]),
        "token": np.array([latency / job.output_tokens for latency, job in counted]),
    } | {
        service: np.array([latency / alone_s[service] for latency, job in counted if job.model == service])
        for service in alone_s
    }
