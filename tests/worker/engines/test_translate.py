"""What vLLM's engine made, as Tideway's messages, on the fields that are read of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.engines.vllm.translate import progress_of
from shared.messages.requests import FinishReason, unpack_logprobs, unpack_tokens, unpack_vector
from shared.models.pooling import Pooling

OUTPUT: dict[str, Any] = {
    "request_id": "r",
    "new_token_ids": [],
    "new_logprobs": None,
    "new_prompt_logprobs_tensors": None,
    "pooling_output": None,
    "finish_reason": None,
    "events": None,
    "prefill_stats": None,
}


def test_log_probabilities_of_a_prompt_come_with_its_first_token() -> None:
    chosen = SimpleNamespace(logprob_token_ids=[[7, 8]], logprobs=[[-0.5, -0.9]], sampled_token_ranks=[1])
    prompt = SimpleNamespace(
        logprob_token_ids=torch.tensor([[3, 5, 6], [4, 4, 9]]),
        logprobs=torch.tensor([[-2.0, -0.25, -1.5], [-0.125, -0.125, -3.0]]),
        selected_token_ranks=torch.tensor([4, 1]),
    )
    output = OUTPUT | {"new_token_ids": [7], "new_logprobs": chosen, "new_prompt_logprobs_tensors": prompt}
    progress = progress_of(SimpleNamespace(**output), 1)
    (first,) = progress.logprobs
    assert (first.logprob, first.top_ids, first.rank) == (-0.5, (8,), 1)
    told = unpack_logprobs(first.prompt, 2)
    assert [(one.logprob, one.top_ids, one.top_logprobs, one.rank) for one in told] == [
        (-2.0, (5, 6), (-0.25, -1.5), 4),
        (-0.125, (4, 9), (-0.125, -3.0), 1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_comes_with_a_token_that_ends_the_request(dtype: torch.dtype) -> None:
    vector = torch.tensor([0.5, -1.25, 3.0], dtype=dtype)
    output = OUTPUT | {"pooling_output": vector, "finish_reason": "stop"}
    progress = progress_of(SimpleNamespace(**output), 0)
    assert len(unpack_tokens(progress.tokens)) == 1 and progress.finish_reason is FinishReason.LENGTH
    assert unpack_vector(progress.logprobs[0].prompt).tolist() == vector.tolist()


@pytest.mark.parametrize(("activation", "score"), [("identity", 0.0), ("sigmoid", 0.5), ("tanh", 0.0)])
def test_a_score_goes_through_the_checkpoints_activation(activation: str, score: float) -> None:
    pooling = Pooling(task="score", mode="lasttoken", num_dimensions=1, activation=activation)
    output = OUTPUT | {"pooling_output": torch.zeros(1), "finish_reason": "stop"}
    progress = progress_of(SimpleNamespace(**output), 0, pooling)
    assert unpack_vector(progress.logprobs[0].prompt).tolist() == [score]
