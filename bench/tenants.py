"""One tenant floods the cluster, another asks one request at a time: what the flood does to the other's first tokens.

python -m bench.tenants [--device a10|a100|cpu] [--models] [--instances N] [--seed N] [--num-seeds N] [--duration S]

In virtual time, with the real scheduler's core and engine. The other tenant asks the same requests at the same distances
with and without the flood; its first request, which no instance could expect, is told apart. Floods: `chats` of medium
length, long `prompts` with short answers, short prompts with long answers that fill the `memory`; each comes twice as fast
as all instances can serve. With `--models` both are one tenant, and the other asks another model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from bench.rebalance.cluster import DEVICES, Cluster, Device, System, model_names
from bench.reporting import met
from shared.costs.model import StepShape, prompt_s
from shared.simulation.gateway import MODEL, Job, Record
from tideway.bench.arrivals import renewal_times

MOST_RATIO = 1.3
FLOOD, OTHER = "flood", "other"
FLOODS = {"chats": ((100, 600), (100, 400)), "prompts": ((1500, 4000), (10, 60)), "memory": ((50, 200), (500, 1500))}
"""Tokens of prompts and answers, least and most."""
OTHER_PROMPTS, OTHER_OUTPUTS = (100, 2000), (20, 150)
THINKING_S = 2.0
"""Mean time between an answer and the next question."""
FLOOD_FACTOR = 2.0
"""Arrivals of the flood over what the instances can serve."""
WARM_S = 20.0
"""Before the other tenant's first request."""


class Asker:
    """The other tenant: each request follows the answer to the last, after a pause that does not depend on it."""

    def __init__(self, cluster: Cluster, device: Device, until_s: float, seed: int, *, of_models: bool) -> None:
        self._fleet, self._until_s = cluster.fleet, until_s
        self._tenant, self._model = (FLOOD, model_names(2)[1]) if of_models else (OTHER, MODEL)
        self._draw = np.random.default_rng([seed, 1])
        self._device = device
        self.numbers: list[int] = []
        self._fleet.events.at(WARM_S, self._ask)

    def _ask(self) -> None:
        now = self._fleet.events.now
        job = Job(
            now, *_lengths(self._draw, OTHER_PROMPTS, OTHER_OUTPUTS, self._device), tenant=self._tenant,
            model=self._model, max_tokens=self._device.max_length + 1,
        )  # fmt: skip
        number = self._fleet.gateway.expect(job, self._answered)
        self.numbers.append(number)
        self._fleet.gateway.send(number)

    def _answered(self, _number: int) -> None:
        pause_s = float(self._draw.exponential(THINKING_S))
        if self._fleet.events.now + pause_s < self._until_s:
            self._fleet.events.after(pause_s, self._ask)


def _lengths(
    draw: np.random.Generator, prompts: tuple[int, int], outputs: tuple[int, int], device: Device
) -> tuple[int, int]:
    scale = min(1.0, device.max_length / 6000)
    return int(scale * draw.integers(*prompts)), int(draw.integers(*outputs))


def flood(kind: str, device: Device, num_instances: int, duration_s: float, seed: int) -> list[Job]:
    """Poisson arrivals, `FLOOD_FACTOR` times what the instances can serve at their best."""
    draw, (prompts, outputs) = np.random.default_rng([seed, 2]), FLOODS[kind]
    mean_prompt, mean_output = np.mean(prompts) * min(1.0, device.max_length / 6000), np.mean(outputs)
    cost, mean_context = device.cost_model, mean_prompt + mean_output / 2
    num_rows = min(device.num_rows, int(device.pool_tokens / mean_context))
    decode_s = cost.predict(StepShape(0, 0.0, num_rows, int(num_rows * mean_context))) / num_rows
    request_s = prompt_s(cost.prompt_cost, int(mean_prompt)) + mean_output * decode_s
    rate = FLOOD_FACTOR * num_instances / request_s
    times = renewal_times([(np.inf, rate)], 1.0, draw, num_requests=max(1, int(rate * duration_s)))
    return [
        Job(at_s, *_lengths(draw, prompts, outputs, device), tenant=FLOOD, timeout_s=1e5) for at_s in times.tolist()
    ]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """First tokens of the other tenant, in seconds, and what the flood got. Percentiles are inf where only one request was
    asked, as its answer took until the end."""

    first_s: float
    """The time to the first token of its first request, which the percentiles leave out."""
    p50_s: float
    p99_s: float
    num_requests: int
    flood_tokens_per_s: float
    """Output tokens of the flood."""


def run(
    kind: str | None, device: Device, num_instances: int, duration_s: float, seed: int, *, of_models: bool = False
) -> Result:
    """Runs the other tenant, or model, beside a flood of the `kind`; None: without one."""
    jobs = [] if kind is None else flood(kind, device, num_instances, duration_s, seed)
    num_models = 2 if of_models else 1
    cluster = Cluster(
        device, System(name="tideway"), jobs, num_instances=num_instances, num_models=num_models, num_asked=1, seed=seed
    )
    asker = Asker(cluster, device, duration_s, seed, of_models=of_models)
    fleet = cluster.fleet
    for job in cluster.jobs:
        fleet.submit_at(job)
    fleet.events.run(lambda: False, duration_s)
    records = fleet.gateway.records
    own: list[Record] = [records[number] for number in asker.numbers if records[number].first_s >= 0]
    late = [fleet.events.now - records[n].arrival_s for n in asker.numbers if records[n].first_s < 0]
    first_s, *ttfts = [record.ttft_s for record in own] + late
    p50_s, p99_s = np.percentile(ttfts, (50, 99)) if ttfts else (np.inf, np.inf)
    tokens = sum(record.num_tokens for number, record in enumerate(records) if number not in set(asker.numbers))
    return Result(
        first_s=first_s, p50_s=p50_s, p99_s=p99_s, num_requests=len(ttfts), flood_tokens_per_s=tokens / duration_s
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tenants", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="a100")
    parser.add_argument(
        "--models", action="store_true", help="a flood of one model, and one request at a time of another"
    )
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--seed", type=int, default=101, help="the first one")
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=300.0, help="of arrivals, in seconds of virtual time")
    parser.add_argument("--floods", default=",".join(FLOODS), help="comma-separated")
    options = parser.parse_args(arguments)
    device, missed = DEVICES[options.device], 0
    for seed in range(options.seed, options.seed + options.num_seeds):
        alone = run(None, device, options.instances, options.duration, seed, of_models=options.models)
        print(
            f"seed {seed}  no flood  P50 {alone.p50_s:.3f} s, P99 {alone.p99_s:.3f} s ({alone.num_requests})",
            flush=True,
        )
        for kind in options.floods.split(","):
            beside = run(kind, device, options.instances, options.duration, seed, of_models=options.models)
            ratio = beside.p99_s / alone.p99_s
            missed += ratio > MOST_RATIO
            print(
                f"seed {seed}  {kind:8}  P50 {beside.p50_s:.3f} s, P99 {beside.p99_s:.3f} s ({beside.num_requests}), "
                f"first {beside.first_s:.3f} s, "
                f"ratio {ratio:.2f} {met(ratio <= MOST_RATIO)} flood {beside.flood_tokens_per_s:.0f} tokens/s",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
