"""What the operator, placement and node agents ask for, and what the gateway's admin API shows."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.cluster import (
    DEFAULT_IDLE_S,
    AdapterSpec,
    DraftUse,
    InstancePlan,
    KvCopies,
    ModelSpec,
    PlacementPlan,
)
from shared.messages.requests import Seconds
from shared.messages.traffic import ModelTraffic
from shared.placement.plan import Group, Plan, Prediction, Rejected, Trial


class AddModel(msgspec.Struct, frozen=True):
    spec: ModelSpec


class RemoveModel(msgspec.Struct, frozen=True):
    name: str


class AddAdapter(msgspec.Struct, frozen=True):
    spec: AdapterSpec
    """Without what is read when it is added."""
    replaces: bool = False
    """An adapter of that name, if there is one: requests that have it go on with it."""


class RemoveAdapter(msgspec.Struct, frozen=True):
    """Requests that have it go on; new ones are not taken."""

    name: str


class GetPlan(msgspec.Struct, frozen=True):
    pass


class LoadModel(msgspec.Struct, frozen=True):
    """Node agent to instance. Answered at once; progress shows in the registry."""

    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True):
    """Node agent to instance: take no new request of the model, finish those it has within `grace_s`, free its memory.
    `keeps_weights`: in host memory, where there is room for them."""

    name: str
    grace_s: Seconds = 30.0
    keeps_weights: bool = False


class Drain(msgspec.Struct, frozen=True):
    """Take no new request; move away or finish those held within `grace_s`; then exit. `is_undone`: do not, but serve as
    before; CONFLICT where it is too late for that."""

    grace_s: Seconds = 30.0
    is_undone: bool = False


class DrainInstance(msgspec.Struct, frozen=True):
    """Operator (or scheduler) to placement: leave the instance out of the plan, so that it moves its requests away and
    exits; `is_undone`: back into the plan."""

    instance_id: str
    is_undone: bool = False
    is_for_scaling: bool = False
    """One instance less is wanted, best this one: it is brought back when more are. (An operator's drain stays until it is
    undone.)"""
    is_forced: bool = False
    """An operator's drain of the last instance; without it, CONFLICT."""


class GetReplacement(msgspec.Struct, frozen=True):
    pass


class ChangePlan(msgspec.Struct, frozen=True):
    """Operator to placement: `search` for a better plan; `apply` the one that was found (search first, where none was found
    for the plan that runs); `set` one of exactly these `groups`; `roll_back` the change that is under way, or the last one.
    Answered at once."""

    action: Literal["search", "apply", "set", "roll_back"]
    groups: tuple[Group, ...] = ()
    """The plan's groups, for `set`."""


class PlanProposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    found_s: float
    """Unix time."""
    why: str
    """It was searched."""
    version: int
    """Version of the plan that ran then."""
    is_worth: bool
    """Whether it is worth its change; `verdict` says why."""
    verdict: str
    plan: Plan
    prediction: Prediction
    before: Plan
    """The plan that ran then."""
    incumbent: Prediction | None
    """What is predicted of that plan."""
    measured: Prediction | None = None
    """What was measured of that plan, in the same interval."""
    rejected: list[Rejected]
    """Best first."""
    unplaced: dict[str, str]
    search_s: float
    interval_s: float
    """Length of the traffic that all is predicted for."""
    num_requests: int
    target: list[InstancePlan]
    """The plan's instances, with the KV pools that they would have."""
    kv_bytes: dict[str, int] = {}
    """By instance id: KV that requests hold there at once, by which a pool is kept or made anew."""
    cause: str = ""
    """Cause of the verdict: see `shared.placement.replacement.Cause`."""
    trial: Trial | None = None
    """What the change would take and bring; None: nothing has to change, or a model gets or loses its last place."""
    floor_cost: float = 0.0
    """Attainment of all requests that the plan gives up so that no model is left behind."""

    @property
    def is_change(self) -> bool:
        """Whether something is another than what ran."""
        return self.plan != self.before or self.cause == "larger_pools"


