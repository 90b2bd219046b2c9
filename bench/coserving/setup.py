"""What the runs of both kinds are put together from."""

from __future__ import annotations

import msgspec

from bench.coserving.systems import System
from shared.cost_model import CostModel
from shared.engine.calls import AddModel, SetCostModel
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape

MODEL = "model"


class Objectives(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that a result depends on beside the experiments' own parameters."""

    model: str = "135m"
    device: str = "cpu"
    dtype: str = "bfloat16"
    num_threads: int = 2
    pool_tokens: int = 16384
    """KV pool; host memory for checkpoints is `host_share` of it."""
    host_share: float = 2.0
    num_rows: int = 64
    max_step_tokens: int = 512
    steps_in_flight: int = 1
    ordering: str = "fcfs"
    """Of one class, alike in all systems."""
    niceness: int = 5
    """Of the compute threads, as in an instance on CPU."""
    profile_s: float = 12.0
    seed: int = 1

    def num_host_merged(self, num_merged: int) -> int:
        return int(num_merged * self.host_share)

    def engine(
        self, system: System, shape: ModelShape, cost_model: CostModel, num_merged: int, objectives: Objectives
    ) -> Engine:
        """A fresh one, with the model on it."""
        engine = system.configuration(
            num_merged=num_merged,
            num_rows=self.num_rows,
            num_host_merged=self.num_host_merged(num_merged),
            max_step_tokens=self.max_step_tokens,
            steps_in_flight=self.steps_in_flight,
            ordering=self.ordering,
            ttft_s=objectives.ttft_s,
            tpot_s=objectives.tpot_s,
        ).build()
        engine.apply(AddModel(shape), 0.0)
        engine.apply(SetCostModel(MODEL, cost_model), 0.0)
        return engine


def num_merged(pool_tokens: int, block_size: int, blocks_per_merged: int) -> int:
    """Merged blocks of a pool for so many tokens."""
    return max(1, -(-pool_tokens // block_size) // blocks_per_merged)
