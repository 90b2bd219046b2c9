"""Decode steps as CUDA graphs: one launch instead of a thousand.

A graph has a fixed number of rows, so decode batches are padded up to the next of a few batch sizes. Padding rows hold
one token each in the scratch block of the KV slab. A graph ends before the logits: those and sampling run on the real
rows. All graphs are captured before the model serves, the largest first, so that the others fit into its memory: they share
one pool.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv_store import KvViews
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


class Replayable(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Callable[[], ForwardState]], tuple[ForwardState, Replayable]]
"""Records a function; each replay renews the state that came with the recording."""


@dataclass
class _Graph:
    batch: ForwardBatch
    state: ForwardState
    graph: Replayable


class DecodeGraphs:
    """The graphs of one model."""

    def __init__(
        self,
        model: DecoderModel,
        views: KvViews,
        attention: AttentionBackend,
        max_rows: int,
        max_pages: int,
        capture: Capture,
    ) -> None:
        self._model, self._views, self._attention = model, views, attention
        self._max_pages = max_pages
        self._capture = capture
        steps = range(_SIZE_STEP, max_rows + _SIZE_STEP, _SIZE_STEP)
        self._sizes = [s for s in _SMALL_SIZES if s <= max_rows] + list(steps)
        self._graphs: dict[int, _Graph] = {}
        for layer in views.layers:
            # Where padding rows are masked, NaN would still come through.
            layer.keys[views.num_blocks].zero_()
            layer.values[views.num_blocks].zero_()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """In any thread, while other models run. A size that cannot be captured, and those below it, run without."""
        for size in reversed(self._sizes):
            try:
                graph = self._record(size)
            except Exception as error:
                logger.warning("decode steps of up to %d rows run without CUDA graphs: %s", size, error)
                return
            if graph is None:
                return
            self._graphs[size] = graph

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, layout: BatchLayout) -> ForwardState | None:
        """The state after all layers of a decode batch, of which only the first rows are real; valid until the next
        `run`. None if this batch cannot be replayed. `token_ids`, `positions`: [S] on the device."""
        size = self._sizes[bisect_left(self._sizes, len(token_ids))]
        graph = self._graphs.get(size)
        if graph is None:
            return None
        padded = self._padded(layout, size)
        self._attention.fill_replay(graph.batch.metadata, padded)
        graph.batch.token_ids[: len(token_ids)].copy_(token_ids)
        graph.batch.positions[: len(positions)].copy_(positions)
        graph.graph.replay()
        # the graph's tensors stay; what the caller does to the state must not reach them
        return replace(graph.state)

    def _padded(self, layout: BatchLayout, size: int) -> BatchLayout:
        missing = size - len(layout.counts)
        scratch = np.full((missing, layout.block_tables.shape[1]), self._views.num_blocks, np.int32)
        return replace(
            layout,
            starts=np.concatenate((layout.starts, np.zeros(missing, np.int64))),
            counts=np.ones(size, np.int64),
            block_tables=np.concatenate((layout.block_tables, scratch)),
        )

    def _record(self, size: int) -> _Graph | None:
        model, ones = self._model, np.ones(size, np.int64)
        tables = np.full((size, 1), self._views.num_blocks, np.int32)
        layout = BatchLayout(
            np.zeros(size, np.int64),
            ones,
            tables,
            self._views.shape.block_size,
            model.dtype,
            model.device,
            model.windows,
        )
        metadata: Any = self._attention.allocate_replay(layout, self._max_pages)
        if metadata is None:
            return None
        zeros = torch.zeros(len(layout.counts), dtype=torch.int64, device=layout.device)
        batch = ForwardBatch(zeros, zeros.clone(), self._views, self._attention, metadata)
        return _Graph(batch, *self._capture(lambda: self._model.forward(batch)))


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(forward: Callable[[], ForwardState]) -> tuple[ForwardState, Replayable]:
        # once outside of the graph: libraries initialise themselves and kernels are compiled at first use
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be loading a model onto the device meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            state = forward()
        return state, graph

    return capture
