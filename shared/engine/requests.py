"""The requests that an instance holds: how they come, how they end, and what of them goes out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from heapq import heapify, heappop, heappush

import msgspec

from shared.engine.handover import PromptChunk
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import Handover, PriorityClass, Sequence, State, priority_class_of
from shared.messages.cluster import FinishedStats
from shared.messages.requests import (
    PLACE_AGAIN_CODES,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    RequestClass,
    RequestTiming,
    TokenEntry,
    TokenLogprob,
    unpack_tokens,
)
from shared.messages.timeline import EventKind


class Output(msgspec.Struct, frozen=True):
    """Effect: entries for one gateway."""

    gateway_id: str
    entries: list[TokenEntry]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: a request is over. Times are on the clock of the `now` arguments; None for what never happened."""

    request: GenerationRequest
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    """Including those that came with the request as `prior`."""
    num_cached_tokens: int
    num_preemptions: int
    arrived_s: float
    """Time at which the client's request came, as far as is known."""
    submitted_s: float
    first_planned_s: float | None
    first_token_s: float | None
    ended_s: float
    device_s: float = 0.0
    """Execution time charged: what its part of each step takes alone."""
    recomputed_tokens: int = 0
    restored_blocks: int = 0
    num_suspensions: int = 0
    """Steps of it that were suspended."""
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    num_migrations: int = 0
    """Moves from instance to instance."""
    here_since_s: float = 0.0
    """Time at which this instance was given it: its submission, or its adoption from another."""
    max_itl_s: float = 0.0
    """The longest time between two of its tokens."""
    service_s: float = 0.0
    """Its part of the steps, which together take as long as they do."""
    is_given_up: bool = False
    """Only here: the request goes on elsewhere."""
    num_draft_tokens: int = 0
    """Tokens that were guessed here, in whatever way."""
    num_draft_kept: int = 0
    """Guessed tokens that came true."""
    num_host_tokens: int = 0
    """The part of the cached tokens that was in host memory."""
    num_disk_tokens: int = 0
    """The part of the cached tokens that was on disk."""

    def stats(self) -> FinishedStats:
        """What the load report says of it."""
        planned_s = self.first_planned_s if self.first_planned_s is not None else self.ended_s
        ttft_s, (is_ttft_met, is_tpot_met) = self.ttft_s, self.objectives_met()
        return FinishedStats(
            model=self.request.model,
            request_class=self.request.request_class,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            queued_s=planned_s - self.submitted_s,
            execution_s=self.ended_s - planned_s,
            finish_reason=self.reason,
            device_s=self.device_s,
            latency_s=self.ended_s - self.arrived_s,
            ttft_s=-1.0 if ttft_s is None else ttft_s,
            is_whole=self.request.ttft_s < 0,
            is_ttft_met=is_ttft_met,
            is_tpot_met=is_tpot_met,
            max_itl_s=self.max_itl_s,
            adapter="" if self.request.adapter is None else self.request.adapter.name,
            is_mirror=self.request.is_mirror,
            is_given_up=self.is_given_up,
            service_s=self.service_s,
        )

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from arrival, as the client saw it, wherever its tokens were made; None: it had none."""
        if self.request.ttft_s >= 0:
            # placed again: the first token of here is a later one of the client's
            return self.request.ttft_s
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def objectives_met(self) -> tuple[bool | None, bool | None]:
        """Time to first token and time per output token after it; None: there is no such objective (offline requests have
        those that they name themselves), or it says nothing."""
        request, ttft_s = self.request, self.ttft_s
        has_ttft, has_tpot = has_objectives(request)
        has_ttft = has_ttft and self.ttft_objective_s > 0
        if ttft_s is None:
            # One that was cancelled in time, or moved, says nothing of how it would have been served.
            is_missed = self.reason in (FinishReason.DEADLINE, FinishReason.ERROR)
            is_missed = is_missed or self.ended_s - self.arrived_s > self.ttft_objective_s
            return (False if has_ttft and is_missed else None), None
        is_tpot_met = None
        num_later = self.num_output_tokens - 1
        if num_later > 0 and self.tpot_objective_s > 0 and has_tpot:
            is_tpot_met = (self.ended_s - self.arrived_s - ttft_s) / num_later <= self.tpot_objective_s
        return (ttft_s <= self.ttft_objective_s if has_ttft else None), is_tpot_met


def has_objectives(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether it is to meet one for the time to first token, and one per output token: offline requests have those that they
    name themselves."""
    is_online = request.request_class == RequestClass.ONLINE
    return is_online or request.ttft_objective_s > 0, is_online or request.tpot_objective_s > 0


