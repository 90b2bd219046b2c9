"""Prompts that one instance computes and another decodes, as clients and operators see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.e2e.checkpoints import make_llama
from tests.e2e.otlp_collector import CollectedSpan, OtlpCollector
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, stream_completion
from tests.e2e.test_migration import metric, timeline
from tests.stalls import whatever_the_machine_does

MAX_TOKENS = 40
LONG, SHORT = 1200, 8
"""Tokens of prompts."""
PREFILL, DECODE = "worker-0-0", "worker-0-1"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: OtlpCollector) -> Iterator[Stack]:
    """A worker with one instance of each role. Prompts come in several chunks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    models = {"llama": str(make_llama(folder / "llama", hidden=192, layers=4, max_len=2048))}
    environment = {
        "TIDEWAY_INSTANCE_ROLES": "prefill,decode",
        "TIDEWAY_TOKEN_BUDGET": "128",
        # Learnt from the steps of the first requests, which are not handed over.
        "TIDEWAY_PROFILE": "live",
        "TIDEWAY_OTLP_ENDPOINT": collector.endpoint,
    }
    with Stack(models, environment=environment) as stack:
        stack.wait_ready()
        stack.wait_until(lambda: are_known(stack), "transports and step times")
        yield stack


def are_known(stack: Stack) -> bool:
    """Whether both instances have a transport and know their step times; gives them steps to learn from."""
    asyncio.run(run(stack, 0))
    return all(is_known(stack, name) for name in (PREFILL, DECODE))


def is_known(stack: Stack, instance_id: str) -> bool:
    instance = stack.instance(instance_id)
    return bool(instance and instance["migration"] and instance["models"][0]["cost_model"] not in ("", "none"))


async def run(stack: Stack, seed: int) -> list[Stream]:
    """Four long prompts beside two short ones."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(10, 250, num).tolist() for num in (LONG, SHORT, LONG, LONG, SHORT, LONG)]
    async with httpx.AsyncClient(timeout=120) as client:
        return await asyncio.gather(
            *(stream_completion(client, stack.url, "llama", prompt, MAX_TOKENS, lambda _: None) for prompt in prompts)
        )


def num_handoffs(stack: Stack, outcome: str = "moved") -> float:
    return metric(stack, PREFILL, f'tideway_migrations_total{{direction="out",outcome="{outcome}",reason="handoff"}}')


def roles(stack: Stack) -> list[tuple[str, bool]]:
    found = [stack.instance(name) or {} for name in (PREFILL, DECODE)]
    return [(instance.get("role", ""), instance.get("is_role_fixed", False)) for instance in found]


async def test_long_prompts_are_computed_here_and_decoded_there_with_the_same_texts(
    stack: Stack, collector: OtlpCollector
) -> None:
    assert roles(stack) == [("prefill", True), ("decode", True)] and "prefill*" in stack.tideway("top", "--once")
    apart = await run(stack, 1)
    assert [stream.error for stream in apart] == [None] * 6 and all(stream.ended_well for stream in apart)
    assert num_handoffs(stack) >= 1
    assert metric(stack, DECODE, "tideway_handoff_wait_seconds_count") == num_handoffs(stack)

    def handed_over() -> list[CollectedSpan]:
        return [one for one in collector.spans if one.attributes.get("tideway.migration.reason") == "handoff"]

    stack.wait_until(lambda: len(handed_over()) >= num_handoffs(stack), "the spans of all handoffs")
    # A quick instance may compute the rest of a prompt while the room for its first chunks is asked for.
    longest = max(handed_over(), key=lambda span: span.attributes.get("tideway.migration.stages", 0))
    trace = collector.of_trace(longest.trace_id)
    dispatched = next(span for span in trace if span.name == "dispatch")
    assert dispatched.attributes["tideway.instance_id"] == PREFILL
    assert dispatched.attributes["tideway.decoder"] == DECODE
    stages = [span for span in trace if span.name == "migration.copy"]
    assert len(stages) >= 2, "chunks are sent while others are computed"
    request_id = longest.attributes["tideway.request_id"]
    told = {event["kind"]: event for event in timeline(stack, request_id)["events"]}
    assert told["migrating"]["cause"] == "handoff" and told["moved"]["place"] == PREFILL

    for name in (PREFILL, DECODE):
        assert f"The role of {name} is both." in stack.tideway("role", name, "both")
    stack.wait_until(lambda: roles(stack) == [("both", True)] * 2, "roles that are alike")
    before = num_handoffs(stack)
    alike = await run(stack, 1)
    assert num_handoffs(stack) == before
    with whatever_the_machine_does():
        assert [stream.text for stream in apart] == [stream.text for stream in alike]


async def test_a_prompt_goes_on_where_it_is_when_its_decoder_dies(stack: Stack) -> None:
    for name, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        stack.tideway("role", name, role)
    stack.wait_until(lambda: roles(stack) == [("prefill", True), ("decode", True)], "roles")
    running = asyncio.create_task(run(stack, 2))
    await asyncio.sleep(0.3)
    stack.kill_instance(1)
    streams = await running
    assert all(stream.ended_well for stream in streams)
    assert all(stream.usage["completion_tokens"] == MAX_TOKENS for stream in streams)


def test_what_is_no_role_or_no_instance_is_refused(stack: Stack) -> None:
    refused = httpx.post(f"{stack.url}/admin/instances/{PREFILL}/role", json={"role": "boss"}, timeout=10)
    assert refused.status_code == 400 and "role" in refused.json()["error"]["message"]
    unknown = httpx.post(f"{stack.url}/admin/instances/nobody/role", json={"role": "both"}, timeout=10)
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "instance_not_found"
