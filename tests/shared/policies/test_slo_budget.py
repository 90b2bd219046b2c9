"""The step limits of the SLO budget, and what a step filled under them takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.model import CostModel, StepShape
from shared.policies.slo_budget import PACE, SloTokenBudget
from shared.policies.token_budget import Limits, StepBudget, StepView
from tests.shared.policies.views import COST

INF = math.inf
NOTHING = StepShape()


def view(
    tpot_s: float = INF,
    slack_s: float = INF,
    ttft_left_s: float = INF,
    *,
    others: int = 0,
    cost: CostModel | None = COST,
    online: StepShape = NOTHING,
) -> StepView:
    is_online = min(tpot_s, ttft_left_s) < INF
    return StepView(
        model="m",
        now=0.0,
        cost_model=cost,
        is_online=is_online,
        num_other_online=others,
        tpot_objective_s=tpot_s,
        slack_s=slack_s,
        ttft_left_s=ttft_left_s,
        own_ttft_left_s=ttft_left_s,
        online=online,
    )


def test_without_online_work_only_the_tokens_bound_the_step() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view()) == Limits(512, is_interruptible=True)
    assert policy.limits(view(cost=None)) == Limits(512, is_interruptible=True)


def test_without_a_cost_model_online_steps_are_bounded_by_tokens() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view(0.1, 0.1, cost=None)) == Limits(512)
    assert policy.limits(view(others=1, cost=None)) == Limits(512)


def test_beside_decodes_offline_tokens_fill_the_slack() -> None:
    assert SloTokenBudget(512).limits(view(0.1, 0.07)) == Limits(512, INF, 0.07)


def test_who_is_behind_the_pace_gets_online_steps_alone() -> None:
    limits = SloTokenBudget(512).limits(view(0.1, -0.03))
    assert limits == Limits(512, INF, 0.0)
    budget = StepBudget(limits, COST)
    budget.take_decodes(4, 100)
    budget.begin_offline()
    assert budget.fits_decodes([10, 10]) == 0 and budget.fits_prefill(100, 0) == 0


def test_beside_prompts_offline_tokens_fill_a_small_share_of_the_time_left() -> None:
    policy = SloTokenBudget(512, filler_share=0.05)
    assert policy.limits(view(ttft_left_s=1.5)) == Limits(512, INF, pytest.approx(0.075))
    assert policy.limits(view(0.1, 0.03, 1.5)).offline_limit_s == pytest.approx(0.03)
    assert policy.limits(view(ttft_left_s=-2.0)).offline_limit_s == 0


def test_prompts_are_chunked_for_the_decodes_while_their_first_tokens_are_in_time() -> None:
    # Steps of 85 ms, 20 ms of them decodes, leave 65 ms for prompts: the prompts' 130 ms take two of them.
    policy = SloTokenBudget(4096, chunking_share=0.25)
    online = StepShape(1300, 0.0, 50, 0)
    assert COST.predict(online._replace(prefill_tokens=0)) == pytest.approx(0.02)
    needed_s = 2 * PACE * 0.1 / 0.25
    assert policy.limits(view(0.1, 0.08, needed_s + 0.01, online=online)).limit_s == pytest.approx(PACE * 0.1)
    assert policy.limits(view(0.1, 0.15, needed_s + 0.01, online=online)).limit_s == pytest.approx(0.15)
    assert policy.limits(view(0.1, 0.08, needed_s - 0.01, online=online)).limit_s == INF
    assert policy.limits(view(0.1, 0.08, -1.0, online=online)).limit_s == INF


def test_an_objective_that_the_decodes_alone_break_does_not_hold_prompts_up() -> None:
    online = StepShape(100, 0.0, 50, 0)
    assert SloTokenBudget(4096).limits(view(0.015, 0.01, 100.0, online=online)).limit_s == INF


def test_prompts_of_one_model_are_chunked_for_the_decodes_of_another() -> None:
    policy, online = SloTokenBudget(4096), StepShape(1400)
    crowded = view(0.1, 0.02, 100.0, others=1, online=online)
    assert policy.limits(crowded).limit_s == pytest.approx(PACE * 0.1 / 2)
    assert policy.limits(crowded._replace(own_ttft_left_s=0.1)).limit_s == INF


def test_a_first_token_of_another_model_bounds_offline_tokens_too() -> None:
    mine = view(0.1, 0.09, others=1)._replace(ttft_left_s=0.4)
    assert SloTokenBudget(512, filler_share=0.05).limits(mine) == Limits(512, INF, pytest.approx(0.01))


def test_models_that_have_online_work_share_the_time() -> None:
    policy = SloTokenBudget(512)
    assert policy.limits(view(0.1, 0.06, others=1)).offline_limit_s == pytest.approx(0.03)
    assert policy.limits(view(0.1, 0.06, others=2)).offline_limit_s == pytest.approx(0.02)


def test_offline_work_beside_another_models_online_work_is_short() -> None:
    assert SloTokenBudget(512, other_step_s=0.05).limits(view(others=1)) == Limits(512, 0.05)


def test_settings_out_of_range_are_refused() -> None:
    for max_tokens, filler_share, chunking_share in ((0, 0.2, 0.2), (8, 0.0, 0.2), (8, 1.5, 0.2), (8, 0.2, -0.1)):
        with pytest.raises(ValueError):
            SloTokenBudget(max_tokens, filler_share=filler_share, chunking_share=chunking_share)


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
@given(
    costs,
    st.floats(0.001, 1),
    st.floats(-1, 1),
    st.floats(-1, 10),
    st.lists(st.integers(1, 4000), max_size=30),
    st.integers(0, 2000),
    st.integers(0, 4000),
)
def test_offline_tokens_never_make_a_step_longer_than_the_slack(
    cost: CostModel, tpot_s: float, slack_s: float, left_s: float, online: list[int], prompt: int, offline: int
) -> None:
    """Filled as a planner does; only online sequences may exceed it."""
    shape = StepShape(prompt, prompt * prompt / 2, len(online), sum(online))
    limits = SloTokenBudget(4096).limits(view(tpot_s, slack_s, left_s if prompt else INF, cost=cost, online=shape))
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
    assert cost.predict(budget.shape) <= max(slack_s, online_s) * (1 + 1e-9) + 1e-9
