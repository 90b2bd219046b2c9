"""The command as a person types it: exit codes and sentences."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.messages.cluster import (
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelSpec,
    PlacementPlan,
)
from tideway.cluster import ModelState, view_model
from tideway.preflight import REPOSITORY


def tideway(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEWAY_")}
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


def test_settings_of_the_environment_are_checked_first(tmp_path: Path) -> None:
    result = tideway("up", "--data-dir", str(tmp_path), "--model", "a/b", TIDEWAY_MAX_QUEUED="lots")
    assert (result.returncode, result.stderr) == (2, "tideway: TIDEWAY_MAX_QUEUED='lots': expected int\n")


def test_a_model_that_is_none(tmp_path: Path) -> None:
    result = tideway("up", "--data-dir", str(tmp_path), "--model", "x=./missing")
    assert result.returncode == 2 and "./missing is neither a folder nor a Hugging Face id" in result.stderr


def test_nothing_to_stop_and_nothing_to_show(tmp_path: Path) -> None:
    result = tideway("down", "--data-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, f"Nothing runs on {tmp_path}.\n")
    result = tideway("status", "--data-dir", str(tmp_path))
    assert result.returncode == 2 and result.stderr.startswith(f"tideway: Nothing runs on {tmp_path}.")


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
    assert (result.returncode, result.stdout) == (0, "Stopped.\n")
    assert holder.wait(5) == -15
    holder.stdout.close()


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
    return InstanceInfo(instance_id, "1", "node", state, [LoadedModel("tide", model_state, error=error)])


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
    unplaced = view_model("tide", plan(unplaced={"tide": "too large"}), {})
    assert (unplaced.state, unplaced.reason) == (ModelState.FAILED, "too large")
