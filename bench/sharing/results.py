"""Figures of runs, as tables and plots, beside what SeaLLM's text says of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from bench.reporting import table
from bench.sharing.systems import Run
from shared.placement.plan import DEFAULT_SLO_SCALE
from shared.simulation.itl import Itl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = (1.0, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Scales of SLOs that are multiples of a service's mean execution time."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one system at one x, in seconds. All zero where the system has no placement."""

    x: float
    system: str
    seed: int = 0
    num_requests: int = 0
    normalised_latency: float = 0.0
    """Mean of latency over the mean execution time of the request's service."""
    p99_latency_s: float = 0.0
    attainment: float = 0.0
    """Share within `DEFAULT_SLO_SCALE` times what the request itself takes alone."""
    mean_attainments: list[float] = []
    """Share within `SCALES` times the mean execution time of its service."""
    services: dict[str, tuple[int, float, float]] = {}
    """By service: requests, normalised latency, attainment as above."""
    mean_ttft_s: float = 0.0
    p99_ttft_s: float = 0.0
    mean_tpot_s: float = 0.0
    p99_tpot_s: float = 0.0
    itl_s: Itl = Itl()
    p99_silence_s: float = 0.0
    """P99 over requests of the longest time between two tokens."""
    max_silence_s: float = 0.0
    num_preemptions: int = 0
    num_migrations: int = 0
    num_changes: int = 0
    """Changes of the placement while it ran."""
    took_s: float = 0.0
    """Seconds of this machine's time."""
    placement: list[str] = []
    error: str = ""
    """Why there is no placement."""


def outcome(x: float, system: str, seed: int, run: Run, took_s: float) -> Outcome:
    records = run.records
    latency = np.array([record.latency_s for record in records])
    ttft = np.array([record.ttft_s for record in records])
    tpot = np.array([record.tpot_s for record in records if record.tpot_s is not None])
    silence = np.array([record.longest_gap_s for record in records])
    in_time = latency <= DEFAULT_SLO_SCALE * run.alone_s
    normalised = latency / run.execution_s
    own = {name: run.service == index for index, name in enumerate(run.services)}
    return Outcome(
        x=x, system=system, seed=seed, num_requests=len(records),
        normalised_latency=float(normalised.mean()),
        p99_latency_s=float(np.percentile(latency, 99)),
        attainment=float(in_time.mean()),
        mean_attainments=[float((normalised <= scale).mean()) for scale in SCALES],
        services={
            name: (int(rows.sum()), float(normalised[rows].mean()), float(in_time[rows].mean()))
            for name, rows in own.items()
            if rows.any()
        },
        mean_ttft_s=float(ttft.mean()), p99_ttft_s=float(np.percentile(ttft, 99)),
        mean_tpot_s=float(tpot.mean()), p99_tpot_s=float(np.percentile(tpot, 99)), itl_s=run.itl,
        p99_silence_s=float(np.percentile(silence, 99)), max_silence_s=float(silence.max()),
        num_preemptions=sum(record.num_preemptions for record in records),
        num_migrations=sum(record.num_migrations for record in records),
        took_s=round(took_s, 1), placement=run.placement,
        num_changes=run.num_changes,
    )  # fmt: skip


LEVELS = (0.99, 0.9)


class Capacity(NamedTuple):
    """The rate at which attainment first falls below a level."""

    rate: float
    is_below: bool = False
    """At the lowest rate, `rate`, it is below already."""
    is_over: bool = False
    """At the highest rate, `rate`, it is not."""

    def __str__(self) -> str:
        bound = "below " if self.is_below else "over " if self.is_over else ""
        return f"{bound}{self.rate:.3g}" if self.rate < 100 else f"{bound}{self.rate:.0f}"


def capacity(outcomes: Sequence[Outcome], system: str, level: float) -> Capacity | None:
    """Between two rates in proportion; None: the system has no placement."""
    own = sorted((one for one in outcomes if one.system == system and not one.error), key=lambda one: one.x)
    if not own:
        return None
    if own[0].attainment < level:
        return Capacity(own[0].x, is_below=True)
    for before, after in pairwise(own):
        if after.attainment < level:
            share = (before.attainment - level) / (before.attainment - after.attainment)
            return Capacity(before.x + share * (after.x - before.x))
    return Capacity(own[-1].x, is_over=True)


