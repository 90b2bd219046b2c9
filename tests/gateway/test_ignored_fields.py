"""Fields that nobody knows are told of, and change nothing."""

from __future__ import annotations

import logging

import pytest

from services.gateway.http.ignored_fields import IGNORED_HEADER, MAX_NAMED
from tests.gateway.conftest import MODEL, Stack


async def test_they_are_named_to_the_client_and_once_in_the_log(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "services.gateway.http.ignored_fields")
    hi = [{"role": "user", "content": "Hi"}]
    bodies = [
        ("/v1/chat/completions", {"messages": hi, "max_token": 9, "stream_options": None, "n": 1}, "max_token"),
        (
            "/v1/chat/completions",
            {"messages": hi, "stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
        ),
        ("/v1/completions", {"prompt": "x", "best": 1, "a\r\nb: c": 2, "x-request-timeout": 9}, "best, a??b??c"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "text", "q": 1}}}, "text.format.q"),
        ("/v1/messages", {"messages": hi, "max_tokens": 9, "betas": []}, "betas"),
        (
            "/v1/messages",
            {"messages": hi, "max_tokens": 9, "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]},
            "tools.0",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [
                            {"type": "function", "name": "f"},
                            {"type": "mcp"},
                            {"type": "namespace", "name": "m", "tools": [{"type": "web_search"}]},
                        ],
                    }
                ],
            },
            "tools.0.tools.1, tools.0.tools.2.tools.0",
        ),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}, "tools.1"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
    ]
    for _ in range(2):
        for path, body, named in bodies:
            answer = await stack.client.post(path, json={"model": MODEL, **body})
            assert (answer.status_code, answer.headers.get(IGNORED_HEADER)) == (200, named), answer.text
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(bodies) + 2, "two of the bodies have two such fields"
    assert told[0] == (
        "/v1/chat/completions: the field 'max_token' is not known and has no effect; is 'max_tokens' meant?"
    )
    await stack.client.post("/v1/chat/completions", json={"model": MODEL, "messages": hi, "max_token": 9},
                            headers={"authorization": "Bearer other"})  # fmt: skip
    assert len(caplog.records) == len(told) + 1
    assert "Bearer" not in caplog.text
    await stack.until_metrics(f"tideway_gateway_ignored_fields_total {2 * len(told) + 1}.0")


async def test_what_is_known_is_not_named_and_errors_name_it_too(stack: Stack) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "unknown": 1}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "response_format": format_, "unknown": None,
            "chat_template_kwargs": {"any": 1}, "logit_bias": {"7": 1}}  # fmt: skip
    answer = await stack.client.post("/v1/chat/completions", json=body)
    assert IGNORED_HEADER not in answer.headers
    answer = await stack.client.post("/v1/chat/completions", json={**body, "top_p": 0.5, "model": "nobody", "x": 1})
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (404, "x")
    many = {f"f{number}": 1 for number in range(100)}
    answer = await stack.client.post("/v1/completions", json={"model": MODEL, "prompt": "x", **many})
    assert answer.headers[IGNORED_HEADER].count(",") == MAX_NAMED - 1
