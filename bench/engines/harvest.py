"""Batch work beside online requests in a scheduler of vLLM's kind, in virtual time.

    python -m bench.engines.harvest [--runs 20]

Requests and objectives are those of `bench.engines`; `shared/engines/harvest.py` decides as in hosted vLLM. A step takes the
time that a cost model predicts, times noise. The coefficients are vLLM's on one core of an AMD EPYC (135M, bfloat16, eager),
from its processes' processor time.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.engines.load import RAMP_S, Lengths, arrivals
from bench.engines.results import LEAST_HARVEST, MOST_TPOT_RATIO, MOST_TTFT_RATIO
from bench.engines.servers import STEP_TOKENS
from bench.peers.servers import MAX_SEQUENCES
from bench.reporting import Target, judged, table, write
from shared.costs.model import CostModel, shape_of
from shared.engines.harvest import SequenceView, StepDecision, StepShare, decide, is_given_up
from shared.policies.slo_budget import SloTokenBudget

REPOSITORY = Path(__file__).resolve().parents[2]
COST = CostModel(
    fixed_s=0.031, prefill_token_s=0.00147, prefill_attention_s=3e-7, decode_s=0.0023, decode_context_s=1e-6,
    prefill_s=0.004, mixed_s=0.001, num_layers=30,
)  # fmt: skip
NOISE = 0.04
"""Standard deviation of a step's duration, relative."""
HOST_S = 0.004
"""Time between an interrupted step and the next."""


class Objectives(NamedTuple):
    """Seconds."""

    ttft_s: float
    tpot_s: float


class Case(NamedTuple):
    """A way to schedule. `decides`: by the harvest policy, else in order of arrival; `interrupts`: gives steps up."""

    name: str
    decides: bool = True
    interrupts: bool = False


STOCK = Case("vllm serve", decides=False)
CASES = (Case("hosted, steps run to their end"), Case("hosted, steps are interrupted", interrupts=True))


@dataclass(eq=False)
class Simulated:
    """A request."""

    key: str
    is_online: bool
    lengths: Lengths
    arrived_s: float
    num_computed: int = 0
    times_s: list[float] = field(default_factory=list)
    """Times of its output tokens."""
    is_running: bool = False

    @property
    def num_new(self) -> int:
        return self.lengths.prompt + len(self.times_s) - self.num_computed

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    def view(self, objectives: Objectives) -> SequenceView:
        ttft_s, tpot_s = objectives if self.is_online else (math.inf, math.inf)
        return SequenceView(
            key=self.key, is_online=self.is_online, is_running=self.is_running, num_new=self.num_new,
            context=self.num_computed, num_output=len(self.times_s), arrived_s=self.arrived_s,
            first_token_s=self.times_s[0] if self.times_s else None, ttft_s=ttft_s, tpot_s=tpot_s,
        )  # fmt: skip


class Outcome(NamedTuple):
    batch_tokens_per_s: float
    p99_ttft_s: float
    p99_tpot_s: float
    p99_itl_s: float
    num_interrupted: int


class Simulation:
    """One server. `arrivals_s`: of online requests, after the ramp; the batch always has `batch_streams` unanswered."""

    def __init__(
        self, case: Case, arrivals_s: Sequence[float], duration_s: float, batch_streams: int, objectives: Objectives,
        online: Lengths, batch: Lengths, seed: int,
    ) -> None:  # fmt: skip
        self._case = case
        self._objectives = objectives
        self._batch = batch
        self._began_s = RAMP_S if batch_streams else 0.0
        self._end_s = self._began_s + duration_s
        self._rate = len(arrivals_s) / duration_s
        self._random = random.Random(seed)
        self._policy = SloTokenBudget(STEP_TOKENS)
        self._now = 0.0
        self._coming = [
            Simulated(f"online-{number}", True, online, self._began_s + at_s) for number, at_s in enumerate(arrivals_s)
        ]
        self._online = list(self._coming)
        self._waiting: list[Simulated] = []
        self._running: list[Simulated] = []
        self._offline: list[Simulated] = []
        self._num_interrupted = 0
        self._step_share = StepShare()
        for _ in range(batch_streams):
            self._begin_offline()

    def run(self) -> Outcome:
        while self._now < self._end_s or any(len(one.times_s) < one.lengths.output for one in self._online):
            while self._coming and self._coming[0].arrived_s <= self._now:
                self._waiting.append(self._coming.pop(0))
            if self._running or self._waiting:
                self._step()
            else:
                self._now = self._coming[0].arrived_s if self._coming else self._end_s
        ttft_s = [one.times_s[0] - one.arrived_s for one in self._online]
        return Outcome(
            sum(map(self._tokens_inside, self._offline)) / (self._end_s - self._began_s),
            float(np.percentile(ttft_s, 99)),
            float(np.percentile([one.tpot_s for one in self._online], 99)),
            float(np.percentile([gap_s for one in self._online for gap_s in np.diff(one.times_s)], 99)),
            self._num_interrupted,
        )

    def _begin_offline(self) -> None:
        one = Simulated(f"batch-{len(self._offline)}", False, self._batch, self._now)
        self._offline.append(one)
        self._waiting.append(one)

    def _tokens_inside(self, one: Simulated) -> int:
        """Tokens of a batch's request within the measured time: a prompt counts at its first output token."""
        inside = [self._began_s <= at_s <= self._end_s for at_s in one.times_s]
        return sum(inside) + one.lengths.prompt * bool(inside and inside[0])

    def _decide(self) -> StepDecision:
        """Puts both lists into the order in which they are served."""
        if not self._case.decides:
            return StepDecision(STEP_TOKENS, (), math.inf)
        for sequences in (self._running, self._waiting):
            sequences.sort(key=lambda one: (not one.is_online, one.arrived_s))
        views = [one.view(self._objectives) for one in (*self._running, *self._waiting)]
        rate = self._rate if self._case.interrupts else None
        ttft_s, share = self._objectives.ttft_s, self._step_share.share
        return decide(views, self._policy, COST, self._now, STEP_TOKENS, ttft_s, rate, share)

    def _step(self) -> None:
        decision = self._decide()
        left, planned = decision.max_tokens, []
        for one in (*self._running, *self._waiting):
            if left <= 0 or (not one.is_running and len(self._running) >= MAX_SEQUENCES):
                break
            if one.key not in decision.held:
                count = min(one.num_new, left)
                planned.append((one, count))
                left -= count
                if not one.is_running:
                    one.is_running = True
                    self._waiting.remove(one)
                    self._running.append(one)
        shape = shape_of([one.num_computed for one, _ in planned], [count for _, count in planned])
        step_s = COST.predict(shape) * math.exp(self._random.gauss(0.0, NOISE))
        if (elapsed_s := self._given_up_after_s(step_s, decision.patience_s)) is not None:
            self._num_interrupted += 1
            self._step_share.on_lost()
            self._now += elapsed_s + HOST_S
            return
        self._now += step_s
        if decision.patience_s < math.inf:
            self._step_share.on_done()
        for one, count in planned:
            one.num_computed += count
            if not one.num_new:
                one.times_s.append(self._now)
                if len(one.times_s) == one.lengths.output:
                    self._running.remove(one)
                    if not one.is_online:
                        self._begin_offline()

    def _given_up_after_s(self, step_s: float, patience_s: float) -> float | None:
        """Time after which the step is given up at a layer's start; None: it is not."""
        if patience_s == math.inf or not self._coming:
            return None
        num_layers = COST.num_layers
        for num_done in range(num_layers):
            elapsed_s = step_s * num_done / num_layers
            has_come = self._coming[0].arrived_s <= self._now + elapsed_s
            if has_come and is_given_up(elapsed_s, num_done, num_layers, patience_s):
                return elapsed_s
        return None


