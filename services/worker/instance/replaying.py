"""What an instance, native or on another's engine, answers gateways that may have missed frames."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.worker.instance.migrations import InstanceMigrations
from services.worker.instance.output_log import OutputLog, cut
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.requests import ReplayQuery, ReplayReply

POSITION_BYTES = 1024
"""Most that a position takes in an answer, without tokens."""


def replayed(
    query: ReplayQuery,
    outputs: OutputLog,
    held_epoch: Callable[[str], int | None],
    migrations: InstanceMigrations | None,
) -> ReplayReply:
    """Answers with what went out of each request from its position on, as far as it fits into a message; else with who has
    it, if that is known. `held_epoch`: in which a request is held, None if it is not. `migrations` None: requests do not
    move."""
    reply = ReplayReply([], [], [])
    room_bytes = MAX_MESSAGE_BYTES - POSITION_BYTES * len(query.positions)
    for position in query.positions:
        request_id = position.request_id
        if query.is_of_any_epoch:
            moved = None if migrations is None else migrations.handed_over(request_id)
            known = max(0, outputs.epoch(request_id), held_epoch(request_id) or 0)
            position = msgspec.structs.replace(position, epoch=known if moved is None else moved.epoch)
        entry = outputs.replay_or_begin(position, held_epoch)
        if entry is not None:
            entry, num_bytes = cut(entry, room_bytes)
            room_bytes -= num_bytes
            reply.entries.append(entry)
        elif migrations is not None and (owner := migrations.owner(request_id, position.epoch)) is not None:
            reply.moved.append(owner)
        else:
            reply.unknown.append(request_id)
    return reply
