"""How long offline work of other models waits for a moment without online work."""

from __future__ import annotations

import pytest

from shared.policies.patience import LEAK, PATIENCE_S, Patience


def after(share: float, period_s: float, until_s: float) -> Patience:
    """Online work is there for a share of each period."""
    patience, start_s = Patience(), 0.0
    while start_s < until_s:
        patience.observe(start_s, True)
        patience.observe(start_s + share * period_s, False)
        start_s += period_s
    patience.observe(start_s, True)
    return patience


def test_it_is_spent_when_online_work_has_been_there_for_so_long() -> None:
    patience = Patience()
    patience.observe(10.0, True)
    patience.observe(10.0 + PATIENCE_S - 0.01, True)
    assert not patience.is_spent
    patience.observe(10.0 + PATIENCE_S, True)
    assert patience.is_spent
    patience.observe(10.0 + PATIENCE_S + 0.01, False)
    patience.observe(10.0 + PATIENCE_S + 0.05, True)
    assert not patience.is_spent, "there was a moment without"


@pytest.mark.parametrize("period_s", [0.02, 0.3])
def test_moments_without_online_work_keep_it_only_if_they_are_not_too_short(period_s: float) -> None:
    share = LEAK / (1 + LEAK)
    assert not after(share - 0.02, period_s, 60.0).is_spent
    patience = after(share + 0.05, period_s, 60.0)
    patience.observe(61.0, True)
    assert patience.is_spent


def test_a_clock_that_goes_back_counts_for_nothing() -> None:
    patience = Patience()
    patience.observe(5.0, True)
    patience.observe(1.0, True)
    patience.observe(5.0 + PATIENCE_S / 2, True)
    assert not patience.is_spent
