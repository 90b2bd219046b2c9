"""Records of calls in the memories of gateways, for as long as JetStream elects a leader and can store none.

A call that is to be kept begins meanwhile once every other gateway that lives has its record. Any of them can continue it.
One call begins under an idempotency key: a gateway that knows a call of that key, even one that has ended, answers with
it, and one that has taken the record of another's call waits for what becomes of that. Of two calls whose gateways ask
each other at once, the one with the lower id goes first, and the other waits for what becomes of it. A gateway that is
gone is passed by. One that lives and does not answer may have such a call, so the new one is refused.

Nobody knows a call of a key if its record was stored in the last moment before the election, its gateway died with the
leader, and the copies that answer have not received it: then a second call begins. It ends when JetStream tells of the first
(`Kept.supersede`); a client gets a second answer only if it has ended before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection

from shared.bus.interface import Bus, BusError, Subscription
from shared.messages.catalogue import DROP_COPY, GATEWAY_COPY
from shared.messages.kept import CallCopy, CopyTaken, DropCopy, KeptCall
from shared.messages.requests import ErrorCode, ErrorInfo

ASK_TIMEOUT_S = 1.0
RETRY_AFTER_S = 2.0
KEPT_S = 120.0
"""Time within which JetStream takes the record; an election takes up to 9 s."""
RETURN_S = 3.0
"""After this gateway has its connection to NATS again, another one may be without its own for so long, and lives."""
MAX_BYTES = 32 * 1024 * 1024
"""The most bytes of all copies here; the oldest make room."""


class _Asking:
    """A call whose record goes round from here."""

    def __init__(self, record: KeptCall) -> None:
        self.record = record
        self.is_contending = False
        """It goes to all gateways; before, it waits for a call whose record was taken here."""
        self.first: asyncio.Future[KeptCall | None] = asyncio.get_running_loop().create_future()
        """The call that begins under the key; None: none does."""


class RecordCopies:
    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        gateways: Callable[[], Collection[str]],
        known: Callable[[str], KeptCall | None],
    ) -> None:
        """`gateways`: those that live. `known`: the call of an idempotency key that runs here, or has ended here."""
        self._bus = bus
        self._gateway_id = gateway_id
        self._gateways = gateways
        self._known = known
        self._asking: dict[str, _Asking] = {}
        """By idempotency key."""
        self._copies: OrderedDict[str, tuple[KeptCall, float]] = OrderedDict()
        """By call, with the time at which it came."""
        self._num_bytes = 0
        self._back_at = float("-inf")
        """Time at which this gateway had its connection again."""
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        self._subscriptions = [
            await self._bus.serve(GATEWAY_COPY.at(gateway_id=self._gateway_id), self._on_copy),
            await self._bus.subscribe(DROP_COPY, lambda message: self._forget(message.call_id)),
        ]
        self._bus.on_reconnect(self._on_reconnect)

    def _on_reconnect(self) -> None:
        self._back_at = self._bus.now()

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()

    def find(self, call_id: str) -> KeptCall | None:
        self._forget_old()
        found = self._copies.get(call_id)
        return None if found is None else found[0]

    def of_claim(self, claim: str) -> KeptCall | None:
        """The call of an idempotency key whose gateway is gone. One that lives answers itself: the call may have made way
        for another since its record came."""
        return next((record for record in self._taken(claim) if _maker(record) not in self._gateways()), None)

    def _taken(self, claim: str) -> list[KeptCall]:
        self._forget_old()
        return [record for record, _ in self._copies.values() if record.claim == claim]

    async def spread(self, record: KeptCall) -> KeptCall | None:
        """Gives the record to all other gateways; the call that was first under its idempotency key, None: this one is.
        Raises `BusError` where that cannot be known."""
        claim = record.claim
        if not claim:
            await self._ask_all(record)
            return None
        while (other := self._asking.get(claim)) is not None:
            await asyncio.wait({other.first})
        if (known := self._known(claim)) is not None:
            return known
        asking = self._asking[claim] = _Asking(record)
        first = None
        try:
            first = await self._first(asking)
            return None if first is record else first
        finally:
            if first is not record:
                self.drop(record.call_id)
            del self._asking[claim]
            asking.first.set_result(first)

    def drop(self, call_id: str) -> None:
        """Nobody can have the call any more: no gateway keeps its record."""
        self._forget(call_id)
        self._bus.publish(DROP_COPY, DropCopy(call_id))

    async def _first(self, asking: _Asking) -> KeptCall:
        """The call that begins under the key. Raises `BusError`."""
        record = asking.record
        while taken := self._taken(record.claim):
            if _maker(taken[0]) not in self._gateways():
                return taken[0]
            if (first := await self._ask(_maker(taken[0]), CallCopy(record, is_waiting=True))) is not None:
                return first
            self._forget(taken[0].call_id)  # it has failed there, or made way
        asking.is_contending = True
        return await self._ask_all(record) or record

    async def _ask_all(self, record: KeptCall) -> KeptCall | None:
        others = [gateway_id for gateway_id in self._gateways() if gateway_id != self._gateway_id]
        answers = await asyncio.gather(*(self._ask(each, CallCopy(record)) for each in others), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, KeptCall):
                return answer
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if not self._bus.is_connected:
            raise refusal("NATS is away")
        return None

    async def _ask(self, gateway_id: str, copy: CallCopy) -> KeptCall | None:
        try:
            taken = await self._bus.request(GATEWAY_COPY.at(gateway_id=gateway_id), copy, timeout_s=ASK_TIMEOUT_S)
        except BusError as error:
            is_back = self._bus.now() - self._back_at < RETURN_S  # that gateway may be on its way back
            if error.code is ErrorCode.UNAVAILABLE and not is_back:  # it is gone, or this gateway has no connection
                return None
            raise refusal(f"gateway {gateway_id} does not answer") from error
        return taken.first

    async def _on_copy(self, copy: CallCopy) -> CopyTaken:
        first = await self._before(copy) if copy.record.claim else None
        if first is None:
            self._keep(copy.record)
        return CopyTaken(first)

    async def _before(self, copy: CallCopy) -> KeptCall | None:
        """The call before this one under its key, so far as it is for this gateway to tell."""
        claim, call_id = copy.record.claim, copy.record.call_id
        asking = self._asking.get(claim)
        if asking is not None and (copy.is_waiting or (asking.is_contending and asking.record.call_id < call_id)):
            await asyncio.wait({asking.first})
            if (first := asking.first.result()) is not None:
                return first
        return self._known(claim) or self.of_claim(claim)

    def _keep(self, record: KeptCall) -> None:
        self._forget(record.call_id)
        self._copies[record.call_id] = record, self._bus.now()
        self._num_bytes += len(record.plan)
        self._forget_old()

    def _forget_old(self) -> None:
        while self._copies:
            call_id, (_, came_at) = next(iter(self._copies.items()))
            if self._num_bytes <= MAX_BYTES and came_at > self._bus.now() - KEPT_S:
                return
            self._forget(call_id)

    def _forget(self, call_id: str) -> None:
        if (found := self._copies.pop(call_id, None)) is not None:
            self._num_bytes -= len(found[0].plan)


def _maker(record: KeptCall) -> str:
    return record.template.gateway_id


def refusal(reason: str) -> BusError:
    message = f"the record of this call cannot be stored now, and {reason}"
    return BusError(ErrorInfo(ErrorCode.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S))
