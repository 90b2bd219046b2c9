"""What a Hugging Face checkpoint is, read from its JSON files and safetensors headers alone.

Neither torch nor transformers is imported here: placement and gateway need sizes, lengths and end-of-sequence ids, and
must start fast. Every defect of a checkpoint is a `CheckpointError` whose message names the file and the cause.
"""

from __future__ import annotations

import json
import logging
import os.path
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.engine.memory.slab import KvGeometry
from shared.models import sentencepiece
from shared.models.config_values import wrong_value
from shared.models.families import ENCODERS, FAMILIES, MULTIMODAL, TRANSFORMERS, ModelFamily, families, family_of
from shared.models.pooling import BARE, CLASSIFIER, MODULES_FILE, Pooling, PoolingError, pooling_of
from shared.models.quantization import (
    QUANTIZATIONS,
    QuantizationError,
    StoredQuantization,
    stored_quantization,
)
from shared.plugins import PluginError

logger = logging.getLogger(__name__)

SUPPORTED_ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su")

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element of each dtype that a model may run in."""

_HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_WEIGHTS = ("consolidated", "adapter", "optimizer", "training")
_GENERATION_FILE = "generation_config.json"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_config.json"
_ROUTERS = (".gate.weight", ".router.weight")
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_LONG_ROPE = ("longrope", "su")
_FIXED_LENGTH_ROPE = ("default", "llama3", "longrope", "su", "mrope")
"""Rope types whose `max_position_embeddings` already counts the scaling; with the others the factor multiplies it."""


_LAYER = re.compile(r"\blayers\.(\d+)\.")


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message is for the operator."""


class CheckpointMissing(CheckpointError):
    """It is not there, or cannot be fetched, now: to try again later may help."""


class CheckpointShape(msgspec.Struct, frozen=True, kw_only=True):
    """What placement, gateway and loader must know of a checkpoint before they read its weights."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output, that the positions of the model allow."""
    dtype: str
    """Stored dtype: float32, float16 or bfloat16. A float16 checkpoint runs in bfloat16 on CPU; the size is the same."""
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    depends_on_length: bool = False
    """Served up to another length it computes something else (LongRoPE's factors) or otherwise (sliding windows)."""
    linear_bytes: int = 0
    """Bytes of layers' matrices within `weight_bytes`, which may be quantised."""
    is_divisible: bool = True
    """Whether several devices can compute it together."""
    stored_as: str = ""
    """How the weights are quantised, by the checkpoint or by `quantized`; empty: they are not."""
    adapter_bytes: int = 0
    """On each device, beside the weights, for LoRA adapters."""
    pooling: Pooling | None = None
    """What its hidden states are made into; None: it generates text. A pooled prompt counts with the one token behind it
    that is never computed, so that `max_model_len` is one more than the positions."""
    takes_images: bool = False
    """Its KV, lengths and tokens are those of its language model."""

    def kv_geometry(self, dtype: str, num_ranks: int = 1, num_stages: int = 1) -> KvGeometry:
        """KV geometry of one rank's part of the model in that dtype, a key of ITEMSIZES: where there are fewer heads than
        ranks, some ranks have the same one; of several stages, the one with the most layers."""
        num_layers, num_kv_heads = -(-self.num_layers // num_stages), -(-self.num_kv_heads // num_ranks)
        return KvGeometry(num_layers, num_kv_heads, self.head_dim, ITEMSIZES[dtype])


def cost_key(shape: CheckpointShape, dtype: str, block_size: int) -> str:
    """What the keys of its stored cost models begin with: all of a model that step times depend on. Then follow, after
    slashes, the device and the number of ranks (`tp2`)."""
    parts = (
        shape.architecture, f"{shape.num_layers}-layers", f"{shape.hidden_size}-hidden",
        f"{shape.num_kv_heads}x{shape.head_dim}-kv", f"{shape.vocab_size}-vocabulary", f"{shape.weight_bytes}-bytes",
        dtype, f"{block_size}-page", *([shape.stored_as] if shape.stored_as else []),
    )  # fmt: skip
    return "_".join(parts)


def resolve(source: str) -> Path:
    """The folder of a checkpoint: `source` itself if it is a folder, else a snapshot of that hub id (blocking: may
    download)."""
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.exists():
        kind = "a GGUF file, which is not supported" if path.suffix == ".gguf" else "a file"
        raise CheckpointError(f"{source} is {kind}; a checkpoint is a folder with config.json and safetensors files.")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or not source.strip():
        raise CheckpointMissing(f"{source!r} does not exist.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises its own, httpx's and OS errors
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointMissing(
            f"{source!r} is no folder here and could not be fetched from the Hugging Face hub: {cause}"
        ) from error


def quantized(shape: CheckpointShape, quantization: str) -> CheckpointShape:
    """The shape with the weights of one that is run with `--quantization`, a key of QUANTIZATIONS (empty: as it is),
    counted in its own dtype as if it ran in one of 16 bits. Raises `CheckpointError`."""
    if not quantization:
        return shape
    if quantization not in QUANTIZATIONS:
        raise CheckpointError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}.")
    if shape.stored_as:
        raise CheckpointError(
            f"quantization {quantization!r}: the checkpoint is quantised already ({shape.stored_as})."
        )
    fewer = shape.linear_bytes * (1 - QUANTIZATIONS[quantization] / 2)
    return msgspec.structs.replace(
        shape, weight_bytes=shape.weight_bytes - int(fewer), linear_bytes=0, stored_as=quantization
    )


def describe(path: Path) -> CheckpointShape:
    """Reads config.json, generation_config.json and the safetensors headers of the checkpoint in `path`. Refuses what the
    worker could not run, as far as that can be known without the weights."""
    config = read_config(path)
    try:
        return _describe(path, config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path}: config.json, or a file beside it, has a value of the wrong kind: {error}."
        ) from error


