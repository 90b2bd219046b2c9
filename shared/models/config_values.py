"""Values of config.json that only a model's torch module reads: whether they are of the kind that it takes.

Without this a wrong one would be found when the model is loaded, by an error that does not name it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NUMBERS = ("rms_norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
COUNTS = (
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "sliding_window",
    "sliding_window_pattern",
    "max_window_layers",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)
FLAGS = (
    "tie_word_embeddings",
    "use_sliding_window",
    "norm_topk_prob",
    "do_layer_norm_before",
    "_remove_final_layer_norm",
)
_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_ROPE_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
)
"""Keys of the objects, of those within them by kind of layer, and some of config.json itself."""
_ROPE_LISTS = ("short_factor", "long_factor")
_ROPE_OF_CONFIG = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "original_max_position_embeddings")


def wrong_value(config: Mapping[str, Any]) -> str:
    """What is wrong with the first value of a kind that its reader does not take; empty: nothing is."""
    for key in COUNTS:
        value: Any = config.get(key)
        if _is_said(value) and not (_is_number(value) and value == int(value)):
            return f"{key} must be a whole number, but is {value!r:.100}"
    for key in (*NUMBERS, *_ROPE_OF_CONFIG):
        if why := _why_no_number(key, config.get(key)):
            return why
    for key in FLAGS:
        if config.get(key) not in (None, True, False):
            return f"{key} must be true or false, but is {config[key]!r:.100}"
    return _wrong_in_lists(config) or next(filter(None, (_wrong_in_rope(config, key) for key in _ROPE_OBJECTS)), "")


def _wrong_in_lists(config: Mapping[str, Any]) -> str:
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        return f"layer_types must be a list of texts, but is {kinds!r:.100}"
    if kinds is not None and isinstance(num_layers, int) and len(kinds) < num_layers:
        return f"layer_types names {len(kinds)} layers, where num_hidden_layers is {num_layers}"
    dense = config.get("mlp_only_layers")
    if dense and not (isinstance(dense, list) and all(map(_is_number, dense))):
        return f"mlp_only_layers must be a list of numbers, but is {dense!r:.100}"
    return ""


def _wrong_in_rope(config: Mapping[str, Any], key: str) -> str:
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        return f"{key} must be an object, but is {found!r:.100}"
    by_kind = {name: one for name, one in (found or {}).items() if isinstance(one, dict)}
    for place, rope in ((key, found or {}), *((f"{key}.{name}", one) for name, one in by_kind.items())):
        for name in _ROPE_NUMBERS:
            if why := _why_no_number(f"{place}.{name}", rope.get(name)):
                return why
        for name in _ROPE_LISTS:
            factors = rope.get(name)
            if factors is not None and not (isinstance(factors, list) and all(map(_is_number, factors))):
                return f"{place}.{name} must be a list of numbers, but is {factors!r:.100}"
    return ""


def _why_no_number(key: str, value: Any) -> str:
    """Empty: it is one, perhaps as text, or is not said."""
    if not _is_said(value):
        return ""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return f"{key} must be a number, but is {value!r:.100}"
    return "" if _is_number(value) else f"{key} must be a number, but is {value!r:.100}"


def _is_said(value: Any) -> bool:
    """Whether it counts: readers take a default for none, 0 and empty values."""
    return bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
