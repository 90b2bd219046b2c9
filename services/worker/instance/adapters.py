"""The LoRA adapters of one instance: which are loaded, beside the steps, and which go when there are too many.

(absent) --a request, a migration, or the catalogue names it--> loading --> loaded --least recently used--> (absent)
                                                                  |
                                                                  +--error--> failed (for a while)

Those that a request here is computed with stay. An adapter of the catalogue is loaded as soon as its model is here, so that
its first request finds it; beyond the limits it waits for that request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import prometheus_client

from services.worker.instance.engine_loop import EngineLoop
from shared.bus.interface import Bus, ServiceError, Watch
from shared.engine.engine import Engine
from shared.messages.catalogue import ADAPTERS
from shared.messages.cluster import AdapterSpec
from shared.messages.requests import Adapter, ErrorCode, ErrorInfo
from shared.models.checkpoint import CheckpointError, CheckpointMissing
from shared.runtime.tasks import TaskSet

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Time for reading an adapter, or downloading it."""
SUBMIT_WAIT_S = 1.0
"""Seconds that the sender of a request is kept waiting while its adapter is loaded: less than it waits for an answer."""
RETRY_S = 0.05
"""After which a migration may ask again."""
FAILURE_S = 5.0
"""How long an adapter that could not be loaded is not tried again."""
ROOM_POLL_S = 0.02
ROOM_WAIT_S = 10.0
"""Time for requests to end that use all that there is room for; then those that wait for it are placed again."""
RETIRE_POLL_S = 0.2


class AdapterExecutor(Protocol):
    def adapter_bytes(self, model: str, adapter: Adapter) -> int:
        """On the device. Slow; runs beside steps. `CheckpointError`, or `KeyError` without the model."""

    def load_adapter(self, model: str, adapter: Adapter) -> None:
        """Loads the adapter, as slowly; does nothing without the model. Raises `CheckpointError`."""

    def drop_adapter(self, version: str) -> None:
        """Runs between steps."""


@dataclass
class _Loaded:
    adapter: Adapter
    model: str
    num_bytes: int


