"""`tideway replay` on a real recording, and on something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.engine.test_recording import record_random_run
from tests.shared.scheduling.test_recording import record_run
from tideway import command
from tideway.data_folder import OperatorError


def test_a_recording_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.record"
    file.write_bytes(record_random_run(3))
    command.replay(file)
    assert capsys.readouterr().out.startswith("400 plans, all as recorded")


def test_a_scheduler_decides_the_same_in_processes_with_other_hashes(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.record"
    file.write_bytes(record_run())
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tideway", "replay", str(file)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
        )
        expected = "asked 40 times for actions, all as recorded; requests open at the end: 40."
        assert done.stdout.strip() == expected, done.stderr


def test_anything_else_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "engine.record"
    with pytest.raises(OperatorError, match="engine"):
        command.replay(file)
    file.write_bytes(b"something else")
    with pytest.raises(OperatorError, match="not a recording"):
        command.replay(file)