def _describe(path: Path, config: dict[str, Any]) -> CheckpointShape:
    """Shape by a config.json whose values may be of any kind."""
    file = path / "config.json"
    pooling = read_pooling(path, config)
    family, architecture = _family(path, config, pooling)
    if pooling is not None and family is ENCODERS:
        return _describe_encoder(path, config, architecture, pooling)
    if pooling is not None:
        pooling = _of_decoder(path, pooling)
    keys = family.keys
    stored = read_stored_quantization(path, config)
    if family is MULTIMODAL:
        config = _in_llamas_words(_of_language_model(config))
    elif family is TRANSFORMERS:
        config = _in_llamas_words(config)
        if stored is not None:
            raise CheckpointError(
                f"{file}: quantization_config: {architecture} runs through transformers, where quantised weights are not "
                "supported."
            )
    elif family in FAMILIES:
        _check_values(file, config, architecture)
    if family is not MULTIMODAL:
        _check_is_supported(file, config, None if family is TRANSFORMERS else config.get(keys.activation))
    hidden_size = positive_int(config, keys.hidden_size, file)
    num_heads = positive_int(config, keys.num_heads, file)
    if not config.get(keys.head_dim) and hidden_size % num_heads:
        raise CheckpointError(f"{file}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}.")
    num_positions = positive_int(config, keys.max_positions, file)
    if num_positions < 2:
        raise CheckpointError(f"{file}: {keys.max_positions} is {num_positions}, in which no prompt and answer fit.")
    linear_bytes = sum(_linear_bytes(f, family) for f in weight_files(path))
    # the worker has no products of them on every device
    is_widened = stored is not None and stored.bits == 8 and stored.method != "int8"
    return CheckpointShape(
        architecture=architecture,
        num_layers=positive_int(config, keys.num_layers, file),
        num_kv_heads=positive_int(config, keys.num_kv_heads, file) if config.get(keys.num_kv_heads) else num_heads,
        head_dim=positive_int(config, keys.head_dim, file) if config.get(keys.head_dim) else hidden_size // num_heads,
        hidden_size=hidden_size,
        vocab_size=positive_int(config, "vocab_size", file),
        max_model_len=_max_model_len(config, architecture, num_positions) + (pooling is not None),
        dtype=_dtype(path, config),
        weight_bytes=sum(_tensor_bytes(f) for f in weight_files(path)) + (linear_bytes if is_widened else 0),
        linear_bytes=linear_bytes,
        is_divisible=family not in (TRANSFORMERS, MULTIMODAL),
        stored_as="" if stored is None else stored.method,
        eos_token_ids=_eos_token_ids(path, config, positive_int(config, "vocab_size", file)),
        depends_on_length=_depends_on_length(config, architecture),
        pooling=pooling,
        takes_images=family is MULTIMODAL,
    )


