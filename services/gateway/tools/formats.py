"""The registry of formats in which models call tools, one for each family. A new one is an entry of `FORMATS`: how its
templates are recognised, who parses it (parsers.py), and how its calls are spelled, which is what outputs are made to follow
under `tool_choice` required or a named function."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.schemas import FunctionDefinition
from services.gateway.structured import json_grammar, lark_text
from services.gateway.tools.parsers import BareParser, MarkedParser, TaggedParser, ToolParser

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ALPHANUMERIC = string.ascii_letters + string.digits


def _long_id(seed: str) -> str:
    return "call_" + hashlib.sha256(seed.encode()).hexdigest()[:24]


def _nine_characters(seed: str) -> str:
    """Mistral's templates refuse others."""
    digest = hashlib.sha256(seed.encode()).digest()
    return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest[:9])


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    name: str
    suits: Callable[[str], bool]
    """Whether this is how a chat template, given its source, has calls written."""
    parser: Callable[[Collection[str]], ToolParser]
    """Of one output, given the names of the tools."""
    begin: str = ""
    """Before the first call."""
    head: str = '{"name": "NAME", "arguments": '
    """Of a call, up to its arguments; NAME stands for the name."""
    tail: str = "}"
    separator: str
    end: str = ""
    marks: tuple[str, ...] = ()
    """That may be special tokens; the parser sees them all the same."""
    new_id: Callable[[str], str] = _long_id
    """Of a call, given what it alone is known by: whoever makes the answer again makes the same id."""

    def grammar(
        self,
        functions: Sequence[FunctionDefinition],
        is_parallel: bool,
        special_token_id: Callable[[str], int | None],
        answer: dict[str, Any] | None = None,
    ) -> str:
        """In Lark: at least one call, at most one unless `is_parallel`. `answer`: or else JSON of this schema, as llguidance
        takes it."""

        def literal(text: str) -> str:
            pieces = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text) if self.marks else [text]
            ids = [special_token_id(piece) if piece in self.marks else None for piece in pieces]
            return " ".join(
                lark_text(piece) if number is None else f"<[{number}]>"
                for piece, number in zip(pieces, ids, strict=True)
                if piece
            )

        more = f" ({literal(self.separator)} call)*" if is_parallel else ""
        rules = [
            "start: calls" + ("" if answer is None else f" | %json {json.dumps(answer)}"),
            f"calls: {literal(self.begin)} call{more} {literal(self.end)}",
            "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        ]
        for number, function in enumerate(functions):
            schema = function.parameters or NO_PARAMETERS
            if "type" not in schema:
                schema = {**schema, "type": "object"}
            arguments = json.dumps(json_grammar(schema, is_lenient=not function.strict)["json_schema"])
            head = literal(self.head.replace("NAME", function.name))
            rules.append(f"call_{number}: {head} %json {arguments} {literal(self.tail)}")
        return "\n".join(rules)


HERMES = ToolFormat(
    name="hermes",
    suits=lambda template: "<tool_call>" in template and "<function=" not in template,
    parser=TaggedParser,
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    marks=("<tool_call>", "</tool_call>"),
)
"""Nous Hermes 2 Pro and later, Qwen2.5, Qwen3."""
LLAMA3 = ToolFormat(
    name="llama3",
    suits=lambda template: "<|python_tag|>" in template or ('"parameters": ' in template and "<|eot_id|>" in template),
    parser=lambda names: BareParser(names, "<|python_tag|>"),
    head='{"name": "NAME", "parameters": ',
    separator="; ",
    marks=("<|python_tag|>",),
)
"""Llama 3.1 to 3.3."""
MISTRAL = ToolFormat(
    name="mistral",
    suits=lambda template: "[TOOL_CALLS]" in template and "[ARGS]" not in template,
    parser=MarkedParser,
    begin="[TOOL_CALLS][",
    separator=", ",
    end="]",
    marks=("[TOOL_CALLS]",),
    new_id=_nine_characters,
)
"""Mistral 7B v0.3, Nemo, Mixtral 8x22B, Mistral Small to 3.1."""
MISTRAL_NAMED = ToolFormat(
    name="mistral-named",
    suits=lambda template: "[TOOL_CALLS]" in template and "[ARGS]" in template,
    parser=MarkedParser,
    begin="[TOOL_CALLS]",
    head="NAME[ARGS]",
    tail="",
    separator="[TOOL_CALLS]",
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    new_id=_nine_characters,
)
"""Mistral Small 3.2, Magistral, Devstral."""
PLAIN = ToolFormat(
    name="json",
    suits=lambda template: True,
    parser=BareParser,
    begin="[",
    separator=", ",
    end="]",
)
"""Of models with a template of none of these: it tells them of no tools, so `INSTRUCTIONS` do."""

FORMATS: dict[str, ToolFormat] = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, PLAIN)}
"""By name, in the order in which a template is tried."""

INSTRUCTIONS = (
    "You can call these functions, each given as JSON:\n{tools}\n"
    'To call some, answer with nothing but a JSON list of calls: [{{"name": "...", "arguments": {{...}}}}]'
)


def format_of(template: str, name: str = "") -> ToolFormat:
    """That a chat template wants, or the one of that name."""
    return FORMATS[name] if name else next(one for one in FORMATS.values() if one.suits(template))


def with_instructions(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows no tools: they are told of in the first message, and calls and results are plain text."""
    plain = [_plain(message) for message in messages]
    told = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    return [{**plain[0], "content": f"{told}\n\n{plain[0]['content']}"}, *plain[1:]]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    if not message.get("tool_calls"):
        return message
    calls = [call.get("function", call) for call in message["tool_calls"]]
    written = [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls]
    text = json.dumps(written, ensure_ascii=False)
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], text)))}
