"""What every rank of an instance makes of its set-up: its place in the group, and its executor."""

from __future__ import annotations

from pathlib import Path

import torch

from services.worker.executor.executor import Executor
from services.worker.ranks.group import RankGroup, Ranks
from services.worker.ranks.messages import SetUp
from services.worker.ranks.shared_memory import RankMemory


def join(setup: SetUp, memory: RankMemory) -> tuple[Executor, RankGroup]:
    """Blocks until all ranks are there. Raises `GroupError`."""
    device = torch.device(setup.device)
    stage, rank = divmod(setup.rank, size := setup.num_ranks // setup.num_stages)
    rendezvous = Path(setup.folder) / "rendezvous"
    group = Ranks(
        rank, size, rendezvous, device, stage=stage, num_stages=setup.num_stages, in_order=setup.deterministic
    )
    executor = Executor(
        device,
        setup.num_merged,
        setup.merged_bytes,
        setup.num_rows,
        num_host_merged=setup.num_host_merged,
        num_window_merged=setup.num_window_merged,
        group=group,
        shared=memory,
        deterministic=setup.deterministic,
        host_weights_bytes=setup.host_weights_bytes,
    )
    return executor, group
