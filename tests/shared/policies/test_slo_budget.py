"""The step limits of the SLO budget, and what a step filled under them takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost_model import CostModel, StepShape
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import Limits, StepBudget, StepView
from tests.shared.policies.views import COST

INF = math.inf


def view(
    tpot_s: float = INF, ttft_left_s: float = INF, *, other: bool = False, cost: CostModel | None = COST
) -> StepView:
    return StepView("m", 0.0, cost, tpot_s, ttft_left_s, other)


def test_without_online_work_only_the_tokens_bound_the_step() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view()) == Limits(512, is_interruptible=True)
    assert policy.limits(view(cost=None)) == Limits(512, is_interruptible=True)


def test_without_a_cost_model_online_steps_are_bounded_by_tokens() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view(0.1, cost=None)) == Limits(512)
    assert policy.limits(view(other=True, cost=None)) == Limits(512)


def test_a_decode_bounds_the_step_by_its_objective_whatever_ttft_is_left() -> None:
    policy = SloTokenBudget(512, safety=0.9)
    for ttft_left_s in (INF, 10.0, 0.01, -5.0):
        assert policy.limits(view(0.1, ttft_left_s)) == Limits(512, 0.9 * 0.1)


def test_prompts_alone_may_use_the_time_left_and_offline_tokens_a_small_share_of_it() -> None:
    policy = SloTokenBudget(512, safety=0.9, filler_share=0.05)
    limits = policy.limits(view(ttft_left_s=1.5))
    assert limits.limit_s == pytest.approx(1.35) and limits.offline_limit_s == pytest.approx(0.075)
    budget = StepBudget(limits, COST)
    budget.take_prefill(100, 0)
    online_s = budget.used_s
    assert budget.left_s == pytest.approx(1.35 - online_s)
    budget.begin_offline()
    assert budget.left_s == pytest.approx(0.075 - online_s)


def test_models_that_both_have_online_work_share_the_objective() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view(0.1, other=True)).limit_s == pytest.approx(policy.limits(view(0.1)).limit_s / 2)


def test_offline_work_beside_another_models_online_work_is_short() -> None:
    limits = SloTokenBudget(512, other_step_s=0.05).limits(view(other=True))
    assert limits == Limits(512, 0.05)


def test_late_prompts_are_computed_in_chunks_worth_their_fixed_cost() -> None:
    policy = SloTokenBudget(4096, min_fixed_costs=4.0)
    limit_s = policy.limits(view(ttft_left_s=-3.0)).limit_s
    assert limit_s == pytest.approx(4 * COST.predict(StepShape()))
    assert StepBudget(policy.limits(view(ttft_left_s=-3.0)), COST).fits_prefill(4096, 0) > 250


def test_settings_out_of_range_are_refused() -> None:
    for max_tokens, chunk, safety, filler_share in (
        (0, 32, 0.9, 0.2),
        (8, 0, 0.9, 0.2),
        (8, 8, 0.0, 0.2),
        (8, 8, 0.9, 1.5),
    ):
        with pytest.raises(ValueError):
            SloTokenBudget(max_tokens, chunk, safety=safety, filler_share=filler_share)


costs = st.builds(
    CostModel,
    fixed_s=st.floats(1e-4, 0.2),
    prefill_token_s=st.floats(1e-6, 5e-3),
    prefill_attention_s=st.just(0.0) | st.floats(1e-11, 1e-7),
    decode_s=st.floats(1e-6, 1e-2),
    decode_context_s=st.floats(0, 1e-6),
    over_knee_s=st.floats(0, 1e-4),
    knee_tokens=st.integers(0, 300),
)


@settings(deadline=None)
@given(costs, st.floats(-10, 10), st.integers(0, 8192), st.integers(1, 64), st.booleans())
def test_a_prompt_always_advances_where_nothing_decodes(
    cost: CostModel, ttft_left_s: float, context: int, chunk: int, other: bool
) -> None:
    limits = SloTokenBudget(512, chunk).limits(view(ttft_left_s=ttft_left_s, other=other, cost=cost))
    budget = StepBudget(limits, cost)
    assert budget.fits_prefill(chunk, context) >= chunk - 1  # the inverse may round one token off
    assert budget.fits_prefill(1, context) == 1


@settings(deadline=None)
@given(
    costs, st.floats(0.001, 1), st.lists(st.integers(1, 4000), max_size=30), st.integers(0, 2000), st.integers(0, 4000)
)
def test_offline_tokens_never_break_the_tpot_objective(
    cost: CostModel, tpot_s: float, online: list[int], prompt: int, offline: int
) -> None:
    """Filled as a planner does; only online sequences may exceed it, or an objective below the least step."""
    policy = SloTokenBudget(4096)
    limits = policy.limits(view(tpot_s, cost=cost))
    least_s = policy.limits(view(1e-12, cost=cost)).limit_s
    budget = StepBudget(limits, cost)
    budget.take_decodes(len(online), sum(online))
    if count := budget.fits_prefill(prompt, 0):
        budget.take_prefill(count, 0)
    online_s = cost.predict(budget.shape)
    budget.begin_offline()
    count = budget.fits_decodes([10, 1000, 30])
    budget.take_decodes(count, sum([10, 1000, 30][:count]))
    if count := budget.fits_prefill(offline, 100):
        budget.take_prefill(count, 100)
    assert cost.predict(budget.shape) <= max(tpot_s, online_s, least_s) * (1 + 1e-9) + 1e-9
