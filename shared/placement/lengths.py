"""How long the outputs will be that have not ended: of those that ended in a window, most are short, as the long ones have
not ended in it. Kaplan and Meier's estimate takes the others for what they are, at least as long as by now.

    at_risk(t)    requests of which it was seen whether they go beyond t, in tokens or in seconds
    S(t)          product over lengths u <= t of 1 - ended(u) / at_risk(u)         share that is longer than t
"""

from __future__ import annotations

import numpy as np


def drawn_like(lengths: np.ndarray, has_ended: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[n] index of a request of one model that each will be like: its own where it has ended, else one that ended and is
    longer than it is by now, drawn by the Kaplan-Meier shares; of all that ended where none is longer. `lengths`: [n] of
    those that have not ended as far as known. `has_ended`: [n] bool, at least one."""
    found = np.arange(len(lengths))
    ended = np.flatnonzero(has_ended)
    ended = ended[np.argsort(lengths[ended], kind="stable")]
    known, first, num = np.unique(lengths[ended], return_index=True, return_counts=True)
    at_risk = len(lengths) - np.searchsorted(np.sort(lengths), known)
    longer = np.cumprod(1.0 - num / at_risk)
    shares = np.append(1.0, longer)[:-1] - longer
    # Beyond the longest that ended nothing is known: what is left is taken to be as long as that.
    shares[-1] += longer[-1]
    passed = np.cumsum(shares)
    running = np.flatnonzero(~has_ended)
    beyond = np.searchsorted(known, lengths[running], side="right")
    below = np.append(0.0, passed)[np.where(beyond < len(known), beyond, 0)]
    at = np.searchsorted(passed, below + rng.random(len(running)) * (passed[-1] - below), side="right")
    at = np.minimum(at, len(known) - 1)
    found[running] = ended[first[at] + rng.integers(num[at])]
    return found
