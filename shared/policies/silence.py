"""How long a stream may stand still while others are served.

A stream that has its first token is due its next one, whatever an order of models says, within

    max(MAX_SILENT_TPOTS * TPOT objective, MAX_SILENCE_S)        of its last

A step of a model serves all its streams, so the model is due when the earliest of them is. Turns by earliest due time keep
all in time if any turns do, so the time that is left before the first of them must begin is

    room = min over the models, by due time, of (time left - time to serve its streams and those of models due before it)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

MAX_SILENT_TPOTS = 3.0
MAX_SILENCE_S = 0.5
PLANNED_SHARE = 0.95
"""Share of the time that a stream may stand still within which it is planned to run: predictions are off by some percent."""
SERVING_STEPS = 2.0
"""What serving streams takes, in steps of them alone: prompts of their model may take as much again."""
URGENT_S = 0.15
"""Seconds of room: with less, streams go before everything else."""


def allowed_silence_s(tpot_objective_s: float) -> float:
    """Between two tokens of a stream."""
    return max(MAX_SILENT_TPOTS * tpot_objective_s, MAX_SILENCE_S) if tpot_objective_s < inf else MAX_SILENCE_S


def is_overfull(serving_s: Iterable[float]) -> bool:
    """Whether serving the streams of all models takes so long that they are always urgent: then nothing else would run, and
    they cannot all be in time if it does."""
    return PLANNED_SHARE * MAX_SILENCE_S - sum(serving_s) < URGENT_S


def room_s(streams: Iterable[tuple[float, float]]) -> float:
    """`streams`: of each model the time left to the earliest due token of its streams, and the time that serving them takes.
    How long something else may run before their turns must begin; below 0: too late for all of them; inf: there are none."""
    room = inf
    needed_s = 0.0
    for left_s, step_s in sorted(streams):
        needed_s += step_s
        room = min(room, left_s - needed_s)
    return room
