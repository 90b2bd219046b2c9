"""The page of a run, in Markdown: first whether it counts, then the targets, then what each part found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.fallbacks import FALLBACKS, verdict
from bench.gpu.results import Document, Row
from bench.gpu.targets import judged

PREDICTED = {"decode": "batch", "prefill": "tokens"}
"""Parts whose steps can be computed beforehand (roofline.py), and the column that says how large a step is."""

HIDDEN = ("is_last",)
"""What rows say to a later try alone."""


def page(document: Document) -> str:
    on_cuda = document.device == "cuda"
    where = f"{document.card}, driver {document.driver or 'unknown'}" if on_cuda else \
        "the CPU, since torch finds no CUDA device here"  # fmt: skip
    lines = [
        verdict(document), "", f"# bench.gpu on {document.card or 'a CPU'}, {document.date}", "",
        f"Every part ran on {where}; commit {document.commit or 'unknown'}; {document.seconds:.0f} s in all.",
    ]  # fmt: skip
    if document.is_quick:
        lines.append("Shapes are small: this shows whether all works, not how fast.")
    lines += ["", "## Targets", "", *tables(judged(document)), ""]
    lines.append("What would count as a fallback on CUDA: " + ", ".join(f"{f.to} for {f.of}" for f in FALLBACKS) + ".")
    for outcome in document.outcomes.values():
        took = f", {outcome.seconds:.0f} s" if outcome.seconds else ""
        lines += ["", f"## {outcome.title}", "", f"`{outcome.part}` on {document.device}: {outcome}{took}", ""]
        lines += tables(with_predicted(document, outcome.part))
    return "\n".join(lines).rstrip() + "\n"


def with_predicted(document: Document, part: str) -> list[Row]:
    """The part's rows; beside a measured step what it was computed to take, where that is known for the card."""
    rows = document.rows(part)
    try:
        from bench.gpu.roofline import expected_ms
    except ImportError:
        return rows
    size = PREDICTED.get(part)
    if size is None or document.device != "cuda" or document.is_quick:
        return rows
    found = []
    for row in rows:
        expected = expected_ms(document.card, part, row[size]) if size in row and "step_ms" in row else None
        found.append(row if expected is None else _after(row, "step_ms", "predicted_ms", expected))
    return found


def _after(row: Row, column: str, name: str, value: Any) -> Row:
    """With another column behind one."""
    place = list(row).index(column) + 1
    return dict([*list(row.items())[:place], (name, value), *list(row.items())[place:]])


def tables(rows: Sequence[Row]) -> list[str]:
    """Markdown; a new table where the columns change."""
    lines: list[str] = []
    last: tuple[str, ...] = ()
    for row in ({name: value for name, value in row.items() if name not in HIDDEN} for row in rows):
        columns = tuple(row)
        if columns != last:
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            last = columns
        lines.append("| " + " | ".join(cell(value) for value in row.values()) + " |")
    return lines[1:]


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
