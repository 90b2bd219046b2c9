"""What each model has served since it was added, and how long its queue is. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.messages.cluster import ModelStatistics


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
    summed = [field for field in ModelStatistics.__struct_fields__ if field not in ("model", "num_queued")]
    return msgspec.structs.replace(right, **{field: getattr(left, field) + getattr(right, field) for field in summed})


class TrafficStatistics:
    """Counts only models that were added."""

    def __init__(self) -> None:
        self._totals: dict[str, ModelStatistics] = {}
        self._changed: set[str] = set()
        self._num_queued: dict[str, int] = {}

    def add_model(self, model: str, totals: ModelStatistics | None = None) -> None:
        """`totals`: as stored; None: it begins now."""
        self._totals[model] = totals or zero(model)
        if totals is None:
            self._changed.add(model)

    def remove_model(self, model: str) -> None:
        self._totals.pop(model, None)
        self._changed.discard(model)

    def observe(self, reports: Iterable[ModelStatistics]) -> None:
        """All that the scheduler says at once: a model that is not among it has no queue."""
        self._num_queued.clear()
        for report in reports:
            self._num_queued[report.model] = report.num_queued
            if report.model in self._totals:
                self._totals[report.model] = add(self._totals[report.model], report)
                self._changed.add(report.model)

    def totals(self, model: str) -> ModelStatistics:
        return self._totals[model]

    def num_queued(self, model: str) -> int:
        """Number of requests in the queue when the scheduler last said so."""
        return self._num_queued.get(model, 0)

    def take_changed(self) -> list[ModelStatistics]:
        """Totals that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._totals[model] for model in sorted(changed)]

    def keep_changed(self, models: Iterable[str]) -> None:
        """What was taken could not be stored: it is due again."""
        self._changed |= self._totals.keys() & set(models)