def _of_language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model that takes images, with what it says of its language model in the first place."""
    inner = config.get("text_config") or config.get("llm_config")
    return {**config, **inner} if isinstance(inner, dict) else dict(config)


def check_shapes(path: Path) -> None:
    """Checks that the weights of a model with a torch module here are those which config.json tells of: as many layers,
    the vocabulary, and the widths of embeddings, attention and dense layers. Quantised layers are left to the worker. Raises
    `CheckpointError`."""
    config, shape = read_config(path), describe(path)
    family, _ = _family(path, config, read_pooling(path, config))
    if family in (TRANSFORMERS, ENCODERS, MULTIMODAL):
        return
    num_heads = positive_int(config, family.keys.num_heads, path / "config.json")
    of_words = "word_embed_proj_dim"
    width = positive_int(config, of_words, path / "config.json") if config.get(of_words) else shape.hidden_size
    expected = {
        "embed_tokens.weight": [shape.vocab_size, width],
        "lm_head.weight": [shape.vocab_size, width],
        "q_proj.weight": [num_heads * shape.head_dim, shape.hidden_size],
        "k_proj.weight": [shape.num_kv_heads * shape.head_dim, shape.hidden_size],
        "v_proj.weight": [shape.num_kv_heads * shape.head_dim, shape.hidden_size],
        "o_proj.weight": [shape.hidden_size, num_heads * shape.head_dim],
    }
    inner = config.get("intermediate_size") or config.get("ffn_dim")
    if isinstance(inner, int):
        # With `mlp.`, since experts have a width of their own.
        for name in ("mlp.gate_proj", "mlp.up_proj", "fc1"):
            expected[f"{name}.weight"] = [inner, shape.hidden_size]
        for name in ("mlp.down_proj", "fc2"):
            expected[f"{name}.weight"] = [shape.hidden_size, inner]
    layers = set()
    for file in weight_files(path):
        for name, tensor in read_safetensors_header(file).items():
            if found := _LAYER.search(name):
                layers.add(int(found[1]))
            *_, parent, module, kind = ("", "", *name.split("."))
            wanted = expected.get(f"{module}.{kind}") or expected.get(f"{parent}.{module}.{kind}")
            if wanted is not None and tensor["dtype"] in _HEADER_DTYPES and tensor["shape"] != wanted:
                raise CheckpointError(
                    f"{file}: {name} has the shape {tensor['shape']}, where config.json wants {wanted}."
                )
    if layers and layers != set(range(shape.num_layers)):
        raise CheckpointError(
            f"{path} has weights of {len(layers)} layers, up to number {max(layers)}, where config.json wants "
            f"{shape.num_layers}, numbered from 0."
        )


_ENCODERS_HEAD = 64
"""Encoders have no KV: the least that blocks of it may hold is a head of this size, which every back end runs."""


def _describe_encoder(path: Path, config: Mapping[str, Any], architecture: str, pooling: Pooling) -> CheckpointShape:
    """Shape of an encoder that transformers runs, whole texts at a time."""
    file, words = path / "config.json", _in_llamas_words(config)
    if config.get("is_encoder_decoder"):
        raise CheckpointError(f"{file}: is_encoder_decoder: {architecture} has a decoder too, which is not supported.")
    if read_stored_quantization(path, config) is not None:
        raise CheckpointError(f"{file}: quantization_config: {architecture} is an encoder, and run as it is trained.")
    positions = positive_int(words, "max_position_embeddings", file)
    if words.get("position_embedding_type", "absolute") == "absolute" and "roberta" in str(config.get("model_type")):
        positions -= int(config.get("pad_token_id") or 0) + 1  # the first ones stand for padding
    limit = path / "sentence_bert_config.json"
    longest = read_json(limit).get("max_seq_length") if limit.is_file() else None
    vocab_size = positive_int(words, "vocab_size", file)
    return CheckpointShape(
        architecture=architecture,
        num_layers=1,
        num_kv_heads=1,
        head_dim=_ENCODERS_HEAD,
        hidden_size=positive_int(words, "hidden_size", file),
        vocab_size=vocab_size,
        max_model_len=min(positions, longest if isinstance(longest, int) and longest > 0 else positions) + 1,
        dtype=_dtype(path, config),
        weight_bytes=sum(_tensor_bytes(f) for f in weight_files(path)),
        eos_token_ids=_eos_token_ids(path, config, vocab_size),
        is_divisible=False,
        pooling=msgspec.structs.replace(pooling, is_whole=True),
    )


def _of_decoder(path: Path, pooling: Pooling) -> Pooling:
    """The first token of a causal model has seen nothing: a classifier, and what names no pooling, takes the last one."""
    if pooling.mode == "cls" and pooling.task == "embed":
        raise CheckpointError(f"{path}: pooling of the first token (cls) has no meaning for a causal language model.")
    is_named = pooling.task == "embed" and (path / MODULES_FILE).is_file()
    mode = pooling.mode if is_named else "lasttoken"
    return msgspec.structs.replace(pooling, mode=mode, is_whole=mode == "mean")


def read_pooling(path: Path, config: Mapping[str, Any]) -> Pooling | None:
    """What the checkpoint in `path` makes of hidden states; None: it generates text. Raises `CheckpointError`."""
    try:
        return pooling_of(path, config, read_json)
    except PoolingError as error:
        raise CheckpointError(str(error)) from None


def run_dtype(asked: str, stored: str, device: str) -> str:
    """The dtype a model runs in on cpu or cuda. "auto" is the checkpoint's, but for float16 on CPU, which becomes bfloat16:
    it has kernels on every CPU that has fast half precision at all, takes the same memory, and cannot overflow."""
    name = asked
    if asked == "auto":
        name = "bfloat16" if stored == "float16" and device == "cpu" else stored
    if name not in ITEMSIZES:
        raise CheckpointError(f"dtype {asked!r} is not one of auto, {', '.join(ITEMSIZES)}.")
    return name


def _check_is_file(file: Path) -> None:
    """Checks that the path is a file, or nothing: a FIFO or a device would be read for ever. Raises `CheckpointError`."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no regular file.")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; `CheckpointError` if the file is missing or holds anything else."""
    _check_is_file(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object.")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint in `path`."""
    if not (path / "config.json").exists():
        if (path / _ADAPTER_FILE).is_file():
            base = read_json(path / _ADAPTER_FILE).get("base_model_name_or_path") or "a base model"
            raise CheckpointError(
                f"{path} is an adapter of {base}: add it with that as its base model (`tideway load-adapter`, `tideway up "
                "--adapter`, or the field `base`)."
            )
        if found := sorted(file.name for file in path.glob("*.gguf")):
            raise CheckpointError(f"{path} holds GGUF files ({', '.join(found[:3])}), which are not supported.")
    return read_json(path / "config.json")


