"""NATS' disk is full for a while: who is told what, and that all goes on when there is space again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.gateway.batch import service as batch_service
from shared.bus import nats_streams
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer, free_port
from tests.gateway.conftest import MODEL, running_stack
from tests.small_disk import SmallDisk, SmallDiskError
from tideway import liveness

LINE = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
).encode()


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    try:
        disk = SmallDisk(16 << 20)
    except SmallDiskError as error:
        pytest.skip(str(error))
    yield disk
    disk.close()


async def test_a_full_disk_is_told_and_all_goes_on_when_it_is_freed(
    disk: SmallDisk, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_streams, "CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(batch_service, "STORAGE_CHECK_INTERVAL_S", 0.2)
    monkeypatch.setattr(liveness, "CHECK_INTERVAL_S", 0.2)
    monitor_port, told, restarts = free_port(), list[str](), list[str]()
    nats = NatsServer(f'http: "127.0.0.1:{monitor_port}"', max_storage_bytes=8 << 30, disk=disk)

    def restart(reason: str) -> None:
        restarts.append(reason)
        nats.restart()

    try:
        async with running_stack(BusSettings(nats_url=nats.url), [ModelSpec(MODEL, str(checkpoint))]) as stack:
            client = stack.client
            async with httpx.AsyncClient() as http:
                keeping = asyncio.create_task(
                    liveness.restart_when_there_is_space(
                        http, monitor_port, disk.seen_path, told.append, restart, min_free_bytes=4 << 20
                    )
                )
                kept = await upload(client)
                assert kept.status_code == 200, kept.text
                disk.fill()
                [problem] = await until_problems(client, 1)
                assert "NATS cannot store on its disk" in problem
                refused = await upload(client)
                assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
                assert int(refused.headers["retry-after"]) > 0
                await stack.until_metrics("tideway_gateway_storage_writable 0.0")
                async with asyncio.timeout(20):
                    while not told:
                        await asyncio.sleep(0.05)
                assert "no space left on device" in told[0] and not restarts
                disk.free()
                await until_problems(client, 0)
                assert (len(told), len(restarts)) == (1, 1)
                keeping.cancel()
            assert (await client.get(f"/v1/files/{kept.json()['id']}/content")).content == LINE
            assert (await upload(client)).status_code == 200
            await stack.until_metrics("tideway_gateway_storage_writable 1.0")
    finally:
        nats.close()


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/files", files={"file": ("in.jsonl", LINE)}, data={"purpose": "batch"}, timeout=20)


async def until_problems(client: httpx.AsyncClient, number: int) -> list[str]:
    """Requests are served all the while."""
    async with asyncio.timeout(30):
        while True:
            answer = await client.get("/ready")
            if answer.status_code == 200 and len(problems := answer.json()["problems"]) == number:
                return list(problems)
            await asyncio.sleep(0.05)
