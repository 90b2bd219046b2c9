"""`bench.clients` runs each program with what is installed, and tells which checks passed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.clients import __main__ as clients

PROGRAMS = {
    "checks": "raise SystemExit('no client')",
    "absent_one": """print('{"absent": "No module named x"}')""",
    "dying_one": "raise SystemExit('it broke')",
    "good_one": """
import json, os
assert (os.environ["TIDEWAY_URL"], os.environ["TIDEWAY_MODEL"]) == ("http://127.0.0.1:81", "tide")
print("a warning")
print(json.dumps({"version": "1.2", "stream": "ok", "tool": "ok", "structured": "ok"}))
""",
    "hanging_one": "import time; time.sleep(60)",
    "wrong_one": """print('{"version": "3", "stream": "ok", "tool": "AssertionError", "structured": "ok"}')""",
}


def table_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, list[str]]:
    """The exit status, and the lines behind the table's head."""
    monkeypatch.setattr(sys, "argv", ["clients", "--url", "http://127.0.0.1:81", "--model", "tide", *options])
    with pytest.raises(SystemExit) as ended:
        clients.main()
    return int(str(ended.value)), capsys.readouterr().out.splitlines()[2:]


def test_programs_that_are_absent_pass_or_fail_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "python" / f"{name}.py").write_text(text)
    monkeypatch.setattr(clients, "HERE", tmp_path)
    monkeypatch.setattr(clients, "TIMEOUT_S", 2)
    status, lines = table_of(monkeypatch, capsys)
    assert status == 1
    assert lines == [
        "| absent-one | skipped: No module named x | | | |",
        "| dying-one |  | FAILS | FAILS | FAILS |",
        "| good-one | 1.2 | passes | passes | passes |",
        "| hanging-one |  | FAILS | FAILS | FAILS |",
        "| wrong-one | 3 | passes | FAILS | passes |",
        "",
        *(f"dying-one, {check}: it broke" for check in clients.CHECKS),
        *(f"hanging-one, {check}: no end within 2 s" for check in clients.CHECKS),
        "wrong-one, tool: AssertionError",
    ]
    status, lines = table_of(monkeypatch, capsys, "--client", "good-one")
    assert status == 0 and lines == ["| good-one | 1.2 | passes | passes | passes |", ""]


def test_each_program_of_a_client_has_the_three_checks() -> None:
    programs = [*clients.HERE.glob("python/*.py"), *clients.HERE.glob("node/*.mjs")]
    programs = [path for path in programs if path.stem not in clients.SHARED]
    assert len(programs) > 10
    for path in programs:
        call = path.read_text().rpartition("check(")[2]
        assert all(check in call for check in clients.CHECKS), path
