"""Which tests are fast, and that these reach nothing outside of their own process.

Nobody marks a test as fast: it is one if neither its module, nor a fixture that it uses, nor anything that those import at
their top can start a process, serve a port or run a model, and if it is not marked slow. While such a test runs, whatever
of that it does all the same ends it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

MODELS = frozenset({"torch"})
OUTSIDE = frozenset({"subprocess", "multiprocessing", "uvicorn", "ucxx", "matplotlib"})
"""What reaches other processes and ports: a test that needs them may hang on time. matplotlib looks for fonts with one when
it is imported on a machine for the first time."""

CACHE_KEY = "tideway/imports"
"""In pytest's own cache."""

_FORBIDDEN_EVENTS = frozenset(
    {
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
        "socket.bind",
        "socket.connect",
    }
)


class NotFastError(Exception):
    """A test of the fast set did what none of them may."""


def needs(item: pytest.Item) -> frozenset[str]:
    """What of MODELS and OUTSIDE the test's module and its fixtures import, themselves or through others."""
    modules = {item.path}
    definitions = item._fixtureinfo.name2fixturedefs if hasattr(item, "_fixtureinfo") else {}
    for name in definitions:
        if (file := _own(definitions[name][-1].func.__module__)) is not None:
            modules.add(file)
    return frozenset().union(*(imported(path) for path in modules))


@functools.cache
def _own(module: str) -> Path | None:
    """The file of a module of these tests."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file is not None and Path(file).is_relative_to(REPOSITORY / "tests") else None


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """What of MODELS and OUTSIDE comes with an import of this file."""
    seen, to_read, found = {path}, [path], set[str]()
    while to_read:
        names, others = _direct(to_read.pop())
        found |= names
        to_read += others - seen
        seen |= others
    return frozenset(found)


@functools.cache
def _direct(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """What of MODELS and OUTSIDE a file itself imports, and which files of this repository."""
    names = _imports(path)
    parts = (name.split(".") for name in names)
    modules = {".".join(one[:length]) for one in parts for length in range(1, len(one) + 1)}
    files = frozenset(file for file in map(_file, modules) if file is not None)
    return (MODELS | OUTSIDE) & modules, files


_known: dict[str, list[Any]] = {}
"""Path -> size and time of a file, and what it imports: to read all of them takes seconds, in each process of a test run."""
_new: set[Path] = set()


def remember(config: pytest.Config) -> None:
    """What an earlier run found."""
    if hasattr(config, "cache"):
        _known.update(config.cache.get(CACHE_KEY, {}))


def keep(config: pytest.Config) -> None:
    if hasattr(config, "cache") and _new:
        config.cache.set(CACHE_KEY, _known)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Modules that are imported outside of functions."""
    status = path.stat()
    version = [status.st_size, status.st_mtime_ns]
    known = _known.get(str(path))
    if known is None or known[0] != version:
        known = _known[str(path)] = [version, sorted(_read_imports(path))]
        _new.add(path)
    return frozenset(known[1])


def _read_imports(path: Path) -> set[str]:
    names: set[str] = set()
    to_visit: list[ast.AST] = [ast.parse(path.read_text())]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            to_visit.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "handlers", "finalbody"):
                to_visit.extend(getattr(node, block, ()))
    return names


@functools.cache
def _file(module: str) -> Path | None:
    path = REPOSITORY.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


_running: list[str] = []
"""The fast test that runs, if one does."""


@functools.cache
def _install() -> None:
    """Once: an audit hook cannot be detached again."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _running:
        return
    if event in _FORBIDDEN_EVENTS or (event == "import" and arguments[0] in MODELS | {"ucxx"}):
        raise NotFastError(
            f"{_running[0]} is in the fast set by what it imports, yet did this: {event} {arguments[0]!r}. "
            "Import at the top what it needs for that, or mark it slow."
        )


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Within, this process starts no other, opens no port and imports no torch: NotFastError where it would."""
    _install()
    _running.append(name)
    try:
        yield
    finally:
        _running.clear()
