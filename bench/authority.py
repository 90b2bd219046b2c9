"""Who may delay whom where models, classes, priorities, prefixes and the number of instances meet ("Order of authority" in
docs/design/scheduling.md): each scenario against what is asked of it.

    python -m bench.authority [--only offline,high,stages,prefixes,scaling] [--noise 0.05] [--seed N] [--num-seeds N]
                              [--output FOLDER]
    python -m bench.authority --live [--stream-tokens 1500]

In virtual time, with the real scheduler's core and engine; the worst of the seeds counts.

    offline    lines of model B beside a stream of A, over what lines of A itself get: 64 lines, and more than gets done
    high       a normal stream and normal prompts of B beside a stream of A that has high priority
    stages     online requests beside offline lines on pipelines of 1, 2 and 4 stages
    prefixes   80 conversations over 8 instances, beside one instance with all the memory and all the speed
    scaling    instances come and go by themselves at a constant load, then after a step of it

`--live`: on the real system, with the demonstration models on one instance (`bench/authority_live.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from bench import authority_live
from bench.prefixes import LEAST_SHARE, TURNS, merged_device
from bench.rebalance.cluster import A100, Cluster, Device, System, model_names
from bench.reporting import Target, judged, machine, table, write
from shared.costs.model import CostModel, prompt_s
from shared.messages.requests import RequestClass
from shared.policies.autoscaling import MOST_WORK
from shared.scheduling.actions import DrainAction, ScalingAction
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Job, Record

ONE = msgspec.structs.replace(
    A100,
    name="one",
    cost_model=CostModel(
        fixed_s=0.012, prefill_token_s=1e-4, prefill_attention_s=3e-9, decode_s=3e-5, decode_context_s=3.6e-7,
        prefill_s=0.002, checkpoint_block_s=0.002, restore_block_s=0.002, num_layers=32, layers_per_safepoint=4,
    ),
    num_blocks=40_000,
)  # fmt: skip
"""What scenarios with one instance run on: about a 7B model with slow prompts (0.9 s for 8k tokens) and ample memory."""
LEAST_OFFLINE = 0.9
"""Offline tokens of another model, over those of the stream's own."""
MOST_TTFT_S = {1: ONE.ttft_s, 2: ONE.ttft_s, 4: 0.5}
"""By stages, of online requests beside offline lines."""
MOST_MEAN_TTFT_S = 0.035
"""Mean time to first token of conversations."""
MOST_GROWTH_S = 60.0
"""Time from a step of load until as many instances serve as it needs."""
LOADS = (0.45, 2.7)
"""Instances' time that prompts take, before the step and after it."""
SYSTEM = System(name="tideway")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of each scenario is run."""

    num_lines: int = 64
    backlog_lines: int = 300
    offline_s: float = 50.0
    backlog_s: float = 20.0
    num_prompts: int = 10
    """Normal prompts beside the high stream, and online requests beside the lines of pipelines."""
    num_conversations: int = 80
    num_instances: int = 8
    constant_s: float = 150.0
    step_s: float = 240.0
    noise: float = 0.05
    """Noise of step times, as of `Fleet`. The engine bounds its steps by what they take without."""


def one_instance(jobs: Iterable[Job], until_s: float, seed: int, *, noise: float, num_stages: int = 1) -> Fleet:
    """Runs jobs on one instance with models `model_names(2)`."""
    fleet = Fleet(SYSTEM.settings(), noise=noise, seed=seed)
    simulated = ONE.simulated(SYSTEM.order)
    configuration = msgspec.structs.replace(
        simulated.configuration, num_stages=num_stages, steps_in_flight=max(2, num_stages)
    )
    fleet.add_instance("instance-0", msgspec.structs.replace(simulated, configuration=configuration), ONE.models(2))
    for job in jobs:
        fleet.submit_at(job)
    fleet.events.run(lambda: False, until_s)
    return fleet


def lines(model: str, num: int, prompt: int = 1024, output: int = 128, at_s: float = 1.0) -> list[Job]:
    return [Job(at_s, prompt, output, model=model, request_class=RequestClass.OFFLINE)] * num


def most_ttft_s(records: Iterable[Record]) -> float:
    """`inf` where one has got no token."""
    return max(record.ttft_s if record.first_s >= 0 else math.inf for record in records)


def offline(sizes: Sizes, seed: int) -> list[Target]:
    targets = []
    for name, num, until_s in (
        (f"{sizes.num_lines} lines", sizes.num_lines, sizes.offline_s),
        ("a backlog", sizes.backlog_lines, sizes.backlog_s),
    ):
        tokens, gaps_s = list[int](), list[float]()
        own, other = model_names(2)
        for model in (own, other):
            jobs = [Job(0.0, 200, 4000, model=own), *lines(model, num)]
            fleet = one_instance(jobs, until_s, seed, noise=sizes.noise)
            tokens.append(fleet.instances["instance-0"].engine.counters.harvested_tokens)
            gaps_s.append(fleet.gateway.records[0].longest_gap_s)
        note = f"{tokens[1]:,} of {tokens[0]:,} tokens in {until_s:g} s"
        note += f"; longest gap of the stream beside lines of B {gaps_s[1]:.3f} s, of A {gaps_s[0]:.3f} s"
        targets.append(
            Target(
                name=f"offline tokens of B beside a stream of A, over those of A: {name}",
                value=tokens[1] / max(1, tokens[0]), limit=LEAST_OFFLINE, is_least=True, note=note,
            )
        )  # fmt: skip
    return targets


def high(sizes: Sizes, seed: int) -> list[Target]:
    own, other = model_names(2)
    draw = np.random.default_rng([seed, 1])
    jobs = [Job(0.0, 200, 1000, model=other), Job(2.0, 200, 6000, is_high=True, model=own)]
    late = [4.0 + 2.0 * number + draw.uniform() for number in range(sizes.num_prompts)]
    jobs += [Job(at_s, int(draw.integers(100, 3000)), 20, model=other) for at_s in late]
    fleet = one_instance(jobs, late[-1] + 10.0, seed, noise=sizes.noise)
    stream, urgent, *prompts = fleet.gateway.records
    note = f"the high stream's {1000 * (urgent.tpot_s or math.inf):.0f} ms in the mean, {urgent.longest_gap_s:.3f} s at most"
    return [
        Target(
            name="first token of normal prompts of B beside a high stream of A", value=most_ttft_s(prompts),
            limit=ONE.ttft_s, unit=" s",
        ),
        Target(
            name="longest gap of a normal stream of B beside a high stream of A", value=stream.longest_gap_s,
            limit=ONE.tpot_s, unit=" s", note=note,
        ),
    ]  # fmt: skip


def stages(sizes: Sizes, seed: int) -> list[Target]:
    own, _ = model_names(2)
    draw = np.random.default_rng([seed, 2])
    targets = []
    for num, limit_s in MOST_TTFT_S.items():
        times = [2.0 + 1.4 * number + draw.uniform() for number in range(sizes.num_prompts)]
        jobs = [*(Job(at_s, 64, 8, model=own) for at_s in times), *lines(own, 2 * sizes.num_lines, 4096, 64, 0.0)]
        fleet = one_instance(jobs, times[-1] + 5.0, seed, noise=sizes.noise, num_stages=num)
        tokens = fleet.instances["instance-0"].engine.counters.harvested_tokens
        targets.append(
            Target(
                name=f"first token of online requests beside offline lines, {num} stage{'s' * (num > 1)}",
                value=most_ttft_s(fleet.gateway.records[: len(times)]), limit=limit_s, unit=" s",
                note=f"{tokens / fleet.events.now:,.0f} offline tokens/s",
            )
        )  # fmt: skip
    return targets


def conversations(num: int, seed: int) -> list[Job]:
    """Turns that repeat all before them; all begin within ten seconds."""
    draw, jobs = np.random.default_rng([seed, 3]), list[Job]()
    for text, at_s in enumerate(draw.uniform(0.0, 10.0, num)):
        context = 0
        for _ in range(TURNS):
            context += int(draw.integers(200, 800))
            answer = int(draw.integers(50, 150))
            jobs.append(Job(float(at_s), context, answer, texts=((text, context),)))
            context += answer
            at_s += 6.0 + draw.exponential(10.0)
    return sorted(jobs, key=lambda job: job.at_s)


def prefixes(sizes: Sizes, seed: int) -> list[Target]:
    def run(device: Device, num: int) -> tuple[float, float]:
        """Cached share of the prompts, mean time to first token."""
        records = Cluster(device, SYSTEM, jobs, num_instances=num, noise=sizes.noise, seed=seed).run().records
        share = sum(one.num_cached_tokens for one in records) / sum(one.prompt_tokens for one in records)
        return share, float(np.mean([one.ttft_s for one in records]))

    jobs, num = conversations(sizes.num_conversations, seed), sizes.num_instances
    share, ttft_s = run(A100, num)
    most, least_s = run(merged_device(A100, num), 1)
    where = f"{sizes.num_conversations} conversations on {num} instances"
    return [
        Target(
            name=f"cached share of prompts over that of one large instance, {where}", value=share / most,
            limit=LEAST_SHARE, is_least=True, note=f"{share:.3f} of {most:.3f}",
        ),
        Target(
            name=f"mean time to first token, {where}", value=1000 * ttft_s, limit=1000 * MOST_MEAN_TTFT_S, unit=" ms",
            note=f"one large instance: {1000 * least_s:.0f} ms",
        ),
    ]  # fmt: skip


def scaling(sizes: Sizes, seed: int) -> list[Target]:
    """Prompts that take 0.3 s, in pools that they hardly fill."""
    begin_s, end_s = sizes.constant_s, sizes.constant_s + sizes.step_s
    each_s, draw = prompt_s(A100.cost_model.prompt_cost, 6000), np.random.default_rng([seed, 4])
    jobs = [
        Job(at_s, 6000, 20)
        for load, since_s, until_s in ((LOADS[0], 0.0, begin_s), (LOADS[1], begin_s, end_s))
        for at_s in np.sort(draw.uniform(since_s, until_s, int(load / each_s * (until_s - since_s)))).tolist()
    ]
    system = msgspec.structs.replace(SYSTEM, scheduler={"max_instances": 12})
    needed = [math.ceil(load / MOST_WORK) for load in LOADS]
    cluster = Cluster(A100, system, jobs, num_instances=needed[0], noise=sizes.noise, seed=seed, start_s=10.0)
    fleet = cluster.fleet
    changes, serving, carry_out = list[tuple[float, int]](), list[tuple[float, int]](), fleet.scale
    assert carry_out is not None

    def scale(action: ScalingAction) -> list[str]:
        changes.append((fleet.events.now, -1 if isinstance(action, DrainAction) else 1))
        return carry_out(action)

    def look() -> None:
        num = sum(one.state == "ready" for one in fleet.instances.values())
        serving.append((fleet.events.now, num))
        fleet.events.after(1.0, look)

    fleet.scale = scale
    fleet.events.after(0.0, look)
    for job in cluster.jobs:
        fleet.submit_at(job)
    fleet.events.run(lambda: False, end_s)
    before, after = (
        [direction for direction, _ in groupby(way for at_s, way in changes if (at_s >= begin_s) is is_after)]
        for is_after in (False, True)
    )
    reached_s = next((at_s for at_s, num in serving if at_s >= begin_s and num >= needed[1]), math.inf) - begin_s
    return [
        Target(
            name="changes of direction of autoscaling at a constant load", value=max(0, len(before) - 1), limit=0,
            note=f"{sum(at_s < begin_s for at_s, _ in changes)} changes in {begin_s:g} s",
        ),
        Target(
            name=f"time until the {needed[1]} instances serve that a step of load needs", value=reached_s,
            limit=MOST_GROWTH_S, unit=" s", note=f"from {needed[0]}; an instance starts in 10 s",
        ),
        Target(
            name="changes of direction after the step (up, and once down again)", value=max(0, len(after) - 1), limit=1,
            note=f"{serving[-1][1]} instances at the end",
        ),
    ]  # fmt: skip


SCENARIOS: dict[str, Callable[[Sizes, int], list[Target]]] = {
    "offline": offline, "high": high, "stages": stages, "prefixes": prefixes, "scaling": scaling,
}  # fmt: skip


def measure(names: Iterable[str], sizes: Sizes, seeds: Sequence[int]) -> tuple[list[Target], list[list[str]]]:
    """The worst of the seeds, and rows of a table with the values of all."""
    worst, rows = list[Target](), list[list[str]]()
    for name in names:
        for of_seeds in zip(*(SCENARIOS[name](sizes, seed) for seed in seeds), strict=True):
            pick = min if of_seeds[0].is_least else max
            worst.append(pick(of_seeds, key=lambda one: one.value))
            values = ", ".join(f"{one.value:.3g}" for one in of_seeds)
            asked = f"{'at least' if worst[-1].is_least else 'at most'} {worst[-1].limit:g}{worst[-1].unit}"
            rows.append([name, worst[-1].name, f"{values}{worst[-1].unit}", asked])
            print(worst[-1], flush=True)
    return worst, rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.authority", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default=",".join(SCENARIOS), help="comma-separated")
    parser.add_argument("--seed", type=int, default=101, help="the first one")
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=Sizes().noise, help="of step times")
    parser.add_argument("--live", action="store_true", help="on the real system instead")
    parser.add_argument("--stream-tokens", type=int, default=authority_live.Sizes().stream_tokens,
                        help="of a stream of A, with --live: fewer where the machine is busy")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(SCENARIOS)}")
    before, date = machine(), time.strftime("%Y-%m-%d")
    if options.live:
        targets, rows = authority_live.measure(authority_live.Sizes(stream_tokens=options.stream_tokens))
        print(*targets, sep="\n")
        stem, title = f"authority-live-{date}", "on the real system"
    else:
        seeds = range(options.seed, options.seed + options.num_seeds)
        targets, rows = measure(names, Sizes(noise=options.noise), seeds)
        stem, title = f"authority-{date}", f"in virtual time, seeds {', '.join(map(str, seeds))}"
    text = "\n".join([
        f"# Order of authority, {date}", "", f"{title}; {before}", "",
        *table(["scenario", "figure", "value", "to compare"], rows), "", *map(str, targets),
    ])  # fmt: skip
    result = {"date": date, "machine": {"before": before, "after": machine()}, "rows": rows, "targets": judged(targets)}
    print(f"written: {write(options.output, stem, result, text)}.json, .md")
    return 0 if all(target.is_met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
