"""Calls in text as the families write it, cut at every position; templates and the formats they want."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gateway.openai.schemas import FunctionDefinition, Tool
from services.gateway.tools.call_reader import JsonMender, mended
from services.gateway.tools.formats import FORMATS, format_of, with_instructions
from services.gateway.tools.keyed import MAX_LITERAL, literal, typed
from services.gateway.tools.output_reader import OutputReader
from services.gateway.tools.parsers import Parsed, ToolParser
from services.gateway.tools.use import ToolUse
from shared.messages.cluster import TOOL_FORMATS

ARGUMENTS = '{"city": "Ro\\"me {[", "days": [1, {"a": null}], "x": -2.5e3}'
WEATHER: tuple[str, Any] = ("weather", json.loads(ARGUMENTS))
NOW: tuple[str, Any] = ("now", {})


def call(name: str = "weather", arguments: str = ARGUMENTS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "number"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
    },
    "required": ["text"],
}
NAMES: dict[str, Any] = {"weather": None, "now": None, "code": SCHEMA}
CODE: tuple[str, Any] = (
    "code",
    {"text": "1\n</tool_call> <b>\u6f6e", "n": 1, "list": [1, 2.5], "maybe": None, "flag": True, "new": {"a": "b"}},
)
ONE: tuple[str, Any] = ("code", {"n": 1})
SHOWN = {"text": CODE[1]["text"], "n": "1", "list": "[1, 2.5]", "maybe": "null", "flag": "True", "new": '{"a": "b"}'}
"""Arguments as the families that mark each of them write them."""
CODED_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODED = CODED_NOW.replace(
    "now>", "code>\n" + "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in SHOWN.items())
)
GLM = "\n".join(
    (
        "<tool_call>code",
        *(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in SHOWN.items()),
        "</tool_call>",
    )
)
MINIMAX = "\n".join(
    (
        '<minimax:tool_call>\n<invoke name="code">',
        *(f'<parameter name="{key}">{value}</parameter>' for key, value in SHOWN.items()),
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    )
)
_MARK = "\uff5cDSML\uff5c"


def dsml(name: str, *arguments: tuple[str, bool, str]) -> str:
    """A call as DeepSeek V3.2 writes it; of each argument its name, whether it is a text, and how it is spelled."""
    lines = (
        f'<{_MARK}parameter name="{key}" string="{str(is_text).lower()}">{value}</{_MARK}parameter>'
        for key, is_text, value in arguments
    )
    return "\n".join((f'<{_MARK}invoke name="{name}">', *lines, f"</{_MARK}invoke>"))


DSML_CODE = dsml("code", *((key, key == "text", value) for key, value in SHOWN.items()))
DSML = f"<{_MARK}function_calls>\n{DSML_CODE}\n{dsml('now')}\n</{_MARK}function_calls>"
_TYPED = dsml(
    "weather", ("a", True, "1"), ("b", False, "1"), ("c", True, "\n x\n"), ("d", False, "[1]"), ("e", False, "no")
)
DSML_TYPES = f"<{_MARK}function_calls>{_TYPED}</{_MARK}function_calls>"
KIMI = (
    "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK_V31 = (
    "<CALLS_begin><CALL_begin>weather<SEP>" + ARGUMENTS + "<CALL_end><CALL_begin>now<SEP>{}<CALL_end><CALLS_end>"
)
DEEPSEEK_V3 = (
    f"<CALLS_begin><CALL_begin>function<SEP>weather\n```json\n{ARGUMENTS}\n```<CALL_end>\n"
    "<CALL_begin>function<SEP>now\n```json\n{}\n```<CALL_end><CALLS_end>"
)
for short, mark in (("CALLS", "tool\u2581calls"), ("CALL", "tool\u2581call"), ("SEP", "tool\u2581sep")):
    for end in ("_begin", "_end", ""):
        long = f"<\uff5c{mark}{end.replace('_', chr(0x2581))}\uff5c>"
        DEEPSEEK_V3, DEEPSEEK_V31 = (each.replace(f"<{short}{end}>", long) for each in (DEEPSEEK_V3, DEEPSEEK_V31))

PYTHONIC = 'code(text="1\\n</tool_call> <b>\u6f6e", n=1, list=[1, 2.5], maybe=null, flag=True, new={"a": "b"})'
LLAMA4 = '{"name": "weather", "parameters": ' + ARGUMENTS + "}"

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
    ("hermes", '<tool_call>{"name": "now", "arguments": "[\\"\\ud83d\\"]"}</tool_call>', "", [("now", {"arguments":
    ["?"]})]), ("hermes", f"<tool_call>{call('')}</tool_call>", f"<tool_call>{call('')}</tool_call>", []),
    ("hermes", "a < b, <tool_box> and </tool_call>  ", "a < b, <tool_box> and </tool_call>  ", []),
    ("hermes", "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>", []),
    ("hermes", f"<tool_call>\n{call()}}}}}\n</tool_call>\nOn", "\nOn", [WEATHER]),
    ("hermes", f"<tool_call>\n{call()[:-1]}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"<tool_call>\n{call()}\n{call('now', '{}')}\n</tool_call>", "", [WEATHER, NOW]),
    ("hermes", f"<tool_call>\n{call()}\n{{no call}} on", "\n{no call} on", [WEATHER]),
    ("hermes", f'<tool_call>{call()}\n{{"name": "Alice", "age": 5}} on', '\n{"name": "Alice", "age": 5} on', [WEATHER]),
    ("hermes", f'<tool_call>{call()}\n{{"name": "Alice", "a', '\n{"name": "Alice", "a', [WEATHER]),
    ("hermes", f"<tool_call>[{call()}]</tool_call>", f"<tool_call>[{call()}]</tool_call>", []),
    ("hermes", f"<tool_call>{{{call()}}}</tool_call>", f"<tool_call>{{{call()}}}</tool_call>", []),
    ("hermes", f"<tool_call>{call()}\n, and then }})", "\n, and then })", [WEATHER]),
    ("hermes", f"<tool_call>{call()}}} <tool_call>{call('now', '{}')}}}", "", [WEATHER, NOW]),
    ("hermes", f"<tool_call>{call()},\n{call('now', '{}')}]\n</tool_call>", "", [WEATHER, NOW]),
    ("hermes", call("code", '{"text": "\n\\d C:\\users \\\\ \\u0041\\n it\\\'s"}').join(("<tool_call>", "</tool_call>")), "",
     [("code", {"text": "\n\\d C:\\users \\ A\n it's"})]),
    ("llama3", call(key="parameters"), "", [WEATHER]),
    ("llama3", f"<|python_tag|>{call(key='parameters')}; {call('now', '{}', 'parameters')}", "", [WEATHER, NOW]),
    ("llama3", f'{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}\n', "", [WEATHER]),
    ("llama3", '{"name": "Ada", "age": 36} is she.', '{"name": "Ada", "age": 36} is she.', []),
    ("llama3", '{"city": {"a": [1]}}', '{"city": {"a": [1]}}', []),
    ("llama3", "Hello <|python", "Hello <|python", []),
    ("llama4", f"<|python_start|>I look.<|python_end|>{LLAMA4}", "I look.", [WEATHER]),
    ("llama4", f"<|python_start|><|python_end|>{LLAMA4}{call('now', '{}', 'parameters')}", "", [WEATHER, NOW]),
    ("llama4", f"<|python_start|>{LLAMA4}<|python_end|>", "", [WEATHER]),
    ("llama4", '{"name": "Ada", "age": 36} is she.', '{"name": "Ada", "age": 36} is she.', []),
    ("llama4", f"[{PYTHONIC}]", "", [CODE]),
    ("pythonic", f"[{PYTHONIC}, now()]", "", [CODE, NOW]),
    ("pythonic", f"<|python_start|>[{PYTHONIC}]<|python_end|>", "", [CODE]),
    ("pythonic", f"<|python_start|>[now()]<|python_end|> [{PYTHONIC}]", "", [NOW, CODE]),
    ("pythonic", PYTHONIC, PYTHONIC, []),
    ("pythonic", "[nobody(a=1)]", "[nobody(a=1)]", []),
    ("pythonic", "[1, 2] and [now", "[1, 2] and [now", []),
    ("pythonic", "[ now ( ) ]", "[ now ( ) ]", []),
    ("pythonic", "[code(text='it\\'s \"so\"', n=\"1\", flag=\"False\")]", "",
     [("code", {"text": 'it\'s "so"', "n": 1, "flag": False})]),
    ("pythonic", '[code(text="say "hi, you" (now)", n=1)]', "", [("code", {"text": 'say "hi, you" (now)', "n": 1})]),
    ("pythonic", "[code(text=7, maybe=None, list=(1, 2))]", "", [("code", {"text": 7, "maybe": None, "list": [1, 2]})]),
    ("pythonic", "[weather(\"Rome\", days=[{'a': None}], x=2*3, big=1e999)]", "",
     [("weather", {"days": [{"a": None}], "x": "2*3", "big": "1e999"})]),
    ("pythonic", '[code(n=1, text="it goes on', "", [("code", {"n": 1, "text": '"it goes on'})]),
    ("mistral", f"[TOOL_CALLS] [{call()}, {call('now', '{}')}]", "", [WEATHER, NOW]),
    ("mistral", f"Well.[TOOL_CALLS][{call()}]", "Well.", [WEATHER]),
    ("mistral", f"[TOOL_CALLS][{call()}] [TOOL_CALLS]now{{}}", "", [WEATHER, NOW]),
    ("mistral", "[TOOL_BOX] [1]", "[TOOL_BOX] [1]", []),
    ("mistral-named", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "", [WEATHER, NOW]),
    ("mistral-named", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral-named", "[TOOL_CALLS]\v{}", "\v{}", []),
    ("mistral-named", "[TOOL_CALLS]I do not {know}. [TOOL_CALLS]now{}", "I do not {know}.", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "", [("now", {"arguments": [1]})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": 7}</tool_call>', "", [("now", {"arguments": 7})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "a"}</tool_call>', "", [("now", {"arguments": "a"})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "parameters": {"a": 1}}</tool_call>', "", [NOW]),
    ("llama3", '{"type": "function", "function": "weather", "parameters": {"a": "1"}}', "", [("weather", {"a": "1"})]),
    ("llama3", '{"function": {"name": "weather", "parameters": {"a": 1}}}', "", [("weather", {"a": 1})]),
    ("llama3", '{"type": "function", "function": {"arguments": {"a": 1}, "name": "now"}} ', "", [("now", {"a": 1})]),
    ("llama3", f"<function=weather>{ARGUMENTS}</function>", "", [WEATHER]),
    ("llama3", f"<function=weather>{ARGUMENTS}</function>\n<function=now>{{}}</function>", "", [WEATHER, NOW]),
    ("llama3", "<function=nobody>{}</function>", "<function=nobody>{}</function>", []),
    ("llama3", f"```json\n{call()}\n```", "", [WEATHER]),
    ("json", f"```\n[{call()}, {call('now', '{}')}]\n```\n", "", [WEATHER, NOW]),
    ("json", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("json", "```python\nx = 1\n```", "```python\nx = 1\n```", []),
    ("json", f"[{call()}, {call('now', '{}')}]", "", [WEATHER, NOW]),
    ("qwen3-coder", CODED, "", [CODE]),
    ("qwen3-coder", f"I look.\n{CODED}\n{CODED_NOW}\n", "I look.", [CODE, NOW]),
    ("qwen3-coder", CODED.removeprefix("<tool_call>\n"), "", [CODE]),
    ("qwen3-coder", CODED.removesuffix("\n</function>\n</tool_call>"), "", [CODE]),
    ("qwen3-coder", CODED.replace("\n</parameter>", ""), "", [CODE]),
    ("qwen3-coder", "<tool_call><function=code><parameter=n>1</parameter></function></tool_call>", "", [ONE]),
    ("qwen3-coder", "<tool_call>\n<function=>\n</function>", "<tool_call>\n<function=>\n</function>", []),
    ("qwen3-coder", "a <function> of <tool_call> here", "a <function> of <tool_call> here", []),
    ("seed", "<seed:" + CODED[1:].removesuffix("</tool_call>") + "</seed:tool_call>", "", [CODE]),
    ("glm", GLM, "", [CODE]),
    ("glm", f"Well.\n{GLM}\n<tool_call>now\n</tool_call>", "Well.", [CODE, NOW]),
    ("glm", GLM.replace("\n<arg", "<arg").replace(">\n</tool", "></tool"), "", [CODE]),
    ("glm", "<tool_call>now</tool_call> and on", " and on", [NOW]),
    ("glm", f"<tool_call>{call()}</tool_call>", f"<tool_call>{call()}</tool_call>", []),
    ("glm", GLM.replace("\u6f6e<", "\u6f6e\n<"), "", [("code", {**CODE[1], "text": CODE[1]["text"] + "\n"})]),
    ("glm", GLM.replace(">1\n</tool_call> <b>\u6f6e<", ">\n\nx\n<"), "", [("code", {**CODE[1], "text": "\nx"})]),
    ("minimax", MINIMAX, "", [CODE, NOW]),
    ("minimax", f"Well.\n{MINIMAX}\nDone", "Well.\n\nDone", [CODE, NOW]),
    ("deepseek-v3.2", DSML, "", [CODE, NOW]),
    ("deepseek-v3.2", f"Well.\n\n{DSML}", "Well.", [CODE, NOW]),
    ("deepseek-v3.2", DSML_TYPES, "", [("weather", {"a": "1", "b": 1, "c": "\n x\n", "d": [1], "e": "no"})]),
    ("deepseek-v3.2", "a <\uff5cDSML\uff5cfunc", "a <\uff5cDSML\uff5cfunc", []),
    ("deepseek-v4", DSML.replace("function_calls", "tool_calls"), "", [CODE, NOW]),
    ("kimi", KIMI, "", [WEATHER, NOW]),
    ("kimi", f"Well. {KIMI}", "Well.", [WEATHER, NOW]),
    ("kimi", KIMI.replace("<|tool_calls_section_begin|>", ""), "", [WEATHER, NOW]),
    ("kimi", KIMI.replace("{}", "null"), "", [WEATHER, NOW]),
    ("kimi", KIMI.replace("{}", ""), "", [WEATHER, NOW]),
    ("kimi", KIMI.replace("functions.now:1", "functions.a:b.now:1"), "", [WEATHER, ("a:b.now", {})]),
    ("deepseek-v3", DEEPSEEK_V3, "", [WEATHER, NOW]),
    ("deepseek-v3", f"Well.{DEEPSEEK_V3} Done", "Well. Done", [WEATHER, NOW]),
    ("deepseek-v3.1", DEEPSEEK_V31, "", [WEATHER, NOW]),
    ("deepseek-v3.1", "a <\uff5ctool\u2581call and", "a <\uff5ctool\u2581call and", []),
    ("harmony", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", "", [WEATHER]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now"
     "<|message|>{}<|call|>", "I look.", [NOW]),
    ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", "", [NOW]),
    ("harmony", "<|channel|>final<|message|>Hello <b>", "Hello <b>", []),
    ("harmony", "Hello <|channel", "Hello <|channel", []),
    ("json", "[1, 2] and {", "[1, 2] and {", []),
    ("json", " text", " text", []),
]  # fmt: skip


PIECES = [
    f"<{_MARK}function_calls>", f'<{_MARK}invoke name="now">', f'<{_MARK}parameter name="a" string="true">',
    f"</{_MARK}parameter>", f"</{_MARK}invoke>", '" string="', "false",
    "<|python_start|>", "<|python_end|>", "now(", "a=", "'", ")", "(", "code(n=",
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|py",
    "{", "}", "[", "]", '"', ": ", ",", ";", " ", "\n", "\\", "\\ud83d", '"name"', '"arguments"', '"now"',
    "<function=", "now>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg",
    "_value>", "<minimax:tool_call>", '<invoke name="', '">', "</invoke>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.now:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>",
    "analysis", "commentary to=now", "<|message|>", "<|end|>", "<|start|>", "assistant", "```", "```json\n", "null",
    DEEPSEEK_V3, DEEPSEEK_V31[:40], DEEPSEEK_V31[-30:], CODED[:30], GLM[:40], "weather", "12", "\u6f6e", call(),
    call("now", "{}", "parameters"), call("nobody", '"[]"'), ]  # fmt: skip


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


@pytest.mark.parametrize("name, text, content, calls", OUTPUTS)
def test_a_chunk_has_one_entry_a_call_however_much_comes_at_once(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    """The first of a call has its id, type and name, later ones its arguments alone."""
    tools = tuple(Tool("function", FunctionDefinition(each, None, NAMES[each])) for each in sorted(NAMES))
    for size in range(1, len(text) + 1):
        use = ToolUse(tools=tools, all_tools=tools, is_required=False, is_parallel=True)
        reader, said, found = OutputReader(FORMATS[name], use, None, "output"), "", dict[int, list[str]]()
        for start in range(0, len(text), size):
            reader.feed(text[start : start + size])
            told = reader.end("stop")[0] if start + size >= len(text) else reader.take()
            said, chunks = said + told.content, told.calls
            assert len({chunk.index for chunk in chunks}) == len(chunks)
            for chunk in chunks:
                is_new = chunk.index not in found
                assert is_new == isinstance(chunk.id, str) == isinstance(chunk.function.name, str)
                called = found.setdefault(chunk.index, [str(chunk.function.name), ""])
                called[1] += chunk.function.arguments
        assert (said, [(called, json.loads(text)) for called, text in found.values()]) == (content, calls)


TEXTS = st.text(st.sampled_from("a'\"\\\n{}[],: \u6f6e"), max_size=6)
PLAIN = st.none() | st.booleans() | st.integers() | TEXTS
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.integers(1, 5))
def test_literals_of_python_become_json_as_they_come_and_json_stays(value: dict[str, Any], size: int) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
        mender = JsonMender()
        whole = "".join(mender.feed(text[place : place + size]) for place in range(0, len(text), size)) + mender.end()
        assert json.loads(whole) == value and (text == repr(value) or whole == text)


PYTHON_ARGUMENTS = {"a": True, "b": [None, 1], "c": "it's {", "d": 'say "x"}', "e": "it's"}
PYTHON_CALLS = [
    "{'name': 'weather', 'arguments': {'a': True, 'b': [None, 1,], 'c': \"it's {\", 'd': 'say \"x\"}', 'e': 'it\\'s',},}",
    '{"name": "weather", "arguments": {"a": True, "b": [None, 1, ], "c": "it\'s {", "d": "say \\"x\\"}", "e": "it\'s"}}',
    json.dumps({"name": "weather", "arguments": repr(PYTHON_ARGUMENTS)}),
]


@pytest.mark.parametrize("text", PYTHON_CALLS)
@pytest.mark.parametrize("name", ["hermes", "llama3", "json", "mistral"])
def test_calls_with_literals_of_python_are_read_wherever_they_are_cut(name: str, text: str) -> None:
    around = {"hermes": "<tool_call>\n{}\n</tool_call>", "mistral": "[TOOL_CALLS][{}]"}.get(name, "{}")
    whole = around.replace("{}", text)
    for cut in range(len(whole) + 1):
        pieces = [whole[:cut], whole[cut:]]
        assert read(FORMATS[name].parser(NAMES), pieces) == ("", [("weather", PYTHON_ARGUMENTS)]), pieces


def test_white_space_behind_a_comma_is_read_once() -> None:
    mender, begun_s = JsonMender(), time.process_time()
    text = mender.feed('{"a": [1,') + "".join(mender.feed("\n") for _ in range(80_000))
    assert time.process_time() - begun_s < 2
    assert text + mender.feed("]}") == '{"a": [1' + "\n" * 80_000 + "]}"


@pytest.mark.parametrize("size", range(1, 20))
def test_escapes_of_python_are_read_in_strings_of_either_quote(size: int) -> None:
    value = {"a\x7f": "it's \xa0 \x00", "b": '"\U000e0001\xad', "c": "it's\u200b\U0010ffff"}
    text, mender = repr(value), JsonMender()
    whole = "".join(mender.feed(text[place : place + size]) for place in range(0, len(text), size)) + mender.end()
    assert json.loads(whole) == value
    assert JsonMender().feed('{"a": "\\x41", \'b\': "\\x41\\U00110000"}') == '{"a": "\\\\x41", "b": "A\\\\U00110000"}'


def test_an_apostrophe_begins_no_string_and_words_of_python_are_whole() -> None:
    for text in ('{"a": it\'s}', '{"a": "He said "it\'s" ok"}', '{"a": xTrue}', '{"a": Truex}', '{"a": True1}'):
        for cut in range(len(text)):
            mender = JsonMender()
            assert mender.feed(text[:cut]) + mender.feed(text[cut:]) == text
    assert JsonMender().feed("{'a': '\\x01\\x'}") == '{"a": "\\u0001\\\\x"}'
    nothing = read(FORMATS["hermes"].parser(NAMES), ['<tool_call>{"name": "now", "arguments": None}</tool_call>'])
    assert nothing == ("", [NOW]) and mended("it's, ]") == "it's, ]"


@given(st.text(st.sampled_from("ab\"'\\\n\tu0012{}: \x01\u6f6e"), max_size=14), st.text(max_size=9), st.integers(0, 14))
def test_strings_are_mended_the_same_however_they_come_and_valid_ones_stay(text: str, valid: str, cut: int) -> None:
    whole, cut_mender = JsonMender().feed(text), JsonMender()
    assert cut_mender.feed(text[:cut]) + cut_mender.feed(text[cut:]) == whole
    for written in (json.dumps({"a": valid}), json.dumps([valid], ensure_ascii=False)):
        assert JsonMender().feed(written) == written
    inner = text.replace('"', "") + "."
    assert isinstance(json.loads(JsonMender().feed('{"a": "' + inner + '"}'))["a"], str)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("'a' if True else None", None),
        ('"a" if True else None', None),
        ("'''doc'''\nprint(True, None)", None),
        ('"""doc"""\nprint(True, None)', None),
        ("'tis a text", None),
        ("print('hi', True)", None),
        ("'it\\'s'", "it's"),
        ('"C:\\dir\n"', "C:\\dir\n"),
    ],
)
def test_a_text_as_arguments_stays_unless_it_is_one_string(text: str, taken: str | None) -> None:
    whole = f"<|channel|>commentary to=functions.python<|message|>{text}<|call|>"
    called = [("python", {"arguments": taken or text})]
    assert read(FORMATS["harmony"].parser({"python": {}}), [whole]) == ("", called)


def test_a_name_that_is_nested_deep_is_content() -> None:
    text = '<tool_call>{"name": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>"
    assert read(FORMATS["hermes"].parser(NAMES), [text]) == (text, [])


SEED_ARGUMENT = ("seed", "<seed:tool_call>\n<function=code>\n<parameter=text>{}</function>\n</seed:tool_call>")
GLM_ARGUMENT = ("glm", "<tool_call>code\n<arg_key>text</arg_key>\n<arg_value>{}</tool_call>")
MINIMAX_ARGUMENT = (
    "minimax",
    '<minimax:tool_call>\n<invoke name="code">\n<parameter name="text">{}</invoke>\n</minimax:tool_call>',
)
CODED_ARGUMENT = ("qwen3-coder", "<tool_call>\n<function=code>\n<parameter=text>{}</function>\n</tool_call>")


@pytest.mark.parametrize(
    ("family", "written", "arguments"),
    [
        (SEED_ARGUMENT, "\nfoo\n<parameter=n>\n5\n", {"text": "foo", "n": 5}),
        (SEED_ARGUMENT, "foo\n<parameter=n>5\n", {"text": "foo", "n": 5}),
        (SEED_ARGUMENT, "\n\n<parameter=n>5</parameter>\n", {"text": "", "n": 5}),
        (SEED_ARGUMENT, "\nfoo\n\n<parameter=n>5</parameter>\n", {"text": "foo\n", "n": 5}),
        (SEED_ARGUMENT, "\nfoo</parameter>\n", {"text": "foo"}),
        (SEED_ARGUMENT, "foo\n</parameter>\n", {"text": "foo\n"}),
        (SEED_ARGUMENT, "\nfoo\n</parameter>\n", {"text": "foo"}),
        (MINIMAX_ARGUMENT, '\nfoo\n<parameter name="n">\n5\n', {"text": "foo", "n": 5}),
        (MINIMAX_ARGUMENT, "\nfoo\n", {"text": "foo"}),
        (MINIMAX_ARGUMENT, "\nfoo</parameter>\n", {"text": "foo"}),
        (MINIMAX_ARGUMENT, "foo\n</parameter>\n", {"text": "foo\n"}),
        (GLM_ARGUMENT, "\nfoo</arg_value>\n", {"text": "foo"}),
        (GLM_ARGUMENT, "foo\n</arg_value>\n", {"text": "foo\n"}),
        (GLM_ARGUMENT, "\n\nfoo</arg_value>\n", {"text": "\nfoo"}),
        (GLM_ARGUMENT, "\n</arg_value>\n", {"text": "\n"}),
        (CODED_ARGUMENT, "\n\n</parameter>\n", {"text": ""}),
        (CODED_ARGUMENT, "\nfoo\n\n</parameter>\n", {"text": "foo\n"}),
        (CODED_ARGUMENT, "\nfoo\n<parameter=n>\n5\n", {"text": "foo", "n": 5}),
    ],
)
def test_line_breaks_of_marks_are_not_of_the_value(
    family: tuple[str, str], written: str, arguments: dict[str, Any]
) -> None:
    name, frame = family
    text = frame.format(written)
    for cut in range(len(text)):
        assert read(FORMATS[name].parser(NAMES), [text[:cut], text[cut:]]) == ("", [("code", arguments)])


def test_arguments_come_as_they_are_written() -> None:
    parser = FORMATS["hermes"].parser(NAMES)
    assert [delta.name for delta in parser.feed('<tool_call>\n{"name": "weather"').calls] == ["weather"]
    assert parser.feed(', "arguments": {"ci').calls[0].arguments == '{"ci'
    assert parser.feed('ty": ').calls[0].arguments == 'ty": '


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("hermes", '<tool_call>\n{"na', "", 0),
        ("hermes", "I look.<tool", "I look.", 0),
        ("hermes", "a <", "a <", 0),
        ("hermes", f'<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{{"name": "no', "", 1),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a', "", 1),
        ("hermes", f'<tool_call>{call()}\n{{"name": "no', "", 1),
        ("hermes", f'<tool_call>{call()}}}\n{{"name": "no', "", 1),
        ("hermes", f'<tool_call>{call()}\n{{"name": "Alice", "a', '\n{"name": "Alice", "a', 1),
        ("hermes", f'<tool_call>{call()}\n{{"age": 5', '\n{"age": 5', 1),
        ("llama3", '{"name": "wea', "", 0),
        ("llama3", "{'name': 'wea", "", 0),
        ("llama3", "{'name': 'Ada', 'a", "{'name': 'Ada', 'a", 0),
        ("json", "[{'name': 'wea", "", 0),
        ("hermes", f"<tool_call>{call()}\n{{'name': 'no", "", 1),
        ("llama3", '{"name": "Ada", "a', '{"name": "Ada", "a', 0),
        ("llama3", '{"answer": 1', '{"answer": 1', 0),
        ("llama4", f"<|python_start|>I look.<|python_end|>{LLAMA4[:12]}", "I look.", 0),
        ("llama4", LLAMA4[:50], "", 1),
        ("pythonic", "<|python_sta", "", 0),
        ("pythonic", "[wea", "", 0),
        ("pythonic", "[now(), code(te", "", 2),
        ("json", f'[{call()}, {{"na', "", 1),
        ("json", '[{"name": "wea', "", 0),
        ("mistral", '[TOOL_CALLS] [{"na', "", 0),
        ("mistral-named", "[TOOL_CALLS]wea", "", 0),
        ("qwen3-coder", "<tool_call>\n<function=wea", "", 0),
        ("qwen3-coder", CODED[:70], "", 1),
        ("glm", "<tool_call>wea", "", 0),
        ("minimax", '<minimax:tool_call>\n<invoke name="wea', "", 0),
        ("deepseek-v3.2", DSML[:45], "", 0),
        ("deepseek-v3.2", DSML[:130], "", 1),
        ("kimi", KIMI[:60], "", 0),
        ("kimi", KIMI[:-80], "", 1),
        ("deepseek-v3", DEEPSEEK_V3[:50], "", 0),
        ("harmony", "<|channel|>commentary to=functions.wea", "", 0),
    ],
)
def test_a_call_that_is_cut_off_is_no_content(name: str, text: str, content: str, num_calls: int) -> None:
    for first in range(len(text) + 1):
        parser = FORMATS[name].parser(NAMES)
        parsed = [parser.feed(text[:first]), parser.feed(text[first:]), parser.flush(is_cut=True)]
        assert "".join(one.content for one in parsed) == content
        assert len({delta.index for one in parsed for delta in one.calls}) == num_calls


def reader_of(name: str, *, is_required: bool = False, is_parallel: bool = True) -> OutputReader:
    tools = tuple(Tool("function", FunctionDefinition(each, None, NAMES[each])) for each in sorted(NAMES))
    use = ToolUse(tools=tools, all_tools=tools, is_required=is_required, is_parallel=is_parallel)
    return OutputReader(FORMATS[name], use, None, "output")


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_that_has_to_be_calls_has_no_content_where_it_is_cut_off(name: str) -> None:
    for text in ('[{"name', "[", "<tool_call>\n{", FORMATS[name].begin[:9] or "{"):
        reader = reader_of(name, is_required=True)
        reader.feed(text)
        told, reason = reader.end("length")
        assert (told.content, told.calls, reason) == ("", [], "length"), text
    reader = reader_of(name, is_required=True)
    reader.feed("I will not.")
    assert reader.end("stop")[0].content == "I will not."


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        (f"<tool_call>\n{call()}\n</tool_call>", "stop", "tool_calls"),
        (f"<tool_call>\n{call()}\n</tool_call>", "length", "length"),
        ('<tool_call>\n{"name": "now", "arguments": {"a', "stop", "stop"),
        ('<tool_call>\n{"name": "now", "arguments": {"a": 1,, }}', "stop", "stop"),
        ('<tool_call>\n{"name": "now", "arguments": null}', "stop", "tool_calls"),
        (f"<tool_call>{call()}</tool_call><tool_call>" + '{"name": "now", "arguments": {"a', "stop", "stop"),
        ("Hello", "stop", "stop"),
    ],
)
def test_an_output_ends_by_calls_only_where_their_arguments_are_objects(text: str, ended: Any, reason: str) -> None:
    reader = reader_of("hermes")
    reader.feed(text)
    assert reader.end(ended)[1] == reason


def test_a_model_that_gives_its_calls_ids_has_them_told() -> None:
    reader = reader_of("kimi")
    for character in KIMI:
        reader.feed(character)
    told, _ = reader.end("stop")
    assert [chunk.id for chunk in told.calls] == ["functions.weather:0", "functions.now:1"]


def test_one_call_where_several_are_not_wanted() -> None:
    reader = reader_of("kimi", is_parallel=False)
    reader.feed(KIMI)
    assert [chunk.function.name for chunk in reader.end("stop")[0].calls] == ["weather"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("1", {"type": "integer"}, 1),
        ("1.0", {"type": "integer"}, 1),
        ("1.5", {"type": "number"}, 1.5),
        ("9007199254740993", {"type": "integer"}, 9007199254740993),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("one", {"type": "integer"}, "one"),
        ("[1", {"type": "array"}, "[1"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': [True, None]}", {"type": "object"}, {"a": [True, None]}),
        ("['a', 1.5]\n", {"type": "array"}, ["a", 1.5]),
        ("{'a', 'b'}", {"type": "object"}, "{'a', 'b'}"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"const": "1"}, "1"),
        ("1", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1),
        ("x", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "x"),
        ("true", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true"),
        ("1", {"$ref": "#/$defs/s"}, "1"),
        ("1", {"$ref": "#/$defs/loop"}, 1),
        ("NaN", {"type": "number"}, "NaN"),
        ("text", {}, "text"),
        ("1", {}, 1),
        ("[" * 200 + "]" * 200, {}, "[" * 200 + "]" * 200),
    ],
)
def test_arguments_between_marks_have_the_types_of_their_schema(text: str, schema: Any, value: Any) -> None:
    whole = {"properties": {"a": schema}, "$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    found = typed(text, whole, "a")
    assert found == value and type(found) is type(value)
    assert typed(text, {"properties": []}, "a") == typed(text, None, "a") == typed(text, {}, "a")


SPELLED = {
    "qwen3-coder": f"{CODED}\n{CODED_NOW}",
    "seed": "\n".join(
        (
            "<seed:tool_call>\n<function=code>",
            *(f"<parameter={key}>{value}</parameter>" for key, value in SHOWN.items()),
            "</function>\n</seed:tool_call>",
        )
    ),
    "glm": f"{GLM}\n<tool_call>now\n</tool_call>",
    "minimax": MINIMAX,
    "deepseek-v3.2": DSML,
    "deepseek-v4": DSML.replace("function_calls", "tool_calls"),
    "kimi": KIMI,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V31,
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
    "hermes": f"<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{call('now', '{}')}\n</tool_call>",
    "llama3": f"{call(key='parameters')}; {call('now', '{}', 'parameters')}",
    "llama4": f"{LLAMA4}{call('now', '{}', 'parameters')}",
    "pythonic": f"[{PYTHONIC}, now(), weather(a=[1])]",
    "mistral": f"[TOOL_CALLS][{call()}, {call('now', '{}')}]",
    "mistral-named": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    "json": f"[{call()}, {call('now', '{}')}]",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_takes_what_the_family_writes(name: str) -> None:
    """And no arguments that the schema has not, nor of another type."""
    functions = [
        FunctionDefinition("weather", None, {"type": "object"}),
        FunctionDefinition("now", None, {"type": "object", "additionalProperties": False}),
        FunctionDefinition("code", None, {**SCHEMA, "properties": {**SCHEMA["properties"], "new": {"type": "object"}}}),
    ]
    source = json.dumps({"grammars": [{"lark_grammar": FORMATS[name].grammar(functions, True, lambda piece: None)}]})
    spelled = SPELLED[name] if FORMATS[name].is_pythonic else SPELLED[name].replace("True", "true")
    assert _takes(source, spelled)
    assert not _takes(source, spelled.replace("now", "nobody").replace("weather", "nobody").replace("code", "nobody"))
    assert not _takes(source, spelled[: len(spelled) // 2])
    if "code" in spelled:
        assert not _takes(source, spelled.replace("[1, 2.5]", "2.5"))
        assert not _takes(source, spelled.replace("flag", "other"))
    assert read(FORMATS[name].parser(NAMES), [spelled])[1]


def _takes(grammar: str, text: str) -> bool:
    matcher, written = LLMatcher(LLTokenizer("byte"), grammar, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


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
    assert format_of('{{ "<|python_start|>" }} {{ \'"parameters": \' }} <|eot|>').name == "llama4"
    assert (
        format_of("<|header_start|> [func_name1(param1=value1), func_name2(...)] {{ name + '(' }}").name == "pythonic"
    )
    assert format_of("[TOOL_CALLS]").name == "mistral"
    assert format_of("[TOOL_CALLS] [ARGS]").name == "mistral-named"
    assert format_of("<tool_call><function=x>").name == "qwen3-coder"
    assert format_of("<{{ dsml }}function_calls> {% set dsml = '\uff5cDSML\uff5c' %}").name == "deepseek-v3.2"
    assert format_of("<\uff5cDSML\uff5ctool_calls>").name == "deepseek-v4"
    assert format_of("{{ messages }}").name == "json"
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


def test_literals_of_python_are_read_in_silence_up_to_a_length() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literal("['\\d', None, True]") == ["\\d", None, True]
    long = str(["a"] * MAX_LITERAL)
    assert literal(long) == long
