"""Whether models fit a group, and the KV pool that they leave. Pure arithmetic, per rank, as the live plan reckons it
(services/placement/planning.py):

    sum(weights) / p + max(activations) + (least KV pool + one merged block of scratch) / p  <=  memory of a device

Names with the same weights share one copy of them. Each of p ranks has a p-th of weights, of the pool and of each merged
block (slab.py); activations are each rank's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from shared.engine.memory import slab
from shared.placement.plan import is_cpu
from shared.placement.problem import ModelFacts, NodeFacts

MAX_CPU_POOL_BYTES = 1 << 30
"""Most pool bytes of a whole group. On CPU the pool is main memory that others can use better: at tens of tokens per second
it holds minutes of output."""

POOL_SHARE = {"cpu": 0.75, "cuda": 0.9}
"""Share of what weights and activations leave: the rest stays free, so that one more model usually fits without a restart.
Less of a GPU, where the pool is what limits the batch."""

LEAST_MERGED_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Least bytes of a merged block over a whole group: merged blocks are at least so large, so that a model that is added
later usually fits into them (other merged blocks need a restart of the instance)."""

KEPT_POOL = 1.25
"""A group keeps its KV pool, and so its process, until it could have one that much larger and needs it (demand.py)."""


class Pool(NamedTuple):
    """KV pool of a whole group."""

    merged_bytes: int
    """Bytes of a merged block; a p-th on each rank."""
    num_merged: int


class _Rank(NamedTuple):
    """What each rank of a group holds, in bytes."""

    weights: int
    activations: int
    merged: int
    least_merged: int
    """Merged blocks, a number."""

    @property
    def needed(self) -> int:
        return self.weights + self.activations + (self.least_merged + 1) * self.merged


def why_not(models: Sequence[ModelFacts], node: NodeFacts, num_ranks: int) -> str:
    """Why these cannot share a group of so many devices of the node; empty: they can."""
    if num_ranks > node.num_devices:
        return f"num_ranks: {node.node_id} has {node.num_devices} devices, not {num_ranks}"
    for model in models:
        if (node.kind, num_ranks) not in model.costs:
            return f"costs: {model.name!r} is not known to run on {num_ranks} devices of kind {node.kind!r}"
        if model.num_kv_heads % num_ranks:
            return f"num_kv_heads: the {model.num_kv_heads} of {model.name!r} cannot be cut over {num_ranks} devices"
    rank = _rank(models, node, num_ranks)
    if rank.needed <= node.memory_bytes:
        return ""
    where = "one device" if num_ranks == 1 else f"each of {num_ranks} devices"
    return (
        f"memory_bytes: {', '.join(sorted(model.name for model in models))} {'needs' if len(models) == 1 else 'need'} "
        f"{_mib(rank.needed)} on {where} ({_mib(rank.weights)} weights, {_mib(rank.activations)} activations, "
        f"{_mib(rank.needed - rank.weights - rank.activations)} least KV pool and scratch); there are "
        f"{_mib(node.memory_bytes)}"
    )


def pool(models: Sequence[ModelFacts], node: NodeFacts, num_ranks: int) -> Pool:
    """Pool of a group that `why_not` has nothing against."""
    rank = _rank(models, node, num_ranks)
    left = node.memory_bytes - rank.weights - rank.activations - rank.merged
    share = int(left * POOL_SHARE[_device(node)])
    if is_cpu(node.kind):
        share = min(share, MAX_CPU_POOL_BYTES // num_ranks)
    return Pool(rank.merged * num_ranks, max(share // rank.merged, rank.least_merged))


def _device(node: NodeFacts) -> str:
    return "cpu" if is_cpu(node.kind) else "cuda"


def _rank(models: Sequence[ModelFacts], node: NodeFacts, num_ranks: int) -> _Rank:
    copies: dict[str, int] = {}
    for model in models:
        copies[model.weights] = max(copies.get(model.weights, 0), model.weight_bytes)
    blocks = tuple(sorted(-(-model.block_bytes // num_ranks) for model in models))
    merged = _merged_bytes(blocks, -(-LEAST_MERGED_BYTES[_device(node)] // num_ranks))
    return _Rank(
        weights=-(-sum(copies.values()) // num_ranks),
        activations=max((model.activation_bytes for model in models), default=0),
        merged=merged,
        least_merged=sum(
            -(-model.least_blocks // _blocks_per_merged(merged, -(-model.block_bytes // num_ranks))) for model in models
        ),
    )


@functools.lru_cache(maxsize=4096)
def _merged_bytes(blocks: tuple[int, ...], at_least: int) -> int:
    return slab.choose_merged_bytes(list(dict.fromkeys(blocks)), at_least=at_least)


_blocks_per_merged = functools.lru_cache(maxsize=4096)(slab.blocks_per_merged)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
