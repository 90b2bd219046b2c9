"""One instance as pure state: requests in, plans and effects out. See docs/structure.md for the life of a request.

The driver (the instance service, the simulator, a test) calls

    submit / cancel                what clients want
    plan(now) -> StepPlan | None   the next step, to be executed strictly in order; at most `steps_in_flight` at once
    take_interrupt(now)            after an arrival: the step in flight that is to suspend itself, if any
    on_step(result, now)           what a step made (or that it failed, or was suspended)
    next_copies()                  KV copies to start beside the steps
    on_copy(copy_id, ok, now)      one of them has ended
    effects() -> list              what happened since the last call: `Output`, `Ended`
    next_wakeup() / on_time(now)   deadlines
    load()                         for load reports

Computed-token counts advance when a step is planned, so that the next step can be planned while it runs. A failed step is
rolled back: its sequences are preempted, because the executor's copy of them cannot be trusted any more, and results that
steps in flight still bring for them are dropped by generation number. Results for unknown steps or ended requests change
nothing. A step that may be interrupted is never followed by a second one in flight, so a suspended step is rolled back
exactly if it is given up.
"""

from __future__ import annotations

import math
from struct import Struct

import msgspec

from shared.cost_model import CostModel, CostSource, KnownCosts
from shared.engine.batch import PlannedStep
from shared.engine.charging import Charging
from shared.engine.checks import check_engine
from shared.engine.copying import Copying
from shared.engine.counters import EngineCounters
from shared.engine.load import InstanceLoad, instance_load
from shared.engine.model_queue import ModelQueue
from shared.engine.moves import Moves
from shared.engine.plan import KvCopy, ModelShape, StepPlan, StepResult
from shared.engine.planner import Planner
from shared.engine.sequence import Move, Sequence, State
from shared.messages.cluster import ExecutionStatistics
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    TokenEntry,
    TokenLogprob,
)
from shared.policies.checkpointing import AdaptiveCheckpoint, CheckpointPolicy
from shared.policies.interruption import Next, SuspendedStep, should_interrupt, what_next
from shared.policies.ordering import OrderingPolicy
from shared.policies.token_budget import TokenBudgetPolicy

MAX_STEP_FAILURES = 3
"""A request whose steps failed so many times ends with an error instead of being tried again."""

_pack_token = Struct("<i").pack


