"""The rows of docs/nats.md, from the catalogue: `python -m tests.tideway.nats_rows` prints its tables."""

from __future__ import annotations

import re

from shared.messages import catalogue
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Role, Topic


def _names(roles: Role) -> str:
    named = {Role.OWN_NODE: "its node's worker"}
    return ", ".join(named.get(role, str(role.name).lower()) for role in roles) or "nobody"


def subject_rows() -> list[str]:
    rows = []
    for channel in vars(catalogue).values():
        if not isinstance(channel, Topic | Endpoint):
            continue
        subject = re.sub(r"\{(\w+)\}", lambda match: match[1].split("_")[0].upper(), channel.subject)
        if isinstance(channel, Topic):
            kind, hearer = channel.type.__name__, channel.heard_by
        else:
            kind, hearer = f"{channel.query.__name__} → {channel.reply.__name__}", channel.served_by
        rows.append(f"| `{subject}` | {kind} | {_names(channel.sent_by)} | {_names(hearer)} |")
    return sorted(rows)


def bucket_rows() -> list[str]:
    rows = []
    for bucket in vars(catalogue).values():
        if isinstance(bucket, Bucket):
            kept = "on disk" if bucket.durable else "in memory"
            kept += "" if bucket.ttl_s is None else f", {bucket.ttl_s:,g} s after it was written"
            writers = ", ".join(_names(role) for role in bucket.writers)
            of, readers = bucket.type.__name__, _names(bucket.read_by)
            rows.append(f"| `{bucket.name}` | {of} | {kept} | {writers} | {readers} |")
        elif isinstance(bucket, ObjectBucket):
            name = _names(bucket.used_by)
            rows.append(f"| `{bucket.name}` | bytes (object store) | on disk | {name} | {name} |")
    return sorted(rows)


if __name__ == "__main__":
    print("\n".join([*subject_rows(), "", *bucket_rows()]))
