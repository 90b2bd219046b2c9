"""The Helm chart, rendered: by `helm` where it is installed, else by its library from PyPI (helm-python-sdk)."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy/helm/tideway"
EXAMPLES = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((CHART / "examples").glob("*.yaml"))}
RELEASE = "tideway"
NAMESPACE = "llm"

Document = dict[str, Any]


class RefusedError(Exception):
    """Values that the chart does not take; the message is the chart's, or its schema's."""


def render(values: Mapping[str, Any] | None = None, chart: Path = CHART, release: str = RELEASE) -> list[Document]:
    """The documents for these values over the chart's own, in the namespace above. `RefusedError`."""
    if shutil.which("helm"):
        text = _by_binary(["template", release, str(chart)], values)
    else:
        text = _by_library(values, chart, release)
    return [document for document in yaml.safe_load_all(text) if document]


def lint(values: Mapping[str, Any] | None = None) -> list[str]:
    """What `helm lint --strict` complains of."""
    if shutil.which("helm"):
        try:
            _by_binary(["lint", str(CHART), "--strict"], values)
        except RefusedError as error:
            return str(error).splitlines()
        return []
    answer = _ask_library(call="lint", chart=str(CHART), values=dict(values or {}), namespace=NAMESPACE)
    return list(answer["faults"])


def _by_binary(arguments: list[str], values: Mapping[str, Any] | None) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values or {}, file)
        file.flush()
        call = ["helm", *arguments, "--namespace", NAMESPACE, "--values", file.name]
        result = subprocess.run(call, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RefusedError(result.stderr + result.stdout)
    return result.stdout


def _by_library(values: Mapping[str, Any] | None, chart: Path, release: str) -> str:
    answer = _ask_library(
        call="render", chart=str(chart), values=dict(values or {}), release=release, namespace=NAMESPACE
    )
    if "refused" in answer:
        raise RefusedError(answer["refused"])
    return str(answer["text"])


def _ask_library(**call: Any) -> dict[str, Any]:
    """The library's answer, for which it is started again where it has died; pytest shows what it said to that."""
    if _library().poll() is not None:
        _library.cache_clear()
    process = _library()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(call) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


@functools.cache
def _library() -> subprocess.Popen[str]:
    """Ends with its stdin, and so with this process."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("neither helm nor helm-python-sdk is installed")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.helm_library"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
