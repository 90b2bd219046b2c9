"""Streams go on, token by token the same, while their instance is emptied."""

import asyncio
import os
import sys

import httpx
from openai import AsyncOpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TIDEWAY_API_KEY", "none")
ADMIN_KEY = os.environ.get("TIDEWAY_ADMIN_API_KEY", KEY)
NUM_STREAMS, NUM_TOKENS = 6, 300


async def stream(client: AsyncOpenAI, model: str, number: int) -> str:
    answer = await client.completions.create(
        model=model,
        prompt=f"Chapter {number}:",
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in answer if chunk.choices])


async def all_streams(client: AsyncOpenAI, model: str) -> list[str]:
    return await asyncio.gather(*(stream(client, model, number) for number in range(NUM_STREAMS)))


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    model = sys.argv[1] if len(sys.argv) > 1 else (await client.models.list()).data[0].id
    undisturbed = await all_streams(client, model)
    async with httpx.AsyncClient(base_url=URL, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30) as admin:

        async def num_running(instance_id: str) -> int:
            instances = (await admin.get("/admin/instances")).raise_for_status().json()["instances"]
            return sum(
                one["load"]["num_running"] for one in instances if one["instance_id"] == instance_id and one["load"]
            )

        instances = (await admin.get("/admin/instances")).raise_for_status().json()["instances"]
        drained = instances[0]["instance_id"]
        streams = asyncio.create_task(all_streams(client, model))
        while not streams.done() and not await num_running(drained):
            await asyncio.sleep(0.02)
        print(f"{await num_running(drained)} streams run on {drained}, which is drained")
        (await admin.post(f"/admin/instances/{drained}/drain")).raise_for_status()
        try:
            texts = await streams
        finally:
            (await admin.post(f"/admin/instances/{drained}/undrain")).raise_for_status()
    same = sum(text == expected for text, expected in zip(texts, undisturbed, strict=True))
    print(f"{same} of {NUM_STREAMS} streams have the text of those that nobody disturbed")


asyncio.run(main())
