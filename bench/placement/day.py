"""A day of five production models' request rates (ServeGen, by its table of rates), with real lengths, on eight simulated
L4s: plans that are searched for again and again, at fixed and at adaptive intervals.

The day passes `compression` times as fast, and so do its intervals, searches, restarts and the loading of weights: a change
takes the share of the day that it would. Requests take the time that they take, and there are that many times fewer of them,
so a search knows less than on a real day. Shapes of rates are the table's; each model's mean is set so that all have the
same share of the devices' time.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from bench.placement.experiments import Table
from bench.reporting import Target
from shared.placement.execution import alone_s, execution_s, step_tokens
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import L4
from shared.placement.problem import ModelFacts, Problem, Traffic, traffic
from shared.placement.replacement import ReplacementSettings
from shared.placement.search import search
from shared.simulation.deployment import LIVE, deploy
from shared.simulation.gateway import Job
from shared.simulation.replacement import FleetReplacement
from tideway.bench.traces import read_trace

TRACES = Path("../shared/traces")
MODELS = {
    "m-large": ("llama-2-13b", "azure_llm_2023_conv.csv"),
    "m-mid": ("llama-2-7b", "sharegpt_8k_lengths.csv"),
    "m-small": ("llama-3.1-8b", "azure_llm_2023_conv.csv"),
    "deepseek-r1": ("llama-2-13b", "sharegpt_8k_lengths.csv"),
    "mm-image": ("opt-6.7b", "arxiv_summarization_lengths.csv"),
}
"""Of the table of rates: the shape that stands for it, and whose lengths its requests have."""
COMPRESSION = 24.0
SEARCH_S = 10.0
"""That a search takes; of the day."""
DAY_S = 86400.0
WINDOW_S = 600.0
NUM_DEVICES = 8
LOAD = 4.0
"""Mean time of requests alone, times their devices, over the devices' time; they are served in batches."""
INTERVALS_S = {"adaptive": 3600.0, "10 minutes": 600.0, "1 hour": 3600.0, "6 hours": 6 * 3600.0, "none": math.inf}
"""Of the day; adaptive: the first."""


def settings(name: str, compression: float) -> ReplacementSettings:
    initial_s = least_s = most_s = INTERVALS_S[name] / compression
    if name == "adaptive":
        least_s, most_s = INTERVALS_S["10 minutes"] / compression, INTERVALS_S["6 hours"] / compression
    restart_s = ReplacementSettings().restart_s / compression
    return ReplacementSettings(initial_s=initial_s, least_s=least_s, most_s=most_s, restart_s=restart_s)


def rates(folder: Path) -> dict[str, np.ndarray]:
    """[windows of the first day] of each model, over its mean. A window without requests is one that was not recorded: it
    is as the one before."""
    found: dict[str, np.ndarray] = {}
    with (folder / "servegen_model_rates.csv").open() as file:
        for row in csv.DictReader(file):
            number = int(float(row["window_start_s"]) / WINDOW_S)
            if number < DAY_S / WINDOW_S:
                found.setdefault(row["model"], np.zeros(int(DAY_S / WINDOW_S)))[number] = float(row["rate_rps"])
    for values in found.values():
        for number in range(len(values)):
            if values[number] == 0:
                values[number] = values[number - 1] if number else values[np.flatnonzero(values)[0]]
        values /= values.mean()
    return found


