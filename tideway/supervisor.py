"""A tree of child processes: started together, restarted when they crash, stopped in order, gone when this process is.

Owns processes and their log files. Knows nothing of what the processes do; whoever builds the specs does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

LOG_BYTES = 16 * 1024 * 1024
"""A log file that has grown beyond this becomes <name>.log.1, in place of the one before."""
LOG_CHECK_INTERVAL_S = 5.0
KILL_WAIT_S = 2.0
TAIL_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    """Also the name of its log file."""
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    stop_phase: int = 0
    """Processes of a lower phase are stopped, and waited for, before those of a higher one get the signal."""
    stop_grace_s: float = 10.0
    """Time from SIGTERM to SIGKILL."""


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a crashed process is started again."""

    initial_s: float = 0.5
    factor: float = 2.0
    ceiling_s: float = 15.0
    steady_s: float = 30.0
    """A process that ran for so long counts as sound: its next crash is its first."""

    def delay_s(self, num_crashes: int) -> float:
        """After the `num_crashes`-th crash in a row, counted from 1."""
        # The exponent is bounded because a float overflows after some thousand crashes.
        return min(self.ceiling_s, self.initial_s * self.factor ** min(num_crashes - 1, 32))


@dataclass(frozen=True)
class Crash:
    """A process ended that nobody had asked to."""

    name: str
    exit_code: int
    """Negative: the signal that ended it."""
    num_crashes: int
    """In a row, this one included."""
    restart_in_s: float
    fault: str = ""
    """Why it was killed here."""

    @property
    def reason(self) -> str:
        if self.fault:
            return self.fault
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


def log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s failed", task.get_name(), exc_info=task.exception())


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """What a child runs before its program: the kernel kills it when the supervisor dies, however that comes."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def set_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent died before the line above

    return set_death_signal


class Watcher(Protocol):
    """Told what happens in the tree, on the event loop; must not block."""

    def on_crash(self, crash: Crash) -> None: ...

    def on_restart(self, child: Child) -> None:
        """It was started again after a crash."""


class Child:
    """One process of the tree over all its lives."""

    def __init__(self, spec: ProcessSpec, log_path: Path, backoff: Backoff, watcher: Watcher) -> None:
        self.spec = spec
        self.log_path = log_path
        self.num_starts = 0
        self._backoff = backoff
        self._watcher = watcher
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._fault = ""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None between a crash and the next start."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Raises OSError if the program cannot be run at all."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")
        self._keeper.add_done_callback(log_failure)

    async def _spawn(self) -> None:
        # Appending, so that the file can be cut off at its head while the process holds it open.
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env={**os.environ, **self.spec.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal is for the supervisor alone, which stops its children in order.
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.num_starts += 1

    async def _keep(self) -> None:
        num_crashes = 0
        while True:
            started_s = time.monotonic()
            assert self._process is not None
            exit_code = await self._process.wait()
            if self._is_stopping:
                return
            num_crashes = 1 if time.monotonic() - started_s >= self._backoff.steady_s else num_crashes + 1
            self._kill_group()
            delay_s = self._backoff.delay_s(num_crashes)
            fault, self._fault = self._fault, ""
            self._watcher.on_crash(Crash(self.spec.name, exit_code, num_crashes, delay_s, fault))
            while True:
                await asyncio.sleep(delay_s)
                try:
                    await self._spawn()
                    break
                except OSError:
                    logger.exception("%s cannot be started", self.spec.name)
            self._watcher.on_restart(self)

    def _kill_group(self) -> None:
        """Ends what the process left behind in its session."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # nothing was left
                os.killpg(self._process.pid, signal.SIGKILL)

    def give_up(self, fault: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it as it is of no more use; it is started again. `fault`: why, for those who are told."""
        if (pid := self.pid) is not None and not self._is_stopping:
            self._fault = fault
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after `grace_s`. Returns whether it ended by itself. May be called twice."""
        self._is_stopping = True
        process = self._process
        in_time = True
        if process is not None and process.returncode is None:
            try:
                process.terminate()
                await asyncio.wait_for(process.wait(), grace_s)
            except ProcessLookupError:
                pass
            except TimeoutError:
                in_time = False
                self._kill_group()
                await asyncio.wait_for(process.wait(), KILL_WAIT_S)
        self._kill_group()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        return in_time

    def kill(self) -> None:
        self._is_stopping = True
        self._kill_group()

    def cut_log(self, max_bytes: int) -> None:
        """Moves the log aside if it is longer than `max_bytes`; lines written at that very moment may be lost."""
        if self.log_path.exists() and self.log_path.stat().st_size > max_bytes:
            shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
            os.truncate(self.log_path, 0)

    def log_tail(self, num_lines: int) -> list[str]:
        if not self.log_path.exists():
            return []
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]


class Supervisor:
    """The tree."""

    def __init__(self, log_dir: Path, watcher: Watcher, backoff: Backoff | None = None) -> None:
        self.children: dict[str, Child] = {}
        self._log_dir = log_dir
        self._watcher = watcher
        self._backoff = backoff or Backoff()
        self._log_keeper: asyncio.Task[None] | None = None

    async def start(self, spec: ProcessSpec) -> Child:
        """Raises OSError if the program cannot be run at all."""
        assert spec.name not in self.children, spec.name
        child = Child(spec, self._log_dir / f"{spec.name}.log", self._backoff, self._watcher)
        child.cut_log(LOG_BYTES)
        self.children[spec.name] = child
        await child.start()
        if self._log_keeper is None:
            self._log_keeper = asyncio.create_task(self._cut_logs(), name="cut logs")
            self._log_keeper.add_done_callback(log_failure)
        return child

    async def _cut_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_INTERVAL_S)
            for child in self.children.values():
                try:
                    await asyncio.to_thread(child.cut_log, LOG_BYTES)
                except OSError:
                    logger.exception("the log %s cannot be cut", child.log_path)

    async def stop(self) -> list[str]:
        """Stops all, phase by phase, in at most the sum of the phases' longest graces (and `KILL_WAIT_S` each).

        Returns the names of those that had to be killed.
        """
        if self._log_keeper is not None:
            self._log_keeper.cancel()
        killed = []
        for phase in sorted({child.spec.stop_phase for child in self.children.values()}):
            group = [child for child in self.children.values() if child.spec.stop_phase == phase]
            ended = await asyncio.gather(*(child.stop(child.spec.stop_grace_s) for child in group))
            killed += [child.spec.name for child, in_time in zip(group, ended, strict=True) if not in_time]
        return killed

    def kill(self) -> None:
        """Ends all at once, in no order."""
        for child in self.children.values():
            child.kill()
