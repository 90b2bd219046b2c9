"""One instance as pure state: requests in, plans and effects out. See docs/structure.md for the life of a request.

The driver (the instance service, the simulator, a test) calls

    apply(call, now)               whatever changes it (calls.py): requests, step results, ended copies, migrations, models
    plan(now) -> StepPlan | None   the next step, to be executed strictly in order; at most `steps.max_in_flight` at once
    take_interrupt(now)            after an arrival: the step in flight that is to suspend itself, if any
    next_copies()                  KV copies to start beside the steps
    effects() -> list              what happened since the last call: `Output`, `Ended`, `Detached`
    next_wakeup()                  when to apply `OnTime`
    load(now)                      for load reports

The parts own their state, and meet here:

    memory        rows and KV blocks: who has them, who gives them up (memory/allocator.py)
    requests      who is held, and how they end (requests.py)
    planner       fills the next step (planner.py)
    steps         in flight, suspended, rolled back (steps.py)
    charging      execution times, to sequences and cost models (charging.py)
    outgoing, reservations, incoming          the two ends of a migration
"""

from __future__ import annotations

from collections.abc import Container
from math import inf
from typing import Any, TypeVar

import msgspec

from shared.costs.model import KnownCosts
from shared.engine.calls import Call, TakeInterrupt
from shared.engine.charging import Charging
from shared.engine.checks import check_engine
from shared.engine.config import EngineConfig
from shared.engine.copying import Copying
from shared.engine.drafting import Drafting
from shared.engine.handover import Detached, MigrationCandidate, PromptChunk
from shared.engine.incoming import Incoming
from shared.engine.load import InstanceLoad, instance_load
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.outgoing import Outgoing
from shared.engine.plan import KvCopy, ModelShape, StepPlan, StepResult
from shared.engine.planner import Planner
from shared.engine.pool_view import pool_view
from shared.engine.requests import Ended, Output, RequestTable
from shared.engine.reservations import Reservations
from shared.engine.sequence import Handover, Sequence, State
from shared.engine.steps import Steps
from shared.messages.console import PoolView
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, HeldRequest
from shared.policies.checkpointing import AdaptiveCheckpoint, CheckpointPolicy
from shared.policies.ordering import OrderingPolicy
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.speculation import GateState
from shared.policies.token_budget import TokenBudgetPolicy
from shared.recording import Recorder

R = TypeVar("R")

Effect = Output | Ended | Detached | PromptChunk


