"""Live and simulated figures of each cell beside each other, as table, targets and plot. Pure but for the plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bench.fidelity.timing import Timing
from bench.fidelity.workloads import Figures
from bench.reporting import Target, table
from shared.simulation.host import NO_DEMAND

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = {
    "normalised_latency": "mean normalised latency",
    "p99_ttft_s": "P99 TTFT s",
    "client_p99_ttft_s": "P99 TTFT at the client s",
    "throughput_tokens_s": "output tokens/s",
}
MEDIAN_ERROR, WORST_ERROR = 0.03, 0.08


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """A live run and its simulations."""

    live: Figures
    simulated: list[Figures]
    """Simulated runs of different noise; the steps' speed is that of the trace before and after the run."""
    hindsight: list[Figures]
    """The speed is that of the run's own steps: what is left is not the machine's drift."""
    speed: float
    own_speed: float
    others_share: float
    """Share of the machine's processor time during the run that others took."""
    client_late_s: float
    """At most, of the client's event loop during the run: answers look so much later than they came."""
    services_cores: float = 0.0
    """Cores that services and client took on average during the run."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    load: float
    rate_rps: float
    repeats: list[Repeat]

    def live(self, metric: str) -> float:
        return float(np.mean([getattr(one.live, metric) for one in self.repeats]))

    def scatter(self, metric: str) -> float:
        """Half the range of the live runs over their mean; 0 of one."""
        values = [getattr(one.live, metric) for one in self.repeats]
        return (max(values) - min(values)) / 2 / self.live(metric)

    def simulated(self, metric: str, *, hindsight: bool = False) -> float:
        runs = [figures for one in self.repeats for figures in (one.hindsight if hindsight else one.simulated)]
        return float(np.mean([getattr(figures, metric) for figures in runs]))

    def simulated_scatter(self, metric: str) -> float:
        """Standard deviation of the simulated runs over their mean: what two runs of the same requests differ by though
        nothing but the steps' noise is another."""
        ratios = [
            getattr(figures, metric) / float(np.mean([getattr(each, metric) for each in one.simulated]))
            for one in self.repeats
            for figures in one.simulated
        ]
        return float(np.std(ratios))

    def error(self, metric: str, *, hindsight: bool = False) -> float:
        """Relative error of the simulation, with its sign."""
        return self.simulated(metric, hindsight=hindsight) / self.live(metric) - 1


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    cells: list[Cell]
    timing: Timing
    capacity_rps: dict[str, float]

    def errors(self, metric: str, *, hindsight: bool = False) -> list[float]:
        return [abs(cell.error(metric, hindsight=hindsight)) for cell in self.cells]

    def targets(self) -> list[Target]:
        found = []
        for metric, name in METRICS.items():
            errors, scatter = self.errors(metric), [cell.scatter(metric) for cell in self.cells]
            own = self.errors(metric, hindsight=True)
            for how, limit, pick in (("median", MEDIAN_ERROR, np.median), ("worst", WORST_ERROR, np.max)):
                note = (
                    f"live runs differ from their mean by {100 * float(pick(scatter)):.1f} %; "
                    f"{100 * float(pick(own)):.1f} % with each run's own speed"
                )
                value = 100 * float(pick(errors))
                found.append(
                    Target(name=f"{name}, {how} error", value=value, limit=100 * limit, unit=" %", note=note)
                )  # fmt: skip
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Rows of a short table, a cell each."""
        return [
            {"workload": cell.workload, "load": cell.load, "requests": cell.repeats[0].live.num_requests}
            | {
                f"{name}, {what}": value
                for metric, name in METRICS.items()
                for what, value in (
                    ("live", cell.live(metric)), ("simulated", cell.simulated(metric)), ("error %", 100 * cell.error(metric))
                )
            }
            for cell in self.cells
        ]  # fmt: skip

    def markdown(self) -> str:
        header = ["workload", "load", "requests"]
        for name in METRICS.values():
            header += [f"{name}: live", "simulated", "error %", "live +- %", "simulated +- %"]
        header += ["speed", "own speed", "others %", "services' cores", "client late ms"]
        rows = []
        for cell in self.cells:
            row: list[object] = [cell.workload, cell.load, cell.repeats[0].live.num_requests]
            for metric in METRICS:
                row += [cell.live(metric), cell.simulated(metric)]
                row += [f"{100 * cell.error(metric):+.1f}", f"{100 * cell.scatter(metric):.1f}"]
                row += [f"{100 * cell.simulated_scatter(metric):.1f}"]
            row += [float(np.mean([one.speed for one in cell.repeats]))]
            row += [float(np.mean([one.own_speed for one in cell.repeats]))]
            row += [f"{100 * max(one.others_share for one in cell.repeats):.0f}"]
            row += [float(np.mean([one.services_cores for one in cell.repeats]))]
            rows.append([*row, f"{1e3 * max(one.client_late_s for one in cell.repeats):.0f}"])
        timing = self.timing
        taken = (
            ""
            if timing.demand == NO_DEMAND
            else (
                f"; services and client take {1e3 * timing.demand.request_s:.2f} ms of a core for a request and "
                f"{1e6 * timing.demand.token_s:.0f} us for a token"
            )
        )
        fitted = (
            f"Fitted to the other trace: a step takes {timing.beside:.2f} times as long while the other instance computes, "
            f"noise {timing.noise:.3f}, {1e3 * timing.submit_s:.1f} ms from the client to the engine, "
            f"{1e3 * timing.answer_s:.1f} ms back{taken}. Capacity: "
            + ", ".join(f"{name} {rate:.1f} requests/s" for name, rate in self.capacity_rps.items())
        )
        return "\n".join([*table(header, rows), "", fitted + "."])


def draw(comparison: Comparison) -> Figure:
    """How far off each cell is, with the scatter of its live runs. Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(len(METRICS), "Simulated over live")
    cells = comparison.cells
    for axis, (metric, name) in zip(axes, METRICS.items(), strict=True):
        errors = [100 * cell.error(metric) for cell in cells]
        axis.errorbar(range(len(cells)), errors, yerr=[100 * cell.scatter(metric) for cell in cells], fmt="o")
        axis.axhspan(-100 * WORST_ERROR, 100 * WORST_ERROR, alpha=0.15)
        axis.set_ylabel("%")
        axis.set_title(name, fontsize="small")
    axes[-1].set_xticks(range(len(cells)), [f"{cell.workload}\n{cell.load}" for cell in cells])
    axes[-1].set_xlabel("workload, load (bars: live runs around their mean)")
    return figure


def cell_order(workloads: Sequence[str], loads: Sequence[float], repeats: int) -> list[tuple[str, float, int]]:
    """(workload, load, repeat): all cells once before any comes again, so that repeats do not share a moment, and those of a
    load one after the other."""
    return [(name, load, repeat) for repeat in range(repeats) for load in loads for name in workloads]
