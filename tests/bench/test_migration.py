"""The bench of a moved request's pause: two real instances on a tiny model, a request that moves between them over UCX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.devices import environments


@pytest.mark.long
def test_the_pause_of_each_length_is_measured_and_judged(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    command = [sys.executable, "-m", "bench.migration", "pause", "--model", "tiny", "--no-pinning"]
    options = ["--lengths", "96", "192", "--moves", "3", "--output", str(tmp_path)]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100.0)
    assert run.returncode == 0, run.stderr
    (table,) = tmp_path.glob("migration-pause-*.md")
    assert table.read_text().partition("\n\nBy `")[0] in run.stdout
    (figures,) = tmp_path.glob("migration-pause-*.json")
    result = msgspec.json.decode(figures.read_bytes())
    assert [(row["tokens"], row["moves"]) for row in result["rows"]] == [(96, 3), (192, 3)]
    for row in result["rows"]:
        assert row["decode step ms"] > 0 and 0 < row["pause ms"] <= row["whole move ms"]
    assert len(result["targets"]) == 2


@pytest.mark.long
def test_the_transfer_of_each_length_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    command = [sys.executable, "-m", "bench.migration", "transfer", "--model", "tiny", "--output", str(tmp_path)]
    run = subprocess.run([*command, "--lengths", "96", "192"], capture_output=True, text=True, timeout=100.0)
    assert run.returncode == 0, run.stderr
    (figures,) = tmp_path.glob("migration-transfer-*.json")
    result = msgspec.json.decode(figures.read_bytes())
    assert result["machine"]["cores"] == len(os.sched_getaffinity(0)), "what was pinned is let go"
    rows = result["rows"]
    assert [(row["way"], row["tokens"]) for row in rows] == [("host", 96), ("host", 192)]
    assert all(row["GB/s"] > 0 and row["ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("devices", "visible", "ends"),
    [
        (["cpu"], "3", ["", ""]),
        (["cuda"], None, ["0", "0"]),
        (["cuda:1"], None, ["1", "1"]),
        (["cuda:0", "cuda:1"], None, ["0", "1"]),
        (["cuda:0", "cuda:1"], "5, GPU-ab", ["5", "GPU-ab"]),
    ],
)
def test_each_end_sees_its_gpu_alone(devices: list[str], visible: str | None, ends: list[str]) -> None:
    assert [end.get("CUDA_VISIBLE_DEVICES", "") for end in environments(devices, visible)] == ends


@pytest.mark.parametrize(
    ("devices", "visible"),
    [
        (["gpu"], None),
        (["cpu", "cuda"], None),
        (["cuda:x"], None),
        (3 * ["cuda"], None),
        (["cuda:1"], "0"),
        (["cuda"], ""),
    ],
)
def test_other_devices_are_refused(devices: list[str], visible: str | None) -> None:
    with pytest.raises(ValueError, match="--device"):
        environments(devices, visible)
