"""Which model answers a request to a route: weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed
hash tables", SPAA 2005). Pure.

Each arm scores -weight / ln(u), u in (0, 1) a hash of route, key and model, and the highest score wins: an arm gets its
share of the keys, a key stays with its arm, and where an arm comes, goes or changes its weight only keys to or from that
arm move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from shared.messages.routes import Arm, Route, Sticky


class Role(StrEnum):
    """Part that a model plays in an answer."""

    ARM = "arm"
    FALLBACK = "fallback"
    """The arm that the request belongs to is down."""
    MIRROR = "mirror"


class Chosen(NamedTuple):
    model: str
    role: Role


def uniform(*parts: str) -> float:
    """In (0, 1), a function of the parts."""
    digest = blake2b(b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts), digest_size=6)
    return (int.from_bytes(digest.digest(), "big") | 1) / (1 << 48)


def key_of(route: Route, tenant: str, user: str | None, request_id: str) -> str:
    """What the choice depends on."""
    if route.sticky is Sticky.KEY:
        return f"key {tenant}"
    if route.sticky is Sticky.USER and user:
        return f"user {len(tenant)} {tenant} {user}"
    return f"request {request_id}"


def choose(route: Route, key: str, is_up: Callable[[str], bool]) -> Chosen:
    """The arm that is up, else the first fallback that is. Where nothing is up, the arm it belongs to: whoever asks
    learns there what is wrong, or waits."""

    def score(arm: Arm) -> float:
        return -arm.weight / math.log(uniform(route.name, key, arm.model))

    ranked = sorted((arm for arm in route.arms if arm.weight > 0), key=score, reverse=True)
    own = ranked[0].model
    for model in (*(arm.model for arm in ranked), *route.fallbacks):
        if is_up(model):
            return Chosen(model, Role.ARM if model == own else Role.FALLBACK)
    return Chosen(own, Role.ARM)


def mirrored_to(route: Route, chosen: str, request_id: str) -> list[str]:
    """The models that get a copy of the request, which `chosen` answers."""
    return [
        mirror.model
        for mirror in route.mirrors
        if mirror.model != chosen and uniform(route.name, "mirror", mirror.model, request_id) < mirror.share
    ]
