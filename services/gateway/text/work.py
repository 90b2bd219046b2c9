"""`python -m services.gateway.text.work`: renders chat templates, tokenises long texts and tries grammars for `pool`,
one at a time.

A chat template is a program that came with a checkpoint, and a long text takes hundreds of megabytes to tokenise: here both
may run out of time (the process ends itself by an alarm, which no loop escapes) or memory, and nothing else notices.
Tasks come on the standard input and results go to the standard output, each after its length in bytes.
"""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from services.gateway.http.errors import ApiError
from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.schemas import ChatMessage
from services.gateway.text.chat_templates import ChatTemplate, load_template, template_stamp
from shared.messages.cluster import ModelSpec
from shared.models.checkpoint import read_tokenizer_config

MEMORY_EXIT_CODE = 3
LENGTH_BYTES = 8
MAX_TEMPLATES, MAX_TOKENIZERS = 64, 4
MAX_GRAMMAR_CPU_S = 0.5
"""Processor time to try a grammar; the process ends after twice as much. An instance takes two to three times as long to
compile it, and its steps wait for that."""
MAX_FIRST_BYTES = 16
"""Most first bytes of an output that are tried: JSON has no more, but for strings and numbers."""
MAX_REASON_CHARACTERS = 1000
"""Most characters of why a grammar cannot be followed, which may repeat it."""


class Render(msgspec.Struct, tag=True):
    """The chat template of the checkpoint in `folder` on messages as they came: the calls of a long history take a second to
    be made plain (`conversations.plain_messages`), which is done here too."""

    folder: str
    messages: list[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any] | None
    max_characters: int | None
    """Most characters of the text; None: any number."""
    tools: list[dict[str, Any]] | None = None
    takes_tools: bool = True
    """Whether the template tells the model of tools; if not, the first message does."""
    takes_images: bool = False
    """Whether the user's messages may have images."""


class Encode(msgspec.Struct, tag=True):
    spec: ModelSpec
    """Model's spec, with the folder as its source."""
    texts: list[str]
    add_special_tokens: bool


class TryGrammar(msgspec.Struct, tag=True):
    """Whether a grammar (`structured.Grammar.text`) can be followed. The result is its text as llguidance takes it, where
    that is another."""

    text: str


class Refusal(msgspec.Struct):
    """An `ApiError` 400."""

    message: str
    param: str | None
    code: str | None


class Result(msgspec.Struct):
    text: str = ""
    num_characters: int = 0
    """Characters of the text, which is left out where it has more than were asked for."""
    ids: list[bytes] = []
    """Token ids of each text, as unsigned ints of the machine."""
    refusal: Refusal | None = None


encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Render | Encode | TryGrammar).decode
decode_result = msgspec.msgpack.Decoder(Result).decode


def _template(folder: str) -> ChatTemplate:
    return _loaded_template(folder, template_stamp(Path(folder)))


@functools.lru_cache(MAX_TEMPLATES)
def _loaded_template(folder: str, stamp: tuple[int, ...]) -> ChatTemplate:
    """`stamp`: of its files, so that one that was corrected in its place is read again."""
    return load_template(Path(folder), read_tokenizer_config(Path(folder)))


@functools.lru_cache(MAX_TOKENIZERS)
def _tokenizer(spec: ModelSpec) -> Any:
    from services.gateway.text.tokenization import load_tokenizer  # only long texts need it

    return load_tokenizer(spec)


_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| |\Z)", re.DOTALL)

_OF_EXPRESSION = re.compile(r"regex parse error:\n {4}(.*)\n +\^+\nerror: (.*)")
"""The engine's drawing of an expression that it cannot read: the expression, and why."""


def work(task: Render | Encode | TryGrammar) -> Result:
    try:
        if isinstance(task, TryGrammar):
            return _tried(task)
        if isinstance(task, Render):
            messages, tools = plain_messages(task.messages, takes_images=task.takes_images), task.tools
            if tools and not task.takes_tools:
                from services.gateway.tools.formats import with_instructions  # few templates need it

                messages, tools = with_instructions(messages, tools), None
            text = _template(task.folder).render(
                messages,
                add_generation_prompt=task.add_generation_prompt,
                continue_final_message=task.continue_final_message,
                variables=task.variables,
                tools=tools,
            )
            is_too_long = task.max_characters is not None and len(text) > task.max_characters
            return Result("" if is_too_long else text, len(text))
        tokenizer = _tokenizer(task.spec)
        ids = [tokenizer.encode(text, task.add_special_tokens) for text in task.texts]
        return Result(ids=[array.array("I", each).tobytes() for each in ids])
    except ApiError as error:
        return Result(refusal=Refusal(error.message, error.param, error.code))


