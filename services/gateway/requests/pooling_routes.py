"""Endpoints of models that compare texts. Tideway serves causal language models, which are trained for another thing: each
answer says so, and what to use instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError

_CAUSAL = (
    "This server runs causal language models, which are trained to predict the next token and not to compare texts; "
    "what pooling of their hidden states gives is no good measure of meaning. "
)
_ELSEWHERE = "Serve {kind} model beside it, say with text-embeddings-inference or vLLM."
_REASONS = {
    "/v1/embeddings": _CAUSAL + _ELSEWHERE.format(kind="an embedding"),
    "/v1/rerank": _CAUSAL + _ELSEWHERE.format(kind="a reranking"),
    "/v1/score": (
        _CAUSAL + _ELSEWHERE.format(kind="a cross-encoder") + " For how likely a model finds a text, ask "
        "/v1/completions with 'echo': true, 'logprobs': 1 and 'max_tokens': 0."
    ),
}


async def refuse_pooling(context: GatewayContext, request: Request) -> Response:
    """Not served: a causal language model has no honest answer. The error says what to use instead."""
    context.admission.authenticate(request.headers)
    raise ApiError(400, _REASONS[request.url.path], code="unsupported_endpoint")
