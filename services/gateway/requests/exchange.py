"""One generation request, from its arrival to its last byte: its span, its metrics and its outcome (`Call`), and over HTTP
its key, its ticket and the client's presence (`Exchange`). However it ends, `end` runs once and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from opentelemetry.trace import Span, SpanKind, StatusCode
from starlette.requests import ClientDisconnect, Request

from services.gateway.access.admission import Key, Ticket, name_of
from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError, of_info
from services.gateway.http.limits import AnswerBody
from services.gateway.metrics import CallMetrics
from services.gateway.models.catalog import READY
from services.gateway.models.routes import Routed
from services.gateway.openai.parsing import Options
from services.gateway.openai.schemas import GenerationFields
from services.gateway.requests.answers import Collector, Operation
from services.gateway.requests.kept_calls import STREAM_HEADER, Kept, Plan, Wish
from services.gateway.requests.pooling import POOLED_AT_ONCE, PooledRequest, pooled_body
from services.gateway.requests.tracing import (
    queue_s,
    request_attributes,
    response_attributes,
    route_attributes,
    structured_attributes,
)
from services.gateway.streams.generation import Delta, Generation, Prompt, Seen
from services.gateway.text.logprobs import prompt_logprobs
from services.gateway.text.tokenization import ModelTokenizer
from shared.bus.interface import BusError
from shared.messages.cluster import WhyAsleep
from shared.messages.kept import KeptCall
from shared.messages.requests import GenerationRequest, RequestClass
from shared.runtime.telemetry import context_of, current_traceparent

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_GONE_STATUS = 499
MODEL_HEADER = "x-tideway-model"
ID_PREFIXES = {
    "chat": "chatcmpl-",
    "text_completion": "cmpl-",
    "embeddings": "embd-",
    "rerank": "rerank-",
    "score": "score-",
}


class ClientGone(Exception):
    """The client closed its connection, so no one reads the answer."""


def outcome_of(error: BaseException | None) -> tuple[str, int]:
    """The metric's label and the HTTP status."""
    if error is None:
        return "ok", 200
    if isinstance(error, ClientGone | ClientDisconnect | asyncio.CancelledError):
        return "disconnected", CLIENT_GONE_STATUS
    if isinstance(error, BusError):
        error = of_info(error.info)
    if not isinstance(error, ApiError):
        return "failed", 500
    if error.status >= 500:
        return "failed", error.status
    return {401: "refused", 403: "refused", 408: "deadline", 429: "overloaded"}.get(
        error.status, "invalid"
    ), error.status


