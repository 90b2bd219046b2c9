"""Requests and answers of the Responses API, as OpenAI shapes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.replies import ChatTokenLogprob
from services.gateway.schemas import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    FunctionName,
    MetadataKey,
    MetadataValue,
    Milliseconds,
    ModelName,
    OnlyFalse,
    OnlyNull,
    check_nesting,
)

ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]


class TextPart(msgspec.Struct, frozen=True):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""


class InputItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the conversation: a message, a call of a function, or what that returned."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON."""
    output: str | list[TextPart] | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        check_nesting(parameters=self.parameters)


class NamedFunctionTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        check_nesting(schema=self.schema)


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    model: ModelName
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    """Of this response alone: those of the previous one do not go on."""
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    """Default true: it may be read and continued by its id for a day."""
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` is what is heeded."""
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    truncation: Annotated[Any, Meta(extra_json_schema={"enum": [None, "disabled"]})] = None
    background: OnlyFalse = None
    conversation: OnlyNull = None
    prompt: OnlyNull = None


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, or a call of a function."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: list[OutputText] | msgspec.UnsetType = msgspec.UNSET
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    """False too where there was no room for it."""
    temperature: float
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    service_tier: str


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool
