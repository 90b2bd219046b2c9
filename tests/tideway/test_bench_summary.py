"""Figures and plots from records made by hand: without HTTP, as an in-process benchmark makes them."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shared.messages.requests import RequestClass
from tideway.bench import server_metrics
from tideway.bench.records import INTERRUPTED, UNFINISHED, RequestRecord
from tideway.bench.report import lateness_sentence, table
from tideway.bench.runner import Lateness
from tideway.bench.summary import in_flight, summarize, throughput, tokens_within

OFFLINE = RequestClass.OFFLINE


def record(
    arrival_s: float = 0.0,
    ttft_s: float = 0.1,
    tpot_s: float = 0.02,
    num_tokens: int = 11,
    *,
    model: str = "m",
    request_class: RequestClass = RequestClass.ONLINE,
    error: str = "",
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    has_times: bool = True,
) -> RequestRecord:
    first_s = arrival_s + ttft_s
    times = [first_s + index * tpot_s for index in range(num_tokens)]
    return RequestRecord(
        request_id=f"{model}-{arrival_s}",
        model=model,
        request_class=request_class,
        arrival_s=arrival_s,
        sent_s=arrival_s,
        first_token_s=first_s,
        last_token_s=times[-1],
        end_s=times[-1],
        token_times=times if has_times else [],
        prompt_tokens=100,
        output_tokens=num_tokens,
        error=error,
        ttft_objective_s=ttft_slo_s,
        tpot_objective_s=tpot_slo_s,
    )


def test_definitions_of_the_latencies() -> None:
    one = record(arrival_s=2.0)
    assert one.ttft_s == pytest.approx(0.1) and one.tpot_s == pytest.approx(0.02)
    assert one.latency_s == pytest.approx(0.3) and one.normalized_latency_s == pytest.approx(0.3 / 11)
    assert one.itl_s == pytest.approx([0.02] * 10)
    assert record(num_tokens=1).tpot_s is None


def test_percentiles_are_over_successes() -> None:
    records = [record(arrival_s=float(index), ttft_s=index / 100) for index in range(1, 101)]
    records += [
        record(arrival_s=5.0, ttft_s=9.0, error="http_500"),
        record(arrival_s=6.0, ttft_s=9.0, error=UNFINISHED),
    ]
    group = summarize(records).group("online", "m")
    assert (group.num_requests, group.num_succeeded, group.num_unfinished) == (102, 100, 1)
    assert group.failures == {"http_500": 1}
    assert group.ttft_s.num == 100 and group.ttft_s.max == pytest.approx(1.0)
    assert (group.ttft_s.p50, group.ttft_s.p99) == pytest.approx((0.505, 0.9901))
    assert group.ttft_s.mean == pytest.approx(0.505)
    assert group.itl_s.num == 1000


def test_groups_are_by_class_and_model() -> None:
    records = [record(model="a"), record(model="b"), record(model="b", request_class=OFFLINE, arrival_s=1.0)]
    summary = summarize(records)
    assert [(g.request_class, g.model, g.num_requests) for g in summary.groups] == [
        ("online", "a", 1), ("online", "b", 1), ("offline", "b", 1), ("online", "all", 2), ("offline", "all", 1),
        ("all", "all", 3),
    ]  # fmt: skip
    with pytest.raises(KeyError):
        summary.group("offline", "a")
    assert summarize([]).groups == []


def test_attainment_counts_failures_and_what_was_missed_already() -> None:
    slo = {"ttft_slo_s": 0.2, "tpot_slo_s": 0.03}
    records = [
        record(**slo),
        record(ttft_s=0.3, **slo),
        record(tpot_s=0.05, **slo),
        record(error="http_503", **slo),
        record(error=UNFINISHED, **slo),  # its TPOT is not known
        record(ttft_s=0.3, error=INTERRUPTED, **slo),
        record(),
    ]
    waiting = RequestRecord(
        request_id="w",
        model="m",
        arrival_s=0.0,
        end_s=0.5,
        error=UNFINISHED,
        ttft_objective_s=0.2,
        tpot_objective_s=0.03,
    )
    just_come = msgspec.structs.replace(waiting, arrival_s=0.4)
    group = summarize([*records, waiting, just_come], end_s=1.0).group()
    # TTFT known: met by 1, 3, 5; missed by 2, 4, 6 and the one that waits.
    assert group.attainment.ttft == pytest.approx(3 / 7)
    assert group.attainment.tpot == pytest.approx(2 / 4)
    assert group.attainment.both == pytest.approx(1 / 6)
    # A request without objectives is good if it succeeds.
    assert group.goodput_rps == 2.0 and group.goodput_tokens_per_s == 22.0 and group.requests_per_s == 4.0


def test_tokens_count_where_they_came() -> None:
    one = record(arrival_s=0.0, ttft_s=0.5, tpot_s=0.1, num_tokens=11)
    assert tokens_within(one, 0.0, 1.0) == 6
    assert tokens_within(one, 0.0, 2.0) == 11
    even = record(arrival_s=0.0, ttft_s=0.5, tpot_s=0.1, num_tokens=11, has_times=False)
    assert tokens_within(even, 0.0, 1.0) == pytest.approx(5.5)
    assert tokens_within(RequestRecord(request_id="x", model="m", arrival_s=0.0), 0.0, 1.0) == 0.0
    # Pieces of several tokens.
    one.output_tokens = 22
    assert tokens_within(one, 0.0, 1.0) == 12


def test_a_window_leaves_out_warm_up_and_drain() -> None:
    records = [record(arrival_s=float(second)) for second in range(10)]
    group = summarize(records, start_s=2.0, end_s=6.0).group()
    assert group.num_requests == 8
    assert group.requests_per_s == 1.0 and group.output_tokens_per_s == pytest.approx(11.0)
    assert group.prompt_tokens_per_s == 100.0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.floats(0.001, 2), st.floats(0.001, 0.3), st.integers(1, 40), st.booleans()),
        max_size=20,
    )
)
def test_nothing_is_lost_between_the_windows(rows: list[tuple[float, float, float, int, bool]]) -> None:
    records = [record(a, f, t, n, has_times=has_times) for a, f, t, n, has_times in rows]
    starts, values = throughput(records, 0.5)
    assert values.sum() * 0.5 == pytest.approx(sum(one.output_tokens for one in records))
    assert starts.size == values.size
    times, counts = in_flight(records)
    assert (counts >= 0).all() and (np.diff(times) >= 0).all()
    assert counts.size == 0 or counts[-1] == 0
    whole = summarize(records)
    if records:
        total = whole.group().output_tokens_per_s * (whole.end_s - whole.start_s)
        assert total == pytest.approx(sum(one.output_tokens for one in records))


def test_a_record_survives_json_without_what_is_default() -> None:
    one = record(request_class=OFFLINE)
    encoded = msgspec.json.encode(one)
    assert b'"class":"offline"' in encoded and b"error" not in encoded
    assert msgspec.json.decode(encoded, type=RequestRecord) == one


def test_the_table_shows_what_there_is() -> None:
    out = io.StringIO()
    records = [record(ttft_slo_s=0.2), record(request_class=OFFLINE, error="http_429")]
    Console(file=out, width=200).print(table(summarize(records)))
    text = out.getvalue()
    assert "failed: http_429" in text and "SLO attainment: TTFT" in text and "100.0 %" in text
    assert "unfinished" not in text


def test_a_slow_client_says_so() -> None:
    assert "partly the client's own" in lateness_sentence(Lateness(num_sent=9, send_p99_s=0.2), 0.1)
    assert "partly" not in lateness_sentence(Lateness(num_sent=9, send_p99_s=0.002), 0.1)


def test_metrics_are_summed_over_instances() -> None:
    text = (
        "# TYPE tideway_running gauge\n"
        'tideway_running{class="online",instance="a"} 2\ntideway_running{class="online",instance="b"} 3\n'
        'tideway_running{class="offline",instance="b"} 5\n'
        "# TYPE tideway_seconds histogram\n"
        'tideway_seconds_bucket{le="+Inf"} 4\ntideway_seconds_count 4\ntideway_seconds_sum 2\n'
        "# TYPE vllm:tokens_total counter\nvllm:tokens_total 7\n# TYPE vllm:tokens_created gauge\nvllm:tokens_created 1e9\n"
        "# TYPE process_open_fds gauge\nprocess_open_fds 8\n"
    )
    assert server_metrics.parse(text) == {
        "tideway_running{class=online}": 5.0,
        "tideway_running{class=offline}": 5.0,
        "vllm:tokens_total": 7.0,
    }
    with pytest.raises(ValueError):
        server_metrics.parse("no metrics } at all {")


def test_names_of_models_are_whole_in_the_table_however_narrow_it_is() -> None:
    records = [record(model="a-model-of-some-length"), record(model="a-model-of-some-length", request_class=OFFLINE)]
    console = Console(file=io.StringIO(), width=60)
    console.print(table(summarize(records)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    rows = [[cell.strip() for cell in line.strip("┃").split("┃")] for line in text.splitlines() if line.startswith("┃")]
    assert "…" not in text
    assert ["".join(cells) for cells in zip(*rows, strict=True)][1:3] == [
        "onlinea-model-of-some-length", "offlinea-model-of-some-length"
    ]  # fmt: skip
