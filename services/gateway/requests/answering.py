"""The life of a generation request in the gateway, top to bottom: authenticate, read, check, tokenise, place, answer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from opentelemetry import trace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, of_info
from services.gateway.http.ignored_fields import UNENFORCED, WITHOUT_EFFECT
from services.gateway.openai.parsing import (
    MAX_SEQUENCES,
    Options,
    check_num_sequences,
    fields_without_effect,
    options_of,
)
from services.gateway.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.requests.answers import ChunkWriter, Collector, Operation
from services.gateway.requests.event_stream import EventStream, KeepAlive, first_deltas, keep_alive_of
from services.gateway.requests.exchange import CLIENT_GONE_STATUS, ID_PREFIXES, ClientGone, Exchange
from services.gateway.requests.kept_calls import KEY_HEADER, STREAM_HEADER, AlreadyKept, Plan, Wish
from services.gateway.requests.pooling import POOLED_AT_ONCE, PooledRequest, Task, of_embedding, of_rerank, of_score
from services.gateway.requests.prompts import fitted_prompts, prompts_in_time, texts_or_ids_of
from services.gateway.requests.resuming import attach, seen_by
from services.gateway.responses.messages import InputItem, ResponseObject
from services.gateway.streams.generation import Generation, Prompt, Seen
from shared.bus.interface import BusError
from shared.messages.kept import KeptCall
from shared.runtime.telemetry import current_traceparent

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)


async def answer_chat(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "chat", _CHAT)


async def answer_completion(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "text_completion", _COMPLETION)


async def answer_embeddings(context: GatewayContext, request: Request) -> Response:
    return await _answer_pooled(context, request, "embeddings", _EMBEDDING, of_embedding)


async def answer_rerank(context: GatewayContext, request: Request) -> Response:
    return await _answer_pooled(context, request, "rerank", _RERANK, of_rerank)


async def answer_score(context: GatewayContext, request: Request) -> Response:
    return await _answer_pooled(context, request, "score", _SCORE, of_score)


async def _answer_pooled(
    context: GatewayContext,
    request: Request,
    task: Task,
    decoder: msgspec.json.Decoder[Any],
    pooled: Callable[[Any], PooledRequest],
) -> Response:
    """A generation of one token for each text, whose answer is what was pooled."""
    exchange = Exchange(context, request, task)

    async def work() -> Response:
        exchange.authenticate()
        message = pooled(await read_message(request, decoder, context.bodies))
        generation, _, headers = await begin(exchange, message)
        return await answer(exchange, generation, headers, None)

    return await answered(exchange, work())


async def _answer(
    context: GatewayContext, request: Request, operation: Operation, decoder: msgspec.json.Decoder[Any]
) -> Response:
    exchange = Exchange(context, request, operation)
    return await answered(exchange, _generate(exchange, decoder))


async def answered(exchange: Exchange, work: Awaitable[T]) -> T | Response:
    """What `work` makes; where it fails, the exchange ends."""
    with trace.use_span(exchange.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        try:
            return await work
        except (ClientGone, ClientDisconnect) as error:
            exchange.end(error)
            return Response(status_code=CLIENT_GONE_STATUS)
        except BusError as error:
            exchange.end(error)
            raise of_info(error.info) from error
        except ApiError as error:
            exchange.end(error)
            error.more_headers |= exchange.rate_limits()
            raise
        except BaseException as error:
            exchange.end(error)
            raise


async def _generate(exchange: Exchange, decoder: msgspec.json.Decoder[Any]) -> Response:
    exchange.authenticate()
    message = await read_message(exchange.request, decoder, exchange.context.bodies)
    keep_alive = keep_alive_of(exchange)
    wish = exchange.wish(message)

    async def anew() -> Response:
        generation, _, headers = await begin(exchange, message, wish)
        return await answer(exchange, generation, headers, keep_alive)

    async def again(record: KeptCall) -> Response:
        return await answer_again(exchange, record, keep_alive)

    return await answered_once(exchange.context, wish, anew, again)


async def answered_once(
    context: GatewayContext,
    wish: Wish | None,
    anew: Callable[[], Awaitable[T]],
    again: Callable[[KeptCall], Awaitable[T]],
) -> T:
    """The result of `anew`, or of `again` for the call made earlier under the same idempotency key. Raises as
    `KeptCalls.claimed`."""
    record = await context.kept.claimed(wish)
    try:
        return await (anew() if record is None else again(record))
    except AlreadyKept as kept:
        record = kept.record
    except ApiError as error:
        # Another call turned out to be first. What the client has of this one goes on in no other.
        is_superseded = (error.status, error.param) == (409, KEY_HEADER)
        if not is_superseded or wish is None or wish.has_events or (record := await context.kept.claimed(wish)) is None:
            raise
    return await again(record)


async def resumed(
    exchange: Exchange,
    call_id: str,
    headers: Mapping[str, str],
    again: Callable[[Exchange, KeptCall, KeepAlive | None], Awaitable[Response]],
) -> Response:
    """The rest of an answer that another connection began, as `again` makes it. `headers`: the request's, with its key."""
    key = exchange.authenticate(headers)
    record = await exchange.context.kept.find(call_id, key.tenant)
    return await again(exchange, record, keep_alive_of(exchange))


