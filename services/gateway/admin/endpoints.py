"""The operator's API: changes models and instances through placement, and shows the registry and the load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.access.admission import AdminRole
from services.gateway.admin.audit import audited
from services.gateway.admin.model_checks import check_model
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid, of_info
from services.gateway.models.catalog import LOADING, loaded_model
from services.gateway.openai.parsing import whole_number_of
from services.gateway.openai.replies import AuditLog
from services.gateway.openai.schemas import (
    AddModelRequest,
    ChangePlanRequest,
    LoadAdapterRequest,
    ScaleModelRequest,
    ScaleRequest,
    SetRoleRequest,
    UnloadAdapterRequest,
)
from services.gateway.requests.other_routes import json_response
from shared.bus.interface import BusError
from shared.engines.capabilities import NATIVE
from shared.messages.admin import (
    AdapterState,
    AddAdapter,
    AddModel,
    ChangePlan,
    DrainInstance,
    GetPlan,
    GetReplacement,
    InstanceModel,
    InstanceStates,
    ModelState,
    ModelStates,
    RemoveAdapter,
    RemoveModel,
    ScaleInstances,
    ScaleModel,
    ShownPlan,
)
from shared.messages.catalogue import (
    INSTANCE_ROLE,
    NODES,
    PLACEMENT_ADD_ADAPTER,
    PLACEMENT_ADD_MODEL,
    PLACEMENT_CHANGE_PLAN,
    PLACEMENT_DRAIN_INSTANCE,
    PLACEMENT_PLAN,
    PLACEMENT_REMOVE_ADAPTER,
    PLACEMENT_REMOVE_MODEL,
    PLACEMENT_REPLACEMENT,
    PLACEMENT_SCALE_INSTANCES,
    PLACEMENT_SCALE_MODEL,
    PLACEMENT_TRAFFIC,
    PLANS,
)
from shared.messages.channels import Endpoint
from shared.messages.cluster import (
    DEFAULT_IDLE_S,
    AdapterSpec,
    ModelSpec,
    PlacementPlan,
    Role,
    SetRole,
)
from shared.messages.console import ConsoleHistory
from shared.messages.requests import ErrorCode
from shared.messages.timeline import (
    LEAST_SLO_INTERVAL_S,
    MAX_REQUESTS_LISTED,
    MAX_SLO_INTERVAL_S,
    ListTimelines,
    RequestTimelines,
)
from shared.messages.traffic import (
    DEFAULT_INTERVAL_S,
    LEAST_INTERVAL_S,
    MAX_INTERVAL_S,
    GetTraffic,
    ModelTraffic,
)
from shared.placement.plan import Group

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 10.0
ROLE_TIMEOUT_S = 3.0
PLAN_TIMEOUT_S = 2.0
TRAFFIC_TIMEOUT_S = 2.0

Q = TypeVar("Q")
T = TypeVar("T")

_ADD_MODEL = msgspec.json.Decoder(AddModelRequest)
_LOAD_ADAPTER = msgspec.json.Decoder(LoadAdapterRequest)
_UNLOAD_ADAPTER = msgspec.json.Decoder(UnloadAdapterRequest)
_SCALE_MODEL = msgspec.json.Decoder(ScaleModelRequest)
_CHANGE_PLAN = msgspec.json.Decoder(ChangePlanRequest)
_SCALE = msgspec.json.Decoder(ScaleRequest)
_SET_ROLE = msgspec.json.Decoder(SetRoleRequest)


def authenticate_operator(context: GatewayContext, request: Request) -> None:
    admin = context.admission.authenticate_admin(request.headers.get("authorization"))
    request.state.admin = admin.name
    if request.method != "GET" and admin.role is not AdminRole.OPERATE:
        raise ApiError(403, f"The admin key {admin.name!r} may read, but change nothing.", code="admin_read_only")


async def read_audited(context: GatewayContext, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body, which the audit log shows too."""
    message: T = await read_message(request, decoder, context.bodies)
    said = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    request.state.audited_body = msgspec.json.encode(said).decode()
    return message


async def _stored_plan(context: GatewayContext) -> PlacementPlan | None:
    entry = await (await context.bus.key_value(PLANS)).get("current")
    return None if entry is None else entry.value


