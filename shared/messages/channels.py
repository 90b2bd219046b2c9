"""What a message travels on: a channel names a subject, or a bucket, and the types on it.

Four kinds exist: `Topic` (publish/subscribe), `Endpoint` (request/reply), `Bucket` (JetStream key-value) and, for large
things, `ObjectBucket`. Subjects may hold placeholders that `at()` fills: `INSTANCE_SUBMIT.at(instance_id="node-a-0")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

MAX_MESSAGE_BYTES = 512 * 1024
"""Larger things go through an object bucket."""

Message = TypeVar("Message")
Query = TypeVar("Query")
Reply = TypeVar("Reply")


@lru_cache(maxsize=16384)
def _filled(channel: Any, ids: tuple[tuple[str, str], ...]) -> Any:
    for _, value in ids:
        if not value or any(c in value for c in ". *>\t\r\n"):
            raise ValueError(f"{value!r} cannot be part of a subject")
    return replace(channel, subject=channel.subject.format(**dict(ids)))


@dataclass(frozen=True)
class Topic(Generic[Message]):
    """Publish/subscribe: at most once, no reply."""

    subject: str
    type: type[Message]

    def at(self, **ids: str) -> Topic[Message]:
        filled: Topic[Message] = _filled(self, tuple(ids.items()))
        return filled


@dataclass(frozen=True)
class Endpoint(Generic[Query, Reply]):
    """Request/reply: exactly one typed reply or one typed error within a deadline."""

    subject: str
    query: type[Query]
    reply: type[Reply]

    def at(self, **ids: str) -> Endpoint[Query, Reply]:
        filled: Endpoint[Query, Reply] = _filled(self, tuple(ids.items()))
        return filled


@dataclass(frozen=True)
class Bucket(Generic[Message]):
    """JetStream key-value. `ttl_s`: an entry not written again for so long is gone. `durable`: kept on disk."""

    name: str
    type: type[Message]
    ttl_s: float | None = None
    durable: bool = False


@dataclass(frozen=True)
class ObjectBucket:
    """JetStream object store for byte blobs over `MAX_MESSAGE_BYTES`."""

    name: str


def bucket_key(name: str) -> str:
    """`name` as a JetStream key: characters outside [A-Za-z0-9_/-] become =XX (hexadecimal UTF-8 bytes)."""
    safe = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-/")
    return "".join(chr(b) if b in safe else f"={b:02X}" for b in name.encode())
