"""Three real NATS servers with the chart's configuration, and the backup that its CronJob makes of them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import FILE_CONTENTS
from shared.settings import BusSettings
from tests.conftest import free_port
from tests.deploy.chart import render
from tests.deploy.cluster import Cluster
from tideway.data_folder import OperatorError
from tideway.preflight import nats_server_binary
from tideway.stream_backup import backup_streams, make_backup, restore_backup

CONTENT = b"a line\n" * 200_000


def server_environment(here: Cluster, server: int = 0) -> dict[str, str]:
    values = here.environment("tideway-nats")
    return {**{k: v for k, v in values.items() if not k.startswith("PLAIN_")}, "POD_NAME": f"tideway-nats-{server}"}


def write_configuration(here: Cluster, folder: Path, port: int, server: int = 0, routes: tuple[int, ...] = ()) -> Path:
    """As mounted in a pod, changed only in what cannot be had outside a container."""
    data = here.find("ConfigMap", "tideway-nats")["data"]
    text = data["nats.conf"].replace("0.0.0.0:4222", f"127.0.0.1:{port}")
    text = text.replace("0.0.0.0:8222", f"127.0.0.1:{free_port()}").replace('"/data"', f'"{folder}/data-{server}"')
    for i, route in enumerate(routes):
        text = text.replace(f"tideway-nats-{i}.tideway-nats:6222", f"127.0.0.1:{route}")
    if routes:
        text = text.replace("0.0.0.0:6222", f"127.0.0.1:{routes[server]}")
    text = re.sub(r'"/etc/nats/tls/([\w.]+)"', rf'"{folder}/\1"', text)
    (folder / "users.conf").write_text(data["users.conf"])
    file = folder / f"nats-{server}.conf"
    file.write_text(text)
    return file


class Servers:
    """As many as the chart has replicas, in one folder; `url` names all."""

    def __init__(self, values: dict[str, Any], folder: Path) -> None:
        here = Cluster(render({**values, "backup": {"enabled": True}}))
        number = here.workloads["tideway-nats"]["spec"]["replicas"]
        folder.mkdir()
        ports, routes = [[free_port() for _ in range(number)] for _ in range(2)]
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.processes = []
        for i, port in enumerate(ports):
            file = write_configuration(here, folder, port, i, tuple(routes) if number > 1 else ())
            environment = {**os.environ, **server_environment(here, i)}
            call = [nats_server_binary(), "-c", str(file)]
            self.processes.append(
                subprocess.Popen(call, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )

    def settings(self, user: str) -> BusSettings:
        return BusSettings(nats_url=self.url, nats_user=user, nats_password=f"nats-{user}-password")

    async def until_ready(self) -> None:
        """Until JetStream answers, which in a cluster needs a leader."""
        deadline = time.monotonic() + 60
        while True:
            try:
                settings = self.settings("operator")
                client = await nats.connect(
                    self.url.split(","), user=settings.nats_user, password=settings.nats_password,
                    inbox_prefix=b"_INBOX.operator", allow_reconnect=False,
                )  # fmt: skip
                try:
                    await client.request("$JS.API.STREAM.INFO.KV_tideway_models", b"", timeout=1)
                    return
                finally:
                    await client.close()
            except (OSError, nats.errors.Error):
                assert time.monotonic() < deadline, "JetStream does not answer"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers({}, tmp_path / "three")
    yield servers
    servers.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers({"nats": {"replicas": 1}}, tmp_path / "one")
    yield servers
    servers.close()


async def test_what_a_backup_of_three_servers_has_comes_back(three: Servers, one: Servers, tmp_path: Path) -> None:
    await three.until_ready()
    bus = await NatsBus.connect(three.settings("gateway"), "test", "gateway")
    await (await bus.object_store(FILE_CONTENTS)).put("file-1", CONTENT)
    await bus.close()
    folder = tmp_path / "backups"
    made = await asyncio.to_thread(make_backup, three.settings("backup"), folder)
    assert [file.stem for file in made.glob("*.json")] == ["OBJ_tideway_file_contents"]
    assert made.stat().st_mode & 0o077 == 0 and list(folder.iterdir()) == [made]
    three.close()

    await one.until_ready()
    assert await asyncio.to_thread(restore_backup, one.settings("backup"), made) == ["OBJ_tideway_file_contents"]
    bus = await NatsBus.connect(one.settings("gateway"), "test", "gateway")
    assert await (await bus.object_store(FILE_CONTENTS)).get("file-1") == CONTENT
    await bus.close()
    with pytest.raises(OperatorError, match=r"RESTORE\.OBJ_tideway_file_contents"):
        await asyncio.to_thread(restore_backup, one.settings("backup"), made)


async def test_others_may_make_no_backup(one: Servers, tmp_path: Path) -> None:
    await one.until_ready()
    with pytest.raises(OperatorError, match=r"(?i)permissions violation"):
        await asyncio.to_thread(make_backup, one.settings("operator"), tmp_path / "backups")
    with pytest.raises(OperatorError, match="cannot be reached"):
        await asyncio.to_thread(make_backup, BusSettings(nats_url="nats://127.0.0.1:9"), tmp_path / "backups")
    with pytest.raises(OperatorError, match="is no backup"):
        restore_backup(one.settings("backup"), tmp_path)


def test_the_newest_backups_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "KV_tideway_models.json").write_text("{}")
        return made

    def backup(settings: BusSettings, folder: Path) -> Path:
        return make("2026-11-04T03-17-00Z")

    monkeypatch.setattr("tideway.stream_backup.make_backup", backup)
    for day in (1, 2, 3):
        make(f"2026-11-0{day}T03-17-00Z")
    (tmp_path / "lost+found").mkdir()
    backup_streams(tmp_path, keep=2)
    assert sorted(path.name[:10] for path in tmp_path.iterdir()) == ["2026-11-03", "2026-11-04", "lost+found"]
