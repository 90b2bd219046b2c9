"""What the interpreter's lock costs an engine beside a busy event loop, against an engine in a process of its own.

    python -m bench.interpreter_lock [--steps 300] [--rounds 3]

The engine's thread is real, the device is not: a step ends so long after it was launched, or after the one before it, and
waiting for it sleeps, without the lock, as waiting for a device does. Between two waits the thread runs Python for as long
as plan, launch and apply of a batch do. Beside it another thread, or another process, runs Python for a share of the time,
in callbacks of an event loop's length. Both kinds alternate; `sys.setswitchinterval` is that of instances. The figure is how
much longer a step takes than one without anything beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path

from bench.reporting import machine, table_of, write

DEVICE_S = (0.0015, 0.004, 0.010)
HOST_S = 0.0006
SWITCH_INTERVAL_S = 0.001
CALLBACK_S = 0.0002
RUN_STEPS = 8
LOADS = (0.3, 0.95)
"""Share of a core that the event loop takes."""


def spin(num_loops: int) -> None:
    for _ in range(num_loops):
        pass


def loops_per_s() -> float:
    times = []
    for _ in range(9):
        started_s = time.perf_counter()
        spin(100_000)
        times.append(time.perf_counter() - started_s)
    return 100_000 / min(times)


def loop(load: float, num_loops: int, stop: threading.Event | ProcessEvent) -> None:
    """Behaves like an event loop: a callback, and a look at its sockets, which passes the lock on for a moment."""
    pause_s = CALLBACK_S * (1 - load) / load
    while not stop.is_set():
        spin(num_loops)
        time.sleep(pause_s)


@contextmanager
def beside(kind: str, load: float, num_loops: int) -> Iterator[None]:
    """A loop in a `thread` or a `process`; `nothing`: none."""
    if kind == "nothing":
        yield
        return
    context = multiprocessing.get_context("spawn")
    stop = threading.Event() if kind == "thread" else context.Event()
    arguments = (load, num_loops, stop)
    runner = (threading.Thread if kind == "thread" else context.Process)(target=loop, args=arguments, daemon=True)
    runner.start()
    time.sleep(0.3 if kind == "process" else 0.01)
    try:
        yield
    finally:
        stop.set()
        runner.join()


def step_s(device_s: float, in_flight: int, num_steps: int, num_loops: int) -> float:
    """Lower quartile of runs of `RUN_STEPS`: whatever else the machine does only ever makes one longer."""
    ends: deque[float] = deque()
    launched: list[float] = []
    last_s = 0.0
    for _ in range(num_steps):
        if len(ends) == in_flight:
            time.sleep(max(0.0, ends.popleft() - time.perf_counter()))
        spin(num_loops)
        launched.append(time.perf_counter())
        last_s = max(last_s, launched[-1]) + device_s
        ends.append(last_s)
    runs = [(later - earlier) / RUN_STEPS for earlier, later in pairwise(launched[in_flight::RUN_STEPS])]
    return statistics.quantiles(runs, n=4)[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.interpreter_lock", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rate = loops_per_s()
    host, callback = int(HOST_S * rate), int(CALLBACK_S * rate)
    rows = []
    for device_s in DEVICE_S:
        for in_flight in (1, 2):
            for load in LOADS:
                found: dict[str, list[float]] = {"nothing": [], "thread": [], "process": []}
                for number in range(options.rounds):
                    kinds = list(found) if number % 2 == 0 else list(found)[::-1]
                    for kind in kinds:
                        with beside(kind, load, callback):
                            found[kind].append(step_s(device_s, in_flight, options.steps, host))
                alone, thread, process = (statistics.median(times) for times in found.values())
                rows.append({
                    "device ms": 1e3 * device_s, "in flight": in_flight, "loop's load": load, "alone ms": 1e3 * alone,
                    "thread beside it, %": 100 * (thread / alone - 1), "process, %": 100 * (process / alone - 1),
                })  # fmt: skip
    date = time.strftime("%Y-%m-%d")
    text = "\n".join([f"# The interpreter's lock, {date}", "", str(machine()), "", *table_of(rows)])
    print(text)
    write(options.output, f"interpreter-lock-{date}", {"date": date, "machine": machine(), "rows": rows}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
