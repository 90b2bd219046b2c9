"""Ways to share one KV pool between models whose blocks differ: merged blocks (Tideway, SeaLLM's section 4.4), split blocks
(MuxServe's: a block is one head of one layer) and fixed partitions. Reckoned, nothing is run.

    table      entries that name the blocks of the requests held: merged 1 a block; split layers * KV heads a block
    sent       4 bytes an entry over the host's link, where an iteration sends the tables whole (as vLLM's did); entries of
               new blocks alone, where tables stay on the device
    held       requests of a model that the pool holds: alone (the other is idle), and where both have as much KV as they can
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import msgspec

from bench.reporting import table
from bench.sharing.systems import A800
from shared.costs.model import StepShape
from shared.engine.memory.slab import blocks_per_merged
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.memory import Memory
from shared.placement.problem import ModelFacts, Problem, traffic
from shared.simulation.multiplexed import SplitKv

SPLIT_BLOCK = SplitKv().block_size
"""Tokens."""
ENTRY_BYTES = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 800, 200
"""Tokens of a request."""
BATCH = 32
NAMES = ("llama-2-7b", "llama-2-13b", "opt-6.7b")


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside another on one A800."""

    model: str
    other: str
    pool_bytes: int
    entries: dict[str, int]
    """Way -> of `BATCH` requests of this model."""
    iteration_s: float
    """Seconds of a decode of them, by the cost model."""
    sent_share: dict[str, float]
    """Way -> time to send the tables whole, over the iteration's."""
    appended_share: dict[str, float]
    """Shares of new entries alone."""
    held_alone: dict[str, int]
    held_both: dict[str, int]


def compare() -> list[Shared]:
    """ValueError: a pair does not fit."""
    found = []
    for first, second in combinations_with_replacement(NAMES, 2):
        pair = [model_facts("a", SHAPES[first], [A800]), model_facts("b", SHAPES[second], [A800])]
        for own, other, names in ((*pair, (first, second)), (*reversed(pair), (second, first))):
            found.append(_shared(own, other, names))
            if first == second:
                break
    return found


def _shared(own: ModelFacts, other: ModelFacts, names: tuple[str, str]) -> Shared:
    node = node_facts("node", A800, 1)
    geometry = Memory(Problem(nodes=(node,), models=(own, other), traffic=traffic([], 1.0))).pool(("a", "b"), node, 1)
    pool_bytes = geometry.merged_bytes * geometry.num_merged
    cost = own.costs[A800.name, 1]
    held_tokens = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    iteration_s = cost.predict(StepShape(0, 0.0, BATCH, BATCH * held_tokens))
    heads = own.num_layers * own.num_kv_heads
    blocks = {"merged": -(-held_tokens // own.block_size), "split": -(-held_tokens // SPLIT_BLOCK)}
    entries = {"merged": BATCH * blocks["merged"], "split": BATCH * blocks["split"] * heads}
    # a sequence needs another block every block_size tokens
    appended = {"merged": BATCH / own.block_size, "split": BATCH / SPLIT_BLOCK * heads}
    entry_s = ENTRY_BYTES / A800.host_bytes_s / iteration_s
    request = PROMPT_TOKENS + OUTPUT_TOKENS
    token_bytes = own.block_bytes / own.block_size
    in_merged = blocks_per_merged(geometry.merged_bytes, own.block_bytes)
    of_request = -(-request // own.block_size)
    split_bytes = -(-request // SPLIT_BLOCK) * SPLIT_BLOCK * token_bytes
    half = geometry.num_merged // 2
    whole = geometry.num_merged
    return Shared(
        model=names[0], other=names[1], pool_bytes=pool_bytes, entries=entries, iteration_s=iteration_s,
        sent_share={way: num * entry_s for way, num in entries.items()},
        appended_share={way: num * entry_s for way, num in appended.items()},
        held_alone={
            "merged": whole * in_merged // of_request, "split": int(pool_bytes // split_bytes),
            "fixed": half * geometry.merged_bytes // own.block_bytes // of_request,
        },
        held_both={
            "merged": half * in_merged // of_request, "split": int(pool_bytes / 2 // split_bytes),
            "fixed": half * geometry.merged_bytes // own.block_bytes // of_request,
        },
    )  # fmt: skip


def markdown(found: list[Shared]) -> str:
    rows = []
    for one in found:
        rows.append([
            one.model, one.other, f"{one.pool_bytes / 2**30:.1f}", one.entries["merged"], one.entries["split"],
            f"{one.entries['split'] / one.entries['merged']:,.0f}", f"{1000 * one.iteration_s:.1f}",
            *(f"{share[way]:.3%}" for share in (one.sent_share, one.appended_share) for way in ("merged", "split")),
            *(one.held_alone[way] for way in ("merged", "split", "fixed")),
            *(one.held_both[way] for way in ("merged", "split", "fixed")),
        ])  # fmt: skip
    head = [
        "model", "beside", "pool, GiB", "entries, merged", "split", "ratio", "decode, ms", "tables sent whole, merged",
        "split", "new entries alone, merged", "split", "held alone, merged", "split", "fixed", "held by each, merged",
        "split", "fixed",
    ]  # fmt: skip
    about = (
        f"Decodes of {BATCH} requests with {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS // 2} output tokens on one A800, "
        f"beside another model; split blocks have {SPLIT_BLOCK} tokens. Held: requests of "
        f"{PROMPT_TOKENS + OUTPUT_TOKENS} tokens. Reckoned from sizes and the cost model, not measured; what reads of split "
        "blocks lose in locality is not in it."
    )
    return "\n".join([about, "", *table(head, rows)])
