"""Roles of instances, and which requests are handed over, on plain data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.messages.cluster import Role
from shared.policies.dispatch import DispatchView
from shared.policies.roles import (
    BETTER,
    GOOD,
    LATE_SHARE,
    LEAST_LATE_SHARE,
    LEAST_OUTPUT,
    MOST_FILL,
    PhaseLoad,
    RoleView,
    decode_load,
    has_room,
    is_apart,
    is_handed_over,
    late_share,
    next_roles,
    pressure,
)
from tests.shared.policies.test_dispatch import Plain

IDLE = DispatchView(100.0, 0, 0)
STEP_S, TTFT_S, TPOT_S = 0.02, 1.0, 0.0
"""Nobody names a TPOT objective, but where a test does."""


def instance(name: str, **fields: float) -> Plain:
    return Plain(name, IDLE, **fields)  # type: ignore[arg-type]


def test_a_prompt_of_many_steps_is_computed_apart_and_a_short_one_is_not() -> None:
    there = instance("prefill", prompt_s=0.5)
    assert is_apart(instance("decoder", prompt_s=0.5), there, STEP_S, TTFT_S, TPOT_S)
    assert not is_apart(instance("decoder", prompt_s=0.03), there, STEP_S, TTFT_S, TPOT_S)
    assert not is_apart(instance("decoder", prompt_s=0.5), there, 0.0, TTFT_S, TPOT_S), "nothing is predicted"


def test_a_prompt_is_computed_by_its_decoder_where_that_is_sooner_and_the_other_late() -> None:
    here = instance("decoder", start_s=0.1, prompt_s=0.3)
    assert is_apart(here, instance("prefill", start_s=0.15, prompt_s=0.3), STEP_S, TTFT_S, TPOT_S), "early enough"
    assert not is_apart(here, instance("prefill", start_s=0.3, prompt_s=0.3), STEP_S, TTFT_S, TPOT_S)
    busier = instance("decoder", start_s=0.4, prompt_s=0.3)
    assert is_apart(busier, instance("prefill", start_s=0.3, prompt_s=0.3), STEP_S, TTFT_S, TPOT_S), (
        "late, but sooner than here"
    )


def test_memory_goes_before_time() -> None:
    here, there = instance("decoder", prompt_s=0.01, missing_merged=2.0), instance("prefill", prompt_s=0.01)
    assert is_apart(here, there, STEP_S, TTFT_S, TPOT_S) and not is_handed_over(here, 100)
    full = instance("prefill", missing_merged=3.0)
    assert not is_apart(instance("decoder", prompt_s=0.5), full, STEP_S, TTFT_S, TPOT_S)


def test_a_short_output_is_not_worth_a_handoff() -> None:
    decoder = instance("decoder")
    assert is_handed_over(decoder, LEAST_OUTPUT) and not is_handed_over(decoder, LEAST_OUTPUT - 1)


def test_the_less_time_decoders_have_the_later_a_prompt_may_be_elsewhere() -> None:
    assert late_share(0.03, 0.0) == LATE_SHARE, "nobody names an objective"
    shares = [late_share(step_s, 0.04) for step_s in (0.001, 0.01, 0.02, 0.03, 0.034, 0.05)]
    assert shares[0] == LEAST_LATE_SHARE and shares == sorted(shares) and shares[-2:] == [1.0, 1.0]
    here, there = instance("decoder", prompt_s=0.3), instance("prefill", start_s=0.5, prompt_s=0.3)
    assert is_apart(here, there, 0.03, 1.0, 0.04), "their streams would be late"
    assert not is_apart(here, there, 0.01, 1.0, 0.04), "they have the time"


def view(name: str, role: Role = Role.BOTH, **fields: object) -> RoleView:
    base = RoleView(
        instance_id=name, role=role, is_fixed=False, models=frozenset("m"), num_running=10, used_merged=10.0,
        num_merged=100, prompts_s=0.0, step_s=0.01, request_s=0.0001, ttft_s=1.0, tpot_s=0.04,
    )  # fmt: skip
    return base._replace(**fields)  # type: ignore[arg-type]


def load(prompts: float, decodes: float = 0.3, short_prompts: float = 0.0, prompt_s: float = 0.2) -> PhaseLoad:
    return PhaseLoad(prompts, short_prompts, prompt_s, decodes)


def after(views: list[RoleView], of: PhaseLoad) -> list[RoleView]:
    """Views once nothing is to be changed any more, at the same load."""
    for _ in range(2 * len(views) + 1):
        changes = dict(next_roles(views, of))
        if not changes:
            return views
        assert all(one.role is not changes[one.instance_id] for one in views if one.instance_id in changes)
        views = [one._replace(role=changes.get(one.instance_id, one.role)) for one in views]
    raise AssertionError("roles go to and fro")


def num_prefill(views: list[RoleView]) -> int:
    return sum(one.role is Role.PREFILL for one in views)


def test_the_more_prompts_there_are_the_more_instances_compute_them() -> None:
    four = [view(name) for name in "abcd"]
    found = [num_prefill(after(four, load(work))) for work in (0.0, 0.04, 0.3, 0.9, 1.6, 2.4)]
    assert found[:2] == [0, 0] and found[2] >= 1 and found == sorted(found) and found[-1] == 3


def test_decoders_are_as_many_as_keep_their_pace() -> None:
    eight = [view(str(number)) for number in range(8)]
    assert [num_prefill(after(eight, load(3.0, decodes))) for decodes in (0.5, 3.0)] == [5, 0]


def test_all_do_both_where_that_is_better() -> None:
    """One instance of two can keep up with neither prompts nor decodes alone, while two that do both can."""
    two, of = [view(name) for name in "ab"], load(0.95, decodes=0.4)
    assert pressure(two, of, 0) < pressure(two, of, 1) and not num_prefill(after(two, of))
    split = [view("a", Role.PREFILL), view("b")]
    assert next_roles(split, of) == [("a", Role.BOTH)]


def test_roles_that_miss_an_objective_stay_where_the_others_would_miss_it_by_more() -> None:
    """What ended roles before: decoders' steps near the objective, which they would exceed by far with prompts between."""
    split = [*(view(name, Role.PREFILL) for name in "abc"), view("d")]
    of = load(2.6, decodes=0.73, prompt_s=0.26)
    assert GOOD < pressure(split, of, 3) <= BETTER * pressure(split, of, 0)
    assert num_prefill(after(split, of)) == num_prefill(after([view(name) for name in "abcd"], of)) == 3


