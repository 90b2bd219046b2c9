"""Both ends of a migration against each other: messages are lost, late or doubled, either end dies, and the request may end,
be preempted or be placed anew at its source at any moment."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.migration import AbortReason
from shared.messages.requests import PLACEMENT_EPOCHS, next_placement
from shared.migration import destination as dst
from shared.migration import source as src
from shared.migration.destination import DestinationMove
from shared.migration.source import SourceMove, may_move

REQUEST_S = 1.0
"""Longest wait for a reply."""
SLOW_REQUEST_S = 5.0
"""Where the state's own deadline comes first."""


class World:
    """One request, one source, one destination, and what is on its way between them."""

    def __init__(self, epoch: int, waits: bool, bus_is_quick: bool = True) -> None:
        self.now = 100.0
        self.bus_is_quick = bus_is_quick
        # source
        self.source = SourceMove(epoch, self.now)
        self.source_lives = True
        self.epoch = epoch
        self.place = "batch"
        """batch | leaving | out | sealed | gone (moved away, or dropped) | ended"""
        self.waits = waits
        self.was_replaced = False
        """A later placement of the request came to the source."""
        self.asked: dict[str, float] = {}
        """Requests without a reply -> when they time out."""
        self.disowned = False
        self.blocks = 0
        # destination
        self.destination = DestinationMove(self.now)
        self.destination_lives = True
        self.owned: int | None = None
        """The epoch in which the destination runs the request."""
        self.reserved = False
        self.writing: set[int] = set()
        """Stages whose blocks may come."""
        self.stopping = False
        self.refuses = ""
        """The next stage: "for_now" or "for_ever"."""
        # between
        self.wire: list[tuple] = []
        self.is_lost_known = False

    # ---------------------------------------------------------------------------------------------- source

    def feed(self, event: src.Event, reason: AbortReason | None = None) -> None:
        if not self.source_lives:
            return
        for action in self.source.on(event, self.now, reason):
            self.act(action)

    def ask(self, name: str, *message) -> None:
        self.asked[name] = self.now + (REQUEST_S if self.bus_is_quick else SLOW_REQUEST_S)
        self.wire.append(("to_destination", name, *message))

    def act(self, action: src.Action) -> None:
        A = src.Action
        if action is A.RESERVE:
            self.blocks += 1
            self.ask(f"pre{self.source.num_stages - 1}", self.source.num_stages - 1)
        elif action is A.TAKE_OUT:
            self.place = "leaving"
        elif action is A.COMMIT:
            if self.place != "out":
                # sealing fails
                assert self.place == "ended" or self.was_replaced
                self.feed(src.Event.GONE)
                return
            assert self.epoch == self.source.epoch, "what is not this migration's is handed over"
            self.place = "sealed"
            self.ask("commit", self.blocks, self.epoch + 1)
        elif action is A.ASK:
            self.ask("owns")
        elif action is A.ABORT:
            reason = self.source.reason or AbortReason.UNREACHABLE
            self.wire.append(("to_destination", "abort", reason))
        elif action is A.END_MOVE:
            assert self.place in ("batch", "ended")
        elif action is A.PUT_BACK:
            assert self.place in ("leaving", "out", "sealed", "ended") or self.was_replaced
            if self.place != "ended":
                self.place = "batch"
        elif action is A.PUT_BACK_RAISED:
            assert self.place == "sealed" or self.was_replaced
            if self.place == "sealed":
                self.place, self.epoch = "batch", self.source.epoch
        elif action is A.DISOWN:
            self.disowned = True
        elif action is A.DROP:
            assert self.place == "sealed" or self.was_replaced
            if self.place == "sealed":
                self.place = "gone"

    def reply(self, name: str, answer: str) -> None:
        """A reply has reached the source."""
        if self.asked.pop(name, None) is None and name.startswith("pre"):
            return
        E = src.Event
        events = {
            "reserved": E.RESERVED,
            "refused": E.FAILED,
            "committed": E.COMMITTED,
            "not_committed": E.COMMIT_REFUSED,
            "yes": E.OWNS_YES,
            "no": E.OWNS_NO,
        }
        self.feed(events[answer], AbortReason.REFUSED if answer == "refused" else None)

    @property
    def runs_at_source(self) -> bool:
        return self.source_lives and self.place in ("batch", "leaving", "out")

    # ----------------------------------------------------------------------------------------- destination

    def receive(self, name: str, *message) -> None:
        if not self.destination_lives:
            return
        move = self.destination
        if name.startswith("pre"):
            stage = message[0]
            actions = move.on_pre_allocate(stage, 1, self.now)
            self.act_there(actions)
            if dst.Action.RESERVE in actions and self.refuses:
                actions = move.on_not_reserved(stage, self.refuses == "for_ever", self.now)
                self.act_there(actions)
                self.refuses = ""
            elif dst.Action.RESERVE in actions:
                self.reserved = True
                self.writing.add(stage)
                move.on_expected(stage, self.now + dst.IDLE_S, self.now)
            self.answer(name, "refused" if dst.Action.REFUSE_STAGE in actions else "reserved")
        elif name == "commit":
            self.act_there(move.on_commit(*message, self.now))
        elif name == "owns":
            self.act_there(move.on(dst.Event.OWNS, self.now))
        else:
            is_disowned = message[0] is AbortReason.DESTINATION_LOST
            self.act_there(move.on(dst.Event.DISOWN if is_disowned else dst.Event.ABORT, self.now))

    def answer(self, name: str, answer: str) -> None:
        self.wire.append(("to_source", name, answer))

    def act_there(self, actions) -> None:
        A = dst.Action
        for action in actions:
            if action is A.ADOPT:
                assert self.owned is None and not self.writing
                self.owned, self.reserved = self.destination.epoch, False
                self.act_there(self.destination.on(dst.Event.ADOPTED, self.now))
            elif action is A.CONFIRM:
                assert self.destination.state is dst.State.OWNED
                self.answer("commit", "committed")
            elif action is A.REFUSE:
                self.answer("commit", "not_committed")
            elif action in (A.SAY_YES, A.SAY_NO):
                self.answer("owns", "yes" if action is A.SAY_YES else "no")
            elif action is A.STOP_WRITING:
                self.stopping = True
            elif action is A.RELEASE:
                assert not self.writing, "slots were freed while the transport may write to them"
                self.reserved = False
            elif action is A.GIVE_UP:
                self.owned = None

    # ---------------------------------------------------------------------------------------------- events

    def choices(self) -> list[tuple]:
        """What could happen next."""
        found: list[tuple] = [(kind, i) for i in range(len(self.wire)) for kind in ("deliver", "double", "lose")]
        if not self.source_lives or self.source.state in (src.State.COPYING, src.State.COMMITTING):
            found += [("copied", stage) for stage in self.writing] + [
                ("copied_unsure", stage) for stage in self.writing
            ]
        found += [("copy_fails", stage) for stage in self.writing]
        found += [("time",), ("withdraw",), ("source_dies",), ("destination_dies",), ("partition",)]
        found += [("refuse", "for_now"), ("refuse", "for_ever")]
        if self.stopping:
            found.append(("quiet",))
        if self.source.state is src.State.DECIDING:
            found += [("decide", event) for event in self.decisions()]
        if self.source.state is src.State.WAITING:
            found.append(("asks",))
        if self.place == "leaving":
            found += [("left", event) for event in (src.Event.TAKEN_OUT, src.Event.TAKEN_OUT_SHORT)]
        if self.place in ("batch", "leaving", "out"):
            found.append(("ends",))
        if self.place == "batch":
            found.append(("preempted",))
        if self.place not in ("gone", "ended") and not self.was_replaced:
            found.append(("replaced",))
        if not self.destination_lives and not self.is_lost_known:
            found.append(("lost",))
        return found

    def decisions(self) -> tuple[src.Event, ...]:
        if self.waits:
            return (src.Event.OUT,)
        return (src.Event.STAGE, src.Event.LAST, src.Event.WAIT, src.Event.OUT, src.Event.FAILED)

    def happen(self, what: tuple) -> None:
        kind = what[0]
        if kind in ("deliver", "double", "lose"):
            message = self.wire[what[1]] if kind == "double" else self.wire.pop(what[1])
            if kind != "lose":
                direction, name, *rest = message
                self.reply(name, *rest) if direction == "to_source" else self.receive(name, *rest)
        elif kind == "copied":
            self.copied(what[1])
        elif kind == "copied_unsure":
            self.writing.discard(what[1])
            self.act_there(self.destination.on_stage(what[1], True, self.now))
            self.feed(src.Event.COPY_FAILED)
        elif kind == "copy_fails":
            self.writing.discard(what[1])
            self.act_there(self.destination.on_stage(what[1], False, self.now))
            self.feed(src.Event.COPY_FAILED)
        elif kind == "time":
            self.pass_time()
        elif kind == "withdraw":
            self.feed(src.Event.WITHDRAWN)
        elif kind == "source_dies":
            self.source_lives = False
        elif kind == "destination_dies":
            self.destination_lives, self.owned, self.writing = False, None, set()
        elif kind in ("partition", "lost"):
            # Taken for dead, whether it is or not.
            self.is_lost_known = True
            self.feed(src.Event.DESTINATION_LOST)
        elif kind == "refuse":
            self.refuses = what[1]
        elif kind == "quiet":
            self.quiet()
        elif kind == "decide":
            self.feed(what[1], AbortReason.NOT_WORTH if what[1] is src.Event.FAILED else None)
        elif kind == "asks":
            self.feed(src.Event.DUE)
        elif kind == "left":
            self.place = "out"
            # It may be the later placement that has left: the driver looks.
            self.feed(what[1] if self.epoch == self.source.epoch else src.Event.GONE)
        elif kind == "ends":
            self.place = "ended"
            self.feed(src.Event.GONE)
        elif kind == "replaced":
            self.was_replaced, self.place, self.epoch = True, "batch", next_placement(self.epoch)
        elif kind == "preempted" and self.source.state is src.State.DECIDING:
            self.feed(src.Event.GONE, AbortReason.PREEMPTED)
        self.check()

    def copied(self, stage: int) -> None:
        """Only what the source sends arrives."""
        last = self.source.num_stages - 1
        sends = self.source.state in (src.State.COPYING, src.State.COMMITTING)
        if self.source_lives and (not sends or stage > last):
            return
        if not self.source_lives:
            self.writing.discard(stage)
            self.act_there(self.destination.on_stage(stage, False, self.now))
            return
        self.writing.discard(stage)
        self.act_there(self.destination.on_stage(stage, True, self.now))
        if self.source.state is src.State.COPYING and stage == last:
            self.feed(src.Event.COPIED)

    def quiet(self) -> None:
        self.stopping = False
        self.writing.clear()
        self.act_there(self.destination.on(dst.Event.QUIET, self.now))

    def pass_time(self) -> None:
        """To the next moment at which something is due."""
        due = list(self.asked.values())
        if self.source_lives and not self.source.is_over:
            due.append(self.source.deadline_s())
        if self.destination_lives and (deadline_s := self.destination.deadline_s()) is not None:
            due.append(deadline_s)
        if not due:
            return
        self.now = max(self.now, min(due))
        for name, until_s in list(self.asked.items()):
            if until_s <= self.now:
                del self.asked[name]
                is_reserve = name.startswith("pre")
                self.feed(src.Event.FAILED if is_reserve else src.Event.NO_ANSWER, AbortReason.DEADLINE)
        if not self.source.is_over and self.source.deadline_s() <= self.now:
            self.feed(src.Event.TIMEOUT)
        deadline_s = self.destination.deadline_s()
        if self.destination_lives and deadline_s is not None and deadline_s <= self.now:
            self.act_there(self.destination.on(dst.Event.TIMEOUT, self.now))

    def check(self) -> None:
        """At every moment: two that run the request never do so in one epoch, and the later epoch is the source's."""
        if self.owned is not None and self.runs_at_source:
            assert self.epoch > self.owned, f"both run it, source in {self.epoch}, destination in {self.owned}"

    def settle(self) -> None:
        """No more faults: what is on its way arrives, and time passes."""
        for _ in range(200):
            if self.stopping:
                self.quiet()
            while self.wire:
                self.happen(("deliver", 0))
            for stage in list(self.writing):
                self.copied(stage)
            if not self.destination_lives:
                self.happen(("lost",))
            if self.source.state is src.State.DECIDING:
                self.feed(src.Event.FAILED, AbortReason.NOT_WORTH)
            source_done = not self.source_lives or self.source.is_over
            there_done = not self.destination_lives or not self.destination.is_holding
            if source_done and there_done and not self.wire:
                break
            self.pass_time()
        else:
            raise AssertionError(f"never ends: {self.source.state}, {self.destination.state}")
        if self.disowned and self.source_lives and self.destination_lives:
            # It is seen in the registry again.
            self.receive("abort", AbortReason.DESTINATION_LOST)


