"""The steps of one instance, from when they are planned until what they made is known: in flight, suspended, resumed, given
up, rolled back.

Computed-token counts advance when a step is planned, so that the next step can be planned while it runs. A failed step is
rolled back: its sequences are preempted, because the executor's copy of them cannot be trusted any more, and results that
steps in flight still bring for them are dropped by generation number. Results for unknown steps or ended requests change
nothing. A step that may be interrupted is never followed by a second one in flight, so a suspended step is rolled back
exactly if it is given up. Neither is one with drafts (drafting.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from struct import Struct

import msgspec

from shared.engine.batch import PlannedStep
from shared.engine.charging import Charging
from shared.engine.drafting import Drafting
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.plan import NO_TOKEN, StepResult
from shared.engine.planner import Planner
from shared.engine.requests import RequestTable
from shared.engine.sequence import Sequence, State
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, TokenEntry, TokenLogprob, pack_tokens
from shared.messages.timeline import EventKind
from shared.policies.interruption import Next, SuspendedStep, should_interrupt, waits, what_next

MAX_STEP_FAILURES = 3
"""A request whose steps failed so many times ends with an error instead of being tried again."""

_pack_token = Struct("<i").pack
_ENDED = State.ENDED
"""Named here for the loops over all sequences of a step: members of an enumeration are slow to look up."""


class Steps:
    """Steps in flight, `max_in_flight` at most, executed in the order in which they are planned."""

    def __init__(
        self,
        memory: Allocator,
        planner: Planner,
        requests: RequestTable,
        charging: Charging,
        drafting: Drafting,
        max_in_flight: int,
    ) -> None:
        self.max_in_flight = max_in_flight
        self._memory = memory
        self._planner = planner
        self._requests = requests
        self._charging = charging
        self._drafting = drafting
        self._in_flight: dict[int, PlannedStep] = {}
        self._num_planned = 0
        self._last_end_s = 0.0
        """Time at which the last step returned: one planned behind it began then."""
        self._last_plan_s = 0.0

    @property
    def in_flight(self) -> Mapping[int, PlannedStep]:
        """By id, in order."""
        return self._in_flight

    def plan(self, now: float) -> PlannedStep | None:
        """The next step to execute, or None where none can be planned now."""
        in_flight = self._in_flight.values()
        planned, stays = None, self._waits(now)
        # Parts of a suspended step and online steps take turns, so nothing is planned ahead then, nor before it is resumed.
        depth = self.max_in_flight if stays or self._memory.suspended is None else 1
        if len(in_flight) < depth and not any(
            step.plan.is_interruptible or step.plan.drafts or step.plan.model_drafts for step in in_flight
        ):
            begins_s = max((now, *(self._predicted_end_s(step) for step in in_flight)))
            planned = None if stays else self._resume(now)
            if planned is None:
                # What the objectives leave beside online steps goes to its parts first.
                keeps = not stays and self._memory.suspended is not None
                ahead_s = max((step.predicted_s for step in in_flight), default=0.0)
                planned = self._planner.plan(
                    self._num_planned, now, begins_s, not in_flight, holds_offline=keeps, ahead_s=ahead_s
                )
            if planned is None and not in_flight and self._memory.suspended is not None:
                # Online requests wait for what only others can give them.
                planned = self._go_on(1.0, now)
        if planned is not None:
            if not planned.plan.resumes:
                self._num_planned += 1
            self._in_flight[planned.plan.step_id] = planned
        self._last_plan_s = now
        return planned

    def _waits(self, now: float) -> bool:
        """Whether a suspended step waits for a time without online work; others are planned as if it were not there."""
        self.discard_if_empty(now)
        step = self._memory.suspended
        if step is None:
            return False
        objective_s = self._memory.queues[step.plan.model].ttft_objective_s
        return waits(now - step.interrupted_s, objective_s, has_online=self._memory.has_online_work())

    @property
    def running(self) -> PlannedStep | None:
        """The oldest in flight."""
        return next(iter(self._in_flight.values()), None)

    def _predicted_end_s(self, step: PlannedStep) -> float:
        return max(step.planned_s, self._last_end_s) + step.predicted_s * (1 - step.done_share)

    def busy_s(self, now: float) -> float:
        """Until the steps in flight end, if a sequence that comes from another instance should rather come after them: one
        of them is long and cannot be interrupted. One that runs over its prediction is expected to go on for as long as it
        has been over."""
        if not any(step.is_long and not step.plan.is_interruptible for step in self._in_flight.values()):
            return 0.0
        return abs(max(self._predicted_end_s(step) for step in self._in_flight.values()) - now)

    def online_wait_s(self, now: float) -> float:
        """Until the steps in flight end that an online request would wait for."""
        waits = [self._predicted_end_s(step) for step in self._in_flight.values() if not step.plan.is_interruptible]
        return max(0.0, max(waits, default=0.0) - now)

    def _resume(self, now: float) -> PlannedStep | None:
        """The suspended step, if it is to go on now; gives it up if that is cheaper."""
        step = self._memory.suspended
        if step is None:
            return None
        has_online = self._memory.has_online_work()
        if step.is_part and has_online:
            # Parts and online steps take turns.
            step.is_part = False
            return None
        left_s = step.predicted_s * (1 - step.done_share) or step.ran_s
        safepoint_s = step.predicted_s * self._safepoint_share(step) or math.inf
        spare_s = self._planner.leaders.spare_s(now, safepoint_s) if has_online else 0.0
        state = SuspendedStep(step.ran_s, left_s, step.lost_s)
        match what_next(state, has_online=has_online, spare_s=spare_s, safepoint_s=safepoint_s):
            case Next.RESUME:
                return self._go_on(1.0, now)
            case Next.PART:
                return self._go_on(min(1.0, step.done_share + spare_s / step.predicted_s), now)
            case Next.DISCARD:
                self._memory.discard_suspended(now)
            case Next.WAIT:
                step.lost_s += min(spare_s, now - max(step.suspended_s, self._last_plan_s))
        return None

    def _go_on(self, stop_share: float, now: float) -> PlannedStep:
        step = self._planner.resume(now, stop_share)
        step.is_part = stop_share < 1.0
        if not step.is_part:
            self._memory.counters.steps_resumed += 1
            self._memory.tell_resumed(step, now)
        return step

    def _safepoint_share(self, step: PlannedStep) -> float:
        """Share of a step's layers that lies between two safepoints."""
        cost_model = self._memory.queues[step.plan.model].cost_model
        return 1.0 if cost_model is None else cost_model.layers_per_safepoint / cost_model.num_layers

    def take_interrupt(self, now: float) -> int | None:
        """The step in flight that is to stop at its next safepoint, for the sake of an online request that would miss its
        objective; named once."""
        step = self.running
        if step is None or not step.plan.is_interruptible or step.is_interrupted or not self._memory.has_online_work():
            return None
        if step.is_part:
            # It stops by itself, within what the objectives leave.
            return None
        if step.predicted_s:
            online_s, objective_s = self._planner.leaders.online_need(now)
            left_s = step.predicted_s * (1 - step.done_share)
            elapsed_s = now - max(step.planned_s, self._last_end_s)
            safepoint_s = step.predicted_s * self._safepoint_share(step)
            if not should_interrupt(elapsed_s, left_s, objective_s, online_s, safepoint_s):
                return None
        step.is_interrupted = True
        return step.plan.step_id

    def on_result(self, result: StepResult, now: float, *, gives_up: bool) -> bool:
        """What a step made, or that it failed or was suspended; False where it is not known. `gives_up`: a suspended one is
        not to be resumed."""
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            return False
        step.ran_s += now - max(step.planned_s, self._last_end_s)
        self._last_end_s = now
        if result.suspended_share >= 0 and not result.error:
            self._memory.suspend(step, result.suspended_share, now)
            # The turn is that of whoever interrupted it.
            step.is_part = step.is_part or step.is_interrupted
            leaves = any(sequence.state == State.LEAVING for sequence in step.sequences)
            self.discard_if_empty(now, always=leaves or gives_up)
            return True
        for sequence in step.sequences:
            sequence.in_flight -= 1
        if result.error:
            self._roll_back(step, result.error, now)
        else:
            self._charging.charge(step, sum(result.draft_passes_s), now)
            if result.unguided:
                self._end_unguided(step, result, now)
            if NO_TOKEN in result.tokens:
                self._end_without_token(step, result, now)
            self._apply(step, result, now)
            kept = self._accept(step, result, now) if step.plan.drafts else []
            self._drafting.observe(self._memory.queues[step.plan.model], step, result, kept)
        self._memory.settle(step, now)
        return True

    def charge_leaving(self, sequence: Sequence, now: float) -> None:
        """Before a sequence with a step in flight is held here no more."""
        for step in self._in_flight.values():
            if sequence in step.sequences:
                ran_s = step.ran_s + max(0.0, now - max(step.planned_s, self._last_end_s))
                self._charging.charge_leaving(sequence, step, ran_s)

    def discard_if_empty(self, now: float, always: bool = False) -> None:
        """Gives the suspended step up if nobody waits for it any more."""
        step = self._memory.suspended
        if step is not None and (always or not self._memory.queues[step.plan.model].suspended):
            self._memory.discard_suspended(now)

    def _apply(self, step: PlannedStep, result: StepResult, now: float) -> None:
        plan, tokens, logprobs = step.plan, result.tokens, result.logprobs
        queue = self._memory.queues[plan.model]
        outputs, none = self._requests.outputs, ()
        for index, packed in result.prompt_logprobs:
            if step.sequences[index].generation == step.generations[index]:
                step.sequences[index].add_prompt_logprobs(plan.starts[index], packed)
        position = -1
        for sequence, generation, start, count, samples in zip(
            step.sequences, step.generations, plan.starts, plan.counts, plan.samples, strict=True
        ):
            if samples:
                position += 1
            if sequence.generation != generation or sequence.state is _ENDED:
                continue
            if start + count >= sequence.next_register:
                self._register_blocks(sequence, queue, start + count)
            if not samples:
                continue
            token = tokens[position]
            known = sequence.tokens
            offset = len(known) - sequence.num_prompt
            known.append(token)
            if sequence.is_silent:
                self._end_silence(sequence, now)
            if sequence.last_token_s is not None and now - sequence.last_token_s > sequence.max_itl_s:
                sequence.max_itl_s = now - sequence.last_token_s
            sequence.last_token_s = now
            entry_logprobs: tuple[TokenLogprob, ...] = none
            if logprobs is not None and (logprob := logprobs[position]) is not None:
                if sequence.prompt_logprobs is not None:
                    logprob = msgspec.structs.replace(logprob, prompt=sequence.take_prompt_logprobs())
                entry_logprobs = (logprob,)
            if (token in sequence.stop_ids and len(known) > sequence.min_total) or len(known) >= sequence.max_total:
                reason = self._requests.finish_reason(sequence, token)
                assert reason is not None
                self._requests.end(sequence, reason, now, tokens=_pack_token(token), logprobs=entry_logprobs)
                continue
            request = sequence.request
            entry = TokenEntry(
                request_id=request.request_id,
                epoch=request.epoch,
                offset=offset,
                tokens=_pack_token(token),
                finish_reason=None,
                logprobs=entry_logprobs,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            entries = outputs.get(request.gateway_id)
            if entries is None:
                outputs[request.gateway_id] = [entry]
            else:
                entries.append(entry)
        if queue.handing_over:
            self._requests.tell_chunks(step.sequences, queue.handing_over)

    def _end_silence(self, sequence: Sequence, now: float) -> None:
        """Ends a silence with the last known token, the first of here or since the sequence was preempted."""
        sequence.is_silent = False
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            sequence.first_total = len(sequence.tokens)
        kind = EventKind.FIRST_TOKEN if sequence.num_output == 1 else EventKind.DECODE_RESUMED
        self._memory.events.add(sequence, kind, now, numbers=(sequence.device_s,))

    def _end_unguided(self, step: PlannedStep, result: StepResult, now: float) -> None:
        """Ends requests whose grammar could not be followed; the other tokens of the step are good."""
        sampled = [i for i, samples in enumerate(step.plan.samples) if samples]
        for position, reason in result.unguided:
            sequence = step.sequences[sampled[position]]
            if sequence.generation == step.generations[sampled[position]] and sequence.state is not _ENDED:
                error = ErrorInfo(ErrorCode.BAD_REQUEST, f"The output's grammar cannot be followed: {reason}")
                self._requests.end(sequence, FinishReason.ERROR, now, error)

    def _end_without_token(self, step: PlannedStep, result: StepResult, now: float) -> None:
        """Ends requests whose logits were not finite. What they computed is in no prefix cache afterwards: the next
        request that found it there would fare as they did. Of drafts those before it count, and the next step finds it
        again."""
        queue, counters = self._memory.queues[step.plan.model], self._memory.counters
        sampled = [i for i, samples in enumerate(step.plan.samples) if samples]
        for column, token in zip(sampled, result.tokens, strict=False):  # behind them come those of drafts
            sequence = step.sequences[column]
            if token != NO_TOKEN or sequence.generation != step.generations[column] or sequence.state is _ENDED:
                continue
            counters.without_token[queue.name] += 1
            self._memory.pool.forget(queue.name, sequence.blocks)
            message = (
                f"The logits of {queue.name!r} after {len(sequence.tokens)} tokens are NaN or infinite: its weights, "
                "its adapter or the device that computes it are at fault, or its dtype is too narrow for this prompt."
            )
            self._requests.end(sequence, FinishReason.ERROR, now, ErrorInfo(ErrorCode.NOT_FINITE, message))

    def _accept(self, step: PlannedStep, result: StepResult, now: float) -> list[int]:
        """Accepts the drafts that equal what was sampled before them: each is the next token, and so is what was sampled
        after the last of them. Noise depends on seed and position alone, so these are the tokens that single steps would
        have sampled. Returns how many of each of the plan's drafts were kept."""
        plan, counters = step.plan, self._memory.counters
        queue = self._memory.queues[plan.model]
        end = sum(plan.samples)
        all_kept: list[int] = []
        made = iter(result.drafted)
        for index, planned in plan.drafts:
            first, end = end, end + len(planned)
            drafted = [next(made) if token == NO_TOKEN else token for token in planned]
            all_kept.append(0)
            sequence = step.sequences[index]
            sequence.num_draft_tokens += len(drafted)
            counters.drafts[plan.model] += 1
            counters.drafted_tokens[plan.model] += len(drafted)
            if sequence.generation != step.generations[index] or sequence.state is _ENDED:
                continue
            known, kept, reason = sequence.tokens, 0, None
            for draft, token in zip(drafted, result.tokens[first:end], strict=True):
                if known[-1] != draft or reason is not None or token == NO_TOKEN:
                    break
                known.append(token)
                kept += 1
                reason = self._requests.finish_reason(sequence, token)
            if not kept:
                continue
            all_kept[-1] = kept
            sequence.num_draft_kept += kept
            counters.accepted_tokens[plan.model] += kept
            if sequence.is_online:
                counters.online_tokens += kept
            else:
                counters.harvested_tokens += kept
            sequence.num_computed += kept
            sequence.total += kept
            if sequence.num_computed >= sequence.next_register:
                self._register_blocks(sequence, queue, sequence.num_computed)
            tokens = pack_tokens(known[-kept:])
            logprobs: tuple[TokenLogprob, ...] = ()
            if result.logprobs is not None:
                logprobs = tuple(one for one in result.logprobs[first : first + kept] if one is not None)
            if reason is not None:
                self._requests.end(sequence, reason, now, tokens=tokens, logprobs=logprobs)
                continue
            request = sequence.request
            entry = TokenEntry(
                request_id=request.request_id,
                epoch=request.epoch,
                offset=sequence.num_output - kept,
                tokens=tokens,
                finish_reason=None,
                logprobs=logprobs,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            self._requests.outputs.setdefault(request.gateway_id, []).append(entry)
        return all_kept

    def _register_blocks(self, sequence: Sequence, queue: ModelQueue, num_computed: int) -> None:
        """Enters the blocks that this step filled in the prefix cache."""
        page = queue.shape.block_size
        num_full = num_computed // page
        first = sequence.next_register // page - 1
        hashes = sequence.extend_hashes(num_full, page, queue.root, first)
        self._memory.pool.register(queue.name, sequence.blocks[first:num_full], hashes)
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
                self._requests.end(sequence, FinishReason.ERROR, now, ErrorInfo(ErrorCode.INTERNAL, message))
