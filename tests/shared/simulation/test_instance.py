"""The live instance's driver, hosted by virtual time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.engine.calls import AddModel, Cancel, SetCostModel, Submit
from shared.engine.engine import Effect
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.messages.requests import FinishReason, RequestClass, unpack_tokens
from shared.policies.prompt_lookup import LookupSettings
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance, VirtualStep
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import request

SHAPE = ModelShape("a", 8, 4, 2000)
TOKEN = 5
COST = costs(
    0.01, 0.001, decode_s=0.001, num_layers=20, layers_per_safepoint=2, checkpoint_block_s=0.001, restore_block_s=0.001
)


class Run:
    def __init__(self, num_merged: int = 60, **options: Any) -> None:
        self.events = Events()
        configuration = Configuration(
            num_merged=num_merged,
            num_rows=8,
            ordering="fcfs",
            token_budget=512,
            **{"steps_in_flight": 1, "ttft_s": 1.0} | options,
        )
        self.steps: list[VirtualStep] = []
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.instance = VirtualInstance(
            configuration.build(), self.events, lambda _: COST, lambda plan: [TOKEN] * sum(plan.expanded().samples),
            self.on_effects, on_step=self.steps.append,
        )  # fmt: skip
        self.instance.apply(AddModel(SHAPE))
        self.instance.apply(SetCostModel("a", COST))

    def on_effects(self, effects: list[Effect]) -> None:
        self.instance.engine.check()
        for effect in effects:
            if isinstance(effect, Ended):
                self.ended[effect.request.request_id] = effect
            elif isinstance(effect, Output):
                for entry in effect.entries:
                    self.outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))

    def submit_at(self, at_s: float, name: str, num_prompt: int, max_tokens: int, **fields) -> None:
        first = sum(name.encode())  # no prefix is another's
        sent = request(name, list(range(first, first + num_prompt)), max_tokens, **fields)
        self.events.at(at_s, lambda: self.instance.apply(Submit(sent)))

    def until_ended(self, num: int) -> None:
        assert self.events.run(lambda: len(self.ended) == num, math.inf)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_run_one_after_the_other_and_make_what_they_should(depth: int) -> None:
    run = Run(steps_in_flight=depth)
    for number in range(6):
        run.submit_at(0.03 * number, f"r{number}", 30 + number, 12)
    run.until_ended(6)
    assert run.outputs == {f"r{number}": 12 * [TOKEN] for number in range(6)}
    assert all(one.end_s <= after.start_s for one, after in zip(run.steps, run.steps[1:], strict=False))
    assert run.events.now == pytest.approx(run.ended["r5"].ended_s)


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_that_come_true_save_steps_that_each_take_longer(depth: int) -> None:
    run, plain = Run(steps_in_flight=depth, lookup=LookupSettings(4)), Run(steps_in_flight=depth)
    for one in (run, plain):
        for number in range(3):
            one.submit_at(0.01 * number, f"r{number}", 30 + number, 40)
        one.until_ended(3)
    assert run.outputs == plain.outputs and run.events.now < 0.7 * plain.events.now
    guessed = max(run.steps, key=lambda step: sum(len(tokens) for _, tokens in step.plan.drafts))
    num_drafts = sum(len(tokens) for _, tokens in guessed.plan.drafts)
    assert guessed.whole_s == pytest.approx(COST.fixed_s + COST.decode_s * (3 + num_drafts)) and num_drafts == 12


def test_an_online_request_stops_an_offline_step_at_its_next_safepoint_and_it_goes_on_later() -> None:
    run = Run(ttft_s=0.2)
    run.submit_at(0.0, "offline", 500, 4, request_class=RequestClass.OFFLINE)
    run.submit_at(0.1, "online", 20, 4)
    run.until_ended(2)
    first = run.steps[0]
    assert first.is_suspended and first.stop_share * 10 == pytest.approx(round(first.stop_share * 10))
    assert 0.1 <= first.end_s <= 0.1 + first.whole_s / 10 + 1e-9
    assert run.ended["online"].first_token_s is not None and run.ended["online"].first_token_s < 0.2 + 0.1
    assert any(step.plan.resumes for step in run.steps)
    assert run.outputs == {"offline": 4 * [TOKEN], "online": 4 * [TOKEN]}


def test_copies_end_beside_the_steps() -> None:
    run = Run(num_merged=16, num_host_merged=20, checkpoint_start=0.0)
    for number in range(4):
        run.submit_at(0.0, f"offline{number}", 80, 60, request_class=RequestClass.OFFLINE)
    for number in range(3):
        run.submit_at(0.4, f"online{number}", 110 + number, 30)
    run.until_ended(7)
    counters = run.instance.engine.counters
    assert counters.checkpointed_blocks.total() > 0 and counters.restored_blocks.total() > 0
    assert sorted(map(len, run.outputs.values())) == [30] * 3 + [60] * 4


def test_an_idle_instance_wakes_for_deadlines_and_calls() -> None:
    run = Run(num_merged=2)
    run.submit_at(0.0, "holds", 40, 20)
    run.submit_at(0.0, "late", 40, 20, timeout_s=0.2)
    run.submit_at(0.0, "cancelled", 40, 20)
    run.events.at(0.1, lambda: run.instance.apply(Cancel("cancelled")))
    run.until_ended(3)
    assert run.ended["late"].reason is FinishReason.DEADLINE and run.ended["late"].ended_s == pytest.approx(
        0.2, abs=0.1
    )
    assert run.ended["cancelled"].reason is FinishReason.CANCELLED
