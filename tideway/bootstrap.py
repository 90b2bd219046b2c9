"""Makes .venv with what Tideway needs. Run by `make`, by the system's Python, before anything is installed.

Uses the standard library alone, and only syntax that older Pythons can read, so that they can say what is missing.
A second run finds the stamp, which holds a hash of pyproject.toml and of all versions, and ends at once.
Exit codes: 0 done, 1 the installation failed, 2 the machine lacks something (one sentence says what).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import html.parser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
NEWER_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
LINE_INTERVAL_S = 10.0
"""Between progress lines where the output is not a terminal."""
LONG_PHASES = ("making", "installing", "compiling")
"""What takes minutes on a busy machine without a word from the program that does it."""
TOLD_AGAIN = (*LONG_PHASES, "downloading")
"""What is told again every so often while it lasts. Downloads are too many for a line each at their beginning."""
DOWNLOAD_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 15


class SetupError(Exception):
    """Something the person at the keyboard must change; the message is one for them."""


# ------------------------------------------------------------------------------------------------------- stamp


def stamp_hash() -> str:
    """Changes whenever what should be installed does, or the interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt", "requirements.lock"):
        digest.update((REPOSITORY / name).read_bytes())
    return digest.hexdigest()


def is_installed(venv: Path, extras: set[str]) -> bool:
    """Whether the last installation is still what is asked for."""
    try:
        stamp = json.loads((venv / "stamp.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("hash") == stamp_hash() and extras <= set(stamp.get("extras", ())) and python_of(venv).exists()


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


# ------------------------------------------------------------------------------------------------- interpreter


def use_a_new_enough_python() -> None:
    """Replaces this process by a newer Python if this one is too old and a newer one is installed."""
    if sys.version_info >= MINIMUM:
        return
    for name in NEWER_PYTHONS:
        path = shutil.which(name)
        if path:
            os.execv(path, [path, "-I", str(Path(__file__).resolve()), *sys.argv[1:]])
    raise SetupError(
        f"Tideway needs Python 3.11 or newer, and {sys.executable or 'python3'} is Python {python_version()}. Install one "
        "(Debian 12, Ubuntu 24.04 and later have it: apt install python3) or name one: make PYTHON=/path/to/python3.12 up"
    )


def python_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def make_venv(venv: Path) -> list[str]:
    """Makes the environment anew; returns the command that is its pip.

    Debian ships Python without ensurepip. There the system's pip serves, else a pip fetched from the package index.
    """
    shutil.rmtree(venv, ignore_errors=True)
    try:
        import venv as venv_module
    except ImportError:
        raise SetupError("Python's venv module is missing: apt install python3-venv") from None
    venv_module.create(venv, symlinks=True, with_pip=False)
    python = str(python_of(venv))
    if _succeeds([python, "-m", "ensurepip", "--default-pip"]):
        return [python, "-m", "pip"]
    if _succeeds([sys.executable, "-m", "pip", "--python", python, "--version"]):
        return [sys.executable, "-m", "pip", "--python", python]
    try:
        wheel = fetch_pip(venv)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"this Python has no pip, and none could be fetched ({error}). Install it: apt install python3-venv"
        ) from None
    # A wheel is a zip file, and Python runs what lies in one.
    return [python, str(wheel / "pip")]


def pip_of(venv: Path) -> list[str] | None:
    """The pip of an environment made earlier by this Python; None if there is none that works."""
    python = str(python_of(venv))
    same = f"import sys, pip; sys.exit(sys.version != {sys.version!r})"
    return [python, "-m", "pip"] if _succeeds([python, "-c", same]) else None


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def _index_url() -> str:
    """Without pip there is no pip's default either: the index is the one that PIP_INDEX_URL names."""
    return os.environ.get("PIP_INDEX_URL", "").rstrip("/")


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if tag == "a" and name == "href" and value]


def newest_pip_wheel(page: str) -> tuple[str, str]:
    """(link, sha256) of the newest final release on a PEP 503 index page; ValueError if there is none."""
    parser = _Links()
    parser.feed(page)
    found = []
    for link in parser.links:
        match = re.search(r"/pip-(\d+(?:\.\d+)*)-py3-none-any\.whl#sha256=([0-9a-f]{64})", "/" + link)
        if match:
            found.append((tuple(int(part) for part in match[1].split(".")), link.partition("#")[0], match[2]))
    if not found:
        raise ValueError("the index lists no pip")
    _, link, sha256 = max(found)
    return link, sha256


def fetch_pip(folder: Path) -> Path:
    """Downloads pip's wheel into `folder`; OSError or ValueError if that fails."""
    if not _index_url():
        raise ValueError("PIP_INDEX_URL names no index")
    page_url = _index_url() + "/pip/"
    request = urllib.request.Request(page_url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_S) as reply:
        link, sha256 = newest_pip_wheel(reply.read().decode())
    with urllib.request.urlopen(urllib.parse.urljoin(page_url, link), timeout=DOWNLOAD_TIMEOUT_S) as reply:
        wheel = reply.read()
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise ValueError("the downloaded pip has the wrong checksum")
    path = folder / link.rpartition("/")[2]
    path.write_bytes(wheel)
    return path


