"""Every subject and bucket: the one place where they are spelled."""

from __future__ import annotations

from typing import Any, TypeVar

from shared.messages.admin import (
    AddAdapter,
    AddModel,
    ChangePlan,
    Done,
    Drain,
    DrainInstance,
    GetPlan,
    GetReplacement,
    LoadModel,
    RemoveAdapter,
    RemoveModel,
    ReplacementState,
    ScaleInstances,
    ScaleModel,
    ScaleNode,
    UnloadModel,
)
from shared.messages.batches import BatchLineResult, BatchRecord, GrantQuery, GrantReply, StoredFile
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Role, Topic
from shared.messages.cluster import (
    AdapterSpec,
    AdminAction,
    DemandReport,
    ExecutionStatisticsReport,
    InstanceExited,
    InstanceInfo,
    LeaseHolder,
    LoadReport,
    ModelSpec,
    ModelStatistics,
    NodeInfo,
    PlacementPlan,
    ReportLoad,
    SetRole,
    StatisticsReport,
    StoredCostModel,
)
from shared.messages.console import HistorySample, PoolView, ShowPool
from shared.messages.kept import CallCopy, CancelCall, CopyTaken, DropCopy, IdempotencyClaim, KeptCall, TakenOver
from shared.messages.migration import (
    AbortMigration,
    BackUp,
    BackupRooms,
    Commit,
    Committed,
    FetchPrefix,
    KeepBackups,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    PrefixSent,
    Rebalance,
    Reserved,
)
from shared.messages.requests import (
    Accepted,
    Cancel,
    ClearPrefixCache,
    GenerationRequest,
    HeldRequests,
    ListHeldRequests,
    ReplayQuery,
    ReplayReply,
    RequestsLost,
    TokenFrame,
)
from shared.messages.responses import StoredResponse
from shared.messages.routes import Route
from shared.messages.tenants import GatewayAlive, KeyUses
from shared.messages.timeline import AskGateways, RequestEvents, ToldByGateway
from shared.messages.traffic import GetTraffic, RequestRows, StoredTraffic, TrafficReply

T = TypeVar("T")

PREFIX = "tideway.v1"
_SCHEDULER, _PLACEMENT = f"{PREFIX}.scheduler", f"{PREFIX}.placement"
_INSTANCE, _GATEWAY = f"{PREFIX}.instance.{{instance_id}}", f"{PREFIX}.gateway.{{gateway_id}}"

GATEWAY, SCHEDULER, PLACEMENT, WORKER = Role.GATEWAY, Role.SCHEDULER, Role.PLACEMENT, Role.WORKER
OWN_NODE, OPERATOR = Role.OWN_NODE, Role.OPERATOR
"""Who sends, hears, serves, writes and reads is what NATS permits (shared/bus/permissions.py)."""


def _gateways_own(
    name: str,
    value: type[T],
    *,
    keys: str = ">",
    is_purged: bool = True,
    ttl_s: float | None = None,
    drops_oldest: bool = False,
    is_read_from_copies: bool = False,
) -> Bucket[T]:
    """A bucket on disk that gateways alone declare, write and read."""
    return Bucket(
        name, value, ttl_s, durable=True, drops_oldest=drops_oldest, is_read_from_copies=is_read_from_copies,
        declared_by=GATEWAY, writers={GATEWAY: keys}, read_by=GATEWAY, purged_by=GATEWAY if is_purged else Role.NOBODY,
    )  # fmt: skip


# gateway -> scheduler (only the active scheduler serves these)
SCHEDULER_SUBMIT = Endpoint(f"{_SCHEDULER}.submit", GenerationRequest, Accepted, sent_by=GATEWAY, served_by=SCHEDULER)
SCHEDULER_CANCEL = Topic(f"{_SCHEDULER}.cancel", Cancel, sent_by=GATEWAY, heard_by=SCHEDULER)

# scheduler -> everyone: a new leader serves now; gateways submit their unfinished requests again (same epoch)
SCHEDULER_ANNOUNCE = Topic(f"{_SCHEDULER}.announce", LeaseHolder, sent_by=SCHEDULER, heard_by=GATEWAY)
SCHEDULER_STATISTICS = Topic(
    f"{_SCHEDULER}.statistics", StatisticsReport, sent_by=SCHEDULER, heard_by=GATEWAY | PLACEMENT | OPERATOR
)

SCHEDULER_DEMAND = Topic(f"{_SCHEDULER}.demand", DemandReport, sent_by=SCHEDULER, heard_by=PLACEMENT)

# scheduler -> instances
EXECUTION_STATISTICS = Topic(
    f"{_SCHEDULER}.execution_statistics", ExecutionStatisticsReport, sent_by=SCHEDULER, heard_by=WORKER | SCHEDULER
)

