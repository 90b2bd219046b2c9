"""A decode over merged KV blocks against one over split blocks, timed: merged as here (SeaLLM, section 4.4), a block has
all layers and heads of its tokens; split as MuxServe's (section 3.4), a block is one head of one layer, so that models of
any shape share one pool without waste.

    python -m bench.split_kv [--device cpu|cuda] [--models 30m 135m] [--rounds 30]

The same kernels attend to the same keys and values in both. Per step:

    merged   the tables of the sequences, one layout, then each layer writes and attends
    split    each layer has tables of its own, a row for each sequence and head

Tables are gathered from those that are kept (`tables`), handed to the kernels (`prepare`, Python's own time, which an engine
made for split blocks would spend once), and used (`attention`: what the layout costs in any engine). Blocks
lie in the order in which a pool gives them out after a while: any. Split blocks of as many tokens as merged ones are
measured too, which tells what comes of the smaller ones. Kinds alternate; ratios are of medians. On CPU one thread computes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from bench.coserving.testbed import SHAPES
from bench.reporting import machine, table_of, write
from services.worker.attention.choice import choose_backends
from services.worker.attention.interface import AttentionBackend, BatchLayout, Heads
from services.worker.kv.kv_store import KvShape, KvStore, KvViews
from shared.engine.memory.slab import ALIGNMENT_BYTES

SPLIT_BLOCK = 16
"""Tokens of MuxServe's blocks."""
BATCH = {"cpu": ((8, 256), (8, 1024), (32, 512)), "cuda": ((32, 512), (128, 1024))}
"""(sequences, tokens in the cache of each)"""
WARM_UP_ROUNDS = 3
PARTS = ("tables", "prepare", "attention")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model attention sees."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> Model:
        shape = SHAPES[name]
        heads = shape["num_attention_heads"]
        return cls(
            layers=shape["num_hidden_layers"], query_heads=heads, kv_heads=shape["num_key_value_heads"],
            head_dim=shape["hidden_size"] // heads, dtype=dtype,
        )  # fmt: skip


