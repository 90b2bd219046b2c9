"""Placements that are changed under load, on the real stack over HTTP: what its users notice, and the trace of each change.

    python -m bench.replacing [--rate 12] [--quiet 15] [--emulate A100-80G]

Three models on three instances, requests at random times. One after the other, with quiet times between them: each model
gets an instance of its own, two share one, a fourth model is added, the last plan is undone. Requests that ran during a
change are compared with those that did not; the fourth's first answer is waited for. Step times are a GPU's
(bench/emulated.py), so that the noise of steps on two busy cores is not in what is compared; `--emulate ''`: this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np

from bench.fidelity.workloads import EMULATED_MODELS, MODELS, VOCABULARY
from bench.reporting import Target as Aim
from bench.reporting import judged, machine, table_of, write
from bench.unified.live import NODE, NUM_INSTANCES, Checkpoints, set_plan
from bench.unified.variants import MIX
from shared.placement.hardware import HARDWARE
from shared.placement.plan import Group, plan_of
from tests.e2e.otlp_collector import OtlpCollector
from tests.e2e.stack import Stack
from tideway.bench.client import Target
from tideway.bench.records import RequestRecord
from tideway.bench.session import Session, run_session
from tideway.bench.summary import Distribution
from tideway.bench.workload import StreamSpec, Workload
from tideway.operations import AdminClient
from tideway.plan import carry_out

ADDED = "fourth"
CHANGE_S = 120.0
"""Time for a change, at most."""
ACTION_S, POLL_S = 15.0, 0.1
PLANS = {
    "apart": [["small"], ["medium"], ["large"]],
    "two share one": [["medium", "small"], ["small"], ["large"]],
}
"""Models of each instance."""


class Change(msgspec.Struct, kw_only=True):
    """Times are Unix time."""

    name: str
    number: int = 0
    """Number of the replacement; 0: it was none."""
    begun_s: float
    ended_s: float
    stage: str
    steps: list[str] = []
    spans: list[tuple[str, str, float, float]] = []
    """Service, name, seconds after the beginning, seconds that it took."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """By clients."""

    requests: str
    num: int
    num_failed: int
    ttft_p99_s: float
    tpot_p99_s: float
    itl_p50_s: float
    """Median gap before each piece of all streams after the first."""
    itl_p99_s: float
    silence_p99_s: float
    """P99 of the longest silence of each stream."""
    silence_max_s: float


class Operator:
    """Who changes the placement while requests run."""

    def __init__(self, stack: Stack, collector: OtlpCollector) -> None:
        self._stack, self._collector = stack, collector
        self.changes: list[Change] = []

    def set_plan(self, name: str) -> None:
        groups = (Group(NODE, (number,), tuple(sorted(models))) for number, models in enumerate(PLANS[name]))
        set_plan(self._stack.url, plan_of(groups), CHANGE_S)
        self._carried_out(name)

    def roll_back(self) -> None:
        with AdminClient(self._stack.url) as client:
            carry_out(client, "roll_back", wait_s=CHANGE_S, say=print)
        self._carried_out("back")

    def add(self, name: str, source: str) -> None:
        """Until it has answered."""
        begun_s = time.time()
        added = httpx.post(f"{self._stack.url}/admin/models", json={"name": name, "source": source}, timeout=60)
        assert added.status_code == 200, added.text
        body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": 4, "ignore_eos": True}
        deadline_s = time.monotonic() + CHANGE_S
        while httpx.post(f"{self._stack.url}/v1/completions", json=body, timeout=60).status_code != 200:
            assert time.monotonic() < deadline_s, f"{name} does not answer"
            time.sleep(POLL_S)
        self.changes.append(Change(name=f"{name} model added", begun_s=begun_s, ended_s=time.time(), stage="answers"))

    def _carried_out(self, name: str) -> None:
        with AdminClient(self._stack.url) as client:
            change = client.plan().change
        assert change is not None and change.is_over
        self.changes.append(
            Change(
                name=name, number=change.number, begun_s=change.begun_s, ended_s=change.stage_s, stage=change.stage,
                steps=change.steps,
            )
        )  # fmt: skip

    def tell_spans(self) -> None:
        """Those of the changes' traces that have come."""
        roots = {one.attributes["tideway.replacement"]: one for one in list(self._collector.spans)
                 if one.name == "placement.replacement"}  # fmt: skip
        for change in self.changes:
            if (root := roots.get(change.number)) is not None:
                spans = sorted(self._collector.of_trace(root.trace_id), key=lambda one: one.start_ns)
                change.spans = [
                    (one.service, one.name, 1e-9 * (one.start_ns - root.start_ns), 1e-9 * (one.end_ns - one.start_ns))
                    for one in spans
                ]


async def run(
    operator: Operator, stack: Stack, sources: Mapping[str, str], *, rate_rps: float, quiet_s: float, seed: int
) -> list[RequestRecord]:
    """Requests come until the operator is done. Raises `OperatorError` where a plan is rolled back, `SystemExit` where a
    change takes longer than `ACTION_S`."""
    actions = [
        *(lambda name=name: operator.set_plan(name) for name in PLANS),
        lambda: operator.add(ADDED, sources[ADDED]),
        operator.roll_back,
    ]
    run_s = (len(actions) + 1) * quiet_s + len(actions) * ACTION_S
    stream = StreamSpec(
        name="online", models=MIX.models, arrivals=MIX.arrivals(rate_rps), prompt_tokens=MIX.prompt_tokens,
        output_tokens=MIX.output_tokens,
    )  # fmt: skip
    workload = Workload(streams=[stream], duration_s=run_s, seed=seed)
    target = Target(url=stack.url, ignore_eos=True, vocabulary=VOCABULARY)
    sending = asyncio.create_task(run_session(Session(target=target, drain_s=30.0), workload))
    for action in actions:
        await asyncio.sleep(quiet_s)
        await asyncio.to_thread(action)
    if sending.done():
        sys.exit(f"requests came for {run_s:.0f} s alone, and changes took longer")
    return (await sending).records


