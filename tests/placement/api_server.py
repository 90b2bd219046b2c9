"""A scripted Kubernetes API server on real HTTP: the scale subresource of one workload, its pods, and a controller that acts
when the test says so."""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COST = "controller.kubernetes.io/pod-deletion-cost"


class ScriptedApiServer:
    """`faults`: answers to the next calls instead of the right ones: a status code, "silent" (for a second), "text" (no
    JSON), or "race" (somebody else changes the replicas before a PATCH)."""

    def __init__(self, workload: str = "statefulset/worker", replicas: int = 2, token: str = "t0") -> None:
        self.kind, _, self.name = workload.partition("/")
        self.replicas = replicas
        self.revision = 10
        self.token = token
        self.calls: list[tuple[str, str]] = []
        self.faults: list[int | str] = []
        self.pods: dict[str, dict[str, Any]] = {}
        self._serial = 0
        self.reconcile()

    def reconcile(self) -> None:
        """What the controller does about the replicas; pods that are being deleted go."""
        self.pods = {n: p for n, p in self.pods.items() if "deletionTimestamp" not in p["metadata"]}
        if self.kind == "statefulset":
            wanted = [f"{self.name}-{k}" for k in range(self.replicas)]
            doomed = [name for name in self.pods if name not in wanted]
            for name in wanted:
                self.pods.setdefault(name, {"metadata": {"name": name}})
        else:
            by_cost = sorted(self.pods, key=lambda n: int(self.pods[n]["metadata"].get("annotations", {}).get(COST, 0)))
            doomed = by_cost[: max(0, len(self.pods) - self.replicas)]
            while len(self.pods) < self.replicas:
                self._serial += 1
                name = f"{self.name}-5d8f-x{self._serial}"
                self.pods[name] = {"metadata": {"name": name}}
        for name in doomed:
            self.pods[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    @property
    def alive(self) -> list[str]:
        return sorted(n for n, p in self.pods.items() if "deletionTimestamp" not in p["metadata"])

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        self.calls.append((method, path))
        scale = f"/apis/apps/v1/namespaces/tide/{self.kind}s/{self.name}/scale"
        if path == scale:
            if body is not None:
                if body["metadata"]["resourceVersion"] != str(self.revision):
                    return 409, {"message": "the object has been modified"}
                self.replicas = body["spec"]["replicas"]
                self.revision += 1
            spec = {"replicas": self.replicas} if self.replicas else {}
            status = {"replicas": len(self.alive)}
            return 200, {"metadata": {"resourceVersion": str(self.revision)}, "spec": spec, "status": status}
        match = re.fullmatch(r"/api/v1/namespaces/tide/pods/([a-z0-9-]+)", path)
        if match and (pod := self.pods.get(match[1])) is not None:
            if body is not None:
                pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
            return 200, pod
        return 404, {"message": f"{path} not found"}

    @contextmanager
    def serving(self, certificate: tuple[Path, Path] | None = None) -> Iterator[str]:
        """Yields its address."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._handle(None)

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                self._handle(body)

            def _handle(self, body: dict[str, Any] | None) -> None:
                fault = api.faults.pop(0) if api.faults else None
                if self.headers["Authorization"] != f"Bearer {api.token}":
                    self._send(401, {"message": "Unauthorized"})
                elif fault == "silent":
                    time.sleep(1.0)
                elif isinstance(fault, int):
                    self._send(fault, {"message": f"as scripted: {fault}"})
                elif fault == "text":
                    self._send(200, None)
                else:
                    if fault == "race":
                        api.revision += 1
                    self._send(*api.answer(self.command, self.path, body))

            def _send(self, status: int, body: dict[str, Any] | None) -> None:
                data = b"<html>" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            scheme = "https"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
