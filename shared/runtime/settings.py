"""Settings, one frozen class a service, read once at the edge and passed on explicitly.

`load(Class)` reads each field `x` from the environment variable `TIDEWAY_X`, else from the TOML file that
`TIDEWAY_CONFIG` names (top-level key `x`), else takes the default. Values are converted to the field's type; a value
that cannot be is a `SettingsError` that names the variable, the value and what was expected.
"""

from __future__ import annotations

import json
import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.messages.requests import Seconds
from shared.plugins import PluginError, Registry

T = TypeVar("T")

RECORD_MAX_BYTES = 256 << 20
ADAPTER_MEMORY_BYTES = 512 << 20
RESUME_S = 60.0

SubjectPart = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]*$")]
"""An id that becomes part of a subject."""


class SettingsError(Exception):
    """A setting cannot be used; the message is for the operator."""


def check_part(variable: str, name: str, known: Registry[Any]) -> None:
    """Raises `SettingsError` for a part that is neither built in nor to be had from another package."""
    try:
        known.find(name)
    except PluginError as error:
        raise SettingsError(f"{variable}={name!r}: {error}") from None


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Common to all services."""

    nats_url: str = "nats://127.0.0.1:4222"
    """URL of the server; for a cluster, the URLs of its servers, separated by commas."""
    nats_replicas: Literal[1, 3, 5] = 1
    """Copies of each stream that is made, on as many servers of the cluster."""
    nats_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """How long a service that starts waits for what it needs of JetStream, before it ends."""
    nats_user: str = ""
    nats_password: str = ""
    nats_tls_ca: str = ""
    """File with the certificates of those who may have signed the server's; with it, or with `nats_tls_cert`, nothing is
    sent to a server without TLS."""
    nats_tls_cert: str = ""
    """File with the certificate that this process shows, and those between it and its CA."""
    nats_tls_key: str = ""
    """File with its key; empty: it is in the same file."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Prometheus and health endpoint; 0: any free port."""
    otlp_endpoint: str = ""
    """URL of the OTLP collector, for example http://jaeger:4318; empty: no export."""
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    log_level: str = "INFO"
    log_format: str = "text"
    """text | json: a line a record, with date and zone, or an object on a line."""
    watchdog_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """A process whose event loop stands still, or that answers its supervisor no more, for so long is ended and started
    again; 0: never."""


