"""GET /v1/models for Anthropic's clients, which send `anthropic-version`: the same models in their shape, by pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.anthropic.routes import authenticate, in_its_shape
from services.gateway.context import GatewayContext
from services.gateway.http.errors import invalid
from services.gateway.openai.parsing import whole_number_of
from services.gateway.openai.replies import ModelCard
from services.gateway.requests import other_routes
from services.gateway.requests.other_routes import json_response

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


class ModelInfo(msgspec.Struct):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    max_input_tokens: int | None = None


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


async def list_models(context: GatewayContext, request: Request) -> Response:
    """The models that are served, in OpenAI's shape, or in Anthropic's where `anthropic-version` is sent."""
    if not _is_anthropic(request):
        return await other_routes.list_models(context, request)
    return await in_its_shape(_page(context, request))


async def get_model(context: GatewayContext, request: Request) -> Response:
    """A model that is served, in the shape that `list_models` would have."""
    if not _is_anthropic(request):
        return await other_routes.get_model(context, request)
    return await in_its_shape(_one(context, request))


async def _page(context: GatewayContext, request: Request) -> Response:
    authenticate(context, request)
    query = request.query_params
    limit = whole_number_of(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    models = [_info(card) for card in other_routes.model_cards(context)]
    places = {model.id: index for index, model in enumerate(models)}
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in places:
            raise invalid(name, f"'{name}': there is no model '{query[name][:200]}'.")
    if "before_id" in query:
        stop = places[query["before_id"]]
        page, has_more = models[max(0, stop - limit) : stop], stop > limit
    else:
        start = places[query["after_id"]] + 1 if "after_id" in query else 0
        page, has_more = models[start : start + limit], start + limit < len(models)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ModelPage(page, has_more, *ends))


async def _one(context: GatewayContext, request: Request) -> Response:
    authenticate(context, request)
    return json_response(_info(other_routes.model_card(context, request.path_params["model"])))


def _info(card: ModelCard) -> ModelInfo:
    created_at = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo("model", card.id, card.id, created_at, card.max_model_len)
