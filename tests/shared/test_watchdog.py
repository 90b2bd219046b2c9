"""A process whose event loop stands still ends by itself; one that is merely stopped for a while does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.runtime.watchdog import STUCK_EXIT_CODE

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys, time
from shared.runtime.service import run_service
from shared.runtime.settings import BusSettings

async def stuck(stop):
    await asyncio.sleep(0)
    print("ready", flush=True)
    time.sleep(60)

async def held(stop):
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    sum(range(10**12))

async def late(stop):
    time.sleep(2)  # before the first turn
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await stop.wait()
    print("stopped", flush=True)

run_service(globals()[sys.argv[1]], BusSettings(watchdog_s=float(sys.argv[2])))
"""


def start(behaviour: str, watchdog_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, behaviour, str(watchdog_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_loop_that_stands_still_ends_the_process_with_its_stacks() -> None:
    process = start("stuck", 1.0)
    _, err = process.communicate(timeout=30)
    assert process.returncode == STUCK_EXIT_CODE
    assert "the event loop has stood still for 1 s" in err and "in stuck" in err


def test_so_does_one_that_keeps_the_interpreter_for_itself() -> None:
    process = start("held", 0.5)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Timeout" in err and "in held" in err


def test_a_process_that_was_late_or_stopped_goes_on() -> None:
    process = start("late", 1.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than the watchdog's timeout, far shorter than where even faulthandler would end it
    process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "stopped\n")
