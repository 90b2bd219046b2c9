"""The tables of both ends, state by state; test_in_virtual_time.py drives them against each other."""

from __future__ import annotations

import pytest

from shared.messages.migration import AbortReason
from shared.messages.requests import PLACEMENT_EPOCHS
from shared.migration import destination as dst
from shared.migration import source as src
from shared.migration.destination import DestinationMigration
from shared.migration.source import SourceMigration, may_migrate


@pytest.mark.parametrize("state", [state for state in src.State if state not in src.TERMINAL])
def test_each_state_of_the_source_has_a_way_out_by_time(state: src.State) -> None:
    assert (state, src.Event.TIMEOUT) in src.TABLE
    assert (state, src.Event.DESTINATION_LOST) in src.TABLE
    assert (state, src.Event.GIVEN_UP) in src.TABLE


@pytest.mark.parametrize("frozen", [src.State.COMMITTING, src.State.ASKING])
def test_a_destination_that_is_lost_after_a_copy_has_failed_hears_why(frozen: src.State) -> None:
    """Else it would take the abort for one from before Commit, and keep what it may have taken over."""
    move = SourceMigration(0, 0.0)
    for event in (src.Event.OUT, src.Event.DETACHED, src.Event.COPY_FAILED):
        move.on(event, 0.0)
    if frozen is src.State.ASKING:
        move.on(src.Event.NO_ANSWER, 0.0)
    assert (move.state, move.reason) == (frozen, AbortReason.TRANSFER_FAILED)
    move.on(src.Event.DESTINATION_LOST, 0.0)
    assert (move.state, move.reason) == (src.State.STAYED, AbortReason.DESTINATION_LOST)


def test_terminal_states_stay() -> None:
    assert not any(state in src.TERMINAL for state, _ in src.TABLE)


def test_a_destination_refuses_for_ever_once_it_said_no() -> None:
    move = DestinationMigration(0.0)
    assert move.on(dst.Event.OWNS, 0.0) == (dst.Action.SAY_NO,)
    assert move.on_commit(0, 1, 1.0) == (dst.Action.REFUSE,)
    assert move.on_pre_allocate(0, 3, 2.0) == (dst.Action.REFUSE_STAGE,)
    assert move.on(dst.Event.OWNS, 3.0) == (dst.Action.SAY_NO,)


def test_a_commit_again_is_confirmed_without_effect() -> None:
    move = DestinationMigration(0.0)
    assert move.on_commit(0, 5, 0.0) == (dst.Action.ADOPT,)
    assert move.on(dst.Event.ADOPTED, 0.0) == (dst.Action.CONFIRM,)
    assert move.on_commit(0, 5, 1.0) == (dst.Action.CONFIRM,)
    assert move.on(dst.Event.ABORT, 1.0) == ()
    assert move.on(dst.Event.OWNS, 1.0) == (dst.Action.SAY_YES,)
    assert not move.is_forgotten(500.0) and move.is_forgotten(700.0)


def test_a_commit_of_other_blocks_than_announced_is_refused() -> None:
    move = DestinationMigration(0.0)
    move.on_pre_allocate(0, 3, 0.0)
    assert move.on_commit(4, 1, 0.0) == (dst.Action.REFUSE, dst.Action.STOP_WRITING)
    assert move.on_commit(3, 1, 0.0) == (dst.Action.REFUSE,)


def test_a_silent_reservation_ends_after_five_seconds() -> None:
    move = DestinationMigration(0.0)
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
    assert may_migrate(0) and may_migrate(61) and may_migrate(PLACEMENT_EPOCHS)
    assert not may_migrate(62) and not may_migrate(63)
