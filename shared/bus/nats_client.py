"""nats-py's client with a hot path of its own: synchronous publishing, direct dispatch, one request multiplexer.

nats-py supplies the connection, most of the protocol parser, reconnecting and JetStream's management calls. Replaced are:
- sending: commands are collected and written once per event loop turn, with no task or future per message;
- receiving: handlers are called by the parser, in order of arrival, with no queue or task per subscription (so nothing
  is ever dropped on this side for slowness; a slow process is pushed back by TCP);
- requests: those in flight when the connection is lost fail at once instead of waiting for their timeout;
- errors that the server reports lead to a reconnect, where nats-py would close the client for good;
- what the user may not publish or subscribe to fails at once, where it would time out;
- reply subjects are random: who was asked once may publish to all inboxes of the asker, and one of nats-py's tells the next.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import AuthorizationError, Error, MaxPayloadError, NoRespondersError, ProtocolError, TimeoutError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from shared.bus.codec import parse_headers

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 * 1024 * 1024
"""Buffered for the server, while disconnected or while it reads too slowly; what exceeds it is dropped."""
_RETRY_WRITE_S = 0.005

_PING = b"PING\r\n"

Handler = Callable[[bytes, bytes, bytes | None, bytes], None]
"""(subject, reply subject, header block or None, body). Must not block."""


_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"")
"""NATS' error text as nats-py hands it on, in lower case."""


