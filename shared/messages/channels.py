"""What a message travels on: a channel names a subject, or a bucket, and the types on it.

Four kinds exist: `Topic` (publish/subscribe), `Endpoint` (request/reply), `Bucket` (JetStream key-value) and, for large
things, `ObjectBucket`. Subjects may hold placeholders that `at()` fills: `INSTANCE_SUBMIT.at(instance_id="node-a-0")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from functools import lru_cache
from typing import Any, Generic, TypeVar

MAX_MESSAGE_BYTES = 512 * 1024
"""Larger things go through an object bucket."""


class Role(Flag):
    """Who talks on the bus, each with a user of its own (shared/bus/permissions.py)."""

    NOBODY = 0
    GATEWAY = auto()
    SCHEDULER = auto()
    PLACEMENT = auto()
    WORKER = auto()
    """A node agent and its instances. It hears of its own node's subjects only, where users are per node."""
    OWN_NODE = auto()
    """Sender: the worker on whose node the addressed instance is, and no other."""
    OPERATOR = auto()
    """The command `tideway`."""


Message = TypeVar("Message")
Query = TypeVar("Query")
Reply = TypeVar("Reply")


@lru_cache(maxsize=16384)
def _filled(channel: Any, ids: tuple[tuple[str, str], ...]) -> Any:
    for _, value in ids:
        if not value or any(c in value for c in ". *>\t\r\n"):
            raise ValueError(f"{value!r} cannot be part of a subject")
    more = {"is_addressed": True} if isinstance(channel, Endpoint) else {}
    return replace(channel, subject=channel.subject.format(**dict(ids)), **more)


@dataclass(frozen=True)
class Topic(Generic[Message]):
    """Publish/subscribe: at most once, no reply. (Roles are not compared: `at` looks channels up for every message.)"""

    subject: str
    type: type[Message]
    sent_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)
    heard_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)

    def at(self, **ids: str) -> Topic[Message]:
        filled: Topic[Message] = _filled(self, tuple(ids.items()))
        return filled


@dataclass(frozen=True)
class Endpoint(Generic[Query, Reply]):
    """Request/reply: exactly one typed reply or one typed error within a deadline."""

    subject: str
    query: type[Query]
    reply: type[Reply]
    sent_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)
    served_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)
    is_addressed: bool = field(default=False, compare=False, kw_only=True)
    """One process alone serves it, whose id is in the subject."""

    def at(self, **ids: str) -> Endpoint[Query, Reply]:
        filled: Endpoint[Query, Reply] = _filled(self, tuple(ids.items()))
        return filled


@dataclass(frozen=True)
class Bucket(Generic[Message]):
    """JetStream key-value. `ttl_s`: an entry not written again for so long is gone. `durable`: kept on disk.
    `drops_oldest`: to make room, where others refuse what is new. `is_read_from_copies`: what any copy has may be read while
    the leader of the copies does not answer.

    `writers`: the keys that each role writes; with a placeholder a worker writes those of its own node, `*` are all but
    those that another role writes.
    `declared_by`: makes the bucket, and changes its size; the others wait until it is there."""

    name: str
    type: type[Message]
    ttl_s: float | None = None
    durable: bool = False
    drops_oldest: bool = field(default=False, kw_only=True)
    is_read_from_copies: bool = field(default=False, kw_only=True)
    declared_by: Role = field(default=Role.PLACEMENT, compare=False, kw_only=True)
    writers: Mapping[Role, str] = field(default_factory=dict, compare=False, kw_only=True)
    read_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)
    purged_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)


@dataclass(frozen=True)
class ObjectBucket:
    """JetStream object store for byte blobs over `MAX_MESSAGE_BYTES`."""

    name: str
    used_by: Role = field(default=Role.NOBODY, compare=False, kw_only=True)


def bucket_key(name: str) -> str:
    """`name` as a JetStream key: characters outside [A-Za-z0-9_/-] become =XX (hexadecimal UTF-8 bytes)."""
    safe = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-/")
    return "".join(chr(b) if b in safe else f"={b:02X}" for b in name.encode())
