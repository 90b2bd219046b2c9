"""LoRA adapters in the whole system: loaded while it runs, served as models of their own on all instances, through the
death of one, and unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, stream_completion
from tests.stalls import whatever_the_machine_does
from tests.worker.adapters import merged, write_adapter

PROMPT = list(range(5, 45))
STEP_S = 0.02
"""Step time where requests are to move, which the start of a command precedes: they last for 240 of them."""


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, model: str, max_tokens: int = 40) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_adapters_come_serve_survive_and_go(
    stack: Stack, client: httpx.Client, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    base = Path(checkpoints["llama"])
    first, second = (write_adapter(tmp_path / f"lora-{i}", base, rank=4 + i, seed=i) for i in range(2))
    loaded = client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": first.name, "lora_path": first.source, "base_model_name": "llama"},
    )
    assert loaded.status_code == 200, loaded.text
    assert "is served" in stack.tideway("load-adapter", second.name, second.source, "--base", "llama")
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert (cards[first.name]["parent"], cards[first.name]["root"]) == ("llama", first.source)
    again = client.post("/v1/load_lora_adapter", json={"lora_name": first.name, "lora_path": first.source})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")

    # each as merged weights of its own would, and the same prompt's KV of one is never another's
    whole = merged(tmp_path / "merged", base, first)
    added = client.post("/admin/models", json={"name": "merged", "source": str(whole)})
    assert added.status_code == 200, added.text
    stack.wait_until(lambda: "merged" in client.get("/ready").json()["models"], "the merged model")
    texts = {name: complete(client, name) for name in ("llama", first.name, second.name, "merged")}
    assert texts[first.name] == texts["merged"]
    assert len({texts["llama"], texts[first.name], texts[second.name]}) == 3
    assert {name: complete(client, name) for name in texts} == texts
    assert client.delete("/admin/models/merged").status_code == 200
    assert client.delete("/admin/models/llama").status_code == 409, "it has adapters"

    models = [first.name, second.name, "llama"] * 4
    expected = asyncio.run(run(stack, models))
    disturbed = asyncio.run(run(stack, models, 100, lambda: stack.kill_instance(0)))
    with whatever_the_machine_does():
        assert [stream.text for stream in disturbed] == [stream.text for stream in expected]
    assert all(stream.ended_well for stream in disturbed)
    stack.wait_ready()

    shown = client.get("/admin/models").json()["adapters"]
    assert {adapter["name"]: adapter["rank"] for adapter in shown} == {first.name: 4, second.name: 5}
    traffic = {adapter["name"]: adapter["traffic"] for adapter in shown}
    assert traffic[first.name] is None or traffic[first.name]["model"] == first.name
    metrics = client.get("/metrics").text
    assert f'model="{second.name}"' in metrics

    for adapter in (first, second):
        gone = client.post("/v1/unload_lora_adapter", json={"lora_name": adapter.name})
        assert gone.status_code == 200, gone.text
        refused = client.post("/v1/completions", json={"model": adapter.name, "prompt": "x"})
        assert refused.status_code == 404
    assert complete(client, "llama") == texts["llama"]


async def run(
    stack: Stack, models: list[str], after: int | None = None, disturb: Callable[[], object] | None = None
) -> list[Stream]:
    """`disturb` is called `after` so many tokens."""
    seen, disturbing = 0, []

    def on_tokens(count: int) -> None:
        nonlocal seen
        is_due = after is not None and seen < after <= seen + count
        seen += count
        if is_due and disturb is not None:
            disturbing.append(asyncio.create_task(asyncio.to_thread(disturb)))

    async with httpx.AsyncClient(timeout=120) as client:
        streams = [
            stream_completion(client, stack.url, model, [3 + i, *PROMPT], 240, on_tokens)
            for i, model in enumerate(models)
        ]
        done = list(await asyncio.gather(*streams))
    await asyncio.gather(*disturbing)
    return done


@pytest.mark.long
def test_requests_move_with_their_adapters(tmp_path: Path) -> None:
    """Out of an instance that is drained, KV and all. The adapter is one of the settings."""
    base = make_llama(tmp_path / "llama")
    adapter = write_adapter(tmp_path / "lora", base)
    environment = {"TIDEWAY_PROFILE": "off", "TIDEWAY_ADAPTERS": f"lora=llama={adapter.source}"}
    with (
        Stack({"llama": str(base)}, environment=environment, step_s=STEP_S) as stack,
        httpx.Client(base_url=stack.url) as client,
    ):
        stack.wait_ready()
        stack.wait_until(lambda: client.get("/v1/models/lora").status_code == 200, "the adapter")
        expected = asyncio.run(run(stack, ["lora", "llama"] * 4))
        drained = sorted(one["instance_id"] for one in stack.instances())[0]
        disturbed = asyncio.run(run(stack, ["lora", "llama"] * 4, 100, lambda: stack.tideway("drain", drained)))
        with whatever_the_machine_does():
            assert [stream.text for stream in disturbed] == [stream.text for stream in expected]
        stack.wait_until(lambda: not stack.instance(drained), "it is gone")
        moved = [one["load"] for one in client.get("/admin/instances").json()["instances"]]
        assert sum(load["num_migrated_in"] for load in moved if load) > 0
