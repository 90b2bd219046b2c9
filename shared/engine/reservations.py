"""What comes from other instances: slots that wait for KV, and the sequences that they become.

Owns the slots and rows of reservations, until a sequence takes them (`take`) or they are released. They count as used in
the pool, so that nobody else is admitted into them. Nothing is known here of how the KV comes; whoever releases a
reservation guarantees that nobody writes to its slots any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.engine.allocator import Allocator, Demand
from shared.engine.moving import Reservation
from shared.engine.sequence import Rank, rank_of_class
from shared.messages.migration import PreAllocate
from shared.messages.requests import ErrorCode, ErrorInfo

HASH_BYTES = 16

DEMAND_S = 1.0
"""For so long what a reservation lacked is kept from offline work, so that it can be had when it is asked for again."""

RETRY_S = 0.02
"""After which the next step may have ended."""


class Reserved:
    """One sequence that comes: its first slots, in order of its blocks."""

    __slots__ = ("hashes", "model", "on_host", "rank", "row", "slots", "stages")

    def __init__(self, model: str, on_host: bool, rank: Rank) -> None:
        self.model = model
        self.on_host = on_host
        self.rank = rank
        self.row = -1
        self.slots: list[int] = []
        self.hashes = b""
        """Of its full blocks, as far as they were announced without a gap."""
        self.stages: dict[int, Reservation] = {}

    @property
    def needs_row(self) -> bool:
        return self.row < 0 and not self.on_host

    @property
    def is_load(self) -> bool:
        """Whether it is to be an online sequence with KV on the device."""
        return self.rank != Rank.OFFLINE and not self.on_host


class Reservations:
    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._reserved: dict[str, Reserved] = {}

    def __iter__(self) -> Iterator[Reserved]:
        return iter(self._reserved.values())

    def of(self, migration_id: str) -> Reserved | None:
        return self._reserved.get(migration_id)

    def has_model(self, model: str) -> bool:
        return any(reserved.model == model for reserved in self._reserved.values())

    def reserve(self, query: PreAllocate, now: float) -> Reservation | ErrorInfo:
        """Slots for the blocks of a stage, those after the leading ones that are in the prefix cache; with the first stage
        also a row, unless the blocks stay in host memory. The same stage again is answered alike. Offline sequences are
        preempted for online ones; those of a step in flight only when it has returned: the refusal then names a time
        after which to ask again (OVERLOADED with `retry_after_s`). Others: OVERLOADED, TOO_LONG (the model takes fewer
        tokens here), GONE (model or earlier stages), BAD_REQUEST (page size, or not the next block)."""
        reserved = self._reserved.get(query.migration_id)
        if reserved is not None and (answered := reserved.stages.get(query.stage)) is not None:
            return answered
        if refused := self._refusal(query, reserved):
            return refused
        if reserved is None:
            reserved = Reserved(query.model, query.on_host, rank_of_class(query.request_class, query.priority))
        pool = self._memory.pool_of(reserved.on_host)
        hashes = [query.hashes[at : at + HASH_BYTES] for at in range(0, len(query.hashes), HASH_BYTES)]
        held = pool.find(query.model, hashes)
        pool.retain(query.model, held)
        slots = self._allocate(reserved, query.num_blocks - len(held), now)
        if slots is None:
            pool.release(query.model, held)
            return self._overloaded(reserved, query.num_blocks - len(held), now)
        if len(reserved.hashes) == HASH_BYTES * len(reserved.slots):
            reserved.hashes += query.hashes
        reserved.slots += held + slots
        reservation = Reservation(query.migration_id, len(held), slots)
        reserved.stages[query.stage] = reservation
        self._reserved[query.migration_id] = reserved
        if reserved.is_load and query.arrives_s >= 0:
            self._memory.expected[query.migration_id] = now + query.arrives_s
        self._memory.demand = None
        return reservation

    def _refusal(self, query: PreAllocate, reserved: Reserved | None) -> ErrorInfo | None:
        queue = self._memory.queues.get(query.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {query.model!r} is not loaded on this instance", "model")
        shape = queue.shape
        if query.page_tokens != shape.page_tokens:
            message = f"blocks here have {shape.page_tokens} tokens, not {query.page_tokens}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "page_tokens")
        if query.max_tokens > shape.max_model_len:
            message = f"{query.max_tokens} tokens at most; here {query.model!r} takes {shape.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if reserved is None and query.first_block:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for the blocks before is not here any more")
        expected = 0 if reserved is None else len(reserved.slots)
        is_same = reserved is None or (reserved.model, reserved.on_host) == (query.model, query.on_host)
        if not is_same or query.first_block != expected or query.num_blocks < 0:
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"block {expected} should come next", "first_block")
        if len(query.hashes) % HASH_BYTES or len(query.hashes) > HASH_BYTES * query.num_blocks:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "not a hash for each full block", "hashes")
        if query.on_host and self._memory.host.pool is None:
            return ErrorInfo(ErrorCode.OVERLOADED, "this instance has no host memory for checkpoints")
        return None

    def _allocate(self, reserved: Reserved, count: int, now: float) -> list[int] | None:
        memory, model = self._memory, reserved.model
        if reserved.on_host:
            assert memory.host.pool is not None
            num_blocks = len(reserved.slots) + count
            memory.host.make_room(model, num_blocks * memory.queues[model].shape.page_tokens, count)
            return memory.host.pool.allocate(model, count)
        is_online = reserved.rank != Rank.OFFLINE
        needed = self._needed(reserved, count)
        if is_online and needed and not memory.may_hold(model, needed, reserved.rank):
            return None
        if memory.pool.num_available(model) < needed and not (
            is_online and memory.make_room_for_arrival(model, needed, now)
        ):
            return None
        if reserved.needs_row:
            if not memory.num_free_rows and not (is_online and memory.make_row_for_arrival(now)):
                return None
            reserved.row = memory.take_row()
        return memory.pool.allocate(model, count)

    def _needed(self, reserved: Reserved, count: int) -> int:
        """With what is left free for those that run; nothing for a stage of blocks that all are here."""
        return count + self._memory.reserve_slots(self._memory.queues[reserved.model], reserved.rank) if count else 0

    def _overloaded(self, reserved: Reserved, count: int, now: float) -> ErrorInfo:
        """Refused for now; what offline work in flight holds is freed for the next time."""
        memory, retry_after_s = self._memory, 0.0
        needed, model = self._needed(reserved, count), reserved.model
        if reserved.is_load and memory.may_hold(model, needed, reserved.rank) and memory.could_have(model, needed):
            memory.demand = Demand(reserved.model, needed, int(reserved.needs_row), now + DEMAND_S)
            retry_after_s = RETRY_S
        message = f"no room for {count} KV blocks of {reserved.model!r}"
        return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)

    def release(self, migration_id: str) -> None:
        """Frees what is reserved; nobody may write there any more."""
        reserved = self._forget(migration_id)
        if reserved is None:
            return
        self._memory.pool_of(reserved.on_host).release(reserved.model, reserved.slots)
        if reserved.row >= 0:
            self._memory.return_row(reserved.row)

    def take(self, migration_id: str) -> None:
        """Its slots and its row are a sequence's from now on."""
        self._forget(migration_id)

    def _forget(self, migration_id: str) -> Reserved | None:
        self._memory.expected.pop(migration_id, None)
        return self._reserved.pop(migration_id, None)
