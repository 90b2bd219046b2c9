"""What a model's traffic was like in an interval (SeaLLM, section 3). Counts, means and deviations are from exact sums,
percentiles and attainment from the requests of the log. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.traffic import ModelSummary, ModelTraffic, Moments, Outcome, Spread
from shared.monitor.request_log import SLOT_S, LoggedRequest, RequestLog, slot_index
from shared.monitor.sums import mean_std, tpot_s

DEFAULT_SLO_SCALE = 5.0
"""As `shared.placement.problem`, which needs numpy."""


def model_traffic(
    log: RequestLog, model: str, since_s: float, until_s: float, *, slo_scale: float = 0.0, execution_s: float = 0.0
) -> ModelTraffic:
    """`slo_scale`: mean execution times that a request may take; 0: the default. `execution_s`: that mean; 0: as of the
    whole log."""
    execution_s = execution_s or mean_execution_s(log, model, until_s)
    slo_s = execution_s * (slo_scale or DEFAULT_SLO_SCALE)
    online, offline = (
        _summary(log, model, is_online, since_s, until_s, execution_s, slo_s) for is_online in (True, False)
    )
    return ModelTraffic(model=model, online=online, offline=offline)


def mean_execution_s(log: RequestLog, model: str, now: float) -> float:
    """Of the log's online requests, else of its offline ones; 0: nothing has finished."""
    for is_online in (True, False):
        if mean_s := mean_std(log.sums(model, is_online, log.began_s, now).execution_s).mean:
            return mean_s
    return 0.0


def _summary(
    log: RequestLog, model: str, is_online: bool, since_s: float, until_s: float, execution_s: float, slo_s: float
) -> ModelSummary:
    since_s = max(log.began_s, slot_index(since_s) * SLOT_S)
    sums = log.sums(model, is_online, since_s, until_s)
    interval_s = max(1e-9, until_s - since_s)
    finished = [
        (request.row, request.weight)
        for request in log.ended(since_s, until_s)
        if request.model == model and request.row.is_online == is_online and request.row.outcome == Outcome.FINISHED
    ]
    attainment = None
    if slo_s:
        arrived = log.arrived(since_s - slo_s - SLOT_S, until_s)
        own = (request for request in arrived if request.model == model and request.row.is_online == is_online)
        attainment = _attainment(own, slo_s, since_s, until_s)
    latency = _spread(sums.latency_s, [(row.latency_s, weight) for row, weight in finished])
    later = ((tpot_s(row), weight) for row, weight in finished)
    return ModelSummary(
        interval_s=interval_s,
        num_arrived=sums.arrived,
        num_refused=sums.refused,
        num_finished=sums.finished,
        num_cancelled=sums.cancelled,
        num_failed=sums.failed,
        arrivals_per_s=sums.arrived / interval_s,
        prompt_tokens=mean_std(sums.prompt_tokens),
        output_tokens=mean_std(sums.output_tokens),
        execution_s=mean_std(sums.execution_s),
        latency_s=latency,
        ttft_s=_spread(sums.ttft_s, [(row.ttft_s, weight) for row, weight in finished if row.ttft_s >= 0]),
        tpot_s=_spread(sums.tpot_s, [(value, weight) for value, weight in later if value is not None]),
        normalised_latency=latency.mean / execution_s if execution_s else 0.0,
        slo_s=slo_s,
        attainment=attainment,
        ttft_attainment=_share(sums.ttft_met),
        tpot_attainment=_share(sums.tpot_met),
    )


def _attainment(requests: Iterable[LoggedRequest], slo_s: float, since_s: float, until_s: float) -> float | None:
    """A request is decided when it ends, or when its SLO has passed: so those that wait for ever count as well, and each
    in one interval only. A client that goes before says nothing."""
    num_met = num_decided = 0
    for request in requests:
        row, decided_s = request.row, request.arrived_s + slo_s
        is_over = row.outcome != Outcome.PENDING and row.latency_s <= slo_s
        if is_over:
            decided_s = request.arrived_s + row.latency_s
        if not since_s <= decided_s < until_s or (is_over and row.outcome == Outcome.CANCELLED):
            continue
        num_decided += request.weight
        num_met += request.weight * (is_over and row.outcome == Outcome.FINISHED)
    return num_met / num_decided if num_decided else None


def _share(counts: tuple[int, int]) -> float | None:
    num_met, num = counts
    return num_met / num if num else None


def _spread(moments: Moments, values: list[tuple[float, int]]) -> Spread:
    known = mean_std(moments)
    values.sort()
    return Spread(known.mean, known.std, weighted_quantile(values, 0.5), weighted_quantile(values, 0.99))


def weighted_quantile(values: list[tuple[float, int]], share: float) -> float:
    """The least value that has at least `share` of the weight at or below it, of (value, weight), ascending; 0: of none."""
    limit = share * sum(weight for _, weight in values)
    passed = 0
    for value, weight in values:
        passed += weight
        if passed >= limit:
            return value
    return 0.0
