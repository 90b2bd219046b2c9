"""Clients that people use, unchanged, on one running system with the demonstration models.

`stack`     the system, on free ports; `url` and `base_url` (with /v1) are where its gateway listens
`command`   runs a client's program, which the test `needs_program`

A test asks for a library by `pytest.importorskip`, so that those run which are installed. docs/clients.md says which were
run by hand, and how.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import REPOSITORY, Stack

LLAMA, OPT = "tideway-demo-llama", "tideway-demo-opt"
"""The one has a chat template."""
CLIENT_TIMEOUT_S = 200.0


def program(name: str) -> str | None:
    """A client's program, beside this Python or on the path; None: it is not installed."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def needs_program(name: str) -> pytest.MarkDecorator:
    """Skips before the system is started."""
    return pytest.mark.skipif(program(name) is None, reason=f"{name} is not installed")


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    models = {name: str(REPOSITORY / "models" / name) for name in (LLAMA, OPT)}
    environment = {"TIDEWAY_COST_MODELS_DIR": str(tmp_path_factory.mktemp("cost_models"))}
    with Stack(models, num_instances=1, environment=environment) as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="package")
def url(stack: Stack) -> str:
    return stack.url


@pytest.fixture(scope="package")
def base_url(stack: Stack) -> str:
    return f"{stack.url}/v1"


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    """Runs a program with these arguments in an empty folder, and returns what it printed."""

    def run(name: str, *arguments: str) -> str:
        found = program(name)
        assert found is not None
        done = subprocess.run(
            [found, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S
        )
        assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return run