# gateway's batches -> scheduler
SCHEDULER_GRANT = Endpoint(f"{_SCHEDULER}.grant", GrantQuery, GrantReply, sent_by=GATEWAY, served_by=SCHEDULER)

# scheduler (or, in bypass, gateway) -> instance
INSTANCE_SUBMIT = Endpoint(
    f"{_INSTANCE}.submit", GenerationRequest, Accepted, sent_by=SCHEDULER | GATEWAY, served_by=WORKER
)
INSTANCE_CANCEL = Topic(f"{_INSTANCE}.cancel", Cancel, sent_by=SCHEDULER | GATEWAY | WORKER, heard_by=WORKER)
INSTANCE_REPLAY = Endpoint(f"{_INSTANCE}.replay", ReplayQuery, ReplayReply, sent_by=GATEWAY, served_by=WORKER)
INSTANCE_HELD = Endpoint(f"{_INSTANCE}.held", ListHeldRequests, HeldRequests, sent_by=SCHEDULER, served_by=WORKER)
INSTANCE_POOL = Endpoint(f"{_INSTANCE}.pool", ShowPool, PoolView, sent_by=GATEWAY, served_by=WORKER)
"""While somebody looks at the console."""

# scheduler, or an operator's gateway -> instance
INSTANCE_ROLE = Endpoint(f"{_INSTANCE}.role", SetRole, Done, sent_by=SCHEDULER | GATEWAY, served_by=WORKER)

# migration: scheduler -> source instance; source -> destination instance
INSTANCE_REBALANCE = Topic(f"{_INSTANCE}.rebalance", Rebalance, sent_by=SCHEDULER, heard_by=WORKER)
INSTANCE_PRE_ALLOCATE = Endpoint(f"{_INSTANCE}.pre_allocate", PreAllocate, Reserved, sent_by=WORKER, served_by=WORKER)
INSTANCE_COMMIT = Endpoint(f"{_INSTANCE}.commit", Commit, Committed, sent_by=WORKER, served_by=WORKER)
INSTANCE_ABORT = Topic(f"{_INSTANCE}.abort", AbortMigration, sent_by=WORKER, heard_by=WORKER)
INSTANCE_OWNS = Endpoint(f"{_INSTANCE}.owns", OwnsQuery, OwnsReply, sent_by=WORKER, served_by=WORKER)
INSTANCE_BACK_UP = Endpoint(f"{_INSTANCE}.back_up", BackUp, BackupRooms, sent_by=WORKER, served_by=WORKER)
INSTANCE_FETCH_PREFIX = Endpoint(f"{_INSTANCE}.fetch_prefix", FetchPrefix, PrefixSent, sent_by=WORKER, served_by=WORKER)
INSTANCE_KEEP_BACKUPS = Topic(f"{_INSTANCE}.keep_backups", KeepBackups, sent_by=WORKER, heard_by=WORKER)

# gateway's developer mode -> all instances
CLEAR_PREFIX_CACHE = Topic(f"{PREFIX}.instances.clear_prefix_cache", ClearPrefixCache, sent_by=GATEWAY, heard_by=WORKER)

# node agent -> instance
INSTANCE_LOAD_MODEL = Endpoint(f"{_INSTANCE}.load_model", LoadModel, Done, sent_by=OWN_NODE, served_by=WORKER)
INSTANCE_UNLOAD_MODEL = Endpoint(f"{_INSTANCE}.unload_model", UnloadModel, Done, sent_by=OWN_NODE, served_by=WORKER)
INSTANCE_DRAIN = Endpoint(f"{_INSTANCE}.drain", Drain, Done, sent_by=OWN_NODE, served_by=WORKER)

# instance (or scheduler) -> gateway
GATEWAY_FRAMES = Topic(f"{_GATEWAY}.frames", TokenFrame, sent_by=WORKER | SCHEDULER, heard_by=GATEWAY)
GATEWAY_LOST = Topic(f"{_GATEWAY}.lost", RequestsLost, sent_by=SCHEDULER, heard_by=GATEWAY)
GATEWAY_EVENTS = Topic(f"{_GATEWAY}.events", RequestEvents, sent_by=WORKER | SCHEDULER, heard_by=GATEWAY)
"""Events for timelines: what is lost is missing there, and nowhere else."""

# gateway -> gateways, for timelines: each has those of its own requests
ASK_GATEWAYS = Topic(f"{PREFIX}.gateways.ask", AskGateways, sent_by=GATEWAY, heard_by=GATEWAY)
GATEWAY_TOLD = Topic(f"{_GATEWAY}.told", ToldByGateway, sent_by=GATEWAY, heard_by=GATEWAY)

