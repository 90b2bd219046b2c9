"""Which full blocks can be found by their hashes here, told bit by bit: what came and went since it was last told, and all
that there are in turn, for whoever missed a part.

Knows no sequences. Of hashes the first `KEY_BYTES` are told. Nothing here changes what the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

import msgspec

from shared.messages.cluster import KEY_BYTES

MAX_TOLD = 256
"""Changes in one report; the others are in the next ones."""
MAX_NOTED = 1 << 14
"""Changes that are not told yet. Beyond it all is told anew."""
NUM_REPEATED = 80
"""Cached blocks that one report repeats, of all that there are."""


class Cache(Protocol):
    """A pool of blocks."""

    def hashes(self) -> Iterator[bytes]:
        """Hashes of the blocks that can be found."""

    def has(self, block_hash: bytes, /) -> bool:
        """Whether a block can be found by it."""


class CacheChanges(msgspec.Struct, frozen=True):
    """Changes for the fields of the same names in a load report."""

    cache_held: bytes = b""
    cache_lost: bytes = b""
    is_cache_anew: bool = False
    cache_repeated: bytes = b""
    cache_round: int = 0


class CacheNews:
    def __init__(self) -> None:
        self.caches: Sequence[Cache] = ()
        """What is found in any of them is held."""
        self._changed: dict[bytes, None] = {}
        self._is_anew = False
        self._repeated: Iterator[bytes] = iter(())
        self._round = 0

    def note(self, block_hash: bytes) -> None:
        """A block came to be found by it, or is not any more."""
        if len(self._changed) >= MAX_NOTED:
            self._changed.clear()
            self._is_anew = True
            self._repeated = iter(())
        self._changed[block_hash] = None

    def take(self) -> CacheChanges:
        """What to tell next."""
        told = list(islice(self._changed, MAX_TOLD))
        for block_hash in told:
            del self._changed[block_hash]
        repeated, round_told = list(islice(self._repeated, NUM_REPEATED)), self._round
        if len(repeated) < NUM_REPEATED:
            self._repeated = iter(list(chain.from_iterable(cache.hashes() for cache in self.caches)))
            self._round += 1
        held = [any(cache.has(block_hash) for cache in self.caches) for block_hash in told]
        still = (block_hash for block_hash in repeated if any(cache.has(block_hash) for cache in self.caches))
        is_anew, self._is_anew = self._is_anew, False
        return CacheChanges(
            _packed(h for h, is_held in zip(told, held, strict=True) if is_held),
            _packed(h for h, is_held in zip(told, held, strict=True) if not is_held),
            is_anew,
            _packed(still),
            round_told,
        )


def _packed(hashes: Iterator[bytes]) -> bytes:
    return b"".join(block_hash[:KEY_BYTES] for block_hash in hashes)
