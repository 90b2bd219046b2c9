"""Batches of completions over plain HTTP, as benches submit them and count their answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

ENDED = ("completed", "failed", "expired", "cancelled")
COMPLETIONS = "/v1/completions"


def file_of(bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Form of `POST /v1/files`, as arguments of httpx: one line for each body, by its custom id."""
    lines = [{"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body} for name, body in bodies.items()]
    return {
        "files": {"file": ("input.jsonl", "\n".join(map(json.dumps, lines)).encode())},
        "data": {"purpose": "batch"},
    }


def batch_of(file: Mapping[str, Any]) -> dict[str, Any]:
    """Body of `POST /v1/batches` for a file that was uploaded."""
    return {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}


def begin(client: httpx.Client, bodies: Mapping[str, Mapping[str, Any]]) -> str:
    """Uploads the lines and begins their batch; returns its id."""
    file = client.post("/v1/files", **file_of(bodies)).raise_for_status().json()
    return str(client.post("/v1/batches", json=batch_of(file)).raise_for_status().json()["id"])


def answers_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def num_answered_once(answers: Sequence[Mapping[str, Any]]) -> int:
    """How many lines have 200 exactly once."""
    times = Counter(each["custom_id"] for each in answers if each["response"]["status_code"] == 200)
    return sum(number == 1 for number in times.values())
