"""Docstrings name their subject."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
IN_MID_AIR = re.compile(r"\s*(Of|That|Likewise|As|Where|For|When)\b")
"""First words of a docstring that leaves its subject to whoever reads the code."""
MAY_BE_IN_MID_AIR = re.compile(r"(\"\"\"|\'\'\')" + IN_MID_AIR.pattern)


def test_no_docstring_begins_in_mid_air() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    files = [REPOSITORY / name for name in listed.stdout.splitlines()] or sorted(REPOSITORY.glob("[!.]*/**/*.py"))
    found = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno}: {node.value.value[:60]}"
        for file in files
        if file.exists() and MAY_BE_IN_MID_AIR.search(text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if IN_MID_AIR.match(node.value.value)
    ]
    assert len(files) > 100 and not found, "\n".join(found)
