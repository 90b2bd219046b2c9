"""The use of keys with limits over all gateways: an entry a key in a bucket of NATS, changed by compare-and-set.

    entry      what each gateway has of the key: calls in flight, tokens by the second
    a claim    is decided on the entry, and holds when the entry that holds it too was written; else it is decided anew
    returns    calls that ended are written at once, tokens of output within `FLUSH_S`
    a gateway  that is not seen for the TTL of `GATEWAYS` has nothing in flight any more; the tokens it used count on

So two gateways never let in more than a limit allows between them. What is decided together is written together, one
write of a key at a time. A write takes `MAX_WAIT_S` at most, and a claim waits for two at most. Where NATS does not answer
by then, this gateway decides by itself on what it can know (its own use, and that of others as last read, while they are
alive), tells it when NATS answers, and asks it again after `RETRY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from msgspec.structs import replace

from services.gateway.access.admission import WINDOW_S, Claim, Key, name_of
from services.gateway.http.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from shared.bus.interface import Bus, BusError, KeyValue, KvEntry, RevisionConflict, UnreadableEntry, Watch
from shared.messages.catalogue import GATEWAYS, KEY_USES
from shared.messages.requests import RequestClass
from shared.messages.tenants import GatewayAlive, KeyUse, KeyUses
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

MAX_WAIT_S = 0.25
RETRY_S = 2.0
FLUSH_S = 0.25
ALIVE_INTERVAL_S = 1.0
assert KEY_USES.ttl_s is not None
RENEW_S = KEY_USES.ttl_s / 3
MAX_TRIES = 50
"""Most tries of one write, where other gateways write too."""


class _Asked:
    """A claim that waits for its decision."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refusal: ApiError | None = None

    def take(self, now: float) -> None:
        self.refusal = None
        try:
            self.claim.take(now)
        except ApiError as error:
            self.refusal = error

    def give_back(self) -> None:
        if self.refusal is None:
            self.claim.give_back()

    def settle(self) -> None:
        if self.decided.done():  # whoever asked has gone
            self.give_back()
        elif self.refusal is None:
            self.decided.set_result(None)
        else:
            self.decided.set_exception(self.refusal)


def _take(asked: list[_Asked], now: float) -> None:
    for one in asked:
        one.take(now)


def _give_back(asked: list[_Asked]) -> None:
    for one in asked:
        one.give_back()


