"""The JSON bodies of the HTTP API's answers, as OpenAI and (for tokenize, detokenize and models) vLLM shape them."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishedBy = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    """The tier that was used, where the request named one."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    """None: no instance has loaded the model yet and its operator set no limit."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ReadyReply(msgspec.Struct):
    ready: bool
    models: list[str]
    """Models that can be served now."""


class VersionReply(msgspec.Struct):
    version: str


class DeletedModel(msgspec.Struct):
    id: str
    object: Literal["model"]
    deleted: bool


class ModelState(msgspec.Struct):
    """A model as the operator sees it."""

    name: str
    source: str
    dtype: str
    max_model_len: int | None
    replicas: int | None
    instances: dict[str, str]
    """Instance id to the model's state there: loading, ready, unloading, failed."""
    unplaced: str | None
    """Why it is on no instance, if it is on none."""


class ModelStates(msgspec.Struct):
    models: list[ModelState]
