"""Paged attention with FlashInfer's kernels on CUDA (Ye et al. 2025).

FlashInfer divides long contexts over the processors of the device (split-KV), which flash-attention 4 does not on Hopper: a
decode of few sequences would leave most of them idle. Before a step's layers a plan says which processor reads what; its
wrappers keep it, one for each sliding window of the model and kind of step, and one for each captured size.

Their layout "HND" is ours: a page is `[kv_heads, page_size, head_dim]`, of any size and any stride between pages, K and V
apart.

A plan is made in page-locked memory of its wrapper and copied from there; before that copy is done, neither is the next made
there nor the memory let go. It is the first thing that a step puts on the device, and the step before the last has been
collected when the next is launched: there is hardly ever something to wait for.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.attention.facts import flashinfer
from services.worker.attention.flashinfer_modules import explain
from services.worker.attention.interface import AttentionBackend, BatchLayout, Heads
from services.worker.attention.torch_backend import TorchBackend
from services.worker.executor.suspension import Event, cuda_event
from services.worker.kv.kv_store import KvShape, KvStore, LayerKv
from services.worker.kv.transfer import Field, pack_to_device

logger = logging.getLogger(__name__)

LEAST_TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which on tensor cores decode faster than the kernels without (SGLang's rule for 16 bits)."""
_WORKSPACE_BYTES = 128 << 20
"""Workspace with which steps that are not captured begin: FlashInfer's own advice."""
_PLAN_BYTES = 2 << 20
"""And for their plans."""
_TOLERANCE = 2e-2


class FlashInferUnavailable(Exception):
    """It is not installed, or not for this device."""


class _Workspace:
    """Partial results of wrappers that run one after the other on one stream, and their plans. It grows by new memory: what
    was captured keeps its own."""

    def __init__(self, device: torch.device, num_bytes: int, num_plan_bytes: int) -> None:
        """Sizes to begin with; `num_plan_bytes`: of the plan of one window."""
        self.floats = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._num_plan_bytes = num_plan_bytes
        self._plans: dict[int | None, torch.Tensor] = {}

    def reserve(self, num_bytes: int) -> torch.Tensor:
        if self.floats.numel() < num_bytes:
            self.floats = torch.empty(num_bytes, dtype=torch.uint8, device=self.floats.device)
        return self.floats

    def reserve_plan(self, window: int | None, num_bytes: int) -> torch.Tensor:
        """Buffer for the plan of the window's layers: in a step all plans are made before its first layer."""
        plan = self._plans.get(window)
        if plan is None or plan.numel() < num_bytes:
            plan = torch.empty(max(num_bytes, self._num_plan_bytes), dtype=torch.uint8, device=self.floats.device)
            self._plans[window] = plan
        return plan


