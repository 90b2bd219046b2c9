"""The global queue: requests that no instance has taken yet.

Order: online before offline, high priority before normal, then the tenant that had least (tenants.py), then the order
policy, then arrival at the system (a request that was submitted again keeps its place, because the time it has waited is
counted). The queue is kept in lanes of one model and class, because those are what an instance has room for or not, and in a
lane by tenant, as what a tenant had changes with each dispatch.

A request in the queue does not run, so all that its policy may go by is its model's statistics and how long it has waited.
Lanes of a policy whose keys change are therefore sorted again when the statistics change, and else every `REFRESH_S`: what
waiting changes (starvation, after a second or more) takes effect so much later, and a dispatch costs no sort.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import exp, inf
from typing import NamedTuple

from shared.messages.cluster import ExecutionStatistics
from shared.messages.requests import ErrorCode, ErrorInfo, Priority
from shared.policies.ordering import OrderingPolicy
from shared.policies.tenant_shares import TenantShares
from shared.scheduling.requests import TrackedRequest
from shared.scheduling.tenants import QueueTenants

REFRESH_S = 0.25


class Lane(NamedTuple):
    model: str
    is_online: bool


class Head(NamedTuple):
    """The first request of a lane, as the order policy sees a model that could run next (`ModelView`)."""

    lane: Lane
    first: TrackedRequest
    last_planned_step: int
    """Number of the last pick of the model."""
    pool_share: float = 0.0
    num_short: int = 0
    """Nothing in the queue is in a pool, or next to be."""

    @property
    def name(self) -> str:
        return self.lane.model

    def runnable(self) -> tuple[TrackedRequest]:
        """Its first alone: the rest of the lane comes after it in any case."""
        return (self.first,)

    def streams(self, now: float) -> tuple[float, float]:
        """None has begun."""
        return inf, 0.0

    def rank(self) -> tuple[bool, float]:
        """Online first, then high priority."""
        return (not self.lane.is_online, self.first.key[0])


Entry = tuple[tuple[float, ...], TrackedRequest]
Place = tuple[float, ...]
"""Place of a request in its lane. No two are alike."""
MIN_HEAP = 64
"""Places of a lane that are kept without looking for those that do not hold any more."""


class _Waiting:
    """A lane's requests in order, as of `sorted_s`: each tenant's by themselves, and the tenants by their first ones. Only
    tenants about whom something changed are put in order again, so that a dispatch costs no more with a thousand tenants
    than with ten."""

    __slots__ = (
        "_heads",
        "_heap",
        "_touched",
        "by_tenant",
        "num",
        "num_high",
        "num_rescued",
        "num_tokens",
        "num_unfit",
        "sorted_s",
    )

    def __init__(self, now: float) -> None:
        self.by_tenant: dict[str, list[Entry]] = {}
        """None of them empty."""
        self.num = 0
        self.num_high = 0
        self.num_rescued = 0
        self.num_tokens = 0
        self.num_unfit = 0
        self.sorted_s = now
        self._heads: dict[str, Place] = {}
        """The place of each tenant's first request."""
        self._heap: list[tuple[Place, str]] = []
        """The same, with others that do not hold any more."""
        self._touched: set[str] = set()

    def __iter__(self) -> Iterator[TrackedRequest]:
        """Tenant by tenant."""
        return (tracked for _, tracked in chain.from_iterable(self.by_tenant.values()))

    def touch(self, tenant: str) -> None:
        """The tenant's first request may have another place now."""
        self._touched.add(tenant)

    def first(self, limit: int, shares: TenantShares) -> list[TrackedRequest]:
        """The first `limit` that are not unfit."""
        self._refresh(shares)
        if len(self.by_tenant) == 1:
            (entries,) = self.by_tenant.values()
            return list(islice((tracked for _, tracked in entries if not tracked.is_unfit), limit))
        found: list[TrackedRequest] = []
        heads: dict[str, Place] = {}
        """Heads of the tenants looked at, to be put back."""
        later: list[tuple[Place, str, int]] = []
        """The next request of each of these, as a heap."""
        while len(found) < limit and (self._heap or later):
            if self._heap and (not later or self._heap[0][0] < later[0][0]):
                (place, tenant), index = heappop(self._heap), 0
                if tenant in heads or self._heads.get(tenant) != place:
                    continue
                heads[tenant] = place
            else:
                _, tenant, index = heappop(later)
            entries = self.by_tenant[tenant]
            if not (tracked := entries[index][1]).is_unfit:
                found.append(tracked)
            if index + 1 < len(entries):
                heappush(later, (_place(entries[index + 1], shares), tenant, index + 1))
        for tenant, place in heads.items():
            heappush(self._heap, (place, tenant))
        return found

    def _refresh(self, shares: TenantShares) -> None:
        for tenant in self._touched:
            entries = self.by_tenant.get(tenant)
            if entries is None:
                self._heads.pop(tenant, None)
            elif (place := _place(entries[0], shares)) != self._heads.get(tenant):
                self._heads[tenant] = place
                heappush(self._heap, (place, tenant))
        self._touched.clear()
        if len(self._heap) > 2 * len(self._heads) + MIN_HEAP:
            self._heap = [(place, tenant) for tenant, place in self._heads.items()]
            heapify(self._heap)


