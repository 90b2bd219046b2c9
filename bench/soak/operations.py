"""What operators, batches and crashes do during a soak, one after another. Each leaves the system as it found it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from bench.batches import ENDED, answers_of, batch_of, file_of
from bench.soak.traffic import FaultError, Traffic
from tests.e2e.stack import Stack
from tests.worker.adapters import write_adapter

WAIT_S = 90.0
BATCH_LINES = 120


class Operations:
    def __init__(self, stack: Stack, traffic: Traffic, adapters: Path, checkpoints: dict[str, str]) -> None:
        self._stack = stack
        self._traffic = traffic
        self._client = traffic.client
        self._url = stack.url
        self._num_instances = stack.num_expected_instances
        self._adapter = write_adapter(adapters / "soak-lora", Path(checkpoints["llama"]))
        self.all: tuple[Callable[[], Awaitable[None]], ...] = (
            self.batch,
            self.adapter,
            self.drain,
            self.kill_instance,
            self.cancelled_batch,
            self.scale_model,
            self.kill_scheduler,
            self.route,
            self.kill_worker,
            self.scale_instances,
            self.model,
            self.kill_placement,
        )

    async def forever(self) -> None:
        while True:
            for operation in self.all:
                await self.run(operation)

    async def run(self, operation: Callable[[], Awaitable[None]]) -> None:
        name = operation.__name__
        try:
            await operation()
            self._traffic.counts[name, "done"] += 1
        except (FaultError, httpx.HTTPError, TimeoutError) as error:
            self._traffic.counts[name, "fault"] += 1
            self._traffic.fault(f"{name}: {error!r}")

    # ---------------------------------------------------------------------------------------------------- steps

    async def _ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Again while it is refused for now, as a client does."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            answer = await self._client.request(method, f"{self._url}{path}", json=body, **more)
            if answer.status_code < 400:
                return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
            if answer.status_code not in (408, 409, 429, 503) or time.monotonic() > deadline_s:
                raise FaultError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
            await asyncio.sleep(0.5)

    async def _until(self, what: str, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """`condition` of all instances."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition((await self._ask("GET", "/admin/instances"))["instances"]):
            if time.monotonic() > deadline_s:
                raise FaultError(f"{what} not within {WAIT_S:g} s")
            await asyncio.sleep(0.2)

    async def whole(self) -> None:
        """All instances are there, with all models."""
        await self._until("all instances with all models", self._is_whole)

    def _is_whole(self, instances: list[dict[str, Any]]) -> bool:
        wanted = set(self._stack.models)
        return len(instances) == self._num_instances and all(
            one["state"] == "ready" and wanted <= {m["name"] for m in one["models"] if m["state"] == "ready"}
            for one in instances
        )

    async def _some_instance(self) -> dict[str, Any]:
        await self.whole()
        return (await self._ask("GET", "/admin/instances"))["instances"][0]

    async def put_back(self) -> None:
        """What an operation that was cut short had changed."""
        for instance in (await self._ask("GET", "/admin/instances"))["draining"] or ():
            await self._ask("POST", f"/admin/instances/{instance}/undrain")
        await self._ask("POST", "/admin/scale", {"instances": self._num_instances})
        await self._ask("POST", "/admin/models/opt/scale", {"replicas": None})
        cards = {card["id"] for card in (await self._ask("GET", "/v1/models"))["data"]}
        if self._adapter.name in cards:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": self._adapter.name})
        if "soak-route" in cards:
            await self._ask("DELETE", "/admin/routes/soak-route")
        if "soak-model" in cards:
            await self._ask("DELETE", "/admin/models/soak-model")
        for batch in (await self._ask("GET", "/v1/batches"))["data"]:
            if batch["status"] not in ENDED:
                await self._ask("POST", f"/v1/batches/{batch['id']}/cancel")
                await self._ended_batch(batch["id"])
        for file in (await self._ask("GET", "/v1/files"))["data"]:
            await self._ask("DELETE", f"/v1/files/{file['id']}")
        await self.whole()

    # ---------------------------------------------------------------------------------------------- operations

    async def _begin_batch(self, num_lines: int) -> tuple[str, list[str]]:
        """Its id, and its lines' own."""
        body = {"model": "opt", "prompt": "Chapter", "max_tokens": 12, "ignore_eos": True}
        bodies = {f"line-{i}": body for i in range(num_lines)}
        file = await self._ask("POST", "/v1/files", **file_of(bodies))
        return (await self._ask("POST", "/v1/batches", batch_of(file)))["id"], list(bodies)

    async def _ended_batch(self, batch_id: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + 3 * WAIT_S
        while (found := await self._ask("GET", f"/v1/batches/{batch_id}"))["status"] not in ENDED:
            if time.monotonic() > deadline_s:
                raise FaultError(f"the batch is {found['status']}: {found['request_counts']}")
            await asyncio.sleep(0.3)
        return dict(found)

    async def _forget(self, batch: dict[str, Any]) -> None:
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch.get(name):
                await self._ask("DELETE", f"/v1/files/{batch[name]}")

    async def batch(self) -> None:
        batch_id, ids = await self._begin_batch(BATCH_LINES)
        found = await self._ended_batch(batch_id)
        text = await self._ask("GET", f"/v1/files/{found['output_file_id']}/content") if found["output_file_id"] else ""
        answered = [answer["custom_id"] for answer in answers_of(text)]
        if found["status"] != "completed" or answered != ids:
            raise FaultError(f"{found['status']}, {len(answered)} lines of {len(ids)}: {found['request_counts']}")
        await self._forget(found)

    async def cancelled_batch(self) -> None:
        batch_id, _ = await self._begin_batch(10 * BATCH_LINES)
        await self._ask("POST", f"/v1/batches/{batch_id}/cancel")
        await self._forget(await self._ended_batch(batch_id))

    async def adapter(self) -> None:
        name = self._adapter.name
        loaded = {"lora_name": name, "lora_path": self._adapter.source, "base_model_name": "llama"}
        await self._ask("POST", "/v1/load_lora_adapter", loaded)
        for _ in range(4):
            await self._ask("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 8})
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def drain(self) -> None:
        name = (await self._some_instance())["instance_id"]
        await self._ask("POST", f"/admin/instances/{name}/drain")
        await self._until("the drained instance is gone", lambda all_: name not in {one["instance_id"] for one in all_})
        await self._ask("POST", f"/admin/instances/{name}/undrain")
        await self.whole()

    async def scale_model(self) -> None:
        def on(count: int) -> Callable[[list[dict[str, Any]]], bool]:
            return lambda all_: sum("opt" in {m["name"] for m in one["models"]} for one in all_) == count

        await self.whole()
        await self._ask("POST", "/admin/models/opt/scale", {"replicas": 1})
        await self._until("one instance with opt", on(1))
        await self._ask("POST", "/admin/models/opt/scale", {"replicas": None})
        await self.whole()

    async def scale_instances(self) -> None:
        await self.whole()
        await self._ask("POST", "/admin/scale", {"instances": self._num_instances - 1})
        await self._until("one instance less", lambda all_: len(all_) == self._num_instances - 1)
        await self._ask("POST", "/admin/scale", {"instances": self._num_instances})
        await self.whole()

    async def route(self) -> None:
        await self._ask("POST", "/admin/routes", {"name": "soak-route", "arms": {"llama": 1, "opt": 1}})
        for _ in range(4):
            await self._ask("POST", "/v1/completions", {"model": "soak-route", "prompt": "a", "max_tokens": 4})
        await self._ask("DELETE", "/admin/routes/soak-route")

    async def model(self) -> None:
        added = {"name": "soak-model", "source": self._stack.models["opt"], "replicas": 1}
        await self._ask("POST", "/admin/models", added)
        await self._ask("POST", "/v1/completions", {"model": "soak-model", "prompt": "a", "max_tokens": 4})
        await self._ask("DELETE", "/admin/models/soak-model")

    async def kill_instance(self) -> None:
        os.kill((await self._some_instance())["pid"], signal.SIGKILL)
        await asyncio.sleep(0.5)
        await self.whole()

    async def kill_scheduler(self) -> None:
        await self._restart("scheduler-0")

    async def kill_worker(self) -> None:
        await self.whole()
        await self._restart("worker-0")
        await self.whole()

    async def kill_placement(self) -> None:
        await self._restart("placement")
        await self.whole()

    async def _restart(self, name: str) -> None:
        """kill -9, and a new one."""
        await asyncio.to_thread(self._stack.kill, name)
        await asyncio.sleep(1.0)
        self._stack.start(name)
