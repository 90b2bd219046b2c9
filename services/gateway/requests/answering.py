"""The life of a generation request in the gateway, top to bottom: authenticate, read, check, tokenise, place, answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from opentelemetry import trace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.gateway.access.admission import Key
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid, of_info
from services.gateway.openai.parsing import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_SEQUENCE_BYTES,
    MAX_SEQUENCES,
    NO_DEFAULTS,
    Options,
    check_num_characters,
    check_num_sequences,
    check_prompt_logprobs,
    check_token_ids,
    max_tokens_of,
    options_of,
    prompts_of,
    sampling_of,
    seconds_of,
    template_variables,
)
from services.gateway.openai.schemas import ChatRequest, CompletionRequest, GenerationFields
from services.gateway.openai.structured import Grammar, check_options
from services.gateway.requests.answers import ChunkWriter, Collector, Operation
from services.gateway.requests.exchange import (
    CLIENT_GONE_STATUS,
    COMMENT,
    ID_PREFIXES,
    ClientGone,
    EventStream,
    Exchange,
    KeepAlive,
    silence_s,
)
from services.gateway.requests.kept_calls import STREAM_HEADER, AlreadyKept, Plan, Wish
from services.gateway.requests.pooling import POOLED_AT_ONCE, PooledRequest, pooled_prompts, refuse_generation
from services.gateway.requests.resuming import attach, seen_by
from services.gateway.responses.messages import InputItem, ResponseObject
from services.gateway.streams.generation import Delta, Generation, Prompt, Seen
from services.gateway.text.tokenization import ModelTokenizer
from services.gateway.tools.reasoning import Opening
from services.gateway.tools.use import tool_use_of
from shared.bus.interface import BusError
from shared.messages.cluster import ModelSpec
from shared.messages.kept import KeptCall
from shared.runtime.telemetry import current_traceparent

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_KEEP_ALIVE_S = 1.0

_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


async def answer_chat(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "chat", _CHAT)


async def answer_completion(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "text_completion", _COMPLETION)


async def _answer(
    context: GatewayContext, request: Request, operation: Operation, decoder: msgspec.json.Decoder[Any]
) -> Response:
    exchange = Exchange(context, request, operation)
    return await answered(exchange, _generate(context, request, exchange, decoder))


async def answered(exchange: Exchange, work: Awaitable[T]) -> T | Response:
    """What `work` makes; where it fails, the exchange ends."""
    with trace.use_span(exchange.call.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
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


async def _generate(
    context: GatewayContext, request: Request, exchange: Exchange, decoder: msgspec.json.Decoder[Any]
) -> Response:
    key = exchange.key = context.admission.authenticate(request.headers)
    message = await read_message(request, decoder, context.bodies)
    keep_alive = keep_alive_of(request, context.settings.stream_keep_alive_s)
    wish = context.kept.wish(request.headers, key.tenant, request.url.path, message, is_stream=bool(message.stream))

    async def anew() -> Response:
        generation, _, headers = await begin(context, request, exchange, key, message, wish)
        return await answer(exchange, generation, headers, keep_alive)

    async def again(record: KeptCall) -> Response:
        return await answer_again(exchange, record, keep_alive)

    return await answered_once(context, wish, anew, again)


async def answered_once(
    context: GatewayContext,
    wish: Wish | None,
    anew: Callable[[], Awaitable[T]],
    again: Callable[[KeptCall], Awaitable[T]],
) -> T:
    """What `anew` makes, or `again` of the call that was made under the same idempotency key. Raises as
    `KeptCalls.claimed`."""
    record = await context.kept.claimed(wish)
    if record is None:
        try:
            return await anew()
        except AlreadyKept as kept:
            record = kept.record
    return await again(record)


async def resumed(
    exchange: Exchange,
    call_id: str,
    headers: Mapping[str, str],
    again: Callable[[Exchange, KeptCall, KeepAlive | None], Awaitable[Response]],
) -> Response:
    """The rest of an answer that another connection began, as `again` makes it. `headers`: the request's, with its key."""
    context = exchange.context
    key = exchange.key = context.admission.authenticate(headers)
    record = await context.kept.find(call_id, key.tenant)
    return await again(exchange, record, keep_alive_of(exchange.request, context.settings.stream_keep_alive_s))


async def answer_again(exchange: Exchange, record: KeptCall, keep_alive: KeepAlive | None) -> Response:
    """The rest of a chat's or completion's answer that another connection began, or the whole where it has no events."""
    generation, _, headers = await attach(exchange, record, seen_by)
    return await answer(exchange, generation, headers, keep_alive)


