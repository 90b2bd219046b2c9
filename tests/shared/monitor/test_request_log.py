"""The request log and what it says, against numpy over all that happened."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.traffic import ModelTraffic, Outcome, RequestRow, RequestRows, StoredTraffic, request_number
from shared.monitor.request_log import SLOT_S, RequestLog
from shared.monitor.summary import traffic_by_model, weighted_quantile
from shared.placement.problem import Traffic

BEGAN_S = 1_000_000.0
MODELS = ["a", "b"]


class Request(msgspec.Struct, frozen=True):
    number: int
    model: int
    is_online: bool
    arrived_s: float
    prompt_tokens: int
    outcome: Outcome
    output_tokens: int
    latency_s: float

    @property
    def ended_s(self) -> float:
        return self.arrived_s + self.latency_s

    @property
    def ttft_s(self) -> float:
        return self.latency_s / 4

    @property
    def execution_s(self) -> float:
        return self.latency_s / 2 + 0.01

    def row(self, now: float, is_over: bool) -> RequestRow:
        head = (self.number, self.model, self.is_online, now - self.arrived_s, self.prompt_tokens)
        if not is_over:
            return RequestRow(*head)
        return RequestRow(
            *head,
            self.outcome,
            self.output_tokens,
            self.latency_s,
            self.ttft_s,
            self.execution_s,
            self.latency_s < 2,
            None,
            self.latency_s / 3,
        )


def requests(max_size: int = 60) -> st.SearchStrategy[list[Request]]:
    one = st.tuples(
        st.integers(0, 1),
        st.booleans(),
        st.floats(0, 95),
        st.integers(1, 5000),
        st.sampled_from(list(Outcome)),
        st.integers(1, 900),
        st.floats(0, 40),
    )
    return st.lists(one, max_size=max_size).map(
        lambda rows: [
            Request(request_number(str(i)), row[0], row[1], BEGAN_S + row[2], *row[3:]) for i, row in enumerate(rows)
        ]
    )


def play(log: RequestLog, happened: list[Request], until_s: float, period_s: float = 1.0) -> None:
    """Tells the log all that happened, each second, as a scheduler does."""
    events = [(r.arrived_s, r, False) for r in happened if r.outcome != Outcome.REFUSED]
    events += [(r.ended_s, r, True) for r in happened if r.outcome not in (Outcome.PENDING, Outcome.REFUSED)]
    events += [(r.arrived_s, r, True) for r in happened if r.outcome == Outcome.REFUSED]
    events = sorted((event for event in events if event[0] < until_s), key=lambda event: event[0])
    now = BEGAN_S
    while events:
        now += period_s
        due = [event for event in events if event[0] <= now]
        events = events[len(due) :]
        for part in range(0, len(due), 4096):
            rows = [request.row(now, is_over) for _, request, is_over in due[part : part + 4096]]
            log.add(RequestRows("s", MODELS, rows), now)


def refused_at_once(happened: list[Request]) -> list[Request]:
    return [
        msgspec.structs.replace(r, latency_s=0.0) if r.outcome == Outcome.REFUSED else r for r in happened
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(requests(), st.booleans(), st.booleans())
def test_a_summary_is_what_happened(happened: list[Request], is_told_twice: bool, is_stored: bool) -> None:
    happened = refused_at_once(happened)
    until_s = BEGAN_S + 100
    log = RequestLog(BEGAN_S)
    play(log, happened, until_s)
    if is_told_twice:
        play(log, happened, until_s)
    if is_stored:
        parts = log.take_changed(until_s)
        assert not log.take_changed(until_s)
        stored = msgspec.msgpack.decode(msgspec.msgpack.encode(list(parts.values())), type=list[StoredTraffic])
        log = RequestLog(until_s)
        log.load(stored, until_s)
    for index, model in enumerate(MODELS):
        since_s = BEGAN_S + 20  # a slot's beginning
        told = traffic_by_model(log, {model: 2.0}, since_s, until_s, execution_s={model: 3.0})[model]
        for summary, is_online in ((told.online, True), (told.offline, False)):
            own = [r for r in happened if r.model == index and r.is_online == is_online]
            arrived = [r for r in own if since_s <= r.arrived_s < until_s]
            over = [r for r in own if r.outcome != Outcome.PENDING and since_s <= r.ended_s < until_s]
            finished = [r for r in over if r.outcome == Outcome.FINISHED]
            if not log.models() & {model}:
                assert not own
                continue
            assert summary.num_arrived == len(arrived)
            assert summary.num_refused == sum(r.outcome == Outcome.REFUSED for r in over)
            assert summary.num_failed == sum(r.outcome in (Outcome.FAILED, Outcome.LATE) for r in over)
            assert summary.num_finished == len(finished)
            assert summary.arrivals_per_s == pytest.approx(len(arrived) / 80)
            check(summary.prompt_tokens, [r.prompt_tokens for r in arrived])
            check(summary.output_tokens, [r.output_tokens for r in finished])
            check(summary.execution_s, [r.execution_s for r in finished])
            check(summary.latency_s, [r.latency_s for r in finished])
            check(summary.ttft_s, [r.ttft_s for r in finished])
            check(summary.tpot_s, [0.75 * r.latency_s / (r.output_tokens - 1) for r in finished if r.output_tokens > 1])
            check(summary.max_itl_s, [r.latency_s / 3 for r in finished if r.output_tokens > 1])
            latencies = sorted(r.latency_s for r in finished)
            if latencies:
                exact = np.quantile(latencies, [0.5, 0.99], method="inverted_cdf")
                assert [summary.latency_s.p50, summary.latency_s.p99] == pytest.approx(list(exact))
            met = [r.latency_s < 2 for r in over]
            assert summary.ttft_attainment == (pytest.approx(np.mean(met)) if met else None)
            decided = {
                r.number: r.outcome == Outcome.FINISHED
                for r in own
                if r.outcome != Outcome.PENDING and r.latency_s <= 6 and since_s <= r.ended_s < until_s
            }
            decided = {r.number: is_met for r in own if (is_met := decided.get(r.number)) is not None
                       and r.outcome != Outcome.CANCELLED}  # fmt: skip
            late = [
                r for r in own
                if (r.outcome == Outcome.PENDING or r.latency_s > 6) and since_s <= r.arrived_s + 6 < until_s
            ]  # fmt: skip
            num = (len(decided) + len(late)) if is_online else 0
            assert summary.slo_s == (6.0 if is_online else 0.0)
            assert summary.num_decided == num
            assert summary.attainment == (pytest.approx(sum(decided.values()) / num) if num else None)
            mean_s = np.mean(latencies) if latencies else 6.0 if num else 0.0
            assert summary.normalised_latency == pytest.approx(mean_s / 3.0 if is_online else 0.0)


def check(told: object, values: list[float]) -> None:
    mean, std = (np.mean(values), np.std(values)) if values else (0.0, 0.0)
    assert told.mean == pytest.approx(mean, rel=1e-9)  # type: ignore[attr-defined]
    assert told.std == pytest.approx(std, rel=1e-3, abs=1e-4)  # type: ignore[attr-defined]


def poisson(per_s: float, seconds: float, seed: int = 0, *, model: int = 0, first: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, seconds, int(per_s * seconds)))
    return [
        Request(
            number=request_number(f"{first}-{i}"),
            model=model,
            is_online=True,
            arrived_s=BEGAN_S + float(at_s),
            prompt_tokens=int(rng.integers(10, 1000)),
            outcome=Outcome.FINISHED,
            output_tokens=int(rng.integers(1, 300)),
            latency_s=float(rng.exponential(2.0)),
        )
        for i, at_s in enumerate(times)
    ]


def test_a_log_that_is_full_keeps_rates_and_says_what_it_left_out() -> None:
    happened = poisson(20, 60) + poisson(2, 60, 1, model=1, first=1)
    log = RequestLog(BEGAN_S, max_requests=300)
    play(log, happened, BEGAN_S + 100)
    assert 200 < log.num_requests <= 300
    assert log.num_thinned == len(happened) - log.num_requests
    told = traffic_by_model(log, {"a": 0.0}, BEGAN_S, BEGAN_S + 100)["a"]
    latencies = [r.latency_s for r in happened if r.model == 0]
    assert told.online.num_arrived == told.online.num_finished == 1200, "sums are over all"
    assert told.online.latency_s.mean == pytest.approx(np.mean(latencies))
    assert told.online.latency_s.p50 == pytest.approx(np.median(latencies), rel=0.35)
    traffic = log.traffic(BEGAN_S, BEGAN_S + 60)
    for model, per_s in ((0, 20), (1, 2)):
        times = traffic.arrival_s[traffic.model == model]
        assert len(times) == pytest.approx(60 * per_s, abs=3)
    per_slot = np.histogram(traffic.arrival_s, bins=6, range=(0, 60))[0]
    assert per_slot == pytest.approx(np.full(6, 220), rel=0.25), "all of the time is covered"
    assert not log._slots[int(BEGAN_S // SLOT_S)].ended or all(
        request.row.number in log._known for slot in log._slots.values() for request in slot.ended
    )


def test_thinning_forgets_no_end_and_invents_no_arrival() -> None:
    happened = poisson(30, 40)
    log = RequestLog(BEGAN_S, max_requests=100)
    play(log, happened, BEGAN_S + 1000)
    assert all(request.row.outcome == Outcome.FINISHED for request in log.arrived(BEGAN_S, BEGAN_S + 40))
    assert log.sums("a", True, BEGAN_S, BEGAN_S + 1000).arrived == 1200


def test_traffic_has_what_waits_and_what_was_refused() -> None:
    rows = [
        RequestRow(8, 0, True, 9.0, 100),
        RequestRow(16, 0, True, 8.0, 200, Outcome.REFUSED),
        RequestRow(24, 0, False, 7.0, 300, Outcome.FINISHED, 40, 1.0, 0.5, 0.2),
        RequestRow(32, 1, True, 6.0, 400, Outcome.FINISHED, 50, 1.0, 0.5, 0.2),
    ]
    log = RequestLog(BEGAN_S)
    log.add(RequestRows("s", MODELS, rows), BEGAN_S + 10)
    traffic = log.traffic(BEGAN_S, BEGAN_S + 20)
    assert isinstance(traffic, Traffic)
    assert (traffic.models, traffic.interval_s) == (("a", "b"), 20.0)
    assert list(traffic.arrival_s) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert list(traffic.prompt_tokens) == [100, 200, 300, 400]
    assert list(traffic.output_tokens) == [40, 40, 40, 50], "as those of their model that finished"
    assert list(traffic.is_online) == [True, True, False, True] and list(traffic.model) == [0, 0, 0, 1]
    assert log.traffic(BEGAN_S, BEGAN_S + 20, ["b", "c"]).models == ("b", "c")
    empty = log.traffic(BEGAN_S + 100, BEGAN_S + 130, ["b"])
    assert (empty.num_requests, empty.interval_s) == (0, 30.0)


def test_traffic_may_be_cut_to_the_latest_requests() -> None:
    log = RequestLog(BEGAN_S, max_requests=100)
    play(log, poisson(10, 60), BEGAN_S + 100)
    until_s = BEGAN_S + 60
    assert log.since_s(BEGAN_S, until_s, 600 + 1) == BEGAN_S
    since_s = log.since_s(BEGAN_S + 1, until_s, 200)
    assert BEGAN_S + 30 <= since_s <= BEGAN_S + 50
    assert log.traffic(since_s, until_s).num_requests == pytest.approx(200, abs=2 * SLOT_S * 10)
    assert log.since_s(BEGAN_S + 55, until_s, 1) == BEGAN_S + 55


def test_requests_that_failed_count_where_no_execution_time_is_known() -> None:
    rows = [
        RequestRow(8, 0, True, 9.0, 100),
        RequestRow(16, 0, True, 8.0, 200, Outcome.FAILED, 0, 1.0),
        RequestRow(24, 0, True, 305.0, 200, Outcome.LATE, 0, 300.0),
        RequestRow(32, 0, True, 7.0, 300, Outcome.CANCELLED, 40, 1.0),
    ]
    log = RequestLog(BEGAN_S - 1000)
    log.add(RequestRows("s", MODELS, rows), BEGAN_S + 10)
    online = traffic_by_model(log, {"a": 0.0}, BEGAN_S, BEGAN_S + 10)["a"].online
    assert (online.num_decided, online.attainment, online.slo_s) == (2, 0.0, 0.0)


def test_who_met_its_slo_is_counted_from_the_moment_on_that_is_asked_for() -> None:
    log = RequestLog(BEGAN_S)
    rows = [
        RequestRow(8 * n, 0, True, age_s, 100, Outcome.FINISHED, 9, 0.5, 0.1, 0.4) for n, age_s in enumerate((7, 5, 2))
    ]
    log.add(RequestRows("s", MODELS, rows), BEGAN_S + 9)
    for last_s, num in ((9.0, 3), (5.0, 2), (2.0, 1), (0.5, 0)):
        online = traffic_by_model(log, {"a": 5.0}, BEGAN_S + 9 - last_s, BEGAN_S + 9)["a"].online
        assert (online.num_decided, online.num_finished) == (num, 3)


def test_slots_that_are_too_old_go_and_so_does_what_they_had() -> None:
    log = RequestLog(BEGAN_S, max_age_s=60)
    play(log, poisson(5, 30), BEGAN_S + 100)
    num = log.num_requests
    log.expire(BEGAN_S + 75)
    first = int(BEGAN_S // SLOT_S)
    assert log.next_gone() == log.next_gone() == first and log.num_expired == num - log.num_requests > 0
    log.purged(first)
    assert log.next_gone() is None
    log.expire(BEGAN_S + 1000)
    assert log.num_requests == 0 and log.next_gone() is not None
    assert log.models() == set() and log.mean_execution_s("a") == 0.0


def test_an_end_without_its_arrival_is_a_request_all_the_same() -> None:
    log = RequestLog(BEGAN_S)
    log.add(
        RequestRows("s", ["a"], [RequestRow(8, 0, True, 5.0, 100, Outcome.FINISHED, 9, 4.0, 1.0, 2.0)]), BEGAN_S + 10
    )
    told = traffic_by_model(log, {"a": 0.0}, BEGAN_S, BEGAN_S + 10)["a"].online
    assert (told.num_arrived, told.num_finished, told.slo_s, told.attainment) == (1, 1, 10.0, 1.0)
    assert told.normalised_latency == 2.0


def test_stored_parts_follow_what_was_thinned() -> None:
    log = RequestLog(BEGAN_S, max_requests=6000)
    play(log, poisson(500, 10), BEGAN_S + 9.9)
    before = log.take_changed(BEGAN_S + 10)
    assert len(before) > 2
    play(log, poisson(500, 20, first=7), BEGAN_S + 60)
    stored = before | log.take_changed(BEGAN_S + 60)
    again = RequestLog(BEGAN_S + 60, max_requests=6000)
    again.load(stored.values(), BEGAN_S + 60)
    assert again.num_requests == log.num_requests and again.began_s == BEGAN_S
    assert again.mean_execution_s("a") == pytest.approx(log.mean_execution_s("a"))

    def told(by: RequestLog) -> dict[str, ModelTraffic]:
        scales, means = dict.fromkeys(MODELS, 3.0), dict.fromkeys(MODELS, 1.0)
        return traffic_by_model(by, scales, BEGAN_S, BEGAN_S + 60, execution_s=means)

    assert told(again) == told(log) and told(log)["a"].online.attainment is not None


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1), st.floats(0.01, 1.0))
def test_a_weighted_quantile_is_that_of_the_copies(values: list[tuple[float, int]], share: float) -> None:
    copies = [value for value, weight in values for _ in range(weight)]
    expected = np.sort(copies)[max(0, int(np.ceil(share * len(copies) - 1e-9)) - 1)]
    assert weighted_quantile(sorted(values), share) == pytest.approx(expected)