def check_tokenizer(path: Path) -> None:
    """Checks that the folder has a tokenizer which the gateway can read, as far as its files' form goes. Raises
    `CheckpointError`."""
    if (path / "tokenizer.json").is_file():
        read_json(path / "tokenizer.json")
    elif _is_sentencepiece_alone(path):
        _sentencepiece(path)
    elif not any(all((path / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{path} has no tokenizer: {', '.join(' with '.join(names) for names in _TOKENIZER_FILES)} are looked for."
        )


def tokenizer_json(path: Path) -> str | None:
    """The tokenizer of the checkpoint in `path` as tokenizers reads it; None: it is in older files than this knows. Raises
    `CheckpointError`."""
    file = path / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8-sig")
    if not _is_sentencepiece_alone(path):
        return None
    _sentencepiece(path)
    return sentencepiece.tokenizer_json(path, read_tokenizer_config(path))


def _is_sentencepiece_alone(path: Path) -> bool:
    others = (path / name for names in _TOKENIZER_FILES if sentencepiece.FILE not in names for name in names[-1:])
    return (path / sentencepiece.FILE).is_file() and not any(other.is_file() for other in others)


def _sentencepiece(path: Path) -> sentencepiece.SentencePieceModel:
    try:
        return sentencepiece.read_model(path / sentencepiece.FILE)
    except (sentencepiece.SentencePieceError, OSError) as error:
        raise CheckpointError(
            f"{error}. Without tokenizer.json it has to be one (Git LFS leaves a note in its place until it is fetched)."
        ) from None


def _check_values(file: Path, config: Mapping[str, Any], architecture: str) -> None:
    """Checks what only the native torch modules read. Raises `CheckpointError`."""
    if wrong := wrong_value(config):
        raise CheckpointError(f"{file}: {wrong}.")
    if architecture.startswith("Gemma"):
        _check_is_supported(file, config, config.get("hidden_activation"))


def _check_is_supported(file: Path, config: Mapping[str, Any], activation: Any) -> None:
    rope_type = rope_parameters(config)["rope_type"]
    for what, value, known in (
        ("activation", activation, SUPPORTED_ACTIVATIONS),
        ("rope scaling", rope_type, SUPPORTED_ROPE_TYPES),
    ):
        if value is not None and value not in known:
            raise CheckpointError(f"{file}: {what} {value!r} is not supported; supported are {', '.join(known)}.")


def read_stored_quantization(path: Path, config: Mapping[str, Any]) -> StoredQuantization | None:
    """How the weights of the checkpoint in `path` are quantised; None: they are not. Raises `CheckpointError`."""
    try:
        return stored_quantization(config)
    except QuantizationError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}.") from None


def _family(path: Path, config: Mapping[str, Any], pooling: Pooling | None) -> tuple[ModelFamily, str]:
    """Family, with the first supported entry of `architectures`."""
    named = [str(name) for name in config.get("architectures") or []]
    try:
        if pooling is not None and named:
            causal = named[0].removesuffix(BARE).removesuffix(CLASSIFIER).removesuffix("ForCausalLM") + "ForCausalLM"
            is_causal = config.get("is_causal") is not False and not config.get("use_bidirectional_attention")
            family = family_of(causal)
            if is_causal and family is not None and family.pools:
                return family, causal
            if pooling.token_ids:
                raise CheckpointError(
                    f"{path / 'config.json'}: {named[0]} cannot score pairs by the logits of tokens here."
                )
            return ENCODERS, named[0]
        for architecture in named:
            if (family := family_of(architecture)) is not None:
                return family, architecture
    except PluginError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}.") from None
    file, shown = path / "config.json", ", ".join(named) or "(none named)"
    if named and isinstance(config.get("vision_config"), dict):
        return MULTIMODAL, named[0]
    for architecture in named:
        if architecture.endswith(("ForCausalLM", "LMHeadModel")):
            if reason := _why_not_by_transformers(config):
                raise CheckpointError(f"{file}: architecture {shown} is not supported: {reason}.")
            return TRANSFORMERS, architecture
    native = ", ".join(a for family in families() for a in family.architectures)
    raise CheckpointError(
        f"{file}: architecture {shown} is not supported; supported are {native}, and causal language models that "
        "transformers runs."
    )