# ---------------------------------------------------------------------------------------------------- progress


def phase_of(line: str) -> str | None:
    """What a line of pip's output says is going on, in a few words; None if nothing worth showing."""
    match = re.match(r"\s*Collecting ([A-Za-z0-9._-]+)", line)
    if match:
        return f"choosing versions: {match[1]}"
    match = re.match(r"\s*Downloading (\S+) \((\d+(?:\.\d+)? (?:MB|GB))\)", line)
    if match:
        name = match[1].rpartition("/")[2].split("-")[0]
        return f"downloading {name} ({match[2]})"
    match = re.match(r"Installing collected packages: (.*)", line)
    if match:
        return f"installing {len(match[1].split(','))} packages"
    return None


def num_installed(venv: Path, since_s: float) -> int:
    """The number of packages that pip completed in `venv` after a Unix time; it may be one too low while pip works."""
    number = 0
    for folder in venv.glob("lib/python*/site-packages/*.dist-info"):
        with contextlib.suppress(OSError):  # pip just took the older version away
            number += folder.stat().st_mtime >= since_s
    return number


class Progress:
    """One line with a clock that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self, venv: Path) -> None:
        self._venv = venv
        self._is_terminal = sys.stdout.isatty()
        self._started_s, self._began_s = time.monotonic(), time.time()
        self._shown_s = self._started_s - LINE_INTERVAL_S
        self._phase = "starting"
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._run_clock, daemon=True)
        self._clock.start()

    def show(self, phase: str) -> None:
        self._phase = phase
        now = time.monotonic()
        if not self._is_terminal and (now - self._shown_s >= LINE_INTERVAL_S or phase.startswith(LONG_PHASES)):
            print(f"  {phase}", flush=True)
            self._shown_s = now

    def end(self) -> float:
        """Seconds since the beginning."""
        self._ended.set()
        self._clock.join()
        if self._is_terminal:
            print("\r\x1b[K", end="", flush=True)
        return time.monotonic() - self._started_s

    def _run_clock(self) -> None:
        while not self._ended.wait(0.2 if self._is_terminal else LINE_INTERVAL_S):
            text, elapsed_s = self._phase, time.monotonic() - self._started_s
            # pip says nothing for minutes, but each package that is complete has its metadata.
            if text.startswith("installing"):
                text += f", {num_installed(self._venv, self._began_s)} complete"
            if self._is_terminal:
                width = shutil.get_terminal_size().columns
                print("\r\x1b[K" + f"  {elapsed_s:.0f} s · {text}"[: width - 1], end="", flush=True)
            elif text.startswith(TOLD_AGAIN):
                print(f"  {text} ({elapsed_s:.0f} s)", flush=True)


def explain(log: str) -> str:
    """The sentence for what made pip fail; empty if it is none of the usual things."""
    if "No space left on device" in log:
        return "the disk is full; Tideway needs about 2 GB, with a CUDA build of torch about 8 GB"
    if re.search(
        r"Python\.h: No such file|command '\S*(?:gcc|cc|g\+\+|clang|rustc|cargo)\S*' failed"
        r"|No such file or directory: '(?:gcc|cc|g\+\+|cargo)'|compiler .*(?:not found|cannot create executables)",
        log,
    ):
        return (
            "a package has no ready-made build for this machine and could not be compiled; "
            "install a compiler and Python's headers: apt install build-essential python3-dev"
        )
    if re.search(
        r"Temporary failure in name resolution|Name or service not known|Failed to establish a new connection"
        r"|Connection refused|Read timed out|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED|Network is unreachable",
        log,
    ):
        return "the package index cannot be reached; check the network, or point pip at a mirror (PIP_INDEX_URL)"
    match = re.search(r"No matching distribution found for (\S+)", log)
    if match:
        return f"there is no {match[1]} for Python {python_version()} on this machine"
    return ""


# ------------------------------------------------------------------------------------------------ installation


def locked_versions(lock: str) -> str:
    """A lock's versions as constraints, without the hashes: with these pip would take no checkout and no build of torch.
    Packages of CUDA are left out, since those follow torch's."""
    lines = re.findall(r"^[a-z0-9][^\\\n]*==[^\\\n]*", lock, re.MULTILINE)
    kept = [line.strip() for line in lines if not re.match(r"(cuda|nvidia)-|[^=]*-cu\d+==", line)]
    return "".join(line + "\n" for line in kept)


