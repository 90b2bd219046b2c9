"""What was found, on disk: the state that a later call goes on from, in files that come back from the machine.

One folder comes back: at most 8 files of 16 MiB, whose names have letters, digits, '.', '_' and '-'. So
all is in five: `gpu.json` (rows and states of all parts), the page `gpu.md`, `gpu.log`, `hardware.toml`, and
`benches.tar.gz` with the files that benches of the tree write. Standard library only.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import re
import shutil
import tarfile
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints
from xml.etree import ElementTree

from bench.gpu.order import BENCHES, Place

MAX_FILES = 8
MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 2
NAME = re.compile(r"[A-Za-z0-9._-]+")

STATE, PAGE, LOG, HARDWARE, FILES = "gpu.json", "gpu.md", "gpu.log", "hardware.toml", "benches.tar.gz"

DONE, LEFT_OUT, FAILED, CUT, NOT_BEGUN = "done", "left out", "failed", "cut", "not begun"
"""States of a part. Left out is what this machine cannot show; cut what its limit ended."""

Row = dict[str, Any]


@dataclass
class Outcome:
    part: str
    title: str
    state: str = NOT_BEGUN
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


@dataclass
class Document:
    """Document of a run, which may take several calls."""

    run: str
    """Its name: when it began."""
    date: str
    device: str
    """cuda or cpu"""
    card: str
    """Card as its driver names it; empty on a CPU."""
    driver: str
    commit: str
    """Commit of the tree; empty: not known."""
    is_quick: bool
    seconds: float = 0.0
    """Seconds of all calls."""
    asked_for: list[str] = field(default_factory=list)
    """Parts that the last call asked for."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By part; of all parts that any call was asked for."""

    def rows(self, part: str) -> list[Row]:
        return self.outcomes[part].rows if part in self.outcomes else []

    @property
    def name(self) -> str:
        card = re.sub(r"[^A-Za-z0-9]+", "-", self.card).strip("-").lower() or self.device
        return f"gpu-{card}-{self.date}"

    def save(self, file: Path, **more: Any) -> None:
        """`more`: what is computed from it."""
        plain = asdict(self) | {"outcomes": [asdict(outcome) for outcome in self.outcomes.values()]} | more
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps(plain, indent=1) + "\n")
        whole.replace(file)


def load(file: Path) -> Document:
    """Raises `ValueError` where it is none, `OSError`."""
    try:
        plain = json.loads(file.read_text())
        outcomes = [Outcome(**_checked(Outcome, outcome)) for outcome in plain["outcomes"]]
        fields = {name: plain[name] for name in Document.__dataclass_fields__}
        fields["outcomes"] = {outcome.part: outcome for outcome in outcomes}
        document = Document(**_checked(Document, fields))
        # Files are named by these.
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", document.date) or document.device not in ("cuda", "cpu"):
            raise ValueError(f"{document.date!r} is no date, or {document.device!r} no device")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not the state of a run: {error}") from error
    return document