async def answer(
    exchange: Exchange, generation: Generation, headers: dict[str, str], keep_alive: KeepAlive | None
) -> Response:
    call, options, tokenizer = exchange.call, generation.options, generation.tokenizer
    if options.is_stream:
        seen = generation.seen or [Seen()] * len(generation.choices) if STREAM_HEADER in headers else None
        writer = ChunkWriter(call.operation, call.call_id, call.created_s, call.shown_model, options, tokenizer, seen)
        first = await first_deltas(exchange, generation, keep_alive)
        return EventStream(exchange, generation, writer, first, headers, keep_alive)
    collector = Collector(len(generation.choices))
    while not generation.is_done:
        collector.add(await exchange.next_deltas(generation))
    body = call.body(collector, generation)
    exchange.end(None)
    return Response(body, media_type="application/json", headers=headers)


async def begin(
    context: GatewayContext,
    request: Request,
    exchange: Exchange,
    key: Key,
    message: ChatRequest | CompletionRequest,
    wish: Wish | None = None,
    opened: Callable[[Options, list[Prompt]], tuple[ResponseObject, tuple[InputItem, ...]]] | None = None,
    counted_prefix: str = "",
) -> tuple[Generation, Plan, dict[str, str]]:
    """Checks, tokenises and places what was asked; also how the answer is made, and its headers. `wish`: how it is kept.
    `opened`: of a call of the Responses API. `counted_prefix`: how ids of calls begin whose events are counted; empty: they
    are resumed by tokens. Raises `AlreadyKept`."""
    settings, call = context.settings, exchange.call
    call.tenant = key.tenant
    if wish is not None:
        call.call_id = context.kept.new_id(counted_prefix or ID_PREFIXES[call.operation])
    call.routed = context.routes.resolve(message.model, key.tenant, message.user, call.call_id)
    message.model = call.routed.model
    spec = context.catalog.spec(message.model)
    context.catalog.check_can_be_served(spec.name)
    options = options_of(message, request.headers, settings.request_timeout_s)
    exchange.identify(message.model, message, options)
    call.note_state(spec.name)
    texts_or_ids = prompts_of(message.prompt) if isinstance(message, CompletionRequest) else [""]
    limit = min(MAX_SEQUENCES, settings.max_in_flight)
    if isinstance(message, PooledRequest):
        num_sequences = min(len(texts_or_ids), POOLED_AT_ONCE, limit)
    else:
        num_sequences = check_num_sequences(len(texts_or_ids), options.num_choices, limit)
    exchange.ticket = await context.admission.enter(
        key, num_sequences, options.request_class, options.priority, context.bus.now()
    )
    exchange.watch_client()

    try:
        async with asyncio.timeout(options.timeout_s):
            tokenizer = await context.tokenizers.get(spec)
            with context.telemetry.tracer.start_as_current_span("tokenize"):
                prompts = await exchange.unless_gone(
                    make_prompts(context, spec, tokenizer, message, options, texts_or_ids)
                )
    except TimeoutError:
        message_text = f"The request's time limit of {options.timeout_s:g} s has passed."
        raise ApiError(408, message_text, type="timeout_error", code="deadline_exceeded") from None
    num_tokens = sum(len(prompt.tokens) for prompt in prompts)
    if not isinstance(message, PooledRequest):
        prompts = _fitted(key, prompts, options.num_choices, message)
    charged = await exchange.unless_gone(context.admission.charge_prompt(key, num_tokens, context.bus.now()))

    context.timelines.name(call.call_id, request.state.request_id)
    on_output = functools.partial(context.admission.charge_output, key)
    is_stepwise = wish is not None and bool(counted_prefix)
    generation = call.plan(message, options, prompts, tokenizer, key.tenant, on_output, is_stepwise=is_stepwise)
    response, items = (None, ()) if opened is None else opened(options, prompts)
    plan = Plan(options, prompts, response, items, is_stepwise)
    if wish is not None:
        try:
            call.kept = await context.kept.keep(wish, call.record(plan))
        except BaseException:
            if charged is not None:
                context.admission.give_back(key, charged)
            raise
    with context.telemetry.tracer.start_as_current_span("place"):
        try:
            await exchange.unless_gone(generation.start())
        except BaseException:
            if call.kept is not None:
                await call.kept.discard()
            raise
    if call.kept is not None:
        call.kept.hold(generation)
    context.mirrors.send(call, message, options)

    headers = {**exchange.rate_limits(), **call.headers()}
    if traceparent := current_traceparent():
        headers["traceparent"] = traceparent
    return generation, plan, headers


