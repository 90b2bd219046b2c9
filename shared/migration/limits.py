"""Who may take requests, how many move at once, and what KV pools are called."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from shared.messages.cluster import InstanceInfo
from shared.messages.migration import MigrationReason

DRAIN_CONCURRENCY = 4
"""Out of an instance that is to become empty, or a model on it, and as many into one that takes them: that it ends is worth
more than how smoothly others are served there meanwhile."""


HANDOFF_CONCURRENCY = 256
"""Handoffs out of an instance, or into it: as many as run there. They are no part of the migrations that settings bound."""


def max_at_once(reason: MigrationReason, max_migrations: int) -> int:
    """Out of an instance, or into it, that is set to `max_migrations`; handoffs count apart."""
    if reason == MigrationReason.HANDOFF:
        return HANDOFF_CONCURRENCY
    return max(DRAIN_CONCURRENCY, max_migrations) if reason == MigrationReason.DRAIN else max_migrations


def can_take(peer: InstanceInfo, models: AbstractSet[str], with_kv: bool = True) -> bool:
    """Whether requests of one of the models could go to the instance."""
    if peer.state != "ready" or (with_kv and not peer.kv_address):
        return False
    return any(model.name in models and model.state == "ready" for model in peer.models)


def pool_of(model: str, on_host: bool) -> str:
    """The transport's name of the model's KV blocks on the device, or of its checkpoints in host memory."""
    return f"host/{model}" if on_host else f"device/{model}"
