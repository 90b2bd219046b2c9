"""What instances, nodes and services tell of themselves: registry, load, plan, statistics."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from shared.messages.requests import Adapter, Amount, Epoch, FinishReason, HeldRequest, Number, RequestClass, Seconds
from shared.plugins import installed

TOOL_FORMATS = (
    "harmony",
    "kimi",
    "deepseek-v3.2",
    "deepseek-v4",
    "deepseek-v3",
    "deepseek-v3.1",
    "minimax",
    "seed",
    "glm",
    "qwen3-coder",
    "hermes",
    "pythonic",
    "llama4",
    "llama3",
    "mistral",
    "mistral-named",
    "json",
)
"""Names of the formats in services/gateway/tools/formats.py."""


def tool_formats() -> list[str]:
    """Names of those built in and of those that other packages bring (`shared.plugins`)."""
    return [*TOOL_FORMATS, *installed("tideway.tool_formats")]


DEFAULT_IDLE_S = 300.0


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
    """Objective for the time per output token after the first; 0: the instance's default."""
    slo_scale: float = 0.0
    """Mean execution times that a request may take from arrival to end (SeaLLM, section 6.1); 0: the default, 5."""
    quantization: str = ""
    """Quantisation of a checkpoint's weights that are not quantised: int8 | int4 | fp8; empty: none."""
    tool_format: str = ""
    """How it writes calls of tools, one of `TOOL_FORMATS`; empty: as its chat template says."""
    on_demand: bool = False
    """Loaded when requests for it come, and put away when it is idle; else it is always loaded."""
    idle_s: Seconds = DEFAULT_IDLE_S
    """Idle time of a model on demand: it is put away so long after its last request has ended."""
    engine: str = ""
    """Engine that computes it: native | vllm | endpoint; empty: native."""
    engine_args: str = ""
    """Arguments for the engine's own command line, as a shell would read them."""
    engine_url: str = ""
    """URL of the server of the engine `endpoint`, without `/v1`."""
    draft: str = ""
    """Source of its draft model, a small one with the same tokenizer (docs/design/engine.md); empty: none."""

    @property
    def sources(self) -> list[str]:
        """Sources of all checkpoints that are loaded for it."""
        return [self.source, self.draft] if self.draft else [self.source]

    @property
    def is_native(self) -> bool:
        return self.engine in ("", "native")

    @property
    def is_endpoint(self) -> bool:
        return self.engine == "endpoint"


class AdapterSpec(msgspec.Struct, frozen=True):
    """A LoRA adapter as the operator configures it: to clients a model of its own. `source`: a folder in PEFT's format, or a
    hub id."""

    name: str
    base: str
    """The model whose weights it is computed with."""
    source: str
    ttft_ms: float = 0.0
    """Objectives as of `ModelSpec`; 0: the base model's."""
    tpot_ms: float = 0.0
    slo_scale: float = 0.0
    """Multiple of the mean execution time that a request may take; 0: the base model's."""
    version: str = ""
    """Version as in `Adapter`; given when it is added. What follows is read then, too."""
    rank: int = 0
    """The largest of its matrices."""
    num_values: int = 0
    """In all its matrices, as instances hold them."""
    added_s: float = 0.0
    """Unix time."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.name, self.version, self.source)


class DeviceGroupError(ValueError):
    """A group of devices that cannot be had here; the message is for the operator."""


class DeviceGroup(msgspec.Struct, frozen=True, array_like=True):
    """What an instance computes on: of p ranks in each stage, rank i of stage k on `devices[k * p + i]`."""

    devices: tuple[str, ...] = ("",)
    """`cpu`, or as CUDA_VISIBLE_DEVICES names GPUs; empty: the one that the node has for the instance."""

    num_stages: int = 1
    """Runs of layers, of which each stage has one (pipeline parallelism)."""

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, each with a part of its weights (tensor parallelism)."""
        return len(self.devices) // self.num_stages


ONE_DEVICE = DeviceGroup()


