"""Custom tools of chats: a text in place of arguments."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.schemas import (
    ChatMessage,
    ChatRequest,
    CustomDefinition,
    CustomFormat,
    CustomGrammar,
    Tool,
)
from services.gateway.tools.formats import HERMES
from services.gateway.tools.output_reader import OutputReader
from services.gateway.tools.use import tool_use_of
from shared.messages.requests import FinishReason, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack
from tests.gateway.test_responses import prompt_of
from tests.gateway.test_tools import MAX_LEN, TEMPLATE, with_room

PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def tools(nats_settings: BusSettings, tmp_path: Path) -> AsyncIterator[Stack]:
    async with with_room(
        nats_settings, write_checkpoint(tmp_path / "m", byte_level_tokenizer(), TEMPLATE, MAX_LEN)
    ) as stack:
        yield stack


TEXT = 'a\n"b" {c}'


def called(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


async def test_calls_bring_their_text_whole_and_streamed(tools: Stack) -> None:
    tools.say(tagged(called("patch", input=TEXT), called("find", q=1), called("patch", input="x")))
    async with tools.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HI, tools=[PATCH, FIND])
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=HI, tools=[PATCH, FIND], stream=True
            )
        ]
        choice = whole.choices[0]
        first, second, third = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert (first.type, first.custom.name, first.custom.input) == ("custom", "patch", TEXT)  # type: ignore[union-attr]
        assert (second.type, second.function.name) == ("function", "find")  # type: ignore[union-attr]
        assert third.custom.input == "x"  # type: ignore[union-attr]
        told = [call.model_dump(exclude_none=True) for chunk in chunks for choice in chunk.choices
                for call in choice.delta.tool_calls or ()]  # fmt: skip
        customs = [call["custom"] for call in told if call.get("type") == "custom"]
        assert customs == [{"name": "patch", "input": TEXT}, {"name": "patch", "input": "x"}]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # The call and what it returned go back as they came.
        tools.say("Done.")
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in (first, second, third)]
        history = [*HI, choice.message.model_dump(exclude_none=True), *results]
        await client.chat.completions.create(model=MODEL, messages=history, tools=[PATCH, FIND])
        assert "<|assistant|>patch(" in prompt_of(tools) and prompt_of(tools).count("<|tool|>ok<|end|>") == 3
        replayed = plain_messages(msgspec.convert(history, list[ChatMessage]))[1]["tool_calls"]
        assert [call["function"]["arguments"] for call in replayed] == [{"input": TEXT}, {"q": 1}, {"input": "x"}]
        assert {call["type"] for call in replayed} == {"function"}


async def test_one_that_is_cut_off_is_left_out(tools: Stack) -> None:
    tools.say(tagged(called("patch", input="whole"), called("patch", input="half a text"))[:-25], FinishReason.LENGTH)
    answer = (await tools.post("/v1/chat/completions", messages=HI, tools=[PATCH])).json()["choices"][0]
    assert [call["custom"]["input"] for call in answer["message"]["tool_calls"]] == ["whole"]
    assert answer["finish_reason"] == "length"


async def test_choices_and_refusals(tools: Stack) -> None:
    tools.say(tagged(called("patch", input="ab")))
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}
    formed = {"type": "custom", "custom": {"name": "patch", "format": regex}}
    one = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for choice in (one, "required", allowed):
        answer = await tools.post("/v1/chat/completions", messages=HI, tools=[formed, FIND], tool_choice=choice)
        assert answer.status_code == 200, answer.text
        assert '"pattern": "^(?:[ab]+)$"' in tools.peer.submitted[-1].sampling.grammar.replace('\\"', '"')
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    for tool, param in (
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "custom", "custom": {"name": "p", "format": lark}}, "tools[0].custom.format.grammar.syntax"),
        ({"type": "custom", "custom": {"name": "p", "format": {"type": "grammar"}}}, "tools[0].custom.format.grammar"),
        ({"type": "teleport"}, "tools[0].type"),
    ):
        answer = await tools.post("/v1/chat/completions", messages=HI, tools=[tool])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("is_cut", [False, True])
def test_however_the_output_is_cut_the_call_is_the_same(is_cut: bool) -> None:
    grammar = CustomFormat("grammar", CustomGrammar("a+", "regex"))
    tool = Tool("custom", custom=CustomDefinition("patch", None, grammar))
    use = tool_use_of(ChatRequest(model="m", messages=[], tools=[tool]))
    text = f"Now.<tool_call>\n{called('patch', input=TEXT)}\n</tool_call>"
    for place in range(len(text) + 1):
        reader = OutputReader(HERMES, use, None, "x")
        told = []
        for part in (text[:place], text[place:]):
            reader.feed(part)
            told.append(reader.take())
        told.append(reader.end("length" if is_cut else "stop")[0])
        (call,) = [call for each in told for call in each.custom_calls]
        assert (call.custom.name, call.custom.input) == ("patch", TEXT)
        assert not any(each.calls for each in told) and "".join(each.content for each in told).strip() == "Now."


async def test_what_tools_make_of_a_prompt_is_told_and_what_they_may_leave_out(tools: Stack) -> None:
    tools.say("Well.")
    answer = await tools.post("/v1/chat/completions", messages=HI, tools=[FIND])
    assert answer.status_code == 200
    told = (await tools.post("/tokenize", messages=HI, tools=[FIND])).json()["tokens"]
    assert told == unpack_tokens(tools.peer.submitted[-1].prompt)
    history = [*HI, {"role": "tool", "tool_call_id": "a", "content": None}]
    assert (await tools.post("/v1/chat/completions", messages=history, tools=[FIND])).status_code == 200
    listed = {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "a b c", "input_schema": {}}]}
    assert (await tools.post("/v1/responses", input=[listed, *HI])).status_code == 200
    brought = {"type": "additional_tools", "tools": [{"type": "function", "name": "a b c"}]}
    assert (await tools.post("/v1/responses", input=[brought, *HI])).json()["error"]["param"] == "input"
