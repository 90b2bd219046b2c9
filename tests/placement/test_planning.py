"""The pure planner: examples with numbers, and properties over random clusters."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.fleet import Fleet
from services.placement.footprint import ConfiguredModel, DeviceFacts, footprint
from services.placement.live_problem import live_problem
from services.placement.planning import (
    displaced,
    plan,
    planner_of,
    wasted,
)
from shared.costs.model import CostModel
from shared.engine.memory.slab import ALIGNMENT_BYTES, blocks_per_merged
from shared.messages.cluster import (
    AttentionFacts,
    DeviceGroup,
    InstancePlan,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
    StoredCostModel,
)
from shared.models.checkpoint import ITEMSIZES, CheckpointShape, cost_key
from shared.placement.hardware import A100_80G, L4, cost_model
from shared.placement.plan import Group
from shared.placement.planner import (
    KEPT_POOL,
    LEAST_MERGED_BYTES,
    MAX_CPU_POOL_BYTES,
    POOL_HEADROOM,
    DoesNotFit,
)
from shared.placement.problem import Problem, ProblemError, traffic

MIB = 1 << 20
GIB = 1 << 30


def shape(
    weight_mib: int = 100, *, layers: int = 12, kv_heads: int = 4, head_dim: int = 64, length: int = 2048
) -> CheckpointShape:
    return CheckpointShape(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=768,
        vocab_size=32000,
        max_model_len=length,
        dtype="float32",
        weight_bytes=weight_mib * MIB,
        eos_token_ids=(2,),
    )


def model(name: str, weight_mib: int = 100, *, replicas: int | None = None, **of_shape: int) -> ConfiguredModel:
    return ConfiguredModel(ModelSpec(name, f"/models/{name}", replicas=replicas), shape(weight_mib, **of_shape))


def node(node_id: str = "a", memory: int = 8 * GIB, num_instances: int = 2, device: str = "cpu") -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        hostname="host",
        num_instances=num_instances,
        memory_bytes=memory,
        device=device,
        attention=(AttentionFacts("torch", (32,)),) if device == "cpu" else (AttentionFacts(),),
    )


def chosen(
    models: list[ConfiguredModel],
    nodes: list[NodeInfo],
    before: PlacementPlan,
    groups: Iterable[Group],
    *,
    kv_bytes: Mapping[str, int] | None = None,
    **options: int,
) -> list[InstancePlan]:
    """Instances of exactly these groups."""
    return planner_of(models, nodes, before.instances).chosen(groups, held_bytes=kv_bytes, **options)


CPU = DeviceFacts.of(node())
GPU = DeviceFacts.of(node(device="cuda"))


def where(result: PlacementPlan, name: str) -> list[str]:
    return [i.instance_id for i in result.instances if any(s.name == name for s in i.models)]


def test_every_model_on_every_instance() -> None:
    result = plan([model("small"), model("large", 500)], [node("a"), node("b", num_instances=1)], None)
    assert result.version == 1
    assert where(result, "small") == where(result, "large") == ["a-0", "a-1", "b-0"]
    assert result.unplaced == {}
    (merged_bytes,) = {i.merged_bytes for i in result.instances}
    assert {i.pool_bytes for i in result.instances} == {MAX_CPU_POOL_BYTES // merged_bytes * merged_bytes}
    assert result.instances[0].merged_bytes >= LEAST_MERGED_BYTES["cpu"]


def test_merged_blocks_are_the_smallest_that_waste_little_and_the_waste_is_told() -> None:
    """Two models of 7 and 13 billion parameters on a GPU: blocks of 64 and 100 MiB."""
    models = [
        model("7b", 13_000, layers=32, kv_heads=32, head_dim=128),
        model("13b", 25_000, layers=40, kv_heads=40, head_dim=128),
    ]
    models = [replace(m, shape=msgspec.structs.replace(m.shape, dtype="float16")) for m in models]
    nodes = [
        msgspec.structs.replace(
            node(memory=80 * GIB, num_instances=1, device="cuda:0"), attention=(AttentionFacts("", (128,)),)
        )
    ]
    result = plan(models, nodes, None)
    (instance,) = result.instances
    assert 200 * MIB <= instance.merged_bytes < 201 * MIB
    ((of, shares),) = wasted(result, models, nodes).items()
    assert of == ("cuda", instance.merged_bytes)
    assert shares["7b"] == pytest.approx(0.04, abs=0.001) and shares["13b"] == pytest.approx(0, abs=0.001)


def test_replicas_are_spread() -> None:
    result = plan([model("one", replicas=1), model("two", replicas=1)], [node()], None)
    assert where(result, "one") != where(result, "two")
    assert where(plan([model("m", replicas=3)], [node()], None), "m") == ["a-0", "a-1"], "no more than there are"


def test_each_model_gets_a_place_before_any_gets_two() -> None:
    models = [model("x", 1500), model("y", 1500), model("z", 100)]
    result = plan(models, [node(memory=5 * GIB)], None)
    assert result.unplaced == {}
    assert len(where(result, "x")) == len(where(result, "y")) == 1
    assert len(where(result, "z")) == 2


def test_unplaced_says_why_in_numbers() -> None:
    result = plan([model("huge", 20_000), model("small")], [node()], None)
    assert where(result, "small") == ["a-0", "a-1"]
    assert "'huge' needs" in result.unplaced["huge"]
    assert "20,400 MiB weights" in result.unplaced["huge"]
    assert "of 4,096 MiB" in result.unplaced["huge"]
    assert plan([model("m")], [], None).unplaced == {"m": "no worker node is registered"}


def test_an_equal_input_gives_the_incumbent_itself() -> None:
    models, nodes = [model("a"), model("b")], [node()]
    first = plan(models, nodes, None)
    assert plan(models, nodes, first) is first
    assert plan(models[::-1], nodes, first) is first


def test_running_instances_keep_pool_and_merged_blocks() -> None:
    first = plan([model("a")], [node()], None)
    second = plan([model("a"), model("b", layers=7, head_dim=96)], [node(memory=9 * GIB)], first)
    assert second.version == 2
    for before, after in zip(first.instances, second.instances, strict=True):
        assert (before.pool_bytes, before.merged_bytes) == (after.pool_bytes, after.merged_bytes)
    assert where(second, "b") == ["a-0", "a-1"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_more_model_fits_beside_the_pool_where_memory_is_short(device: str) -> None:
    nodes = [node(memory=4 * GIB, device=device)]
    first = plan([model("a")], nodes, None)
    second = plan([model("a"), model("b")], nodes, first)
    assert where(second, "b") == ["a-0", "a-1"]
    assert [i.pool_bytes for i in second.instances] == [i.pool_bytes for i in first.instances]


def test_a_block_that_does_not_fit_changes_the_merged_blocks() -> None:
    first = plan([model("a")], [node()], None)
    wide = model("wide", layers=80, kv_heads=32)
    second = plan([model("a"), wide], [node()], first)
    block = footprint(wide.spec, wide.shape or shape(), CPU).block_bytes
    assert blocks_per_merged(first.instances[0].merged_bytes, block) == 0
    assert all(blocks_per_merged(i.merged_bytes, block) >= 1 for i in second.instances)
    assert displaced(first, second) == []


def test_a_pool_shrinks_only_where_it_must() -> None:
    nodes = [node("a", 1 * GIB, 1, "cuda"), node("b", 6 * GIB, 1, "cuda")]
    first = plan([model("m", 100, replicas=2)], nodes, None)
    pool = {i.instance_id: i.pool_bytes for i in first.instances}
    assert pool["b-0"] > 3 * GIB, "a GPU's memory is all for the pool"
    second = plan([model("m", 100, replicas=2), model("n", 2000, replicas=1)], nodes, first)
    after = {i.instance_id: i.pool_bytes for i in second.instances}
    assert after["a-0"] == pool["a-0"]
    assert 0 < after["b-0"] < pool["b-0"]


def test_a_node_that_is_away_for_a_moment_keeps_its_entries() -> None:
    models, nodes = (
        [model("a", replicas=1), model("b", replicas=1)],
        [node("x", num_instances=1), node("y", num_instances=1)],
    )
    first = plan(models, nodes, None)
    assert plan(models, nodes[:1], first, held_nodes={"y"}) is first
    assert plan(models, [], first, held_nodes={"x", "y"}) is first
    moved = plan(models, nodes[:1], first)
    assert where(moved, "a") == where(moved, "b") == ["x-0"]


def test_a_model_is_removed_from_a_node_that_is_away() -> None:
    first = plan([model("a"), model("b")], [node()], None)
    second = plan([model("a")], [], first, held_nodes={"a"})
    assert where(second, "b") == []
    assert where(second, "a") == ["a-0", "a-1"]


def test_an_unreadable_checkpoint_stays_where_it_runs() -> None:
    models = [model("a"), model("b")]
    first = plan(models, [node()], None)
    broken = [models[0], ConfiguredModel(models[1].spec, None, "config.json is missing.")]
    assert plan(broken, [node()], first) is first
    assert plan(broken, [node()], None).unplaced == {"b": "config.json is missing."}


def test_instances_are_planned_on_the_devices_that_the_node_has_for_them() -> None:
    groups = tuple(DeviceGroup((gpu,)) for gpu in ("GPU-a", "GPU-b"))
    gpus = msgspec.structs.replace(node(memory=80 * GIB, device="cuda"), groups=groups)
    first = plan([model("a")], [gpus], None)
    assert [i.group for i in first.instances] == list(groups)
    assert plan([model("a")], [gpus], first) is first
    assert [i.group for i in plan([model("a")], [], first, held_nodes={"a"}).instances] == list(groups)
    unnamed = plan([model("a")], [msgspec.structs.replace(gpus, groups=())], None)
    named = plan([model("a")], [gpus], unnamed)
    assert [(i.pool_bytes, i.group) for i in named.instances] == [
        (i.pool_bytes, g) for i, g in zip(unnamed.instances, groups, strict=True)
    ]


def test_an_instance_of_several_devices_is_planned_by_their_shares() -> None:
    """Each has a part of the weights and blocks, but activations of its own; the plan tells of all together."""
    pairs = (DeviceGroup(("a", "b")), DeviceGroup(("c", "d")))
    gpus = msgspec.structs.replace(node(memory=160 * GIB, device="cuda"), groups=pairs)
    heavy = model("heavy", 60 * 1024, kv_heads=4)
    assert plan([heavy], [node(memory=160 * GIB, num_instances=4, device="cuda")], None).unplaced
    first = plan([heavy], [gpus], None)
    assert [(i.instance_id, i.group) for i in first.instances] == [("a-0", pairs[0]), ("a-2", pairs[1])]
    assert plan([heavy], [gpus], first) is first
    whole, part = (footprint(heavy.spec, heavy.shape or shape(), facts) for facts in (GPU, GPU._replace(num_ranks=2)))
    assert (part.block_bytes, part.activation_bytes) == (whole.block_bytes // 2, whole.activation_bytes)
    for instance in first.instances:
        assert instance.merged_bytes % (2 * ALIGNMENT_BYTES) == 0
        each = (instance.pool_bytes + instance.merged_bytes) // 2 + part.weight_bytes + part.activation_bytes
        assert instance.pool_bytes % instance.merged_bytes == 0
        assert 30 * GIB < part.weight_bytes < each <= 40 * GIB
    alone = plan(
        [heavy], [msgspec.structs.replace(gpus, groups=(DeviceGroup(("a", "b", "c", "d")),), num_instances=1)], first
    )
    assert [i.instance_id for i in alone.instances] == ["a-0"], "a pool of fewer devices is not kept"
    assert alone.instances[0].pool_bytes > 2 * first.instances[0].pool_bytes
    single = footprint(heavy.spec, shape(kv_heads=1), GPU)
    assert footprint(heavy.spec, shape(kv_heads=1), GPU._replace(num_ranks=2)).block_bytes == single.block_bytes


def test_the_first_stage_has_the_embedding_and_the_most_layers() -> None:
    deep = model("deep", 300, layers=5)
    groups = (DeviceGroup(("a", "b"), 2),)
    gpu = msgspec.structs.replace(node(memory=80 * GIB, num_instances=1, device="cuda"), groups=groups)
    (instance,) = plan([deep], [gpu], None).instances
    assert instance.group == groups[0]
    whole, part = (footprint(deep.spec, deep.shape or shape(), facts) for facts in (GPU, DeviceFacts.of(gpu)))
    assert part.block_bytes == whole.block_bytes // 5 * 3
    assert whole.weight_bytes * 3 // 5 < part.weight_bytes < whole.weight_bytes


FLASH_2 = AttentionFacts("flash-attention 2", (256,), ("float16", "bfloat16"), 256, 16)
TORCH = AttentionFacts("torch", (128, 64))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "attention", "block_size"),
    [
        ("bfloat16", 128, (FLASH_2, TORCH), 256),
        ("float32", 128, (FLASH_2, TORCH), 128),
        ("bfloat16", 512, (FLASH_2, TORCH), 128),
        ("bfloat16", 120, (FLASH_2, TORCH), 128),
        ("bfloat16", 128, (), 256),
        ("bfloat16", 128, 64, 64),
    ],
)
def test_merged_blocks_hold_blocks_of_the_size_that_the_node_reports(
    dtype: str, head_dim: int, attention: tuple[AttentionFacts, ...] | int, block_size: int
) -> None:
    """Llama-2-7B's layers on a GPU, of which several back ends take heads of some dtypes and sizes; where nothing is said,
    blocks may be as large as any takes, and a number alone is of all."""
    llama = model("llama", layers=32, kv_heads=32, head_dim=head_dim)
    llama = replace(llama, spec=msgspec.structs.replace(llama.spec, dtype=dtype))
    said = {"block_size": attention, "attention": ()} if isinstance(attention, int) else {"attention": attention}
    gpu = msgspec.structs.replace(node(num_instances=1, memory=160 * GIB, device="cuda"), **said)
    (instance,) = plan([llama], [gpu], None).instances
    block = 32 * 2 * 32 * block_size * head_dim * ITEMSIZES[dtype]
    assert footprint(llama.spec, llama.shape or shape(), DeviceFacts.of(gpu)).block_bytes == block
    assert blocks_per_merged(instance.merged_bytes, block) >= 1


def test_names_of_one_checkpoint_take_the_memory_of_its_weights_once() -> None:
    one = model("one", 2700)
    two = ConfiguredModel(ModelSpec("two", one.spec.source), one.shape)
    other = ConfiguredModel(msgspec.structs.replace(two.spec, name="other", dtype="bfloat16"), one.shape)
    memory = 4 * GIB
    result = plan([one, two], [node(memory=memory, num_instances=1)], None)
    assert where(result, "one") == where(result, "two") == ["a-0"]
    assert "other" in plan([one, two, other], [node(memory=memory, num_instances=1)], None).unplaced
    again = plan([one, two], [node(memory=memory, num_instances=1)], result)
    assert again is result


def test_a_shorter_length_takes_weights_of_its_own_only_where_it_makes_another_model() -> None:
    one = model("one", 2700)
    short = ConfiguredModel(msgspec.structs.replace(one.spec, name="short", max_model_len=512), one.shape)
    nodes = [node(memory=4 * GIB, num_instances=1)]
    assert not plan([one, short], nodes, None).unplaced
    windowed = msgspec.structs.replace(one.shape, depends_on_length=True)
    models = [ConfiguredModel(each.spec, windowed) for each in (one, short)]
    assert len(plan(models, nodes, None).unplaced) == 1


def test_larger_steps_need_more_memory() -> None:
    few, many = (footprint(model("m").spec, shape(), CPU._replace(step_tokens=tokens)) for tokens in (512, 2048))
    assert many.activation_bytes > few.activation_bytes
    assert many.block_bytes == few.block_bytes


def test_a_changed_dtype_changes_the_cost() -> None:
    spec = ModelSpec("m", "/m")
    half = msgspec.structs.replace(spec, dtype="bfloat16")
    full_size, half_size = footprint(spec, shape(), CPU), footprint(half, shape(), CPU)
    assert half_size.block_bytes * 2 == full_size.block_bytes
    assert math.isclose(half_size.weight_bytes * 2, full_size.weight_bytes, abs_tol=2)


def test_a_drained_instance_is_left_out_and_comes_back() -> None:
    models = [model("a"), model("one", replicas=1)]
    first = plan(models, [node()], None)
    (home,) = where(first, "one")
    (other,) = {"a-0", "a-1"} - {home}
    drained = plan(models, [node()], first, fleet=Fleet((home,), (home,)))
    assert where(drained, "a") == where(drained, "one") == [other], "what was there only goes where there is room"
    assert (drained.draining, drained.released, drained.version) == ([home], [home], 2)
    assert plan(models, [node()], drained, fleet=Fleet((home,), (home,))) is drained
    assert plan(models, [node()], drained, fleet=Fleet((home,))).released == []
    back = plan(models, [node()], drained)
    assert where(back, "a") == ["a-0", "a-1"]
    assert where(back, "one") == [other], "and nothing is moved for it"
    assert back.draining == []


def test_the_last_instance_that_serves_a_model_may_be_drained_and_that_is_said() -> None:
    first = plan([model("a")], [node(num_instances=1)], None)
    none = plan([model("a")], [node(num_instances=1)], first, fleet=Fleet(("a-0",)))
    assert none.instances == []
    assert none.unplaced == {"a": "no instance is there to hold it; a-0 drained"}
    small, large = node("s", 200 * MIB, 1), node("l", 8 * GIB, 1)
    elsewhere = plan([model("a", 1000)], [small, large], None, fleet=Fleet(("l-0", "x-0")))
    assert elsewhere.unplaced["a"].endswith("free of 200 MiB; l-0 drained")
    assert elsewhere.draining == ["l-0", "x-0"], "x may be back some day"


def test_a_drained_instance_of_a_node_that_is_away_stays_drained() -> None:
    first = plan([model("a")], [node("x"), node("y")], None)
    away = plan([model("a")], [node("x")], first, held_nodes={"y"}, fleet=Fleet(("y-1",)))
    assert where(away, "a") == ["x-0", "x-1", "y-0"]


def test_more_replicas_change_nothing_for_the_instances_that_have_the_model() -> None:
    first = plan([model("a", replicas=1), model("b")], [node()], None)
    (home,) = where(first, "a")
    second = plan([model("a", replicas=2), model("b")], [node()], first)
    assert where(second, "a") == ["a-0", "a-1"]
    kept = {i.instance_id: i for i in second.instances}[home]
    assert kept in first.instances
    assert len(where(plan([model("a", replicas=1), model("b")], [node()], second), "a")) == 1
    assert plan([model("a", replicas=5), model("b")], [node()], second) is second


def test_fewer_replicas_stay_where_the_model_serves() -> None:
    first = plan([model("m"), model("other")], [node()], None)
    fewer = [model("m", replicas=1), model("other")]
    assert where(plan(fewer, [node()], first, ready={("m", "a-1"), ("other", "a-0")}), "m") == ["a-1"]
    assert where(plan(fewer, [node()], first, ready={("other", "a-1")}), "m") == ["a-0"]
    assert where(plan(fewer, [node()], first, ready={("m", "a-1")}), "other") == ["a-0", "a-1"]


def test_memory_is_divided_over_the_instances_that_a_node_could_run() -> None:
    few = NodeInfo(node_id="a", hostname="host", num_instances=1, memory_bytes=8 * GIB, device="cuda", max_instances=4)
    first = plan([model("a")], [few], None)
    grown = plan([model("a")], [msgspec.structs.replace(few, num_instances=4)], first)
    assert where(grown, "a") == ["a-0", "a-1", "a-2", "a-3"]
    assert grown.instances[0] == first.instances[0], "what runs keeps its pool"
    assert len({i.pool_bytes for i in grown.instances}) == 1


models_strategy = st.dictionaries(
    st.sampled_from([f"m{i}" for i in range(8)]),
    st.tuples(
        st.integers(1, 3000),
        st.sampled_from([None, 1, 2, 5]),
        st.integers(1, 40),
        st.sampled_from([1, 2, 8]),
        st.sampled_from([32, 64, 80, 128]),
        st.integers(16, 8192),
    ),
    max_size=8,
).map(
    lambda d: [
        model(n, w, replicas=r, layers=lay, kv_heads=k, head_dim=h, length=length)
        for n, (w, r, lay, k, h, length) in d.items()
    ]
)
nodes_strategy = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.tuples(st.integers(64, 16_000), st.integers(0, 3), st.sampled_from(["cpu", "cuda"])),
    max_size=4,
).map(lambda d: [node(n, memory * MIB, count, device) for n, (memory, count, device) in d.items()])


def check(result: PlacementPlan, models: list[ConfiguredModel], nodes: list[NodeInfo]) -> None:
    by_name = {m.spec.name: m for m in models}
    by_node = {n.node_id: n for n in nodes}
    for name, configured in by_name.items():
        held = where(result, name)
        assert len(held) == len(set(held))
        assert bool(held) != (name in result.unplaced), "placed or explained"
        assert configured.spec.replicas is None or len(held) <= configured.spec.replicas
    assert set(result.unplaced) <= set(by_name)
    for instance in result.instances:
        home = by_node[instance.node_id]
        sizes = []
        for spec in instance.models:
            of_spec = by_name[spec.name].shape
            assert of_spec is not None
            sizes.append(footprint(spec, of_spec, DeviceFacts.of(home)))
        per_merged = [blocks_per_merged(instance.merged_bytes, s.block_bytes) for s in sizes]
        assert all(per_merged)
        least = sum(-(-s.least_blocks // n) for s, n in zip(sizes, per_merged, strict=True)) * instance.merged_bytes
        assert least <= instance.pool_bytes
        assert instance.pool_bytes % instance.merged_bytes == 0
        used = sum(s.weight_bytes for s in sizes) + max(s.activation_bytes for s in sizes) + instance.pool_bytes
        assert used + instance.merged_bytes <= home.memory_bytes // home.num_instances


@settings(max_examples=150, deadline=None)
@given(models_strategy, nodes_strategy)
def test_plans_hold_what_they_promise(models: list[ConfiguredModel], nodes: list[NodeInfo]) -> None:
    first = plan(models, nodes, None)
    check(first, models, nodes)
    assert plan(models, nodes, first) is first
    for name in first.unplaced:
        alone = plan([m for m in models if m.spec.name == name], nodes, None)
        assert (
            len(nodes) == 0
            or alone.unplaced == {}
            or "needs" in alone.unplaced[name]
            or not any(n.num_instances for n in nodes)
        )


@settings(max_examples=150, deadline=None)
@given(models_strategy, nodes_strategy, st.data())
def test_one_change_moves_nothing_else(
    models: list[ConfiguredModel], nodes: list[NodeInfo], data: st.DataObject
) -> None:
    first = plan(models, nodes, None)
    if not models:
        return
    removed = data.draw(st.sampled_from(models))
    rest = [m for m in models if m is not removed]
    without = plan(rest, nodes, first)
    check(without, rest, nodes)
    assert all(name == removed.spec.name for name, _ in displaced(first, without))
    after = {i.instance_id: i for i in without.instances}
    for before in first.instances:
        if before.instance_id in after and after[before.instance_id].models == before.models:
            assert after[before.instance_id] == before

    again = plan(models, nodes, without)
    check(again, models, nodes)
    same_blocks = {i.instance_id: i.merged_bytes for i in again.instances}
    if all(same_blocks.get(i.instance_id, i.merged_bytes) == i.merged_bytes for i in without.instances):
        assert displaced(without, again) == []


@settings(max_examples=150, deadline=None)
@given(models_strategy, nodes_strategy, nodes_strategy)
def test_any_incumbent_gives_a_sound_plan(
    models: list[ConfiguredModel], nodes: list[NodeInfo], others: list[NodeInfo]
) -> None:
    first = plan(models, nodes, None)
    second = plan(models, others, first)
    check(second, models, others)
    third = plan(models, others, second)
    fourth = plan(models, others, third)
    assert plan(models, others, fourth) is fourth, "plans settle"


@settings(max_examples=100, deadline=None)
@given(models_strategy, nodes_strategy, st.data())
def test_draining_moves_nothing_of_what_stays(
    models: list[ConfiguredModel], nodes: list[NodeInfo], data: st.DataObject
) -> None:
    first = plan(models, nodes, None)
    ids = [i.instance_id for i in first.instances]
    out = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    second = plan(models, nodes, first, fleet=Fleet(tuple(sorted(out))))
    check(second, models, nodes)
    assert not out & {i.instance_id for i in second.instances}
    same_blocks = {i.instance_id: i.merged_bytes for i in first.instances}
    if all(same_blocks.get(i.instance_id, i.merged_bytes) == i.merged_bytes for i in second.instances):
        assert all(instance_id in out for _, instance_id in displaced(first, second))


@pytest.mark.parametrize("num_nodes", [128])
def test_a_large_cluster_is_planned_quickly(num_nodes: int) -> None:
    models = [model(f"m{i}", 50 + i * 10, replicas=None if i % 3 else 4) for i in range(64)]
    nodes = [node(f"n{i}", 64 * GIB, 8, "cuda") for i in range(num_nodes)]
    begin = time.process_time()
    result = plan(models, nodes, None)
    assert time.process_time() - begin < 5.0
    assert result.unplaced == {}


# ------------------------------------------------------------------------------------------- a chosen assignment

CHOSEN_MODELS = [model("a"), model("b"), model("c", 300)]
FOUR = [node("n", 16 * GIB, 4)]
GROUPS = [Group("n", (0, 1), ("a",)), Group("n", (2,), ("b",))]


def with_groups(groups: list[Group], models: list[ConfiguredModel], nodes: list[NodeInfo]) -> PlacementPlan:
    before = plan(models, nodes, None)
    return msgspec.structs.replace(before, instances=chosen(models, nodes, before, groups), is_chosen=True)


def test_a_chosen_assignment_is_had_as_it_is_and_stays() -> None:
    first = with_groups(GROUPS, CHOSEN_MODELS[:2], FOUR)
    assert [(i.instance_id, i.group.num_ranks) for i in first.instances] == [("n-0", 2), ("n-2", 1)]
    assert plan(CHOSEN_MODELS[:2], FOUR, first) is first, "no model goes where it was not chosen to be"
    (merged_bytes, pool_bytes) = (first.instances[0].merged_bytes, first.instances[0].pool_bytes)
    assert merged_bytes % (2 * ALIGNMENT_BYTES) == 0 and pool_bytes % merged_bytes == 0


def test_a_new_model_goes_on_free_devices_and_then_on_the_smallest_group() -> None:
    first = with_groups(GROUPS, CHOSEN_MODELS[:2], FOUR)
    second = plan(CHOSEN_MODELS, FOUR, first)
    assert where(second, "c") == ["n-3"] and second.is_chosen
    assert second.instances[:2] == first.instances
    fourth = plan([*CHOSEN_MODELS, model("d")], FOUR, second)
    (place,) = where(fourth, "d")
    assert place in ("n-2", "n-3") and displaced(second, fourth) == []
    without_a_node = plan(CHOSEN_MODELS, [node("m", 16 * GIB, 1)], second)
    assert {name: where(without_a_node, name) for name in "abc"} == {"a": ["m-0"], "b": ["m-0"], "c": ["m-0"]}


def test_a_large_model_gets_a_group_of_free_devices() -> None:
    nodes = [node("n", 4 * GIB, 4)]
    first = with_groups([Group("n", (0,), ("a",))], CHOSEN_MODELS[:1], nodes)
    large = plan([CHOSEN_MODELS[0], model("large", 1100)], nodes, first)
    assert [(i.instance_id, i.group.num_ranks) for i in large.instances] == [("n-0", 1), ("n-2", 2)]


def test_a_model_that_several_devices_cannot_compute_gets_no_group_of_them() -> None:
    nodes, large = [node("n", 4 * GIB, 4)], model("large", 1100)
    large = replace(large, shape=msgspec.structs.replace(large.shape, is_divisible=False))
    first = with_groups([Group("n", (0,), ("a",))], CHOSEN_MODELS[:1], nodes)
    result = plan([CHOSEN_MODELS[0], large], nodes, first)
    assert where(result, "large") == [] and "'large' needs" in result.unplaced["large"]
    with pytest.raises(DoesNotFit, match="'large' cannot be computed by 2 devices"):
        chosen([CHOSEN_MODELS[0], large], nodes, first, [Group("n", (2, 3), ("large",))])


def test_a_chosen_group_keeps_its_pool_unless_its_requests_need_a_larger_one() -> None:
    both, alone = [Group("n", (0, 1), ("a", "c"))], [Group("n", (0, 1), ("a",))]
    many = {"max_cpu_pool_bytes": 64 * GIB}
    models = [model("a"), model("c", 3000)]
    before = plan(models, FOUR, None)
    before = msgspec.structs.replace(before, instances=chosen(models, FOUR, before, both, **many))
    had = before.instances[0].pool_bytes

    def pool(kv_bytes: dict[str, int] | None) -> int:
        (place,) = chosen([model("a")], FOUR, before, alone, kv_bytes=kv_bytes, **many)
        return place.pool_bytes

    largest = pool(None)
    assert largest > KEPT_POOL * had
    assert pool({"n-0": int(had / POOL_HEADROOM)}) == had
    assert pool({"n-0": int(had / POOL_HEADROOM) + 1}) == pool({"other": 0}) == largest


def test_what_cannot_be_had_is_said() -> None:
    before = plan(CHOSEN_MODELS, FOUR, None)
    with pytest.raises(DoesNotFit, match="'c' does not fit on n-0"):
        chosen([model("c", 5000)], FOUR, before, [Group("n", (0,), ("c",))])
    with pytest.raises(DoesNotFit, match="the devices of n-3 are not there"):
        chosen(CHOSEN_MODELS, FOUR, before, [Group("n", (3, 4), ("a",))])


def test_whether_models_fit_beside_the_pool_that_an_instance_has() -> None:
    first = with_groups(GROUPS, CHOSEN_MODELS[:2], FOUR)
    can_hold = planner_of([*CHOSEN_MODELS, model("large", 5000)], FOUR).fits
    specs = {each.spec.name: each.spec for each in [*CHOSEN_MODELS, model("large", 5000)]}
    assert can_hold(first.instances[1], [specs["a"], specs["b"]])
    assert not can_hold(first.instances[1], [specs["b"], specs["large"]])
    assert not can_hold(first.instances[1], [ModelSpec("unknown", "/x")])


def problem_of(incumbent: PlacementPlan, *draining: str, keys: tuple[str, ...] = (), device: str = "cpu") -> Problem:
    return live_problem(
        [model("one")], [node(num_instances=4, device=device)], incumbent.instances, draining,
        [StoredCostModel(key, b"", 0.0) for key in keys], traffic([(0.0, "one", 10, 10, True)], 10.0), {},
        slo_scale=5.0, max_models_per_group=0, max_ranks=2,
    )  # fmt: skip


def test_a_search_sees_the_devices_up_to_one_that_is_drained_and_none_is_made_while_others_lie_beyond() -> None:
    everywhere = plan([model("one")], [node(num_instances=4)], None)
    whole = problem_of(everywhere)
    assert whole.nodes[0].num_devices == 4 and whole.incumbent is not None and len(whole.incumbent.groups) == 4
    shorter = plan([model("one")], [node(num_instances=4)], everywhere, fleet=Fleet(draining=("a-3",)))
    assert problem_of(shorter, "a-3").nodes[0].num_devices == 3
    broken = plan([model("one")], [node(num_instances=4)], everywhere, fleet=Fleet(draining=("a-1",)))
    with pytest.raises(ProblemError, match=r"a-2, a-3: .* was drained"):
        problem_of(broken, "a-1")


@pytest.mark.parametrize(
    ("device", "kind"), [("NVIDIA A10", "A10"), ("NVIDIA L40S", "A100-80G"), ("NVIDIA A100-SXM4-80GB", "A100-80G")]
)
def test_a_gpu_is_known_by_the_name_that_it_was_measured_under(device: str, kind: str) -> None:
    found = problem_of(PlacementPlan(1, []), keys=(f"Llama_32-layers/{device}/tp1",), device="cuda")
    assert found.nodes[0].kind == kind


def test_each_node_has_the_step_times_of_its_own_gpus() -> None:
    nodes = [
        msgspec.structs.replace(node(name, device="cuda"), device_name=f"NVIDIA {name}")
        for name in ("H100", "L4", "L40S")
    ]
    (key,) = {cost_key(shape(), "bfloat16", DeviceFacts.of(each).block_size(64, "bfloat16")) for each in nodes}
    measured = CostModel(fixed_s=7.0, prefill_token_s=1e-3, prefill_attention_s=0, decode_s=1e-3, decode_context_s=0)
    of_model = ConfiguredModel(ModelSpec("one", "/models/one", dtype="bfloat16"), shape())
    found = live_problem(
        [of_model], nodes, [], (),
        [StoredCostModel(f"{key}/NVIDIA H100-deterministic/tp1", msgspec.json.encode(measured), 0.0)],
        traffic([(0.0, "one", 10, 10, True)], 10.0), {}, slo_scale=5.0, max_models_per_group=0, max_ranks=1,
    )  # fmt: skip
    kinds = [each.kind for each in found.nodes]
    assert kinds == ["NVIDIA H100", "NVIDIA L4", "NVIDIA L40S"]
    on_h100, on_l4, on_l40s = (found.models[0].costs[kind, 1] for kind in kinds)
    assert on_h100 == measured
    # Of others by their profiles; of a kind that has none, by that of an A100.
    for cost, hardware in ((on_l4, L4), (on_l40s, A100_80G)):
        assert cost.fixed_s == pytest.approx(cost_model(hardware, shape(), dtype="bfloat16").fixed_s)


# ----------------------------------------------------------------------------------------------------- on demand


def on_demand(name: str, weight_mib: int = 100, *, asleep: str = "idle", **of_shape: int) -> ConfiguredModel:
    spec = ModelSpec(name, f"/models/{name}", on_demand=True)
    return ConfiguredModel(spec, shape(weight_mib, **of_shape), asleep=asleep)


def woken(models: list[ConfiguredModel], *names: str) -> list[ConfiguredModel]:
    """With these of those on demand."""
    asleep = {one.spec.name: "" if not one.spec.on_demand or one.spec.name in names else "idle" for one in models}
    return [replace(one, asleep=asleep[one.spec.name]) for one in models]


def test_models_that_are_put_away_are_nowhere_and_keep_their_instances():
    result = plan([on_demand("a"), on_demand("b")], [node()], None)
    assert [place.models for place in result.instances] == [[], []] and result.instances[0].pool_bytes > 0
    assert result.asleep == {"a": "idle", "b": "idle"} and result.unplaced == {}


def test_a_model_on_demand_that_is_woken_changes_no_pool_and_is_on_one_instance():
    models = [model("always", 400), on_demand("a", 700), on_demand("b", 700)]
    before = plan(models, [node(memory=4 * GIB)], None)
    after = plan(woken(models, "a"), [node(memory=4 * GIB)], before)
    assert len(where(after, "a")) == 1 and where(after, "always") == where(before, "always")
    assert [i.pool_bytes for i in after.instances] == [i.pool_bytes for i in before.instances]
    assert after.asleep == {"b": "idle"}
    again = plan(models, [node(memory=4 * GIB)], after)
    assert msgspec.structs.replace(again, version=before.version) == before


def test_memory_is_left_for_the_largest_on_demand_and_not_for_all():
    models = [on_demand("a", 1100), on_demand("b", 1100), on_demand("c", 100)]
    nodes = [node(memory=2 * GIB, num_instances=1)]
    before = plan(models, nodes, None)
    assert where(plan(woken(models, "a", "c"), nodes, before), "a")
    both = plan(woken(models, "a", "b"), nodes, before)
    assert sorted(both.unplaced) == ["b"]


def test_a_woken_model_goes_where_its_weights_are_in_host_memory():
    models = [on_demand("a"), on_demand("b")]
    before = plan(models, [node()], None)
    for instance in ("a-0", "a-1"):
        after = plan(woken(models, "b"), [node()], before, in_host_memory={("b", instance)})
        assert where(after, "b") == [instance]


def test_a_model_that_is_put_away_and_cannot_be_read_freezes_nothing():
    models = [model("always"), on_demand("a")]
    before = plan(woken(models, "a"), [node(num_instances=1)], None)
    unread = [models[0], replace(models[1], shape=None, problem="it is gone")]
    after = plan([*unread, model("new")], [node(num_instances=1)], before)
    assert where(after, "new") and after.asleep == {"a": "idle"}
    assert after.unplaced == after.unusable == {"a": "it is gone"}, "requests for it are refused, and do not wait"


@given(
    always=st.lists(st.integers(20, 900), max_size=3),
    demanded=st.lists(st.integers(20, 1500), min_size=1, max_size=4),
    memory=st.integers(1, 6),
    device=st.sampled_from(["cpu", "cuda"]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_whichever_models_are_woken_no_pool_changes_and_all_is_within_memory(always, demanded, memory, device, data):
    nodes = [node(memory=memory * GIB, device=device)]
    models = [model(f"always{k}", weight) for k, weight in enumerate(always)]
    models += [on_demand(f"d{k}", weight) for k, weight in enumerate(demanded)]
    current = plan(models, nodes, None)
    pools = {place.instance_id: place.pool_bytes for place in current.instances}
    for _ in range(3):
        names = data.draw(st.sets(st.sampled_from([f"d{k}" for k in range(len(demanded))])))
        current = plan(woken(models, *names), nodes, current)
        assert {place.instance_id: place.pool_bytes for place in current.instances} == pools
        for place in current.instances:
            facts = DeviceFacts.of(nodes[0])
            sizes = [footprint(spec, models_by_name(models)[spec.name], facts) for spec in place.models]
            used = sum(size.weight_bytes for size in sizes) + max((size.activation_bytes for size in sizes), default=0)
            assert used + place.pool_bytes + place.merged_bytes <= nodes[0].memory_bytes // 2


def models_by_name(models: list[ConfiguredModel]) -> dict[str, CheckpointShape]:
    return {one.spec.name: one.shape for one in models}


def on_engine(name: str, engine: str, **fields: object) -> ConfiguredModel:
    return replace(model(name), spec=ModelSpec(name, f"/{name}", engine=engine, **fields))  # type: ignore[arg-type]


def test_an_engine_of_anothers_has_an_instance_for_itself() -> None:
    models = [model("a", 500), model("b"), on_engine("hosted", "vllm", replicas=1)]
    result = plan(models, [node("a", num_instances=3)], None)
    (alone,) = where(result, "hosted")
    assert [[spec.name for spec in one.models] for one in result.instances if one.instance_id == alone] == [["hosted"]]
    assert len(where(result, "a")) == len(where(result, "b")) == 2
    full = plan([*models, on_engine("second", "vllm")], [node("a", num_instances=1)], None)
    assert "takes an instance for itself" in full.unplaced["second"] or "takes" in full.unplaced["hosted"]
    assert "needs one more" in full.unplaced["a"]
    assert plan(models, [node("a", num_instances=3)], result) is result


def test_beside_an_engine_that_shares_with_nobody_no_memory_is_left_for_models_on_demand() -> None:
    hosted, nodes = on_engine("hosted", "vllm"), [node("a", memory=4 * GIB, num_instances=1, device="cuda")]
    (alone,) = plan([hosted], nodes, None).instances
    (beside,) = plan([hosted, on_demand("a", 1000)], nodes, None).instances
    assert beside.pool_bytes == alone.pool_bytes


def test_a_chosen_plan_with_models_beside_an_engine_that_shares_with_nobody_is_refused_with_the_cause() -> None:
    models, nodes = [model("b"), on_engine("hosted", "vllm")], [node("a", num_instances=1)]
    with pytest.raises(DoesNotFit, match="the engine vllm takes an instance for itself"):
        chosen(models, nodes, PlacementPlan(1, []), [Group("a", (0,), ("b", "hosted"))])


def test_a_server_that_runs_already_takes_no_memory_and_one_instance() -> None:
    there = on_engine("there", "endpoint", engine_url="http://127.0.0.1:1")
    there = replace(there, shape=shape(weight_mib=100_000))
    result = plan([there], [node("a", memory=1 * GIB)], None)
    assert len(where(result, "there")) == 1 and not result.unplaced
