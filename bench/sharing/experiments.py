"""What is compared: the figures of SeaLLM's evaluation (section 6) that ask for the whole system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from bench.reporting import Target
from bench.sharing.results import Outcome, outcome
from bench.sharing.systems import ALPASERVE, DEDICATED, FIXED, MUXSERVE, TIDEWAY, Case, System, simulate
from bench.sharing.workloads import Workload
from shared.placement.baselines import NoPlacement

RATES = (2.0, 10.0, 20.0, 30.0, 40.0, 50.0)
CAPACITY_RATES = (20.0, 30.0, 40.0, 50.0, 60.0, 80.0)
SYSTEMS = (TIDEWAY, DEDICATED, ALPASERVE, MUXSERVE)
PAPER = {"vllm": (10.38, 12.13, 1.82), "alpaserve": (9.52, 5.80, 3.64), "muxserve": (13.60, 18.69, 2.11)}
"""System -> how many times better SeaLLM's normalised latency, P99 latency and attainment are, up to (section 6.2)."""


def variant(name: str, **changes: object) -> System:
    return msgspec.structs.replace(TIDEWAY, name=name, **changes)


VARIANTS = (
    TIDEWAY,
    variant("fcfs", order="fcfs"),
    variant("mlfq", order="mlfq"),
    variant("round-robin", order="round_robin"),
    variant("seallm-order", order="seallm"),
    variant("no-sharing", placement="dedicated", replacement=None),
    variant("first-placement", replacement=None),
    variant("fixed-interval", replacement=FIXED),
    variant("fixed-partition", least_share=1.0),
)


def _weaker(system: System, name: str, **changes: object) -> System:
    return msgspec.structs.replace(system, name=f"{system.name}, {name}", **changes)


WHOLE, FEW = "whole prompts", "8 at once"
CHOICES = (
    TIDEWAY,
    *(
        one
        for system in (DEDICATED, ALPASERVE)
        for one in (
            system, _weaker(system, WHOLE, mix_phases=False), _weaker(system, FEW, max_running=8),
            _weaker(system, f"{WHOLE}, {FEW}", mix_phases=False, max_running=8),
        )
    ),
    MUXSERVE,
    _weaker(MUXSERVE, "in turns", overlaps=False),
)  # fmt: skip
"""What baselines are given here that those of the paper may not have had, switched off."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    system: System
    case: Case


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the paper."""

    about: str
    x_name: str
    points: Callable[[float], list[Point]]
    """Points for a length of the runs, in seconds."""
    run_s: float
    """By default."""


def _rates(systems: Iterable[System], rates: Iterable[float], run_s: float, num_devices: int = 32) -> list[Point]:
    return [
        Point(
            x=rate,
            system=system,
            case=Case(workload=Workload(rate_rps=rate), run_s=run_s, num_devices=num_devices),
        )
        for rate in rates
        for system in systems
    ]


def _workloads(key: str, values: Iterable[float], rate: float, run_s: float) -> list[Point]:
    return [
        Point(x=value, system=system, case=Case(workload=Workload(rate_rps=rate, **{key: value}), run_s=run_s))
        for value in values
        for system in SYSTEMS
    ]


