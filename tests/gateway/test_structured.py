"""What asks for a form of the output: what reaches the workers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from prometheus_client import CollectorRegistry

from services.gateway.http.errors import ApiError
from services.gateway.http.ignored_fields import IGNORED_HEADER
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import structured
from services.gateway.openai.schemas import MAX_STRUCTURED_CHOICES, CompletionRequest
from services.gateway.openai.structured import Grammar, encoded, grammar_of, json_grammar
from services.gateway.text import pool as text_pool
from services.gateway.text import work as text_work
from services.gateway.text.pool import TextPool
from services.gateway.text.work import TryGrammar, work
from shared.messages.requests import FinishReason
from shared.runtime.settings import GatewaySettings
from tests.gateway.batching import ended, line, reach, read, start
from tests.gateway.conftest import Stack

CHATS = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def json_grammar_text(schema: Any) -> str:
    return encoded(json_grammar(schema, "guided_json"), "json", "guided_json").text


FORMS: list[tuple[dict[str, Any], str, str]] = [
    (json_schema(SCHEMA, strict=True), '{"a": 1}', '{"b": 1}'),
    ({"response_format": {"type": "json_object"}}, '{"b": [1, {}]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 12}', '{"a": "1"}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 12}', "{}"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, '{"a":12}', '{"a":  12}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": r"\d+/[a-z]"}}, "12/x", "x/x"),
    ({"structured_outputs": {"choice": ["yes", 'a "no"']}}, 'a "no"', "maybe"),
    ({"structured_outputs": {"grammar": 'start: "a" DIGIT+\nDIGIT: /[0-9]/'}}, "a12", "12"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+'}}, "x12", "12"),
    ({"structured_outputs": {"grammar": 'start: "a ::= b"'}}, "a ::= b", "a"),
    ({"regex": "[ab]{2}"}, "ab", "abc"),
    ({"ebnf": 'root ::= "x" [0-9]+'}, "x12", "12"),
    ({"grammar": 'root ::= "x" [0-9]+'}, "x12", "12"),
    ({"json_schema": SCHEMA}, '{"a": 1}', "null"),
    ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', "null"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, '{"a":12}', '{"a":  12}'),
    ({"guided_json": SCHEMA}, '{"a": -1}', "null"),
    ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
    ({"guided_choice": ["red", "blue"]}, "red", "redblue"),
    ({"guided_grammar": 'start: "ok"'}, "ok", "no"),
]


def follows(stack: Stack, grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(stack.tokenizer.to_str()), grammar, log_level=0)
    return matcher.try_consume_tokens(ids := stack.ids(text)) == len(ids) and matcher.is_accepting()


async def test_every_spelling_reaches_the_workers_as_a_grammar(stack: Stack) -> None:
    for body, good, bad in FORMS:
        stack.say(good)
        stack.peer.submitted.clear()
        answer = await stack.post("/v1/chat/completions", messages=HI, n=2, seed=1, **body)
        assert answer.status_code == 200, answer.text
        assert [choice["message"]["content"] for choice in answer.json()["choices"]] == [good, good]
        answer = await stack.post("/v1/completions", prompt="x", max_tokens=50, **body)
        assert answer.json()["choices"][0]["text"] == good
        grammars = {request.sampling.grammar for request in stack.peer.submitted}
        assert len(stack.peer.submitted) == 3 and len(grammars) == 1
        grammar = grammars.pop()
        assert follows(stack, grammar, good) and not follows(stack, grammar, bad)


async def test_lines_of_batches_have_forms_too(stack: Stack) -> None:
    stack.say('{"a": 1}')
    client = stack.openai()
    lines = [
        line(0, CHATS, messages=HI, **json_schema(SCHEMA)),
        line(1, CHATS, messages=HI, guided_choice=["yes", "no"]),
        line(2, CHATS, messages=HI, **json_schema({"type": "string", "pattern": "("})),
    ]
    batch = await reach(client, (await start(client, lines, endpoint=CHATS)).id, ended)
    answered = await read(client, batch.output_file_id)
    assert answered[0]["response"]["body"]["choices"][0]["message"]["content"] == '{"a": 1}'
    grammars = [request.sampling.grammar for request in stack.peer.submitted]
    assert all(grammars) and len(set(grammars)) == 2
    assert follows(stack, grammars[0], '{"a": 1}') or follows(stack, grammars[1], '{"a": 1}')
    (refused,) = await read(client, batch.error_file_id)
    assert refused["custom_id"] == "id-2" and "unclosed group" in refused["response"]["body"]["error"]["message"]


JSON_SCHEMA = "response_format.json_schema.schema"
EITHER = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (json_schema({"type": "array", "uniqueItems": True}, strict=True), JSON_SCHEMA, "'uniqueItems': it cannot be"),
    (json_schema({"items": EITHER}, strict=True), JSON_SCHEMA, "'items.oneOf': it cannot be shown"),
    (json_schema({"const": 2**53 + 1}, strict=True), JSON_SCHEMA, "2^53"),
    (
        json_schema({"properties": {"a": {"pattern": "(?=a)"}}}, strict=True),
        JSON_SCHEMA,
        "'properties.a.pattern': look",
    ),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "'uniqueItems'"),
    (
        {"response_format": {"type": "json_object", "schema": {"not": {"pattern": "(?=a)"}}}},
        "response_format.schema",
        "not",
    ),
    (json_schema({"type": "strng"}), JSON_SCHEMA, "strng"),
    (json_schema({"$ref": "#/$defs/gone"}), JSON_SCHEMA, "gone"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    (json_schema({"$ref": "#"}), JSON_SCHEMA, "no text follows"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text follows"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "no text follows"),
    ({"guided_json": "{"}, "guided_json", "JSON schema"),
    ({"guided_json": "1"}, "guided_json", "JSON schema"),
    ({"guided_json": 1}, "guided_json", "Expected a JSON schema: an object, true or false."),
    ({"json_schema": 0}, "json_schema", "Expected a JSON schema"),
    ({"structured_outputs": {"json": 1.0}}, "structured_outputs.json", "Expected a JSON schema"),
    (json_schema(1), JSON_SCHEMA, "Expected a JSON schema"),
    ({"guided_choice": []}, "guided_choice", "length"),
    ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "EBNF"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "structured_outputs.json"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "guided_regex"),
    ({"guided_choice": ["x" * 200_000]}, "guided_choice", "the limit is"),
]


async def test_what_cannot_be_followed_is_refused_with_its_reason(stack: Stack) -> None:
    for body, param, words in [*REFUSED, *REFUSED]:
        answer = await stack.post("/v1/chat/completions", messages=HI, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert words in error["message"], error["message"]
    assert stack.peer.submitted == []


async def test_what_takes_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = text_work.TryGrammar(json_grammar_text({"type": "object"}))
    assert text_work.work(task).refusal is None
    monkeypatch.setattr(text_work, "MAX_GRAMMAR_CPU_S", 0.0)
    refusal = text_work.work(task).refusal
    assert refusal is not None and "the limit is 0 s" in refusal.message


async def test_what_takes_too_much_for_its_first_token_is_refused(stack: Stack) -> None:
    """It is compiled in milliseconds. What is exceeded first, the time or the library's own limit, is up to the machine."""
    answer = await stack.post("/v1/completions", prompt="x", guided_regex="(a{1000}){1000}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_regex")
    assert "of computing" in error["message"] or "too many expressions" in error["message"]
    assert (await stack.post("/v1/completions", prompt="x", guided_regex="a")).status_code == 200