GOOD = ("deliver", "copied", "decide", "left", "asks")
FATAL = ("source_dies", "destination_dies", "partition", "withdraw", "ends", "replaced")


def walk(waits: bool, num_events: int, draw: Callable[[int], int]) -> None:
    """Some events, most of them good and few fatal, so that all states are reached; then no more faults. `draw(n)` is a
    number below n."""
    world = World(PLACEMENT_EPOCHS * 3 + 5, waits, bus_is_quick=draw(2) == 0)
    for _ in range(num_events):
        choices = world.choices()
        luck = draw(12)
        if luck < 6:
            choices = [one for one in choices if one[0] in GOOD] or choices
        elif luck < 11:
            choices = [one for one in choices if one[0] not in FATAL] or choices
        kinds = sorted({one[0] for one in choices})
        kind = kinds[draw(len(kinds))]
        of_kind = [one for one in choices if one[0] == kind]
        world.happen(of_kind[draw(len(of_kind))])
    finish(world)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_one_owner_or_none_whatever_happens(data: st.DataObject, waits: bool) -> None:
    walk(waits, data.draw(st.integers(0, 40)), lambda below: data.draw(st.integers(0, below - 1)))


def test_one_owner_or_none_on_many_random_walks() -> None:
    for seed in range(8000):
        random = Random(seed)
        try:
            walk(random.random() < 0.3, random.randrange(5, 40), random.randrange)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def finish(world: World) -> None:
    began_s = world.now
    world.settle()
    world.check()
    assert world.now - began_s < 60
    owners = [world.runs_at_source, world.owned is not None]
    if world.was_replaced:
        assert not world.source_lives or world.runs_at_source or world.place == "ended"
    elif world.source_lives and world.destination_lives:
        assert sum(owners) == (0 if world.place == "ended" else 1), (world.place, world.owned)
    if world.source_lives and not world.destination_lives:
        # Known to have been handed over before it died: the scheduler places it again.
        assert world.runs_at_source or world.place in ("ended", "gone")
    if world.place == "gone" and not world.was_replaced:
        assert world.source.state is src.State.MOVED and world.source.epoch == world.epoch + 1
    if world.destination_lives:
        assert not world.reserved and not world.writing


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_without_faults_every_move_succeeds(data: st.DataObject, waits: bool) -> None:
    world = World(7, waits)
    for number in range(100):
        choices = [one for one in world.choices() if one[0] in GOOD and one != ("decide", src.Event.FAILED)]
        if number >= 30:  # the destination's long step has ended
            choices = [one for one in choices if one != ("decide", src.Event.WAIT)]
        if world.source.num_stages >= 6:
            choices = [one for one in choices if one != ("decide", src.Event.STAGE)]
        if not choices:
            break
        world.happen(choices[data.draw(st.integers(0, len(choices) - 1))])
    assert world.source.state is src.State.MOVED and world.owned == 8 and world.place == "gone"
    assert not world.reserved


