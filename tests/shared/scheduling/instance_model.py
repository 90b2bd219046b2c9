"""An instance as its contract in shared/messages has it, without a bus."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared.messages.cluster import MigrationOutcome
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    GenerationRequest,
    HeldRequest,
)


@dataclass
class Instance:
    name: str
    incarnation: str
    is_reachable: bool = True
    sequence: int = 0
    held: dict[str, GenerationRequest] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    migrations: list[MigrationOutcome] = field(default_factory=list)
    migrated_in: list[HeldRequest] = field(default_factory=list)
    moved_to: dict[str, str] = field(default_factory=dict)
    """Instances to which cancels are forwarded."""

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        known = self.held.get(request.request_id)
        if known is not None and known.epoch > request.epoch:
            return ErrorInfo(ErrorCode.CONFLICT, "a newer epoch is held")
        if known is None or known.epoch < request.epoch:
            self.held[request.request_id] = request
            self.running.discard(request.request_id)
            self.admitted.append(request.request_id)
        return None

    def end(self, request_id: str) -> GenerationRequest:
        self.running.discard(request_id)
        self.ended.append(request_id)
        return self.held.pop(request_id)

    def hand_over(self, request_id: str, destination: Instance) -> None:
        """A migration that succeeds. A destination that holds the request already refuses."""
        request = self.held[request_id]
        if request_id in destination.held:
            self.migrations.append(MigrationOutcome(request_id, destination.name, request.epoch, False, "refused"))
            return
        moved = msgspec.structs.replace(request, epoch=request.epoch + 1)
        del self.held[request_id]
        self.running.discard(request_id)
        self.moved_to[request_id] = destination.name
        self.migrations.append(MigrationOutcome(request_id, destination.name, moved.epoch, True))
        destination.held[request_id] = moved
        destination.running.add(request_id)
        destination.migrated_in.append(held_as(moved, is_running=True))

    def resume(self, request_id: str, destination_name: str) -> None:
        """A migration to an instance that is gone, and may have taken the request over before."""
        request = self.held[request_id]
        self.held[request_id] = msgspec.structs.replace(request, epoch=request.epoch + 2)
        self.migrations.append(
            MigrationOutcome(request_id, destination_name, request.epoch + 2, False, "destination_lost")
        )


def held_as(request: GenerationRequest, *, is_running: bool) -> HeldRequest:
    return HeldRequest(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        epoch=request.epoch,
        model=request.model,
        num_tokens=1,
        running=is_running,
    )
