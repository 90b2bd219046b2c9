"""Conversion of a request of the Messages API to one of the chat API. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from services.gateway.anthropic.messages import (
    SERVER_RESULT,
    Block,
    InputMessage,
    MessageRequest,
    MessageTool,
    Prompted,
    Source,
)
from services.gateway.anthropic.tools import client_tool
from services.gateway.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid
from services.gateway.openai.conversations import not_served
from services.gateway.openai.parsing import SWITCHES
from services.gateway.openai.schemas import IMAGE, UNSEEN, ChatRequest, unseen
from services.gateway.openai.structured import check_types

_LEFT_OUT = (
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "server_tool_use",
    "container_upload",
    "mcp_tool_use",
    "tool_reference",
)
"""Blocks without text of their own."""
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Names of fields, by what they are called in a chat."""


def chat_request(request: Prompted) -> ChatRequest:
    """Raises `ApiError` 400."""
    tools = [_tool(tool, i) for i, tool in enumerate(request.tools or ()) if not tool.is_left_out]
    choice = request.tool_choice
    fields: dict[str, Any] = {
        "model": request.model or None,
        "messages": _messages(request),
        "tools": tools,
        "tool_choice": _choice(request) if tools else None,
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
    }
    if request.thinking is not None:
        is_on = request.thinking.type != "disabled"
        fields |= {"chat_template_kwargs": dict.fromkeys(SWITCHES, is_on), "include_reasoning": is_on}
    if isinstance(request, MessageRequest):
        fields |= _generation(request)
    if _is_begun(request.messages[-1]):
        _check_beginning(request)
        if fields.get("response_format") is not None:
            raise invalid("messages", "'messages' cannot end with the beginning of an answer that has a format.")
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid("messages", f"{error}.") from None


def _is_begun(message: InputMessage) -> bool:
    """Whether it is the beginning of the answer, which the model goes on with."""
    content = message.content
    if message.role != "assistant" or not content:
        return False
    return isinstance(content, str) or all(block.type == "text" and block.text for block in content)


def _check_beginning(request: Prompted) -> None:
    """Refuses what Anthropic refuses of an answer that is begun: models go on badly behind white space, and would have to
    reason before what is written."""
    content = request.messages[-1].content
    end = content if isinstance(content, str) else (content[-1].text if content else "") or ""
    if end != end.rstrip():
        raise invalid("messages", "messages: final assistant content cannot end with trailing whitespace.")
    if request.thinking is not None and request.thinking.type != "disabled":
        raise invalid(
            "messages", "messages: an answer cannot be begun where 'thinking' is enabled, which comes before it."
        )


def renamed(error: ApiError) -> ApiError:
    """The error that a chat was refused with, with the field as it is called here. Of a prompt that is too long it begins
    with Anthropic's words, by which agents know that a conversation has to be made shorter."""
    if error.param is not None and error.param.startswith("messages[") and IMAGE in error.message:
        # A chat's messages are counted otherwise.
        error.message = error.message.replace(f"'{error.param}'", "'messages'").replace(f"'{IMAGE}'", "'image'")
        error.param = "messages"
    if error.param in _NAMES:
        error.message = error.message.replace(f"'{error.param}'", f"'{_NAMES[error.param]}'")
        error.param = _NAMES[error.param]
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        numbers = "" if error.too_long is None else "{} tokens > {} maximum. ".format(*error.too_long)
        error.message = f"prompt is too long: {numbers}{error.message}"
    return error


def _generation(request: MessageRequest) -> dict[str, Any]:
    wanted = request.output_format or (request.output_config.format if request.output_config is not None else None)
    effort = request.output_config.effort if request.output_config is not None else None
    return {
        "max_completion_tokens": request.max_tokens,
        "fit_max_tokens": True,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id if request.metadata is not None else None,
        "reasoning_effort": effort,
        "response_format": None
        if wanted is None
        else {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}},
    }


def _tool(tool: MessageTool, place: int) -> dict[str, Any]:
    if tool.name is None:
        raise invalid(f"tools[{place}].name", f"Missing required parameter: 'tools[{place}].name'.")
    description, schema = client_tool(tool.type) or (tool.description, tool.input_schema)
    check_types(schema, f"tools[{place}].input_schema")
    fields = {"name": tool.name, "description": description, "parameters": schema, "strict": tool.strict}
    return {"type": "function", "function": fields}


def _choice(request: Prompted) -> Any:
    choice = request.tool_choice
    if choice is None or choice.type != "tool":
        return None if choice is None else {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "Missing required parameter: 'tool_choice.name'.")
    named = [tool for tool in request.tools or () if tool.name == choice.name]
    if named and all(tool.is_left_out for tool in named):
        return None
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: Prompted) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for i, message in enumerate(request.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _others(message, where)
    return messages


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    called = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks, where), "tool_calls": called}
    if reasoning := "\n".join(block.thinking or "" for block in blocks if block.type == "thinking"):
        message["reasoning_content"] = reasoning
    return message


def _others(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """What tools returned goes before the text beside it: it belongs to the calls of the message before."""
    assert not isinstance(message.content, str)
    results = [block for block in message.content if block.type == "tool_result"]
    for block in results:
        returned = _text(block.returned, where, is_result=True)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": returned}
    content = _content(message, where)
    if content or not results:
        yield {"role": message.role, "content": content}


def _content(message: InputMessage, where: str) -> str | list[dict[str, Any]]:
    """The text of a message; parts, where it has images."""
    assert not isinstance(message.content, str)
    if message.role != "user" or not any(block.type == "image" for block in message.content):
        return _text(message.content, where)
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        if block.type == "image":
            parts.append({"type": IMAGE, IMAGE: {"url": _url(block, f"{where}[{i}]")}})
        elif text := _text([block], where, first=i):
            parts.append({"type": "text", "text": text})
    return parts


def _url(block: Block, where: str) -> str:
    source = block.source if isinstance(block.source, Source) else Source()
    if source.type == "base64":
        if not source.media_type.startswith("image/"):
            param = f"{where}.source.media_type"
            raise invalid(param, f"Invalid value for '{param}': that of an image (image/png) is expected.")
        return f"data:{source.media_type};base64,{source.data}"
    if source.type == "url":
        return source.url
    raise invalid(f"{where}.source", f"Invalid value for '{where}.source': an image's type is 'base64' or 'url'.")


def _text(content: str | list[Block], where: str, *, is_result: bool = False, first: int = 0) -> str:
    """The text of the blocks, a line break between any two. Raises `ApiError` for blocks of what is not served; in what a
    tool returned (`is_result`) a text stands for them. `first`: the number of the first block."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content, first):
        written = _written(block, f"{where}[{i}]", is_result=is_result)
        if written is not None:
            texts.append(written)
        elif is_result and block.type in UNSEEN:
            texts.append(unseen(block.type))
        elif block.type not in _LEFT_OUT and not block.type.endswith(SERVER_RESULT):
            raise not_served(f"{where}[{i}].type", block.type)
    return "\n".join(texts)


def _written(block: Block, where: str, *, is_result: bool) -> str | None:
    """The text of a block; None: it has none."""
    if block.type == "text":
        return block.text
    source = block.source
    if block.type == "search_result" and isinstance(source, str):
        content = _text(block.returned, f"{where}.content", is_result=is_result)
        return "\n".join(filter(None, (block.title, source, content)))
    if block.type == "document" and isinstance(source, Source) and source.type in ("text", "content"):
        content = _text(source.content or source.data, f"{where}.source.content", is_result=is_result)
        return "\n".join(filter(None, (block.title, content)))
    return None
