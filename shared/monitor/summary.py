"""What models' traffic was like in an interval (SeaLLM, section 3). Counts, means and deviations are from exact sums,
percentiles and attainment from the requests of the log. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shared.messages.traffic import ClassSums, MeanStd, ModelSummary, ModelTraffic, Moments, Outcome, RequestRow, Spread
from shared.monitor.request_log import SLOT_S, RequestLog, slot_index
from shared.monitor.sums import mean_std, tpot_s
from shared.placement.plan import DEFAULT_SLO_SCALE

Key = tuple[str, bool]
"""A model, and whether online."""


def traffic_by_model(
    log: RequestLog,
    slo_scales: Mapping[str, float],
    since_s: float,
    until_s: float,
    *,
    execution_s: Mapping[str, float] | None = None,
) -> dict[str, ModelTraffic]:
    """Traffic of each model in `slo_scales`, which has the mean execution times that its online requests may take; 0: the
    default. `execution_s`: those means; of one that is missing, as of the whole log. Offline requests have no SLO.
    Counted from `since_s` on is whose SLO was met or missed; the rest from the beginning of its slot on."""
    exact_s, since_s = max(log.began_s, since_s), max(log.began_s, slot_index(since_s) * SLOT_S)
    means = {model: (execution_s or {}).get(model) or log.mean_execution_s(model) for model in slo_scales}
    slos = {model: means[model] * (scale or DEFAULT_SLO_SCALE) for model, scale in slo_scales.items()}
    finished: dict[Key, list[tuple[RequestRow, int]]] = {}
    for request in log.ended(since_s, until_s):
        if request.row.outcome == Outcome.FINISHED:
            finished.setdefault((request.model, request.row.is_online), []).append((request.row, request.weight))
    decided = _decided(log, slos, exact_s, until_s)

    def summary(model: str, is_online: bool) -> ModelSummary:
        key = (model, is_online)
        sums = log.sums(model, is_online, since_s, until_s)
        rows = finished.get(key, [])
        mean_s, slo_s = (means[model], slos[model]) if is_online else (0.0, 0.0)
        return _summary(sums, rows, decided.get(key, (0, 0)), until_s - since_s, mean_s, slo_s)

    return {
        model: ModelTraffic(model=model, online=summary(model, True), offline=summary(model, False))
        for model in slo_scales
    }


def _summary(
    sums: ClassSums,
    finished: list[tuple[RequestRow, int]],
    decided: tuple[int, int],
    interval_s: float,
    execution_s: float,
    slo_s: float,
) -> ModelSummary:
    """`finished`: the log's requests that did, and how many each stands for. `decided`: that met their SLO, and all."""
    interval_s = max(1e-9, interval_s)
    latency = _spread(sums.latency_s, [(row.latency_s, weight) for row, weight in finished])
    mean_s = slo_s if decided[1] and not sums.finished else latency.mean
    later = [(row, value, weight) for row, weight in finished if (value := tpot_s(row)) is not None]
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
        tpot_s=_spread(sums.tpot_s, [(value, weight) for _, value, weight in later]),
        max_itl_s=_spread(sums.max_itl_s, [(row.max_itl_s, weight) for row, _, weight in later]),
        normalised_latency=mean_s / execution_s if execution_s else 0.0,
        slo_s=slo_s,
        attainment=_share(decided),
        num_decided=decided[1],
        ttft_attainment=_share(sums.ttft_met),
        tpot_attainment=_share(sums.tpot_met),
    )


def _decided(log: RequestLog, slos: Mapping[str, float], since_s: float, until_s: float) -> dict[Key, tuple[int, int]]:
    """Requests that met their SLO, and all that were decided: each is when it ends, or when its SLO has passed. So those
    that wait for ever count as well, and each in one interval only. A client that goes before says nothing. While no
    execution time of a model is known, those that failed count alone."""
    counts: dict[Key, tuple[int, int]] = {}
    for request in log.ended(since_s, until_s):
        row = request.row
        is_failed = row.outcome in (Outcome.FAILED, Outcome.LATE, Outcome.REFUSED)
        is_within = since_s <= request.arrived_s + row.latency_s < until_s
        if is_failed and is_within and row.is_online and slos.get(request.model) == 0.0:
            num_met, num_decided = counts.get((request.model, True), (0, 0))
            counts[request.model, True] = (num_met, num_decided + request.weight)
    for request in log.arrived(since_s - max(slos.values(), default=0.0) - SLOT_S, until_s):
        row, slo_s = request.row, slos.get(request.model, 0.0)
        if not slo_s or not row.is_online:
            continue
        is_over = row.outcome != Outcome.PENDING and row.latency_s <= slo_s
        decided_s = request.arrived_s + (row.latency_s if is_over else slo_s)
        if not since_s <= decided_s < until_s or (is_over and row.outcome == Outcome.CANCELLED):
            continue
        key = (request.model, row.is_online)
        num_met, num_decided = counts.get(key, (0, 0))
        is_met = is_over and row.outcome == Outcome.FINISHED
        counts[key] = (num_met + request.weight * is_met, num_decided + request.weight)
    return counts


def _share(counts: tuple[int, int]) -> float | None:
    num_met, num = counts
    return num_met / num if num else None


def _spread(moments: Moments, values: list[tuple[float, int]]) -> Spread:
    known: MeanStd = mean_std(moments)
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
