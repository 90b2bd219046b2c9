"""Helm's library from PyPI (helm-python-sdk) in a process of its own: it brings Go's runtime along, with signal handlers and
threads that the tests' process is better without. A line of JSON on stdin is a call, a line on stdout its answer."""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python as helm


def render(chart: str, values: dict[str, Any], release: str, namespace: str) -> dict[str, Any]:
    with helm.Chart.load(chart) as loaded:
        try:
            loaded.validate_schema(loaded.merge_values(values))
            files = loaded.render(values, name=release, namespace=namespace)
        except helm.HelmError as error:
            return {"refused": str(error)}
    return {"text": "\n---\n".join(text for name, text in files.items() if not name.endswith("NOTES.txt"))}


def lint(chart: str, values: dict[str, Any], namespace: str) -> dict[str, Any]:
    report = helm.lint(chart, values, strict=True, namespace=namespace)
    return {"faults": [m["error"] for m in report["messages"] if m["severity"] >= 2] + list(report["errors"])}


if __name__ == "__main__":
    for line in sys.stdin:
        call = json.loads(line)
        answer = {"render": render, "lint": lint}[call.pop("call")](**call)
        print(json.dumps(answer), flush=True)
