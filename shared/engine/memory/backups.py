"""Copies of other instances' KV blocks in the host memory of this one, so that their requests go on here if those die.

A copy is a host block that is found by its chained hash, as a checkpoint is: a request that is placed here finds its blocks
in the normal way, whoever computed them. While its source wants it, each holds a reference.

| blocks | whose |
|---|---|
| of a transfer that was announced | that transfer's, from `reserve` until `settle` |
| settled | the backup's, until its source does not want it any more, or host memory is needed for checkpoints |
| let go of | nobody's; found until somebody needs the memory |
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shared.engine.counters import EngineCounters
from shared.engine.handover import HASH_BYTES, BackupReservation
from shared.engine.memory.blocks import BlockPool
from shared.messages.migration import BackUp, BackupPart, BackupRoom, KeepBackups
from shared.messages.requests import ErrorCode, ErrorInfo


class _Backup(msgspec.Struct):
    """The first blocks of one request of another instance."""

    model: str
    blocks: list[int]


class _Part(msgspec.Struct, frozen=True):
    """A part of a transfer under way, with a reference to each block."""

    request_id: str
    first_block: int
    blocks: list[int]
    hashes: list[bytes]


class _Coming(msgspec.Struct, frozen=True):
    """A transfer under way."""

    source_id: str
    model: str
    parts: list[_Part]


class Backups:
    def __init__(self, pool: BlockPool, counters: EngineCounters) -> None:
        """`pool`: of host memory."""
        self.max_share = 0.5
        """Share of the pool that backups may take."""
        self._pool = pool
        self._counters = counters
        self._of_source: dict[str, dict[str, _Backup]] = {}
        """By source and request."""
        self._coming: dict[str, _Coming] = {}
        """By backup id."""

    @property
    def num_requests(self) -> int:
        """Requests of which copies are kept."""
        return sum(len(of_source) for of_source in self._of_source.values())

    @property
    def used_share(self) -> float:
        """Share of the pool that backups take, 0 to 1; blocks that several requests share count for each."""
        taken = sum(len(backup.blocks) / self._per_merged(backup.model) for backup in self._all())
        taken += sum(
            len(part.blocks) / self._per_merged(coming.model)
            for coming in self._coming.values()
            for part in coming.parts
        )
        return min(1.0, taken / self._pool.num_merged)

    def _all(self) -> Iterator[_Backup]:
        return (backup for of_source in self._of_source.values() for backup in of_source.values())

    def _per_merged(self, model: str) -> int:
        return self._pool.capacity_blocks(model) // self._pool.num_merged

    # ------------------------------------------------------------------------------------------------ a transfer

    def reserve(self, query: BackUp) -> BackupReservation | ErrorInfo:
        """Room for as many of the blocks as there is room for, part by part, beside the checkpoints of here. Errors:
        OVERLOADED (there is room for none), CONFLICT (the transfer is under way), BAD_REQUEST."""
        if query.backup_id in self._coming:
            return ErrorInfo(ErrorCode.CONFLICT, f"backup {query.backup_id} is under way")
        if any(len(part.hashes) % HASH_BYTES for part in query.parts):
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"hashes are {HASH_BYTES} bytes each", "hashes")
        parts: list[_Part] = []
        rooms: list[BackupRoom] = []
        blocks: list[int] = []
        left = int((self.max_share - self.used_share) * self._pool.capacity_blocks(query.model))
        for part in query.parts:
            room, taken = self._reserve_part(query, part, max(0, left))
            rooms.append(room)
            if taken is not None:
                parts.append(taken)
                blocks += taken.blocks[room.num_held :]
                left -= len(taken.blocks)
        if parts:
            self._coming[query.backup_id] = _Coming(query.source_id, query.model, parts)
        elif not any(room.is_unknown for room in rooms):
            return ErrorInfo(ErrorCode.OVERLOADED, "no host memory for backups is free")
        return BackupReservation(tuple(rooms), blocks)

    def _reserve_part(self, query: BackUp, part: BackupPart, left: int) -> tuple[BackupRoom, _Part | None]:
        """`left`: blocks that may be taken."""
        pool, model = self._pool, query.model
        known = self._of_source.get(query.source_id, {}).get(part.request_id)
        if part.first_block > (0 if known is None else len(known.blocks)):
            return BackupRoom(is_unknown=True), None
        hashes = [part.hashes[at : at + HASH_BYTES] for at in range(0, len(part.hashes), HASH_BYTES)][:left]
        held = pool.find(model, hashes)
        pool.retain(model, held)
        new = pool.allocate(model, min(len(hashes) - len(held), pool.num_available(model))) or []
        taken = held + new
        if not taken:
            return BackupRoom(), None
        return BackupRoom(len(held), len(taken)), _Part(part.request_id, part.first_block, taken, hashes[: len(taken)])

    def settle(self, backup_id: str, ok: bool) -> None:
        """Nobody writes to the transfer's blocks any more. `ok`: they hold what they should."""
        coming = self._coming.pop(backup_id, None)
        if coming is None:
            return
        for part in coming.parts:
            known = self._of_source.get(coming.source_id, {}).get(part.request_id)
            num_known = 0 if known is None else len(known.blocks)
            if not ok or part.first_block > num_known:
                self._pool.release(coming.model, part.blocks)
                continue
            self._pool.register(coming.model, part.blocks, part.hashes)
            if not coming.source_id:
                # Of a prefix that was fetched for a request of here.
                self._pool.release(coming.model, part.blocks)
                continue
            if known is None:
                known = _Backup(coming.model, [])
                self._of_source.setdefault(coming.source_id, {})[part.request_id] = known
            self._pool.release(coming.model, known.blocks[part.first_block :])
            known.blocks[part.first_block :] = part.blocks
            self._counters.backed_up_blocks[coming.model] += len(part.blocks)

    # ------------------------------------------------------------------------------------------- how long it is kept

    def keep(self, query: KeepBackups) -> None:
        """Lets go of what else is kept for that source."""
        of_source, wanted = self._of_source.get(query.source_id, {}), set(query.request_ids)
        for request_id in [name for name in of_source if name not in wanted]:
            self._let_go(query.source_id, request_id)

    def _let_go(self, source_id: str, request_id: str) -> None:
        of_source = self._of_source[source_id]
        backup = of_source.pop(request_id)
        self._pool.release(backup.model, backup.blocks)
        if not of_source:
            del self._of_source[source_id]

    def give_up(self, model: str, num_blocks: int) -> None:
        """Lets go of the smallest backups until so many blocks are available to the model: for checkpoints of here."""
        kept = [
            (len(backup.blocks), source, name) for source, of in self._of_source.items() for name, backup in of.items()
        ]
        for _, source_id, request_id in sorted(kept):
            if self._pool.num_available(model) >= num_blocks:
                return
            self._let_go(source_id, request_id)

    def has_coming(self, model: str) -> bool:
        """Whether transfers under way write to blocks of the model."""
        return any(coming.model == model for coming in self._coming.values())

    def remove_model(self, model: str) -> None:
        """The model leaves, when nothing of it is coming."""
        for source_id, of_source in list(self._of_source.items()):
            for request_id in [name for name, backup in of_source.items() if backup.model == model]:
                self._let_go(source_id, request_id)

    # -------------------------------------------------------------------------------------------------- checks

    def references(self) -> Iterator[tuple[str, int]]:
        """(model, block) of every reference held; for tests."""
        for backup in self._all():
            for block in backup.blocks:
                yield backup.model, block
        for coming in self._coming.values():
            for part in coming.parts:
                for block in part.blocks:
                    yield coming.model, block
