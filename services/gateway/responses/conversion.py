"""Conversion of a request of the Responses API, and the conversation it continues, to one of the chat API. Pure."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.conversations import check_parts
from services.gateway.openai.parsing import Options
from services.gateway.openai.schemas import CUSTOM_ARGUMENT, IMAGE, ChatRequest
from services.gateway.responses.client_tools import is_client_result, returned_text, tool_of_item
from services.gateway.responses.messages import (
    NEEDED,
    Conversed,
    InputItem,
    OutputItem,
    ResponseObject,
    ResponseRequest,
    ResponseTool,
    ShownItem,
    TextFormat,
    TextOptions,
    TextPart,
)
from services.gateway.responses.tools import called_tools, chat_choice, chat_name
from services.gateway.streams.generation import Prompt

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Names of fields, by what they are called in a chat."""


def items_of(request: Conversed) -> list[InputItem]:
    """Input items of a request; those of hosted tools are left out, and references stand for their items. Raises `ApiError`
    400."""
    if request.input is None:
        if request.previous_response_id is None:
            raise invalid("input", "Missing required parameter: 'input'.")
        return []
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    for index, item in enumerate(request.input):
        needed = NEEDED.get(item.type)
        if needed is None and not item.type.endswith(_HOSTED_ITEMS):
            param = f"input[{index}].type"
            raise invalid(param, f"Invalid value for '{param}': '{item.type[:100]}' is not {', '.join(NEEDED)}.")
        if item.type in _BY_ID and item.id is not None:
            needed = tuple(name for name in needed or () if name != "call_id")
        if missing := next((name for name in needed or () if getattr(item, name) is None), None):
            param = f"input[{index}].{missing}"
            raise invalid(param, f"Missing required parameter: '{param}'.")
        if isinstance(item.content, list):
            _check_parts(item, item.content, f"input[{index}].content")
    return [
        _unsealed(item, f"input[{index}].encrypted_content")
        for index, item in enumerate(request.input)
        if item.type in NEEDED
    ]


def _check_parts(item: InputItem, parts: Sequence[TextPart], param: str) -> None:
    """Raises `ApiError` 400."""
    for i, part in enumerate(parts):
        if part.type != _IMAGE or item.role != "user":
            check_parts([part], param, first=i)
        elif part.image_url is None:
            where = f"{param}[{i}].{IMAGE}"
            raise invalid(where, f"Missing required parameter: '{where}'; files are not read as images.")


_IMAGE = "input_image"
_BY_ID = ("local_shell_call", "local_shell_call_output")
"""Items that may have an id in place of `call_id`; of a result it is the id of either the call or its item."""
_COMPACTED = ("compaction", "compaction_summary")
_HOSTED_ITEMS = (
    "program",
    "program_output",
    "_call",
    "_call_output",
    "_output",
    "_list_tools",
    "_approval_request",
    "_approval_response",
)
"""How the types end of items of tools that OpenAI runs itself."""


Sealed = Literal["tideway-summary", "tideway-reasoning"]


def sealed(text: str, kind: Sealed) -> str:
    """`encrypted_content`. What OpenAI encrypts is here the text itself, spelled so that clients do not take it for text."""
    return f"{kind}:{base64.urlsafe_b64encode(text.encode()).decode()}"


def _opened(item: InputItem, kind: Sealed) -> str | None:
    """What was sealed; None: this server has not made it."""
    mark, _, coded = (item.encrypted_content or "").partition(":")
    with contextlib.suppress(ValueError):
        if mark == kind:
            return base64.b64decode(coded, "-_", validate=True).decode()
    return None


def _unsealed(item: InputItem, param: str) -> InputItem:
    """What a compaction says to the model, and reasoning whose text the client keeps back; other items as they are. Raises
    `ApiError` 400 for a compaction that another server made; its reasoning is left as it is, which may have a summary."""
    if item.type in _COMPACTED:
        summary = _opened(item, "tideway-summary")
        if summary is None:
            raise invalid(param, f"'{param}' was not made by this server, which therefore cannot read it.")
        return InputItem(role="user", content=f"A summary of the conversation so far:\n{summary}")
    if item.type == "reasoning" and not item.content and (text := _opened(item, "tideway-reasoning")):
        return InputItem("reasoning", content=[TextPart("reasoning_text", text)])
    return item


def tools_of(request: ResponseRequest, items: Iterable[InputItem]) -> list[ResponseTool] | None:
    """Those of the request, and those that its conversation brings. Raises `ApiError` 400."""
    added: list[ResponseTool] = []
    for item in items:
        if item.type == "additional_tools":
            try:
                added += msgspec.convert(item.tools, list[ResponseTool])
            except msgspec.ValidationError as error:
                raise invalid("input", f"The tools of an additional_tools item cannot be read: {error}.") from None
    return [*(request.tools or ()), *added] if added else request.tools


def items_of_output(output: Iterable[OutputItem]) -> list[InputItem]:
    """Output items as they stand in the conversation of the next request."""
    found = []
    for item in output:
        text = "".join(part.text or "" for part in item.content or ())
        if item.type == "message":
            found.append(InputItem(role="assistant", content=text))
        elif item.type == "reasoning":
            found.append(InputItem("reasoning", content=[TextPart("reasoning_text", text)]))
        else:
            found.append(
                InputItem(
                    item.type,
                    id=item.id,
                    call_id=item.call_id or None,
                    name=item.name or None,
                    arguments=item.arguments or None,
                    namespace=item.namespace or None,
                    input=None if item.input is msgspec.UNSET else item.input,
                    action=item.action or None,
                    operation=item.operation or None,
                )
            )
    return found


