"""What all benchmarks write down alike: the machine, tables, what was aimed at, JSON beside Markdown."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import signal
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


def command() -> str:
    """The command that this process was started with, but for where results go."""
    spec = sys.modules["__main__"].__spec__
    words = ["python -m", spec.name.removesuffix(".__main__") if spec else sys.argv[0], *sys.argv[1:]]
    return re.sub(r" --output[ =]\S+", "", " ".join(words))


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
    """Verdicts for JSON."""
    return [{**msgspec.structs.asdict(target), "is_met": target.is_met} for target in targets]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of Markdown that are legible as they are."""
    texts = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, texts)]


def table_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Table as of `table`, with the rows' keys as columns."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def write(folder: Path, name: str, document: Any, text: str, *, indent: int = 1) -> Path:
    """NAME.json and NAME.md, both with the command. Returns the path of both without their endings. `indent`: -1 for all of
    the JSON in a line."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / name
    if isinstance(document, dict):
        document = {"command": command(), **document}
    content = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=indent)
    stem.with_suffix(".json").write_bytes(content + b"\n")
    stem.with_suffix(".md").write_text(f"{text.rstrip()}\n\nBy `{command()}`.\n")
    return stem


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Or says why there are no plots."""
    from tideway.bench.plots import PlotsUnavailable

    try:
        draw().savefig(path, dpi=110)
    except PlotsUnavailable as error:
        print(error, file=sys.stderr)


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    return _processor_s(_stat(pid))


def tree_processor_s(pid: int) -> float:
    """Processor time of all threads of a process and of its living descendants."""
    stats = _stats()
    return sum(_processor_s(stats[each]) for each in stats if _descends(each, stats, pid))


def busiest_thread_s(pid: int) -> float:
    """Processor time of the thread of a process that has had most of it."""
    found = [0.0]
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(_processor_s(path.read_text().rpartition(")")[2].split()))
    return max(found)


def take_precedence(pid: int, niceness: int) -> None:
    """Gives a process and its descendants precedence over others on a machine that is in use: among threads, and among
    sessions where the kernel groups threads by these. Below 0 it needs root's rights; raises `OSError` without."""
    stats = _stats()
    for each in stats:
        if _descends(each, stats, pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                Path(f"/proc/{each}/autogroup").write_text(str(niceness))
                for thread in Path(f"/proc/{each}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def asked_to_end() -> Callable[[], bool]:
    """Returns whether SIGTERM or SIGINT has come since: a long measurement then ends with what it has."""
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda which, _: came.append(which))
    return lambda: bool(came)


def others_processor_s() -> float:
    """Processor time of all processes of the machine but this one and its descendants, since it was started; those that
    have ended beneath this one count as others', so that of a difference only what ended meanwhile does."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    all_s = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks
    stats = _stats()
    return all_s - sum(_processor_s(stats[pid]) for pid in stats if _descends(pid, stats, os.getpid()))


def _stats() -> dict[int, list[str]]:
    """By process, of all that run."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stats[int(path.name)] = _stat(int(path.name))
    return stats


def _descends(pid: int, stats: Mapping[int, list[str]], ancestor: int) -> bool:
    while pid in stats and pid != ancestor:
        pid = int(stats[pid][1])
    return pid == ancestor


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _processor_s(stat: Sequence[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written")
