"""Estimates of when a move is worth its cost, and when a copy beside the decode should end: arithmetic on measured rates.

The stages follow pre-copy live migration (Clark et al., NSDI 2005; Llumnix, OSDI 2024, section 4.2): each copies what was
filled while the one before was under way, until the rest is a small part of a decode step, or does not shrink any more and
fits into one. The rest is what the request waits for, and the step in which it finds the destination: where that is a long
one (a prompt of thousands of tokens), the request decodes on until it has ended.
"""

from __future__ import annotations

from enum import StrEnum

DEFAULT_BANDWIDTH_BYTES_S = 1e9
"""Between two instances that have sent each other nothing yet."""
MARGIN_BLOCKS = 2
"""Announced with the last stage beyond those filled: the one being filled, and one more, which the steps until the request
has left its batch may begin."""
GOAL_SHARE = 0.1
"""Share of a decode step that copying the rest may take: then another stage would gain nothing that is noticed."""
MIN_ASK_S, MAX_ASK_S = 0.005, 1.0
"""Between two questions whether the destination's long step has ended."""
MAX_WAIT_S = 4.0
"""Until it has: two steps of the longest prompts."""
MIN_COPY_DEADLINE_S = 2.0
DEADLINE_FACTOR = 4.0


class Next(StrEnum):
    STAGE = "stage"
    """Copy what is filled; the decode goes on."""
    LAST = "last"
    """Out of the batch; copy the rest."""
    WAIT = "wait"
    """Ask again when the destination's long step should have ended; the decode goes on."""
    NOT_WORTH = "not_worth"


class Busy:
    """What a source knows of the destination's steps in flight, by its last answer."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._since_s: float | None = None
        """Time at which it was first told that it has to wait."""

    def on_reserved(self, busy_s: float, now: float) -> None:
        """`busy_s`: of `Reserved`."""
        self._until_s = now + busy_s if busy_s > 0 else 0.0
        if busy_s > 0 and self._since_s is None:
            self._since_s = now

    def left_s(self, now: float) -> float | None:
        """Until they have ended; 0: a request would run there at once. None: the destination has to be asked, for the first
        time, or because the long step is due to have ended."""
        if not self._until_s:
            return self._until_s
        if self._until_s > now:
            return self._until_s - now
        # Who has asked for too long does not ask again, but is told so by `ask_after_s`.
        has_waited = self._since_s is not None and now - self._since_s >= MAX_WAIT_S
        return MIN_ASK_S if has_waited else None

    def ask_after_s(self, busy_s: float, now: float) -> float | None:
        """After `Next.WAIT` for so long: when to ask again; None: it has been waited for too long."""
        if self._since_s is None:
            self._since_s = now
        if now - self._since_s >= MAX_WAIT_S:
            return None
        self._until_s = None
        return min(MAX_ASK_S, max(MIN_ASK_S, busy_s))


def copy_s(num_bytes: int, bandwidth_bytes_s: float | None, rate_share: float) -> float:
    """Seconds until so much has arrived. `rate_share`: of the bandwidth, what migrations may use."""
    return num_bytes / ((bandwidth_bytes_s or DEFAULT_BANDWIDTH_BYTES_S) * rate_share)


def copy_deadline_s(expected_s: float) -> float:
    """How long a copy may take before it counts as failed."""
    return MIN_COPY_DEADLINE_S + DEADLINE_FACTOR * expected_s


def is_worth(cost_s: float, tokens_left: int, step_s: float, num_moves: int = 0) -> bool:
    """Whether the request, at its longest, still decodes for longer than its copies take, this one and the `num_moves` that
    it has behind it: else it ends where it is about as soon as the move would. So it moves at most so many times as its
    copy goes into what it has left."""
    return cost_s * (1 + num_moves) <= tokens_left * step_s


def next_of_handoff(num_filled: int, num_chunks: int | None) -> Next:
    """What to do about blocks of a prompt that are not copied yet. `num_filled`: of them, those whose contents are final;
    `num_chunks`: steps in flight that compute the rest of it, None: there will be more. Each chunk is copied while the next
    one is computed. Beside the last one room for it is asked for, and the request leaves its batch with its first token."""
    if num_chunks == 0:
        return Next.LAST
    if num_filled:
        return Next.STAGE
    return Next.LAST if num_chunks == 1 else Next.WAIT


def next_stage(
    num_filled: int,
    left_s: float,
    previous_left_s: float | None,
    last_s: float,
    step_s: float,
    num_stages: int,
    max_stages: int,
    busy_s: float | None = 0.0,
) -> Next:
    """What to do about blocks that are not copied yet. `num_filled`: of them, those whose contents are final; `left_s`: to
    copy all of them, the one being filled too, as a stage; `previous_left_s`: what this was before the stage that has ended,
    None before the first; `last_s`: to copy them while they are waited for, without a limit of the rate; `num_stages`: that
    have ended; `busy_s`: of `Busy.left_s`. A stage may be empty: it asks."""
    choice = _next_copy(num_filled, left_s, previous_left_s, last_s, step_s, num_stages, max_stages)
    if choice is not Next.LAST or max_stages == 1:
        return choice
    if busy_s is None:
        return Next.STAGE
    return Next.WAIT if busy_s > 0 else Next.LAST


def _next_copy(
    num_filled: int,
    left_s: float,
    previous_left_s: float | None,
    last_s: float,
    step_s: float,
    num_stages: int,
    max_stages: int,
) -> Next:
    """Next copy, as if the destination were never in a long step."""
    if not num_filled or left_s <= GOAL_SHARE * step_s:
        return Next.LAST
    has_shrunk = previous_left_s is None or left_s < previous_left_s
    if num_stages < max_stages - 1 and has_shrunk:
        return Next.STAGE
    return Next.LAST if has_shrunk or last_s <= step_s else Next.NOT_WORTH
