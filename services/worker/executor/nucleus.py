"""The lowest score that top-k and top-p leave in, by sorting (few rows, small k, CPU) or by bisection (CUDA).

A token is in while fewer than k scores are above its own and the probability above it, within what top-k and the floor
leave, has not reached top_p; the most likely always is. Equal scores are in or out together.

A sort of a vocabulary moves each row through memory again and again, in buffers of several times its size. Bisection over
the bits of a float32 sums a row 32 times, in memory of two copies, and asks nothing of the device.
"""

from __future__ import annotations

import torch

_LOWEST = torch.finfo(torch.float32).min
_KEY_BITS = 32


def by_sorting(
    scores: torch.Tensor, largest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor | None
) -> torch.Tensor:
    """`[R, 1]` of `scores` `[R, vocab]`. `largest`: `[R, n]`, the n largest scores of each row, descending. `top_k` `[R, 1]`
    int64: at most n; `top_p` `[R, 1]`: above 1 for all; `floor` `[R, 1]`: scores below it are out."""
    kept = torch.arange(largest.shape[1], device=scores.device) < top_k
    if floor is not None:
        kept &= largest >= floor
    mass = largest.softmax(-1).mul_(kept)
    through = mass.cumsum(-1)
    kept &= through - mass < top_p * through[:, -1:]
    kept[:, 0] = True
    return largest.gather(1, kept.sum(-1, keepdim=True) - 1)


def by_bisection(
    scores: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor, floor: torch.Tensor | None
) -> torch.Tensor:
    """Filters like `by_sorting`, but for rounding: the sums have another order. `top_k` None: of no row."""
    best = scores.amax(-1, keepdim=True)
    mass = (scores - best).exp_()
    if floor is not None:
        mass.masked_fill_(scores < floor, 0)
    lowest = floor
    total = mass.sum(-1, keepdim=True)
    if top_k is not None:
        ones = torch.ones((), device=scores.device).expand_as(scores)
        last = _bisect(scores, ones, top_k.float(), best)
        above, count = _sum_above(mass, scores, last), _sum_above(ones, scores, last)
        # Of equal scores at the end only as many count as there are places.
        within = above + (top_k - count) * (last - best).exp()
        total = within if floor is None else torch.where(last < floor, total, within)
        lowest = last if floor is None else torch.maximum(last, floor)
    threshold = _bisect(scores, mass, top_p * total, best)
    return threshold if lowest is None else torch.maximum(threshold, lowest)


def _bisect(scores: torch.Tensor, weights: torch.Tensor, limit: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """`[R, 1]`: the lowest score above which the weights sum to less than `limit`; `best`, the highest, at most."""
    low = _key(scores.amin(-1, keepdim=True).clamp(min=_LOWEST)) - 1
    high = _key(best)
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        is_in = _sum_above(weights, scores, _score(middle)) < limit
        high = torch.where(is_in, middle, high)
        low = torch.where(is_in, low, middle)
    return _score(high)


def _sum_above(weights: torch.Tensor, scores: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """`[R, 1]`"""
    return weights.masked_fill(scores <= threshold, 0).sum(-1, keepdim=True)


def _key(score: torch.Tensor) -> torch.Tensor:
    """int64 in the order of float32."""
    bits = score.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _score(key: torch.Tensor) -> torch.Tensor:
    bits = key.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
