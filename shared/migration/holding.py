"""Copies of other instances' KV blocks that are kept here (backup.py is their other end). No I/O; times are arguments.

    reserved --ExpectBackup--> expected --in--> kept --not wanted, or its source is silent--> let go of
        '--failure--------------'--failure--> let go of

A source that is silent for `ORPHAN_S` has died, and its requests have been placed again by then.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.engine.calls import Keep, ReserveBackup, SettleBackup
from shared.messages.migration import BackUp, BackupRooms, KeepBackups
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.migration import commands
from shared.migration.limits import pool_of
from shared.migration.outgoing import Site
from shared.migration.questions import BlockBytes, Refusal

ORPHAN_S = 60.0
"""Seconds."""


class BackupHolder:
    """What an instance keeps for others."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._expected: dict[str, BackupRooms] = {}
        """By backup id, those that are not settled."""
        self._heard_s: dict[str, float] = {}
        """By source that something is kept for."""
        self.is_stopping = False
        self.on_settled: Callable[[str, bool], None] = lambda _backup_id, _is_in: None
        """Called when blocks of a backup are entered, or will not come."""

    def expects(self, backup_id: str) -> bool:
        """Whether its blocks are still to come."""
        return backup_id in self._expected

    def on_back_up(self, query: BackUp, now: float) -> None:
        """Answered by `AnswerBackup`."""
        if (known := self._expected.get(query.backup_id)) is not None:
            if known.ticket:  # else the one answer goes to both
                self._site.say(commands.AnswerBackup(query.backup_id, known))
            return
        answer = self._refusal(query) or self._site.around.apply(ReserveBackup(query))
        if isinstance(answer, ErrorInfo):
            self._site.say(commands.AnswerBackup(query.backup_id, answer))
            return
        if query.source_id:
            self._heard_s[query.source_id] = now
        rooms = BackupRooms(query.backup_id, answer.rooms)
        if not answer.blocks:
            self._site.around.apply(SettleBackup(query.backup_id, True))
            self._site.say(commands.AnswerBackup(query.backup_id, rooms))
            return
        self._expected[query.backup_id] = rooms
        pool = pool_of(query.model, True)
        self._site.say(
            commands.ExpectBackup(query.backup_id, pool, answer.blocks, query.deadline_s, query.source_address)
        )

    def _refusal(self, query: BackUp) -> ErrorInfo | None:
        if self.is_stopping or self._site.address is None:
            return ErrorInfo(ErrorCode.UNAVAILABLE, "nothing is kept here")
        if (refused := self._site.around.ask(Refusal(query.model, None))) is not None:
            return refused
        block_bytes = self._site.around.ask(BlockBytes(pool_of(query.model, True)))
        if block_bytes is None:
            return ErrorInfo(ErrorCode.OVERLOADED, "this instance has no host memory for backups")
        if block_bytes != query.block_bytes:
            message = f"KV blocks of {block_bytes} bytes, not of {query.block_bytes}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "block_bytes")
        return None

    def on_expected(self, backup_id: str, address: str, ticket: bytes, failure: str, now: float) -> None:
        """`failure`: why the blocks are not expected; empty where they are."""
        if (rooms := self._expected.get(backup_id)) is None:
            return
        if failure:
            self.on_in(backup_id, failure, now)
            self._site.say(commands.AnswerBackup(backup_id, ErrorInfo(ErrorCode.GONE, failure)))
            return
        named = self._expected[backup_id] = msgspec.structs.replace(rooms, address=address, ticket=ticket)
        self._site.say(commands.AnswerBackup(backup_id, named))

    def on_in(self, backup_id: str, failure: str, now: float) -> None:
        """The blocks are all here, or will not come, and nobody writes to them any more."""
        if self._expected.pop(backup_id, None) is not None:
            self._site.around.apply(SettleBackup(backup_id, not failure))
            self.on_settled(backup_id, not failure)

    def on_keep(self, query: KeepBackups, now: float) -> None:
        if query.source_id not in self._heard_s:
            return
        self._site.around.apply(Keep(query))
        self._heard_s[query.source_id] = now

    def next_wakeup(self) -> float | None:
        return min((heard_s + ORPHAN_S for heard_s in self._heard_s.values()), default=None)

    def on_time(self, now: float) -> None:
        for source_id in [name for name, heard_s in self._heard_s.items() if heard_s + ORPHAN_S <= now]:
            del self._heard_s[source_id]
            self._site.around.apply(Keep(KeepBackups(source_id, ())))
