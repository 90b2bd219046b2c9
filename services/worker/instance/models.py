"""The models of one instance: loading and unloading beside the others' steps.

(absent) --begin_load--> loading --prepared, attached--> ready --begin_unload--> unloading --> (absent)
    ^                      |  ^                                                     |  (requests end, then memory goes)
    |                      |  +--------begin_load-------- host <--keeps_weights-----+
    |                      |                                |
    +----------------------|--begin_unload, or no room left-+
                           +--error--> failed --begin_load--> loading
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from services.worker.instance.adapters import InstanceAdapters
from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.telemetry import InstanceTelemetry
from shared.bus.interface import ServiceError
from shared.engine.calls import AddModel, RemoveModel, SetObjectives
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.messages.cluster import LoadedModel, ModelLoad, ModelSpec
from shared.messages.requests import ErrorCode
from shared.migration.incoming import Intake
from shared.models.checkpoint import CheckpointError, CheckpointMissing
from shared.runtime.tasks import TaskSet

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.05
CHECK_INTERVAL_S = 10.0
"""Between two checks of a model: whose requests alone are at fault makes the others wait for one step."""
DETACH_TIMEOUT_S = 30.0
"""Time for transfers of a model's KV and reservations for it, which end by their own deadlines."""


OnReady = Callable[[ModelSpec, ModelShape, Callable[[], bool]], Awaitable[object]]
"""(model, its shape on the engine, whether nothing else is being loaded)"""


class ModelExecutor(Protocol):
    """`prepare_model` is slow and runs beside steps, the others between steps."""

    def prepare_model(self, spec: ModelSpec) -> Any:
        """What `add_model` is given; nobody else looks into it."""

    def add_model(self, prepared: Any) -> ModelShape: ...

    def remove_model(self, name: str) -> None: ...

    def is_sound(self, name: str) -> bool:
        """Whether the model makes numbers of tokens that have nothing to do with any request."""


@runtime_checkable
class KeepsWeights(Protocol):
    """An executor that keeps weights of models that were removed in host memory, for when they are prepared again."""

    def hold_weights(self, name: str) -> None:
        """Before `remove_model`, between steps: `keep_weights` follows."""

    def keep_weights(self, name: str) -> bool:
        """Slow; runs beside steps. False: there is no room for them."""

    def drop_weights(self, name: str) -> None: ...

    def has_weights(self, name: str) -> bool:
        """They may go at any time, when others need the room."""


class KvUsers:
    """Whoever else uses the KV blocks of models; called in the event loop. What one does not override concerns it not."""

    def add_model(self, model: str) -> None:
        """Its blocks are there."""

    def give_away(self, model: str) -> None:
        """The model is being unloaded: its requests should go elsewhere. Called again and again."""

    def stop_giving(self, model: str) -> None:
        """They are over, or it stays here after all."""

    def remove_model(self, model: str) -> None:
        """Nobody holds or reserves blocks of the model any more."""


class _Model(msgspec.Struct):
    spec: ModelSpec
    state: str
    shape: ModelShape | None = None
    num_blocks: int = 0
    error: str = ""
    is_final: bool = False
    """The model failed and would fail again."""
    num_without_token: int = 0
    """Requests that had ended for want of finite logits when it was checked."""
    checked_s: float = -CHECK_INTERVAL_S

    @property
    def is_stuck(self) -> bool:
        """Its unloading failed: engine and executor may hold it still."""
        return self.state == "failed" and self.shape is not None


