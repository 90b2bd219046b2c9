"""Which model answers a request to a route, over all routes and keys."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.routes import Arm, Mirror, Route, Sticky
from shared.policies.routing import Chosen, Role, choose, key_of, mirrored_to, uniform

MODELS = st.text(min_size=1, max_size=8)
ARMS = st.lists(
    st.builds(Arm, model=MODELS, weight=st.floats(0.001, 1000)), min_size=1, max_size=6, unique_by=lambda arm: arm.model
)
KEYS = st.text(max_size=12)


def up(model: str) -> bool:
    return True


@given(ARMS, KEYS)
def test_a_key_stays_where_it_is_until_its_own_arm_goes(arms: list[Arm], key: str) -> None:
    route = Route(name="public", arms=tuple(arms))
    model, role = choose(route, key, up)
    assert role is Role.ARM and choose(route, key, up).model == model
    assert choose(msgspec.structs.replace(route, arms=tuple(reversed(arms))), key, up).model == model
    for gone in arms:
        rest = tuple(arm for arm in arms if arm is not gone)
        if gone.model != model:
            assert choose(msgspec.structs.replace(route, arms=rest), key, up).model == model
        elif rest:
            # Down or taken away: it goes to the same other arm, and says that this is not its own.
            assert choose(route, key, lambda name: name != model) == Chosen(
                choose(msgspec.structs.replace(route, arms=rest), key, up).model, Role.FALLBACK
            )


@given(ARMS, st.integers(0, 5), st.floats(1.0, 50.0), KEYS)
def test_more_weight_takes_keys_from_others_and_gives_none(arms: list[Arm], index: int, times: float, key: str) -> None:
    index %= len(arms)
    before = choose(Route(name="r", arms=tuple(arms)), key, up).model
    arms[index] = Arm(model=arms[index].model, weight=arms[index].weight * times)
    assert choose(Route(name="r", arms=tuple(arms)), key, up).model in (before, arms[index].model)


@pytest.mark.parametrize("weights", [(1, 1), (9, 1), (5, 3, 2), (0.25, 0.5)])
def test_shares_are_those_of_the_weights(weights: tuple[float, ...]) -> None:
    route = Route(name="r", arms=tuple(Arm(model=f"m{i}", weight=weight) for i, weight in enumerate(weights)))
    counted = Counter(choose(route, key_of(route, "", None, f"request-{n}"), up).model for n in range(10_000))
    for index, weight in enumerate(weights):
        # five standard deviations of a binomial of 10,000 draws are below 0.025
        assert counted[f"m{index}"] / 10_000 == pytest.approx(weight / sum(weights), abs=0.025)


@given(ARMS, st.lists(MODELS, max_size=3), st.sets(MODELS), KEYS)
def test_who_is_down_is_never_chosen_while_another_is_up(
    arms: list[Arm], fallbacks: list[str], down: set[str], key: str
) -> None:
    route = Route(name="r", arms=tuple(arms), fallbacks=tuple(fallbacks))
    model, role = choose(route, key, lambda name: name not in down)
    own = choose(route, key, up).model
    candidates = [name for name in (*(arm.model for arm in arms), *fallbacks) if name not in down]
    assert model in candidates if candidates else (model, role) == (own, Role.ARM)
    assert (role is Role.ARM) == (model == own)
    if candidates and all(arm.model in down for arm in arms):
        assert model == next(name for name in fallbacks if name not in down)


def test_an_arm_without_weight_gets_nothing_and_stickiness_is_by_key_or_user() -> None:
    arms = (Arm(model="a", weight=0.0), Arm(model="b"))
    route = Route(name="r", arms=arms, sticky=Sticky.USER)
    assert {choose(route, str(n), up).model for n in range(50)} == {"b"}
    assert key_of(route, "t", "u", "1") == key_of(route, "t", "u", "2") != key_of(route, "t2", "u", "1")
    assert key_of(route, "t", None, "1") != key_of(route, "t", None, "2")
    by_key = Route(name="r", arms=arms, sticky=Sticky.KEY)
    assert key_of(by_key, "t", "u", "1") == key_of(by_key, "t", "v", "2")


def test_a_share_is_mirrored_and_never_to_who_answers() -> None:
    route = Route(
        name="r",
        arms=(Arm(model="a"),),
        mirrors=(Mirror(model="b", share=0.2), Mirror(model="a", share=1.0), Mirror(model="c", share=0.0)),
    )
    mirrored = [mirrored_to(route, "a", str(n)) for n in range(5000)]
    assert all(models in ([], ["b"]) for models in mirrored)
    assert sum(map(len, mirrored)) / 5000 == pytest.approx(0.2, abs=0.03)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_hashes_are_within_and_of_the_parts(parts: list[str], others: list[str]) -> None:
    assert 0.0 < uniform(*parts) < 1.0 and uniform(*parts) == uniform(*parts)
    assert parts == others or uniform(*parts) != uniform(*others)
