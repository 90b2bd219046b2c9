"""Texts that are too long, templates that are too much: refused, or ended in a process of their own, while others go on."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.text.bounds import longest_token_characters
from services.gateway.text.chat_templates import ChatTemplate
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import MAX_MODEL_LEN, byte_level_tokenizer, sentencepiece_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

HI = [{"role": "user", "content": "Hi"}]
MEMORY_BYTES = 192 * 2**20
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def composing(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


BOUNDED = [byte_level_tokenizer(), sentencepiece_tokenizer(), composing(byte_level_tokenizer())]


def test_a_process_for_texts_imports_no_event_loop() -> None:
    """The first chat waits for it to start."""
    code = "import sys, services.gateway.text.work; print({'asyncio', 'importlib.metadata', 'tokenizers'} & {*sys.modules})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@given(st.sampled_from(BOUNDED), st.text() | st.text("a ̀́ᾳͅ</s>ßﬁ"))
@settings(deadline=None)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(tokenizer: Tokenizer, text: str) -> None:
    longest = longest_token_characters(tokenizer)
    assert longest is not None
    assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_tokenizers_that_drop_or_fuse_characters_have_no_such_bound() -> None:
    strips = byte_level_tokenizer()
    strips.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    cuts = byte_level_tokenizer()
    cuts.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    swallows = byte_level_tokenizer()
    swallows.add_tokens([AddedToken("<mask>", lstrip=True)])
    shortens = byte_level_tokenizer()
    shortens.normalizer = normalizers.Replace("aaaa", "a")
    drops = Tokenizer(models.BPE({"a": 0}, []))
    fuses = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for tokenizer in (strips, cuts, swallows, shortens, drops, fuses, words):
        assert longest_token_characters(tokenizer) is None


@pytest.fixture
async def stack(nats_settings: BusSettings, checkpoint: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    """Beside the usual model, one whose tokenizer has no bound for texts, one whose template takes too much memory, and one
    whose template does not end."""
    unbounded = byte_level_tokenizer()
    unbounded.normalizer = normalizers.Strip()
    write_checkpoint(tmp_path / "unbounded", unbounded)
    write_checkpoint(tmp_path / "bomb", byte_level_tokenizer(), chat_template="{{ 'a' * 300000000 }}")
    write_checkpoint(tmp_path / "loop", byte_level_tokenizer(), chat_template=LOOP)
    specs = [ModelSpec(MODEL, str(checkpoint))]
    specs += [ModelSpec(name, str(tmp_path / name)) for name in ("unbounded", "bomb", "loop")]
    limits = {"text_timeout_s": 3.0, "text_memory_bytes": MEMORY_BYTES, "max_text_characters": 2**23}
    async with running_stack(nats_settings, specs, **limits) as stack:
        stack.say("Hello world")
        yield stack


async def test_a_prompt_that_cannot_fit_is_refused_by_its_characters(stack: Stack) -> None:
    longest = longest_token_characters(stack.tokenizer)
    assert longest is not None
    limit = longest * (MAX_MODEL_LEN + 1)
    for path, body, param in (
        ("/v1/completions", {"prompt": "a" * 7_500_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b" * (limit + 1)]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "c" * 7_500_000}]}, "messages"),
    ):
        answer = await stack.post(path, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert f"{MAX_MODEL_LEN} tokens" in error["message"] and f"{limit} characters" in error["message"]
    # One that may fit is counted in tokens.
    error = (await stack.post("/v1/completions", prompt="a" * limit)).json()["error"]
    assert "in the prompt" in error["message"]


async def test_long_texts_are_tokenised_alike_in_a_process_of_their_own(stack: Stack) -> None:
    text = "the tide comes in 😀 " * 5000
    answer = await stack.post("/tokenize", prompt=text)
    assert answer.json()["tokens"] == stack.tokenizer.encode(text).ids
    assert stack.gateway.context.tokenizers._pool._idle, "it was done there"
    answer = await stack.post("/tokenize", messages=[{"role": "user", "content": text}], add_special_tokens=False)
    rendered = f"<|user|>{text.strip()}<|end|><|assistant|>"
    assert answer.json()["tokens"] == stack.tokenizer.encode(rendered, add_special_tokens=False).ids


def resident_bytes() -> int:
    """Resident bytes of this process now: client and gateway together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_a_text_that_takes_too_much_memory_is_refused_and_the_gateway_keeps_its_own(stack: Stack) -> None:
    before = most = resident_bytes()
    asking = asyncio.create_task(stack.post("/v1/completions", model="unbounded", prompt="ab " * 2_500_000))
    while not asking.done():
        most = max(most, resident_bytes())
        await asyncio.sleep(0.005)
    error = asking.result().json()["error"]
    assert (asking.result().status_code, error["code"], error["param"]) == (400, "text_too_large", "prompt")
    assert f"{MEMORY_BYTES} bytes of memory (TIDEWAY_TEXT_MEMORY_BYTES)" in error["message"]
    assert most - before < 100 * 2**20
    assert (await stack.post("/v1/completions", model="unbounded", prompt="x")).status_code == 200


