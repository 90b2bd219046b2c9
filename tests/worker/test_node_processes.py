"""Processes of the node agent: output, signals, exits; with small programs in place of instances."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from services.worker.node import processes as module
from services.worker.node.processes import InstanceProcess, LineWriter, Processes
from tests.stalls import Stopwatch


class Exits:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __call__(self, instance_id: str, process: InstanceProcess, exit_code: int) -> None:
        self.seen[instance_id] = exit_code
        self._changed.set()

    async def of(self, instance_id: str) -> int:
        async with asyncio.timeout(15.0):
            while instance_id not in self.seen:
                self._changed.clear()
                await self._changed.wait()
        return self.seen[instance_id]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def until(condition: Callable[[], Any]) -> Any:
    """The first truthy result; polls."""
    async with asyncio.timeout(15.0):
        while not (result := condition()):
            await asyncio.sleep(0.005)
    return result


def line_of(path: Path) -> str:
    """Empty until a whole line was written."""
    text = path.read_text() if path.exists() else ""
    return text if text.endswith("\n") else ""


def is_gone(pid: int) -> bool:
    """Or a zombie that nobody has waited for."""
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_output_is_passed_on_by_line_with_the_instance_in_front() -> None:
    output, exits = io.BytesIO(), Exits()
    program = "import sys; print('one'); print('two', file=sys.stderr, flush=True); print('x' * 40000); sys.exit(7)"
    processes = Processes(python(program), exits, output)
    process = processes.start("n-0", {**os.environ, "PYTHONUNBUFFERED": "1"})
    assert processes.get("n-0") is process
    assert await exits.of("n-0") == 7
    assert processes.get("n-0") is None
    await processes.stop()
    lines = output.getvalue().decode().splitlines()
    assert lines[:2] == ["[n-0] one", "[n-0] two"]
    assert [len(line) - len("[n-0] ") for line in lines[2:]] == [16384, 16384, 40000 - 2 * 16384]
    assert set(process.last_line) == {"x"}


async def test_where_logs_are_objects_every_line_of_output_is_one() -> None:
    output, exits = io.BytesIO(), Exits()
    records = ['{"level": "ERROR", "message": "failed", "exception": "Traceback\\nValueError: x"}', "a library's line"]
    processes = Processes([*python("import sys; print(sys.argv[1])"), "\n".join(records[::-1])], exits, output, "json")
    process = processes.start("n-0", os.environ)
    await exits.of("n-0")
    await processes.stop()
    plain, record = map(json.loads, output.getvalue().splitlines())
    assert record == {"instance": "n-0", **json.loads(records[0])} and process.last_line == "ValueError: x"
    assert plain["message"] == records[1] and plain["instance"] == "n-0" and plain["level"] == "INFO"
    assert datetime.fromisoformat(plain["time"]).tzinfo is not None


async def test_the_environment_is_the_one_given() -> None:
    output, exits = io.BytesIO(), Exits()
    processes = Processes(python("import os; print(os.environ['TIDEWAY_X'], 'HOME' in os.environ)"), exits, output)
    processes.start("n-0", {"TIDEWAY_X": "42"})
    await exits.of("n-0")
    await processes.stop()
    assert output.getvalue() == b"[n-0] 42 False\n"


async def test_stop_kills_what_ignores_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "STOP_MARGIN_S", 0.2)
    exits = Exits()
    program = (
        "import os, signal, sys, time\n"
        "if os.environ['STUBBORN'] == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['FILE'], 'w').write('ready\\n'); time.sleep(60)"
    )
    processes = Processes(python(program), exits, io.BytesIO())
    for name, stubborn in (("n-0", "0"), ("n-1", "1")):
        processes.start(name, {"STUBBORN": stubborn, "FILE": str(tmp_path / name)})
        await until(lambda name=name: line_of(tmp_path / name))  # type: ignore[misc]
    await processes.stop(0.1)
    assert exits.seen == {"n-0": -signal.SIGTERM, "n-1": -signal.SIGKILL}


async def test_the_grace_is_used_only_as_far_as_needed_and_can_be_cut_short(tmp_path: Path) -> None:
    exits = Exits()
    program = (
        "import os, signal, sys, threading, time\n"
        "terms, needed = [], int(os.environ['TERMS'])\n"
        "def on_term(*_):\n"
        "    terms.append(1)\n"
        "    open(os.environ['FILE'], 'w').write(f'{len(terms)}\\n')\n"
        "    if len(terms) == needed: sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, on_term)\n"
        "open(os.environ['FILE'], 'w').write('ready\\n')\n"
        "while True: time.sleep(60)"
    )
    processes = Processes(python(program), exits, io.BytesIO())
    for name, terms in (("n-1", "1"), ("n-2", "2"), ("n-9", "9")):
        processes.start(name, {"TERMS": terms, "FILE": str(tmp_path / name)})
        await until(lambda name=name: line_of(tmp_path / name))  # type: ignore[misc]
    with Stopwatch() as watch:
        stopping = asyncio.create_task(processes.stop(60.0))
        assert await exits.of("n-1") == 5
        await until(lambda: line_of(tmp_path / "n-2") == line_of(tmp_path / "n-9") == "1\n")
        assert not stopping.done()
        processes.hurry()
        assert await exits.of("n-2") == 5
        assert not stopping.done()
        processes.hurry()
        await stopping
    assert exits.seen == {"n-1": 5, "n-2": 5, "n-9": -signal.SIGKILL}
    assert watch.seconds < 10.0


async def test_what_an_instance_started_ends_with_it(tmp_path: Path) -> None:
    file, exits = tmp_path / "pid", Exits()
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(file)!r}, 'w').write(f'{{child.pid}}\\n'); time.sleep(60)"
    )
    processes = Processes(python(program), exits, io.BytesIO())
    process = processes.start("n-0", os.environ)
    child = int(await until(lambda: line_of(file)))
    os.kill(process.pid, signal.SIGKILL)
    assert await exits.of("n-0") == -signal.SIGKILL
    await until(lambda: is_gone(child))
    await processes.stop()


async def test_a_command_that_does_not_exist_ends_at_once() -> None:
    output, exits = io.BytesIO(), Exits()
    processes = Processes(["/no/such/program"], exits, output)
    process = processes.start("n-0", os.environ)
    assert await exits.of("n-0") == 1
    assert "No such file" in process.last_line
    await processes.stop()


def test_a_reader_that_does_not_read_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_LINES", 10)
    may_write, written = threading.Event(), []

    class Slow(io.BytesIO):
        def write(self, line: bytes) -> int:  # type: ignore[override]
            may_write.wait(10.0)
            written.append(line)
            return len(line)

    writer = LineWriter(Slow())
    with Stopwatch() as watch:
        for n in range(1000):
            writer.put(b"%d\n" % n)
    assert watch.seconds < 1.0
    may_write.set()
    while len(written) < 10:
        time.sleep(0.001)
    writer.put(b"last\n")
    writer.close(5.0)
    assert written[:3] == [b"0\n", b"1\n", b"2\n"]
    assert written[-1] == b"last\n"
    assert any(b"lines of output were dropped" in line for line in written)
