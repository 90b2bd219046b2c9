"""What a worker and an engine's adapter say to each other: one message a step, on a socket of their own.

The adapter runs in the engine's environment, of which nothing is known but that it has msgspec; so this module, and all that
it imports, needs nothing else.
"""

from __future__ import annotations

import msgspec

from shared.messages.requests import Adapter, ErrorInfo, FinishReason, Image, SamplingParams, TokenLogprob


class EngineFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Said once, when the engine serves its model."""

    version: str
    lacks: tuple[str, ...]
    """Members of `Capability`."""
    max_model_len: int
    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    """KV blocks that requests may have."""
    block_bytes: int
    max_running: int
    """Rows of a step at most."""
    max_step_tokens: int
    pid: int = 0
    """Process id of the engine, where it is another than the adapter's; 0: there is none."""
    notes: tuple[str, ...] = ()
    """Notes for the log: why it lacks what other versions have."""
    staging: str = ""
    """Path of the staging memory, for as long as the engine's process lives: `num_slots` blocks, through which KV comes and
    goes. Empty: KV does not move."""
    num_slots: int = 0
    max_adapters: int = 0
    """LoRA adapters that it keeps; 0: it takes none."""
    layout: str = ""
    """What engines have in common whose KV blocks are alike, byte by byte."""


class Generate(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="generate"):
    """Begin a sequence."""

    key: str
    """Names it from here on: a request in one epoch."""
    prompt: bytes
    """Packed token ids: with output to go on after, if there is any."""
    sampling: SamplingParams
    """`max_tokens` and `min_tokens` count from the prompt given here."""
    priority: int
    """Lower goes first; `OFFLINE_PRIORITY` and above gives way."""
    waited_s: float = 0.0
    num_fed: int = 0
    """The last tokens of `prompt` that are output already: a grammar follows them."""
    ttft_s: float = 0.0
    """Objective; 0: the model's. Likewise per output token."""
    tpot_s: float = 0.0
    salt: str = ""
    """Only sequences of the same share cached prefixes."""
    adapter: Adapter | None = None
    """LoRA adapter that it is computed with; None: the model's own weights."""
    slots: tuple[int, ...] = ()
    """Slots of the staging memory with the KV of the prompt's first tokens. `Imported` says that they were read."""
    num_computed: int = 0
    """Tokens whose KV is in `slots`."""
    images: tuple[Image, ...] = ()
    """`GenerationRequest.images`; likewise `chat` and `is_open_ended`."""
    chat: bytes = b""
    is_open_ended: bool = False


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Nothing is said of these any more."""

    keys: tuple[str, ...]


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag="clear_cache"):
    """Makes unreferenced KV blocks unfindable."""


class Export(msgspec.Struct, frozen=True, array_like=True, tag="export"):
    """Copy full blocks of a sequence, from `first_block` on, into these slots; it goes on. Answered by `Exported`."""

    key: str
    first_block: int
    slots: tuple[int, ...]


class TakeOut(msgspec.Struct, frozen=True, array_like=True, tag="take_out"):
    """End a sequence between two steps, after its computed blocks from `first_block` on, the last one perhaps partly filled,
    were copied into these slots, as far as these go. Answered by `TakenOut`, after all of its output."""

    key: str
    first_block: int
    slots: tuple[int, ...]


Command = Generate | Abort | ClearCache | Export | TakeOut

OFFLINE_PRIORITY = 100


class Progress(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What a step made for one sequence."""

    key: str
    tokens: bytes = b""
    """Packed."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached: int = 0
    """Tokens of its prompt that were in the prefix cache."""
    num_preemptions: int = 0
    """Since the last message."""
    num_prompt: int = 0
    """Tokens of its prompt with its images; 0: those that were sent."""


class Step(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="step"):
    """What one step made, and what it was."""

    progress: list[Progress]
    used_share: float = 0.0
    """Used share of the KV blocks."""
    shape: tuple[int, float, int, int] | None = None
    """Fields of a `StepShape`; None: it is not known."""
    seconds: float = 0.0
    """Seconds that the step took; 0: it is not known."""
    is_interrupted: bool = False
    """Whether it was given up for an online request."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    facts: EngineFacts


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine is of no more use; the adapter ends."""

    message: str
    is_final: bool = False
    """Starting it again would fail again."""


class Exported(msgspec.Struct, frozen=True, array_like=True, tag="exported"):
    slots: tuple[int, ...]
    is_done: bool
    """Else the sequence did not have these blocks any more."""


class TakenOut(msgspec.Struct, frozen=True, array_like=True, tag="taken_out"):
    key: str
    num_filled: int
    """Slots with blocks; below 0: the blocks before are lost too."""
    num_computed: int
    """Tokens whose KV is in these and in the blocks before."""


class Imported(msgspec.Struct, frozen=True, array_like=True, tag="imported"):
    """The slots of a sequence that came may be used again."""

    key: str


Moved = Exported | TakenOut | Imported
"""Answers about KV that moves."""
Report = Step | Ready | Failed | Moved
