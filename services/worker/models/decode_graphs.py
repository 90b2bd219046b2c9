"""Decode steps as CUDA graphs: one launch instead of a thousand.

A graph has a fixed number of rows, so decode batches are padded up to the next of a few batch sizes. Padding rows hold
one token each in the scratch block of the KV slab. All that a step must tell its graph goes there in one copy. A graph ends
before the logits: those and sampling run on the real rows; but the most likely tokens, which are all that greedy sequences
need, are a graph of their own behind it. All graphs are captured before the model serves, the largest first, so that the
others fit into its memory: they share one pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv_store import KvViews
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.ranks.group import GroupError
from services.worker.transfer import Field, StaticInputs

logger = logging.getLogger(__name__)

T = TypeVar("T", ForwardState, torch.Tensor)
R = TypeVar("R")

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


class Replayable(Protocol):
    def replay(self) -> None: ...


class Capture(Protocol):
    def __call__(self, function: Callable[[], T], /) -> tuple[T, Replayable]:
        """Records a function; each replay renews the result that came with the recording."""


@dataclass
class _Graph:
    inputs: StaticInputs
    batch: ForwardBatch
    state: ForwardState
    layers: Replayable
    most_likely: torch.Tensor
    head: Replayable
    """Makes `most_likely`."""


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
        all_can: Callable[[bool], bool] = lambda can: can,
    ) -> None:
        """`all_can`: whether all ranks that compute the model can go on, as they must together."""
        self._model, self._views, self._attention = model, views, attention
        self._max_pages = max_pages
        self._capture = capture
        self._all_can = all_can
        steps = range(_SIZE_STEP, max_rows + _SIZE_STEP, _SIZE_STEP)
        self._sizes = [s for s in _SMALL_SIZES if s <= max_rows] + list(steps)
        self._graphs: dict[int, _Graph] = {}
        for layer in views.layers:
            # Where padding rows are masked, NaN would still come through.
            layer.keys[views.num_blocks].zero_()
            layer.values[views.num_blocks].zero_()

    @property
    def num_captured(self) -> int:
        """Of the sizes."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """In any thread, while other models run. A size that cannot be captured, on one of several ranks, and those below
        it, run without."""
        for size in reversed(self._sizes):
            made = self._tried(size, partial(self._allocated, size))
            if not self._all_can(made is not None) or made is None:
                return
            graph = self._tried(size, partial(self._recorded, *made))
            if not self._all_can(graph is not None) or graph is None:
                return
            self._graphs[size] = graph

    def _tried(self, size: int, function: Callable[[], R | None]) -> R | None:
        try:
            return function()
        except GroupError:
            raise
        except Exception as error:
            logger.warning("decode steps of up to %d rows run without CUDA graphs: %s", size, error)
            return None

    def run(self, tokens: torch.Tensor, places: np.ndarray, layout: BatchLayout) -> ForwardState | None:
        """The state after all layers of a decode batch, of which only the first rows are real; valid until the next
        `run`. None if this batch cannot be replayed. `tokens`: int32 on the device, of which those at `places` ([S] int64)
        are computed."""
        size = next((size for size in self._sizes if size >= len(places)), 0)
        graph = self._graphs.get(size)
        if graph is None:
            return None
        padded = self._padded(layout, size)
        graph.inputs.fill(self._values(padded, np.pad(places, (0, size - len(places)))))
        self._attention.begin_replay(graph.batch.metadata, padded)
        torch.index_select(tokens, 0, graph.inputs.tensors["places"], out=graph.batch.token_ids)
        graph.layers.replay()

        def most_likely() -> torch.Tensor:
            graph.head.replay()
            found = graph.most_likely[: len(places)].clone()
            tokens.index_copy_(0, graph.inputs.tensors["places"][: len(places)] + 1, found.int())
            return found

        # the graph's tensors stay; what the caller does to the state must not reach them
        return replace(graph.state, most_likely=most_likely)

    def _values(self, layout: BatchLayout, places: np.ndarray) -> dict[str, np.ndarray]:
        return {"places": places, "positions": layout.positions, **self._attention.replay_values(layout)}

    def _padded(self, layout: BatchLayout, size: int) -> BatchLayout:
        missing = size - len(layout.counts)
        scratch = np.full((missing, layout.block_tables.shape[1]), self._views.num_blocks, np.int32)
        return replace(
            layout,
            starts=np.concatenate((layout.starts, np.zeros(missing, np.int64))),
            counts=np.ones(size, np.int64),
            block_tables=np.concatenate((layout.block_tables, scratch)),
        )

    def _allocated(self, size: int) -> tuple[StaticInputs, ForwardBatch] | None:
        """What a graph of that size reads; None: the attention back end has none."""
        model, device = self._model, self._model.device
        layout = BatchLayout(
            np.zeros(size, np.int64),
            np.ones(size, np.int64),
            np.full((size, 1), self._views.num_blocks, np.int32),
            self._views.shape.block_size,
            model.dtype,
            device,
            model.windows,
            model.heads,
        )
        attention_fields = self._attention.replay_fields(layout, self._max_pages)
        if attention_fields is None:
            return None
        own = {"places": Field(np.int64, size), "positions": Field(np.int64, size)}
        inputs = StaticInputs({**own, **attention_fields}, device)
        inputs.fill(self._values(layout, np.zeros(size, np.int64)))
        larger = next(reversed(self._graphs.values()), None)
        metadata: Any = self._attention.allocate_replay(
            layout, inputs.tensors, self._max_pages, None if larger is None else larger.batch.metadata
        )
        token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        return inputs, ForwardBatch(token_ids, inputs.tensors["positions"], self._views, self._attention, metadata)

    def _recorded(self, inputs: StaticInputs, batch: ForwardBatch) -> _Graph:
        model = self._model
        state, layers = self._capture(lambda: model.forward(batch))
        most_likely, head = self._capture(lambda: model.logits(state, None).argmax(-1))
        return _Graph(inputs, batch, state, layers, most_likely, head)


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(function: Callable[[], T], /) -> tuple[T, Replayable]:
        # once outside of the graph: libraries initialise themselves and kernels are compiled at first use
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be loading a model onto the device meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph

    return capture
