"""`tideway replay` on a real recording, and on something else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.engine.fake_executor import request
from tests.shared.engine.test_recording import record_random_run
from tests.shared.migration.test_in_virtual_time import World
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
        expected = r"asked \d+ times for actions, all as recorded; requests open at the end: 40\."
        assert re.fullmatch(expected, done.stdout.strip()), done.stderr


def test_anything_else_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "engine.record"
    with pytest.raises(OperatorError, match="engine"):
        command.replay(file)
    file.write_bytes(b"something else")
    with pytest.raises(OperatorError, match="not a recording"):
        command.replay(file)


def test_migrations_replay_and_a_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World("ab")
    world.send("a", request("r1", list(range(50)), 200))
    world.events.at(0.5, world.nodes["a"].rebalance, "b")
    world.run()
    for node in world.nodes.values():
        file = tmp_path / node.name
        file.write_bytes(b"".join(node.written))
        command.replay(file)
        out = capsys.readouterr().out
        assert "all as recorded; migrations in progress at the end: 0." in out and not out.startswith("0 times")
    source = b"".join(world.nodes["a"].written)
    for known, other in ((b"BeginOut", b"BeginXut"), (b"Candidates", b"Candidatos")):
        assert known in source
        file.write_bytes(source.replace(known, other))
        with pytest.raises(OperatorError, match=r"BeginOut|Candidates"):
            command.replay(file)
