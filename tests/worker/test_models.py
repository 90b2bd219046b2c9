"""Every family against transformers: greedy output in float32, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    ZayaConfig,
    ZayaForCausalLM,
)

from services.worker.executor.executor import Executor
from services.worker.models import decoder
from services.worker.models.linear import Linear, packing_works
from services.worker.models.loading import LOADERS, identity_of, load_model
from services.worker.native import library
from services.worker.ranks.group import Alone
from shared.engine.plan import NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError, run_dtype
from shared.models.families import ENCODERS, FAMILIES, TRANSFORMERS, family_of
from tests.worker.checkpoints import BY_TRANSFORMERS, VARIANTS, prompt_of, reference_outputs, write_checkpoint
from tests.worker.step_driver import Driver

CPU = torch.device("cpu")
MERGED_BYTES = 1 << 18
TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def generate(
    path: Path, prompts: list[list[int]], steps: int, *, max_model_len: int | None = None, quantization: str = ""
) -> list[list[int]]:
    """Prefill in chunks of 13 while the first to finish decode already, then decode together."""
    executor = Executor("cpu", 16, MERGED_BYTES, len(prompts))
    spec = ModelSpec("m", str(path), max_model_len=max_model_len, quantization=quantization)
    driver = Driver(executor, executor.add_model(executor.prepare_model(spec)), range(16))
    rows = [driver.add(i, prompt) for i, prompt in enumerate(prompts)]
    while any(not r.output for r in rows):
        driver.step([(r, 1 if r.output else min(13, len(r.tokens) - r.computed)) for r in rows])
    while any(len(r.output) < steps for r in rows):
        driver.step([(r, 1) for r in rows if len(r.output) < steps])
    return [r.output[:steps] for r in rows]


@pytest.mark.parametrize(
    ("variant", "shards"),
    [(v, False) for v in (*VARIANTS, *BY_TRANSFORMERS) if v != "mistral-longrope"] + [("llama", True), ("opt", True)],
)
def test_greedy_output_equals_transformers(tmp_path: Path, variant: str, shards: bool) -> None:
    path = write_checkpoint(tmp_path, variant, shards=shards)
    assert len(list(path.glob("*.safetensors"))) > 1 or not shards
    prompts = [prompt_of(n) for n in (5, 40, 60)]
    outputs = generate(path, prompts, 16)
    assert outputs == reference_outputs(path, prompts, 16)
    assert sum(len(set(output)) for output in outputs) > 8, "the checkpoint is too dull to tell errors"


@pytest.mark.parametrize(("max_model_len", "length"), [(64, 20), (256, 70)])
def test_longrope_takes_short_or_long_factors_by_served_length(tmp_path: Path, max_model_len: int, length: int) -> None:
    path = write_checkpoint(tmp_path, "mistral-longrope")
    outputs = generate(path, [prompt_of(length)], 20, max_model_len=max_model_len)
    assert outputs == reference_outputs(path, [prompt_of(length)], 20)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "opt"])
def test_bfloat16_logits_are_close_to_transformers(tmp_path: Path, variant: str) -> None:
    path = write_checkpoint(tmp_path, variant, dtype=torch.bfloat16)
    executor = Executor("cpu", 4, MERGED_BYTES, 1)
    prepared = executor.prepare_model(ModelSpec("m", str(path)))
    assert prepared.model.dtype == torch.bfloat16
    driver = Driver(executor, executor.add_model(prepared), range(4))
    row = driver.add(0, prompt_of(40), logprobs=5)
    driver.step([(row, 40)])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        expected = model(torch.tensor([prompt_of(40)])).logits[0, -1].float().log_softmax(-1)
    logprob = row.logprobs[0]
    assert logprob is not None
    got = torch.tensor(logprob.top_logprobs)
    assert torch.allclose(got, expected[list(logprob.top_ids)], atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("is_said", [True, False])
def test_a_head_of_its_own_goes_before_what_the_config_says(
    tmp_path: Path, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path, "llama-tied-bias")
    tied = generate(path, [prompt_of(30)], 10)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": is_said}
    (path / "config.json").write_text(json.dumps(config))
    for head, differs in ((embedding.clone(), False), (embedding.flip(0).contiguous(), True)):
        save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
        caplog.clear()
        assert (generate(path, [prompt_of(30)], 10) != tied) == differs
        assert ("lm_head.weight is used" in caplog.text) == (differs and is_said)
    save_file(tensors, path / "model.safetensors")
    caplog.clear()
    assert generate(path, [prompt_of(30)], 10) == tied and ("has no lm_head" in caplog.text) == (not is_said)


def test_older_config_and_tensor_names(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top level with `type`, torch_dtype, no module prefix, stored inv_freq."""
    path = write_checkpoint(tmp_path, "llama-linear")
    expected = reference_outputs(path, [prompt_of(30)], 10)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "linear", "factor": rope["factor"]},
        "torch_dtype": config.pop("dtype"),
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name.removeprefix("model."): t for name, t in load_file(path / "model.safetensors").items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors")
    assert generate(path, [prompt_of(30)], 10) == expected


