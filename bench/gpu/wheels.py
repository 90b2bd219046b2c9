"""Packages that a bare CUDA machine lacks, in one archive, for `make gpu` where no index can be reached.

    python -m bench.gpu.wheels [--python 3.12] [--cuda 13] [--arch 9.0a] [--output .tideway/gpu/site.tar.xz]

What such a machine has is in machine_packages.txt; what Tideway needs in pyproject.toml, in the versions of constraints.txt.
FlashInfer comes with its modules compiled, since nothing is compiled there, and without what compiling them needs. For that
nvcc is needed here (services/worker/attention/flashinfer_modules.py), and minutes the first time. Exit status: 1 where
pip or the compiler fails, or archive and checkout together are larger than such a machine takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from bench.gpu.runner import MADE_FOR

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVE = REPOSITORY / ".tideway/gpu/site.tar.xz"
MACHINE_PACKAGES = Path(__file__).with_name("machine_packages.txt")
MAX_BYTES = 60 << 20
"""Most bytes of the archive and the checkout together; such a machine takes 64 MiB."""
MAX_TREE_BYTES = 34 << 20

TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-rerunfailures", "pytest-timeout", "pytest-xdist", "hypothesis")
CARRIED_ANYWAY = ("protobuf", "prometheus-client")
"""There, but in which version is not known, and it matters."""
LEFT_BEHIND = {
    "flash-attn-4": "92 MB with its compiler; FlashInfer computes prompts too",
    "cuda-python": "a name for packages that are there",
    "cuda-tile": "of FlashInfer's kernels that the worker does not call, as the next four",
    "nccl4py": "",
    "nvidia-cudnn-frontend": "",
    "nvidia-cutlass-dsl": "",
}
VARIANTS = ("bfloat16/128", "bfloat16/64", "bfloat16/128/window", "bfloat16/64/window")
"""Variants of attention modules: what the parts of `make gpu` compute, and the tests on a device."""
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
LEFT_OUT = (
    "*.a", "*.la", "*.h", "*.hpp", "*.cuh", "*.pyi", "*perftest*", "libucx/bin/*", "*/__pycache__/*",
    "flashinfer/data/cutlass/*", "flashinfer/data/cccl/*", "flashinfer/data/include/*", "flashinfer/data/spdlog/*",
    "flashinfer/data/csrc/*",
)  # fmt: skip
KEPT = ("flashinfer/data/csrc/batch_decode*", "flashinfer/data/csrc/batch_prefill*")
"""FlashInfer fills these in when it looks for an attention module, also for one that is there."""


@dataclass(frozen=True)
class Target:
    python: str
    """"3.12" """
    cuda: int

    @property
    def environment(self) -> dict[str, str]:
        """Environment of markers in requirements."""
        return {
            "python_version": self.python, "python_full_version": f"{self.python}.0", "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "sys_platform": "linux", "os_name": "posix",
            "platform_system": "Linux", "platform_machine": "x86_64",
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is missing


def machine_packages() -> set[str]:
    return {canonicalize_name(name) for name in MACHINE_PACKAGES.read_text().split()}


def constraints() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", "\n".join(lines), re.MULTILINE))


def wanted(cuda: int) -> list[Requirement]:
    """What pyproject.toml names for a worker on a GPU and with it a whole Tideway, and for its tests."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, to_read = [], [*project["dependencies"], *extras["cuda"], *TEST_PACKAGES]
    while to_read:
        requirement = Requirement(to_read.pop(0).replace("ucxx-cu12", f"ucxx-cu{cuda}"))
        if requirement.name == project["name"]:
            to_read += [text for extra in sorted(requirement.extras) for text in extras[extra]]
        else:
            found.append(requirement)
    return found


def missing(
    roots: Iterable[Requirement],
    there: set[str],
    requires: Callable[[Mapping[str, str]], Mapping[str, list[str]]],
    target: Target,
) -> dict[str, str]:
    """What must be brought: for each package the versions that may be taken (`==1.2`), as constraints.txt pins them and as
    the others ask. `requires`: for packages and versions what each of them needs, as wheels' metadata say it."""
    pins = {canonicalize_name(name): f"=={version}" for name, version in constraints().items()}
    # Its release for another CUDA is the same release.
    pins |= {name.replace("cu12", f"cu{target.cuda}"): pin for name, pin in pins.items() if name.endswith("cu12")}
    found: dict[str, SpecifierSet] = {}
    to_look_at = [*roots, *map(Requirement, CARRIED_ANYWAY)]
    while to_look_at:
        new = set()
        for requirement in to_look_at:
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({**target.environment, "extra": ""}):
                continue
            if name in LEFT_BEHIND or (name in there and name not in CARRIED_ANYWAY):
                continue
            versions = (
                SpecifierSet(pins[name]) if name in pins else found.get(name, SpecifierSet()) & requirement.specifier
            )
            if found.get(name) != versions:
                found[name] = versions
                new.add(name)
        needs = requires({name: str(found[name]) for name in sorted(new)}) if new else {}
        to_look_at = [Requirement(text) for texts in needs.values() for text in texts]
    return {name: str(versions) for name, versions in found.items()}


def pip_options(target: Target) -> list[str]:
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    return ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
            "--python-version", target.python, *platforms]  # fmt: skip


