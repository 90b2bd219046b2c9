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
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, where they were asked for."""
    num_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: dict | None = None
    usage: dict | None = None
    event_id: str = ""
    """Id of the last event, where the stream may be resumed."""
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
    on_tokens: Callable[[int], None],
    *,
    headers: dict[str, str] | None = None,
    stream: Stream | None = None,
    **fields,
) -> Stream:
    """`stream`: what was read of it before, to which the rest is added."""
    stream = stream or Stream(prompt)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
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
            stream.event_id = chunk.get("event_id", stream.event_id)
            if "error" in chunk:
                stream.error = chunk["error"]
            elif chunk["choices"]:
                choice = chunk["choices"][0]
                stream.text += choice.get("text") or ""
                if choice.get("logprobs"):
                    stream.logprobs += choice["logprobs"]["token_logprobs"]
                if choice.get("finish_reason"):
                    stream.finish_reasons.append(choice["finish_reason"])
                num_new = chunk["usage"]["completion_tokens"] - stream.num_tokens
                stream.num_tokens += num_new
                on_tokens(num_new)
            else:
                stream.usage = chunk["usage"]
    return stream


async def run_streams(
    url: str,
    models: list[str],
    num_streams: int,
    max_tokens: int,
    *,
    after_tokens: int = 0,
    disturb: Callable[[], None] | None = None,
    all_begun: bool = False,
    timeout_s: float = 120.0,
    **fields,
) -> list[Stream]:
    """`num_streams` completions at once with fixed prompts, over the models in turn. When they have received
    `after_tokens` tokens in sum (a chunk holds many on a busy machine), and with `all_begun` each one at least, `disturb` is
    called once, in a thread."""
    num_tokens = num_begun = num_ended = 0
    disturbing: list[Future[None]] = []
    pool = ThreadPoolExecutor(1)

    def on_tokens(num_new: int) -> None:
        # Not a task: this loop may have so much to read that a task would run only when all streams have ended.
        nonlocal num_tokens
        num_tokens += num_new
        is_due = num_tokens >= after_tokens and (num_begun == num_streams or not all_begun)
        if is_due and disturb is not None and not disturbing:
            assert num_ended < num_streams, "the disturbance must come while streams run"
            disturbing.append(pool.submit(disturb))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as client, asyncio.timeout(timeout_s):

        async def one(*arguments) -> Stream:
            nonlocal num_ended
            has_begun = False

            def on_own_tokens(num_new: int) -> None:
                nonlocal has_begun, num_begun
                num_begun += not has_begun
                has_begun = True
                on_tokens(num_new)

            stream = await stream_completion(*arguments, on_own_tokens, **fields)
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
                )
                for index in range(num_streams)
            )
        )
        for future in disturbing:
            await asyncio.wrap_future(future)
        assert disturb is None or disturbing, "the streams ended before they were disturbed"
        return list(streams)
