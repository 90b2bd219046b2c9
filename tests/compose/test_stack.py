"""The container stack for real: built, started, used, and disturbed. Needs a container engine and minutes:

    pytest -m container tests/compose

COMPOSE_OVERRIDE may name one more compose file, for what an engine needs to build or run here (say a network for builds).
Jaeger, Prometheus and Grafana are left out; the traces go to a collector of this test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.e2e.otlp_collector import OtlpCollector

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("gateway", "scheduler", "placement", "worker")
MODEL = "tideway-demo-llama"
READY_TIMEOUT_S = 300.0


def run(*command: str, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1500
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def health(container: str) -> str:
    return run("docker", "inspect", container, "--format", "{{.State.Health.Status}}").strip()


def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.2)


class Containers:
    def __init__(self, endpoint: str = "") -> None:
        v1 = shutil.which("docker-compose")
        self.compose = [v1] if v1 else ["docker", "compose"]
        self.compose += ["-p", f"tideway-{uuid.uuid4().hex[:8]}", "-f", "docker-compose.yml"]
        if os.environ.get("COMPOSE_OVERRIDE"):
            self.compose += ["-f", os.environ["COMPOSE_OVERRIDE"]]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {"TIDEWAY_PUBLISH": f"127.0.0.1:{port}", "TIDEWAY_OTLP_ENDPOINT": endpoint}

    def __call__(self, *arguments: str) -> str:
        return run(*self.compose, *arguments, **self._environment)

    def ids(self, service: str) -> list[str]:
        return self("ps", "-q", service).split()

    def instances(self) -> list[dict]:
        return httpx.get(f"{self.url}/admin/instances", timeout=5).json()["instances"]

    def is_ready(self, num_instances: int) -> bool:
        try:
            ready = [
                i for i in self.instances() if i["state"] == "ready" and all(m["state"] == "ready" for m in i["models"])
            ]
            return len(ready) == num_instances and httpx.get(f"{self.url}/ready", timeout=5).is_success
        except (httpx.HTTPError, ValueError, KeyError):
            return False


def address_of_host() -> str:
    """This machine as containers see it: their default route."""
    script = (
        "import socket, struct\n"
        "routes = [line.split() for line in open('/proc/net/route')][1:]\n"
        "gateway = next(route[2] for route in routes if route[1] == '00000000')\n"
        "print(socket.inet_ntoa(struct.pack('<L', int(gateway, 16))))"
    )
    return run("docker", "run", "--rm", "tideway-scheduler", "python", "-c", script).strip()


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    Containers()("build", *PARTS)
    collector = OtlpCollector()
    # It listens on the loopback interface, which containers do not share; this server passes it what they send.
    server = ThreadingHTTPServer((address_of_host(), 0), collector._server.RequestHandlerClass)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.endpoint = "http://{}:{}".format(*server.server_address)
    yield collector
    server.shutdown()
    server.server_close()
    collector.close()


@pytest.fixture(scope="module")
def stack(collector: OtlpCollector) -> Iterator[Containers]:
    containers = Containers(collector.endpoint)
    try:
        containers("up", "-d", "proxy", *PARTS)
        until(lambda: containers.is_ready(2), "two ready instances", READY_TIMEOUT_S)
        yield containers
    except BaseException:
        print(containers("logs", "--tail=60"))
        raise
    finally:
        containers("down", "-v", "-t", "20")


def stream_chat(
    url: str, max_tokens: int, on_text: Callable[[int], None] = lambda count: None, **fields: object
) -> tuple[str, str]:
    """(text, finish reason) of a streamed chat."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is a compiler?"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": max_tokens,
        **fields,
    }
    text, reason, num_chunks = "", "", 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                num_chunks += 1
                on_text(num_chunks)
    return text, reason


