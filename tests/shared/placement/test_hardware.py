"""Kinds of devices: where their numbers are from, how well they fit what others have measured, and how costs scale."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costs.model import StepShape
from shared.models.checkpoint import CheckpointShape
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import A10, A100_80G, CPU, H100, H200, HARDWARE, L4, Hardware, cost_model, cost_models
from shared.placement.hardware_fit import Profiled, fitted

PREFILL_S = {"vllm": (22.05e-3, 1.405e-4, 8.08e-9), "own": (18.10e-3, 1.019e-4, 7.12e-9)}
DECODE_S = {"vllm": (23.48e-3, 5.93e-7, 6.07e-5), "own": (19.93e-3, 6.27e-7, 3.85e-5)}
"""DistServe's coefficients for OPT-13B on one A100-80G (simdistserve's profile data), by engine: of a prompt of n tokens
a + b*n + c*n^2; of n decodes of a sum of s tokens a + b*s + c*n."""


@pytest.mark.parametrize("num_tokens", [512, 1024, 2048])
def test_prompts_of_opt_13b_take_what_distserve_measured_of_vllm(num_tokens: int) -> None:
    """-12.3 %, -9.8 % and -8.0 %; between vLLM's engine and DistServe's own, which is faster."""
    model = cost_model(A100_80G, SHAPES["opt-13b"])
    seconds = model.predict(StepShape(num_tokens, num_tokens**2 / 2))
    vllm_s, own_s = (a + b * num_tokens + c * num_tokens**2 for a, b, c in PREFILL_S.values())
    assert seconds == pytest.approx(vllm_s, rel=0.15)
    assert own_s < seconds < vllm_s


@pytest.mark.parametrize("batch", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("context", [100, 300, 1000])
def test_decodes_of_opt_13b_take_what_distserve_measured_of_vllm(batch: int, context: int) -> None:
    """Within 0.5 %."""
    a, b, c = DECODE_S["vllm"]
    seconds = cost_model(A100_80G, SHAPES["opt-13b"]).predict(StepShape(0, 0.0, batch, batch * context))
    assert seconds == pytest.approx(a + b * batch * context + c * batch, rel=0.02)


def test_opt_66b_on_four_lies_between_the_two_engines() -> None:
    model = cost_model(A100_80G, SHAPES["opt-66b"], num_ranks=4)
    assert model.fixed_s == pytest.approx(30.76e-3, rel=0.1)  # decodes, DistServe's engine
    assert model.fixed_s == pytest.approx(32.98e-3, rel=0.05)  # decodes, vLLM's
    seconds = model.predict(StepShape(1024, 1024**2 / 2))
    assert seconds > 26.77e-3 + 1.376e-4 * 1024 + 7.56e-9 * 1024**2
    assert seconds == pytest.approx(30.69e-3 + 1.5205e-4 * 1024 + 3.29e-8 * 1024**2, rel=0.05)


@pytest.mark.parametrize(
    ("hardware", "shape", "num_ranks", "batch", "context", "measured_ms", "error"),
    [
        (H200, "llama-3.1-8b", 1, 8, 96, 6.511, 0.02),  # vLLM's performance-benchmark build 9515
        (H200, "llama-2-70b", 4, 8, 96, 16.23, 0.02),  # likewise, of Llama-3-70B
        (A10, "llama-2-7b", 1, 1, 150, 27.0, 0.09),  # LMDeploy's issue 210, with a host that takes less
    ],
)
def test_decodes_take_what_was_published(
    hardware: Hardware, shape: str, num_ranks: int, batch: int, context: int, measured_ms: float, error: float
) -> None:
    model = cost_model(hardware, SHAPES[shape], num_ranks=num_ranks)
    seconds = model.predict(StepShape(0, 0.0, batch, batch * context))
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=error)


LLAMA_30B = msgspec.structs.replace(
    SHAPES["llama-2-70b"], num_layers=60, hidden_size=6656, num_kv_heads=52, weight_bytes=2 * 32_529_000_000
)
L4_LAYERS_MS = {
    "70b": (
        {2: 6.9, 8: 7.0, 16: 7.2, 30: 7.9, 50: 8.4, 80: 9.1, 100: 9.4, 120: 10},
        {250: 12, 500: 20, 1000: 38, 2000: 72, 4000: 139, 6000: 200, 7000: 235},
    ),
    "30b": (
        {2: 4.5, 8: 5.1, 16: 5.9, 30: 7.6, 50: 9.5, 80: 12.6, 100: 14.1, 120: 16, 200: 24},
        {250: 8, 500: 13, 1000: 24, 2000: 45, 4000: 85, 6000: 126, 8000: 165},
    ),
}
"""Helix's times of a layer on an L4, of so many decodes and of prompts of so many tokens."""
L4_CONTEXT = 700
"""Context of those decodes; it is not told, and with so many tokens both models fit."""


