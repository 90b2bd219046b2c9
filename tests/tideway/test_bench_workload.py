"""Planned load: statistics of arrivals and lengths, traces of every format, the same again by the same seed."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.requests import RequestClass
from tideway.bench.arrivals import (
    Arrivals,
    Closed,
    Constant,
    Gamma,
    Phase,
    Phases,
    Poisson,
    Replay,
    renewal_times,
)
from tideway.bench.command import ARRIVALS
from tideway.bench.lengths import Fixed, Lengths, LogNormal, Uniform, Zipf, sample_lengths
from tideway.bench.options import parse_arrivals, parse_lengths, read_workload
from tideway.bench.prompts import TokensPerWord, prompt_text, prompt_token_ids
from tideway.bench.traces import TraceError, TraceSource, read_trace, spread
from tideway.bench.workload import (
    PlannedRequest,
    StreamSpec,
    Workload,
    WorkloadError,
    generator,
    load_traces,
    plan_requests,
)
from tideway.command import app
from tideway.data_folder import OperatorError
from tideway.preflight import REPOSITORY


def plan(arrivals: Arrivals, *, duration_s: float | None = None, seed: int = 0, **fields: Any) -> list[PlannedRequest]:
    lengths: dict[str, Any] = {}
    if not isinstance(arrivals, Replay) and "lengths_from" not in fields:
        lengths = {"prompt_tokens": Fixed(tokens=100), "output_tokens": Fixed(tokens=10)}
    spec = StreamSpec(**{"name": "s", "models": {"m": 1.0}, "arrivals": arrivals, **lengths, **fields})
    workload = Workload(streams=[spec], duration_s=duration_s, seed=seed)
    return plan_requests(workload, load_traces(workload))


def times(requests: list[PlannedRequest]) -> np.ndarray:
    return np.array([request.at_s for request in requests])


# ------------------------------------------------------------------------------------------------------ arrivals


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_rate_and_burstiness_of_gamma_arrivals(cv: float) -> None:
    at_s = times(plan(Gamma(rate_rps=20, cv=cv), duration_s=2000))
    assert at_s.size == 40_000 and (np.diff(at_s) >= 0).all() and at_s[-1] < 2000
    intervals = np.diff(at_s)
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.1)
    # By the law of large numbers alone, too, where the count is not made exact.
    plain = times(plan(Gamma(rate_rps=20, cv=cv), duration_s=2000, is_rate_exact=False))
    assert plain.size == pytest.approx(40_000, rel=0.02 * max(1.0, cv)) and plain.size != 40_000


def test_constant_and_poisson_arrivals() -> None:
    assert np.diff(times(plan(Constant(rate_rps=4), duration_s=10))) == pytest.approx(np.full(39, 0.25), rel=0.05)
    intervals = np.diff(times(plan(Poisson(rate_rps=10), num_requests=20_000)))
    assert intervals.mean() == pytest.approx(0.1, rel=0.02)
    assert intervals.std() == pytest.approx(0.1, rel=0.03)


def test_phases_are_on_and_off() -> None:
    phases = Phases(phases=[Phase(duration_s=10, rate_rps=20), Phase(duration_s=5, rate_rps=0)], cv=2.0)
    at_s = times(plan(phases, duration_s=300))
    assert at_s.size == 4000 and (at_s % 15 <= 10).all()
    low = Phases(phases=[Phase(duration_s=10, rate_rps=20), Phase(duration_s=10, rate_rps=5)])
    at_s = times(plan(low, duration_s=2000))
    assert (at_s % 20 < 10).mean() == pytest.approx(0.8, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0.5, 20), st.sampled_from([0.0, 0.3, 2.0, 9.0])), min_size=1, max_size=5),
    cv=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    duration_s=st.floats(1, 100),
    is_exact=st.booleans(),
    is_cyclic=st.booleans(),
)
def test_arrivals_lie_where_the_rate_is(
    steps: list[tuple[float, float]], cv: float, duration_s: float, is_exact: bool, is_cyclic: bool
) -> None:
    rng = np.random.default_rng(1)
    if not any(rate for _, rate in steps):
        with pytest.raises(ValueError, match="zero"):
            renewal_times(steps, cv, rng, duration_s=duration_s)
        return
    at_s = renewal_times(steps, cv, rng, duration_s=duration_s, is_exact=is_exact, is_cyclic=is_cyclic)
    assert (np.diff(at_s) >= 0).all()
    cycle_s = sum(length for length, _ in steps)
    end_s = duration_s if is_cyclic else min(duration_s, cycle_s)
    edges = np.cumsum([0.0] + [length for length, _ in steps])
    for time_s in at_s:
        assert -1e-9 <= time_s <= end_s + 1e-9
        inside = time_s % cycle_s if is_cyclic else time_s
        close = [
            rate
            for (low, high), (_, rate) in zip(pairwise(edges), steps, strict=True)
            if low - 1e-6 <= inside <= high + 1e-6
        ]
        is_at_an_end = min(inside, cycle_s - inside, end_s - time_s) < 1e-6
        assert not close or max(close) > 0 or is_at_an_end
    if is_exact:
        cycles, rest = (divmod(end_s, cycle_s)) if is_cyclic else (0, end_s)
        expected = cycles * sum(length * rate for length, rate in steps)
        for (length, rate), start in zip(steps, edges, strict=False):
            expected += rate * min(max(rest - start, 0.0), length)
        assert abs(at_s.size - expected) <= 0.51


def test_the_same_seed_gives_the_same_requests() -> None:
    fields: dict[str, Any] = {
        "models": {"a": 3.0, "b": 1.0},
        "prompt_tokens": LogNormal(mean_tokens=300, cv=1.0, max_tokens=2000),
        "output_tokens": Zipf(alpha=1.2, max_tokens=100),
        "prefix_share": 0.5,
        "num_prefix_groups": 3,
    }
    first = plan(Gamma(rate_rps=10, cv=2), duration_s=20, seed=5, **fields)
    assert first == plan(Gamma(rate_rps=10, cv=2), duration_s=20, seed=5, **fields)
    assert first != plan(Gamma(rate_rps=10, cv=2), duration_s=20, seed=6, **fields)
    share = sum(request.model == "a" for request in first) / len(first)
    assert share == pytest.approx(0.75, abs=0.12)


def test_a_stream_is_the_same_without_the_others() -> None:
    lengths: dict[str, Any] = {"prompt_tokens": Uniform(min_tokens=1, max_tokens=900), "output_tokens": Fixed(tokens=5)}
    online = StreamSpec(name="on", models={"m": 1.0}, arrivals=Poisson(rate_rps=5), **lengths)
    offline = StreamSpec(
        name="off",
        request_class=RequestClass.OFFLINE,
        models={"m": 1.0},
        arrivals=Closed(concurrency=8),
        num_requests=50,
        **lengths,
    )
    both = plan_requests(Workload(streams=[offline, online], duration_s=30))
    alone = plan_requests(Workload(streams=[online], duration_s=30))
    assert [request for request in both if request.stream == "on"] == alone
    backlog = [request for request in both if request.stream == "off"]
    assert len(backlog) == 50 and {request.at_s for request in backlog} == {0.0}
    assert {request.concurrency for request in backlog} == {8}


# ------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("lengths", "mean", "low", "high"),
    [
        (Fixed(tokens=7), 7, 7, 7),
        (Uniform(min_tokens=10, max_tokens=20), 15, 10, 20),
        (LogNormal(mean_tokens=200, cv=0.8), 200, 1, 1 << 20),
        (Zipf(alpha=1.0, min_tokens=1, max_tokens=100), 100 / 5.187, 1, 100),
        (Zipf(alpha=0.0, min_tokens=1, max_tokens=9), 5, 1, 9),
    ],
)
def test_means_and_bounds_of_lengths(lengths: Lengths, mean: float, low: int, high: int) -> None:
    drawn = sample_lengths(lengths, 40_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert low <= drawn.min() and drawn.max() <= high
    if isinstance(lengths, LogNormal):
        assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.1)
    if isinstance(lengths, Zipf) and lengths.alpha:
        assert (drawn == 1).sum() / (drawn == 2).sum() == pytest.approx(2, rel=0.1)


def test_long_requests_are_scaled_down_together() -> None:
    (request,) = plan(
        Constant(rate_rps=1),
        num_requests=1,
        prompt_tokens=Fixed(tokens=3000),
        output_tokens=Fixed(tokens=1000),
        max_total_tokens=2000,
    )
    assert (request.prompt_tokens, request.output_tokens) == (1500, 500)


# -------------------------------------------------------------------------------------------------------- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805907,400,100
2023-11-16 18:15:50.6805900,879,55
2023-11-16 18:15:51.3910170,91,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1024, "output_length": 50, "hash_ids": [7, 8]}
{"timestamp": 0, "input_length": 1100, "output_length": 49, "hash_ids": [7, 9, 10]}
{"timestamp": 3000, "input_length": 700, "output_length": 3, "hash_ids": [7, 11]}
{"timestamp": 9000, "input_length": 700, "output_length": 3, "hash_ids": [12, 13]}
"""
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n2015,156,2171,12.9\n"
RATES = """model,window_start_s,rate_rps,active_clients,rate_weighted_client_cv
big,0,10,3,1.0
big,600,0,3,1.0
big,1200,30,3,1.0
small,0,1,3,1.0
"""


