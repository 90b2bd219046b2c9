"""An instance whose engine is another's: the bus side, with the same subjects, registry entry, load reports and token
frames as a native one (`services/worker/instance/service.py`).

    INSTANCE_SUBMIT, CANCEL, DRAIN -> Book -> Generate, Abort -> engine
    engine -> Step, one a step     -> Book -> GATEWAY_FRAMES, one a gateway; LOAD_REPORTS, INSTANCES

It serves one model for as long as its process lives. Requests leave it with their tokens, not with their KV: it ends
them with a code at which their gateways place them again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections.abc import Callable

import msgspec
from prometheus_client import Counter

from services.worker.black_box import BlackBox
from services.worker.engines.interface import EngineFailed, ForeignEngine
from services.worker.engines.moves import EngineMoves, MoveEvents
from services.worker.instance.load_reporter import LoadReporter
from services.worker.instance.migrations import InstanceMigrations, OpenTransport
from services.worker.instance.output_log import OutputLog
from services.worker.instance.peers import Peers
from services.worker.instance.registration import Registration
from services.worker.instance.replaying import replayed
from services.worker.instance.telemetry import InstanceTelemetry
from shared.bus.interface import Bus, ServiceError, Subscription
from shared.costs.model import CostSource
from shared.engine.driver import StepStats
from shared.engine.handover import Detached
from shared.engine.load import InstanceLoad
from shared.engine.load_reports import LoadReports
from shared.engines import capabilities
from shared.engines.book import Book, Effects, Held, merged_bytes
from shared.engines.capabilities import Capability
from shared.engines.messages import ClearCache as ClearEngineCache
from shared.engines.messages import Step
from shared.messages.admin import Done, Drain, LoadModel, UnloadModel
from shared.messages.catalogue import (
    CLEAR_PREFIX_CACHE,
    GATEWAY_FRAMES,
    INSTANCE_CANCEL,
    INSTANCE_DRAIN,
    INSTANCE_HELD,
    INSTANCE_LOAD_MODEL,
    INSTANCE_POOL,
    INSTANCE_REPLAY,
    INSTANCE_SUBMIT,
    INSTANCE_UNLOAD_MODEL,
    REPORT_LOAD,
)
from shared.messages.cluster import InstanceInfo, InstancePlan, LoadedModel, LoadReport, ModelSpec
from shared.messages.console import PoolView, ShowPool
from shared.messages.requests import (
    Accepted,
    Cancel,
    ErrorCode,
    ErrorInfo,
    GenerationRequest,
    HeldRequests,
    ListHeldRequests,
    ReplayQuery,
    ReplayReply,
)
from shared.messages.timeline import EventKind, RequestEvent
from shared.migration.incoming import Intake
from shared.migration.limits import can_take
from shared.runtime.request_events import EventPost
from shared.runtime.settings import InstanceSettings
from shared.runtime.tasks import TaskSet
from shared.runtime.telemetry import Telemetry

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.25
METRICS_INTERVAL_S = 0.2
PEERS_TIMEOUT_S = 1.0
DRAIN_POLL_S = 0.05
MOVES_S = 10.0
"""Time that a drain gives requests to move before they are given up."""
NO_LOAD = InstanceLoad(dispatch_freeness=math.inf, free_merged=0.0, num_running=0, models=())
"""Load of an instance whose engine does not serve yet: whoever looks on hears that it lives."""


class EngineInstance:
    """`drained` and `failed`: the process should end. Its model is the one of the settings' plan."""

    def __init__(
        self,
        bus: Bus,
        settings: InstanceSettings,
        telemetry: Telemetry,
        engine: ForeignEngine,
        open_transport: OpenTransport | None = None,
    ) -> None:
        """`open_transport`: for the KV of requests that move; None: requests do not move."""
        self._bus = bus
        self._settings = settings
        self._id = settings.instance_id
        self.incarnation = uuid.uuid4().hex
        self.drained = asyncio.Event()
        self.failed = asyncio.Event()
        self._plan = msgspec.json.decode(settings.plan, type=InstancePlan)
        (self._spec,) = self._plan.models
        self._engine = engine
        self._book: Book | None = None
        """None: the engine does not serve yet."""
        self._adapters: tuple[str, ...] = ()
        """LoRA adapters that requests were begun with, the last used one last, no more than the engine keeps."""
        self._error = ""
        self._is_final = False
        """Whether loading again would fail again, for what `_error` says."""
        self._is_draining = self._is_ending = False
        self._telemetry = telemetry
        self._metrics = InstanceTelemetry(self._id, telemetry, bus.now)
        self._diverged = Counter(
            "tideway_engine_diverged_resumes",
            "Requests whose output was made again and came out otherwise, so that it went on from its tokens",
            ["engine"],
            registry=telemetry.registry,
        )
        self._interrupted = Counter(
            "tideway_engine_interrupted_steps",
            "Steps of offline work that were given up for an online request",
            ["engine"],
            registry=telemetry.registry,
        )
        self._events = EventPost(bus, self._id)
        self._outputs = OutputLog(settings.resume_s)
        self._reports = LoadReports(self._id, self.incarnation)
        self._reporter = LoadReporter(bus, self._load_report)
        self._peers = Peers(bus, lambda _id, _info: None, lambda: False)
        self._open_transport = open_transport
        self._intake = Intake(self._id)
        self._move_events = MoveEvents(self._events, bus.now)
        self._moves: EngineMoves | None = None
        self._migrations: InstanceMigrations | None = None
        """None: requests of this engine do not move."""
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []
        self._registration = Registration(bus, self._id, self._info)
        self._metrics_port = 0
        self._drain_task: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Serves the subjects, then registers; the engine starts in the background."""
        self._metrics_port = self._telemetry.serve_metrics(self.problems)
        bus, ids = self._bus, {"instance_id": self._id}
        self._subscriptions = [
            await bus.serve(INSTANCE_SUBMIT.at(**ids), self._on_submit),
            await bus.serve(INSTANCE_REPLAY.at(**ids), self._on_replay),
            await bus.serve(INSTANCE_HELD.at(**ids), self._on_held),
            await bus.serve(INSTANCE_POOL.at(**ids), self._on_show_pool),
            await bus.serve(INSTANCE_LOAD_MODEL.at(**ids), self._on_load_model),
            await bus.serve(INSTANCE_UNLOAD_MODEL.at(**ids), self._on_unload_model),
            await bus.serve(INSTANCE_DRAIN.at(**ids), self._on_drain),
            await bus.subscribe(INSTANCE_CANCEL.at(**ids), self._on_cancel),
            await bus.subscribe(CLEAR_PREFIX_CACHE, lambda _: self._engine.send([ClearEngineCache()])),
            await bus.subscribe(REPORT_LOAD, self._reporter.on_asked),
        ]
        await self._registration.open()
        bus.on_reconnect(self.touch)
        self._tasks.start(self._run_engine(), "engine")
        self._tasks.start(self._expire(), "deadlines")
        self._tasks.start(self._reporter.keep(), "load reports")
        self._tasks.start(self._keep_measured(), "metrics")
        self._tasks.start(self._registration.keep(), "registry")
        log.info("instance %s hosts %s on %s", self._id, self._spec.name, self._spec.engine)

    async def drain_before_exit(self) -> None:
        """Takes no more requests, and gives up those that are here: they go on elsewhere, or wait until somebody can take
        them."""
        self._is_draining = self._is_ending = self._intake.is_draining = True
        self._give_up(ErrorInfo(ErrorCode.DRAINING, f"instance {self._id} ends"))
        self.touch()

    async def stop(self) -> None:
        self._is_draining = self._is_ending = self._intake.is_draining = True
        if self._migrations is not None:
            await self._migrations.stop()
        self._give_up(ErrorInfo(ErrorCode.DRAINING, f"instance {self._id} ends"))
        self._reporter.publish()
        self._events.flush()
        await self._tasks.end_all()
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._registration.end()
        await self._peers.stop()
        await self._engine.stop()

    def problems(self) -> list[str]:
        """Problems for /health."""
        found = [f"the engine failed: {self._error}"] if self._error else []
        if not self._bus.is_connected:
            found.append("not connected to NATS")
        return found

    async def _run_engine(self) -> None:
        while True:
            try:
                await self._serve_engine()
            except EngineFailed as error:
                log.error("the engine %s failed: %s", self._spec.engine, error)
                comes_back = self._engine.comes_back and not error.is_final
                if not comes_back:
                    self._error, self._is_final = str(error), error.is_final
                    self._is_ending = True
                if (book := self._book) is not None and not self._spec.is_endpoint:
                    BlackBox(self._settings.black_box).note(book.unproven())
                self._give_up(ErrorInfo(ErrorCode.GONE, f"the engine of instance {self._id} failed"))
                if comes_back and book is not None:
                    self._book = None
                    self._metrics.remove_model(self._spec.name, book.facts.block_size, book.facts.num_blocks)
                self._reporter.publish()
                self.touch()
                if not comes_back:
                    if not error.is_final:
                        self.failed.set()
                    return

    async def _serve_engine(self) -> None:
        """From its start until it fails. Raises `EngineFailed`."""
        facts = await self._engine.start()
        book = self._book = Book(self._spec.name, facts)
        self._metrics.set_model(self._spec.name, facts.block_size, facts.num_blocks)
        for note in facts.notes:
            log.warning("%s", note)
        log.info(
            "%s %s serves %s: %d blocks of %d tokens, lacks %s",
            self._spec.engine, facts.version, self._spec.name, facts.num_blocks, facts.block_size,
            ", ".join(facts.lacks) or "nothing",
        )  # fmt: skip
        await self._start_moves(book)
        self.touch()
        while True:
            message = await self._engine.next_step()
            if isinstance(message, Step):
                self._on_step(book, message)
            elif self._moves is not None:
                self._moves.on_moved(message)

    async def _start_moves(self, book: Book) -> None:
        """Lets requests move, if the engine and the settings do."""
        facts = book.facts
        if self._open_transport is None or not facts.num_slots or Capability.KV_MOVES in book.lacks:
            return
        moves = EngineMoves(
            book, self._settings.migration_cooldown_s, self._bus.now, self._engine.send, self._on_moved_requests
        )
        self._moves = moves
        self._intake.models.add(self._spec.name)
        self._migrations = InstanceMigrations(
            bus=self._bus,
            settings=self._settings,
            loop=moves,
            executor=moves,
            outputs=self._outputs,
            reports=self._reports,
            metrics=self._metrics,
            events=self._move_events,
            intake=self._intake,
            telemetry=self._telemetry,
            open_transport=self._open_transport,
            on_change=self.touch,
            report_soon=self._reporter.touch,
        )
        self._migrations.add_model(self._spec.name)
        await self._migrations.start()

    def _on_moved_requests(self, taken: list[Detached], adopted: list[Held], cancelled: list[str]) -> None:
        for held in adopted:
            self._tell(held, EventKind.MOVED)
        for effect in taken:
            self._move_events.add(effect.request, EventKind.DETACHED)
        if taken and self._migrations is not None:
            self._migrations.on_effects(taken, None)
        for request_id in cancelled:
            self._on_cancel(Cancel(request_id))
        self._reporter.touch()

    # ------------------------------------------------------------------------------------------------ handlers

    def _on_submit(self, request: GenerationRequest) -> Accepted:
        if self._is_draining:
            raise ServiceError.of(ErrorCode.DRAINING, f"instance {self._id} is draining")
        if self._error:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"instance {self._id} failed: {self._error}")
        if request.model != self._spec.name or self._book is None:
            raise ServiceError.of(ErrorCode.GONE, f"model {request.model!r} is not on instance {self._id}", "model")
        if refused := capabilities.refusal(request, self._book.lacks):
            raise ServiceError(refused)
        known = self._book.get(request.request_id)
        effects = self._book.submit(request, self._bus.now())
        if isinstance(effects, ErrorInfo):
            raise ServiceError(effects)
        self._outputs.place(request)
        self._reports.admitted.append(request.request_id)
        if known is None or known.request.epoch < request.epoch:
            held = self._book.get(request.request_id)
            if held is not None:
                self._tell(held, EventKind.ARRIVED)
        self._carry_out(effects)
        self._reporter.touch()
        return Accepted(request.request_id)

    def _on_cancel(self, cancel: Cancel) -> None:
        epoch = self._held_epoch(cancel.request_id)
        if self._book is not None and epoch is not None:
            is_meant = cancel.epoch is None or epoch <= cancel.epoch
            if is_meant and self._moves is not None and self._moves.is_frozen(cancel.request_id, cancels=True):
                return
            self._carry_out(self._book.cancel(cancel.request_id, cancel.epoch, self._bus.now()))
        elif self._migrations is not None:
            self._migrations.on_cancel(cancel)

    def _on_replay(self, query: ReplayQuery) -> ReplayReply:
        return replayed(query, self._outputs, self._held_epoch, self._migrations)

    def _held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        return None if self._book is None else self._book.held_epoch(request_id)

    def _on_held(self, _query: ListHeldRequests) -> HeldRequests:
        return HeldRequests([] if self._book is None else self._book.held_requests())

    def _on_show_pool(self, _query: ShowPool) -> PoolView:
        raise ServiceError.of(ErrorCode.NOT_FOUND, f"the engine {self._spec.engine} does not show its KV blocks")

    def _on_load_model(self, query: LoadModel) -> Done:
        raise self._has_one_model(query.spec)

    def _on_unload_model(self, query: UnloadModel) -> Done:
        raise self._has_one_model(self._spec)

    def _has_one_model(self, spec: ModelSpec) -> ServiceError:
        message = (
            f"instance {self._id} has {self._spec.name!r} for as long as it lives: {spec.name!r} cannot change there"
        )
        return ServiceError.of(ErrorCode.CONFLICT, message, "model")

    def _on_drain(self, query: Drain) -> Done:
        if query.is_undone:
            if self._is_ending:
                raise ServiceError.of(ErrorCode.CONFLICT, f"instance {self._id} is about to end")
            if self._drain_task is not None:
                self._drain_task.cancel()
            self._is_draining = self._intake.is_draining = False
            if self._migrations is not None:
                self._migrations.end_drain()
            self.touch()
        elif not self._is_draining:
            self._is_draining = self._intake.is_draining = True
            self.touch()
            self._drain_task = self._tasks.start(self._drain(query.grace_s), "drain")
        return Done()

    async def _drain(self, grace_s: float) -> None:
        """Empties the instance: where others can take its requests, gives up at once those that cannot move, and the others
        when they have not moved in time; else they end here, as far as the time carries."""
        await self._peers.known(PEERS_TIMEOUT_S)
        drained = ErrorInfo(ErrorCode.DRAINING, f"instance {self._id} is drained")
        deadline_s = self._bus.now() + grace_s
        while self._book and not self._others_can_take(with_kv=False) and self._bus.now() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._moves is not None and self._others_can_take(with_kv=True):
            self._give_up(drained, self._moves.can_move)
            deadline_s = min(deadline_s, self._bus.now() + MOVES_S)
            while self._book and self._bus.now() < deadline_s:
                await asyncio.sleep(DRAIN_POLL_S)
        self._is_ending = True
        self._give_up(drained)
        self.drained.set()

    def _others_can_take(self, *, with_kv: bool) -> bool:
        others = (info for name, info in self._peers.entries().items() if name != self._id)
        return any(can_take(info, {self._spec.name}, with_kv) for info in others)

    def _give_up(self, error: ErrorInfo, stays: Callable[[Held], bool] = lambda _: False) -> None:
        """All, but those that stay and those that are perhaps another's."""
        if self._book is not None:
            effects = self._book.give_up(error, self._bus.now(), lambda held: self._is_frozen(held) or stays(held))
            self._carry_out(effects)

    def _is_frozen(self, held: Held) -> bool:
        return self._moves is not None and self._moves.is_frozen(held.request_id)

    # ------------------------------------------------------------------------------------------- what came of it

    def _on_step(self, book: Book, step: Step) -> None:
        num_decodes = [0, 0]
        for progress in step.progress:
            if (held := book.by_key(progress.key)) is not None and held.is_running:
                num_decodes[not held.is_online] += 1
        effects = book.step(step, self._bus.now())
        self._carry_out(effects)
        if step.is_interrupted:
            self._interrupted.labels(self._id).inc()
        if step.shape is not None:
            num_tokens = step.shape[0] + step.shape[2]
            self._metrics.on_step(
                StepStats(self._spec.name, num_tokens, (num_decodes[0], num_decodes[1]), step.seconds)
            )
        self._reporter.on_step(is_news=bool(effects.ended or effects.begun))

    def _carry_out(self, effects: Effects) -> None:
        now = self._bus.now()
        self._engine.send(effects.commands)
        for held in effects.begun:
            if held.request.adapter is not None:
                self._note_adapter(held.request.adapter.name)
            self._tell(held, EventKind.DECODE_RESUMED if held.request.prior else EventKind.FIRST_TOKEN)
        for held in effects.diverged:
            self._diverged.labels(self._id).inc()
            log.warning("the output of %s was made again and came out otherwise", held.request_id)
        for gateway_id, entries in effects.entries.items():
            topic = GATEWAY_FRAMES.at(gateway_id=gateway_id)
            for frame in self._outputs.frames(self._id, entries, now):
                self._bus.publish(topic, frame)
        for ended in effects.ended:
            if self._moves is not None:
                self._moves.ended(ended.request.request_id)
            if self._migrations is not None:
                self._migrations.on_effects([ended], None)
            self._reports.on_ended(ended)
            self._metrics.on_ended(ended)
            self._metrics.spans.ended(ended)
            request = ended.request
            numbers = (ended.device_s, float(ended.num_output_tokens))
            event = RequestEvent(
                request.request_id, request.epoch, EventKind.ENDED, now, str(ended.reason), numbers=numbers
            )
            self._events.add(request.gateway_id, event)
            self._reporter.touch()

    def _note_adapter(self, name: str) -> None:
        """The engine has it loaded, as the last used one."""
        known = list(self._adapters)
        assert self._book is not None
        self._adapters = (*[one for one in known if one != name], name)[-max(1, self._book.facts.max_adapters) :]
        if set(known) != set(self._adapters):
            self.touch()

    def _tell(self, held: Held, kind: EventKind) -> None:
        request = held.request
        numbers = (held.service_s,) if kind is not EventKind.ARRIVED else (0.0, 0.0, 0.0)
        event = RequestEvent(request.request_id, request.epoch, kind, self._bus.now(), numbers=numbers)
        self._events.add(request.gateway_id, event)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            if self._book is not None:
                self._carry_out(self._book.expire(self._bus.now(), self._is_frozen))

    # ----------------------------------------------------------------------------------------- reports, registry

    def _load_report(self) -> LoadReport:
        load = NO_LOAD if self._book is None else self._book.load(self._bus.now())
        num_out, num_in = (0, 0) if self._migrations is None else self._migrations.num_migrating
        return self._reports.take(load, num_out, num_in)

    async def _keep_measured(self) -> None:
        while True:
            if (book := self._book) is not None:
                self._metrics.on_load(book.load(self._bus.now()), book.used_share, book.num_preemptions)
            await asyncio.sleep(METRICS_INTERVAL_S)

    def touch(self) -> None:
        """The registry entry changed: write it now rather than at the next heartbeat."""
        self._registration.touch()
        self._reporter.touch()

    def _info(self) -> InstanceInfo:
        book = self._book
        state = "draining" if self._is_draining else "starting" if book is None or self._error else "ready"
        info = InstanceInfo(
            instance_id=self._id,
            incarnation=self.incarnation,
            node_id=self._settings.node_id,
            state=state,
            models=[self._loaded()],
            merged_bytes=self._plan.merged_bytes,
            device=self._settings.device,
            pid=os.getpid(),
            metrics_port=self._metrics_port,
            group=self._plan.group,
            engine=self._spec.engine,
        )
        if book is None:
            return info
        return msgspec.structs.replace(
            info,
            num_merged=book.facts.num_blocks,
            merged_bytes=merged_bytes(book.facts),
            dispatch_freeness=book.load(self._bus.now()).dispatch_freeness,
            engine_version=book.facts.version,
            kv_address="" if self._migrations is None else self._migrations.kv_address,
            lacks=book.facts.lacks,
        )

    def _loaded(self) -> LoadedModel:
        name = self._spec.name
        if self._error:
            return LoadedModel(name=name, state="failed", error=self._error, is_final=self._is_final)
        if (book := self._book) is None:
            return LoadedModel(name=name, state="loading", error=self._engine.problem)
        (load,) = book.load(self._bus.now()).models
        return LoadedModel(
            name=name,
            state="ready",
            max_model_len=book.facts.max_model_len,
            block_size=book.facts.block_size,
            blocks_per_merged=1,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            cost_model=str(CostSource.LIVE if book.costs.is_known else CostSource.NONE),
            adapters=self._adapters,
        )
