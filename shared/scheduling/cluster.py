"""The cluster as the scheduler sees it: the registry, the last load report of each instance, and who is alive.

Only instance-level numbers are kept, so the work per report does not depend on how many requests or instances exist; and
what is derived from a report is derived when somebody asks, because most reports are followed by another one first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from shared.engines import capabilities
from shared.messages.cluster import InstanceInfo, LoadedModel, LoadReport, ModelLoad, NextMove
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest
from shared.policies.dispatch import ReportedFreeness
from shared.policies.rebalancing import InstanceView
from shared.policies.token_cost import Resident
from shared.policies.virtual_usage import merged_demand
from shared.scheduling.timers import Timers


class ServedModel(NamedTuple):
    """A model as one instance serves it; 0 where the registry does not say."""

    max_model_len: int
    block_size: int
    blocks_per_merged: int
    num_merged: int
    lacks: frozenset[str] = frozenset()
    """What its engine cannot do."""

    @classmethod
    def of(cls, model: LoadedModel, info: InstanceInfo) -> ServedModel:
        return _same(
            cls(model.max_model_len, model.block_size, model.blocks_per_merged, info.num_merged, frozenset(info.lacks))
        )

    @property
    def tokens_per_merged(self) -> int:
        return self.block_size * self.blocks_per_merged

    def demand_merged(self, num_tokens: int) -> float:
        if not (self.block_size and self.blocks_per_merged):
            return 0.0
        return merged_demand(num_tokens, self.block_size, self.blocks_per_merged)

    @property
    def max_tokens(self) -> float:
        """Length to which a sequence can grow in an empty pool; infinite where nothing is known."""
        pool_tokens = self.num_merged * self.tokens_per_merged
        return min(self.max_model_len or math.inf, pool_tokens or math.inf)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence can grow to `num_tokens` in an empty pool."""
        return num_tokens <= self.max_tokens


@lru_cache(4096)
def _same(served: ServedModel) -> ServedModel:
    """One object for all that are equal, so that most comparisons end at once."""
    return served


class Liveness(StrEnum):
    ALIVE = "alive"
    SILENT = "silent"
    """Nothing was heard for too long; the bus is being probed before the instance is declared lost."""
    LOST = "lost"
    """Declared dead for its silence; a report brings it back."""
    EXITED = "exited"
    """Its process is gone: final for this incarnation."""


_ALIVE = Liveness.ALIVE
"""Asked for with every report; a member looked up in its class costs ten times as much."""


@dataclass(slots=True, eq=False)
class Load:
    """What a load report says, added up over models."""

    num_requests: int
    """Online requests: running and waiting."""
    num_running: int
    """Running ones among them."""
    num_held: int
    """Requests of both classes."""
    by_model: dict[str, ModelLoad]
    takes_offline: bool = True
    """False: it has refused offline requests since."""

    @classmethod
    def of(cls, report: LoadReport) -> Load:
        num_waiting = num_offline = num_waiting_online = 0
        by_model: dict[str, ModelLoad] = {}
        for load in report.models:
            num_waiting += load.num_waiting
            num_offline += load.num_offline
            num_waiting_online += load.num_waiting_online
            by_model[load.model] = load
        num_held = report.num_running + num_waiting
        num_requests = max(0, num_held - num_offline)
        return cls(num_requests, max(0, num_requests - num_waiting_online), num_held, by_model)

    @property
    def residents(self) -> list[Resident]:
        """Its models, with their online requests."""
        return [
            (load.model, max(0, load.num_running + load.num_waiting - load.num_offline), load.decode_cost)
            for load in self.by_model.values()
        ]

    def offline_room(self, model: str) -> int:
        """Offline tokens of the model that it could take."""
        load = self.by_model.get(model)
        return load.offline_room_tokens if load is not None and self.takes_offline else 0


