"""A file system of a few MiB that fills up: a tmpfs in a mount namespace of its own, which needs no privileges where the
kernel lets users have namespaces."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

_SCRIPT = 'mount -t tmpfs -o size="$1" tmpfs "$0" && echo mounted && exec sleep 3600'


class SmallDiskError(Exception):
    """There cannot be one here."""


class SmallDisk:
    def __init__(self, num_bytes: int) -> None:
        """Raises `SmallDiskError`."""
        self._place = tempfile.TemporaryDirectory(prefix="tideway-disk-")
        self.path = Path(self._place.name)
        """Folder as seen by processes that `prefix` starts."""
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _SCRIPT, str(self.path), str(num_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._holder.stdout is not None
        if (said := self._holder.stdout.readline()) != b"mounted\n":
            self.close()
            raise SmallDiskError(f"no file system can be mounted here: {said.decode()}")
        self.prefix = ["nsenter", f"--target={self._holder.pid}", "--user", "--mount", "--preserve-credentials"]
        """Prefix of a command that is to see it."""
        self.seen_path = Path(f"/proc/{self._holder.pid}/root{self.path}")
        """Folder as seen from here."""
        self._ballast = self.seen_path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(64 * 1024)):
                pass

    def free(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        self._place.cleanup()
