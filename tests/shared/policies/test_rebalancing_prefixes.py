"""Requests whose beginning others share move to who holds it, if that is as good a place."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.messages.cluster import NextMove
from shared.policies.rebalancing import (
    LEAST_SOONER_S,
    Destination,
    Held,
    InstanceView,
    Rebalancer,
    choose,
    cost_there_s,
    is_gain,
    least_left,
    preferred,
)
from shared.policies.token_cost import Resident, is_as_cheap

LOW, HIGH = 64.0, 256.0
TOTAL = 100_000
STEP_S = (0.02, 0.001)
PROMPT_COST = {"m": (2e-4, 0.0), "n": (2e-4, 0.0)}


class Holdings(dict[str, int]):
    def longest(self) -> Iterable[tuple[str, int]]:
        return sorted(self.items(), key=lambda item: -item[1])


def view(
    name: str,
    used: int = 0,
    *,
    num_running: int = 10,
    models: Iterable[str] = ("m",),
    residents: Iterable[Resident] | None = None,
    moves: tuple[NextMove, ...] = (),
    late: NextMove | None = None,
    late_starts_s: float = 0.0,
    prompts_s: float = 0.0,
    can_take: bool = True,
) -> InstanceView:
    return InstanceView(
        instance_id=name,
        freeness=(TOTAL - used) / num_running,
        num_running=num_running,
        num_counted=num_running,
        total_tokens=TOTAL,
        models=frozenset(models),
        can_take=can_take,
        next_moves=moves,
        residents=[("m", num_running, STEP_S)] if residents is None else list(residents),
        late_move=late,
        late_starts_s=late_starts_s,
        prompts_s=prompts_s,
        prompt_costs=PROMPT_COST,
    )


def paired(views: list[InstanceView], held: dict[str, Held], now: float = 1.0) -> dict[str, tuple[str, ...]]:
    """Pairs that one look makes. `held`: by request."""
    policy, by_name = Rebalancer(LOW, HIGH, 1e6), {one.instance_id: one for one in views}
    for one in views:
        policy.touch(one.instance_id, one.freeness, one.late_starts_s)

    def destinations_above(freeness: float) -> list[Destination]:
        able = [one for one in views if one.can_take and one.freeness >= freeness]
        return [Destination(one.instance_id, one.freeness, one.models) for one in able]

    policy.step(now, by_name.get, destinations_above, lambda move: held.get(move.request_id, Holdings()))
    return {pair.source: pair.destinations for pair in policy.pairs.values()}


MOVE = NextMove("m", 2000, "r")


def test_of_equal_destinations_the_one_that_holds_the_prefix_is_taken_the_freest_else() -> None:
    source = view("full", 99_500, moves=(MOVE,))
    others = [view("freest", 10_000), view("holder", 20_000), view("holds less", 15_000)]
    assert paired([source, *others], {}) == {"full": ("freest",)}
    held: dict[str, Held] = {"r": Holdings({"full": 2000, "holder": 1500, "holds less": 500})}
    assert paired([source, *others], held) == {"full": ("holder",)}
    nobody: dict[str, Held] = {"other": Holdings({"holder": 1500})}
    assert paired([source, *others], nobody) == {"full": ("freest",)}, "it is another request that it holds"


def test_a_holder_is_found_among_many_that_are_freer() -> None:
    many = [view(f"free-{number}", 100 * number) for number in range(40)]
    held: dict[str, Held] = {"r": Holdings({"holder": 1500})}
    assert paired([view("full", 99_500, moves=(MOVE,)), *many, view("holder", 20_000)], held) == {"full": ("holder",)}


def test_a_prefix_is_not_worth_a_full_destination_nor_one_where_tokens_cost_much_more() -> None:
    source = view("full", 99_500, moves=(MOVE,))
    held: dict[str, Held] = {"r": Holdings({"holder": 1500})}
    assert paired([source, view("free", 10_000), view("holder", 98_000)], held) == {"full": ("free",)}
    taking_turns = [("m", 0, STEP_S), ("n", 30, STEP_S)]
    source = view("full", 99_500, moves=(MOVE,), residents=[("m", 3, STEP_S), ("n", 200, STEP_S)])
    holder = view("holder", 20_000, models=("m", "n"), residents=taking_turns)
    assert paired([source, view("free", 10_000), holder], held) == {"full": ("free",)}


def test_what_moves_is_of_a_model_that_the_destination_serves() -> None:
    """The smallest request of all is of a model that no other instance has: the other model's decides, by its size and
    its prefix."""
    moves = (NextMove("m", 16, "small"), NextMove("n", 6000, "large"))
    source = view("full", 99_500, models=("m", "n"), moves=moves, residents=[])
    narrow, wide = view("narrow", 96_000, models=("n",)), view("wide", 60_000, models=("n",))
    assert not is_gain(source, narrow, LOW) and is_gain(source, wide, LOW)
    both = view("both", 96_000, models=("m", "n"))
    assert is_gain(source, both, LOW), "16 tokens would go there"
    assert paired([source, narrow, wide], {}) == {"full": ("wide",)}


def test_the_prefix_and_the_cost_are_those_of_the_request_that_would_move() -> None:
    """The first request has no destination: of those for the second, the one that holds its beginning is taken, if its
    tokens cost nearly the least there."""
    moves = (NextMove("m", 16, "first"), NextMove("n", 2000, "second"))
    residents = [("m", 5, STEP_S), ("n", 5, STEP_S)]
    source = view("full", 99_500, models=("m", "n"), moves=moves, residents=residents)

    def other(name: str, used: int, *beside: Resident) -> InstanceView:
        return view(name, used, num_running=5, models=("n",), residents=[("n", 5, STEP_S), *beside])

    many = [other(f"free-{number}", 100 * number) for number in range(40)]
    held: dict[str, Held] = {"first": Holdings({"free-3": 16}), "second": Holdings({"holder": 1500, "free-7": 100})}
    assert paired([source, *many, other("holder", 20_000)], held) == {"full": ("holder",)}
    assert paired([source, *many, other("holder", 20_000, ("x", 2, STEP_S))], held) == {"full": ("free-7",)}
    assert paired([source, *many], {}) == {"full": ("free-0",)}
    both = view("both", 30_000, models=("m", "n"), num_running=5, residents=residents)
    assert paired([source, *many, both], held | {"first": Holdings({"both": 10})}) == {"full": ("both",)}


def test_a_late_prompt_goes_to_where_its_first_token_comes_soonest() -> None:
    late = NextMove("m", 5000, "r")
    source = view("late", 20_000, late=late, late_starts_s=2.0)
    idle, holder = view("idle"), view("holder", 10_000, prompts_s=0.3)
    assert paired([source, idle, holder], {}) == {"late": ("idle",)}
    held: dict[str, Held] = {"r": Holdings({"holder": 4000})}
    assert paired([source, idle, holder], held) == {"late": ("holder",)}, "0.3 + 0.2 s against 1.0 s"
    here: dict[str, Held] = {"r": Holdings({"late": 4900})}
    near = view("near", prompts_s=1.2)
    assert paired([source, near], {}) == {"late": ("near",)}
    assert paired([source, near], here) == {}, "here its prompt is computed in no time"


def test_who_must_leave_tries_the_holder_that_has_the_memory() -> None:
    views = {
        one.instance_id: one
        for one in (
            view("full", 99_000)._replace(num_counted=11),
            view("other model", models=("n",)),
            view("drains", can_take=False),
            view("holder"),
            view("holds less"),
        )
    }
    held = Holdings({"here": 2000, "full": 1900, "other model": 1800, "drains": 1700, "gone": 1600, "holder": 1500})
    assert preferred(MOVE, "here", views.get, held) == "holder"
    assert preferred(MOVE, "here", views.get, Holdings({"here": 2000, "full": 10})) is None


instances = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(95_000, 110_000), st.integers(1, 8000), instances)
@example(99_361, 1, [(0, 1, 1, 0), (89_769, 40, 0, 0)])  # the second is not free enough for anybody
@example(99_361, 1, [(0, 1, 0, 0), (0, 1, 1, 0), (97_444, 40, 0, 0)])  # the third has the first for itself
def test_a_prefix_decides_among_gains_at_a_like_cost_and_nothing_else(
    used: int, num_tokens: int, drawn: list[tuple[int, int, int, int]]
) -> None:
    """Who is chosen is a gain, costs hardly more than the best, and no other such one of those holds more."""
    move = NextMove("m", num_tokens, "r")
    source = view("source", used, moves=(move,), residents=[("m", 10, STEP_S), ("n", 10, STEP_S)])
    others = [
        view(f"i{number}", there, num_running=running, residents=[("m", running, STEP_S), ("n", num_other, STEP_S)])
        for number, (there, running, num_other, _) in enumerate(drawn)
    ]
    holdings = Holdings({f"i{number}": held for number, (*_, held) in enumerate(drawn) if held})
    pairs, without = paired([source, *others], {"r": holdings}), paired([source, *others], {})
    assert pairs.keys() == without.keys(), "a prefix makes no move that would not be made, and prevents none"
    if "source" in pairs:
        (name,) = pairs["source"]
        bar = least_left(source.freeness, LOW) * HIGH / LOW
        able = [one for one in others if one.freeness >= bar and is_gain(source, one, LOW)]
        assert name in {one.instance_id for one in able}
        taken = {one for other, found in pairs.items() if other != "source" for one in found}
        costs = {one.instance_id: cost_there_s(source, one, "m") for one in able if one.instance_id not in taken}
        first = without["source"][0]
        chosen = choose(source, [one for one in able if one.instance_id in (name, first)], move, holdings)
        assert chosen.instance_id == name and holdings.get(name, 0) >= holdings.get(first, 0)
        assert is_as_cheap(costs[name], 1.1 * min(costs.values()))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(100, 8000),
    st.floats(0.0, 3.0),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 8000)), max_size=8),
)
def test_late_prompts_only_go_to_where_their_first_token_is_sooner(
    num_tokens: int, starts_s: float, drawn: list[tuple[float, int]]
) -> None:
    late = NextMove("m", num_tokens, "r")
    source = view("late", 20_000, late=late, late_starts_s=starts_s)
    others = [view(f"i{number}", prompts_s=prompts_s) for number, (prompts_s, _) in enumerate(drawn)]
    holdings = Holdings({f"i{number}": min(held, num_tokens) for number, (_, held) in enumerate(drawn) if held})

    def first_s(one: InstanceView) -> float:
        return one.prompts_s + 2e-4 * max(1, num_tokens - holdings.get(one.instance_id, 0))

    soonest_s = min(map(first_s, others), default=float("inf"))
    pairs = paired([source, *others], {"r": holdings})
    if "late" in pairs:
        chosen = next(one for one in others if one.instance_id == pairs["late"][0])
        assert first_s(chosen) == soonest_s < starts_s + 2e-4 * num_tokens - LEAST_SOONER_S
    elif starts_s > LEAST_SOONER_S:
        assert soonest_s + LEAST_SOONER_S >= starts_s + 2e-4 * num_tokens
