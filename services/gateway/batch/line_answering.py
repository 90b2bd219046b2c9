"""The answer to one line of a batch: the path of an HTTP request without HTTP, in the offline class."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext

from services.gateway.access.admission import WORKING_FOR, Key, PromptCharge
from services.gateway.anthropic.messages import ID_PREFIX as MESSAGE_PREFIX
from services.gateway.anthropic.messages import MessageRequest
from services.gateway.anthropic.writing import MessageBuilder
from services.gateway.batch.validation import ENDPOINTS, ReadLine
from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError
from services.gateway.openai.parsing import options_of
from services.gateway.openai.replies import Usage
from services.gateway.openai.schemas import ChatRequest, CompletionRequest
from services.gateway.requests.answers import Collector, on_one_line
from services.gateway.requests.exchange import Call
from services.gateway.requests.prompts import prompts_in_time
from services.gateway.responses.conversion import opened_response
from services.gateway.responses.messages import ResponseRequest
from services.gateway.responses.store import ID_PREFIX as RESPONSE_PREFIX
from services.gateway.responses.tools import called_tools
from services.gateway.responses.writing import ResponseBuilder
from services.gateway.streams.generation import Delta, Generation
from shared.bus.interface import ServiceError
from shared.messages.batches import BatchLineResult
from shared.messages.requests import Priority, RequestClass


class LineFailure(msgspec.Struct):
    code: str
    message: str


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineFailure | None


def encode_line(
    custom_id: str, response: LineResponse | None, failure: LineFailure | None, usage: Usage | None = None
) -> BatchLineResult:
    line = on_one_line(msgspec.json.encode(OutputLine(f"batch_req_{uuid.uuid4().hex}", custom_id, response, failure)))
    if usage is None:
        return BatchLineResult(False, line)
    cached = usage.prompt_tokens_details.cached_tokens
    return BatchLineResult(True, line, usage.prompt_tokens, cached, usage.completion_tokens)


def refused_line(custom_id: str, error: ApiError) -> BatchLineResult:
    """What HTTP would have answered with a status of 400 or more."""
    return encode_line(custom_id, LineResponse(error.status, uuid.uuid4().hex, msgspec.Raw(error.body())), None)


class Written(Protocol):
    """An answer while it is made."""

    def add(self, deltas: list[Delta]) -> None: ...

    def body(self) -> bytes:
        """After the last delta."""


class _WrittenChoices:
    def __init__(self, asked: ChatRequest | CompletionRequest, call: Call, generation: Generation) -> None:
        self._call, self._generation = call, generation
        self._collector = Collector(len(generation.choices))
        self.add = self._collector.add

    def body(self) -> bytes:
        return self._call.body(self._collector, self._generation)


class _WrittenResponse:
    def __init__(self, asked: ResponseRequest, call: Call, generation: Generation) -> None:
        call_id = RESPONSE_PREFIX + call.call_id.rpartition("-")[2]
        options, prompts = generation.options, generation.prompts
        response = opened_response(asked, call_id, call.created_s, call.shown_model, options, prompts)
        response.store = False
        self._builder = ResponseBuilder(
            response, generation.tokenizer, options.num_top_logprobs, called_tools(response.tools)
        )
        self._usage = generation.usage

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._builder.take(delta)

    def body(self) -> bytes:
        self._builder.finish(self._usage())
        return msgspec.json.encode(self._builder.response)


class _WrittenMessage:
    def __init__(self, asked: MessageRequest, call: Call, generation: Generation) -> None:
        message_id = MESSAGE_PREFIX + call.call_id.rpartition("-")[2]
        self._builder = MessageBuilder(message_id, call.shown_model, generation)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._builder.take(delta)

    def body(self) -> bytes:
        self._builder.finish()
        return msgspec.json.encode(self._builder.message)


_WRITTEN: dict[str, Callable[[Any, Call, Generation], Written]] = {
    "/v1/chat/completions": _WrittenChoices,
    "/v1/completions": _WrittenChoices,
    "/v1/responses": _WrittenResponse,
    "/v1/messages": _WrittenMessage,
    "/v1/embeddings": _WrittenChoices,
}


async def answer_line(
    context: GatewayContext,
    line: ReadLine,
    endpoint: str,
    timeout_s: float,
    batch: SpanContext,
    key: Key,
    charge: PromptCharge,
    on_submitted: Callable[[], None],
    on_output: Callable[[int, float], None],
) -> BatchLineResult:
    """`key`: whose tokens per minute it uses. `charge`: of the line, over all its tries.

    `on_submitted` is called when somebody has taken its request, `on_output` for new tokens (their number, the time).
    Raises `ApiError` or `BusError` where it cannot be answered now or at all."""
    WORKING_FOR.set(key.tenant)
    message, form = line.body, ENDPOINTS[endpoint]
    asked = options_of(message, {}, timeout_s)
    options = dataclasses.replace(
        asked,
        request_class=RequestClass.OFFLINE,
        priority=Priority.NORMAL,
        service_tier=None if asked.service_tier is None else "flex",
    )
    routed = context.routes.resolve(message.model, key.tenant, message.user, line.custom_id)
    message.model = routed.model
    spec = context.catalog.spec(message.model)
    # A trace of its own: one of 50,000 lines would be of no use to anybody.
    span = context.telemetry.tracer.start_span(f"batch line {message.model}", Context(), links=[Link(batch)])
    call = Call(context, form.operation, span)
    call.routed = routed
    call.identify(message.model, message, options)
    context.metrics.batch_lines_in_flight.inc()
    error: BaseException | None = None

    def count_output(num_tokens: int, now: float) -> None:
        context.admission.charge_output(key, num_tokens, now)
        on_output(num_tokens, now)

    try:
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            context.catalog.check_can_be_served(spec.name)
            prompts, tokenizer = await prompts_in_time(context, spec, message, options)
            await charge.charge(key, sum(len(prompt.tokens) for prompt in prompts), context.bus.now())
            generation = call.plan(message, options, prompts, tokenizer, key.tenant, count_output)
            await generation.start()
            on_submitted()
            written = _WRITTEN[endpoint](line.asked, call, generation)
            while not generation.is_done:
                # The stream table ends every stream by its deadline.
                await generation.news()
                written.add(generation.advance())
                if generation.failure is not None:
                    raise ServiceError(generation.failure)
            body = written.body()
    except ApiError as raised:
        error = form.renamed(raised)
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        context.metrics.batch_lines_in_flight.dec()
        call.end(error)
    return encode_line(line.custom_id, LineResponse(200, call.call_id, msgspec.Raw(body)), None, generation.usage())
