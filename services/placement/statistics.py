"""Traffic per model: totals since the model was added, and rates over a sliding window. Pure: time (seconds, monotonic)
is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.messages.cluster import ModelStatistics

WINDOW_S = 60.0


def zero(model: str) -> ModelStatistics:
    return ModelStatistics(
        model=model,
        interval_s=0.0,
        num_arrived=0,
        num_finished=0,
        prompt_tokens=0,
        output_tokens=0,
        queued_s=0.0,
        execution_s=0.0,
        num_queued=0,
    )


def add(left: ModelStatistics, right: ModelStatistics) -> ModelStatistics:
    """Sums over both intervals; `num_queued`, a level, is the later one's."""
    return ModelStatistics(
        model=left.model,
        interval_s=left.interval_s + right.interval_s,
        num_arrived=left.num_arrived + right.num_arrived,
        num_finished=left.num_finished + right.num_finished,
        prompt_tokens=left.prompt_tokens + right.prompt_tokens,
        output_tokens=left.output_tokens + right.output_tokens,
        queued_s=left.queued_s + right.queued_s,
        execution_s=left.execution_s + right.execution_s,
        num_queued=right.num_queued,
    )


@dataclass(frozen=True)
class TrafficRates:
    """Over the last WINDOW_S. Means are over finished requests, 0 where there are none."""

    arrivals_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    mean_queued_s: float = 0.0
    mean_execution_s: float = 0.0
    num_queued: int = 0
    """When the scheduler last reported this model; it reports those with traffic or a queue."""


class TrafficStatistics:
    """Counts only models that were added."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._totals: dict[str, ModelStatistics] = {}
        self._recent: dict[str, deque[tuple[float, ModelStatistics]]] = {}
        self._changed: set[str] = set()

    def add_model(self, model: str, totals: ModelStatistics | None = None) -> None:
        """`totals`: as stored; None: it begins now."""
        self._totals[model] = totals or zero(model)
        self._recent[model] = deque()
        if totals is None:
            self._changed.add(model)

    def remove_model(self, model: str) -> None:
        self._totals.pop(model, None)
        self._recent.pop(model, None)
        self._changed.discard(model)

    def observe(self, reports: Iterable[ModelStatistics], now: float) -> None:
        for report in reports:
            if report.model in self._totals:
                self._totals[report.model] = add(self._totals[report.model], report)
                self._recent[report.model].append((now, report))
                self._changed.add(report.model)

    def totals(self, model: str) -> ModelStatistics:
        return self._totals[model]

    def take_changed(self) -> list[ModelStatistics]:
        """Totals that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._totals[model] for model in sorted(changed)]

    def keep_changed(self, models: Iterable[str]) -> None:
        """What was taken could not be stored: it is due again."""
        self._changed |= self._totals.keys() & set(models)

    def rates(self, model: str, now: float) -> TrafficRates:
        recent = self._recent[model]
        while recent and recent[0][0] <= now - WINDOW_S:
            recent.popleft()
        total = zero(model)
        for _, report in recent:
            total = add(total, report)
        window_s = max(1.0, min(WINDOW_S, now - self._started_at))
        finished = max(1, total.num_finished)
        return TrafficRates(
            total.num_arrived / window_s,
            total.output_tokens / window_s,
            total.prompt_tokens / finished,
            total.output_tokens / finished,
            total.queued_s / finished,
            total.execution_s / finished,
            total.num_queued,
        )
