"""What a step should take: against other arithmetic, against what the model's code launches, against docs/gpu.md."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from bench.coserving.testbed import SHAPES
from bench.gpu.roofline import (
    CARDS,
    LLAMA_3_1_8B,
    Launch,
    Operation,
    Shape,
    Step,
    decode_step,
    expected_ms,
    prefill_step,
)
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.torch_backend import TorchBackend
from services.worker.executor import sampling
from services.worker.executor.executor import Executor
from services.worker.models import decode_graphs, deterministic
from services.worker.models.ops import FlashInferOps
from services.worker.models.rope import RotaryEmbedding
from services.worker.native import library
from shared.engine.memory.slab import KvGeometry
from shared.messages.cluster import ModelSpec
from tests.tideway.readme import REPOSITORY
from tests.worker import fake_flashinfer
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver

H100, H200 = CARDS


def test_weights_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES["llama-3.1-8b"], tie_word_embeddings=False))
    embedding = model.get_input_embeddings().weight.numel()
    num_read = sum(parameter.numel() for parameter in model.parameters()) - embedding
    assert num_read == LLAMA_3_1_8B.num_read_weights
    step = decode_step(64)
    looked_up = 2 * 64 * LLAMA_3_1_8B.hidden_size
    assert step.total(lambda operation: operation.weight_bytes) == 2 * num_read + looked_up


def test_the_cache_is_read_once_and_written_for_each_token() -> None:
    kv_bytes = KvGeometry(32, 8, 128, 2).block_bytes(1)
    assert kv_bytes == LLAMA_3_1_8B.kv_bytes == 131072
    assert decode_step(8, 1000).total(lambda operation: operation.kv_bytes) == kv_bytes * 8 * (1000 + 1)
    assert prefill_step(2048).total(lambda operation: operation.kv_bytes) == kv_bytes * 2048 * 2


def test_operations_are_those_of_the_weights_and_of_attention() -> None:
    def flops(step: Step) -> int:
        return step.total(lambda operation: operation.flops)

    head = 128256 * 4096
    products = LLAMA_3_1_8B.num_read_weights - head - (2 * 32 + 1) * 4096
    assert flops(decode_step(64)) == 2 * 64 * (products + head) + 64 * 32 * 4 * 32 * 128 * 1024
    assert flops(prefill_step(8192)) == pytest.approx(
        2 * 8192 * products + 2 * head + 2 * 32 * 4096 * 8192**2, rel=1e-3
    )


def test_shares_are_of_what_bench_gpu_takes_them_of() -> None:
    """bench.gpu.parts.decode: weights and KV once, at the rate of copies."""
    num_bytes = 2 * LLAMA_3_1_8B.num_read_weights + 256 * 1024 * 131072
    step = decode_step(256)
    assert step.whole_s(H100) == pytest.approx(num_bytes / 3.0e12, rel=2e-3)
    assert step.target_s(H100) == pytest.approx(num_bytes / 3.0e12 / 0.75, rel=2e-3)
    assert step.seconds(H100) > step.whole_s(H100), "what is passed on between operations comes on top"
    assert prefill_step(2048).share_to_reach == 0.6 and prefill_step(8192).share_to_reach == 0.7


def test_the_longer_of_memory_and_products_counts() -> None:
    product = Operation(name="p", launch=Launch.KERNEL, times=2, weight_bytes=3_000_000, flops=1_000_000)
    assert product.limit(H100) == "memory" and product.seconds(H100) == pytest.approx(2e-6)
    product = Operation(name="p", launch=Launch.KERNEL, weight_bytes=3, flops=798_000_000)
    assert product.limit(H100) == "products" and product.seconds(H100) == pytest.approx(1e-6)
    gate = {
        step.size: next(o for o in step.operations if o.name == "gate and up") for step in map(decode_step, (64, 256))
    }
    assert [gate[64].limit(H200), gate[256].limit(H100), gate[256].limit(H200)] == ["memory", "memory", "products"]


def test_a_measured_step_is_compared_by_the_name_of_its_device() -> None:
    found = expected_ms("NVIDIA H100 80GB HBM3", "decode", 64)
    assert found is not None and found == pytest.approx(1e3 * decode_step(64).seconds(H100))
    assert expected_ms("NVIDIA H200", "prefill", 2048) == pytest.approx(1e3 * prefill_step(2048).seconds(H200))
    assert expected_ms("NVIDIA A100-SXM4-80GB", "decode", 64) is None
    longer = expected_ms("NVIDIA H100 80GB HBM3", "decode", 64, context=2048)
    assert longer is not None and longer - found == pytest.approx(1e3 * 64 * 1024 * 131072 / 3.0e12)
    with pytest.raises(ValueError, match="neither"):
        expected_ms("H100", "training", 1)


# ----------------------------------------------------------------------------------------------- what the code launches

OWN_MEMORY = {
    "view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "t", "transpose", "permute",
    "unsqueeze", "squeeze", "expand", "detach", "alias", "as_strided", "empty", "empty_like", "empty_strided", "new_empty",
    "reshape", "flatten", "lift_fresh", "resolve_neg", "resolve_conj",
}  # fmt: skip
"""Operators of torch that put nothing on a device."""
SAME = dict.fromkeys(("mm", "addmm", "linear", "matmul", "_linear_pointwise"), "product") | {"_to_copy": "to"}


class Launches(TorchDispatchMode):
    """Counts torch's operators and, as one each, calls of functions that `one` has wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_within_one = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = SAME.get(function.overloadpacket.__name__, function.overloadpacket.__name__)
        result = function(*args, **kwargs or {})
        is_nothing = name in OWN_MEMORY or (name == "to" and result is args[0])
        if not self._is_within_one and not is_nothing:
            self.counts[name] += 1
        return result

    def one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_within_one:
                return function(*args, **kwargs)
            self.counts[name] += 1
            self._is_within_one = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_within_one = False

        return called

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        self.counts = Counter()
        with self:
            yield self.counts


