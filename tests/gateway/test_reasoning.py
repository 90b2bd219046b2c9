"""Reasoning parted from answers: wherever the text is cut, and over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from services.gateway.http.ignored_fields import IGNORED_HEADER
from services.gateway.tools.formats import FORMATS
from services.gateway.tools.output_reader import OutputReader
from services.gateway.tools.reasoning import REASONING_FORMATS, Opening, ReasoningSplitter, reasoning_format_of
from services.gateway.tools.use import ToolUse
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.test_structured import follows
from tests.gateway.test_tools import CALL, HI, TOOLS

THINK = REASONING_FORMATS["think"]
TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}"
    "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ reasoning_effort }}{% endif %}"
)

# (text, prompt ends within reasoning, reasoning, answer)
OUTPUTS = [
    ("<think>\nLet me\nsee.\n</think>\n\nHi <b>", False, "Let me\nsee.", "Hi <b>"),
    ("\n<think>A</think>B", False, "A", "B"),
    ("Let me see.\n</think>\n\nHi ", True, "Let me see.", "Hi "),
    ("<think>\nA</think>B", True, "A", "B"),
    ("A <tool_call>{}</tool_call> </thin </think>B", True, "A <tool_call>{}</tool_call> </thin", "B"),
    ("Hi <think>there</think>", False, "", "Hi <think>there</think>"),
    (" Hi", False, "", " Hi"),
    ("<thin", False, "", "<thin"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("cut off \n", True, "cut off", ""),
    ("<think></think>", False, "", ""),
    ("</think>A", True, "", "A"),
    ("<think>\n\n</think>\n\nA</think>", False, "", "A</think>"),
    ("", True, "", ""),
]


def parted(pieces: list[str], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, is_open=is_open)
    told = [splitter.feed(piece) for piece in pieces] + [splitter.flush()]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), OUTPUTS)
def test_reasoning_is_parted_wherever_the_text_is_cut(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    for first in range(len(text) + 1):
        assert parted([text[:first], text[first:]], is_open) == (reasoning, answer)
    assert parted(list(text), is_open) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "<th", "a", " ", "\n", "\u6f6e"])), st.booleans()
)
def test_whatever_a_model_writes_is_parted_the_same_however_it_comes(pieces: list[str], is_open: bool) -> None:
    text = "".join(pieces)
    assert parted(pieces, is_open) == parted([text], is_open) == parted(list(text), is_open)


def test_the_template_says_which_marks() -> None:
    assert reasoning_format_of("{{ content.split('</think>')[-1] }}") is THINK
    assert reasoning_format_of("[THINK]") is REASONING_FORMATS["magistral"]
    assert reasoning_format_of("{{ messages }}") is None


def test_how_an_output_begins() -> None:
    assert THINK.opening("<|assistant|><think>\n") is Opening.WITHIN
    assert THINK.opening("<think>A</think>B<|assistant|>") is Opening.FREE
    assert THINK.opening("<|assistant|><think>\n\n</think>\n\n") is Opening.BEHIND
    assert THINK.opening("<|assistant|><think>A", "<think>A") is Opening.WITHIN
    assert THINK.opening("<|assistant|><think>A</think>B", "<think>A</think>B") is Opening.BEHIND
    assert THINK.opening("<think>", "Hi") is Opening.FREE


def test_harmony() -> None:
    """gpt-oss: channels, recipients and text, cut anywhere."""
    text = (
        "<|channel|>analysis<|message|>Let me <b>.<|end|><|start|>assistant<|channel|>analysis<|message|>And.<|end|>"
        "<|start|>assistant<|channel|>commentary to=python<|message|>1+1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi."
    )
    for first in range(len(text) + 1):
        reader = OutputReader(FORMATS["harmony"], None, None, "output")
        told = []
        for piece in (text[:first], text[first:]):
            reader.feed(piece)
            told.append(reader.take())
        told.append(reader.end("stop")[0])
        assert "".join(one.reasoning for one in told) == "Let me <b>.\nAnd.\n1+1"
        assert "".join(one.content for one in told) == "Hi."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "thinks", byte_level_tokenizer(), TEMPLATE, 2048)


@pytest.fixture
async def thinks(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], instance=False) as stack:
        await stack.peer.add_instance("a", MODEL, max_model_len=2048)
        yield stack


def message_of(answer: Any) -> tuple[Any, Any, Any]:
    (choice,) = answer.json()["choices"]
    assert choice["message"].get("reasoning") == choice["message"].get("reasoning_content")
    return choice["message"].get("reasoning"), choice["message"]["content"], choice["finish_reason"]


async def test_reasoning_of_an_answer(thinks: Stack) -> None:
    thinks.say("<think>Let me see.</think>\n\nHi.")
    answer = await thinks.post("/v1/chat/completions", messages=HI)
    assert message_of(answer) == ("Let me see.", "Hi.", "stop")
    usage = answer.json()["usage"]
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == len(thinks.ids("<think>Let me see.</think>"))
    assert usage["completion_tokens"] > num_reasoning
    hidden = await thinks.post("/v1/chat/completions", messages=HI, include_reasoning=False)
    assert message_of(hidden) == (None, "Hi.", "stop")
    for body in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        whole = await thinks.post("/v1/chat/completions", messages=HI, **body)
        assert message_of(whole) == (None, "<think>Let me see.</think>\n\nHi.", "stop")
        assert whole.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    text = await thinks.post("/v1/completions", prompt="x", max_tokens=100)
    assert text.json()["choices"][0]["text"] == "<think>Let me see.</think>\n\nHi."


async def test_a_prompt_that_ends_within_reasoning(thinks: Stack) -> None:
    thinks.say("Let me see.\n</think>\n\nHi.")
    answer = await thinks.post("/v1/chat/completions", messages=HI, chat_template_kwargs={"enable_thinking": True})
    assert message_of(answer) == ("Let me see.", "Hi.", "stop")
    thinks.say("Let me", FinishReason.LENGTH)
    answer = await thinks.post("/v1/chat/completions", messages=HI, chat_template_kwargs={"enable_thinking": True})
    assert message_of(answer) == ("Let me", "", "length")


async def test_efforts_reach_the_template(thinks: Stack) -> None:
    thinks.say("Hi.")
    for effort in ("none", "high"):
        await thinks.post("/v1/chat/completions", messages=HI, reasoning_effort=effort)
    none, high = (thinks.tokenizer.decode(unpack_tokens(one.prompt), False) for one in thinks.peer.submitted)
    assert none.endswith("<think>\n\n</think>\n\nnone") and high.endswith("<|assistant|>high")


ON, OFF, FREE = "<think>\n", "<think>\n\n</think>\n\n", ""
SWITCHED: list[tuple[dict[str, Any], str, str, str | None]] = [
    ({"enable_thinking": True}, ON, "", None),
    ({"enable_thinking": False}, OFF, "", None),
    ({"enable_thinking": None, "thinking": None, "reasoning": None}, FREE, "", None),
    ({"thinking": {"type": "enabled", "clear_thinking": True}}, ON, "", None),
    ({"thinking": {"type": "adaptive"}}, ON, "", None),
    ({"thinking": {"type": "disabled"}}, OFF, "", None),
    ({"thinking": {"type": ["disabled"]}}, FREE, "", "thinking"),
    ({"thinking": True}, FREE, "", "thinking"),
    ({"reasoning": {"enabled": False}}, OFF, "", None),
    ({"reasoning": {"effort": "high"}}, ON, "high", None),
    ({"reasoning": {"effort": "none"}}, OFF, "none", None),
    ({"reasoning": {"effort": "high", "enabled": False}}, OFF, "high", None),
    (
        {"reasoning": {"effort": "X", "max_tokens": 9, "exclude": None}},
        FREE,
        "",
        "reasoning.effort, reasoning.max_tokens",
    ),
    ({"reasoning": "high"}, FREE, "", "reasoning"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, FREE, "low", "reasoning.effort"),
    ({"reasoning_effort": "none", "enable_thinking": True}, ON, "none", None),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, OFF, "", None),
]


@pytest.mark.parametrize(("body", "begin", "effort", "named"), SWITCHED)
async def test_reasoning_is_turned_on_and_off_by_whichever_field(
    thinks: Stack, body: dict[str, Any], begin: str, effort: str, named: str | None
) -> None:
    thinks.say("Hi.")
    answer = await thinks.post("/v1/chat/completions", messages=HI, **body)
    assert (answer.status_code, answer.headers.get(IGNORED_HEADER)) == (200, named)
    prompt = unpack_tokens(thinks.peer.submitted[-1].prompt)
    assert thinks.tokenizer.decode(prompt, False).partition("<|assistant|>")[2] == begin + effort
    assert (await thinks.post("/tokenize", messages=HI, **body)).json()["tokens"] == prompt


async def test_what_a_template_has_no_switch_for_is_named(nats_settings: BusSettings, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"enable_thinking": False, "thinking": {"type": "disabled"}}
    asked["reasoning"] = {"enabled": True, "effort": "low", "exclude": True}
    switch = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
    for name, template, named in (
        ("none", "{{ messages[0].content }}", "enable_thinking, thinking, reasoning.enabled, reasoning.effort"),
        ("effort", "{{ reasoning_effort }}", "enable_thinking, thinking, reasoning.enabled"),
        ("deepseek", switch, "reasoning.enabled, reasoning.effort"),
    ):
        folder = write_checkpoint(tmp_path / name, byte_level_tokenizer(), template)
        async with running_stack(nats_settings, [ModelSpec(MODEL, str(folder))]) as stack:
            stack.say("Hi.")
            answer = await stack.post("/v1/chat/completions", messages=HI, **asked)
            assert (answer.status_code, answer.headers.get(IGNORED_HEADER)) == (200, named)
            if name == "deepseek":
                for on in (True, False):
                    await stack.post("/v1/chat/completions", messages=HI, enable_thinking=on)
                    prompt = unpack_tokens(stack.peer.submitted[-1].prompt)
                    assert stack.tokenizer.decode(prompt, False) == str(on)


async def test_reasoning_may_be_left_out_as_openrouter_has_it(thinks: Stack) -> None:
    thinks.say("<think>Let me see.</think>\n\nHi.")
    answer = await thinks.post("/v1/chat/completions", messages=HI, reasoning={"exclude": True})
    assert message_of(answer) == (None, "Hi.", "stop") and IGNORED_HEADER not in answer.headers


async def test_reasoning_in_a_stream(thinks: Stack) -> None:
    """And the chunk that says why it ended says nothing else."""
    thinks.say("<think>Let me see.</think>\n\nHi there.")
    stream = thinks.read("/v1/chat/completions", messages=HI, stream_options={"include_usage": True})
    await stream.end()
    choices = [chunk["choices"][0] for chunk in stream.chunks if chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi there."
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert deltas[-1] == {}
    assert stream.chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_short_stream_ends_with_a_chunk_of_its_own(thinks: Stack) -> None:
    tokens = thinks.say("Hi")
    thinks.peer.automatic = False
    for body, last in (({"messages": HI}, {"content": ""}), ({"prompt": "x", "max_tokens": 9}, None)):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        stream = thinks.read(path, **body)
        request = await thinks.next_request(len(thinks.peer.submitted))
        thinks.peer.emit(request, 0, tokens, FinishReason.STOP)
        await stream.end()
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in stream.chunks]
        assert stream.text == "Hi" and reasons == ([None, "stop"] if last else ["stop"])
        assert last is None or stream.chunks[-1]["choices"][0]["delta"] == {}


async def test_calls_behind_reasoning_and_not_within(thinks: Stack) -> None:
    thinks.say(f"<think>I may write {CALL} here.</think>\n{CALL}")
    answer = await thinks.post("/v1/chat/completions", messages=HI, tools=TOOLS)
    assert message_of(answer) == (f"I may write {CALL} here.", None, "tool_calls")
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_form_is_behind_the_reasoning(thinks: Stack) -> None:
    form = {"response_format": {"type": "json_object"}}
    answer = '{"a": 1}'
    thinks.say(answer)
    texts = (answer, f"<think>x < y\n</think>\n\n{answer}", f"x < y</think>{answer}", "<think>x</think>y", "y")
    expected = {
        None: [True, True, False, False, False],
        True: [False, False, True, False, False],
        False: [True, False, False, False, False],
    }
    for enabled, follow in expected.items():
        more = {} if enabled is None else {"chat_template_kwargs": {"enable_thinking": enabled}}
        assert (await thinks.post("/v1/chat/completions", messages=HI, **form, **more)).status_code == 200
        grammar = thinks.peer.submitted[-1].sampling.grammar
        assert [follows(thinks, grammar, text) for text in texts] == follow, enabled
    calls = {"tools": TOOLS, "tool_choice": "required"}
    assert (await thinks.post("/v1/chat/completions", messages=HI, **calls)).status_code == 200
    grammar = thinks.peer.submitted[-1].sampling.grammar
    assert [follows(thinks, grammar, text) for text in (CALL, f"<think>x</think>\n{CALL}", "Hi")] == [True, True, False]
    for name, value in (("guided_choice", ["yes", "no"]), ("guided_grammar", 'root ::= "yes" | "no"')):
        assert (await thinks.post("/v1/chat/completions", messages=HI, **{name: value})).status_code == 200
        grammar = thinks.peer.submitted[-1].sampling.grammar
        assert [follows(thinks, grammar, text) for text in ("yes", "<think>x</think>no", "so")] == [True, True, False]


def test_the_marks_of_reasoning_may_be_special_tokens() -> None:
    for opening in Opening:
        rules = THINK.rules(opening, lambda text: "<[7]>", lambda mark: True)
        source = f'start: reasoning "a"\n{rules}'
        assert LLMatcher.validate_grammar(json.dumps({"grammars": [{"lark_grammar": source}]})) == ""


def test_nothing_is_looked_for_in_a_choice_of_no_tools() -> None:
    use = ToolUse(tools=(), all_tools=(), is_required=False, is_parallel=True)
    reader = OutputReader(FORMATS["hermes"], use, ReasoningSplitter(THINK, is_open=False), "output")
    reader.feed("<think>")
    assert reader.is_reasoning
    reader.feed("A</think>")
    assert not reader.is_reasoning and reader.take().reasoning == "A"
