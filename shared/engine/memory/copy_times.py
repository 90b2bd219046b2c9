"""How long the copy of a KV block takes, in each direction: measured on the copies themselves. Before the first has ended it
is what the cost model says."""

from __future__ import annotations

from collections.abc import Mapping

from shared.engine.model_queue import ModelQueue
from shared.engine.plan import CopyKind, KvCopy

NEW_WEIGHT = 0.25
"""Weight of the last copy in the mean time of a block."""
OUTLIER = 2.0
"""A copy counts as at most so many times slower than those before it: a stall is not a slow link."""


class CopyTimes:
    def __init__(self, queues: Mapping[str, ModelQueue]) -> None:
        self._queues = queues
        self._block_s: dict[tuple[CopyKind, str], float] = {}
        """Measured, of each kind and model; 0: whoever copies does not say."""

    def learn(self, copy: KvCopy, seconds: float) -> None:
        """A copy has ended."""
        key, block_s = (copy.kind, copy.model), seconds / max(1, len(copy.host_blocks))
        known_s = self._block_s.get(key, 0.0)
        if known_s:
            block_s = known_s + NEW_WEIGHT * (min(block_s, OUTLIER * known_s) - known_s)
        self._block_s[key] = block_s

    def of_model(self, kind: CopyKind, model: str) -> float | None:
        """Seconds of a block; 0: not told; None: not known yet."""
        measured_s, cost = self._block_s.get((kind, model)), self._queues[model].cost_model
        profiled = {} if cost is None else {
            CopyKind.CHECKPOINT: cost.checkpoint_block_s, CopyKind.RESTORE: cost.restore_block_s,
        }  # fmt: skip
        profiled_s = profiled.get(kind, 0.0)
        return measured_s or profiled_s if measured_s is not None or profiled_s else None

    def slowest(self, kind: CopyKind) -> float | None:
        """Seconds of a block of the model whose blocks take longest; 0: not told; None: not known yet."""
        known = (self.of_model(kind, name) for name in self._queues)
        return max((block_s for block_s in known if block_s is not None), default=None)
