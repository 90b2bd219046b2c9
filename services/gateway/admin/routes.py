"""The admin API of routes: list, set, delete."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admin.audit import audited
from services.gateway.admin.endpoints import authenticate_operator, read_audited
from services.gateway.context import GatewayContext
from services.gateway.http.errors import invalid
from services.gateway.openai.schemas import SetRouteRequest
from services.gateway.requests.other_routes import json_response
from shared.messages.admin import RouteState, RouteStates
from shared.messages.routes import Arm, Mirror, Route, Sticky

_SET = msgspec.json.Decoder(SetRouteRequest)


def _state(context: GatewayContext, route: Route) -> RouteState:
    models = {arm.model for arm in route.arms} | {mirror.model for mirror in route.mirrors} | set(route.fallbacks)
    return RouteState(
        name=route.name,
        arms={arm.model: arm.weight for arm in route.arms},
        sticky=route.sticky.value,
        mirrors={mirror.model: mirror.share for mirror in route.mirrors},
        fallbacks=list(route.fallbacks),
        changed_s=route.changed_s,
        down=sorted(model for model in models if not context.catalog.is_available(model)),
    )


async def list_routes(context: GatewayContext, request: Request) -> Response:
    authenticate_operator(context, request)
    return json_response(RouteStates([_state(context, route) for route in context.routes.all()]))


@audited
async def set_route(context: GatewayContext, request: Request) -> Response:
    """Makes a route, or replaces the one of that name."""
    authenticate_operator(context, request)
    message: SetRouteRequest = await read_audited(context, request, _SET)
    if not any(message.arms.values()):
        raise invalid("arms", "'arms' must have a model with a weight above 0.")
    route = Route(
        name=message.name,
        arms=tuple(Arm(model=model, weight=weight) for model, weight in message.arms.items()),
        sticky=Sticky(message.sticky or "none"),
        mirrors=tuple(Mirror(model=model, share=share) for model, share in (message.mirrors or {}).items()),
        fallbacks=tuple(message.fallbacks or ()),
        changed_s=time.time(),
    )
    await context.routes.put(route)
    return json_response(_state(context, route))


@audited
async def delete_route(context: GatewayContext, request: Request) -> Response:
    """Deletes a route; where a model has the same name, requests go to that model again."""
    authenticate_operator(context, request)
    await context.routes.delete(request.path_params["name"])
    return json_response({})