class Cache:
    """A pool with the KV of so many sequences, and what a decode step does with it.

    Merged blocks hold every layer and head; split ones one of each: to the kernels, a sequence is then as many sequences
    with one KV head as the model has KV heads, and each layer has blocks of its own."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        device: str,
        batch: int,
        context: int,
        *,
        block: int,
        is_split: bool,
    ) -> None:
        self.model, self.backend, self.is_split, self.context = model, backend, is_split, context
        self.device = torch.device(device)
        heads = 1 if is_split else model.kv_heads
        self.rows = batch * model.kv_heads if is_split else batch
        self.num_tables = model.layers if is_split else 1
        self.pages = -(-(context + 1) // block)
        shape = KvShape(1 if is_split else model.layers, block, heads, model.head_dim, model.dtype)
        num_blocks = self.num_tables * self.rows * self.pages
        merged_bytes = -(-shape.block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.store = KvStore(num_blocks, merged_bytes, self.device)
        self.views: KvViews = self.store.attach(shape, 1)
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        # with room for sequences that end and begin: a step gathers the rows of those that it has
        self.kept = order.reshape(self.num_tables, self.rows, self.pages)
        self.taken = np.arange(self.rows)
        self.heads = Heads(model.query_heads // model.kv_heads * heads, heads, model.head_dim)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        """Seconds of the last step that was timed in parts."""

    def layout(self, tables: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> BatchLayout:
        return BatchLayout(
            starts, counts, tables, self.views.shape.block_size, self.model.dtype, self.device, heads=self.heads
        )

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`[layers, batch, context, kv_heads, head_dim]`: of the tokens before the step's."""
        counts = np.full(self.rows, self.context, np.int64)
        for layer in range(self.model.layers):
            tables = self.kept[layer if self.is_split else 0]
            metadata = self.backend.prepare(self.layout(tables, np.zeros(self.rows, np.int64), counts))
            kv = self.views.layers[0 if self.is_split else layer]
            self.backend.write_kv(kv, self._flat(keys[layer]), self._flat(values[layer]), metadata)

    def step(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_timed: bool = False
    ) -> torch.Tensor:
        """`[layers, batch, heads, head_dim]` -> the same, of queries. `is_timed`: in parts, for each of which a GPU is
        waited for."""
        clock = self.clock if is_timed else float
        starts, counts = np.full(self.rows, self.context, np.int64), np.ones(self.rows, np.int64)
        seconds = dict.fromkeys(PARTS, 0.0)
        outputs = []
        at_s = clock()
        tables = self.kept[:, self.taken]
        seconds["tables"], at_s = clock() - at_s, clock()
        metadata = None
        for layer in range(self.model.layers):
            if metadata is None or self.is_split:
                metadata = self.backend.prepare(self.layout(tables[layer if self.is_split else 0], starts, counts))
                seconds["prepare"], at_s = seconds["prepare"] + clock() - at_s, clock()
            kv = self.views.layers[0 if self.is_split else layer]
            k, v = self._flat(keys[layer][:, None]), self._flat(values[layer][:, None])
            self.backend.write_kv(kv, k, v, metadata)
            q = queries[layer].reshape(self.rows, self.heads.queries, self.model.head_dim)
            outputs.append(self.backend.attend(q, k, v, kv, metadata, None))
            seconds["attention"], at_s = seconds["attention"] + clock() - at_s, clock()
        if is_timed:
            self.seconds = seconds
        return torch.stack(outputs).reshape(queries.shape)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, kv_heads, head_dim]` as the tokens of sequences of this cache, one after the other."""
        if self.is_split:
            x = x.transpose(1, 2)
        return x.reshape(-1, self.heads.keys, self.model.head_dim)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a decode's steps, but for its products."""

    model: str
    batch: int
    context: int
    kind: str
    entries: int
    """Entries of the step's tables."""
    total_ms: float
    ratio: float
    """To merged, of medians of rounds."""
    parts_ms: dict[str, float]


def measure(name: str, model: Model, device: str, batch: int, context: int, rounds: int) -> list[Measured]:
    dtype = str(model.dtype).removeprefix("torch.")
    backend = next(one for one in choose_backends(torch.device(device)) if one.facts.runs(model.head_dim, dtype))
    block = backend.facts.block_sizes[0]
    kinds = {"merged": (block, False), f"split, {block} tokens": (block, True)}
    if SPLIT_BLOCK in backend.facts.block_sizes or backend.facts.name in ("compiled", "torch"):
        kinds[f"split, {SPLIT_BLOCK} tokens"] = (SPLIT_BLOCK, True)
    caches = {
        kind: Cache(model, backend, device, batch, context, block=size, is_split=is_split)
        for kind, (size, is_split) in kinds.items()
    }
    torch.manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(model.layers, batch, *size, model.head_dim, device=device).to(model.dtype)

    keys, values = drawn(context, model.kv_heads), drawn(context, model.kv_heads)
    for cache in caches.values():
        cache.fill(keys, values)
    asked = drawn(model.query_heads), drawn(model.kv_heads), drawn(model.kv_heads)
    total_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    parts_s: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(WARM_UP_ROUNDS + rounds):
        for kind in sorted(kinds, reverse=bool(number % 2)):
            cache = caches[kind]
            began_s = cache.clock()
            cache.step(*asked)
            taken_s = cache.clock() - began_s
            cache.step(*asked, is_timed=True)
            if number >= WARM_UP_ROUNDS:
                total_s[kind].append(taken_s)
                parts_s[kind].append(cache.seconds)
    medians = {kind: statistics.median(of_kind) for kind, of_kind in total_s.items()}
    return [
        Measured(
            model=name, batch=batch, context=context, kind=kind, entries=caches[kind].kept.size,
            total_ms=1e3 * medians[kind], ratio=medians[kind] / medians["merged"],
            parts_ms={part: 1e3 * statistics.median(one[part] for one in parts_s[kind]) for part in PARTS},
        )
        for kind in kinds
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.split_kv", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    parser.add_argument("--models", nargs="+", default=["30m", "135m"], choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kind = torch.device(options.device).type
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    found = [
        one
        for name in options.models
        for batch, context in BATCH[kind]
        for one in measure(name, Model.of(name, dtype), options.device, batch, context, options.rounds)
    ]
    rows = [
        {"model": one.model, "sequences": one.batch, "tokens of each": one.context, "blocks": one.kind,
         "entries": f"{one.entries:,}", "ms": f"{one.total_ms:.2f}", "to merged": f"{one.ratio:.2f}"}
        | {f"{part} ms": f"{ms:.3f}" for part, ms in one.parts_ms.items()}
        for one in found
    ]  # fmt: skip
    date = time.strftime("%Y-%m-%d")
    text = "\n".join([
        f"# Merged and split KV blocks, {date}", "", f"{machine()}, {options.device}, {dtype}", "",
        "A decode step of all layers but for its products: block tables, their hand-over, writing and attention.", "",
        *table_of(rows),
    ])  # fmt: skip
    print(text)
    result = {"date": date, "machine": machine(), "device": options.device, "measured": found}
    print(f"written: {write(options.output, f'split-kv-{kind}-{date}', result, text)}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
