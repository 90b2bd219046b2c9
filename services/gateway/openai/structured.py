"""Grammars for structured output, from the request's fields.

Fields as in OpenAI's API (`response_format`) and vLLM's (`structured_outputs`, and `guided_*` of before). A grammar travels
as llguidance takes it, in JSON; whether it can be followed is found out in a process of `text.pool`, since a grammar is a
program of whoever sent it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.gateway.http.errors import invalid
from services.gateway.openai.json_schemas.preparing import prepared
from services.gateway.openai.json_schemas.shortfalls import SchemaError
from services.gateway.openai.json_schemas.types import KNOWN, unknown_type
from services.gateway.openai.schemas import (
    MAX_NESTING,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    is_nested_deep,
)

MAX_GRAMMAR_BYTES = 128 * 1024
"""It travels with the request."""

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Most bytes of a schema as it came, with descriptions and other remarks that its grammar is without."""

JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON's spacing as Python's `json.dumps` writes it and most models were trained to: where any white space may come, small
models write nothing else."""

EBNF = "ebnf_grammar"
"""Kind of grammars as llama.cpp and xgrammar write them (`root ::= ...`)."""
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output follows."""

    text: str
    """Grammar as llguidance takes it, but for EBNF (`as_lark`)."""
    kind: str
    """json, regex, choice, grammar or tools: a label of metrics."""
    param: str
    """The field that asks for it."""
    schema: dict[str, Any] | None = None
    """Schema, for a grammar of JSON, as llguidance takes it."""
    left_out: tuple[str, ...] = ()
    """Keywords of the client's schema, with their places, that it does not enforce."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes of a message."""
        return len(self.text.encode())


def json_grammar(
    schema: Any, param: str, left_out: list[str] | None = None, *, whitespace: str | None = None
) -> dict[str, Any]:
    """Grammar of values of a JSON schema. `param`: the field at fault where it cannot be had. `left_out`: takes the names
    of keywords that cannot be enforced; None: such a schema is refused. Raises `ApiError`."""
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise invalid(param, f"'{param}' has more than {MAX_SCHEMA_BYTES} bytes.")
    spacing = JSON_SPACING if whitespace is None else {"whitespace_pattern": whitespace}
    check_types(schema, param)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        schema = prepared(schema, left_out)
    except SchemaError as error:
        raise invalid(param, f"'{param}' cannot be had: {error}.", "unsupported_value") from None
    return {"json_schema": {**schema, "x-guidance": {**spacing, "lenient": left_out is not None}}}


def check_types(schema: Any, param: str) -> None:
    """Refuses a schema with a type that there is not, at which a model would be told of it and never follow it. `param`: the
    schema's field. Raises `ApiError`."""
    if (found := unknown_type(schema)) is not None:
        place, name = found
        raise invalid(
            param, f"Invalid value for '{param}': '{place}' is '{name[:100]}'; expected {', '.join(sorted(KNOWN))}."
        )


def lark_grammar(source: str) -> dict[str, Any]:
    return {"lark_grammar": source}


def choice_grammar(choices: Sequence[str]) -> dict[str, Any]:
    # A terminal: llguidance follows all of its texts at once, and of rules no more than 2,000 alternatives.
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(lark_text, choices)))


def lark_text(text: str) -> str:
    """A literal."""
    return msgspec.json.encode(text).decode()


def encoded(grammar: dict[str, Any], kind: str, param: str) -> Grammar:
    """Raises `ApiError` where it is too long."""
    return _checked([grammar], kind, param, grammar.get("json_schema"))


def _checked(grammars: list[dict[str, Any]], kind: str, param: str, schema: dict[str, Any] | None) -> Grammar:
    text = msgspec.json.encode({"grammars": grammars})
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid(param, f"'{param}' makes a grammar of {len(text)} bytes; the limit is {MAX_GRAMMAR_BYTES}.")
    return Grammar(text.decode(), kind, param, schema)


def behind(grammar: Grammar, rules: str, start: str) -> Grammar:
    """What comes before it is as `start` says, by rules in Lark. Raises `ApiError` where that is too long."""
    (own,) = msgspec.json.decode(grammar.text)["grammars"]
    whole = [lark_grammar(f"start: {start} @answer\n{rules}"), {"name": "answer", **own}]
    return _checked(whole, grammar.kind, grammar.param, grammar.schema)


