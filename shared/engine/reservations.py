"""What comes from other instances: blocks that wait for KV, and the sequences that they become.

Owns the blocks and rows of reservations, until a sequence takes them (`take`) or they are released. They count as used in
the pool, so that nobody else is admitted into them. Nothing is known here of how the KV comes; whoever releases a
reservation guarantees that nobody writes to its blocks any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.engine.handover import HASH_BYTES, Reservation
from shared.engine.memory.allocator import Allocator, Demand
from shared.engine.sequence import PriorityClass, class_of_priority
from shared.messages.migration import MigrationReason, PreAllocate
from shared.messages.requests import ErrorCode, ErrorInfo

DEMAND_S = 1.0
"""How long what a reservation lacked is kept from offline work, so that it can be had when it is asked for again."""

RETRY_S = 0.02
"""After which the next step may have ended."""


class Reserved:
    """One sequence that comes: its first blocks, in order."""

    __slots__ = ("blocks", "hashes", "model", "on_host", "priority_class", "row", "stages")

    def __init__(self, model: str, on_host: bool, priority_class: PriorityClass) -> None:
        self.model = model
        self.on_host = on_host
        self.priority_class = priority_class
        self.row = -1
        self.blocks: list[int] = []
        self.hashes = b""
        """Hashes of its full blocks, as far as they were announced without a gap."""
        self.stages: dict[int, Reservation] = {}

    @property
    def needs_row(self) -> bool:
        return self.row < 0 and not self.on_host

    @property
    def is_load(self) -> bool:
        """Whether it is to be an online sequence with KV on the device."""
        return self.priority_class != PriorityClass.OFFLINE and not self.on_host


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
        """Room for the blocks of a stage, those after the leading ones that are in the prefix cache; with the first stage
        also a row, unless the blocks stay in host memory. The same stage again is answered alike. Offline sequences are
        preempted for online ones; those of a step in flight only when it has returned: the refusal then names a time
        after which to ask again (OVERLOADED with `retry_after_s`). Others: OVERLOADED, TOO_LONG (the model takes fewer
        tokens here), GONE (model or earlier stages), BAD_REQUEST (block size, or not the next block)."""
        reserved = self._reserved.get(query.migration_id)
        if reserved is not None and (answered := reserved.stages.get(query.stage)) is not None:
            return answered
        if refused := self._refusal(query, reserved):
            return refused
        if reserved is None:
            reserved = Reserved(query.model, query.on_host, class_of_priority(query.request_class, query.priority))
        pool = self._memory.pool_of(reserved.on_host)
        hashes = [query.hashes[at : at + HASH_BYTES] for at in range(0, len(query.hashes), HASH_BYTES)]
        held = pool.find(query.model, hashes)
        pool.retain(query.model, held)
        blocks = self._allocate(reserved, query.num_blocks - len(held), now)
        if blocks is None:
            pool.release(query.model, held)
            return self._overloaded(reserved, query.num_blocks - len(held), now)
        if len(reserved.hashes) == HASH_BYTES * len(reserved.blocks):
            reserved.hashes += query.hashes
        reserved.blocks += held + blocks
        reservation = Reservation(query.migration_id, len(held), blocks)
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
        if query.block_size != shape.block_size:
            message = f"blocks here have {shape.block_size} tokens, not {query.block_size}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "block_size")
        if query.max_tokens > shape.max_model_len:
            message = f"{query.max_tokens} tokens at most; here {query.model!r} takes {shape.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if reserved is None and query.first_block:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for the blocks before is not here any more")
        expected = 0 if reserved is None else len(reserved.blocks)
        is_same = reserved is None or (reserved.model, reserved.on_host) == (query.model, query.on_host)
        if not is_same or query.first_block != expected or query.num_blocks < 0:
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"block {expected} should come next", "first_block")
        if len(query.hashes) % HASH_BYTES or len(query.hashes) > HASH_BYTES * query.num_blocks:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "not a hash for each full block", "hashes")
        if reserved is None and self._is_waited_for(query):
            return ErrorInfo(
                ErrorCode.OVERLOADED, f"a request waits here for the memory that {query.request_id} would take"
            )
        if query.on_host and self._memory.host.pool is None:
            return ErrorInfo(ErrorCode.OVERLOADED, "this instance has no host memory for checkpoints")
        return None

    def _is_waited_for(self, query: PreAllocate) -> bool:
        """Whether what an online request would take here is being got together for one that is no less urgent; who drains
        has to give it somewhere."""
        stuck = self._memory.stuck_online
        if stuck is None or query.on_host or not query.num_blocks or query.reason is MigrationReason.DRAIN:
            return False
        return stuck.priority_class <= class_of_priority(query.request_class, query.priority)

    def _allocate(self, reserved: Reserved, count: int, now: float) -> list[int] | None:
        memory, model = self._memory, reserved.model
        if reserved.on_host:
            assert memory.host.pool is not None
            num_blocks = len(reserved.blocks) + count
            memory.host.make_room(model, num_blocks * memory.queues[model].shape.block_size, count)
            return memory.host.pool.allocate(model, count)
        is_online = reserved.priority_class != PriorityClass.OFFLINE
        needed = self._needed(reserved, count)
        if is_online and needed and not memory.may_hold(model, needed, reserved.priority_class):
            return None
        if memory.pool.num_available(model) < needed and not (
            is_online and memory.make_room_for_incoming(model, needed, now)
        ):
            return None
        if reserved.needs_row:
            if not memory.num_free_rows and not (is_online and memory.make_row_for_incoming(now)):
                return None
            reserved.row = memory.take_row()
        return memory.pool.allocate(model, count)

    def _needed(self, reserved: Reserved, count: int) -> int:
        """Merged blocks that a reservation needs, with what is left free for those that run; nothing for a stage of blocks
        that all are here."""
        return (
            count + self._memory.reserve_blocks(self._memory.queues[reserved.model], reserved.priority_class)
            if count
            else 0
        )

    def _overloaded(self, reserved: Reserved, count: int, now: float) -> ErrorInfo:
        """Refused for now; what offline work in flight holds is freed for the next time."""
        memory, retry_after_s = self._memory, 0.0
        needed, model = self._needed(reserved, count), reserved.model
        if (
            reserved.is_load
            and memory.may_hold(model, needed, reserved.priority_class)
            and memory.could_have(model, needed)
        ):
            memory.demand = Demand(reserved.model, needed, int(reserved.needs_row), now + DEMAND_S)
            retry_after_s = RETRY_S
        message = f"no room for {count} KV blocks of {reserved.model!r}"
        return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)

    def release(self, migration_id: str) -> None:
        """Frees what is reserved; nobody may write there any more."""
        reserved = self._forget(migration_id)
        if reserved is None:
            return
        self._memory.pool_of(reserved.on_host).release(reserved.model, reserved.blocks)
        if reserved.row >= 0:
            self._memory.return_row(reserved.row)

    def take(self, migration_id: str) -> None:
        """Its blocks and its row are a sequence's from now on."""
        self._forget(migration_id)

    def _forget(self, migration_id: str) -> Reserved | None:
        self._memory.expected.pop(migration_id, None)
        return self._reserved.pop(migration_id, None)
