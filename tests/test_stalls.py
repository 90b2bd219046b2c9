"""Tests of the tests: one runs again where the machine stood still, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.stalls import StallWatch

REPOSITORY = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests import stalls
from tests.conftest import pytest_collection_modifyitems, pytest_handlecrashitem, pytest_runtest_setup

stalls.AFTERMATH_S = 0.05
"""
TESTS = """
import os
import subprocess
import time
from pathlib import Path

def attempts(name):
    with Path(name).open("a") as file:
        file.write("x")
    return len(Path(name).read_text())

def stand_still():
    subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"], check=True)

def test_sound():
    attempts("sound")
    stand_still()

def test_broken_by_a_stall():
    number = attempts("stall")
    if number == 1:
        stand_still()
    assert number == 2

def test_never_sound():
    attempts("never")
    stand_still()
    raise AssertionError("whatever the machine does")

def test_dies():
    attempts("dies")
    os._exit(1)
"""
WRONG = """
from pathlib import Path

def test_wrong():
    with Path("wrong").open("a") as file:
        file.write("x")
    raise AssertionError("no stall")
"""


def run_pytest(folder: Path, tests: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "-p",
        "no:cacheprovider",
        "-rfER",
        "--rootdir",
        ".",
        ".",
    ]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_what_a_stall_broke_runs_again_and_says_so(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, TESTS)
    runs = {name: len((tmp_path / name).read_text()) for name in ("sound", "stall", "never", "dies")}
    assert runs == {"sound": 1, "stall": 2, "never": 4, "dies": 1}, output
    assert "2 failed, 2 passed" in output and "4 rerun" in output and "the machine stood still for" in output, output


def test_what_fails_while_the_machine_runs_fails_once(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, WRONG)
    assert (tmp_path / "wrong").read_text() == "x" and "1 failed" in output and "rerun" not in output, output


def test_work_of_this_process_is_no_stall() -> None:
    watch = StallWatch()
    watch.test_begins()
    data = bytes(300_000_000)
    data.find(b"x" * 2)  # holds the interpreter's lock for as long as it takes
    compute = threading.Thread(target=lambda: sum(number * number for number in range(3_000_000)))
    compute.start()
    compute.join()
    time.sleep(0.1)
    watch.stop()
    assert watch.stalled_s == 0 and not watch.broke(AssertionError())
