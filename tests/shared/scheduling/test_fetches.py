"""Prompts whose beginning another instance has: fetched where that brings the first token sooner."""

from __future__ import annotations

import pytest

from shared.scheduling.actions import Dispatch
from shared.scheduling.prefixes import prompt_keys
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import BLOCK_SIZE, make_request

TOKEN_S, FETCH_S = 1e-3, 1e-5
"""Seconds to compute a token, and to fetch its KV."""


def driver_of(*, waits_s: float, holder_gives: float = FETCH_S, other_takes: float = FETCH_S) -> Driver:
    """One instance has the prompt and prompts of `waits_s` before it; the other has nothing."""
    driver, request = Driver(), make_request("warm", num_prompt=640)
    for name in ("holder", "other"):
        is_holder = name == "holder"
        driver.up(name)
        driver.report(
            name,
            freeness=50.0,
            token_s=TOKEN_S,
            prompts_s=waits_s if is_holder else 0.0,
            fetch_token_s=holder_gives if is_holder else other_takes,
            cache_held=b"".join(prompt_keys(request, BLOCK_SIZE)) if is_holder else b"",
        )
    return driver


def dispatched(driver: Driver, num_prompt: int = 640) -> Dispatch:
    driver.submit(make_request("r", num_prompt=num_prompt))
    (dispatch,) = driver.take(Dispatch)
    return dispatch


def test_a_request_goes_where_there_is_room_and_its_prefix_follows() -> None:
    dispatch = dispatched(driver_of(waits_s=0.4))
    assert dispatch.instance_id == "other"
    assert (dispatch.request.prefix_holder, dispatch.request.prefix_tokens) == ("holder", 624)
    assert dispatch.why == "fetches its prompt's beginning from holder"


def test_it_goes_to_the_holder_as_long_as_nothing_waits_there() -> None:
    dispatch = dispatched(driver_of(waits_s=0.0))
    assert (dispatch.instance_id, dispatch.request.prefix_holder) == ("holder", "")


@pytest.mark.parametrize(
    "costs",
    [{"holder_gives": 0.0}, {"other_takes": 0.0}, {"holder_gives": 6e-4}],
    ids=["the holder gives nothing", "the other takes nothing", "a fetch takes as long as computing"],
)
def test_without_a_gain_the_prompt_is_computed(costs: dict[str, float]) -> None:
    dispatch = dispatched(driver_of(waits_s=2.0, **costs))
    assert (dispatch.instance_id, dispatch.request.prefix_holder) == ("other", "")
    waits = dispatched(driver_of(waits_s=0.4, **costs))
    assert waits.instance_id == "holder", "it waits there for less time than it takes to compute"
