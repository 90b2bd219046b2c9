"""`ScriptedPeer`: everything on the bus that the gateway talks to, played by a script: the scheduler, instances,
placement and the registry. It records what it was sent."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from struct import pack

import msgspec

from shared.bus.interface import Bus, BusError, KeyValue, ServiceError, Subscription
from shared.messages.admin import (
    AddAdapter,
    AddModel,
    ChangePlan,
    Done,
    DrainInstance,
    GetPlan,
    GetReplacement,
    RemoveAdapter,
    RemoveModel,
    ReplacementState,
    ScaleInstances,
    ScaleModel,
)
from shared.messages.batches import GrantQuery, GrantReply, OfflineGrant
from shared.messages.catalogue import (
    ADAPTERS,
    GATEWAY_FRAMES,
    GATEWAY_LOST,
    INSTANCE_CANCEL,
    INSTANCE_REPLAY,
    INSTANCE_ROLE,
    INSTANCE_SUBMIT,
    INSTANCES,
    LOAD_REPORTS,
    MODELS,
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
    PLANS,
    SCHEDULER_CANCEL,
    SCHEDULER_GRANT,
    SCHEDULER_STATISTICS,
    SCHEDULER_SUBMIT,
)
from shared.messages.channels import bucket_key
from shared.messages.cluster import (
    AdapterSpec,
    InstanceInfo,
    LoadedModel,
    LoadReport,
    ModelSpec,
    ModelStatistics,
    PlacementPlan,
    SetRole,
    StatisticsReport,
)
from shared.messages.requests import (
    Accepted,
    Cancel,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    LostRequest,
    ReplayQuery,
    ReplayReply,
    RequestsLost,
    RequestTiming,
    TokenEntry,
    TokenFrame,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)

DEADLINE_S = 10.0


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        await asyncio.sleep(0.005)


def prompt_logprobs(prompt: list[int], num_top: int) -> bytes:
    """Log-probability of each token: its id with a minus, rank 7, and the ids 1, 2, .. as the most likely."""
    ids, values = range(1, num_top + 1), [-0.25] * num_top
    return b"".join(pack(f"=fi{num_top}i{num_top}f", -token, 7, *ids, *values) for token in prompt[1:])


class ScriptedPeer:
    """By default every request is accepted by the scheduler and answered at once with `script(request)`, one token a
    frame, by instance "a". `automatic = False`: a test sends the frames itself with `emit`."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.script: Callable[[GenerationRequest], list[int]] = lambda request: []
        self.finish = FinishReason.STOP
        self.automatic = True
        self.refusal: ServiceError | None = None
        """What the scheduler answers instead of Accepted."""
        self.instance_refusal: ServiceError | None = None
        self.hang = False
        """The scheduler does not answer at all."""
        self.may_answer = asyncio.Event()
        """Until this is set, its answers wait."""
        self.may_answer.set()
        self.num_cached_tokens = 0
        self.grant_tokens = 1_000_000
        """Granted to each batch at each question."""
        self.grant_queries: list[GrantQuery] = []
        self.tokens_per_s: dict[str, float] = {}
        self.replays: dict[str, ReplayReply] = {}
        """By instance; "unknown" for all where there is none."""
        self.submitted: list[GenerationRequest] = []
        self.submitted_to: dict[str, list[GenerationRequest]] = {}
        self.cancelled: list[str] = []
        self.instance_cancelled: list[tuple[str, str]] = []
        self.cancelled_epochs: list[int | None] = []
        """Epochs of those."""
        self.replay_queries: list[tuple[str, ReplayQuery]] = []
        self.roles: list[tuple[str, SetRole]] = []
        """Told to which instance."""
        self.plan = PlacementPlan(1, [])
        self.replacement = ReplacementState(mode="advise", interval_s=600.0, since_s=1.0)
        self.changed_plan = ChangePlan("search")
        """Change that was asked for last."""
        self.loads: dict[str, dict[str, object]] = {}
        """Fields of the load reports of an instance; one that has none here says nothing."""
        self.num_reports = 0
        self.scaled: list[ScaleModel | ScaleInstances] = []
        self.scaling_refusal: ServiceError | None = None
        self._names: set[str] = set()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: dict[str, list[Subscription]] = {}
        self._infos: dict[str, InstanceInfo] = {}
        self._instances: KeyValue[InstanceInfo]
        self._models: KeyValue[ModelSpec]

    async def start(self, *specs: ModelSpec, scheduler: bool = True) -> None:
        self._instances = await self.bus.key_value(INSTANCES)
        self._models = await self.bus.key_value(MODELS)
        for spec in specs:
            self._names.add(spec.name)
            await self._models.put(bucket_key(spec.name), spec)
        if scheduler:
            await self.start_scheduler()
        await self.bus.serve(PLACEMENT_ADD_MODEL, self._add_model)
        await self.bus.serve(PLACEMENT_REMOVE_MODEL, self._remove_model)
        await self.bus.serve(PLACEMENT_ADD_ADAPTER, self._add_adapter)
        await self.bus.serve(PLACEMENT_REMOVE_ADAPTER, self._remove_adapter)
        await self.bus.serve(PLACEMENT_PLAN, self._show_plan)
        await self.bus.serve(PLACEMENT_REPLACEMENT, self._show_replacement)
        await self.bus.serve(PLACEMENT_CHANGE_PLAN, self._change_plan)
        await self.bus.serve(PLACEMENT_DRAIN_INSTANCE, self._drain)
        await self.bus.serve(PLACEMENT_SCALE_MODEL, self._scale)
        await self.bus.serve(PLACEMENT_SCALE_INSTANCES, self._scale)
        self._spawn(self._heartbeats())

    async def stop(self) -> None:
        self._stopped.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------------------------------------------- scheduler

    async def start_scheduler(self) -> None:
        self._served["scheduler"] = [
            await self.bus.serve(SCHEDULER_SUBMIT, self._submit, max_concurrency=1000),
            await self.bus.serve(SCHEDULER_GRANT, self._grant),
            await self.bus.subscribe(SCHEDULER_CANCEL, lambda cancel: self.cancelled.append(cancel.request_id)),
        ]

    async def _grant(self, query: GrantQuery) -> GrantReply:
        self.grant_queries.append(query)
        grants = [OfflineGrant(demand.batch_id, self.grant_tokens, demand.model) for demand in query.demands]
        return GrantReply(grants, 0.05, self.tokens_per_s)

    def tell_statistics(self, model: str, **fields: int) -> None:
        """Publishes what the scheduler says of a model each second; what is not given is 0."""
        counts = dict.fromkeys(("num_arrived", "num_finished", "prompt_tokens", "output_tokens", "num_queued"), 0)
        statistics = ModelStatistics(model=model, interval_s=1.0, queued_s=0.0, execution_s=0.0, **counts | fields)
        self.bus.publish(SCHEDULER_STATISTICS, StatisticsReport("scheduler", [statistics]))

    async def stop_scheduler(self) -> None:
        for subscription in self._served.pop("scheduler"):
            await subscription.stop()

    async def _submit(self, request: GenerationRequest) -> Accepted:
        self.submitted.append(request)
        if self.hang:
            await self._stopped.wait()
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        if self.automatic:
            self._spawn(self._run("a", request))
        return Accepted(request.request_id)

    # -------------------------------------------------------------------------------------------------- instances

    async def add_instance(
        self,
        instance_id: str,
        *models: str,
        incarnation: str = "1",
        state: str = "ready",
        num_running: int = 0,
        kv_address: str = "",
        max_model_len: int = 256,
        engine: str = "native",
    ) -> None:
        loaded = [
            LoadedModel(name=name, state=state, max_model_len=max_model_len, block_size=16, num_running=num_running)
            for name in models
        ]
        info = InstanceInfo(
            instance_id=instance_id,
            incarnation=incarnation,
            node_id="node",
            state=state,
            models=loaded,
            num_merged=100,
            merged_bytes=2**20,
            kv_address=kv_address,
            engine=engine,
            dispatch_freeness=(100 - num_running) / num_running if num_running else math.inf,
        )
        if instance_id not in self._served:
            endpoint = INSTANCE_SUBMIT.at(instance_id=instance_id)
            cancel = INSTANCE_CANCEL.at(instance_id=instance_id)

            async def submit(request: GenerationRequest) -> Accepted:
                self.submitted_to.setdefault(instance_id, []).append(request)
                if self.instance_refusal is not None:
                    raise self.instance_refusal
                if self.automatic:
                    self._spawn(self._run(instance_id, request))
                return Accepted(request.request_id)

            async def replay(query: ReplayQuery) -> ReplayReply:
                self.replay_queries.append((instance_id, query))
                return self.replay(instance_id, query)

            def on_cancel(message: Cancel) -> None:
                self.instance_cancelled.append((instance_id, message.request_id))
                self.cancelled_epochs.append(message.epoch)

            def set_role(query: SetRole) -> Done:
                self.roles.append((instance_id, query))
                return Done()

            self._served[instance_id] = [
                await self.bus.serve(endpoint, submit),
                await self.bus.serve(INSTANCE_ROLE.at(instance_id=instance_id), set_role),
                await self.bus.serve(INSTANCE_REPLAY.at(instance_id=instance_id), replay),
                await self.bus.subscribe(cancel, on_cancel),
            ]
        await self.put_instance(info)

    def replay(self, instance_id: str, query: ReplayQuery) -> ReplayReply:
        unknown = ReplayReply([], [position.request_id for position in query.positions])
        return self.replays.get(instance_id, unknown)

    async def put_instance(self, info: InstanceInfo) -> None:
        self._infos[info.instance_id] = info
        await self._instances.put(info.instance_id, info)

    def report(self, instance_id: str) -> None:
        """A load report; but for `loads` of an instance that idles."""
        self.num_reports += 1
        idle = {"dispatch_freeness": float("inf"), "migration_freeness": float("inf"), "free_merged": 100.0}
        empty = {"num_running": 0, "models": [], "admitted": [], "ended": [], "finished": []}
        fields = {"incarnation": self._infos[instance_id].incarnation, **idle, **empty, **self.loads[instance_id]}
        self.bus.publish(LOAD_REPORTS, LoadReport(instance_id=instance_id, sequence=self.num_reports, **fields))

    async def remove_instance(self, instance_id: str, *, is_clean: bool = True) -> None:
        """`is_clean`: it leaves the registry at once instead of when its entry expires."""
        del self._infos[instance_id]
        for subscription in self._served.pop(instance_id):
            await subscription.stop()
        if is_clean:
            await self._instances.delete(instance_id)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for instance_id, info in list(self._infos.items()):
                if self.bus.is_connected:
                    with suppress(BusError):  # as real ones do, it tries again
                        await self._instances.put(instance_id, info)
                    if instance_id in self.loads:
                        self.report(instance_id)

    async def _run(self, instance_id: str, request: GenerationRequest) -> None:
        tokens = self.script(request)
        limited = tokens[: request.sampling.max_tokens]
        finish = FinishReason.LENGTH if len(limited) < len(tokens) else self.finish
        for offset in range(len(request.prior) // 4, len(limited)):
            is_last = offset == len(limited) - 1
            self.emit(request, offset, limited[offset : offset + 1], finish if is_last else None, sender=instance_id)
            await asyncio.sleep(0)

    def emit(
        self,
        request: GenerationRequest,
        offset: int,
        tokens: list[int],
        finish: FinishReason | None = None,
        *,
        sender: str = "a",
        epoch: int | None = None,
        error=None,
    ) -> None:
        entry = self.entry(request, offset, tokens, finish, epoch=epoch, error=error)
        self.send(request.gateway_id, TokenFrame(sender, [entry]))

    def entry(self, request, offset, tokens, finish=None, *, epoch=None, error=None) -> TokenEntry:
        logprobs: tuple[TokenLogprob, ...] = ()
        num_top = request.sampling.logprobs
        if num_top >= 0:
            logprobs = tuple(
                TokenLogprob(
                    -0.5, tuple((t + i) % 300 for i in range(num_top)), tuple(-0.5 - i for i in range(num_top)), 1
                )
                for t in tokens
            )
        if request.sampling.prompt_logprobs >= 0 and offset == 0 and logprobs:
            prompt = prompt_logprobs(unpack_tokens(request.prompt), request.sampling.prompt_logprobs)
            logprobs = (msgspec.structs.replace(logprobs[0], prompt=prompt), *logprobs[1:])
        return TokenEntry(
            request_id=request.request_id,
            epoch=request.epoch if epoch is None else epoch,
            offset=offset,
            tokens=pack_tokens(tokens),
            finish_reason=finish,
            logprobs=logprobs,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
            timing=RequestTiming(0.001, 0.002, 0.003) if finish else None,
        )

    def send(self, gateway_id: str, frame: TokenFrame) -> None:
        self.bus.publish(GATEWAY_FRAMES.at(gateway_id=gateway_id), frame)

    def lose(self, request: GenerationRequest, epoch: int, instance_id: str = "a") -> None:
        lost = RequestsLost(instance_id, [LostRequest(request.request_id, epoch)])
        self.bus.publish(GATEWAY_LOST.at(gateway_id=request.gateway_id), lost)

    # -------------------------------------------------------------------------------------------------- placement

    async def _add_model(self, message: AddModel) -> PlacementPlan:
        if message.spec.name in self._names:
            raise ServiceError.of(ErrorCode.CONFLICT, f"model {message.spec.name} is there already", "name")
        if not await asyncio.to_thread(os.path.isdir, message.spec.source):
            raise ServiceError.of(ErrorCode.BAD_REQUEST, f"{message.spec.source} does not exist", "source")
        self._names.add(message.spec.name)
        await self._models.put(bucket_key(message.spec.name), message.spec)
        return self.plan

    async def _remove_model(self, message: RemoveModel) -> PlacementPlan:
        self._names.discard(message.name)
        await self._models.delete(bucket_key(message.name))
        self.plan = msgspec.structs.replace(self.plan, version=self.plan.version + 1)
        return self.plan

    async def _add_adapter(self, message: AddAdapter) -> AdapterSpec:
        if not await asyncio.to_thread(os.path.isdir, message.spec.source):
            raise ServiceError.of(ErrorCode.NOT_FOUND, f"{message.spec.source} does not exist", "source")
        spec = msgspec.structs.replace(message.spec, version="1", rank=4, added_s=7.0)
        await (await self.bus.key_value(ADAPTERS)).put(bucket_key(spec.name), spec)
        return spec

    async def _remove_adapter(self, message: RemoveAdapter) -> Done:
        await (await self.bus.key_value(ADAPTERS)).delete(bucket_key(message.name))
        return Done()

    async def _drain(self, message: DrainInstance) -> PlacementPlan:
        draining = [i for i in self.plan.draining if i != message.instance_id]
        if message.instance_id not in {*self._infos, *self.plan.draining}:
            raise ServiceError.of(ErrorCode.GONE, f"there is no instance {message.instance_id!r}", "instance_id")
        if not message.is_undone:
            if not message.is_forced and self._infos.keys() - set(draining) == {message.instance_id}:
                raise ServiceError.of(ErrorCode.CONFLICT, f"{message.instance_id!r} is the last instance")
            draining.append(message.instance_id)
        self.plan = msgspec.structs.replace(self.plan, version=self.plan.version + 1, draining=draining)
        await (await self.bus.key_value(PLANS)).put("current", self.plan)
        return self.plan

    async def _scale(self, message: ScaleModel | ScaleInstances) -> PlacementPlan:
        if self.scaling_refusal is not None:
            raise self.scaling_refusal
        self.scaled.append(message)
        return self.plan

    async def _show_plan(self, message: GetPlan) -> PlacementPlan:
        return self.plan

    async def _show_replacement(self, message: GetReplacement) -> ReplacementState:
        return self.replacement

    async def _change_plan(self, message: ChangePlan) -> ReplacementState:
        if message.action == "roll_back":
            raise ServiceError.of(ErrorCode.CONFLICT, "no replacement was carried out", "action")
        self.changed_plan = message
        self.replacement = msgspec.structs.replace(self.replacement, searching=message.action)
        return self.replacement


def prior_tokens(request: GenerationRequest) -> list[int]:
    return unpack_tokens(request.prior)
