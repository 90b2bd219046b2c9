"""The Responses API over a real socket, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from services.gateway.http.errors import ApiError
from services.gateway.openai.replies import FunctionChunk, ToolCallChunk
from services.gateway.responses.client_tools import client_tool
from services.gateway.responses.conversion import chat_request, items_of, items_of_output, sealed
from services.gateway.responses.messages import InputItem, OutputItem, ResponseRequest, ResponseTool
from services.gateway.responses.tools import called_tools, left_out
from services.gateway.responses.writing import ResponseBuilder
from services.gateway.streams.generation import Delta
from services.gateway.text.logprobs import ShownToken
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, TokenLogprob, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.test_tools import BOTH, MAX_LEN, TEMPLATE, TOOLS, with_room


def prompt_of(stack: Stack, number: int = -1) -> str:
    return stack.tokenizer.decode(unpack_tokens(stack.peer.submitted[number].prompt), skip_special_tokens=False)


async def test_a_conversation_goes_on_by_id(stack: Stack) -> None:
    async with stack.openai() as client:
        first = await client.responses.create(
            model=MODEL, input="Hi", instructions="Be short.", max_output_tokens=20, metadata={"a": "b"}
        )
        assert first.status == "completed" and first.output_text == "Hello world" and first.store
        assert first.usage is not None and first.usage.output_tokens == len(stack.ids("Hello world")) + 1
        assert first.metadata == {"a": "b"} and first.instructions == "Be short."
        assert prompt_of(stack) == "<|system|>Be short.<|end|><|user|>Hi<|end|><|assistant|>"
        again = await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        assert again.previous_response_id == first.id
        expected = "<|user|>Hi<|end|><|assistant|>Hello world<|end|><|user|>And?<|end|><|assistant|>"
        assert prompt_of(stack) == expected
        found = await client.responses.retrieve(first.id)
        assert found.model_dump() == first.model_dump()
        await client.responses.delete(first.id)
        for read in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await read(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        assert gone.value.param == "previous_response_id"  # type: ignore[union-attr]
        # What continues it has what it needs of it.
        third = await client.responses.create(model=MODEL, input="So?", previous_response_id=again.id)
        assert third.output_text == "Hello world" and prompt_of(stack).startswith(
            expected.removesuffix("<|assistant|>")
        )


async def test_a_stream_has_openais_events(stack: Stack) -> None:
    async with stack.openai() as client, client.responses.stream(model=MODEL, input="Hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == "Hello world"
    async with stack.openai() as client:
        assert (await client.responses.retrieve(final.id)).output_text == "Hello world"


async def test_events_of_a_response_whose_tokens_are_kept_no_more(nats_settings: BusSettings, tmp_path: Path) -> None:
    template = TEMPLATE + "{# </think> #}"
    folder = write_checkpoint(tmp_path / "over", byte_level_tokenizer(), template, MAX_LEN)
    written = [
        {"name": "apply_patch", "arguments": {"input": "x"}},
        {"name": "weather", "arguments": {"city": "Rome"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
    ]
    calls = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written)
    async with with_room(nats_settings, folder) as stack, stack.openai() as client:
        stack.say(f"<think>I see.</think>\nNow.\n{calls}")
        asked: Any = {"model": MODEL, "input": "Hi", "tools": CODEX_TOOLS, "include": ["reasoning.encrypted_content"]}
        live = [event async for event in await client.responses.create(**asked, stream=True)]
        stored = await client.responses.create(**asked)
        replayed = [event async for event in await client.responses.retrieve(stored.id, stream=True)]
        assert replayed[-1].response.model_dump() == stored.model_dump()  # type: ignore[union-attr]

        def told(events: list[Any]) -> list[Any]:
            """All of them without ids and times, each text in one delta."""
            made: list[Any] = []
            for event in events:
                plain = event.model_dump(exclude={"sequence_number", "item_id", "response", "logprobs"})
                plain.get("item", {}).update(id="", call_id="")
                if "delta" in plain and made and made[-1]["type"] == plain["type"]:
                    made[-1]["delta"] += plain["delta"]
                else:
                    made.append(plain)
            return made

        assert told(replayed) == told(live)


async def test_what_is_cut_is_incomplete_and_what_is_not_stored_is_nowhere(stack: Stack) -> None:
    stack.say("one two", FinishReason.LENGTH)
    async with stack.openai() as client:
        cut = await client.responses.create(model=MODEL, input="Hi", store=False, max_output_tokens=2)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens" and cut.output[0].status == "incomplete"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(cut.id)
        stack.peer.automatic = False
        with pytest.raises(openai.APIStatusError) as late:
            await client.responses.create(model=MODEL, input="Hi", extra_headers={"x-request-timeout": "0.3"})
        assert late.value.status_code == 408


async def test_logprobs_of_a_response(stack: Stack) -> None:
    async with stack.openai() as client:
        answer = await client.responses.create(
            model=MODEL, input="Hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert part.logprobs and all(len(each.top_logprobs) == 2 for each in part.logprobs)


@pytest.fixture
async def keyed(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], api_keys="one,two") as stack:
        stack.say("Hello world")
        yield stack


async def test_responses_are_their_keys(keyed: Stack) -> None:
    async with keyed.openai("one") as one, keyed.openai("two") as two:
        mine = await one.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(mine.id)
        with pytest.raises(openai.NotFoundError):
            await two.responses.create(model=MODEL, input="Hi", previous_response_id=mine.id)


async def test_what_cannot_be_had_is_told(stack: Stack) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
                ]
            },
            "input",
        ),
        ({"input": "x", "truncation": "none"}, "truncation"),
        ({"input": "long " * 4000, "truncation": "auto"}, "input"),
        ({"input": "x", "tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": [{"type": "teleport"}]}, "input[0].type"),
        ({"input": "x", "tool_choice": {"type": "teleport"}}, "tool_choice.type"),
        ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "strng"}}}},
            "text.format.schema",
        ),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x" * 4000}, "input"),
    ]
    for body, param in bodies:
        answer = await stack.client.post("/v1/responses", json={"model": MODEL, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not stack.peer.submitted


async def test_a_failure_in_the_stream_is_an_event(stack: Stack) -> None:
    stack.peer.automatic = False
    async with stack.openai() as client:
        asking = asyncio.create_task(client.responses.create(model=MODEL, input="Hi", stream=True))
        request = await stack.next_request()
        stack.peer.emit(request, 0, stack.ids("one"))
        stream = await asking
        error = ErrorInfo(ErrorCode.INTERNAL, "the device is lost")
        stack.peer.emit(request, len(stack.ids("one")), [], FinishReason.ERROR, error=error)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed" and events[-1].response.error is not None


def test_calls_and_their_results_become_messages_of_a_chat() -> None:
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm", "annotations": []}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "reasoning", "summary": []},
    ]
    request = msgspec.convert({"model": "m", "input": items}, ResponseRequest)
    messages = chat_request(request, items_of(request)).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[0].content == "ab" and messages[1].content == "hm" and messages[2].tool_call_id == "c1"
    assert [each["id"] for each in messages[1].tool_calls or ()] == ["c1", "c2"]


def test_what_follows_a_call_and_its_tokens_leave_it_whole() -> None:
    response: Any = SimpleNamespace(id="resp_1", output=[])
    tokenizer: Any = SimpleNamespace(token_text=str, token_bytes=lambda token_id: b"")
    builder = ResponseBuilder(response, tokenizer, 0)
    known = TokenLogprob(-1.0)
    token = ShownToken(7, known, 0, 0)
    begin = ToolCallChunk(0, FunctionChunk("", "weather"), "c1", "function")
    events = builder.take(Delta(0, "", True, None, [token]))
    events += builder.take(Delta(0, "", False, None, [token], [begin]))
    events += builder.take(Delta(0, "", False, None, [token], [ToolCallChunk(0, FunctionChunk('{"city": '))]))
    events += builder.take(Delta(0, "", False, None, [token]))
    events += builder.take(Delta(0, "Done", False, None, [token], [ToolCallChunk(0, FunctionChunk('"Rome"}'))]))
    events += builder.take(Delta(0, ".", False, None, [token]))
    call, message = response.output
    assert (call.type, call.arguments, call.status) == ("function_call", '{"city": "Rome"}', "completed")
    assert message.type == "message" and message.content[0].text == "Done."
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    assert kinds.count("output_item.added") == 2 and kinds.index("output_item.done") > kinds.index(
        "function_call_arguments.delta"
    )


@pytest.mark.parametrize(
    ("kind", "status"), [("apply_patch", "in_progress"), ("shell", "incomplete"), ("local_shell", "incomplete")]
)
def test_a_call_that_is_cut_off_has_a_status_that_its_type_knows(kind: str, status: str) -> None:
    response: Any = SimpleNamespace(id="resp_1", output=[], include=None)
    builder = ResponseBuilder(response, SimpleNamespace(), None, called_tools([ResponseTool(kind)]))  # type: ignore[arg-type]
    builder.take(Delta(0, "", True, None, [], [ToolCallChunk(0, FunctionChunk("{", kind), "c1", "function")]))
    builder.stop("cancelled")
    assert response.output[0].status == status


async def test_calls_of_functions_and_what_they_returned(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tools", byte_level_tokenizer(), TEMPLATE, MAX_LEN)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with with_room(nats_settings, folder) as stack, stack.openai() as client:
        stack.say("Let me see.\n" + BOTH)
        whole = await client.responses.create(model=MODEL, input="Hi", tools=tools)  # type: ignore[arg-type]
        async with client.responses.stream(model=MODEL, input="Hi", tools=tools) as stream:  # type: ignore[arg-type]
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for answer in (whole, streamed):
            assert answer.output_text == "Let me see." and answer.status == "completed"
            calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
            assert calls == [("weather", {"city": "Rome"}), ("now", {})]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert kinds.count("response.function_call_arguments.done") == 2
        stack.say("Sunny.")
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "21 C"}
            for item in whole.output
            if item.type == "function_call"
        ]
        again = await client.responses.create(
            model=MODEL, input=results, previous_response_id=whole.id, tool_choice="none", tools=tools
        )  # type: ignore[call-overload]
        assert again.output_text == "Sunny."
        assert prompt_of(stack).endswith(
            "<|user|>Hi<|end|><|assistant|>Let me see.weather(Rome)now()<|end|><|tool|>21 C<|end|><|tool|>21 C<|end|>"
        )


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
CODEX_TOOLS = [
    {"type": "function", "name": "weather", "strict": False, "parameters": TOOLS[0]["function"]["parameters"]},
    PATCH,
    {"type": "namespace", "name": "mcp__docs", "tools": [{"type": "function", "name": "find", "parameters": {}}]},
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]


def request_of(**fields: Any) -> ResponseRequest:
    return msgspec.convert({"model": "m", "input": "x", **fields}, ResponseRequest)


def test_tools_of_codex_become_functions() -> None:
    request = request_of(tools=CODEX_TOOLS, reasoning={"effort": "high", "summary": "auto"})
    chat = chat_request(request, items_of(request))
    names = ["weather", "apply_patch", "mcp__docs__find", "local_shell"]
    assert [tool.function.name for tool in chat.tools or ()] == names
    patch = (chat.tools or [])[1].function
    assert "start: /x/" in (patch.description or "") and (patch.parameters or {})["required"] == ["input"]
    assert chat.reasoning_effort == "high"


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}),
        ({"type": "function", "name": "find"}, {"type": "function", "function": {"name": "mcp__docs__find"}}),
        (
            {"type": "function", "name": "find", "namespace": "mcp__docs"},
            {"type": "function", "function": {"name": "mcp__docs__find"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}, {"type": "mcp"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
        ),
        ({"type": "web_search"}, None),
        ({"type": "local_shell"}, {"type": "function", "function": {"name": "local_shell"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "local_shell"}, {"type": "shell"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "local_shell"}}]},
            },
        ),
        ("required", "required"),
    ],
)
def test_what_is_chosen_of_tools(choice: Any, chosen: Any) -> None:
    request = request_of(tools=CODEX_TOOLS, tool_choice=choice)
    assert msgspec.to_builtins(chat_request(request, items_of(request)).tool_choice) == chosen
    only_hosted = request_of(tools=[{"type": "web_search"}], tool_choice="required")
    assert chat_request(only_hosted, items_of(only_hosted)).tool_choice is None


def test_what_codex_sends_again_becomes_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "S"}],
            "encrypted_content": "e",
        },
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "mcp__docs", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": 'a\n"b'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "R1"}]},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "R2"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    request = request_of(input=items)
    messages = chat_request(request, items_of(request)).messages
    assert [message.role for message in messages] == ["developer", "user", "assistant", "tool", "tool", "assistant"]
    assert [message.reasoning_content for message in messages] == [None, None, "S", None, None, "T"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in messages[2].tool_calls or ()]
    assert calls == [("mcp__docs__find", "{}"), ("apply_patch", json.dumps({"input": 'a\n"b'}))]
    assert [messages[i].content for i in (3, 4, 5)] == ["R1", "R2", "No."]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "execution": "client", "tools": []},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "data:"}},
        {
            "type": "code_interpreter_call",
            "container_id": "c",
            "code": "1",
            "outputs": [{"type": "logs", "logs": "1"}],
        },
        {"type": "mcp_call", "name": "f", "arguments": "{}", "output": None, "error": {"type": "http_error"}},
        {"type": "web_search_call", "status": {"a": [1]}, "action": {"type": "search"}},
    ],
)
def test_items_of_tools_that_openai_runs_are_left_out_whatever_they_have(item: dict[str, Any]) -> None:
    request = request_of(input=[{"role": "user", "content": "Q"}, {"call_id": "1", **item}])
    assert [message.content for message in chat_request(request, items_of(request)).messages] == ["Q"]


CLIENT_TOOLS: list[Any] = [
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
]
PRINTED = [
    {"stdout": "a\n", "stderr": "b\n", "outcome": {"type": "exit", "exit_code": 1}},
    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
]


async def test_tools_that_openai_defines_and_the_client_runs(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "shells", byte_level_tokenizer(), TEMPLATE, MAX_LEN)
    ran = {"command": ["ls", "-l"], "working_directory": "/tmp"}
    patch = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
    written = [
        {"name": "local_shell", "arguments": ran},
        {"name": "shell", "arguments": {"commands": ["ls", "pwd"], "timeout_ms": 9}},
        {"name": "apply_patch", "arguments": patch},
        {"name": "local_shell", "arguments": {"command": "ls | wc"}},
    ]
    async with with_room(nats_settings, folder) as stack, stack.openai() as client:
        stack.say("".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written))
        whole = await client.responses.create(model=MODEL, input="Hi", tools=CLIENT_TOOLS)
        assert "working_directory" in prompt_of(stack) and "max_output_length" in prompt_of(stack)
        async with client.responses.stream(model=MODEL, input="Hi", tools=CLIENT_TOOLS) as stream:
            events = [event async for event in stream]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [item.status for item in added] == ["in_progress"] * 4 and added[0].action.command == []  # type: ignore[union-attr]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        for items in (whole.output, done):
            shell, commands, change, line = items
            assert shell.type == line.type == "local_shell_call" and shell.status == "completed"
            assert shell.action.to_dict() == {"type": "exec", "env": {}, **ran}
            assert line.action.command == ["bash", "-lc", "ls | wc"]
            assert commands.type == "shell_call" and commands.action.commands == ["ls", "pwd"]
            assert (commands.action.timeout_ms, commands.action.max_output_length) == (9, None)
            assert change.type == "apply_patch_call" and change.operation.to_dict() == patch
            assert all(item.call_id and "arguments" not in item.to_dict() for item in items)
        results: list[Any] = [
            {"type": "local_shell_call_output", "id": shell.id, "output": '{"output": "x"}'},
            {"type": "shell_call_output", "call_id": commands.call_id, "output": PRINTED, "max_output_length": 9},
            {"type": "apply_patch_call_output", "call_id": change.call_id, "status": "failed", "output": "No a."},
            {"type": "apply_patch_call_output", "call_id": line.call_id, "status": "completed"},
        ]
        stack.say("Done.")
        returned = ['{"output": "x"}', "a\nb\nExit code: 1\nIt took too long, and was ended."]
        returned += ["It failed.\nNo a.", "completed"]
        replayed: Any = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in whole.output], *results]
        for body in ({"input": results, "previous_response_id": whole.id}, {"input": replayed}):
            again = await client.responses.create(model=MODEL, tools=CLIENT_TOOLS, **body)
            assert again.output_text == "Done."
            called = "local_shell()shell()apply_patch()local_shell()<|end|>"
            assert prompt_of(stack).endswith(called + "".join(f"<|tool|>{text}<|end|>" for text in returned))
        shown = await client.responses.input_items.list(again.id, order="asc")
        kinds = [call["type"] for call in replayed[1:5]]
        assert [item.type for item in shown.data[1:5]] == kinds
        assert shown.data[1].action.command == ["ls", "-l"]  # type: ignore[union-attr]
        assert [item.status for item in shown.data[5:]] == ["completed", "completed", "failed", "completed"]
        assert [item.to_dict().get("max_output_length") for item in shown.data[5:]] == [None, 9, None, None]


def test_calls_of_such_tools_in_the_history_have_their_arguments() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    items = [
        {"type": "local_shell_call", "id": "i", "call_id": None, "status": "completed", "action": action},
        {"type": "apply_patch_call", "call_id": "2", "operation": {"type": "delete_file", "path": "a"}},
    ]
    request = request_of(input=items)
    calls = chat_request(request, items_of(request)).messages[0].tool_calls or ()
    told = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert told == [
        ("i", "local_shell", {"command": ["ls"]}),
        ("2", "apply_patch", {"type": "delete_file", "path": "a"}),
    ]
    for wrong in ({"type": "shell_call", "call_id": "1", "action": "ls"}, {"type": "shell_call_output", "output": [7]}):
        with pytest.raises(msgspec.ValidationError, match=r"at `\$.(action|output)"):
            request_of(input=[wrong])


def test_only_a_shell_has_an_environment_that_says_where_it_runs() -> None:
    browser = {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"}
    tools = [browser, {"type": "local_shell", "environment": {"type": "x"}}, {"type": "shell", "environment": {}}]
    request = request_of(input="Hi", tools=tools)
    assert [one.name for one in called_tools(request.tools)] == ["local_shell"]
    assert list(left_out(request.tools)) == ["tools.0", "tools.2"]
    for item in ({"role": "user", "content": "Q"}, {"type": "apply_patch_call", "call_id": "1", "operation": {}}):
        assert items_of(request_of(input=[{**item, "status": 5}]))[0].status is None
    for wrong in ({"tools": [{"type": "shell", "environment": "x"}]}, {"input": [{**PATCHED, "status": 5}]}):
        with pytest.raises(msgspec.ValidationError, match=r"at `\$.(environment|status)|`\$.(tools|input)\["):
            request_of(**{"input": "Hi", **wrong})


@pytest.mark.parametrize(
    ("tools", "told", "ignored"),
    [
        ([{"type": "shell"}, {"type": "function", "name": "shell"}], ["function shell"], ["tools.0"]),
        ([{"type": "custom", "name": "apply_patch"}, {"type": "apply_patch"}], ["custom apply_patch"], ["tools.1"]),
        (
            [{"type": "namespace", "name": "local", "tools": [{"type": "shell"}]}, {"type": "shell"}],
            ["client shell"],
            ["tools.1"],
        ),
        (
            [{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "shell"}]}, {"type": "shell"}],
            ["function shell", "client shell"],
            [],
        ),
    ],
)
def test_a_tool_of_openais_is_left_out_where_another_has_its_name(
    tools: Any, told: list[str], ignored: list[str]
) -> None:
    request = request_of(input="Hi", tools=tools)
    assert [f"{one.kind} {one.name}" for one in called_tools(request.tools)] == told
    assert list(left_out(request.tools)) == ignored


PATCHED = {"type": "apply_patch_call_output", "call_id": "1"}


def test_a_command_without_an_exit_code_has_none() -> None:
    outputs = [{"stdout": "a", "outcome": {"type": "exit", "exit_code": code}} for code in (None, 0)]
    request = request_of(input=[{"type": "shell_call_output", "call_id": "1", "output": outputs}])
    assert chat_request(request, items_of(request)).messages[0].content == "a\na\nExit code: 0"


def test_skills_of_a_shell_are_left_out() -> None:
    skills = {"type": "local", "skills": [{"name": "n", "description": "d", "path": "p"}]}
    tools = [{"type": "shell", "environment": {"type": "local"}}, {"type": "local_shell"}]
    assert not [*left_out(request_of(input="Hi", tools=tools).tools)]
    tools[0]["environment"] = skills
    assert [*left_out(request_of(input="Hi", tools=tools).tools)] == ["tools.0.environment.skills"]


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
def test_results_of_such_tools_may_be_parts(kind: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "input_image"}]
    call = {"type": f"{kind}_call", "call_id": "1", "operation": {}, "action": {}}
    request = request_of(input=[call, {"type": f"{kind}_call_output", "call_id": "1", "output": parts}])
    items = msgspec.json.decode(msgspec.json.encode(items_of(request)), type=list[InputItem])
    for each in (items_of(request), items):
        content = chat_request(request, each).messages[-1].content
        assert isinstance(content, str) and content.startswith("ab") and content != "ab"
    with pytest.raises(msgspec.ValidationError, match=r"at `\$.output\[1\]"):
        request_of(input=[{"type": f"{kind}_call_output", "output": [*parts[:1], {"stdout": "x"}]}])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"id": "i", "call_id": "c"}, {"id": "i"}),
        ({"id": "i", "call_id": "c"}, {"id": "c"}),
        ({"id": "i", "call_id": "c"}, {"id": "r", "call_id": "c"}),
        ({"id": "i"}, {"id": "i"}),
        ({"call_id": "c"}, {"call_id": "c"}),
    ],
)
def test_a_result_of_a_local_shell_may_name_its_call_or_the_item(call: dict[str, str], named: dict[str, str]) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    result = request_of(input=[{"type": "local_shell_call_output", "output": "R", **named}])
    stored = OutputItem(type="local_shell_call", status="completed", action=action, **{"id": "x", **call})  # type: ignore[arg-type]
    brought = request_of(input=[{"type": "local_shell_call", "action": action, **call}])
    for before in (items_of(brought), items_of_output([stored])):
        asking, told = chat_request(result, [*before, *items_of(result)]).messages
        assert asking.tool_calls is not None and asking.tool_calls[0]["id"] == told.tool_call_id


def test_a_call_of_a_local_shell_needs_an_id() -> None:
    for one in ({"type": "local_shell_call_output", "output": "R"}, {"type": "local_shell_call", "action": {}}):
        with pytest.raises(ApiError) as refused:
            items_of(request_of(input=[one]))
        assert refused.value.param == "input[0].call_id"


def test_what_a_model_writes_wrong_becomes_a_call_all_the_same() -> None:
    for name, arguments, value in (
        ("local_shell", "{", {"type": "exec", "command": [], "env": {}}),
        ("local_shell", '{"command": ["a", 1], "timeout_ms": "x"}', {"type": "exec", "command": ["a", "1"], "env": {}}),
        ("shell", '{"commands": "ls"}', {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}),
        ("apply_patch", '{"type": "x"}', {"type": "update_file", "path": "", "diff": ""}),
        ("local_shell", '{"command": ["a\\ud83d"]}', {"type": "exec", "command": ["a?"], "env": {}}),
    ):
        tool = client_tool(ResponseTool(name))
        assert tool is not None
        item = OutputItem(id="1", type=tool.item, status="in_progress")
        tool.finish(item, arguments)
        assert getattr(item, tool.field) == value


def test_arguments_of_a_call_may_be_an_object() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": {"a": [1]}}
    result = {"type": "function_call_output", "call_id": "1", "output": "R"}
    request = request_of(input=[call, result])
    calls = chat_request(request, items_of(request)).messages[0].tool_calls or ()
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"a": [1]}]
    for name, wrong in (("arguments", 7), ("output", {"a": 1}), ("output", [{"text": "x"}])):
        with pytest.raises(msgspec.ValidationError, match=rf"at `\$.{name}.*` - at `\$.input"):
            request_of(input=[{**call, name: wrong}, {**result, name: wrong}])
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"}
    for item, name, wrong in (({"role": "user", "content": "Q"}, "output", 5), (custom, "arguments", {"a": 1})):
        with pytest.raises(msgspec.ValidationError, match=rf"at `\$.{name}"):
            request_of(input=[{**item, name: wrong}])


def test_a_text_stands_for_what_tools_returned_beside_text() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "high"}
    output = [{"type": "input_text", "text": "R", "refusal": None}, image, {"type": "input_file", "file_data": "JVBE"}]
    items = [
        {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    request = request_of(input=items)
    content = chat_request(request, items_of(request)).messages[1].content
    assert content == (
        "R[An image was left out here: only text of what tools return is read.]"
        "[A file was left out here: only text of what tools return is read.]"
    )


def test_an_input_that_fits_is_not_cut() -> None:
    request = request_of(input="Hi", truncation="auto")
    assert chat_request(request, items_of(request)).messages[0].content == "Hi"


def test_reasoning_comes_back_sealed() -> None:
    """From clients that hand back no text of it."""
    whole = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "W"}]}
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("Ü", "tideway-reasoning")},
        {"type": "reasoning", "summary": [], "encrypted_content": "tideway-reasoning:%"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("x", "tideway-summary")},
        {**whole, "encrypted_content": sealed("x", "tideway-reasoning")},
        {"type": "message", "role": "assistant", "content": "A"},
    ]
    request = request_of(input=items)
    assert chat_request(request, items_of(request)).messages[0].reasoning_content == "Ü\nW"


async def test_items_of_stored_responses_are_referred_to(keyed: Stack) -> None:
    """Vercel's AI SDK does so where responses are stored."""
    async with keyed.openai("one") as one, keyed.openai("two") as two:
        answer = await one.responses.create(model=MODEL, input="Hi")
        (item,) = answer.output
        again: Any = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item.id}]
        again.append({"role": "user", "content": "More"})
        await one.responses.create(model=MODEL, input=again)
        assert prompt_of(keyed).endswith("Hi<|end|><|assistant|>Hello world<|end|><|user|>More<|end|><|assistant|>")
        for client, item_id in (
            (two, item.id),
            (one, f"{item.id}9"),
            (one, "msg_0"),
            (one, f"{item.id.rpartition('_')[0]}0_0"),
        ):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": item_id}])


