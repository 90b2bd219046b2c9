"""A plan of placement in virtual time: each group is an instance with the KV pool that placement reckons, the cost models of
its devices, and the live engine with its defaults.

    prediction = predict(problem, plan)

`predict` plays the problem's traffic on it. `deploy` puts the groups into a fleet, for runs that do more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from shared.engine.load import GIVE_UP_S
from shared.engine.memory.slab import blocks_per_merged
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.messages.cluster import InstancePlan
from shared.messages.requests import RequestClass
from shared.placement.execution import execution_s, step_tokens
from shared.placement.places import places
from shared.placement.plan import is_cpu
from shared.placement.problem import Group, ModelFacts, NodeFacts, Plan, Prediction, Problem, Traffic
from shared.runtime.settings import InstanceSettings, SchedulerSettings
from shared.simulation import metrics
from shared.simulation.batches import Batches
from shared.simulation.events import Events
from shared.simulation.fleet import CONTROL_S, PATIENCE_S, Device, Fleet, Model
from shared.simulation.gateway import Job, Record
from shared.simulation.itl import ItlHistogram
from shared.simulation.migration import FleetMigrations

NUM_TICKS = 100
"""How often a run says how far it is."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How instances and scheduler serve; the defaults are the live ones. Names of policies: `shared.policies.catalogue`."""

    order_policy: str = "doubling_budget"
    dispatch_policy: str = "first_token"
    migration: str = "auto"
    """auto | off"""
    co_serving: str = "slo"
    """slo | priority_only | online_only"""
    interruption: str = "suspend"
    """suspend | discard | off"""
    offline: bool = True
    """Whether offline requests and batches are sent at all."""
    mix_phases: bool = True
    token_budget: Annotated[int, Meta(ge=0)] = 0
    """Tokens of a step at most; 0: by the kind of device."""
    steps_in_flight: Annotated[int, Meta(ge=0)] = 0
    """0: by the kind of device."""
    max_running: Annotated[int, Meta(ge=1)] = 256
    """Sequences of a step at most."""
    max_queued: Annotated[int, Meta(ge=1)] = 4096
    """Requests of a class in the scheduler's queue; beyond it they are refused."""
    max_waiting: Annotated[int, Meta(ge=1)] = 1024
    """Requests that an instance holds without having planned them; beyond it they are refused."""
    least_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Share of the KV pool that is divided evenly over the models of an instance; 1: each has its own part."""
    checkpoints: bool = True
    """Whether there are checkpoints of KV in host memory, which is as large as the KV pool."""
    ttft_ms: Annotated[float, Meta(gt=0)] = 1500.0
    tpot_ms: Annotated[float, Meta(gt=0)] = 110.0
    noise: Annotated[float, Meta(ge=0)] = 0.05
    """Standard deviation of the logarithm of step times around the cost models."""
    control_s: Annotated[float, Meta(ge=0)] = CONTROL_S
    """A message of the scheduler, one way."""

    def scheduler(self) -> SchedulerSettings:
        return SchedulerSettings(
            dispatch_policy=self.dispatch_policy, order_policy=self.order_policy, migration=self.migration,
            max_queued=self.max_queued,
        )  # fmt: skip

    def fleet(self, seed: int) -> Fleet:
        """Without an instance."""
        migrations = FleetMigrations if self.migration != "off" else None
        return Fleet(self.scheduler(), noise=self.noise, seed=seed, migrations=migrations, control_s=self.control_s)

    def device(self, problem: Problem, place: InstancePlan) -> Device:
        """What an instance runs on."""
        node, num_merged = node_of(problem, place), place.pool_bytes // place.merged_bytes
        on_cpu = is_cpu(node.kind)
        configuration = Configuration(
            num_merged=num_merged, num_rows=self.max_running, ordering=self.order_policy,
            token_budget=self.token_budget or step_tokens(node.kind),
            steps_in_flight=self.steps_in_flight or (1 if on_cpu else 2), co_serving=self.co_serving,
            interruption=self.interruption, mix_phases=self.mix_phases,
            num_host_merged=num_merged if self.checkpoints else 0, ttft_s=self.ttft_ms / 1000, tpot_s=self.tpot_ms / 1000,
            max_waiting=self.max_waiting, least_share=self.least_share, give_up_s=GIVE_UP_S,
        )  # fmt: skip
        return Device(
            configuration=configuration, merged_bytes=place.merged_bytes, bandwidth_bytes_s=node.link_bytes_s,
            rate_share=InstanceSettings(device="cpu" if on_cpu else "cuda").copy_rate_share,
            num_devices=place.group.num_ranks,
        )  # fmt: skip


LIVE = Serving()


class BatchLines(NamedTuple):
    """A batch of requests in the background."""

    at_s: float
    lines: Sequence[tuple[str, int, int]]
    """Model, prompt tokens, output tokens."""
    window_s: float = 86400.0
    """Window from `at_s` on, in which it should be over."""


class Outcome(NamedTuple):
    """Outcome of a run."""

    requests: metrics.Requests
    """Those of the traffic first, in its order; then lines of batches."""
    metrics: metrics.RunMetrics
    is_over: bool
    """All online requests have ended; else the run's patience ended it."""
    itl: ItlHistogram
    """Gaps of online requests."""


