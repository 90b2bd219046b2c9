"""What a user is promised against what is harvested beside it, at objectives that do not depend on the system."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bench.coserving.accounting import StepParts, most_offline_tokens
from bench.coserving.bench import Bench
from bench.coserving.results import ExperimentResult, SystemFigures, Table, figures_of, online_records, ratio
from bench.coserving.runs import ONLINE_ONLY, TIDEWAY, VLLM_PP, Objectives, RunResult, System
from bench.reporting import Target
from tideway.bench.records import RequestRecord
from tideway.bench.summary import Distribution
from tideway.bench.workload import PlannedRequest

CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of a step of the chunk-limited vLLM++."""
SCALES = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the tightest objectives that Online-Only keeps for `ALONE_SHARE`."""
ALONE_SHARE = 0.99
TIDEWAY_SHARE = 0.98
TOKENS_SHARE = 0.85
"""Share of vLLM++'s tokens per second, at the tightest objectives."""
DEFAULT = Objectives(1.5, 0.11)


class Load(msgspec.Struct):
    name: str
    samples: list[list[PlannedRequest]]


class Account(msgspec.Struct, frozen=True):
    """Shares of a device's time; together 1."""

    begin: float
    """What steps take beside their tokens: the smaller the steps, the more."""
    online: float
    prompts: float
    """Prompts of offline requests, computed for the first time."""
    decodes: float
    recomputed: float
    """At what the offline prompts' tokens took on average."""
    discarded: float
    """In steps that were given up."""
    idle: float

    @property
    def useful(self) -> float:
        return self.prompts + self.decodes


class Point(msgspec.Struct):
    """One load at one pair of objectives."""

    load: str
    label: str
    objectives: Objectives
    attainment: dict[str, float]
    """By system: the share of the requests that kept both."""
    tokens_per_s: dict[str, float]
    """Throughput as in `SystemFigures`."""
    offline_tokens_per_s: dict[str, float]
    limited: str
    """The system that `vllm++ limited` is here."""


LIMITED = "vllm++ limited"
"""At each point the largest of the chunks that keeps as much as Tideway; if none does, the one that keeps most."""
BOUND = "bound"
"""What could be had at most: `most_offline_tokens`."""
SHOWN = (ONLINE_ONLY.name, VLLM_PP.name, LIMITED, TIDEWAY.name)


def objectives(bench: Bench) -> ExperimentResult:
    """ConServe 6.2 at fixed objectives, from tight to loose."""
    warm_up_s = bench.durations.warm_up_s
    duration_s = warm_up_s + bench.durations.point_s
    chunks = [limited(chunk) for chunk in CHUNKS if chunk < bench.testbed.setup.max_step_tokens]
    result = bench.result(
        "objectives",
        capacity_rps={kind: bench.capacity(kind) for kind in ("trace", "synthetic")},
        scales=SCALES,
        chunks=[system.step_tokens for system in chunks],
    )
    points: list[Point] = []
    accounts: dict[str, dict[str, Account]] = {}
    for load in _loads(bench, duration_s):

        def run(system: System, objectives: Objectives = DEFAULT, load: Load = load) -> list[RunResult]:
            return [bench.run(system, online, duration_s, objectives, label=f"{load.name}:") for online in load.samples]

        fixed = {system.name: run(system) for system in (ONLINE_ONLY, *chunks, VLLM_PP)}
        figures = {name: figures_of(runs, warm_up_s) for name, runs in fixed.items()}
        tightest = tightest_objectives(_records(fixed[ONLINE_ONLY.name], warm_up_s))
        pairs = [(f"{scale:g} x tightest", scaled(tightest, scale)) for scale in SCALES]
        for label, pair in [*pairs, *(("fixed", pair) for pair in bench.options.pairs)]:
            runs = run(TIDEWAY, pair)
            own = figures_of(runs, warm_up_s)
            result.figures[f"{load.name}, {label} {_text(pair)}"] = [own]
            point = _point(bench, load, label, pair, fixed, figures, runs, own, duration_s)
            points.append(point)
            if pair == tightest:
                accounts[load.name] = {
                    VLLM_PP.name: account(fixed[VLLM_PP.name], warm_up_s),
                    LIMITED: account(fixed[point.limited], warm_up_s),
                    TIDEWAY.name: account(runs, warm_up_s),
                }
                result.targets += _targets(point, accounts[load.name])
        result.figures[load.name] = list(figures.values())
    result.measured = {"points": points, "accounts": accounts}
    result.tables = [_curve(points), _accounts(accounts)]
    return result


