"""compute-sanitizer over the tests of captured graphs: memory that a kernel must not touch, then races within blocks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.stepping import LeftOut, Setup

TESTS = ("tests/worker/test_executor.py", "tests/worker/test_on_cuda.py", "-k", "graphs")
TOOLS = ("memcheck", "racecheck")
LEAST_S = 20.0
"""What a tool needs at least: kernels run many times slower below it."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def sanitizer(setup: Setup) -> None:
    """A row for each tool: what it found. Raises `LeftOut`, and `RuntimeError` where a tool found something."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise LeftOut("no compute-sanitizer here")
    if not setup.on_cuda:
        raise LeftOut("compute-sanitizer needs a CUDA device")
    for tool in TOOLS:
        # The second is there where the first leaves time.
        if setup.is_measured(tool=tool, found=0, status=0) or (tool != TOOLS[0] and setup.left_s < LEAST_S):
            continue
        row = report_of(program, tool, setup.scratch / f"{tool}.txt", setup.left_s - 5)
        setup.emit(**row)
        if row["found"] != 0 or row["status"] != 0:
            raise RuntimeError(f"{tool}: {row}")


def report_of(program: str, tool: str, report: Path, limit_s: float) -> dict[str, object]:
    """`found` is None where the tool has not come to an end within the limit."""
    command = [
        program, "--tool", tool, "--target-processes", "all", "--log-file", str(report), "--error-exitcode", "9",
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "-p", "no:schemathesis",
        *TESTS,
    ]  # fmt: skip
    started_s = time.monotonic()
    try:
        status: int | str = subprocess.run(command, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        status = f"ended after {limit_s:.0f} s"
    text = report.read_text(errors="replace") if report.exists() else ""
    first = next((line.strip("= ") for line in text.splitlines() if "Invalid" in line or "hazard" in line), "")
    return {
        "tool": tool, "found": num_found(text), "status": status, "seconds": round(time.monotonic() - started_s, 1),
        "first": first[:200],
    }  # fmt: skip


def num_found(report: str) -> int | None:
    """Errors or hazards of all processes, from the tool's report; None: it has no summary."""
    counts = [int(one or two) for one, two in SUMMARY.findall(report)]
    return sum(counts) if counts else None
