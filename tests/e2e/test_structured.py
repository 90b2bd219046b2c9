"""Structured outputs of the whole system, on instances that are drained, die and run out of room meanwhile: each parses, and
has the tokens of one that nobody disturbed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, run_streams
from tests.stalls import whatever_the_machine_does

NUM_STREAMS = 8
MAX_TOKENS = 600
STEP_S = 0.01
"""A stream, of 240 tokens at least, lasts for so many of them."""
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "marks": {
            "type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 60, "maxItems": 60,
        },
    },
    "required": ["id", "marks"],
    "additionalProperties": False,
}  # fmt: skip
FIELDS = {"guided_json": SCHEMA, "ignore_eos": False}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_llama(tmp_path_factory.mktemp("checkpoints") / "llama")
    with Stack({"llama": str(model)}, environment={"TIDEWAY_PROFILE": "off"}, step_s=STEP_S) as system:
        system.wait_ready()
        yield system


def streams_of(system: Stack, disturb: Callable[[], object] | None = None) -> list[Stream]:
    return asyncio.run(
        run_streams(
            system.url,
            ["llama"],
            NUM_STREAMS,
            MAX_TOKENS,
            after_tokens=NUM_STREAMS * 20,
            disturb=disturb,
            all_begun=True,
            **FIELDS,
        )
    )


@pytest.fixture(scope="module")
def undisturbed(system: Stack) -> list[Stream]:
    return streams_of(system)


def check(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, other in zip(streams, expected, strict=True):
        assert stream.error is None and stream.done and stream.finish_reasons == ["stop"]
        assert len(json.loads(stream.text)["marks"]) == 60
        with whatever_the_machine_does():
            assert stream.text == other.text


def num_moved(system: Stack) -> int:
    """Requests that instances took over from others, as far as reported."""
    return sum((instance["load"] or {}).get("num_migrated_in", 0) for instance in system.instances())


def replayed(system: Stack) -> float:
    """Output tokens that matchers were brought through again, over the instances."""
    name, total = "tideway_instance_grammar_replayed_tokens_total", 0.0
    for instance in system.instances():
        text = httpx.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=60).text
        total += sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))
    return total


@pytest.mark.long
def test_through_a_drain_and_the_death_of_an_instance(system: Stack, undisturbed: list[Stream]) -> None:
    check(undisturbed, undisturbed)
    victim = sorted(system.instances(), key=lambda one: one["instance_id"])[0]

    def drain() -> None:
        answer = httpx.post(f"{system.url}/admin/instances/{victim['instance_id']}/drain", timeout=60)
        assert answer.status_code == 200

    check(streams_of(system, drain), undisturbed)
    system.wait_until(lambda: num_moved(system) > 0, "a report of what moved")
    system.tideway("drain", victim["instance_id"], "--undo", "--wait")
    system.wait_ready()
    check(streams_of(system, lambda: system.kill_instance(0)), undisturbed)
    assert replayed(system) > 0, "some went on elsewhere"