def draw_day(folder: Path, seed: int, compression: float) -> tuple[Traffic, list[ModelFacts]]:
    shapes = rates(folder)
    rows: list[tuple[float, str, int, int, bool]] = []
    models = []
    for index, (name, (shape, lengths)) in enumerate(MODELS.items()):
        rng = np.random.default_rng([seed, index])
        facts = model_facts(shape, SHAPES[shape], [L4])
        facts = msgspec.structs.replace(facts, name=name, weights=name)
        models.append(facts)
        trace = read_trace(folder / lengths)
        short = (trace.prompt_tokens + trace.output_tokens <= facts.max_model_len) & (trace.output_tokens > 0)
        prompts, outputs = trace.prompt_tokens[short], trace.output_tokens[short]
        num_ranks = 1 if facts.weight_bytes < 20e9 else 2
        cost = facts.costs[L4.kind, num_ranks]
        mean_s = float(alone_s(cost, prompts, outputs, step_tokens(L4.kind)).mean()) * num_ranks
        rate = LOAD * NUM_DEVICES / len(MODELS) / mean_s
        window_s = WINDOW_S / compression
        for number, share in enumerate(shapes[name].tolist()):
            num = int(rng.poisson(rate * share * window_s))
            chosen = rng.integers(0, len(prompts), num)
            at_s = (number + rng.uniform(0, 1, num)) * window_s
            rows += [
                (at, name, prompt, output, True)
                for at, prompt, output in zip(
                    at_s.tolist(), prompts[chosen].tolist(), outputs[chosen].tolist(), strict=True
                )
            ]
    return traffic(rows, DAY_S / compression, list(MODELS)), models


def _first(arrivals: Traffic, seconds: float) -> Traffic:
    there = arrivals.arrival_s < seconds
    return Traffic(
        arrivals.models, arrivals.model[there], arrivals.arrival_s[there], arrivals.prompt_tokens[there],
        arrivals.output_tokens[there], arrivals.is_online[there], seconds,
    )  # fmt: skip


def day(seed: int = 1, compression: float = COMPRESSION, folder: Path = TRACES) -> Table:
    arrivals, models = draw_day(folder, seed, compression)
    node = node_facts("node", L4, NUM_DEVICES)
    node = msgspec.structs.replace(node, load_bytes_s=node.load_bytes_s * compression)
    whole = Problem(nodes=(node,), models=tuple(models), traffic=arrivals)
    # All begin with the plan for the first hour.
    begun = search(msgspec.structs.replace(whole, traffic=_first(arrivals, 3600 / compression)))
    jobs = [
        Job(at_s, prompt, output, model=arrivals.models[model])
        for model, at_s, prompt, output in zip(*(column.tolist() for column in arrivals[1:5]), strict=True)
    ]
    alone = execution_s(whole)
    problem = msgspec.structs.replace(whole, execution_s=alone)
    rows: list[dict[str, object]] = []
    latencies: dict[str, float] = {}
    for name in INTERVALS_S:
        fleet = LIVE.fleet(seed)
        deploy(fleet, problem, begun.plan)
        replacement = FleetReplacement(
            fleet,
            problem,
            begun.plan,
            search,
            settings=settings(name, compression),
            predicted=begun.prediction,
            search_s=SEARCH_S / compression,
        )
        records = fleet.run(jobs).records
        normalised = np.array([record.latency_s / alone[job.model] for record, job in zip(records, jobs, strict=True)])
        stages = Counter(change.stage for change in replacement.changes)
        cost = sum(each.verdict.cost * each.interval_s for each in replacement.searches if each.verdict.is_worth)
        latencies[name] = float(normalised.mean())
        has_interval = math.isfinite(replacement.interval_s)
        rows.append(
            {
                "interval": name, "requests": len(jobs), "attainment": f"{np.mean(normalised <= whole.slo_scale):.4f}",
                "normalised latency": round(latencies[name], 3), "P99": round(float(np.percentile(normalised, 99)), 2),
                "searches": len(replacement.searches), "changes": stages["carried_out"],
                "rolled back": sum(stages.values()) - stages["carried_out"],
                "share of the fleet's time for changes": f"{cost / arrivals.interval_s:.3%}",
                "last interval, minutes": round(replacement.interval_s * compression / 60) if has_interval else "-",
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    best_fixed = min(value for name, value in latencies.items() if name not in ("adaptive", "none"))
    targets = [
        Target(name="normalised latency, adaptive over none", value=latencies["adaptive"] / latencies["none"], limit=1.0),
        Target(name="normalised latency, adaptive over the best fixed interval", value=latencies["adaptive"] / best_fixed,
               limit=1.0),
    ]  # fmt: skip
    notes = (
        f"{NUM_DEVICES} L4s; a day {compression:g} times as fast, changes too, with as many times fewer requests; restart "
        f"of a group {ReplacementSettings().restart_s:g} s of the day beside loading its weights"
    )
    return Table(name="day", rows=rows, targets=targets, notes=notes)
