"""The variants on this machine: the whole stack over HTTP with three small models, three instances of one thread each,
people who wait and offline requests that fill what is left.

Dedicated instances: one for each model. Use is the instances' processor time over that of the machine."""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import msgspec
import numpy as np

from bench import emulated as emulation
from bench.coserving.testbed import make_checkpoint
from bench.fidelity.workloads import EMULATED_MODELS, MODELS, VOCABULARY, planned
from bench.reporting import processor_s
from bench.stack import add_tokenizer
from bench.unified.variants import MIX, Online, Row, Variant, placed, row
from shared.messages.requests import RequestClass
from shared.models.checkpoint import describe, resolve
from shared.placement.execution import execution_s as execution_s_of
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import HARDWARE
from shared.placement.plan import Plan
from shared.placement.problem import Problem, Traffic
from shared.simulation.itl import ItlHistogram
from tests.e2e.stack import Stack
from tideway.bench.arrivals import Closed
from tideway.bench.client import Target
from tideway.bench.lengths import Fixed
from tideway.bench.records import RequestRecord
from tideway.bench.session import Session, run_session
from tideway.bench.summary import tokens_within
from tideway.bench.workload import StreamSpec, Workload
from tideway.operations import AdminClient
from tideway.plan import carry_out
from tideway.plan_file import GroupSpec

NUM_INSTANCES = len(MODELS)
LINE_TOKENS = (256, 48)
WARM_UP_S = 4.0
"""Its requests are sent and not counted."""
PROFILE_TIMEOUT_S = 180.0
NODE, HISTORY_S = "worker-0", 60.0
REPLACEMENT_S = 10.0
"""Between searches: a run is short."""
MIGRATIONS = "scheduler-0", 'tideway_scheduler_moves_total{outcome="moved"'
CHANGES = "placement", 'tideway_placement_replacements_total{end="carried_out"'
"""Services and the counters of them."""


