"""Two models with objectives of their own come while the system runs, answer side by side, and go."""

import asyncio
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
from openai import APIConnectionError, AsyncOpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TIDEWAY_API_KEY", "none")
FILE = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".toml"))
READY_WITHIN_S = 120.0


async def add(admin: httpx.AsyncClient, model: dict[str, Any]) -> None:
    answer = await admin.post("/admin/models", json=model)
    if answer.is_error:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.text
        sys.exit(f"{model['name']}: {answer.status_code}: {message}")


async def wait_ready(admin: httpx.AsyncClient, names: set[str]) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        models = (await admin.get("/admin/models")).raise_for_status().json()["models"]
        if names <= {model["name"] for model in models if "ready" in model["instances"].values()}:
            return
        await asyncio.sleep(0.1)
    sys.exit(f"not ready within {READY_WITHIN_S:.0f} s: {models}")


async def ask(client: AsyncOpenAI, model: str) -> None:
    began_s, first_s, num_chunks = time.monotonic(), 0.0, 0
    async for chunk in await client.completions.create(model=model, prompt="Once", max_tokens=20, stream=True):
        if chunk.choices:
            first_s = first_s or time.monotonic() - began_s
            num_chunks += 1
    print(
        f"{model}: first token after {first_s * 1e3:.0f} ms, {num_chunks} chunks in {time.monotonic() - began_s:.2f} s"
    )


async def main(models: list[dict[str, Any]]) -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    async with httpx.AsyncClient(base_url=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as admin:
        try:
            for model in models:
                model["source"] = str((FILE.parent / model["source"]).resolve())
                await add(admin, model)
            await wait_ready(admin, {model["name"] for model in models})
            await asyncio.gather(*(ask(client, model["name"]) for model in models for _ in range(3)))
        finally:
            for model in models:
                await admin.delete(f"/admin/models/{model['name']}")


try:
    asyncio.run(main(tomllib.loads(FILE.read_text())["model"]))
except (httpx.TransportError, APIConnectionError) as error:
    sys.exit(f"Tideway at {URL} does not answer ({error}); TIDEWAY_URL says where it is")
