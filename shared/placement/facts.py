"""What placement knows of a model, from the shape of its checkpoint and the kinds of devices; and ready shapes."""

from __future__ import annotations

from collections.abc import Iterable

from shared.models.checkpoint import CheckpointShape, run_dtype
from shared.placement.footprint import model_footprint
from shared.placement.hardware import RANKS, Hardware, cost_models
from shared.placement.problem import ModelFacts, NodeFacts


def node_facts(node_id: str, hardware: Hardware, num_devices: int) -> NodeFacts:
    return NodeFacts(
        node_id=node_id, kind=hardware.kind, num_devices=num_devices, memory_bytes=hardware.usable_bytes,
        link_bytes_s=hardware.link_bytes_s, load_bytes_s=hardware.load_bytes_s,
    )  # fmt: skip


def model_facts(
    name: str,
    shape: CheckpointShape,
    hardware: Iterable[Hardware],
    *,
    weights: str = "",
    dtype: str = "auto",
    max_model_len: int = 0,
    ranks: Iterable[int] = RANKS,
    replicas: int | None = None,
) -> ModelFacts:
    """`weights`: names that have the same share them; default: its own. `dtype`: "auto" or a key of ITEMSIZES.
    `max_model_len`: 0: what the checkpoint allows. `ranks`: that it may run on; those that do not divide its KV heads are
    left out. Raises `ValueError` where no kind of device or no number of ranks is left.

    Kinds of devices may differ in what they run a model in: bytes are the largest of any."""
    kinds = list(hardware)
    ranks = tuple(p for p in ranks if p == 1 or shape.is_divisible)
    dtypes = {kind.kind: run_dtype(dtype, shape.dtype, kind.device) for kind in kinds}
    block_size = max((kind.block_size for kind in kinds), default=0)
    footprints = [
        model_footprint(
            shape, dtypes[kind.kind], kind.device,
            block_size=block_size, step_tokens=kind.step_tokens, max_model_len=max_model_len,
        )
        for kind in kinds
    ]  # fmt: skip
    costs = {
        (kind.kind, p): cost
        for kind in kinds
        for p, cost in cost_models(
            kind, name, shape, dtype=dtypes[kind.kind], ranks=ranks, block_size=block_size
        ).items()
        if p in ranks
    }
    if not costs:
        raise ValueError(f"{name}: none of {ranks} ranks divides its {shape.num_kv_heads} KV heads")
    return ModelFacts(
        name=name,
        weights=weights or name,
        weight_bytes=max(footprint.weight_bytes for footprint in footprints),
        activation_bytes=max(footprint.activation_bytes for footprint in footprints),
        block_size=block_size,
        block_bytes=max(footprint.block_bytes for footprint in footprints),
        least_blocks=max(footprint.least_blocks for footprint in footprints),
        max_model_len=max_model_len or shape.max_model_len,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        costs=costs,
        replicas=replicas,
    )


# ----------------------------------------------------------------------------------------------------------- shapes


def llama_shape(
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_model_len: int,
    *,
    is_tied: bool = False,
    dtype: str = "bfloat16",
) -> CheckpointShape:
    """Shape of a model of the Llama family. `is_tied`: embedding and head are one table."""
    head_dim = hidden_size // num_heads
    attention = 2 * hidden_size * hidden_size + 2 * hidden_size * num_kv_heads * head_dim
    layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
    tables = (1 if is_tied else 2) * vocab_size * hidden_size
    return CheckpointShape(
        architecture="LlamaForCausalLM", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
        hidden_size=hidden_size, vocab_size=vocab_size, max_model_len=max_model_len, dtype=dtype,
        weight_bytes=2 * (num_layers * layer + tables + hidden_size), eos_token_ids=(2,),
    )  # fmt: skip


def opt_shape(num_layers: int, hidden_size: int, num_heads: int, *, vocab_size: int = 50272) -> CheckpointShape:
    """Shape of a model of the OPT family: biases, learned positions, a tied head, a product of four times the
    hidden size."""
    layer = 12 * hidden_size * hidden_size + 13 * hidden_size
    positions = 2050 * hidden_size
    return CheckpointShape(
        architecture="OPTForCausalLM", num_layers=num_layers, num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads, hidden_size=hidden_size, vocab_size=vocab_size, max_model_len=2048,
        dtype="float16", weight_bytes=2 * (num_layers * layer + vocab_size * hidden_size + positions + 2 * hidden_size),
        eos_token_ids=(2,),
    )  # fmt: skip


SHAPES: dict[str, CheckpointShape] = {
    "llama-2-7b": llama_shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": llama_shape(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": llama_shape(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3.1-8b": llama_shape(32, 4096, 14336, 32, 8, 128256, 131072),
    "opt-6.7b": opt_shape(32, 4096, 32),
    "opt-13b": opt_shape(40, 5120, 40),
    "opt-66b": opt_shape(64, 9216, 72),
    "llama-135m": llama_shape(30, 576, 1536, 9, 3, 49152, 2048, is_tied=True),
    "tideway-demo-llama": llama_shape(4, 256, 704, 8, 2, 4096, 2048, is_tied=True),
}
"""By the name under which `tideway simulate` takes them."""
