"""The Responses API: create, retrieve, delete; and the resuming of answers of whichever API."""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.access.admission import Key
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.parsing import Options, whole_number_of
from services.gateway.requests import answering
from services.gateway.requests.answering import (
    answered,
    answered_once,
    begin,
    first_deltas,
    keep_alive_of,
    num_prompt_tokens,
)
from services.gateway.requests.exchange import EventStream, Exchange, KeepAlive
from services.gateway.requests.kept_calls import Plan, Wish
from services.gateway.requests.other_routes import json_response
from services.gateway.requests.resuming import attach, num_events_seen
from services.gateway.responses.conversion import chat_request, items_of, opened_response, renamed, shown_items
from services.gateway.responses.messages import (
    DeletedResponse,
    InputItem,
    InputTokens,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from services.gateway.responses.store import ID_PREFIX
from services.gateway.responses.tools import called_tools
from services.gateway.responses.writing import ResponseBuilder, ResponseWriter
from services.gateway.streams.generation import Generation, Prompt
from shared.messages.kept import KeptCall

DEFAULT_ITEMS_LISTED, MAX_ITEMS_LISTED = 20, 100

_REQUEST = msgspec.json.Decoder(ResponseRequest)


async def create_response(context: GatewayContext, request: Request) -> Response:
    """An answer to a message or a conversation; with `previous_response_id` it goes on from a stored one."""
    exchange = Exchange(context, request, "chat")
    exchange.call.call_id = f"{ID_PREFIX}{uuid.uuid4().hex}"
    return await answered(exchange, _create(context, request, exchange))


async def _create(context: GatewayContext, request: Request, exchange: Exchange) -> Response:
    key = exchange.key = context.admission.authenticate(request.headers)
    message = await read_message(request, _REQUEST, context.bodies)
    items = items_of(message)
    if message.previous_response_id is not None:
        items = await context.responses.conversation(message.previous_response_id, key.tenant) + items
    keep_alive = keep_alive_of(request, context.settings.stream_keep_alive_s)
    wish = context.kept.wish(request.headers, key.tenant, request.url.path, message, is_stream=bool(message.stream))
    if wish is None and message.stream and message.store is not False and context.settings.resume_s:
        # Whoever may read it by its id may read its events so, too.
        wish = Wish(is_asked=False)

    def opened(options: Options, prompts: list[Prompt]) -> tuple[ResponseObject, tuple[InputItem, ...]]:
        call = exchange.call
        return opened_response(message, call.call_id, call.created_s, call.shown_model, options, prompts), tuple(items)

    async def anew() -> Response:
        try:
            begun = await begin(context, request, exchange, key, chat_request(message, items), wish, opened)
        except ApiError as error:
            raise renamed(error) from None
        return await _answer(context, exchange, *begun, keep_alive)

    async def again(record: KeptCall) -> Response:
        return await answer_again(context, request, exchange, key, record, keep_alive)

    return await answered_once(context, wish, anew, again)


async def answer_again(
    context: GatewayContext,
    request: Request,
    exchange: Exchange,
    key: Key,
    record: KeptCall,
    keep_alive: KeepAlive | None,
) -> Response:
    """The rest of a response that another connection began, or the whole where it is no stream."""
    num_seen = num_events_seen(request)
    begun = await attach(context, request, exchange, key, record, lambda request, plan: ())
    return await _answer(context, exchange, *begun, keep_alive, num_seen)


async def _answer(
    context: GatewayContext,
    exchange: Exchange,
    generation: Generation,
    plan: Plan,
    headers: dict[str, str],
    keep_alive: KeepAlive | None,
    num_seen: int = 0,
) -> Response:
    """`num_seen`: events that the client has."""
    response, items = plan.response, list(plan.items)
    assert response is not None
    builder = ResponseBuilder(
        response, generation.tokenizer, generation.options.num_top_logprobs, called_tools(response.tools)
    )
    tenant = exchange.call.tenant

    async def keep(response: ResponseObject) -> None:
        await context.responses.keep(response, tenant, items)

    if generation.options.is_stream:
        writer = ResponseWriter(builder, keep, num_seen)
        first = await first_deltas(exchange, generation, keep_alive)
        return EventStream(exchange, generation, writer, first, headers, keep_alive)
    while not generation.is_done:
        for delta in await exchange.next_deltas(generation):
            builder.take(delta)
    builder.finish(generation.usage())
    await keep(response)
    exchange.end(None)
    return Response(msgspec.json.encode(response), media_type="application/json", headers=headers)


async def get_response(context: GatewayContext, request: Request) -> Response:
    """As it is stored; with `stream=true` its events, `starting_after` one that the client has, while they are kept."""
    if request.query_params.get("stream") == "true":
        return await resume_stream(context, request, request.path_params["response_id"])
    tenant = context.admission.authenticate(request.headers).tenant
    stored = await context.responses.get(request.path_params["response_id"], tenant)
    return Response(stored.body, media_type="application/json")


async def list_input_items(context: GatewayContext, request: Request) -> Response:
    """The conversation that a stored response answers; the newest item first, unless `order` is asc."""
    tenant = context.admission.authenticate(request.headers).tenant
    response_id, query = request.path_params["response_id"], request.query_params
    limit = whole_number_of(query, "limit", DEFAULT_ITEMS_LISTED, 1, MAX_ITEMS_LISTED)
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "'order' must be asc or desc.")
    items = shown_items(response_id, await context.responses.input_items(response_id, tenant))
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise invalid("after", f"There is no item '{after[:100]}' in this response's input.")
        items = items[places[0] + 1 :]
    shown = items[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(ItemList("list", shown, first, last, len(items) > limit))


async def count_input_tokens(context: GatewayContext, request: Request) -> Response:
    """How many tokens the prompt of a response would have."""
    tenant = context.admission.authenticate(request.headers).tenant
    message = await read_message(request, _REQUEST, context.bodies)
    items = items_of(message)
    if message.previous_response_id is not None:
        items = await context.responses.conversation(message.previous_response_id, tenant) + items
    try:
        num_tokens = await num_prompt_tokens(context, chat_request(message, items))
    except ApiError as error:
        raise renamed(error) from None
    return json_response(InputTokens("response.input_tokens", num_tokens))


async def get_stream(context: GatewayContext, request: Request) -> Response:
    """The rest of an answer that another connection began, of whichever API."""
    return await resume_stream(context, request, request.path_params["stream_id"])


async def resume_stream(context: GatewayContext, request: Request, call_id: str) -> Response:
    exchange = Exchange(context, request, "chat")
    return await answered(exchange, _resume(context, request, exchange, call_id))


async def _resume(context: GatewayContext, request: Request, exchange: Exchange, call_id: str) -> Response:
    key = exchange.key = context.admission.authenticate(request.headers)
    record = await context.kept.find(call_id, key.tenant)
    again = answer_again if call_id.startswith(ID_PREFIX) else answering.answer_again
    return await again(
        context, request, exchange, key, record, keep_alive_of(request, context.settings.stream_keep_alive_s)
    )


async def delete_response(context: GatewayContext, request: Request) -> Response:
    tenant = context.admission.authenticate(request.headers).tenant
    response_id = request.path_params["response_id"]
    await context.responses.delete(response_id, tenant)
    await context.kept.remove(response_id)
    return json_response(DeletedResponse(response_id, "response", True))
