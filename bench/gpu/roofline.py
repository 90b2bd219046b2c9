"""What a step of the 8B shape should take on an H100 and an H200, computed: each operation's bytes, operations and kernels.

    python -m bench.gpu.roofline [--card H100] [--markdown]

prints the tables of docs/gpu.md. Standard library only. Operations are those that services/worker launches in the order of
launching, with FlashInfer's kernels (models/llama.py, ops.py, attention/flashinfer_backend.py, models/decode_graphs.py,
executor.py); tests/bench/test_roofline.py counts them in a step of a small model and compares.

An operation takes at least the longer of its bytes at the rate of memory and its multiplications and additions at the rate
of matrix products; operations follow each other, so a step takes at least their sum.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

ITEMSIZE = 2
"""bfloat16"""
CONTEXT = 1024
"""Tokens in the cache of each decoding sequence, the one computed now included."""
DECODE_ROWS = (1, 8, 64, 256)
PREFILL_TOKENS = (2048, 8192)
PAGE_TOKENS = 128
DECODE_SHARE = 0.75
"""Share of the rate of memory that decodes are to reach, counted as bench.gpu does: weights and KV once."""
PREFILL_SHARE = 0.6
"""Share of the rate of products that prompts are to reach."""
LONG_PREFILL_TOKENS = 8192
LONG_PREFILL_SHARE = 0.7
"""Share for prompts from so many tokens on."""
SAFEPOINT_SHARE = 0.01
STOP_S = 2e-3
"""In which an interrupted step is to leave the device."""
PAUSE_STEPS = 1.5
"""Most steps of pause of a request that moves."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device. Rates without "sheet" were measured on it, with torch alone."""

    name: str
    """Found in what CUDA calls the device."""
    memory_bytes_per_s: float
    """Rate of a copy within the device, bytes read and written."""
    bf16_flops: float
    """Per second, of a product of 8,192 x 8,192 matrices."""
    sheet_name: str
    sheet_memory_bytes_per_s: float
    sheet_bf16_flops: float
    """Without sparsity."""
    sheet_l2_bytes: int = 50_000_000
    sheet_host_bytes_per_s: float = 64e9
    """Each way, PCIe 5.0 x16."""
    launch_s: float = 2e-6
    """Assumed, not measured: the least that passes from a graph's kernel to the next."""

    @property
    def ridge(self) -> float:
        """Multiplications and additions for each byte, from which on products are what takes the time."""
        return self.bf16_flops / self.memory_bytes_per_s


