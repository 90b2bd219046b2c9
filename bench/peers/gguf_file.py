"""A Llama checkpoint of bfloat16 safetensors as a GGUF file for llama.cpp, with the same bits.

    python gguf_file.py CHECKPOINT_FOLDER FILE.gguf

Runs in the environment of llama.cpp, which has the `gguf` package; it imports nothing of this project. llama.cpp's own
converter knows tokenizers by a hash of what they make of a sample, so it refuses one that was made here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Bits of bfloat16 as uint16 (numpy has no such floats). Raises `ValueError` for other dtypes."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        begin = 8 + int(data[:8].view(np.uint64)[0])
        for name, entry in json.loads(data[8:begin].tobytes()).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, expected BF16")
            first, last = entry["data_offsets"]
            yield name, data[begin + first : begin + last].view(np.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """`KeyError` for what a Llama has not."""
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}.weight"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        ".".join(parts)
    ] + ".weight"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves queries or keys: llama.cpp rotates neighbours, Hugging Face's Llama the halves of a head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, file: Path) -> None:
    import gguf

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // num_heads)
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    for name, bits in read_tensors(folder):
        if ".q_proj." in name or ".k_proj." in name:
            bits = interleave(bits, num_heads if ".q_proj." in name else num_kv_heads)
        if bits.ndim == 1:  # norms, which llama.cpp wants in float32
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
