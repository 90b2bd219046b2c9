"""Named points of a transfer at which a test may wait, fail or change bytes; nothing happens there by default."""

from __future__ import annotations

from enum import StrEnum

from services.worker.kv_transport.links import Buffer


class FaultPoint(StrEnum):
    OPENED = "opened"
    """The destination accepted a ticket."""
    CHUNK_READY = "chunk_ready"
    """The source is about to send a chunk (with its bytes, after their checksum)."""
    CHUNK_ARRIVED = "chunk_arrived"
    """The destination holds a chunk in staging, unchecked (with its bytes)."""
    BEFORE_END = "before_end"
    """The destination is about to acknowledge."""


class Faults:
    async def at(self, point: FaultPoint, payload: Buffer | None = None) -> None:
        """Called by both ends; may raise anything."""


NO_FAULTS = Faults()