def test_pressure_is_what_a_token_takes_of_its_objective_and_grows_with_every_load() -> None:
    four = [view(name) for name in "abcd"]
    assert pressure(four, load(0.0, 0.0, prompt_s=0.0), 0) == 0.01 / 0.04
    assert pressure(four, load(1.0, 1.0, prompt_s=0.0), 2) == 0.01 / (1 - 1.0 / 2) / 0.04
    for num in range(4):
        rising = [pressure(four, load(work), num) for work in (0.1, 0.5, 1.0, 2.0, 3.9, 5.0)]
        assert rising == sorted(rising)
        rising = [pressure(four, load(0.5, decodes), num) for decodes in (0.0, 0.5, 1.0, 2.0, 4.0)]
        assert rising == sorted(rising)


def test_the_load_of_decodes_is_the_same_with_roles_and_without() -> None:
    """The same streams: longer steps with prompts between them, or more of them at once on fewer instances."""
    # Without roles a token takes 1 / (1 - 0.75 - 0.1) steps, with three prefill instances 1 / (1 - 0.4).
    alike = [view(name, num_running=num) for name, num in zip("abcd", [66.7] * 4, strict=True)]
    apart = [*(view(name, Role.PREFILL, num_running=0) for name in "abc"), view("d", num_running=66.7)]
    assert abs(decode_load(alike, 3.0, 0.0) - 4 * 0.4 * 0.25) < 0.01
    assert abs(decode_load(apart, 3.0, 0.0) - 0.4) < 0.01


def test_the_one_with_the_least_to_decode_changes_and_a_fixed_one_never() -> None:
    views = [view("a", num_running=3), view("b", num_running=1), view("c", num_running=0, is_fixed=True)]
    assert next_roles(views, load(0.5))[0] == ("b", Role.PREFILL)


def test_decoders_keep_the_memory_and_the_models() -> None:
    assert not num_prefill(after([view(name, used_merged=60.0) for name in "ab"], load(0.5))), "one pool is too small"
    assert not num_prefill(after([view("a", models=frozenset("m")), view("b", models=frozenset("n"))], load(0.5)))
    assert num_prefill(after([view(name) for name in "ab"], load(0.5))) == 1


def test_roles_end_when_decoders_run_short_of_memory() -> None:
    views = [view("a", Role.PREFILL), view("b", used_merged=85.0), view("c", used_merged=85.0)]
    assert next_roles(views, load(0.6)) == [("a", Role.BOTH)]


views_of_fleets = st.lists(
    st.tuples(
        st.sampled_from(Role), st.booleans(), st.integers(0, 80), st.floats(0, 120), st.sampled_from(["m", "mn"])
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip
loads = st.builds(PhaseLoad, st.floats(0, 10), st.floats(0, 4), st.floats(0, 2), st.floats(0, 8))


@given(views_of_fleets, loads)
def test_at_constant_load_roles_come_to_rest_with_room_for_all_that_decodes(
    fleet: list[tuple[Role, bool, int, float, str]], of: PhaseLoad
) -> None:
    views = [
        view(str(number), role, is_fixed=is_fixed, num_running=num, used_merged=used, models=frozenset(models))
        for number, (role, is_fixed, num, used, models) in enumerate(fleet)
    ]
    rest = after(views, of)
    assert all(before.role is now.role for before, now in zip(views, rest, strict=True) if before.is_fixed)
    prefills = [one for one in rest if one.role is Role.PREFILL]
    decoders = [one for one in rest if one.role is not Role.PREFILL]
    if any(not one.is_fixed for one in prefills):
        assert has_room(decoders, MOST_FILL)
        if not any(one.is_fixed for one in prefills):
            # Good, or not much worse than without roles, as far as that can be told.
            assert pressure(rest, of, len(prefills)) <= max(GOOD, pressure(rest, of, 0) / BETTER) / BETTER + 1e-9
