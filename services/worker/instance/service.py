"""One instance: the bus side of an engine.

Owns: the instance's registry entry, its subjects, its load reports and token frames, the life of its models. The engine
runs in a thread of its own (engine_loop.py); this side never waits for a step. Requests that move are
migrations.py's."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from services.worker.black_box import BlackBox
from services.worker.instance.adapters import AdapterExecutor, InstanceAdapters
from services.worker.instance.disk_tier import DiskTier
from services.worker.instance.draining import Draining
from services.worker.instance.engine_loop import COMPUTE_NICENESS, EngineLoop, StepExecutor
from services.worker.instance.grammar_telemetry import FollowsGrammars, GrammarTelemetry
from services.worker.instance.load_reporter import LoadReporter
from services.worker.instance.migrations import InstanceMigrations, KvPools, OpenTransport
from services.worker.instance.models import InstanceModels, ModelExecutor, OnReady
from services.worker.instance.output_log import OutputLog
from services.worker.instance.registration import Registration
from services.worker.instance.replaying import replayed
from services.worker.instance.request_events import InstanceEvents
from services.worker.instance.telemetry import InstanceTelemetry
from shared.bus.interface import Bus, ServiceError, Subscription
from shared.costs.model import CostSource
from shared.engine.calls import ClearPrefixCache, SetStatistics, Submit
from shared.engine.driver import StepStats
from shared.engine.engine import Effect, Engine
from shared.engine.load import InstanceLoad
from shared.engine.load_reports import LoadReports, draft_uses, is_news
from shared.engine.requests import Ended, Output
from shared.engines import capabilities
from shared.engines.capabilities import Capability
from shared.messages.admin import Done, Drain, LoadModel, UnloadModel
from shared.messages.catalogue import (
    CLEAR_PREFIX_CACHE,
    EXECUTION_STATISTICS,
    GATEWAY_FRAMES,
    INSTANCE_CANCEL,
    INSTANCE_DRAIN,
    INSTANCE_HELD,
    INSTANCE_LOAD_MODEL,
    INSTANCE_POOL,
    INSTANCE_REPLAY,
    INSTANCE_ROLE,
    INSTANCE_SUBMIT,
    INSTANCE_UNLOAD_MODEL,
    REPORT_LOAD,
)
from shared.messages.cluster import (
    DraftUse,
    ExecutionStatisticsReport,
    InstanceInfo,
    InstancePlan,
    LoadReport,
    Role,
    SetRole,
)
from shared.messages.console import PoolView, ShowPool
from shared.messages.requests import (
    Accepted,
    ErrorCode,
    GenerationRequest,
    HeldRequests,
    ListHeldRequests,
    ReplayQuery,
    ReplayReply,
)
from shared.migration.incoming import Intake
from shared.migration.limits import can_take
from shared.policies.kv_backup import BackupSettings
from shared.runtime.settings import InstanceSettings
from shared.runtime.tasks import TaskSet
from shared.runtime.telemetry import Telemetry

log = logging.getLogger(__name__)

LACKS = frozenset({Capability.IMAGES})
"""Capabilities that the native engine lacks."""
METRICS_INTERVAL_S = 0.2
"""Between two updates of the gauges and counters that are read from the engine."""
COMPILE_WAIT_S = 0.5
"""Seconds that the sender of a request is kept waiting while its grammar is compiled: with that for an adapter, less
than it waits for an answer."""
COMPILE_RETRY_S = 0.05
MAX_SUBMITS = 1024
"""Handled at once: those that wait for an adapter or a grammar keep no others out."""
STUCK_STEP_S = 120.0
"""A step that runs for longer will not end: the instance gives up and is started again."""


class InstanceExecutor(StepExecutor, ModelExecutor, AdapterExecutor, KvPools, Protocol):
    """What computes on an instance's devices."""


