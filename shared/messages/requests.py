"""A request and its tokens, on their way between gateway, scheduler and instance."""

from __future__ import annotations

from array import array
from enum import StrEnum
from struct import Struct
from typing import Annotated

import msgspec
from msgspec import Meta

# What a peer may send at most: a message beyond it cannot be read, so that none of it reaches the arithmetic.
Count = Annotated[int, Meta(ge=0, le=2**52)]
Amount = Annotated[int, Meta(ge=-(2**52), le=2**52)]
Epoch = Annotated[int, Meta(ge=0, le=2**52)]
"""Adding to it stays far from where 64 bits end."""
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Unix times too."""
Number = Annotated[float, Meta(ge=-1e300)]
"""Infinite perhaps, but never NaN."""
PeerId = Annotated[str, Meta(max_length=256, pattern=r"^[^\s.*>]*$")]
"""Becomes part of a subject: NATS closes the connection of who publishes to one that is too long."""
MAX_TENANT_NAME = 64
"""Characters."""

TenantName = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]
"""Who shares service with others: an API key's, or what a trusted proxy names; empty where there are no keys."""

TenantWeight = Annotated[float, Meta(ge=1e-3, le=1e3)]

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids as int32 bytes in the machine's order, which is little-endian on all that torch runs on."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens.tolist()


PLACEMENT_EPOCHS = 64
"""Epochs of one placement: it begins at a multiple, and each move from instance to instance inside it takes one or two, so
that a request placed again never shares an epoch with wherever the last placement has moved to."""


