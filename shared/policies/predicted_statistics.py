"""What a model's requests will take before any has finished: from its cost model and ordinary lengths (scheduling needs an
order of magnitude between models, not accuracy)."""

from __future__ import annotations

from shared.cost_model import CostModel, StepShape
from shared.messages import ExecutionStatistics

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
BATCH_SEQUENCES = 8
"""Among which the time of a decode step is divided."""


def predicted_statistics(model: str, cost_model: CostModel) -> ExecutionStatistics:
    """Mean execution time of a request of ordinary lengths; `num_finished` 0 marks it as a prediction."""
    prefill_s = cost_model.predict(StepShape(PROMPT_TOKENS, PROMPT_TOKENS * PROMPT_TOKENS / 2))
    context = BATCH_SEQUENCES * (PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    decode_s = cost_model.predict(StepShape(0, 0.0, BATCH_SEQUENCES, context)) / BATCH_SEQUENCES
    return ExecutionStatistics(model, prefill_s + OUTPUT_TOKENS * decode_s, 0.0)
