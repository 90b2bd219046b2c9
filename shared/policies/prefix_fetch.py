"""Whether a prompt's beginning is fetched from the instance that has it instead of being computed.

A prompt that many share lies in few caches, and whoever is sent where it lies waits behind all the others. With it fetched,
any instance is nearly as good. The dispatch policy sees one number for each, the predicted time of the first token; here is
what a fetch does to it.
"""

from __future__ import annotations

from typing import NamedTuple

SETUP_S = 0.01
"""Time for the question, the connection and the copy to the device, beside what the bytes take."""
WAIT_S = 0.5
"""Time that a request waits for its prefix before it is computed after all."""
MOST_S = 0.6 * WAIT_S
"""Predicted time of a fetch, at most."""
MOST_SHARE = 0.5
"""Predicted time of a fetch over that of computing the same, at most: a prediction may be off, and the holder has work."""
MIN_TOKENS = 256
MAX_SERVED = 4
"""Fetches that an instance serves at once; others are refused, and their requests computed."""


class Fetch(NamedTuple):
    """The beginning of a prompt, from another instance."""

    holder_id: str
    num_tokens: int
    """Tokens that the holder has, in whole blocks."""
    seconds: float
    """Predicted."""


def fetch_of(holder_id: str, num_tokens: int, num_cached: int, token_s: float) -> Fetch | None:
    """A fetch of what is missing beyond `num_cached` tokens, if that is enough to be worth one. `token_s`: what a token's KV
    takes from there; 0: the holder gives nothing."""
    num_missing = num_tokens - num_cached
    seconds = SETUP_S + num_missing * token_s
    if token_s <= 0 or num_missing < MIN_TOKENS or seconds > MOST_S:
        return None
    return Fetch(holder_id, num_tokens, seconds)


def is_cheaper(fetch: Fetch, computed_s: float, rest_s: float) -> bool:
    """Whether it takes clearly less than computing. `computed_s`: predicted for the whole prompt here; `rest_s`: for what is
    left of it after the fetch."""
    return fetch.seconds <= MOST_SHARE * (computed_s - rest_s)
