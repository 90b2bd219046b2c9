"""The real planner over the real executor, two models in one small pool: chunked prefill, mixed batches, preemption and
prefix-cache hits leave the greedy output of each family as transformers has it, token for token, in float32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.worker.executor.executor import Executor
from shared.engine.calls import AddModel, OnCopy, OnStep, Submit
from shared.engine.engine import Engine
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    GenerationRequest,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.token_budget import FixedTokenBudget
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint

NUM_TOKENS = 70
SHARED_PREFIX = prompt_of(64)
PROMPTS = [prompt_of(3), SHARED_PREFIX + prompt_of(9), prompt_of(75), SHARED_PREFIX + prompt_of(31), prompt_of(40)]
"""Fewer KV blocks than these need together are in the pool, so sequences are preempted while they decode."""


@pytest.mark.parametrize("variants", [("llama3", "opt"), ("mistral", "qwen3"), ("qwen2", "llama-tied-bias")])
def test_greedy_output_equals_transformers_under_pressure(tmp_path: Path, variants: tuple[str, str]) -> None:
    paths = {variant: write_checkpoint(tmp_path, variant) for variant in variants}
    probe = Executor("cpu", 1, 1 << 20, 1)
    prepared = [probe.prepare_model(ModelSpec(variant, str(path))) for variant, path in paths.items()]
    block_sizes = [model.model.kv_shape(model.block_size).block_bytes for model in prepared]
    merged_bytes = math.lcm(*block_sizes)
    num_merged = 20 * max(block_sizes) // merged_bytes
    executor = Executor("cpu", num_merged, merged_bytes, 8)
    engine = Engine(num_merged, 8, FirstComeFirstServed(), FixedTokenBudget(48), steps_in_flight=2)
    for model in prepared:
        engine.apply(AddModel(executor.add_model(model)), 0.0)
    outputs: dict[str, list[int]] = {}
    num_ended = num_cached = 0
    requests = [
        GenerationRequest(
            request_id=f"{variant}-{round_number}-{index}",
            gateway_id="gateway",
            model=variant,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        )
        for round_number in range(2)
        for variant in variants
        for index, prompt in enumerate(PROMPTS)
    ]
    for number, request in enumerate(requests):
        assert engine.apply(Submit(request), float(number)) is None
    for step in range(20_000):
        while (plan := engine.plan(100.0 + step)) is not None:
            for copy in engine.next_copies():
                executor.start_copy(copy)
            executor.launch(plan)
        for ended in executor.finished_copies():
            engine.apply(OnCopy(*ended), 100.0 + step)
        if num_ended == len(requests):
            break
        result = executor.collect()
        assert not result.error
        engine.apply(OnStep(result), 100.0 + step)
        for effect in engine.effects():
            if isinstance(effect, Ended):
                num_ended += 1
                num_cached += effect.num_cached_tokens
            elif isinstance(effect, Output):
                for entry in effect.entries:
                    outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
    engine.check()
    assert max(block_sizes) == merged_bytes or engine.counters.moved_blocks.total() > 0
    assert num_ended == len(requests) and engine.counters.num_preemptions > 0 and num_cached > 0
    for variant, path in paths.items():
        expected = reference_outputs(path, PROMPTS, NUM_TOKENS)
        for round_number in range(2):
            for index, tokens in enumerate(expected):
                assert outputs[f"{variant}-{round_number}-{index}"] == tokens, (variant, round_number, index)
