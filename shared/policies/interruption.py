"""Whether an online arrival stops the running offline step, and what becomes of a step that was stopped.

ConServe's Algorithm 2 decides the first. (Its listing leaves the batch alone when the time is OVER the objective; its text
says the opposite, and the text is right.) ConServe throws the stopped step away; here it is suspended, which costs nothing
but its memory and its sequences' wait, so what follows is a question of rent: section "interrupting" of the policies' page.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


def should_interrupt(
    elapsed_s: float, predicted_s: float, left_s: float, online_step_s: float, safepoint_s: float = 0.0
) -> bool:
    """Whether to raise the flag in an interruptible step that was started `elapsed_s` ago, for an online request with
    `left_s` to its objective, whose prefill (with all online prompts before it) takes `online_step_s`.

    A step over its prediction is expected to go on for as long as it has been over. `safepoint_s`: time between two
    safepoints; a step that ends before the next, or hardly later, is left alone; as much is kept as margin."""
    remaining_s = abs(predicted_s - elapsed_s)
    if remaining_s <= safepoint_s + LEAST_GAIN_S:
        return False
    return remaining_s > PATIENCE_SHARE * left_s or remaining_s + online_step_s + safepoint_s > left_s


PATIENCE_SHARE = 0.01
"""Share of the time left to a first token for which an offline step may go on. ConServe waits for as long as the
objective allows at all, because what it stops is lost; a suspended step is not, so there is little to be gained by
making somebody wait."""


LEAST_GAIN_S = 0.002
"""What an arrival must gain by stopping a step: that and going on with it later take some tenths of a millisecond of the
executor, and a turn of its host."""

WAIT_TTFTS = 2.0
"""Times the objective of a first token, for which a suspended step waits for a time without online work."""


def waits(waited_s: float, ttft_objective_s: float, *, has_online: bool) -> bool:
    """Whether a step that was interrupted `waited_s` ago stays as it is; afterwards `what_next` says.

    A part of it shares nothing with the online step beside it, not even the reading of the weights: it would make users
    slower and offline work no faster, provided that a time without online work comes. Until then other offline sequences
    fill online steps. But online work may also never end."""
    return has_online and waited_s < WAIT_TTFTS * ttft_objective_s


class SuspendedStep(NamedTuple):
    done_s: float
    """Execution time that went into it."""
    remaining_s: float
    """Predicted time to its end."""
    lost_s: float
    """Spare time beside online steps that nobody used since it was suspended."""


class Next(StrEnum):
    RESUME = "resume"
    PART = "part"
    """Some more of its layers, as many as the objectives allow beside each online step."""
    WAIT = "wait"
    DISCARD = "discard"


def what_next(suspended: SuspendedStep, *, has_online: bool, spare_s: float = 0.0, safepoint_s: float = 0.0) -> Next:
    """For a step whose blocks are still its own (else it is discarded without asking).

    `has_online`: an online sequence of any model is runnable. `spare_s`: what the objectives leave beside an online step;
    `safepoint_s`: time between two safepoints, the least that can be run of it.

    From now on nothing else is computed in the spare time, as that is its own; spare time shorter than a safepoint
    interval is lost. Discarding repeats `done_s` instead. Which is cheaper depends on how long online work goes on, which
    nobody knows: losing as much as the work is worth costs at most twice the better of the two (ski rental)."""
    if not has_online or suspended.remaining_s <= spare_s:
        return Next.RESUME
    if safepoint_s <= spare_s:
        return Next.PART
    return Next.DISCARD if suspended.lost_s > suspended.done_s else Next.WAIT