def requires_of_index(target: Target) -> Callable[[Mapping[str, str]], Mapping[str, list[str]]]:
    """Asks the package index, by pip."""

    def requires(versions: Mapping[str, str]) -> Mapping[str, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "install", *pip_options(target), "--dry-run", "--ignore-installed",
                       "--report", f"{folder}/report.json", "--target", f"{folder}/site",
                       *(name + versions[name] for name in versions)]  # fmt: skip
            subprocess.run(command, check=True)
            report = json.loads(Path(folder, "report.json").read_text())
        return {item["metadata"]["name"]: item["metadata"].get("requires_dist", []) for item in report["install"]}

    return requires


# ------------------------------------------------------------------------------------------------------- archive


def fetch(folder: Path, versions: Mapping[str, str], target: Target) -> None:
    command = [sys.executable, "-m", "pip", "install", *pip_options(target), "--no-compile", "--target", str(folder),
               *(name + versions[name] for name in versions)]  # fmt: skip
    subprocess.run(command, check=True)


def build_modules(folder: Path, versions: Mapping[str, str], arches: list[str], work: Path) -> None:
    """Compiles FlashInfer's modules into `folder`, a site with FlashInfer in it. Objects stay in `work` for the next time.

    The FlashInfer that writes their sources and calls the compiler runs here, so it is one for this Python and its torch."""
    site = work / "site"
    own = Target(f"{sys.version_info.major}.{sys.version_info.minor}", 0)
    if not list(site.glob(f"flashinfer_python-{versions['flashinfer-python'].removeprefix('==')}.*")):
        fetch(site, {name: versions[name] for name in ("flashinfer-python", "apache-tvm-ffi")}, own)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(site)])
    environment.setdefault("FLASHINFER_WORKSPACE_BASE", str(work))
    command = [sys.executable, "-m", "services.worker.attention.flashinfer_modules", "--output",
               str(folder / "flashinfer/data/aot"), "--only", *VARIANTS]  # fmt: skip
    subprocess.run([*command, *(word for arch in arches for word in ("--arch", arch))], env=environment, check=True)


def is_left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT) and not any(fnmatch(name, pattern) for pattern in KEPT)


def archive(folder: Path, output: Path) -> dict[str, int]:
    """Returns the bytes of each top-level entry, before compression. Wheels have copies of shared libraries under other
    names instead of links: here they are links. `output` is there only when it is whole."""
    sizes: dict[str, int] = {}
    seen: dict[bytes, str] = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.unfinished")
    with tarfile.open(unfinished, "w:xz", preset=9) as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            top = name.partition("/")[0]
            if not path.is_file() or is_left_out(name):
                continue
            digest = hashlib.sha256(path.read_bytes()).digest() if path.stat().st_size > 1 << 16 else b""
            first = seen.setdefault(digest, name) if digest else name
            entry = tar.gettarinfo(path, name)
            if first != name:
                entry.type, entry.linkname, entry.size = tarfile.SYMTYPE, os.path.relpath(first, Path(name).parent), 0
                tar.addfile(entry)
                continue
            sizes[top] = sizes.get(top, 0) + entry.size
            with path.open("rb") as content:
                tar.addfile(entry, content)
    unfinished.replace(output)
    return sizes


def tree_bytes() -> int:
    """Bytes of the checkout without .git and what git ignores: what is carried to a machine beside the archive."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
    paths = {REPOSITORY / name for name in names if name}
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def python_version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 3.12")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--python", type=python_version, default="3.12", help="of the machine (%(default)s)")
    parser.add_argument("--cuda", type=int, default=13, help="of its torch (%(default)s)")
    parser.add_argument("--arch", action="append", help="compute capability of its GPUs, may be repeated (9.0a)")
    parser.add_argument("--no-modules", action="store_true", help="nothing compiled: for a machine without a GPU")
    parser.add_argument("--output", type=Path, default=ARCHIVE)
    options = parser.parse_args()
    target = Target(options.python, options.cuda)
    try:
        versions = missing(wanted(target.cuda), machine_packages(), requires_of_index(target), target)
        with tempfile.TemporaryDirectory(prefix="tideway-wheels-") as folder:
            fetch(Path(folder), versions, target)
            if not options.no_modules:
                build_modules(Path(folder), versions, options.arch or ["9.0a"], REPOSITORY / ".tideway/gpu/build")
            Path(folder, MADE_FOR).write_text(f"{target.python}\n")
            sizes = archive(Path(folder), options.output)
    except subprocess.CalledProcessError as error:  # it has said why
        print(f"no archive: {error.cmd[2]} ended with status {error.returncode}", file=sys.stderr)
        return 1
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size > 1 << 20:
            print(f"{size / 2**20:8.1f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.1f} MiB  all, of {', '.join(sorted(versions))}")
    archive_bytes, checkout_bytes = options.output.stat().st_size, tree_bytes()
    both = archive_bytes + checkout_bytes
    print(f"{options.output}: {archive_bytes / 2**20:.1f} MiB for Python {options.python} and CUDA {options.cuda}")
    print(f"with the checkout, {checkout_bytes / 2**20:.1f} MiB: {both / 2**20:.1f} of {MAX_BYTES / 2**20:.0f} MiB")
    if both > MAX_BYTES:
        print("archive and checkout together are too large", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
