"""Instances of two devices each, on a CPU: clients do not notice that a rank dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.stack import Stack
from tests.e2e.streams import run_streams
from tests.stalls import whatever_the_machine_does

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


async def test_streams_survive_a_rank(checkpoints: dict[str, str]) -> None:
    models = ["llama", "opt"]
    environment = {"TIDEWAY_TENSOR_PARALLEL": "2", "TIDEWAY_PROFILE": "off"}
    with Stack(checkpoints, environment=environment, step_s=STEP_S) as system:
        system.wait_ready()
        before = {one["instance_id"]: one for one in system.instances()}
        assert sorted(before) == ["worker-0-0", "worker-0-2"], "named after their first devices"
        assert all(one["devices"] == ["cpu", "cpu"] for one in before.values())

        expected = await run_streams(system.url, models, NUM_STREAMS, MAX_TOKENS)

        def kill() -> None:
            (rank,) = other_ranks(before["worker-0-2"]["pid"])
            os.kill(rank, signal.SIGKILL)

        streams = await run_streams(
            system.url, models, NUM_STREAMS, MAX_TOKENS, after_tokens=NUM_STREAMS * MAX_TOKENS // 3, disturb=kill
        )
        for stream, other in zip(streams, expected, strict=True):
            with whatever_the_machine_does():
                assert stream.text == other.text
            assert stream.error is None and stream.finish_reasons == ["length"]
            assert stream.usage["completion_tokens"] == MAX_TOKENS
        for words, count in (("the instance ends: rank 1 was killed by SIGKILL", 1), ("started worker-0-2", 2)):
            system.wait_until(lambda: system.log("worker-0", 1000).count(words) >= count, words)  # noqa: B023