class _Wrapper:
    """FlashInfer's wrapper for one window, and when its page-locked memory may be written to."""

    def __init__(self, inner: Any, window: int | None, workspace: _Workspace) -> None:
        self._inner = inner
        self._window = window
        self._workspace = workspace
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        """Memory that it computes in: for partial results, for its plan."""
        self._copied = _event(workspace.floats.device)
        # torch hands page-locked memory to its next user as soon as it is let go: it does not know of FlashInfer's copy
        weakref.finalize(self, _let_go, inner, self._copied).atexit = False

    def plan(self, layout: BatchLayout, pages: torch.Tensor) -> None:
        """`pages`: int32, of all sequences, on the device."""
        arguments, options = self._arguments(layout, pages)
        self._copied.synchronize()
        self._make_room(*self._inner.workspace_size(*arguments, **options))
        self._inner.plan(*arguments, **options, non_blocking=True)
        self._copied.record()

    def replan(self, kernels: Any, layout: BatchLayout, pages: torch.Tensor) -> None:
        """Plans a captured batch again, in the memory that it has and with the values in its fields. FlashInfer's
        `plan` would copy those there once more, and compares lengths one by one in Python."""
        arguments, options = self._arguments(layout, pages)
        self._copied.synchronize()
        kernels.fast_decode_plan(self._inner, *arguments, **options, global_override_indptr_cpu=arguments[0])
        self._copied.record()

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self._inner.run(queries, cache, out=out)
        return out

    def _arguments(self, layout: BatchLayout, pages: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads = layout.heads
        assert heads is not None
        starts, last = map(torch.from_numpy, _page_index(layout))
        arguments = (starts, pages[: int(starts[-1])], last, heads.queries, heads.keys, heads.dim, layout.block_size)
        options = {
            "window_left": -1 if self._window is None else self._window - 1, "logits_soft_cap": layout.softcap,
            "q_data_type": layout.dtype, "kv_data_type": layout.dtype,
        }  # fmt: skip
        if layout.all_decode:
            return arguments, options
        query_starts = torch.from_numpy(layout.query_starts.astype(np.int32))
        longest = int(layout.counts.max())  # else Python finds it, tensor by tensor
        return (query_starts, *arguments), options | {"causal": True, "max_token_per_sequence": longest}

    def _make_room(self, num_bytes: int, num_plan_bytes: int) -> None:
        memory = self._workspace.reserve(num_bytes), self._workspace.reserve_plan(self._window, num_plan_bytes)
        if self._memory is None or any(new is not old for new, old in zip(memory, self._memory, strict=True)):
            self._memory = memory
            self._inner.reset_workspace_buffer(*memory)


def _let_go(inner: Any, copied: Event) -> None:
    """The end of a wrapper, and with it of FlashInfer's."""
    copied.synchronize()


class _NoEvent:
    """Stands for an event where copies are done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _event(device: torch.device) -> Event:
    event: Event = cuda_event() if device.type == "cuda" else _NoEvent()
    return event


@dataclass
class _Step:
    """A step of S sequences and T tokens."""

    rows: torch.Tensor
    """[T] int32: the sequence of each token."""
    positions: torch.Tensor
    """[T] int32: of the tokens."""
    starts: torch.Tensor
    """[S + 1] int32: where each sequence's pages begin in `pages`."""
    last: torch.Tensor
    """[S] int32: keys in its last page, this step's included."""
    pages: torch.Tensor
    """int32"""
    wrappers: dict[int | None, _Wrapper]
    """By window."""
    workspace: _Workspace
    """Smaller captured sizes share a captured one's."""

    def plan(self, layout: BatchLayout) -> None:
        """`layout`: what the fields were filled from."""
        for wrapper in self.wrappers.values():
            wrapper.plan(layout, self.pages)

    def replan(self, kernels: Any, layout: BatchLayout) -> None:
        """Plans a captured step again."""
        for wrapper in self.wrappers.values():
            wrapper.replan(kernels, layout, self.pages)


class FlashInferBackend(AttentionBackend):
    """Attention by FlashInfer's kernels. A step goes as follows:

    - decodes of few query heads a KV head: FlashInfer's decode kernels;
    - decodes of more: the tensor-core kernels of its paged prefill, through the decode wrapper;
    - all else, which is prompts from their start or behind a cached prefix, whole or in chunks, in any mix with decodes: the
      same tensor-core kernels, through the prefill wrapper; or the other back end, where that is made for prompts;
    - what its kernels turn out not to run, as a self-test at the model's loading shows: the other back end.
    """

    def __init__(
        self, device: torch.device, other: AttentionBackend, kernels: Any = None, *, takes_prompts: bool = True
    ) -> None:
        """`takes_prompts`: else steps with more than decodes are the other's. `kernels`: the package `flashinfer`, or what
        has its signatures; None: it is imported. Raises `FlashInferUnavailable`."""
        self._kernels = _import() if kernels is None else kernels
        self._device = device
        self._other = other
        self._takes_prompts = takes_prompts
        self.facts = flashinfer(other.facts, takes_prompts=takes_prompts)
        self._workspace: _Workspace | None = None
        self._wrappers: dict[tuple[int | None, bool, bool], _Wrapper] = {}
        """By window, whether they decode, and on tensor cores."""

    def prepare(self, layout: BatchLayout) -> Any:
        return self.prepare_step(layout) if self._runs(layout) else self._other.prepare(layout)

    def prepare_step(self, layout: BatchLayout) -> _Step:
        """Prepares a step that its kernels run."""
        values = _values(layout)
        rows = layout.sequence_of_token.astype(np.int32)
        positions, starts, last, pages, of_rows = pack_to_device([*values.values(), rows], layout.device)
        if self._workspace is None:
            self._workspace = _Workspace(layout.device, _WORKSPACE_BYTES, _PLAN_BYTES)
        wrappers = {window: self._eager(window, layout, self._workspace) for window in (None, *layout.windows)}
        step = _Step(of_rows, positions, starts, last, pages, wrappers, self._workspace)
        step.plan(layout)
        return step

    def write_kv(self, kv: LayerKv, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> None:
        if not isinstance(metadata, _Step):
            self._other.write_kv(kv, keys, values, metadata)
            return
        self._kernels.append_paged_kv_cache(
            keys, values, metadata.rows, metadata.positions, _cache(kv), metadata.pages, metadata.starts, metadata.last,
            kv_layout="HND",
        )  # fmt: skip

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: Any,
        window: int | None,
    ) -> torch.Tensor:
        if not isinstance(metadata, _Step):
            return self._other.attend(queries, keys, values, kv, metadata, window)
        return metadata.wrappers[window].run(queries, _cache(kv))

    def replay_fields(self, layout: BatchLayout, max_pages: int) -> Mapping[str, Field] | None:
        if not self._runs(layout):
            return self._other.replay_fields(layout, max_pages)
        num_rows = len(layout.counts)
        return {
            "kv_positions": Field(np.int32, num_rows),
            "page_starts": Field(np.int32, num_rows + 1),
            "last_page": Field(np.int32, num_rows),
            "pages": Field(np.int32, num_rows * max_pages),
        }

    def replay_values(self, layout: BatchLayout) -> Mapping[str, np.ndarray]:
        return _values(layout) if self._runs(layout) else self._other.replay_values(layout)

    def allocate_replay(
        self, layout: BatchLayout, fields: Mapping[str, torch.Tensor], max_pages: int, larger: Any | None
    ) -> Any:
        if not self._runs(layout):
            return self._other.allocate_replay(layout, fields, max_pages, larger)
        workspace = _Workspace(layout.device, 0, 0) if larger is None else larger.workspace
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": fields["page_starts"],
            "paged_kv_indices_buffer": fields["pages"],
            "paged_kv_last_page_len_buffer": fields["last_page"],
        }
        rows = torch.arange(len(layout.counts), dtype=torch.int32, device=layout.device)
        step = _Step(
            rows, fields["kv_positions"], fields["page_starts"], fields["last_page"], fields["pages"],
            {window: self._new_wrapper(window, layout, workspace, **buffers) for window in (None, *layout.windows)},
            workspace,
        )  # fmt: skip
        step.plan(layout)
        return step

    def begin_replay(self, static: Any, layout: BatchLayout) -> None:
        if isinstance(static, _Step):
            static.replan(self._kernels, layout)
        else:
            self._other.begin_replay(static, layout)

    def _runs(self, layout: BatchLayout) -> bool:
        heads, is_decode = layout.heads, layout.all_decode
        assert heads is not None
        return (is_decode or self._takes_prompts) and all(
            _works(self._kernels, heads, layout.dtype, window, self._device, is_decode=is_decode)
            for window in (None, *layout.windows)
        )

    def _eager(self, window: int | None, layout: BatchLayout, workspace: _Workspace) -> _Wrapper:
        key = window, layout.all_decode, _uses_tensor_cores(layout)
        if key not in self._wrappers:
            self._wrappers[key] = self._new_wrapper(window, layout, workspace)
        return self._wrappers[key]

    def _new_wrapper(self, window: int | None, layout: BatchLayout, workspace: _Workspace, **options: Any) -> _Wrapper:
        if not layout.all_decode:
            inner = self._kernels.BatchPrefillWithPagedKVCacheWrapper(workspace.floats, "HND", backend="fa2")
        elif _uses_tensor_cores(layout):
            inner = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
                workspace.floats, "HND", use_tensor_cores=True, backend="fa2", **options
            )
        else:
            inner = self._kernels.BatchDecodeWithPagedKVCacheWrapper(workspace.floats, "HND", **options)
        return _Wrapper(inner, window, workspace)


