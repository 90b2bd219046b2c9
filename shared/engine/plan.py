"""What the engine hands to an executor, and what comes back: plain data, no torch.

A step is columnar: element i of `rows`, `starts`, `counts` and `samples` describe the i-th sequence of the step. An
executor mirrors each sequence in a fixed row (its tokens, its block table, its sampling state); the plan sends a sequence
in full once (`new_sequences`) and afterwards only what changed (`new_blocks`). Steps execute strictly in the order in
which they were planned, so a row may be given to another sequence in the very next step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from shared.costs.model import StepShape, shape_of
from shared.messages.requests import SamplingParams, TokenLogprob

NO_TOKEN = -1
"""In place of a sampled token: the logits were NaN or infinite, which choose none."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a row (again, after a preemption)."""

    row: int
    tokens: bytes
    """Packed int32: prompt and the output known so far."""
    prompt_tokens: int
    """How many of `tokens` are the prompt; the rest counts as output for penalties and `min_tokens`."""
    sampling: SamplingParams
    blocks: list[int]
    """Its whole block table at this moment: flat block indices of its model (memory/blocks.py)."""
    adapter: str = ""
    """Version of the LoRA adapter that it is computed with; empty: none."""


class ModelDraft(msgspec.Struct, frozen=True, array_like=True):
    """What the draft model does for a column's sequence before the step."""

    column: int
    start: int
    """Tokens of it in the draft model's cache."""
    count: int
    """Tokens that it computes after them: where it drafts, up to the one that the column computes."""
    num_drafts: int
    """Tokens that it drafts, the first behind the column's one."""
    blocks: list[int]
    """The whole table of the blocks of the pool that hold its cache of the sequence (`DraftShape`)."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    step_id: int
    model: str
    rows: list[int]
    starts: list[int]
    """Position of the first token computed in this step; equals the number of tokens already in the KV cache."""
    counts: list[int]
    """Tokens computed: 1 for a decode, a chunk's length for prefill. The token at a position that the executor sampled in
    an earlier step (perhaps one that is still in flight) is not sent: the executor has it in the row."""
    samples: list[bool]
    """Whether the last computed position's logits are sampled into the next token."""
    new_sequences: list[NewSequence]
    new_blocks: list[tuple[int, list[int]]]
    """(row, blocks appended to its block table), applied after `new_sequences`."""
    num_decodes: tuple[int, int] = (0, 0)
    """Decoding sequences among the rows: online, offline."""
    is_interruptible: bool = False
    """The executor passes safepoints, and at one of them may suspend the step (`StepResult.suspended_share`)."""
    resumes: bool = False
    """Goes on with the suspended step of this id; the other columns are those it was first launched with, but
    `new_sequences` and `new_blocks` are empty."""
    stop_share: float = 1.0
    """An interruptible step suspends itself at the last safepoint within this share of the model's layers (counted from the
    first, also where it resumes), but not before the next one."""
    discards: tuple[int, ...] = ()
    """Suspended steps that will not be resumed: what is kept of them can be dropped."""
    drafts: list[tuple[int, list[int]]] = []
    """(index of a column, tokens guessed to follow the one that it samples): see `expanded`. `NO_TOKEN` for those that the
    draft model makes; they come last."""
    model_drafts: list[ModelDraft] = []

    @property
    def num_tokens(self) -> int:
        """Without drafts."""
        return sum(self.counts)

    @property
    def shape(self) -> StepShape:
        """Shape with drafts, each of which costs as much as a decode."""
        expanded = self.expanded()
        return shape_of(expanded.starts, expanded.counts)

    def expanded(self) -> StepPlan:
        """The plan as it is executed: behind the columns each draft token is one of its own, at the position where it would
        be, and what follows it is sampled. The executor puts draft tokens into the row before; what is sampled overwrites
        them."""
        if not self.drafts:
            return self
        rows, starts = list(self.rows), list(self.starts)
        for index, tokens in self.drafts:
            first = starts[index] + self.counts[index]
            rows += [rows[index]] * len(tokens)
            starts += range(first, first + len(tokens))
        num_drafts = len(rows) - len(self.rows)
        return msgspec.structs.replace(
            self,
            rows=rows,
            starts=starts,
            counts=self.counts + [1] * num_drafts,
            samples=self.samples + [True] * num_drafts,
        )


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The sampled tokens, or `NO_TOKEN`: one for each True in `samples`, in order, then one after each draft token. `error`
    set: the step failed; its row changes count (they come first), its computation does not."""

    step_id: int
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    """None where no sequence of the step asked for log-probabilities."""
    error: str = ""
    suspended_share: float = -1.0
    """Not below 0: the step was interrupted at a safepoint after this share of its layers and is kept to be resumed;
    nothing was sampled."""
    prompt_logprobs: list[tuple[int, bytes]] = []
    """(index of a column, packed log-probabilities of the prompt's tokens after each that it computed, or what was pooled of
    the whole prompt), of sequences that asked for them."""
    unguided: list[tuple[int, str]] = []
    """(index among the tokens, why) of those whose grammar could not be followed: their requests are over."""
    drafted: list[int] = []
    """The draft model's tokens, one for each `NO_TOKEN` of the plan's drafts, in order."""
    draft_passes_s: list[float] = []
    """Seconds of each of its passes."""


class CopyKind(StrEnum):
    CHECKPOINT = "checkpoint"
    """Device to host."""
    RESTORE = "restore"
    """Host to device."""
    MOVE = "move"
    """Within the device, from some merged blocks of the model to others."""
    WRITE = "write"
    """Host to disk."""
    READ = "read"
    """Disk to host."""


class KvCopy(msgspec.Struct, frozen=True, array_like=True):
    """Effect: copy whole blocks between the device's pool and the host's, or the host's and a disk, beside the steps. The
    engine hands none of these blocks to anybody else before `on_copy(copy_id, ...)`; those of a restore are in no step
    planned before it, and those of a checkpoint were filled by steps that have returned.

    A move is otherwise: it takes place between the steps, after all that were planned before it and before whatever else
    the engine named after it (steps, copies, blocks for transports), since its `device_blocks` may be others' by then, and
    sequences are in its `target_blocks`. It cannot fail: an executor that cannot carry it out is of no more use."""

    copy_id: int
    kind: CopyKind
    model: str
    device_blocks: list[int]
    host_blocks: list[int]
    """Same length; flat block indices of the model in the host pool, which has merged blocks of the same size. None for a
    move."""
    target_blocks: list[int] = []
    """Blocks that a move fills; same length."""
    tables: list[tuple[int, int, int]] = []
    """A move's entries in block tables: (row, index in its block table, the block there from now on)."""
    hashes: list[bytes] = []
    """Hashes by which the blocks of a write or a read, which have no device blocks, are found on disk."""
    depth: int = 0
    """Blocks before the first of these in the chain of their hashes."""
    gives_way_s: float = 0.0
    """A write lets others on disk give way that were not used for so many seconds; if none was, it fails."""


class DraftShape(msgspec.Struct, frozen=True, array_like=True):
    """What the engine must know of a model's draft model. Its KV lies in blocks of the model, several of its own in each."""

    tokens_per_block: int
    """Tokens whose KV fits in a block of the model."""
    max_model_len: int


class ModelShape(msgspec.Struct, frozen=True, array_like=True):
    """What the engine must know of a loaded model."""

    name: str
    block_size: int
    """Tokens in one KV block."""
    blocks_per_merged: int
    """Blocks of this model in one merged block of the pool."""
    max_model_len: int
    vocab_size: int = 0
    """Token ids are below it; 0: not checked."""
    num_layers: int = 1
    layers_per_safepoint: int = 1
    """Layers between safepoints of interruptible steps, until a measured cost model says otherwise."""
    fingerprint: str = ""
    """Fingerprint of the bits that it makes on this executor, in deterministic mode."""
    draft: DraftShape | None = None
    """Shape of its draft model; None: it has none here."""

    @property
    def tokens_per_merged(self) -> int:
        return self.block_size * self.blocks_per_merged


class EndedCopy(NamedTuple):
    """A copy that has ended."""

    copy_id: int
    ok: bool
    seconds: float = 0.0
    """Time from its turn among the copies on; 0: not timed."""
