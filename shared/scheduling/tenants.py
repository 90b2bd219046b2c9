"""What each tenant has of the cluster, as far as the scheduler knows: the counters by which its queue goes.

A request counts for its tenant from its coming to its end. What it will take is promised at its dispatch (the time of its
prompt, or what requests of its model take on average, if that is more), and replaced by what it took when its instance tells
its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial

from shared.messages.cluster import TenantStatistics
from shared.policies.tenant_labels import OTHER
from shared.policies.tenant_shares import BEHIND_SHARE, TenantShares
from shared.scheduling.requests import TrackedRequest

UNKNOWN_S = 0.1
"""Service of a request of a model of which none has ended."""
LEARNING = 0.1
"""What one request changes of the mean of its model."""
WINDOW_S = 60.0
"""Window of the service that is told."""
MAX_TOLD = 256
"""Tenants."""


class QueueTenants:
    """Tenants of online and of offline requests in the queue."""

    def __init__(self, on_change: Callable[[bool, str], None] | None = None) -> None:
        """`on_change` is told of each tenant whose place among those of a class (True: online) may have changed."""
        told = (None, None) if on_change is None else (partial(on_change, False), partial(on_change, True))
        self._shares = (TenantShares(told[0]), TenantShares(told[1]))
        """Shares of tenants among offline and among online requests."""
        self._mean_s: dict[str, float] = {}
        """Service of each model's requests."""
        self._num_placed = (Counter[str](), Counter[str]())
        self._num_of_models = Counter[str]()
        """Online requests on instances, or on their way to one, of each model."""
        self._lately: deque[tuple[float, dict[str, float]]] = deque()
        """Service of requests that ended, by the second and tenant."""

    def enter(self, tracked: TrackedRequest) -> None:
        """It came. Nothing for one that is counted."""
        if not tracked.is_counted:
            tracked.is_counted = True
            self.of(tracked).enter(tracked.tenant, tracked.tenant_weight)

    def leave(self, tracked: TrackedRequest) -> None:
        """It is over, or nobody's here any more."""
        self.unplace(tracked)
        if tracked.is_counted:
            tracked.is_counted = False
            self.of(tracked).leave(tracked.tenant)

    def place(self, tracked: TrackedRequest, prompt_s: float) -> None:
        """It goes to an instance, or is on one."""
        self.unplace(tracked)
        tracked.promised_s = seconds = max(prompt_s, self._mean_s.get(tracked.model, UNKNOWN_S))
        self.of(tracked).promise(tracked.tenant, seconds)
        self._num_placed[tracked.is_online][tracked.tenant] += 1
        if tracked.is_online:
            self._num_of_models[tracked.model] += 1

    def unplace(self, tracked: TrackedRequest) -> None:
        """It is on none any more. Nothing for one that was not."""
        if tracked.promised_s is None:
            return
        self.of(tracked).promise(tracked.tenant, -tracked.promised_s)
        tracked.promised_s = None
        if tracked.is_online:
            self._num_of_models[tracked.model] -= 1
        placed = self._num_placed[tracked.is_online]
        placed[tracked.tenant] -= 1
        if not placed[tracked.tenant]:
            del placed[tracked.tenant]

    def charge(self, tracked: TrackedRequest, service_s: float, now: float, *, is_whole: bool = True) -> None:
        """What it took, told at its end. Not `is_whole`: it goes on elsewhere."""
        if is_whole:
            mean_s = self._mean_s.get(tracked.model, service_s)
            self._mean_s[tracked.model] = mean_s + LEARNING * (service_s - mean_s)
        self.of(tracked).charge(tracked.tenant, service_s)
        if not self._lately or self._lately[-1][0] != now // 1:
            self._lately.append((now // 1, {}))
            self._expire(now)
        in_second = self._lately[-1][1]
        in_second[tracked.tenant] = in_second.get(tracked.tenant, 0.0) + service_s

    def _expire(self, now: float) -> None:
        while self._lately and self._lately[0][0] <= now - WINDOW_S:
            self._lately.popleft()

    def statistics(self, now: float) -> list[TenantStatistics]:
        """Statistics of tenants with requests, or with any that ended in the last minute; those with the most first."""
        self._expire(now)
        service_s: defaultdict[str, float] = defaultdict(float)
        for _, in_second in self._lately:
            for tenant, seconds in in_second.items():
                service_s[tenant] += seconds
        offline, online = self._shares
        least_s = online.least_served_s()
        found = []
        for tenant in {*offline, *online, *service_s}:
            num_placed = sum(placed[tenant] for placed in self._num_placed)
            num_here = offline.num_here(tenant) + online.num_here(tenant)
            found.append(
                TenantStatistics(
                    tenant=tenant,
                    num_queued=num_here - num_placed,
                    num_placed=num_placed,
                    service_s=service_s.get(tenant, 0.0),
                    lag_s=online.served_s(tenant) - least_s if tenant in online else 0.0,
                )
            )
        found.sort(key=lambda one: (-one.num_queued - one.num_placed, -one.service_s, one.tenant))
        return found if len(found) <= MAX_TOLD else [*found[: MAX_TOLD - 1], merged(found[MAX_TOLD - 1 :])]

    def of(self, tracked: TrackedRequest) -> TenantShares:
        """Those of its class."""
        return self._shares[tracked.is_online]

    def of_class(self, is_online: bool) -> TenantShares:
        return self._shares[is_online]

    def may_be_behind(self, model: str, *, is_online: bool) -> bool:
        """Whether a request of the model and class can be behind."""
        return (is_online and self._is_missing(model)) or self._shares[is_online].are_several

    def is_behind(self, tracked: TrackedRequest) -> bool:
        """Whether this online request need not wait for what others hold on the instances: its model has none there, or
        its tenant would have much less than its share there with this one too. Where many tenants have a request each, none
        is behind."""
        if not tracked.is_online:
            return False
        if self._is_missing(tracked.model):
            return True
        shares = self.of(tracked)
        if not shares.are_several:
            return False
        placed = self._num_placed[True]
        return placed[tracked.tenant] + 1 <= BEHIND_SHARE * shares.share(tracked.tenant) * (placed.total() + 1)

    def _is_missing(self, model: str) -> bool:
        """Whether other models alone have online requests on the instances."""
        return not self._num_of_models[model] and bool(self._num_placed[True])


def merged(some: Iterable[TenantStatistics]) -> TenantStatistics:
    """Several tenants as one."""
    some = list(some)
    return TenantStatistics(
        tenant=OTHER,
        num_queued=sum(one.num_queued for one in some),
        num_placed=sum(one.num_placed for one in some),
        service_s=sum(one.service_s for one in some),
        lag_s=max((one.lag_s for one in some), default=0.0),
    )
