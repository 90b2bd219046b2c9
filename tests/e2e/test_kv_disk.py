"""A worker that ends and begins again on its folder of KV blocks, as clients see it."""

from __future__ import annotations

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.rescues import MODEL, make_model, metric, prompts_of
from tests.e2e.stack import Stack

NUM_PROMPT, MAX_TOKENS = 600, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "blocks"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    """Float32, so that the same text is exact."""
    models = {MODEL: make_model(tmp_path_factory.mktemp("checkpoints"), NUM_PROMPT + MAX_TOKENS + 16)}
    environment = {"TIDEWAY_KV_OFFLOAD": "disk", "TIDEWAY_KV_DISK_FOLDER": str(folder)}
    with Stack(models, num_instances=1, environment=environment) as stack:
        stack.wait_ready()
        yield stack


def answers(stack: Stack, prompts: list[list[int]]) -> list[tuple[str, int]]:
    """Text, and tokens of the prompt that were cached."""
    found = []
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        found.append((answer["choices"][0]["text"], details.get("cached_tokens", 0)))
    return found


def test_a_worker_that_began_anew_answers_from_disk_with_the_same_text(stack: Stack, folder: Path) -> None:
    prompts = prompts_of(3, NUM_PROMPT)
    before = answers(stack, prompts)
    assert [cached for _, cached in before] == [0, 0, 0]
    stack.kill("worker-0", signal.SIGTERM)
    files = list(folder.rglob("*.kv"))
    assert files and all(not file.stat().st_mode & stat.S_IRWXO for file in files)
    stack.wait_until(lambda: not stack.instances(), "the end of the instance")
    stack.start("worker-0")
    stack.wait_ready()
    stack.wait_until(
        lambda: sum(metric(stack, "tideway_kv_disk_known_blocks").values()) == len(files), "a look at the folder"
    )
    after = answers(stack, prompts)
    assert [text for text, _ in after] == [text for text, _ in before]
    # Where the disk is slow for a moment, a prompt is computed instead.
    assert any(cached >= NUM_PROMPT - 64 for _, cached in after), after
    cached = "tideway_instance_cached_tokens_total"
    stack.wait_until(
        lambda: sum(metric(stack, cached, 'tier="disk"').values()) >= NUM_PROMPT - 64,
        "the count of tokens from disk",
        10.0,
    )
    assert sum(metric(stack, "tideway_instance_disk_read_bytes_total").values()) > 0
