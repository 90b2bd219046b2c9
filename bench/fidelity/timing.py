"""What a running system's times are, fitted to one trace, so that a simulation of other traces can be held against it. Pure.

| | from |
|---|---|
| step times of each model | steps of the engines, from plan to plan: with what the host does in between |
| factor of a step while the other instance computes | the same steps: what those beside it took in sum, stalls and all |
| what services and client take from steps | their processor time by request and by token (shared/simulation/host.py) |
| noise of steps | what the fit leaves |
| times from a client to the gateway, to the engine, and back | when each had a request and its first token |
| speed of the machine beside a run | its steps shortly before and after, over what the fit says of them |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from bench.fidelity.observed import Observed, Step
from shared.costs import fit as cost_fit
from shared.costs.model import CostModel, StepShape
from shared.simulation.host import NO_DEMAND, Demand, Load, lost

MOST_NOISE = 1.0
"""Logarithm of a step's time over the predicted one; beyond it, it was a stall of the machine."""
BESIDE = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.5, 1.6, 1.8, 2.0)
"""Factors that are tried."""
SEARCH_STEPS, SEARCH_KNEES = 300, 2
"""Steps of a model, for that."""
KNEES = 12
"""At which sizes of steps a cost model may have its knee."""


class Sample(msgspec.Struct, frozen=True):
    """A step of a machine on which one instance or several compute."""

    model: str
    shape: StepShape
    seconds: float
    """Until the next one began, where one could."""
    beside: float
    """Share of it in which another instance computed."""
    start_s: float
    lost_alone: float = 0.0
    """Share of its core that services took, by their demand, while no other instance computed."""
    lost_beside: float = 0.0
    """The same while another did."""


class Delays(NamedTuple):
    """A request's ways. Seconds."""

    arrive_s: float
    """From its time at the client until the gateway has it."""
    submit_s: float
    """From the gateway to the engine."""
    deliver_s: float
    """From the end of the step with its first token until the gateway has written that."""
    answer_s: float
    """From the gateway until the client has it."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of two instances on one machine."""

    cost_models: dict[str, CostModel]
    """Costs of a step while the other instance does nothing; its mean, noise included."""
    beside: float
    """Factor of a step while the other computes, services apart."""
    noise: float
    """Standard deviation of the logarithm of step times around the cost model."""
    submit_s: float
    """From a request's arrival at the client until the engine has it; mean."""
    answer_s: float
    """From the end of a step until the client has its tokens; mean."""
    demand: Demand = NO_DEMAND
    num_cores: int = 2


def fit_demand(runs: Sequence[tuple[float, int, int, float]]) -> Demand:
    """Processor time by request and by token, from runs of (seconds, requests, output tokens, processor seconds of services
    and client): least squares, none negative, with what they take of each second in any case. Runs whose outputs differ in
    length tell requests from tokens."""
    rows = np.array(runs, float)
    coefficients = cost_fit.nnls(rows[:, :3], rows[:, 3])
    return Demand(request_s=float(coefficients[1]), token_s=float(coefficients[2]))


def samples(observed: Sequence[Observed], demand: Demand = NO_DEMAND, num_cores: int = 2) -> list[Sample]:
    """Samples of one instance or several, on so many cores."""
    loads = _loads(observed, demand)
    result = []
    for one in observed:
        others = _busy([step for other in observed if other is not one for step in other.steps])
        pauses = [after.start_s - step.end_s for step, after in pairwise(one.steps) if step.is_followed]
        pause_s = float(np.median(pauses)) if pauses else 0.0
        for step, after in zip(one.steps, [*one.steps[1:], None], strict=True):
            followed = step.is_followed and after is not None
            end_s = after.start_s if followed and after is not None else step.end_s + pause_s
            seconds = end_s - step.start_s
            share = _overlap_s(others, step.start_s, end_s) / seconds
            taken = (lost(loads.get(step.start_s, 0.0), num_cores, num) for num in (1, 2))
            result.append(Sample(step.model, step.shape, seconds, share, step.start_s, *taken))
    return sorted(result, key=lambda sample: sample.start_s)


def _loads(observed: Sequence[Observed], demand: Demand) -> dict[float, float]:
    """Cores that services needed when each step began, by its start."""
    came = [(at_s, 1, 0) for one in observed for at_s in one.submitted_s.values()]
    came += [(step.end_s, 0, step.num_tokens) for one in observed for step in one.steps]
    came.sort()
    load, found, place = Load(demand), dict[float, float](), 0
    for start_s in sorted({step.start_s for one in observed for step in one.steps}):
        while place < len(came) and came[place][0] <= start_s:
            at_s, num_requests, num_tokens = came[place]
            load.add(at_s, num_requests=num_requests, num_tokens=num_tokens)
            place += 1
        found[start_s] = load.cores(start_s)
    return found


def _busy(steps: Sequence[Step]) -> np.ndarray:
    """[n, 2]: start and end of each step, in order, without what another covers."""
    times = np.array(sorted((step.start_s, step.end_s) for step in steps), float).reshape(-1, 2)
    ends = np.maximum.accumulate(times[:, 1])
    return np.stack([np.maximum(times[:, 0], np.append(-np.inf, ends)[:-1]), ends], 1)