async def test_a_text_is_tried_again_without_the_tokenizers_of_other_models(stack: Stack) -> None:
    pool = stack.gateway.context.tokenizers._pool
    text = "the tide comes in " * 5000
    assert (await stack.post("/tokenize", prompt=text)).status_code == 200
    (process,) = pool._idle
    resource.prlimit(process._process.pid, resource.RLIMIT_DATA, (2**20, MEMORY_BYTES))
    assert (await stack.post("/tokenize", model="unbounded", prompt=text)).status_code == 200
    assert not process.is_alive and len(pool._idle) == 1
    (process,) = pool._idle
    resource.prlimit(process._process.pid, resource.RLIMIT_DATA, (2**20, MEMORY_BYTES))
    answer = await stack.post("/tokenize", model="unbounded", prompt=text)
    assert answer.json()["error"]["code"] == "text_too_large", "nothing else was in its memory"


async def test_long_texts_leave_a_process_to_templates(stack: Stack) -> None:
    pool = stack.gateway.context.tokenizers._pool
    text = "the tide comes in " * 5000
    assert (await stack.post("/tokenize", prompt=text)).status_code == 200
    (process,) = pool._idle
    process._process.send_signal(signal.SIGSTOP)
    long = [asyncio.create_task(stack.post("/tokenize", prompt=text)) for _ in range(4)]
    await until(lambda: pool._num_characters == 4 * len(text), "all of them")
    assert (await stack.post("/v1/chat/completions", messages=HI)).status_code == 200
    assert len(pool._exchanges) == 1 and not any(task.done() for task in long), "one at a time"
    process._process.send_signal(signal.SIGCONT)
    assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}


async def test_all_that_a_template_is_given_takes_room(stack: Stack) -> None:
    with stack.gateway.context.tokenizers._pool.room(2**23 - 4000):
        for more in ({}, {"chat_template_kwargs": {"mood": "x" * 5000}}):
            answer = await stack.post("/v1/chat/completions", messages=HI, **more)
            assert answer.status_code == (429 if more else 200)
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "y" * 5000}}]
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
        assert (await stack.post("/v1/chat/completions", messages=messages)).status_code == 429


@pytest.mark.parametrize(("model", "reason"), [("bomb", "bytes of memory"), ("loop", "longer than 3 s")])
async def test_a_template_that_takes_too_much_is_ended_and_others_go_on(stack: Stack, model: str, reason: str) -> None:
    pool = stack.gateway.context.tokenizers._pool
    await asyncio.gather(*(stack.post("/v1/chat/completions", messages=HI) for _ in range(2)))
    assert len(pool._idle) == 2, "both were started"
    ending = asyncio.create_task(stack.post("/v1/chat/completions", model=model, messages=HI))
    while not ending.done():
        started = time.monotonic()
        assert (await stack.client.get("/health")).status_code == 200
        assert time.monotonic() - started < 2.5, "while the other one is at work"
        assert (await stack.post("/v1/chat/completions", messages=HI)).status_code == 200
    for answer in (ending.result(), await stack.post("/v1/chat/completions", model=model, messages=HI)):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (503, "chat_template_failed", "model")
        assert reason in error["message"] and "retry-after" in answer.headers
    metrics = (await stack.client.get("/metrics")).text
    kind = "memory" if model == "bomb" else "time"
    assert f'tideway_gateway_killed_text_processes_total{{reason="{kind}"}} 1.0' in metrics, "not tried again at once"
    assert (await stack.post("/v1/completions", model=model, prompt="x")).status_code == 200


def test_what_a_template_computes_is_not_computed_when_it_is_loaded() -> None:
    tracemalloc.start()
    try:
        template = ChatTemplate("{{ 'a' * 30000000 }}", {})
        assert tracemalloc.get_traced_memory()[1] < 2**20
        assert len(template.render([])) == 30_000_000
    finally:
        tracemalloc.stop()


async def test_work_on_texts_is_bounded_and_ends_with_its_client(stack: Stack) -> None:
    pool = stack.gateway.context.tokenizers._pool
    long = [{"role": "user", "content": "x" * (2**22 + 1)}]
    waiting = [asyncio.create_task(stack.post("/v1/chat/completions", model="loop", messages=long)) for _ in range(2)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = [task.result() for task in waiting if task.done()]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "overloaded", "rate_limit_error")
    assert refused.headers["retry-after"] and "TIDEWAY_MAX_TEXT_CHARACTERS" in error["message"]
    await until(lambda: pool._exchanges, "the other one at work")
    for task in waiting:
        task.cancel()
    await until(lambda: not pool._exchanges, "its end with its client")
    assert pool._num_characters == 0
    metrics = (await stack.client.get("/metrics")).text
    assert 'tideway_gateway_killed_text_processes_total{reason="cancelled"} 1.0' in metrics


async def test_a_process_that_died_is_replaced(stack: Stack) -> None:
    pool = stack.gateway.context.tokenizers._pool
    assert (await stack.post("/v1/chat/completions", messages=HI)).status_code == 200
    (process,) = pool._idle
    process._process.kill()
    await until(lambda: not process.is_alive, "its end")
    assert (await stack.post("/v1/chat/completions", messages=HI)).status_code == 200
