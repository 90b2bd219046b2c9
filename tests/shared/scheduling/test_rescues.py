"""Requests whose instance was lost: they go on where copies of their KV are."""

from __future__ import annotations

import pytest

from shared.messages.requests import GenerationRequest, pack_tokens
from shared.scheduling.dispatching import KEEPS_KV
from shared.scheduling.prefixes import KEY_BYTES, prompt_keys
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import BLOCK_SIZE, make_request

TOKEN_S = 0.001


def lost_request(request_id: str = "r", *, online: bool = True) -> GenerationRequest:
    """It has 320 tokens of a prompt, and had made 160 more."""
    return make_request(request_id, num_prompt=320, num_prior=160, max_tokens=400, epoch=64, online=online)


def copies(request: GenerationRequest, block_size: int = BLOCK_SIZE) -> bytes:
    return b"".join(prompt_keys(request, block_size))


def test_the_keys_of_a_request_that_goes_on_cover_what_it_has_made() -> None:
    request = lost_request()
    whole = make_request("whole", num_prompt=480)
    assert len([*prompt_keys(request, BLOCK_SIZE)]) == (480 - 1) // BLOCK_SIZE
    assert request.prompt + request.prior != whole.prompt
    assert [*prompt_keys(request, BLOCK_SIZE)][:20] == [*prompt_keys(whole, BLOCK_SIZE)][:20]
    assert pack_tokens([*range(160)]) == request.prior


@pytest.mark.parametrize("online", [True, False])
def test_it_goes_to_who_keeps_its_kv_though_others_are_freer(online: bool) -> None:
    driver, request = Driver(), lost_request(online=online)
    for name, freeness in (("free", 90.0), ("holder", 20.0)):
        driver.up(name)
        driver.report(
            name, freeness=freeness, token_s=TOKEN_S, num_running=3, running={"m": 3}, room=int(100 * freeness),
            cache_held=copies(request) if name == "holder" else b"",
        )  # fmt: skip
    driver.submit(request)
    assert driver.dispatches() == {"r": "holder"}
    tracked = driver.core.requests.get("r")
    assert tracked is not None and tracked.chosen_for[0] == KEEPS_KV


def test_all_that_were_lost_together_go_there_at_once() -> None:
    """An instance has few waiting requests else."""
    driver = Driver()
    requests = [lost_request(f"r{number}") for number in range(12)]
    for name, held in (("free", b""), ("holder", copies(requests[0]))):
        driver.up(name, num_merged=1000)
        driver.report(
            name, freeness=900.0, free_merged=1000.0, token_s=TOKEN_S, cache_held=held, waiting={"m": 8 if held else 0}
        )
    for request in requests:
        driver.submit(request)
    assert set(driver.dispatches().values()) == {"holder"}


@pytest.mark.parametrize(("others", "holders"), [(16, 32), (32, 16), (8, 64), (64, 8)])
def test_one_with_other_blocks_that_has_little_of_it_hides_nobody(others: int, holders: int) -> None:
    driver, request = Driver(), lost_request()
    for name, block_size, num_keys in (("free", others, 1), ("holder", holders, 100)):
        driver.up(name, num_merged=1000, block_size=block_size)
        driver.report(
            name, freeness=900.0, free_merged=1000.0, token_s=TOKEN_S, waiting={"m": 8 if name == "holder" else 0},
            cache_held=copies(request, block_size)[: KEY_BYTES * num_keys],
        )  # fmt: skip
    driver.submit(request)
    assert driver.dispatches() == {"r": "holder"}


def test_one_that_nobody_keeps_goes_where_any_other_would() -> None:
    driver = Driver()
    for name, freeness in (("free", 90.0), ("busy", 20.0)):
        driver.up(name)
        driver.report(name, freeness=freeness, token_s=TOKEN_S, num_running=3, running={"m": 3})
    driver.submit(lost_request())
    assert driver.dispatches() == {"r": "free"}


def test_an_offline_one_that_waits_goes_on_when_there_is_room_again() -> None:
    driver, request = Driver(), lost_request(online=False)
    driver.up("holder")
    driver.report("holder", room=0, cache_held=copies(request))
    driver.submit(request)
    driver.submit(make_request("behind", online=False))
    assert not driver.dispatches()
    driver.report("holder", room=10_000)
    assert driver.dispatches() == {"r": "holder", "behind": "holder"}