def test_layers_can_be_run_in_ranges(tmp_path: Path) -> None:
    """A forward pass may pause between layers."""
    path = write_checkpoint(tmp_path, "llama")
    executor = Executor("cpu", 4, MERGED_BYTES, 1)
    prepared = executor.prepare_model(ModelSpec("m", str(path)))
    driver = Driver(executor, executor.add_model(prepared), range(4))
    model = prepared.model

    def in_ranges(batch: object, hidden: torch.Tensor | None = None) -> object:
        state = model.begin(batch, hidden)  # type: ignore[arg-type]
        for layer in range(model.num_layers):
            model.run_layers(state, layer, layer + 1, batch)  # type: ignore[arg-type]
        return state

    model.forward = in_ranges  # type: ignore[assignment, method-assign]
    row = driver.add(0, prompt_of(20))
    driver.step([(row, 20)])
    driver.decode([row], 5)
    assert [row.output] == reference_outputs(path, [prompt_of(20)], 6)


def test_layers_by_transformers_run_at_once(tmp_path: Path) -> None:
    executor = Executor("cpu", 16, MERGED_BYTES, 2)
    path = write_checkpoint(tmp_path, "gpt2")
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(path))))
    assert shape.layers_per_safepoint == shape.num_layers == 3
    executor.set_layers_per_safepoint("m", 1)
    new = NewSequence(0, pack_tokens(prompt_of(20)), 20, SamplingParams(max_tokens=9, temperature=0.0), [0])
    step = StepPlan(
        step_id=7, model="m", rows=[0], starts=[0], counts=[20], samples=[True], new_sequences=[new], new_blocks=[],
        is_interruptible=True,
    )  # fmt: skip
    executor.interrupt(7)
    assert executor.execute(step).suspended_share == 0.0
    resumed = replace(step, new_sequences=[], resumes=True)
    assert [executor.execute(resumed).tokens] == reference_outputs(path, [prompt_of(20)], 1)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (GptOssForCausalLM, GptOssConfig(**TINY, num_local_experts=2, head_dim=8), "attention with s_aux"),
        (
            BloomForCausalLM,
            BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2, seq_length=64),
            "be replaced",
        ),
        (
            ZayaForCausalLM,
            ZayaConfig(**{key: value for key, value in TINY.items() if key != "rope_parameters"}),
            "mix tokens outside of attention",
        ),
        (None, None, "not known to the installed transformers"),
    ],
)
def test_what_transformers_cannot_run_here_is_refused(
    tmp_path: Path, kind: type[PreTrainedModel] | None, config: PreTrainedConfig | None, message: str
) -> None:
    if kind is None:
        path = write_checkpoint(tmp_path, "llama")
        change_config(path, architectures=["NewForCausalLM"], model_type="new")
    else:
        path = tmp_path / "model"
        kind(config).save_pretrained(path)
    with pytest.raises(CheckpointError, match=message):
        load_model(identity_of(path, CPU), CPU)
    group = Alone()
    group.size = 2
    with pytest.raises(CheckpointError, match=r"run by transformers.*several devices"):
        load_model(identity_of(path, CPU), CPU, group)


