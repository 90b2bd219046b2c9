"""Structured answers and tool calls by the clients that people use for them. The demonstration models know nothing, so what
is asked for is asked for by grammar: that answers parse is the server's doing."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import LLAMA

ASK = "Who wrote the first program?"


class Subject(StrEnum):
    MATHEMATICS = "mathematics"
    MUSIC = "music"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    born: int = Field(ge=1500, le=2100)
    fields: list[Subject] = Field(max_length=2)


@pytest.fixture
def messages() -> list[Any]:
    return [{"role": "user", "content": ASK}]


def test_openai_parses(base_url: str, messages: list[Any]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.parse(
        model=LLAMA, messages=messages, response_format=Person, n=2, seed=3, logprobs=True
    )
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert all(choice.logprobs.content for choice in answer.choices)
    with client.chat.completions.stream(model=LLAMA, messages=messages, response_format=Person, seed=3) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == people[0]


def test_openai_calls_tools(base_url: str, messages: list[Any]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    tools = [openai.pydantic_function_tool(Person, name="remember")]
    asked: dict[str, Any] = {
        "model": LLAMA,
        "messages": messages,
        "tools": tools,
        "seed": 4,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.parse(**asked, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Person)
    named = {"type": "function", "function": {"name": "remember"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    history = [*messages, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    told = client.chat.completions.create(model=LLAMA, messages=history, tools=tools, max_tokens=8)
    assert told.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_langchain(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=base_url, api_key="none", model=LLAMA, max_retries=0, timeout=60, seed=5)
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke(ASK), Person), method
    # This method tells the model of no schema: whatever object it is, it is one.
    raw = model.with_structured_output(Person, method="json_mode", include_raw=True).invoke(ASK)["raw"]
    assert raw.response_metadata["finish_reason"] == "length" or isinstance(json.loads(raw.content), dict)
    called = model.bind_tools([Person], tool_choice="any").invoke(ASK)
    assert called.tool_calls and all(call["name"] == "Person" for call in called.tool_calls)
    chunks = list(model.bind_tools([Person], tool_choice="Person").stream(ASK))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert Person(**whole.tool_calls[0]["args"])


def test_instructor(base_url: str, messages: list[Any]) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    raw = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(raw, mode=mode)
        assert isinstance(client.chat.completions.create(model=LLAMA, messages=messages, response_model=Person), Person)
    # JSON asks for any object, which no schema bounds: this model seldom makes the one that is wanted.
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON)
    kwargs: dict[str, Any] = {"extra_body": {"response_format": None, "guided_json": Person.model_json_schema()}}
    assert isinstance(
        client.chat.completions.create(model=LLAMA, messages=messages, response_model=Person, **kwargs), Person
    )


def test_litellm(base_url: str, messages: list[Any]) -> None:
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # which its way to tools imports
    asked: dict[str, Any] = {
        "model": f"hosted_vllm/{LLAMA}", "api_base": base_url, "api_key": "none", "messages": messages, "timeout": 60,
    }  # fmt: skip
    # It leaves maxLength out of a pydantic model's schema.
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    answer = litellm.completion(**asked, response_format=form)
    assert Person.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "remember", "parameters": Person.model_json_schema()}}
    answer = litellm.completion(**asked, tools=[tool], tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        assert call.function.name == "remember" and Person.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**asked, response_format=form, stream=True))
    assert Person.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
