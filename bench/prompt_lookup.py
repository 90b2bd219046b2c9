"""Prompt lookup decoding against none: the engine and the executor without the services, on a checkpoint with the shape of a
model and random weights.

    python -m bench.prompt_lookup [--shape 135m] [--guesses 8] [--streams 1 4 16] [--tokens 256] [--rounds 2]
        [--texts edit prose]

What such a model would say repeats nothing, so the executor's tokens are replaced by those of given texts, as if the model
wrote them: the steps take the time that they take, and a guess is right where the text is so. The texts:

    edit      a source file of this project, asked for with one name changed everywhere
    summary   the first sentence of each paragraph of a page of docs/, quoted
    prose     a page after another page
    noise     tokens drawn at random: nothing repeats

All times are the process's processor time, on one thread, so that others on the machine count little. Runs without and with
guesses alternate (A B B A); ratios are medians over the rounds. Step times are learnt as an instance
does; a first run of each setting, in which they are, does not count.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.reporting import machine, table, write
from services.worker.executor.executor import Executor
from services.worker.executor.preparing import PreparedModel
from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import StepPlan, StepResult
from shared.engine.recording import Configuration
from shared.engine.requests import Ended
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.policies.prompt_lookup import LookupSettings

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 1024


def texts(num_tokens: int) -> dict[str, tuple[list[int], list[int]]]:
    """A text of each kind: a prompt of at most `PROMPT_TOKENS`, and what comes after it."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/tideway-demo-llama/tokenizer.json"))

    def encoded(text: str, most: int) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids[:most])

    source = (ROOT / "shared/engine/steps.py").read_text()
    page = (ROOT / "docs/design/engine.md").read_text()
    first = [re.split(r"(?<=\.)\s", part.strip())[0] for part in page.split("\n\n") if part[:1].isalpha()]
    drawn = random.Random(0).choices(range(4096), k=PROMPT_TOKENS + num_tokens)
    pairs = {
        "edit": (source, source.replace("sequence", "stream")),
        "summary": (page, " ".join(first)),
        "prose": ((ROOT / "docs/api.md").read_text(), (ROOT / "docs/simulation.md").read_text()),
    }
    found = {name: (encoded(a, PROMPT_TOKENS), encoded(b, num_tokens)) for name, (a, b) in pairs.items()}
    return {**found, "noise": (drawn[:PROMPT_TOKENS], drawn[PROMPT_TOKENS:])}


class Run(NamedTuple):
    decodes_s: float
    """Seconds of the steps without prompts."""
    kept_share: float
    """Kept share of the guesses."""
    step_tokens: float
    """Tokens that a step brings each stream."""


class Bench:
    def __init__(self, prepared: PreparedModel, merged_bytes: int, streams: int, guesses: int) -> None:
        self._streams = streams
        num_blocks = streams * ((2 * PROMPT_TOKENS) // prepared.block_size + 2)
        block_bytes = prepared.model.kv_shape(prepared.block_size).block_bytes
        num_merged = -(-num_blocks * block_bytes // merged_bytes) + 1
        self._executor = Executor("cpu", num_merged, merged_bytes, streams)
        self._engine = Configuration(
            num_merged=num_merged, num_rows=streams, ordering="doubling_budget", token_budget=512, steps_in_flight=1,
            lookup=LookupSettings(guesses),
        ).build()  # fmt: skip
        self._engine.apply(AddModel(self._executor.add_model(prepared)), 0.0)
        self._began_s = time.process_time()
        self._num_requests = 0
        self._rows: dict[int, str] = {}

    def run(self, prompt: list[int], output: list[int]) -> Run:
        engine, counters = self._engine, self._engine.counters
        before = counters.drafted_tokens.total(), counters.accepted_tokens.total()
        text = prompt + output
        for _ in range(self._streams):
            self._num_requests += 1
            request = GenerationRequest(
                request_id=str(self._num_requests), gateway_id="g", model="m", prompt=pack_tokens(prompt),
                sampling=SamplingParams(max_tokens=len(output), temperature=0.0),
            )  # fmt: skip
            assert engine.apply(Submit(request), self._now()) is None
        decodes_s, num_steps, num_ended = 0.0, 0, 0
        while num_ended < self._streams:
            began_s = time.process_time()
            plan = engine.plan(self._now())
            assert plan is not None
            self._executor.launch(plan)
            result = self._executor.collect()
            assert not result.error
            engine.apply(OnStep(_forced(plan, result, text)), self._now())
            num_ended += sum(isinstance(effect, Ended) for effect in engine.effects())
            if max(plan.counts) == 1:
                decodes_s += time.process_time() - began_s
                num_steps += 1
        drafted = counters.drafted_tokens.total() - before[0]
        kept = counters.accepted_tokens.total() - before[1]
        return Run(decodes_s, kept / max(1, drafted), 1 + kept / (num_steps * self._streams))

    def _now(self) -> float:
        return time.process_time() - self._began_s


def _forced(plan: StepPlan, result: StepResult, text: list[int]) -> StepResult:
    columns = plan.expanded()
    ends = [start + count for start, count in zip(columns.starts, columns.counts, strict=True)]
    tokens = [text[end] for end, samples in zip(ends, columns.samples, strict=True) if samples]
    return StepResult(result.step_id, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", nargs="+", choices=("edit", "summary", "prose", "noise"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tideway-lookup-") as folder:
        path = make_checkpoint(Path(folder), SHAPES[options.shape], "bfloat16")
        prepared = Executor("cpu", 1, 1 << 30, 1).prepare_model(ModelSpec("m", str(path)))
        merged_bytes = choose_merged_bytes([prepared.model.kv_shape(prepared.block_size).block_bytes])
        for streams in options.streams:
            plain, guessing = (Bench(prepared, merged_bytes, streams, n) for n in (0, options.guesses))
            for name, (prompt, output) in texts(options.tokens).items():
                if options.texts and name not in options.texts:
                    continue
                for bench in (plain, guessing):
                    bench.run(prompt, output)
                runs: list[list[Run]] = [[], []]
                for which in options.rounds * (0, 1, 1, 0):
                    runs[which].append((plain, guessing)[which].run(prompt, output))
                num_tokens = streams * (len(output) - 1)
                seconds = [statistics.median(run.decodes_s for run in of) for of in runs]
                pairs = zip(*runs, strict=True)
                row = (
                    streams, name, num_tokens / seconds[0], num_tokens / seconds[1],
                    statistics.median(without.decodes_s / with_.decodes_s for without, with_ in pairs),
                    runs[1][0].step_tokens, runs[1][0].kept_share,
                )  # fmt: skip
                rows.append(row)
                print(*row, flush=True)
    header = ("streams", "text", "tokens/s without", "tokens/s with", "ratio", "tokens a step", "guesses kept")
    text = "\n".join(table(header, rows))
    print(text)
    if options.output is not None:
        document = {"machine": machine(), "rows": [dict(zip(header, row, strict=True)) for row in rows]}
        write(options.output, "prompt-lookup", document, text)


if __name__ == "__main__":
    main()
