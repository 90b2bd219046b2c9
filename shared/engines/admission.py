"""Which requests are sent to an engine that takes what it gets in its own order, or does not know of offline work.

Such an engine does not take a row back from offline work when an online request comes. So it is given no more than it
has rows for, online requests first, and offline ones only while nothing online waits: all rows but some when nothing
online runs, and a part of them beside it. What is left waits with the instance, where it can be reordered and given up
for nothing.
"""

from __future__ import annotations

OFFLINE_SHARE_BESIDE = 0.25
"""Share of the rows for offline requests while online ones run."""
ONLINE_SHARE_KEPT = 0.125
"""Share of the rows that is kept free of offline requests when nothing online runs: for the first that comes."""


def offline_rows(max_running: int, num_online: int) -> int:
    """Rows that offline requests may have, at least one. `num_online`: online requests that run or wait."""
    if num_online:
        return max(1, int(OFFLINE_SHARE_BESIDE * max_running))
    return max(1, max_running - max(1, int(ONLINE_SHARE_KEPT * max_running)))


def num_to_send(
    max_running: int, sent_online: int, sent_offline: int, waiting_online: int, waiting_offline: int
) -> tuple[int, int]:
    """How many more of the online and of the offline requests that wait are sent now."""
    free = max(0, max_running - sent_online - sent_offline)
    online = min(free, waiting_online)
    if online < waiting_online:
        return online, 0
    allowed = offline_rows(max_running, sent_online + online) - sent_offline
    return online, max(0, min(free - online, allowed, waiting_offline))
