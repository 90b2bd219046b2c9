from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.model import CostModel, StepShape
from shared.policies.multiplexing import Units
from shared.simulation.events import Events
from shared.simulation.gateway import Job, Record
from shared.simulation.spatial import SpatialGroup, SpatialModel, run

COST = CostModel(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_attention_s=1e-9, decode_s=1e-4, decode_context_s=1e-7,
)  # fmt: skip


UNITS = Units(8, 4)


def model(name: str = "a", units: Units = UNITS) -> SpatialModel:
    return SpatialModel(
        name=name, cost_model=COST, units=units, block_size=16, block_bytes=1000, max_model_len=320, demand=1.0
    )


def simulate(
    jobs: list[Job], models: list[SpatialModel], pool_bytes: int = 10**6, **named: float
) -> tuple[list[Record], SpatialGroup]:
    events = Events()
    group = SpatialGroup(events, models, pool_bytes, **named)  # type: ignore[arg-type]
    return run(events, {model.name: group for model in models}, jobs), group


def test_a_request_alone_takes_its_phases_times_on_their_units() -> None:
    (record,), group = simulate([Job(1.0, 100, 3, model="a")], [model(units=Units(8, 2))], overhead=1.1)
    prefill_s = 1.1 * COST.predict(StepShape(100, 5000.0)) * 10 / 8
    decodes_s = sum(1.1 * 2 * COST.predict(StepShape(0, 0.0, 1, context)) for context in (101, 102))
    assert record.ttft_s == pytest.approx(prefill_s)
    assert record.latency_s == pytest.approx(prefill_s + decodes_s)
    assert group.used_bytes == {"a": 0}
    itl = group.itl["a"].summary()
    assert (itl.num, itl.mean) == (2, pytest.approx(decodes_s / 2))


def test_decodes_beside_each_other_share_the_bandwidth_and_cost_less_than_one_after_the_other() -> None:
    alone = simulate([Job(0.0, 16, 100, model="a")], [model()])[0][0]
    both = simulate([Job(0.0, 16, 100, model=name) for name in "ab"], [model("a"), model("b")])[0]
    decode_s = alone.latency_s - alone.ttft_s
    for record in both:
        assert 1.15 * decode_s < record.latency_s - record.ttft_s < 1.25 * decode_s


def test_interference_slows_what_runs_beside_others_alone() -> None:
    models, jobs = [model("a"), model("b")], [Job(0.0, 16, 100, model=name) for name in "ab"]
    assert simulate(jobs[:1], models, interference=0.2)[0][0] == simulate(jobs[:1], models)[0][0]
    plain, slow = (simulate(jobs, models, interference=share)[0] for share in (0.0, 0.2))
    for before, after in zip(plain, slow, strict=True):
        took_s, alike_s = after.latency_s - after.ttft_s, before.latency_s - before.ttft_s
        assert 1.15 * alike_s < took_s < 1.2 * alike_s + 1e-9


def test_jobs_with_all_units_run_one_after_the_other() -> None:
    whole = Units(10, 10)
    models = [model("a", whole), model("b", whole)]
    alone = simulate([Job(0.0, 16, 100, model="a")], models)[0][0]
    both = simulate([Job(0.0, 16, 100, model=name) for name in "ab"], models)[0]
    assert alone.ttft_s == pytest.approx(COST.predict(StepShape(16, 128.0)))
    for record in both:
        assert record.latency_s == pytest.approx(2 * alone.latency_s, rel=0.02)
    # Nothing runs beside anything.
    assert simulate([Job(0.0, 16, 100, model=name) for name in "ab"], models, interference=0.5)[0] == both


def test_the_newest_is_put_back_where_the_quota_is_short_and_nothing_is_lost() -> None:
    jobs = [Job(0.0, 100, 150, model="a") for _ in range(4)]
    records, group = simulate(jobs, [model()], pool_bytes=40_000)
    assert group.num_preemptions > 0
    assert records[0].num_preemptions == 0, "the oldest keeps its place"
    assert sum(record.num_preemptions for record in records) == group.num_preemptions
    with pytest.raises(ValueError, match="does not hold"):
        simulate(jobs, [model()], pool_bytes=19_000)


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 2), st.integers(1, 200), st.integers(1, 120)), min_size=1, max_size=30
    ),
    pool_blocks=st.integers(60, 120),
    units=st.tuples(st.integers(1, 10), st.integers(1, 10)),
)
def test_every_request_ends_once_with_all_its_tokens(
    rows: list[tuple[float, int, int, int]], pool_blocks: int, units: tuple[int, int]
) -> None:
    jobs = [Job(at, prompt, output, model="abc"[index]) for at, index, prompt, output in sorted(rows)]
    records, group = simulate(jobs, [model(name, Units(*units)) for name in "abc"], pool_blocks * 1000)
    assert group.num_open == 0
    assert set(group.used_bytes.values()) == {0}
    for job, record in zip(jobs, records, strict=True):
        assert record.num_tokens == job.output_tokens
        assert job.at_s < record.first_s <= record.last_s == record.ended_s
