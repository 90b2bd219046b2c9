"""Images in vLLM itself, hosted and behind a URL: `make test-engines`. Needs torchvision in vLLM's environment."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from PIL import Image as Picture
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from services.worker.engines.hosted import HostedEngine
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.starting import hosted_vllm
from shared.engines.capabilities import Capability
from shared.engines.messages import Generate, Progress, Step
from shared.messages.requests import ErrorCode, Image, SamplingParams, pack_tokens, unpack_tokens
from shared.runtime.engine_environments import EngineEnvironmentError, python_of
from tests.conftest import free_port
from tests.worker.engines.hosted_stack import said
from tests.worker.engines.image_checkpoint import IMAGE_PIXELS, MODEL_TOKENS, NUM_IMAGE_TOKENS, write_image_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BLOCK_SIZE = 32
WORDS = " Once upon a time there was a compiler." * 8
"""More than a block of tokens."""
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0)}


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        found = python_of("vllm")
    except EngineEnvironmentError as error:
        pytest.skip(str(error))
    tried = subprocess.run([found, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"{found} cannot import torchvision, which vLLM's models with images need")
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_checkpoint(tmp_path_factory.mktemp("models") / "pictures")


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (40, 30), COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------- hosted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(python: Path, checkpoint: Path) -> AsyncIterator[HostedEngine]:
    arguments = ("--enforce-eager", "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE))
    engine = hosted_vllm(
        HostedSpec(source=str(checkpoint), dtype="float32", pool_bytes=64 << 20, engine_args=arguments), "cpu"
    )
    try:
        facts = await engine.start()
        assert Capability.IMAGES not in facts.lacks and Capability.IMAGE_RESUME not in facts.lacks, facts.notes
        yield engine
    finally:
        await engine.stop()


def prompt_of(checkpoint: Path, words: str = "What?") -> list[int]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = f"<|begin_of_text|><|user|><image>{words}<|end_of_turn|><|assistant|>"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


async def answer(
    engine: HostedEngine,
    key: str,
    prompt: list[int],
    *images: bytes,
    prior: Sequence[int] = (),
    num: int = 12,
) -> tuple[list[int], list[float], list[Progress]]:
    """Tokens, their log-probabilities, and what was told."""
    sampling = SamplingParams(max_tokens=num, temperature=0.0, logprobs=0)
    shown = tuple(Image(data, "image/png") for data in images)
    packed = pack_tokens([*prompt, *prior])
    engine.send([Generate(key=key, prompt=packed, num_fed=len(prior), sampling=sampling, priority=0, images=shown)])
    told: list[Progress] = []
    while not told or told[-1].finish_reason is None:
        step = await engine.next_step()
        told += [one for one in step.progress if one.key == key] if isinstance(step, Step) else []
    tokens = [token for one in told for token in unpack_tokens(one.tokens)]
    return tokens, [logprob.logprob for one in told for logprob in one.logprobs], told


def expected_logprobs(checkpoint: Path, prompt: list[int], colour: str, tokens: list[int]) -> list[float]:
    """By transformers, for a picture of one colour, which needs no scaling."""
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    placeholder = prompt.index(model.config.image_token_id)
    before, after = prompt[:placeholder], prompt[placeholder + 1 :]
    ids = [*before, *[model.config.image_token_id] * NUM_IMAGE_TOKENS, *after, *tokens]
    pixels = (torch.tensor(COLOURS[colour]) / 255 - 0.5) / 0.5
    pixels = pixels[None, :, None, None].expand(1, 3, IMAGE_PIXELS, IMAGE_PIXELS)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
    rows = logits[-len(tokens) - 1 : -1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("colour", COLOURS)
async def test_a_hosted_model_sees_what_transformers_sees(engine: HostedEngine, checkpoint: Path, colour: str) -> None:
    prompt = prompt_of(checkpoint)
    tokens, logprobs, told = await answer(engine, f"seen-{colour}", prompt, png(colour))
    torch.testing.assert_close(logprobs, expected_logprobs(checkpoint, prompt, colour, tokens), atol=1e-3, rtol=1e-3)
    assert told[0].num_prompt == len(prompt) - 1 + NUM_IMAGE_TOKENS
    rest, *_ = await answer(engine, f"rest-{colour}", prompt, png(colour), prior=tokens[:5], num=7)
    assert rest == tokens[5:], "output goes on from its tokens"


@pytest.mark.asyncio(loop_scope="module")
async def test_cached_prefixes_of_other_images_are_not_taken(engine: HostedEngine, checkpoint: Path) -> None:
    prompt = prompt_of(checkpoint, WORDS)
    for colour in ("red", "blue", "red"):
        tokens, logprobs, told = await answer(engine, f"cached-{colour}", prompt, png(colour))
        expected = expected_logprobs(checkpoint, prompt, colour, tokens)
        torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=1e-3)
    assert told[0].num_cached >= BLOCK_SIZE, "the same image was cached"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_model_does_not_take_is_refused_and_others_go_on(engine: HostedEngine, checkpoint: Path) -> None:
    prompt = prompt_of(checkpoint)
    too_long = prompt + [900] * (MODEL_TOKENS - len(prompt) - 1)
    green = png("green")
    for key, tokens, images in (
        ("unreadable", prompt, [b"nonsense"]),
        ("two", prompt, [png("red"), green]),
        ("long", too_long, [green]),
    ):
        made, _, told = await answer(engine, key, tokens, *images)
        assert not made and told[-1].error is not None
        assert (told[-1].error.code, told[-1].error.param) == (ErrorCode.BAD_REQUEST, "messages")
    assert (await answer(engine, "after", prompt, green))[0], "the image is not taken for one that the engine has"


# -------------------------------------------------------------------------------------------------- the whole of it


@contextmanager
def running(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


async def until_served(url: str, models: set[str], process: subprocess.Popen[bytes], log: Path) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        for _ in range(600):
            assert process.poll() is None, said(log)
            try:
                listed = (await http.get(f"{url}/v1/models")).json()["data"]
                if {one["id"] for one in listed if one.get("state", "ready") == "ready"} >= models:
                    return
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            await asyncio.sleep(0.5)
    raise AssertionError(said(log))


async def asked(http: httpx.AsyncClient, url: str, model: str, colour: str) -> tuple[str, int, list[float]]:
    source = f"data:image/png;base64,{base64.b64encode(png(colour)).decode()}"
    parts = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": source}}]
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 20,
        "logprobs": True,
    }  # fmt: skip
    answer = await http.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    (choice,) = told["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return choice["message"]["content"], told["usage"]["prompt_tokens"], logprobs


async def test_a_server_of_vllm_and_a_hosted_one_answer_as_vllm_does(
    python: Path, checkpoint: Path, tmp_path: Path
) -> None:
    served_port, port = free_port(), free_port()
    served_url, url = (f"http://127.0.0.1:{one}" for one in (served_port, port))
    flags = ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4", "--block-size", str(BLOCK_SIZE)]
    serve = [
        str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--served-model-name", "plain",
        "--host", "127.0.0.1", "--port", str(served_port), "--kv-cache-memory-bytes", str(64 << 20), *flags,
    ]  # fmt: skip
    up = [
        sys.executable, "-m", "tideway", "up", "--model", f"served={checkpoint}", "--model", f"hosted={checkpoint}",
        "--engine", "hosted=vllm", "--engine-args", f"hosted={' '.join(flags)}", "--engine-url", f"served={served_url}",
        "--instances", "2", "--port", str(port), "--data-dir", str(tmp_path / "up"),
    ]  # fmt: skip
    logs = tmp_path / "serve.log", tmp_path / "up.log"
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with running(serve, logs[0], environment) as server:
        await until_served(served_url, {"plain"}, server, logs[0])
        with running(up, logs[1]) as process:
            await until_served(url, {"served", "hosted"}, process, logs[1])
            async with httpx.AsyncClient(timeout=120) as http:
                found = {}
                for colour in COLOURS:
                    text, num_prompt, logprobs = await asked(http, served_url, "plain", colour)
                    for model in ("served", "hosted"):
                        answer = await asked(http, url, model, colour)
                        assert answer[:2] == (text, num_prompt), (model, colour)
                        torch.testing.assert_close(answer[2], logprobs, atol=1e-4, rtol=1e-4)
                    found[colour] = logprobs
                assert found["red"] != found["blue"]
