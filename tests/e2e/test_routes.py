"""Routes and log-probabilities of prompts on a running system."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.messages.traffic import MAX_INTERVAL_S
from tests.e2e.stack import Stack

PROMPT = [3 + (7 * i) % 200 for i in range(70)]
STILL_S = 4.0
"""Several times as long as schedulers take to tell of requests."""


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_a_prompts_logprobs_are_those_of_transformers(stack: Stack, checkpoints: dict[str, str], model: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoints[model], dtype=torch.float32)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    body = {"model": model, "prompt": [PROMPT, PROMPT[:9]], "echo": True, "logprobs": 1, "max_tokens": 0}
    for _ in range(2):  # the second time its blocks are in the prefix cache
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()
        for choice, length in zip(answer["choices"], (70, 9), strict=True):
            first, *others = choice["logprobs"]["token_logprobs"]
            assert first is None and others == pytest.approx(expected[: length - 1], abs=1e-3)


@pytest.fixture
def route(stack: Stack) -> Iterator[str]:
    """The name of a route, which is gone after the test."""
    yield "chat"
    if "chat" in names(stack):
        stack.tideway("route", "delete", "chat")
        stack.wait_until(lambda: "chat" not in names(stack), "no route")


def names(stack: Stack) -> list[str]:
    return [card["id"] for card in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]]


def num_arrived(stack: Stack) -> dict[str, int]:
    """By model, in the log of requests."""
    answer = httpx.get(f"{stack.url}/admin/models", params={"interval_s": int(MAX_INTERVAL_S)}, timeout=60)
    traffic = {state["name"]: state["traffic"] or {} for state in answer.json()["models"]}
    return {
        name: sum(of[kind]["num_arrived"] for kind in of.keys() & {"online", "offline"}) for name, of in traffic.items()
    }


def num_arrived_settled(stack: Stack) -> dict[str, int]:
    """Arrivals, once all that was sent before is counted."""
    counts, since_s = num_arrived(stack), time.monotonic()

    def is_still() -> bool:
        nonlocal counts, since_s
        if (now := num_arrived(stack)) != counts:
            counts, since_s = now, time.monotonic()
        return time.monotonic() - since_s > STILL_S

    stack.wait_until(is_still, "counts that stand still")
    return counts


def test_a_route_splits_mirrors_and_leaves_no_trace_in_statistics(stack: Stack, route: str) -> None:
    def mirrored() -> bool:
        sample = f'tideway_gateway_route_requests_total{{model="opt",outcome="ok",role="mirror",route="{route}"}} 5.0'
        return sample in httpx.get(f"{stack.url}/metrics", timeout=60).text

    told = stack.tideway("route", "set", route, "llama=1", "--mirror", "opt=1", "--sticky", "user")
    assert "llama 1" in told and "opt 1" in told
    stack.wait_until(lambda: route in names(stack), "the route")
    before = num_arrived_settled(stack)
    for _ in range(5):
        body = {"model": route, "prompt": PROMPT[:20], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["model"] == route and answer.headers["x-tideway-model"] == "llama"
    stack.wait_until(mirrored, "five mirrored requests")
    stack.wait_until(lambda: num_arrived(stack)["llama"] >= before["llama"] + 5, "the log of requests")
    assert num_arrived_settled(stack) == {**before, "llama": before["llama"] + 5}
    assert route in stack.tideway("route", "list")
    stack.tideway("route", "delete", route)
    stack.wait_until(lambda: route not in names(stack), "no route")
