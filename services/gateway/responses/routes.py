"""The Responses API: create, retrieve, delete."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answering import answered, begin, first_deltas, keep_alive_of
from services.gateway.bodies import read_message
from services.gateway.context import GatewayContext
from services.gateway.errors import ApiError
from services.gateway.exchange import EventStream, Exchange
from services.gateway.generation import Generation
from services.gateway.other_routes import json_response
from services.gateway.responses.conversion import chat_request, items_of, renamed
from services.gateway.responses.messages import (
    DeletedResponse,
    ResponseObject,
    ResponseRequest,
    TextFormat,
    TextOptions,
)
from services.gateway.responses.store import ID_PREFIX
from services.gateway.responses.tools import called_tools
from services.gateway.responses.writing import ResponseBuilder, ResponseWriter

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


async def delete_response(context: GatewayContext, request: Request) -> Response:
    tenant = context.admission.authenticate(request.headers).tenant
    response_id = request.path_params["response_id"]
    await context.responses.delete(response_id, tenant)
    return json_response(DeletedResponse(response_id, "response", True))
