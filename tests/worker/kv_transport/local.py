"""Links inside one process, for instances that share an event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.links import Buffer, Link, Network

_Posted = tuple[np.ndarray, asyncio.Future[None]]


class LocalLink(Link):
    """Like a rendezvous: `send` returns when the peer has copied the message."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._other: LocalLink
        self._closed = False
        self._arrived: defaultdict[int, deque[_Posted]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[_Posted]] = defaultdict(deque)

    @staticmethod
    def pair(dialler: str, listener: str) -> tuple[LocalLink, LocalLink]:
        near, far = LocalLink(listener), LocalLink(dialler)
        near._other, far._other = far, near
        return near, far

    async def send(self, tag: int, buffer: Buffer) -> None:
        await self._other._post(tag, buffer, self._other._arrived, self._other._wanted)

    async def receive(self, tag: int, buffer: Buffer) -> None:
        await self._post(tag, buffer, self._wanted, self._arrived)

    async def _post(
        self, tag: int, buffer: Buffer, mine: dict[int, deque[_Posted]], theirs: dict[int, deque[_Posted]]
    ) -> None:
        assert isinstance(buffer, np.ndarray)
        if self._closed:
            raise LinkError("the link is closed")
        done = asyncio.get_running_loop().create_future()
        mine[tag].append((buffer, done))
        if theirs[tag]:
            (message, sent), (target, received) = self._arrived[tag].popleft(), self._wanted[tag].popleft()
            target[: len(message)] = message
            for future in (sent, received):
                if not future.done():
                    future.set_result(None)
        if not (mine[tag] or theirs[tag]):
            del mine[tag], theirs[tag]
        await done

    async def abort(self) -> None:
        for end in (self, self._other):
            end._closed = True
            for posted in (end._arrived, end._wanted):
                for _, future in itertools.chain.from_iterable(posted.values()):
                    if not future.done():
                        future.set_exception(LinkError("the link was closed"))
                posted.clear()


class LocalHub:
    """The listeners of a process, by address."""

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Link], None]] = {}
        self._numbers = itertools.count(1)

    def new_address(self) -> str:
        return f"local:{next(self._numbers)}"


class LocalNetwork(Network):
    def __init__(self, hub: LocalHub, address: str | None = None) -> None:
        self._hub = hub
        self._address = address or hub.new_address()
        self._links: list[LocalLink] = []

    async def open(self, on_link: Callable[[Link], None]) -> str:
        if self._address in self._hub.listeners:
            raise TransferError(TransferReason.UNUSABLE, f"{self._address} is taken")
        self._hub.listeners[self._address] = on_link
        return self._address

    async def connect(self, address: str) -> Link:
        accept = self._hub.listeners.get(address)
        if accept is None:
            raise LinkError(f"nobody listens at {address}")
        near, far = LocalLink.pair(self._address, address)
        self._links.append(near)
        accept(far)
        return near

    async def close(self) -> None:
        self._hub.listeners.pop(self._address, None)
        for link in self._links:
            await link.abort()
        self._links.clear()