def limited(chunk: int) -> System:
    return msgspec.structs.replace(VLLM_PP, name=f"vllm++ {chunk}", step_tokens=chunk)


def scaled(objectives: Objectives, scale: float) -> Objectives:
    return Objectives(objectives.ttft_s * scale, objectives.tpot_s * scale)


def _loads(bench: Bench, duration_s: float) -> list[Load]:
    workloads, seeds = bench.workloads, range(bench.durations.num_seeds)
    trace, synthetic = bench.capacity("trace"), bench.capacity("synthetic")
    loads = []
    for share in bench.durations.loads:
        name = f"trace {share:g}"
        loads.append(Load(name, [workloads.trace(share * trace, duration_s, seed) for seed in seeds]))
    for cv in bench.durations.objectives_cvs:
        for share in bench.durations.loads:
            samples = [workloads.gamma(share * synthetic, cv, duration_s, seed) for seed in seeds]
            loads.append(Load(f"CV {cv:g} {share:g}", samples))
    return loads


def _records(runs: Sequence[RunResult], warm_up_s: float) -> list[RequestRecord]:
    return [record for run in runs for record in online_records(run, warm_up_s)]


def keeps(record: RequestRecord, objectives: Objectives) -> bool:
    if not record.is_success or record.ttft_s is None or record.ttft_s > objectives.ttft_s + 1e-9:
        return False
    return record.tpot_s is None or record.tpot_s <= objectives.tpot_s + 1e-9


def attainment(records: Sequence[RequestRecord], objectives: Objectives) -> float:
    return sum(keeps(record, objectives) for record in records) / max(1, len(records))


def tightest_objectives(records: Sequence[RequestRecord]) -> Objectives:
    """In the proportion of the P99s of TTFT and TPOT, the smallest that `ALONE_SHARE` of the requests keep."""
    done = [record for record in records if record.is_success]
    p99 = Objectives(
        Distribution.of(record.ttft_s for record in done).p99, Distribution.of(record.tpot_s for record in done).p99
    )
    needed = sorted(
        max((record.ttft_s or 0.0) / p99.ttft_s, (record.tpot_s or 0.0) / p99.tpot_s) if record.is_success else math.inf
        for record in records
    )
    return scaled(p99, needed[min(len(needed), math.ceil(ALONE_SHARE * len(needed))) - 1])


def account(runs: Sequence[RunResult], warm_up_s: float) -> Account:
    measured_s = sum(run.duration_s - warm_up_s for run in runs)
    steps = [step for run in runs for step in run.steps if warm_up_s <= step.end_s <= run.duration_s]
    parts = [step.parts for step in steps if step.parts is not None]
    begin, online, prompts, decodes = (
        sum(getattr(one, name) for one in parts) / measured_s for name in StepParts.__struct_fields__
    )
    busy = sum(step.end_s - step.start_s for step in steps) / measured_s
    num_prompt_tokens = sum(step.num_tokens[1] - step.num_decodes[1] for step in steps)
    recomputed = prompts * ratio(sum(step.recomputed_tokens for step in steps), num_prompt_tokens or math.inf)
    discarded = busy - begin - online - prompts - decodes
    return Account(begin, online, prompts - recomputed, decodes, recomputed, discarded, 1 - busy)


def _point(
    bench: Bench,
    load: Load,
    label: str,
    pair: Objectives,
    fixed: dict[str, list[RunResult]],
    figures: dict[str, SystemFigures],
    tideway: list[RunResult],
    own: SystemFigures,
    duration_s: float,
) -> Point:
    """`fixed`: runs of the systems that objectives do not change, `figures` theirs."""
    kept = {name: attainment(_records(runs, bench.durations.warm_up_s), pair) for name, runs in fixed.items()}
    least = attainment(_records(tideway, bench.durations.warm_up_s), pair)
    chosen = choose_limited({name: share for name, share in kept.items() if name != ONLINE_ONLY.name}, least)
    bound = _bound(bench, load, pair, fixed[ONLINE_ONLY.name], duration_s)
    of = {**{name: figures[name] for name in SHOWN[:2]}, LIMITED: figures[chosen], TIDEWAY.name: own}
    return Point(
        load.name,
        label,
        pair,
        {**{name: kept[name] for name in SHOWN[:2]}, LIMITED: kept[chosen], TIDEWAY.name: least},
        {name: one.tokens_per_s for name, one in of.items()} | {BOUND: of[ONLINE_ONLY.name].tokens_per_s + bound},
        {name: one.offline_tokens_per_s for name, one in of.items()} | {BOUND: bound},
        chosen,
    )


