"""Decode steps as CUDA graphs: one launch instead of a thousand.

A graph has a fixed number of rows, so decode batches are padded up to the next of a few batch sizes. Padding rows hold
one token each in the scratch block of the KV slab. All that a step must tell its graph goes there in one copy. A graph ends
before the logits: those and sampling run on the real rows; but the most likely tokens, which are all that greedy sequences
need, are a graph of their own behind it. All graphs are captured before the model serves, the largest first, so that the
others fit into its memory: they share one pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.executor.sampling import most_likely
from services.worker.kv.kv_store import KvViews
from services.worker.kv.transfer import Field, StaticInputs
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.ranks.group import GroupError

logger = logging.getLogger(__name__)

T = TypeVar("T", ForwardState, torch.Tensor)
R = TypeVar("R")

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_FAILURES = 3
"""Sizes that cannot be captured, after which no other is tried."""


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


def captured_sizes(max_rows: int) -> list[int]:
    """Rows of the graphs for decode batches of up to `max_rows`, ascending."""
    return [s for s in _SMALL_SIZES if s <= max_rows] + list(range(_SIZE_STEP, max_rows + _SIZE_STEP, _SIZE_STEP))


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
        self._sizes = captured_sizes(max_rows)
        self._graphs: dict[int, _Graph] = {}
        self._discarded: list[Replayable] = []
        """Their end would take working memory with it that the others use (`CudaCapture`)."""
        for layer in views.layers:
            # Where padding rows are masked, NaN would still come through.
            layer.keys[views.num_blocks].zero_()
            layer.values[views.num_blocks].zero_()

    @property
    def num_captured(self) -> int:
        """How many sizes are captured."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """In any thread, while other models run. Where a size cannot be captured, on one of several ranks, the next one that
        is tried has half as many rows at most. After a few failures the rest run without, and so does all of a model that
        says that it cannot be captured."""
        if not self._model.can_be_captured:
            logger.info("decode steps run without CUDA graphs: layers of this model wait for the device")
            return
        most, num_failures = self._sizes[-1], 0
        for size in reversed(self._sizes):
            if size > most or num_failures == _MAX_FAILURES:
                continue
            graph = self._captured(size)
            if graph is None:
                most, num_failures = size // 2, num_failures + 1
            else:
                self._graphs[size] = graph

    def _captured(self, size: int) -> _Graph | None:
        """None where some rank cannot. All are asked before each part, since what a part computes needs all of them."""
        made = self._agreed(size, partial(self._allocated, size))
        if made is None:
            return None
        inputs, batch = made
        layers = self._agreed(size, lambda: self._capture(lambda: self._model.forward(batch)))
        if layers is None:
            return None
        state = layers[0]
        head = self._agreed(size, lambda: self._capture(lambda: most_likely(self._model.logits(state, None))))
        if head is None:
            self._discarded.append(layers[1])
            return None
        return _Graph(inputs, batch, state, layers[1], *head)

    def _agreed(self, size: int, function: Callable[[], R | None]) -> R | None:
        """What it gives, if it gives something on all ranks."""
        made = self._tried(size, function)
        return made if self._all_can(made is not None) else None

    def _tried(self, size: int, function: Callable[[], R | None]) -> R | None:
        try:
            return function()
        except GroupError:
            raise
        except Exception as error:
            # Its text alone: a record that is kept would keep the model, by the frames of the error.
            logger.warning("decode steps of up to %d rows run without CUDA graphs: %s", size, str(error))
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

        def replayed() -> torch.Tensor:
            graph.head.replay()
            found = graph.most_likely[: len(places)].clone()
            places_after = graph.inputs.tensors["places"][: len(places)] + 1
            tokens.index_copy_(0, places_after, found.int().clamp_(min=0))
            return found

        # the graph's tensors stay; what the caller does to the state must not reach them
        return replace(graph.state, most_likely=replayed)

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


class CudaCapture:
    """Captures the CUDA graphs of one model, in a memory pool that they share.

    The rest of the process goes on meanwhile: nothing waits for the device and no cache is emptied, as `torch.cuda.graph`
    does before each capture. Calls raise what the function or the capture raised; later captures then take another pool.

    Libraries keep working memory for each stream, whose address is in graphs that were captured there, and torch frees it
    when one of these graphs goes. So no other model and no other thread has this stream while the model is here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = None

    def __call__(self, function: Callable[[], T], /) -> tuple[T, Replayable]:
        device, stream = self._device, self._own_stream()
        # once outside of the graph: libraries initialise themselves and kernels are compiled at first use
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                function()
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _no_garbage_collected():
            try:
                # thread_local: another thread may be loading a model onto the device meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            except RuntimeError:
                _end_recording(device, self._pool)
                raise
            try:
                try:
                    result = function()
                finally:
                    graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return result, graph

    def _own_stream(self) -> Any:
        if self._stream is None:
            self._stream, key = _take_stream(self._device)
            weakref.finalize(self, _taken.discard, key).atexit = False
        return self._stream

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that failed. torch up to 2.11 goes on recording to its pool, and while it does, gives no cached
        memory of the device back. Releases differ in whether the graph's end gives its share of the pool back, and 2.11's
        allocator of page-locked memory may ask the graph later: so it never ends, and its share is given back here."""
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        _end_recording(self._device, pool, has_begun=True)


_taken: set[tuple[int, int]] = set()
"""Device and handle of each stream that a model has for its captures."""
_NUM_STREAMS = 32
"""Streams of a priority that torch hands out again and again."""


def _take_stream(device: torch.device) -> tuple[Any, tuple[int, int]]:
    """One of high priority, since nobody else asks for those, that no model has. Raises `RuntimeError` if none is left."""
    for _ in range(_NUM_STREAMS):
        stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        key = stream.device.index, stream.cuda_stream
        if key not in _taken:
            _taken.add(key)
            return stream, key
    raise RuntimeError(f"{_NUM_STREAMS} models have all streams on which decodes can be captured")


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """What a collection frees may call what a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end_recording(device: torch.device, pool: tuple[int, int], *, has_begun: bool = False) -> None:
    """`has_begun`: the graph has a share of the pool, which is given back; else only if the pool is being recorded to."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it says so where that has ended
        torch._C._cuda_endAllocateToPool(index, pool)
        has_begun = True
    if has_begun:
        torch._C._cuda_releasePool(index, pool)
