"""Processes of instances, as the node agent starts and ends them: their requests move over UCX before they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from services.worker.instance.draining import REBALANCE_TIMEOUT_S
from shared.messages.catalogue import INSTANCES
from shared.messages.migration import MigrationReason
from shared.runtime.settings import BusSettings
from tests import paced
from tests.worker.neighbours import (
    Neighbours,
    generation,
    neighbours_on,
    plan_of,
    write_long_checkpoint,
)

STEP_S = 0.004
"""What a step takes at least: requests outlast what happens to them, and their tokens are a clock that a busy machine slows
too."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_checkpoint(tmp_path_factory.mktemp("checkpoints"))


class Processes:
    """Instances as the node agent starts them."""

    def __init__(self, nats_settings: BusSettings, checkpoint: Path, folder: Path) -> None:
        self._nats_url = nats_settings.nats_url
        self._checkpoint = checkpoint
        self._folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, instance_id: str, **environment: str) -> subprocess.Popen[bytes]:
        settings = {
            "TIDEWAY_NATS_URL": self._nats_url,
            "TIDEWAY_INSTANCE_ID": instance_id,
            "TIDEWAY_NODE_ID": "node",
            "TIDEWAY_PLAN": plan_of(instance_id, self._checkpoint),
            "TIDEWAY_DEVICE": "cpu",
            "TIDEWAY_NUM_THREADS": "1",
            "TIDEWAY_PROFILE": "off",
            "TIDEWAY_HOST_MEMORY_BYTES": "0",
            paced.STEP_S: str(STEP_S),
            **environment,
        }
        command = [sys.executable, "-m", paced.MODULE, "instance"]
        with (self._folder / f"{instance_id}.log").open("wb") as output:
            process = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=output)
        self.running.append(process)
        return process

    def log(self, instance_id: str) -> str:
        return (self._folder / f"{instance_id}.log").read_text()


@pytest.fixture
def processes(nats_settings: BusSettings, checkpoint: Path, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(nats_settings, checkpoint, tmp_path)
    yield found
    for process in found.running:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
async def neighbours(nats_settings: BusSettings) -> AsyncIterator[Neighbours]:
    async with neighbours_on(nats_settings) as neighbours:
        yield neighbours


def is_ready(neighbours: Neighbours, instance_id: str, *, with_kv: bool = True) -> bool:
    info = neighbours.instances.entries.get(instance_id)
    return info is not None and info.state == "ready" and bool(info.kv_address) is with_kv


async def exit_code(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    return await asyncio.to_thread(process.wait, timeout_s)


@pytest.mark.long
async def test_sigterm_moves_what_runs_to_another_process_over_ucx(
    processes: Processes, neighbours: Neighbours
) -> None:
    source, _ = processes.start("node-0"), processes.start("node-1")
    await neighbours.until(lambda: is_ready(neighbours, "node-0") and is_ready(neighbours, "node-1"), 60)
    request = generation("r", 200, 500, "sampled")
    expected = await neighbours.undisturbed("node-1", request)
    await neighbours.submit("node-0", request)
    await neighbours.until(lambda: neighbours.progress("r") > 20)
    source.send_signal(signal.SIGTERM)
    while neighbours.owner("r") != "node-1":
        info = neighbours.instances.entries.get("node-0")
        assert info is not None and source.poll() is None, processes.log("node-0")
        if info.state == "draining":
            neighbours.rebalance("node-0", "node-1", reason=MigrationReason.DRAIN)
        await asyncio.sleep(0.02)
    assert "r" not in neighbours.gateway.ends, "it moved while it ran"
    assert await exit_code(source, 10) == 0
    await neighbours.ended(request)
    assert neighbours.gateway.tokens["r"] == expected["r"]
    assert any(move.is_migrated for report in neighbours.reports for move in report.migrations), (
        "its last report says so"
    )


async def test_a_process_without_a_usable_ucx_says_so_serves_and_ends_at_once(
    processes: Processes, neighbours: Neighbours
) -> None:
    process = processes.start("node-0", UCX_TLS="nothing")
    await neighbours.until(lambda: is_ready(neighbours, "node-0", with_kv=False), 60)
    await neighbours.submit("node-0", generation("r0", 20, 10), generation("r1", 200, 1800))
    await neighbours.until(lambda: "r0" in neighbours.gateway.ends)
    assert "requests do not move to or from node-0 with their KV" in processes.log("node-0")
    before = neighbours.progress("r1")
    process.send_signal(signal.SIGTERM)
    assert await exit_code(process, 60) == 0
    assert (neighbours.progress("r1") - before) * STEP_S < REBALANCE_TIMEOUT_S + 0.5
    assert "no other instance can take them" in processes.log("node-0")


async def test_a_second_sigterm_ends_a_process_that_drains(processes: Processes, neighbours: Neighbours) -> None:
    process = processes.start("node-0")
    await neighbours.until(lambda: is_ready(neighbours, "node-0"), 60)
    info = neighbours.instances.entries["node-0"]
    registry = await neighbours.bus.key_value(INSTANCES)
    await registry.put("node-1", msgspec.structs.replace(info, instance_id="node-1"))
    await neighbours.submit("node-0", generation("r", 200, 1800))
    await neighbours.until(lambda: neighbours.progress("r") > 5)
    process.send_signal(signal.SIGTERM)
    await neighbours.until(lambda: neighbours.instances.entries["node-0"].state == "draining")
    before = neighbours.progress("r")
    process.send_signal(signal.SIGTERM)
    assert await exit_code(process, 60) == -signal.SIGTERM, "not when it is empty"
    assert (neighbours.progress("r") - before) * STEP_S < 0.5


def metric(neighbours: Neighbours, instance_id: str, name: str) -> float:
    """Sum over the lines that begin with `name`."""
    port = neighbours.instances.entries[instance_id].metrics_port
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def test_a_prefix_is_fetched_from_another_process_and_computed_where_that_is_gone(
    processes: Processes, neighbours: Neighbours
) -> None:
    environment = {"TIDEWAY_PREFIX_FETCH": "auto", "TIDEWAY_HOST_MEMORY_BYTES": str(4 << 20)}
    holder, _ = (processes.start(name, **environment) for name in ("node-0", "node-1"))
    await neighbours.until(lambda: all(is_ready(neighbours, name) for name in ("node-0", "node-1")), 60)
    first = generation("first", 500, 20)
    await neighbours.submit("node-0", first)
    await neighbours.ended(first)
    fetching = generation("fetching", 500, 20, prefix_holder="node-0", prefix_tokens=480)
    await neighbours.submit("node-1", fetching)
    await neighbours.ended(fetching)
    assert neighbours.gateway.tokens["fetching"] == neighbours.gateway.tokens["first"]
    assert metric(neighbours, "node-1", 'tideway_prefix_fetches_total{outcome="fetched"}') == 1
    assert metric(neighbours, "node-1", "tideway_prefix_fetched_blocks_total") > 0
    assert any(load.fetch_token_s > 0 for report in neighbours.reports for load in report.models)
    holder.kill()
    await exit_code(holder, 10)
    gone = msgspec.structs.replace(generation("gone", 700, 20), prefix_holder="node-0", prefix_tokens=640)
    await neighbours.submit("node-1", gone)
    await neighbours.ended(gone)
    refused = metric(neighbours, "node-1", 'tideway_prefix_fetches_total{outcome="late"}')
    assert refused + metric(neighbours, "node-1", 'tideway_prefix_fetches_total{outcome="refused"}') == 1
