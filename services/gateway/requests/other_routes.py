"""The small endpoints: models, tokenize, detokenize, health, metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.images import images_of
from services.gateway.openai.parsing import MAX_SEQUENCE_TOKENS, check_token_ids
from services.gateway.openai.replies import (
    DetokenizeReply,
    ModelCard,
    ModelList,
    ReadyReply,
    TokenizeReply,
    VersionReply,
)
from services.gateway.openai.schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.requests.prompts import chat_ids, rendered_chat
from services.gateway.tools.use import plain_tool
from services.gateway.vllm_metrics import vllm_text
from shared.messages.catalogue import CLEAR_PREFIX_CACHE
from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.messages.requests import ClearPrefixCache
from shared.messages.routes import Route
from shared.runtime.telemetry import METRICS_TYPE, metrics_text

READY_WITHOUT_NATS_S = 60.0
"""Time without NATS in which the gateway is still ready: as long as streams wait for it."""

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def json_response(body: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")


def _card(context: GatewayContext, spec: ModelSpec) -> ModelCard:
    max_model_len = context.catalog.reported_max_model_len(spec.name) or spec.max_model_len
    return ModelCard(
        spec.name,
        "model",
        context.catalog.created(spec.name),
        "tideway",
        spec.source,
        None,
        max_model_len,
        context.catalog.state(spec.name),
    )


def _adapter_card(context: GatewayContext, adapter: AdapterSpec) -> ModelCard:
    card = _card(context, context.catalog.spec(adapter.name))
    return msgspec.structs.replace(
        card, id=adapter.name, created=int(adapter.added_s), root=adapter.source, parent=adapter.base
    )


async def list_models(context: GatewayContext, request: Request) -> Response:
    context.admission.authenticate(request.headers)
    return json_response(ModelList("list", model_cards(context)))


def model_cards(context: GatewayContext) -> list[ModelCard]:
    """Cards of routes, models and adapters that are served."""
    catalog = context.catalog
    served = [spec for spec in catalog.models if spec.on_demand or catalog.failure(spec.name) is None]
    cards = [_route_card(context, route) for route in context.routes.all()]
    cards += [_card(context, spec) for spec in served if context.routes.get(spec.name) is None]
    names = {spec.name for spec in served}
    adapters = [adapter for adapter in context.catalog.adapters if adapter.base in names]
    cards += [_adapter_card(context, adapter) for adapter in adapters if context.routes.get(adapter.name) is None]
    return cards


def _route_card(context: GatewayContext, route: Route) -> ModelCard:
    """`max_model_len`: the least of its arms."""
    models = [arm.model for arm in route.arms if arm.weight]
    lengths = [context.catalog.reported_max_model_len(model) for model in models]
    limit = min((length for length in lengths if length is not None), default=None)
    return ModelCard(route.name, "model", int(route.changed_s), "tideway", ", ".join(models), None, limit)


def model_card(context: GatewayContext, name: str) -> ModelCard:
    """The card of a route, model or adapter. Raises `ApiError` 404, 503."""
    if (route := context.routes.get(name)) is not None:
        return _route_card(context, route)
    spec = context.catalog.spec(name)
    context.catalog.check_can_be_served(spec.name)
    adapter = context.catalog.adapter(name)
    return _card(context, spec) if adapter is None else _adapter_card(context, adapter)


async def get_model(context: GatewayContext, request: Request) -> Response:
    context.admission.authenticate(request.headers)
    return json_response(model_card(context, request.path_params["model"]))


async def find_stored_chat(context: GatewayContext, request: Request) -> Response:
    """Refuses: chat completions are not stored. Raises `ApiError` 404, which says what is."""
    context.admission.authenticate(request.headers)
    message = (
        "Chat completions are not stored, whatever 'store' says. Answers of /v1/responses are: GET /v1/responses/{id}."
    )
    raise ApiError(404, message, code="not_found")


def _check_num_tokens(num_tokens: int, param: str) -> None:
    if num_tokens > MAX_SEQUENCE_TOKENS:
        raise invalid(param, f"'{param}': {num_tokens} token ids; the limit is {MAX_SEQUENCE_TOKENS}.")


def _spec(context: GatewayContext, name: str | None) -> ModelSpec:
    """Spec of the model; for a route's name, of one of its models."""
    return context.catalog.spec(name if name is None else context.routes.model_of(name))


async def tokenize(context: GatewayContext, request: Request) -> Response:
    context.admission.authenticate(request.headers)
    message = await read_message(request, _TOKENIZE, context.bodies)
    if (message.prompt is None) == (message.messages is None):
        raise invalid("prompt", "Exactly one of 'prompt' and 'messages' is needed.")
    spec = _spec(context, message.model)
    tokenizer = await context.tokenizers.get(spec)
    if message.prompt is None:
        tools = [plain_tool(tool) for tool in message.tools or ()] or None
        messages, _ = images_of(message.messages or [], spec)
        text = await rendered_chat(context, tokenizer, message, messages, tools=tools)
        ids = await chat_ids(context, tokenizer, message, text)
    else:
        add_special = message.add_special_tokens is not False
        (ids,) = await context.tokenizers.encode(tokenizer, [message.prompt], add_special, "prompt")
    pieces = None
    if message.return_token_strs:
        _check_num_tokens(len(ids), "return_token_strs")
        pieces = await context.tokenizers.pieces(tokenizer, ids)
    return json_response(TokenizeReply(len(ids), context.catalog.max_model_len(spec, tokenizer), ids, pieces))


async def detokenize(context: GatewayContext, request: Request) -> Response:
    context.admission.authenticate(request.headers)
    message = await read_message(request, _DETOKENIZE, context.bodies)
    _check_num_tokens(len(message.tokens), "tokens")
    tokenizer = await context.tokenizers.get(_spec(context, message.model))
    if message.tokens:
        check_token_ids(message.tokens, tokenizer.vocab_size, "tokens")
    return json_response(DetokenizeReply(await context.tokenizers.decode(tokenizer, message.tokens)))


async def health(context: GatewayContext, request: Request) -> Response:
    """The process lives; whether it can serve is /ready."""
    return Response()


async def ready(context: GatewayContext, request: Request) -> Response:
    """Without NATS it stays ready for a while: every gateway is without it, and each says so better than a load balancer
    that has none left."""
    is_there = context.bus.away_s < READY_WITHOUT_NATS_S and not context.connections.is_leaving
    models = context.catalog.ready_models() if is_there else []
    problems = context.bus.problems + context.bus.damages
    return json_response(ReadyReply(bool(models), models, problems), 200 if models else 503)


async def show_version(context: GatewayContext, request: Request) -> Response:
    try:
        number = version("tideway")
    except PackageNotFoundError:  # run from a source tree that is not installed
        number = "0.0.0"
    return json_response(VersionReply(number))


async def show_metrics(context: GatewayContext, request: Request) -> Response:
    instances = context.loads.states_lately()
    models = [spec.name for spec in context.catalog.models]

    def text() -> bytes:
        return metrics_text(context.telemetry.registry) + vllm_text(context.metrics, instances, models)

    return Response(await asyncio.to_thread(text), headers={"Content-Type": METRICS_TYPE})


async def reset_prefix_cache(context: GatewayContext, request: Request) -> Response:
    """Asked by benchmark clients before a run; all instances forget the blocks that no request uses."""
    context.bus.publish(CLEAR_PREFIX_CACHE, ClearPrefixCache())
    return Response()
