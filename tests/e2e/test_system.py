"""The whole system as clients use it: the openai package, plain HTTP, benchmark-style load, admin calls, traces."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.checkpoints import make_llama
from tests.e2e.otlp_collector import OtlpCollector
from tests.e2e.stack import Stack
from tests.e2e.streams import run_streams
from tideway.bench.arrivals import Closed
from tideway.bench.client import Target
from tideway.bench.lengths import Fixed
from tideway.bench.session import Session, run_session
from tideway.bench.workload import StreamSpec, Workload


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=30)


def reference(folder: str, prompt: list[int], max_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
    return output[0, len(prompt) :].tolist()


def test_both_models_are_listed(client):
    assert {model.id for model in client.models.list()} == {"llama", "opt"}


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_greedy_output_equals_transformers(stack, checkpoints, model):
    prompt = [3 + (7 * i) % 200 for i in range(50)]
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "min_tokens": 40}
    text = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
    tokens = reference(checkpoints[model], prompt, 40)
    expected = httpx.post(f"{stack.url}/detokenize", json={"model": model, "tokens": tokens}, timeout=30).json()
    assert text == expected["prompt"]


def test_chat_streams_and_does_not(client):
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(
        model="llama", messages=messages, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 20
    stream = client.chat.completions.create(
        model="llama",
        messages=messages,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, usage, reasons = "", None, []
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        else:
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert reasons == ["length"] and usage.completion_tokens == 20


def test_seeded_sampling_does_not_depend_on_company(client):
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model="opt", prompt="Once", max_tokens=30, temperature=1.0, seed=seed, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    alone = sample(7)
    with_others = client.completions.create(
        model="opt", prompt="Once", max_tokens=30, temperature=1.0, seed=5, n=4, extra_body={"ignore_eos": True}
    )
    assert with_others.choices[2].text == alone
    assert len({choice.text for choice in with_others.choices}) == 4


def test_logprobs_of_greedy_tokens_are_the_highest(client):
    answer = client.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_errors_have_openai_shape(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="x")
    assert unknown.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="opt", prompt="x" * 600, max_tokens=5)
    assert "512" in long.value.body["message"]


async def test_many_answers_in_one_piece(stack):
    body = {"model": "llama", "prompt": [5] * 100, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=20)) as client:
        calls = [client.post(f"{stack.url}/v1/completions", json={**body, "seed": seed}) for seed in range(60)]
        answers = await asyncio.gather(*calls)
    assert all(answer.json()["usage"]["completion_tokens"] == 30 for answer in answers)


async def test_benchmark_style_load(stack):
    load = StreamSpec(
        name="load",
        models={"llama": 1.0},
        arrivals=Closed(concurrency=20),
        num_requests=60,
        prompt_tokens=Fixed(tokens=100),
        output_tokens=Fixed(tokens=30),
    )
    session = Session(target=Target(url=stack.url, ignore_eos=True, vocabulary=250))
    total = (await run_session(session, Workload(streams=[load]))).summary.group()
    assert total.num_succeeded == 60 and total.output_tokens_per_s > 0


async def test_many_models_many_streams(stack):
    streams = await run_streams(stack.url, ["llama", "opt"], 60, 40)
    assert all(stream.ended_well and stream.usage["completion_tokens"] == 40 for stream in streams)


async def test_a_client_that_leaves_frees_its_request(stack):
    body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", f"{stack.url}/v1/completions", json=body) as response,
    ):
        async for _ in response.aiter_bytes():
            break

    def all_idle() -> bool:
        return all(
            model["num_running"] == 0 and model["num_waiting"] == 0
            for instance in stack.instances()
            for model in instance["models"]
        )

    await asyncio.to_thread(stack.wait_until, all_idle, "instances idle after the client left", 10)


def test_a_model_is_added_and_removed_while_others_run(stack: Stack, tmp_path: Path):
    extra = make_llama(tmp_path / "extra", seed=9, layers=1)

    async def scenario() -> None:
        streams = asyncio.create_task(run_streams(stack.url, ["llama", "opt"], 20, 150))
        async with httpx.AsyncClient(timeout=30) as client:
            added = await client.post(f"{stack.url}/admin/models", json={"name": "extra", "source": str(extra)})
            assert added.status_code in (200, 201, 202), added.text
            body = {"model": "extra", "prompt": "hello", "max_tokens": 5, "temperature": 0}
            deadline = time.monotonic() + 40
            while True:
                answer = await client.post(f"{stack.url}/v1/completions", json=body)
                if answer.status_code == 200:
                    break
                assert time.monotonic() < deadline, answer.text
                await asyncio.sleep(0.2)
            removed = await client.delete(f"{stack.url}/admin/models/extra")
            assert removed.status_code in (200, 202, 204), removed.text
            while (await client.post(f"{stack.url}/v1/completions", json=body)).status_code != 404:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
        assert all(stream.ended_well for stream in await streams)

    asyncio.run(scenario())


def test_one_trace_over_all_services(stack: Stack, collector: OtlpCollector):
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": "llama", "prompt": "trace me", "max_tokens": 10, "ignore_eos": True, "stream": True}
    response = httpx.post(
        f"{stack.url}/v1/completions",
        json=body,
        headers={"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "my-request"},
        timeout=30,
    )
    assert response.headers["x-request-id"] == "my-request"
    services = {"tideway-gateway", "tideway-scheduler", "tideway-worker"}
    wanted = {"queue", "dispatch", "prefill", "decode", "stream"}

    def complete() -> bool:
        spans = collector.of_trace(trace_id)
        return {s.service for s in spans} >= services and {s.name for s in spans} >= wanted

    deadline = time.monotonic() + 15
    while not complete():
        spans = collector.of_trace(trace_id)
        assert time.monotonic() < deadline, sorted((s.service, s.name) for s in spans)
        time.sleep(0.1)
    spans = collector.of_trace(trace_id)
    server = next(s for s in spans if s.parent_id == parent)
    assert server.service == "tideway-gateway" and server.attributes["gen_ai.request.model"] == "llama"
    known = {s.span_id for s in spans} | {parent}
    assert all(s.parent_id in known for s in spans), "every span hangs in the tree"
    assert len(spans) < 20, "never a span per token"


def test_metrics_of_gateway_and_workers(stack: Stack):
    text = httpx.get(f"{stack.url}/metrics", timeout=10).text
    assert "tideway_gateway_" in text and 'class="online"' in text
    for instance in stack.instances():
        text = httpx.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=10).text
        assert "vllm:num_requests_running{" in text and "vllm:kv_cache_usage_perc{" in text
        assert "tideway_instance_computed_tokens_total{" in text


def test_instances_measure_their_models_when_idle(stack: Stack):
    """And from then on plan with what was measured."""
    deadline = time.monotonic() + 60
    for instance in stack.instances():
        url = f"http://127.0.0.1:{instance['metrics_port']}/metrics"
        while not all(
            f'tideway_instance_cost_model_error{{engine="{instance["instance_id"]}",model_name="{model}"' in text
            for text in [httpx.get(url, timeout=10).text]
            for model in stack.models
        ):
            assert time.monotonic() < deadline
            time.sleep(0.2)
