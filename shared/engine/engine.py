"""One instance as pure state: requests in, plans and effects out. See docs/structure.md for the life of a request.

The driver (the instance service, the simulator, a test) calls

    submit / cancel                what clients want
    plan(now) -> StepPlan | None   the next step, to be executed strictly in order; at most `steps_in_flight` at once
    on_step(result, now)           what a step made (or that it failed)
    effects() -> list              what happened since the last call: `Output`, `Ended`
    next_wakeup() / on_time(now)   deadlines
    load(now)                      for load reports

Computed-token counts advance when a step is planned, so that the next step can be planned while it runs. A failed step is
rolled back: its sequences are preempted, because the executor's copy of them cannot be trusted any more, and results that
steps in flight still bring for them are dropped by generation number. Results for unknown steps or ended requests change
nothing.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from struct import Struct

import msgspec

from shared.engine.kv_blocks import BlockPool
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.engine.planner import ModelQueue, PlannedStep, Planner
from shared.engine.sequence import Rank, Sequence, State
from shared.messages import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    ModelLoad,
    RequestTiming,
    TokenEntry,
    TokenLogprob,
    unpack_tokens,
)
from shared.policies.ordering import OrderingPolicy
from shared.policies.token_budget import TokenBudgetPolicy
from shared.policies.virtual_usage import dispatch_virtual_usage, freeness, merged_demand

MAX_STEP_FAILURES = 3
"""A request whose steps failed so many times ends with an error instead of being tried again."""

_pack_token = Struct("<i").pack


class Output(msgspec.Struct, frozen=True):
    """Effect: entries for one gateway."""

    gateway_id: str
    entries: list[TokenEntry]


class Ended(msgspec.Struct, frozen=True):
    """Effect: a request is over. Times are on the clock of the `now` arguments; None for what never happened."""

    request: GenerationRequest
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    """Including those that came with the request as `prior`."""
    num_cached_tokens: int
    num_preemptions: int
    submitted_s: float
    first_planned_s: float | None
    first_token_s: float | None
    ended_s: float


class InstanceLoad(msgspec.Struct, frozen=True):
    """Numbers of one moment, in merged blocks where blocks are meant."""

    dispatch_freeness: float
    free_merged: float
    num_running: int
    models: list[ModelLoad]


class Engine:
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
    ) -> None:
        self.pool = BlockPool(num_merged)
        self.planner = Planner(self.pool, num_rows, ordering, token_budget)
        self.steps_in_flight = steps_in_flight
        self._max_waiting = max_waiting
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: dict[int, PlannedStep] = {}
        self._outputs: dict[str, list[TokenEntry]] = {}
        self._ended: list[Ended] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_submitted = 0
        self._num_steps = 0

    # ------------------------------------------------------------------------------------------------ models

    def add_model(self, shape: ModelShape) -> ModelShape:
        """Makes a model known. Returns its shape with `max_model_len` bounded by what the pool can hold, so that every
        request within it can run to its end."""
        self.pool.add_model(shape.name, shape.page_tokens, shape.slots_per_merged)
        limit = min(shape.max_model_len, self.pool.capacity_slots(shape.name) * shape.page_tokens)
        bounded = msgspec.structs.replace(shape, max_model_len=limit)
        self.planner.queues[shape.name] = ModelQueue(bounded)
        return bounded

    def remove_model(self, name: str, now: float) -> bool:
        """Ends what is left of the model's requests with GONE and forgets the model; False (call again later) while a
        step in flight still uses its slots."""
        queue = self.planner.queues[name]
        for sequence in [*queue.all_running(), *queue.all_waiting()]:
            error = ErrorInfo(ErrorCode.GONE, f"model {name!r} was unloaded from this instance")
            self._end(sequence, FinishReason.ERROR, now, error)
        if any(step.plan.model == name for step in self._in_flight.values()):
            return False
        self.pool.remove_model(name)
        del self.planner.queues[name]
        return True

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        """Takes a request, or says why not. The same id and epoch again changes nothing; a higher epoch replaces what is
        held under that id (its output so far is in the new request's `prior`)."""
        held = self._sequences.get(request.request_id)
        if held is not None and request.epoch <= held.request.epoch:
            return None
        queue = self.planner.queues.get(request.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {request.model!r} is not loaded on this instance", "model")
        if refused := self._refusal(request, queue):
            return refused
        if held is not None:
            self._drop(held)
        self._num_submitted += 1
        sequence = Sequence(request, self._num_submitted, now, queue.shape.max_model_len)
        self._sequences[request.request_id] = sequence
        self.planner.enqueue(sequence, now)
        heappush(self._deadlines, (sequence.deadline_s, sequence.number, sequence))
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            # Ended sequences leave the heap only at its head; this bounds how many it keeps alive.
            self._deadlines = [entry for entry in self._deadlines if entry[2].state != State.ENDED]
            heapify(self._deadlines)
        if sequence.num_output and (reason := self._finish_reason(sequence, sequence.tokens[-1])):
            self._end(sequence, reason, now)
        return None

    def _refusal(self, request: GenerationRequest, queue: ModelQueue) -> ErrorInfo | None:
        num_prompt, limit = len(request.prompt) // 4, queue.shape.max_model_len
        if num_prompt == 0:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "the prompt has no tokens", "prompt")
        if vocab_size := queue.shape.vocab_size:
            tokens = unpack_tokens(request.prompt + request.prior)
            if not 0 <= min(tokens) <= max(tokens) < vocab_size:
                message = f"a token id is outside of 0 to {vocab_size - 1}, the vocabulary of {queue.name!r}"
                return ErrorInfo(ErrorCode.BAD_REQUEST, message, "prompt")
        if request.sampling.max_tokens < 1:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "max_tokens must be at least 1", "max_tokens")
        if num_prompt >= limit:
            message = f"the prompt has {num_prompt} tokens; {queue.name!r} takes at most {limit - 1} and needs one more"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "prompt")
        if sum(queue.num_waiting for queue in self.planner.queues.values()) >= self._max_waiting:
            message = f"{self._max_waiting} requests already wait on this instance"
            return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        return None

    def cancel(self, request_id: str, now: float) -> None:
        if (sequence := self._sequences.get(request_id)) is not None:
            self._end(sequence, FinishReason.CANCELLED, now)

    def held(self, request_id: str) -> Sequence | None:
        """A request that has not ended; read only."""
        return self._sequences.get(request_id)

    def all_held(self) -> list[Sequence]:
        return list(self._sequences.values())

    # ------------------------------------------------------------------------------------------------- steps

    def plan(self, now: float) -> StepPlan | None:
        """The next step to execute, or None where none can be planned now."""
        if len(self._in_flight) >= self.steps_in_flight:
            return None
        planned = self.planner.plan(self._num_steps, now)
        if planned is None:
            return None
        self._in_flight[self._num_steps] = planned
        self._num_steps += 1
        return planned.plan

    def on_step(self, result: StepResult, now: float) -> None:
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            return
        for sequence in step.sequences:
            sequence.in_flight -= 1
        if result.error:
            self._roll_back(step, result.error, now)
        else:
            self._apply(step, result, now)
        for sequence in step.sequences:
            if sequence.in_flight:
                continue
            if sequence.state == State.ENDED:
                self.planner.free(sequence)
            elif sequence.is_spoilt:
                self.planner.preempt(sequence, now)

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
            if sequence.first_token_s is None:
                sequence.first_token_s = now
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

    @staticmethod
    def _finish_reason(sequence: Sequence, last_token: int) -> FinishReason | None:
        if last_token in sequence.stop_ids and len(sequence.tokens) > sequence.min_total:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_total else None

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

    # --------------------------------------------------------------------------------------------------- ends

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        error: ErrorInfo | None = None,
        *,
        tokens: bytes = b"",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """`tokens`: the last token, already in `sequence.tokens`, that goes out with the end."""
        request = sequence.request
        planned, first = sequence.first_planned_s, sequence.first_token_s
        timing = RequestTiming(
            queued_s=(planned if planned is not None else now) - sequence.submitted_s,
            prefill_s=(first if first is not None else now) - planned if planned is not None else 0.0,
            decode_s=now - first if first is not None else 0.0,
            num_preemptions=sequence.num_preemptions,
        )
        entry = TokenEntry(
            request.request_id,
            request.epoch,
            sequence.num_output - len(tokens) // 4,
            tokens,
            reason,
            logprobs,
            sequence.num_cached_tokens,
            error,
            timing,
        )
        self._outputs.setdefault(request.gateway_id, []).append(entry)
        self._ended.append(
            Ended(
                request,
                reason,
                sequence.num_prompt,
                sequence.num_output,
                sequence.num_cached_tokens,
                sequence.num_preemptions,
                sequence.submitted_s,
                planned,
                first,
                now,
            )
        )
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.planner.remove(sequence)

    def effects(self) -> list[Output | Ended]:
        """What happened since the last call, outputs first."""
        effects: list[Output | Ended] = [Output(gateway, entries) for gateway, entries in self._outputs.items()]
        effects.extend(self._ended)
        self._outputs, self._ended = {}, []
        return effects

    # --------------------------------------------------------------------------------------------------- time

    def next_wakeup(self) -> float | None:
        """When `on_time` must be called next, if nothing else happens before."""
        while self._deadlines and self._deadlines[0][2].state == State.ENDED:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def on_time(self, now: float) -> None:
        """Ends requests past their deadline."""
        while (wakeup := self.next_wakeup()) is not None and wakeup <= now:
            sequence = heappop(self._deadlines)[2]
            error = ErrorInfo(ErrorCode.DEADLINE, f"the request's time of {sequence.request.timeout_s:.3g} s is over")
            self._end(sequence, FinishReason.DEADLINE, now, error)

    # --------------------------------------------------------------------------------------------------- load

    def load(self) -> InstanceLoad:
        """Counts and freeness of this moment (Llumnix section 4.4.3; every waiting request counts whole, offline work
        not at all)."""
        running, waiting, num_running, models = 0.0, 0.0, 0, []
        for queue in self.planner.queues.values():
            page, per_merged = queue.shape.page_tokens, queue.shape.slots_per_merged
            for rank in (Rank.ONLINE_HIGH, Rank.ONLINE_NORMAL):
                running += sum(len(sequence.blocks) for sequence in queue.running[rank].values()) / per_merged
                waiting += sum(merged_demand(sequence.total, page, per_merged) for sequence in queue.waiting[rank])
            num_running += queue.num_running
            num_offline = len(queue.running[Rank.OFFLINE]) + len(queue.waiting[Rank.OFFLINE])
            models.append(ModelLoad(queue.name, queue.num_running, queue.num_waiting, num_offline))
        free = freeness(self.pool.num_merged, dispatch_virtual_usage(running, waiting), num_running)
        return InstanceLoad(free, self.pool.num_merged - self.pool.used_merged(), num_running, models)

    def check(self) -> None:
        """Asserts every invariant; for tests and idle time, not the hot path."""
        self.pool.check()
        rows: set[int] = set()
        slots_held: dict[tuple[str, int], int] = {}
        held = list(self._sequences.values())
        flying = {id(s): s for step in self._in_flight.values() for s in step.sequences if s.state == State.ENDED}
        for sequence in [*held, *flying.values()]:
            for slot in sequence.blocks:
                slots_held[sequence.model, slot] = slots_held.get((sequence.model, slot), 0) + 1
            if sequence.row >= 0:
                assert sequence.row not in rows
                rows.add(sequence.row)
        for name, queue in self.planner.queues.items():
            references = self.pool._models[name].references
            assert all(references[slot] == slots_held.get((name, slot), 0) for slot in range(len(references))), (
                f"references of {name}"
            )
            for sequence in queue.all_running():
                assert sequence.state == State.RUNNING and sequence.row >= 0
                assert sequence.capacity == len(sequence.blocks) * queue.shape.page_tokens
                if not sequence.is_spoilt:
                    assert sequence.num_computed <= sequence.capacity
                    assert sequence.num_computed < sequence.total <= sequence.max_total
                assert self._sequences[sequence.request.request_id] is sequence
            for sequence in queue.all_waiting():
                assert sequence.state == State.WAITING and sequence.row < 0 and not sequence.blocks
        for sequence in held:
            flights = sum(s is sequence for step in self._in_flight.values() for s in step.sequences)
            assert sequence.in_flight == flights
        assert len(self._in_flight) <= self.steps_in_flight