def next_placement(epoch: int) -> int:
    """The first epoch of the placement after that of `epoch`."""
    return (epoch // PLACEMENT_EPOCHS + 1) * PLACEMENT_EPOCHS


class RequestClass(StrEnum):
    ONLINE = "online"
    OFFLINE = "offline"


class Priority(StrEnum):
    HIGH = "high"
    NORMAL = "normal"


class FinishReason(StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are success; `ERROR` comes with an `ErrorInfo`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Typed reasons of refusals and failures, on the bus and in `ErrorInfo`."""

    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "too_long"
    """The request can never fit (model length or KV pool)."""
    OVERLOADED = "overloaded"
    """A bounded queue is full; try again after `retry_after_s`."""
    BUSY = "busy"
    """The handler's concurrency bound was reached."""
    GONE = "gone"
    """The addressed thing (request, instance, model) is not here any more."""
    DRAINING = "draining"
    NOT_LEADER = "not_leader"
    DEADLINE = "deadline"
    CONFLICT = "conflict"
    NOT_PERMITTED = "not_permitted"
    """NATS refuses this process's user a subject."""
    INTERNAL = "internal"
    MODEL_FAILED = "model_failed"
    """The model cannot be loaded, and could not by trying again."""
    LOADING = "loading"
    """What the request needs (a LoRA adapter) is being loaded there: ask again."""
    UNAVAILABLE = "unavailable"
    """The needed peer (scheduler, instance, NATS) cannot be reached."""
    HANDED_OVER = "handed_over"
    """The gateway ends, and the request goes on without it."""
    STORAGE_FULL = "storage_full"
    """NATS cannot write to its disk, which is full."""
    NOT_FINITE = "not_finite"
    """The model's logits are NaN or infinite, of which no token can be chosen."""
    NOT_FOUND = "not_found"
    """What an operator names is not there: a folder, or a repository of the hub."""
    CANCELLED = "cancelled"
    """Whoever asked for it wants it no more."""
    CRASHED = "crashed"
    """Instances crash when they compute the request."""


PLACE_AGAIN_CODES = frozenset({ErrorCode.GONE, ErrorCode.DRAINING, ErrorCode.UNAVAILABLE, ErrorCode.NOT_LEADER})
"""An owner that ends a request for one of these has only given it up; another can continue it."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    code: ErrorCode
    message: str
    param: str = ""
    """The field at fault, if one is."""
    retry_after_s: Seconds = 0.0


class Pooled(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a request wants of a model that embeds or scores texts, in place of output: its one token means nothing."""

    num_dimensions: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of the vector's first dimensions that are kept; 0: all."""
    num_first: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens of the first of two texts, in models that tell them apart; 0: there is one text."""
    is_whole: bool = False
    """Every token is computed: KV that is found does not do."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How tokens are chosen. Field meanings as in OpenAI's and vLLM's APIs."""

    max_tokens: Annotated[int, Meta(le=2**31 - 1)]
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 is off."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-1000, le=1000)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-1000, le=1000)] = 0.0
    seed: int = 0
    """Noise is a function of (seed, position), so that any instance continues a request alike. The gateway draws one
    where the client gave none."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """End the output; includes the model's end-of-sequence ids unless `ignore_eos`. Stop strings are the gateway's."""
    logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """-1: none; k >= 0: the chosen token's log-probability and the k most likely."""
    logit_bias: tuple[tuple[TokenId, Annotated[float, Meta(ge=-1000, le=1000)]], ...] = ()
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """-1: none; k >= 0: as `logprobs` for the tokens of the prompt, which come with the first output token's; so that needs
    `logprobs` of 0 or more."""
    grammar: str = ""
    """Grammar that the output follows, as llguidance takes it (JSON); empty: none. Whoever runs the request makes its
    matcher from this and the output so far, so that nothing else of it travels."""
    pooled: Pooled | None = None
    """The prompt's hidden states are made into a vector or a score, which comes with the first output token; so that needs
    `logprobs` of 0 or more."""
    is_seed_drawn: bool = False
    """The client named no seed: what follows output may be drawn otherwise by an engine that has noise of its own."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter (Hu et al. 2021): what a request is computed with beside the weights of its model."""

    name: str
    """Name of the model that it is to clients."""
    version: str
    """Another one each time that it is added: KV of two versions is never shared."""
    source: str
    """A folder in PEFT's format, or a hub id."""


MAX_IMAGES_BYTES = 440 * 1024
"""Most bytes of a prompt's images and the chat that they come in: they travel in one message with the prompt's tokens, which
may take `MAX_MESSAGE_BYTES`; NATS carries 1,000,000 bytes in each."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt: its file, or where that is."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    """http or https: the server of the model fetches it. Empty: `data` has the image."""


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate, from gateway to scheduler to instance. A client's `n > 1` is n of these."""

    request_id: str
    gateway_id: PeerId
    model: str
    prompt: bytes
    """Packed token ids."""
    sampling: SamplingParams
    request_class: RequestClass = RequestClass.ONLINE
    priority: Priority = Priority.NORMAL
    timeout_s: Seconds = 600.0
    """Time left at the moment of sending. Whoever holds the request past it drops it and says so."""
    epoch: Epoch = 0
    """Ownership number: each placement begins at the next multiple of `PLACEMENT_EPOCHS`, each move to another instance
    adds to it. Frames of a lower epoch than the highest seen are dropped."""
    prior: bytes = b""
    """Packed output tokens that the client already has (a request placed again continues after them)."""
    waited_s: Seconds = 0.0
    """How long the request has waited before this hop."""
    traceparent: str = ""
    """W3C trace context of the request's root span."""
    ttft_objective_s: Seconds = 0.0
    """Time to first token that the client wants, from its arrival; 0: the model's."""
    tpot_objective_s: Seconds = 0.0
    """Time per output token after the first; 0: the model's."""
    ttft_s: Seconds = -1.0
    """Time from its arrival to the first token of `prior`; below 0: it is not known, or there is none."""
    prompt_lookup: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Tokens guessed at most for it in a step; -1: as many as the instance guesses, which is the most in any case."""
    adapter: Adapter | None = None
    """Adapter of `model`; None: it is computed with the model's own weights."""
    is_mirror: bool = False
    """A copy of another, whose answer nobody sees: in no statistics."""
    is_open_ended: bool = False
    """Its client named no `max_tokens`: those of `sampling` are what fits, and fewer where less does."""
    tenant: TenantName = ""
    """Tenant for whom it is computed; empty where no keys are set: one tenant like any other."""
    tenant_weight: TenantWeight = 1.0
    """Share of its tenant against each other one."""
    prefix_salt: Annotated[str, Meta(max_length=MAX_TENANT_NAME)] = ""
    """Only requests of the same salt use each other's cached prefixes."""
    decoder: PeerId = ""
    """Instance that it is handed over to when its prompt is computed; empty: it stays where it is."""
    prefix_holder: PeerId = ""
    """Instance that has its first `prefix_tokens` tokens in its cache, from which their KV is fetched; empty: it is not."""
    prefix_tokens: Count = 0
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order in which it has placeholders for them."""
    chat: bytes = b""
    """Fields of a chat with the prompt's messages (JSON), for a server that takes images in chats alone. Its image parts
    have no URL: they stand for `images`. Empty: the engine takes the prompt's tokens."""

    @property
    def public_model(self) -> str:
        """The model as its client named it, under which it is counted."""
        return self.model if self.adapter is None else self.adapter.name


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: Epoch | None = None
    """Only where it is held in this epoch or a lower one, and not to be forwarded; None: wherever it is."""


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The request is queued or running here. Sending it again with the same epoch is answered alike, with no effect."""

    request_id: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    """Log-probability of the chosen token."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[Number, ...] = ()
    rank: Count = 0
    """1 is the most likely."""
    prompt: bytes = b""
    """Part of a first output token: the log-probabilities of the prompt's tokens from the second on (`unpack_logprobs`), or
    what was pooled of it, float32 in the machine's order (`unpack_vector`)."""


UNKNOWN_LOGPROB = TokenLogprob(-9999.0)
"""Stands for one that an instance did not send."""


MAX_PROMPT_LOGPROBS_BYTES = 384 * 1024
"""Packed, of one prompt: they travel in one message with its first token."""


def packed_logprob_bytes(num_top: int) -> int:
    """Bytes of one packed log-probability with its `num_top` alternatives: float32 and rank as int32, then the
    alternatives' ids as int32, then their float32."""
    return 8 + 8 * num_top


def unpack_logprobs(packed: bytes, num_top: int) -> list[TokenLogprob]:
    row = Struct(f"=fi{num_top}i{num_top}f")
    return [
        TokenLogprob(logprob, tuple(rest[:num_top]), tuple(rest[num_top:]), rank)
        for logprob, rank, *rest in row.iter_unpack(packed)
    ]


def unpack_vector(packed: bytes) -> array[float]:
    """What was pooled of a prompt: `[num_dimensions]` float32."""
    vector = array("f")
    vector.frombytes(packed)
    return vector


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a request on its instance, sent with its last entry."""

    queued_s: Seconds = 0.0
    """Arrival at the instance to first being planned."""
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    num_preemptions: Count = 0


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What one iteration made for one request."""

    request_id: str
    epoch: Epoch
    offset: Count
    """Position in the output of the first token here; equals the number of output tokens before it."""
    tokens: bytes
    """Packed; may be empty in a last entry."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: Count = 0
    """Prompt tokens found in the prefix cache."""
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None
    num_prompt_tokens: Count = 0
    """Tokens of the prompt with its images; 0: those that were sent."""


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """All tokens that one iteration of one instance made for one gateway's requests. `sender` is an instance id, or a
    scheduler's id where a queued request ended without being dispatched."""

    sender: PeerId
    entries: list[TokenEntry]


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: Epoch
    next_offset: Count


class ReplayQuery(msgspec.Struct, frozen=True, array_like=True):
    """A gateway that may have missed frames asks for everything from `next_offset` on."""

    positions: list[StreamPosition]
    is_of_any_epoch: bool = False
    """The gateway has not followed the requests, so that each is asked for in the highest epoch known to the instance."""


class MigratedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that was handed over: who owns it now, as far as the teller knows."""

    request_id: str
    instance_id: PeerId
    epoch: Epoch


class ReplayReply(msgspec.Struct, frozen=True, array_like=True):
    entries: list[TokenEntry]
    unknown: list[str]
    """Request ids that this instance does not hold (any more) in the epoch asked for."""
    moved: list[MigratedRequest] = []
    """Those that it handed over lately: ask there."""


class ClearPrefixCache(msgspec.Struct, frozen=True, array_like=True):
    """Makes unreferenced KV blocks unfindable, so that a benchmark starts cold."""


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request as an instance holds it; what a new scheduler rebuilds its view from."""

    request_id: str
    gateway_id: PeerId
    epoch: Epoch
    model: str
    num_tokens: Count
    running: bool
    is_online: bool = True
    tenant: TenantName = ""
    tenant_weight: TenantWeight = 1.0


class ListHeldRequests(msgspec.Struct, frozen=True, array_like=True):
    pass


class HeldRequests(msgspec.Struct, frozen=True, array_like=True):
    requests: list[HeldRequest]


class LostRequest(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: Epoch


class RequestsLost(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to gateway: the instance is gone; place these again with the tokens so far and a higher epoch."""

    instance_id: PeerId
    requests: list[LostRequest]
