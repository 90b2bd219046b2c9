"""Tests of the tests: what is in the fast set is found out, and reaches nothing outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fast

FOLDER = fast.REPOSITORY / "tests"


def test_a_test_needs_what_its_imports_need() -> None:
    assert not fast.imported(FOLDER / "shared/engine/test_planner.py")
    assert fast.imported(FOLDER / "worker/test_attention.py") == {"subprocess", "torch"}
    assert "subprocess" in fast.imported(FOLDER / "conftest.py"), "and so whoever uses its NATS server"


def test_only_what_is_imported_at_the_top_counts(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport shared.engine.plan\n"
        "if TYPE_CHECKING:\n    import torch\ndef test():\n    import subprocess\n"
    )
    assert not fast.imported(file)
    other = tmp_path / "test_other.py"
    other.write_text("try:\n    from tests.e2e.stack import Stack\nexcept ImportError:\n    pass\n")
    assert fast.imported(other) == {"subprocess"}


def test_what_was_found_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(
        "from tests import fast\nread = fast._read_imports\n"
        "def said(path):\n    print('reads', path.name)\n    return read(path)\n"
        "fast._read_imports = said\n"
        "from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems, pytest_configure\n"
    )
    file = tmp_path / "test_it.py"
    file.write_text("def test(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-m", "fast"]

    def run() -> str:
        environment = {"PYTHONPATH": str(fast.REPOSITORY)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        return done.stdout + done.stderr

    first, second = run(), run()
    assert "reads test_it.py" in first and "1 passed" in first, first
    assert "reads" not in second and "1 passed" in second, second
    file.write_text("import subprocess\ndef test(): pass\n")
    third = run()
    assert "reads test_it.py" in third and "1 deselected" in third, third


async def _listen() -> None:
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


@pytest.mark.parametrize(
    "does",
    [
        lambda: subprocess.run([sys.executable, "-c", ""]),
        lambda: os.system("true"),
        lambda: asyncio.run(_listen()),
        lambda: asyncio.run(asyncio.open_connection("127.0.0.1", 9)),
        lambda: sys.audit("import", "torch", None, None, None, None),
    ],
    ids=["process", "shell", "port", "connection", "torch"],
)
def test_what_reaches_outside_ends_a_fast_test(does: Callable[[], object]) -> None:
    with fast.alone("test_it"), pytest.raises(fast.NotFastError, match="test_it is in the fast set"):
        does()


def test_it_is_held_to_that_no_longer_than_it_runs() -> None:
    with fast.alone("test_it"):
        pass
    assert subprocess.run([sys.executable, "-I", "-S", "-c", ""]).returncode == 0


def test_pytest_finds_the_fast_ones_and_lets_nobody_name_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect, pytest_runtest_protocol\n"
    )
    (tmp_path / "test_pure.py").write_text(
        "import os\nimport pytest\ndef test_sound(): pass\ndef test_sneaks(): os.system('true')\n"
        "@pytest.mark.slow\ndef test_long(): raise AssertionError\n"
    )
    (tmp_path / "test_outside.py").write_text("import subprocess\nraise AssertionError('imported')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        "-m",
        "fast",
    ]
    environment = {"PYTHONPATH": str(fast.REPOSITORY)}

    def run() -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        return done.stdout + done.stderr

    output = run()
    assert "1 failed, 1 passed, 1 deselected" in output and "test_sneaks is in the fast set" in output, output
    (tmp_path / "test_pure.py").write_text("import pytest\n@pytest.mark.fast\ndef test_named(): pass\n")
    assert "nobody marks a test as fast" in run()
