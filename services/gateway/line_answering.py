"""The answer to one line of a batch: the path of an HTTP request without HTTP, in the offline class."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, StatusCode

from services.gateway.admission import Key, PromptCharge
from services.gateway.answering import make_prompts, new_generation
from services.gateway.answers import Collector
from services.gateway.batch_validation import Body
from services.gateway.context import GatewayContext
from services.gateway.errors import ApiError, of_info
from services.gateway.exchange import ID_PREFIXES, measure, outcome_of
from services.gateway.generation import Generation
from services.gateway.parsing import Options, options_of, prompts_of
from services.gateway.replies import Usage
from services.gateway.schemas import CompletionRequest
from services.gateway.sse import Operation
from services.gateway.tracing import request_attributes, response_attributes
from shared.bus.interface import BusError, ServiceError
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
    line = msgspec.json.encode(OutputLine(f"batch_req_{uuid.uuid4().hex}", custom_id, response, failure))
    if usage is None:
        return BatchLineResult(False, line)
    cached = usage.prompt_tokens_details.cached_tokens
    return BatchLineResult(True, line, usage.prompt_tokens, cached, usage.completion_tokens)


def refused_line(custom_id: str, error: ApiError) -> BatchLineResult:
    """What HTTP would have answered with a status of 400 or more."""
    return encode_line(custom_id, LineResponse(error.status, uuid.uuid4().hex, msgspec.Raw(error.body())), None)


async def answer_line(
    context: GatewayContext,
    custom_id: str,
    message: Body,
    operation: Operation,
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
    asked = options_of(message, {}, timeout_s)
    options = dataclasses.replace(
        asked,
        request_class=RequestClass.OFFLINE,
        priority=Priority.NORMAL,
        service_tier=None if asked.service_tier is None else "flex",
    )
    call = _Call(context, operation, message, options, batch)
    error: BaseException | None = None
    try:
        with trace.use_span(call.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            body, usage = await call.run(key, charge, on_submitted, on_output)
    except BaseException as raised:
        error = raised
        raise
    finally:
        call.end(error)
    return encode_line(custom_id, LineResponse(200, call.call_id, msgspec.Raw(body)), None, usage)


class _Call:
    def __init__(
        self, context: GatewayContext, operation: Operation, message: Body, options: Options, batch: SpanContext
    ) -> None:
        self.call_id = ID_PREFIXES[operation] + uuid.uuid4().hex
        self._context = context
        self._operation = operation
        self._message = message
        self._options = options
        self._arrived_at = context.bus.now()
        self._generation: Generation | None = None
        self._spec = context.catalog.spec(message.model)
        self._metrics = context.metrics.of_call(operation, self._spec.name, options.request_class)
        # A trace of its own: one of 50,000 lines would be of no use to anybody.
        self.span = context.telemetry.tracer.start_span(f"batch line {self._spec.name}", Context(), links=[Link(batch)])
        if self.span.is_recording():
            self.span.set_attributes(request_attributes(operation, self._spec.name, message, options))
        context.metrics.batch_lines_in_flight.inc()

    async def run(
        self,
        key: Key,
        charge: PromptCharge,
        on_submitted: Callable[[], None],
        on_output: Callable[[int, float], None],
    ) -> tuple[bytes, Usage]:
        context, message, options = self._context, self._message, self._options
        context.catalog.check_can_be_served(self._spec.name)
        try:
            async with asyncio.timeout(options.timeout_s):
                tokenizer = await context.tokenizers.get(self._spec)
                texts_or_ids = prompts_of(message.prompt) if isinstance(message, CompletionRequest) else [""]
                prompts = await make_prompts(context, self._spec, tokenizer, message, options, texts_or_ids)
        except TimeoutError:
            raise ApiError(
                408, "The line's time limit has passed.", type="timeout_error", code="deadline_exceeded"
            ) from None
        charge.charge(key, sum(len(prompt.tokens) for prompt in prompts), context.bus.now())

        def count_output(num_tokens: int, now: float) -> None:
            key.charge_output(num_tokens, now)
            on_output(num_tokens, now)

        generation = self._generation = new_generation(
            context,
            self.call_id,
            message,
            options,
            prompts,
            tokenizer,
            self._metrics,
            self._arrived_at,
            count_output,
        )
        await generation.start()
        on_submitted()
        collector = Collector(len(generation.choices))
        while not generation.is_done:
            # The stream table ends every stream by its deadline.
            await generation.news()
            collector.add(generation.advance())
            if generation.failure is not None:
                raise ServiceError(generation.failure)
        usage = generation.usage()
        created = int(time.time())
        body = collector.body(self._operation, self.call_id, created, self._spec.name, options, tokenizer, usage)
        return body, usage

    def end(self, error: BaseException | None) -> None:
        context = self._context
        now = context.bus.now()
        outcome, status = outcome_of(error)
        context.metrics.batch_lines_in_flight.dec()
        context.metrics.requests.labels(self._spec.name, self._options.request_class.value, outcome).inc()
        if self._generation is not None:
            self._generation.close()
            measure(self._metrics, self._generation, now)
            if self.span.is_recording():
                self.span.set_attributes(response_attributes(self._generation, self.call_id, self._spec.name, now))
        if error is not None:
            known = of_info(error.info) if isinstance(error, BusError) else error
            self.span.set_attribute("error.type", getattr(known, "code", None) or type(error).__name__)
            if status >= 500:
                self.span.set_status(StatusCode.ERROR, str(error))
        self.span.end()
