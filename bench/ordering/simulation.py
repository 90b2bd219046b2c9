"""One run: the engine in virtual time. A step takes what the cost model predicts, nothing else takes any time."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np

from bench.ordering.workloads import Job, Setting, time_alone_s
from shared.cost_model import StepShape
from shared.engine.calls import AddModel, SetCostModel, SetStatistics, Submit
from shared.engine.engine import Effect, Engine
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.engine.requests import Ended
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.policies.baselines import SkipJoinMlfq
from shared.policies.execution_statistics import ExecutionTimeWindow
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance

PUBLISH_S = 1.0
"""As often the scheduler tells instances of execution times at most."""
WARM_SHARE, COOL_SHARE = 0.2, 0.1
"""Of a run's requests, the first and the last ones that do not count."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    latencies_s: list[float]
    """By job, from arrival to the last token."""
    max_itl_s: list[float]
    """By job, the longest time between two of its tokens."""
    end_s: float
    num_steps: int
    num_switches: int
    """Steps of another model than the step before."""
    num_preemptions: int
    recomputed_tokens: int


def simulate(setting: Setting, jobs: list[Job], order: str, *, mix_phases: bool, knows_times: bool = True) -> Run:
    """`knows_times`: finished requests' execution times reach the order; else it has the cost model's prediction alone."""
    configuration = Configuration(
        num_merged=setting.pool_tokens // setting.page_tokens, num_rows=setting.num_rows, ordering=order,
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
    for service in setting.services:
        engine.apply(AddModel(ModelShape(service.model, setting.page_tokens, 1, 1 << 20)), 0.0)
        engine.apply(SetCostModel(service.model, setting.cost_model), 0.0)
    window, changed, published_s = ExecutionTimeWindow(), set[str](), 0.0
    latencies_s, max_itl_s = [-1.0] * len(jobs), [0.0] * len(jobs)
    num_left, steps = len(jobs), list[str]()
    events = Events()

    def on_effects(effects: list[Effect]) -> None:
        nonlocal published_s, num_left
        now = events.now
        for effect in effects:
            if isinstance(effect, Ended):
                number = int(effect.request.request_id)
                latencies_s[number] = now - jobs[number].at_s
                max_itl_s[number] = effect.max_itl_s
                num_left -= 1
                window.add(effect.request.model, effect.device_s)
                changed.add(effect.request.model)
        if knows_times and changed and now - published_s >= PUBLISH_S:
            for model in sorted(changed):
                engine.apply(SetStatistics(window.statistics(model)), now)
            changed.clear()
            published_s = now

    instance = VirtualInstance(
        engine, events, lambda _: setting.cost_model, lambda plan: [5] * sum(plan.samples), on_effects,
        on_step=lambda step: steps.append(step.plan.model),
    )  # fmt: skip
    for number, job in enumerate(jobs):
        events.at(job.at_s, _submit, instance, job, number)
    if not events.run(lambda: not num_left, math.inf):
        raise RuntimeError(f"{num_left} requests never ended under {order}")
    counters = engine.counters
    return Run(
        latencies_s=latencies_s,
        max_itl_s=max_itl_s,
        end_s=events.now,
        num_steps=len(steps),
        num_switches=sum(one != other for one, other in pairwise(["", *steps])),
        num_preemptions=counters.num_preemptions,
        recomputed_tokens=counters.recomputed_tokens,
    )


def _submit(instance: VirtualInstance, job: Job, number: int) -> None:
    # prompts begin differently, so none finds another's blocks in the prefix cache
    prompt = pack_tokens(list(range(number * 31, number * 31 + job.prompt_tokens)))
    sampling = SamplingParams(max_tokens=job.output_tokens, temperature=0.0)
    request = GenerationRequest(
        request_id=str(number), gateway_id="bench", model=job.model, prompt=prompt, sampling=sampling, timeout_s=1e9
    )
    if refused := instance.apply(Submit(request)):
        raise RuntimeError(f"request {number} of {job.prompt_tokens} prompt tokens was refused: {refused.message}")


def mean_times_alone_s(setting: Setting, jobs: list[Job]) -> dict[str, float]:
    """SeaLLM's execution time of each service: what latencies are divided by, the same for all orders."""
    return {
        service.model: float(np.mean([time_alone_s(setting, job) for job in jobs if job.model == service.model]))
        for service in setting.services
    }


def normalised(run: Run, jobs: list[Job], alone_s: dict[str, float]) -> dict[str, np.ndarray]:
    """Of the requests that count: `alone` is latency over the model's mean time alone (SeaLLM's equation 1), `token`
    latency per output token, seconds."""
    first, end = int(len(jobs) * WARM_SHARE), int(len(jobs) * (1 - COOL_SHARE))
    counted = list(zip(run.latencies_s, jobs, strict=True))[first:end]
    return {
        "alone": np.array([latency / alone_s[job.model] for latency, job in counted]),
        "token": np.array([latency / job.output_tokens for latency, job in counted]),
    } | {
        service: np.array([latency / alone_s[service] for latency, job in counted if job.model == service])
        for service in alone_s
    }