_OTHER_WORDS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
}
"""Under which keys architectures beyond the native ones have what `ConfigKeys` names."""

_SEQUENTIAL_LAYERS = ("mamba", "linear_attention", "conv", "recurrent", "rwkv", "ssm", "chunked_attention")
_SEQUENTIAL_KEYS = ("mamba", "ssm_", "state_size", "conv_kernel", "linear_num_", "rwkv", "lru_width", "time_mix")


def _in_llamas_words(config: Mapping[str, Any]) -> dict[str, Any]:
    renamed = dict(config)
    for key, others in _OTHER_WORDS.items():
        if renamed.get(key) is None:
            renamed[key] = next((config[other] for other in others if config.get(other) is not None), None)
    if config.get("multi_query") and not config.get("num_key_value_heads"):
        renamed["num_key_value_heads"] = 1
    return renamed


def _why_not_by_transformers(config: Mapping[str, Any]) -> str:
    """What of config.json rules out that transformers runs the model over our KV blocks; empty: nothing. The worker finds
    the rest when it loads the model."""
    if config.get("is_encoder_decoder"):
        return "is_encoder_decoder: it has an encoder"
    if config.get("kv_lora_rank"):
        return "kv_lora_rank: its attention (MLA) has keys and values of other shapes than KV blocks hold"
    if kinds := sorted(
        {str(kind) for key in ("layer_types", "layers_block_type") for kind in config.get(key) or ()
         if any(word in str(kind) for word in _SEQUENTIAL_LAYERS)}
    ):  # fmt: skip
        return f"layer_types: {', '.join(kinds)} have a state that is no KV cache"
    if keys := sorted(key for key in config if key.startswith(_SEQUENTIAL_KEYS)):
        return f"{keys[0]}: state-space and recurrent layers have a state that is no KV cache"
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if isinstance(config.get(key), list):
            return f"{key}: layers differ in it, but KV blocks have one shape"
    for key in ("num_kv_shared_layers", "global_head_dim", "attention_chunk_size", "alibi", "cross_layer_attention"):
        if config.get(key):
            return f"{key}: {config[key]}"
    if (rope := rope_parameters(config)["rope_type"]) in ("dynamic", *_LONG_ROPE):
        return f"rope scaling {rope!r}: in transformers it depends on the longest sequence of a batch"
    return ""


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that together hold the weights: those of the index if there is one, else `model*`, else all but
    what is known to be something else (the same weights as their maker names them, or an adapter)."""
    index = path / _INDEX_FILE
    if index.exists():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise CheckpointError(f"{index} has no weight_map.")
        files = [path / name for name in sorted(set(mapping.values()))]
    else:
        found = sorted(path.glob("*.safetensors"))
        named = [file for file in found if file.name.startswith("model")]
        files = named or [file for file in found if not file.name.startswith(_OTHER_WEIGHTS)]
    if not files:
        others = sorted(f.name for f in path.glob("*.bin"))
        hint = f" ({', '.join(others)} would have to be converted)" if others else ""
        raise CheckpointError(f"{path} has no safetensors files{hint}.")
    for file in files:
        _check_is_file(file)
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {_INDEX_FILE} names it.")
    return files


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings in one form: `rope_type`, `rope_theta` and the scaling's own keys. Newer configs hold them in
    `rope_parameters`, older ones in `rope_theta` and `rope_scaling` (there with `type` for `rope_type`)."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta") or 10000.0}
    merged |= config.get("rope_scaling") or {}
    parameters = config.get("rope_parameters") or {}
    merged |= parameters.get("full_attention", parameters)
    if merged.get("type") in _LONG_ROPE or merged.get("rope_type") in _LONG_ROPE:
        merged.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    merged["rope_type"] = merged.get("rope_type") or merged.get("type") or "default"
    return merged


def local_rope_parameters(config: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    """Rope parameters of layers that attend within a window, where these have their own."""
    if not architecture.startswith("Gemma3"):
        return None
    own = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {"rope_theta": config.get("rope_local_base_freq") or 10000.0, "rope_type": "default"} | own


def _depends_on_length(config: Mapping[str, Any], architecture: str) -> bool:
    has_windows = not architecture.startswith("Qwen") or bool(config.get("use_sliding_window"))
    is_long = rope_parameters(config)["rope_type"] in _LONG_ROPE
    return is_long or (has_windows and bool(config.get("sliding_window")))


def _max_model_len(config: Mapping[str, Any], architecture: str, length: int) -> int:
    """`length`: positions that config.json names."""
    rope = rope_parameters(config)
    if rope["rope_type"] in _FIXED_LENGTH_ROPE or architecture.startswith("Gemma3"):
        return length
    if rope["rope_type"] == "yarn":
        length = int(rope.get("original_max_position_embeddings") or length)
    return int(length * float(rope.get("factor") or 1.0))


def positive_int(config: Mapping[str, Any], key: str, file: Path) -> int:
    """`config[key]`, which must be a positive integer, also written as 16.0; `file` is named where it is not."""
    value = config.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"{file}: {key} must be a positive integer, but is {value!r}.")
    return value


def _dtype(path: Path, config: Mapping[str, Any]) -> str:
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if named in ITEMSIZES:
        return named
    if named:
        raise CheckpointError(f"{path / 'config.json'}: dtype {named!r} is not one of {', '.join(ITEMSIZES)}.")
    file = weight_files(path)[0]
    for tensor in read_safetensors_header(file).values():
        if tensor["dtype"] in _HEADER_DTYPES:
            return _HEADER_DTYPES[tensor["dtype"]]
    raise CheckpointError(f"{file} holds no tensor of {', '.join(ITEMSIZES)}.")


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}. The format: 8 bytes little-endian header length, JSON, data."""
    _check_is_file(file)
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is no safetensors file.")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error}") from None
    try:
        if isinstance(header, dict):
            header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, _Tensor])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}.") from None
    num_bytes = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if (present := file.stat().st_size) < num_bytes:
        raise CheckpointError(f"{file} is truncated: it has {present} bytes of {num_bytes}.")
    return dict(header)


