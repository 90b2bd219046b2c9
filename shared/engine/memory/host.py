"""Host memory as the second tier of the KV pool: incremental checkpoints and their way back (ConServe section 4.4).

A checkpoint is a host block registered under the chained hash of its block, as in the device's prefix cache; a sequence
holds references to those of its own blocks, so that they outlive its preemption. When it has ended they stay findable
until their blocks are needed: a prefix cache of the second tier.

Copies run beside the steps. Each holds a reference to every block it reads or writes until `on_copy`, so nothing that
happens to a sequence meanwhile can hand these blocks to anybody else.

Blocks of ended requests come here too, and go on to disk (tiers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from shared.engine.counters import EngineCounters
from shared.engine.memory.backups import Backups
from shared.engine.memory.blocks import BlockPool
from shared.engine.memory.cache_news import CacheNews
from shared.engine.memory.disk import DiskKv
from shared.engine.plan import CopyKind, KvCopy
from shared.engine.sequence import Sequence, State


class _Copy:
    """A copy under way, and for whom."""

    __slots__ = ("effect", "first_block", "hashes", "is_void", "restore", "sequence")

    def __init__(self, effect: KvCopy, sequence: Sequence | None, first_block: int, hashes: list[bytes]) -> None:
        self.effect = effect
        self.sequence = sequence
        """None: of blocks whose requests have ended."""
        self.first_block = first_block
        self.hashes = hashes
        self.is_void = False
        """Nothing of it is to be found when it ends."""
        self.restore = None if sequence is None else sequence.restore[1]
        """Identifies the restore it is part of: a sequence that is preempted meanwhile begins another."""


class HostKv:
    """The host pool of one instance (merged blocks of the device's size) and the copies under way."""

    def __init__(
        self,
        device: BlockPool,
        num_merged: int,
        counters: EngineCounters,
        copy_ids: Iterator[int],
        news: CacheNews | None = None,
    ) -> None:
        self.device = device
        self.pool = BlockPool(num_merged, news) if num_merged > 0 else None
        """None: there is no host memory, and nothing is ever checkpointed."""
        self.backups = None if self.pool is None else Backups(self.pool, counters)
        """Copies of other instances' blocks, in the same pool."""
        self.num_restoring_blocks = 0
        """Being copied back."""
        self.num_checkpointing_blocks = 0
        self._counters = counters
        self._copies: dict[int, _Copy] = {}
        self._started: list[KvCopy] = []
        self._copy_ids = copy_ids
        self._holders: dict[int, Sequence] = {}
        """Sequences with checkpoints."""
        self._offloading: set[tuple[str, bytes]] = set()
        """By model and hash: blocks of ended requests that are being copied here."""
        self.kept_since_s: dict[str, float] = {}
        """By model: what was used since is kept, and checkpoints of online sequences, which are rarely needed, do not take
        its place."""
        self.disk: DiskKv | None = None
        """The tier below, from which blocks are read into the pool."""

    @property
    def used_share(self) -> float:
        """Used share of the pool, 0 to 1."""
        return 0.0 if self.pool is None else self.pool.used_share

    def add_model(self, name: str, block_size: int, blocks_per_merged: int) -> None:
        if self.pool is not None:
            self.pool.add_model(name, block_size, blocks_per_merged)

    def has_copies(self, model: str) -> bool:
        is_coming = self.backups is not None and self.backups.has_coming(model)
        return is_coming or any(copy.effect.model == model for copy in self._copies.values())

    def remove_model(self, name: str) -> None:
        if self.pool is not None and self.backups is not None:
            self.backups.remove_model(name)
            self.pool.remove_model(name)

    def started_copies(self) -> list[KvCopy]:
        """Those begun since the last call."""
        started, self._started = self._started, []
        return started

    # ------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, sequence: Sequence, max_blocks: int) -> int:
        """Begins to copy up to `max_blocks` filled blocks that have no host copy. Returns how many it begins with."""
        pool, name = self.pool, sequence.model
        if pool is None:
            return 0
        first = len(sequence.host_blocks) + sequence.num_checkpointing
        if not sequence.num_checkpointing:
            known = pool.find(name, sequence.hashes[first : sequence.num_filled])
            pool.retain(name, known)
            self.hold(sequence, known)
            first += len(known)
        count = min(max_blocks, sequence.num_filled - first)
        if sequence.is_online and name in self.kept_since_s and count > 0:
            count = pool.num_idle(name, self.kept_since_s[name], count)
        if count > pool.num_available(name):
            self.make_room(name, sequence.num_tokens, count)
            count = min(count, pool.num_available(name))
        if count <= 0:
            return 0
        host = pool.allocate(name, count)
        assert host is not None
        blocks, hashes = sequence.blocks[first : first + count], sequence.hashes[first : first + count]
        self._start(CopyKind.CHECKPOINT, name, sequence, first, hashes, blocks, host)
        self.device.retain(name, sequence.blocks[first : first + count])
        sequence.num_checkpointing += count
        self.num_checkpointing_blocks += count
        return count

    def hold(self, sequence: Sequence, host_blocks: list[int]) -> None:
        """The blocks, each with a reference, hold its next blocks."""
        if host_blocks:
            sequence.host_blocks.extend(host_blocks)
            self._holders[sequence.number] = sequence

    def make_room(self, model: str, num_tokens: int, num_blocks: int) -> None:
        """Gives up the checkpoints that are the cheapest to recompute for their size: those of the shortest sequences,
        if shorter than `num_tokens`, since a token costs the more the longer its context; before them copies that are kept
        for other instances."""
        assert self.pool is not None and self.backups is not None
        self.backups.give_up(model, num_blocks)
        shorter = [
            other for other in self._holders.values() if other.num_tokens < num_tokens and not other.num_checkpointing
        ]
        shorter.sort(key=lambda other: (other.num_tokens, other.number))
        for other in shorter:
            if self.pool.num_available(model) >= num_blocks:
                return
            self._counters.dropped_checkpoint_blocks[other.model] += len(other.host_blocks)
            self.release(other)

    def release(self, sequence: Sequence) -> None:
        """Drops the sequence's hold on its checkpoints and on what it was to restore from."""
        if self.pool is not None:
            self._holders.pop(sequence.number, None)
            self.pool.release(sequence.model, sequence.host_blocks)
            sequence.host_blocks = []

    def offload(self, model: str, blocks: list[tuple[bytes, int]]) -> None:
        """Begins to copy blocks that nobody may need any more, each with its hash; there is room for them."""
        assert self.pool is not None
        hashes, device = [block_hash for block_hash, _ in blocks], [block for _, block in blocks]
        host = self.pool.allocate(model, len(device))
        assert host is not None
        self._start(CopyKind.CHECKPOINT, model, None, 0, hashes, device, host)
        self.device.retain(model, device)
        self._offloading.update((model, block_hash) for block_hash in hashes)
        self.num_checkpointing_blocks += len(device)

    def clear_cache(self) -> None:
        """Makes what nobody has a reference to unfindable, here and on disk, and what is on its way."""
        if self.pool is not None:
            self.pool.clear_cache()
        for copy in self._copies.values():
            if copy.sequence is None:
                copy.is_void = True
                _forget_alone(self.device, copy.effect.model, copy.effect.device_blocks)
        if self.disk is not None and self.pool is not None:
            self.disk.clear()
            for model, block in self.disk.references():
                _forget_alone(self.pool, model, [block])

    def is_offloading(self, model: str, block_hash: bytes) -> bool:
        return (model, block_hash) in self._offloading

    # ---------------------------------------------------------------------------------------------- restores

    def begin_restore(self, sequence: Sequence, first_block: int, host_blocks: list[int]) -> None:
        """`sequence.blocks` are allocated; those from `first_block` on are to be filled from the host blocks, whose
        references are the sequence's from now on."""
        sequence.restore = (first_block, host_blocks)
        sequence.state = State.RESTORING

    def cut_restore(self, sequence: Sequence, host_block: int) -> bool:
        """The host block will not hold what it should: what is to be restored ends before it. Returns whether the restore is
        over by that."""
        assert self.pool is not None
        host = sequence.restore[1]
        if host_block not in host:
            return False
        at = host.index(host_block)
        self.pool.release(sequence.model, host[at:])
        del host[at:]
        return not host and not any(copy.restore is host for copy in self._copies.values())

    def abandon_restore(self, sequence: Sequence) -> None:
        """Copies under way still arrive, in blocks that are theirs, and end up in the prefix cache."""
        if self.pool is not None:
            self.pool.release(sequence.model, sequence.restore[1])
            sequence.restore = (0, [])

    def copy_back(self, restoring: Iterable[Sequence], max_blocks: int) -> None:
        """Begins to copy up to `max_blocks` blocks for sequences that are being restored, first come first served."""
        for sequence in restoring:
            first, host = sequence.restore
            part = self._filled(sequence.model, host[:max_blocks])
            if not part:
                continue
            blocks, hashes = sequence.blocks[first : first + len(part)], sequence.hashes[first : first + len(part)]
            del host[: len(part)]
            self._start(CopyKind.RESTORE, sequence.model, sequence, first, hashes, blocks, part)
            sequence.restore = (first + len(part), host)
            self.device.retain(sequence.model, blocks)
            self.num_restoring_blocks += len(part)
            max_blocks -= len(part)
            if max_blocks <= 0:
                return

    def _filled(self, model: str, host_blocks: list[int]) -> list[int]:
        """Those before the first that is still being read."""
        disk = self.disk
        if disk is None:
            return host_blocks
        return list(takewhile(lambda block: not disk.is_unread(model, block), host_blocks))

    # ------------------------------------------------------------------------------------------------- copies

    def _start(
        self,
        kind: CopyKind,
        model: str,
        sequence: Sequence | None,
        first: int,
        hashes: list[bytes],
        device: list[int],
        host: list[int],
    ) -> None:
        effect = KvCopy(next(self._copy_ids), kind, model, device, host)
        self._copies[effect.copy_id] = _Copy(effect, sequence, first, hashes)
        self._started.append(effect)

    def copy(self, copy_id: int) -> KvCopy | None:
        """One that is under way."""
        copy = self._copies.get(copy_id)
        return None if copy is None else copy.effect

    def on_copy(self, copy_id: int, ok: bool) -> tuple[Sequence, bool] | None:
        """A copy has ended. Returns a sequence whose restore is over by that, and whether it succeeded."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return None
        if copy.effect.kind == CopyKind.CHECKPOINT:
            self._on_checkpoint(copy, ok)
            return None
        return self._on_restore(copy, ok)

    def _on_checkpoint(self, copy: _Copy, ok: bool) -> None:
        effect, sequence = copy.effect, copy.sequence
        pool, count = self.pool, len(copy.effect.host_blocks)
        assert pool is not None
        self.device.release(effect.model, effect.device_blocks)
        self.num_checkpointing_blocks -= count
        if sequence is None:
            self._offloading.difference_update((effect.model, block_hash) for block_hash in copy.hashes)
            if ok:
                self._counters.offloaded_blocks[effect.model] += count
                if not copy.is_void:
                    pool.register(effect.model, effect.host_blocks, copy.hashes)
            pool.release(effect.model, effect.host_blocks)
            return
        sequence.num_checkpointing -= count
        if ok:
            self._counters.checkpointed_blocks[effect.model] += count
            pool.register(effect.model, effect.host_blocks, copy.hashes)
        if ok and sequence.state != State.ENDED and len(sequence.host_blocks) == copy.first_block:
            self.hold(sequence, effect.host_blocks)
        else:
            pool.release(effect.model, effect.host_blocks)

    def _on_restore(self, copy: _Copy, ok: bool) -> tuple[Sequence, bool] | None:
        effect, sequence = copy.effect, copy.sequence
        count = len(effect.host_blocks)
        assert self.pool is not None and sequence is not None
        self.pool.release(effect.model, effect.host_blocks)
        self.num_restoring_blocks -= count
        if ok:
            self._counters.restored_blocks[effect.model] += count
            self.device.register(effect.model, effect.device_blocks, copy.hashes)
        self.device.release(effect.model, effect.device_blocks)
        if sequence.state != State.RESTORING or sequence.restore[1] is not copy.restore:
            return None
        if not ok:
            return sequence, False
        sequence.num_restored_blocks += count
        if sequence.restore[1] or any(other.restore is copy.restore for other in self._copies.values()):
            return None
        return sequence, True

    # -------------------------------------------------------------------------------------------------- checks

    def references(self) -> Iterator[tuple[bool, str, int]]:
        """(whether on the device, model, block) of every reference held by copies and checkpoints; for tests."""
        for copy in self._copies.values():
            for block in copy.effect.device_blocks:
                yield True, copy.effect.model, block
            for block in copy.effect.host_blocks:
                yield False, copy.effect.model, block
        for sequence in self._holders.values():
            for block in sequence.host_blocks:
                yield False, sequence.model, block
        for model, block in () if self.disk is None else self.disk.references():
            yield False, model, block
        if self.backups is not None:
            for model, block in self.backups.references():
                yield False, model, block


def _forget_alone(pool: BlockPool, model: str, blocks: list[int]) -> None:
    """Makes those blocks of a copy unfindable to which nobody else has a reference."""
    pool.forget(model, [block for block in blocks if pool.num_references(model, block) == 1])
