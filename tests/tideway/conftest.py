"""The command `tideway` in the process of the test: what its modules import is paid once, not by every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tideway.command import main

InThisProcess = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InThisProcess:
    """Runs commands that end by themselves, at once. Exit code and output as `python -m tideway` has them."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["tideway", *arguments])
        for name in os.environ:
            if name.startswith("TIDEWAY_"):
                monkeypatch.delenv(name)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), output, errors)

    return run
