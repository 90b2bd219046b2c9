"""Plots of an experiment's result, as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.coserving.results import ExperimentResult
from tideway.bench.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "online_only": "tab:blue", "vllm++": "tab:orange", "tideway": "tab:green", "scheduler": "tab:red",
    "+checkpoint": "tab:purple", "+prefetch": "tab:brown",
}  # fmt: skip


def write_figures(result: ExperimentResult, stem: Path) -> list[Path]:
    """`stem`.NAME.png for each plot. Raises `PlotsUnavailable`."""
    plots = PLOTS.get(result.experiment, {})
    paths = []
    for name, draw in plots.items():
        path = stem.with_name(f"{stem.name}.{name}.png")
        draw(result).savefig(path, dpi=110)
        paths.append(path)
    return paths


def _title(result: ExperimentResult) -> str:
    where = result.remark or f" on {result.machine['gpu'] or result.machine['cpu']}"
    return f"{result.experiment}, {result.setup['model']}{where}, {result.date}"


def _latency(result: ExperimentResult) -> Figure:
    figure, axes = new_figure(3, _title(result))
    objectives = result.parameters["objectives"]
    for axis, column, name in ((axes[0], 1, "ttft_ms"), (axes[1], 2, "tpot_ms")):
        for system, series in result.series.items():
            points = [(row[0], row[column] * 1000) for row in series["online"] if row[column] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), ".", label=system, color=COLOURS[system])
        axis.axhline(objectives[name], color="tab:red", linestyle="--", linewidth=1, label="SLO")
        axis.set_yscale("log")
        axis.set_ylabel(name.split("_")[0].upper() + ", ms")
        axis.legend(fontsize="small")
    for system, series in result.series.items():
        totals = np.array(series["online_tokens_per_s"]) + np.array(series["offline_tokens_per_s"])
        axes[2].plot(totals, label=system, color=COLOURS[system])
    axes[2].set_ylabel("tokens per s, all")
    axes[2].legend(fontsize="small")
    return figure


def _batch(result: ExperimentResult) -> Figure:
    """What Tideway computes each second, what runs, and the pool."""
    series: dict[str, Any] = result.series["tideway"]
    figure, axes = new_figure(3, _title(result))
    online, offline = series["online_tokens_per_s"], series["offline_tokens_per_s"]
    axes[0].stackplot(range(len(online)), online, offline, labels=["online", "offline"], step="post", alpha=0.8)
    axes[0].set_ylabel("tokens per s")
    samples = np.array(series["samples"]).T
    for row, name in ((1, "online running"), (2, "online waiting"), (3, "offline running")):
        axes[1].plot(samples[0], samples[row], label=name)
    axes[1].set_ylabel("requests")
    axes[2].plot(samples[0], 100 * samples[4], label="KV pool")
    axes[2].plot(samples[0], 100 * samples[5], label="host memory")
    axes[2].set_ylabel("used, %")
    for axis in axes:
        axis.legend(fontsize="small", loc="upper left")
        for at_s in result.parameters.get("on_at_s", ()):
            axis.axvline(at_s, color="black", linewidth=0.8)
        for at_s in result.parameters.get("off_at_s", ()):
            axis.axvline(at_s, color="black", linewidth=0.8, linestyle=":")
    return figure


def _sweep(result: ExperimentResult) -> Figure:
    figure, axes = new_figure(4, _title(result))
    values = [point["value"] for point in result.parameters["points"]]
    metrics: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("TTFT P99, ms", lambda one: one.ttft_s.p99 * 1000),
        ("TPOT P99, ms", lambda one: one.tpot_s.p99 * 1000),
        ("ITL P99, ms", lambda one: one.itl_s.p99 * 1000),
        ("offline tokens per s", lambda one: one.offline_tokens_per_s),
    )
    for axis, (label, metric) in zip(axes, metrics, strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        for value, figures in zip(values, result.figures.values(), strict=True):
            for one in figures:
                points.setdefault(one.system, []).append((value, metric(one)))
        for system, line in points.items():
            axis.plot(*zip(*line, strict=True), "o-", label=system, color=COLOURS[system])
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel(result.parameters["varied"])
    return figure


def _curve(result: ExperimentResult) -> Figure:
    """Per load, over the TPOT objective: offline tokens per second as lines, requests that kept both objectives dashed."""
    of_load: dict[str, list[Any]] = {}
    for point in sorted(result.measured["points"], key=lambda point: point.objectives.tpot_s):
        of_load.setdefault(point.load, []).append(point)
    figure, axes = new_figure(len(of_load), _title(result))
    for axis, (load, points) in zip(axes, of_load.items(), strict=True):
        tpot_ms = [point.objectives.tpot_s * 1000 for point in points]
        shares = axis.twinx()
        for name in points[0].offline_tokens_per_s:
            colour = COLOURS.get(name, "tab:gray" if name == "bound" else "tab:red")
            if name != "online_only":
                axis.plot(tpot_ms, [p.offline_tokens_per_s[name] for p in points], "o-", label=name, color=colour)
            if name in points[0].attainment:
                shares.plot(tpot_ms, [100 * p.attainment[name] for p in points], "x--", label=name, color=colour)
        axis.set_xscale("log")
        axis.set_ylabel(f"{load}: offline tokens per s")
        shares.set_ylabel("both kept, % (dashed)")
        shares.set_ylim(-5, 105)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("TPOT objective, ms (TTFT's grows with it)")
    return figure


def _steps(result: ExperimentResult) -> Figure:
    """Bars of offline throughput and of P99 TTFT, with Online-Only's as a line: ConServe's figure 8."""
    figure, axes = new_figure(2, _title(result))
    figures = [one for one in result.figures["all"] if one.system != "online_only"]
    alone = next(one for one in result.figures["all"] if one.system == "online_only")
    names = [one.system for one in figures]
    for axis, label, values in (
        (axes[0], "offline tokens per s", [one.offline_tokens_per_s for one in figures]),
        (axes[1], "TTFT P99, ms", [one.ttft_s.p99 * 1000 for one in figures]),
    ):
        axis.bar(names, values, color=[COLOURS[name] for name in names])
        axis.set_ylabel(label)
    axes[1].axhline(alone.ttft_s.p99 * 1000, color="tab:red", linestyle="--", label="online_only")
    axes[1].legend(fontsize="small")
    axes[1].set_xlabel("")
    return figure


_OVER_TIME = {"latency": _latency, "batch": _batch}
PLOTS: dict[str, dict[str, Callable[[ExperimentResult], Figure]]] = {
    "trace": _OVER_TIME,
    "onoff": _OVER_TIME,
    "burst": {"sweep": _sweep},
    "rate": {"sweep": _sweep},
    "ablation": {"steps": _steps},
    "objectives": {"curve": _curve},
}
"""Plots of each experiment, by the name of the file."""
