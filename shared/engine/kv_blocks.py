"""KV slots of several models in one pool of merged blocks, with a prefix cache per model.

Owns: which merged block belongs to which model, which slot is referenced by how many sequences, which unreferenced slot
still holds a findable full block. Knows nothing of sequences, tensors or time.

Who owns a slot (SeaLLM section 4.4 for the merged pool; block addressing as in vLLM's prefix cache):

    pool-free merged block --take--> model's free slot --allocate--> used (references >= 1)
          ^                              ^                              |  last reference dropped
          |                              +---- content not findable ----+
          |                                                             +---- full block with a hash ---> cached
          +-- no slot used or cached --- free slot <--- evicted (least recently used first) --------------+

A cached slot is free to be taken, and until then can be found by its hash and used again. A merged block in which
nothing is used goes back to all models: at once if nothing in it is cached, else when somebody needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import islice


def chain_hash(previous: bytes, packed_tokens: bytes) -> bytes:
    """Hash of a full block and all before it. The first `previous` is the model's `root_hash`."""
    return blake2b(packed_tokens, digest_size=16, key=previous).digest()


def root_hash(model: str) -> bytes:
    """Start of the hash chain: a fixed function of the model, so that instances agree on block hashes."""
    return blake2b(model.encode(), digest_size=16).digest()


