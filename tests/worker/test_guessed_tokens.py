"""Tokens that are guessed, scored by the real executor and kept are those that single steps make, however sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor.executor import Executor
from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.engine import Engine
from shared.engine.requests import Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, TokenLogprob, pack_tokens, unpack_tokens
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.token_budget import FixedTokenBudget
from tests.worker.checkpoints import prompt_of, write_checkpoint

FEW = tuple((token, 100.0) for token in (5, 6, 7))
"""Tokens of which all outputs consist, so that guesses often come true."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 5, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 10, "min_tokens": 30, "stop_token_ids": (6, 7)},
]

Outputs = dict[str, tuple[list[int], list[TokenLogprob]]]


def run(
    path: Path, num_tokens: int, steps_in_flight: int = 1, deterministic: bool = False
) -> tuple[Outputs, Engine, int]:
    executor = Executor("cpu", 12, 1 << 18, 8, deterministic=deterministic)
    lookup = LookupSettings(num_tokens, 1, 3)
    engine = Engine(
        12, 8, FirstComeFirstServed(), FixedTokenBudget(64), steps_in_flight=steps_in_flight, fits_costs=False,
        lookup=lookup,
    )  # fmt: skip
    engine.apply(AddModel(executor.add_model(executor.prepare_model(ModelSpec("m", str(path))))), 0.0)
    for index, fields in enumerate(SAMPLING):
        sampling = SamplingParams(**{"max_tokens": 40, "logit_bias": FEW} | fields)
        request = GenerationRequest(
            request_id=str(index),
            gateway_id="g",
            model="m",
            prompt=pack_tokens(prompt_of(20 + index)),
            sampling=sampling,
        )
        assert engine.apply(Submit(request), 0.0) is None
    outputs: Outputs = {str(index): ([], []) for index in range(len(SAMPLING))}
    num_steps = 0
    while engine.num_held():
        while (plan := engine.plan(float(num_steps))) is not None:
            executor.launch(plan)
        result = executor.collect()
        assert not result.error
        num_steps += 1
        engine.apply(OnStep(result), float(num_steps))
        engine.check()
        for effect in engine.effects():
            for entry in effect.entries if isinstance(effect, Output) else ():
                tokens, logprobs = outputs[entry.request_id]
                assert entry.offset == len(tokens)
                tokens += unpack_tokens(entry.tokens)
                logprobs += entry.logprobs
    executor.close()
    return outputs, engine, num_steps


@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_guesses_change_no_token_and_no_log_probability(tmp_path: Path, variant: str) -> None:
    path = write_checkpoint(tmp_path, variant)
    expected, _, num_plain_steps = run(path, 0)
    got, engine, num_steps = run(path, 4, steps_in_flight=2)
    for name, (tokens, logprobs) in expected.items():
        assert got[name][0] == tokens
        assert [one.logprob for one in got[name][1]] == pytest.approx([one.logprob for one in logprobs], abs=1e-4)
        assert [one.top_ids for one in got[name][1]] == [one.top_ids for one in logprobs]
    assert len(expected["6"][0]) > 30 and len(expected["1"][1]) == 40
    assert engine.counters.accepted_tokens["m"] > 30 and num_steps < num_plain_steps


@pytest.mark.slow
def test_in_deterministic_mode_they_change_no_bit(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    expected, _, _ = run(path, 0, deterministic=True)
    got, engine, _ = run(path, 4, deterministic=True)
    assert got == expected and engine.counters.accepted_tokens["m"] > 30
