"""Decisions about engines of others: lacks, resumption, admission, harvest within a step."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engines.admission import num_to_send, offline_rows
from shared.engines.capabilities import Capability, asked, refusal
from shared.engines.harvest import (
    WAIT_SHARE,
    SequenceView,
    StepShare,
    Victim,
    decide,
    interruptible_step_s,
    is_given_up,
    victims,
)
from shared.engines.resuming import Diverged, Resumption, repeats_for
from shared.messages.requests import Adapter, ErrorCode, GenerationRequest, Image, Pooled, SamplingParams, pack_tokens
from shared.policies.slo_budget import SloTokenBudget
from tests.shared.costs import costs

ALL = frozenset(Capability)
COST = costs(0.01, 0.001, decode_s=0.001)


def made(
    prior: list[int] = [],  # noqa: B006
    adapter: Adapter | None = None,
    images: tuple[Image, ...] = (),
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", gateway_id="g", model="m", prompt=pack_tokens([1, 2]), prior=pack_tokens(prior), adapter=adapter,
        images=images, sampling=SamplingParams(max_tokens=10, **{"temperature": 0.0, **sampling}),
    )  # fmt: skip


def test_what_a_request_asks_is_refused_by_name_only_where_it_is_lacking():
    plain, adapted = made(), made(adapter=Adapter("summaries", "1", "/x"))
    assert refusal(plain, ALL) is None and asked(plain) == frozenset()
    assert refusal(adapted, frozenset()) is None
    refused = refusal(adapted, ALL)
    assert refused.code is ErrorCode.BAD_REQUEST and refused.param == "model"
    assert "LoRA adapters" in refused.message and "summaries" in refused.message
    assert refusal(made(grammar="{}"), ALL).param == "response_format"
    assert refusal(made(prompt_logprobs=0), ALL).param == "prompt_logprobs"
    assert "Vectors and scores" in refusal(made(pooled=Pooled()), ALL).message
    shown = refusal(made(images=(Image(b"x"),)), ALL)
    assert shown.param == "messages" and shown.message.startswith("Images cannot be had")


def test_output_is_made_again_only_for_state_that_tokens_do_not_hold():
    cases = {
        frozenset(): made([1], repetition_penalty=1.2),
        frozenset({Capability.SEED_RESUME}): made([1], temperature=1.0),
        frozenset({Capability.PENALTY_RESUME}): made([1], presence_penalty=0.5),
        frozenset({Capability.GRAMMAR_RESUME}): made([1], grammar="{}"),
        frozenset({Capability.IMAGE_RESUME}): made([1], images=(Image(b"x"),)),
    }
    for reasons, request in cases.items():
        assert repeats_for(request, ALL) == reasons
        assert repeats_for(request, frozenset()) == frozenset()
        assert repeats_for(msgspec.structs.replace(request, prior=b""), ALL) == frozenset()
    assert repeats_for(made([1], temperature=1.0, is_seed_drawn=True), ALL) == frozenset()


@given(
    prior=st.lists(st.integers(0, 9), max_size=6), rest=st.lists(st.integers(0, 9), max_size=6), chunk=st.integers(1, 4)
)
def test_what_comes_out_is_what_follows_the_prior_output(prior, rest, chunk):
    for lacks in (ALL, frozenset()):
        resumption = Resumption(made(prior, temperature=1.0), lacks)
        engine_makes = rest if lacks == frozenset() or not prior else prior + rest
        out = b""
        for first in range(0, len(engine_makes), chunk):
            out += resumption.take(pack_tokens(engine_makes[first : first + chunk]), ())[0]
        assert out == pack_tokens(rest)
        assert resumption.sampling.max_tokens == (10 if lacks and prior else 10 - len(prior))


def test_output_that_comes_out_otherwise_goes_on_from_tokens_but_not_within_a_grammar_or_after_images():
    resumption = Resumption(made([5, 6], temperature=1.0), ALL)
    with pytest.raises(Diverged):
        resumption.take(pack_tokens([5, 7]), ())
    assert resumption.give_in() is None
    assert resumption.prompt == pack_tokens([1, 2, 5, 6]) and resumption.sampling.max_tokens == 8
    for never in (made([5, 6], grammar="{}"), made([5, 6], images=(Image(b"x"),))):
        assert Resumption(never, ALL).give_in().code is ErrorCode.INTERNAL


@given(
    rows=st.integers(1, 40), sent=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    waiting=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)  # fmt: skip
def test_rows_are_not_overdrawn_and_offline_requests_wait_for_online_ones(rows, sent, waiting):
    online, offline = num_to_send(rows, *sent, *waiting)
    assert 0 <= online <= waiting[0] and 0 <= offline <= waiting[1]
    assert online + offline <= max(0, rows - sum(sent))
    if offline:
        assert online == waiting[0]
        assert sent[1] + offline <= offline_rows(rows, sent[0] + online)


def view(key: str, **fields: object) -> SequenceView:
    defaults = {
        "is_online": True, "is_running": True, "num_new": 1, "context": 100, "num_output": 10, "arrived_s": 0.0,
        "first_token_s": 1.0, "ttft_s": 1.0, "tpot_s": 0.1,
    }  # fmt: skip
    return SequenceView(key=key, **{**defaults, **fields})


def test_offline_work_fills_what_the_pace_of_online_decodes_leaves():
    online = view("on")
    offline = [view(f"o{i}", is_online=False, ttft_s=math.inf, tpot_s=math.inf) for i in range(200)]
    policy = SloTokenBudget(256)
    ahead = decide([online, *offline], policy, COST, 1.2, 256)
    late = decide([online, *offline], policy, COST, 9.0, 256)
    assert len(ahead.held) < len(late.held) == 200 and late.max_tokens == 1
    assert COST.fixed_s + 0.001 * ahead.max_tokens <= ahead.limit_s
    assert decide(offline, policy, COST, 1.2, 256) == (256, (), math.inf, math.inf)
    # However far ahead it is, it does not stand still for longer than its objective.
    assert decide([view("on", num_output=40), *offline], policy, COST, 1.2, 256).limit_s < online.tpot_s


def test_a_step_with_offline_work_is_short_enough_for_an_online_request_that_arrives():
    decodes = [view(f"o{i}", is_online=False, ttft_s=math.inf, tpot_s=math.inf) for i in range(20)]
    prompt = view("p", is_online=False, is_running=False, num_new=500, num_output=0, context=0)
    policy = SloTokenBudget(512)
    decision = decide([*decodes, prompt], policy, COST, 1.2, 512, 1.0)
    assert 20 < decision.max_tokens < 512 and not decision.held
    assert 0.01 + 0.001 * decision.max_tokens == pytest.approx(decision.limit_s) == pytest.approx(WAIT_SHARE)
    ahead = view("on", tpot_s=1.0)
    assert decide([ahead, *decodes, prompt], policy, COST, 1.2, 512, 1.0).limit_s == pytest.approx(WAIT_SHARE)
    # Not even a token is short enough.
    assert decide([*decodes, prompt], policy, COST, 1.2, 512, 1e-6)[:2] == (1, ())
    assert decide([*decodes, prompt], policy, None, 1.2, 512, 1.0).max_tokens == 512


def test_a_step_that_can_be_interrupted_is_as_long_as_loses_least():
    start_s, rate, patience_s = 0.03, 0.5, 0.07

    def lost(step_s: float) -> float:
        return start_s / step_s + rate * max(0.0, step_s - patience_s) ** 2 / (2 * step_s)

    best_s = interruptible_step_s(start_s, rate, patience_s)
    assert all(lost(best_s) < lost(factor * best_s) for factor in (0.5, 0.9, 1.1, 2.0))
    assert interruptible_step_s(start_s, 0.0, patience_s) == math.inf
    assert interruptible_step_s(start_s, 1e9, patience_s) == pytest.approx(patience_s)


def test_only_steps_of_offline_work_alone_are_interrupted_and_these_are_longer():
    prompt = view("p", is_online=False, is_running=False, num_new=500, num_output=0, context=0)
    policy = SloTokenBudget(512)
    alone = decide([prompt], policy, COST, 1.2, 512, 1.0, arrivals_per_s=0.2)
    assert alone.patience_s == WAIT_SHARE
    assert alone.limit_s == interruptible_step_s(COST.fixed_s + COST.prefill_s, 0.2, WAIT_SHARE) > WAIT_SHARE
    assert decide([prompt], policy, COST, 1.2, 512, 1.0, arrivals_per_s=0.0)[:2] == (512, ())
    beside = decide([view("on", tpot_s=1.0), prompt], policy, COST, 1.2, 512, 1.0, arrivals_per_s=0.2)
    assert beside.patience_s == math.inf and beside.limit_s <= WAIT_SHARE
    for cost, ttft_s in ((None, 1.0), (COST, math.inf)):
        assert decide([prompt], policy, cost, 1.2, 512, ttft_s, 0.2).patience_s == math.inf


def test_steps_that_are_lost_one_after_the_other_become_as_short_as_nothing_interrupts():
    prompt = view("p", is_online=False, is_running=False, num_new=500, num_output=0, context=0)
    share, limits = StepShare(), []
    for _ in range(12):
        limits.append(decide([prompt], SloTokenBudget(512), COST, 1.2, 512, 1.0, 0.02, share.share).limit_s)
        share.on_lost()
    assert limits[0] > limits[1] > limits[2] >= limits[-1] == WAIT_SHARE
    for _ in range(60):
        share.on_done()
    assert share.share == 1.0


def test_a_step_near_its_end_goes_on():
    assert is_given_up(0.0, 0, 30, 1.0), "nothing is lost"
    assert is_given_up(0.1, 10, 30, 0.19) and not is_given_up(0.1, 10, 30, 0.21)
    assert not is_given_up(0.1, 30, 30, 0.0)


def test_a_running_prompt_of_offline_work_yields_to_an_online_one_that_waits():
    sequences = [
        view("o", is_online=False, num_new=500, num_output=0),
        view("on", is_running=False, num_new=60, num_output=0, context=0),
    ]
    decision = decide(sequences, SloTokenBudget(256), None, 0.0, 256)
    assert decision.held == ("o",) and decision.max_tokens == 60


def test_who_loses_least_gives_way_and_only_where_it_helps():
    offline = [Victim("a", 4, 100), Victim("b", 4, 10), Victim("c", 4, 50)]
    assert victims([3], 0, 0, offline) == ["b"]
    assert victims([8], 1, 0, offline) == ["b", "c"]
    assert victims([2], 1, 5, offline) == []
    assert victims([99], 1, 0, offline) == []
    assert victims([3, 3], 0, 0, offline) == ["b", "c"]
