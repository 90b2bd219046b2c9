"""Mean and standard deviation of the execution time per model (SeaLLM's service monitor, section 4.2)."""

from __future__ import annotations

from collections import deque
from math import fsum, isfinite, sqrt

from shared.messages.cluster import ExecutionStatistics


class ExecutionTimeWindow:
    """The last `num` finished requests of each model. Both moments are summed afresh, so nothing drifts: O(num) for the
    first `statistics` after an `add`, O(1) else."""

    def __init__(self, num: int = 1000, *, default_s: float = 1.0) -> None:
        if num < 1:
            raise ValueError(f"window of {num} requests must be at least 1")
        self._num = num
        self._default_s = default_s
        self._times_s: dict[str, deque[float]] = {}
        self._known: dict[str, ExecutionStatistics] = {}

    def add(self, model: str, device_s: float) -> None:
        """A request that finished by itself: one that was cancelled says nothing of how long others take."""
        if not (isfinite(device_s) and device_s >= 0):
            raise ValueError(f"execution time of {device_s} s")
        self._times_s.setdefault(model, deque(maxlen=self._num)).append(device_s)
        self._known.pop(model, None)

    def statistics(self, model: str) -> ExecutionStatistics:
        """Statistics of the window; before anything finished, the default as a prediction (`num_finished` 0)."""
        times_s = self._times_s.get(model)
        if times_s is None:
            return ExecutionStatistics(model, self._default_s, 0.0, 0)
        known = self._known.get(model)
        if known is None:
            mean_s = fsum(times_s) / len(times_s)
            variance = fsum((time_s - mean_s) ** 2 for time_s in times_s) / len(times_s)
            known = self._known[model] = ExecutionStatistics(model, mean_s, sqrt(variance), len(times_s))
        return known

    def forget(self, model: str) -> None:
        """The model was removed."""
        self._times_s.pop(model, None)
        self._known.pop(model, None)