# gateway -> gateways, of a call that may be another's so far
TAKEN_OVER = Topic(f"{PREFIX}.gateways.taken_over", TakenOver, sent_by=GATEWAY, heard_by=GATEWAY)
CANCEL_CALL = Topic(f"{PREFIX}.gateways.cancel_call", CancelCall, sent_by=GATEWAY, heard_by=GATEWAY)
GATEWAY_COPY = Endpoint(f"{_GATEWAY}.copy", CallCopy, CopyTaken, sent_by=GATEWAY, served_by=GATEWAY)
DROP_COPY = Topic(f"{PREFIX}.gateways.drop_copy", DropCopy, sent_by=GATEWAY, heard_by=GATEWAY)

# gateway -> all instances, while somebody looks at the load: each reports now
REPORT_LOAD = Topic(f"{PREFIX}.instances.report_load", ReportLoad, sent_by=GATEWAY, heard_by=WORKER)

# instance -> scheduler; node agent -> everyone
LOAD_REPORTS = Topic(f"{PREFIX}.load", LoadReport, sent_by=WORKER, heard_by=SCHEDULER | GATEWAY)
INSTANCE_EXITED = Topic(
    f"{PREFIX}.cluster.instance_exited", InstanceExited, sent_by=WORKER, heard_by=SCHEDULER | GATEWAY
)

