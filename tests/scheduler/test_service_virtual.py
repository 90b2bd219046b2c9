"""The scheduler service in virtual time on the memory bus: every scenario, and faults that NATS does not make on command."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from services.scheduler import active
from shared.messages.catalogue import SCHEDULER_STATISTICS
from shared.messages.cluster import StatisticsReport
from shared.messages.requests import FinishReason
from shared.scheduling.scaling import Scaler
from tests.memory_bus import Faults
from tests.scheduler.conftest import VirtualStage
from tests.scheduler.peers import ScriptedInstance, eventually, token_at
from tests.scheduler.scenarios import SCENARIOS, Scenario, a_server_restart_kills_nobody, assert_whole
from tests.shared.scheduling.samples import make_request
from tests.virtual_time import run_virtual


def play(scenario: Scenario, seed: int = 0) -> None:
    async def run() -> None:
        stage = VirtualStage(seed)
        try:
            await scenario(stage)
        finally:
            await stage.close()

    run_virtual(run(), limit_s=600)


@pytest.mark.parametrize("scenario", [*SCENARIOS, a_server_restart_kills_nobody], ids=lambda s: s.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_scenario(scenario: Scenario, seed: int) -> None:
    play(scenario, seed)


def test_a_leader_that_vanishes_is_replaced_and_its_view_rebuilt() -> None:
    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler("scheduler-1")
        standby = await stage.scheduler("scheduler-2")
        gateway, instance = await stage.gateway(), await stage.instance("a")
        await gateway.submit(make_request("running", max_tokens=4))
        await eventually(lambda: instance.held)
        await gateway.submit(make_request("queued", model="later"))
        stage.hub.partition("scheduler-1")
        started_s = gateway.bus.now()
        await eventually(lambda: standby.is_active and gateway.announced)
        assert gateway.bus.now() - started_s < 5.0
        later = await stage.instance("b", "later")
        await eventually(lambda: "queued" in later.held)
        assert len(instance.received) == 1 and gateway.lost == []
        # Rebuilt: the new leader knows whose requests went down.
        await instance.die(exit_code=1)
        await stage.instance("c", seconds_per_token=0.01)
        await eventually(lambda: gateway.end_of("running"))
        assert_whole(gateway, make_request("running", max_tokens=4))
        # The old leader comes back as a standby.
        stage.hub.heal()
        await asyncio.sleep(10)
        assert [service.is_active for service in stage.schedulers] == [False, True]

    play(scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize("slice_s", [0.0, active.SLICE_S])
def test_many_dispatches_that_are_due_together_all_go_out(slice_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """0: with a turn of the event loop between any two, in which others may come."""
    monkeypatch.setattr(active, "SLICE_S", slice_s)
    monkeypatch.setattr(active, "MAX_SLICE_S", slice_s)
    turns: list[int] = []

    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler("scheduler-1")
        gateway = await stage.gateway()
        for number in range(12):
            await gateway.submit(make_request(f"r{number}"))
        acted = active.ActiveScheduler._act

        def counted(scheduler: active.ActiveScheduler) -> None:
            before = scheduler._core.queue.lengths()
            acted(scheduler)
            turns.append(sum(before.values()) - len(scheduler._core.queue))

        monkeypatch.setattr(active.ActiveScheduler, "_act", counted)
        instances = [await stage.instance(name) for name in "abc"]
        await eventually(lambda: sum(len(instance.held) for instance in instances) == 12)

    play(scenario)  # type: ignore[arg-type]
    assert sum(turns) == 12
    assert max(turns) == 1 if slice_s == 0.0 else max(turns) > 1


def test_an_instance_that_says_nothing_at_take_over_does_not_lead_to_two_owners_in_an_epoch() -> None:
    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler("scheduler-1")
        gateway, mute = await stage.gateway(), await stage.instance("a")
        await gateway.submit(make_request("r"))
        await eventually(lambda: mute.held)
        await stage.scheduler("scheduler-2")
        mute.is_answering_held = False
        await stage.schedulers[0].stop()
        other = await stage.instance("b")
        await eventually(lambda: "r" in other.held or ("r" in mute.held and len(mute.received) == 2))
        owners = [instance.held["r"].epoch for instance in (mute, other) if "r" in instance.held]
        assert len(set(owners)) == len(owners)

    play(scenario)  # type: ignore[arg-type]


def test_a_fault_in_one_periodic_duty_stops_neither_it_nor_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of step")

    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler()
        gateway = await stage.gateway()
        reports: list[StatisticsReport] = []
        await gateway.bus.subscribe(SCHEDULER_STATISTICS, reports.append)
        with monkeypatch.context() as broken:
            broken.setattr(Scaler, "due", fail)
            await eventually(lambda: len(reports) >= 3)
            await gateway.submit(make_request("waits"))
            await eventually(lambda: stage.metric("queue_length", model="m", **{"class": "online"}) == 1)
        assert caplog.text.count("out of step") >= 3

    play(scenario)  # type: ignore[arg-type]


def test_a_frozen_bus_kills_nobody() -> None:
    """The connection stands, but nothing comes through: silence alone is no proof of death."""

    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler(lost_after_s=0.5)
        gateway, instance = await stage.gateway(), await stage.instance("a")
        await gateway.submit(make_request("r"))
        await eventually(lambda: instance.held)
        stage.hub.partition("scheduler-1")
        await asyncio.sleep(1.2)  # shorter than the lease
        stage.hub.heal()
        await asyncio.sleep(5.0)
        assert stage.metric("lost_instances_total", reason="silent") == 0 and gateway.lost == []
        assert len(instance.received) == 1

    play(scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_streams_survive_deaths_delays_and_duplicates(seed: int) -> None:
    """Instances and leaders die at random while 60 requests run; every stream ends whole, exactly once."""

    async def scenario(stage: VirtualStage) -> None:
        random = Random(seed)
        stage.hub.faults = Faults(delay_s=(0.0001, 0.02), duplicate_rate=0.1)
        await stage.scheduler("scheduler-0", lost_after_s=1.0)
        gateway = await stage.gateway()
        instances: dict[str, ScriptedInstance] = {}
        for name in "abc":
            instances[name] = await stage.instance(name, "m", "n", seconds_per_token=0.02, max_running=4)
        requests = [
            make_request(
                f"r{number}",
                model=random.choice("mn"),
                max_tokens=random.randint(1, 40),
                online=random.random() < 0.7,
                high=random.random() < 0.2,
                timeout_s=300.0,
            )
            for number in range(60)
        ]
        for number, request in enumerate(requests):
            gateway.want(request)
            await asyncio.sleep(random.uniform(0, 0.1))
            if number % 12 == 5:
                name = random.choice("abc")
                await instances[name].die(exit_code=random.choice([None, 137]))
                instances[name] = await stage.instance(
                    name, "m", "n", incarnation=f"{number}", seconds_per_token=0.02, max_running=4
                )
            if number % 20 == 15:
                await stage.scheduler(f"scheduler-{number}", lost_after_s=1.0)
                await eventually(lambda: any(service.is_active for service in stage.schedulers))
                leader = next(service for service in stage.schedulers if service.is_active)
                if random.random() < 0.5:
                    await leader.stop()
                else:
                    stage.hub.partition(leader.scheduler_id)
        await eventually(lambda: len(gateway.ends) == len(requests), 300)
        for request in requests:
            assert_whole(gateway, request)
        stage.hub.heal()

    play(scenario, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_lost_messages_lose_no_request_for_longer_than_its_deadline(seed: int) -> None:
    """NATS drops nothing while connections stand; should it, every request still ends, with its tokens or not at all."""

    async def scenario(stage: VirtualStage) -> None:
        await stage.scheduler()
        gateway = await stage.gateway()
        instances = [await stage.instance(name) for name in "ab"]
        stage.hub.faults = Faults(drop_rate=0.1)
        requests = [make_request(f"r{number}", timeout_s=30.0) for number in range(20)]
        for request in requests:
            gateway.want(request)
        await eventually(lambda: {name for peer in instances for name in peer.held} == {r.request_id for r in requests})
        stage.hub.faults = Faults()
        for instance in instances:
            for request_id in list(instance.held):
                instance.finish(request_id, num_tokens=20)
        await eventually(lambda: len(gateway.ends) == len(requests), 60)
        for request in requests:
            expected = [token_at(request.request_id, n) for n in range(20)]
            assert gateway.end_of(request.request_id) == FinishReason.LENGTH
            assert gateway.outputs[request.request_id] == expected

    play(scenario, seed)  # type: ignore[arg-type]
