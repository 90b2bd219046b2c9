"""Whether the machine was there while a test ran: one that failed as it stood still says nothing about the code.

A shared virtual machine's host may lend its cores to others for seconds; to what runs on them that is a jump of the
clock. Leases run out and timeouts strike that would not have, on whichever side notices first. As a program this file
looks at the clock, from each core, and prints what it missed; it is a process of its own so that nothing that a test does
keeps it from looking. It looks at the processes of the tests as well. Where the kernel reclaims memory, one that maps a
library, or ends, may wait for it for a minute, during which nothing, not even SIGKILL, ends it (state D); and one that is
ready may be given no core for seconds though others are (state R).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOK_INTERVAL_S = 0.02
MIN_AWAY_S = 0.05
MIN_STALL_S = 0.3
"""Longer than a process waits for a core that others of this machine want."""
AFTERMATH_S = 5.0
"""How long after a stall something that was told dead in it may still be missing."""

HELD_INTERVAL_S = 0.2
"""Between two looks at processes."""

HELD = b"held"
MAX_STALLS = 1000
"""Known from before a test."""


class InvariantError(AssertionError):
    """What no stall can explain: a stream that differs, a block that leaked."""


@contextlib.contextmanager
def whatever_the_machine_does() -> Iterator[None]:
    """What is asserted within holds in spite of any stall: a test that finds otherwise does not run again."""
    try:
        yield
    except AssertionError as error:
        raise InvariantError(str(error)) from error


class StallWatch:
    """What the machine took away, and whether that may have broken the test that runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = self._failed_s = 0.0
        self._unread = b""
        self._stalls: list[tuple[int, float, float]] = []
        """Core, when it ended, its seconds."""
        self._held: list[tuple[float, float]] = []
        """Times at which a process was held still, and for how many seconds by then."""

    def test_begins(self) -> None:
        """Starts the process where there is none: a pytest that only collects needs none."""
        self._began_s, self._failed_s = time.monotonic(), 0.0
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it looks
            os.set_blocking(self._process.stdout.fileno(), False)
        self._read()  # a full pipe would keep it from looking
        del self._stalls[:-MAX_STALLS], self._held[:-MAX_STALLS]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def test_failed(self) -> None:
        self._failed_s = self._failed_s or time.monotonic()

    def away_s(self, since_s: float, until_s: float) -> float:
        """How many of these seconds of the monotonic clock the machine was away, however briefly."""
        self._read_after_the_last()
        per_core: dict[int, float] = {}
        for core, end_s, seconds in self._stalls:
            within_s = min(end_s, until_s) - max(end_s - seconds, since_s)
            per_core[core] = per_core.get(core, 0.0) + max(0.0, within_s)
        return max(per_core.values(), default=0.0)

    def broke(self, error: BaseException | None) -> bool:
        """Whether a test that ended with `error` is to run again: the condition of pytest-rerunfailures."""
        if error is None or isinstance(error, InvariantError):
            return False
        self._read_after_the_last()
        since_s, until_s = self._began_s - AFTERMATH_S, self._failed_s or time.monotonic()
        stalls = [(end_s, seconds) for _, end_s, seconds in self._stalls if seconds > MIN_STALL_S]
        is_broken = False
        for what, spans in (("the machine stood still", stalls), ("the kernel held a process", self._held)):
            if within := [s for end_s, s in spans if end_s > since_s and end_s - s < until_s]:
                warnings.warn(f"{what} for {max(within):.1f} s, and this failed: it runs again", stacklevel=2)
                is_broken = True
        return is_broken

    def _read_after_the_last(self) -> None:
        time.sleep(2 * LOOK_INTERVAL_S)  # of a stall that just ended the process has yet to tell
        self._read()

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        self._unread += self._process.stdout.read() or b""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            where, end_s, seconds = line.split()
            if where == HELD:
                self._held.append((float(end_s), float(seconds)))
            else:
                self._stalls.append((int(where), float(end_s), float(seconds)))


watch = StallWatch()


class Stopwatch:
    """`seconds` since the block began, of those in which the machine was there, and less those for which threads of this
    process and of those it started were ready but had no core: limits that a busy machine cannot break. Threads that wait
    side by side are each counted, and a process that ends takes its waits with it."""

    def start(self) -> Stopwatch:
        self._began_s, self._ended_s, self._ended_waits = time.monotonic(), 0.0, dict[str, float]()
        self._began_waits = _waits_s()
        return self

    def __enter__(self) -> Stopwatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._ended_s, self._ended_waits = time.monotonic(), _waits_s()

    @property
    def seconds(self) -> float:
        until_s, waits = self._ended_s or time.monotonic(), self._ended_waits or _waits_s()
        waited_s = sum(seconds - self._began_waits.get(thread, 0.0) for thread, seconds in waits.items())
        return until_s - self._began_s - max(waited_s, watch.away_s(self._began_s, until_s))


def _waits_s() -> Mapping[str, float]:
    """How long each thread of this process and of those it started has been ready without a core so far, as the kernel
    says: the second number of `schedstat`, in ns."""
    waits = {}
    for pid in _family(os.getpid()):
        with contextlib.suppress(OSError):  # the process has ended
            for file in list(Path(f"/proc/{pid}/task").glob("*/schedstat")):
                with contextlib.suppress(OSError):  # the thread has
                    waits[str(file)] = int(file.read_text().split()[1]) / 1e9
    return waits


def _family(root: int, strangers: set[int] | None = None) -> set[int]:
    """A process and those it started, themselves or through others; but not the one that looks at the clock. `strangers`
    are others, known from the look before: those are not read again."""
    others = set() if strangers is None else strangers
    present = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    others &= present
    parents = {}
    for pid in present - others:
        with contextlib.suppress(OSError):  # it has ended
            parents[pid] = int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    family, before = {root}, 0
    while len(family) > before:
        before = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family and pid != watch.pid}
    others |= parents.keys() - family
    return family


def _read(path: str) -> bytes:
    """A file of the kernel's, at a tenth of what pathlib takes for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _look(core: int) -> None:
    os.sched_setaffinity(0, {core})  # of this thread alone
    before_s = time.monotonic()
    while True:
        time.sleep(LOOK_INTERVAL_S)
        now_s = time.monotonic()
        away_s = now_s - before_s - LOOK_INTERVAL_S
        if away_s > MIN_AWAY_S:
            os.write(1, b"%d %f %f\n" % (core, now_s, away_s))
        before_s = now_s


def _look_at_processes(root: int) -> None:
    held: dict[int, tuple[bytes, float]] = {}
    strangers = set[int]()
    while True:
        time.sleep(HELD_INTERVAL_S)
        now_s, found = time.monotonic(), dict[int, tuple[bytes, float]]()
        for pid in _family(root, strangers):
            with contextlib.suppress(OSError):  # it has ended
                if _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] not in (b"D", b"R"):
                    continue
                used = _read(f"/proc/{pid}/schedstat").split()[0]  # time on a core, in ns
                before, since_s = held.get(pid, (used, now_s))
                found[pid] = used, since_s if before == used else now_s
                if now_s - found[pid][1] > MIN_STALL_S:
                    os.write(1, b"%b %f %f\n" % (HELD, now_s, now_s - found[pid][1]))
        held = found


if __name__ == "__main__":
    os.write(1, b"looking\n")
    for one in sorted(os.sched_getaffinity(0)):
        threading.Thread(target=_look, args=(one,), daemon=True).start()
    threading.Thread(target=_look_at_processes, args=(os.getppid(),), daemon=True).start()
    sys.stdin.buffer.read()  # until whoever started this is gone
