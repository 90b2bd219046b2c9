"""Services that start while NATS is away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.conftest import free_port

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


def until_answered(url: str) -> httpx.Response:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return httpx.get(url, timeout=30)
        except httpx.ConnectError:
            assert time.monotonic() < deadline_s, url
            time.sleep(0.1)