async def api_errors(work: Awaitable[T], **names: str) -> T:
    """`names`: of fields of the query, as the HTTP request calls them."""
    try:
        return await work
    except BusError as error:
        info = msgspec.structs.replace(error.info, param=names.get(error.info.param, error.info.param))
        if info.code is ErrorCode.DEADLINE:  # no client's: whoever was asked has died, or hangs
            message = f"{info.message}; what was asked for may have been done, and may be asked for again."
            info = msgspec.structs.replace(info, code=ErrorCode.UNAVAILABLE, message=message)
        raise of_info(info) from error


async def _ask_placement(
    context: GatewayContext, endpoint: Endpoint[Q, PlacementPlan], query: Q, **names: str
) -> Response:
    """Answers with the new plan. `names`: as of `api_errors`."""
    asking = context.bus.request(endpoint, query, timeout_s=PLACEMENT_TIMEOUT_S)
    return json_response(await api_errors(asking, **names))


async def _traffic(context: GatewayContext, interval_s: float) -> dict[str, ModelTraffic]:
    """By model; none where no placement answers."""
    try:
        query = GetTraffic(interval_s)
        reply = await context.bus.request(PLACEMENT_TRAFFIC, query, timeout_s=TRAFFIC_TIMEOUT_S)
    except BusError as error:
        logger.info("what the traffic was like is not known: %s", error)
        return {}
    return {traffic.model: traffic for traffic in reply.models}


async def list_models(context: GatewayContext, request: Request) -> Response:
    """Models, where they are, and what their traffic was like in the last `interval_s`."""
    authenticate_operator(context, request)
    bounds = int(DEFAULT_INTERVAL_S), int(LEAST_INTERVAL_S), int(MAX_INTERVAL_S)
    interval_s = whole_number_of(request.query_params, "interval_s", *bounds)
    plan, traffic, instances = await asyncio.gather(
        api_errors(_stored_plan(context)), _traffic(context, interval_s), context.loads.states()
    )
    crashes = context.catalog.crashes
    ends = {
        spec.name: f"{instance.instance_id} {crashes[instance.instance_id]}"
        for instance in (() if plan is None else plan.instances)
        if instance.instance_id in crashes
        for spec in instance.models
    }
    num_queued = context.loads.num_queued()
    unplaced = {} if plan is None else plan.unplaced
    places: dict[str, dict[str, InstanceModel]] = {}
    for instance in instances:
        for model in instance.models:
            places.setdefault(model.name, {})[instance.instance_id] = model
    states = []
    for spec in context.catalog.models:
        on_instances = places.get(spec.name, {})
        state, found = context.catalog.state(spec.name), context.catalog.failure(spec.name)
        failure = None if found is None else found.message
        if failure is None and state == LOADING:
            failure = ends.get(spec.name)
        states.append(
            ModelState(
                name=spec.name,
                source=spec.source,
                dtype=spec.dtype,
                max_model_len=spec.max_model_len,
                replicas=spec.replicas,
                ttft_ms=spec.ttft_ms,
                tpot_ms=spec.tpot_ms,
                slo_scale=spec.slo_scale,
                quantization=spec.quantization,
                engine=spec.engine or NATIVE,
                draft=spec.draft,
                instances={instance_id: model.state for instance_id, model in on_instances.items()},
                unplaced=unplaced.get(spec.name),
                failure=failure,
                num_running=sum(model.num_running for model in on_instances.values()),
                num_waiting=sum(model.num_waiting for model in on_instances.values()),
                num_queued=None if num_queued is None else num_queued.get(spec.name, 0),
                traffic=traffic.get(spec.name),
                sampling_defaults=_sampling_defaults(context, spec),
                on_demand=spec.on_demand,
                idle_s=spec.idle_s,
                state=state,
                why_asleep=context.catalog.why_asleep(spec.name),
            )
        )
    adapters = [_adapter_state(context, spec, traffic) for spec in context.catalog.adapters]
    return json_response(ModelStates(states, adapters, context.loads.queued_age_s()))


def _sampling_defaults(context: GatewayContext, spec: ModelSpec) -> dict[str, float]:
    tokenizer = context.tokenizers.loaded(spec)
    if tokenizer is None or context.settings.generation_config == "none":
        return {}
    defaults: dict[str, float] = {k: v for k, v in msgspec.to_builtins(tokenizer.defaults).items() if v is not None}
    return defaults


