"""Responses in the background: made here without a client, stored when they have ended, shown meanwhile as far as they are.

Their calls are kept (`kept_calls`), so that they outlive this gateway: another one takes a response up where it is asked for
it and has it not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from services.gateway.http.errors import CANCELLED, HANDED_OVER, ApiError
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.kept_calls import Plan
from services.gateway.requests.writes import WRITE_WITHIN_S
from services.gateway.responses.messages import ResponseFailure, ResponseObject
from services.gateway.responses.store import Responses
from services.gateway.responses.tools import called_tools
from services.gateway.responses.writing import ResponseBuilder
from services.gateway.streams.generation import Generation
from shared.runtime.tasks import TaskSet


@dataclass(frozen=True, slots=True)
class _Making:
    response: ResponseObject
    task: asyncio.Task[None]


class Background:
    def __init__(self, responses: Responses, metrics: GatewayMetrics) -> None:
        self._responses = responses
        self._making: dict[str, _Making] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks = TaskSet()
        metrics.background_responses.set_function(lambda: len(self._making))

    async def stop(self) -> None:
        """Leaves unfinished responses to other gateways. Call it when their streams have ended."""
        await self._tasks.end_all()

    def turn(self, response_id: str) -> asyncio.Lock:
        """Held from the question whether the response is made here until it is: it must not be made twice."""
        return self._turns.setdefault(response_id, asyncio.Lock())

    def make(self, exchange: Exchange, generation: Generation, plan: Plan) -> None:
        """Makes the response of a call that has begun, or that another gateway began; returns at once. Within the
        response's `turn`."""
        response = plan.response
        assert response is not None
        exchange.let_client_go()
        task = self._tasks.start(self._make(exchange, generation, plan, response), "background response")
        self._making[response.id] = _Making(response, task)

    def so_far(self, response_id: str) -> ResponseObject | None:
        """None: it is not being made here."""
        making = self._making.get(response_id)
        return None if making is None else making.response

    async def wait(self, response_id: str) -> None:
        """Until it is not being made here any more."""
        if (making := self._making.get(response_id)) is not None:
            await asyncio.wait({making.task})

    async def _make(self, exchange: Exchange, generation: Generation, plan: Plan, response: ResponseObject) -> None:
        builder = ResponseBuilder(
            response, generation.tokenizer, generation.options.num_top_logprobs, called_tools(response.tools)
        )
        failure: BaseException | None = None
        try:
            try:
                while not generation.is_done:
                    for delta in await exchange.next_deltas(generation):
                        builder.take(delta)
                builder.finish(generation.usage())
            except ApiError as error:
                failure = error
                if error.code == HANDED_OVER:
                    return
                if error.code == CANCELLED:
                    builder.stop("cancelled")
                else:
                    builder.stop("failed", ResponseFailure(error.code or "server_error", error.message))
            if exchange.ticket is not None:
                # Nothing runs any more: whoever has read the end may ask again, though it is not stored yet.
                exchange.ticket.release()
            await self._responses.keep(response, exchange.tenant, list(plan.items), WRITE_WITHIN_S)
        except BaseException as error:
            failure = error
            raise
        finally:
            del self._making[response.id]
            exchange.end(failure)
