"""Messages on a stream of bytes: the length as 4 bytes, then MessagePack. Both ends of an adapter's socket use it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
READ_LIMIT_BYTES = 1 << 20


class FrameError(Exception):
    """What came is no frame."""


class FrameReader(Generic[T]):
    def __init__(self, stream: asyncio.StreamReader, kind: type[T]) -> None:
        self._stream = stream
        self._decoder = msgspec.msgpack.Decoder(kind)

    async def read(self) -> T | None:
        """The next message; None at the end of the stream. Raises `FrameError`."""
        try:
            size = int.from_bytes(await self._stream.readexactly(4), "little")
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes")
            return self._decoder.decode(await self._stream.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.MsgspecError as error:
            raise FrameError(str(error)) from None


class FrameWriter:
    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, message: object) -> None:
        """Never waits: the other end reads all that comes."""
        body = self._encoder.encode(message)
        self._stream.write(len(body).to_bytes(4, "little") + body)

    async def drain(self) -> None:
        await self._stream.drain()

    def close(self) -> None:
        self._stream.close()
