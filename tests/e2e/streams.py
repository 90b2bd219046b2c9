"""Clients of the whole system: many streams at once, each collected to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx


@dataclass
class Stream:
    """What a client saw of one streamed completion."""

    prompt: list[int]
    text: str = ""
    num_chunks: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: dict | None = None
    usage: dict | None = None
    done: bool = False

    @property
    def ended_well(self) -> bool:
        return self.done and self.error is None and len(self.finish_reasons) == 1


async def stream_completion(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    prompt: list[int],
    max_tokens: int,
    on_chunk: Callable[[], None],
    **fields,
) -> Stream:
    stream = Stream(prompt)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]
            return stream
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                stream.done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                stream.error = chunk["error"]
            elif chunk["choices"]:
                choice = chunk["choices"][0]
                stream.text += choice.get("text") or ""
                stream.num_chunks += 1
                if choice.get("finish_reason"):
                    stream.finish_reasons.append(choice["finish_reason"])
                on_chunk()
            else:
                stream.usage = chunk["usage"]
    return stream


async def run_streams(
    url: str,
    models: list[str],
    num_streams: int,
    max_tokens: int,
    *,
    after_chunks: int = 0,
    disturb: Callable[[], None] | None = None,
    timeout_s: float = 120.0,
    **fields,
) -> list[Stream]:
    """`num_streams` completions at once with fixed prompts, over the models in turn. When they have received
    `after_chunks` chunks in sum, `disturb` is called once, in a thread."""
    num_chunks = num_ended = 0
    disturbing: list[Future[None]] = []
    pool = ThreadPoolExecutor(1)

    def on_chunk() -> None:
        # Not a task: this loop may have so much to read that a task would run only when all streams have ended.
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == after_chunks and disturb is not None:
            assert num_ended < num_streams, "the disturbance must come while streams run"
            disturbing.append(pool.submit(disturb))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as client, asyncio.timeout(timeout_s):

        async def one(*arguments) -> Stream:
            nonlocal num_ended
            stream = await stream_completion(*arguments, **fields)
            num_ended += 1
            return stream

        streams = await asyncio.gather(
            *(
                one(
                    client,
                    url,
                    models[index % len(models)],
                    [3 + (index * 31 + position * 7) % 200 for position in range(5 + index % 40)],
                    max_tokens,
                    on_chunk,
                )
                for index in range(num_streams)
            )
        )
        for future in disturbing:
            await asyncio.wrap_future(future)
        assert disturb is None or disturbing, "the streams ended before they were disturbed"
        return list(streams)