def _tried(task: TryGrammar) -> Result:
    """A refusal has the reason alone: the same grammar may come in several fields."""
    from llguidance import LLMatcher

    from services.gateway.openai.structured import as_lark

    text, reason = task.text, ""
    begun_s = time.process_time()
    try:
        text = as_lark(text)
    except ValueError as error:
        reason = str(error)
    reason = (reason or LLMatcher.validate_grammar(text) or _why_no_token(text)).strip()
    taken_s = time.process_time() - begun_s
    if of_schema := _OF_SCHEMA.match(reason):  # the lines of the grammar around it are of our making
        reason = of_schema[1]
    if (of_expression := _OF_EXPRESSION.search(reason)) is not None:
        reason = _why_no_expression(text, *of_expression.groups())
    if "coerce_one_of" in reason:
        reason = "oneOf: it cannot be shown that its schemas exclude each other; anyOf can be had"
    if not reason and taken_s > MAX_GRAMMAR_CPU_S:
        reason = f"it takes {taken_s:.2f} s of computing to be tried; the limit is {MAX_GRAMMAR_CPU_S:g} s."
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = f"{reason[: MAX_REASON_CHARACTERS // 2]} ... {reason[-MAX_REASON_CHARACTERS // 2 :]}"
    if reason:
        return Result(refusal=Refusal(reason, None, None))
    return Result() if text is task.text else Result(text)


def _why_no_expression(grammar: str, expression: str, why: str) -> str:
    """One line on an expression that cannot be read, with its place in the schema that has it."""
    for schema in _schemas_of(grammar):
        for keyword, place in _expressions_of(schema):
            if keyword.replace("\n", "\\n") == expression:
                return f"'{place}' is '{expression}', no regular expression: {why}."
    return f"'{expression}' is no regular expression: {why}."


def _schemas_of(grammar: str) -> Iterator[Any]:
    """Schemas of a grammar: whole ones, and those within rules in Lark."""
    for one in msgspec.json.decode(grammar)["grammars"]:
        if "json_schema" in one:
            yield one["json_schema"]
        for rest in one.get("lark_grammar", "").split("%json ")[1:]:
            with contextlib.suppress(ValueError):
                yield json.JSONDecoder().raw_decode(rest)[0]


def _expressions_of(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """What may be an expression in a schema, with its place."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _expressions_of(one, f"{place}[{number}]")
    for name, inner in value.items() if isinstance(value, dict) else ():
        inner_place = f"{place}.{name}" if place else name
        if name == "pattern" and isinstance(inner, str):
            yield inner, inner_place
        elif name == "patternProperties" and isinstance(inner, dict):
            yield from ((expression, inner_place) for expression in inner)
        yield from _expressions_of(inner, inner_place)


def _why_no_token(grammar: str) -> str:
    """Why an output of a valid grammar does not get beyond its first bytes, for which most work of expressions is done.
    Empty too where it takes the model's own vocabulary to say so, whose special tokens a grammar may name."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        return ""
    allowed = matcher.compute_bitmask()
    firsts = [8 * i + bit for i, byte in enumerate(allowed) for bit in range(8) if byte >> bit & 1]
    for first in firsts[:MAX_FIRST_BYTES]:
        begun = matcher.deep_copy()
        if begun.consume_token(first) and not begun.is_stopped():
            begun.compute_bitmask()
        if begun.is_error():
            matcher = begun
            break
    reason = str(matcher.get_error() or "").removesuffix("<non-verbose/>")
    return "no text follows it" if reason.startswith("NoExtensionBias") else reason


@functools.cache
def _bytes() -> Any:
    """A vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _serve(tasks: BinaryIO, results: BinaryIO, timeout_s: float) -> None:
    while len(length := tasks.read(LENGTH_BYTES)) == LENGTH_BYTES:
        body = tasks.read(int.from_bytes(length, "big"))
        task = decode_task(body)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        signal.setitimer(signal.ITIMER_PROF, 2 * MAX_GRAMMAR_CPU_S if isinstance(task, TryGrammar) else 0)
        answer = encode(work(task))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        results.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        results.flush()


def main() -> None:
    timeout_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the gateway ends this process
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where memory is short all the same, this process goes before the gateway does.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no result
    try:
        _serve(sys.stdin.buffer, results, timeout_s)
    except MemoryError:
        os._exit(MEMORY_EXIT_CODE)


if __name__ == "__main__":
    main()
