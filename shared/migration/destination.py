"""A migration as its destination sees it: a table of states and events. No I/O; times are arguments.

    NEW --PRE_ALLOCATE--> OPEN --COMMIT_EARLY--> AWAITING --COMPLETE--> ADOPTING --ADOPTED--> OWNED
                           '-----COMMIT---------------------------------^   '--NOT_ADOPTED--> FREEING
    OPEN, AWAITING --ABORT, STAGE_FAILED, OWNS, TIMEOUT--> FREEING --QUIET--> CLOSED

Blocks go back to the pool only when nobody writes to them any more (QUIET). A migration that is over is remembered, so that
whatever of it still comes is answered as before: a "no" is final.
"""

from __future__ import annotations

from enum import StrEnum

IDLE_S = 5.0
"""A reservation without traffic for so long is freed."""
MEMORY_S = 600.0
"""How a migration ended is known for so long: far longer than a source waits before it asks."""


class State(StrEnum):
    NEW = "new"
    OPEN = "open"
    """Blocks are reserved; what they are to hold comes."""
    AWAITING = "awaiting"
    """Commit is here, the last blocks are not."""
    ADOPTING = "adopting"
    OWNED = "owned"
    FREEING = "freeing"
    """Refused for ever; the transport may still write."""
    CLOSED = "closed"


class Event(StrEnum):
    PRE_ALLOCATE = "pre_allocate"
    NOT_RESERVED = "not_reserved"
    """There is no room, or no such model."""
    NOT_YET_RESERVED = "not_yet_reserved"
    """There will be room in a moment, so the source may ask again."""
    COMMIT = "commit"
    """And all announced blocks are here."""
    COMMIT_EARLY = "commit_early"
    COMMIT_UNFIT = "commit_unfit"
    """It names other blocks than were announced."""
    COMPLETE = "complete"
    """The last of the announced blocks is here."""
    STAGE_FAILED = "stage_failed"
    ADOPTED = "adopted"
    NOT_ADOPTED = "not_adopted"
    ABORT = "abort"
    DISOWN = "disown"
    """An abort of a source that took this instance for dead and goes on itself."""
    OWNS = "owns"
    TIMEOUT = "timeout"
    QUIET = "quiet"
    """Nobody writes to the blocks any more."""
    STOP = "stop"
    """This process ends."""


class Action(StrEnum):
    RESERVE = "reserve"
    """Then NOT_RESERVED where it fails."""
    REFUSE_STAGE = "refuse_stage"
    ADOPT = "adopt"
    """Then ADOPTED or NOT_ADOPTED."""
    CONFIRM = "confirm"
    """Answer Commit: it is ours."""
    REFUSE = "refuse"
    """Answer Commit, if one waits: it never was."""
    SAY_YES = "say_yes"
    SAY_NO = "say_no"
    STOP_WRITING = "stop_writing"
    """Then QUIET."""
    RELEASE = "release"
    GIVE_UP = "give_up"
    """Forget the request that runs here, without a word to anybody: it goes on at its source."""


_S, _E, _A = State, Event, Action
_Row = tuple[State, tuple[Action, ...]]

_FREE: tuple[Action, ...] = (_A.REFUSE, _A.STOP_WRITING)


def _refusing(state: State) -> dict[tuple[State, Event], _Row]:
    return {
        (state, _E.PRE_ALLOCATE): (state, (_A.REFUSE_STAGE,)),
        (state, _E.COMMIT): (state, (_A.REFUSE,)),
        (state, _E.COMMIT_EARLY): (state, (_A.REFUSE,)),
        (state, _E.COMMIT_UNFIT): (state, (_A.REFUSE,)),
        (state, _E.OWNS): (state, (_A.SAY_NO,)),
    }


def _holding(state: State) -> dict[tuple[State, Event], _Row]:
    ends = (_E.STAGE_FAILED, _E.ABORT, _E.DISOWN, _E.TIMEOUT, _E.STOP)
    return {(state, event): (_S.FREEING, _FREE) for event in ends} | {
        (state, _E.OWNS): (_S.FREEING, (_A.SAY_NO, *_FREE)),
        (state, _E.NOT_RESERVED): (_S.FREEING, (_A.REFUSE_STAGE, *_FREE)),
        (state, _E.NOT_YET_RESERVED): (state, (_A.REFUSE_STAGE,)),
        (state, _E.COMMIT_UNFIT): (_S.FREEING, _FREE),
    }


