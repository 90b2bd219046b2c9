"""The placement that leads: owns the configured models, the plan and the statistics while the lease is held.

    MODELS, NODES, checkpoints -> planning.plan -> PLANS "current"
    SCHEDULER_STATISTICS -> TrafficStatistics -> STATISTICS
    SCHEDULER_DEMAND, INSTANCES -> residence.Residence: which models on demand are in the plan
    the requests themselves -> monitor.PlacementMonitor
    PLACEMENT_ADD_MODEL, PLACEMENT_REMOVE_MODEL, PLACEMENT_SCALE_MODEL, PLACEMENT_PLAN
    PLACEMENT_ADD_ADAPTER, PLACEMENT_REMOVE_ADAPTER -> ADAPTERS
    PLACEMENT_DRAIN_INSTANCE, PLACEMENT_SCALE_INSTANCES -> scaling.FleetKeeper
    PLACEMENT_REPLACEMENT, PLACEMENT_CHANGE_PLAN -> replacing.Replacing, whose changes of the plan go before others

What is stored is what counts: a change of the models is written first, then planned. Whoever leads next begins with the
buckets alone. Which instances are drained is part of the plan.

Models of the settings ("seeds") are added unless they were removed: MODELS keeps a mark of each removal. Models that are
remembered outside of the store, and of which it has neither an entry nor a removal, were lost with it, or with a part of it
that is damaged; they are added again, too (registry.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from opentelemetry.trace import Tracer

from services.placement.adapters import is_same
from services.placement.backends.interface import ScalingBackend
from services.placement.fleet import Fleet, NodePresence, node_of, serving
from services.placement.inputs import Inputs
from services.placement.metrics import PlacementMetrics
from services.placement.monitor import PlacementMonitor
from services.placement.plan_store import PlanStore
from services.placement.planning import displaced, wasted
from services.placement.registry import Registry
from services.placement.replacing import Replacing, Search
from services.placement.residence import Residence
from services.placement.scaling import Cluster, FleetKeeper
from services.placement.statistics import TrafficStatistics
from shared.bus.interface import Bus, BusError, KeyValue, ServiceError, Subscription
from shared.messages.admin import (
    AddAdapter,
    AddModel,
    ChangePlan,
    Done,
    GetPlan,
    GetReplacement,
    RemoveAdapter,
    RemoveModel,
    ReplacementState,
    ScaleModel,
)
from shared.messages.catalogue import (
    INSTANCES,
    PLACEMENT_ADD_ADAPTER,
    PLACEMENT_ADD_MODEL,
    PLACEMENT_CHANGE_PLAN,
    PLACEMENT_DRAIN_INSTANCE,
    PLACEMENT_PLAN,
    PLACEMENT_REMOVE_ADAPTER,
    PLACEMENT_REMOVE_MODEL,
    PLACEMENT_REPLACEMENT,
    PLACEMENT_SCALE_INSTANCES,
    PLACEMENT_SCALE_MODEL,
    SCHEDULER_STATISTICS,
    STATISTICS,
)
from shared.messages.channels import bucket_key
from shared.messages.cluster import (
    AdapterSpec,
    InstanceInfo,
    ModelSpec,
    ModelStatistics,
    NodeInfo,
    PlacementPlan,
    StatisticsReport,
)
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.models.spec import check_adapter, check_spec, refuse
from shared.runtime.settings import PlacementSettings
from shared.runtime.tasks import TaskSet, set_within

Q = TypeVar("Q")
R = TypeVar("R")

logger = logging.getLogger(__name__)

DEBOUNCE_S = 0.2
"""Changes that come together make one plan."""
TICK_S = 1.0
"""Statistics are stored, and graces of nodes looked at, at least so often."""
FIRST_READ_S = 5.0
"""Time for the checkpoints at the start, so that the first plan has all that are at hand."""
PUBLISH_ATTEMPTS = 3


class ActivePlacement:
    """Made anew for each time of leadership."""

    def __init__(
        self,
        *,
        bus: Bus,
        settings: PlacementSettings,
        seeds: list[ModelSpec],
        metrics: PlacementMetrics,
        tracer: Tracer,
        registry: Registry,
        backend: ScalingBackend,
        registered: Callable[[], Mapping[str, NodeInfo]],
        is_leader: Callable[[], bool],
        search: Search,
    ) -> None:
        """`registered`: the nodes at this moment."""
        self._bus = bus
        self._seeds = seeds
        self._retry_s = settings.interval_s
        self._metrics = metrics
        self._configured = registry
        self._backend = backend
        self._registered = registered
        self._is_leader = is_leader
        self._presence = NodePresence()
        self._statistics = TrafficStatistics()
        self._models, self._adapters = registry.models.specs, registry.adapters.specs
        self._adapter_seeds = settings.adapter_specs()
        self.monitor = PlacementMonitor(bus, metrics, self._models, is_leader, settings.slo_scale, self._adapters)
        self._plans = PlanStore(metrics, tracer)
        self._ready: frozenset[tuple[str, str]] = frozenset()
        """Models that served when the replicas of one were last changed, and on which instances."""
        self._planned: Inputs | None = None
        """What the current plan was made from."""
        self._retry_at = 0.0
        self._told_waste: dict[tuple[str, int], dict[str, float]] = {}
        self._changing = asyncio.Lock()
        """Held while models or plan change."""
        self._residence = Residence(bus, metrics, self.wake)
        self._replacing = Replacing(
            bus, settings, metrics, tracer, self._plans, self.monitor, lambda: self._inputs(self._models), registered,
            self._changing, search,
        )  # fmt: skip
        self._wake = asyncio.Event()
        self._first_read: asyncio.Task[None]
        """The first reading of the checkpoints. A plan made before it leaves models where they are."""
        self._subscriptions: list[Subscription] = []
        self._tasks = TaskSet(told=ServiceError)
        self.is_open = False
        self._statistics_bucket: KeyValue[ModelStatistics]
        self._registry: KeyValue[InstanceInfo]

    # ------------------------------------------------------------------------------------------- open and close

    async def open(self) -> None:
        """Takes over what is stored, then serves. Raises `BusError`."""
        await self._plans.open(self._bus)
        self._statistics_bucket = await self._bus.key_value(STATISTICS)
        totals = {e.value.model: e.value for e in (await self._statistics_bucket.entries()).values()}
        await self._configured.open(self._bus, self._seeds, has_totals=bool(totals))
        removed = {one.name for one in self._adapter_seeds if await self._configured.adapters.is_removed(one.name)}
        for name in (*self._models, *self._adapters):
            self._statistics.add_model(name, totals.get(name))
        await self.monitor.open()
        await self._replacing.open()
        await self._residence.open(self._models, self._plans.current)
        self._registry = await self._bus.key_value(INSTANCES)
        keeper = FleetKeeper(self._backend, self._cluster, self._set_fleet, self._registry)
        self._retry_checkpoints()
        self._first_read = self._tasks.start(self._configured.have_read(FIRST_READ_S))
        # One by one, so that `close` finds those that were made should a later one fail.
        serve, made = self._bus.serve, self._subscriptions
        made.append(await serve(PLACEMENT_ADD_MODEL, self._on_add_model))
        made.append(await serve(PLACEMENT_REMOVE_MODEL, self._to_the_end(self._remove)))
        made.append(await serve(PLACEMENT_ADD_ADAPTER, self._to_the_end(self._add_adapter)))
        made.append(await serve(PLACEMENT_REMOVE_ADAPTER, self._to_the_end(self._remove_adapter)))
        made.append(await serve(PLACEMENT_SCALE_MODEL, self._to_the_end(self._scale_model)))
        made.append(await serve(PLACEMENT_DRAIN_INSTANCE, self._to_the_end(keeper.drain)))
        made.append(await serve(PLACEMENT_SCALE_INSTANCES, self._to_the_end(keeper.scale)))
        made.append(await serve(PLACEMENT_PLAN, self._on_get_plan))
        made.append(await serve(PLACEMENT_REPLACEMENT, self._on_get_replacement))
        made.append(await serve(PLACEMENT_CHANGE_PLAN, self._to_the_end(self._change_plan)))
        made.append(await self._bus.subscribe(SCHEDULER_STATISTICS, self._on_statistics))
        self._tasks.start(self._run())
        self._tasks.start(self._add_seeds(removed), "adapters of TIDEWAY_ADAPTERS")
        self._tasks.start(keeper.tend_for_ever(self._is_leader))
        self.is_open = True
        logger.info("placement leads with %d models", len(self._models))

    async def flush(self) -> None:
        """Stores what was counted; before leadership is given up."""
        try:
            await self._store_statistics()
            await self.monitor.store()
        except BusError as error:
            logger.warning("the last statistics could not be stored: %s", error)

    async def close(self) -> None:
        """Stops serving."""
        for subscription in self._subscriptions:
            await subscription.stop()
        await self.monitor.close()
        await self._replacing.close()
        await self._residence.close()
        await self._tasks.end_all()

    def wake(self) -> None:
        """A node or a checkpoint changed."""
        self._wake.set()

    # ------------------------------------------------------------------------------------------------ planning

    async def _run(self) -> None:
        await asyncio.wait({self._first_read})
        while True:
            try:
                if self._is_leader():
                    self._retry_checkpoints()
                    async with self._changing:
                        await self._settle()
                        is_changing = await self._replacing.tick()
                        if not is_changing or (self._replacing.may_give_way and self._residence.is_waited_for):
                            await self._residence.decide(self._inputs(self._models))
                            await self._replan()
                    await self._store_statistics()
                    await self.monitor.store()
            except BusError as error:
                logger.warning("placement could not write to the bus, trying again: %s", error)
            except Exception:
                logger.exception("planning failed, trying again")
            self._show()
            await set_within(self._wake, min(TICK_S, self._residence.due_in_s()))
            self._wake.clear()
            if not self._residence.is_urgent:
                await asyncio.sleep(DEBOUNCE_S)

    def _retry_checkpoints(self) -> None:
        if self._bus.now() >= self._retry_at:
            self._retry_at = self._bus.now() + self._retry_s
            self._configured.begin_reading()

    def _cluster(self) -> Cluster:
        planned = self._plans.node_ids() | {
            node_of(instance_id)[0] for instance_id in Fleet.of(self._plans.plan).released
        }
        nodes, held = self._presence.view(self._registered(), planned, self._bus.now())
        return Cluster(nodes, held, self._plans.plan)

    def _inputs(
        self,
        models: Mapping[str, ModelSpec],
        fleet: Fleet | None = None,
        adapters: Mapping[str, AdapterSpec] | None = None,
    ) -> Inputs:
        cluster = self._cluster()
        known = list((self._adapters if adapters is None else adapters).values())
        configured = [
            self._configured.configured(spec, known, self._residence.why_asleep(spec)) for spec in models.values()
        ]
        return Inputs(
            configured, cluster.nodes, cluster.held, cluster.plan, fleet or cluster.fleet, self._ready,
            self._residence.in_host_memory(),
        )  # fmt: skip

    async def _replan(self, fleet: Fleet | None = None) -> None:
        """Publishes the plan for the models as they are, if it differs. `fleet`: in place of the stored one. Call it with
        `_changing` held."""
        await self._plans.refresh()
        if await self._replacing.stays_right(self._inputs(self._models, fleet)):
            return
        if not await self._replacing.supersede("models or instances were changed"):
            if fleet is not None and fleet != Fleet.of(self._plans.plan):
                message = "a replacement is under way: nothing can be drained or scaled now"
                raise ServiceError.of(ErrorCode.UNAVAILABLE, message, retry_after_s=10.0)
            await self._tell_waiting()
            return  # it is planned for when the replacement is over
        for _ in range(PUBLISH_ATTEMPTS):
            inputs = self._inputs(self._models, fleet)
            if inputs == self._planned or (self._plans.plan is None and not inputs.nodes):
                return  # nothing new, or nothing to plan for yet
            new = await inputs.plan()
            if new != self._plans.plan and not await self._plans.publish(new):
                continue
            self._planned = replace(inputs, incumbent=new)
            self._tell_waste(wasted(new, inputs.models, inputs.nodes))
            return
        raise BusError(ErrorInfo(ErrorCode.CONFLICT, "the plan is being changed by somebody else"))

    async def _tell_waiting(self) -> None:
        """Models that were added while a replacement is under way; those that are put away wait for nothing."""
        plan = self._plans.current
        placed = {spec.name for place in plan.instances for spec in place.models}
        absent = self._models.keys() - placed
        names = sorted(name for name in absent if not self._residence.why_asleep(self._models[name]))
        waiting = dict.fromkeys(names, "it is placed when the replacement is over")
        unplaced = waiting | {name: reason for name, reason in plan.unplaced.items() if name in absent}
        if unplaced != plan.unplaced:
            await self._plans.publish(msgspec.structs.replace(plan, version=plan.version + 1, unplaced=unplaced))

    def _tell_waste(self, shares: dict[tuple[str, int], dict[str, float]]) -> None:
        """Tells of the waste where it is another than was told before."""
        for key, of_models in shares.items():
            if self._told_waste.get(key) != of_models:
                device, merged_bytes = key
                logger.info("KV pools on %s have merged blocks of %.1f MiB; unused of one: %s", device,
                            merged_bytes / 2**20,
                            ", ".join(f"{share:.1%} with {name}" for name, share in of_models.items()))  # fmt: skip
        self._told_waste = shares

    # ------------------------------------------------------------------------------------------------ handlers

    async def _on_get_plan(self, _query: GetPlan) -> PlacementPlan:
        self._check_leader()
        return self._plans.current

    async def _on_get_replacement(self, _query: GetReplacement) -> ReplacementState:
        self._check_leader()
        return self._replacing.state()

    async def _change_plan(self, query: ChangePlan) -> ReplacementState:
        async with self._change():
            return await self._replacing.on_change_plan(query)

    async def _on_add_model(self, query: AddModel) -> PlacementPlan:
        self._check_leader()
        check_spec(query.spec)
        if query.spec.name in self._adapters:
            raise refuse(f"{query.spec.name!r} is an adapter's name", "name", ErrorCode.CONFLICT)
        if query.spec.name not in self._models:
            await self._configured.read_checkpoint(query.spec)
        await self._have_read()
        return await asyncio.shield(self._tasks.start(self._add(query.spec)))

    def _to_the_end(self, change: Callable[[Q], Coroutine[Any, Any, R]]) -> Callable[[Q], Any]:
        async def handle(query: Q) -> R:
            self._check_leader()
            await self._have_read()
            return await asyncio.shield(self._tasks.start(change(query)))

        return handle

    async def _have_read(self) -> None:
        """Until a plan would be made from what the checkpoints say, or another placement leads."""
        await asyncio.wait({self._first_read})
        self._check_leader()

    # A change that was begun is finished, whether or not the caller still waits: what is stored and what is known here
    # must stay the same.

    async def _add(self, spec: ModelSpec) -> PlacementPlan:
        async with self._change():
            if (known := self._models.get(spec.name)) is not None:
                if known != spec:
                    raise refuse(f"model {spec.name!r} exists with a different definition", "name", ErrorCode.CONFLICT)
                return self._plans.current
            await self._check_fits(spec)
            await self._configured.models.put(spec)
            self._statistics.add_model(spec.name)
            self._residence.configure(self._models)
            logger.info("model %r was added: %s", spec.name, spec)
            return await self._carry_out()

    async def _remove(self, query: RemoveModel) -> PlacementPlan:
        name = query.name
        async with self._change():
            if name not in self._models:
                raise refuse(f"there is no model {name!r}", "name", ErrorCode.UNKNOWN_MODEL)
            if on_it := sorted(adapter.name for adapter in self._adapters.values() if adapter.base == name):
                message = f"{', '.join(on_it)}: adapters of {name!r}, which have to be removed first"
                raise refuse(message, "name", ErrorCode.CONFLICT)
            # Its totals stay: they tell that it was here, should the settings still name it.
            await self._store_statistics()
            await self._configured.models.remove(name)
            self._statistics.remove_model(name)
            self._metrics.forget(name)
            self._residence.configure(self._models)
            self._configured.forget_files()
            logger.info("model %r was removed", name)
            return await self._carry_out()

    async def _add_adapter(self, query: AddAdapter) -> AdapterSpec:
        spec = msgspec.structs.replace(query.spec, version="")
        check_adapter(spec)
        if spec.name not in self._adapters or query.replaces:
            spec = await self._configured.read_adapter(spec, self.monitor.now())
        async with self._change():
            known = self._adapters.get(spec.name)
            if known is not None and not query.replaces:
                if not is_same(known, spec):
                    raise refuse(
                        f"adapter {spec.name!r} exists with a different definition", "name", ErrorCode.CONFLICT
                    )
                return known
            if spec.name in self._models:
                raise refuse(f"{spec.name!r} is a model's name", "name", ErrorCode.CONFLICT)
            # Either may have been removed since the files were read, or were not.
            self._configured.base_of(spec)
            if not spec.version:
                message = f"adapter {spec.name!r} was removed just now; add it again"
                raise ServiceError.of(ErrorCode.UNAVAILABLE, message, "name", retry_after_s=1.0)
            await self._check_adapter_fits(spec)
            await self._configured.adapters.put(spec)
            if known is None:
                self._statistics.add_model(spec.name)
            logger.info("adapter %r of %r was added: %s", spec.name, spec.base, spec)
            await self._carry_out()
            return spec

    async def _remove_adapter(self, query: RemoveAdapter) -> Done:
        name = query.name
        async with self._change():
            if name not in self._adapters:
                raise refuse(f"there is no adapter {name!r}", "name", ErrorCode.UNKNOWN_MODEL)
            await self._store_statistics()
            await self._configured.adapters.remove(name)
            self._statistics.remove_model(name)
            self._metrics.forget(name)
            logger.info("adapter %r was removed", name)
            await self._carry_out()
            return Done()

    async def _check_adapter_fits(self, spec: AdapterSpec) -> None:
        """Beside all that is placed, whose KV pools cannot change under running instances."""
        without = await self._inputs(self._models).plan()
        tentative = await self._inputs(self._models, adapters={**self._adapters, spec.name: spec}).plan()
        running, before, after = (
            {place.instance_id: (place.pool_bytes, len(place.models)) for place in plan.instances}
            for plan in (self._plans.current, without, tentative)
        )
        if changed := sorted(name for name, place in running.items() if before.get(name) == place != after.get(name)):
            message = f"its {spec.num_values} values do not fit beside the KV pool of {', '.join(changed)}"
            raise refuse(message, "source")

    async def _add_seeds(self, removed: Set[str]) -> None:
        """Adapters of the settings, as soon as their base models are known. Those that the operator removed stay so."""
        waiting = [seed for seed in self._adapter_seeds if seed.name not in self._adapters]
        for seed in waiting:
            if seed.name in removed:
                logger.warning(
                    "adapter %r of TIDEWAY_ADAPTERS was removed by the operator and stays removed", seed.name
                )
        waiting = [seed for seed in waiting if seed.name not in removed]
        while waiting:
            for seed in list(waiting):
                try:
                    await self._add_adapter(AddAdapter(seed))
                except BusError as error:
                    level = logging.INFO if error.info.retry_after_s else logging.ERROR
                    logger.log(level, "adapter %r of TIDEWAY_ADAPTERS cannot be added: %s", seed.name, error)
                    if error.info.retry_after_s:
                        continue
                waiting.remove(seed)
            await asyncio.sleep(TICK_S)

    async def _scale_model(self, query: ScaleModel) -> PlacementPlan:
        async with self._change():
            if (known := self._models.get(query.name)) is None:
                raise refuse(f"there is no model {query.name!r}", "name", ErrorCode.UNKNOWN_MODEL)
            spec = msgspec.structs.replace(known, replicas=query.replicas)
            check_spec(spec)
            if spec != known:
                if self._registered() and not spec.on_demand:
                    await self._check_leaves_room({**self._models, spec.name: spec}, "replicas")
                self._ready = serving(entry.value for entry in (await self._registry.entries()).values())
                await self._configured.models.put(spec)
                logger.info("model %r is to be on %s instances", spec.name, spec.replicas or "all")
            return await self._carry_out()

    async def _set_fleet(self, fleet: Fleet) -> PlacementPlan:
        """Stored with its plan, or not at all: what a failed write did is read before the next one."""
        async with self._change():
            await self._replan(fleet)
            return self._plans.current

    async def _check_fits(self, spec: ModelSpec) -> None:
        if not self._registered():
            return  # it is placed when a node comes
        without = await self._inputs(self._models).plan()
        inputs = self._inputs({**self._models, spec.name: spec})
        tentative = await inputs.plan()
        if spec.on_demand:
            beside = replace(inputs, incumbent=tentative)
            if not await asyncio.to_thread(beside.fit, frozenset({spec.name})):
                raise refuse("the model does not fit beside those that are always loaded", "source")
        if reason := tentative.unplaced.get(spec.name):
            raise refuse(f"the model does not fit: {reason}", "source")
        if lost := displaced(without, tentative):
            raise refuse(f"the model does not fit beside {lost[0][0]!r} on {lost[0][1]}", "source")
        if not spec.on_demand:
            await self._check_leaves_room({**self._models, spec.name: spec}, "source")

    async def _check_leaves_room(self, models: Mapping[str, ModelSpec], field: str) -> None:
        """Each model on demand that has a place beside all that is always loaded is to have one with these models, too."""
        before, after = self._inputs(self._models), self._inputs(models)
        for name in sorted(name for name, spec in self._models.items() if spec.on_demand):
            alone = frozenset({name})
            if await asyncio.to_thread(before.fit, alone) and not await asyncio.to_thread(after.fit, alone):
                raise refuse(f"it would take the last room of {name!r}, which is loaded on demand", field)

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Alone, as leader; what the bus fails to do is said to be temporary."""
        async with self._changing:
            self._check_leader()
            try:
                await self._settle()
                yield
            except ServiceError:
                raise
            except BusError as error:
                self.wake()
                raise ServiceError.of(ErrorCode.UNAVAILABLE, str(error), retry_after_s=1.0) from error

    async def _settle(self) -> None:
        """Models and adapters are what is stored: a write that failed may have had its effect. Raises `BusError`."""
        before = {*self._models, *self._adapters}
        if await self._configured.models.settle() | await self._configured.adapters.settle():
            after = {*self._models, *self._adapters}
            for name in after - before:
                self._statistics.add_model(name)
            for name in before - after:
                self._statistics.remove_model(name)
                self._metrics.forget(name)
            self._residence.configure(self._models)
            self._configured.begin_reading()
            self._configured.forget_files()

    async def _carry_out(self) -> PlacementPlan:
        """After a change of the models, which is stored: a plan that cannot be published now will be by `_run`."""
        try:
            await self._replan()
        except BusError as error:
            raise BusError(
                ErrorInfo(error.code, f"the change is stored, its plan not yet published: {error}")
            ) from error
        return self._plans.current

    def _check_leader(self) -> None:
        if not self._is_leader():
            raise ServiceError.of(ErrorCode.NOT_LEADER, "another placement leads")

    # ---------------------------------------------------------------------------------------------- statistics

    def _on_statistics(self, report: StatisticsReport) -> None:
        self._statistics.observe(report.models)

    async def _store_statistics(self) -> None:
        """A crash loses what was counted since the last call, which is TICK_S or a little more ago. Raises `BusError`."""
        changed = self._statistics.take_changed()
        for done, totals in enumerate(changed):
            try:
                await self._statistics_bucket.put(bucket_key(totals.model), totals)
            except BaseException:
                self._statistics.keep_changed(t.model for t in changed[done:])
                raise

    def _show(self) -> None:
        num_queued = {name: self._statistics.num_queued(name) for name in self._models}
        self._metrics.show(self._plans.plan, self._registered(), num_queued)
        self.monitor.show()
