"""Which models can be served: one record a family, read by placement and worker alike.

CONTRIBUTING.md says how a family is added: a record here, and a torch module in services/worker/models that is tied to it;
or both in another package, whose entry point of the group `tideway.model_families` is the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.plugins import PluginError, import_path, installed


class ConfigKeys(NamedTuple):
    """Under which keys config.json has what decides a model's size; the defaults are Llama's."""

    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    """Key; where it is missing, there are as many KV heads as query heads."""
    head_dim: str = "head_dim"
    """Key; where it is missing, the head size is the hidden size over the query heads."""
    hidden_size: str = "hidden_size"
    max_positions: str = "max_position_embeddings"
    activation: str = "hidden_act"


OUTPUTS, INPUTS = 0, 1
"""Axes of a weight [outputs, inputs]."""


@dataclass(frozen=True)
class ModelFamily:
    """Architectures that share a torch module.

    Tensor parallelism over p ranks (Shoeybi et al. 2019) gives rank r the r-th of p equal, contiguous parts of a weight
    along the axis in `cuts`. A weight cut by OUTPUTS is cut with its bias, and each rank has a part of the result; after one
    cut by INPUTS the ranks' results are summed, with the bias added once. What is not named every rank has whole. p divides
    the KV heads, so that a rank's query heads are those of its KV heads, and its part of a KV block is one run of each
    layer's K and V.
    """

    name: str
    architectures: tuple[str, ...]
    """Names in `architectures` of config.json."""
    cuts: Mapping[str, int]
    """Last name of a module -> axis of its weight."""
    keys: ConfigKeys = field(default_factory=ConfigKeys)
    adapted: tuple[str, ...] = ()
    """Last names of the modules that LoRA adapters may change."""
    loader: str = ""
    """Import path `module:attribute` of its torch module, where it is another package's."""
    pools: bool = False
    """Its hidden states can be made into vectors and scores."""


_EMBEDDINGS = {"embed_tokens": OUTPUTS, "lm_head": OUTPUTS}
"""Cut along the vocabulary."""
_QUERIES_KEYS_VALUES = {"q_proj": OUTPUTS, "k_proj": OUTPUTS, "v_proj": OUTPUTS}

FAMILIES = (
    ModelFamily(
        "llama",
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Phi3ForCausalLM",
            "GemmaForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
        ),
        {
            **_EMBEDDINGS,
            **_QUERIES_KEYS_VALUES,
            "o_proj": INPUTS,
            "gate_proj": OUTPUTS,
            "up_proj": OUTPUTS,
            "down_proj": INPUTS,
            # Phi-3's, of which each part is cut, and Mixtral's experts
            "qkv_proj": OUTPUTS,
            "gate_up_proj": OUTPUTS,
            "w1": OUTPUTS,
            "w3": OUTPUTS,
            "w2": INPUTS,
        },
        adapted=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "qkv_proj",
            "gate_up_proj",
        ),
        pools=True,
    ),
    ModelFamily(
        "opt",
        ("OPTForCausalLM",),
        {**_EMBEDDINGS, **_QUERIES_KEYS_VALUES, "out_proj": INPUTS, "fc1": OUTPUTS, "fc2": INPUTS},
        ConfigKeys(activation="activation_function"),
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    ),
)

TRANSFORMERS = ModelFamily("transformers", (), {})
"""Every other causal language model that transformers can run over our KV blocks, on one device."""

MULTIMODAL = ModelFamily("multimodal", (), {})
"""Models that take images: engines of others compute them."""

ENCODERS = ModelFamily("encoder", (), {})
"""What transformers runs over whole texts, whose tokens see each other: models that embed or score, and do not generate."""


def families() -> Iterator[ModelFamily]:
    """Those built in, then those of other packages. Raises `PluginError` where one of the latter cannot be imported."""
    yield from FAMILIES
    for name, point in installed("tideway.model_families").items():
        family = import_path(point.value, "model family")
        if not isinstance(family, ModelFamily):
            raise PluginError(f"model family {name!r} is {family!r}, which is no ModelFamily")
        yield family


def family_of(architecture: object) -> ModelFamily | None:
    """None: it has no torch module of its own. Raises `PluginError` where a plug-in that may have one cannot be imported."""
    return next((family for family in families() if architecture in family.architectures), None)