class Call:
    """A request of a client, a line of a batch, or a mirror of one of these."""

    def __init__(self, context: GatewayContext, operation: Operation, span: Span, *, is_mirror: bool = False) -> None:
        """`is_mirror`: nobody sees the answer."""
        self.context = context
        self._is_mirror = is_mirror
        self.tenant = ""
        """Id of whom it is for, once it is known."""
        self.operation = operation
        self.call_id = ID_PREFIXES[operation] + uuid.uuid4().hex
        self.created_s = int(time.time())
        """Unix time that the answer shows."""
        self.kept: Kept | None = None
        """It may be resumed."""
        self.is_resumed = False
        """Another connection began it: it is no new generation."""
        self.arrived_at = context.bus.now()
        self.span = span
        self.request_class = RequestClass.ONLINE
        self.metrics: CallMetrics | None = None
        """None before it is understood."""
        self.generation: Generation | None = None
        self._message: GenerationFields | None = None
        self._model = "unknown"
        self._cold_model = ""
        """The one that was not loaded when the call was placed."""
        self._shown_model = ""
        self.routed = Routed("unknown")
        """Route of the call, once its model's name was looked up."""

    @property
    def _class_label(self) -> str:
        """In metrics."""
        return "mirror" if self._is_mirror else "resumed" if self.is_resumed else self.request_class.value

    @property
    def shown_model(self) -> str:
        """Model name that the client uses."""
        if self._shown_model:
            return self._shown_model
        return self._model if self.routed.route is None else self.routed.route.name

    def note_state(self, model: str) -> None:
        """Before it is placed: whether it begins with its model being loaded. `model`: not an adapter's name."""
        catalog = self.context.catalog
        if not catalog.is_on_demand(model) or (state := catalog.state(model)) == READY:
            return
        self._cold_model = model
        self.context.metrics.cold_starts.labels(model, state).inc()
        self.span.set_attribute("tideway.cold_start", state)

    def cold_start(self) -> bytes:
        """A comment for its stream, while its model is being loaded for it; empty: it is not."""
        generation, catalog, model = self.generation, self.context.catalog, self._cold_model
        if not model or (generation is not None and generation.first_token_at is not None):
            return b""
        if (state := catalog.state(model)) == READY:
            return b""
        return f": cold start: {model} is {cold_text(state, catalog.why_asleep(model))}\n\n".encode()

    def headers(self) -> dict[str, str]:
        """Headers that say which model answers, where that is not the name that was asked for, and how the answer may
        be resumed."""
        found = {} if self.kept is None and not self.is_resumed else {STREAM_HEADER: self.call_id}
        if self.routed.route is not None or (self.is_resumed and self.shown_model != self.routed.model):
            found[MODEL_HEADER] = self.routed.model
        return found

    def identify(self, model: str, request: GenerationFields, options: Options) -> None:
        """The request is understood: from here on it counts under its model and class."""
        self._model, self.request_class = model, options.request_class
        self.metrics = self.context.metrics.of_call(self.operation, model, self._class_label)
        if self.span.is_recording():
            self.span.set_attributes(request_attributes(self.operation, model, request, options))
            self.span.set_attributes(route_attributes(self.routed))

    def plan(
        self,
        message: GenerationFields,
        options: Options,
        prompts: list[Prompt],
        tokenizer: ModelTokenizer,
        tenant: str,
        on_output: Callable[[int, float], None],
        *,
        is_stepwise: bool = False,
    ) -> Generation:
        """What is to be generated; `Generation.start` places it. `tenant`: id of whom it is for. `on_output`, `is_stepwise`:
        see there."""
        assert self.metrics is not None
        self.tenant, self._message = tenant, message
        name, policy = name_of(tenant), self.context.admission.tenants
        if self.span.is_recording() and name:
            self.span.set_attribute("tideway.tenant", name)
        if prompts[0].sampling.grammar:
            self._count_structured(options)
        adapter = self.context.catalog.adapter(message.model)
        ttft_ms, tpot_ms = message.ttft_ms or 0.0, message.tpot_ms or 0.0
        if adapter is not None and options.request_class is RequestClass.ONLINE:
            # What the instance takes where none is named are its base model's.
            ttft_ms, tpot_ms = ttft_ms or adapter.ttft_ms, tpot_ms or adapter.tpot_ms
        template = GenerationRequest(
            request_id=self.call_id,
            gateway_id=self.context.gateway_id,
            model=message.model if adapter is None else adapter.base,
            prompt=b"",
            sampling=prompts[0].sampling,
            request_class=options.request_class,
            priority=options.priority,
            timeout_s=options.timeout_s,
            traceparent=current_traceparent(),
            ttft_objective_s=ttft_ms / 1000,
            tpot_objective_s=tpot_ms / 1000,
            prompt_lookup=-1 if message.prompt_lookup is None else message.prompt_lookup,
            is_mirror=self._is_mirror,
            is_open_ended=prompts[0].is_open_ended,
            adapter=None if adapter is None else adapter.adapter,
            tenant=name,
            tenant_weight=policy.weight(name),
            prefix_salt=policy.salt(name, message.cache_salt or ""),
        )
        self.generation = Generation(
            table=self.context.table,
            template=template,
            prompts=prompts,
            options=options,
            tokenizer=tokenizer,
            metrics=self.metrics,
            arrived_at=self.arrived_at,
            now=self.context.bus.now,
            on_output=on_output,
            is_stepwise=is_stepwise,
            max_open=POOLED_AT_ONCE if isinstance(message, PooledRequest) else 0,
        )
        return self.generation

    def record(self, plan: Plan) -> KeptCall:
        """All that another gateway needs of the planned call; how it is to be kept is missing."""
        assert self.generation is not None
        assert self.operation == "chat" or self.operation == "text_completion", "others are not kept"
        return KeptCall(
            call_id=self.call_id,
            tenant=self.tenant,
            operation=self.operation,
            shown_model=self.shown_model,
            model=self._model,
            created_s=self.created_s,
            arrived_s=time.time() - (self.context.bus.now() - self.arrived_at),
            window_s=0.0,
            expires_s=0.0,
            template=self.generation.template,
            plan=msgspec.msgpack.encode(plan),
        )

    def resume(self, record: KeptCall) -> None:
        """It is the call of the record, as another connection began it."""
        context = self.context
        self.is_resumed = True
        self.call_id, self.created_s, self.tenant = record.call_id, record.created_s, record.tenant
        self.operation, self.request_class = record.operation, record.template.request_class
        self._model, self._shown_model, self.routed = record.model, record.shown_model, Routed(record.model)
        self.arrived_at = context.bus.now() - max(0.0, time.time() - record.arrived_s)
        self.metrics = context.metrics.of_call(self.operation, record.model, self._class_label)
        self.span.set_attributes({"tideway.resumed": True, "tideway.call_id": record.call_id})

    async def join(self, record: KeptCall, plan: Plan, tokenizer: ModelTokenizer, seen: Sequence[Seen]) -> Generation:
        """The answer of the record's call, from where the client has it. Raises `BusError`."""
        assert self.metrics is not None
        self.generation = Generation(
            table=self.context.table,
            template=record.template,
            prompts=plan.prompts,
            options=plan.options,
            tokenizer=tokenizer,
            metrics=self.metrics,
            arrived_at=self.arrived_at,
            now=self.context.bus.now,
            on_output=lambda num_tokens, now: None,  # whoever began it is charged
            seen=seen,
            is_stepwise=plan.is_stepwise,
        )
        self.kept = await self.context.kept.join(record, self.generation)
        return self.generation

    def _count_structured(self, options: Options) -> None:
        kind = "tools" if options.grammar is None or options.tools is not None else options.grammar.kind
        self.context.metrics.structured_requests.labels(self._model, kind).inc()
        if self.span.is_recording():
            self.span.set_attributes(structured_attributes(kind))

    def body(self, answer: Collector, generation: Generation) -> bytes:
        """Body of the answer in one piece."""
        options, tokenizer = generation.options, generation.tokenizer
        created, usage = self.created_s, generation.usage()
        if isinstance(self._message, PooledRequest):
            return pooled_body(self._message, self.call_id, created, self.shown_model, generation)
        prompts = [
            msgspec.UNSET
            if options.prompt_logprobs is None
            else prompt_logprobs(tokenizer, choice.prompt.tokens, choice.prompt_logprobs(), options.prompt_logprobs)
            for choice in generation.choices
        ]
        return answer.body(self.operation, self.call_id, created, self.shown_model, options, tokenizer, usage, prompts)

    def end(self, error: BaseException | None) -> None:
        """`error` None: the whole answer was made. To be called once."""
        outcome, status = outcome_of(error)
        metrics = self.context.metrics
        metrics.requests.labels(self._model, self._class_label, outcome).inc()
        model, route, role = self.routed
        if route is not None:
            metrics.route_requests.labels(route.name, model, role, outcome).inc()
        self._count_tenant(outcome)
        if self.generation is not None and self.metrics is not None:
            now = self.context.bus.now()
            self.generation.close()
            if self.kept is not None:
                self.kept.leave()
            measure(self.metrics, self.generation, now)
            if self.span.is_recording():
                self.span.set_attributes(response_attributes(self.generation, self.call_id, self._model, now))
                self._name_events()
        if error is not None and outcome != "disconnected":
            known = of_info(error.info) if isinstance(error, BusError) else error
            self.span.set_attribute("error.type", getattr(known, "code", None) or type(error).__name__)
            if status >= 500:
                self.span.set_status(StatusCode.ERROR, str(error))
        self.span.end()

    def _count_tenant(self, outcome: str) -> None:
        if self._is_mirror:
            return
        of_tenant = self.context.metrics.of_tenant(name_of(self.tenant))
        of_tenant.count(outcome)
        if (generation := self.generation) is not None:
            ttft_s = None if generation.first_token_at is None else generation.first_token_at - generation.arrived_at
            of_tenant.measure(generation.num_prompt_tokens, generation.num_output_tokens, ttft_s)

    def _name_events(self) -> None:
        """On the span: what the gateway knows of the call's sequences."""
        assert self.generation is not None
        for choice in self.generation.choices:
            for event in self.context.timelines.events_of(f"{self.call_id}-{choice.index}"):
                about = {"tideway.cause": event.cause, "tideway.place": event.place}
                known = {name: value for name, value in about.items() if value}
                self.span.add_event(event.kind, {"tideway.choice": choice.index, **known}, int(event.at_s * 1e9))


