"""Services that start while NATS is away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.conftest import NatsServer, free_port
from tests.e2e.stack import users_by_role

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "placement", "worker")


def test_a_service_that_waits_for_nats_is_live_and_not_healthy(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TIDEWAY_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "TIDEWAY_PORT": str(free_port()),
        "TIDEWAY_DEVICE": "cpu",
    }
    ports = {name: free_port() for name in SERVICES}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"services.{name}"],
            env={**environment, "TIDEWAY_METRICS_PORT": str(ports[name])},
            cwd=tmp_path,
        )
        for name in SERVICES
    ]
    try:
        for port in ports.values():
            url = f"http://127.0.0.1:{port}"
            assert until_answered(f"{url}/live").status_code == 200
            answer = httpx.get(f"{url}/health", timeout=30)
            assert (answer.status_code, answer.json()) == (503, ["not connected to NATS"])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_service_that_waits_for_its_streams_says_so_and_ends_when_told_to(tmp_path: Path) -> None:
    """No placement runs, so nobody makes them."""
    nats = NatsServer(users_by_role({"worker-a": "a"}))
    users = {"gateway": "gateway", "scheduler": "scheduler", "worker": "worker-a"}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TIDEWAY_NATS_URL": nats.url,
        "TIDEWAY_PORT": str(free_port()),
        "TIDEWAY_DEVICE": "cpu",
        "TIDEWAY_NODE_ID": "a",
    }
    logs = {name: tmp_path / f"{name}.log" for name in users}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"services.{name}"],
            env={**environment, "TIDEWAY_NATS_USER": user, "TIDEWAY_NATS_PASSWORD": user},
            cwd=tmp_path,
            stderr=logs[name].open("wb"),
        )
        for name, user in users.items()
    }
    try:
        for name, process in processes.items():
            deadline_s = time.monotonic() + 60
            while "is not there; waiting for the service that makes it" not in logs[name].read_text():
                assert time.monotonic() < deadline_s and process.poll() is None, logs[name].read_text()
                time.sleep(0.1)
            process.terminate()
            assert process.wait(20) == 0, logs[name].read_text()
            assert "Traceback" not in logs[name].read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        nats.close()


def until_answered(url: str) -> httpx.Response:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return httpx.get(url, timeout=30)
        except httpx.ConnectError:
            assert time.monotonic() < deadline_s, url
            time.sleep(0.1)
