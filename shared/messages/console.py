"""What the console shows beyond the other endpoints: the KV pool of each instance block by block, and all of it at once."""

from __future__ import annotations

import msgspec

from shared.messages.admin import InstanceState
from shared.messages.requests import Count

MAX_POOL_SEQUENCES = 512
MAX_POOL_CELLS = 8192
"""Merged blocks that are named for sequences, over all of them."""


class ShowPool(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to instance, while somebody looks at it."""


class PoolSequence(msgspec.Struct, frozen=True):
    request_id: str
    model: Count
    """Index in the view's models."""
    state: str
    """waiting | running | restoring | suspended | leaving"""
    is_online: bool
    num_tokens: Count
    num_blocks: Count
    num_host_blocks: Count
    """How many of its KV blocks have a checkpoint in host memory."""
    merged: list[int]
    """Merged blocks in which its KV lies."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    owners: bytes
    """Owner of each merged block: 0 where it is free, else one more than the index of its model."""
    use: bytes
    """Used share of each merged block's KV blocks, 0 to 255. The others are free or cached."""
    host_owners: bytes
    """Owner of each merged block of host memory, in the same form."""
    host_use: bytes
    sequences: list[PoolSequence]
    """The first `MAX_POOL_SEQUENCES` that are held."""
    num_sequences: Count


class QueueLength(msgspec.Struct, frozen=True):
    """Length of a queue at the scheduler."""

    model: str
    online: int
    offline: int


class Move(msgspec.Struct, frozen=True):
    """A migration of a request of this gateway, under way or over lately."""

    request_id: str
    source_id: str
    destination_id: str
    reason: str
    age_s: float
    """Since it began."""
    outcome: str = ""
    """moved, or why it did not; empty: it is under way."""
    ended_age_s: float | None = None


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    batch_id: str
    status: str
    model: str
    num_total: int
    num_completed: int
    num_failed: int
    created_s: float
    """Unix time; likewise the next two."""
    deadline_s: float
    predicted_finish_s: float | None


class HistorySample(msgspec.Struct, frozen=True, kw_only=True):
    """What was at one time, and what was done in the ten seconds before."""

    at_s: float
    """Unix time."""
    num_instances: Count
    num_running: Count
    """On all instances; likewise `num_waiting`."""
    num_waiting: Count
    num_queued: Count | None
    """Requests queued at the scheduler; None: no scheduler said it."""
    output_tokens_s: dict[str, float]
    """By model, of requests of both classes; a model without any is left out."""
    finished_s: dict[str, float]
    """Requests a second, by model."""
    pools: dict[str, float] = {}
    """Used share of each KV pool, by instance; empty in a large cluster."""


class ConsoleHistory(msgspec.Struct, frozen=True):
    samples: list[HistorySample]
    """The oldest first."""


class ConsoleState(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    """Unix time."""
    gateway_id: str
    instances: list[InstanceState]
    draining: list[str]
    """Instances that the plan leaves out."""
    pools: dict[str, PoolView]
    """By instance; those that did not answer in time have none."""
    queues: list[QueueLength] | None
    """None: no scheduler says."""
    moves: list[Move]
    batches: list[BatchProgress]
