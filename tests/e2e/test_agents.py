"""The request sequences of Codex and Claude Code, in shapes made after their public documentation, against a real stack. The
tools that the model calls really run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack

COMMANDS = ["cat notes.txt", "wc -l notes.txt"]
RUN = {
    "type": "object",
    "properties": {"command": {"type": "string", "enum": COMMANDS}},
    "required": ["command"],
    "additionalProperties": False,
}


def end_soon(folder: Path) -> None:
    """Makes many tokens of a checkpoint end its output: answers without a limit would be as long as its context."""
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config["eos_token_id"] = list(range(2, 64))
        (folder / name).write_text(json.dumps(config))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("checkpoints")
    models = {name: str(make_llama(folder / name, max_len=8192)) for name in ("llama", "brief")}
    end_soon(folder / "brief")
    with Stack(models, num_instances=1, environment={"TIDEWAY_PROFILE": "off"}) as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    return tmp_path


def run_tool(workspace: Path, arguments: dict[str, Any]) -> str:
    assert arguments.keys() == {"command"} and arguments["command"] in COMMANDS
    return subprocess.run(
        arguments["command"].split(), cwd=workspace, capture_output=True, text=True, check=True
    ).stdout


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream, whose names are their types."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for event in answer.text.strip().split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith((":", "id:"))]
        if lines and lines[-1] != "data: [DONE]":
            found.append(json.loads(lines[-1].removeprefix("data: ")))
            assert lines[0] == f"event: {found[-1]['type']}"
    return found


# ---------------------------------------------------------------------------------------------------------- Codex

CODEX = {
    "originator": "codex_cli_rs", "session_id": "0199", "OpenAI-Beta": "responses=experimental",
    "Authorization": "Bearer none", "Accept": "text/event-stream",
}  # fmt: skip
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": RUN},
    {
        "type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
    },
    {
        "type": "namespace", "name": "mcp__files", "description": "Files.",
        "tools": [{"type": "function", "name": "read", "strict": False, "parameters": RUN}],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
]  # fmt: skip


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex(stack: Stack, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The response at the end of a turn's stream, whose events were checked against it."""
    body = {
        "model": "llama", "instructions": "You are a coding agent.", "input": items, "tools": CODEX_TOOLS,
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199",
        "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "1"}, **more,
    }  # fmt: skip
    with httpx.Client(base_url=stack.url, headers=CODEX, timeout=60) as client:
        events = events_of(client, "/v1/responses", body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    response: dict[str, Any] = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"] and done
    for item in done:
        pieces = [e["delta"] for e in events if e["type"].endswith(".delta") and e["item_id"] == item["id"]]
        told = item.get("arguments", item.get("input"))
        assert "".join(pieces) == (item["content"][0]["text"] if told is None else told)
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    return response


def test_codex(stack: Stack, workspace: Path) -> None:
    history = [said("developer", "Sandbox: read-only."), said("user", "What do the notes say?")]
    first = codex(stack, history, tool_choice={"type": "function", "name": "shell"})
    (call,) = first["output"]
    assert (first["status"], call["type"], call["name"]) == ("completed", "function_call", "shell")
    output = run_tool(workspace, json.loads(call["arguments"]))
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Read."}], "content": None,
               "encrypted_content": "gAAAA"}  # fmt: skip
    kept = {key: value for key, value in call.items() if key not in ("id", "status")}
    history += [thought, kept, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]

    named = codex(stack, history, tool_choice={"type": "function", "name": "read", "namespace": "mcp__files"})
    (call,) = named["output"]
    assert (call["name"], call["namespace"]) == ("read", "mcp__files")
    content = [{"type": "input_text", "text": run_tool(workspace, json.loads(call["arguments"]))}]
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0K"}
    history += [
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": content},
        {"type": "function_call", "call_id": "v1", "name": "view_image", "arguments": '{"path": "a.png"}'},
        {"type": "function_call_output", "call_id": "v1", "output": [image]},
        # It was interrupted: nothing came back.
        {"type": "function_call", "call_id": "v2", "name": "shell", "arguments": '{"comma'},
        said("user", "<turn_aborted>The user interrupted the previous turn.</turn_aborted>"),
    ]

    patched = codex(stack, history, tool_choice={"type": "custom", "name": "apply_patch"}, max_output_tokens=40)
    (call,) = patched["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch") and "arguments" not in call
    history += [
        {**call, "input": "*** Begin Patch\n*** End Patch"},
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        said("assistant", "The notes say one and two."),
        said("user", "Thanks."),
    ]
    last = codex(stack, history, max_output_tokens=16, temperature=0)
    assert last["output"][0]["type"] == "message" and last["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}

    with httpx.Client(base_url=stack.url, headers=CODEX, timeout=60) as client:
        asked = {"model": "llama", "input": history, "tools": CODEX_TOOLS, "instructions": "You are a coding agent."}
        counted = client.post("/v1/responses/input_tokens", json=asked).json()
        assert counted["input_tokens"] == last["usage"]["input_tokens"]
        compacted = client.post("/v1/responses/compact", json={"model": "brief", "input": history}).json()
    assert [item["role"] for item in compacted["output"] if item["type"] == "message"] == ["user"] * 3
    assert [item["type"] for item in compacted["output"]].count("compaction") == 1
    shorter = codex(stack, [*compacted["output"], said("user", "Go on.")], max_output_tokens=8)
    assert shorter["output"][0]["type"] == "message"


def test_codex_with_responses_that_are_kept(stack: Stack, workspace: Path) -> None:
    """Only what is new is sent, behind `previous_response_id`."""
    chosen = {"type": "function", "name": "shell"}
    first = codex(stack, [said("user", "What do the notes say?")], store=True, tool_choice=chosen)
    call = first["output"][0]
    output = run_tool(workspace, json.loads(call["arguments"]))
    new = [{"type": "function_call_output", "call_id": call["call_id"], "output": output}]
    second = codex(stack, new, store=True, previous_response_id=first["id"], max_output_tokens=8)
    assert second["previous_response_id"] == first["id"] and second["output"][0]["type"] == "message"
    with httpx.Client(base_url=stack.url, headers=CODEX, timeout=60) as client:
        items = client.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
        assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
        assert items[-1]["output"] == output
        assert client.get(f"/v1/responses/{second['id']}").json()["output"] == second["output"]
        # Clients that know items as stored name them by their ids.
        items = [said("user", "What do the notes say?"), {"type": "item_reference", "id": call["id"]}, *new]
        asked = {"model": "llama", "instructions": "You are a coding agent.", "tools": CODEX_TOOLS, "input": items}
        counted = client.post("/v1/responses/input_tokens", json=asked).json()
        assert counted["input_tokens"] == second["usage"]["input_tokens"]
        assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        assert client.get(f"/v1/responses/{first['id']}").status_code == 404
        gone = {"model": "llama", "input": new, "previous_response_id": first["id"]}
        assert client.post("/v1/responses", json=gone).status_code == 404


# ---------------------------------------------------------------------------------------------------- Claude Code

CLAUDE = {
    "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,new-2027",
    "x-api-key": "none", "x-app": "cli", "anthropic-dangerous-direct-browser-access": "true",
    "x-stainless-helper-method": "stream",
}  # fmt: skip
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {"name": "Bash", "description": "Runs a command.", "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#",
     **RUN}},
    {"name": "Read", "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}},
     "eager_input_streaming": True},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, **EPHEMERAL},
]  # fmt: skip
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
    {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
    {"type": "text", "text": "Environment: linux", **EPHEMERAL},
]


