"""Structured output: llguidance against xgrammar, and what 32 structured streams cost beside 32 free ones.

    python -m bench.grammars libraries SUITE [--schemas 200]
    python -m bench.grammars streams [--shape 135m] [--streams 32] [--tokens 60] [--rounds 3]

`libraries` takes each library that is installed (xgrammar by `pip install --no-deps xgrammar apache-tvm-ffi`) in a process
of its own. Coverage: of the JSON Schema Test Suite (SUITE: json/tests/draft2020-12 of the source of the jsonschema package),
the schemas that are taken, and the instances on whose validity library and suite agree, written as one line of JSON; of the
schemas of Kubernetes (kubernetes-validate), those that are taken. Times: of masks on random walks through outputs of these,
over a vocabulary of 128,000 pieces of this project's text, on one thread. Memory: what the process has grown by when all of
these schemas are compiled and kept.

`streams`: the executor on a checkpoint of random weights, or the first demonstration model, decoding only; runs without and
with a grammar alternate (A B B A).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 128_000
EOS = 256
KUBERNETES = "v1.31.0-local"


class Matcher(Protocol):
    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32"""

    def consume(self, token: int) -> bool: ...

    def accepts(self, text: str) -> bool:
        """Whether it is a whole output."""


class LlGuidance:
    def __init__(self, pieces: list[bytes]) -> None:
        import llguidance
        import llguidance.numpy

        class Tokens:
            eos_token_id, bos_token_id, special_token_ids = EOS, None, [EOS]
            tokens = pieces

            def __call__(self, text: str | bytes) -> list[int]:
                return list(text if isinstance(text, bytes) else text.encode())

        self._library = llguidance
        wrapper = llguidance.TokenizerWrapper(Tokens())
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(pieces))
        self._words = llguidance.numpy.allocate_token_bitmask(1, len(pieces))

    def compile(self, schema: Any) -> Callable[[], Matcher] | None:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": spacing}}]})
        compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if compiled.is_error():
            return None
        outer = self

        class One:
            def __init__(self) -> None:
                self._matcher = compiled.deep_copy()

            def mask(self) -> np.ndarray:
                outer._library.numpy.fill_next_token_bitmask(self._matcher, outer._words, 0)
                words: np.ndarray = outer._words[0]
                return words

            def consume(self, token: int) -> bool:
                return bool(self._matcher.consume_token(token))

            def accepts(self, text: str) -> bool:
                tokens = list(text.encode())
                return self._matcher.try_consume_tokens(tokens) == len(tokens) and self._matcher.is_accepting()

        return One


class XGrammar:
    def __init__(self, pieces: list[bytes]) -> None:
        import torch
        import xgrammar

        torch.set_num_threads(1)
        self._library = xgrammar
        info = xgrammar.TokenizerInfo(
            pieces, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[EOS]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, len(pieces))

    def compile(self, schema: Any) -> Callable[[], Matcher] | None:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)
        except Exception:
            return None
        outer = self

        class One:
            def __init__(self) -> None:
                self._matcher = outer._library.GrammarMatcher(compiled)

            def mask(self) -> np.ndarray:
                outer._words.fill_(-1)
                self._matcher.fill_next_token_bitmask(outer._words)
                words: np.ndarray = outer._words.numpy()[0]
                return words

            def consume(self, token: int) -> bool:
                return bool(self._matcher.accept_token(token))

            def accepts(self, text: str) -> bool:
                if text and not self._matcher.accept_string(text):
                    return False
                return bool(self._matcher.accept_token(EOS))

        return One


LIBRARIES: dict[str, Callable[[list[bytes]], Any]] = {"llguidance": LlGuidance, "xgrammar": XGrammar}


def pieces() -> list[bytes]:
    """All bytes, EOS, and the most frequent beginnings of words of this project's text."""
    text = "".join(path.read_text(errors="replace") for path in [*ROOT.rglob("docs/*.md"), *ROOT.glob("s*/**/*.py")])
    found: dict[bytes, int] = {}
    for word in re.findall(r" ?\w+|\s+|[^\w\s]+", text):
        for end in range(2, len(word) + 1):
            found[word[:end].encode()] = found.get(word[:end].encode(), 0) + 1
    drawn = random.Random(0)
    ranked = sorted(found, key=lambda piece: -found[piece])
    known = set(ranked)
    while len(ranked) < VOCABULARY:
        piece = drawn.choice(ranked[:20_000]) + drawn.choice(ranked[:2_000]).strip()
        if piece not in known and len(piece) < 24:
            known.add(piece)
            ranked.append(piece)
    return [*(bytes([byte]) for byte in range(256)), b"</s>", *ranked[: VOCABULARY - 257]]


