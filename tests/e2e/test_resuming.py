"""kill -9 of a gateway under streams of OpenAI's client: at another one each gets exactly the rest."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.stack import Stack
from tests.e2e.streams import run_streams
from tests.stalls import whatever_the_machine_does

NUM_STREAMS = 16
MAX_TOKENS = 100
STEP_S = 0.012
NUM_TOKENS_BEFORE = 20


@pytest.fixture(scope="module")
def system(checkpoints: dict[str, str]) -> Iterator[Stack]:
    with Stack(checkpoints, step_s=STEP_S) as system:
        system.wait_ready()
        yield system


class Reader:
    """One completion, over as many connections as it takes."""

    def __init__(self, number: int, model: str, prompt: list[int]) -> None:
        self.text = ""
        self.num_tokens = 0
        self.event_id = ""
        self.finish_reasons: list[str] = []
        self.silent_s = 0.0
        self._heard_at = time.monotonic()
        self._key = f"resumed-{number}"
        self._model = model
        self._prompt = prompt

    async def read(self, client: openai.AsyncOpenAI) -> None:
        """The same call each time: the key says which answer it is of, the header what this client has of it."""
        stream = await client.completions.create(
            model=self._model,
            prompt=self._prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"Idempotency-Key": self._key, "Last-Event-ID": self.event_id},
        )
        async for chunk in stream:
            now = time.monotonic()
            self.silent_s, self._heard_at = max(self.silent_s, now - self._heard_at), now
            choice = chunk.choices[0]
            self.text += choice.text
            self.event_id = chunk.event_id  # type: ignore[attr-defined]
            self.num_tokens = int(self.event_id.rstrip("e"))
            if choice.finish_reason:
                self.finish_reasons.append(choice.finish_reason)


def test_a_killed_gateways_streams_are_read_to_their_ends_elsewhere(system: Stack) -> None:
    models = ["llama", "opt"]
    undisturbed = asyncio.run(run_streams(system.url, models, NUM_STREAMS, MAX_TOKENS))
    assert all(stream.ended_well for stream in undisturbed)
    url = system.add_gateway("gateway-1")
    system.wait_until(lambda: is_ready(url), "the second gateway")
    named = zip(itertools.cycle(models), undisturbed, strict=False)
    readers = [Reader(number, model, stream.prompt) for number, (model, stream) in enumerate(named)]

    async def killed_under_streams() -> None:
        async with client_of(url) as dying, client_of(system.url) as living:
            begun = asyncio.gather(*(reader.read(dying) for reader in readers), return_exceptions=True)
            while min(reader.num_tokens for reader in readers) < NUM_TOKENS_BEFORE:
                await asyncio.sleep(0.01)
            system.kill("gateway-1")
            ends = await begun
            assert all(isinstance(end, httpx.TransportError | openai.APIError) for end in ends), ends
            assert not any(reader.finish_reasons for reader in readers)
            await asyncio.gather(*(reader.read(living) for reader in readers))

    asyncio.run(asyncio.wait_for(killed_under_streams(), 90))
    assert [reader.finish_reasons for reader in readers] == [["length"]] * NUM_STREAMS
    for reader, stream in zip(readers, undisturbed, strict=True):
        with whatever_the_machine_does():
            assert reader.text == stream.text
        assert reader.event_id == f"{MAX_TOKENS}e"
    print(f"longest silence of {NUM_STREAMS} streams: {max(reader.silent_s for reader in readers):.2f} s")


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
