"""When a move is worth its cost, and when a copy beside the decode should end: arithmetic on measured rates.

The stages follow pre-copy live migration (Clark et al., NSDI 2005; Llumnix, OSDI 2024, section 4.2): each copies what was
filled while the one before was under way, until the rest is a small part of a decode step, or does not shrink any more and
fits into one. The rest is what the request waits for.
"""

from __future__ import annotations

from enum import StrEnum

DEFAULT_BANDWIDTH_BYTES_S = 1e9
"""Between two instances that have sent each other nothing yet."""
MARGIN_BLOCKS = 2
"""Announced with the last stage beyond those filled: the one being filled, and one more, which the steps until the request
has left its batch may begin."""
GOAL_SHARE = 0.1
"""Of a decode step, that copying the rest may take: then another stage would gain nothing that is noticed."""
MIN_COPY_DEADLINE_S = 2.0
DEADLINE_FACTOR = 4.0


class Next(StrEnum):
    STAGE = "stage"
    """Copy what is filled; the decode goes on."""
    LAST = "last"
    """Out of the batch; copy the rest."""
    NOT_WORTH = "not_worth"


def copy_s(num_bytes: int, bandwidth_bytes_s: float | None, rate_share: float) -> float:
    """Seconds until so much has arrived. `rate_share`: of the bandwidth, what migrations may use."""
    return num_bytes / ((bandwidth_bytes_s or DEFAULT_BANDWIDTH_BYTES_S) * rate_share)


def copy_deadline_s(expected_s: float) -> float:
    """How long a copy may take before it counts as failed."""
    return MIN_COPY_DEADLINE_S + DEADLINE_FACTOR * expected_s


def is_worth(cost_s: float, tokens_left: int, step_s: float) -> bool:
    """Whether the request, at its longest, still decodes for longer than its copy takes: else it ends where it is about as
    soon as the move would."""
    return cost_s <= tokens_left * step_s


def next_stage(
    num_filled: int,
    left_s: float,
    previous_left_s: float | None,
    last_s: float,
    step_s: float,
    num_stages: int,
    max_stages: int,
) -> Next:
    """What to do about blocks that are not copied yet. `num_filled`: of them, those whose contents are final; `left_s`: to
    copy all of them, the one being filled too, as a stage; `previous_left_s`: what this was before the stage that has ended,
    None before the first; `last_s`: to copy them while they are waited for, without a limit of the rate; `num_stages`: that
    have ended."""
    if not num_filled or left_s <= GOAL_SHARE * step_s:
        return Next.LAST
    has_shrunk = previous_left_s is None or left_s < previous_left_s
    if num_stages < max_stages - 1 and has_shrunk:
        return Next.STAGE
    return Next.LAST if has_shrunk or last_s <= step_s else Next.NOT_WORTH
