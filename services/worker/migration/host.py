"""What migration needs of the instance around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shared.engine.moving import TakenOut
from shared.messages.cluster import InstanceInfo, MoveOutcome
from shared.messages.migration import Commit
from shared.messages.requests import GenerationRequest


class MigrationHost(Protocol):
    """Called in the event loop; nothing here blocks."""

    @property
    def instance_id(self) -> str: ...

    @property
    def is_draining(self) -> bool:
        """It takes no requests, and gives all away."""

    @property
    def leaving_models(self) -> frozenset[str]:
        """Models that are to lose their requests: while there are any, only those requests leave."""

    def peers(self) -> Mapping[str, InstanceInfo]:
        """The registry as it stands, this instance included; nothing where it has not been asked for of late: ask again
        soon. Changes are told (`MigrationService.on_instance`) while the service `needs_peers`."""

    def serves(self, model: str) -> bool:
        """Whether the model takes requests here."""

    def on_adopted(self, commit: Commit, num_output: int) -> None:
        """A request is this instance's from now on: its earlier output can be replayed, its gateway hears of the new owner,
        the next load report names it."""

    def on_move_ended(self, outcome: MoveOutcome, request: GenerationRequest, taken: TakenOut | None) -> None:
        """A migration out of here is over; where the request has moved, cancels and replays for it are passed on. `taken`:
        the request as it left the batch, if it did."""


def device_pool(model: str) -> str:
    """The transport's name of the model's KV slots on the device."""
    return f"device/{model}"


def host_pool(model: str) -> str:
    """Likewise of its checkpoints in host memory."""
    return f"host/{model}"


def pool_of(model: str, on_host: bool) -> str:
    return host_pool(model) if on_host else device_pool(model)
