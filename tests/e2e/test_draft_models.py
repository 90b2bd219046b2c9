"""A draft model in the whole system: added with its model, which then says what it says without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.worker.checkpoints import write_checkpoint
from tests.worker.test_draft_model import similar

PROMPT = list(range(5, 45))
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.4, "logprobs": 2},
    {"temperature": 0.7, "seed": 7, "structured_outputs": {"regex": "[a-c]{3,40}"}},
    {"temperature": 0, "prompt_lookup": 0},
]


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def answers(client: httpx.Client, model: str) -> list[str]:
    texts = []
    for wish in WISHES:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 120, "ignore_eos": "structured_outputs" not in wish}
        answer = client.post("/v1/completions", json=body | wish)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


def num_drafted(client: httpx.Client) -> float:
    ports = [one["metrics_port"] for one in client.get("/admin/instances").json()["instances"]]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for port in ports
        for line in httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        if line.startswith("vllm:spec_decode_num_draft_tokens_total") and 'model_name="drafted"' in line
    )


def test_a_model_with_a_draft_model_says_what_it_says_without(
    stack: Stack, client: httpx.Client, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    path = Path(checkpoints["llama"])
    draft = similar(path, tmp_path / "draft", 0.05)
    for wrong in (str(write_checkpoint(tmp_path, "llama")), "/no/such"):
        refused = client.post("/admin/models", json={"name": "drafted", "source": str(path), "draft": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "draft"), refused.text
    added = client.post("/admin/models", json={"name": "drafted", "source": str(path), "draft": str(draft)})
    assert added.status_code == 200, added.text
    try:
        stack.wait_until(lambda: "drafted" in client.get("/ready").json()["models"], "the model with a draft model")
        expected = answers(client, "llama")
        assert answers(client, "drafted") == expected
        stack.wait_until(lambda: num_drafted(client) > 0, "drafts", 30)
        shown = {model["name"]: model for model in client.get("/admin/models").json()["models"]}
        assert (shown["drafted"]["draft"], shown["llama"]["draft"]) == (str(draft), "")
    finally:
        assert client.delete("/admin/models/drafted").status_code == 200