def test_a_tensor_that_transformers_does_not_find_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "phi")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.fc1.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.1\.mlp\.fc1\.weight"):
        load_model(identity_of(path, CPU), CPU)


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 96}, ["mlp.gate_proj.weight", "80", "96"]),
        ({"num_hidden_layers": 4}, ["no tensor model.layers.3"]),
        ({"num_hidden_layers": 2}, ["does not use", "model.layers.2"]),
        ({"hidden_act": "tanh"}, ["activation 'tanh'"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["rope scaling 'spiral'"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["llama3", "'factor'"]),
        ({"intermediate_size": None}, ["config.json", "intermediate_size"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = write_checkpoint(tmp_path, "llama")
    change_config(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(identity_of(path, CPU), CPU)
    assert all(word in str(caught.value) for word in words), caught.value


def test_lengths_and_dtypes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", dtype=torch.float16)
    assert load_model(identity_of(path, CPU, max_model_len=100), CPU).dtype == torch.bfloat16
    executor = Executor("cpu", 1, MERGED_BYTES, 1)
    assert executor.prepare_model(ModelSpec("m", str(path), max_model_len=100)).max_model_len == 100
    assert load_model(identity_of(path, CPU, dtype="float32"), CPU).dtype == torch.float32
    assert run_dtype("auto", "float16", "cuda") == "float16"
    with pytest.raises(CheckpointError, match="exceeds the model's own 256"):
        identity_of(path, CPU, max_model_len=257)
    with pytest.raises(CheckpointError, match="dtype 'int8'"):
        identity_of(path, CPU, dtype="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 32, 257])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_torch(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(320, 192).to(dtype), torch.randn(rows, 192).to(dtype)
    bias = torch.randn(320).to(dtype) if with_bias else None
    with torch.inference_mode():
        torch.testing.assert_close(Linear(weight.clone(), bias)(x), F.linear(x, weight, bias))


def test_a_shared_weight_is_packed_only_where_the_copy_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_team_of", lambda num_threads: None)
    weight, x = torch.randn(32, 16), torch.randn(2, 16)
    assert Linear(weight, shared=True)._packed
    monkeypatch.setattr("services.worker.models.linear._MAX_SHARED_COPY_BYTES", weight.nbytes - 1)
    large = Linear(weight, shared=True)
    assert not large._packed and torch.equal(large(x), F.linear(x, weight))


def test_linear_falls_back_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(library, "_team_of", lambda num_threads: None)
    monkeypatch.setattr("services.worker.models.linear._pack", broken)
    packing_works.cache_clear()
    try:
        weight, x = torch.randn(8, 4), torch.randn(2, 4)
        assert torch.equal(Linear(weight)(x), F.linear(x, weight))
        assert not packing_works(torch.float32)
    finally:
        packing_works.cache_clear()


def test_what_is_accepted_can_be_run() -> None:
    """Placement goes by the records in shared."""
    assert [family.name for family in (*FAMILIES, TRANSFORMERS, ENCODERS)] == list(LOADERS)
    assert decoder.ACTIVATIONS.keys() == set(checkpoint.SUPPORTED_ACTIVATIONS)


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"phi3", "mixtral", "qwen3-moe"}))
def test_what_ranks_compute_by_the_cut_plan_adds_up_to_the_whole(variant: str) -> None:
    kind, config = VARIANTS[variant]
    family = family_of(kind.__name__)
    assert family is not None
    weights = {
        name.split(".")[-2]: tensor.double()
        for name, tensor in kind(config).state_dict().items()
        if ".layers.0." in name and name.endswith(".weight") and tensor.dim() == 2
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def sublayers(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's attention and MLP, without norms, positions and biases."""
        parts = {name: weight.chunk(num_ranks, family.cuts[name])[rank] for name, weight in weights.items()}
        q, k, v = ((x @ parts[f"{n}_proj"].T).unflatten(1, (-1, head_dim)).transpose(0, 1) for n in "qkv")
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        out = attended.transpose(0, 1).flatten(1) @ (parts.get("o_proj", parts.get("out_proj"))).T
        if "fc1" in parts:
            return out, F.relu(x @ parts["fc1"].T) @ parts["fc2"].T
        return out, (F.silu(x @ parts["gate_proj"].T) * (x @ parts["up_proj"].T)) @ parts["down_proj"].T

    x = torch.randn(5, config.hidden_size, dtype=torch.float64)
    for whole, *parts in zip(sublayers(x, 0, 1), sublayers(x, 0, 2), sublayers(x, 1, 2), strict=True):
        torch.testing.assert_close(sum(parts), whole)
