"""Which instances have how much of a prompt in their prefix caches.

Instances say with each load report which full blocks can be found there and which cannot any more, by the first `KEY_BYTES`
of the hashes that chain a block to all before it (`BlockPool`), on the device or in host memory; and one after the other
those that they hold, so that a scheduler that has missed reports, or is new, knows all again after a while. Between a
dispatch and the report that names its blocks the instance is believed to have them for `GUESS_S`.

At most `max_entries` blocks are remembered, those that were longest not named are forgotten first. That, a collision and a
guess that was wrong cost a cache hit and nothing else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from shared.engine.memory.blocks import chain_hash, root_hash
from shared.messages.cluster import KEY_BYTES, LoadReport
from shared.messages.requests import GenerationRequest

GUESS_S = 30.0
MAX_BLOCKS = 2048
"""Of a prompt, that are looked for."""


class PrefixIndex:
    def __init__(self, max_entries: int = 1 << 19) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[bytes, dict[str, tuple[int, float]]] = OrderedDict()
        """Of each block: the instances, each with its generation when it said so, and until when that is believed."""
        self._generations: dict[str, int] = {}
        """An entry of an older one counts for nothing."""

    def on_report(self, report: LoadReport, has_gap: bool) -> None:
        """`has_gap`: reports before this one were missed, or it is the first."""
        if has_gap or report.is_cache_anew:
            self.forget(report.instance_id)
        if report.cache_lost:
            for key in _keys(report.cache_lost):
                holders = self._holders.get(key)
                if holders is not None and holders.pop(report.instance_id, None) is not None and not holders:
                    del self._holders[key]
        if report.cache_held:
            self._add(_keys(report.cache_held), report.instance_id, math.inf)

    def forget(self, instance_id: str) -> None:
        """What it holds is not known any more."""
        self._generations[instance_id] = self._generations.get(instance_id, 0) + 1

    def on_dispatch(self, request: GenerationRequest, block_size: int, instance_id: str, now: float) -> None:
        if block_size:
            self._add(prompt_keys(request, block_size), instance_id, now + GUESS_S)

    def held_tokens(self, request: GenerationRequest, block_size: int, now: float) -> dict[str, int]:
        """Tokens of the prompt that each instance has, whole blocks without a gap from the first on; those that have none
        are not named."""
        held: dict[str, int] = {}
        going: set[str] | None = None
        if not block_size:
            return held
        for number, key in enumerate(prompt_keys(request, block_size)):
            holders = self._holders.get(key)
            if holders is None:
                break
            having = {
                name
                for name, (generation, until_s) in holders.items()
                if until_s > now and generation == self._generations.get(name, 0)
            }
            going = having if going is None else going & having
            if not going:
                break
            for name in going:
                held[name] = (number + 1) * block_size
        return held

    def _add(self, keys: Iterable[bytes], instance_id: str, until_s: float) -> None:
        generation = self._generations.get(instance_id, 0)
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                holders = self._holders[key] = {}
            else:
                self._holders.move_to_end(key)
            known = holders.get(instance_id)
            if known is None or known[0] != generation or known[1] < until_s:
                holders[instance_id] = (generation, until_s)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)


def _keys(packed: bytes) -> Iterator[bytes]:
    return (packed[first:end] for first, end in pairwise(range(0, len(packed) + 1, KEY_BYTES)))


def prompt_keys(request: GenerationRequest, block_size: int) -> Iterator[bytes]:
    """Of the full blocks of the prompt, but for its last token, which is computed in any case; of the hashes of
    `Sequence.extend_hashes`."""
    previous = root_hash(request.model)
    if request.adapter is not None:
        previous = chain_hash(previous, request.adapter.version.encode())
    num_blocks = min(MAX_BLOCKS, (len(request.prompt) // 4 - 1) // block_size)
    for at in range(0, 4 * block_size * num_blocks, 4 * block_size):
        previous = chain_hash(previous, request.prompt[at : at + 4 * block_size])
        yield previous[:KEY_BYTES]
