"""Tools that Anthropic defines and the client runs. A request gives their type and no schema, which Anthropic's models know
without; other models are told of them as functions. Pure."""

from __future__ import annotations

import re
from typing import Any

_PATH = {"type": "string", "description": "Absolute path of a file or folder."}
_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "With view, of a file: first and last line to show, counted from 1; -1 as the last is the end.",
}
_FILE_TEXT = {"type": "string", "description": "With create: the text of the file."}
_OLD_STR = {
    "type": "string",
    "description": "With str_replace: the text to replace, exactly as in the file, and there once.",
}
_NEW_STR = {"type": "string", "description": "With str_replace: the text that replaces it."}
_INSERT_LINE = {
    "type": "integer",
    "description": "With insert: the number of the line behind which the text goes; 0 is the beginning of the file.",
}
_INSERT_TEXT = {"type": "string", "description": "With insert: the text to insert."}
_TEXT_FIELDS = {
    "path": _PATH,
    "view_range": _VIEW_RANGE,
    "file_text": _FILE_TEXT,
    "old_str": _OLD_STR,
    "new_str": _NEW_STR,
    "insert_line": _INSERT_LINE,
}


def _schema(fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


_BASH = (
    "Runs a command in a bash shell, and returns what it prints. The shell stays the same from call to call: its folder and "
    "variables are kept. Commands cannot ask for input.",
    _schema(
        {
            "command": {"type": "string", "description": "The command to run; needed unless `restart` is true."},
            "restart": {"type": "boolean", "description": "true: starts the shell anew."},
        },
        [],
    ),
)
_EDITS = "Shows files and folders, makes files, and changes files: replaces a text, or inserts one behind a line."
_EDITOR = (
    _EDITS,
    _schema(
        {"command": _commands("view", "create", "str_replace", "insert"), **_TEXT_FIELDS, "insert_text": _INSERT_TEXT},
        ["command", "path"],
    ),
)
_EDITOR_WITH_UNDO = (
    f"{_EDITS} `undo_edit` takes the last change of a file back.",
    _schema(
        {
            "command": _commands("view", "create", "str_replace", "insert", "undo_edit"),
            **_TEXT_FIELDS,
            "new_str": {
                "type": "string",
                "description": "With str_replace: the text that replaces the old one; with insert: the text to insert.",
            },
        },
        ["command", "path"],
    ),
)
_MEMORY = (
    "Keeps notes in files below /memories, which stay from one conversation to the next: look there before you begin, and "
    "write down what later work needs.",
    _schema(
        {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_TEXT_FIELDS,
            "path": {"type": "string", "description": "Path below /memories; of each command but rename."},
            "insert_text": _INSERT_TEXT,
            "old_path": {"type": "string", "description": "With rename: the path so far."},
            "new_path": {"type": "string", "description": "With rename: the path from now on."},
        },
        ["command"],
    ),
)
_KINDS = {"bash": _BASH, "text_editor": _EDITOR, "memory": _MEMORY}
_TYPE = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_WITH_UNDO_BEFORE = "20250429"
"""The version of the text editor from which on there is no `undo_edit`, and `insert` has a field of its own."""


def client_tool(kind: str | None) -> tuple[str, dict[str, Any]] | None:
    """Description and schema of the arguments of a tool of this type; None: it is no such tool. A version that came later
    is taken for the last one known."""
    match = _TYPE.fullmatch(kind or "")
    if match is None:
        return None
    if match[1] == "text_editor" and match[2] < _WITH_UNDO_BEFORE:
        return _EDITOR_WITH_UNDO
    return _KINDS[match[1]]
