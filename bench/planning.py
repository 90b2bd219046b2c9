"""Time of the engine's own work (plan and apply) for one step of decoding sequences, without any model.

python -m bench.planning [--sequences 256] [--steps 400]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepResult
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.token_budget import FixedTokenBudget


def measure(num_sequences: int, num_steps: int) -> tuple[float, float]:
    """Median microseconds of (plan, on_step + effects) over `num_steps` steps of decoding sequences."""
    engine = Engine(4096, num_sequences, FirstComeFirstServed(), FixedTokenBudget(65536), steps_in_flight=1)
    engine.apply(AddModel(ModelShape("m", 32, 8, 8192)), 0.0)
    sampling = SamplingParams(max_tokens=num_steps + 10, stop_token_ids=(2,))
    for index in range(num_sequences):
        prompt = pack_tokens([index * 7 % 999] * 100)
        engine.apply(
            Submit(
                GenerationRequest(
                    request_id=f"request-{index:08d}", gateway_id="gateway", model="m", prompt=prompt, sampling=sampling
                )
            ),
            0.0,
        )
    plan_s, apply_s = [], []
    gc.collect()
    gc.freeze()
    for step in range(num_steps):
        started = time.perf_counter()
        plan = engine.plan(float(step))
        planned = time.perf_counter()
        assert plan is not None and len(plan.rows) == num_sequences
        result = StepResult(plan.step_id, [5] * sum(plan.samples))
        executed = time.perf_counter()
        engine.apply(OnStep(result), float(step))
        engine.effects()
        applied = time.perf_counter()
        if step:
            plan_s.append(planned - started)
            apply_s.append(applied - executed)
    return statistics.median(plan_s) * 1e6, statistics.median(apply_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    plan_us, apply_us = measure(arguments.sequences, arguments.steps)
    print(f"{arguments.sequences} decoding sequences: plan {plan_us:.0f} us, apply {apply_us:.0f} us a step (medians)")


if __name__ == "__main__":
    main()
