"""The command as a person types it: exit codes and sentences."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.messages.cluster import (
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelSpec,
    PlacementPlan,
)
from shared.runtime.settings import BusSettings
from tests.tideway.conftest import InThisProcess
from tideway.cluster import ModelState, view_model
from tideway.data_folder import DataFolder
from tideway.preflight import REPOSITORY


def tideway(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEWAY_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-m", "tideway", *arguments],
        cwd=REPOSITORY,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("detached", [(), ("--detach",)])
def test_a_taken_port_is_one_sentence(tmp_path: Path, detached: tuple[str, ...]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = tideway("up", "--port", port, "--data-dir", str(tmp_path), "--model", "a/b", *detached)
    assert result.returncode == 2
    lines = (result.stdout + result.stderr).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"tideway: Port {port} on 127.0.0.1 is taken")


def test_a_second_start_leaves_the_log_of_the_first(tmp_path: Path) -> None:
    data = DataFolder(tmp_path)
    data.prepare()
    data.acquire()
    try:
        (data.logs / "up.log").write_text("what the first one says")
        result = tideway("up", "--data-dir", str(tmp_path), "--detach")
    finally:
        data.release()
    assert result.returncode == 2 and result.stderr.startswith(
        f"tideway: Tideway runs here already (process {os.getpid()})"
    )
    assert (data.logs / "up.log").read_text() == "what the first one says"


def test_settings_of_the_environment_are_checked_first(tmp_path: Path) -> None:
    result = tideway("up", "--data-dir", str(tmp_path), "--model", "a/b", TIDEWAY_MAX_QUEUED="lots")
    assert (result.returncode, result.stderr) == (2, "tideway: TIDEWAY_MAX_QUEUED='lots': expected int\n")


def test_fewer_instances_at_most_than_at_the_start_are_refused(tmp_path: Path) -> None:
    result = tideway("up", "--data-dir", str(tmp_path), "--instances", "3", "--max-instances", "2")
    assert (result.returncode, result.stderr) == (2, "tideway: --max-instances 2 is fewer than --instances 3.\n")


def test_a_model_that_is_none(tmp_path: Path) -> None:
    result = tideway("up", "--data-dir", str(tmp_path), "--model", "x=./missing")
    assert result.returncode == 2 and "./missing is neither a folder nor a Hugging Face id" in result.stderr


def test_nothing_to_stop_and_nothing_to_show(tmp_path: Path, in_this_process: InThisProcess) -> None:
    result = in_this_process("down", "--data-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, f"Nothing runs on {tmp_path}.\n")
    result = in_this_process("status", "--data-dir", str(tmp_path))
    assert result.returncode == 2 and result.stderr.startswith(f"tideway: Nothing runs on {tmp_path}.")
    for arguments in (("drain", "a"), ("scale", "tide", "1"), ("top",)):
        result = in_this_process(*arguments, "--data-dir", str(tmp_path))
        assert result.returncode == 2 and result.stderr.startswith(f"tideway: Nothing runs on {tmp_path}; give --url")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("model", "remove", "\udc80"), "tideway: '\\udc80' is not UTF-8.\n"),
        (("model", "add", "a", "b", "--tpot-ms", "inf"), "A number of this command is infinite or too large"),
        (("route", "set", "a", "m=" + 400 * "9"), "A number of this command is infinite or too large"),
        (("top", "--api-key", "\u00e9"), "The admin key (--api-key, TIDEWAY_ADMIN_API_KEY) has other characters"),
        (("top", "--api-key", "a\nb"), "The admin key (--api-key, TIDEWAY_ADMIN_API_KEY) has other characters"),
        (("top", "--url", "http://xn--.example"), "The gateway at http://xn--.example does not answer"),
        (("scale", "a", 5000 * "9"), "is not a valid instance count"),
        (("drain", "a", "--undo", "--force"), "--undo and --force exclude each other."),
    ],
)
def test_arguments_that_cannot_be_sent_are_one_sentence(
    in_this_process: InThisProcess, arguments: tuple[str, ...], told: str
) -> None:
    url = () if "--url" in arguments else ("--url", "http://127.0.0.1:1")
    result = in_this_process(*arguments, *url)
    assert result.returncode == 2 and told in result.stderr
    assert "Traceback" not in result.stderr


def test_down_stops_the_holder_of_the_lock(tmp_path: Path) -> None:
    script = f"""
