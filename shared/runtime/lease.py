"""Leader election over a key of a JetStream bucket: at most one holder at any time, a standby takes over in seconds.

The holder creates `LEASES[key]` and renews it each second by compare-and-set; the server forgets an entry that was not
renewed for the bucket's TTL. The holder counts from the moment it *sent* its last successful renewal and gives up
`SAFETY_S` before the TTL, so by the time the server lets another one create the key, it has stopped. Each gain of the
role draws a term from the durable `TERMS[key]` (or another bucket's), which only grows; stale leaders can be told by it.

While NATS cannot be reached the holder keeps the role without using it (`is_held` is False, `on_lose` is not called: it
can reach nobody). On reconnect it looks whether the entry is still its own before it acts again; if not, it has lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from shared.bus.interface import Bus, BusError, KeyValue, RevisionConflict, Watch
from shared.messages.catalogue import LEASES, TERMS
from shared.messages.channels import Bucket
from shared.messages.cluster import LeaseHolder
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.tasks import set_within

logger = logging.getLogger(__name__)

assert LEASES.ttl_s is not None
TTL_S = LEASES.ttl_s
COMPLAINT_INTERVAL_S = 10.0
"""Between two lines about a lease that NATS does not give."""
SAFETY_S = 0.5
"""Time for `on_lose` to take effect, and for the clocks of holder and server to drift."""
RENEW_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.4


class Lease:
    """`on_gain(term)` and `on_lose()` alternate and never overlap; a role lost while `on_gain` runs cancels it and then
    calls `on_lose`. An `on_gain` that raises gives the role back. Neither may call `stop`."""

    def __init__(
        self,
        bus: Bus,
        key: str,
        holder_id: str,
        on_gain: Callable[[int], Coroutine[Any, Any, None]],
        on_lose: Callable[[], Awaitable[None]],
        *,
        watches: bool = True,
        terms: Bucket[LeaseHolder] = TERMS,
    ) -> None:
        """`terms`: where the last term is kept. `watches` False: the caller watches `LEASES`, for many leases at once, and
        passes on what it sees of this one to `on_change`."""
        self.term = 0
        """Drawn last: the term of the role while it is held."""
        self._bus = bus
        self._key = key
        self._holder_id = holder_id
        self._on_gain = on_gain
        self._on_lose = on_lose
        self._highest_term = 0
        """Highest term of any leader seen."""
        self._revision = 0
        self._valid_until_s = float("-inf")
        """On the bus's clock; the role may be used until then."""
        self._has_role = False
        self._must_verify = False
        """The connection was lost and made again since the last renewal."""
        self._watches = watches
        self._terms_bucket = terms
        self._stop_listening: Callable[[], None] | None = None
        self._is_stopping = False
        self._complained_s = float("-inf")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leases: KeyValue[LeaseHolder]
        self._terms: KeyValue[LeaseHolder]
        self._watch: Watch[LeaseHolder] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process may act in the role at this moment."""
        return (
            self._has_role
            and not self._must_verify
            and self._bus.is_connected
            and self._bus.now() < self._valid_until_s
        )

    async def start(self) -> None:
        """Begins to contend; returns at once. Raises `BusError` if the buckets cannot be declared."""
        self._leases = await self._bus.key_value(LEASES)
        self._terms = await self._bus.key_value(self._terms_bucket)
        if self._watches:
            self._watch = await self._leases.watch(self.on_change)
        self._stop_listening = self._bus.on_reconnect(self._on_reconnect)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Calls `on_lose` if the role is held, and frees it for others at once. May be called twice."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.shield(self._task)  # who gives up waiting for it leaves it to the next call
        if self._watch is not None:
            await self._watch.stop()
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def on_change(self, key: str, value: LeaseHolder | None) -> None:
        """An entry of the bucket was written, or is gone (None)."""
        if key == self._key and value is None:
            self._wake.set()
        elif key == self._key and value is not None:
            self._highest_term = max(self._highest_term, value.term)

    def _on_reconnect(self) -> None:
        if self._has_role:
            self._must_verify = True
            self._valid_until_s = self._bus.now() + TTL_S
            self._wake.set()

    # ------------------------------------------------------------------------------------------------ the loop

    async def _run(self) -> None:
        while not self._is_stopping:
            try:
                await self._acquire()
                await self._hold()
            except RevisionConflict:
                pass  # another one holds it
            except BusError as error:
                self._complain(error)
            except Exception:
                logger.exception("lease %s", self._key)
            await self._pause(RETRY_INTERVAL_S)

    def _complain(self, error: BusError) -> None:
        """Nobody may lead for as long as this lasts, so it is not told in passing."""
        now = self._bus.now()
        # Without a connection the bus says so.
        if self._bus.is_connected and now - self._complained_s >= COMPLAINT_INTERVAL_S:
            self._complained_s = now
            logger.warning("lease %s cannot be had: %s", self._key, error)

    async def _pause(self, seconds: float) -> None:
        """Until something happened to the lease, `seconds` at most."""
        if self._is_stopping:
            return
        self._wake.clear()
        await set_within(self._wake, seconds)

    async def _acquire(self) -> None:
        """Returns with the lease in hand and a new term, or raises."""
        sent_s = self._bus.now()
        self._revision = await self._leases.create(self._key, LeaseHolder(self._holder_id, 0))
        self._valid_until_s = sent_s + TTL_S - SAFETY_S
        self.term = await self._draw_term()
        # Renewing proves that the lease was ours when the term was drawn, so terms grow in the order of leaders.
        await self._renew()

    async def _draw_term(self) -> int:
        while True:
            last = await self._terms.get(self._key)
            # A server that lost its disk has forgotten the last term; whoever saw it has not.
            term = 1 + max(self._highest_term, last.value.term if last else 0)
            info = LeaseHolder(self._holder_id, term)
            try:
                if last is None:
                    await self._terms.create(self._key, info)
                else:
                    await self._terms.update(self._key, info, last.revision)
                return term
            except RevisionConflict:
                continue  # somebody drew at the same time

    async def _renew(self) -> None:
        info = LeaseHolder(self._holder_id, self.term)
        sent_s = self._bus.now()
        if self._must_verify:
            # Revisions begin anew on a server that lost its store: equal numbers prove nothing.
            entry = await self._leases.get(self._key)
            if entry is None or entry.value != info:
                raise RevisionConflict(ErrorInfo(ErrorCode.CONFLICT, "the lease was lost with the connection"))
            self._revision = entry.revision
        self._revision = await self._leases.update(self._key, info, self._revision)
        self._valid_until_s = sent_s + TTL_S - SAFETY_S
        self._must_verify = False

    async def _hold(self) -> None:
        """Uses the role until it is lost or to be given back; on return `on_lose` has run."""
        self._has_role = True
        logger.info("%s holds lease %s with term %d", self._holder_id, self._key, self.term)
        gaining = asyncio.ensure_future(self._on_gain(self.term))
        release = True
        try:
            while not self._is_stopping:
                await self._pause(RENEW_INTERVAL_S)
                if not await self._keep():
                    release = False
                    break
                if gaining.done() and (error := gaining.exception()) is not None:
                    # What the bus does not answer now is asked again in the next term.
                    unknown = None if isinstance(error, BusError) else error
                    logger.error("lease %s: gaining it failed: %s", self._key, error, exc_info=unknown)
                    break
        finally:
            await self._lose(gaining, release=release)

    async def _keep(self) -> bool:
        """Renews; False when the role is lost."""
        try:
            async with asyncio.timeout(max(0.0, self._valid_until_s - self._bus.now())):
                await self._renew()
        except RevisionConflict as error:
            logger.warning("%s lost lease %s: %s", self._holder_id, self._key, error.info.message)
            return False
        except (BusError, TimeoutError):
            # While disconnected nobody can be reached in the role, whoever has it.
            if self._bus.is_connected and self._bus.now() >= self._valid_until_s:
                logger.warning("%s could not renew lease %s in time", self._holder_id, self._key)
                return False
        return True

    async def _lose(self, gaining: asyncio.Future[None], *, release: bool) -> None:
        release = release and self.is_held
        self._has_role = self._must_verify = False
        gaining.cancel()
        await asyncio.gather(gaining, return_exceptions=True)
        try:
            await self._on_lose()
        except Exception:
            logger.exception("lease %s: losing it failed", self._key)
        if release and self._bus.now() < self._valid_until_s:
            try:
                await self._leases.delete(self._key)
            except BusError as error:
                logger.info("lease %s could not be released: %s", self._key, error)
