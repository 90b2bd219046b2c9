"""How long a stream may stand still while others are served.

Whatever the order of models, a stream that has its first token is due its next one within

    max(MAX_SILENT_TPOTS * TPOT objective, MAX_SILENCE_S)        of its last

A step of a model serves all its streams, so the model is due when the earliest of them is. If any sequence of turns keeps
all in time, then turns by earliest due time do. The time left before the first of them must begin is

    room = min over the models, by due time, of (time left - time to serve its streams and those of models due before it)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

MAX_SILENT_TPOTS = 3.0
MAX_SILENCE_S = 0.5
PLANNED_SHARE = 0.95
"""A stream is planned to run within this share of the time that it may stand still: predictions are off by some percent."""
SERVING_STEPS = 2.0
"""Time to serve streams, in steps of them alone: prompts of their model may take as much again."""
URGENT_S = 0.15
"""Room in seconds below which streams precede everything else."""


def allowed_silence_s(tpot_objective_s: float) -> float:
    """Between two tokens of a stream."""
    return max(MAX_SILENT_TPOTS * tpot_objective_s, MAX_SILENCE_S) if tpot_objective_s < inf else MAX_SILENCE_S


def is_overfull(serving_s: Iterable[float]) -> bool:
    """Whether serving the streams of all models takes so long that they are always urgent. Nothing else would then run;
    if it did, the streams could not all be in time."""
    return PLANNED_SHARE * MAX_SILENCE_S - sum(serving_s) < URGENT_S


def room_s(streams: Iterable[tuple[float, float]]) -> float:
    """How long other work may run before the streams' turns must begin; below 0: too late for all of them; inf: no streams.
    `streams`: for each model, the time left to the earliest due token of its streams, and the time to serve them."""
    room = inf
    needed_s = 0.0
    for left_s, step_s in sorted(streams):
        needed_s += step_s
        room = min(room, left_s - needed_s)
    return room
