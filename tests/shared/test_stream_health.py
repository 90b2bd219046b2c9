"""What STREAM.INFO of nats-server 2.15 says, and what that means for a stream."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.bus.stream_health import StreamHealth, health_of

HEARD, LONG_AGO = 200_000_000, 6_000_000_000
"""Nanoseconds since a copy was heard of."""


def info(leader: str | None, *active: int, since: str = "2026-11-27T12:00:00.123456789Z") -> dict[str, Any]:
    peers = [{"name": f"node-{i}", "current": ago == HEARD, "active": ago} for i, ago in enumerate(active, 1)]
    cluster = {"name": "c", "leader": leader, "replicas": peers}
    if leader:
        cluster["leader_since"] = since
    return {"config": {}, "state": {}, "cluster": cluster, "ts": "2026-11-27T12:00:10.123456789Z"}


def test_a_server_on_its_own_can_always_be_written() -> None:
    assert health_of({"config": {}, "state": {}}) == StreamHealth("", math.inf)


@pytest.mark.parametrize(
    ("active", "num_current"), [((HEARD, HEARD), 3), ((HEARD, LONG_AGO), 2), ((0, HEARD), 2), ((), 1)]
)
def test_a_leader_with_most_of_its_copies_can_store(active: tuple[int, ...], num_current: int) -> None:
    health = health_of(info("node-0", *active))
    assert (health.problem, health.num_copies, health.num_current) == ("", 1 + len(active), num_current)
    assert health.writable_for_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (info(None, HEARD, HEARD), "has no leader"),
        (info("node-0", LONG_AGO, 0), "has 1 of its 3 copies, too few"),
        (info("node-0", LONG_AGO, LONG_AGO, HEARD, LONG_AGO), "has 2 of its 5 copies, too few"),
    ],
)
def test_one_without_a_leader_or_most_of_its_copies_cannot(told: dict[str, Any], problem: str) -> None:
    """The second is also what a node says that hung and led the stream, before it hears of the others."""
    health = health_of(told)
    assert health.problem.startswith(problem) and health.writable_for_s == 0.0


def test_a_server_that_does_not_say_since_when_it_leads_is_believed() -> None:
    assert health_of(info("node-0", HEARD, HEARD, since="")).writable_for_s == math.inf
