"""One migration out of this instance: carries out what `shared.migration.source` decides.

From the moment at which the request has left its batch, nothing here waits for anything but the destination: room for the
last blocks was announced before, the transfer that carries them was opened during the last step, and Commit travels beside
them, to be answered when both are there.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from services.worker.migration.faults import FaultError, FaultPoint
from services.worker.migration.peer import Answer, Peer, Site, Stage
from services.worker.migration.telemetry import MOVED
from shared.engine.calls import DropMoved, EndMove, Pin, PinRest, PutBack, Seal, TakeOut, Unpin
from shared.engine.moving import MoveCandidate, PinnedBlocks, TakenOut
from shared.messages.cluster import InstanceInfo, MoveOutcome
from shared.messages.migration import AbortReason, MoveReason
from shared.messages.requests import GenerationRequest
from shared.migration.estimates import MARGIN_BLOCKS, Busy, Next, is_worth, next_stage
from shared.migration.source import LEAVE_S, Action, Event, SourceMove, State
from shared.tasks import TaskSet, set_within

log = logging.getLogger(__name__)

ACKNOWLEDGE_S = 0.5
"""For the transport's acknowledgement of blocks that the destination has confirmed by taking the request over."""


class OutgoingMigration:
    """`feed` and `on_taken_out` may be called at any time; `run` ends when the migration has."""

    def __init__(
        self,
        site: Site,
        candidate: MoveCandidate,
        request: GenerationRequest,
        page_tokens: int,
        destination: InstanceInfo,
        reason: MoveReason,
        on_over: Callable[[OutgoingMigration, MoveOutcome], None],
    ) -> None:
        """`request`: as it is held; `page_tokens`: of its model. `on_over`: called once, as soon as it is known who owns the
        request, before anything else can happen to it here."""
        self.migration_id = uuid.uuid4().hex
        self.request_id = request.request_id
        self.request = request
        self.destination = destination
        self.machine = SourceMove(request.epoch, site.loop.now())
        self.is_given_up = False
        """The process ends before it is known what became of the request."""
        self.is_disowned = False
        """The destination was lost after Commit had been sent to it."""
        self._site = site
        self._candidate = candidate
        self._model = request.model
        self._page_tokens = page_tokens
        self._reason = reason
        self._is_leaving = reason is MoveReason.DRAIN
        """An instance whose requests all go, so none of them has to be spared the work of copies."""
        self._on_over = on_over
        self._outcome: MoveOutcome | None = None
        attributes = {
            "tideway.migration_id": self.migration_id,
            "tideway.request_id": self.request_id,
            "tideway.instance_id": site.instance_id,
            "tideway.destination_id": destination.instance_id,
            "tideway.migration.reason": str(reason),
        }
        self._span = site.telemetry.span("migration", request.traceparent, attributes)
        max_tokens = candidate.request.num_tokens + candidate.tokens_left
        self._peer = Peer(site, self.migration_id, request, page_tokens, max_tokens, destination, self._span, reason)
        self._events: deque[Answer] = deque()
        self._is_feeding = False
        self._changed = asyncio.Event()
        self._tasks = TaskSet()
        self._copies = TaskSet()
        self._stages: list[Stage] = []
        self._num_copied = 0
        """Of the stages, those whose blocks are at the destination."""
        self._num_left = 0
        """Blocks that are not copied yet, the one being filled too."""
        self._previous_left_s: float | None = None
        self._busy = Busy()
        self._pinned: PinnedBlocks | None = None
        """Of the stage under way."""
        self._some_slot: list[int] = []
        """One of the request's, if it has any."""
        self.taken: TakenOut | None = None
        """The request as it left the batch."""
        self._took_out_s: float | None = None

    @property
    def _next_block(self) -> int:
        """Blocks before it are at the destination."""
        return sum(stage.num_blocks for stage in self._stages[: self._num_copied])

    # -------------------------------------------------------------------------------------------------- life

    async def run(self) -> MoveOutcome:
        """Until all of it has come to rest. Never raises for a failure of the migration."""
        self._site.telemetry.begin("out")
        try:
            self._decide()
            while not self.machine.is_over:
                self._changed.clear()
                left_s = max(0.0, self.machine.deadline_s() - self._site.loop.now())
                if not await set_within(self._changed, left_s):
                    self.feed(Event.TIMEOUT)
            if self.machine.state is State.MOVED:
                await self._copies.wait_all(ACKNOWLEDGE_S)
        except Exception:
            log.exception("migration %s of request %s failed here", self.migration_id, self.request_id)
            # As if the destination were lost: at any point this leaves the request to one owner, here.
            self.feed(Event.DESTINATION_LOST)
        finally:
            await self._tasks.end_all()
            await self._copies.end_all()
            for stage in self._stages:
                self._peer.end(stage)
            self._unpin()
            self._report()
        assert self._outcome is not None
        return self._outcome

    def _report(self) -> None:
        machine, telemetry, num_bytes = self.machine, self._site.telemetry, self._peer.num_bytes
        is_moved = machine.state is State.MOVED
        outcome = MOVED if is_moved else str(machine.reason or AbortReason.STOPPED)
        telemetry.end("out", str(self._reason), outcome)
        telemetry.on_bytes("out", num_bytes)
        if is_moved:
            telemetry.on_moved(machine.num_stages)
        self._span.end(
            {
                "tideway.migration.outcome": outcome,
                "tideway.migration.stages": machine.num_stages,
                "tideway.migration.bytes": num_bytes,
                "tideway.epoch": machine.epoch,
            }
        )

    def feed(self, event: Event, reason: AbortReason | None = None) -> None:
        """Acts on the event at once; one that comes out of acting on another follows it."""
        self._events.append(Answer(event, reason))
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                event, reason = self._events.popleft()
                copy_s = self._peer.copy_deadline_s(self._stages[-1] if self._stages else None)
                for action in self.machine.on(event, self._site.loop.now(), reason, copy_s=copy_s):
                    self._do(action)
                if self.machine.is_over and self._outcome is None:
                    self._outcome = self._make_outcome()
                    self._on_over(self, self._outcome)
        finally:
            self._is_feeding = False
            self._changed.set()

    def _make_outcome(self) -> MoveOutcome:
        machine, is_moved = self.machine, self.machine.state is State.MOVED
        reason = "" if is_moved else str(machine.reason)
        return MoveOutcome(self.request_id, self.destination.instance_id, machine.epoch, is_moved, reason)

    def _do(self, action: Action) -> None:
        loop = self._site.loop
        match action:
            case Action.DECIDE:
                self._decide()
            case Action.RESERVE:
                self._tasks.start(self._reserve(self._stages[-1]))
            case Action.COPY | Action.TAKE_OUT if not self._is_still_worth():
                self.feed(Event.FAILED, AbortReason.NOT_WORTH)
            case Action.COPY:
                self._copy()
            case Action.TAKE_OUT:
                self._took_out_s = loop.now()
                if not loop.apply(TakeOut(self.request_id)):
                    self._gone()
                    return
                for stage in self._stages[self._num_copied :]:
                    self._peer.begin(stage)
            case Action.COMMIT:
                self._commit()
            case Action.ASK:
                if self._site.is_there(self.destination):
                    self._tasks.start(self._fed(self._peer.ask(self.machine.epoch + 1)))
                else:
                    self.feed(Event.DESTINATION_LOST)
            case Action.ABORT:
                self._copies.cancel_all()
                if self._stages or self.taken is not None:
                    self._peer.abort(self.machine.reason or AbortReason.UNREACHABLE)
            case Action.END_MOVE:
                loop.apply(EndMove(self.request_id))
            case Action.PUT_BACK:
                loop.apply(PutBack(self.request_id))
                loop.apply(EndMove(self.request_id))  # where it could not be taken out
                self._end_pause()
            case Action.PUT_BACK_RAISED:
                loop.apply(PutBack(self.request_id, self.machine.epoch))
                self._end_pause()
            case Action.DISOWN:
                self.is_disowned = True
            case Action.DROP:
                self._drop()

    # --------------------------------------------------------------------------------- while it is in its batch

    def _decide(self) -> None:
        """Pins what is filled and says how to go on."""
        if not self._candidate.is_running:
            self.feed(Event.OUT)
            return
        self._unpin()
        first_block = self._next_block
        pinned = self._pinned = self._site.loop.apply(Pin(self.request_id, first_block))
        if pinned is None:
            self._gone()
            return
        slot_bytes = self._peer.slot_bytes(False)
        if slot_bytes is None or not self._peer.takes_kv:
            self.feed(Event.FAILED, AbortReason.UNREACHABLE)
            return
        num_filled = len(pinned.slots)
        self._some_slot = pinned.slots[-1:] or self._some_slot
        self._num_left = num_filled + 1
        left_s, step_s = self._copy_s(self._num_left), self._site.step_s(self._model)
        last_s = self._peer.copy_s(self._num_left * slot_bytes, is_urgent=True)
        # Full blocks may be at the destination already; the one being filled is not.
        if not self._num_copied and not self._is_worth(1):
            self.feed(Event.FAILED, AbortReason.NOT_WORTH)
            return
        is_in_prefill = self._is_in_prefill(first_block + num_filled)
        # What the step in flight computes of its prompt is filled only when that has ended.
        busy_s = (self._source_busy_s() if is_in_prefill else 0.0) or self._busy.left_s(self._site.loop.now())
        choice = next_stage(
            num_filled,
            left_s,
            self._previous_left_s,
            last_s,
            step_s,
            self._num_copied,
            self._site.max_stages,
            busy_s,
        )
        self._previous_left_s = left_s
        if choice is Next.WAIT and not self._wait(busy_s or 0.0):
            choice = Next.LAST if self._is_leaving else Next.NOT_WORTH
        if choice is Next.NOT_WORTH:
            self.feed(Event.FAILED, AbortReason.NOT_WORTH)
        elif choice is Next.STAGE:
            self._announce(num_filled, pinned.hashes, arrives_s=self._copy_s(num_filled))
            self.feed(Event.STAGE)
        elif choice is Next.WAIT:
            self.feed(Event.WAIT)
        elif is_in_prefill:
            # How much the next chunk fills shows when it has left.
            self.feed(Event.OUT)
        else:
            arrives_s = self._source_busy_s()
            num_blocks = num_filled + MARGIN_BLOCKS
            self._announce(num_blocks, pinned.hashes, begins_s=LEAVE_S, is_last=True, arrives_s=arrives_s)
            self.feed(Event.LAST)

    def _source_busy_s(self) -> float:
        now = self._site.loop.now()
        return self._site.loop.ask(lambda engine: engine.busy_s(now))

    def _wait(self, busy_s: float) -> bool:
        """Until a long step should have ended; False: it has been too long."""
        wait_s = self._busy.ask_after_s(busy_s, self._site.loop.now())
        if wait_s is None:
            return False

        async def wait() -> None:
            await asyncio.sleep(wait_s)
            self.feed(Event.DUE)

        self._tasks.start(wait())
        return True

    async def _reserve(self, stage: Stage) -> None:
        answer = await self._peer.reserve(stage)
        if stage.reserved is not None:
            self._busy.on_reserved(stage.reserved.busy_s, self._site.loop.now())
        self.feed(*answer)

    def _is_in_prefill(self, num_filled: int) -> bool:
        return self._candidate.request.num_tokens >= (num_filled + 2) * self._page_tokens

    def _is_worth(self, num_blocks: int) -> bool:
        """To copy so many."""
        return is_worth(self._copy_s(num_blocks), self._candidate.tokens_left, self._site.step_s(self._model))

    def _copy_s(self, num_blocks: int) -> float:
        """Beside the decode."""
        return self._peer.copy_s(num_blocks * (self._peer.slot_bytes(False) or 0), self._is_leaving)

    def _is_still_worth(self) -> bool:
        """To copy all, now that the answer to the first stage says what of it the destination has."""
        if len(self._stages) != 1 or (reserved := self._stages[0].reserved) is None:
            return True
        return self._is_worth(self._num_left - reserved.num_held)

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
        is_urgent = is_last or self._is_leaving
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

    def _copy(self) -> None:
        stage, pinned = self._stages[-1], self._pinned
        assert pinned is not None

        async def copy() -> None:
            answer = await self._peer.send(stage, pinned.slots)
            self._num_copied += answer.event is Event.COPIED
            self.feed(*answer)

        self._copies.start(copy())

    # ------------------------------------------------------------------------------------------------ the pause

    def on_taken_out(self, taken: TakenOut) -> None:
        """The request has left its batch."""
        if self.machine.state is not State.LEAVING or self.taken is not None:
            return
        if self._took_out_s is None or taken.taken_s < self._took_out_s:
            return
        self.taken = taken
        if taken.request.epoch != self.machine.epoch:
            # Placed here anew meanwhile: what runs now is not what this migration may hand over.
            self.feed(Event.GONE, AbortReason.ENDED)
            return
        if self._site.faults.has(FaultPoint.SOURCE_TAKEN_OUT):
            self._tasks.start(self._after_fault(FaultPoint.SOURCE_TAKEN_OUT, self._pin_rest))
        else:
            self._pin_rest()

    def _pin_rest(self) -> None:
        """What is left, now that it does not grow any more."""
        taken = self.taken
        if self.machine.state is not State.LEAVING or taken is None:
            return
        if any(self._peer.has_failed(stage) for stage in self._stages[self._num_copied :]):
            self.feed(Event.FAILED, AbortReason.TRANSFER_FAILED)
            return
        self._unpin()
        rest = self._pinned = self._site.loop.apply(PinRest(self.request_id, self._next_block))
        if rest is None:
            self._gone()
            return
        announced = sum(stage.num_blocks for stage in self._stages[self._num_copied :])
        if len(rest.slots) <= announced:
            self.feed(Event.TAKEN_OUT)
        elif not self._candidate.is_running and not rest.on_host:
            # It got its turn meanwhile: to copy all of it now would be a long pause.
            self.feed(Event.FAILED, AbortReason.NOT_WORTH)
        elif not self._peer.takes_kv:
            self.feed(Event.FAILED, AbortReason.UNREACHABLE)
        else:
            # Hashes of those that were announced went with them.
            self._announce(len(rest.slots) - announced, rest.hashes[16 * announced :], rest.on_host, is_last=True)
            self.feed(Event.TAKEN_OUT_SHORT)

    def _commit(self) -> None:
        taken = self.taken
        assert taken is not None
        if not self._site.loop.apply(Seal(self.request_id)):
            self._gone()
            return
        slots = [] if self._pinned is None else self._pinned.slots
        for stage in self._stages[self._num_copied :]:
            part, slots = slots[: stage.num_blocks], slots[stage.num_blocks :]
            # More was announced than is filled: what lies behind is never read before it is written.
            filler = part[-1:] or self._some_slot
            part = part + filler * (stage.num_blocks - len(part))
            self._copies.start(self._send_last(stage, part))
        self._tasks.start(self._hand_over(taken))

    async def _hand_over(self, taken: TakenOut) -> None:
        answer = await self._peer.commit(taken, self.machine.epoch + 1, self._stages)
        if answer == Answer(Event.COMMIT_REFUSED, AbortReason.REFUSED) and not self._candidate.is_running:
            # It would wait there as well; others may find room there.
            answer = answer._replace(reason=AbortReason.NOT_WORTH)
        self.feed(*answer)

    async def _send_last(self, stage: Stage, slots: list[int]) -> None:
        """That they are there shows in the answer to Commit."""
        answer = await self._peer.send(stage, slots)
        if answer.event is not Event.COPIED:
            self.feed(*answer)

    # ------------------------------------------------------------------------------------------------ how it ends

    def _drop(self) -> None:
        was_cancelled = self._site.loop.apply(DropMoved(self.request_id))
        self._end_pause()
        self.is_given_up = self.machine.state is not State.MOVED
        if was_cancelled and not self.is_given_up:
            self._peer.cancel(self.machine.epoch)

    def _gone(self) -> None:
        """The engine says that the request cannot move any more."""
        is_held = self._site.loop.held_epoch(self.request_id) is not None
        self.feed(Event.GONE, AbortReason.PREEMPTED if is_held else AbortReason.ENDED)

    def _end_pause(self) -> None:
        if self.taken is not None:
            self._site.telemetry.on_pause("source", self._site.loop.now() - self.taken.taken_s)

    # ------------------------------------------------------------------------------------------------ helpers

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._site.loop.apply(Unpin(self._pinned))
            self._pinned = None

    async def _fed(self, work: Coroutine[Any, Any, Answer]) -> None:
        self.feed(*await work)

    async def _after_fault(self, point: FaultPoint, then: Callable[[], None]) -> None:
        try:
            await self._site.faults.at(point)
        except FaultError:
            self.feed(Event.FAILED, AbortReason.UNREACHABLE)
        else:
            then()
