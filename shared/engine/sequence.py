"""One request as an instance computes it: its tokens, its place in the KV pool, its progress.

Counts of a sequence (all in tokens):

    0 ......... num_prompt ......... len(tokens) ......... total
    |--prompt--|------known output--|--sampled in flight---|
    |======== num_computed ========>                          KV written, or being written by a step in flight
    |== filled blocks ==>                                     KV written by steps that have returned
    |== host_blocks ==>                                       copied to host memory
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from shared.engine.memory.blocks import chain_hash, prefix_root
from shared.messages.requests import (
    GenerationRequest,
    Priority,
    RequestClass,
    pack_tokens,
    packed_logprob_bytes,
    unpack_tokens,
)

if TYPE_CHECKING:
    from shared.policies.prompt_lookup import PromptLookup


class State(IntEnum):
    WAITING = 0
    """Without row and blocks."""
    RUNNING = 1
    RESTORING = 2
    """Has its row and blocks; host copies of its blocks are, or have been, copied into them."""
    ENDED = 3
    LEAVING = 4
    """Out of the batch (or the queue), on its way to another instance: keeps row and blocks, is nobody's victim."""


class Handover(IntEnum):
    """How far a sequence's move to another instance has come."""

    NONE = 0
    PINNED = 1
    """Its filled blocks are being sent while it goes on."""
    LOST = 2
    """It was preempted since: whoever moves it is told so at the next call."""
    FROZEN = 3
    """It may be another's by now: neither cancel nor deadline ends it here."""


class PriorityClass(IntEnum):
    """Classes of one model's requests in strict order: a lower rank never waits for a higher one. Between models see
    planner.py."""

    ONLINE_HIGH = 0
    ONLINE_NORMAL = 1
    OFFLINE = 2


def class_of_priority(request_class: RequestClass, priority: Priority) -> PriorityClass:
    if request_class == RequestClass.OFFLINE:
        return PriorityClass.OFFLINE
    return PriorityClass.ONLINE_HIGH if priority == Priority.HIGH else PriorityClass.ONLINE_NORMAL


def priority_class_of(request: GenerationRequest) -> PriorityClass:
    return class_of_priority(request.request_class, request.priority)