@dataclass(slots=True, eq=False, kw_only=True)
class InstanceState:
    """One incarnation of an instance. Times are on the scheduler's clock."""

    info: InstanceInfo
    heard_s: float
    """Time at which it was last heard of: a report, its registration, or the end of an outage of the bus."""
    ready: dict[str, ServedModel] = field(default_factory=dict)
    """Models that take requests here."""
    coming: dict[str, ServedModel] = field(default_factory=dict)
    """Models that are being loaded."""
    liveness: Liveness = Liveness.ALIVE
    report: LoadReport | None = None
    _load: Load | None = None
    _left_merged: float | None = None
    _view: InstanceView | None = None
    names: frozenset[str] = frozenset()
    """Names of the models in `ready`."""
    leaving: frozenset[str] = frozenset()
    """Models whose requests have to go elsewhere: all of a draining instance, or those being unloaded."""
    num_refusals: int = 0
    """In a row; the back-off grows with it."""
    is_backing_off: bool = False
    is_ready: bool = False
    """By the registry; and whether its KV transport can be reached."""
    is_reachable: bool = False
    last_turn: int = 0
    has_answered: bool = False
    """Said what it holds since it appeared (or came back)."""
    num_asks: int = 0
    """Questions of that kind under way."""
    next_ask_s: float = 0.0
    ended_while_asking: set[str] = field(default_factory=set)
    """Ids whose end was reported while a question was under way: the answer may still name them."""

    @property
    def is_alive(self) -> bool:
        """Not known to be dead."""
        return self.liveness is _ALIVE or self.liveness is Liveness.SILENT

    @property
    def is_known_alive(self) -> bool:
        """Was at work until now: reported, and not dead yet."""
        return self.is_alive and self.report is not None

    @property
    def load(self) -> Load:
        """By the last report, which must have been heard."""
        if self._load is None:
            assert self.report is not None
            self._load = Load.of(self.report)
        return self._load

    @property
    def left_merged(self) -> float:
        """Merged blocks beside the virtual usage by the last report, the headroom of high priority among them."""
        if self._left_merged is None:
            self._left_merged = self.freeness(for_high=True).left_merged
        return self._left_merged

    def freeness(self, for_high: bool) -> ReportedFreeness:
        """Freeness for dispatch; `for_high`: as a request of high priority sees it, beside which no headroom is kept."""
        report = self.report
        assert report is not None
        value = report.dispatch_freeness_high if for_high else report.dispatch_freeness
        # Where nothing online runs or waits, all that is held is offline work's, which yields.
        free_merged = float(self.info.num_merged) if value == math.inf else report.free_merged
        return ReportedFreeness(value, self.load.num_running, free_merged)

    def is_renewed_by(self, info: InstanceInfo) -> bool:
        """Whether an entry in the registry says the same as the one before, but for loads, as most do: they are written
        again each second."""
        return self.info is info or (self.is_alive and _terms_of(self.info) == _terms_of(info))

    def enter(self, info: InstanceInfo) -> None:
        """Its entry in the registry."""
        self.info = info
        self.is_ready = info.state == "ready"
        self._left_merged = self._view = None
        self.is_reachable = info.kv_address != ""
        self.ready = {m.name: ServedModel.of(m, info) for m in info.models if m.state == "ready"}
        self.coming = {m.name: ServedModel.of(m, info) for m in info.models if m.state == "loading"}
        self.names = frozenset(self.ready)
        self.leaving = frozenset(m.name for m in info.models if self.is_draining or m.state == "unloading")

    @property
    def is_draining(self) -> bool:
        return self.info.state == "draining"

    def leave(self) -> None:
        """It serves nothing any more."""
        self.ready, self.coming = {}, {}
        self._view = None
        self.names = self.leaving = frozenset()

    def rebalancing_view(self) -> InstanceView | None:
        """None before its first report, and when it is dead."""
        report = self.report
        if report is None or not self.is_alive:
            return None
        can_take = self.can_take
        if self._view is not None and self._view.can_take == can_take:
            return self._view
        load = self.load
        num_running, has_waiting = load.num_running, load.num_requests > load.num_running
        can_give = load.num_held > 0 and (self.is_reachable or bool(self.leaving))
        self._view = InstanceView(
            instance_id=self.info.instance_id,
            freeness=report.migration_freeness,
            num_running=num_running,
            num_counted=num_running + has_waiting,
            total_tokens=self._pool_tokens(report),
            models=self.names,
            leaving=self.leaving,
            can_give=can_give,
            can_take=can_take,
            next_moves=_next_moves(report),
            num_high=report.num_high,
            residents=load.residents,
            running_freeness=report.running_freeness,
            prompts_s=report.prompts_s,
            late_move=_late_move(report),
            late_starts_s=report.late_starts_s,
            prompt_costs={load.model: load.prompt_cost for load in report.models},
        )
        return self._view

    def _pool_tokens(self, report: LoadReport) -> float:
        """Tokens that the KV pool holds, by the models of the running requests; by all served ones while none runs."""
        tokens = num_running = 0
        for load in report.models:
            if load.num_running and (served := self.ready.get(load.model)) is not None:
                tokens += load.num_running * served.block_size * served.blocks_per_merged
                num_running += load.num_running
        if not num_running:
            tokens, num_running = sum(served.tokens_per_merged for served in self.ready.values()), len(self.ready)
        return self.info.num_merged * tokens / num_running if num_running else 0.0

    @property
    def is_candidate(self) -> bool:
        """Whether requests may be sent here at all. The first report must have been heard: load is not guessed."""
        is_heard = self.liveness is _ALIVE and self.report is not None
        return is_heard and not self.is_backing_off and self.is_ready

    @property
    def can_take(self) -> bool:
        """Requests that move."""
        return self.is_reachable and self.is_candidate