class Engine(Moves):
    """See the module's docstring. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        num_merged: int,
        num_rows: int,
        ordering: OrderingPolicy,
        token_budget: TokenBudgetPolicy,
        *,
        steps_in_flight: int = 2,
        max_waiting: int = 1024,
        serves_offline: bool = True,
        interruption: str = "suspend",
        mix_phases: bool = True,
        num_host_merged: int = 0,
        checkpoint: CheckpointPolicy | None = None,
        prefetch: bool = True,
        ttft_s: float = 1.5,
        tpot_s: float = 0.11,
        move_cooldown_s: float = 1.0,
        high_priority_load: float = 0.0,
        fits_costs: bool = True,
        least_share: float = 0.25,
    ) -> None:
        """`interruption` of offline steps by online arrivals: suspend | discard | off. `num_host_merged`: merged blocks of
        host memory for checkpoints. `prefetch`: restore beside other steps of the model, not before them. `ttft_s`,
        `tpot_s`: objectives where model and request name none. `move_cooldown_s`: a request that moved, or was to, stays
        for so long. `high_priority_load`: share of the pool that is used beside requests of high priority; 0: from the
        cost model. `fits_costs`: step times are learnt from the steps where no cost model is set; else nothing but the
        token budget bounds a step there. `least_share`: of the pool, that is divided evenly over the models and kept for
        their online requests."""
        planner = Planner(
            num_merged,
            num_rows,
            num_host_merged,
            ordering,
            token_budget,
            serves_offline=serves_offline,
            may_interrupt=interruption != "off",
            mix_phases=mix_phases,
            prefetch=prefetch,
            plans_ahead=steps_in_flight > 1,
            least_share=least_share,
        )
        super().__init__(planner, max_waiting, move_cooldown_s)
        self.pool = planner.pool
        self.counters: EngineCounters = planner.counters
        self.steps_in_flight = steps_in_flight
        self.serves_offline = serves_offline
        self._copying = Copying(self.planner, checkpoint or AdaptiveCheckpoint())
        self._keeps_suspended = interruption == "suspend"
        self._objectives = (ttft_s, tpot_s)
        self._charging = Charging(planner)
        self._fits_costs = fits_costs
        self._in_flight: dict[int, PlannedStep] = {}
        self._num_steps = 0
        self._last_end_s = 0.0
        """When the last step returned: one planned behind it began then."""
        self._last_plan_s = 0.0
        self._high_priority_load = high_priority_load

    # ------------------------------------------------------------------------------------------------ models

    def add_model(self, shape: ModelShape) -> ModelShape:
        """Makes a model known. Returns its shape with `max_model_len` bounded by what the pool can hold, so that every
        request within it can run to its end."""
        self.pool.add_model(shape.name, shape.page_tokens, shape.slots_per_merged)
        self.planner.host.add_model(shape.name, shape.page_tokens, shape.slots_per_merged)
        limit = min(shape.max_model_len, self.pool.capacity_slots(shape.name) * shape.page_tokens)
        bounded = msgspec.structs.replace(shape, max_model_len=limit)
        queue = self.planner.queues[shape.name] = ModelQueue(bounded)
        queue.ttft_objective_s, queue.tpot_objective_s = self._objectives
        if self._fits_costs:
            self._charging.add_model(queue)
        return bounded

    def remove_model(self, name: str, now: float) -> bool:
        """Ends what is left of the model's requests with GONE and forgets the model; False (call again later) while a
        step, a copy or a migration in flight still uses its slots."""
        queue = self.planner.queues[name]
        for sequence in [held for held in queue.all_held() if held.move != Move.SEALED]:
            error = ErrorInfo(ErrorCode.GONE, f"model {name!r} was unloaded from this instance")
            self._end(sequence, FinishReason.ERROR, now, error)
        self._discard_if_empty(now)
        in_use = any(step.plan.model == name for step in self._in_flight.values())
        has_copies = self.planner.host.has_copies(name) or self.planner.compaction.has_moves(name)
        if in_use or has_copies or self._has_moves(name):
            return False
        if self.planner.demand is not None and self.planner.demand.model == name:
            self.planner.demand = None
        self.pool.remove_model(name)
        self.planner.host.remove_model(name)
        del self.planner.queues[name]
        self._charging.remove_model(name)
        return True

    def set_objectives(self, name: str, ttft_s: float, tpot_s: float) -> None:
        """For the model's requests that come from now on and name none; 0: the instance's default."""
        queue = self.planner.queues[name]
        queue.ttft_objective_s = ttft_s or self._objectives[0]
        queue.tpot_objective_s = tpot_s or self._objectives[1]

    def set_cost_model(self, name: str, cost_model: CostModel, source: CostSource = CostSource.PROFILED) -> None:
        """Step times of the model; corrected from now on by those that are seen."""
        self._charging.set_cost_model(name, cost_model, source)

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        """Execution times of the model's requests over the cluster; a mere default gives way to a prediction of here."""
        self._charging.set_statistics(statistics)

    def cost_models(self) -> dict[str, KnownCosts]:
        """Of each model that has one."""
        return self._charging.cost_models()

    # ------------------------------------------------------------------------------------------------- steps

    def plan(self, now: float) -> StepPlan | None:
        """The next step to execute, or None where none can be planned now."""
        self._copying.on_time(now)
        self.planner.compaction.begin_step()
        self.planner.serve_demand(now)
        in_flight = self._in_flight.values()
        planned = None
        # Parts of a suspended step and online steps take turns, so nothing is planned ahead while there is one.
        depth = self.steps_in_flight if self.planner.suspended is None else 1
        if len(in_flight) < depth and not any(step.plan.is_interruptible for step in in_flight):
            begins_s = max((now, *(self._predicted_end_s(step) for step in in_flight)))
            planned = self._resume(now) or self.planner.plan(self._num_steps, now, begins_s, is_alone=not in_flight)
            if planned is None and not in_flight and self.planner.suspended is not None:
                # Online requests wait for what only others can give them.
                planned = self._go_on(1.0, now)
        if planned is not None:
            if not planned.plan.resumes:
                self._num_steps += 1
            self._in_flight[planned.plan.step_id] = planned
        running = planned or next(iter(in_flight), None)
        self._copying.start(None if running is None else running.predicted_s)
        self._last_plan_s = now
        return None if planned is None else planned.plan

    def _predicted_end_s(self, step: PlannedStep) -> float:
        return max(step.planned_s, self._last_end_s) + step.predicted_s * (1 - step.done_share)

    def busy_s(self, now: float) -> float:
        """Until the steps in flight end, if a sequence that comes from another instance should rather come after them: one
        of them is long and cannot be interrupted. One that runs over its prediction is expected to go on for as long as it
        has been over."""
        if not any(step.is_long and not step.plan.is_interruptible for step in self._in_flight.values()):
            return 0.0
        return abs(max(self._predicted_end_s(step) for step in self._in_flight.values()) - now)

    def _resume(self, now: float) -> PlannedStep | None:
        """The suspended step, if it is to go on now; gives it up if that is cheaper."""
        self._discard_if_empty(now)
        step = self.planner.suspended
        if step is None:
            return None
        has_online = self.planner.has_online_work()
        if step.is_part and has_online:
            # Parts and online steps take turns.
            step.is_part = False
            return None
        left_s = step.predicted_s * (1 - step.done_share) or step.ran_s
        safepoint_s = step.predicted_s * self._safepoint_share(step) or math.inf
        spare_s = self.planner.spare_s(now) if has_online else 0.0
        state = SuspendedStep(step.ran_s, left_s, step.lost_s)
        match what_next(state, has_online=has_online, spare_s=spare_s, safepoint_s=safepoint_s):
            case Next.RESUME:
                return self._go_on(1.0, now)
            case Next.PART:
                return self._go_on(min(1.0, step.done_share + spare_s / step.predicted_s), now)
            case Next.DISCARD:
                self.planner.discard_suspended(now)
            case Next.WAIT:
                step.lost_s += min(spare_s, now - max(step.suspended_s, self._last_plan_s))
        return None

    def _go_on(self, stop_share: float, now: float) -> PlannedStep:
        step = self.planner.resume(now, stop_share)
        step.is_part = stop_share < 1.0
        if not step.is_part:
            self.counters.steps_resumed += 1
        return step

    def _safepoint_share(self, step: PlannedStep) -> float:
        """Of a step's layers, those between two safepoints."""
        cost_model = self.planner.queues[step.plan.model].cost_model
        return 1.0 if cost_model is None else cost_model.layers_per_safepoint / cost_model.num_layers

    def take_interrupt(self, now: float) -> int | None:
        """The step in flight that is to stop at its next safepoint, for the sake of an online request that would miss its
        objective; named once."""
        step = next(iter(self._in_flight.values()), None)
        if step is None or not step.plan.is_interruptible or step.is_interrupted or not self.planner.has_online_work():
            return None
        if step.is_part:
            # It stops by itself, within what the objectives leave.
            return None
        if step.predicted_s:
            online_s, objective_s = self.planner.online_need(now)
            left_s = step.predicted_s * (1 - step.done_share)
            elapsed_s = now - max(step.planned_s, self._last_end_s)
            safepoint_s = step.predicted_s * self._safepoint_share(step)
            if not should_interrupt(elapsed_s, left_s, objective_s, online_s, safepoint_s):
                return None
        step.is_interrupted = True
        return step.plan.step_id

    def on_step(self, result: StepResult, now: float) -> None:
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            return
        step.ran_s += now - max(step.planned_s, self._last_end_s)
        self._last_end_s = now
        if result.suspended_share >= 0 and not result.error:
            self.planner.suspend(step, result.suspended_share, now)
            # The turn is that of whoever interrupted it.
            step.is_part = step.is_part or step.is_interrupted
            leaves = bool(self._awaited) and any(sequence.state == State.LEAVING for sequence in step.sequences)
            self._discard_if_empty(now, always=leaves or not self._keeps_suspended)
            self._finish_leaving(now)
            return
        for sequence in step.sequences:
            sequence.in_flight -= 1
        if result.error:
            self._roll_back(step, result.error, now)
        else:
            self._charging.charge(step, now)
            self._apply(step, result, now)
        self.planner.settle(step, now)
        if self._awaited:
            self._finish_leaving(now)

    def _discard_if_empty(self, now: float, always: bool = False) -> None:
        """Gives the suspended step up if nobody waits for it any more."""
        step = self.planner.suspended
        if step is not None and (always or not self.planner.queues[step.plan.model].suspended):
            self.planner.discard_suspended(now)

    def borrow_slots(self, name: str, num_slots: int) -> list[int]:
        """Slots of a model, for measurements; to be given back soon. Empty where there are not so many."""
        return self.pool.allocate(name, num_slots) or []

    def return_slots(self, name: str, slots: list[int]) -> None:
        self.pool.release(name, slots)

    def clear_prefix_cache(self) -> None:
        """Makes every unreferenced block unfindable."""
        self.pool.clear_cache()

    def next_copies(self) -> list[KvCopy]:
        """The copies to start, in this order: moves within the device come first and take place at once (see `KvCopy`), and
        those of one sequence must end in it."""
        return self.planner.compaction.started_copies() + self.planner.host.started_copies()

    def on_copy(self, copy_id: int, ok: bool, now: float) -> None:
        """A copy has ended; one to or from host memory that failed leaves things as if it had not been begun."""
        if self.planner.compaction.on_copy(copy_id, ok):
            self._finish_leaving(now)
        elif (ended := self.planner.host.on_copy(copy_id, ok)) is not None:
            self.planner.end_restore(*ended, now)

    def _apply(self, step: PlannedStep, result: StepResult, now: float) -> None:
        plan, tokens, logprobs = step.plan, result.tokens, result.logprobs
        queue = self.planner.queues[plan.model]
        outputs, none = self._outputs, ()
        position = -1
        for sequence, generation, start, count, samples in zip(
            step.sequences, step.generations, plan.starts, plan.counts, plan.samples, strict=True
        ):
            if samples:
                position += 1
            if sequence.generation != generation or sequence.state == State.ENDED:
                continue
            if start + count >= sequence.next_register:
                self._register_blocks(sequence, queue, start + count)
            if not samples:
                continue
            token = tokens[position]
            known = sequence.tokens
            offset = len(known) - sequence.num_prompt
            known.append(token)
            if sequence.last_token_s is not None:
                sequence.max_itl_s = max(sequence.max_itl_s, now - sequence.last_token_s)
            sequence.last_token_s = now
            if sequence.first_token_s is None:
                sequence.first_token_s = now
                sequence.first_total = len(known)
            entry_logprobs: tuple[TokenLogprob, ...] = none
            if logprobs is not None and (logprob := logprobs[position]) is not None:
                entry_logprobs = (logprob,)
            if (token in sequence.stop_ids and len(known) > sequence.min_total) or len(known) >= sequence.max_total:
                reason = self._finish_reason(sequence, token)
                assert reason is not None
                self._end(sequence, reason, now, tokens=_pack_token(token), logprobs=entry_logprobs)
                continue
            request = sequence.request
            entry = TokenEntry(
                request.request_id,
                request.epoch,
                offset,
                _pack_token(token),
                None,
                entry_logprobs,
                sequence.num_cached_tokens,
            )
            entries = outputs.get(request.gateway_id)
            if entries is None:
                outputs[request.gateway_id] = [entry]
            else:
                entries.append(entry)

    def _register_blocks(self, sequence: Sequence, queue: ModelQueue, num_computed: int) -> None:
        """Enters the blocks that this step filled in the prefix cache."""
        page = queue.shape.page_tokens
        num_full = num_computed // page
        hashes = sequence.extend_hashes(num_full, page, queue.root)
        for index in range(sequence.next_register // page - 1, num_full):
            self.pool.register(queue.name, sequence.blocks[index], hashes[index])
        sequence.next_register = (num_full + 1) * page

    def _roll_back(self, step: PlannedStep, error: str, now: float) -> None:
        for sequence, generation in zip(step.sequences, step.generations, strict=True):
            if sequence.generation != generation or sequence.state == State.ENDED:
                continue
            # Nothing is left to compute of it, so it is not planned again before it is preempted (on_step).
            sequence.is_spoilt = True
            sequence.total = sequence.num_computed = len(sequence.tokens)
            sequence.generation += 1
            sequence.num_failures += 1
            if sequence.num_failures >= MAX_STEP_FAILURES:
                message = f"{MAX_STEP_FAILURES} steps of this request failed; the last one: {error}"
                self._end(sequence, FinishReason.ERROR, now, ErrorInfo(ErrorCode.INTERNAL, message))

    # --------------------------------------------------------------------------------------------------- load

    def load(self, now: float | None = None) -> InstanceLoad:
        """Counts and freeness of this moment; without `now` nothing of the steps in flight is left."""
        steps = [step for step in self._in_flight.values() if now is not None and not step.plan.is_interruptible]
        steps_s = max((self._predicted_end_s(step) - (now or 0.0) for step in steps), default=0.0)
        offline_tokens_per_s = self._charging.offline_rate.per_s if self.serves_offline else None
        return instance_load(
            self.planner, self._arrivals, offline_tokens_per_s, self._high_priority_load, max(0.0, steps_s)
        )

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time, not the hot path."""
        check_engine(self.planner, self._sequences, self._in_flight, self._pinned, self._arrivals)
        assert len(self._in_flight) <= self.steps_in_flight
