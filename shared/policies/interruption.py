"""Whether an online arrival interrupts the running offline step, and what happens to an interrupted step.

ConServe's Algorithm 2 decides the first. (Its listing leaves the batch alone when the time is OVER the objective; its text
says the opposite, and the text is right.) ConServe discards the interrupted step. Here it is suspended, which costs only its
memory and its sequences' wait. What follows is a ski-rental question: see "Interrupting an offline step" in
docs/design/policies.md.
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
"""Share of the time left to a first token for which an offline step may continue. ConServe waits as long as the objective
allows, because an interrupted step is lost. A suspended step is not lost, so making users wait gains little."""


LEAST_GAIN_S = 0.002
"""Least gain for which a step is interrupted: stopping and resuming it take some tenths of a millisecond of the executor,
and a turn of its host."""

WAIT_TTFTS = 2.0
"""Longest wait of a suspended step for a time without online work, in TTFT objectives."""


def waits(waited_s: float, ttft_objective_s: float, *, has_online: bool) -> bool:
    """Whether a step that was interrupted `waited_s` ago stays suspended; afterwards `what_next` decides.

    A part of it shares nothing with the online step beside it, not even the reading of the weights: it would make users
    slower and offline work no faster, provided that a time without online work comes. Until then other offline sequences
    fill online steps. But online work may also never end."""
    return has_online and waited_s < WAIT_TTFTS * ttft_objective_s


class SuspendedStep(NamedTuple):
    done_s: float
    """Execution time spent on it."""
    remaining_s: float
    """Predicted time to its end."""
    lost_s: float
    """Unused spare time beside online steps since it was suspended."""


class Next(StrEnum):
    RESUME = "resume"
    PART = "part"
    """Some more of its layers, as many as the objectives allow beside each online step."""
    WAIT = "wait"
    DISCARD = "discard"


def what_next(suspended: SuspendedStep, *, has_online: bool, spare_s: float = 0.0, safepoint_s: float = 0.0) -> Next:
    """Decides what happens to a suspended step whose blocks are still its own (else it is discarded without asking).

    `has_online`: an online sequence of any model is runnable. `spare_s`: what the objectives leave beside an online step;
    `safepoint_s`: time between two safepoints, the least that can be run of it.

    From now on the spare time belongs to this step alone; spare time shorter than a safepoint interval is lost. Discarding
    repeats `done_s` instead. Which is cheaper depends on how long online work continues, which is unknown. Losing as much
    as the work is worth costs at most twice the better choice (ski rental)."""
    if not has_online or suspended.remaining_s <= spare_s:
        return Next.RESUME
    if safepoint_s <= spare_s:
        return Next.PART
    return Next.DISCARD if suspended.lost_s > suspended.done_s else Next.WAIT
