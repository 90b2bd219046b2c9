"""What gateways keep on the bus of a call that may outlive its client's connection, or its gateway."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.requests import GenerationRequest, Seconds, TokenEntry


class KeptCall(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A call as another gateway needs it to make the same answer."""

    call_id: str
    """Id that clients know; its requests are `call_id-0`, `call_id-1`, ..."""
    tenant: str
    """Id of whom it is for: nobody else may have it."""
    operation: Literal["chat", "text_completion"]
    shown_model: str
    """Model name that the client uses."""
    model: str
    """Model that answers."""
    created_s: int
    """Unix time that the answer shows."""
    arrived_s: Seconds
    """Unix time."""
    window_s: Seconds
    """It goes on for so long when nobody reads it; 0: it is cancelled at once."""
    expires_s: Seconds
    """Unix time from which it is no longer to be had."""
    template: GenerationRequest
    """What its requests have in common. Their frames go to the gateway named here, whoever has the call now."""
    plan: bytes
    """The gateway's own: prompts, and how the answer is made and shown."""
    claim: str = ""
    """Key in the bucket of idempotency keys; empty: the client gave none."""
    outputs: list[TokenEntry] = []
    """The whole output of each request, once all have ended."""
    digest: bytes = b""
    """Digest of the client's request, as in an `IdempotencyClaim`; empty: the client gave no key."""
    holder: str = ""
    """Mark of who has the call: whoever began it, or took it up last. Only they remove its record when it has failed."""


class IdempotencyClaim(msgspec.Struct, frozen=True, array_like=True):
    """The call that a client's idempotency key stands for."""

    call_id: str
    digest: bytes
    """SHA-256 of the request."""


class CancelCall(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to gateways: whoever has this call ends it."""

    call_id: str


class TakenOver(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to gateway: somebody reads this call here now."""

    call_id: str
    gateway_id: str
    left: str = ""
    """Set: nobody does any more, and this is the call's mark here. Whoever reads it elsewhere takes it over; else it is
    given up."""


class CallCopy(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to gateway: keep this record in memory, as JetStream does not take it now."""

    record: KeptCall
    is_waiting: bool = False
    """The sender has taken the record of the receiver's call under the same key, and waits for what becomes of that."""


class CopyTaken(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a `CallCopy`."""

    first: KeptCall | None = None
    """The call that the idempotency key stands for already: the other one is not to begin. None: the copy is kept."""


class DropCopy(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to gateways: nobody can have this call any more."""

    call_id: str
