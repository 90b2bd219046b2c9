"""A flood of one tenant hardly delays the first tokens of another, with the real scheduler's core."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from bench.rebalance.cluster import A10, Cluster, System
from bench.tenants import FLOODS, MOST_RATIO, run
from shared.simulation.gateway import Job


@pytest.mark.long  # the engine's part is in tests/shared/engine/test_tenants.py
@pytest.mark.parametrize("seed", [7, 8])
def test_first_tokens_beside_each_flood(seed: int) -> None:
    alone = run(None, A10, 1, 100.0, seed)
    for kind in FLOODS:
        beside = run(kind, A10, 1, 100.0, seed)
        assert beside.num_requests > 5 and beside.flood_tokens_per_s > 20
        assert beside.p99_s <= MOST_RATIO * alone.p99_s, kind


def test_a_request_of_a_model_that_has_no_other_does_not_wait_for_memory_that_a_flood_holds() -> None:
    alone, beside = (run(kind, A10, 1, 50.0, 8, of_models=True) for kind in (None, "memory"))
    assert beside.num_requests > 1 and beside.flood_tokens_per_s > 20
    assert max(beside.first_s, beside.p99_s) <= 2 * alone.p99_s


@pytest.mark.slow
def test_weights_hold_over_instances_through_moves_and_another_scheduler() -> None:
    draw = np.random.default_rng(5)
    jobs = [
        Job(
            0.02 * number,
            int(draw.integers(50, 1500)),
            int(draw.integers(20, 400)),
            tenant=tenant,
            tenant_weight=weight,
            timeout_s=1e5,
        )
        for number in range(600)
        for tenant, weight in (("heavy", 2.0), ("light", 1.0))
    ]
    cluster = Cluster(A10, System(name="tideway"), jobs, num_instances=3, seed=5)
    fleet = cluster.fleet
    for job in cluster.jobs:
        fleet.submit_at(job)
    served: list[Counter[str]] = []
    for until_s in (15.0, 45.0, 75.0):
        fleet.events.run(lambda: False, until_s)
        together: Counter[str] = Counter()
        for instance in fleet.instances.values():
            together.update(instance.engine.counters.tenant_service_s)
        served.append(together)
        if until_s == 45.0:
            fleet.replace_scheduler()
    assert list(cluster.gateway.open_streams()), "both have more than can be served"
    assert sum(record.num_migrations for record in cluster.records) > 0
    for before, after in pairwise(served):
        had = {tenant: after[tenant] - before[tenant] for tenant in ("heavy", "light")}
        assert had["heavy"] / had["light"] == pytest.approx(2.0, rel=0.1), had