def grammar_of(request: GenerationFields) -> Grammar | None:
    """The grammar that the request's fields ask for; None: none does. Raises `ApiError` 400 with the field at fault."""
    found = [grammar for grammar in (_of_format(request), *_of_guided(request), *_of_structured(request)) if grammar]
    if len(found) > 1:
        one, other = found[0].param, found[1].param
        raise invalid(other, f"'{other}' cannot be combined with '{one}': an output follows one grammar.")
    return found[0] if found else None


def check_options(request: GenerationFields, grammar: Grammar) -> None:
    """Refuses what contradicts a grammar, which alone says where the output ends."""
    if request.ignore_eos:
        raise invalid("ignore_eos", f"'ignore_eos' cannot be combined with '{grammar.param}', which ends the output.")
    if request.min_tokens:
        raise invalid("min_tokens", f"'min_tokens' cannot be combined with '{grammar.param}', which ends the output.")


def _of_format(request: GenerationFields) -> Grammar | None:
    match request.response_format:
        case JsonObjectFormat(None):
            return encoded(json_grammar({"type": "object"}, "response_format"), "json", "response_format")
        case JsonObjectFormat(schema):
            param = "response_format.schema"
            return encoded(json_grammar(schema, param), "json", param)
        case JsonSchemaFormat(json_schema):
            param = "response_format.json_schema.schema"
            left_out: list[str] = []
            grammar = json_grammar(json_schema.schema, param, None if json_schema.strict else left_out)
            return replace(encoded(grammar, "json", param), left_out=tuple(left_out))
        case _:
            return None


def _of_guided(request: GenerationFields) -> list[Grammar]:
    """Those of vLLM's older fields, and of SGLang's and llama.cpp's."""
    whitespace = request.guided_whitespace_pattern
    return [
        *_of_json(request.guided_json, "guided_json", whitespace),
        *_of_json(request.json_schema, "json_schema", whitespace),
        *_of_texts("guided_", request.guided_regex, request.guided_choice, request.guided_grammar),
        *_of_texts("", request.regex, None, request.grammar),
        *([] if request.ebnf is None else [_of_source(request.ebnf, "ebnf")]),
    ]


def _of_structured(request: GenerationFields) -> list[Grammar]:
    fields, prefix = request.structured_outputs, "structured_outputs."
    if fields is None:
        return []
    schema = {"type": "object"} if fields.json_object else None
    return [
        *_of_json(fields.json, prefix + "json", fields.whitespace_pattern),
        *_of_json(schema, prefix + "json_object", fields.whitespace_pattern),
        *_of_texts(prefix, fields.regex, fields.choice, fields.grammar),
    ]


def _of_json(schema: str | dict[str, Any] | bool | None, param: str, whitespace: str | None) -> list[Grammar]:
    if schema is None:
        return []
    return [encoded(json_grammar(_schema(schema, param), param, whitespace=whitespace), "json", param)]


def _of_texts(prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> list[Grammar]:
    found = []
    if regex is not None:
        found.append(encoded(lark_grammar(f"start: /{regex_to_lark(regex)}/"), "regex", prefix + "regex"))
    if choice is not None:
        found.append(encoded(choice_grammar(choice), "choice", prefix + "choice"))
    if grammar is not None:
        found.append(_of_source(grammar, prefix + "grammar"))
    return found


def _of_source(grammar: str, param: str) -> Grammar:
    """The grammar of a source in Lark or EBNF."""
    is_ebnf = _EBNF_RULE.search(grammar) is not None
    return encoded({EBNF: grammar} if is_ebnf else lark_grammar(grammar), "grammar", param)


def _schema(value: str | dict[str, Any] | bool, param: str) -> Any:
    """vLLM takes a schema as text too."""
    if not isinstance(value, str):
        return value
    try:
        schema = msgspec.json.decode(value, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(param, f"'{param}' is no JSON schema: {error}.") from None
    if is_nested_deep(schema):
        raise invalid(param, f"'{param}' is nested deeper than {MAX_NESTING} objects and lists.")
    return schema


def as_lark(text: str) -> str:
    """The text of a grammar, translated where it is EBNF. How long that takes is for whoever sent it to say: not in the
    event loop. Raises `ValueError`."""
    grammars = msgspec.json.decode(text)["grammars"]
    if not any(EBNF in one for one in grammars):
        return text
    try:
        for one in grammars:
            if (source := one.pop(EBNF, None)) is not None:
                one.update(lark_grammar(gbnf_to_lark(source)))
        translated = msgspec.json.encode({"grammars": grammars})
    except MemoryError:
        raise
    except Exception as error:  # the translator raises plain Exception
        raise ValueError(f"it is no EBNF grammar: {error}") from None
    if len(translated) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"it makes a grammar of {len(translated)} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    return translated.decode()