class ReplacementState(msgspec.Struct, frozen=True, kw_only=True):
    """State of adaptive replacement. Times are Unix time."""

    mode: str
    """off | advise | auto"""
    interval_s: float
    since_s: float
    """Time at which the interval began."""
    searching: str = ""
    """Why a search is under way."""
    problem: str = ""
    """Why the last search found nothing."""
    predicted: Prediction | None = None
    """Prediction for this interval."""
    measured: Prediction | None = None
    """In this interval so far."""
    deviation: float | None = None
    """Relative difference of measured from predicted in the last interval that ended."""
    proposal: PlanProposal | None = None
    change_s: float = 0.0
    """Seconds that the last change that was tried takes; a search goes by the traffic of twice that at least."""


class ShownPlan(PlacementPlan, frozen=True):
    """The plan as the operator sees it."""

    replacement: ReplacementState | None = None
    """None: placement does not answer."""


class ScaleModel(msgspec.Struct, frozen=True):
    """Call to placement: on how many instances the model is to be; None: on all."""

    name: str
    replicas: int | None


class ScaleInstances(msgspec.Struct, frozen=True):
    """Call to placement: how many instances there should be, over all nodes; carried out by its back end."""

    num_instances: int
    is_for_scaling: bool = False
    """Whether the scheduler asks: more are wanted, never fewer. It counts those that it sees, and others may be starting."""


class ScaleNode(msgspec.Struct, frozen=True):
    """Placement to a node agent: run so many instances, at most its `max_instances`."""

    num_instances: int


class Done(msgspec.Struct, frozen=True):
    pass


class ModelState(msgspec.Struct, kw_only=True):
    """A model as the operator sees it."""

    name: str
    source: str
    dtype: str
    max_model_len: int | None
    replicas: int | None
    ttft_ms: float
    """TTFT objective of requests that name none, in milliseconds; 0: the default, 1500 unless set otherwise."""
    tpot_ms: float
    """TPOT objective of requests that name none, in milliseconds; 0: the default, 110 unless set otherwise."""
    instances: dict[str, str]
    """Instance id to the model's state there: loading, ready, unloading, failed, host."""
    unplaced: str | None
    """Why it is on no instance, if it is on none."""
    failure: str | None
    """Why it cannot be loaded, if that is so wherever it is; or how the instance ended that was to load it."""
    num_running: int
    """On all its instances; likewise `num_waiting`."""
    num_waiting: int
    num_queued: int | None
    """Requests queued at the scheduler; None: it does not say."""
    slo_scale: float = 0.0
    """Mean execution times that a request may take; 0: the default, 5."""
    traffic: ModelTraffic | None = None
    """Over the interval that was asked for; None: no placement says it."""
    quantization: str = ""
    """Quantisation of weights that the checkpoint has unquantised; empty: none."""
    sampling_defaults: dict[str, float] = {}
    """Sampling of requests that say nothing else, by generation_config.json; empty too while the gateway has not read it."""
    on_demand: bool = False
    """Loaded when requests for it come, and put away `idle_s` after the last one."""
    idle_s: float = DEFAULT_IDLE_S
    state: str = ""
    """ready | loading | failed | host | disk: the last two of one that is put away, by where its weights are."""
    why_asleep: str = ""
    """Why it is put away: a `WhyAsleep`."""
    engine: str = "native"
    """Engine that computes it."""
    draft: str = ""
    """Source of its draft model; empty: none."""


class AdapterState(msgspec.Struct, kw_only=True):
    """A LoRA adapter as the operator sees it; its requests run and wait as its base model's."""

    name: str
    base: str
    source: str
    rank: int
    """The largest of its matrices."""
    num_values: int
    """In all of them."""
    ttft_ms: float
    """TTFT objective of requests that name none, in milliseconds; 0: the base model's."""
    tpot_ms: float
    """TPOT objective of requests that name none, in milliseconds; 0: the base model's."""
    slo_scale: float
    """Mean execution times that a request may take; 0: the base model's."""
    loaded_on: list[str]
    """Instance ids."""
    traffic: ModelTraffic | None = None


class ModelStates(msgspec.Struct):
    models: list[ModelState]
    """Each model that is served or being loaded."""
    adapters: list[AdapterState] = []
    queued_age_s: float | None = None
    """Age of `num_queued`, which the scheduler says once a second; null: it has said nothing lately."""