async def answer_again(exchange: Exchange, record: KeptCall, keep_alive: KeepAlive | None) -> Response:
    """The rest of a chat's or completion's answer that another connection began, or the whole where it has no events."""
    generation, _, headers = await attach(exchange, record, seen_by)
    return await answer(exchange, generation, headers, keep_alive)


async def answer(
    exchange: Exchange, generation: Generation, headers: dict[str, str], keep_alive: KeepAlive | None
) -> Response:
    options, tokenizer = generation.options, generation.tokenizer
    if options.is_stream:
        seen = generation.seen or [Seen()] * len(generation.choices) if STREAM_HEADER in headers else None
        writer = ChunkWriter(
            exchange.operation, exchange.call_id, exchange.created_s, exchange.shown_model, options, tokenizer, seen
        )
        first = await first_deltas(exchange, generation, keep_alive)
        return EventStream(exchange, generation, writer, first, headers, keep_alive)
    collector = Collector(len(generation.choices))
    while not generation.is_done:
        collector.add(await exchange.next_deltas(generation))
    body = exchange.body(collector, generation)
    exchange.end(None)
    return Response(body, media_type="application/json", headers=headers)


async def begin(
    exchange: Exchange,
    message: ChatRequest | CompletionRequest,
    wish: Wish | None = None,
    opened: Callable[[Options, list[Prompt]], tuple[ResponseObject, tuple[InputItem, ...]]] | None = None,
    counted_prefix: str = "",
) -> tuple[Generation, Plan, dict[str, str]]:
    """Checks, tokenises and places what was asked; also how the answer is made, and its headers. `wish`: how it is kept.
    `opened`: of a call of the Responses API. `counted_prefix`: how ids of calls begin whose events are counted; empty: they
    are resumed by tokens. Raises `AlreadyKept`."""
    context, key, settings = exchange.context, exchange.key, exchange.context.settings
    assert key is not None
    exchange.tenant = key.tenant
    if wish is not None:
        exchange.call_id = context.kept.new_id(counted_prefix or ID_PREFIXES[exchange.operation])
    exchange.routed = context.routes.resolve(message.model, key.tenant, message.user, exchange.call_id)
    message.model = exchange.routed.model
    spec = context.catalog.spec(message.model)
    context.catalog.check_can_be_served(spec.name)
    options = options_of(message, exchange.request.headers, settings.request_timeout_s)
    exchange.identify(message.model, message, options)
    if (grammar := options.grammar) is not None:
        param = exchange.field_names.get(grammar.param, grammar.param)
        exchange.note((f"{param}.{keyword}" for keyword in grammar.left_out), UNENFORCED)
    exchange.note_state(spec.name)
    texts_or_ids = texts_or_ids_of(message)
    limit = min(MAX_SEQUENCES, settings.max_in_flight)
    if isinstance(message, PooledRequest):
        num_sequences = min(len(texts_or_ids), POOLED_AT_ONCE, limit)
    else:
        num_sequences = check_num_sequences(len(texts_or_ids), options.num_choices, limit)
    exchange.ticket = await context.admission.enter(
        key, num_sequences, options.request_class, options.priority, context.bus.now()
    )
    exchange.watch_client()

    with context.telemetry.tracer.start_as_current_span("tokenize"):
        prompts, tokenizer = await exchange.unless_gone(prompts_in_time(context, spec, message, options, texts_or_ids))
    if isinstance(message, ChatRequest):
        exchange.note(fields_without_effect(message, tokenizer.template_variables), WITHOUT_EFFECT)
    num_tokens = sum(len(prompt.tokens) for prompt in prompts)
    if not isinstance(message, PooledRequest):
        prompts = fitted_prompts(key, prompts, options.num_choices, message)
    charged = await exchange.unless_gone(context.admission.charge_prompt(key, num_tokens, context.bus.now()))

    context.timelines.name(exchange.call_id, exchange.request.state.request_id)
    on_output = functools.partial(context.admission.charge_output, key)
    is_stepwise = wish is not None and bool(counted_prefix)
    generation = exchange.plan(message, options, prompts, tokenizer, key.tenant, on_output, is_stepwise=is_stepwise)
    response, items = (None, ()) if opened is None else opened(options, prompts)
    plan = Plan(options, prompts, response, items, is_stepwise)
    if wish is not None:
        try:
            exchange.kept = await context.kept.keep(wish, exchange.record(plan))
        except BaseException:
            if charged is not None:
                context.admission.give_back(key, charged)
            raise
    with context.telemetry.tracer.start_as_current_span("place"):
        try:
            await exchange.unless_gone(generation.start())
        except BaseException:
            if exchange.kept is not None:
                await exchange.kept.discard()
            raise
    if exchange.kept is not None:
        exchange.kept.hold(generation)
    context.mirrors.send(exchange, message, options)

    headers = {**exchange.rate_limits(), **exchange.headers()}
    if traceparent := current_traceparent():
        headers["traceparent"] = traceparent
    return generation, plan, headers
