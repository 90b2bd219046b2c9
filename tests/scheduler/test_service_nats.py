"""The scheduler service on a real NATS server: every scenario, a restart of the server, and processes that are killed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from shared.messages.catalogue import LOAD_REPORTS, SCHEDULER_ANNOUNCE, SCHEDULER_SUBMIT
from shared.messages.cluster import LeaseHolder
from shared.recording import Applied, records
from shared.scheduling.calls import Call, OnReport, Submit
from shared.scheduling.recording import CALLS, replay
from shared.settings import BusSettings
from tests.conftest import NatsServer
from tests.scheduler.conftest import NatsStage
from tests.scheduler.peers import eventually
from tests.scheduler.scenarios import SCENARIOS, Scenario, a_server_restart_kills_nobody, assert_whole
from tests.shared.scheduling.samples import make_report, make_request


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


def replayed_calls(folder: Path) -> list[Call[object]]:
    """Of the only recording in the folder, after it was replayed."""
    (recording,) = [path.read_bytes() for path in folder.iterdir()]
    replay(recording)
    return [CALLS.decode(record.call) for record in records(recording) if isinstance(record, Applied)]


async def test_a_dispatch_overtakes_the_reports_that_came_before_it_and_none_is_lost(
    nats_settings: BusSettings, tmp_path: Path
) -> None:
    """One connection sends the reports and then the request, so they arrive in that order; and what was recorded is what
    was decided."""
    num_others, num_each = 100, 30
    stage = NatsStage(nats_settings)
    try:
        scheduler = await stage.scheduler(record_file=str(tmp_path / "term"))
        instance, gateway = await stage.instance("a"), await stage.gateway()
        await eventually(lambda: stage.metric("reports_total"))
        for sequence in range(1, num_each + 1):
            for number in range(num_others):
                gateway.bus.publish(LOAD_REPORTS, make_report(f"other-{number}", sequence))
        await gateway.bus.request(SCHEDULER_SUBMIT, make_request("r"), timeout_s=10.0)
        await eventually(lambda: "r" in instance.held)
        await eventually(lambda: stage.metric("reports_total") >= num_others * num_each)
        assert stage.metric("report_wait_seconds_count") > 0
        await scheduler.stop()
    finally:
        await stage.close()
    calls = replayed_calls(tmp_path)
    of_others: dict[str, list[int]] = {}
    for call in calls:
        if isinstance(call, OnReport) and call.report.instance_id != "a":
            of_others.setdefault(call.report.instance_id, []).append(call.report.sequence)
    assert len(of_others) == num_others
    assert all(sequences == list(range(1, num_each + 1)) for sequences in of_others.values())
    submitted = next(at for at, call in enumerate(calls) if isinstance(call, Submit))
    assert any(isinstance(call, OnReport) and call.report.instance_id != "a" for call in calls[submitted:])
