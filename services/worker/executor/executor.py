"""Runs step plans on a device: the only place of a worker where tensors are computed.

Each sequence has a row (sequence_rows.py): its tokens, its block table, its sampling parameters. A plan changes rows and
names those to run.

`launch` puts a step on the device and `collect` waits for the oldest one launched; two steps may be in flight on CUDA.
On CPU `launch` has computed the step when it returns. An interruptible step may be suspended between two layers
(suspension.py); other steps run before it is resumed. Beside the steps, KV blocks are copied to host memory and back
(kv_copies.py). `prepare_model`, `interrupt` and `block_rows` may be called from other threads while
steps run; everything else belongs to one thread.

Of a group of ranks each has an executor, which is told the same in the same order: the same models, plans, copies and
claims. Each has its part of the weights and of every block, under the same numbers, and samples the same tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec
import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.executor.draft_model import DraftModel, DraftPasses
from services.worker.executor.first_steps import NUM_CHECKED, are_nan, lone_step, warm_up
from services.worker.executor.grammars import Compiled, GrammarCounters, GrammarRows, Guides, Masks, Vocabulary
from services.worker.executor.pooling import PooledRows, Pooler
from services.worker.executor.preparing import Preparation, PreparedModel
from services.worker.executor.sampling import SampledTokens
from services.worker.executor.sequence_rows import SequenceRows
from services.worker.executor.suspension import PartialForward, Safepoints, cuda_event
from services.worker.kv.kv_copies import KvCopies
from services.worker.kv.kv_store import BlockParts, KvStore, KvViews
from services.worker.kv.transfer import beside_steps, pack_to_device, to_device, to_host
from services.worker.models.adapters import BatchAdapters, LoraWeights, lora_bytes, read_lora
from services.worker.models.decode_graphs import Capture, DecodeGraphs
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.models.deterministic import FAST, INVARIANT
from services.worker.models.host_weights import HostWeights
from services.worker.models.loading import Identity
from services.worker.node.machine import free_memory_bytes
from services.worker.ranks.agreement import FREE, Agreement, Follower, Leader
from services.worker.ranks.group import ALONE, GroupError, RankGroup
from services.worker.ranks.shared_memory import RankMemory
from shared.engine.memory import slab
from shared.engine.plan import NO_TOKEN, CopyKind, EndedCopy, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import UNKNOWN_LOGPROB, Adapter
from shared.models import checkpoint
from shared.models.adapters import AdapterFiles, describe_adapter
from shared.models.checkpoint import CheckpointError

logger = logging.getLogger(__name__)

LAYERS_PER_SAFEPOINT = {"cpu": 1, "cuda": 4}
"""Until the profiler says otherwise. A check costs nothing on CPU; on CUDA the launching thread waits at each."""


@dataclass
class _Loaded:
    model: DecoderModel
    views: KvViews
    backend: AttentionBackend
    block_size: int
    max_model_len: int
    num_layers: int
    """Layers of all stages."""
    graphs: DecodeGraphs | None
    layers_per_safepoint: int
    vocabulary: Vocabulary | str
    identity: Identity | None
    fingerprint: str
    pooler: Pooler | None
    draft: DraftModel | None


@dataclass
class _LoadedAdapter:
    model: str
    weights: LoraWeights


@dataclass
class _Awaited:
    """Whose tokens another stage samples, and where they go: `positions` of `rows`, [S] each."""

    rows: np.ndarray
    positions: np.ndarray
    versions: np.ndarray
    """Which of its successive owners each row had."""


@dataclass
class _Launched:
    """A step on the device, or the error that kept it off. `sampled` is None if it has failed or is suspended."""

    step_id: int
    sampled: SampledTokens | None = None
    host_tokens: torch.Tensor | None = None
    done: torch.cuda.Event | None = None
    error: str = ""
    suspended_share: float = -1.0
    prompt_logprobs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    is_pooled: bool = False
    """`prompt_logprobs` are vectors of whole prompts, and its tokens stand for nothing."""
    guides: Guides | None = None
    """Guides of its samples that follow a grammar, until they have been told what was sampled."""
    unguided: list[tuple[int, str]] = field(default_factory=list)
    adapters: BatchAdapters | None = None
    """Adapters that it computes with: they may be dropped before the device is done with them, and their memory used
    again."""
    drafted: torch.Tensor | None = None
    """What the draft model made, as of `SequenceRows.drafted`."""
    draft_passes: DraftPasses | None = None


class Executor:
    def __init__(
        self,
        device: str | torch.device,
        num_merged: int,
        merged_bytes: int,
        num_rows: int,
        *,
        capture: Capture | None = None,
        layers_per_safepoint: int = 0,
        num_host_merged: int = 0,
        num_window_merged: int = 0,
        group: RankGroup = ALONE,
        shared: RankMemory | None = None,
        deterministic: bool = False,
        host_weights_bytes: int = 0,
    ) -> None:
        """`num_rows`: sequences held at once at most. `capture`: records decode graphs; None: CUDA's on CUDA, else none
        are used. `layers_per_safepoint`: of interruptible steps; 0: the device's default. `num_host_merged`: merged blocks
        of host memory for checkpoints. `group`: of which this is one rank; `merged_bytes` is this rank's part. `shared`:
        what the ranks share, needed where there are several; regions of `region_bytes` have the pools, or with
        `num_window_merged` a window of so many merged blocks instead of the device's pool. `deterministic`: a
        sequence's tokens depend on nothing but itself (deterministic.py). `host_weights_bytes`: for weights of models that
        are put away, as of `HostWeights`."""
        self.device = torch.device(device)
        self.num_rows = num_rows
        self._group = group
        self._shared = shared
        slab_memory = host_memory = None
        self._num_shared_merged = num_window_merged or num_merged + 1
        self.has_window = num_window_merged > 0
        """Blocks on the device are reached through the window alone (`move_window`)."""
        has_stream = self.has_window and self.device.type == "cuda"
        self._window_stream = torch.cuda.Stream(self.device) if has_stream else None  # type: ignore[no-untyped-call]
        if shared is not None and shared.region_bytes:
            mine = shared.region(group.stage * group.size + group.rank)
            first_memory, host_memory = _split(mine, self._num_shared_merged, merged_bytes)
            if self.has_window:
                self._window = first_memory
            else:
                slab_memory = first_memory
        self._store = KvStore(num_merged, merged_bytes, self.device, slab_memory)
        self.copies = KvCopies(self._store, num_host_merged, memory=host_memory)
        self._numerics = INVARIANT if deterministic else FAST
        self._models: dict[str, _Loaded] = {}
        self._held: dict[str, _Loaded] = {}
        """Models that were removed, until their weights are kept in host memory."""
        self._adapters: dict[str, _LoadedAdapter] = {}
        """By version."""
        self._rows = SequenceRows(num_rows, self.device, one_by_one=deterministic)
        self._pooled = PooledRows()
        self._grammars = GrammarRows()
        self._preparation = Preparation(
            self.device, self._store, self._grammars, group, self._numerics, num_rows=num_rows, capture=capture,
            host_weights=HostWeights(self.device, host_weights_bytes, free_memory_bytes),
        )  # fmt: skip
        self._launched: deque[_Launched] = deque()
        self._layers_per_safepoint = layers_per_safepoint or LAYERS_PER_SAFEPOINT[self.device.type]
        self._safepoints = Safepoints(cuda_event if self.device.type == "cuda" else None, _agreement(group, shared))
        self._suspended: dict[int, PartialForward] = {}
        self._awaited: dict[int, _Awaited] = {}
        """By step, on the first of several stages."""
        self._changed: torch.cuda.Event | None = None
        """On the device, behind the last merged block that was zeroed for another model, or block that was moved."""

    # ------------------------------------------------------------------------------------------------ models

    def prepare_model(self, spec: ModelSpec) -> PreparedModel:
        """Reads a checkpoint, and that of its draft model (blocking: seconds to minutes). Raises `CheckpointError`."""
        return self._preparation.prepare(spec)

    @torch.inference_mode()
    def add_model(self, prepared: PreparedModel) -> ModelShape:
        """Lets plans name the model. Raises `CheckpointError` if its KV blocks do not fit this executor's pool. Of a group
        it computes first steps and captures graphs too, since calls to other ranks have an order with those of steps."""
        if prepared.name in self._models:
            raise ValueError(f"model {prepared.name!r} is here already")
        if self._group is not ALONE:
            with beside_steps(self.device):
                with self._together():
                    for one in (prepared, prepared.draft):
                        if one is not None:
                            warm_up(one.model, one.backend, one.block_size, one.max_model_len, self._group)
                self._preparation.capture(prepared)
        views = prepared.views or self._preparation.attach(prepared)
        draft = None if prepared.draft is None else self._preparation.draft_model(views, prepared.draft)
        blocks_per_merged = views.blocks_per_merged
        # Before the model is known, which may come again if there is no memory for rows of its length.
        self._rows.widen(prepared.max_model_len, -(-prepared.max_model_len // prepared.block_size))
        self._models[prepared.name] = _Loaded(
            prepared.model, views, prepared.backend, prepared.block_size, prepared.max_model_len, prepared.num_layers,
            prepared.graphs, max(self._layers_per_safepoint, prepared.model.layers_at_once), prepared.vocabulary,
            prepared.identity,
            prepared.fingerprint,
            prepared.pooler,
            draft,
        )  # fmt: skip
        logger.info(
            "model %s: %s, %d KV blocks of %d tokens per merged block, %.1f %% of it wasted, attention by %s",
            prepared.name, prepared.model.dtype, blocks_per_merged, prepared.block_size,
            100 * slab.waste(self._store.merged_bytes, views.shape.block_bytes), prepared.backend.facts.name,
        )  # fmt: skip
        return ModelShape(
            prepared.name, prepared.block_size, blocks_per_merged, prepared.max_model_len, prepared.model.vocab_size,
            prepared.num_layers, self._models[prepared.name].layers_per_safepoint, prepared.fingerprint,
            None if draft is None else draft.shape,
        )  # fmt: skip

    @torch.inference_mode()
    def is_sound(self, name: str) -> bool:
        """Whether the model makes numbers of two tokens that have nothing to do with any request; True where another stage
        has the logits. Between steps, on all ranks."""
        loaded = self._models[name]
        count = min(NUM_CHECKED, loaded.max_model_len)
        with beside_steps(self.device), self._together():
            logits = lone_step(loaded.model, loaded.backend, loaded.block_size, self._group, 1, 0, count)
        return logits is None or not are_nan(logits)

    def remove_model(self, name: str) -> None:
        """Frees the model's weights, unless another name has them too, and drops its suspended steps; no launched step may
        use it."""
        views = self._models.pop(name).views
        # not made anew: a thread that loads may write to it
        for version in [version for version, one in list(self._adapters.items()) if one.model == name]:
            self._adapters.pop(version, None)
        self._suspended = {i: forward for i, forward in self._suspended.items() if forward.batch.kv is not views}
        self._preparation.has_removed = True
        self._preparation.give_back_cached()

    def hold_weights(self, name: str) -> None:
        """`remove_model` will not free the model's weights: `keep_weights` is about to be called."""
        self._held[name] = replace(self._models[name], graphs=None, draft=None)

    def keep_weights(self, name: str) -> bool:
        """Puts the weights of a removed model into host memory; False: there is no room for them, and they are freed.
        Blocking; from any thread, beside steps."""
        held = self._held.pop(name, None)
        if held is None or held.identity is None:
            return False
        if any(other.model is held.model for other in list(self._models.values())):
            return False  # it is here under another name
        model, vocabulary, identity = held.model, held.vocabulary, held.identity
        del held
        is_kept = self._preparation.put_away(name, identity, model, vocabulary)
        if not is_kept:
            del model
        self._preparation.give_back_cached()
        return is_kept

    def drop_weights(self, name: str) -> None:
        """Frees those in host memory, if they are there. From any thread."""
        self._preparation.host_weights.drop(name)

    def has_weights(self, name: str) -> bool:
        """Whether those of a removed model are in host memory. From any thread."""
        return name in self._preparation.host_weights

    def adapter_bytes(self, model: str, adapter: Adapter) -> int:
        """What `load_adapter` will take of the device's memory. Blocking, as its files may have to be downloaded; from any
        thread. Raises `CheckpointError`, `KeyError` where the model is not here."""
        base, files = self._base_and_files(model, adapter)
        return lora_bytes(files, base.adaptable, base.layers, self._group, base.dtype)

    def load_adapter(self, model: str, adapter: Adapter) -> None:
        """Lets plans of the model name the adapter; nothing where the model has gone, which ranks see at different times.
        Blocking; from any thread, beside steps. Raises `CheckpointError`."""
        if model not in self._models:
            return
        base, files = self._base_and_files(model, adapter)
        with torch.inference_mode(), beside_steps(self.device):
            weights = read_lora(files, base.adaptable, base.layers, self._group, self.device, base.dtype)
        self._adapters[adapter.version] = _LoadedAdapter(model, weights)

    def _base_and_files(self, model: str, adapter: Adapter) -> tuple[DecoderModel, AdapterFiles]:
        base = self._models[model].model
        if not base.adaptable:
            raise CheckpointError(
                f"{adapter.name!r}: the base model {model!r} runs through transformers, without adapters."
            )
        if self._numerics is INVARIANT:
            raise CheckpointError(f"{adapter.name!r}: adapters are not computed{self._numerics.asks}.")
        return base, describe_adapter(checkpoint.resolve(adapter.source))

    def drop_adapter(self, version: str) -> None:
        """Drops an adapter; called from any thread. Steps that are suspended, or on the device, keep what they need of
        it."""
        self._adapters.pop(version, None)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else computes a part of its steps."""
        return self._group is ALONE

    @property
    def launching_computes(self) -> bool:
        """Whether a step has been computed when `launch` returns."""
        return self.device.type == "cpu"

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None:
        """Between two checks of an interruptible step of the model."""
        if num_layers < 1:
            raise ValueError(f"{num_layers} layers per safepoint")
        loaded = self._models[name]
        loaded.layers_per_safepoint = max(num_layers, loaded.model.layers_at_once)

    def close(self) -> None:
        """Ends the threads beside the steps; copies not yet done fail."""
        self.copies.close()
        self._grammars.close()

    def compile_grammar(self, model: str, grammar: str) -> Compiled:
        """Begins to, beside the steps, before a sequence follows it. From any thread."""
        loaded = self._models.get(model)
        return self._grammars.compile(grammar, "the model is not here" if loaded is None else loaded.vocabulary)

    @property
    def grammar_counters(self) -> GrammarCounters:
        """They go on growing; to be read only."""
        return self._grammars.counters

    def free_memory_bytes(self) -> int:
        """Memory that new weights may take on the device now. On CPU the pages of the KV pool that were never written
        count as free."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return free_memory_bytes()

    # ------------------------------------------------------------------------------------------------- steps

    @property
    def num_in_flight(self) -> int:
        return len(self._launched)

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches and waits; no other step may be in flight."""
        self.launch(plan)
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        """Starts a step. Never raises for what happens in it: an error is in its result. But `GroupError`: the ranks do not
        know any more how far the others are."""
        try:
            self._launched.append(self._launch(plan))
        except GroupError:
            raise
        except Exception as error:
            logger.exception("step %d of %s failed", plan.step_id, plan.model)
            self._launched.append(_Launched(plan.step_id, error=f"{type(error).__name__}: {error}"))

    def interrupt(self, step_id: int) -> None:
        """Lets an interruptible step, running or about to, be suspended at its next safepoint. From any thread."""
        self._safepoints.interrupt(step_id)

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight (blocking). One that is suspended has left the device."""
        launched = self._launched.popleft()
        step_id, sampled = launched.step_id, launched.sampled
        if launched.error:
            return StepResult(step_id, [], error=launched.error)
        try:
            if launched.done is not None:
                launched.done.synchronize()
            if sampled is None:
                return StepResult(step_id, [], suspended_share=launched.suspended_share)
            tokens = (sampled.tokens if launched.host_tokens is None else launched.host_tokens).tolist()
            if launched.is_pooled:
                vectors = [vector for _, vector in launched.prompt_logprobs]
                tokens = [
                    token if vector.isfinite().all() else NO_TOKEN
                    for token, vector in zip(tokens, vectors, strict=True)
                ]
            self._advance_grammars(launched, tokens)
            logprobs = sampled.logprobs
            told = logprobs.to_messages(len(tokens)) if logprobs else None
            return StepResult(
                step_id,
                tokens,
                [UNKNOWN_LOGPROB] * len(tokens) if launched.is_pooled else told,
                unguided=launched.unguided,
                prompt_logprobs=[(index, rows.numpy().tobytes()) for index, rows in launched.prompt_logprobs],
                drafted=[] if launched.drafted is None else launched.drafted.tolist(),
                draft_passes_s=[] if launched.draft_passes is None else launched.draft_passes.seconds(),
            )
        except Exception as error:
            logger.exception("step %d failed on the device", step_id)
            return StepResult(step_id, [], error=f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> _Launched:
        for step_id in plan.discards:
            self._suspended.pop(step_id, None)
        loaded = self._models.get(plan.model)
        if loaded is None:
            raise KeyError(f"model {plan.model!r} is not loaded")
        plan = plan.expanded()
        guides, passes = None, None
        if plan.resumes:
            forward = self._resumed(plan, loaded)
            rows, layout, guides = forward.rows, forward.layout, forward.guides
        else:
            forward = None
            self._update_rows(plan, loaded)
            rows = np.array(plan.rows, np.int64)
            if plan.drafts:
                self._rows.enter_drafts(plan)
            layout = self._rows.layout(plan, rows, loaded.block_size, loaded.model)
            places, adapters = self._rows.token_places(rows, layout), self._batch_adapters(rows, layout)
        with self._together():
            if plan.model_drafts and forward is None:
                guides = self._grammars.of(rows[np.array(plan.samples, bool)])
                passes = self._draft(plan, loaded, guides)
            if forward is not None:
                state, adapters = self._advance(plan, loaded, forward), forward.batch.adapters
            else:
                state = self._forward(plan, loaded, rows, layout, places, adapters)
            if state is None:
                suspended = self._suspended[plan.step_id]
                suspended.guides = guides
                launched = _Launched(plan.step_id, done=self._mark(), suspended_share=suspended.share)
            elif self._group.is_last_stage:
                launched = self._sample(plan, loaded, rows, layout, state, guides)
            else:
                launched = self._hand_on(plan, rows, layout, state)
        launched.adapters, launched.draft_passes = adapters, passes
        return launched

    def _draft(self, plan: StepPlan, loaded: _Loaded, guides: Guides | None) -> DraftPasses:
        if loaded.draft is None:
            raise ValueError(f"model {plan.model!r} has no draft model here")
        self._claim_checked(
            loaded.views, np.array([block for one in plan.model_drafts for block in one.blocks], np.int64)
        )
        return loaded.draft.run(plan, self._rows, guides)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """While ranks compute: one that fails then has made other calls to the rest than they expect, wherever they are."""
        try:
            yield
        except GroupError:
            raise
        except Exception as error:
            if self._group is ALONE:
                raise
            told = f"{type(error).__name__}: {error}"
            raise GroupError(f"rank {self._group.rank} failed in the middle of computing: {told}") from error

    def _hand_on(self, plan: StepPlan, rows: np.ndarray, layout: BatchLayout, state: ForwardState) -> _Launched:
        """Hands the step on to the next stage. The tokens come back by `enter_tokens`."""
        self._group.send(state.residual, self._group.stage + 1)
        if self._group.is_first_stage:
            sampled_of = np.flatnonzero(np.array(plan.samples, bool))
            sampled = rows[sampled_of]
            self._awaited[plan.step_id] = _Awaited(sampled, layout.contexts[sampled_of], self._rows.versions[sampled])
        return _Launched(plan.step_id, done=self._mark())

    @torch.inference_mode()
    def enter_tokens(self, step_id: int, tokens: list[int]) -> None:
        """On the first of several stages: what the last one has sampled in the step, before a step computes them."""
        awaited = self._awaited.pop(step_id)
        is_same = self._rows.versions[awaited.rows] == awaited.versions
        self._rows.enter(awaited.rows[is_same], awaited.positions[is_same], np.array(tokens, np.int32)[is_same])

    def _forward(
        self,
        plan: StepPlan,
        loaded: _Loaded,
        rows: np.ndarray,
        layout: BatchLayout,
        places: np.ndarray,
        adapters: BatchAdapters | None,
    ) -> ForwardState | None:
        """The state after all layers, whose first T tokens are those of the step; None: it was suspended."""
        if adapters is None and loaded.graphs is not None and layout.all_decode and not plan.is_interruptible:
            state = loaded.graphs.run(self._rows.tokens, places, layout)
            if state is not None:
                return state
        token_places, positions = pack_to_device([places, layout.positions], self.device)
        token_ids = self._rows.tokens.index_select(0, token_places)
        backend, model = loaded.backend, loaded.model
        batch = ForwardBatch(token_ids, positions, loaded.views, backend, backend.prepare(layout), adapters)
        hidden = None
        if not self._group.is_first_stage:
            hidden = torch.empty(len(token_ids), model.hidden_size, dtype=model.dtype, device=self.device)
            self._group.receive(hidden, self._group.stage - 1)
        if not plan.is_interruptible:
            return model.forward(batch, hidden)
        begun = model.begin(batch, hidden)
        versions = self._rows.versions[rows]
        return self._advance(plan, loaded, PartialForward(loaded.model, rows, versions, layout, batch, begun))

    def _batch_adapters(self, rows: np.ndarray, layout: BatchLayout) -> BatchAdapters | None:
        """None: no row has one."""
        if not self._rows.is_adapted[rows].any():
            return None
        by_version: dict[str, list[int]] = {}
        for index, row in enumerate(rows.tolist()):
            if version := self._rows.adapters[row]:
                by_version.setdefault(version, []).append(index)
        groups: list[tuple[LoraWeights, slice | torch.Tensor]] = []
        for version, indices in by_version.items():
            of_adapter = np.array(indices, np.int64)
            if not layout.all_decode:
                of_adapter = np.flatnonzero(np.isin(layout.sequence_of_token, of_adapter))
            first, end = int(of_adapter[0]), int(of_adapter[-1]) + 1
            is_run = end - first == len(of_adapter)
            tokens = slice(first, end) if is_run else to_device(of_adapter, self.device)
            groups.append((self._adapters[version].weights, tokens))
        return BatchAdapters(groups)

    def _advance(self, plan: StepPlan, loaded: _Loaded, forward: PartialForward) -> ForwardState | None:
        """Runs the layers that are left, with safepoints if the plan is interruptible; None: it was suspended."""
        if not plan.is_interruptible:
            loaded.model.run_layers(forward.state, forward.num_layers_done, loaded.model.num_layers, forward.batch)
            return forward.state
        if self._safepoints.run(forward, plan.step_id, loaded.layers_per_safepoint, plan.stop_share):
            return forward.state
        self._suspended[plan.step_id] = forward
        return None

    def _resumed(self, plan: StepPlan, loaded: _Loaded) -> PartialForward:
        forward = self._suspended.pop(plan.step_id, None)
        if forward is None or forward.batch.kv is not loaded.views or forward.rows.tolist() != plan.rows:
            raise ValueError(f"no such step of {plan.model!r} is suspended")
        if (self._rows.versions[forward.rows] != forward.row_versions).any():
            raise ValueError("a row of the suspended step was given to another sequence")
        # other steps were prepared meanwhile, and metadata is valid until the next one is
        forward.batch.metadata = loaded.backend.prepare(forward.layout)
        return forward

    def _sample(
        self,
        plan: StepPlan,
        loaded: _Loaded,
        rows: np.ndarray,
        layout: BatchLayout,
        state: ForwardState,
        guides: Guides | None,
    ) -> _Launched:
        """`guides`: those with which tokens were drafted for the step."""
        sampled_of = np.flatnonzero(np.array(plan.samples, bool))
        if loaded.pooler is not None:
            return self._pool(plan, loaded, loaded.pooler, rows, layout, state, sampled_of)
        prompts = self._rows.prompt_logprobs(loaded.model, state, rows, layout)
        guides = guides or self._grammars.of(rows[sampled_of])
        drafted = self._rows.drafted(plan)
        sampled = self._sampled(loaded.model, rows, layout, state, sampled_of, guides)
        launched = _Launched(plan.step_id, sampled, guides=guides, unguided=[] if guides is None else guides.failed)
        launched.drafted = None if drafted is None else to_host(drafted)
        if self.device.type == "cpu":
            launched.prompt_logprobs = prompts
            if guides is not None:
                self._advance_grammars(launched, sampled.tokens.tolist())
            return launched
        if sampled.logprobs is not None:
            sampled.logprobs = sampled.logprobs.on_host()
        launched.prompt_logprobs = [(index, to_host(packed)) for index, packed in prompts]
        launched.host_tokens = to_host(sampled.tokens)
        launched.done = self._mark()
        return launched

    def _pool(
        self,
        plan: StepPlan,
        loaded: _Loaded,
        pooler: Pooler,
        rows: np.ndarray,
        layout: BatchLayout,
        state: ForwardState,
        ended: np.ndarray,
    ) -> _Launched:
        """In the place of sampling: vectors, and a token for each that stands for nothing."""
        tokens = self._rows.tokens.view(self.num_rows, -1)
        vectors = self._pooled.pooled(loaded.model, pooler, state, rows, layout, ended, tokens)
        sampled = SampledTokens(torch.zeros(len(ended), dtype=torch.int64))
        on_host = vectors if self.device.type == "cpu" else [(index, to_host(vector)) for index, vector in vectors]
        return _Launched(plan.step_id, sampled, done=self._mark(), prompt_logprobs=on_host, is_pooled=True)

    def _sampled(
        self,
        model: DecoderModel,
        rows: np.ndarray,
        layout: BatchLayout,
        state: ForwardState,
        sampled_of: np.ndarray,
        guides: Guides | None,
    ) -> SampledTokens:
        """`sampled_of`: which of the rows are sampled; `guides`: theirs."""
        if not len(sampled_of):
            return SampledTokens(torch.empty(0, dtype=torch.int64, device=self.device))

        def masks() -> Masks | None:
            if guides is None:
                return None
            # The model's part of the step is on the device by now: nothing stands still for the step before it.
            for launched in self._launched:
                if launched.guides is not None and launched.done is not None and launched.host_tokens is not None:
                    launched.done.synchronize()
                    self._advance_grammars(launched, launched.host_tokens.tolist())
            return guides.masks()

        return self._rows.choose(model, rows, layout, state, sampled_of, masks)

    def _advance_grammars(self, launched: _Launched, tokens: list[int]) -> None:
        """Advances grammars once, as soon as the step's tokens are known."""
        if launched.guides is not None:
            self._grammars.advance(launched.guides, tokens)
            launched.guides = None

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind all that was launched; None where launching computes."""
        if self.device.type == "cpu":
            return None
        event: torch.cuda.Event = cuda_event()
        event.record()
        return event

    def _update_rows(self, plan: StepPlan, loaded: _Loaded) -> None:
        for new in plan.new_sequences:
            self._rows.take(new, loaded.max_model_len, loaded.model.vocab_size)
            output = np.frombuffer(new.tokens, np.int32)[new.prompt_tokens :]
            self._pooled.take(new.row, new.sampling)
            self._grammars.take(new.row, new.sampling.grammar, output, loaded.vocabulary)
            self._append_blocks(new.row, new.blocks, loaded)
        for row, blocks in plan.new_blocks:
            self._append_blocks(row, blocks, loaded)

    def _append_blocks(self, row: int, blocks: list[int], loaded: _Loaded) -> None:
        array = np.array(blocks, np.int32)
        self._claim_checked(loaded.views, array)
        self._rows.append_blocks(row, array)

    def _claim_checked(self, views: KvViews, blocks: np.ndarray) -> None:
        """Claims blocks that a plan names. Raises `IndexError` for one that there is not."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < views.num_blocks:
            raise IndexError(f"blocks {blocks.min()}..{blocks.max()} of {views.num_blocks}")
        self._claim(views, blocks)

    def _claim(self, views: KvViews, blocks: np.ndarray) -> None:
        if self._store.claim(views, blocks):
            self._changed = self._mark()

    # ------------------------------------------------------------------------------------------------ copies

    def start_copy(self, copy: KvCopy) -> None:
        """Copies blocks beside the steps; how it went is in `finished_copies`. A checkpoint sees what steps have written
        that were collected. Moves within the device take place at once, between the steps: `IndexError` or `KeyError`
        where one cannot."""
        if copy.kind == CopyKind.MOVE:
            self._move(copy)
            return
        loaded = self._models.get(copy.model)
        views = None if loaded is None else loaded.views
        if views is not None and copy.kind == CopyKind.RESTORE and self.copies.is_valid(copy, views):
            self.claim_blocks(copy.model, copy.device_blocks)
        self.copies.start(copy, views, after=self._changed)

    def _move(self, copy: KvCopy) -> None:
        views = self._models[copy.model].views
        # Those that a reservation holds may not have been written to yet.
        self._claim(views, np.array(copy.target_blocks, np.int64))
        self._store.move(views, copy.device_blocks, copy.target_blocks)
        for row, index, block in copy.tables:
            self._rows.replace_block(row, index, block)
        self._changed = self._mark()
        self.copies.await_move(copy, views, self._changed)

    def claim_blocks(self, model: str, blocks: list[int]) -> torch.cuda.Event | None:
        """Before anything but a step writes to blocks of the model: it may be the first to write to their merged blocks, and
        a later step of the model must find them claimed. On the device such writes wait for the event, if there is one.
        Raises `KeyError` where the model is not here."""
        self._claim(self._models[model].views, np.array(blocks, np.int64))
        return self._changed

    def block_rows(self, model: str, on_host: bool) -> torch.Tensor | BlockParts:
        """`[num_blocks, block_bytes]` uint8: the bytes of a model's blocks, on the device or in the pool of checkpoints (no
        rows where there is none). They stay where they are for as long as the executor lives. Of a group: of all its ranks;
        no rows where those of the others cannot be reached from here. With a window its rows stand for the device's."""
        views = self._models[model].views
        if self._group is ALONE:
            return self._store.block_rows(views, self.copies.pool if on_host else None)
        if self._shared is None or not self._shared.region_bytes:
            return BlockParts([], views.shape.run_bytes)
        merged_bytes = self._store.merged_bytes
        pools = [
            _split(self._shared.region(rank), self._num_shared_merged, merged_bytes)[on_host]
            for rank in range(self._shared.num_ranks)
        ]
        if not on_host and not self.has_window:
            pools = [pool[: self._store.pool.numel()] for pool in pools]
        stages = []
        for stage in range(self._group.num_stages):
            num_layers = len(self._group.layers_of(self._models[model].num_layers, stage))
            of_stage = replace(views, shape=replace(views.shape, num_layers=num_layers))
            ranks = pools[stage * self._group.size : (stage + 1) * self._group.size]
            stages.append([self._store.block_rows(of_stage, pool) for pool in ranks])
        return BlockParts(stages, views.shape.run_bytes)

    def kv_key(self, model: str) -> str:
        """Names all that the contents of a model's blocks depend on, but for the tokens: its weights and configuration,
        their types, the size of its blocks, the attention back end, and in deterministic mode its very bits. Empty: that is
        not known. Raises `KeyError` where the model is not here."""
        loaded = self._models[model]
        identity = loaded.identity
        if identity is None:
            return ""
        facts = (
            identity.files, str(identity.dtype), identity.max_model_len, identity.quantization, loaded.fingerprint,
            checkpoint.read_config(identity.path), loaded.num_layers, loaded.block_size, loaded.model.head_dim,
            loaded.backend.facts.name,
            self._group.size if self._numerics is INVARIANT else 0,
        )  # fmt: skip
        return blake2b(msgspec.json.encode([model, *facts]), digest_size=16).hexdigest()

    def num_blocks(self, model: str) -> int:
        """Blocks of the device's pool."""
        return self._models[model].views.num_blocks

    def move_window(self, model: str, blocks: Sequence[int], outward: bool) -> None:
        """Copies blocks that steps which were collected have written, or that were claimed, to the first places of the
        window, or back. Blocking; from any thread, one at a time. Raises `KeyError` where the model is not here."""
        views = self._models[model].views
        rows, window = self._store.block_rows(views), self._store.block_rows(views, self._window)
        with beside_steps(self.device, self._window_stream):
            if self._changed is not None:
                self._changed.synchronize()
            for place, block in enumerate(blocks):
                target, source = (window[place], rows[block]) if outward else (rows[block], window[place])
                target.copy_(source)

    def finished_copies(self) -> list[EndedCopy]:
        """Those that ended since the last call."""
        return self.copies.finished()

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        """`callback` is called in the thread that copies, after each copy; it must not block."""
        self.copies.on_finished = callback


def region_bytes(num_merged: int, merged_bytes: int, num_host_merged: int, num_window_merged: int = 0) -> int:
    """Bytes of a rank in the memory that ranks share: its slab or window, and its pool of checkpoints."""
    return ((num_window_merged or num_merged + 1) + num_host_merged) * merged_bytes


def _split(region: torch.Tensor, num_first_merged: int, merged_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slab or window, and the pool of checkpoints."""
    end = num_first_merged * merged_bytes
    return region[:end], region[end:]


def _agreement(group: RankGroup, shared: RankMemory | None) -> Agreement:
    if group is ALONE:
        return FREE
    if shared is None:
        raise ValueError("ranks need memory that they share")
    return Leader(shared.words) if group.stage == group.rank == 0 else Follower(shared.words)
