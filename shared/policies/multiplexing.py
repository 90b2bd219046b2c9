"""Which models compute beside each other on the same devices: MuxServe's adaptive batch scheduling (Duan et al. 2024,
section 3.3), a baseline of the simulations.

Devices have ten compute units. A model's prefill and its decode are jobs of their own, with a fixed number of units each,
and at most one of either is under way:

    prefill   where none is under way, the next model in turn that has one; while it lacks units, no decode begins
    decode    then the models in turn, as long as units suffice
    units     those that are free, and up to OVERLAP of those that one job has already

Each model has a quota of the KV pool, which follows its use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

UNITS = 10
OVERLAP = 2
"""Units that two jobs may share."""
QUOTA_INTERVAL_S = 8.0
FULL, MOST_FULL = 0.9, 0.95
"""Use of a quota from which it grows, and up to which others may take of it."""
MIN_BACKLOG = 1.1
"""Multiple of the mean backlog above which a quota grows."""
GROWTH = 0.1
"""Share of the mean quota by which a quota grows at most."""


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Units(NamedTuple):
    """Compute units of a model's jobs, 1 to `UNITS`."""

    prefill: int
    decode: int


class JobId(NamedTuple):
    model: str
    phase: Phase


class Multiplexing:
    """Multiplexing of one group of devices."""

    def __init__(self, units: Mapping[str, Units], *, overlap: int = OVERLAP) -> None:
        self._units = dict(units)
        self._overlap = overlap
        self._models = list(units)
        self._turns = {Phase.PREFILL: 0, Phase.DECODE: 0}
        """Index of the model that is looked at first."""

    def begin(
        self, can_prefill: Collection[str], can_decode: Collection[str], under_way: Sequence[JobId]
    ) -> list[JobId]:
        """The jobs to begin now. `can_...`: models that have such a job and the memory for it; one that is under way counts
        as if it had none."""
        begun: list[JobId] = []
        if not any(job.phase is Phase.PREFILL for job in under_way):
            job = self._next(Phase.PREFILL, can_prefill)
            if job is not None:
                if not self._fits(job, under_way):
                    return begun
                begun.append(self._take(job))
        waiting = [model for model in can_decode if JobId(model, Phase.DECODE) not in under_way]
        while (job := self._next(Phase.DECODE, waiting)) is not None and self._fits(job, [*under_way, *begun]):
            begun.append(self._take(job))
            waiting.remove(job.model)
        return begun

    def _next(self, phase: Phase, models: Collection[str]) -> JobId | None:
        turn = self._turns[phase]
        ordered = (*self._models[turn:], *self._models[:turn])
        return next((JobId(model, phase) for model in ordered if model in models), None)

    def _take(self, job: JobId) -> JobId:
        self._turns[job.phase] = (self._models.index(job.model) + 1) % len(self._models)
        return job

    def _fits(self, job: JobId, under_way: Sequence[JobId]) -> bool:
        used = [0] * UNITS
        for other in under_way:
            for unit in sorted(range(UNITS), key=used.__getitem__)[: self.units_of(other)]:
                used[unit] += 1
        return used.count(0) + min(self._overlap, used.count(1)) >= self.units_of(job)

    def units_of(self, job: JobId) -> int:
        units = self._units[job.model]
        return units.prefill if job.phase is Phase.PREFILL else units.decode


def first_quotas(pool: int, demands: Mapping[str, float], least: Mapping[str, int]) -> dict[str, int]:
    """Shares of a pool (bytes) in proportion to the KV that models ask for per second; each at least its `least`, of which
    the sum must fit."""
    spare = pool - sum(least[model] for model in demands)
    if spare < 0:
        raise ValueError(f"a pool of {pool} bytes does not hold the least of {', '.join(demands)}")
    total = sum(demands.values())
    return {
        model: least[model] + int(spare * (demand / total if total else 1 / len(demands)))
        for model, demand in demands.items()
    }


def adapted_quotas(
    quotas: Mapping[str, int], use: Mapping[str, float], backlog: Mapping[str, int], least: Mapping[str, int]
) -> dict[str, int]:
    """After `QUOTA_INTERVAL_S`. `use`: mean share of its quota that a model used meanwhile; `backlog`: its requests that
    wait. The sum stays, and none falls below its `least`."""
    mean, mean_backlog = sum(quotas.values()) / len(quotas), sum(backlog.values()) / len(quotas)
    takers = [model for model in quotas if use[model] >= FULL and backlog[model] > MIN_BACKLOG * mean_backlog]
    slack = {
        model: max(0, min(int(quotas[model] * (MOST_FULL - use[model])), quotas[model] - least[model]))
        for model in quotas
        if use[model] < FULL
    }
    total = sum(slack.values())
    taken = min(int(GROWTH * mean * len(takers)), total)
    if not taken:
        return dict(quotas)
    changed = {model: quota - taken * slack.get(model, 0) // total for model, quota in quotas.items()}
    freed = sum(quotas.values()) - sum(changed.values())
    for number, model in enumerate(takers):
        changed[model] += freed // len(takers) + (number < freed % len(takers))
    return changed