def zero_of(records: Sequence[RequestRecord], stack: Stack) -> float:
    """Unix time that the records' are relative to, by when the gateway had the last one."""
    last = max((one for one in records if one.is_success), key=lambda one: one.arrival_s)
    [timeline] = httpx.get(f"{stack.url}/admin/requests/{last.request_id}", timeout=20).json()["requests"]
    arrived_s: float = timeline["arrived_s"]
    return arrived_s - (last.sent_s or last.arrival_s)


def seen(name: str, records: Sequence[RequestRecord]) -> Seen:
    done = [one for one in records if one.is_success]
    silences = [one.max_itl_s or 0.0 for one in done]
    itl = Distribution.of(gap_s for one in done for gap_s in one.itl_s)

    def p99(values: Sequence[float | None]) -> float:
        known = [value for value in values if value is not None]
        return float(np.percentile(known, 99)) if known else 0.0

    return Seen(
        requests=name, num=len(records), num_failed=len(records) - len(done),
        ttft_p99_s=p99([one.ttft_s for one in done]), tpot_p99_s=p99([one.tpot_s for one in done]),
        itl_p50_s=itl.p50, itl_p99_s=itl.p99, silence_p99_s=p99(silences), silence_max_s=max(silences, default=0.0),
    )  # fmt: skip


def compare(records: Sequence[RequestRecord], zero_s: float, changes: Sequence[Change]) -> list[Seen]:
    """Requests by what went on while they ran."""
    left, found = list(records), []
    for change in changes:
        during = [
            one
            for one in records
            if zero_s + one.arrival_s < change.ended_s and (one.end_s is None or zero_s + one.end_s > change.begun_s)
        ]
        left = [one for one in left if one not in during]
        found.append(seen(change.name, during))
    return [seen("no change", left), *found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replacing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s")
    parser.add_argument("--quiet", type=float, default=15.0, help="seconds before each change, and after the last")
    parser.add_argument("--emulate", default="A100-80G", choices=["", *sorted(HARDWARE)], metavar="DEVICE",
                        help="steps take what they would on such a device; '': what they take here")  # fmt: skip
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON and table")
    options = parser.parse_args(arguments)
    collector = OtlpCollector()
    with Checkpoints(options.emulate) as checkpoints:
        checkpoints.profile()
        environment = {
            "TIDEWAY_NUM_THREADS": "1", "TIDEWAY_REPLACEMENT": "off", "TIDEWAY_OTLP_ENDPOINT": collector.endpoint,
        }  # fmt: skip
        shapes = EMULATED_MODELS | {ADDED: EMULATED_MODELS["small"]}
        with checkpoints.stack(NUM_INSTANCES, environment, shapes) as stack:
            stack.wait_until(
                lambda: [len(one["models"]) for one in stack.instances()] == [len(MODELS)] * NUM_INSTANCES,
                "all models on all instances",
            )
            stack.wait_ready()
            operator = Operator(stack, collector)
            case = {"rate_rps": options.rate, "quiet_s": options.quiet, "seed": options.seed}
            sources = checkpoints.sources | {ADDED: checkpoints.another(ADDED, "small")}
            records = asyncio.run(run(operator, stack, sources, **case))
            zero_s = zero_of(records, stack)
        operator.tell_spans()
    collector.close()
    rows, changes = compare(records, zero_s, operator.changes), operator.changes
    date = time.strftime("%Y-%m-%d")
    lost = sum(not one.is_success for one in records)
    aims = [Aim(name="requests without their answer", value=lost, limit=0.0)]
    text = "\n".join([
        f"# The placement changed under load, {date}", "",
        f"{machine()}, {options.emulate or 'this machine'}, {options.rate:g} requests/s, {len(records)} requests", "",
        *table_of([
            {"requests while": one.requests, "number": one.num, "failed": one.num_failed,
             "TTFT P99 s": f"{one.ttft_p99_s:.3f}", "TPOT P99 ms": f"{1e3 * one.tpot_p99_s:.1f}",
             "ITL P50 ms": f"{1e3 * one.itl_p50_s:.1f}", "ITL P99 ms": f"{1e3 * one.itl_p99_s:.1f}",
             "silence P99 s": f"{one.silence_p99_s:.3f}", "longest s": f"{one.silence_max_s:.3f}"}
            for one in rows
        ]), "",
        *table_of([
            {"change": one.name, "took s": f"{one.ended_s - one.begun_s:.1f}", "end": one.stage, "steps": len(one.steps),
             "spans": len(one.spans)}
            for one in changes
        ]), "",
        *(line for one in changes for line in _trace(one)),
        *map(str, aims),
    ])  # fmt: skip
    print(text)
    result = {"date": date, "machine": machine(), "emulated": options.emulate, "rate_rps": options.rate,
              "seen": rows, "changes": changes, "targets": judged(aims)}  # fmt: skip
    where = options.emulate or "cpu"
    print(f"written: {write(options.output, f'replacing-{where}-{date}', result, text)}.json, .md")
    return 0


def _trace(change: Change) -> list[str]:
    if not change.spans:
        return []
    lines = [
        f"    {start_s:7.2f} s {took_s:7.2f} s  {service}: {name}" for service, name, start_s, took_s in change.spans
    ]
    return [f'Trace of "{change.name}" (after, took):', "", *lines, ""]


if __name__ == "__main__":
    sys.exit(main())
