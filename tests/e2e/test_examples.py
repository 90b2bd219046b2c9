"""Every program in examples/ does what it says, on a running system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.e2e.stack import REPOSITORY, Stack

EXAMPLES = REPOSITORY / "examples"


def run(stack: Stack, name: str, *arguments: str) -> list[str]:
    """Lines of its output."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TIDEWAY_URL": stack.url}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def why_not(url: str, name: str, *arguments: str) -> str:
    """The one sentence that it ends with where it cannot do what it is for."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TIDEWAY_URL": url}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, f"{name}:\n{done.stdout}{done.stderr}"
    return done.stderr


@pytest.mark.parametrize("name", ["drain_under_load", "two_models"])
def test_where_nothing_answers(name: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    sentence = why_not(url, name)
    assert url in sentence and "TIDEWAY_URL" in sentence


def test_help_is_no_model() -> None:
    command = [sys.executable, str(EXAMPLES / "drain_under_load.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "usage: drain_under_load.py" in done.stdout and "[tokens]" in done.stdout


def test_the_examples(stack: Stack, checkpoints: dict[str, str], tmp_path: Path) -> None:
    whole, stream = run(stack, "chat", "llama")
    assert whole.partition(": ")[2].rpartition(" (")[0] == stream.partition(": ")[2]

    (resumed,) = run(stack, "resume", "llama")
    connections, _, text = resumed.partition(" connections: ")
    assert int(connections) >= 2 and stream.partition(": ")[2].strip("'\"") in text

    lines = run(stack, "batch", "opt")
    assert [line.split()[0] for line in lines] == [f"chapter-{number}" for number in range(20)]

    models = tmp_path / "two_models.toml"
    text = (EXAMPLES / "two_models.toml").read_text()
    for folder in ("llama", "opt"):
        text = text.replace(f"../models/tideway-demo-{folder}", os.path.relpath(checkpoints[folder], tmp_path))
    models.write_text(text)
    lines = run(stack, "two_models", str(models))
    assert sorted(line.partition(":")[0] for line in lines) == ["patient"] * 3 + ["quick"] * 3

    plain, adapted = (line.partition(": ") for line in run(stack, "lora", "llama"))
    assert (plain[0], adapted[0]) == ("llama", "tiny-lora") and plain[2] != adapted[2]

    models.write_text(f"{text}replics = 1\n")
    assert "Unknown parameter: 'replics'; did you mean 'replicas'?" in why_not(stack.url, "two_models", str(models))

    ordered = run(stack, "own_policy")
    assert {tuple(line.split()[:2]) for line in ordered[1:]} == {
        (ordering, dispatch)
        for ordering in ("doubling_budget", "ShortestPromptFirst")
        for dispatch in ("first_token", "FullestThatFits")
    }


def test_all_examples_are_run_and_described() -> None:
    described = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text() + (Path(__file__).parent / "test_pooling.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}" in described and f'"{path.stem}"' in tests, path.name
