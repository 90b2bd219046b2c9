"""The comparison of orders, small: it runs the real engine, keeps its books, and is repeatable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.ordering.__main__ import main
from bench.ordering.results import ORDERS, OURS, Comparison, Figures, figures_of
from bench.ordering.simulation import Run, mean_times_alone_s, normalised, simulate
from bench.ordering.workloads import (
    ALIKE,
    MODERATE,
    SEALLM,
    SMALL,
    Setting,
    draw_jobs,
    read_lengths,
    real_settings,
    time_alone_s,
)
from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first
from shared.simulation.gateway import Job
from shared.simulation.itl import ItlHistogram


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
    job = Job(1.5, 5000, 20, model="summaries")
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
    jobs = [Job(float(number), 100, 10, model="chat" if number % 2 else "summaries") for number in range(10)]
    run = Run(
        latencies_s=[100.0, 100.0, 2, 3, 2, 3, 2, 3, 2, 100.0],
        max_itl_s=[0.1] * 9 + [0.4],
        itl=ItlHistogram.of([0.02] * 95 + [0.4] * 5),
        end_s=110.0,
        num_steps=1,
        num_switches=1,
        num_preemptions=0,
    )
    values = normalised(run, jobs, {"chat": 3.0, "summaries": 1.0})
    np.testing.assert_allclose(values["alone"], [2, 1, 2, 1, 2, 1, 2])
    np.testing.assert_allclose(values["token"], [0.2, 0.3, 0.2, 0.3, 0.2, 0.3, 0.2])
    one = figures_of("fcfs", 0.9, [(run, values)])
    assert one.mean == pytest.approx(11 / 7)
    assert (one.num_requests, one.by_model) == (7, {"chat": 1.0, "summaries": 2.0})
    assert one.max_itl_s == 0.4, "of all requests, the first and last too"
    assert (one.itl_s.num, one.itl_s.max) == (100, 0.4)
    assert one.itl_s.p50 == pytest.approx(0.02, rel=0.005) and one.itl_s.p99 == pytest.approx(0.4, rel=0.005)
    assert set(mean_times_alone_s(SEALLM, jobs)) == {"chat", "summaries"}


def comparison_of(means: Sequence[float], *, silence_s: float = 0.1, is_real: bool = False) -> Comparison:
    """At load 0.9, an order of `ORDERS` each."""

    def figures(order: str, mean: float) -> Figures:
        run = Run(
            latencies_s=[1.0], max_itl_s=[silence_s], itl=ItlHistogram.of([silence_s]), end_s=1, num_steps=1,
            num_switches=1, num_preemptions=0,
        )  # fmt: skip
        values = {"alone": np.array([mean]), "token": np.array([mean]), "chat": np.array([mean])}
        return figures_of(order, 0.9, [(run, values)])

    made = [figures(order, mean) for order, mean in zip(ORDERS, means, strict=True)]
    return Comparison(
        name="c", device="d", capacity_rps=1.0, alone_s={"chat": 1.0}, figures=made, is_real=is_real
    ).with_ratios()


def test_a_miss_is_called_a_miss() -> None:
    def verdicts(*means: float, silence_s: float = 0.1) -> list[bool]:
        return [line.startswith("met") for line in comparison_of(means, silence_s=silence_s).verdicts()]

    assert ORDERS == (OURS, "fcfs", "round_robin", "mlfq", "seallm")
    assert verdicts(1.0, 2.1, 0.9, 1.2, 1.1) == [True, True, True]
    assert verdicts(1.0, 1.9, 1.1, 1.2, 1.1) == [True, True, False]
    assert verdicts(1.0, 2.1, 1.1, 0.9, 1.1) == [True, False, True]
    assert verdicts(1.0, 2.1, 1.1, 1.2, 1.1, silence_s=0.6) == [False, True, True]


def test_on_real_lengths_the_best_other_order_counts() -> None:
    def verdicts(*means: float) -> list[bool]:
        return [line.startswith("met") for line in comparison_of(means, is_real=True).verdicts()]

    assert verdicts(1.01, 2.0, 1.0, 1.2, 1.1) == [True, True, True, True]
    assert verdicts(1.04, 2.0, 1.0, 1.2, 1.1) == [True, False, True, True]
    assert verdicts(1.04, 1.01, 1.03, 1.2, 1.1) == [True, False, True, True]
    assert verdicts(1.4, 2.0, 1.0, 1.5, 1.1) == [True, False, False, False]


def test_a_folder_of_traces_is_compared_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "num_prefill_tokens,num_decode_tokens\n"
    (tmp_path / "long.csv").write_text(header + "9000,7\n10000,9\n")
    (tmp_path / "short.csv").write_text(header + "11,7\n12,9\n")
    (tmp_path / "rates.csv").write_text("model,window_start_s,rate_rps\nm,0,1\n")
    settings = real_settings(tmp_path)
    assert [setting.name for setting, _ in settings] == [
        "prefill-heavy + long",
        "prefill-heavy + short",
        "long + short",
    ]
    assert [sorted(lengths) for _, lengths in settings] == [["long"], ["short"], ["long", "short"]]
    np.testing.assert_array_equal(settings[0][1]["long"][0], [2250, 2500])
    command = [
        "--traces",
        str(tmp_path),
        "--requests",
        "20",
        "--num-seeds",
        "1",
        "--loads",
        "0.5",
        "--output",
        str(tmp_path),
    ]
    assert main(command) == 0
    assert "long + short, mixed phases: P99 at most 1.05 times round robin's; by load 0.5:" in capsys.readouterr().out
    (file,) = tmp_path.glob("*-ordering-real.json")
    assert len(json.loads(file.read_text())["comparisons"]) == 3


def test_the_short_form_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = "tests.bench.test_ordering:LongestPromptFirst"
    assert main(["--short", "--requests", "30", "--orders", order, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-ordering-short.json")
    result = json.loads(file.read_text())
    comparison = msgspec.convert(result["comparisons"][0], Comparison)
    assert [one.order for one in comparison.figures] == [*ORDERS, order]
    assert all(one.mean >= 0.5 and one.num_requests == 21 for one in comparison.figures)
    assert result["seeds"] == [101] and result["machine"]["cores"] and result["date"]
    assert comparison.markdown() in file.with_suffix(".md").read_text()
    assert comparison.verdicts() == result["verdicts"]
    assert comparison.name in capsys.readouterr().out


class LongestPromptFirst(OrderingPolicy):
    """Policy in somebody's module outside of the bench."""

    is_static = True

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (-sequence.num_prompt,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return model_of_first(self, candidates, now)


def test_an_order_that_cannot_be_had_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--short", "--orders", "longest"])
    assert "--orders: unknown order policy 'longest'" in capsys.readouterr().err
