"""A folder of KV blocks in virtual time, which instances share: one block is read at a time, and another one written."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from shared.engine.calls import Call, FoundOnDisk, LostOnDisk
from shared.engine.plan import CopyKind, KvCopy
from shared.policies.kv_tiers import giving_way, used_at_s

T = TypeVar("T")

LOOK_S = 10.0
"""Until the other instances know of a file, at most."""


class Host(Protocol):
    """An instance that shares the folder."""

    def apply(self, call: Call[T]) -> T: ...


class _Stored(NamedTuple):
    key: tuple[str, bytes]
    """Model and hash."""
    at_s: float
    num_bytes: int = 1


class VirtualDisk:
    def __init__(self, max_blocks: int, read_block_s: float, write_block_s: float) -> None:
        """Blocks are counted alike, whatever their model."""
        self._max_blocks = max_blocks
        self._block_s = {CopyKind.READ: read_block_s, CopyKind.WRITE: write_block_s}
        self._free_s = dict.fromkeys(self._block_s, 0.0)
        self._files: dict[tuple[str, bytes], float] = {}
        """By model and hash: when it was used."""
        self._hosts: list[Host] = []

    def __len__(self) -> int:
        """Blocks in the folder."""
        return len(self._files)

    def join(self, host: Host, model: str) -> None:
        """The instance shares the folder, and looks what is there of a model that it has loaded."""
        if host not in self._hosts:
            self._hosts.append(host)
        here = sorted((at_s, block_hash) for (name, block_hash), at_s in self._files.items() if name == model)
        host.apply(FoundOnDisk(model, [block_hash for _, block_hash in here]))

    def begin(self, copy: KvCopy, now: float) -> tuple[float, float]:
        """Returns the time at which the copy ends, and how long it takes from its turn on."""
        seconds = self._block_s[copy.kind] * len(copy.hashes)
        self._free_s[copy.kind] = max(now, self._free_s[copy.kind]) + seconds
        return self._free_s[copy.kind], seconds

    def end(self, copy: KvCopy, now: float) -> bool:
        """Whether it succeeded."""
        keys = [(copy.model, block_hash) for block_hash in copy.hashes]
        num_new = sum(key not in self._files for key in keys)
        if num_new and (copy.kind == CopyKind.READ or not self._make_room(num_new, now - copy.gives_way_s)):
            return False
        for depth, key in enumerate(keys, copy.depth):
            self._files[key] = used_at_s(now, depth)
        return True

    def _make_room(self, num_blocks: int, before_s: float) -> bool:
        if len(self._files) + num_blocks <= self._max_blocks:
            return True
        stored = [_Stored(key, at_s) for key, at_s in self._files.items()]
        going = giving_way(stored, num_blocks, self._max_blocks, before_s)
        for one in going or ():
            del self._files[one.key]
            model, block_hash = one.key
            for host in self._hosts:
                host.apply(LostOnDisk(model, [block_hash]))
        return going is not None

    def tell(self, copy: KvCopy) -> None:
        """The other instances have looked, some time after a write."""
        here = [block_hash for block_hash in copy.hashes if (copy.model, block_hash) in self._files]
        for host in self._hosts:
            host.apply(FoundOnDisk(copy.model, here))
