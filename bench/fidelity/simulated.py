"""The same requests on the same engines, policies and pools in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter

import msgspec
import numpy as np

from bench.fidelity.observed import Observed
from bench.fidelity.timing import Delays, Timing
from bench.fidelity.workloads import Mix, Served, planned, tenant_of
from shared.engine.calls import SetCostModel
from shared.engine.engine import Engine
from shared.engine.recording import Configuration
from shared.runtime.settings import SchedulerSettings
from shared.simulation.fleet import CONTROL_S, Device, Fleet, Instance, Model
from shared.simulation.gateway import Job
from shared.simulation.host import Host
from shared.simulation.instance import VirtualStep
from tideway.bench.workload import PlannedRequest

BACKLOG_REQUESTS = 150


def run(
    observed: Sequence[Observed],
    timing: Timing,
    settings: SchedulerSettings,
    requests: Sequence[PlannedRequest],
    *,
    before: Sequence[PlannedRequest] = (),
    delays_s: Sequence[Delays] = (),
    start_s: float = math.inf,
    speed: float = 1.0,
    seed: int = 0,
    build: Callable[[Configuration], Engine] = Configuration.build,
) -> list[Served]:
    """Instances are those that were observed; engines know the cost models that the live ones were told, and the execution
    times of models that these had been told by `start_s`. `before`: requests of earlier runs, at negative times, which leave
    behind what instances and scheduler know of models and tenants; nothing is returned of them, and delays, speed and
    statistics are the same for them. `delays_s`: of which each request draws one; empty: the mean ones, with a gateway at
    the client. `speed`: factor of all step times, of the machine at that time. Raises `RunFailed`."""
    # The fleet's noise has the median 1, a cost model says the mean.
    scale = speed / float(np.exp(timing.noise**2 / 2))

    host = Host(timing.demand, num_cores=timing.num_cores, beside=timing.beside)

    def slowdown(instance: Instance) -> float:
        num_others = sum(one.host.is_computing for one in fleet.instances.values() if one is not instance)
        return host.slowdown(fleet.events.now, 1 + num_others)

    def on_step(step: VirtualStep) -> None:
        if not step.is_suspended:
            host.load.add(fleet.events.now, num_tokens=sum(step.plan.samples))

    def on_request() -> None:
        host.load.add(fleet.events.now, num_requests=1)

    statistics = observed[0].statistics_at(start_s)
    # Live ones, of the last thousand requests, change on. Those of a run's end gave the same figures, within chance.
    fleet = Fleet(
        settings, noise=timing.noise, seed=seed, slowdown=slowdown, statistics=statistics, tells_statistics=not statistics
    )  # fmt: skip
    for number, one in enumerate(observed):
        device = Device(configuration=one.configuration)
        models = [
            Model(shape=shape, cost_model=timing.cost_models[name].scaled(scale)) for name, shape in one.models.items()
        ]
        instance = fleet.add_instance(f"instance-{number}", device, models, engine=build(one.configuration))
        _tell(instance.engine, one)
        instance.on_step = on_step
    delays_s = delays_s or [Delays(0.0, timing.submit_s, timing.answer_s, 0.0)]
    # Virtual time has no negative times.
    first_s = min((request.at_s for request in before), default=0.0)
    everyone = [*((request, False) for request in requests), *((request, True) for request in before)]
    drawn = np.random.default_rng(seed).integers(len(delays_s), size=len(everyone))
    sent = []
    for (request, is_before), at in zip(everyone, drawn.tolist(), strict=True):
        delays = delays_s[at]
        at_s = request.at_s - first_s + max(0.0, delays.arrive_s + delays.submit_s - CONTROL_S)
        sent.append((at_s, request, is_before, delays))
    sent.sort(key=itemgetter(0))
    jobs = [
        Job(at_s, request.prompt_tokens, request.output_tokens, model=request.model, tenant=tenant_of(request))
        for at_s, request, *_ in sent
    ]
    for job in jobs:
        fleet.events.at(job.at_s, on_request)
    found = []
    for (_, request, is_before, delays), record in zip(sent, fleet.run(jobs).records, strict=True):
        if is_before:
            continue
        answer_s = delays.deliver_s + delays.answer_s + first_s
        found.append(
            Served(
                request.model, request.at_s, record.first_s + answer_s, record.last_s + answer_s, record.num_tokens,
                server_ttft_s=record.first_s + first_s + delays.deliver_s - request.at_s - delays.arrive_s,
            )
        )  # fmt: skip
    return found


def _tell(engine: Engine, observed: Observed) -> None:
    for name, cost_model in observed.cost_models.items():
        engine.apply(SetCostModel(name, cost_model), 0.0)


def capacity_rps(observed: Sequence[Observed], timing: Timing, settings: SchedulerSettings, mix: Mix) -> float:
    """Requests per second at which the instances work off a backlog of them."""
    requests = planned(mix, 10.0, BACKLOG_REQUESTS / 10.0, name="backlog", seed=7)
    at_once = [msgspec.structs.replace(one, at_s=1e-3 * number) for number, one in enumerate(requests)]
    served = run(observed, timing, settings, at_once)
    return len(served) / max(one.last_s for one in served)
