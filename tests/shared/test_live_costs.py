"""Step times are learnt from the steps that run: soon, whatever the device, and in spite of stalls."""

from __future__ import annotations

import random

import pytest

from shared.costs.live import FIRST_STEP_TOKENS, GROWTH, PRIOR, LiveCosts
from shared.costs.model import CostModel, StepShape

CPU = CostModel(
    fixed_s=0.025,
    prefill_token_s=0.00035,
    prefill_attention_s=1e-6,
    decode_s=0.0025,
    decode_context_s=1e-6,
    mixed_s=0.006,
)
DEVICES = {
    "few cores": CPU,
    "few cores, a large model": CPU.scaled(20),
    "gpu": CostModel(
        fixed_s=0.007,
        prefill_token_s=2e-5,
        prefill_attention_s=2e-9,
        decode_s=3e-5,
        decode_context_s=2e-8,
        over_knee_s=3e-5,
        knee_tokens=256,
    ),
}


def random_shape(draw: random.Random, max_tokens: int) -> StepShape:
    prefill = draw.choice((0, 0, draw.randrange(2, max_tokens - 15)))
    decodes = draw.randrange(0 if prefill else 1, 16)
    attention = prefill * (draw.randrange(300) + prefill / 2)
    return StepShape(prefill, attention, decodes, decodes * draw.randrange(30, 500))


def learnt(true: CostModel, num_steps: int, seed: int, *, noise: float = 0.05, stalls: float = 0.03) -> LiveCosts:
    draw, costs = random.Random(seed), LiveCosts()
    for _ in range(num_steps):
        shape = random_shape(draw, min(512, costs.max_step_tokens))
        stall = 10 if draw.random() < stalls else 1
        costs.observe(shape, true.predict(shape) * draw.lognormvariate(0, noise) * stall)
    return costs


def errors(costs: LiveCosts, true: CostModel, seed: int) -> list[float]:
    draw = random.Random(seed + 1000)
    shapes = [random_shape(draw, min(512, costs.max_step_tokens)) for _ in range(200)]
    return sorted(abs(costs.cost_model.predict(shape) / true.predict(shape) - 1) for shape in shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_right_soon_on_any_device(device: str, seed: int) -> None:
    of_few, of_many = (errors(learnt(DEVICES[device], n, seed), DEVICES[device], seed) for n in (30, 400))
    assert of_few[100] < 0.15 and of_few[190] < 0.5
    assert of_many[100] < 0.1 and of_many[190] < 0.25


def test_one_step_sets_the_level() -> None:
    costs = LiveCosts()
    decodes = StepShape(num_decodes=4, decode_context_tokens=400)
    costs.observe(decodes, 3 * PRIOR.predict(decodes))
    assert costs.cost_model.predict(decodes) == pytest.approx(3 * PRIOR.predict(decodes))
    assert costs.cost_model.prefill_token_s == pytest.approx(3 * PRIOR.prefill_token_s)


def test_a_stall_of_a_shape_that_is_known_changes_little() -> None:
    costs, shape = LiveCosts(), StepShape(num_decodes=4, decode_context_tokens=400)
    for seconds in (*[0.03] * 6, 3.0, 3.0, 3.0):
        costs.observe(shape, seconds)
    assert costs.cost_model.predict(shape) == pytest.approx(0.03, rel=0.01)


def test_it_follows_a_machine_that_turns_slow() -> None:
    costs, draw = learnt(CPU, 200, 1), random.Random(5)
    for _ in range(400):
        shape = random_shape(draw, 512)
        costs.observe(shape, CPU.scaled(2).predict(shape))
    assert errors(costs, CPU.scaled(2), 1)[190] < 0.25


def test_prompts_are_not_forgotten_for_a_thousand_decodes() -> None:
    costs, prompt = learnt(CPU, 200, 2, stalls=0.0), StepShape(256, 256 * 128.0)
    for number in range(1000):
        shape = StepShape(num_decodes=8, decode_context_tokens=800 + number)
        costs.observe(shape, CPU.predict(shape))
    assert costs.cost_model.predict(prompt) == pytest.approx(CPU.predict(prompt), rel=0.2)


def test_steps_grow_from_short_ones() -> None:
    costs, sizes = LiveCosts(), []
    while costs.max_step_tokens < 500:
        shape = StepShape(costs.max_step_tokens, costs.max_step_tokens**2 / 2)
        sizes.append(shape.num_tokens)
        costs.observe(shape, CPU.predict(shape))
    assert sizes == [FIRST_STEP_TOKENS * GROWTH**n for n in range(4)]


def test_time_that_did_not_pass_says_nothing() -> None:
    costs = LiveCosts()
    assert not costs.observe(StepShape(num_decodes=1), 0.0)
    assert costs.cost_model.predict(StepShape(num_decodes=1)) == PRIOR.predict(StepShape(num_decodes=1))


def test_it_is_cautious_and_unknown_at_first() -> None:
    costs = LiveCosts(num_layers=12, layers_per_safepoint=4)
    assert not costs.is_known
    assert (costs.cost_model.num_layers, costs.cost_model.layers_per_safepoint) == (12, 4)
    assert all(learnt(CPU, 8, seed).is_known for seed in range(3))
