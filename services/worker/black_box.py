"""What an instance was computing when its process ended: memory of its node agent, which outlives the process."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NUM_BYTES = 64 * 1024
_LENGTH = struct.Struct("=I")


def make() -> int:
    """Descriptor of an empty one."""
    descriptor = os.memfd_create("black box")
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def read(descriptor: int) -> tuple[str, ...]:
    """Ids of the requests that were noted last; none where the process ended while it noted some."""
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    noted = os.pread(descriptor, min(length, NUM_BYTES), _LENGTH.size).decode(errors="replace")
    return tuple(noted.split("\n")) if noted else ()


class BlackBox:
    """The instance's end, of any of its threads. A note takes a microsecond."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the one that its agent made; below 0: there is none, and nothing is noted."""
        self._memory = mmap.mmap(descriptor, NUM_BYTES) if descriptor >= 0 else None
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
        self._lock = threading.Lock()
        self._computed: Sequence[str] = ()
        self._prepared: set[str] = set()

    @property
    def is_computing(self) -> bool:
        """Whether `note` had any."""
        return bool(self._computed)

    def note(self, request_ids: Sequence[str]) -> None:
        """What is computed from now on, in place of what was before."""
        if request_ids != self._computed:
            with self._lock:
                self._computed = request_ids
                self._write()

    @contextmanager
    def preparing(self, request_id: str) -> Iterator[None]:
        """What a request needs is fetched or compiled meanwhile."""
        with self._lock:
            self._prepared.add(request_id)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._prepared.discard(request_id)
                self._write()

    def _write(self) -> None:
        memory = self._memory
        if memory is None:
            return
        text = "\n".join((*self._computed, *self._prepared)).encode()
        if len(text) > NUM_BYTES - _LENGTH.size:
            text = text[: NUM_BYTES - _LENGTH.size].rpartition(b"\n")[0]
        memory[: _LENGTH.size] = _LENGTH.pack(0)
        memory[_LENGTH.size : _LENGTH.size + len(text)] = text
        memory[: _LENGTH.size] = _LENGTH.pack(len(text))
