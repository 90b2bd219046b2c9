"""The cost model grows with every load, its inverse is exact, and the fit finds what steps were made from."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs import fit as cost_fit
from shared.costs.model import CostModel, LiveScale, StepShape, shape_of

costs = st.builds(
    CostModel,
    fixed_s=st.floats(0, 0.2),
    prefill_token_s=st.just(0.0) | st.floats(1e-7, 5e-3),
    prefill_attention_s=st.just(0.0) | st.floats(1e-13, 1e-6),
    decode_s=st.floats(0, 1e-2),
    decode_context_s=st.floats(0, 1e-5),
    over_knee_s=st.just(0.0) | st.floats(1e-7, 1e-3),
    knee_tokens=st.integers(0, 600),
    prefill_s=st.floats(0, 0.01),
    mixed_s=st.floats(0, 0.01),
)
chunks = st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 4000)), max_size=6)


def shape(sequences: list[tuple[int, int]]) -> StepShape:
    return shape_of([start for start, _ in sequences], [count for _, count in sequences])


def test_a_shape_counts_one_token_as_a_decode() -> None:
    assert shape([(10, 1), (20, 1), (100, 8)]) == StepShape(8, 8 * 104, 2, 30)
    assert shape([]).num_tokens == 0


@given(costs, chunks, st.integers(0, 8000), st.integers(1, 4000))
def test_every_sequence_added_or_lengthened_costs(
    cost: CostModel, sequences: list[tuple[int, int]], start: int, count: int
) -> None:
    seconds = cost.predict(shape([*sequences, (start, count)]))
    assert seconds >= cost.predict(shape(sequences))
    assert cost.predict(shape([*sequences, (start + 1, count)])) >= seconds
    if count > 1:
        assert cost.predict(shape([*sequences, (start, count + 1)])) >= seconds


@settings(max_examples=400)
@given(costs, chunks, st.floats(-0.1, 1), st.integers(0, 8000))
def test_the_inverse_is_the_longest_chunk_that_fits(
    cost: CostModel, sequences: list[tuple[int, int]], seconds: float, context: int
) -> None:
    before = shape(sequences)
    count = cost.max_prefill_tokens(seconds, before, context)
    assert 0 <= count < 2**31

    def added_s(num_tokens: int) -> float:
        attention = num_tokens * (context + num_tokens / 2)
        after = before._replace(
            prefill_tokens=before.prefill_tokens + num_tokens, prefill_attention=before.prefill_attention + attention
        )
        return cost.predict(after) - cost.predict(before)

    rounding_s = 1e-9 * (cost.predict(before) + abs(seconds))
    if count:
        assert added_s(count) <= seconds + rounding_s
    if count < 2**31 - 1:
        assert added_s(count + 1) >= seconds - rounding_s


@given(costs, chunks, st.floats(0.1, 10))
def test_scaling_multiplies_every_step(cost: CostModel, sequences: list[tuple[int, int]], factor: float) -> None:
    assert cost.scaled(factor).predict(shape(sequences)) == pytest.approx(factor * cost.predict(shape(sequences)))


# ---------------------------------------------------------------------------------------------------------- scale


def test_the_scale_follows_drift_and_not_stalls() -> None:
    draw, scale = random.Random(0), LiveScale()
    assert scale.factor == 1.0
    for _ in range(200):
        scale.observe(0.01, 0.013 * draw.uniform(0.95, 1.05))
    assert scale.factor == pytest.approx(1.3, rel=0.02)
    for i in range(100):
        scale.observe(0.01, 1.0 if i % 20 == 0 else 0.013)
    assert scale.factor == pytest.approx(1.3, rel=0.04)
    for _ in range(200):
        scale.observe(0.01, 0.002)
    assert scale.factor == pytest.approx(0.2, rel=0.02)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=50))
def test_the_scale_is_always_positive_and_moves_in_small_steps(observed: list[tuple[float, float]]) -> None:
    scale = LiveScale()
    for predicted_s, real_s in observed:
        before = scale.factor
        scale.observe(predicted_s, real_s)
        assert 0.97 < scale.factor / before < 1.03


# ------------------------------------------------------------------------------------------------------------ fit


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_nnls_meets_the_conditions_of_the_optimum(columns: int, extra_rows: int, seed: int) -> None:
    """Karush, Kuhn, Tucker: no coefficient is negative, and the gradient is zero where one is positive and does not ask
    for more where one is zero."""
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(size=(columns + extra_rows, columns)), draw.normal(size=columns + extra_rows)
    x = cost_fit.nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all() and (gradient <= 1e-7).all() and (np.abs(gradient[x > 0]) <= 1e-7).all()


TRUE = CostModel(
    fixed_s=2e-3, prefill_token_s=2e-5, prefill_attention_s=4e-8, decode_s=1e-4, decode_context_s=4e-7,
    over_knee_s=3e-5, knee_tokens=128, prefill_s=5e-4, mixed_s=8e-4,
)  # fmt: skip


def steps(seed: int, num: int = 150) -> list[StepShape]:
    draw = random.Random(seed)

    def sequences() -> list[tuple[int, int]]:
        decodes = [(draw.randrange(2000), 1)] * draw.choice((0, 1, 2, 8, 30, 64))
        prompts = [(draw.choice((0, 300, 1000)), draw.choice((16, 60, 128, 300)))] * draw.choice((0, 1, 1, 2))
        return decodes + prompts or [(5, 1)]

    return [shape(sequences()) for _ in range(num)]


def test_the_fit_finds_what_steps_were_made_from() -> None:
    fitted = cost_fit.fit([(step, TRUE.predict(step)) for step in steps(1)])
    held_out = [(step, TRUE.predict(step)) for step in steps(2)]
    median, p99 = cost_fit.errors(fitted, held_out)
    assert median < 0.01 and p99 < 0.03
    assert fitted.decode_s + fitted.decode_context_s * 100 == pytest.approx(1.4e-4, rel=0.1)
    assert 60 <= fitted.knee_tokens <= 200


def test_noise_and_stalls_do_not_spoil_the_fit() -> None:
    draw = random.Random(3)
    noisy = [
        (step, TRUE.predict(step) * draw.uniform(0.95, 1.05) * (10 if draw.random() < 0.03 else 1)) for step in steps(1)
    ]
    median, p99 = cost_fit.errors(cost_fit.fit(noisy), [(step, TRUE.predict(step)) for step in steps(2)])
    assert median < 0.03 and p99 < 0.1


def test_a_knee_is_not_found_where_there_is_none() -> None:
    straight = CostModel(
        fixed_s=2e-3, prefill_token_s=2e-5, prefill_attention_s=4e-8, decode_s=1e-4, decode_context_s=4e-7
    )
    draw = random.Random(5)
    fitted = cost_fit.fit([(step, straight.predict(step) * draw.uniform(0.97, 1.03)) for step in steps(1)])
    assert fitted.knee_tokens == 0 and fitted.over_knee_s == 0


def test_few_steps_still_make_a_cost_model() -> None:
    only = StepShape(0, 0.0, 4, 100)
    assert cost_fit.fit([(only, 0.004)]).predict(only) == pytest.approx(0.004)
    with pytest.raises(ValueError):
        cost_fit.fit([])
    with pytest.raises(ValueError):
        cost_fit.fit([(only, 0.0)])


def test_what_is_stored_keeps_its_names() -> None:
    """Cost models outlive versions, in NATS and in files; a copy that is taken for free would fill steps with copies."""
    stored = (
        b'{"fixed_s":0.1,"prefill_token_s":0.0,"prefill_attention_s":0.0,"decode_s":0.0,"decode_context_s":0.0,'
        b'"checkpoint_slot_s":0.02,"restore_slot_s":0.03}'
    )
    known = msgspec.json.decode(stored, type=CostModel)
    assert (known.checkpoint_block_s, known.restore_block_s) == (0.02, 0.03)
    assert msgspec.json.decode(msgspec.json.encode(known), type=CostModel) == known
