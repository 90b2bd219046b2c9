"""Calls that outlive their connections, and this gateway: what is kept of each on the bus, who reads it here, and when it is
given up.

A call is kept where its client asks for it (`X-Resume-Window`, `Idempotency-Key`), and where it may be had by its id anyway
(a stored response's stream). Its record is written before it is placed (while JetStream elects a leader, the other gateways
get it: `copies`), by each gateway that takes it up, and again, with all output, when it has ended; until then its tokens are
with the instance that makes them (services/worker/instance/output_log.py). Whoever resumes it makes the answer again from
its first token, since text, stop strings and calls of tools depend on all before, and shows what comes after the client's
position.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.parsing import Options, seconds_of
from services.gateway.requests.copies import RecordCopies, refusal
from services.gateway.requests.writes import patiently
from services.gateway.responses.messages import InputItem, ResponseObject
from services.gateway.streams.generation import Generation, Prompt
from services.gateway.streams.stream import Stream
from services.gateway.streams.stream_table import KEPT_MARK, StreamTable
from shared.bus.interface import Bus, BusError, KeyValue, RevisionConflict, Subscription
from shared.messages.catalogue import CANCEL_CALL, DROP_COPY, IDEMPOTENCY_KEYS, KEPT_CALLS, TAKEN_OVER
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.kept import CancelCall, IdempotencyClaim, KeptCall, TakenOver
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, TokenEntry
from shared.runtime.settings import GatewaySettings
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

WINDOW_HEADER = "x-resume-window"
KEY_HEADER = "idempotency-key"
EVENT_HEADER = "last-event-id"
STREAM_HEADER = "x-stream-id"
"""Header of an answer that may be resumed."""
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES - 4096
STOP_S = 5.0
WRITE_TRIES = 5
MAX_ENDED_BYTES = 32 * 1024 * 1024
"""The most bytes of plans and outputs of calls that have ended and are remembered for their keys; the oldest make room."""
SILENCE_S = 1.0
"""Time that a call waits for JetStream: a leader that is there answers sooner, and an election takes seconds."""
TAKE_OVER_S = 1.0
"""Time for other gateways to say that a call is read there, before it is given up here."""

SUPERSEDED = (
    f"Another call was first under this {KEY_HEADER}, so this one has ended: without Last-Event-ID the request gets the "
    "other one's answer."
)
"""What the readers of a call are told that began while it could not be known whether it is the first under its key."""

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NO_OUTPUT = TokenEntry(request_id="", epoch=0, offset=0, tokens=b"")
_WELL_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a call is to be kept."""

    window_s: float = 0.0
    """Seconds that it is kept after its end (see `KeptCall.window_s`)."""
    claim: str = ""
    digest: bytes = b""
    """Digest of the request, as an `IdempotencyClaim` has it."""
    asked_by: str = ""
    """What of the request asks for it; empty: nothing does, and the call goes on all the same where it cannot be kept."""
    has_events: bool = False
    """Whether the client has events of the call already: another call's would not fit to them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`KeptCall.plan`: all that makes an answer of tokens."""

    options: Options
    prompts: list[Prompt]
    response: ResponseObject | None = None
    """Response as it was opened; None: it is no call of the Responses API."""
    items: tuple[InputItem, ...] = ()
    """Its conversation."""
    is_stepwise: bool = False
    """Its events are counted, so that each token makes its own (see `Choice`)."""


_PLANS = msgspec.msgpack.Decoder(Plan)


def plan_of(record: KeptCall) -> Plan:
    return _PLANS.decode(record.plan)


class AlreadyKept(Exception):
    """Another request with the same idempotency key was first."""

    def __init__(self, record: KeptCall) -> None:
        super().__init__(record.call_id)
        self.record = record


