"""What an instance reports of its load."""

from __future__ import annotations

import msgspec

from shared.cost_model import StepShape
from shared.engine.model_queue import ONLINE_RANKS, ModelQueue
from shared.engine.planner import Planner
from shared.engine.sequence import Rank
from shared.messages import ModelLoad
from shared.policies.virtual_usage import dispatch_virtual_usage, freeness, merged_demand

HOARD_S = 4.0
"""An instance holds at most so many seconds of offline work that it has not begun, so that none idles while another has too
much of it."""


class InstanceLoad(msgspec.Struct, frozen=True):
    """Numbers of one moment, in merged blocks where blocks are meant."""

    dispatch_freeness: float
    free_merged: float
    num_running: int
    models: list[ModelLoad]


def instance_load(planner: Planner, offline_tokens_per_s: float | None) -> InstanceLoad:
    """Counts and freeness (Llumnix section 4.4.3; every waiting request counts whole, offline work not at all).
    `offline_tokens_per_s`: lately computed; None: offline requests are not served."""
    running, waiting, num_running, num_online, models = 0.0, 0.0, 0, 0, []
    for queue in planner.queues.values():
        page, per_merged = queue.shape.page_tokens, queue.shape.slots_per_merged
        for rank in ONLINE_RANKS:
            running += sum(len(sequence.blocks) for sequence in queue.running[rank].values()) / per_merged
            returning = (*queue.restoring.values(), *queue.restored.values())
            running += sum(len(sequence.blocks) for sequence in returning if sequence.rank == rank) / per_merged
            waiting += sum(merged_demand(sequence.total, page, per_merged) for sequence in queue.waiting[rank])
        num_running += queue.num_running
        num_online += sum(len(queue.running[rank]) for rank in ONLINE_RANKS)
        num_offline = sum(1 for sequence in queue.all_held() if not sequence.is_online)
        num_waiting_online = sum(len(queue.waiting[rank]) for rank in ONLINE_RANKS)
        room = 0 if offline_tokens_per_s is None else _offline_room(planner, queue, offline_tokens_per_s)
        budgets = planner.ordering.budgets(queue.all_held())
        models.append(
            ModelLoad(queue.name, queue.num_running, queue.num_waiting, num_offline, num_waiting_online, room, budgets)
        )
    free = freeness(planner.pool.num_merged, dispatch_virtual_usage(running, waiting), num_online)
    return InstanceLoad(free, planner.pool.num_merged - planner.pool.used_merged(), num_running, models)


def _offline_room(planner: Planner, queue: ModelQueue, tokens_per_s: float) -> int:
    """Offline tokens (prompt and output) that could be given beyond those held: what the free slots hold or some seconds
    of work, whichever is less, minus what waits here already; at least a step's worth, so that the instance never runs dry
    between two reports."""
    held = sum(
        sequence.max_total
        for sequence in (*queue.waiting[Rank.OFFLINE], *queue.restoring.values(), *queue.restored.values())
        if not sequence.is_online
    )
    max_tokens = planner.last_limits.max_tokens
    if queue.cost_model is not None and not planner.has_online_work():
        shape = StepShape(max_tokens, max_tokens * max_tokens / 2)
        tokens_per_s = max(tokens_per_s, max_tokens / queue.cost_model.predict(shape))
    by_memory = planner.pool.num_available(queue.name) * queue.shape.page_tokens
    if not planner.num_free_rows:
        by_memory = 0
    by_time = int(tokens_per_s * HOARD_S)
    return max(0, max(min(by_memory, by_time), max_tokens) - held)