@pytest.mark.parametrize("state", [state for state in src.State if state not in src.TERMINAL])
def test_each_state_of_the_source_has_a_way_out_by_time(state: src.State) -> None:
    assert (state, src.Event.TIMEOUT) in src.TABLE
    assert (state, src.Event.DESTINATION_LOST) in src.TABLE
    assert (state, src.Event.GIVEN_UP) in src.TABLE


@pytest.mark.parametrize("sealed", [src.State.COMMITTING, src.State.ASKING])
def test_a_destination_that_is_lost_after_a_copy_has_failed_hears_why(sealed: src.State) -> None:
    """Else it would take the abort for one from before Commit, and keep what it may have taken over."""
    move = SourceMove(0, 0.0)
    for event in (src.Event.OUT, src.Event.TAKEN_OUT, src.Event.COPY_FAILED):
        move.on(event, 0.0)
    if sealed is src.State.ASKING:
        move.on(src.Event.NO_ANSWER, 0.0)
    assert (move.state, move.reason) == (sealed, AbortReason.TRANSFER_FAILED)
    move.on(src.Event.DESTINATION_LOST, 0.0)
    assert (move.state, move.reason) == (src.State.STAYED, AbortReason.DESTINATION_LOST)


def test_terminal_states_stay() -> None:
    assert not any(state in src.TERMINAL for state, _ in src.TABLE)