def _import() -> Any:
    try:
        import flashinfer
    # It checks versions of its own parts and of the device when it is imported, with errors of any kind.
    except Exception as error:
        raise FlashInferUnavailable(f"flashinfer cannot be used ({type(error).__name__}: {error})") from None
    return flashinfer


def _cache(kv: LayerKv) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each `[pages, kv_heads, page_size, head_dim]`."""
    return kv.keys.transpose(1, 2), kv.values.transpose(1, 2)


def _uses_tensor_cores(layout: BatchLayout) -> bool:
    assert layout.heads is not None
    return layout.heads.queries >= LEAST_TENSOR_CORE_GROUP * layout.heads.keys


def _values(layout: BatchLayout) -> dict[str, np.ndarray]:
    """Values of the fields, in the order of `_Step`'s."""
    page_starts, last_page = _page_index(layout)
    is_taken = np.arange(layout.block_tables.shape[1]) < np.diff(page_starts)[:, None]
    return {
        "kv_positions": layout.positions.astype(np.int32),
        "page_starts": page_starts,
        "last_page": last_page,
        "pages": layout.block_tables[is_taken],
    }


def _page_index(layout: BatchLayout) -> tuple[np.ndarray, np.ndarray]:
    """`starts` and `last` of a `_Step`."""
    num_pages = -(-layout.contexts // layout.block_size)
    starts = np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32)
    return starts, (layout.contexts - (num_pages - 1) * layout.block_size).astype(np.int32)


