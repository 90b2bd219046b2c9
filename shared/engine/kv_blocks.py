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

Merged blocks are what models take from each other, so slots are taken where most are used already, and the blocks that are
used least run empty. What still lies scattered can be moved together (`move`; who decides on that: compaction.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

ROOMY_SHARE = 0.25
"""While all models could have so much of the pool, one takes a new merged block rather than evict what is cached between its
used slots, where it was used more lately than what it takes."""


def chain_hash(previous: bytes, packed_tokens: bytes) -> bytes:
    """Hash of a full block and all before it. The first `previous` is the model's `root_hash`."""
    return blake2b(packed_tokens, digest_size=16, key=previous).digest()


def root_hash(model: str) -> bytes:
    """Start of the hash chain: a fixed function of the model, so that instances agree on block hashes."""
    return blake2b(model.encode(), digest_size=16).digest()


class _ByUse:
    """Merged blocks by their number of used slots; the fullest is found in constant time."""

    __slots__ = ("_mask", "_of")

    def __init__(self, slots_per_merged: int) -> None:
        self._of: list[dict[int, None]] = [{} for _ in range(slots_per_merged + 1)]
        self._mask = 0
        """Bit n: some have n used slots."""

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
        """Of those with fewer than `below` used slots; -1: there is none."""
        if not self._mask:
            return -1
        most = (self._mask & ((1 << below) - 1)).bit_length() - 1
        return next(reversed(self._of[most])) if most >= 0 else -1

    def check(self, expected: dict[int, int]) -> None:
        assert {merged: used for used, of_use in enumerate(self._of) for merged in of_use} == expected
        assert self._mask == sum({1 << used for used in expected.values()})


class ModelBlocks:
    """The slots of one model: flat index = merged id * slots_per_merged + place."""

    __slots__ = (
        "busy",
        "by_hash",
        "cached",
        "free",
        "hash_of",
        "idle",
        "num_busy",
        "num_used",
        "open",
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
        self.free: dict[int, list[int]] = {}
        """Of each merged block of this model the slots that are neither used nor cached."""
        self.open = _ByUse(slots_per_merged)
        """Merged blocks with free slots."""
        self.busy = _ByUse(slots_per_merged)
        """Merged blocks with used slots."""
        self.cached: OrderedDict[int, int] = OrderedDict()
        """Unreferenced slots with a hash -> the tick at which they were freed; oldest first."""
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Merged blocks of this model in which no slot is used (all cached or free) -> tick; oldest first."""
        self.num_used = 0
        """Slots with at least one reference."""
        self.num_busy = 0
        """Merged blocks with used slots."""

    def slots_of(self, merged: int) -> range:
        first = merged * self.slots_per_merged
        return range(first, first + self.slots_per_merged)


class BlockPool:
    """All slots of one instance. What sequences need is O(slots named); `busy_merged` is O(merged blocks)."""

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
        self._num_idle -= len(blocks.idle)
        for merged in owned:
            self._owner[merged] = None
            self._pool_free.append(merged)
        del self._models[name]

    def capacity_slots(self, name: str) -> int:
        """Slots of the model if the whole pool were its own."""
        return self.num_merged * self._models[name].slots_per_merged

    def num_used(self, name: str) -> int:
        """Slots with at least one reference."""
        return self._models[name].num_used

    def least_merged(self, name: str) -> int:
        """Merged blocks that would hold the model's used slots."""
        blocks = self._models[name]
        return -(-blocks.num_used // blocks.slots_per_merged)

    def num_used_merged(self, name: str) -> int:
        """Merged blocks that hold used slots of the model."""
        return self._models[name].num_busy

    def num_own_room(self, name: str) -> int:
        """Slots beside used ones, in the same merged blocks: no other model can have them."""
        blocks = self._models[name]
        return blocks.num_busy * blocks.slots_per_merged - blocks.num_used

    def num_available(self, name: str) -> int:
        """Slots that `allocate` could hand out now, by evicting cached blocks if need be."""
        return self.num_own_room(name) + self.num_free_merged() * self._models[name].slots_per_merged

    def num_free_merged(self) -> int:
        """Merged blocks in which nothing is used: any model can have them."""
        return len(self._pool_free) + self._num_idle

    def used_merged(self) -> float:
        """Merged blocks that not every model could have. A model that is alone could have every slot, so that its own count
        as the fraction that is used."""
        if len(self._models) == 1:
            return sum(blocks.num_used / blocks.slots_per_merged for blocks in self._models.values())
        return self.num_merged - self.num_free_merged()

    @property
    def used_share(self) -> float:
        """0 to 1."""
        return self.used_merged() / self.num_merged

    def allocate(self, name: str, count: int) -> list[int] | None:
        """`count` slots with one reference each, or None (and no change) where there are not so many."""
        if count > self.num_available(name):
            return None
        blocks = self._models[name]
        references = blocks.references
        slots: list[int] = []
        while len(slots) < count:
            merged = self._merged_with_room(name, blocks)
            if merged < 0:
                # Where there are no other models, all that are left to be had are cached.
                slots += self._reuse(blocks, count - len(slots) if len(self._models) == 1 else 1)
                continue
            free = blocks.free[merged]
            taken = free[: -(count - len(slots)) - 1 : -1]
            del free[-len(taken) :]
            for slot in taken:
                references[slot] = 1
            slots += taken
            self._change_used(blocks, merged, len(taken))
        return slots

    def _reuse(self, blocks: ModelBlocks, count: int) -> list[int]:
        """Cached slots, the oldest first, with one reference each."""
        hash_of, by_hash = blocks.hash_of, blocks.by_hash
        slots = [blocks.cached.popitem(last=False)[0] for _ in range(count)]
        for slot in slots:
            del by_hash[hash_of.pop(slot)]
            blocks.references[slot] = 1
            self._change_used(blocks, slot // blocks.slots_per_merged, 1)
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
            blocks.references[slot] += 1
            if blocks.references[slot] == 1:
                del blocks.cached[slot]
                self._change_used(blocks, slot // blocks.slots_per_merged, 1)

    def release(self, name: str, slots: list[int]) -> None:
        """One reference less to each, last block first, so that the tail of a sequence is evicted before its head."""
        blocks = self._models[name]
        references = blocks.references
        for slot in reversed(slots):
            left = references[slot] = references[slot] - 1
            if not left:
                self._let_go(blocks, slot)

    def move(self, name: str, slot: int, merged: int) -> int:
        """What the used slot holds is to be in a slot of another merged block of the model, which has used ones and room:
        its references and its hash go there. Returns that slot; the old one is free."""
        blocks = self._models[name]
        self._evict_oldest_in(blocks, merged)
        target = blocks.free[merged].pop()
        blocks.references[target] = blocks.references[slot]
        blocks.references[slot] = 0
        if (block_hash := blocks.hash_of.pop(slot, None)) is not None:
            blocks.hash_of[target] = block_hash
            blocks.by_hash[block_hash] = target
        self._change_used(blocks, merged, 1)
        self._let_go(blocks, slot)
        return target

    def busy_merged(self, name: str) -> list[tuple[int, int]]:
        """(used slots, merged block) of all with used slots, the emptiest first."""
        return [(self._num_used[merged], merged) for merged in self._models[name].busy]

    def used_slots(self, name: str, merged: int) -> list[int]:
        blocks = self._models[name]
        return [slot for slot in blocks.slots_of(merged) if blocks.references[slot]]

    def register(self, name: str, slots: list[int], hashes: list[bytes]) -> None:
        """Each of the used slots now holds a full block. If another slot already holds the same content, that one stays the
        findable one (block tables are append-only, so the two are not merged)."""
        by_hash, hash_of = self._models[name].by_hash, self._models[name].hash_of
        for slot, block_hash in zip(slots, hashes, strict=True):
            if block_hash not in by_hash and slot not in hash_of:
                by_hash[block_hash] = slot
                hash_of[slot] = block_hash

    def references(self, name: str) -> list[int]:
        """Of each of the model's slots; read only."""
        return self._models[name].references

    def num_references(self, name: str, slot: int) -> int:
        return self._models[name].references[slot]

    def clear_cache(self) -> None:
        """Makes every unreferenced block unfindable."""
        for blocks in self._models.values():
            for slot in list(blocks.cached):
                self._evict(blocks, slot)

    def _change_used(self, blocks: ModelBlocks, merged: int, change: int) -> None:
        """After slots of the merged block came to be used (their references are set), or are not any more (and are in
        `free` or `cached` by now)."""
        before = self._num_used[merged]
        self._num_used[merged] = used = before + change
        blocks.num_used += change
        if blocks.slots_per_merged > 1:  # else no used one has free slots
            blocks.open.discard(merged, before)
            if blocks.free[merged]:
                blocks.open.add(merged, used)
        if before:
            blocks.busy.discard(merged, before)
        else:
            # A merged block that was taken just now never was idle.
            if blocks.idle.pop(merged, None) is not None:
                self._num_idle -= 1
            blocks.num_busy += 1
        if used:
            blocks.busy.add(merged, used)
        else:
            blocks.idle[merged] = self._tick
            self._num_idle += 1
            blocks.num_busy -= 1
            self._return_if_empty(blocks, merged)

    def _let_go(self, blocks: ModelBlocks, slot: int) -> None:
        """The last reference is gone."""
        self._tick += 1
        merged = slot // blocks.slots_per_merged
        if slot in blocks.hash_of:
            blocks.cached[slot] = self._tick
        else:
            blocks.free[merged].append(slot)
        self._change_used(blocks, merged, -1)

    def _evict(self, blocks: ModelBlocks, slot: int) -> None:
        del blocks.cached[slot]
        del blocks.by_hash[blocks.hash_of.pop(slot)]
        merged = slot // blocks.slots_per_merged
        blocks.free[merged].append(slot)
        blocks.open.add(merged, self._num_used[merged])
        if merged in blocks.idle:
            self._return_if_empty(blocks, merged)

    def _evict_oldest_in(self, blocks: ModelBlocks, merged: int) -> None:
        """Makes room in a merged block that has cached slots, unless there is some."""
        if not blocks.free[merged]:
            cached = [slot for slot in blocks.slots_of(merged) if slot in blocks.cached]
            self._evict(blocks, min(cached, key=blocks.cached.__getitem__))

    def _return_if_empty(self, blocks: ModelBlocks, merged: int) -> None:
        if len(blocks.free[merged]) == blocks.slots_per_merged:
            del blocks.free[merged]
            del blocks.idle[merged]
            blocks.open.discard(merged, 0)
            self._num_idle -= 1
            self._owner[merged] = None
            self._pool_free.append(merged)

    def _merged_with_room(self, name: str, blocks: ModelBlocks) -> int:
        """A merged block of the model with free slots: the one with the most used slots that has some. Else one that nobody
        owns. Else what was unused for the longest time gives way: an own cached block (-1), or another model's idle merged
        block; but where there are other models and little is left for all, cached blocks between used slots go first."""
        per_merged = blocks.slots_per_merged
        merged = blocks.open.fullest(per_merged)
        if merged >= 0 and self._num_used[merged]:
            return merged
        if len(self._models) > 1 and self.num_free_merged() < ROOMY_SHARE * self.num_merged:
            packed = blocks.busy.fullest(per_merged)
            if packed >= 0:
                self._evict_oldest_in(blocks, packed)
                return packed
        if merged >= 0:
            return merged
        if not self._pool_free:
            if len(self._models) == 1:
                return -1
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
                return -1
            assert oldest is not None, "allocate() checked that a slot can be had"
            owner = self._models[self._owner[oldest[1]]]  # type: ignore[index]
            for slot in owner.slots_of(oldest[1]):
                if slot in owner.cached:
                    self._evict(owner, slot)
        merged = self._pool_free.pop()
        self._owner[merged] = name
        blocks.free[merged] = list(reversed(blocks.slots_of(merged)))
        return merged

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time."""
        assert len(set(self._pool_free)) == len(self._pool_free)
        assert all(self._owner[merged] is None for merged in self._pool_free)
        owned = [merged for merged, owner in enumerate(self._owner) if owner is not None]
        assert len(owned) + len(self._pool_free) == self.num_merged
        for name, blocks in self._models.items():
            mine = [merged for merged in owned if self._owner[merged] == name]
            assert sorted(blocks.free) == mine
            used = 0
            for merged in mine:
                slots = blocks.slots_of(merged)
                in_use = sum(1 for slot in slots if blocks.references[slot] > 0)
                assert in_use == self._num_used[merged], (name, merged)
                assert (merged in blocks.idle) == (in_use == 0)
                assert len(blocks.free[merged]) < blocks.slots_per_merged, "it belongs to all"
                assert set(blocks.free[merged]) <= set(slots)
                used += in_use
            blocks.open.check({merged: self._num_used[merged] for merged in mine if blocks.free[merged]})
            busy = {merged: self._num_used[merged] for merged in mine if self._num_used[merged]}
            blocks.busy.check(busy)
            assert blocks.num_busy == len(busy)
            assert used == blocks.num_used
            free = [slot for of_merged in blocks.free.values() for slot in of_merged]
            assert len(free) == len(set(free)) and not set(free) & set(blocks.cached)
            assert used + len(free) + len(blocks.cached) == len(mine) * blocks.slots_per_merged
            assert all(blocks.references[slot] == 0 for slot in (*free, *blocks.cached))
            assert all(count >= 0 for count in blocks.references)
            assert set(blocks.cached) <= set(blocks.hash_of) and not set(free) & set(blocks.hash_of)
            assert {h: s for s, h in blocks.hash_of.items()} == blocks.by_hash
        assert self._num_idle == sum(len(blocks.idle) for blocks in self._models.values())
