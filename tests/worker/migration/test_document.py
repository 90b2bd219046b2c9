"""docs/design/migration.md states names and numbers of the code."""

from __future__ import annotations

from pathlib import Path

from services.worker.migration import faults, service
from shared.migration import core, destination, estimates, source
from shared.runtime.settings import InstanceSettings

TEXT = (Path(__file__).parents[3] / "docs" / "design" / "migration.md").read_text()


def test_fault_points_and_actions_are_all_named() -> None:
    names = {line.split("`")[1] for line in TEXT.splitlines() if line.startswith(("| `source.", "| `destination."))}
    assert names == {str(point) for point in faults.FaultPoint}
    assert all(f"| `{action}` |" in TEXT for action in faults.FaultAction)


def test_numbers_are_those_of_the_code() -> None:
    assert f"left out for {core.RETRY_S:g} s" in TEXT
    assert f"on for {core.FORWARD_S:g} s" in TEXT
    assert f"waited for, {service.STOP_S:g} s" in TEXT
    assert f"| answer to PreAllocate; connection | {source.RESERVE_S:g}; {source.CONNECT_S:g} |" in TEXT
    assert f"| leaving the batch | {source.LEAVE_S:g} |" in TEXT
    assert f"| answer to Commit | {source.COMMIT_S:g} + that" in TEXT
    assert f"in the registry | {source.ASK_S:g} |" in TEXT
    assert f"| reservation without traffic | {destination.IDLE_S:g} |" in TEXT
    copy = (
        f"| a stage's blocks | {estimates.MIN_COPY_DEADLINE_S:g} + {estimates.DEADLINE_FACTOR:g} times the estimate |"
    )
    assert copy in TEXT
    assert f"left <= {estimates.GOAL_SHARE:g} step" in TEXT
    assert f"and {estimates.MARGIN_BLOCKS} blocks more" in TEXT
    assert estimates.DEFAULT_BANDWIDTH_BYTES_S == 1e9 and destination.MEMORY_S == 600
    assert f"TIDEWAY_MIGRATION_MAX_STAGES ({InstanceSettings().migration_max_stages})" in TEXT
