"""What bench/unified compares, and how it adds up."""

from __future__ import annotations

import math

import msgspec
import pytest

from bench.fidelity.workloads import MODELS
from bench.unified.live import Checkpoints, problem
from bench.unified.small import CASES, simulate
from bench.unified.variants import BASELINES, VARIANTS, WHOLE, Online, Variant, markdown, of_seeds, placed, row
from shared.simulation.itl import Itl


def test_each_variant_but_the_last_lacks_one_part() -> None:
    parts = [name for name in Variant.__struct_fields__ if name != "name"]
    differ = [{name for name in parts if getattr(one, name) != getattr(WHOLE, name)} for one in VARIANTS]
    assert not differ[0]
    # Dedicated instances have nothing to place anew.
    assert differ[1] == {"placement", "is_adaptive"}
    assert all(len(one) == 1 for one in differ[2:-1])
    # Batches are there, and nothing protects the others from them.
    assert differ[-1] == set(parts) - {"harvests", "least_share", "is_interval_fixed"}
    assert len({one.name for one in (*VARIANTS, *BASELINES)}) == len(VARIANTS) + len(BASELINES)
    assert all(
        sum(getattr(one, name) != getattr(WHOLE, name) for name in parts) == 1
        for one in BASELINES
        if not one.name.startswith("as ")
    )


def test_placements_of_others_have_all_models_of_the_live_stack() -> None:
    checkpoints = Checkpoints("A100-80G")
    checkpoints.sources |= dict.fromkeys(MODELS, "")
    asked = problem(checkpoints, 12.0, 101)
    for variant in BASELINES[:2]:
        plan = placed(variant, asked)
        assert plan.models == set(MODELS)
        assert all(group.node_id == "worker-0" and max(group.devices) < 3 for group in plan.groups)


def test_who_gets_no_answer_misses_the_objective_and_counts_in_no_mean() -> None:
    online = [
        Online(2.0, 0.5, 0.05, 0.1, 1.0),
        Online(6.0, 1.0, math.nan, 0.3, 1.0),
        Online(math.inf, math.inf, math.nan, 0.0, 2.0),
    ]
    found = row(WHOLE, online, itl=Itl(40, 0.05, 0.04, 0.2, 0.3), offline_tokens_s=100.0, use=0.5, migrations=3)
    assert (found.num_requests, found.num_failed, found.migrations) == (3, 1, 3)
    assert found.attainment == pytest.approx(1 / 3)
    assert found.normalised_latency == 4.0
    assert found.ttft_p99_s == math.inf
    assert (found.tpot_p99_s, found.silence_max_s) == (0.05, 0.3)
    assert (found.itl_p50_s, found.itl_p99_s, found.itl_max_s) == (0.04, 0.2, 0.3)
    assert "| all parts" in markdown([found])


def test_seeds_are_averaged_and_their_counts_added() -> None:
    rows = [
        row(
            WHOLE,
            [Online(latency, 0.5, 0.05, silence, 1.0)],
            itl=Itl(9, 0.05, silence / 2, silence, silence),
            offline_tokens_s=100.0,
            use=use,
            changes=1,
        )
        for latency, silence, use in ((2.0, 0.1, 0.4), (4.0, 0.3, 0.6))
    ]
    both = of_seeds(rows)
    assert (both.normalised_latency, both.silence_max_s, both.use) == (3.0, 0.3, 0.5)
    assert (both.itl_p50_s, both.itl_p99_s, both.itl_max_s) == pytest.approx((0.1, 0.2, 0.3))
    assert (both.num_requests, both.changes) == (2, 2)


def test_moves_for_want_of_memory_do_not_scatter_the_models() -> None:
    case = msgspec.structs.replace(CASES[-1], run_s=8.0)
    off = next(one for one in VARIANTS if one.name == "no migration")
    with_it, without = (of_seeds([simulate((variant, case, seed)) for seed in (102, 103)]) for variant in (WHOLE, off))
    assert with_it.migrations > 0 == without.migrations
    assert with_it.attainment >= without.attainment - 0.01
    assert with_it.normalised_latency < 1.03 * without.normalised_latency


@pytest.mark.long
def test_suspension_makes_users_faster_where_steps_are_short_too() -> None:
    case = msgspec.structs.replace(CASES[0], run_s=10.0, rate_rps=6.0, num_lines=30)
    off = next(one for one in VARIANTS if one.name == "no suspension")
    seeds = range(101, 105)
    with_it, without = (of_seeds([simulate((variant, case, seed)) for seed in seeds]) for variant in (WHOLE, off))
    assert with_it.num_requests == without.num_requests > 40 * len(seeds)
    assert with_it.num_failed == without.num_failed == 0
    assert with_it.attainment >= without.attainment and with_it.normalised_latency < without.normalised_latency
    assert with_it.offline_tokens_s > 0.9 * without.offline_tokens_s
    assert of_seeds([simulate((WHOLE, case, seed)) for seed in seeds]) == with_it, "the same again"
