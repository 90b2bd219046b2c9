"""What is carried to a CUDA machine that reaches no index: that nothing is missing there, and that it is small enough."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu import wheels
from bench.gpu.runner import unpacked
from bench.gpu.wheels import (
    ARCHIVE,
    LEFT_BEHIND,
    MAX_BYTES,
    MAX_TREE_BYTES,
    REPOSITORY,
    Target,
    archive,
    is_left_out,
    machine_packages,
    missing,
    tree_bytes,
    wanted,
)

TARGET = Target("3.12", 13)
OURS = {"shared", "services", "tideway", "bench", "tests"}
NOT_INSTALLED_HERE = {
    "flashinfer": {"flashinfer-python"}, "flash_attn": {"flash-attn-4"}, "ucxx": {"ucxx-cu13"}, "libucx": {"libucx-cu13"},
}  # fmt: skip
IN_ANOTHER_ENVIRONMENT = REPOSITORY / "services/worker/engines/vllm"
"""Runs beside vLLM, which has an environment of its own."""
ONLY_THERE = {
    "flashinfer-python": ["apache-tvm-ffi<0.2,>=0.1.6", "torch", "nvidia-cutlass-dsl>=4.5.0", "einops"],
    "ucxx-cu13": ["libucxx-cu13==0.52.*", "numpy", "rmm-cu13==26.10.*", 'cudf-cu13; extra == "test"'],
    "libucxx-cu13": ["libucx-cu13>=1.19.0", "librmm-cu13==26.10.*"], "librmm-cu13": ["rapids-logger==0.2.*"],
}  # fmt: skip
"""Some of their needs, as their wheels for CUDA 13 have them."""


def requires(versions: Mapping[str, str]) -> Mapping[str, list[str]]:
    """Requirements as the index says them, from what is installed here."""
    found = {}
    for name in versions:
        try:
            found[name] = ONLY_THERE.get(name) or importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            found[name] = []
    return found


@pytest.fixture(scope="module")
def carried() -> dict[str, str]:
    return missing(wanted(TARGET.cuda), machine_packages(), requires, TARGET)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files_of(module: str) -> list[Path]:
    """Those that run when it is imported, or called with `python -m`."""
    path = REPOSITORY / module.replace(".", "/")
    return [file for file in (path.with_suffix(".py"), path / "__init__.py", path / "__main__.py") if file.is_file()]


def texts_of_the_command() -> str:
    return "".join(path.read_text() for path in (REPOSITORY / "bench/gpu").glob("*.py") if path.name != "wheels.py")


def what_make_gpu_imports() -> dict[str, set[str]]:
    """By name of a module at the top level, the files that import it: of the services and the command, of the benches that
    `make gpu` runs, of its tests, and of what those import here."""
    text = texts_of_the_command()
    benches, tests = set(re.findall(r'"(bench(?:\.\w+)+)"', text)), set(re.findall(r'"(tests/[\w/]+\.py)"', text))
    assert {
        "bench.gpu.parts",
        "bench.fidelity",
        "bench.migration",
    } <= benches and "tests/worker/test_executor.py" in tests
    to_read = [file for name in ("bench.gpu", *benches) for file in files_of(name)]
    for test in map(REPOSITORY.joinpath, sorted(tests)):
        to_read += [test, *(folder / "conftest.py" for folder in test.parents if (folder / "conftest.py").is_file())]
    for package in ("shared", "services", "tideway"):
        to_read += (REPOSITORY / package).rglob("*.py")
    seen: set[Path] = set()
    found: dict[str, set[str]] = {}
    while to_read:
        file = to_read.pop()
        if file in seen:
            continue
        seen.add(file)
        if file.is_relative_to(IN_ANOTHER_ENVIRONMENT):
            continue
        for name in imports(file):
            top = name.partition(".")[0]
            if top in OURS:
                to_read += files_of(name)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, set()).add(file.relative_to(REPOSITORY).as_posix())
    return found


def test_every_import_of_make_gpu_resolves_there(carried: dict[str, str]) -> None:
    there = machine_packages() | set(carried)
    packages = importlib.metadata.packages_distributions()
    found = what_make_gpu_imports()
    assert {"msgspec", "fastapi", "pytest", "torch", "flashinfer"} <= set(found)
    for name, files in found.items():
        names = NOT_INSTALLED_HERE.get(name) or {canonicalize_name(known) for known in packages.get(name, ())}
        assert names, f"no package is known here that has {name}, imported by {sorted(files)}"
        if not names & set(LEFT_BEHIND):
            assert names & there, f"{sorted(files)} import {name}, and {names} is neither there nor carried"


def test_what_is_carried_is_pinned_and_is_no_more_than_is_missing(carried: dict[str, str]) -> None:
    assert carried["flashinfer-python"] == "==0.6.16" and carried["ucxx-cu13"] == "==0.52.0"
    assert carried["libucx-cu13"] == "==1.21.0" and carried["fastapi"] == "==0.165.0"
    assert {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "rapids-logger"} <= set(carried)
    assert re.match(r"==\d", carried["pydantic-core"]), "as pydantic asks for it"
    assert not {"torch", "transformers", "numpy", "rich", "einops", "cudf-cu13", *LEFT_BEHIND} & set(carried)
    assert all("cu12" not in name for name in carried)


def test_a_package_that_others_narrow_is_taken_as_they_ask() -> None:
    def by_hand(versions: Mapping[str, str]) -> Mapping[str, list[str]]:
        needs = {"msgspec": ["a>=1"], "a": ["b>=2", 'c; python_version < "3.12"'], "b": ["a<3", 'd; extra == "x"']}
        return {name: needs.get(name, []) for name in versions}

    found = missing([], set(), by_hand, TARGET)
    assert set(found) == {"protobuf", "prometheus-client"}, "they are carried even where they are"
    (root,) = (requirement for requirement in wanted(13) if requirement.name == "msgspec")
    found = missing([root], {"protobuf", "prometheus-client"}, by_hand, TARGET)
    assert found["msgspec"].startswith("==") and found["b"] == ">=2" and set(found["a"].split(",")) == {">=1", "<3"}
    assert not {"c", "d"} & set(found)


def test_the_archive_has_each_library_once_and_nothing_that_compiling_needs(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    library = bytes(range(256)) * 300
    contents = {
        "lib/ucx/libx.so": library, "lib/ucx/libx.so.0": library, "lib/libx.so.0.0.0": library, "lib/libx.a": b"1",
        "lib/x.h": b"1", "lib/y.py": b"1", "bin/ucx_perftest": b"1", "flashinfer/data/cutlass/a.py": b"1",
        "flashinfer/data/include/b.cuh": b"1", "flashinfer/data/csrc/norm.cu": b"1",
        "flashinfer/data/csrc/batch_prefill_customize_config.jinja": b"1", "flashinfer/data/aot/norm/norm.so": b"2",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    sizes = archive(folder, tmp_path / "site.tar.xz")
    assert sizes == {"lib": len(library) + 1, "flashinfer": 2}
    with tarfile.open(tmp_path / "site.tar.xz") as tar:
        tar.extractall(tmp_path / "again", filter="tar")
    found = {p.relative_to(tmp_path / "again").as_posix() for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert found == {
        "lib/ucx/libx.so", "lib/ucx/libx.so.0", "lib/libx.so.0.0.0", "lib/y.py", "flashinfer/data/aot/norm/norm.so",
        "flashinfer/data/csrc/batch_prefill_customize_config.jinja",
    }  # fmt: skip
    assert (tmp_path / "again/lib/ucx/libx.so.0").read_bytes() == library


def test_an_interrupted_run_leaves_the_archive_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/y.py").write_bytes(b"1")
    archive(tmp_path / "site", tmp_path / "site.tar.xz")
    before = (tmp_path / "site.tar.xz").read_bytes()

    def interrupted(_name: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "is_left_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        archive(tmp_path / "site", tmp_path / "site.tar.xz")
    assert (tmp_path / "site.tar.xz").read_bytes() == before


@pytest.mark.parametrize("version", ["3", "2.7", "3.12.1", "python3.12", ""])
def test_a_python_is_named_by_its_minor_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wheels", "--python", version])
    with pytest.raises(SystemExit, match="2"):
        wheels.main()


def test_the_archive_says_for_which_python_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "missing", lambda *_: {})
    monkeypatch.setattr(wheels, "fetch", lambda *_: None)
    output = tmp_path / "site.tar.xz"
    monkeypatch.setattr(sys, "argv", ["wheels", "--no-modules", "--python", "3.7", "--output", str(output)])
    assert wheels.main() == 0
    with pytest.raises(ValueError, match=r"is for Python 3\.7, and this is 3\."):
        unpacked(output)


def test_what_pip_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["wheels", "--output", str(tmp_path / "site.tar.xz")])
    assert wheels.main() == 1
    assert capsys.readouterr().err == "no archive: pip ended with status 1\n" and not list(tmp_path.iterdir())


def test_checkout_and_archive_fit_on_such_a_machine() -> None:
    checkout = tree_bytes()
    assert 10 << 20 < checkout < MAX_TREE_BYTES, f"{checkout / 2**20:.1f} MiB: results and models are the largest"
    assert ARCHIVE.relative_to(REPOSITORY).as_posix() in texts_of_the_command(), "what is written is read"
    if ARCHIVE.exists():
        assert checkout + ARCHIVE.stat().st_size < MAX_BYTES


def test_the_archive_that_was_made_has_all_its_modules_and_no_compilers_food() -> None:
    if not ARCHIVE.exists():
        pytest.skip("make gpu-wheels has not been run here")
    with tarfile.open(ARCHIVE) as tar:
        names = set(tar.getnames())
    assert not any(map(is_left_out, names))
    modules = {name.split("/")[3] for name in names if name.startswith("flashinfer/data/aot/")}
    assert {"norm", "rope", "page", "silu_and_mul"} < modules
    for kind in ("batch_decode", "batch_prefill"):
        for dim in (64, 128):
            assert any(name.startswith(kind) and f"head_dim_qk_{dim}_" in name for name in modules), (kind, dim)
