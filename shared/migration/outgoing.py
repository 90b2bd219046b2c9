"""One migration out of an instance: what `source.SourceMigration` decides, in terms of the engine here and of commands.

From the moment at which the request has left its batch, nothing here waits for anything but the destination: room for the
last blocks was announced before, the transfer that carries them was opened during the last step, and Commit travels beside
them, to be answered when both are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from shared.engine.calls import Detach, EndMigration, Freeze, Pin, PinRest, Reattach, Release, Unpin
from shared.engine.handover import Detached, MigrationCandidate, PinnedBlocks, rebased
from shared.messages.cluster import InstanceInfo, MigrationOutcome
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    Commit,
    Committed,
    MigrationReason,
    OwnsQuery,
    PreAllocate,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorCode, ErrorInfo, GenerationRequest
from shared.migration import commands
from shared.migration.commands import Command, Stage
from shared.migration.destination import IDLE_S
from shared.migration.estimates import (
    MARGIN_BLOCKS,
    Busy,
    Next,
    copy_deadline_s,
    copy_s,
    is_worth,
    next_of_handoff,
    next_stage,
)
from shared.migration.limits import pool_of
from shared.migration.questions import Around, BandwidthBytesS, BlockBytes, BusyS, HeldEpoch, LastChunks, RestOfPromptS
from shared.migration.source import (
    ASK_PAUSE_S,
    ASK_S,
    COMMIT_S,
    CONNECT_S,
    LEAVE_S,
    RESERVE_S,
    Action,
    Event,
    SourceMigration,
    State,
)

MOVED = "moved"
ACKNOWLEDGE_S = 0.5
"""Time for the transport's acknowledgement of blocks that the destination has confirmed by taking the request over."""
MAX_TRIES = 5
"""Tries to get room at a destination that says that it will have some soon."""
MAX_RETRY_S = 0.1
"""What counts as soon."""

HANDOFF_LOOK_S = 0.5
"""A prompt that is to be handed over is looked at so often while no chunk of it ends."""

_SOON = (ErrorCode.OVERLOADED, ErrorCode.LOADING)

_UNDECIDED = (ErrorCode.DEADLINE, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL)
"""Errors that do not say whether a Commit took effect."""
_REASONS = {
    ErrorCode.BAD_REQUEST: AbortReason.MISMATCH,
    ErrorCode.DEADLINE: AbortReason.DEADLINE,
    ErrorCode.UNAVAILABLE: AbortReason.UNREACHABLE,
    ErrorCode.INTERNAL: AbortReason.UNREACHABLE,
}
"""What an error of the destination means; REFUSED where it is none of these."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What migrations of an instance have in common."""

    instance_id: str
    around: Around
    address: str | None
    """Address of the transport; None: there is none, and only requests without KV move."""
    rate_share: float
    """Share of the bandwidth that copies may use for which nobody waits."""
    max_stages: int
    step_s: Callable[[str], float]
    """Mean seconds of a model's recent decode steps."""
    is_there: Callable[[InstanceInfo], bool]
    """Whether the registry still has that process."""
    say: Callable[[Command], None]

    def held_epoch(self, request_id: str) -> int | None:
        return self.around.ask(HeldEpoch(request_id))