def _checked(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Raises `TypeError` where these are no fields, or one has a value of another type."""
    if not isinstance(fields, dict):
        raise TypeError(f"{fields!r} has no fields")
    for name, hint in get_type_hints(kind).items():
        wanted = get_origin(hint) or hint
        value = fields.get(name, wanted())
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise TypeError(f"{name} is {value!r}")
        if hint == list[Row] and not all(isinstance(row, dict) for row in value):
            raise TypeError(f"{name} has what is no row")
    return fields


# ------------------------------------------------------------------------------------------- the output folder


@contextlib.contextmanager
def opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """To be read. Raises `ValueError` where it is none, or is cut; `OSError`."""
    try:
        with tarfile.open(archive) as tar:
            yield tar
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        why = str(error).partition("\n")[0].rstrip(":")  # of what each kind of archive would need, the rest says
        raise ValueError(f"{archive} cannot be unpacked: {why}") from error


def pack_files(folder: Path, archive: Path) -> list[str]:
    """The files below `folder`, as many as fit into one file; returns those that did not."""
    left_out: list[str] = []
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []
    if not files:
        return left_out
    room = MAX_FILE_BYTES - (1 << 20)
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            name = path.relative_to(folder).as_posix()
            room -= path.stat().st_size  # without what compression saves, which is little for plots
            if room < 0:
                left_out.append(name)
            else:
                tar.add(path, name)
    return left_out


def shorten(file: Path, most: int = MAX_FILE_BYTES - (1 << 20)) -> None:
    """A log that is too long loses its middle."""
    if not file.exists() or file.stat().st_size <= most:
        return
    with file.open("rb+") as log:
        begin = log.read(most // 2)
        log.seek(-(most // 2), 2)
        end = log.read()
        log.seek(0)
        log.truncate()
        log.write(begin + b"\n... here the log was too long ...\n" + end)


def faults_of(folder: Path) -> list[str]:
    """Why the folder, as it is, would not come back whole."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    faults = [f"{len(files)} files, more than {MAX_FILES}"] if len(files) > MAX_FILES else []
    for path in files:
        parts = path.relative_to(folder).parts
        if len(parts) > MAX_DEPTH + 1:
            faults.append(f"{path}: more than {MAX_DEPTH} folders deep")
        if not all(NAME.fullmatch(part) for part in parts):
            faults.append(f"{path}: its name has other characters than letters, digits, '.', '_' and '-'")
        if path.stat().st_size > MAX_FILE_BYTES:
            faults.append(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB")
    return faults


def collect(folder: Path, results: Path) -> list[Path]:
    """Files what came back from a machine as `gpu-CARD-DATE.*`; benches' own files as `gpu-CARD-DATE.NAME`. A later call's
    take the place of those of the same run; another run of that day is numbered. Raises `ValueError`, `OSError`."""
    document, contents = load(folder / STATE), _contents(folder / FILES)
    stem, number = document.name, 1
    while (found := results / f"{stem}.json").exists() and load(found).run != document.run:
        number += 1
        stem = f"{document.name}-{number}"
    results.mkdir(parents=True, exist_ok=True)
    written = []
    for name, ending in ((STATE, "json"), (PAGE, "md"), (HARDWARE, "toml")):
        if (folder / name).exists():
            written.append(Path(shutil.copyfile(folder / name, results / f"{stem}.{ending}")))
    if (folder / LOG).exists():
        written.append(results / f"{stem}.log.gz")
        written[-1].write_bytes(gzip.compress((folder / LOG).read_bytes(), mtime=0))
    for name, content in contents.items():
        written.append(results / f"{stem}.{name}")
        written[-1].write_bytes(content)
    return written


def _contents(archive: Path) -> dict[str, bytes]:
    """Contents of its files, by their names without folders; of no archive nothing."""
    if not archive.exists():
        return {}
    with opened(archive) as tar:
        files = [(Path(member.name).name, tar.extractfile(member)) for member in tar.getmembers()]
        return {name: file.read() for name, file in files if file is not None}


# ------------------------------------------------------------------------------------------------ rows of parts


def rows_of(part: str, place: Place) -> list[Row]:
    """What a part has left, also where it was ended."""
    try:
        if part == "tests":
            return rows_of_tests(place.tests)
        if part == "profile":
            return rows_of_hardware(place.hardware)
        if part in BENCHES:
            files = sorted(place.results(part).glob("*.json"))
            return [row for file in files for row in rows_of_bench(file)]
        return [json.loads(line) for line in place.rows(part).read_text().splitlines()]
    except (OSError, ValueError, ElementTree.ParseError):
        return []


def rows_of_tests(file: Path) -> list[Row]:
    (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    rows: list[Row] = [{"what": "all", **counts}]
    for case in suite.iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").splitlines()
                rows.append({"what": f"{kind}: {case.get('name')}", "why": (message or [""])[0][:200]})
    return rows


def rows_of_bench(file: Path) -> list[Row]:
    document = json.loads(file.read_text())
    name = file.stem.partition("-2")[0]
    rows = document.get("rows") or document.get("measured") or []
    found = [{"bench": name, **row} for row in rows]
    if "weights_bytes" in document:
        found.append({"bench": "weights, bytes", **document["weights_bytes"]})
    return found


def rows_of_hardware(file: Path) -> list[Row]:
    plain = tomllib.loads(file.read_text())
    measured = plain.pop("measured", {})
    rows = [{"what": key, "value": value} for key, value in plain.items()]
    return rows + [{"model": name, **costs} for name, by_ranks in measured.items() for costs in by_ranks.values()]
