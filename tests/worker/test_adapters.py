"""LoRA adapters make what checkpoints with the same weights merged into them make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from services.worker.executor.executor import Executor
from services.worker.models import adapters as lora
from services.worker.models.loading import identity_of, load_model
from services.worker.native import library
from services.worker.ranks.group import Alone
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Adapter, SamplingParams, pack_tokens
from shared.models.adapters import check_base, describe_adapter
from shared.models.checkpoint import CheckpointError
from tests.worker.adapters import ALL, OPT, merged, write_adapter
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver, Row

CPU = torch.device("cpu")
MERGED_BYTES = 1 << 18
LENGTHS = (5, 40, 33, 21)
WIDE: dict[str, int] = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
}  # fmt: skip
"""What the compiled layers take."""
STEPS = 12


def load(executor: Executor, path: Path, quantization: str = "") -> ModelShape:
    return executor.add_model(executor.prepare_model(ModelSpec(path.name, str(path), quantization=quantization)))


def run(driver: Driver, rows: list[Row], chunk: int = 13) -> list[Row]:
    """Prompts in chunks beside the decodes of those that are done with theirs."""
    while unfinished := [row for row in rows if len(row.output) < STEPS]:
        driver.step([(row, min(chunk, len(row.tokens) - row.computed)) for row in unfinished])
    return rows


def alone(path: Path, prompt: list[int]) -> Row:
    executor = Executor("cpu", 8, MERGED_BYTES, 1)
    driver = Driver(executor, load(executor, path), range(8))
    return run(driver, [driver.add(0, prompt, logprobs=3)])[0]


def assert_same(mine: Row, theirs: Row) -> None:
    assert mine.output == theirs.output
    for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert one is not None and other is not None and one.top_ids == other.top_ids
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-3)


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize(
    ("variant", "modules"),
    [("llama", ALL), ("llama-tied-bias", ("q_proj", "v_proj")), ("opt", OPT), ("qwen3", ("up_proj", "o_proj")),
     ("phi3", ("qkv_proj", "gate_up_proj", "down_proj")), ("gemma2", ALL), ("mixtral", ("q_proj", "o_proj")),
     ("wide", ALL)],
)  # fmt: skip
def test_a_batch_of_several_adapters_equals_merged_weights(
    tmp_path: Path, variant: str, modules: tuple[str, ...], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of ranks 1, 4 and 11 run beside a request of the base model, in one batch with prompts in chunks."""
    if kernels == "torch":
        if variant not in ("llama", "opt"):
            pytest.skip("the same code")
        monkeypatch.setattr(library, "kernels", lambda: None)
    base = write_checkpoint(tmp_path, "llama", **WIDE) if variant == "wide" else write_checkpoint(tmp_path, variant)
    adapters = [
        write_adapter(tmp_path / "one", base, modules, rank=4),
        write_adapter(tmp_path / "two", base, modules[:1], rank=11, alpha=30, seed=1, use_rslora=True),
        write_adapter(tmp_path / "three", base, modules[-1:], rank=1, alpha=3, seed=2),
    ]
    executor = Executor("cpu", 16, MERGED_BYTES, 4)
    driver = Driver(executor, load(executor, base), range(16))
    for adapter in adapters:
        executor.load_adapter(base.name, adapter)
    prompts = [prompt_of(n) for n in LENGTHS]
    versions = ["", *(adapter.version for adapter in adapters)]
    rows = run(
        driver, [driver.add(i, p, v, logprobs=3) for i, (p, v) in enumerate(zip(prompts, versions, strict=True))]
    )
    paths = [base, *(merged(tmp_path / f"{adapter.name}-merged", base, adapter) for adapter in adapters)]
    for row, path, prompt in zip(rows, paths, prompts, strict=True):
        assert_same(row, alone(path, prompt))
    assert alone(base, prompts[1]).output != rows[1].output


