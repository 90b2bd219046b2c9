"""How many requests move at once."""

from __future__ import annotations

from shared.messages.migration import MoveReason

DRAIN_CONCURRENCY = 4
"""Out of an instance that is to become empty, or a model on it, and as many into one that takes them: that it ends is worth
more than how smoothly others are served there meanwhile."""


def max_at_once(reason: MoveReason, max_migrations: int) -> int:
    """Out of an instance, or into it, that is set to `max_migrations`."""
    return max(DRAIN_CONCURRENCY, max_migrations) if reason == MoveReason.DRAIN else max_migrations
