"""The Helm chart, rendered: by `helm` where it is installed, else by its library from PyPI (helm-python-sdk)."""

from __future__ import annotations

import json
import shutil
import subprocess
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
    report = _library().lint(CHART, dict(values or {}), strict=True, namespace=NAMESPACE)
    return [m["error"] for m in report["messages"] if m["severity"] >= 2] + list(report["errors"])


def _by_binary(arguments: list[str], values: Mapping[str, Any] | None) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values or {}, file)
        file.flush()
        call = ["helm", *arguments, "--namespace", NAMESPACE, "--values", file.name]
        result = subprocess.run(call, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RefusedError(result.stderr + result.stdout)
    return result.stdout


def _library() -> Any:
    return pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed")


def _by_library(values: Mapping[str, Any] | None, folder: Path, release: str) -> str:
    helm = _library()
    with helm.Chart.load(folder) as chart:
        try:
            chart.validate_schema(chart.merge_values(dict(values or {})))
            files = chart.render(dict(values or {}), name=release, namespace=NAMESPACE)
        except helm.HelmError as error:
            raise RefusedError(str(error)) from None
    return "\n---\n".join(text for name, text in files.items() if not name.endswith("NOTES.txt"))