class InstanceModels:
    """`intake` is told which of them are ready. `on_change` is called after each change of state; `users` are told where KV
    blocks come and go. `on_ready(spec, shape, is_quiet)` is awaited beside everything else when a model has become ready;
    `is_quiet()`, from any thread: no model is being prepared."""

    def __init__(
        self,
        loop: EngineLoop,
        executor: ModelExecutor,
        metrics: InstanceTelemetry,
        intake: Intake,
        on_change: Callable[[], None],
        on_ready: OnReady | None = None,
        users: Sequence[KvUsers] = (),
        adapters: InstanceAdapters | None = None,
    ) -> None:
        self._loop = loop
        self._users = users
        self._adapters = adapters
        self._executor = executor
        self._metrics = metrics
        self._intake = intake
        self._on_change = on_change
        self._on_ready = on_ready
        self._weights = executor if isinstance(executor, KeepsWeights) else None
        self._models: dict[str, _Model] = {}
        self._tasks = TaskSet()
        self._loader = ThreadPoolExecutor(1, "loader")
        """Reads and moves weights, with the priority of the process: much of that is Python, and a thread of low priority
        that holds the interpreter's lock makes the whole instance wait where other programs have the processors."""
        self._loading = asyncio.Lock()
        """One model is prepared at a time: two at once would double the peak of memory."""

    @property
    def any_ready(self) -> bool:
        return bool(self._intake.models)

    @property
    def is_empty(self) -> bool:
        """Nothing is to be served here: models on demand may come."""
        return all(model.state in ("host", "unloading") for model in self._models.values())

    @property
    def unloading(self) -> frozenset[str]:
        """Models whose requests are to leave."""
        return frozenset(name for name, model in self._models.items() if model.state == "unloading")

    def check_serves(self, name: str) -> None:
        if name not in self._intake.models:
            state = self._models[name].state if name in self._models else "not here"
            raise ServiceError.of(ErrorCode.GONE, f"model {name!r} is {state} on this instance", "model")

    def loaded(self, loads: dict[str, ModelLoad]) -> list[LoadedModel]:
        costs = self._loop.ask(Engine.cost_models)
        self._forget_dropped()
        return [
            LoadedModel(
                name=name,
                state=model.state,
                max_model_len=model.shape.max_model_len if model.shape else 0,
                block_size=model.shape.block_size if model.shape else 0,
                blocks_per_merged=model.shape.blocks_per_merged if model.shape else 0,
                num_running=loads[name].num_running if name in loads else 0,
                num_waiting=loads[name].num_waiting if name in loads else 0,
                error=model.error,
                cost_model=str(costs[name].source) if name in costs else "",
                is_final=model.is_final,
                fingerprint=model.shape.fingerprint if model.shape else "",
                adapters=() if self._adapters is None else self._adapters.names(name),
            )
            for name, model in self._models.items()
        ]

    def begin_load(self, spec: ModelSpec) -> None:
        """Starts loading; the same model again has no effect. `CONFLICT` while it is unloading or has another spec."""
        known = self._models.get(spec.name)
        if known is not None and known.state in ("loading", "ready"):
            if known.spec == spec:
                return
            raise ServiceError.of(ErrorCode.CONFLICT, f"model {spec.name!r} is here with another source", "spec")
        if known is not None and known.is_stuck:
            self.begin_unload(spec.name)
        if known is not None and known.state == "unloading":
            raise ServiceError.of(ErrorCode.CONFLICT, f"model {spec.name!r} is being unloaded", "spec")
        self._models[spec.name] = _Model(spec, "loading")
        self._tasks.start(self._load(self._models[spec.name]))
        self._on_change()

    def begin_unload(self, name: str, grace_s: float = 0.0, *, keeps_weights: bool = False) -> None:
        """Takes no new request, waits until those it has moved away or ended (at most `grace_s`), then frees the memory.
        `keeps_weights`: in host memory, if there is room."""
        model = self._models.get(name)
        if model is None:
            raise ServiceError.of(ErrorCode.GONE, f"model {name!r} is not on this instance", "name")
        if model.is_stuck:
            model.state, model.error = "unloading", ""
            self._tasks.start(self._unload(model, grace_s))
        elif model.state == "failed":
            del self._models[name]
        elif model.state == "host" and not keeps_weights:
            assert self._weights is not None
            self._weights.drop_weights(name)
            del self._models[name]
        elif model.state == "loading":
            raise ServiceError.of(ErrorCode.CONFLICT, f"model {name!r} is still being loaded", "name")
        elif model.state == "ready":
            model.state = "unloading"
            self._intake.models.discard(name)
            self._tasks.start(self._unload(model, grace_s, keeps_weights))
        self._on_change()

    def _forget_dropped(self) -> None:
        """Models whose weights have left host memory to make room."""
        for name in [name for name, model in self._models.items() if model.state == "host"]:
            if self._weights is None or not self._weights.has_weights(name):
                del self._models[name]

    def look_into(self, without_token: Mapping[str, int]) -> None:
        """Checks models of which requests have ended since their logits were not finite (their number since the start, by
        model). Where it is not the requests, the weights here or the device are at fault: the instance ends, so that its
        requests go on elsewhere and the weights are read again."""
        for name, number in without_token.items():
            model, now = self._models.get(name), time.monotonic()
            if model is None or model.state != "ready" or number <= model.num_without_token:
                continue
            if now - model.checked_s >= CHECK_INTERVAL_S:
                model.num_without_token, model.checked_s = number, now
                self._tasks.start(self._check(name))

    async def _check(self, name: str) -> None:
        def is_sound() -> bool:
            return name not in self._intake.models or self._executor.is_sound(name)

        if await asyncio.shield(asyncio.wrap_future(self._loop.between_steps(is_sound))):
            log.warning("model %s: logits of requests were not finite, those of other tokens are", name)
        else:
            self._loop.give_up(f"the logits of {name!r} are NaN, whatever the prompt")

    async def stop(self) -> None:
        await self._tasks.end_all()
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _beside_steps(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work)

    async def _load(self, model: _Model) -> None:
        started_s = time.monotonic()
        spec = model.spec
        try:
            async with self._loading:
                prepared = await self._beside_steps(lambda: self._executor.prepare_model(spec))

            def attach() -> tuple[ModelShape, int]:
                attached, now = self._executor.add_model(prepared), self._loop.now()
                with self._loop.locked() as engine:
                    shape = engine.apply(AddModel(attached), now)
                    engine.apply(SetObjectives(shape.name, spec.ttft_ms / 1000, spec.tpot_ms / 1000), now)
                    return shape, engine.pool.capacity_blocks(shape.name)

            shape, num_blocks = await asyncio.shield(asyncio.wrap_future(self._loop.between_steps(attach)))
        except asyncio.CancelledError:
            raise
        except CheckpointError as error:
            log.error("model %s could not be loaded: %s", spec.name, error)
            model.state, model.error = "failed", str(error)
            model.is_final = not isinstance(error, CheckpointMissing)
        except (OSError, MemoryError) as error:
            log.error("model %s could not be loaded: %r", spec.name, error)
            model.state, model.error = "failed", _told(error)
        except Exception as error:
            log.exception("model %s could not be loaded", spec.name)
            model.state, model.error = "failed", _told(error)
        else:
            model.state, model.shape, model.num_blocks = "ready", shape, num_blocks
            self._intake.models.add(spec.name)
            self._metrics.set_model(spec.name, shape.block_size, num_blocks)
            for user in self._users:
                user.add_model(spec.name)
            if self._adapters is not None:
                self._adapters.on_model_ready(spec.name)
            log.info("model %s is ready after %.1f s: %s", spec.name, time.monotonic() - started_s, shape)
            self._tasks.start(self._tell_ready(spec, shape))
        self._on_change()

    async def _tell_ready(self, spec: ModelSpec, shape: ModelShape) -> None:
        if self._on_ready is None:
            return
        try:
            await self._on_ready(spec, shape, lambda: not self._loading.locked())
        except Exception:
            log.exception("what follows on model %s being ready has failed", spec.name)

    async def _unload(self, model: _Model, grace_s: float, keeps_weights: bool = False) -> None:
        name, keeper = model.spec.name, self._weights if keeps_weights else None
        is_kept = False
        try:
            await self._empty(name, grace_s)
            await self._detach(name, keeper)
            if keeper is not None:
                is_kept = await self._beside_steps(lambda: keeper.keep_weights(name))
        except Exception as error:
            log.exception("model %s could not be unloaded", name)
            model.state, model.error = "failed", f"{type(error).__name__}: {error}"
        else:
            if is_kept:
                self._models[name] = _Model(model.spec, "host")
            else:
                del self._models[name]
            for user in self._users:
                user.remove_model(name)
            if self._adapters is not None:
                self._adapters.forget_model(name)
            if model.shape is not None:
                self._metrics.remove_model(name, model.shape.block_size, model.num_blocks)
            log.info("model %s is unloaded%s", name, ", its weights are in host memory" if is_kept else "")
        finally:
            for user in self._users:
                user.stop_giving(name)
        self._on_change()

    async def _empty(self, name: str, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        while self._loop.ask(lambda engine: engine.num_held(name)) and time.monotonic() < deadline_s:
            for user in self._users:
                user.give_away(name)
            await asyncio.sleep(POLL_S)

    async def _detach(self, name: str, keeper: KeepsWeights | None) -> None:
        """Requests are over now; migrations of the model still have to see that they are. `keeper` is to keep the
        weights."""

        def detach() -> bool:
            removed = self._loop.apply(RemoveModel(name))
            if removed and keeper is not None:
                keeper.hold_weights(name)
            if removed:
                self._executor.remove_model(name)
            return removed

        deadline_s = time.monotonic() + DETACH_TIMEOUT_S
        while not await asyncio.shield(asyncio.wrap_future(self._loop.between_steps(detach))):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"its KV blocks are still in use after {DETACH_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)


def _told(error: Exception) -> str:
    """Why a model could not be loaded, for operators. torch tells a lack of memory by a `RuntimeError` on CPUs."""
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"there is not enough memory for it; a smaller max_model_len or quantized weights need less ({text})"
    return f"{type(error).__name__}: {error}"
