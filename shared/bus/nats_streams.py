"""JetStream streams under the bus: declaring them, restoring them after a loss of the server, and its errors.

A stream is declared by whoever needs it first, or, where users are named after roles, by those that the catalogue says;
others wait for it. It is never deleted here, because other processes use it. Every stream is bounded in bytes, all of which
JetStream sets aside; one that exists with another bound (of an earlier version, or because there was less room) gets the one
that is declared, so does one with another rule for rollups (a write that takes the place of others), and one that differs in
anything else is kept as it is.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamInfo

from shared.bus.interface import BusError, RevisionConflict, Room, StreamUse
from shared.bus.nats_client import DirectClient, NotPermittedError
from shared.bus.stream_health import StreamHealth, health_of
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.settings import SettingsError

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
ASK_AGAIN_S = 1.0
"""After which a read that is not answered is asked once more."""
WRITE_RETRY_S = 0.2
"""While nobody takes what is to be written, so that nothing of it can be stored yet."""
LATE_ANSWER_S = 0.5
"""What a stream that can store still has, after it answered, for a write of before."""
RETRY_AFTER_S = 2.0
"""What a client is told while JetStream does not answer; an election takes some seconds."""
WAIT_INTERVAL_S, COMPLAINT_INTERVAL_S = 0.25, 10.0
"""Between two attempts at a start, and between two lines about the same one."""
DECLARED_WITHIN_S, DECLARED_POLL_S = 20.0, 0.2
"""Time for a stream that another role declares."""
DUPLICATE_WINDOW_S = 120.0
"""How long a message id is remembered."""
MIN_STREAM_BYTES = 16 * 1024 * 1024
MAX_LOOKED_AT, MAX_TOLD = 200, 5
"""Messages of a damaged stream that are looked at one by one, and those of them that a sentence names."""

_OWN_STREAMS = ("KV_tideway_", "OBJ_tideway_")

# JetStream's error codes.
_INSUFFICIENT_STORAGE = (10023, 10028, 10047)
_NO_PEERS = 10005
_NOT_CLUSTERED = 10074
_EXISTS_WITH_OTHER_CONFIGURATION = 10058
_NOT_STORED = 10077


_NO_SPACE = os.strerror(errno.ENOSPC).lower()
"""What the server's errors quote when the disk is full."""

T = TypeVar("T")


def silent(message: str) -> BusError:
    """The refusal where JetStream, or one stream of it, does not answer now: whatever is asked for may be there."""
    return BusError(ErrorInfo(ErrorCode.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S))


@contextmanager
def bus_errors(what: str) -> Iterator[None]:
    """Turns every error of nats-py into a `BusError` that says what failed."""
    try:
        yield
    except nats.js.errors.KeyWrongLastSequenceError:
        raise RevisionConflict(ErrorInfo(ErrorCode.CONFLICT, f"{what}: another revision is there")) from None
    except nats.js.errors.InvalidKeyError:
        raise BusError(ErrorInfo(ErrorCode.BAD_REQUEST, f"{what}: not a valid key")) from None
    except nats.errors.TimeoutError:
        raise silent(f"{what}: JetStream did not answer in time") from None
    except nats.errors.MaxPayloadError:
        raise BusError(ErrorInfo(ErrorCode.BAD_REQUEST, f"{what}: larger than NATS's limit for a message")) from None
    except nats.js.errors.APIError as error:
        code, description = ErrorCode.INTERNAL, error.description or ""
        if _NO_SPACE in description:
            code = ErrorCode.STORAGE_FULL
        elif error.err_code == _NOT_STORED:  # a limit of the stream
            code = ErrorCode.OVERLOADED
        elif is_temporary(error):
            raise silent(f"{what}: {description or 'JetStream is not there'}") from None
        raise BusError(ErrorInfo(code, f"{what}: {description or 'JetStream is not there'}")) from None
    except (nats.js.errors.NoStreamResponseError, nats.errors.NoRespondersError):
        raise silent(f"{what}: JetStream is not there, or the stream has no leader now") from None
    except NotPermittedError as error:
        raise BusError(ErrorInfo(ErrorCode.NOT_PERMITTED, f"{what}: {error}")) from None
    except nats.errors.Error as error:
        raise silent(f"{what}: {error}") from None


def _num_current(info: StreamInfo) -> int:
    """Copies of a stream that are whole, where its leader tells of them."""
    if info.cluster is None:
        return 1
    peers = info.cluster.replicas or []
    return bool(info.cluster.leader) + sum(bool(peer.current) and not peer.offline for peer in peers)


def is_temporary(error: nats.js.errors.APIError) -> bool:
    """Whether JetStream would do the same later: it elects, or misses servers that are expected back."""
    return (error.code == 503 or error.err_code == _NO_PEERS) and not _lacks_room(error)


def _lacks_room(error: nats.js.errors.APIError) -> bool:
    """Whether a stream cannot be made because it is too large: for the server, or for as many servers as it has copies."""
    is_large_for_peers = error.err_code == _NO_PEERS and "insufficient storage" in (error.description or "")
    return error.err_code in _INSUFFICIENT_STORAGE or is_large_for_peers


def _damage(name: str, keys: list[str]) -> str:
    told = ", ".join(keys[:MAX_TOLD]) + (", ..." if len(keys) > MAX_TOLD else "")
    return f"stream {name} is damaged on the disk of NATS, what lay under these keys is lost: {told}"


def delivery(reply: bytes) -> tuple[int, int, int]:
    """Stream sequence, consumer sequence and number of pending messages, from the reply subject of a
    message: `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>`, or with domain and
    account before the stream (NATS architecture decision record 15)."""
    tokens = reply.split(b".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3])


async def _asked_again(read: Callable[[], Awaitable[T]]) -> T:
    """The first outcome of `read`, begun again every `ASK_AGAIN_S`: a leader that was elected meanwhile answers only what it
    is asked from then on."""
    asked: set[asyncio.Future[T]] = set()
    try:
        while True:
            asked.add(asyncio.ensure_future(read()))
            done, _ = await asyncio.wait(asked, timeout=ASK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done.pop().result()
    finally:
        for each in asked:
            if not each.cancel():
                each.exception()  # that nobody wants is not told of


class Streams:
    """The streams that this process declared on its connection."""

    def __init__(
        self, client: DirectClient, own: Set[str] | None = None, *, num_replicas: int = 1, wait_s: float = 0.0
    ) -> None:
        """`own`: the streams that this user may make; None: any. `num_replicas`: of streams that are made here. `wait_s`:
        how long whoever wants a stream for the first time waits for JetStream."""
        self.client = client
        self._own = own
        self.num_replicas = num_replicas
        self._wait_s = wait_s
        self.context: JetStreamContext = client.jetstream(timeout=CALL_TIMEOUT_S)
        self.writing: JetStreamContext = client.jetstream(timeout=3 * CALL_TIMEOUT_S)
        """Context for what `write` publishes, which sees to its own deadline."""
        self._declared: dict[str, StreamConfig] = {}
        self.unwritable: set[str] = set()
        """Streams whose last write failed because the server's disk is full, so far as is known."""
        self.damaged: dict[str, list[str]] = {}
        """By stream: keys or objects that its files hold and cannot give, so far as was looked."""

    async def patiently(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """The outcome of `call`, tried again while JetStream does not answer, for `wait_s` at most. Says so in the log."""
        give_up, complained = time.monotonic() + self._wait_s, float("-inf")
        while True:
            try:
                return await call()
            except BusError as error:
                now = time.monotonic()
                if error.code is not ErrorCode.UNAVAILABLE or now >= give_up:
                    raise
                if now - complained >= COMPLAINT_INTERVAL_S:
                    complained = now
                    logger.warning("waiting for NATS (%s): %s", what, error.info.message)
            await asyncio.sleep(WAIT_INTERVAL_S)

    async def health(self, name: str) -> StreamHealth:
        """Health of a stream as its leader tells it, or a server that knows of no leader. Raises `BusError`."""
        with bus_errors(f"look at stream {name}"):
            answer = await self.client.request(f"$JS.API.STREAM.INFO.{name}", timeout=CALL_TIMEOUT_S)
            info = json.loads(answer.data)
            if error := info.get("error"):
                raise nats.js.errors.APIError.from_error(error)
        return health_of(info)

    async def write(
        self,
        name: str,
        what: str,
        publish: Callable[[], Awaitable[T]],
        stored: Callable[[], Awaitable[T | None]] | None = None,
        *,
        is_repeatable: bool = False,
    ) -> T:
        """A write to the stream `name`, by `writing`. `stored` looks whether it took effect: its outcome, or None.
        `is_repeatable`: twice has the effect of once. Raises `BusError`.

        nats-server 2.12 answers that there is no space, and goes on when there is. Later ones (2.15.1) answer nothing, and
        store nothing in that stream until they are started again: that the stream could store and answers meanwhile tells it
        from a server that is away, and from a stream without a leader."""
        try:
            with bus_errors(what):
                result = await self._publish(name, what, publish, stored, is_repeatable=is_repeatable)
        except BusError as error:
            if error.code is ErrorCode.STORAGE_FULL and name not in self.unwritable:
                logger.error("%s", error.info.message)
                self.unwritable.add(name)
            raise
        if name in self.unwritable:
            logger.warning("stream %s can be written again", name)
            self.unwritable.discard(name)
        return result

    async def _publish(
        self,
        name: str,
        what: str,
        publish: Callable[[], Awaitable[T]],
        stored: Callable[[], Awaitable[T | None]] | None,
        *,
        is_repeatable: bool,
    ) -> T:
        """The outcome of `publish`, begun again while nobody takes it. One that is taken and not answered in time is waited
        for while the stream is looked at: a server that hung answers it late. One that replaces a message whose file is
        damaged is stored and never answered (nats-server 2.12 to 2.15).

        Between the servers of a cluster a message may be lost with the one that hung: what can be repeated is published once
        more before a disk is held full."""
        began_s, is_doubted = time.monotonic(), self.num_replicas > 1 and name not in self.unwritable
        while True:
            asked_s = time.monotonic()
            writing = asyncio.ensure_future(publish())
            try:
                await asyncio.wait({writing}, timeout=CALL_TIMEOUT_S)
                if not writing.done():
                    why = await self._why_not_stored(name, time.monotonic() - asked_s)
                    await asyncio.wait({writing}, timeout=LATE_ANSWER_S)
                    if not writing.done():
                        is_full = why.code is ErrorCode.STORAGE_FULL
                        if is_full and stored is not None and (outcome := await stored()) is not None:
                            logger.warning("%s: stored, though stream %s did not answer", what, name)
                            return outcome
                        if is_full and is_doubted and is_repeatable:
                            is_doubted = False
                            continue
                        if is_full and is_doubted:
                            why = silent(f"stream {name} did not answer in time").info
                        raise BusError(msgspec.structs.replace(why, message=f"{what}: {why.message}"))
                return writing.result()
            except nats.js.errors.NoStreamResponseError:
                if time.monotonic() - began_s > CALL_TIMEOUT_S:
                    raise
                await asyncio.sleep(WRITE_RETRY_S)
            except nats.js.errors.KeyWrongLastSequenceError:  # the first one was stored late
                if stored is None or is_doubted or (outcome := await stored()) is None:
                    raise
                return outcome
            finally:
                writing.cancel()

    async def read(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` has from the stream's leader. Where streams have copies, a node that hung and led the stream may
        answer as if it still did: that something is not there is believed when the leader was found to be one. Raises
        nats-py's errors, and `BusError`."""
        give_up_s, is_believed = time.monotonic() + CALL_TIMEOUT_S, self.num_replicas == 1
        while True:
            try:
                return await _asked_again(read)
            except nats.js.errors.NotFoundError:
                if is_believed:
                    raise
            problem = (await self.health(name)).problem
            is_believed = not problem
            if problem and time.monotonic() >= give_up_s:
                raise silent(f"stream {name} {problem}")
            if problem:
                await asyncio.sleep(WRITE_RETRY_S)

    async def purge_up_to(self, name: str, subject: str, sequence: int) -> int:
        """Removes the messages of the subject whose sequence is that or a lower one; how many there were. Raises nats-py's
        errors."""
        body = json.dumps({"filter": subject, "seq": sequence + 1}).encode()
        answer = await self.client.request(f"$JS.API.STREAM.PURGE.{name}", body, timeout=CALL_TIMEOUT_S)
        purged = json.loads(answer.data)
        if error := purged.get("error"):
            raise nats.js.errors.APIError.from_error(error)
        return int(purged["purged"])

    async def newest(self, name: str, subjects: str) -> int:
        """Sequence of the newest message of the `subjects`, as the stream's leader has it; 0: there is none. Raises
        `BusError`."""
        with bus_errors(f"look at stream {name}"):
            if problem := (await self.health(name)).problem:
                raise silent(f"stream {name} {problem}")
            try:
                message = await self.read(name, lambda: self.context.get_last_msg(name, subjects))
            except nats.js.errors.NotFoundError:
                return 0
        return message.seq or 0

    async def _why_not_stored(self, name: str, waited_s: float) -> ErrorInfo:
        """Why the stream has not answered a write for `waited_s`."""
        asked_s = time.monotonic()
        try:
            health = await self.health(name)
        except BusError as error:
            return error.info
        if health.problem:
            return silent(f"stream {name} {health.problem}").info
        if health.writable_for_s < waited_s or time.monotonic() - asked_s > LATE_ANSWER_S:
            return silent(f"stream {name} did not answer in time").info
        message = f"stream {name} does not store it, though it answers; the disk of NATS may be full"
        return ErrorInfo(ErrorCode.STORAGE_FULL, message)

    async def look_for_damage(self, name: str, subjects: str, seen: Set[str]) -> None:
        """Keeps in `damaged` which of the `subjects` (a pattern with `>` at its end), but for those `seen`, have a message
        that the stream counts and its leader cannot read. Raises `BusError`."""
        with bus_errors(f"look at stream {name}"):
            unseen = sorted(await self._counted(name, subjects) - seen)
            lost = [each for each in unseen[:MAX_LOOKED_AT] if await self._is_damaged(name, each)]
        keys = [subject.removeprefix(subjects[:-1]) for subject in lost]
        if keys and keys != self.damaged.get(name):
            logger.error("%s", _damage(name, keys))
        self.damaged[name] = keys

    async def _counted(self, name: str, subjects: str) -> set[str]:
        info = await self.context.stream_info(name, subjects_filter=subjects)
        return set(info.state.subjects or ())

    async def _is_damaged(self, name: str, subject: str) -> bool:
        try:
            await self.read(name, lambda: self.context.get_last_msg(name, subject))
            return False
        except nats.js.errors.NotFoundError:
            return subject in await self._counted(name, subject)  # else it has gone meanwhile

    def damages(self) -> list[str]:
        """Sentences for operators."""
        return [_damage(name, keys) for name, keys in sorted(self.damaged.items()) if keys]

    def disk_has_space(self) -> None:
        """A write of some size was stored. Streams that are rarely written would be held unwritable for long; one that is
        is so again at its next write."""
        if self.unwritable:
            logger.warning("NATS stores on its disk again (%s)", ", ".join(sorted(self.unwritable)))
            self.unwritable.clear()

    async def provide(self, config: StreamConfig) -> None:
        """Declares the stream, unless this process has done so; waits for JetStream. Raises `BusError`."""
        if self._declared.get(str(config.name)) != config:
            await self.patiently(f"stream {config.name}", lambda: self.declare(config))

    async def declare(self, config: StreamConfig) -> None:
        """Makes the stream if it is not there; may be called by many processes at once. Raises `BusError`, and
        `SettingsError` where the server cannot have so many copies of one."""
        name, asked = str(config.name), config
        if self._own is not None and name not in self._own:
            await self._wait_for(name)
            self._declared[name] = asked
            return
        config = config.evolve(num_replicas=self.num_replicas)
        has_taken = False
        with bus_errors(f"declaring stream {name}"):
            while True:
                try:
                    await self.context.add_stream(config)
                    break
                except nats.js.errors.APIError as error:
                    if error.err_code == _NOT_CLUSTERED:
                        reason = "the server at TIDEWAY_NATS_URL is in no cluster"
                        raise SettingsError(f"TIDEWAY_NATS_REPLICAS={self.num_replicas}: {reason}") from None
                    if error.err_code == _EXISTS_WITH_OTHER_CONFIGURATION:
                        if not await self._resize(config):
                            logger.warning("stream %s exists with another configuration, which is kept", name)
                        break
                    if _lacks_room(error) and await self._exists(name):
                        # The server looks for room for the whole of it before it looks for the stream.
                        await self._resize(config)
                        break
                    # JetStream reserves the whole of max_bytes; on a small machine a smaller stream is better than none.
                    max_bytes = (config.max_bytes or 0) // 2
                    if not _lacks_room(error):
                        raise
                    if max_bytes < MIN_STREAM_BYTES:
                        if has_taken or not await self._take_room(config):
                            raise
                        has_taken = True
                        continue
                    config = config.evolve(max_bytes=max_bytes)
                    logger.warning("JetStream has no room for stream %s; trying %d bytes", name, max_bytes)
        self._declared[name] = asked

    async def _wait_for(self, name: str) -> None:
        with bus_errors(f"waiting for stream {name}"):
            is_told = False
            try:
                async with asyncio.timeout(DECLARED_WITHIN_S):
                    while (is_made := await self._is_made(name)) is not True:
                        if is_made is False and not is_told:
                            logger.info("stream %s is not there; waiting for the service that makes it", name)
                            is_told = True
                        await asyncio.sleep(DECLARED_POLL_S)
            except TimeoutError:
                if not is_told:
                    raise silent(f"stream {name} does not answer") from None
                raise silent(f"stream {name} is not there, and this user of NATS may not make it") from None

    async def _is_made(self, name: str) -> bool | None:
        """None: that is not known; one answer that is late ends no waiting."""
        try:
            return await self._exists(name)
        except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
            return None

    async def _take_room(self, config: StreamConfig) -> bool:
        """Takes what a stream needs at least from another of ours in the same storage: the one with the most room that it
        does not use, if it keeps half of that."""
        needed = config.max_bytes or 0
        unused = {}
        for info in await self.context.streams_info():
            present, name = info.config, str(info.config.name)
            is_ours = name.startswith(_OWN_STREAMS) if self._own is None else name in self._own
            if is_ours and present.storage == config.storage:
                unused[name] = ((present.max_bytes or 0) - info.state.bytes, present)
        free, largest = max(unused.values(), key=lambda each: each[0], default=(0, config))
        if needed <= 0 or free < 2 * needed:
            return False
        await self.context.update_stream(largest.evolve(max_bytes=(largest.max_bytes or 0) - needed))
        logger.warning("stream %s gives %d bytes to stream %s", largest.name, needed, config.name)
        return True

    async def _exists(self, name: str) -> bool:
        try:
            await self.context.stream_info(name)
            return True
        except nats.js.errors.NotFoundError:
            return False

    async def _resize(self, config: StreamConfig) -> bool:
        """Gives a stream that exists the size of `config`, if there is room, but never less than what it holds and a third
        more, and its rule for rollups; False: it has both already."""
        name = str(config.name)
        info = await self.context.stream_info(name)
        present, max_bytes = info.config, config.max_bytes or 0
        if (has := present.num_replicas or 1) != self.num_replicas:
            logger.warning(
                "stream %s keeps %d copies: `tideway nats-replicas %d` moves it", name, has, self.num_replicas
            )
        is_as_declared = bool(present.allow_rollup_hdrs) == bool(config.allow_rollup_hdrs)
        if is_as_declared and present.max_bytes == max_bytes:
            return False
        if (present.max_bytes or 0) > max_bytes > 0:
            max_bytes = min(present.max_bytes or 0, max(max_bytes, info.state.bytes + info.state.bytes // 3))
        if is_as_declared and present.max_bytes == max_bytes:
            return True
        try:
            await self.context.update_stream(
                present.evolve(max_bytes=max_bytes, allow_rollup_hdrs=config.allow_rollup_hdrs)
            )
            logger.info("stream %s has room for %d bytes now, had %s", name, max_bytes, present.max_bytes)
        except nats.js.errors.APIError as error:
            logger.warning("stream %s keeps room for %s bytes: %s", name, present.max_bytes, error.description)
        return True

    async def own_names(self) -> list[str]:
        """Names of Tideway's streams that this user may change."""
        with bus_errors("look at the streams"):
            names = {str(info.config.name) for info in await self.context.streams_info()}
        return sorted(
            name for name in names if (name.startswith(_OWN_STREAMS) if self._own is None else name in self._own)
        )

    async def set_replicas(self, name: str, num_replicas: int) -> int:
        """Gives a stream so many copies, which it makes or drops from now on; `health` tells when it has them. Returns how
        many it had. Raises `BusError`."""
        with bus_errors(f"change stream {name}"):
            config = (await self.context.stream_info(name)).config
            had = config.num_replicas or 1
            if had != num_replicas:
                await self.context.update_stream(config.evolve(num_replicas=num_replicas))
        return had

    async def room(self, name: str) -> Room:
        with bus_errors(f"look at stream {name}"):
            info = await self.context.stream_info(name)
        return Room(info.state.bytes, info.config.max_bytes or 0)

    async def uses(self) -> dict[str, StreamUse]:
        uses: dict[str, StreamUse] = {}
        num_told = 0
        with bus_errors("look at the streams"):
            # A page of the answer is bounded by the server (256). One that is added meanwhile moves others to the next page.
            while page := await self.context.streams_info(offset=num_told):
                num_told += len(page)
                for info in page:
                    state, most = info.state, max(0, info.config.max_bytes or 0)
                    uses[str(info.config.name)] = StreamUse(
                        state.messages, state.bytes, most, state.consumer_count,
                        num_copies=max(info.config.num_replicas or 1, self.num_replicas), num_current=_num_current(info),
                    )  # fmt: skip
        return uses

    async def declare_again(self) -> None:
        """After a reconnect: a server without its store has forgotten the streams, or those in memory."""
        self.unwritable.clear()
        for config in list(self._declared.values()):
            await self.declare(config)
