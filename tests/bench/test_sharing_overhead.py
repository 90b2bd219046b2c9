"""bench/sharing_overhead runs, and sees one copy of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.sharing_overhead import compare, measure, weights_memory


@pytest.mark.long
def test_three_models_on_one_executor_are_measured(tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / str(number), SHAPES["tiny"]) for number in range(3)]
    measured, facts = measure(checkpoints, "cpu", 4)
    assert [one.step for one in measured] == ["decode", "decode", "prefill", "prefill"]
    assert all(one.alone_ms > 0 and one.other_ms > 0 for one in measured)
    assert facts["block_table_ratio"] == 4 * 2 * 2
    # Which asserts that there is one copy; so small a model is no more than the noise of what a process takes.
    assert list(weights_memory(checkpoints[0], "cpu")) == ["one name", "two names", "the first removed", "both removed"]


def test_a_ratio_is_of_pairs_whatever_their_order() -> None:
    found = compare("", "", lambda: 2.0, lambda: 3.0, 5)
    assert (found.alone_ms, found.other_ms, found.overhead) == (2000, 3000, 0.5)