def _tensor_bytes(file: Path) -> int:
    return sum(end - begin for begin, end in (t["data_offsets"] for t in read_safetensors_header(file).values()))


def _linear_bytes(file: Path, family: ModelFamily) -> int:
    """Bytes of the matrices of layers; those of experts only where they are read one by one."""
    tensors = read_safetensors_header(file)
    if family is TRANSFORMERS and any("expert" in name for name in tensors):
        return 0
    return sum(
        t["data_offsets"][1] - t["data_offsets"][0]
        for name, t in tensors.items()
        if len(t["shape"]) == 2 and any(part.isdigit() for part in name.split(".")) and not name.endswith(_ROUTERS)
    )


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a checkpoint's maker would have it sampled, where a request says nothing; None: as ever."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None


def sampling_defaults(path: Path) -> SamplingDefaults:
    """Those of generation_config.json of the checkpoint in `path`, without what is out of range."""
    file = path / _GENERATION_FILE
    config = read_json(file) if file.exists() else {}
    found = SamplingDefaults()
    for name in SamplingDefaults.__struct_fields__:
        try:
            one = msgspec.convert({name: config.get(name)}, SamplingDefaults)
        except msgspec.ValidationError as error:
            logger.warning("%s: %s is ignored: %s", file, name, error)
            continue
        found = msgspec.structs.replace(found, **{name: getattr(one, name)})
    return found


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json of the checkpoint in `path`, empty where there is none, with the special tokens that only
    special_tokens_map.json names, as older checkpoints have them. Raises `CheckpointError`."""
    config, named = (
        read_json(file) if (file := path / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    missing = {key: value for key, value in named.items() if key.endswith("_token") and config.get(key) is None}
    return {**config, **missing}


def _eos_token_ids(path: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """All that generation_config.json, config.json and the tokenizer name: makers and fine-tuners write one of them each.
    Ids that the model has not, such as -1, are left out."""
    generation = path / _GENERATION_FILE
    named = [read_json(generation).get("eos_token_id") if generation.exists() else None, config.get("eos_token_id")]
    ids: list[int] = []
    for value in named:
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if not isinstance(one, int | float) or isinstance(one, bool) or one != int(one):
                raise CheckpointError(f"{path}: eos_token_id {value!r} is no token id, nor a list of them.")
            if 0 <= one < vocab_size:
                ids.append(int(one))
            else:
                logger.warning("%s: eos_token_id %s is no token of %d, and left out", path, one, vocab_size)
    if (of_tokenizer := _tokenizers_eos(path)) is not None and of_tokenizer < vocab_size:
        ids.append(of_tokenizer)
    return tuple(dict.fromkeys(ids))


def _tokenizers_eos(path: Path) -> int | None:
    """The id of the token by which the tokenizer ends a text; None: it names none, or one that it has not."""
    config = read_tokenizer_config(path)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    added = config.get("added_tokens_decoder")
    for key, value in added.items() if isinstance(added, dict) else ():
        if isinstance(value, dict) and value.get("content") == text and key.isdecimal():
            return int(key)
    if _is_sentencepiece_alone(path):
        return _sentencepiece(path).ids.get(text)
    file = path / "tokenizer.json"
    tokenizer = read_json(file) if file.is_file() else {}
    for one in tokenizer.get("added_tokens") or ():
        if isinstance(one, dict) and one.get("content") == text and isinstance(one.get("id"), int):
            return int(one["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None
