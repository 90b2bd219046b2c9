"""Routes: public names for which others' models answer."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Sticky(StrEnum):
    """What stays with one arm."""

    NONE = "none"
    """Each request is drawn by itself."""
    KEY = "key"
    """All requests of an API key; of all clients together where there are no keys."""
    USER = "user"
    """All with the same `user` of the same key; those without one are drawn by themselves."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    weight: float = 1.0
    """Its share of the requests is this over the sum of all."""


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    share: float
    """Share of the route's requests, 0 to 1, that are also sent here; nobody is charged for them or sees their answers."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arms: tuple[Arm, ...]
    sticky: Sticky = Sticky.NONE
    mirrors: tuple[Mirror, ...] = ()
    fallbacks: tuple[str, ...] = ()
    """Models that answer, the first that can, while none of the arms can."""
    changed_s: float = 0.0
    """Unix time."""
