"""Requests that move between instances of one engine of others, with their KV: what `shared.migration` asks of an engine.

KV passes through slots of staging memory that the instance and its engine share, each of the size of a block. A stage's
blocks are copied into slots while the sequence goes on decoding; from slots the transport sends, and into slots it receives.
The engine begins a sequence that comes with its tokens as the prompt, of which all but the last are computed; where it has
no room for their KV it computes them again, so that a move is right whether or not the KV is used.

    source       pin        Export into slots
                 detach     TakeOut, with the blocks that were filled last; TakenOut -> effect Detached
                 reattach   Generate, from the tokens
    destination  reserve    slots
                 adopt      Generate, with slots; Imported frees them

Pure: time is an argument, and what the engine is told is in `commands`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import msgspec

from shared.engine.handover import Detached, MigrationCandidate, PinnedBlocks, Reservation
from shared.engines.book import Book, Held
from shared.engines.messages import Command, Export, TakeOut
from shared.engines.resuming import repeats_for
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest
from shared.migration.source import may_migrate

MORE_BLOCKS = 2
"""Blocks that may be filled between the order to leave and the end of the step in flight."""
HASH_BYTES = 16


class HeldHere(NamedTuple):
    """A request as the migration asks for it."""

    request: GenerationRequest
    block_size: int


class Stay(Enum):
    """Stages of a request on its way out."""

    PINNED = "pinned"
    """It decodes; some of its blocks are copied."""
    LEAVING = "leaving"
    """The engine was told to take it out."""
    OUT = "out"
    """It is not in the engine any more; a cancel or its deadline ends it."""
    FROZEN = "frozen"
    """It is perhaps another instance's: nothing ends it here."""


class Move:
    """A request on its way out of here."""

    __slots__ = ("first_block", "held", "is_cancelled", "num_computed", "rest", "returns", "stay")

    def __init__(self, held: Held) -> None:
        self.held = held
        """One that came back, or was placed anew, under the same id is another."""
        self.stay = Stay.PINNED
        self.first_block = 0
        """Place of `rest` in the sequence."""
        self.rest: list[int] = []
        """Slots of the stage that was pinned last, then of what was filled after it."""
        self.num_computed = -1
        """Tokens whose KV was saved when it was taken out; below 0: not yet, or it was lost."""
        self.returns: int | None = None
        """It goes on here as soon as it is out: in this epoch."""
        self.is_cancelled = False