def _place(entry: Entry, shares: TenantShares) -> Place:
    """High priority first, then the tenant that had least, then the policy's order."""
    (priority, *rest), tracked = entry
    return (priority, shares.key(tracked.tenant), *rest)


class GlobalQueue:
    """Bounded over all lanes of a class, so that work that may wait turns nobody away who may not. `TrackedRequest.key` is a
    request's place in its lane."""

    def __init__(self, order: OrderingPolicy, max_queued: int) -> None:
        self.order = order
        self.tenants = QueueTenants(self._on_share)
        self._starts_anew = type(order).set_statistics is not OrderingPolicy.set_statistics
        """Whether what the policy gives a request at its arrival depends on statistics. A request that waits has used
        none of it, so new statistics count for it as for those that arrive after it."""
        self._max_queued = max_queued
        self._lanes: dict[Lane, _Waiting] = {}
        self._length = 0
        self._length_by_class = {True: 0, False: 0}
        """Key: online."""
        self._outflow = Outflow()

    def __len__(self) -> int:
        return self._length

    def __contains__(self, lane: Lane) -> bool:
        """Whether anything waits in the lane that could be picked."""
        waiting = self._lanes.get(lane)
        return waiting is not None and waiting.num_unfit < waiting.num

    def lengths(self) -> dict[Lane, int]:
        return {lane: waiting.num for lane, waiting in self._lanes.items()}

    def num_tokens(self, lane: Lane) -> int:
        """Tokens of a lane's requests at their longest."""
        waiting = self._lanes.get(lane)
        return waiting.num_tokens if waiting else 0

    def has_high(self, lane: Lane) -> bool:
        """Whether an online request of high priority waits in the lane."""
        waiting = self._lanes.get(lane)
        return waiting is not None and waiting.num_high > 0

    def has_rescued(self, lane: Lane) -> bool:
        """Whether a request waits in the lane that was lost with its instance."""
        waiting = self._lanes.get(lane)
        return waiting is not None and waiting.num_rescued > 0

    def refusal(self, is_online: bool, now: float) -> ErrorInfo | None:
        """Why one more request cannot be queued, with an estimate of when it could be."""
        length = self._length_by_class[is_online]
        if length < self._max_queued:
            return None
        retry_after_s = min(60.0, max(1.0, length / max(1e-3, self._outflow.per_second(now))))
        name = "online" if is_online else "offline"
        message = f"{length} {name} requests wait in the queue already (at most {self._max_queued})"
        return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=round(retry_after_s, 1))

    def push(self, tracked: TrackedRequest, now: float) -> None:
        """Queues a request; one that was here before keeps what the policy remembers of it. Does not look at the bound:
        what was once let in is not turned away later."""
        if tracked.order_state is None or self._starts_anew:
            self.order.on_arrival(tracked, tracked.submitted_s)
        self.tenants.enter(tracked)
        tracked.key = self._key(tracked, now)
        lane = lane_of(tracked)
        waiting = self._lanes.get(lane)
        if waiting is None:
            waiting = self._lanes[lane] = _Waiting(now)
        insort(waiting.by_tenant.setdefault(tracked.tenant, []), (tracked.key, tracked), key=_key_of)
        waiting.touch(tracked.tenant)
        waiting.num += 1
        waiting.num_tokens += tracked.num_tokens_at_most
        waiting.num_high += tracked.is_high
        waiting.num_rescued += tracked.is_rescued
        waiting.num_unfit += tracked.is_unfit
        self._length += 1
        self._length_by_class[lane.is_online] += 1

    def remove(self, tracked: TrackedRequest) -> None:
        lane = lane_of(tracked)
        waiting = self._lanes[lane]
        entries = waiting.by_tenant[tracked.tenant]
        index = bisect_left(entries, tracked.key, key=_key_of)
        assert entries[index][1] is tracked
        del entries[index]
        waiting.touch(tracked.tenant)
        waiting.num -= 1
        if not entries:
            del waiting.by_tenant[tracked.tenant]
        waiting.num_tokens -= tracked.num_tokens_at_most
        waiting.num_high -= tracked.is_high
        waiting.num_rescued -= tracked.is_rescued
        waiting.num_unfit -= tracked.is_unfit
        if not waiting.num:
            del self._lanes[lane]
        self._length -= 1
        self._length_by_class[lane.is_online] -= 1

    def set_unfit(self, tracked: TrackedRequest, is_unfit: bool) -> None:
        """Sets whether a request in the queue is passed by until that changes."""
        self._lanes[lane_of(tracked)].num_unfit += is_unfit - tracked.is_unfit
        tracked.is_unfit = is_unfit

    def first(self, lane: Lane, now: float, limit: int = 1) -> list[TrackedRequest]:
        """The first `limit` requests of a lane that are not unfit, in order."""
        waiting = self._lanes.get(lane)
        if waiting is None:
            return []
        if not self.order.is_static and now - waiting.sorted_s >= REFRESH_S:
            self._sort(waiting, now)
        return waiting.first(limit, self.tenants.of_class(lane.is_online))

    def _on_share(self, is_online: bool, tenant: str) -> None:
        for lane, waiting in self._lanes.items():
            if lane.is_online == is_online and tenant in waiting.by_tenant:
                waiting.touch(tenant)

    def of_model(self, model: str) -> list[TrackedRequest]:
        """All that wait for a model."""
        lanes = (self._lanes.get(Lane(model, is_online)) for is_online in (True, False))
        return [tracked for waiting in lanes if waiting for tracked in waiting]

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        """New execution times of a model."""
        self.order.set_statistics(statistics)
        if self._starts_anew:
            for is_online in (True, False):
                waiting = self._lanes.get(Lane(statistics.model, is_online))
                if waiting is not None:
                    for tracked in waiting:
                        self.order.on_arrival(tracked, tracked.submitted_s)
                    waiting.sorted_s = -inf

    def count_dispatch(self, now: float) -> None:
        """A request left for an instance; feeds the estimate of how fast the queue drains."""
        self._outflow.count(now)

    def _sort(self, waiting: _Waiting, now: float) -> None:
        for tenant, entries in waiting.by_tenant.items():
            for _, tracked in entries:
                tracked.key = self._key(tracked, now)
            waiting.by_tenant[tenant] = sorted(((tracked.key, tracked) for _, tracked in entries), key=_key_of)
            waiting.touch(tenant)
        waiting.sorted_s = now

    def _key(self, tracked: TrackedRequest, now: float) -> tuple[float, ...]:
        assert tracked.request is not None
        return (
            tracked.request.priority != Priority.HIGH,
            *self.order.key(tracked, now),
            tracked.arrived_s,
            tracked.number,
        )


class Outflow:
    """Events (or amounts) per second, exponentially weighted over about `window_s`; unbiased from the first one on."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._weight = 0.0
        self._at_s = 0.0
        self._began_s: float | None = None

    def count(self, now: float, amount: float = 1.0) -> None:
        if self._began_s is None:
            self._began_s = now
        self._weight = self._decayed(now) + amount
        self._at_s = now

    def per_second(self, now: float) -> float:
        if self._began_s is None:
            return 0.0
        seen_s = max(1.0, now - self._began_s)
        return self._decayed(now) / (self._window_s * (1.0 - exp(-seen_s / self._window_s)))

    def silent_s(self, now: float) -> float:
        """Since the last event."""
        return now - self._at_s

    def _decayed(self, now: float) -> float:
        return self._weight * exp(-max(0.0, now - self._at_s) / self._window_s)


def lane_of(tracked: TrackedRequest) -> Lane:
    return Lane(tracked.model, tracked.is_online)


def _key_of(entry: Entry) -> tuple[float, ...]:
    return entry[0]
