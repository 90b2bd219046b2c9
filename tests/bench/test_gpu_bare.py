"""`make gpu` on a machine with the packages of a lent one alone: a fresh environment, a copy of the tree, the archive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu import results
from bench.gpu.order import PARTS
from bench.gpu.wheels import machine_packages
from tests.stalls import whatever_the_machine_does

REPOSITORY = Path(__file__).resolve().parents[2]
WANTED = (
    "torch==2.13.0", "transformers==5.17.0", "huggingface-hub<2", "safetensors", "numpy", "pytest", "pytest-timeout",
    "pytest-xdist", "hypothesis", "httpx", "prometheus-client", "protobuf", "pyyaml", "uvloop", "tokenizers", "jinja2",
    "typer<0.25", "rich", "matplotlib", "packaging", "setuptools", "nvidia-ml-py", "einops", "tabulate", "ninja", "requests",
)  # fmt: skip
"""The machine's packages that parts need; torch of a version that has a small build for CPUs. Bounds are where newer
ones need what is not there."""
ALLOWED_STATES = (results.DONE, results.LEFT_OUT)
BUDGET_S = 2400.0


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds packages of bench/gpu/machine_packages.txt, and no others."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    _run([python, "-m", "pip", "install", "--quiet", *WANTED])
    listed = _run([python, "-m", "pip", "list", "--format=freeze"])
    names = {canonicalize_name(line.partition("==")[0]) for line in listed.splitlines()}
    if others := names - machine_packages():
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *sorted(others)])
    return python


def _run(command: Sequence[str | Path], **options: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return str(done.stdout)


def _copy_of_the_tree(folder: Path) -> Path:
    """What git tracks, as it is in the working tree: no more than that travels."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY,
                           capture_output=True, text=True, check=True).stdout  # fmt: skip
    packed = folder.with_suffix(".tar")
    with tarfile.open(packed, "w") as tar:
        for name in filter(None, names.split("\0")):
            if (REPOSITORY / name).exists() and not name.startswith("bench/results/"):
                tar.add(REPOSITORY / name, name)
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="tar")
    packed.unlink()
    return folder


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_part_runs_to_its_end_with_what_a_lent_machine_has(bare_python: Path, tmp_path: Path) -> None:
    tree, output = _copy_of_the_tree(tmp_path / "tree"), tmp_path / "out"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _run([sys.executable, "-m", "bench.gpu.wheels", "--python", version, "--no-modules",
          "--output", tree / ".tideway/gpu/site.tar.xz"], cwd=REPOSITORY)  # fmt: skip
    text = _run([bare_python, "-m", "bench.gpu", "--quick", "--output", output, "--budget-s", BUDGET_S], cwd=tree)
    with whatever_the_machine_does():
        check(text, tree, output)


def check(text: str, tree: Path, output: Path) -> None:
    """`text`: what was printed."""
    assert text.startswith("DONE")
    found = results.load(output / results.STATE)
    assert set(found.outcomes) == {part.name for part in PARTS}
    for outcome in found.outcomes.values():
        assert outcome.state in ALLOWED_STATES, f"{outcome.part}: {outcome}"
        assert outcome.state == results.DONE or outcome.why
        assert outcome.rows or outcome.state == results.LEFT_OUT, outcome.part
    left_out = {name for name, outcome in found.outcomes.items() if outcome.state == results.LEFT_OUT}
    assert left_out <= {"sanitizer"}, "all else runs on a CPU too"
    assert results.faults_of(output) == []
    for package in ("ucxx", "flashinfer"):
        assert re.search(rf"\| {package} \| [\d.]+ \|", text), f"{package} is the archive's, and can be imported"
    assert not list(tree.glob("*.json")), "results go to the folder that was named alone"
