"""Anthropic's client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import LLAMA

anthropic = pytest.importorskip("anthropic")

HI: list[dict[str, Any]] = [{"role": "user", "content": "What is a compiler?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "input_schema": {**CITY, "additionalProperties": False}}
GREEDY = {"temperature": 0}


def test_messages_streams_tools_and_counts(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    whole = client.messages.create(model=LLAMA, max_tokens=12, messages=HI, extra_body=GREEDY)
    assert whole.content[0].text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with client.messages.stream(model=LLAMA, max_tokens=12, messages=HI, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    called = client.messages.create(
        model=LLAMA, max_tokens=60, messages=HI, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}
    )
    (call,) = called.content
    assert called.stop_reason == "tool_use" and call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    again = [*HI, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=LLAMA, max_tokens=5, messages=again).content
    assert client.messages.count_tokens(model=LLAMA, messages=HI).input_tokens > 3
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=5, messages=HI)