FIGURES = {
    "figure6": Figure(
        about="Normalised latency, P99 latency and attainment at rates from 2 to 50 req/s on 32 A800 (figures 6 and 7). "
        "The paper: SeaLLM's normalised latency is below 3 and its attainment above 90 % at every rate.",
        x_name="rate, req/s", run_s=100.0,
        points=lambda run_s: _rates(SYSTEMS, RATES, run_s),
    ),
    "capacity": Figure(
        about="Figure 6 beyond its rates: where each system's attainment falls below 99 and 90 %.",
        x_name="rate, req/s", run_s=50.0,
        points=lambda run_s: _rates(SYSTEMS, CAPACITY_RATES, run_s),
    ),
    "baselines": Figure(
        about="What makes the baselines as strong as they are. Whole prompts: a step is whole prompts or decodes, as vLLM's "
        "were before chunked prefill. 8 at once: an instance's batch. In turns: MuxServe's prefills and decodes run one "
        "after the other on all units, not beside each other on units of their own.",
        x_name="rate, req/s", run_s=50.0,
        points=lambda run_s: _rates(CHOICES, (50.0,), run_s),
    ),
    "figure8": Figure(
        about="What each part is good for, on 16 devices: on 32 most services have groups of their own, and little is left "
        "to order. The paper, on 32: with FCFS or MLFQ up to 4.17 times the normalised latency and 1.37 times lower "
        "attainment, with the first placement up to 2.44 and 1.33 times; without the placement algorithm it is vLLM.",
        x_name="rate, req/s",
        run_s=60.0,
        points=lambda run_s: _rates(VARIANTS, (10.0, 20.0), run_s, num_devices=16),
    ),
    "replacement": Figure(
        about="Figure 8's ablation of adaptive replacement, long enough for it: after a third of the run the popularity of "
        "the services is turned round (the most popular gets the share of the least popular one, and so on), on 16 devices. "
        "The paper: with the first placement up to 2.44 times the normalised latency and 1.33 times lower attainment.",
        x_name="rate, req/s", run_s=300.0,
        points=lambda run_s: [
            Point(
                x=20.0, system=system,
                case=Case(workload=Workload(rate_rps=20.0, turn_s=run_s / 3), num_devices=16, run_s=run_s),
            )
            for system in VARIANTS
            if system.name in ("tideway", "first-placement", "fixed-interval")
        ],
    ),
    "figure10": Figure(
        about="Attainment over the SLO's scale: the SLO is so many times the mean execution time of the service. The "
        "paper: SeaLLM attains more than all baselines at every scale.",
        x_name="rate, req/s", run_s=60.0,
        points=lambda run_s: _rates(SYSTEMS, (40.0,), run_s),
    ),
    "figure11": Figure(
        about="The same requests, 20 req/s, on 64, 48, 32 and 16 devices. The paper: the more crowded, the larger the "
        "difference; MuxServe finds no placement on 16.",
        x_name="devices", run_s=60.0,
        points=lambda run_s: [
            Point(
                x=float(num), system=system,
                case=Case(workload=Workload(rate_rps=20.0), num_devices=num, run_s=run_s),
            )
            for num in (64, 48, 32, 16)
            for system in SYSTEMS
        ],
    ),
    "figure12": Figure(
        about="Skew: so many requests of one service one after the other, at 30 req/s. The paper: all get slightly worse, "
        "SeaLLM the least.",
        x_name="consecutive requests", run_s=60.0,
        points=lambda run_s: _workloads("num_consecutive", (1, 8, 32, 128), 30.0, run_s),
    ),
    "figure13": Figure(
        about="Output lengths with a Gaussian error, of which the history knows nothing, at 8 req/s. Answers get longer by "
        "that: an error below a token counts as one token. The paper: all get worse, SeaLLM stays the best.",
        x_name="standard deviation, output lengths", run_s=60.0,
        points=lambda run_s: _workloads("output_error", (0.0, 1.0, 4.0, 16.0), 8.0, run_s),
    ),
}  # fmt: skip


def run_point(point: Point) -> Outcome:
    started_s = time.process_time()
    try:
        run = simulate(point.system, point.case)
    except NoPlacement as error:
        return Outcome(x=point.x, system=point.system.name, seed=point.case.seed, error=str(error))
    return outcome(point.x, point.system.name, point.case.seed, run, time.process_time() - started_s)


def run_points(points: list[Point], num_processes: int, show: Callable[[Outcome], None]) -> list[Outcome]:
    """`show` is called as each is there, in their order."""
    outcomes = []
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for found in pool.map(run_point, points):
            outcomes.append(found)
            show(found)
    return outcomes


def targets(outcomes: list[Outcome]) -> list[Target]:
    """Targets of figure 6."""
    ours = [one for one in outcomes if one.system == TIDEWAY.name]
    last = max(ours, key=lambda one: one.x)
    found = [
        Target(
            name="normalised latency at the worst rate", value=max(one.normalised_latency for one in ours), limit=3.0
        ),
        Target(
            name="attainment at the worst rate", value=min(one.attainment for one in ours), limit=0.9, is_least=True
        ),
    ]
    return found + [
        Target(
            name=f"normalised latency of {one.system} over ours at {one.x:g} req/s",
            value=one.normalised_latency / last.normalised_latency, limit=9.0, is_least=True,
        )
        for one in outcomes
        if one.x == last.x and one is not last and not one.error
    ]  # fmt: skip