class Exchange(Call):
    """A call over HTTP."""

    def __init__(self, context: GatewayContext, request: Request, operation: Operation) -> None:
        span = context.telemetry.tracer.start_span(
            operation,
            context_of(request.headers.get("traceparent", "")),
            SpanKind.SERVER,
            {
                "http.request.method": request.method,
                "url.path": request.url.path,
                "tideway.http_request_id": request.state.request_id,
            },
        )
        super().__init__(context, operation, span)
        self.key: Key | None = None
        self.ticket: Ticket | None = None
        self.is_client_gone = False
        self.request = request
        self.field_names: Mapping[str, str] = {}
        """Names of fields to this client, by what they are called in a chat."""
        self._has_ended = False
        self._watch: asyncio.Task[None] | None = None

    def authenticate(self, headers: Mapping[str, str] | None = None) -> Key:
        """Whose request it is. `headers`: in the place of the request's. Raises as `Admission.authenticate`."""
        self.key = self.context.admission.authenticate(self.request.headers if headers is None else headers)
        return self.key

    def wish(self, message: Any) -> Wish | None:
        """How the call is to be kept; None: it is not. Raises as `KeptCalls.wish`."""
        assert self.key is not None
        request, is_stream = self.request, bool(message.stream)
        return self.context.kept.wish(request.headers, self.key.tenant, request.url.path, message, is_stream=is_stream)

    def identify(self, model: str, request: GenerationFields, options: Options) -> None:
        super().identify(model, request, options)
        self.span.update_name(f"{self.operation} {model}")
        self.context.metrics.in_flight.labels(self.request_class.value).inc()

    def note(self, names: Iterable[str], words: str) -> None:
        """Tells the client what of its request changes nothing. `words`: for the log, such as `UNENFORCED`."""
        if (noted := self.context.bodies.ignored_fields) is not None:
            noted.note(self.request, [self.field_names.get(name, name) for name in names], words)

    def resume(self, record: KeptCall) -> None:
        if self.metrics is None:
            self.context.metrics.in_flight.labels(record.template.request_class.value).inc()
        super().resume(record)
        self.span.update_name(f"{self.operation} {record.model}")

    def rate_limits(self) -> dict[str, str]:
        """Headers that say what is left of the key's limits."""
        return {} if self.key is None else self.key.rate_limits(self.request_class, self.context.bus.now())

    def watch_client(self) -> None:
        """Notices from now on at once that the client goes away. The body must have been read."""
        self._watch = asyncio.create_task(self._wait_until_gone())

    def let_client_go(self) -> None:
        """Detaches the call from its client: it is not cancelled when the client disconnects, or has disconnected."""
        self.is_client_gone = False
        if self._watch is not None:
            self._watch.cancel()

    async def _wait_until_gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.is_client_gone = True
        if self.generation is not None:
            self.generation.wake()

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`; cancels it and raises `ClientGone` if the client goes away first."""
        assert self._watch is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise ClientGone
        return task.result()

    async def next_deltas(self, generation: Generation, timeout_s: float | None = None) -> list[Delta]:
        """Waits for news of the generation. Raises `ClientGone`; `ApiError` where it has failed and nothing is left to
        show; `TimeoutError`."""
        if generation.failure is None:
            await generation.news(timeout_s)
        if self.is_client_gone:
            raise ClientGone
        deltas = generation.advance()
        if not deltas and generation.failure is not None:
            raise of_info(generation.failure)
        return deltas

    def end(self, error: BaseException | None) -> None:
        """`error` None: the whole answer was made. May be called twice."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._watch is not None:
            self._watch.cancel()
        if self.ticket is not None:
            self.ticket.release()
        if self.metrics is not None:
            self.context.metrics.in_flight.labels(self.request_class.value).dec()
        outcome, status = outcome_of(error)
        if outcome == "disconnected":
            self.context.metrics.disconnects.inc()
            body: AnswerBody | None = self.request.scope.get("state", {}).get("answer_body")
            if body is not None and body.is_given_up:
                self.span.set_attribute("error.type", "slow_reader")
        self.span.set_attribute("http.response.status_code", status)
        super().end(error)


def measure(metrics: CallMetrics, generation: Generation, now: float) -> None:
    """Records metrics at the end of a call, whatever its outcome."""
    duration_s = now - generation.arrived_at
    metrics.prompt_tokens.inc(generation.num_prompt_tokens)
    if generation.is_done:
        metrics.duration.observe(duration_s)
        metrics.gen_ai_duration.observe(duration_s)
    num_later = generation.num_output_tokens - len(generation.choices)
    if generation.first_token_at is not None and num_later > 0:
        decode_s = now - generation.first_token_at
        metrics.gen_ai_per_token.observe(decode_s * len(generation.choices) / num_later)
    for choice in generation.choices:
        if choice.stream is not None and (timing := choice.stream.timing) is not None:
            metrics.queue.observe(queue_s(generation, timing.prefill_s))
            metrics.prefill.observe(timing.prefill_s)
            metrics.decode.observe(timing.decode_s)
            metrics.inference.observe(timing.prefill_s + timing.decode_s)
            if choice.num_tokens > 1:
                metrics.per_token.observe(timing.decode_s / (choice.num_tokens - 1))
        if choice.finish_reason is not None:
            metrics.finished[choice.finish_reason].inc()
            metrics.output_lengths.observe(choice.num_tokens)
    if generation.is_done:
        metrics.prompt_lengths.observe(generation.num_prompt_tokens)
        metrics.longest_outputs.observe(max(choice.num_tokens for choice in generation.choices))
        metrics.max_tokens.observe(generation.prompts[0].sampling.max_tokens)
        metrics.num_choices.observe(generation.options.num_choices)


def cold_text(state: str, why: str) -> str:
    """`state`: of `Catalog.state`; `why`: a `WhyAsleep`, or empty."""
    where = {"loading": "being loaded", "host": "in host memory", "disk": "on disk"}.get(state, state)
    reasons: dict[str, str] = {
        WhyAsleep.ROOM_IN_USE: "the memory that it needs is in use",
        WhyAsleep.RECENTLY_USED: "the memory that it needs was in use a moment ago",
        WhyAsleep.ONLINE_FIRST: "online requests come first",
    }
    reason = reasons.get(why) if state != "loading" else None
    return where if reason is None else f"{where}: {reason}"
