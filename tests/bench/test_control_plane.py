"""The bench of the scheduler's capacity: its fleet behaves, and a short run gives figures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from bench.control_plane.__main__ import main
from bench.control_plane.fleet import REPORTS_PER_S, SECONDS_OF_A_REQUEST, Fleet
from bench.control_plane.in_process import paced
from bench.control_plane.witness import main as witness
from shared.messages.cluster import LoadReport


def test_requests_show_in_the_reports_of_their_instance_once_each() -> None:
    fleet = Fleet(2)
    decode = msgspec.msgpack.Decoder(LoadReport).decode
    fleet.accept(1, "r")
    reports = [decode(fleet.report(1, now)) for now in (0.0, 0.1, SECONDS_OF_A_REQUEST, 5.0)]
    assert [report.sequence - reports[0].sequence for report in reports] == [0, 1, 2, 3]
    assert [report.admitted for report in reports] == [("r",), (), (), ()]
    assert [report.ended for report in reports] == [(), (), ("r",), ()]
    assert len(reports[2].finished) == 1 and reports[0].instance_id == fleet.names[1] and reports[0].migrations == ()


def test_every_report_is_taken_in_and_every_request_dispatched() -> None:
    run = paced(32, 0.5, 100.0)
    assert run.reports_per_s == pytest.approx(32 * REPORTS_PER_S, rel=0.02)
    assert 20 < run.num_requests < 90
    assert 0 < run.cpu_share < 1 and 0 < run.wait_p50_ms <= run.wait_p99_ms <= run.wait_max_ms


def test_a_short_run_writes_table_and_figures(tmp_path: Path) -> None:
    assert main(["--short", "--output", str(tmp_path)]) == 0
    (table,) = tmp_path.glob("*.md")
    (figures,) = tmp_path.glob("*.json")
    assert re.search(r"\| 64 +\| 3,[12]", table.read_text())
    assert [run["num_instances"] for run in msgspec.json.decode(figures.read_bytes())["in_process"]] == [16, 64]


def test_the_witness_says_how_late_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    try:
        witness(min(cores), 0.1)
    finally:
        os.sched_setaffinity(0, cores)
    p99_ms, max_ms = map(float, capsys.readouterr().out.split())
    assert 0 < p99_ms <= max_ms
