"""`tideway top`: the cluster at a glance, refreshed each second, from the gateway's admin API."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import to_builtins
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shared.messages.admin import InstanceState, InstanceStates, ModelState, ModelStates
from shared.messages.cluster import DraftUse, KvCopies
from tideway.console import LOOK, count_sources, fit, print_json
from tideway.data_folder import OperatorError
from tideway.operations import AdminClient, drained_and_gone

INTERVAL_S = 1.0
LEAST_WANTED = (
    "engine",
    "high",
    "off-\nline",
    "models\nready",
    "moved\nout/in",
    "role",
    "steps\nleft",
    "KV pool",
    "moving\nout/in",
    "run+\nwait",
)
"""Columns that give way to long names of instances."""
BAR_CELLS = 5
BARS = ("█░", "#.")
"""A used and an unused part of the pool; the second where the terminal has ASCII alone."""
HIGH_USE = 0.9


@dataclass(frozen=True)
class Snapshot:
    instances: InstanceStates
    models: ModelStates
    taken_s: float

    @classmethod
    def take(cls, client: AdminClient, clock: Callable[[], float]) -> Snapshot:
        """Raises `OperatorError`."""
        instances, models = client.instances(), client.models()
        for model in models.models:
            # The second answer may come of later reports; both tables are to show the same ones.
            on_instances = [one for each in instances.instances for one in each.models if one.name == model.name]
            model.num_running = sum(one.num_running for one in on_instances)
            model.num_waiting = sum(one.num_waiting for one in on_instances)
        return cls(instances, models, clock())

    @property
    def load_age_s(self) -> float | None:
        """Age of the oldest load; None: there is none."""
        return max((each.load.age_s for each in self.instances.instances if each.load), default=None)

    @property
    def num_migrating(self) -> int:
        """Migrations under way."""
        return sum(instance.load.num_migrating_out for instance in self.instances.instances if instance.load)


def moves_per_s(last: Snapshot | None, now: Snapshot) -> float | None:
    """Between two snapshots; an instance that is new, or was restarted, counts from its second."""
    if last is None or now.taken_s <= last.taken_s:
        return None
    before = {i.instance_id: i for i in last.instances.instances}
    num_new = 0
    for instance in now.instances.instances:
        known = before.get(instance.instance_id)
        if known and known.incarnation == instance.incarnation and known.load and instance.load:
            num_new += instance.load.num_migrated_in - known.load.num_migrated_in
    return max(0, num_new) / (now.taken_s - last.taken_s)


def render(snapshot: Snapshot, rate: float | None, url: str, console: Console, problem: str = "") -> RenderableType:
    """`rate`: of moves, per second; `problem`: why there is nothing newer."""
    bar = BARS[console.options.ascii_only]
    instances = fit(_instances(snapshot.instances, bar), console, LEAST_WANTED)
    models = fit(_models(snapshot), console, ("step times", "running", "waiting", "queued"))
    lines: list[RenderableType] = [Text(url, "bold", overflow="fold"), _counts(snapshot, rate)]
    if ages := _ages(snapshot):
        lines.append(ages)
    lines += [instances, models]
    told = [instance for instance in snapshot.instances.instances if instance.load and instance.load.kv_copies]
    if told:
        lines.append(fit(_copies(told), console, ("fetched\nblocks", "not yet\ncopied")))
    there = {instance.instance_id for instance in snapshot.instances.instances}
    if gone := drained_and_gone(snapshot.instances.draining or (), there):
        lines.append(Text(f"\n{gone}", "dim"))
    if problem:
        lines.append(Text(f"\n{problem}", "red"))
    return Group(*lines)


def _counts(snapshot: Snapshot, rate: float | None) -> Text:
    models, instances = snapshot.models.models, snapshot.instances.instances
    queued = [model.num_queued for model in models]
    num_queued = "?" if None in queued else str(sum(filter(None, queued)))
    parts = [
        f"{len(instances)} instance{'s' * (len(instances) != 1)}",
        f"{sum(model.num_running for model in models)} running",
        f"{sum(model.num_waiting for model in models)} waiting",
        f"{num_queued} queued",
        f"{snapshot.num_migrating} moving",
    ]
    if rate is not None:
        parts.append(f"{rate:.1f} moves/s")
    return Text("  ".join(parts), "bold")


def _ages(snapshot: Snapshot) -> Text:
    """How old the numbers are; empty where there are none."""
    load_s, queued_s = snapshot.load_age_s, snapshot.models.queued_age_s
    parts = [] if load_s is None else [f"running, waiting, moving: {load_s:.1f} s ago"]
    parts += [] if queued_s is None else [f"queued: {queued_s:.1f} s ago"]
    return Text("  ".join(parts), "dim")


def _instances(instances: InstanceStates, bar: str) -> Table:
    table = Table(title="\nInstances", **LOOK)
    table.add_column("instance")
    table.add_column("state")
    table.add_column("engine")
    table.add_column("role")
    table.add_column("KV pool")
    for name in ("run+\nwait", "off-\nline", "high", "steps\nleft", "moving\nout/in", "moved\nout/in", "models\nready"):
        table.add_column(name, justify="right")
    for instance in instances.instances:
        drains = instance.instance_id in (instances.draining or ())
        state = "draining" if drains else instance.state
        style = {"ready": "green", "draining": "yellow"}.get(state, "cyan")
        num_ready = sum(model.state == "ready" for model in instance.models)
        models = f"{num_ready}/{sum(model.state != 'host' for model in instance.models)}"
        name, num_devices = escape(instance.instance_id), len(instance.devices)
        name += f" x{num_devices}" if num_devices > 1 else ""
        role = instance.role + ("*" if instance.is_role_fixed else "")
        table.add_row(name, Text(state, style), escape(instance.engine), role, *_load(instance, bar), models)
    return table


def _load(instance: InstanceState, bar: str) -> list[RenderableType]:
    load = instance.load
    if load is None:
        return ["?"] * 7
    freeness = "idle" if load.migration_freeness is None else _short(load.migration_freeness)
    return [
        _bar(load.pool_use, bar),
        f"{load.num_running}+{load.num_waiting}",
        str(load.num_offline),
        str(load.num_high),
        freeness,
        f"{load.num_migrating_out}/{load.num_migrating_in}" if instance.migration else "off",
        f"{load.num_migrated_out}/{load.num_migrated_in}",
    ]


def _short(number: float) -> str:
    return f"{number / 1000:,.0f}k" if abs(number) >= 10_000 else f"{number:.0f}"


def _bar(use: float | None, cells: str) -> Text:
    if use is None:
        return Text("no pool", "dim")
    num_full = round(use * BAR_CELLS)
    bar = Text(cells[0] * num_full, "red" if use >= HIGH_USE else "green")
    return bar.append(cells[1] * (BAR_CELLS - num_full), "dim").append(f" {use:4.0%}", "default")


def _copies(instances: list[InstanceState]) -> Table:
    """Copies of KV between instances, of those that have made, kept or fetched any."""
    table = Table(title="\nCopies of KV", **LOOK)
    table.add_column("instance")
    for name in (
        "backed up\nrequests",
        "not yet\ncopied",
        "sent",
        "kept for\nothers",
        "rescued\ntokens",
        "computed\nagain",
        "prefixes\nfetched",
        "fetched\nblocks",
    ):
        table.add_column(name, justify="right")
    for instance in instances:
        copies = instance.load.kv_copies if instance.load else None
        assert copies is not None
        table.add_row(escape(instance.instance_id), *_numbers(copies))
    return table


def _numbers(copies: KvCopies) -> list[str]:
    return [
        str(copies.num_backed_up),
        str(copies.num_missing_blocks),
        f"{copies.backed_up_bytes / 2**20:,.1f} MiB",
        str(copies.num_kept),
        str(copies.num_rescued_tokens),
        str(copies.num_recomputed_tokens),
        str(copies.num_fetches),
        str(copies.num_fetched_blocks),
    ]


def _drafts(name: str, instances: InstanceStates) -> str:
    """Use of a model's draft model over all instances: how many have it in each state, and the share of drafts kept."""
    loads = [instance.load for instance in instances.instances if instance.load]
    uses: list[DraftUse] = [use for load in loads for use in load.drafts if use.model == name]
    states = Counter(use.state for use in uses)
    told = ", ".join(state if len(uses) == 1 else f"{num} {state}" for state, num in sorted(states.items()))
    num_drafted = sum(use.num_drafted for use in uses)
    return f"{told}, {sum(use.num_kept for use in uses) / num_drafted:.0%} kept" if num_drafted else told


