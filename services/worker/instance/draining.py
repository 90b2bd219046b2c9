"""How an instance empties itself before it ends. That its requests move away is the scheduler's doing: it sees the state
"draining" in the registry and names destinations (`Rebalance`), until nothing is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.bus.interface import Bus, BusError
from shared.messages.catalogue import INSTANCE_REBALANCE
from shared.messages.migration import Rebalance

log = logging.getLogger(__name__)

POLL_S = 0.05
REBALANCE_TIMEOUT_S = 1.5
"""Time after which there is taken to be no destination, or no scheduler, where it names none; and for so long nobody that
could take over, or no connection, may be a moment's matter."""


class Draining:
    """`num_held()`: requests that are here, and migrations under way. `any_destination()`: whether another instance could
    take one of them, once `peers_known` has been awaited."""

    def __init__(
        self,
        bus: Bus,
        instance_id: str,
        num_held: Callable[[], int],
        any_destination: Callable[[], bool],
        peers_known: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._num_held = num_held
        self._any_destination = any_destination
        self._peers_known = peers_known
        self._hopeful_s = 0.0
        """Time at which a scheduler last named destinations, or what kept it from doing so was over."""
        self._blocked_s: float | None = None
        """Since when they cannot move."""

    async def until_empty(self, grace_s: float) -> None:
        """Waits until nothing is held, for `grace_s` at most."""
        deadline_s = self._bus.now() + grace_s
        while self._num_held() and self._bus.now() < deadline_s:
            await asyncio.sleep(POLL_S)

    async def before_exit(self, grace_s: float) -> None:
        """Waits until requests are gone, but only for as long as they can move away: what stays is placed elsewhere
        when this instance is gone."""
        started_s = self._bus.now()
        if not (num_held := self._num_held()):
            return
        await self._peers_known()
        self._hopeful_s, self._blocked_s = self._bus.now(), None
        try:
            topic = INSTANCE_REBALANCE.at(instance_id=self._instance_id)
            subscription = await self._bus.subscribe(topic, self._on_rebalance)
        except BusError as error:
            log.warning("cannot hear where requests could move: %s", error)
            return
        log.info("%d requests are to move away, within %g s", num_held, grace_s)
        while (why := self._why_stop(started_s + grace_s)) is None:
            await asyncio.sleep(POLL_S)
        await subscription.stop()
        log.info("%d of %d requests are left: %s", self._num_held(), num_held, why)

    def _why_stop(self, deadline_s: float) -> str | None:
        now = self._bus.now()
        if not self._num_held():
            return "done"
        if now >= deadline_s:
            return "the time for it is over"
        if (why := self._why_blocked()) is None:
            self._blocked_s = None
            return None if now - self._hopeful_s < REBALANCE_TIMEOUT_S else "the scheduler names no destination"
        if self._blocked_s is None:
            self._blocked_s = now
        self._hopeful_s = now
        return None if now - self._blocked_s < REBALANCE_TIMEOUT_S else why

    def _why_blocked(self) -> str | None:
        if not self._bus.is_connected:
            return "not connected to NATS"
        return None if self._any_destination() else "no other instance can take them"

    def _on_rebalance(self, rebalance: Rebalance) -> None:
        if rebalance.destinations:
            self._hopeful_s = self._bus.now()
