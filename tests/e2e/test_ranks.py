"""Instances of two devices each, on a CPU: they make the tokens of one, and clients do not notice that a rank dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack
from tests.e2e.streams import run_streams
from tests.stalls import whatever_the_machine_does

MODELS = ["llama", "opt"]
NUM_STREAMS = 8
MAX_TOKENS = 60
STEP_S = 0.01
"""Streams are still under way when the rank dies."""


def other_ranks(pid: int) -> list[int]:
    """Processes that an instance has started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (thread / "children").read_text().split()]
    return [pid for pid in found if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def steps_by_depth(metrics_port: int) -> dict[str, float]:
    """Steps of an instance that ended while at most so many were in flight."""
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5).text
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tideway_instance_steps_in_flight_bucket":
                counts[sample.labels["le"]] = counts.get(sample.labels["le"], 0) + sample.value
    return counts


@pytest.mark.parametrize(("division", "depth"), [("TENSOR", 1), pytest.param("PIPELINE", 2, marks=pytest.mark.long)])
async def test_streams_are_those_of_one_device_and_survive_a_rank(
    stack: Stack, checkpoints: dict[str, str], division: str, depth: int
) -> None:
    """In pipelines as many steps are in flight as there are stages."""
    expected = await run_streams(stack.url, MODELS, NUM_STREAMS, MAX_TOKENS)
    environment = {f"TIDEWAY_{division}_PARALLEL": "2", "TIDEWAY_PROFILE": "off"}
    with Stack(checkpoints, environment=environment, step_s=STEP_S) as system:
        system.wait_ready()
        before = {one["instance_id"]: one for one in system.instances()}
        assert sorted(before) == ["worker-0-0", "worker-0-2"], "named after their first devices"
        assert all(one["devices"] == ["cpu", "cpu"] for one in before.values())

        def kill() -> None:
            (rank,) = other_ranks(before["worker-0-2"]["pid"])
            os.kill(rank, signal.SIGKILL)

        streams = await run_streams(
            system.url, MODELS, NUM_STREAMS, MAX_TOKENS, after_tokens=NUM_STREAMS * MAX_TOKENS // 3, disturb=kill
        )
        for stream, other in zip(streams, expected, strict=True):
            with whatever_the_machine_does():
                assert stream.text == other.text
            assert stream.error is None and stream.finish_reasons == ["length"]
            assert stream.usage["completion_tokens"] == MAX_TOKENS
        counts = steps_by_depth(before["worker-0-0"]["metrics_port"])
        assert counts[f"{depth}.0"] == counts["+Inf"] > 0, "and no more"
        assert depth == 1 or counts[f"{depth - 1}.0"] < counts["+Inf"] / 2, "mostly"
        for words, count in (("the instance ends: rank 1 was killed by SIGKILL", 1), ("started worker-0-2", 2)):
            system.wait_until(lambda: system.log("worker-0", 1000).count(words) >= count, words)  # noqa: B023
