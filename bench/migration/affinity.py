"""Which threads run on which core.

On a machine of a few cores the copies of a migration and the steps of the instances would otherwise share them as the kernel
likes, and what is measured is that. The engine's thread (the one that computes) of both instances gets one core; everything
else (event loops, transport, NATS, this process) the other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def _cpu_ticks(pid: int) -> dict[int, int]:
    """Processor time of each thread of a process, in clock ticks."""
    ticks = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


class Affinity:
    """`is_on` False, or only one core: nothing is pinned."""

    def __init__(self, is_on: bool = True) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.is_on = is_on and len(self.cores) > 1
        self.compute = {self.cores[0]}
        self.services = set(self.cores[1:2])

    def pin_service(self, pid: int) -> None:
        """All threads that the process has and will start."""
        if self.is_on:
            for thread in _cpu_ticks(pid):
                os.sched_setaffinity(thread, self.services)

    def pin_busiest(self, pid: int, window_s: float = 1.0) -> int:
        """The thread of the process that computes right now goes to the cores of computing. Returns its id."""
        before = _cpu_ticks(pid)
        time.sleep(window_s)
        after = _cpu_ticks(pid)
        busiest = max(after, key=lambda thread: after[thread] - before.get(thread, 0))
        if self.is_on:
            os.sched_setaffinity(busiest, self.compute)
        return busiest

    def release(self, pid: int) -> None:
        """The opposite of `pin_service`; processes inherit what their parent has."""
        for thread in _cpu_ticks(pid):
            os.sched_setaffinity(thread, self.cores)

    def describe(self) -> str:
        if not self.is_on:
            return "nothing pinned"
        return f"engine threads on core {sorted(self.compute)}, everything else on {sorted(self.services)}"
