"""A service's process: signals, exit codes, and what the operator reads."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shared.runtime.service import FORMATTERS, TextFormatter, unless_stopped

PROGRAM = """
import asyncio, logging, resource, sys, threading
from typing import Annotated
import msgspec
from shared.models.checkpoint import CheckpointError
from shared.runtime.service import load_or_exit, run_service
from shared.runtime.settings import SchedulerSettings, SettingsError

async def wait(stop):
    logging.info("loop %s", type(asyncio.get_running_loop()).__module__)
    logging.info("descriptors %s", resource.getrlimit(resource.RLIMIT_NOFILE))
    print("ready", flush=True)
    await stop.wait()
    print("stopped", flush=True)

async def hang(stop):
    print("ready", flush=True)
    await asyncio.Event().wait()

def struct_type():
    class Inner(msgspec.Struct):
        least: Annotated[int, msgspec.Meta(ge=0)] | None = None
        names: dict[str, Annotated[str, msgspec.Meta(max_length=3)]] | None = None
    class Outer(msgspec.Struct):
        share: Annotated[float, msgspec.Meta(ge=0)] | None = None
        inner: Inner | None = None
    return Outer

kinds = [struct_type() for _ in range(500)]

async def decode(stop):
    sys.setswitchinterval(1e-6)
    for kind in kinds:
        threads = [
            threading.Thread(target=msgspec.convert, args=({"share": 0.5, "inner": {"least": 3}}, kind)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

async def misconfigured(stop):
    raise SettingsError("port 80 is taken")

async def unreadable(stop):
    raise CheckpointError("no checkpoint at /x")

async def broken(stop):
    raise ValueError("scripted")

settings = load_or_exit(SchedulerSettings)
run_service(globals()[sys.argv[1]], settings)
"""

LOG_LEVEL_SENTENCE = "tideway: TIDEWAY_LOG_LEVEL='loud': expected DEBUG, INFO, WARNING or ERROR\n"
ROOT = Path(__file__).parents[2]


def start(behaviour: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_service(number: signal.Signals) -> None:
    process = start("wait")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "stopped\n")
    assert "scheduler INFO loop uvloop" in err
    assert f"scheduler INFO stopping ({number.name})" in err


def test_it_may_have_all_descriptors_that_the_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        process = start("wait")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert f"descriptors ({hard}, {hard})" in err


def test_threads_may_decode_a_type_first_at_the_same_time() -> None:
    process = start("decode")
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 0)


def test_a_second_signal_ends_it_at_once() -> None:
    process = start("hang")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert "stopping" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("behaviour", "environment", "sentence"),
    [
        ("misconfigured", {}, "tideway: port 80 is taken\n"),
        ("unreadable", {}, "tideway: no checkpoint at /x\n"),
        ("wait", {"TIDEWAY_MAX_QUEUED": "many"}, "tideway: TIDEWAY_MAX_QUEUED='many': expected int\n"),
        (
            "wait",
            {"TIDEWAY_LOG_LEVEL": "loud"},
            "tideway: TIDEWAY_LOG_LEVEL='loud': expected DEBUG, INFO, WARNING or ERROR\n",
        ),
        ("wait", {"TIDEWAY_LOG_FORMAT": "xml"}, "tideway: TIDEWAY_LOG_FORMAT='xml': expected text or json\n"),
    ],
)
def test_what_the_operator_must_mend_is_one_sentence(
    behaviour: str, environment: dict[str, str], sentence: str
) -> None:
    process = start(behaviour, **environment)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (2, sentence)


def test_what_is_our_fault_comes_with_a_stack_trace() -> None:
    process = start("broken")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "scheduler ERROR scheduler failed" in err and "ValueError: scripted" in err
    when = datetime.fromisoformat(err.split()[0])
    assert when.tzinfo is not None and abs(datetime.now(UTC) - when) < timedelta(hours=1)


def test_a_log_in_json_is_an_object_a_line() -> None:
    process = start("broken", TIDEWAY_LOG_FORMAT="json")
    _, err = process.communicate(timeout=20)
    (record,) = map(json.loads, err.splitlines())
    assert datetime.fromisoformat(record["time"]).tzinfo is not None
    assert [record[key] for key in ("service", "level", "logger", "message")] == [
        "scheduler", "ERROR", "shared.runtime.service", "scheduler failed"
    ]  # fmt: skip
    assert record["exception"].endswith("ValueError: scripted")


async def test_waiting_ends_when_the_service_is_told_to_stop() -> None:
    stop = asyncio.Event()
    assert await unless_stopped(asyncio.sleep(0, "connected"), stop) == "connected"
    waiting = asyncio.create_task(unless_stopped(asyncio.sleep(60, "never"), stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(5):
        assert await waiting is None


def test_what_a_client_wrote_begins_no_line_of_a_log() -> None:
    source = "/models/a\n2026-01-01T00:00:00 gateway ERROR all is lost\r\x1b[2J\u2028\x9b"
    record = logging.LogRecord("a", logging.INFO, "", 0, "reading %s", (source,), None)
    for formatter in FORMATTERS.values():
        text = formatter("placement").format(record)
        assert len(text.splitlines()) == 1 and not any(c in text for c in "\x1b\x9b\r"), text
        assert "all is lost" in text
    error = logging.LogRecord("a", logging.ERROR, "", 0, "failed", (), (ValueError, ValueError("b"), None))
    assert TextFormatter("placement").format(error).splitlines()[1:] == ["ValueError: b"], "traces have lines"
