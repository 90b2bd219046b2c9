"""The tools of a chat request, and whether and how the model must call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.gateway.http.errors import invalid
from services.gateway.openai.schemas import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionDefinition,
    NamedCustomTool,
    NamedTool,
    Tool,
)
from services.gateway.openai.structured import Grammar, check_types, encoded, lark_grammar
from services.gateway.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    tools: tuple[Tool, ...]
    """Tools that may be called: one, where one is named."""
    all_tools: tuple[Tool, ...]
    """Tools that the model is told of."""
    is_required: bool
    """By `required` or by name."""
    is_parallel: bool
    """Several calls in one output."""

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        """Schemas of the arguments of tools that may be called, by name."""
        return {tool.function.name: tool.function.parameters for tool in self.tools}

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools whose calls bring a text."""
        return frozenset(tool.function.name for tool in self.tools if tool.type == "custom")

    def definitions(self) -> list[dict[str, Any]]:
        """Definitions as templates are given them."""
        return [plain_tool(tool) for tool in self.all_tools]

    def grammar_with(
        self, wanted: Grammar | None, spelled: ToolFormat, special_token_id: Callable[[str], int | None]
    ) -> Grammar | None:
        """The grammar that makes the model call, or answer as is `wanted` where it need not. None: it may do as it
        likes. Raises `ApiError`."""
        if wanted is None and not self.is_required:
            return None
        functions = [tool.function for tool in self.tools]
        answer = None if self.is_required or wanted is None else wanted.schema
        source = spelled.grammar(functions, self.is_parallel, special_token_id, answer)
        return encoded(lark_grammar(source), "tools", "tools")


def plain_tool(tool: Tool) -> dict[str, Any]:
    """Without what is absent, in the order that templates print."""
    function: FunctionDefinition = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def tool_use_of(request: ChatRequest) -> ToolUse | None:
    """None: the model is told of none. Raises `ApiError` 400."""
    tools, choice = tuple(request.tools or ()), request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
        return None
    for number, tool in enumerate(tools):
        check_types(tool.function.parameters, f"tools[{number}].function.parameters")
    ((name, count),) = Counter(tool.function.name for tool in tools).most_common(1)
    if count > 1:
        raise invalid("tools", f"'tools' has two functions of the name '{name}'.")
    if choice == "none":
        return None
    chosen, is_required = tools, choice == "required" or isinstance(choice, NamedTool | NamedCustomTool)
    named: list[NamedTool | NamedCustomTool] = [choice] if isinstance(choice, NamedTool | NamedCustomTool) else []
    if isinstance(choice, AllowedToolsChoice):
        named, is_required = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
    if named:
        by_name = {tool.function.name: tool for tool in tools}
        names = dict.fromkeys(one.function.name for one in named)
        if missing := next((name for name in names if name not in by_name), None):
            raise invalid("tool_choice", f"'tool_choice' names '{missing}', which 'tools' has not.")
        chosen = tuple(by_name[name] for name in names)
    return ToolUse(
        tools=chosen,
        all_tools=tools,
        is_required=is_required,
        is_parallel=request.parallel_tool_calls is not False and not isinstance(choice, NamedTool | NamedCustomTool),
    )
