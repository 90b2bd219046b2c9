"""The Responses API: create, retrieve, delete."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answering import answered, begin, first_deltas, keep_alive_of, num_prompt_tokens
from services.gateway.bodies import read_message
from services.gateway.context import GatewayContext
from services.gateway.errors import ApiError, invalid
from services.gateway.exchange import EventStream, Exchange
from services.gateway.generation import Generation
from services.gateway.other_routes import json_response
from services.gateway.parsing import whole_number_of
from services.gateway.responses.conversion import chat_request, items_of, renamed, shown_items
from services.gateway.responses.messages import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    ResponseRequest,
    TextFormat,
    TextOptions,
)
from services.gateway.responses.store import ID_PREFIX
from services.gateway.responses.tools import called_tools
from services.gateway.responses.writing import ResponseBuilder, ResponseWriter

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
    try:
        generation, headers = await begin(context, request, exchange, key, chat_request(message, items))
    except ApiError as error:
        raise renamed(error) from None
    response = _opened(message, exchange, generation)
    called = called_tools(message.tools)
    builder = ResponseBuilder(response, generation.tokenizer, generation.options.num_top_logprobs, called)

    async def keep(response: ResponseObject) -> None:
        await context.responses.keep(response, key.tenant, items)

    if generation.options.is_stream:
        writer = ResponseWriter(builder, keep)
        first = await first_deltas(exchange, generation, keep_alive)
        return EventStream(exchange, generation, writer, first, headers, keep_alive)
    while not generation.is_done:
        for delta in await exchange.next_deltas(generation):
            builder.take(delta)
    builder.finish(generation.usage())
    await keep(response)
    exchange.end(None)
    return Response(msgspec.json.encode(response), media_type="application/json", headers=headers)


def _opened(message: ResponseRequest, exchange: Exchange, generation: Generation) -> ResponseObject:
    options, sampling = generation.options, generation.prompts[0].sampling
    return ResponseObject(
        id=exchange.call.call_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=message.instructions,
        max_output_tokens=message.max_output_tokens,
        model=exchange.call.shown_model,
        output=[],
        parallel_tool_calls=message.parallel_tool_calls is not False,
        previous_response_id=message.previous_response_id,
        store=message.store is not False,
        temperature=sampling.temperature,
        text=message.text or TextOptions(TextFormat("text")),
        reasoning=message.reasoning,
        tool_choice=message.tool_choice or "auto",
        tools=message.tools or [],
        top_logprobs=options.num_top_logprobs or 0,
        top_p=sampling.top_p if message.top_p is None else message.top_p,
        user=message.user,
        metadata=message.metadata or {},
        service_tier=options.service_tier or "default",
    )


async def get_response(context: GatewayContext, request: Request) -> Response:
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


async def delete_response(context: GatewayContext, request: Request) -> Response:
    tenant = context.admission.authenticate(request.headers).tenant
    response_id = request.path_params["response_id"]
    await context.responses.delete(response_id, tenant)
    return json_response(DeletedResponse(response_id, "response", True))