class InstanceAdapters:
    def __init__(
        self,
        loop: EngineLoop,
        executor: AdapterExecutor,
        is_ready: Callable[[str], bool],
        on_change: Callable[[], None],
        registry: prometheus_client.CollectorRegistry,
        instance_id: str,
        *,
        max_adapters: int,
        max_bytes: int,
    ) -> None:
        """`is_ready`: whether a model of this name takes requests. `on_change` is called when others are loaded than before.
        The limits are for all models together."""
        self._loop = loop
        self._executor = executor
        self._is_ready = is_ready
        self._on_change = on_change
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """By version, the least recently used first."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[float, ErrorInfo]] = {}
        """Until when, by the loop's clock."""
        self._known: dict[str, AdapterSpec] = {}
        """The catalogue, by its keys."""
        self._turn = asyncio.Lock()
        """One is loaded at a time, into room that was made for it."""
        self._watch: Watch[AdapterSpec] | None = None
        self._tasks = TaskSet()
        labels = ("engine",)
        self._num_loaded = prometheus_client.Gauge(
            "tideway_adapters_loaded", "LoRA adapters on the instance's devices", labels, registry=registry
        ).labels(instance_id)
        self._num_bytes = prometheus_client.Gauge(
            "tideway_adapter_bytes", "Memory of LoRA adapters on each device", labels, registry=registry
        ).labels(instance_id)
        self._loads = prometheus_client.Counter(
            "tideway_adapter_loads",
            "Adapter loads by outcome",
            (*labels, "outcome"),
            registry=registry,
        )
        self._instance_id = instance_id
        self._load_seconds = prometheus_client.Histogram(
            "tideway_adapter_load_seconds", "Adapter load duration: making room and reading", labels, registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0),
        ).labels(instance_id)  # fmt: skip

    async def start(self, bus: Bus) -> None:
        """Follows the catalogue. Raises `BusError`."""
        self._watch = await (await bus.key_value(ADAPTERS)).watch(self._on_adapter)

    async def stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()
        await self._tasks.end_all()

    def names(self, model: str) -> tuple[str, ...]:
        """Names of adapters that are loaded for the model."""
        return tuple(sorted(one.adapter.name for one in self._loaded.values() if one.model == model))

    # ------------------------------------------------------------------------------------------------- requests

    def is_loaded(self, adapter: Adapter) -> bool:
        """Then it counts as used now."""
        if adapter.version not in self._loaded:
            return False
        self._loaded.move_to_end(adapter.version)
        return True

    async def provide(self, model: str, adapter: Adapter) -> None:
        """Returns when it is loaded. Raises `ServiceError`, as `missing` says: LOADING after `SUBMIT_WAIT_S`."""
        loading = self._load_soon(model, adapter)
        if loading is not None:
            await asyncio.wait({loading}, timeout=SUBMIT_WAIT_S)
        if not self.is_loaded(adapter):
            raise ServiceError(self._why_missing(model, adapter))

    def missing(self, model: str, adapter: Adapter) -> ErrorInfo | None:
        """Why the adapter is not here (`Intake.missing_adapter`): LOADING; MODEL_FAILED where no instance could load it,
        INTERNAL where another may; GONE with its model."""
        if self.is_loaded(adapter):
            return None
        self._load_soon(model, adapter)
        return self._why_missing(model, adapter)

    def _why_missing(self, model: str, adapter: Adapter) -> ErrorInfo:
        if not self._is_ready(model):
            return ErrorInfo(ErrorCode.GONE, f"model {model!r} takes no requests here", "model")
        if (failure := self._failure(adapter.version)) is not None:
            return failure
        message = f"the adapter {adapter.name!r} is being loaded on this instance"
        return ErrorInfo(ErrorCode.LOADING, message, "model", RETRY_S)

    def _failure(self, version: str) -> ErrorInfo | None:
        until_s, info = self._failed.get(version, (0.0, None))
        return info if self._loop.now() < until_s else None

    # -------------------------------------------------------------------------------------------------- loading

    def on_model_ready(self, model: str) -> None:
        """Loads the catalogue's adapters of the model, as far as there is room."""
        for spec in self._known.values():
            if spec.base == model:
                self._load_ahead(spec)

    def forget_model(self, model: str) -> None:
        """It is gone, and its adapters with it."""
        for version in [version for version, one in self._loaded.items() if one.model == model]:
            del self._loaded[version]
        self._show()

    def _on_adapter(self, key: str, spec: AdapterSpec | None) -> None:
        before = self._known.pop(key, None)
        if before is not None and (spec is None or spec.version != before.version):
            self._tasks.start(self._retire(before.version), f"removal of adapter {before.name}")
        if spec is not None:
            self._known[key] = spec
            self._load_ahead(spec)

    async def _retire(self, version: str) -> None:
        """Drops one that was removed when it has been read and its requests here have ended."""
        while version in self._loaded or version in self._loading:
            # Not while it may be loaded again, for a request that comes here from an instance that died.
            async with self._turn:
                if version in self._loaded and await self._drop(version):
                    return
            await asyncio.sleep(RETIRE_POLL_S)

    def _load_ahead(self, spec: AdapterSpec) -> None:
        if self._is_ready(spec.base) and len(self._loaded) + len(self._loading) < self._max_adapters:
            self._load_soon(spec.base, spec.adapter)

    def _load_soon(self, model: str, adapter: Adapter) -> asyncio.Task[None] | None:
        """None: it is there, or was tried in vain of late."""
        version = adapter.version
        if version in self._loaded or self._failure(version) is not None:
            return None
        if version not in self._loading:
            self._loading[version] = self._tasks.start(self._load(model, adapter), f"adapter {adapter.name}")
        return self._loading[version]

    async def _load(self, model: str, adapter: Adapter) -> None:
        try:
            async with self._turn:
                started_s = self._loop.now()
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    num_bytes = await asyncio.to_thread(self._executor.adapter_bytes, model, adapter)
                if not await self._make_room(num_bytes):
                    return
                await self._read(model, adapter)
                seconds = self._loop.now() - started_s
                if not self._is_ready(model):
                    await asyncio.to_thread(self._executor.drop_adapter, adapter.version)
                    return
                self._loaded[adapter.version] = _Loaded(adapter, model, num_bytes)
        except Exception as error:
            self._fail(model, adapter, error)
        else:
            self._loads.labels(self._instance_id, "loaded").inc()
            self._load_seconds.observe(seconds)
            log.info("adapter %s of %s is loaded after %.2f s: %d bytes", adapter.name, model, seconds, num_bytes)
        finally:
            del self._loading[adapter.version]
            self._show()

    async def _read(self, model: str, adapter: Adapter) -> None:
        """Raises `TimeoutError`, and what `AdapterExecutor.load_adapter` does."""
        reading = asyncio.ensure_future(asyncio.to_thread(self._executor.load_adapter, model, adapter))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await asyncio.shield(reading)
        except TimeoutError:
            # The thread goes on; what it brings nobody waits for.
            reading.add_done_callback(lambda done: self._discard(adapter.version, done))
            raise
        except Exception:
            await asyncio.to_thread(self._executor.drop_adapter, adapter.version)  # some ranks may have it
            raise

    def _discard(self, version: str, read: asyncio.Future[None]) -> None:
        """Also where it failed: some ranks may have it."""
        if not read.cancelled():
            read.exception()
        if version not in self._loaded and version not in self._loading:
            self._tasks.start(asyncio.to_thread(self._executor.drop_adapter, version))

    def _fail(self, model: str, adapter: Adapter, error: Exception) -> None:
        if not self._is_ready(model):
            return  # it was removed meanwhile
        self._loads.labels(self._instance_id, "failed").inc()
        code, reason = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"
        if isinstance(error, CheckpointError):
            reason = str(error)
            if not isinstance(error, CheckpointMissing):
                code = ErrorCode.MODEL_FAILED
        elif isinstance(error, TimeoutError):
            reason = f"it was not loaded within {LOAD_TIMEOUT_S:g} s"
        else:
            log.error("adapter %s of %s", adapter.name, model, exc_info=error)
        log.warning("adapter %s of %s could not be loaded: %s", adapter.name, model, reason)
        info = ErrorInfo(code, f"the adapter {adapter.name!r} cannot be loaded: {reason}", "model")
        now = self._loop.now()
        self._failed = {version: known for version, known in self._failed.items() if known[0] > now}
        self._failed[adapter.version] = now + FAILURE_S, info

    async def _make_room(self, num_bytes: int) -> bool:
        """Makes room for one more. False: requests use all that there are. Raises `CheckpointError` where it never fits."""
        if num_bytes > self._max_bytes:
            raise CheckpointError(
                f"it takes {num_bytes} bytes, and TIDEWAY_ADAPTER_MEMORY_BYTES allows {self._max_bytes} for all."
            )
        give_up_s = self._loop.now() + ROOM_WAIT_S
        while len(self._loaded) >= self._max_adapters or self._bytes() + num_bytes > self._max_bytes:
            in_use = self._loop.ask(Engine.adapters_held)
            idle = next((version for version in self._loaded if version not in in_use), None)
            if idle is None or not await self._drop(idle):
                if self._loop.now() > give_up_s:
                    return False
                await asyncio.sleep(ROOM_POLL_S)
        return True

    async def _drop(self, version: str) -> bool:
        """False: a request here needs it."""
        # From here on nobody is given it; requests that came before are seen between the steps.
        dropped = self._loaded.pop(version)

        def drop() -> bool:
            if version in self._loop.ask(Engine.adapters_held):
                return False
            self._executor.drop_adapter(version)
            return True

        if not await asyncio.shield(asyncio.wrap_future(self._loop.between_steps(drop))):
            self._loaded[version] = dropped
            return False
        log.info("adapter %s of %s is dropped", dropped.adapter.name, dropped.model)
        self._loads.labels(self._instance_id, "dropped").inc()
        self._show()
        return True

    def _bytes(self) -> int:
        return sum(one.num_bytes for one in self._loaded.values())

    def _show(self) -> None:
        self._on_change()
        self._num_loaded.set(len(self._loaded))
        self._num_bytes.set(self._bytes())
