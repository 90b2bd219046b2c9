"""What each role may do on NATS, from the catalogue of subjects. Pure.

A role may publish what it sends, subscribe to what it hears or serves, use the JetStream calls that its buckets need, hear
replies below an inbox prefix of its own, and publish below those of the roles that it answers. (NATS's `allow_responses`
would let whoever sends what it hears itself publish anything: as the reply subject of that.) Nobody may delete a stream. A
worker whose node is given is kept to the subjects and entries of that node's instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shared.messages import catalogue
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Role, Topic

ROLES = {str(role.name).lower(): role for role in Role if role is not Role.OWN_NODE}
"""By the name of their user."""

MAX_NODE_INSTANCES = 32
"""Whose subjects a worker of a known node may use."""

_SERVICE_DISCOVERY = "$SRV.>"
TOKEN = re.compile(r"[A-Za-z0-9_-]+")
"""What users and nodes may be named, as ids in settings (`SubjectPart`)."""


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    never_publish: tuple[str, ...]
    """Subjects excepted from those that `publish` allows."""
    subscribe: tuple[str, ...]


def role_of(user: str) -> Role | None:
    """The role of a user that is named after it, or after that and its node (`worker-NODE`)."""
    return ROLES.get(user.partition("-")[0])


def declared_streams(role: Role) -> frozenset[str]:
    """Those that `role` makes and sizes."""
    objects = (value for value in tuple(vars(catalogue).values()) if isinstance(value, ObjectBucket))
    return frozenset(
        [f"KV_{bucket.name}" for bucket in catalogue.buckets_declared_by(role)]
        + [f"OBJ_{bucket.name}" for bucket in objects if role in bucket.used_by]
    )


def inbox_prefix(user: str) -> str:
    """Below which a client of `user` hears replies: `_INBOX.gateway`, or `_INBOX.worker.NODE`, so that `_INBOX.worker.>` is
    those of all workers. A user without a name, or with one that is no token, has NATS's own."""
    if not TOKEN.fullmatch(user):
        return "_INBOX"
    role, _, node_id = user.partition("-")
    return f"_INBOX.{role}.{node_id}" if role in ROLES and node_id else f"_INBOX.{user}"


def permissions(role: Role, user: str, node_id: str = "") -> Permissions:
    """What a user in `role` may do. `node_id`: the node of a worker that runs there and nowhere else. `ValueError` for what
    is no token."""
    for token in (user, node_id or "any"):
        if not TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} cannot be part of a subject: it may have A-Z, a-z, 0-9, _ and - only")
    publish, subscribe = {_SERVICE_DISCOVERY} if role is Role.OPERATOR else set(), {_SERVICE_DISCOVERY}
    never: set[str] = set()
    subscribe.add(inbox_prefix(user) + ".>")
    publish |= _inboxes(Role.OPERATOR)  # whose tools ask every service
    for channel in vars(catalogue).values():
        if isinstance(channel, Topic | Endpoint):
            everywhere = _filled(channel.subject, "")
            own = _filled(channel.subject, node_id)
            if role in channel.sent_by:
                publish |= everywhere
            if role is Role.WORKER and Role.OWN_NODE in channel.sent_by:
                publish |= own
            if role in (channel.heard_by if isinstance(channel, Topic) else channel.served_by):
                subscribe |= own
                if isinstance(channel, Endpoint):
                    publish |= _inboxes(channel.sent_by)
        elif isinstance(channel, Bucket):
            publish.update(_calls_of_bucket(role, channel))
            for key in _filled(channel.writers.get(role, ""), node_id) - {""}:
                publish.add(f"$KV.{channel.name}.{key}")
                if key == "*":
                    others = set(channel.writers.values()) - {key}
                    never.update(f"$KV.{channel.name}.{other}" for other in others)
        elif isinstance(channel, ObjectBucket) and role in channel.used_by:
            publish.update(_calls_of_objects(channel))
    return Permissions(tuple(sorted(publish)), tuple(sorted(never)), tuple(sorted(subscribe)))


def _inboxes(senders: Role) -> set[str]:
    """Subjects on which these roles hear replies."""
    if Role.OWN_NODE in senders:
        senders |= Role.WORKER
    return {f"_INBOX.{name}.>" for name, role in ROLES.items() if role in senders}


def _filled(template: str, node_id: str) -> set[str]:
    """The subjects (or keys) that `template` stands for: those of the node, or with `*` where that is not known."""
    if "{instance_id}" in template and node_id:
        return {template.format(instance_id=f"{node_id}-{index}") for index in range(MAX_NODE_INSTANCES)}
    return {re.sub(r"\{(\w+)\}", lambda match: node_id if node_id and match[1] == "node_id" else "*", template)}


def _calls_of_bucket(role: Role, bucket: Bucket[object]) -> Iterator[str]:
    stream = f"KV_{bucket.name}"
    if role in bucket.declared_by:
        yield from _declaring(stream)
    if role in bucket.read_by:
        yield f"$JS.API.CONSUMER.CREATE.{stream}"
        yield f"$JS.API.STREAM.MSG.GET.{stream}"
        if bucket.is_read_from_copies:
            yield f"$JS.API.DIRECT.GET.{stream}.>"
    if role in bucket.purged_by:
        yield f"$JS.API.STREAM.PURGE.{stream}"
    if role in bucket.read_by | bucket.declared_by or role in bucket.writers:
        yield f"$JS.API.STREAM.INFO.{stream}"


def _calls_of_objects(bucket: ObjectBucket) -> Iterator[str]:
    stream = f"OBJ_{bucket.name}"
    yield from _declaring(stream)
    yield f"$O.{bucket.name}.>"
    for call in ("STREAM.INFO", "STREAM.PURGE", "STREAM.MSG.GET", "DIRECT.GET"):
        yield f"$JS.API.{call}.{stream}"
    yield f"$JS.API.DIRECT.GET.{stream}.>"


def _declaring(stream: str) -> Iterator[str]:
    # The list, to take room from another stream.
    yield from (f"$JS.API.STREAM.CREATE.{stream}", f"$JS.API.STREAM.UPDATE.{stream}", "$JS.API.STREAM.LIST")
