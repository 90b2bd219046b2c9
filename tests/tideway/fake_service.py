"""A service as `tideway up` sees one: /health on its metrics port, and its part in the registry. Starts in a moment.

python -m tests.tideway.fake_service ROLE, settings by environment. ROLE:
  plain      nothing but /health
  gateway    /ready on TIDEWAY_PORT too, and takes changes of the models, but for "bad/..."
  placement  remembers models of earlier starts; puts each of FAKE_MODELS on one instance, but "none/..." is too large, and
             "removed/..." is not there
  worker     that instance, with all models ready
  broken     ends at once with exit code 1, after a line in its log
  refusing   ends at once as a service does whose settings cannot be used
  deaf       as plain, and ignores SIGTERM
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class _Answer(BaseHTTPRequestHandler):
    num_posted = 0

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/health", "/live", "/ready") else 404)
        self.end_headers()

    def do_DELETE(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        print(self.path, body.decode(), flush=True)
        source = json.loads(body)["source"]
        _Answer.num_posted += 1
        is_early = source.startswith("late/") and _Answer.num_posted < 3
        self.send_response(400 if source.startswith("bad/") else 503 if is_early else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "its template is broken."}}')

    def log_message(self, format: str, *args: object) -> None:
        print(format % args, flush=True)


def _serve_http(port: int) -> None:
    threading.Thread(target=HTTPServer(("127.0.0.1", port), _Answer).serve_forever, daemon=True).start()


async def _register(role: str) -> None:
    from shared.bus.nats_bus import NatsBus
    from shared.messages.catalogue import (
        INSTANCES,
        MODELS,
        NODES,
        PLANS,
    )
    from shared.messages.channels import bucket_key
    from shared.messages.cluster import (
        InstanceInfo,
        InstancePlan,
        LoadedModel,
        ModelSpec,
        NodeInfo,
        PlacementPlan,
    )
    from shared.runtime.settings import BusSettings, load

    bus = await NatsBus.connect(load(BusSettings), role, role)
    models = [ModelSpec(**spec) for spec in json.loads(os.environ["FAKE_MODELS"])]
    placed = [model for model in models if not model.source.startswith(("none/", "removed/"))]
    if role == "placement":
        instance = InstancePlan(instance_id="node-0", node_id="node", models=placed, pool_bytes=0, merged_bytes=0)
        unplaced = {model.name: "it is too large" for model in models if model.source.startswith("none/")}
        draining, released = json.loads(os.environ.get("FAKE_DRAINING", "[[], []]"))
        is_chosen = bool(os.environ.get("FAKE_CHOSEN"))
        plan = PlacementPlan(1, [instance] if placed else [], unplaced, draining, released, is_chosen=is_chosen)
        # The others may not make them.
        await bus.key_value(INSTANCES)
        await bus.key_value(NODES)
        configured = await bus.key_value(MODELS)
        for model in models:
            if not model.source.startswith("removed/") and await configured.get(bucket_key(model.name)) is None:
                await configured.put(bucket_key(model.name), model)
        await (await bus.key_value(PLANS)).put("current", plan)
        _serve_http(int(os.environ["TIDEWAY_METRICS_PORT"]))
        await asyncio.Event().wait()
    loaded = [LoadedModel(name=model.name, state="ready") for model in placed]
    instances, nodes = await bus.key_value(INSTANCES), await bus.key_value(NODES)
    while True:
        await instances.put(
            "node-0",
            InstanceInfo(
                instance_id="node-0",
                incarnation="1",
                node_id="node",
                state="ready",
                models=loaded,
                num_merged=10,
                merged_bytes=1 << 20,
            ),
        )
        await nodes.put("node", NodeInfo(node_id="node", hostname="host", num_instances=1, memory_bytes=1 << 30))
        await asyncio.sleep(1.0)


def main() -> None:
    role = sys.argv[1]
    print(f"{role} starts", flush=True)
    if role == "broken":
        print("the cause stands here", flush=True)
        sys.exit(1)
    if role == "refusing":
        print("tideway: TIDEWAY_PORT='x': expected int", flush=True)
        sys.exit(2)
    if role == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if role != "placement":
        _serve_http(int(os.environ["TIDEWAY_METRICS_PORT"]))
    if role == "gateway":
        _serve_http(int(os.environ["TIDEWAY_PORT"]))
    if role in ("placement", "worker"):
        asyncio.run(_register(role))
    signal.pause()


if __name__ == "__main__":
    main()
