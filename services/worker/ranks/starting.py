"""Start of a group by one process, which starts the other ranks, tells them what they are, and waits until all have found
each other.

They are in the process group of rank 0, so that a signal to the instance reaches them (they leave SIGTERM to rank 0); the
kernel kills them when rank 0 dies, however that happens.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.worker.node.processes import dies_with_parent
from services.worker.ranks.messages import FromRank, SetUp, Stream, framed
from shared.messages.cluster import DeviceGroup

if TYPE_CHECKING:
    from services.worker.ranks.group_executor import GroupExecutor

WAIT_S = 1.0
"""Time for the exit of a process whose stream has ended."""


@dataclass
class RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    stream: Stream[FromRank]

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            return "closed its stream"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def start_ranks(group: DeviceGroup) -> list[RankProcess]:
    """All but rank 0. Raises `OSError`. To be called in a thread that lives as long as the process: with it they die."""
    ranks = []
    for rank in range(1, len(group.devices)):
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if group.devices[rank] != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = group.devices[rank]
        command = [sys.executable, "-m", "services.worker.ranks.rank_main", str(theirs.fileno())]
        process = subprocess.Popen(
            dies_with_parent(command), env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
        )
        theirs.close()
        ranks.append(RankProcess(rank, process, Stream[FromRank](ours, FromRank)))
    return ranks


def join_ranks(
    others: Sequence[RankProcess], wanted: SetUp, on_lost: Callable[[str], None] | None = None
) -> GroupExecutor:
    """The executor of rank 0, when all ranks are there (blocking, seconds). `wanted`: what all have in common; the rest is
    filled in here. `on_lost`: None: the process ends. Raises `GroupError` and `OSError`."""
    # These import torch, and the others are started before that.
    from services.worker.executor.executor import region_bytes
    from services.worker.ranks.building import join
    from services.worker.ranks.group_executor import GroupExecutor, end_process
    from services.worker.ranks.shared_memory import RankMemory

    num_ranks, folder = 1 + len(others), Path(tempfile.mkdtemp(prefix="tideway-ranks-"))
    shares_pools = wanted.device == "cpu" or wanted.num_window_merged
    of_pools = region_bytes(wanted.num_merged, wanted.merged_bytes, wanted.num_host_merged, wanted.num_window_merged)
    memory = RankMemory.create(num_ranks, of_pools if shares_pools else 0)
    setup = msgspec.structs.replace(
        wanted, num_ranks=num_ranks, folder=str(folder), memory=memory.path, region_bytes=memory.region_bytes
    )
    for other in others:
        other.stream.send(framed(msgspec.structs.replace(setup, rank=other.rank)))
    return GroupExecutor(others, folder, lambda: join(setup, memory), on_lost or end_process)
