"""What comes from other instances: slots that wait for KV, and the sequences that they become.

Owns the slots and rows of reservations, until a sequence takes them (`take`) or they are released. They count as used in
the pool, so that nobody else is admitted into them. Nothing is known here of how the KV comes; whoever releases a
reservation guarantees that nobody writes to its slots any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.engine.moving import Reservation
from shared.engine.room import Demand, Room
from shared.engine.sequence import Rank, rank_of_class
from shared.messages.migration import PreAllocate
from shared.messages.requests import ErrorCode, ErrorInfo

HASH_BYTES = 16

DEMAND_S = 1.0
"""For so long what a reservation lacked is kept from offline work, so that it can be had when it is asked for again."""

RETRY_S = 0.02
"""After which the next step may have ended."""


class Arrival:
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


class Arrivals:
    def __init__(self, room: Room) -> None:
        self._room = room
        self._arrivals: dict[str, Arrival] = {}

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._arrivals.values())

    def of(self, migration_id: str) -> Arrival | None:
        return self._arrivals.get(migration_id)

    def has_model(self, model: str) -> bool:
        return any(arrival.model == model for arrival in self._arrivals.values())

    def reserve(self, query: PreAllocate, now: float) -> Reservation | ErrorInfo:
        """See `Engine.reserve`."""
        arrival = self._arrivals.get(query.migration_id)
        if arrival is not None and (answered := arrival.stages.get(query.stage)) is not None:
            return answered
        if refused := self._refusal(query, arrival):
            return refused
        if arrival is None:
            arrival = Arrival(query.model, query.on_host, rank_of_class(query.request_class, query.priority))
        pool = self._room.pool_of(arrival.on_host)
        hashes = [query.hashes[at : at + HASH_BYTES] for at in range(0, len(query.hashes), HASH_BYTES)]
        held = pool.find(query.model, hashes)
        pool.retain(query.model, held)
        slots = self._allocate(arrival, query.num_blocks - len(held), now)
        if slots is None:
            pool.release(query.model, held)
            return self._overloaded(arrival, query.num_blocks - len(held), now)
        if len(arrival.hashes) == HASH_BYTES * len(arrival.slots):
            arrival.hashes += query.hashes
        arrival.slots += held + slots
        reservation = Reservation(query.migration_id, len(held), slots)
        arrival.stages[query.stage] = reservation
        self._arrivals[query.migration_id] = arrival
        if arrival.is_load and query.arrives_s >= 0:
            self._room.expected[query.migration_id] = now + query.arrives_s
        self._room.demand = None
        return reservation

    def _refusal(self, query: PreAllocate, arrival: Arrival | None) -> ErrorInfo | None:
        queue = self._room.queues.get(query.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {query.model!r} is not loaded on this instance", "model")
        shape = queue.shape
        if query.page_tokens != shape.page_tokens:
            message = f"blocks here have {shape.page_tokens} tokens, not {query.page_tokens}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "page_tokens")
        if query.max_tokens > shape.max_model_len:
            message = f"{query.max_tokens} tokens at most; here {query.model!r} takes {shape.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if arrival is None and query.first_block:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for the blocks before is not here any more")
        expected = 0 if arrival is None else len(arrival.slots)
        is_same = arrival is None or (arrival.model, arrival.on_host) == (query.model, query.on_host)
        if not is_same or query.first_block != expected or query.num_blocks < 0:
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"block {expected} should come next", "first_block")
        if len(query.hashes) % HASH_BYTES or len(query.hashes) > HASH_BYTES * query.num_blocks:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "not a hash for each full block", "hashes")
        if query.on_host and self._room.host.pool is None:
            return ErrorInfo(ErrorCode.OVERLOADED, "this instance has no host memory for checkpoints")
        return None

    def _allocate(self, arrival: Arrival, count: int, now: float) -> list[int] | None:
        room, model = self._room, arrival.model
        if arrival.on_host:
            assert room.host.pool is not None
            num_blocks = len(arrival.slots) + count
            room.host.make_room(model, num_blocks * room.queues[model].shape.page_tokens, count)
            return room.host.pool.allocate(model, count)
        is_online = arrival.rank != Rank.OFFLINE
        needed = self._needed(arrival, count)
        if is_online and needed and not room.may_hold(model, needed, arrival.rank):
            return None
        if room.pool.num_available(model) < needed and not (
            is_online and room.make_room_for_arrival(model, needed, now)
        ):
            return None
        if arrival.needs_row:
            if not room.num_free_rows and not (is_online and room.make_row_for_arrival(now)):
                return None
            arrival.row = room.take_row()
        return room.pool.allocate(model, count)

    def _needed(self, arrival: Arrival, count: int) -> int:
        """With what is left free for those that run; nothing for a stage of blocks that all are here."""
        return count + self._room.reserve_slots(self._room.queues[arrival.model], arrival.rank) if count else 0

    def _overloaded(self, arrival: Arrival, count: int, now: float) -> ErrorInfo:
        """Refused for now; what offline work in flight holds is freed for the next time."""
        room, retry_after_s = self._room, 0.0
        needed, model = self._needed(arrival, count), arrival.model
        if arrival.is_load and room.may_hold(model, needed, arrival.rank) and room.could_have(model, needed):
            room.demand = Demand(arrival.model, needed, int(arrival.needs_row), now + DEMAND_S)
            retry_after_s = RETRY_S
        message = f"no room for {count} KV blocks of {arrival.model!r}"
        return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)

    def release(self, migration_id: str) -> None:
        """Frees what is reserved."""
        arrival = self._forget(migration_id)
        if arrival is None:
            return
        self._room.pool_of(arrival.on_host).release(arrival.model, arrival.slots)
        if arrival.row >= 0:
            self._room.return_row(arrival.row)

    def take(self, migration_id: str) -> None:
        """Its slots and its row are a sequence's from now on."""
        self._forget(migration_id)

    def _forget(self, migration_id: str) -> Arrival | None:
        self._room.expected.pop(migration_id, None)
        return self._arrivals.pop(migration_id, None)
