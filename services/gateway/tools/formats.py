"""The registry of formats in which models call tools, one for each family. A new one is an entry of `FORMATS`: how its
templates are recognised, who parses it (parsers.py), and how its calls are spelled, which is what outputs are made to follow
under `tool_choice` required or a named function."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.openai.conversations import calls_as_text, joined
from services.gateway.openai.json_schemas.closing import closed
from services.gateway.openai.json_schemas.values import types_of
from services.gateway.openai.schemas import FunctionDefinition
from services.gateway.openai.structured import Grammar, behind, json_grammar, lark_text
from services.gateway.tools.harmony import MARKS as HARMONY_MARKS
from services.gateway.tools.harmony import HarmonyParser
from services.gateway.tools.keyed import KeyedMarks, KeyedParser, texts_of
from services.gateway.tools.parsers import BareParser, MarkedParser, SectionParser, TaggedParser, ToolParser
from services.gateway.tools.pythonic import MARKS as PYTHON_MARKS
from services.gateway.tools.pythonic import PythonicParser
from services.gateway.tools.reasoning import Opening, ReasoningFormat
from shared.plugins import Registry, installed

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
    """Makes the parser of one output, given the names of the tools, with the schemas of their arguments where it is a
    mapping."""
    begin: str = ""
    """Before the first call."""
    head: str = '{"name": "NAME", "arguments": '
    """Head of a call, up to its arguments; NAME stands for the name."""
    tail: str = "}"
    separator: str
    end: str = ""
    marks: tuple[str, ...] = ()
    """Marks that may be special tokens; the parser sees them all the same."""
    new_id: Callable[[str], str] = _long_id
    """Makes the id of a call that the model gives none, out of what alone identifies it: whoever makes the answer again
    makes the same."""
    keyed: KeyedMarks | None = None
    """Marks around arguments, where a call has them; `head` and `tail` are of no account then."""
    is_pythonic: bool = False
    """Arguments are written as in a call in Python, between `head` and `tail`."""
    has_reasoning: bool = False
    """The parser finds it too."""
    may_be_parallel: bool = True
    """Several calls in one output."""
    answer_head: str = ""
    """Before an answer that is no call."""
    reasoning_head: str = ""
    reasoning_tail: str = ""
    """Around reasoning that the parser finds."""

    def literal(self, special_token_id: Callable[[str], int | None], *more: str) -> Callable[[str], str]:
        """How a text is spelled in Lark, given the special tokens. `more`: marks beside the format's own."""
        marks = (*self.marks, *more)

        def spelled(text: str) -> str:
            pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
            ids = [special_token_id(piece) if piece in marks else None for piece in pieces]
            return " ".join(
                lark_text(piece) if number is None else f"<[{number}]>"
                for piece, number in zip(pieces, ids, strict=True)
                if piece
            )

        return spelled

    def behind_reasoning(
        self,
        grammar: Grammar,
        reasoning: ReasoningFormat | None,
        opening: Opening,
        special_token_id: Callable[[str], int | None],
        *,
        has_calls: bool,
    ) -> Grammar:
        """The grammar of an output in which the model may reason before what follows `grammar`. `has_calls`: that spells all
        that comes after the reasoning. Raises `ApiError`."""
        head = "" if has_calls else self.answer_head
        if self.has_reasoning:
            literal = self.literal(special_token_id)
            reasoned = f"{literal(self.reasoning_head)} /(?s:.*)/ {literal(self.reasoning_tail)}"
            return behind(grammar, f"reasoning: ({reasoned})? {literal(head)}", "reasoning")
        if reasoning is None:
            return grammar
        literal = self.literal(special_token_id, reasoning.begin, reasoning.end)
        rules = reasoning.rules(opening, literal, lambda mark: special_token_id(mark) is not None)
        return behind(grammar, rules, "reasoning")

    def grammar(
        self,
        functions: Sequence[FunctionDefinition],
        is_parallel: bool,
        special_token_id: Callable[[str], int | None],
        answer: dict[str, Any] | None = None,
    ) -> str:
        """In Lark: at least one call, at most one unless `is_parallel`. `answer`: or else JSON of this schema, as llguidance
        takes it."""

        literal = self.literal(special_token_id)
        more = f" ({literal(self.separator)} call)*" if is_parallel and self.may_be_parallel else ""
        rules = [
            "start: calls" + ("" if answer is None else f" | {literal(self.answer_head)} %json {json.dumps(answer)}"),
            f"calls: {literal(self.begin)} call{more} {literal(self.end)}",
            "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        ]
        for number, function in enumerate(functions):
            schema = closed(function.parameters or NO_PARAMETERS)
            if "type" not in schema:
                schema = {**schema, "type": "object"}
            if self.keyed is not None:
                rules += _keyed_rules(self.keyed, function, schema, number, literal, special_token_id)
                continue
            if self.is_pythonic:
                rules += _pythonic_rules(function, schema, number, literal(self.head.replace("NAME", function.name)))
                continue
            head, number_mark, rest = self.head.replace("NAME", function.name).partition("NUMBER")
            spelled = f"{literal(head)} {'/[0-9]{1,4}/' if number_mark else ''} {literal(rest)}"
            rules.append(f"call_{number}: {spelled} %json {_json_of(schema, function)} {literal(self.tail)}")
        return "\n".join(rules)


def _json_of(schema: dict[str, Any], function: FunctionDefinition) -> str:
    return json.dumps(json_grammar(schema, "tools", None if function.strict else [])["json_schema"])


def _json_value(own: Any, schema: dict[str, Any], function: FunctionDefinition) -> str:
    """An argument's value in JSON, spelled in Lark. `own`: its schema within `schema`, that of all arguments."""
    named: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"%json {_json_of(own | named if isinstance(own, dict) else {}, function)}"


def _takes_any(schema: dict[str, Any]) -> bool:
    """Whether no argument is named, and any may be given."""
    return "properties" not in schema and schema.get("additionalProperties") is not False


def _keyed_rules(
    marks: KeyedMarks,
    function: FunctionDefinition,
    schema: dict[str, Any],
    number: int,
    literal: Callable[[str], str],
    special_token_id: Callable[[str], int | None],
) -> list[str]:
    """Rules of a call whose arguments stand between marks, in the schema's order; `call_<number>` is the first."""
    before, after = marks.around_value
    ends_in_token = special_token_id(marks.value_end) is not None
    text = f"/(?s:.*)/ {literal(after)}" if ends_in_token else ""
    required, parts, rules = schema.get("required") or [], [], []
    for place, (key, own) in enumerate((schema.get("properties") or {}).items()):
        rule = f"call_{number}_{place}"
        texts, spellings = texts_of(own, schema), []
        if texts:
            spellings.append((True, f"({' | '.join(map(lark_text, texts))}) {literal(after)}"))
        elif texts is not None:
            spellings.append((True, text or f"{rule}_text"))
            if not text:
                rules.append(f"{rule}_text[suffix={lark_text(after)}]: /(?s:.*)/")
        if texts is None or (marks.key_attribute and types_of(own, schema) != {"string"}):
            spellings.append((False, f"{_json_value(own, schema, function)} {literal(after)}"))
        marked = [
            f"{literal(marks.key_begin + key + marks.after_key(is_text=is_text) + before)} {value}"
            for is_text, value in spellings
        ]
        rules.append(f"{rule}: {' | '.join(marked)}")
        parts.append(rule if key in required else f"({rule})?")
    if _takes_any(schema):
        rule = f"call_{number}_any"
        value = text or f"{rule}_text"
        behind_key = literal(marks.after_key(is_text=True) + before)
        rules += [f"{rule}: {literal(marks.key_begin)} /[\\w.-]{{1,128}}/ {behind_key} {value}"]
        rules += [] if text else [f"{rule}_text[suffix={lark_text(after)}]: /(?s:.*)/"]
        parts.append(f"({rule})*")
    head = literal(f"{marks.name_begin}{function.name}{marks.name_end[0]}{marks.after_name}")
    return [f"call_{number}: {head} {' '.join(parts)} {literal(marks.call_end)}", *rules]


def _pythonic_rules(function: FunctionDefinition, schema: dict[str, Any], number: int, head: str) -> list[str]:
    """Rules of a call with keyword arguments in the schema's order; `call_<number>` is the first. An argument's rule `first`
    says what may come from there on where none is written yet, `more` where one is."""
    required, rules = schema.get("required") or [], []
    arguments = list((schema.get("properties") or {}).items())
    rule = f"call_{number}"
    rules.append(f'{rule}: {head} {rule}_first_0 ")"')
    for place, (key, own) in enumerate(arguments):
        value = _json_value(own, schema, function)
        if types_of(own, schema) == {"boolean"} and not own.keys() & {"const", "enum"}:
            value = '("True" | "False")'
        rules.append(f"{rule}_{place}: {lark_text(key + '=')} {value}")
        written = f"{rule}_{place} {rule}_more_{place + 1}"
        rules.append(f"{rule}_first_{place}: {written}" + ("" if key in required else f" | {rule}_first_{place + 1}"))
        rest = f'", " {rule}_{place}'
        rules.append(f"{rule}_more_{place}: {rest if key in required else f'({rest})?'} {rule}_more_{place + 1}")
    others = '""'
    if _takes_any(schema):
        one = f'/[A-Za-z_][A-Za-z0-9_]{{0,127}}/ "=" %json {_json_of({}, function)}'
        others = f'({one} (", " {one})*)?'
    rules.append(f"{rule}_first_{len(arguments)}: {others}")
    rules.append(f'{rule}_more_{len(arguments)}: ""')
    return rules


HERMES = ToolFormat(
    name="hermes",
    suits=lambda template: "<tool_call>" in template,
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
LLAMA4 = ToolFormat(
    name="llama4",
    suits=lambda template: "<|python_start|>" in template and '"parameters": ' in template,
    parser=PythonicParser,
    head='{"name": "NAME", "parameters": ',
    separator="",
    marks=PYTHON_MARKS,
)
"""Llama 4 with the template that came with it."""
PYTHONIC = ToolFormat(
    name="pythonic",
    suits=lambda template: "func_name1(" in template,
    parser=PythonicParser,
    begin="[",
    head="NAME(",
    tail=")",
    separator=", ",
    end="]",
    marks=PYTHON_MARKS,
    is_pythonic=True,
)
"""Llama 4 with its later template, and Llama 3.2."""
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
_CODER = KeyedMarks(
    begin="<tool_call>",
    end="</tool_call>",
    name_begin="<function=",
    name_end=(">",),
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    has_value_on_lines=True,
)
QWEN3_CODER = ToolFormat(
    name="qwen3-coder",
    suits=lambda template: "<tool_call>" in template and "<function=" in template,
    parser=lambda names: KeyedParser(names, _CODER),
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    keyed=_CODER,
)
"""Qwen3-Coder, Qwen3.5."""
_SEED = replace(_CODER, begin="<seed:tool_call>", end="</seed:tool_call>", has_value_on_lines=False)
SEED = ToolFormat(
    name="seed",
    suits=lambda template: "<seed:tool_call>" in template,
    parser=lambda names: KeyedParser(names, _SEED),
    begin="<seed:tool_call>\n",
    separator="\n</seed:tool_call>\n<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    marks=("<seed:tool_call>", "</seed:tool_call>"),
    keyed=_SEED,
)
"""Seed-OSS."""
_GLM = KeyedMarks(
    begin="<tool_call>",
    end="</tool_call>",
    name_end=("\n", "<arg_key>", "</tool_call>"),
    after_name="",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
)
GLM = ToolFormat(
    name="glm",
    suits=lambda template: "<arg_key>" in template,
    parser=lambda names: KeyedParser(names, _GLM),
    begin="<tool_call>",
    separator="</tool_call>\n<tool_call>",
    end="</tool_call>",
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    keyed=_GLM,
)
"""GLM-4.5 to 4.7."""
_MINIMAX = KeyedMarks(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    name_begin='<invoke name="',
    name_end=('">',),
    key_begin='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    call_end="</invoke>",
)
MINIMAX = ToolFormat(
    name="minimax",
    suits=lambda template: "<minimax:tool_call>" in template,
    parser=lambda names: KeyedParser(names, _MINIMAX),
    begin="<minimax:tool_call>\n",
    separator="\n",
    end="\n</minimax:tool_call>",
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
    keyed=_MINIMAX,
)
"""MiniMax-M2."""
_KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI = ToolFormat(
    name="kimi",
    suits=lambda template: "<|tool_calls_section_begin|>" in template,
    parser=lambda names: SectionParser(
        names,
        sections=_KIMI_MARKS[:2],
        call=_KIMI_MARKS[2:4],
        head=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.:-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        end=_KIMI_MARKS[4],
    ),
    begin="<|tool_calls_section_begin|>",
    head="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
    tail="<|tool_call_end|>",
    separator="",
    end="<|tool_calls_section_end|>",
    marks=_KIMI_MARKS,
)
"""Kimi K2, whose calls bring ids that its template wants back."""
_DEEPSEEK_MARKS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)


def _deepseek(name: str, suits: Callable[[str], bool], before: str, after: str, tail: str) -> ToolFormat:
    """`before`, `after`: what is spelled before and after the name of a call, in which SEP is the mark between."""
    sections, call, end = _DEEPSEEK_MARKS[:2], _DEEPSEEK_MARKS[2:4], _DEEPSEEK_MARKS[4]
    spelled = f"{call[0]}{before}NAME{after}".replace("SEP", call[1])
    lead = rf"\s*function\s*{call[1]}" if before else r"\s*"
    trail = r"\s*\n\s*(?:```(?:json)?)?" if before else rf"\s*{call[1]}"
    head = rf"{lead}(?P<name>[\w.-]+){trail}"
    return ToolFormat(
        name=name,
        suits=suits,
        parser=lambda names: SectionParser(names, sections=sections, call=call, head=head, end=end),
        begin=sections[0],
        head=spelled,
        tail=tail + end,
        separator="\n" if before else "",
        end=sections[1],
        marks=_DEEPSEEK_MARKS,
    )


DEEPSEEK_V3 = _deepseek(
    "deepseek-v3",
    lambda template: _DEEPSEEK_MARKS[0] in template and "```json" in template,
    "functionSEP",
    "\n```json\n",
    "\n```",
)
"""DeepSeek V3 and R1."""
DEEPSEEK_V31 = _deepseek("deepseek-v3.1", lambda template: _DEEPSEEK_MARKS[0] in template, "", "SEP", "")
"""DeepSeek V3.1."""


def _dsml(name: str, calls: str) -> ToolFormat:
    """`calls`: what the marks around all calls are called."""
    marks = KeyedMarks(
        begin=f"<\uff5cDSML\uff5c{calls}>",
        end=f"</\uff5cDSML\uff5c{calls}>",
        name_begin='<\uff5cDSML\uff5cinvoke name="',
        name_end=('">',),
        key_begin='<\uff5cDSML\uff5cparameter name="',
        key_attribute='" string="',
        key_end='">',
        value_end="</\uff5cDSML\uff5cparameter>",
        call_end="</\uff5cDSML\uff5cinvoke>",
    )
    return ToolFormat(
        name=name,
        suits=lambda template: "\uff5cDSML\uff5c" in template and f"{calls}>" in template,
        parser=lambda names: KeyedParser(names, marks),
        begin=marks.begin + "\n",
        separator="\n",
        end="\n" + marks.end,
        # The line break is none, but has to be read by itself: what comes after it may be a call, or the end.
        marks=("\uff5cDSML\uff5c", "\n"),
        keyed=marks,
    )


DEEPSEEK_V32 = _dsml("deepseek-v3.2", "function_calls")
"""DeepSeek V3.2, whose arguments say whether they are texts."""
DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls")
"""DeepSeek V4."""
HARMONY = ToolFormat(
    name="harmony",
    suits=lambda template: "<|channel|>" in template,
    parser=HarmonyParser,
    head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    tail="",
    separator="",
    marks=HARMONY_MARKS,
    has_reasoning=True,
    may_be_parallel=False,
    answer_head="<|channel|>final<|message|>",
    reasoning_head="<|channel|>analysis<|message|>",
    reasoning_tail="<|end|><|start|>assistant",
)
"""gpt-oss."""
PLAIN = ToolFormat(
    name="json",
    suits=lambda template: True,
    parser=BareParser,
    begin="[",
    separator=", ",
    end="]",
)
"""Format of models with a template of none of these: it tells them of no tools, so `INSTRUCTIONS` do."""

FORMATS: Registry[ToolFormat] = Registry(
    "tool format",
    "tideway.tool_formats",
    {
        one.name: one
        for one in (
            *(HARMONY, KIMI, DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, MINIMAX, SEED, GLM, QWEN3_CODER),
            *(HERMES, PYTHONIC, LLAMA4, LLAMA3, MISTRAL, MISTRAL_NAMED, PLAIN),
        )
    },
)
"""By name, in the order in which a template is tried; those of other packages go before them."""

INSTRUCTIONS = (
    "You can call these functions, each given as JSON:\n{tools}\n"
    'To call some, answer with nothing but a JSON list of calls: [{{"name": "...", "arguments": {{...}}}}]'
)


def format_of(template: str, name: str = "") -> ToolFormat:
    """The format that a chat template wants, or the one of that name. Raises `PluginError`."""
    if name:
        return FORMATS.find(name, _is_format)
    brought = (FORMATS.find(other, _is_format) for other in installed(FORMATS.group))
    return next(one for one in (*brought, *FORMATS.values()) if one.suits(template))


def _is_format(part: object) -> bool:
    return isinstance(part, ToolFormat)


def with_instructions(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: they are told of in the first message, and calls and results are plain
    text."""
    plain = calls_as_text(messages)
    told = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    return [{**plain[0], "content": joined(told, plain[0]["content"])}, *plain[1:]]