def _limit_field(message: ChatRequest | CompletionRequest) -> str:
    """The field in which the client limits the output."""
    is_newer = isinstance(message, ChatRequest) and message.max_completion_tokens is not None
    return "max_completion_tokens" if is_newer else "max_tokens"


def _fitted(
    key: Key, prompts: list[Prompt], num_choices: int, message: ChatRequest | CompletionRequest
) -> list[Prompt]:
    """The prompts with outputs that the key may have in a minute. Raises `ApiError` 400."""
    num_tokens, num_sequences = sum(len(prompt.tokens) for prompt in prompts), len(prompts) * num_choices
    fixed_by = "n" if num_choices > 1 else "prompt" if len(prompts) > 1 else _limit_field(message)
    is_fitted = isinstance(message, ChatRequest) and message.fit_max_tokens

    def fitted(prompt: Prompt) -> Prompt:
        field = "" if is_fitted or prompt.is_open_ended else fixed_by
        most = key.fitted_output(num_tokens, num_sequences, prompt.sampling.max_tokens, field)
        if most == prompt.sampling.max_tokens:
            return prompt
        return dataclasses.replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, max_tokens=most))

    return list(map(fitted, prompts))


async def prompts_in_time(
    context: GatewayContext, spec: ModelSpec, message: ChatRequest | CompletionRequest, options: Options
) -> tuple[list[Prompt], ModelTokenizer]:
    """Prompts of a request that comes from no client. Raises `ApiError`, 408 when its time has passed."""
    context.catalog.check_can_be_served(spec.name)
    try:
        async with asyncio.timeout(options.timeout_s):
            tokenizer = await context.tokenizers.get(spec)
            texts_or_ids = prompts_of(message.prompt) if isinstance(message, CompletionRequest) else [""]
            return await make_prompts(context, spec, tokenizer, message, options, texts_or_ids), tokenizer
    except TimeoutError:
        message_text = "The request's time limit has passed."
        raise ApiError(408, message_text, type="timeout_error", code="deadline_exceeded") from None


async def first_deltas(exchange: Exchange, generation: Generation, keep_alive: KeepAlive | None) -> list[Delta]:
    """Those that a stream begins with; none after so much silence that there is to be a sign of life. They decide about the
    status: until they come, a failure is still an HTTP error."""
    timeout_s = silence_s(exchange.call, keep_alive)
    with contextlib.suppress(TimeoutError):
        while not generation.is_done:
            if first := await exchange.next_deltas(generation, timeout_s):
                return first
    return []


def keep_alive_of(request: Request, default_s: float) -> KeepAlive | None:
    """Keep-alive as the client asks, else a comment after `default_s`: some clients take any chunk for a token. None:
    never."""
    text = request.headers.get("x-keep-alive-interval")
    if text is None:
        return KeepAlive(default_s, COMMENT) if default_s else None
    if not (interval_s := seconds_of(text)) >= MIN_KEEP_ALIVE_S:
        raise invalid(
            "x-keep-alive-interval",
            f"The header x-keep-alive-interval must be a number of seconds from {MIN_KEEP_ALIVE_S:g}.",
        )
    return KeepAlive(min(interval_s, 3600.0))


