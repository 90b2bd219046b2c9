"""One run: the engine in virtual time. A step takes what the cost model predicts, nothing else takes any time."""

from __future__ import annotations

import msgspec
import numpy as np

from bench.ordering.workloads import Job, Setting, time_alone_s
from shared.cost_model import StepShape, shape_of
from shared.engine.calls import AddModel, OnStep, SetCostModel, SetStatistics, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepResult
from shared.engine.recording import Configuration
from shared.engine.requests import Ended
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.policies.baselines import SkipJoinMlfq
from shared.policies.execution_statistics import ExecutionTimeWindow

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
        setting.pool_tokens // setting.page_tokens, setting.num_rows, order, setting.max_step_tokens, 1,
        max_waiting=len(jobs) + 1, co_serving="priority_only", interruption="off", mix_phases=mix_phases,
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
    now, num_submitted, num_steps, num_switches, last = 0.0, 0, 0, 0, ""
    while True:
        while num_submitted < len(jobs) and jobs[num_submitted].at_s <= now:
            _submit(engine, jobs[num_submitted], num_submitted, now)
            num_submitted += 1
        plan = engine.plan(now)
        if plan is None:
            if num_submitted == len(jobs):
                break
            now = jobs[num_submitted].at_s
            continue
        now += setting.cost_model.predict(shape_of(plan.starts, plan.counts))
        num_steps += 1
        num_switches += plan.model != last
        last = plan.model
        engine.apply(OnStep(StepResult(plan.step_id, [5] * sum(plan.samples))), now)
        for effect in engine.effects():
            if isinstance(effect, Ended):
                number = int(effect.request.request_id)
                latencies_s[number] = now - jobs[number].at_s
                max_itl_s[number] = effect.max_itl_s
                window.add(effect.request.model, effect.device_s)
                changed.add(effect.request.model)
        if knows_times and changed and now - published_s >= PUBLISH_S:
            for model in sorted(changed):
                engine.apply(SetStatistics(window.statistics(model)), 0.0)
            changed.clear()
            published_s = now
    if min(latencies_s) < 0:
        raise RuntimeError(f"{sum(latency < 0 for latency in latencies_s)} requests never ended under {order}")
    counters = engine.counters
    return Run(
        latencies_s=latencies_s,
        max_itl_s=max_itl_s,
        end_s=now,
        num_steps=num_steps,
        num_switches=num_switches,
        num_preemptions=counters.num_preemptions,
        recomputed_tokens=counters.recomputed_tokens,
    )


def _submit(engine: Engine, job: Job, number: int, now: float) -> None:
    # prompts begin differently, so none finds another's blocks in the prefix cache
    prompt = pack_tokens(list(range(number * 31, number * 31 + job.prompt_tokens)))
    sampling = SamplingParams(max_tokens=job.output_tokens, temperature=0.0)
    request = GenerationRequest(
        str(number), "bench", job.model, prompt, sampling, timeout_s=1e9, waited_s=now - job.at_s
    )
    if refused := engine.apply(Submit(request), now):
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
