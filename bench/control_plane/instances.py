"""All instances of the bench as one process: sends their reports and registry entries, accepts what is dispatched to them.

    python -m bench.control_plane.instances PORT NUM_INSTANCES SEED [flat-out]

Answers on `COUNTS` how much it has done (`Counts`), and on `ECHO` at once. Runs until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec
import nats
from nats.aio.msg import Msg

from bench.control_plane.fleet import Fleet, encode
from shared.bus.codec import encode as encode_message
from shared.messages.catalogue import INSTANCES, LOAD_REPORTS, PREFIX
from shared.messages.requests import Accepted, GenerationRequest, HeldRequests

COUNTS = "bench.counts"
ECHO = "bench.echo"
TICK_S = 0.002
REGISTRY_INTERVAL_S = 1.0
MAX_SENT = 1000
"""Reports at once."""


class Counts(msgspec.Struct, frozen=True):
    num_reports: int
    num_rebalances: int


class Publisher:
    """A bare connection to the server: many prepared messages at once for little of this process's time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answers = asyncio.create_task(self._answer(reader))

    @classmethod
    async def connect(cls, port: int) -> Publisher:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false}\r\n')
        return cls(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line == b"PING\r\n":
                self._writer.write(b"PONG\r\n")

    def send(self, subject: str, bodies: list[bytes]) -> None:
        head = f"PUB {subject} ".encode()
        self._writer.write(b"".join(b"%b%d\r\n%b\r\n" % (head, len(body), body) for body in bodies))

    async def drain(self) -> None:
        await self._writer.drain()


class Crowd:
    def __init__(self, fleet: Fleet, publisher: Publisher) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._num_sent = 0
        self._num_rebalances = 0
        self._index = {name: index for index, name in enumerate(fleet.names)}
        self._decode = msgspec.msgpack.Decoder(GenerationRequest).decode

    async def keep_registered(self) -> None:
        """Each once a `REGISTRY_INTERVAL_S`, at its own moment. Without waiting for acknowledgements: they are written
        again. The first time all at once."""
        for index in range(len(self._fleet.names)):
            self._register(index)
        began_s, num_written = time.monotonic(), 0
        while True:
            await asyncio.sleep(TICK_S)
            num_due = int((time.monotonic() - began_s) / REGISTRY_INTERVAL_S * len(self._fleet.names))
            for number in range(num_written, num_due):
                self._register(number % len(self._fleet.names))
            num_written = num_due

    def _register(self, index: int) -> None:
        self._publisher.send(f"$KV.{INSTANCES.name}.{self._fleet.names[index]}", [encode(self._fleet.info(index))])

    async def report(self) -> None:
        while True:
            began_s = time.monotonic()
            reports = self._fleet.due(began_s, MAX_SENT)
            if reports:
                self._num_sent += len(reports)
                self._publisher.send(LOAD_REPORTS.subject, reports)
                await self._publisher.drain()
            if len(reports) < MAX_SENT:
                await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began_s)))

    async def on_submit(self, message: Msg) -> None:
        request = self._decode(message.data)
        self._publisher.send(message.reply, [encode_message(Accepted(request.request_id))])
        self._fleet.accept(self._index[message.subject.split(".")[3]], request, time.monotonic())

    async def on_held(self, message: Msg) -> None:
        self._publisher.send(message.reply, [encode_message(HeldRequests([]))])

    async def on_rebalance(self, message: Msg) -> None:
        self._num_rebalances += 1

    async def on_echo(self, message: Msg) -> None:
        self._publisher.send(message.reply, [message.data])

    async def on_counts(self, message: Msg) -> None:
        counts = Counts(self._num_sent, self._num_rebalances)
        self._publisher.send(message.reply, [encode_message(counts)])


async def run(port: int, num_instances: int, seed: int, is_flat_out: bool) -> None:
    publisher = await Publisher.connect(port)
    crowd = Crowd(Fleet(num_instances, seed, began_s=time.monotonic(), is_flat_out=is_flat_out), publisher)
    peer = await nats.connect(f"nats://127.0.0.1:{port}")
    handlers: dict[str, Callable[[Msg], object]] = {
        f"{PREFIX}.instance.*.submit": crowd.on_submit,
        f"{PREFIX}.instance.*.held": crowd.on_held,
        f"{PREFIX}.instance.*.rebalance": crowd.on_rebalance,
        COUNTS: crowd.on_counts,
        ECHO: crowd.on_echo,
    }
    for subject, handler in handlers.items():
        await peer.subscribe(subject, cb=handler)
    await peer.flush()
    await asyncio.gather(crowd.keep_registered(), crowd.report())


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "flat-out" in sys.argv[4:]))
