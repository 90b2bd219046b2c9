"""Links over UCX that can be cut, and a NATS connection that can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from services.worker.kv_transport.errors import LinkError
from services.worker.kv_transport.links import Buffer, Link, Network
from shared.runtime.tasks import TaskSet

SLOW_S = 0.03


class CuttableNetwork(Network):
    """`reset`: links break, and new ones are refused. `hole`: nothing arrives and nothing says so, until it is mended.
    `slow`: each message arrives `SLOW_S` later, and until then nobody knows what its buffer holds."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links: set[_CuttableLink] = set()
        self._mode = ""
        self.whole = asyncio.Event()
        self.whole.set()

    async def open(self, on_link: Callable[[Link], None]) -> str:
        def accept(link: Link) -> None:
            cuttable = self._added(link)
            if self._mode == "reset":
                cuttable.break_off()
            on_link(cuttable)

        address = await self._network.open(accept)
        self.reads_device = self._network.reads_device
        return address

    def admit(self, address: str) -> None:
        self._network.admit(address)

    async def connect(self, address: str) -> Link:
        if self._mode == "reset":
            raise LinkError("cut")
        await self.whole.wait()
        return self._added(await self._network.connect(address))

    async def close(self) -> None:
        self.mend()
        await self._network.close()

    def cut(self, mode: str) -> None:
        self._mode = mode
        if mode == "hole":
            self.whole.clear()
        elif mode == "reset":
            for link in list(self._links):
                link.break_off()

    def mend(self) -> None:
        self._mode = ""
        self.whole.set()

    @property
    def is_slow(self) -> bool:
        return self._mode == "slow"

    def forget(self, link: _CuttableLink) -> None:
        self._links.discard(link)

    def _added(self, link: Link) -> _CuttableLink:
        cuttable = _CuttableLink(link, self)
        self._links.add(cuttable)
        return cuttable


class _CuttableLink(Link):
    def __init__(self, link: Link, network: CuttableNetwork) -> None:
        self.peer = link.peer
        self._link = link
        self._network = network
        self._ended = asyncio.Event()
        self._late: set[asyncio.Task[None]] = set()
        self._breaking: asyncio.Task[None] | None = None

    def break_off(self) -> None:
        self._breaking = asyncio.create_task(self.abort())

    async def send(self, tag: int, buffer: Buffer) -> None:
        await self._passable()
        await self._link.send(tag, buffer)

    async def receive(self, tag: int, buffer: Buffer) -> None:
        if self._network.is_slow and isinstance(buffer, np.ndarray):
            # Whoever waits may be cancelled; what is under way arrives all the same, until the link is aborted.
            late = asyncio.create_task(self._receive_late(tag, buffer))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            await asyncio.shield(late)
        else:
            await self._link.receive(tag, buffer)
            await self._passable()

    async def _receive_late(self, tag: int, buffer: np.ndarray) -> None:
        arrived = np.empty_like(buffer)
        await self._link.receive(tag, arrived)
        await self._passable()
        buffer[:] = arrived

    async def abort(self) -> None:
        self._ended.set()
        self._network.forget(self)
        for late in list(self._late):
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._link.abort()

    async def _passable(self) -> None:
        if self._network.is_slow:
            await asyncio.sleep(SLOW_S)
        whole = self._network.whole
        if not whole.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (whole, self._ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self._ended.is_set():
            raise LinkError("cut")


class NatsProxy:
    """A TCP proxy in front of NATS, for one client: the client's way to NATS can be cut alone."""

    def __init__(self, nats_port: int) -> None:
        self._nats_port = nats_port
        self._mode = ""
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks = TaskSet()
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_client, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        self.mend()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._tasks.end_all()

    def cut(self, mode: str) -> None:
        """`reset`: connections break, new ones too. `hole`: what is sent arrives when it is mended."""
        self._mode = mode
        if mode == "hole":
            self._whole.clear()
        else:
            for writer in list(self._writers):
                writer.transport.abort()

    def mend(self) -> None:
        self._mode = ""
        self._whole.set()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "reset":
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._nats_port)
        except OSError:
            writer.transport.abort()
            return
        for pump in (self._pump(reader, up_writer), self._pump(up_reader, writer)):
            self._tasks.start(pump)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                if not self._whole.is_set():
                    await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except (OSError, RuntimeError):
            pass  # cut (uvloop says RuntimeError); the other side is told by the close below
        finally:
            self._writers.discard(writer)
            writer.close()
