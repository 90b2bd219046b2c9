"""The scheduler service on a real NATS server: every scenario, a restart of the server, and processes that are killed."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from shared.messages.catalogue import SCHEDULER_ANNOUNCE
from shared.messages.cluster import LeaseHolder
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.scheduler.conftest import NatsStage
from tests.scheduler.peers import eventually
from tests.scheduler.scenarios import SCENARIOS, Scenario, a_server_restart_kills_nobody, assert_whole
from tests.shared.scheduling.samples import make_request


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
async def test_scenario(scenario: Scenario, nats_settings: BusSettings) -> None:
    stage = NatsStage(nats_settings)
    try:
        await scenario(stage)
    finally:
        await stage.close()


async def test_a_server_restart_kills_nobody(fresh_nats: NatsServer) -> None:
    stage = NatsStage(BusSettings(nats_url=fresh_nats.url), fresh_nats)
    try:
        await a_server_restart_kills_nobody(stage)
    finally:
        await stage.close()


async def start_process(url: str, scheduler_id: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.scheduler",
        env={**os.environ, "TIDEWAY_NATS_URL": url, "TIDEWAY_SCHEDULER_ID": scheduler_id, **environment},
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_killed_leader_is_replaced_and_its_view_rebuilt(
    nats_settings: BusSettings,
) -> None:
    stage = NatsStage(nats_settings)
    leader = None
    try:
        gateway = await stage.gateway()
        announced: list[LeaseHolder] = []
        await gateway.bus.subscribe(SCHEDULER_ANNOUNCE, announced.append)
        leader = await start_process(nats_settings.nats_url, "scheduler-process")
        await eventually(lambda: announced, 30)
        stage.schedulers = []
        instance = await stage.instance("a")
        gateway.want(make_request("running", max_tokens=4))
        await eventually(lambda: instance.held)
        gateway.want(make_request("queued", model="later"))
        standby_task = asyncio.create_task(stage.scheduler("scheduler-2"))
        await eventually(lambda: stage.schedulers)
        leader.kill()
        await standby_task
        await eventually(lambda: len(announced) == 2)
        assert [info.term for info in announced] == [1, 2]
        later = await stage.instance("b", "later")
        await eventually(lambda: "queued" in later.held)
        assert len(instance.received) == 1 and gateway.lost == []
        await instance.die(exit_code=1)
        await stage.instance("c", seconds_per_token=0.01)
        await eventually(lambda: gateway.end_of("running"))
        assert_whole(gateway, make_request("running", max_tokens=4))
    finally:
        if leader is not None:
            if leader.returncode is None:
                leader.kill()
            await leader.wait()
        await stage.close()


async def test_the_process_stops_on_request_and_hands_over(nats_settings: BusSettings) -> None:
    stage = NatsStage(nats_settings)
    process = None
    try:
        gateway = await stage.gateway()
        process = await start_process(nats_settings.nats_url, "scheduler-process")
        await eventually(lambda: gateway.announced, 30)
        process.terminate()
        async with asyncio.timeout(10):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        # The lease was released: no waiting for its end.
        started_s = gateway.bus.now()
        await stage.scheduler("scheduler-2")
        assert gateway.bus.now() - started_s < 2.0
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        await stage.close()


async def test_settings_that_cannot_be_used_end_the_process_with_a_sentence(nats_settings: BusSettings) -> None:
    process = await start_process(nats_settings.nats_url, "s", TIDEWAY_DISPATCH_POLICY="fastest")
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "fastest" in errors.decode() and "round_robin" in errors.decode() and "Traceback" not in errors.decode()
