"""vLLM itself, hosted by a real Tideway: `make test-engines`. Needs `tideway engine install vllm`; several minutes.

Streams go on through the death of any process of the instance that computes them, and through its drain, with the tokens of
an undisturbed run (float32).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engines.hosted import HostedEngine
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.starting import hosted_vllm
from shared.engines.capabilities import Capability
from shared.engines.messages import OFFLINE_PRIORITY, ClearCache, Generate, Step
from shared.messages.requests import (
    Pooled,
    SamplingParams,
    TokenLogprob,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
    unpack_vector,
)
from shared.models.checkpoint import describe
from shared.runtime.engine_environments import EngineEnvironmentError, python_of
from tests.e2e.checkpoints import make_llama
from tests.worker.adapters import merged, write_adapter
from tests.worker.engines.hosted_stack import VICTIMS, hosted_stack, num_moved_in, streams, struck
from tests.worker.pooling_checkpoints import write_pooling_checkpoint
from tests.worker.test_pooling import expected as expected_vector
from tests.worker.test_pooling import text_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MODEL_TOKENS = 2000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        python_of("vllm")
    except EngineEnvironmentError as error:
        pytest.skip(str(error))
    with hosted_stack(tmp_path_factory.mktemp("hosted")) as address:
        yield address


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 0.8}], ids=str)
async def test_streams_go_on_through_the_death_of_any_process(url: str, fields: dict[str, object]) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, url, **fields)
        assert all(reason == "length" for _, reason in expected)
        for victim in VICTIMS:
            assert await struck(http, url, victim, **fields) == expected, victim


async def test_streams_move_out_of_an_instance_that_drains(url: str) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, url)
        assert await struck(http, url, "drain") == expected
        assert await num_moved_in(http, url) > 0, "they were made again"


async def test_a_schema_is_followed_and_what_is_lacking_is_refused_by_name(url: str) -> None:
    properties = {"yes": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["yes"], "additionalProperties": False}
    async with httpx.AsyncClient(timeout=120) as http:
        body = {"model": "demo", "prompt": "Is C a language?", "max_tokens": 40, "temperature": 0}
        structured = {**body, "structured_outputs": {"json": schema}}
        answer = (await http.post(f"{url}/v1/completions", json=structured)).json()
        assert answer["choices"][0]["text"] in ('{"yes": true}', '{"yes": false}', '{"yes":true}', '{"yes":false}')
        scored = (await http.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": 1})).json()
        told = scored["choices"][0]["prompt_logprobs"]
        assert told[0] is None and len(told) == scored["usage"]["prompt_tokens"]
        refused = await http.post(f"{url}/v1/embeddings", json={"model": "demo", "input": "x"})
        assert refused.status_code == 400


def hosted(source: Path, *arguments: str, **fields: Any) -> HostedEngine:
    arguments = ("--enforce-eager", "--max-num-batched-tokens", "256", "--block-size", "32", *arguments)
    spec = HostedSpec(source=str(source), dtype="float32", pool_bytes=64 << 20, engine_args=arguments, **fields)
    return hosted_vllm(spec, "cpu")


async def results(engine: HostedEngine, sent: list[Generate]) -> dict[str, tuple[list[int], list[TokenLogprob], str]]:
    """Tokens, log-probabilities and the error's message, by key."""
    engine.send(sent)
    found: dict[str, tuple[list[int], list[TokenLogprob], str]] = {one.key: ([], [], "") for one in sent}
    left = set(found)
    while left:
        step = await engine.next_step()
        for one in step.progress if isinstance(step, Step) else ():
            tokens, logprobs, _ = found[one.key]
            message = "" if one.error is None else one.error.message
            found[one.key] = ([*tokens, *unpack_tokens(one.tokens)], [*logprobs, *one.logprobs], message)
            if one.finish_reason is not None:
                left.discard(one.key)
    return found


@torch.inference_mode()
def generated(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy output, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPT = [5, 9, 40, 11, 60, 7, 21] * 6


async def test_scores_of_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "base", hidden=128)
    engine = hosted(path)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, prompt_logprobs=2)
    try:
        facts = await engine.start()
        assert Capability.PROMPT_LOGPROBS not in facts.lacks
        sent = [
            Generate(key=key, prompt=pack_tokens(PROMPT), sampling=sampling, priority=0) for key in ("first", "again")
        ]
        found = await results(engine, sent)
    finally:
        await engine.stop()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(torch.tensor([PROMPT])).logits
    scores = logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    for tokens, logprobs, _ in found.values():
        told = unpack_logprobs(logprobs[0].prompt, 2)
        assert tokens == generated(path, PROMPT, 3) and not any(one.prompt for one in logprobs[1:])
        assert [one.logprob for one in told] == pytest.approx(expected, abs=1e-4)
        assert [list(one.top_ids) for one in told] == scores.topk(2, -1).indices.tolist()


