"""Plots of records, as PNG files. matplotlib is imported when a plot is drawn (extra `bench`).

The `draw_*` functions draw on given axes, so that several runs can be laid over or beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.messages.requests import RequestClass
from tideway.bench.records import RequestRecord
from tideway.bench.server_metrics import Series
from tideway.bench.summary import in_flight, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {RequestClass.ONLINE: "tab:blue", RequestClass.OFFLINE: "tab:orange"}
MAX_SERIES = 12
"""In one plot; more cannot be told apart."""


class PlotsUnavailable(Exception):
    """matplotlib is not installed."""


def new_figure(num_rows: int = 1, title: str = "") -> tuple[Figure, list[Axes]]:
    """Rows of axes that share their time axis. Raises `PlotsUnavailable`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsUnavailable("plots need matplotlib (pip install matplotlib)") from None
    figure = Figure(figsize=(10, 1 + 3 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0]
    if title:
        figure.suptitle(title)
    for one in axes:
        one.grid(alpha=0.3)
    axes[-1].set_xlabel("time, s")
    return figure, list(axes)


def draw_latency(
    axes: Axes, records: Sequence[RequestRecord], metric: str = "ttft", label: str = "", **style: Any
) -> None:
    """Each success at its arrival; `metric`: ttft, tpot or latency. The lines are the objectives that records carry."""
    points = [(r.arrival_s, getattr(r, f"{metric}_s")) for r in records if r.is_success]
    known = np.array([(at_s, value * 1000) for at_s, value in points if value is not None]).reshape(-1, 2)
    axes.scatter(known[:, 0], known[:, 1], s=8, alpha=0.6, label=label or None, **style)
    objectives: set[float | None] = {getattr(record, f"{metric}_objective_s", None) for record in records}
    for objective_s in objectives:
        if objective_s is None:
            continue
        axes.axhline(objective_s * 1000, color="tab:red", linestyle="--", linewidth=1, label="SLO")
    failed = [record.arrival_s for record in records if record.error and not record.is_unfinished]
    if failed:
        axes.scatter(failed, np.zeros(len(failed)), marker="x", color="black", s=20, label="failed")
    axes.set_ylabel(f"{metric.upper() if metric != 'latency' else 'E2E'}, ms")
    axes.set_ylim(bottom=0)


def draw_throughput(axes: Axes, records: Sequence[RequestRecord], width_s: float = 1.0) -> None:
    """Output tokens per second, the classes on top of each other."""
    end_s = max((record.last_token_s or 0.0 for record in records), default=0.0)
    times = np.arange(0.0, max(end_s, width_s), width_s)
    layers = {}
    for request_class, members in by_class(records).items():
        values = throughput(members, width_s)[1]
        layers[request_class] = np.pad(values, (0, max(0, times.size - values.size)))[: times.size]
    if layers:
        colours = [COLOURS[request_class] for request_class in layers]
        axes.stackplot(times, *layers.values(), labels=list(layers), colors=colours, step="post", alpha=0.8)
    axes.set_ylabel("output tokens per s")


def draw_in_flight(axes: Axes, records: Sequence[RequestRecord]) -> None:
    for request_class, members in by_class(records).items():
        axes.step(*in_flight(members), where="post", color=COLOURS[request_class], label=request_class)
    axes.set_ylabel("requests in flight")
    axes.set_ylim(bottom=0)


def draw_series(axes: Axes, series: Mapping[str, Series]) -> None:
    """Counters (names with _total) as rates per second."""
    for name, points in series.items():
        times, values = np.array(points).reshape(-1, 2).T
        if "_total" in name:
            if times.size < 2:
                continue
            times, values = times[1:], np.diff(values) / np.maximum(np.diff(times), 1e-9)
        axes.plot(times, values, label=name, linewidth=1)


def by_class(records: Sequence[RequestRecord]) -> dict[RequestClass, list[RequestRecord]]:
    members: dict[RequestClass, list[RequestRecord]] = {}
    for record in records:
        members.setdefault(record.request_class, []).append(record)
    return dict(sorted(members.items(), key=lambda item: item[0] is not RequestClass.ONLINE))


def write_plots(
    records: Sequence[RequestRecord], folder: Path, series: Mapping[str, Series] | None = None, title: str = ""
) -> list[Path]:
    """latency.png, throughput.png, batch.png and, where the server gave metrics, server.png. Raises `PlotsUnavailable`."""
    written: list[Path] = []

    def save(figure: Figure, axes: Sequence[Axes], name: str) -> None:
        for one in axes:
            handles, labels = one.get_legend_handles_labels()
            if handles:
                unique = dict(zip(labels, handles, strict=True))
                one.legend(unique.values(), unique.keys(), fontsize="small", loc="upper left")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=110)
        written.append(folder / name)

    classes = by_class(records)
    # An objective is somebody who waits: offline latencies would only hide the scale.
    waited_for = classes.get(RequestClass.ONLINE) or list(records)
    figure, axes = new_figure(3, title)
    for one, metric in zip(axes, ("ttft", "tpot", "latency"), strict=True):
        draw_latency(one, waited_for, metric)
    save(figure, axes, "latency.png")
    figure, axes = new_figure(1, title)
    draw_throughput(axes[0], records, _width_s(records))
    save(figure, axes, "throughput.png")
    shown = _composition(series or {})
    figure, axes = new_figure(2 if shown else 1, title)
    draw_in_flight(axes[0], records)
    if shown:
        draw_series(axes[1], shown)
        axes[1].set_ylabel("as the server says")
    save(figure, axes, "batch.png")
    rates = _changing({name: points for name, points in (series or {}).items() if "_total" in name})
    if rates:
        figure, axes = new_figure(1, title)
        draw_series(axes[0], rates)
        axes[0].set_ylabel("per s")
        save(figure, axes, "server.png")
    return written


def _width_s(records: Sequence[RequestRecord]) -> float:
    end_s = max((record.last_token_s or 0.0 for record in records), default=0.0)
    return max(1.0, end_s / 300)


def _composition(series: Mapping[str, Series]) -> dict[str, Series]:
    """Gauges that say what is in the batch, in the queue or in memory."""
    words = ("running", "waiting", "queued", "batch", "suspended", "in_flight", "harvest")
    return _changing({n: p for n, p in series.items() if "_total" not in n and any(word in n for word in words)})


def _changing(series: Mapping[str, Series]) -> dict[str, Series]:
    """Those that changed, the ones with the largest changes first."""
    spans = {name: max(v for _, v in points) - min(v for _, v in points) for name, points in series.items()}
    names = sorted((name for name in series if spans[name] > 0), key=lambda name: -spans[name])
    return {name: series[name] for name in names[:MAX_SERIES]}
