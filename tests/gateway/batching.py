"""Batches as tests make, follow and read them, with the openai package."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import openai
import openai.types

from shared.messages.batches import BatchLineResult, BatchRecord
from shared.messages.catalogue import BATCH_RESULTS
from shared.messages.requests import unpack_tokens
from tests.gateway.conftest import MODEL, Stack

ENDPOINT = "/v1/completions"


def line(number: int, url: str = ENDPOINT, method: str = "POST", **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": f"line {number}", "max_tokens": 20, **body}
    return {"custom_id": f"id-{number}", "method": method, "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


async def start(client: openai.AsyncOpenAI, lines: list[Any], window: str = "24h", endpoint: str = ENDPOINT, **fields):
    file = await client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window=window,
        **fields,
    )


async def reach(
    client: openai.AsyncOpenAI, batch_id: str, condition: Callable[[Any], object], timeout_s: float = 60.0
) -> openai.types.Batch:
    deadline = time.monotonic() + timeout_s
    while True:
        batch = await client.batches.retrieve(batch_id)
        if condition(batch):
            return batch
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {batch}"
        await asyncio.sleep(0.02)


def ended(batch: openai.types.Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(each) for each in text.splitlines()]


def echo(stack: Stack) -> None:
    """Every request is answered with its own prompt."""
    stack.peer.script = lambda request: [*unpack_tokens(request.prompt), stack.eos]


async def leftovers(stack: Stack) -> list[str]:
    return sorted(await (await stack.peer.bus.key_value(BATCH_RESULTS)).entries())


async def begun_elsewhere(
    stack: Stack, status: str, num_results: int, answer: bytes | None = None, **times: float
) -> str:
    """A batch of three lines as a gateway left it that died in this status. `answer`: of each line that has a result."""
    client = stack.openai()
    file = await client.files.create(file=("x", jsonl([line(i) for i in range(3)])), purpose="batch")
    batches = stack.gateway.context.batches
    batch_id = "batch_" + status.replace("_", "")
    for index in range(num_results):
        own = json.dumps({"custom_id": f"id-{index}"}).encode()
        stored = BatchLineResult(True, own if answer is None else answer, 5, 0, 2)
        await batches.results.create(f"{batch_id}.{index}", stored)
    now_s = time.time()
    record = BatchRecord(
        batch_id=batch_id,
        tenant="",
        endpoint=ENDPOINT,
        input_file_id=file.id,
        completion_window="24h",
        deadline_s=now_s + 600,
        status=status,
        created_s=now_s,
        status_s={"in_progress": 1, **times},
        num_total=3,
        model=MODEL,
    )
    await batches.create(record)
    return batch_id
