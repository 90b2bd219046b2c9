"""Whether models fit a group."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costs.model import CostModel
from shared.engine.memory import slab
from shared.placement.memory import Memory, Pool
from shared.placement.problem import ModelFacts, NodeFacts, Problem, traffic

COST = CostModel(fixed_s=0.01, prefill_token_s=1e-5, prefill_attention_s=0, decode_s=1e-5, decode_context_s=0)
GIB = 1 << 30


def model(name: str = "m", weight_gib: float = 14, *, kv_heads: int = 8, weights: str = "") -> ModelFacts:
    return ModelFacts(
        name=name, weights=weights or name, weight_bytes=int(weight_gib * GIB), activation_bytes=GIB, block_size=16,
        block_bytes=16 * 2 * 32 * kv_heads * 128 * 2, least_blocks=128, max_model_len=4096, num_layers=32,
        num_kv_heads=kv_heads, costs={("gpu", p): COST for p in (1, 2, 4)},
    )  # fmt: skip


def node(memory_gib: float = 80, num_devices: int = 4, kind: str = "gpu") -> NodeFacts:
    return NodeFacts(node_id="n", kind=kind, num_devices=num_devices, memory_bytes=int(memory_gib * GIB))


def memory(models: list[ModelFacts], where: NodeFacts) -> Memory:
    return Memory(Problem(nodes=(where,), models=tuple(models), traffic=traffic([], 1.0)))


def why_not(models: list[ModelFacts], where: NodeFacts, num_ranks: int) -> str:
    return memory(models, where).why_not([one.name for one in models], where, num_ranks)


def pool(models: list[ModelFacts], where: NodeFacts, num_ranks: int) -> Pool:
    return memory(models, where).pool([one.name for one in models], where, num_ranks)


def test_what_does_not_fit_is_explained_with_the_field():
    assert why_not([model()], node(), 1) == ""
    assert why_not([model(weight_gib=100)], node(), 1).startswith("memory_bytes:")
    assert why_not([model(weight_gib=100)], node(), 2) == ""
    assert why_not([model(kv_heads=2)], node(), 4).startswith("num_kv_heads:")
    assert why_not([model()], node(kind="other"), 1).startswith("costs:")
    assert why_not([model()], node(num_devices=2), 4).startswith("num_ranks:")


def test_names_of_the_same_weights_share_them():
    alone = [model("a", 60), model("b", 60)]
    shared = [model("a", 60, weights="w"), model("b", 60, weights="w")]
    assert why_not(alone, node(), 1)
    assert not why_not(shared, node(), 1)


def test_a_cpu_pool_is_bounded():
    cpu = msgspec.structs.replace(model(weight_gib=1), costs={("cpu", 1): COST})
    held = pool([cpu], node(kind="cpu"), 1)
    assert held.merged_bytes * held.num_merged == pytest.approx(GIB, rel=0.01)


@given(
    st.lists(st.tuples(st.floats(0.1, 40), st.sampled_from([4, 8, 32])), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.floats(8, 80),
)
def test_a_group_that_fits_holds_what_its_models_need(sizes, num_ranks, memory_gib):
    models = [model(f"m{index}", gib, kv_heads=heads) for index, (gib, heads) in enumerate(sizes)]
    where = node(memory_gib)
    if why_not(models, where, num_ranks):
        assert why_not([*models, model("another", 1)], where, num_ranks)
        return
    held = pool(models, where, num_ranks)
    assert held.merged_bytes % (num_ranks * slab.ALIGNMENT_BYTES) == 0
    per_merged = [slab.blocks_per_merged(held.merged_bytes, m.block_bytes) for m in models]
    least = sum(-(-m.least_blocks // count) for m, count in zip(models, per_merged, strict=True))
    assert held.num_merged >= least
    used = sum(m.weight_bytes for m in models) / num_ranks + GIB + (held.num_merged + 1) * held.merged_bytes / num_ranks
    assert used <= where.memory_bytes + len(models)
