"""Service shared among tenants in proportion to their weights: the virtual token counter (Sheng et al. 2024, "Fairness in
Serving Large Language Models", section 4.1), counted in seconds of the cost model instead of tokens, so that prefill, decode
and context weigh what they take.

    served(t)    += seconds / weight(t)      whatever was computed for t
    promised(t)   seconds / weight(t)        of what was begun for t and is not computed yet
    next          the least served + promised
    t comes, with nothing of it here:   served(t) = max(served(t), least served of those that are here - CREDIT_S)

A promise is the paper's charge of a whole prompt at its admission.
So nobody hoards more than a little credit while away, and whoever is served while nobody else wants anything owes nothing
for it. Of two tenants that always have work waiting, weighted service differs by no more than CREDIT_S and twice the largest
promise or charge made at once. (The paper's credit is 0: then half of what others have waiting goes before each prompt of a
tenant that asks one at a time.)
"""

from __future__ import annotations

from collections.abc import Iterator

CREDIT_S = 1.0
"""Of weighted service that a tenant may be behind when it comes."""
BEHIND_SHARE = 0.5
"""Of what its weight gives it: a tenant with no more than that is behind."""
MAX_AWAY = 1024
"""Tenants without a request whose counters are kept, those with the most service: the others would be lifted anyway."""


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

    def __init__(self) -> None:
        self._here: dict[str, _Counter] = {}
        """Of tenants with requests."""
        self._away: dict[str, _Counter] = {}
        self._last_served_s = 0.0
        """Of the last one that left, where nobody is here."""

    @property
    def are_several(self) -> bool:
        """Whether there is anything to share: else all keys are alike."""
        return len(self._here) > 1

    def __contains__(self, tenant: str) -> bool:
        """Whether the tenant has a request here."""
        return tenant in self._here

    def __iter__(self) -> Iterator[str]:
        return iter(self._here)

    def enter(self, tenant: str, weight: float) -> None:
        """A request came; its weight holds for its tenant from now on. Each is to `leave` once."""
        counter = self._here.get(tenant)
        if counter is None:
            least_s = self._least_served_s()
            counter = self._away.pop(tenant, None) or _Counter()
            counter.served_s = max(counter.served_s, least_s - CREDIT_S)
            self._here[tenant] = counter
        counter.num_here += 1
        counter.weight = weight

    def leave(self, tenant: str) -> None:
        """A request is over, or went elsewhere."""
        counter = self._here[tenant]
        counter.num_here -= 1
        if counter.num_here:
            return
        del self._here[tenant]
        counter.promised_s = 0.0
        self._last_served_s = counter.served_s
        least_s = self._least_served_s()
        if counter.served_s > least_s - CREDIT_S:
            self._away[tenant] = counter
        if len(self._away) > MAX_AWAY:
            least = sorted(self._away, key=lambda name: self._away[name].served_s)
            for name in least[: MAX_AWAY // 2]:
                del self._away[name]

    def _least_served_s(self) -> float:
        return min((counter.served_s for counter in self._here.values()), default=self._last_served_s)

    def charge(self, tenant: str, seconds: float) -> None:
        """So much was computed for it. Of a tenant without a request here, nothing."""
        if (counter := self._here.get(tenant)) is not None:
            counter.served_s += seconds / counter.weight

    def promise(self, tenant: str, seconds: float) -> None:
        """So much was begun for it; below 0: that much was computed, or given up."""
        if (counter := self._here.get(tenant)) is not None:
            counter.promised_s = max(0.0, counter.promised_s + seconds)

    def key(self, tenant: str) -> float:
        """Smaller goes first. Only of those that are here."""
        return self._here[tenant].key

    def served_s(self, tenant: str) -> float:
        """Weighted service counted so far; only of those that are here."""
        return self._here[tenant].served_s

    def num_here(self, tenant: str) -> int:
        """Its requests."""
        counter = self._here.get(tenant)
        return 0 if counter is None else counter.num_here

    def lag_s(self, tenant: str) -> float:
        """Weighted service that it had more than the one with least of those that are here."""
        counter = self._here.get(tenant)
        return 0.0 if counter is None else counter.served_s - self._least_served_s()

    def share(self, tenant: str) -> float:
        """Its part of what there is, by weight among those that are here."""
        return self._here[tenant].weight / self._weight()

    def is_behind(self, tenant: str) -> bool:
        """Whether it has much fewer requests here than is its share."""
        return self._here[tenant].num_here <= BEHIND_SHARE * self.share(tenant) * self._num_here()

    def has_dominant(self, at_least: int, factor: float, weight_away: float) -> bool:
        """Whether a tenant has at least so many requests here, and `factor` times its share or more, if others of that
        weight together came too."""
        total, per_weight = self._weight() + weight_away, factor * self._num_here()
        return any(
            counter.num_here >= max(at_least, per_weight * counter.weight / total) for counter in self._here.values()
        )

    def _weight(self) -> float:
        return sum(counter.weight for counter in self._here.values())

    def _num_here(self) -> int:
        return sum(counter.num_here for counter in self._here.values())
