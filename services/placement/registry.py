"""The configured models and LoRA adapters of the placement that leads: what is stored of them, and what their files say."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Generic

import msgspec

from services.placement.adapters import read_adapter, with_adapters, with_draft
from services.placement.checkpoints import Checkpoints
from services.placement.footprint import ConfiguredModel
from services.placement.remembered import Remembered, Spec
from services.placement.requests import check_draft, check_engine, check_length, check_quantization
from shared.bus.interface import Bus, KeyValue, ServiceError
from shared.messages.catalogue import ADAPTERS, MODELS
from shared.messages.channels import Bucket, bucket_key
from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.messages.requests import ErrorCode
from shared.models.checkpoint import CheckpointError, CheckpointMissing, CheckpointShape, quantized
from shared.models.spec import refuse
from shared.runtime.settings import PlacementSettings

logger = logging.getLogger(__name__)

ADD_READ_S = 8.0
"""Time for the files of a new model or adapter within the call, less than the caller's patience; a download goes on after
it."""


class Stored(Generic[Spec]):
    """Models, or adapters, as their bucket has them; they are remembered outside of it too."""

    def __init__(self, kind: str, bucket: Bucket[Spec], remembered: Remembered[Spec]) -> None:
        self.specs: dict[str, Spec] = {}
        """By name."""
        self._kind, self._bucket, self._remembered = kind, bucket, remembered
        self._uncertain: set[str] = set()
        """Names whose last write failed, which may have had its effect."""
        self._store: KeyValue[Spec]

    async def open(self, bus: Bus) -> None:
        """Raises `BusError`."""
        self._store = await bus.key_value(self._bucket)
        self.specs.update({entry.value.name: entry.value for entry in (await self._store.entries()).values()})

    async def recall(self) -> None:
        """Adds again what is remembered and was lost with the store, or a part of it. Raises `BusError`."""
        for spec in await self._remembered.lost(self._store, self.specs):
            logger.warning("NATS has lost %s %r: it is added again as it was last", self._kind, spec.name)
            await self._store.put(bucket_key(spec.name), spec)
            self.specs[spec.name] = spec

    async def is_anything_remembered(self) -> bool:
        return bool(await self._remembered.load())

    async def is_removed(self, name: str) -> bool:
        """Whether somebody removed it. Raises `BusError`."""
        return await self._store.is_deleted(bucket_key(name))

    async def put(self, spec: Spec) -> None:
        """Raises `BusError`: then `settle` finds out what became of it, as after `remove`."""
        self._uncertain.add(spec.name)
        await self._store.put(bucket_key(spec.name), spec)
        self.specs[spec.name] = spec
        self._uncertain.discard(spec.name)
        await self.keep()

    async def remove(self, name: str) -> None:
        """Raises `BusError`."""
        self._uncertain.add(name)
        await self._store.delete(bucket_key(name))
        del self.specs[name]
        self._uncertain.discard(name)
        await self.keep()

    async def settle(self) -> bool:
        """Whether a write that failed had its effect: the specs are what is stored then. Raises `BusError`."""
        has_changed = False
        for name in sorted(self._uncertain):
            known, entry = self.specs.get(name), await self._store.get(bucket_key(name))
            if entry is not None:
                self.specs[name] = entry.value
            elif known is not None and await self._store.is_deleted(bucket_key(name)):  # else NATS has lost it
                del self.specs[name]
            self._uncertain.discard(name)
            if self.specs.get(name) != known:
                has_changed = True
                logger.warning("%s %r was changed, though NATS did not say so", self._kind, name)
        if has_changed:
            await self.keep()
        return has_changed

    async def keep(self) -> None:
        await self._remembered.keep(self.specs)


class Registry:
    """Made anew for each time of leadership."""

    def __init__(
        self,
        settings: PlacementSettings,
        checkpoints: Checkpoints,
        remembered: Remembered[ModelSpec],
        remembered_adapters: Remembered[AdapterSpec],
    ) -> None:
        self.models = Stored("model", MODELS, remembered)
        self.adapters = Stored("adapter", ADAPTERS, remembered_adapters)
        self._settings, self._checkpoints = settings, checkpoints

    async def open(self, bus: Bus, seeds: Iterable[ModelSpec], *, has_totals: bool) -> None:
        """Reads what is stored. `seeds`: models of the settings, which are added unless they were removed.
        `has_totals`: statistics of models are stored. Raises `BusError`."""
        await self.models.open(bus)
        await self.adapters.open(bus)
        if not (self.models.specs or has_totals or await self.models.is_anything_remembered()):
            logger.warning(
                "NATS has an empty store and no models are remembered: any that were added are to be added again"
            )
        await self.models.recall()
        await self.adapters.recall()
        for seed in seeds:
            stored = self.models.specs.get(seed.name)
            if stored is None and await self.models.is_removed(seed.name):
                logger.warning("model %r of TIDEWAY_MODELS was removed by the operator and stays removed", seed.name)
            elif stored is None:
                await self.models.put(seed)
            elif stored != seed:
                logger.warning("model %r differs from TIDEWAY_MODELS and stays: %s; to change it, remove it first",
                               seed.name, stored)  # fmt: skip
        await self.models.keep()
        await self.adapters.keep()

    # ---------------------------------------------------------------------------------------------- what files say

    def begin_reading(self) -> None:
        """Begins to read whatever is not known yet."""
        for source in self._sources():
            self._checkpoints.begin(source)

    def _sources(self) -> set[str]:
        return {source for spec in self.models.specs.values() for source in spec.sources}

    async def have_read(self, most_s: float) -> None:
        await self._checkpoints.wait(self._sources(), most_s)

    def forget_files(self) -> None:
        """Forgets the files of models that are gone."""
        self._checkpoints.forget_all_but(self._sources())

    def configured(self, spec: ModelSpec, adapters: Iterable[AdapterSpec], asleep: str) -> ConfiguredModel:
        """`adapters`: those that there are, or would be. `asleep`: see `ConfiguredModel`."""
        shape, problem = self._checkpoints.shape(spec.source), self._checkpoints.problem(spec.source)
        draft = self._checkpoints.shape(spec.draft) if spec.draft else None
        if spec.draft and draft is None:
            shape, problem = None, problem or self._checkpoints.problem(spec.draft)
        if shape is not None:
            try:
                check_engine(spec, shape)
                shape = quantized(shape, spec.quantization)
                shape = with_adapters(shape, spec, adapters, self._settings.adapter_memory_bytes)
                shape = shape if draft is None else with_draft(shape, spec, draft)
            except CheckpointError as error:
                shape, problem = None, str(error)
            except ServiceError as error:
                shape, problem = None, error.info.message
        return ConfiguredModel(spec, shape, problem, asleep)

    async def read_checkpoint(self, spec: ModelSpec) -> None:
        """Reads what a model that is to be added needs. Raises `ServiceError`."""
        used = self._sources()
        for source in spec.sources:
            self._checkpoints.begin(source, again=source not in used)
        await self._checkpoints.wait(spec.sources, ADD_READ_S)
        shape = self._read(spec.source, "source")
        check_engine(spec, shape)
        check_length(spec, shape)
        check_quantization(spec, shape)
        if spec.draft:
            check_draft(spec, shape, self._read(spec.draft, "draft"))

    def _read(self, source: str, field: str) -> CheckpointShape:
        if problem := self._checkpoints.problem(source):
            raise refuse(problem, field)
        shape = self._checkpoints.shape(source)
        if shape is None:
            message = f"the checkpoint {source!r} is being fetched; add the model again when it is there"
            raise ServiceError.of(ErrorCode.UNAVAILABLE, message, field, retry_after_s=10.0)
        return shape

    def base_of(self, spec: AdapterSpec) -> ModelSpec:
        """Raises `ServiceError`."""
        base = self.models.specs.get(spec.base)
        if base is None:
            known = ", ".join(map(repr, self.models.specs)) or "none yet"
            raise refuse(f"there is no model {spec.base!r}; models: {known}", "base", ErrorCode.UNKNOWN_MODEL)
        return base

    async def read_adapter(self, spec: AdapterSpec, now_s: float) -> AdapterSpec:
        """The adapter with what its files say. Raises `ServiceError`."""
        base = self.base_of(spec)
        shape = self._checkpoints.shape(base.source)
        if shape is None:
            message = f"the checkpoint of {spec.base!r} is not known yet; add the adapter again when it is"
            raise ServiceError.of(ErrorCode.UNAVAILABLE, message, "base", retry_after_s=10.0)
        try:
            async with asyncio.timeout(ADD_READ_S):
                files = await asyncio.to_thread(read_adapter, spec.source, base, shape, self._settings.max_adapter_rank)
        except CheckpointMissing as error:
            raise refuse(str(error), "source", ErrorCode.NOT_FOUND) from None
        except CheckpointError as error:
            raise refuse(str(error), "source") from None
        except TimeoutError:
            message = f"the adapter {spec.source!r} is being fetched; add it again when it is there"
            raise ServiceError.of(ErrorCode.UNAVAILABLE, message, "source", retry_after_s=10.0) from None
        return msgspec.structs.replace(
            spec, version=uuid.uuid4().hex, rank=files.rank, num_values=files.num_values, added_s=now_s
        )
