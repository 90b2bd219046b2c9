"""Every message that crosses the bus, and the one place where a subject is spelled.

A channel names a subject and the types that travel on it. Four kinds exist: `Topic` (publish/subscribe), `Endpoint`
(request/reply), `Bucket` (JetStream key-value) and, for large things, `ObjectBucket`. Subjects may hold placeholders
that `at()` fills: `INSTANCE_SUBMIT.at(instance_id="node-a-0")`.

Wire format: msgspec msgpack. Structs on hot paths are `array_like`, so new fields may only be added at their end, with
a default. Token ids travel as packed little-endian int32 (`pack_tokens`, `unpack_tokens`), never as lists.
Clocks are never compared across hosts: times in messages are durations, re-based by the receiver.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

PREFIX = "tideway.v1"
MAX_MESSAGE_BYTES = 512 * 1024
"""Larger things go through an object bucket."""

Message = TypeVar("Message")
Query = TypeVar("Query")
Reply = TypeVar("Reply")


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids as int32 bytes in the machine's order, which is little-endian on all that torch runs on."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens.tolist()


# --------------------------------------------------------------------------------------------------- channels


def _fill(subject: str, ids: dict[str, str]) -> str:
    for value in ids.values():
        if not value or any(c in value for c in ". *>\t\r\n"):
            raise ValueError(f"{value!r} cannot be part of a subject")
    return subject.format(**ids)


@dataclass(frozen=True)
class Topic(Generic[Message]):
    """Publish/subscribe: at most once, no reply."""

    subject: str
    type: type[Message]

    def at(self, **ids: str) -> Topic[Message]:
        return replace(self, subject=_fill(self.subject, ids))


@dataclass(frozen=True)
class Endpoint(Generic[Query, Reply]):
    """Request/reply: exactly one typed reply or one typed error within a deadline."""

    subject: str
    query: type[Query]
    reply: type[Reply]

    def at(self, **ids: str) -> Endpoint[Query, Reply]:
        return replace(self, subject=_fill(self.subject, ids))


@dataclass(frozen=True)
class Bucket(Generic[Message]):
    """JetStream key-value. `ttl_s`: an entry not written again for so long is gone. `durable`: kept on disk."""

    name: str
    type: type[Message]
    ttl_s: float | None = None
    durable: bool = False


@dataclass(frozen=True)
class ObjectBucket:
    """JetStream object store for byte blobs over `MAX_MESSAGE_BYTES`."""

    name: str


PLACEMENT_EPOCHS = 64
"""Epochs of one placement: it begins at a multiple, and each move from instance to instance inside it takes one or two, so
that a request placed again never shares an epoch with wherever the last placement has moved to."""


def next_placement(epoch: int) -> int:
    """The first epoch of the placement after that of `epoch`."""
    return (epoch // PLACEMENT_EPOCHS + 1) * PLACEMENT_EPOCHS


# --------------------------------------------------------------------------------------------------- requests


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
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    """The needed peer (scheduler, instance, NATS) cannot be reached."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    code: ErrorCode
    message: str
    param: str = ""
    """The field at fault, if one is."""
    retry_after_s: float = 0.0


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen. Field meanings as in OpenAI's and vLLM's APIs."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Noise is a function of (seed, position), so that any instance continues a request alike. The gateway draws one
    where the client gave none."""
    stop_token_ids: tuple[int, ...] = ()
    """End the output; includes the model's end-of-sequence ids unless `ignore_eos`. Stop strings are the gateway's."""
    logprobs: int = -1
    """-1: none; k >= 0: the chosen token's log-probability and the k most likely."""
    logit_bias: tuple[tuple[int, float], ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate, from gateway to scheduler to instance. A client's `n > 1` is n of these."""

    request_id: str
    gateway_id: str
    model: str
    prompt: bytes
    """Packed token ids."""
    sampling: SamplingParams
    request_class: RequestClass = RequestClass.ONLINE
    priority: Priority = Priority.NORMAL
    timeout_s: float = 600.0
    """Time left at the moment of sending. Whoever holds the request past it drops it and says so."""
    epoch: int = 0
    """Ownership number: each placement begins at the next multiple of `PLACEMENT_EPOCHS`, each move to another instance
    adds to it. Frames of a lower epoch than the highest seen are dropped."""
    prior: bytes = b""
    """Packed output tokens that the client already has (a request placed again continues after them)."""
    waited_s: float = 0.0
    """How long the request has waited before this hop."""
    traceparent: str = ""
    """W3C trace context of the request's root span."""
    ttft_objective_s: float = 0.0
    """Time to first token that the client wants, from its arrival; 0: the model's."""
    tpot_objective_s: float = 0.0
    """Time per output token after the first; 0: the model's."""


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: int | None = None
    """Only where it is held in this epoch or a lower one, and not to be forwarded; None: wherever it is."""


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The request is queued or running here. Sending it again with the same epoch is answered alike, with no effect."""

    request_id: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    """Of the chosen token."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """1 is the most likely."""


UNKNOWN_LOGPROB = TokenLogprob(-9999.0)
"""Stands for one that an instance did not send."""


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a request on its instance, sent with its last entry."""

    queued_s: float = 0.0
    """Arrival at the instance to first being planned."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0


class TokenEntry(msgspec.Struct, frozen=True, array_like=True):
    """What one iteration made for one request."""

    request_id: str
    epoch: int
    offset: int
    """Position in the output of the first token here; equals the number of output tokens before it."""
    tokens: bytes
    """Packed; may be empty in a last entry."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """All tokens that one iteration of one instance made for one gateway's requests. `sender` is an instance id, or a
    scheduler's id where a queued request ended without being dispatched."""

    sender: str
    entries: list[TokenEntry]


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: int
    next_offset: int


class ReplayQuery(msgspec.Struct, frozen=True, array_like=True):
    """A gateway that may have missed frames asks for everything from `next_offset` on."""

    positions: list[StreamPosition]


class MovedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that was handed over: who owns it now, as far as the teller knows."""

    request_id: str
    instance_id: str
    epoch: int


class ReplayReply(msgspec.Struct, frozen=True, array_like=True):
    entries: list[TokenEntry]
    unknown: list[str]
    """Request ids that this instance does not hold (any more) in the epoch asked for."""
    moved: list[MovedRequest] = []
    """Those that it handed over lately: ask there."""


class ClearPrefixCache(msgspec.Struct, frozen=True, array_like=True):
    """Makes unreferenced KV blocks unfindable, so that a benchmark starts cold."""


class HeldRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as an instance holds it; what a new scheduler rebuilds its view from."""

    request_id: str
    gateway_id: str
    epoch: int
    model: str
    num_tokens: int
    running: bool
    is_online: bool = True


class ListHeldRequests(msgspec.Struct, frozen=True, array_like=True):
    pass


class HeldRequests(msgspec.Struct, frozen=True, array_like=True):
    requests: list[HeldRequest]


class LostRequest(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: int


class RequestsLost(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to gateway: the instance is gone; place these again with the tokens so far and a higher epoch."""

    instance_id: str
    requests: list[LostRequest]


# ------------------------------------------------------------------------------------------ cluster and load


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as the operator configures it. `source`: a folder in Hugging Face format, or a hub id."""

    name: str
    source: str
    dtype: str = "auto"
    max_model_len: int | None = None
    replicas: int | None = None
    """Number of instances that hold it; None: all on which it fits."""
    ttft_ms: float = 0.0
    """Objective for the time to first token of online requests that name none; 0: the instance's default."""
    tpot_ms: float = 0.0
    """Likewise for the time per output token after the first."""


class LoadedModel(msgspec.Struct, frozen=True, array_like=True):
    name: str
    state: str
    """loading | ready | unloading | failed"""
    max_model_len: int = 0
    page_tokens: int = 0
    """Tokens in one KV block."""
    slots_per_merged: int = 0
    """KV blocks of this model in one merged block of the pool."""
    num_running: int = 0
    num_waiting: int = 0
    error: str = ""


class InstanceInfo(msgspec.Struct, frozen=True, array_like=True):
    """An instance in the registry (bucket with TTL): written each second while it lives."""

    instance_id: str
    incarnation: str
    """New at each start of the process."""
    node_id: str
    state: str
    """starting | ready | draining"""
    models: list[LoadedModel]
    num_merged: int = 0
    """Merged blocks in the KV pool."""
    merged_bytes: int = 0
    device: str = "cpu"
    pid: int = 0
    metrics_port: int = 0
    kv_address: str = ""
    """Where peers reach its KV transport; empty: it takes and gives no requests with KV."""


class ModelLoad(msgspec.Struct, frozen=True, array_like=True):
    model: str
    num_running: int
    num_waiting: int
    num_offline: int = 0
    """Offline requests among both, harvested work rather than load."""
    num_waiting_online: int = 0
    """Online requests among the waiting ones."""
    offline_room_tokens: int = 0
    """Offline tokens (prompt and output) beyond those held that could be given to the instance now: from what it computes of
    them lately and its free KV slots."""
    budgets: tuple[float, float] = (0.0, 0.0)
    """Doubling budget of this model here: remaining seconds summed over its unfinished requests, and the smallest."""


class FinishedStats(msgspec.Struct, frozen=True, array_like=True):
    """One ended request, for the statistics per model."""

    model: str
    request_class: RequestClass
    prompt_tokens: int
    output_tokens: int
    queued_s: float
    execution_s: float
    """Admission to end on the instance, by the wall clock."""
    finish_reason: FinishReason
    device_s: float = 0.0
    """Execution time charged to the request: what its part of each step takes alone on the instance."""


class MoveOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a migration ended, told by its source."""

    request_id: str
    destination_id: str
    epoch: int
    """Of the owner now."""
    is_moved: bool
    reason: str = ""
    """An `AbortReason` if it did not move."""


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """Instance to scheduler: coalesced, at most one per 20 ms, at least one per second as heartbeat.

    Freeness and blocks are in merged blocks (fractions allowed), higher is freer (design: scheduling.md section 6).
    """

    instance_id: str
    incarnation: str
    sequence: int
    dispatch_freeness: float
    """Counts every waiting request with its whole demand; +inf when idle."""
    free_merged: float
    """Merged blocks that could be had now (free or only cached)."""
    num_running: int
    models: list[ModelLoad]
    admitted: list[str]
    """Ids accepted since the last report: leave the scheduler's in-flight ledger."""
    ended: list[str]
    """Ids ended since the last report, for any reason."""
    finished: list[FinishedStats]
    dispatch_freeness_high: float = 0.0
    """As a request of high priority sees it: charged with the headroom where no such request is yet."""
    migration_freeness: float = 0.0
    """Decode steps until the KV pool is full: tokens that fit beside the virtual usage for each running request, of the
    waiting ones only the head counting; +inf when idle. Whether it drains stands in the registry."""
    scaling_freeness: float = 0.0
    """Likewise as a normal request sees it, every waiting one counting."""
    num_high: int = 0
    """Online requests of high priority."""
    moves: list[MoveOutcome] = []
    """Migrations out of here that ended since the last report."""
    moved_in: list[HeldRequest] = []
    """Requests taken over from other instances since the last report."""
    num_moving_out: int = 0
    """Migrations under way, for whoever looks on; likewise those into here."""
    num_moving_in: int = 0
    num_moved_out: int = 0
    """Requests that moved away since the instance started; likewise those that came."""
    num_moved_in: int = 0
    next_move_tokens: int = 0
    """Of the running online request that would move away first; 0: none runs."""


class InstanceExited(msgspec.Struct, frozen=True, array_like=True):
    """Node agent to everyone: the process is gone (faster than a missing heartbeat)."""

    instance_id: str
    incarnation: str
    node_id: str
    exit_code: int


class NodeInfo(msgspec.Struct, frozen=True, array_like=True):
    """A node agent in the registry (bucket with TTL)."""

    node_id: str
    hostname: str
    num_instances: int
    """How many instances this node will run (one a device; on CPU as configured)."""
    memory_bytes: int
    """Memory that all its instances together may use for weights and KV pools."""
    device: str = "cpu"
    plan_version: int = 0
    """The last placement plan that was carried out."""
    problem: str = ""
    """Why the plan could not be carried out whole, if it could not."""
    max_instances: int = 0
    """How many it could run; 0: `num_instances`."""


class InstancePlan(msgspec.Struct, frozen=True):
    """One instance of the plan: the sharing group on it."""

    instance_id: str
    node_id: str
    models: list[ModelSpec]
    pool_bytes: int
    merged_bytes: int


class PlacementPlan(msgspec.Struct, frozen=True):
    version: int
    instances: list[InstancePlan]
    unplaced: dict[str, str] = {}
    """Models that are on no instance, with the reason."""
    draining: list[str] = []
    """Instances that the operator or the scheduler wants empty: in no plan until that is undone."""
    released: list[str] = []
    """Of those, the ones that scaling took out: the first to come back when there should be more."""


class StoredCostModel(msgspec.Struct, frozen=True):
    """A fitted cost model (`shared.cost_model.CostModel`, encoded) and what it was measured on."""

    key: str
    """Fingerprint of the model's shape and dtype, the device and the tensor-parallel size."""
    cost_model: bytes
    profiled_s: float
    """Unix time."""


class ModelStatistics(msgspec.Struct, frozen=True):
    """Traffic of one model since the last report; the scheduler publishes one per model and second."""

    model: str
    interval_s: float
    num_arrived: int
    num_finished: int
    prompt_tokens: int
    output_tokens: int
    queued_s: float
    execution_s: float
    num_queued: int


class StatisticsReport(msgspec.Struct, frozen=True):
    scheduler_id: str
    models: list[ModelStatistics]


class SchedulerInfo(msgspec.Struct, frozen=True, array_like=True):
    """The lease of the active scheduler or placement (bucket with TTL), and their announcement."""

    scheduler_id: str
    term: int = 0
    """Grows with each change of leader."""


class ExecutionStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Execution time on the device of a model's finished requests (SeaLLM section 4.2), over the whole cluster."""

    model: str
    mean_s: float
    std_s: float
    num_finished: int = 0
    """In the window; 0: a prediction, nothing has finished yet."""


class ExecutionStatisticsReport(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to instances, on change: what the doubling budgets start from."""

    scheduler_id: str
    models: list[ExecutionStatistics]


# -------------------------------------------------------------------------------------------------- migration


class MoveReason(StrEnum):
    BALANCE = "balance"
    DRAIN = "drain"


class AbortReason(StrEnum):
    """Why a migration did not happen. The request goes on at the source, unless it ended there."""

    ENDED = "ended"
    """It finished, was cancelled or ran into its deadline."""
    PREEMPTED = "preempted"
    """It lost its KV at the source meanwhile."""
    REFUSED = "refused"
    """The destination has no room, is draining, does not serve the model, or takes enough already."""
    MISMATCH = "mismatch"
    """KV blocks of the two ends differ: page size, slot bytes, tensor-parallel size."""
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    """The destination does not answer."""
    DESTINATION_LOST = "destination_lost"
    NOT_WORTH = "not_worth"
    """The transfer would cost more than it gains, or never catches up with the decode."""
    STOPPED = "stopped"
    """The source is shutting down, or its pairing was withdrawn."""


class Rebalance(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to source: give requests away, to the first of these that can take them. Repeated while it holds; it ends
    `lease_s` after the last one, or at once with no destinations."""

    destinations: list[str]
    """Instance ids, freest first."""
    reason: MoveReason
    lease_s: float
    max_concurrent: int = 1
    """Migrations out of the instance at once."""


class PreAllocate(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination: make room for the KV blocks of one stage, and expect them. Repeated with the same stage it is
    answered alike."""

    migration_id: str
    source_id: str
    request_id: str
    model: str
    request_class: RequestClass
    priority: Priority
    stage: int
    """From 0; each stage's blocks follow those of the one before."""
    first_block: int
    num_blocks: int
    """Blocks `first_block .. first_block + num_blocks` of the sequence."""
    hashes: bytes
    """Chained hashes, 16 bytes each, of those of the blocks that are full."""
    page_tokens: int
    slot_bytes: int
    tensor_parallel: int = 1
    on_host: bool = False
    """The blocks are a checkpoint in host memory and stay one."""
    max_tokens: int = 0
    """Tokens of the sequence at its longest."""
    deadline_s: float = 5.0
    """Time that the source gives the stage."""
    traceparent: str = ""


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    """The destination's answer; a refusal is a typed error."""

    migration_id: str
    num_held: int
    """Of the stage's blocks, leading ones that the destination has already: they are not sent."""
    address: str = ""
    """Of its KV transport."""
    ticket: bytes = b""
    """Presented with the blocks; single use. Empty where nothing is to be sent."""


class SequenceProgress(msgspec.Struct, frozen=True, array_like=True):
    """What of a sequence's life travels with it. Durations are up to the moment at which it left its source's batch."""

    num_computed: int = 0
    """Tokens whose KV moves with it; 0: it waits and brings none."""
    first_token_age_s: float = -1.0
    """Since its first token; below 0: it has none yet."""
    first_total: int = 0
    first_planned_age_s: float = -1.0
    submitted_age_s: float = 0.0
    """Since its arrival at the first instance of this placement."""
    device_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_restored_blocks: int = 0
    num_suspensions: int = 0
    order_state: tuple[float, ...] = ()
    """The ordering policy's, as it exports it."""
    num_moves: int = 0
    """This one included."""
    last_ran_age_s: float = 0.0
    """Since the last step that computed it; its arrival before the first."""
    peak_computed: int = 0
    """Tokens that had been computed when it was last preempted, if it has not run since."""


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination: the request is yours. The only hand-over of ownership."""

    migration_id: str
    source_id: str
    request: GenerationRequest
    """In its new epoch, with all output so far as `prior`; times re-based to the sending."""
    progress: SequenceProgress
    num_blocks: int = 0
    """All that were announced and sent; on the host where `on_host`."""
    on_host: bool = False


class Committed(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: int


class AbortMigration(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination: free what was reserved. If it is lost, the reservation ends by itself."""

    migration_id: str
    reason: AbortReason


class OwnsQuery(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination after a Commit without an answer. A "no" is final: that migration's Commit will be refused if
    it still comes."""

    migration_id: str
    request_id: str
    epoch: int


class OwnsReply(msgspec.Struct, frozen=True, array_like=True):
    owns: bool
    """It took the request over in that epoch (and may have ended it, or handed it on, since)."""


# ----------------------------------------------------------------------------------------- batches and harvest


class OfflineDemand(msgspec.Struct, frozen=True, array_like=True):
    """What one batch could submit now."""

    batch_id: str
    tenant: str
    model: str
    wanted_tokens: int
    """Prompt and output tokens of lines that are ready to be submitted."""
    unfinished_tokens: int
    """Estimate for all lines that are not finished."""
    slack_s: float
    """Time left to the batch's deadline."""
    weight: float = 1.0
    """Share of its tenant against others."""


class GrantQuery(msgspec.Struct, frozen=True, array_like=True):
    """A gateway asks how many offline tokens it may submit. All its batches at once."""

    gateway_id: str
    demands: list[OfflineDemand]


class OfflineGrant(msgspec.Struct, frozen=True, array_like=True):
    batch_id: str
    tokens: int
    model: str = ""


class GrantReply(msgspec.Struct, frozen=True, array_like=True):
    grants: list[OfflineGrant]
    ask_again_s: float
    """When asking again is worth while."""
    tokens_per_s: dict[str, float] = {}
    """Recent offline throughput of each model over the cluster, for the predicted finish time."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of the Files API; its bytes lie in the object bucket under its id."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float
    """Unix time."""
    expires_s: float | None = None
    tenant: str = ""
    is_deleted: bool = False


class BatchProblem(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch as the Batch API shows it; written by the gateway that owns it. Times are Unix seconds."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    deadline_s: float
    status: str
    created_s: float
    metadata: dict[str, str] = {}
    model: str = ""
    errors: list[BatchProblem] = []
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    status_s: dict[str, float] = {}
    """When each status was entered."""
    predicted_finish_s: float | None = None
    output_expires_after_s: int | None = None
    reserved_bytes: int = 0
    """Set aside for all its results, in the store of results, before it begins."""


class BatchLineResult(msgspec.Struct, frozen=True):
    """The answer to one line, written once (`create`): a line whose key exists is done."""

    is_success: bool
    line: bytes
    """The JSON line of the output or error file."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


# ------------------------------------------------------------------------------------------------- admin calls


class AddModel(msgspec.Struct, frozen=True):
    spec: ModelSpec


class RemoveModel(msgspec.Struct, frozen=True):
    name: str


class GetPlan(msgspec.Struct, frozen=True):
    pass


class LoadModel(msgspec.Struct, frozen=True):
    """Node agent to instance. Answered at once; progress shows in the registry."""

    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True):
    """Node agent to instance: take no new request of the model, finish those it has within `grace_s`, free its memory."""

    name: str
    grace_s: float = 30.0


class Drain(msgspec.Struct, frozen=True):
    """Take no new request; move away or finish those held within `grace_s`; then exit. `is_undone`: do not, but serve as
    before; CONFLICT where it is too late for that."""

    grace_s: float = 30.0
    is_undone: bool = False


class DrainInstance(msgspec.Struct, frozen=True):
    """Operator (or scheduler) to placement: leave the instance out of the plan, so that it moves its requests away and
    exits; `is_undone`: back into the plan."""

    instance_id: str
    is_undone: bool = False
    is_for_scaling: bool = False
    """One instance less is wanted, best this one: it is brought back when more are. (An operator's drain stays until it is
    undone.)"""


class ScaleModel(msgspec.Struct, frozen=True):
    """To placement: on how many instances the model is to be; None: on all."""

    name: str
    replicas: int | None


class ScaleInstances(msgspec.Struct, frozen=True):
    """To placement: how many instances there should be, over all nodes; carried out by its back end."""

    num_instances: int
    is_for_scaling: bool = False
    """From the scheduler: more are wanted, never fewer. It counts those that it sees, and others may be starting."""


class ScaleNode(msgspec.Struct, frozen=True):
    """Placement to a node agent: run so many instances, at most its `max_instances`."""

    num_instances: int


class Done(msgspec.Struct, frozen=True):
    pass


# --------------------------------------------------------------------------------------------------- catalogue

# gateway -> scheduler (only the active scheduler serves these)
SCHEDULER_SUBMIT = Endpoint(f"{PREFIX}.scheduler.submit", GenerationRequest, Accepted)
SCHEDULER_CANCEL = Topic(f"{PREFIX}.scheduler.cancel", Cancel)

# scheduler -> everyone: a new leader serves now; gateways submit their unfinished requests again (same epoch)
SCHEDULER_ANNOUNCE = Topic(f"{PREFIX}.scheduler.announce", SchedulerInfo)
SCHEDULER_STATISTICS = Topic(f"{PREFIX}.scheduler.statistics", StatisticsReport)

# scheduler -> instances
EXECUTION_STATISTICS = Topic(f"{PREFIX}.scheduler.execution_statistics", ExecutionStatisticsReport)

# gateway's batches -> scheduler
SCHEDULER_GRANT = Endpoint(f"{PREFIX}.scheduler.grant", GrantQuery, GrantReply)

# scheduler (or, in bypass, gateway) -> instance
INSTANCE_SUBMIT = Endpoint(f"{PREFIX}.instance.{{instance_id}}.submit", GenerationRequest, Accepted)
INSTANCE_CANCEL = Topic(f"{PREFIX}.instance.{{instance_id}}.cancel", Cancel)
INSTANCE_REPLAY = Endpoint(f"{PREFIX}.instance.{{instance_id}}.replay", ReplayQuery, ReplayReply)
INSTANCE_HELD = Endpoint(f"{PREFIX}.instance.{{instance_id}}.held", ListHeldRequests, HeldRequests)

# migration: scheduler -> source instance; source -> destination instance
INSTANCE_REBALANCE = Topic(f"{PREFIX}.instance.{{instance_id}}.rebalance", Rebalance)
INSTANCE_PRE_ALLOCATE = Endpoint(f"{PREFIX}.instance.{{instance_id}}.pre_allocate", PreAllocate, Reserved)
INSTANCE_COMMIT = Endpoint(f"{PREFIX}.instance.{{instance_id}}.commit", Commit, Committed)
INSTANCE_ABORT = Topic(f"{PREFIX}.instance.{{instance_id}}.abort", AbortMigration)
INSTANCE_OWNS = Endpoint(f"{PREFIX}.instance.{{instance_id}}.owns", OwnsQuery, OwnsReply)

# gateway's developer mode -> all instances
CLEAR_PREFIX_CACHE = Topic(f"{PREFIX}.instances.clear_prefix_cache", ClearPrefixCache)

# node agent -> instance
INSTANCE_LOAD_MODEL = Endpoint(f"{PREFIX}.instance.{{instance_id}}.load_model", LoadModel, Done)
INSTANCE_UNLOAD_MODEL = Endpoint(f"{PREFIX}.instance.{{instance_id}}.unload_model", UnloadModel, Done)
INSTANCE_DRAIN = Endpoint(f"{PREFIX}.instance.{{instance_id}}.drain", Drain, Done)

# instance (or scheduler) -> gateway
GATEWAY_FRAMES = Topic(f"{PREFIX}.gateway.{{gateway_id}}.frames", TokenFrame)
GATEWAY_LOST = Topic(f"{PREFIX}.gateway.{{gateway_id}}.lost", RequestsLost)

# instance -> scheduler; node agent -> everyone
LOAD_REPORTS = Topic(f"{PREFIX}.load", LoadReport)
INSTANCE_EXITED = Topic(f"{PREFIX}.cluster.instance_exited", InstanceExited)

# gateway's admin API -> placement (only the active one serves these)
PLACEMENT_ADD_MODEL = Endpoint(f"{PREFIX}.placement.add_model", AddModel, PlacementPlan)
PLACEMENT_REMOVE_MODEL = Endpoint(f"{PREFIX}.placement.remove_model", RemoveModel, PlacementPlan)
PLACEMENT_DRAIN_INSTANCE = Endpoint(f"{PREFIX}.placement.drain_instance", DrainInstance, PlacementPlan)
PLACEMENT_SCALE_MODEL = Endpoint(f"{PREFIX}.placement.scale_model", ScaleModel, PlacementPlan)
PLACEMENT_SCALE_INSTANCES = Endpoint(f"{PREFIX}.placement.scale_instances", ScaleInstances, PlacementPlan)
PLACEMENT_PLAN = Endpoint(f"{PREFIX}.placement.plan", GetPlan, PlacementPlan)

# placement -> node agent
NODE_SCALE = Endpoint(f"{PREFIX}.node.{{node_id}}.scale", ScaleNode, Done)

# key-value
INSTANCES = Bucket("tideway_instances", InstanceInfo, ttl_s=3.0)
"""key: instance id; writer: the instance"""
NODES = Bucket("tideway_nodes", NodeInfo, ttl_s=3.0)
"""key: node id; writer: the node agent"""
LEASES = Bucket("tideway_leases", SchedulerInfo, ttl_s=3.0)
"""keys "scheduler" and "placement"; writer: the holder"""
TERMS = Bucket("tideway_terms", SchedulerInfo, durable=True)
"""the last term of each lease"""
MODELS = Bucket("tideway_models", ModelSpec, durable=True)
"""key: `bucket_key(model name)`; writer: placement"""
PLANS = Bucket("tideway_plans", PlacementPlan, durable=True)
"""key "current"; writer: placement"""
STATISTICS = Bucket("tideway_statistics", ModelStatistics, durable=True)
"""key: `bucket_key(model name)`, totals since the model was added; writer: placement"""

COST_MODELS = Bucket("tideway_cost_models", StoredCostModel, durable=True)
"""key: `bucket_key` of the stored model's `key`; writer: the instance that profiled"""
FILES = Bucket("tideway_files", StoredFile, durable=True)
"""key: file id; writer: gateway"""
FILE_CONTENTS = ObjectBucket("tideway_file_contents")
BATCHES = Bucket("tideway_batches", BatchRecord, durable=True)
"""key: batch id; writer: the gateway that holds the batch's lease"""
BATCH_RESULTS = Bucket("tideway_batch_results", BatchLineResult, durable=True)
"""key: `<batch id>.<line index>`; created once, never changed; purged when the batch's files are written"""


def bucket_key(name: str) -> str:
    """`name` as a JetStream key: characters outside [A-Za-z0-9_/-] become =XX (hexadecimal UTF-8 bytes)."""
    safe = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-/")
    return "".join(chr(b) if b in safe else f"={b:02X}" for b in name.encode())