def choose_limited(kept: dict[str, float], least: float) -> str:
    """See `LIMITED`; `kept`: attainment by system, larger steps later."""
    enough = [name for name, share in kept.items() if share >= least]
    return enough[-1] if enough else max(reversed(kept), key=lambda name: kept[name])


def _bound(bench: Bench, load: Load, pair: Objectives, alone: Sequence[RunResult], duration_s: float) -> float:
    """Offline tokens per second, if the same requests were kept as by Online-Only."""
    most = 0.0
    for planned, run in zip(load.samples, alone, strict=True):
        both = [
            (one, record)
            for one, record in zip(planned, online_records(run), strict=True)
            if record.is_success and (record.end_s or math.inf) <= duration_s
        ]
        most += most_offline_tokens(
            bench.testbed.cost_model,
            duration_s,
            [one for one, _ in both],
            [one for one, record in both if keeps(record, pair)],
            bench.offline,
            bench.testbed.setup.max_step_tokens,
            pair.ttft_s,
            pair.tpot_s,
        )
    return most / duration_s / len(alone)


def _targets(point: Point, accounts: dict[str, Account]) -> list[Target]:
    full = point.tokens_per_s[VLLM_PP.name]
    note = f"bound {point.tokens_per_s[BOUND] / full:.3f}; lost, tokens/s: " + ", ".join(
        f"{name} {value:+.0f}" for name, value in _lost(point, accounts).items()
    )
    where = f"{point.load}, tightest objectives {_text(point.objectives)}"
    return [
        Target(
            name=f"{where}: kept",
            value=point.attainment[TIDEWAY.name],
            limit=TIDEWAY_SHARE,
            is_least=True,
            note=f"Online-Only {point.attainment[ONLINE_ONLY.name]:.3f}, vLLM++ {point.attainment[VLLM_PP.name]:.3f}",
        ),
        Target(
            name=f"{where}: tokens over vLLM++'s",
            value=ratio(point.tokens_per_s[TIDEWAY.name], full),
            limit=TOKENS_SHARE,
            is_least=True,
            note=note,
        ),
    ]


def _lost(point: Point, accounts: dict[str, Account]) -> dict[str, float]:
    """How much of vLLM++'s offline tokens per second Tideway lacks, by what it spent more of the device's time on;
    negative: less."""
    full, own = accounts[VLLM_PP.name], accounts[TIDEWAY.name]
    rate = ratio(point.offline_tokens_per_s[VLLM_PP.name], full.useful)
    lost = {
        "smaller steps" if name == "begin" else name: rate * (getattr(own, name) - getattr(full, name))
        for name in ("begin", "online", "recomputed", "discarded", "idle")
    }
    whole = point.offline_tokens_per_s[VLLM_PP.name] - point.offline_tokens_per_s[TIDEWAY.name]
    return lost | {"other mix of prompts and decodes": whole - sum(lost.values())}


def _text(pair: Objectives) -> str:
    return f"{pair.ttft_s * 1000:.0f}/{pair.tpot_s * 1000:.0f} ms"


def _curve(points: Sequence[Point]) -> Table:
    header = ["load", "objectives", "TTFT/TPOT", *(f"kept: {name}" for name in SHOWN), LIMITED,
              *(f"offline tokens/s: {name}" for name in (*SHOWN[1:], BOUND)),
              *(f"tokens x vLLM++: {name}" for name in (LIMITED, TIDEWAY.name, BOUND))]  # fmt: skip
    rows = []
    for point in points:
        full = point.tokens_per_s[VLLM_PP.name]
        rows.append(
            [
                point.load,
                point.label,
                _text(point.objectives),
                *(f"{100 * point.attainment[name]:.1f} %" for name in SHOWN),
                point.limited,
                *(f"{point.offline_tokens_per_s[name]:.0f}" for name in (*SHOWN[1:], BOUND)),
                *(f"{ratio(point.tokens_per_s[name], full):.3f}" for name in (LIMITED, TIDEWAY.name, BOUND)),
            ]
        )
    return Table(title="Objectives kept, and what is harvested beside them", header=header, rows=rows)


def _accounts(accounts: dict[str, dict[str, Account]]) -> Table:
    rows = [
        [load, name, *(f"{100 * share:.1f} %" for share in msgspec.structs.astuple(one))]
        for load, of_load in accounts.items()
        for name, one in of_load.items()
    ]
    header = ["load", "system", "steps beside their tokens", "online", "offline prompts", "offline decodes", "recomputed",
              "discarded", "idle"]  # fmt: skip
    return Table(title="Where the device's time went, at the tightest objectives", header=header, rows=rows)
