"""Traffic per model since the last report, for the placement service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from shared.messages.cluster import FinishedStats, ModelStatistics
from shared.messages.requests import RequestClass


@dataclass(slots=True)
class _Counts:
    num_arrived: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued_s: float = 0.0
    execution_s: float = 0.0
    offline_prompt_tokens: int = 0
    offline_output_tokens: int = 0


class StatisticsCounter:
    def __init__(self) -> None:
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)

    def count_arrival(self, model: str) -> None:
        self._counts[model].num_arrived += 1

    def count_queued(self, model: str, seconds: float) -> None:
        """Time in the global queue; the time on the instance comes with its reports."""
        self._counts[model].queued_s += seconds

    def count_finished(self, finished: Sequence[FinishedStats]) -> None:
        for stats in finished:
            counts = self._counts[stats.public_model]
            counts.num_finished += 1
            counts.prompt_tokens += stats.prompt_tokens
            counts.output_tokens += stats.output_tokens
            counts.queued_s += stats.queued_s
            counts.execution_s += stats.execution_s
            if stats.request_class == RequestClass.OFFLINE:
                counts.offline_prompt_tokens += stats.prompt_tokens
                counts.offline_output_tokens += stats.output_tokens

    def take(
        self,
        interval_s: float,
        num_queued: Mapping[str, int],
        num_offline_queued: Mapping[str, int] = MappingProxyType({}),
    ) -> list[ModelStatistics]:
        """What was counted since the last call, `interval_s` ago, for models with traffic or a queue. `num_offline_queued`:
        of those that are queued, the offline ones."""
        counted, self._counts = self._counts, defaultdict(_Counts)
        return [
            ModelStatistics(
                model=model,
                interval_s=interval_s,
                num_queued=num_queued.get(model, 0),
                num_offline_queued=num_offline_queued.get(model, 0),
                **asdict(counted[model]),
            )
            for model in sorted(counted.keys() | num_queued.keys())
        ]
