"""Copies of requests for models that are to be tried: nobody sees the answers and nobody is charged.

They run in the offline class without objectives, so that they take no room from others, and are marked as mirrored: neither
the statistics per model nor what follows from these (placement, orders) know of them. Metrics have them under the class
`mirror`.
"""

from __future__ import annotations

import copy
import dataclasses
import logging

from opentelemetry import trace

from services.gateway.http.errors import ApiError
from services.gateway.models.routes import Routed
from services.gateway.openai.parsing import Options
from services.gateway.openai.schemas import ChatRequest, CompletionRequest
from services.gateway.requests.exchange import Call
from services.gateway.requests.prompts import prompts_in_time
from shared.bus.interface import BusError, ServiceError
from shared.messages.requests import Priority, RequestClass
from shared.policies.routing import Role, mirrored_to
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Most mirrored requests in flight of one gateway; what would be more is left out, and counted."""


class Mirrors:
    def __init__(self) -> None:
        self._tasks = TaskSet()
        self._num_in_flight = 0

    def send(self, call: Call, message: ChatRequest | CompletionRequest, options: Options) -> None:
        """Begins the copies of a request that is being answered; returns at once."""
        route = call.routed.route
        if route is None:
            return
        for model in mirrored_to(route, message.model, call.call_id):
            if self._num_in_flight >= MAX_IN_FLIGHT:
                call.context.metrics.route_requests.labels(route.name, model, Role.MIRROR, "dropped").inc()
                continue
            self._num_in_flight += 1
            mirrored = copy.copy(message)
            mirrored.model, mirrored.ttft_ms, mirrored.tpot_ms = model, None, None
            self._tasks.start(self._run(call, Routed(model, route, Role.MIRROR), mirrored, options), "mirror")

    async def _run(
        self, original: Call, routed: Routed, message: ChatRequest | CompletionRequest, options: Options
    ) -> None:
        context = original.context
        options = dataclasses.replace(
            options,
            request_class=RequestClass.OFFLINE,
            priority=Priority.NORMAL,
            service_tier=None,
            is_stream=False,
        )
        span = context.telemetry.tracer.start_span(f"mirror {routed.model}", trace.set_span_in_context(original.span))
        call = Call(context, original.operation, span, is_mirror=True)
        call.routed = routed
        error: BaseException | None = None
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                spec = context.catalog.spec(routed.model)
                call.identify(message.model, message, options)
                context.catalog.check_can_be_served(spec.name)
                prompts, tokenizer = await prompts_in_time(context, spec, message, options)
                generation = call.plan(
                    message, options, prompts, tokenizer, original.tenant, lambda num_tokens, now: None
                )
                await generation.start()
                while not generation.is_done:
                    await generation.news()
                    generation.advance()
                    if generation.failure is not None:
                        raise ServiceError(generation.failure)
        except (ApiError, BusError) as raised:
            error = raised
            logger.info("a mirrored request to %s was not answered: %s", routed.model, raised)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._num_in_flight -= 1
            call.end(error)

    async def stop(self) -> None:
        await self._tasks.end_all()
