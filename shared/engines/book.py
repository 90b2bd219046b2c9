"""The requests of an instance whose engine is another's: who is held, what went out of each, how loaded the instance is.

    submit, cancel, expire, give_up -> Book -> Generate, Abort           for the engine
    Step                            -> Book -> TokenEntry a gateway, Ended

Plain state; time is an argument. Numbers of KV blocks are the book's own where the engine says no share of use: a
request holds the blocks of its tokens. A block of the engine's is a merged block of the load report, as there is one
model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from shared.costs.live import LiveCosts
from shared.costs.model import StepShape, prompt_s
from shared.engine.handover import Detached
from shared.engine.load import HOARD_S, UNKNOWN_IDEAL_SHARE, InstanceLoad
from shared.engine.requests import Ended
from shared.engines.admission import num_to_send
from shared.engines.capabilities import Capability
from shared.engines.messages import OFFLINE_PRIORITY, Abort, EngineFacts, Generate, Progress, Step
from shared.engines.resuming import Diverged, Resumption
from shared.messages.cluster import ModelLoad
from shared.messages.migration import SequenceProgress
from shared.messages.requests import (
    PLACE_AGAIN_CODES,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    HeldRequest,
    Priority,
    RequestClass,
    RequestTiming,
    TokenEntry,
    TokenLogprob,
)
from shared.policies.virtual_usage import (
    decode_steps,
    dispatch_virtual_usage,
    freeness,
    headroom,
    migration_virtual_usage,
)
from shared.scheduling.queue import Outflow

RATE_WINDOW_S = 4.0
MAX_STEP_S = 1.0
"""Between two messages of an engine that does not say what its steps take, as time of a step."""


@dataclass(slots=True, eq=False, kw_only=True)
class Held:
    """A request that is here. Times are on the clock of `now`."""

    request: GenerationRequest
    submitted_s: float
    """Time at which it came to the first instance of this placement; `here_since_s`: to this one."""
    here_since_s: float
    resumption: Resumption
    is_sent: bool = False
    """Whether it was sent to the engine."""
    num_tries: int = 0
    first_planned_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    max_itl_s: float = 0.0
    num_cached: int = 0
    num_prompt_told: int = 0
    """`Progress.num_prompt`."""
    num_preemptions: int = 0
    service_s: float = 0.0
    output: bytearray
    """Packed output tokens that went out, the prior ones among them."""
    slots: tuple[int, ...] = ()
    """`Generate.slots`, for the next time that it is sent; likewise `num_computed`."""
    num_computed: int = 0
    num_moves: int = 0
    """Moves between instances that it has made."""
    moved_s: float = -inf
    """Time at which it came from another instance, or stayed after all."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def offset(self) -> int:
        """Output tokens that went out, the prior ones among them."""
        return len(self.output) // 4

    @property
    def num_left(self) -> int:
        """Output tokens until its longest output."""
        return self.request.sampling.max_tokens - self.offset

    @property
    def key(self) -> str:
        return f"{self.request.request_id}#{self.request.epoch}#{self.num_tries}"

    @property
    def is_online(self) -> bool:
        return self.request.request_class is RequestClass.ONLINE

    @property
    def is_running(self) -> bool:
        return self.first_planned_s is not None

    @property
    def is_decoding(self) -> bool:
        """Whether the engine has made a token of it since it came, or came back: its KV is there."""
        return self.first_token_s is not None and self.last_token_s > self.moved_s

    @property
    def num_prompt(self) -> int:
        return self.num_prompt_told or len(self.request.prompt) // 4

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.offset

    @property
    def num_tokens_at_most(self) -> int:
        return self.num_prompt + self.request.sampling.max_tokens

    @property
    def priority(self) -> int:
        if not self.is_online:
            return OFFLINE_PRIORITY
        return -1 if self.request.priority is Priority.HIGH else 0

    def generate(self, now: float) -> Generate:
        return Generate(
            key=self.key,
            prompt=self.resumption.prompt,
            sampling=self.resumption.sampling,
            priority=self.priority,
            waited_s=self.request.waited_s + now - self.here_since_s,
            num_fed=self.resumption.num_fed,
            ttft_s=self.request.ttft_objective_s,
            tpot_s=self.request.tpot_objective_s,
            salt=self.request.prefix_salt,
            adapter=self.request.adapter,
            slots=self.slots,
            num_computed=self.num_computed,
            images=self.request.images,
            chat=self.request.chat,
            is_open_ended=self.request.is_open_ended,
        )


