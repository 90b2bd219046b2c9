"""A Tideway of processes that have the environment, the users and the three NATS servers of the chart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.deploy.chart import REPOSITORY
from tests.deploy.nats_servers import Servers

START_TIMEOUT_S = 120
MODEL = "tideway-demo-opt"
VALUES = {
    "models": {"initial": [{"name": MODEL, "source": f"{REPOSITORY}/models/{MODEL}"}]},
    "workers": {"pools": [{"name": "cpu", "ownNatsUsers": True, "memoryBytes": 256 << 20}]},
    "scaling": {"pool": ""},
}


class Stack:
    """One process of each of Tideway's workloads."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.logs = folder
        self.cluster = servers.cluster
        # What cannot be had outside a container: names and ports of a pod of its own, /cache.
        here = {
            "TIDEWAY_NATS_URL": servers.url,
            "TIDEWAY_METRICS_HOST": "127.0.0.1",
            "TIDEWAY_METRICS_PORT": "0",
            "TIDEWAY_HOST": "127.0.0.1",
            "TIDEWAY_PORT": self.url.rpartition(":")[2],
            "TIDEWAY_MODELS_FILE": str(folder / "models.json"),
            "TIDEWAY_LEAVE_S": "0",
            "TIDEWAY_NUM_THREADS": "1",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEWAY_", "OTEL_", "HF_"))}
        self.processes = []
        for component in ("placement", "scheduler", "worker", "gateway"):
            (name,) = self.cluster.of_component(component)
            with (folder / f"{component}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"services.{component}"],
                    cwd=REPOSITORY,
                    env={**inherited, **self.cluster.environment(name), **here},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def wait_for_model(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, {
                file.name: file.read_text()[-2000:] for file in self.logs.glob("*.log")
            }
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.2)

    def helm_test(self, *more_models: str) -> subprocess.CompletedProcess[str]:
        """What the pod of `helm test` runs."""
        (name,) = self.cluster.of_component("test")
        python, *arguments = self.cluster.container(name)["command"]
        assert python == "python"
        arguments = [self.url if argument.startswith("http://") else argument for argument in arguments]
        environment = self.cluster.environment(name)
        command = [sys.executable, *arguments, *more_models]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    servers = Servers(VALUES, tmp_path / "nats")
    stack = Stack(servers, tmp_path)
    yield stack
    stack.close()
    servers.close()


def test_it_serves(stack: Stack) -> None:
    stack.wait_for_model()
    body = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 5, "ignore_eos": True}
    refused = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert refused.status_code == 401, "the keys are those of the secret"
    answer = httpx.post(
        f"{stack.url}/v1/completions", json=body, headers={"Authorization": "Bearer api-keys"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    test = stack.helm_test()
    assert test.returncode == 0 and MODEL in test.stdout, test.stderr
    assert "not served: other" in stack.helm_test("other").stderr
    admin = {"Authorization": "Bearer admin-api-key"}
    (instance,) = httpx.get(f"{stack.url}/admin/instances", headers=admin, timeout=30).json()["instances"]
    assert instance["instance_id"] == "tideway-worker-cpu-0-0-0", "the pod's name is the node"
    logs = "".join(file.read_text() for file in stack.logs.glob("*.log"))
    assert "NATS refuses" not in logs and '"level": "ERROR"' not in logs
