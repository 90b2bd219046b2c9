"""An ordering and a dispatch policy of one's own, against those that are there, in a simulated fleet.

Engines, scheduler and policies are those that serve; time is virtual, and a step takes what the cost model says.
"""

import random
import statistics

from shared.costs.model import CostModel
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.policies.catalogue import DISPATCH_POLICIES, ORDERING_POLICIES
from shared.policies.dispatch import Candidate, Candidates, DispatchKey, DispatchPolicy, DispatchView, Wanted
from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first
from shared.runtime.settings import SchedulerSettings
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.gateway import Job


class ShortestPromptFirst(OrderingPolicy):
    """Within an instance."""

    is_static = True

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (sequence.num_prompt,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return model_of_first(self, candidates, now)


class FullestThatFits(DispatchPolicy):
    """Among instances: so that others stay free for what needs much room."""

    def rank(self, view: DispatchView) -> DispatchKey:
        return (view.freeness,)

    def choose(self, request: Wanted, candidates: Candidates) -> Candidate | None:
        looked_at = candidates.first(64, lambda candidate: candidate.missing_merged <= 0)
        return looked_at[-1] if looked_at[-1].missing_merged <= 0 or not candidates.may_wait else None


ORDERING_POLICIES["shortest_prompt"] = ShortestPromptFirst
DISPATCH_POLICIES["fullest"] = FullestThatFits

MODEL = Model(
    shape=ModelShape(name="model", block_size=16, blocks_per_merged=1, max_model_len=4096),
    cost_model=CostModel(
        fixed_s=0.02, prefill_token_s=1e-4, prefill_attention_s=1e-8, decode_s=2e-4, decode_context_s=5e-7
    ),
)


def jobs(seed: int, num: int = 100, rate_rps: float = 13.0) -> list[Job]:
    draw, at_s, made = random.Random(seed), 0.0, []
    for _ in range(num):
        at_s += draw.expovariate(rate_rps)
        made.append(Job(at_s, min(2000, 20 + int(draw.paretovariate(1.2) * 50)), draw.randrange(20, 200)))
    return made


print(f"{'ordering':>16} {'dispatch':>12} {'TTFT p50':>9} {'TTFT p99':>9} {'preempted':>9}")
for ordering in ("doubling_budget", "shortest_prompt"):
    for dispatch in ("first_token", "fullest"):
        device = Device(
            configuration=Configuration(
                num_merged=200, num_rows=64, ordering=ordering, token_budget=512, steps_in_flight=1
            )
        )
        fleet = Fleet(SchedulerSettings(migration="off", dispatch_policy=dispatch), seed=1)
        for number in range(3):
            fleet.add_instance(f"instance-{number}", device, [MODEL])
        records = fleet.run(jobs(seed=1)).records
        ttfts_s = sorted(record.ttft_s for record in records)
        preemptions = sum(record.num_preemptions for record in records)
        p50_s, p99_s = statistics.median(ttfts_s), ttfts_s[int(0.99 * len(ttfts_s))]
        print(f"{ordering:>16} {dispatch:>12} {p50_s:8.3f}s {p99_s:8.3f}s {preemptions:9d}")