def install(pip: list[str], venv: Path, extras: set[str]) -> None:
    """Runs pip with its output in a log file and a few lines of progress here. Raises `SetupError`."""
    locked = venv / "locked.txt"
    locked.write_text(locked_versions((REPOSITORY / "requirements.lock").read_text()))
    # All services run on this machine, and the worker's extra has what they need together.
    target = f"{REPOSITORY}[{','.join(sorted({'worker', *extras}))}]"
    command = [*pip, "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    # Most modules are never imported, and what is imported is compiled then.
    command += ["--no-compile", "-c", str(REPOSITORY / "constraints.txt"), "-c", str(locked), "-e", target]
    log_path = venv / "install.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    progress = Progress(venv)
    with log_path.open("w") as log:
        log.write(" ".join(command) + "\n")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                phase = phase_of(line)
                if phase:
                    progress.show(phase)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            seconds = progress.end()
    if code != 0:
        text = log_path.read_text()
        for line in text.splitlines()[-LOG_TAIL_LINES:]:
            print(f"  | {line}", file=sys.stderr)
        reason = explain(text)
        raise SetupError(f"the installation failed: {reason or 'see the lines above'}. All of it: {log_path}")
    print(f"  installed in {seconds:.0f} s", flush=True)


def start_kernels(venv: Path) -> subprocess.Popen[bytes]:
    """Starts to compile the kernels of the CPU path, which needs no package. Where the installation fails it is left to
    itself: the next one finds what it made."""
    command = [str(python_of(venv)), "-m", "services.worker.native.building"]
    with (venv / "kernels.log").open("w") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def finish_kernels(process: subprocess.Popen[bytes], venv: Path) -> None:
    """Waits for them. Where they could not be compiled the first instance that starts tries again, and else computes
    without them."""
    if process.poll() is None:
        progress = Progress(venv)
        progress.show("compiling kernels for the CPU")
        try:
            process.wait()
        finally:
            progress.end()
    if process.returncode:
        log = venv / "kernels.log"
        print(f"  kernels for the CPU could not be compiled: it will be slower. See {log}", file=sys.stderr)


UCX_OF_CUDA_12 = ("ucxx-cu12", "libucxx-cu12", "libucx-cu12")
UCX_OF_CUDA_13 = "ucxx-cu13>=0.52"


def cuda_of_torch(venv: Path) -> int:
    """The major version of CUDA that the installed torch is made for; 0: none."""
    for file in venv.glob("lib/python*/site-packages/torch/version.py"):
        match = re.search(r"^cuda\b[^=]*= *['\"](\d+)", file.read_text(), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def match_ucx(pip: list[str], venv: Path) -> None:
    """pyproject.toml can ask for one build of UCX only; where torch is for CUDA 13 the other takes its place, which has the
    same modules. What fails here is said, and costs no more than moves of requests with their KV."""
    if cuda_of_torch(venv) < 13:
        return
    print("  taking UCX for CUDA 13", flush=True)
    with (venv / "install.log").open("a") as log:
        for command in (
            [*pip, "uninstall", "--yes", *UCX_OF_CUDA_12],
            [*pip, "install", "--no-input", "--disable-pip-version-check", UCX_OF_CUDA_13],
        ):
            if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode:
                print("  that failed: requests will not move with their KV. See " + log.name, file=sys.stderr)
                return


def check_port(words: list[str]) -> None:
    """Raises `SetupError` where the port that `tideway up` is to listen on is taken, before minutes of installing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=int(os.environ.get("TIDEWAY_PORT") or 8000))
    parser.add_argument("--host", default=os.environ.get("TIDEWAY_HOST") or "127.0.0.1")
    options, _ = parser.parse_known_args(words)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except (OSError, OverflowError) as error:
            # What else is wrong with an address, `tideway up` says better.
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise SetupError(
                    f"port {options.port} on {options.host} is taken by another program. Stop that one, or choose another "
                    f'port: make up ARGS="--port {options.port + 1}"'
                ) from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes .venv with what Tideway needs.")
    parser.add_argument("--extra", action="append", default=[], help="an optional group of pyproject.toml")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    parser.add_argument(
        "--for-up", action="store_true", help="`tideway up` comes next, with the options in the environment's UP_ARGS"
    )
    options = parser.parse_args()
    venv, extras = options.venv, set(options.extra)
    try:
        use_a_new_enough_python()
        if is_installed(venv, extras):
            return 0
        if options.for_up:
            check_port(shlex.split(os.environ.get("UP_ARGS", "")))
        print(f"Installing Tideway into {venv} (Python {python_version()})", flush=True)
        progress = Progress(venv)
        progress.show("making the environment")
        try:
            pip = pip_of(venv) or make_venv(venv)
        finally:
            progress.end()
        kernels = start_kernels(venv)
        install(pip, venv, extras)
        match_ucx(pip, venv)
        finish_kernels(kernels, venv)
        # Written last: an installation that was interrupted has none.
        (venv / "stamp.json").write_text(json.dumps({"hash": stamp_hash(), "extras": sorted(extras)}))
    except SetupError as error:
        print(f"tideway: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntideway: stopped; the next run continues", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"tideway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