class GatewaySettings(BusSettings, frozen=True, kw_only=True):
    gateway_id: SubjectPart = ""
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str = ""
    """File with the server's certificate, and those between it and its CA: HTTPS in place of HTTP."""
    tls_key: str = ""
    """File with its key; empty: it is in the same file."""
    tls_client_ca: str = ""
    """File with the certificates of those who may have signed a client's; with it a client must show one."""
    api_keys: str = ""
    """Comma-separated keys, each `key[:max_in_flight[:tokens_per_minute[:priority[:tenant]]]]`; the priority `normal` keeps
    its requests from asking for a high one. `tenant`: whose requests they are, several keys may have one; empty: the key's
    own; `*`: a trusted proxy's, which says so in `tenant_header`."""
    api_keys_file: str = ""
    """One such entry a line, # for comments."""
    tenant_header: str = "x-tideway-tenant"
    """In which a trusted proxy names the tenant of a request."""
    trust_tenant_header: bool = False
    """Whether the header counts where no keys are set: only where nobody but such a proxy reaches this gateway."""
    tenant_weights: str = ""
    """Comma-separated `tenant=weight`, from 0.001 to 1000: shares of service of tenants against each other; 1 for others."""
    shared_prefixes: str = ""
    """Comma-separated tenants that use each other's cached prefixes, `*` for all; else each finds its own alone."""
    admin_api_key: str = ""
    """Needed on /admin when set; with API keys configured and no admin key, /admin is closed."""
    admin_keys_file: str = ""
    """Further admin keys, one `name:role:key` a line, # for comments; a role is read or operate. This file and that of the
    API keys are read again when they change."""
    cors_origins: str = ""
    """Origins (https://example.org, comma-separated; * for all) whose pages may call the API from a browser."""
    base_path: str = ""
    """Before every path, such as /llm where a proxy leaves it; without it they are served too."""
    stream_keep_alive_s: float = 15.0
    """A stream that has been silent for so long has a comment, which proxies take for life and clients for nothing; 0:
    never."""
    client_keep_alive_s: int = 120
    """How long a connection may idle between requests: longer than a proxy before it keeps its own."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: what a request does not say of sampling is as generation_config.json of the model's checkpoint says; none: as
    OpenAI's API says."""
    allowed_hosts: str = ""
    """Names (comma-separated; * for all) under which pages may reach a gateway that asks for no API key, beside addresses
    and names that nobody can register, such as localhost and gateway.svc.cluster.local."""
    request_timeout_s: float = 600.0
    max_body_bytes: int = 8 * 1024 * 1024
    max_in_flight: int = 2048
    """Sequences (prompts times `n`) of one class, online or offline, in flight in this gateway; beyond it 429."""
    developer_mode: bool = False
    """Adds POST /reset_prefix_cache."""
    max_file_bytes: Annotated[int, msgspec.Meta(ge=1)] = 200 * 1024 * 1024
    """Largest size of one uploaded file."""
    max_key_file_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most bytes of all files of one API key, results of batches among them; beyond it no more are uploaded. 0: no bound."""
    max_responses_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 256 << 20
    """Most bytes of the answers of the Responses API that NATS keeps for a day; in a full store the oldest go."""
    resume_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = RESUME_S
    """After its end, or without anybody who reads it, a call that may be resumed is there for so long; 0: none may be."""
    max_resume_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 128 << 20
    """Most bytes of the records of such calls on NATS, prompts and answers among them; in a full store the oldest go."""
    max_batch_lines: Annotated[int, msgspec.Meta(ge=1)] = 50_000
    batch_lines_in_flight: Annotated[int, msgspec.Meta(ge=1)] = 128
    """Most lines in flight of one batch and model."""
    batch_retention_s: Annotated[float, msgspec.Meta(ge=3600)] = 30 * 86400
    """After its end the record of a batch is there for so long."""
    sweep_interval_s: Annotated[float, msgspec.Meta(ge=15)] = 600.0
    """Interval at which a gateway looks for what deleted and expired files and batches left; the second look removes it."""
    max_body_bytes_in_flight: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024 * 1024
    """Most bytes of request bodies that are being read, each beyond its first 64 KiB; beyond it 429. Uploads do not
    count."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 4096
    max_client_connections: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Connections from one client address; 0: three quarters of `max_connections`."""
    max_head_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024
    """Most bytes of a request's headers."""
    max_headers: Annotated[int, msgspec.Meta(ge=1)] = 128
    max_uri_bytes: Annotated[int, msgspec.Meta(ge=1)] = 8192
    head_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Time for the handshake of TLS, for the first byte of a new connection's request, and for the whole of any request's
    headers."""
    body_idle_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Without a byte of a request's body that is waited for."""
    write_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """In which a client takes nothing of its answer."""
    text_processes: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Processes that render chat templates; all but one of them tokenise long texts too."""
    text_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Time for one text in such a process, which is killed then."""
    text_memory_bytes: Annotated[int, msgspec.Meta(ge=1)] = 512 * 1024 * 1024
    """Memory of each such process."""
    max_text_characters: Annotated[int, msgspec.Meta(ge=1)] = 32 * 1024 * 1024
    """Most characters of texts that are being rendered (by their bytes, with all that comes with them) or tokenised or
    wait for it; beyond it 429."""
    max_submissions: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Requests on their way to a scheduler or instance at once; others wait for their turn."""
    max_timelines: Annotated[int, msgspec.Meta(ge=0)] = 2048
    """Requests that are over whose timelines are kept; 0: none has one."""
    timeline_s: Annotated[float, msgspec.Meta(gt=0)] = 900.0
    """How long."""
    leave_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Grace period when told to stop: so long it says that it is not ready, and still serves all that comes."""
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    """After that it takes no new connection, and what it has gets so long to end."""


