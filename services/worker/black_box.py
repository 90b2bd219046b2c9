"""What an instance was computing when its process ended: memory of its node agent, which outlives the process."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

NUM_BYTES = 64 * 1024
_LENGTH = struct.Struct("=I")


def make() -> int:
    """Descriptor of an empty one."""
    descriptor = os.memfd_create("black box")
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def read(descriptor: int) -> tuple[str, ...]:
    """Ids of the requests that were noted last; none of notes that were being written."""
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    noted = os.pread(descriptor, min(length, NUM_BYTES), _LENGTH.size).decode(errors="replace")
    return tuple(noted.split("\n")) if noted else ()


class BlackBox:
    """The instance's end. Notes take a microsecond, so that they may stand before each step."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the one that its agent made; below 0: there is none, and nothing is noted."""
        self._memory = mmap.mmap(descriptor, NUM_BYTES) if descriptor >= 0 else None
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
        self._noted: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not self._noted

    def note(self, request_ids: Sequence[str]) -> None:
        """Replaces what was noted before."""
        memory = self._memory
        if memory is None or request_ids == self._noted:
            return
        self._noted = request_ids
        text = "\n".join(request_ids).encode()
        if len(text) > NUM_BYTES - _LENGTH.size:
            text = text[: NUM_BYTES - _LENGTH.size].rpartition(b"\n")[0]
        memory[: _LENGTH.size] = _LENGTH.pack(0)
        memory[_LENGTH.size : _LENGTH.size + len(text)] = text
        memory[: _LENGTH.size] = _LENGTH.pack(len(text))
