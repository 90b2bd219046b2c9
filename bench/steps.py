"""Accounts for each microsecond of a step: decode steps of 1, 8 and 32 sequences and prefills of 256 and 2,048 tokens, from
the engine's plan to the text for the client, beside what this machine could do at best.

    python -m bench.steps [--shape 135m] [--decodes 1 8 32] [--prefills 256 2048] [--context 290] [--output bench/results]

Engine, executor, frames and the gateway's code run as in service, one after the other in this process, without bus and
sockets (`bench.gateway` has those). A part's time is its own, without that of parts that it calls. Of the layers, linears
and attention are also run alone, in the order and with the inputs of the step; what is left are norms, rotations,
activations and the way between them. The floors are measured between the steps: the rate of reading memory, and plain
products of the same shapes (`torch.nn.functional.linear`, as many different weights as there are layers), in bfloat16 or,
where the processor has no such products and that is faster, in float32.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.reporting import Target, judged, machine, table, write
from services.gateway.openai.parsing import Options
from services.gateway.requests.answers import ChunkWriter
from services.gateway.streams.generation import Choice, Prompt
from services.gateway.streams.stream import Stream
from services.gateway.text.tokenization import ModelTokenizer, load_tokenizer
from services.worker.executor.executor import Executor
from services.worker.instance.building import build_engine
from services.worker.instance.output_log import OutputLog
from services.worker.models.decoder import ForwardBatch
from shared.bus.codec import decoder, encode
from shared.engine.calls import AddModel, Cancel, Submit
from shared.engine.driver import Driver
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    GenerationRequest,
    Priority,
    RequestClass,
    SamplingParams,
    TokenFrame,
    pack_tokens,
)
from shared.runtime.settings import InstanceSettings

POOL_BYTES = 1 << 30
MANY_ROWS = 256
"""With which plain products reach their rate."""
WARM_UP_STEPS = 60
"""Before the first that is measured: an engine fits its cost model most often at its first steps."""
LEAST_SHARE = 0.6
"""Share of the floor's rate that a step is to reach."""
BEFORE = ("plan", "rows", "attention metadata", "embedding, rotations' angles")
AFTER = ("logits", "sampling", "launch", "results", "frames")
LAYERS = "layers"
GATEWAY = "gateway"
OPTIONS = Options(
    num_choices=1, is_stream=True, includes_usage=False, has_continuous_usage=False, stops=(), shows_stop=False,
    skips_special_tokens=True, num_top_logprobs=None, request_class=RequestClass.ONLINE, priority=Priority.NORMAL,
    service_tier=None, timeout_s=600.0, echo=False, grammar=None, tools=None, prompt_logprobs=None, parts_reasoning=False,
    shows_reasoning=False, names_token_ids=False,
)  # fmt: skip


