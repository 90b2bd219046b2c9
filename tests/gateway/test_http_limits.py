"""The floor under HTTP, on real sockets: what is too large, too slow or too many is refused, and serves nobody worse."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from services.gateway.http.bodies import FREE_BYTES, BodyRoom
from services.gateway.http.encodings import ENCODINGS, decompressed
from services.gateway.http.errors import ApiError
from services.gateway.http.limits import MIN_BODY_BYTES_PER_S, Waiting
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

MANY_TOKENS = 1000
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
async def narrow(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    """A gateway with small limits."""
    limits = {
        "max_head_bytes": 4096,
        "max_headers": 20,
        "max_uri_bytes": 500,
        "head_timeout_s": 1.5,
        "body_idle_timeout_s": 0.6,
        "write_timeout_s": 0.6,
        "max_connections": 30,
        "max_client_connections": 20,
    }
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], **limits) as stack:
        stack.say("Hello world")
        yield stack


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, stack: Stack, address: str = "127.0.0.1") -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", stack.gateway.port, local_addr=(address, 0)))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], dict[str, str]]:
        """Status, headers and the error of the next answer."""
        async with asyncio.timeout(20):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), headers, json.loads(body or b"{}").get("error", {})

    async def is_over(self) -> bool:
        """Waits for the server to close it."""
        async with asyncio.timeout(20):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return True

    def close(self) -> None:
        self.writer.transport.abort()


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 4096 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\nx-long: " + b"a" * (1 << 20), 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"x-more: a\r\n" * 21 + b"\r\n", 431, "too_many_headers"),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx-long: " + b"a" * (1 << 20), 431, "head_too_large"),
        (b"GET /health?" + b"a" * 501 + b" HTTP/1.1\r\n\r\n", 414, "uri_too_long"),
        (b"GET /" + b"a" * (1 << 20), 414, "uri_too_long"),
        (b"\x16\x03\x01\x02\x00\x01noise\r\n\r\n", 400, "bad_http"),
    ],
)
async def test_heads_have_limits(narrow: Stack, head: bytes, status: int, code: str) -> None:
    connection = await Connection.open(narrow)
    connection.send(head)
    found, headers, error = await connection.answer()
    assert (found, error["code"], headers["connection"]) == (status, code, "close")
    assert error.keys() == {"message", "type", "param", "code"}
    assert await connection.is_over()


BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()


@pytest.mark.parametrize(
    "framing", [b"content-length: %d\r\n\r\n%s", b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("step", [7, 1 << 20])
async def test_an_offer_to_speak_http_2_is_answered_in_http_1(narrow: Stack, framing: bytes, step: int) -> None:
    connection = await Connection.open(narrow)
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    post = POST + upgrade + framing % (len(BODY), BODY)
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n"
    for request in (post, get, post):
        for i in range(0, len(request), step):
            connection.send(request[i : i + step])
            await asyncio.sleep(0)
        found, _, error = await connection.answer()
        assert found == 200, error
    connection.send(post + get)
    assert [(await connection.answer())[0] for _ in range(2)] == [200, 200], "one sent before the other is answered"
    connection.close()


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"])
async def test_a_request_has_one_host(narrow: Stack, hosts: bytes) -> None:
    connection = await Connection.open(narrow)
    connection.send(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
    found, _, error = await connection.answer()
    assert (found, error["code"]) == (400, "bad_http")


async def test_what_is_within_the_limits_is_served_also_in_pieces(narrow: Stack) -> None:
    connection = await Connection.open(narrow)
    head = b"GET /health?" + b"a" * 300 + b" HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 3900 + b"\r\n\r\n"
    for _ in range(2):
        for i in range(0, len(head), 1000):
            connection.send(head[i : i + 1000])
            await asyncio.sleep(0.01)
        assert (await connection.answer())[0] == 200
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2, "user": "u" * 20_000}).encode()
    connection.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (await connection.answer())[0] == 200, "a body is no head"
    connection.close()


async def test_half_open_requests_are_ended_and_nobody_else(narrow: Stack) -> None:
    narrow.peer.automatic = False
    reader = narrow.read()
    request = await narrow.next_request()
    silent = await Connection.open(narrow)
    slow_head, slow_body = await Connection.open(narrow), await Connection.open(narrow)
    slow_head.send(b"GET /health HTTP/1.1\r\nx-")
    slow_body.send(POST + b"content-length: 1000\r\n\r\n{")

    async def drip() -> None:
        while True:
            slow_head.send(b"a")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert (await slow_head.answer())[::2] == (
        408,
        {
            "message": "The request's head did not come within 1.5 s (TIDEWAY_HEAD_TIMEOUT_S).",
            "type": "timeout_error",
            "param": None,
            "code": "slow_head",
        },
    )
    dripping.cancel()
    status, _, error = await slow_body.answer()
    assert (status, error["code"]) == (408, "slow_body")
    for connection in (silent, slow_head, slow_body):
        assert await connection.is_over()
    narrow.peer.emit(request, 0, narrow.ids("still here"))
    await until(lambda: reader.text == "still here", "a stream that waits for its tokens")
    await reader.hang_up()
    metrics = (await narrow.client.get("/metrics")).text
    assert 'tideway_gateway_refused_connections_total{reason="slow_body"} 1.0' in metrics


async def test_a_client_that_takes_nothing_of_its_answers_is_ended(narrow: Stack) -> None:
    connection = await Connection.open(narrow)
    connection.writer.transport.pause_reading()
    # Some ten megabytes of answers fill every buffer on the way.
    body = json.dumps({"model": MODEL, "prompt": "a " * 30_000, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection.send((head % len(body) + body) * 16)
    connections = narrow.gateway.context.connections
    await until(lambda: connections._open, "its connection")
    await until(lambda: not connections._open, "its end")
    metrics = (await narrow.client.get("/metrics")).text
    assert 'tideway_gateway_refused_connections_total{reason="slow_reader"} 1.0' in metrics
    connection.close()


async def test_streams_that_are_read_too_slowly_are_ended(nats_settings: BusSettings, tmp_path: Path) -> None:
    """One is not read at all, one byte by byte: neither holds more than a buffer, and a stream beside them is whole."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    checkpoint = write_checkpoint(tmp_path / "long", byte_level_tokenizer(), max_len=8 * MANY_TOKENS)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], write_timeout_s=0.6) as stack:
        stack.gateway.context.telemetry.tracer = provider.get_tracer("test")
        await stack.peer.add_instance("a", MODEL, max_model_len=8 * MANY_TOKENS)
        await until(lambda: stack.gateway.context.catalog.instances["a"].models[0].max_model_len > MANY_TOKENS, "it")
        stack.peer.automatic = False
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4 * MANY_TOKENS, "stream": True, "logprobs": 5}
        slow = [await slow_reader(stack, json.dumps(body).encode()) for _ in range(2)]
        await until(lambda: len(stack.peer.submitted) == 2, "two streams")
        connections = stack.gateway.context.connections
        for protocol in connections.all():
            protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ids = [request.request_id for request in stack.peer.submitted]
        dribbling = asyncio.create_task(read_byte_by_byte(slow[1]))
        fast = stack.read(**body)
        last = await stack.next_request(2)
        tokens, num_sent, most_held = stack.ids("tide "), 0, 0
        while not set(ids) <= set(stack.peer.cancelled):
            assert num_sent < 4 * MANY_TOKENS - len(tokens), "both are to be ended"
            for request in stack.peer.submitted:
                stack.peer.emit(request, num_sent, tokens)
            num_sent += len(tokens)
            most_held = max(most_held, *(p.transport.get_write_buffer_size() for p in connections.all()))
            await asyncio.sleep(0.01)
        stack.peer.emit(last, num_sent, [stack.eos], FinishReason.STOP)
        await fast.end()
        assert fast.is_complete and fast.text == "tide " * (num_sent // len(tokens))
        assert HIGH_WATER_LIMIT / 2 < most_held < 2 * HIGH_WATER_LIMIT
        await stack.until_metrics(
            'tideway_gateway_refused_connections_total{reason="slow_reader"} 2.0',
            "tideway_gateway_disconnected_clients_total 2.0",
        )
        ends = [span.attributes.get("error.type") for span in exporter.get_finished_spans() if span.parent is None]
        assert sorted(filter(None, ends)) == ["slow_reader"] * 2
        dribbling.cancel()
        for each in slow:
            each.close()


async def slow_reader(stack: Stack, body: bytes) -> socket.socket:
    """Has asked, and holds next to nothing of what it does not read."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", stack.gateway.port))
    await loop.sock_sendall(connection, POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


async def read_byte_by_byte(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while await loop.sock_recv(connection, 1):
            await asyncio.sleep(0.02)


async def test_connections_are_bounded_over_all_and_per_address(narrow: Stack) -> None:
    first = [await Connection.open(narrow, "127.0.0.2") for _ in range(20)]
    await until(lambda: len(narrow.gateway.context.connections._open) >= 20, "twenty connections")
    one_more = await Connection.open(narrow, "127.0.0.2")
    status, headers, error = await one_more.answer()
    assert (status, error["code"]) == (429, "too_many_connections") and "retry-after" in headers
    assert "20 connections from one address (TIDEWAY_MAX_CLIENT_CONNECTIONS)" in error["message"]
    second = [await Connection.open(narrow, "127.0.0.3") for _ in range(10)]
    status, headers, error = await (await Connection.open(narrow, "127.0.0.4")).answer()
    assert (status, error["code"]) == (429, "too_many_connections") and "30 connections here" in error["message"]
    for connection in (*first, *second):
        assert await connection.is_over(), "they never said anything"
    assert (await narrow.client.get("/health")).status_code == 200


def test_a_body_may_be_slow_as_long_as_it_comes() -> None:
    waiting = Waiting(head_timeout_s=10, body_idle_timeout_s=30)
    waiting.begin(is_head=False)
    for _ in range(300):
        waiting.on_bytes(MIN_BODY_BYTES_PER_S)
        assert waiting.tick(1.0) is None
    assert waiting.tick(29.0) is None
    refusal = waiting.tick(2.0)
    assert refusal is not None and refusal.code == "slow_body"
    waiting.begin(is_head=False)
    refusals = []
    for _ in range(40):
        waiting.on_bytes(1)
        refusals.append(waiting.tick(1.0))
    assert refusals.index(next(filter(None, refusals))) == 30, "a byte a second is not enough"


def test_a_fast_beginning_of_a_body_earns_no_hours() -> None:
    waiting = Waiting(head_timeout_s=10, body_idle_timeout_s=30)
    waiting.begin(is_head=False)
    waiting.on_bytes(8 << 20)
    assert waiting.tick(29.0) is None
    waiting.on_bytes(1)
    refusal = waiting.tick(29.0)
    assert refusal is not None and refusal.code == "slow_body"


def test_bodies_share_their_room() -> None:
    room = BodyRoom(max_body_bytes=10 * FREE_BYTES, max_total_bytes=12 * FREE_BYTES)
    room.grow(0, 10 * FREE_BYTES)
    with pytest.raises(ApiError) as too_large:
        room.grow(0, 10 * FREE_BYTES + 1)
    assert (too_large.value.status, too_large.value.code) == (413, "body_too_large")
    room.grow(0, FREE_BYTES)
    with pytest.raises(ApiError) as too_many:
        room.grow(FREE_BYTES, 5 * FREE_BYTES)
    assert too_many.value.status == 429 and too_many.value.headers()["retry-after"]
    room.release(10 * FREE_BYTES)
    room.grow(FREE_BYTES, 5 * FREE_BYTES)


async def test_a_stream_to_a_client_that_knows_no_chunks(narrow: Stack) -> None:
    """HTTP/1.0, as nginx speaks by default: the answer ends with the connection."""
    for body, end in ((b'"stream": true', b"data: [DONE]\n\n"), (b'"stream": false', b"}")):
        connection = await Connection.open(narrow)
        content = b'{"model": "%b", "prompt": "x", "max_tokens": 100, %b}' % (MODEL.encode(), body)
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n" % len(content)
        connection.send(head + content)
        async with asyncio.timeout(20):
            answer = await connection.reader.read()
        head, _, text = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
        assert text[:1] in (b"d", b"{") and text.endswith(end)
        assert b"Hello" in text and b"world" in text
    connection = await Connection.open(narrow)
    connection.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(20):
        answer = await connection.reader.read()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["object"] == "list"


def in_members(plain: bytes) -> bytes:
    """A gzip file of several members, as `cat a.gz b.gz` makes it, with padding behind it."""
    return b"".join(gzip.compress(part) for part in (plain[:9], b"", plain[9:])) + bytes(8)


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("gzip", gzip.compress),
        ("gzip", in_members),
        ("deflate", zlib.compress),
        ("deflate", lambda plain: zlib.compress(plain, wbits=-15)),
        ("GZIP", gzip.compress),
        ("x-gzip", gzip.compress),
    ],
)
async def test_bodies_may_be_compressed(stack: Stack, name: str, compress: Callable[[bytes], bytes]) -> None:
    content = json.dumps({"model": MODEL, "prompt": "x" * 50, "max_tokens": 100}).encode()
    answer = await stack.client.post("/v1/completions", content=compress(content), headers={"content-encoding": name})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello world", answer.text


def test_what_is_compressed_has_its_limits() -> None:
    plain = b'{"a": "' + b"a" * 100_000 + b'"}'
    small = gzip.compress(plain)
    assert decompressed(small, "gzip", len(plain)) == plain
    assert decompressed(zlib.compress(small), "gzip, deflate", len(plain)) == plain
    assert decompressed(plain, "identity", 10) == plain
    cases = [
        (small, "gzip", len(plain) - 1, 413),
        (small, "compress", len(plain), 415),
        (small, "snappy, gzip", len(plain), 415),
        (small, "gzip, gzip, gzip, gzip", len(plain), 415),
        (plain, "gzip", len(plain), 400),
        (small[:-9], "gzip", len(plain), 400),
        (in_members(plain)[:-17], "gzip", len(plain), 400),
        (in_members(plain), "gzip", len(plain) - 1, 413),
        (gzip.compress(b"") * 1001, "gzip", len(plain), 400),
        (zlib.compress(plain, wbits=-15)[:-9], "deflate", len(plain), 400),
        (plain, "deflate", len(plain), 400),
    ]
    for body, encodings, limit, status in cases:
        with pytest.raises(ApiError) as error:
            decompressed(body, encodings, limit)
        assert error.value.status == status, encodings
        assert status == 413 or (error.value.param == "content-encoding" and "Content-Encoding" in error.value.message)


async def test_paths_are_served_as_clients_spell_them(nats_settings: BusSettings, checkpoint: Path) -> None:
    spec = ModelSpec(MODEL, str(checkpoint))
    async with running_stack(nats_settings, [spec], base_path="/llm/") as stack:
        stack.say("Hello")
        for path in ("/v1/models", "/v1/models/", "/v1//models//", "/llm/v1/models/", "/models", "/llm/models"):
            answer = await stack.client.get(path)
            assert (answer.status_code, answer.json().get("object")) == (200, "list"), path
        for target in (b"//v1/models", b"///v1/models/", b"//llm//v1/models"):
            connection = await Connection.open(stack)
            connection.send(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await connection.answer())[0] == 200, target
            connection.close()
        for path in ("/v1/completions/", "/llm/v1/completions", "/completions"):
            assert (await stack.post(path, prompt="x")).status_code == 200, path
        assert (await stack.client.get(f"/v1/models/{MODEL}/")).json()["id"] == MODEL
        assert (
            (await stack.client.get("/llm/docs")).status_code == (await stack.client.get("/docs/")).status_code == 200
        )
        for path in ("/v1/model", "/llmv1/models", "/llm/llm/v1/models", "/other/v1/models"):
            assert (await stack.client.get(path)).status_code == 404, path


async def test_a_stream_that_waits_shows_that_it_lives(nats_settings: BusSettings, checkpoint: Path) -> None:
    """By comments, which are no events, and none where tokens come."""
    spec = ModelSpec(MODEL, str(checkpoint))
    for interval_s, is_shown in ((0.2, True), (0.0, False)):
        async with running_stack(nats_settings, [spec], stream_keep_alive_s=interval_s) as stack:
            tokens = stack.say("one two three")
            stack.peer.automatic = False
            body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}
            asking = asyncio.create_task(stack.client.post("/v1/completions", json=body))
            request = await stack.next_request()
            await asyncio.sleep(0.7)
            for offset, token in enumerate(tokens[:-1]):
                stack.peer.emit(request, offset, [token])
                await asyncio.sleep(0.08)
            stack.peer.emit(request, len(tokens) - 1, tokens[-1:], FinishReason.STOP)
            text = (await asking).text
            before, _, after = text.partition("data: ")
            assert (": keep-alive\n\n" in before) == is_shown
            assert after.endswith("data: [DONE]\n\n")


def _zstd(plain: bytes) -> bytes:
    engine = pytest.importorskip("zstandard").ZstdCompressor().compressobj()  # as a stream: the frame names no size
    return engine.compress(plain) + engine.flush()


def _sized_zstd(plain: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(plain)


def _br(plain: bytes) -> bytes:
    return pytest.importorskip("brotli").compress(plain)


@pytest.mark.parametrize(("name", "compress"), [("zstd", _zstd), ("zstd", _sized_zstd), ("br", _br)])
async def test_zstd_and_brotli_and_their_bombs(stack: Stack, name: str, compress: Callable[[bytes], bytes]) -> None:
    content = json.dumps({"model": MODEL, "prompt": "x" * 50, "max_tokens": 100}).encode()
    headers = {"content-encoding": name}
    answer = await stack.client.post("/v1/completions", content=compress(content), headers=headers)
    assert answer.status_code == 200, answer.text
    limit = stack.gateway.context.settings.max_body_bytes
    bomb = compress(b" " * (2 * limit))
    assert len(bomb) < limit // 100
    answer = await stack.client.post("/v1/completions", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    plain = content * 300
    for broken in (plain, compress(plain)[:-5] if compress is not _zstd else b"1" + compress(plain)):
        with pytest.raises(ApiError) as error:
            decompressed(broken, name, 2 * len(plain))
        assert error.value.status == 400 and name in error.value.message
    assert decompressed(gzip.compress(compress(plain)), f"{name}, gzip", len(plain)) == plain


async def test_an_encoding_that_is_not_there_is_named(stack: Stack) -> None:
    answer = await stack.client.post("/v1/completions", content=b"{}", headers={"content-encoding": "compress"})
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == ", ".join(ENCODINGS)
