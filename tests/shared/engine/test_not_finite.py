"""Logits that are NaN or infinite end their own request, and leave nothing that another would find."""

from __future__ import annotations

import pytest

from shared.engine.plan import NO_TOKEN, StepResult
from shared.messages.requests import ErrorCode, FinishReason
from shared.policies.prompt_lookup import LookupSettings
from tests.shared.engine.fake_executor import expected_output, request
from tests.shared.engine.test_drafting import Run, going_round, repeating_token

NO_GUESSES = LookupSettings(0, 2, 4)
LAME = 900
"""A token that the model has no numbers for."""


def lame(prefix: list[int]) -> int:
    return NO_TOKEN if LAME in prefix else repeating_token(prefix)


def lame_at_thirty(prefix: list[int]) -> int:
    return NO_TOKEN if len(prefix) >= 30 else going_round(prefix)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_request_ends_with_its_reason_and_others_go_on(depth: int) -> None:
    run = Run(lame, depth=depth, lookup=NO_GUESSES)
    sound, broken = request("sound", [1, 2, 3], 40), request("broken", [1, 2, 3, LAME, 5, 6, 7, 8, 9], 40)
    run.submit(sound, broken)
    run.to_the_end()
    assert run.output("sound") == expected_output(sound, 200, repeating_token)
    ended = run.ended["broken"]
    assert ended.reason == FinishReason.ERROR and ended.num_output_tokens == 0
    [error] = [entry.error for entry in run.said if entry.request_id == "broken"]
    assert error is not None and error.code == ErrorCode.NOT_FINITE and "after 9 tokens" in error.message
    assert run.engine.counters.without_token == {"a": 1}


def test_what_it_computed_is_found_by_nobody() -> None:
    """Nor what it had found of others: which of them holds the fault is not known."""
    run, prompt = Run(lame, lookup=NO_GUESSES), list(range(1, 17))
    run.submit(request("first", prompt, 2))
    run.to_the_end()
    run.submit(request("broken", [*prompt, LAME, 5, 6, 7, 8], 2))
    run.to_the_end()
    assert run.ended["broken"].num_cached_tokens == 16
    run.submit(request("again", [*prompt, LAME, 5, 6, 7, 8, 9], 2))
    run.to_the_end()
    assert run.ended["again"].num_cached_tokens == 0


def test_guesses_before_it_are_kept() -> None:
    run = Run(lame_at_thirty)
    run.submit(request("r", [0, 1, 2, 3, 4, 0, 1], 60))
    run.to_the_end()
    assert run.ended["r"].reason == FinishReason.ERROR and run.num_kept
    assert run.output("r") == [(2 + index) % 5 for index in range(23)]


def test_one_that_was_given_up_meanwhile_is_not_ended_again() -> None:
    run = Run(lame, lookup=NO_GUESSES)
    run.submit(request("r", [1, LAME], 5))
    plan = run.plan()
    run.engine.requests.cancel("r", run.now)
    run.in_flight.clear()
    run.apply(StepResult(plan.step_id, [NO_TOKEN]))
    assert run.ended["r"].reason == FinishReason.CANCELLED and not run.engine.counters.without_token
