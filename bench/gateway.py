"""What a streamed token costs in a gateway: processor time of its process, the rate at which one core would be full, and the
time from an instance's frame to the client's socket. The gateway and NATS are real; instances are scripted, and send a frame
a step with a token for each of the streams, at a given pace, as a busy instance does.

    python -m bench.gateway                          64 streams with 4,000 tokens a second, then 256 with 10,240
    python -m bench.gateway --tree before=../old     another source tree in turns with this one, A B B A
    python -m bench.gateway --only plain chat        some of the kinds of answers

The gateway has a core of its own, the rest of the bench has the others. `chunks a token`: 1 where each token went out alone;
less where the gateway was late and put several into one. Tokens are four characters each, so that clients can count them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.peers.checkpoints import make_tokenizer
from bench.reporting import machine, processor_s, table, write
from shared.bus.nats_bus import NatsBus
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, GenerationRequest, TokenEntry, TokenFrame, TokenLogprob, pack_tokens
from shared.runtime.service import new_event_loop
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer, free_port
from tests.gateway.checkpoints import write_checkpoint
from tests.gateway.peer import ScriptedPeer

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = "tide"
OWN = "this tree"
NUM_WORDS = 49152
START_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 120.0
NUM_WATCHED = 4
"""Streams whose every chunk is read, for latencies."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {}),
    "chat": ("/v1/chat/completions", {}),
    "usage": ("/v1/completions", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "stop strings": ("/v1/completions", {"stop": ["!!!!", "the end."]}),
    "logprobs": ("/v1/completions", {"logprobs": 2}),
}
"""The path, and what the body has beside the prompt."""


class Load(msgspec.Struct, frozen=True):
    streams: int
    steps_per_s: float
    steps: int


LOADS = (Load(64, 62.5, 200), Load(256, 40.0, 200))


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    tree: str
    kind: str
    streams: int
    tokens_per_s: float
    """At which they were sent."""
    gateway_us: float
    """Processor time of the gateway's process a token."""
    chunks_per_token: float
    p50_ms: float
    p99_ms: float
    """From the frame to the client."""


