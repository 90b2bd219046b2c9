"""Roles of instances, and which requests are handed over, on plain data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.messages.cluster import Role
from shared.policies.dispatch import DispatchView
from shared.policies.roles import (
    BEGIN_S,
    LEAST_OUTPUT,
    MOST_WORK,
    RoleView,
    has_room,
    is_apart,
    is_handed_over,
    next_role,
    patience_s,
)
from tests.shared.policies.test_dispatch import Plain

IDLE = DispatchView(100.0, 0, 0)
STEP_S, TTFT_S = 0.02, 1.0


def instance(name: str, **fields: float) -> Plain:
    return Plain(name, IDLE, **fields)  # type: ignore[arg-type]


def test_a_prompt_of_many_steps_is_computed_apart_and_a_short_one_is_not() -> None:
    there = instance("prefill", prompt_s=0.5)
    assert is_apart(instance("decoder", prompt_s=0.5), there, STEP_S, TTFT_S)
    assert not is_apart(instance("decoder", prompt_s=0.03), there, STEP_S, TTFT_S)
    assert not is_apart(instance("decoder", prompt_s=0.5), there, 0.0, TTFT_S), "nothing is predicted"


def test_a_prompt_is_computed_by_its_decoder_where_that_is_sooner_and_the_other_late() -> None:
    here = instance("decoder", start_s=0.1, prompt_s=0.3)
    assert is_apart(here, instance("prefill", start_s=0.15, prompt_s=0.3), STEP_S, TTFT_S), "early enough"
    assert not is_apart(here, instance("prefill", start_s=0.3, prompt_s=0.3), STEP_S, TTFT_S)
    busier = instance("decoder", start_s=0.4, prompt_s=0.3)
    assert is_apart(busier, instance("prefill", start_s=0.3, prompt_s=0.3), STEP_S, TTFT_S), (
        "late, but sooner than here"
    )


def test_memory_goes_before_time() -> None:
    here, there = instance("decoder", prompt_s=0.01, missing_merged=2.0), instance("prefill", prompt_s=0.01)
    assert is_apart(here, there, STEP_S, TTFT_S) and not is_handed_over(here, 100)
    full = instance("prefill", missing_merged=3.0)
    assert not is_apart(instance("decoder", prompt_s=0.5), full, STEP_S, TTFT_S)


def test_only_the_first_prefill_instance_is_waited_for() -> None:
    assert [patience_s(num) for num in range(3)] == [BEGIN_S, 0.0, 0.0]


def test_a_short_output_is_not_worth_a_handoff() -> None:
    decoder = instance("decoder")
    assert is_handed_over(decoder, LEAST_OUTPUT) and not is_handed_over(decoder, LEAST_OUTPUT - 1)


def view(name: str, role: Role = Role.BOTH, **fields: object) -> RoleView:
    base = RoleView(
        instance_id=name, role=role, is_fixed=False, models=frozenset("m"), num_running=10, used_merged=10.0,
        num_merged=100, prompts_s=0.0, step_s=0.01, request_s=0.0001, tpot_s=0.04,
    )  # fmt: skip
    return base._replace(**fields)  # type: ignore[arg-type]


def after(views: list[RoleView], work: float) -> list[RoleView]:
    """Views once nothing is to be changed any more, at the same load."""
    for _ in range(2 * len(views) + 1):
        change = next_role(views, work)
        if change is None:
            return views
        name, role = change
        assert next(one for one in views if one.instance_id == name).role is not role
        views = [one._replace(role=role) if one.instance_id == name else one for one in views]
    raise AssertionError("roles go to and fro")


def num_prefill(views: list[RoleView]) -> int:
    return sum(one.role is Role.PREFILL for one in views)


def test_as_many_compute_prompts_as_those_take_time() -> None:
    four = [view(name) for name in "abcd"]
    assert [num_prefill(after(four, work)) for work in (0.0, 0.04, 0.3, 0.9, 1.6, 9.0)] == [0, 0, 1, 2, 3, 3]


def test_the_one_with_the_least_to_decode_changes_and_a_fixed_one_never() -> None:
    views = [view("a", num_running=3), view("b", num_running=1), view("c", num_running=0, is_fixed=True)]
    assert next_role(views, 0.5) == ("b", Role.PREFILL)


def test_decoders_keep_the_memory_the_speed_and_the_models() -> None:
    assert not num_prefill(after([view(name, used_merged=60.0) for name in "ab"], 0.5)), "one pool would be too small"
    assert not num_prefill(after([view(name, num_running=200) for name in "ab"], 0.5)), "steps would be too long"
    assert not num_prefill(after([view("a", models=frozenset("m")), view("b", models=frozenset("n"))], 0.5))
    assert num_prefill(after([view(name) for name in "ab"], 0.5)) == 1


def test_roles_end_when_decoders_run_short() -> None:
    views = [view("a", Role.PREFILL), view("b", used_merged=85.0), view("c", used_merged=85.0)]
    assert next_role(views, 0.6) == ("a", Role.BOTH)


views_of_fleets = st.lists(
    st.tuples(
        st.sampled_from(Role), st.booleans(), st.integers(0, 80), st.floats(0, 120), st.sampled_from(["m", "mn"])
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@given(views_of_fleets, st.floats(0, 10))
def test_at_constant_load_roles_come_to_rest_with_room_for_all_that_decodes(
    fleet: list[tuple[Role, bool, int, float, str]], work: float
) -> None:
    views = [
        view(str(number), role, is_fixed=is_fixed, num_running=num, used_merged=used, models=frozenset(models))
        for number, (role, is_fixed, num, used, models) in enumerate(fleet)
    ]
    rest = after(views, work)
    assert all(before.role is now.role for before, now in zip(views, rest, strict=True) if before.is_fixed)
    prefills = [one for one in rest if one.role is Role.PREFILL]
    decoders = [one for one in rest if one.role is not Role.PREFILL]
    if any(not one.is_fixed for one in prefills):
        assert has_room(decoders, 0.8, 0.9)
    if num_prefill(rest) > num_prefill(views):
        assert work > MOST_WORK * (num_prefill(rest) - 1)
