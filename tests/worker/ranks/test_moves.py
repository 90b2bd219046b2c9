"""A request moves between instances of one device, of two, of four and of two stages while it runs, and its stream is that
of one that stays."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from services.worker.executor.executor import Executor
from services.worker.kv_transport import KvTransport
from services.worker.kv_transport.telemetry import TransferMetrics
from services.worker.ranks.group_executor import GroupExecutor
from services.worker.ranks.messages import SetUp
from services.worker.ranks.starting import join_ranks, start_ranks
from shared.bus.nats_bus import NatsBus
from shared.messages.cluster import DeviceGroup
from shared.runtime.settings import BusSettings
from tests.worker.instance_stage import instance_on
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.neighbours import (
    MERGED_BYTES,
    NUM_MERGED,
    Neighbours,
    generation,
    plan_of,
    write_long_checkpoint,
)

ONE, TWO, FOUR, STAGES = "node-0", "node-1", "node-3", "node-7"
GROUPS = {
    TWO: DeviceGroup(("cpu",) * 2), FOUR: DeviceGroup(("cpu",) * 4), STAGES: DeviceGroup(("cpu",) * 2, num_stages=2)
}  # fmt: skip
NUM_ROWS = 8


def executors_of(groups: dict[str, DeviceGroup]) -> dict[str, GroupExecutor]:
    """Which start at the same time. One reaches its blocks as ranks on GPUs do."""
    ranks = {name: start_ranks(group) for name, group in groups.items()}
    common = SetUp(
        device="cpu", num_merged=NUM_MERGED, merged_bytes=MERGED_BYTES, num_rows=NUM_ROWS, num_threads=1
    )  # fmt: skip
    return {
        name: join_ranks(
            ranks[name],
            replace(
                common,
                merged_bytes=MERGED_BYTES // group.num_ranks,
                num_stages=group.num_stages,
                num_window_merged=int(name == TWO),
            ),
        )
        for name, group in groups.items()
    }


@pytest.mark.parametrize(
    "way",
    [
        pytest.param([ONE, TWO, STAGES, TWO, ONE], id="two"),
        pytest.param([ONE, TWO, FOUR, TWO, STAGES, FOUR, STAGES, ONE], id="four", marks=pytest.mark.long),
    ],
)
async def test_a_request_moves_between_groups_of_equal_and_different_size(
    nats_settings: BusSettings, tmp_path: Path, way: list[str]
) -> None:
    checkpoint, hub = write_long_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=4), LocalHub()
    metrics: list[CollectorRegistry] = []

    async def open_transport() -> KvTransport:
        metrics.append(CollectorRegistry())
        transport = KvTransport(LocalNetwork(hub), metrics=TransferMetrics(metrics[-1]))
        await transport.open()
        return transport

    def started(instance_id: str, executor: Any) -> Any:
        return instance_on(
            nats_settings, executor=executor, open_transport=open_transport, num_merged=NUM_MERGED,
            instance_id=instance_id, plan=plan_of(instance_id, checkpoint), max_running=NUM_ROWS,
            migration_cooldown_s=0.0, num_stages=GROUPS[instance_id].num_stages if instance_id in GROUPS else 1,
        )  # fmt: skip

    async with AsyncExitStack() as stack:
        executors: dict[str, Any] = {ONE: Executor("cpu", NUM_MERGED, MERGED_BYTES, NUM_ROWS)}
        for name, executor in executors_of({name: group for name, group in GROUPS.items() if name in way}).items():
            executors[name] = stack.enter_context(closing(executor))
        bus = await NatsBus.connect(nats_settings, service="test", service_id="neighbours")
        stack.push_async_callback(bus.close)
        neighbours = Neighbours(bus)
        await neighbours.start()
        stages = [await stack.enter_async_context(started(name, one)) for name, one in executors.items()]

        def see_each_other() -> bool:
            views = [stage.service._migrations.peers() for stage in stages]
            return all(sum(bool(peer.kv_address) for peer in view.values()) == len(stages) for view in views)

        await neighbours.until(see_each_other)
        requests = [generation("greedy", 100, 300), generation("sampled", 70, 300, "sampled")]
        expected = await neighbours.undisturbed(ONE, *requests)
        await neighbours.submit(ONE, *requests)
        for number, (here, there) in enumerate(itertools.pairwise(way), 1):
            before = neighbours.progress("greedy")
            await neighbours.until(lambda: neighbours.progress("greedy") > before + 10)  # noqa: B023
            neighbours.rebalance(here, there)
            await neighbours.until(
                lambda: all(neighbours.gateway.owners[r.request_id] == (number, there) for r in requests)  # noqa: B023
            )
            neighbours.rebalance(here)
        await neighbours.ended(*requests)
        assert {request_id: neighbours.gateway.tokens[request_id] for request_id in expected} == expected
        moves = [move for report in neighbours.reports for move in report.migrations]
        assert len(moves) == 2 * (len(way) - 1) and all(move.is_migrated for move in moves)
        shape = executors[ONE]._models["m"].views.shape
        least = sum(length // shape.block_size for length in (100, 70)) * shape.block_bytes
        for registry in metrics[1:]:  # the first has the prompts' blocks in its cache
            num_bytes = registry.get_sample_value("tideway_kv_transfer_bytes_total", {"direction": "in"})
            assert num_bytes is not None and num_bytes >= least, "prompts are not computed again"
        for stage in stages:
            with stage.service._loop.locked() as engine:
                engine.check()
                assert not engine.all_held()
