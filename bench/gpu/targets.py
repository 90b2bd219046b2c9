"""How well: what the path on a GPU is held to, each computed from the rows of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.gpu.results import Document, Row

Find = Callable[[Document], float | None]


@dataclass(frozen=True)
class Target:
    name: str
    limit: float
    unit: str
    find: Find
    """From the rows; None: not measured."""
    is_least: bool = False

    def row(self, document: Document) -> Row:
        """On a CPU nothing counts as measured: shapes are small, and no kernel of the path has run."""
        value = self.find(document) if document.device == "cuda" else None
        bound = f"{'at least' if self.is_least else 'at most'} {self.limit:g}{self.unit}"
        row: Row = {
            "target": self.name,
            "asked": bound,
            "measured": None if value is None else f"{value:.4g}{self.unit}",
        }
        if value is None:
            return row | {"met": "not measured" if document.device == "cuda" else "not measured: no CUDA device"}
        short_by = self.limit - value if self.is_least else value - self.limit
        return row | {"met": "met" if short_by <= 0 else f"missed by {short_by:.4g}{self.unit}"}


def _rows(document: Document, part: str, **fields: object) -> Iterator[Row]:
    """The part's rows with such fields."""
    return (r for r in document.rows(part) if all(r.get(name) == value for name, value in fields.items()))


def _of(part: str, column: str, worst: Callable[[list[float]], float] = max, **fields: object) -> Find:
    """The column's worst value in such rows."""

    def find(document: Document) -> float | None:
        values = [row[column] for row in _rows(document, part, **fields) if column in row]
        return worst(values) if values else None

    return find


def _share(part: str, **fields: object) -> Find:
    """Equal ones of all."""

    def find(document: Document) -> float | None:
        row = next(_rows(document, part, **fields), None)
        return None if row is None else row["equal"] / row["of"]

    return find


def _device_share(document: Document) -> float | None:
    """Share of bytes per second between processes, the ways by the device and by page-locked memory of the host."""
    rates = {
        way: [row["GB/s"] for row in document.rows("migration") if row.get("way") == way] for way in ("device", "host")
    }
    return max(rates["device"]) / max(rates["host"]) if rates["device"] and rates["host"] else None


def _resident_percent(step: str) -> Find:
    """What the worst placed of two models takes longer than alone, while the other only has its weights and blocks there."""

    def find(document: Document) -> float | None:
        rows = _rows(document, "sharing", step=step)
        values = [100 * row["overhead"] for row in rows if row["what"].endswith("resident")]
        return max(values) if values else None

    return find


TARGETS = (
    Target("tokens in float32, equal to the CPU's", 1.0, "", _share("equality", what="tokens in float32"), True),
    Target("deterministic mode: sequences equal to those alone", 1.0, "",
           _share("equality", what="deterministic mode"), True),
    *(
        Target(f"decode of {batch}, of the memory roofline", 0.75, "",
               _of("decode", "share_of_roofline", min, batch=batch, sampling="greedy"), True)
        for batch in (1, 8, 64, 256)
    ),
    *(
        Target(f"prompt of {tokens}, of the matrix rate", least, "",
               _of("prefill", "share_of_products", min, tokens=tokens), True)
        for tokens, least in ((2048, 0.6), (8192, 0.7))
    ),
    Target("safepoints: what a step takes longer", 1.0, " %", _of("safepoints", "overhead_percent")),
    Target("safepoints: longest time to stop", 2.0, " ms", _of("safepoints", "longest_ms")),
    Target("checkpoints of KV beside decodes: what a step takes longer", 3.0, " %",
           _of("copies_beside", "overhead_percent")),
    Target("migration between two processes: pause over step", 1.5, "", _of("migration", "pause / step")),
    Target("migration: rate by the device over that by the host", 1.0, "", _device_share, True),
    *(
        Target(f"two 8B shapes on one GPU, the other idle: {step} against alone", 2.0, " %",
               _resident_percent(step))
        for step in ("decode", "prefill")
    ),
)  # fmt: skip


def judged(document: Document) -> list[Row]:
    return [target.row(document) for target in TARGETS]
