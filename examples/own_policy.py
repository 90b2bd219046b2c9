"""An ordering and a dispatch policy of another package (examples/plugin) against the built-in ones, in a simulated fleet.

Engines, scheduler and policies are those that serve; time is virtual, and a step takes what the cost model says.
"""

import random
import statistics
import sys
from pathlib import Path

from shared.costs.model import CostModel
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.runtime.settings import SchedulerSettings
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.gateway import Job

sys.path.insert(0, str(Path(__file__).parent / "plugin"))  # in place of: pip install examples/plugin
SHORTEST_PROMPT = "tideway_example.policies:ShortestPromptFirst"
FULLEST = "tideway_example.policies:FullestThatFits"

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


print(f"{'ordering':>20} {'dispatch':>16} {'TTFT p50':>9} {'TTFT p99':>9} {'preempted':>9}")
for ordering in ("doubling_budget", SHORTEST_PROMPT):
    for dispatch in ("first_token", FULLEST):
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
        names = f"{ordering.rpartition(':')[2]:>20} {dispatch.rpartition(':')[2]:>16}"
        print(f"{names} {p50_s:8.3f}s {p99_s:8.3f}s {preemptions:9d}")
