"""What keys use over all gateways, as these tell each other."""

from __future__ import annotations

import msgspec

from shared.messages.requests import Amount, RequestClass


class GatewayAlive(msgspec.Struct, frozen=True, array_like=True):
    """A gateway that counts the use of keys (bucket with TTL)."""

    gateway_id: str


class KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway has of a key: calls in flight, and tokens of the last minute."""

    num_online: Amount = 0
    num_offline: Amount = 0
    tokens: tuple[tuple[int, int], ...] = ()
    """Second of the Unix epoch, and the tokens used in it."""

    def num_in_flight(self, request_class: RequestClass) -> int:
        return self.num_online if request_class is RequestClass.ONLINE else self.num_offline


class KeyUses(msgspec.Struct, frozen=True, array_like=True):
    """What all gateways have of a key with limits."""

    tenant: str = ""
    """Tenant's name as it is shown."""
    gateways: dict[str, KeyUse] = {}
    max_in_flight: Amount | None = None
    """Most requests in flight of each class; None: no limit. The next field likewise:"""
    tokens_per_minute: Amount | None = None

    def num_in_flight(self, request_class: RequestClass) -> int:
        return sum(use.num_in_flight(request_class) for use in self.gateways.values())

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for use in self.gateways.values() for _, num_tokens in use.tokens)
