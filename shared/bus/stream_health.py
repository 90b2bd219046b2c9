"""Whether a stream of JetStream can be written and its leader be believed, by what the API's STREAM.INFO tells. Pure.

In a cluster a stream has a leader, which needs most of its copies to store anything. One whose node hung answers as if it
still led, until it hears of the others: that it has not heard of them for longer than they are ever silent tells it from a
leader.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, NamedTuple

PEER_SILENT_S = 3.0
"""A copy that is there is heard of each second."""


class StreamHealth(NamedTuple):
    problem: str
    """Why nothing can be stored, as a clause about the stream; empty: it can."""
    writable_for_s: float
    """How long the present leader has led, on the server's clock; 0 where there is a problem, infinite for a server on
    its own."""
    num_copies: int = 1
    num_current: int = 1
    """Replicas among them that have all that is stored."""


def health_of(info: dict[str, Any]) -> StreamHealth:
    """`info`: an answer of STREAM.INFO."""
    cluster = info.get("cluster")
    if not cluster:
        return StreamHealth("", math.inf)
    if not cluster.get("leader"):
        return StreamHealth("has no leader: its servers elect one, or too few of them are there", 0.0)
    peers = cluster.get("replicas") or []
    num_copies, num_there = 1 + len(peers), 1 + sum(map(_is_there, peers))
    if 2 * num_there <= num_copies:
        return StreamHealth(
            f"has {num_there} of its {num_copies} copies, too few to store anything", 0.0, num_copies, 0
        )
    num_current = 1 + sum(bool(peer.get("current")) for peer in peers)
    since, now = cluster.get("leader_since"), info.get("ts")
    if not since or not now:  # servers before 2.12 do not tell
        return StreamHealth("", math.inf, num_copies, num_current)
    led_s = (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()
    return StreamHealth("", max(0.0, led_s), num_copies, num_current)


def _is_there(peer: dict[str, Any]) -> bool:
    return not peer.get("offline") and 0 < peer.get("active", 0) < PEER_SILENT_S * 1e9
