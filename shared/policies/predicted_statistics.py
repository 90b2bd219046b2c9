"""What a model's requests will take before any has finished: from its cost model and ordinary lengths (scheduling needs an
order of magnitude between models, not accuracy)."""

from __future__ import annotations

from shared.costs.model import CostModel, StepShape
from shared.messages.cluster import ExecutionStatistics

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128


def predicted_statistics(model: str, cost_model: CostModel) -> ExecutionStatistics:
    """Mean time of a request of ordinary lengths alone on the instance; `num_finished` 0 marks it as a prediction."""
    prefill_s = cost_model.predict(StepShape(PROMPT_TOKENS, PROMPT_TOKENS * PROMPT_TOKENS / 2))
    decode_s = cost_model.predict(StepShape(0, 0.0, 1, PROMPT_TOKENS + OUTPUT_TOKENS // 2))
    return ExecutionStatistics(model, prefill_s + OUTPUT_TOKENS * decode_s, 0.0)
