"""Calls in text as the families write it, cut at every position; templates and the formats they want."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from services.gateway.schemas import FunctionDefinition
from services.gateway.tools.formats import FORMATS, format_of, with_instructions
from services.gateway.tools.parsers import Parsed, ToolParser
from shared.messages.cluster import TOOL_FORMATS

NAMES = {"weather", "now"}
ARGUMENTS = '{"city": "Ro\\"me {[", "days": [1, {"a": null}], "x": -2.5e3}'
WEATHER: tuple[str, Any] = ("weather", json.loads(ARGUMENTS))
NOW: tuple[str, Any] = ("now", {})


def call(name: str = "weather", arguments: str = ARGUMENTS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


# (format, text, content, calls)
OUTPUTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{call()}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"I look.\n\n<tool_call>\n{call()}\n</tool_call>\n", "I look.", [WEATHER]),
    ("hermes", f"<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{call('now', '{}')}\n</tool_call>", "", [WEATHER, NOW]),
    ("hermes", f"<tool_call>{call()}", "", [WEATHER]),
    ("hermes", f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "weather"}}\n</tool_call> done', " done", [WEATHER]),
    ("hermes", f"<tool_call>\n{call('weather', json.dumps(ARGUMENTS))}\n</tool_call>", "", [WEATHER]),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": }</tool_call> on', " on", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "[\\"\\ud83d\\"]"}</tool_call>', "", [("now", ["?"])]),
    ("hermes", f"<tool_call>{call('')}</tool_call>", f"<tool_call>{call('')}</tool_call>", []),
    ("hermes", "a < b, <tool_box> and </tool_call>  ", "a < b, <tool_box> and </tool_call>  ", []),
    ("hermes", "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>", []),
    ("llama3", call(key="parameters"), "", [WEATHER]),
    ("llama3", f"<|python_tag|>{call(key='parameters')}; {call('now', '{}', 'parameters')}", "", [WEATHER, NOW]),
    ("llama3", f'{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}\n', "", [WEATHER]),
    ("llama3", '{"name": "Ada", "age": 36} is she.', '{"name": "Ada", "age": 36} is she.', []),
    ("llama3", '{"city": {"a": [1]}}', '{"city": {"a": [1]}}', []),
    ("llama3", "Hello <|python", "Hello <|python", []),
    ("mistral", f"[TOOL_CALLS] [{call()}, {call('now', '{}')}]", "", [WEATHER, NOW]),
    ("mistral", f"Well.[TOOL_CALLS][{call()}]", "Well.", [WEATHER]),
    ("mistral", f"[TOOL_CALLS][{call()}] [TOOL_CALLS]now{{}}", "", [WEATHER, NOW]),
    ("mistral", "[TOOL_BOX] [1]", "[TOOL_BOX] [1]", []),
    ("mistral-named", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "", [WEATHER, NOW]),
    ("mistral-named", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral-named", "[TOOL_CALLS]\v{}", "\v{}", []),
    ("mistral-named", "[TOOL_CALLS]I do not {know}. [TOOL_CALLS]now{}", "I do not {know}.", [NOW]),
    ("json", f"[{call()}, {call('now', '{}')}]", "", [WEATHER, NOW]),
    ("json", "[1, 2] and {", "[1, 2] and {", []),
    ("json", " text", " text", []),
]  # fmt: skip


PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|py",
    "{", "}", "[", "]", '"', ": ", ",", ";", " ", "\n", "\\", "\\ud83d", '"name"', '"arguments"', '"now"',
    "weather", "12", "\u6f6e", call(), call("now", "{}", "parameters"), call("nobody", '"[]"'),
]  # fmt: skip


def deltas(parser: ToolParser, pieces: list[str]) -> tuple[str, list[str], list[str]]:
    """The content, and the names and arguments of the calls."""
    content, names, arguments = "", [], []
    parsed: list[Parsed] = [parser.feed(piece) for piece in pieces]
    for part in [*parsed, parser.flush()]:
        content += part.content
        for delta in part.calls:
            if delta.name:
                assert delta.index == len(names)
                names.append(delta.name)
                arguments.append("")
            assert delta.index == len(names) - 1
            arguments[-1] += delta.arguments
    return content, names, arguments


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    content, names, arguments = deltas(parser, pieces)
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES), max_size=10), st.integers(1, 9))
def test_whatever_a_model_writes_is_read_the_same_however_it_comes(name: str, pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    whole = deltas(FORMATS[name].parser(NAMES), [text])
    assert deltas(FORMATS[name].parser(NAMES), pieces) == whole
    assert deltas(FORMATS[name].parser(NAMES), [text[i : i + size] for i in range(0, len(text), size)]) == whole
    json.dumps(whole, ensure_ascii=False).encode()  # it has a UTF-8


@pytest.mark.parametrize("name, text, content, calls", OUTPUTS)
def test_calls_are_found_wherever_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    cuts = [[text[:first], text[first:]] for first in range(len(text) + 1)]
    for pieces in [*cuts, list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]:
        assert read(FORMATS[name].parser(NAMES), pieces) == (content, calls), pieces


def test_a_name_that_is_nested_deep_is_content() -> None:
    text = '<tool_call>{"name": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>"
    assert read(FORMATS["hermes"].parser(NAMES), [text]) == (text, [])


def test_arguments_come_as_they_are_written() -> None:
    parser = FORMATS["hermes"].parser(NAMES)
    assert [delta.name for delta in parser.feed('<tool_call>\n{"name": "weather"').calls] == ["weather"]
    assert parser.feed(', "arguments": {"ci').calls[0].arguments == '{"ci'
    assert parser.feed('ty": ').calls[0].arguments == 'ty": '


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_allows_what_the_parser_reads(name: str) -> None:
    """Whether llguidance takes it, with and without special tokens."""
    functions = [
        FunctionDefinition("weather", None, {"properties": {"city": {"type": "string"}}}),
        FunctionDefinition("now"),
    ]
    for number in (None, 7):
        for answer in (None, {"type": "object"}):
            source = FORMATS[name].grammar(functions, number is None, lambda piece, number=number: number, answer)
            assert LLMatcher.validate_grammar(json.dumps({"grammars": [{"lark_grammar": source}]})) == ""


def test_every_format_may_be_named() -> None:
    assert tuple(FORMATS) == TOOL_FORMATS


def test_the_template_says_which_format() -> None:
    assert format_of("{{ '<tool_call>' }}").name == "hermes"
    assert format_of("{{ '<|python_tag|>' }}").name == "llama3"
    assert format_of('Respond {"name": f, "parameters": d} <|eot_id|>').name == "llama3"
    assert format_of("[TOOL_CALLS]").name == "mistral"
    assert format_of("[TOOL_CALLS] [ARGS]").name == "mistral-named"
    assert format_of("<tool_call><function=x>").name == format_of("{{ messages }}").name == "json"
    assert format_of("{{ messages }}", "hermes").name == "hermes"
    assert len(FORMATS["mistral"].new_id("chatcmpl-1-0/0")) == 9


def test_a_template_without_tools_tells_of_them_in_words() -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "The time."}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": "12:00"},
    ]
    told = with_instructions(messages, [tool])
    assert '"now"' in told[0]["content"] and told[0]["content"].endswith("\n\nHi")
    assert told[1:] == [
        {"role": "assistant", "content": '[{"name": "now", "arguments": {}}]'},
        {"role": "user", "content": "12:00"},
    ]
