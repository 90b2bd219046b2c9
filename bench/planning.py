"""Time of the engine's own work for one step, without any model: plan, apply (result and effects) and load report.

    python -m bench.planning [--sequences 64 128 256] [--steps 400]

The policies are an instance's by default, with a measured cost model. In a mixed step one sequence begins, with a prompt of
512 tokens, in the place of the oldest, which is cancelled before (counted as apply).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from bench.rebalance.cluster import DEVICES
from bench.reporting import table
from shared.engine.calls import AddModel, Cancel, OnStep, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepResult
from shared.engine.recording import Configuration
from shared.messages.requests import GenerationRequest, SamplingParams
from shared.runtime.garbage import frozen_heap

PROMPT_TOKENS, BLOCK_SIZE = 512, 16
STEP_S = 0.03


def _submit(engine: Engine, number: int, max_tokens: int, now: float) -> None:
    prompt, sampling = (
        np.full(PROMPT_TOKENS, number, np.int32),
        SamplingParams(max_tokens=max_tokens, stop_token_ids=(2,)),
    )
    request = GenerationRequest(
        request_id=str(number), gateway_id="gateway", model="m", prompt=prompt.tobytes(), sampling=sampling
    )
    engine.apply(Submit(request), now)


def measure(num_sequences: int, num_steps: int, *, is_mixed: bool) -> list[float]:
    """Median microseconds of plan, apply and load over `num_steps` steps."""
    tokens = PROMPT_TOKENS + num_steps + num_sequences
    engine = Configuration(
        num_merged=num_sequences * (tokens // BLOCK_SIZE + 1), num_rows=num_sequences, ordering="doubling_budget",
        token_budget=8192, steps_in_flight=1,
    ).build()  # fmt: skip
    engine.apply(AddModel(ModelShape("m", BLOCK_SIZE, 1, 2 * tokens)), 0.0)
    engine.apply(SetCostModel("m", DEVICES["a100"].cost_model), 0.0)
    taken_s = []
    with frozen_heap():
        for step in range(num_sequences + num_steps):
            now = STEP_S * step
            is_begun = step >= num_sequences
            if is_mixed or not is_begun:
                _submit(engine, step, tokens, now)
            times_s = [time.perf_counter()]
            plan = engine.plan(now)
            times_s.append(time.perf_counter())
            assert plan is not None and (not is_begun or len(plan.rows) == num_sequences)
            result = StepResult(plan.step_id, [5] * sum(plan.samples))
            executed_s = time.perf_counter()
            engine.apply(OnStep(result), now + STEP_S)
            if is_mixed and step >= num_sequences - 1:
                engine.apply(Cancel(str(step - num_sequences + 1)), now + STEP_S)
            engine.effects()
            times_s.append(time.perf_counter())
            engine.load(now + STEP_S)
            if is_begun:
                taken_s.append((times_s[1] - times_s[0], times_s[2] - executed_s, time.perf_counter() - times_s[2]))
    return [1e6 * statistics.median(each) for each in zip(*taken_s, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for kind in ("decode", "mixed"):
        for number in options.sequences:
            taken_us = measure(number, options.steps, is_mixed=kind == "mixed")
            rows.append([kind, str(number), *(f"{each:.0f}" for each in (*taken_us, sum(taken_us)))])
    print("\n".join(table(["step", "sequences", "plan us", "apply us", "load us", "sum us"], rows)))


if __name__ == "__main__":
    main()
