"""NATS servers with the chart's configuration, as processes here."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import nats
import nats.errors

from shared.runtime.settings import BusSettings, load
from shared.runtime.tls import client_tls
from tests.certificates import Authority
from tests.conftest import free_port
from tests.deploy.chart import render
from tests.deploy.cluster import Cluster
from tideway.preflight import nats_server_binary


def server_environment(here: Cluster, server: int = 0, routes: tuple[int, ...] = ()) -> dict[str, str]:
    """Environment of a server's process; `routes`: ports of the servers here, in place of their pods' names."""
    values = {k: v for k, v in here.environment("tideway-nats").items() if not k.startswith("PLAIN_")}
    for i, route in enumerate(routes):
        values["NATS_ROUTES"] = values["NATS_ROUTES"].replace(
            f"tideway-nats-{i}.tideway-nats:6222", f"127.0.0.1:{route}"
        )
    return {**values, "POD_NAME": f"tideway-nats-{server}"}


def make_certificates(folder: Path) -> Path:
    """What the secret of the servers' TLS has, for 127.0.0.1; returns the CA's file."""
    authority = Authority(folder)
    for made, name in zip((*authority.issue("nats"), authority.ca), ("tls.crt", "tls.key", "ca.crt"), strict=True):
        made.rename(folder / name)
    return folder / "ca.crt"


def write_configuration(here: Cluster, folder: Path, port: int, server: int = 0, routes: tuple[int, ...] = ()) -> Path:
    """Writes the configuration as mounted in a pod, changed only in what cannot be had outside a container."""
    data = here.find("ConfigMap", "tideway-nats")["data"]
    text = data["nats.conf"].replace("0.0.0.0:4222", f"127.0.0.1:{port}")
    text = text.replace("0.0.0.0:8222", f"127.0.0.1:{free_port()}").replace('"/data"', f'"{folder}/data-{server}"')
    if routes:
        text = text.replace("0.0.0.0:6222", f"127.0.0.1:{routes[server]}")
    text = re.sub(r'"/etc/nats/tls/([\w.]+)"', rf'"{folder}/\1"', text)
    (folder / "users.conf").write_text(data["users.conf"])
    file = folder / f"nats-{server}.conf"
    file.write_text(text)
    return file


def pod_command(here: Cluster, file: Path) -> list[str]:
    """The container's command, with the server here and its files; it looks for renewed certificates more often."""
    command: list[str] = here.container("tideway-nats").get("command", [])
    changes = (
        ("exec nats-server", f"exec {nats_server_binary()}"),
        ("/etc/nats/nats.conf", str(file)),
        ("/etc/nats/tls/*", f"{file.parent}/tls.crt"),
        ("sleep 60", "sleep 0.2"),
    )
    for old, new in changes:
        assert not command or old in command[-1]
        command = [*command[:-1], command[-1].replace(old, new)] if command else []
    return command or [nats_server_binary(), "-c", str(file)]


class Servers:
    """NATS servers, as many as the chart has replicas, in one folder; `url` names all, `cluster` is what they are of."""

    def __init__(self, values: dict[str, Any], folder: Path) -> None:
        here = self.cluster = Cluster(render({**values, "backup": {"enabled": True}}))
        number = here.workloads["tideway-nats"]["spec"]["replicas"]
        folder.mkdir()
        has_tls = "tls {" in here.find("ConfigMap", "tideway-nats")["data"]["nats.conf"]
        self._ca = str(make_certificates(folder)) if has_tls else ""
        ports, routes = [[free_port() for _ in range(number)] for _ in range(2)]
        self.folder, self.ports, self.routes = folder, ports, routes
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        self._calls: list[tuple[list[str], dict[str, str]]] = []
        for i, port in enumerate(ports):
            peers = tuple(routes) if number > 1 else ()
            file = write_configuration(here, folder, port, i, peers)
            self._calls.append((pod_command(here, file), {**os.environ, **server_environment(here, i, peers)}))
        self.processes = [self._start(server) for server in range(number)]

    def _start(self, server: int) -> subprocess.Popen[bytes]:
        call, environment = self._calls[server]
        return subprocess.Popen(call, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, server: int) -> None:
        self.processes[server].kill()
        self.processes[server].wait()

    def start_again(self, server: int) -> None:
        self.processes[server] = self._start(server)

    def settings(self, user: str) -> BusSettings:
        """Settings of the pods with this user."""
        copies = self.cluster.find("ConfigMap", "tideway-settings")["data"]["TIDEWAY_NATS_REPLICAS"]
        variables = {
            "URL": self.url,
            "USER": user,
            "PASSWORD": f"nats-{user}-password",
            "TLS_CA": self._ca,
            "REPLICAS": copies,
        }
        return load(BusSettings, {f"TIDEWAY_NATS_{name}": value for name, value in variables.items()})

    async def until_ready(self) -> None:
        """Until JetStream answers, which in a cluster needs a leader."""
        deadline = time.monotonic() + 60
        while True:
            try:
                settings = self.settings("operator")
                client = await nats.connect(
                    self.url.split(","), user=settings.nats_user, password=settings.nats_password,
                    inbox_prefix=b"_INBOX.operator", allow_reconnect=False, tls=client_tls(settings),
                )  # fmt: skip
                try:
                    await client.request("$JS.API.STREAM.INFO.KV_tideway_models", b"", timeout=1)
                    return
                finally:
                    await client.close()
            except (OSError, nats.errors.Error):
                assert time.monotonic() < deadline, "JetStream does not answer"

    def close(self) -> None:
        for server in range(len(self.processes)):
            self.kill(server)
