"""What can go wrong with a migration, and how it is drawn."""

from __future__ import annotations

from random import Random

import msgspec

from services.worker.migration.faults import FaultAction, FaultPoint

NOTE = "note"
"""The process tells the driver that it is there, and goes on after a while: the driver then does what `Fault.then` says."""
REFUSE = "destination.refuse"
"""Not a point of the protocol's own: PreAllocate is refused."""

LOST_ANSWERS = (FaultPoint.SOURCE_COMMIT, FaultPoint.SOURCE_ANSWER, FaultPoint.DESTINATION_COMMITTED)
"""Failing there is what makes the source ask who owns the request."""
POINTS = [str(point) for point in FaultPoint]

ENVIRONMENT = {
    "cancel": 10.0,
    "kill_source": 3.0,
    "kill_destination": 3.0,
    "stop_source": 2.0,
    "stop_destination": 2.0,
    "stop_both": 0.5,
    "drain_source": 2.0,
    "drain_destination": 2.0,
    "cut_kv_reset": 3.0,
    "cut_kv_hole": 3.0,
    "cut_kv_slow": 5.0,
    "cut_nats_source_reset": 1.5,
    "cut_nats_source_hole": 1.5,
    "cut_nats_destination_reset": 1.5,
    "cut_nats_destination_hole": 1.5,
    "cut_nats_both_hole": 0.5,
    "nats_restart": 0.6,
    "nats_lost_store": 0.3,
    "scheduler_kill": 0.8,
    "schedulers_kill": 0.4,
    "scheduler_stop": 0.4,
}
"""What is done to processes and networks around a migration, with weights."""
ACTIONS: dict[str, float] = {
    FaultAction.FAIL: 28.0,
    FaultAction.DELAY: 22.0,
    FaultAction.EXIT: 4.0,
    FaultAction.STOP: 4.0,
    REFUSE: 4.0,
}

BRIEF_ENVIRONMENT = ("cancel", "kill_source", "kill_destination", "stop_destination", "cut_kv_reset", "scheduler_kill")
BRIEF_ACTIONS = (FaultAction.FAIL, FaultAction.DELAY, FaultAction.EXIT, REFUSE)
BRIEF_S = 0.6
"""At most for anything that lasts, in a brief run."""
CUTS = tuple(name for name in ENVIRONMENT if name.startswith("cut"))
GENTLE_ENVIRONMENT = ("cancel", *CUTS)
GENTLE_ACTIONS = (FaultAction.FAIL, FaultAction.DELAY, REFUSE)
"""No process ends, so that what instances gather over time shows."""

DELAYS_S = (0.01, 0.05, 0.2, 0.8, 2.0, 3.5)
STOPS_S = (0.2, 0.6, 1.5, 2.5, 4.0, 5.5)
"""The registry forgets who is silent for 3 s."""
NATS_DOWN_S = (0.0, 0.5, 2.0, 5.0)


class Step(msgspec.Struct, frozen=True):
    point: str
    action: str
    seconds: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """A fault of one migration. `then`, `then_s`: what the driver does when a step's action is `NOTE`, and for how long."""

    name: str
    steps: list[Step]
    then: str = ""
    then_s: float = 0.0


NO_FAULT = Fault("none", [])


def draw(random: Random, kind_of_run: str = "all") -> Fault:
    """`kind_of_run`: all | brief (of the faults that cost little time) | gentle (of those that end no process) | cuts (of
    networks)."""
    brief = kind_of_run == "brief"
    names, ways = {
        "all": (tuple(ENVIRONMENT), tuple(ACTIONS)),
        "brief": (BRIEF_ENVIRONMENT, BRIEF_ACTIONS),
        "gentle": (GENTLE_ENVIRONMENT, GENTLE_ACTIONS),
        "cuts": (CUTS, ()),
    }[kind_of_run]
    environment = {name: ENVIRONMENT[name] for name in names}
    weights = {**{way: ACTIONS[way] for way in ways}, **environment}
    kind = random.choices(list(weights), list(weights.values()))[0]
    if kind == REFUSE:
        return Fault("refuse", [Step(REFUSE, "fail", random.randrange(2))])
    point = random.choice(POINTS)
    before = []
    if point == FaultPoint.SOURCE_OWNS:
        before = [Step(str(random.choice(LOST_ANSWERS)), "fail")]
    times_s = DELAYS_S if kind == FaultAction.DELAY else NATS_DOWN_S if kind.startswith("nats") else STOPS_S
    seconds = random.choice([at for at in times_s if not brief or at <= BRIEF_S])
    if kind in environment:
        # The protocol goes on while it happens, or waits for it.
        note = Step(point, NOTE, random.choice((0.0, 0.02, 0.1, 0.3)))
        return Fault(kind, [*before, note], kind, seconds)
    return Fault(f"{kind} {point}", [*before, Step(point, str(kind), seconds)], then_s=seconds)
