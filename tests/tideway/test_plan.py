"""What `tideway plan --apply` says of a replacement that it looks at now and then."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages.cluster import PlanChange
from tideway.plan import lines_of


def told(*seen: tuple[str, list[str]]) -> list[str]:
    """The first word of each line, over these looks at stage and steps."""
    change = PlanChange(number=1, reason="", stage="fetch", begun_s=0.0, stage_s=0.0, step_s=0.0, before=[], target=[])
    lines: list[str] = []
    stage, num_steps = "", 0
    for now, steps in seen:
        change = msgspec.structs.replace(change, stage=now, steps=steps)
        lines += [line.split()[0].rstrip(":") for line in lines_of(change, stage, num_steps)]
        stage, num_steps = now, len(steps)
    return lines


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            [("fetch", []), ("change", ["load"]), ("change", ["load", "unload"]), ("settle", ["load", "unload"])],
            "fetch change load unload settle",
        ),
        ([("change", []), ("settle", ["load"]), ("carried_out", ["load"])], "change load settle carried_out"),
        ([("fetch", []), ("carried_out", ["load", "unload"])], "fetch change load unload carried_out"),
        ([("change", ["load"]), ("roll_back", ["load"]), ("rolled_back", ["load", "unload"])],
         "change load roll_back unload rolled_back"),
    ],
)  # fmt: skip
def test_steps_stand_below_their_stage(seen: list[tuple[str, list[str]]], expected: str) -> None:
    assert told(*seen) == expected.split()
