"""Requests to models that embed or score texts, as the generation that they become, and their answers.

Shapes as OpenAI has them (/v1/embeddings) and as vLLM, Jina and Cohere do (rerank, score). Pure, but for the tokenizer.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.gateway.context import GatewayContext
from services.gateway.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid
from services.gateway.openai.parsing import check_num_characters, check_token_ids, prompts_of
from services.gateway.openai.replies import (
    Embedding,
    Embeddings,
    PooledUsage,
    RankedDocument,
    RankedText,
    Ranking,
    Score,
    Scores,
)
from services.gateway.openai.schemas import (
    CompletionRequest,
    EmbeddingRequest,
    PooledFields,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.streams.generation import Generation, Prompt
from services.gateway.text.tokenization import ModelTokenizer
from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, Pooled, SamplingParams, unpack_vector
from shared.models.pooling import Pooling

Task = Literal["embeddings", "rerank", "score"]

MAX_INPUTS = 2048
"""Texts in one call, as OpenAI allows."""
POOLED_AT_ONCE = 64
"""Texts of a call that are under way at once; the others wait in the gateway."""
_QWEN3_MARK = "<|im_start|>"
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, '
    "retrieve relevant passages that answer the query\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
"""Prompt in which Qwen3-Reranker was trained to see a pair (its model card)."""


class PooledRequest(CompletionRequest, kw_only=True):
    """One of those below as it is placed: a completion of one token that is not shown. `prompt` has the texts, or the pairs
    as if they were texts, for estimates."""

    task: Task
    num_dimensions: int = 0
    is_base64: bool = False
    truncates_to: int | None = None
    """Tokens; -1: what the model takes."""
    pairs: tuple[tuple[str, str], ...] = ()
    top_n: int | None = None
    shows_documents: bool = True


def of_embedding(message: EmbeddingRequest) -> PooledRequest:
    """Raises `ApiError`."""
    try:
        prompts = prompts_of(message.input)
    except ApiError as error:
        raise invalid("input", error.message.replace("'prompt'", "'input'")) from None
    return _pooled(
        message,
        "embeddings",
        prompts,
        "input",
        num_dimensions=message.dimensions or 0,
        is_base64=message.encoding_format == "base64",
        add_special_tokens=message.add_special_tokens,
    )


def of_rerank(message: RerankRequest) -> PooledRequest:
    """Raises `ApiError`."""
    texts = [one if isinstance(one, str) else one.text for one in message.documents]
    return _pooled(
        message,
        "rerank",
        [f"{message.query} {text}" for text in texts],
        "documents",
        pairs=tuple((message.query, text) for text in texts),
        top_n=message.top_n,
        shows_documents=message.return_documents is not False,
    )


def of_score(message: ScoreRequest) -> PooledRequest:
    """Raises `ApiError`."""
    named = {
        "text_1": message.text_1,
        "queries": message.queries,
        "text_2": message.text_2,
        "documents": message.documents,
    }
    first, second = (
        next(((name, named[name]) for name in names if named[name] is not None), (names[0], None))
        for names in (("text_1", "queries"), ("text_2", "documents"))
    )
    for name, value in (first, second):
        if not value:
            raise invalid(name, f"'{name}' must be a text or a list of texts.", "missing_field")
    firsts, seconds = ([value] if isinstance(value, str) else value or [] for _, value in (first, second))
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            first[0], f"'{first[0]}' has {len(firsts)} texts and '{second[0]}' {len(seconds)}: one, or as many."
        )
    pairs = tuple(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
    return _pooled(message, "score", [" ".join(pair) for pair in pairs], second[0], pairs=pairs)


def _pooled(message: PooledFields, task: Task, prompts: Any, param: str, **more: Any) -> PooledRequest:
    if len(prompts) > MAX_INPUTS:
        raise invalid(param, f"'{param}' has {len(prompts)} texts; the limit is {MAX_INPUTS}.")
    return PooledRequest(
        model=message.model,
        prompt=prompts,
        max_tokens=1,
        task=task,
        user=message.user,
        priority=message.priority,
        service_tier=message.service_tier,
        ttft_ms=message.ttft_ms,
        cache_salt=message.cache_salt,
        request_timeout_s=message.request_timeout_s,
        truncates_to=message.truncate_prompt_tokens,
        **more,
    )


def refuse_generation(tokenizer: ModelTokenizer, model: str) -> None:
    """Raises `ApiError` where the model generates no text."""
    if (pooling := tokenizer.pooling) is not None:
        paths = "/v1/embeddings takes" if pooling.task == "embed" else "/v1/rerank and /v1/score take"
        raise ApiError(
            400,
            f"The model '{model}' is {pooling.noun} and generates no text; {paths} it.",
            param="model",
            code="unsupported_model",
        )


async def pooled_prompts(
    context: GatewayContext, spec: ModelSpec, tokenizer: ModelTokenizer, message: PooledRequest
) -> list[Prompt]:
    """Raises `ApiError`."""
    pooling = _checked(tokenizer, message)
    # The one token that is never computed counts too.
    longest = context.catalog.max_model_len(spec, tokenizer) - 1
    most = None if message.truncates_to is None else longest if message.truncates_to < 0 else message.truncates_to
    if most is not None and not 0 < most <= longest:
        raise invalid(
            "truncate_prompt_tokens", f"'truncate_prompt_tokens' must be -1 or from 1 to {longest} for this model."
        )
    param = {"embeddings": "input", "rerank": "documents", "score": "text_2"}[message.task]
    found: list[tuple[list[int], int]]
    if message.pairs and pooling.task == "score":
        found = await _of_pairs(context, tokenizer, pooling, message.pairs, longest, most, param)
    elif message.pairs:
        texts = [text for pair in message.pairs for text in pair]
        found = await _of_texts(context, tokenizer, texts, longest, most, param, adds_special=True)
    elif isinstance(message.prompt[0], list):
        found = [(ids[:most], 0) for ids in message.prompt if isinstance(ids, list)]
    else:
        adds_special = message.add_special_tokens is not False
        texts = [text for text in message.prompt if isinstance(text, str)]
        found = await _of_texts(context, tokenizer, texts, longest, most, param, adds_special=adds_special)
    prompts = []
    for ids, num_first in found:
        check_token_ids(ids, tokenizer.vocab_size, param)
        if len(ids) > longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens; you requested {len(ids)} in '{param}'. "
                "'truncate_prompt_tokens': -1 takes as many as fit.",
                param=param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        pooled = Pooled(num_dimensions=message.num_dimensions, num_first=num_first, is_whole=pooling.is_whole)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, pooled=pooled)
        prompts.append(Prompt(ids, sampling, shows_output=False))
    return prompts


def _checked(tokenizer: ModelTokenizer, message: PooledRequest) -> Pooling:
    pooling, path = tokenizer.pooling, f"/v1/{message.task}"
    if pooling is None or (message.task == "embeddings" and pooling.task != "embed"):
        what = "generates text" if pooling is None else f"is {pooling.noun} and makes no vectors"
        needed = "an embedding model" if message.task == "embeddings" else "an embedding or reranking model"
        raise ApiError(
            400,
            f"The model '{message.model}' {what}; {path} needs {needed}.",
            param="model",
            code="unsupported_model",
        )
    wanted, most, few = message.num_dimensions, pooling.num_dimensions, pooling.matryoshka_dimensions
    if wanted and wanted != most:
        if not pooling.is_matryoshka:
            raise invalid(
                "dimensions",
                f"'dimensions' is not supported by the model '{message.model}', whose vectors have {most}: it was not "
                "trained for fewer (Matryoshka), as far as its config.json says.",
                "unsupported_value",
            )
        if wanted > most or (few and wanted not in few):
            allowed = f"one of {', '.join(map(str, few))}" if few else f"from 1 to {most}"
            raise invalid("dimensions", f"'dimensions' must be {allowed} for the model '{message.model}'.")
    return pooling


async def _of_texts(
    context: GatewayContext,
    tokenizer: ModelTokenizer,
    texts: list[str],
    longest: int,
    most: int | None,
    param: str,
    *,
    adds_special: bool,
) -> list[tuple[list[int], int]]:
    if most is not None and adds_special:
        return await context.tokenizers.encode_cut(tokenizer, [(text, None) for text in texts], most)
    limit = tokenizer.max_characters(longest)
    for text in texts:
        if most is None:
            check_num_characters(len(text), limit, longest, param)
    all_ids = await context.tokenizers.encode(tokenizer, texts, adds_special, param)
    return [(ids[:most], 0) for ids in all_ids]


async def _of_pairs(
    context: GatewayContext,
    tokenizer: ModelTokenizer,
    pooling: Pooling,
    pairs: Sequence[tuple[str, str]],
    longest: int,
    most: int | None,
    param: str,
) -> list[tuple[list[int], int]]:
    if pooling.token_ids and tokenizer.special_token_id(_QWEN3_MARK) is not None:
        texts = [_QWEN3.format(*pair) for pair in pairs]
        if most is not None:
            raise invalid(
                "truncate_prompt_tokens", "'truncate_prompt_tokens' would cut off what this model answers to."
            )
        return await _of_texts(context, tokenizer, texts, longest, None, param, adds_special=True)
    limit = tokenizer.max_characters(longest)
    for pair in pairs:
        if most is None:
            check_num_characters(sum(map(len, pair)), limit, longest, param)
    return await context.tokenizers.encode_cut(tokenizer, pairs, most)


# ---------------------------------------------------------------------------------------------------- answers


def pooled_body(message: PooledRequest, call_id: str, created: int, model: str, generation: Generation) -> bytes:
    """The answer, once all are done. Raises `ServiceError` where a vector was lost with its instance."""
    vectors = [_vector(choice.pooled()) for choice in generation.choices]
    num_tokens = generation.num_prompt_tokens
    usage = PooledUsage(num_tokens, num_tokens)
    answer: Any
    if message.task == "embeddings":
        data = [Embedding("embedding", i, _shown(vector, message.is_base64)) for i, vector in enumerate(vectors)]
        return msgspec.json.encode(Embeddings(call_id, "list", created, model, data, usage))
    if len(vectors) == len(message.pairs):
        scores = [vector[0] for vector in vectors]
    else:
        # The model embeds: two texts a pair.
        scores = [cosine(first, second) for first, second in zip(vectors[::2], vectors[1::2], strict=True)]
    if message.task == "score":
        answer = Scores(call_id, "list", created, model, [Score(i, "score", s) for i, s in enumerate(scores)], usage)
        return msgspec.json.encode(answer)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: message.top_n]
    ranked = [
        RankedDocument(i, scores[i], RankedText(message.pairs[i][1]) if message.shows_documents else msgspec.UNSET)
        for i in order
    ]
    return msgspec.json.encode(Ranking(call_id, model, usage, ranked))


def _vector(packed: bytes) -> array[float]:
    if not packed:
        raise ServiceError.of(ErrorCode.UNAVAILABLE, "The vector was lost with the instance that made it.")
    return unpack_vector(packed)


def _shown(vector: array[float], is_base64: bool) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of the angle between two vectors; 0 where one has no length."""
    product = math.sumprod(first, second) if hasattr(math, "sumprod") else sum(map(float.__mul__, first, second))
    lengths = math.hypot(*first) * math.hypot(*second)
    return product / lengths if lengths else 0.0
