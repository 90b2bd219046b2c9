"""No body keeps the event loop, and with it all streams, from going on."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest

from services.gateway.http.errors import MAX_JSON_CONTAINERS, MAX_JSON_VALUES, ApiError, decode
from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.schemas import ChatRequest, CompletionRequest
from services.gateway.text.work import Render, decode_task, encode
from tests.gateway.conftest import MODEL, Stack

COMPLETION = msgspec.json.Decoder(CompletionRequest)


@pytest.mark.parametrize(
    "prompt",
    [[[]] * (MAX_JSON_CONTAINERS + 1), [1] * (MAX_JSON_VALUES + 1), [{}] * (MAX_JSON_CONTAINERS + 1)],
)
def test_bodies_of_very_many_values_are_refused_before_they_are_made(prompt: list[object]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(ApiError, match="the limit is") as raised:
        decode(COMPLETION, body)
    assert raised.value.code == "body_too_complex"


@pytest.mark.parametrize("text", ["[{,", '\\"[,', "\\\\", '\\\\"', "], \\n{"])
def test_what_stands_in_texts_does_not_count(text: str) -> None:
    prompt = text * (MAX_JSON_VALUES // 2)
    assert decode(COMPLETION, json.dumps({"model": "m", "prompt": prompt}).encode()).prompt == prompt


def history() -> dict[str, object]:
    arguments = json.dumps({"rows": [[i, i] for i in range(60)]})
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}} for _ in range(50)]
    return {"model": MODEL, "messages": [{"role": "assistant", "content": None, "tool_calls": calls}] * 200}


def test_the_arguments_of_calls_are_read_in_the_text_process() -> None:
    request = msgspec.json.decode(json.dumps(history()), type=ChatRequest)
    before = time.thread_time()
    task = encode(Render("", request.messages, True, False, None, None))
    handed_over_s = time.thread_time() - before
    decoded = decode_task(task)
    assert isinstance(decoded, Render) and decoded.messages == request.messages
    assert isinstance(decoded.messages[0].tool_calls[0]["function"]["arguments"], str)  # type: ignore[index]
    assert handed_over_s < 0.5


async def test_long_histories_of_calls_leave_the_gateway_free(stack: Stack) -> None:
    body = json.dumps(history()).encode()
    assert len(body) < 8 * 2**20
    messages = msgspec.json.decode(body, type=ChatRequest).messages
    begun_s = time.thread_time()
    plain_messages(messages)
    plain_s = time.thread_time() - begun_s
    headers = {"content-type": "application/json"}
    longest_s, is_over = 0.0, False

    async def feel() -> None:
        nonlocal longest_s
        while not is_over:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - begun)

    feeling = asyncio.create_task(feel())
    answers = await asyncio.gather(
        *(stack.client.post("/v1/chat/completions", content=body, headers=headers) for _ in range(2))
    )
    is_over = True
    await feeling
    assert {answer.status_code for answer in answers} <= {400, 429}, "too long for the model"
    assert longest_s < plain_s, "of computing without a turn for others; by itself one history takes as long as that"


async def test_integers_beyond_64_bits_are_told_of(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = await stack.post("/v1/chat/completions", messages=messages, chat_template_kwargs={"a": 2**80})
    assert answer.status_code == 400, answer.text
    big = [{"function": {"name": "f", "arguments": json.dumps({"a": 2**80})}}]
    messages.append({"role": "assistant", "content": None, "tool_calls": big})  # type: ignore[dict-item]
    assert (await stack.post("/v1/chat/completions", messages=messages)).status_code == 200