class Parts:
    """Time by part; a part that calls another does not have that one's. Off, all calls go straight through."""

    def __init__(self) -> None:
        self.is_on = False
        self.us: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since_ns = 0

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if not self.is_on:
                return function(*given, **named)
            self._turn_to()
            self._running.append(part)
            try:
                return function(*given, **named)
            finally:
                self._turn_to()
                self._running.pop()

        return timed

    def watch(self, holder: object, name: str, part: str) -> None:
        """From now on calls of that method of this one object count for the part."""
        setattr(holder, name, self.of(part, getattr(holder, name)))

    def _turn_to(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._running:
            self.us[self._running[-1]] += (now_ns - self._since_ns) / 1000
        self._since_ns = now_ns


class Gateway:
    """Frames to chunks of a client's stream, as the gateway does it."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = decoder(TokenFrame).decode
        self._choices: dict[str, tuple[Choice, ChunkWriter]] = {}

    def open(self, request: GenerationRequest, prompt: list[int]) -> None:
        choice = Choice(0, Prompt(prompt, request.sampling), OPTIONS, self._tokenizer)
        choice.stream = Stream(request, 0.0, lambda: None)
        writer = ChunkWriter("text_completion", request.request_id, 0, request.model, OPTIONS, self._tokenizer)
        self._choices[request.request_id] = choice, writer

    def take(self, data: bytes) -> int:
        """Returns the bytes for clients."""
        frame, num_bytes = self._decode(data), 0
        for entry in frame.entries:
            choice, writer = self._choices[entry.request_id]
            assert choice.stream is not None
            if not choice.stream.extend(entry, frame.sender):
                choice.stream.accept(entry, frame.sender)
            if (delta := choice.advance()) is not None:
                num_bytes += len(writer.chunks([delta], None))
        return num_bytes


class Session:
    """Engine, executor, output log and gateway on one checkpoint, a step at a time."""

    def __init__(self, checkpoint: Path, num_threads: int, seed: int = 0) -> None:
        torch.set_num_threads(num_threads)
        settings = InstanceSettings(device="cpu")
        spec = ModelSpec("model", str(checkpoint))
        prepared = Executor("cpu", 1, 1 << 30, 1).prepare_model(spec)
        self.model: Any = prepared.model
        merged_bytes = choose_merged_bytes([self.model.kv_shape(prepared.block_size).block_bytes])
        num_merged = POOL_BYTES // merged_bytes
        executor: Any = Executor("cpu", num_merged, merged_bytes, settings.max_running)
        self._engine = build_engine(settings, num_merged, "cpu")
        self._engine.apply(AddModel(executor.add_model(prepared)), time.monotonic())
        self._driver = Driver(self._engine)
        self._outputs = OutputLog()
        self._gateway = Gateway(load_tokenizer(spec))
        self._chooser = random.Random(seed)
        self._num_requests = 0
        self.num_open = 0
        self.batch: ForwardBatch | None = None
        """Batch of the last step."""
        parts = self.parts = Parts()
        parts.watch(executor, "_update_rows", "rows")
        for name in ("layout", "token_places"):
            parts.watch(executor._rows, name, "rows")
        for name in ("sample", "enter_sampled"):
            parts.watch(executor._rows, name, "sampling")
        parts.watch(prepared.backend, "prepare", "attention metadata")
        parts.watch(self.model, "begin", "embedding, rotations' angles")
        for name in ("logits", "most_likely"):
            parts.watch(self.model, name, "logits")
        self._run_layers = self.model.run_layers
        self.model.run_layers = parts.of(LAYERS, self._note_batch)
        self._turn = parts.of("plan", lambda: self._driver.turn(time.monotonic()))
        self._launch = parts.of("launch", executor.launch)
        self._collect = parts.of("results", lambda: self._driver.on_result(executor.collect(), time.monotonic()))
        self._frames = parts.of("frames", self._encode)
        self._take = parts.of(GATEWAY, self._gateway.take)

    def _note_batch(self, state: Any, start: int, stop: int, batch: ForwardBatch) -> None:
        self.batch = batch
        self._run_layers(state, start, stop, batch)

    def submit(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self._num_requests += 1
        prompt = [self._chooser.randrange(3, self.model.vocab_size) for _ in range(num_prompt_tokens)]
        request = GenerationRequest(
            request_id=request_id_of(self._num_requests),
            gateway_id="gateway",
            model="model",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        self._gateway.open(request, prompt)
        refused = self._engine.apply(Submit(request), time.monotonic())
        assert refused is None, refused
        self.num_open += 1

    def step(self) -> tuple[int, bool]:
        """How many tokens were computed, and whether all were decodes."""
        turn = self._turn()
        assert turn.plan is not None and not turn.copies
        self._launch(turn.plan)
        _, stats = after = self._collect()
        effects = [*turn.effects, *after[0].effects]
        for data in self._frames(effects):
            self._take(data)
        self.num_open -= sum(isinstance(effect, Ended) for effect in effects)
        return stats.num_tokens, stats.num_tokens == sum(stats.num_decodes)

    def _encode(self, effects: list[Any]) -> list[bytes]:
        return [
            encode(frame)
            for effect in effects
            if isinstance(effect, Output)
            for frame in self._outputs.frames("instance", effect.entries, time.monotonic())
        ]

    def cancel(self) -> None:
        """All that are open."""
        for number in range(self._num_requests + 1):
            self._engine.apply(Cancel(request_id_of(number)), time.monotonic())
        turn = self._driver.turn(time.monotonic())
        assert turn.plan is None
        self.num_open -= sum(isinstance(effect, Ended) for effect in turn.effects)
        assert self.num_open == 0

    def finish(self) -> None:
        while self.num_open:
            self.step()


def request_id_of(number: int) -> str:
    return f"cmpl-{number:032x}-0"


class Alone:
    """Parts of the layers by themselves."""

    def __init__(self, model: Any, shape: dict[str, Any]) -> None:
        heads = model.num_heads * model.head_dim
        inputs = {
            "qkv": model.hidden_size,
            "out": heads,
            "gate_up": model.hidden_size,
            "down": shape["intermediate_size"],
        }
        parts = [part for layer in model._layers for part in (layer, getattr(layer, "mlp", None))]
        self._linears = [
            (vars(part)[name], inputs[name]) for part in parts if part for name in inputs if name in vars(part)
        ]
        self._model = model

    def linears_us(self, num_tokens: int) -> float:
        inputs = {width: torch.randn(num_tokens, width).to(self._model.dtype) for _, width in self._linears}
        return least_us(lambda: [linear(inputs[width]) for linear, width in self._linears])

    def attention_us(self, batch: ForwardBatch) -> float:
        model, num_tokens = self._model, len(batch.token_ids)
        queries, keys, values = (
            torch.randn(num_tokens, heads, model.head_dim).to(model.dtype)
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        )
        layers = range(model.num_layers)
        return least_us(lambda: [batch.attend(layer, queries, keys, values) for layer in layers])


class Floors:
    """What the machine does at best, measured now."""

    def __init__(self, model: Any, shape: dict[str, Any]) -> None:
        hidden, inner, heads = model.hidden_size, shape["intermediate_size"], model.num_heads * model.head_dim
        qkv = heads + 2 * model.num_kv_heads * model.head_dim
        sizes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
        self._weights = [torch.randn(size).to(torch.bfloat16) for _ in range(model.num_layers) for size in sizes]
        self._head = torch.randn(model.vocab_size, hidden).to(torch.bfloat16)
        self.weight_bytes = self._head.nbytes + sum(weight.nbytes for weight in self._weights)
        self.kv_bytes_per_token = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
        self._memory = torch.ones(self.weight_bytes // 4)

    def read_bytes_per_s(self) -> float:
        return self._memory.nbytes / (least_us(self._memory.sum) / 1e6)

    def products_us(self, num_tokens: int) -> float:
        """Time of all layers' linears, and of the last token with the head."""
        return min(self._products_us(num_tokens, dtype) for dtype in (torch.bfloat16, torch.float32))

    def _products_us(self, num_tokens: int, dtype: torch.dtype) -> float:
        weights, head = [weight.to(dtype) for weight in self._weights], self._head.to(dtype)
        inputs = {weight.shape[1]: torch.randn(num_tokens, weight.shape[1]).to(dtype) for weight in weights}

        def compute() -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
            F.linear(inputs[head.shape[1]][-1:], head)

        return least_us(compute)

    def flop(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * sum(weight.numel() for weight in self._weights)


def least_us(function: Callable[[], object], repeats: int = 5) -> float:
    function()
    times_us = []
    for _ in range(repeats):
        begin_ns = time.perf_counter_ns()
        function()
        times_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return min(times_us)


class Step(msgspec.Struct, kw_only=True):
    """Medians, microseconds."""

    name: str
    num_tokens: int
    parts_us: dict[str, float]
    total_us: float
    """With the parts timed."""
    plain_us: float
    """Without."""
    linears_us: float = 0.0
    attention_us: float = 0.0
    floor_us: float = 0.0
    floor: str = ""

    @property
    def share(self) -> float:
        """Share of the floor in the step without the gateway."""
        return self.floor_us / (self.plain_us - self.parts_us[GATEWAY])


def timed_us(session: Session, run: Callable[[], None], *, is_on: bool) -> tuple[float, dict[str, float]]:
    session.parts.us.clear()
    session.parts.is_on = is_on
    begin_ns = time.perf_counter_ns()
    run()
    total_us = (time.perf_counter_ns() - begin_ns) / 1000
    session.parts.is_on = False
    return total_us, dict(session.parts.us)


def measured(session: Session, name: str, num_tokens: int, run: Callable[[], None], repeats: int) -> Step:
    """`run` is the step, or the steps, of which one is to be measured."""
    totals: dict[bool, list[float]] = {True: [], False: []}
    parts: list[dict[str, float]] = []
    for number in range(2 * repeats):
        is_on = number % 4 in (1, 2)  # A B B A
        total_us, found = timed_us(session, run, is_on=is_on)
        totals[is_on].append(total_us)
        if is_on:
            parts.append(found)
    medians = {part: statistics.median(each.get(part, 0.0) for each in parts) for part in parts[0]}
    return Step(
        name=name,
        num_tokens=num_tokens,
        parts_us=medians,
        total_us=statistics.median(totals[True]),
        plain_us=statistics.median(totals[False]),
    )


def decode(session: Session, alone: Alone, floors: Floors, batch: int, context: int, repeats: int) -> Step:
    length = context - repeats
    for _ in range(batch):
        session.submit(length, 2 * context)
    while session.step() != (batch, True):
        pass
    found = measured(session, f"decode x {batch}", batch, lambda: check(session.step(), batch), repeats)
    assert session.batch is not None
    found.linears_us, found.attention_us = alone.linears_us(batch), alone.attention_us(session.batch)
    session.cancel()
    read = floors.weight_bytes + batch * context * floors.kv_bytes_per_token
    bytes_per_s, flop_per_us = floors.read_bytes_per_s(), floors.flop(MANY_ROWS) / floors.products_us(MANY_ROWS)
    found.floor_us = max(read / bytes_per_s * 1e6, floors.flop(batch) / flop_per_us)
    found.floor = f"weights and KV read at {bytes_per_s / 1e9:.1f} GB/s, or products at {flop_per_us / 1e3:.0f} GFLOP/s"
    return found


def check(done: tuple[int, bool], batch: int) -> None:
    assert done == (batch, True), done


def prefill(session: Session, alone: Alone, floors: Floors, length: int, repeats: int) -> Step:
    def run() -> None:
        session.submit(length, 1)
        session.finish()

    found = measured(session, f"prefill {length}", length, run, repeats)
    session.submit(length, 1)
    while session.num_open:
        num_tokens, _ = session.step()
        assert session.batch is not None
        found.linears_us += alone.linears_us(num_tokens)
        found.attention_us += alone.attention_us(session.batch)
        products_us = floors.products_us(num_tokens)
        found.floor_us += products_us
        found.floor = f"plain products at {floors.flop(num_tokens) / products_us / 1e3:.0f} GFLOP/s"
    return found


def rows(steps: list[Step]) -> list[list[str]]:
    def row(name: str, value: Callable[[Step], float]) -> list[str]:
        return [name, *(f"{value(step):,.0f}" for step in steps)]

    def part(name: str) -> list[str]:
        return row(name, lambda step: step.parts_us.get(name, 0.0))

    return [
        *map(part, BEFORE),
        part(LAYERS),
        row("- linears, alone", lambda step: step.linears_us),
        row("- attention with KV writes, alone", lambda step: step.attention_us),
        row("- the rest", lambda step: step.parts_us[LAYERS] - step.linears_us - step.attention_us),
        *map(part, AFTER),
        part(GATEWAY),
        row("between them", lambda step: step.total_us - sum(step.parts_us.values())),
        row("all, parts timed", lambda step: step.total_us),
        row("all, not timed", lambda step: step.plain_us),
        row("the floor", lambda step: step.floor_us),
        ["the floor's share of the step", *(f"{step.share:.2f}" for step in steps)],
    ]


def targets(steps: list[Step]) -> list[Target]:
    return [
        Target(
            name=f"{step.name}: of the floor's rate",
            value=step.share,
            limit=LEAST_SHARE,
            is_least=True,
            note=step.floor,
        )
        for step in steps
        if step.name.startswith("prefill") or step.num_tokens == 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--decodes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefills", type=int, nargs="*", default=[256, 2048])
    parser.add_argument("--context", type=int, default=290, help="tokens of a decoding sequence")
    parser.add_argument("--repeats", type=int, default=20, help="measured decode steps; prefills: a fifth")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tideway-steps-") as folder:
        session = Session(make_checkpoint(Path(folder), arguments.shape), arguments.threads)
    shape = SHAPES[arguments.shape]
    alone, floors = Alone(session.model, shape), Floors(session.model, shape)
    with torch.inference_mode():
        session.submit(arguments.context, WARM_UP_STEPS)
        session.finish()
        steps = [
            *(decode(session, alone, floors, n, arguments.context, arguments.repeats) for n in arguments.decodes),
            *(prefill(session, alone, floors, n, max(2, arguments.repeats // 5)) for n in arguments.prefills),
        ]
    lines = table(["microseconds", *(step.name for step in steps)], rows(steps))
    judgements = targets(steps)
    print("\n".join([*lines, "", *map(str, judgements)]))
    if arguments.output:
        date = time.strftime("%Y-%m-%d")
        document = {
            "date": date,
            "machine": machine(),
            "shape": {arguments.shape: shape},
            "steps": [msgspec.structs.asdict(step) for step in steps],
            "targets": judged(judgements),
        }
        head = f"# Where a step's time goes: {arguments.shape}, {date}"
        text = "\n".join([head, "", *lines, "", *(f"    {each}" for each in judgements), "", f"- machine: {machine()}"])
        write(arguments.output, f"steps-{arguments.shape}-{date}", document, text)


if __name__ == "__main__":
    main()
