"""Migrations to another process over UCX."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.worker.kv_transport import UcxNetwork
from shared.messages.catalogue import GATEWAY_FRAMES
from shared.messages.requests import TokenFrame
from tests.shared.engine.fake_executor import request
from tests.worker.migration.conftest import Group
from tests.worker.migration.parties import Gateway, make_party

pytest.importorskip("ucxx")

Start = Callable[..., Awaitable[tuple[Group, asyncio.subprocess.Process]]]


@pytest.fixture
async def start(nats_settings) -> AsyncIterator[Start]:
    made = []

    async def begin(fault_points: str = "") -> tuple[Group, asyncio.subprocess.Process]:
        url = nats_settings.nats_url
        arguments = [sys.executable, "-m", "tests.worker.migration.ucx_peer", url, fault_points]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)
        made.append(process)
        gateway, registry = Gateway(), {}
        source = await make_party("a", url, gateway, registry, UcxNetwork("127.0.0.1"), step_s=0.005)
        made.append(source)

        def on_frame(frame: TokenFrame) -> None:
            for entry in frame.entries:
                gateway.on_entry(frame.sender, entry)

        await source.bus.subscribe(GATEWAY_FRAMES.at(gateway_id="gateway"), on_frame)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            address = json.loads(await process.stdout.readline())["address"]
        registry["b"] = source.info(instance_id="b", incarnation="b.1", kv_address=address)
        return Group(gateway, [source, source]), process

    yield begin
    for one in made:
        if isinstance(one, asyncio.subprocess.Process):
            if one.returncode is None:
                one.kill()
            await one.wait()
        else:
            await one.stop()


async def test_a_request_moves_to_another_process(start: Start) -> None:
    group, process = await start()
    sent = [request(f"r{i}", list(range(i, i + 80)), 300) for i in range(3)]
    for one in sent:
        group.source.submit(one)
    await group.until(lambda: all(group.progress(one) > 5 for one in sent))
    group.source.rebalance("b", lease_s=20.0)
    await group.ended(*sent, owner="b")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    async with asyncio.timeout(10):
        assert json.loads(await process.stdout.readline()) == {"used": 0, "held": 0, "adopted": 3}


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("destination.reserved", marks=pytest.mark.long),
        pytest.param("destination.copied", marks=pytest.mark.long),
        "destination.commit",
    ],
)
async def test_a_destination_killed_at_a_point_gives_the_request_back(start: Start, point: str) -> None:
    group, process = await start(f"{point}:exit")
    sent = request("r1", list(range(80)), 300)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b", lease_s=0.2)
    async with asyncio.timeout(20):
        assert await process.wait() == 1
    del group.source.registry["b"]
    group.source.service.on_instance("b", None)
    await group.ended(sent, owner="a")
    assert not any(outcome.is_migrated for outcome in group.source.outcomes)
