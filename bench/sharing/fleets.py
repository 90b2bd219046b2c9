"""How many requests a second a fleet carries: for several sizes of fleet and exponents of popularity, the rate up to which a
system attains 99 and 90 %. Each system is asked at the rates that bracket its own levels, with the same services, rates'
shapes and seeds for all.

MuxServe stands for a band: what jobs on the same devices cost each other is not known here, and the result depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import numpy as np

from bench.reporting import Target, table
from bench.sharing.experiments import Point, run_point
from bench.sharing.results import LEVELS, Outcome, capacity
from bench.sharing.systems import ALPASERVE, BY_NEED, DEDICATED, MUXSERVE, TIDEWAY, Case, System
from bench.sharing.workloads import Workload

MUXSERVE_BAND = (
    msgspec.structs.replace(MUXSERVE, name="muxserve, 10 % interference", interference=0.1),
    msgspec.structs.replace(MUXSERVE, name="muxserve, 20 % interference", interference=0.2),
    msgspec.structs.replace(MUXSERVE, name="muxserve, in turns", overlaps=False),
)
SYSTEMS = (TIDEWAY, DEDICATED, BY_NEED, ALPASERVE, MUXSERVE, *MUXSERVE_BAND)
DEVICES = (32, 16)
POPULARITIES = (1.0, 1.5, 2.0, 2.5)
FIRST_RPS_PER_DEVICE = 1.0
STEP = 1.5
"""Factor from one rate to the next."""
NUM_HALVINGS = 2
"""How often the range between the two rates around a level is halved."""
MOST_STEPS = 8
"""Steps up, and down, from the first rate."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    num_devices: int
    popularity: float
    seed: int
    """Seed of services and requests."""
    num_services: int = 8


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    fleet: Fleet
    system: System
    run_s: float


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one system on one fleet."""

    fleet: Fleet
    system: str
    outcomes: list[Outcome]
    """Ascending by rate."""
    took_s: float
    """Processor time."""


def asked_of(fleets: Iterable[Fleet], run_s: float, systems: Sequence[System] = SYSTEMS) -> list[Asked]:
    return [Asked(fleet=fleet, system=system, run_s=run_s) for fleet in fleets for system in systems]


def climb(run: Callable[[float], Outcome], first_rps: float) -> list[Outcome]:
    """Outcomes at rates around those at which attainment falls below each level, ascending; only the first where there is no
    placement."""
    found = {first_rps: run(first_rps)}
    if found[first_rps].error:
        return [*found.values()]

    def ask(rate: float) -> Outcome:
        return found.setdefault(rate, run(rate)) if rate not in found else found[rate]

    rate = first_rps
    for _ in range(MOST_STEPS):
        if found[rate].attainment >= max(LEVELS):
            break
        rate /= STEP
        ask(rate)
    rate = max(found)
    for _ in range(MOST_STEPS):
        if found[rate].error or found[rate].attainment < min(LEVELS):
            break
        rate *= STEP
        ask(rate)
    for level in LEVELS:
        for _ in range(NUM_HALVINGS):
            rates = sorted(found)
            above = next((one for one in rates if found[one].error or found[one].attainment < level), None)
            if above is None or above == rates[0]:
                break
            ask(math.sqrt(above * rates[rates.index(above) - 1]))
    return [found[rate] for rate in sorted(found)]


def carried(asked: Asked) -> Carried:
    began_s, fleet = time.process_time(), asked.fleet

    def run(rate: float) -> Outcome:
        workload = Workload(
            rate_rps=rate, popularity=fleet.popularity, num_services=fleet.num_services, services_seed=fleet.seed
        )
        case = Case(workload=workload, seed=fleet.seed, num_devices=fleet.num_devices, run_s=asked.run_s)
        return run_point(Point(x=rate, system=asked.system, case=case))

    outcomes = climb(run, FIRST_RPS_PER_DEVICE * fleet.num_devices)
    return Carried(
        fleet=fleet, system=asked.system.name, outcomes=outcomes, took_s=round(time.process_time() - began_s, 1)
    )


def compare(asked: Sequence[Asked], num_processes: int, show: Callable[[Carried], None]) -> list[Carried]:
    """`show` is called as each is there, in their order."""
    found = []
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for one in pool.map(carried, asked):
            found.append(one)
            show(one)
    return found


def _rates(found: Iterable[Carried], fleet: Fleet, level: float) -> dict[str, float]:
    """Requests a second that systems carry. One that does not attain the level at the lowest rate carries none."""
    rates = {}
    for one in found:
        if one.fleet == fleet and (at := capacity(one.outcomes, one.system, level)) is not None:
            rates[one.system] = 0.0 if at.is_below else at.rate
    return rates


def told(one: Carried) -> str:
    head = f"{one.fleet.num_devices} devices, exponent {one.fleet.popularity:g}, seed {one.fleet.seed}, {one.system}: "
    if one.outcomes[0].error:
        return head + one.outcomes[0].error
    return head + ", ".join(f"{capacity(one.outcomes, one.system, level)} req/s to {level:.0%}" for level in LEVELS)


def fleet_table(found: Sequence[Carried]) -> list[str]:
    """A row of each system: what it carries of each fleet, at both levels."""
    fleets, systems = (
        list(dict.fromkeys(each)) for each in zip(*((one.fleet, one.system) for one in found), strict=True)
    )
    head = [f"{fleet.num_devices} x {fleet.popularity:g}, seed {fleet.seed}" for fleet in fleets]
    of = {(one.fleet, one.system): one for one in found}
    rows = []
    for system in systems:
        row = [system]
        for fleet in fleets:
            one = of.get((fleet, system))
            at = [] if one is None else [capacity(one.outcomes, system, level) for level in LEVELS]
            row.append(", ".join(map(str, at)) if at and None not in at else "no placement")
        rows.append(row)
    return table(["devices x exponent: req/s to " + ", ".join(f"{level:.0%}" for level in LEVELS), *head], rows)


def targets(found: Sequence[Carried]) -> list[Target]:
    """What ours carries at 99 % over the best baseline, at each width of MuxServe's band."""
    aims = []
    bands = {"": MUXSERVE.name} | {f", {one.name}": one.name for one in MUXSERVE_BAND}
    for label, muxserve in bands.items():
        ratios = []
        for fleet in dict.fromkeys(one.fleet for one in found):
            rates = _rates(found, fleet, LEVELS[0])
            best = max(rates.get(name, 0.0) for name in (DEDICATED.name, BY_NEED.name, ALPASERVE.name, muxserve))
            if best and TIDEWAY.name in rates:
                ratios.append(rates[TIDEWAY.name] / best)
        if ratios:
            name = f"req/s at {LEVELS[0]:.0%} over the best baseline{label}"
            aims += [
                Target(name=f"{name}, worst", value=min(ratios), limit=1.0, is_least=True),
                Target(name=f"{name}, mean", value=float(np.mean(ratios)), limit=1.5, is_least=True),
            ]
    return aims
