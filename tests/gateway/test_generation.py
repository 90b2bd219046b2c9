"""The generation endpoints over a real socket: shapes, streams, stop strings, log-probabilities, usage."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.http.errors import ApiError
from services.gateway.openai import parsing
from services.gateway.openai.parsing import check_prompt_logprobs
from services.gateway.openai.replies import ChatCompletion, Completion
from services.gateway.openai.schemas import ChatRequest, CompletionRequest
from services.gateway.text.logprobs import ShownToken, completion_logprobs
from services.gateway.text.tokenization import load_tokenizer
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    FinishReason,
    Priority,
    RequestClass,
    TokenLogprob,
    packed_logprob_bytes,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

HI = [{"role": "user", "content": "Hi"}]


async def events(stack: Stack, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; checks the framing and that it ends in [DONE]."""
    answer = await stack.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def chat_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_chat_with_the_openai_client(stack: Stack) -> None:
    stack.peer.num_cached_tokens = 3
    async with stack.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=7, temperature=0.0, seed=5)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    request = stack.peer.submitted[0]
    assert stack.tokenizer.decode(unpack_tokens(request.prompt), skip_special_tokens=False) == (
        "<|user|>Hi<|end|><|assistant|>"
    )
    assert answer.usage.prompt_tokens == len(request.prompt) // 4
    assert answer.usage.completion_tokens == len(stack.peer.script(request))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.0, 5)
    assert sampling.stop_token_ids == (stack.eos,)
    assert request.gateway_id == stack.gateway.context.gateway_id
    assert request.timeout_s <= 600
    assert (request.epoch, request.prior) == (0, b"")


async def test_chat_stream_with_the_openai_client(stack: Stack) -> None:
    async with stack.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(stack.ids("Hello world")) + 1


async def test_completions_with_the_openai_client(stack: Stack) -> None:
    async with stack.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="The tide", max_tokens=50)
        stream = await client.completions.create(model=MODEL, prompt="The tide", stream=True, max_tokens=50)
        pieces = [chunk async for chunk in stream]
    assert whole.choices[0].text == "Hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in pieces) == "Hello world"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert unpack_tokens(stack.peer.submitted[0].prompt)[0] == stack.tokenizer.token_to_id("<s>")


async def test_the_first_chunk_comes_with_the_first_token(stack: Stack) -> None:
    """A chunk before it would fake a time to first token; an empty text does not delay it."""
    stack.peer.automatic = False
    tokens = stack.ids("😀 done")
    reader = stack.read("/v1/chat/completions", messages=HI)
    request = await stack.next_request()
    stack.peer.emit(request, 0, tokens[:1])
    await until(lambda: reader.chunks, "first chunk")
    assert reader.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    stack.peer.emit(request, 1, tokens[1:], FinishReason.STOP)
    await reader.end()
    assert reader.text == "😀 done"
    assert reader.headers["traceparent"].split("-")[1] == request.traceparent.split("-")[1]


async def test_what_comes_while_a_client_does_not_read_is_one_chunk(stack: Stack) -> None:
    stack.peer.automatic = False
    tokens = stack.ids("the tide comes in, the tide goes out")
    reader = stack.read()
    request = await stack.next_request()
    stack.peer.emit(request, 0, tokens[:1])
    await until(lambda: reader.chunks, "first chunk")
    protocols = stack.gateway.context.connections.all()
    for protocol in protocols:
        protocol.pause_writing()  # as the transport does where the client takes nothing
    for offset in range(1, len(tokens)):
        stack.peer.emit(request, offset, [tokens[offset]], FinishReason.LENGTH if offset == len(tokens) - 1 else None)
        await stack.peer.bus.round_trip_s()
    await until(lambda: stack.gateway.context.table.streams == {}, "the end, though nobody reads")
    assert len(reader.chunks) == 1
    for protocol in protocols:
        protocol.resume_writing()
    await reader.end()
    assert reader.text == "the tide comes in, the tide goes out" and reader.is_complete
    assert len(reader.chunks) <= 3, "those from before, while it waited, and since"


async def test_streamed_text_is_the_whole_text_and_valid_utf8(stack: Stack) -> None:
    for text in ("emoji 😀 and 👩‍🚀 stay whole", "日本語 and naïve café", "<think>hm", " leading space"):
        stack.say(text)
        chunks = await events(stack, "/v1/chat/completions", messages=HI)
        assert chat_text(chunks) == text
        assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


async def test_stop_string_over_several_tokens_is_never_shown(stack: Stack) -> None:
    stack.peer.automatic = False
    tokens = stack.ids("the tide STOP HERE and more")
    assert len(tokens) > 8
    reader = stack.read("/v1/chat/completions", messages=HI, stop=["STOP HERE", "zzz"])
    request = await stack.next_request()
    for offset, token in enumerate(tokens):
        stack.peer.emit(request, offset, [token])
        await asyncio.sleep(0)
        assert "S" not in reader.text
    await reader.end()
    assert reader.text == "the tide "
    assert reader.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert reader.is_complete
    await until(lambda: stack.peer.instance_cancelled, "cancel at the instance")
    assert request.request_id in stack.peer.cancelled
    assert ("a", request.request_id) in stack.peer.instance_cancelled


async def test_held_back_text_is_shown_when_the_output_ends_without_the_stop_string(stack: Stack) -> None:
    stack.say("one STOP HER")
    answer = await stack.post("/v1/completions", prompt="x", stop="STOP HERE", max_tokens=50)
    assert answer.json()["choices"][0]["text"] == "one STOP HER"
    stack.say("one STOP HERE two")
    answer = await stack.post("/v1/completions", prompt="x", stop=["STOP HERE"], max_tokens=50)
    assert answer.json()["choices"][0]["text"] == "one "
    answer = await stack.post(
        "/v1/completions", prompt="x", stop="STOP HERE", include_stop_str_in_output=True, max_tokens=50
    )
    assert answer.json()["choices"][0]["text"] == "one STOP HERE"
    before = len(stack.ids("one STOP HERE"))
    answer = await stack.post("/v1/completions", prompt="x", stop="STOP HERE", min_tokens=before, max_tokens=50)
    assert answer.json()["choices"][0]["text"] == "one STOP HERE two"


async def test_usage_counts_up_to_the_stop_string(stack: Stack) -> None:
    stack.say("one two three four")
    answer = await stack.post("/v1/completions", prompt="x", stop=" two", max_tokens=50)
    usage = answer.json()["usage"]
    up_to_stop = next(n for n in range(20) if " two" in stack.tokenizer.decode(stack.ids("one two three four")[:n]))
    assert usage["completion_tokens"] == up_to_stop


async def test_a_stop_token_ends_the_text_without_being_part_of_it(stack: Stack) -> None:
    tokens = stack.ids("one two")
    stack.peer.script = lambda request: tokens
    last = tokens[-1]
    answer = await stack.post("/v1/completions", prompt="x", stop_token_ids=[last], ignore_eos=True)
    assert stack.peer.submitted[0].sampling.stop_token_ids == (last,)
    assert answer.json()["choices"][0]["text"] == stack.tokenizer.decode(tokens[:-1])
    assert answer.json()["usage"]["completion_tokens"] == len(tokens)


async def test_length_limit(stack: Stack) -> None:
    tokens = stack.say("one two three four five", FinishReason.LENGTH)
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=3)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == stack.tokenizer.decode(tokens[:3])
    await stack.post("/v1/completions", prompt="x")
    assert stack.peer.submitted[-1].sampling.max_tokens == 16
    assert not stack.peer.submitted[-1].is_open_ended
    await stack.post("/v1/chat/completions", messages=HI)
    request = stack.peer.submitted[-1]
    assert request.sampling.max_tokens == 256 - len(request.prompt) // 4
    assert request.is_open_ended, "the client named no limit"
    await stack.post("/v1/chat/completions", messages=HI, max_tokens=5, max_completion_tokens=6)
    assert stack.peer.submitted[-1].sampling.max_tokens == 6
    assert not stack.peer.submitted[-1].is_open_ended


async def test_chat_logprobs(stack: Stack) -> None:
    tokens = stack.say("é!")
    answer = await stack.post("/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=2)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(tokens)
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] == -0.5
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]) == "é!".encode()
    assert content[-1]["token"] == "</s>"
    chunks = await events(stack, "/v1/chat/completions", messages=HI, logprobs=True)
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert streamed[0]["top_logprobs"] == []
    plain = await stack.post("/v1/chat/completions", messages=HI)
    assert plain.json()["choices"][0]["logprobs"] is None