def trace_file(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def test_a_trace_of_requests(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "azure.csv", AZURE)
    requests = plan(Replay(trace=TraceSource(path=path)))
    assert times(requests) == pytest.approx([0.0, 0.5000007, 4.0])
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(374, 44), (400, 100), (879, 55)]
    scaled = TraceSource(path=path, start_s=0.4, length_s=2.0, time_scale=10.0, prompt_scale=0.5, output_scale=0.1)
    (only,) = plan(Replay(trace=scaled))
    assert only.at_s == pytest.approx(1.000007) and (only.prompt_tokens, only.output_tokens) == (200, 10)
    assert len(plan(Replay(trace=TraceSource(path=path)), duration_s=1.0)) == 2


def test_a_trace_is_thinned_by_the_seed(tmp_path: Path) -> None:
    rows = "".join(f"{index},10,5\n" for index in range(2000))
    path = trace_file(tmp_path, "many.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    kept = plan(Replay(trace=TraceSource(path=path, keep=0.25)))
    assert len(kept) == pytest.approx(500, abs=60) and times(kept)[-1] > 1900
    assert kept == plan(Replay(trace=TraceSource(path=path, keep=0.25)))


def test_a_trace_on_a_grid_with_prefixes(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "mooncake.jsonl", MOONCAKE)
    requests = plan(Replay(trace=TraceSource(path=path, prompt_scale=0.125)))
    at_s = times(requests)
    assert 0 <= at_s[0] < at_s[1] < 3 <= at_s[2] < 6 and 9 <= at_s[3] < 12
    assert at_s[1] - at_s[0] == pytest.approx(1.5)
    assert [request.prefix for request in requests][:2] == [("7", "8"), ("7", "9", "10")]
    assert requests[0].prefix_block_tokens == 64
    first, second, third, other = (prompt_token_ids(request, 1000, 0) for request in requests)
    assert [len(ids) for ids in (first, second, third, other)] == [128, 138, 88, 88]
    assert first[:64] == second[:64] == third[:64] != other[:64]
    assert first[64:] != second[64:128] and third[64:] != other[64:]


def test_spreading_keeps_the_order() -> None:
    grid = np.repeat(np.arange(50) * 3.0, np.random.default_rng(0).integers(1, 9, 50))
    at_s = spread(grid, 3.0, np.random.default_rng(1))
    assert (np.diff(at_s) > 0).all() and (np.floor(at_s / 3) * 3 == grid).all()


def test_pairs_of_lengths_from_a_trace(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "lengths.csv", LENGTHS)
    requests = plan(Poisson(rate_rps=5), num_requests=100, lengths_from=TraceSource(path=path))
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(3772, 54), (2015, 156)}
    assert len(plan(Closed(concurrency=4), lengths_from=TraceSource(path=path))) == 2
    with pytest.raises(WorkloadError, match="no arrivals"):
        plan(Replay(trace=TraceSource(path=path)))


