"""KV blocks on disk, with real files: written, found, read, damaged, crowded out, shared, refused."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.worker.instance import disk_tier
from services.worker.instance.disk_tier import DiskTier
from services.worker.instance.engine_loop import EngineLoop
from services.worker.kv.kv_store import BlockParts
from services.worker.kv_disk import store as store_module
from services.worker.kv_disk.copies import DiskCopies
from services.worker.kv_disk.store import HEADER_BYTES, Changes, DiskStore, ModelFiles
from services.worker.kv_transport.staging import KvPool
from shared.engine.calls import Call, FoundOnDisk, GiveUpReads
from shared.engine.plan import CopyKind, KvCopy
from tests.shared.bus_contract import eventually
from tests.small_disk import SmallDisk, SmallDiskError

BLOCK_BYTES = 12 * 1024
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


def name(number: int) -> bytes:
    return number.to_bytes(2, "little") * 8


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def files_of(folder: Path, max_bytes: int = 1 << 30, key: str = "model") -> ModelFiles:
    return ModelFiles(DiskStore(folder, max_bytes), key, BLOCK_BYTES)


def is_read(files: ModelFiles, number: int) -> bool:
    block = np.zeros(BLOCK_BYTES, np.uint8)
    if not files.read(name(number), block):
        return False
    assert (block == content(number)).all()
    return True


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.*") if path.is_file())


def test_what_was_written_is_found_and_read_by_whoever_comes_later(tmp_path: Path) -> None:
    first = files_of(tmp_path)
    for number in (1, 300, 2):
        first.write(name(number), content(number))
    again = files_of(tmp_path)
    assert sorted(again.look().found) == sorted(map(name, (1, 2, 300))) and not again.look().found
    assert all(is_read(again, number) for number in (1, 300, 2)) and not is_read(again, 4)
    assert not files_of(tmp_path, key="other weights").look().found


def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    files_of(tmp_path / "kv").write(name(1), content(1))
    for path in (tmp_path / "kv").rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


@pytest.mark.parametrize("at", [0, 10, 30, HEADER_BYTES, HEADER_BYTES + 5000, FILE_BYTES - 1])
def test_a_file_with_a_flipped_bit_is_removed_when_it_is_read(tmp_path: Path, at: int) -> None:
    files = files_of(tmp_path)
    for number in (1, 2):
        files.write(name(number), content(number))
    (damaged,) = [path for path in paths(tmp_path) if path.stem == name(1).hex()]
    with damaged.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    assert not is_read(files, 1) and not damaged.exists() and is_read(files, 2)
    assert DiskStore(tmp_path, 1 << 30).used_bytes == FILE_BYTES
    files.write(name(1), content(1))
    assert is_read(files, 1)


def test_another_blocks_file_under_its_name_is_not_taken_for_it(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    files.write(name(1), content(1))
    (path,) = paths(tmp_path)
    files.write(name(2), content(2))
    (other,) = [found for found in paths(tmp_path) if found != path]
    os.replace(path, other)
    assert not is_read(files, 2)


def test_a_file_that_was_cut_off_is_removed_at_the_start(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for number in (1, 2):
        files.write(name(number), content(number))
    os.truncate(paths(tmp_path)[0], FILE_BYTES - 1)
    assert len(files_of(tmp_path).look().found) == 1 and len(paths(tmp_path)) == 1


def test_unfinished_files_count_and_go_when_they_are_old(tmp_path: Path) -> None:
    files_of(tmp_path).write(name(1), content(1))
    unfinished = paths(tmp_path)[0].with_suffix(".0.part")
    unfinished.write_bytes(b"x" * 1000)
    store = DiskStore(tmp_path, 1 << 30)
    assert store.used_bytes == FILE_BYTES + 1000 and unfinished.exists()
    os.utime(unfinished, (1.0, 1.0))
    assert DiskStore(tmp_path, 1 << 30).used_bytes == FILE_BYTES
    assert not unfinished.exists()


def test_what_else_lies_in_the_folder_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("photos/2020/a.jpg", "model/ab/notes.kv", "model/list.kv", "ab/c0.kv")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * FILE_BYTES)
    files = files_of(tmp_path, 2 * FILE_BYTES)
    assert files._store.used_bytes == 0
    for number in range(6):
        files.write(name(number), content(number))
    files._store.clear()
    assert all(path.exists() for path in others) and files._store.used_bytes == 0 and not files.look().found


def test_two_that_write_one_block_at_once_have_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks before the other has written."""
    files = files_of(tmp_path)
    files.write(name(1), content(1))
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_touch", lambda path, depth: os.stat(path + ".not there"))
        files.write(name(1), content(1))
    assert files._store.used_bytes == FILE_BYTES and len(paths(tmp_path)) == 1 and is_read(files, 1)


