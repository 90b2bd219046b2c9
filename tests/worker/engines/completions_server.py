"""A small server of `/v1/completions` on real HTTP that takes and gives token ids, whose tokens are hashes of their
prefix; those of `/v1/chat/completions` of the messages too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tests.shared.engine.fake_executor import next_token

STEP_S = 0.001
CHAT_TOKENS = 30
"""Tokens of a chat for which the body says no number."""


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt that it makes of a chat's messages."""
    return list(msgspec.json.encode(messages))


class CompletionsServer:
    """`gate`: streams go on while it is set. `cut_after`: tokens after which a stream ends without a word; 0: never.
    `names_ids`: whether tokens are named by their ids; those of a chat's reasoning, its first `num_reasoning`, never are.
    `text`: of each. `hangs`: it answers nothing. `status`: of all its answers, `completions_status`: of those to
    completions, where that is not 200. `model`: the name of its model. `max_model_len`: as it says before its first
    token. `last_reason`: why the most tokens end, where not for their number."""

    def __init__(self, *, names_ids: bool = True, text: str = "") -> None:
        self._text = text
        self.hangs = False
        self.status = self.completions_status = 200
        self.model = "there"
        self.max_model_len: int | None = 600
        self.gate = asyncio.Event()
        self.gate.set()
        self.cut_after = 0
        self.names_ids = names_ids
        self.num_reasoning = 0
        self.last_reason = ""
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.most_open = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            for writer in list(self._writers):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                length = next((int(one[15:]) for one in lines if one.lower().startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                if self.hangs:
                    await asyncio.sleep(3600)
                is_models = lines[0].startswith("GET")
                status = self.status if is_models or self.status != 200 else self.completions_status
                if status != 200:
                    writer.write(b"HTTP/1.1 %d Bad\r\nContent-Length: 0\r\n\r\n" % status)
                    await writer.drain()
                elif is_models:
                    models = msgspec.json.encode({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
                    await writer.drain()
                else:
                    await self._stream(msgspec.json.decode(body), writer)
                    return
        self._writers.discard(writer)
        writer.close()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            is_chat = "messages" in body
            tokens = tokens_of(body["messages"]) if is_chat else list[int](body["prompt"])
            num_prompt, max_tokens = len(tokens), body.get("max_tokens", CHAT_TOKENS)
            for number in range(1, max_tokens + 1):
                await self.gate.wait()
                self.max_model_len = 600
                await asyncio.sleep(STEP_S)
                token = next_token(tokens)
                tokens.append(token)
                is_stop = token in body.get("stop_token_ids", []) and number > body.get("min_tokens", 0)
                reason = "stop" if is_stop else self.last_reason or "length" if number == max_tokens else None
                name = f"token_id:{token}" if self.names_ids else "word"
                told: dict[str, Any] = {"tokens": [name], "token_logprobs": [-1.0], "top_logprobs": [{name: -1.0}]}
                choice: dict[str, Any] = {"index": 0, "text": self._text, "logprobs": told, "finish_reason": reason}
                if is_chat:
                    top = {"token": name, "logprob": -1.0}
                    told = {"content": [{**top, "top_logprobs": [top] * body["top_logprobs"]}]}
                    is_reasoning = number <= self.num_reasoning
                    delta = {"reasoning_content" if is_reasoning else "content": "x"}
                    choice = {"delta": delta, "finish_reason": reason}
                    choice |= {"logprobs": told} if self.names_ids and not is_reasoning else {}
                chunk: dict[str, Any] = {
                    "choices": [choice],
                    "usage": {"prompt_tokens": num_prompt, "completion_tokens": number} if is_chat else None,
                }
                writer.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
                await writer.drain()
                if reason or number == self.cut_after:
                    break
            writer.write(b"data: [DONE]\n\n")
        finally:
            self.num_open -= 1
            self._writers.discard(writer)
            writer.close()


@asynccontextmanager
async def completions_server(**options: Any) -> AsyncIterator[CompletionsServer]:
    server = CompletionsServer(**options)
    await server.start()
    try:
        yield server
    finally:
        server.gate.set()
        await server.stop()
