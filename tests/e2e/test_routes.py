"""Routes and log-probabilities of prompts on a running system."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.stack import Stack

PROMPT = [3 + (7 * i) % 200 for i in range(70)]


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


def test_a_route_splits_mirrors_and_leaves_no_trace_in_statistics(stack: Stack) -> None:
    def arrived(model: str) -> int:
        models = httpx.get(f"{stack.url}/admin/models", params={"interval_s": 600}, timeout=60).json()["models"]
        traffic: dict[str, Any] = next(state["traffic"] for state in models if state["name"] == model) or {}
        return sum(traffic[of]["num_arrived"] for of in traffic.keys() & {"online", "offline"})

    def mirrored() -> bool:
        sample = 'tideway_gateway_route_requests_total{model="opt",outcome="ok",role="mirror",route="chat"} 5.0'
        return sample in httpx.get(f"{stack.url}/metrics", timeout=60).text

    told = stack.tideway("route", "set", "chat", "llama=1", "--mirror", "opt=1", "--sticky", "user")
    assert "llama 1" in told and "opt 1" in told
    names = lambda: [card["id"] for card in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]]  # noqa: E731
    stack.wait_until(lambda: "chat" in names(), "the route")
    before = arrived("llama"), arrived("opt")
    for _ in range(5):
        body = {"model": "chat", "prompt": PROMPT[:20], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["model"] == "chat" and answer.headers["x-tideway-model"] == "llama"
    stack.wait_until(mirrored, "five mirrored requests")
    stack.wait_until(lambda: arrived("llama") >= before[0] + 5, "the log of requests")
    assert arrived("opt") == before[1]
    assert "chat" in stack.tideway("route", "list")
    stack.tideway("route", "delete", "chat")
    stack.wait_until(lambda: "chat" not in names(), "no route")
