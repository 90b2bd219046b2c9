"""Placement and node agents together: instances come and go as asked, with a scripted instance program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.node.machine import Machine
from shared.bus.nats_bus import NatsBus
from shared.messages.admin import DrainInstance, ScaleInstances
from shared.messages.catalogue import PLACEMENT_DRAIN_INSTANCE, PLACEMENT_SCALE_INSTANCES
from shared.messages.cluster import DeviceGroup, PlacementPlan
from shared.runtime.settings import BusSettings
from shared.runtime.telemetry import start_telemetry
from tests.placement.checkpoints import write_checkpoint
from tests.placement.test_service import placement
from tests.worker.test_node_agent import FAKE, Peers, running_agent, until

MACHINE = Machine("cpu", 1, 8 << 30, 1, (DeviceGroup(("cpu",)),) * 3, max_instances=3)


@pytest.fixture
async def peers(nats_settings: BusSettings) -> AsyncIterator[Peers]:
    bus = await NatsBus.connect(nats_settings, service="test", service_id="peers")
    peers = Peers(bus)
    await peers.start()
    yield peers
    await bus.close()


async def serving(peers: Peers, *instance_ids: str) -> dict[str, int]:
    """Waits until exactly these are ready; instance id -> pid."""

    def ready() -> set[str]:
        return {i for i, info in peers.instances.entries.items() if info.state == "ready" and info.models}

    await until(lambda: ready() == peers.instances.entries.keys() == set(instance_ids))
    return peers.pids()


async def test_instances_come_and_go_and_what_stays_is_not_touched(
    nats_settings: BusSettings, peers: Peers, tmp_path: Path
) -> None:
    async def ask(endpoint: Any, query: Any) -> PlacementPlan:
        return await peers.bus.request(endpoint, query, timeout_s=10.0)

    def agent() -> running_agent:
        telemetry = start_telemetry("node", "n", nats_settings)
        return running_agent(nats_settings.nats_url, telemetry, FAKE, MACHINE)

    def unchanged(now: dict[str, int], before: dict[str, int], *instance_ids: str) -> bool:
        return all(now[i] == before[i] for i in instance_ids)

    scale: Callable[[int], Any] = lambda n: ask(PLACEMENT_SCALE_INSTANCES, ScaleInstances(n))  # noqa: E731
    async with placement(nats_settings, {"a": write_checkpoint(tmp_path / "a")}):
        async with agent():
            one = await serving(peers, "n-0")
            await scale(3)
            three = await serving(peers, "n-0", "n-1", "n-2")
            assert unchanged(three, one, "n-0"), "its memory was divided over three from the start"
            await ask(PLACEMENT_DRAIN_INSTANCE, DrainInstance("n-1"))
            two = await serving(peers, "n-0", "n-2")
            await scale(1)
            assert await serving(peers, "n-0") == one
            await scale(2)
            again = await serving(peers, "n-0", "n-2")
            assert unchanged(again, two, "n-0") and not unchanged(again, two, "n-2"), (
                "n-1 is drained for another reason"
            )
        async with agent():
            await serving(peers, "n-0", "n-2")
            await ask(PLACEMENT_DRAIN_INSTANCE, DrainInstance("n-1", is_undone=True))
            await serving(peers, "n-0", "n-1", "n-2")
    assert {exited.exit_code for exited in peers.exits} == {0}
