"""The model of the chaos run: its KV cell is a hash of the prefix, its next token a function of the last cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

WORDS = 8
"""64-bit words of a KV cell."""
_MASK = (1 << 64) - 1
_FACTORS = np.arange(1, 2 * WORDS, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
VOCABULARY = 997


def root(model: str) -> int:
    return int.from_bytes(model.encode().ljust(8, b"~")[:8], "little")


def extend(last: int, tokens: Iterable[int]) -> list[int]:
    """A link for each token, after `last`; never 0."""
    links = []
    for token in tokens:
        last = ((last ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        last = (last ^ (last >> 29)) or 1
        links.append(last)
    return links


def cells(links: np.ndarray) -> np.ndarray:
    """`[n]` uint64 -> `[n, WORDS]` uint64."""
    made: np.ndarray = links[:, None] * _FACTORS
    return made


def next_token(link: int) -> int:
    return (link >> 17) % VOCABULARY


def output(model: str, prompt: Sequence[int], max_tokens: int, stop: Iterable[int] = ()) -> list[int]:
    """What an undisturbed run makes."""
    stops = frozenset(stop)
    made: list[int] = []
    link = extend(root(model), prompt)[-1]
    while len(made) < max_tokens:
        made.append(next_token(link))
        if made[-1] in stops:
            break
        (link,) = extend(link, made[-1:])
    return made
