"""Requests whose prompts begin alike, over a cluster: how much of the prompts is cached, beside one instance that has all
the memory and all the speed, and how soon first tokens come.

python -m bench.prefixes [--shapes conversations,systems,trees] [--instances 4,8] [--load 0.3] [--pool 1.0] [--restart]
                         [--drain] [--fetch] [--device a100] [--seed N] [--num-seeds N]

In virtual time, with the real scheduler's core and engine on the shape of LLaMA-7B on an A100, or on another of
`bench/rebalance/cluster.py`. Shapes: `conversations` of six turns; `systems`: questions under a few system prompts of
different popularity; `trees`: agents that branch off each other's histories.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.rebalance.cluster import A100, DEVICES, Cluster, Device, System
from bench.reporting import met
from shared.costs.model import CostModel
from shared.simulation.gateway import Job

LEAST_SHARE = 0.9
"""The cached share to be reached, over that of one instance with the memory of all."""
MOST_TTFT = 1.02
"""The P99 of first tokens allowed, over that of the system which knows no prefix when it dispatches."""
DURATION_S = 60.0
TURNS, THINKING_S = 6, 8.0
NUM_SYSTEMS = 24
WARM_SHARE = 0.2
"""Requests at the start that fill the caches and are not counted."""


def conversations(rate_rps: float, draw: np.random.Generator) -> list[Job]:
    """Each turn repeats all before it: 200 to 800 tokens are new."""
    jobs: list[Job] = []
    for text, at_s in enumerate(draw.uniform(0.0, DURATION_S, max(1, int(rate_rps * DURATION_S / TURNS)))):
        context = 0
        for _ in range(TURNS):
            context += int(draw.integers(200, 800))
            answer = int(draw.integers(50, 150))
            jobs.append(Job(float(at_s), context, answer, texts=((text, context),)))
            context += answer
            at_s += answer * 0.02 + draw.exponential(THINKING_S)
    return jobs


def systems(rate_rps: float, draw: np.random.Generator) -> list[Job]:
    """The popularity of system prompts, of 500 to 3,000 tokens, falls as one over their rank."""
    lengths = draw.integers(500, 3000, NUM_SYSTEMS)
    popularity = 1.0 / np.arange(1, NUM_SYSTEMS + 1)
    num = int(rate_rps * DURATION_S)
    chosen = draw.choice(NUM_SYSTEMS, num, p=popularity / popularity.sum())
    return [
        Job(
            float(at_s), int(lengths[text] + draw.integers(50, 600)), int(draw.integers(50, 150)),
            texts=((int(text), int(lengths[text])),),
        )
        for at_s, text in zip(draw.uniform(0.0, DURATION_S, num), chosen, strict=True)
    ]  # fmt: skip


def trees(rate_rps: float, draw: np.random.Generator) -> list[Job]:
    """Agents begin with one of a few roots of 1,500 tokens; each step of theirs goes on from a node that exists, an early
    one as likely as a late one, with 100 to 600 tokens of its own."""
    jobs: list[Job] = []
    num_steps, next_text = 12, 100_000
    for at_s in draw.uniform(0.0, DURATION_S, max(1, int(rate_rps * DURATION_S / num_steps))):
        nodes: list[tuple[tuple[int, int], ...]] = [((int(draw.integers(4)), 1500),)]
        for _ in range(num_steps):
            path = nodes[int(draw.integers(len(nodes)))]
            next_text += 1
            path = (*path, (next_text, int(draw.integers(100, 600))))
            tokens = sum(num for _, num in path)
            if tokens < A100.max_length - 400:
                answer = int(draw.integers(30, 120))
                jobs.append(Job(float(at_s), tokens, answer, texts=path))
                nodes.append((*path[:-1], (next_text, path[-1][1] + answer)))
            at_s += draw.exponential(2.0)
    return jobs


SHAPES: dict[str, Callable[[float, np.random.Generator], list[Job]]] = {
    "conversations": conversations,
    "systems": systems,
    "trees": trees,
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    cached_share: float
    """Cached tokens of prompts over all tokens of prompts."""
    mean_ttft_s: float
    p99_ttft_s: float
    num_migrations: int
    moved_bytes: int
    """KV that moves copied."""
    fetches: dict[str, int]
    """How fetches of prefixes ended."""
    held_bytes: int
    """KV of requests that moved which their destinations had already."""


def run(
    jobs: Sequence[Job],
    device: Device,
    system: System,
    num_instances: int,
    seed: int,
    *,
    restarts: bool = False,
    drains: bool = False,
) -> Result:
    """`restarts`: half of the instances die, one after the other, and an empty one comes in the place of each. `drains`: the
    first half of the instances is emptied one after the other, and stays so until the next one is."""
    cluster = Cluster(device, system, jobs, num_instances=num_instances, seed=seed)
    fleet = cluster.fleet
    if restarts:
        simulated, models = device.simulated(system.order), device.models(1)

        def restart(number: int) -> None:
            fleet.fail(f"instance-{number}")
            fleet.add_instance(f"instance-{number}-again", simulated, models, start_s=2.0)

        for number in range(num_instances // 2):
            fleet.events.at(DURATION_S * (number + 1) / (num_instances // 2 + 1), lambda n=number: restart(n))
    if drains:

        def drain(number: int) -> None:
            if number:
                fleet.undrain(f"instance-{number - 1}")
            fleet.drain(f"instance-{number}")

        for number in range(num_instances // 2):
            fleet.events.at(DURATION_S * (number + 1) / (num_instances // 2 + 1), lambda n=number: drain(n))
    cluster.run()
    records = cluster.records[int(WARM_SHARE * len(jobs)) :]
    ttfts_s = [record.ttft_s for record in records]
    return Result(
        cached_share=sum(r.num_cached_tokens for r in records) / sum(r.prompt_tokens for r in records),
        mean_ttft_s=float(np.mean(ttfts_s)),
        p99_ttft_s=float(np.percentile(ttfts_s, 99)),
        num_migrations=sum(record.num_migrations for record in records),
        moved_bytes=cluster.migrations.num_bytes,
        fetches=dict(cluster.migrations.fetched),
        held_bytes=cluster.migrations.num_held_blocks * device.block_bytes,
    )


def merged_device(device: Device, num: int) -> Device:
    """One device with the memory and the speed of `num`."""
    cost = device.cost_model
    fields = {
        name: getattr(cost, name) / num
        for name in ("prefill_token_s", "prefill_attention_s", "decode_s", "decode_context_s", "over_knee_s")
    }
    faster: CostModel = msgspec.structs.replace(cost, **fields)
    return msgspec.structs.replace(
        device, cost_model=faster, num_blocks=num * device.num_blocks, num_rows=num * device.num_rows,
        max_step_tokens=num * device.max_step_tokens,
    )  # fmt: skip


def capacity_rps(jobs: Sequence[Job], device: Device) -> float:
    """Requests per second that one instance prefills and decodes, if nothing is cached and 64 run beside each other."""
    cost = device.cost_model
    prefill_s = np.mean([cost.prefill_token_s * job.prompt_tokens for job in jobs])
    decode_s = np.mean([job.output_tokens for job in jobs]) * (cost.fixed_s / 64 + cost.decode_s)
    return float(1.0 / (prefill_s + decode_s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefixes", description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated")
    parser.add_argument("--instances", default="4,8", help="comma-separated")
    parser.add_argument("--load", type=float, default=0.3, help="of what the instances could do without a cache")
    parser.add_argument("--pool", type=float, default=1.0, help="KV blocks of an instance, times those of the device")
    parser.add_argument("--device", default="a100", choices=DEVICES)
    parser.add_argument("--restart", action="store_true", help="half of the instances die and come again, empty")
    parser.add_argument("--drain", action="store_true", help="half of the instances are emptied, one after the other")
    parser.add_argument("--fetch", action="store_true", help="one more system, in which prefixes travel")
    parser.add_argument("--seed", type=int, default=301, help="the first one")
    parser.add_argument("--num-seeds", type=int, default=1)
    options = parser.parse_args(arguments)
    device = DEVICES[options.device]
    device = msgspec.structs.replace(device, num_blocks=int(options.pool * device.num_blocks))
    missed = 0
    for name in options.shapes.split(","):
        for num in map(int, options.instances.split(",")):
            for seed in range(options.seed, options.seed + options.num_seeds):
                profile = SHAPES[name](20.0, np.random.default_rng([seed, 1]))
                rate = options.load * num * capacity_rps(profile, device)
                jobs = sorted(SHAPES[name](rate, np.random.default_rng(seed)), key=lambda job: job.at_s)
                one = run(jobs, merged_device(device, num), System(name="one"), 1, seed)
                compared = [System(name="tideway"), System(name="freeness", dispatch="freeness")]
                compared += [System(name="fetches", fetches=True)] if options.fetch else []
                rows = {
                    system.name: run(jobs, device, system, num, seed, restarts=options.restart, drains=options.drain)
                    for system in compared
                }
                ours, blind = rows["tideway"], rows["freeness"]
                is_shared = options.restart or ours.cached_share >= LEAST_SHARE * one.cached_share
                is_balanced = ours.p99_ttft_s <= MOST_TTFT * blind.p99_ttft_s
                missed += not (is_shared and is_balanced)
                print(f"{name}, {num} instances, seed {seed}, {len(jobs)} requests at {rate:.1f}/s")
                for system_name, row in {"one": one, **rows}.items():
                    print(
                        f"  {system_name:10} cached {row.cached_share:.3f}  TTFT mean {1000 * row.mean_ttft_s:.0f} ms, "
                        f"P99 {1000 * row.p99_ttft_s:.0f} ms  moves {row.num_migrations}, "
                        f"{row.moved_bytes / 1e9:.1f} GB copied, {row.held_bytes / 1e9:.1f} GB were there"
                        + (f"  fetches {row.fetches}" if row.fetches else ""),
                        flush=True,
                    )
                print(f"  {met(is_shared)} cached share   {met(is_balanced)} P99 TTFT", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
