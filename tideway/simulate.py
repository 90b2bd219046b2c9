"""`tideway simulate`: predicts how models on given GPUs serve given traffic, for several variants, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tideway.console import TableConsole, turned
from tideway.data_folder import OperatorError

if TYPE_CHECKING:
    from shared.placement.problem import Plan, Problem
    from shared.simulation.deployment import BatchLines, Outcome
    from shared.simulation.fleet import Fleet
    from shared.simulation.metrics import Metrics, RunMetrics
    from shared.simulation.replacement import FleetReplacement
    from tideway.scenario import Setting

HEAD = [
    "requests", "in SLO", "normalised", "latency s\nmean", "latency s\np50", "latency s\np99", "TTFT s\nmean",
    "TTFT s\np99", "TPOT ms\nmean", "TPOT ms\np99", "ITL ms\np50", "ITL ms\np99", "ITL ms\nmax", "tokens/s",
    "offline\ntokens/s", "use",
]  # fmt: skip

LARGE_SEARCH = 512
"""Models times devices, from which on a search takes seconds."""
MANY_SIMULATED = 1000
"""Requests, from which on the simulation of a search's plans takes some ten seconds."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the placement, or a search for one."""

    at_s: float
    """Time at which the search began, or the change was over."""
    what: str
    """searched | carried_out | rolled_back"""
    reason: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one setting."""

    name: str
    plan: Plan
    """Plan at the end."""
    metrics: RunMetrics
    unplaced: dict[str, str]
    """Models without a group, and why."""
    changes: list[Change]
    """Changes of the placement while it served."""
    is_over: bool
    """Else some requests had not ended when the patience was."""
    notes: list[str]
    """What got no answer, and why."""
    search_s: float
    simulation_s: float
    """Seconds of this machine's CPU time."""


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Scenario file; see docs/simulation.md.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of traffic and noise. Default: the file's.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of traffic. Default: the file's.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write plots, as PNG files (needs matplotlib).")
    ] = None,
) -> None:
    """Simulate models, machines and traffic: the real scheduler and engine run in virtual time, without the hardware."""
    from tideway import scenario, scenario_plots

    if plot is not None:
        scenario_plots.check_available()
    changes = {key: value for key, value in (("seed", seed), ("duration_s", duration)) if value is not None}
    settings = scenario.read(file, changes)
    results, outcomes = [], []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for setting in settings:
            task = progress.add_task(setting.name, total=1.0)
            result, outcome = run(setting, lambda share, task=task: progress.update(task, completed=share))  # type: ignore[misc]
            progress.update(task, completed=1.0)
            results.append(result)
            outcomes.append(outcome)
    console = TableConsole()
    for result in results:
        show(result, console)
    if len(results) > 1:
        console.print(turned(_compared(results), console))
    if json_file is not None:
        write_json(json_file, settings, results)
    if plot is not None:
        for path in scenario_plots.write_plots(results, [outcome.requests for outcome in outcomes], plot):
            console.print(f"{path} written")


def run(setting: Setting, on_progress: Callable[[float], None] = lambda share: None) -> tuple[Result, Outcome]:
    """Raises `ScenarioError`."""
    from shared.placement import baselines
    from shared.placement.problem import Plan
    from shared.simulation import deployment, multiplexed
    from tideway.scenario import ScenarioError, build

    scenario, (problem, batches) = setting.scenario, build(setting)
    changing: list[FleetReplacement] = []

    def replace(fleet: Fleet) -> None:
        from shared.placement.search import search
        from shared.simulation.replacement import FleetReplacement

        if (spec := scenario.replacement) is not None:
            settings = spec.settings()
            changing.append(
                FleetReplacement(
                    fleet, problem, plan, search, settings=settings, serving=scenario.serving, search_s=spec.search_s
                )
            )

    started_s = cpu_s()
    try:
        if scenario.placement == "muxserve":
            units = baselines.muxserve(problem)
            plan, unplaced = Plan(tuple(sorted(unit.group for unit in units))), dict[str, str]()
            play = partial(
                multiplexed.simulate, problem, units, scenario.split_kv, max_rows=scenario.serving.max_running
            )
        else:
            plan, unplaced = place(setting, problem)
            play = partial(
                deployment.simulate, problem, plan, scenario.serving, seed=scenario.seed, batches=batches,
                on_deployed=replace,
            )  # fmt: skip
        placed_s = cpu_s()
        outcome = play(patience_s=scenario.patience_s, on_progress=on_progress)
    except baselines.NoPlacement as error:
        raise ScenarioError(f"setting {setting.name!r}: placement: {error}") from None
    result = Result(
        name=setting.name, plan=changing[0].plan if changing else plan, metrics=outcome.metrics, unplaced=unplaced,
        changes=[change for one in changing for change in _changes(one)], is_over=outcome.is_over,
        notes=_notes(problem, batches, outcome.metrics),
        search_s=placed_s - started_s, simulation_s=cpu_s() - placed_s,
    )  # fmt: skip
    return result, outcome


