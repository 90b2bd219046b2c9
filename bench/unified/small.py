"""The live variants in virtual time: three instances of one thread each on two cores, with the step times of the three
models there, or three devices with those of large ones, and batches that fill what is left. Steps of a few milliseconds, or
of any number of times as long.

Nothing is placed anew: a part that this says nothing of."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from bench.fidelity.workloads import EMULATED_MODELS, MIXES, MODELS, Mix, planned
from bench.unified.variants import MIX, Online, Row, Variant, row
from shared.costs.model import CostModel, StepShape
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.messages.requests import RequestClass
from shared.placement.facts import SHAPES
from shared.placement.hardware import HARDWARE, cost_model
from shared.simulation.deployment import Serving
from shared.simulation.fleet import Device, Fleet, Instance, Model
from shared.simulation.gateway import Job

CORES = 2
BESIDE = 1.15
"""Factor of a step while another instance computes (bench/fidelity)."""
STEP_TIMES = {
    "small": CostModel(
        fixed_s=2.45e-3, prefill_token_s=23e-6, prefill_attention_s=1.2e-7, decode_s=85e-6, decode_context_s=5e-7,
        over_knee_s=164e-6, knee_tokens=4, num_layers=12,
    ),
    "medium": CostModel(
        fixed_s=4.35e-3, prefill_token_s=70e-6, prefill_attention_s=1.2e-7, decode_s=149e-6, decode_context_s=5e-7,
        over_knee_s=265e-6, knee_tokens=6, num_layers=10,
    ),
    "large": CostModel(
        fixed_s=8.78e-3, prefill_token_s=108e-6, prefill_attention_s=1.2e-7, decode_s=205e-6, decode_context_s=5e-7,
        over_knee_s=542e-6, knee_tokens=6, num_layers=20,
    ),
}  # fmt: skip
"""Step times of the models of bench/fidelity, as an instance of one thread measured them (EPYC, compiled kernels);
contexts guessed."""
PATIENCE_S = 60.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mix: Mix = MIXES[1]
    rate_rps: float = 4.0
    run_s: float = 40.0
    slowness: float = 1.0
    """Factor on all step times, and on the objectives where it is more than 1; rates and times are divided by it."""
    line_tokens: tuple[int, int] = (256, 48)
    num_lines: int = 12
    """Under way at once."""
    token_budget: int = 512
    num_merged: int = 256
    """Merged blocks of an instance's KV pool."""
    device: str = ""
    """By its name in `placement.hardware`, as what instances emulate live; "": a thread of this machine."""

    def costs(self) -> dict[str, CostModel]:
        if self.device:
            return {name: cost_model(HARDWARE[self.device], SHAPES[shape]) for name, shape in EMULATED_MODELS.items()}
        return {name: cost.scaled(self.slowness) for name, cost in STEP_TIMES.items()}


CASES = (
    Case(name="short steps"),
    Case(name="short steps, many lines", num_lines=60, run_s=30.0),
    Case(name="short steps, busy", rate_rps=7.0),
    Case(name="short steps, chat", mix=MIXES[0], rate_rps=3.5),
    Case(name="steps to 1 s, few requests", rate_rps=1.0, line_tokens=(700, 40), num_lines=24, token_budget=2048),
    Case(name="steps 8 times as long", slowness=8.0, run_s=25.0),
    *(
        Case(name=f"A100s, {rate} requests/s", device="A100-80G", mix=MIX, rate_rps=rate, run_s=20.0, num_lines=60)
        for rate in (12, 25, 45, 70, 100)
    ),
    *(
        Case(
            name=f"A100s, {rate} requests/s, little memory", device="A100-80G", mix=MIX, rate_rps=rate, run_s=20.0,
            num_lines=60, num_merged=28,
        )
        for rate in (45, 70)
    ),
)  # fmt: skip


