"""Roles in virtual time: long prompts do not make other streams wait, and nobody gets less than without roles."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bench.disaggregation import MOST_ITL, SHAPES, SYSTEMS, draw_jobs, run, traces
from bench.rebalance.cluster import A100
from shared.simulation.gateway import Job

DEVICE = msgspec.structs.replace(A100, ttft_s=1.0, tpot_s=0.04)


def make_jobs(shape: str, num_instances: int, load: float, duration_s: float, seed: int = 3) -> list[Job]:
    return draw_jobs(SHAPES[shape], DEVICE, num_instances, load, duration_s, np.random.default_rng(seed))[0]


@pytest.mark.slow
def test_streams_beside_long_prompts() -> None:
    jobs = make_jobs("prefill", 4, 0.5, 8.0, seed=4)
    rows = {system.name: run(jobs, DEVICE, system, 4, 3, 2 if system.name == "fixed" else 0) for system in SYSTEMS}
    alike = rows["alike"]
    assert not alike.num_roles and rows["fixed"].num_handoffs and rows["adaptive"].num_handoffs
    for name in ("fixed", "adaptive"):
        assert rows[name].p99_itl_s <= MOST_ITL * alike.p99_itl_s, name
        assert rows[name].goodput_rps >= 0.98 * alike.goodput_rps, name


def test_short_prompts_change_nothing() -> None:
    jobs = make_jobs("decode", 2, 0.3, 2.0)
    alike, fixed, adaptive = (run(jobs, DEVICE, system, 2, 3) for system in SYSTEMS)
    assert alike == fixed == adaptive and not adaptive.num_roles


def test_lengths_of_traces(tmp_path) -> None:
    (tmp_path / "azure_llm_2023_conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,9000,44\n1,20,5\n")
    (tmp_path / "mooncake_conversation.jsonl").write_text('{"timestamp": 0, "input_length": 30, "output_length": 7}\n')
    found = traces(tmp_path, 8192)
    assert found.keys() == {"azure", "mooncake"}
    drawn = found["azure"](50, np.random.default_rng(1))
    assert {tuple(row) for row in drawn.tolist()} == {(8192, 44), (20, 5)}
