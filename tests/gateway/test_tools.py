"""Tools over a real socket: what the model is told, what it must follow, and how its calls come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.test_structured import follows

HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
MAX_LEN = 2048
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BOTH = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tools", byte_level_tokenizer(), TEMPLATE, MAX_LEN)


@asynccontextmanager
async def with_room(nats_settings: BusSettings, folder: Path) -> AsyncIterator[Stack]:
    """Stack with room for what a model is told of tools."""
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(folder))], instance=False) as stack:
        await stack.peer.add_instance("a", MODEL, max_model_len=MAX_LEN)
        yield stack


@pytest.fixture
async def tools(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with with_room(nats_settings, checkpoint) as stack:
        yield stack


async def test_calls_of_an_answer(tools: Stack) -> None:
    tools.say("Let me see.\n" + BOTH)
    async with tools.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, n=2)  # type: ignore[arg-type]
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert choice.message.tool_calls is not None
        found = [
            (call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls
        ]
        assert found == [("function", "weather", {"city": "Rome"}), ("function", "now", {})]
        assert len({call.id for call in choice.message.tool_calls}) == 2
    prompt = tools.tokenizer.decode(unpack_tokens(tools.peer.submitted[0].prompt), skip_special_tokens=False)
    assert prompt.startswith("<tool_call>" + json.dumps(WEATHER))
    assert tools.peer.submitted[0].sampling.grammar == ""


async def test_calls_in_a_stream(tools: Stack) -> None:
    tools.say(BOTH)
    async with (
        tools.openai() as client,
        client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream,
    ):  # type: ignore[arg-type]
        pieces = [
            event.arguments_delta async for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls" and not message.content and message.tool_calls is not None
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("weather", '{"city": "Rome"}'), ("now", "{}")]
    assert "".join(pieces) == '{"city": "Rome"}{}'


async def test_a_chunk_of_a_stream_has_one_entry_a_call(tools: Stack) -> None:
    """All tokens come in one frame, as after a stall."""
    tokens = tools.say(BOTH)
    tools.peer.automatic = False
    stream = tools.read("/v1/chat/completions", messages=HI, tools=TOOLS)
    request = await tools.next_request()
    tools.peer.emit(request, 0, tokens, FinishReason.STOP)
    await stream.end()
    entries = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in stream.chunks]
    assert [[entry["index"] for entry in each] for each in entries if each] == [[0, 1]]
    whole = [(entry["function"]["name"], entry["function"]["arguments"]) for each in entries for entry in each]
    assert whole == [("weather", '{"city": "Rome"}'), ("now", "{}")]


async def test_an_output_without_calls_and_one_that_is_cut_off(tools: Stack) -> None:
    tools.say("Hello world")
    answer = (await tools.post("/v1/chat/completions", messages=HI, tools=TOOLS)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Hello world", "stop")
    assert "tool_calls" not in answer["message"]
    tools.say(CALL[:50], FinishReason.LENGTH)
    answer = (await tools.post("/v1/chat/completions", messages=HI, tools=TOOLS)).json()["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_calls_that_are_asked_for_are_a_grammar(tools: Stack) -> None:
    tools.say(CALL)
    named = {"type": "function", "function": {"name": "now"}}
    bodies: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": named},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
    ]
    for body in bodies:
        answer = await tools.post("/v1/chat/completions", messages=HI, tools=TOOLS, **body)
        assert answer.status_code == 200, answer.text
    required, single, of_one, none, either = (request.sampling.grammar for request in tools.peer.submitted)
    now = CALL.replace("weather", "now").replace('{"city": "Rome"}', "{}")
    texts = (CALL, BOTH, now, CALL.replace("Rome", "Bonn"), "Hello", '{"a": 1}')
    invented = CALL.replace('"Rome"', '"Rome", "unit": "C"')
    assert not any(follows(tools, grammar, invented) for grammar in (required, single, either))
    assert [follows(tools, required, text) for text in texts] == [True, True, True, False, False, False]
    assert [follows(tools, single, text) for text in texts] == [True, False, True, False, False, False]
    assert [follows(tools, of_one, text) for text in texts] == [False, False, True, False, False, False]
    assert none == "" and "weather" not in tools.tokenizer.decode(unpack_tokens(tools.peer.submitted[3].prompt))
    assert [follows(tools, either, text) for text in texts] == [True, True, True, False, False, True]


async def test_a_bad_schema_is_told_without_the_grammar_around_it(tools: Stack) -> None:
    for parameters, reason in (
        ({"properties": {"city": "Rome"}}, "schema must be an object or boolean"),
        (
            {"properties": {"city": {"type": "strng"}}},
            "'properties.city.type' is 'strng'; expected array, boolean, integer, null, number, object, string.",
        ),
        (
            {"properties": {"city": {"type": "string", "pattern": "("}}},
            "'properties.city.pattern' is '(', no regular expression: unclosed group.",
        ),
    ):
        tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        answer = await tools.post("/v1/chat/completions", messages=HI, tools=[tool], tool_choice="required")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.endswith(reason) and "call" not in message, message


async def test_some_tools_may_be_allowed_of_all(tools: Stack) -> None:
    tools.say(CALL)
    for mode in ("required", "auto"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = await tools.post("/v1/chat/completions", messages=HI, tools=TOOLS, tool_choice=choice)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
    required, auto = (request.sampling.grammar for request in tools.peer.submitted)
    now = CALL.replace("weather", "now").replace('{"city": "Rome"}', "{}")
    assert [follows(tools, required, text) for text in (CALL, now)] == [True, False] and auto == ""
    assert '"now"' in tools.tokenizer.decode(unpack_tokens(tools.peer.submitted[0].prompt))


async def test_arguments_in_the_history_reach_the_template_as_objects(tools: Stack) -> None:
    tools.say("Rain.")
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    assert (await tools.post("/v1/chat/completions", messages=messages, tools=TOOLS)).status_code == 200
    prompt = tools.tokenizer.decode(unpack_tokens(tools.peer.submitted[0].prompt), skip_special_tokens=False)
    assert "weather(Oslo)<|end|><|tool|>Rain" in prompt


@pytest.mark.parametrize("depth", [101, 900, 960, 100_000])
async def test_arguments_in_the_history_that_are_nested_deep_stay_text(tools: Stack, depth: int) -> None:
    """A model may have written them."""
    tools.say("Rain.")
    arguments = "[" * depth + "]" * depth
    called = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": f'{{"city": {arguments}}}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [called]}]
    answer = await tools.post("/v1/chat/completions", messages=messages, tools=TOOLS)
    assert answer.status_code == 200, answer.text
    prompt = tools.tokenizer.decode(unpack_tokens(tools.peer.submitted[0].prompt), skip_special_tokens=False)
    assert prompt.endswith("f()<|end|>")


async def test_a_template_that_knows_no_tools(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", byte_level_tokenizer(), max_len=MAX_LEN)
    async with with_room(nats_settings, folder) as stack:
        stack.say('[{"name": "weather", "arguments": {"city": "Oslo"}}]')
        answer = (await stack.post("/v1/chat/completions", messages=HI, tools=TOOLS)).json()
        called = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        assert called == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert "weather" in stack.tokenizer.decode(unpack_tokens(stack.peer.submitted[0].prompt))


async def test_marks_that_are_special_tokens_are_seen(nats_settings: BusSettings, tmp_path: Path) -> None:
    """Other special tokens are hidden as ever."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    folder = write_checkpoint(tmp_path / "special", tokenizer, TEMPLATE, MAX_LEN)
    async with with_room(nats_settings, folder) as stack:
        stack.say("Well.<|user|> " + BOTH)
        whole = (await stack.post("/v1/chat/completions", messages=HI, tools=TOOLS)).json()["choices"][0]
        assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "Well.")
        assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["weather", "now"]
        told = (await stack.post("/v1/chat/completions", messages=HI)).json()["choices"][0]["message"]["content"]
        assert "<tool_call>" not in told
        stack.say(BOTH)
        required = await stack.post("/v1/chat/completions", messages=HI, tools=TOOLS, tool_choice="required")
        assert len(required.json()["choices"][0]["message"]["tool_calls"]) == 2
        assert follows(stack, stack.peer.submitted[-1].sampling.grammar, BOTH)