@pytest.mark.parametrize(("name", "shape"), [("70b", SHAPES["llama-2-70b"]), ("30b", LLAMA_30B)])
def test_layers_on_an_l4_take_what_helix_measured(name: str, shape: CheckpointShape) -> None:
    model, (decodes, prompts) = cost_model(L4, shape), L4_LAYERS_MS[name]
    steps = {StepShape(0, 0.0, batch, batch * L4_CONTEXT): ms for batch, ms in decodes.items()}
    steps |= {StepShape(num_tokens): ms for num_tokens, ms in prompts.items()}
    for step, measured_ms in steps.items():
        seconds = (model.predict(step) - L4.step_s) / shape.num_layers
        assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.075), step


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("step", [StepShape(0, 0.0, 1, 100), StepShape(0, 0.0, 256, 128000), StepShape(4096, 8e6)])
def test_an_h200_is_never_slower_than_an_h100(shape: CheckpointShape, step: StepShape) -> None:
    assert cost_model(H200, shape).predict(step) <= cost_model(H100, shape).predict(step)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_what_is_as_on_the_a100_is(hardware: Hardware) -> None:
    for field, source in hardware.sources.items():
        if source == "as fitted on the A100":
            assert getattr(hardware, field) == getattr(A100_80G, field), field


@pytest.mark.parametrize(
    ("num_tokens", "measured_ms"), [(512, 83.9), (1024, 157.8), (2048, 308.2), (4096, 642.0), (8192, 1339.2)]
)
def test_an_h100_is_a_little_faster_than_splitwise_measured_of_an_engine_of_2023(
    num_tokens: int, measured_ms: float
) -> None:
    """Llama-2-70B on two (splitwise-sim's perf_model.csv). -12 % to -17 %: the shares are of kernels of today."""
    model = cost_model(H100, SHAPES["llama-2-70b"], num_ranks=2)
    seconds = model.predict(StepShape(num_tokens, num_tokens**2 / 2))
    assert 0.8 * measured_ms < 1e3 * seconds < measured_ms


def test_a_135m_shape_takes_what_it_was_measured_to_take_on_two_cores() -> None:
    model = cost_model(CPU, SHAPES["llama-135m"], block_size=32)
    expected = {
        "fixed_s": 0.025, "prefill_token_s": 3.5e-4, "prefill_attention_s": 1e-6, "decode_s": 2.5e-3,
        "decode_context_s": 1e-6, "mixed_s": 0.006, "checkpoint_block_s": 3.4e-4,
    }  # fmt: skip
    for name, seconds in expected.items():
        assert getattr(model, name) == pytest.approx(seconds, rel=0.05), name


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_every_number_has_a_source(hardware: Hardware) -> None:
    numbers = {
        field.name
        for field in msgspec.structs.fields(Hardware)
        if isinstance(value := getattr(hardware, field.name), int | float) and value
    }
    assert numbers <= set(hardware.sources)
    assert all(hardware.sources.values())


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [("llama-2-7b", 6738415616), ("llama-2-13b", 13015864320), ("llama-2-70b", 68976648192),
     ("llama-3.1-8b", 8030261248), ("opt-6.7b", 6658473984), ("opt-66b", 65719701504), ("llama-135m", 134515008)],
)  # fmt: skip
def test_ready_shapes_have_as_many_weights_as_their_models(name: str, num_weights: int) -> None:
    assert SHAPES[name].weight_bytes == 2 * num_weights


