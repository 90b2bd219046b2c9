"""Plots of simulation results, as PNG files: variants side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shared.simulation.metrics import Metrics, Requests
from tideway.bench.plots import PlotsUnavailable, new_figure
from tideway.data_folder import OperatorError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tideway.simulate import Result

BARS: list[tuple[str, Callable[[Metrics], float]]] = [
    ("normalised latency", lambda one: one.normalised_latency),
    ("in SLO, %", lambda one: 100 * one.attainment),
    ("p99 latency, s", lambda one: one.latency_s.p99),
    ("mean TTFT, s", lambda one: one.ttft_s.mean),
    ("p99 TTFT, s", lambda one: one.ttft_s.p99),
    ("mean TPOT, ms", lambda one: 1e3 * one.tpot_s.mean),
    ("p99 TPOT, ms", lambda one: 1e3 * one.tpot_s.p99),
    ("p99 ITL, ms", lambda one: 1e3 * one.itl_s.p99),
    ("devices' time, %", lambda one: 100 * one.use),
]
MAX_INSTANCES = 64
"""Most instances of a setting in a plot."""


def check_available() -> None:
    """Raises `OperatorError` without matplotlib."""
    try:
        new_figure()
    except PlotsUnavailable as error:
        raise OperatorError(f"--plot: {error}") from None


def write_plots(results: Sequence[Result], requests: Sequence[Requests], folder: Path) -> list[Path]:
    """models.png, latency.png and use.png; `requests`: of each result."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = new_figure(len(BARS))
    for one, (label, value) in zip(axes, BARS, strict=True):
        _draw_bars(one, results, value)
        one.set_ylabel(label)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("")
    figure.savefig(folder / "models.png", dpi=110)

    figure, axes = new_figure(2)
    for result, columns in zip(results, requests, strict=True):
        for one, values in zip(axes, (columns.latency_s, columns.ttft_s), strict=True):
            known = np.sort(values[columns.is_online & ~np.isnan(values)])
            one.plot(known, np.arange(1, known.size + 1) / max(1, known.size), label=result.name)
    for one, label in zip(axes, ("latency", "TTFT"), strict=True):
        one.set_ylabel(f"share of requests, {label}")
        one.set_xscale("log")
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("s")
    figure.savefig(folder / "latency.png", dpi=110)

    figure, axes = new_figure()
    names: list[str] = []
    for result in results:
        use = dict(list(result.metrics.use.items())[:MAX_INSTANCES])
        axes[0].bar(
            range(len(names), len(names) + len(use)), [100 * value for value in use.values()], label=result.name
        )
        names += use
    axes[0].set_xticks(range(len(names)), names, rotation=60, fontsize="x-small")
    axes[0].set_ylim(0, 100)
    axes[0].set_ylabel("busy, %")
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("")
    figure.savefig(folder / "use.png", dpi=110)
    return [folder / name for name in ("models.png", "latency.png", "use.png")]


def _draw_bars(axes: Axes, results: Sequence[Result], value: Callable[[Metrics], float]) -> None:
    """A group of bars for each model and all, a bar for each setting."""
    names = list(dict.fromkeys(name for result in results for name in result.metrics.models))
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        known = {**result.metrics.models, "all": result.metrics.total}
        heights = [value(known[name]) if name in known else 0.0 for name in [*names, "all"]]
        places = np.arange(len(heights)) + (number - (len(results) - 1) / 2) * width
        axes.bar(places, heights, width, label=result.name)
    axes.set_xticks(range(len(names) + 1), [*names, "all"])
    axes.tick_params(labelbottom=True)
