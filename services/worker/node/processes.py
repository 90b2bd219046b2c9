"""Instances as processes of this machine: start, output, signals, exit.

Each is the leader of a session and process group of its own, so that a signal reaches what it started and a Ctrl-C in a
terminal reaches only the agent. The kernel kills it when the agent dies, however that happens (PR_SET_PDEATHSIG).

Processes are started with plain `subprocess` and without `preexec_fn`, and watched by threads: asyncio's (with it) and
uvloop's (always) run Python's at-fork handlers in the child, and those of OpenTelemetry's SDK deadlock there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import BinaryIO

from services.worker import black_box
from shared.runtime.tasks import set_within

logger = logging.getLogger(__name__)

STOP_MARGIN_S = 7.0
"""What an instance takes to end that has given its requests away, or has none."""
KILL_TIMEOUT_S = 5.0
"""Time from SIGKILL to giving up (a process in an uninterruptible wait)."""
BLACK_BOX = "TIDEWAY_BLACK_BOX"
"""Environment variable of an instance: `InstanceSettings.black_box`."""
MAX_LINE_BYTES = 16 * 1024
MAX_QUEUED_LINES = 4096
"""Lines of output that wait for a slow reader of the agent's own output; beyond it they are dropped and counted."""
LAST_OUTPUT_TIMEOUT_S = 1.0
"""Time for output after the exit; a descendant may hold the pipe open for ever."""

_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks the kernel for SIGKILL at the parent's death (1 is PR_SET_PDEATHSIG; it outlives exec), then becomes the command
unless the parent has died before."""


def dies_with_parent(command: Sequence[str]) -> list[str]:
    """The command that becomes `command`, in a child of this process that the kernel kills when the thread that starts it
    ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


class LineWriter:
    """Writes lines to a stream from a thread of its own: a reader that does not read stops nobody."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_LINES)
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="instance output", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Puts a line, from any thread; never waits."""
        with self._lock, contextlib.suppress(queue.Full):
            self._num_dropped += 1  # until it is queued
            if self._num_dropped > 1:
                self._lines.put_nowait(b"(%d lines of output were dropped)\n" % (self._num_dropped - 1))
                self._num_dropped = 1
            self._lines.put_nowait(line)
            self._num_dropped = 0

    def close(self, timeout_s: float) -> None:
        """Writes what is left, for `timeout_s` at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                return  # our own output is closed: nobody is there to be told


class InstanceProcess:
    """A started process; made by `Processes.start`."""

    def __init__(self, popen: subprocess.Popen[bytes], box: int) -> None:
        """`box`: descriptor of its black box, closed at its exit."""
        self._popen = popen
        self._box = box
        self.suspects: tuple[str, ...] = ()
        """Known at its exit: requests that it was computing and had made no token of."""
        self.pid: int = popen.pid
        self.last_line = ""
        """Last line of its output: for an instance that ends by itself, often the reason."""
        self.incarnation = ""
        """Incarnation as it registered; empty before."""

    def exit_reason(self, exit_code: int) -> str:
        """Completes "the instance ..."."""
        if exit_code < 0:
            return f"was killed by {signal.Signals(-exit_code).name}"
        said = f": {self.last_line[:300]}" if self.last_line and exit_code else ""
        return f"exited with code {exit_code}{said}"

    def ended(self) -> None:
        """The process was waited for."""
        self.suspects = black_box.read(self._box)
        os.close(self._box)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole process group; no effect once the process was waited for."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Processes:
    """The instances' processes of one agent, by instance id.

    `command`: argument vector of an instance. `on_exit(instance_id, process, exit_code)` is called on the event loop when
    the process has ended and its output was read; `exit_code` is negative for a signal. Each line of output is passed on
    with the instance's id before it, or in it if lines are objects (`log_format` json).
    """

    def __init__(
        self,
        command: Sequence[str],
        on_exit: Callable[[str, InstanceProcess, int], None],
        output: BinaryIO | None = None,
        log_format: str = "text",
    ) -> None:
        self._label = _label_object if log_format == "json" else _label_text
        self._command = list(command)
        self._on_exit = on_exit
        self._writer = LineWriter(output or sys.stderr.buffer)
        self._running: dict[str, InstanceProcess] = {}
        self._all_ended = asyncio.Event()
        self._num_hurries = 0

    def get(self, instance_id: str) -> InstanceProcess | None:
        return self._running.get(instance_id)

    def start(self, instance_id: str, environment: Mapping[str, str]) -> InstanceProcess:
        """`OSError` or `SubprocessError` if the process cannot be started. Call it on the event loop's thread, as the
        kernel ties the process to the life of the thread; it takes milliseconds."""
        assert instance_id not in self._running
        box = black_box.make()
        try:
            popen = subprocess.Popen(
                dies_with_parent(self._command),
                env={**environment, BLACK_BOX: str(box)},
                pass_fds=(box,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(box)
            raise
        process = InstanceProcess(popen, box)
        self._running[instance_id] = process
        self._all_ended.clear()
        watch = (asyncio.get_running_loop(), instance_id, process, popen)
        threading.Thread(target=self._watch, args=watch, name=f"watch {instance_id}", daemon=True).start()
        return process

    async def stop(self, grace_s: float = 0.0) -> None:
        """SIGTERM to all, SIGKILL after `grace_s` and STOP_MARGIN_S; returns when they have ended."""
        for number, timeout_s in ((signal.SIGTERM, grace_s + STOP_MARGIN_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
            for process in self._running.values():
                process.signal(number)
            if self._running:
                await set_within(self._all_ended, timeout_s)
            for instance_id in self._running:
                logger.warning("%s has not ended within %.0f s of %s", instance_id, timeout_s, number.name)
        await asyncio.to_thread(self._writer.close, 1.0)

    def hurry(self) -> None:
        """While `stop` waits: SIGTERM once more, at which an instance gives up its requests; then SIGKILL."""
        self._num_hurries += 1
        for process in self._running.values():
            process.signal(signal.SIGTERM if self._num_hurries == 1 else signal.SIGKILL)

    def _ended(self, instance_id: str, process: InstanceProcess, exit_code: int) -> None:
        del self._running[instance_id]
        if not self._running:
            self._all_ended.set()
        process.ended()
        self._on_exit(instance_id, process, exit_code)

    # ----------------------------------------------------------------------------- in threads of their own

    def _watch(
        self,
        loop: asyncio.AbstractEventLoop,
        instance_id: str,
        process: InstanceProcess,
        popen: subprocess.Popen[bytes],
    ) -> None:
        reader = threading.Thread(
            target=self._pass_on, args=(instance_id, process, popen), name=f"output of {instance_id}", daemon=True
        )
        reader.start()
        exit_code = popen.wait()
        # What the instance started and left behind; it still holds the group's id.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(LAST_OUTPUT_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent gave up waiting
            loop.call_soon_threadsafe(self._ended, instance_id, process, exit_code)

    def _pass_on(self, instance_id: str, process: InstanceProcess, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                labelled, said = self._label(instance_id, line.decode(errors="replace").rstrip("\n"))
                self._writer.put(labelled.encode() + b"\n")
                if said.strip():
                    process.last_line = said.strip()


def _label_text(instance_id: str, line: str) -> tuple[str, str]:
    return f"[{instance_id}] {line}", line


def _label_object(instance_id: str, line: str) -> tuple[str, str]:
    """(object of the line, what it says). A line that is no object, say a library's, becomes the message of one."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            "level": "INFO",
            "message": line,
        }
    said = str(fields.get("exception") or fields.get("message") or "")
    return json.dumps({"instance": instance_id, **fields}), said.rpartition("\n")[2]