class Slots:
    """Slots of the staging memory, with a count of users each."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._users: dict[int, int] = {}
        self.unfilled: set[int] = set()
        """Slots to which the engine is still copying."""
        self.failed: set[int] = set()
        """Slots to which it could not copy."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """None: there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._users[slot] = 1
        return taken

    def retain(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._users[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
                self.failed.discard(slot)
                self._free.append(slot)

    def fill(self, slots: Iterable[int]) -> None:
        """The engine is about to copy into them, and uses them until `filled`."""
        slots = list(slots)
        self.retain(slots)
        self.unfilled |= set(slots)

    def filled(self, slots: Iterable[int], *, is_done: bool) -> None:
        slots = [slot for slot in slots if slot in self.unfilled]
        self.unfilled -= set(slots)
        if not is_done:
            self.failed |= set(slots)
        self.release(slots)


class Moving:
    """All of a book's requests that come and go. In the place of an `Engine` for `shared.engine.calls`, which name its
    parts."""

    def __init__(self, book: Book, cooldown_s: float) -> None:
        """`cooldown_s`: a request that moved stays at least so long."""
        self.slots = Slots(book.facts.num_slots)
        self.outgoing = Departures(book, self.slots, cooldown_s)
        self.incoming = self.reservations = Arrivals(book, self.slots)
        self._book = book

    def migration_candidates(self, now: float, include_offline: bool) -> list[MigrationCandidate]:
        return self.outgoing.candidates(now, include_offline)

    def late_candidates(self, now: float) -> list[MigrationCandidate]:
        """None: when a prompt is begun is not known."""
        return []

    def held(self, request_id: str) -> HeldHere | None:
        held = self._book.get(request_id)
        return None if held is None else HeldHere(held.request, self._book.facts.block_size)

    def held_epoch(self, request_id: str) -> int | None:
        return self._book.held_epoch(request_id)

    def busy_s(self, now: float) -> float:
        """0: when the step in flight ends is not known."""
        return 0.0

    def take_commands(self) -> list[Command]:
        """Takes what the engine is to be told, in order."""
        found = [*self.outgoing.commands, *self.incoming.commands]
        self.outgoing.commands.clear()
        self.incoming.commands.clear()
        return found


class Departures:
    """Requests on their way out; the native engine's are in `shared/engine/outgoing.py`."""

    def __init__(self, book: Book, slots: Slots, cooldown_s: float) -> None:
        self._book = book
        self._slots = slots
        self._cooldown_s = cooldown_s
        self._block_size = book.facts.block_size
        self._moves: dict[str, Move] = {}
        self._taken: list[Detached] = []
        self._orders: dict[str, tuple[str, list[int]]] = {}
        """By key in the engine, of those to be taken out: the request, and slots for what is filled meanwhile."""
        self.commands: list[Command] = []
        self.cancelled: list[str] = []
        """Requests that are back and were to be cancelled while they were frozen."""

    def candidates(self, now: float, include_offline: bool) -> list[MigrationCandidate]:
        """Online requests that decode, lower priority first, then those with fewer blocks. `include_offline` (to drain):
        also those that wait, and offline ones last."""
        found: list[tuple[tuple[int, ...], MigrationCandidate]] = []
        for number, held in enumerate(self._book.all_held()):
            if not self._may_move(held, now, is_drain=include_offline):
                continue
            is_decoding = self._num_full(held) > 0 and held.is_decoding
            if not is_decoding and (held.is_running or not include_offline):
                continue
            if not held.is_online and not include_offline:
                continue
            candidate = self._candidate(held, is_decoding)
            order = (not held.is_online, is_decoding, -held.priority, candidate.num_blocks, number)
            found.append((tuple(map(int, order)), candidate))
        found.sort(key=lambda pair: pair[0])
        return [candidate for _, candidate in found]

    def _move(self, request_id: str) -> Move | None:
        """The move of a request as it is held now."""
        move = self._moves.get(request_id)
        if move is not None and self._book.get(request_id) is not move.held:
            self._forget(request_id)
            return None
        return move

    def can_move(self, held: Held) -> bool:
        """Whether it could ever: its output has to go on from its tokens in any engine like this one."""
        travelling = msgspec.structs.replace(held.request, prior=b"0000")
        return (
            not held.resumption.is_repeating
            and may_migrate(held.request.epoch)
            and not repeats_for(travelling, self._book.lacks)
            and not held.request.images
        )

    def _may_move(self, held: Held, now: float, *, is_drain: bool) -> bool:
        cooldown_s = self._cooldown_s * (1 if is_drain else 2**held.num_moves)
        return (
            self._move(held.request_id) is None
            and now - held.moved_s >= cooldown_s
            and held.num_left > 1
            and self.can_move(held)
        )

    def _num_full(self, held: Held) -> int:
        """Blocks that are full: the last token's KV is not computed yet."""
        return (held.num_tokens - 1) // self._block_size

    def _candidate(self, held: Held, is_decoding: bool) -> MigrationCandidate:
        return MigrationCandidate(
            self._book.held_request(held),
            held.request.request_class,
            held.request.priority,
            is_decoding,
            -(-held.num_tokens // self._block_size) if is_decoding else 0,
            held.num_left,
            held.num_moves,
        )

    # ---------------------------------------------------------------------------------- while it is in the engine

    def pin(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        """Has the full blocks from `first_block` on copied into slots. None: it does not run, or there are too few slots."""
        held, move = self._book.get(request_id), self._move(request_id)
        if held is None or not held.is_decoding or (first_block and move is None):
            return None
        if move is not None and move.stay is not Stay.PINNED:
            return None
        num_new = self._num_full(held) - first_block
        slots = self._slots.take(num_new)
        if slots is None:
            return None
        move = self._moves.setdefault(request_id, Move(held))
        self._slots.release(move.rest)
        self._slots.retain(slots)
        move.first_block, move.rest = first_block, list(slots)
        if slots:
            self._slots.fill(slots)
            self.commands.append(Export(held.key, first_block, tuple(slots)))
        return PinnedBlocks(self._book.model, False, first_block, slots, self._hashes(first_block, len(slots)))

    def unpin(self, pinned: PinnedBlocks) -> None:
        self._slots.release(pinned.blocks)

    def exported(self, slots: Iterable[int], is_done: bool) -> None:
        """The engine has copied blocks into slots, or could not."""
        self._slots.filled(slots, is_done=is_done)

    def detach(self, request_id: str, now: float) -> bool:
        """Out of the engine at the end of the step in flight: the effect `Detached` says so, unless it ends in it. False: it
        is not here any more."""
        held = self._book.get(request_id)
        if held is None:
            return False
        move = self._move(request_id) or self._moves.setdefault(request_id, Move(held))
        if move.stay is not Stay.PINNED:
            return False
        move.stay = Stay.LEAVING
        if not held.is_running:
            self.commands += self._book.withdraw(held)
            self._out(held, move, now)
            return True
        slots = self._slots.take(min(MORE_BLOCKS, self._slots.num_free)) or []
        self._slots.fill(slots)
        self._orders[held.key] = (request_id, slots)
        self.commands.append(TakeOut(held.key, move.first_block + len(move.rest), tuple(slots)))
        return True

    def taken_out(self, key: str, num_filled: int, num_computed: int, now: float) -> None:
        """The engine has taken it out, after all its output, with so many more blocks in slots, and so many tokens in all;
        below 0: it had no KV left that could move, or was not there."""
        order = self._orders.pop(key, None)
        if order is None:
            return
        request_id, slots = order
        held, move = self._book.get(request_id), self._move(request_id)
        is_here = held is not None and move is not None and move.stay is Stay.LEAVING and held.key == key
        kept = max(0, num_filled) if is_here else 0
        self._slots.filled(slots, is_done=True)
        self._slots.release(slots[kept:])
        if held is None or move is None or not is_here:
            return
        self._book.withdraw(held)  # the engine does not know it any more
        move.rest += slots[:kept]
        if num_filled >= 0:
            move.num_computed = num_computed
        self._out(held, move, now)

    def _out(self, held: Held, move: Move, now: float) -> None:
        move.stay = Stay.OUT
        if move.returns is not None:
            self._return(held, move.returns, now)
            return
        num_computed = max(0, move.num_computed) if held.is_running else 0
        self._taken.append(self._book.detached(held, num_computed, now))

    def take_effects(self) -> list[Detached]:
        """Since the last call."""
        taken, self._taken = self._taken, []
        return [one for one in taken if self._move(one.request_id) is not None]

    # ------------------------------------------------------------------------------------ when it is out of it

    def pin_rest(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        """After `Detached`: all blocks from `first_block` on with computed tokens, none of one that waits. None: it has
        ended, or its KV is lost."""
        held, move = self._book.get(request_id), self._move(request_id)
        if held is None or move is None or move.stay is not Stay.OUT:
            return None
        if not held.is_running:
            return PinnedBlocks(self._book.model, False, 0, [], b"")
        if move.num_computed < 0 or move.first_block != first_block:
            return None
        blocks = list(move.rest)
        self._slots.retain(blocks)
        num_full = min(len(blocks), move.num_computed // self._block_size - first_block)
        return PinnedBlocks(self._book.model, False, first_block, blocks, self._hashes(first_block, num_full))

    def freeze(self, request_id: str) -> bool:
        """After `Detached`: neither cancel nor deadline end it any more. False: it has ended."""
        move = self._move(request_id)
        if move is None or move.stay is not Stay.OUT:
            return False
        move.stay = Stay.FROZEN
        return True

    def is_frozen(self, request_id: str, *, cancels: bool = False) -> bool:
        """Whether nothing may end it here. `cancels`: it is to be cancelled as soon as it is known whose it is."""
        move = self._move(request_id)
        if move is None or move.stay is not Stay.FROZEN:
            return False
        move.is_cancelled |= cancels
        return True

    def reattach(self, request_id: str, now: float, epoch: int | None = None) -> None:
        """It goes on here, in `epoch` if given."""
        held, move = self._book.get(request_id), self._move(request_id)
        if held is None or move is None:
            return
        epoch = held.request.epoch if epoch is None else epoch
        if move.stay is Stay.LEAVING:
            move.returns = epoch
        elif move.stay in (Stay.OUT, Stay.FROZEN):
            self._return(held, epoch, now)

    def _return(self, held: Held, epoch: int, now: float) -> None:
        move = self._forget(held.request_id)
        self.commands += self._book.restart(held, epoch, now)
        if move.is_cancelled:
            self.cancelled.append(held.request_id)

    def release(self, request_id: str, now: float) -> bool:
        """It is another's. Returns whether it was to be cancelled."""
        if self._move(request_id) is None:
            return False
        move = self._forget(request_id)
        self._book.drop(move.held)
        return move.is_cancelled

    def end_migration(self, request_id: str, now: float) -> None:
        """It stays where it was never detached."""
        move = self._move(request_id)
        if move is not None and move.stay is Stay.PINNED:
            self._forget(request_id)
            move.held.moved_s = now

    def ended(self, request_id: str) -> None:
        """The request has ended here."""
        if request_id in self._moves:
            self._forget(request_id)

    def _forget(self, request_id: str) -> Move:
        move = self._moves.pop(request_id)
        self._slots.release(move.rest)
        move.rest = []
        return move

    def _hashes(self, first_block: int, count: int) -> bytes:
        return hashes_of(self._book.facts.layout, first_block, count)


class _Reserved:
    """Slots for a request that comes: of its first blocks, in order."""

    __slots__ = ("slots", "stages")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.stages: dict[int, Reservation] = {}


class Arrivals:
    """Requests that come; the native engine's are in `shared/engine/reservations.py` and `incoming.py`."""

    def __init__(self, book: Book, slots: Slots) -> None:
        self._book = book
        self._slots = slots
        self._reserved: dict[str, _Reserved] = {}
        self._importing: dict[str, list[int]] = {}
        """By key in the engine: slots from which it has not taken the KV yet."""
        self.adopted: list[Held] = []
        """Since the host asked last."""
        self.commands: list[Command] = []

    def reserve(self, query: PreAllocate, now: float) -> Reservation | ErrorInfo:
        """Slots for a stage's blocks. The same stage again is answered alike. Refused with BAD_REQUEST (another layout, or
        not the next block), TOO_LONG, GONE, or OVERLOADED."""
        reserved = self._reserved.get(query.migration_id)
        if reserved is not None and (answered := reserved.stages.get(query.stage)) is not None:
            return answered
        if (refused := self._refusal(query, 0 if reserved is None else len(reserved.slots))) is not None:
            return refused
        slots = self._slots.take(query.num_blocks)
        if slots is None:
            return ErrorInfo(ErrorCode.OVERLOADED, f"no staging memory for {query.num_blocks} KV blocks")
        reserved = self._reserved.setdefault(query.migration_id, _Reserved())
        reserved.slots += slots
        reservation = reserved.stages[query.stage] = Reservation(query.migration_id, 0, slots)
        return reservation

    def _refusal(self, query: PreAllocate, num_reserved: int) -> ErrorInfo | None:
        facts = self._book.facts
        if query.block_size != facts.block_size:
            message = f"blocks here have {facts.block_size} tokens, not {query.block_size}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "block_size")
        num_hashes = min(query.num_blocks, len(query.hashes) // HASH_BYTES)
        if query.hashes != hashes_of(facts.layout, query.first_block, num_hashes):
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"the KV here is laid out otherwise: {facts.layout}", "hashes")
        if query.max_tokens > facts.max_model_len:
            message = f"{query.max_tokens} tokens at most; here {query.model!r} takes {facts.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if not num_reserved and query.first_block:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for the blocks before is not here any more")
        if query.on_host or query.first_block != num_reserved:
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"block {num_reserved} should come next", "first_block")
        if not self._book.has_room(query.num_blocks + sum(len(one.slots) for one in self._reserved.values())):
            return ErrorInfo(ErrorCode.OVERLOADED, f"no room for {query.num_blocks} KV blocks of {query.model!r}")
        return None

    def adopt(self, commit: Commit, now: float) -> ErrorInfo | None:
        """The request is this instance's. After a refusal the reservation is as before."""
        book, request = self._book, commit.request
        held = book.get(request.request_id)
        if held is not None and held.request.epoch >= request.epoch:
            return ErrorInfo(ErrorCode.CONFLICT, f"held here in epoch {held.request.epoch}")
        reserved = self._reserved.get(commit.migration_id)
        num_computed = commit.progress.num_computed
        num_blocks = -(-num_computed // book.facts.block_size)
        if num_blocks and reserved is None:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for this migration is not here any more")
        if reserved is not None and num_blocks > len(reserved.slots):
            return ErrorInfo(ErrorCode.BAD_REQUEST, "not the sequence that was announced")
        if not commit.num_blocks and not book.has_room(-(-len(request.prompt) // (4 * book.facts.block_size))):
            return ErrorInfo(ErrorCode.OVERLOADED, "it would wait here too")
        slots = [] if reserved is None else reserved.slots[:num_blocks]
        adopted = book.adopt(request, commit.progress, tuple(slots), now)
        if isinstance(adopted, ErrorInfo):
            return adopted
        held, commands = adopted
        self.commands += commands
        self.adopted.append(held)
        if slots:
            self._slots.retain(slots)
            self._importing[held.key] = slots
        self.release(commit.migration_id)
        return None

    def imported(self, key: str) -> None:
        """The engine has no more use for the slots of a sequence that came."""
        self._slots.release(self._importing.pop(key, []))

    def release(self, migration_id: str) -> None:
        """Frees what is reserved; nobody may write there any more."""
        if (reserved := self._reserved.pop(migration_id, None)) is not None:
            self._slots.release(reserved.slots)


def hashes_of(layout: str, first_block: int, count: int) -> bytes:
    """Hashes of the layout and of blocks' places, so that only an engine with the same layout takes the blocks. Hashes of
    their tokens, which engines of others make in their own ways, are not told."""
    return b"".join(
        hashlib.blake2b(f"{layout} {block}".encode(), digest_size=HASH_BYTES).digest()
        for block in range(first_block, first_block + count)
    )