import pathlib, signal
from tideway.data_folder import DataFolder
DataFolder(pathlib.Path({str(tmp_path)!r})).acquire()
print("held", flush=True)
signal.pause()
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert holder.stdout is not None
    holder.stdout.readline()
    result = tideway("down", "--data-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, f"Stopped what ran on {tmp_path}.\n")
    assert holder.wait(5) == -15
    holder.stdout.close()


ADMIN_API = """
import json, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"instances": [], "draining": ["n-" + "x" * 100 + "-0"], "models": []}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def admin_url() -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "-c", ADMIN_API], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.kill()
    server.wait()
    server.stdout.close()


def test_a_view_in_a_pipe_is_as_wide_as_it_is(admin_url: str) -> None:
    result = tideway("top", "--url", admin_url)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"Drained and gone: n-{'x' * 100}-0 (tideway drain INSTANCE --undo" in result.stdout


def test_views_for_programs(admin_url: str, nats_settings: BusSettings) -> None:
    shown = json.loads(tideway("top", "--json", "--url", admin_url).stdout)
    assert (shown["url"], shown["instances"], shown["draining"]) == (admin_url, [], ["n-" + "x" * 100 + "-0"])
    result = tideway("status", "--json", TIDEWAY_NATS_URL=nats_settings.nats_url)
    shown = json.loads(result.stdout)
    assert (shown["scheduler"], shown["instances"], shown["supervisor"]) == (None, [], None)


def test_the_version_is_an_option_too(in_this_process: InThisProcess) -> None:
    assert in_this_process("--version").stdout == in_this_process("version").stdout != ""


def test_a_view_that_cannot_be_written_is_one_sentence(admin_url: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "tideway", "top", "--once", "--url", admin_url],
            cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "tideway: What was to be shown cannot be written: No space left on device.\n"


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help")])
def test_a_reader_that_ends_is_told_as_by_other_programs(arguments: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tideway", *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 128 + signal.SIGPIPE)


def test_sigterm_leaves_the_terminal_as_it_was(admin_url: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tideway", "top", "--url", admin_url],
        cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"Models" not in shown:
        shown += os.read(ours, 65536)
    assert b"\x1b[?1049h" in shown
    process.terminate()
    with contextlib.suppress(OSError):  # the other end was closed
        while part := os.read(ours, 65536):
            shown += part
    assert process.wait(10) == 128 + signal.SIGTERM
    assert b"\x1b[?1049l" in shown and b"Traceback" not in shown
    os.close(ours)


def test_help_names_every_subcommand() -> None:
    result = tideway("--help")
    assert result.returncode == 0
    for name in ("up", "down", "status", "version"):
        assert f" {name} " in result.stdout


# ------------------------------------------------------------------------------------------- state of a model

TIDE = ModelSpec(name="tide", source="org/tide")


def plan(*instance_ids: str, unplaced: dict[str, str] | None = None) -> PlacementPlan:
    return PlacementPlan(1, [InstancePlan(i, "node", [TIDE], 0, 0) for i in instance_ids], unplaced or {})


def instance(instance_id: str, model_state: str, state: str = "ready", error: str = "") -> InstanceInfo:
    return InstanceInfo(
        instance_id=instance_id,
        incarnation="1",
        node_id="node",
        state=state,
        models=[LoadedModel(name="tide", state=model_state, error=error)],
    )


@pytest.mark.parametrize(
    "the_plan, instances, state, num_ready",
    [
        (None, [], ModelState.WAITING, 0),
        (plan(), [], ModelState.WAITING, 0),
        (plan("a"), [], ModelState.WAITING, 0),
        (plan("a"), [instance("a", "loading")], ModelState.LOADING, 0),
        (plan("a", "b"), [instance("a", "ready")], ModelState.LOADING, 1),
        (plan("a", "b"), [instance("a", "ready"), instance("b", "loading")], ModelState.LOADING, 1),
        (plan("a", "b"), [instance("a", "ready"), instance("b", "ready")], ModelState.READY, 2),
        (plan("a", "b"), [instance("a", "ready"), instance("b", "failed")], ModelState.READY, 1),
        (plan("a"), [instance("a", "ready"), instance("old", "ready")], ModelState.READY, 1),
        (plan("a"), [instance("a", "ready", state="draining")], ModelState.LOADING, 0),
        (plan("a", "b"), [instance("a", "loading", error="down"), instance("b", "loading")], ModelState.LOADING, 0),
        (plan("a"), [instance("a", "loading", error="down")], ModelState.UNAVAILABLE, 0),
    ],
)
def test_where_a_model_stands(
    the_plan: PlacementPlan | None, instances: list[InstanceInfo], state: ModelState, num_ready: int
) -> None:
    view = view_model("tide", the_plan, {info.instance_id: info for info in instances})
    assert (view.state, view.num_ready) == (state, num_ready)


def test_why_a_model_failed() -> None:
    failed = view_model("tide", plan("a"), {"a": instance("a", "failed", error="no such weights")})
    assert (failed.state, failed.reason) == (ModelState.FAILED, "no such weights")
    partly = {"a": instance("a", "ready"), "b": instance("b", "failed", error="no such weights")}
    assert view_model("tide", plan("a", "b"), partly).reason == "failed on 1 of 2: no such weights"
    assert view_model("tide", plan("a"), {"a": instance("a", "loading", error="down")}).reason == "down"
    unplaced = view_model("tide", plan(unplaced={"tide": "too large"}), {})
    assert (unplaced.state, unplaced.reason) == (ModelState.FAILED, "too large")
    put_away = msgspec.structs.replace(plan(), asleep={"tide": "idle"})
    assert view_model("tide", put_away, {}).state is ModelState.PUT_AWAY
    unreadable = msgspec.structs.replace(put_away, unplaced={"tide": "it is gone"})
    assert view_model("tide", unreadable, {}).reason == "it is gone"


def test_a_model_whose_instances_are_drained_has_not_failed() -> None:
    unplaced = {"tide": "no instance is there to hold it; a drained"}
    drained = view_model("tide", msgspec.structs.replace(plan(unplaced=unplaced), draining=["a"]), {})
    assert (drained.state, drained.reason) == (ModelState.DRAINED, unplaced["tide"])
    elsewhere = msgspec.structs.replace(plan("b", unplaced={"ebb": "too large; a drained"}), draining=["a"])
    assert view_model("ebb", elsewhere, {}).state is ModelState.FAILED
