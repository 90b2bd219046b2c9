"""Virtual usage and freeness: how loaded an instance is, in one number (Llumnix, OSDI'24, section 4.4).

Plain arithmetic over sums that the instance keeps anyway. All amounts are in merged blocks of the KV pool, as fractions,
because a merged block holds several blocks of one model. Only online requests count: offline work yields at once and is
therefore not load. Higher freeness is freer, everywhere.

    V(running request)       = its blocks, and as headroom HIGH_WEIGHT times as many if it is of high priority
    V(waiting request)       = blocks that its known tokens need: all of them for dispatch, only the head for migration
    freeness                 = (total - sum of V) / running requests

Headroom keeps normal requests away from high-priority ones, which every request beside them slows. It grows with the blocks
of high-priority requests: a short one ends soon, and a long one will likely stay. It does not apply to a high-priority
request, which goes where least runs. It is at most what lies above the load at which decode is near its ideal speed.
It does not count for migration where no normal request runs that could leave.

Where requests of several models run, a step of one token for each uses sum(1 / tokens that a merged block holds) merged
blocks. Freeness divided by that is in decode steps, so one threshold fits models of any block size.
"""

from __future__ import annotations

import math

from shared.costs.model import CostModel, StepShape

HIGH_WEIGHT = 64.0
"""Chosen among 16 and 64 in simulation (bench/rebalance, priorities), with half of the headroom and with all of it for
migration: requests of high priority gained most with this one and all of it, while normal ones took at most 10 % longer."""

IDEAL_SLOWDOWN = 1.5
"""A decode step is near its ideal speed while it takes at most this many times as long as that of a single sequence."""

TYPICAL_CONTEXT_TOKENS = 256
"""Context of one sequence, to convert a load in tokens into a number of sequences."""


def merged_demand(num_tokens: int, block_size: int, blocks_per_merged: int) -> float:
    """Merged blocks that `num_tokens` tokens of a model occupy: whole blocks, as fractions of a merged block."""
    return -(-num_tokens // block_size) / blocks_per_merged


def headroom(total: float, ideal_load: float, high_usage: float) -> float:
    """Blocks to keep unused for high-priority requests that hold or need `high_usage`. `ideal_load`: the load up to which
    decode runs near its ideal speed."""
    return min(max(0.0, total - ideal_load), HIGH_WEIGHT * high_usage)


def ideal_load_tokens(cost_model: CostModel) -> float:
    """Tokens in the caches of decoding sequences up to which a step takes at most `IDEAL_SLOWDOWN` times as long as that
    of one alone; `inf` if no load slows it."""
    seconds = (IDEAL_SLOWDOWN - 1) * cost_model.predict(StepShape(0, 0, 1, TYPICAL_CONTEXT_TOKENS))
    sequence_s = cost_model.decode_cost_s(TYPICAL_CONTEXT_TOKENS)
    below_knee = max(0, cost_model.knee_tokens - 1) if cost_model.over_knee_s else math.inf
    if sequence_s * below_knee < seconds:
        more = below_knee + (seconds - sequence_s * below_knee) / (sequence_s + cost_model.over_knee_s)
    else:
        more = seconds / sequence_s if sequence_s else math.inf
    return (1 + more) * TYPICAL_CONTEXT_TOKENS


def decode_steps(free: float, step_merged: float) -> float:
    """Number of steps until `free` merged blocks are used up, at `step_merged` per step; +inf if nothing runs or waits
    (0). Negative if demand exceeds the pool."""
    return free / step_merged if step_merged else math.inf


def dispatch_virtual_usage(running: float, waiting: float, *, high_headroom: float = 0.0) -> float:
    """The usage for dispatch: every waiting request counts with its whole demand.

    `running`, `waiting`: blocks held by running and needed by waiting requests. `high_headroom`: none for a
    high-priority request.
    """
    return running + waiting + high_headroom


def migration_virtual_usage(
    running: float, first_waiting: float, *, high_headroom: float = 0.0, runs_normal: bool = True
) -> float:
    """The usage for migration: of the waiting requests only the head counts, because only it can be admitted by migrating
    a running one out."""
    return running + first_waiting + (high_headroom if runs_normal else 0.0)


def freeness(total: float, virtual_usage: float, num_running: int) -> float:
    """Blocks left for each running request, so about the decode steps (times block size) until memory runs out.

    Negative if demand exceeds the pool; +inf if nothing runs or waits.
    """
    if virtual_usage == 0 and num_running == 0:
        return math.inf
    return (total - virtual_usage) / max(1, num_running)


def left_of(total: float, freeness: float, num_running: int) -> float:
    """What is left beside the virtual usage: the numerator of a freeness, in the unit of `total` (all of it if nothing runs
    or waits)."""
    return total if freeness == math.inf else freeness * max(1, num_running)
