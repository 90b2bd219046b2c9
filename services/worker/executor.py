"""Runs step plans on a device: the only place of a worker where tensors are computed.

Each sequence has a row: its tokens (on the device, so that a sampled token feeds the next step without a round trip),
its block table and its sampling parameters (on the host). A plan changes rows and names those to run.

`launch` puts a step on the device and `collect` waits for the oldest one launched; two steps may be in flight on CUDA.
On CPU `launch` has computed the step when it returns. `prepare_model` may be called from another thread while steps run;
everything else belongs to one thread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.worker.attention.choice import choose_backends
from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv_store import KvStore, KvViews
from services.worker.machine import free_memory_bytes
from services.worker.models.decode_graphs import Capture, DecodeGraphs, cuda_capture
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.models.loading import load_model
from services.worker.sampling import SampledTokens, SamplingRows
from services.worker.transfer import to_device
from shared import checkpoint
from shared.checkpoint import CheckpointError
from shared.engine import slab
from shared.engine.plan import ModelShape, NewSequence, StepPlan, StepResult
from shared.messages import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedModel:
    """Weights on the device, not yet part of an executor."""

    name: str
    model: DecoderModel
    max_model_len: int
    page_tokens: int
    backend: AttentionBackend


@dataclass
class _Loaded:
    model: DecoderModel
    views: KvViews
    backend: AttentionBackend
    page_tokens: int
    max_model_len: int
    graphs: DecodeGraphs | None


@dataclass
class _Launched:
    """A step on the device, or the error that kept it off."""

    step_id: int
    sampled: SampledTokens | None = None
    host_tokens: torch.Tensor | None = None
    done: torch.cuda.Event | None = None
    error: str = ""


class Executor:
    def __init__(
        self,
        device: str | torch.device,
        num_merged: int,
        merged_bytes: int,
        num_rows: int,
        *,
        capture: Capture | None = None,
    ) -> None:
        """`num_rows`: sequences held at once at most. `capture`: records decode graphs; None: CUDA's on CUDA, else none
        are used."""
        self.device = torch.device(device)
        self.num_rows = num_rows
        self._store = KvStore(num_merged, merged_bytes, self.device)
        self._backends = choose_backends(self.device)
        if capture is None and self.device.type == "cuda":
            capture = cuda_capture(self.device)
        self._capture = capture
        self._models: dict[str, _Loaded] = {}
        self._tokens = torch.zeros(num_rows, 1, dtype=torch.int32, device=self.device)
        self._tables = np.zeros((num_rows, 1), np.int32)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._sampling = SamplingRows(num_rows)
        self._launched: deque[_Launched] = deque()

    # ------------------------------------------------------------------------------------------------ models

    def prepare_model(self, spec: ModelSpec) -> PreparedModel:
        """Reads a checkpoint (blocking: seconds to minutes). Raises `CheckpointError`."""
        path: Path = checkpoint.resolve(spec.source)
        model, max_model_len = load_model(path, self.device, dtype=spec.dtype, max_model_len=spec.max_model_len)
        backend, page_tokens = _choose(self._backends, model)
        # back ends belong to the thread of the steps, so this one uses its own
        _warm_up(model, *_choose(choose_backends(self.device), model), self.device)
        return PreparedModel(spec.name, model, max_model_len, page_tokens, backend)

    @torch.inference_mode()
    def add_model(self, prepared: PreparedModel) -> ModelShape:
        """Lets plans name the model. Raises `CheckpointError` if its KV blocks do not fit this executor's pool."""
        if prepared.name in self._models:
            raise ValueError(f"model {prepared.name!r} is here already")
        shape = prepared.model.kv_shape(prepared.page_tokens)
        merged_bytes = self._store.merged_bytes
        slots_per_merged = slab.slots_per_merged(merged_bytes, shape.slot_bytes)
        if slots_per_merged == 0:
            raise CheckpointError(
                f"a KV block of {prepared.name!r} takes {shape.slot_bytes} bytes, but the pool is cut into "
                f"{merged_bytes}; the pool must be laid out for this model."
            )
        views = self._store.attach(shape, slots_per_merged)
        max_blocks = -(-prepared.max_model_len // prepared.page_tokens)
        graphs = None
        if self._capture is not None:
            graphs = DecodeGraphs(prepared.model, views, prepared.backend, self.num_rows, max_blocks, self._capture)
        self._models[prepared.name] = _Loaded(
            prepared.model, views, prepared.backend, prepared.page_tokens, prepared.max_model_len, graphs
        )
        self._widen(prepared.max_model_len, max_blocks)
        logger.info(
            "model %s: %s, %d KV blocks of %d tokens per merged block, %.1f %% of it wasted, attention by %s",
            prepared.name, prepared.model.dtype, slots_per_merged, prepared.page_tokens,
            100 * slab.waste(merged_bytes, shape.slot_bytes), prepared.backend.name,
        )  # fmt: skip
        return ModelShape(
            prepared.name, prepared.page_tokens, slots_per_merged, prepared.max_model_len, prepared.model.vocab_size
        )

    def remove_model(self, name: str) -> None:
        """Frees the model's weights; no launched step may use it."""
        del self._models[name]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def free_memory_bytes(self) -> int:
        """Memory that new weights may take on the device now. On CPU the pages of the KV pool that were never written
        count as free."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return free_memory_bytes()

    def _widen(self, max_model_len: int, max_blocks: int) -> None:
        """Rows long enough for `max_model_len` tokens and the one sampled after the last."""
        missing = max_model_len + 1 - self._tokens.shape[1]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))
        missing = max_blocks - self._tables.shape[1]
        if missing > 0:
            self._tables = np.pad(self._tables, ((0, 0), (0, missing)))

    # ------------------------------------------------------------------------------------------------- steps

    @property
    def num_in_flight(self) -> int:
        return len(self._launched)

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches and waits; no other step may be in flight."""
        self.launch(plan)
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        """Starts a step. Never raises for what happens in it: an error is in its result."""
        try:
            self._launched.append(self._launch(plan))
        except Exception as error:
            logger.exception("step %d of %s failed", plan.step_id, plan.model)
            self._launched.append(_Launched(plan.step_id, error=f"{type(error).__name__}: {error}"))

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight (blocking)."""
        launched = self._launched.popleft()
        if launched.error or launched.sampled is None:
            return StepResult(launched.step_id, [], error=launched.error)
        try:
            if launched.done is not None:
                launched.done.synchronize()
            tokens = (launched.sampled.tokens if launched.host_tokens is None else launched.host_tokens).tolist()
            logprobs = launched.sampled.logprobs
            return StepResult(launched.step_id, tokens, logprobs.to_messages(len(tokens)) if logprobs else None)
        except Exception as error:
            logger.exception("step %d failed on the device", launched.step_id)
            return StepResult(launched.step_id, [], error=f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> _Launched:
        loaded = self._models.get(plan.model)
        if loaded is None:
            raise KeyError(f"model {plan.model!r} is not loaded")
        self._update_rows(plan, loaded)
        rows = np.array(plan.rows, np.int64)
        layout = self._layout(plan, rows, loaded)
        width = self._tokens.shape[1]
        token_rows = rows if layout.all_decode else rows[layout.sequence_of_token]
        positions = to_device(layout.positions, self.device)
        ids = self._tokens.view(-1).index_select(0, to_device(token_rows * width + layout.positions, self.device))

        sampled_of = np.flatnonzero(np.array(plan.samples, bool))
        state = self._forward(loaded, ids, positions, layout)
        if not len(sampled_of):
            return self._finish(plan.step_id, SampledTokens(torch.empty(0, dtype=torch.int64, device=self.device)))
        last_tokens = layout.query_starts[1:][sampled_of] - 1
        every_token = len(last_tokens) == len(state.hidden)
        logits = loaded.model.logits(state, None if every_token else to_device(last_tokens, self.device))
        sample_rows, sample_positions = rows[sampled_of], layout.contexts[sampled_of]
        sampled = self._sampling.sample(logits, sample_rows, sample_positions, self._tokens)
        where = to_device(sample_rows * width + sample_positions, self.device)
        self._tokens.view(-1).index_copy_(0, where, sampled.tokens.int())
        return self._finish(plan.step_id, sampled)

    def _forward(
        self, loaded: _Loaded, token_ids: torch.Tensor, positions: torch.Tensor, layout: BatchLayout
    ) -> ForwardState:
        """The state after all layers; its first T tokens are those of the step."""
        if loaded.graphs is not None and layout.all_decode:
            state = loaded.graphs.run(token_ids, positions, layout)
            if state is not None:
                return state
        backend = loaded.backend
        batch = ForwardBatch(token_ids, positions, loaded.views, backend, backend.prepare(layout))
        return loaded.model.forward(batch)

    def _finish(self, step_id: int, sampled: SampledTokens) -> _Launched:
        if self.device.type == "cpu":
            return _Launched(step_id, sampled)
        host = torch.empty(sampled.tokens.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(sampled.tokens, non_blocking=True)
        # a blocking event sleeps in the driver instead of spinning on its lock
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        return _Launched(step_id, sampled, host, done)

    def _update_rows(self, plan: StepPlan, loaded: _Loaded) -> None:
        for new in plan.new_sequences:
            self._take_row(new, loaded)
        for row, slots in plan.new_blocks:
            self._append_blocks(row, slots, loaded)

    def _take_row(self, new: NewSequence, loaded: _Loaded) -> None:
        tokens = np.frombuffer(new.tokens, np.int32)
        if len(tokens) > loaded.max_model_len:
            raise ValueError(f"{len(tokens)} tokens exceed the model's {loaded.max_model_len}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < loaded.model.vocab_size:
            # on a GPU it would be more than this step that fails: the whole context is lost
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} of a vocabulary of {loaded.model.vocab_size}")
        self._tokens[new.row, : len(tokens)] = to_device(tokens.copy(), self.device)
        self._sampling.set(new.row, new.sampling, new.prompt_tokens)
        self._num_blocks[new.row] = 0
        self._append_blocks(new.row, new.blocks, loaded)

    def _append_blocks(self, row: int, slots: list[int], loaded: _Loaded) -> None:
        array = np.array(slots, np.int32)
        if len(array) and not 0 <= array.min() <= array.max() < loaded.views.num_slots:
            raise IndexError(f"slots {array.min()}..{array.max()} of {loaded.views.num_slots}")
        self._store.claim(loaded.views, array)
        begin = self._num_blocks[row]
        self._tables[row, begin : begin + len(array)] = array
        self._num_blocks[row] = begin + len(array)

    def _layout(self, plan: StepPlan, rows: np.ndarray, loaded: _Loaded) -> BatchLayout:
        starts, counts = np.array(plan.starts, np.int64), np.array(plan.counts, np.int64)
        pages = -(-(starts + counts) // loaded.page_tokens)
        if (pages > self._num_blocks[rows]).any():
            short = rows[pages > self._num_blocks[rows]].tolist()
            raise ValueError(f"rows {short} lack KV blocks for the tokens planned")
        num_pages = int(pages.max())
        tables = self._tables[rows, :num_pages]
        tables = np.where(np.arange(num_pages) < pages[:, None], tables, tables[:, :1])
        return BatchLayout(
            starts, counts, tables, loaded.page_tokens, loaded.model.dtype, self.device, loaded.model.windows
        )


def _choose(backends: list[AttentionBackend], model: DecoderModel) -> tuple[AttentionBackend, int]:
    """The first that runs the model's heads, and its preferred page size."""
    for backend in backends:
        pages = backend.supported_page_tokens(model.head_dim, model.dtype)
        if pages:
            return backend, pages[0]
    raise CheckpointError(f"no attention back end runs heads of {model.head_dim} in {model.dtype}.")


@torch.inference_mode()
def _warm_up(model: DecoderModel, backend: AttentionBackend, page_tokens: int, device: torch.device) -> None:
    """A prefill and a decode in a cache of their own: compiles and initialises kernels before the model serves."""
    shape = model.kv_shape(page_tokens)
    store = KvStore(1, -(-shape.slot_bytes // slab.ALIGNMENT_BYTES) * slab.ALIGNMENT_BYTES, device)
    views = store.attach(shape, 1)
    store.claim(views, np.zeros(1, np.int64))
    for start, count in ((0, 2), (2, 1)):
        layout = BatchLayout(
            np.array([start]), np.array([count]), np.zeros((1, 1), np.int32), page_tokens, model.dtype, device,
            model.windows,
        )  # fmt: skip
        positions = torch.from_numpy(layout.positions).to(device)
        batch = ForwardBatch(torch.zeros_like(positions), positions, views, backend, backend.prepare(layout))
        model.logits(model.forward(batch), None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
