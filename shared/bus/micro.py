"""Makes a service known to NATS's own tools: `nats micro ls|info|stats` (NATS architecture decision record 32).

nats-py's own `nats.micro` awaits one handler at a time per endpoint; here only its discovery protocol is spoken, and the
endpoints themselves are served by `serving`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.bus.metrics import subject_pattern
from shared.bus.nats_client import DirectClient
from shared.bus.serving import EndpointServer
from shared.runtime.telemetry import installed_version

_TYPE_PREFIX = "io.nats.micro.v1."


class MicroService:
    """Answers PING, INFO and STATS on `$SRV` for one service of one connection."""

    def __init__(self, client: DirectClient, name: str, service_id: str) -> None:
        self._client = client
        self._identity = {"name": name, "id": service_id, "version": installed_version(), "metadata": {}}
        self._started = datetime.now(UTC).isoformat()
        self._servers: list[EndpointServer] = []

    def start(self) -> None:
        name, service_id = self._identity["name"], self._identity["id"]
        for verb, describe in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for suffix in ("", f".{name}", f".{name}.{service_id}"):
                self._client.subscribe_direct(f"$SRV.{verb}{suffix}", self._answering(describe))

    def add(self, server: EndpointServer) -> None:
        self._servers.append(server)

    def remove(self, server: EndpointServer) -> None:
        if server in self._servers:
            self._servers.remove(server)

    def _answering(self, describe: Callable[[], dict[str, Any]]) -> Callable[[bytes, bytes, bytes | None, bytes], None]:
        def answer(subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
            if reply:
                self._client.send(reply.decode(), "", b"", msgspec.json.encode(describe()))

        return answer

    def _ping(self) -> dict[str, Any]:
        return {"type": _TYPE_PREFIX + "ping_response", **self._identity}

    def _info(self) -> dict[str, Any]:
        endpoints = [{**_describe(server), "metadata": {}} for server in self._servers]
        return {"type": _TYPE_PREFIX + "info_response", **self._identity, "description": "", "endpoints": endpoints}

    def _stats(self) -> dict[str, Any]:
        endpoints = [
            {
                **_describe(server),
                "num_requests": server.num_requests,
                "num_errors": server.num_errors,
                "last_error": server.last_error,
                "processing_time": int(server.processing_s * 1e9),
                "average_processing_time": int(server.processing_s * 1e9 / max(1, server.num_requests)),
            }
            for server in self._servers
        ]
        return {
            "type": _TYPE_PREFIX + "stats_response",
            **self._identity,
            "started": self._started,
            "endpoints": endpoints,
        }


def _describe(server: EndpointServer) -> dict[str, str]:
    name = "".join(c for c in subject_pattern(server.subject).replace(".", "_") if c.isalnum() or c in "-_")
    return {"name": name, "subject": server.subject, "queue_group": server.queue_group}