class InstanceService:
    """`executor` and `engine` are made by the caller (tests use a fake executor). `open_transport`: for the KV of requests
    that move; None: they move without."""

    def __init__(
        self,
        bus: Bus,
        settings: InstanceSettings,
        telemetry: Telemetry,
        engine: Engine,
        executor: InstanceExecutor,
        provide_cost_models: Callable[[EngineLoop], OnReady] | None = None,
        open_transport: OpenTransport | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """`disk`: the KV pool's tier there, if it has one."""
        self._bus = bus
        self._disk = disk
        self._settings = settings
        self._id = settings.instance_id
        self.intake = Intake(self._id)
        self.incarnation = uuid.uuid4().hex
        self.drained = asyncio.Event()
        self.failed = asyncio.Event()
        """The engine is of no more use: the process should end, so that its requests go on elsewhere."""
        self._plan = msgspec.json.decode(settings.plan, type=InstancePlan)
        self._metrics = InstanceTelemetry(self._id, telemetry, bus.now)
        self._grammars = executor if isinstance(executor, FollowsGrammars) else None
        if self._grammars is not None:
            GrammarTelemetry(self._id, telemetry.registry, self._grammars.grammar_counters)
        self._telemetry = telemetry
        niceness = COMPUTE_NICENESS if settings.device == "cpu" else 0
        self._black_box = BlackBox(settings.black_box)
        self._loop = EngineLoop(
            engine,
            executor,
            bus.now,
            self._on_effects_in_thread,
            on_failure=self._on_failure_in_thread,
            niceness=niceness,
            disk=None if disk is None else disk.copies,
            black_box=self._black_box,
        )
        if disk is not None:
            disk.loop = self._loop
        engine.memory.events.is_on = True
        self._events = InstanceEvents(bus, self._loop, self._id, are_traced=bool(settings.otlp_endpoint))
        on_ready = None if provide_cost_models is None else provide_cost_models(self._loop)
        self._outputs = OutputLog(settings.resume_s)
        self._reports = LoadReports(self._id, self.incarnation)
        self._reporter = LoadReporter(bus, self._load_report)
        self._migrations = InstanceMigrations(
            bus=bus,
            settings=settings,
            loop=self._loop,
            executor=executor,
            outputs=self._outputs,
            reports=self._reports,
            metrics=self._metrics,
            events=self._events,
            intake=self.intake,
            telemetry=telemetry,
            open_transport=open_transport,
            on_change=self.touch,
            report_soon=self._reporter.touch,
            backup=BackupSettings(settings.kv_backup, settings.kv_backup_tokens),
            gives_prefixes=settings.prefix_fetch == "auto",
        )
        self._adapters = InstanceAdapters(
            self._loop,
            executor,
            lambda model: model in self.intake.models,
            self.touch,
            telemetry.registry,
            self._id,
            max_adapters=settings.max_adapters,
            max_bytes=settings.adapter_memory_bytes,
        )
        self.intake.missing_adapter = self._adapters.missing
        self._models = InstanceModels(
            self._loop, executor, self._metrics, self.intake, self.touch, on_ready,
            (self._migrations,) if disk is None else (self._migrations, disk), self._adapters,
        )  # fmt: skip
        self._draining = Draining(bus, self._id, self._num_held, self._any_destination, self._migrations.peers_known)
        self._role = Role.BOTH if settings.role == "auto" else Role(settings.role)
        self._is_role_fixed = settings.role != "auto"
        self._drain_task: asyncio.Task[None] | None = None
        self._is_ending = False
        """No drain is undone any more."""
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []
        self._registration = Registration(bus, self._id, self._info)
        self._metrics_port = 0
        self._cost_sources: dict[str, CostSource] = {}
        """By model, as the log has it."""

    # ----------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Serves the subjects, then registers; models of the plan load in the background."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        self._metrics_port = self._telemetry.serve_metrics(self.problems)
        bus, ids = self._bus, {"instance_id": self._id}
        self._subscriptions = [
            await bus.serve(INSTANCE_SUBMIT.at(**ids), self._on_submit, max_concurrency=MAX_SUBMITS),
            await bus.serve(INSTANCE_REPLAY.at(**ids), self._on_replay),
            await bus.serve(INSTANCE_HELD.at(**ids), self._on_held),
            await bus.serve(INSTANCE_POOL.at(**ids), self._on_show_pool),
            await bus.serve(INSTANCE_LOAD_MODEL.at(**ids), self._on_load_model),
            await bus.serve(INSTANCE_UNLOAD_MODEL.at(**ids), self._on_unload_model),
            await bus.serve(INSTANCE_DRAIN.at(**ids), self._on_drain),
            await bus.serve(INSTANCE_ROLE.at(**ids), self._on_role),
            await bus.subscribe(INSTANCE_CANCEL.at(**ids), self._migrations.on_cancel),
            await bus.subscribe(CLEAR_PREFIX_CACHE, lambda _: self._clear_prefix_cache()),
            await bus.subscribe(REPORT_LOAD, self._reporter.on_asked),
            await bus.subscribe(EXECUTION_STATISTICS, self._on_statistics),
        ]
        await self._registration.open()
        bus.on_reconnect(self.touch)
        await self._adapters.start(bus)
        for spec in self._plan.models:
            self._models.begin_load(spec)
        await self._migrations.start()
        self._tasks.start(self._reporter.keep(), "load reports")
        self._tasks.start(self._keep_measured(), "metrics")
        self._tasks.start(self._registration.keep(), "registry")
        if self._disk is not None:
            self._tasks.start(self._disk.keep_measured(), "metrics of the disk")
            self._tasks.start(self._disk.keep_watch(), "watch over the disk")
        log.info("instance %s serves (pool %d x %d bytes)", self._id, self._num_merged, self._plan.merged_bytes)

    async def drain_before_exit(self) -> None:
        """Takes no more requests and lets those that are here move away, as far and as long as they can."""
        self.intake.is_draining = self._is_ending = True
        self.touch()
        await self._draining.before_exit(self._settings.drain_grace_s)

    async def stop(self) -> None:
        """Ends migrations, then leaves the registry; what is still running here is placed elsewhere by the scheduler."""
        self.intake.is_draining = self._is_ending = True
        await self._migrations.stop()
        if self._disk is not None:
            await self._disk.flush()
        self._reporter.publish()
        self._events.flush()
        await self._tasks.end_all()
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._registration.end()
        await self._adapters.stop()
        await self._models.stop()
        await asyncio.to_thread(self._loop.stop, 5.0)
        if self._disk is not None:
            await self._disk.close()

    def problems(self) -> list[str]:
        """Problems for /health."""
        found = []
        if self._loop.failure:
            found.append(f"the engine loop failed: {self._loop.failure}")
        if (stuck_s := self._loop.stuck_for_s()) > STUCK_STEP_S:
            found.append(f"a step has been running for {stuck_s:.0f} s")
        if not self._bus.is_connected:
            found.append("not connected to NATS")
        return found

    # ------------------------------------------------------------------------------------------------ handlers

    def _on_submit(self, request: GenerationRequest) -> Accepted | Coroutine[Any, Any, Accepted]:
        """Goes on in a task where a grammar may have to be compiled, or an adapter to be loaded."""
        if refused := capabilities.refusal(request, LACKS):
            raise ServiceError(refused)
        is_ready = (
            not request.sampling.grammar
            and not request.prefix_holder
            and (request.adapter is None or self._adapters.is_loaded(request.adapter))
        )
        if is_ready or not self._takes_now(request):
            return self._submit(request)
        return self._submit_when_ready(request)

    def _takes_now(self, request: GenerationRequest) -> bool:
        """Else it is refused, whatever it needs."""
        return self.intake.refusal(request.model) is None and not self._loop.failure

    async def _submit_when_ready(self, request: GenerationRequest) -> Accepted:
        with self._black_box.preparing(request.request_id):
            if request.prefix_holder:
                await self._migrations.fetch(request)
            if request.sampling.grammar:
                await self._compile(request.model, request.sampling.grammar)
            if request.adapter is not None:
                # Last: an adapter that nobody uses may go.
                await self._adapters.provide(request.model, request.adapter)
            return self._submit(request)

    async def _compile(self, model: str, grammar: str) -> None:
        """Returns when it is compiled. Raises `ServiceError`: BAD_REQUEST, or LOADING after `COMPILE_WAIT_S`."""
        if self._grammars is None:
            return
        compiled = asyncio.wrap_future(await asyncio.to_thread(self._grammars.compile_grammar, model, grammar))
        await asyncio.wait({compiled}, timeout=COMPILE_WAIT_S)
        if not compiled.done():
            message = "the request's grammar is being compiled on this instance"
            raise ServiceError.of(ErrorCode.LOADING, message, retry_after_s=COMPILE_RETRY_S)
        if isinstance(why := compiled.result(), str):
            self._models.check_serves(model)
            raise ServiceError.of(ErrorCode.BAD_REQUEST, f"The output's grammar cannot be followed: {why}")

    def _submit(self, request: GenerationRequest) -> Accepted:
        if self.intake.is_draining:
            raise ServiceError.of(ErrorCode.DRAINING, f"instance {self._id} is draining")
        if self._loop.failure:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"instance {self._id} failed: {self._loop.failure}")
        moved = self._migrations.handed_over(request.request_id)
        if moved is not None and request.epoch <= moved.epoch:
            # sent again by someone who does not know yet; its owner has it
            return Accepted(request.request_id)
        self._models.check_serves(request.model)
        refused = self._loop.apply(Submit(self._migrations.prepared(request)))
        if refused is not None:
            raise ServiceError(refused)
        self._outputs.place(request)
        self._reports.admitted.append(request.request_id)
        self._reporter.touch()
        return Accepted(request.request_id)

    def _on_statistics(self, report: ExecutionStatisticsReport) -> None:
        for statistics in report.models:
            self._loop.apply(SetStatistics(statistics))

    def _clear_prefix_cache(self) -> None:
        self._loop.apply(ClearPrefixCache())
        if self._disk is not None:
            self._disk.clear()

    def _on_replay(self, query: ReplayQuery) -> ReplayReply:
        return replayed(query, self._outputs, self._loop.held_epoch, self._migrations)

    def _on_held(self, _query: ListHeldRequests) -> HeldRequests:
        return HeldRequests(self._loop.ask(Engine.held_requests))

    def _on_show_pool(self, _query: ShowPool) -> PoolView:
        return self._loop.ask(Engine.pool_view)

    def _on_load_model(self, query: LoadModel) -> Done:
        self._models.begin_load(query.spec)
        return Done()

    def _on_unload_model(self, query: UnloadModel) -> Done:
        self._models.begin_unload(query.name, query.grace_s, keeps_weights=query.keeps_weights)
        return Done()

    def _on_role(self, query: SetRole) -> Done:
        # A scheduler that tells another has not heard of the operator's yet.
        if query.is_operators or not self._is_role_fixed:
            self._role, self._is_role_fixed = query.role or Role.BOTH, query.is_operators and query.role is not None
            self.touch()
        return Done()

    def _on_drain(self, query: Drain) -> Done:
        if query.is_undone:
            if self._is_ending:
                raise ServiceError.of(ErrorCode.CONFLICT, f"instance {self._id} is about to end")
            if self._drain_task is not None:
                self._drain_task.cancel()
                self._migrations.end_drain()
            self.intake.is_draining = False
            self.touch()
        elif not self.intake.is_draining:
            self.intake.is_draining = True
            self.touch()
            self._drain_task = self._tasks.start(self._drain(query.grace_s), "drain")
        return Done()

    async def _drain(self, grace_s: float) -> None:
        await self._draining.until_empty(grace_s)
        self._is_ending = True
        self.drained.set()

    def _num_held(self) -> int:
        return self._loop.ask(Engine.num_held) + self._migrations.has_work

    def _any_destination(self) -> bool:
        held, moves_kv = self._loop.ask(Engine.held_requests), bool(self._migrations.kv_address)
        with_kv = {request.model for request in held if request.running and moves_kv}
        waiting = {request.model for request in held if not request.running}
        others = (info for name, info in self._migrations.peers().items() if name != self._id)
        return any(can_take(info, with_kv) or can_take(info, waiting, with_kv=False) for info in others)

    # ---------------------------------------------------------------------------------- from the engine's thread

    def _on_effects_in_thread(self, effects: list[Effect], stats: StepStats | None) -> None:
        self._event_loop.call_soon_threadsafe(self._on_effects, effects, stats)

    def _on_failure_in_thread(self) -> None:
        self._event_loop.call_soon_threadsafe(self.failed.set)

    def _on_effects(self, effects: list[Effect], stats: StepStats | None) -> None:
        now = self._bus.now()
        for effect in effects:
            if isinstance(effect, Output):
                topic = GATEWAY_FRAMES.at(gateway_id=effect.gateway_id)
                for frame in self._outputs.frames(self._id, effect.entries, now):
                    self._bus.publish(topic, frame)
            elif isinstance(effect, Ended):
                self._on_ended(effect)
        self._migrations.on_effects(effects, stats)
        if stats is not None:
            self._metrics.on_step(stats)
        self._reporter.on_step(is_news=is_news(effects, stats))

    def _on_ended(self, ended: Ended) -> None:
        self._reports.on_ended(ended)
        self._metrics.on_ended(ended)
        self._metrics.spans.ended(ended, self._events.of_span(ended.request.request_id))

    # ----------------------------------------------------------------------------------------- reports, registry

    def _load_report(self) -> LoadReport:
        self._events.collect()
        load_now, num_kept, drafts = self._loop.ask(self._told)
        rescued = self._loop.counters.rescued_tokens
        copies = msgspec.structs.replace(
            self._migrations.kv_copies(),
            num_kept=num_kept,
            num_rescued_tokens=rescued["kept"],
            num_recomputed_tokens=rescued["recomputed"],
        )
        return self._reports.take(
            load_now,
            *self._migrations.num_migrating,
            self._loop.take_cache_changes(),
            kv_copies=copies,
            drafts=drafts,
        )

    def _told(self, engine: Engine) -> tuple[InstanceLoad, int, tuple[DraftUse, ...]]:
        """The load, how many requests of others have copies here, and the use of draft models."""
        backups = engine.memory.host.backups
        return self._load_with_moves(engine), 0 if backups is None else backups.num_requests, draft_uses(engine)

    def _load_with_moves(self, engine: Engine) -> InstanceLoad:
        models = engine.memory.queues.keys() if self.intake.is_draining else self._models.unloading
        return engine.load(self._loop.now(), models)

    async def _keep_measured(self) -> None:
        while True:
            if self._loop.stuck_for_s() > STUCK_STEP_S and not self.failed.is_set():
                log.error("a step has been running for over %.0f s", STUCK_STEP_S)
                self.failed.set()
            self._measure()
            await asyncio.sleep(METRICS_INTERVAL_S)

    def _measure(self) -> None:
        with self._loop.locked() as engine:
            load_now = engine.load(self._loop.now())
            used_share, host_used_share = engine.pool.used_share, engine.memory.host.used_share
            backups = engine.memory.host.backups
            kept = (0, 0.0) if backups is None else (backups.num_requests, backups.used_share)
        self._migrations.measure(*kept)
        counters = self._loop.counters
        self._metrics.on_load(load_now, used_share, counters.num_preemptions)
        self._metrics.coserving.on_counters(counters, self._block_bytes(), host_used_share)
        self._models.look_into(dict(counters.without_token))
        for model, gates in self._loop.ask(Engine.speculation).items():
            self._metrics.coserving.on_speculation(model, gates)
        for model, known in self._loop.ask(Engine.cost_models).items():
            self._metrics.coserving.on_costs(model, known)
            if self._cost_sources.get(model) != known.source:
                self._cost_sources[model] = known.source
                log.info("step times of %s: %s", model, known.source)

    def _block_bytes(self) -> dict[str, int]:
        """A KV block's share of a merged block, of each model."""
        return {
            model.name: self._plan.merged_bytes // model.blocks_per_merged
            for model in self._models.loaded({})
            if model.blocks_per_merged
        }

    def touch(self) -> None:
        """The registry entry changed: write it now rather than at the next heartbeat."""
        self._registration.touch()
        self._reporter.touch()

    @property
    def _num_merged(self) -> int:
        return max(1, self._plan.pool_bytes // self._plan.merged_bytes)

    def _info(self) -> InstanceInfo:
        load = self._loop.ask(lambda engine: engine.load(self._loop.now()))
        load_now = {model.model: model for model in load.models}
        if self.intake.is_draining:
            state = "draining"
        else:
            state = "ready" if self._models.any_ready or self._models.is_empty else "starting"
        return InstanceInfo(
            instance_id=self._id,
            incarnation=self.incarnation,
            node_id=self._settings.node_id,
            state=state,
            models=self._models.loaded(load_now),
            num_merged=self._num_merged,
            merged_bytes=self._plan.merged_bytes,
            device=self._settings.device,
            pid=os.getpid(),
            metrics_port=self._metrics_port,
            kv_address=self._migrations.kv_address,
            dispatch_freeness=load.dispatch_freeness,
            group=self._plan.group,
            lacks=tuple(LACKS),
            role=self._role,
            is_role_fixed=self._is_role_fixed,
        )