CARDS = (
    Card(
        name="H100", memory_bytes_per_s=3.0e12, bf16_flops=798e12,
        sheet_name="H100 SXM, 80 GB HBM3", sheet_memory_bytes_per_s=3.35e12, sheet_bf16_flops=989.4e12,
    ),
    Card(
        name="H200", memory_bytes_per_s=4.3e12, bf16_flops=798e12,
        sheet_name="H200 SXM, 141 GB HBM3e", sheet_memory_bytes_per_s=4.8e12, sheet_bf16_flops=989.4e12,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama without biases."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of keys; values have as much."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_read_weights(self) -> int:
        """Weights that a decode reads: all but the embedding, of which it looks up a row for each token. (Where it is
        tied to the head it is read as the head.)"""
        return (
            self.num_layers * (self.num_layer_weights + 2 * self.hidden_size) + self.hidden_size + self.num_head_weights
        )

    @property
    def num_layer_weights(self) -> int:
        """Weights of a layer's four products."""
        attention = self.query_width + 2 * self.kv_width + self.query_width
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token, in all layers."""
        return self.num_layers * 2 * self.kv_width * ITEMSIZE


LLAMA_3_1_8B = Shape(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128
)  # fmt: skip


class Launch(StrEnum):
    """How an operation comes to the device."""

    COPY = "copy"
    """A call of the host for each."""
    KERNEL = "kernel"
    """A call of the host for each."""
    LAYERS = "graph of the layers"
    """One call of the host for all of them."""
    HEAD = "graph of the choice"
    """One call of the host for all of them."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a step; all figures but `times` are of one time. What is added and multiplied outside of products
    and attention is not counted."""

    name: str
    launch: Launch
    times: int = 1
    kernels: int = 1
    """Or copies."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    other_bytes: int = 0
    """Read and written between operations: activations, indices, logits."""
    flops: int = 0

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.other_bytes

    def seconds(self, card: Card) -> float:
        """At the least, all times together."""
        return self.times * max(self.num_bytes / card.memory_bytes_per_s, self.flops / card.bf16_flops)

    def limit(self, card: Card) -> str:
        return "memory" if self.num_bytes * card.ridge >= self.flops else "products"


@dataclass(frozen=True)
class Step:
    what: str
    """"decode" or "prefill"."""
    size: int
    """Sequences of a decode, tokens of a prefill."""
    operations: tuple[Operation, ...]

    def total(self, of: Callable[[Operation], int]) -> int:
        return sum(operation.times * of(operation) for operation in self.operations)

    @property
    def num_kernels(self) -> int:
        return self.total(lambda operation: operation.kernels)

    @property
    def least_bytes(self) -> int:
        """Weights and KV alone, as bench.gpu counts them for its share of the roofline."""
        return self.total(lambda operation: operation.weight_bytes + operation.kv_bytes)

    def seconds(self, card: Card) -> float:
        return sum(operation.seconds(card) for operation in self.operations)

    def launch_s(self, card: Card) -> float:
        """At the least, had no kernel anything to do."""
        return self.num_kernels * card.launch_s

    @property
    def share_to_reach(self) -> float:
        if self.what == "decode":
            return DECODE_SHARE
        return LONG_PREFILL_SHARE if self.size >= LONG_PREFILL_TOKENS else PREFILL_SHARE

    def whole_s(self, card: Card) -> float:
        """What shares are of: of a decode its `least_bytes` at the rate of memory, of a prefill its multiplications and
        additions at that of products."""
        if self.what == "decode":
            return self.least_bytes / card.memory_bytes_per_s
        return self.total(lambda operation: operation.flops) / card.bf16_flops

    def target_s(self, card: Card) -> float:
        """The longest that is good enough."""
        return self.whole_s(card) / self.share_to_reach

    def host_calls(self) -> dict[str, int]:
        """Calls of one launch that put something on the device or ask for it: copies, kernels, replays, events."""
        outside = {
            kind: sum(o.times * o.kernels for o in self.operations if o.launch == kind)
            for kind in (Launch.COPY, Launch.KERNEL)
        }
        replays = {operation.launch for operation in self.operations} & {Launch.LAYERS, Launch.HEAD}
        # behind the plan's copy, and behind the step
        return {"copies": outside[Launch.COPY], "kernels": outside[Launch.KERNEL], "replays": len(replays), "events": 2}


def decode_step(num_rows: int, context: int = CONTEXT, shape: Shape = LLAMA_3_1_8B) -> Step:
    """A decode step of so many greedy sequences, each with `context` tokens in the cache, this step's included: two
    replays."""
    num_pages = num_rows * -(-context // PAGE_TOKENS)
    num_inputs = 2 * 8 * num_rows + 4 * (3 * num_rows + 1 + num_pages)
    hidden = num_rows * shape.hidden_size * ITEMSIZE
    return Step("decode", num_rows, (
        Operation(name="inputs to the device", launch=Launch.COPY, other_bytes=num_inputs),
        # Page starts, keys in last pages and pages go into the wrapper's own memory, then the plan.
        Operation(name="attention's plan", launch=Launch.COPY, kernels=4, other_bytes=8 * (4 * num_rows + num_pages)),
        Operation(name="tokens looked up", launch=Launch.KERNEL, other_bytes=(8 + 4 + 4) * num_rows),
        *_first(num_rows, shape, Launch.LAYERS),
        *_layers(num_rows, num_rows * context, 4 * num_rows * context * shape.query_width, 2, shape, Launch.LAYERS),
        Operation(name="last sum", launch=Launch.HEAD, other_bytes=3 * hidden),
        *_choice(num_rows, shape, Launch.HEAD),
        Operation(name="tokens entered", launch=Launch.KERNEL, kernels=5, other_bytes=(16 + 16 + 12 + 8 + 12) * num_rows),
        Operation(name="tokens to the host", launch=Launch.COPY, other_bytes=2 * 8 * num_rows),
    ))  # fmt: skip


def prefill_step(num_tokens: int, shape: Shape = LLAMA_3_1_8B) -> Step:
    """A step of one prompt without a prefix in the cache, whose next token is chosen greedily; the host launches each
    kernel."""
    num_pages = -(-num_tokens // PAGE_TOKENS)
    hidden = num_tokens * shape.hidden_size * ITEMSIZE
    pairs = num_tokens * (num_tokens + 1) // 2
    return Step("prefill", num_tokens, (
        Operation(name="inputs to the device", launch=Launch.COPY, kernels=2, other_bytes=(8 + 4) * num_tokens),
        Operation(name="attention's plan", launch=Launch.COPY, kernels=4, other_bytes=8 * (4 + num_pages)),
        Operation(name="tokens looked up", launch=Launch.KERNEL, other_bytes=(8 + 4 + 4) * num_tokens),
        *_first(num_tokens, shape, Launch.KERNEL),
        *_layers(num_tokens, num_tokens, 4 * pairs * shape.query_width, 1, shape, Launch.KERNEL),
        Operation(name="last token's index", launch=Launch.COPY, other_bytes=16),
        Operation(name="last sum", launch=Launch.KERNEL, other_bytes=3 * hidden),
        Operation(name="last token taken", launch=Launch.KERNEL, other_bytes=2 * shape.hidden_size * ITEMSIZE),
        *_choice(1, shape, Launch.KERNEL),
        Operation(name="token's place", launch=Launch.COPY, other_bytes=16),
        Operation(name="tokens entered", launch=Launch.KERNEL, kernels=3, other_bytes=12 + 8 + 12),
        Operation(name="tokens to the host", launch=Launch.COPY, other_bytes=16),
    ))  # fmt: skip


def _first(num_tokens: int, shape: Shape, launch: Launch) -> Iterator[Operation]:
    """Before the layers; the first norm has nothing to add."""
    row, angles = shape.hidden_size * ITEMSIZE, 4 * num_tokens * shape.head_dim // 2
    yield Operation(name="embedding", launch=launch, weight_bytes=num_tokens * row, other_bytes=num_tokens * row)
    # positions as floats, their products with the frequencies, cosines, sines, both in one table, its lines
    yield Operation(name="rotations' angles", launch=launch, kernels=6, other_bytes=9 * angles + 16 * num_tokens)
    yield Operation(name="first norm", launch=launch, weight_bytes=row, other_bytes=2 * num_tokens * row)


def _layers(
    num_tokens: int, num_read: int, attention_flops: int, num_kernels: int, shape: Shape, launch: Launch
) -> Iterator[Operation]:
    """`num_read`: tokens whose keys and values attention reads. `num_kernels`: of attention; 2: parts of contexts, and their
    sum."""
    hidden, kv, inner = shape.hidden_size, shape.kv_width, shape.intermediate_size
    fused = shape.query_width + 2 * kv
    rotated = shape.query_width + kv
    # In float32, at least one part of each sequence.
    parts = 2 * 4 * num_tokens * shape.query_width if num_kernels == 2 else 0

    def product(name: str, inputs: int, outputs: int) -> Operation:
        return Operation(
            name=name, launch=launch, times=shape.num_layers, weight_bytes=ITEMSIZE * inputs * outputs,
            other_bytes=ITEMSIZE * num_tokens * (inputs + outputs), flops=2 * num_tokens * inputs * outputs,
        )  # fmt: skip

    def other(name: str, width: int, **figures: int) -> Operation:
        """`width`: elements read and written for each token."""
        return Operation(
            name=name, launch=launch, other_bytes=ITEMSIZE * num_tokens * width, **{"times": shape.num_layers} | figures
        )

    # one fewer than two a layer: the first is without a sum
    yield other("sums and norms", 4 * hidden, times=2 * shape.num_layers - 1, weight_bytes=ITEMSIZE * hidden)
    yield product("queries, keys, values", hidden, fused)
    yield other("rotations", 2 * rotated + 2 * shape.head_dim)
    yield other("keys and values to the cache", 2 * kv, kv_bytes=ITEMSIZE * num_tokens * 2 * kv)
    yield Operation(
        name="attention", launch=launch, times=shape.num_layers, kernels=num_kernels, kv_bytes=ITEMSIZE * num_read * 2 * kv,
        other_bytes=ITEMSIZE * num_tokens * 2 * shape.query_width + parts, flops=attention_flops,
    )  # fmt: skip
    yield product("attention's output", shape.query_width, hidden)
    yield product("gate and up", hidden, 2 * inner)
    yield other("gates", 3 * inner)
    yield product("down", inner, hidden)


def _choice(num_rows: int, shape: Shape, launch: Launch) -> Iterator[Operation]:
    row, logits = shape.hidden_size * ITEMSIZE, num_rows * shape.vocab_size * ITEMSIZE
    yield Operation(name="last norm", launch=launch, weight_bytes=row, other_bytes=2 * num_rows * row)
    yield Operation(
        name="head", launch=launch, weight_bytes=ITEMSIZE * shape.num_head_weights, other_bytes=num_rows * row + logits,
        flops=2 * num_rows * shape.num_head_weights,
    )  # fmt: skip
    yield Operation(name="largest logit", launch=launch, kernels=3, other_bytes=logits + 44 * num_rows)


def card_of(device_name: str) -> Card | None:
    """`device_name`: as CUDA tells it, such as "NVIDIA H100 80GB HBM3"; None: not one of these."""
    return next((card for card in CARDS if card.name in device_name), None)


def expected_ms(card: str, what: str, rows_or_tokens: int, *, context: int = CONTEXT) -> float | None:
    """What a step of the 8B shape takes at the least. `card`: the name of a device, as of `card_of`; None for others.
    `what`: "decode" of so many sequences with `context` tokens each, or "prefill" of so many tokens. Raises `ValueError`."""
    if what not in ("decode", "prefill"):
        raise ValueError(f"{what!r} is neither 'decode' nor 'prefill'")
    if (found := card_of(card)) is None:
        return None
    step = decode_step(rows_or_tokens, context) if what == "decode" else prefill_step(rows_or_tokens)
    return 1e3 * step.seconds(found)


# ------------------------------------------------------------------------------------------------------ the page's tables


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> list[str]:
        lines = ["| " + " | ".join(row) + " |" for row in (self.header, *self.rows)]
        return [f"### {self.title}", "", lines[0], "|" + "---|" * len(self.header), *lines[1:], ""]

    def plain(self) -> list[str]:
        cells = [self.header, *self.rows]
        first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            row[0].ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
            for row in cells
        ]
        return [self.title, *lines, ""]


def steps() -> list[Step]:
    return [*map(decode_step, DECODE_ROWS), *map(prefill_step, PREFILL_TOKENS)]


def tables(cards: Sequence[Card]) -> list[Table]:
    return [
        _cards(cards), _totals(cards), _targets(cards), _safepoints(cards), _copies(cards), _calls(),
        *(_operations(step, cards) for step in steps()),
    ]  # fmt: skip


def _title(step: Step) -> str:
    if step.what == "prefill":
        return f"prefill, {step.size:,} tokens"
    return f"decode, {step.size} row{'s' if step.size > 1 else ''}"


def _ms(seconds: float) -> str:
    return _rounded(1e3 * seconds, 3)


def _rounded(value: float, digits: int = 3) -> str:
    """To so many digits, or to whole numbers."""
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def _small(value: float) -> str:
    """Empty where there is nothing."""
    return _rounded(value) if value >= 0.01 else "< 0.01" if value else ""


def _cards(cards: Sequence[Card]) -> Table:
    rows: list[tuple[str, Callable[[Card], str]]] = [
        ("copy within memory, measured, TB/s", lambda card: f"{card.memory_bytes_per_s / 1e12:.2f}"),
        ("bf16 product of 8,192 x 8,192, measured, TFLOP/s", lambda card: f"{card.bf16_flops / 1e12:.0f}"),
        ("operations for each byte where both take as long", lambda card: f"{card.ridge:.0f}"),
        ("the card of the data sheet", lambda card: card.sheet_name),
        ("memory, data sheet, TB/s", lambda card: f"{card.sheet_memory_bytes_per_s / 1e12:.2f}"),
        ("bf16 without sparsity, data sheet, TFLOP/s", lambda card: f"{card.sheet_bf16_flops / 1e12:.1f}"),
        ("L2, data sheet, MB", lambda card: f"{card.sheet_l2_bytes / 1e6:.0f}"),
        ("PCIe 5.0 x16 each way, data sheet, GB/s", lambda card: f"{card.sheet_host_bytes_per_s / 1e9:.0f}"),
        ("from a kernel to the next, assumed, us", lambda card: f"{1e6 * card.launch_s:.0f}"),
    ]
    names = tuple(card.name for card in cards)
    return Table("The cards", ("", *names), [(name, *map(of, cards)) for name, of in rows])


def _totals(cards: Sequence[Card]) -> Table:
    header = ["step", "weights GB", "KV GB", "other GB", "TFLOP", "kernels"]
    for card in cards:
        header += [f"{card.name} ms", "tokens/s", "bare kernels ms"]
    rows = []
    for step in steps():
        row = [_title(step)]
        row += [_rounded(step.total(of) / 1e9) for of in (_weights, _kv, _other)]
        row += [_rounded(step.total(_flops) / 1e12), str(step.num_kernels)]
        for card in cards:
            seconds = step.seconds(card)
            row += [_ms(seconds), f"{step.size / seconds:,.0f}", _ms(step.launch_s(card))]
        rows.append(tuple(row))
    return Table("Steps", tuple(header), rows)


def _weights(operation: Operation) -> int:
    return operation.weight_bytes


def _kv(operation: Operation) -> int:
    return operation.kv_bytes


def _other(operation: Operation) -> int:
    return operation.other_bytes


def _flops(operation: Operation) -> int:
    return operation.flops


def _targets(cards: Sequence[Card]) -> Table:
    header = ["step", "to reach"]
    for card in cards:
        header += [f"{card.name}: all of it, ms", "target ms", "tokens/s", "safepoints ms", "pause ms"]
    rows = []
    for step in steps():
        is_decode = step.what == "decode"
        row = [_title(step), f"{step.share_to_reach:.2f} of {'memory' if is_decode else 'products'}"]
        for card in cards:
            most_s = step.target_s(card)
            row += [_ms(step.whole_s(card)), _ms(most_s), f"{step.size / most_s:,.0f}"]
            row += [_ms(SAFEPOINT_SHARE * most_s), _ms(PAUSE_STEPS * most_s) if is_decode else ""]
        rows.append(tuple(row))
    return Table("Targets", tuple(header), rows)


def _safepoints(cards: Sequence[Card]) -> Table:
    header = ["prefill"]
    for card in cards:
        header += [f"{card.name}: a layer ms", "4 layers ms", f"layers in {1e3 * STOP_S:.0f} ms"]
    rows = []
    for tokens in (512, 1024, *PREFILL_TOKENS):
        step = prefill_step(tokens)
        row = [f"{tokens:,} tokens"]
        for card in cards:
            layer_s = sum(o.seconds(card) for o in step.operations if o.times > 1) / LLAMA_3_1_8B.num_layers
            row += [_ms(layer_s), _ms(4 * layer_s), str(math.floor(STOP_S / layer_s))]
        rows.append(tuple(row))
    return Table("Between two safepoints", tuple(header), rows)


def _copies(cards: Sequence[Card]) -> Table:
    header = ["step"]
    for card in cards:
        header += [f"{card.name}: new KV GB/s", "of PCIe", "of memory"]
    rows = []
    for step in steps():
        row = [_title(step)]
        for card in cards:
            rate = step.size * LLAMA_3_1_8B.kv_bytes / step.seconds(card)
            row += [
                f"{rate / 1e9:.2f}",
                f"{rate / card.sheet_host_bytes_per_s:.1%}",
                f"{rate / card.memory_bytes_per_s:.2%}",
            ]
        rows.append(tuple(row))
    return Table("Checkpoint copies that keep up", tuple(header), rows)


def _calls() -> Table:
    rows = []
    for step in (decode_step(1), prefill_step(PREFILL_TOKENS[0])):
        calls = step.host_calls()
        name = "decode, any rows" if step.what == "decode" else "prefill, any tokens"
        replayed = step.num_kernels - calls["copies"] - calls["kernels"]
        rows.append((name, *map(str, calls.values()), str(sum(calls.values())), str(replayed)))
    return Table(
        "Calls of the host for a step",
        ("step", "copies", "kernels", "replays", "events", "all", "kernels replayed"),
        rows,
    )


def _operations(step: Step, cards: Sequence[Card]) -> Table:
    header = ["operation", "kernels", "weights MB", "KV MB", "other MB", "GFLOP"]
    for card in cards:
        header += [f"{card.name} us", "share", "by"]
    rows = []
    for operation in step.operations:
        times = operation.times
        row = [operation.name, f"{times} x {operation.kernels}" if times > 1 else str(operation.kernels)]
        row += [_small(times * of(operation) / 1e6) for of in (_weights, _kv, _other)]
        row.append(_small(times * operation.flops / 1e9))
        for card in cards:
            seconds = operation.seconds(card)
            row += [_small(1e6 * seconds), f"{seconds / step.seconds(card):.1%}", operation.limit(card)]
        rows.append(tuple(row))
    total = ["all", str(step.num_kernels), *(_small(step.total(of) / 1e6) for of in (_weights, _kv, _other))]
    total.append(_small(step.total(_flops) / 1e9))
    for card in cards:
        total += [_small(1e6 * step.seconds(card)), "", ""]
    return Table(_title(step).capitalize(), tuple(header), [*rows, tuple(total)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.roofline")
    parser.add_argument("--card", choices=[card.name for card in CARDS], help="one of them alone")
    parser.add_argument("--markdown", action="store_true", help="as docs/gpu.md has them")
    options = parser.parse_args()
    for table in tables([card for card in CARDS if options.card in (None, card.name)]):
        print("\n".join(table.markdown() if options.markdown else table.plain()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
