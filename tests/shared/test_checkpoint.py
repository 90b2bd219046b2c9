"""Reading checkpoints without their weights: shapes, lengths, sizes, and a sentence for each defect."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.models import checkpoint, config_values
from shared.models.checkpoint import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

OTHER = {"architectures": ["NewForCausalLM"]}


def write_safetensors(file: Path, **tensors: tuple[str, list[int], int]) -> None:
    """Tensors as name=(dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    packed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + bytes(offset))


def make(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    merged = {k: v for k, v in ((config or LLAMA) | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    write_safetensors(folder / "model.safetensors", a=("BF16", [100, 64], 12800), b=("BF16", [64], 128))
    return folder


def test_describe(tmp_path: Path) -> None:
    shape = checkpoint.describe(make(tmp_path))
    assert shape == checkpoint.CheckpointShape(
        architecture="LlamaForCausalLM",
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=64,
        vocab_size=100,
        max_model_len=2048,
        dtype="bfloat16",
        weight_bytes=12928,
        eos_token_ids=(2,),
    )


def test_head_size_and_kv_heads_default_to_the_attention_heads(tmp_path: Path) -> None:
    shape = checkpoint.describe(make(tmp_path, num_key_value_heads=None))
    assert (shape.num_kv_heads, shape.head_dim) == (8, 8)
    assert checkpoint.describe(make(tmp_path, head_dim=32)).head_dim == 32


def test_other_architectures_may_have_other_words(tmp_path: Path) -> None:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    renamed = {names[key]: LLAMA[key] for key in names} | {"n_positions": 512, "multi_query": True}
    gone = dict.fromkeys((*names, "max_position_embeddings", "num_key_value_heads"))
    shape = checkpoint.describe(make(tmp_path, architectures=["GPTBigCodeForCausalLM"], **renamed, **gone))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_model_len) == (2, 1, 8, 512)
    assert not shape.is_divisible


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, 2048),
    ],
)
def test_max_model_len_counts_the_rope_scaling(tmp_path: Path, changes: dict[str, Any], length: int) -> None:
    assert checkpoint.describe(make(tmp_path, **changes)).max_model_len == length


