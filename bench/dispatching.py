"""What the scheduler's decisions cost: dispatches per second and time per load report, at 16 to 1024 instances.

No bus and no model: the core is driven directly with synthetic reports, so the figures are its share of one CPU core.

    python -m bench.dispatching [--instances 16 1024] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from random import Random

import msgspec

from shared.messages.cluster import InstanceInfo, LoadedModel, LoadReport, ModelLoad
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Dispatch
from shared.scheduling.calls import OnDispatched, OnRegistry, OnReport, Submit
from shared.scheduling.core import SchedulerCore

MODELS = ("llama", "opt")
PROMPT = pack_tokens(list(range(512)))
QUEUED = 2000
"""Requests that wait while reports of full instances come in."""


class Cluster:
    """A core and the instances that report to it; each holds at most `capacity` requests of a model."""

    def __init__(self, num_instances: int, policy: str, order: str, seed: int = 0) -> None:
        settings = SchedulerSettings(dispatch_policy=policy, order_policy=order, max_queued=10**9, lost_after_s=1e9)
        self.core = SchedulerCore(settings, term=1)
        self.now = 0.0
        self.random = Random(seed)
        self.names = [f"node-{number:04}" for number in range(num_instances)]
        self.sequences = dict.fromkeys(self.names, 0)
        self.num_requests = 0
        for name in self.names:
            models = [
                LoadedModel(name=model, state="ready", max_model_len=4096, block_size=16, blocks_per_merged=16)
                for model in MODELS
            ]
            self.core.apply(
                OnRegistry(
                    name,
                    InstanceInfo(
                        instance_id=name, incarnation="1", node_id="node", state="ready", models=models, num_merged=1000
                    ),
                ),
                self.now,
            )
            self.core.apply(OnReport(self.report(name)), self.now)
            state = self.core.cluster.get(name)
            assert state is not None
            state.has_answered = True
        self.core.actions(self.now)

    def report(self, name: str, *, num_waiting: int = 0, ids: tuple[str, ...] = ()) -> LoadReport:
        """Report after `ids` were admitted and ended."""
        self.sequences[name] += 1
        freeness = self.random.uniform(0.0, 60.0)
        loads = [
            ModelLoad(
                model=model,
                num_running=8,
                num_waiting=num_waiting,
                num_offline=0,
                num_waiting_online=num_waiting,
                decode_cost=(0.02, 0.0002),
            )
            for model in MODELS
        ]
        return LoadReport(
            instance_id=name,
            incarnation="1",
            sequence=self.sequences[name],
            dispatch_freeness=freeness,
            dispatch_freeness_high=freeness,
            migration_freeness=freeness,
            scaling_freeness=freeness,
            free_merged=500.0,
            num_running=16,
            models=loads,
            admitted=list(ids),
            ended=list(ids),
            finished=[],
        )

    def request(self) -> GenerationRequest:
        self.num_requests += 1
        model = MODELS[self.num_requests % len(MODELS)]
        return GenerationRequest(
            request_id=f"request-{self.num_requests}",
            gateway_id="gateway",
            model=model,
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=256),
        )

    def step(self) -> list[Dispatch]:
        self.now += 5e-5
        return [action for action in self.core.actions(self.now) if isinstance(action, Dispatch)]


def rate(operation: Callable[[], int], seconds: float) -> float:
    """Events per second of `operation`, which returns how many it made."""
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        count += operation()
    return count / elapsed


def dispatch_rate(cluster: Cluster, seconds: float) -> float:
    """Whole lives per second: submitted, dispatched, accepted, and its end reported."""

    def one() -> int:
        cluster.core.apply(Submit(cluster.request()), cluster.now)
        dispatches = cluster.step()
        for dispatch in dispatches:
            cluster.core.apply(OnDispatched.to(dispatch, None), cluster.now)
            report = cluster.report(dispatch.instance_id, ids=(dispatch.request.request_id,))
            cluster.core.apply(OnReport(report), cluster.now)
        return len(dispatches)

    return rate(one, seconds)


def full_cluster(cluster: Cluster) -> Cluster:
    """With requests that wait."""
    for name in cluster.names:
        cluster.core.apply(OnReport(cluster.report(name, num_waiting=9)), cluster.now)
    for _ in range(QUEUED):
        cluster.core.apply(Submit(cluster.request()), cluster.now)
    assert not cluster.step(), "every instance is full"
    return cluster


def queued_rate(cluster: Cluster, seconds: float) -> float:
    """Rate of dispatches in a queue of constant length: a request is submitted, an instance has room for one more of a
    model, and is full again."""

    def one() -> int:
        cluster.core.apply(Submit(cluster.request()), cluster.now)
        name = cluster.names[cluster.num_requests % len(cluster.names)]
        cluster.core.apply(OnReport(cluster.report(name, num_waiting=1)), cluster.now)
        dispatches = cluster.step()
        for dispatch in dispatches:
            cluster.core.apply(OnDispatched.to(dispatch, None), cluster.now)
        ids = tuple(dispatch.request.request_id for dispatch in dispatches)
        cluster.core.apply(OnReport(cluster.report(name, num_waiting=9, ids=ids)), cluster.now)
        return len(dispatches)

    return rate(one, seconds)


def report_seconds(cluster: Cluster, seconds: float, *, num_waiting: int) -> float:
    """Decoding and taking in one report, from all instances in turn."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(LoadReport)
    spent = 0.0
    count = 0
    while spent < seconds:
        batch = [encoder.encode(cluster.report(name, num_waiting=num_waiting)) for name in cluster.names]
        started = time.perf_counter()
        for body in batch:
            cluster.core.apply(OnReport(decoder.decode(body)), cluster.now)
            cluster.step()
        spent += time.perf_counter() - started
        count += len(batch)
    return spent / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--policy", default="first_token")
    parser.add_argument("--order", default="doubling_budget")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    arguments = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {platform.processor() or platform.machine()}, "
        f"policy {arguments.policy}, order {arguments.order}"
    )
    print(
        "| instances | requests/s | 2000 queued | report, nothing queued | report, 2000 queued, full | reports/s at most |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    for num_instances in arguments.instances:
        lives = dispatch_rate(Cluster(num_instances, arguments.policy, arguments.order), arguments.seconds)
        idle_s = report_seconds(
            Cluster(num_instances, arguments.policy, arguments.order), arguments.seconds, num_waiting=0
        )
        full = full_cluster(Cluster(num_instances, arguments.policy, arguments.order))
        queued = queued_rate(full, arguments.seconds)
        full = full_cluster(Cluster(num_instances, arguments.policy, arguments.order))
        full_s = report_seconds(full, arguments.seconds, num_waiting=9)
        worst = max(idle_s, full_s)
        print(
            f"| {num_instances} | {lives:,.0f} | {queued:,.0f} | {idle_s * 1e6:.1f} µs | {full_s * 1e6:.1f} µs "
            f"| {math.floor(1 / worst):,} |"
        )


if __name__ == "__main__":
    main()
