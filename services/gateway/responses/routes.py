"""The Responses API: create, retrieve, delete; and the resuming of answers of whichever API."""

from __future__ import annotations

import dataclasses
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.access.admission import Key
from services.gateway.anthropic.messages import ID_PREFIX as MESSAGE_PREFIX
from services.gateway.anthropic.routes import resume_message
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid
from services.gateway.http.ignored_fields import LEFT_OUT
from services.gateway.openai.parsing import Options, whole_number_of
from services.gateway.requests.answering import (
    answer_again,
    answered,
    answered_once,
    begin,
    resumed,
)
from services.gateway.requests.event_stream import EventStream, KeepAlive, first_deltas, keep_alive_of
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.kept_calls import STREAM_HEADER, Plan, Wish, plan_of
from services.gateway.requests.other_routes import json_response
from services.gateway.requests.prompts import num_prompt_tokens
from services.gateway.requests.resuming import attach, nothing_seen, num_events_seen, num_seen_of
from services.gateway.responses.compaction import compacted, summing_up
from services.gateway.responses.conversion import (
    NAMES,
    chat_request,
    items_of,
    opened_response,
    renamed,
    shown_items,
    tools_of,
)
from services.gateway.responses.messages import (
    CompactedResponse,
    CompactRequest,
    Conversed,
    DeletedResponse,
    InputItem,
    InputTokens,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from services.gateway.responses.store import ID_PREFIX, answered_of, response_of
from services.gateway.responses.tools import called_tools, left_out
from services.gateway.responses.writing import ResponseBuilder, ResponseWriter, replayed_events, response_usage
from services.gateway.streams.generation import Generation, Prompt
from shared.bus.interface import BusError
from shared.messages.kept import KeptCall

RETRY_AFTER_S = 2.0
DEFAULT_ITEMS_LISTED, MAX_ITEMS_LISTED = 20, 100

_REQUEST = msgspec.json.Decoder(ResponseRequest)
_COMPACT = msgspec.json.Decoder(CompactRequest)


async def create_response(context: GatewayContext, request: Request) -> Response:
    """Answers a message or a conversation; with `previous_response_id`, continues a stored one."""
    exchange = Exchange(context, request, "chat")
    exchange.call_id = f"{ID_PREFIX}{uuid.uuid4().hex}"
    made = await answered(exchange, _create(exchange))
    if isinstance(made, Response):
        return made
    # Its call has no client; this one reads it as others might.
    reader = Exchange(context, request, "chat")
    return await answered(reader, _read(reader, made))


async def _create(exchange: Exchange) -> Response | KeptCall:
    """A call: one in the background whose events are wanted."""
    context, key = exchange.context, exchange.authenticate()
    exchange.field_names = NAMES
    message = await read_message(exchange.request, _REQUEST, context.bodies)
    exchange.note(left_out(message.tools), LEFT_OUT)
    items = await _conversation(context, message, key.tenant)
    message.tools = tools_of(message, items)
    keep_alive = keep_alive_of(exchange)
    wish = exchange.wish(message)
    if wish is None and message.stream and message.store is not False and context.settings.resume_s:
        # Whoever may read it by its id may read its events so, too.
        wish = Wish()
    if message.background:
        wish = _background_wish(context, message, wish)

    def opened(options: Options, prompts: list[Prompt]) -> tuple[ResponseObject, tuple[InputItem, ...]]:
        response = opened_response(
            message, exchange.call_id, exchange.created_s, exchange.shown_model, options, prompts
        )
        return response, tuple(items)

    async def anew() -> Response | KeptCall:
        try:
            begun = await begin(exchange, chat_request(message, items), wish, opened, ID_PREFIX)
        except ApiError as error:
            raise renamed(error) from None
        if message.background:
            return await _begin_in_background(context, exchange, *begun)
        return await _answer(exchange, *begun, keep_alive)

    async def again(record: KeptCall) -> Response:
        if message.background and not message.stream:
            exchange.end(None)
            return await _shown_of(context, exchange.request, key, record)
        return await _answer_again(exchange, record, keep_alive)

    return await answered_once(context, wish, anew, again)


async def _conversation(context: GatewayContext, message: Conversed, tenant: str) -> list[InputItem]:
    """The stored one that the request goes on from, and what it brings. Raises `ApiError`, `BusError`."""
    items = await context.responses.resolved(items_of(message), tenant)
    if message.previous_response_id is None:
        return items
    return await context.responses.conversation(message.previous_response_id, tenant) + items


def _background_wish(context: GatewayContext, message: ResponseRequest, wish: Wish | None) -> Wish:
    """Raises `ApiError` 400."""
    if message.store is False:
        raise invalid("background", "'background' needs 'store': the response is read by its id.", "unsupported_value")
    if not context.settings.resume_s:
        reason = "the server keeps no calls (TIDEWAY_RESUME_S is 0)"
        raise invalid("background", f"'background' cannot be had: {reason}.", "unsupported_value")
    window_s = context.settings.request_timeout_s
    if wish is None or not wish.asked_by:
        return Wish(window_s, asked_by="background")
    return dataclasses.replace(wish, window_s=window_s)


async def _begin_in_background(
    context: GatewayContext, exchange: Exchange, generation: Generation, plan: Plan, headers: dict[str, str]
) -> Response | KeptCall:
    kept, response = exchange.kept, plan.response
    assert kept is not None and response is not None
    queued = _queued(response)
    async with context.background.turn(response.id):
        failure = await context.responses.keep(queued, exchange.tenant, list(plan.items))
        if not queued.store:
            kept.cancel()
            if failure is not None:
                raise failure
            message = "There is no room to keep a response that is made in the background."
            raise ApiError(503, message, type="service_unavailable", code="unavailable", retry_after_s=RETRY_AFTER_S)
        context.background.make(exchange, generation, plan)
    if generation.options.is_stream:
        return kept.record
    return Response(msgspec.json.encode(queued), media_type="application/json", headers=headers)


def _queued(response: ResponseObject) -> ResponseObject:
    return msgspec.structs.replace(response, status="queued")


async def _read(exchange: Exchange, record: KeptCall) -> Response:
    """The events of a call of this request, which was begun in the background."""
    exchange.authenticate()
    keep_alive = keep_alive_of(exchange)
    begun = await attach(exchange, record, nothing_seen, is_counted=True)
    return await _answer(exchange, *begun, keep_alive)


async def _answer_again(exchange: Exchange, record: KeptCall, keep_alive: KeepAlive | None) -> Response:
    """The rest of a response that another connection began, or the whole where it is no stream."""
    num_seen = num_events_seen(exchange.request, record)
    begun = await attach(exchange, record, nothing_seen)
    is_stream = exchange.request.method == "GET" or begun[1].options.is_stream
    return await _answer(exchange, *begun, keep_alive, num_seen, is_stream=is_stream)


async def _answer(
    exchange: Exchange,
    generation: Generation,
    plan: Plan,
    headers: dict[str, str],
    keep_alive: KeepAlive | None,
    num_seen: int = 0,
    *,
    is_stream: bool | None = None,
) -> Response:
    """`num_seen`: events that the client has. `is_stream`: None: as the call was made."""
    response, items = plan.response, list(plan.items)
    assert response is not None
    builder = ResponseBuilder(
        response, generation.tokenizer, generation.options.num_top_logprobs, called_tools(response.tools)
    )
    tenant = exchange.tenant

    async def keep(response: ResponseObject) -> None:
        await exchange.context.responses.keep(response, tenant, items)

    if generation.options.is_stream if is_stream is None else is_stream:
        writer = ResponseWriter(builder, keep, num_seen, is_kept=STREAM_HEADER in headers)
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
    """Answers with the response as far as it is stored; with `stream=true` with its events, `starting_after` one that the
    client has. Events that are kept no longer are made of the response."""
    response_id = request.path_params["response_id"]
    if request.query_params.get("stream") == "true" and response_id.startswith(ID_PREFIX):
        return await resume_stream(context, request, response_id)
    key = context.admission.authenticate(request.headers)
    return await _shown(context, request, key, response_id)


async def _shown(context: GatewayContext, request: Request, key: Key, response_id: str) -> Response:
    """Raises as `Responses.get`."""
    stored = await context.responses.get(response_id, key.tenant)
    if not answered_of(stored).is_over:
        if (so_far := await _taken_up(context, request, key, response_id)) is not None:
            return json_response(so_far)
        stored = await context.responses.get(response_id, key.tenant)
    return Response(stored.body, media_type="application/json")


async def _shown_of(context: GatewayContext, request: Request, key: Key, record: KeptCall) -> Response:
    """Shows the call as `_shown` does; a call that is still being placed is not stored yet. Raises `ApiError`,
    `BusError`."""
    try:
        return await _shown(context, request, key, record.call_id)
    except ApiError as error:
        response = plan_of(record).response
        if error.status != 404 or response is None:
            raise
        return json_response(_queued(response))


async def _taken_up(context: GatewayContext, request: Request, key: Key, response_id: str) -> ResponseObject | None:
    """A response in the background as far as it is; from now on it is made here too, whichever gateway began it. None: it is
    over, or cannot be read now."""
    async with context.background.turn(response_id):
        if (so_far := context.background.so_far(response_id)) is not None:
            return so_far
        return await _attached(context, request, key, response_id)


async def _attached(context: GatewayContext, request: Request, key: Key, response_id: str) -> ResponseObject | None:
    """The response as `_taken_up` gives it, where it is not made here yet."""
    exchange = Exchange(context, request, "chat")
    failure: BaseException | None = None
    try:
        record = await context.kept.find(response_id, key.tenant)
        generation, plan, _ = await attach(exchange, record, nothing_seen, is_counted=True)
        context.background.make(exchange, generation, plan)
        return plan.response
    except ApiError as error:
        failure = error
        if error.status in (404, 410):
            await context.responses.fail(response_id, key.tenant, "Its call is gone: it took too long, or was lost.")
    except BaseException as error:
        failure = error
        if not isinstance(error, BusError):
            raise
    finally:
        if failure is not None:
            exchange.end(failure)
    return None


async def cancel_response(context: GatewayContext, request: Request) -> Response:
    """Ends a response that is made in the background; one that is over stays as it is."""
    key = context.admission.authenticate(request.headers)
    response_id = request.path_params["response_id"]
    stored = await context.responses.get(response_id, key.tenant)
    answer = answered_of(stored)
    if not answer.background:
        message = "Only responses that are made in the background ('background' true) can be cancelled."
        raise invalid("response_id", message, "not_in_background")
    if not answer.is_over:
        await _cancel(context, request, key, response_id)
        stored = await context.responses.get(response_id, key.tenant)
    return Response(stored.body, media_type="application/json")


async def _cancel(context: GatewayContext, request: Request, key: Key, response_id: str) -> None:
    await _taken_up(context, request, key, response_id)
    context.kept.cancel(response_id)
    await context.background.wait(response_id)


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
    items = await _conversation(context, message, tenant)
    message.tools = tools_of(message, items)
    try:
        num_tokens = await num_prompt_tokens(context, chat_request(message, items))
    except ApiError as error:
        raise renamed(error) from None
    return json_response(InputTokens("response.input_tokens", num_tokens))


async def compact_response(context: GatewayContext, request: Request) -> Response:
    """A shorter conversation in place of a long one: its user messages, and the model's summary of it all."""
    exchange = Exchange(context, request, "chat")
    return await answered(exchange, _compact(exchange))


async def _compact(exchange: Exchange) -> Response:
    key = exchange.authenticate()
    message = await read_message(exchange.request, _COMPACT, exchange.context.bodies)
    items = await _conversation(exchange.context, message, key.tenant)
    try:
        generation, _, headers = await begin(exchange, summing_up(message, items))
    except ApiError as error:
        raise renamed(error) from None
    texts: list[str] = []
    while not generation.is_done:
        texts += [delta.text for delta in await exchange.next_deltas(generation)]
    response_id = ID_PREFIX + exchange.call_id.rpartition("-")[2]
    output = compacted(items, response_id, "".join(texts))
    usage = response_usage(generation.usage())
    exchange.end(None)
    short = CompactedResponse(id=response_id, created_at=exchange.created_s, output=output, usage=usage)
    return Response(msgspec.json.encode(short), media_type="application/json", headers=headers)


async def get_stream(context: GatewayContext, request: Request) -> Response:
    """The rest of an answer that another connection began, of whichever API."""
    call_id = request.path_params["stream_id"]
    resume = resume_message if call_id.startswith(MESSAGE_PREFIX) else resume_stream
    return await resume(context, request, call_id)


async def resume_stream(context: GatewayContext, request: Request, call_id: str) -> Response:
    exchange = Exchange(context, request, "chat")
    if call_id.startswith(ID_PREFIX):
        return await answered(exchange, _resume_response(exchange, call_id))
    return await answered(exchange, resumed(exchange, call_id, request.headers, answer_again))


async def _resume_response(exchange: Exchange, response_id: str) -> Response:
    """The events of a response, as they were told where its tokens are kept, else as the stored response has them."""
    try:
        return await resumed(exchange, response_id, exchange.request.headers, _answer_again)
    except ApiError as error:
        if error.code not in ("stream_not_found", "stream_expired"):
            raise
        if (response := await _over(exchange, response_id)) is None:
            raise
    events = replayed_events(response, num_seen_of(exchange.request, response_id))
    exchange.end(None)
    return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _over(exchange: Exchange, response_id: str) -> ResponseObject | None:
    """A stored response whose call is kept no more; None: there is none, or it goes on. Raises `BusError`."""
    context, key = exchange.context, exchange.key
    assert key is not None
    try:
        stored = await context.responses.get(response_id, key.tenant)
        if not answered_of(stored).is_over:
            await context.background.wait(response_id)  # it was cancelled, and is being stored
            await _taken_up(context, exchange.request, key, response_id)
            stored = await context.responses.get(response_id, key.tenant)
    except ApiError:
        return None
    return response_of(stored) if answered_of(stored).is_over else None


async def delete_response(context: GatewayContext, request: Request) -> Response:
    key = context.admission.authenticate(request.headers)
    response_id = request.path_params["response_id"]
    if not answered_of(await context.responses.get(response_id, key.tenant)).is_over:
        await _cancel(context, request, key, response_id)
    await context.responses.delete(response_id, key.tenant)
    await context.kept.remove(response_id)
    return json_response(DeletedResponse(response_id, "response", True))
