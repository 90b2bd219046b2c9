"""Streams of several models on one instance, in virtual time: none stands still for longer than it may, whatever the others
do (shared/policies/silence.py)."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque

import msgspec
import pytest

from shared.costs.model import CostModel, shape_of
from shared.engine.calls import AddModel, OnStep, SetCostModel, SetStatistics, Submit
from shared.engine.engine import Engine
from shared.engine.model_queue import ModelQueue
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.engine.requests import Ended
from shared.engine.sequence import Sequence
from shared.messages.cluster import ExecutionStatistics
from shared.messages.requests import GenerationRequest, Priority, RequestClass, SamplingParams, pack_tokens
from shared.policies.catalogue import ordering_policy
from shared.policies.silence import allowed_silence_s
from shared.policies.slo_budget import SloTokenBudget
from tests.shared.costs import GPU_7B as COST

TPOT_S = 0.11
PAGE = 32


class Instance:
    def __init__(
        self,
        order: str,
        num_models: int,
        mean_s: float,
        depth: int,
        *,
        mix_phases: bool = True,
        cost_model: CostModel = COST,
    ) -> None:
        self.cost_model = cost_model
        self.engine = Engine(
            20_000, 256, ordering_policy(order), SloTokenBudget(2048), steps_in_flight=depth, ttft_s=1.5, tpot_s=TPOT_S,
            mix_phases=mix_phases,
        )  # fmt: skip
        self.models = [f"m{number}" for number in range(num_models)]
        for model in self.models:
            self.engine.apply(AddModel(ModelShape(model, PAGE, 1, 1 << 20)), 0.0)
            self.engine.apply(SetCostModel(model, cost_model), 0.0)
            self.engine.apply(SetStatistics(ExecutionStatistics(model, mean_s, mean_s, 100)), 0.0)
        self.ended: list[Ended] = []
        self.num_sent = 0

    def submit(
        self,
        model: str,
        num_prompt: int,
        num_output: int,
        now: float,
        *,
        request_class: RequestClass = RequestClass.ONLINE,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self.num_sent += 1
        prompt = pack_tokens([self.num_sent * 7919 % 30_000 + i for i in range(num_prompt)])
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
        sent = GenerationRequest(
            request_id=str(self.num_sent),
            gateway_id="g",
            model=model,
            prompt=prompt,
            sampling=sampling,
            timeout_s=1e6,
            request_class=request_class,
            priority=priority,
        )
        assert self.engine.apply(Submit(sent), now) is None

    def run(self, arrivals: list[tuple[float, str, int, int, dict[str, object]]]) -> None:
        """Until all has ended; `arrivals`: (time, model, prompt, output, more). Steps run one after the other."""
        engine, now, free_s = self.engine, 0.0, 0.0
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        in_flight: deque[tuple[float, StepPlan]] = deque()
        while True:
            while waiting and waiting[0][0] <= now:
                _, model, num_prompt, num_output, more = waiting.popleft()
                self.submit(model, num_prompt, num_output, now, **more)  # type: ignore[arg-type]
            while len(in_flight) < engine.steps.max_in_flight and (plan := engine.plan(now)) is not None:
                free_s = max(now, free_s) + self.cost_model.predict(shape_of(plan.starts, plan.counts))
                in_flight.append((free_s, plan))
            if not in_flight:
                if not waiting:
                    return
                now = waiting[0][0]
                continue
            end_s, plan = in_flight[0]
            if waiting and waiting[0][0] < end_s:
                now = waiting[0][0]
                continue
            in_flight.popleft()
            now = end_s
            engine.apply(OnStep(StepResult(plan.step_id, [5] * sum(plan.samples))), now)
            self.ended += [effect for effect in engine.effects() if isinstance(effect, Ended)]

    def max_itl_s(self, priority: Priority | None = None) -> float:
        online = [e for e in self.ended if e.request.request_class == RequestClass.ONLINE]
        return max(e.max_itl_s for e in online if priority in (None, e.request.priority))


@pytest.mark.parametrize(
    ("num_models", "mean_s", "depth"),
    [
        pytest.param(*case, marks=[] if index % 5 == 0 else pytest.mark.long)
        for index, case in enumerate(itertools.product([2, 5, 8], [0.5, 2.0, 10.0], [1, 2]))
    ],
)
def test_long_streams_of_several_models_go_on_beside_each_other(num_models: int, mean_s: float, depth: int) -> None:
    instance = Instance("doubling_budget", num_models, mean_s, depth)
    instance.run([(0.0, model, 100, 600, {}) for model in instance.models for _ in range(2)])
    assert len(instance.ended) == 2 * num_models
    assert instance.max_itl_s() <= 0.3


def test_the_papers_choice_of_the_model_lets_them_stand_still_for_seconds() -> None:
    instance = Instance("seallm", 2, 2.0, 1)
    instance.run([(0.0, model, 100, 1500, {}) for model in instance.models for _ in range(2)])
    assert instance.max_itl_s() > 5.0


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (3, 4, 5))])
def test_prompts_of_thousands_of_tokens_make_no_stream_stand_still(seed: int) -> None:
    """Models whose requests are short take most turns, with prompts up to 10,000 tokens; the others' streams go on."""
    draw = random.Random(seed)
    instance = Instance("doubling_budget", draw.randint(2, 6), 1.0, 1 + seed % 2)
    for model in instance.models:
        mean_s = draw.choice([0.1, 1.0, 20.0])
        instance.engine.apply(SetStatistics(ExecutionStatistics(model, mean_s, mean_s, 100)), 0.0)
    arrivals = [
        (draw.uniform(0, 20), draw.choice(instance.models), draw.choice([100, 2000, 10_000]), draw.randint(2, 300), {})
        for _ in range(60)
    ]
    offline = {"request_class": RequestClass.OFFLINE}
    arrivals += [(draw.uniform(0, 20), draw.choice(instance.models), 3000, 100, offline) for _ in range(5)]
    instance.run(arrivals)
    assert len(instance.ended) == 65
    assert not instance.engine.counters.preemptions, "memory lasted"
    assert instance.max_itl_s() <= allowed_silence_s(TPOT_S)


