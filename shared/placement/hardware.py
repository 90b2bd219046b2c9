"""Kinds of devices, and what a model's steps take on them: a roofline with the few efficiencies that were measured.

A step reads each weight once and does two operations with each for every token. Up to the *knee* (as many tokens as the
device computes in the time of that reading) most of the arithmetic hides behind the reading; beyond it arithmetic is what
takes time. On p devices (tensor parallelism, Megatron-LM) weights, arithmetic and KV are divided by p, fixed costs are not,
and each layer ends in two all-reduces of the tokens' hidden vectors.

Every number of a `Hardware` has its source beside it, in `sources`. How well the efficiencies fit is in
tests/shared/placement/test_hardware.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shared.costs.model import CostModel
from shared.models.checkpoint import ITEMSIZES, CheckpointShape
from shared.placement.plan import is_cpu

RANKS = (1, 2, 4, 8)
"""Devices of a group; powers of two (SeaLLM, section 4.1)."""
FLOPS_ITEMSIZE = 2
"""Bytes of an element for which `Hardware.flops` holds; larger ones take longer in proportion."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory that a node agent takes: the rest is for the context and what libraries allocate."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device. Rates are of one device; shares say how much of them is reached."""

    name: str
    device: str = "cuda"
    """cuda | cpu"""
    memory_bytes: Annotated[int, Meta(gt=0)]
    memory_share: Share = USABLE_SHARE
    """Share of the memory that instances may take."""
    memory_bytes_s: Positive
    flops: Positive
    """Dense, multiplications and additions, of 16-bit elements."""
    weight_share: Share
    """Share of `memory_bytes_s` reached when weights are read."""
    kv_share: Share
    """Share of `memory_bytes_s` reached when the KV of decodes is read."""
    flops_share: Share
    """Share of `flops` reached in the layers' products."""
    attention_share: Share
    """Share of `flops` reached in the attention of prompts."""
    hidden_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the arithmetic up to the knee that hides behind the reading of weights."""
    step_s: NotNegative = 0.0
    """Fixed, of a step: planning, launching, sampling."""
    layer_s: NotNegative = 0.0
    """Fixed, of each layer: its kernels' launches and tails."""
    decode_layer_s: NotNegative = 0.0
    """Seconds of each decoding sequence in each layer, beside its arithmetic and reading."""
    prefill_layer_s: NotNegative = 0.0
    """Seconds of each layer of a step with chunks."""
    mixed_layer_s: NotNegative = 0.0
    """Seconds of each layer of a step with chunks and decodes together."""
    reduce_s: NotNegative
    """Seconds of an all-reduce among devices of a node, whatever its size."""
    reduce_bytes_s: Positive
    """Rate at which each device sends and receives in an all-reduce."""
    host_bytes_s: Positive
    """Between device and host memory: checkpoints of KV."""
    link_bytes_s: Positive
    """Rate from an instance to one of another node."""
    load_bytes_s: Positive
    """Rate at which weights are read onto a device."""
    block_size: Annotated[int, Meta(ge=1)] = 128
    """Tokens of a KV block."""
    step_tokens: Annotated[int, Meta(ge=1)] = 8192
    """Most tokens of a step."""
    sources: dict[str, str] = {}
    """Field -> where its number is from."""
    measured: dict[str, dict[int, CostModel]] = {}
    """Cost models of models by their names, and by p: as they were measured; they go before what is reckoned here."""

    @property
    def kind(self) -> str:
        """In placement."""
        return f"cpu-{self.name}" if self.device == "cpu" and not is_cpu(self.name) else self.name

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.memory_share)


class Work(NamedTuple):
    """Work of a model, whatever computes it. FLOPs of larger elements count as often as devices are slower with them."""

    weight_bytes: float
    token_flops: float
    """FLOPs of a token, but for its attention."""
    attention_flops: float
    """FLOPs of a token's attention for each token before it."""
    kv_bytes: int
    """KV bytes of a token."""


def work_of(shape: CheckpointShape, dtype: str) -> Work:
    itemsize = ITEMSIZES[dtype]
    num_weights, slower = shape.weight_bytes / ITEMSIZES[shape.dtype], max(1.0, itemsize / FLOPS_ITEMSIZE)
    return Work(
        weight_bytes=num_weights * itemsize,
        token_flops=2 * (num_weights - shape.vocab_size * shape.hidden_size) * slower,
        attention_flops=4 * shape.hidden_size * shape.num_layers * slower,
        kv_bytes=shape.kv_geometry(dtype).block_bytes(1),
    )


