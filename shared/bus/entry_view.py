"""The live view that a watch keeps of a bucket: which entries count as present, whatever the transport.

Three clocks end an entry: its TTL since it was last written (JetStream reports no expiry), a deletion, and, after a
reconnect or a gap, the grace period within which it must be seen again. Time stands still while the view is paused. That an
entry's time is over tells nothing while nobody could write it or nothing came through: a transport on which that may be so
looks first (`on_due`), and says which are gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Set
from typing import Generic, TypeVar

M = TypeVar("M")

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 3.0
"""After a reconnect, for buckets without a TTL."""


class EntryView(Generic[M]):
    """`now` must run at the pace of the event loop's timers."""

    def __init__(
        self,
        ttl_s: float | None,
        now: Callable[[], float],
        on_change: Callable[[str, M | None], None] | None,
    ) -> None:
        self.entries: dict[str, M] = {}
        self._ttl_s = ttl_s
        self._grace_s = ttl_s if ttl_s is not None else DEFAULT_GRACE_S
        self._now = now
        self._on_change = on_change
        self.on_due: Callable[[list[str]], None] | None = None
        """The time of these entries is over: it calls `expire` with them, now or later, or `postpone`. Without it they are
        gone."""
        self.revisions: dict[str, int] = {}
        self._ends_at: dict[str, float] = {}
        """Monotonic seconds; keys without an entry here stay until deleted."""
        self._is_paused = False
        self._is_asking = False
        """`on_due` was called, and nothing has come of it."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, key: str, value: M, revision: int) -> None:
        """An entry was written; or is seen again after a gap, with the known revision: no change. (The value is compared
        too, because revisions begin anew on a server that lost its store.)"""
        if self._ttl_s is None:
            self._ends_at.pop(key, None)
        else:
            self._ends_at[key] = self._now() + self._ttl_s
            self._arm()
        is_known = self.revisions.get(key) == revision and self.entries[key] == value
        self.entries[key] = value
        self.revisions[key] = revision
        if not is_known:
            self._tell(key, value)

    def remove(self, key: str) -> None:
        self._ends_at.pop(key, None)
        if key in self.entries:
            del self.entries[key], self.revisions[key]
            self._tell(key, None)

    def pause(self) -> None:
        """Writes can no longer be seen: nothing expires."""
        self._is_paused, self._is_asking = True, False
        self._disarm()

    def resume(self, seen: Set[str] = frozenset()) -> None:
        """What was not seen again within the grace period is gone. `seen`: what the transport has reported anew already,
        with which a view without TTL has nothing to wait for."""
        self._is_paused = self._is_asking = False
        ends_at = self._now() + self._grace_s
        is_awaited = self.entries.keys() if self._ttl_s is not None else self.entries.keys() - seen
        self._ends_at = dict.fromkeys(is_awaited, ends_at)
        self._arm()

    def expire(self, keys: Iterable[str]) -> None:
        """Removes those of them that were not written meanwhile."""
        now, self._is_asking = self._now(), False
        for key in keys:
            if self._ends_at.get(key, math.inf) <= now:
                self.remove(key)
        self._arm()

    def postpone(self, keys: Iterable[str], seconds: float) -> None:
        """Entries among them that were not written meanwhile stay unknown for so long."""
        now, self._is_asking = self._now(), False
        self._ends_at |= {key: now + seconds for key in keys if self._ends_at.get(key, math.inf) <= now}
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._ends_at and not self._is_paused and not self._is_asking:
            delay_s = max(0.0, min(self._ends_at.values()) - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        now = self._now()
        due = [key for key, ends_at in self._ends_at.items() if ends_at <= now]
        if due and self.on_due is not None:
            self._is_asking = True
            self.on_due(due)
        else:
            self.expire(due)

    def _tell(self, key: str, value: M | None) -> None:
        if self._on_change is not None:
            try:
                self._on_change(key, value)
            except Exception:
                logger.exception("the watcher of key %s failed", key)
