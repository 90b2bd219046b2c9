"""SeaLLM's service monitor: execution times per model over the whole cluster, for the doubling budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.messages.cluster import ExecutionStatistics, FinishedStats
from shared.messages.requests import FinishReason, RequestClass
from shared.policies.execution_statistics import ExecutionTimeWindow

LEAST_CHANGE = 0.01
"""Change of mean or deviation, as a part of the mean, that is worth telling."""
NUM_TO_REPLACE = 20
"""Finished requests before a new leader's own statistics take the place of its predecessor's."""


class ServiceMonitor:
    """`inherited`: what the last leader published."""

    def __init__(self, inherited: Mapping[str, ExecutionStatistics]) -> None:
        self._window = ExecutionTimeWindow()
        self._inherited = dict(inherited)
        self._published = dict(inherited)
        self._changed: dict[str, None] = {}
        """In order, so that it does not depend on hashes."""
        self._is_news = bool(inherited)
        """Whether somebody may not know what is published."""

    def count_finished(self, finished: Sequence[FinishedStats]) -> None:
        """Counts online requests that came to their own end; others say nothing of how long one takes."""
        for stats in finished:
            seconds = stats.device_s or stats.execution_s
            is_told = stats.is_whole and stats.request_class == RequestClass.ONLINE
            if is_told and seconds > 0 and stats.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._window.add(stats.model, seconds)
                self._changed[stats.model] = None

    def on_new_instance(self) -> None:
        """It knows nothing yet."""
        self._is_news = True

    def take(self) -> list[ExecutionStatistics]:
        """What to publish: models whose statistics have changed since the last call, or all for a new instance."""
        changed = []
        for model in self._changed:
            new, old = self._window.statistics(model), self._published.get(model)
            inherited = self._inherited.get(model)
            is_enough = inherited is None or new.num_finished >= min(NUM_TO_REPLACE, inherited.num_finished)
            if is_enough and (old is None or _differs(new, old)):
                self._published[model] = new
                changed.append(new)
        self._changed.clear()
        if self._is_news:
            changed = list(self._published.values())
            self._is_news = False
        return changed

    def forget(self, model: str) -> None:
        """The model was removed."""
        self._window.forget(model)
        self._changed.pop(model, None)
        self._published.pop(model, None)
        self._inherited.pop(model, None)


def _differs(new: ExecutionStatistics, old: ExecutionStatistics) -> bool:
    least_s = LEAST_CHANGE * old.mean_s
    return abs(new.mean_s - old.mean_s) > least_s or abs(new.std_s - old.std_s) > least_s