def test_a_trace_of_rates(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "rates.csv", RATES)
    source = TraceSource(path=path, series="big", time_scale=0.1, rate_scale=0.5)
    lengths: dict[str, Any] = {"prompt_tokens": Fixed(tokens=9), "output_tokens": Fixed(tokens=9)}
    at_s = times(plan(Replay(trace=source), **lengths))
    # The window without traffic is left out: 60 s at 5 and 60 s at 15 per second.
    assert at_s.size == 1200 and at_s[-1] < 120
    assert (at_s < 60).mean() == pytest.approx(0.25, abs=0.02)
    with pytest.raises(WorkloadError, match="series must be one of big, small"):
        plan(Replay(trace=TraceSource(path=path)), **lengths)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "no columns of prompt and output lengths among x, y"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n5,many\n", "line 2"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "no requests"),
        ("a.jsonl", '{"timestamp": 0, \n', "truncated"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(Path(trace_file(tmp_path, name, content)))


# ------------------------------------------------------------------------------------------------------- prompts


def test_texts_have_the_length_and_the_prefix() -> None:
    requests = plan(Constant(rate_rps=1), num_requests=3, prefix_share=0.5)
    rate = TokensPerWord.through([(32, 69), (160, 325)])
    assert (rate.base_tokens, rate.tokens_per_word) == (5.0, 2.0)
    texts = [prompt_text(request, rate, 0).split() for request in requests]
    assert [len(text) for text in texts] == [48] * 3  # (100 - 5) / 2, to even
    assert texts[0][:25] == texts[1][:25] == texts[2][:25]
    assert texts[0][25:] != texts[1][25:]
    assert prompt_text(requests[0], rate, 0) != prompt_text(requests[0], rate, 1)


def test_prompts_of_different_lengths_share_what_both_have() -> None:
    lengths = Uniform(min_tokens=50, max_tokens=400)
    requests = plan(Constant(rate_rps=1), num_requests=20, prefix_share=0.5, prompt_tokens=lengths)
    prompts = [prompt_token_ids(request, 1000, 0) for request in requests]
    for request, ids in zip(requests, prompts, strict=True):
        assert len(ids) == request.prompt_tokens
        common = min(request.prefix_block_tokens, requests[0].prefix_block_tokens)
        assert ids[:common] == prompts[0][:common] and common >= 25


def test_generators_have_names() -> None:
    def draw(*names: str | int) -> int:
        return int(generator(*names).integers(1 << 40))  # type: ignore[arg-type]

    assert draw(0, "a") == draw(0, "a")
    assert len({draw(0, "a"), draw(1, "a"), draw(0, "b"), draw(0, "a", 1), draw(-1, "a")}) == 5


# ------------------------------------------------------------------------------------------------ what is typed


def test_short_forms() -> None:
    assert parse_arrivals("gamma:2.5:4") == Gamma(rate_rps=2.5, cv=4)
    assert parse_arrivals("closed:16") == Closed(concurrency=16)
    on_off = parse_arrivals("onoff:30:4:10:0.5")
    assert on_off == Phases(phases=[Phase(duration_s=30, rate_rps=4), Phase(duration_s=10, rate_rps=0.5)])
    assert parse_arrivals("trace:a:b.csv", {"keep": 0.5}) == Replay(trace=TraceSource(path="a:b.csv", keep=0.5))
    assert parse_lengths("256") == Fixed(tokens=256)
    assert parse_lengths("lognormal:200:1.5:8:900") == LogNormal(mean_tokens=200, cv=1.5, min_tokens=8, max_tokens=900)
    for wrong in ("gamma:2", "poisson:-1", "burst:1", "", "trace:", "closed:0"):
        with pytest.raises(OperatorError):
            parse_arrivals(wrong)
    for wrong in ("", "0", "-5", "uniform:1", "zipf:a:1:2"):
        with pytest.raises(OperatorError):
            parse_lengths(wrong)


def test_a_workload_survives_json_and_unknown_fields_do_not(tmp_path: Path) -> None:
    workload = Workload(
        streams=[
            StreamSpec(
                name="a",
                models={"m": 1.0},
                arrivals=Replay(trace=TraceSource(path="t.csv", keep=0.5)),
                prompt_tokens=Zipf(alpha=1.1, max_tokens=9),
            )
        ],
        seed=9,
    )
    path = tmp_path / "w.json"
    path.write_bytes(msgspec.json.encode(workload))
    assert read_workload(path) == workload
    path.write_bytes(msgspec.json.encode(workload).replace(b'"seed"', b'"sead"'))
    with pytest.raises(OperatorError, match="sead"):
        read_workload(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start_s": 50.0}, "after the end"),
        ({"models": {"m": 0.0}}, "weights"),
        ({"prompt_tokens": None}, "needs lengths"),
        ({"arrivals": Closed(concurrency=1)}, "num_requests"),
        ({"prompt_tokens": Uniform(min_tokens=9, max_tokens=3)}, "swapped"),
    ],
)
def test_contradictions_name_the_stream(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=f"stream 's': .*{message}"):
        plan(**{"arrivals": Poisson(rate_rps=1), **fields}, duration_s=10)


# ------------------------------------------------------------------------------------------------- what is written


def test_the_documented_workload_and_options_are_taken(tmp_path: Path) -> None:
    text = (
        (REPOSITORY / "docs" / "benchmarks.md").read_text().split("server: `tideway bench`", 1)[1].split("\n## ", 1)[0]
    )
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    example = re.sub(r'path = "(\w+\.csv)"', lambda found: f'path = "{tmp_path / found[1]}"', example)
    (tmp_path / "mix.toml").write_text(example.replace("start_s = 600", "start_s = 0"))
    workload = read_workload(tmp_path / "mix.toml")
    assert {request.stream for request in plan_requests(workload, load_traces(workload))} == {"chat", "summaries"}
    bench = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    known = {name for parameter in bench.params for name in (*parameter.opts, *parameter.secondary_opts)}
    readme = (REPOSITORY / "README.md").read_text().split("## Benchmark", 1)[1].split("##", 1)[0]
    named = set(re.findall(r"(--[a-z][\w-]+)", text + readme))
    assert len(named) > 15 and named <= known, named - known
    assert all(f"`{form}`" in text for form in ARRIVALS.split(";")[0].split(", "))