async def test_a_reason_names_the_field_of_its_own_request_and_is_short(stack: Stack) -> None:
    schema = {"type": "strng"}
    for body, param in (({"guided_json": schema}, "guided_json"), ({"structured_outputs": {"json": schema}}, None)):
        param = param or "structured_outputs.json"
        error = (await stack.post("/v1/completions", prompt="x", **body)).json()["error"]
        assert error["param"] == param and error["message"].startswith(f"Invalid value for '{param}'")
    answer = await stack.post("/v1/completions", prompt="x", guided_regex="(" * 50_000)
    assert answer.status_code == 400 and len(answer.text) < 2000


async def test_a_trial_that_was_killed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TextPool(GatewaySettings(), GatewayMetrics(CollectorRegistry()))
    grammar = Grammar(json_grammar_text({}), "json", "guided_json")
    outcomes = [text_pool._KilledError("time"), text_work.Result()]

    async def run(task: bytes, num_characters: int) -> text_work.Result:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(pool, "_run", run)
    for _ in range(2):
        with pytest.raises(ApiError, match="takes longer than"):
            await pool.try_grammar(grammar)
    assert len(outcomes) == 1, "it is remembered"
    pool._tried[grammar.text] = (*pool._tried[grammar.text][:2], 0.0)
    for _ in range(2):
        assert await pool.try_grammar(grammar) == grammar
    assert not outcomes


