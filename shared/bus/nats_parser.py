"""nats-py's protocol parser with a short way for what comes by the ten thousand a second: plain messages for handlers.

They are cut out of the bytes as they were read, without a regular expression, a copy of the buffer's rest or a coroutine
for each. Everything else is left to nats-py's parser: messages with headers, those of its own subscriptions, commands of
the server, and long messages that come in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_MESSAGE = b"MSG "
_END_OF_LINE = b"\r\n"
MAX_KEPT_BYTES = 64 * 1024
"""Of a message that is not whole yet; each piece of it copies those before it."""

Deliver = Callable[[int, bytes, bytes, bytes], bool]
"""(subscription id, subject, reply subject, body). False, with no effect, if it has no handler."""


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
        while data.startswith(_MESSAGE, at):
            end = data.find(_END_OF_LINE, at)
            if end < 0:
                return at, len(data) - at < MAX_KEPT_BYTES
            words = data[at + 4 : end].split()
            begin = end + 2
            after = begin + int(words[-1])
            if after + 2 > len(data):
                return at, after - at < MAX_KEPT_BYTES
            if not deliver(int(words[1]), words[0], words[2] if len(words) == 4 else b"", data[begin:after]):
                break
            at = after + 2
        return at, False
