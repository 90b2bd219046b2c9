"""In deterministic mode a token and its log-probabilities are the same to the last bit, whatever the schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.executor.executor import Executor
from services.worker.models import linear
from services.worker.models.decoder import activation
from services.worker.models.deterministic import INVARIANT, tiles
from services.worker.models.rope import RotaryEmbedding
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import pack_tokens
from shared.models.checkpoint import CheckpointError
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.ranks.followers import followers
from tests.worker.step_driver import Driver, Row

MERGED_BYTES = 1 << 20
NUM_MERGED = 8
LENGTHS = (5, 40, 97, 33, 170)
STEPS = 8
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_EACH_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.long, NEEDS_CUDA])]
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    {"temperature": 1.3, "seed": 9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 20},
    {"presence_penalty": 0.5, "logit_bias": ((17, 1.5),), "logprobs": 1},
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},
    "llama-dynamic": {},
    "mistral-window": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "qwen3": {},
    "opt-gelu-untied": {},
    "mixtral": {},
    "qwen3-moe": {},
    "gemma3": {},
    "phi3": {},
}
"""By variant, what is changed."""
QUICK = ("llama",)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(folder, name, dtype=torch.bfloat16, **changes) for name, changes in SHAPES.items()}


def load(device: str, path: Path, num_rows: int, dtype: str = "bfloat16") -> tuple[Executor, ModelShape]:
    executor = Executor(device, NUM_MERGED, MERGED_BYTES, num_rows, deterministic=True)
    return executor, executor.add_model(executor.prepare_model(ModelSpec(path.name, str(path), dtype)))


def alone(executor: Executor, shape: ModelShape) -> list[Row]:
    """Each sequence by itself: its prompt at once, then token by token."""
    driver, rows = Driver(executor, shape, range(NUM_MERGED)), []
    for length, sampling in zip(LENGTHS, SAMPLING, strict=True):
        row = driver.add(0, prompt_of(length), **sampling)
        driver.step([(row, length)])
        driver.decode([row], STEPS - 1)
        driver.preempt(row)
        rows.append(row)
    return rows


def scheduled(executor: Executor, shape: ModelShape, seed: int) -> list[Row]:
    """Random subsets and chunks; preemption, whose tokens are computed again as part of a prompt; rows and blocks change."""
    chance = random.Random(seed)
    driver = Driver(executor, shape, range(NUM_MERGED), seed)
    rows = [driver.add(i, prompt_of(n), **s) for i, (n, s) in enumerate(zip(LENGTHS, SAMPLING, strict=True))]
    spare = [len(rows)]
    while unfinished := [r for r in rows if len(r.output) < STEPS]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        driver.step([(r, chance.randint(1, len(r.tokens) - r.computed)) for r in chosen])
        if chance.random() < 0.2:
            victim = chance.choice(chosen)
            driver.preempt(victim)
            spare.append(victim.row)
            victim.row = spare.pop(0)
    return rows


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in SHAPES]
)
def test_tokens_and_logprobs_do_not_depend_on_the_schedule(
    checkpoints: dict[str, Path], variant: str, device: str
) -> None:
    executor, shape = load(device, checkpoints[variant], len(LENGTHS) + 1)
    expected = alone(executor, shape)
    for seed in range(2):
        for row, other in zip(scheduled(executor, shape, seed), expected, strict=True):
            assert row.output == other.output
            assert row.logprobs == other.logprobs


@pytest.mark.long
def test_two_ranks_make_the_same_bits_in_any_schedule(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with followers(2, tmp_path) as pair:
        executor: Any = pair.executor(NUM_MERGED, MERGED_BYTES, len(LENGTHS) + 1, deterministic=True)
        shape = executor.load(checkpoints["llama"])
        expected = alone(executor, shape)
        for row, other in zip(scheduled(executor, shape, 0), expected, strict=True):
            assert (row.output, row.logprobs) == (other.output, other.logprobs)


def test_a_fingerprint_is_of_the_weights_and_the_mode(checkpoints: dict[str, Path]) -> None:
    names = ("llama", "llama", "llama-dynamic")
    fingerprints = [load("cpu", checkpoints[name], 1)[1].fingerprint for name in names]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    fast = Executor("cpu", NUM_MERGED, MERGED_BYTES, 1)
    assert fast.add_model(fast.prepare_model(ModelSpec("m", str(checkpoints["llama"])))).fingerprint == ""


def test_what_cannot_be_computed_so_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Capped scores, and weights that are quantised while they are loaded."""
    with pytest.raises(CheckpointError, match="in every batch"):
        load("cpu", write_checkpoint(tmp_path, "gemma2", dtype=torch.bfloat16), 1)
    executor = Executor("cpu", NUM_MERGED, MERGED_BYTES, 1, deterministic=True)
    with pytest.raises(CheckpointError, match="in every batch"):
        executor.prepare_model(ModelSpec("m", str(checkpoints["llama"]), quantization="int8"))


