"""bench/beside counts steps that nothing disturbed, and says what splitting the cores gains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench.beside import PARALLEL, Processor, Round, Step, counted, measure, measured
from bench.sharing_overhead import make_checkpoints
from services.worker.native.library import kernels


def test_steps_that_waited_for_a_core_do_not_count() -> None:
    steps = [Step(0, 0.0, 1.0, 0.0), Step(1, 1.0, 2.0, 0.03), Step(0, 2.0, 3.5, 0.02)]
    assert counted(steps) == {0: [1.0, 1.5]}


def test_steps_beside_count_while_the_other_computes_undisturbed() -> None:
    other = [Step(1, 0.5, 2.0, 0.0), Step(1, 2.0, 3.0, 0.5), Step(1, 3.0, 6.0, 0.0)]
    steps = [Step(0, at_s, at_s + 0.9, 0.0) for at_s in (0.0, 1.0, 1.5, 2.5, 3.0, 5.5)]
    # The first begins before the other, two meet its disturbed step, the last ends after it.
    assert counted(steps, other) == {0: [pytest.approx(0.9)] * 2}
    assert counted(steps, []) == {}


def test_gain_is_work_over_that_in_turn() -> None:
    # Cores that double the speed, and nothing that one costs the other: as much work either way, at the same gaps.
    even = Round(in_turn=(1.0, 1.0), beside=(2.0, 2.0), alone=(1.0, 1.0), half=(2.0, 2.0))
    found = measured(("a", "b"), ("decode 1", "decode 1"), [even] * 4)
    assert (found.gain, found.spread, found.gap, found.cores) == (1.0, 0.0, (1.0, 1.0), (2.0, 2.0))
    # Steps that more cores do not shorten: both run in the time of one.
    useless = Round(in_turn=(1.0, 3.0), beside=(1.0, 3.0), alone=(1.0, 3.0), half=(1.0, 3.0))
    assert measured(("a", "b"), ("decode 1", "prefill"), [useless] * 4).gain == 2.0
    with pytest.raises(ValueError, match="only 1 undisturbed rounds"):
        measured(("a", "b"), ("decode 1", "prefill"), [even])


def test_processor_time_is_as_if_each_thread_had_a_core() -> None:
    torch.set_num_threads(1)
    if (team := kernels()) is None:
        pytest.skip("there are no compiled kernels")
    try:
        one, two = Processor(1), Processor(2)
        for processor in (one, two):
            processor.begin()
        began_s = time.process_time()
        while time.process_time() < began_s + 0.05:
            pass
        # What the calling thread does outside the kernels is not divided by the number of threads.
        assert one.seconds() == pytest.approx(two.seconds(), abs=0.01)
        assert one.seconds() >= 0.05
        hidden, weight = torch.randn(4096, 1024), torch.randn(1024)
        two.begin()
        began_s = time.process_time()
        for _ in range(20):
            team.add_rms_norm(hidden, None, weight, 1e-6)
        took_s = time.process_time() - began_s
        assert 0.45 * took_s < two.seconds() < 0.75 * took_s
    finally:
        for name in PARALLEL:
            delattr(team, name)


@pytest.mark.long
def test_two_tiny_models_are_measured(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, ["tiny", "tiny"], "cpu", None)
    (found,) = measure(checkpoints, ("tiny", "tiny"), [("decode 8", "prefill")], 3, 0.02, by_processor=True)
    assert found.num_rounds >= 2 and 0.1 < found.gain < 10 and min(found.beside_ms) > 0
