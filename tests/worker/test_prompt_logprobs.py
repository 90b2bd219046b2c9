"""Log-probabilities of prompts are those that transformers gives, however the prompt is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.executor import prompt_logprobs
from services.worker.executor.executor import Executor
from shared.messages.cluster import ModelSpec
from shared.messages.requests import unpack_logprobs
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver

LENGTHS = (1, 2, 33, 60)
NUM_TOP = 3


def expected(path: Path, prompt: list[int]) -> tuple[list[float], list[list[int]], list[int]]:
    """Log-probability of each token from the second on, the most likely ids, its rank."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    top = logprobs.topk(NUM_TOP, -1).indices.tolist()
    return own[:, 0].tolist(), top, ((logprobs > own).sum(-1) + 1).tolist()


@pytest.mark.parametrize("variant", ["llama", "opt"])
def test_prompts_are_scored_in_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    path = write_checkpoint(tmp_path, variant)
    executor = Executor("cpu", 4, 1 << 18, 8)
    prepared = executor.prepare_model(ModelSpec(variant, str(path)))
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * prepared.model.vocab_size * 7)  # seven tokens at a time
    driver = Driver(executor, executor.add_model(prepared), range(4))
    scored = [driver.add(i, prompt_of(n), logprobs=0, prompt_logprobs=NUM_TOP) for i, n in enumerate(LENGTHS)]
    plain = driver.add(len(scored), prompt_of(40))
    chance = random.Random(5)
    while left := [row for row in (*scored, plain) if not row.output]:
        driver.step([(row, chance.randint(1, min(25, len(row.tokens) - row.computed))) for row in left])
    told = [bytes(row.prompt_logprobs) for row in scored]
    driver.decode([*scored, plain], 2)
    assert [row.prompt_logprobs for row in scored] == told and plain.prompt_logprobs == b""
    for row in scored:
        logprobs = unpack_logprobs(row.prompt_logprobs, NUM_TOP)
        own, top, ranks = expected(path, row.tokens[: row.num_prompt]) if row.num_prompt > 1 else ([], [], [])
        assert [one.logprob for one in logprobs] == pytest.approx(own, abs=1e-4)
        assert [list(one.top_ids) for one in logprobs] == top and [one.rank for one in logprobs] == ranks
        assert all(one.top_logprobs[0] >= one.logprob for one in logprobs)


def test_a_sequence_that_has_output_is_not_scored_again(tmp_path: Path) -> None:
    executor = Executor("cpu", 4, 1 << 18, 2)
    path = write_checkpoint(tmp_path, "llama")
    driver = Driver(executor, executor.add_model(executor.prepare_model(ModelSpec("llama", str(path)))), range(4))
    row = driver.add(0, prompt_of(20), logprobs=0, prompt_logprobs=0)
    driver.step([(row, 20)])
    told = row.prompt_logprobs
    driver.preempt(row)
    driver.step([(row, 21)])
    assert row.prompt_logprobs == told and len(unpack_logprobs(told, 0)) == 19
