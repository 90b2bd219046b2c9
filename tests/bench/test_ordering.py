"""The comparison of orders, small: it runs the real engine, keeps its books, and is repeatable."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.ordering.__main__ import main
from bench.ordering.comparing import ORDERS
from bench.ordering.results import OURS, Comparison, Figures, figures_of
from bench.ordering.simulation import Run, mean_times_alone_s, normalised, simulate
from bench.ordering.workloads import ALIKE, MODERATE, SEALLM, SMALL, Job, Setting, draw_jobs, read_lengths, time_alone_s


@pytest.mark.parametrize("setting", [SEALLM, MODERATE, SMALL, ALIKE], ids=lambda setting: setting.name)
def test_jobs_are_seeded_and_come_at_the_rate(setting: Setting) -> None:
    jobs = draw_jobs(setting, 200, 4.0, 1)
    assert jobs == draw_jobs(setting, 200, 4.0, 1) != draw_jobs(setting, 200, 4.0, 2)
    assert jobs == sorted(jobs, key=lambda job: job.at_s)
    assert jobs[-1].at_s == pytest.approx(50.0, rel=0.25)
    for service in setting.services:
        assert sum(job.model == service.model for job in jobs) == 200 * service.share
    assert all(job.at_s == 0 for job in draw_jobs(setting, 20, 0.0, 1))


def test_lengths_can_come_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n11,7\n99999,9\n")
    lengths = read_lengths(trace, 1000)
    jobs = draw_jobs(SEALLM, 20, 1.0, 1, {"summaries": lengths})
    assert {(job.prompt_tokens, job.output_tokens) for job in jobs if job.model == "summaries"} == {(11, 7)}
    assert len({job.prompt_tokens for job in jobs if job.model == "chat"}) > 1


@pytest.mark.parametrize("mix_phases", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_a_request_alone_takes_its_time_alone(order: str, mix_phases: bool) -> None:
    job = Job(1.5, "summaries", 5000, 20)
    run = simulate(SEALLM, [job], order, mix_phases=mix_phases)
    assert run.latencies_s == pytest.approx([time_alone_s(SEALLM, job)])
    assert run.end_s == pytest.approx(1.5 + run.latencies_s[0])
    assert (run.num_steps, run.num_switches, run.num_preemptions) == (3 + 19, 1, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_all_requests_end_and_none_is_faster_than_alone(order: str) -> None:
    jobs = draw_jobs(SMALL, 60, 1.5, 3)
    run = simulate(SMALL, jobs, order, mix_phases=True)
    assert all(latency >= time_alone_s(SMALL, job) - 1e-9 for latency, job in zip(run.latencies_s, jobs, strict=True))
    assert run == simulate(SMALL, jobs, order, mix_phases=True)


def test_latencies_are_over_the_models_mean_time_alone_without_the_first_and_last() -> None:
    jobs = [Job(float(number), "chat" if number % 2 else "summaries", 100, 10) for number in range(10)]
    run = Run(
        latencies_s=[100.0, 100.0, 2, 3, 2, 3, 2, 3, 2, 100.0],
        end_s=110.0,
        num_steps=1,
        num_switches=1,
        num_preemptions=0,
        recomputed_tokens=0,
    )
    values = normalised(run, jobs, {"chat": 3.0, "summaries": 1.0})
    np.testing.assert_allclose(values["alone"], [2, 1, 2, 1, 2, 1, 2])
    np.testing.assert_allclose(values["token"], [0.2, 0.3, 0.2, 0.3, 0.2, 0.3, 0.2])
    one = figures_of("fcfs", 0.9, [(run, values)])
    assert one.mean == pytest.approx(11 / 7)
    assert (one.num_requests, one.by_model) == (7, {"chat": 1.0, "summaries": 2.0})
    assert set(mean_times_alone_s(SEALLM, jobs)) == {"chat", "summaries"}


def test_a_miss_is_called_a_miss() -> None:
    run = Run(latencies_s=[1.0], end_s=1, num_steps=1, num_switches=1, num_preemptions=0, recomputed_tokens=0)

    def figures(order: str, mean: float) -> Figures:
        values = {"alone": np.array([mean]), "token": np.array([mean]), "chat": np.array([mean])}
        return figures_of(order, 0.9, [(run, values)])

    def verdicts(*means: float) -> list[bool]:
        made = [figures(order, mean) for order, mean in zip(ORDERS, means, strict=True)]
        comparison = Comparison(
            name="c", device="d", mix_phases=True, capacity_rps=1.0, alone_s={"chat": 1.0}, figures=made
        ).with_ratios()
        return [line.startswith("met") for line in comparison.verdicts()]

    assert ORDERS[:2] == (OURS, "fcfs")
    assert verdicts(1.0, 2.1, 1.1, 1.2) == [True, True]
    assert verdicts(1.0, 1.9, 1.1, 1.2) == [True, False]
    assert verdicts(1.0, 2.1, 0.9, 1.2) == [False, True]


def test_the_short_form_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--short", "--requests", "30", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-ordering-short.json")
    result = json.loads(file.read_text())
    comparison = msgspec.convert(result["comparisons"][0], Comparison)
    assert [one.order for one in comparison.figures] == list(ORDERS)
    assert all(one.mean >= 0.5 and one.num_requests == 21 for one in comparison.figures)
    assert result["seeds"] == [101] and result["machine"]["cores"] and result["date"]
    assert comparison.markdown() in file.with_suffix(".md").read_text()
    assert comparison.verdicts() == result["verdicts"]
    assert comparison.name in capsys.readouterr().out
