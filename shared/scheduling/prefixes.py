"""Which instances have how much of a prompt in their prefix caches.

Instances say with each load report which full blocks can be found there and which cannot any more, by the first `KEY_BYTES`
of the hashes that chain a block to all before it (`BlockPool`), on the device or in host memory; and one after the other
those that they hold, so that a scheduler that has missed reports, or is new, knows all again after a while. Who has missed
none since two such rounds began knows all, and looks at no more of them: most of what a report says is that. Between a
dispatch and the report that names its blocks the instance is believed to have them for `GUESS_S`.

At most `max_entries` blocks are remembered, those that were longest not named are forgotten first. That, a collision and a
guess that was wrong cost a cache hit and nothing else. They are kept in parts of several sizes, by their hash, each bounded
for itself: a dictionary in which entries come and go is built anew now and then, and nothing else is done meanwhile (90 ms
for one of half a million entries).

A prefix that a thousand instances have in common costs a prompt no more than one that nobody has: the instances that hold a
block are the bits of a number, and what an instance held that is forgotten is cleared little by little.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle

from shared.engine.prefix_hashes import block_hashes
from shared.messages.cluster import KEY_BYTES, LoadReport, NextMove, mark_keys, mark_positions
from shared.messages.requests import GenerationRequest

GUESS_S = 30.0
MAX_BLOCKS = 2048
"""Most blocks of a prompt that are looked for."""
MAX_CLEARED = 64
"""Blocks with each report, of what is forgotten."""
MAX_WIDTH = 10
"""First bytes of the keys that the largest part has. Parts of one size would all be built anew at about the same time."""
MIN_ENTRIES = 1 << 16
"""Least number of entries of an index that has parts."""
MAX_PROMPTS = 64
"""Those asked for last, whose keys are kept: one that waits is asked for again and again."""


class _Holder:
    """An instance from when its cache is first told of until that is forgotten."""

    __slots__ = ("bit", "instance_id", "last_round", "until_s")

    def __init__(self, instance_id: str, slot: int) -> None:
        self.instance_id = instance_id
        self.last_round: int | None = None
        """Last round of repetitions that tell of what came before the first report; None: none was heard yet."""
        self.bit = 1 << slot
        self.until_s: dict[bytes, float] = {}
        """By block: until when it is believed to be there."""


class Held(Mapping[str, int]):
    """Tokens of one prompt that each instance has, whole blocks without a gap from the first on; those that have none are
    not named. Holds until the index is told more."""

    def __init__(self, holders: Mapping[str, _Holder], slots: Sequence[_Holder], levels: list[tuple[int, int]]) -> None:
        """`levels`: numbers of tokens, ascending, and the bits of those that have just so many."""
        self._holders = holders
        self._slots = slots
        self._levels = levels

    def __getitem__(self, instance_id: str) -> int:
        bit = self._holders[instance_id].bit
        for num_tokens, bits in self._levels:
            if bits & bit:
                return num_tokens
        raise KeyError(instance_id)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.longest())

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._levels)

    def get(self, instance_id: str, default: int = 0) -> int:  # type: ignore[override]  # of what is never None
        if (holder := self._holders.get(instance_id)) is not None:
            for num_tokens, bits in self._levels:
                if bits & holder.bit:
                    return num_tokens
        return default

    def longest(self) -> Iterator[tuple[str, int]]:
        """`items` in order, those that have most first."""
        for num_tokens, bits in reversed(self._levels):
            while bits:
                bit = bits & -bits
                yield self._slots[bit.bit_length() - 1].instance_id, num_tokens
                bits ^= bit


NOT_HELD = Held({}, (), [])
"""By anybody."""


class PrefixIndex:
    def __init__(self, max_entries: int = 1 << 19) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._part_of: list[OrderedDict[bytes, int]] = []
        """By the first byte of a block's key; each has the bits of the holders of each of its blocks."""
        self._limit_of: list[int] = []
        """By the first byte of a key: how many blocks its part has at most."""
        widths = cycle(range(1, MAX_WIDTH + 1))
        while (left := 256 - len(self._part_of)) > 0:
            width = min(left, next(widths)) if max_entries >= MIN_ENTRIES else left
            self._part_of += [OrderedDict()] * width
            self._limit_of += [max_entries * width // 256] * width
        self._holders: dict[str, _Holder] = {}
        self._slots: list[_Holder] = []
        """By the number of their bit, also those that are being cleared, and those whose number is free."""
        self._known = 0
        """The bits of those that are not forgotten."""
        self._free: list[int] = []
        self._forgotten: deque[_Holder] = deque()
        self._guesses: deque[tuple[float, _Holder, list[bytes]]] = deque()
        """In the order in which they end."""
        self._prompts: OrderedDict[tuple[str, int], tuple[GenerationRequest, list[bytes]]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that some instance has."""
        return self._num_entries

    def on_report(self, report: LoadReport, has_gap: bool) -> None:
        """`has_gap`: reports before this one were missed, or it is the first."""
        if has_gap or report.is_cache_anew:
            self.forget(report.instance_id)
        if self._forgotten:
            self._clear()
        if report.cache_lost:
            holder = self._holder(report.instance_id)
            for key in _keys(report.cache_lost):
                if holder.until_s.pop(key, None) is not None:
                    self._drop(key, holder)
        if report.cache_held:
            self._take_in(report.cache_held, self._holder(report.instance_id))
        if report.cache_repeated:
            holder = self._holder(report.instance_id)
            if holder.last_round is None:
                holder.last_round = report.cache_round + 1
            if report.cache_round <= holder.last_round and self._num_entries < self._max_entries:
                self._take_in(report.cache_repeated, holder, is_old=True)

    def _take_in(self, packed: bytes, holder: _Holder, is_old: bool = False) -> None:
        """Blocks that it says that it holds. What `is_old` takes nobody's place who was named since."""
        until_s, part_of, limit_of, bit = holder.until_s, self._part_of, self._limit_of, holder.bit
        for key in _keys(packed):
            first = key[0]
            part = part_of[first]
            if is_old and len(part) >= limit_of[first]:
                continue
            if key in until_s:
                part.move_to_end(key)
            elif (before := part.get(key)) is not None:
                part[key] = before | bit
                part.move_to_end(key)
            else:
                self._add(part, key, bit)
            until_s[key] = math.inf

    def forget(self, instance_id: str) -> None:
        """What it holds is not known any more."""
        if (holder := self._holders.pop(instance_id, None)) is not None:
            self._known ^= holder.bit
            self._forgotten.append(holder)

    def on_dispatch(self, request: GenerationRequest, block_size: int, instance_id: str, now: float) -> None:
        if not block_size:
            return
        self._expire(now)
        holder, guess_s = self._holder(instance_id), now + GUESS_S
        until_s, part_of, bit, guessed = holder.until_s, self._part_of, holder.bit, []
        for key in self._keys_of(request, block_size):
            part, known_s = part_of[key[0]], until_s.get(key)
            if known_s is not None:
                part.move_to_end(key)
                if known_s >= guess_s:
                    continue
            elif (before := part.get(key)) is not None:
                part[key] = before | bit
                part.move_to_end(key)
            else:
                self._add(part, key, bit)
            until_s[key] = guess_s
            guessed.append(key)
        if guessed:
            self._guesses.append((guess_s, holder, guessed))

    def held_tokens(self, request: GenerationRequest, block_size: int, now: float) -> Held:
        if not block_size:
            return NOT_HELD
        return self._held(zip(count(block_size, block_size), self._keys_of(request, block_size), strict=False), now)

    def held_of(self, move: NextMove, now: float) -> Held:
        """Tokens of a request that may move, as far as its marks tell."""
        positions = mark_positions(move.num_blocks)
        named = zip(positions, mark_keys(move), strict=False)
        return self._held(((move.block_size * position, key) for position, key in named), now)

    def _held(self, named: Iterable[tuple[int, bytes]], now: float) -> Held:
        """`named`: tokens of a prompt up to the end of some of its blocks, ascending, and these blocks' keys."""
        self._expire(now)
        levels: list[tuple[int, int]] = []
        having, held_tokens = self._known, 0
        for num_tokens, key in named:
            still = having & self._part_of[key[0]].get(key, 0)
            if held_tokens and still != having:
                levels.append((held_tokens, having ^ still))
            having, held_tokens = still, num_tokens
            if not having:
                break
        if having and held_tokens:
            levels.append((held_tokens, having))
        return Held(self._holders, self._slots, levels)

    def _holder(self, instance_id: str) -> _Holder:
        holder = self._holders.get(instance_id)
        if holder is None:
            slot = self._free.pop() if self._free else len(self._slots)
            holder = self._holders[instance_id] = _Holder(instance_id, slot)
            if slot == len(self._slots):
                self._slots.append(holder)
            else:
                self._slots[slot] = holder
            self._known |= holder.bit
        return holder

    def _add(self, part: OrderedDict[bytes, int], key: bytes, bit: int) -> None:
        """Notes a block that nobody held so far, and its holder."""
        if len(part) >= self._limit_of[key[0]]:
            self._forget_oldest(part)
        part[key] = bit
        self._num_entries += 1

    def _drop(self, key: bytes, holder: _Holder) -> None:
        """Notes that the block has lost this holder."""
        part = self._part_of[key[0]]
        left = part[key] ^ holder.bit
        if left:
            part[key] = left
        else:
            del part[key]
            self._num_entries -= 1

    def _forget_oldest(self, part: OrderedDict[bytes, int]) -> None:
        key, bits = part.popitem(last=False)
        self._num_entries -= 1
        while bits:
            bit = bits & -bits
            del self._slots[bit.bit_length() - 1].until_s[key]
            bits ^= bit

    def _clear(self) -> None:
        """A part of what is forgotten; who is cleared leaves its bit to another."""
        holder = self._forgotten[0]
        for _ in range(min(MAX_CLEARED, len(holder.until_s))):
            self._drop(holder.until_s.popitem()[0], holder)
        if not holder.until_s:
            self._forgotten.popleft()
            self._free.append(holder.bit.bit_length() - 1)

    def _expire(self, now: float) -> None:
        """Guesses that nobody confirmed."""
        while self._guesses and self._guesses[0][0] <= now:
            guess_s, holder, keys = self._guesses.popleft()
            for key in keys:
                if holder.until_s.get(key) == guess_s:
                    del holder.until_s[key]
                    self._drop(key, holder)

    def _keys_of(self, request: GenerationRequest, block_size: int) -> list[bytes]:
        name = request.request_id, block_size
        asked, keys = self._prompts.get(name, (None, []))
        if asked is not request:
            keys = list(prompt_keys(request, block_size))
            self._prompts[name] = request, keys
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(name)
        return keys


def _keys(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed) - KEY_BYTES + 1, KEY_BYTES)]


def prompt_keys(request: GenerationRequest, block_size: int) -> Iterator[bytes]:
    """Keys of `block_hashes`."""
    return (block_hash[:KEY_BYTES] for block_hash in block_hashes(request, block_size, MAX_BLOCKS))