class Row(NamedTuple):
    """Means over all runs; ratios to online requests alone, and of the batch's tokens to the stock scheduler's."""

    case: Case
    harvest: float
    ttft_ratio: float
    tpot_ratio: float
    itl_ratio: float
    num_interrupted: float


def measure(arguments: argparse.Namespace) -> list[Row]:
    online, batch = Lengths(arguments.prompt, 16), Lengths(arguments.prompt, 32)

    def one(case: Case, times_s: list[float], streams: int, objectives: Objectives, seed: int) -> Outcome:
        return Simulation(case, times_s, arguments.duration, streams, objectives, online, batch, seed).run()

    found: dict[Case, list[tuple[float, ...]]] = {case: [] for case in CASES}
    none = Objectives(math.inf, math.inf)
    for number in range(arguments.runs):
        seed = arguments.seed + 100 * number
        first = one(STOCK, arrivals(arguments.rate, arguments.duration, seed), 0, none, seed)
        objectives = Objectives(MOST_TTFT_RATIO * first.p99_ttft_s, MOST_TPOT_RATIO * first.p99_tpot_s)
        times_s = arrivals(arguments.rate, arguments.duration, seed + 20)
        alone = one(STOCK, times_s, 0, none, seed + 1)
        stock = one(STOCK, times_s, arguments.batch_streams, none, seed + 2)
        for case in CASES:
            beside = one(case, times_s, arguments.batch_streams, objectives, seed + 3)
            found[case].append(
                (
                    beside.batch_tokens_per_s / stock.batch_tokens_per_s,
                    beside.p99_ttft_s / alone.p99_ttft_s,
                    beside.p99_tpot_s / alone.p99_tpot_s,
                    beside.p99_itl_s / alone.p99_itl_s,
                    beside.num_interrupted,
                )
            )
    return [Row(case, *map(float, np.mean(values, axis=0))) for case, values in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.5, help="online requests per second")
    parser.add_argument("--duration", type=float, default=30.0, help="of each run, in virtual seconds")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--batch-streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench/results")
    arguments = parser.parse_args()
    rows = measure(arguments)
    best = rows[-1]
    targets = [
        Target(name="P99 TTFT beside a batch, times that alone", value=best.ttft_ratio, limit=MOST_TTFT_RATIO),
        Target(name="P99 TPOT beside a batch, times that alone", value=best.tpot_ratio, limit=MOST_TPOT_RATIO),
        Target(name="batch tokens over vllm serve's", value=best.harvest, limit=LEAST_HARVEST, is_least=True),
    ]
    header = (
        "case", "batch tokens over vllm serve's", "P99 TTFT over alone", "P99 TPOT over alone", "P99 ITL over alone",
        "steps given up",
    )  # fmt: skip
    cells = [(one.case.name, *(f"{value:.3f}" for value in one[1:5]), f"{one.num_interrupted:.1f}") for one in rows]
    lines = [
        f"# Batch work beside online requests in vLLM's scheduler, in virtual time, {time.strftime('%Y-%m-%d')}",
        "",
        *table(header, cells),
        "",
        *(f"    {target}" for target in targets),
        "",
        f"- means of {arguments.runs} runs of {arguments.duration:g} s; {arguments.rate:g} online requests per second of "
        f"{arguments.prompt} and 16 tokens; {arguments.batch_streams} batch requests at once of {arguments.prompt} and 32",
    ]
    print("\n".join(lines))
    document = {"targets": judged(targets), "rows": [(one.case.name, *one[1:]) for one in rows]}
    write(arguments.output, f"engines-harvest-{time.strftime('%Y-%m-%d')}", document, "\n".join(lines))


if __name__ == "__main__":
    main()