def cost_model(
    hardware: Hardware, shape: CheckpointShape, *, dtype: str = "", num_ranks: int = 1, block_size: int = 0
) -> CostModel:
    """Cost model of a group of `num_ranks` devices. `dtype`: what it runs in; default: as stored. `block_size`: tokens of a
    KV block, for copies.

    One table of the vocabulary counts as not multiplied by. Of a checkpoint with two, the head counts for every token
    although only sampled ones meet it: 2 % of Llama-2-7B, 7 % of Llama-3.1-8B."""
    itemsize = ITEMSIZES[dtype or shape.dtype]
    layers, p = shape.num_layers, num_ranks
    work = work_of(shape, dtype or shape.dtype)
    flops = hardware.flops * p
    read_s = work.weight_bytes / (hardware.memory_bytes_s * hardware.weight_share * p)
    token_s = work.token_flops / (flops * hardware.flops_share)
    reduced_s = 0.0
    if p > 1:
        sent_bytes = 2 * (p - 1) / p * shape.hidden_size * itemsize
        reduced_s = 2 * layers * sent_bytes / hardware.reduce_bytes_s
    visible_s = (1 - hardware.hidden_share) * token_s + reduced_s
    copy_s = work.kv_bytes * (block_size or hardware.block_size) / (hardware.host_bytes_s * p)
    return CostModel(
        fixed_s=hardware.step_s + layers * (hardware.layer_s + (2 * hardware.reduce_s if p > 1 else 0.0)) + read_s,
        prefill_token_s=visible_s,
        prefill_attention_s=work.attention_flops / (flops * hardware.attention_share),
        decode_s=visible_s + layers * hardware.decode_layer_s,
        decode_context_s=work.kv_bytes / (hardware.memory_bytes_s * hardware.kv_share * p),
        over_knee_s=hardware.hidden_share * token_s,
        knee_tokens=int(read_s / token_s),
        prefill_s=layers * hardware.prefill_layer_s,
        mixed_s=layers * hardware.mixed_layer_s,
        num_layers=layers,
        checkpoint_block_s=copy_s,
        restore_block_s=copy_s,
    )


def cost_models(
    hardware: Hardware,
    name: str,
    shape: CheckpointShape,
    *,
    dtype: str = "",
    ranks: Iterable[int] = RANKS,
    block_size: int = 0,
) -> dict[int, CostModel]:
    """By p, as far as p divides the model's KV heads; measured ones of that name go first."""
    reckoned = {
        p: cost_model(hardware, shape, dtype=dtype, num_ranks=p, block_size=block_size)
        for p in ranks
        if shape.num_kv_heads % p == 0
    }
    return reckoned | hardware.measured.get(name, {})


# ------------------------------------------------------------------------------------------------------- ready ones

_FIT = (
    "fitted, not to one engine but between two: DistServe's coefficients for OPT-13B and OPT-66B on A100-80G (simdistserve, "
    "vLLM's engine and DistServe's own)"
)
_A100_FITTED = {
    "weight_share": f"{_FIT}: decodes of 13B and 66B on 2 and 4 GPUs, own engine, read 1.57 to 1.67 TB/s",
    "layer_s": f"{_FIT}: what is left of 13B on one GPU, own engine",
    "step_s": f"{_FIT}: what vLLM's engine takes longer than that",
    "reduce_s": f"{_FIT}: 13B on 2 and 4 GPUs, own engine: 19 to 26 us; Vidur counts 20 us",
    "kv_share": f"{_FIT}: 13B on one GPU, vLLM: 0.593 us a token of context",
    "flops_share": f"{_FIT}: 13B on one GPU, vLLM, 183 TFLOP/s; 66B on 4, vLLM, 214 TFLOP/s",
    "attention_share": f"{_FIT}: 13B on one GPU, vLLM: 8.08e-6 ms a squared token",
    "hidden_share": f"{_FIT}: decodes of 13B below and above a batch of 95, vLLM",
}
_AS_A100 = dict.fromkeys(_A100_FITTED, "as fitted on the A100")
_SHARES = {
    "memory_share": "services/worker/node/machine.py",
    "block_size": "services/worker/attention/facts.py",
    "step_tokens": "default of an instance",
}
_BUS = "three quarters of what the link has in one direction (assumed)"
_PCIE4 = "PCIe 4.0 x16: 32 GB/s, four fifths of it (assumed)"
_PCIE5 = "PCIe 5.0 x16: 64 GB/s, four fifths of it (assumed)"
_LOAD = "assumed: one NVMe drive"