class Checkpoints:
    """Checkpoints of the three models; removed at the end. `emulated`: a kind of device whose step times they have
    (bench/emulated.py); "": this machine's."""

    def __init__(self, emulated: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tideway-unified-")
        self.emulated = emulated
        self.sources: dict[str, str] = {}

    def __enter__(self) -> Checkpoints:
        for name in MODELS:
            self.sources[name] = self.another(name, name)
        return self

    def another(self, name: str, model: str) -> str:
        """The folder of a checkpoint of its own, of the shape of one of the three."""
        number, shape = list(MODELS).index(model), MODELS[model]
        path = Path(self._folder.name) / name
        made = make_checkpoint(path, emulation.tiny(number, **shape) if self.emulated else shape)
        add_tokenizer(path, VOCABULARY)
        return str(made)

    def stack(
        self, num_instances: int, environment: dict[str, str], shapes: Mapping[str, str] = EMULATED_MODELS
    ) -> Stack:
        """`shapes`: of models, where step times are emulated."""
        if not self.emulated:
            return Stack(self.sources, num_instances=num_instances, environment=environment)
        environment = environment | emulation.environment(Path(self._folder.name), self.emulated, shapes)
        return Stack(self.sources, num_instances=num_instances, environment=environment, worker=emulation.WORKER)

    def profile(self) -> None:
        """Stores the step times of all: where they are not known an instance measures them between requests, and the rows
        before it comes to its end would have less of the machine and worse knowledge than those after."""
        stored = Path(self._folder.name) / "cost_models"
        with self.stack(1, {"TIDEWAY_NUM_THREADS": "1"}) as stack:
            stack.wait_until(
                lambda: len(list(stored.rglob("*.json"))) == len(self.sources), "step times of all", PROFILE_TIMEOUT_S
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._folder.cleanup()


def environment(variant: Variant, sources: dict[str, str]) -> dict[str, str]:
    """What makes `tideway up` this variant."""
    models = [
        {"name": name, "source": source} | ({"replicas": 1} if variant.placement == "dedicated" else {})
        for name, source in sources.items()
    ]
    return {
        "TIDEWAY_NUM_THREADS": "1",
        "TIDEWAY_MODELS": json.dumps(models),
        "TIDEWAY_ORDER_POLICY": variant.order_policy,
        "TIDEWAY_DISPATCH_POLICY": variant.dispatch_policy,
        "TIDEWAY_CO_SERVING": variant.co_serving,
        "TIDEWAY_INTERRUPTION": variant.interruption,
        "TIDEWAY_MIGRATION": variant.migration,
        "TIDEWAY_LEAST_SHARE": str(variant.least_share),
        "TIDEWAY_REPLACEMENT": "auto" if variant.is_adaptive else "off",
        "TIDEWAY_REPLACEMENT_INTERVAL_S": str(REPLACEMENT_S),
        "TIDEWAY_REPLACEMENT_LEAST_S": str(REPLACEMENT_S),
    } | ({"TIDEWAY_REPLACEMENT_MOST_S": str(REPLACEMENT_S)} if variant.is_interval_fixed else {})


def problem(checkpoints: Checkpoints, rate_rps: float, seed: int) -> Problem:
    """The problem by which a baseline's placement is chosen: the stack's one node under traffic of the kind that comes."""
    hardware = HARDWARE[checkpoints.emulated or "cpu"]
    models = [
        model_facts(
            name, SHAPES[EMULATED_MODELS[name]] if checkpoints.emulated else describe(resolve(source)), [hardware]
        )
        for name, source in checkpoints.sources.items()
    ]
    names, requests = tuple(checkpoints.sources), planned(MIX, rate_rps, HISTORY_S, name="history", seed=seed + 1)
    traffic = Traffic(
        names, np.array([names.index(one.model) for one in requests], np.int32), np.array([one.at_s for one in requests]),
        np.array([one.prompt_tokens for one in requests], np.int32),
        np.array([one.output_tokens for one in requests], np.int32), np.ones(len(requests), np.bool_), HISTORY_S,
    )  # fmt: skip
    whole = Problem(nodes=(node_facts(NODE, hardware, NUM_INSTANCES),), models=tuple(models), traffic=traffic)
    return msgspec.structs.replace(whole, execution_s=execution_s_of(whole))


def set_plan(url: str, plan: Plan, wait_s: float = 60.0) -> None:
    """Carries it out. Raises `OperatorError`."""
    groups = [GroupSpec(node=one.node_id, devices=list(one.devices), models=list(one.models)) for one in plan.groups]
    with AdminClient(url) as client:
        carry_out(client, "set", groups, wait_s=wait_s, say=print)


def workload(variant: Variant, rate_rps: float, run_s: float, seed: int, num_lines: int) -> Workload:
    streams = [
        StreamSpec(
            name="online", models=MIX.models, arrivals=MIX.arrivals(rate_rps),
            prompt_tokens=MIX.prompt_tokens, output_tokens=MIX.output_tokens,
        )
    ]  # fmt: skip
    if variant.harvests:
        streams.append(
            StreamSpec(
                name="offline", request_class=RequestClass.OFFLINE, models=MIX.models,
                arrivals=Closed(concurrency=num_lines), num_requests=int(40 * run_s),
                prompt_tokens=Fixed(tokens=LINE_TOKENS[0]), output_tokens=Fixed(tokens=LINE_TOKENS[1]),
            )
        )  # fmt: skip
    return Workload(streams=streams, duration_s=WARM_UP_S + run_s, seed=seed)


def run(
    variant: Variant,
    checkpoints: Checkpoints,
    execution_s: dict[str, float],
    *,
    rate_rps: float,
    run_s: float,
    seed: int,
    num_lines: int,
) -> Row:
    """Fills in `execution_s` (mean time of each model's requests alone) where it is empty. `num_lines`: offline requests in
    flight."""
    with checkpoints.stack(NUM_INSTANCES, environment(variant, checkpoints.sources)) as stack:
        stack.wait_until(lambda: _is_ready(stack, variant), "each model where it is to be")
        if variant.placement in ("alpaserve", "muxserve"):
            set_plan(stack.url, placed(variant, problem(checkpoints, rate_rps, seed)))
        if not execution_s:
            execution_s |= _alone_s(stack.url)
        busy_s, began_s, placed_before = _busy_s(stack), time.monotonic(), _counted(stack, *CHANGES)
        session = Session(target=_target(stack.url), drain_s=30.0, warmup_s=WARM_UP_S)
        result = asyncio.run(run_session(session, workload(variant, rate_rps, run_s, seed, num_lines)))
        seconds = time.monotonic() - began_s
        use = (_busy_s(stack) - busy_s) / (seconds * len(os.sched_getaffinity(0)))
        counts = {"migrations": _counted(stack, *MIGRATIONS), "changes": _counted(stack, *CHANGES) - placed_before}
    return _row(variant, result.records, execution_s, run_s, use, counts)


def _row(
    variant: Variant,
    records: Sequence[RequestRecord],
    execution_s: dict[str, float],
    run_s: float,
    use: float,
    counts: dict[str, int],
) -> Row:
    online, offline_tokens, itl = list[Online](), 0.0, ItlHistogram()
    for record in records:
        if record.request_class is RequestClass.OFFLINE:
            offline_tokens += tokens_within(record, WARM_UP_S, WARM_UP_S + run_s)
            if record.first_token_s is not None and WARM_UP_S <= record.first_token_s <= WARM_UP_S + run_s:
                offline_tokens += record.prompt_tokens or record.planned_prompt_tokens
        elif record.arrival_s >= WARM_UP_S:
            is_done = record.is_success and record.latency_s is not None
            for gap_s in record.itl_s:
                itl.add(gap_s)
            online.append(
                Online(
                    record.latency_s or math.inf if is_done else math.inf,
                    math.inf if record.ttft_s is None else record.ttft_s,
                    math.nan if record.tpot_s is None else record.tpot_s,
                    record.max_itl_s or 0.0,
                    execution_s[record.model],
                )
            )
    rate = offline_tokens / run_s
    return row(variant, online, itl=itl.summary(), offline_tokens_s=rate, use=use, **counts)


def _target(url: str) -> Target:
    return Target(url=url, ignore_eos=True, vocabulary=VOCABULARY)


def _is_ready(stack: Stack, variant: Variant) -> bool:
    instances = stack.instances()
    served = [{model["name"] for model in one["models"] if model["state"] == "ready"} for one in instances]
    if len(served) < NUM_INSTANCES or set().union(*served) < set(MODELS):
        return False
    is_placed = all(len(names) == (1 if variant.placement == "dedicated" else len(MODELS)) for names in served)
    return is_placed and httpx.get(f"{stack.url}/ready", timeout=5).status_code == 200


def _alone_s(url: str, num: int = 6) -> dict[str, float]:
    """Mean latency of each model's requests, one after the other on the idle stack."""
    found = {}
    for name in MODELS:
        stream = StreamSpec(
            name=f"alone-{name}", models={name: 1.0}, arrivals=Closed(concurrency=1), num_requests=num,
            prompt_tokens=MIX.prompt_tokens, output_tokens=MIX.output_tokens,
        )  # fmt: skip
        result = asyncio.run(run_session(Session(target=_target(url)), Workload(streams=[stream], seed=5)))
        found[name] = float(np.mean([record.latency_s for record in result.records]))
    return found


def _counted(stack: Stack, service: str, counter: str) -> int:
    text = httpx.get(f"http://127.0.0.1:{stack.metrics_ports[service]}/metrics", timeout=5).text
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(counter)))


def _busy_s(stack: Stack) -> float:
    """Processor time of the instances that are there; one that was started anew has lost its past."""
    return sum(processor_s(instance["pid"]) for instance in stack.instances())