@pytest.mark.parametrize(
    ("changes", "depends"),
    [
        ({}, False),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, True),
        ({"sliding_window": 64}, True),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}, False),
    ],
)
def test_a_length_makes_another_model_by_its_factors_or_windows(
    tmp_path: Path, changes: dict[str, Any], depends: bool
) -> None:
    assert checkpoint.describe(make(tmp_path, **changes)).depends_on_length is depends


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({"eos_token_id": [7, 8]}, (7, 8, 2)),
        ({"eos_token_id": 9}, (9, 2)),
        ({"temperature": 1}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": []}, (2,)),
        ({"eos_token_id": [7, -1, 100, 10**12, 7.0]}, (7, 2)),
    ],
)
def test_eos_ids_come_from_both_configs(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    make(tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert checkpoint.describe(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<e>", "added_tokens_decoder": {"5": {"content": "<e>"}}}}, (2, 5)),
        (
            {
                "tokenizer_config.json": {"eos_token": {"content": "<e>"}},
                "tokenizer.json": {"added_tokens": [{"id": 6, "content": "<e>"}]},
            },
            (2, 6),
        ),
        ({"tokenizer_config.json": {"eos_token": "e"}, "tokenizer.json": {"model": {"vocab": {"e": 7}}}}, (2, 7)),
        ({"special_tokens_map.json": {"eos_token": "e"}, "tokenizer.json": {"model": {"vocab": {"e": 7}}}}, (2, 7)),
        ({"tokenizer_config.json": {"eos_token": "e"}, "tokenizer.json": {"model": {"vocab": [["e", 0.5]]}}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "e"}, "tokenizer.json": {"model": {"vocab": {"e": 500}}}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": None}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "<e>"}}, (2,)),
    ],
)
def test_an_eos_id_that_only_the_tokenizer_names(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    make(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert checkpoint.describe(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", [True], [1.5], {"a": 1}])
def test_an_eos_id_that_is_none_is_a_defect(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        checkpoint.describe(make(tmp_path, eos_token_id=value))


def test_how_the_maker_would_have_it_sampled(tmp_path: Path) -> None:
    assert checkpoint.sampling_defaults(tmp_path) == checkpoint.SamplingDefaults()
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": -1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    expected = checkpoint.SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert checkpoint.sampling_defaults(tmp_path) == expected


def test_a_byte_order_mark_before_a_config(tmp_path: Path) -> None:
    file = make(tmp_path) / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert checkpoint.describe(tmp_path).num_layers == 2


@pytest.mark.parametrize(
    ("others", "used"),
    [
        (["consolidated.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["model-00001-of-00002.safetensors"], ["model-00001-of-00002.safetensors", "model.safetensors"]),
    ],
)
def test_weights_that_are_no_part_of_the_model_are_left(tmp_path: Path, others: list[str], used: list[str]) -> None:
    make(tmp_path)
    for name in others:
        write_safetensors(tmp_path / name, a=("BF16", [1], 2))
    assert [file.name for file in checkpoint.weight_files(tmp_path)] == used
    if others[0] == "consolidated.safetensors":
        (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
        assert [file.name for file in checkpoint.weight_files(tmp_path)] == ["weights.safetensors"]


def test_no_eos_id_at_all(tmp_path: Path) -> None:
    assert checkpoint.describe(make(tmp_path, eos_token_id=None)).eos_token_ids == ()


def test_dtype_is_found_in_either_place_or_in_the_tensors(tmp_path: Path) -> None:
    assert checkpoint.describe(make(tmp_path, dtype="float16")).dtype == "float16"
    assert checkpoint.describe(make(tmp_path, torch_dtype="torch.float32")).dtype == "float32"
    assert checkpoint.describe(make(tmp_path, torch_dtype=None)).dtype == "bfloat16"
    with pytest.raises(CheckpointError, match=r"config\.json: dtype 'int4'"):
        checkpoint.describe(make(tmp_path, torch_dtype="int4"))


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    make(tmp_path)
    for i in (1, 2):
        write_safetensors(tmp_path / f"part-{i}.safetensors", x=("F32", [8], 32))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert checkpoint.describe(tmp_path).weight_bytes == 64
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-2\.safetensors is missing"):
        checkpoint.describe(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        checkpoint.describe(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, ["config.json", "BertForMaskedLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["none named"]),
        ({"hidden_size": None}, ["config.json", "hidden_size", "None"]),
        ({"vocab_size": -3}, ["vocab_size", "-3"]),
        ({"num_attention_heads": 7}, ["64", "7"]),
        ({"max_position_embeddings": "long"}, ["max_position_embeddings", "'long'"]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
            ["quantization_config.quant_method", "'bitsandbytes'", "not supported"],
        ),
        ({"hidden_act": "mish"}, ["activation 'mish'", "silu"]),
        (OTHER | {"kv_lora_rank": 512}, ["NewForCausalLM", "kv_lora_rank", "MLA"]),
        (OTHER | {"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        (OTHER | {"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
        (OTHER | {"mamba_d_state": 16}, ["mamba_d_state", "state"]),
        (OTHER | {"num_key_value_heads": [2, 4]}, ["num_key_value_heads", "one shape"]),
        (OTHER | {"alibi": True}, ["alibi"]),
        (OTHER | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "batch"]),
        (OTHER | {"max_position_embeddings": None}, ["max_position_embeddings"]),
        (OTHER | {"quantization_config": {"quant_method": "awq", "bits": 4}}, ["NewForCausalLM", "quantised"]),
        ({"rope_scaling": {"type": "mrope"}}, ["rope scaling 'mrope'", "yarn"]),
    ],
)
def test_a_config_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.describe(make(tmp_path, **changes))
    assert all(word in str(caught.value) for word in words)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        checkpoint.describe(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        checkpoint.describe(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        checkpoint.describe(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        checkpoint.describe(tmp_path)
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors files"):
        checkpoint.describe(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin would have to be converted"):
        checkpoint.describe(tmp_path)
    deep = b"[" * 100_000 + b"]" * 100_000
    no_json = (struct.pack("<Q", len(text)) + text for text in (b"]]]]", deep))
    for content in (b"", b"12345", bytes(8), b"\xff" * 16, *no_json):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is no"):
            checkpoint.describe(tmp_path)


def test_formats_that_are_not_supported_are_named(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds GGUF files \(model-q4\.gguf\), which are not supported"):
        checkpoint.describe(tmp_path)
    with pytest.raises(CheckpointError, match="is a GGUF file, which is not supported"):
        checkpoint.resolve(str(tmp_path / "model-q4.gguf"))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(
        CheckpointError, match=r"is an adapter of some/base: add it with that as its base .*`tideway load-adapter`"
    ):
        checkpoint.describe(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    file = make(tmp_path) / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    with pytest.raises(CheckpointError, match=f"is truncated: it has {whole - 1} bytes of {whole}"):
        checkpoint.describe(tmp_path)


def test_a_tokenizer_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer: tokenizer\.json"):
        checkpoint.check_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        checkpoint.check_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    checkpoint.check_tokenizer(tmp_path)


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.resolve(str(tmp_path / "file"))
    for missing in ("/no/such/folder", "./nothing", "a/b/c", " "):
        with pytest.raises(CheckpointError, match="does not exist"):
            checkpoint.resolve(missing)

    def offline(source: str, **_: Any) -> str:
        raise OSError(f"cannot reach the hub for {source}\nwith a second line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resolve("someone/model")
    assert str(caught.value).endswith("cannot reach the hub for someone/model")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert checkpoint.resolve("someone/model") == tmp_path


def test_describing_imports_no_tensor_library() -> None:
    code = "import sys, shared.models.checkpoint; print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"a": 7},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, None]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    ],
)
def test_headers_of_weights_that_are_odd(tmp_path: Path, header: Any) -> None:
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        checkpoint.read_safetensors_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, name: str) -> None:
    make(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is no regular file"):
        checkpoint.describe(tmp_path)


def test_a_model_has_room_for_a_prompt_and_an_answer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings is 1, in which"):
        checkpoint.describe(make(tmp_path, max_position_embeddings=1))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, ""),
        ({"lm_head.weight": ("I8", [1, 1], 1)}, ""),
        (
            {"model.embed_tokens.weight": ("BF16", [101, 64], 12928)},
            r"shape \[101, 64\], where config.json wants \[100, 64\]",
        ),
        ({"lm_head.weight": ("BF16", [100, 32], 6400)}, "lm_head.weight has the shape"),
        ({"model.layers.0.self_attn.q_proj.weight": ("BF16", [32, 64], 4096)}, "q_proj.weight has the shape"),
        ({"model.layers.1.self_attn.k_proj.weight": ("BF16", [64, 64], 8192)}, "k_proj.weight has the shape"),
        ({"model.layers.0.self_attn.o_proj.weight": ("BF16", [64, 32], 4096)}, "o_proj.weight has the shape"),
        (
            {"model.layers.0.mlp.gate_proj.weight": ("BF16", [96, 64], 12288)},
            r"\[96, 64\], where config.json wants \[128, 64\]",
        ),
        (
            {"model.layers.0.mlp.down_proj.weight": ("BF16", [64, 96], 12288)},
            r"\[64, 96\], where config.json wants \[64, 128\]",
        ),
        ({"model.layers.0.mlp.experts.0.gate_proj.weight": ("BF16", [96, 64], 12288)}, ""),
        ({"model.layers.2.mlp.up_proj.weight": ("BF16", [128, 64], 16384)}, "weights of 3 layers, up to number 2"),
    ],
)
def test_weights_that_are_not_those_of_the_config(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int], int]], reason: str
) -> None:
    make(tmp_path, intermediate_size=128)
    layers = {f"model.layers.{i}.self_attn.v_proj.weight": ("BF16", [16, 64], 2048) for i in range(2)}
    whole = {"model.embed_tokens.weight": ("BF16", [100, 64], 12800), **layers, **tensors}
    write_safetensors(tmp_path / "model.safetensors", **whole)
    if not reason:
        checkpoint.check_shapes(tmp_path)
        return
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.check_shapes(tmp_path)


@pytest.mark.parametrize("key", ["text_config", "llm_config", ""])
def test_a_model_that_takes_images_is_as_large_as_its_language_model(tmp_path: Path, key: str) -> None:
    words = {"num_hidden_layers": 3, "num_key_value_heads": 1, "vocab_size": 120, "hidden_act": "anything"}
    inner = {key: words} if key else words
    changes = {"architectures": ["InternVLChatModel"], "vision_config": {"num_hidden_layers": 7}, **inner}
    shape = checkpoint.describe(make(tmp_path, **changes))
    assert (shape.num_layers, shape.num_kv_heads, shape.vocab_size, shape.takes_images) == (3, 1, 120, True)
    checkpoint.check_shapes(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "big"}, "hidden_size must be a positive integer, but is 'big'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, but is 'yarn'"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object, but is \[1\]"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number, but is 'x'"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number, but is True"),
        ({"rms_norm_eps": [1e-6]}, "rms_norm_eps must be a number, but is"),
        ({"rope_theta": "x"}, "rope_theta must be a number, but is 'x'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": "x"}}},
            "rope_parameters.full_attention.rope_theta must be",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor must be a number, but is 'x'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": ["x"]}},
            "rope_scaling.short_factor must be a list of numbers",
        ),
        ({"tie_word_embeddings": 3}, "tie_word_embeddings must be true or false, but is 3"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, but is 'true'"),
        ({"eos_token_id": "x"}, "eos_token_id 'x' is no token id"),
        ({"intermediate_size": "128"}, "intermediate_size must be a whole number, but is '128'"),
        ({"sliding_window": "x"}, "sliding_window must be a whole number, but is 'x'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of texts"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, where num_hidden_layers is 2"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "x"},
            "activation 'x' is not supported",
        ),
        ({"num_key_value_heads": "two"}, "num_key_value_heads must be a positive integer, but is 'two'"),
        ({"head_dim": -16}, "head_dim must be a positive integer, but is -16"),
    ],
)
def test_values_of_the_wrong_kind(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.describe(make(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "1e-5", "rope_theta": 500000, "tie_word_embeddings": False, "intermediate_size": 128.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": 0, "layer_types": ["a", "b", "c"]},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "mlp_only_layers": []},
    ],
)
def test_values_of_the_right_kind(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint.describe(make(tmp_path, **changes))


def test_all_that_the_native_modules_read_of_a_config_is_looked_at() -> None:
    modules = [
        Path(__file__).parents[2] / "services/worker/models" / f"{name}.py" for name in ("llama", "opt", "parts")
    ]
    read = {key for module in modules for key in re.findall(r'config\.get\("(\w+)"', module.read_text())}
    read -= {"hidden_act", "hidden_activation", "activation_function", "layer_types", "mlp_only_layers"}
    looked_at = {*config_values.COUNTS, *config_values.NUMBERS, *config_values.FLAGS, *config_values._ROPE_OF_CONFIG}
    assert len(read) > 15 and read <= looked_at


def test_a_layer_that_is_missing(tmp_path: Path) -> None:
    make(tmp_path)
    name = "model.layers.1.self_attn.v_proj.weight"
    write_safetensors(tmp_path / "model.safetensors", **{name: ("BF16", [16, 64], 2048)})
    with pytest.raises(CheckpointError, match=r"weights of 1 layers, up to number 1, where config\.json wants 2"):
        checkpoint.check_shapes(tmp_path)


@pytest.mark.parametrize("name", ["tideway-demo-llama", "tideway-demo-opt"])
def test_the_demonstration_models_are_as_their_configs_say(name: str) -> None:
    checkpoint.check_shapes(Path(__file__).parents[2] / "models" / name)
