"""A small server that streams as OpenAI's API does, over real HTTP. What it does depends on the model's name.

ok        one token each `TOKEN_INTERVAL_S`, usage at the end if asked for; a prompt of w words has 5 + 2 * w tokens
plain     the same without usage
refuses   429; `errors`: an error in the stream; `cut`: ends without a finish reason; `garbled`: no JSON; `hangs`: no answer
stuck     one token, then nothing
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_INTERVAL_S = 0.003
FIRST_TOKEN_S = 0.01
WRONG_KEY = "wrong"


class BenchServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_open = 0
        self.max_open = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") == f"Bearer {WRONG_KEY}":
            return JSONResponse({"error": {"message": "Incorrect API key.", "code": "invalid_api_key"}}, 401)
        return JSONResponse({"data": [{"id": "ok"}, {"id": "plain"}]})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE tideway_sequences_running gauge\n"
            f'tideway_sequences_running{{class="online",instance="a"}} {self.num_open}\n'
            f'tideway_sequences_running{{class="online",instance="b"}} 1\n'
            "# TYPE tideway_tokens_total counter\n"
            f"tideway_tokens_total {time.monotonic()}\n"
            "# TYPE python_gc gauge\npython_gc 1\n"
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        model = body["model"]
        if model == "refuses" and body.get("max_tokens") != 1:
            return JSONResponse({"error": {"message": "too many requests", "code": "overloaded"}}, 429)
        if model == "hangs" and body.get("max_tokens") != 1:
            await request.receive()  # Returns when the client goes away.
            return Response()
        is_chat = "messages" in body
        return StreamingResponse(self._stream(body, is_chat), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[bytes]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            async for event in self._events(body, is_chat):
                yield b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        finally:
            self.num_open -= 1

    async def _events(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[dict[str, Any] | bytes]:
        num = body["max_completion_tokens" if is_chat else "max_tokens"]
        model = body["model"] if num != 1 else "ok"
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if is_chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        await asyncio.sleep(FIRST_TOKEN_S)
        for index in range(num):
            if index == 1 and model in ("errors", "cut", "garbled", "stuck"):
                if model == "errors":
                    yield {"error": {"message": "the engine died", "code": "engine_dead"}}
                elif model == "garbled":
                    yield b"{not json"
                elif model == "stuck":
                    await asyncio.sleep(3600)
                return
            yield {"choices": [{"delta": {"content": "a "}} if is_chat else {"text": "a "}]}
            await asyncio.sleep(TOKEN_INTERVAL_S)
        yield {
            "choices": [
                {"delta": {}, "finish_reason": "length"} if is_chat else {"text": "", "finish_reason": "length"}
            ]
        }
        if body["stream_options"]["include_usage"] and body["model"] != "plain":
            num_prompt = len(prompt) if isinstance(prompt, list) else 5 + 2 * len(prompt.split())
            details = {"cached_tokens": 4}
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num, "prompt_tokens_details": details}
            yield {"choices": [], "usage": usage}
        yield b"[DONE]"


@contextmanager
def serving() -> Iterator[BenchServer]:
    """The server on a thread and a free port, until the block ends."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = BenchServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(server.app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not uvicorn_server.started:
        assert thread.is_alive() and time.monotonic() < deadline_s
        time.sleep(0.005)
    yield server
    uvicorn_server.should_exit = True
    thread.join(10)
    listener.close()