async def test_reasoning_and_calls_of_codex(nats_settings: BusSettings, tmp_path: Path) -> None:
    template = TEMPLATE + "{# </think> #}{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    folder = write_checkpoint(tmp_path / "codex", byte_level_tokenizer(), template, MAX_LEN)
    patch = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin"}})
    find = json.dumps({"name": "mcp__docs__find", "arguments": {"q": 1}})
    async with with_room(nats_settings, folder) as stack, stack.openai() as client:
        stack.say(f"<think>I see.</think>\n<tool_call>\n{patch}\n</tool_call>\n<tool_call>\n{find}\n</tool_call>")
        whole = await client.responses.create(model=MODEL, input="Hi", tools=CODEX_TOOLS)  # type: ignore[arg-type]
        async with client.responses.stream(model=MODEL, input="Hi", tools=CODEX_TOOLS) as stream:  # type: ignore[arg-type]
            events = [event async for event in stream]
        streamed = events[-1].response  # type: ignore[union-attr]
        for answer in (whole, streamed):
            reasoning, custom, call = answer.output
            assert reasoning.type == "reasoning" and reasoning.content[0].text == "I see."
            assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", "*** Begin")
            assert (call.type, call.name, call.namespace) == ("function_call", "find", "mcp__docs")
            assert json.loads(call.arguments) == {"q": 1}
            assert answer.usage.output_tokens_details.reasoning_tokens > 0
        included: Any = {"include": ["reasoning.encrypted_content"], "store": False}
        stateless = await client.responses.create(model=MODEL, input="Hi", tools=CODEX_TOOLS, **included)
        sealed_reasoning = stateless.output[0].model_dump(include={"type", "summary", "encrypted_content"})
        assert sealed_reasoning["encrypted_content"] and reasoning.encrypted_content is None
        kinds = [event.type for event in events]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "I see."
        inputs = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
        assert inputs == ["*** Begin"]
        stack.say("Done.")
        result = {"type": "custom_tool_call_output", "call_id": whole.output[1].call_id, "output": "ok"}
        again = await client.responses.create(
            model=MODEL,
            input=[result],  # type: ignore[list-item]
            previous_response_id=whole.id,
            tools=CODEX_TOOLS,  # type: ignore[arg-type]
        )
        assert again.output_text == "Done." and prompt_of(stack).endswith("<|tool|>ok<|end|>I see.")
        replayed = [*[item.model_dump(exclude_none=True) for item in whole.output], result]
        kept_back = [sealed_reasoning, *replayed[1:]]
        for items in (replayed, kept_back):
            again = await client.responses.create(model=MODEL, input=items, tools=CODEX_TOOLS)  # type: ignore[arg-type]
            assert again.output_text == "Done." and prompt_of(stack).endswith("<|tool|>ok<|end|>I see.")


