"""Gives the engine a cost model of each model that becomes ready: the stored one, or a brief profile made while the engine
is idle and then stored.

The model serves from the start, with step times that the engine learns from its steps (shared/costs/live.py). A profile runs
in the engine's thread between steps, for as long as no request is held and no model is being loaded; a request waits for the
step that is being measured at most, and the rest is measured later.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from services.worker.executor.profiled_steps import BRIEF, Extent
from services.worker.executor.profiler import ProfiledExecutor, ProfiledModel, ProfileError, Profiling
from services.worker.instance.engine_loop import EngineLoop
from shared.bus.interface import Bus, BusError, UnreadableEntry
from shared.costs.model import CostModel, CostSource
from shared.engine.calls import BorrowBlocks, ReturnBlocks, SetCostModel
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.messages.catalogue import COST_MODELS
from shared.messages.channels import bucket_key
from shared.messages.cluster import ONE_DEVICE, DeviceGroup, ModelSpec, StoredCostModel
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError, run_dtype
from shared.runtime.files import write_whole

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_POLL_S = 0.5
MAX_POOL_SHARE = 0.5
"""Share of the obtainable blocks; a profile lets fewer cached blocks go."""
MAX_CPU_BYTES = 512 * 1024 * 1024
"""Most bytes of blocks; on CPU they take memory once they are written to."""


class CostModelStore:
    """In the key-value store, so that all instances find it, and as a readable file, so that it outlives the store.
    Either may be missing. What cannot be reached is logged and treated as empty: a cost model can be measured again."""

    def __init__(self, bus: Bus | None, folder: Path | None = None) -> None:
        self._bus = bus
        self._folder = folder

    async def get(self, key: str) -> CostModel | None:
        stored, profiled_s, is_missing = None, 0.0, False
        if self._bus is not None:
            try:
                entry = await (await self._bus.key_value(COST_MODELS)).get(bucket_key(key))
                stored, is_missing = (None, True) if entry is None else (entry.value.cost_model, False)
            except BusError as error:
                is_missing = isinstance(error, UnreadableEntry)
                log.warning("no cost model can be read from the bus: %s", error)
        if stored is None and self._folder is not None:
            stored, profiled_s = await asyncio.to_thread(_read, self._file(self._folder, key))
        if stored is None:
            return None
        try:
            cost_model = msgspec.json.decode(stored, type=CostModel)
        except msgspec.MsgspecError as error:
            log.warning("the stored cost model of %s cannot be used: %s", key, error)
            return None
        if is_missing:
            # Who searches for a placement looks on the bus alone.
            await self._publish(StoredCostModel(key, stored, profiled_s))
        return cost_model

    async def put(self, key: str, cost_model: CostModel) -> list[str]:
        """Stores a cost model. Returns where it went; empty: nowhere."""
        encoded = msgspec.json.encode(cost_model)
        places = []
        if self._folder is not None:
            file = self._file(self._folder, key)
            try:
                await asyncio.to_thread(_write, file, msgspec.json.format(encoded, indent=1))
                places.append(str(file))
            except OSError as error:
                log.warning("the cost model of %s could not be written: %s", key, error)
        if await self._publish(StoredCostModel(key, encoded, time.time())):
            places.append("NATS")
        return places

    async def _publish(self, stored: StoredCostModel) -> bool:
        if self._bus is None:
            return False
        try:
            bucket = await self._bus.key_value(COST_MODELS)
            await bucket.put(bucket_key(stored.key), stored)
        except BusError as error:
            log.warning("the cost model of %s could not be stored: %s", stored.key, error)
            return False
        return True

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / (bucket_key(key) + ".json")


def _read(file: Path) -> tuple[bytes | None, float]:
    """Content, with the Unix time at which it was written; 0: there is none."""
    return (file.read_bytes(), file.stat().st_mtime) if file.is_file() else (None, 0.0)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)


# ------------------------------------------------------------------------------------------------------------ key


def profiled_model(
    spec: ModelSpec, shape: ModelShape, device: torch.device, group: DeviceGroup = ONE_DEVICE
) -> ProfiledModel:
    """Reads the checkpoint's headers (blocking). The key says all that step times depend on. Raises `CheckpointError`."""
    stored = checkpoint.quantized(checkpoint.describe(checkpoint.resolve(spec.source)), spec.quantization)
    dtype = run_dtype(spec.dtype, stored.dtype, device.type)
    size = stored.kv_geometry(dtype, group.stage_size, group.num_stages).block_bytes(shape.block_size)
    stages = f"-pp{group.num_stages}" if group.num_stages > 1 else ""
    device_and_mode = device_name(device) + ("-deterministic" if shape.fingerprint else "")
    key = f"{checkpoint.cost_key(stored, dtype, shape.block_size)}/{device_and_mode}/tp{group.stage_size}{stages}"
    return ProfiledModel(shape, stored.num_layers, size, key)