class SchedulerSettings(BusSettings, frozen=True, kw_only=True):
    scheduler_id: SubjectPart = ""
    max_queued: int = 4096
    """Requests of one class, online or offline, in the global queue over all models; beyond it OVERLOADED."""
    max_waiting_per_model: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Requests of one model that an instance may hold without having planned them yet."""
    lost_after_s: float = 3.0
    """An instance that was not heard of for so long is dead."""
    dispatch_policy: str = "first_token"
    """first_token | freeness | round_robin | fewest_requests, a plug-in's name, or module:attribute"""
    rebalance_policy: str = "freeness"
    """freeness, a plug-in's name, or module:attribute"""
    scaling_policy: str = "freeness"
    """freeness, a plug-in's name, or module:attribute"""
    order_policy: str = "doubling_budget"
    """doubling_budget | seallm | fcfs | round_robin | mlfq, a plug-in's name, or module:attribute"""
    migration: str = "auto"
    """auto: requests move between instances | off"""
    roles: Literal["off", "fixed", "adaptive"] = "fixed"
    """off: every instance computes prompts and decodes | fixed: instances with a role of the operator's do what it says |
    adaptive: the roles of the others follow the load"""
    rebalance_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    rebalance_low: float = 96.0
    """An instance of lower migration freeness (decode steps until its KV pool is full) gives requests away."""
    rebalance_high: float = 160.0
    """Over `rebalance_low`: how much freer than it has to be one is that begins to take them."""
    max_migrations_per_s: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    """Pairings begun over the whole cluster."""
    dispatch_growth_steps: Annotated[float, msgspec.Meta(ge=0)] = 32.0
    """Decode steps for which the requests of an instance have room to grow when one more is dispatched to it."""
    max_defragmenting_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    """Share of a model's instances: so many at once (at least one) get free memory together for a request that fits
    into none; other such requests stay in the queue for a while, and those that fit pass them."""
    autoscale: bool = False
    """Whether instances are started and drained to keep the cluster's freeness within bounds."""
    scale_low: float = 160.0
    """Mean scaling freeness (decode steps) below which one more instance is asked for."""
    scale_high: float = 960.0
    """Above it, even with one instance less, one is drained."""
    scale_period_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long the freeness must be out of bounds."""
    min_instances: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_instances: int = 0
    """0: as many as the nodes can run."""
    record_file: str = ""
    """File in which inputs and actions are recorded for `tideway replay`: this name, the scheduler's id and the number of
    its term, with dots between; empty: nowhere."""
    record_max_bytes: int = RECORD_MAX_BYTES
    """Largest size of a recording, which ends there."""


class PlacementSettings(BusSettings, frozen=True, kw_only=True):
    placement_id: str = ""
    models: str = ""
    """JSON list of ModelSpec, or comma-separated `name=source` pairs: the models to begin with."""
    quantization: str = ""
    """Quantisation of the weights of models that name none: int8 | int4 | fp8; empty: none."""
    adapters: str = ""
    """JSON list of AdapterSpec, or comma-separated `name=base=source`: the LoRA adapters to begin with."""
    max_adapter_rank: Annotated[int, msgspec.Meta(ge=1, le=256)] = 64
    """Largest rank of an adapter that is added."""
    adapter_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = ADAPTER_MEMORY_BYTES
    """Memory for the adapters of a model, on each device: what instances are planned with, and hold at most."""
    models_file: str = ""
    """File that holds a copy of the models as they are now, for the day on which NATS loses its store; empty: nowhere."""
    interval_s: float = 10.0
    scaling_backend: str = "local"
    """Who starts and ends instances: local (node agents, up to their `max_node_instances`) | kubernetes"""
    kubernetes_workload: str = "statefulset/tideway-worker"
    """Whose replicas are set: (deployment | statefulset)/name, in the pod's namespace."""
    replacement: str = "off"
    """Whether better placements are searched for: off (when asked) | advise (and shown) | auto (and carried out)"""
    replacement_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Until the first search; later intervals adapt, within `replacement_least_s` and `replacement_most_s`."""
    replacement_least_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    replacement_most_s: Annotated[float, msgspec.Meta(gt=0)] = 21600.0
    replacement_beta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1
    """Relative difference between what was predicted and what was measured that makes the interval shorter by this share;
    else it grows by it."""
    slo_scale: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Mean execution times that a request of a model without a scale of its own may take."""
    max_models_per_group: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most models that a search puts together; 0: as many as fit."""
    max_ranks: Annotated[int, msgspec.Meta(ge=1)] = 8
    """Devices of a group that a search makes, at most."""
    hardware: str = ""
    """Profile of the nodes' GPUs (shared/placement/hardware.py), for models whose step times were not measured; empty: by
    the name under which they were measured."""

    def model_specs(self) -> list[ModelSpec]:
        text = self.models.strip()
        specs: list[ModelSpec] = []
        if not text:
            return specs
        if text.startswith("["):
            try:
                specs = msgspec.json.decode(text, type=list[ModelSpec])
            except msgspec.MsgspecError as error:
                raise SettingsError(f"TIDEWAY_MODELS is not a JSON list of models: {error}") from None
            return [self._quantized(spec) for spec in specs]
        pairs = [item.strip() for item in text.split(",") if item.strip()]
        for pair in pairs:
            if specs and (changed := with_option(specs[-1], pair)) is not None:
                specs[-1] = changed
                continue
            name, equals, source = pair.partition("=")
            spec = ModelSpec(name=name.strip(), source=source.strip() if equals else name.strip())
            specs.append(self._quantized(spec))
        return specs

    def adapter_specs(self) -> list[AdapterSpec]:
        text = self.adapters.strip()
        if text.startswith("["):
            try:
                return msgspec.json.decode(text, type=list[AdapterSpec])
            except msgspec.MsgspecError as error:
                raise SettingsError(f"TIDEWAY_ADAPTERS is not a JSON list of adapters: {error}") from None
        specs = []
        for item in filter(None, map(str.strip, text.split(","))):
            name, base, source = map(str.strip, [*item.split("=", 2), "", ""][:3])
            if not (name and base and source):
                raise SettingsError(f"TIDEWAY_ADAPTERS: {item!r}: expected name=base=source")
            specs.append(AdapterSpec(name, base, source))
        return specs

    def _quantized(self, spec: ModelSpec) -> ModelSpec:
        return msgspec.structs.replace(spec, quantization=spec.quantization or self.quantization)


def with_option(spec: ModelSpec, option: str) -> ModelSpec | None:
    """The model with an option as it stands behind its source: `on-demand`, or `idle=SECONDS`, which is on demand too. None:
    it is no option. Raises `SettingsError`."""
    name, equals, value = option.strip().partition("=")
    if name == "on-demand" and not equals:
        return msgspec.structs.replace(spec, on_demand=True)
    if name != "idle" or not equals:
        return None
    try:
        return msgspec.structs.replace(spec, on_demand=True, idle_s=msgspec.convert(value, Seconds, strict=False))
    except msgspec.ValidationError:
        raise SettingsError(f"model {spec.name!r}: idle={value}: expected a number of seconds") from None


class WorkerSettings(BusSettings, frozen=True, kw_only=True):
    node_id: str = ""
    num_instances: int = 1
    max_node_instances: int = 0
    """How many this node may run when the cluster grows; its memory is divided over so many. 0: `num_instances`."""
    memory_bytes: int = 0
    """Memory for weights and KV pools of all instances; 0: half of what is free at the start, 90 % of a GPU."""
    device: str = "auto"
    """auto | cpu | cuda"""
    num_threads: int = 0
    """Torch threads of one device on CPU; 0: the machine's cores divided over the devices."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Devices that compute one instance together, each with a part of every weight: a power of two. On CPU a device is a
    share of the cores, and each instance has so many of them."""
    pipeline_parallel: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Stages of each instance, each with a run of the layers and `tensor_parallel` devices."""
    instance_roles: Annotated[
        str, msgspec.Meta(pattern=r"^((auto|both|prefill|decode)(,(auto|both|prefill|decode))*)?$")
    ] = ""
    """Roles of the node's instances in their order, comma-separated: prefill | decode | both, or auto, which is the
    scheduler's matter; auto for those that are not named."""

    def role_of(self, index: int) -> Literal["auto", "both", "prefill", "decode"]:
        """Role of the instance of that number."""
        roles = self.instance_roles.split(",")
        return cast(Literal["auto", "both", "prefill", "decode"], (roles[index : index + 1] or ["auto"])[0] or "auto")


