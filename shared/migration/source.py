"""A migration as its source sees it: a table of states and events. No I/O; times are arguments, in seconds of any clock.

    DECIDING --STAGE--> RESERVING --RESERVED--> COPYING --COPIED--> DECIDING     while the request goes on decoding
       |---WAIT---> WAITING --DUE--> DECIDING                               the destination is in a long step
       |---LAST---> ANNOUNCING --RESERVED--> LEAVING                             room for the last blocks, before the pause
       '---OUT--------------------------------^  |
                                                 |--DETACHED---------> COMMITTING --COMMITTED--> MOVED
                                                 '--DETACHED_SHORT--> EXTENDING --RESERVED--^
    COMMITTING --NO_ANSWER--> ASKING --OWNS_YES--> MOVED
                                     --OWNS_NO, DESTINATION_LOST--> STAYED (in a higher epoch)
    any failure before Commit is sent --> STAYED

The request is the source's until Commit is sent. From then on it is nobody's that the source could name, until the
destination has said what became of it, or is known to be dead.
"""

from __future__ import annotations

from enum import StrEnum

from shared.messages.migration import AbortReason
from shared.messages.requests import PLACEMENT_EPOCHS
from shared.migration.estimates import MAX_ASK_S

EPOCHS_OF_A_MIGRATION = 2
"""The destination's is one higher; a source that goes on after a Commit of unknown outcome takes two."""

RESERVE_S = 3.0
"""Time for an answer to PreAllocate."""
CONNECT_S = 2.0
"""Time for the connection that the blocks need, where there is none yet."""
LEAVE_S = 4.0
"""Until a request that was detached has left its batch: two steps at most."""
COMMIT_S = 1.5
"""Time for an answer to Commit, beside the time that the last blocks may take."""
SLACK_S = 0.5
"""A state's deadline comes so much after that of what it waits for, which then says more."""
ASK_S = 1.0
"""Time for an answer to Owns; asked again for as long as the destination is in the registry."""
ASK_PAUSE_S = 0.2
"""Before it is asked again."""


class State(StrEnum):
    DECIDING = "deciding"
    """Its driver looks at what is left to copy."""
    RESERVING = "reserving"
    COPYING = "copying"
    WAITING = "waiting"
    """Waits for the end of the destination's step."""
    ANNOUNCING = "announcing"
    LEAVING = "leaving"
    """Is detached from its batch."""
    EXTENDING = "extending"
    """Out of its batch, with more blocks than were announced."""
    COMMITTING = "committing"
    """Frozen; the last blocks and Commit are under way."""
    ASKING = "asking"
    """Commit is unanswered."""
    MOVED = "moved"
    STAYED = "stayed"
    """It goes on here, or has ended here."""


class Event(StrEnum):
    STAGE = "stage"
    """Decided: copy what is filled."""
    LAST = "last"
    """Decided: the rest fits into a step."""
    WAIT = "wait"
    """Decided: the destination is to be asked again soon."""
    DUE = "due"
    """It is time to."""
    OUT = "out"
    """Decided: out of the batch at once; how much is left shows then."""
    RESERVED = "reserved"
    COPIED = "copied"
    DETACHED = "detached"
    """Out of its batch, and what is left fits into what was announced."""
    DETACHED_SHORT = "detached_short"
    COMMITTED = "committed"
    COMMIT_REFUSED = "commit_refused"
    """Commit was refused with a typed error: the destination never owned it."""
    NO_ANSWER = "no_answer"
    OWNS_YES = "owns_yes"
    OWNS_NO = "owns_no"
    """And will refuse a Commit that still comes."""
    COPY_FAILED = "copy_failed"
    GONE = "gone"
    """The request ended or was preempted here."""
    FAILED = "failed"
    """Refused, unreachable, past a deadline, not worth it."""
    DESTINATION_LOST = "destination_lost"
    """It left the registry, or was started anew."""
    WITHDRAWN = "withdrawn"
    TIMEOUT = "timeout"
    """The state's deadline has passed."""
    GIVEN_UP = "given_up"
    """This process ends."""