class OutgoingMigration:
    def __init__(
        self,
        site: Site,
        migration_id: str,
        candidate: MigrationCandidate,
        request: GenerationRequest,
        block_size: int,
        destination: InstanceInfo,
        reason: MigrationReason,
        now: float,
    ) -> None:
        """`request`: as it is held; `block_size`: of its KV, in tokens."""
        self.migration_id = migration_id
        self.request_id = request.request_id
        self.request = request
        self.destination = destination
        self.machine = SourceMigration(request.epoch, now)
        self.outcome: MigrationOutcome | None = None
        """Outcome, set as soon as it is known whose the request is."""
        self.is_given_up = False
        """The process ends before that is known."""
        self.is_disowned = False
        """The destination was lost after Commit had been sent to it."""
        self.taken: Detached | None = None
        """The request as it left the batch."""
        self._site = site
        self._candidate = candidate
        self._model = request.model
        self._block_size = block_size
        self._reason = reason
        self._is_leaving = reason is MigrationReason.DRAIN
        """An instance whose requests all go, so none of them has to be spared the work of copies."""
        self._is_handoff = reason is MigrationReason.HANDOFF
        self._events: deque[tuple[Event, AbortReason | None]] = deque()
        self._is_feeding = False
        self._stages: list[Stage] = []
        self._num_copied = 0
        """Stages whose blocks are at the destination."""
        self._num_left = 0
        """Blocks that are not copied yet, the one being filled too."""
        self._previous_left_s: float | None = None
        self._busy = Busy()
        self._pinned: PinnedBlocks | None = None
        """Blocks of the stage under way."""
        self._some_block: list[int] = []
        """One of the request's, if it has any."""
        self._detached_s: float | None = None
        self._pause_s: float | None = None
        self._asked_s = 0.0
        """Time at which room for the last of the stages was asked for first."""
        self._num_tries = 0
        self._timer: tuple[float, Callable[[float], None]] | None = None

    @property
    def was_paused(self) -> bool:
        """Whether the request was detached from its batch."""
        return self._candidate.is_running and not self.machine.was_decoding

    @property
    def _next_block(self) -> int:
        """Blocks before it are at the destination."""
        return sum(stage.num_blocks for stage in self._stages[: self._num_copied])

    # ------------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> None:
        self._site.say(commands.BeginOut(self.migration_id, self.request, self.destination.instance_id, self._reason))
        self._decide(now)
        self._work_off(now)

    def feed(self, event: Event, now: float, reason: AbortReason | None = None) -> None:
        """Acts on the event at once; one that comes out of acting on another follows it."""
        self._events.append((event, reason))
        self._work_off(now)

    def _work_off(self, now: float) -> None:
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                event, reason = self._events.popleft()
                copy_s = self._copy_deadline_s(self._stages[-1] if self._stages else None)
                for action in self.machine.on(event, now, reason, copy_s=copy_s):
                    self._do(action, now)
        finally:
            self._is_feeding = False
        if self.machine.is_over and self.outcome is None:
            self._end()

    def next_wakeup(self) -> float | None:
        """Time at which `on_time` is due."""
        if self.machine.is_over:
            return None
        deadline_s = self.machine.deadline_s()
        return deadline_s if self._timer is None else min(deadline_s, self._timer[0])

    def on_time(self, now: float) -> None:
        if self._timer is not None and self._timer[0] <= now:
            (_, due), self._timer = self._timer, None
            due(now)
        if not self.machine.is_over and self.machine.deadline_s() <= now:
            self.feed(Event.TIMEOUT, now)

    def on_chunk(self, now: float) -> None:
        """A chunk of the prompt has ended that is to be handed over."""
        if self.machine.state is State.WAITING:
            self._timer = None
            self.feed(Event.DUE, now)

    def on_owned(self, owns: bool | None, now: float) -> None:
        """The answer to Owns; None: it does not say."""
        if owns is None:
            self._timer = now + ASK_PAUSE_S, partial(self.feed, Event.NO_ANSWER)
        else:
            self.feed(Event.OWNS_YES if owns else Event.OWNS_NO, now)

    def on_connected(self, stage: int, is_connected: bool, now: float) -> None:
        if stage != len(self._stages) - 1:
            return
        if is_connected:
            self.feed(Event.RESERVED, now)
        else:
            self.feed(Event.FAILED, now, AbortReason.UNREACHABLE)

    def on_sent(self, is_sent: bool, now: float) -> None:
        """What was sent of a stage is there, or will not be."""
        if not is_sent:
            self.feed(Event.COPY_FAILED, now)
        elif self.machine.state is State.COPYING:
            self._num_copied += 1
            self.feed(Event.COPIED, now)
        # That the last ones are there shows in the answer to Commit.

    def on_rest(self) -> None:
        """Nobody reads its blocks any more."""
        self._unpin()

    def _do(self, action: Action, now: float) -> None:
        engine = self._site.around
        match action:
            case Action.DECIDE:
                self._decide(now)
            case Action.RESERVE:
                self._asked_s, self._num_tries = now, 0
                self._ask_for_room(self._stages[-1], now)
            case Action.COPY | Action.DETACH if not self._is_still_worth():
                self.feed(Event.FAILED, now, AbortReason.NOT_WORTH)
            case Action.COPY:
                assert self._pinned is not None
                if not self._send(self._stages[-1], self._pinned.blocks):
                    self.on_sent(True, now)
            case Action.DETACH:
                self._detached_s = now
                if not engine.apply(Detach(self.request_id)):
                    self._gone(now)
                    return
                for stage in self._stages[self._num_copied :]:
                    if stage.num_held < stage.num_blocks:
                        pool, keeps_s = pool_of(self._model, stage.on_host), self._keeps_s(stage)
                        self._site.say(commands.BeginTransfer(self.migration_id, stage, pool, keeps_s))
            case Action.COMMIT:
                self._commit(now)
            case Action.ASK:
                if self._site.is_there(self.destination):
                    query = OwnsQuery(self.migration_id, self.request_id, self.machine.epoch + 1)
                    self._site.say(commands.Ask(self.migration_id, self.destination.instance_id, query, ASK_S))
                else:
                    self.feed(Event.DESTINATION_LOST, now)
            case Action.ABORT:
                self._site.say(commands.CancelTransfers(self.migration_id))
                if self._stages or self.taken is not None:
                    self._tell(AbortMigration(self.migration_id, self.machine.reason or AbortReason.UNREACHABLE))
            case Action.END_MIGRATION:
                engine.apply(EndMigration(self.request_id))
            case Action.REATTACH:
                engine.apply(Reattach(self.request_id))
                engine.apply(EndMigration(self.request_id))  # where it could not be detached
                self._end_pause(now)
            case Action.REATTACH_RAISED:
                engine.apply(Reattach(self.request_id, self.machine.epoch))
                self._end_pause(now)
            case Action.DISOWN:
                self.is_disowned = True
            case Action.DROP:
                self._drop(now)

    # --------------------------------------------------------------------------------- while it is in its batch

    def _decide(self, now: float) -> None:
        """Pins what is filled and says how to go on."""
        if not self._candidate.is_running:
            self.feed(Event.OUT, now)
            return
        self._unpin()
        first_block = self._next_block
        pinned = self._pinned = self._site.around.apply(Pin(self.request_id, first_block))
        if pinned is None:
            self._gone(now)
            return
        if not self._takes_kv or self._block_bytes(False) is None:
            self.feed(Event.FAILED, now, AbortReason.UNREACHABLE)
            return
        num_filled = len(pinned.blocks)
        self._some_block = pinned.blocks[-1:] or self._some_block
        self._num_left = num_filled + 1
        left_s, step_s = self._copy_s(self._num_left), self._site.step_s(self._model)
        last_s = self._copy_s(self._num_left, is_urgent=True)
        # Full blocks may be at the destination already; the one being filled is not.
        if not self._num_copied and not self._is_worth(1):
            self.feed(Event.FAILED, now, AbortReason.NOT_WORTH)
            return
        if self._is_handoff:
            self._decide_handoff(pinned, now)
            return
        is_in_prefill = self._is_in_prefill(first_block + num_filled)
        # What the step in flight computes of its prompt is filled only when that has ended.
        busy_s = (self._source_busy_s(now) if is_in_prefill else 0.0) or self._busy.left_s(now)
        choice = next_stage(
            num_filled, left_s, self._previous_left_s, last_s, step_s, self._num_copied, self._site.max_stages, busy_s
        )
        self._previous_left_s = left_s
        if choice is Next.WAIT and not self._wait(busy_s or 0.0, now):
            choice = Next.LAST if self._is_leaving else Next.NOT_WORTH
        if choice is Next.NOT_WORTH:
            self.feed(Event.FAILED, now, AbortReason.NOT_WORTH)
        elif choice is Next.STAGE:
            self._announce(num_filled, pinned.hashes, arrives_s=self._copy_s(num_filled))
            self.feed(Event.STAGE, now)
        elif choice is Next.WAIT:
            self.feed(Event.WAIT, now)
        elif is_in_prefill:
            # How much the next chunk fills shows when it has left.
            self.feed(Event.OUT, now)
        else:
            arrives_s = self._source_busy_s(now)
            num_blocks = num_filled + MARGIN_BLOCKS
            self._announce(num_blocks, pinned.hashes, begins_s=LEAVE_S, is_last=True, arrives_s=arrives_s)
            self.feed(Event.LAST, now)

    def _decide_handoff(self, pinned: PinnedBlocks, now: float) -> None:
        num_filled = len(pinned.blocks)
        match next_of_handoff(num_filled, self._site.around.ask(LastChunks(self.request_id))):
            case Next.STAGE:
                # The decoder computes prompts as without it until then.
                rest_s = self._site.around.ask(RestOfPromptS(self.request_id))
                self._announce(num_filled, pinned.hashes, arrives_s=self._source_busy_s(now) + rest_s)
                self.feed(Event.STAGE, now)
            case Next.WAIT:
                self._timer = now + HANDOFF_LOOK_S, partial(self.feed, Event.DUE)
                self.feed(Event.WAIT, now)
            case _:
                num_tokens = self._candidate.request.num_tokens
                num_left = max(num_filled, -(-num_tokens // self._block_size) - pinned.first_block)
                arrives_s = self._source_busy_s(now)
                num_blocks = num_left + MARGIN_BLOCKS
                self._announce(num_blocks, pinned.hashes, begins_s=LEAVE_S, is_last=True, arrives_s=arrives_s)
                self.feed(Event.LAST, now)

    def _source_busy_s(self, now: float) -> float:
        return self._site.around.ask(BusyS(now))

    def _wait(self, busy_s: float, now: float) -> bool:
        """Until a long step should have ended; False: it has been too long."""
        wait_s = self._busy.ask_after_s(busy_s, now)
        if wait_s is None:
            return False
        self._timer = now + wait_s, partial(self.feed, Event.DUE)
        return True

    def _is_in_prefill(self, num_filled: int) -> bool:
        return self._candidate.request.num_tokens >= (num_filled + 2) * self._block_size

    def _is_worth(self, num_blocks: int) -> bool:
        """Whether it is worth copying so many blocks."""
        candidate, step_s = self._candidate, self._site.step_s(self._model)
        return is_worth(self._copy_s(num_blocks), candidate.tokens_left, step_s, candidate.num_moves)

    def _is_still_worth(self) -> bool:
        """Whether it is worth copying all, now that the answer to the first stage says what of it the destination has."""
        if len(self._stages) != 1 or self._stages[0].reserved is None:
            return True
        return self._is_worth(self._num_left - self._stages[0].num_held)

    def _announce(
        self,
        num_blocks: int,
        hashes: bytes,
        on_host: bool = False,
        begins_s: float = 0.0,
        is_last: bool = False,
        arrives_s: float = 0.0,
    ) -> None:
        first_block = sum(stage.num_blocks for stage in self._stages)
        is_urgent = is_last or self._is_leaving or self._is_handoff
        number = len(self._stages)
        self._stages.append(
            Stage(
                number=number,
                first_block=first_block,
                num_blocks=num_blocks,
                hashes=hashes,
                on_host=on_host,
                begins_s=begins_s,
                is_urgent=is_urgent,
                arrives_s=arrives_s,
            )
        )

    def _ask_for_room(self, stage: Stage, now: float) -> None:
        site, request = self._site, self.request
        query = PreAllocate(
            migration_id=self.migration_id,
            source_id=site.instance_id,
            request_id=request.request_id,
            model=request.model,
            request_class=request.request_class,
            priority=request.priority,
            stage=stage.number,
            first_block=stage.first_block,
            num_blocks=stage.num_blocks,
            hashes=stage.hashes,
            block_size=self._block_size,
            block_bytes=self._block_bytes(stage.on_host) or 0,
            on_host=stage.on_host,
            max_tokens=self._candidate.request.num_tokens + self._candidate.tokens_left,
            deadline_s=self._keeps_s(stage),
            reason=self._reason,
            arrives_s=stage.arrives_s,
            source_address=site.address or "",
            adapter=request.adapter,
        )
        self._num_tries += 1
        left_s = max(0.0, self._asked_s + RESERVE_S - now)
        self._site.say(commands.Ask(self.migration_id, self.destination.instance_id, query, left_s))

    def on_room(self, number: int, reply: Reserved | ErrorInfo | None, now: float) -> None:
        """The answer to PreAllocate for the stage of that number."""
        stage = self._stages[-1]
        if number != stage.number or stage.reserved is not None or self.machine.is_over:
            return
        if isinstance(reply, Reserved):
            stage.reserved = reply
            self._busy.on_reserved(reply.busy_s, now)
            if reply.ticket and self._site.address is not None:
                self._site.say(commands.Connect(self.migration_id, stage, CONNECT_S))
            else:
                self.feed(Event.RESERVED, now)
            return
        if reply is None:
            self.feed(Event.FAILED, now, AbortReason.UNREACHABLE)
        elif reply.code not in _SOON or not 0 < reply.retry_after_s <= MAX_RETRY_S:
            self.feed(Event.FAILED, now, _REASONS.get(reply.code, AbortReason.REFUSED))
        elif self._num_tries >= MAX_TRIES or now + reply.retry_after_s >= self._asked_s + RESERVE_S:
            self.feed(Event.FAILED, now, AbortReason.REFUSED)
        else:
            self._timer = now + reply.retry_after_s, partial(self._ask_again, stage)

    def _ask_again(self, stage: Stage, now: float) -> None:
        if self.machine.state in (State.RESERVING, State.ANNOUNCING, State.EXTENDING):
            self._ask_for_room(stage, now)

    # ------------------------------------------------------------------------------------------------ the pause

    def on_detached(self, taken: Detached, now: float) -> None:
        """The request has left its batch."""
        if self.machine.state is not State.LEAVING or self.taken is not None:
            return
        if self._detached_s is None or taken.taken_s < self._detached_s:
            return
        self.taken = taken
        if taken.request.epoch != self.machine.epoch:
            # Placed here anew meanwhile: what runs now is not what this migration may hand over.
            self.feed(Event.GONE, now, AbortReason.ENDED)
            return
        self._unpin()
        # What is left, now that it does not grow any more.
        rest = self._pinned = self._site.around.apply(PinRest(self.request_id, self._next_block))
        if rest is None:
            self._gone(now)
            return
        announced = sum(stage.num_blocks for stage in self._stages[self._num_copied :])
        if len(rest.blocks) <= announced:
            self.feed(Event.DETACHED, now)
        elif not self._candidate.is_running and not rest.on_host:
            # It got its turn meanwhile: to copy all of it now would be a long pause.
            self.feed(Event.FAILED, now, AbortReason.NOT_WORTH)
        elif not self._takes_kv:
            self.feed(Event.FAILED, now, AbortReason.UNREACHABLE)
        else:
            # Hashes of those that were announced went with them.
            self._announce(len(rest.blocks) - announced, rest.hashes[16 * announced :], rest.on_host, is_last=True)
            self.feed(Event.DETACHED_SHORT, now)

    def _commit(self, now: float) -> None:
        taken, stages = self.taken, self._stages
        assert taken is not None
        if not self._site.around.apply(Freeze(self.request_id)):
            self._gone(now)
            return
        blocks = [] if self._pinned is None else self._pinned.blocks
        for stage in stages[self._num_copied :]:
            part, blocks = blocks[: stage.num_blocks], blocks[stage.num_blocks :]
            # More was announced than is filled: what lies behind is never read before it is written.
            filler = part[-1:] or self._some_block
            self._send(stage, part + filler * (stage.num_blocks - len(part)))
        request, progress = rebased(taken.request, taken.progress, now - taken.taken_s)
        request = msgspec.structs.replace(request, epoch=self.machine.epoch + 1)
        num_blocks, on_host = sum(stage.num_blocks for stage in stages), any(stage.on_host for stage in stages)
        commit = Commit(
            self.migration_id,
            self._site.instance_id,
            request,
            progress,
            num_blocks,
            on_host,
            self._candidate.starts_s,
            self._candidate.first_token_s,
        )
        timeout_s = COMMIT_S + self._copy_deadline_s(stages[-1] if stages else None)
        self._site.say(commands.Ask(self.migration_id, self.destination.instance_id, commit, timeout_s))

    def _send(self, stage: Stage, blocks: list[int]) -> bool:
        """`blocks`: one for each block of the stage; False: the destination has them all."""
        assert stage.reserved is not None and len(blocks) == stage.num_blocks
        missing = blocks[stage.num_held :]
        if missing:
            pool, timeout_s = pool_of(self._model, stage.on_host), self._copy_deadline_s(stage)
            self._site.say(
                commands.SendBlocks(self.migration_id, stage, pool, missing, timeout_s, self._keeps_s(stage))
            )
        return bool(missing)

    def on_committed(self, reply: Committed | ErrorInfo | None, now: float) -> None:
        """The answer to Commit."""
        if isinstance(reply, Committed):
            self.feed(Event.COMMITTED, now)
        elif reply is None or reply.code in _UNDECIDED:
            self.feed(Event.NO_ANSWER, now)
        else:
            reason = _REASONS.get(reply.code, AbortReason.REFUSED)
            if reason is AbortReason.REFUSED and not self._candidate.is_running:
                # It would wait there as well; others may find room there.
                reason = AbortReason.NOT_WORTH
            self.feed(Event.COMMIT_REFUSED, now, reason)

    # ------------------------------------------------------------------------------------------------ how it ends

    def _drop(self, now: float) -> None:
        was_cancelled = self._site.around.apply(Release(self.request_id))
        self._end_pause(now)
        self.is_given_up = self.machine.state is not State.MOVED
        if was_cancelled and not self.is_given_up:
            # The client does not want it any more. One that was placed anew there is not meant, hence the epoch.
            self._tell(Cancel(self.request_id, self.machine.epoch))

    def _gone(self, now: float) -> None:
        """The engine says that the request cannot move any more."""
        is_held = self._site.held_epoch(self.request_id) is not None
        self.feed(Event.GONE, now, AbortReason.PREEMPTED if is_held else AbortReason.ENDED)

    def _end_pause(self, now: float) -> None:
        if self.taken is not None:
            self._pause_s = now - self.taken.taken_s

    def _end(self) -> None:
        machine = self.machine
        is_migrated = machine.state is State.MOVED
        reason = "" if is_migrated else str(machine.reason or AbortReason.STOPPED)
        self.outcome = MigrationOutcome(
            self.request_id, self.destination.instance_id, machine.epoch, is_migrated, reason
        )
        if not self.is_given_up:
            self._site.say(commands.OutOver(self.migration_id, self.outcome, self.request, self.taken, self._pause_s))
        grace_s, how = (ACKNOWLEDGE_S, MOVED) if is_migrated else (0.0, reason)
        num_held = sum(stage.num_held for stage in self._stages)
        self._site.say(commands.WindUp(self.migration_id, grace_s, how, machine.num_stages, machine.epoch, num_held))

    # ------------------------------------------------------------------------------------------------ helpers

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._site.around.apply(Unpin(self._pinned))
            self._pinned = None

    def _tell(self, message: AbortMigration | Cancel) -> None:
        self._site.say(commands.Tell(self.migration_id, self.destination.instance_id, message))

    @property
    def _takes_kv(self) -> bool:
        return self._site.address is not None and bool(self.destination.kv_address)

    def _block_bytes(self, on_host: bool) -> int | None:
        return self._site.around.ask(BlockBytes(pool_of(self._model, on_host)))

    def _bytes_s(self, num_bytes: int, is_urgent: bool) -> float:
        bandwidth = self._site.around.ask(BandwidthBytesS(self.destination.kv_address))
        return copy_s(num_bytes, bandwidth, 1.0 if is_urgent else self._site.rate_share)

    def _copy_s(self, num_blocks: int, is_urgent: bool = False) -> float:
        """Time to copy so many blocks; beside the decode where it is not urgent."""
        is_urgent = is_urgent or self._is_leaving or self._is_handoff
        return self._bytes_s(num_blocks * (self._block_bytes(False) or 0), is_urgent)

    def _copy_deadline_s(self, stage: Stage | None) -> float:
        """How long the copy of a stage may take."""
        if stage is None:
            return copy_deadline_s(0.0)
        return copy_deadline_s(self._bytes_s(stage.num_blocks * (self._block_bytes(stage.on_host) or 0), False))

    def _keeps_s(self, stage: Stage) -> float:
        """How long a stage's room is kept."""
        return stage.begins_s + max(IDLE_S, self._copy_deadline_s(stage))
