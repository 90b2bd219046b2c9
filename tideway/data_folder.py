"""The folder that one `tideway up` keeps its things in (by default .tideway): what lies there, and who may use it.

lock               held by the running supervisor; its process id
state.json         what the supervisor last said about itself
credentials.json   made once; for NATS, by role, and, where API keys are configured, for /admin (mode 600)
nats.conf, nats/   the server's configuration (mode 600) and JetStream's store
logs/              one file a process
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from pathlib import Path

import msgspec

from shared.bus.permissions import ROLES
from shared.runtime.files import write_whole

LOCK_ATTEMPTS = 3
LOCK_RETRY_S = 0.05
"""A `status` that looks at the lock holds it for a moment."""
START_APART = ", or start a second one with another --data-dir and --port"
"""What else there is for whoever starts Tideway where it runs."""


class OperatorError(Exception):
    """Something the operator must change; the message is one sentence or two for them."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    admin_api_key: str
    nats_passwords: dict[str, str] = {}
    """By the name of the role, which is that of its user."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int | None
    num_starts: int
    metrics_port: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What `tideway status` and `tideway down` need to know of a running supervisor."""

    pid: int
    phase: str
    """starting | ready | stopping"""
    address: str
    """Address of the gateway, as reached from this machine."""
    nats_url: str
    started_unix_s: float
    processes: list[ProcessState]


class DataFolder:
    """Raises `OperatorError` where the folder cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self.jetstream = self.path / "nats"
        self.nats_config = self.path / "nats.conf"
        self._lock_path = self.path / "lock"
        self._lock_file: int | None = None

    def prepare(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise OperatorError(
                f"The data folder {self.path} cannot be used: {error.strerror}. Choose another with --data-dir."
            ) from None

    # ------------------------------------------------------------------------------------------------------ lock

    def acquire(self, advice: str = START_APART) -> None:
        """Held until this process ends. Raises `OperatorError` where another process has it; `advice`: what to do then."""
        lock_file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt < LOCK_ATTEMPTS - 1:
                    time.sleep(LOCK_RETRY_S)
        else:
            os.close(lock_file)
            raise self._taken(advice)
        os.ftruncate(lock_file, 0)
        os.write(lock_file, str(os.getpid()).encode())
        self._lock_file = lock_file

    def check_free(self) -> None:
        """Raises `OperatorError` where a supervisor runs on this folder."""
        if self.holder_pid() is not None:
            raise self._taken(START_APART)

    def _taken(self, advice: str) -> OperatorError:
        state = self.read_state()
        where = f" on {state.address}" if state else ""
        return OperatorError(
            f"Tideway runs here already{where} (process {self.holder_pid() or 'unknown'}). Stop it with `tideway down`"
            f" (make down){advice}."
        )

    def release(self) -> None:
        if self._lock_file is not None:
            self.remove_state()
            os.close(self._lock_file)
            self._lock_file = None

    def holder_pid(self) -> int | None:
        """The supervisor that runs on this folder; None if none does."""
        try:
            with self._lock_path.open("r") as lock_file:
                try:
                    fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return int(lock_file.read() or "0") or None
        except (OSError, ValueError):
            pass
        return None

    # ------------------------------------------------------------------------------------------------ small files

    def write_private(self, path: Path, text: str) -> None:
        """Whole or not at all, and readable by its owner alone."""
        write_whole(path, text.encode(), 0o600)

    def credentials(self) -> Credentials:
        """Made at the first call, the same ever after."""
        path = self.path / "credentials.json"
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Credentials)
        except FileNotFoundError:
            known = Credentials(admin_api_key=secrets.token_urlsafe(24))
        except (OSError, msgspec.MsgspecError) as error:
            raise OperatorError(
                f"{path} cannot be read ({error}). Remove it, and the next start makes a new one."
            ) from None
        if missing := ROLES.keys() - known.nats_passwords:
            passwords = known.nats_passwords | {name: secrets.token_urlsafe(24) for name in sorted(missing)}
            known = msgspec.structs.replace(known, nats_passwords=passwords)
            self.write_private(path, msgspec.json.encode(known).decode())
        return known

    def write_state(self, state: State) -> None:
        self.write_private(self.path / "state.json", json.dumps(msgspec.to_builtins(state), indent=1) + "\n")

    def read_state(self) -> State | None:
        """None if there is none, or none that this version can read."""
        try:
            return msgspec.json.decode((self.path / "state.json").read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError):
            return None

    def running_state(self) -> State | None:
        """State of the supervisor that runs on this folder."""
        return self.read_state() if self.holder_pid() else None

    def remove_state(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "state.json").unlink()
