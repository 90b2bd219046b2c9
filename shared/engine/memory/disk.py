"""Disk as the third tier of the KV pool: which blocks lie there, and the copies between it and host memory.

The files belong to a store (`services/worker/kv_disk/store.py`), which instances may share; what is here is an instance's
view of it. A block is found by its chained hash, in which the salt of its tenant is, as in the other tiers. That a block
lies there is a belief: another instance may have dropped its file, and a read that fails ends it.

    host block, cached  --write-->  on disk  --read-->  host block, cached  --restore-->  device

A copy under way holds a reference to its host block. What is being read is found by whoever else wants it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from shared.engine.counters import EngineCounters
from shared.engine.memory.blocks import BlockPool
from shared.engine.memory.cache_news import CacheNews
from shared.engine.plan import CopyKind, KvCopy

MAX_KNOWN = 1 << 18
"""Blocks of a model that are known to lie on disk; those that were longest not named are forgotten first."""
MAX_TOLD = 1 << 12
"""Blocks of a model of which the scheduler hears."""


class DiskKv:
    def __init__(self, host: BlockPool, counters: EngineCounters, copy_ids: Iterator[int], news: CacheNews) -> None:
        self._host = host
        self._counters = counters
        self._copy_ids = copy_ids
        self._news = news
        self._known: dict[str, OrderedDict[bytes, None]] = {}
        """By model: hashes of the blocks on disk, the one that was longest not named first."""
        self._copies: dict[int, KvCopy] = {}
        self._void: set[int] = set()
        """Copies of which nothing is to be found when they end."""
        self._started: list[KvCopy] = []
        self._coming: dict[tuple[str, bytes], int] = {}
        """By model and hash: the host block into which it is being read."""
        self._leaving: set[tuple[str, bytes]] = set()
        """Being written."""
        self._unread: dict[str, set[int]] = {}
        """By model: host blocks that do not hold yet what they will."""

    @property
    def num_reading(self) -> int:
        """Blocks being read."""
        return len(self._coming)

    @property
    def num_writing(self) -> int:
        return len(self._leaving)

    # ------------------------------------------------------------------------------------------------ the index

    def add_model(self, name: str) -> None:
        self._known[name], self._unread[name] = OrderedDict(), set()

    def remove_model(self, name: str) -> None:
        """Forgets the model, of which nothing is being copied; its files stay."""
        for block_hash in self._known.pop(name):
            self._news.note(block_hash)
        del self._unread[name]

    def num_known(self, model: str) -> int:
        """Blocks of the model that are known to lie there."""
        return len(self._known[model])

    def has_any(self, model: str) -> bool:
        return bool(self._known.get(model))

    def is_known(self, model: str, block_hash: bytes) -> bool:
        """Whether it lies there."""
        return block_hash in self._known[model]

    def add(self, model: str, hashes: Iterable[bytes]) -> None:
        """They lie there, the one that will be needed soonest last."""
        known = self._known.get(model)
        if known is None:
            return
        for block_hash in hashes:
            if block_hash not in known:
                self._news.note(block_hash)
            known[block_hash] = None
            known.move_to_end(block_hash)
            if len(known) > MAX_KNOWN:
                self._news.note(known.popitem(last=False)[0])

    def lose(self, model: str, hashes: Iterable[bytes]) -> None:
        """They do not lie there any more."""
        known = self._known.get(model, OrderedDict())
        for block_hash in hashes:
            if block_hash in known:
                del known[block_hash]
                self._news.note(block_hash)

    def clear(self) -> None:
        """Forgets all that lies there; what is being copied will not be found either."""
        self._void.update(self._copies)
        for model, known in self._known.items():
            self.lose(model, list(known))

    def give_up_reads(self) -> list[KvCopy]:
        """Nobody is to wait for what is being read: returns these copies, whose host blocks remain theirs."""
        copies = [self._copies[copy_id] for copy_id in self._copies if self._copies[copy_id].kind == CopyKind.READ]
        self._void.update(copy.copy_id for copy in copies)
        self._coming.clear()
        return copies

    def holds(self, model: str, block_hash: bytes) -> bool:
        """Whether it lies there, or is being written."""
        return block_hash in self._known[model] or (model, block_hash) in self._leaving

    def touch(self, model: str, block_hash: bytes) -> None:
        """It was named: others are forgotten before it."""
        if block_hash in (known := self._known[model]):
            known.move_to_end(block_hash)

    def hashes(self) -> Iterator[bytes]:
        """Those that were named last."""
        for known in self._known.values():
            yield from islice(reversed(known), MAX_TOLD)

    def has(self, block_hash: bytes) -> bool:
        """Whether it lies there, of whatever model."""
        return any(block_hash in known for known in self._known.values())

    # -------------------------------------------------------------------------------------------------- copies

    def coming(self, model: str, block_hash: bytes) -> int | None:
        """The host block into which it is being read."""
        return self._coming.get((model, block_hash))

    def is_unread(self, model: str, host_block: int) -> bool:
        """Whether the host block does not hold yet what it will."""
        return host_block in self._unread[model]

    def is_leaving(self, model: str, block_hash: bytes) -> bool:
        """Whether it is being written."""
        return (model, block_hash) in self._leaving

    def write(self, model: str, block_hash: bytes, host_block: int, depth: int, gives_way_s: float) -> None:
        """Begins to write a cached host block. `depth`: blocks of its chain before it; `gives_way_s`: see `KvCopy`."""
        self._host.retain(model, [host_block])
        self._leaving.add((model, block_hash))
        self._start(CopyKind.WRITE, model, block_hash, host_block, depth, gives_way_s)

    def read(self, model: str, block_hash: bytes, depth: int) -> int | None:
        """Begins to read a block that lies there. Returns its host block, to which the copy has the one reference; None:
        there is no room for it."""
        blocks = self._host.allocate(model, 1)
        if blocks is None:
            return None
        self._coming[model, block_hash] = blocks[0]
        self._unread[model].add(blocks[0])
        self._start(CopyKind.READ, model, block_hash, blocks[0], depth)
        return blocks[0]

    def _start(
        self, kind: CopyKind, model: str, block_hash: bytes, host_block: int, depth: int, gives_way_s: float = 0.0
    ) -> None:
        copy = KvCopy(
            next(self._copy_ids),
            kind,
            model,
            [],
            [host_block],
            hashes=[block_hash],
            depth=depth,
            gives_way_s=gives_way_s,
        )
        self._copies[copy.copy_id] = copy
        self._started.append(copy)

    def started_copies(self) -> list[KvCopy]:
        """Those begun since the last call."""
        started, self._started = self._started, []
        return started

    def copy(self, copy_id: int) -> KvCopy | None:
        """One that is under way."""
        return self._copies.get(copy_id)

    def has_copies(self, model: str) -> bool:
        return any(copy.model == model for copy in self._copies.values())

    def on_copy(self, copy_id: int, ok: bool) -> KvCopy | None:
        """A copy has ended. Returns it, if it was one of these."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return None
        model, (host_block,), (block_hash,) = copy.model, copy.host_blocks, copy.hashes
        is_void = copy_id in self._void
        self._void.discard(copy_id)
        if copy.kind == CopyKind.WRITE:
            self._leaving.discard((model, block_hash))
            if ok:
                self._counters.written_blocks[model] += 1
                if not is_void:
                    self.add(model, [block_hash])
        else:
            if self._coming.get((model, block_hash)) == host_block:
                del self._coming[model, block_hash]
            self._unread[model].discard(host_block)
            if ok:
                self._counters.read_blocks[model] += 1
                if not is_void:
                    self._host.register(model, [host_block], [block_hash])
                    self.touch(model, block_hash)
            else:
                self._counters.unreadable_blocks[model] += 1
                self.lose(model, [block_hash])
        self._host.release(model, [host_block])
        return copy

    def references(self) -> Iterator[tuple[str, int]]:
        """(model, host block) of every reference held; for tests."""
        for copy in self._copies.values():
            for block in copy.host_blocks:
                yield copy.model, block
