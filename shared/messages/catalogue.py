"""Every subject and bucket: the one place where they are spelled."""

from __future__ import annotations

from shared.messages.admin import (
    AddModel,
    Done,
    Drain,
    DrainInstance,
    GetPlan,
    LoadModel,
    RemoveModel,
    ScaleInstances,
    ScaleModel,
    ScaleNode,
    UnloadModel,
)
from shared.messages.batches import BatchLineResult, BatchRecord, GrantQuery, GrantReply, StoredFile
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Topic
from shared.messages.cluster import (
    ExecutionStatisticsReport,
    InstanceExited,
    InstanceInfo,
    LoadReport,
    ModelSpec,
    ModelStatistics,
    NodeInfo,
    PlacementPlan,
    SchedulerInfo,
    StatisticsReport,
    StoredCostModel,
)
from shared.messages.migration import (
    AbortMigration,
    Commit,
    Committed,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
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

PREFIX = "tideway.v1"


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
