"""HAProxy with the configuration that compose gives it, before gateways on addresses of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port

CONFIG = Path(__file__).resolve().parents[2] / "deploy/haproxy/haproxy.cfg"
START_TIMEOUT_S = 20.0
A_RECORD = 1


def binary() -> str:
    found = os.environ.get("HAPROXY") or shutil.which("haproxy")
    if found is None:
        pytest.skip("HAProxy is not installed (apt install haproxy, or HAPROXY=its path)")
    return found


class NameServer:
    """Answers as the container engine's does: to any name, with the addresses of the gateways."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = [socket.inet_aton(address) for address in addresses]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        """To the one question of a query (RFC 1035, section 4)."""
        end = query.index(b"\0", 12) + 5
        (kind,) = struct.unpack_from("!H", query, end - 4)
        addresses = self._addresses if kind == A_RECORD else []
        header = query[:2] + struct.pack("!5H", 0x8180, 1, len(addresses), 0, 0)
        # The name by a pointer to the question, class IN, one second to live.
        records = [struct.pack("!HHHIH", 0xC00C, A_RECORD, 1, 1, 4) + address for address in addresses]
        return header + query[12:end] + b"".join(records)

    def close(self) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


class Proxy:
    """`gateways`: their addresses, which all listen on `port`."""

    def __init__(self, folder: Path, gateways: Sequence[str], port: int) -> None:
        program = binary()
        self._names = NameServer(gateways)
        own_port = free_port()
        self.url = f"http://127.0.0.1:{own_port}"
        text = CONFIG.read_text()
        for of_compose, here in (
            ("127.0.0.11:53", self._names.address),
            ("bind :8000", f"bind 127.0.0.1:{own_port}"),
            ("gateway:8000", f"gateway:{port}"),
        ):
            text, num_found = re.subn(rf"{re.escape(of_compose)}$", here, text, flags=re.MULTILINE)
            assert num_found == 1, of_compose
        config = folder / "haproxy.cfg"
        config.write_text(text)
        self._log = (folder / "haproxy.log").open("wb")
        checked = subprocess.run([program, "-c", "-f", config], capture_output=True, text=True, timeout=30)
        assert checked.returncode == 0 and "WARNING" not in checked.stderr, checked.stderr
        self._process = subprocess.Popen([program, "-W", "-f", config], stdout=self._log, stderr=self._log)

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert time.monotonic() < deadline_s and self._process.poll() is None, Path(self._log.name).read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._names.close()
        self._log.close()