def device_name(device: torch.device) -> str:
    """What is computed on; on CPU with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}-{torch.get_num_threads()}-threads"


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------------------------- the task


class CostModels:
    """Those of one instance. `provide` is a task of its own for each model that has become ready."""

    def __init__(
        self,
        loop: EngineLoop,
        executor: ProfiledExecutor,
        store: CostModelStore,
        max_step_tokens: int,
        *,
        extent: Extent = BRIEF,
        group: DeviceGroup = ONE_DEVICE,
    ) -> None:
        self._loop = loop
        self._executor = executor
        self._store = store
        self._max_step_tokens = max_step_tokens
        self._extent = extent
        self._group = group

    async def provide(
        self, spec: ModelSpec, shape: ModelShape, is_quiet: Callable[[], bool] = lambda: True
    ) -> CostModel | None:
        """Returns when the engine has the model's cost model; None: it will have none, because the model is gone or cannot
        be profiled (logged). `is_quiet`: whether nothing else on this instance would disturb a measurement; called from
        any thread."""
        try:
            model = await asyncio.to_thread(profiled_model, spec, shape, self._executor.device, self._group)
            cost_model, source = await self._store.get(model.key), CostSource.STORED
            if cost_model is None:
                source = CostSource.PROFILED
                cost_model = await self._profile(model, is_quiet)
                if cost_model is None:
                    return None
                await self._store.put(model.key, cost_model)
        except (ProfileError, CheckpointError) as error:
            log.error("model %s has no cost model: %s", spec.name, error)
            return None
        log.info(
            "cost model of %s: median error %.1f %%, p99 %.1f %%: %s",
            spec.name, 100 * cost_model.median_error, 100 * cost_model.p99_error, cost_model,
        )  # fmt: skip

        def install() -> bool:
            with self._loop.locked() as engine:
                if shape.name not in engine.memory.queues:
                    return False
                engine.apply(SetCostModel(shape.name, cost_model, source), self._loop.now())
            self._executor.set_layers_per_safepoint(shape.name, cost_model.layers_per_safepoint)
            return True

        return cost_model if await self._between_steps(install) else None

    async def _profile(self, model: ProfiledModel, is_quiet: Callable[[], bool]) -> CostModel | None:
        """None: the model was unloaded meanwhile."""
        name, loop, cancelled = model.shape.name, self._loop, threading.Event()
        profiling: Profiling | None = None

        def may_go_on() -> bool:
            return not cancelled.is_set() and is_quiet() and not loop.ask(Engine.num_held)

        def run() -> bool | None:
            """Whether the profile is complete; None: the model is gone."""
            nonlocal profiling
            with loop.locked() as engine:
                if name not in engine.memory.queues:
                    return None
                num_blocks = int(engine.pool.num_available(name) * MAX_POOL_SHARE)
            if self._executor.device.type == "cpu":
                num_blocks = min(num_blocks, MAX_CPU_BYTES // model.block_bytes)
            if profiling is None:
                profiling = Profiling(self._executor, model, num_blocks, self._max_step_tokens, self._extent)
            with loop.locked() as engine:
                blocks = [] if engine.num_held() else engine.apply(BorrowBlocks(name, profiling.num_blocks), loop.now())
            if not blocks:
                return False
            try:
                return profiling.run(blocks, may_go_on)
            finally:
                loop.apply(ReturnBlocks(name, blocks))

        try:
            while True:
                while not may_go_on():
                    await asyncio.sleep(IDLE_POLL_S)
                is_complete = await self._between_steps(run)
                if is_complete is None:
                    return None
                if is_complete:
                    assert profiling is not None
                    return (await asyncio.to_thread(profiling.result)).cost_model
                await asyncio.sleep(IDLE_POLL_S)
        finally:
            cancelled.set()

    async def _between_steps(self, function: Callable[[], T]) -> T:
        # a call that waits must not be cancelled: the engine's thread would fail to set its result
        return await asyncio.shield(asyncio.wrap_future(self._loop.between_steps(function)))
