"""FlashInfer's calls as kernels of the emulated device: the stand-in in plain torch (tests/worker/fake_flashinfer.py)
computes them; here is what they read and write, and when. A plan is written to page-locked memory by the host and copied
from there by a call that torch's allocator does not know of."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.emulated_cuda.device import CudaError, Span, place, plain
from tests.emulated_cuda.tensors import DeviceTensor, device, inner_of, kernel, on_device, repeatable
from tests.worker import fake_flashinfer as fake

PLAN_BYTES = 64
"""Bytes of the page-locked memory, standing for all of it."""

Cache = tuple[torch.Tensor, torch.Tensor]


def pages_of(cache: torch.Tensor, pages: Sequence[int]) -> list[Span]:
    """Pages of K or V, `[pages, kv_heads, page_size, head_dim]`: one run each."""
    first, step = device.span(cache[:1]), cache.stride(0) * cache.itemsize
    return [Span(first.key, first.begin + page * step, first.end + page * step) for page in sorted(set(pages))]


def wrapper_of(kind: Any) -> Any:
    class Wrapper:
        def __init__(self, floats: torch.Tensor, *args: Any, **options: Any) -> None:
            self._is_fixed = bool(options.get("use_cuda_graph"))
            with plain():
                self._fake = kind(inner_of(floats), *args, **{k: inner_of(v) for k, v in options.items()})
            self.reset_workspace_buffer(floats, on_device(self._fake.int_workspace))

        def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
            self._floats, self._ints = floats, ints
            with plain():
                self._fake.reset_workspace_buffer(inner_of(floats), inner_of(ints))
            self._planned = torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)

        def workspace_size(self, *args: Any, **kwargs: Any) -> Any:
            with plain():
                return self._fake.workspace_size(*map(inner_of, args), **kwargs)

        def plan(self, *args: Any, **kwargs: Any) -> None:
            self.planned_by(self._fake.plan, *args, **kwargs)
            if self._is_fixed:
                kernel(f"fields of a plan {place()}", _nothing, [], list(self._fake.buffers), has_run=True)

        def planned_by(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            if device.captured_here() is not None:
                device.forbidden("a plan of FlashInfer")
            device.touched_by_host(self._planned, True)
            with plain():
                function(*map(inner_of, args), **kwargs)
            # A plain copy of CUDA's runtime: torch does not know that the page-locked memory is in use.
            ints = inner_of(self._ints)[:PLAN_BYTES]
            kernel(f"copy of a plan {place()}", _nothing, [self._planned], [ints], has_run=True)

        def run(self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor) -> torch.Tensor:
            k, v = (inner_of(x) for x in paged_kv_cache)
            ints, fields = inner_of(self._ints)[:PLAN_BYTES], list(self._fake.buffers)
            inner, is_fixed = self._fake, self._is_fixed

            def attend(
                queries: torch.Tensor, _: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
            ) -> None:
                if is_fixed:
                    inner.plan_id = int(inner.plan_memory)  # a kernel reads what lies there when it runs
                inner.run(queries, (k, v), out=rest[-1])

            def spans(
                queries: torch.Tensor, ints: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
            ) -> tuple[list[Span], list[Span]]:
                starts, pages, _ = inner.buffers
                used = pages[: int(starts[-1])].tolist()
                reads = device.spans([queries, ints, *rest[:-1]])
                return [*reads, *pages_of(k, used), *pages_of(v, used)], [device.span(rest[-1])]

            kernel(f"attention {place()}", attend, [inner_of(q), ints, k, v, *fields], [inner_of(out)], spans)
            return out

    Wrapper.__name__ = kind.__name__
    return Wrapper


def fast_decode_plan(wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Plans a captured decode, whose fields have their values."""
    wrapper.planned_by(functools.partial(fake.fast_decode_plan, wrapper._fake), *args, **kwargs)


def _nothing(*_: torch.Tensor) -> None:
    pass


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: Cache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    given = (append_key, append_value, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    if not all(isinstance(x, DeviceTensor) for x in given):
        raise CudaError("append_paged_kv_cache: all of its tensors must be on the device")

    def run(*given: torch.Tensor) -> None:
        key, value, rows, places, indices, starts, last, k, v = given
        fake.append_paged_kv_cache(key, value, rows, places, (k, v), indices, starts, last, kv_layout)

    def spans(*given: torch.Tensor) -> tuple[list[Span], list[Span]]:
        _, _, rows, places, indices, starts, _, *caches = given
        size, pages, first_pages, written = caches[0].shape[2], indices.tolist(), starts.tolist(), []
        for cache in caches:
            first = device.span(cache[:1, :1, :1])
            of_page, of_head, of_token = (cache.stride(axis) * cache.itemsize for axis in range(3))
            for row, position in zip(rows.tolist(), places.tolist(), strict=True):
                page, offset = pages[first_pages[row] + position // size], position % size
                for head in range(cache.shape[1]):
                    shift = page * of_page + head * of_head + offset * of_token
                    written.append(Span(first.key, first.begin + shift, first.end + shift))
        return device.spans(given[:7]), written

    caches = [inner_of(x) for x in paged_kv_cache]
    kernel(f"append {place()}", run, [inner_of(x) for x in given], caches, spans)


def function_of(function: Callable[..., Any], changed: Sequence[int] = ()) -> Callable[..., Any]:
    """`changed`: which of its arguments it writes to."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors, again = repeatable(function, args, kwargs)
        num_tensors = len(tensors)
        at = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]

        with plain():
            made = again(*tensors)
        outs = [] if made is None else [device.placed(made)]

        def run(*given: torch.Tensor) -> None:
            result = again(*given[:num_tensors])
            if result is not None:
                given[-1].copy_(result)

        def spans(*given: torch.Tensor) -> tuple[list[Span], list[Span]]:
            written = [given[at.index(i)] for i in changed] + list(given[num_tensors:])
            return device.spans(given[:num_tensors]), device.spans(written)

        kernel(f"{function.__name__} {place()}", run, tensors, outs, spans, has_run=True)
        return on_device(outs[0], args[0].device.index) if outs else None

    call.__name__ = function.__name__
    return call


def _module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(members)
    return made


norm = _module(
    "flashinfer.norm", rmsnorm=function_of(fake.norm.rmsnorm),
    fused_add_rmsnorm=function_of(fake.norm.fused_add_rmsnorm, [0, 1]),
)  # fmt: skip
activation = _module("flashinfer.activation", silu_and_mul=function_of(fake.activation.silu_and_mul))
rope = _module(
    "flashinfer.rope",
    apply_rope_with_cos_sin_cache_inplace=function_of(fake.rope.apply_rope_with_cos_sin_cache_inplace, [1, 2]),
)
package = _module(
    "flashinfer", append_paged_kv_cache=append_paged_kv_cache, fast_decode_plan=fast_decode_plan, norm=norm,
    activation=activation, rope=rope,
    **{name: wrapper_of(kind) for name, kind in vars(fake).items() if name.startswith("Batch")},
)  # fmt: skip


def install(modules: dict[str, types.ModuleType]) -> None:
    for module in (package, norm, activation, rope):
        modules[module.__name__] = module
