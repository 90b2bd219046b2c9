"""Traffic per model since the last report, for the placement service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.cluster import FinishedStats, ModelStatistics


@dataclass(slots=True)
class _Counts:
    num_arrived: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued_s: float = 0.0
    execution_s: float = 0.0


class StatisticsCounter:
    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def count_arrival(self, model: str) -> None:
        self._of(model).num_arrived += 1

    def count_queued(self, model: str, seconds: float) -> None:
        """Time in the global queue; the time on the instance comes with its reports."""
        self._of(model).queued_s += seconds

    def count_finished(self, finished: Sequence[FinishedStats]) -> None:
        for stats in finished:
            counts = self._of(stats.model)
            counts.num_finished += 1
            counts.prompt_tokens += stats.prompt_tokens
            counts.output_tokens += stats.output_tokens
            counts.queued_s += stats.queued_s
            counts.execution_s += stats.execution_s

    def take(self, interval_s: float, num_queued: dict[str, int]) -> list[ModelStatistics]:
        """What was counted since the last call, `interval_s` ago, for models with traffic or a queue."""
        models = sorted(self._counts.keys() | num_queued.keys())
        counted, self._counts = self._counts, {}
        report = []
        for model in models:
            counts = counted.get(model, _Counts())
            report.append(
                ModelStatistics(
                    model=model,
                    interval_s=interval_s,
                    num_arrived=counts.num_arrived,
                    num_finished=counts.num_finished,
                    prompt_tokens=counts.prompt_tokens,
                    output_tokens=counts.output_tokens,
                    queued_s=counts.queued_s,
                    execution_s=counts.execution_s,
                    num_queued=num_queued.get(model, 0),
                )
            )
        return report

    def _of(self, model: str) -> _Counts:
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = _Counts()
        return counts
