"""Tools of the Responses API as functions of a chat, and back. Pure.

A chat's model knows functions. A namespace's tools become functions with its name before theirs, a custom tool one with a
text as its only argument, a tool that OpenAI defines and the client runs one of its name; tools that OpenAI runs itself are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.schemas import CUSTOM_ARGUMENT, custom_parameters
from services.gateway.openai.structured import check_types
from services.gateway.responses.client_tools import ClientTool, client_tool
from services.gateway.responses.messages import ResponseTool, ToolChoice

HOSTED_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Whatever follows, such as a date."""
_SEPARATOR = "__"


def _is_hosted(kind: str) -> bool:
    return kind.startswith(HOSTED_TOOLS)


def left_out(tools: Sequence[ResponseTool] | None) -> Iterator[str]:
    """Places of the tools that the model is not told of, and of skills."""
    for where, tool, _, client in _walk(tools):
        path = where.replace("[", ".").replace("]", "")
        if client is None and _is_hosted(tool.type):
            yield path
        elif tool.type == "shell" and (tool.environment or {}).get("skills"):
            yield f"{path}.environment.skills"


_OWN = ("function", "custom")


def _walk(
    tools: Sequence[ResponseTool] | None,
) -> Iterator[tuple[str, ResponseTool, str | None, ClientTool | None]]:
    """All tools with their places and namespaces, and what those are that OpenAI defines and the client runs: one whose
    name another tool has is left out."""
    found = list(_with_nested(tools, "tools", None))
    taken = {chat_name(tool.name or "", namespace) for _, tool, namespace in found if tool.type in _OWN}
    for where, tool, namespace in found:
        client = client_tool(tool)
        if client is not None and client.name in taken:
            client = None
        if client is not None:
            taken.add(client.name)
        yield where, tool, namespace, client


def _with_nested(
    tools: Sequence[ResponseTool] | None, param: str, namespace: str | None
) -> Iterator[tuple[str, ResponseTool, str | None]]:
    for i, tool in enumerate(tools or ()):
        yield f"{param}[{i}]", tool, namespace
        if tool.type == "namespace":
            yield from _with_nested(tool.tools, f"{param}[{i}].tools", chat_name(tool.name or "", namespace))


@dataclass(frozen=True, slots=True)
class Called:
    """What a function of a chat is here."""

    kind: Literal["function", "custom", "client"]
    name: str
    namespace: str | None
    function: dict[str, Any]
    """The tool, as a chat is told of it."""
    client: ClientTool | None = None
    """Its kind, of a tool that OpenAI defines and the client runs."""


def chat_name(name: str, namespace: str | None) -> str:
    """By which the model knows a tool."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_SEPARATOR) else namespace + _SEPARATOR + name


def called_tools(tools: Sequence[ResponseTool] | None) -> list[Called]:
    """Raises `ApiError` 400 for one of a kind that nobody knows, or without a name."""
    called = []
    for where, tool, namespace, client in _walk(tools):
        if client is not None:
            called.append(Called("client", client.name, None, client.function(), client))
            continue
        if _is_hosted(tool.type):
            continue
        if tool.type not in (*_OWN, "namespace"):
            known = ", ".join(HOSTED_TOOLS)
            raise invalid(
                f"{where}.type",
                f"Invalid value for '{where}.type': '{tool.type[:100]}' is not function, custom or namespace, nor a tool "
                f"that is left out ({known}).",
            )
        if tool.name is None:
            raise invalid(f"{where}.name", f"Missing required parameter: '{where}.name'.")
        if tool.type == "namespace":
            continue
        check_types(tool.parameters, f"{where}.parameters")
        is_custom = tool.type == "custom"
        fields = {
            "name": chat_name(tool.name, namespace),
            "description": _custom_description(tool) if is_custom else tool.description,
            "parameters": custom_parameters() if is_custom else tool.parameters,
            "strict": None if is_custom else tool.strict,
        }
        function = {"type": "function", "function": fields}
        called.append(Called("custom" if is_custom else "function", tool.name, namespace, function))
    return called


def _custom_description(tool: ResponseTool) -> str | None:
    """Description with the grammar of its input, which is not enforced."""
    definition = (tool.format or {}).get("definition")
    if not isinstance(definition, str):
        return tool.description
    return "\n\n".join(filter(None, (tool.description, f"'{CUSTOM_ARGUMENT}' follows this grammar:\n{definition}")))


def chat_choice(choice: str | ToolChoice | None, called: Sequence[Called]) -> Any:
    """`tool_choice` of a chat. A choice of what is left out is none. Raises `ApiError` 400."""
    if not isinstance(choice, ToolChoice):
        return choice if called or choice != "required" else None
    if choice.type in ("function", "custom"):
        if choice.name is None:
            raise invalid("tool_choice.name", "Missing required parameter: 'tool_choice.name'.")
        return _named(choice.name, choice.namespace, called)
    if choice.type == "allowed_tools":
        named = [
            _named(tool.name, tool.namespace, called)
            for tool in choice.tools or ()
            if tool.name is not None and not _is_hosted(tool.type)
        ]
        named += [each for tool in choice.tools or () if (each := _of_client(tool.type, called)) is not None]
        allowed = {"mode": choice.mode or "auto", "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed} if named else None
    if _is_hosted(choice.type):
        return _of_client(choice.type, called)
    raise _bad_choice(choice.type)


def _named(name: str, namespace: str | None, called: Sequence[Called]) -> dict[str, Any]:
    whole = chat_name(name, namespace)
    if namespace is None and not any(one.function["function"]["name"] == name for one in called):
        # One of a namespace may be named without it, where there is one only.
        found = [one.function["function"]["name"] for one in called if one.name == name]
        whole = found[0] if len(found) == 1 else whole
    return {"type": "function", "function": {"name": whole}}


def _of_client(kind: str, called: Sequence[Called]) -> dict[str, Any] | None:
    """The choice of a tool of this kind that the client runs; None: there is none."""
    is_there = any(one.client is not None and one.name == kind for one in called)
    return {"type": "function", "function": {"name": kind}} if is_there else None


def _bad_choice(kind: str) -> ApiError:
    return invalid("tool_choice.type", f"Invalid value for 'tool_choice.type': '{kind[:100]}' is no kind of tool.")
