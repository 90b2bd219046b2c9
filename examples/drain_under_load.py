"""Streams go on, token by token the same, while their instance is emptied."""

import argparse
import asyncio
import os
import sys
import time
from typing import Any

import httpx
from openai import APIConnectionError, AsyncOpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TIDEWAY_API_KEY", "none")
ADMIN_KEY = os.environ.get("TIDEWAY_ADMIN_API_KEY", KEY)
NUM_STREAMS, NUM_TOKENS, PROMPT_TOKENS = 6, 1500, 64
"""Streams last seconds, so that they can move; shorter ones where the model's context, less that of a prompt, is."""
ALL_RUN_WITHIN_S, BACK_WITHIN_S = 5.0, 120.0


def say(line: str) -> None:
    print(line, flush=True)


async def stream(client: AsyncOpenAI, model: str, number: int, num_tokens: int) -> tuple[str, str]:
    """The answer's id and text."""
    answer = await client.completions.create(
        model=model,
        prompt=f"Chapter {number}:",
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in answer if chunk.choices]
    return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)


async def all_streams(client: AsyncOpenAI, model: str, num_tokens: int) -> list[tuple[str, str]]:
    return await asyncio.gather(*(stream(client, model, number, num_tokens) for number in range(NUM_STREAMS)))


async def instances(admin: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    listed = (await admin.get("/admin/instances")).raise_for_status().json()["instances"]
    return {one["instance_id"]: one for one in listed}


async def busiest(admin: httpx.AsyncClient, streams: asyncio.Task[Any]) -> tuple[int, str]:
    """How many requests run on the instance that has most of them, once all streams run."""
    deadline_s = time.monotonic() + ALL_RUN_WITHIN_S
    while True:
        running = [(one["load"]["num_running"], name) for name, one in (await instances(admin)).items() if one["load"]]
        all_run = sum(num for num, _ in running) >= NUM_STREAMS
        if all_run or streams.done() or time.monotonic() > deadline_s:
            return max(running, default=(0, ""))
        await asyncio.sleep(0.02)


async def num_moves(admin: httpx.AsyncClient, answer_id: str) -> int:
    timeline = (await admin.get(f"/admin/requests/{answer_id}")).raise_for_status().json()
    return sum(sequence["num_moves"] for sequence in timeline["requests"])


async def wait_back(admin: httpx.AsyncClient, instance_id: str, models: set[str]) -> None:
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline_s:
        one = (await instances(admin)).get(instance_id)
        if one and one["state"] == "ready" and models <= ready_models(one):
            return
        await asyncio.sleep(0.1)
    sys.exit(f"{instance_id} is not back within {BACK_WITHIN_S:.0f} s")


def ready_models(instance: dict[str, Any]) -> set[str]:
    return {model["name"] for model in instance["models"] if model["state"] == "ready"}


async def main(arguments: argparse.Namespace) -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    cards = {card.id: card for card in (await client.models.list()).data}
    model = arguments.model or next(iter(cards), "")
    if model not in cards:
        sys.exit(f"there is no model {model!r}; models: {', '.join(cards) or 'none'}")
    num_tokens = min(arguments.tokens, (cards[model].max_model_len or arguments.tokens) - PROMPT_TOKENS)
    say(f"{NUM_STREAMS} streams of {num_tokens} tokens of {model} run undisturbed, to compare with")
    begun_s = time.monotonic()
    undisturbed = await all_streams(client, model, num_tokens)
    say(f"that took {time.monotonic() - begun_s:.0f} s; now they run again, and the busiest instance is drained")
    async with httpx.AsyncClient(base_url=URL, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30) as admin:
        streams = asyncio.create_task(all_streams(client, model, num_tokens))
        num_running, drained = await busiest(admin, streams)
        if streams.done() or not num_running:
            await streams
            sys.exit(f"no stream ran on an instance that could be drained: all ended, or none began, too soon ({URL})")
        say(f"{num_running} streams run on {drained}, which is drained")
        models = ready_models((await instances(admin))[drained])
        (await admin.post(f"/admin/instances/{drained}/drain")).raise_for_status()
        try:
            answers = await streams
        finally:
            (await admin.post(f"/admin/instances/{drained}/undrain")).raise_for_status()
        num_moved = sum([await num_moves(admin, answer_id) > 0 for answer_id, _ in answers])
        say(f"{num_moved} of {NUM_STREAMS} streams moved to another instance")
        same = sum(text == expected for (_, text), (_, expected) in zip(answers, undisturbed, strict=True))
        say(f"{same} of {NUM_STREAMS} streams have the text of those that nobody disturbed")
        say(f"waiting until {drained} is back")
        await wait_back(admin, drained, models)
    if not num_moved:
        sys.exit("no stream moved: those on the instance ended before a move was over, or no other instance had room")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="model of the streams; default: the first that is served")
parser.add_argument("tokens", nargs="?", type=int, default=NUM_TOKENS, help=f"tokens of each; default {NUM_TOKENS}")
parsed = parser.parse_args()
try:
    asyncio.run(main(parsed))
except (httpx.TransportError, APIConnectionError) as error:
    sys.exit(f"Tideway at {URL} does not answer ({error}); TIDEWAY_URL says where it is")
except httpx.HTTPStatusError as error:
    sys.exit(f"{error.request.url.path}: {error.response.status_code}: {error.response.text}")
