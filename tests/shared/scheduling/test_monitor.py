"""Execution times over the cluster, and when they are worth publishing."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages.cluster import ExecutionStatistics, FinishedStats
from shared.messages.requests import FinishReason, RequestClass
from shared.scheduling.monitor import NUM_TO_REPLACE, ServiceMonitor


def finished(
    device_s: float, *, model: str = "m", execution_s: float = 9.0, reason: FinishReason = FinishReason.STOP
) -> FinishedStats:
    return FinishedStats(
        model=model,
        request_class=RequestClass.ONLINE,
        prompt_tokens=10,
        output_tokens=10,
        queued_s=0.0,
        execution_s=execution_s,
        finish_reason=reason,
        device_s=device_s,
    )


def test_only_what_changed_is_published() -> None:
    monitor = ServiceMonitor({})
    assert monitor.take() == []
    monitor.count_finished([finished(1.0), finished(3.0), finished(5.0, model="n")])
    told = {statistics.model: statistics for statistics in monitor.take()}
    assert told == {"m": ExecutionStatistics("m", 2.0, 1.0, 2), "n": ExecutionStatistics("n", 5.0, 0.0, 1)}
    assert monitor.take() == []
    monitor.count_finished([finished(5.0, model="n")])
    assert monitor.take() == [], "another request, the same figures"
    monitor.count_finished([finished(7.0, model="n")])
    assert [statistics.model for statistics in monitor.take()] == ["n"]
    monitor.on_new_instance()
    assert {statistics.model for statistics in monitor.take()} == {"m", "n"}
    assert monitor.take() == []


def test_requests_that_did_not_end_by_themselves_do_not_count() -> None:
    monitor = ServiceMonitor({})
    for reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR):
        monitor.count_finished([finished(1.0, reason=reason)])
    monitor.count_finished([finished(0.0, execution_s=0.0)])
    assert monitor.take() == []
    monitor.count_finished([finished(0.0, execution_s=4.0, reason=FinishReason.LENGTH)])
    assert monitor.take() == [ExecutionStatistics("m", 4.0, 0.0, 1)], "where the device's time is not measured"


def test_offline_requests_and_those_that_were_computed_elsewhere_say_nothing_of_online_ones() -> None:
    monitor = ServiceMonitor({})
    offline = msgspec.structs.replace(finished(30.0), request_class=RequestClass.OFFLINE)
    placed_again = msgspec.structs.replace(finished(0.1), is_whole=False)
    monitor.count_finished([offline, placed_again])
    assert monitor.take() == []
    monitor.count_finished([finished(1.0), offline, placed_again])
    assert monitor.take() == [ExecutionStatistics("m", 1.0, 0.0, 1)]


@pytest.mark.parametrize("num_before", [3, 1000])
def test_a_new_leader_holds_to_the_old_figures_until_it_has_its_own(num_before: int) -> None:
    inherited = ExecutionStatistics("m", 2.0, 0.5, num_before)
    monitor = ServiceMonitor({"m": inherited})
    assert monitor.take() == [inherited]
    num = min(num_before, NUM_TO_REPLACE)
    monitor.count_finished([finished(8.0)] * (num - 1))
    assert monitor.take() == []
    monitor.on_new_instance()
    assert monitor.take() == [inherited]
    monitor.count_finished([finished(8.0)])
    assert monitor.take() == [ExecutionStatistics("m", 8.0, 0.0, num)]


def test_a_model_that_is_removed_is_forgotten() -> None:
    monitor = ServiceMonitor({"n": ExecutionStatistics("n", 1.0, 0.0, 5)})
    monitor.count_finished([finished(1.0)])
    for model in ("m", "n"):
        monitor.forget(model)
    monitor.on_new_instance()
    assert monitor.take() == []
