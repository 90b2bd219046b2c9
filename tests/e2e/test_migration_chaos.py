"""Requests that move between real instance processes over UCX while faults meet their migrations (bench.migration_chaos, in
a short form): no stream differs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import shutil
from random import Random

import pytest

from bench.migration_chaos.executor import ChaosExecutor, output
from bench.migration_chaos.faults import CUTS, POINTS, draw
from bench.migration_chaos.trials import Trials
from shared.engine.plan import NewSequence, StepPlan
from shared.messages.requests import SamplingParams, pack_tokens
from shared.runtime.service import new_event_loop
from tests.stalls import whatever_the_machine_does

NUM_MIGRATIONS = 24
NUM_CUTS = 12
SEED_OF_CUTS = 35
"""Draws them of all kinds."""


@pytest.mark.long
def test_faults_at_random_points_lose_nothing() -> None:
    said: list[str] = []
    trials = Trials(5, num_streams=12, num_at_once=5, rest_every=NUM_MIGRATIONS // 2, faults="brief", say=said.append)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(trials.run(NUM_MIGRATIONS))
    with whatever_the_machine_does():
        assert result.failures == [], said
    assert result.num_rests >= 2 and result.num_migrations >= NUM_MIGRATIONS
    assert result.streams["complete"] > 20
    assert sum(counts["moved"] for counts in result.outcomes.values()) >= 5
    shutil.rmtree(trials.cluster.folder, ignore_errors=True)  # kept, with the logs, where something failed


@pytest.mark.long
def test_partitions_lose_nothing() -> None:
    """Two instances that do not see each other but NATS, and the reverse, each for up to 5.5 s."""
    said: list[str] = []
    trials = Trials(SEED_OF_CUTS, num_streams=10, num_at_once=4, rest_every=NUM_CUTS, faults="cuts", say=said.append)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(trials.run(NUM_CUTS))
    with whatever_the_machine_does():
        assert result.failures == [], said
    assert {name.split("_")[1] for name in result.outcomes if name in CUTS} == {"kv", "nats"}
    shutil.rmtree(trials.cluster.folder, ignore_errors=True)


def test_every_point_and_way_to_fail_is_drawn() -> None:
    drawn = [draw(Random(number)) for number in range(3000)]
    assert {fault.steps[-1].point for fault in drawn} >= set(POINTS)
    names = {fault.name for fault in drawn}
    assert names >= {f"{action} {point}" for action in ("fail", "delay", "exit", "stop") for point in POINTS}
    assert names >= {"kill_source", "nats_restart", "cut_kv_hole", "cut_nats_destination_reset", "refuse"}
    assert draw(Random("same")) == draw(Random("same"))


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_changed_block_makes_other_tokens(block: int) -> None:
    """So the chaos run would see it."""
    wrongs: list[str] = []
    executor = ChaosExecutor(4, 0, 0.0, wrongs.append)
    prompt = list(range(20))
    first = NewSequence(0, pack_tokens(prompt), len(prompt), SamplingParams(max_tokens=4), [0, 1, 2])
    made: list[int] = []

    def step(start: int, count: int, *new: NewSequence) -> None:
        executor.launch(
            StepPlan(
                step_id=start,
                model="a",
                rows=[0],
                starts=[start],
                counts=[count],
                samples=[True],
                new_sequences=list(new),
                new_blocks=[],
            )
        )
        made.extend(executor.collect().tokens)

    step(0, 20, first)
    step(20, 1)
    assert made == output("a", prompt, 2) and not wrongs
    executor.block_rows("a", False)[block, 3] ^= 1
    step(21, 1)
    assert len(wrongs) == 1 and "1 of 22 cells" in wrongs[0]
    assert made[:2] == output("a", prompt, 2) and made != output("a", prompt, 3)
