"""The parser of the NATS protocol: what comes in is delivered in order, however the bytes were cut into pieces."""

from __future__ import annotations

import asyncio
import inspect
import time
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from shared.bus.nats_client import MAX_KEPT_BYTES, DirectClient, DirectParser

DIRECT, OTHER = 7, 8


class Peer:
    """In the place of nats-py's client."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []
        self.parser = DirectParser(self, self._deliver)

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> bool:
        if sid == DIRECT:
            self.got.append((sid, subject, reply, headers, data))
        return sid == DIRECT

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.got.append((sid, subject, reply, headers, data))

    async def _process_ping(self) -> None:
        self.got.append(("ping",))

    def feed(self, *pieces: bytes) -> None:
        async def parse() -> None:
            for piece in pieces:
                await self.parser.parse(piece)

        asyncio.run(parse())


def message(sid: int, body: bytes, reply: bytes = b"", headers: bytes = b"") -> tuple[bytes, tuple[Any, ...]]:
    words = [b"a.b", b"%d" % sid] + ([reply] if reply else [])
    words += [b"%d" % len(headers)] if headers else []
    words.append(b"%d" % (len(headers) + len(body)))
    command = b"HMSG " if headers else b"MSG "
    wire = command + b" ".join(words) + b"\r\n" + headers + body + b"\r\n"
    return wire, (sid, b"a.b", reply, headers or None, body)


bodies = st.one_of(st.binary(max_size=40), st.just(b"MSG a 7 3\r\nabc\r\n"), st.just(b"\r\nPING\r\n"))
messages = st.builds(
    message,
    st.sampled_from([DIRECT, OTHER]),
    bodies,
    st.sampled_from([b"", b"in.box"]),
    st.sampled_from([b"", b"NATS/1.0"]),
)
commands = st.one_of(messages, st.just((b"PING\r\n", ("ping",))))


@given(st.lists(commands, max_size=8), st.lists(st.integers(1, 30), max_size=20))
def test_everything_is_delivered_in_order_in_whatever_pieces_it_comes(
    sent: list[tuple[bytes, tuple[Any, ...]]], sizes: list[int]
) -> None:
    wire, pieces = b"".join(one for one, _ in sent), []
    for size in sizes:
        pieces.append(wire[:size])
        wire = wire[size:]
    peer = Peer()
    peer.feed(*pieces, wire)
    assert peer.got == [expected for _, expected in sent]


def test_a_long_message_in_many_pieces_is_not_copied_with_each() -> None:
    body = bytes(64 * MAX_KEPT_BYTES)
    wire, expected = message(DIRECT, body)
    short, expected_short = message(DIRECT, b"short")
    wire += short
    pieces = [wire[at : at + 512] for at in range(0, len(wire), 512)]
    peer = Peer()
    began_s = time.thread_time()
    peer.feed(*pieces)
    assert peer.got == [expected, expected_short]
    assert time.thread_time() - began_s < 2.0


class Counting(Peer):
    """Counts what nats-py's parser is left to deliver."""

    num_slow = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.num_slow += 1
        await super()._process_msg(sid, subject, reply, data, headers)


def test_messages_after_a_command_go_the_short_way() -> None:
    wire, expected = message(DIRECT, b"body", headers=b"NATS/1.0")
    peer = Counting()
    peer.feed(wire + b"PING\r\n" + 3 * wire + b"PI", b"NG\r\n" + wire)
    assert peer.got == [expected, ("ping",), expected, expected, expected, ("ping",), expected]
    assert peer.num_slow == 0


async def test_what_comes_for_an_ended_subscription_is_dropped_at_once() -> None:
    client = DirectClient(lambda: None)
    got: list[bytes] = []
    sid = client.subscribe_direct("a.b", lambda subject, reply, headers, data: got.append(data))
    assert client._deliver(sid, b"a.b", b"", b"1", None)
    client.unsubscribe_direct(sid)
    assert client._deliver(sid, b"a.b", b"", b"2", None)
    client._subs[sid] = Subscription(client, sid, "a.b")
    assert not client._deliver(sid, b"a.b", b"", b"3", None)
    assert got == [b"1"]


def test_a_message_whose_line_cannot_be_read_is_an_error() -> None:
    for line in (b"MSG a.b 7 x\r\n", b"MSG a.b x 3\r\n", b"MSG \r\n", b"HMSG a.b 7 x 3\r\n"):
        with pytest.raises(ProtocolError):
            Peer().feed(line + b"abc\r\n")


# fmt: off
REPLACED = [
    "_send_command", "_flush_pending", "_flusher", "_send_ping", "_process_msg", "_process_info", "_close",
    "_process_connect_init", "_process_pong", "_process_err", "request",
]
USED = [
    "_ps", "_pending", "_pending_data_size", "_sid", "_subs", "_pongs", "_pings_outstanding", "_inbox_prefix", "_transport",
    "_error_cb", "_process_op_err", "options", "is_closed", "is_connected", "max_payload",
]
# fmt: on


def missing_of(version_of: type[Client], client: Client) -> list[str]:
    """What shared/bus replaces or uses of nats-py and this client does not have, or has with other parameters."""
    gone = [f"Client.{name}" for name in USED if not hasattr(client, name)]
    for name in REPLACED:
        theirs, ours = getattr(version_of, name, None), getattr(DirectClient, name)
        if theirs is None:
            gone.append(f"Client.{name}")
        elif list(inspect.signature(theirs).parameters) != list(inspect.signature(ours).parameters):
            gone.append(f"Client.{name}{inspect.signature(theirs)}")
    gone += [f"Parser.{name}" for name in ("parse", "state", "buf") if not hasattr(Parser(client), name)]
    gone += ["Subscription._subject"] if not hasattr(Subscription(client, 1, "a"), "_subject") else []
    gone += ["TcpTransport._io_writer"] if not hasattr(TcpTransport(), "_io_writer") else []
    return gone


async def test_nats_py_has_what_is_replaced_of_it() -> None:
    gone = missing_of(Client, Client())
    assert not gone, (
        f"nats-py {version('nats-py')} has no {', '.join(gone)}, which shared/bus/nats_client.py replaces "
        "or uses: see what took the place of it before the bound in pyproject.toml is raised"
    )


async def test_what_is_missing_of_nats_py_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Client, "_flusher")
    monkeypatch.setattr(Client, "_process_pong", lambda self, payload: None)
    assert missing_of(Client, Client()) == ["Client._flusher", "Client._process_pong(self, payload)"]