A100_80G = Hardware(
    name="A100-80G",
    memory_bytes=80 * 10**9,
    memory_bytes_s=2.039e12,
    flops=312e12,
    weight_share=0.795,
    kv_share=0.677,
    flops_share=0.62,
    attention_share=0.1625,
    hidden_share=0.5,
    step_s=0.0035,
    layer_s=1.0e-4,
    reduce_s=2.2e-5,
    reduce_bytes_s=225e9,
    host_bytes_s=25.6e9,
    link_bytes_s=25e9,
    load_bytes_s=3e9,
    block_size=256,
    sources=_A100_FITTED
    | _SHARES
    | {
        "memory_bytes": "data sheet, A100 80GB SXM",
        "memory_bytes_s": "data sheet",
        "flops": "data sheet, BF16 without sparsity",
        "reduce_bytes_s": f"NVLink, 600 GB/s in both directions; {_BUS}",
        "host_bytes_s": _PCIE4,
        "link_bytes_s": "DGX A100: 200 Gb/s a GPU",
        "load_bytes_s": _LOAD,
    },
)
A800_80G = msgspec.structs.replace(
    A100_80G,
    name="A800-80G",
    reduce_bytes_s=150e9,
    sources=A100_80G.sources
    | _AS_A100
    | {
        "memory_bytes": "SeaLLM, section 6.1",
        "memory_bytes_s": "an A100's",
        "flops": "an A100's",
        "reduce_bytes_s": f"SeaLLM, section 6.1: NVLink, 400 GB/s in both directions; {_BUS}",
        "link_bytes_s": "SeaLLM, section 6.1: four NICs of 200 Gb/s a node, one an instance",
    },
)
_VIDUR_H100 = "Vidur's kernel times on an H100 (data/profiling/compute/h100)"
_LLMSERVINGSIM = "LLMServingSim's kernel times on an H100 (perf_models/H100)"
_VLLM_H200 = (
    "vLLM's performance-benchmark build 9515: Llama-3.1-8B and Llama-3-70B on 1 and 4 H200s, 6.51 and 16.23 ms a step"
)
_HELIX_L4 = "Helix's times of a layer of 70B and 30B on an L4 (its simulator's model_manager)"
H100 = msgspec.structs.replace(
    A100_80G,
    name="H100",
    block_size=128,
    memory_bytes_s=3.35e12,
    flops=989e12,
    weight_share=0.81,
    kv_share=0.70,
    flops_share=0.65,
    attention_share=0.20,
    hidden_share=0.8,
    step_s=1.8e-3,
    layer_s=2.2e-5,
    reduce_bytes_s=337e9,
    host_bytes_s=51.2e9,
    link_bytes_s=50e9,
    sources=A100_80G.sources
    | {
        "memory_bytes": "data sheet, H100 SXM",
        "weight_share": f"{_VIDUR_H100}: products of one token, 7B 0.77, 70B 0.86; {_LLMSERVINGSIM}: 8B 0.81",
        "kv_share": f"{_LLMSERVINGSIM}: 128 and 256 decodes of 704 tokens, 70B on 4 GPUs: 0.67, 0.70",
        "flops_share": f"{_VIDUR_H100}: a layer at 4,096 tokens without attention, 7B 0.65, 70B 0.66",
        "attention_share": f"{_LLMSERVINGSIM}: 8B, a prompt of 2,048 tokens: 0.196",
        "hidden_share": f"{_VIDUR_H100}: products of 1 and 64 tokens, 7B 0.80, 70B 0.95",
        "step_s": f"{_VLLM_H200}: its host",
        "layer_s": f"as the H200; {_VIDUR_H100}: kernels of a layer that are no products, 7B 21 us, 70B 34 us",
        "reduce_s": "as fitted on the A100",
        "reduce_bytes_s": f"NVLink, 900 GB/s in both directions; {_BUS}",
        "host_bytes_s": _PCIE5,
        "link_bytes_s": "DGX H100: 400 Gb/s a GPU",
    },
)
H200 = msgspec.structs.replace(
    H100,
    name="H200",
    memory_bytes=141 * 10**9,
    memory_bytes_s=4.8e12,
    weight_share=0.83,
    sources=H100.sources
    | dict.fromkeys(("kv_share", "flops_share", "attention_share", "hidden_share", "link_bytes_s"), "as the H100")
    | {"memory_bytes": "data sheet, H200 SXM"}
    | dict.fromkeys(("weight_share", "step_s", "layer_s"), f"{_VLLM_H200}; the layer as the H100's kernels allow"),
)
L4 = msgspec.structs.replace(
    A100_80G,
    name="L4",
    memory_bytes=24 * 10**9,
    memory_bytes_s=300e9,
    flops=121e12,
    weight_share=0.83,
    flops_share=0.42,
    step_s=1.8e-3,
    layer_s=0.0,
    reduce_s=4e-5,
    reduce_bytes_s=12e9,
    link_bytes_s=8e9,
    sources=A100_80G.sources
    | _AS_A100
    | {
        "memory_bytes": "data sheet",
        "flops": "data sheet, half of BF16 with sparsity",
        "weight_share": f"{_HELIX_L4}: few decodes, 0.83 of both, what is fixed in a layer within it",
        "flops_share": f"{_HELIX_L4}: prompts of 250 to 9,750 tokens, 0.42 and 0.43, attention within it",
        "step_s": "vLLM's host, as on the H200",
        "layer_s": "within weight_share",
        "reduce_s": "assumed: twice that of NVLink, since it goes over PCIe and the host",
        "reduce_bytes_s": "assumed: PCIe 4.0 x16 through the host, 12 GB/s",
        "link_bytes_s": "Llumnix, section 6.1: 64 Gb/s",
    },
)
A10 = msgspec.structs.replace(
    L4,
    name="A10",
    memory_bytes_s=600e9,
    flops=125e12,
    sources=L4.sources
    | {
        "flops": "data sheet, BF16 without sparsity",
        "weight_share": "27 ms a token of Llama-2-7B, LMDeploy (issue 210 there), whose host is taken to be for nothing",
        "flops_share": "as the L4; no published prompt of an A10 was found",
    },
)
CPU = Hardware(
    name="cpu",
    device="cpu",
    memory_bytes=4 << 30,
    memory_share=1.0,
    memory_bytes_s=25e9,
    flops=607e9,
    weight_share=1.0,
    kv_share=0.92,
    flops_share=1.0,
    attention_share=0.114,
    layer_s=4.73e-4,
    decode_layer_s=7.1e-5,
    mixed_layer_s=2.0e-4,
    reduce_s=1.5e-4,
    reduce_bytes_s=1.5e9,
    host_bytes_s=2.2e9,
    link_bytes_s=1.5e9,
    load_bytes_s=1e9,
    block_size=32,
    step_tokens=512,
    sources={
        "memory_bytes": "assumed: what instances may take, of more",
        "memory_share": "of that, all",
        "memory_bytes_s": "measured: the sum of 256 MB of float32 in numpy, best of 8",
        "flops": "fitted to the CPU of bench/rebalance: prompts of a 135M-parameter Llama shape, 0.35 ms a token",
        "weight_share": "as measured",
        "kv_share": "likewise: 1 us a token of context",
        "flops_share": "as measured",
        "attention_share": "likewise: 1 us a token and token before it",
        "layer_s": "likewise: what reading the weights leaves of a step of 25 ms",
        "decode_layer_s": "likewise: what arithmetic leaves of 2.5 ms a decode",
        "mixed_layer_s": "likewise: 6 ms of a step with both",
        "reduce_s": "assumed for gloo over shared memory",
        "reduce_bytes_s": "as the link",
        "host_bytes_s": "likewise: 0.17 ms a block of 32 tokens",
        "link_bytes_s": "bench/rebalance: shared memory",
        "load_bytes_s": "assumed: files that are in memory",
        "block_size": "services/worker/attention/facts.py",
        "step_tokens": "default of an instance",
    },
)

HARDWARE = {hardware.name: hardware for hardware in (A800_80G, A100_80G, H100, H200, L4, A10, CPU)}
"""By name."""