class RequestTable:
    """Those of one instance, in the queues of its allocator."""

    def __init__(self, memory: Allocator, max_waiting: int, give_up_s: float) -> None:
        self._memory = memory
        self._max_waiting = max_waiting
        self._give_up_s = give_up_s
        self._sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, list[TokenEntry]] = {}
        """Outputs for each gateway since they were last taken."""
        self._ended: list[Ended] = []
        self._chunks: list[PromptChunk] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_submitted = 0
        self.charge_leaving: Callable[[Sequence, float], None] | None = None
        """Called with a sequence that leaves while a step computes it: charges what that takes to its tenant."""

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        """Takes a request, or says why not. The same id and epoch again changes nothing; a higher epoch replaces what is
        held under that id (its output so far is in the new request's `prior`)."""
        held = self._sequences.get(request.request_id)
        if held is not None and request.epoch <= held.request.epoch:
            return None
        queue = self._memory.queues.get(request.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {request.model!r} is not loaded on this instance", "model")
        refused = self.misfit(request, queue) or self.queue_full(priority_class_of(request) != PriorityClass.OFFLINE)
        if refused:
            return refused
        if held is not None:
            self.drop(held, now)
        sequence = self.new_sequence(request, queue, now)
        self.hold(sequence, now)
        if request.decoder:
            queue.handing_over[sequence.number] = sequence
        num_before = sum(len(of_class) for of_class in queue.waiting)
        has_ttft, has_tpot = has_objectives(request)
        objectives = (
            sequence.ttft_due_s - sequence.arrived_s if has_ttft else 0.0,
            sequence.tpot_objective_s if has_tpot else 0.0,
        )
        self._memory.events.add(sequence, EventKind.ARRIVED, now, numbers=(*objectives, num_before))
        self._memory.enqueue(sequence, now)
        self._memory.tiers.on_arrival(sequence)
        if sequence.num_output and (reason := self.finish_reason(sequence, sequence.tokens[-1])):
            self.end(sequence, reason, now)
        return None

    def new_sequence(self, request: GenerationRequest, queue: ModelQueue, now: float) -> Sequence:
        self._num_submitted += 1
        sequence = Sequence(request, self._num_submitted, now, queue.shape.max_model_len, queue.shape.block_size)
        sequence.ttft_due_s = sequence.arrived_s + (request.ttft_objective_s or queue.ttft_objective_s)
        sequence.tpot_objective_s = request.tpot_objective_s or queue.tpot_objective_s
        return sequence

    def hold(self, sequence: Sequence, now: float) -> None:
        """Held from now on; its place in a queue is the caller's matter."""
        self._sequences[sequence.request.request_id] = sequence
        queue = self._memory.queues[sequence.model]
        if not sequence.is_online and not queue.num_offline:
            queue.offline_turn_s = now
        self._memory.tenants(sequence).enter(sequence.tenant, sequence.request.tenant_weight)
        if sequence.is_online:
            self._memory.models.enter(sequence.model, 1.0)
            self._memory.first_tokens.expect(sequence)
        self._memory.ordering.on_arrival(sequence, now)
        heappush(self._deadlines, (sequence.deadline_s, sequence.number, sequence))
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            # Ended sequences leave the heap only at its head; this bounds how many it keeps alive.
            self._deadlines = [entry for entry in self._deadlines if entry[2].state != State.ENDED]
            heapify(self._deadlines)

    def misfit(self, request: GenerationRequest, queue: ModelQueue) -> ErrorInfo | None:
        """Why the request can never be served here."""
        num_prompt, limit = len(request.prompt) // 4, queue.shape.max_model_len
        if num_prompt == 0:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "the prompt has no tokens", "prompt")
        if refused := self._foreign_tokens(request, queue):
            return refused
        if request.sampling.max_tokens < 1:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "max_tokens must be at least 1", "max_tokens")
        if num_prompt >= limit:
            message = f"the prompt has {num_prompt} tokens; {queue.name!r} takes at most {limit - 1} and needs one more"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "prompt")
        return None

    def _foreign_tokens(self, request: GenerationRequest, queue: ModelQueue) -> ErrorInfo | None:
        """Token ids are an index into tables of the device, where a wrong one fails the steps of others too."""
        if len(request.prompt) % 4 or len(request.prior) % 4:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "token ids have four bytes each", "prompt")
        vocab_size, sampling = queue.shape.vocab_size or 2**31, request.sampling
        stops = sampling.stop_token_ids if sampling.min_tokens else ()
        ids = {
            "prompt": unpack_tokens(request.prompt + request.prior),
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "stop_token_ids": stops,
        }
        for param, tokens in ids.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                message = f"a token id is outside of 0 to {vocab_size - 1}, the vocabulary of {queue.name!r}"
                return ErrorInfo(ErrorCode.BAD_REQUEST, message, param)
        return None

    def queue_full(self, is_online: bool) -> ErrorInfo | None:
        if sum(other.num_waiting_of(is_online) for other in self._memory.queues.values()) >= self._max_waiting:
            kind = RequestClass.ONLINE if is_online else RequestClass.OFFLINE
            message = f"{self._max_waiting} {kind} requests already wait on this instance"
            return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        return None

    def cancel(self, request_id: str, now: float) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.handover == Handover.FROZEN:
            sequence.is_cancelled = True
        else:
            self.end(sequence, FinishReason.CANCELLED, now)

    def held(self, request_id: str) -> Sequence | None:
        """A request that has not ended; read only."""
        return self._sequences.get(request_id)

    @property
    def by_id(self) -> Mapping[str, Sequence]:
        return self._sequences

    def all_held(self) -> list[Sequence]:
        return list(self._sequences.values())

    @staticmethod
    def finish_reason(sequence: Sequence, last_token: int) -> FinishReason | None:
        if last_token in sequence.stop_ids and len(sequence.tokens) > sequence.min_total:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_total else None

    # --------------------------------------------------------------------------------------------------- ends

    def end(
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
        self._charge_leaving(sequence, now)
        self._memory.tiers.note_ended(sequence, now)
        request = sequence.request
        planned, first = sequence.first_planned_s, sequence.first_token_s
        timing = RequestTiming(
            queued_s=(planned if planned is not None else now) - sequence.submitted_s,
            prefill_s=(first if first is not None else now) - planned if planned is not None else 0.0,
            decode_s=now - first if first is not None else 0.0,
            num_preemptions=sequence.num_preemptions,
        )
        entry = TokenEntry(
            request_id=request.request_id,
            epoch=request.epoch,
            offset=sequence.num_output - len(tokens) // 4,
            tokens=tokens,
            finish_reason=reason,
            logprobs=logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
            timing=timing,
        )
        self.outputs.setdefault(request.gateway_id, []).append(entry)
        numbers = (sequence.device_s, sequence.num_output)
        cause = reason.value if error is None else f"{reason.value}: {error.message}"
        self._memory.events.add(sequence, EventKind.ENDED, now, cause, numbers)
        self._ended.append(
            Ended(
                request=request,
                reason=reason,
                num_prompt_tokens=sequence.num_prompt,
                num_output_tokens=sequence.num_output,
                num_cached_tokens=sequence.num_cached_tokens,
                num_host_tokens=sequence.num_host_tokens,
                num_disk_tokens=sequence.num_disk_tokens,
                num_preemptions=sequence.num_preemptions,
                arrived_s=sequence.arrived_s,
                submitted_s=sequence.submitted_s,
                first_planned_s=planned,
                first_token_s=first,
                ended_s=now,
                device_s=sequence.device_s,
                recomputed_tokens=sequence.num_recomputed,
                restored_blocks=sequence.num_restored_blocks,
                num_suspensions=sequence.num_suspensions,
                ttft_objective_s=sequence.ttft_due_s - sequence.arrived_s,
                tpot_objective_s=sequence.tpot_objective_s,
                num_migrations=sequence.num_migrations,
                here_since_s=sequence.here_since_s,
                max_itl_s=sequence.max_itl_s,
                service_s=sequence.service_s,
                num_draft_tokens=sequence.num_draft_tokens,
                num_draft_kept=sequence.num_draft_kept,
                is_given_up=error is not None and error.code in PLACE_AGAIN_CODES,
            )
        )
        for tier, num_tokens in (
            ("host", sequence.num_host_tokens),
            ("disk", sequence.num_disk_tokens),
            ("device", sequence.num_cached_tokens - sequence.num_host_tokens - sequence.num_disk_tokens),
        ):
            if num_tokens > 0:
                self._memory.counters.cached_tokens[tier] += num_tokens
        self.drop(sequence, now)

    def _charge_leaving(self, sequence: Sequence, now: float) -> None:
        if sequence.in_flight and self.charge_leaving is not None:
            self.charge_leaving(sequence, now)

    def drop(self, sequence: Sequence, now: float) -> None:
        self._charge_leaving(sequence, now)
        del self._sequences[sequence.request.request_id]
        self._memory.remove(sequence)
        tenants = self._memory.tenants(sequence)
        tenants.promise(sequence.tenant, -sequence.promised_s)
        sequence.promised_s = 0.0
        tenants.leave(sequence.tenant)
        if sequence.is_online:
            self._memory.models.leave(sequence.model)

    def tell_chunks(self, sequences: Iterable[Sequence], handing_over: Container[int]) -> None:
        """A step has computed these. `handing_over`: numbers of the sequences that are to be handed over."""
        self._chunks.extend(
            PromptChunk(sequence.request.request_id, sequence.request.decoder)
            for sequence in sequences
            if sequence.number in handing_over and sequence.state == State.RUNNING
        )

    def take_effects(self) -> list[Output | Ended | PromptChunk]:
        """What happened since the last call, outputs first."""
        effects: list[Output | Ended | PromptChunk] = [
            Output(gateway, entries) for gateway, entries in self.outputs.items()
        ]
        effects.extend(self._ended)
        effects.extend(self._chunks)
        self.outputs, self._ended, self._chunks = {}, [], []
        return effects

    # --------------------------------------------------------------------------------------------------- time

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].state == State.ENDED:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def end_overdue(self, now: float) -> None:
        """Ends requests past their deadline."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            sequence = heappop(self._deadlines)[2]
            # One that is frozen ends when it is reattached.
            if sequence.handover != Handover.FROZEN:
                self.end_late(sequence, now)

    def give_up_unserved(self, now: float) -> None:
        """Offline requests of models that had no turn beside online work for some seconds, and for as long as was computed
        of them: to wait here for longer gains nothing where others have room, and an instance tells of none meanwhile."""
        if not self._give_up_s or not self._memory.has_online_work():
            return
        for queue in self._memory.queues.values():
            if now - queue.offline_turn_s <= self._give_up_s:
                continue
            for sequence in (*queue.waiting[PriorityClass.OFFLINE], *queue.running[PriorityClass.OFFLINE].values()):
                waited_s = now - max(queue.offline_turn_s, sequence.here_since_s)
                if sequence.in_flight or sequence.handover != Handover.NONE:
                    continue
                if waited_s > self._give_up_s + sequence.device_s:
                    self._memory.counters.unserved[queue.name] += 1
                    message = f"online requests left it no turn for {waited_s:.3g} s"
                    self.end(sequence, FinishReason.ERROR, now, ErrorInfo(ErrorCode.UNAVAILABLE, message))

    def end_late(self, sequence: Sequence, now: float) -> None:
        error = ErrorInfo(ErrorCode.DEADLINE, f"the request's time of {sequence.request.timeout_s:.3g} s is over")
        self.end(sequence, FinishReason.DEADLINE, now, error)