def shown_items(response_id: str, items: Sequence[InputItem]) -> list[ShownItem]:
    """Items as `GET .../input_items` shows them, each with an id."""
    return [_shown(f"{_ITEM_PREFIXES.get(item.type, 'item')}_{response_id}_{i}", item) for i, item in enumerate(items)]


_ITEM_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "reasoning": "rs",
}
_SHOWN_FIELDS = (
    "call_id",
    "name",
    "namespace",
    "arguments",
    "input",
    "output",
    "max_output_length",
    "action",
    "operation",
)


def _shown(item_id: str, item: InputItem) -> ShownItem:
    content = item.content
    if isinstance(content, str):
        content = [TextPart("output_text" if item.role == "assistant" else "input_text", content)]
    fields = {
        "status": item.status or "completed",
        "role": item.role,
        "content": content,
        "summary": (item.summary or []) if item.type == "reasoning" else None,
        **{name: getattr(item, name) for name in _SHOWN_FIELDS},
    }
    return ShownItem(id=item_id, type=item.type, **{name: value for name, value in fields.items() if value is not None})


def chat_request(request: ResponseRequest, items: Sequence[InputItem]) -> ChatRequest:
    """`items`: the whole conversation. Raises `ApiError` 400."""
    called = called_tools(request.tools)
    for name in ("conversation", "prompt"):
        if getattr(request, name):
            raise invalid(name, f"'{name}' is not supported by this server.", "unsupported_value")
    wants_logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    fields = {
        "model": request.model or None,
        "messages": _messages(request.instructions, items),
        "stream": request.stream,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": wants_logprobs,
        "top_logprobs": request.top_logprobs,
        "response_format": _format(request.text.format if request.text is not None else None),
        "tools": [one.function for one in called],
        "tool_choice": chat_choice(request.tool_choice, called),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "parallel_tool_calls": request.parallel_tool_calls,
        "user": request.user,
        "service_tier": request.service_tier,
        "ttft_ms": request.ttft_ms,
        "tpot_ms": request.tpot_ms,
        "cache_salt": request.cache_salt,
        "seed": request.seed,
    }
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid("input", f"{error}.") from None


def opened_response(
    request: ResponseRequest, response_id: str, created_s: int, model: str, options: Options, prompts: Sequence[Prompt]
) -> ResponseObject:
    """The answer before its first item. `model`: as the client calls it."""
    sampling = prompts[0].sampling
    return ResponseObject(
        id=response_id,
        created_at=created_s,
        status="in_progress",
        instructions=request.instructions,
        include=request.include or msgspec.UNSET,
        max_output_tokens=request.max_output_tokens,
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        background=bool(request.background),
        store=request.store is not False,
        temperature=sampling.temperature,
        text=request.text or TextOptions(TextFormat("text")),
        reasoning=request.reasoning,
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=options.num_top_logprobs or 0,
        top_p=sampling.top_p if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
        service_tier=options.service_tier or "default",
    )


def renamed(error: ApiError) -> ApiError:
    """The error that a chat was refused with, with the field as it is called here."""
    if error.param is not None and error.param.startswith("messages["):
        # A chat's messages are counted otherwise.
        error.message = error.message.replace(f"'{error.param}'", "'input'").replace(f"'{IMAGE}'", f"'{_IMAGE}'")
        error.param = "input"
    if error.param in NAMES:
        error.message = error.message.replace(f"'{error.param}'", f"'{NAMES[error.param]}'")
        error.param = NAMES[error.param]
    return error


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.shown for part in content or ())


def _content(content: str | list[TextPart] | None) -> str | list[dict[str, Any]]:
    """The text of a message; parts, where it has images."""
    if not isinstance(content, list) or not any(part.type == _IMAGE for part in content):
        return _text(content)
    return [
        {"type": IMAGE, IMAGE: {"url": part.image_url, "detail": part.detail}}
        if part.type == _IMAGE
        else {"type": "text", "text": part.shown}
        for part in content
    ]


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Calls that follow each other (or their message) are one message's, and so is the reasoning before them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    reasoning, called = "", dict[str, str]()
    for item in items:
        if item.type == "additional_tools":
            continue
        if item.type == "reasoning":
            reasoning = "\n".join(filter(None, (reasoning, _text(item.content) or _text(item.summary))))
            continue
        if item.type == "message":
            messages.append({"role": item.role, "content": _content(item.content)})
        elif item.type in ("function_call", "custom_tool_call") or tool_of_item(item.type) is not None:
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
            if item.id is not None:
                called[item.id] = item.call_id or item.id
        else:
            content = returned_text(item) if is_client_result(item.type) else _text(item.output)
            call_id = item.call_id or called.get(item.id or "", item.id)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _call(item: InputItem) -> dict[str, Any]:
    arguments = item.arguments
    if item.type == "custom_tool_call":
        arguments = json.dumps({CUSTOM_ARGUMENT: item.input}, ensure_ascii=False)
    name = item.name or ""
    if (client := tool_of_item(item.type)) is not None:
        name, arguments = client.name, client.arguments(item)
    function = {"name": chat_name(name, item.namespace), "arguments": arguments}
    return {"id": item.call_id or item.id, "type": "function", "function": function}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None:
        raise invalid("text.format.schema", "Missing required parameter: 'text.format.schema'.")
    schema = {"name": wanted.name, "description": wanted.description, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