class Action(StrEnum):
    DECIDE = "decide"
    RESERVE = "reserve"
    """Ask for room for the blocks decided upon."""
    COPY = "copy"
    """Send them."""
    DETACH = "detach"
    COMMIT = "commit"
    """Freeze, then send the last blocks and Commit side by side; where freezing fails, GONE follows."""
    ASK = "ask"
    ABORT = "abort"
    """Stop what is under way and tell the destination."""
    END_MIGRATION = "end_migration"
    """It was never detached."""
    REATTACH = "reattach"
    REATTACH_RAISED = "reattach_raised"
    """In an epoch above the one that the destination may have."""
    DISOWN = "disown"
    """Should the destination turn out to live: what it may have is not its own."""
    DROP = "drop"


_S, _E, _A = State, Event, Action
_Row = tuple[State, tuple[Action, ...]]

_DECODING: _Row = (_S.STAYED, (_A.ABORT, _A.END_MIGRATION))
_OUT: _Row = (_S.STAYED, (_A.ABORT, _A.REATTACH))
_RAISED: _Row = (_S.STAYED, (_A.ABORT, _A.REATTACH_RAISED))
_LOST: _Row = (_S.STAYED, (_A.ABORT, _A.REATTACH_RAISED, _A.DISOWN))
_DROPPED: _Row = (_S.MOVED, (_A.DROP,))


def _failing(state: State, row: _Row) -> dict[tuple[State, Event], _Row]:
    events = (_E.GONE, _E.FAILED, _E.COPY_FAILED, _E.DESTINATION_LOST, _E.WITHDRAWN, _E.TIMEOUT, _E.GIVEN_UP)
    return {(state, event): row for event in events}


TABLE: dict[tuple[State, Event], _Row] = {
    **_failing(_S.DECIDING, _DECODING),
    (_S.DECIDING, _E.STAGE): (_S.RESERVING, (_A.RESERVE,)),
    (_S.DECIDING, _E.LAST): (_S.ANNOUNCING, (_A.RESERVE,)),
    (_S.DECIDING, _E.OUT): (_S.LEAVING, (_A.DETACH,)),
    (_S.DECIDING, _E.WAIT): (_S.WAITING, ()),
    **_failing(_S.WAITING, _DECODING),
    (_S.WAITING, _E.DUE): (_S.DECIDING, (_A.DECIDE,)),
    **_failing(_S.RESERVING, _DECODING),
    (_S.RESERVING, _E.RESERVED): (_S.COPYING, (_A.COPY,)),
    **_failing(_S.COPYING, _DECODING),
    (_S.COPYING, _E.COPIED): (_S.DECIDING, (_A.DECIDE,)),
    **_failing(_S.ANNOUNCING, _DECODING),
    (_S.ANNOUNCING, _E.RESERVED): (_S.LEAVING, (_A.DETACH,)),
    **_failing(_S.LEAVING, _OUT),
    (_S.LEAVING, _E.DETACHED): (_S.COMMITTING, (_A.COMMIT,)),
    (_S.LEAVING, _E.DETACHED_SHORT): (_S.EXTENDING, (_A.RESERVE,)),
    **_failing(_S.EXTENDING, _OUT),
    (_S.EXTENDING, _E.RESERVED): (_S.COMMITTING, (_A.COMMIT,)),
    # Only freezing can say GONE here: nothing has been sent then.
    (_S.COMMITTING, _E.GONE): (_S.STAYED, (_A.ABORT,)),
    (_S.COMMITTING, _E.COMMITTED): _DROPPED,
    (_S.COMMITTING, _E.COMMIT_REFUSED): _OUT,
    # The answer to Commit says what came of it; told so, the destination need not wait for the blocks.
    (_S.COMMITTING, _E.COPY_FAILED): (_S.COMMITTING, (_A.ABORT,)),
    (_S.COMMITTING, _E.NO_ANSWER): (_S.ASKING, (_A.ASK,)),
    (_S.COMMITTING, _E.TIMEOUT): (_S.ASKING, (_A.ASK,)),
    (_S.COMMITTING, _E.DESTINATION_LOST): _LOST,
    (_S.COMMITTING, _E.GIVEN_UP): (_S.STAYED, (_A.DROP,)),
    (_S.ASKING, _E.COMMITTED): _DROPPED,
    (_S.ASKING, _E.COMMIT_REFUSED): _RAISED,
    (_S.ASKING, _E.OWNS_YES): _DROPPED,
    (_S.ASKING, _E.OWNS_NO): _RAISED,
    (_S.ASKING, _E.NO_ANSWER): (_S.ASKING, (_A.ASK,)),
    (_S.ASKING, _E.TIMEOUT): (_S.ASKING, (_A.ASK,)),
    (_S.ASKING, _E.DESTINATION_LOST): _LOST,
    (_S.ASKING, _E.GIVEN_UP): (_S.STAYED, (_A.DROP,)),
}
"""What is not in it changes nothing: an answer that comes too late, a withdrawal after Commit."""

