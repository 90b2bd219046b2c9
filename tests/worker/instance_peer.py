"""Another instance, a scheduler and a transport for the instance under test (instance_stage.py)."""

from __future__ import annotations

import asyncio

from services.worker.kv_transport import KvTransport
from shared.bus.interface import ServiceError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import (
    INSTANCE_CANCEL,
    INSTANCE_COMMIT,
    INSTANCE_HELD,
    INSTANCE_OWNS,
    INSTANCE_PRE_ALLOCATE,
    INSTANCE_REBALANCE,
    INSTANCES,
)
from shared.messages.cluster import InstanceInfo, LoadedModel
from shared.messages.migration import (
    Commit,
    Committed,
    MigrationReason,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    Rebalance,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorCode, ListHeldRequests
from tests.worker.instance_stage import IDS, Stage
from tests.worker.kv_transport.local import LocalHub, LocalNetwork

LONG_PROMPT, OTHER_PROMPT = list(range(400)), list(range(400, 800))
"""They do not fit into the pool together."""


class Peer:
    """The other instance, scripted: takes what needs no KV."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.commits: list[Commit] = []
        self.cancels: list[Cancel] = []
        self.refuses = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.info = InstanceInfo(
            instance_id="node-1",
            incarnation="first",
            node_id="node",
            state="ready",
            models=[LoadedModel(name="a", state="ready", max_model_len=600, block_size=4, blocks_per_merged=3)],
            kv_address="local:nowhere",
        )

    async def start(self) -> None:
        ids = {"instance_id": "node-1"}
        await self.bus.serve(INSTANCE_PRE_ALLOCATE.at(**ids), self._on_pre_allocate)
        await self.bus.serve(INSTANCE_COMMIT.at(**ids), self._on_commit)
        await self.bus.serve(INSTANCE_OWNS.at(**ids), self._on_owns)
        await self.bus.subscribe(INSTANCE_CANCEL.at(**ids), self.cancels.append)
        await self.register(self.info)

    async def register(self, info: InstanceInfo | None) -> None:
        registry = await self.bus.key_value(INSTANCES)
        await (registry.delete("node-1") if info is None else registry.put("node-1", info))

    async def _on_pre_allocate(self, _query: PreAllocate) -> Reserved:
        raise ServiceError.of(ErrorCode.OVERLOADED, "no room for KV")

    async def _on_commit(self, commit: Commit) -> Committed:
        if self.refuses:
            raise ServiceError.of(ErrorCode.OVERLOADED, "full")
        self.commits.append(commit)
        await self.may_answer.wait()
        return Committed(commit.request.request_id, commit.request.epoch)

    async def _on_owns(self, query: OwnsQuery) -> OwnsReply:
        return OwnsReply(any(commit.migration_id == query.migration_id for commit in self.commits))


def rebalance(stage: Stage, reason: MigrationReason = MigrationReason.BALANCE, lease_s: float = 5.0) -> None:
    stage.bus.publish(INSTANCE_REBALANCE.at(**IDS), Rebalance(["node-1"], reason, lease_s))


async def held(stage: Stage) -> set[str]:
    reply = await stage.bus.request(INSTANCE_HELD.at(**IDS), ListHeldRequests(), timeout_s=5)
    return {one.request_id for one in reply.requests}


async def local_transport() -> KvTransport:
    transport = KvTransport(LocalNetwork(LocalHub()))
    await transport.open()
    return transport
