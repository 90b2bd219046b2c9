"""Tokens of a draft model, scored by the real executor: what is sampled is what single steps sample, from the model's
distribution."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.worker.executor.draft_model import DraftModel
from services.worker.executor.executor import Executor
from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.engine import Engine
from shared.engine.requests import Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, TokenLogprob, pack_tokens, unpack_tokens
from shared.models.checkpoint import CheckpointError
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.speculation import GateState
from tests.e2e.checkpoints import make_llama
from tests.shared.engine.test_draft_model import Always
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.test_grammars import JSON, PATTERN, REGEX, STOPS, check_json

FEW = tuple((token, 100.0) for token in (5, 6, 7))
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 5, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5, "logit_bias": FEW},
    {"temperature": 1.0, "seed": 10, "min_tokens": 30, "stop_token_ids": (6, 7), "logit_bias": FEW},
    {"temperature": 1.0, "seed": 11, "min_p": 0.2},
]

Outputs = list[tuple[list[int], list[TokenLogprob]]]


def similar(path: Path, folder: Path, noise: float) -> Path:
    """A checkpoint whose weights are nearly those of another one."""
    shutil.copytree(path, folder)
    for file in folder.glob("*.safetensors"):
        torch.manual_seed(1)
        tensors = {name: one + noise * one.std() * torch.randn_like(one) for name, one in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def run(
    path: Path,
    draft: Path | None,
    wishes: list[dict[str, Any]],
    prompts: list[list[int]] | None = None,
    *,
    num_merged: int = 40,
    deterministic: bool = False,
    gate: GateState = GateState.TRIES,
    budget: int = 64,
    may_fail: bool = False,
    device: str = "cpu",
    merged_bytes: int = 1 << 18,
    **options: Any,
) -> tuple[Outputs, Engine, int]:
    executor = Executor(device, num_merged, merged_bytes, 8, deterministic=deterministic)
    engine = Engine(num_merged, 8, FirstComeFirstServed(), SloTokenBudget(budget), fits_costs=False, **options)
    spec = ModelSpec("m", str(path), draft="" if draft is None else str(draft))
    engine.apply(AddModel(executor.add_model(executor.prepare_model(spec))), 0.0)
    for speculator in engine.drafting.speculators.values():
        speculator.gate = lambda num_sequences: Always(gate)  # type: ignore[method-assign]
    for index, fields in enumerate(wishes):
        prompt = prompt_of(20 + index) if prompts is None else prompts[index]
        request = GenerationRequest(
            request_id=str(index), gateway_id="g", model="m", prompt=pack_tokens(prompt),
            sampling=SamplingParams(**{"max_tokens": 40} | fields),
        )  # fmt: skip
        assert engine.apply(Submit(request), 0.0) is None
    outputs: Outputs = [([], []) for _ in wishes]
    num_steps = 0
    while engine.num_held() or executor.num_in_flight:
        while (plan := engine.plan(num_steps * 0.01)) is not None:
            executor.launch(plan)
        result = executor.collect()
        assert may_fail or not result.error, result.error
        num_steps += 1
        engine.apply(OnStep(result), num_steps * 0.01)
        engine.check()
        for effect in engine.effects():
            for entry in effect.entries if isinstance(effect, Output) else ():
                tokens, logprobs = outputs[int(entry.request_id)]
                assert entry.offset == len(tokens)
                tokens += unpack_tokens(entry.tokens)
                logprobs += entry.logprobs
    assert engine.pool.used_merged() == 0
    executor.close()
    return outputs, engine, num_steps


def check_same(got: Outputs, expected: Outputs) -> None:
    for (tokens, logprobs), (their_tokens, their_logprobs) in zip(got, expected, strict=True):
        assert tokens == their_tokens
        assert [one.logprob for one in logprobs] == pytest.approx([one.logprob for one in their_logprobs], abs=1e-4)
        assert [one.top_ids for one in logprobs] == [one.top_ids for one in their_logprobs]


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "opt"])
@pytest.mark.parametrize("options", [{}, {"steps_in_flight": 2}, {"lookup": LookupSettings(3, 1, 3)}])
def test_drafts_change_no_token_and_no_log_probability(tmp_path: Path, variant: str, options: dict[str, Any]) -> None:
    path = write_checkpoint(tmp_path, variant)
    draft = similar(path, tmp_path / "draft", 0.05)
    expected, _, num_plain_steps = run(path, None, SAMPLING)
    got, engine, num_steps = run(path, draft, SAMPLING, **options)
    check_same(got, expected)
    assert engine.counters.accepted_tokens["m"] > 60 and num_steps < num_plain_steps


def test_a_draft_model_of_another_shape_that_is_never_right_changes_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    draft = write_checkpoint(tmp_path, "llama-tied-bias", num_hidden_layers=1)
    expected, _, _ = run(path, None, SAMPLING)
    got, engine, _ = run(path, draft, SAMPLING)
    check_same(got, expected)
    assert engine.counters.drafted_tokens["m"] > 3 * engine.counters.accepted_tokens["m"]


def test_long_prompts_are_caught_up_with_and_the_model_itself_keeps_all_its_drafts(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    wishes = [{"temperature": float(i % 2), "seed": i, "max_tokens": 60} for i in range(4)]
    prompts = [prompt_of(100 + i) for i in range(4)]
    expected, _, num_plain_steps = run(path, None, wishes, prompts)
    got, engine, num_steps = run(path, path, wishes, prompts)
    check_same(got, expected)
    counters = engine.counters
    assert counters.accepted_tokens["m"] > 0.97 * counters.drafted_tokens["m"] and num_steps < 0.6 * num_plain_steps


def test_in_a_pool_that_is_too_small_preempted_sequences_draft_again(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    wishes = [{"temperature": 1.0, "seed": i, "max_tokens": 150} for i in range(8)]
    expected, _, _ = run(path, None, wishes)
    got, engine, _ = run(path, path, wishes, num_merged=1)
    check_same(got, expected)
    assert engine.counters.num_preemptions > 0 and engine.counters.accepted_tokens["m"] > 20


@pytest.mark.slow
def test_in_deterministic_mode_drafts_change_no_bit(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    draft = similar(path, tmp_path / "draft", 0.05)
    expected, _, _ = run(path, None, SAMPLING, deterministic=True)
    got, engine, _ = run(path, draft, SAMPLING, deterministic=True)
    assert got == expected and engine.counters.accepted_tokens["m"] > 60


def test_grammars_are_followed_by_drafts_and_outputs_stay_the_same(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama")
    draft = similar(path, tmp_path / "draft", 0.05)
    wishes: list[dict[str, Any]] = [
        {"grammar": JSON, "temperature": 1.0, "seed": 1, "max_tokens": 150, **STOPS},
        {"grammar": JSON, "temperature": 0.0, "max_tokens": 150, **STOPS},
        {"grammar": REGEX, "temperature": 0.8, "seed": 2, "logprobs": 1, "max_tokens": 150, **STOPS},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60},
    ]
    expected, _, num_plain_steps = run(path, None, wishes)
    for options in ({}, {"deterministic": True}):
        got, engine, num_steps = run(path, draft, wishes, **options)
        if not options:
            check_same(got, expected)
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        texts = [tokenizer.decode(tokens[:-1]) for tokens, _ in got[:3]]
        check_json(texts[0])
        check_json(texts[1])
        assert re.fullmatch(PATTERN, texts[2]) and json.loads(texts[0])
        assert engine.counters.accepted_tokens["m"] > 40
    assert num_steps < num_plain_steps


def test_a_pass_that_fails_changes_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_llama(tmp_path / "llama")
    draft = similar(path, tmp_path / "draft", 0.05)
    wishes: list[dict[str, Any]] = [{"grammar": JSON, "temperature": 1.0, "seed": 1, "max_tokens": 150, **STOPS}]
    expected, _, _ = run(path, None, wishes)
    run_pass, num_passes = DraftModel._run_pass, 0

    def failing_pass(self: DraftModel, *arguments: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        run_pass(self, *arguments)
        if num_passes == 9:
            raise RuntimeError("a device that fails once")

    monkeypatch.setattr(DraftModel, "_run_pass", failing_pass)
    got, _, _ = run(path, draft, wishes, may_fail=True)
    assert num_passes > 9
    check_same(got, expected)


def test_what_is_sampled_with_drafts_is_distributed_as_the_model_says(tmp_path: Path) -> None:
    """Three tokens of which the last two can be drafted, over many seeds, against the probabilities of all 27 outcomes by
    transformers (chi-square; the seeds are fixed, so that it always comes out the same)."""
    path = write_checkpoint(tmp_path, "llama")
    draft = similar(path, tmp_path / "draft", 0.3)
    num, prompt, few, temperature = 1000, prompt_of(12), [5, 6, 7], 4.0
    wishes = [
        {"temperature": temperature, "seed": seed, "max_tokens": 3, "logit_bias": tuple((t, 1000.0) for t in few)}
        for seed in range(num)
    ]
    outputs, engine, _ = run(path, draft, wishes, [prompt] * num, gate=GateState.DRAFTS, budget=512, steps_in_flight=1)
    drafted, kept = engine.counters.drafted_tokens["m"], engine.counters.accepted_tokens["m"]
    assert drafted > num / 2 and 0.2 * drafted < kept < 0.95 * drafted
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outcomes = list(product(few, repeat=3))
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + list(outcome[:2]) for outcome in outcomes])).logits
    scaled = (logits[:, -3:, few] / temperature).softmax(-1)
    probabilities = np.array(
        [
            np.prod([float(scaled[i, place, few.index(token)]) for place, token in enumerate(outcome)])
            for i, outcome in enumerate(outcomes)
        ]
    )
    counts = Counter(tuple(tokens) for tokens, _ in outputs)
    observed = np.array([counts[outcome] for outcome in outcomes])
    is_frequent = probabilities * num >= 5
    bins = [*observed[is_frequent], observed[~is_frequent].sum()]
    expected = [*probabilities[is_frequent], probabilities[~is_frequent].sum()]
    if not expected[-1]:
        bins, expected = bins[:-1], expected[:-1]
    freedom = len(bins) - 1
    assert freedom > 5
    statistic = sum((seen - num * p) ** 2 / (num * p) for seen, p in zip(bins, expected, strict=True))
    # What it exceeds once in a hundred times (Wilson and Hilferty 1931).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 2.326 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_a_draft_model_that_cannot_draft_for_the_model_is_refused_by_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    other = write_checkpoint(tmp_path, "llama-tied-bias", vocab_size=100)
    executor = Executor("cpu", 4, 1 << 18, 4)
    with pytest.raises(CheckpointError, match=r"draft: .* has 100 tokens, but 'm' has 211"):
        executor.prepare_model(ModelSpec("m", str(path), draft=str(other)))
    large = write_checkpoint(tmp_path, "llama-mha-wide-heads")
    prepared = executor.prepare_model(ModelSpec("m", str(path), draft=str(large)))
    with pytest.raises(CheckpointError, match=r"draft: a KV block of .* less KV than its model"):
        executor.add_model(prepared)
    executor.close()
