"""`tideway plan`: the running and the proposed placement, predicted and measured, and the way from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.messages.admin import PlanProposal, ReplacementState, ShownPlan
from shared.messages.cluster import ModelSpec, PlanChange
from shared.placement.plan import (
    ATTAINMENT_GRAIN,
    FLOOR_SHARE,
    MOST_FLOOR_COST,
    ModelPrediction,
    Plan,
    Prediction,
    Trial,
    told_left_behind,
)
from tideway.console import SLO_TOLD, WAIT_LINE_INTERVAL_S, fit, print_json
from tideway.data_folder import OperatorError
from tideway.operations import CHOSEN, AdminClient, UnavailableError
from tideway.plan_file import GroupSpec

POLL_INTERVAL_S = 0.5
STAGES = {
    "fetch": "nodes fetch the weights; nothing changes before all have them",
    "change": "models and instances change place, step by step",
    "settle": "everything serves; it is watched for a moment",
    "roll_back": "back to the plan of before",
    "carried_out": "carried out",
    "rolled_back": "rolled back",
}
STAGES_WITH_STEPS = ("change", "roll_back")

FIGURES: dict[str, Callable[[ModelPrediction], float]] = {
    "P99 s": lambda one: one.p99_latency_s,
    "TTFT s": lambda one: one.mean_ttft_s,
    "TPOT ms": lambda one: 1e3 * one.mean_tpot_s,
}
"""Columns shown where there is room."""


def show_plan(plan: ShownPlan, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(console, plan)
        return
    state = _state(plan)
    console.print(_describe(state))
    proposal = state.proposal
    is_current = proposal is not None and proposal.version == plan.version
    console.print(_places(plan, proposal if is_current else None))
    models = _models(state, proposal if is_current else None)
    console.print(fit(models, console, (*reversed(FIGURES), "requests")))
    known = [state.measured] + ([proposal.measured, proposal.prediction] if proposal is not None and is_current else [])
    if any(one is not None and one.num_requests for one in known):
        console.print(SLO_TOLD)
    for name, reason in plan.unplaced.items():
        console.print(f"{escape(name)} is on no instance: {escape(reason)}")
    if plan.is_chosen:
        console.print(f"{CHOSEN[0].upper()}{CHOSEN[1:]}.")
    if proposal is None:
        console.print("No search has found a plan yet: tideway plan --search.")
    elif not is_current:
        console.print("The last proposal was for another plan than the one that runs: tideway plan --search.")
    else:
        worth = "worth a change" if proposal.is_worth else "not worth a change"
        console.print(f"Proposed, {worth} ({proposal.cause or 'no cause is known'}): {escape(proposal.verdict)}.")
        for line in _floor(proposal):
            console.print(escape(line))
        if proposal.trial is not None and proposal.plan != proposal.before:
            console.print(_trial(proposal.trial))
        for rejected in proposal.rejected:
            console.print(Padding(Text(f"rejected: {_line(rejected.plan)}"), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(rejected.reason), (0, 0, 0, 4), expand=False))
        for name, reason in proposal.unplaced.items():
            console.print(f"  {escape(name)} fits nowhere: {escape(reason)}")
    if plan.change is not None:
        console.print(_told(plan.change))


def search(client: AdminClient, *, wait_s: float, say: Callable[[str], None]) -> None:
    """Raises `OperatorError` where none comes of it."""
    client.change_plan("search")
    state = _searched(client, wait_s, say)
    assert state.proposal is not None
    say(
        f"The search over {state.proposal.num_requests} requests, online and offline, took {state.proposal.search_s:.1f} s."
    )


def _searched(client: AdminClient, wait_s: float, say: Callable[[str], None]) -> ReplacementState:
    say("Searching; requests are served meanwhile.")
    began_s = time.monotonic()
    deadline_s, said_s = began_s + wait_s, began_s
    while (state := _state(client.shown_plan())).searching:
        if (now_s := time.monotonic()) - said_s >= WAIT_LINE_INTERVAL_S:
            say(f"  still searching ({now_s - began_s:.0f} s)")
            said_s = now_s
        _pause(deadline_s, f"The search is not over after {wait_s:g} s. It goes on by itself.")
    if state.problem:
        raise OperatorError(f"No plan was found: {state.problem}.")
    return state


def carry_out(
    client: AdminClient,
    action: str,
    groups: Sequence[GroupSpec] = (),
    *,
    wait_s: float,
    say: Callable[[str], None],
) -> None:
    """`action`: apply | roll_back | set, a plan of these groups. Shows stages and steps as they come; `OperatorError` where
    it, or the replacement that undoes the last one, is rolled back."""
    before = client.shown_plan().change
    seen = before.number if before is not None else 0
    if before is not None and not before.is_over:
        seen -= 1  # this one is followed to its end
    if action == "set":
        client.set_plan(groups)
    elif client.change_plan(action).searching:
        _searched(client, wait_s, say)
    deadline_s = time.monotonic() + wait_s
    stage, num_steps = "", 0
    while True:
        try:
            plan = client.shown_plan()
        except UnavailableError as error:
            say(f"  {error}")
            _pause(deadline_s, f"The plan is not carried out after {wait_s:g} s. It goes on by itself.")
            continue
        change = plan.change
        if change is None or change.number <= seen:
            if action == "set":
                say("The plan that runs has these groups; nothing changes.")
                return
            proposal = _state(plan).proposal
            if proposal is not None and not proposal.is_change:
                say("The best plan found is the one that runs; nothing changes.")
                return
            raise OperatorError(f"Nothing is carried out: {_state(plan).problem or 'placement says no reason'}.")
        if not stage:
            say(f"Replacement {change.number}: {change.reason}")
            if before is not None and before.undoes and change.undoes == before.number:
                say(f"  {before.number} rolled {before.undoes} back: the placement of {before.undoes} comes back.")
        for line in lines_of(change, stage, num_steps):
            say(line)
        stage, num_steps = change.stage, len(change.steps)
        if change.is_over:
            for name in change.interrupted:
                say(f"  {name} had no instance for a while: its requests waited.")
            is_new = before is None or change.number > before.number
            if change.stage == "rolled_back" and (action != "roll_back" or (is_new and change.undoes)):
                raise OperatorError(f"Rolled back: {change.failure}.")
            if change.undoes and change.stage == "carried_out":
                say(
                    f"Replacement {change.undoes} is undone. Another --rollback undoes this, replacement {change.number}."
                )
            return
        _pause(deadline_s, f"The plan is not carried out after {wait_s:g} s. It goes on by itself.")


def lines_of(change: PlanChange, stage: str, num_steps: int) -> list[str]:
    """What is new since `stage` (empty: nothing was told) and so many steps were told. A step stands below its stage, also
    where that stage was over before it was seen."""
    steps = [f"    {step}" for step in change.steps[num_steps:]]
    if change.stage == stage:
        return steps
    if steps and stage not in STAGES_WITH_STEPS:
        seen = change.stage if change.stage in STAGES_WITH_STEPS else "change"
        steps.insert(0, f"  {seen}: {STAGES[seen]}")
        if seen == change.stage:
            return steps
    return [*steps, f"  {change.stage}: {STAGES.get(change.stage, '')}"]


def _pause(deadline_s: float, late: str) -> None:
    if time.monotonic() >= deadline_s:
        raise OperatorError(late)
    time.sleep(POLL_INTERVAL_S)


def _state(plan: ShownPlan) -> ReplacementState:
    if plan.replacement is None:
        raise UnavailableError("Placement does not answer.")
    return plan.replacement


def _describe(state: ReplacementState) -> str:
    age_s = time.time() - state.since_s
    text = f"Replacement is {state.mode} (TIDEWAY_REPLACEMENT); this interval of {state.interval_s:.0f} s began "
    text += f"{age_s:.0f} s ago"
    if state.measured is not None and (num := state.measured.num_requests):
        text += f": {num} online request{'s' * (num != 1)} since, {_attained(state.measured)}"
        if state.predicted is not None:
            text += f"; predicted: {_attained(state.predicted)}"
    if state.deviation is not None:
        text += f"; the last one differed from its prediction by {state.deviation:.0%}"
    if state.searching:
        text += f". Searching now: {state.searching}"
    elif state.problem:
        text += f". The last search found nothing: {state.problem}"
    return escape(text.rstrip(".")) + "."


def _places(plan: ShownPlan, proposal: PlanProposal | None) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for header in ("instance", "devices", "models now", "proposed"):
        table.add_column(header)
    now = {place.instance_id: place for place in plan.instances}
    wanted = {place.instance_id: place for place in (proposal.target if proposal is not None else ())}
    for instance_id in sorted(now.keys() | wanted.keys()):
        old, new = now.get(instance_id), wanted.get(instance_id)
        ranks = [str(place.group.num_ranks) for place in (old, new) if place is not None]
        names = [", ".join(map(_named, place.models)) if place is not None else "-" for place in (old, new)]
        if proposal is None:
            names[1] = ""
        elif old is not None and new is not None and old != new and names[0] == names[1]:
            names[1] += " (made anew: another KV pool or devices)"
        table.add_row(instance_id, " -> ".join(dict.fromkeys(ranks)), *map(escape, names))
    return table


def _named(spec: ModelSpec) -> str:
    """Model's name, with the engine that computes it if that is not Tideway's own."""
    return spec.name if spec.is_native else f"{spec.name} ({spec.engine})"


def _models(state: ReplacementState, proposal: PlanProposal | None) -> Table:
    """Attainment and normalised latency of each model's online requests: of those that the last search saw, measured and
    predicted for the plan that ran and for the one it proposes; without a search, of this interval. Then the `FIGURES` that
    are predicted."""
    if proposal is not None:
        over = f"the {proposal.interval_s:.0f} s before the search"
        measured = proposal.measured
        predicted = {"as now": proposal.incumbent, "proposed": proposal.prediction}
    else:
        over, measured, predicted = "this interval", state.measured, {"predicted": state.predicted}
    title = f"Online requests of {over}: within their SLO, and latency over the model's mean execution time"
    if any(one is not None for one in predicted.values()):
        title += "; the last columns are predicted"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("model")
    for header in ("requests", "measured", *predicted, *FIGURES):
        table.add_column(header, justify="right")
    plans = list(predicted.values())
    for name in sorted({name for one in (measured, *plans) if one is not None for name in one.models}):
        num = measured.models[name].num_requests if measured and name in measured.models else 0
        figures = [_figure(plans, name, value) for value in FIGURES.values()]
        table.add_row(escape(name), str(num), *(_cell(one, name) for one in (measured, *plans)), *figures)
    return table


def _floor(proposal: PlanProposal) -> list[str]:
    """How the model that is served worst fares in the proposed plan, what that costs the others, and who is left behind."""
    prediction, lines = proposal.prediction, []
    if worst := prediction.worst:
        attainment = prediction.models[worst].attainment
        line = f"Served worst would be {worst}: {attainment:.1%} within its SLO, of all requests {prediction.attainment:.1%}"
        cost = f"; the plan that serves most in total has {proposal.floor_cost:.1%} more"
        lines.append(line + (cost if proposal.floor_cost >= ATTAINMENT_GRAIN else "") + ".")
    for which, one in (("now", proposal.incumbent), ("by the proposed plan", prediction)):
        if one is not None and (behind := told_left_behind(one)):
            lines.append(
                f"Left behind {which}, below {FLOOR_SHARE:.0%} of the attainment of all requests: {behind}. "
                f"No plan was found that helps them at a price of {MOST_FLOOR_COST:.0%} of the others."
                if one is prediction
                else f"Left behind {which}: {behind}."
            )
    return lines


def _trial(trial: Trial) -> RenderableType:
    """Attainment and normalised latency on the traffic of late, without the change and with it."""
    title = (
        f"The change takes {trial.change_s:.0f} s, in which {trial.lost_device_s:.0f} s of devices serve nobody, and "
    )
    title += f"{trial.moved_bytes / 1e9:.2g} GB of KV move"
    title += f"; with a quarter more requests attainment would change by {trial.busier_gain:+.1%}"
    if trial.interrupted:
        title += f"; {', '.join(trial.interrupted)} would wait"
    if not trial.horizons:
        return Text(f"{title}. What it would have gained is not known yet.")
    table = Table(title=escape(title), title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for header in ("on the last", "requests", "as now", "changed", "were it free"):
        table.add_column(header, justify="right")
    for one in trial.horizons:
        pairs = (
            (one.stay_attainment, one.stay_latency),
            (one.change_attainment, one.change_latency),
            (one.free_attainment, one.free_latency),
        )
        cells = [f"{attainment:.1%} {latency:.2f}x" for attainment, latency in pairs]
        table.add_row(f"{one.seconds:.0f} s", str(one.num_requests), *cells)
    return table


def _attained(prediction: Prediction) -> str:
    return f"{prediction.attainment:.1%} within their SLO, normalised latency {prediction.normalised_latency:.2f}"


def _cell(prediction: Prediction | None, name: str) -> str:
    model = prediction.models.get(name) if prediction is not None else None
    if model is None or not model.num_requests:
        return "-"
    return f"{model.attainment:.1%} {model.normalised_latency:.2f}x"


def _figure(plans: Iterable[Prediction | None], name: str, value: Callable[[ModelPrediction], float]) -> str:
    models = [plan.models.get(name) if plan is not None else None for plan in plans]
    told = [f"{value(model):.3g}" if model is not None and model.num_requests else "-" for model in models]
    return " -> ".join(told) if set(told) != {"-"} else "-"


def _line(plan: Plan) -> str:
    groups: Iterable[str] = (
        f"{group.instance_id}{f' x{group.num_ranks}' if group.num_ranks > 1 else ''}: {'+'.join(group.models)}"
        for group in plan.groups
    )
    return "; ".join(groups)


def _told(change: PlanChange) -> str:
    text = f"Replacement {change.number} ({change.reason}): {change.stage}"
    return escape(text + (f", because {change.failure}" if change.failure else "")) + "."