def test_one_folder_that_fails_hides_no_other(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for number in (1, 2, 3):
        files.write(name(number), content(number))
    (tmp_path / "model" / name(2).hex()[:2] / "ab.kv").mkdir()  # of another size, and no file that could be removed
    again = files_of(tmp_path)
    assert sorted(again.look().found) == sorted(map(name, (1, 3))) and again.num_known == 2


def test_the_folder_stays_within_its_bound_and_keeps_what_was_read_last(tmp_path: Path) -> None:
    bound = 10 * FILE_BYTES
    files = [files_of(tmp_path, bound, key) for key in ("one", "other")]
    for number in range(40):
        files[number % 2].write(name(number), content(number))
        os.utime(files[number % 2]._path(name(number)), (number + 1.0, number + 1.0))
        if number:
            assert is_read(files[0], 0), "what is read again and again stays"
        assert sum(path.stat().st_size for path in paths(tmp_path)) <= bound
    left = [number for number in range(1, 40) if os.path.exists(files[number % 2]._path(name(number)))]
    assert left == list(range(40 - len(left), 40)) and len(left) >= 6
    assert DiskStore(tmp_path, bound).used_bytes == FILE_BYTES * (1 + len(left))
    lost = files[0].look()
    assert not lost.lost and len(lost.found) == 1 + len(left) // 2


def test_of_a_chain_the_last_blocks_go_first(tmp_path: Path) -> None:
    files = files_of(tmp_path, 10 * FILE_BYTES)
    for depth in range(10):
        assert files.write(name(depth), content(depth), depth)
    assert files.write(name(10), content(10))
    left = [depth for depth in range(10) if os.path.exists(files._path(name(depth)))]
    assert left == list(range(len(left))) and 8 <= len(left) < 10


def test_a_block_is_refused_where_all_others_were_used_too_lately_to_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tmp_path, 3 * FILE_BYTES)
    for number in range(3):
        assert files.write(name(number), content(number))
    assert not files.write(name(3), content(3), gives_way_s=60.0)
    with monkeypatch.context() as patched:
        patched.setattr(files._store, "_files", lambda: pytest.fail("the folder is looked through for each block"))
        assert not files.write(name(4), content(4), gives_way_s=60.0)
    os.utime(files._path(name(1)), (1.0, 1.0))
    assert files.write(name(5), content(5), gives_way_s=30.0), "one was not used for longer"
    assert not os.path.exists(files._path(name(1))) and is_read(files, 0) and is_read(files, 2)
    assert files._store.used_bytes == 3 * FILE_BYTES and len(paths(tmp_path)) == 3


def test_a_block_that_is_larger_than_the_folder_may_be_is_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path, FILE_BYTES - 1)
    with pytest.raises(OSError, match="at most"):
        files.write(name(1), content(1))
    assert not paths(tmp_path)


