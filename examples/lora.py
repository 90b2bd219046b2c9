"""Makes a tiny random LoRA adapter for a model that runs, serves it beside its base model, and removes it."""

import json
import os
import sys
import tempfile
from pathlib import Path

import httpx
import torch
from openai import OpenAI
from safetensors.torch import save_file

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TIDEWAY_API_KEY", "none")
ADMIN_KEY = os.environ.get("TIDEWAY_ADMIN_API_KEY", KEY)
BASE = sys.argv[1] if len(sys.argv) > 1 else "tideway-demo-llama"
RANK = 4


def write_adapter(folder: Path, base: Path) -> None:
    """In PEFT's format; of no use but to show that it changes what is said."""
    config = json.loads((base / "config.json").read_text())
    hidden, tensors = config["hidden_size"], {}
    torch.manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{prefix}A.weight"] = torch.randn(RANK, hidden)
        tensors[f"{prefix}B.weight"] = torch.randn(hidden, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    description = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(description))


client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
with httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30) as admin:
    models = admin.get("/admin/models").raise_for_status().json()["models"]
    source = next(Path(model["source"]) for model in models if model["name"] == BASE)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), source)
        adapter = {"lora_name": "tiny-lora", "lora_path": folder, "base_model_name": BASE}
        admin.post("/v1/load_lora_adapter", json=adapter).raise_for_status()
        try:
            for model in (BASE, "tiny-lora"):
                answer = client.completions.create(model=model, prompt="A compiler", max_tokens=20, temperature=0)
                print(f"{model}: {answer.choices[0].text!r}")
        finally:
            admin.post("/v1/unload_lora_adapter", json={"lora_name": "tiny-lora"}).raise_for_status()
