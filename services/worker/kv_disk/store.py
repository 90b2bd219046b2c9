"""KV blocks as files in a folder of bounded size, which several instances may share.

    FOLDER/used                              bytes of all files, under a lock
    FOLDER/<model>/<first byte>/<hash>.kv    a header of 4 KiB, then the block's bytes

A file is written under another name and renamed when it is whole, so whoever finds it finds all of it. It is named by the
chained hash of its block, so two instances that write the same block write the same file. Nothing is synced: a crash of the
machine may leave files that are not what they should be, which their checksums show; such a file is removed by whoever reads
it. Where the folder would become too large, files give way as `shared.policies.kv_tiers` says, of whatever model and
instance: those that were longest not used, as their times of change have it. If none may, the new block is not kept.
What else lies in the folder is not counted and never removed.

Blocking; from any thread. The operating system caches what is read and written for all instances of the node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.worker.kv_transport.wire import LINE_BYTES, checksum
from shared.policies.kv_tiers import giving_way, used_at_s

logger = logging.getLogger(__name__)

HEADER_BYTES = 4096
"""The block begins at a page of its own."""
_HEADER = struct.Struct("<8s16sQI")
"""Magic, hash, bytes of the block, their checksum."""
_MAGIC = b"TWKV0001"
_SUFFIX = ".kv"
_UNFINISHED = ".part"
_PART = re.compile("[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]+(\.kv|\.[0-9a-f]+\.part)")
ABANDONED_S = 600.0
"""Age of an unfinished file that nobody goes on with."""
LOOK_AGAIN_S = 10.0
"""After no file could give way, until the folder is looked through again for such blocks, at most."""


class Changes(NamedTuple):
    """Hashes of blocks that came, the one that was read last at the end, and of those that went."""

    found: list[bytes]
    lost: list[bytes]


class _File(NamedTuple):
    at_s: float
    """Time at which it counts as used."""
    num_bytes: int
    path: str

    @property
    def is_unfinished(self) -> bool:
        return self.path.endswith(_UNFINISHED)

    @property
    def is_abandoned(self) -> bool:
        return self.is_unfinished and time.time() - self.at_s > ABANDONED_S


class DiskStore:
    """All files of a folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder. Raises `OSError` where it cannot be used."""
        self.folder = folder
        self.max_bytes = max_bytes
        # The blocks hold what requests say: they are nobody else's.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._used_path = folder / "used"
        self._refuses = (0.0, inf)
        """Until this time, blocks to which only files give way that were not used for so many seconds, or longer."""
        with self._locked() as used:
            total = 0
            for file in self._files():
                if file.is_abandoned:
                    _remove(file.path)
                else:
                    total += file.num_bytes
            self._set(used, total)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Descriptor of the file with the number of bytes, which nobody else changes meanwhile."""
        used = os.open(self._used_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(used, fcntl.LOCK_EX)
            yield used
        finally:
            os.close(used)

    @staticmethod
    def _get(used: int) -> int:
        return int.from_bytes(os.pread(used, 8, 0), "little")

    @staticmethod
    def _set(used: int, num_bytes: int) -> None:
        os.pwrite(used, max(0, num_bytes).to_bytes(8, "little"), 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        with self._locked() as used:
            return self._get(used)

    def _files(self) -> Iterator[_File]:
        for model in _folders(self.folder):
            for part in _folders(model):
                if not _PART.fullmatch(os.path.basename(part)):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    for entry in os.scandir(part):
                        if not _NAME.fullmatch(entry.name):
                            continue
                        with contextlib.suppress(FileNotFoundError):
                            stat = entry.stat(follow_symlinks=False)
                            yield _File(stat.st_mtime, stat.st_size, entry.path)

    def take_room(self, path: str, num_bytes: int, gives_way_s: float = 0.0) -> int | None:
        """A new file of so many bytes, which count from now on; others that were not used for `gives_way_s` are removed for
        it where the folder would become too large. Returns its descriptor; None: too few may be. Raises `OSError`."""
        if num_bytes > self.max_bytes:
            raise OSError(errno.EFBIG, f"a block takes {num_bytes} bytes, the folder {self.max_bytes} at most")
        with self._locked() as used:
            total = self._get(used)
            if total + num_bytes > self.max_bytes:
                until_s, refused_s = self._refuses
                if gives_way_s >= refused_s and time.time() < until_s:
                    return None
                total = self._make_room(num_bytes, gives_way_s)
                self._set(used, total)
                if total + num_bytes > self.max_bytes:
                    return None
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(file, 0, num_bytes)
            except OSError:
                os.close(file)
                _remove(path)
                raise
            self._set(used, total + num_bytes)
            return file

    def _make_room(self, num_bytes: int, gives_way_s: float) -> int:
        """Removes files until so many bytes more have room, if enough may go. Returns how many bytes are left."""
        now, files, taken = time.time(), [], 0
        for file in self._files():
            if file.is_abandoned and _remove(file.path):
                continue
            if file.is_unfinished:
                taken += file.num_bytes
            else:
                files.append(file)
        total = taken + sum(file.num_bytes for file in files)
        going = giving_way(files, taken + num_bytes, self.max_bytes, now - gives_way_s)
        if going is None:
            # The first one that may go is the oldest.
            oldest_s = min((file.at_s for file in files), default=now)
            self._refuses = min(oldest_s + gives_way_s, now + LOOK_AGAIN_S), gives_way_s
        return total - sum(_remove(file.path) * file.num_bytes for file in going or ())

    def remove(self, path: str, num_bytes: int) -> None:
        with self._locked() as used:
            self._set(used, self._get(used) - _remove(path) * num_bytes)

    def finish(self, unfinished: str, path: str, num_bytes: int) -> None:
        """Gives a whole file its name. Another instance may have been sooner: then that one's stays."""
        with self._locked() as used:
            if os.path.exists(path):
                self._set(used, self._get(used) - _remove(unfinished) * num_bytes)
            else:
                os.rename(unfinished, path)

    def clear(self) -> None:
        """Removes the blocks of all models, also of such as no instance has."""
        with self._locked() as used:
            total = self._get(used)
            for file in self._files():
                if not file.is_unfinished or file.is_abandoned:
                    total -= _remove(file.path) * file.num_bytes
            self._set(used, total)


class ModelFiles:
    """The files of one model's blocks, all of one size."""

    def __init__(self, store: DiskStore, model_key: str, block_bytes: int) -> None:
        """`model_key`: names all that the blocks depend on but for the tokens. Raises `OSError`."""
        self._store = store
        self._folder = store.folder / model_key
        self._num_bytes = HEADER_BYTES + block_bytes
        self._known: dict[str, tuple[int, set[bytes]]] = {}
        """By the first byte of the hashes: when their folder was changed last, and what was there."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for first in range(256):
            (self._folder / f"{first:02x}").mkdir(mode=0o700, exist_ok=True)

    @property
    def num_known(self) -> int:
        """Blocks that were there at the last look."""
        return sum(len(there) for _, there in self._known.values())

    def forget(self) -> None:
        """The next look finds all of them again."""
        self._known = {}

    def _path(self, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self._folder}/{name[:2]}/{name}{_SUFFIX}"

    def write(self, block_hash: bytes, block: np.ndarray, depth: int = 0, gives_way_s: float = 0.0) -> bool:
        """`block`: `[block_bytes]` uint8; `depth`: blocks before it in its chain. Nothing is written where it is there
        already. Returns whether it is there now; else no file may give way to it. Raises `OSError`."""
        path = self._path(block_hash)
        with contextlib.suppress(FileNotFoundError):
            _touch(path, depth)
            return True
        unfinished = f"{path[: -len(_SUFFIX)]}.{uuid.uuid4().hex}{_UNFINISHED}"
        file = self._store.take_room(unfinished, self._num_bytes, gives_way_s)
        if file is None:
            return False
        try:
            header = _HEADER.pack(_MAGIC, block_hash, len(block), checksum(block, LINE_BYTES))
            parts: list[bytes | memoryview] = [header.ljust(HEADER_BYTES, b"\0"), block.data]
            if os.pwritev(file, parts, 0) != self._num_bytes:
                raise OSError(f"only a part of {unfinished} could be written")
            os.utime(file, _times(depth))
            self._store.finish(unfinished, path, self._num_bytes)
        except OSError:
            self._store.remove(unfinished, self._num_bytes)
            raise
        finally:
            os.close(file)
        return True

    def read(self, block_hash: bytes, block: np.ndarray, depth: int = 0) -> bool:
        """Fills `block`, `[block_bytes]` uint8. False: the file is not there, or is damaged (and now removed). Raises
        `OSError`."""
        path = self._path(block_hash)
        header = bytearray(HEADER_BYTES)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            num_there = os.fstat(file).st_size
            num_bytes = os.preadv(file, [header, block.data], 0)
        finally:
            os.close(file)
        known = (_MAGIC, block_hash, len(block), checksum(block, LINE_BYTES))
        if num_bytes != self._num_bytes or _HEADER.unpack_from(header) != known:
            logger.warning("%s is damaged and removed", path)
            self._store.remove(path, num_there)
            return False
        with contextlib.suppress(FileNotFoundError):
            _touch(path, depth)
        return True

    def look(self) -> Changes:
        """Changes since the last call. Files of another size are damaged, and removed; a folder that cannot be read is left
        for the next call."""
        found: list[tuple[float, bytes]] = []
        lost: list[bytes] = []
        for part in _folders(self._folder):
            try:
                changed_ns = os.stat(part).st_mtime_ns
                known_ns, known = self._known.get(part, (0, set()))
                if changed_ns == known_ns and time.time_ns() - changed_ns > 10**9:
                    continue
                here = dict(self._there(part))
            except OSError as error:
                logger.error("%s cannot be looked through: %s", part, error)
                continue
            found += [(at_s, block_hash) for block_hash, at_s in here.items() if block_hash not in known]
            lost += known - here.keys()
            self._known[part] = changed_ns, set(here)
        return Changes([block_hash for _, block_hash in sorted(found)], lost)

    def _there(self, part: str) -> Iterator[tuple[bytes, float]]:
        """Hashes of the blocks in one of the folders, and when they were read last."""
        for entry in os.scandir(part):
            name, suffix = os.path.splitext(entry.name)
            if suffix != _SUFFIX:
                continue
            with contextlib.suppress(FileNotFoundError, ValueError):
                stat, block_hash = entry.stat(), bytes.fromhex(name)
                if stat.st_size == self._num_bytes:
                    yield block_hash, stat.st_mtime
                else:
                    logger.warning("%s is damaged and removed: it has %d bytes", entry.path, stat.st_size)
                    self._store.remove(entry.path, stat.st_size)


def _folders(folder: Path | str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _times(depth: int) -> tuple[float, float]:
    """Times of access and change of a file that is used now."""
    at_s = used_at_s(time.time(), depth)
    return at_s, at_s


def _touch(path: str, depth: int) -> None:
    """Raises `FileNotFoundError`."""
    with contextlib.suppress(PermissionError):  # another user's, whose instances keep it
        os.utime(path, _times(depth))


def _remove(path: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
