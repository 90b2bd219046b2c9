"""The bench of the scheduler's capacity: its fleet behaves, and a short run gives figures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from bench.control_plane import over_nats
from bench.control_plane.__main__ import main
from bench.control_plane.fleet import (
    BLOCK_SIZE,
    CACHED_BLOCKS,
    MOST_REPORTS_PER_S,
    SECONDS_OF_A_PROMPT,
    SECONDS_OF_A_REQUEST,
    Clients,
    Fleet,
)
from bench.control_plane.in_process import paced
from bench.control_plane.witness import main as witness
from shared.engine.load_reports import LEAST_DRIFT_INTERVAL_S, MOST_DRIFT_INTERVAL_S, drift_interval_s
from shared.engine.memory.cache_news import NUM_REPEATED
from shared.messages.cluster import KEY_BYTES, LoadReport
from shared.scheduling.prefixes import PrefixIndex


def decoded(reports: list[bytes]) -> list[LoadReport]:
    decode = msgspec.msgpack.Decoder(LoadReport).decode
    return [decode(report) for report in reports]


def test_requests_show_in_the_reports_of_their_instance_once_each() -> None:
    fleet, request = Fleet(2), Clients().request()
    fleet.accept(1, request, 0.0)
    times = (0.02, SECONDS_OF_A_PROMPT + 0.02, SECONDS_OF_A_REQUEST, 5.0)
    of_one = [
        [report for report in decoded(fleet.due(now, 9)) if report.instance_id == fleet.names[1]] for now in times
    ]
    reports = [report for (report,) in of_one]
    assert [report.sequence - reports[0].sequence for report in reports] == [0, 1, 2, 3]
    assert [report.admitted for report in reports] == [(request.request_id,), (), (), ()]
    assert [report.ended for report in reports] == [(), (), (request.request_id,), ()]
    assert len(reports[2].finished) == 1 and reports[0].migrations == ()


def test_an_instance_says_which_blocks_of_a_prompt_came_and_what_they_took_the_place_of() -> None:
    """The system prompt once; and all that it holds in turn, round by round."""
    fleet, clients, index = Fleet(1), Clients(), PrefixIndex()
    first = clients.request()
    second = next(request for _ in range(99) if (request := clients.request()).model == first.model)
    told, rounds = [], set()
    for number, request in enumerate((first, second)):
        fleet.accept(0, request, float(number))
        for step in range(8):
            for report in decoded(fleet.due(number + step / 8, 9)):
                index.on_report(report, False)
                rounds.add(report.cache_round)
                if report.cache_held:
                    told.append((len(report.cache_held) // KEY_BYTES, len(report.cache_lost) // KEY_BYTES))
        num_tokens = len(request.prompt) // 4
        assert index.held_tokens(request, BLOCK_SIZE, 9.0) == {fleet.names[0]: num_tokens - BLOCK_SIZE}
    assert told == [(31, 15), (15, 15)], "the last block is computed in any case, so nobody looks for it"
    for _ in range(CACHED_BLOCKS // NUM_REPEATED):
        rounds |= {report.cache_round for report in decoded([fleet.report(0, 9.0)])}
    assert rounds == {1, 2}


def test_they_report_when_a_live_instance_would() -> None:
    def reports_per_s(fleet: Fleet) -> float:
        return sum(len(fleet.due(number * 0.005, 99)) for number in range(1, 1001)) / 5 / len(fleet.names)

    assert reports_per_s(Fleet(8, is_flat_out=True)) == pytest.approx(MOST_REPORTS_PER_S, rel=0.06)
    fleet, due_s, intervals_s = Fleet(40), dict[str, float](), set[float]()
    for number in range(1, 1001):
        now = number * 0.005
        for report in decoded(fleet.due(now, 99)):
            assert due_s.get(report.instance_id, now) <= now < due_s.get(report.instance_id, now) + 0.006
            intervals_s.add(drift_interval_s(report))
            due_s[report.instance_id] = now + drift_interval_s(report)
    assert len(due_s) == 40 and min(due_s.values()) > 5.0, "none is silent"
    assert {LEAST_DRIFT_INTERVAL_S, MOST_DRIFT_INTERVAL_S} < intervals_s


def test_every_report_is_taken_in_and_every_request_dispatched() -> None:
    run = paced(32, 0.5, 100.0)
    assert 5 < run.reports_per_s / 32 < 25
    assert 20 < run.num_requests < 90
    assert 0 < run.cpu_share < 1 and 0 < run.wait_p50_ms <= run.wait_p99_ms <= run.wait_max_ms


async def test_behind_nats_every_request_reaches_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_nats, "WARM_UP_S", 0.5)
    run = await over_nats.over_nats(8, 1.0, 30.0)
    assert 10 < run.num_requests / run.seconds < 60 and not run.num_refused
    assert 0 < run.wait_p50_ms <= run.wait_p99_ms <= run.wait_max_ms
    assert 0 < run.echo_p50_ms <= run.echo_p99_ms < float("inf")
    shares = (run.cpu_share, run.server_cpu_share, run.instances_cpu_share, run.gateway_cpu_share)
    assert all(share > 0 for share in shares)
    assert run.handled_per_s == pytest.approx(run.sent_per_s, rel=0.3)


def test_a_short_run_writes_table_and_figures(tmp_path: Path) -> None:
    assert main(["--short", "--output", str(tmp_path)]) == 0
    (table,) = tmp_path.glob("*.md")
    (figures,) = tmp_path.glob("*.json")
    assert re.search(r"\| 64 +\| [12]\d\d +\|", table.read_text())
    assert [run["num_instances"] for run in msgspec.json.decode(figures.read_bytes())["in_process"]] == [16, 64]


def test_the_witness_says_how_late_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    try:
        witness(min(cores), 0.1)
    finally:
        os.sched_setaffinity(0, cores)
    p99_ms, max_ms = map(float, capsys.readouterr().out.split())
    assert 0 < p99_ms <= max_ms