@pytest.mark.parametrize(("variant", "modules"), [("llama", ("q_proj", "v_proj", "down_proj")), ("opt", OPT)])
def test_its_memory_is_known_before_it_is_read(
    tmp_path: Path, variant: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of ranks and stages, which have parts of it."""
    base = write_checkpoint(tmp_path, variant)
    files = describe_adapter(Path(write_adapter(tmp_path / "lora", base, modules, rank=3).source))
    made: list[int] = []

    class Counted(lora.Change):
        def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
            made.append(a.nbytes + b.nbytes)

    monkeypatch.setattr(lora, "Change", Counted)
    num_bytes = []
    for stage, num_stages, rank, size in ((0, 1, 0, 1), (0, 1, 1, 2), (1, 2, 0, 1)):
        group = Alone()
        group.stage, group.num_stages, group.rank, group.size = stage, num_stages, rank, size
        model = load_model(identity_of(base, CPU), CPU, group)
        known = lora.lora_bytes(files, model.adaptable, model.layers, group, model.dtype)
        lora.read_lora(files, model.adaptable, model.layers, group, CPU, model.dtype)
        assert known == sum(made) > 0
        num_bytes.append(known)
        made.clear()
    whole, of_rank, of_stage = num_bytes
    assert of_rank < whole and of_stage < whole


def test_a_batch_of_one_adapter_and_one_without_any_on_the_same_weights(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path, "llama")
    adapter = write_adapter(tmp_path / "one", base)
    executor = Executor("cpu", 16, MERGED_BYTES, 4)
    driver = Driver(executor, load(executor, base), range(16))
    executor.load_adapter("llama", adapter)
    prompt = prompt_of(30)
    run(driver, [rows := driver.add(0, prompt, adapter.version, logprobs=3)])
    assert_same(rows, alone(merged(tmp_path / "merged", base, adapter), prompt))
    executor.drop_adapter(adapter.version)
    again = driver.add(1, prompt, logprobs=3)
    run(driver, [again])
    assert_same(again, alone(base, prompt))


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_beside_layers_that_are_computed_in_one_call(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels run all layers of a step without adapters: it equals torch's operators beside those."""
    base = write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, **WIDE, num_hidden_layers=2)
    adapters = [write_adapter(tmp_path / "all", base), write_adapter(tmp_path / "some", base, ("q_proj",), seed=1)]
    versions = ["", *(adapter.version for adapter in adapters)]
    found = []
    for kernels in (library.kernels, lambda: None):
        monkeypatch.setattr(library, "kernels", kernels)
        executor = Executor("cpu", 16, MERGED_BYTES, 4)
        driver = Driver(executor, load(executor, base, quantization), range(16))
        for adapter in adapters:
            executor.load_adapter("llama", adapter)
        rows = [driver.add(i, prompt_of(20), version, logprobs=1) for i, version in enumerate(versions)]
        driver.step([(row, 20) for row in rows])
        found.append([row.logprobs[0] for row in rows])
        driver.step([(by_itself := driver.add(3, prompt_of(20), logprobs=1), 20)])
        is_compiled = executor._models["llama"].model._compiled is not None
        assert by_itself.logprobs[0] == found[-1][0] or not is_compiled, "its bits do not depend on the others"
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=0.15)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Changes a tensor of the first module of the first layer: `lora_A`, say; None takes it out."""
    file = path / "adapter_model.safetensors"
    held = load_file(file)
    for side, tensor in tensors.items():
        name = next(name for name in sorted(held) if side in name)
        del held[name]
        if tensor is not None:
            held[name] = tensor
    save_file(held, file)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not supported; supported is LORA"),
        ({"use_dora": True}, {}, "use_dora: DoRA's magnitudes are not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: whole modules"),
        ({"init_lora_weights": "pissa_niter_16"}, {}, "init_lora_weights 'pissa_niter_16'.*conversion"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights 'olora'.*not for those of the base model"),
        ({"bias": "all"}, {}, "bias 'all' is not supported; supported is none"),
        ({"lora_alpha": 0}, {}, "lora_alpha of model.layers.0.*must be a positive number, but is 0"),
        ({"r": 7}, {}, "r of model.layers.0.* is 7, but its tensors are of rank 4"),
        ({"r": 300}, {"lora_A": torch.zeros(300, 48), "lora_B": torch.zeros(48, 300)}, "is 300; the limit is 256"),
        ({}, {"lora_B": None}, "has no lora_B"),
        ({}, {"lora_A": torch.zeros(4, 47)}, "A.weight has 47 inputs, but the base model's .* has 48"),
        ({}, {"lora_A": torch.zeros(3, 48)}, "but .* is of rank 3"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_field(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    base = write_checkpoint(tmp_path, "llama")
    path = Path(write_adapter(tmp_path / "one", base, ("q_proj",), **config).source)
    change(path, **tensors)
    with pytest.raises(CheckpointError, match=message):
        check_base(describe_adapter(path), base, "llama")


def test_modules_that_the_base_model_lacks_are_refused_by_placement_and_worker(tmp_path: Path) -> None:
    base, other = write_checkpoint(tmp_path, "llama"), write_checkpoint(tmp_path, "opt")
    adapter = write_adapter(tmp_path / "one", other, ("fc1", "q_proj"))
    message = "target_modules fc1.*q_proj, k_proj"
    with pytest.raises(CheckpointError, match=message):
        check_base(describe_adapter(Path(adapter.source)), base, "llama")
    executor = Executor("cpu", 4, MERGED_BYTES, 1)
    load(executor, base)
    with pytest.raises(CheckpointError, match=message):
        executor.load_adapter("llama", adapter)
    with pytest.raises(CheckpointError, match="runs through transformers"):
        check_base(describe_adapter(Path(adapter.source)), base, "transformers")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        executor.load_adapter("llama", Adapter("none", "v", str(base)))


def test_a_suspended_step_goes_on_with_its_adapter(tmp_path: Path) -> None:
    """Whether or not it is still loaded."""
    base = write_checkpoint(tmp_path, "llama")
    adapter = write_adapter(tmp_path / "one", base)
    executor = Executor("cpu", 8, MERGED_BYTES, 1)
    shape = load(executor, base)
    executor.load_adapter("llama", adapter)
    prompt = prompt_of(30)
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    blocks = list(range(-(-31 // shape.block_size)))
    new = NewSequence(0, pack_tokens(prompt), 30, sampling, blocks, adapter.version)
    plan = StepPlan(
        step_id=1, model="llama", rows=[0], starts=[0], counts=[30], samples=[True], new_sequences=[new], new_blocks=[],
        is_interruptible=True, stop_share=0.4,
    )  # fmt: skip
    assert 0 < executor.execute(plan).suspended_share < 1
    executor.drop_adapter(adapter.version)
    result = executor.execute(replace(plan, new_sequences=[], resumes=True, stop_share=1.0))
    assert result.tokens == alone(merged(tmp_path / "merged", base, adapter), prompt).output[:1]
