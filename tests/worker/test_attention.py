"""One parity suite for all attention back ends of this machine, against the definition written out."""

from __future__ import annotations

import gc
import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention import flashinfer_backend, torch_backend
from services.worker.attention.choice import choose_backends
from services.worker.attention.flash_backend import FlashBackend, FlashUnavailable
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.interface import AttentionBackend, BatchLayout, Heads
from services.worker.attention.torch_backend import TorchBackend, _grouping
from services.worker.kv.kv_store import KvShape, KvStore, KvViews
from services.worker.kv.transfer import StaticInputs
from tests.worker import fake_flashinfer

torch.set_num_threads(1)

BACKENDS: list[Any] = [("cpu", backend.facts.name) for backend in choose_backends(torch.device("cpu"))]
if torch.cuda.is_available():
    BACKENDS += [
        pytest.param("cuda", backend.facts.name, marks=pytest.mark.gpu)
        for backend in choose_backends(torch.device("cuda"))
    ]

Lengths = list[tuple[int, int]]
"""(start, count) of each sequence"""


@dataclass
class Case:
    """A batch over a slab whose past is already cached."""

    layout: BatchLayout
    views: KvViews
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    expected: dict[int | None, torch.Tensor]


def backend_of(device: str, name: str) -> AttentionBackend:
    return next(b for b in choose_backends(torch.device(device)) if b.facts.name == name)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_case(
    device: str,
    lengths: Lengths,
    block_size: int,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    windows: tuple[int, ...] = (),
    softcap: float = 0.0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    shape = KvShape(2, block_size, num_kv_heads, head_dim, dtype)
    pages = [-(-(start + count) // block_size) for start, count in lengths]
    per = 3
    store = KvStore(-(-sum(pages) // per) + 1, per * (shape.block_bytes + 64), torch.device(device))
    store.slab.fill_(0xFF)  # NaN wherever nobody wrote
    views = store.attach(shape, per)
    order = torch.randperm(views.num_blocks, generator=generator).to(torch.int32).numpy()
    tables = np.zeros((len(lengths), max(pages)), np.int32)
    taken = 0
    for row, count in enumerate(pages):
        tables[row] = order[taken]
        tables[row, :count] = order[taken : taken + count]
        taken += count
    store.claim(views, order[:taken])
    starts, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    layout = BatchLayout(
        starts,
        counts,
        tables,
        block_size,
        dtype,
        torch.device(device),
        windows,
        Heads(num_heads, num_kv_heads, head_dim, softcap),
    )

    kv = views.layers[1]
    flat: dict[str, list[torch.Tensor]] = {"queries": [], "keys": [], "values": []}
    expected: dict[int | None, list[torch.Tensor]] = {w: [] for w in (None, *windows)}
    for row, (start, count) in enumerate(lengths):
        total = start + count
        queries = torch.randn(count, num_heads, head_dim, generator=generator).to(dtype)
        keys, values = (torch.randn(total, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        at = np.arange(start)
        kv.put(
            torch.from_numpy(tables[row, at // block_size].astype(np.int64)).to(device),
            torch.from_numpy(at % block_size).to(device),
            keys[:start].to(device),
            values[:start].to(device),
        )
        for name, tensor in (("queries", queries), ("keys", keys[start:]), ("values", values[start:])):
            flat[name].append(tensor)
        for window, outputs in expected.items():
            outputs.append(definition(queries, keys, values, start, window, softcap))
    moved = {name: torch.cat(tensors).to(device) for name, tensors in flat.items()}
    return Case(layout, views, **moved, expected={w: torch.cat(o).to(device) for w, o in expected.items()})


def definition(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None, softcap: float
) -> torch.Tensor:
    """Causal softmax attention of one sequence in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / math.sqrt(queries.shape[-1])
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    query = start + torch.arange(len(queries))[:, None]
    key = torch.arange(len(keys))
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def check(backend: AttentionBackend, case: Case, tolerance: float) -> None:
    kv = case.views.layers[1]
    with torch.inference_mode():
        metadata: Any = backend.prepare(case.layout)
        backend.write_kv(kv, case.keys, case.values, metadata)
        # Modules for capped scores are not carried to a bare machine.
        if isinstance(backend, FlashInferBackend) and case.queries.is_cuda and not case.layout.softcap:
            assert backend._wrappers, "its kernels computed this, no others"
        for window, expected in case.expected.items():
            got = backend.attend(case.queries, case.keys, case.values, kv, metadata, window)
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    pages, at = case.layout.blocks.astype(np.int64), case.layout.offsets
    assert torch.equal(kv.keys[pages, at], case.keys) and torch.equal(kv.values[pages, at], case.values)


BATCHES: dict[str, Lengths] = {
    "one token alone": [(0, 1)],
    "one decode": [(70, 1)],
    "decodes of equal length": [(40, 1)] * 4,
    "decodes of very different lengths": [(3, 1), (500, 1), (31, 1), (32, 1), (33, 1), (1000, 1), (64, 1)],
    "one first chunk": [(0, 45)],
    "first chunks of different lengths": [(0, 5), (0, 60), (0, 1), (0, 33), (0, 2)],
    "one later chunk": [(64, 40)],
    "later chunks": [(64, 40), (10, 7), (96, 32), (33, 64)],
    "everything at once": [(100, 1), (0, 20), (50, 10), (7, 1), (0, 64), (0, 1), (300, 17), (640, 1)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("device", "backend_name"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity(device: str, backend_name: str, name: str, dtype: torch.dtype) -> None:
    backend = backend_of(device, backend_name)
    for heads, head_dim in (((6, 2), 32), ((4, 4), 64), ((8, 1), 16), ((8, 2), 128)):
        if not backend.facts.runs(head_dim, name_of(dtype)):
            continue
        page = backend.facts.block_sizes[0]
        case = make_case(device, BATCHES[name], page, heads=heads, head_dim=head_dim, dtype=dtype, windows=(24,))
        check(backend, case, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("device", "backend_name"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_a_sequence_may_be_rows_of_their_own(device: str, backend_name: str, dtype: torch.dtype) -> None:
    """Draft tokens are such rows: each sees the keys that the same call of `write_kv` has stored for those before it."""
    backend = backend_of(device, backend_name)
    if not backend.facts.runs(64, name_of(dtype)):
        return
    page = backend.facts.block_sizes[0]
    case = make_case(device, [(page - 2, 5), (70, 1), (3, 2)], page, head_dim=64, dtype=dtype, windows=(24,))
    ragged = case.layout
    starts, tables = ragged.positions, ragged.block_tables[ragged.sequence_of_token]
    pages = starts // page + 1
    tables = np.where(np.arange(tables.shape[1]) < pages[:, None], tables, tables[:, :1])
    case.layout = BatchLayout(
        starts, np.ones(len(starts), np.int64), tables, page, dtype, torch.device(device), ragged.windows, ragged.heads
    )
    check(backend, case, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("device", "backend_name"), BACKENDS)
@pytest.mark.parametrize("name", ["one decode", "one first chunk", "everything at once"])
def test_capped_scores(device: str, backend_name: str, name: str) -> None:
    backend = backend_of(device, backend_name)
    page = backend.facts.block_sizes[0]
    case = make_case(device, BATCHES[name], page, head_dim=128, dtype=torch.bfloat16, windows=(24,), softcap=0.7)
    check(backend, case, 2e-2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=7),
    st.sampled_from([(), (1,), (16, 50)]),
    st.integers(0, 1 << 16),
)
def test_any_ragged_batch(lengths: Lengths, windows: tuple[int, ...], seed: int) -> None:
    case = make_case("cpu", lengths, 32, heads=(2, 1), head_dim=8, windows=windows, seed=seed)
    check(TorchBackend(torch.device("cpu")), case, 2e-5)


@given(st.lists(st.tuples(st.integers(0, 4000), st.sampled_from([1, 1, 1, 7, 300])), min_size=1, max_size=40))
def test_grouping_covers_each_sequence_once_with_little_padding(lengths: Lengths) -> None:
    starts, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    layout = BatchLayout(starts, counts, np.zeros((1, 1), np.int32), 32, torch.float32, torch.device("cpu"))
    order, bounds = _grouping(layout)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert [b for b, _ in bounds] == [0, *(e for _, e in bounds)][:-1] and bounds[-1][1] == len(lengths)
    pages = -(-layout.contexts // 32)
    for begin, end in bounds:
        members = order[begin:end]
        assert len({bool(c == 1) for c in counts[members]}) == 1, "decodes are never padded to chunks"
        work = counts[members] * pages[members] * 32
        padded = len(members) * counts[members].max() * pages[members].max() * 32
        assert padded <= 1.25 * work.sum() + 2048


def test_many_equal_decodes_are_one_group_in_order() -> None:
    layout = BatchLayout(
        np.full(64, 300), np.ones(64, np.int64), np.zeros((64, 10), np.int32), 32, torch.float32, torch.device("cpu")
    )
    metadata = TorchBackend(torch.device("cpu")).prepare(layout)
    assert len(metadata.groups) == 1 and metadata.groups[0].tokens is None


def torch_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[TorchBackend, list[dict[str, Any]]]:
    """The back end's way there, and the arguments of each attention that it asks for."""
    calls: list[dict[str, Any]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({"query": query, "key": key, "value": value, **options})
        return real(query, key, value, **options)

    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    backend = TorchBackend(torch.device("cpu"))
    backend._is_cuda = True
    return backend, calls


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_on_cuda_has_kernels_that_write_no_scores_out(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """With `enable_gqa` only its flash kernels do, which take 16 bits and no masks; else heads have to be as many."""
    backend, calls = torch_as_on_cuda(monkeypatch)
    for heads, head_dim in (((6, 2), 32), ((4, 4), 64), ((8, 1), 16)):
        case = make_case("cpu", BATCHES[name], 32, heads=heads, head_dim=head_dim, dtype=dtype, windows=(24,))
        check(backend, case, 2e-5 if dtype == torch.float32 else 2e-2)
    assert calls
    for call in calls:
        if call.get("enable_gqa"):
            assert call["attn_mask"] is None and dtype == torch.bfloat16
        else:
            assert call["query"].shape[1] == call["key"].shape[1]
    if name in ("one later chunk", "later chunks", "everything at once"):
        assert any(call["key"].stride(1) == call["value"].stride(1) == 0 for call in calls), "not repeated in memory"


def test_torch_on_cuda_writes_capped_scores_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_SCORES_BYTES", 4 * 6 * 96 * 7)  # seven tokens of six heads
    sizes: list[int] = []
    real = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda scores: (sizes.append(scores.nbytes), real(scores))[1])
    backend, _ = torch_as_on_cuda(monkeypatch)
    for name in ("one first chunk", "one later chunk", "everything at once"):
        case = make_case("cpu", BATCHES[name], 32, windows=(24,), softcap=0.7)
        check(backend, case, 2e-5)
    assert len(sizes) > 30 and max(sizes) <= torch_backend._SCORES_BYTES * 4


def paged_kernel(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    table: torch.Tensor,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """What the flash-attention kernels compute, one sequence at a time."""
    assert query_starts.dtype == contexts.dtype == table.dtype == torch.int32
    out = torch.full_like(queries, math.nan)
    for row, context in enumerate(contexts.tolist()):
        begin, end = query_starts[row : row + 2].tolist()
        pages = table[row, : -(-context // keys.shape[1])].long()
        cached = [x[pages].flatten(0, 1)[:context] for x in (keys, values)]
        out[begin:end] = definition(queries[begin:end], *cached, context - (end - begin), window, softcap).to(out.dtype)
    return out


def fake_flash4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_k: torch.Tensor, page_table: torch.Tensor, causal: bool,
    window_size: tuple[int | None, int | None], num_splits: int, softcap: float,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    assert causal and k.shape[1] == 128 and num_splits == 1
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k >= seqused_k.max()
    assert window_size[1] == (None if window_size[0] is None else 0)
    window = None if window_size[0] is None else window_size[0] + 1
    return paged_kernel(q, k, v, cu_seqlens_q, seqused_k, page_table, window, softcap), None


def fake_flash2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool, window_size: tuple[int, int], softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    assert causal and k.shape[1] == 256 and max_seqlen_q == cu_seqlens_q.diff().max() > 1
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    window = None if window_size == (-1, -1) else window_size[0] + 1
    return paged_kernel(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, window, softcap)


def fake_flash2_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    block_table: torch.Tensor, causal: bool, window_size: tuple[int, int], softcap: float,
) -> torch.Tensor:  # fmt: skip
    assert causal and q.shape[1] == 1
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    window = None if window_size == (-1, -1) else window_size[0] + 1
    return paged_kernel(q[:, 0], k_cache, v_cache, starts, cache_seqlens, block_table, window, softcap)[:, None]


@pytest.fixture(params=[4, 2])
def flash_without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashBackend:
    """The flash back end with kernels of the same signatures in plain torch: shows that it calls them rightly."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = fake_flash4  # type: ignore[attr-defined]
    package.flash_attn_varlen_func = fake_flash2  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = fake_flash2_decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute if request.param == 4 else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    backend = FlashBackend(torch.device("cpu"))
    assert backend.facts.name == f"flash-attention {request.param}"
    return backend


@pytest.mark.parametrize("name", BATCHES)
def test_flash_back_end_calls_its_kernels_rightly(flash_without_gpu: FlashBackend, name: str) -> None:
    (block_size,) = flash_without_gpu.facts.block_sizes
    for softcap in (0.0, 0.7):
        case = make_case("cpu", BATCHES[name], block_size, dtype=torch.bfloat16, windows=(24,), softcap=softcap)
        check(flash_without_gpu, case, 2e-2)


def test_flash_back_end_replays_other_batches_from_the_same_memory(flash_without_gpu: FlashBackend) -> None:
    (block_size,) = flash_without_gpu.facts.block_sizes
    cases = [
        make_case("cpu", lengths, block_size, dtype=torch.bfloat16, seed=i)
        for i, lengths in enumerate([[(5, 1), (700, 1)], [(300, 1), (0, 1)], [(900, 1), (256, 1)]])
    ]
    inputs = StaticInputs(flash_without_gpu.replay_fields(cases[0].layout, 12), torch.device("cpu"))
    inputs.fill(flash_without_gpu.replay_values(cases[0].layout))
    static: Any = flash_without_gpu.allocate_replay(cases[0].layout, inputs.tensors, 12, None)
    addresses = {k: v.data_ptr() for k, v in vars(static).items() if isinstance(v, torch.Tensor)}
    for case in cases:
        inputs.fill(flash_without_gpu.replay_values(case.layout))
        flash_without_gpu.begin_replay(static, case.layout)
        kv = case.views.layers[1]
        flash_without_gpu.write_kv(kv, case.keys, case.values, static)
        if flash_without_gpu.facts.name == "flash-attention 4":
            got = flash_without_gpu.attend(case.queries, case.keys, case.values, kv, static, None)
            torch.testing.assert_close(got.double(), case.expected[None], rtol=2e-2, atol=2e-2)
    assert addresses == {k: v.data_ptr() for k, v in vars(static).items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "runs"),
    [(64, torch.bfloat16, True), (128, torch.float16, True), (64, torch.float32, False), (72, torch.bfloat16, False)],
)
def test_flash_back_end_refuses_what_its_kernels_cannot_run(
    flash_without_gpu: FlashBackend, head_dim: int, dtype: torch.dtype, runs: bool
) -> None:
    assert flash_without_gpu.facts.runs(head_dim, name_of(dtype)) == runs


@pytest.mark.parametrize(("major", "words"), [(7, "too old"), (8, "flash-attn is not"), (9, "flash-attn-4 is not")])
def test_no_kernels_is_said(monkeypatch: pytest.MonkeyPatch, major: int, words: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    with pytest.raises(FlashUnavailable, match=words):
        FlashBackend(torch.device("cuda"))
    assert [b.facts.name for b in choose_backends(torch.device("cuda"))] == ["torch"]


def flashinfer_without_gpu(*, takes_prompts: bool = True) -> FlashInferBackend:
    device = torch.device("cpu")
    return FlashInferBackend(device, TorchBackend(device), fake_flashinfer, takes_prompts=takes_prompts)


DECODES = [name for name, lengths in BATCHES.items() if all(count == 1 for _, count in lengths)]
SHAPES = [((6, 2), 64), ((8, 1), 128), ((4, 4), 64)]


@pytest.mark.parametrize("takes_prompts", [True, False])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_flashinfer_runs_decodes_and_prompts_unless_those_are_the_others(
    name: str, heads: tuple[int, int], head_dim: int, takes_prompts: bool
) -> None:
    backend = flashinfer_without_gpu(takes_prompts=takes_prompts)
    assert backend.facts.name == ("FlashInfer" if takes_prompts else "FlashInfer, torch for prompts")
    assert backend.facts.runs(head_dim, "bfloat16") and not backend.facts.runs(96, "bfloat16")
    for softcap in (0.0, 0.7):
        case = make_case(
            "cpu",
            BATCHES[name],
            32,
            heads=heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            windows=(24,),
            softcap=softcap,
        )
        check(backend, case, 2e-2)
    assert bool(backend._wrappers) == (takes_prompts or name in DECODES)


def test_flashinfer_takes_steps_of_any_kind_one_after_the_other() -> None:
    backend = flashinfer_without_gpu()
    for seed, name in enumerate([*BATCHES, *BATCHES]):
        case = make_case("cpu", BATCHES[name], 128, heads=(8, 2), head_dim=64, dtype=torch.bfloat16, seed=seed)
        check(backend, case, 2e-2)


def test_flashinfer_replays_other_batches_from_the_same_memory() -> None:
    backend, device = flashinfer_without_gpu(), torch.device("cpu")
    cases = [
        make_case("cpu", lengths, 32, heads=(8, 2), head_dim=64, dtype=torch.bfloat16, windows=(40,), seed=i)
        for i, lengths in enumerate([[(5, 1), (300, 1)], [(64, 1), (0, 1)], [(370, 1), (31, 1)]])
    ]
    fields = backend.replay_fields(cases[0].layout, 12)
    assert fields is not None
    inputs = StaticInputs(fields, device)
    inputs.fill(backend.replay_values(cases[0].layout))
    larger = backend.allocate_replay(cases[0].layout, inputs.tensors, 12, None)
    static = backend.allocate_replay(cases[0].layout, inputs.tensors, 12, larger)
    assert static.workspace is larger.workspace
    for case in cases:
        inputs.fill(backend.replay_values(case.layout))
        backend.begin_replay(static, case.layout)
        kv = case.views.layers[1]
        backend.write_kv(kv, case.keys, case.values, static)
        for window, expected in case.expected.items():
            got = backend.attend(case.queries, case.keys, case.values, kv, static, window)
            torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [(32, 8), (32, 2), (64, 4), (128, 8), (20, 1), (48, 1), (4, 4), (6, 2)])
def test_flashinfers_workspace_is_as_large_as_its_plans_need(heads: tuple[int, int]) -> None:
    """The plans are those of any step, captured or not; log-sum-exp included."""
    backend, device = flashinfer_without_gpu(), torch.device("cpu")
    shape = Heads(*heads, 128)

    def layout_of(contexts: np.ndarray, counts: np.ndarray) -> BatchLayout:
        table = np.zeros((len(contexts), int(-(-contexts.max() // 128))), np.int32)
        return BatchLayout(contexts - counts, counts, table, 128, torch.bfloat16, device, (4096,), shape)

    larger = None
    for size in (256, 136, 64, 8, 1):
        ones = np.ones(size, np.int64)
        layout = layout_of(ones, ones)
        fields = backend.replay_fields(layout, 16)
        assert fields is not None
        inputs = StaticInputs(fields, device)
        inputs.fill(backend.replay_values(layout))
        larger = backend.allocate_replay(layout, inputs.tensors, 16, larger)
        for contexts in (ones, 2048 * ones, np.arange(1, size + 1)):
            inputs.fill(backend.replay_values(layout_of(contexts, ones)))
            backend.begin_replay(larger, layout_of(contexts, ones))
    for size in (1, 8, 64, 136, 256):
        ones = np.ones(size, np.int64)
        for contexts in (ones, 60_000 * ones, np.arange(1, size + 1) * 500):
            backend.prepare(layout_of(contexts, ones))
    for lengths in ([(0, 8192)], [(100_000, 64)], [(60_000, 1)] * 64 + [(3000, 300)], [(0, 7)] * 100):
        starts, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
        backend.prepare(layout_of(starts + counts, counts))


def test_flashinfers_workspace_grows_beside_what_was_captured() -> None:
    """Many rows are not divided over processors and need none, a few do."""
    backend, device = flashinfer_without_gpu(), torch.device("cpu")
    statics: list[tuple[StaticInputs, Any]] = []
    for size in (80, 3):
        case = make_case("cpu", [(9, 1)] * size, 32, heads=(4, 4), head_dim=64, dtype=torch.bfloat16)
        inputs = StaticInputs(backend.replay_fields(case.layout, 12) or {}, device)
        inputs.fill(backend.replay_values(case.layout))
        larger = statics[-1][1] if statics else None
        statics.append((inputs, backend.allocate_replay(case.layout, inputs.tensors, 12, larger)))
    many, few = (static.wrappers[None]._inner for _, static in statics)
    captured = many.workspace
    assert captured.numel() == 0 < few.workspace.numel()
    for seed in range(2):
        for inputs, static in statics:
            lengths = [((37 * i + 11 * seed) % 300, 1) for i in range(len(static.rows))]
            case = make_case("cpu", lengths, 32, heads=(4, 4), head_dim=64, dtype=torch.bfloat16, seed=seed)
            inputs.fill(backend.replay_values(case.layout))
            backend.begin_replay(static, case.layout)
            kv = case.views.layers[1]
            backend.write_kv(kv, case.keys, case.values, static)
            got = backend.attend(case.queries, case.keys, case.values, kv, static, None)
            torch.testing.assert_close(got.double(), case.expected[None], rtol=2e-2, atol=2e-2)
    assert many.workspace is captured


def test_page_locked_memory_of_plans_is_written_to_and_let_go_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives it to its next user at once; FlashInfer lets go of it with a wrapper and with `reset_workspace_buffer`."""
    used_too_early: list[str] = []
    planned: list[PageLocked] = []

    class PageLocked:
        is_read = False

        def check(self, what: str) -> None:
            if self.is_read:
                used_too_early.append(what)

        def __del__(self) -> None:
            self.check("let go")

    class Event:
        behind: PageLocked | None = None

        def record(self) -> None:
            self.behind = planned.pop()

        def synchronize(self) -> None:
            if self.behind is not None:
                self.behind.is_read = False
            self.behind = None

    class Watched(fake_flashinfer._PagedWrapper):
        def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
            super().reset_workspace_buffer(*buffers)
            self.page_locked = PageLocked()

        def _planned(self, *arguments: Any) -> None:
            self.page_locked.check("written")
            super()._planned(*arguments)
            self.page_locked.is_read = True
            planned.append(self.page_locked)
            num_plans.append(1)

    class Decode(Watched, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper): ...

    class Prefill(Watched, fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper): ...

    kernels = ModuleType("flashinfer")
    vars(kernels).update(
        BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill,
        append_paged_kv_cache=fake_flashinfer.append_paged_kv_cache,
    )  # fmt: skip
    num_plans: list[int] = []
    device = torch.device("cpu")
    backend = FlashInferBackend(device, TorchBackend(device), kernels)
    monkeypatch.setattr(flashinfer_backend, "_event", lambda _: Event())

    def step(lengths: Lengths, heads: tuple[int, int]) -> None:
        starts, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
        table = np.zeros((len(lengths), int(-(-(starts + counts).max() // 128))), np.int32)
        layout = BatchLayout(starts, counts, table, 128, torch.bfloat16, device, (64,), Heads(*heads, 128))
        backend.prepare(layout)

    for _ in range(2):
        step([(5000, 1)] * 4, (8, 2))
        step([(5000, 1)] * 4, (4, 4))
        step([(0, 300), (5000, 1)], (8, 2))
    for lengths in ([(60_000, 1)], [(60_000, 100)], [(50, 1)]):
        step(lengths, (48, 1))  # its workspace grows
    assert len(num_plans) >= 2 * (6 + 3)
    backend._wrappers.clear()
    gc.collect()
    assert not used_too_early


def test_a_model_that_flashinfer_cannot_decode_is_left_to_the_other(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        BatchDecodeWithPagedKVCacheWrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper

        @staticmethod
        def append_paged_kv_cache(*_: Any, **__: Any) -> None:
            raise RuntimeError("no kernel image is available")

    device = torch.device("cpu")
    backend = FlashInferBackend(device, TorchBackend(device), Broken)
    case = make_case("cpu", BATCHES["one decode"], 32, heads=(4, 1), head_dim=64, dtype=torch.bfloat16)
    check(backend, case, 2e-2)
    assert "no kernel image is available" in caplog.text
    assert backend.replay_fields(case.layout, 4) is None


def test_prompts_that_flashinfer_cannot_compute_are_left_to_the_other_alone(caplog: pytest.LogCaptureFixture) -> None:
    class WithoutPrompts:
        BatchDecodeWithPagedKVCacheWrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
        append_paged_kv_cache = staticmethod(fake_flashinfer.append_paged_kv_cache)

    device = torch.device("cpu")
    backend = FlashInferBackend(device, TorchBackend(device), WithoutPrompts)
    for name, has_wrapper in (("one later chunk", False), ("one decode", True)):
        case = make_case("cpu", BATCHES[name], 32, heads=(4, 1), head_dim=64, dtype=torch.bfloat16)
        check(backend, case, 2e-2)
        assert bool(backend._wrappers) == has_wrapper
    assert "does not compute prompts of" in caplog.text and "does not decode" not in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_prefers_kernels_of_its_own() -> None:
    names = [backend.facts.name for backend in choose_backends(torch.device("cuda"))]
    if len(names) == 1:
        pytest.skip("neither flash-attention nor FlashInfer is installed")
    assert names[0] != "torch" == names[-1]