def _adapter_state(context: GatewayContext, spec: AdapterSpec, traffic: Mapping[str, ModelTraffic]) -> AdapterState:
    bases = [(info.instance_id, loaded_model(info, spec.base)) for info in context.catalog.alive.values()]
    return AdapterState(
        name=spec.name,
        base=spec.base,
        source=spec.source,
        rank=spec.rank,
        num_values=spec.num_values,
        ttft_ms=spec.ttft_ms,
        tpot_ms=spec.tpot_ms,
        slo_scale=spec.slo_scale,
        loaded_on=[instance_id for instance_id, base in bases if base is not None and spec.name in base.adapters],
        traffic=traffic.get(spec.name),
    )


_NOT_OF_ADAPTERS = (
    "dtype", "max_model_len", "replicas", "quantization", "tool_format", "on_demand", "idle_s", "engine",
    "engine_args", "engine_url", "draft",
)  # fmt: skip


@audited
async def add_model(context: GatewayContext, request: Request) -> Response:
    authenticate_operator(context, request)
    message = await read_audited(context, request, _ADD_MODEL)
    if message.base is not None:
        for field in _NOT_OF_ADAPTERS:
            if getattr(message, field) is not None:
                raise invalid(field, f"'{field}' cannot be set of an adapter: it has that of its base model.")
        adapter = AdapterSpec(
            message.name,
            message.base,
            message.source,
            message.ttft_ms or 0.0,
            message.tpot_ms or 0.0,
            message.slo_scale or 0.0,
        )
        await _add_adapter(context, adapter)
        return await _ask_placement(context, PLACEMENT_PLAN, GetPlan())
    spec = ModelSpec(
        message.name,
        message.source,
        message.dtype or "auto",
        message.max_model_len,
        message.replicas,
        message.ttft_ms or 0.0,
        message.tpot_ms or 0.0,
        message.slo_scale or 0.0,
        message.quantization or "",
        message.tool_format or "",
        bool(message.on_demand),
        DEFAULT_IDLE_S if message.idle_s is None else message.idle_s,
        message.engine or ("endpoint" if message.engine_url else ""),
        message.engine_args or "",
        message.engine_url or "",
        message.draft or "",
    )
    await check_model(context, spec)
    if context.catalog.failure(spec.name) is not None:
        # Nobody serves it, and the operator has mended it.
        await api_errors(
            context.bus.request(PLACEMENT_REMOVE_MODEL, RemoveModel(spec.name), timeout_s=PLACEMENT_TIMEOUT_S)
        )
    return await _ask_placement(context, PLACEMENT_ADD_MODEL, AddModel(spec))


@audited
async def remove_model(context: GatewayContext, request: Request) -> Response:
    authenticate_operator(context, request)
    if (adapter := context.catalog.adapter(request.path_params["model"])) is not None:
        await _remove_adapter(context, adapter.name)
        return await _ask_placement(context, PLACEMENT_PLAN, GetPlan())
    name = context.catalog.spec(request.path_params["model"]).name
    return await _ask_placement(context, PLACEMENT_REMOVE_MODEL, RemoveModel(name))


async def _add_adapter(context: GatewayContext, spec: AdapterSpec, *, replaces: bool = False, **names: str) -> None:
    """`names`: as of `api_errors`. Returns when this gateway takes requests for it."""
    query = AddAdapter(spec, replaces)
    asking = context.bus.request(PLACEMENT_ADD_ADAPTER, query, timeout_s=PLACEMENT_TIMEOUT_S)
    added = await api_errors(asking, **names)
    await context.catalog.adapters_show(lambda: context.catalog.adapter(spec.name) == added)


async def _remove_adapter(context: GatewayContext, name: str) -> None:
    query = RemoveAdapter(name)
    await api_errors(context.bus.request(PLACEMENT_REMOVE_ADAPTER, query, timeout_s=PLACEMENT_TIMEOUT_S))
    await context.catalog.adapters_show(lambda: context.catalog.adapter(name) is None)


@audited
async def load_adapter(context: GatewayContext, request: Request) -> Response:
    """Loads an adapter by vLLM's endpoint of that name; needs the admin key."""
    authenticate_operator(context, request)
    message = await read_audited(context, request, _LOAD_ADAPTER)
    known = context.catalog.adapter(message.lora_name)
    if known is not None and not message.load_inplace:
        raise ApiError(400, f"The adapter '{known.name}' is loaded already.", param="lora_name", code="adapter_exists")
    base = message.base_model_name or (known.base if known is not None else None)
    if base is None and len(context.catalog.models) != 1:
        raise invalid("base_model_name", "'base_model_name' is required where a server has several models.")
    spec = AdapterSpec(message.lora_name, base or context.catalog.models[0].name, message.lora_path)
    names = {"name": "lora_name", "source": "lora_path", "base": "base_model_name"}
    await _add_adapter(context, spec, replaces=known is not None, **names)
    return Response(f"Success: LoRA adapter '{spec.name}' added successfully.", media_type="text/plain")


