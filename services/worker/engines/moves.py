"""Requests that move between instances with the same engine of others: the engine's side of `services.worker.migration`,
which takes it for a native engine's loop. What is decided is in `shared/engines/moving.py`."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from shared.engine.calls import Call
from shared.engine.handover import Detached
from shared.engines.book import Book, Held
from shared.engines.messages import Command, EngineFacts, Exported, Imported, Moved, TakenOut
from shared.engines.moving import Moving
from shared.messages.requests import GenerationRequest
from shared.messages.timeline import EventKind, RequestEvent
from shared.runtime.request_events import EventPost

if TYPE_CHECKING:
    from services.worker.kv.kv_store import KvBlocks

T = TypeVar("T")

FILL_TIMEOUT_S = 10.0


class EngineMoves:
    """`send`: commands to the engine. `on_effects`: requests that left it, those that came and those that are back and to be
    cancelled; called by the event loop, never within a call."""

    def __init__(
        self,
        book: Book,
        cooldown_s: float,
        clock: Callable[[], float],
        send: Callable[[Sequence[Command]], None],
        on_effects: Callable[[list[Detached], list[Held], list[str]], None],
    ) -> None:
        self._moving = Moving(book, cooldown_s)
        self._clock = clock
        self._send = send
        self._on_effects = on_effects
        self._facts = book.facts
        self._rows: Any = None
        self._changed = asyncio.Event()
        self._is_due = False

    @property
    def num_slots_free(self) -> int:
        """Free slots of the staging memory."""
        return self._moving.slots.num_free

    # ------------------------------------------------------------------------------- in the place of an EngineLoop

    def now(self) -> float:
        return self._clock()

    def apply(self, call: Call[T]) -> T:
        found = call.on(self._moving, self._clock())  # type: ignore[arg-type]  # it has the parts that calls of moves name
        self._flush()
        return found

    def ask(self, question: Callable[[Any], T]) -> T:
        return question(self._moving)

    def held_epoch(self, request_id: str) -> int | None:
        return self._moving.held_epoch(request_id)

    def claim_blocks(self, model: str, blocks: list[int]) -> Future[None]:
        """Nobody else writes to slots that are taken."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    async def filled(self, blocks: Sequence[int]) -> bool:
        """Whether these slots hold what was to be copied into them, as soon as that is known."""
        slots, wanted = self._moving.slots, set(blocks)
        try:
            async with asyncio.timeout(FILL_TIMEOUT_S):
                while wanted & slots.unfilled:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return not wanted & slots.failed

    def block_rows(self, model: str, on_host: bool) -> KvBlocks:
        """`[num_slots, block_bytes]` uint8: the staging memory, which lives as long as the engine's process maps it; no
        rows on the host. Raises `OSError`."""
        import torch

        if on_host:
            return torch.empty(0, 0, dtype=torch.uint8)
        if self._rows is None:
            self._rows = mapped(self._facts)
        rows: torch.Tensor = self._rows
        return rows

    # ------------------------------------------------------------------------------------------ from the instance

    def on_moved(self, message: Moved) -> None:
        """An answer of the engine."""
        moving, now = self._moving, self._clock()
        if isinstance(message, Exported):
            moving.outgoing.exported(message.slots, message.is_done)
        elif isinstance(message, TakenOut):
            moving.outgoing.taken_out(message.key, message.num_filled, message.num_computed, now)
        elif isinstance(message, Imported):
            moving.incoming.imported(message.key)
        self._changed.set()
        self._flush()

    def ended(self, request_id: str) -> None:
        self._moving.outgoing.ended(request_id)

    def can_move(self, held: Held) -> bool:
        """See `Departures.can_move`."""
        return self._moving.outgoing.can_move(held)

    def is_frozen(self, request_id: str, *, cancels: bool = False) -> bool:
        """See `Departures.is_frozen`."""
        return self._moving.outgoing.is_frozen(request_id, cancels=cancels)

    def _flush(self) -> None:
        if commands := self._moving.take_commands():
            self._send(commands)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        moving = self._moving
        taken = moving.outgoing.take_effects()
        adopted, moving.incoming.adopted = moving.incoming.adopted, []
        cancelled, moving.outgoing.cancelled = moving.outgoing.cancelled, []
        if taken or adopted or cancelled:
            self._on_effects(taken, adopted, cancelled)


class MoveEvents:
    """What the timelines of requests that move are told (`MovingEvents`); no events are kept for spans."""

    def __init__(self, post: EventPost, clock: Callable[[], float]) -> None:
        self._post = post
        self._clock = clock

    def add(self, request: GenerationRequest, kind: EventKind, cause: str = "", place: str = "") -> None:
        event = RequestEvent(request.request_id, request.epoch, kind, self._clock(), cause, place)
        self._post.add(request.gateway_id, event)

    def of_span(self, request_id: str) -> list[RequestEvent]:
        return []


def mapped(facts: EngineFacts) -> Any:
    """The staging memory of an engine, `[num_slots, block_bytes]` uint8. Raises `OSError`."""
    import torch

    with open(facts.staging, "r+b") as file:
        memory = mmap.mmap(file.fileno(), facts.num_slots * facts.block_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(facts.num_slots, facts.block_bytes)
