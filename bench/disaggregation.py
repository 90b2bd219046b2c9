"""Prefill and decode apart: requests that meet their objectives, and the longest times between tokens, with the instances of
a fleet all alike, with fixed roles, and with roles that follow the load.

python -m bench.disaggregation [--shapes prefill,decode,mixed] [--devices a100,h100] [--instances 4,8]
                               [--loads 0.5,0.7,0.9] [--duration S] [--ttft-ms MS] [--tpot-ms MS] [--seed N]
                               [--traces FOLDER]

In virtual time, with the real scheduler's core, engines and migrations on the shape of LLaMA-7B on an A100, and with
`--devices h100` on that of Llama-3.1-8B on an H100. Shapes:
`prefill`: long prompts and short answers; `decode`: short prompts and long answers; `mixed`: chats with a few long prompts
between them. With `--traces` also the lengths of `sharegpt_8k_lengths.csv`, `azure_llm_2023_conv.csv` and
`mooncake_conversation.jsonl`, where the folder has them: their requests in a drawn order, cut to what the device takes.
Arrivals are a Poisson process. A load is a share of what the instances could do if prompts and 64 streams beside each other
took all their time. Fixed roles are shared out as the shape's prompts and answers take time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from bench.rebalance.cluster import DEVICES, Cluster, Device, System
from bench.reporting import met
from shared.messages.cluster import Role
from shared.simulation.gateway import Job
from tideway.bench.traces import read_trace

LEAST_GOODPUT = 1.0
"""Goodput that adaptive roles are to have, over that of instances that are all alike."""
MOST_ITL = 0.5
"""The P99 of times between tokens that they may have beside long prompts, likewise."""
WARM_SHARE = 0.1
"""Requests at the start that are not counted, and times between tokens until then: roles follow what has been seen."""
NUM_STREAMS = 64
"""Streams that share a decode step where capacity is reckoned."""
NOISE = 0.01
"""Share by which a goodput may be lower and count as equal: requests that chance makes late."""
TRACES = ("sharegpt_8k_lengths.csv", "azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")

Lengths = Callable[[int, np.random.Generator], np.ndarray]
"""[n, 2] int: prompts and answers."""


def _between(prompts: tuple[int, int], answers: tuple[int, int]) -> Lengths:
    def draw(num: int, rng: np.random.Generator) -> np.ndarray:
        return np.stack([rng.integers(*prompts, num), rng.integers(*answers, num)], axis=1)

    return draw


def _mixed(num: int, rng: np.random.Generator) -> np.ndarray:
    chats, long = SHAPES["decode"](num, rng), SHAPES["prefill"](num, rng)
    return np.where(rng.random((num, 1)) < 0.15, long, chats)


SHAPES: dict[str, Lengths] = {
    "prefill": _between((3000, 8000), (40, 160)),
    "decode": _between((50, 500), (150, 600)),
    "mixed": _mixed,
}


def _trace(path: Path, most: int) -> Lengths:
    trace = read_trace(path)
    known: np.ndarray = np.clip(np.stack([trace.prompt_tokens, trace.output_tokens], axis=1), 2, most)

    def draw(num: int, rng: np.random.Generator) -> np.ndarray:
        return known[rng.integers(len(known), size=num)]

    return draw


def traces(folder: Path, most: int) -> dict[str, Lengths]:
    """The traces that the folder has. `most`: tokens of a prompt and of an answer."""
    files = [folder / name for name in TRACES]
    return {file.name.partition("_")[0]: _trace(file, most) for file in files if file.is_file()}


def work_s(lengths: np.ndarray, device: Device) -> tuple[float, float]:
    """Mean seconds that prompt and answer of a request take of an instance."""
    cost, (prompts, answers) = device.cost_model, lengths.T
    per_token, per_pair = cost.prompt_cost
    prefill_s = per_token * prompts + per_pair * prompts**2 / 2
    decode_s = answers * (cost.fixed_s / NUM_STREAMS + cost.decode_cost_s(0) + cost.decode_context_s * prompts)
    return float(prefill_s.mean()), float(decode_s.mean())


def draw_jobs(
    lengths: Lengths, device: Device, num_instances: int, load: float, duration_s: float, rng: np.random.Generator
) -> tuple[list[Job], float, int]:
    """Requests, their rate per second, and how many instances have the fixed role prefill, by the share of prompts."""
    prefill_s, decode_s = work_s(lengths(4096, rng), device)
    rate_rps = load * num_instances / (prefill_s + decode_s)
    at_s = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * duration_s)))
    pairs = lengths(len(at_s), rng)
    jobs = [Job(float(at), int(p), int(a)) for at, (p, a) in zip(at_s, pairs, strict=True)]
    share = prefill_s / (prefill_s + decode_s)
    return jobs, rate_rps, min(num_instances - 1, max(1, round(num_instances * share)))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    goodput_rps: float
    """Requests that met both objectives, per second of arrivals."""
    share: float
    """Those, as a share of all that are counted."""
    p99_ttft_s: float
    p99_itl_s: float
    num_handoffs: int
    """Requests that moved, most of them after their prompts."""
    num_roles: int
    """Changes of roles."""


def run(
    jobs: Sequence[Job], device: Device, system: System, num_instances: int, seed: int, num_prefill: int = 0
) -> Result:
    """`num_prefill`: instances whose fixed role is prefill; the others decode. 0: roles are not fixed."""
    cluster = Cluster(device, system, jobs, num_instances=num_instances, seed=seed)
    fleet = cluster.fleet
    for number, instance in enumerate(fleet.instances.values()):
        if num_prefill:
            instance.role = Role.PREFILL if number < num_prefill else Role.DECODE
            instance.is_role_fixed = True
            fleet.register(instance)
    begin_s = jobs[int(WARM_SHARE * len(jobs))].at_s
    for itl in cluster.gateway.itl.values():
        fleet.events.at(begin_s, itl.clear)
    cluster.run()
    records = cluster.records[int(WARM_SHARE * len(jobs)) :]
    good = [r for r in records if r.ttft_s <= device.ttft_s and (r.tpot_s or 0.0) <= device.tpot_s]
    seconds = records[-1].arrival_s - records[0].arrival_s
    return Result(
        goodput_rps=len(good) / seconds,
        share=len(good) / len(records),
        p99_ttft_s=float(np.percentile([record.ttft_s for record in records], 99)),
        p99_itl_s=cluster.gateway.itl_of().summary().p99,
        num_handoffs=sum(record.num_migrations for record in records),
        num_roles=fleet.num_role_changes,
    )


SYSTEMS = (
    System(name="alike", scheduler={"roles": "off"}),
    System(name="fixed", scheduler={"roles": "fixed"}),
    System(name="adaptive", scheduler={"roles": "adaptive"}),
)


HEAD = """\
| device | shape | instances | load | goodput, 1/s: alike | fixed | adaptive | over alike | P99 ITL, ms: alike | fixed \
| adaptive | over alike | P99 TTFT, ms: alike | fixed | adaptive | handoffs and moves | roles |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def line(cell: str, rows: dict[str, Result]) -> tuple[str, float]:
    """A row of the table, and the goodput of adaptive roles over that of instances that are alike."""
    alike, adaptive = rows["alike"], rows["adaptive"]
    ratio = adaptive.goodput_rps / alike.goodput_rps if alike.goodput_rps else 1.0
    itl_ratio = adaptive.p99_itl_s / alike.p99_itl_s
    of_all = rows.values()
    told = [
        *(f"{row.goodput_rps:.2f} ({row.share:.3f})" for row in of_all),
        f"{ratio:.2f} {met(ratio >= LEAST_GOODPUT - NOISE)}",
        *(f"{1000 * row.p99_itl_s:.0f}" for row in of_all),
        f"{itl_ratio:.2f} {met(itl_ratio <= MOST_ITL)}",
        *(f"{1000 * row.p99_ttft_s:.0f}" for row in of_all),
        f"{adaptive.num_handoffs}",
        f"{adaptive.num_roles}",
    ]
    return f"| {cell} | {' | '.join(told)} |", ratio


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.disaggregation", description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated")
    parser.add_argument("--devices", default="a100", help=f"comma-separated, of {', '.join(DEVICES)}")
    parser.add_argument("--instances", default="4,8", help="comma-separated")
    parser.add_argument("--loads", default="0.5,0.7,0.9", help="comma-separated")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=401)
    parser.add_argument("--traces", type=Path, help="folder of traces, whose shapes are run besides")
    options = parser.parse_args(arguments)
    ratios = []
    print(HEAD)
    for device_name in options.devices.split(","):
        objectives = {"ttft_s": options.ttft_ms / 1000, "tpot_s": options.tpot_ms / 1000}
        device = msgspec.structs.replace(DEVICES[device_name], **objectives)
        shapes = {name: SHAPES[name] for name in options.shapes.split(",") if name}
        if options.traces is not None:
            shapes |= traces(options.traces, device.max_length)
        numbers, loads = map(int, options.instances.split(",")), map(float, options.loads.split(","))
        for (name, lengths), num, load in product(shapes.items(), numbers, loads):
            rng = np.random.default_rng([options.seed, num])
            jobs, _, num_prefill = draw_jobs(lengths, device, num, load, options.duration, rng)
            rows = {
                system.name: run(jobs, device, system, num, options.seed, num_prefill if system.name == "fixed" else 0)
                for system in SYSTEMS
            }
            told, ratio = line(f"{device.name} | {name} | {num} | {load}", rows)
            ratios.append(ratio)
            print(told, flush=True)
    print(f"\ngoodput of adaptive roles over that of instances alike: {min(ratios):.2f} to {max(ratios):.2f}")
    return 1 if min(ratios) < LEAST_GOODPUT - NOISE else 0


if __name__ == "__main__":
    sys.exit(main())
