from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from shared.policies.baselines import SkipJoinMlfq
from shared.policies.catalogue import (
    ORDERING_POLICIES,
    TOKEN_BUDGET_POLICIES,
    ordering_policy,
    token_budget_policy,
)
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.doubling_budget import DoublingBudget
from shared.policies.execution_statistics import ExecutionTimeWindow
from shared.policies.harvest import allocate
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import Limits, StepView
from shared.runtime.settings import InstanceSettings, SchedulerSettings
from tests.shared.policies.views import COST

DOCS = Path(__file__).parents[3] / "docs"


def test_the_settings_defaults_are_in_the_catalogue() -> None:
    fields = {**_defaults(InstanceSettings), **_defaults(SchedulerSettings)}
    assert fields["order_policy"] in ORDERING_POLICIES
    assert fields["co_serving"] in TOKEN_BUDGET_POLICIES


def test_every_order_can_be_made_for_one_phase_or_both() -> None:
    for name in ORDERING_POLICIES:
        assert ordering_policy(name).mixes_phases
        assert not ordering_policy(name, mix_phases=False).mixes_phases
        assert ordering_policy(name).mixes_phases, "objects of their own"


def test_only_slo_looks_at_objectives() -> None:
    view = StepView(
        model="m", now=0.0, cost_model=COST, is_online=True, num_other_online=0, tpot_objective_s=0.1, slack_s=0.07
    )
    assert token_budget_policy("slo", 512).limits(view).offline_limit_s == 0.07
    for name in ("priority_only", "online_only"):
        assert token_budget_policy(name, 512).limits(view) == Limits(512)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="doubling_budget"):
        ordering_policy("lifo")
    with pytest.raises(ValueError, match="priority_only"):
        token_budget_policy("best", 512)


def _defaults(settings: type) -> dict[str, object]:
    return {field.name: field.default for field in msgspec.structs.fields(settings)}


def test_the_page_states_the_defaults() -> None:
    owners = (SloTokenBudget, DoublingBudget, ExecutionTimeWindow, SkipJoinMlfq, AdaptiveCheckpoint, allocate)
    by_name = {owner.__name__: inspect.signature(owner).parameters for owner in owners}
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \|$", (DOCS / "design" / "policies.md").read_text(), re.MULTILINE)
    assert {owner for owner, _, _ in rows} == set(by_name)
    for owner, parameter, default in rows:
        assert by_name[owner][parameter].default == float(default), (owner, parameter)
    for name in (*ORDERING_POLICIES, *TOKEN_BUDGET_POLICIES):
        assert f"`{name}`" in (DOCS / "design" / "policies.md").read_text()
