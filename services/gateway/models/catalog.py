"""Which models exist, and which instances can serve them: live views of the registry buckets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Literal

from services.gateway.http.errors import ApiError
from services.gateway.openai.parsing import MAX_SEQUENCE_TOKENS
from services.gateway.text.tokenization import ModelTokenizer, Tokenizers
from shared.bus.interface import Bus, ServiceError, Subscription, Watch
from shared.messages.catalogue import ADAPTERS, INSTANCE_EXITED, INSTANCES, MODELS, NODES, PLANS
from shared.messages.channels import bucket_key
from shared.messages.cluster import (
    AdapterSpec,
    InstanceCrash,
    InstanceExited,
    InstanceInfo,
    LoadedModel,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
    WhyAsleep,
)
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.tasks import true_within

logger = logging.getLogger(__name__)

READY: Final = "ready"
LOADING: Final = "loading"
IN_HOST_MEMORY: Final = "host"
ON_DISK: Final = "disk"
DRAINING = "draining"
FAILED: Final = "failed"
ModelState = Literal["ready", "loading", "host", "disk", "failed"]
CHANGE_S = 2.0
"""Time for what was stored to be seen here."""


def loaded_model(instance: InstanceInfo, model: str) -> LoadedModel | None:
    return next((loaded for loaded in instance.models if loaded.name == model), None)


def serves(instance: InstanceInfo, model: str) -> bool:
    """Whether the instance takes requests of this model now."""
    loaded = loaded_model(instance, model)
    return instance.state == READY and loaded is not None and loaded.state == READY


class Catalog:
    """Watches the models, their adapters and the plan (written by placement), and the instances and nodes (each writes
    itself)."""

    def __init__(self, bus: Bus, tokenizers: Tokenizers) -> None:
        self._bus = bus
        self._tokenizers = tokenizers
        self._models: dict[str, tuple[ModelSpec, int]] = {}
        """By bucket key, with the Unix second in which this gateway learned of the model."""
        self._model_watch: Watch[ModelSpec] | None = None
        self._adapter_watch: Watch[AdapterSpec] | None = None
        self._adapters_changed = asyncio.Event()
        self._instance_watch: Watch[InstanceInfo] | None = None
        self._plan_watch: Watch[PlacementPlan] | None = None
        self._node_watch: Watch[NodeInfo] | None = None
        self._exited: set[tuple[str, str]] = set()
        """Ids and incarnations."""
        self._exits: Subscription | None = None

    async def start(self, on_instance: Callable[[str, InstanceInfo | None], None]) -> None:
        """`on_instance(instance_id, info)` is called for each change of an instance; None: it is gone."""
        self._instance_watch = await (await self._bus.key_value(INSTANCES)).watch(on_instance)
        self._model_watch = await (await self._bus.key_value(MODELS)).watch(self._on_model)
        self._adapter_watch = await (await self._bus.key_value(ADAPTERS)).watch(lambda *_: self._adapters_changed.set())
        self._plan_watch = await (await self._bus.key_value(PLANS)).watch()
        self._node_watch = await (await self._bus.key_value(NODES)).watch()
        self._exits = await self._bus.subscribe(INSTANCE_EXITED, self._on_exited)

    async def stop(self) -> None:
        for source in (
            self._exits,
            self._model_watch,
            self._adapter_watch,
            self._plan_watch,
            self._node_watch,
            self._instance_watch,
        ):
            if source is not None:
                await source.stop()

    def _on_exited(self, exited: InstanceExited) -> None:
        still_listed = {(i, incarnation) for i, incarnation in self._exited if i in self.instances}
        self._exited = still_listed | {(exited.instance_id, exited.incarnation)}

    def _on_model(self, key: str, spec: ModelSpec | None) -> None:
        if spec is None:
            self._models.pop(key, None)
        else:
            created = self._models[key][1] if key in self._models else int(time.time())
            self._models[key] = (spec, created)
            self._tokenizers.preload(spec)
        self._tokenizers.forget(set(self.models))

    @property
    def instances(self) -> dict[str, InstanceInfo]:
        return {} if self._instance_watch is None else self._instance_watch.entries

    @property
    def alive(self) -> dict[str, InstanceInfo]:
        """The instances without those that are known to have exited: the registry lists what crashed until its entry
        expires."""
        return {i: info for i, info in self.instances.items() if (i, info.incarnation) not in self._exited}

    @property
    def crashes(self) -> dict[str, InstanceCrash]:
        """How each planned instance ended last that has not been ready since."""
        nodes = {} if self._node_watch is None else self._node_watch.entries
        return {instance_id: crash for node in nodes.values() for instance_id, crash in node.crashes.items()}

    def has(self, model: str) -> bool:
        """Whether it is the name of a model, or of an adapter of one."""
        return bucket_key(self.base(model)) in self._models

    @property
    def problem(self) -> str:
        """Why there may be other models and adapters than are known here; empty: there are none."""
        watches = (self._model_watch, self._adapter_watch)
        return next((watch.problem for watch in watches if watch is not None and watch.problem), "")

    def check_seen(self, what: str, field: str = "model") -> None:
        """Raises `ServiceError` while models and adapters cannot be seen. `what`: what that means for the client. `field`:
        field that names the model."""
        if problem := self.problem:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"{what}: {problem}.", field)

    def is_gone(self, model: str) -> bool:
        """Whether it is known that there is no model or adapter of this name."""
        return not self.has(model) and not self.problem

    @property
    def adapters(self) -> list[AdapterSpec]:
        """LoRA adapters: to clients models of their own."""
        return [] if self._adapter_watch is None else list(self._adapter_watch.entries.values())

    def adapter(self, model: str | None) -> AdapterSpec | None:
        """None: it is no adapter's name."""
        if model is None or self._adapter_watch is None or not self._adapter_watch.entries:
            return None
        return self._adapter_watch.entries.get(bucket_key(model))

    async def adapters_show(self, is_shown: Callable[[], bool]) -> None:
        """Returns when a change of the adapters has come here, or after `CHANGE_S`."""
        await true_within(is_shown, self._adapters_changed, CHANGE_S)

    def base(self, model: str) -> str:
        """The model that computes an adapter; else the model itself."""
        adapter = self.adapter(model)
        return model if adapter is None else adapter.base

    @property
    def models(self) -> list[ModelSpec]:
        return [spec for spec, _ in self._models.values()]

    @property
    def names(self) -> list[str]:
        """Names of models and adapters."""
        return [spec.name for spec in self.models] + [spec.name for spec in self.adapters]

    def created(self, model: str) -> int:
        """Unix seconds."""
        return self._models[bucket_key(model)][1]

    def objectives_ms(self, model: str) -> tuple[float, float]:
        """Objectives that the model names, for the first token and for later ones; 0: none."""
        found = self._models.get(bucket_key(self.base(model)))
        return (0.0, 0.0) if found is None else (found[0].ttft_ms, found[0].tpot_ms)

    def spec(self, model: str | None) -> ModelSpec:
        """The model of this name, or the base model of the adapter. Raises `ApiError` 404, and `ServiceError` while it
        cannot be seen which there are. None stands for the only model, where there is one only."""
        if model is None and len(self._models) == 1:
            return self.models[0]
        if model is None:
            raise ApiError(400, "'model' is required where a server has several.", param="model", code="missing_field")
        if (found := self._models.get(bucket_key(self.base(model)))) is None:
            self.check_seen(f"Whether the model '{model[:200]}' exists is not known now")
            known = ", ".join(f"'{name}'" for name in self.names) or "none yet"
            raise ApiError(
                404,
                f"The model '{model[:200]}' does not exist. Models served here: {known}.",
                param="model",
                code="model_not_found",
            )
        return found[0]

    def failure(self, model: str) -> ErrorInfo | None:
        """Why no instance can serve the model, if that is known and none is loading it or will, but those that wait for a
        server that is down and those that crash again and again."""
        if self.is_served(model):  # each request asks, and one instance is enough
            return None
        loops = {i: f"{i} {crash}" for i, crash in self.crashes.items() if crash.is_in_loop}
        found = {i: loaded for i, info in self.alive.items() if (loaded := loaded_model(info, model)) is not None}
        reason, is_final, can_not = "", False, "be loaded"
        for instance_id, loaded in found.items():
            if loaded.state == FAILED:
                reason = reason or loaded.error
            elif loaded.is_held_up or (loaded.state == LOADING and instance_id in loops):
                reason, can_not = reason or loaded.error or loops[instance_id], "be served now"
            else:
                return None
        plan = self._plan
        planned = () if plan is None else plan.instances
        to_come = [
            place.instance_id
            for place in planned
            if place.instance_id not in found and any(spec.name == model for spec in place.models)
        ]
        are_in_loops = loops.keys() >= set(to_come)
        if can_not == "be served now" and not are_in_loops:
            return None
        if found:
            is_final = all(loaded.is_final for loaded in found.values())
        elif plan is not None:
            reason = plan.unusable.get(model, "")
            is_final = bool(reason)
            if not reason and plan.asleep.get(model) == WhyAsleep.NO_ROOM:
                reason = "no instance has memory for it beside the models that are always loaded"
            elif not reason and to_come and are_in_loops:
                reason, can_not = loops[to_come[0]], "be served now"
        if not reason:
            return None
        code = ErrorCode.MODEL_FAILED if is_final else ErrorCode.UNAVAILABLE
        return ErrorInfo(code, f"The model '{model}' cannot {can_not}: {reason}", "model")

    @property
    def _plan(self) -> PlacementPlan | None:
        return None if self._plan_watch is None else self._plan_watch.entries.get("current")

    def state(self, model: str) -> ModelState:
        """State of a known model, or of an adapter's base: ready | loading | failed | host (its weights are in host
        memory) | disk. The last two are of models on demand alone."""
        base = self.base(model)
        if self.is_served(base):
            return READY
        states = {loaded.state for info in self.alive.values() if (loaded := loaded_model(info, base)) is not None}
        if self.failure(base) is not None:
            return FAILED
        if LOADING in states or not self.is_on_demand(base):
            return LOADING
        return IN_HOST_MEMORY if IN_HOST_MEMORY in states else ON_DISK

    def is_on_demand(self, model: str) -> bool:
        """Whether it is a model, or an adapter of one, that is loaded when requests for it come."""
        known = self._models.get(bucket_key(self.base(model)))
        return known is not None and known[0].on_demand

    def why_asleep(self, model: str) -> str:
        """A `WhyAsleep` of a model on demand that is put away; empty: it is not, or nobody says so."""
        return "" if self._plan is None else self._plan.asleep.get(self.base(model), "")

    def is_available(self, model: str) -> bool:
        """Whether requests for it are served: now, or when it has been loaded for them."""
        return self.is_served(model) or (
            self.is_on_demand(model)
            and self.failure(self.base(model)) is None
            and any(info.state != DRAINING for info in self.alive.values())
        )

    def check_can_be_served(self, model: str) -> None:
        """Raises `ServiceError`."""
        if (failure := self.failure(model)) is not None:
            raise ServiceError(failure)

    def ready_models(self) -> list[str]:
        """Known models that an instance serves now, or would when it has loaded them on demand."""
        return [spec.name for spec in self.models if self.is_available(spec.name)]

    def is_served(self, model: str) -> bool:
        """Whether it is known, and an instance serves it, or its base model, now."""
        base = self.base(model)
        return bucket_key(base) in self._models and any(
            serves(info, base) and (instance_id, info.incarnation) not in self._exited
            for instance_id, info in self.instances.items()
        )

    def reported_max_model_len(self, model: str) -> int | None:
        """The least that the instances which have loaded it, or the base model of the adapter, report; None: none has."""
        model = self.base(model)
        lengths = [
            loaded.max_model_len
            for info in self.instances.values()
            if (loaded := loaded_model(info, model)) is not None and loaded.state == READY and loaded.max_model_len > 0
        ]
        return min(lengths, default=None)

    def max_model_len(self, spec: ModelSpec, tokenizer: ModelTokenizer) -> int:
        """Longest prompt and output together, in tokens."""
        reported = self.reported_max_model_len(spec.name) or tokenizer.max_model_len
        return min(reported, tokenizer.max_model_len, MAX_SEQUENCE_TOKENS)
