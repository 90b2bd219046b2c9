"""`tideway top`: the cluster at a glance, refreshed each second. What it shows comes from the gateway's admin API."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tideway.data_folder import OperatorError
from tideway.operations import AdminClient, Instance, Instances, Models

INTERVAL_S = 1.0
LOOK: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None, "padding": (0, 2, 0, 0)}
"""Of tables; narrow enough for 80 columns."""
BAR_CELLS = 5
BARS = ("█░", "#.")
"""A used and an unused part of the pool; the second where the terminal has ASCII alone."""
HIGH_USE = 0.9


@dataclass(frozen=True)
class Snapshot:
    instances: Instances
    models: Models
    taken_s: float

    @classmethod
    def take(cls, client: AdminClient, clock: Callable[[], float]) -> Snapshot:
        """Raises `OperatorError`."""
        return cls(client.instances(), client.models(), clock())

    @property
    def num_moved(self) -> int:
        """Moves that the instances here have taken in since they started."""
        return sum(instance.load.num_moved_in for instance in self.instances.instances if instance.load)

    @property
    def num_moving(self) -> int:
        """Migrations under way."""
        return sum(instance.load.num_moving_out for instance in self.instances.instances if instance.load)


def moves_per_s(last: Snapshot | None, now: Snapshot) -> float | None:
    """Between two snapshots; an instance that is new, or was restarted, counts from its second."""
    if last is None or now.taken_s <= last.taken_s:
        return None
    before = {i.instance_id: i for i in last.instances.instances}
    num_new = 0
    for instance in now.instances.instances:
        known = before.get(instance.instance_id)
        if known and known.incarnation == instance.incarnation and known.load and instance.load:
            num_new += instance.load.num_moved_in - known.load.num_moved_in
    return max(0, num_new) / (now.taken_s - last.taken_s)


def render(snapshot: Snapshot, rate: float | None, url: str, problem: str = "", *, is_ascii: bool) -> RenderableType:
    """`rate`: of moves, per second; `problem`: why there is nothing newer; `is_ascii`: the terminal shows nothing else."""
    instances = _instances(snapshot.instances, BARS[is_ascii])
    lines: list[RenderableType] = [_heading(snapshot, rate, url), instances, _models(snapshot)]
    gone = sorted(set(snapshot.instances.draining or ()) - {i.instance_id for i in snapshot.instances.instances})
    if gone:
        lines.append(Text(f"\nDrained and gone: {', '.join(gone)} (tideway drain --undo brings one back)", "dim"))
    if problem:
        lines.append(Text(f"\n{problem}", "red"))
    return Group(*lines)


def _heading(snapshot: Snapshot, rate: float | None, url: str) -> Text:
    models, instances = snapshot.models.models, snapshot.instances.instances
    queued = [model.num_queued for model in models]
    num_queued = "?" if None in queued else str(sum(filter(None, queued)))
    moved = f"{snapshot.num_moved} moved" + (f" ({rate:.1f}/s)" if rate is not None else "")
    parts = [
        url,
        f"{len(instances)} instance{'s' * (len(instances) != 1)}",
        f"{sum(model.num_running for model in models)} running",
        f"{sum(model.num_waiting for model in models)} waiting",
        f"{num_queued} queued",
        f"{snapshot.num_moving} moving",
        moved,
    ]
    return Text("  ".join(parts), "bold")


def _instances(instances: Instances, bar: str) -> Table:
    table = Table(title="\nInstances", **LOOK)
    table.add_column("instance", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    table.add_column("KV pool", no_wrap=True)
    for name in ("run+\nwait", "off-\nline", "high", "steps\nleft", "moving\nout/in", "moved\nout/in", "models\nready"):
        table.add_column(name, justify="right", no_wrap=True)
    for instance in instances.instances:
        drains = instance.instance_id in (instances.draining or ())
        state = "draining" if drains else instance.state
        style = {"ready": "green", "draining": "yellow"}.get(state, "cyan")
        num_ready = sum(model.state == "ready" for model in instance.models)
        models = f"{num_ready}/{len(instance.models)}"
        table.add_row(escape(instance.instance_id), Text(state, style), *_load(instance, bar), models)
    return table


def _load(instance: Instance, bar: str) -> list[RenderableType]:
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
        f"{load.num_moving_out}/{load.num_moving_in}" if instance.migration else "off",
        f"{load.num_moved_out}/{load.num_moved_in}",
    ]


def _short(number: float) -> str:
    return f"{number / 1000:,.0f}k" if abs(number) >= 10_000 else f"{number:.0f}"


def _bar(use: float | None, cells: str) -> Text:
    if use is None:
        return Text("no pool", "dim")
    num_full = round(use * BAR_CELLS)
    bar = Text(cells[0] * num_full, "red" if use >= HIGH_USE else "green")
    return bar.append(cells[1] * (BAR_CELLS - num_full), "dim").append(f" {use:4.0%}", "default")


def _models(snapshot: Snapshot) -> Table:
    table = Table(title="\nModels", **LOOK)
    table.add_column("model")
    for name in ("instances", "running", "waiting", "queued"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for model in snapshot.models.models:
        num_ready = sum(state == "ready" for state in model.instances.values())
        wanted = "" if model.replicas is None else f" of {model.replicas}"
        queued = "?" if model.num_queued is None else str(model.num_queued)
        row = (f"{num_ready}{wanted}", str(model.num_running), str(model.num_waiting), queued)
        table.add_row(escape(model.name), *row, escape(model.unplaced or ""))
    return table


def show_top(client: AdminClient, console: Console, *, once: bool, clock: Callable[[], float] = time.monotonic) -> None:
    """Until Ctrl-C; `once`, or where nobody looks on (no terminal): one view. Raises `OperatorError` where the first
    cannot be had; later ones that fail are said and tried again."""
    last = Snapshot.take(client, clock)
    is_ascii = console.options.ascii_only
    if once or not console.is_terminal:
        console.print(render(last, None, client.url, is_ascii=is_ascii))
        return
    rate, problem = None, ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(render(last, rate, client.url, problem, is_ascii=is_ascii), refresh=True)
                time.sleep(INTERVAL_S)
                try:
                    snapshot = Snapshot.take(client, clock)
                    rate, last, problem = moves_per_s(last, snapshot), snapshot, ""
                except OperatorError as error:
                    problem = str(error)
        except KeyboardInterrupt:
            pass  # how one leaves it