class Client(asyncio.Protocol):
    """One streamed request. `bytes` and `num_chunks` are what came of its answer."""

    def __init__(self, request: bytes, is_watched: bool) -> None:
        self._request = request
        self._is_watched = is_watched
        self.done = asyncio.get_running_loop().create_future()
        self.num_chunks = 0
        self.arrivals_s: list[float] = []
        """Arrival of each token, for a watched stream."""
        self._rest = b""
        self._num_characters = 0
        self._is_accepted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._is_accepted and not self.done.done():
            self._is_accepted = data.startswith(b"HTTP/1.1 200")
            if not self._is_accepted:
                self.done.set_exception(ConnectionError(data.decode()))
        self.num_chunks += data.count(b"data: ")
        if self._is_watched:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                        self._num_characters += len(text)
                self.arrivals_s += [now] * (self._num_characters // 4 - len(self.arrivals_s))
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the answer broke off: {exc}"))


class Bench:
    """A NATS server, a scripted peer, and gateways that are started one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokenizer = make_tokenizer(NUM_WORDS)
        self._words = [
            token
            for text, token in tokenizer.get_vocab().items()
            if len(text.replace("Ġ", " ")) == 4 and text[-1] != ">"
        ]
        self._checkpoint = write_checkpoint(folder / "model", tokenizer)
        config = json.loads((self._checkpoint / "config.json").read_text())
        (self._checkpoint / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": 4096, "eos_token_id": 2})
        )
        self._chooser = random.Random(0)
        cores = sorted(os.sched_getaffinity(0))
        self._core = cores[-1]
        os.sched_setaffinity(0, cores[:-1] or cores)

    async def run(self, trees: dict[str, Path], kinds: Sequence[str], rounds: int) -> list[Turn]:
        nats = NatsServer()
        try:
            settings = BusSettings(nats_url=nats.url)
            bus = await NatsBus.connect(settings, service="peer", service_id="peer")
            peer = ScriptedPeer(bus)
            peer.automatic = False
            await peer.start(ModelSpec(MODEL, str(self._checkpoint)))
            await peer.add_instance("a", MODEL)
            turns: list[Turn] = []
            async with contextlib.AsyncExitStack() as stack:
                gateways = {}
                for name, tree in trees.items():
                    gateways[name] = await stack.enter_async_context(self._gateway(name, tree, nats.url))
                for kind in kinds:
                    for load in LOADS:
                        for number in range(-1, rounds):
                            for name in [*trees, *reversed(trees)][: None if number >= 0 else len(trees)]:
                                turn = await self._turn(peer, gateways[name], name, kind, load)
                                if number >= 0:  # the first warms up
                                    turns.append(turn)
                                    print(text_of(turn), flush=True)
            await peer.stop()
            await bus.close()
            return turns
        finally:
            nats.close()

    @asynccontextmanager
    async def _gateway(self, name: str, tree: Path, nats_url: str) -> AsyncIterator[tuple[int, int]]:
        """Its process and its port."""
        port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "TIDEWAY_NATS_URL": nats_url,
            "TIDEWAY_PORT": str(port),
            "TIDEWAY_GATEWAY_ID": name.replace(" ", "-"),
            "TIDEWAY_MAX_CLIENT_CONNECTIONS": "1000",
        }
        with (self._folder / "gateway.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.gateway", env=environment, cwd=tree, stdout=log, stderr=log
            )
        os.sched_setaffinity(process.pid, [self._core])
        try:
            async with httpx.AsyncClient() as client, asyncio.timeout(START_TIMEOUT_S):
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        body = {"model": MODEL, "prompt": "a"}
                        if (await client.post(f"http://127.0.0.1:{port}/tokenize", json=body)).status_code == 200:
                            break
                    await asyncio.sleep(0.1)
            yield process.pid, port
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await process.wait()

    async def _turn(self, peer: ScriptedPeer, gateway: tuple[int, int], name: str, kind: str, load: Load) -> Turn:
        pid, port = gateway
        path, more = KINDS[kind]
        peer.submitted.clear()
        prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": [5, 6, 7]}
        body = json.dumps(
            {"model": MODEL, "max_tokens": load.steps, "stream": True, "ignore_eos": True, **prompt, **more}
        )
        request = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()
        loop = asyncio.get_running_loop()
        clients = []
        async with asyncio.timeout(TURN_TIMEOUT_S):
            for number in range(load.streams):
                _, client = await loop.create_connection(
                    lambda watched=number < NUM_WATCHED: Client(request, watched), "127.0.0.1", port
                )
                clients.append(client)
            while len(peer.submitted) < load.streams:
                for client in clients:
                    if client.done.done():
                        client.done.result()
                await asyncio.sleep(0.005)
            before_s = processor_s(pid)
            sent_s = await self._send(peer, list(peer.submitted), load)
            await asyncio.gather(*(client.done for client in clients))
            used_s = processor_s(pid) - before_s
        watched = [client for client in clients if client.arrivals_s]
        latencies_ms = sorted(
            1e3 * (arrived - sent)
            for client in watched
            for arrived, sent in zip(client.arrivals_s, sent_s, strict=True)
        )
        num_tokens = load.streams * load.steps
        return Turn(
            tree=name,
            kind=kind,
            streams=load.streams,
            tokens_per_s=(load.steps - 1) * load.streams / (sent_s[-1] - sent_s[0]),
            gateway_us=1e6 * used_s / num_tokens,
            chunks_per_token=sum(client.num_chunks for client in clients) / num_tokens,
            p50_ms=statistics.median(latencies_ms),
            p99_ms=latencies_ms[len(latencies_ms) * 99 // 100],
        )

    async def _send(self, peer: ScriptedPeer, requests: list[GenerationRequest], load: Load) -> list[float]:
        """A frame a step. Returns when each was sent."""
        sent_s = []
        next_s = time.monotonic()
        logprobs = (TokenLogprob(-0.5, (5, 6), (-0.5, -1.5), 1),) if requests[0].sampling.logprobs >= 0 else ()
        for step in range(load.steps):
            entries = [
                TokenEntry(
                    request_id=request.request_id,
                    epoch=request.epoch,
                    offset=step,
                    tokens=pack_tokens([self._chooser.choice(self._words)]),
                    finish_reason=FinishReason.LENGTH if step == load.steps - 1 else None,
                    logprobs=logprobs,
                )
                for request in requests
            ]
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s += 1 / load.steps_per_s
            sent_s.append(time.monotonic())
            peer.send(requests[0].gateway_id, TokenFrame("a", entries))
        return sent_s


def text_of(turn: Turn) -> str:
    return (
        f"{turn.kind:12} {turn.streams:4} streams {turn.tokens_per_s:7.0f} tok/s  {turn.tree:10} "
        f"{turn.gateway_us:6.1f} us and {turn.chunks_per_token:.2f} chunks a token  "
        f"P50 {turn.p50_ms:.2f} P99 {turn.p99_ms:.2f} ms"
    )


def summary(turns: Sequence[Turn], trees: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the table. `against`: processor time of the first tree's token, of this one's."""
    rows = []
    for kind, streams in dict.fromkeys((turn.kind, turn.streams) for turn in turns):
        first_us = 0.0
        for tree in trees:
            found = [turn for turn in turns if (turn.kind, turn.streams, turn.tree) == (kind, streams, tree)]
            used_us = statistics.fmean(turn.gateway_us for turn in found)
            first_us = first_us or used_us
            rows.append(
                {
                    "answers": kind,
                    "streams": streams,
                    "tokens/s sent": f"{statistics.fmean(turn.tokens_per_s for turn in found):.0f}",
                    "tree": tree,
                    "us a token": f"{used_us:.1f}",
                    "tokens/s a core": f"{1e6 / used_us:.0f}",
                    "ratio": f"{used_us / first_us:.2f}",
                    "chunks a token": f"{statistics.fmean(turn.chunks_per_token for turn in found):.2f}",
                    "P50 ms": f"{statistics.fmean(turn.p50_ms for turn in found):.2f}",
                    "P99 ms": f"{statistics.fmean(turn.p99_ms for turn in found):.2f}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", default=[], metavar="NAME=FOLDER", help="another source tree; repeatable"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=["plain", "chat"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    on = machine()  # before the cores are divided
    trees = {OWN: REPOSITORY}
    trees |= {name: Path(folder).resolve() for name, folder in (each.split("=", 1) for each in arguments.tree)}
    with (
        tempfile.TemporaryDirectory(prefix="tideway-gateway-") as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        turns = runner.run(Bench(Path(folder)).run(trees, arguments.only, arguments.rounds))
    rows = summary(turns, list(trees))
    lines = table(list(rows[0]), [list(row.values()) for row in rows])
    print("\n".join(lines))
    if arguments.output:
        date = time.strftime("%Y-%m-%d")
        document = {"date": date, "machine": on, "turns": [msgspec.structs.asdict(turn) for turn in turns]}
        text = "\n".join([f"# The gateway's time for a token, {date}", "", *lines, "", f"- machine: {on}"])
        write(arguments.output, f"gateway-{date}", document, text)


if __name__ == "__main__":
    main()
