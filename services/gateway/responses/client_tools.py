"""Tools that OpenAI defines and the client runs, `local_shell`, `shell` and `apply_patch`: functions to the model, whose
calls are items of their own. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.openai.conversations import arguments_object
from services.gateway.responses.messages import InputItem, OutputItem, ResponseTool, ShellOutput, TextPart

_TIMEOUT = {"type": "integer", "description": "Most milliseconds that it may take."}


@dataclass(frozen=True, slots=True)
class ClientTool:
    name: str
    """Type of the tool; the model knows it by that name."""
    item: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    """Type of the items of its calls."""
    id_prefix: str
    field: Literal["action", "operation"]
    """Field of an item that says what to do."""
    description: str
    parameters: dict[str, Any]
    written: Callable[[dict[str, Any]], dict[str, Any]]
    """Makes the field's value of a call's arguments; of none it makes that of a call that has just begun."""

    def begin(self, item: OutputItem) -> None:
        setattr(item, self.field, self.written({}))

    def finish(self, item: OutputItem, arguments: str) -> None:
        setattr(item, self.field, self.written(arguments_object(arguments)))

    def function(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": fields}

    def arguments(self, item: InputItem) -> str:
        """Arguments of a call that a client sends back, as JSON."""
        value = {name: one for name, one in (getattr(item, self.field) or {}).items() if one not in (None, {})}
        if self.field == "action":
            value.pop("type", None)
        return json.dumps(value, ensure_ascii=False)


def _parameters(required: list[str], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _texts(value: Any) -> list[str]:
    return [one if isinstance(one, str) else json.dumps(one) for one in value] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _exec(arguments: dict[str, Any]) -> dict[str, Any]:
    command = arguments.get("command")
    known = {
        "timeout_ms": _whole(arguments.get("timeout_ms")),
        "working_directory": _text(arguments.get("working_directory")),
    }
    return {
        "type": "exec",
        "command": ["bash", "-lc", command] if isinstance(command, str) else _texts(command),
        "env": {},
        **{name: value for name, value in known.items() if value is not None},
    }


def _shell(arguments: dict[str, Any]) -> dict[str, Any]:
    commands = arguments.get("commands")
    return {
        "commands": [commands] if isinstance(commands, str) else _texts(commands),
        "timeout_ms": _whole(arguments.get("timeout_ms")),
        "max_output_length": _whole(arguments.get("max_output_length")),
    }


def _patch(arguments: dict[str, Any]) -> dict[str, Any]:
    kind = arguments.get("type")
    operation = {"type": kind if kind in _OPERATIONS else "update_file", "path": _text(arguments.get("path")) or ""}
    return operation if kind == "delete_file" else {**operation, "diff": _text(arguments.get("diff")) or ""}


_OPERATIONS = ("create_file", "update_file", "delete_file")
_TOOLS = (
    ClientTool(
        "local_shell",
        "local_shell_call",
        "lsh_",
        "action",
        "Runs a program on the user's machine, and returns what it prints.",
        _parameters(
            ["command"],
            command={
                "type": "array",
                "items": {"type": "string"},
                "description": 'The program and its arguments. A line for a shell is ["bash", "-lc", "LINE"].',
            },
            working_directory={"type": "string", "description": "The folder to run it in."},
            timeout_ms=_TIMEOUT,
        ),
        _exec,
    ),
    ClientTool(
        "shell",
        "shell_call",
        "sh_",
        "action",
        "Runs commands in a shell, and returns what each prints.",
        _parameters(
            ["commands"],
            commands={"type": "array", "items": {"type": "string"}, "description": "The commands, each a line."},
            timeout_ms=_TIMEOUT,
            max_output_length={"type": "integer", "description": "Most characters to return of what they print."},
        ),
        _shell,
    ),
    ClientTool(
        "apply_patch",
        "apply_patch_call",
        "apc_",
        "operation",
        "Creates, changes or deletes one file.",
        _parameters(
            ["type", "path"],
            type={"type": "string", "enum": list(_OPERATIONS), "description": "What to do."},
            path={"type": "string", "description": "The file."},
            diff={
                "type": "string",
                "description": "With create_file: the lines of the file, each behind a `+`. With update_file: one or more "
                "parts, each a line `@@` (behind it, where the place is not clear otherwise, a line of the file that comes "
                "before) and then lines of the file: those that stay behind a space, those that go behind a `-`, new ones "
                "behind a `+`.",
            },
        ),
        _patch,
    ),
)
_BY_TYPE = {tool.name: tool for tool in _TOOLS}
_BY_ITEM = {tool.item: tool for tool in _TOOLS}
_OUTPUT = "_output"


def client_tool(tool: ResponseTool) -> ClientTool | None:
    """None: it is no such tool, or OpenAI runs it: a shell in a container."""
    is_remote = tool.type == "shell" and tool.environment is not None and tool.environment.get("type") != "local"
    return None if is_remote else _BY_TYPE.get(tool.type)


def tool_of_item(item_type: str) -> ClientTool | None:
    """The tool whose calls are items of this type."""
    return _BY_ITEM.get(item_type)  # type: ignore[call-overload, no-any-return]


def is_client_result(item_type: str) -> bool:
    """Whether items of this type have what such a tool returned."""
    return item_type.endswith(_OUTPUT) and tool_of_item(item_type.removesuffix(_OUTPUT)) is not None


def returned_text(item: InputItem) -> str:
    """What the tool of such an item returned, as a text."""
    text = item.output or ""
    if not isinstance(text, str):
        parts = "".join(one.shown for one in text if isinstance(one, TextPart))
        text = parts or "\n".join(filter(None, (_printed(one) for one in text if isinstance(one, ShellOutput))))
    return f"It failed.\n{text}" if text and item.status == "failed" else text or item.status or ""


def _printed(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = ""
    if outcome is not None and outcome.type == "timeout":
        ended = "It took too long, and was ended."
    elif outcome is not None and outcome.exit_code is not None:
        ended = f"Exit code: {outcome.exit_code}"
    return "\n".join(filter(None, (output.stdout.rstrip("\n"), output.stderr.rstrip("\n"), ended)))