def _overlap_s(busy: np.ndarray, start_s: float, end_s: float) -> float:
    first, last = np.searchsorted(busy[:, 1], start_s), np.searchsorted(busy[:, 0], end_s)
    within = busy[first:last]
    return float((np.minimum(within[:, 1], end_s) - np.maximum(within[:, 0], start_s)).clip(0).sum())


def fit(
    steps: Sequence[Sample], submit_s: float, answer_s: float, demand: Demand = NO_DEMAND, num_cores: int = 2
) -> Timing:
    """The factor is that under which steps beside the other instance, and those alone, take as long as the cost models say,
    in sum: what a typical step takes would leave out the stalls, which are another's doing. Raises `ValueError` without
    steps."""
    by_model: dict[str, list[Sample]] = {}
    for sample in steps:
        by_model.setdefault(sample.model, []).append(sample)
    beside = min(BESIDE, key=lambda factor: _mismatch(by_model, factor))
    costs = _cost_models(by_model, beside, KNEES)
    costs = {name: _to_means(costs[name], of_model, beside) for name, of_model in by_model.items()}
    left = _logarithms(steps, costs, beside)
    noise = float(np.std(left[np.abs(left) < MOST_NOISE]))
    return Timing(
        cost_models=costs, beside=beside, noise=noise, submit_s=submit_s, answer_s=answer_s, demand=demand,
        num_cores=num_cores,
    )  # fmt: skip


def _to_means(cost: CostModel, of_model: Sequence[Sample], beside: float) -> CostModel:
    """So that decodes alone, and steps with chunks, take as long as they did in sum: sums are what adds up to latencies, and
    stalls are part of them."""
    decodes = [one for one in of_model if not one.shape.prefill_tokens]
    chunks = [one for one in of_model if one.shape.prefill_tokens]
    if decodes:
        cost = cost.scaled(sum(one.seconds for one in decodes) / _predicted_s(cost, decodes, beside))
    without = msgspec.structs.replace(cost, **dict.fromkeys(_OF_CHUNKS, 0.0))
    rest_s = _predicted_s(without, chunks, beside)
    if (of_chunks_s := _predicted_s(cost, chunks, beside) - rest_s) > 0:
        scale = min(2.0, max(0.5, (sum(one.seconds for one in chunks) - rest_s) / of_chunks_s))
        cost = msgspec.structs.replace(cost, **{name: scale * getattr(cost, name) for name in _OF_CHUNKS})
    return cost


_OF_CHUNKS = ("prefill_token_s", "prefill_attention_s", "prefill_s", "mixed_s")


def _predicted_s(cost: CostModel, steps: Sequence[Sample], beside: float) -> float:
    return sum(cost.predict(one.shape) * _factor(beside, one) for one in steps)


def _mismatch(by_model: Mapping[str, Sequence[Sample]], beside: float) -> float:
    thinned = {name: of_model[:: -(-len(of_model) // SEARCH_STEPS)] for name, of_model in by_model.items()}
    costs = _cost_models(thinned, beside, SEARCH_KNEES)
    ratios = []
    for is_beside in (False, True):
        steps = [one for of_model in by_model.values() for one in of_model if (one.beside > 0.5) == is_beside]
        if not steps:
            return beside - 1.0
        predicted_s = sum(_predicted_s(costs[one.model], [one], beside) for one in steps)
        ratios.append(sum(one.seconds for one in steps) / predicted_s)
    return abs(float(np.log(ratios[1] / ratios[0])))


def _cost_models(by_model: Mapping[str, Sequence[Sample]], beside: float, max_knees: int) -> dict[str, CostModel]:
    return {
        name: cost_fit.fit([(one.shape, one.seconds / _factor(beside, one)) for one in of_model], max_knees=max_knees)
        for name, of_model in by_model.items()
    }


def _factor(beside: float, sample: Sample) -> float:
    alone = (1.0 - sample.beside) * (1.0 - sample.lost_alone)
    return 1.0 / (alone + sample.beside * (1.0 - sample.lost_beside) / beside)


def _logarithms(steps: Sequence[Sample], costs: Mapping[str, CostModel], beside: float) -> np.ndarray:
    return np.log([one.seconds / (costs[one.model].predict(one.shape) * _factor(beside, one)) for one in steps])


def speed(timing: Timing, steps: Sequence[Sample]) -> float:
    """How long steps took, over what the fit says."""
    return sum(one.seconds for one in steps) / sum(
        _predicted_s(timing.cost_models[one.model], [one], timing.beside) for one in steps
    )


def execution_s(timing: Timing, model: str, lengths: Sequence[tuple[int, int]]) -> float:
    """Mean of what requests of so many prompt and output tokens take alone."""
    cost = timing.cost_models[model]
    seconds = []
    for prompt, output in lengths:
        first_s = cost.predict(StepShape(prompt, prompt * prompt / 2, 0, 0))
        mean_context = prompt + (output - 1) / 2
        seconds.append(first_s + (output - 1) * cost.predict(StepShape(0, 0.0, 1, round(mean_context))))
    return float(np.mean(seconds))
