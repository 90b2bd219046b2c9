"""Migrations in virtual time: what the instance's migration service does (services/worker/migration), with the same engine
calls and the same estimates; a copy takes its bytes over the rate, a message `CONTROL_S`. Nothing is ever lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import msgspec

from shared.engine.calls import Adopt, DropMoved, EndMove, Pin, PinRest, PutBack, Release, Reserve, Seal, TakeOut, Unpin
from shared.engine.moving import MoveCandidate, PinnedBlocks, TakenOut, rebased
from shared.messages.cluster import MoveOutcome
from shared.messages.migration import (
    AbortReason,
    Commit,
    MoveReason,
    PreAllocate,
    Rebalance,
)
from shared.messages.requests import ErrorInfo, HeldRequest
from shared.migration.estimates import MARGIN_BLOCKS, Busy, Next, copy_s, is_worth, next_stage
from shared.migration.limits import max_at_once
from shared.migration.source import may_move
from shared.settings import InstanceSettings
from shared.simulation.fleet import CONTROL_S, Fleet, Instance

POLL_S = 0.02
RETRY_S = 0.5
"""As the migration service has them."""
MAX_STAGES = InstanceSettings().migration_max_stages


class Movers:
    """Of all instances."""

    def __init__(self, fleet: Fleet, max_migrations: int = InstanceSettings().max_migrations) -> None:
        """`max_migrations`: out of an instance at once, and into it."""
        self.events, self.journal, self.instances = fleet.events, fleet.gateway, fleet.instances
        self.max_migrations = max_migrations
        self.num_in: dict[str, int] = {}
        self.ids = count()
        self.outcomes: dict[str, int] = {}
        """How migrations ended: "moved", "moved waiting" or an `AbortReason` -> how many."""
        self.num_bytes = 0
        self.num_stages = 0
        self._givers: dict[str, Giver] = {}

    def on_rebalance(self, instance_id: str, rebalance: Rebalance) -> None:
        if instance_id not in self.instances:
            return
        giver = self._givers.get(instance_id)
        if giver is None:
            giver = self._givers[instance_id] = Giver(self, self.instances[instance_id])
        giver.on_rebalance(rebalance)


class Giver:
    """Gives requests of one instance away while a Rebalance holds."""

    def __init__(self, movers: Movers, instance: Instance) -> None:
        self._movers, self._instance, self._events = movers, instance, movers.events
        self._lease: Rebalance | None = None
        self._until_s = 0.0
        self._moves: dict[str, Move] = {}
        self._failed_until_s: dict[str, float] = {}
        self._stays_until_s: dict[str, float] = {}
        self._is_polling = False
        instance.on_taken_out = self._on_taken_out
        instance.on_ended = self._on_ended

    def on_rebalance(self, rebalance: Rebalance) -> None:
        self._lease = rebalance if rebalance.destinations else None
        self._until_s = self._events.now + rebalance.lease_s
        self.look()

    def look(self) -> None:
        """Begins what may begin now, and looks again soon for as long as the lease holds."""
        while self._lease is not None and self._events.now < self._until_s and self._begin_one(self._lease):
            pass
        if self._lease is not None and self._events.now < self._until_s and not self._is_polling:
            self._is_polling = True
            self._events.after(POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        self.look()

    def _begin_one(self, lease: Rebalance) -> bool:
        movers, now = self._movers, self._events.now
        if len(self._moves) >= min(lease.max_concurrent, max_at_once(lease.reason, movers.max_migrations)):
            return False
        takers = [
            movers.instances[name]
            for name in lease.destinations
            if name in movers.instances and self._failed_until_s.get(name, 0.0) <= now
        ]
        takers = [taker for taker in takers if taker.state == "ready" and taker is not self._instance]
        if not takers:
            return False
        include_offline = lease.reason is MoveReason.DRAIN
        for candidate in self._instance.engine.move_candidates(now, include_offline):
            request_id = candidate.request.request_id
            stays = self._stays_until_s.get(request_id, 0.0) > now
            if request_id not in self._moves and not stays and may_move(candidate.request.epoch):
                move = self._moves[request_id] = Move(
                    movers, self._instance, candidate, takers[0], lease.reason, self._on_over
                )
                move.decide()
                return True
        return False

    def _on_over(self, move: Move, reason: AbortReason | None) -> None:
        del self._moves[move.request_id]
        if reason in (AbortReason.REFUSED, AbortReason.MISMATCH):
            self._failed_until_s[move.taker.instance_id] = self._events.now + RETRY_S
        elif reason is not None:
            self._stays_until_s[move.request_id] = self._events.now + RETRY_S
        self._events.after(0.0, self.look)

    def _on_taken_out(self, taken: TakenOut) -> None:
        if (move := self._moves.get(taken.request_id)) is not None:
            self._events.after(0.0, move.on_taken_out, taken)

    def _on_ended(self, request_id: str) -> None:
        if (move := self._moves.get(request_id)) is not None:
            move.on_ended()


class Move:
    """One migration. `on_over(move, reason)`: reason is None if it moved."""

    def __init__(
        self,
        movers: Movers,
        source: Instance,
        candidate: MoveCandidate,
        taker: Instance,
        reason: MoveReason,
        on_over: Callable[[Move, AbortReason | None], None],
    ) -> None:
        self.request_id = candidate.request.request_id
        self.taker = taker
        self._reason = reason
        self._movers, self._source, self._candidate, self._on_over = movers, source, candidate, on_over
        self._events, self._device = movers.events, source.device
        self._id = str(next(movers.ids))
        sequence = source.engine.held(self.request_id)
        assert sequence is not None
        self._request = sequence.request
        self._shape = source.models[sequence.model].shape
        self._block_bytes = source.device.merged_bytes // self._shape.slots_per_merged
        self._pinned: PinnedBlocks | None = None
        self._next_block = 0
        self._announced = 0
        """Blocks that the destination has reserved, copied or not."""
        self._num_stages = 0
        self._num_copied_stages = 0
        self._previous_left_s: float | None = None
        self._busy = Busy()
        self._is_holding = False
        """The destination has, or will have, something reserved."""
        self._is_sealed = False
        self._is_over = False

    # --------------------------------------------------------------------------------- while it is in its batch

    def decide(self) -> None:
        if self._is_over:
            return
        engine, now = self._source.engine, self._events.now
        if not self._candidate.is_running:
            self._take_out()
            return
        self._unpin()
        pinned = self._pinned = engine.apply(Pin(self.request_id, self._next_block), 0.0)
        if pinned is None:
            self._gone()
            return
        left_s = self._copy_s(len(pinned.slots) + 1, self._rate_share)
        step_s = self._source.step_s
        if not self._num_copied_stages and not is_worth(left_s, self._candidate.tokens_left, step_s):
            self._stay(AbortReason.NOT_WORTH)
            return
        num_filled = (pinned.first_block + len(pinned.slots)) * self._shape.page_tokens
        is_in_prefill = self._candidate.request.num_tokens >= num_filled + 2 * self._shape.page_tokens
        # What the step in flight computes of its prompt is filled only when that has ended.
        busy_s = (engine.busy_s(now) if is_in_prefill else 0.0) or self._busy.left_s(now)
        choice = next_stage(
            len(pinned.slots), left_s, self._previous_left_s, self._copy_s(len(pinned.slots) + 1, 1.0), step_s,
            self._num_copied_stages, MAX_STAGES, busy_s,
        )  # fmt: skip
        wait_s = self._busy.ask_after_s(busy_s or 0.0, now) if choice is Next.WAIT else None
        if choice is Next.WAIT and wait_s is None:
            choice = Next.LAST if self._source.state == "draining" else Next.NOT_WORTH
        self._previous_left_s = left_s
        if choice is Next.NOT_WORTH:
            self._stay(AbortReason.NOT_WORTH)
        elif choice is Next.STAGE:
            arrives_s = self._copy_s(len(pinned.slots), self._rate_share)
            self._reserve(len(pinned.slots), pinned.hashes, now, self._copy, arrives_s)
        elif wait_s is not None:
            self._events.after(wait_s, self.decide)
        elif is_in_prefill:
            self._take_out()
        else:
            arrives_s = engine.busy_s(now)
            self._reserve(len(pinned.slots) + MARGIN_BLOCKS, pinned.hashes, now, self._take_out, arrives_s)

    def _reserve(
        self, num_blocks: int, hashes: bytes, now: float, then: Callable[[], None], arrives_s: float = 0.0
    ) -> None:
        request = self._request
        query = PreAllocate(
            migration_id=self._id, source_id=self._source.instance_id, request_id=self.request_id, model=request.model,
            request_class=request.request_class, priority=request.priority, stage=self._num_stages,
            first_block=self._announced, num_blocks=num_blocks, hashes=hashes, page_tokens=self._shape.page_tokens,
            slot_bytes=self._block_bytes, reason=self._reason, arrives_s=arrives_s,
            max_tokens=self._candidate.request.num_tokens + self._candidate.tokens_left,
        )  # fmt: skip
        self._num_stages += 1
        self._events.after(CONTROL_S, self._on_pre_allocate, query, then)

    def _on_pre_allocate(self, query: PreAllocate, then: Callable[[], None]) -> None:
        """At the destination."""
        if self._is_over:
            return
        taker, name = self.taker, self.taker.instance_id
        refused = taker.state != "ready"
        if not self._is_holding:
            refused = refused or self._movers.num_in.get(name, 0) >= max_at_once(
                query.reason, self._movers.max_migrations
            )
        if not refused:
            refused = isinstance(taker.engine.apply(Reserve(query), self._events.now), ErrorInfo)
        if refused:
            self._events.after(CONTROL_S, self._stay, AbortReason.REFUSED)
            return
        if not self._is_holding:
            self._is_holding = True
            self._movers.num_in[name] = self._movers.num_in.get(name, 0) + 1
        self._announced += query.num_blocks
        taker.wake()
        self._events.after(CONTROL_S, self._on_reserved, taker.engine.busy_s(self._events.now), then)

    def _on_reserved(self, busy_s: float, then: Callable[[], None]) -> None:
        self._busy.on_reserved(busy_s, self._events.now)
        then()

    def _copy(self) -> None:
        if not self._is_over:
            assert self._pinned is not None
            self._begin_transfer(len(self._pinned.slots), self._rate_share, self._on_copied)

    def _on_copied(self) -> None:
        self._end_transfer()
        if not self._is_over:
            self._next_block = self._announced
            self._num_copied_stages += 1
            self.decide()

    # ------------------------------------------------------------------------------------------------ the pause

    def _take_out(self) -> None:
        if self._is_over:
            return
        if not self._source.engine.apply(TakeOut(self.request_id), self._events.now):
            self._gone()
            return
        self._source.wake()

    def on_taken_out(self, taken: TakenOut) -> None:
        if self._is_over:
            return
        if self._candidate.is_running:
            tokens = (len(taken.request.prompt) + len(taken.request.prior)) // 4
            self._movers.journal.on_taken_out(self.request_id, tokens, self._source.step_s)
        self._unpin()
        rest = self._pinned = self._source.engine.apply(PinRest(self.request_id, self._next_block), 0.0)
        if rest is None and taken.progress.num_computed:
            self._gone()
            return
        num_left = 0 if rest is None else len(rest.slots)
        missing = num_left - (self._announced - self._next_block)
        if missing <= 0:
            self._commit(taken, num_left)
        elif not self._candidate.is_running:
            self._stay(AbortReason.NOT_WORTH)
        else:
            assert rest is not None
            hashes = rest.hashes[16 * (num_left - missing) :]
            self._reserve(missing, hashes, self._events.now, lambda: self._commit(taken, num_left))

    def _commit(self, taken: TakenOut, num_left: int) -> None:
        if self._is_over:
            return
        if not self._source.engine.apply(Seal(self.request_id), 0.0):
            self._gone()
            return
        self._is_sealed = True
        request, progress = rebased(taken, self._events.now)
        request = msgspec.structs.replace(request, epoch=request.epoch + 1)
        commit = Commit(self._id, self._source.instance_id, request, progress, self._announced)
        # Commit travels beside the last blocks, and is answered when both are there.
        if num_left:
            num_sent = self._announced - self._next_block
            self._begin_transfer(num_sent, 1.0, lambda: self._on_last_copied(commit), CONTROL_S)
        else:
            self._events.after(CONTROL_S, self._on_commit, commit)

    def _on_last_copied(self, commit: Commit) -> None:
        self._end_transfer()
        self._on_commit(commit)

    def _on_commit(self, commit: Commit) -> None:
        """At the destination."""
        taker = self.taker
        refused = taker.engine.apply(Adopt(commit), self._events.now) if taker.state == "ready" else True
        if refused is not None:
            reason = AbortReason.REFUSED if self._candidate.is_running else AbortReason.NOT_WORTH
            self._events.after(CONTROL_S, self._stay, reason)
            return
        self._let_go()
        held = commit.request
        num_tokens = (len(held.prompt) + len(held.prior)) // 4
        taker.report_moved_in(
            HeldRequest(
                request_id=held.request_id, gateway_id=held.gateway_id, epoch=held.epoch, model=held.model,
                num_tokens=num_tokens, running=True,
            )
        )  # fmt: skip
        self._events.after(CONTROL_S, self._on_committed, held.epoch)

    def _on_committed(self, epoch: int) -> None:
        self._is_over = True
        self._unpin()
        self._source.engine.apply(DropMoved(self.request_id), self._events.now)
        self._movers.journal.on_moved(self.request_id)
        self._movers.num_stages += self._num_stages
        self._count("moved" if self._candidate.is_running else "moved waiting")
        self._source.report_move(MoveOutcome(self.request_id, self.taker.instance_id, epoch, True))
        self._on_over(self, None)

    # ---------------------------------------------------------------------------------------------- how it ends

    def on_ended(self) -> None:
        """The request ended at the source."""
        if not self._is_over:
            self._stay(AbortReason.ENDED)

    def _gone(self) -> None:
        is_held = self._source.engine.held(self.request_id) is not None
        self._stay(AbortReason.PREEMPTED if is_held else AbortReason.ENDED)

    def _stay(self, reason: AbortReason) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._unpin()
        engine, now = self._source.engine, self._events.now
        engine.apply(PutBack(self.request_id), now)
        engine.apply(EndMove(self.request_id), now)
        self._source.wake()
        if self._is_holding:
            self._events.after(CONTROL_S, self._release)
        self._count(str(reason))
        self._source.report_move(
            MoveOutcome(self.request_id, self.taker.instance_id, self._request.epoch, False, str(reason))
        )
        self._on_over(self, reason)

    def _release(self) -> None:
        self.taker.engine.apply(Release(self._id), 0.0)
        self._let_go()

    def _let_go(self) -> None:
        if self._is_holding:
            self._is_holding = False
            self._movers.num_in[self.taker.instance_id] -= 1
        self.taker.wake()

    # ------------------------------------------------------------------------------------------------- helpers

    @property
    def _rate_share(self) -> float:
        """Of copies beside the decode."""
        return 1.0 if self._source.state == "draining" else self._device.rate_share

    def _copy_s(self, num_blocks: int, rate_share: float) -> float:
        device = self._device
        return copy_s(num_blocks * self._block_bytes, device.bandwidth_bytes_s, rate_share)

    def _begin_transfer(
        self, num_blocks: int, rate_share: float, then: Callable[[], None], at_least_s: float = 0.0
    ) -> None:
        """Migrations out of the instance share its rate."""
        self._source.num_transfers += 1
        self.taker.num_transfers += 1
        self._movers.num_bytes += num_blocks * self._block_bytes
        seconds = self._copy_s(num_blocks, rate_share) * max(1, self._source.num_out)
        self._source.num_out += 1
        self._events.after(max(at_least_s, seconds), then)

    def _end_transfer(self) -> None:
        self._source.num_transfers -= 1
        self._source.num_out -= 1
        self.taker.num_transfers -= 1

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._source.engine.apply(Unpin(self._pinned), 0.0)
            self._pinned = None

    def _count(self, outcome: str) -> None:
        self._movers.outcomes[outcome] = self._movers.outcomes.get(outcome, 0) + 1
