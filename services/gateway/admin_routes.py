"""The operator's API: models are added and removed through placement; the rest shows the registry."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.bodies import read_message
from services.gateway.context import GatewayContext
from services.gateway.errors import ApiError, of_info
from services.gateway.other_routes import json_response
from services.gateway.replies import ModelState, ModelStates
from services.gateway.schemas import AddModelRequest
from shared.bus.interface import BusError
from shared.messages import (
    NODES,
    PLACEMENT_ADD_MODEL,
    PLACEMENT_PLAN,
    PLACEMENT_REMOVE_MODEL,
    PLANS,
    AddModel,
    GetPlan,
    ModelSpec,
    PlacementPlan,
    RemoveModel,
)

PLACEMENT_TIMEOUT_S = 10.0
PLAN_TIMEOUT_S = 2.0

_ADD_MODEL = msgspec.json.Decoder(AddModelRequest)


def _authenticate(context: GatewayContext, request: Request) -> None:
    context.admission.authenticate_admin(request.headers.get("authorization"))


async def _stored_plan(context: GatewayContext) -> PlacementPlan | None:
    entry = await (await context.bus.key_value(PLANS)).get("current")
    return None if entry is None else entry.value


async def _api_errors(work: Any) -> Any:
    try:
        return await work
    except BusError as error:
        raise of_info(error.info) from error


async def list_models(context: GatewayContext, request: Request) -> Response:
    _authenticate(context, request)
    plan = await _api_errors(_stored_plan(context))
    unplaced = {} if plan is None else plan.unplaced
    states = []
    for spec in context.catalog.models:
        instances = {
            info.instance_id: loaded.state
            for info in context.catalog.instances.values()
            for loaded in info.models
            if loaded.name == spec.name
        }
        states.append(
            ModelState(
                spec.name,
                spec.source,
                spec.dtype,
                spec.max_model_len,
                spec.replicas,
                spec.ttft_ms,
                spec.tpot_ms,
                instances,
                unplaced.get(spec.name),
            )
        )
    return json_response(ModelStates(states))


async def add_model(context: GatewayContext, request: Request) -> Response:
    _authenticate(context, request)
    message = await read_message(request, _ADD_MODEL, context.settings.max_body_bytes)
    spec = ModelSpec(
        message.name,
        message.source,
        message.dtype or "auto",
        message.max_model_len,
        message.replicas,
        message.ttft_ms or 0.0,
        message.tpot_ms or 0.0,
    )
    call = context.bus.request(PLACEMENT_ADD_MODEL, AddModel(spec), timeout_s=PLACEMENT_TIMEOUT_S)
    return json_response(await _api_errors(call))


async def remove_model(context: GatewayContext, request: Request) -> Response:
    _authenticate(context, request)
    name = context.catalog.spec(request.path_params["model"]).name
    call = context.bus.request(PLACEMENT_REMOVE_MODEL, RemoveModel(name), timeout_s=PLACEMENT_TIMEOUT_S)
    return json_response(await _api_errors(call))


async def show_plan(context: GatewayContext, request: Request) -> Response:
    """Placement's plan; its stored copy where placement is away."""
    _authenticate(context, request)
    try:
        plan = await context.bus.request(PLACEMENT_PLAN, GetPlan(), timeout_s=PLAN_TIMEOUT_S)
    except BusError:
        plan = await _api_errors(_stored_plan(context))
    if plan is None:
        raise ApiError(404, "There is no placement plan yet.", code="no_plan")
    return json_response(plan)


async def list_instances(context: GatewayContext, request: Request) -> Response:
    _authenticate(context, request)
    as_dict = msgspec.structs.asdict
    instances = [
        {**as_dict(info), "models": [as_dict(model) for model in info.models]}
        for info in context.catalog.instances.values()
    ]
    return json_response({"instances": instances})


async def list_nodes(context: GatewayContext, request: Request) -> Response:
    _authenticate(context, request)

    async def entries() -> list[dict[str, Any]]:
        nodes = await (await context.bus.key_value(NODES)).entries()
        return [msgspec.structs.asdict(entry.value) for entry in nodes.values()]

    return json_response({"nodes": await _api_errors(entries())})