@audited
async def unload_adapter(context: GatewayContext, request: Request) -> Response:
    authenticate_operator(context, request)
    message = await read_audited(context, request, _UNLOAD_ADAPTER)
    if context.catalog.adapter(message.lora_name) is None:
        known = ", ".join(f"'{adapter.name}'" for adapter in context.catalog.adapters) or "none"
        message_text = f"There is no adapter '{message.lora_name[:200]}'. Adapters: {known}."
        raise ApiError(404, message_text, param="lora_name", code="model_not_found")
    await _remove_adapter(context, message.lora_name)
    return Response(f"Success: LoRA adapter '{message.lora_name}' removed successfully.", media_type="text/plain")


@audited
async def scale_model(context: GatewayContext, request: Request) -> Response:
    """Sets on how many instances the model is; the answer is the new plan."""
    authenticate_operator(context, request)
    name = context.catalog.spec(request.path_params["model"]).name
    message = await read_audited(context, request, _SCALE_MODEL)
    return await _ask_placement(context, PLACEMENT_SCALE_MODEL, ScaleModel(name, message.replicas))


@audited
async def scale_instances(context: GatewayContext, request: Request) -> Response:
    """Sets how many instances there are: started by the nodes or by Kubernetes, drained before they end."""
    authenticate_operator(context, request)
    message = await read_audited(context, request, _SCALE)
    query = ScaleInstances(message.instances)
    return await _ask_placement(context, PLACEMENT_SCALE_INSTANCES, query, num_instances="instances")


@audited
async def drain_instance(context: GatewayContext, request: Request) -> Response:
    """Leaves the instance out of the plan until that is undone: its requests move away or finish, then it exits. Answered
    at once, with the new plan. The last instance is drained with `force=true` only."""
    return await _set_draining(context, request, is_undone=False)


@audited
async def undrain_instance(context: GatewayContext, request: Request) -> Response:
    """Puts a drained instance back into the plan, which the answer is; it starts if it had exited."""
    return await _set_draining(context, request, is_undone=True)


@audited
async def set_role(context: GatewayContext, request: Request) -> Response:
    """Says what the instance is sent from now on, which is also the answer."""
    authenticate_operator(context, request)
    message, instance_id = await read_audited(context, request, _SET_ROLE), request.path_params["instance_id"]
    if (info := context.catalog.alive.get(instance_id)) is None:
        what = f"There is no instance {instance_id!r}."
        raise ApiError(404, what, param="instance_id", code="instance_not_found")
    if not info.takes_roles:
        what = (
            f"The instance {instance_id!r} has the engine {info.engine}, which hands no prompts over: it takes no role."
        )
        raise ApiError(400, what, param="instance_id", code="unsupported_value")
    query = SetRole(None if message.role == "auto" else Role(message.role), is_operators=True)
    endpoint = INSTANCE_ROLE.at(instance_id=instance_id)
    await api_errors(context.bus.request(endpoint, query, timeout_s=ROLE_TIMEOUT_S))
    return json_response(message)


async def _set_draining(context: GatewayContext, request: Request, *, is_undone: bool) -> Response:
    authenticate_operator(context, request)
    is_forced = _flag(request.query_params, "force")
    message = DrainInstance(request.path_params["instance_id"], is_undone, is_forced=is_forced)
    try:
        plan = await context.bus.request(PLACEMENT_DRAIN_INSTANCE, message, timeout_s=PLACEMENT_TIMEOUT_S)
    except BusError as error:
        if error.code is ErrorCode.GONE:
            raise ApiError(404, error.info.message, param="instance_id", code="instance_not_found") from error
        raise of_info(error.info) from error
    return json_response(plan)


@audited
async def change_plan(context: GatewayContext, request: Request) -> Response:
    """A search for a better plan, or the change to another and back. Answered at once; `GET /admin/plan` shows what comes
    of it."""
    authenticate_operator(context, request)
    message = await read_audited(context, request, _CHANGE_PLAN)
    if (message.action == "set") != (message.groups is not None):
        raise ApiError(400, "The action 'set' needs 'groups', and no other action has them.", param="groups")
    groups = (Group(one.node_id, tuple(one.devices), tuple(one.models)) for one in message.groups or ())
    change = ChangePlan(message.action, tuple(groups))
    asking = context.bus.request(PLACEMENT_CHANGE_PLAN, change, timeout_s=PLACEMENT_TIMEOUT_S)
    return json_response(await api_errors(asking))


