"""What operators and batches do during a soak, one after another. Each leaves the system as it found it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from bench.batches import ENDED, answers_of, batch_of, file_of
from bench.soak.traffic import KEY, FaultError, Traffic
from tests.e2e.stack import Stack
from tests.worker.adapters import write_adapter

WAIT_S = 420.0
"""Time for what takes seconds on a machine that has nothing else to do."""
BATCH_LINES = 120
IDLE_S = 2.0
"""Without a request, after which the model on demand is put away."""
KEY_REQUESTS, REQUEST_TOKENS = 3, 40
"""Requests that a key with a limit has in a minute, and the tokens of each."""
KEY_WINDOW_S = 50.0
"""In which what was used counts for sure."""

Operation = Callable[[], Awaitable[None]]


class Operations:
    def __init__(self, stack: Stack, traffic: Traffic, adapters: Path, checkpoints: dict[str, str], keys: Path) -> None:
        """`keys`: the file of API keys that the gateways read."""
        self.stack, self.traffic = stack, traffic
        self._client = traffic.client
        self._url = stack.url
        self._num_instances = stack.num_expected_instances
        self._adapter = write_adapter(adapters / "soak-lora", Path(checkpoints["llama"]))
        self._keys = keys
        self._num_limited_keys = 0
        self.all: tuple[Operation, ...] = (
            self.batch,
            self.adapter,
            self.drain,
            self.cancelled_batch,
            self.limited_key,
            self.scale_model,
            self.route,
            self.scale_instances,
            self.model,
            self.model_on_demand,
        )

    async def run(self, operation: Operation) -> None:
        name = operation.__name__
        try:
            await operation()
            self.traffic.counts[name, "done"] += 1
        except (FaultError, httpx.HTTPError, TimeoutError) as error:
            self.traffic.counts[name, "fault"] += 1
            self.traffic.fault(f"{name}: {error!r}")

    # ---------------------------------------------------------------------------------------------------- steps

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Again while it is refused for now, or nobody answers, as a client does."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                answer = await self._client.request(method, f"{self._url}{path}", json=body, **more)
            except httpx.TransportError as error:
                if time.monotonic() > deadline_s:
                    raise FaultError(f"{method} {path}: {error!r}") from None
                await asyncio.sleep(0.5)
                continue
            if answer.status_code < 400:
                return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
            if answer.status_code not in (408, 409, 429, 503) or time.monotonic() > deadline_s:
                raise FaultError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
            await asyncio.sleep(0.5)

    async def is_answered(self, url: str, body: dict[str, Any]) -> bool:
        """Whether a completion is answered at that gateway."""
        try:
            return (await self._client.post(f"{url}/v1/completions", json=body)).status_code == 200
        except httpx.TransportError:
            return False

    async def until(self, what: str, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """`condition` of all instances."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition((await self.ask("GET", "/admin/instances"))["instances"]):
            if time.monotonic() > deadline_s:
                raise FaultError(f"{what} not within {WAIT_S:g} s")
            await asyncio.sleep(0.2)

    async def whole(self) -> None:
        """All instances are there, with all models."""
        await self.until("all instances with all models", self._is_whole)

    def _is_whole(self, instances: list[dict[str, Any]]) -> bool:
        wanted = set(self.stack.models)
        return len(instances) == self._num_instances and all(
            one["state"] == "ready" and wanted <= {m["name"] for m in one["models"] if m["state"] == "ready"}
            for one in instances
        )

    async def some_instance(self) -> dict[str, Any]:
        await self.whole()
        return dict((await self.ask("GET", "/admin/instances"))["instances"][0])

    async def put_back(self) -> None:
        """What an operation that was cut short had changed."""
        for instance in (await self.ask("GET", "/admin/instances"))["draining"] or ():
            await self.ask("POST", f"/admin/instances/{instance}/undrain")
        await self.ask("POST", "/admin/scale", {"instances": self._num_instances})
        await self.ask("POST", "/admin/models/opt/scale", {"replicas": None})
        cards = {card["id"] for card in (await self.ask("GET", "/v1/models"))["data"]}
        if self._adapter.name in cards:
            await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": self._adapter.name})
        if "soak-route" in cards:
            await self.ask("DELETE", "/admin/routes/soak-route")
        for name in {"soak-model", "soak-on-demand"} & cards:
            await self.ask("DELETE", f"/admin/models/{name}")
        await self.replace_keys()
        await self.delete_batches()
        await self.whole()

    # ---------------------------------------------------------------------------------------------- operations

    async def begin_batch(self, num_lines: int) -> tuple[str, list[str]]:
        """Its id, and its lines' own."""
        body = {"model": "opt", "prompt": "Chapter", "max_tokens": 12, "ignore_eos": True}
        bodies = {f"line-{i}": body for i in range(num_lines)}
        file = await self.ask("POST", "/v1/files", **file_of(bodies))
        return (await self.ask("POST", "/v1/batches", batch_of(file)))["id"], list(bodies)

    async def ended_batch(self, batch_id: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + 3 * WAIT_S
        while (found := await self.ask("GET", f"/v1/batches/{batch_id}"))["status"] not in ENDED:
            if time.monotonic() > deadline_s:
                raise FaultError(f"the batch is {found['status']}: {found['request_counts']}")
            await asyncio.sleep(0.3)
        return dict(found)

    async def delete_batches(self) -> None:
        """All batches, and all files."""
        for batch in (await self.ask("GET", "/v1/batches", params={"limit": 100}))["data"]:
            if batch["status"] not in ENDED:
                await self.ask("POST", f"/v1/batches/{batch['id']}/cancel")
                await self.ended_batch(batch["id"])
            await self.ask("DELETE", f"/v1/batches/{batch['id']}")
        for file in (await self.ask("GET", "/v1/files"))["data"]:
            await self.ask("DELETE", f"/v1/files/{file['id']}")

    async def batch(self) -> None:
        await self.check_batch(*await self.begin_batch(BATCH_LINES))

    async def check_batch(self, batch_id: str, ids: list[str]) -> None:
        """Waits for its end: each line is answered once. Then it is deleted, with its files."""
        found = await self.ended_batch(batch_id)
        text = await self.ask("GET", f"/v1/files/{found['output_file_id']}/content") if found["output_file_id"] else ""
        answered = [answer["custom_id"] for answer in answers_of(text)]
        if found["status"] != "completed" or answered != ids:
            raise FaultError(f"{found['status']}, {len(answered)} lines of {len(ids)}: {found['request_counts']}")
        await self.delete_batches()

    async def cancelled_batch(self) -> None:
        batch_id, _ = await self.begin_batch(10 * BATCH_LINES)
        await self.ask("POST", f"/v1/batches/{batch_id}/cancel")
        await self.ended_batch(batch_id)
        await self.delete_batches()

    async def adapter(self) -> None:
        name = self._adapter.name
        loaded = {"lora_name": name, "lora_path": self._adapter.source, "base_model_name": "llama"}
        await self.ask("POST", "/v1/load_lora_adapter", loaded)
        for _ in range(4):
            await self.ask("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 8})
        await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def drain(self) -> None:
        name = (await self.some_instance())["instance_id"]
        await self.ask("POST", f"/admin/instances/{name}/drain")
        await self.until("the drained instance is gone", lambda all_: name not in {one["instance_id"] for one in all_})
        await self.ask("POST", f"/admin/instances/{name}/undrain")
        await self.whole()

    async def scale_model(self) -> None:
        def on(count: int) -> Callable[[list[dict[str, Any]]], bool]:
            return lambda all_: sum("opt" in {m["name"] for m in one["models"]} for one in all_) == count

        await self.whole()
        await self.ask("POST", "/admin/models/opt/scale", {"replicas": 1})
        await self.until("one instance with opt", on(1))
        await self.ask("POST", "/admin/models/opt/scale", {"replicas": None})
        await self.whole()

    async def scale_instances(self) -> None:
        await self.whole()
        await self.ask("POST", "/admin/scale", {"instances": self._num_instances - 1})
        await self.until("one instance less", lambda all_: len(all_) == self._num_instances - 1)
        await self.ask("POST", "/admin/scale", {"instances": self._num_instances})
        await self.whole()

    async def route(self) -> None:
        await self.ask("POST", "/admin/routes", {"name": "soak-route", "arms": {"llama": 1, "opt": 1}})
        for _ in range(4):
            await self.ask("POST", "/v1/completions", {"model": "soak-route", "prompt": "a", "max_tokens": 4})
        await self.ask("DELETE", "/admin/routes/soak-route")

    async def model(self) -> None:
        added = {"name": "soak-model", "source": self.stack.models["opt"], "replicas": 1}
        await self.ask("POST", "/admin/models", added)
        await self.ask("POST", "/v1/completions", {"model": "soak-model", "prompt": "a", "max_tokens": 4})
        await self.ask("DELETE", "/admin/models/soak-model")

    async def model_on_demand(self) -> None:
        """Loaded from disk by a request, put away, loaded from host memory by another."""
        name = "soak-on-demand"
        added = {"name": name, "source": self.stack.models["llama"], "on_demand": True, "idle_s": IDLE_S}
        await self.ask("POST", "/admin/models", added)
        for _ in range(2):
            await self.ask("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 4})
            await self._until_state(name, ("host", "disk"))
        await self.ask("DELETE", f"/admin/models/{name}")

    async def _until_state(self, model: str, states: tuple[str, ...]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while (state := (await self.ask("GET", f"/v1/models/{model}"))["state"]) not in states:
            if time.monotonic() > deadline_s:
                raise FaultError(f"{model} is {state}, not {' or '.join(states)}, after {WAIT_S:g} s")
            await asyncio.sleep(0.3)

    async def replace_keys(self, *limited: str) -> None:
        """`limited`: entries beside the key of all other requests."""
        new = self._keys.with_suffix(".new")
        new.write_text("\n".join((KEY, *limited)))
        new.replace(self._keys)

    async def limited_key(self) -> None:
        """A key comes, is used up at both gateways together, and goes."""
        self._num_limited_keys += 1  # a name of its own: what was used of one counts for a minute
        key = f"soak-limited-{self._num_limited_keys}"
        await self.replace_keys(f"{key}:4:{KEY_REQUESTS * REQUEST_TOKENS}")
        first, second = self.traffic.urls
        await self._until_status(second, key, (200,))
        begun_s, num_answered = time.monotonic(), 1
        # A gateway that does not hear from NATS in a quarter of a second counts alone: each holds the limit by itself then.
        most = KEY_REQUESTS * len(self.traffic.urls)
        while num_answered <= most:
            url = (first, second)[num_answered % 2]
            if (await self._until_status(url, key, (200, 429))).status_code == 429:
                break
            num_answered += 1
        if num_answered > most and time.monotonic() - begun_s < KEY_WINDOW_S:
            raise FaultError(f"{num_answered} answers with a key for {KEY_REQUESTS} a minute")
        self.traffic.counts["limited_key", f"refused after {num_answered} of {KEY_REQUESTS}"] += 1
        await self.replace_keys()
        for url in self.traffic.urls:
            await self._until_status(url, key, (401,))

    async def _until_status(self, url: str, key: str, expected: tuple[int, ...]) -> httpx.Response:
        """The answer to a request of `REQUEST_TOKENS` that has one of these: a gateway reads its keys each second."""
        prompt = [5] * (REQUEST_TOKENS // 2)
        body = {"model": "opt", "prompt": prompt, "max_tokens": REQUEST_TOKENS // 2, "ignore_eos": True}
        headers, deadline_s = {"authorization": f"Bearer {key}"}, time.monotonic() + WAIT_S
        while True:
            answer = await self._client.post(f"{url}/v1/completions", json=body, headers=headers)
            if answer.status_code in expected:
                return answer
            if answer.status_code not in (200, 401, 429) or time.monotonic() > deadline_s:
                raise FaultError(f"{answer.status_code}, not {expected}, with a key: {answer.text[:200]}")
            await asyncio.sleep(0.3)