def test_a_destination_refuses_for_ever_once_it_said_no() -> None:
    move = DestinationMove(0.0)
    assert move.on(dst.Event.OWNS, 0.0) == (dst.Action.SAY_NO,)
    assert move.on_commit(0, 1, 1.0) == (dst.Action.REFUSE,)
    assert move.on_pre_allocate(0, 3, 2.0) == (dst.Action.REFUSE_STAGE,)
    assert move.on(dst.Event.OWNS, 3.0) == (dst.Action.SAY_NO,)


def test_a_commit_again_is_confirmed_without_effect() -> None:
    move = DestinationMove(0.0)
    assert move.on_commit(0, 5, 0.0) == (dst.Action.ADOPT,)
    assert move.on(dst.Event.ADOPTED, 0.0) == (dst.Action.CONFIRM,)
    assert move.on_commit(0, 5, 1.0) == (dst.Action.CONFIRM,)
    assert move.on(dst.Event.ABORT, 1.0) == ()
    assert move.on(dst.Event.OWNS, 1.0) == (dst.Action.SAY_YES,)
    assert not move.is_forgotten(500.0) and move.is_forgotten(700.0)


def test_a_commit_of_other_blocks_than_announced_is_refused() -> None:
    move = DestinationMove(0.0)
    move.on_pre_allocate(0, 3, 0.0)
    assert move.on_commit(4, 1, 0.0) == (dst.Action.REFUSE, dst.Action.STOP_WRITING)
    assert move.on_commit(3, 1, 0.0) == (dst.Action.REFUSE,)


def test_a_silent_reservation_ends_after_five_seconds() -> None:
    move = DestinationMove(0.0)
    assert move.deadline_s() is None
    move.on_pre_allocate(0, 3, 1.0)
    assert move.deadline_s() == 6.0
    move.on_expected(0, 20.0, 2.0)
    assert move.deadline_s() == 20.0
    move.on_stage(0, True, 4.0)
    assert move.deadline_s() == 9.0
    assert move.on(dst.Event.TIMEOUT, 9.0) == (dst.Action.REFUSE, dst.Action.STOP_WRITING)
    assert move.is_holding
    assert move.on(dst.Event.QUIET, 9.1) == (dst.Action.RELEASE,)
    assert not move.is_holding


def test_epochs_of_a_placement_run_out() -> None:
    assert may_move(0) and may_move(61) and may_move(PLACEMENT_EPOCHS)
    assert not may_move(62) and not may_move(63)
