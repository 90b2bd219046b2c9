"""The draft model of another model: makes the tokens that a step's plan leaves to it, before the step.

It computes what it lacks of a sequence and drafts one token after another, each by what the request asks for: with the
noise of its position, its penalties, its grammar. So it draws the token that the model itself will draw as often as two
distributions can agree by the same noise (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", 2024), and what is kept of its tokens never depends on it.

Its KV lies in blocks of the model's, `blocks_per_block` of its own in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.executor.grammars import DraftGuides, Guides
from services.worker.executor.sequence_rows import SequenceRows
from services.worker.executor.suspension import timed_event
from services.worker.kv.kv_store import KvShape, KvStore, KvViews
from services.worker.kv.transfer import pack_to_device
from services.worker.models.decode_graphs import DecodeGraphs
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from shared.engine.memory import slab
from shared.engine.plan import DraftShape, ModelDraft, StepPlan
from shared.models.checkpoint import CheckpointError

clock: Callable[[], float] = time.perf_counter
"""Seconds; of passes that are computed on the CPU."""


@dataclass
class DraftPasses:
    """Times at which each pass of a step began and the last one ended: seconds, or events on the device."""

    marks: list[float | torch.cuda.Event] = field(default_factory=list)

    def mark(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.marks.append(clock())
            return
        event = timed_event()
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Once the device has come past them."""
        found = []
        for begin, end in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(begin, float) and isinstance(end, float):
                found.append(end - begin)
            elif isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                found.append(begin.elapsed_time(end) / 1000)
        return found


def draft_views(store: KvStore, views: KvViews, name: str, shape: KvShape) -> KvViews:
    """The KV blocks of a draft model, several in each block of the model whose views these are. Raises `CheckpointError`."""
    per_block = slab.blocks_per_merged(views.stride_bytes, shape.block_bytes)
    if not per_block:
        raise CheckpointError(
            f"draft: a KV block of {name!r} takes {shape.block_bytes} bytes, more than the {views.stride_bytes} of its "
            "model's: a draft model has less KV than its model."
        )
    return store.attach(shape, views.blocks_per_merged * per_block)


@dataclass
class DraftModel:
    model: DecoderModel
    views: KvViews
    backend: AttentionBackend
    blocks_per_block: int
    max_model_len: int
    graphs: DecodeGraphs | None = None

    @property
    def shape(self) -> DraftShape:
        return DraftShape(self.blocks_per_block * self.views.shape.block_size, self.max_model_len)

    def run(self, plan: StepPlan, rows: SequenceRows, guides: Guides | None) -> DraftPasses:
        """Computes what the plan asks of it, and enters its tokens into the rows. `guides`: those of the step's samples."""
        passes, device = DraftPasses(), self.model.device
        drafts = plan.model_drafts
        drafts_any = any(one.num_drafts for one in drafts)
        of_grammar = guides.begin_drafts() if guides is not None and drafts_any else None
        starts, counts = [one.start for one in drafts], [one.count for one in drafts]
        number = 0
        while drafts:
            passes.mark(device)
            drafting = np.flatnonzero([one.num_drafts > number for one in drafts])
            self._run_pass(plan, rows, drafts, starts, counts, drafting, of_grammar)
            number += 1
            drafts = [drafts[i] for i in drafting.tolist() if drafts[i].num_drafts > number]
            starts = [one.start + one.count + number - 1 for one in drafts]
            counts = [1] * len(drafts)
        passes.mark(device)
        if of_grammar is not None:
            of_grammar.end()
        return passes

    def _run_pass(
        self,
        plan: StepPlan,
        rows: SequenceRows,
        drafts: list[ModelDraft],
        starts: list[int],
        counts: list[int],
        drafting: np.ndarray,
        of_grammar: DraftGuides | None,
    ) -> None:
        """`drafting`: those of `drafts` of which the token after the pass is sampled."""
        pass_rows = np.array([plan.rows[one.column] for one in drafts], np.int64)
        layout = self._layout(drafts, np.array(starts, np.int64), np.array(counts, np.int64))
        state = self._forward(rows, pass_rows, layout)
        if not len(drafting):
            return
        drafting_rows = pass_rows[drafting].tolist()
        masks = None if of_grammar is None else of_grammar.masks(drafting_rows)
        sampled = rows.choose(self.model, pass_rows, layout, state, drafting, lambda: masks, tells_logprobs=False)
        if of_grammar is not None:
            of_grammar.advance(drafting_rows, sampled.tokens.tolist())

    def _layout(self, drafts: list[ModelDraft], starts: np.ndarray, counts: np.ndarray) -> BatchLayout:
        block_size, per_block = self.views.shape.block_size, self.blocks_per_block
        pages = -(-(starts + counts) // block_size)
        num_pages = int(pages.max())
        tables = np.zeros((len(drafts), num_pages), np.int32)
        for i, one in enumerate(drafts):
            blocks = np.array(one.blocks, np.int32)[: -(-int(pages[i]) // per_block)]
            own = (blocks[:, None] * per_block + np.arange(per_block, dtype=np.int32)).ravel()[: pages[i]]
            if len(own) < pages[i]:
                raise ValueError(f"column {one.column} lacks KV blocks for its drafts")
            tables[i, : len(own)] = own
            tables[i, len(own) :] = own[0]
        model = self.model
        return BatchLayout(
            starts, counts, tables, block_size, model.dtype, model.device, model.windows, model.heads
        )  # fmt: skip

    def _forward(self, rows: SequenceRows, pass_rows: np.ndarray, layout: BatchLayout) -> ForwardState:
        places = rows.token_places(pass_rows, layout)
        if self.graphs is not None and layout.all_decode:
            replayed = self.graphs.run(rows.tokens, places, layout)
            if replayed is not None:
                return replayed
        token_places, positions = pack_to_device([places, layout.positions], self.model.device)
        token_ids = rows.tokens.index_select(0, token_places)
        metadata = self.backend.prepare(layout)
        return self.model.forward(ForwardBatch(token_ids, positions, self.views, self.backend, metadata))