def _works(
    kernels: Any, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device, *, is_decode: bool
) -> bool:
    """Whether the kernels for such models can be had and give what the definition of attention gives. Compiles them."""
    try:
        return _worked(kernels, heads, dtype, window, device, is_decode=is_decode)
    except torch.OutOfMemoryError as error:  # which says nothing of the next time
        logger.warning("FlashInfer does not run %s in %s: %s", heads, dtype, str(error))
        return False


@functools.cache
def _worked(
    kernels: Any, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device, *, is_decode: bool
) -> bool:
    try:
        _test(kernels, heads, dtype, window, device, is_decode=is_decode)
    except torch.OutOfMemoryError:
        raise
    # Compilers and drivers raise errors of any kind.
    except Exception as error:
        what = "decode" if is_decode else "compute prompts of"
        logger.warning("FlashInfer does not %s %s in %s: %s", what, heads, dtype, explain(error))
        return False
    return True


@torch.inference_mode()
def _test(
    kernels: Any, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device, *, is_decode: bool
) -> None:
    """Raises `AssertionError` where they give another result. Three sequences on scattered pages with gaps in between:
    decodes, or one, a first chunk, and a chunk behind a prefix."""
    generator = torch.Generator().manual_seed(0)
    tables = np.array([[7, 7, 7, 7, 7], [2, 2, 2, 2, 2], [6, 0, 3, 1, 5]], np.int32)
    contexts = np.array([1, 16, 75], np.int64)
    counts = np.ones(3, np.int64) if is_decode else np.array([1, 16, 38], np.int64)
    shape = KvShape(1, 16, heads.keys, heads.dim, dtype)
    store = KvStore(8, 2 * shape.block_bytes, device)
    views = store.attach(shape, 1)
    (kv,) = views.layers
    for half in (kv.keys, kv.values):
        half.copy_(torch.randn(half.shape, generator=generator))
    windows = () if window is None else (window,)
    layout = BatchLayout(contexts - counts, counts, tables, 16, dtype, device, windows, heads)

    def random(num_heads: int) -> torch.Tensor:
        return torch.randn(int(counts.sum()), num_heads, heads.dim, generator=generator).to(device, dtype)

    queries, keys, values = random(heads.queries), random(heads.keys), random(heads.keys)
    backend = FlashInferBackend(device, TorchBackend(device), kernels)
    step = backend.prepare_step(layout)
    backend.write_kv(kv, keys, values, step)
    got = backend.attend(queries, keys, values, kv, step, window)
    for row, (context, count) in enumerate(zip(contexts.tolist(), counts.tolist(), strict=True)):
        pages = torch.from_numpy(tables[row, : -(-context // 16)]).long().to(device)
        cached = [half[pages].flatten(0, 1)[:context] for half in (kv.keys, kv.values)]
        own = slice(int(layout.query_starts[row]), int(layout.query_starts[row + 1]))
        assert torch.equal(cached[0][-count:], keys[own]) and torch.equal(cached[1][-count:], values[own])
        expected = _definition(queries[own], cached[0], cached[1], heads, window)
        torch.testing.assert_close(got[own].float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _definition(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: Heads, window: int | None
) -> torch.Tensor:
    """Attention of a sequence's last tokens in float32, written out."""
    keys, values = (x.float().repeat_interleave(heads.queries // heads.keys, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) / math.sqrt(heads.dim)
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    key = torch.arange(len(keys), device=keys.device)
    query = key[-len(queries) :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)