async def test_the_input_of_a_stored_response_and_its_tokens(stack: Stack) -> None:
    async with stack.openai() as client:
        first = await client.responses.create(model=MODEL, input="Hi", instructions="Be short.")
        again = await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        shown = [item async for item in client.responses.input_items.list(again.id, order="asc", limit=2)]
        assert [item.content[0].text for item in shown] == ["Hi", "Hello world", "And?"]
        assert [(item.type, item.role) for item in shown] == [
            ("message", role) for role in ("user", "assistant", "user")
        ]
        newest = await client.responses.input_items.list(again.id)
        assert [item.content[0].text for item in newest.data] == ["And?", "Hello world", "Hi"]
        counted = await client.responses.input_tokens.count(model=MODEL, input="And?", previous_response_id=first.id)
        assert counted.input_tokens == len(unpack_tokens(stack.peer.submitted[-1].prompt))
        for query in ("limit=0", "order=up", "after=nobody"):
            answer = await stack.client.get(f"/v1/responses/{again.id}/input_items?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
        assert (await stack.client.get("/v1/responses/resp_none/input_items")).status_code == 404


async def test_a_conversation_is_made_short(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "long", byte_level_tokenizer(), max_len=MAX_LEN)
    async with with_room(nats_settings, folder) as stack, stack.openai() as client:
        stack.say("A greeting was made.")
        history: list[Any] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello world"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ]
        short = await client.responses.compact(model=MODEL, input=history, instructions="Be short.")
        assert short.object == "response.compaction" and short.usage.output_tokens > 3
        user, summary = short.output
        assert user.type == "message" and user.content[0].text == "Hi"  # type: ignore[union-attr]
        assert summary.type == "compaction" and "greeting" not in summary.encrypted_content
        asked = prompt_of(stack)
        assert asked.startswith("<|system|>Be short.") and "Hello world" in asked and "Write a summary" in asked
        assert asked.endswith("<|end|><|assistant|>")
        output = [item.model_dump(exclude_none=True) for item in short.output]
        await client.responses.create(model=MODEL, input=[*output, {"role": "user", "content": "And?"}])  # type: ignore[list-item]
        told = "<|user|>Hi<|end|><|user|>A summary of the conversation so far:\nA greeting was made.<|end|>"
        assert prompt_of(stack) == told + "<|user|>And?<|end|><|assistant|>"
        first = await client.responses.create(model=MODEL, input="One")
        short = await client.responses.compact(model=MODEL, previous_response_id=first.id)
        assert [item.type for item in short.output] == ["message", "compaction"]
        for body, param in (
            ({}, "input"),
            ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
            ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ):
            answer = await stack.client.post("/v1/responses/compact", json={"model": MODEL, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tools_that_the_input_brings(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with with_room(nats_settings, checkpoint) as stack, stack.openai() as client:
        stack.say('[{"name": "find", "arguments": {}}]')
        tools = [{"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}]
        brought = {"type": "additional_tools", "role": "developer", "tools": tools}
        answer = await client.responses.create(model=MODEL, input=[brought, {"role": "user", "content": "Hi"}])  # type: ignore[list-item]
        (call,) = answer.output
        assert call.type == "function_call" and call.name == "find" and answer.tools[0].type == "function"
