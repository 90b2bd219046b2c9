"""Three real NATS servers with the chart's configuration, and the backup that its CronJob makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.msg import Msg

from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import FILE_CONTENTS, MODELS
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.conftest import free_port
from tests.deploy.nats_servers import Servers, make_certificates
from tideway import stream_backup
from tideway.data_folder import OperatorError
from tideway.preflight import nats_server_binary
from tideway.stream_backup import backup_streams, make_backup, restore_backup

CONTENT = b"a line\n" * 200_000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers({"nats": {"tls": {"enabled": True}}}, tmp_path / "three")
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


async def copies(servers: Servers) -> dict[str, int]:
    bus = await NatsBus.connect(servers.settings("placement"), "test", "placement")
    found = {name: (await bus.streams.health(name)).num_copies for name in await bus.streams.own_names()}
    await bus.close()
    return found


async def test_from_one_server_to_three_and_back_by_a_backup(one: Servers, three: Servers, tmp_path: Path) -> None:
    """The steps of docs/kubernetes.md: a cluster takes over nothing of a server that was alone. One server is late."""
    three.kill(2)
    await one.until_ready()
    bus = await NatsBus.connect(one.settings("placement"), "test", "placement")
    models = await bus.key_value(MODELS)
    for number in range(200):
        await models.put(f"model-{number}", ModelSpec(f"model-{number}", "somewhere"))
    await bus.close()
    first = await asyncio.to_thread(make_backup, one.settings("backup"), tmp_path / "backups")
    one.close()

    await three.until_ready()
    restored = asyncio.create_task(asyncio.to_thread(restore_backup, three.settings("backup"), first))
    assert not (await asyncio.wait([restored], timeout=2.0))[0], "three copies need three servers"
    three.start_again(2)
    await restored
    bus = await NatsBus.connect(three.settings("placement"), "test", "placement")
    assert len(await (await bus.key_value(MODELS)).entries()) == 200
    await bus.close()
    assert (await copies(three))["KV_tideway_models"] == 3
    await asyncio.sleep(1.0)  # backups are named after the second
    second = await asyncio.to_thread(make_backup, three.settings("backup"), tmp_path / "backups")
    three.close()

    again = Servers({"nats": {"replicas": 1}}, tmp_path / "again")
    try:
        await again.until_ready()
        await asyncio.to_thread(restore_backup, again.settings("backup"), second)
        assert (await copies(again))["KV_tideway_models"] == 1
    finally:
        again.close()


def shown_certificate(port: int) -> bytes:
    """The one that a server shows to a client, which NATS asks to begin TLS after its first line."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.recv(4096)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(connection) as secured:
            return secured.getpeercert(binary_form=True) or b""


async def test_servers_show_a_renewed_certificate(three: Servers) -> None:
    """Without a restart, for which nobody is there when cert-manager renews it."""
    await three.until_ready()
    before = [await asyncio.to_thread(shown_certificate, port) for port in three.ports]
    renewed = three.folder / "renewed"
    renewed.mkdir()
    make_certificates(renewed)
    for name in ("tls.key", "ca.crt", "tls.crt"):
        (renewed / name).rename(three.folder / name)
    async with asyncio.timeout(30):
        for port, old in zip(three.ports, before, strict=True):
            while await asyncio.to_thread(shown_certificate, port) == old:
                await asyncio.sleep(0.2)
    await three.until_ready()
    assert all(process.poll() is None for process in three.processes)


async def test_no_other_pod_becomes_a_server_of_the_cluster(tmp_path: Path) -> None:
    servers = Servers({}, tmp_path / "servers")
    try:
        await servers.until_ready()
        assert await routes_of_a_stranger(servers, "", tmp_path) == 0
        assert await routes_of_a_stranger(servers, "route:nats-route-password@", tmp_path) > 0, "the test would see it"
    finally:
        servers.close()


async def routes_of_a_stranger(servers: Servers, credentials: str, folder: Path) -> int:
    """Routes that a server of our own has to these after some seconds."""
    monitor = free_port()
    file = folder / "stranger.conf"
    file.write_text(
        f'server_name: stranger\nlisten: "127.0.0.1:{free_port()}"\nhttp: "127.0.0.1:{monitor}"\ncluster {{\n'
        f'name: tideway-nats\nlisten: "127.0.0.1:{free_port()}"\n'
        f'routes: ["nats://{credentials}127.0.0.1:{servers.routes[0]}"]\n}}\n'
    )
    stranger = await asyncio.create_subprocess_exec(
        nats_server_binary(), "-c", str(file), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            found, looked = 0, 0
            while not found and looked < 15:
                await asyncio.sleep(0.3)
                with contextlib.suppress(httpx.ConnectError):
                    found = (await client.get(f"http://127.0.0.1:{monitor}/routez")).json()["num_routes"]
                    looked += 1
            return int(found)
    finally:
        stranger.kill()
        await stranger.wait()


async def test_others_may_make_no_backup(one: Servers, tmp_path: Path) -> None:
    await one.until_ready()
    with pytest.raises(OperatorError, match=r"(?i)permissions violation"):
        await asyncio.to_thread(make_backup, one.settings("operator"), tmp_path / "backups")
    with pytest.raises(OperatorError, match=r"cannot be reached \(TIDEWAY_NATS_URL\)"):
        await asyncio.to_thread(make_backup, BusSettings(nats_url="nats://127.0.0.1:9"), tmp_path / "backups")
    with pytest.raises(OperatorError, match="is no backup"):
        restore_backup(one.settings("backup"), tmp_path)


async def test_a_restore_that_is_answered_late_is_begun_once(
    nats_settings: BusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster whose leader waits for other servers answers late, and finds the name taken when it is asked again."""
    monkeypatch.setattr(stream_backup, "API", "restores")
    monkeypatch.setattr(stream_backup, "RESTORE_TIMEOUT_S", 0.2)
    (tmp_path / "KV_tideway_models.json").write_text('{"config": {}, "state": {}}')
    (tmp_path / "KV_tideway_models.snapshot").write_bytes(b"snapshot")
    taken = {"error": {"code": 400, "err_code": 10130, "description": "stream name already in use, cannot restore"}}
    client = await nats.connect(nats_settings.nats_url)
    asked: list[str] = []
    chunks: list[bytes] = []

    async def on_restore(request: Msg) -> None:
        asked.append(request.reply)
        if len(asked) > 1:
            await client.publish(request.reply, json.dumps(taken).encode())
        if len(asked) == 3:
            await client.publish(asked[0], json.dumps({"deliver_subject": "chunks"}).encode())

    async def on_chunk(chunk: Msg) -> None:
        chunks.append(chunk.data)
        await chunk.respond(b"{}")

    await client.subscribe("restores.RESTORE.*", cb=on_restore)
    await client.subscribe("chunks", cb=on_chunk)
    await client.flush()
    assert await asyncio.to_thread(restore_backup, nats_settings, tmp_path) == ["KV_tideway_models"]
    assert chunks == [b"snapshot", b""]
    await client.close()


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