# gateway's admin API -> placement (only the active one serves these)
PLACEMENT_ADD_MODEL = Endpoint(f"{_PLACEMENT}.add_model", AddModel, PlacementPlan, sent_by=GATEWAY, served_by=PLACEMENT)
PLACEMENT_REMOVE_MODEL = Endpoint(
    f"{_PLACEMENT}.remove_model", RemoveModel, PlacementPlan, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_ADD_ADAPTER = Endpoint(
    f"{_PLACEMENT}.add_adapter", AddAdapter, AdapterSpec, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_REMOVE_ADAPTER = Endpoint(
    f"{_PLACEMENT}.remove_adapter", RemoveAdapter, Done, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_DRAIN_INSTANCE = Endpoint(
    f"{_PLACEMENT}.drain_instance", DrainInstance, PlacementPlan, sent_by=GATEWAY | SCHEDULER, served_by=PLACEMENT
)
PLACEMENT_SCALE_MODEL = Endpoint(
    f"{_PLACEMENT}.scale_model", ScaleModel, PlacementPlan, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_SCALE_INSTANCES = Endpoint(
    f"{_PLACEMENT}.scale_instances", ScaleInstances, PlacementPlan, sent_by=GATEWAY | SCHEDULER, served_by=PLACEMENT
)
PLACEMENT_PLAN = Endpoint(f"{_PLACEMENT}.plan", GetPlan, PlacementPlan, sent_by=GATEWAY, served_by=PLACEMENT)

PLACEMENT_REPLACEMENT = Endpoint(
    f"{_PLACEMENT}.replacement", GetReplacement, ReplacementState, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_CHANGE_PLAN = Endpoint(
    f"{_PLACEMENT}.change_plan", ChangePlan, ReplacementState, sent_by=GATEWAY, served_by=PLACEMENT
)
PLACEMENT_TRAFFIC = Endpoint(f"{_PLACEMENT}.traffic", GetTraffic, TrafficReply, sent_by=GATEWAY, served_by=PLACEMENT)

# scheduler -> placement
PLACEMENT_REQUESTS = Endpoint(f"{_PLACEMENT}.requests", RequestRows, Done, sent_by=SCHEDULER, served_by=PLACEMENT)

# placement -> node agent
NODE_SCALE = Endpoint(f"{PREFIX}.node.{{node_id}}.scale", ScaleNode, Done, sent_by=PLACEMENT, served_by=WORKER)

# key-value
INSTANCES = Bucket(
    "tideway_instances",
    InstanceInfo,
    ttl_s=3.0,
    writers={WORKER: "{instance_id}"},
    read_by=GATEWAY | SCHEDULER | PLACEMENT | WORKER | OPERATOR,
)
"""key: instance id; writer: the instance"""
NODES = Bucket(
    "tideway_nodes", NodeInfo, ttl_s=3.0, writers={WORKER: "{node_id}"}, read_by=GATEWAY | PLACEMENT | OPERATOR
)
"""key: node id; writer: the node agent"""
LEASES = Bucket(
    "tideway_leases",
    LeaseHolder,
    ttl_s=3.0,
    writers={SCHEDULER: "scheduler", PLACEMENT: "placement", GATEWAY: "*"},
    read_by=GATEWAY | SCHEDULER | PLACEMENT | OPERATOR,
)
"""keys "scheduler" and "placement"; writer: the holder"""
TERMS = Bucket(
    "tideway_terms",
    LeaseHolder,
    durable=True,
    writers={SCHEDULER: "scheduler", PLACEMENT: "placement"},
    read_by=SCHEDULER | PLACEMENT,
)
"""the last term of each lease that is there for good"""
MODELS = Bucket(
    "tideway_models",
    ModelSpec,
    durable=True,
    writers={PLACEMENT: ">"},
    read_by=GATEWAY | SCHEDULER | PLACEMENT | OPERATOR,
)
"""key: `bucket_key(model name)`; writer: placement"""
ADAPTERS = Bucket(
    "tideway_adapters",
    AdapterSpec,
    durable=True,
    writers={PLACEMENT: ">"},
    read_by=GATEWAY | PLACEMENT | WORKER | OPERATOR,
)
"""key: `bucket_key(adapter name)`; writer: placement"""
PLANS = Bucket(
    "tideway_plans",
    PlacementPlan,
    durable=True,
    writers={PLACEMENT: ">"},
    read_by=GATEWAY | PLACEMENT | WORKER | OPERATOR,
)
"""key "current"; writer: placement"""
REPLACEMENT = Bucket(
    "tideway_replacement", ReplacementState, durable=True, writers={PLACEMENT: "current"}, read_by=PLACEMENT
)
"""key "current"; writer: placement"""
STATISTICS = Bucket("tideway_statistics", ModelStatistics, durable=True, writers={PLACEMENT: ">"}, read_by=PLACEMENT)
"""key: `bucket_key(model name)`, totals since the model was added; writer: placement"""
REQUEST_LOG = Bucket(
    "tideway_request_log",
    StoredTraffic,
    durable=True,
    writers={PLACEMENT: ">"},
    read_by=PLACEMENT,
    purged_by=PLACEMENT,
)
"""key: `<slot of time>.<part>`; writer: placement"""

RESPONSES = _gateways_own("tideway_responses", StoredResponse, ttl_s=86_400.0, drops_oldest=True)
"""key: response id; writer: the gateway that made it"""
KEPT_CALLS = _gateways_own("tideway_kept_calls", KeptCall, ttl_s=7_200.0, drops_oldest=True, is_read_from_copies=True)
"""key: call id; writer: the gateway that has it; a call lives for a shorter time than its entry"""
IDEMPOTENCY_KEYS = _gateways_own(
    "tideway_idempotency_keys", IdempotencyClaim, ttl_s=7_200.0, drops_oldest=True, is_read_from_copies=True
)
"""key: digest of whose it is and the client's key; writer: the gateway that answered first"""
ROUTES = _gateways_own("tideway_routes", Route, is_purged=False)
"""key: `bucket_key(route's name)`; writer: gateway"""
HISTORY = _gateways_own("tideway_history", HistorySample, is_purged=False, ttl_s=3_660.0, drops_oldest=True)
"""key: number of a slot of ten seconds; writer: the gateway that is first"""
AUDIT = _gateways_own("tideway_audit", AdminAction)
"""key: time in nanoseconds, gateway id; the last thousand tries to change something by the admin API"""

GATEWAYS = Bucket(
    "tideway_gateways", GatewayAlive, ttl_s=3.0, declared_by=GATEWAY, writers={GATEWAY: ">"}, read_by=GATEWAY
)
"""key: gateway id; writer: the gateway"""
KEY_USES = Bucket(
    "tideway_key_uses", KeyUses, ttl_s=180.0, declared_by=GATEWAY, writers={GATEWAY: ">"}, read_by=GATEWAY
)
"""key: the beginning of the digest of an API key with limits; writers: gateways, by compare-and-set"""

COST_MODELS = Bucket(
    "tideway_cost_models",
    StoredCostModel,
    durable=True,
    writers={WORKER: ">", OPERATOR: ">"},
    read_by=WORKER | OPERATOR | PLACEMENT,
)
"""key: `bucket_key` of the stored model's `key`; writer: the instance that profiled"""
FILES = _gateways_own("tideway_files", StoredFile)
"""key: file id; writer: gateway"""
FILE_CONTENTS = ObjectBucket("tideway_file_contents", used_by=GATEWAY)
BATCHES = _gateways_own("tideway_batches", BatchRecord)
"""key: batch id; writer: the gateway with the batch's lease; markers of deletions are purged once all have seen them"""
BATCH_RESULTS = _gateways_own("tideway_batch_results", BatchLineResult)
"""key: `<batch id>.<line index>`; created once, never changed; purged when the batch's files are written"""

BATCH_TERMS = _gateways_own("tideway_batch_terms", LeaseHolder, keys="*")
"""the last term of each batch's lease, until the batch is forgotten"""


def buckets_declared_by(role: Role) -> list[Bucket[Any]]:
    return [value for value in globals().values() if isinstance(value, Bucket) and role in value.declared_by]
