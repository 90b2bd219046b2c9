"""What it costs a model to share an executor with others: its iteration time alone, in a cache of its own, and with two
others resident, in merged blocks; block tables; memory of names that share weights (SeaLLM, sections 4.4 and 6.4).

    python -m bench.sharing_overhead [--device cpu|cuda] [--models 30m 30m 135m] [--rounds 30]

Iterations of the compared kinds alternate, so that a drift of the machine cancels; ratios are of medians. On CPU one thread
computes, and its own time is measured. Attention's share of a step is what merged blocks could slow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.devices import kv_block
from bench.reporting import Target, judged, machine, table_of, write
from services.worker.executor.executor import Executor
from services.worker.executor.profiler import step_clock
from shared.engine.memory.slab import blocks_per_merged, choose_merged_bytes
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens


class Held(NamedTuple):
    """Sequences of a model that are held in the cache: those of a decode step, and one that is prefilled."""

    num_sequences: int
    context: int
    """Tokens in the cache of each."""
    prompt: int
    """Tokens of the prefill."""

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-length // block_size) for length in self.lengths)

    @property
    def lengths(self) -> list[int]:
        return [self.context + 1] * self.num_sequences + [self.prompt]


HELD = {"cpu": Held(8, 256, 128), "cuda": Held(32, 512, 2048)}
MAX_OVERHEAD = 0.02
"""The paper stays below 8 %."""
WARM_UP_ROUNDS = 3


def pool_bytes(blocks: Sequence[tuple[int, int]], merged_bytes: int, held: Held) -> int:
    """Pool for the sequences of models with KV blocks of (bytes, tokens)."""
    return sum(
        -(-held.num_blocks(block_size) // blocks_per_merged(merged_bytes, block_bytes)) * merged_bytes
        for block_bytes, block_size in blocks
    )


class Place:
    """A model on an executor, with sequences in the cache. Steps are those of the engine."""

    def __init__(
        self, executor: Executor, shape: ModelShape, first_row: int, first_merged: int, held: Held | None = None
    ) -> None:
        self.executor, self.shape = executor, shape
        self.held = held or HELD[executor.device.type]
        self.clock = step_clock(executor)
        self._rows = list(range(first_row, first_row + self.held.num_sequences + 1))
        self._step_id = 1000 * (first_row + 1)
        lengths = self.held.lengths
        first = first_merged * shape.blocks_per_merged
        blocks = iter(range(first, first + sum(-(-length // shape.block_size) for length in lengths)))
        tokens = pack_tokens([3 + number % 200 for number in range(max(lengths))])
        new = [
            NewSequence(row, tokens[: 4 * length], length, SamplingParams(max_tokens=1 << 30),
                        [next(blocks) for _ in range(-(-length // shape.block_size))])
            for row, length in zip(self._rows, lengths, strict=True)
        ]  # fmt: skip
        self._run([self._rows[-1]], [0], [1], new)
        for row in self._rows[:-1]:
            self._run([row], [0], [self.held.context], [])

    @property
    def num_merged(self) -> int:
        return -(-self.held.num_blocks(self.shape.block_size) // self.shape.blocks_per_merged)

    def decode_s(self) -> float:
        rows = self._rows[:-1]
        return self._run(rows, [self.held.context] * len(rows), [1] * len(rows), [])

    def prefill_s(self) -> float:
        return self._run([self._rows[-1]], [0], [self.held.prompt], [])

    def _run(self, rows: list[int], starts: list[int], counts: list[int], new: list[NewSequence]) -> float:
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id, model=self.shape.name, rows=rows, starts=starts, counts=counts,
            samples=[True] * len(rows), new_sequences=new, new_blocks=[],
        )  # fmt: skip
        started_s = self.clock()
        result = self.executor.execute(plan)
        seconds = self.clock() - started_s
        assert not result.error, result.error
        return seconds


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind of step, alone and otherwise."""

    what: str
    step: str
    alone_ms: float
    other_ms: float
    overhead: float
    """Relative; the ratio of medians of paired rounds."""
    spread: float
    """Spread of the ratios: half the range between their quartiles."""


