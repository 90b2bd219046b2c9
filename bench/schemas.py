"""JSONSchemaBench and MaskBench through this gateway's grammars, with their own instances as oracle.

    python -m bench.schemas FOLDER [--sample 1000] [--output results.json]

FOLDER: a checkout of guidance-ai/jsonschemabench (its `maskbench/data`: a schema a file, with instances that are valid and
some that are not; Geng et al. 2025, arXiv 2501.10868). Each schema takes the way of `response_format` with `strict`:
`prepared`, then tried as a gateway's process does, with its limit of time. Instances are written on one line as the grammar
writes JSON, and followed byte by byte. Counted by what came of a schema:

    ok         all instances are told right
    refused    a 400 that names the reason
    too slow   refused for the time that it takes to compile
    order      valid instances are accepted in the schema's order of properties alone, in which outputs are written
    format     an invalid instance is accepted whose only fault is a format that is taken as a remark
    too strict a valid instance is not accepted
    wrong      an invalid instance is accepted
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.gateway.http.errors import ApiError
from services.gateway.openai.structured import encoded, json_grammar
from services.gateway.text.work import TryGrammar, work

MAX_COMPILE_S = 1.0
KINDS = ("ok", "refused", "too slow", "order", "format", "too strict", "wrong")
_OF_FORMAT = re.compile(r'is not an? "[a-z-]+"$')


class Outcome(NamedTuple):
    kind: str
    reason: str
    compile_s: float


def told(schema: Any, instances: list[dict[str, Any]], tokenizer: LLTokenizer) -> Outcome:
    """`instances`: with `data`, and whether it is `valid`."""
    begun_s = time.process_time()
    try:
        grammar = encoded(json_grammar(schema, "schema"), "json", "schema")
    except ApiError as error:
        return Outcome("refused", error.message, time.process_time() - begun_s)
    result = work(TryGrammar(grammar.text))
    compile_s = time.process_time() - begun_s
    if result.refusal is not None:
        is_slow = "s of computing" in result.refusal.message
        return Outcome("too slow" if is_slow else "refused", result.refusal.message, compile_s)
    if compile_s > MAX_COMPILE_S:
        return Outcome("too slow", f"it took {compile_s:.2f} s and was not refused", compile_s)
    text = result.text or grammar.text
    kinds, orders = [], [*_orders(schema), *_orders(grammar.schema)]
    for instance in instances:
        data = instance["data"]
        if accepts(text, data, tokenizer) is instance["valid"]:
            continue
        if not instance["valid"]:
            kinds.append("format" if _is_of_format(schema, instance) else "wrong")
        else:
            kinds.append("order" if accepts(text, _ordered(data, orders), tokenizer) else "too strict")
    return Outcome(max(kinds, key=KINDS.index, default="ok"), "", compile_s)


def _is_of_format(schema: Any, instance: dict[str, Any]) -> bool:
    """Whether an instance that is not valid has no other fault. Below `anyOf` its error does not say so; then jsonschema,
    which looks at no formats, is asked where it is installed."""
    error = str(instance.get("rust_error", ""))
    if _OF_FORMAT.search(error) or "is not valid under any of" not in error:
        return bool(_OF_FORMAT.search(error))
    with contextlib.suppress(ImportError):
        import jsonschema

        return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(instance["data"]))
    return False


def _orders(schema: Any) -> Iterator[list[str]]:
    """Gives the names of properties, of each object that a schema describes."""
    if isinstance(schema, dict):
        if isinstance(properties := schema.get("properties"), dict):
            yield list(properties)
        for value in schema.values():
            yield from _orders(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _orders(value)


def _ordered(value: Any, orders: list[list[str]]) -> Any:
    """With properties as the object describes them that has most of them."""
    if isinstance(value, list):
        return [_ordered(one, orders) for one in value]
    if not isinstance(value, dict):
        return value
    best = max(orders, key=lambda order: len(value.keys() & set(order)), default=[])
    names = [name for name in best if name in value]
    return {name: _ordered(value[name], orders) for name in (*names, *(name for name in value if name not in names))}


def accepts(grammar: str, value: Any, tokenizer: LLTokenizer) -> bool:
    """Whether the value is a whole output, as `json.dumps` writes it."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    written = list(json.dumps(value, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


def read(folder: Path, sample: int, seed: int = 0) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """(name, schema, instances) of so many files, the same ones each time; 0: of all."""
    files = sorted((folder / "maskbench" / "data").glob("*.json"))
    if sample:
        files = sorted(random.Random(seed).sample(files, min(sample, len(files))))
    for file in files:
        stored = json.loads(file.read_text())
        yield file.stem, stored["schema"], stored.get("tests") or []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=1000, help="schemas; 0: all")
    parser.add_argument("--output", type=Path, help="every outcome that is not ok, as JSON")
    arguments = parser.parse_args()
    if not (arguments.folder / "maskbench" / "data").is_dir():
        sys.exit(f"{arguments.folder} has no maskbench/data: skipped")
    tokenizer = LLTokenizer("byte")
    outcomes: dict[str, Outcome] = {}
    for name, schema, instances in read(arguments.folder, arguments.sample):
        outcomes[name] = told(schema, instances, tokenizer)
    counts = Counter(outcome.kind for outcome in outcomes.values())
    times = sorted(outcome.compile_s for outcome in outcomes.values())
    for kind in KINDS:
        print(f"{kind:10} {counts[kind]:6} {counts[kind] / len(outcomes):7.1%}")
    print(f"compile: median {1e3 * times[len(times) // 2]:.1f} ms, 99 % {1e3 * times[len(times) * 99 // 100]:.0f} ms, "
          f"most {times[-1]:.2f} s")  # fmt: skip
    if arguments.output is not None:
        bad = {name: outcome._asdict() for name, outcome in outcomes.items() if outcome.kind != "ok"}
        arguments.output.write_text(json.dumps(bad, indent=1))


if __name__ == "__main__":
    main()