async def test_completion_logprobs(stack: Stack) -> None:
    tokens = stack.say("one two")
    answer = await stack.post("/v1/completions", prompt="x", logprobs=2)
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert "".join(logprobs["tokens"]) == "one two</s>"
    lengths = [len(stack.tokenizer.decode(tokens[:n])) for n in range(len(tokens))]
    assert logprobs["text_offset"] == lengths
    assert logprobs["token_logprobs"] == [-0.5] * len(tokens)
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


async def test_echo_with_logprobs_begins_with_those_of_the_prompt(stack: Stack) -> None:
    stack.say(" wide sea", FinishReason.LENGTH)
    prompt = stack.ids("the é")
    for asked in (prompt, "the é"):
        answer = await stack.post(
            "/v1/completions", prompt=asked, echo=True, logprobs=2, max_tokens=9, add_special_tokens=False
        )
        choice = answer.json()["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == "the é wide sea"
        assert len(logprobs["tokens"]) == len(prompt) + len(stack.ids(" wide sea"))
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(prompt)] == [-float(token) for token in prompt[1:]]
        assert all(len(top) == 3 for top in logprobs["top_logprobs"][1 : len(prompt)])
        assert logprobs["text_offset"][len(prompt)] == len("the é") and logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    chunks = await events(stack, "/v1/completions", prompt=prompt, echo=True, logprobs=2, max_tokens=9)
    streamed = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert streamed == logprobs["tokens"]


async def test_a_prompt_is_scored_without_output(stack: Stack) -> None:
    stack.say("never shown")
    prompts = [stack.ids("one two"), stack.ids("three")]
    answer = (
        await stack.post("/v1/completions", prompt=prompts, echo=True, logprobs=1, max_tokens=0, temperature=0)
    ).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one two", "three"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == list(map(len, prompts))
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 0
    assert [request.sampling.max_tokens for request in stack.peer.submitted] == [1, 1]


