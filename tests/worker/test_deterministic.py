"""In deterministic mode a token and its log-probabilities are the same to the last bit, whatever the schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor import Executor
from shared.engine.plan import ModelShape
from shared.messages.cluster import ModelSpec
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver, Row

MERGED_BYTES = 1 << 20
NUM_MERGED = 8
LENGTHS = (5, 40, 97, 33, 170)
STEPS = 10
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
SAMPLING: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    {"temperature": 1.3, "seed": 9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 20},
    {"presence_penalty": 0.5, "logit_bias": ((17, 1.5),), "logprobs": 1},
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},
    "llama-dynamic": {},
    "mistral-window": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "qwen3": {},
    "opt-gelu-untied": {},
    "mixtral": {},
    "qwen3-moe": {},
    "gemma3": {},
    "phi3": {},
}
"""By variant, what is changed."""
QUICK = ("llama", "opt-gelu-untied")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(folder, name, dtype=torch.bfloat16, **changes) for name, changes in SHAPES.items()}


def load(device: str, path: Path, num_rows: int, dtype: str = "bfloat16") -> tuple[Executor, ModelShape]:
    executor = Executor(device, NUM_MERGED, MERGED_BYTES, num_rows, deterministic=True)
    return executor, executor.add_model(executor.prepare_model(ModelSpec(path.name, str(path), dtype)))


def alone(executor: Executor, shape: ModelShape) -> list[Row]:
    """Each sequence by itself: its prompt at once, then token by token."""
    driver, rows = Driver(executor, shape, range(NUM_MERGED)), []
    for length, sampling in zip(LENGTHS, SAMPLING, strict=True):
        row = driver.add(0, prompt_of(length), **sampling)
        driver.step([(row, length)])
        driver.decode([row], STEPS - 1)
        driver.preempt(row)
        rows.append(row)
    return rows


def scheduled(executor: Executor, shape: ModelShape, seed: int) -> list[Row]:
    """Random subsets and chunks; preemption, whose tokens are computed again as part of a prompt; rows and blocks change."""
    chance = random.Random(seed)
    driver = Driver(executor, shape, range(NUM_MERGED), seed)
    rows = [driver.add(i, prompt_of(n), **s) for i, (n, s) in enumerate(zip(LENGTHS, SAMPLING, strict=True))]
    spare = [len(rows)]
    while unfinished := [r for r in rows if len(r.output) < STEPS]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        driver.step([(r, chance.randint(1, len(r.tokens) - r.computed)) for r in chosen])
        if chance.random() < 0.2:
            victim = chance.choice(chosen)
            driver.preempt(victim)
            spare.append(victim.row)
            victim.row = spare.pop(0)
    return rows


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in SHAPES]
)
def test_tokens_and_logprobs_do_not_depend_on_the_schedule(
    checkpoints: dict[str, Path], variant: str, device: str
) -> None:
    executor, shape = load(device, checkpoints[variant], len(LENGTHS) + 1)
    expected = alone(executor, shape)
    for seed in range(2):
        for row, other in zip(scheduled(executor, shape, seed), expected, strict=True):
            assert row.output == other.output
            assert row.logprobs == other.logprobs
