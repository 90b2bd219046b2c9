"""A backup of a real NATS store, and a Tideway that starts on what was restored."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import FILE_CONTENTS, MODELS
from shared.runtime.settings import BusSettings
from tests.tideway.test_up import Run
from tideway.backup import backup, restore
from tideway.data_folder import DataFolder, OperatorError

CONTENT = b"a line\n" * 50_000


async def connect(run: Run, user: str) -> NatsBus:
    password = run.up._data.credentials().nats_passwords[user]
    settings = BusSettings(nats_url=str(run.state()["nats_url"]), nats_user=user, nats_password=password)
    return await NatsBus.connect(settings, "test", user)


async def test_what_was_kept_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWAY_NODE_ID", "node")
    old, new, archive = tmp_path / "old", tmp_path / "new", tmp_path / "backup.tar"
    run = Run(old)
    await run.until_ready()
    with pytest.raises(OperatorError, match=r"runs here already.*`tideway down`.*, and back it up then\.$"):
        backup(archive, old)
    bus = await connect(run, "gateway")
    await (await bus.object_store(FILE_CONTENTS)).put("file-1", CONTENT)
    await bus.close()
    await run.stop()
    credentials = run.up._data.credentials()
    backup(archive, old)
    assert archive.stat().st_mode & 0o077 == 0
    shutil.rmtree(old)

    restore(archive, new)
    with pytest.raises(OperatorError, match="has nats"):
        restore(archive, new)
    run = Run(new, roles={"placement": "plain", "worker": "plain"}, models=[])
    run.start()
    await run.until(lambda: bool(run.state().get("nats_url")))
    assert run.up._data.credentials() == credentials
    bus = await connect(run, "gateway")
    assert await (await bus.object_store(FILE_CONTENTS)).get("file-1") == CONTENT
    assert (await (await bus.key_value(MODELS)).entries()).keys() == {"tide", "ebb"}
    await bus.close()
    await run.stop()


def test_what_is_no_backup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="is not a data folder"):
        backup(tmp_path / "backup.tar", tmp_path / "none")
    (tmp_path / "file").write_bytes(b"nothing")
    with pytest.raises(
        OperatorError, match=r"could not be restored into .*: it is not a backup of Tideway, or not a whole one\.$"
    ):
        restore(tmp_path / "file", tmp_path / "data")
    with pytest.raises(OperatorError, match="No such file"):
        restore(tmp_path / "missing", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_somebody_else_makes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, data = tmp_path / "backup.tar", DataFolder(tmp_path / "data")
    backup(archive, data_folder(tmp_path / "old"))
    names = tarfile.TarFile.getnames

    def slow(tar: tarfile.TarFile) -> list[str]:
        data.prepare()
        data.acquire()
        return names(tar)

    monkeypatch.setattr(tarfile.TarFile, "getnames", slow)
    with pytest.raises(OperatorError, match="runs here already"):
        restore(archive, data.path)
    assert data.logs.is_dir()
    data.release()


def data_folder(path: Path) -> Path:
    (path / "nats").mkdir(parents=True)
    (path / "nats" / "a").write_bytes(b"a" * 5000)
    (path / "credentials.json").write_text("{}")
    return path


def test_a_restore_that_failed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    archive, cut, new = tmp_path / "backup.tar", tmp_path / "cut.tar", tmp_path / "new"
    backup(archive, data_folder(tmp_path / "old"))
    cut.write_bytes(archive.read_bytes()[:4096])
    with pytest.raises(OperatorError, match="could not be restored"):
        restore(cut, new)
    assert not new.exists()
    with tarfile.open(archive, "a") as tar:
        tar.add(tmp_path / "old" / "credentials.json", "up.lock")
    restore(archive, new)
    assert (new / "nats" / "a").read_bytes() == b"a" * 5000 and (new / "credentials.json").exists()
    assert not (new / "up.lock").exists() and not (new / "restoring").exists()


def test_a_backup_does_not_follow_a_link(tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "backup.tar", tmp_path / "elsewhere"
    (tmp_path / "backup.tar.part").symlink_to(elsewhere)
    backup(archive, data_folder(tmp_path / "old"))
    assert not elsewhere.exists() and not archive.is_symlink() and archive.stat().st_mode & 0o077 == 0