class Engine:
    """See the module's docstring. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        num_merged: int,
        num_rows: int,
        ordering: OrderingPolicy,
        token_budget: TokenBudgetPolicy,
        config: EngineConfig | None = None,
        *,
        serves_offline: bool = True,
        checkpoint: CheckpointPolicy | None = None,
        record: Recorder | None = None,
        **options: Any,
    ) -> None:
        """`options`: fields of `config`, in the place of those that it has. `record` is given each call before it is carried
        out, each plan after it was made. Raises `TypeError` for an option that there is not."""
        config = msgspec.structs.replace(config or EngineConfig(), **options)
        num_stages = config.num_stages
        is_alone = num_stages == 1
        self.memory = Allocator(
            num_merged, num_rows, config.num_host_merged, ordering, config.least_share, offload=config.offload,
            offload_start=config.offload_start,
        )  # fmt: skip
        self.drafting = Drafting(
            config.lookup if is_alone else LookupSettings(), config.max_drafts if is_alone else 0, self.memory
        )  # fmt: skip
        self.planner = Planner(
            self.memory,
            token_budget,
            self.drafting,
            serves_offline=serves_offline,
            may_interrupt=config.interruption != "off" and num_stages == 1,
            mix_phases=config.mix_phases,
            prefetch=config.prefetch,
            steps_in_flight=config.steps_in_flight,
            num_stages=num_stages,
        )
        if self.memory.host.backups is not None:
            self.memory.host.backups.max_share = config.backup_share
        self.requests = RequestTable(self.memory, config.max_waiting, config.give_up_s)
        self.charging = Charging(self.memory)
        self.steps = Steps(
            self.memory, self.planner, self.requests, self.charging, self.drafting, config.steps_in_flight
        )
        self.requests.charge_leaving = self.steps.charge_leaving
        self.outgoing = Outgoing(self.requests, self.memory, config.migration_cooldown_s)
        self.reservations = Reservations(self.memory)
        self.incoming = Incoming(self.requests, self.memory, self.reservations, self.steps.online_wait_s)
        self.pool = self.memory.pool
        self.counters = self.memory.counters
        self.serves_offline = serves_offline
        self._copying = Copying(self.memory, checkpoint or AdaptiveCheckpoint())
        self._keeps_suspended = config.interruption == "suspend"
        self._objectives = (config.ttft_s, config.tpot_s)
        self._fits_costs = config.fits_costs
        self._high_priority_load = config.high_priority_load
        self._record = record

    def apply(self, call: Call[R], now: float) -> R:
        """Carries a call out, and returns what it says."""
        if self._record is not None:
            self._record(call, now)
        return call.on(self, now)

    # ------------------------------------------------------------------------------------------------ models

    def add_model(self, shape: ModelShape) -> ModelShape:
        """See `AddModel`."""
        memory = self.memory
        memory.add_model(shape)
        limit = min(shape.max_model_len, memory.pool.capacity_blocks(shape.name) * shape.block_size)
        bounded = msgspec.structs.replace(shape, max_model_len=limit)
        queue = memory.queues[shape.name] = ModelQueue(bounded)
        queue.ttft_objective_s, queue.tpot_objective_s = self._objectives
        if self._fits_costs:
            self.charging.add_model(queue)
        self.drafting.add_model(queue)
        return bounded

    def remove_model(self, name: str, now: float) -> bool:
        """See `RemoveModel`."""
        for sequence in [held for held in self.memory.queues[name].all_held() if held.handover != Handover.FROZEN]:
            error = ErrorInfo(ErrorCode.GONE, f"model {name!r} was unloaded from this instance")
            self.requests.end(sequence, FinishReason.ERROR, now, error)
        self.steps.discard_if_empty(now)
        in_use = any(step.plan.model == name for step in self.steps.in_flight.values())
        if in_use or self.memory.has_copies(name) or self.reservations.has_model(name) or self.outgoing.has_model(name):
            return False
        self.memory.remove_model(name)
        self.charging.remove_model(name)
        self.drafting.remove_model(name)
        return True

    def set_objectives(self, name: str, ttft_s: float, tpot_s: float) -> None:
        """See `SetObjectives`."""
        queue = self.memory.queues[name]
        queue.ttft_objective_s = ttft_s or self._objectives[0]
        queue.tpot_objective_s = tpot_s or self._objectives[1]

    def cost_models(self) -> dict[str, KnownCosts]:
        """The cost model of each model that has one."""
        return self.charging.cost_models()

    def speculation(self) -> dict[str, dict[int, tuple[GateState, float]]]:
        """State of each model with a draft model, by the most sequences of a batch: whether it drafts, and the tokens per
        second that were measured with drafts over without."""
        return {
            name: {most: (gate.state, gate.gain) for most, gate in speculator.gates.items()}
            for name, speculator in self.drafting.speculators.items()
        }

    # ------------------------------------------------------------------------------------------------- steps

    def plan(self, now: float) -> StepPlan | None:
        """The next step to execute, or None where none can be planned now."""
        self._copying.on_time(now)
        self.memory.compaction.begin_step()
        self.memory.serve_demand(now)
        planned = self.steps.plan(now)
        running = planned or self.steps.running
        self._copying.start(None if running is None else running.predicted_s, now)
        plan = None if planned is None else planned.plan
        if self._record is not None:
            self._record(plan, now)
        return plan

    def take_interrupt(self, now: float) -> int | None:
        """The step in flight that is to stop at its next safepoint, for the sake of an online request that would miss its
        objective; named once."""
        step_id = self.steps.take_interrupt(now)
        if step_id is not None and self._record is not None:
            self._record(TakeInterrupt(), now)
        return step_id

    def on_step(self, result: StepResult, now: float) -> None:
        """See `OnStep`."""
        if self.steps.on_result(result, now, gives_up=not self._keeps_suspended):
            self.outgoing.finish_leaving(now)

    def next_copies(self) -> list[KvCopy]:
        """The copies to start, in this order: moves within the device come first and take place at once (see `KvCopy`), and
        those of one sequence must end in it."""
        return self.memory.started_copies()

    def on_copy(self, copy_id: int, ok: bool, now: float, seconds: float = 0.0) -> None:
        """See `OnCopy`."""
        if ok:
            self.memory.learn_copy(copy_id, seconds)
        if self.memory.on_copy(copy_id, ok, now):
            self.outgoing.finish_leaving(now)

    # -------------------------------------------------------------------------------------- time and effects

    def next_wakeup(self) -> float | None:
        """Time at which `OnTime` must be applied next, if nothing else happens before."""
        deadline_s, demand = self.requests.next_deadline(), self.memory.demand
        return deadline_s if demand is None else min(inf if deadline_s is None else deadline_s, demand.until_s)

    def on_time(self, now: float) -> None:
        """See `OnTime`."""
        self.requests.end_overdue(now)
        self.requests.give_up_unserved(now)
        self.memory.serve_demand(now)

    def effects(self) -> list[Effect]:
        """What happened since the last call, outputs first."""
        return [*self.requests.take_effects(), *self.outgoing.take_effects()]

    # --------------------------------------------------------------------------------------------- questions

    def held(self, request_id: str) -> Sequence | None:
        """A request that has not ended; read only."""
        return self.requests.held(request_id)

    def all_held(self) -> list[Sequence]:
        return self.requests.all_held()

    def held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        sequence = self.requests.held(request_id)
        return None if sequence is None else sequence.request.epoch

    def unproven(self) -> list[str]:
        """Requests in steps in flight of which no token has come here yet, or since they were preempted: what they do to
        whoever computes them is not known."""
        in_flight = self.steps.in_flight.values()
        return [one.request.request_id for step in in_flight for one in step.sequences if one.is_silent]

    def num_held(self, model: str | None = None) -> int:
        return sum(1 for sequence in self.requests.by_id.values() if model is None or sequence.model == model)

    def adapters_held(self) -> set[str]:
        """Versions of those that requests here are computed with."""
        held = (sequence.request.adapter for sequence in self.requests.by_id.values())
        return {adapter.version for adapter in held if adapter is not None}

    def held_requests(self) -> list[HeldRequest]:
        """One that is leaving counts until it has left."""
        return [
            HeldRequest(
                request_id=sequence.request.request_id,
                gateway_id=sequence.request.gateway_id,
                epoch=sequence.request.epoch,
                model=sequence.model,
                num_tokens=sequence.num_tokens,
                running=sequence.state == State.RUNNING or (sequence.state == State.LEAVING and bool(sequence.blocks)),
                is_online=sequence.is_online,
                tenant=sequence.tenant,
                tenant_weight=sequence.request.tenant_weight,
            )
            for sequence in self.requests.by_id.values()
        ]

    def pool_view(self) -> PoolView:
        """What the console shows of the KV pool."""
        return pool_view(self.memory, self.requests.all_held())

    def migration_candidates(self, now: float, include_offline: bool = False) -> list[MigrationCandidate]:
        """See `Outgoing.candidates`."""
        return self.outgoing.candidates(now, include_offline)

    def late_candidates(self, now: float) -> list[MigrationCandidate]:
        """See `Outgoing.late_candidates`."""
        return self.outgoing.late_candidates(now, self.steps.online_wait_s(now))

    def busy_s(self, now: float) -> float:
        """See `Steps.busy_s`."""
        return self.steps.busy_s(now)

    def load(self, now: float | None = None, given_away: Container[str] = ()) -> InstanceLoad:
        """Counts and freeness of this moment; without `now` nothing of the steps in flight is left. `given_away`: models of
        which all requests are to leave."""
        return instance_load(
            self.memory,
            self.reservations,
            self.charging.offline_rate.per_s if self.serves_offline else None,
            self._high_priority_load,
            self.planner.leaders.last_limits.max_tokens,
            0.0 if now is None else self.steps.online_wait_s(now),
            lambda model: inf if now is None else self.planner.leaders.offline_spare_s(model, now),
            now,
            *self._objectives,
            given_away,
        )

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time, not the hot path."""
        check_engine(self.memory, self.requests.by_id, self.steps.in_flight, self.outgoing.pinned, self.reservations)
        assert len(self.steps.in_flight) <= self.steps.max_in_flight