DEFAULT_TTFT_MS, DEFAULT_TPOT_MS = 1500.0, 110.0
"""Objectives of online requests where neither they, their model nor the instance's settings name any."""


class InstanceSettings(BusSettings, frozen=True, kw_only=True):
    """Passed by the node agent to the instances it starts."""

    node_id: str = ""
    instance_id: str = ""
    plan: str = ""
    """The InstancePlan as JSON."""
    black_box: int = -1
    """Descriptor of the memory in which the agent finds what the instance was computing when it ended; -1: there is none."""
    device: str = "auto"
    num_threads: int = 0
    deterministic: bool = False
    """A sequence's tokens and log-probabilities depend on it alone, to the last bit: not on what shares its steps, nor on
    how often and where it was interrupted."""
    compiled_kernels: Literal["auto", "off"] = "auto"
    """On CPU: auto: where they are, or can be made | off: torch's operators. From the environment alone: each process that
    asks which back ends there are reads it."""
    max_running: int = 256
    """Sequences in one batch at most."""
    token_budget: int = 0
    """Tokens in one step at most; 0: 512 on CPU, 8192 on CUDA."""
    steps_in_flight: int = 0
    """0: 1 on CPU, 2 on CUDA."""
    prompt_lookup: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Tokens guessed at most for a sequence in a step: those that followed its last tokens elsewhere in it; 0: off."""
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """So many of the last tokens must have stood before."""
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    """Up to so many are compared where there are several such places."""
    draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=16)] = 5
    """Tokens that a model's draft model guesses at most for a sequence in a step; 0: none."""
    resume_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = RESUME_S
    """How long (a minute at least) an instance keeps the output of a request that has ended."""
    max_adapters: Annotated[int, msgspec.Meta(ge=1)] = 32
    """LoRA adapters that are loaded at once, of all models; the least recently used go."""
    adapter_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = ADAPTER_MEMORY_BYTES
    """Memory of all adapters together, on each device."""
    order_policy: str = "doubling_budget"
    """Order of the sequences of one class: doubling_budget | seallm | fcfs | round_robin | mlfq"""
    mix_phases: bool = True
    """Whether a step may hold prefill chunks and decodes together."""
    co_serving: str = "slo"
    """slo: offline tokens fill what the objectives leave | priority_only: the token budget is all that bounds them |
    online_only: offline requests wait for ever"""
    interruption: str = "suspend"
    """How an online arrival interrupts an offline step: suspend | discard | off"""
    host_memory_bytes: int = -1
    """Host memory for checkpoints of KV blocks; 0: none are made; -1: as much as the KV pool."""
    host_weights_bytes: int = -1
    """Host memory for weights of models on demand that were put away, so that they are soon back; 0: none are kept; -1:
    half of the memory that would be free without them."""
    prefetch: bool = True
    """Restore checkpoints beside other work; false: the steps of the model wait for them."""
    checkpoint_start: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Used share of the KV pool at which checkpointing begins."""
    ttft_ms: Annotated[float, msgspec.Meta(gt=0)] = DEFAULT_TTFT_MS
    """Objective of online requests and models that name none: time to first token."""
    tpot_ms: Annotated[float, msgspec.Meta(gt=0)] = DEFAULT_TPOT_MS
    """Objective per output token after the first, where neither request nor model names one."""
    profile: str = "auto"
    """Step times of a model are learnt from its steps until a cost model is loaded, or measured briefly while nothing is to
    do (auto) | always (live) | never, so that there is no SLO budget (off)"""
    record_file: str = ""
    """File in which the engine's inputs and plans are recorded for `tideway replay`: this name, a dot and the instance's
    id; empty: nowhere."""
    record_max_bytes: int = RECORD_MAX_BYTES
    """Largest size of a recording, which ends there."""
    role: Literal["auto", "both", "prefill", "decode"] = "auto"
    """What the scheduler is to send here (shared/policies/roles.py); auto: that is the scheduler's matter."""
    migration: str = "auto"
    """auto: KV moves to other instances over UCX, where that can be used | off"""
    migration_rate_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the measured bandwidth for all copies out of the instance that nobody waits for; 0: by the device."""
    max_migrations: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Out of the instance at once, and into it."""
    migration_max_stages: Annotated[int, msgspec.Meta(ge=1)] = 8
    """In which the KV of a request that goes on decoding is copied; 1: all of it while the request is paused (the blocking
    copy of bench/migration)."""
    migration_cooldown_s: float = 1.0
    """A request that moved stays for so long."""
    kv_backup: Literal["off", "offline", "all"] = "offline"
    """Requests of whose KV other instances keep copies, from which they go on if this one dies."""
    kv_backup_tokens: Annotated[int, msgspec.Meta(ge=1)] = 512
    """Known tokens, prompt and output, from which on a request is worth that."""
    kv_backup_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Share of this instance's host memory that copies for other instances may take."""
    kv_offload: Literal["off", "host", "disk"] = "off"
    """Tier to which KV blocks of ended requests go before they are evicted, so that prompts that begin alike find them: none
    (off) | host memory (host) | through host memory the folder `kv_disk_folder` (disk)"""
    kv_offload_start: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75
    """Share of the KV pool, and of host memory, with something in it from which on they go; 0: at once."""
    kv_disk_folder: str = ""
    """Folder for KV blocks, which the instances of a node may share, and which survives them."""
    kv_disk_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30
    """Size of that folder at most, over all instances that share it."""
    prefix_fetch: Literal["auto", "off"] = "off"
    """auto: the beginning of a prompt is fetched from the instance that has it where that is predicted to be faster"""
    drain_grace_s: float = 15.0
    """What requests get to move away or finish when their instance or model is to go."""
    high_priority_load: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the KV pool up to which an instance with requests of high priority is loaded; 0: from the cost model, up to
    where a decode step is still near its ideal speed."""
    least_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    """Share of the KV pool that is divided evenly over the models of the instance: what a model can have for its online
    requests whatever the others hold. 0: nothing is kept."""
    fault_points: str = ""
    """Faults for tests: `name:action[:seconds]`, comma-separated, at which a migration fails (docs/design/migration.md)."""
    cost_models_dir: str = ""
    """Folder in which cost models are kept as files, beside the key-value store; empty: nowhere."""
    kv_host: str = ""
    """Name or address of this machine under which other instances reach this one's KV transport, which listens there only;
    empty: this machine's on the network of the NATS server."""
    kv_ports: Annotated[str, msgspec.Meta(pattern=r"^\d+-\d+$")] = "20100-20355"
    """First and last of the tcp ports of which each instance's KV transport takes a free one."""

    @property
    def copy_rate_share(self) -> float:
        """Share of the copy rate that copies may use. Where the CPU computes, they take cores from the steps of other
        requests: about as much of one as of the bandwidth."""
        return self.migration_rate_share or (0.03 if self.device == "cpu" else 0.5)


