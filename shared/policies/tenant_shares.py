"""Service shared among tenants in proportion to their weights: the virtual token counter (Sheng et al. 2024, "Fairness in
Serving Large Language Models", section 4.1), counted in seconds of the cost model instead of tokens, so that prefill, decode
and context weigh what they take.

    served(t)    += seconds / weight(t)      of all that was computed for t
    promised(t)   seconds / weight(t)        of what was begun for t and is not computed yet
    next          the least served + promised
    reached      += seconds / weight of all present tenants, at least
                    served(t) when something of t is begun, and the least served when another tenant comes
    a request of t comes:   served(t) = max(served(t), reached - CREDIT_S / weight(t))

A promise is the paper's charge of a whole prompt at its admission. `reached` is the service of a tenant that always had work
waiting. It never falls, so a later tenant is served after those that wait already, however many tenants come. No tenant
saves up more than a little credit, neither while away nor with a request that takes little. A tenant served while no other
wants anything owes nothing for it. For two tenants that always have work waiting, weighted service differs by at most that
credit and twice the largest promise or charge made at once. (The paper's credit is 0. Then half of what others have waiting
is served before each prompt of a tenant that asks one at a time.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

CREDIT_S = 1.0
"""Seconds of service that a tenant may be behind when a request of it comes."""
BEHIND_SHARE = 0.5
"""A tenant is behind with at most this part of its share by weight."""
MAX_AWAY = 1024
"""Tenants without requests whose counters are kept, those with the most service. Others would be lifted anyway."""


class _Counter:
    __slots__ = ("num_here", "promised_s", "served_s", "weight")

    def __init__(self) -> None:
        self.num_here = 0
        self.weight = 1.0
        self.served_s = 0.0
        """Divided by the weights at which it was charged."""
        self.promised_s = 0.0

    @property
    def key(self) -> float:
        return self.served_s + self.promised_s / self.weight


class TenantShares:
    """The counters of one class of requests in one place: an instance, or the scheduler's queue."""

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        """`on_change` is called with each present tenant whose `key` may have changed."""
        self._on_change = on_change
        self._here: dict[str, _Counter] = {}
        """Counters of tenants with requests."""
        self._away: dict[str, _Counter] = {}
        self._reached_s = 0.0
        """Weighted service of a tenant that always had work waiting."""
        self._weight = 0.0
        self._num_here = 0
        """Total weight and number of requests of the present tenants."""

    @property
    def are_several(self) -> bool:
        """Whether several tenants share; with one, all keys are equal."""
        return len(self._here) > 1

    @property
    def num_tenants(self) -> int:
        """Number of present tenants."""
        return len(self._here)

    @property
    def mean_weight(self) -> float:
        """Mean weight of the present tenants; 0 without any."""
        return self._weight / len(self._here) if self._here else 0.0

    def __contains__(self, tenant: str) -> bool:
        """Whether the tenant has a request here."""
        return tenant in self._here

    def __iter__(self) -> Iterator[str]:
        return iter(self._here)

    def enter(self, tenant: str, weight: float) -> None:
        """A request came. Its weight holds for its tenant from now on. Each request must `leave` once."""
        counter = self._here.get(tenant)
        if counter is None:
            self._reached_s = max(self._reached_s, self.least_served_s())
            counter = self._away.pop(tenant, None) or _Counter()
            self._here[tenant] = counter
        else:
            self._weight -= counter.weight
        counter.num_here += 1
        counter.weight = weight
        counter.served_s = max(counter.served_s, self._reached_s - CREDIT_S / weight)
        self._weight += weight
        self._num_here += 1
        self._tell(tenant)

    def leave(self, tenant: str) -> None:
        """A request ended or went elsewhere."""
        counter = self._here[tenant]
        counter.num_here -= 1
        self._num_here -= 1
        if counter.num_here:
            return
        del self._here[tenant]
        self._weight = self._weight - counter.weight if self._here else 0.0
        counter.promised_s = 0.0
        if counter.served_s > self._reached_s - CREDIT_S / counter.weight:
            self._away[tenant] = counter
        if len(self._away) > MAX_AWAY:
            least = sorted(self._away, key=lambda name: self._away[name].served_s)
            for name in least[: MAX_AWAY // 2]:
                del self._away[name]

    def least_served_s(self) -> float:
        """Least service among the present tenants; O(n)."""
        return min((counter.served_s for counter in self._here.values()), default=0.0)

    def charge(self, tenant: str, seconds: float) -> None:
        """`seconds` were computed for the tenant. Without a request here, nothing is counted."""
        if (counter := self._here.get(tenant)) is not None:
            counter.served_s += seconds / counter.weight
            self._reached_s += seconds / self._weight
            self._tell(tenant)

    def promise(self, tenant: str, seconds: float) -> None:
        """`seconds` of work began for the tenant; below 0: that much was computed or abandoned."""
        if (counter := self._here.get(tenant)) is not None:
            if seconds > 0.0:
                self._reached_s = max(self._reached_s, counter.served_s)
            counter.promised_s = max(0.0, counter.promised_s + seconds)
            self._tell(tenant)

    def _tell(self, tenant: str) -> None:
        if self._on_change is not None:
            self._on_change(tenant)

    def key(self, tenant: str) -> float:
        """Smaller goes first. The tenant must be present."""
        return self._here[tenant].key

    def served_s(self, tenant: str) -> float:
        """Weighted service counted so far; the tenant must be present."""
        return self._here[tenant].served_s

    def num_here(self, tenant: str) -> int:
        """Its requests."""
        counter = self._here.get(tenant)
        return 0 if counter is None else counter.num_here

    def share(self, tenant: str) -> float:
        """Its share, by weight among the present tenants."""
        return self._here[tenant].weight / self._weight

    def is_behind(self, tenant: str, at_most: float = BEHIND_SHARE) -> bool:
        """Whether it has far fewer requests here than its share: at most this part of it."""
        return self._here[tenant].num_here <= at_most * self.share(tenant) * self._num_here

    def favoured(self, at_most: float = BEHIND_SHARE) -> set[str]:
        """Those that are behind, and had no more service than any that is not."""
        if not self.are_several:
            return set()
        behind = {tenant for tenant in self._here if self.is_behind(tenant, at_most)}
        least_s = min((one.served_s for tenant, one in self._here.items() if tenant not in behind), default=0.0)
        return {tenant for tenant in behind if self._here[tenant].served_s <= least_s}

    def has_dominant(self, at_least: int, factor: float, weight_away: float) -> bool:
        """Whether a tenant has at least `at_least` requests here, and at least `factor` times its share even if others with
        `weight_away` in total came too."""
        total, per_weight = self._weight + weight_away, factor * self._num_here
        return any(
            counter.num_here >= max(at_least, per_weight * counter.weight / total) for counter in self._here.values()
        )