class _Account:
    """A key with limits that is in use here."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.asked: list[_Asked] = []
        self.is_changed = False
        """Whether there is something to write that nobody waits for."""
        self.is_working = False
        self.known: KvEntry[KeyUses] | None = None
        """Entry as it was written last from here, if nobody else came between."""
        self.written_at = float("-inf")


class SharedKeyUses:
    """The `Uses` of one gateway (admission.py)."""

    def __init__(self, bus: Bus, gateway_id: str, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._epoch_s = time.time() - bus.now()
        """What is added to the bus's time for that of the Unix epoch."""
        self._accounts: dict[str, _Account] = {}
        self._retry_at = float("-inf")
        """Until then NATS is not asked."""
        self._tasks = TaskSet()
        self._alive: Watch[GatewayAlive] | None = None
        self._gateways: KeyValue[GatewayAlive]
        self._uses: KeyValue[KeyUses]

    async def start(self) -> None:
        self._gateways = await self._bus.key_value(GATEWAYS)
        self._uses = await self._bus.key_value(KEY_USES)
        self._alive = await self._gateways.watch()
        # Before the first claim: what a gateway holds that nobody knows counts for nothing.
        await self._say_alive()
        self._tasks.start(self._stay_alive(), "key uses: alive")
        self._tasks.start(self._flush_forever(), "key uses: flush")

    async def stop(self) -> None:
        """What is still in flight is freed."""
        await self._tasks.end_all()
        if self._alive is not None:
            await self._alive.stop()
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await self._gateways.delete(self._gateway_id)
            except (BusError, TimeoutError) as error:
                logger.info("that this gateway ends is not told: %s", error)

    @property
    def gateways(self) -> Collection[str]:
        """Ids of the gateways that live, so far as is known."""
        return () if self._alive is None else self._alive.entries.keys()

    async def claim(self, key: Key, claim: Claim, now: float) -> None:
        """Implements `Uses.claim`, within twice `MAX_WAIT_S`."""
        if not key.has_limits or self._alive is None:
            claim.take(now)
            return
        account = self._account(key)
        if now < self._retry_at:
            self._metrics.key_claims.labels("alone").inc()
            claim.take(now)
            account.is_changed = True
            return
        asked = _Asked(claim)
        account.asked.append(asked)
        self._wake(account)
        try:
            await asked.decided
        except asyncio.CancelledError:
            if asked.decided.done() and not asked.decided.cancelled():
                asked.give_back()
                self.note(key, soon=True)
            raise

    def note(self, key: Key, *, soon: bool = False) -> None:
        """Implements `Uses.note`. Not `soon`: it is written within `FLUSH_S`."""
        if not key.has_limits or self._alive is None:
            return
        account = self._account(key)
        account.is_changed = True
        if soon and self._bus.now() >= self._retry_at:
            self._wake(account)

    async def all(self) -> dict[str, KeyUses]:
        """Implements `Uses.all`: the uses as NATS has them, without what gateways had that are gone."""
        found = {use_id: entry.value for use_id, entry in (await self._uses.entries()).items()}
        return {use_id: replace(uses, gateways=self._alive_alone(uses)) for use_id, uses in found.items()}

    def _account(self, key: Key) -> _Account:
        account = self._accounts.get(key.use_id)
        if account is None:
            account = self._accounts[key.use_id] = _Account(key)
        account.key = key
        return account

    def _wake(self, account: _Account) -> None:
        if not account.is_working:
            account.is_working = True
            self._tasks.start(self._work(account), "key uses: write")

    async def _work(self, account: _Account) -> None:
        try:
            while account.asked or account.is_changed:
                asked, account.asked = account.asked, []
                account.is_changed = False
                try:
                    async with asyncio.timeout(MAX_WAIT_S):
                        await self._write(account, asked)
                except (BusError, TimeoutError) as error:
                    self._decide_alone(account, asked, error)
                    return
                except asyncio.CancelledError:
                    _take(asked, self._bus.now())
                    raise
                finally:
                    account.is_changed |= any(one.decided.done() for one in asked)
                    for one in asked:
                        one.settle()
                self._metrics.key_claims.labels("shared").inc(len(asked))
        finally:
            account.is_working = False

    def _decide_alone(self, account: _Account, asked: list[_Asked], error: BaseException) -> None:
        now = self._bus.now()
        self._retry_at = now + RETRY_S
        logger.warning(
            "the use of API keys is counted here alone for %.0f s: %s", RETRY_S, str(error) or "no answer in time"
        )
        asked += account.asked
        account.asked, account.known, account.is_changed = [], None, True
        _take(asked, now)
        self._metrics.key_claims.labels("alone").inc(len(asked))

    async def _write(self, account: _Account, asked: list[_Asked]) -> None:
        """Decides what was asked by an entry that was not changed meanwhile. Raises `BusError` or is cancelled with
        nothing taken."""
        key = account.key
        for _ in range(MAX_TRIES):
            was_known, now = account.known is not None, self._bus.now()
            if account.known is None:
                account.known = await self._read(key.use_id)
            uses, revision = account.known.value, account.known.revision
            self._learn(key, uses, now)
            _take(asked, now)
            if not (was_known and any(one.refusal is not None for one in asked)):
                try:
                    account.known = await self._put(account, uses, revision, now)
                    return
                except RevisionConflict:
                    self._metrics.key_use_conflicts.inc()
                except BaseException:
                    _give_back(asked)
                    raise
            # Others may have taken what was left, or given back what is missing.
            _give_back(asked)
            account.known = None
        raise TimeoutError("too many gateways write at once")

    async def _read(self, use_id: str) -> KvEntry[KeyUses]:
        """Revision 0: there is none."""
        try:
            return await self._uses.get(use_id) or KvEntry(KeyUses(), 0)
        except UnreadableEntry as error:
            return KvEntry(KeyUses(), error.revision)

    async def _put(self, account: _Account, uses: KeyUses, revision: int, now: float) -> KvEntry[KeyUses]:
        key = account.key
        tokens = tuple((round(second + self._epoch_s), num_tokens) for second, num_tokens in key.window.own(now))
        own = KeyUse(key.num_in_flight[RequestClass.ONLINE], key.num_in_flight[RequestClass.OFFLINE], tokens)
        if uses.gateways.get(self._gateway_id, KeyUse()) == own and now - account.written_at < RENEW_S:
            return KvEntry(uses, revision)
        account.written_at = now
        gateways = self._alive_alone(uses)
        gateways[self._gateway_id] = own
        value = KeyUses(name_of(key.tenant), gateways, key.max_in_flight, key.tokens_per_minute)
        if revision:
            return KvEntry(value, await self._uses.update(key.use_id, value, revision))
        return KvEntry(value, await self._uses.create(key.use_id, value))

    def _alive_alone(self, uses: KeyUses) -> dict[str, KeyUse]:
        """Without what is over: calls of gateways that are gone, tokens out of the window."""
        assert self._alive is not None
        oldest = self._bus.now() + self._epoch_s - WINDOW_S
        found = {}
        for gateway_id, use in uses.gateways.items():
            tokens = tuple(bucket for bucket in use.tokens if bucket[0] > oldest)
            if gateway_id in self._alive.entries:
                found[gateway_id] = KeyUse(use.num_online, use.num_offline, tokens)
            elif tokens:
                found[gateway_id] = KeyUse(tokens=tokens)
        return found

    def _learn(self, key: Key, uses: KeyUses, now: float) -> None:
        others = self._alive_alone(uses)
        own = others.pop(self._gateway_id, KeyUse())
        if own.tokens and not key.window.own(now):
            # Of this gateway before it was started again.
            for second, num_tokens in own.tokens:
                key.window.add(num_tokens, second - self._epoch_s)
        for request_class in RequestClass:
            key.num_in_flight_elsewhere[request_class] = sum(
                use.num_in_flight(request_class) for use in others.values()
            )
        key.window.set_others(
            [(second - self._epoch_s, num_tokens) for use in others.values() for second, num_tokens in use.tokens]
        )

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            now = self._bus.now()
            for use_id, account in list(self._accounts.items()):
                if not (account.is_working or account.is_changed or account.key.is_used(now)):
                    del self._accounts[use_id]
                elif now >= self._retry_at and (account.is_changed or now - account.written_at > RENEW_S):
                    account.is_changed = True
                    self._wake(account)

    async def _say_alive(self) -> None:
        await self._gateways.put(self._gateway_id, GatewayAlive(self._gateway_id))

    async def _stay_alive(self) -> None:
        while True:
            try:
                await self._say_alive()
            except BusError as error:
                logger.info("that this gateway is alive is not told: %s", error)
            await asyncio.sleep(ALIVE_INTERVAL_S)
