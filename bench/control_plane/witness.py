"""How long this machine keeps a process waiting that does nothing but sleep: what no program on it is to blame for.

    python -m bench.control_plane.witness CORE SECONDS

Prints the 99th percentile and the maximum of its lateness, in milliseconds. On a shared machine (or a virtual one whose
cores are lent elsewhere) it is late by up to a second, and so is everything that is measured by the wall clock.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

SLEEP_S = 0.005


def main(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    late_ms: list[float] = []
    until_s = time.monotonic() + seconds
    while (slept_s := time.monotonic()) < until_s:
        time.sleep(SLEEP_S)
        late_ms.append(1000 * (time.monotonic() - slept_s - SLEEP_S))
    print(np.percentile(late_ms, 99), max(late_ms))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