def _convert(kind: Any, text: str, source: str) -> Any:
    if kind is bool or kind == "bool":
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise SettingsError(f"{source}={text!r}: expected true or false")
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        expected = str(error).replace("Expected", "expected")
        if "got `str`" in expected:
            expected = f"expected {getattr(plain, '__name__', plain)}"
        raise SettingsError(f"{source}={text!r}: {expected}") from None


def load(kind: type[T], environment: Mapping[str, str] | None = None) -> T:
    """Settings of `kind` from `environment` (default: the process's) and the file it names."""
    environment = os.environ if environment is None else environment
    file_values: dict[str, Any] = {}
    if path := environment.get("TIDEWAY_CONFIG"):
        try:
            file_values = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"TIDEWAY_CONFIG={path!r} cannot be read: {error}") from None
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        variable = "TIDEWAY_" + field.name.upper()
        if variable in environment:
            values[field.name] = _convert(field.type, environment[variable], variable)
        elif field.name in file_values:
            value = file_values[field.name]
            text = json.dumps(value) if isinstance(value, list | dict) else str(value)
            values[field.name] = _convert(field.type, text, f"{path}: {field.name}")
    return kind(**values)


def default_id(prefix: str) -> str:
    """An id for this process on this machine, fit for a subject."""
    host = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in socket.gethostname())
    return f"{prefix}-{host}-{os.getpid()}"
