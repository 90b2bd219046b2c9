"""Anthropic's Messages API over a real socket: blocks, events, tools, reasoning, counts and errors in its shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.anthropic.conversion import chat_request
from services.gateway.anthropic.messages import MessageRequest
from services.gateway.http.errors import ApiError
from services.gateway.http.ignored_fields import IGNORED_HEADER
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.test_reasoning import TEMPLATE
from tests.gateway.test_structured import follows
from tests.gateway.test_tools import CALL, MAX_LEN, TOOLS

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather",
    "input_schema": TOOLS[0]["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
BEGUN = [*HI, {"role": "assistant", "content": "One:"}]
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
EDITS = ["view", "create", "str_replace", "insert"]
EDITOR_FIELDS = ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"]
HOSTED = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "claude", byte_level_tokenizer(), TEMPLATE, MAX_LEN)


@pytest.fixture
async def claude(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], instance=False) as stack:
        await stack.peer.add_instance("a", MODEL, max_model_len=MAX_LEN)
        yield stack


async def ask(stack: Stack, **body: Any) -> Any:
    answer = await stack.post("/v1/messages", **{"max_tokens": 500, "messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    answer = await stack.post("/v1/messages", **{"max_tokens": 500, "messages": HI, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def prompt_of(stack: Stack) -> str:
    return stack.tokenizer.decode(unpack_tokens(stack.peer.submitted[-1].prompt), skip_special_tokens=False)


async def test_a_message(claude: Stack) -> None:
    claude.say("Hello world")
    answer = await ask(claude, system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}])
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["id"].startswith("msg_") and answer["content"] == [{"type": "text", "text": "Hello world"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    num_prompt = len(unpack_tokens(claude.peer.submitted[-1].prompt))
    expected = {"input_tokens": num_prompt, "output_tokens": len(claude.ids("Hello world")) + 1}
    assert answer["usage"] == {**expected, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    assert prompt_of(claude) == "<|system|>Be short.<|end|><|user|>Hi<|end|><|assistant|>"
    claude.peer.num_cached_tokens = 3
    usage = (await ask(claude))["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == len(unpack_tokens(claude.peer.submitted[-1].prompt)) - 3
    claude.say("one two", FinishReason.LENGTH)
    assert (await ask(claude))["stop_reason"] == "max_tokens"
    claude.say("one two three")
    stopped = await ask(claude, stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": "one "}]


async def test_an_answer_that_is_begun_is_gone_on_with(claude: Stack) -> None:
    claude.say("two")
    block = [{"type": "text", "text": "One:", "citations": None}]
    for content in ("One:", block):
        answer = await ask(claude, messages=[*HI, {"role": "assistant", "content": content}])
        assert answer["content"] == [{"type": "text", "text": "two"}]
        assert prompt_of(claude).endswith("<|user|>Hi<|end|><|assistant|>One:")
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    for content in ("", [], [*block, call]):
        await ask(claude, messages=[*HI, {"role": "assistant", "content": content}])
        assert prompt_of(claude).endswith("<|assistant|>")


async def test_tools_of_others_need_no_name(claude: Stack) -> None:
    claude.say("Hello")
    mcp = {"type": "mcp_toolset", "mcp_server_name": "docs"}
    assert (await ask(claude, tools=[mcp, HOSTED]))["stop_reason"] == "end_turn"
    assert "docs" not in prompt_of(claude)


async def test_models_are_listed_in_anthropics_shape_by_pages(claude: Stack) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await claude.client.get("/v1/models")).json()
    assert listed["object"] == "list" and listed["data"][0]["object"] == "model"
    for name in ("first", "second"):
        made = await claude.client.post("/admin/routes", json={"name": name, "arms": {MODEL: 1}})
        assert made.status_code == 200
    whole = (await claude.client.get("/v1/models", headers=headers)).json()
    names = [one["id"] for one in whole["data"]]
    assert sorted(names) == sorted(["first", "second", MODEL])
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, names[0], names[-1])
    model = next(one for one in whole["data"] if one["id"] == MODEL)
    assert (await claude.client.get(f"/v1/models/{MODEL}", headers=headers)).json() == model
    assert datetime.fromisoformat(model.pop("created_at")).tzinfo is not None
    assert model == {"type": "model", "id": MODEL, "display_name": MODEL, "max_input_tokens": MAX_LEN}
    for query, page, has_more in (
        ("limit=2", names[:2], True),
        (f"limit=2&after_id={names[0]}", names[1:], False),
        (f"limit=1&before_id={names[2]}", names[1:2], True),
        (f"after_id={names[2]}", [], False),
    ):
        told = (await claude.client.get(f"/v1/models?{query}", headers=headers)).json()
        assert ([one["id"] for one in told["data"]], told["has_more"]) == (page, has_more), query
    for path, status, kind in (
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?after_id=nobody", 400, "invalid_request_error"),
        ("/v1/models/nobody", 404, "not_found_error"),
    ):
        answer = await claude.client.get(path, headers=headers)
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)


async def test_stored_chats_are_refused_by_name(claude: Stack) -> None:
    for method, path in (
        ("GET", ""),
        ("GET", "/chatcmpl-1"),
        ("DELETE", "/chatcmpl-1"),
        ("GET", "/chatcmpl-1/messages"),
    ):
        answer = await claude.client.request(method, f"/v1/chat/completions{path}")
        assert answer.status_code == 404
        assert "not stored" in answer.json()["error"]["message"]


async def test_a_stream_has_anthropics_events(claude: Stack) -> None:
    claude.say(f"<think>Let me see.</think>\n\nWell.\n{CALL}")
    events = await events_of(claude, tools=[WEATHER, HOSTED])
    start, *blocks, delta, stop = events
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == len(unpack_tokens(claude.peer.submitted[-1].prompt))
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and delta["usage"]["output_tokens"] > 5
    whole: list[dict[str, Any]] = []
    is_open = False
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(whole)
            whole.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(whole) - 1
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            of = name[event["delta"]["type"]]
            whole[-1]["json" if of == "partial_json" else of] += event["delta"][of]
        else:
            assert event == {"type": "content_block_stop", "index": len(whole) - 1}
        is_open = event["type"] != "content_block_stop"
    thinking, text, call = whole
    assert (thinking["type"], thinking["thinking"], thinking["signature"]) == ("thinking", "Let me see.", "")
    assert (text["type"], text["text"]) == ("text", "Well.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {})
    assert json.loads(call["json"]) == {"city": "Rome"} and not is_open
    answer = await ask(claude, tools=[WEATHER, HOSTED])
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"city": "Rome"} and answer["stop_reason"] == "tool_use"
    assert "web_search" not in prompt_of(claude) and '"weather"' in prompt_of(claude)
    quiet = await ask(claude, tools=[WEATHER], thinking={"type": "disabled"})
    assert [block["type"] for block in quiet["content"]] == ["text", "tool_use"]


def test_a_conversation_becomes_that_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    body = {
        "model": "m",
        "max_tokens": 7,
        "system": "S",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "T", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "C"},
                    call,
                    {**call, "id": "t2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "R1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "R2"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "D"},
                ],
            },
            {"role": "system", "content": "Reminder"},
        ],
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "output_config": {"effort": "high"},
    }
    chat = chat_request(msgspec.convert(body, MessageRequest))
    assert [message.role for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "system",
    ]
    assert [message.content for message in chat.messages] == ["S", "A\nB", "C", "R1", "R2", "D", "Reminder"]
    assert chat.messages[2].reasoning_content == "T"
    assert [each["id"] for each in chat.messages[2].tool_calls or ()] == ["t1", "t2"]
    assert [message.tool_call_id for message in chat.messages[3:5]] == ["t1", "t2"]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.user, chat.stop) == ("required", False, "u", ["x"])
    assert (chat.max_completion_tokens, chat.reasoning_effort) == (7, "high")


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}),
        ("web_search", [{"type": "web_search_result", "url": "u", "title": "T", "encrypted_content": "e"}]),
        (
            "web_fetch",
            {"type": "web_fetch_result", "content": {"type": "document", "source": {"type": "text", "data": "x"}}},
        ),
        (
            "code_execution",
            {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
        ),
        ("tool_search", {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference"}]}),
    ],
)
def test_results_of_tools_that_anthropic_runs_are_left_out(kind: str, content: Any) -> None:
    ran = {"type": "server_tool_use", "id": "s1", "name": kind, "input": {"query": "q"}}
    result = {"type": f"{kind}_tool_result", "tool_use_id": "s1", "content": content}
    blocks = [ran, result, {"type": "text", "text": "A"}]
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "On"},
    ]
    chat = chat_request(msgspec.convert({"max_tokens": 7, "messages": messages}, MessageRequest))
    assert [message.content for message in chat.messages] == ["Q", "A", "On"]
    if isinstance(content, dict):
        of_client = [{"role": "user", "content": [{**result, "type": "tool_result"}]}]
        with pytest.raises(msgspec.ValidationError, match=r"got `object` - at `\$.content` - at `\$.messages"):
            msgspec.convert({"max_tokens": 7, "messages": of_client}, MessageRequest)


def test_a_choice_of_a_tool_that_is_left_out_is_none() -> None:
    body = {"max_tokens": 7, "messages": [{"role": "user", "content": "Q"}], "tools": [WEATHER, HOSTED]}
    for name, chosen in ((HOSTED["name"], None), (WEATHER["name"], {"name": WEATHER["name"]})):
        chat = chat_request(msgspec.convert({**body, "tool_choice": {"type": "tool", "name": name}}, MessageRequest))
        choice = msgspec.to_builtins(chat.tool_choice)
        assert (choice and choice["function"]) == chosen
    beside = [WEATHER, {**HOSTED, "name": WEATHER["name"]}]
    asked = {**body, "tools": beside, "tool_choice": {"type": "tool", "name": WEATHER["name"]}}
    chat = chat_request(msgspec.convert(asked, MessageRequest))
    assert msgspec.to_builtins(chat.tool_choice)["function"] == {"name": WEATHER["name"]}, "the function of that name"


@pytest.mark.parametrize(
    ("kind", "required", "fields", "commands"),
    [
        ("bash_20241022", [], ["command", "restart"], None),
        ("bash_20250124", [], ["command", "restart"], None),
        ("text_editor_20241022", ["command", "path"], EDITOR_FIELDS, [*EDITS, "undo_edit"]),
        ("text_editor_20250124", ["command", "path"], EDITOR_FIELDS, [*EDITS, "undo_edit"]),
        ("text_editor_20250429", ["command", "path"], [*EDITOR_FIELDS, "insert_text"], EDITS),
        ("text_editor_20250728", ["command", "path"], [*EDITOR_FIELDS, "insert_text"], EDITS),
        ("text_editor_20990101", ["command", "path"], [*EDITOR_FIELDS, "insert_text"], EDITS),
        ("memory_20250818", ["command"], [*EDITOR_FIELDS, "insert_text", "old_path", "new_path"],
         [*EDITS, "delete", "rename"]),
    ],
)  # fmt: skip
def test_tools_that_anthropic_defines_and_the_client_runs_are_functions(
    kind: str, required: list[str], fields: list[str], commands: list[str] | None
) -> None:
    tools = [{"type": kind, "name": "it", "max_characters": 9, "cache_control": {"type": "ephemeral"}}, HOSTED]
    body = {"max_tokens": 7, "messages": HI, "tools": tools, "tool_choice": {"type": "tool", "name": "it"}}
    chat = chat_request(msgspec.convert(body, MessageRequest))
    ((tool,), choice) = chat.tools or [], msgspec.to_builtins(chat.tool_choice)
    assert tool.function.name == choice["function"]["name"] == "it" and tool.function.description
    parameters = tool.function.parameters or {}
    assert (parameters["required"], list(parameters["properties"])) == (required, fields)
    assert parameters["properties"]["command"].get("enum") == commands
    assert all(one["description"] for one in parameters["properties"].values())


async def test_calls_of_such_tools_come_back_as_any(claude: Stack) -> None:
    edit = {"command": "view", "path": "/a", "view_range": [1, -1]}
    claude.say(f"<tool_call>\n{json.dumps({'name': 'str_replace_based_edit_tool', 'arguments': edit})}\n</tool_call>")
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    ]
    asked = {"max_tokens": 500, "messages": HI, "tools": tools}
    answer = await claude.post("/v1/messages", **asked, tool_choice={"type": "any"})
    assert answer.headers[IGNORED_HEADER] == "tools.2"
    (call,) = answer.json()["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "str_replace_based_edit_tool", edit)
    assert '"restart"' in prompt_of(claude) and "display_width_px" not in prompt_of(claude)
    grammar = claude.peer.submitted[-1].sampling.grammar
    for command, is_one in (("view", True), ("undo_edit", False)):
        written = {"name": "str_replace_based_edit_tool", "arguments": {**edit, "command": command}}
        assert follows(claude, grammar, f"<tool_call>\n{json.dumps(written)}\n</tool_call>") is is_one
    counted = await claude.post("/v1/messages/count_tokens", messages=HI, tools=tools)
    assert counted.json()["input_tokens"] == len(unpack_tokens(claude.peer.submitted[-1].prompt))


def test_documents_of_text_are_read_and_a_text_stands_for_what_a_tool_returned_beside_it() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    plain = {"type": "text", "media_type": "text/plain", "data": "P"}
    found = {"type": "search_result", "source": "https://a", "title": "T", "content": [{"type": "text", "text": "F"}]}
    inner = {"type": "content", "content": [{"type": "text", "text": "I"}]}
    result = [{"type": "text", "text": "R"}, image, pdf, found, {"type": "tool_reference", "tool_name": "x"}]
    asked = [{"type": "document", "title": "D", "source": plain}, {"type": "document", "source": inner}, found]
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]
    chat = chat_request(msgspec.convert({"model": "m", "max_tokens": 1, "messages": messages}, MessageRequest))
    assert [message.content for message in chat.messages] == [
        "D\nP\nI\nT\nhttps://a\nF",
        "",
        "R\n[An image was left out here: only text of what tools return is read.]\n"
        "[A file was left out here: only text of what tools return is read.]\nT\nhttps://a\nF",
    ]
    text = {"type": "text", "text": "T"}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [text, pdf]}]}
    with pytest.raises(ApiError, match="is not supported") as refused:
        chat_request(msgspec.convert(body, MessageRequest))
    assert refused.value.param == "messages[0].content[1].type"


async def test_what_is_asked_for_is_followed(claude: Stack) -> None:
    claude.say(CALL)
    await ask(claude, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert follows(claude, claude.peer.submitted[-1].sampling.grammar, CALL)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    claude.say('{"a": 1}')
    for body in (
        {"output_format": {"type": "json_schema", "schema": schema}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ):
        await ask(claude, **body, temperature=0.5, top_p=0.9, top_k=7, unknown_beta=1)
        sampling = claude.peer.submitted[-1].sampling
        assert follows(claude, sampling.grammar, '{"a": 1}') and not follows(claude, sampling.grammar, "{}")
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


async def test_tokens_are_counted_before(claude: Stack) -> None:
    claude.say("Hello")
    body = {"messages": HI, "system": "Be short.", "tools": [WEATHER]}
    counted = await claude.post("/v1/messages/count_tokens", **body)
    await ask(claude, **body)
    assert counted.json() == {"input_tokens": len(unpack_tokens(claude.peer.submitted[-1].prompt))}


async def test_errors_are_told_as_anthropic_tells_them(claude: Stack) -> None:
    claude.say("Hello")
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    long, longer = ([{"role": "user", "content": "x" * n * MAX_LEN}] for n in (1, 1000))
    cases: list[tuple[str, dict[str, Any], int, str, str]] = [
        ("", {"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ("", {"model": "nobody"}, 404, "not_found_error", "nobody"),
        ("", {"messages": image}, 400, "invalid_request_error", "image"),
        ("", {"messages": long}, 400, "invalid_request_error", f" tokens > {MAX_LEN} maximum"),
        (
            "",
            {"messages": longer},
            400,
            "invalid_request_error",
            "prompt is too long: This model's maximum context length",
        ),
        ("", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ("/count_tokens", {"model": "nobody"}, 404, "not_found_error", "nobody"),
        ("/batches", {}, 404, "not_found_error", "/v1/messages/batches"),
        ("", {"tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        ("", {"messages": BEGUN, "output_format": FORMAT}, 400, "invalid_request_error", "has a format"),
        ("", {"messages": [*HI, {"role": "assistant", "content": "One: "}]}, 400, "invalid_request_error",
         "final assistant content cannot end with trailing whitespace"),
        ("", {"messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "One:\n"}]}]}, 400,
         "invalid_request_error", "trailing whitespace"),
        ("", {"messages": BEGUN, "thinking": {"type": "enabled"}}, 400, "invalid_request_error", "'thinking' is enabled"),
        ("", {"messages": BEGUN, "thinking": {"type": "adaptive"}}, 400, "invalid_request_error", "'thinking'"),
    ]  # fmt: skip
    for path, body, status, kind, words in cases:
        answer = await claude.post(f"/v1/messages{path}", **{"max_tokens": 9, "messages": HI, **body})
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), answer.text
        assert words in told["error"]["message"]
    claude.peer.automatic = False
    asking = asyncio.create_task(claude.post("/v1/messages", max_tokens=50, messages=HI, stream=True))
    request = await claude.next_request(len(claude.peer.submitted))
    claude.peer.emit(request, 0, claude.ids("one"))
    error = ErrorInfo(ErrorCode.INTERNAL, "the device is lost")
    claude.peer.emit(request, len(claude.ids("one")), [], FinishReason.ERROR, error=error)
    last = (await asking).text.removesuffix("\n\n").split("\n\n")[-1]
    assert (
        last.startswith("event: error\ndata: ")
        and json.loads(last.partition("data: ")[2])["error"]["type"] == "api_error"
    )


async def test_a_key_may_come_as_anthropics_clients_send_it(nats_settings: BusSettings, checkpoint: Path) -> None:
    spec = ModelSpec(MODEL, str(checkpoint))
    async with running_stack(nats_settings, [spec], api_keys="one", stream_keep_alive_s=0.2) as stack:
        tokens = stack.say("Hello")
        body = {"model": MODEL, "max_tokens": 50, "messages": HI}
        for headers, status in (
            ({"x-api-key": "one"}, 200),
            ({"authorization": "Bearer one"}, 200),
            ({"x-api-key": "x"}, 401),
        ):
            answer = await stack.client.post(
                "/v1/messages", json=body, headers={**headers, "anthropic-version": "2023-06-01"}
            )
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        stack.peer.automatic = False
        sent = {"json": {**body, "stream": True}, "headers": {"x-api-key": "one"}}
        asking = asyncio.create_task(stack.client.post("/v1/messages", **sent))
        request = await stack.next_request(len(stack.peer.submitted))
        await asyncio.sleep(0.6)
        stack.peer.emit(request, 0, tokens, FinishReason.STOP)
        text = (await asking).text
        assert text.startswith("event: message_start\n") and "event: ping\n" in text.partition("content_block_start")[0]


async def test_more_tokens_than_fit_become_those_that_do(claude: Stack) -> None:
    claude.say("Hello")
    await ask(claude, max_tokens=32000)
    submitted = claude.peer.submitted[-1]
    assert submitted.sampling.max_tokens == MAX_LEN - len(unpack_tokens(submitted.prompt))
    chat = {"messages": HI, "max_tokens": 32000}
    assert (await claude.post("/v1/chat/completions", **chat)).status_code == 400
    assert (await claude.post("/v1/chat/completions", **chat, fit_max_tokens=True)).status_code == 200
    assert claude.peer.submitted[-1].sampling.max_tokens == MAX_LEN - len(
        unpack_tokens(claude.peer.submitted[-1].prompt)
    )