async def test_prompt_logprobs_as_vllm_has_them(stack: Stack) -> None:
    stack.say("yes")
    prompt = stack.ids("one two")
    choice = (await stack.post("/v1/completions", prompt=prompt, prompt_logprobs=2)).json()["choices"][0]
    assert choice["logprobs"] is None and choice["text"] == "yes"
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    for token, told in zip(prompt[1:], others, strict=True):
        assert next(iter(told)) == str(token) and len(told) == 3
        assert told[str(token)]["logprob"] == -float(token) and told[str(token)]["rank"] == 7
    chat = (await stack.post("/v1/chat/completions", messages=HI, prompt_logprobs=0)).json()
    assert chat["prompt_logprobs"][0] is None and all(len(told) == 1 for told in chat["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in (await stack.post("/v1/chat/completions", messages=HI)).json()


def test_a_prompt_whose_logprobs_are_too_many_is_refused() -> None:
    check_prompt_logprobs([5, 2340], 1, 20, "prompt")
    with pytest.raises(ApiError, match="2340 tokens at most; you requested 2341") as refused:
        check_prompt_logprobs([5, 2341], 1, 20, "prompt")
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    check_prompt_logprobs([10**6], 1, -1, "prompt")


async def test_logprobs_of_all_prompts_of_a_request_are_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_CALL_LOGPROBS_BYTES", 12 * packed_logprob_bytes(1))
    body: dict[str, Any] = {"prompt": [[5, 6, 7], [5, 6, 7]], "echo": True, "logprobs": 1, "max_tokens": 0}
    assert (await stack.post("/v1/completions", **body, n=2)).status_code == 200
    refused = await stack.post("/v1/completions", **body, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "can be had of 12 tokens at most; you requested 18" in refused.json()["error"]["message"]


async def test_logprobs_show_no_part_of_a_stop_string(stack: Stack) -> None:
    stack.say("one two STOP HERE")
    chunks = await events(
        stack, "/v1/chat/completions", messages=HI, logprobs=True, stop="STOP", stream_options={"include_usage": True}
    )
    shown = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert "".join(shown).strip() == "one two"


async def test_several_choices(stack: Stack) -> None:
    texts = ["one", "two three", "four"]
    stack.peer.script = lambda request: [*stack.ids(texts[int(request.request_id.rsplit("-", 1)[1])]), stack.eos]
    answer = (await stack.post("/v1/chat/completions", messages=HI, n=3, seed=10)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    requests = sorted(stack.peer.submitted, key=lambda request: request.request_id)
    assert [request.sampling.seed for request in requests] == [10, 11, 12]
    assert len({request.request_id for request in requests}) == 3
    prompt_tokens = len(requests[0].prompt) // 4
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == sum(len(stack.ids(text)) + 1 for text in texts)
    chunks = await events(stack, "/v1/chat/completions", messages=HI, n=3)
    assert [chat_text(chunks, index) for index in range(3)] == texts
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]


async def test_prompts_of_each_kind(stack: Stack) -> None:
    ids = stack.ids("The tide")
    with_bos = [stack.tokenizer.token_to_id("<s>"), *ids]
    for prompt, expected in [
        ("The tide", [with_bos]),
        (["The tide", "The tide"], [with_bos, with_bos]),
        (ids, [ids]),
        ([ids, ids[:1]], [ids, ids[:1]]),
    ]:
        stack.peer.submitted.clear()
        answer = (await stack.post("/v1/completions", prompt=prompt, n=2)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        sent = {int(r.request_id.rsplit("-", 1)[1]): unpack_tokens(r.prompt) for r in stack.peer.submitted}
        assert [sent[2 * i] for i in range(len(expected))] == expected
        assert [sent[2 * i + 1] for i in range(len(expected))] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_echo(stack: Stack) -> None:
    answer = await stack.post("/v1/completions", prompt="The tide: ", echo=True)
    assert answer.json()["choices"][0]["text"] == "The tide: Hello world"
    answer = await stack.post("/v1/completions", prompt=stack.ids("The tide: "), echo=True)
    assert answer.json()["choices"][0]["text"] == "The tide: Hello world"
    chunks = await events(stack, "/v1/completions", prompt="The tide: ", echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "The tide: Hello world"
    num_submitted = len(stack.peer.submitted)
    answer = await stack.post("/v1/completions", prompt="The tide", echo=True, max_tokens=0)
    assert answer.json()["choices"][0]["text"] == "The tide"
    assert answer.json()["usage"]["completion_tokens"] == 0
    chunks = await events(stack, "/v1/completions", prompt="The tide", echo=True, max_tokens=0)
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [("The tide", "length")]
    assert len(stack.peer.submitted) == num_submitted, "nothing is to be generated"


async def test_continuous_usage(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(stack, "/v1/completions", prompt="x", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == len(stack.ids("Hello world")) + 1
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


async def test_repeat_penalty_is_another_name(stack: Stack) -> None:
    for more in ({}, {"repetition_penalty": 1.3}):
        named = await stack.post("/v1/completions", prompt="x", repeat_penalty=1.3, **more)
        assert named.status_code == 200 and stack.peer.submitted[-1].sampling.repetition_penalty == 1.3
    both = await stack.post("/v1/completions", prompt="x", repeat_penalty=1.3, repetition_penalty=1.2)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "repeat_penalty")


async def test_explicit_nulls_and_unknown_fields_are_accepted(stack: Stack) -> None:
    nulls = dict.fromkeys({*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__})
    for required in ("model", "prompt", "messages"):
        del nulls[required]
    extra = {"never_heard_of": {"a": [1]}, "metadata": {"a": "b"}, "store": False}
    assert (await stack.post("/v1/completions", prompt="x", **nulls, **extra)).status_code == 200
    assert (await stack.post("/v1/chat/completions", messages=HI, **nulls, **extra)).status_code == 200
    harmless = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "repetition_penalty": 1.0}
    assert (await stack.post("/v1/chat/completions", messages=HI, **harmless)).status_code == 200


async def test_sampling_parameters_reach_the_instance(stack: Stack) -> None:
    body = {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": {"5": 2.5}, "min_tokens": 2, "max_tokens": 9, "seed": -1,
    }  # fmt: skip
    assert (await stack.post("/v1/completions", prompt="x", **body)).status_code == 200
    sampling = stack.peer.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.5, -0.5)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.max_tokens) == (((5, 2.5),), 2, 9)
    assert sampling.seed == 2**63 - 1
    assert sampling.logprobs == -1
    await stack.post("/v1/completions", prompt="x", n=1, best_of=1)
    await stack.post("/v1/completions", prompt="x")
    seeds = [request.sampling.seed for request in stack.peer.submitted[1:]]
    assert seeds[0] != seeds[1], "drawn by the gateway where the client gives none"


TIERS: list[tuple[dict[str, Any], RequestClass, Priority, str | None]] = [
    ({}, RequestClass.ONLINE, Priority.NORMAL, None),
    ({"service_tier": "auto"}, RequestClass.ONLINE, Priority.NORMAL, "default"),
    ({"service_tier": "default"}, RequestClass.ONLINE, Priority.NORMAL, "default"),
    ({"service_tier": "flex"}, RequestClass.OFFLINE, Priority.NORMAL, "flex"),
    ({"service_tier": "priority"}, RequestClass.ONLINE, Priority.HIGH, "priority"),
    ({"priority": -1}, RequestClass.ONLINE, Priority.HIGH, None),
    ({"priority": 3}, RequestClass.ONLINE, Priority.NORMAL, None),
    ({"priority": "-1"}, RequestClass.ONLINE, Priority.HIGH, None),
    ({"priority": "3"}, RequestClass.ONLINE, Priority.NORMAL, None),
    ({"priority": "high", "service_tier": "auto"}, RequestClass.ONLINE, Priority.HIGH, "priority"),
    ({"priority": "normal"}, RequestClass.ONLINE, Priority.NORMAL, None),
]


async def test_classes_and_tiers(stack: Stack) -> None:
    for body, request_class, priority, echoed in TIERS:
        answer = (await stack.post("/v1/chat/completions", messages=HI, **body)).json()
        request = stack.peer.submitted[-1]
        assert (request.request_class, request.priority) == (request_class, priority), body
        assert answer.get("service_tier") == echoed
        chunks = await events(stack, "/v1/chat/completions", messages=HI, **body)
        assert {chunk.get("service_tier") for chunk in chunks} == {echoed}


async def test_content_parts_and_template_arguments(stack: Stack) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    await stack.post("/v1/chat/completions", messages=messages, chat_template_kwargs={"mood": "calm"})
    prompt = stack.tokenizer.decode(unpack_tokens(stack.peer.submitted[0].prompt), skip_special_tokens=False)
    assert prompt == "<|system|>be brief<|end|><|user|>one\ntwo<|end|><|assistant|>calm"
    messages = [*HI, {"role": "assistant", "content": "The ti"}]
    await stack.post("/v1/chat/completions", messages=messages, continue_final_message=True)
    prompt = stack.tokenizer.decode(unpack_tokens(stack.peer.submitted[1].prompt), skip_special_tokens=False)
    assert prompt == "<|user|>Hi<|end|><|assistant|>The ti"


async def test_bodies_are_what_the_description_says(stack: Stack) -> None:
    whole = await stack.post("/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=1)
    assert msgspec.json.decode(whole.content, type=ChatCompletion).choices[0].message.content == "Hello world"
    whole = await stack.post("/v1/completions", prompt="x", logprobs=1)
    assert msgspec.json.decode(whole.content, type=Completion).choices[0].text == "Hello world"


async def test_keep_alive_only_on_request(stack: Stack) -> None:
    stack.peer.automatic = False
    reader = stack.read("/v1/chat/completions", {"x-keep-alive-interval": "1"}, messages=HI)
    await until(lambda: reader.chunks, "keep-alive")
    assert reader.chunks[0]["choices"] == []
    assert "usage" not in reader.chunks[0]
    stack.peer.emit(await stack.next_request(), 0, stack.ids("x"), FinishReason.STOP)
    await reader.end()
    assert reader.is_complete
    assert reader.text == "x"


async def test_objectives_and_the_class_travel_with_the_request(stack: Stack) -> None:
    fields = {"prompt": "x", "ttft_ms": 250, "tpot_ms": 12.5, "service_tier": "flex", "prompt_lookup": 3}
    answer = await stack.post("/v1/completions", **fields)
    assert answer.json()["service_tier"] == "flex"
    request = await stack.next_request()
    assert (request.ttft_objective_s, request.tpot_objective_s, request.prompt_lookup) == (0.25, 0.0125, 3)
    assert request.request_class is RequestClass.OFFLINE
    answer = await stack.post("/v1/completions", prompt="x", service_tier="auto")
    assert answer.json()["service_tier"] == "default"
    request = await stack.next_request(1)
    assert (request.ttft_objective_s, request.tpot_objective_s, request.prompt_lookup) == (0.0, 0.0, -1)
    assert request.request_class is RequestClass.ONLINE
    for name in ("ttft_ms", "tpot_ms"):
        for value in (0, -1, 1e9, "fast"):
            answer = await stack.post("/v1/completions", prompt="x", **{name: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name


async def test_fields_as_clients_without_integers_write_them(stack: Stack) -> None:
    """And a byte-order mark, as some shells and editors begin a body with; a `top_p` of 0 takes the most likely token."""
    body = b'\xef\xbb\xbf{"model": "tide", "prompt": "x", "max_tokens": 40.0, "n": 2.0, "seed": 7.0, "top_p": 0}'
    answer = await stack.client.post("/v1/completions", content=body)
    assert answer.status_code == 200, answer.text
    sampling = stack.peer.submitted[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.top_p) == (40, 7, 1, 1.0)
    assert len(answer.json()["choices"]) == 2


async def test_usage_is_told_where_it_is_wanted(stack: Stack) -> None:
    for options, num_with in (
        ({"include_usage": True}, 1),
        ({"include_usage": False}, 0),
        ({"include_usage": False, "continuous_usage_stats": True}, 0),
        ({}, 0),
    ):
        chunks = await events(stack, "/v1/completions", prompt="x", stream_options=options)
        assert sum(1 for chunk in chunks if chunk.get("usage")) == num_with, options


async def test_a_final_message_goes_on_or_a_new_one_begins(stack: Stack) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "One"}], "continue_final_message": True}
    assert (await stack.post("/v1/chat/completions", **body, add_generation_prompt=False)).status_code == 200
    assert (await stack.post("/v1/chat/completions", **body)).status_code == 200
    both = await stack.post("/v1/chat/completions", **body, add_generation_prompt=True)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


async def test_each_of_the_likely_tokens_has_an_entry(stack: Stack) -> None:
    """Tokens that are parts of characters too: their text is the same."""
    first = stack.tokenizer.token_to_id("\u00e6")
    halves = [first, stack.tokenizer.token_to_id("\u00e7"), stack.tokenizer.token_to_id("\u00e8")]
    assert None not in halves
    known = TokenLogprob(-0.5, tuple(halves), (-0.5, -1.5, -2.5), 1)
    loaded = load_tokenizer(ModelSpec("m", str(stack.gateway.context.catalog.models[0].source)))
    told = completion_logprobs(loaded, [ShownToken(first, known, 0, 0)], 3)
    assert told.top_logprobs == [{"bytes:\\xe6": -0.5, "bytes:\\xe7": -1.5, "bytes:\\xe8": -2.5}]
    assert told.tokens == ["bytes:\\xe6"]
    by_id = completion_logprobs(loaded, [ShownToken(first, known, 0, 0)], 3, by_id=True)
    assert by_id.top_logprobs == [dict(zip([f"token_id:{one}" for one in halves], (-0.5, -1.5, -2.5), strict=True))]
    answer = await stack.post("/v1/chat/completions", messages=HI, logprobs=True, return_tokens_as_token_ids=True)
    names = [entry["token"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{one}" for one in [*stack.ids("Hello world"), stack.eos]]


async def test_what_a_request_does_not_say_is_as_the_models_maker_says(
    nats_settings: BusSettings, tmp_path: Path, checkpoint: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    defaults = {"temperature": 0.01, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "min_p": 7, **defaults}))
    for switch, expected in (("auto", (0.01, 1, 0.9, 1.5)), ("none", (1.0, 0, 1.0, 1.0))):
        spec = ModelSpec(MODEL, str(folder))
        async with running_stack(nats_settings, [spec], generation_config=switch) as stack:
            stack.say("Hi")
            for path, body in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "x"})):
                assert (await stack.post(f"/v1/{path}", **body)).status_code == 200
                sampling = stack.peer.submitted[-1].sampling
                found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty)
                assert found == expected
            await stack.post("/v1/completions", prompt="x", temperature=1, top_k=0, top_p=1, repetition_penalty=1)
            sampling = stack.peer.submitted[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (1, 0, 1, 1)
            answer = (await stack.post("/v1/responses", input="Hi")).json()
            assert (answer["temperature"], answer["top_p"]) == (expected[0], expected[2])
            (shown,) = (await stack.client.get("/admin/models")).json()["models"]
            assert shown["sampling_defaults"] == (defaults if switch == "auto" else {})
