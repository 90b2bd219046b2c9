"""Copies of an instance's KV blocks at other instances, its holders, as their source decides on them. No I/O; times are
arguments.

    IDLE --ASK--> ASKING --ROOM--> SENDING --SENT--> IDLE
                    |                 '--NOT_SENT--> IDLE     the holder is left out for a while
                    |--NONE--> IDLE                           it has all of them, or none of those before them
                    '--REFUSED--> IDLE                        the holder is left out for a while

One transfer is under way at a time, and none begins beside a move. It carries what is missing of any number of requests of
one model, full blocks alone, to the instance that holds their blocks before these. Nothing depends on it: whatever is lost
is copied again, or computed again after the loss of the instance.

A holder keeps copies for as long as it is told that they are wanted (`KEEP_S`); it is told of all of them at once, and for a
while after the last (`FAREWELL_S`), so that nothing is left over when such a message is lost. Who holds what, the scheduler
knows from the holders' own reports of the blocks that can be found there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum

import msgspec

from shared.engine.calls import PinFilled, Unpin
from shared.engine.handover import BackupCandidate, PinnedBlocks
from shared.messages.migration import BackUp, BackupPart, BackupRooms, KeepBackups
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.migration import commands
from shared.migration.estimates import copy_deadline_s, copy_s
from shared.migration.limits import can_take, pool_of
from shared.migration.outgoing import Site
from shared.migration.questions import (
    BackupCandidates,
    BandwidthBytesS,
    BlockBytes,
    Held,
    HeldAmong,
    NewId,
    Peer,
    Peers,
)
from shared.migration.source import RESERVE_S
from shared.policies.kv_backup import TRANSFER_BYTES, BackupSettings, backup_key, choose_holders, holder_of

LOOK_S = 0.25
"""Between two looks at what is missing, and so between two transfers where little is."""
KEEP_S = 2.0
"""Between two messages that say what is still wanted."""
FAREWELL_S = 5 * KEEP_S
"""Time for which it is said again that nothing is wanted any more."""
HOLDERS_S = 60.0
"""Time for which holders are chosen from what the registry had; `UNKNOWN_S` where it had none."""
UNKNOWN_S = 1.0
UNREACHABLE_S, FULL_S = 5.0, 30.0
"""A holder is left out for so long after a failure, and after it had no room."""


class State(StrEnum):
    IDLE = "idle"
    ASKING = "asking"
    SENDING = "sending"


class Event(StrEnum):
    ASK = "ask"
    ROOM = "room"
    """The holder has room for blocks that are to be sent."""
    NONE = "none"
    """Nothing is to be sent."""
    REFUSED = "refused"
    """Or no answer came."""
    SENT = "sent"
    NOT_SENT = "not_sent"


TABLE: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.ASK): State.ASKING,
    (State.ASKING, Event.ROOM): State.SENDING,
    (State.ASKING, Event.NONE): State.IDLE,
    (State.ASKING, Event.REFUSED): State.IDLE,
    (State.SENDING, Event.SENT): State.IDLE,
    (State.SENDING, Event.NOT_SENT): State.IDLE,
}
"""What is not in it cannot be."""


class _Copied(msgspec.Struct):
    """How much of a request somebody has a copy of."""

    holder_id: str
    epoch: int
    model: str
    num_blocks: int = 0


class _Transfer(msgspec.Struct):
    """The one that is under way."""

    backup_id: str
    holder_id: str
    model: str
    pinned: dict[str, PinnedBlocks]
    """By request, in the order of the parts."""
    taken: dict[str, int] = {}
    """By request: how many of these the holder takes."""
    num_sent: int = 0
    num_bytes: int = 0
    """Bytes of the blocks that are sent."""


class BackupSource:
    """Copies of what an instance computes, at others."""

    def __init__(self, site: Site, settings: BackupSettings) -> None:
        self._site = site
        self._settings = settings
        self.state = State.IDLE
        self.num_missing = 0
        """Blocks without a copy, at the last look."""
        self._copied: dict[str, _Copied] = {}
        """By request."""
        self._holders: dict[str, tuple[float, list[str]]] = {}
        """By model: until when they are used, and who."""
        self._left_out: dict[str, float] = {}
        """Holders, and until when."""
        self._told: dict[str, float] = {}
        """Holders that may still keep something for this instance, and when something was last wanted there."""
        self._transfer: _Transfer | None = None
        self._look_s: float | None = None
        self._keep_s: float | None = None

    @property
    def num_requests(self) -> int:
        """Requests with copies elsewhere."""
        return sum(copied.num_blocks > 0 for copied in self._copied.values())

    @property
    def is_on(self) -> bool:
        return self._settings.classes != "off" and self._site.address is not None

    def holder(self, request_id: str) -> str | None:
        """Who has copies of the request's blocks."""
        copied = self._copied.get(request_id)
        return None if copied is None or not copied.num_blocks else copied.holder_id

    # ---------------------------------------------------------------------------------------------------- time

    def on_step(self, now: float) -> None:
        """A step has ended: blocks may have become full."""
        if self._look_s is None and self.is_on:
            self._look_s = now + LOOK_S

    def next_wakeup(self) -> float | None:
        due = [at for at in (self._look_s, self._keep_s) if at is not None]
        return min(due, default=None)

    def on_time(self, now: float, may_begin: bool) -> None:
        """`may_begin`: nothing else moves, and this instance is to stay."""
        if self._keep_s is not None and self._keep_s <= now:
            self._keep(now)
        if self._look_s is not None and self._look_s <= now:
            self._look_s = now + LOOK_S
            if may_begin and self.state is State.IDLE:
                self._look(now)

    def _to(self, event: Event) -> None:
        self.state = TABLE[self.state, event]

    # ----------------------------------------------------------------------------------------- what is wanted

    def _keep(self, now: float) -> None:
        """Forgets what has ended here, and tells holders what is still wanted."""
        held = set(self._site.around.ask(HeldAmong([*self._copied])))
        self._copied = {request_id: copied for request_id, copied in self._copied.items() if request_id in held}
        kept = defaultdict[str, list[str]](list)
        for request_id, copied in self._copied.items():
            kept[copied.holder_id].append(request_id)
        # What a transfer brings is kept, even if its requests have ended before it.
        coming = () if self._transfer is None else (self._transfer.holder_id,)
        self._told |= dict.fromkeys((*kept, *coming), now)
        for holder_id in sorted(self._told):
            message = KeepBackups(self._site.instance_id, tuple(kept.get(holder_id, ())))
            self._site.say(commands.Tell("", holder_id, message))
        self._told = {holder_id: at_s for holder_id, at_s in self._told.items() if now - at_s < FAREWELL_S}
        self._keep_s = now + KEEP_S if self._told else None

    def end(self, now: float) -> None:
        """The instance ends: what it still has may need its copies, the rest has moved or ended."""
        if self._told:
            self._keep(now)

    # ------------------------------------------------------------------------------------------ one transfer

    def _look(self, now: float) -> None:
        """Begins a transfer, if something is missing somewhere."""
        candidates = self._site.around.ask(BackupCandidates(*self._settings))
        missing = [(one, self._num_missing(one)) for one in candidates]
        self.num_missing = sum(num_missing for _, num_missing in missing)
        if not candidates and not self._copied:
            self._look_s = None  # until a step ends
        ordered = sorted((pair for pair in missing if pair[1]), key=lambda pair: backup_key(*pair))
        placed = [(one, holder_id) for one, _ in ordered if (holder_id := self._holder_for(one, now)) is not None]
        if not placed:
            return
        first, holder_id = placed[0]
        self._begin([one for one, other in placed if (one.model, other) == (first.model, holder_id)], holder_id, now)

    def _num_missing(self, one: BackupCandidate) -> int:
        copied = self._copied.get(one.request_id)
        if copied is not None and copied.epoch != one.epoch:
            # Another placement, which may have other tokens; the holder finds what is the same.
            copied.epoch, copied.num_blocks = one.epoch, 0
        return max(0, one.num_filled - (0 if copied is None else copied.num_blocks))

    def _holder_for(self, one: BackupCandidate, now: float) -> str | None:
        """None: nobody can have copies of it now."""
        copied = self._copied.get(one.request_id)
        if copied is not None:
            return copied.holder_id if self._left_out.get(copied.holder_id, 0.0) <= now else None
        holders = [name for name in self._holders_of(one.model, now) if self._left_out.get(name, 0.0) <= now]
        return holder_of(one.request_id, holders)

    def _holders_of(self, model: str, now: float) -> list[str]:
        until_s, holders = self._holders.get(model, (0.0, []))
        if now < until_s:
            return holders
        here, peers = self._site.around.ask(Peer(self._site.instance_id)), self._site.around.ask(Peers())
        able = [
            (info.instance_id, info.node_id)
            for info in peers
            if info.instance_id != self._site.instance_id and info.takes_roles and can_take(info, {model})
        ]
        holders = choose_holders(self._site.instance_id, "" if here is None else here.node_id, able)
        if holders:
            there = {info.instance_id for info in peers}
            self._forget_holders(there.__contains__)
        self._holders[model] = now + (HOLDERS_S if holders else UNKNOWN_S), holders
        return holders

    def _begin(self, candidates: list[BackupCandidate], holder_id: str, now: float) -> None:
        """Asks the holder to take the next blocks of these requests, as many as travel at once."""
        site, model = self._site, candidates[0].model
        pool = pool_of(model, False)
        block_bytes, held = site.around.ask(BlockBytes(pool)), site.around.ask(Held(candidates[0].request_id))
        if block_bytes is None or held is None:
            return
        left = max(1, TRANSFER_BYTES // block_bytes)
        transfer = _Transfer(site.around.ask(NewId()), holder_id, model, {})
        for one in candidates:
            copied = self._copied.get(one.request_id, _Copied(holder_id, one.epoch, model))
            pinned = site.around.apply(PinFilled(one.request_id, copied.num_blocks, left))
            if pinned is not None and pinned.blocks:
                self._copied[one.request_id] = copied
                transfer.pinned[one.request_id] = pinned
                left -= len(pinned.blocks)
            if not left:
                break
        if not transfer.pinned:
            return
        self._transfer = transfer
        self._to(Event.ASK)
        if self._keep_s is None:
            self._keep_s = now + KEEP_S
        query = BackUp(
            backup_id=transfer.backup_id,
            source_id=site.instance_id,
            model=model,
            parts=tuple(
                BackupPart(request_id, pinned.first_block, pinned.hashes)
                for request_id, pinned in transfer.pinned.items()
            ),
            block_size=held.block_size,
            block_bytes=block_bytes,
            deadline_s=RESERVE_S + self._deadline_s(transfer, block_bytes),
            source_address=site.address or "",
        )
        self._told[holder_id] = now
        site.say(commands.AskBackup(transfer.backup_id, holder_id, query, RESERVE_S))

    def _deadline_s(self, transfer: _Transfer, block_bytes: int) -> float:
        num_bytes = block_bytes * sum(len(pinned.blocks) for pinned in transfer.pinned.values())
        info = self._site.around.ask(Peer(transfer.holder_id))
        address = "" if info is None else info.kv_address
        bandwidth = self._site.around.ask(BandwidthBytesS(address))
        return copy_deadline_s(copy_s(num_bytes, bandwidth, self._site.rate_share))

    def on_rooms(self, backup_id: str, reply: BackupRooms | ErrorInfo | None, now: float) -> None:
        """The holder's answer; None: none came."""
        transfer = self._transfer
        if transfer is None or transfer.backup_id != backup_id or self.state is not State.ASKING:
            return
        if not isinstance(reply, BackupRooms) or len(reply.rooms) != len(transfer.pinned):
            self._on_failure(Event.REFUSED, reply if isinstance(reply, ErrorInfo) else None, now)
            return
        blocks: list[int] = []
        is_full = False
        for (request_id, pinned), room in zip(transfer.pinned.items(), reply.rooms, strict=True):
            copied = self._copied.get(request_id)
            if room.is_unknown or (copied is not None and not copied.num_blocks and not room.num_taken):
                # It has nothing of it: the next one that is asked may be another.
                self._copied.pop(request_id, None)
            else:
                transfer.taken[request_id] = room.num_taken
                blocks += pinned.blocks[room.num_held : room.num_taken]
            is_full |= not room.is_unknown and room.num_taken < len(pinned.blocks)
        if is_full:
            self._left_out[transfer.holder_id] = now + FULL_S
        if not blocks or not reply.ticket:
            self._on_copied(Event.NONE, transfer, now)
            return
        transfer.num_sent = len(blocks)
        self._to(Event.ROOM)
        pool = pool_of(transfer.model, False)
        block_bytes = self._site.around.ask(BlockBytes(pool)) or 0
        transfer.num_bytes = block_bytes * len(blocks)
        deadline_s = self._deadline_s(transfer, block_bytes)
        self._site.say(commands.SendBackup(backup_id, reply.address, reply.ticket, pool, blocks, deadline_s))

    def on_sent(self, backup_id: str, is_sent: bool, now: float) -> None:
        """The blocks are at the holder, or will not be."""
        transfer = self._transfer
        if transfer is None or transfer.backup_id != backup_id or self.state is not State.SENDING:
            return
        if is_sent:
            self._on_copied(Event.SENT, transfer, now)
        else:
            self._on_failure(Event.NOT_SENT, None, now)

    def _on_copied(self, event: Event, transfer: _Transfer, now: float) -> None:
        for request_id, num_taken in transfer.taken.items():
            copied = self._copied.get(request_id)
            if copied is None or copied.holder_id != transfer.holder_id:
                continue
            is_first, first_block = not copied.num_blocks, transfer.pinned[request_id].first_block
            copied.num_blocks = max(copied.num_blocks, first_block + num_taken)
            held = self._site.around.ask(Held(request_id)) if is_first and copied.num_blocks else None
            if held is not None:
                self._site.say(commands.BackedUp(transfer.backup_id, held.request, transfer.holder_id))
        num_blocks = sum(transfer.taken.values())
        self._end(event, "copied", num_blocks, now)

    def _on_failure(self, event: Event, error: ErrorInfo | None, now: float) -> None:
        transfer = self._transfer
        assert transfer is not None
        is_full = error is not None and error.code is ErrorCode.OVERLOADED
        self._left_out[transfer.holder_id] = now + (FULL_S if is_full else UNREACHABLE_S)
        is_answered = error is not None and error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE)
        outcome = "failed" if event is Event.NOT_SENT else "refused" if is_answered else "unreachable"
        if not is_full:
            self._forget_holders(lambda name: name != transfer.holder_id)
        else:
            # What has nothing there yet goes to another.
            for request_id in transfer.pinned:
                if (copied := self._copied.get(request_id)) is not None and not copied.num_blocks:
                    del self._copied[request_id]
        self._end(event, outcome, 0, now)

    def _end(self, event: Event, outcome: str, num_blocks: int, now: float) -> None:
        transfer, self._transfer = self._transfer, None
        assert transfer is not None
        self._to(event)
        for pinned in transfer.pinned.values():
            self._site.around.apply(Unpin(pinned))
        self._site.say(
            commands.BackupOver(transfer.backup_id, outcome, num_blocks, transfer.num_sent, transfer.num_bytes)
        )
        num_left = self.num_missing - num_blocks
        # What is far behind goes on at once; the rest can wait until more is full.
        self._look_s = now if num_left > num_blocks > 0 else now + LOOK_S

    def _forget_holders(self, is_there: Callable[[str], bool]) -> None:
        """What those had that are not there has to be copied to others."""
        self._copied = {name: copied for name, copied in self._copied.items() if is_there(copied.holder_id)}
