"""What counts as a fallback on a CUDA device, where it is a failure: figures of it would be taken for those of the kernels.

Parts emit rows with what was chosen, and with `why`: what the log said when something better was not. `FALLBACKS` is all
that is looked for in them. The compiled kernels for CPUs do not count: on a GPU nothing computes with them. What is
emitted under other names does not count either: a model of float32, or the deterministic mode, runs on torch by
intention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.gpu.results import Document, Row

WITHOUT_KERNELS = ("torch", "tile", "compiled")
"""Modules of services/worker/attention whose work is torch's, or a CPU's."""


@dataclass(frozen=True)
class Fallback:
    of: str
    to: str
    """What is used instead."""
    is_seen: Callable[[Row], bool]


FALLBACKS = (
    Fallback("attention of decodes", "torch", lambda row: row.get("decodes") in WITHOUT_KERNELS),
    Fallback("attention of prompts", "torch", lambda row: row.get("prompts") in WITHOUT_KERNELS),
    Fallback("norms, rotations and gates", "torch", lambda row: row.get("ops") == "TorchOps"),
    Fallback("float8 products", "widened weights", lambda row: row.get("float8") == "widened"),
    Fallback("decode graphs", "single launches", lambda row: row.get("graphs", 1) < row.get("graph_sizes", 1)),
    Fallback("KV blocks between processes", "the host's memory", lambda row: row.get("cuda_ipc") is False),
    Fallback("tests on the device", "none", lambda row: _is_skipped(row)),
)
"""`decodes`, `prompts`: the module whose metadata the step had. `graphs`: captured, of `graph_sizes`. `cuda_ipc`: whether
UCX lists it and reads the device's memory."""


def _is_skipped(row: Row) -> bool:
    """But for what needs a second device."""
    return str(row.get("what", "")).startswith("skipped: ") and "needs two CUDA devices" not in row.get("why", "")


def seen(document: Document) -> list[str]:
    """What was fallen back from, to what, and why; nothing on a CPU."""
    if document.device != "cuda":
        return []
    found: dict[str, str] = {}
    for part, outcome in document.outcomes.items():
        for row in outcome.rows:
            for fallback in FALLBACKS:
                if fallback.is_seen(row):
                    why = row.get("why") or "nothing was said in the log"
                    found.setdefault(f"{fallback.to} for {fallback.of}", f"{part}: {why}")
    return [f"{what} ({why})" for what, why in found.items()]


def verdict(document: Document) -> str:
    """The first line of all."""
    if fallbacks := seen(document):
        return f"FAILED: fell back to {', to '.join(fallbacks)}"
    missing = unfinished(document)
    return f"INCOMPLETE: {'; '.join(missing)}" if missing else "DONE: all parts that were asked for"


def unfinished(document: Document) -> list[str]:
    """Parts that the last call was asked for and that are neither done nor left out, and why."""
    outcomes = [document.outcomes[name] for name in document.asked_for]
    return [f"{o.part} {o}" for o in outcomes if o.state not in ("done", "left out")]
