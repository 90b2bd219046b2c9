"""Plots of records, drawn with matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from tests.tideway.test_bench_summary import OFFLINE, record
from tideway.bench.plots import PlotsUnavailable, draw_latency, new_figure, write_plots

PNG = b"\x89PNG"


def test_plots_are_written(tmp_path: Path) -> None:
    records = [record(arrival_s=second / 5, ttft_s=0.05 + second % 7 / 50, ttft_slo_s=0.15) for second in range(100)]
    records += [record(arrival_s=s / 2, num_tokens=60, request_class=OFFLINE) for s in range(30)]
    records.append(record(arrival_s=3.0, error="http_500"))
    series = {
        "tideway_sequences_running{class=online}": [(0.0, 1.0), (1.0, 4.0)],
        "tideway_tokens_total": [(0.0, 10.0), (1.0, 400.0)],
        "tideway_constant_running": [(0.0, 1.0), (1.0, 1.0)],
    }
    written = write_plots(records, tmp_path / "plots", series, title="a run")
    assert [path.name for path in written] == ["latency.png", "throughput.png", "batch.png", "server.png"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in written)


def test_plots_of_nothing(tmp_path: Path) -> None:
    assert len(write_plots([], tmp_path)) == 3


def test_the_slo_is_a_line() -> None:
    _, (axes,) = new_figure()
    draw_latency(axes, [record(ttft_slo_s=0.25), record(arrival_s=1.0, ttft_slo_s=0.25)], "ttft", label="run")
    (line,) = axes.get_lines()
    assert line.get_ydata()[0] == 250.0
    assert axes.collections[0].get_offsets().tolist() == pytest.approx(np.array([[0.0, 100.0], [1.0, 100.0]]))


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, matplotlib.figure.__name__, None)
    with pytest.raises(PlotsUnavailable, match="matplotlib"):
        write_plots([], tmp_path)
