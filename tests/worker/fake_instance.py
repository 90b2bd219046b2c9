"""A scripted instance on the real bus, started by the node agent under test: registers each second, and plays loading and
unloading of models without torch. What a model's source says decides how it behaves: `fail` cannot be loaded, `exit` ends
the process, `held` has requests that take HELD_S to move away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid

import msgspec

from services.worker.black_box import BlackBox
from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.admin import (
    Done,
    Drain,
    LoadModel,
    UnloadModel,
)
from shared.messages.catalogue import (
    INSTANCE_DRAIN,
    INSTANCE_LOAD_MODEL,
    INSTANCE_UNLOAD_MODEL,
    INSTANCES,
)
from shared.messages.cluster import (
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelSpec,
)
from shared.runtime.service import run_service
from shared.runtime.settings import InstanceSettings, load

TAKES_S = 0.1
HELD_S = 1.5


class FakeInstance:
    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        self._plan = msgspec.json.decode(settings.plan, type=InstancePlan)
        self._incarnation = uuid.uuid4().hex
        self._models: dict[str, LoadedModel] = {}
        self._state = "ready"
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        print(f"plays {self._settings.instance_id}", flush=True)
        BlackBox(self._settings.black_box).note([f"a request of {self._settings.instance_id}"])
        bus = await NatsBus.connect(self._settings, service="instance", service_id=self._settings.instance_id)
        ids = {"instance_id": self._settings.instance_id}

        ending: list[asyncio.TimerHandle] = []

        async def drain(query: Drain) -> Done:
            while ending:
                ending.pop().cancel()
            if not query.is_undone:
                is_held = any(spec.source == "held" for spec in self._plan.models)
                ending.append(asyncio.get_running_loop().call_later(HELD_S if is_held else TAKES_S, stop.set))
            self._state = "ready" if query.is_undone else "draining"
            self._changed.set()
            return Done()

        await bus.serve(INSTANCE_LOAD_MODEL.at(**ids), self._on_load)
        await bus.serve(INSTANCE_UNLOAD_MODEL.at(**ids), self._on_unload)
        await bus.serve(INSTANCE_DRAIN.at(**ids), drain)
        for spec in self._plan.models:
            self._begin(self._load(spec))
        registry = await bus.key_value(INSTANCES)
        registering = asyncio.create_task(self._keep_registered(registry))
        await stop.wait()
        if self._state != "draining" and any(spec.source == "held" for spec in self._plan.models):
            self._state = "draining"
            self._changed.set()
            await asyncio.sleep(HELD_S)
        registering.cancel()
        await registry.delete(self._settings.instance_id)
        await bus.close()

    def _begin(self, coroutine) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_load(self, query: LoadModel) -> Done:
        self._begin(self._load(query.spec))
        return Done()

    async def _on_unload(self, query: UnloadModel) -> Done:
        self._begin(self._unload(query.name))
        return Done()

    async def _load(self, spec: ModelSpec) -> None:
        self._show(LoadedModel(name=spec.name, state="loading"))
        await asyncio.sleep(TAKES_S)
        if spec.source == "exit":
            print(f"cannot go on with {spec.name}", flush=True)
            os._exit(3)
        failed = spec.source == "fail"
        self._show(
            LoadedModel(name=spec.name, state="failed" if failed else "ready", error="no such folder" if failed else "")
        )

    async def _unload(self, name: str) -> None:
        self._show(LoadedModel(name=name, state="unloading"))
        await asyncio.sleep(TAKES_S)
        del self._models[name]
        self._changed.set()

    def _show(self, model: LoadedModel) -> None:
        self._models[model.name] = model
        self._changed.set()

    async def _keep_registered(self, registry) -> None:  # type: ignore[no-untyped-def]
        while True:
            self._changed.clear()
            info = InstanceInfo(
                instance_id=self._settings.instance_id,
                incarnation=self._incarnation,
                node_id=self._settings.node_id,
                state=self._state,
                models=list(self._models.values()),
                num_merged=self._plan.pool_bytes // self._plan.merged_bytes,
                merged_bytes=self._plan.merged_bytes,
                device=self._settings.device,
                pid=os.getpid(),
            )
            with contextlib.suppress(BusError):  # the bus is away: again in a second
                await registry.put(info.instance_id, info)
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                pass


if __name__ == "__main__":
    instance_settings = load(InstanceSettings)
    run_service(FakeInstance(instance_settings).run, instance_settings)
    sys.exit(0)