def claude_body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": "llama", "messages": messages, "system": SYSTEM, "tools": CLAUDE_TOOLS, "max_tokens": 32000,
        "metadata": {"user_id": "user_1"}, "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, **more,
    }  # fmt: skip


def claude(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The message that the events of a stream make up."""
    events = [
        e for e in events_of(client, "/v1/messages?beta=true", claude_body(messages, **more)) if e["type"] != "ping"
    ]
    message: dict[str, Any] = events[0]["message"]
    assert events[0]["type"] == "message_start" and message["content"] == [] and events[-1] == {"type": "message_stop"}
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            name, into = {
                "text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking"),
                "signature_delta": ("signature", "signature"), "input_json_delta": ("partial_json", "json"),
            }[delta["type"]]  # fmt: skip
            block[into] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


def test_claude_code(stack: Stack, workspace: Path) -> None:
    reminder = "<system-reminder>Be brief.</system-reminder>"
    asked = [{"type": "text", "text": reminder}, {"type": "text", "text": "What do the notes say?", **EPHEMERAL}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    with httpx.Client(base_url=stack.url, headers=CLAUDE, timeout=60) as client:
        assert client.head("/").status_code < 500
        assert sorted(model["id"] for model in client.get("/v1/models?limit=1000").json()["data"]) == ["brief", "llama"]
        quota = {"model": "llama", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        probed = client.post("/v1/messages?beta=true", json=quota).json()
        # Its one token may be the one that ends an answer.
        assert probed["usage"]["output_tokens"] == 1 and probed["stop_reason"] in ("max_tokens", "end_turn")

        called = claude(client, messages, tool_choice={"type": "tool", "name": "Bash"})
        (call,) = called["content"]
        assert (call["type"], call["name"], called["stop_reason"]) == ("tool_use", "Bash", "tool_use")
        thought = {"type": "thinking", "thinking": "I read them.", "signature": "EuYB"}
        redacted = {"type": "redacted_thinking", "data": "EmwK"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": run_tool(workspace, call["input"])}
        messages += [
            {"role": "assistant", "content": [thought, redacted, call]},
            {"role": "user", "content": [{**result, **EPHEMERAL}]},
        ]
        again = claude(client, messages, tool_choice={"type": "any", "disable_parallel_tool_use": True},
                       tools=CLAUDE_TOOLS[:1])  # fmt: skip
        (call,) = again["content"]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
        failed = [{"type": "text", "text": run_tool(workspace, call["input"])}, image]
        messages += [
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": failed, "is_error": True},
                    {"type": "text", "text": "[Request interrupted by user]"},
                ],
            },
        ]
        with client.stream("POST", "/v1/messages?beta=true", json=claude_body(messages, stream=True)) as interrupted:
            assert next(interrupted.iter_lines()) == "event: message_start"
        counted = client.post("/v1/messages/count_tokens?beta=true", json=claude_body(messages)).json()
        last = claude(client, messages, max_tokens=12, temperature=1)
        usage = last["usage"]
        if last["stop_reason"] == "max_tokens":
            assert last["content"][0]["type"] == "text" and usage["output_tokens"] == 12
        else:  # the token that ends an answer was drawn
            assert last["stop_reason"] == "end_turn" and usage["output_tokens"] <= 12
        assert usage["cache_read_input_tokens"] > 0
        assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]

        schema = {"type": "object", "properties": {"isNewTopic": {"type": "boolean"}, "title": {"enum": ["Notes", None]}},
                  "required": ["isNewTopic", "title"], "additionalProperties": False}  # fmt: skip
        form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "tools": [], "thinking": None}
        titled = client.post("/v1/messages?beta=true", json=claude_body(messages[:1], **form)).json()
        assert json.loads(titled["content"][0]["text"])["title"] in ("Notes", None)
        missing = client.post("/v1/messages?beta=true", json=claude_body(messages, model="claude-opus-4-6"))
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