async def show_plan(context: GatewayContext, request: Request) -> Response:
    """Placement's plan, and what it knows of a better one; the plan's stored copy where placement is away."""
    authenticate_operator(context, request)
    plan: PlacementPlan | None
    state = None
    try:
        plan = await context.bus.request(PLACEMENT_PLAN, GetPlan(), timeout_s=PLAN_TIMEOUT_S)
        with contextlib.suppress(BusError):
            state = await context.bus.request(PLACEMENT_REPLACEMENT, GetReplacement(), timeout_s=PLAN_TIMEOUT_S)
    except BusError:
        plan = await api_errors(_stored_plan(context))
    if plan is None:
        raise ApiError(404, "There is no placement plan yet.", code="no_plan")
    return json_response(ShownPlan(**msgspec.structs.asdict(plan), replacement=state))


async def list_instances(context: GatewayContext, request: Request) -> Response:
    """Those that are alive, with what they reported of their load; also while the bus is away, as they were known then."""
    authenticate_operator(context, request)
    draining: list[str] | None = []
    try:
        if (plan := await _stored_plan(context)) is not None:
            draining = plan.draining
    except BusError:
        draining = None
    return json_response(InstanceStates(await context.loads.states(), draining))


async def show_request(context: GatewayContext, request: Request) -> Response:
    """The timeline of a request that runs or ended lately: by the id of its answer, of one of its sequences, or of its HTTP
    request (`x-request-id`)."""
    authenticate_operator(context, request)
    request_id = request.path_params["request_id"]
    if not (found := await context.timelines.find_anywhere(request_id)):
        raise ApiError(
            404,
            f"Nothing is known of the request {request_id[:200]!r}: timelines are kept for "
            f"{context.settings.timeline_s:.0f} s after a request's end, of the last {context.settings.max_timelines}.",
            param="request_id",
            code="request_not_found",
        )
    return json_response(RequestTimelines(found))


async def list_requests(context: GatewayContext, request: Request) -> Response:
    """Requests that run, and the last that ended, the newest first, without their events."""
    authenticate_operator(context, request)
    query = request.query_params
    limit = whole_number_of(query, "limit", 50, 1, MAX_REQUESTS_LISTED)
    flags = {name: _flag(query, name) for name in ("missed", "running")}
    wanted = ListTimelines(limit, query.get("model", ""), flags["missed"], flags["running"])
    return json_response(RequestTimelines(await context.timelines.list_everywhere(wanted)))


async def explain_slo(context: GatewayContext, request: Request) -> Response:
    """Explains, by model, where the time of requests went that missed an objective."""
    authenticate_operator(context, request)
    interval_s = whole_number_of(request.query_params, "interval_s", 300, LEAST_SLO_INTERVAL_S, MAX_SLO_INTERVAL_S)
    return json_response(await context.timelines.explain_everywhere(interval_s))


async def show_console_state(context: GatewayContext, request: Request) -> Response:
    """What the console draws each second: instances with their KV pools, queues, requests that move, batches."""
    authenticate_operator(context, request)
    return json_response(await api_errors(context.console.state()))


async def show_console_history(context: GatewayContext, request: Request) -> Response:
    """What the cluster did in the last `interval_s`: a sample each ten seconds, up to an hour, of all gateways."""
    authenticate_operator(context, request)
    interval_s = whole_number_of(request.query_params, "interval_s", 3600, 60, 3600)
    samples = await api_errors(context.history.samples(time.time() - interval_s))
    return json_response(ConsoleHistory(samples))


def _flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise invalid(name, f"{name!r} must be true or false.")
    return text == "true"


async def list_audit(context: GatewayContext, request: Request) -> Response:
    """The last tries to change something by the admin API, of all gateways, the newest first."""
    authenticate_operator(context, request)
    return json_response(AuditLog(await api_errors(context.audit.actions())))


async def list_nodes(context: GatewayContext, request: Request) -> Response:
    authenticate_operator(context, request)

    async def entries() -> list[dict[str, object]]:
        nodes = await (await context.bus.key_value(NODES)).entries()
        return [msgspec.structs.asdict(entry.value) for entry in nodes.values()]

    return json_response({"nodes": await api_errors(entries())})
