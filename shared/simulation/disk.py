"""A folder of KV blocks in virtual time, which instances share: one block is read at a time, and another one written."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar

from shared.engine.calls import Call, FoundOnDisk, LostOnDisk
from shared.engine.plan import CopyKind, KvCopy

T = TypeVar("T")

LOOK_S = 10.0
"""Until the other instances know of a file, at most."""


class Host(Protocol):
    """An instance that shares the folder."""

    def apply(self, call: Call[T]) -> T: ...


class VirtualDisk:
    def __init__(self, max_blocks: int, read_block_s: float, write_block_s: float) -> None:
        """Blocks are counted alike, whatever their model."""
        self._max_blocks = max_blocks
        self._block_s = {CopyKind.READ: read_block_s, CopyKind.WRITE: write_block_s}
        self._free_s = dict.fromkeys(self._block_s, 0.0)
        self._files: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """By model and hash, the one that was longest not read first."""
        self._hosts: list[Host] = []

    def __len__(self) -> int:
        """Blocks in the folder."""
        return len(self._files)

    def join(self, host: Host, model: str) -> None:
        """The instance shares the folder, and looks what is there of a model that it has loaded."""
        if host not in self._hosts:
            self._hosts.append(host)
        host.apply(FoundOnDisk(model, [block_hash for name, block_hash in self._files if name == model]))

    def begin(self, copy: KvCopy, now: float) -> tuple[float, float]:
        """Returns the time at which the copy ends, and how long it takes from its turn on."""
        seconds = self._block_s[copy.kind] * len(copy.hashes)
        self._free_s[copy.kind] = max(now, self._free_s[copy.kind]) + seconds
        return self._free_s[copy.kind], seconds

    def end(self, copy: KvCopy) -> bool:
        """Whether it succeeded."""
        keys = [(copy.model, block_hash) for block_hash in copy.hashes]
        if copy.kind == CopyKind.READ and not all(key in self._files for key in keys):
            return False
        for key in keys:
            self._files[key] = None
            self._files.move_to_end(key)
        while len(self._files) > self._max_blocks:
            model, block_hash = self._files.popitem(last=False)[0]
            for host in self._hosts:
                host.apply(LostOnDisk(model, [block_hash]))
        return True

    def tell(self, copy: KvCopy) -> None:
        """The other instances have looked, some time after a write."""
        here = [block_hash for block_hash in copy.hashes if (copy.model, block_hash) in self._files]
        for host in self._hosts:
            host.apply(FoundOnDisk(copy.model, here))
