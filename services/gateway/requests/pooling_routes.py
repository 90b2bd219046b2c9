"""Endpoints of models that embed or score texts: a generation of one token each, whose answer is what was pooled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.openai.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from services.gateway.requests.answering import answer, answered, begin
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.pooling import PooledRequest, Task, of_embedding, of_rerank, of_score

_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)


async def answer_embeddings(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "embeddings", _EMBEDDING, of_embedding)


async def answer_rerank(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "rerank", _RERANK, of_rerank)


async def answer_score(context: GatewayContext, request: Request) -> Response:
    return await _answer(context, request, "score", _SCORE, of_score)


async def _answer(
    context: GatewayContext,
    request: Request,
    task: Task,
    decoder: msgspec.json.Decoder[Any],
    pooled: Callable[[Any], PooledRequest],
) -> Response:
    exchange = Exchange(context, request, task)

    async def work() -> Response:
        key = exchange.key = context.admission.authenticate(request.headers)
        message = pooled(await read_message(request, decoder, context.bodies))
        generation, _, headers = await begin(context, request, exchange, key, message)
        return await answer(exchange, generation, headers, None)

    return await answered(exchange, work())