@dataclass(slots=True)
class Effects:
    """What came of an input."""

    commands: list[Generate | Abort] = field(default_factory=list)
    entries: dict[str, list[TokenEntry]] = field(default_factory=lambda: defaultdict(list))
    """By gateway."""
    ended: list[Ended] = field(default_factory=list)
    begun: list[Held] = field(default_factory=list)
    """Whose first token came."""
    diverged: list[Held] = field(default_factory=list)
    """Whose output was made again and came out otherwise."""

    def abort(self, keys: Iterable[str]) -> None:
        if keys := tuple(keys):
            self.commands.append(Abort(keys))


class Book:
    """Requests of one model on one engine."""

    def __init__(self, model: str, facts: EngineFacts) -> None:
        self.model = model
        self.facts = facts
        self.lacks = frozenset(facts.lacks)
        self.costs = LiveCosts()
        self._held: dict[str, Held] = {}
        self._by_key: dict[str, Held] = {}
        self._used_share: float | None = None
        self._last_step_s: float | None = None
        self._offline_rate = Outflow(RATE_WINDOW_S)
        self.num_preemptions = 0
        """Preemptions since the start."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, request_id: str) -> Held | None:
        return self._held.get(request_id)

    def held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        held = self._held.get(request_id)
        return None if held is None else held.request.epoch

    def unproven(self) -> list[str]:
        """Requests that the engine has and has made no token of since they came here: one of them may be why it failed."""
        return [held.request_id for held in self._held.values() if held.is_sent and not held.is_decoding]

    def by_key(self, key: str) -> Held | None:
        """The request that the engine knows by this key."""
        return self._by_key.get(key)

    @property
    def _takes_all(self) -> bool:
        """The engine itself decides who goes first."""
        return Capability.PREEMPTS not in self.lacks

    # -------------------------------------------------------------------------------------------------- inputs

    def submit(self, request: GenerationRequest, now: float) -> Effects | ErrorInfo:
        """A request of the model; the same again changes nothing, and a higher epoch takes a lower one's place."""
        effects = Effects()
        if (refused := self._refusal(request)) is not None:
            return refused
        known = self._held.get(request.request_id)
        if known is not None:
            if known.request.epoch >= request.epoch:
                return effects
            effects.abort(self._forget(known))
        num_prior = len(request.prior) // 4
        request = shortened(request, self.facts.max_model_len)
        held = Held(
            request=request,
            submitted_s=now,
            here_since_s=now,
            resumption=Resumption(request, self.lacks),
            output=bytearray(request.prior),
        )
        self._held[request.request_id] = held
        if num_prior >= request.sampling.max_tokens:
            self._end(held, FinishReason.LENGTH, None, now, effects)
        else:
            self._send(effects, now)
        return effects

    def _refusal(self, request: GenerationRequest) -> ErrorInfo | None:
        num_prompt = len(request.prompt) // 4
        if not num_prompt:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "The prompt is empty.", "prompt")
        facts = self.facts
        most = min(facts.max_model_len, facts.num_blocks * facts.block_size)
        if num_prompt >= most:
            message = f"{num_prompt} prompt tokens; {self.model!r} takes at most {most} with the output"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "prompt")
        return None

    def cancel(self, request_id: str, epoch: int | None, now: float) -> Effects:
        effects = Effects()
        held = self._held.get(request_id)
        if held is not None and (epoch is None or held.request.epoch <= epoch):
            self._end(held, FinishReason.CANCELLED, None, now, effects)
            self._send(effects, now)
        return effects

    def expire(self, now: float, stays: Callable[[Held], bool] = lambda _: False) -> Effects:
        """Ends those whose time is over, but for those that stay."""
        effects = Effects()
        late = [one for one in self._held.values() if now - one.here_since_s > one.request.timeout_s]
        for held in [one for one in late if not stays(one)]:
            error = ErrorInfo(ErrorCode.DEADLINE, "The request's time limit has passed.")
            self._end(held, FinishReason.DEADLINE, error, now, effects)
        self._send(effects, now)
        return effects

    def give_up(self, error: ErrorInfo, now: float, stays: Callable[[Held], bool] = lambda _: False) -> Effects:
        """Ends all, but those that stay, for a reason at which their gateways place them again."""
        effects = Effects()
        for held in [one for one in self._held.values() if not stays(one)]:
            self._end(held, FinishReason.ERROR, error, now, effects)
        return effects

    def step(self, step: Step, now: float) -> Effects:
        """What the engine made."""
        effects = Effects()
        self._charge(step, now)
        for progress in step.progress:
            if (held := self._by_key.get(progress.key)) is not None:
                self._progress(held, progress, now, effects)
        self._send(effects, now)
        return effects

    def _progress(self, held: Held, progress: Progress, now: float, effects: Effects) -> None:
        held.num_preemptions += progress.num_preemptions
        self.num_preemptions += progress.num_preemptions
        if held.first_planned_s is None:
            held.first_planned_s = now
        if progress.num_prompt:
            held.num_prompt_told = progress.num_prompt - held.resumption.num_fed
        try:
            tokens, logprobs = held.resumption.take(progress.tokens, progress.logprobs)
            if progress.finish_reason is not None and held.resumption.is_repeating:
                raise Diverged  # it ended before it was where it had been
        except Diverged:
            self._try_again(held, now, effects)
            return
        if tokens:
            if held.first_token_s is None:
                held.first_token_s = now
                held.num_cached = min(progress.num_cached, held.num_prompt)
                effects.begun.append(held)
            else:
                held.max_itl_s = max(held.max_itl_s, now - held.last_token_s)
            held.last_token_s = now
            if not held.is_online:
                self._offline_rate.count(now, len(tokens) // 4)
        if progress.finish_reason is not None:
            self._end(held, progress.finish_reason, progress.error, now, effects, tokens, logprobs)
        elif tokens:
            effects.entries[held.request.gateway_id].append(
                TokenEntry(
                    request_id=held.request_id,
                    epoch=held.request.epoch,
                    offset=held.offset,
                    tokens=tokens,
                    logprobs=logprobs,
                    num_cached_tokens=held.num_cached,
                    num_prompt_tokens=held.num_prompt_told,
                )
            )
            held.output += tokens

    def _try_again(self, held: Held, now: float, effects: Effects) -> None:
        effects.diverged.append(held)
        if (error := held.resumption.give_in()) is not None:
            self._end(held, FinishReason.ERROR, error, now, effects)
            return
        effects.abort([held.key])
        del self._by_key[held.key]
        held.num_tries += 1
        self._by_key[held.key] = held
        effects.commands.append(held.generate(now))

    def _end(
        self,
        held: Held,
        reason: FinishReason,
        error: ErrorInfo | None,
        now: float,
        effects: Effects,
        tokens: bytes = b"",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        is_engines_end = reason in (FinishReason.STOP, FinishReason.LENGTH)
        keys = self._forget(held)
        if not is_engines_end:
            effects.abort(keys)
        planned_s = now if held.first_planned_s is None else held.first_planned_s
        first_s = now if held.first_token_s is None else held.first_token_s
        effects.entries[held.request.gateway_id].append(
            TokenEntry(
                request_id=held.request_id,
                epoch=held.request.epoch,
                offset=held.offset,
                tokens=tokens,
                logprobs=logprobs,
                finish_reason=reason,
                error=error,
                num_cached_tokens=held.num_cached,
                num_prompt_tokens=held.num_prompt_told,
                timing=RequestTiming(
                    planned_s - held.submitted_s, first_s - planned_s, now - first_s, held.num_preemptions
                ),
            )
        )
        held.output += tokens
        effects.ended.append(
            Ended(
                request=held.request,
                reason=reason,
                num_prompt_tokens=held.num_prompt,
                num_output_tokens=held.offset,
                num_cached_tokens=held.num_cached,
                num_preemptions=held.num_preemptions,
                arrived_s=held.here_since_s - held.request.waited_s,
                submitted_s=held.submitted_s,
                first_planned_s=held.first_planned_s,
                first_token_s=held.first_token_s,
                ended_s=now,
                device_s=held.service_s,
                ttft_objective_s=held.request.ttft_objective_s,
                tpot_objective_s=held.request.tpot_objective_s,
                num_migrations=held.num_moves,
                here_since_s=held.here_since_s,
                max_itl_s=held.max_itl_s,
                service_s=held.service_s,
                is_given_up=error is not None and error.code in PLACE_AGAIN_CODES,
            )
        )

    def _forget(self, held: Held) -> list[str]:
        """Returns the keys under which the engine knows it."""
        del self._held[held.request_id]
        return [held.key] if self._by_key.pop(held.key, None) is not None else []

    # ---------------------------------------------------------------------------------- requests that move (moving.py)

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks of a request that moves would fit, and its row."""
        num_rows = sum(held.is_sent and (held.is_online or not self._takes_all) for held in self._held.values())
        free = self.facts.num_blocks * (1 - self.used_share)
        return num_rows < self.facts.max_running and num_blocks + 1 <= free

    def withdraw(self, held: Held) -> list[Abort]:
        """Takes it back from the engine; it stays held."""
        is_known = self._by_key.pop(held.key, None) is not None
        return [Abort((held.key,))] if is_known else []

    def detached(self, held: Held, num_computed: int, now: float) -> Detached:
        """What travels of one that is not in the engine any more. `num_computed`: tokens whose KV travels."""
        request = held.request
        first_s, planned_s = held.first_token_s, held.first_planned_s
        travelling = msgspec.structs.replace(
            request,
            prior=bytes(held.output),
            timeout_s=request.timeout_s - (now - held.here_since_s),
            waited_s=request.waited_s + now - held.here_since_s,
        )
        progress = SequenceProgress(
            num_computed=num_computed,
            first_token_age_s=-1.0 if first_s is None else now - first_s,
            first_planned_age_s=-1.0 if planned_s is None else now - planned_s,
            submitted_age_s=now - held.submitted_s,
            num_cached_tokens=held.num_cached,
            num_preemptions=held.num_preemptions,
            num_migrations=held.num_moves + 1,
            last_token_age_s=-1.0 if first_s is None else now - held.last_token_s,
            max_itl_s=held.max_itl_s,
            service_s=held.service_s,
        )
        return Detached(held.request_id, travelling, progress, now, held.here_since_s)

    def adopt(
        self, request: GenerationRequest, progress: SequenceProgress, slots: tuple[int, ...], now: float
    ) -> tuple[Held, list[Generate | Abort]] | ErrorInfo:
        """A request that comes, with the KV of its first blocks in slots. A lower epoch of it ends without a word."""
        if (refused := self._refusal(request)) is not None:
            return refused
        if len(request.prompt) // 4 + request.sampling.max_tokens > self.facts.max_model_len:
            message = f"{self.model!r} takes at most {self.facts.max_model_len} tokens here"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        effects = Effects()
        if (known := self._held.get(request.request_id)) is not None:
            effects.abort(self._forget(known))

        def since(age_s: float) -> float | None:
            return None if age_s < 0 else now - age_s

        held = Held(
            request=request,
            submitted_s=now - progress.submitted_age_s,
            here_since_s=now,
            resumption=Resumption(request, self.lacks),
            output=bytearray(request.prior),
            first_planned_s=since(progress.first_planned_age_s),
            first_token_s=since(progress.first_token_age_s),
            last_token_s=now - max(0.0, progress.last_token_age_s),
            max_itl_s=progress.max_itl_s,
            num_cached=progress.num_cached_tokens,
            num_preemptions=progress.num_preemptions,
            service_s=progress.service_s,
            slots=slots,
            num_computed=progress.num_computed,
            num_moves=progress.num_migrations,
            moved_s=now,
        )
        self._held[request.request_id] = held
        self._send(effects, now)
        return held, effects.commands

    def restart(self, held: Held, epoch: int, now: float) -> list[Generate | Abort]:
        """One that left the engine goes on in it, from its tokens."""
        held.request = msgspec.structs.replace(held.request, epoch=epoch, prior=bytes(held.output))
        held.resumption = Resumption(held.request, self.lacks)
        held.num_tries, held.is_sent, held.slots, held.moved_s = held.num_tries + 1, False, (), now
        held.num_computed = 0
        effects = Effects()
        self._send(effects, now)
        return effects.commands

    def drop(self, held: Held) -> None:
        """It is another's: nothing is said of it."""
        self._forget(held)

    def _send(self, effects: Effects, now: float) -> None:
        """Those that are to be with the engine now."""
        waiting = [held for held in self._held.values() if not held.is_sent]
        if not waiting:
            return
        waiting.sort(key=lambda held: (held.priority, held.submitted_s))
        if not self._takes_all:
            online = [held for held in waiting if held.is_online]
            offline = [held for held in waiting if not held.is_online]
            sent = [held for held in self._held.values() if held.is_sent]
            num_sent_online = sum(held.is_online for held in sent)
            num_online, num_offline = num_to_send(
                self.facts.max_running, num_sent_online, len(sent) - num_sent_online, len(online), len(offline)
            )
            waiting = [*online[:num_online], *offline[:num_offline]]
        for held in waiting:
            held.is_sent = True
            self._by_key[held.key] = held
            effects.commands.append(held.generate(now))

    def _charge(self, step: Step, now: float) -> None:
        """Gives each request its part of the step's time, and the cost model the step."""
        if self._used_share is not None or step.used_share:
            self._used_share = step.used_share
        seconds = step.seconds
        if step.shape is not None and seconds > 0:
            self.costs.observe(StepShape(*step.shape), seconds)
        elif self._last_step_s is not None:
            seconds = min(MAX_STEP_S, now - self._last_step_s)
        self._last_step_s = now
        parts = []
        for progress in step.progress:
            if (held := self._by_key.get(progress.key)) is not None:
                num_prompt = 0 if held.is_running else max(0, len(held.resumption.prompt) // 4 - progress.num_cached)
                parts.append((held, num_prompt + max(1, len(progress.tokens) // 4)))
        total = sum(num for _, num in parts)
        for held, num in parts:
            held.service_s += seconds * num / total

    # --------------------------------------------------------------------------------------------------- views

    def held_requests(self) -> list[HeldRequest]:
        return [self.held_request(held) for held in self._held.values()]

    def held_request(self, held: Held) -> HeldRequest:
        return HeldRequest(
            request_id=held.request_id,
            gateway_id=held.request.gateway_id,
            epoch=held.request.epoch,
            model=self.model,
            num_tokens=held.num_tokens,
            running=held.is_running,
            is_online=held.is_online,
            tenant=held.request.tenant,
            tenant_weight=held.request.tenant_weight,
        )

    def all_held(self) -> list[Held]:
        """Lists all requests in the order in which they came."""
        return list(self._held.values())

    @property
    def used_share(self) -> float:
        """Used share of the KV blocks: what the engine says, else what those that run hold."""
        if self._used_share is not None and self._held:
            return self._used_share
        return min(1.0, self._blocks(held for held in self._held.values() if held.is_sent) / self.facts.num_blocks)

    def load(self, now: float) -> InstanceLoad:
        facts, held = self.facts, self._held.values()
        online = [one for one in held if one.is_online]
        running = [one for one in online if one.is_running]
        waiting = [one for one in online if not one.is_running]
        offline = [one for one in held if not one.is_online]
        high = [one for one in online if one.request.priority is Priority.HIGH]
        total, used, wanted = facts.num_blocks, self._blocks(running), self._blocks(waiting)
        kept = headroom(total, UNKNOWN_IDEAL_SHARE * total, self._blocks(high))
        usage = dispatch_virtual_usage(used, wanted, high_headroom=kept)
        head = self._blocks(waiting[:1])
        moving = migration_virtual_usage(used, head, high_headroom=kept, runs_normal=len(high) < len(running))
        step = max(len(running), 1 if waiting else 0) / facts.block_size
        cost = self.costs.cost_model
        prompt_cost = cost.prompt_cost if self.costs.is_known else (0.0, 0.0)
        num_running, free = sum(one.is_running for one in held), total * (1 - self.used_share)
        model = ModelLoad(
            model=self.model,
            num_running=num_running,
            num_waiting=len(held) - num_running,
            num_offline=len(offline),
            num_waiting_online=len(waiting),
            offline_room_tokens=self._offline_room(online, offline, free, now),
            prompt_cost=prompt_cost,
            decode_cost=self._decode_cost(running),
        )
        return InstanceLoad(
            dispatch_freeness=freeness(total, usage, len(running)),
            free_merged=free,
            num_running=num_running,
            models=(model,),
            dispatch_freeness_high=freeness(total, dispatch_virtual_usage(used, wanted), len(running)),
            migration_freeness=decode_steps(total - moving, step),
            scaling_freeness=decode_steps(total - usage, step),
            num_high=len(high),
            running_freeness=decode_steps(total - used, step),
            prompts_s=sum(prompt_s(prompt_cost, one.num_tokens) for one in waiting),
        )

    def _offline_room(self, online: Sequence[Held], offline: Sequence[Held], free: float, now: float) -> int:
        """Offline tokens that could be given beyond those held: what the free blocks hold or some seconds of work, whichever
        is less, and no more requests than there are rows."""
        facts = self.facts
        waits = [one for one in offline if not one.is_running]
        if not self._takes_all and any(not one.is_sent for one in online):
            return 0
        if len(offline) >= facts.max_running:
            return 0
        rate = self._offline_rate.per_second(now)
        if self.costs.is_known and not online:
            shape = StepShape(facts.max_step_tokens, facts.max_step_tokens**2 / 2)
            rate = max(rate, facts.max_step_tokens / self.costs.cost_model.predict(shape))
        by_time = max(int(rate * HOARD_S), facts.max_step_tokens)
        room = min(int(free * facts.block_size), by_time)
        return max(0, room - sum(one.num_tokens_at_most for one in waits))

    def _decode_cost(self, running: Sequence[Held]) -> tuple[float, float]:
        """`ModelLoad.decode_cost`."""
        if not self.costs.is_known:
            return 0.0, 0.0
        predict = self.costs.cost_model.predict
        one_s = predict(StepShape(0, 0.0, 1, 0))
        all_s = predict(StepShape(0, 0.0, 1 + len(running), sum(held.num_tokens for held in running)))
        return one_s, (all_s - one_s) / max(1, len(running))

    def _blocks(self, held: Iterable[Held]) -> int:
        return sum(-(-one.num_tokens // self.facts.block_size) for one in held)


def merged_bytes(facts: EngineFacts) -> int:
    """Bytes of a merged block, as the registry has them."""
    return max(1, facts.block_bytes)


def shortened(request: GenerationRequest, max_model_len: int) -> GenerationRequest:
    """The request with as many `max_tokens` as fit into the engine's longest sequence."""
    most = max_model_len - len(request.prompt) // 4
    if request.sampling.max_tokens <= most:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=most))
