"""Clients of a system to which faults happen: a batch, short requests, and streams that go on at another gateway."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

import httpx
import openai

from bench.batches import ENDED, answers_of, begin, num_answered_once
from tests.e2e.streams import Stream, stream_completion

PROBE_INTERVAL_S = 0.5
PROBE_TOKENS = 5
BATCH_TIMEOUT_S = 300.0
RESUME_WITHIN_S = 60.0
RESUME_S = 0.2
RETRIED = frozenset({"unavailable", "overloaded", "handed_over"})
"""Codes of errors after which a client comes again."""


class Batch:
    """A batch of short completions; its answers are counted at its end."""

    def __init__(self, url: str, models: list[str], num_lines: int) -> None:
        self._url, self.num_lines = url, num_lines
        body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        self._bodies = {
            f"line-{index}": body | {"model": models[index % len(models)], "prompt": f"Chapter {index}"}
            for index in range(num_lines)
        }
        self._id = ""

    def begin(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            self._id = begin(client, self._bodies)

    def end(self) -> tuple[str, int]:
        """Its status, and how many lines were answered with 200 exactly once."""
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            batch = {"status": "unknown"}
            while batch["status"] not in ENDED and time.monotonic() < deadline:
                time.sleep(0.5)
                answer = client.get(f"/v1/batches/{self._id}")
                batch = answer.json() if answer.status_code == 200 else batch
            if not batch.get("output_file_id"):
                return f"{batch['status']} {batch.get('errors')}", 0
            output = client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        return batch["status"], num_answered_once(answers_of(output))


async def probe(url: str, models: list[str], over: asyncio.Event) -> Counter[tuple[int, str]]:
    """Short requests, one after another begins each half second until `over`, and waits for its answer."""
    answers: Counter[tuple[int, str]] = Counter()

    async def ask(client: httpx.AsyncClient, model: str) -> None:
        body = {"model": model, "prompt": "Hi", "max_tokens": PROBE_TOKENS, "ignore_eos": True}
        try:
            answer = await client.post(f"{url}/v1/completions", json=body)
            code = "" if answer.status_code == 200 else str(answer.json()["error"]["code"])
            answers[answer.status_code, code] += 1
        except httpx.HTTPError as error:
            answers[0, type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=90.0) as client, asyncio.TaskGroup() as group:
        number = 0
        while not over.is_set():
            group.create_task(ask(client, models[number % len(models)]))
            number += 1
            await asyncio.sleep(PROBE_INTERVAL_S)
    return answers


async def expected_texts(url: str, models: list[str], num_streams: int, num_tokens: int) -> set[str]:
    """Texts of the streams of `Load` in quiet."""
    async with httpx.AsyncClient(timeout=120.0) as client:
        streams = await asyncio.gather(
            *(
                stream_completion(client, url, models[n % len(models)], [1, 5 + n, 7, 9], num_tokens, lambda _: None)
                for n in range(num_streams)
            )
        )
    return {stream.text for stream in streams}


async def stream_with_openai(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    prompt: list[int],
    max_tokens: int,
    on_tokens: Callable[[int], None],
    *,
    headers: dict[str, str],
    stream: Stream,
) -> Stream:
    """The same as `stream_completion`, read by OpenAI's own client, with its own tries again."""
    official = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0)
    try:
        chunks = await official.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
            extra_body={"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        async for chunk in chunks:
            stream.event_id = getattr(chunk, "event_id", stream.event_id)
            if not chunk.choices:
                stream.usage = chunk.usage and chunk.usage.to_dict()
                continue
            stream.text += chunk.choices[0].text
            if chunk.choices[0].finish_reason:
                stream.finish_reasons.append(chunk.choices[0].finish_reason)
            num_new = (chunk.usage.completion_tokens if chunk.usage else 0) - stream.num_tokens
            stream.num_tokens += num_new
            on_tokens(num_new)
        stream.done = bool(stream.finish_reasons)
    except openai.APIError as error:
        stream.error = {"code": error.code or "unavailable", "message": str(error)}
    finally:
        await official.close()
    return stream


READERS = {"httpx": stream_completion, "openai": stream_with_openai}


class Resuming:
    """Reads streams that have a key, each on at the next gateway where its connection ends."""

    def __init__(self, urls: list[str], reader: str = "httpx") -> None:
        self._urls = urls
        self._read = READERS[reader]
        self._num_read = 0

    async def read(
        self,
        client: httpx.AsyncClient,
        _url: str,
        model: str,
        prompt: list[int],
        max_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> Stream:
        self._num_read += 1
        stream, key, begun_s = Stream(prompt), str(uuid4()), time.monotonic()
        for number in itertools.count(self._num_read):
            url, stream.error = self._urls[number % len(self._urls)], None
            headers = {"Idempotency-Key": key, "Last-Event-ID": stream.event_id}
            try:
                await self._read(client, url, model, prompt, max_tokens, on_tokens, headers=headers, stream=stream)
            except httpx.HTTPError as error:
                stream.error = {"code": "unavailable", "message": repr(error)}
            is_over = stream.done if stream.error is None else stream.error["code"] not in RETRIED
            if is_over or time.monotonic() - begun_s > RESUME_WITHIN_S:
                break
            await asyncio.sleep(RESUME_S)
        return stream
