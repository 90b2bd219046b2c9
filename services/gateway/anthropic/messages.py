"""Requests and answers of the Messages API, as Anthropic shapes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.anthropic.tools import client_tool
from services.gateway.openai.schemas import MAX_MESSAGES, MAX_TOOLS, ServedName, StopString, TopP, check_nesting

ID_PREFIX = "msg_"
SERVER_RESULT = "_tool_result"
"""How the types of results of tools end that Anthropic runs itself."""


class Source(msgspec.Struct, frozen=True):
    """Source of a document, of which only text is read, or of an image."""

    type: str = ""
    data: str = ""
    """Text, where `type` is text; base64 of an image."""
    media_type: str = ""
    url: str = ""
    content: str | list[Block] | None = None


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a message: text, an image, a document or a search result of text, reasoning, a call of a tool, or what that
    returned (where a text stands for images and other documents). Those of tools that Anthropic runs itself are left out;
    `cache_control` is not needed, as all prefixes are cached."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    """An object only in results of tools that Anthropic runs itself."""
    is_error: bool | None = None
    title: str | None = None
    """Title of a document or a search result."""
    source: Source | str | None = None

    def __post_init__(self) -> None:
        check_nesting(input=self.input)
        if isinstance(self.content, dict) and not self.type.endswith(SERVER_RESULT):
            raise ValueError("Expected `str | array | null`, got `object` - at `$.content`")

    @property
    def returned(self) -> str | list[Block]:
        """What the tool of a result, or a search, returned."""
        return [] if self.content is None or isinstance(self.content, dict) else self.content


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, frozen=True):
    """A function, or a tool that Anthropic defines: one that the client runs is a function whose schema is known by its
    type, one that Anthropic runs itself is left out."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        check_nesting(input_schema=self.input_schema)

    @property
    def is_left_out(self) -> bool:
        return self.type not in (None, "custom") and client_tool(self.type) is None


class MessageToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Field `thinking`, for templates that take `enable_thinking`; disabled leaves reasoning out of the answer too."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]

    def __post_init__(self) -> None:
        check_nesting(schema=self.schema)


class OutputConfig(msgspec.Struct, frozen=True):
    format: OutputFormat | None = None
    effort: str | None = None


class MessageMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class Prompted(msgspec.Struct, kw_only=True):
    """What makes a prompt."""

    model: ServedName = ""
    """May be left out where the server has one model."""
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None


class MessageRequest(Prompted, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountRequest(Prompted, kw_only=True):
    pass


class CountReply(msgspec.Struct):
    input_tokens: int


class MessageUsage(msgspec.Struct):
    input_tokens: int
    """Without those that were in the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class OutputBlock(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "thinking", "tool_use"]
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    """Reasoning."""
    signature: str | msgspec.UnsetType = msgspec.UNSET
    """Signature of reasoning; always empty."""
    id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tool that is called."""
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Arguments of the call."""


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    """Blocks of text, reasoning and calls, in order."""
    stop_reason: StopReason | None = None
    """Reason of the end; null in a stream that has just begun."""
    stop_sequence: str | None = None
    """Text of `stop_sequences` that ended the answer."""
    usage: MessageUsage
