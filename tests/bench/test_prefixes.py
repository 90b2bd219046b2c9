"""Requests whose prompts begin alike, in virtual time: dispatch finds their beginnings again."""

from __future__ import annotations

import numpy as np
import pytest

from bench.prefixes import LEAST_SHARE, MOST_TTFT, SHAPES, main, merged_device, run
from bench.rebalance.cluster import A100, System
from shared.simulation.gateway import Job

SEED, RATE_RPS, NUM_JOBS = 301, 4.0, 60
NUM_INSTANCES = 2


def some(shape: str) -> list[Job]:
    """The first ones of a run, not all of which begin alike."""
    jobs = SHAPES[shape](RATE_RPS, np.random.default_rng(SEED))
    return sorted(jobs, key=lambda job: job.at_s)[:NUM_JOBS]


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_begin_with_texts_that_others_have(shape: str) -> None:
    jobs = SHAPES[shape](RATE_RPS, np.random.default_rng(SEED))
    assert all(0 < sum(num for _, num in job.texts) <= job.prompt_tokens <= A100.max_length for job in jobs)
    assert len({job.texts[0][0] for job in jobs}) < len(jobs) / 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_as_much_is_cached_as_on_one_large_instance(shape: str) -> None:
    jobs = some(shape)
    ours, blind = (
        run(jobs, A100, System(name=name, dispatch=name), NUM_INSTANCES, SEED) for name in ("first_token", "freeness")
    )
    one = run(jobs, merged_device(A100, NUM_INSTANCES), System(name="one"), 1, SEED)
    assert one.cached_share >= ours.cached_share >= LEAST_SHARE * one.cached_share
    assert ours.cached_share > blind.cached_share
    assert ours.p99_ttft_s <= MOST_TTFT * blind.p99_ttft_s


@pytest.mark.slow
@pytest.mark.parametrize("event", ["restarts", "drains"])
def test_what_an_instance_had_is_computed_again_when_it_is_emptied(event: str) -> None:
    jobs = some("conversations")
    undisturbed = run(jobs, A100, System(name="tideway"), NUM_INSTANCES, SEED)
    disturbed = run(jobs, A100, System(name="tideway"), NUM_INSTANCES, SEED, **{event: True})
    assert 0 < disturbed.cached_share < undisturbed.cached_share
    assert (disturbed.num_migrations > 0) == (event == "drains")


def test_it_says_whether_its_targets_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "trees", "--instances", "2", "--load", "0.03", "--seed", str(SEED)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("trees, 2 instances, seed 301, ") and "met     cached share" in said
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["one", "tideway", "freeness"]
