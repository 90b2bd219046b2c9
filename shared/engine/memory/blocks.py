"""KV blocks of several models in one pool of merged blocks, with a prefix cache per model.

Owns: which merged block belongs to which model, which block is referenced by how many sequences, which unreferenced block
still holds a findable full block. Knows nothing of sequences, tensors or time.

Who owns a block (SeaLLM section 4.4 for the merged pool; block addressing as in vLLM's prefix cache):

    pool-free merged block --take--> model's free block --allocate--> used (references >= 1)
          ^                              ^                              |  last reference dropped
          |                              +---- content not findable ----+
          |                                                             +---- full block with a hash ---> cached
          +-- no block used or cached --- free block <--- evicted (least recently used first) --------------+

A cached block is free to be taken, and until then can be found by its hash and used again. A merged block in which
nothing is used goes back to all models: at once if nothing in it is cached, else when somebody needs it.

Merged blocks are what models take from each other, so blocks are taken where most are used already, and the blocks that are
used least run empty. What still lies scattered can be moved together (`move`; who decides on that: memory/compaction.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

from shared.engine.memory.cache_news import CacheNews

ROOMY_SHARE = 0.25
"""While all models could have so much of the pool, one takes a new merged block rather than evict what is cached between its
used blocks, where it was used more lately than what it takes."""
TICKS_PER_S = 1e6


def chain_hash(previous: bytes, packed_tokens: bytes) -> bytes:
    """Hash of a full block and all before it. The first `previous` is the request's `prefix_root`."""
    return blake2b(packed_tokens, digest_size=16, key=previous).digest()


def root_hash(model: str) -> bytes:
    """Start of the hash chain: a fixed function of the model, so that instances agree on block hashes."""
    return blake2b(model.encode(), digest_size=16).digest()


def prefix_root(root: bytes, adapter_version: str, salt: str) -> bytes:
    """First hash of a request's chain: that of its model, or another one with an adapter (whose keys and values are
    others) or a salt (whoever has another one must not find its blocks). Empty: without."""
    if adapter_version:
        root = chain_hash(root, adapter_version.encode())
    return chain_hash(root, b"salt " + salt.encode()) if salt else root


class _ByUse:
    """Merged blocks by their number of used blocks; the fullest is found in constant time."""

    __slots__ = ("_mask", "_of")

    def __init__(self, blocks_per_merged: int) -> None:
        self._of: list[dict[int, None]] = [{} for _ in range(blocks_per_merged + 1)]
        self._mask = 0
        """Bit n: some have n used blocks."""

    def __iter__(self) -> Iterator[int]:
        """The emptiest first."""
        for of_use in self._of:
            yield from of_use

    def add(self, merged: int, num_used: int) -> None:
        self._of[num_used][merged] = None
        self._mask |= 1 << num_used

    def discard(self, merged: int, num_used: int) -> None:
        of_use = self._of[num_used]
        if of_use.pop(merged, 0) is None and not of_use:
            self._mask &= ~(1 << num_used)

    def fullest(self, below: int) -> int:
        """The fullest merged block with fewer than `below` used blocks; -1: there is none."""
        if not self._mask:
            return -1
        most = (self._mask & ((1 << below) - 1)).bit_length() - 1
        return next(reversed(self._of[most])) if most >= 0 else -1

    def check(self, expected: dict[int, int]) -> None:
        assert {merged: used for used, of_use in enumerate(self._of) for merged in of_use} == expected
        assert self._mask == sum({1 << used for used in expected.values()})


