from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideway.supervisor import Backoff, Child, Crash, ProcessSpec, Supervisor

QUICK = Backoff(initial_s=0.01, ceiling_s=0.05)


class Record:
    def __init__(self) -> None:
        self.crashes: list[Crash] = []
        self.restarted: list[str] = []

    def on_crash(self, crash: Crash) -> None:
        self.crashes.append(crash)

    def on_restart(self, child: Child) -> None:
        self.restarted.append(child.spec.name)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A process that nobody waits for yet counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shell(name: str, script: str, **options: object) -> ProcessSpec:
    return ProcessSpec(name, ["/bin/sh", "-c", script], **options)  # type: ignore[arg-type]


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def supervisor(tmp_path: Path, record: Record) -> AsyncIterator[Supervisor]:
    tree = Supervisor(tmp_path, record, QUICK)
    yield tree
    tree.kill()
    await tree.stop()


@given(st.integers(1, 10_000))
def test_backoff_grows_to_its_ceiling(num_crashes: int) -> None:
    backoff = Backoff(initial_s=0.5, factor=2.0, ceiling_s=15.0)
    delay_s = backoff.delay_s(num_crashes)
    assert 0.5 <= delay_s <= 15.0
    assert backoff.delay_s(num_crashes + 1) >= delay_s
    assert backoff.delay_s(1) == 0.5 and backoff.delay_s(3) == 2.0


async def test_output_environment_and_directory(supervisor: Supervisor) -> None:
    child = await supervisor.start(
        shell("echo", "echo $GREETING; echo bad >&2; exec sleep 60", environment={"GREETING": "hi"})
    )
    await until(lambda: child.log_tail(5) == ["hi", "bad"])
    assert child.pid is not None and is_alive(child.pid)


async def test_a_crashed_process_is_started_again(supervisor: Supervisor, record: Record) -> None:
    child = await supervisor.start(shell("service", "exec sleep 60"))
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: record.restarted == ["service"])
    assert record.crashes == [Crash("service", -signal.SIGKILL, 1, 0.01)]
    assert record.crashes[0].reason == "SIGKILL"
    assert child.pid not in (None, first) and child.num_starts == 2


async def test_crashes_in_a_row_are_counted(supervisor: Supervisor, record: Record) -> None:
    await supervisor.start(shell("service", "exit 3"))
    await until(lambda: len(record.crashes) >= 4)
    assert [crash.num_crashes for crash in record.crashes[:4]] == [1, 2, 3, 4]
    assert [crash.restart_in_s for crash in record.crashes[:4]] == [0.01, 0.02, 0.04, 0.05]
    assert record.crashes[0].reason == "exit code 3"


async def test_what_a_crashed_process_left_behind_is_ended(supervisor: Supervisor, record: Record) -> None:
    child = await supervisor.start(shell("service", "sleep 60 & echo $!; wait"))
    await until(lambda: len(child.log_tail(1)) == 1)
    orphan, first = int(child.log_tail(1)[0]), child.pid
    assert first is not None and is_alive(orphan)
    os.kill(first, signal.SIGKILL)
    await until(lambda: not is_alive(orphan))


async def test_stopping_goes_by_phases(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    for name, phase in (("bus", 2), ("gateway", 0), ("worker", 1)):
        script = f"trap 'sleep 0.05; echo {name} >> {order}; exit 0' TERM; echo up; while :; do sleep 0.01; done"
        await supervisor.start(shell(name, script, stop_phase=phase))
    await until(lambda: all(child.log_tail(1) == ["up"] for child in supervisor.children.values()))
    assert await supervisor.stop() == []
    assert order.read_text().split() == ["gateway", "worker", "bus"]
    assert all(child.pid is None for child in supervisor.children.values())


async def test_a_process_that_ignores_sigterm_is_killed(supervisor: Supervisor, record: Record) -> None:
    child = await supervisor.start(
        shell("deaf", "trap '' TERM; echo up; while :; do sleep 0.01; done", stop_grace_s=0.1)
    )
    await until(lambda: child.log_tail(1) == ["up"])
    assert await supervisor.stop() == ["deaf"]
    assert child.pid is None and record.crashes == []


async def test_stopping_while_a_crashed_process_waits_for_its_restart(tmp_path: Path, record: Record) -> None:
    tree = Supervisor(tmp_path, record, Backoff(initial_s=60.0, ceiling_s=60.0))
    child = await tree.start(shell("service", "exit 1"))
    await until(lambda: len(record.crashes) == 1)
    assert await asyncio.wait_for(tree.stop(), 2.0) == []
    assert child.num_starts == 1


async def test_a_program_that_does_not_exist(supervisor: Supervisor) -> None:
    with pytest.raises(FileNotFoundError):
        await supervisor.start(ProcessSpec("missing", ["/no/such/program"]))


async def test_a_long_log_is_moved_aside_while_it_is_written(supervisor: Supervisor, tmp_path: Path) -> None:
    child = await supervisor.start(shell("service", "while :; do echo a line of the log; sleep 0.001; done"))
    await until(lambda: child.log_path.stat().st_size > 2000)
    child.cut_log(1000)
    assert child.log_path.with_suffix(".log.1").stat().st_size > 2000
    assert child.log_path.stat().st_size < 2000
    # The process goes on writing at the new end.
    await until(lambda: child.log_tail(1) == ["a line of the log"])
    before = child.log_path.read_bytes()
    assert b"\0" not in before
    child.cut_log(1 << 30)
    assert child.log_path.exists()


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from tideway.supervisor import ProcessSpec, Supervisor
from tests.tideway.test_supervisor import Record
async def main():
    tree = Supervisor(pathlib.Path({str(tmp_path)!r}), Record())
    child = await tree.start(ProcessSpec("child", ["sleep", "60"]))
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: not is_alive(pid)))
    parent.stdout.close()