def test_a_suspended_step_makes_the_bits_of_one_at_once(checkpoints: dict[str, Path]) -> None:
    """Another step of other sequences runs between its layers."""
    executor, shape = load("cpu", checkpoints["llama"], 4)
    driver = Driver(executor, shape, range(NUM_MERGED))
    prompt = prompt_of(130)
    whole, other = (driver.add(i, prompt_of(n), logprobs=5) for i, n in enumerate((130, 60)))
    driver.step([(whole, 130)])
    blocks = [driver.free.pop() for _ in whole.blocks]
    new = NewSequence(2, pack_tokens(prompt), len(prompt), whole.sampling, blocks)
    plan = StepPlan(
        step_id=1000, model=shape.name, rows=[2], starts=[0], counts=[130], samples=[True], new_sequences=[new],
        new_blocks=[], is_interruptible=True, stop_share=0.5,
    )  # fmt: skip
    assert executor.execute(plan).suspended_share > 0
    driver.step([(whole, 1), (other, 60)])
    resumed = msgspec.structs.replace(plan, resumes=True, new_sequences=[], stop_share=1.0)
    result = executor.execute(resumed)
    assert (result.tokens, result.logprobs) == (whole.output[:1], whole.logprobs[:1])


# ---------------------------------------------------------------------------------------------------------- parts


@given(num_rows=st.integers(0, 3000), others=st.sets(st.sampled_from((1, 2, 4, 8, 16, 64, 128, 256, 512))))
def test_tiles_cover_the_rows_in_known_sizes(num_rows: int, others: set[int]) -> None:
    sizes = tuple(sorted({32, *others}))
    at = 0
    for start, stop, size in tiles(num_rows, sizes):
        assert start == at and start < stop <= start + size and size in sizes
        assert stop == num_rows or stop == start + size, "padding comes last"
        at = stop
    assert at == num_rows


@pytest.mark.parametrize("width", [64, 100, 40000])
@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_the_same_at_every_place(width: int, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 2 * width).mul_(4).to(dtype).chunk(2, -1)[0]
    function = INVARIANT.by_rows(activation(name))
    whole = function(x)
    for rows in (slice(3, 4), slice(11, 70), slice(0, 33)):
        assert torch.equal(function(x[rows]), whole[rows])


def test_a_table_of_angles_has_what_each_position_has_however_it_grew() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    grown, whole = (RotaryEmbedding(48, rope, 100, 4000, torch.device("cpu"), torch.float32) for _ in range(2))
    INVARIANT.rope(whole, 4000)
    for positions in ([0, 63, 64, 130, 199, 5], [1023, 1024], [3999, 7]):
        length = torch.tensor(positions, dtype=torch.float64).add(1).clamp(min=100)[:, None]
        base = 10000.0 * (2 * length / 100 - 1) ** (48 / 46)
        angles = torch.tensor(positions)[:, None] / base ** (torch.arange(0, 48, 2, dtype=torch.float64) / 48)
        for got, same, expected in zip(
            grown.cos_sin(torch.tensor(positions)),
            whole.cos_sin(torch.tensor(positions)),
            (angles.cos(), angles.sin()),
            strict=True,
        ):
            assert torch.equal(got, same)
            torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_product_is_the_same_in_any_batch(
    dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weight is too large to be packed a second time. The halves of the sums cancel each other."""
    monkeypatch.setattr(linear, "_MAX_SHARED_COPY_BYTES", 0)
    torch.manual_seed(0)
    half, x = torch.randn(72, 776), torch.randn(75, 776)
    layer = INVARIANT.linear(torch.cat((half, half), 1).to(dtype), shared=shared)
    rows = torch.cat((x, -x), 1).to(dtype)
    whole = layer(rows)
    for part in (slice(0, 1), slice(7, 10), slice(70, 75), slice(3, 45)):
        assert torch.equal(layer(rows[part]), whole[part])
