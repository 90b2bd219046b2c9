"""nats-py's protocol parser with a short way for what comes by the ten thousand a second: messages for handlers.

They are cut out of the bytes as they were read, without a regular expression, a copy of the buffer's rest or a coroutine
for each. Everything else is left to nats-py's parser: messages for its own subscriptions, commands of the server, and long
messages that come in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_PLAIN = b"MSG "
_WITH_HEADERS = b"HMSG "
_END_OF_LINE = b"\r\n"
MAX_KEPT_BYTES = 64 * 1024
"""Of a message that is not whole yet; each piece of it copies those before it."""

Deliver = Callable[[int, bytes, bytes, bytes, bytes | None], bool]
"""(subscription id, subject, reply subject, body, header block). False, with no effect, if it has no handler."""


class DirectParser(Parser):
    def __init__(self, client: Any, deliver: Deliver) -> None:
        super().__init__(client)
        self._deliver = deliver

    async def parse(self, data: bytes = b"") -> None:
        if self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        if self.buf:
            data = bytes(self.buf) + data
        try:
            done, is_to_be_kept = self._parse_messages(data)
        except (ValueError, IndexError):
            raise ProtocolError("nats: malformed MSG") from None
        self.buf = bytearray(data[done:])
        if self.buf and not is_to_be_kept:
            await super().parse()

    def _parse_messages(self, data: bytes) -> tuple[int, bool]:
        """Delivers the messages at the beginning of `data`. Returns how many bytes those were, and whether the next is a
        message that should be waited for."""
        at, deliver = 0, self._deliver
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
