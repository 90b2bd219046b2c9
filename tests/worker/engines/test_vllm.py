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

import httpx
import pytest

from services.worker.engines.hosted import HostedEngine
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.starting import hosted_vllm
from shared.engines.capabilities import Capability
from shared.engines.messages import OFFLINE_PRIORITY, ClearCache, Generate, Step
from shared.messages.requests import SamplingParams, pack_tokens
from shared.runtime.engine_environments import EngineEnvironmentError, python_of
from tests.worker.engines.hosted_stack import VICTIMS, hosted_stack, num_moved_in, streams, struck

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
        refused = await http.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"
        assert "lacks prompt_logprobs" in refused.json()["error"]["message"]


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
