"""Every refusal: its status, OpenAI's error object, the field and the limit in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.http import bodies
from services.gateway.http.errors import of_info
from services.gateway.openai.schemas import is_nested_deep
from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import MAX_MODEL_LEN
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

HI = [{"role": "user", "content": "Hi"}]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    return body["error"]


FIELDS_OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": "many"}, "max_tokens", "int"),
    ({"max_tokens": True}, "max_tokens", "int"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_tokens": 10**30}, "max_tokens", "2147483647"),
    ({"temperature": 2.5}, "temperature", "<= 2"),
    ({"top_p": -0.5}, "top_p", ">= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "int"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream'"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
    ({"bad_words": ["x"]}, "bad_words", "not supported"),
    ({"return_token_ids": True}, "return_token_ids", "not supported"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "not supported"),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    ({"structural_tag": "{}"}, "structural_tag", "not supported"),
    ({"format": "json"}, "format", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"length_penalty": 1.5}, "length_penalty", "not supported"),
    ({"typical_p": 0.5}, "typical_p", "not supported"),
    ({"mirostat": 2}, "mirostat", "not supported"),
    ({"lora_path": "/adapters/a"}, "lora_path", "not supported"),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora", "not supported"),
    ({"cache_salt": ""}, "cache_salt", ">= 1"),
    ({"cache_salt": "x" * 257}, "cache_salt", "<= 256"),
    ({"cache_salt": 5}, "cache_salt", "str"),
    ({"n_probs": 5}, "n_probs", "not supported"),
    ({"num_beams": 4}, "num_beams", "not supported"),
    ({"structured_outputs": {}}, "structured_outputs", "needed"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason", "json"),
    (
        {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    ({"regex": "a", "guided_choice": ["b"]}, "regex", "one grammar"),
    ({"top_p": 1.5}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 129}, "n", "128"),
    ({"stop": [""]}, "stop[0]", "length >= 1"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "100"),
    ({"logit_bias": {"tide": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "token id"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "10"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["x", 5]}, "prompt", "list of texts"),
    ({"prompt": [5, [5]]}, "prompt", "list of"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": [100000]}, "prompt", "vocabulary"),
    ({"prompt": [-1]}, "prompt[0]", ">= 0"),
    ({"prompt": ["x"] * 200, "n": 2}, "prompt", "256 sequences"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"best_of": 3}, "best_of", "'n'"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"service_tier": "gold"}, "service_tier", "'gold'; it is one of 'auto', 'default', 'flex', 'priority', 'scale'."),
    ({"priority": "low"}, "priority", "'high', 'normal' or a whole number"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "'xml'; it is one of 'text', 'json_object', 'json_schema'.",
    ),
    ({"guided_json": 5}, "guided_json", "Expected"),
    ({"x-request-timeout": 0}, "x-request-timeout", "> 0"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"stream_options": []}, "stream_options", "object"),
]


async def test_fields_of_completions(stack: Stack) -> None:
    for body, param, words in FIELDS_OF_COMPLETIONS:
        error = error_of(await stack.post("/v1/completions", **{"prompt": "x", **body}), 400)
        assert error["param"] == param, body
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
        assert not stack.peer.submitted


FIELDS_OF_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'; it is one of 'system',"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": None}, "messages", "Missing"),
    ({"messages": HI, "echo": True}, "echo", "not supported"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role", "null"),
    ({"messages": HI, "reasoning_effort": "A lot"}, "reasoning_effort", "regex '^[a-z]{1,16}$'."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "'image_url' is not supported by this server",
    ),
    *(
        ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages[0].content[0].type", "not supported")
        for kind in ("input_audio", "audio_url", "video_url", "file", "image", "input_video", "document")
    ),
    (
        {"messages": [*HI, {"role": "assistant", "tool_calls": [{"function": ["now"]}]}]},
        "messages[1].tool_calls[0].function",
        "object",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "Missing"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
]


async def test_fields_of_chat(stack: Stack) -> None:
    for body, param, words in FIELDS_OF_CHAT:
        error = error_of(await stack.post("/v1/chat/completions", **{"messages": HI, **body}), 400)
        assert error["param"] == param, body
        assert words in error["message"]
        assert not stack.peer.submitted


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"{} {}",
    b"\xff\xfe",
    b'{"model": "tide", "prompt": "\xff"}',
    b'{"model": "tide", "prompt": "\\ud800"}',
    b'{"model": "tide", "prompt": "x", "temperature": NaN}',
    b'{"model": "tide", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tide", "prompt": "x", "temperature": 1e999}',
    b'{"model": "tide", "prompt": [' + b"9" * 4000 + b"]}",
    b'{"model": "tide", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "tide", "prompt": "x", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": 1, "prompt": "x"}',
]


async def test_requests_that_are_no_request(stack: Stack) -> None:
    headers = {"content-type": "application/json"}
    for body in NO_REQUESTS:
        error_of(await stack.client.post("/v1/completions", content=body, headers=headers), 400)


async def test_half_of_a_character_is_named(stack: Stack) -> None:
    """Left by clients that cut a text between the halves of a character beyond 2^16."""
    headers = {"content-type": "application/json"}
    halves = {
        r"\ud83d": r"\ud83d",
        r"a \uDE00 b": r"\uDE00",
        r"\ud83d\ude00\ud83d\u0041": r"\ud83d",
        r"\ude00\ud83d": r"\ude00",
    }
    for text, half in halves.items():
        body = '{"model": "tide", "prompt": "' + text + '"}'
        error = error_of(await stack.client.post("/v1/completions", content=body, headers=headers), 400)
        assert error["message"] == f"Invalid JSON: {half} is half of a character.", text


async def test_numbers_and_flags_may_be_texts(stack: Stack) -> None:
    """Clients that fill templates send such texts, and vLLM takes them; a text stays one where a text may be."""
    fields = {"max_tokens": "7", "temperature": "0.25", "stream": "false", "logprobs": "1", "stop": "5", "model": MODEL}
    fields |= {"num_beams": "1.0", "top_a": "0", "use_beam_search": "false"}
    answer = await stack.post("/v1/completions", prompt=["1", "2"], **fields)
    assert answer.status_code == 200, answer.text
    sampling = stack.peer.submitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, len(stack.peer.submitted)) == (7, 0.25, 2)
    for other in ({"num_beams": "2"}, {"use_beam_search": "true"}, {"suffix": "null"}, {"logits_processors": "0"}):
        refused = error_of(await stack.post("/v1/completions", prompt="1", **other), 400)
        assert refused["param"] == next(iter(other))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("name", ["", None])
async def test_an_empty_name_of_a_model_is_left_out(stack: Stack, path: str, name: str | None) -> None:
    asked = {"/v1/chat/completions": {"messages": HI}, "/v1/responses": {"input": "Hi"}}.get(path, {"prompt": "Hi"})
    answer = await stack.post(path, **asked, model=name)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", MODEL) == MODEL


async def test_content_type(stack: Stack) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "é"):
        headers = {"content-type": media_type.encode()}
        answer = await stack.client.post("/v1/completions", content=body, headers=headers)
        assert error_of(answer, 415)["param"] == "content-type"
    for media_type in ("application/json; charset=utf-8", "application/vnd.api+json"):
        headers = {"content-type": media_type}
        answer = await stack.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200


async def test_unknown_model_path_and_method(stack: Stack) -> None:
    error = error_of(await stack.post("/v1/completions", prompt="x", model="ocean"), 404)
    assert error["code"] == "model_not_found"
    assert "'ocean'" in error["message"]
    assert f"'{MODEL}'" in error["message"]
    assert error_of(await stack.client.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = await stack.client.get("/v1/completions")
    error_of(answer, 405)
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE, ErrorCode.MODEL_FAILED, ErrorCode.CRASHED])
def test_what_would_fail_again_is_not_tried_again_by_clients(code: ErrorCode) -> None:
    assert of_info(ErrorInfo(code, "why")).headers()["x-should-retry"] == "false"


async def test_prompt_too_long(stack: Stack) -> None:
    ids = [5] * MAX_MODEL_LEN
    error = error_of(await stack.post("/v1/completions", prompt=ids), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count(str(MAX_MODEL_LEN)) == 2
    error = error_of(await stack.post("/v1/completions", prompt=ids[:-10], max_tokens=11), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"{MAX_MODEL_LEN + 1} tokens" in error["message"]
    assert error["param"] == "max_tokens"
    assert (await stack.post("/v1/completions", prompt=ids[:-10], max_tokens=10)).status_code == 200
    long = [{"role": "user", "content": "tide " * 500}]
    assert error_of(await stack.post("/v1/chat/completions", messages=long), 400)["param"] == "messages"
    for limits, param in (
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    ):
        error = error_of(await stack.post("/v1/chat/completions", messages=HI, **limits), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert len(stack.peer.submitted) == 1


async def test_a_large_body_is_refused_before_it_is_read(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LINGER_S", 0.3)
    headers = {"content-type": "application/json"}
    num_sent = 0

    async def spaces(num_chunks: int) -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(num_chunks):
            num_sent += 1
            await asyncio.sleep(0)
            yield b" " * 500

    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], max_body_bytes=1000) as stack:
        error = error_of(await stack.post("/v1/completions", prompt="x" * 2000), 413)
        assert "1000 bytes" in error["message"]
        answer = await stack.client.post("/v1/completions", content=spaces(100), headers=headers)
        assert error_of(answer, 413)["code"] == "body_too_large"
        with pytest.raises((httpx.WriteError, httpx.ReadError)):
            await stack.client.post("/v1/completions", content=spaces(10_000_000), headers=headers)
        assert num_sent < 1_000_000
        assert (await stack.client.get("/health")).status_code == 200


async def test_request_ids(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "x"}
    answer = await stack.client.post("/v1/completions", json=body, headers={"x-request-id": "my-id-1"})
    assert answer.headers["x-request-id"] == "my-id-1"
    again = await stack.client.post("/v1/completions", json=body, headers={"x-request-id": "my-id-1"})
    assert again.status_code == 200
    assert again.json()["id"] != answer.json()["id"]
    odd = await stack.client.get("/health", headers={"x-request-id": "x" * 500})
    assert len(odd.headers["x-request-id"]) == 32
    failed = await stack.client.get("/nowhere", headers={"x-request-id": "my-id-2"})
    assert failed.headers["x-request-id"] == "my-id-2"


async def test_refusals_of_the_scheduler(stack: Stack) -> None:
    for code, status, error_code in [
        (ErrorCode.OVERLOADED, 429, "overloaded"),
        (ErrorCode.UNKNOWN_MODEL, 404, "model_not_found"),
        (ErrorCode.TOO_LONG, 400, "context_length_exceeded"),
        (ErrorCode.BAD_REQUEST, 400, "invalid_value"),
        (ErrorCode.INTERNAL, 500, "internal_error"),
    ]:
        stack.peer.refusal = ServiceError.of(code, "because", "prompt", retry_after_s=7)
        answer = await stack.post("/v1/completions", prompt="x")
        error = error_of(answer, status)
        assert (error["message"], error["code"]) == ("because", error_code)
        if status == 429:
            assert answer.headers["retry-after"] == "7"
        error_of(await stack.post("/v1/completions", prompt="x", stream=True), status)


async def test_the_openai_client_sees_its_exceptions(stack: Stack) -> None:
    async with stack.openai() as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="ocean", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        stack.peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
        with pytest.raises(openai.RateLimitError, match="full"):
            await client.completions.create(model=MODEL, prompt="x")
        stack.peer.refusal = None
        stack.peer.automatic = False
        stream = await _begun_stream(stack, client)
        request = stack.peer.submitted[-1]
        broken = ErrorInfo(ErrorCode.INTERNAL, "it broke")
        stack.peer.emit(request, 1, [], FinishReason.ERROR, error=broken)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass


async def _begun_stream(stack: Stack, client: openai.AsyncOpenAI) -> openai.AsyncStream:
    number = len(stack.peer.submitted)
    call = asyncio.create_task(client.completions.create(model=MODEL, prompt="x", stream=True))
    stack.peer.emit(await stack.next_request(number), 0, stack.ids("x")[:1])
    return await call


async def test_failures_before_and_in_a_stream(stack: Stack) -> None:
    stack.peer.automatic = False
    early = stack.read()
    request = await stack.next_request()
    stack.peer.emit(request, 0, [], FinishReason.ERROR, error=ErrorInfo(ErrorCode.TOO_LONG, "too long for the pool"))
    await early.end()
    assert early.status == 400, "before the first token a failure is an HTTP error"
    late = stack.read()
    request = await stack.next_request(1)
    stack.peer.emit(request, 0, stack.ids("one"))
    await until(lambda: late.text == "one", "first token")
    stack.peer.emit(request, len(stack.ids("one")), [], FinishReason.ERROR, error=ErrorInfo(ErrorCode.INTERNAL, "oh"))
    await late.end()
    assert late.error == {"message": "oh", "type": "server_error", "param": None, "code": "internal_error"}
    assert not late.is_complete


async def test_deadline(stack: Stack) -> None:
    stack.peer.automatic = False
    answer = await stack.post("/v1/completions", prompt="x", **{"x-request-timeout": 0.3})
    assert error_of(answer, 408)["code"] == "deadline_exceeded"
    assert stack.peer.submitted[0].timeout_s <= 0.3
    await until(lambda: stack.peer.cancelled == [stack.peer.submitted[0].request_id], "cancel")
    reader = stack.read(headers={"x-request-timeout": "0.5"})
    stack.peer.emit(await stack.next_request(1), 0, stack.ids("one"))
    await reader.end()
    assert reader.error is not None
    assert reader.error["code"] == "deadline_exceeded"
    for text in ("soon", "-1", "nan"):
        answer = await stack.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-request-timeout": text}
        )
        assert error_of(answer, 400)["param"] == "x-request-timeout"


async def test_a_checkpoint_that_cannot_be_read(nats_settings: BusSettings, checkpoint: Path, tmp_path: Path) -> None:
    broken = ModelSpec("broken", str(tmp_path))
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint)), broken]) as stack:
        error = error_of(await stack.post("/v1/completions", model="broken", prompt="x"), 503)
        assert "config.json" in error["message"]
        stack.say("fine")
        assert (await stack.post("/v1/completions", prompt="x")).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
    ],
)
async def test_a_model_that_generates_has_no_vectors(stack: Stack, path: str, fields: dict[str, Any]) -> None:
    error = error_of(await stack.client.post(path, json={"model": MODEL, **fields}), 400)
    assert error["code"] == "unsupported_model" and f"generates text; {path} needs an embedding" in error["message"]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


def test_nesting_is_counted_in_objects_and_lists() -> None:
    assert not any(map(is_nested_deep, (None, True, "x", {}, nested(100), [[nested(98)], {"a": nested(98)}])))
    assert all(map(is_nested_deep, (nested(101), [[nested(98)], {"a": nested(99)}])))


@pytest.mark.parametrize("depth", [101, 900, 950, 980, 100_000])
async def test_what_is_nested_deep_is_refused_by_name(stack: Stack, depth: int) -> None:
    """Just below what the decoder takes too, where less is left for all that follows."""
    mark = '"DEEP"'
    deep = '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)
    function = {"name": "f", "parameters": "DEEP"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "more": "DEEP"}
    form = {"type": "json_schema", "name": "x", "schema": "DEEP"}
    chat, responses = "/v1/chat/completions", "/v1/responses"
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (chat, {"guided_json": "DEEP"}, "guided_json"),
        (chat, {"guided_json": deep}, "guided_json"),
        (chat, {"structured_outputs": {"json": "DEEP"}}, "structured_outputs.json"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": form}}, "response_format.json_schema.schema"),
        (chat, {"tools": [{"type": "function", "function": function}]}, "tools[0].function.parameters"),
        (chat, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]}, "messages[0].tool_calls"),
        (chat, {"chat_template_kwargs": "DEEP"}, "chat_template_kwargs"),
        ("/tokenize", {"chat_template_kwargs": "DEEP"}, "chat_template_kwargs"),
        (responses, {"input": "x", "text": {"format": form}}, "text.format.schema"),
        (responses, {"input": "x", "tools": [{"type": "function", **function}]}, "tools[0].parameters"),
    ]
    for path, body, param in bodies:
        text = json.dumps({"model": MODEL, "messages": HI, **body}).replace(mark, deep)
        answer = await stack.client.post(path, content=text, headers={"content-type": "application/json"})
        error = error_of(answer, 400)
        assert error["param"] == param or (depth > 900 and error["code"] in ("invalid_json", "body_too_complex")), error


async def test_what_is_nested_less_deep_is_taken(stack: Stack) -> None:
    for name in ("chat_template_kwargs", "guided_json"):
        answer = await stack.post("/v1/chat/completions", messages=HI, **{name: nested(50)})
        assert answer.status_code == 200, answer.text
