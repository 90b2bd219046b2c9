"""A family of models: Llama's architecture with cooler logits. The record is read without torch."""

from shared.models.families import FAMILIES, ModelFamily

LLAMA = FAMILIES[0]
FAMILY = ModelFamily(
    "example",
    ("ExampleForCausalLM",),
    LLAMA.cuts,
    LLAMA.keys,
    LLAMA.adapted,
    loader="tideway_example.torch_module:ExampleModel",
)