class NotPermittedError(Error):
    """The server refuses the user this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"this user of NATS may not use {subject}")
        self.subject = subject


class NotConnectedError(Error):
    def __str__(self) -> str:
        return "not connected to NATS"


class DirectClient(Client):
    def __init__(self, on_disconnect: Callable[[], None]) -> None:
        super().__init__()
        self._ps = DirectParser(self, self._deliver)
        self._on_disconnect = on_disconnect
        self._direct: dict[int, Handler] = {}
        self.refused: dict[int, NotPermittedError] = {}
        """Subscriptions that the server does not permit."""
        self._is_write_scheduled = False
        self._inbox = ""
        self._exchanges: dict[
            bytes, tuple[asyncio.Future[tuple[dict[bytes, bytes], bytes]], asyncio.TimerHandle, str]
        ] = {}
        """Requests by the end of their reply subject, each with its deadline and its subject."""
        self._pings_waiting: set[asyncio.Future[bool]] = set()

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, subject: str, reply: str, headers: bytes, body: bytes) -> bool:
        """Publishes; False if there is no room for it. The caller has checked the subject and the size."""
        if headers:
            total = len(headers) + len(body)
            head = f"HPUB {subject} {reply} {len(headers)} {total}\r\n".encode()
            command = b"%b%b%b\r\n" % (head, headers, body)
        else:
            command = b"%b%b\r\n" % (f"PUB {subject} {reply} {len(body)}\r\n".encode(), body)
        if self._pending_data_size + len(command) > MAX_PENDING_BYTES or self.is_closed:
            return False
        self._enqueue(command)
        return True

    def _enqueue(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._is_write_scheduled:
            self._is_write_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    def _write_pending(self) -> None:
        self._is_write_scheduled = False
        if not self._pending or not self.is_connected:
            return
        assert isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None
        stream = self._transport._io_writer.transport
        if stream.is_closing():
            return  # the loss will be noticed; what is pending goes after the reconnect
        if stream.get_write_buffer_size() > MAX_PENDING_BYTES:
            self._is_write_scheduled = True
            asyncio.get_running_loop().call_later(_RETRY_WRITE_S, self._write_pending)
            return
        stream.write(b"".join(self._pending))
        self._pending = []
        self._pending_data_size = 0

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self._enqueue(cmd)

    async def _flush_pending(self, force_flush: bool = False) -> None:
        self._write_pending()

    async def _flusher(self) -> None:
        await asyncio.Event().wait()  # `flush` wants the task to be alive; `_write_pending` does its work

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # In order with other commands, so that a pong proves that all before it were processed.
        if not self.is_connected:
            raise NotConnectedError
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._enqueue(_PING)

    # ----------------------------------------------------------------------------------------------- receiving

    def subscribe_direct(self, subject: str, handler: Handler, queue: str = "") -> int:
        """Returns the id for `unsubscribe_direct`. Holds over reconnects; `flush` afterwards to know it is in place."""
        self._sid += 1
        # nats-py subscribes all of `_subs` again after a reconnect.
        self._subs[self._sid] = Subscription(self, self._sid, subject, queue)
        self._direct[self._sid] = handler
        if self.is_connected:
            self._enqueue(f"SUB {subject} {queue} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe_direct(self, sid: int) -> None:
        if self._direct.pop(sid, None) is not None:
            self._subs.pop(sid, None)
            self.refused.pop(sid, None)
            if self.is_connected:
                self._enqueue(f"UNSUB {sid}\r\n".encode())

    async def drain_direct(self, sids: Collection[int], timeout_s: float) -> None:
        """Unsubscribes like `unsubscribe_direct`, but handles what the server had sent before it knew."""
        for sid in sids:
            if self._subs.pop(sid, None) is not None and self.is_connected:
                self._enqueue(f"UNSUB {sid}\r\n".encode())
        try:
            await self.ping(timeout_s)
        except Error as error:
            logger.info("unsubscribed without waiting for messages under way: %s", error)
        for sid in sids:
            self._direct.pop(sid, None)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        if not self._deliver(sid, subject, reply, data, headers):
            await super()._process_msg(sid, subject, reply, data, headers or b"")

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> bool:
        handler = self._direct.get(sid)
        if handler is None:
            # What comes for a subscription that has ended goes nowhere; else it is one of nats-py's own.
            return sid not in self._subs
        try:
            handler(subject, reply, headers, data)
        except Exception:
            logger.exception("the handler of %s failed", subject.decode())
        return True

    # ------------------------------------------------------------------------------------------------ requests

    def new_inbox(self) -> str:
        return f"{self._inbox_prefix.decode()}.{secrets.token_hex(16)}"

    def exchange(
        self, subject: str, headers: bytes, body: bytes, timeout_s: float
    ) -> asyncio.Future[tuple[dict[bytes, bytes], bytes]]:
        """Sends a request. The future has the header fields and the body of the reply, or one of nats.errors:
        `NotConnectedError` (also when the connection is lost meanwhile), `NoRespondersError`, `NotPermittedError`,
        `MaxPayloadError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[dict[bytes, bytes], bytes]] = loop.create_future()
        if not self._inbox:
            self._inbox = self.new_inbox() + "."
            self.subscribe_direct(self._inbox + "*", self._on_reply)
        token = secrets.token_hex(8).encode()
        if len(headers) + len(body) > self.max_payload:
            future.set_exception(MaxPayloadError())
        elif not self.is_connected or not self.send(subject, self._inbox + token.decode(), headers, body):
            future.set_exception(NotConnectedError())
        else:
            self._exchanges[token] = future, loop.call_later(timeout_s, self._expire, token), subject
        return future

    def _expire(self, token: bytes) -> None:
        future, _, _ = self._exchanges.pop(token)
        if not future.done():
            future.set_exception(TimeoutError())

    def _on_reply(self, subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
        exchange = self._exchanges.pop(subject[len(self._inbox) :], None)
        if exchange is None:
            return
        future, deadline, _ = exchange
        deadline.cancel()
        fields = parse_headers(headers) if headers else {}
        if future.done():
            pass  # given up
        elif fields.get(b"Status") == b"503" and not data:
            future.set_exception(NoRespondersError())
        else:
            future.set_result((fields, data))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Replaces nats-py's request, of which its JetStream calls are made."""
        # `strip` also makes a plain string of nats-py's enumeration of header names.
        lines = "".join(f"{name.strip()}: {value}\r\n" for name, value in (headers or {}).items())
        block = f"NATS/1.0\r\n{lines}\r\n".encode() if lines else b""
        fields, data = await self.exchange(subject, block, payload, timeout)
        decoded = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        return Msg(self, subject, "", data, decoded or None)

    async def ping(self, timeout_s: float) -> None:
        """Pings the server and waits for its answer; all commands before it have then been processed. Raises as `exchange`
        does."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pings_waiting.add(future)
        try:
            await self._send_ping(future)
            async with asyncio.timeout(timeout_s):
                await future
        except builtins.TimeoutError:
            raise TimeoutError from None
        finally:
            self._pings_waiting.discard(future)

    # ------------------------------------------------------------------------------------- connection and loss

    def lost_connection(self) -> None:
        """Called by the disconnected callback: nobody will answer what is in flight. The server that was left is tried again
        after all others: one that hangs still takes connections."""
        left = self._current_server
        if left is not None and left in self._server_pool:
            self._server_pool.remove(left)
            self._server_pool.append(left)
        exchanges, self._exchanges = self._exchanges, {}
        for _, deadline, _ in exchanges.values():
            deadline.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._pings_waiting, *(future for future, _, _ in exchanges.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(NotConnectedError())
        self._on_disconnect()

    async def _process_op_err(self, e: Exception) -> None:
        """A connection that is lost is cut: nats-py would wait for a server that hangs to take what was written to it."""
        if self.is_connected and isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
        await super()._process_op_err(e)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            # nats-py would send the password in the clear.
            raise Error("nats: the server offers no TLS, which TIDEWAY_NATS_TLS_CA or TIDEWAY_NATS_TLS_CERT asks for")
        await super()._process_info(info, initial_connection)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:
            # nats-py would try to send it.
            self._pending = []
            self._pending_data_size = 0
        await super()._close(status, do_cbs)

    async def _process_connect_init(self) -> None:
        # Subscriptions are made anew from `_subs`, pings have lost their pongs: only publications are worth keeping.
        self._pending = [command for command in self._pending if command.startswith((b"PUB", b"HPUB"))]
        self._pending_data_size = sum(map(len, self._pending))
        await super()._process_connect_init()

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        if self._pongs:
            future = self._pongs.pop(0)
            if not future.done():
                future.set_result(True)

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            await self._error_cb(self._refuse(err_msg))
        elif "authorization violation" in err_msg:
            await self._process_op_err(AuthorizationError())
        else:
            await self._process_op_err(Error(f"nats: {err_msg}"))

    def _refuse(self, err_msg: str) -> Error:
        """Tells those who wait for what the server refuses."""
        found = _VIOLATION.search(err_msg)
        if found is None:
            return Error(f"nats: {err_msg}")
        error = NotPermittedError(found[2])
        if found[1] == "subscription":
            for sid, subscription in self._subs.items():
                if subscription._subject.lower() == error.subject:
                    self.refused[sid] = error
        for token, (future, deadline, subject) in list(self._exchanges.items()):
            if found[1] == "publish" and subject.lower() == error.subject:
                del self._exchanges[token]
                deadline.cancel()
                if not future.done():
                    future.set_exception(error)
        return error


_PLAIN = b"MSG "
_WITH_HEADERS = b"HMSG "
_END_OF_LINE = b"\r\n"
MAX_KEPT_BYTES = 64 * 1024
"""Bytes kept of a message that is not whole yet; each piece of it copies those before it."""

Deliver = Callable[[int, bytes, bytes, bytes, bytes | None], bool]
"""(subscription id, subject, reply subject, body, header block). False, with no effect, if it has no handler."""


class DirectParser(Parser):
    """nats-py's protocol parser with a short way for what comes by the ten thousand a second: messages for handlers.

    They are cut out of the bytes as they were read, without a regular expression, a copy of the buffer's rest or a coroutine
    for each. Everything else is left to nats-py's parser: messages for its own subscriptions, commands of the server, and
    long messages that come in pieces.
    """

    def __init__(self, client: Any, deliver: Deliver) -> None:
        super().__init__(client)
        self._deliver = deliver

    async def parse(self, data: bytes = b"") -> None:
        if self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        if self.buf:
            data = bytes(self.buf) + data
        done = 0
        while True:
            try:
                done, is_to_be_kept = self._parse_messages(data, done)
            except (ValueError, IndexError):
                raise ProtocolError("nats: malformed MSG") from None
            end = 0
            if not is_to_be_kept and not data.startswith((_PLAIN, _WITH_HEADERS), done):
                end = data.find(_END_OF_LINE, done) + 2
            if end < 2:
                break
            # A command of the server, one line: the messages after it go the short way again.
            self.buf = bytearray(data[done:end])
            await super().parse()
            if self.buf or self.state != AWAITING_CONTROL_LINE:
                await super().parse(data[end:])
                return
            done = end
        self.buf = bytearray(data[done:])
        if self.buf and not is_to_be_kept:
            await super().parse()

    def _parse_messages(self, data: bytes, at: int) -> tuple[int, bool]:
        """Delivers the messages in `data` from `at` on. Returns where they end, and whether the next is a message that
        should be waited for."""
        deliver = self._deliver
        while (is_plain := data.startswith(_PLAIN, at)) or data.startswith(_WITH_HEADERS, at):
            end = data.find(_END_OF_LINE, at)
            if end < 0:
                return at, len(data) - at < MAX_KEPT_BYTES
            # The command, subject, id, perhaps where to reply, with headers their size, and the whole one.
            words = data[at:end].split()
            begin = end + 2
            after = begin + int(words[-1])
            if after + 2 > len(data):
                return at, after - at < MAX_KEPT_BYTES
            headers = None
            if not is_plain:
                middle = begin + int(words[-2])
                headers, begin = data[begin:middle], middle
            reply = words[3] if len(words) == 6 - is_plain else b""
            if not deliver(int(words[2]), words[1], reply, data[begin:after], headers):
                break
            at = after + 2
        return at, False
