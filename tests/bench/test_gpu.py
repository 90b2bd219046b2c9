"""The one command for a lent CUDA machine: what becomes of parts that fail or hang, its page, the archive it takes."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.__main__ import Part, Run
from bench.gpu.wheels import archive, requirements

PARTS = (
    Part("fails", 30, "Fails"), Part("hangs", 3, "Hangs"), Part("works", 30, "Works"),
    Part("waits", 30, "Waits", ("fails",)),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    options = argparse.Namespace(quick=True, output=tmp_path / "out", budget_s=60.0)
    scripts = {
        "works": 'open(r"ROWS", "a").write(\'{"a": 1, "b": 2.5}\\n\')',
        "fails": "raise SystemExit(3)",
        "hangs": 'open(r"ROWS", "a").write(\'{"a": 7}\\n\'); import time; time.sleep(60)',
    }

    def command(self: Run, part: Part) -> list[str]:
        return [sys.executable, "-c", scripts[part.name].replace("ROWS", str(self.scratch / f"{part.name}.jsonl"))]

    monkeypatch.setattr(Run, "command", command)
    monkeypatch.setattr(gpu, "KILL_AFTER_S", 0.5)
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    return Run(options, {}, "cpu", PARTS)


def test_a_part_that_fails_or_hangs_costs_only_itself(run: Run) -> None:
    started_s = time.monotonic()
    for part in PARTS:
        run.finish(run.start(part))
    assert time.monotonic() - started_s < 30
    document = json.loads((run.options.output / "gpu.json").read_text())
    states = {outcome["part"]: outcome["state"] for outcome in document["parts"]}
    assert states == {
        "works": "done", "fails": "failed with status 3, see gpu.log", "hangs": "ended after its limit of 3 s",
        "waits": "left out: needs fails",
    }  # fmt: skip
    assert [outcome["rows"] for outcome in document["parts"]] == [[], [{"a": 7}], [{"a": 1, "b": 2.5}], []]
    page = (run.options.output / "gpu.md").read_text()
    assert "the CPU, since torch finds no CUDA device" in page and "| 1 | 2.5 |" in page
    run.close()
    assert not run.scratch.exists()


def test_parts_bring_those_that_they_need() -> None:
    assert [part.name for part in gpu.with_needed(["profile"])] == ["kernels", "checkpoint", "profile"]
    assert gpu.with_needed([]) == list(gpu.PARTS)


def test_what_needs_two_devices_is_left_out_on_one(run: Run, tmp_path: Path) -> None:
    part = Part("works", 30, "Works", num_devices=2)
    run.finish(run.start(part))
    assert run.outcomes["works"].state == "done", "on a CPU there are as many as are asked for"
    run.device = "cuda"
    run.finish(run.start(part))
    assert run.outcomes["works"].state == "left out: needs 2 devices"
    run.close()


def test_a_hardware_profile_becomes_rows(tmp_path: Path) -> None:
    file = tmp_path / "hardware.toml"
    file.write_text('flops = 1e12  # as H100\nkv_share = 0.5\n\n[measured."m".1]\nfixed_s = 0.01\n')
    assert gpu.rows_of_hardware(file) == [
        {"what": "flops", "value": 1e12}, {"what": "kv_share", "value": 0.5}, {"model": "m", "fixed_s": 0.01},
    ]  # fmt: skip


def test_a_table_begins_anew_where_the_columns_change() -> None:
    lines = gpu.tables([{"a": 1}, {"a": 2}, {"b": "x|y", "c": 1 / 3}])
    assert lines == ["| a |", "|---|", "| 1 |", "| 2 |", "", "| b | c |", "|---|---|", "| x\\|y | 0.3333 |"]


def test_the_tests_part_tells_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase name="a"/>'
        '<testcase name="b"><failure message="1 != 2&#10;more"/></testcase>'
        '<testcase name="c"><skipped message="needs CUDA"/></testcase></testsuite></testsuites>'
    )
    assert gpu.rows_of_tests(file) == [
        {"what": "all", "tests": 3, "failures": 1, "errors": 0, "skipped": 1},
        {"what": "failure: b", "why": "1 != 2"},
        {"what": "skipped: c", "why": "needs CUDA"},
    ]


def test_the_archive_has_each_library_once_and_no_static_ones(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    (folder / "lib/ucx").mkdir(parents=True)
    library = bytes(range(256)) * 300
    for name in ("lib/ucx/libx.so", "lib/ucx/libx.so.0", "lib/libx.so.0.0.0", "lib/libx.a", "lib/x.h", "lib/y.py"):
        (folder / name).write_bytes(library if ".so" in name or name.endswith(".a") else b"1")
    sizes = archive(folder, tmp_path / "site.tar.gz")
    assert sizes == {"lib": len(library) + 1}
    with tarfile.open(tmp_path / "site.tar.gz") as tar:
        tar.extractall(tmp_path / "again", filter="tar")
    found = {p.relative_to(tmp_path / "again").as_posix() for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert found == {"lib/ucx/libx.so", "lib/ucx/libx.so.0", "lib/libx.so.0.0.0", "lib/y.py"}
    assert (tmp_path / "again/lib/ucx/libx.so.0").read_bytes() == library


def test_packages_are_pinned_as_the_tests_ran_with_them() -> None:
    wanted = requirements(13)
    assert "flashinfer-python==0.6.16" in wanted and "ucxx-cu13==0.52.0" in wanted
    assert any(line.startswith("msgspec==") for line in wanted)
