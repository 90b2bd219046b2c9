"""An instance is killed: what it computed goes on where copies of its KV are, as clients and operators see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.rescues import MODEL, STEP_S, make_model, metric, prompts_of, rescue, run
from tests.e2e.stack import Stack
from tests.e2e.test_chaos import rescued_timelines
from tests.stalls import whatever_the_machine_does

pytestmark = pytest.mark.long

NUM_STREAMS, NUM_PROMPT, MAX_TOKENS = 9, 600, 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three instances, so that there is somebody to choose from."""
    folder = tmp_path_factory.mktemp("checkpoints")
    models = {MODEL: make_model(folder, NUM_PROMPT + MAX_TOKENS + 16)}
    with Stack(models, num_instances=3, environment={"TIDEWAY_KV_BACKUP": "all"}, step_s=STEP_S) as stack:
        stack.wait_ready()
        stack.wait_until(lambda: all(one["migration"] for one in stack.instances()), "transports")
        yield stack


async def test_streams_of_a_killed_instance_go_on_from_copies_of_their_kv(stack: Stack) -> None:
    prompts = prompts_of(NUM_STREAMS, NUM_PROMPT)
    found = await rescue(stack, prompts, MAX_TOKENS, has_copies=True)
    assert [stream.error for stream in found.streams] == [None] * NUM_STREAMS
    assert all(stream.ended_well for stream in found.streams)
    assert found.num_lost >= 2 and found.kept_tokens + found.recomputed_tokens >= found.num_lost * NUM_PROMPT
    with whatever_the_machine_does():
        assert found.recomputed_share <= 0.1
    assert sum(metric(stack, "tideway_kv_backup_blocks_total", "copied").values()) > NUM_STREAMS * NUM_PROMPT / 64
    told = [one["load"]["kv_copies"] for one in stack.instances() if one["load"] and one["load"]["kv_copies"]]
    assert sum(one["backed_up_bytes"] for one in told) > 0
    assert sum(one["num_rescued_tokens"] for one in told) == found.kept_tokens
    expected = await run(stack.url, prompts, MAX_TOKENS, [[] for _ in prompts])
    with whatever_the_machine_does():
        assert [stream.text for stream in found.streams] == [stream.text for stream in expected]


async def test_the_timeline_says_who_keeps_copies_and_why_a_request_goes_there(stack: Stack) -> None:
    stack.wait_until(lambda: len(stack.instances()) == 3, "the instance that was killed")
    prompts = prompts_of(NUM_STREAMS, NUM_PROMPT, seed=2)
    found = await rescue(stack, prompts, MAX_TOKENS, has_copies=True)
    assert all(stream.ended_well for stream in found.streams)
    lost = [one for one in rescued_timelines(stack) if one["output_tokens"] == MAX_TOKENS]
    assert lost
    kept = 0
    for one in lost:
        holders = [event["place"] for event in one["events"] if event["kind"] == "backed_up"]
        places = [event for event in one["events"] if event["kind"] == "dispatched"]
        kept += places[-1]["cause"] == "keeps its KV" and places[-1]["place"] in holders
    assert kept >= len(lost) / 2
