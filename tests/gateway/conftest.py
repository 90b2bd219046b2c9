"""The real gateway on a real socket and a real NATS server, with a scripted peer for everything else on the bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from services.gateway.service import GatewayService
from shared.bus.nats_bus import NatsBus
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, GenerationRequest
from shared.runtime.settings import BusSettings, GatewaySettings
from shared.runtime.telemetry import start_telemetry
from tests.gateway.checkpoints import byte_level_tokenizer, sentencepiece_tokenizer, write_checkpoint
from tests.gateway.peer import ScriptedPeer, until

MODEL = "tide"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "byte-level", byte_level_tokenizer())


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SentencePiece-like, without a chat template."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "plain", sentencepiece_tokenizer(), chat_template=None)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


class Reader:
    """A client that reads a stream in the background. `chunks`: what came so far; `is_complete`: [DONE] came."""

    def __init__(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str] | None):
        self.chunks: list[dict[str, Any]] = []
        self.is_complete = False
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.failed_body = b""
        self._task = asyncio.create_task(self._read(client, path, {"model": MODEL, "stream": True, **body}, headers))

    async def _read(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: Any) -> None:
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            self.status, self.headers = answer.status_code, answer.headers
            if self.status != 200:
                self.failed_body = await answer.aread()
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self.is_complete = True
                elif line.startswith("data: "):
                    self.chunks.append(json.loads(line.removeprefix("data: ")))

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)

    async def end(self) -> None:
        async with asyncio.timeout(30):
            await self._task

    async def hang_up(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Stack:
    """A gateway, the peer, and clients for the gateway."""

    def __init__(self, gateway: GatewayService, peer: ScriptedPeer, tokenizer: Tokenizer, client: httpx.AsyncClient):
        self.gateway = gateway
        self.peer = peer
        self.tokenizer = tokenizer
        self.client = client
        self.eos = tokenizer.token_to_id("</s>")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def openai(self, api_key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def say(self, text: str, finish: FinishReason = FinishReason.STOP) -> list[int]:
        """From now on every request is answered with this text (and, with STOP, an end-of-sequence token)."""
        tokens = self.ids(text) + ([self.eos] if finish is FinishReason.STOP else [])
        self.peer.script, self.peer.finish = lambda request: tokens, finish
        return tokens

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": MODEL, **body})

    def read(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Reader:
        if path == "/v1/completions":
            body = {"prompt": "x", "max_tokens": 100, **body}
        return Reader(self.client, path, body, headers)

    async def until_metrics(self, *samples: str) -> None:
        async with asyncio.timeout(20):
            while True:
                text = (await self.client.get("/metrics")).text
                if all(sample in text for sample in samples):
                    return
                await asyncio.sleep(0.02)

    async def next_request(self, number: int = 0) -> GenerationRequest:
        await until(lambda: len(self.peer.submitted) > number, "a submitted request")
        return self.peer.submitted[number]


@asynccontextmanager
async def running_gateway(bus_settings: BusSettings, **overrides: Any) -> AsyncIterator[GatewayService]:
    settings = GatewaySettings(nats_url=bus_settings.nats_url, port=0, **overrides)
    telemetry = start_telemetry("gateway", "test", settings)
    bus = await NatsBus.connect(settings, service="gateway", service_id="test", registry=telemetry.registry)
    gateway = GatewayService(bus, settings, telemetry)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
        await bus.close()
        telemetry.close()


@asynccontextmanager
async def running_stack(
    bus_settings: BusSettings,
    specs: list[ModelSpec],
    *,
    scheduler: bool = True,
    instance: bool = True,
    peer_type: type[ScriptedPeer] = ScriptedPeer,
    **overrides: Any,
) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as resources:
        peer_bus = await NatsBus.connect(bus_settings, service="peer", service_id="peer")
        resources.push_async_callback(peer_bus.close)
        peer = peer_type(peer_bus)
        await peer.start(*specs, scheduler=scheduler)
        resources.push_async_callback(peer.stop)
        if instance:
            await peer.add_instance("a", *(spec.name for spec in specs))
        gateway = await resources.enter_async_context(running_gateway(bus_settings, **overrides))
        url = f"http://127.0.0.1:{gateway.port}"
        client = await resources.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        yield Stack(gateway, peer, Tokenizer.from_file(specs[0].source + "/tokenizer.json"), client)


@pytest.fixture
async def stack(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        stack.say("Hello world")
        yield stack
