"""What `tideway simulate` makes of a file, and how it refuses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.placement.facts import SHAPES
from shared.placement.hardware import A100_80G, CPU, Hardware, cost_model
from shared.placement.problem import Group
from tideway.scenario import ScenarioError, Setting, build, explicit_plan, merged, parse, read

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("simulate_*.toml"))


def content(**changes: Any) -> dict[str, Any]:
    return {
        "duration_s": 20,
        "nodes": [{"hardware": "A100-80G", "devices": 2}],
        "models": [{"name": "a", "shape": "llama-2-7b"}, {"name": "b", "shape": "opt-6.7b"}],
        "traffic": [
            {
                "name": "t",
                "models": {"a": 2, "b": 1},
                "arrivals": "poisson:5",
                "prompt_tokens": 100,
                "output_tokens": 10,
            }
        ],
    } | changes


def setting(folder: Path = REPOSITORY, **changes: Any) -> Setting:
    return Setting("test", parse(content(**changes)), folder)


def changed(key: str, value: Any, to: dict[str, Any] | None = None) -> dict[str, Any]:
    """`content` with a key like traffic.0.arrivals set."""
    result = msgspec.json.decode(msgspec.json.encode(to or content()))
    *path, last = key.split(".")
    at = result
    for word in path:
        at = at[int(word)] if isinstance(at, list) else at.setdefault(word, {})
    at[last] = value
    return result


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_understood(file: Path) -> None:
    settings = read(file)
    assert len(settings) > 1
    problems = [build(one).problem for one in settings]
    assert all(problem.traffic.num_requests > 100 for problem in problems)
    for one in settings[1:]:
        other = build(one).problem.traffic
        assert all(np.array_equal(x, y) for x, y in zip(problems[0].traffic[1:-1], other[1:-1], strict=True))
    for one, problem in zip(settings, problems, strict=True):
        if one.scenario.placement == "groups":
            assert explicit_plan(one.scenario, problem).groups


def test_traffic_is_drawn_by_the_seed_and_in_order() -> None:
    first, same, other = (build(setting(seed=seed)).problem.traffic for seed in (1, 1, 2))
    assert np.array_equal(first.arrival_s, same.arrival_s) and not np.array_equal(first.arrival_s, other.arrival_s)
    assert (np.diff(first.arrival_s) >= 0).all()
    assert first.num_requests == 100 and first.interval_s == 20
    assert first.models == ("a", "b")
    assert 50 < (first.model == 0).sum() < 85


@given(factor=st.floats(0.2, 5.0))
def test_rates_scale(factor: float) -> None:
    assert build(setting(rate_scale=factor)).problem.traffic.num_requests == pytest.approx(100 * factor, abs=1)


def test_a_trace_plays_faster_and_comes_from_beside_the_file(tmp_path: Path) -> None:
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{n},{100 + n},{1 + n}" for n in range(20))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    traffic = [{"name": "t", "models": "a", "arrivals": {"kind": "trace", "trace": {"path": "trace.csv"}}}]
    drawn = build(setting(tmp_path, traffic=traffic, rate_scale=2.0)).problem.traffic
    assert drawn.arrival_s.tolist() == [n / 2 for n in range(20)]
    assert drawn.prompt_tokens.tolist() == [100 + n for n in range(20)]
    (tmp_path / "rates.csv").write_text("model,window_start_s,rate_rps\nx,0,1\nx,10,3\n")
    traffic = [{"name": "t", "models": "a", "arrivals": "trace:rates.csv", "prompt_tokens": 5, "output_tokens": 5}]
    drawn = build(setting(tmp_path, traffic=traffic, rate_scale=2.0)).problem.traffic
    assert drawn.num_requests == 80
    assert (drawn.arrival_s < 10).sum() == pytest.approx(20, abs=8)


def test_batches_and_offline_streams_are_told_apart() -> None:
    batches = [{"name": "night", "model": "b", "num_requests": 7, "prompt_tokens": "uniform:5:9", "output_tokens": 3}]
    offline = changed("traffic.0.class", "offline")["traffic"]
    built = build(setting(traffic=offline, batches=batches))
    assert not built.problem.traffic.is_online.any()
    (batch,) = built.batches
    assert len(batch.lines) == 7
    assert all(model == "b" and 5 <= prompt <= 9 and output == 3 for model, prompt, output in batch.lines)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("duratoin_s", 5, "duratoin_s: no such key; did you mean 'duration_s'?"),
        ("traffic.0.arrivls", "poisson:1", r"traffic\[0\].arrivls: no such key; did you mean 'arrivals'?"),
        ("traffic.0.arrivals", "poison:1", "arrivals: 'poison:1' is none of: poisson:RATE"),
        ("traffic.0.arrivals", "closed:3", "a closed loop is not simulated"),
        ("traffic.0.arrivals", {"kind": "gamma", "rate_rps": 1, "cw": 2}, "cw: no such key; did you mean 'cv'?"),
        ("traffic.0.models", "c", r"traffic\[0\].models: 'c' is unknown; known: a, b"),
        ("traffic.0.prompt_tokens", "uniform:0:5", "prompt_tokens"),
        ("traffic.0.lengths_from", "nowhere.csv", "nowhere.csv"),
        ("duration_s", -1, "duration_s: expected `float` > 0.0"),
        ("nodes.0.hardware", "A100", r"nodes\[0\].hardware: 'A100' is unknown; did you mean 'A100-80G'?"),
        ("nodes.0.devices", 0, r"nodes\[0\].devices: expected `int` >= 1"),
        ("models.0.shape", "llama-2-7", r"models\[0\].shape: 'llama-2-7' is unknown; did you mean 'llama-2-7b'?"),
        ("models.0.checkpoint", "/nowhere", "'a' needs one of shape, checkpoint and numbers"),
        ("models.0.tensor_parallel", [3], r"models\[0\].tensor_parallel: a: none of \(3,\)"),
        ("models.1.name", "a", "models: two have the same name"),
        ("serving.order_policy", "fifo", "serving.order_policy: unknown order policy 'fifo'"),
        ("serving.noise", "much", "serving.noise: expected `float`, got `str`"),
        ("placement", "best", "^placement: 'best' is unknown; known: search, dedicated, dedicated_by_need, alpaserve, "
                              "muxserve, groups$"),
        ("search_by", "simulatoin", "search_by: 'simulatoin' is unknown; did you mean 'simulation'"),
        ("settings", [{"duration_s": 0}], "^setting 'setting 1': duration_s: expected"),
        ("placement", "groups", 'placement: "groups" needs'),
        ("settings", [{"placement": "muxserve", "replacement": {}}], 'replacement: the placement "muxserve" stays'),
        ("settings", [{"placement": "muxserve", "traffic": {"t": {"class": "offline"}}}], "serving.offline = false"),
        ("settings", [{"placement": "muxserve", "split_kv": {"block_size": 0}}], "split_kv.block_size: expected"),
        ("hardware.mine", {"base": "A10O"}, "hardware.mine.base: 'A10O' is unknown; did you mean 'A10'?"),
        ("hardware.mine", {"base": "A10", "flop": 1.0}, "hardware.mine.flop: no such key; did you mean 'flops'?"),
        ("hardware.mine", {"base": "A10", "flops": -1.0}, "hardware.mine.flops: expected `float` > 0.0"),
        ("settings", 5, "settings: expected tables"),
        ("settings", [{"models": {"c": {}}}], "models.c: 'c' is unknown"),
        ("settings", [{"name": "x", "seeed": 1}], "setting 'x': seeed: no such key; did you mean 'seed'?"),
        ("groups", [{"node": "node", "devices": [0, 2], "models": ["a"]}], r"groups\[0\].devices: expected consecutive"),
        ("groups", [{"node": "nod", "devices": [0], "models": ["a"]}], r"groups\[0\].node: 'nod' is unknown"),
        ("groups", [{"node": "node", "devices": [0], "models": ["a"]}] * 2, "0 of node is in another group too"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    given_ = changed(key, value)
    file.write_text("nodes = []\n")
    with pytest.raises(ScenarioError, match=message):
        for one in read(file, given_):
            problem = build(one).problem
            if one.scenario.groups:
                explicit_plan(one.scenario, problem)


def test_what_the_file_itself_has_wrong_is_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text("nodes = []\n")
    with pytest.raises(ScenarioError, match=r"^duratoin_s: no such key"):
        read(file, changed("duratoin_s", 5) | {"settings": [{"name": "x", "seed": 1}]})


def test_a_group_that_does_not_fit_says_by_how_much() -> None:
    models = [{"name": "a", "shape": "llama-2-70b"}, {"name": "b", "shape": "opt-6.7b"}]
    one = setting(models=models, groups=[{"node": "node", "devices": [0], "models": ["a"]}])
    with pytest.raises(ScenarioError, match=r"groups\[0\]: memory_bytes: a needs 1\d\d,\d{3} MiB on one device"):
        explicit_plan(one.scenario, build(one).problem)


def test_settings_change_keys_and_named_entries(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text("")
    overrides = [
        {"name": "as it is"},
        {"name": "twice", "rate_scale": 2.0, "serving": {"order_policy": "fcfs"}},
        {"name": "other", "traffic": {"t": {"arrivals": "poisson:1"}}, "models": {"b": {"slo_scale": 3}}},
    ]
    plain, twice, other = read(file, content(settings=overrides, serving={"noise": 0.0}))
    assert plain.scenario.serving.order_policy == "doubling_budget"
    assert twice.scenario.serving.order_policy == "fcfs" and twice.scenario.serving.noise == 0.0
    assert [build(one).problem.traffic.num_requests for one in (plain, twice, other)] == [100, 200, 20]
    assert build(other).problem.slo_scale_of("b") == 3 and build(other).problem.slo_scale_of("a") == 5


@given(st.dictionaries(st.sampled_from("abc"), st.integers() | st.dictionaries(st.sampled_from("xy"), st.integers())))
def test_merging_what_is_there_already_changes_nothing(some: dict[str, Any]) -> None:
    assert merged(some, some) == some
    assert merged(some, {}) == some
    assert merged({}, some) == some


def test_hardware_may_be_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("memory_bytes_s = 1e12\nflops = 50e12\n")
    hardware = {"mine": {"base": "A100-80G", "file": "mine.toml", "flops": 60e12}}
    problem = build(setting(tmp_path, hardware=hardware, nodes=[{"hardware": "mine", "devices": 1}])).problem
    expected = msgspec.structs.replace(A100_80G, name="mine", memory_bytes_s=1e12, flops=60e12)
    assert problem.nodes[0].kind == "mine"
    assert problem.models[0].costs["mine", 1] == cost_model(expected, SHAPES["llama-2-7b"])


def test_a_ready_kind_survives_being_written_down() -> None:
    for kind in (A100_80G, msgspec.structs.replace(CPU, measured={"m": {1: cost_model(CPU, SHAPES["llama-135m"])}})):
        plain = msgspec.json.decode(msgspec.json.encode(kind))
        assert msgspec.convert(plain, Hardware, str_keys=True) == kind


def test_a_measured_cost_model_is_taken_as_table_or_file(tmp_path: Path) -> None:
    cost = cost_model(A100_80G, SHAPES["llama-2-7b"]).scaled(1.5)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost))
    models = changed("models.0.costs", {"A100-80G": {"1": "cost.json", "2": msgspec.to_builtins(cost)}})["models"]
    facts = build(setting(tmp_path, models=models)).problem.models[0]
    assert facts.costs["A100-80G", 1] == facts.costs["A100-80G", 2] == cost
    assert facts.costs["A100-80G", 4] != cost


def test_a_model_is_a_folder_or_numbers() -> None:
    numbers = msgspec.to_builtins(SHAPES["opt-13b"])
    models = [
        {"name": "a", "checkpoint": "models/tideway-demo-llama"},
        {"name": "b", "numbers": numbers, "max_model_len": 1024},
    ]
    problem = build(setting(models=models)).problem
    assert problem.models[0].num_layers == 4 and set(problem.models[0].costs) == {("A100-80G", 1), ("A100-80G", 2)}
    assert problem.models[1].num_layers == 40 and problem.models[1].max_model_len == 1024


def test_nodes_are_counted_and_groups_are_placed() -> None:
    nodes = [{"name": "n", "hardware": "L4", "devices": 4, "count": 2}]
    one = setting(nodes=nodes, groups=[{"node": "n-1", "devices": [2, 1], "models": ["b", "a"]}])
    problem = build(one).problem
    assert [node.node_id for node in problem.nodes] == ["n-0", "n-1"]
    assert explicit_plan(one.scenario, problem).groups == (Group("n-1", (1, 2), ("a", "b")),)
