"""Requests and answers of the Responses API, as OpenAI shapes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.replies import ChatTokenLogprob
from services.gateway.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    CacheSalt,
    FunctionName,
    MetadataKey,
    MetadataValue,
    Milliseconds,
    OnlyNull,
    ReasoningEffort,
    ServedName,
    ServiceTier,
    TopP,
    UnseenType,
    check_nesting,
    unseen,
)

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]


class TextPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text, or an image of the user. What a tool returned may have images and files, for which a text stands."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"] | UnseenType
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None

    @property
    def shown(self) -> str:
        return unseen(self.type) or self.text or self.refusal or ""


REFERENCE = "item_reference"
NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call": ("call_id", "action"),
    "local_shell_call_output": ("call_id", "output"),
    "shell_call": ("call_id", "action"),
    "shell_call_output": ("call_id", "output"),
    "apply_patch_call": ("call_id", "operation"),
    "apply_patch_call_output": ("call_id",),
    "reasoning": (),
    REFERENCE: ("id",),
    "additional_tools": ("tools",),
    "compaction": ("encrypted_content",),
    "compaction_summary": ("encrypted_content",),
}
"""Fields that an item must have, by its type; items of other types are left out."""


class ShellOutcome(msgspec.Struct, frozen=True):
    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(msgspec.Struct, frozen=True):
    """What a command of the shell tool printed, and how it ended."""

    stdout: str = ""
    stderr: str = ""
    outcome: ShellOutcome | None = None


class InputItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item of the conversation: a message, reasoning, a call of a tool, or what that returned. Those of tools that
    OpenAI runs itself are left out."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object", "null"]})] = None
    """JSON: the text of it, or the object."""
    output: Annotated[Any, Meta(extra_json_schema={"type": ["string", "array", "null"]})] = None
    """Text, or a list of `TextPart`, of what a tool returned; of `shell` a list of `ShellOutput`, too."""
    namespace: str | None = None
    """Namespace of the tool that is called."""
    input: str | None = None
    """Input of a custom tool."""
    summary: list[TextPart] | None = None
    """Summary of reasoning; `content` has the whole of it."""
    encrypted_content: str | None = None
    """Content of a compaction, as `POST /v1/responses/compact` made it, or of reasoning, as a response had it."""
    tools: list[dict[str, Any]] | None = None
    """Further tools, of an item `additional_tools`."""
    id: str | None = None
    """Id of an item of a stored response, for which an `item_reference` stands."""
    action: Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})] = None
    """What a call of `local_shell` or `shell` runs."""
    operation: Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})] = None
    """What a call of `apply_patch` does."""
    status: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    """Outcome of a call of `apply_patch`; of other items it says nothing."""
    max_output_length: Annotated[Any, Meta(extra_json_schema={"type": ["integer", "null"]})] = None
    """Most characters of output of `shell`, as its call had it."""

    def __post_init__(self) -> None:
        """Checks fields that items of tools which OpenAI runs itself have in other shapes: those are left out whole."""
        if self.type == "function_call" and not isinstance(self.arguments, str):
            check_nesting(arguments=self.arguments)
            arguments = _converted("arguments", self.arguments, dict[str, Any] | None)
            written = None if arguments is None else msgspec.json.encode(arguments).decode()
            msgspec.structs.force_setattr(self, "arguments", written)
        elif self.type in NEEDED:
            _converted("arguments", self.arguments, str | None)
        if self.type in NEEDED:
            parts: Any = list[ShellOutput] if self._is_printed else list[TextPart]
            msgspec.structs.force_setattr(self, "output", _converted("output", self.output, str | parts | None))
            for name in ("action", "operation"):
                value = _converted(name, getattr(self, name), dict[str, Any] | None)
                check_nesting(**{name: value})
        is_outcome = self.type == "apply_patch_call_output"
        is_printed = self.type == "shell_call_output"
        status = _converted("status", self.status, str | None) if is_outcome else None
        msgspec.structs.force_setattr(self, "status", status)
        most = _converted("max_output_length", self.max_output_length, int | None) if is_printed else None
        msgspec.structs.force_setattr(self, "max_output_length", most)

    @property
    def _is_printed(self) -> bool:
        """Whether the output is what commands of the shell printed, and not a list of parts."""
        parts = self.output if isinstance(self.output, list) else []
        is_text = any("type" in one if isinstance(one, dict) else isinstance(one, TextPart) for one in parts)
        return self.type == "shell_call_output" and not is_text


def _converted(name: str, value: Any, to: Any) -> Any:
    """The value of a field of a struct that is being decoded."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        told, place, inner = str(error).partition(" - at `$")
        raise ValueError(f"{told} - at `$.{name}{inner if place else '`'}") from None


class ResponseTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function, a custom tool (a text instead of arguments), a namespace of tools, `local_shell`, `shell` or
    `apply_patch`, or one that OpenAI runs itself and that is left out."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    """Format of a custom tool's input: a grammar is told to the model, and not enforced."""
    tools: list[ResponseTool] | None = None
    """Tools of a namespace."""
    environment: Annotated[Any, Meta(extra_json_schema={"type": ["object", "string", "null"]})] = None
    """Place where `shell` runs: of type `local`, or none, with the client; others are OpenAI's own, and left out."""

    def __post_init__(self) -> None:
        check_nesting(parameters=self.parameters, format=self.format, environment=self.environment)
        if self.type == "shell":
            _converted("environment", self.environment, dict[str, Any] | None)


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool, or several of which it may be one (`allowed_tools`)."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolChoice] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Not made."""


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


class Conversed(msgspec.Struct, kw_only=True):
    """What names a conversation."""

    model: ServedName = ""
    """May be left out where the server has one model."""
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """May be left out with `previous_response_id`."""
    instructions: str | None = None
    """Instructions for this response alone: those of the previous one do not go on."""
    previous_response_id: ResponseId | None = None
    service_tier: ServiceTier | None = None


class CompactRequest(Conversed, kw_only=True):
    """A conversation that is to become shorter."""


class ResponseRequest(Conversed, kw_only=True):
    store: bool | None = None
    """Default true: it may be read and continued by its id for a day."""
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` and `reasoning.encrypted_content` are heeded."""
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning: ReasoningOptions | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    cache_salt: CacheSalt | None = None
    """Among the tenant's requests, only those with the same text here use each other's cached prefixes."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Without effect: an input that is too long is refused, and never cut."""
    background: bool | None = None
    """It is made without a client: it may be read by its id meanwhile, and cancelled."""
    conversation: OnlyNull = None
    prompt: OnlyNull = None


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, reasoning, or a call of a tool."""

    id: str
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
    ]
    status: Literal["in_progress", "completed", "incomplete"]
    """State of the item; incomplete: it was cut off."""
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: list[OutputText | ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    """Parts of a message, or of reasoning."""
    summary: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    """Summary of reasoning; always empty."""
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    """Reasoning for clients that hand back no text of it, if the request included it."""
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tool that is called."""
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """Namespace of that tool."""
    input: str | msgspec.UnsetType = msgspec.UNSET
    """Input of a custom tool."""
    action: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What a call of `local_shell` or `shell` runs."""
    operation: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What a call of `apply_patch` does."""


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Always: nobody pays for what is put into the prefix cache."""


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
    """Reason: the limit of tokens, or the context's end."""


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds."""
    status: ResponseStatus
    """State: queued and in_progress go on, the others are over."""
    error: ResponseFailure | None = None
    """Error of a response that failed."""
    include: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The request's own."""
    incomplete_details: IncompleteDetails | None = None
    """Reason why it is incomplete."""
    instructions: str | None
    """Instructions of the request."""
    max_output_tokens: int | None
    """Limit of the request; null: what the context leaves."""
    model: str
    output: list[OutputItem] = []
    """Items: reasoning, messages and calls of tools, in order."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    background: bool = False
    store: bool
    """False too where there was no room for it."""
    temperature: float
    text: TextOptions
    """Form of the answer."""
    reasoning: ReasoningOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    """Number of most likely tokens that are told at each place."""
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    """Always as if it were disabled."""
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    service_tier: str


class ShownItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a response's input."""

    id: str
    type: str
    status: str | msgspec.UnsetType = msgspec.UNSET
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: list[TextPart] | msgspec.UnsetType = msgspec.UNSET
    """Parts of a message, or of reasoning."""
    summary: list[TextPart] | msgspec.UnsetType = msgspec.UNSET
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tool that is called."""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET
    output: Annotated[Any, Meta(extra_json_schema={"type": ["string", "array"]})] = msgspec.UNSET
    """Text or parts that a tool returned."""
    max_output_length: int | msgspec.UnsetType = msgspec.UNSET
    """Most characters of it."""
    action: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What a call of `local_shell` or `shell` runs."""
    operation: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What a call of `apply_patch` does."""
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    """Content of a compaction."""


class CompactedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    """Unix seconds."""
    output: list[ShownItem]
    """Input of the next request: the user's messages, and the summary."""
    usage: ResponseUsage


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[ShownItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool
