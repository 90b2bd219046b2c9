"""Requests with images at a server that runs already: they are chats there, and their output is made again after a loss."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.worker.engines.endpoint import EndpointEngine, EndpointOptions
from shared.bus.interface import ServiceError
from shared.engines.capabilities import Capability
from shared.messages.requests import ErrorCode, FinishReason, GenerationRequest, Image, pack_tokens
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.engines.completions_server import CHAT_TOKENS, CompletionsServer, completions_server, tokens_of
from tests.worker.engines.engine_stage import engine_instance_on
from tests.worker.instance_stage import Stage

FAR = "https://images.invalid/a.png"


@pytest.fixture
async def served(nats_settings) -> AsyncIterator[tuple[CompletionsServer, Stage]]:
    async with completions_server() as server:
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            yield server, stage


def chat(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"detail": "auto", **({"url": url} if url else {})}} for url in urls]
    return [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "A"}, *parts]}]


def with_image(data: bytes, request_id: str = "r1", max_tokens: int = 20, **fields: Any) -> GenerationRequest:
    encoded = msgspec.json.encode({"messages": chat("", ""), "tool_choice": "none"})
    images = (Image(data, "image/png"), Image(url=FAR))
    sent = request(
        request_id, [1, 2], max_tokens, **{name: fields.pop(name) for name in ("logprobs",) if name in fields}
    )
    return msgspec.structs.replace(sent, images=images, chat=encoded, **fields)


def shown(data: bytes) -> list[dict[str, Any]]:
    """The messages as the server gets them."""
    return chat(f"data:image/png;base64,{base64.b64encode(data).decode()}", FAR)


def answer(data: bytes, max_tokens: int = 20) -> list[int]:
    return expected_output(request("r", tokens_of(shown(data)), max_tokens), 10_000)


async def test_the_server_gets_the_chat_with_its_images(served) -> None:
    server, stage = served
    for name, data in (("r1", b"one"), ("r2", b"two")):
        await stage.submit(with_image(data, name, logprobs=1))
    await stage.until(lambda: stage.end("r1") and stage.end("r2"))
    assert stage.output("r1") == answer(b"one") and stage.output("r2") == answer(b"two")
    body = next(body for body in server.bodies if body.get("messages") == shown(b"one"))
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"], body["tool_choice"]) == (True, 1, 20, "none")
    assert "prompt" not in body
    entries = [entry for entry in stage.entries if entry.request_id == "r1"]
    assert all(entry.logprobs[0].logprob == -1.0 and len(entry.logprobs[0].top_ids) == 1 for entry in entries)
    assert {entry.num_prompt_tokens for entry in entries} == {len(tokens_of(shown(b"one")))}


async def test_a_request_without_a_limit_is_as_long_as_the_server_lets_it(served) -> None:
    _, stage = served
    await stage.submit(with_image(b"one", max_tokens=500, is_open_ended=True))
    await stage.until(lambda: stage.end("r1"))
    assert stage.output("r1") == answer(b"one", CHAT_TOKENS)


async def test_output_to_an_image_is_made_again_and_goes_on(served) -> None:
    server, stage = served
    server.cut_after = 7
    await stage.submit(with_image(b"one"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").error.code == ErrorCode.UNAVAILABLE
    prior, server.cut_after = stage.output("r1"), 0
    stage.entries.clear()
    await stage.submit(with_image(b"one", epoch=64, prior=pack_tokens(prior)))
    await stage.until(lambda: stage.end("r1"))
    assert prior + stage.output("r1", offset=7) == answer(b"one")


async def test_output_to_an_image_that_comes_out_otherwise_ends_with_an_error(served) -> None:
    _, stage = served
    await stage.submit(with_image(b"one", epoch=64, prior=pack_tokens([1, 1])))
    await stage.until(lambda: stage.end("r1"))
    end = stage.end("r1")
    assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert "did not come out alike" in end.error.message and not stage.output("r1", offset=2)


async def test_a_server_whose_chats_name_no_token_ids_is_no_reason_to_try_again(served) -> None:
    server, stage = served
    server.names_ids = False
    await stage.submit(with_image(b"one"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").error.code == ErrorCode.BAD_REQUEST and "ids" in stage.end("r1").error.message


async def test_reasoning_whose_tokens_have_no_ids_is_not_dropped_silently(served) -> None:
    server, stage = served
    server.num_reasoning = 3
    await stage.submit(with_image(b"one"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").error.code == ErrorCode.BAD_REQUEST and "reasoning" in stage.end("r1").error.message
    assert not stage.output("r1")


async def test_a_chat_that_the_server_gives_up_may_go_on_elsewhere(served) -> None:
    server, stage = served
    server.last_reason = "abort"
    await stage.submit(with_image(b"one"))
    await stage.until(lambda: stage.end("r1"))
    assert stage.end("r1").error.code == ErrorCode.UNAVAILABLE and "abort" in stage.end("r1").error.message


async def test_a_native_instance_refuses_images(nats_settings) -> None:
    from tests.worker.engines.engine_stage import instance_of

    async with instance_of("native", nats_settings) as stage:
        assert Capability.IMAGES in stage.info.lacks
        with pytest.raises(ServiceError) as refused:
            await stage.submit(with_image(b"one"))
        assert (refused.value.code, refused.value.info.param) == (ErrorCode.BAD_REQUEST, "messages")
