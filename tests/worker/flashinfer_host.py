"""Plans of FlashInfer's own host code, made by the attention back end on a machine without a GPU: a program, whose output is
JSON. It is run by test_flashinfer_host.py over cuda_runtime.c, which stands in for CUDA's runtime."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from services.worker.attention import flashinfer_backend
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.interface import BatchLayout, Heads
from services.worker.attention.torch_backend import TorchBackend
from services.worker.kv.kv_store import KvShape, KvStore
from services.worker.kv.transfer import StaticInputs
from services.worker.models.decode_graphs import captured_sizes
from tests.worker import fake_flashinfer

CPU = torch.device("cpu")
BLOCK_SIZE = 128
MAX_CONTEXT = 131_072
WINDOW = 4096
MAX_ROWS = 256
FIRST_DEVICE, *OTHER_DEVICES = [(132, 2), (132, 16), (108, 8), (148, 1)]
"""Processors, and blocks of the decode kernels that each runs at once, which is not known here. Each shape is planned on the
first and on one of the others."""
MAX_TOKENS_RUN = 1000
EAGER_ROWS = (1, 3, 50, 64, 137, 256)
PROMPTS = [
    [(0, 1)],
    [(0, 100)],
    [(0, 8192)],
    [(100_000, 64)],
    [(122_880, 8192)],
    [(0, 7)] * 100,
    [(60_000, 1)] * 63 + [(3000, 300)],
    [(100, 1), (0, 20), (50, 10), (131_071, 1), (0, 640), (0, 1), (300, 17), (640, 1)],
]


def import_flashinfer() -> Any:
    """Without a device there is no page-locked memory, nor a current one. The code that plans kernels for sliding windows,
    capped scores and, on tensor cores, heads of 64 is that of the others, which alone are compiled."""
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # type: ignore[assignment]
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    import flashinfer

    decode_module, prefill_module = (
        flashinfer.decode.get_batch_decode_module,
        flashinfer.prefill.get_batch_prefill_module,
    )

    def any_decode(*arguments: Any) -> Any:
        *types, dim_qk, dim_vo, encoding, _window, _softcap = arguments
        return decode_module(*types, dim_qk, dim_vo, encoding, False, False)

    def any_prefill(*arguments: Any) -> Any:
        *types, _dim_qk, _dim_vo, encoding, _window, _softcap, fp16 = arguments
        return prefill_module(*types, 128, 128, encoding, False, False, fp16)

    flashinfer.decode.get_batch_decode_module = any_decode
    flashinfer.decode.get_batch_prefill_module = flashinfer.prefill.get_batch_prefill_module = any_prefill
    return flashinfer


def contexts_of(num_rows: int) -> Iterator[np.ndarray]:
    """Short, long, one long among short, and any."""
    yield np.ones(num_rows, np.int64)
    yield np.full(num_rows, MAX_CONTEXT, np.int64)
    yield np.array([MAX_CONTEXT] + [1] * (num_rows - 1), np.int64)
    yield np.random.default_rng(num_rows).integers(1, 20_000, num_rows)


class Check:
    """A check of one shape of heads."""

    def __init__(self, kernels: Any, heads: Heads) -> None:
        self._kernels, self._heads = kernels, heads
        self._backend = FlashInferBackend(CPU, TorchBackend(CPU), kernels)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        self._captured()
        for rows in EAGER_ROWS:
            for contexts in contexts_of(rows):
                self._planned("eager", contexts, np.ones(rows, np.int64))
        for lengths in PROMPTS:
            starts, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
            self._planned("prompts", starts + counts, counts)

    def _captured(self) -> None:
        larger: Any = None
        for size in reversed(captured_sizes(MAX_ROWS)):
            ones = np.ones(size, np.int64)
            layout = self._layout(ones, ones)
            fields = self._backend.replay_fields(layout, MAX_CONTEXT // BLOCK_SIZE)
            assert fields is not None
            inputs = StaticInputs(fields, CPU)
            inputs.fill(self._backend.replay_values(layout))
            try:
                static = self._backend.allocate_replay(layout, inputs.tensors, MAX_CONTEXT // BLOCK_SIZE, larger)
            except RuntimeError as error:
                self._problem(f"captured {size}", error)
                continue
            baked_in = self._baked_in(static)
            for contexts in contexts_of(size):
                layout = self._layout(contexts, ones)
                inputs.fill(self._backend.replay_values(layout))
                try:
                    self._backend.begin_replay(static, layout)
                except RuntimeError as error:
                    self._problem(f"captured {size}, contexts of up to {contexts.max()}", error)
                    continue
                self.counts["captured"] += len(static.wrappers)
                if self._baked_in(static) != baked_in:
                    self._problem(f"captured {size}", "what a capture holds has changed")
            self._compare(f"captured {size}", layout, static)
            larger = static

    def _baked_in(self, static: Any) -> list[Any]:
        """What a captured launch has of its wrapper."""
        inners = [wrapper._inner for wrapper in static.wrappers.values()]
        return [
            (list(inner._plan_info), inner._float_workspace_buffer.data_ptr(), inner._int_workspace_buffer.data_ptr())
            for inner in inners
        ]

    def _planned(self, kind: str, contexts: np.ndarray, counts: np.ndarray) -> None:
        layout = self._layout(contexts, counts)
        what = f"{kind} of {len(counts)} sequences, {counts.sum()} tokens, contexts of up to {contexts.max()}"
        try:
            step = self._backend.prepare(layout)
        except RuntimeError as error:
            self._problem(what, error)
            return
        self.counts[kind] += len(step.wrappers)
        self._compare(what, layout, step)
        if counts.sum() <= MAX_TOKENS_RUN:
            self._ran(what, layout, step)

    def _ran(self, what: str, layout: BatchLayout, step: Any) -> None:
        """What is checked of tensors before a launch."""
        heads = self._heads
        shape = KvShape(1, BLOCK_SIZE, heads.keys, heads.dim, layout.dtype)
        (kv,) = KvStore(1, 2 * shape.block_bytes, CPU).attach(shape, 1).layers
        queries, keys, values = (
            torch.zeros(len(layout.positions), number, heads.dim, dtype=layout.dtype)
            for number in (heads.queries, heads.keys, heads.keys)
        )
        step.plan(layout)
        for window in step.wrappers:
            try:
                self._backend.attend(queries, keys, values, kv, step, window)
            except (RuntimeError, ValueError) as error:
                self._problem(f"{what}, run", error)
            self.counts["run"] += 1

    def _compare(self, what: str, layout: BatchLayout, step: Any) -> None:
        """The stand-in's demand with the real one, which is refused a byte below."""
        heads, inner = self._heads, step.wrappers[None]._inner
        starts, last = map(torch.from_numpy, flashinfer_backend._page_index(layout))
        arguments = (starts, step.pages[: int(starts[-1])], last, *heads[:3], BLOCK_SIZE)
        types = {"q_data_type": layout.dtype, "kv_data_type": layout.dtype}
        shape, is_fixed = (*heads[:3], BLOCK_SIZE), what.startswith("captured")
        rows = torch.from_numpy(layout.query_starts.astype(np.int32))
        if not layout.all_decode:
            arguments, types = (rows, *arguments), types | {"causal": True}  # type: ignore[assignment]
        if layout.all_decode and not inner.use_tensor_cores:
            expected = fake_flashinfer.decode_needs(starts, *shape, is_fixed=is_fixed)
        else:
            expected = fake_flashinfer.tensor_core_needs(rows, starts, *shape, -1, is_fixed=is_fixed)
        needs = inner.workspace_size(*arguments, **types)
        if needs != expected:
            self._problem(what, f"the stand-in says that {expected} bytes are needed, not {needs}")
        floats, ints = inner._float_workspace_buffer, inner._int_workspace_buffer
        for index in (0, 1):
            if needs[index] == 0:
                continue
            less = [floats[: needs[0]], ints[: needs[1]]]
            less[index] = less[index][:-1]
            inner.reset_workspace_buffer(*less)
            try:
                inner.plan(*arguments, **types)
            except RuntimeError as error:
                assert "Buffer overflow" in str(error), error
                self.counts["refused"] += 1
            else:
                self._problem(what, f"{needs} bytes are more than are needed")
        inner.reset_workspace_buffer(floats, ints)

    def _layout(self, contexts: np.ndarray, counts: np.ndarray) -> BatchLayout:
        table = np.zeros((len(contexts), int(-(-contexts.max() // BLOCK_SIZE))), np.int32)
        return BatchLayout(contexts - counts, counts, table, BLOCK_SIZE, torch.bfloat16, CPU, (WINDOW,), self._heads)

    def _problem(self, what: str, error: object) -> None:
        self.problems.append(f"{self._heads}, {what}: {str(error).splitlines()[-1]}")


def main() -> None:
    """Arguments: shapes of heads, each `queries,keys,dim,softcap`."""
    torch.set_num_threads(1)
    shapes = [Heads(int(q), int(k), int(d), float(cap)) for q, k, d, cap in (a.split(",") for a in sys.argv[1:])]
    kernels = import_flashinfer()
    flashinfer_backend._works = lambda *_, **__: True  # its kernels compute nothing here
    set_device = ctypes.CDLL(None).set_device
    counts: Counter[str] = Counter()
    problems: list[str] = []
    others = itertools.cycle(OTHER_DEVICES)
    for heads, (processors, blocks) in itertools.chain.from_iterable(
        ((heads, FIRST_DEVICE), (heads, next(others))) for heads in shapes
    ):
        set_device(processors, blocks)
        fake_flashinfer.NUM_PROCESSORS, fake_flashinfer.BLOCKS_PER_PROCESSOR = processors, blocks
        check = Check(kernels, heads)
        check.run()
        counts += check.counts
        problems += [f"{processors} processors of {blocks}: {problem}" for problem in check.problems]
    print(json.dumps({"counts": counts, "problems": problems}))


if __name__ == "__main__":
    main()
