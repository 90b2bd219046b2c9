"""Names of tenants as labels of metrics, which are bounded: the first `MAX_LABELS` have one each, all others share one."""

from __future__ import annotations

from collections.abc import Iterable

MAX_LABELS = 64
OTHER = "other"
NOBODY = "none"
"""Requests without a tenant: no key is configured, or none was given."""


class TenantLabels:
    """What tenants are called in the metrics of one process. A label stays its tenant's."""

    def __init__(self, names: Iterable[str] = (), max_labels: int = MAX_LABELS) -> None:
        """`names`: those that have a label before any other comes."""
        self._max_labels = max_labels
        self._known: set[str] = set()
        for name in names:
            self.of(name)

    def of(self, tenant: str) -> str:
        if not tenant:
            return NOBODY
        if tenant not in self._known:
            if len(self._known) >= self._max_labels:
                return OTHER
            self._known.add(tenant)
        return tenant