class Kept:
    """A call of which this gateway has the streams. It listens to them as its readers do, and so keeps them open."""

    def __init__(self, calls: KeptCalls, record: KeptCall) -> None:
        """It has one reader."""
        self.record = record
        self.earlier: set[str] = set()
        """Marks of those that it was taken over from."""
        self.num_readers = 1
        self.is_shared = False
        """Another gateway has had it too, where it may still be read."""
        self.is_elsewhere = False
        """Another gateway has it too: it is left to that one in the end."""
        self.is_copied = False
        """Other gateways have its record too, as JetStream did not take it."""
        self._calls = calls
        self._streams: list[Stream | None] = []
        self._is_over = False
        self._why_ended: ErrorInfo | None = None
        """What its readers are told, where it was ended before its end."""
        self._timer: asyncio.Task[None] | None = None
        self.writing: asyncio.Task[Exception | None] | None = None
        """Its first record is being stored, perhaps while it runs: its outcome."""

    def hold(self, generation: Generation) -> None:
        """Holds the generation from now on, since its streams are open."""
        self._streams = [choice.stream for choice in generation.choices]
        if self._why_ended is not None:  # while it was being placed
            self._fail(self._why_ended)
            return
        for stream in filter(None, self._streams):
            stream.is_kept = True
            stream.listeners.append(self._on_news)
        self._on_news()

    def enter(self) -> None:
        self.num_readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """A reader needs no more of it."""
        self.num_readers -= 1
        self._on_news()  # it may have found a stop string
        if self.num_readers or self._is_over:
            return
        if self.record.window_s or self.is_shared:
            self._timer = self._calls.tasks.start(self._give_up_later(), "resume window")
        else:
            self._give_up()

    def taken_over(self) -> None:
        self.is_shared = self.is_elsewhere = True
        if not self.num_readers and not self._is_over:
            self._give_up()

    def release(self) -> None:
        """Gives the call up without ending its streams: it no longer belongs to this gateway."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in filter(None, self._streams):
            if self._on_news in stream.listeners:
                stream.listeners.remove(self._on_news)

    async def discard(self) -> None:
        """Drops a call that was not placed or has failed: the next attempt starts afresh, unless an
        election lasts."""
        self.release()
        await asyncio.wait({self._calls.forget(self, "failed")}, timeout=SILENCE_S)

    def cancel(self) -> None:
        """Cancels the call and tells its readers."""
        self._end(ErrorInfo(ErrorCode.CANCELLED, "The request was cancelled."), "cancelled")

    def supersede(self) -> None:
        """Ends the call, as its idempotency key stands for another one, and tells its readers."""
        self._end(ErrorInfo(ErrorCode.CONFLICT, SUPERSEDED, KEY_HEADER), "superseded")

    def _end(self, why: ErrorInfo, outcome: str) -> None:
        self.release()
        self._why_ended = why
        self._fail(why)
        self._calls.forget(self, outcome)

    def _fail(self, why: ErrorInfo) -> None:
        for stream in filter(None, self._streams):
            if stream.is_open:
                self._calls.table.fail(stream, why.code, why.message, why.param)

    async def _give_up_later(self) -> None:
        await asyncio.sleep(self.record.window_s)
        if self.is_shared and not self.is_elsewhere:
            self._calls.offer(self.record)
            await asyncio.sleep(TAKE_OVER_S)
        if not self.num_readers and not self._is_over:
            self._timer = None
            self._give_up()

    def _give_up(self) -> None:
        self.release()
        for stream in filter(None, self._streams):
            if self.is_elsewhere:
                self._calls.table.abandon(stream, "Another gateway has it.")
            elif not stream.listeners:
                self._calls.table.close(stream)
        if self.is_elsewhere:
            self._calls.let_go(self)
        else:
            self._calls.forget(self, "given_up")

    def _on_news(self) -> None:
        if self._is_over:
            return
        streams = list(filter(None, self._streams))
        if any(stream.failure is not None for stream in streams):
            self._close()
            self._calls.forget(self, "failed")
        elif all(stream.is_enough or stream.finish_reason in _WELL_ENDED for stream in streams):
            outputs = [_NO_OUTPUT if stream is None else _whole(stream) for stream in self._streams]
            self._close()
            self._calls.tasks.start(self._calls.store(self, outputs))

    def _close(self) -> None:
        self.release()
        for stream in filter(None, self._streams):
            if not stream.listeners:
                self._calls.table.close(stream)


def _whole(stream: Stream) -> TokenEntry:
    return TokenEntry(
        request_id=stream.request_id,
        epoch=stream.epoch,
        offset=0,
        tokens=stream.tokens.tobytes(),
        finish_reason=stream.finish_reason,
        logprobs=tuple(stream.logprobs),
        num_cached_tokens=stream.num_cached_tokens or 0,
        num_prompt_tokens=stream.num_prompt_tokens,
        timing=stream.timing,
    )


def _gone() -> ApiError:
    message = (
        f"There is no answer under this {KEY_HEADER} any more, so nothing comes after the {EVENT_HEADER}: it failed, or is "
        f"long over. Without {EVENT_HEADER} the request is made anew."
    )
    return ApiError(404, message, param=EVENT_HEADER, code="stream_not_found")


def _new_mark() -> str:
    """Mark of a new holder of a call."""
    return uuid.uuid4().hex


def _num_bytes(record: KeptCall) -> int:
    return len(record.plan) + sum(len(output.tokens) for output in record.outputs)


class KeptCalls:
    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        table: StreamTable,
        metrics: GatewayMetrics,
        settings: GatewaySettings,
        gateways: Callable[[], Collection[str]],
    ) -> None:
        """`gateways`: those that live."""
        self.table = table
        self.tasks = TaskSet()
        self._bus = bus
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._settings = settings
        self._here: dict[str, Kept] = {}
        self._leaving: set[str] = set()
        """Calls whose records are being removed."""
        self._ended: OrderedDict[str, KeptCall] = OrderedDict()
        """Calls that have ended here, by idempotency key: while JetStream cannot say, these are known."""
        self._num_ended_bytes = 0
        self._copies = RecordCopies(bus, gateway_id, gateways, self._known)
        self._records: KeyValue[KeptCall]
        self._claims: KeyValue[IdempotencyClaim]
        self._subscriptions: list[Subscription] = []
        metrics.kept_calls.set_function(lambda: len(self._here))

    async def start(self) -> None:
        self._records = await self._bus.key_value(KEPT_CALLS, max_bytes=self._settings.max_resume_bytes)
        self._claims = await self._bus.key_value(IDEMPOTENCY_KEYS)
        await self._copies.start()
        self._subscriptions = [
            await self._bus.subscribe(TAKEN_OVER, self._on_taken_over),
            await self._bus.subscribe(CANCEL_CALL, lambda message: self._cancel_here(message.call_id)),
            await self._bus.subscribe(DROP_COPY, lambda message: self._drop_ended_call(message.call_id)),
        ]

    async def stop(self) -> None:
        """Leaves the calls to other gateways. Call it while their streams are open."""
        await self._copies.stop()
        for subscription in self._subscriptions:
            await subscription.stop()
        for kept in self._here.values():
            kept.release()
        await self.tasks.wait_all(STOP_S)
        await self.tasks.end_all()

    # ------------------------------------------------------------------------------------------- what clients want

    def wish(self, headers: Mapping[str, str], tenant: str, path: str, message: Any, *, is_stream: bool) -> Wish | None:
        """What the headers ask for; None: the call is not to be kept. `message`: the decoded request. Raises `ApiError`
        400."""
        limit_s = self._settings.resume_s
        window, key = headers.get(WINDOW_HEADER), headers.get(KEY_HEADER)
        window_s = limit_s
        if window is not None:
            if not 0.0 < (window_s := seconds_of(window)) <= limit_s:
                allowed = (
                    f"a number of seconds up to {limit_s:g}" if limit_s else "absent, since resuming is turned off"
                )
                raise invalid(WINDOW_HEADER, f"The header {WINDOW_HEADER} must be {allowed}.")
            if key is None and not is_stream:
                raise invalid(WINDOW_HEADER, f"The header {WINDOW_HEADER} needs 'stream' or an {KEY_HEADER}.")
        if not limit_s or (window is None and key is None):
            return None
        if key is None:
            return Wish(window_s, asked_by=f"the header {WINDOW_HEADER}")
        if not _KEY.fullmatch(key):
            raise invalid(
                KEY_HEADER, f"The header {KEY_HEADER} must have 1 to 255 printable ASCII characters, no blanks."
            )
        claim = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
        try:
            encoded = msgspec.msgpack.encode(message)
        except OverflowError as error:
            raise invalid(KEY_HEADER, f"A request with the header {KEY_HEADER} cannot be kept: {error}.") from None
        digest = hashlib.sha256(path.encode() + b"\0" + encoded).digest()
        return Wish(window_s, claim, digest, f"the header {KEY_HEADER}", bool(headers.get(EVENT_HEADER)))

    async def claimed(self, wish: Wish | None) -> KeptCall | None:
        """The call that was made under the same idempotency key. Raises `ApiError` 422 where it was another request, 404
        where there is none and the client has events of it; `BusError`."""
        if wish is None or not wish.claim:
            return None
        entry, is_silent = None, False
        try:
            async with asyncio.timeout(SILENCE_S):
                entry = await self._claims.get_from_any_copy(wish.claim)
        except TimeoutError:
            is_silent = True  # the rest `keep` finds out
        except BusError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            is_silent = True
        if entry is not None and (record := await self._of_claim(entry.value, wish)) is not None:
            return record
        known = (self._known if is_silent else self._running)(wish.claim) or self._copies.of_claim(wish.claim)
        record = None if known is None else self._same(known, known.digest, wish)
        if record is None and wish.has_events and not is_silent:
            raise _gone()
        return record

    async def _of_claim(self, claim: IdempotencyClaim, wish: Wish) -> KeptCall | None:
        record = await self._get(claim.call_id)
        return None if record is None else self._same(record, claim.digest, wish)

    def _same(self, record: KeptCall, digest: bytes, wish: Wish) -> KeptCall | None:
        """The record of the wish's idempotency key, unless it has expired. Raises `ApiError` 422 where it is of another
        request."""
        if record.expires_s < time.time():
            return None
        if digest != wish.digest:
            raise ApiError(
                422,
                f"The {KEY_HEADER} of this request belongs to another one, until {self._settings.resume_s:g} s after the "
                "end of that one's answer; a request that is not the same needs a key of its own.",
                param=KEY_HEADER,
                code="idempotency_key_reused",
            )
        return record

    def _running(self, claim: str) -> KeptCall | None:
        """The call of an idempotency key that runs here."""
        return next((kept.record for kept in self._here.values() if kept.record.claim == claim), None)

    def _known(self, claim: str) -> KeptCall | None:
        """The call of an idempotency key that runs here, or has ended here and is still kept."""
        self._forget_ended()
        return self._running(claim) or self._ended.get(claim)

    def _remember_ended(self, record: KeptCall) -> None:
        if record.claim:
            self._drop_ended(record.claim)
            self._ended[record.claim] = record
            self._num_ended_bytes += _num_bytes(record)
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Those that are over, and those for which there is no room. All are kept for the same time."""
        while self._ended:
            claim, oldest = next(iter(self._ended.items()))
            if self._num_ended_bytes <= MAX_ENDED_BYTES and oldest.expires_s >= time.time():
                return
            self._drop_ended(claim)

    def _drop_ended(self, claim: str) -> None:
        if (found := self._ended.pop(claim, None)) is not None:
            self._num_ended_bytes -= _num_bytes(found)

    def _drop_ended_call(self, call_id: str) -> None:
        """Nobody can have the call any more."""
        for claim in [claim for claim, record in self._ended.items() if record.call_id == call_id]:
            self._drop_ended(claim)

    async def find(self, call_id: str, tenant: str) -> KeptCall:
        """Raises `ApiError` 404 (also where it is another tenant's), 410; `BusError`."""
        record = await self._get(call_id) if _CALL_ID.fullmatch(call_id) else None
        if record is None or record.tenant != tenant:
            self._metrics.resumed_calls.labels("not_found").inc()
            message = f"There is no stream '{call_id[:100]}' to resume: it never was, was given up, or is long over."
            raise ApiError(404, message, param="stream_id", code="stream_not_found")
        if record.expires_s < time.time():
            self._metrics.resumed_calls.labels("expired").inc()
            message = f"The stream '{call_id}' ended more than {self._settings.resume_s:g} s ago, and is kept no more."
            raise ApiError(410, message, param="stream_id", code="stream_expired")
        return record

    async def _get(self, call_id: str) -> KeptCall | None:
        if (kept := self._here.get(call_id)) is not None:
            return kept.record
        copy = self._copies.find(call_id)
        try:
            async with asyncio.timeout(None if copy is None else SILENCE_S):
                entry = await self._records.get_from_any_copy(call_id)
        except (BusError, TimeoutError):
            if copy is None:
                raise
            entry = None
        return copy if entry is None else entry.value

    # --------------------------------------------------------------------------------------- from begin to end

    @staticmethod
    def new_id(prefix: str) -> str:
        return f"{prefix}{KEPT_MARK}{uuid.uuid4().hex}"

    async def keep(self, wish: Wish, record: KeptCall) -> Kept | None:
        """Before the call is placed; None: it cannot be kept. Raises `AlreadyKept`; `ApiError` 400 where it is too large;
        `BusError`."""
        record = msgspec.structs.replace(
            record,
            window_s=wish.window_s,
            claim=wish.claim,
            digest=wish.digest,
            expires_s=record.arrived_s + record.template.timeout_s + self._settings.resume_s,
            holder=_new_mark(),
        )
        num_bytes = len(msgspec.msgpack.encode(record))
        if num_bytes > MAX_RECORD_BYTES and not wish.asked_by:
            logger.info("%s is not kept: its record takes %d bytes", record.call_id, num_bytes)
            return None
        if num_bytes > MAX_RECORD_BYTES:
            message = (
                f"A request with {wish.asked_by} may take {MAX_RECORD_BYTES} bytes as it is kept, prompts as tokens "
                f"among them; this one takes {num_bytes}."
            )
            raise invalid(wish.asked_by.removeprefix("the header "), message, "too_large_to_keep")
        kept = Kept(self, record)
        kept.writing = self.tasks.start(self._begin_record(kept))
        is_spread = False
        try:
            await asyncio.wait({kept.writing}, timeout=SILENCE_S)
            if not kept.writing.done() and wish.asked_by:
                await self._spread(kept, wish)
                is_spread = True
            if wish.has_events and not kept.writing.done():
                raise refusal("the answer whose events the client has cannot be looked for")
            if wish.has_events and kept.writing.result() is None:
                raise _gone()
        except BaseException:
            kept.writing.cancel()
            if is_spread:
                self._copies.drop(record.call_id)
            self.tasks.start(self._purge(kept))
            raise
        if kept.writing.done() and (failure := kept.writing.result()) is not None:
            if not wish.asked_by:
                return None
            if is_spread:
                self._copies.drop(record.call_id)
            raise failure
        self._here[record.call_id] = kept
        return kept

    async def _spread(self, kept: Kept, wish: Wish) -> None:
        """While JetStream elects. Raises `AlreadyKept`, `ApiError`, `BusError`."""
        outcome = "refused"
        try:
            first = await self._copies.spread(kept.record)
            if kept.writing is not None and kept.writing.done():
                outcome = "stored"  # JetStream says who is first
            elif first is not None and (record := self._same(first, first.digest, wish)) is not None:
                outcome = "joined"
                raise AlreadyKept(record)
            else:
                outcome, kept.is_copied = "copied", True
        finally:
            self._metrics.copied_records.labels(outcome).inc()

    async def _begin_record(self, kept: Kept) -> Exception | None:
        """Stores the record and its claim. What came of it: `AlreadyKept`, `ApiError`, `BusError`; the first two end the
        call."""
        record = kept.record

        async def write() -> None:
            await self._hold(record, kept.earlier)
            await self._claim(record)

        failure = await self._patiently(record.call_id, write)
        if not isinstance(failure, AlreadyKept | ApiError):
            return failure
        if self._here.get(record.call_id) is kept:
            kept.writing = None
            kept.supersede()
        else:
            self.tasks.start(self._purge(kept))
        return failure

    async def _hold(self, record: KeptCall, earlier: Collection[str]) -> None:
        """Stores the record, in place of one whose mark is `earlier`. It stays as it is where an earlier try has stored it,
        where it was taken over since, and where the call has ended. Raises `BusError`."""
        for _ in range(WRITE_TRIES):
            with suppress(RevisionConflict):
                await self._records.create(record.call_id, record)
                return
            stored = await self._records.get(record.call_id)
            if stored is None:
                continue
            if stored.value.holder not in earlier or stored.value.outputs:
                return
            with suppress(RevisionConflict):
                await self._records.update(record.call_id, record, stored.revision)
                return
        raise BusError(
            ErrorInfo(ErrorCode.UNAVAILABLE, f"Others write the record of {record.call_id} at the same time.")
        )

    async def _end_record(self, record: KeptCall, *, is_claimed: bool) -> Exception | None:
        """Stores the record with its output, as `_begin_record`."""

        async def write() -> None:
            await self._records.put(record.call_id, record)
            if not is_claimed:
                await self._claim(record)

        return await self._patiently(record.call_id, write)

    async def _patiently(self, call_id: str, write: Callable[[], Awaitable[None]]) -> Exception | None:
        """What came of `write`, tried again while JetStream elects."""
        try:
            await patiently(f"what is kept of {call_id} is not written", write)
            return None
        except (AlreadyKept, ApiError, BusError) as error:
            return error

    async def _claim(self, record: KeptCall) -> None:
        """Stores the claim, though it is there: whoever saw it before is not to remove it. Nothing to do where the client
        gave no key. Raises `AlreadyKept`, `ApiError` 422, `BusError`."""
        if not record.claim:
            return
        claim = IdempotencyClaim(record.call_id, record.digest)
        for _ in range(WRITE_TRIES):
            # Of several that find a claim which is over, one replaces it, and the others find that one's.
            with suppress(RevisionConflict):
                await self._claims.create(record.claim, claim)
                return
            entry = await self._claims.get(record.claim)
            if entry is None:
                continue
            if entry.value != claim:
                first = await self._of_claim(entry.value, Wish(claim=record.claim, digest=record.digest))
                if first is not None:
                    raise AlreadyKept(first)
            with suppress(RevisionConflict):
                await self._claims.update(record.claim, claim, entry.revision)
                return
        message = f"Others use the same {KEY_HEADER} at the same time."
        raise BusError(ErrorInfo(ErrorCode.UNAVAILABLE, message, KEY_HEADER))

    async def _purge(self, kept: Kept) -> None:
        """Removes the record and its claim, though JetStream elects: who tries again is not to find a call that is over.
        One that was taken up again meanwhile stays, and one that has ended well elsewhere.

        Whoever takes it up stores first the record, with another mark, and then the claim, though both are there. So where
        the record has no other mark, nobody has stored the claim that was seen before it; one that is stored later stays."""
        call_id, key, marks = kept.record.call_id, kept.record.claim, {kept.record.holder, *kept.earlier}

        async def purge() -> None:
            if call_id not in self._leaving:
                return
            claim = await self._claims.get(key) if key else None
            stored = await self._records.get(call_id)
            if stored is not None:
                is_own = stored.value.holder in marks and not stored.value.outputs
                if not is_own or not await self._records.purge_revision(call_id, stored.revision):
                    return
            if claim is not None and claim.value.call_id == call_id:
                await self._claims.purge_revision(key, claim.revision)

        self._leaving.add(call_id)
        await self._patiently(call_id, purge)  # it expires where that fails
        self._leaving.discard(call_id)

    async def join(self, record: KeptCall, generation: Generation) -> Kept | None:
        """A further reader of the call, whose streams are the generation's then; None: it has ended."""
        if record.outputs:
            self._metrics.resumed_calls.labels("stored").inc()
            await generation.attach(record.outputs)
            return None
        kept = self._here.get(record.call_id)
        self._metrics.resumed_calls.labels("elsewhere" if kept is None else "here").inc()
        if kept is not None:
            kept.enter()
            try:
                await generation.attach(())
            except BaseException:
                kept.leave()
                raise
            return kept
        self._leaving.discard(record.call_id)
        kept = self._here[record.call_id] = Kept(self, record)
        self._take_over(kept)
        try:
            await generation.attach(())
        except BaseException:
            kept.release()
            self.let_go(kept)
            raise
        kept.hold(generation)
        return kept

    def _take_over(self, kept: Kept, *earlier: str) -> None:
        """The call is this gateway's from now on. `earlier`: marks of those whose it was, beside the record's."""
        kept.earlier |= {kept.record.holder, *earlier}
        kept.is_shared = True
        kept.record = msgspec.structs.replace(kept.record, holder=_new_mark())
        if kept.writing is not None:
            kept.writing.cancel()
        kept.writing = self.tasks.start(self._begin_record(kept))
        self._bus.publish(TAKEN_OVER, TakenOver(kept.record.call_id, self._gateway_id))

    def offer(self, record: KeptCall) -> None:
        """Lets other gateways take the call over, as nobody reads it here any more."""
        self._bus.publish(TAKEN_OVER, TakenOver(record.call_id, self._gateway_id, record.holder))

    def _on_taken_over(self, message: TakenOver) -> None:
        kept, is_own = self._here.get(message.call_id), message.gateway_id == self._gateway_id
        if message.left:
            if kept is not None and kept.num_readers and not is_own:
                self._take_over(kept, message.left)
            return
        if not is_own:
            self._leaving.discard(message.call_id)
        if kept is not None and is_own:
            kept.is_elsewhere = False  # of several at once the last has it
        elif kept is not None:
            kept.taken_over()

    def cancel(self, call_id: str) -> None:
        """Ends the call, whichever gateways have it."""
        self._cancel_here(call_id)
        self._bus.publish(CANCEL_CALL, CancelCall(call_id))

    def _cancel_here(self, call_id: str) -> None:
        if (kept := self._here.get(call_id)) is not None:
            kept.cancel()

    async def store(self, kept: Kept, outputs: list[TokenEntry]) -> None:
        """All of the call has come."""
        expires_s = time.time() + self._settings.resume_s
        kept.record = msgspec.structs.replace(kept.record, outputs=outputs, expires_s=expires_s)
        outcome = "stored"
        # What is still being written must not take the place of what comes now.
        is_claimed = kept.writing is not None and not kept.writing.cancel() and kept.writing.result() is None
        if len(msgspec.msgpack.encode(kept.record)) > MAX_RECORD_BYTES:
            outcome = "too_large"  # for as long as the instance has it, it may be had
        elif isinstance(failure := await self._end_record(kept.record, is_claimed=is_claimed), BusError):
            outcome = "failed"
        elif failure is not None:
            outcome = "superseded"  # its readers have all of it; the key stands for another one
        self._metrics.kept_call_ends.labels(outcome).inc()
        if outcome != "superseded":
            self._remember_ended(kept.record)
        self.let_go(kept)

    def forget(self, kept: Kept, outcome: str) -> asyncio.Task[None]:
        """Nobody can have the call any more, from now on here, and everywhere when the task has ended."""
        self.let_go(kept)
        if kept.is_copied or self._copies.find(kept.record.call_id) is not None:
            self._copies.drop(kept.record.call_id)
        return self.tasks.start(self._forget(kept, outcome))

    async def _forget(self, kept: Kept, outcome: str) -> None:
        await self._purge(kept)
        self._metrics.kept_call_ends.labels(outcome).inc()

    async def remove(self, call_id: str) -> None:
        """Its owner wants it gone; where it runs it runs on. Returns though JetStream elects: it goes then."""
        self._drop_ended_call(call_id)
        self._copies.drop(call_id)
        removal = self.tasks.start(self._patiently(call_id, lambda: self._records.purge(call_id)))
        await asyncio.wait({removal}, timeout=SILENCE_S)

    def let_go(self, kept: Kept) -> None:
        if kept.writing is not None:
            kept.writing.cancel()
        if self._here.get(kept.record.call_id) is kept:
            del self._here[kept.record.call_id]
