"""What safepoints cost an offline step, and how soon an online request is computed that arrives in the middle of one
(ConServe section 6.4.2)."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

import numpy as np

from bench.coserving.bench import Bench
from bench.coserving.results import ExperimentResult, Table
from bench.coserving.runs import FIRST_TOKEN_ID, MODEL, TIDEWAY, Objectives, RunFailed, Step, VirtualTestbed
from bench.coserving.testbed import Testbed
from bench.reporting import Target
from shared.costs.model import StepShape
from shared.engine.plan import NewSequence, StepPlan
from shared.messages.requests import RequestClass, SamplingParams, pack_tokens
from tideway.bench.summary import Distribution
from tideway.bench.workload import PlannedRequest, generator

TIGHT_S = 0.001
"""An objective to the first token that no wait keeps: every arrival interrupts."""


def safepoints(bench: Bench) -> ExperimentResult:
    """In virtual time only the reaction, as there the overhead is what the cost model says."""
    cost = bench.testbed.cost_model
    result = bench.result(
        "safepoints",
        layers_per_safepoint=cost.layers_per_safepoint,
        num_layers=cost.num_layers,
        step="one chunk of as many tokens as a step may have",
    )
    rows = [] if isinstance(bench.testbed, VirtualTestbed) else _measure_overhead(bench, bench.testbed, result)
    reactions_s, steps_s = _reactions(bench)
    intervals_s = [step_s * cost.layers_per_safepoint / cost.num_layers for step_s in steps_s]
    in_intervals = Distribution.of(
        reaction / interval for reaction, interval in zip(reactions_s, intervals_s, strict=True)
    )
    interval = Distribution.of(intervals_s)
    reaction = Distribution.of(reactions_s)
    result.measured |= {
        "offline_step_s": Distribution.of(steps_s),
        "safepoint_interval_s": interval,
        "reaction_s": reaction,
        "reaction_intervals": in_intervals,
    }
    rows += [
        ["safepoint interval, ms", f"{interval.p50 * 1000:.2f}", f"{interval.p99 * 1000:.2f}"],
        ["reaction, ms", f"{reaction.p50 * 1000:.2f}", f"{reaction.p99 * 1000:.2f}"],
        ["reaction, intervals of the step met", f"{in_intervals.p50:.2f}", f"{in_intervals.p99:.2f}"],
    ]
    title = f"Safepoints every {cost.layers_per_safepoint} of {cost.num_layers} layers; {reaction.num} arrivals"
    result.tables = [Table(title=title, header=["", "median", "P99"], rows=rows)]
    result.targets.append(
        Target(
            name="reaction, arrival to plan of the online step (P99)",
            value=in_intervals.p99,
            limit=2.0,
            unit=" intervals",
            note=f"{reaction.p99 * 1000:.1f} ms; median {in_intervals.p50:.2f} intervals",
        )
    )
    return result


def _measure_overhead(bench: Bench, testbed: Testbed, result: ExperimentResult) -> list[list[str]]:
    """Adds figures and target to the result; returns rows of its table."""
    overheads, plain, interruptible = _overhead(testbed, bench.durations.num_step_pairs)
    plain_s, with_s = (float(np.percentile(times, 25)) for times in (plain, interruptible))
    low, overhead, high = (float(value) for value in np.percentile(overheads, (25, 50, 75)) * 100)
    result.measured |= {
        "num_pairs": len(overheads),
        "plain_step_s": plain_s,
        "interruptible_step_s": with_s,
        "overhead_percent": overhead,
        "overhead_quartiles_percent": (low, high),
    }
    result.targets.append(
        Target(
            name="overhead of safepoints on an offline step, median of A B B A",
            value=overhead,
            limit=1.0,
            unit=" %",
            note=f"quartiles {low:.2f} and {high:.2f}; of the lower quartiles of both kinds "
            f"{100 * (with_s / plain_s - 1):.2f} %",
        )
    )
    return [
        ["plain step, ms (lower quartile)", f"{plain_s * 1000:.2f}", ""],
        ["interruptible step, ms (lower quartile)", f"{with_s * 1000:.2f}", ""],
        ["overhead, % of a step, in A B B A", f"{overhead:+.2f}", ""],
    ]


def _overhead(testbed: Testbed, num_pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Relative differences of pairs of the same step, in the order A B B A; seconds of the steps without and with."""
    setup = testbed.setup
    executor, prepared = testbed.executor(setup.pool_tokens)
    shape = executor.add_model(prepared)
    executor.set_layers_per_safepoint(MODEL, testbed.cost_model.layers_per_safepoint)
    num_tokens = min(setup.max_step_tokens, shape.max_model_len - 1, setup.pool_tokens // 2)
    tokens = generator(setup.seed, "safepoints").integers(FIRST_TOKEN_ID, testbed.vocab_size, num_tokens)
    blocks = list(range(-(-num_tokens // shape.block_size)))
    new = NewSequence(
        0, pack_tokens(tokens.tolist()), num_tokens, SamplingParams(max_tokens=1 << 20, temperature=0.0), blocks
    )
    step_id = 0

    def step(is_interruptible: bool, begins: list[NewSequence]) -> float:
        nonlocal step_id
        step_id += 1
        plan = StepPlan(
            step_id=step_id, model=MODEL, rows=[0], starts=[0], counts=[num_tokens], samples=[True],
            new_sequences=begins, new_blocks=[], is_interruptible=is_interruptible
        )  # fmt: skip
        started_s = time.perf_counter()
        error = executor.execute(plan).error
        seconds = time.perf_counter() - started_s
        assert not error, error
        return seconds

    for number in range(6):
        step(number % 2 == 0, [new] if number == 0 else [])
    overheads, plain, interruptible = [], [], []
    for _ in range(num_pairs // 2):
        first, second, third, fourth = (step(kind, []) for kind in (False, True, True, False))
        plain += [first, fourth]
        interruptible += [second, third]
        overheads.append((second + third) / (first + fourth) - 1)
    executor.close()
    return overheads, plain, interruptible


def _reactions(bench: Bench) -> tuple[list[float], list[float]]:
    """Seconds from arrival to plan of online requests that come at drawn times while offline steps run, and the durations
    of the steps they meet."""
    setup = bench.testbed.setup
    cost = bench.testbed.cost_model
    draw = generator(setup.seed, "reactions")
    full_s = cost.predict(StepShape(setup.max_step_tokens, setup.max_step_tokens**2 / 2))
    # far enough apart that each meets an offline step alone
    gaps = draw.uniform(4.0, 6.0, bench.durations.num_reactions) * full_s
    times = np.cumsum(gaps) + bench.durations.warm_up_s
    online = [
        PlannedRequest(
            request_id=f"reaction-{index:04d}",
            at_s=float(at_s),
            stream="online",
            model=MODEL,
            request_class=RequestClass.ONLINE,
            prompt_tokens=16,
            output_tokens=1,
        )
        for index, at_s in enumerate(times)
    ]
    run = bench.new_run(TIDEWAY, Objectives(TIGHT_S, 0.11))
    result = run.run(online, bench.offline, float(times[-1]), grace_s=bench.durations.grace_s)
    if len(result.reactions_s) != len(online):
        raise RunFailed(f"only {len(result.reactions_s)} of {len(online)} online requests ended")
    bench.say(f"safepoints: {result.counts.steps_suspended} of {len(online)} arrivals suspended a step")
    return result.reactions_s, met_step_s(result.steps, times.tolist())


def met_step_s(steps: Sequence[Step], times_s: Sequence[float]) -> list[float]:
    """Duration, for each time, of the interruptible step that ran then, over all its launches; where none did, the
    median of the others. (A discarded step counts as far as it came.)"""
    whole_s = [0.0] * len(steps)
    begun: list[int] = []
    for index, step in enumerate(steps):
        launches = [*begun, index] if step.resumes else [index]
        for launch in launches:
            whole_s[launch] = sum(steps[other].end_s - steps[other].start_s for other in launches)
        if step.is_suspended:
            begun = launches
    ends_s = [step.end_s for step in steps]
    met = [min(bisect_right(ends_s, time_s), len(steps) - 1) for time_s in times_s]
    usual_s = median(whole_s[index] for index, step in enumerate(steps) if step.is_interruptible)
    return [whole_s[index] if steps[index].is_interruptible else usual_s for index in met]
