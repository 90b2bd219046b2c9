"""`tideway request` and `tideway explain`: timelines of requests, and where late requests spent their time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shared.messages.timeline import MissedObjective, Phase, SequenceTimeline, SloExplanation, TimelinePhase
from shared.monitor.timeline import OBJECTIVES, Times, parts_of, seconds, total, words
from shared.runtime.settings import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS
from tideway.console import LOOK, fit, print_json, show_listing
from tideway.operations import AdminClient

BAR_CELLS = 40
STYLES = {
    Phase.GATEWAY: "bright_black",
    Phase.QUEUE: "yellow",
    Phase.DISPATCH: "bright_black",
    Phase.INSTANCE_QUEUE: "yellow",
    Phase.PREFILL: "blue",
    Phase.DELIVERY: "bright_black",
    Phase.DECODE: "green",
    Phase.PREEMPTED: "red",
    Phase.RECOMPUTE: "magenta",
    Phase.RESTORE: "magenta",
    Phase.SUSPENDED: "red",
    Phase.MOVE: "cyan",
    Phase.RESCUE: "red",
}

OBJECTIVES_TOLD = (
    "Objectives are those that a request names (ttft_ms, tpot_ms), else its model's, else the default: "
    f"{DEFAULT_TTFT_MS:g} ms to the first token and {DEFAULT_TPOT_MS:g} ms a token, unless TIDEWAY_TTFT_MS and "
    "TIDEWAY_TPOT_MS say otherwise. The SLO of tideway plan and tideway models is another: of a request's whole latency."
)
LEAST_WANTED = ("lost", "preempted", "class", "tokens", "moved", "instance", "model", "time")
"""Columns that give way to ids, which must be whole to be copied."""


def show_request(client: AdminClient, console: Console, request_id: str, *, as_json: bool) -> None:
    """Raises `OperatorError`."""
    timelines = client.request_timelines(request_id)
    if as_json:
        print_json(console, timelines)
        return
    for timeline in timelines.requests:
        _show_timeline(timeline, console)


def list_requests(
    client: AdminClient, console: Console, *, limit: int, model: str, missed: bool, running: bool, as_json: bool
) -> None:
    """Raises `OperatorError`."""
    timelines = client.latest_requests(limit, model=model, missed=missed, running=running)
    table = Table("id", "model", "class", "state", "instance", title="Requests, the newest first", **LOOK)
    for name in ("TTFT", "time", "tokens", "preempted", "moved", "lost"):
        table.add_column(name, justify="right")
    table.add_column("missed")
    for one in timelines.requests:
        missed_names = ", ".join(o.name.upper() for o in one.objectives if not o.is_met)
        missed_cell = Text(missed_names, "red") if missed_names else Text("none" if one.objectives else "-")
        table.add_row(
            one.id,
            escape(one.model),
            one.request_class.value,
            one.state,
            one.instance_id or "-",
            "-" if one.ttft_s is None else seconds(one.ttft_s),
            seconds(one.duration_s),
            f"{one.prompt_tokens}+{one.output_tokens}",
            *(str(number) if number else "" for number in (one.num_preemptions, one.num_moves, one.num_losses)),
            missed_cell,
        )
    empty = _none_of(client, model, missed, running) if not timelines.requests and not as_json else ""
    show_listing(console, timelines, table, as_json=as_json, empty=empty, least_wanted=LEAST_WANTED)


def _none_of(client: AdminClient, model: str, missed: bool, running: bool) -> str:
    """Says that there is no such request, and where it is so, that there is no such model."""
    what = f"request of {escape(model)}" if model else "request"
    told = f"No {what} runs" if running else f"No {what} runs, and none ended lately"
    if missed:
        told = f"No {what} {'that runs' if running else 'of the last minutes'} missed an objective"
    if model:
        states = client.models()
        names = {state.name for state in states.models} | {state.name for state in states.adapters}
        if model not in names:
            told += "; no model of this name is served (tideway models)"
    return f"{told}."


def explain_slo(client: AdminClient, console: Console, *, interval_s: int, as_json: bool) -> None:
    """Raises `OperatorError`."""
    explained = client.explain_slo(interval_s)
    if as_json:
        print_json(console, explained)
        return
    if not explained.objectives:
        console.print(f"No request with an objective ended in the last {interval_s} s.")
        console.print(OBJECTIVES_TOLD)
        return
    console.print(fit(_missed_table(explained), console, ("requests", "share"), ("objective for",)))
    for one in explained.objectives:
        if one.num_missed:
            console.print(_told(one))
    console.print(OBJECTIVES_TOLD)


def _missed_table(explained: SloExplanation) -> Table:
    title = f"Objectives in the last {explained.interval_s:.0f} s"
    table = Table("model", "objective for", title=title, **LOOK)
    for name in ("requests", "missed", "share", "mean\nobjective", "mean of\nmissed"):
        table.add_column(name, justify="right")
    for one in explained.objectives:
        which = " (default)" if one.num_default == one.num_judged else ""
        times = f"{seconds(one.objective_s)}{which}", seconds(one.measured_s) if one.num_missed else "-"
        share = f"{one.num_missed / one.num_judged:.1%}"
        table.add_row(escape(one.model), OBJECTIVES[one.name], str(one.num_judged), str(one.num_missed), share, *times)
    return table


def _told(one: MissedObjective) -> Text:
    total_s = total(one.parts)
    head = f"\n{one.model}, {one.name.upper()}: of the {seconds(total_s)} of a request that missed it, on average\n"
    text = Text(head, "bold")
    for part in one.parts:
        if part.seconds >= 0.005 * total_s:
            cells = round(BAR_CELLS * part.seconds / total_s)
            text.append(f"  {part.phase:24}{seconds(part.seconds):>9} {part.seconds / total_s:5.0%} ", "not bold")
            text.append("█" * cells + "\n", STYLES.get(part.phase, "default"))
    return text.append("  For example:" + "".join(f"\n    {example}" for example in one.examples), "dim")


def _show_timeline(timeline: SequenceTimeline, console: Console) -> None:
    head = f"{timeline.id}  {timeline.model}  {timeline.request_class}  {timeline.state}"
    console.print(Text(head, "bold"), soft_wrap=True)
    ttft = "no token yet" if timeline.ttft_s is None else f"first token after {seconds(timeline.ttft_s)}"
    tokens = f"{timeline.prompt_tokens} prompt and {timeline.output_tokens} output tokens"
    console.print(f"{ttft}, {seconds(timeline.duration_s)} in all; {tokens}; gateway {timeline.gateway_id}")
    spent = Times()
    for phase in timeline.phases:
        spent[phase.phase] += phase.end_s - phase.begin_s
    console.print(phase_bar(timeline.phases, min(2 * BAR_CELLS, console.width)))
    console.print(words(parts_of(spent)))
    for objective in timeline.objectives:
        console.print(Text(objective.text, "green" if objective.is_met else "red"), soft_wrap=True)
    table = Table("after", "what", "by", "", **LOOK)
    table.columns[0].justify = "right"
    for event in timeline.events:
        what = event.kind.replace("_", " ")
        table.add_row(seconds(event.after_s), what, escape(event.teller), escape(event.text))
    console.print(table)
    if timeline.num_left_out:
        console.print(f"{timeline.num_left_out} events in between are left out.")
    console.print()


def phase_bar(phases: Sequence[TimelinePhase], num_cells: int) -> Text:
    """The phases one after the other, `num_cells` in all: edges are rounded, so that rounding does not add up."""
    bar = Text()
    total_s = sum(phase.end_s - phase.begin_s for phase in phases)
    passed_s = 0.0
    for phase in phases:
        passed_s += phase.end_s - phase.begin_s
        cells = round(num_cells * passed_s / max(1e-9, total_s)) - len(bar)
        bar.append("█" * cells, STYLES.get(phase.phase, "default"))
    return bar
