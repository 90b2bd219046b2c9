"""Plans as files that `tideway plan --set` reads and `--write` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messages.admin import ModelState
from shared.messages.cluster import InstancePlan, ModelSpec, PlacementPlan, PlanChange
from shared.placement.plan import Group
from tideway.data_folder import OperatorError
from tideway.plan_file import GroupSpec, read_groups, why_not_set, write_plan, written


def test_what_is_written_is_read(tmp_path: Path) -> None:
    name = 'org/"odd"\\name'
    groups = [Group("node-1", (0,), ("b",)), Group("node-1", (2, 3), ("b", name))]
    file = tmp_path / "plan.toml"
    file.write_text(written(groups))
    assert read_groups(file) == [
        GroupSpec(node="node-1", devices=[0], models=["b"]),
        GroupSpec(node="node-1", devices=[2, 3], models=["b", name]),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no [[groups]]"),
        ("groups = 3", "Expected `array`, got `int` - at `groups`"),
        ('[[groups]]\nnode = "n"\ndevice = [0]\nmodels = ["a"]', "unknown field `device` - at `groups[0]`"),
        ('[[groups]]\nnode = "n"\ndevices = [-1]\nmodels = ["a"]', ">= 0 - at `groups[0].devices[0]`"),
        ("[[groups", "cannot be read"),
    ],
)
def test_a_file_that_is_no_plan_says_why(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(OperatorError) as refused:
        read_groups(file)
    assert words in str(refused.value) and str(file) in str(refused.value)
    with pytest.raises(OperatorError, match="cannot be read"):
        read_groups(tmp_path / "none.toml")


def test_what_is_between_two_plans_is_not_written(tmp_path: Path) -> None:
    place = InstancePlan("n-0", "n", [ModelSpec("a", "/a")], 1, 1)
    change = PlanChange(number=1, reason="", stage="change", begun_s=0, stage_s=0, step_s=0, before=[], target=[])
    running = PlacementPlan(1, [place], change=change)
    file = tmp_path / "plan.toml"
    for plan, words in ((running, "between two plans"), (PlacementPlan(1, []), "no plan to write")):
        with pytest.raises(OperatorError, match=words):
            write_plan(plan, file)
    with pytest.raises(OperatorError, match="cannot be written"):
        write_plan(PlacementPlan(1, [place]), tmp_path / "none" / "plan.toml")
    write_plan(PlacementPlan(1, [place]), file)
    assert read_groups(file) == [GroupSpec(node="n", devices=[0], models=["a"])]


def test_a_plan_that_lacks_or_has_groups_beyond_what_is_asked_for_is_told_of() -> None:
    places = [InstancePlan(f"n-{i}", "n", [ModelSpec("a", "/a"), ModelSpec("b", "/b")], 1, 1) for i in range(2)]
    models = [
        model_state("a", replicas=3),
        model_state("b", replicas=2),
        model_state("c", replicas=1),
        model_state("a2"),
    ]
    (told,) = why_not_set(PlacementPlan(1, places), models)
    assert told.startswith("a is on 2 instances and is to be on 3: ") and "`tideway scale a 2`" in told
    (told,) = why_not_set(PlacementPlan(1, places), [model_state("a", replicas=1)])
    assert "is to be on 1" in told


def model_state(name: str, replicas: int | None = None) -> ModelState:
    return ModelState(
        name=name, source="/m", dtype="auto", max_model_len=None, replicas=replicas, ttft_ms=0, tpot_ms=0, instances={},
        unplaced=None, failure=None, num_running=0, num_waiting=0, num_queued=0,
    )  # fmt: skip