TERMINAL = (State.MOVED, State.STAYED)

_DEADLINES_S = {
    State.RESERVING: RESERVE_S + CONNECT_S,
    State.WAITING: MAX_ASK_S,
    State.ANNOUNCING: RESERVE_S + CONNECT_S,
    State.EXTENDING: RESERVE_S + CONNECT_S,
    State.LEAVING: LEAVE_S,
    State.COMMITTING: COMMIT_S,
    State.ASKING: ASK_S + ASK_PAUSE_S,
}


def may_migrate(epoch: int) -> bool:
    """Whether the placement has epochs left for a move that ends in the worst way."""
    return epoch % PLACEMENT_EPOCHS + EPOCHS_OF_A_MIGRATION < PLACEMENT_EPOCHS


class SourceMigration:
    """One migration out of here."""

    def __init__(self, epoch: int, now: float) -> None:
        """`epoch`: the request's."""
        assert may_migrate(epoch), f"epoch {epoch} is the last of its placement"
        self.state = State.DECIDING
        self.epoch = epoch
        """Epoch of the owner, as far as is known."""
        self.was_decoding = True
        """Whether the request has never been detached from its batch."""
        self.num_stages = 0
        """Stages reserved, or asked for."""
        self.reason: AbortReason | None = None
        """Why it stayed."""
        self._deadline_s = now + SLACK_S

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    @property
    def may_be_withdrawn(self) -> bool:
        """Whether an abort would still be certain to leave the request here."""
        return not self.is_over and self.state not in (State.COMMITTING, State.ASKING)

    def deadline_s(self) -> float:
        """Time at which TIMEOUT is due, unless something else happens before."""
        return self._deadline_s

    def on(
        self, event: Event, now: float, reason: AbortReason | None = None, *, copy_s: float = 0.0
    ) -> tuple[Action, ...]:
        """What to do about the event, in this order. `reason`: with a failure; `copy_s`: with RESERVED, how long the
        copy that follows may take."""
        row = TABLE.get((self.state, event))
        if row is None:
            return ()
        self.state, actions = row
        self._deadline_s = now + _DEADLINES_S.get(self.state, 0.0) + SLACK_S
        if self.state in (State.COPYING, State.COMMITTING):
            self._deadline_s += copy_s
        for action in actions:
            if action is Action.RESERVE:
                self.num_stages += 1
            elif action is Action.DETACH:
                self.was_decoding = False
            elif action is Action.REATTACH_RAISED:
                self.epoch += EPOCHS_OF_A_MIGRATION
        if self.state is State.MOVED:
            self.epoch += 1
        elif event is Event.DESTINATION_LOST:
            # Whatever else failed before: the destination is to know that it was taken for dead.
            self.reason = AbortReason.DESTINATION_LOST
        elif self.state is State.STAYED:
            self.reason = self.reason or reason or _REASONS.get(event, AbortReason.UNREACHABLE)
        elif event is Event.COPY_FAILED:
            self.reason = reason or AbortReason.TRANSFER_FAILED
        return actions


_REASONS = {
    Event.GONE: AbortReason.ENDED,
    Event.COPY_FAILED: AbortReason.TRANSFER_FAILED,
    Event.COMMIT_REFUSED: AbortReason.REFUSED,
    Event.OWNS_NO: AbortReason.UNREACHABLE,
    Event.DESTINATION_LOST: AbortReason.DESTINATION_LOST,
    Event.WITHDRAWN: AbortReason.STOPPED,
    Event.GIVEN_UP: AbortReason.STOPPED,
    Event.TIMEOUT: AbortReason.DEADLINE,
}
"""Reasons for events that bring none."""
