"""bench/sharing_overhead runs, and sees one copy of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.sharing_overhead import HELD, compare, make_checkpoints, measure, pool_bytes, weights_memory
from services.worker.executor.executor import Executor
from shared.engine.memory.slab import choose_merged_bytes
from shared.messages.cluster import ModelSpec


@pytest.mark.long
def test_three_models_on_one_executor_are_measured(tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / str(number), SHAPES["tiny"]) for number in range(3)]
    measured, facts = measure(checkpoints, "cpu", 4)
    assert [one.step for one in measured] == ["decode", "decode", "prefill", "prefill"]
    assert all(one.alone_ms > 0 and one.other_ms > 0 for one in measured)
    assert facts["block_table_ratio"] == 4 * 2 * 2
    # Which asserts that there is one copy; so small a model is no more than the noise of what a process takes.
    assert list(weights_memory(checkpoints[0], "cpu")) == ["one name", "two names", "the first removed", "both removed"]


def test_a_ratio_is_of_pairs_whatever_their_order() -> None:
    found = compare("", "", lambda: 2.0, lambda: 3.0, 5)
    assert (found.alone_ms, found.other_ms, found.overhead) == (2000, 3000, 0.5)


def test_two_models_of_8b_and_one_of_them_alone_fit_one_gpu_of_80_gb() -> None:
    shape = SHAPES["llama-3.1-8b"]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2
    attention = 2 * shape["hidden_size"] * (shape["hidden_size"] + shape["num_key_value_heads"] * head_dim)
    mlp = 3 * shape["hidden_size"] * shape["intermediate_size"]
    weights = 2 * (shape["vocab_size"] * shape["hidden_size"] + shape["num_hidden_layers"] * (attention + mlp))
    blocks = [(128 * token_bytes, 128)] * 2
    merged_bytes = choose_merged_bytes([block_bytes for block_bytes, _ in blocks])
    pools = pool_bytes(blocks[:1], merged_bytes, HELD["cuda"]) + pool_bytes(blocks, merged_bytes, HELD["cuda"])
    assert 14e9 < weights < 17e9
    assert pools + 3 * weights < 0.8 * (78 << 30), "a fifth is left for graphs, workspaces and contexts"


def test_models_of_one_shape_share_files_but_not_weights(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "made", SHAPES["tiny"])
    paths = make_checkpoints(tmp_path / "models", ["tiny", "tiny"], "cpu", first)
    assert len({path.resolve() for path in (*paths, first)}) == 3
    assert {(path / "model.safetensors").resolve() for path in paths} == {(first / "model.safetensors").resolve()}
    executor = Executor("cpu", 8, 1 << 20, 4)
    one, other = (executor.prepare_model(ModelSpec(path.name, str(path))) for path in paths)
    assert one.model is not other.model
    executor.close()


@pytest.mark.long
def test_of_two_models_of_one_shape_each_is_measured(tmp_path: Path) -> None:
    measured, _ = measure(make_checkpoints(tmp_path, ["tiny", "tiny"], "cpu", None), "cpu", 4)
    resident = [(one.what, one.step) for one in measured if one.what.endswith("resident")]
    assert resident == [
        ("one other resident", "decode"), ("one other resident", "prefill"),
        ("the other of both, one resident", "decode"), ("the other of both, one resident", "prefill"),
    ]  # fmt: skip
