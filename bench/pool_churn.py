"""An hour of virtual time on one instance with three models of different block sizes: is what it reports free to be had?

Requests of all three come and go: online ones by a rate that falls and rises in another rhythm for each model, offline ones
as a backlog. Each minute all that a model could have is allocated in a copy of the engine, for each model, blocks moved
together where they must be, and held against the load report. Beside it stands what is free without a move, and the sum of
the unused shares of all merged blocks.

    python -m bench.pool_churn [--minutes 60] [--seed 1] [--merged 320]
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec
import numpy as np

from shared.costs.model import CostModel, shape_of
from shared.engine.calls import AddModel, OnCopy, OnStep, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.memory.slab import KvGeometry, blocks_per_merged, choose_merged_bytes, waste
from shared.engine.plan import ModelShape, StepResult
from shared.engine.recording import Configuration
from shared.engine.requests import Ended
from shared.messages.requests import GenerationRequest, RequestClass, SamplingParams, pack_tokens

BLOCK_SIZE = 16
GEOMETRIES = {"7b": (32, 32, 128), "13b": (40, 40, 128), "70b": (80, 8, 128)}
"""Llama 2: layers, KV heads, dimensions of a head; in 16 bits."""
COST_MODEL = CostModel(
    fixed_s=0.03, prefill_token_s=0.00012, prefill_attention_s=2e-9, decode_s=0.0003, decode_context_s=2e-7
)
"""About a GPU that decodes 40 sequences in 45 ms."""
RATES_PER_S = {"7b": 0.2, "13b": 0.15, "70b": 0.2}
PERIODS_S = {"7b": 240.0, "13b": 420.0, "70b": 660.0}
"""In which the rate goes from nothing to twice its mean and back."""
NUM_OFFLINE = 6
"""Offline requests of each model at any time."""
PROMPT_TOKENS, OUTPUT_TOKENS, MAX_TOKENS = 300, 250, 4000
"""Medians of log-normal lengths; the tail is heavy."""


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    reported: int
    can: dict[str, int]
    """Whole merged blocks beside what it uses that each model really got."""
    free_now: int
    shares: float
    """The sum of what is unused of every merged block."""
    freed: int
    moved_bytes: int
    preemptions: int
    running: int
    waiting: int


class Churn:
    def __init__(self, num_merged: int, seed: int) -> None:
        sizes = {name: KvGeometry(*g, 2).block_bytes(BLOCK_SIZE) for name, g in GEOMETRIES.items()}
        self.block_bytes = sizes
        self.merged_bytes = choose_merged_bytes(list(sizes.values()), at_least=32 << 20)
        configuration = Configuration(
            num_merged=num_merged,
            num_rows=256,
            ordering="doubling_budget",
            token_budget=2048,
            steps_in_flight=1,
            max_waiting=1 << 20,
            interruption="off",
        )
        self.engine: Engine = configuration.build()
        for name, size in sizes.items():
            per_merged = blocks_per_merged(self.merged_bytes, size)
            self.engine.apply(AddModel(ModelShape(name, BLOCK_SIZE, per_merged, MAX_TOKENS + 1024)), 0.0)
            self.engine.apply(SetCostModel(name, COST_MODEL), 0.0)
        self._draw = np.random.default_rng(seed)
        self._arrivals: list[tuple[float, str]] = []
        self._num_offline: Counter[str] = Counter()
        self._num_requests = 0
        self.now = 0.0
        self.num_steps = 0
        for name in GEOMETRIES:
            self._next_arrival(name, 0.0)

    def _next_arrival(self, name: str, at_s: float) -> None:
        """Thinned from twice the mean rate."""
        while True:
            at_s += float(self._draw.exponential(1 / (2 * RATES_PER_S[name])))
            if self._draw.random() < (1 - math.cos(2 * math.pi * at_s / PERIODS_S[name])) / 2:
                heappush(self._arrivals, (at_s, name))
                return

    def _submit(self, name: str, kind: RequestClass) -> None:
        lengths = self._draw.lognormal(np.log([PROMPT_TOKENS, OUTPUT_TOKENS]), [0.9, 0.8])
        num_prompt, num_output = (int(min(max(length, 8), MAX_TOKENS // 2)) for length in lengths)
        self._num_requests += 1
        tokens = self._draw.integers(0, 1 << 30, num_prompt).tolist()
        request = GenerationRequest(
            request_id=f"{self._num_requests}", gateway_id="bench", model=name, prompt=pack_tokens(tokens),
            sampling=SamplingParams(max_tokens=num_output), request_class=kind, timeout_s=1e9,
        )  # fmt: skip
        if refused := self.engine.apply(Submit(request), self.now):
            raise RuntimeError(f"a request of {num_prompt} tokens was refused: {refused.message}")

    def step(self) -> None:
        """One step, or the way to the next arrival."""
        engine = self.engine
        while self._arrivals[0][0] <= self.now:
            at_s, name = heappop(self._arrivals)
            self._submit(name, RequestClass.ONLINE)
            self._next_arrival(name, at_s)
        for name in GEOMETRIES:
            while self._num_offline[name] < NUM_OFFLINE:
                self._num_offline[name] += 1
                self._submit(name, RequestClass.OFFLINE)
        plan = engine.plan(self.now)
        _settle(engine)
        if plan is None:
            self.now = self._arrivals[0][0]
            return
        self.now += COST_MODEL.predict(shape_of(plan.starts, plan.counts))
        self.num_steps += 1
        engine.apply(OnStep(StepResult(plan.step_id, [5] * sum(plan.samples))), self.now)
        for effect in engine.effects():
            if isinstance(effect, Ended) and effect.request.request_class == RequestClass.OFFLINE:
                self._num_offline[effect.request.model] -= 1

    def look(self) -> Minute:
        engine, counters = self.engine, self.engine.counters
        load = engine.load()
        pool, queues = engine.pool, engine.memory.queues
        used = sum(pool.num_used(name) / queue.shape.blocks_per_merged for name, queue in queues.items())
        moved = sum(count * self.block_bytes[name] for name, count in counters.moved_blocks.items())
        return Minute(
            at_s=self.now, reported=int(load.free_merged), can={name: allocatable(engine, name) for name in queues},
            free_now=pool.num_free_merged(), shares=pool.num_merged - used, freed=counters.freed_merged,
            moved_bytes=moved, preemptions=counters.num_preemptions, running=load.num_running,
            waiting=sum(model.num_waiting for model in load.models),
        )  # fmt: skip


def _settle(engine: Engine) -> None:
    """Moves within the device take no time that would count."""
    for started in engine.next_copies():
        engine.apply(OnCopy(started.copy_id, True), 0.0)


def allocatable(engine: Engine, name: str) -> int:
    """Whole merged blocks that the model gets beside what it uses, tried in a copy of the engine."""
    engine = copy.deepcopy(engine)
    pool, compaction = engine.pool, engine.memory.compaction
    num_used, per_merged = pool.num_used(name), engine.memory.queues[name].shape.blocks_per_merged
    num_blocks = compaction.reach(name, []).num_blocks
    while not compaction.make_room(name, num_blocks):
        compaction.begin_step()
        _settle(engine)
    if pool.allocate(name, num_blocks) is None:
        raise RuntimeError(f"{num_blocks} blocks of {name} are not to be had")
    return (num_blocks + num_used) // per_merged - -(-num_used // per_merged)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pool_churn", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--merged", type=int, default=320, help="merged blocks in the pool")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    churn = Churn(options.merged, options.seed)
    blocks = {name: blocks_per_merged(churn.merged_bytes, size) for name, size in churn.block_bytes.items()}
    unused = {name: f"{waste(churn.merged_bytes, size):.1%}" for name, size in churn.block_bytes.items()}
    print(
        f"{options.merged} merged blocks of {churn.merged_bytes / 2**20:.1f} MiB; blocks of one {blocks}, unused {unused}\n"
    )
    names = list(GEOMETRIES)
    columns = ["minute", "reported free", *(f"{name} can have" for name in names), "without moves", "sum of shares"]
    columns += ["freed by moves", "moved MiB", "preempted", "running", "waiting"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    minutes = []
    for minute in range(1, options.minutes + 1):
        while churn.now < 60.0 * minute:
            churn.step()
        seen = churn.look()
        minutes.append(seen)
        can = " | ".join(str(seen.can[name]) for name in names)
        print(f"| {minute} | {seen.reported} | {can} | {seen.free_now} | {seen.shares:.1f} | {seen.freed} "
              f"| {seen.moved_bytes / 2**20:.0f} | {seen.preemptions} | {seen.running} | {seen.waiting} |")  # fmt: skip
    wrong = [seen for seen in minutes if any(seen.can[name] != seen.reported for name in names)]
    hidden = max(seen.shares - seen.reported for seen in minutes)
    scattered = max(seen.reported - seen.free_now for seen in minutes)
    last = minutes[-1]
    print(
        f"\n{churn.num_steps} steps; {last.freed} merged blocks freed by moving {last.moved_bytes / 2**20:.0f} MiB "
        f"({last.moved_bytes / last.at_s / 2**20:.2f} MiB/s); {last.preemptions} preemptions\n"
        f"at most {scattered} merged blocks were to be had by moves alone, and {hidden:.1f} of the sum of shares by nobody\n"
        f"{time.monotonic() - begun_s:.0f} s of wall time"
    )
    verdict = "what is reported free is what every model can have" if not wrong else "NOT MET"
    print(f"verdict: {verdict} ({len(minutes) - len(wrong)} of {len(minutes)} minutes)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
