"""Requests that run here but are not this instance's any more.

A source that lost sight of this instance after it had sent Commit goes on with the request itself, in a higher epoch. When
it finds that the instance lives, it says so, and the copy here is forgotten without a word: an end would be taken for the
request's own by whoever has not heard of the higher epoch yet.
"""

from __future__ import annotations

from typing import NamedTuple

from services.worker.engine_loop import EngineLoop
from services.worker.migration.host import MigrationHost
from shared.engine.calls import DropMoved, Seal, TakeOut
from shared.engine.moving import TakenOut
from shared.messages.cluster import MoveOutcome
from shared.migration.source import EPOCHS_OF_A_MOVE


class _Copy(NamedTuple):
    epoch: int
    """In which it was taken over here."""
    source_id: str


class DisownedRequests:
    def __init__(self, loop: EngineLoop, host: MigrationHost) -> None:
        self._loop = loop
        self._host = host
        self._copies: dict[str, _Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, request_id: str, epoch: int, source_id: str) -> None:
        self._copies[request_id] = _Copy(epoch, source_id)
        self.give_up()

    def give_up(self) -> None:
        """Takes them out of their batches, those that cannot be now at the next call."""
        for request_id, copy in list(self._copies.items()):
            if self._loop.held_epoch(request_id) != copy.epoch:
                del self._copies[request_id]  # it has ended, or was placed again
            else:
                self._loop.apply(TakeOut(request_id))

    def on_taken_out(self, taken: TakenOut) -> None:
        copy = self._copies.get(taken.request_id)
        if copy is None or copy.epoch != taken.request.epoch:
            return
        del self._copies[taken.request_id]
        if self._loop.apply(Seal(taken.request_id)):
            self._loop.apply(DropMoved(taken.request_id))
            epoch = copy.epoch - 1 + EPOCHS_OF_A_MOVE
            outcome = MoveOutcome(taken.request_id, copy.source_id, epoch, True)
            self._host.on_move_ended(outcome, taken.request, taken)
