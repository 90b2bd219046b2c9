"""Engines and messages for the tests of single calls of a migration."""

from __future__ import annotations

from shared.engine.engine import Engine
from shared.engine.handover import Detached
from shared.engine.plan import ModelShape
from shared.messages.migration import PreAllocate
from shared.messages.requests import Priority, RequestClass
from shared.policies.catalogue import ordering_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.engine.cluster import Cluster, Node

SHAPE = ModelShape("a", 4, 3, 60)
OFFLINE = RequestClass.OFFLINE


def make(num_merged=20, rows=8, budget=64, ordering="fcfs", depth=1, host=0, cooldown=0.5, slo=False, **fields) -> Node:
    engine = Engine(
        num_merged,
        rows,
        ordering_policy(ordering),
        SloTokenBudget(budget) if slo else FixedTokenBudget(budget),
        steps_in_flight=depth,
        num_host_merged=host,
        checkpoint=AdaptiveCheckpoint(0.0),
        migration_cooldown_s=cooldown,
        **fields,
    )
    return Node(engine, [SHAPE])


def run(node: Node, steps: int, now: float = 0.0) -> None:
    for _ in range(steps):
        assert node.plan(now)
        node.step_returns(now)


def pair(**fields) -> tuple[Cluster, Node, Node]:
    cluster = Cluster([make(**fields), make(**fields)])
    return cluster, *cluster.nodes


def stage(node: Node, pinned, migration_id="m", number=0, **fields) -> PreAllocate:
    fields = {"request_class": RequestClass.ONLINE, "priority": Priority.NORMAL, "max_tokens": 40, **fields}
    return PreAllocate(
        migration_id=migration_id,
        source_id="source",
        request_id="r",
        model="a",
        request_class=fields.pop("request_class"),
        priority=fields.pop("priority"),
        stage=number,
        first_block=fields.pop("first_block", pinned.first_block if pinned else 0),
        num_blocks=fields.pop("num_blocks", len(pinned.blocks) if pinned else 0),
        hashes=pinned.hashes if pinned else b"",
        block_size=fields.pop("block_size", 4),
        block_bytes=1,
        **fields,
    )


def effects(node: Node, kind):
    return [effect for effect in node.engine.effects() if isinstance(effect, kind)]


def taken(node: Node) -> Detached:
    (effect,) = effects(node, Detached)
    return effect
