"""Tests of the tests: one runs again where the machine stood still, and nowhere else."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.stalls import MIN_STALL_S, InvariantError, StallWatch, Stopwatch, watch

REPOSITORY = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests import stalls
from tests.conftest import (
    pytest_collection_modifyitems, pytest_exception_interact, pytest_handlecrashitem, pytest_runtest_setup
)

stalls.AFTERMATH_S = 0.05
"""
TESTS = """
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.stalls import Stopwatch, watch, whatever_the_machine_does

def attempts(name):
    with Path(name).open("a") as file:
        file.write("x")
    return len(Path(name).read_text())

def stand_still():
    all_of_it = f"{os.getpid()} {watch._process.pid}"
    subprocess.run(["sh", "-c", f"kill -STOP {all_of_it}; sleep 0.6; kill -CONT {all_of_it}"], check=True)

@pytest.fixture(scope="module")
def shared():
    yield []
    attempts("torn_down")

def test_fails_before_the_stall():
    attempts("before")
    raise AssertionError("of before")

@pytest.fixture(autouse=True)
def after(request):
    yield
    if request.node.name == "test_fails_before_the_stall":
        stand_still()

def test_sound():
    attempts("sound")
    with Stopwatch() as stopwatch:
        stand_still()
        time.sleep(0.2)
        assert 0.1 < stopwatch.seconds < 0.7
    assert stopwatch.seconds < 0.7

def test_broken_by_a_stall(shared):
    number = attempts("stall")
    assert shared == []
    shared.append(number)
    if number == 1:
        stand_still()
    assert number == 2

def test_never_sound():
    attempts("never")
    stand_still()
    raise AssertionError("of never")

def test_invariant():
    attempts("invariant")
    stand_still()
    with whatever_the_machine_does():
        assert "one stream" == "another"

@pytest.mark.timeout(2)
def test_hangs_when_it_runs_again():
    number = attempts("hangs")
    if number == 1:
        stand_still()
        raise AssertionError
    time.sleep(40)

def test_dies():
    attempts("dies")
    os._exit(1)
"""
WRONG = """
import subprocess
from pathlib import Path

def test_wrong():
    with Path("wrong").open("a") as file:
        file.write("x")
    raise AssertionError("no stall")
"""


def run_pytest(folder: Path, tests: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    options = "-q -n 1 -p no:cacheprovider -rfER --rerun-show-tracebacks --rootdir . ."
    command = [sys.executable, "-m", "pytest", *options.split()]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_what_a_stall_broke_runs_again_and_says_so(tmp_path: Path) -> None:
    began_s = time.monotonic()
    output = run_pytest(tmp_path, TESTS)
    expected = {"sound": 1, "stall": 2, "never": 4, "invariant": 1, "before": 1, "hangs": 2, "dies": 1, "torn_down": 1}
    counts = {name: len((tmp_path / name).read_text()) for name in expected}
    if watch.away_s(began_s, time.monotonic()) > MIN_STALL_S:  # it really stood still: more may have run again
        assert all(count >= expected[name] for name, count in counts.items()), output
    else:
        assert counts == expected and "5 rerun" in output, output
    assert "5 failed, 2 passed" in output, output
    assert "the machine stood still for" in output and output.count("AssertionError: of never") >= 4, output


def test_what_fails_while_the_machine_runs_fails_once(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, WRONG)
    assert (tmp_path / "wrong").read_text() == "x" and "1 failed" in output and "rerun" not in output, output


def test_work_of_this_process_is_no_stall() -> None:
    began_s = time.monotonic()
    data = bytes(300_000_000)
    data.find(b"x" * 2)  # holds the interpreter's lock for as long as it takes
    compute = threading.Thread(target=lambda: sum(number * number for number in range(3_000_000)))
    compute.start()
    compute.join()
    ctypes.PyDLL(None).usleep(600_000)  # so does this, without working
    assert watch.away_s(began_s, time.monotonic()) < 0.5


def test_a_stopwatch_does_not_count_waits_for_a_core(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    program = tmp_path / "busy.py"
    program.write_text(
        f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(os.getpid(), flush=True)\nwhile True:\n    pass\n"
    )
    # The child of a shell that ends is no process of this test's.
    shell = subprocess.Popen(["sh", "-c", f"{sys.executable} {program} &"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.wait()
    try:
        os.sched_setaffinity(0, {core})
        began_s, until_s = time.monotonic(), time.thread_time() + 0.5
        with Stopwatch() as stopwatch:
            while time.thread_time() < until_s:
                pass
        passed_s = time.monotonic() - began_s
    finally:
        os.kill(pid, signal.SIGKILL)
        os.sched_setaffinity(0, cores)
        shell.stdout.close()
    assert stopwatch.seconds < passed_s - 0.1


HELD = """
import ctypes, os, time
if ctypes.CDLL(None).vfork() == 0:  # its parent is held until it ends
    time.sleep(3.0)
    os.kill(os.getppid(), 9)
os._exit(0)
"""


def test_what_failed_while_the_kernel_held_a_process_runs_again() -> None:
    own = StallWatch()
    own.test_begins()
    assert not own.broke(AssertionError())
    subprocess.run([sys.executable, "-c", HELD], check=False, timeout=30)
    own.test_failed()
    with pytest.warns(UserWarning, match=r"the kernel held a process for [123]\.\d s"):
        assert own.broke(AssertionError())
    assert not own.broke(InvariantError()), "that explains no stream that differs"