class LoadedModel(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    name: str
    state: str
    """loading | ready | unloading | failed | host: not loaded, with its weights in host memory"""
    max_model_len: Amount = 0
    block_size: Amount = 0
    """Tokens in one KV block."""
    blocks_per_merged: Amount = 0
    """KV blocks of this model in one merged block of the pool."""
    num_running: Amount = 0
    num_waiting: Amount = 0
    error: str = ""
    """Why it failed; of one that is loading, what it waits for if that may take any time."""
    cost_model: str = ""
    """Source of its step times: a `CostSource`; empty: the token budget alone bounds its steps."""
    is_final: bool = False
    """The model failed, and loading the same checkpoint again would fail again."""
    fingerprint: str = ""
    """In deterministic mode: instances on which it is the same make the same bits. Groups of several devices have none."""
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters that are loaded."""

    @property
    def is_held_up(self) -> bool:
        """Whether it is being loaded, but waits for what may take any time (`error`), as for a server that is down."""
        return self.state == "loading" and self.error != ""


class Role(StrEnum):
    """What the scheduler prefers to send to an instance. Any instance does everything that it is asked."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes long prompts, and hands their requests over to others."""
    DECODE = "decode"
    """It decodes, and computes short prompts."""


class SetRole(msgspec.Struct, frozen=True, array_like=True):
    """Tells an instance what role it has from now on."""

    role: Role | None
    """None: no operator's any more."""
    is_operators: bool = False
    """It is an operator's choice, which no scheduler changes."""


class InstanceInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An instance in the registry (bucket with TTL): written each second while it lives."""

    instance_id: str
    incarnation: str
    """New at each start of the process."""
    node_id: str
    state: str
    """starting | ready | draining"""
    models: list[LoadedModel]
    num_merged: Amount = 0
    """Merged blocks in the KV pool."""
    merged_bytes: Amount = 0
    device: str = "cpu"
    pid: Amount = 0
    metrics_port: Amount = 0
    kv_address: str = ""
    """Address at which peers reach its KV transport; empty: it takes and gives no requests with KV."""
    dispatch_freeness: Number = math.inf
    """Freeness as in `LoadReport`, for whoever places requests without a scheduler."""
    group: DeviceGroup = ONE_DEVICE
    engine: str = "native"
    """Engine that computes here; the next field has its version."""
    engine_version: str = ""
    lacks: tuple[str, ...] = ()
    """What it cannot do: members of `shared.engines.capabilities.Capability`."""
    role: Role = Role.BOTH
    is_role_fixed: bool = False
    """The operator chose the role; else the scheduler may change it."""

    @property
    def takes_roles(self) -> bool:
        """Whether it may be sent long prompts alone, or all but those: engines of others hand no prompt over."""
        return self.engine == "native"


class ModelLoad(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    model: str
    num_running: Amount
    num_waiting: Amount
    num_offline: Amount = 0
    """Offline requests among both, harvested work rather than load."""
    num_waiting_online: Amount = 0
    """Online requests among the waiting ones."""
    offline_room_tokens: Amount = 0
    """Offline tokens (prompt and output) beyond those held that could be given to the instance now: from what it computes of
    them lately and its free KV blocks."""
    budgets: tuple[Number, Number] = (0.0, 0.0)
    """Doubling budget of this model here: remaining seconds summed over its unfinished requests, and the smallest."""
    prompt_cost: tuple[Number, Number] = (0.0, 0.0)
    """`CostModel.prompt_cost` of this model here; zeros: not known."""
    decode_cost: tuple[Number, Number] = (0.0, 0.0)
    """Predicted seconds of a step that decodes one request of this model, context aside, and what each online request that
    runs here adds to it on average, with its context; zeros: not known."""
    fetch_token_s: Number = 0.0
    """Predicted seconds that a token's KV takes to another instance; 0: prefixes are neither given from here nor fetched."""
    share_left_merged: Number = 0.0
    """Merged blocks that one more online request would have here at once, whatever other models hold: what is left of the
    model's least share; 0: none, as where there is one model."""


class DraftUse(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A draft model on an instance. Tokens count since the instance started."""

    model: str
    """The model that it drafts for."""
    state: str
    """on: it drafts, for batches of some size at least | trial: it drafts to be measured | off: it does not pay"""
    gain: Number
    """Tokens per second with drafts over without, as measured, where that is most."""
    num_drafted: Amount
    """Tokens that were drafted, prompt lookup included."""
    num_kept: Amount
    """Tokens of those that were what the model sampled."""


class KvCopies(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Copies of KV between instances, beside requests that move. What is summed counts since the instance started."""

    num_backed_up: Amount = 0
    """Requests of this instance with copies of their KV at others now."""
    num_missing_blocks: Amount = 0
    """Full blocks of requests that are worth a copy, and have none yet."""
    backed_up_bytes: Amount = 0
    """Sent to other instances."""
    num_kept: Amount = 0
    """Requests of other instances with copies of their KV here now."""
    num_rescued_tokens: Amount = 0
    """Known tokens of requests that came here after another instance had lost them: those whose KV was found here."""
    num_recomputed_tokens: Amount = 0
    """Known tokens of such requests that were computed again."""
    num_fetches: Amount = 0
    """Requests for which the beginning of the prompt was fetched from another instance."""
    num_fetched_blocks: Amount = 0
    """KV blocks that came by these."""


class FinishedStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One ended request, for the statistics per model."""

    model: str
    request_class: RequestClass
    prompt_tokens: Amount
    output_tokens: Amount
    queued_s: Seconds
    execution_s: Seconds
    """Admission to end on the instance, by the wall clock."""
    finish_reason: FinishReason
    device_s: Seconds = 0.0
    """Execution time charged to the request: what its part of each step takes alone on the instance."""
    latency_s: Seconds = 0.0
    """Time from its arrival at the gateway to its end, wherever it was; the next one to its first token (below 0: it had
    none)."""
    ttft_s: Seconds = -1.0
    is_whole: bool = True
    """False: it was placed again with output, and what that took elsewhere is not in `device_s`."""
    is_ttft_met: bool | None = None
    """None: it has no such objective, or says nothing of it."""
    is_tpot_met: bool | None = None
    adapter: str = ""
    """Name of the LoRA adapter that it was computed with; empty: none."""
    is_mirror: bool = False
    is_given_up: bool = False
    """Only here: the request goes on elsewhere."""
    service_s: Seconds = 0.0
    """Its part of the steps of this placement, which together take as long as they do: what counts for its tenant."""
    max_itl_s: Seconds = 0.0
    """The longest time between two of its tokens."""

    @property
    def public_model(self) -> str:
        """The model as its client named it."""
        return self.adapter or self.model


class MigrationOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a migration ended, told by its source."""

    request_id: str
    destination_id: str
    epoch: Epoch
    """Epoch of the owner now."""
    is_migrated: bool
    reason: str = ""
    """An `AbortReason` if it did not move."""


KEY_BYTES = 8
"""Bytes of a block's hash that are told."""


def mark_positions(num_blocks: int) -> list[int]:
    """Numbers of leading blocks, ascending, at which a chain of so many hashes is told. Of a part of the chain that somebody
    holds, at least two thirds are known thereby. All but the last are the same for all chains, so that two chains with a
    common part are known to have it."""
    positions, position = [], 1
    while position < num_blocks:
        positions.append(position)
        position += max(1, position // 2)
    return [*positions, num_blocks] if num_blocks else []


class NextMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that may move away next, with hashes by which other instances are found that hold its beginning."""

    model: str
    num_tokens: Amount
    """Those that are known: of its prompt and its output."""
    request_id: str = ""
    block_size: Amount = 0
    num_blocks: Amount = 0
    """Full blocks of these tokens."""
    marks: bytes = b""
    """The first `KEY_BYTES` of the chained hashes at `mark_positions(num_blocks)`."""


def mark_keys(move: NextMove) -> list[bytes]:
    """Its marks, one by one."""
    return [move.marks[at : at + KEY_BYTES] for at in range(0, len(move.marks), KEY_BYTES)]


class ReportLoad(msgspec.Struct, frozen=True, array_like=True):
    """Gateway to all instances: report the load now, for somebody who looks on."""

    within_s: Seconds = 0.0
    """Time over which the reports of all are spread, each at random, so that many do not keep a scheduler from its work."""


class LoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """Instance to scheduler: coalesced, at most one per 20 ms, at least one per second as heartbeat.

    Freeness and blocks are in merged blocks (fractions allowed), higher is freer (design: scheduling.md section 6).
    The last reports of a thousand instances are no work for the garbage collector: tuples, most of them the empty one.
    """

    instance_id: str
    incarnation: str
    sequence: Amount
    dispatch_freeness: Number
    """Counts every waiting request with its whole demand; +inf when idle."""
    free_merged: Number
    """Merged blocks that could be had now (free or only cached)."""
    num_running: Amount
    models: tuple[ModelLoad, ...]
    admitted: tuple[str, ...]
    """Ids accepted since the last report: leave the scheduler's in-flight ledger."""
    ended: tuple[str, ...]
    """Ids ended since the last report, for any reason."""
    finished: tuple[FinishedStats, ...]
    dispatch_freeness_high: Number = 0.0
    """Freeness as a request of high priority sees it: without the headroom that those already there keep normal ones away
    by."""
    migration_freeness: Number = 0.0
    """Decode steps until the KV pool is full: tokens that fit beside the virtual usage for each running request, of the
    waiting ones only the head counting; +inf when idle. Whether it drains stands in the registry."""
    scaling_freeness: Number = 0.0
    """Freeness as a normal request sees it, with every waiting one counted."""
    num_high: Amount = 0
    """Online requests of high priority."""
    migrations: tuple[MigrationOutcome, ...] = ()
    """Migrations out of here that ended since the last report."""
    migrated_in: tuple[HeldRequest, ...] = ()
    """Requests taken over from other instances since the last report."""
    num_migrating_out: Amount = 0
    """Migrations under way, for whoever looks on; likewise those into here."""
    num_migrating_in: Amount = 0
    num_migrated_out: Amount = 0
    """Requests that moved away since the instance started; likewise those that came."""
    num_migrated_in: Amount = 0
    next_migration_tokens: Amount = 0
    """Tokens of the running online request that would move away first, from instances that do not tell `next_moves`; 0: none
    runs."""
    running_freeness: Number = math.inf
    """Decode steps until the requests that run have filled the KV pool, as if nobody waited; +inf when idle."""
    prompts_s: Seconds = 0.0
    """Predicted time before the prompt of one more online request is begun: what is left of the steps in flight, and the
    prompts of those that are here; 0 without a cost model."""
    next_migration_model: str = ""
    """Model of the request that `next_migration_tokens` is about."""
    ttft_s: Seconds = 0.0
    """Objective of a first token where neither request nor model names one; 0: not said."""
    cache_held: bytes = b""
    """Full blocks that can be found by their hash, on the device or in host memory: those that came since the last report.
    The first `KEY_BYTES` of each hash."""
    cache_lost: bytes = b""
    """Hashes of blocks that left the cache since the last report."""
    is_cache_anew: bool = False
    """What reports before this one said of that is void: more came and went than could be told."""
    cache_repeated: bytes = b""
    """A few of all that can be found, in turn, for who missed a report."""
    cache_round: Amount = 0
    """How many rounds over all of them were begun before these. Who heard every report of two whole rounds knows all."""
    late_model: str = ""
    late_tokens: Amount = 0
    late_starts_s: Seconds = 0.0
    """Predicted time until the first prompt that waits and cannot meet its TTFT objective here is begun; 0: there is none.
    Its model and its tokens, from instances that do not tell `late_move`."""
    next_moves: tuple[NextMove, ...] = ()
    """The running online request of each model that would move away first, in the order in which they would; of an
    instance, or a model, that gives all of its requests away, as many of these as are told."""
    late_move: NextMove | None = None
    """The late prompt; None: there is none."""
    tpot_s: Seconds = 0.0
    """Objective of each later token, likewise as of `ttft_s`."""
    kv_copies: KvCopies | None = None
    """None: it has made, kept and fetched none."""
    drafts: tuple[DraftUse, ...] = ()
    """Use of its draft models, for whoever looks on."""


class InstanceExited(msgspec.Struct, frozen=True, array_like=True):
    """Node agent to everyone: the process is gone (faster than a missing heartbeat)."""

    instance_id: str
    incarnation: str
    node_id: str
    exit_code: int
    suspects: tuple[str, ...] = ()
    """Requests that it was computing and had made no token of; none where it was to end."""


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class AttentionFacts(msgspec.Struct, frozen=True, array_like=True):
    """What one attention back end of a device takes. The default is what a node is taken for that does not say: blocks as
    large as any back end's, as one that turns out to be smaller fits as well."""

    name: str = ""
    block_sizes: tuple[Positive, ...] = (256,)
    """Tokens in a KV block, best first; models get the first."""
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    max_head_dim: Amount = 0
    """0: any."""
    head_dim_step: Positive = 1
    """Head sizes are multiples of it."""

    def runs(self, head_dim: int, dtype: str) -> bool:
        fits = not self.max_head_dim or head_dim <= self.max_head_dim
        return fits and dtype in self.dtypes and head_dim % self.head_dim_step == 0


class InstanceCrash(msgspec.Struct, frozen=True, array_like=True):
    """How an instance ended that should have stayed."""

    reason: str
    """Completes "the instance ...": `exited with code 1`."""
    num_in_a_row: Amount = 1
    num_unready: Amount = 0
    """How many of these, the last included, ended before the instance was ready."""

    @property
    def is_in_loop(self) -> bool:
        """Whether another start will probably end in the same way."""
        return self.num_unready > 1

    def __str__(self) -> str:
        return f"{self.reason} ({self.num_in_a_row} times in a row)" if self.num_in_a_row > 1 else self.reason


class NodeInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A node agent in the registry (bucket with TTL)."""

    node_id: str
    hostname: str
    num_instances: Amount
    """How many instances this node will run (one a device; on CPU as configured)."""
    memory_bytes: Amount
    """Memory that all its instances together may use for weights and KV pools."""
    device: str = "cpu"
    plan_version: Amount = 0
    """The last placement plan that was carried out."""
    problem: str = ""
    """Why the plan could not be carried out whole, if it could not."""
    max_instances: Amount = 0
    """How many it could run; 0: `num_instances`."""
    block_size: Amount = 0
    """Most tokens of a KV block; `attention` says more, but not all versions have it."""
    step_tokens: Amount = 512
    """Most tokens of a step."""
    attention: tuple[AttentionFacts, ...] = ()
    """Fastest first: a model takes the first that runs its heads in its dtype."""
    groups: tuple[DeviceGroup, ...] = ()
    """Instance k computes on `groups[k]`."""
    devices: tuple[str, ...] = ()
    """All that may be grouped, in their order: a group is a run of them, and its instance has the index of the first."""
    fetched: tuple[str, ...] = ()
    """Sources of the plan's `fetch` that are ready to be loaded here."""
    fetch_problems: dict[str, str] = {}
    """Those of them that cannot be had, with the reason."""
    device_name: str = ""
    """Name of its GPUs, under which step times are stored; empty: it has none, several kinds, or does not say."""
    crashes: dict[str, InstanceCrash] = {}
    """How each instance ended last that has not been ready since."""


class InstancePlan(msgspec.Struct, frozen=True):
    """One instance of the plan: the sharing group on it."""

    instance_id: str
    node_id: str
    models: list[ModelSpec]
    """The models of the group."""
    pool_bytes: Amount
    merged_bytes: Amount
    group: DeviceGroup = ONE_DEVICE


def first_device(instance_id: str) -> int:
    """Index of the first device of its node that an instance computes on."""
    return int(instance_id.rpartition("-")[2])


def instance_devices(instance_id: str, num_ranks: int) -> set[tuple[str, int]]:
    """(node, index) of those that an instance computes on."""
    node_id, first = instance_id.rpartition("-")[0], first_device(instance_id)
    return {(node_id, first + rank) for rank in range(num_ranks)}


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """A replacement: the way from one placement to another, which is carried out in stages (shared/placement/carry_out.py).
    Times are Unix time."""

    number: Amount
    reason: str
    stage: str
    """fetch | change | settle | roll_back, and at its end: carried_out | rolled_back"""
    begun_s: float
    stage_s: float
    """Time at which the stage began."""
    step_s: float
    """Time at which the last step began."""
    before: list[InstancePlan]
    target: list[InstancePlan]
    steps: list[str] = []
    """What was done so far, a line each."""
    detours: list[str] = []
    """`model on instance`: where the target does not have it, so that it is always somewhere."""
    interrupted: list[str] = []
    """Models that lost their last instance, as memory left no other way: their requests wait for the next."""
    failure: str = ""
    """Why it is rolled back."""
    cause: str = ""
    """Cause of that: fetch | node_gone | instance | no_room | timeout | superseded | operator"""
    is_chosen: bool = True
    """`PlacementPlan.is_chosen` of the target; likewise of before."""
    was_chosen: bool = False
    trace: str = ""
    """W3C trace parent of its span; empty: it is not traced."""
    unready: list[str] = []
    """`model on instance`: that did not serve when the change began, which leaves it as it is: it may fail."""
    undoes: Amount = 0
    """Number of the replacement that an operator rolls back by this one; 0: none."""
    follows_drain: bool = False
    """Whether it brings back instances whose drain was undone."""

    @property
    def is_over(self) -> bool:
        return self.stage in ("carried_out", "rolled_back")


class PlacementPlan(msgspec.Struct, frozen=True):
    version: Amount
    """Number of the plan; each new plan has a higher one."""
    instances: list[InstancePlan]
    unplaced: dict[str, str] = {}
    """Models that are on no instance, with the reason."""
    draining: list[str] = []
    """Instances that the operator or the scheduler wants empty: in no plan until that is undone."""
    released: list[str] = []
    """Those of them that scaling took out: the first to come back when there should be more."""
    unusable: dict[str, str] = {}
    """Models whose checkpoint cannot be used, with the reason: some of `unplaced`."""
    is_chosen: bool = False
    """Which models are on which groups was searched for, and stays so; else every model is wherever it fits."""
    fetch: dict[str, list[str]] = {}
    """Node -> sources of models that it makes ready to be loaded, in the background."""
    change: PlanChange | None = None
    """The replacement that is under way, or the last one."""
    home: list[InstancePlan] = []
    """While instances of a chosen plan are drained: what it was before, to which it returns with them."""
    asleep: dict[str, str] = {}
    """Models on demand that are put away, with a `WhyAsleep`: whoever has their weights may keep them in host memory."""


class WhyAsleep(StrEnum):
    """Why a model on demand is not loaded."""

    IDLE = "idle"
    """Nobody asks for it."""
    ROOM_IN_USE = "room_in_use"
    """The memory that it needs is that of models with requests."""
    RECENTLY_USED = "recently_used"
    """The memory that it needs is that of models that were loaded or used just now: loading them again would cost more than
    its requests have waited so far."""
    ONLINE_FIRST = "online_first"
    """Only batches ask for it, and its memory is that of models that were used lately."""
    NO_ROOM = "no_room"
    """It does not fit beside the models that are always loaded."""


class ModelDemand(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Requests for a model on demand, as the scheduler knows them."""

    model: str
    num_online: Amount = 0
    """Waiting in the scheduler's queue."""
    num_offline: Amount = 0
    """Offline requests, and 1 or more while batches have lines for it that were not let in yet."""
    num_held_online: Amount = 0
    """On instances, or on their way there."""
    num_held_offline: Amount = 0
    waited_s: Seconds = 0.0
    """Waiting time of `num_online`, summed over them."""


class DemandReport(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to placement: each second, and at once when somebody asks for a model that no instance serves. Models
    without any request are left out."""

    scheduler_id: str
    models: list[ModelDemand]


class AdminAction(msgspec.Struct, frozen=True, kw_only=True):
    """One try to change something by the admin API."""

    at_s: float
    """Unix time."""
    who: str
    """The admin key's name; empty: it was not a known one."""
    action: str
    """Method and path."""
    body: str
    """JSON; empty: none was read."""
    address: str
    """Address of the client."""
    status: int
    """HTTP status of the answer."""
    gateway_id: str


class StoredCostModel(msgspec.Struct, frozen=True):
    """A fitted cost model (`shared.costs.model.CostModel`, encoded) and what it was measured on."""

    key: str
    """Fingerprint of the model's shape and dtype, the device and the number of ranks."""
    cost_model: bytes
    profiled_s: float
    """Unix time."""


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one model since the last report, of both classes; the scheduler publishes one per model and second."""

    model: str
    interval_s: Seconds
    num_arrived: Amount
    num_finished: Amount
    prompt_tokens: Amount
    output_tokens: Amount
    queued_s: Seconds
    execution_s: Seconds
    num_queued: Amount
    offline_prompt_tokens: Amount = 0
    """Tokens of the offline requests among them; the fields after it count these requests too."""
    offline_output_tokens: Amount = 0
    num_offline_queued: Amount = 0


class TenantStatistics(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a tenant has of the cluster, as the scheduler knows it."""

    tenant: str
    num_queued: Amount = 0
    """Requests that no instance has."""
    num_placed: Amount = 0
    """Requests on instances, or on their way there."""
    service_s: Seconds = 0.0
    """Time of steps that its requests had that ended in the last minute."""
    lag_s: Seconds = 0.0
    """Lag of its online requests: weighted service beyond that of the tenant with least."""


class StatisticsReport(msgspec.Struct, frozen=True):
    scheduler_id: str
    models: list[ModelStatistics]
    tenants: list[TenantStatistics] = []
    """Those with the most requests, and the sum of the others as `other`; who has none and had none lately is left out."""


class LeaseHolder(msgspec.Struct, frozen=True, array_like=True):
    """The lease of the active scheduler or placement (bucket with TTL), and their announcement."""

    scheduler_id: str
    term: Amount = 0
    """Grows with each change of leader."""


class ExecutionStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Execution time on the device of a model's finished requests (SeaLLM section 4.2), over the whole cluster."""

    model: str
    mean_s: Seconds
    std_s: Seconds
    num_finished: Amount = 0
    """In the window; 0: a prediction, nothing has finished yet."""


class ExecutionStatisticsReport(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to instances, on change: what the doubling budgets start from."""

    scheduler_id: str
    models: list[ExecutionStatistics]
