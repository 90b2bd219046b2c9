"""What the shell is told when somebody presses Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "import sys; sys.argv[0] = 'tideway'; from tideway.command import main; main()"


def completed(line: str, folder: Path) -> list[str]:
    words = line.split(" ")
    told = {"_TIDEWAY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env={**os.environ, **told},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("tideway dr", ["drain"]), ("tideway request --run", ["--running"]), ("tideway drain node", [])],
)
def test_commands_and_options_are_completed_and_a_gateway_that_is_not_there_is_no_error(
    line: str, expected: list[str], tmp_path: Path
) -> None:
    environment = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}{os.pathsep}{environment}"
    try:
        assert completed(line, tmp_path) == expected
    finally:
        os.environ["PYTHONPATH"] = environment
