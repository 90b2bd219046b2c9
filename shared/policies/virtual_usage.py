"""Virtual usage and freeness: how loaded an instance is, in one number (Llumnix, OSDI'24, section 4.4).

Plain arithmetic over sums that the instance keeps anyway. All amounts are in merged blocks of the KV pool (fractions
allowed, because a merged block holds several slots of one model). Only online requests are given in: offline work yields
at once and is therefore not load. Higher freeness is freer, everywhere.

    V(running request)       = its blocks + headroom(its priority) / number of requests of that priority
    V(waiting request)       = blocks that its known tokens need: all of them for dispatch, only the head for migration
    freeness                 = (total - sum of V) / running requests

The headroom of a priority is divided by its requests, so an instance is charged for it once, however many it hosts.

Where requests of several models run, a step of one token for each uses up sum(1 / tokens that a merged block holds) merged
blocks; freeness over that is in decode steps, so that one threshold fits models of any slot size.
"""

from __future__ import annotations

import math

from shared.cost_model import CostModel, StepShape

IDEAL_SLOWDOWN = 1.5
"""A decode step that takes so many times that of a single sequence is still near its ideal speed."""

TYPICAL_CONTEXT_TOKENS = 256
"""Of one sequence, where a load in tokens is turned into a number of sequences."""


def merged_demand(num_tokens: int, page_tokens: int, slots_per_merged: int) -> float:
    """Merged blocks that `num_tokens` tokens of a model occupy: whole slots, as fractions of a merged block."""
    return -(-num_tokens // page_tokens) / slots_per_merged


def headroom(total: float, ideal_load: float) -> float:
    """Blocks to be kept unused for a high-priority request: what lies above `ideal_load`, the load up to which decode
    still runs near its ideal speed. Normal requests have none."""
    return max(0.0, total - ideal_load)


def ideal_load_tokens(cost_model: CostModel) -> float:
    """Tokens in the caches of decoding sequences up to which a step takes at most `IDEAL_SLOWDOWN` times that of one alone;
    `inf` if no load slows it."""
    seconds = (IDEAL_SLOWDOWN - 1) * cost_model.predict(StepShape(0, 0, 1, TYPICAL_CONTEXT_TOKENS))
    sequence_s = cost_model.decode_cost_s(TYPICAL_CONTEXT_TOKENS)
    below_knee = max(0, cost_model.knee_tokens - 1) if cost_model.over_knee_s else math.inf
    if sequence_s * below_knee < seconds:
        more = below_knee + (seconds - sequence_s * below_knee) / (sequence_s + cost_model.over_knee_s)
    else:
        more = seconds / sequence_s if sequence_s else math.inf
    return (1 + more) * TYPICAL_CONTEXT_TOKENS


def decode_steps(free: float, step_merged: float) -> float:
    """How many steps can run until `free` merged blocks are used up, at `step_merged` a step; +inf where nothing runs or
    waits (0). Negative where more is asked for than there is."""
    return free / step_merged if step_merged else math.inf


def dispatch_virtual_usage(
    running: float,
    waiting: float,
    *,
    high_headroom: float = 0.0,
    num_high: int = 0,
    for_high: bool = False,
) -> float:
    """The usage that decides where a new request goes: every waiting request counts with its whole demand.

    `running`, `waiting`: blocks held by running and needed by waiting requests. `num_high`: high-priority requests among
    both. A normal request sees the headroom where high ones are; a high request sees it where none is yet, because only
    there would it have to be made (`for_high`).
    """
    charged = high_headroom if (num_high > 0) != for_high else 0.0
    return running + waiting + charged


def migration_virtual_usage(
    running: float,
    first_waiting: float,
    *,
    high_headroom: float = 0.0,
    num_high: int = 0,
) -> float:
    """The usage that decides who gives requests away: of the waiting ones only the head counts, because only it can be
    let in by moving a running one."""
    charged = high_headroom if num_high > 0 else 0.0
    return running + first_waiting + charged


def freeness(total: float, virtual_usage: float, num_running: int) -> float:
    """Blocks left for each running request, so about the decode steps (times page size) until memory runs out.

    Negative when more is asked for than there is; +inf where nothing runs or waits.
    """
    if virtual_usage == 0 and num_running == 0:
        return math.inf
    return (total - virtual_usage) / max(1, num_running)


def left_of(total: float, freeness: float, num_running: int) -> float:
    """What lies beside the virtual usage: the numerator of a freeness, in the unit of `total` (all, where nothing runs or
    waits)."""
    return total if freeness == math.inf else freeness * max(1, num_running)