def test_normal_streams_go_on_beside_high_priority() -> None:
    """High-priority prompts of another model, and of their own, fill whole steps."""
    high = {"priority": Priority.HIGH}
    for model in ("m0", "m1"):
        instance = Instance("doubling_budget", 2, 1.0, 1)
        arrivals = [(0.0, "m0", 100, 300, {})] + [(1.0, model, 20_000, 200, high) for _ in range(3)]
        instance.run(arrivals)
        assert len(instance.ended) == 4
        assert instance.max_itl_s(Priority.NORMAL) <= allowed_silence_s(TPOT_S)


def test_a_request_tells_of_its_longest_silence() -> None:
    instance = Instance("round_robin", 2, 1.0, 1)
    instance.run([(0.0, "m0", 100, 50, {}), (0.2, "m1", 2000, 1, {})])
    (long,) = [ended for ended in instance.ended if ended.num_output_tokens == 50]
    prefill_s = COST.predict(shape_of([0], [2000]))
    decode_s = COST.predict(shape_of([150], [1]))
    assert long.max_itl_s == pytest.approx(prefill_s + decode_s, rel=0.02)


def test_with_one_phase_a_step_prompts_do_not_make_streams_of_their_own_model_stand_still() -> None:
    instance = Instance("doubling_budget", 1, 1.0, 1, mix_phases=False)
    instance.run([(0.0, "m0", 100, 100, {})] + [(0.5, "m0", 15_000, 2, {}) for _ in range(5)])
    assert len(instance.ended) == 6
    assert instance.max_itl_s() <= allowed_silence_s(TPOT_S)


@pytest.mark.parametrize(("num_models", "step_s"), [(8, 0.03), (4, 0.07), (2, 0.18)])
def test_prompts_are_not_locked_out_where_streams_are_always_urgent(num_models: int, step_s: float) -> None:
    """Serving the streams of all models takes most of what they may stand still, and goes on for long."""
    cost_model = msgspec.structs.replace(COST, fixed_s=step_s)
    instance = Instance("doubling_budget", num_models, 2.0, 1, cost_model=cost_model)
    streams = [(0.0, model, 50, 400, {}) for model in instance.models[:-1] for _ in range(2)]
    instance.run([*streams, (5.0, instance.models[-1], 100, 3, {})])
    (late,) = [ended for ended in instance.ended if ended.num_output_tokens == 3]
    assert late.first_token_s is not None
    assert late.first_token_s - late.submitted_s < 3.0
    assert instance.max_itl_s() < 1.0


def test_who_is_new_does_not_wait_for_turns_that_another_model_saved_up() -> None:
    """A model whose turns are rare runs for long because its stream is due, then one of its like comes."""
    instance = Instance("doubling_budget", 3, 1.0, 1)
    for model, mean_s in zip(instance.models, (20.0, 0.2, 0.2), strict=True):
        instance.engine.apply(SetStatistics(ExecutionStatistics(model, mean_s, mean_s, 100)), 0.0)
    busy: list[tuple[float, str, int, int, dict[str, object]]] = [(0.2 * n, "m1", 100, 20, {}) for n in range(220)]
    instance.run([(0.0, "m0", 100, 2500, {}), *busy, (40.0, "m2", 100, 2, {})])
    (late,) = [ended for ended in instance.ended if ended.num_output_tokens == 2]
    assert late.first_token_s is not None
    assert late.first_token_s - late.submitted_s < 0.6


def test_a_stream_that_came_from_elsewhere_is_one_before_its_first_step_here() -> None:
    queue = ModelQueue(ModelShape("m0", PAGE, 1, 1 << 20))
    sent = GenerationRequest(
        request_id="1",
        gateway_id="g",
        model="m0",
        prompt=pack_tokens([1, 2]),
        sampling=SamplingParams(max_tokens=9),
        timeout_s=9.0,
    )
    sequence = Sequence(sent, 1, 0.0, 100, PAGE)
    sequence.first_token_s, sequence.last_ran_s, sequence.tpot_objective_s = 1.0, 2.0, TPOT_S
    assert queue.streams(2.1)[0] == math.inf
    queue.restored[1] = sequence
    left_s, _ = queue.streams(2.1)
    assert 0.0 < left_s <= allowed_silence_s(TPOT_S) - 0.1


def test_decodes_that_nothing_can_join_have_no_limit() -> None:
    instance = Instance("doubling_budget", 1, 1.0, 1)
    engine = instance.engine

    def step(now: float) -> float:
        plan = engine.plan(now)
        assert plan is not None
        engine.apply(OnStep(StepResult(plan.step_id, [5] * sum(plan.samples))), now + 0.02)
        return engine.planner.last_limit_s

    def submit(request_id: str) -> None:
        engine.apply(
            Submit(
                GenerationRequest(
                    request_id=request_id,
                    gateway_id="g",
                    model="m0",
                    prompt=pack_tokens([1] * 100),
                    sampling=SamplingParams(max_tokens=9),
                )
            ),
            0.0,
        )

    submit("1")
    step(0.0)
    assert step(0.1) == math.inf
    assert engine.planner.leaders.last_limits.max_tokens == 2048
    submit("2")
    assert step(0.2) < allowed_silence_s(TPOT_S), "the prompt is not to make the stream stand still"
    assert step(0.3) == math.inf
