"""The KV pool of an instance as the console draws it: asked for once a second at most, while somebody looks."""

from __future__ import annotations

from shared.engine.memory.allocator import Allocator
from shared.engine.memory.blocks import BlockPool
from shared.engine.sequence import Sequence, State
from shared.messages.console import MAX_POOL_CELLS, MAX_POOL_SEQUENCES, PoolSequence, PoolView


def pool_view(memory: Allocator, held: list[Sequence]) -> PoolView:
    """`held`: all that the instance holds."""
    models = list(memory.queues)
    index = {model: number for number, model in enumerate(models)}
    owners, use = _cells(memory.pool, index)
    host_owners, host_use = (b"", b"") if memory.host.pool is None else _cells(memory.host.pool, index)
    sequences, num_cells = [], 0
    for sequence in held[:MAX_POOL_SEQUENCES]:
        per_merged = memory.queues[sequence.model].shape.blocks_per_merged
        merged = list(dict.fromkeys(block // per_merged for block in sequence.blocks))[: MAX_POOL_CELLS - num_cells]
        num_cells += len(merged)
        is_suspended = sequence.number in memory.queues[sequence.model].suspended
        sequences.append(
            PoolSequence(
                request_id=sequence.request.request_id,
                model=index[sequence.model],
                state="suspended" if is_suspended else State(sequence.state).name.lower(),
                is_online=sequence.is_online,
                num_tokens=sequence.num_tokens,
                num_blocks=len(sequence.blocks),
                num_host_blocks=len(sequence.host_blocks),
                merged=merged,
            )
        )
    return PoolView(
        models=models,
        owners=owners,
        use=use,
        host_owners=host_owners,
        host_use=host_use,
        sequences=sequences,
        num_sequences=len(held),
    )


def _cells(pool: BlockPool, index: dict[str, int]) -> tuple[bytes, bytes]:
    owners, use = bytearray(pool.num_merged), bytearray(pool.num_merged)
    for merged, model, share in pool.cells():
        owners[merged] = min(255, 1 + index[model])
        use[merged] = round(255 * share)
    return bytes(owners), bytes(use)