def compare(what: str, step: str, alone: Callable[[], float], other: Callable[[], float], rounds: int) -> Measured:
    """Alternating, the order turned each time."""
    pairs = []
    for number in range(WARM_UP_ROUNDS + rounds):
        first, second = (alone, other) if number % 2 else (other, alone)
        values = first(), second()
        if number >= WARM_UP_ROUNDS:
            pairs.append(values if number % 2 else values[::-1])
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    ratios = [other_s / alone_s for alone_s, other_s in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    return Measured(
        what=what, step=step, alone_ms=1e3 * times[0], other_ms=1e3 * times[1],
        overhead=statistics.median(ratios) - 1, spread=(quartiles[2] - quartiles[0]) / 2,
    )  # fmt: skip


def measure(checkpoints: Sequence[Path], device: str, rounds: int) -> tuple[list[Measured], dict[str, object]]:
    """The first checkpoint's model, alone on an executor and among all of them on another."""
    kind = torch.device(device).type
    held = HELD[kind]
    specs = [ModelSpec(f"model-{number}", str(path)) for number, path in enumerate(checkpoints)]
    blocks = [kv_block(path, torch.device(device)) for path in checkpoints]
    sizes = [block_bytes for block_bytes, _ in blocks]
    alone_bytes, merged_bytes = choose_merged_bytes(sizes[:1], at_least=1), choose_merged_bytes(sizes)
    # Their own executor each, so that one and the same weights are beside nobody and beside others.
    num_rows = (held.num_sequences + 1) * (len(specs) + 1)
    alone = Executor(device, pool_bytes(blocks[:1], alone_bytes, held) // alone_bytes, alone_bytes, num_rows)
    shared = Executor(device, pool_bytes(blocks, merged_bytes, held) // merged_bytes, merged_bytes, num_rows)
    prepared = alone.prepare_model(specs[0])
    single = Place(alone, alone.add_model(prepared), 0, 0)
    if kind == "cpu":  # nothing of it belongs to the executor, so that the weights lie where they lay
        beside = [shared.add_model(prepared)]
    else:
        beside = [shared.add_model(shared.prepare_model(specs[0]))]
    beside += [shared.add_model(shared.prepare_model(spec)) for spec in specs[1:]]
    places: list[Place] = []
    for number, shape in enumerate(beside):
        first = sum(place.num_merged for place in places)
        places.append(Place(shared, shape, number * (held.num_sequences + 1), first))
    own, *others = places

    found = []
    count = {1: "one other", 2: "two others"}.get(len(others), f"{len(others)} others")
    for step, of_single, of_own in (
        ("decode", single.decode_s, own.decode_s),
        ("prefill", single.prefill_s, own.prefill_s),
    ):
        found.append(compare(f"{count} resident", step, of_single, of_own, rounds))
        pair = _after([single], of_single), _after(others, of_own)
        found.append(compare(f"{count} computing in turn", step, *pair, rounds))
    if len(others) == 1 and _have_one_shape(checkpoints):
        for step, of_single, of_other in (
            ("decode", single.decode_s, others[0].decode_s),
            ("prefill", single.prefill_s, others[0].prefill_s),
        ):
            found.append(compare("the other of both, one resident", step, of_single, of_other, rounds))
    tables = _tables(own.shape, single.shape, own.held.context, checkpoints[0])
    facts: dict[str, object] = {
        "merged_bytes": merged_bytes,
        "block_bytes": sizes,
        "stride_bytes": merged_bytes // blocks_per_merged(merged_bytes, sizes[0]),
        **tables,
    }
    for executor in (alone, shared):
        executor.close()
    return found, facts


def _have_one_shape(checkpoints: Sequence[Path]) -> bool:
    return len({(path / "config.json").read_bytes() for path in checkpoints}) == 1


def _after(places: Sequence[Place], step: Callable[[], float]) -> Callable[[], float]:
    """The step, with caches as decodes there leave them."""

    def run() -> float:
        for place in places:
            place.decode_s()
        return step()

    return run


def _tables(own: ModelShape, single: ModelShape, context: int, checkpoint: Path) -> dict[str, object]:
    """Entries of a sequence's block table: merged, in a cache of its own, and split by layer, head and K or V."""
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes())
    blocks = -(-context // own.block_size)
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    split = blocks * int(config["num_hidden_layers"]) * heads * 2
    return {
        "block_table_entries": {"merged": blocks, "single": -(-context // single.block_size), "split": split},
        "block_table_ratio": split / blocks,
    }


def weights_memory(checkpoint: Path, device: str) -> dict[str, int]:
    """Bytes that weights take as names of one checkpoint come and go: the second with another length."""
    torch_device = torch.device(device)
    executor = Executor(torch_device, 1, 1 << 26, 2)

    def taken() -> int:
        gc.collect()
        if torch_device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(torch_device)
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed may still be the process's
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    steps = {"before": taken()}
    first = executor.prepare_model(ModelSpec("first", str(checkpoint)))
    executor.add_model(first)
    steps["one name"] = taken()
    longest = first.max_model_len
    second = executor.prepare_model(ModelSpec("second", str(checkpoint), max_model_len=longest // 2))
    executor.add_model(second)
    steps["two names"] = taken()
    executor.remove_model("first")
    is_shared = first.model is second.model
    del first
    steps["the first removed"] = taken()
    executor.remove_model("second")
    del second
    steps["both removed"] = taken()
    executor.close()
    assert is_shared, "two names of one checkpoint have two copies of its weights"
    start = steps.pop("before")
    return {name: value - start for name, value in steps.items()}


def make_checkpoints(folder: Path, shapes: Sequence[str], device: str, first: Path | None) -> list[Path]:
    """One for each name. Those of one shape have their weights in the same files, but are models of their own to an
    executor, which tells them by their paths. `first`: of the first shape, if it is there already."""
    made = {} if first is None else {shapes[0]: first}
    checkpoints = []
    for number, name in enumerate(shapes):
        path = folder / str(number)
        if name not in made:
            made[name] = make_checkpoint(path, SHAPES[name], device=device)
        else:
            path.mkdir(parents=True)
            for file in made[name].iterdir():
                (path / file.name).symlink_to(file.resolve())
        checkpoints.append(path)
    return checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing_overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    parser.add_argument("--models", nargs="+", default=["30m", "30m", "135m"], choices=sorted(SHAPES),
                        help="shapes, the first is measured; default: 30m 30m 135m")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, help="of the first shape, to be used instead of one that is made")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tideway-sharing-") as folder:
        checkpoints = make_checkpoints(Path(folder), options.models, options.device, options.checkpoint)
        weights = weights_memory(checkpoints[0], options.device)
        measured, facts = measure(checkpoints, options.device, options.rounds)
    targets = [
        Target(
            name=f"{one.what}, {one.step}: overhead", value=100 * one.overhead, limit=100 * MAX_OVERHEAD, unit=" %",
            note=f"spread {100 * one.spread:.1f} %; the paper: under 8 %",
        )
        for one in measured
        if one.what.endswith("resident")
    ]  # fmt: skip
    rows = [
        {"": one.what, "step": one.step, "alone ms": one.alone_ms, "shared ms": one.other_ms,
         "overhead %": f"{100 * one.overhead:+.2f}", "spread %": f"{100 * one.spread:.2f}"}
        for one in measured
    ]  # fmt: skip
    date = time.strftime("%Y-%m-%d")
    entries = facts["block_table_entries"]
    text = "\n".join([
        f"# Sharing an executor, {date}", "", f"{machine()}, {options.device}, {' '.join(options.models)}", "",
        *table_of(rows), "",
        f"Merged blocks of {facts['merged_bytes']:,} bytes hold blocks of {facts['block_bytes']} bytes; entries of a "
        f"sequence's block table: {entries}.",
        "Bytes of weights: " + ", ".join(f"{name} {value / 2**20:,.1f} MiB" for name, value in weights.items()) + ".",
        "", *map(str, targets),
    ])  # fmt: skip
    print(text)
    result = {"date": date, "machine": machine(), "device": options.device, "models": options.models, "measured": measured,
              "facts": facts, "weights_bytes": weights, "targets": judged(targets)}  # fmt: skip
    stem = write(options.output, f"sharing-overhead-{torch.device(options.device).type}-{date}", result, text)
    print(f"written: {stem}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