class InstanceModel(msgspec.Struct, kw_only=True):
    """A model on an instance."""

    name: str
    state: str
    """loading | ready | unloading | failed | host"""
    max_model_len: int
    block_size: int
    blocks_per_merged: int
    num_running: int
    num_waiting: int
    error: str
    cost_model: str
    """Source of its step times: none | live | profiled | stored; empty: it has none"""
    fingerprint: str = ""
    """Fingerprint of the bits that it makes in deterministic mode; empty: another mode, or several devices."""
    adapters: list[str] = []
    """Names of its LoRA adapters that are loaded."""


class InstanceLoad(msgspec.Struct, kw_only=True):
    """Load by an instance's own report. Freeness is None where it is unbounded (idle)."""

    age_s: float
    pool_use: float | None
    """Share of the KV pool that requests hold, 0 to 1."""
    num_running: int
    num_waiting: int
    num_offline: int
    num_high: int
    """Online requests of high priority."""
    dispatch_freeness: float | None
    """Merged blocks."""
    migration_freeness: float | None
    """Decode steps until the KV pool is full."""
    num_migrating_out: int
    """Migrations under way."""
    num_migrating_in: int
    num_migrated_out: int
    """Since the instance started."""
    num_migrated_in: int
    kv_copies: KvCopies | None = None
    """None: it has made, kept and fetched none."""
    drafts: list[DraftUse] = []
    """Use of its draft models."""


class InstanceState(msgspec.Struct, kw_only=True):
    """An instance as the operator sees it."""

    instance_id: str
    incarnation: str
    node_id: str
    state: str
    """starting | ready | draining"""
    device: str
    """cpu | cuda"""
    devices: list[str] = []
    """Devices that it computes on."""
    num_stages: int = 1
    """Over which its layers are divided; each has as many of the devices."""
    pid: int
    models: list[InstanceModel]
    """Its models, and how each is there."""
    num_merged: int
    """Merged blocks in the KV pool, each of `merged_bytes`."""
    merged_bytes: int
    metrics_port: int
    kv_address: str
    """Address of its KV transport; empty: requests do not move to or from it with their KV."""
    migration: bool
    load: InstanceLoad | None
    """None: it has not reported lately."""
    engine: str = "native"
    """native | vllm | endpoint; and its version, or the server's address."""
    engine_version: str = ""
    lacks: list[str] = []
    """What the engine cannot do (docs/engines.md)."""
    role: str = "both"
    """What it is sent: both | prefill | decode"""
    is_role_fixed: bool = False
    """An operator chose the role."""


class InstanceStates(msgspec.Struct):
    instances: list[InstanceState]
    draining: list[str] | None
    """Those that the plan leaves out until that is undone, here or gone; None: the plan cannot be read now."""


class KeyState(msgspec.Struct, kw_only=True):
    """An API key with limits, and what all gateways use of them."""

    key: str
    """The beginning of its digest."""
    max_in_flight: int | None
    """Most requests in flight of each class; null: no limit."""
    num_online: int
    num_offline: int
    """Calls in flight."""
    tokens_per_minute: int | None
    num_tokens: int
    """Used in the last minute."""


class TenantState(msgspec.Struct, kw_only=True):
    """A tenant, and what it has of the cluster. Null: no scheduler says it."""

    tenant: str
    weight: float
    num_running: int | None
    """Requests on instances, or on their way there."""
    num_waiting: int | None
    """Requests in the scheduler's queue."""
    service_s: float | None
    """Time of steps of its requests that ended in the last minute."""
    share: float | None
    """Share of the service of all tenants."""
    lag_s: float | None
    """Weighted service of its online requests beyond that of the tenant with least."""
    keys: list[KeyState]


class TenantStates(msgspec.Struct):
    tenants: list[TenantState]


class RouteState(msgspec.Struct, kw_only=True):
    """A public name and the models that answer for it."""

    name: str
    arms: dict[str, float]
    """Weights by model."""
    sticky: str
    """none | key | user"""
    mirrors: dict[str, float]
    """Shares by model."""
    fallbacks: list[str]
    changed_s: float
    """Unix time."""
    down: list[str]
    """Models among these that no instance serves now."""


class RouteStates(msgspec.Struct):
    routes: list[RouteState]