@given(
    hardware=st.sampled_from(list(HARDWARE.values())),
    shape=st.sampled_from(list(SHAPES.values())),
    prefill=st.integers(0, 8192),
    decodes=st.integers(0, 256),
)
def test_more_ranks_divide_reading_and_arithmetic_but_no_fixed_cost(hardware, shape, prefill, decodes) -> None:
    step = StepShape(prefill, prefill**2 / 2, decodes, 500 * decodes)
    one, two = (cost_model(hardware, shape, num_ranks=p) for p in (1, 2))
    reduced_s = 2 * shape.num_layers * (
        hardware.reduce_s + step.num_tokens * shape.hidden_size * 2 / hardware.reduce_bytes_s
    )  # fmt: skip
    assert two.predict(step) > one.predict(step) / 2
    assert two.predict(step) <= one.predict(step) + reduced_s + 1e-12
    assert two.decode_context_s == pytest.approx(one.decode_context_s / 2)


def test_float32_weights_take_twice_the_bytes_and_the_time() -> None:
    half, full = (cost_model(A100_80G, SHAPES["llama-2-7b"], dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert full.decode_context_s == pytest.approx(2 * half.decode_context_s)
    assert full.prefill_token_s == pytest.approx(2 * half.prefill_token_s)


def test_a_measured_cost_model_goes_first() -> None:
    measured = cost_model(A100_80G, SHAPES["llama-2-7b"]).scaled(2.0)
    hardware = msgspec.structs.replace(A100_80G, measured={"mine": {1: measured}})
    assert cost_models(hardware, "mine", SHAPES["llama-2-7b"])[1] == measured
    assert cost_models(hardware, "mine", SHAPES["llama-2-7b"])[2] != measured
    assert cost_models(hardware, "other", SHAPES["llama-2-7b"])[1] != measured


def test_facts_of_a_model_have_the_ranks_that_divide_its_heads() -> None:
    facts = model_facts("llama", SHAPES["llama-135m"], [A100_80G, CPU])
    assert set(facts.costs) == {("A100-80G", 1), ("cpu", 1)}
    assert facts.block_size == 256  # the larger of the two kinds'
    assert facts.block_bytes == 256 * 30 * 2 * 3 * 64 * 2
    assert facts.costs["cpu", 1].checkpoint_block_s == pytest.approx(facts.block_bytes / CPU.host_bytes_s)
    assert facts.weight_bytes > 269_030_016
    with pytest.raises(ValueError, match="3 KV heads"):
        model_facts("llama", SHAPES["llama-135m"], [A100_80G], ranks=(2, 4))


def test_70b_needs_four_devices_by_its_weights_alone() -> None:
    facts = model_facts("llama", SHAPES["llama-2-70b"], [A100_80G])
    node = node_facts("node", A100_80G, 8)
    assert set(facts.costs) == {("A100-80G", p) for p in (1, 2, 4, 8)}
    assert facts.weight_bytes > node.memory_bytes
    assert facts.weight_bytes < 2 * node.memory_bytes


SHARE = st.floats(0.1, 0.9)
MODELS = [("llama-2-7b", "bfloat16"), ("llama-2-70b", "bfloat16"), ("opt-6.7b", "float32")]


@given(
    shares=st.tuples(SHARE, SHARE, SHARE, SHARE, st.floats(0, 0.9)),
    layer_s=st.floats(1e-6, 1e-3),
    decode_layer_s=st.floats(0, 1e-4),
    host_bytes_s=st.floats(1e9, 1e11),
)
def test_what_was_measured_of_two_models_is_found_again(shares, layer_s, decode_layer_s, host_bytes_s) -> None:
    names = ("weight_share", "kv_share", "flops_share", "attention_share", "hidden_share")
    true = msgspec.structs.replace(
        A100_80G, **dict(zip(names, shares, strict=True)), step_s=0.0, layer_s=layer_s, decode_layer_s=decode_layer_s,
        host_bytes_s=host_bytes_s, prefill_layer_s=1e-5, mixed_layer_s=2e-5,
    )  # fmt: skip
    profiles = [
        Profiled(name, SHAPES[name], dtype, true.block_size, cost_model(true, SHAPES[name], dtype=dtype))
        for name, dtype in MODELS
    ]
    found = fitted(A100_80G, profiles)
    for name in (*names, "layer_s", "decode_layer_s", "host_bytes_s", "prefill_layer_s", "mixed_layer_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3, abs=1e-9), name
    assert found.memory_bytes_s == A100_80G.memory_bytes_s and found.reduce_s == A100_80G.reduce_s
    assert cost_models(found, "llama-2-7b", SHAPES["llama-2-7b"])[1] == profiles[0].cost_model


@given(fixed_s=st.floats(1e-3, 0.1), factor=st.floats(0.2, 5.0))
def test_one_model_is_predicted_as_it_was_measured(fixed_s, factor) -> None:
    shape = SHAPES["llama-2-7b"]
    cost = msgspec.structs.replace(cost_model(A100_80G, shape).scaled(factor), fixed_s=fixed_s)
    found = cost_model(fitted(A100_80G, [Profiled("m", shape, "bfloat16", 128, cost)]), shape)
    for step in (StepShape(4096, 4096**2 / 2), StepShape(0, 0.0, 8, 8000), StepShape(0, 0.0, 1, 100)):
        assert found.predict(step) == pytest.approx(cost.predict(step), rel=0.15)
    assert found.fixed_s == pytest.approx(fixed_s)


def test_what_a_profile_does_not_show_stays_as_it_is() -> None:
    cost = msgspec.structs.replace(
        cost_model(A100_80G, SHAPES["opt-6.7b"]), prefill_attention_s=0.0, decode_context_s=0.0
    )
    found = fitted(A100_80G, [Profiled("m", SHAPES["opt-6.7b"], "float16", 128, cost)])
    assert (found.attention_share, found.kv_share) == (A100_80G.attention_share, A100_80G.kv_share)
    assert found.sources["flops_share"] == "fitted to steps of m"
    with pytest.raises(ValueError, match="profile"):
        fitted(A100_80G, [])


def test_a_device_that_is_faster_than_its_base_has_higher_rates() -> None:
    shape = SHAPES["llama-2-7b"]
    cost = cost_model(A100_80G, shape).scaled(0.2)
    found = fitted(A100_80G, [Profiled("m", shape, "bfloat16", 128, cost)])
    assert found.flops == pytest.approx(A100_80G.flops * 0.62 * 5)
    assert max(found.flops_share, found.attention_share) == pytest.approx(1.0)
    assert cost_model(found, shape).predict(StepShape(2048, 2048**2 / 2)) == pytest.approx(
        cost.predict(StepShape(2048, 2048**2 / 2)), rel=0.1
    )


def test_blocks_are_those_of_the_attention_that_a_kind_of_gpu_runs():
    """Flash-attention 2 pages in blocks of 256 tokens; flash-attention 4, on Hopper and later, in 128."""
    sizes = {name: hardware.block_size for name, hardware in HARDWARE.items() if hardware.device == "cuda"}
    assert sizes == {"A800-80G": 256, "A100-80G": 256, "H100": 128, "H200": 128, "L4": 256, "A10": 256}
