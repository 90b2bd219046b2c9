"""Long traffic, simulated in stretches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shared.placement.execution import execution_s
from shared.placement.problem import Group, Plan, Problem, traffic
from shared.placement.stretches import mean_execution_s
from shared.simulation import sampled
from shared.simulation.deployment import simulate
from shared.simulation.itl import ItlHistogram
from shared.simulation.sampled import Part, sample
from tests.shared.placement.small import model, node

MODELS = (model("a"), model("b", 2.0))
PLAN = Plan((Group("n0", (0,), ("a", "b")), Group("n0", (1,), ("a",))))


def busy(seconds: float) -> Problem:
    """Two models on two devices, with a rate that rises and falls."""
    rng, rows = np.random.default_rng(5), []
    for name, rate, prompt, output in (("a", 5.0, 200, 20), ("b", 1.0, 600, 40)):
        at_s = np.sort(rng.uniform(0, seconds, int(rate * seconds)))
        at_s = at_s[rng.uniform(size=len(at_s)) < 0.6 + 0.4 * np.sin(2 * np.pi * at_s / 300.0)]
        rows += [(float(at), name, prompt, int(rng.integers(1, 2 * output)), True) for at in at_s]
    found = Problem(nodes=(node(num_devices=2),), models=MODELS, traffic=traffic(rows, seconds, ["a", "b"]))
    return msgspec.structs.replace(found, execution_s=execution_s(found))


def test_a_sample_is_within_its_error_of_every_step() -> None:
    asked = busy(240.0)
    found, whole = sample(asked, PLAN, num_stretches=5, seed=3), simulate(asked, PLAN, seed=4).metrics.total
    assert found.num_requests == whole.num_requests
    assert 0.1 < found.num_simulated / found.num_requests < 0.5
    for mean, value in (
        (found.attainment, whole.attainment), (found.normalised_latency, whole.normalised_latency),
        (found.ttft_s, whole.ttft_s.mean), (found.tpot_s, whole.tpot_s.mean),
    ):  # fmt: skip
        assert mean.error < 0.15 * value and abs(mean.value - value) <= 3 * max(mean.error, 0.01 * value)
    assert abs(found.itl_s.p50 / whole.itl_s.p50 - 1) < 0.1 and abs(found.itl_s.p99 / whole.itl_s.p99 - 1) < 0.25
    assert 0 < found.itl_s.num < whole.itl_s.num
    # The stretches say how far the estimate is off: what is left is nearer to every step.
    off = abs(found.normalised_latency.value / whole.normalised_latency - 1)
    assert off < 0.05 and off <= abs(found.estimated_latency / whole.normalised_latency - 1) + 0.01


def test_a_sample_is_drawn_the_same_again() -> None:
    asked = busy(60.0)
    assert sample(asked, PLAN, num_stretches=2, seed=3) == sample(asked, PLAN, num_stretches=2, seed=3)


def test_an_estimate_that_is_wrong_everywhere_alike_costs_no_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the requests of each stretch are late, by the estimate none is: the sum of both is exact, without an error."""

    def half(plan: Plan, serving: object, seed: int, cut: sampled.Cut) -> Part:
        at_s = cut.problem.traffic.arrival_s
        num = int(((at_s >= cut.since_s) & (at_s < cut.until_s)).sum())
        return Part(
            num=num, late=num / 2, normalised=3.0 * num, ttft_s=0.5 * num, num_first=num, tpot_s=0.0, num_paced=0,
            itl=ItlHistogram.of([0.01] * num),
        )  # fmt: skip

    rows = [(0.5 * number, "a", 50, 10, True) for number in range(1200)]
    asked = Problem(nodes=(node(num_devices=2),), models=MODELS[:1], traffic=traffic(rows, 600.0, ["a"]))
    monkeypatch.setattr(sampled, "simulated", half)
    found = sample(asked, Plan((Group("n0", (0,), ("a",)),)), num_stretches=5)
    assert found.estimated_attainment == 1.0
    assert found.attainment.value == pytest.approx(0.5) and found.attainment.error == pytest.approx(0.0, abs=1e-9)
    assert found.normalised_latency.value == pytest.approx(3.0, abs=0.02)
    assert (found.ttft_s.value, found.tpot_s.value) == (pytest.approx(0.5), 0.0)


def test_what_cannot_be_sampled() -> None:
    asked = busy(200.0)
    with pytest.raises(ValueError, match=f"3000 stretches of {20 * mean_execution_s(asked):.0f} s"):
        sample(asked, PLAN, num_stretches=3000)
    none = msgspec.structs.replace(asked, traffic=traffic([(1.0, "a", 10, 5, False)], 200.0, ["a", "b"]))
    with pytest.raises(ValueError, match="no online requests"):
        sample(none, PLAN, num_stretches=2)
