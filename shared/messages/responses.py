"""What gateways keep of the Responses API."""

from __future__ import annotations

import msgspec


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    """Whose key made it."""
    body: bytes
    """The answer, as JSON."""
    conversation: bytes
    """The items of all requests and answers up to and with it, as JSON."""
