"""Makes models ready for an executor: weights, attention back end, decode graphs, grammar and draft model, beside its steps.

What is prepared is part of no step until the executor adds it. `Preparation.prepare` and `put_away` may be called from any
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from services.worker.attention.choice import choose_backends
from services.worker.attention.interface import AttentionBackend
from services.worker.executor.draft_model import DraftModel, draft_views
from services.worker.executor.first_steps import fingerprint_of, warm_up
from services.worker.executor.grammars import GrammarRows, Vocabulary
from services.worker.executor.pooling import Pooler, load_pooler
from services.worker.kv.kv_store import KvStore, KvViews
from services.worker.kv.transfer import beside_steps
from services.worker.models.decode_graphs import Capture, CudaCapture, DecodeGraphs
from services.worker.models.decoder import DecoderModel
from services.worker.models.deterministic import INVARIANT, Numerics
from services.worker.models.host_weights import HostWeights
from services.worker.models.loading import Identity, identity_of, load_model
from services.worker.ranks.group import ALONE, RankGroup
from shared.engine.memory import slab
from shared.messages.cluster import ModelSpec
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError

logger = logging.getLogger(__name__)


@dataclass
class PreparedModel:
    """Weights on the device, not yet part of an executor."""

    name: str
    model: DecoderModel
    max_model_len: int
    block_size: int
    backend: AttentionBackend
    num_layers: int
    """Layers of all stages."""
    views: KvViews | None = None
    """Views of its KV blocks, where graphs use them."""
    graphs: DecodeGraphs | None = None
    fingerprint: str = ""
    vocabulary: Vocabulary | str = "no grammar is followed here"
    """Vocabulary for grammars; or why there is none."""
    identity: Identity | None = None
    pooler: Pooler | None = None
    """What its hidden states go to; None: it generates text."""
    draft: PreparedModel | None = None
    """Its draft model; None: it has none."""


class Preparation:
    """Prepares the models of one executor, and keeps the weights of those that are put away."""

    def __init__(
        self,
        device: torch.device,
        store: KvStore,
        grammars: GrammarRows,
        group: RankGroup,
        numerics: Numerics,
        *,
        num_rows: int,
        capture: Capture | None,
        host_weights: HostWeights,
    ) -> None:
        """`num_rows` and `capture` are those of `Executor`; `host_weights` holds what is put away."""
        self._store = store
        self._grammars = grammars
        self._group = group
        self._numerics = numerics
        self._num_rows = num_rows
        self._device = device
        self.host_weights = host_weights
        self.backends = choose_backends(self._device, deterministic=numerics is INVARIANT)
        self.new_capture: Callable[[], Capture] | None = None if capture is None else lambda: capture
        """Makes the capture of one more model."""
        if group.num_stages > 1:
            self.new_capture = None  # what a stage is handed lies elsewhere at each step
        elif capture is None and self._device.type == "cuda":
            self.new_capture = partial(CudaCapture, self._device)
        self.weights: WeakValueDictionary[Identity, DecoderModel] = WeakValueDictionary()
        """Those of one checkpoint are one model under however many names, for as long as any of them is here."""
        self.has_removed = False
        """Whether a model was removed since the last one was loaded."""

    def prepare(self, spec: ModelSpec) -> PreparedModel:
        """Reads a checkpoint, and that of its draft model (blocking: seconds to minutes). Raises `CheckpointError`."""
        prepared = self._prepared(spec)
        if spec.draft:
            self._add_draft(prepared, spec)
        return prepared

    def put_away(self, name: str, identity: Identity, model: DecoderModel, vocabulary: Vocabulary | str) -> bool:
        """Puts the weights of a removed model into host memory; False: there is no room for them. Blocking."""
        if self._device.type != "cpu":
            self.weights.pop(identity, None)  # nobody may compute with it meanwhile
        return self.host_weights.keep(name, identity, model, vocabulary)

    def _add_draft(self, prepared: PreparedModel, spec: ModelSpec) -> None:
        if self._group.num_stages > 1:
            logger.warning("model %s: pipelines draft no tokens, its draft model is not loaded", spec.name)
            return
        if prepared.pooler is not None:
            raise CheckpointError(f"draft: {spec.name!r} generates no text, for which nothing can be drafted.")
        model = prepared.model
        dtype = str(model.dtype).removeprefix("torch.")
        prepared.draft = self._prepared(ModelSpec(f"{spec.name} (draft)", spec.draft, dtype), is_draft=True)
        draft = prepared.draft.model
        if draft.vocab_size != model.vocab_size:
            raise CheckpointError(
                f"draft: {spec.draft!r} has {draft.vocab_size} tokens, but {spec.name!r} has {model.vocab_size}: a draft "
                "model needs the same tokenizer."
            )
        if prepared.views is not None and self.new_capture is not None:
            prepared.draft.views = draft_views(
                self._store, prepared.views, prepared.draft.name, draft.kv_shape(prepared.draft.block_size)
            )
            prepared.draft.graphs = self._captured(prepared.draft, self.new_capture())

    def draft_model(self, views: KvViews, draft: PreparedModel) -> DraftModel:
        """The draft model, beside the blocks of the model that it drafts for."""
        own = draft.views or draft_views(self._store, views, draft.name, draft.model.kv_shape(draft.block_size))
        per_block = own.blocks_per_merged // views.blocks_per_merged
        return DraftModel(draft.model, own, draft.backend, per_block, draft.max_model_len, draft.graphs)

    def _prepared(self, spec: ModelSpec, *, is_draft: bool = False) -> PreparedModel:
        path: Path = checkpoint.resolve(spec.source)
        identity = identity_of(
            path, self._device, dtype=spec.dtype, max_model_len=spec.max_model_len, quantization=spec.quantization
        )
        kept = self.host_weights.take(spec.name, identity)
        with beside_steps(self._device):
            model = self.weights.get(identity) if kept is None else kept[0]
            shape = checkpoint.describe(path)
            num_layers = shape.num_layers
            if num_layers < self._group.num_stages:
                raise CheckpointError(f"{num_layers} layers do not divide over {self._group.num_stages} stages.")
            is_new = model is None
            if model is None:
                self.host_weights.make_room(2 * sum(size for _, size, _ in identity.files) // self._group.size)
                model = load_model(identity, self._device, self._group, self._numerics)
                self.give_back_cached()  # what it was made of lies on a stream that may never be used again
            # back ends belong to the thread of the steps, so this one uses its own
            backends = choose_backends(self._device, deterministic=self._numerics is INVARIANT)
            chosen = _choose(backends, model, self._numerics)
            block_size = backends[chosen].facts.block_sizes[0]
            if is_new and self._group is ALONE:
                warm_up(model, backends[chosen], block_size, identity.max_model_len, ALONE)
            self.weights[identity] = model
            backend = self.backends[chosen]
            max_model_len = spec.max_model_len or identity.max_model_len
            prepared = PreparedModel(
                spec.name, model, max_model_len, block_size, backend, num_layers, identity=identity
            )
            prepared.pooler = load_pooler(path, shape, self._device)
            if self._group is ALONE and self._numerics is INVARIANT and not is_draft:
                prepared.fingerprint = fingerprint_of(model, backends[chosen], block_size, max_model_len)
                logger.info("model %s: deterministic, fingerprint %s", spec.name, prepared.fingerprint)
            if self._group is ALONE and not is_draft:
                self.capture(prepared)
        if self.has_removed:
            # Of a model that was removed while a capture was under way, torch has given nothing back.
            self.has_removed = False
            self.give_back_cached()
        if (self._group.is_first_stage or self._group.is_last_stage) and prepared.pooler is None and not is_draft:
            # The last one samples; the first one is asked whether a grammar can be followed.
            prepared.vocabulary = self._grammars.load(path, model.vocab_size) if kept is None else kept[1]
        return prepared

    def capture(self, prepared: PreparedModel) -> None:
        """Records the model's decode graphs, where steps are recorded. Raises `CheckpointError` as `attach` does."""
        if self.new_capture is not None and prepared.pooler is None:
            prepared.views = self.attach(prepared)
            prepared.graphs = self._captured(prepared, self.new_capture())

    def _captured(self, prepared: PreparedModel, capture: Capture) -> DecodeGraphs:
        views = prepared.views
        assert views is not None
        max_blocks = -(-prepared.max_model_len // prepared.block_size)
        graphs = DecodeGraphs(
            prepared.model, views, prepared.backend, self._num_rows, max_blocks, capture, self._all_can
        )
        graphs.capture_all()
        return graphs

    def _all_can(self, can: bool) -> bool:
        """Whether all ranks can go on to what they do together."""
        if self._group is ALONE:
            return can
        counted = self._group.all_reduce(torch.tensor([float(can)], device=self._device))
        return int(counted.item()) == self._group.size

    def attach(self, prepared: PreparedModel) -> KvViews:
        """Lays the model's KV blocks out in the pool. Raises `CheckpointError` where they do not fit it."""
        shape, merged_bytes = prepared.model.kv_shape(prepared.block_size), self._store.merged_bytes
        # Blocks have the same numbers on all stages, so there is room for those of the one with the most layers.
        most_layers = -(-prepared.num_layers // self._group.num_stages)
        block_bytes = shape.block_bytes // shape.num_layers * most_layers
        blocks_per_merged = slab.blocks_per_merged(merged_bytes, block_bytes)
        if blocks_per_merged == 0:
            raise CheckpointError(
                f"a KV block of {prepared.name!r} takes {block_bytes} bytes, but the pool is cut into "
                f"{merged_bytes}; the pool must be laid out for this model."
            )
        return self._store.attach(shape, blocks_per_merged)

    def give_back_cached(self) -> None:
        """Lets other streams and processes have the device's memory that torch keeps and nobody uses."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _choose(backends: list[AttentionBackend], model: DecoderModel, numerics: Numerics) -> int:
    """Index of the first that runs the model's heads."""
    for index, backend in enumerate(backends):
        if backend.facts.runs(model.head_dim, str(model.dtype).removeprefix("torch.")) and numerics.suits(
            backend, model
        ):
            return index
    raise CheckpointError(f"no attention back end runs heads of {model.head_dim} in {model.dtype}{numerics.asks}.")