def capacity_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Rates that each system serves."""
    names = dict.fromkeys(one.system for one in outcomes)
    rows = [[name, *(str(capacity(outcomes, name, level) or "-") for level in LEVELS)] for name in names]
    return table(["system", *(f"req/s to {level:.0%} attainment" for level in LEVELS)], rows)


COLUMNS = {
    "normalised latency": lambda one: f"{one.normalised_latency:.2f}",
    "P99 latency, s": lambda one: f"{one.p99_latency_s:.1f}",
    "attainment": lambda one: f"{one.attainment:.1%}",
    "of the worst service": lambda one: f"{min(attained for _, _, attained in one.services.values()):.1%}",
    "TTFT mean, s": lambda one: f"{one.mean_ttft_s:.2f}",
    "P99": lambda one: f"{one.p99_ttft_s:.1f}",
    "TPOT mean, ms": lambda one: f"{1000 * one.mean_tpot_s:.1f}",
    "P99, ms": lambda one: f"{1000 * one.p99_tpot_s:.0f}",
    "ITL P50, ms": lambda one: f"{1000 * one.itl_s.p50:.1f}",
    "ITL P99, ms": lambda one: f"{1000 * one.itl_s.p99:.0f}",
    "longest silence P99, s": lambda one: f"{one.p99_silence_s:.2f}",
    "max, s": lambda one: f"{one.max_silence_s:.1f}",
    "preempted": lambda one: one.num_preemptions,
    "moved": lambda one: one.num_migrations,
    "changes of placement": lambda one: one.num_changes,
}


def outcome_table(outcomes: Sequence[Outcome], x_name: str) -> list[str]:
    rows = [
        [
            f"{one.x:g}",
            one.system,
            *(
                [f"no placement: {one.error}"] + [""] * (len(COLUMNS) - 1)
                if one.error
                else [show(one) for show in COLUMNS.values()]
            ),
        ]
        for one in outcomes
    ]
    return table([x_name, "system", *COLUMNS], rows)


def scale_table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [[one.system, *(f"{share:.1%}" for share in one.mean_attainments)] for one in outcomes if not one.error]
    return table(["system", *(f"{scale:g} times" for scale in SCALES)], rows)


def ratios(outcomes: Sequence[Outcome], ours: str, paper: dict[str, tuple[float, float, float]]) -> list[str]:
    """How many times worse others are: the most over all x, and at the largest one; and what the paper says."""
    own = {one.x: one for one in outcomes if one.system == ours and not one.error}
    rows = []
    for name in dict.fromkeys(one.system for one in outcomes if one.system != ours):
        pairs = [(one, own[one.x]) for one in outcomes if one.system == name and not one.error and one.x in own]
        if not pairs:
            continue
        latency = [other.normalised_latency / mine.normalised_latency for other, mine in pairs]
        tail = [other.p99_latency_s / mine.p99_latency_s for other, mine in pairs]
        share = [mine.attainment / max(other.attainment, 1e-3) for other, mine in pairs]
        said = [f"{value:.2f}" for value in paper.get(name, ())] or ["", "", ""]
        rows.append(
            [
                name,
                f"{max(latency):.2f}",
                f"{latency[-1]:.2f}",
                said[0],
                f"{max(tail):.2f}",
                said[1],
                f"{max(share):.2f}",
                said[2],
            ]
        )
    head = ["against", "normalised latency, up to", "at the last", "paper, up to",
            "P99 latency, up to", "paper, up to", "attainment, up to", "paper, up to"]  # fmt: skip
    return table(head, rows)


def draw(outcomes: Sequence[Outcome], title: str, x_name: str) -> Figure:
    """Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(5, title)
    panels = (
        ("normalised latency", "log", lambda one: one.normalised_latency),
        ("P99 latency, s", "log", lambda one: one.p99_latency_s),
        ("attainment", "linear", lambda one: one.attainment),
        ("mean TTFT, s", "log", lambda one: one.mean_ttft_s),
        ("mean TPOT, ms", "log", lambda one: 1000 * one.mean_tpot_s),
    )
    for axis, (label, scale, value) in zip(axes, panels, strict=True):
        for index, system in enumerate(dict.fromkeys(one.system for one in outcomes)):
            chosen = [one for one in outcomes if one.system == system and not one.error]
            axis.plot([one.x for one in chosen], [value(one) for one in chosen], "o-", color=f"C{index}", label=system)
        axis.set_ylabel(label)
        axis.set_yscale(scale)
    axes[0].legend(fontsize="small", ncols=5)
    axes[-1].set_xlabel(x_name)
    return figure


def draw_scales(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(1, title)
    for one in outcomes:
        if not one.error:
            axes[0].plot(SCALES, one.mean_attainments, "o-", label=one.system)
    axes[0].set_ylabel("attainment")
    axes[0].set_xlabel("SLO, times the service's mean execution time")
    axes[0].legend(fontsize="small")
    return figure