async def make_prompts(
    context: GatewayContext,
    spec: ModelSpec,
    tokenizer: ModelTokenizer,
    message: GenerationFields,
    options: Options,
    texts_or_ids: list[str] | list[list[int]],
) -> list[Prompt]:
    if isinstance(message, PooledRequest):
        return await pooled_prompts(context, spec, tokenizer, message)
    refuse_generation(tokenizer, message.model)
    max_model_len = context.catalog.max_model_len(spec, tokenizer)
    opening, chat_text = None, ""
    if isinstance(message, ChatRequest):
        tools = None if options.tools is None else options.tools.definitions()
        chat_text = await rendered_chat(context, tokenizer, message, max_model_len, tools)
        opening = tokenizer.opening(chat_text, message.messages[-1] if message.continue_final_message else None)
    grammar = grammar_behind(tokenizer, options, opening)
    if grammar is not None:
        check_options(message, grammar)
        grammar = await context.tokenizers.try_grammar(tokenizer, grammar)
        max_model_len = min(max_model_len, (MAX_SEQUENCE_BYTES - grammar.num_bytes) // 4)
    if isinstance(message, ChatRequest):
        requested = message.max_tokens if message.max_completion_tokens is None else message.max_completion_tokens
        default = None
        if message.fit_max_tokens:
            requested, default = None, requested
        param = "messages"
        all_ids = [await chat_ids(context, tokenizer, message, chat_text)]
        texts_or_ids = [""]
    else:
        assert isinstance(message, CompletionRequest)
        requested, default, param = message.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt"
        all_ids = [each for each in texts_or_ids if isinstance(each, list)]
        if texts := [each for each in texts_or_ids if isinstance(each, str)]:
            for text in texts:
                check_num_characters(len(text), tokenizer.max_characters(max_model_len), max_model_len, param)
            add_special = message.add_special_tokens is not False
            all_ids = await context.tokenizers.encode(tokenizer, texts, add_special, param)
    check_prompt_logprobs(list(map(len, all_ids)), options.num_choices, options.num_prompt_top, param)
    prompts = []
    # One token is made then, and not shown: the prompt's log-probabilities come with it.
    shows_output = requested != 0 or options.num_prompt_top < 0
    requested = requested if shows_output else 1
    for ids, text_or_ids in zip(all_ids, texts_or_ids, strict=True):
        check_token_ids(ids, tokenizer.vocab_size, param)
        sampling = sampling_of(
            message,
            options,
            max_tokens=max_tokens_of(requested, default, len(ids), max_model_len, param, _limit_field(message)),
            eos_token_ids=tokenizer.eos_token_ids,
            vocab_size=tokenizer.vocab_size,
            grammar="" if grammar is None else grammar.text,
            defaults=tokenizer.defaults if context.settings.generation_config == "auto" else NO_DEFAULTS,
        )
        echo_text = ""
        if options.echo and isinstance(text_or_ids, str):
            echo_text = text_or_ids
        elif options.echo:
            echo_text = await context.tokenizers.decode(tokenizer, ids, options.skips_special_tokens)
        is_open_ended = requested is None and default is None
        prompts.append(Prompt(ids, sampling, echo_text, shows_output, is_open_ended, opening))
    return prompts


def grammar_behind(tokenizer: ModelTokenizer, options: Options, opening: Opening | None) -> Grammar | None:
    """The grammar that an output follows, behind the reasoning that a model may do before its answer; None: none.
    `opening`: None where the output is no chat's. Raises `ApiError`."""
    spelled, special = tokenizer.tool_format, tokenizer.special_token_id
    of_calls = None if options.tools is None else options.tools.grammar_with(options.grammar, spelled, special)
    grammar = of_calls or options.grammar
    if grammar is None or opening is None:
        return grammar
    marks = tokenizer.reasoning_format
    return spelled.behind_reasoning(grammar, marks, opening, special, has_calls=of_calls is not None)


async def rendered_chat(
    context: GatewayContext,
    tokenizer: ModelTokenizer,
    message: Any,
    max_model_len: int | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The prompt that the chat template makes of a message list. `message`: a ChatRequest or TokenizeRequest.
    `max_model_len`: a text that is longer for certain is refused; None: none is."""
    limit = None if max_model_len is None else tokenizer.max_characters(max_model_len)
    text, num_characters = await context.tokenizers.render(
        tokenizer,
        message.messages,
        limit,
        tools,
        add_generation_prompt=message.add_generation_prompt is not False,
        continue_final_message=bool(message.continue_final_message),
        variables=template_variables(message),
    )
    if max_model_len is not None:
        check_num_characters(num_characters, limit, max_model_len, "messages")
    return text


async def num_prompt_tokens(context: GatewayContext, message: ChatRequest) -> int:
    """Number of prompt tokens of a chat that is not to be answered. Raises `ApiError`."""
    tokenizer = await context.tokenizers.get(context.catalog.spec(context.routes.model_of(message.model)))
    tools = tool_use_of(message)
    text = await rendered_chat(context, tokenizer, message, tools=None if tools is None else tools.definitions())
    return len(await chat_ids(context, tokenizer, message, text))


async def chat_ids(context: GatewayContext, tokenizer: ModelTokenizer, message: Any, text: str) -> list[int]:
    """The tokens of a chat's prompt. Templates write the special tokens themselves."""
    (ids,) = await context.tokenizers.encode(tokenizer, [text], message.add_special_tokens is True, "messages")
    return ids