LAUNCHED_BY = {
    "tokens looked up": ["index_select"],
    "embedding": ["embedding"],
    "rotations' angles": ["arange", "to", "mul", "cos", "sin", "cat"],
    "first norm": ["norm"],
    "sums and norms": ["sum and norm"],
    "queries, keys, values": ["product"],
    "rotations": ["rotate"],
    "keys and values to the cache": ["append"],
    "attention": ["attend"],
    "attention's output": ["product"],
    "gate and up": ["product"],
    "gates": ["gate"],
    "down": ["product"],
    "last sum": ["add"],
    "last token taken": ["index_select"],
    "last norm": ["norm"],
    "head": ["product"],
    "largest logit": ["max", "lt", "where"],
}
"""What of the code each operation of the table is."""


def expected(step: Step, launch: Launch, tokens_entered: list[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation in step.operations:
        if operation.launch == launch:
            names = (LAUNCHED_BY | {"tokens entered": tokens_entered})[operation.name]
            # Attention of a decode is a second kernel of FlashInfer's, within the call.
            assert operation.kernels == len(names) or (operation.name, operation.kernels) == ("attention", 2)
            for name in names:
                found[name] += operation.times
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels are those of CUDA in plain torch, each counted as one; angles are computed, as off the CPU."""
    found = Launches()
    norm = SimpleNamespace(
        rmsnorm=found.one("norm", fake_flashinfer.norm.rmsnorm),
        fused_add_rmsnorm=found.one("sum and norm", fake_flashinfer.norm.fused_add_rmsnorm),
    )
    activation = SimpleNamespace(silu_and_mul=found.one("gate", fake_flashinfer.activation.silu_and_mul))
    rotate = found.one("rotate", fake_flashinfer.rope.apply_rope_with_cos_sin_cache_inplace)
    ops = FlashInferOps(norm, activation, SimpleNamespace(apply_rope_with_cos_sin_cache_inplace=rotate))
    monkeypatch.setattr(deterministic, "choose_ops", lambda *_: ops)
    methods = {"prepare": "plan", "begin_replay": "plan", "write_kv": "append", "attend": "attend"}
    for method, name in methods.items():
        monkeypatch.setattr(FlashInferBackend, method, found.one(name, getattr(FlashInferBackend, method)))
    monkeypatch.setattr(RotaryEmbedding, "cos_sin", RotaryEmbedding._computed)
    monkeypatch.setattr(library, "_team_of", lambda num_threads: None)
    for module in (sampling, decode_graphs):
        monkeypatch.setattr(module, "most_likely", lambda scores: sampling.where_finite(*scores.max(-1)))
    return found


class Recorded:
    """A graph that does nothing again."""

    def replay(self) -> None:
        pass


def loaded(executor: Executor, folder: Path) -> tuple[Driver, Shape]:
    """A Llama of three layers with heads that FlashInfer takes."""
    path = write_checkpoint(folder, "llama", dtype=torch.bfloat16, head_dim=64)
    device = torch.device("cpu")
    executor._preparation.backends = [FlashInferBackend(device, TorchBackend(device), fake_flashinfer)]
    driver = Driver(executor, executor.add_model(executor.prepare_model(ModelSpec("m", str(path)))), range(16))
    shape = Shape(
        vocab_size=211, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=64
    )
    return driver, shape


def test_a_decode_launches_what_the_table_says(tmp_path: Path, launches: Launches) -> None:
    captured: list[Counter[str]] = []

    def capture(function: Callable[[], Any], /) -> tuple[Any, Recorded]:
        with launches.counting() as counts:
            result = function()
        captured.append(counts)
        return result, Recorded()

    driver, shape = loaded(Executor("cpu", 16, 1 << 20, 2, capture=capture), tmp_path)
    step = decode_step(2, 40, shape)
    entered = ["clone", "add", "to", "clamp_", "index_copy_"]
    layers, head = captured[2:4]  # of two rows: the size of eight comes first
    assert len(captured) == 2 * len(driver.executor._models["m"].graphs._graphs)  # type: ignore[union-attr]
    assert layers == expected(step, Launch.LAYERS, entered)
    assert head == expected(step, Launch.HEAD, entered)
    assert layers["product"] == 4 * 3 and layers["sum and norm"] + layers["norm"] == 2 * 3

    rows = [driver.add(i, prompt_of(39)) for i in range(2)]
    driver.step([(row, 39) for row in rows])
    with launches.counting() as counts:
        driver.decode(rows, 1)
    assert counts.pop("plan") == 1  # copies, on a device
    assert counts == expected(step, Launch.KERNEL, entered)


def test_a_prefill_launches_what_the_table_says(tmp_path: Path, launches: Launches) -> None:
    driver, shape = loaded(Executor("cpu", 16, 1 << 20, 2), tmp_path)
    first, second = (driver.add(i, prompt_of(32)) for i in range(2))
    driver.step([(first, 32)])
    driver.step([(second, 16)])  # it takes its row and block, as not each step does
    with launches.counting() as counts:
        driver.step([(second, 16)])
    assert counts.pop("plan") == 1  # copies, on a device
    assert counts == expected(prefill_step(16, shape), Launch.KERNEL, ["to", "clamp_", "index_copy_"])


# ------------------------------------------------------------------------------------------------------------ the page


def printed(*arguments: str) -> str:
    command = [sys.executable, "-m", "bench.gpu.roofline", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_the_page_has_the_tables_that_the_program_prints() -> None:
    page = (REPOSITORY / "docs/gpu.md").read_text()
    _, _, rest = page.partition("<!-- python -m bench.gpu.roofline --markdown -->\n")
    tables, _, _ = rest.partition("<!-- end -->")
    assert tables.strip() == printed("--markdown").strip()


def test_one_card_alone() -> None:
    text = printed("--card", "H200")
    assert "H200" in text and "H100" not in text
    assert "| step |" not in text and "Decode, 64 rows" in text


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; from bench.gpu.roofline import expected_ms; assert expected_ms('H100', 'decode', 1);"
        "assert not {'torch', 'numpy', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
