"""The Messages API: create, and count tokens."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.access.admission import Key
from services.gateway.anthropic.conversion import chat_request, renamed
from services.gateway.anthropic.messages import ID_PREFIX, CountReply, CountRequest, MessageRequest
from services.gateway.anthropic.writing import MessageBuilder, MessageWriter
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError
from services.gateway.http.ignored_fields import LEFT_OUT
from services.gateway.requests.answering import (
    answered,
    answered_once,
    begin,
    resumed,
)
from services.gateway.requests.event_stream import EventStream, KeepAlive, first_deltas, keep_alive_of
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.kept_calls import STREAM_HEADER
from services.gateway.requests.other_routes import json_response
from services.gateway.requests.prompts import num_prompt_tokens
from services.gateway.requests.resuming import attach, nothing_seen, num_events_seen
from services.gateway.streams.generation import Generation
from shared.messages.kept import KeptCall

_REQUEST = msgspec.json.Decoder(MessageRequest)
_COUNT = msgspec.json.Decoder(CountRequest)


async def create_message(context: GatewayContext, request: Request) -> Response:
    """An answer to a conversation, as Anthropic's API has it."""
    exchange = Exchange(context, request, "chat")
    exchange.call_id = f"{ID_PREFIX}{uuid.uuid4().hex}"
    return await in_its_shape(answered(exchange, _create(exchange)))


async def in_its_shape(work: Awaitable[Response]) -> Response:
    """What `work` answers, with errors as Anthropic has them."""
    try:
        return await work
    except ApiError as error:
        error.is_of_messages = True
        raise renamed(error) from None


def authenticate(context: GatewayContext, request: Request) -> Key:
    """The key in `x-api-key`, or in an Authorization header. Raises as `Admission.authenticate`."""
    return context.admission.authenticate(_with_key(request))


def _with_key(request: Request) -> dict[str, str]:
    """The request's headers, with its key where others look for it."""
    headers = dict(request.headers)
    if "authorization" not in headers and (key := headers.get("x-api-key")):
        headers["authorization"] = f"Bearer {key}"
    return headers


async def _create(exchange: Exchange) -> Response:
    exchange.authenticate(_with_key(exchange.request))
    message = await read_message(exchange.request, _REQUEST, exchange.context.bodies)
    exchange.note((f"tools.{i}" for i, tool in enumerate(message.tools or ()) if tool.is_left_out), LEFT_OUT)
    keep_alive = keep_alive_of(exchange)
    wish = exchange.wish(message)

    async def anew() -> Response:
        generation, _, headers = await begin(exchange, chat_request(message), wish, counted_prefix=ID_PREFIX)
        return await _answer(exchange, generation, headers, keep_alive)

    async def again(record: KeptCall) -> Response:
        return await _answer_again(exchange, record, keep_alive)

    return await answered_once(exchange.context, wish, anew, again)


async def resume_message(context: GatewayContext, request: Request, call_id: str) -> Response:
    """The rest of a message that another connection began."""
    exchange = Exchange(context, request, "chat")
    return await in_its_shape(answered(exchange, resumed(exchange, call_id, _with_key(request), _answer_again)))


async def _answer_again(exchange: Exchange, record: KeptCall, keep_alive: KeepAlive | None) -> Response:
    num_seen = num_events_seen(exchange.request, record)
    generation, _, headers = await attach(exchange, record, nothing_seen)
    return await _answer(exchange, generation, headers, keep_alive, num_seen)


async def _answer(
    exchange: Exchange,
    generation: Generation,
    headers: dict[str, str],
    keep_alive: KeepAlive | None,
    num_seen: int = 0,
) -> Response:
    """`num_seen`: events that the client has."""
    headers["request-id"] = exchange.request.state.request_id
    builder = MessageBuilder(exchange.call_id, exchange.shown_model, generation)
    if generation.options.is_stream:
        # Its own sign of life is an event.
        signs = None if keep_alive is None else KeepAlive(keep_alive.interval_s)
        writer = MessageWriter(builder, generation.usage, num_seen if STREAM_HEADER in headers else None)
        first = await first_deltas(exchange, generation, signs)
        return EventStream(exchange, generation, writer, first, headers, signs)
    while not generation.is_done:
        for delta in await exchange.next_deltas(generation):
            builder.take(delta)
    builder.finish()
    exchange.end(None)
    return Response(msgspec.json.encode(builder.message), media_type="application/json", headers=headers)


async def count_tokens(context: GatewayContext, request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    return await in_its_shape(_count(context, request))


async def _count(context: GatewayContext, request: Request) -> Response:
    authenticate(context, request)
    message: CountRequest = await read_message(request, _COUNT, context.bodies)
    return json_response(CountReply(await num_prompt_tokens(context, chat_request(message))))