TABLE: dict[tuple[State, Event], _Row] = {
    (_S.NEW, _E.PRE_ALLOCATE): (_S.OPEN, (_A.RESERVE,)),
    (_S.NEW, _E.COMMIT): (_S.ADOPTING, (_A.ADOPT,)),
    (_S.NEW, _E.COMMIT_UNFIT): (_S.CLOSED, (_A.REFUSE,)),
    (_S.NEW, _E.OWNS): (_S.CLOSED, (_A.SAY_NO,)),
    (_S.NEW, _E.ABORT): (_S.CLOSED, ()),
    (_S.NEW, _E.DISOWN): (_S.CLOSED, ()),
    **_holding(_S.OPEN),
    (_S.OPEN, _E.PRE_ALLOCATE): (_S.OPEN, (_A.RESERVE,)),
    (_S.OPEN, _E.COMMIT): (_S.ADOPTING, (_A.ADOPT,)),
    (_S.OPEN, _E.COMMIT_EARLY): (_S.AWAITING, ()),
    **_holding(_S.AWAITING),
    (_S.AWAITING, _E.PRE_ALLOCATE): (_S.AWAITING, (_A.REFUSE_STAGE,)),
    (_S.AWAITING, _E.COMPLETE): (_S.ADOPTING, (_A.ADOPT,)),
    (_S.ADOPTING, _E.ADOPTED): (_S.OWNED, (_A.CONFIRM,)),
    (_S.ADOPTING, _E.NOT_ADOPTED): (_S.FREEING, _FREE),
    (_S.OWNED, _E.COMMIT): (_S.OWNED, (_A.CONFIRM,)),
    (_S.OWNED, _E.OWNS): (_S.OWNED, (_A.SAY_YES,)),
    (_S.OWNED, _E.PRE_ALLOCATE): (_S.OWNED, (_A.REFUSE_STAGE,)),
    (_S.OWNED, _E.DISOWN): (_S.CLOSED, (_A.GIVE_UP,)),
    **_refusing(_S.FREEING),
    (_S.FREEING, _E.QUIET): (_S.CLOSED, (_A.RELEASE,)),
    **_refusing(_S.CLOSED),
}
"""What is not in it changes nothing."""

HOLDING = (State.OPEN, State.AWAITING, State.ADOPTING, State.FREEING)
"""States in which blocks may be reserved."""


class DestinationMigration:
    """One migration into here."""

    def __init__(self, now: float) -> None:
        self.state = State.NEW
        self.epoch = -1
        """In which the request was committed."""
        self._pending: dict[int, float] = {}
        """Stages whose blocks are under way -> until when they may be."""
        self._num_announced: dict[int, int] = {}
        """Blocks of each stage."""
        self._traffic_s = now

    @property
    def is_holding(self) -> bool:
        return self.state in HOLDING

    @property
    def num_blocks(self) -> int:
        """All that were announced."""
        return sum(self._num_announced.values())

    def deadline_s(self) -> float | None:
        """Time at which TIMEOUT is due; None where nothing is waited for."""
        if self.state not in (State.OPEN, State.AWAITING):
            return None
        return max(self._traffic_s + IDLE_S, *self._pending.values(), 0.0)

    def is_forgotten(self, now: float) -> bool:
        return not self.is_holding and now >= self._traffic_s + MEMORY_S

    def on_pre_allocate(self, stage: int, num_blocks: int, now: float) -> tuple[Action, ...]:
        """`RESERVE` only for a stage that is new."""
        if self.state is State.OPEN and stage in self._num_announced:
            self._traffic_s = now
            return ()
        actions = self.on(Event.PRE_ALLOCATE, now)
        if Action.RESERVE in actions:
            self._num_announced[stage] = num_blocks
        return actions

    def on_not_reserved(self, stage: int, is_final: bool, now: float) -> tuple[Action, ...]:
        """After `RESERVE`."""
        self._num_announced.pop(stage, None)
        return self.on(Event.NOT_RESERVED if is_final else Event.NOT_YET_RESERVED, now)

    def on_expected(self, stage: int, until_s: float, now: float) -> None:
        """Blocks of the stage may come until then."""
        if self.is_holding:
            self._pending[stage] = until_s
            self._traffic_s = now

    def on_stage(self, stage: int, is_in: bool, now: float) -> tuple[Action, ...]:
        """Its blocks are all here, or will not come."""
        self._pending.pop(stage, None)
        if not is_in:
            return self.on(Event.STAGE_FAILED, now)
        self._traffic_s = now
        return () if self._pending else self.on(Event.COMPLETE, now)

    def on_commit(self, num_blocks: int, epoch: int, now: float) -> tuple[Action, ...]:
        """`num_blocks`: that it says were announced."""
        if self.state is State.OWNED:
            return self.on(Event.COMMIT, now)
        if self.state is State.AWAITING:
            return ()
        if num_blocks != self.num_blocks:
            return self.on(Event.COMMIT_UNFIT, now)
        if self.state in (State.NEW, State.OPEN):
            self.epoch = epoch
        return self.on(Event.COMMIT_EARLY if self._pending else Event.COMMIT, now)

    def on(self, event: Event, now: float) -> tuple[Action, ...]:
        """What to do about the event, in this order."""
        row = TABLE.get((self.state, event))
        if row is None:
            return ()
        self.state, actions = row
        if event not in (Event.TIMEOUT, Event.QUIET):
            self._traffic_s = now
        return actions
