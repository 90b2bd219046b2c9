"""From a request of the Responses API, and the conversation it continues, to a request of the chat API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.errors import ApiError, invalid
from services.gateway.responses.messages import (
    FunctionTool,
    InputItem,
    NamedFunctionTool,
    OutputItem,
    ResponseRequest,
    TextFormat,
    TextPart,
)
from services.gateway.schemas import ChatRequest

LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Of fields: here by what they are called in a chat."""


def items_of(request: ResponseRequest) -> list[InputItem]:
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    for index, item in enumerate(request.input):
        if missing := next((name for name in _NEEDED[item.type] if getattr(item, name) is None), None):
            param = f"input[{index}].{missing}"
            raise invalid(param, f"Missing required parameter: '{param}'.")
    return request.input


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def items_of_output(output: Iterable[OutputItem]) -> list[InputItem]:
    """As they stand in the conversation of the next request."""
    found = []
    for item in output:
        if item.type == "function_call":
            call_id, name, arguments = (text or "" for text in (item.call_id, item.name, item.arguments))
            found.append(InputItem("function_call", call_id=call_id, name=name, arguments=arguments))
        else:
            found.append(InputItem(role="assistant", content="".join(part.text for part in item.content or ())))
    return found


def chat_request(request: ResponseRequest, items: Sequence[InputItem]) -> ChatRequest:
    """`items`: the whole conversation. Raises `ApiError` 400."""
    if request.truncation not in (None, "disabled"):
        raise invalid("truncation", "'truncation' is not supported by this server; it may be null, \"disabled\".")
    for name in ("background", "conversation", "prompt"):
        if getattr(request, name):
            raise invalid(name, f"'{name}' is not supported by this server.", "unsupported_value")
    wants_logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    fields = {
        "model": request.model,
        "messages": _messages(request.instructions, items),
        "stream": request.stream,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": wants_logprobs,
        "top_logprobs": request.top_logprobs,
        "response_format": _format(request.text.format if request.text is not None else None),
        "tools": [_tool(tool) for tool in request.tools or ()],
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "user": request.user,
        "service_tier": request.service_tier,
        "ttft_ms": request.ttft_ms,
        "tpot_ms": request.tpot_ms,
        "seed": request.seed,
    }
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid("input", f"{error}.") from None


def renamed(error: ApiError) -> ApiError:
    """That a chat was refused with, with the field as it is called here."""
    if error.param in _NAMES:
        error.message = error.message.replace(f"'{error.param}'", f"'{_NAMES[error.param]}'")
        error.param = _NAMES[error.param]
    return error


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Calls that follow each other (or their message) are one message's."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item.type == "message":
            messages.append({"role": item.role, "content": _text(item.content)})
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None:
        raise invalid("text.format.schema", "Missing required parameter: 'text.format.schema'.")
    schema = {"name": wanted.name, "description": wanted.description, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": fields}


def _choice(choice: str | NamedFunctionTool | None) -> Any:
    if isinstance(choice, NamedFunctionTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice
