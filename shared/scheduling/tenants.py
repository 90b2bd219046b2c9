"""What each tenant has of the cluster, as far as the scheduler knows: the counters by which its queue goes.

A request counts for its tenant from its coming to its end. What it will take is promised at its dispatch (the time of its
prompt, or what requests of its model take on average, if that is more), and replaced by what it took when its instance tells
its end.
"""

from __future__ import annotations

from collections import Counter

from shared.policies.tenant_shares import BEHIND_SHARE, TenantShares
from shared.scheduling.requests import TrackedRequest

UNKNOWN_S = 0.1
"""Service of a request of a model of which none has ended."""
LEARNING = 0.1
"""What one request changes of the mean of its model."""


class QueueTenants:
    """Of online and offline requests apart."""

    def __init__(self) -> None:
        self._shares = (TenantShares(), TenantShares())
        """Of offline and online requests."""
        self._mean_s: dict[str, float] = {}
        """Service of each model's requests."""
        self._num_placed = (Counter[str](), Counter[str]())

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

    def unplace(self, tracked: TrackedRequest) -> None:
        """It is on none any more. Nothing for one that was not."""
        if tracked.promised_s is None:
            return
        self.of(tracked).promise(tracked.tenant, -tracked.promised_s)
        tracked.promised_s = None
        placed = self._num_placed[tracked.is_online]
        placed[tracked.tenant] -= 1
        if not placed[tracked.tenant]:
            del placed[tracked.tenant]

    def charge(self, tracked: TrackedRequest, service_s: float) -> None:
        """What it took, told at its end."""
        mean_s = self._mean_s.get(tracked.model, service_s)
        self._mean_s[tracked.model] = mean_s + LEARNING * (service_s - mean_s)
        self.of(tracked).charge(tracked.tenant, service_s)

    def of(self, tracked: TrackedRequest) -> TenantShares:
        """Those of its class."""
        return self._shares[tracked.is_online]

    def of_class(self, is_online: bool) -> TenantShares:
        return self._shares[is_online]

    def is_behind(self, tracked: TrackedRequest) -> bool:
        """Whether its tenant has much less on the instances than is its share, so that its online request need not wait for
        what others hold there."""
        shares = self.of(tracked)
        if not tracked.is_online or not shares.are_several:
            return False
        placed = self._num_placed[True]
        return placed[tracked.tenant] < BEHIND_SHARE * shares.share(tracked.tenant) * placed.total()