def _models(snapshot: Snapshot) -> Table:
    table = Table(title="\nModels", **LOOK)
    table.add_column("model")
    for name in ("instances", "running", "waiting", "queued"):
        table.add_column(name, justify="right")
    table.add_column("step times")
    drafts = {model.name: _drafts(model.name, snapshot.instances) for model in snapshot.models.models}
    if any(drafts.values()):
        table.add_column("drafts")
    table.add_column("note", overflow="fold")
    for model in snapshot.models.models:
        num_ready = sum(state == "ready" for state in model.instances.values())
        wanted = "" if model.replicas is None else f" of {model.replicas} wanted"
        queued = "?" if model.num_queued is None else str(model.num_queued)
        row = (f"{num_ready}{wanted}", str(model.num_running), str(model.num_waiting), queued)
        on_instances = (one for instance in snapshot.instances.instances for one in instance.models)
        sources = count_sources(one.cost_model for one in on_instances if one.name == model.name)
        told = [drafts[model.name]] if any(drafts.values()) else []
        table.add_row(escape(model.name), *row, sources, *told, escape(_note(model, snapshot.instances)))
    return table


def _note(model: ModelState, instances: InstanceStates) -> str:
    if reason := model.unplaced or _load_errors(model.name, instances) or model.failure:
        return reason
    if not model.on_demand or model.state == "ready":
        return ""
    where = {"host": "put away, in host memory", "disk": "put away, on disk"}.get(model.state, model.state)
    return where if model.why_asleep in ("", "idle") else f"{where} ({model.why_asleep})"


