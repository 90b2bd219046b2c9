"""A model that nobody has measured keeps the objectives of its online streams under a backlog that never ends."""

from __future__ import annotations

import msgspec
import pytest

from bench.coserving.runs import (
    MODEL,
    SMOLLM_135M_ON_TWO_CORES,
    TIDEWAY,
    Objectives,
    RunResult,
    Setup,
    VirtualRun,
    VirtualTestbed,
)
from shared.costs.model import CostSource
from shared.engine.calls import AddModel, SetCostModel
from shared.engine.engine import Engine
from shared.messages.requests import RequestClass
from tests.shared.costs import costs
from tideway.bench.workload import PlannedRequest

OBJECTIVES = Objectives(ttft_s=1.5, tpot_s=0.11)


class ColdSetup(Setup, frozen=True, kw_only=True):
    """Nobody sets a cost model."""

    fits_costs: bool

    def engine(self, system, shape, cost_model, num_merged, objectives) -> Engine:  # type: ignore[no-untyped-def]
        configuration = self.configuration(system, num_merged, objectives)
        engine = msgspec.structs.replace(configuration, num_host_merged=0, fits_costs=self.fits_costs).build()
        engine.apply(AddModel(msgspec.structs.replace(shape, num_layers=cost_model.num_layers)), 0.0)
        return engine


def planned(at_s: float, prompt_tokens: int, output_tokens: int, request_class: RequestClass) -> PlannedRequest:
    return PlannedRequest(
        request_id=f"{request_class}-{at_s}", stream=str(request_class), model=MODEL, at_s=at_s,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, request_class=request_class,
    )  # fmt: skip


def run(fits_costs: bool, slowness: float, noise: float, seed: int) -> tuple[RunResult, Engine]:
    """Runs for 20 s: short streams that begin all the time, beside prompts of 900 tokens without end."""
    objectives = Objectives(OBJECTIVES.ttft_s * slowness, OBJECTIVES.tpot_s * slowness)
    setup = ColdSetup(fits_costs=fits_costs, seed=seed)
    testbed = VirtualTestbed(setup, SMOLLM_135M_ON_TWO_CORES.scaled(slowness), noise)
    virtual = VirtualRun(testbed, TIDEWAY, objectives)
    online = [planned(slowness * 0.8 * n, 60 + 13 * n % 90, 40, RequestClass.ONLINE) for n in range(25)]
    offline = [planned(0.0, 900, 30, RequestClass.OFFLINE)]
    return virtual.run(online, offline, 20.0 * slowness), virtual.engine


def tpots(result: RunResult) -> list[float]:
    return [
        (record.token_times[-1] - record.token_times[0]) / (len(record.token_times) - 1)
        for record in result.records
        if record.request_class is RequestClass.ONLINE
    ]


@pytest.mark.parametrize("slowness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_objectives_are_kept_from_the_first_request_on_without_a_profile(slowness: float, seed: int) -> None:
    result, engine = run(True, slowness, 0.1, seed)
    kept = tpots(result)
    assert len(kept) == 25 and max(kept) <= OBJECTIVES.tpot_s * slowness
    assert engine.cost_models()[MODEL].source == CostSource.LIVE
    assert result.counts.harvested_tokens > 0
    without, engine = run(False, slowness, 0.1, seed)
    assert min(tpots(without)) > OBJECTIVES.tpot_s * slowness
    assert engine.cost_models() == {}


def test_a_measured_cost_model_takes_over() -> None:
    _, engine = run(True, 1.0, 0.0, 1)
    measured = costs(0.01, 0.001, decode_s=0.001)
    engine.apply(SetCostModel(MODEL, measured, CostSource.STORED), 0.0)
    assert engine.cost_models()[MODEL] == (measured, 1.0, CostSource.STORED)