def kubernetes(num_schemas: int) -> list[Any]:
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / KUBERNETES
    files = sorted(
        path for path in folder.glob("*.json") if path.stat().st_size < 100_000 and path.name != "_definitions.json"
    )
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    schemas = []
    for path in random.Random(1).sample(files, min(num_schemas * 3, len(files))):
        schema = json.loads(path.read_text())
        schema = _with_definitions(schema, definitions)
        if len(json.dumps(schema)) < 200_000:
            schemas.append(schema)
        if len(schemas) == num_schemas:
            break
    return schemas


def _with_definitions(schema: Any, definitions: dict[str, Any]) -> Any:
    """With those that it refers to, directly or not, and without its name, which references would be relative to."""
    text, found = json.dumps(schema), dict[str, Any]()
    while missing := set(re.findall(r'#/\$defs/([^"]+)"', text)) - found.keys():
        for name in missing:
            found[name] = definitions[name]
        text = json.dumps([schema, found])
    whole = {name: value for name, value in schema.items() if name not in ("$id", "$schema")} | {"$defs": found}
    return json.loads(json.dumps(whole).replace("/api/_definitions.json#", "#"))


def suite(folder: Path) -> list[dict[str, Any]]:
    return [case for file in sorted(folder.glob("*.json")) for case in json.loads(file.read_text())]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(name: str, folder: Path, num_schemas: int) -> dict[str, Any]:
    begun_s = time.perf_counter()
    vocabulary = pieces()
    library = LIBRARIES[name](vocabulary)
    result: dict[str, Any] = {"library": name, "start_s": time.perf_counter() - begun_s}
    cases = suite(folder)
    taken = num_right = num_tests = num_let_in = 0
    for case in cases:
        compiled = library.compile(case["schema"])
        if compiled is None:
            continue
        taken += 1
        for test in case["tests"]:
            num_tests += 1
            accepted = compiled().accepts(json.dumps(test["data"], ensure_ascii=False))
            num_right += accepted == test["valid"]
            num_let_in += accepted and not test["valid"]
    result |= {"suite_schemas": len(cases), "suite_taken": taken, "suite_tests": num_tests, "suite_right": num_right,
               "suite_let_in": num_let_in}  # fmt: skip
    before_mb, kept, compile_ms = resident_mb(), [], []
    schemas = kubernetes(num_schemas)
    for schema in schemas:
        begun_s = time.perf_counter()
        compiled = library.compile(schema)
        compile_ms.append(1000 * (time.perf_counter() - begun_s))
        if compiled is not None:
            kept.append(compiled)
    result |= {"kubernetes_schemas": len(schemas), "kubernetes_taken": len(kept), "kept_mb": resident_mb() - before_mb}
    mask_us: list[float] = []
    drawn = random.Random(2)
    for compiled in kept[:60]:
        matcher = compiled()
        for _ in range(100):
            begun_s = time.perf_counter()
            words = matcher.mask()
            mask_us.append(1e6 * (time.perf_counter() - begun_s))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCABULARY])
            token = int(drawn.choice(allowed))
            if token == EOS or not matcher.consume(token):
                break
    for what, values in (("compile_ms", compile_ms), ("mask_us", mask_us)):
        ranked = sorted(values)
        result[what] = {"n": len(ranked), "mean": statistics.fmean(ranked), "median": ranked[len(ranked) // 2],
                        "p99": ranked[int(0.99 * (len(ranked) - 1))], "max": ranked[-1]}  # fmt: skip
    return result


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer of `pieces`, byte-level, which is all that masks depend on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    names = ["".join(character[byte] for byte in piece) for piece in pieces()[:vocab_size]]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def streams(shape: str, num_streams: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    from bench.coserving.testbed import SHAPES, make_checkpoint
    from services.worker.executor.executor import Executor
    from shared.engine.calls import AddModel, OnStep, Submit
    from shared.engine.recording import Configuration
    from shared.messages.cluster import ModelSpec
    from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens

    schema = {"type": "array", "minItems": 10_000, "items": {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["new", "old", "other"]}}, "required": ["name", "age", "kind"],
        "additionalProperties": False}, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    executor = Executor("cpu", 256, 1 << 21, num_streams)
    engine = Configuration(
        num_merged=256, num_rows=num_streams, ordering="fcfs", token_budget=512, steps_in_flight=1
    ).build()
    if shape == "demo":
        spec = ModelSpec("m", str(ROOT / "models/tideway-demo-llama"))
    else:
        folder = Path(tempfile.mkdtemp())
        spec = ModelSpec("m", str(make_checkpoint(folder, SHAPES[shape])))
        write_tokenizer(folder, SHAPES[shape]["vocab_size"])
    engine.apply(AddModel(executor.add_model(executor.prepare_model(spec))), 0.0)
    number, waited = itertools.count(), 0.0
    rates: dict[tuple[str, float], list[float]] = {}

    def run(kind: str, temperature: float) -> float:
        """Tokens a second of the steps that decode alone."""
        for _ in range(num_streams):
            sampling = SamplingParams(
                max_tokens=num_tokens, temperature=temperature, seed=1, grammar=grammar if kind == "json" else "",
            )  # fmt: skip
            request = GenerationRequest(
                request_id=str(next(number)), gateway_id="g", model="m", prompt=pack_tokens(list(range(100, 132))),
                sampling=sampling,
            )  # fmt: skip
            assert engine.apply(Submit(request), time.perf_counter()) is None
        decoding_s, decoded = 0.0, 0
        while engine.num_held():
            begun_s = time.perf_counter()
            plan = engine.plan(begun_s)
            assert plan is not None
            executor.launch(plan)
            result = executor.collect()
            assert not result.error and not result.unguided, result
            engine.apply(OnStep(result), time.perf_counter())
            engine.effects()
            if max(plan.counts) == 1:
                decoding_s += time.perf_counter() - begun_s
                decoded += len(result.tokens)
        return decoded / decoding_s

    for temperature in (0.0, 1.0):
        for kind in ("free", "json"):
            run(kind, temperature)
        executor.grammar_counters.wait_s = 0.0
        for kind in ["free", "json", "json", "free"] * rounds:
            rates.setdefault((kind, temperature), []).append(run(kind, temperature))
        waited = executor.grammar_counters.wait_s
        free, guided = (statistics.median(rates[kind, temperature]) for kind in ("free", "json"))
        change, wait_us = 100 * (guided / free - 1), 1e6 * waited / (2 * rounds * num_tokens)
        print(f"temperature {temperature:g}: {free:.0f} tokens/s free, {guided:.0f} structured ({change:+.1f} %)")
        print(f"  waited for masks {wait_us:.0f} us a step")
    counters = executor.grammar_counters
    mask_us = 1e6 * counters.mask_s / counters.masks
    print(f"a mask takes {mask_us:.0f} us, {counters.compiled} compiled in {counters.compile_s:.3f} s")
    executor.close()
    return {f"{kind} {temperature:g}": values for (kind, temperature), values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    libraries = commands.add_parser("libraries")
    libraries.add_argument("suite", type=Path)
    libraries.add_argument("--schemas", type=int, default=200)
    libraries.add_argument("--only", choices=LIBRARIES, help="in this process")
    of_streams = commands.add_parser("streams")
    of_streams.add_argument("--shape", default="135m", help="of bench.coserving; demo: the demonstration model")
    of_streams.add_argument("--streams", type=int, default=32)
    of_streams.add_argument("--tokens", type=int, default=60)
    of_streams.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.command == "streams":
        streams(arguments.shape, arguments.streams, arguments.tokens, arguments.rounds)
    elif arguments.only:
        print(json.dumps(measure(arguments.only, arguments.suite, arguments.schemas), indent=1))
    else:
        for name in LIBRARIES:
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed")
                continue
            command = [sys.executable, "-m", "bench.grammars", "libraries", str(arguments.suite), "--schemas",
                       str(arguments.schemas), "--only", name]  # fmt: skip
            subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
