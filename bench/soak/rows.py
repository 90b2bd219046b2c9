"""Rows that buckets and object stores of NATS may have more at the end of a soak than after its warm-up. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.reporting import Target
from services.gateway.admin.audit import MAX_ACTIONS
from shared.messages import catalogue
from shared.messages.channels import Bucket

SHORT_TTL_S = 300.0
"""A bucket of a shorter TTL says who is there now."""
SAMPLE_S = 10.0
"""Between two rows of the history, and of the log of requests."""
SLACK = 2
SWEPT = tuple(f"KV_tideway_{name}" for name in ("batches", "batch_terms", "batch_results", "files"))
"""Streams that are empty when what was deleted has been swept."""


@dataclass(frozen=True, slots=True)
class Bound:
    more: float
    why: str


NAMED = Bound(2, "a marker for each name of a model, adapter or route that there ever was")
NOTHING = Bound(0, "as before")
BOUNDS: Mapping[str, Bound] = {
    "KV_tideway_models": NAMED,
    "KV_tideway_adapters": NAMED,
    "KV_tideway_routes": NAMED,
    "KV_tideway_statistics": NAMED,
    "KV_tideway_cost_models": NAMED,
    "KV_tideway_audit": Bound(MAX_ACTIONS, "the last thousand changes"),
    "OBJ_tideway_file_contents": Bound(
        SLACK, "what was made is deleted; the check of the disk has a chunk for a moment"
    ),
}


def is_swept(num_messages: Mapping[str, int]) -> bool:
    return bool(num_messages) and not any(num_messages.get(stream) for stream in SWEPT)


def bound_of(stream: str, seconds: float, num_kept: int) -> Bound:
    """`seconds`: of the soak. `num_kept`: responses and calls under a key that clients asked for."""
    if stream in BOUNDS:
        return BOUNDS[stream]
    if stream in ("KV_tideway_history", "KV_tideway_request_log"):
        return Bound(math.ceil(seconds / SAMPLE_S) + SLACK, f"one each {SAMPLE_S:g} s; old ones go")
    ttl_s = next(
        (one.ttl_s for one in vars(catalogue).values() if isinstance(one, Bucket) and f"KV_{one.name}" == stream), None
    )
    if ttl_s is None:
        return NOTHING
    if ttl_s < SHORT_TTL_S:
        return Bound(SLACK, f"go {ttl_s:g} s after they were written last")
    return Bound(num_kept, f"one for each that was asked for, which goes {ttl_s / 3600:g} h after it")


def targets(before: Mapping[str, int], after: Mapping[str, int], seconds: float, num_kept: int) -> Iterator[Target]:
    for stream in sorted(before.keys() | after.keys()):
        was, now = before.get(stream, 0), after.get(stream, 0)
        bound = bound_of(stream, seconds, num_kept)
        yield Target(
            name=f"more rows of {stream}", value=now - was, limit=bound.more, note=f"{was} to {now}: {bound.why}"
        )