async def test_ebnf_is_translated_outside_of_the_event_loop(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 128 KiB may take seconds."""
    monkeypatch.setattr(structured, "gbnf_to_lark", None)
    stack.say("a")
    assert (await stack.post("/v1/completions", prompt="x", guided_grammar='root ::= "a"')).status_code == 200
    assert "lark_grammar" in stack.peer.submitted[0].sampling.grammar


def test_a_grammars_size_is_in_bytes() -> None:
    assert Grammar("\u6f6e", "choice", "guided_choice").num_bytes == 3


@pytest.mark.parametrize("strict", [None, False])
async def test_unless_strict_is_true_what_cannot_be_enforced_is_left_out_and_named(
    stack: Stack, strict: bool | None
) -> None:
    stack.say('{"a": ["x"]}')
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": tags}, "required": ["a"], "additionalProperties": False}
    more = {} if strict is None else {"strict": strict}
    answer = await stack.post(CHATS, messages=HI, other=1, **json_schema(schema, **more))
    named = "response_format.json_schema.schema.properties.a.uniqueItems"
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, f"other, {named}"), answer.text
    grammar = stack.peer.submitted[-1].sampling.grammar
    assert follows(stack, grammar, '{"a": ["x", "x"]}') and not follows(stack, grammar, '{"a": [1]}')
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, **more}}
    answer = await stack.post("/v1/responses", input="Hi", text=text)
    assert answer.headers[IGNORED_HEADER] == "text.format.schema.properties.a.uniqueItems"


async def test_a_structured_answer_is_streamed(stack: Stack) -> None:
    stack.say('{"a": 1}', FinishReason.STOP)
    reader = stack.read("/v1/chat/completions", messages=HI, **json_schema(SCHEMA))
    await reader.end()
    assert json.loads(reader.text) == {"a": 1} and reader.is_complete


async def test_a_grammar_takes_of_the_room_of_its_tokens(stack: Stack) -> None:
    """They travel in one message."""
    stack.say("x")
    choices = ["x" * 1000 + str(number) for number in range(100)]
    assert (await stack.post("/v1/completions", prompt="x", guided_choice=choices)).status_code == 200
    assert len(stack.peer.submitted[0].sampling.grammar) > 100_000


def test_as_many_choices_as_are_allowed_can_be_had() -> None:
    choices = [f"choice {i}" for i in range(MAX_STRUCTURED_CHOICES)]
    grammar = grammar_of(CompletionRequest(model="m", prompt="x", guided_choice=choices))
    assert grammar is not None
    assert work(TryGrammar(grammar.text)).refusal is None
    matcher = LLMatcher(LLTokenizer("byte"), grammar.text)
    for number, byte in enumerate(b"choice 4095"):
        assert matcher.is_accepting() == (number >= len("choice 4")), "one may begin another"
        assert matcher.consume_token(byte)
    assert matcher.is_accepting()