class ModelBlocks:
    """The slots of one model: flat index = merged id * slots_per_merged + place."""

    __slots__ = (
        "by_hash",
        "cached",
        "free",
        "hash_of",
        "idle",
        "num_used",
        "page_tokens",
        "references",
        "slots_per_merged",
    )

    def __init__(self, page_tokens: int, slots_per_merged: int, num_merged: int) -> None:
        if page_tokens < 1 or slots_per_merged < 1:
            raise ValueError(f"page_tokens {page_tokens} and slots_per_merged {slots_per_merged} must be at least 1")
        self.page_tokens = page_tokens
        self.slots_per_merged = slots_per_merged
        self.references = [0] * (num_merged * slots_per_merged)
        self.hash_of: dict[int, bytes] = {}
        self.by_hash: dict[bytes, int] = {}
        self.free: dict[int, None] = {}
        self.cached: OrderedDict[int, int] = OrderedDict()
        """Unreferenced slots with a hash -> the tick at which they were freed; oldest first."""
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Merged blocks of this model in which no slot is used (all cached or free) -> tick; oldest first."""
        self.num_used = 0
        """Slots with at least one reference."""


class BlockPool:
    """All slots of one instance. Every method is O(slots named), none O(pool)."""

    def __init__(self, num_merged: int) -> None:
        if num_merged < 1:
            raise ValueError(f"num_merged {num_merged} must be at least 1")
        self.num_merged = num_merged
        self._models: dict[str, ModelBlocks] = {}
        self._pool_free = list(range(num_merged - 1, -1, -1))
        self._owner: list[str | None] = [None] * num_merged
        self._num_used = [0] * num_merged
        """Used slots in each merged block."""
        self._num_idle = 0
        """Owned merged blocks without a used slot, over all models."""
        self._tick = 0

    def add_model(self, name: str, page_tokens: int, slots_per_merged: int) -> None:
        if name in self._models:
            raise ValueError(f"model {name!r} is already in the pool")
        self._models[name] = ModelBlocks(page_tokens, slots_per_merged, self.num_merged)

    def remove_model(self, name: str) -> None:
        """Forgets a model none of whose slots is used; its cached blocks go back to the pool."""
        blocks = self._models[name]
        owned = [merged for merged, owner in enumerate(self._owner) if owner == name]
        if any(self._num_used[merged] for merged in owned):
            raise ValueError(f"model {name!r} still has used slots")
        for slot in list(blocks.cached):
            self._forget(blocks, slot)
        self._num_idle -= len(blocks.idle)
        for merged in owned:
            self._owner[merged] = None
            self._pool_free.append(merged)
        del self._models[name]

    def capacity_slots(self, name: str) -> int:
        """Slots of the model if the whole pool were its own."""
        return self.num_merged * self._models[name].slots_per_merged

    def num_available(self, name: str) -> int:
        """Slots that `allocate` could hand out now, by evicting cached blocks if need be."""
        blocks = self._models[name]
        from_others = len(self._pool_free) + self._num_idle - len(blocks.idle)
        return len(blocks.free) + len(blocks.cached) + from_others * blocks.slots_per_merged

    def num_free_merged(self) -> int:
        """Merged blocks in which nothing is used."""
        return len(self._pool_free) + self._num_idle

    def used_merged(self) -> float:
        """Merged blocks' worth of slots that sequences hold."""
        return sum(blocks.num_used / blocks.slots_per_merged for blocks in self._models.values())

    def allocate(self, name: str, count: int) -> list[int] | None:
        """`count` slots with one reference each, or None (and no change) where there are not so many."""
        if count > self.num_available(name):
            return None
        blocks = self._models[name]
        slots = []
        for _ in range(count):
            if not blocks.free:
                self._refill(name, blocks)
            slot, _ = blocks.free.popitem()
            self._use(blocks, slot)
            slots.append(slot)
        return slots

    def find(self, name: str, hashes: list[bytes]) -> list[int]:
        """Slots of the longest run of leading blocks that are cached or in use. Takes no reference."""
        by_hash = self._models[name].by_hash
        slots = []
        for block_hash in hashes:
            slot = by_hash.get(block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def retain(self, name: str, slots: list[int]) -> None:
        """One more reference to each; cached slots become used."""
        blocks = self._models[name]
        for slot in slots:
            if blocks.references[slot]:
                blocks.references[slot] += 1
            else:
                del blocks.cached[slot]
                self._use(blocks, slot)

    def release(self, name: str, slots: list[int]) -> None:
        """One reference less to each, last block first, so that the tail of a sequence is evicted before its head."""
        blocks = self._models[name]
        references = blocks.references
        for slot in reversed(slots):
            references[slot] -= 1
            if references[slot]:
                continue
            self._tick += 1
            if slot in blocks.hash_of:
                blocks.cached[slot] = self._tick
            else:
                blocks.free[slot] = None
            merged = slot // blocks.slots_per_merged
            blocks.num_used -= 1
            self._num_used[merged] -= 1
            if self._num_used[merged] == 0:
                self._num_idle += 1
                blocks.idle[merged] = self._tick
                self._return_if_empty(blocks, merged)

    def register(self, name: str, slot: int, block_hash: bytes) -> None:
        """The used slot now holds a full block. If another slot already holds the same content, that one stays the
        findable one (block tables are append-only, so the two are not merged)."""
        blocks = self._models[name]
        if block_hash not in blocks.by_hash and slot not in blocks.hash_of:
            blocks.by_hash[block_hash] = slot
            blocks.hash_of[slot] = block_hash

    def num_references(self, name: str, slot: int) -> int:
        return self._models[name].references[slot]

    def clear_cache(self) -> None:
        """Makes every unreferenced block unfindable."""
        for blocks in self._models.values():
            for slot in list(blocks.cached):
                self._evict(blocks, slot)

    def _use(self, blocks: ModelBlocks, slot: int) -> None:
        blocks.references[slot] = 1
        merged = slot // blocks.slots_per_merged
        if self._num_used[merged] == 0:
            del blocks.idle[merged]
            self._num_idle -= 1
        self._num_used[merged] += 1
        blocks.num_used += 1

    def _forget(self, blocks: ModelBlocks, slot: int) -> None:
        del blocks.cached[slot]
        del blocks.by_hash[blocks.hash_of.pop(slot)]

    def _evict(self, blocks: ModelBlocks, slot: int) -> None:
        self._forget(blocks, slot)
        blocks.free[slot] = None
        merged = slot // blocks.slots_per_merged
        if merged in blocks.idle:
            self._return_if_empty(blocks, merged)

    def _return_if_empty(self, blocks: ModelBlocks, merged: int) -> None:
        first = merged * blocks.slots_per_merged
        places = range(first, first + blocks.slots_per_merged)
        if all(slot in blocks.free for slot in places):
            for slot in places:
                del blocks.free[slot]
            del blocks.idle[merged]
            self._num_idle -= 1
            self._owner[merged] = None
            self._pool_free.append(merged)

    def _refill(self, name: str, blocks: ModelBlocks) -> None:
        """Puts at least one slot on the model's free list: a pool-free merged block, else whatever was unused for the
        longest time: an own cached block, or another model's idle merged block."""
        if not self._pool_free:
            own_tick = next(iter(blocks.cached.values()), None)
            # The oldest idle merged block of each other model: (tick, merged block).
            others = [
                (tick, merged)
                for other in self._models.values()
                if other is not blocks
                for merged, tick in islice(other.idle.items(), 1)
            ]
            oldest = min(others, default=None)
            if own_tick is not None and (oldest is None or own_tick <= oldest[0]):
                slot = next(iter(blocks.cached))
                self._forget(blocks, slot)
                blocks.free[slot] = None
                return
            assert oldest is not None, "allocate() checked that a slot can be had"
            merged = oldest[1]
            owner = self._models[self._owner[merged]]  # type: ignore[index]
            first = merged * owner.slots_per_merged
            for slot in range(first, first + owner.slots_per_merged):
                if slot in owner.cached:
                    self._evict(owner, slot)
        merged = self._pool_free.pop()
        self._owner[merged] = name
        first = merged * blocks.slots_per_merged
        blocks.free.update(dict.fromkeys(range(first + blocks.slots_per_merged - 1, first - 1, -1)))
        blocks.idle[merged] = self._tick
        self._num_idle += 1

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time."""
        assert len(set(self._pool_free)) == len(self._pool_free)
        assert all(self._owner[merged] is None for merged in self._pool_free)
        owned = [merged for merged, owner in enumerate(self._owner) if owner is not None]
        assert len(owned) + len(self._pool_free) == self.num_merged
        for name, blocks in self._models.items():
            mine = [merged for merged in owned if self._owner[merged] == name]
            used = 0
            for merged in mine:
                first = merged * blocks.slots_per_merged
                slots = range(first, first + blocks.slots_per_merged)
                in_use = sum(1 for slot in slots if blocks.references[slot] > 0)
                assert in_use == self._num_used[merged], (name, merged)
                assert (merged in blocks.idle) == (in_use == 0)
                used += in_use
            assert used == blocks.num_used
            assert used + len(blocks.free) + len(blocks.cached) == len(mine) * blocks.slots_per_merged
            assert not set(blocks.free) & set(blocks.cached)
            assert all(blocks.references[slot] == 0 for slot in (*blocks.free, *blocks.cached))
            assert all(count >= 0 for count in blocks.references)
            assert set(blocks.cached) <= set(blocks.hash_of) and not set(blocks.free) & set(blocks.hash_of)
            assert {h: s for s, h in blocks.hash_of.items()} == blocks.by_hash
        assert self._num_idle == sum(len(blocks.idle) for blocks in self._models.values())