def _notes(problem: Problem, batches: Sequence[BatchLines], metrics: RunMetrics) -> list[str]:
    notes, traffic = [], problem.traffic
    for model in problem.models:
        name, limit = model.name, f"longer than its {model.max_model_len} tokens"
        if name in traffic.models:
            mine = (traffic.model == traffic.models.index(name)) & traffic.is_online
            num_long = int((mine & (traffic.prompt_tokens + traffic.output_tokens > model.max_model_len)).sum())
            num_others = metrics.models[name].num_unserved - num_long
            if num_long:
                notes.append(f"{num_long} of {mine.sum()} requests of {name} were not sent: they are {limit}.")
            if num_others > 0:
                why = "had no instance that holds them, were refused, or had not ended when the run was over"
                notes.append(f"{num_others} of {mine.sum()} requests of {name} {why}.")
        lines = [prompt + output for batch in batches for of, prompt, output in batch.lines if of == name]
        if num_long := sum(length > model.max_model_len for length in lines):
            notes.append(f"{num_long} of {len(lines)} batch lines of {name} were not sent: they are {limit}.")
    return notes


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _changes(replacement: FleetReplacement) -> list[Change]:
    looks = [Change(at_s=search.at_s, what="searched", reason=search.verdict.reason) for search in replacement.searches]
    changes = [Change(at_s=one.stage_s, what=one.stage, reason=one.reason) for one in replacement.changes]
    return sorted([*looks, *changes], key=lambda one: one.at_s)


def place(setting: Setting, problem: Problem) -> tuple[Plan, dict[str, str]]:
    """The plan, and the models that it leaves out, with the reason. Raises `ScenarioError`, `NoPlacement`."""
    from shared.simulation.deployment import predict
    from tideway.scenario import explicit_plan

    scenario = setting.scenario
    if scenario.placement == "search":
        from shared.placement import search

        faithful = partial(predict, serving=scenario.serving, seed=scenario.seed, patience_s=scenario.patience_s)
        evaluate = faithful if scenario.search_by == "simulation" else None
        proposal = search.search(problem, evaluate=evaluate, num_processes=num_processes(problem, evaluate is not None))
        return proposal.plan, dict(proposal.unplaced)
    if scenario.placement == "groups":
        plan = explicit_plan(scenario, problem)
    else:
        from shared.placement import baselines
        from shared.placement.estimator import estimate

        plan = baselines.PLACEMENTS[scenario.placement](problem, estimate)
    placed = {name for group in plan.groups for name in group.models}
    return plan, {model.name: "no group has it" for model in problem.models if model.name not in placed}


def num_processes(problem: Problem, is_simulated: bool) -> int:
    """Processes of a search: a small one is over before other processes have imported what they need."""
    size = len(problem.models) * sum(node.num_devices for node in problem.nodes)
    is_large = size >= LARGE_SEARCH or (is_simulated and problem.traffic.num_requests >= MANY_SIMULATED)
    return len(os.sched_getaffinity(0)) if is_large else 1


# ------------------------------------------------------------------------------------------------------------ showing


def show(result: Result, console: Console) -> None:
    metrics = result.metrics
    table = _table("model", escape(result.name))
    for name, one in metrics.models.items():
        table.add_row(*_row(name, one))
    if len(metrics.models) > 1:
        table.add_section()
        table.add_row(*_row("all", metrics.total))
    console.print(turned(table, console))
    groups = Table("instance", "devices", "models", "busy")
    for group in result.plan.groups:
        devices = f"{group.devices[0]}-{group.devices[-1]}" if group.num_ranks > 1 else str(group.devices[0])
        use = f"{100 * metrics.use.get(group.instance_id, 0.0):.0f} %"
        groups.add_row(group.instance_id, devices, ", ".join(group.models), use)
    console.print(groups)
    for name, reason in result.unplaced.items():
        console.print(f"{name} is on no device: {reason}")
    for change in result.changes:
        console.print(f"{change.at_s:.0f} s, placement {change.what.replace('_', ' ')}: {change.reason}")
    for note in result.notes:
        console.print(escape(note))
    console.print(
        f"{metrics.seconds:.0f} s simulated in {result.simulation_s:.1f} s of CPU time"
        + (f", placement found in {result.search_s:.1f} s" if result.search_s >= 0.05 else "")
    )


def _compared(results: Sequence[Result]) -> Table:
    """A row of all models together for each setting."""
    table = _table("setting", "All models, by setting")
    for result in results:
        table.add_row(*_row(escape(result.name), result.metrics.total))
    return table


def _table(first: str, title: str) -> Table:
    """Table of rows as `_row` makes them."""
    table = Table(first, title=f"[bold]{title}[/]", title_justify="left")
    for head in HEAD:
        table.add_column(head, justify="right")
    return table


def _row(name: str, one: Metrics) -> list[str]:
    if one.num_requests == one.num_unserved:
        attainment = f"{100 * one.attainment:.1f} %" if one.num_requests else "-"
        offline = f"{one.offline_tokens_s:.0f}"
        return [name, str(one.num_requests), attainment, *["-"] * 11, "0", offline, f"{100 * one.use:.0f} %"]
    return [
        name, str(one.num_requests), f"{100 * one.attainment:.1f} %", f"{one.normalised_latency:.2f}",
        f"{one.latency_s.mean:.2f}", f"{one.latency_s.p50:.2f}", f"{one.latency_s.p99:.2f}", f"{one.ttft_s.mean:.3f}",
        f"{one.ttft_s.p99:.3f}", f"{1e3 * one.tpot_s.mean:.1f}", f"{1e3 * one.tpot_s.p99:.1f}",
        f"{1e3 * one.itl_s.p50:.1f}", f"{1e3 * one.itl_s.p99:.1f}", f"{1e3 * one.itl_s.max:.0f}", f"{one.tokens_s:.0f}",
        f"{one.offline_tokens_s:.0f}", f"{100 * one.use:.0f} %",
    ]  # fmt: skip


def write_json(file: Path, settings: Sequence[Setting], results: Sequence[Result]) -> None:
    """Raises `OperatorError`."""
    content: list[dict[str, Any]] = [
        msgspec.to_builtins(result) | {"scenario": msgspec.to_builtins(setting.scenario)}
        for setting, result in zip(settings, results, strict=True)
    ]
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    except OSError as error:
        raise OperatorError(f"--json {file}: {error.strerror}") from None