def test_many_threads_of_two_instances_stay_within_the_bound(tmp_path: Path) -> None:
    bound = 12 * FILE_BYTES
    failures: list[BaseException] = []

    def write(files: ModelFiles, first: int) -> None:
        try:
            for number in range(first, first + 30):
                files.write(name(number), content(number))
                is_read(files, number)
        except BaseException as error:
            failures.append(error)

    instances = [files_of(tmp_path, bound) for _ in range(2)]
    threads = [threading.Thread(target=write, args=(instances[n % 2], 20 * n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = paths(tmp_path)
    assert 0 < sum(path.stat().st_size for path in found) <= bound
    assert all(path.stat().st_size == FILE_BYTES for path in found)


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file", 1 << 30)


# ------------------------------------------------------------------------------------------------------- copies


class Copies:
    """Copies of one instance: its host memory has eight blocks."""

    def __init__(self, folder: Path, rows: torch.Tensor | BlockParts | None = None, **options) -> None:
        self.rows = torch.zeros(8, BLOCK_BYTES, dtype=torch.uint8) if rows is None else rows
        self.changes: list[Changes] = []
        self.told = threading.Event()
        self.copies = DiskCopies(DiskStore(folder, options.pop("max_bytes", 1 << 30)), self._on_change, **options)
        self.copies.add_model("m", "key", KvPool(self.rows))
        self.pass_writes()
        self.num = 0
        assert isinstance(self.rows, BlockParts) or self.rows.is_contiguous()

    def _on_change(self, model: str, changes: Changes) -> None:
        self.changes.append(changes)
        self.told.set()

    def pass_writes(self) -> None:
        """Until the thread that writes has done what it was given before."""
        passed = threading.Event()
        self.copies._writes.put(passed.set)
        assert passed.wait(30)

    def copy(self, kind: CopyKind, blocks: list[int], numbers: list[int], model: str = "m") -> bool:
        self.num += 1
        ended = threading.Event()
        self.copies.on_finished = ended.set
        self.copies.start_copy(KvCopy(self.num, kind, model, [], blocks, hashes=list(map(name, numbers))))
        assert ended.wait(30)
        ((copy_id, ok, seconds),) = self.copies.finished_copies()
        assert copy_id == self.num and (seconds > 0) is ok
        return ok


@contextmanager
def copies(folder: Path, **options) -> Iterator[Copies]:
    one = Copies(folder, **options)
    yield one
    one.copies.close(10.0)
    assert not any(thread.is_alive() for thread in one.copies._threads)


def test_blocks_go_to_disk_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    with copies(tmp_path) as it:
        it.rows[3] = torch.from_numpy(content(3))
        assert it.copy(CopyKind.WRITE, [3], [3]) and it.copy(CopyKind.READ, [5], [3])
        assert torch.equal(it.rows[5], it.rows[3]) and not it.rows[[0, 1, 2, 4, 6, 7]].any()
        assert not it.copy(CopyKind.READ, [6], [4]) and not it.copy(CopyKind.READ, [6], [3], "nobody")


def test_the_parts_of_ranks_are_joined_so_that_others_find_whole_blocks(tmp_path: Path) -> None:
    """Two ranks have every other run of 1 KiB."""
    ranks = [torch.zeros(8, BLOCK_BYTES // 2, dtype=torch.uint8) for _ in range(2)]
    whole = content(1).reshape(-1, 2, 1024)
    for rank in range(2):
        ranks[rank][2] = torch.from_numpy(whole[:, rank].reshape(-1).copy())
    with copies(tmp_path, rows=BlockParts([ranks], 1024)) as it:
        assert it.copy(CopyKind.WRITE, [2], [1]) and it.copy(CopyKind.READ, [4], [1])
    assert all(torch.equal(rank[4], rank[2]) for rank in ranks)
    with copies(tmp_path) as alone:
        assert alone.copy(CopyKind.READ, [0], [1])
        assert (alone.rows[0].numpy() == content(1)).all()


def test_an_instance_is_told_of_what_another_writes_and_removes(tmp_path: Path) -> None:
    with copies(tmp_path, look_s=0.05) as one, copies(tmp_path, look_s=0.05) as other:
        one.rows[0] = torch.from_numpy(content(1))
        assert one.copy(CopyKind.WRITE, [0], [1])
        assert other.told.wait(30) and other.changes == [Changes([name(1)], [])]
        assert other.copy(CopyKind.READ, [0], [1]) and torch.equal(other.rows[0], one.rows[0])
        other.told.clear()
        one.copies.clear()
        assert other.told.wait(30) and other.changes[1:] == [Changes([], [name(1)])]
        assert not paths(tmp_path)


def test_the_writer_outlives_what_fails(tmp_path: Path) -> None:
    with copies(tmp_path) as it:
        it.rows[0] = torch.from_numpy(content(1))
        obstacle = tmp_path / "key" / name(1).hex()[:2] / "ab.kv"
        obstacle.mkdir()
        it.copies.clear()
        it.pass_writes()
        obstacle.rmdir()
        assert it.copy(CopyKind.WRITE, [0], [1]) and it.copy(CopyKind.READ, [1], [1])


async def test_what_waits_for_a_disk_that_hangs_is_given_up_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe under the name of a block: whoever opens it to read waits for one that writes."""
    monkeypatch.setattr(disk_tier, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(disk_tier, "METRICS_S", 0.1)
    pipe = tmp_path / "key" / name(1).hex()[:2] / f"{name(1).hex()}.kv"
    calls: list[Call[Any]] = []
    store = DiskStore(tmp_path, 1 << 30)
    tier = DiskTier(store, cast("disk_tier.KeyedPools", None), CollectorRegistry(), "i", is_polite=False)
    tier.loop = cast("EngineLoop", SimpleNamespace(apply=calls.append))
    tier.copies.add_model("m", "key", KvPool(torch.zeros(8, BLOCK_BYTES, dtype=torch.uint8)))
    watching = asyncio.create_task(tier.keep_watch())
    try:
        passed = threading.Event()
        tier.copies._writes.put(passed.set)
        await eventually(passed.is_set)
        files_of(tmp_path, key="key").write(name(2), content(2))
        os.mkfifo(pipe)
        tier.copies.start_copy(KvCopy(1, CopyKind.READ, "m", [], [0], hashes=[name(1)]))
        await eventually(lambda: calls.count(GiveUpReads()) >= 2)
        os.close(os.open(pipe, os.O_WRONLY))
        await eventually(lambda: FoundOnDisk("m", [name(2)]) in calls[calls.index(GiveUpReads()) :])
        assert [ended[:2] for ended in tier.copies.finished_copies()] == [(1, False)]
    finally:
        watching.cancel()
        await tier.close()


async def test_an_instance_that_ends_waits_for_a_disk_that_hangs_no_longer_than_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "END_S", 1.0)
    tier = DiskTier(
        DiskStore(tmp_path, 1 << 30), cast("disk_tier.KeyedPools", None), CollectorRegistry(), "i", is_polite=False
    )
    tier.loop = cast("EngineLoop", SimpleNamespace(failure=None, apply=lambda call: False))
    goes_on = threading.Event()
    for lane in (tier.copies._reads, tier.copies._writes):
        lane.put(lambda: goes_on.wait(60) and None)
    begun_s = time.monotonic()
    try:
        await tier.flush()
        await tier.close()
        assert time.monotonic() - begun_s < 3.0 and all(thread.is_alive() for thread in tier.copies._threads)
    finally:
        goes_on.set()


def test_a_full_disk_refuses_blocks_for_a_while_and_reads_go_on(tmp_path: Path) -> None:
    try:
        disk = SmallDisk(60 * FILE_BYTES)
    except (SmallDiskError, OSError) as error:
        pytest.skip(str(error))
    try:
        with copies(disk.seen_path / "kv") as it:
            it.rows[0] = torch.from_numpy(content(1))
            assert it.copy(CopyKind.WRITE, [0], [1])
            disk.fill()
            assert not it.copy(CopyKind.WRITE, [0], [2]) and not it.copy(CopyKind.WRITE, [0], [3])
            assert it.copies.num_refused == 2
            disk.free()
            assert not it.copy(CopyKind.WRITE, [0], [2]), "it pauses"
            assert it.copy(CopyKind.READ, [1], [1]) and torch.equal(it.rows[1], it.rows[0])
            it.copies._paused_until_s = time.monotonic()
            assert it.copy(CopyKind.WRITE, [0], [2])
            assert it.copies.store.used_bytes == 2 * FILE_BYTES
    finally:
        disk.close()


def test_copies_that_wait_when_it_closes_fail_and_are_told(tmp_path: Path) -> None:
    it = Copies(tmp_path)
    gate = threading.Event()
    it.copies._writes.put(lambda: gate.wait(30) and None)
    it.copies.start_copy(KvCopy(1, CopyKind.WRITE, "m", [], [0], hashes=[name(1)]))
    it.copies._is_closing = True
    gate.set()
    it.copies.close(10.0)
    assert [ended[:2] for ended in it.copies.finished_copies()] == [(1, False)]
