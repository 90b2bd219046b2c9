"""Outputs follow their grammars, whatever happens to the sequences and whoever shares their steps."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import llguidance.numpy
import pytest
from tokenizers import Tokenizer

from services.worker.executor import grammars
from services.worker.executor.executor import Executor
from services.worker.executor.grammars import GrammarCounters, GrammarRows, Guides, Vocabulary, _Guide
from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.engine import Engine
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, GenerationRequest, SamplingParams, pack_tokens, unpack_tokens
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.token_budget import FixedTokenBudget
from tests.e2e.checkpoints import make_llama
from tests.worker.step_driver import Driver

EOS = 2
PROMPT = list(range(5, 45))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = "[a-c]{3,20}-[0-9]{4}"


def grammar(**of: Any) -> str:
    return json.dumps({"grammars": [of]})


JSON = grammar(json_schema=SCHEMA)
REGEX = grammar(lark_grammar=f"start: /{PATTERN}/")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"} and len(value["name"]) <= 12 and 0 <= value["age"] <= 150


def run(
    path: Path,
    wishes: list[dict[str, Any]],
    *,
    num_merged: int = 12,
    deterministic: bool = False,
    **engine_options: Any,
) -> tuple[list[list[int]], list[Ended], Engine, Executor]:
    """The output of each, and how it ended."""
    executor = Executor("cpu", num_merged, 1 << 16, 8, deterministic=deterministic)
    engine = Engine(num_merged, 8, FirstComeFirstServed(), FixedTokenBudget(64), fits_costs=False, **engine_options)
    engine.apply(AddModel(executor.add_model(executor.prepare_model(ModelSpec("m", str(path))))), 0.0)
    for index, fields in enumerate(wishes):
        sampling = SamplingParams(**{"max_tokens": 150, "temperature": 1.0, "seed": index} | fields)
        request = GenerationRequest(
            request_id=str(index), gateway_id="g", model="m", prompt=pack_tokens(PROMPT), sampling=sampling
        )
        assert engine.apply(Submit(request), 0.0) is None
    outputs: list[list[int]] = [[] for _ in wishes]
    ended: list[Ended] = []
    now = 0.0
    while engine.num_held():
        now += 1.0
        while (plan := engine.plan(now)) is not None:
            executor.launch(plan)
        result = executor.collect()
        assert not result.error, result.error
        engine.apply(OnStep(result), now)
        engine.check()
        for effect in engine.effects():
            if isinstance(effect, Ended):
                ended.append(effect)
            for entry in effect.entries if isinstance(effect, Output) else ():
                outputs[int(entry.request_id)] += unpack_tokens(entry.tokens)
    executor.close()
    return outputs, sorted(ended, key=lambda one: int(one.request.request_id)), engine, executor


STOPS = {"stop_token_ids": (EOS,)}
WISHES: list[dict[str, Any]] = [
    {"grammar": JSON, **STOPS},
    {"grammar": JSON, "temperature": 0.0, **STOPS},
    {"grammar": REGEX, "logprobs": 2, "top_p": 0.9, **STOPS},
    {"temperature": 0.0, "max_tokens": 60},
    {"grammar": REGEX, "temperature": 0.7, "frequency_penalty": 0.5, "top_k": 3, **STOPS},
    {"temperature": 1.0, "max_tokens": 60, "logprobs": 1},
]


@pytest.mark.parametrize(
    "options",
    [{"steps_in_flight": 1}, {"steps_in_flight": 2}, {"lookup": LookupSettings(4, 1, 3)}, {"deterministic": True}],
)
def test_outputs_follow_their_grammars_beside_others_that_have_none(
    checkpoint: Path, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    outputs, ended, _, executor = run(checkpoint, WISHES, **options)
    for wish, output, end in zip(WISHES, outputs, ended, strict=True):
        if "grammar" not in wish:
            assert len(output) == 60
            continue
        assert end.reason is FinishReason.STOP and output[-1] == EOS
        text = tokenizer.decode(output[:-1])
        if wish["grammar"] is JSON:
            check_json(text)
        else:
            assert re.fullmatch(PATTERN, text)
    free, _, _, _ = run(checkpoint, [WISHES[3]], **options)
    assert outputs[3] == free[0]
    counters = executor.grammar_counters
    assert (counters.compiled, counters.cached, counters.failures) == (2, 2, 0)


def test_a_sequence_that_loses_its_row_goes_on_in_its_grammar(checkpoint: Path, tokenizer: Tokenizer) -> None:
    executor = Executor("cpu", 4, 1 << 18, 4)
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(checkpoint))))
    sampling = {"grammar": JSON, "temperature": 1.0, "seed": 3}

    def outputs(*preempted_after: int) -> list[int]:
        driver = Driver(executor, shape, range(4))
        row = driver.add(0, PROMPT, **sampling)
        driver.step([(row, 30)])
        driver.step([(row, 10)])
        while row.tokens[-1] != EOS:
            if len(row.output) in preempted_after:
                driver.preempt(row)
                row.row = (row.row + 1) % 4
                driver.step([(row, len(row.tokens))])
            else:
                driver.step([(row, 1)])
        return row.output

    undisturbed = outputs()
    check_json(tokenizer.decode(undisturbed[:-1]))
    assert outputs(1, 7, 8, 20) == undisturbed
    assert executor.grammar_counters.replayed_tokens == 1 + 7 + 8 + 20
    executor.close()


def test_preempted_sequences_of_a_full_pool_go_on_in_their_grammars(checkpoint: Path, tokenizer: Tokenizer) -> None:
    long = grammar(json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                                "minItems": 30, "maxItems": 30, "x-guidance": {"whitespace_flexible": False}})  # fmt: skip
    wishes = [{"grammar": long, "seed": seed, **STOPS} for seed in range(6)]
    outputs, ended, _, _ = run(checkpoint, wishes, num_merged=4)
    assert sum(end.num_preemptions for end in ended) > 0
    for output in outputs:
        assert len(json.loads(tokenizer.decode(output[:-1]))) == 30
    assert all(end.reason is FinishReason.STOP for end in ended)


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(checkpoint: Path, tokenizer: Tokenizer) -> None:
    wishes = [{"grammar": grammar(lark_grammar="start: nothing"), **STOPS}, *WISHES[:1], {"grammar": "{", **STOPS}]
    outputs, ended, _, executor = run(checkpoint, wishes)
    assert [end.reason for end in ended] == [FinishReason.ERROR, FinishReason.STOP, FinishReason.ERROR]
    check_json(tokenizer.decode(outputs[1][:-1]))
    assert outputs[0] == outputs[2] == [] and executor.grammar_counters.failures == 2


def test_compiled_grammars_are_kept_within_bounds(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = GrammarRows()
    vocabulary = rows.load(checkpoint, Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab_size())
    assert isinstance(vocabulary, Vocabulary)
    of = [grammar(lark_grammar=f'start: "{letter}"') for letter in "abc"]
    monkeypatch.setattr(grammars, "MAX_COMPILED_CHARACTERS", 2 * len(of[0]))
    for text, num_compiled in ((of[0], 1), (of[1], 2), (of[0], 2), (of[2], 3), (of[0], 3), (of[1], 4)):
        assert not isinstance(rows.compile(text, vocabulary).result(60), str)
        assert rows.counters.compiled == num_compiled
    assert (len(vocabulary._compiled), vocabulary._num_characters) == (2, 2 * len(of[0]))
    monkeypatch.setattr(grammars, "MAX_COMPILED", 1)
    rows.compile(of[2], vocabulary).result(60)
    assert list(vocabulary._compiled) == [of[2]]
    rows.close()


def test_a_grammar_is_compiled_beside_the_masks_of_others(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once, though its sequence takes a row before it is done."""
    executor, may_compile, compile_ = Executor("cpu", 8, 1 << 18, 4), threading.Event(), GrammarRows._compile

    def held_back(self: GrammarRows, text: str, *rest: Any) -> Any:
        if text is REGEX:
            may_compile.wait(60)
        return compile_(self, text, *rest)

    monkeypatch.setattr(GrammarRows, "_compile", held_back)
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(checkpoint))))
    driver, sampling = Driver(executor, shape, range(8)), {"temperature": 1.0, "seed": 3}
    executor.compile_grammar("m", JSON).result(60)
    begun = executor.compile_grammar("m", REGEX)
    row = driver.add(0, PROMPT, grammar=JSON, **sampling)
    other = driver.add(1, PROMPT, grammar=REGEX, **sampling)
    driver.step([(row, 40), (other, 30)])
    while row.tokens[-1] != EOS:
        driver.step([(row, 1)])
    check_json(tokenizer.decode(row.output[:-1]))
    assert not begun.done()
    may_compile.set()
    driver.step([(other, 10)])
    while other.tokens[-1] != EOS:
        driver.step([(other, 1)])
    assert re.fullmatch(PATTERN, tokenizer.decode(other.output[:-1]))
    assert (executor.grammar_counters.compiled, executor.grammar_counters.cached) == (2, 2)
    executor.close()


class Panic(BaseException):
    """Panic of the library as PyO3 raises it."""


def test_a_panic_of_the_library_ends_its_request_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", panic)
    _, ended, _, executor = run(checkpoint, [{"max_tokens": 5}, WISHES[0]])
    assert [end.reason for end in ended] == [FinishReason.LENGTH, FinishReason.ERROR]
    assert executor.grammar_counters.failures == 1


def test_masks_that_do_not_come_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_MASK_WAIT_S", 0.05)
    late = [_Guide() for _ in range(400)]
    guides = Guides(list(range(len(late))), dict(enumerate(late)), counters := GrammarCounters())
    assert guides.masks() is None and len(guides.failed) == len(late)
    assert counters.wait_s < 10.0, "one after the other they would take 20 s"


def test_a_model_without_a_tokenizer_serves_all_but_grammars(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    _, ended, _, _ = run(path, [{"max_tokens": 5}, WISHES[0]])
    assert [end.reason for end in ended] == [FinishReason.LENGTH, FinishReason.ERROR]
