"""What all benchmarks write down alike: the machine, tables, what was aimed at, JSON beside Markdown."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def machine() -> dict[str, Any]:
    """Also what else runs on it now."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": "",
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
    }


def met(is_met: bool) -> str:
    return "met    " if is_met else "MISSED "


class Target(msgspec.Struct, kw_only=True):
    """A figure that must be at most (or at least) `limit`."""

    name: str
    value: float
    limit: float
    is_least: bool = False
    unit: str = ""
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = f"{'at least' if self.is_least else 'at most'} {self.limit:g}{self.unit}"
        text = f"{met(self.is_met)} {self.name}: {self.value:.4g}{self.unit} ({bound})"
        note = f"; {self.note}" if self.note else ""
        if self.is_met:
            return f"{text}{note}"
        if not math.isfinite(self.value):
            return f"{text}, not measured{note}"
        worse, better = (self.limit, self.value) if self.is_least else (self.value, self.limit)
        factor = f"by a factor of {worse / better:.3g}" if better > 0 else f"by {worse - better:.4g}{self.unit}"
        return f"{text}, {factor}{note}"


def judged(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**msgspec.structs.asdict(target), "is_met": target.is_met} for target in targets]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of Markdown that are legible as they are."""
    texts = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, texts)]


def table_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """As `table`; the columns are the rows' keys."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def write(folder: Path, name: str, document: Any, text: str, *, indent: int = 1) -> Path:
    """NAME.json and NAME.md. Returns the path of both without their endings. `indent`: -1 for all of the JSON in a line."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / name
    content = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=indent)
    stem.with_suffix(".json").write_bytes(content + b"\n")
    stem.with_suffix(".md").write_text(text.rstrip("\n") + "\n")
    return stem


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Or says why there are no plots."""
    from tideway.bench.plots import PlotsUnavailable

    try:
        draw().savefig(path, dpi=110)
    except PlotsUnavailable as error:
        print(error, file=sys.stderr)


def processor_s(pid: int) -> float:
    """Of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written")
