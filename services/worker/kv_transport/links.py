"""The seam between the transfer protocol and what carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum

import numpy as np
import torch

Buffer = np.ndarray | torch.Tensor
"""`[n]` uint8; a tensor lies on a CUDA device, and only links of a network that `reads_device` take one."""


class Refusal(StrEnum):
    """Why whoever came to a transport's door was sent away."""

    HOST = "host"
    """It is not the host of a peer."""
    HANDSHAKE = "handshake"
    """It said nothing, or not all that begins a conversation."""
    HELLO = "hello"
    """Its first message is none, or where it says that it is nobody can be reached."""
    TICKET = "ticket"
    """It showed no ticket, or none that is good here and for it."""


def name_of(address: str) -> str:
    """What of an address may be shown: all before `/`."""
    return address.partition("/")[0]


class Link(ABC):
    """An ordered, tagged, two-way connection to one peer; all its calls come from one event loop.

    A buffer that was given to `send` or `receive` belongs to the link until the call returns. If the call is cancelled the
    link is of no further use: the caller must `abort` it, and must not use the buffer again.
    """

    peer: str
    """The address of the peer's own network: the one that was dialled, or to which the dialler was answered."""

    @abstractmethod
    async def send(self, tag: int, buffer: Buffer) -> None:
        """Returns when the buffer may be reused, which does not mean that it arrived. Raises `LinkError`."""

    @abstractmethod
    async def receive(self, tag: int, buffer: Buffer) -> None:
        """The next message of a tag into the front of `buffer`, which must be large enough. Raises `LinkError`."""

    @abstractmethod
    async def abort(self) -> None:
        """Breaks the connection: every pending call at both ends raises. May be called again."""


class Network(ABC):
    """Makes links. `open` is called once, before anything else."""

    reads_device = False
    """Whether links send from and receive into CUDA memory. Known after `open`."""

    on_refused: Callable[[Refusal, int], None] = staticmethod(lambda why, count: None)
    """Hears how many were sent away; whoever opens the network may set it."""

    @abstractmethod
    async def open(self, on_link: Callable[[Link], None]) -> str:
        """Listens; returns the address that peers connect to. Raises `TransferError` with reason UNUSABLE."""

    def admit(self, address: str) -> None:  # noqa: B027
        """The one with this address may dial from now on: called before it is told where."""

    @abstractmethod
    async def connect(self, address: str) -> Link:
        """Raises `LinkError`."""

    @abstractmethod
    async def close(self) -> None:
        """After all links were aborted. May be called without `open`."""