class Sequence:
    """Plain state; all rules are in planner.py and engine.py."""

    __slots__ = (
        "arrived_s",
        "block_size",
        "blocks",
        "capacity",
        "deadline_s",
        "device_s",
        "draft_blocks",
        "draft_rate",
        "first_planned_s",
        "first_token_s",
        "first_total",
        "generation",
        "handover",
        "hashes",
        "here_since_s",
        "host_blocks",
        "in_flight",
        "is_cancelled",
        "is_online",
        "is_silent",
        "is_spoilt",
        "last_ran_s",
        "last_token_s",
        "lookup",
        "max_itl_s",
        "max_total",
        "min_total",
        "model",
        "moved_s",
        "next_register",
        "num_cached_tokens",
        "num_checkpointing",
        "num_computed",
        "num_disk_tokens",
        "num_draft_kept",
        "num_draft_tokens",
        "num_drafted",
        "num_failures",
        "num_host_tokens",
        "num_migrations",
        "num_preemptions",
        "num_prompt",
        "num_recomputed",
        "num_restored_blocks",
        "num_suspensions",
        "number",
        "order_state",
        "peak_computed",
        "priority_class",
        "promised_s",
        "prompt_logprobs",
        "read_hashes",
        "request",
        "restore",
        "row",
        "service_s",
        "state",
        "stop_ids",
        "submitted_s",
        "tenant",
        "tokens",
        "total",
        "tpot_objective_s",
        "ttft_due_s",
    )

    def __init__(
        self, request: GenerationRequest, number: int, now: float, max_model_len: int, block_size: int
    ) -> None:
        sampling = request.sampling
        prompt = unpack_tokens(request.prompt)
        self.request = request
        self.model = request.model
        self.number = number
        self.priority_class = priority_class_of(request)
        self.is_online = self.priority_class != PriorityClass.OFFLINE
        self.submitted_s = self.here_since_s = now
        self.arrived_s = now - request.waited_s
        self.deadline_s = now + request.timeout_s
        self.block_size = block_size
        self.num_prompt = len(prompt)
        self.tokens = prompt + unpack_tokens(request.prior)
        self.total = len(self.tokens)
        self.max_total = min(len(prompt) + sampling.max_tokens, max_model_len)
        self.min_total = len(prompt) + sampling.min_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.state = State.WAITING
        self.row = -1
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that `blocks` can hold."""
        self.num_computed = 0
        self.in_flight = 0
        """Steps in flight that compute this sequence; its blocks stay its own until they return."""
        self.generation = 0
        """Grows when planned work is rolled back: results of an older generation are dropped."""
        self.is_spoilt = False
        """A step of it failed: its row and blocks may not hold what they should, so it is to be preempted."""
        self.hashes: list[bytes] = []
        """Chained hashes of the full blocks of known tokens, as far as they were needed."""
        self.next_register = 0
        """Computed tokens at which the next full block can be entered in the prefix cache."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_failures = 0
        self.is_silent = True
        """It has made no token since it came here, or was preempted."""
        self.first_planned_s: float | None = None
        self.first_token_s: float | None = None
        self.first_total = 0
        """`total` with that token."""
        self.last_token_s: float | None = None
        self.max_itl_s = 0.0
        """The longest time between two of its tokens."""
        self.ttft_due_s = self.deadline_s
        """Until when the objective wants the first token."""
        self.tpot_objective_s = float("inf")
        self.order_state: Any = None
        """The ordering policy's."""
        self.last_ran_s = self.arrived_s
        self.tenant = request.tenant
        self.service_s = 0.0
        """Charged to its tenant: its part of the steps."""
        self.promised_s = 0.0
        """Service for the part of its prompt that was begun and not charged yet (tenant_shares.py)."""
        self.device_s = 0.0
        """Execution time charged so far: what its part of each step takes alone."""
        self.host_blocks: list[int] = []
        """Host blocks with the contents of the first blocks; each holds a reference."""
        self.num_checkpointing = 0
        """Blocks after those that are being copied to host memory."""
        self.restore: tuple[int, list[int]] = (0, [])
        """(index of the first block, host blocks) still to be copied back; each holds a reference."""
        self.peak_computed = 0
        """Tokens that had been computed when it was last preempted."""
        self.num_recomputed = 0
        self.num_restored_blocks = 0
        self.read_hashes: set[bytes] = set()
        """Blocks of it that were being read from disk when they were found."""
        self.num_host_tokens = self.num_disk_tokens = 0
        """The part of its cached tokens that came from there."""
        self.num_suspensions = 0
        self.handover = Handover.NONE
        self.is_cancelled = False
        """A cancel came while it was frozen."""
        self.moved_s = float("-inf")
        """Time at which its last move ended, here or not."""
        self.num_migrations = 0
        self.lookup: PromptLookup | None = None
        """Index in which drafts are looked up (drafting.py)."""
        self.draft_blocks: list[int] = []
        """Blocks with the draft model's KV."""
        self.num_drafted = 0
        """Tokens in the draft model's cache."""
        self.draft_rate = -1.0
        """Share of the draft model's tokens that were kept; below 0: it has drafted none."""
        self.num_draft_tokens = self.num_draft_kept = 0
        """Tokens that were guessed, in whatever way, and how many of them were kept."""
        self.prompt_logprobs: bytearray | None = None
        """Packed, of the prompt's tokens from the second on, as far as they are known; or what was pooled of it. None:
        nobody asked, or they went out with the first token."""
        if (sampling.prompt_logprobs >= 0 or sampling.pooled is not None) and not request.prior:
            self.prompt_logprobs = bytearray()

    @property
    def num_filled(self) -> int:
        """Blocks whose contents are final: filled by steps that have returned."""
        return self.next_register // self.block_size - 1 if self.blocks else 0

    @property
    def num_uncheckpointed(self) -> int:
        """Filled blocks of which no host copy exists or is being made."""
        return max(0, self.num_filled - len(self.host_blocks) - self.num_checkpointing)

    @property
    def num_checkpointed_blocks(self) -> int:
        """How many of its first blocks are in host memory or on the way there."""
        return len(self.host_blocks) + self.num_checkpointing

    @property
    def is_in_decode(self) -> bool:
        """Whether one token is all that is to be computed of it now."""
        return self.total - self.num_computed == 1

    @property
    def num_reusable(self) -> int:
        """How many of its first tokens need not be computed where their KV is found: all but the last, or as many as have
        given the log-probability of the token after them, where that is asked for. None where all are pooled."""
        pooled = self.request.sampling.pooled
        if self.prompt_logprobs is None or pooled is not None:
            return 0 if pooled is not None and pooled.is_whole else self.total - 1
        return len(self.prompt_logprobs) // packed_logprob_bytes(self.request.sampling.prompt_logprobs)

    def add_prompt_logprobs(self, start: int, packed: bytes) -> None:
        """Adds log-probabilities of the prompt's tokens after position `start`. What is known from before a preemption is
        left as it is. Where some before them were never computed here, none are told of. What is pooled comes once."""
        if self.prompt_logprobs is None:
            return
        if self.request.sampling.pooled is not None:
            self.prompt_logprobs[:] = packed
            return
        first = start * packed_logprob_bytes(self.request.sampling.prompt_logprobs)
        if first > len(self.prompt_logprobs):
            self.prompt_logprobs = None
        else:
            self.prompt_logprobs += packed[len(self.prompt_logprobs) - first :]

    def take_prompt_logprobs(self) -> bytes:
        """Once, with the first token."""
        packed, self.prompt_logprobs = self.prompt_logprobs, None
        return bytes(packed or b"")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def packed_output(self) -> bytes:
        return pack_tokens(self.tokens[self.num_prompt :])

    @property
    def num_moving_blocks(self) -> int:
        """Blocks that would travel with it: those that it runs with, or those of its checkpoint."""
        if self.state != State.RUNNING:
            return len(self.host_blocks)
        return min(len(self.blocks), -(-self.num_tokens // self.block_size))

    def extend_hashes(self, num_blocks: int, block_size: int, root: bytes, first_block: int = 0) -> list[bytes]:
        """The chained hashes of the first `num_blocks` full blocks of known tokens, from `first_block` on. `root`: of the
        model; see `prefix_root`."""
        hashes = self.hashes
        first, end = len(hashes) * block_size, num_blocks * block_size
        if first < end:
            in_prompt = end <= self.num_prompt
            packed = self.request.prompt[4 * first : 4 * end] if in_prompt else pack_tokens(self.tokens[first:end])
            if not hashes:
                adapter = self.request.adapter
                root = prefix_root(root, "" if adapter is None else adapter.version, self.request.prefix_salt)
            previous = hashes[-1] if hashes else root
            for at in range(0, len(packed), 4 * block_size):
                previous = chain_hash(previous, packed[at : at + 4 * block_size])
                hashes.append(previous)
        return hashes[first_block:num_blocks]