def _next_moves(report: LoadReport) -> tuple[NextMove, ...]:
    """Requests that the report names, or the one that an instance of an older version tells of."""
    if report.next_moves or not report.next_migration_tokens:
        return report.next_moves
    return (NextMove(report.next_migration_model, report.next_migration_tokens),)


def _late_move(report: LoadReport) -> NextMove | None:
    if report.late_move is not None or not report.late_starts_s:
        return report.late_move
    return NextMove(report.late_model, report.late_tokens)


def _terms_of(info: InstanceInfo) -> tuple[object, ...]:
    """All that an entry says of what the instance takes, and nothing of its load."""
    served = [(m.name, m.state, m.max_model_len, m.block_size, m.blocks_per_merged) for m in info.models]
    role = info.role if info.is_role_fixed else None
    return info.incarnation, info.state, info.kv_address, info.num_merged, info.lacks, role, served


class ClusterView:
    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._instances: dict[str, InstanceState] = {}
        self._silence: Timers[str] = Timers()
        self._served: dict[str, Counter[ServedModel]] = {}
        """How many instances serve each model, by the way in which they serve it."""
        self._taking: dict[str, Counter[ServedModel]] = {}
        """Served models of the instances that take requests, by name."""
        self._coming: dict[str, Counter[ServedModel]] = {}
        """Served models of the instances that are loading them, by name. What they do not say yet is 0."""

    def __iter__(self) -> Iterator[tuple[str, InstanceState]]:
        return iter(self._instances.items())

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, instance_id: str) -> InstanceState | None:
        return self._instances.get(instance_id)

    def models(self) -> list[str]:
        """Those that some instance serves."""
        return list(self._served)

    def num_serving(self, model: str) -> int:
        """Instances that serve the model."""
        return self._served[model].total() if model in self._served else 0

    def ways(self, model: str) -> tuple[frozenset[ServedModel], frozenset[ServedModel]]:
        """In which the model is served where it stays, and in which it will be by those that are loading it."""
        return frozenset(self._taking.get(model, ())), frozenset(self._coming.get(model, ()))

    def next_silence(self) -> float | None:
        return self._silence.next()

    # ---------------------------------------------------------------------------------------------- registry

    def register(self, info: InstanceInfo, now: float) -> bool:
        """The instance's entry in the registry was written. False if it is news of a dead incarnation."""
        state = self._instances.get(info.instance_id)
        if state is None or state.info.incarnation != info.incarnation:
            state = self._instances[info.instance_id] = InstanceState(info=info, heard_s=now)
            self._silence.set(info.instance_id, now + self._lost_after_s)
        elif state.liveness == Liveness.EXITED:
            return False
        self._count_served(state, -1)
        state.enter(info)
        self._count_served(state, +1)
        return True

    def remove(self, instance_id: str) -> None:
        if (state := self._instances.pop(instance_id, None)) is not None:
            self._count_served(state, -1)
            state.leave()
            self._silence.discard(instance_id)

    def mark_exited(self, instance_id: str) -> None:
        state = self._instances[instance_id]
        self._count_served(state, -1)
        state.leave()
        state.liveness = Liveness.EXITED
        self._silence.discard(instance_id)

    def _count_served(self, state: InstanceState, change: int) -> None:
        taking = {model: served for model, served in state.ready.items() if model not in state.leaving}
        counted = (state.ready, self._served), (taking, self._taking), (state.coming, self._coming)
        for models, counters in counted:
            for model, served in models.items():
                counter = counters.setdefault(model, Counter())
                counter[served] += change
                if counter[served] <= 0:
                    del counter[served]
                if not counter:
                    del counters[model]

    def refusal(self, request: GenerationRequest) -> ErrorInfo | None:
        """Why no instance that serves the request's model could ever run it, or None if one could or nobody serves it."""
        served = self._taking.get(request.model)
        lacking = [capabilities.refusal(request, way.lacks) for way in served or ()]
        if served and all(lacking):
            return lacking[0]
        num_prompt = len(request.prompt) // 4
        num_tokens = num_prompt + request.sampling.max_tokens
        able = [way for way, lack in zip(served or (), lacking, strict=True) if lack is None]
        if not able or any(way.fits(num_tokens) for way in able):
            return None
        asked = f"{num_prompt} prompt tokens and up to {request.sampling.max_tokens} output tokens"
        longest = max(way.max_model_len for way in able)
        if longest and num_tokens > longest:
            limit = f"{request.model!r} takes at most {longest} tokens together"
        else:
            pool_tokens = max(way.num_merged * way.tokens_per_merged for way in able)
            limit = f"the largest KV pool that serves {request.model!r} holds {pool_tokens} tokens"
        param = "prompt" if num_prompt >= (longest or num_tokens) else "max_tokens"
        return ErrorInfo(ErrorCode.TOO_LONG, f"{asked} were asked for; {limit}", param)

    def may_fit_soon(self, request: GenerationRequest) -> bool:
        """Whether an instance that could run the request is loading its model, as far as is known."""
        num_tokens = len(request.prompt) // 4 + request.sampling.max_tokens
        coming = self._coming.get(request.model, ())
        return any(way.fits(num_tokens) and not capabilities.refusal(request, way.lacks) for way in coming)

    def cut(self, request: GenerationRequest) -> GenerationRequest | None:
        """A request that has a `refusal` with as many `max_tokens` as fit; None: not one token more than it has fits."""
        able = [way for way in self._taking[request.model] if capabilities.refusal(request, way.lacks) is None]
        longest = max((way.max_tokens for way in able), default=0)
        max_tokens = int(longest) - len(request.prompt) // 4
        if max_tokens <= len(request.prior) // 4:
            return None
        sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
        return msgspec.structs.replace(request, sampling=sampling)

    # ------------------------------------------------------------------------------------- reports and silence

    def hear(self, report: LoadReport, now: float) -> tuple[InstanceState, LoadReport | None] | None:
        """Takes in a report. None for one of an unknown or dead incarnation, or an old one. Else the instance, and the
        report before this one, if there was any."""
        state = self._instances.get(report.instance_id)
        if state is None or state.info.incarnation != report.incarnation:
            return None
        last = state.report
        if last is not None and report.sequence <= last.sequence:
            return None
        if state.liveness is not _ALIVE:
            if state.liveness == Liveness.EXITED:
                return None
            if state.liveness == Liveness.LOST:
                state.has_answered = False
            state.liveness = _ALIVE
            self._silence.set(report.instance_id, now + self._lost_after_s)
        state.heard_s = now
        state.report = report
        state._load = state._left_merged = state._view = None
        return state, last

    def fall_silent(self, now: float) -> list[str]:
        """Instances that have just become silent. They take no requests until they are heard of again; whether they are
        dead is for the caller to find out (`mark_lost`, `grant_grace`)."""
        silent = []
        for instance_id in self._silence.due(now):
            state = self._instances[instance_id]
            if now < state.heard_s + self._lost_after_s:
                self._silence.set(instance_id, state.heard_s + self._lost_after_s)
            else:
                state.liveness = Liveness.SILENT
                silent.append(instance_id)
        return silent

    def still_silent(self, instance_ids: list[str]) -> list[str]:
        """Instances that fell silent and have not been heard of since."""
        states = ((instance_id, self._instances.get(instance_id)) for instance_id in instance_ids)
        return [instance_id for instance_id, state in states if state and state.liveness == Liveness.SILENT]

    def mark_lost(self, instance_id: str) -> None:
        """Dead for its silence. A report would bring it back."""
        self._instances[instance_id].liveness = Liveness.LOST

    def grant_grace(self, now: float) -> None:
        """The silence may be the bus's: everyone who was not dead yet counts as heard of now."""
        for instance_id, state in self._instances.items():
            if state.is_alive:
                state.liveness = Liveness.ALIVE
                state.heard_s = now
                self._silence.set(instance_id, now + self._lost_after_s)
