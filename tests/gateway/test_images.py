"""Images in chats, messages, responses and batches: what the gateway sends on of them, for each kind of engine."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.openai.images import MAX_IMAGES, MAX_SENT_BYTES, MAX_URL_CHARACTERS, images_of
from services.gateway.openai.parsing import MAX_SEQUENCE_BYTES
from services.gateway.openai.schemas import ChatMessage
from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    MAX_IMAGES_BYTES,
    ErrorCode,
    GenerationRequest,
    Image,
    SamplingParams,
    TokenFrame,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.gateway.batching import ended, line, reach, start
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack

HOSTED, SERVED, SERVED_WITH_TOOLS = "hosted", "served", "served-with-tools"
SEE = {"type": "function", "function": {"name": "see", "parameters": {"type": "object", "properties": {}}}}
PNG = b"\x89PNG first"
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
FAR = "https://images.invalid/a.png"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<s>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Goes through parts, and drops a text that is none, as templates of models that take images may."""


@pytest.fixture
async def stack(nats_settings: BusSettings, checkpoint: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    pictures = str(write_checkpoint(tmp_path / "pictures", byte_level_tokenizer(), TEMPLATE))
    tooled = str(write_checkpoint(tmp_path / "tooled", byte_level_tokenizer(), TEMPLATE + "{% if tools %}{% endif %}"))
    specs = [
        ModelSpec(MODEL, str(checkpoint)),
        ModelSpec(HOSTED, pictures, engine="vllm"),
        ModelSpec(SERVED, pictures, engine="endpoint", engine_url="http://127.0.0.1:1"),
        ModelSpec(SERVED_WITH_TOOLS, tooled, engine="endpoint", engine_url="http://127.0.0.1:1"),
    ]
    async with running_stack(nats_settings, specs) as stack:
        stack.say("Hello world")
        yield stack


def part(url: str = DATA_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def sent(stack: Stack, model: str, path: str = "/v1/chat/completions", **body: Any) -> GenerationRequest:
    answer = await stack.post(path, model=model, **body)
    assert answer.status_code == 200, answer.text
    return stack.peer.submitted[-1]


def prompt_of(stack: Stack, request: GenerationRequest) -> str:
    return str(stack.tokenizer.decode(unpack_tokens(request.prompt), skip_special_tokens=False))


async def test_a_hosted_engine_is_given_bytes_and_a_prompt_with_placeholders(stack: Stack) -> None:
    jpeg = f"data:image/JPEG;base64,{base64.b64encode(b'second').decode()}"
    messages = [
        {"role": "system", "content": "Be short."},
        *user(text("A"), part(), text("B"), part(jpeg)),
        {"role": "assistant", "content": "Yes."},
        *user(text("C")),
    ]
    request = await sent(stack, HOSTED, messages=messages)
    assert prompt_of(stack, request) == (
        "<|system|>Be short.<|end|><|user|>A<s>B<s><|end|><|assistant|>Yes.<|end|><|user|>C<|end|><|assistant|>"
    )
    assert request.images == (Image(PNG, "image/png"), Image(b"second", "image/jpeg")) and not request.chat
    plain = await sent(stack, HOSTED, messages=[{"role": "user", "content": "A"}])
    assert prompt_of(stack, plain) == "<|user|>A<|end|><|assistant|>" and not plain.images


async def test_a_server_is_given_the_chat_as_it_came(stack: Stack) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        *user(text("A"), part(detail="low"), part(FAR)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "R"},
    ]
    fields = {"tools": [SEE], "chat_template_kwargs": {"mood": 1}}
    request = await sent(stack, SERVED_WITH_TOOLS, messages=messages, **fields)
    assert request.images == (Image(PNG, "image/png"), Image(url=FAR))
    chat = json.loads(request.chat)
    low, auto = ({"type": "image_url", "image_url": {"detail": detail}} for detail in ("low", "auto"))
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert chat["messages"] == [{"role": "user", "content": [text("A"), low, auto]}, said, messages[2]]
    assert (chat["tool_choice"], chat["chat_template_kwargs"]) == ("none", {"mood": 1})
    assert chat["tools"][0]["function"]["name"] == "see"
    assert "<s>" not in prompt_of(stack, request), "the server writes its placeholders itself"
    assert not (await sent(stack, SERVED, messages=user(text("A")))).chat


async def test_a_server_is_given_all_that_the_engines_here_are(stack: Stack) -> None:
    custom = {"id": "2", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    messages = [
        *user(part()),
        {"role": "assistant", "content": None, "function_call": {"name": "see", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "see", "content": "R"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm."}, text("Yes.")],
            "tool_calls": [custom],
        },
        {"role": "tool", "tool_call_id": "2", "content": [part(), text("a.png")]},
    ]
    chat = json.loads((await sent(stack, SERVED, messages=messages, add_special_tokens=True)).chat)
    _, called, result, refused, thought, last = chat["messages"]
    assert [call["function"] for call in called["tool_calls"]] == [{"name": "see", "arguments": '{"a": 1}'}]
    assert (result["role"], result["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])
    assert (refused["content"], thought["content"], thought["reasoning_content"]) == ("No.", "Yes.", "Hm.")
    assert thought["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"input": "ls"}'}
    assert "An image was left out" in last["content"] and chat["add_special_tokens"]


async def test_a_server_whose_template_takes_no_tools_is_told_of_them_in_words(stack: Stack) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    called = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "R"}]
    messages = [*user(part(detail="low")), *called, *user(part(FAR), text("And?"))]
    chat = json.loads((await sent(stack, SERVED, messages=messages, tools=[SEE])).chat)
    told, said, result, last = chat["messages"]
    assert '"see"' in told["content"][0]["text"] and not {"tools", "tool_choice"} & chat.keys()
    assert told["content"][1:] == [{"type": "image_url", "image_url": {"detail": "low"}}]
    assert '"see"' in said["content"] and result == {"role": "user", "content": "R"} and len(last["content"]) == 2


async def test_no_url_reaches_the_processes_that_render(stack: Stack) -> None:
    large = part("data:image/png;base64," + "A" * 3_000_000)
    messages = [*user(text("A")), {"role": "tool", "tool_call_id": "1", "content": [large]}]
    for spec in (ModelSpec(MODEL, "x"), ModelSpec(HOSTED, "x", engine="vllm")):
        plain, images = images_of(msgspec.convert(messages, list[ChatMessage]), spec)
        assert not images and len(msgspec.msgpack.encode(plain)) < 1000


async def test_messages_and_responses_have_images_too(stack: Stack) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    block = {"type": "image", "source": source}
    request = await sent(stack, HOSTED, "/v1/messages", max_tokens=5, system="S", messages=user(block, text("What?")))
    assert request.images == (Image(PNG, "image/png"),)
    assert prompt_of(stack, request) == "<|system|>S<|end|><|user|><s>What?<|end|><|assistant|>"
    far = {"type": "image", "source": {"type": "url", "url": FAR}}
    request = await sent(stack, SERVED, "/v1/messages", max_tokens=5, messages=user(far))
    assert request.images == (Image(url=FAR),) and not request.is_open_ended
    request = await sent(stack, SERVED, "/v1/messages", max_tokens=100_000, messages=user(far))
    assert request.is_open_ended, "what fits beside the image is known to the engine"
    for wrong in ({"type": "base64", "data": "AAAA"}, {**source, "media_type": "application/pdf"}):
        answer = await stack.post(
            "/v1/messages", model=HOSTED, max_tokens=5, messages=user({"type": "image", "source": wrong})
        )
        assert answer.status_code == 400 and "messages[0].content[0].source.media_type" in answer.text, answer.text

    shown = {"type": "input_image", "image_url": DATA_URL, "detail": "high"}
    asked = {"input": user({"type": "input_text", "text": "What?"}, shown)}
    refused = await stack.post("/v1/responses", model=MODEL, **asked)
    assert "'input_image' is not supported" in refused.text, refused.text
    refused = await stack.post("/v1/messages", model=MODEL, max_tokens=5, messages=user(block))
    assert "'image' is not supported" in refused.text, refused.text
    answer = await stack.post("/v1/responses", model=HOSTED, **asked)
    assert answer.status_code == 200 and stack.peer.submitted[-1].images == (Image(PNG, "image/png"),)
    request = await sent(stack, HOSTED, "/v1/responses", input="And?", previous_response_id=answer.json()["id"])
    assert request.images == (Image(PNG, "image/png"),), "the conversation has it still"
    request = await sent(stack, SERVED, "/v1/responses", **asked)
    assert json.loads(request.chat)["messages"][0]["content"][1]["image_url"] == {"detail": "high"}


async def test_a_line_of_a_batch_may_have_images(stack: Stack) -> None:
    client, endpoint = stack.openai(), "/v1/chat/completions"
    lines = [line(0, endpoint, model=HOSTED, messages=user(part()))]
    batch = await start(client, lines, endpoint=endpoint)
    done = await reach(client, batch.id, ended)
    assert done.request_counts is not None and done.request_counts.completed == 1, done
    assert stack.peer.submitted[-1].images == (Image(PNG, "image/png"),)


async def test_usage_has_the_tokens_that_the_engine_made_of_images(stack: Stack) -> None:
    stack.peer.automatic = False
    reader = stack.read(
        "/v1/chat/completions", model=HOSTED, messages=user(part()), stream_options={"include_usage": True}
    )
    request = await stack.next_request()
    for offset, tokens, num in ((0, stack.ids("Hello"), 0), (1, [stack.eos], 580)):
        entry = stack.peer.entry(request, offset, tokens, stack.peer.finish if num else None)
        told = msgspec.structs.replace(entry, num_prompt_tokens=num)
        stack.peer.send(request.gateway_id, TokenFrame("a", [told]))
    await reader.end()
    assert reader.chunks[-1]["usage"]["prompt_tokens"] == 580


LARGE = f"data:image/png;base64,{base64.b64encode(bytes(MAX_IMAGES_BYTES // 2 + 9)).decode()}"
CALL = {"id": "1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
URL = "messages[0].content[0].image_url"
REFUSED: list[tuple[str, dict[str, Any], str, str, str]] = [
    (MODEL, {"messages": user(part())}, "messages[0].content[0].type", "invalid_value", "is not supported"),
    (HOSTED, {"messages": user(part(FAR))}, URL, "unsupported_value", "no URL is fetched"),
    (HOSTED, {"messages": user(part("data:text/plain;base64,AAAA"))}, URL, "invalid_value", "data: URL with base64"),
    (SERVED, {"messages": user(part("file:///etc/passwd"))}, URL, "invalid_value", "or an http(s) URL"),
    (HOSTED, {"messages": user(part("data:image/png;base64,A"))}, URL, "invalid_value", "cannot be decoded"),
    (HOSTED, {"messages": user(part("data:image/png;base64,AAé="))}, URL, "invalid_value", "cannot be decoded"),
    (SERVED, {"messages": user(part("http://x/é"))}, URL, "invalid_value", "ASCII"),
    (SERVED, {"messages": user(part("http://x/" + "x" * MAX_URL_CHARACTERS))}, URL, "invalid_value", "characters"),
    (
        HOSTED,
        {"messages": [user(part())[0] | {"tool_calls": [CALL]}], "tools": [SEE]},
        "messages[0].tool_calls",
        "invalid_value",
        "only a message of the assistant",
    ),
    (SERVED, {"messages": user(part(LARGE)), "n": 32}, "n", "images_too_large", str(MAX_SENT_BYTES)),
    (HOSTED, {"messages": user(part("data:image/png;base64,"))}, URL, "invalid_value", "empty"),
    (HOSTED, {"messages": user({"type": "image_url"})}, URL, "invalid_value", "is expected"),
    (HOSTED, {"messages": user(part(LARGE), part(LARGE))}, "messages", "images_too_large", str(MAX_IMAGES_BYTES)),
    (SERVED, {"messages": user(part(LARGE), part(LARGE))}, "messages", "images_too_large", str(MAX_IMAGES_BYTES)),
    (HOSTED, {"messages": user(*[part()] * (MAX_IMAGES + 1))}, "messages", "images_too_large", f"is {MAX_IMAGES}"),
    (HOSTED, {"messages": user(part()), "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value", "with images"),
    (HOSTED, {"messages": [{"role": "system", "content": [part()]}]}, "messages[0].content[0].type", "invalid_value", ""),
    (
        HOSTED,
        {"messages": user(part()), "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
        "invalid_value",
        "with images",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "param", "code", "words"), REFUSED)
async def test_refusals_name_the_field_and_the_limit(
    stack: Stack, model: str, body: dict[str, Any], param: str, code: str, words: str
) -> None:
    answer = await stack.post("/v1/chat/completions", model=model, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert words in error["message"] and not stack.peer.submitted


async def test_texts_count_beside_the_images_that_a_server_is_given(stack: Stack) -> None:
    half = f"data:image/png;base64,{base64.b64encode(bytes(MAX_IMAGES_BYTES - 200)).decode()}"
    answer = await stack.post("/v1/chat/completions", model=SERVED, messages=user(part(half), text("x" * 200)))
    assert answer.json()["error"]["code"] == "images_too_large", answer.text


async def test_an_engine_of_a_model_without_images_refuses_by_name(stack: Stack) -> None:
    stack.peer.refusal = ServiceError.of(ErrorCode.BAD_REQUEST, "Images cannot be had: lacks images.", "messages")
    answer = await stack.post("/v1/chat/completions", model=HOSTED, messages=user(part()))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_the_largest_request_fits_into_a_message_of_nats() -> None:
    request = GenerationRequest(
        request_id="r" * 64, gateway_id="g" * 64, model="m" * 256, prompt=bytes(MAX_SEQUENCE_BYTES),
        images=(Image(bytes(MAX_IMAGES_BYTES), "image/png"),),
        sampling=SamplingParams(max_tokens=1, logit_bias=tuple((token, 1.5) for token in range(500))),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(request)) < 1_000_000 - 4096
