"""A machine whose cores instances share with the services, in virtual time: what gateway, scheduler, bus and clients compute
takes cores from the steps when no core is idle.

    host = Host(Demand(request_s=0.004, token_s=1e-4), num_cores=2, beside=1.1)
    fleet = Fleet(settings, slowdown=...)      # of `host.slowdown(now, num_computing)`

Services are woken by what they wait for, and run before steps do. They use idle cores first; what is beyond these is taken
from all instances that compute, each of one core:

    load      cores that services need: what requests and tokens brought, over the last `WINDOW_S` (exponentially weighted)
    lost      max(0, load - (num_cores - num_computing)) / num_computing, at most `MOST_LOST`
    slowdown  1 / (1 - lost), times `beside` where more than one computes: they share caches and memory
"""

from __future__ import annotations

import math
from typing import NamedTuple

WINDOW_S = 0.3
"""Services work off what a moment brings within such a time."""
MOST_LOST = 0.8


class Demand(NamedTuple):
    """Processor time of all services and clients on the machine."""

    request_s: float
    """Seconds of a core for a request, beside its tokens."""
    token_s: float
    """Seconds of a core for an output token."""


NO_DEMAND = Demand(0.0, 0.0)


class Load:
    """Cores that services need, as it follows from what came. Times must not fall."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._cores, self._at_s = 0.0, -math.inf

    def add(self, at_s: float, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        work_s = num_requests * self._demand.request_s + num_tokens * self._demand.token_s
        self._cores, self._at_s = self.cores(at_s) + work_s / WINDOW_S, at_s

    def cores(self, at_s: float) -> float:
        return self._cores * math.exp((self._at_s - at_s) / WINDOW_S) if self._cores else 0.0


def lost(load: float, num_cores: int, num_computing: int) -> float:
    """Share of its core that each of so many instances loses to services that need `load` cores."""
    return min(MOST_LOST, max(0.0, load - max(0, num_cores - num_computing)) / num_computing)


class Host:
    def __init__(self, demand: Demand, *, num_cores: int, beside: float = 1.0) -> None:
        """`beside`: factor on a step while another instance computes, services apart."""
        self.load = Load(demand)
        self._num_cores, self._beside = num_cores, beside

    def slowdown(self, now_s: float, num_computing: int) -> float:
        """Factor on a step that begins now. `num_computing`: instances that compute then, its own too."""
        left = 1.0 - lost(self.load.cores(now_s), self._num_cores, num_computing)
        return (self._beside if num_computing > 1 else 1.0) / left