def _load_errors(name: str, instances: InstanceStates) -> str:
    """Each with the instances where it came up; also what those wait for whose server is down."""
    places: dict[str, list[str]] = {}
    for instance in instances.instances:
        for model in instance.models:
            if model.name == name and (model.state == "failed" or (model.state == "loading" and model.error)):
                places.setdefault(model.error or "no reason given", []).append(instance.instance_id)
    return "; ".join(f"not served on {', '.join(ids)}: {error}" for error, ids in places.items())


def show_top(
    client: AdminClient,
    console: Console,
    *,
    once: bool,
    as_json: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Until Ctrl-C; `once`, or where nobody looks on (no terminal): one view. `as_json`: one, as an object. Raises
    `OperatorError` where the first cannot be had; later ones that fail are said and tried again."""
    last = Snapshot.take(client, clock)
    if as_json:
        told = {"url": client.url, **to_builtins(last.instances), **to_builtins(last.models)}
        print_json(console, told)
        return
    if once or not console.is_terminal:
        console.print(render(last, None, client.url, console))
        return
    rate, problem = None, ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(render(last, rate, client.url, console, problem), refresh=True)
                time.sleep(INTERVAL_S)
                try:
                    snapshot = Snapshot.take(client, clock)
                    rate, last, problem = moves_per_s(last, snapshot), snapshot, ""
                except OperatorError as error:
                    problem = str(error)
        except KeyboardInterrupt:
            pass  # how one leaves it