async def test_outputs_with_adapters_are_those_of_merged_weights(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", hidden=128)
    adapters = [write_adapter(tmp_path / name, base, rank=rank, seed=rank) for name, rank in (("one", 4), ("two", 8))]
    wide = write_adapter(tmp_path / "wide", base, rank=64)
    engine = hosted(base, "--enable-lora", "--max-lora-rank", "16", "--max-loras", "1", "--max-cpu-loras", "2")
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    try:
        facts = await engine.start()
        assert Capability.ADAPTERS not in facts.lacks and facts.max_adapters == 2
        keys = {"base": None, "one": adapters[0], "wide": wide, "two": adapters[1], "one again": adapters[0]}
        sent = [
            Generate(key=key, prompt=pack_tokens(PROMPT), sampling=sampling, priority=0, adapter=adapter)
            for key, adapter in keys.items()
        ]
        found = await results(engine, sent)
    finally:
        await engine.stop()
    assert "'wide' cannot be loaded" in found["wide"][2]
    paths = {
        "base": base,
        **{one.name: merged(tmp_path / f"{one.name}-merged", base, one) for one in adapters},
    }
    for key, path in (*paths.items(), ("one again", paths["one"])):
        assert found[key][0] == generated(path, PROMPT, 12), key


@pytest.mark.parametrize(
    "name", ["cross-bert", "bert-mean", "qwen3-last", "mistral-mean", "qwen3-score", "qwen3-yes-no"]
)
async def test_vectors_and_scores_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    changes = (
        {"hidden_size": 128} if "bert" in name else {"head_dim": 32}
    )  # multiples of 32, as vLLM wants them on a CPU
    path = write_pooling_checkpoint(tmp_path / name, name, **changes)
    engine = hosted(path, pooling=describe(path).pooling)
    num_first = 2 if name == "cross-bert" else 0
    texts = [text_of(length, length) for length in (3, 33, 60)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, pooled=Pooled(num_first=num_first))
    try:
        facts = await engine.start()
        assert Capability.POOLING not in facts.lacks and facts.max_model_len == describe(path).max_model_len
        assert facts.num_blocks * facts.block_size >= facts.max_model_len, "the longest text would be refused"
        sent = [
            Generate(key=str(number), prompt=pack_tokens(text), sampling=sampling, priority=0)
            for number, text in enumerate(texts)
        ]
        found = await results(engine, sent)
    finally:
        await engine.stop()
    for number, text in enumerate(texts):
        tokens, (told,), message = found[str(number)]
        assert len(tokens) == 1 and not message
        torch.testing.assert_close(
            torch.tensor(unpack_vector(told.prompt)), expected_vector(path, name, text, num_first), atol=2e-5, rtol=1e-4
        )


async def test_interrupted_steps_change_no_output() -> None:
    """Prompts of offline work with a beginning in common, in steps that online requests interrupt."""
    spec = HostedSpec(
        source="models/tideway-demo-llama", dtype="float32", pool_bytes=64 << 20, max_model_len=MODEL_TOKENS, ttft_s=0.05,
        interrupts=True,
        engine_args=("--enforce-eager", "--max-num-batched-tokens", "1024", "--block-size", "32"),
    )  # fmt: skip
    engine = hosted_vllm(spec, "cpu")
    draw = random.Random(1)
    try:
        facts = await engine.start()
        assert Capability.INTERRUPTS not in facts.lacks, facts.notes
        beginning = [draw.randrange(256) for _ in range(640)]
        prompts = [beginning + [draw.randrange(256) for _ in range(MODEL_TOKENS - 700)] for _ in range(6)]
        began_s = time.monotonic()
        expected, _ = await _outputs(engine, "alone", prompts, online_s=None)
        alone_s = time.monotonic() - began_s
        num_interrupted = 0
        for number in range(6):
            engine.send([ClearCache()])
            found, num = await _outputs(engine, f"beside{number}", prompts, online_s=alone_s * draw.uniform(0.05, 0.2))
            num_interrupted += num
            assert found == expected, f"in round {number}, after {num_interrupted} interruptions"
        assert num_interrupted > 5
    finally:
        await engine.stop()


async def _outputs(
    engine: HostedEngine, name: str, prompts: list[list[int]], online_s: float | None
) -> tuple[list[bytes], int]:
    """Outputs of offline requests beside short online ones, `online_s` apart; how many steps were interrupted."""
    outputs = {f"{name}-{number}": b"" for number in range(len(prompts))}
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    engine.send(
        [
            Generate(key=key, prompt=pack_tokens(prompt), sampling=sampling, priority=OFFLINE_PRIORITY)
            for key, prompt in zip(outputs, prompts, strict=True)
        ]
    )
    is_answered = asyncio.Event()

    async def interrupt(after_s: float) -> None:
        for number in itertools.count():
            await asyncio.sleep(after_s)
            is_answered.clear()
            key, prompt = f"{name}-online-{number}", pack_tokens([7, number % 256])
            engine.send([Generate(key=key, prompt=prompt, sampling=SamplingParams(max_tokens=1), priority=0)])
            await is_answered.wait()

    online = asyncio.create_task(interrupt(online_s)) if online_s is not None else None
    left, num_interrupted = set(outputs), 0
    try:
        while left:
            step = await engine.next_step()
            assert isinstance(step, Step)
            num_interrupted += step.is_interrupted
            for one in step.progress:
                if one.key not in outputs:
                    is_answered.set()
                    continue
                outputs[one.key] += one.tokens
                if one.finish_reason is not None:
                    left.discard(one.key)
    finally:
        if online is not None:
            online.cancel()
    return list(outputs.values()), num_interrupted
