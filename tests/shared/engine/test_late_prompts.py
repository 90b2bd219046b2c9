"""Which waiting prompts cannot meet their objectives here, what is reported of them, and who takes them."""

from __future__ import annotations

import msgspec
import pytest

from shared.engine.calls import Adopt, Cancel, SetCostModel, Submit
from shared.messages.migration import Commit, SequenceProgress
from shared.messages.requests import ErrorCode, GenerationRequest
from tests.shared.costs import costs
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import request
from tests.shared.engine.moves_setup import OFFLINE, make, run

COST = costs(0.0, 0.1)
"""A prompt of ten tokens takes a second."""


def node(**fields: object) -> Node:
    made = make(budget=8, **fields)
    made.engine.apply(SetCostModel("a", COST), 0.0)
    return made


def submit(to: Node, name: str, objective_s: float = 2.5, **fields: object) -> GenerationRequest:
    sent = request(name, [len(name), *range(9)], 5, ttft_objective_s=objective_s, **fields)
    assert to.engine.apply(Submit(sent), 0.0) is None
    return sent


def late(of: Node, now: float = 0.0) -> list[tuple[str, float]]:
    return [(c.request.request_id, pytest.approx(c.starts_s)) for c in of.engine.late_candidates(now)]


def test_late_is_who_would_have_its_first_token_after_it_is_due() -> None:
    here = node()
    for name in ("a", "b", "c", "d"):
        submit(here, name)
    submit(here, "patient", objective_s=100.0)
    submit(here, "harvest", request_class=OFFLINE)
    assert late(here) == [("c", 2.0), ("d", 3.0)]
    load = here.engine.load(0.0)
    assert (load.late_move.model, load.late_move.num_tokens) == ("a", 10) and load.late_starts_s == pytest.approx(2.0)
    assert late(here, now=1.0)[0] == ("b", 1.0), "time went by, and nothing was done"
    here.engine.apply(Cancel("a"), 0.0)
    assert late(here) == [("d", 2.0)]


def test_who_was_begun_stays_and_what_it_lacks_is_waited_for() -> None:
    here = node()
    submit(here, "long")
    run(here, 1)
    submit(here, "second")
    assert late(here, now=2.0) == [("second", 0.2)], "after the two tokens that the first lacks"


def test_one_that_moved_lately_stays_so_long_as_that_is_to_pay_for() -> None:
    here = node(cooldown=0.5)
    submit(here, "a")
    submit(here, "b")
    assert late(here, now=2.0) == [("a", 0.0), ("b", 1.0)]
    held = here.engine.held("b")
    held.num_migrations, held.moved_s = 2, 0.5
    assert late(here, now=2.4) == [("a", 0.0)]
    assert late(here, now=2.5) == [("a", 0.0), ("b", 1.0)]


@pytest.mark.parametrize(("starts_s", "is_taken"), [(1.2, False), (1.3, True), (-1.0, True)])
def test_an_instance_takes_it_only_where_it_is_begun_sooner(starts_s: float, is_taken: bool) -> None:
    there = node()
    submit(there, "busy")
    moved = msgspec.structs.replace(request("moved", list(range(10)), 5), epoch=1)
    refusal = there.engine.apply(Adopt(Commit("m", "source", moved, SequenceProgress(), starts_s=starts_s)), 0.0)
    assert (refusal is None) is is_taken
    assert refusal is None or refusal.code is ErrorCode.OVERLOADED
    assert (there.engine.held("moved") is not None) is is_taken


@pytest.mark.parametrize(("first_token_s", "is_taken"), [(1.2, False), (1.7, True)])
def test_what_is_cached_counts_for_the_first_token(first_token_s: float, is_taken: bool) -> None:
    """It has 8 of the 10 tokens cached: after the other one's second, its own prompt takes 0.2 s."""
    there = node()
    submit(there, "cached")
    run(there, 6)
    submit(there, "another")
    prompt = [len("cached"), *range(9)]
    moved = msgspec.structs.replace(request("moved", prompt, 5), epoch=1)
    commit = Commit("m", "source", moved, SequenceProgress(), starts_s=1.0, first_token_s=first_token_s)
    assert (there.engine.apply(Adopt(commit), 0.0) is None) is is_taken
    here = node()
    for name in ("a", "b", "cached"):
        submit(here, name)
    assert [c.first_token_s for c in here.engine.late_candidates(0.0)] == [pytest.approx(3.0)], "nothing is cached here"