async def test_what_is_refused(tools: Stack) -> None:
    strict = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"not": {"pattern": "(?=a)"}}},
    }
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tools": [NOW, NOW]}, "tools", "two functions"),
        ({"tools": TOOLS, "guided_regex": "a"}, "tools", "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "tools"),
        ({"tools": [strict], "tool_choice": "required"}, "tools", "not"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "regex"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name", "regex"),
    ]
    for body, param, words in refused:
        answer = await tools.post("/v1/chat/completions", messages=HI, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        assert words in error["message"], error["message"]


APIS = {
    "/v1/chat/completions": (
        {"messages": HI},
        lambda schema: {"type": "function", "function": {"name": "f", "parameters": schema}},
        "tools[1].function.parameters",
    ),
    "/v1/responses": (
        {"input": "Hi"},
        lambda schema: {"type": "function", "name": "f", "parameters": schema},
        "tools[1].parameters",
    ),
    "/v1/messages": (
        {"messages": HI, "max_tokens": 5},
        lambda schema: {"name": "f", "input_schema": schema},
        "tools[1].input_schema",
    ),
}


@pytest.mark.parametrize(
    ("schema", "place", "name"),
    [
        ({"type": "objekt"}, "type", "objekt"),
        ({"type": "object", "properties": {"a": {"type": "int"}}}, "properties.a.type", "int"),
        (
            {"type": "object", "properties": {"a": {"items": {"type": ["string", "nul"]}}}},
            "properties.a.items.type",
            "nul",
        ),
        ({"type": "object", "properties": {"a": {"anyOf": [{}, {"type": "X"}]}}}, "properties.a.anyOf[1].type", "X"),
        ({"type": "object", "$defs": {"d": {"type": "STRING"}}}, "$defs.d.type", "STRING"),
    ],
)
@pytest.mark.parametrize("path", APIS)
async def test_a_type_that_there_is_not_is_refused_by_name(
    tools: Stack, path: str, schema: dict[str, Any], place: str, name: str
) -> None:
    body, tool, param = APIS[path]
    answer = await tools.post(path, **body, tools=[tool({"type": "object"}) | {"name": "g"}, tool(schema)])
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400, answer.text
    assert f"'{param}': '{place}' is '{name}'; expected array, boolean, integer" in message
    if path != "/v1/messages":
        assert answer.json()["error"]["param"] == param


async def test_schemas_that_others_take_are_taken(tools: Stack) -> None:
    tools.say("Hi")
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"type": {"type": "string"}, "enum": {"enum": [{"type": "objekt"}]}}},
        {"type": "object", "properties": {"a": {"type": None}, "b": True, "c": {"default": {"type": "objekt"}}}},
        {"type": "object", "properties": {"a": {"type": ["integer", "number", "boolean", "null", "array"]}}},
        {"properties": {"a": {"const": {"type": "x"}, "examples": [{"type": "y"}]}}},
        {"type": "object", "x-note": {"type": "objekt"}},
        {},
    ]
    for schema in schemas:
        for path, (body, tool, _) in APIS.items():
            answer = await tools.post(path, **body, tools=[tool(schema)])
            assert answer.status_code == 200, (path, schema, answer.text)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"a": {"pattern": "^[a-"}}},
            "'properties.a.pattern' is '^[a-', no regular expression: unclosed character class",
        ),
        ({"patternProperties": {"x\n(": {}}}, "'patternProperties' is 'x\\n(', no regular expression: unclosed group"),
    ],
)
async def test_an_expression_that_cannot_be_read_is_named_in_one_line(
    tools: Stack, schema: dict[str, Any], reason: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    answer = await tools.post("/v1/chat/completions", messages=HI, tools=[tool], tool_choice="required")
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, f"Invalid value for 'tools': {reason}.")
    answer = await tools.post("/v1/chat/completions", messages=HI, guided_json=schema)
    assert answer.json()["error"]["message"] == f"Invalid value for 'guided_json': {reason}."
    answer = await tools.post("/v1/chat/completions", messages=HI, guided_regex="(a")
    assert (
        answer.json()["error"]["message"]
        == "Invalid value for 'guided_regex': '(a' is no regular expression: unclosed group."
    )
