"""Conversations as clients send them, in templates as checkpoints bring them: nothing is dropped, and what a template
refuses is said in another form."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.errors import ApiError
from services.gateway.openai.conversations import arguments_object, plain_messages
from services.gateway.openai.schemas import UNSEEN, ChatMessage
from services.gateway.text.chat_templates import ChatTemplate

END = "<|end|>"
QWEN = (
    "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|user|>RESULT {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
"""Roles that it does not know vanish."""
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System must be at the beginning.') }}{% endif %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
)
"""Without system messages, as Gemma's."""
LLAMA31 = (
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once') }}{% endif %}"
    "<|assistant|>CALL<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
CODER = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call {{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
NO_TOOLS = STRICT.replace(", 'tool'", "")
TEMPLATES = {"qwen": QWEN, "strict": STRICT, "alternating": ALTERNATING, "llama": LLAMA31, "coder": CODER}


def prompt(template: str, *messages: dict[str, Any]) -> str:
    """What becomes of messages as they come in a request."""
    read = msgspec.convert(list(messages), list[ChatMessage])
    return ChatTemplate(template, {}).render(plain_messages(read))


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def called(arguments: Any) -> dict[str, Any]:
    return said("assistant", None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_instructions_of_a_developer_reach_the_model(template: str) -> None:
    text = prompt(template, said("developer", "Say BANANA"), said("user", "What?"))
    as_system = prompt(template, said("system", "Say BANANA"), said("user", "What?"))
    assert "BANANA" in text and "developer" not in text and text == as_system


def test_a_template_that_knows_developers_is_given_them() -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}DEV {% endif %}{{ m.content }} {% endfor %}"
    assert prompt(template, said("developer", "A"), said("user", "B")) == "DEV A B "


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("s:A s:B u:C", "<|system|>A\n\nB<|end|><|user|>C<|end|>"),
        ("s:A d:B u:C", "<|system|>A\n\nB<|end|><|user|>C<|end|>"),
        ("u:A s:B", "<|user|>A\n\nB<|end|>"),
        ("s:A u:B a:C s:D", "<|system|>A<|end|><|user|>B<|end|><|assistant|>C<|end|><|user|>D<|end|>"),
        ("s:A u:B a:C s:D u:E", "<|system|>A<|end|><|user|>B<|end|><|assistant|>C<|end|><|user|>D\n\nE<|end|>"),
        ("u:A a:B s:C d:D u:E", "<|user|>A<|end|><|assistant|>B<|end|><|user|>C\n\nD\n\nE<|end|>"),
        ("s:A a:B u:C", "<|system|>A<|end|><|assistant|>B<|end|><|user|>C<|end|>"),
        ("s:A", "<|system|>A<|end|>"),
    ],
)
def test_system_messages_may_be_several_and_anywhere(messages: str, expected: str) -> None:
    assert prompt(STRICT, *_short(messages)) == expected


def _short(messages: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [said(roles[each[0]], each[2:]) for each in messages.split()]


def test_a_template_without_system_messages_is_told_in_the_users() -> None:
    assert prompt(ALTERNATING, *_short("s:A u:B a:C s:D u:E")) == (
        "<|user|>A\n\nD\n\nB<|end|><|assistant|>C<|end|><|user|>E<|end|>"
    )


def test_a_template_that_takes_later_system_messages_has_them_in_their_place() -> None:
    assert prompt(QWEN, *_short("s:A u:B s:C")) == "<|system|>A<|end|><|user|>B<|end|><|system|>C<|end|>"


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.sampled_from(["system", "developer"]), min_size=0, max_size=3),
    st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_no_instruction_is_dropped_wherever_it_stands(name: str, before: list[str], later: list[bool]) -> None:
    """In turns of user and assistant, with system messages before them and after some."""
    messages = [said(role, f"rule {i}") for i, role in enumerate(before)]
    for i, has_rule in enumerate(later):
        messages.append(said("assistant" if i % 2 else "user", f"turn {i}"))
        if has_rule:
            messages.append(said("system", f"later {i}"))
    text = prompt(TEMPLATES[name], *messages)
    assert all(message["content"] in text for message in messages)


def test_what_no_form_is_taken_of_is_refused_with_the_first_reason() -> None:
    with pytest.raises(ApiError, match="must alternate"):
        prompt(ALTERNATING, *_short("u:A u:B"))
    with pytest.raises(ApiError, match="no"):
        prompt("{{ raise_exception('no') }}", *_short("s:A u:B"))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_no_calls_are_no_calls(template: str) -> None:
    turns = [said("user", "A"), said("assistant", "B", tool_calls=[]), said("user", "C")]
    assert prompt(template, *turns) == prompt(template, turns[0], said("assistant", "B"), turns[2])


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (' {"a": "b\nc"} ', {"a": "b\nc"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ('"null"', {}),
        ('""', {}),
        ("{}", {}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("not JSON", {"arguments": "not JSON"}),
        ("[]", {"arguments": []}),
        ("[1]", {"arguments": [1]}),
        ([1], {"arguments": [1]}),
        ("7", {"arguments": 7}),
        ("true", {"arguments": True}),
        ('"text"', {"arguments": "text"}),
        ('{"a": "b\\ud83d", "\\ude00": [{"c": "\\ud83d\\ude00"}]}', {"a": "b?", "?": [{"c": "\U0001f600"}]}),
        ('"\\ud83d"', {"arguments": "?"}),
        ('"{\\"a\\": \\"\\\\ud83d\\"}"', {"a": "?"}),
    ],
)
def test_arguments_are_an_object_however_they_were_written(written: Any, taken: dict[str, Any]) -> None:
    assert arguments_object(written) == taken
    shown = "".join(f" {key}={value}" for key, value in taken.items())
    result = said("tool", "R", tool_call_id="1")
    assert (
        prompt(CODER, said("user", "A"), called(written), result) == f"<|user|>A<|end|><call f{shown}><|tool|>R<|end|>"
    )


@given(st.text() | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_arguments_of_any_text_are_an_object(text: str) -> None:
    arguments = arguments_object(text)
    assert isinstance(arguments, dict) and json.dumps(arguments, ensure_ascii=False).encode()


def test_results_of_tools_in_the_history_of_a_template_that_knows_none() -> None:
    """The last turn of an agent, say, has no tools any more."""
    text = prompt(NO_TOOLS, said("user", "A"), called('{"a": 1}'), said("tool", "R1"), said("tool", "R2"))
    call = '[{"name": "f", "arguments": {"a": 1}}]'
    assert text == f"<|user|>A<|end|><|assistant|>{call}<|end|><|user|>R1\n\nR2<|end|>"
    assert "RESULT R1" in prompt(QWEN, said("user", "A"), called("{}"), said("tool", "R1"))
    assert "R1" in prompt(QWEN, said("user", "A"), said("function", "R1", name="f"))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_before_reaches_the_template(name: str) -> None:
    text = prompt(QWEN, said("user", "A"), said("assistant", "B", **{name: "THINK"}), said("user", "C"))
    assert "<|assistant|><think>THINK</think>B<|end|>" in text


def test_reasoning_as_gpt_oss_takes_it() -> None:
    """Beside calls it refuses content with it."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.thinking }}|{{ m.content }};{% endfor %}"
    )
    call = called("{}")["tool_calls"]
    assert prompt(template, said("assistant", "", reasoning="T", tool_calls=call)) == "T|;"
    assert prompt(template, said("assistant", "C", reasoning="T", tool_calls=call)) == "|C;"
    assert prompt(template, said("assistant", "C", reasoning="T")) == "T|C;"


def test_parts_of_a_message_are_text_by_any_of_their_names() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    refusal = [{"type": "refusal", "refusal": "No."}]
    assert (
        prompt(STRICT, said("user", parts), said("assistant", refusal))
        == "<|user|>a\nb\nc<|end|><|assistant|>No.<|end|>"
    )
    assert prompt(STRICT, said("user", "A"), said("assistant", None, refusal="No.")).endswith("<|assistant|>No.<|end|>")
    nulls = [{"type": "text", "text": "a", "refusal": None, "thinking": None}, {"type": "text", "text": None}]
    assert prompt(STRICT, said("user", nulls)) == "<|user|>a\n<|end|>"


@pytest.mark.parametrize("kind", sorted(UNSEEN))
def test_a_text_stands_for_what_a_tool_returned_beside_text(kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]
    text = prompt(STRICT, said("user", "A"), said("tool", parts))
    assert f"a\n[{UNSEEN[kind]} was left out here" in text


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_calls_from_before_there_were_tools_reach_the_model(template: str) -> None:
    old = prompt(
        template,
        said("user", "What?"),
        said("assistant", None, function_call={"name": "f", "arguments": '{"a": 1}'}),
        said("function", "RAIN", name="f"),
    )
    now = prompt(
        template,
        said("user", "What?"),
        said("assistant", None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]),
        said("tool", "RAIN", tool_call_id="1"),
    )
    assert old == now and "RAIN" in old


def test_a_result_from_before_there_were_tools_names_its_call() -> None:
    called_twice = [said("assistant", None, function_call={"name": name, "arguments": "{}"}) for name in "fg"]
    results = [said("function", f"{name}!", name=name) for name in "fg"]
    turns = [turn for pair in zip(called_twice, results, strict=True) for turn in pair]
    first, result, second, other = plain_messages(msgspec.convert(turns, list[ChatMessage]))
    assert result["role"] == other["role"] == "tool"
    assert first["tool_calls"][0]["id"] == result["tool_call_id"] != other["tool_call_id"]
    assert second["tool_calls"][0]["id"] == other["tool_call_id"]


@pytest.mark.parametrize("thinking", ["WHY", [{"type": "text", "text": "W"}, {"type": "text", "text": "HY"}]])
def test_reasoning_may_be_a_part_of_an_assistants_message(thinking: Any) -> None:
    parts = [{"type": "thinking", "thinking": thinking, "signature": "x"}, {"type": "text", "text": "So."}]
    assert prompt(QWEN, said("user", "A"), said("assistant", parts)) == (
        "<|user|>A<|end|><|assistant|><think>WHY</think>So.<|end|>"
    )
    with pytest.raises(ApiError, match="'thinking' is not supported"):
        prompt(QWEN, said("user", parts))