def test_containers_run_without_root_within_bounds_and_with_no_more_than_they_need(stack: Containers) -> None:
    for part in PARTS:
        for container in stack.ids(part):
            assert run("docker", "exec", container, "id", "-u").strip() == "10001"
            assert int(run("docker", "inspect", container, "--format", "{{.HostConfig.Memory}}")) > 0
            until(lambda container=container: health(container) == "healthy", f"{part} is healthy", 60)
            root = "touch /app/x 2>/dev/null && exit 1; touch /tmp/x"
            run("docker", "exec", container, "sh", "-c", root)
            find = "import importlib.util as u; print([m for m in ('torch', 'ucxx') if u.find_spec(m)])"
            heavy = run("docker", "exec", container, "python", "-c", find).strip()
            assert heavy == ("['torch', 'ucxx']" if part == "worker" else "[]")
    assert len(stack.ids("worker")) == 2


def test_a_streamed_chat_and_its_trace(stack: Containers, collector: OtlpCollector) -> None:
    text, reason = stream_chat(stack.url, 30, ignore_eos=True)
    assert text and reason == "length"
    expected = {"tideway-gateway", "tideway-scheduler", "tideway-worker"}

    def services_of_one_trace() -> bool:
        traces = {span.trace_id for span in collector.spans}
        return any({span.service for span in collector.of_trace(trace)} >= expected for trace in traces)

    until(services_of_one_trace, "a trace over gateway, scheduler and worker", 20)


def test_the_command_works_inside(stack: Containers) -> None:
    output = run("docker", "exec", stack.ids("gateway")[0], "tideway", "status")
    assert MODEL in output and "2 of 2" in output


def kv_bytes_received(worker: str) -> float:
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9101/metrics').read().decode())"
    try:
        text = run("docker", "exec", worker, "python", "-c", script)
    except AssertionError:  # its instance is drained and gone
        return 0.0
    found = re.search(r'^tideway_kv_transfer_bytes_total\{direction="in"\} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_stream_moves_from_container_to_container(stack: Containers) -> None:
    until(lambda: all(instance["migration"] for instance in stack.instances()), "KV moves over UCX", 30)
    drained: list[str] = []

    def drain(num_chunks: int) -> None:
        if drained or num_chunks % 20:
            return
        for instance in stack.instances():
            if any(model["num_running"] for model in instance["models"]):
                drained.append(instance["instance_id"])
                httpx.post(f"{stack.url}/admin/instances/{drained[0]}/drain", timeout=20).raise_for_status()
                return

    moved = stream_chat(stack.url, 1500, drain, ignore_eos=True)
    assert len(drained) == 1 and sum(map(kv_bytes_received, stack.ids("worker"))) > 0
    # Not before: blocks that the destination has in its prefix cache do not move.
    assert stream_chat(stack.url, 1500, ignore_eos=True) == moved
    command = ("docker", "exec", stack.ids("gateway")[0], "tideway", "drain", drained[0])
    assert "gone" in run(*command, "--wait")
    assert "ready" in run(*command, "--undo", "--wait")
    assert stack.is_ready(2)


def test_a_worker_is_killed_in_the_middle_of_streams(stack: Containers) -> None:
    fields = {"ignore_eos": True}
    undisturbed, _ = stream_chat(stack.url, 400, **fields)
    kill = threading.Event()
    results: list[tuple[str, str]] = []
    failures: list[BaseException] = []

    def client() -> None:
        try:
            results.append(stream_chat(stack.url, 400, lambda count: kill.set() if count == 20 else None, **fields))
        except BaseException as error:
            failures.append(error)

    # Several at once, so that both workers have some.
    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert kill.wait(60)
    victim = stack.ids("worker")[0]
    run("docker", "kill", victim)
    for thread in threads:
        thread.join(180)
    assert failures == []
    assert [reason for _, reason in results] == ["length"] * 6
    assert {text for text, _ in results} == {undisturbed}

    # A container that was killed by hand stays down until it is started.
    run("docker", "start", victim)
    until(lambda: stack.is_ready(2), "the worker is back", READY_TIMEOUT_S)
