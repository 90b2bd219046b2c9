"""Files are there whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shared.runtime.files import write_whole


def test_a_file_is_one_of_those_that_were_written_at_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_whole, args=(file, content, 0o600)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() in contents
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.mkdir()
    (file / "inside").touch()
    with pytest.raises(OSError):
        write_whole(file, b"new")
    assert list(tmp_path.iterdir()) == [file] and list(file.iterdir()) == [file / "inside"]


def test_contents_are_on_the_disk_before_the_name_is_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append("folder" if path.is_dir() else f"file of {path.stat().st_size}")

    def replaced(self: Path, target: Path) -> Path:
        order.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_whole(tmp_path / "file", b"abc")
    assert order == ["file of 3", "name", "folder"]
