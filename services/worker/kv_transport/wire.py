"""What two ends say to each other on a link.

Tag 0 carries control messages in frames of `CONTROL_BYTES`; tag n >= 1 the chunks of transfer n, in order, each one message
of nothing but blocks. The end that dialled is the source and numbers the transfers:

    source                               destination
    Open(ticket, blocks, block bytes)  ->
                                     <-  Accept | Ended(reason): then the destination closes the link
    chunk 0 .. n-1                   =>                                        at most `WINDOW` are on their way
    Sent(n, checksum)                ->
                                     <-  Ended(bytes, checksum)
    The destination may say Cancel. Then, or when it stops by itself, the source says Sent(chunks so far, aborted) and sends
    a filler of one byte for each chunk that is left, so that no receive stays posted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from services.worker.kv_transport.errors import LinkError, TransferReason

VERSION = 2
CONTROL_TAG = 0
CONTROL_BYTES = 512
WINDOW = 2
"""Chunks that are sent, and received, at a time."""
PIECE_BYTES = 256 << 10
"""Bytes that are copied before they are summed: few enough to be in a core's cache still."""
LINE_BYTES = 4096
_LENGTH = struct.Struct("<H")


class Open(msgspec.Struct, tag="open", array_like=True):
    transfer: int
    ticket: bytes
    num_blocks: int
    block_bytes: int
    chunk_blocks: int
    checked_bytes: int
    version: int = VERSION


class Accept(msgspec.Struct, tag="accept", array_like=True):
    transfer: int


class Sent(msgspec.Struct, tag="sent", array_like=True):
    """`num_chunks`: how many were sent; `aborted`: they are not all, and fillers follow."""

    transfer: int
    num_chunks: int
    checksum: int
    aborted: bool = False


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """`reason` None: everything arrived and lies in the pool."""

    transfer: int
    reason: TransferReason | None
    num_bytes: int
    checksum: int
    detail: str = ""


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    transfer: int


Control = Open | Accept | Sent | Ended | Cancel
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(message: Control) -> np.ndarray:
    """`[CONTROL_BYTES]` uint8"""
    body = _encoder.encode(message)
    frame = np.zeros(CONTROL_BYTES, dtype=np.uint8)
    content = _LENGTH.pack(len(body)) + body
    frame[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return frame


def decode_control(frame: np.ndarray) -> Control:
    """Raises `LinkError` for anything that is no control message: the link cannot be trusted any more."""
    content = frame.tobytes()
    (length,) = _LENGTH.unpack_from(content)
    try:
        return _decoder.decode(content[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LinkError(f"no control message: {error}") from error


def checksum(payload: np.ndarray, checked_bytes: int, seed: int = 0) -> int:
    """32 bits over `[n]` uint8: the CRC of 64-bit sums of the first `checked_bytes` of each line of 4 KiB, and of what is
    left over. Whatever was lost, repeated or put elsewhere by 4 KiB or more is seen; less, or a changed word, only where it
    is among those summed. With all of them this runs at the speed of memory, which a fast wire has none to spare of."""
    whole = len(payload) // LINE_BYTES * LINE_BYTES
    if whole:
        lines = payload[:whole].view(np.uint64).reshape(-1, LINE_BYTES // 8)
        seed = zlib.crc32(np.einsum("ij->i", lines[:, : checked_bytes // 8]).data, seed)
    return zlib.crc32(payload[whole:].data, seed) if whole < len(payload) else seed


def combined(digests: Iterable[int]) -> int:
    """The checksum of a transfer from those of its chunks."""
    return zlib.crc32(b"".join(digest.to_bytes(4, "little") for digest in digests))


def device_checksum(payload: torch.Tensor, checked_bytes: int, seed: int = 0) -> int:
    """`checksum` of `[n]` uint8 on a CUDA device; only the sums come to the host. On the current stream."""
    whole = payload.numel() // LINE_BYTES * LINE_BYTES
    if whole:
        lines = payload[:whole].view(torch.int64).view(-1, LINE_BYTES // 8)
        sums = lines[:, : checked_bytes // 8].sum(1)  # wraps around as uint64 does
        seed = zlib.crc32(sums.cpu().numpy().data, seed)
    return zlib.crc32(payload[whole:].cpu().numpy().data, seed) if whole < payload.numel() else seed
