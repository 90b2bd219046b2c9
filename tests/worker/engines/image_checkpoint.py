"""A tiny LLaVA with random weights: its answers mean nothing, and differ with the image."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

MODEL = Path("models/tideway-demo-llama")
"""Folder of the model whose tokenizer the checkpoint has."""
IMAGE_PIXELS, PATCH_PIXELS = 56, 14
MODEL_TOKENS = 512
NUM_IMAGE_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] | trim }}{% endif %}{% endfor %}<|end_of_turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_image_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    text = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 15, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=MODEL_TOKENS, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=32,
        image_size=IMAGE_PIXELS, patch_size=PATCH_PIXELS,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.token_to_id("<image>"),
        image_seq_length=NUM_IMAGE_TOKENS, vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    # As vLLM looks for them, and LLaVA's own checkpoints have them.
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model.").replace(
            ".vision_model.vision_model.", ".vision_model."
        ): t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True, "do_rescale": True,
        "do_normalize": True, "do_convert_rgb": True, "size": {"shortest_edge": IMAGE_PIXELS}, "crop_size": size,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {
        "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": PATCH_PIXELS,
        "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder
