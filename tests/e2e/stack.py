"""The whole system as separate processes on a real NATS server, for end-to-end tests and benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from typer.testing import CliRunner

from services.worker.native import building
from tests import paced
from tests.conftest import NatsServer, free_port
from tests.nats_cluster import NatsCluster
from tideway.command import app
from tideway.nats_config import nats_users

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0
"""More than a worker that drains takes."""
END_TIMEOUT_S = 30.0
"""A node agent gives its instances 22 s to drain before it kills them."""
TEST_USER = "operator-test"
"""May do everything, and is who gives no name. Below the inboxes of operators every service may answer."""


def users_by_role(workers: dict[str, str]) -> str:
    """Users in a NATS server's configuration: a user per role, each with its name as password, and TEST_USER.
    `workers`: the nodes of workers, by user."""
    names = ["gateway", "scheduler", "placement", "operator", *workers]
    users = [*nats_users({name: name for name in names}, workers), {"user": TEST_USER, "password": TEST_USER}]
    return f"authorization: {json.dumps({'users': users})}\nno_auth_user: {TEST_USER}"


def user(name: str) -> dict[str, str]:
    return {"TIDEWAY_NATS_USER": name, "TIDEWAY_NATS_PASSWORD": name}


class Stack:
    """NATS, schedulers, placement, workers (node agents with instances) and a gateway.

    Every process can be killed and started again by name: "scheduler-0", "placement", "worker-0", "gateway".
    """

    def __init__(
        self,
        models: dict[str, str],
        *,
        num_workers: int = 1,
        num_instances: int = 2,
        num_schedulers: int = 1,
        environment: dict[str, str] | None = None,
        nats_config: str = "",
        step_s: float = 0.0,
        worker: tuple[str, ...] = (),
        nats: Callable[[str], NatsServer | NatsCluster] = NatsServer,
    ) -> None:
        """`nats`: what makes the servers, of lines of their configuration. `step_s`: what a step of an instance takes at
        least, so that streams last however fast the engine is. `worker`: module and arguments that run in the place of a
        node agent's."""
        workers = {f"worker-worker-{index}": f"worker-{index}" for index in range(num_workers)}
        self.nats = nats(f"{users_by_role(workers)}\n{nats_config}")
        self.folder = Path(tempfile.mkdtemp(prefix="tideway-stack-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.models = models
        admin_key = (environment or {}).get("TIDEWAY_ADMIN_API_KEY", "")
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
            "TIDEWAY_NATS_URL": self.nats.url,
            "TIDEWAY_MODELS": json.dumps([{"name": name, "source": source} for name, source in models.items()]),
            "TIDEWAY_NUM_INSTANCES": str(num_instances),
            "TIDEWAY_MEMORY_BYTES": str(2 << 30),
            "TIDEWAY_PORT": str(self.port),
            # Measured once for all stacks on the same checkpoints.
            "TIDEWAY_COST_MODELS_DIR": str(Path(next(iter(models.values()))).parent / "cost_models"),
            "OMP_NUM_THREADS": "1",
            paced.STEP_S: str(step_s),
            **(environment or {}),
        }
        if self._environment.get("TIDEWAY_COMPILED_KERNELS") != "off":
            # Instances of a fresh checkout would spend their time to start with it, or give it up.
            with suppress(building.BuildError):
                building.find_or_build(building.INSTALL_TIMEOUT_S)
        self.metrics_ports = {"placement": free_port(), "scheduler-0": free_port(), "gateway": free_port()}
        self._commands: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
            "placement": (("services.placement",), user("placement"))
        }
        for index in range(num_schedulers):
            name = f"scheduler-{index}"
            self._commands[name] = (("services.scheduler",), {"TIDEWAY_SCHEDULER_ID": name, **user("scheduler")})
        worker = worker or ((paced.MODULE, "worker") if step_s else ("services.worker",))
        for index in range(num_workers):
            name = f"worker-{index}"
            self._commands[name] = (worker, {"TIDEWAY_NODE_ID": name, **user(f"worker-{name}")})
        self._commands["gateway"] = (("services.gateway",), {"TIDEWAY_GATEWAY_ID": "gateway-0", **user("gateway")})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in self._commands:
                self.start(name)
        except BaseException:
            self.close()
            raise

    def start(self, name: str, environment: dict[str, str] | None = None) -> None:
        """`environment`: this time only."""
        arguments, extra = self._commands[name]
        metrics = {"TIDEWAY_METRICS_PORT": str(self.metrics_ports.get(name, 0))}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**self._environment, **metrics, **extra, **(environment or {})},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
            )

    def add_gateway(self, name: str, environment: dict[str, str] | None = None) -> str:
        """One more. Returns its URL, where it answers soon."""
        port = free_port()
        environment = {
            "TIDEWAY_GATEWAY_ID": name,
            "TIDEWAY_PORT": str(port),
            **user("gateway"),
            **(environment or {}),
        }
        self._commands[name] = (("services.gateway",), environment)
        self.start(name)
        return f"http://127.0.0.1:{port}"

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        process = self.processes[name]
        process.send_signal(signal_number)
        process.wait(STOP_TIMEOUT_S)

    def tideway(self, *arguments: str) -> str:
        """What the operator's command prints, run in this process: another would import for a second."""
        done = CliRunner().invoke(app, [*arguments, "--url", self.url])
        assert done.exit_code == 0, f"{done.output}{done.exception!r}"
        return done.stdout

    def log(self, name: str, num_lines: int = 40) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def logs(self) -> str:
        return "\n\n".join(f"--- {name}\n{self.log(name)}" for name in self._commands)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} not within {timeout_s:.0f} s\n{self.logs()}")
            for name, process in self.processes.items():
                if process.poll() is not None and process.returncode not in (-signal.SIGKILL, -signal.SIGTERM, 0):
                    raise RuntimeError(f"{name} exited with {process.returncode}\n{self.logs()}")
            time.sleep(0.05)

    def wait_ready(self, num_instances: int | None = None) -> None:
        """Until every model is ready on every instance."""
        expected = num_instances or self.num_expected_instances

        def ready() -> bool:
            instances = self.instances()
            return (
                len(instances) >= expected
                and all(
                    {model["name"] for model in instance["models"] if model["state"] == "ready"} >= set(self.models)
                    for instance in instances
                )
                and httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
            )

        self.wait_until(ready, "all models ready on all instances")

    @property
    def num_expected_instances(self) -> int:
        workers = sum(1 for name in self._commands if name.startswith("worker-"))
        return workers * int(self._environment["TIDEWAY_NUM_INSTANCES"])

    def instance(self, instance_id: str) -> dict | None:
        return next((one for one in self.instances() if one["instance_id"] == instance_id), None)

    def instances(self) -> list[dict]:
        return self._registry()["instances"]

    def draining(self) -> list[str]:
        """Those that the plan leaves out."""
        return self._registry()["draining"]

    def _registry(self) -> dict:
        response = httpx.get(f"{self.url}/admin/instances", headers=self._headers, timeout=5)
        response.raise_for_status()
        return response.json()

    def kill_instance(self, index: int = 0) -> dict:
        """kill -9 of an instance's process; returns its registry entry."""
        instance = sorted(self.instances(), key=lambda one: one["instance_id"])[index]
        os.kill(instance["pid"], signal.SIGKILL)
        return instance

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
        self.nats.close()
        refused = [
            line for name in self._commands for line in self.log(name, 10**6).splitlines() if "NATS refuses" in line
        ]
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not refused, refused

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
