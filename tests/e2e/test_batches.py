"""The Batch API of the whole system, driven by the openai package: to its end, cancelled, expired, and through the death of
every service. TIDEWAY_TEST_BATCH_LINES=2000 makes the last one as long as it should be measured."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.stack import Stack
from tests.stalls import whatever_the_machine_does

NUM_LINES = int(os.environ.get("TIDEWAY_TEST_BATCH_LINES", "60"))
MAX_TOKENS = 24
CHAOS_TOKENS = 40
STEP_S = 0.01
"""Step time of the lines that are disturbed."""
TIMEOUT_S = 120 + NUM_LINES
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return client_of(stack)


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=30)


def completion(number: int, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Greedy, of both models in turn, each with another prompt."""
    prompt = [3 + (7 * i + 13 * number + number // 200) % 200 for i in range(4 + number % 29)]
    model = ("llama", "opt")[number % 2]
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def chat(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {number}"}]
    return {"model": "llama", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def submit(client: openai.OpenAI, url: str, bodies: list[dict[str, Any]], window: str = "24h") -> str:
    lines = [
        json.dumps({"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body})
        for i, body in enumerate(bodies)
    ]
    file = client.files.create(file=("input.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)
    assert batch.status == "validating"
    return batch.id


def reach(stack: Stack, batch_id: str, condition: Callable[[Any], object], timeout_s: float = 60.0) -> Any:
    """The batch when `condition` holds of it, whoever may be dead meanwhile."""
    client = client_of(stack)
    deadline = time.monotonic() + timeout_s
    batch = None
    while time.monotonic() < deadline:
        try:
            batch = client.batches.retrieve(batch_id)
            if condition(batch):
                return batch
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            batch = error
        time.sleep(0.1)
    raise TimeoutError(f"not within {timeout_s:.0f} s: {batch}\n{stack.logs()}")


def has_ended(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def text_of(line: dict[str, Any]) -> str:
    choice = line["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(("url", "make"), [(COMPLETIONS, completion), (CHATS, chat)], ids=["completions", "chat"])
def test_a_batch_answers_as_the_live_endpoints_do(stack: Stack, client: openai.OpenAI, url: str, make) -> None:
    bodies = [make(i) for i in range(30)]
    batch = reach(stack, submit(client, url, bodies), has_ended)
    assert batch.status == "completed" and batch.error_file_id is None, batch
    assert (batch.request_counts.total, batch.request_counts.completed) == (30, 30)
    output = read(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line-{i}" for i in range(30)]
    for body, line in zip(bodies, output, strict=True):
        live = httpx.post(stack.url + url, json=body, timeout=30).json()["choices"][0]
        assert text_of(line) == (live["text"] if "text" in live else live["message"]["content"])
    assert batch.usage.output_tokens == 30 * MAX_TOKENS
    assert client.batches.list(limit=1).data[0].id == batch.id


def test_a_wrong_file_is_refused_by_line(stack: Stack, client: openai.OpenAI) -> None:
    bodies = [completion(0), {**completion(1), "model": "nobody"}, {**completion(2), "temperature": -1}]
    batch = reach(stack, submit(client, COMPLETIONS, bodies), has_ended)
    assert batch.status == "failed"
    assert [(each.line, each.param) for each in batch.errors.data] == [(2, "body.model"), (3, "body.temperature")]


def test_cancelling(stack: Stack, client: openai.OpenAI) -> None:
    batch_id = submit(client, COMPLETIONS, [completion(i, 20 if i < 8 else 400) for i in range(400)])
    reach(stack, batch_id, lambda batch: batch.request_counts.completed >= 3)
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = reach(stack, batch_id, has_ended, 20)
    assert batch.status == "cancelled"
    output = read(client, batch.output_file_id)
    assert 3 <= len(output) == batch.request_counts.completed < 400
    assert {line["custom_id"] for line in output} < {f"line-{i}" for i in range(400)}
    assert batch.request_counts.failed == 0 and batch.error_file_id is None
    wait_idle(stack)


def test_expiry(stack: Stack, client: openai.OpenAI) -> None:
    batch_id = submit(client, COMPLETIONS, [completion(i, 400) for i in range(400)], window="2s")
    batch = reach(stack, batch_id, has_ended, 30)
    assert batch.status == "expired"
    assert batch.request_counts.completed + batch.request_counts.failed == 400
    output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert len(output) == batch.request_counts.completed
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    wait_idle(stack)


def wait_idle(stack: Stack) -> None:
    """Nothing of an ended batch runs on."""

    def is_idle() -> bool:
        models = [model for instance in stack.instances() for model in instance["models"]]
        return all(model["num_running"] + model["num_waiting"] == 0 for model in models)

    stack.wait_until(is_idle, "the instances are idle", 20)


def test_live_requests_are_answered_while_a_batch_runs(stack: Stack, client: openai.OpenAI) -> None:
    batch_id = submit(client, COMPLETIONS, [completion(i, 20 if i < 8 else 120) for i in range(600)])
    reach(stack, batch_id, lambda batch: batch.request_counts.completed >= 1)
    for number in range(5):
        answer = client.completions.create(model="llama", prompt=f"Hello {number}", max_tokens=10)
        assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert client.batches.retrieve(batch_id).status == "in_progress", "the batch should outlast the live requests"
    client.batches.cancel(batch_id)
    reach(stack, batch_id, has_ended, 20)


# ----------------------------------------------------------------------------------------------------------- chaos


@pytest.fixture(scope="module")
def system(checkpoints: dict[str, str]) -> Iterator[Stack]:
    # Few lines at once, so that there is always work left to disturb.
    environment = {"TIDEWAY_BATCH_LINES_IN_FLIGHT": str(max(4, NUM_LINES // 50))}
    with Stack(checkpoints, num_workers=2, num_instances=1, environment=environment, step_s=STEP_S) as system:
        system.wait_ready()
        yield system


def disturbances(system: Stack) -> list[Callable[[], object]]:
    def replace(name: str) -> Callable[[], None]:
        def kill_and_start() -> None:
            system.kill(name, signal.SIGKILL)
            system.start(name)

        return kill_and_start

    def restart_nats() -> None:
        system.nats.kill()
        time.sleep(3.0)
        system.nats.start()

    return [
        system.kill_instance,
        replace("scheduler-0"),
        replace("gateway"),
        restart_nats,
        replace("worker-0"),
        replace("placement"),
    ]


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_line_is_answered_once_whatever_dies(system: Stack) -> None:
    client = client_of(system)
    bodies = [completion(i, CHAOS_TOKENS) for i in range(NUM_LINES)]
    began = time.monotonic()
    batch_id = submit(client, COMPLETIONS, bodies)
    blows = disturbances(system)
    for number, strike in enumerate(blows):
        share = NUM_LINES * (number + 1) // (len(blows) + 2)
        batch = reach(system, batch_id, lambda b, share=share: b.request_counts.completed >= share, TIMEOUT_S)
        assert batch.status == "in_progress", f"blow {number} must come before the end: {batch}"
        system.wait_until(lambda: httpx.get(f"{system.url}/health", timeout=5).is_success, "the gateway answers")
        strike()
    batch = reach(system, batch_id, has_ended, TIMEOUT_S)
    print(f"{NUM_LINES} lines in {time.monotonic() - began:.1f} s")
    assert batch.status == "completed", batch
    assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES, 0)
    client = client_of(system)
    output = read(client, batch.output_file_id)
    with whatever_the_machine_does():
        assert [line["custom_id"] for line in output] == [f"line-{i}" for i in range(NUM_LINES)]
        assert len({line["id"] for line in output}) == NUM_LINES
    assert batch.usage.output_tokens == NUM_LINES * CHAOS_TOKENS
    system.wait_ready()
    for number in range(0, NUM_LINES, max(1, NUM_LINES // 20)):
        live = httpx.post(system.url + COMPLETIONS, json=bodies[number], timeout=30).json()
        with whatever_the_machine_does():
            assert text_of(output[number]) == live["choices"][0]["text"]