def node_of(problem: Problem, group: Group | InstancePlan) -> NodeFacts:
    return next(node for node in problem.nodes if node.node_id == group.node_id)


def models_of(problem: Problem, group: Group) -> list[ModelFacts]:
    return [model for model in problem.models if model.name in group.models]


def instance_models(problem: Problem, place: InstancePlan) -> dict[str, Model]:
    """Its models, by name, as the instance has them."""
    node, p, known = node_of(problem, place), place.group.num_ranks, {model.name: model for model in problem.models}
    found = {}
    for model in (known[spec.name] for spec in place.models):
        size = model.footprint((node.kind, p))
        assert size is not None, "a plan has models on groups that can run them"
        shape = ModelShape(
            name=model.name, block_size=model.block_size, max_model_len=model.max_model_len,
            blocks_per_merged=blocks_per_merged(place.merged_bytes // p, size.block_bytes), num_layers=model.num_layers,
        )  # fmt: skip
        load_s = model.weight_bytes / (node.load_bytes_s * p)
        found[model.name] = Model(shape=shape, cost_model=model.costs[node.kind, p], load_s=load_s)
    return found


def deploy(fleet: Fleet, problem: Problem, plan: Plan, serving: Serving = LIVE, *, start_s: float = 0.0) -> None:
    """Adds the plan's groups to the fleet, which serve from `start_s` on. Raises `DoesNotFit`."""
    for place in places(problem, plan):
        models = instance_models(problem, place).values()
        fleet.add_instance(place.instance_id, serving.device(problem, place), models, start_s=start_s)


def simulate(
    problem: Problem,
    plan: Plan,
    serving: Serving = LIVE,
    *,
    seed: int = 0,
    batches: Sequence[BatchLines] = (),
    patience_s: float = PATIENCE_S,
    on_progress: Callable[[float], None] = lambda share: None,
    on_deployed: Callable[[Fleet], object] = lambda fleet: None,
) -> Outcome:
    """Plays the traffic until its interval is over and all online requests have ended, `patience_s` later at most.
    `on_progress` hears the share of the interval that is over, at times. `on_deployed` gets the fleet before it serves, for
    more to happen in it; requests of models that no instance has then are not sent."""
    fleet = serving.fleet(seed)
    fleet.gateway.is_strict = False
    deploy(fleet, problem, plan, serving)
    on_deployed(fleet)
    traffic, numbers = problem.traffic, np.full(problem.traffic.num_requests, -1)
    left = _Left()
    longest = _longest(fleet)
    for row, job in zip(*jobs_of(traffic, longest, has_offline=serving.offline), strict=True):
        is_online = job.request_class is RequestClass.ONLINE
        numbers[row] = fleet.gateway.expect(job, left.ended if is_online else None)
        left.num += is_online
        fleet.events.at(job.at_s, fleet.gateway.send, int(numbers[row]))
    num_sent = len(fleet.gateway.jobs)
    if serving.offline:
        background = Batches(fleet)
        for index, batch in enumerate(batches):
            lines = [
                Job(0.0, prompt, output, model=model)
                for model, prompt, output in batch.lines
                if prompt + output <= longest.get(model, 0)
            ]
            background.begin_at(batch.at_s, f"batch-{index}", lines, window_s=batch.window_s)
    tell_progress(fleet.events, traffic.interval_s, on_progress)
    limit_s = traffic.interval_s + patience_s
    is_over = fleet.events.run(lambda: not left.num and fleet.events.now >= traffic.interval_s, limit_s)
    seconds = max(fleet.events.now, traffic.interval_s)
    numbers = np.concatenate([numbers, np.arange(num_sent, len(fleet.gateway.jobs))])
    requests = requests_of(problem, fleet.gateway.jobs, fleet.gateway.records, numbers, fleet.events.now)
    busy_s = {name: fleet.busy_s[name] for name in sorted({*fleet.busy_s, *fleet.instances})}
    itl = {name: fleet.gateway.itl_of(model=name) for name in requests.models}
    found = measured(problem, requests, busy_s, fleet.model_device_s, seconds, itl)
    return Outcome(requests, found, is_over, ItlHistogram.merged(itl.values()))


def predict(
    problem: Problem, plan: Plan, serving: Serving = LIVE, *, seed: int = 0, patience_s: float = PATIENCE_S
) -> Prediction:
    """The faithful simulation of a plan under the problem's traffic. Requests of a model without a group miss their SLO."""
    return metrics.prediction(simulate(problem, plan, serving, seed=seed, patience_s=patience_s).metrics)


def jobs_of(traffic: Traffic, longest: Mapping[str, int], *, has_offline: bool) -> tuple[list[int], list[Job]]:
    """Rows of the requests that can be sent, and they. `longest`: tokens of prompt and output that are taken, by model."""
    rows, jobs = [], []
    placed = [longest.get(name, 0) for name in traffic.models]
    columns = (traffic.model, traffic.arrival_s, traffic.prompt_tokens, traffic.output_tokens, traffic.is_online)
    for row, (model, arrival_s, prompt, output, is_online) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        room = placed[model] - prompt
        if output > room or not (is_online or has_offline):
            continue
        rows.append(row)
        jobs.append(
            Job(
                arrival_s, prompt, output, model=traffic.models[model],
                max_tokens=room if is_online and output < room else 0, is_open_ended=is_online and output < room,
                request_class=RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
            )
        )  # fmt: skip
    return rows, jobs


def tell_progress(events: Events, interval_s: float, on_progress: Callable[[float], None]) -> None:
    for tick in range(1, NUM_TICKS + 1):
        events.at(interval_s * tick / NUM_TICKS, on_progress, tick / NUM_TICKS)


def measured(
    problem: Problem,
    requests: metrics.Requests,
    busy_s: Mapping[str, float],
    model_device_s: Mapping[str, float],
    seconds: float,
    itl: Mapping[str, ItlHistogram],
) -> metrics.RunMetrics:
    """`busy_s`: of instances; `model_device_s`: devices times seconds, of models; `seconds`: of the run; `itl`: by model."""
    device_s = seconds * sum(node.num_devices for node in problem.nodes)
    use = {name: one_s / seconds for name, one_s in busy_s.items()}
    model_use = {name: one_s / device_s for name, one_s in model_device_s.items()}
    return metrics.measure(requests, execution_s(problem), problem.slo_scale_of, use, seconds, model_use, itl)


class _Left:
    """Online requests that have not ended."""

    def __init__(self) -> None:
        self.num = 0

    def ended(self, _: int) -> None:
        self.num -= 1


def _longest(fleet: Fleet) -> dict[str, int]:
    """Tokens of prompt and output that some instance takes of each model."""
    found: dict[str, int] = {}
    for instance in fleet.instances.values():
        for served in instance.info().models:
            found[served.name] = max(found.get(served.name, 0), served.max_model_len)
    return found


def requests_of(
    problem: Problem, jobs: Sequence[Job], records: Sequence[Record], numbers: np.ndarray, now: float
) -> metrics.Requests:
    """`numbers`: in jobs and records, of each request of the traffic, -1: it was not sent; then those of other jobs."""
    traffic = problem.traffic
    lines = [jobs[number] for number in numbers[traffic.num_requests :].tolist()]
    models = tuple(dict.fromkeys([*traffic.models, *(line.model for line in lines)]))
    index = {name: number for number, name in enumerate(models)}
    times = np.full((len(numbers), 5), np.nan)
    times[:, 3:] = 0.0
    for row, number in enumerate(numbers.tolist()):
        if number < 0:
            continue
        record = records[number]
        is_done = record.ended_s >= 0 and not record.error
        times[row, 3:] = record.num_tokens, is_done
        if record.first_s >= 0:
            times[row, 0] = record.ttft_s
        if (tpot_s := record.tpot_s) is not None:
            times[row, 1] = tpot_s
        if not record.error:
            times[row, 2] = record.latency_s if is_done else now - record.arrival_s

    def column(known: np.ndarray, added: Sequence[float]) -> np.ndarray:
        return np.concatenate([known, np.array(added, known.dtype)])

    return metrics.Requests(
        models=models,
        model=column(traffic.model, [index[line.model] for line in lines]),
        is_online=column(traffic.is_online, [False] * len(lines)),
        arrival_s=column(traffic.arrival_s, [line.at_s for line in lines]),
        prompt_tokens=column(traffic.prompt_tokens, [line.prompt_tokens for line in lines]),
        output_tokens=column(traffic.output_tokens, [line.output_tokens for line in lines]),
        num_tokens=times[:, 3].astype(int),
        ttft_s=times[:, 0],
        tpot_s=times[:, 1],
        latency_s=times[:, 2],
        is_done=times[:, 4].astype(bool),
    )
