"""A replacement under load, as clients and operators see it: no request is lost and no stream broken, and one trace shows
the way. A third model is added to the loaded cluster meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from shared.messages.traffic import LEAST_INTERVAL_S
from tests.e2e.otlp_collector import CollectedSpan, OtlpCollector
from tests.e2e.stack import START_TIMEOUT_S, Stack
from tests.e2e.streams import Stream, run_streams
from tests.stalls import whatever_the_machine_does

NUM_STREAMS = 12
MAX_TOKENS = 450


def assert_same(streams: list[Stream], expected: list[Stream]) -> None:
    assert [stream.error for stream in streams if stream.error] == []
    for stream, other in zip(streams, expected, strict=True):
        assert stream.ended_well and stream.usage is not None and stream.usage["completion_tokens"] == MAX_TOKENS
        with whatever_the_machine_does():
            assert stream.text == other.text


def serving(stack: Stack) -> dict[str, set[str]]:
    return {
        one["instance_id"]: {model["name"] for model in one["models"] if model["state"] == "ready"}
        for one in stack.instances()
    }


def of_replacement(collector: OtlpCollector, number: int) -> list[CollectedSpan]:
    for span in list(collector.spans):
        if span.name == "placement.replacement" and span.attributes["tideway.replacement"] == number:
            return [other for other in list(collector.spans) if other.trace_id == span.trace_id]
    return []


async def test_streams_and_a_third_model_do_not_notice_a_replacement_and_its_way_back(
    stack: Stack, collector: OtlpCollector, checkpoints: Mapping[str, str], tmp_path: Path
) -> None:
    models = ["llama", "opt"]

    async def streams(disturb=None, after_tokens: int = 0) -> list[Stream]:
        return await run_streams(stack.url, models, NUM_STREAMS, MAX_TOKENS, after_tokens=after_tokens, disturb=disturb)

    began_s = time.monotonic()

    def num_measured() -> int:
        interval = {"interval_s": round(max(LEAST_INTERVAL_S, time.monotonic() - began_s))}
        states = httpx.get(f"{stack.url}/admin/models", params=interval, timeout=20).json()["models"]
        return sum((state["traffic"] or {}).get("online", {}).get("num_finished", 0) for state in states)

    told: list[str] = []
    expected = await streams()
    stack.wait_until(lambda: num_measured() >= NUM_STREAMS, "placement has heard how they ended")
    stack.tideway("plan", "--search")
    shown = stack.tideway("plan")
    assert "breaks a limit" in shown
    figures = r"\d+\.\d% \d+\.\d\dx"
    for model in models:  # requests, measured, as now (not allowed), proposed
        assert re.search(rf"^{model} +[1-9]\d* +{figures} +- +{figures}", shown, re.MULTILINE), shown

    assert_same(await streams(lambda: told.append(stack.tideway("plan", "--apply")), NUM_STREAMS * 5), expected)
    assert "unload" in told[0] and "carried_out" in told[0]
    apart = serving(stack)
    assert sorted(map(sorted, apart.values())) == [["llama"], ["opt"]]
    file = tmp_path / "apart.toml"
    stack.tideway("plan", "--write", str(file))

    def remove_third() -> None:
        httpx.delete(f"{stack.url}/admin/models/third", timeout=20)

    def add_third_and_go_back() -> None:
        third = {"name": "third", "source": checkpoints["llama"]}
        assert httpx.post(f"{stack.url}/admin/models", json=third, timeout=20).status_code == 200
        body = {"model": "third", "prompt": "x", "max_tokens": 5}
        assert httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).status_code == 200
        assert sum("third" in names for names in serving(stack).values()) == 1
        told.append(stack.tideway("plan", "--rollback"))

    try:
        assert_same(await streams(add_third_and_go_back, NUM_STREAMS * 5), expected)
    finally:
        remove_third()
    assert "load" in told[1] and "carried_out" in told[1]
    stack.wait_until(lambda: list(serving(stack).values()) == [set(models)] * 2, "all models on all instances")
    set_once, set_twice = (stack.tideway("plan", "--set", str(file)) for _ in range(2))
    assert "an operator set the plan" in set_once and "carried_out" in set_once and serving(stack) == apart
    assert "these groups; nothing changes" in set_twice
    stack.tideway("plan", "--rollback")
    for number in (1, 2):
        stack.wait_until(lambda number=number: of_replacement(collector, number), f"the trace of replacement {number}")
        names = {span.name for span in of_replacement(collector, number)}
        assert names >= {"replacement.fetch", "replacement.change", "replacement.settle", "node.apply_plan"}, names


@pytest.mark.long
async def test_a_new_model_makes_another_placement_by_itself(checkpoints: Mapping[str, str]) -> None:
    """It is one more than an instance may have. Streams run until all is as it is to be."""
    models = ["llama", "opt"]
    environment = {"TIDEWAY_REPLACEMENT": "auto", "TIDEWAY_MAX_MODELS_PER_GROUP": "2", "TIDEWAY_PROFILE": "off"}
    with Stack(checkpoints, environment=environment) as stack:
        stack.wait_ready()

        def change() -> dict:
            return httpx.get(f"{stack.url}/admin/plan", timeout=20).json()["change"] or {}

        def add_third() -> None:
            third = {"name": "third", "source": checkpoints["llama"]}
            assert httpx.post(f"{stack.url}/admin/models", json=third, timeout=20).status_code == 200

        expected = await run_streams(stack.url, models, NUM_STREAMS, MAX_TOKENS)
        assert not change()
        add_third()
        async with asyncio.timeout(START_TIMEOUT_S):
            while change().get("stage") != "carried_out":
                assert_same(await run_streams(stack.url, models, NUM_STREAMS, MAX_TOKENS), expected)
        assert change()["reason"].startswith("model third was added: ")
        held = serving(stack).values()
        assert max(map(len, held)) == 2 and set().union(*held) == {*models, "third"}


@pytest.mark.long
async def test_streams_are_whole_where_a_node_dies_in_the_middle_of_a_replacement(
    checkpoints: Mapping[str, str],
) -> None:
    models = ["llama", "opt"]
    environment = {"TIDEWAY_MAX_MODELS_PER_GROUP": "1", "TIDEWAY_PROFILE": "off"}
    with Stack(checkpoints, num_workers=2, num_instances=1, environment=environment, step_s=0.02) as stack:
        stack.wait_ready()

        def change() -> dict:
            return httpx.get(f"{stack.url}/admin/plan", timeout=20).json()["change"] or {}

        def apply_and_kill() -> None:
            body = {"action": "apply"}
            assert httpx.post(f"{stack.url}/admin/plan", json=body, timeout=20).status_code == 200
            stack.wait_until(lambda: change().get("stage") in ("change", "settle"), "the middle of a replacement")
            stack.kill("worker-1")

        expected = await run_streams(stack.url, models, NUM_STREAMS, MAX_TOKENS)
        streams = await run_streams(
            stack.url, models, NUM_STREAMS, MAX_TOKENS, after_tokens=NUM_STREAMS * 5, disturb=apply_and_kill
        )
        assert_same(streams, expected)
        stack.wait_until(lambda: change().get("stage") == "rolled_back", "the roll-back")
        assert change()["failure"] == "worker-1 is gone"
        stack.wait_until(lambda: serving(stack) == {"worker-0-0": set(models)}, "all models on the node that is left")