class ModelBlocks:
    """The blocks of one model: flat index = merged id * blocks_per_merged + place."""

    __slots__ = (
        "block_size",
        "blocks_per_merged",
        "busy",
        "by_hash",
        "cached",
        "free",
        "hash_of",
        "idle",
        "num_busy",
        "num_used",
        "open",
        "references",
    )

    def __init__(self, block_size: int, blocks_per_merged: int, num_merged: int) -> None:
        if block_size < 1 or blocks_per_merged < 1:
            raise ValueError(f"block_size {block_size} and blocks_per_merged {blocks_per_merged} must be at least 1")
        self.block_size = block_size
        self.blocks_per_merged = blocks_per_merged
        self.references = [0] * (num_merged * blocks_per_merged)
        self.hash_of: dict[int, bytes] = {}
        self.by_hash: dict[bytes, int] = {}
        self.free: dict[int, list[int]] = {}
        """By merged block of this model: its blocks that are neither used nor cached."""
        self.open = _ByUse(blocks_per_merged)
        """Merged blocks with free blocks."""
        self.busy = _ByUse(blocks_per_merged)
        """Merged blocks with used blocks."""
        self.cached: OrderedDict[int, int] = OrderedDict()
        """Unreferenced blocks with a hash -> the tick at which they were freed; oldest first."""
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Merged blocks of this model in which no block is used (all cached or free) -> tick; oldest first."""
        self.num_used = 0
        """Blocks with at least one reference."""
        self.num_busy = 0
        """Merged blocks with used blocks."""

    def blocks_of(self, merged: int) -> range:
        first = merged * self.blocks_per_merged
        return range(first, first + self.blocks_per_merged)


class BlockPool:
    """All blocks of one instance. What sequences need is O(blocks named); `busy_merged` is O(merged blocks)."""

    def __init__(self, num_merged: int, news: CacheNews | None = None) -> None:
        """`news`: is told which hashes blocks come to be found by, and which they are not any more."""
        if num_merged < 1:
            raise ValueError(f"num_merged {num_merged} must be at least 1")
        self._news = news
        self.num_merged = num_merged
        self._models: dict[str, ModelBlocks] = {}
        self._pool_free = list(range(num_merged - 1, -1, -1))
        self._owner: list[str | None] = [None] * num_merged
        self._num_used = [0] * num_merged
        """Used blocks in each merged block."""
        self._num_idle = 0
        """Owned merged blocks without a used block, over all models."""
        self._tick = 0
        """Counts what is let go of, and is at least the time: the least recently used is what has the smallest."""

    def add_model(self, name: str, block_size: int, blocks_per_merged: int) -> None:
        if name in self._models:
            raise ValueError(f"model {name!r} is already in the pool")
        self._models[name] = ModelBlocks(block_size, blocks_per_merged, self.num_merged)

    def remove_model(self, name: str) -> None:
        """Forgets a model none of whose blocks is used; its cached blocks go back to the pool."""
        of_model = self._models[name]
        owned = [merged for merged, owner in enumerate(self._owner) if owner == name]
        if any(self._num_used[merged] for merged in owned):
            raise ValueError(f"model {name!r} still has used blocks")
        self._num_idle -= len(of_model.idle)
        for merged in owned:
            self._owner[merged] = None
            self._pool_free.append(merged)
        if self._news is not None:
            for block_hash in of_model.by_hash:
                self._news.note(block_hash)
        del self._models[name]

    def capacity_blocks(self, name: str) -> int:
        """Blocks of the model if the whole pool were its own."""
        return self.num_merged * self._models[name].blocks_per_merged

    def num_used(self, name: str) -> int:
        """Blocks with at least one reference."""
        return self._models[name].num_used

    def least_merged(self, name: str) -> int:
        """Merged blocks that would hold the model's used blocks."""
        of_model = self._models[name]
        return -(-of_model.num_used // of_model.blocks_per_merged)

    def num_used_merged(self, name: str) -> int:
        """Merged blocks that hold used blocks of the model."""
        return self._models[name].num_busy

    def num_own_room(self, name: str) -> int:
        """Blocks beside used ones, in the same merged blocks: no other model can have them."""
        of_model = self._models[name]
        return of_model.num_busy * of_model.blocks_per_merged - of_model.num_used

    def num_available(self, name: str) -> int:
        """Blocks that `allocate` could hand out now, by evicting cached blocks if need be."""
        return self.num_own_room(name) + self.num_free_merged() * self._models[name].blocks_per_merged

    def num_free_merged(self) -> int:
        """Merged blocks in which nothing is used: any model can have them."""
        return len(self._pool_free) + self._num_idle

    def used_merged(self) -> float:
        """Merged blocks that not every model could have. A model that is alone could have every block, so that its own count
        as the fraction that is used."""
        if len(self._models) == 1:
            return sum(of_model.num_used / of_model.blocks_per_merged for of_model in self._models.values())
        return self.num_merged - self.num_free_merged()

    @property
    def used_share(self) -> float:
        """0 to 1."""
        return self.used_merged() / self.num_merged

    @property
    def blank_share(self) -> float:
        """Share of the merged blocks in which nothing is used or cached, 0 to 1."""
        return len(self._pool_free) / self.num_merged

    def allocate(self, name: str, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and no change) where there are not so many."""
        if count > self.num_available(name):
            return None
        of_model = self._models[name]
        references = of_model.references
        blocks: list[int] = []
        while len(blocks) < count:
            merged = self._merged_with_room(name, of_model)
            if merged < 0:
                # Where there are no other models, all that are left to be had are cached.
                blocks += self._reuse(of_model, count - len(blocks) if len(self._models) == 1 else 1)
                continue
            free = of_model.free[merged]
            taken = free[: -(count - len(blocks)) - 1 : -1]
            del free[-len(taken) :]
            for block in taken:
                references[block] = 1
            blocks += taken
            self._change_used(of_model, merged, len(taken))
        return blocks

    def _reuse(self, of_model: ModelBlocks, count: int) -> list[int]:
        """Cached blocks, the oldest first, with one reference each."""
        blocks = [of_model.cached.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._lose(of_model, block)
            of_model.references[block] = 1
            self._change_used(of_model, block // of_model.blocks_per_merged, 1)
        return blocks

    def find(self, name: str, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest run of leading blocks that are cached or in use. Takes no reference."""
        by_hash = self._models[name].by_hash
        blocks = []
        for block_hash in hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_one(self, name: str, block_hash: bytes) -> int | None:
        """The block that holds this content, cached or in use. Takes no reference."""
        return self._models[name].by_hash.get(block_hash)

    def retain(self, name: str, blocks: list[int]) -> None:
        """One more reference to each; cached blocks become used."""
        of_model = self._models[name]
        for block in blocks:
            of_model.references[block] += 1
            if of_model.references[block] == 1:
                del of_model.cached[block]
                self._change_used(of_model, block // of_model.blocks_per_merged, 1)

    def release(self, name: str, blocks: list[int]) -> None:
        """One reference less to each, last block first, so that the tail of a sequence is evicted before its head."""
        of_model = self._models[name]
        references = of_model.references
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if not left:
                self._let_go(of_model, block)

    def move(self, name: str, block: int, merged: int) -> int:
        """What the used block holds is to be in a block of another merged block of the model, which has used ones and room:
        its references and its hash go there. Returns that block; the old one is free."""
        of_model = self._models[name]
        self._evict_oldest_in(of_model, merged)
        target = of_model.free[merged].pop()
        of_model.references[target] = of_model.references[block]
        of_model.references[block] = 0
        if (block_hash := of_model.hash_of.pop(block, None)) is not None:
            of_model.hash_of[target] = block_hash
            of_model.by_hash[block_hash] = target
        self._change_used(of_model, merged, 1)
        self._let_go(of_model, block)
        return target

    def on_time(self, now: float) -> None:
        """What is let go of from now on counts as used at this time."""
        self._tick = max(self._tick, int(now * TICKS_PER_S))

    def num_idle(self, name: str, before_s: float, most: int) -> int:
        """How many blocks, up to `most`, the model could have without losing any that was used since."""
        of_model, before = self._models[name], before_s * TICKS_PER_S
        owned = len(of_model.free) * of_model.blocks_per_merged
        count = len(self._pool_free) * of_model.blocks_per_merged + owned - of_model.num_used - len(of_model.cached)
        for tick in islice(of_model.cached.values(), max(0, most - count)):
            if tick > before:
                break
            count += 1
        for other in self._models.values():
            for tick in () if other is of_model or count >= most else other.idle.values():
                if tick > before or count >= most:
                    break
                count += of_model.blocks_per_merged
        return min(count, most)

    def touch(self, name: str, block: int) -> None:
        """A cached block counts as used now."""
        of_model = self._models[name]
        if block in of_model.cached:
            self._tick += 1
            of_model.cached[block] = self._tick
            of_model.cached.move_to_end(block)
            if (merged := block // of_model.blocks_per_merged) in of_model.idle:
                of_model.idle[merged] = self._tick
                of_model.idle.move_to_end(merged)

    def drop(self, name: str, block: int) -> None:
        """A cached block is free from now on."""
        if block in self._models[name].cached:
            self._evict(self._models[name], block)

    def busy_merged(self, name: str) -> list[tuple[int, int]]:
        """(used blocks, merged block) of all with used blocks, the emptiest first."""
        return [(self._num_used[merged], merged) for merged in self._models[name].busy]

    def used_blocks(self, name: str, merged: int) -> list[int]:
        of_model = self._models[name]
        return [block for block in of_model.blocks_of(merged) if of_model.references[block]]

    def register(self, name: str, blocks: list[int], hashes: list[bytes]) -> None:
        """Each of the used blocks now holds a full block. If another block already holds the same content, that one stays
        the findable one (block tables are append-only, so the two are not merged)."""
        by_hash, hash_of = self._models[name].by_hash, self._models[name].hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in by_hash and block not in hash_of:
                by_hash[block_hash] = block
                hash_of[block] = block_hash
                if self._news is not None:
                    self._news.note(block_hash)

    def forget(self, name: str, blocks: list[int]) -> None:
        """What these used blocks hold is not to be found any more."""
        of_model = self._models[name]
        for block in blocks:
            if block in of_model.hash_of:
                self._lose(of_model, block)

    def hashes(self) -> Iterator[bytes]:
        """By which blocks can be found, of all models."""
        for of_model in self._models.values():
            yield from of_model.by_hash

    def has(self, block_hash: bytes) -> bool:
        """Whether a block of any model can be found by it."""
        return any(block_hash in of_model.by_hash for of_model in self._models.values())

    def cells(self) -> Iterator[tuple[int, str, float]]:
        """(merged block, its model, the share of its blocks that are used) of those that belong to a model."""
        for merged, owner in enumerate(self._owner):
            if owner is not None:
                yield merged, owner, self._num_used[merged] / self._models[owner].blocks_per_merged

    def references(self, name: str) -> list[int]:
        """References to each of the model's blocks; read only."""
        return self._models[name].references

    def num_references(self, name: str, block: int) -> int:
        return self._models[name].references[block]

    def clear_cache(self) -> None:
        """Makes every unreferenced block unfindable."""
        for of_model in self._models.values():
            for block in list(of_model.cached):
                self._evict(of_model, block)

    def _change_used(self, of_model: ModelBlocks, merged: int, change: int) -> None:
        """After blocks of the merged block came to be used (their references are set), or are not any more (and are in
        `free` or `cached` by now)."""
        before = self._num_used[merged]
        self._num_used[merged] = used = before + change
        of_model.num_used += change
        if of_model.blocks_per_merged > 1:  # else no used one has free blocks
            of_model.open.discard(merged, before)
            if of_model.free[merged]:
                of_model.open.add(merged, used)
        if before:
            of_model.busy.discard(merged, before)
        else:
            # A merged block that was taken just now never was idle.
            if of_model.idle.pop(merged, None) is not None:
                self._num_idle -= 1
            of_model.num_busy += 1
        if used:
            of_model.busy.add(merged, used)
        else:
            of_model.idle[merged] = self._tick
            self._num_idle += 1
            of_model.num_busy -= 1
            self._return_if_empty(of_model, merged)

    def _let_go(self, of_model: ModelBlocks, block: int) -> None:
        """The last reference is gone."""
        self._tick += 1
        merged = block // of_model.blocks_per_merged
        if block in of_model.hash_of:
            of_model.cached[block] = self._tick
        else:
            of_model.free[merged].append(block)
        self._change_used(of_model, merged, -1)

    def _lose(self, of_model: ModelBlocks, block: int) -> None:
        """What the block holds cannot be found any more."""
        block_hash = of_model.hash_of.pop(block)
        del of_model.by_hash[block_hash]
        if self._news is not None:
            self._news.note(block_hash)

    def _evict(self, of_model: ModelBlocks, block: int) -> None:
        del of_model.cached[block]
        self._lose(of_model, block)
        merged = block // of_model.blocks_per_merged
        of_model.free[merged].append(block)
        of_model.open.add(merged, self._num_used[merged])
        if merged in of_model.idle:
            self._return_if_empty(of_model, merged)

    def _evict_oldest_in(self, of_model: ModelBlocks, merged: int) -> None:
        """Makes room in a merged block that has cached blocks, unless there is some."""
        if not of_model.free[merged]:
            cached = [block for block in of_model.blocks_of(merged) if block in of_model.cached]
            self._evict(of_model, min(cached, key=of_model.cached.__getitem__))

    def _return_if_empty(self, of_model: ModelBlocks, merged: int) -> None:
        if len(of_model.free[merged]) == of_model.blocks_per_merged:
            del of_model.free[merged]
            del of_model.idle[merged]
            of_model.open.discard(merged, 0)
            self._num_idle -= 1
            self._owner[merged] = None
            self._pool_free.append(merged)

    def _merged_with_room(self, name: str, of_model: ModelBlocks) -> int:
        """A merged block of the model with free blocks: the one with the most used blocks that has some. Else one that
        nobody owns. Else what was unused for the longest time gives way: an own cached block (-1), or another model's idle
        merged block; but where there are other models and little is left for all, cached blocks between used blocks go
        first."""
        per_merged = of_model.blocks_per_merged
        merged = of_model.open.fullest(per_merged)
        if merged >= 0 and self._num_used[merged]:
            return merged
        if len(self._models) > 1 and self.num_free_merged() < ROOMY_SHARE * self.num_merged:
            packed = of_model.busy.fullest(per_merged)
            if packed >= 0:
                self._evict_oldest_in(of_model, packed)
                return packed
        if merged >= 0:
            return merged
        if not self._pool_free:
            if len(self._models) == 1:
                return -1
            own_tick = next(iter(of_model.cached.values()), None)
            # The oldest idle merged block of each other model: (tick, merged block).
            others = [
                (tick, merged)
                for other in self._models.values()
                if other is not of_model
                for merged, tick in islice(other.idle.items(), 1)
            ]
            oldest = min(others, default=None)
            if own_tick is not None and (oldest is None or own_tick <= oldest[0]):
                return -1
            assert oldest is not None, "allocate() checked that a block can be had"
            owner = self._models[self._owner[oldest[1]]]  # type: ignore[index]
            for block in owner.blocks_of(oldest[1]):
                if block in owner.cached:
                    self._evict(owner, block)
        merged = self._pool_free.pop()
        self._owner[merged] = name
        of_model.free[merged] = list(reversed(of_model.blocks_of(merged)))
        return merged

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time."""
        assert len(set(self._pool_free)) == len(self._pool_free)
        assert all(self._owner[merged] is None for merged in self._pool_free)
        owned = [merged for merged, owner in enumerate(self._owner) if owner is not None]
        assert len(owned) + len(self._pool_free) == self.num_merged
        for name, of_model in self._models.items():
            mine = [merged for merged in owned if self._owner[merged] == name]
            assert sorted(of_model.free) == mine
            used = 0
            for merged in mine:
                blocks = of_model.blocks_of(merged)
                in_use = sum(1 for block in blocks if of_model.references[block] > 0)
                assert in_use == self._num_used[merged], (name, merged)
                assert (merged in of_model.idle) == (in_use == 0)
                assert len(of_model.free[merged]) < of_model.blocks_per_merged, "it belongs to all"
                assert set(of_model.free[merged]) <= set(blocks)
                used += in_use
            of_model.open.check({merged: self._num_used[merged] for merged in mine if of_model.free[merged]})
            busy = {merged: self._num_used[merged] for merged in mine if self._num_used[merged]}
            of_model.busy.check(busy)
            assert of_model.num_busy == len(busy)
            assert used == of_model.num_used
            free = [block for of_merged in of_model.free.values() for block in of_merged]
            assert len(free) == len(set(free)) and not set(free) & set(of_model.cached)
            assert used + len(free) + len(of_model.cached) == len(mine) * of_model.blocks_per_merged
            assert all(of_model.references[block] == 0 for block in (*free, *of_model.cached))
            assert all(count >= 0 for count in of_model.references)
            assert set(of_model.cached) <= set(of_model.hash_of) and not set(free) & set(of_model.hash_of)
            assert {h: s for s, h in of_model.hash_of.items()} == of_model.by_hash
        assert self._num_idle == sum(len(of_model.idle) for of_model in self._models.values())