def simulate(job: tuple[Variant, Case, int]) -> Row:
    """`job`: variant, case, seed."""
    variant, case, seed = job
    slowness, run_s = case.slowness, case.run_s * case.slowness
    how = Serving(
        order_policy=variant.order_policy, dispatch_policy=variant.dispatch_policy, migration=variant.migration,
        co_serving=variant.co_serving, interruption=variant.interruption, least_share=variant.least_share,
    )  # fmt: skip
    fleet = how.fleet(seed)
    fleet.gateway.is_strict = False

    def slowdown(one: Instance) -> float:
        busy = 1 + sum(other.host.is_computing for other in fleet.instances.values() if other is not one)
        return max(1.0, busy / CORES) * (BESIDE if busy > 1 else 1.0)

    if not case.device:
        fleet.slowdown = slowdown
    costs = case.costs()
    _add_instances(fleet, variant, case, costs)
    requests = planned(case.mix, case.rate_rps / slowness, run_s, name="online", seed=seed)
    for one in requests:
        fleet.submit_at(Job(one.at_s, one.prompt_tokens, one.output_tokens, model=one.model))
    if variant.harvests:
        _Lines(fleet, case, run_s, seed)
    num = len(requests)
    records = fleet.gateway.records
    fleet.events.at(run_s, lambda: None)
    fleet.events.run(
        lambda: fleet.events.now >= run_s and all(record.ended_s >= 0 for record in records[:num]),
        run_s + PATIENCE_S * slowness,
    )
    alone_s = {
        name: float(np.mean([_alone_s(costs[name], one.prompt_tokens, one.output_tokens) for one in requests]))
        for name in MODELS
    }
    online = [
        Online(
            record.latency_s if record.ended_s >= 0 and not record.error else math.inf,
            record.ttft_s if record.first_s >= 0 else math.inf,
            math.nan if record.tpot_s is None else record.tpot_s,
            record.longest_gap_s,
            alone_s[request.model],
        )
        for request, record in zip(requests, records, strict=False)
    ]
    tokens = sum(record.num_tokens + record.prompt_tokens for record in records[num:] if record.num_tokens)
    use = sum(fleet.busy_s.values()) / fleet.events.now / len(fleet.instances)
    moved = sum(record.num_migrations for record in records)
    itl = fleet.gateway.itl_of().summary()
    return row(variant, online, itl=itl, offline_tokens_s=tokens / fleet.events.now, use=use, migrations=moved)


def _add_instances(fleet: Fleet, variant: Variant, case: Case, costs: dict[str, CostModel]) -> None:
    longer = max(1.0, case.slowness)
    configuration = Configuration(
        num_merged=case.num_merged, num_rows=256, ordering=variant.order_policy, token_budget=case.token_budget,
        steps_in_flight=1, co_serving=variant.co_serving, interruption=variant.interruption, num_host_merged=256,
        ttft_s=1.5 * longer, tpot_s=0.11 * longer, least_share=variant.least_share,
    )  # fmt: skip
    for number, own in enumerate(MODELS):
        models = [
            Model(shape=ModelShape(name, 32, 8, 1024, num_layers=costs[name].num_layers), cost_model=costs[name])
            for name in ([own] if variant.placement == "dedicated" else MODELS)
        ]
        fleet.add_instance(f"instance-{number}", Device(configuration=configuration), models)


def _alone_s(cost: CostModel, prompt: int, output: int) -> float:
    first_s = cost.predict(StepShape(prompt, prompt * prompt / 2, 0, 0))
    return first_s + (output - 1) * cost.predict(StepShape(0, 0.0, 1, prompt))


class _Lines:
    """Offline requests, each sent when another has its answer."""

    def __init__(self, fleet: Fleet, case: Case, run_s: float, seed: int) -> None:
        self._fleet, self._case, self._run_s = fleet, case, run_s
        self._draw = np.random.default_rng(seed)
        for _ in range(case.num_lines):
            fleet.events.at(0.01, self._send)

    def _send(self, _: int = 0) -> None:
        events, gateway = self._fleet.events, self._fleet.gateway
        if events.now < self._run_s:
            model = list(MODELS)[self._draw.integers(len(MODELS))]
            job = Job(events.now, *self._case.line_tokens, model=model, request_class=RequestClass.OFFLINE)
            events.after(0.005, gateway.send, gateway.expect(job, self._send))
