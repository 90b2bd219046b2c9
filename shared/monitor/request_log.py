"""SeaLLM's service monitor (section 3): the requests of the last hours, and exact sums over them. Pure: times are arguments,
Unix seconds.

Time is cut into slots of `SLOT_S`. A slot has the sums of what arrived and what ended in it, over all requests, and single
requests. Those are bounded: where there are more than fit, the slot with the most arrivals keeps every second of them (by a
bit of the request's number, so that the end of one that was left out is known as such), and each of the rest stands for
twice as many. So every part of the log is covered, and rates stay right. Slots that are too old go as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

import msgspec

from shared.messages.traffic import (
    LEAST_INTERVAL_S,
    MAX_INTERVAL_S,
    ClassSums,
    Moments,
    Outcome,
    RequestRow,
    RequestRows,
    StoredTraffic,
)
from shared.monitor.sums import add_arrival, add_end, merge, merged

if TYPE_CHECKING:
    from shared.placement.problem import Traffic

SLOT_S = LEAST_INTERVAL_S
MAX_REQUESTS = 65_536
MAX_SLOT_REQUESTS = 16_384
MAX_AGE_S = MAX_INTERVAL_S
PART_ROWS = 2048
"""Arrivals, and as many ends, of one stored part: far below what a message may have."""
THINNED_SHARE = 0.95
"""Share of the bound to which a full log is thinned."""
JITTER_S = 0.5
"""Between the times of arrival that the arrival and the end of a request say."""


def slot_index(at_s: float) -> int:
    return int(at_s // SLOT_S)


class LoggedRequest:
    """One request of the log."""

    __slots__ = ("arrived_s", "model", "row", "slot")

    def __init__(self, model: str, arrived_s: float, slot: Slot, row: RequestRow) -> None:
        self.model = model
        self.arrived_s = arrived_s
        self.slot = slot
        """In which it arrived."""
        self.row = row
        """The request as last told."""

    @property
    def weight(self) -> int:
        """Requests like it that it stands for."""
        return 1 << self.slot.level


class Slot:
    """`SLOT_S` of time."""

    __slots__ = ("arrived", "ended", "index", "is_changed", "level", "num_parts", "sums")

    def __init__(self, index: int) -> None:
        self.index = index
        self.level = 0
        """A request is kept if the last so many bits of its number are 0."""
        self.arrived: dict[int, LoggedRequest] = {}
        """By number."""
        self.ended: list[LoggedRequest] = []
        """In this slot, whenever they arrived."""
        self.sums: dict[tuple[str, bool], ClassSums] = {}
        """By model and whether online, of all requests, also of those that were left out."""
        self.is_changed = False
        self.num_parts = 0
        """Parts that are stored."""

    def keeps(self, number: int) -> bool:
        return not number & ((1 << self.level) - 1)

    def sums_of(self, model: str, is_online: bool) -> ClassSums:
        self.is_changed = True
        key = (model, is_online)
        if key not in self.sums:
            self.sums[key] = ClassSums()
        return self.sums[key]


class RequestLog:
    """Bounded by `max_requests` and `max_age_s`."""

    def __init__(self, began_s: float, *, max_requests: int = MAX_REQUESTS, max_age_s: float = MAX_AGE_S) -> None:
        self.began_s = began_s
        """Time from which on it has heard of requests."""
        self.num_thinned = 0
        """Requests left out so far, as there were too many; they count in sums and weights."""
        self.num_expired = 0
        """Kept ones that became too old."""
        self._max_requests = max_requests
        self._max_age_s = max_age_s
        self._slots: dict[int, Slot] = {}
        self._known: dict[int, LoggedRequest] = {}
        self._execution: dict[tuple[str, bool], Moments] = {}
        """Execution times in all slots, by model and whether online."""
        self._gone: set[int] = set()
        """Slots that are forgotten here and perhaps still stored."""

    @property
    def num_requests(self) -> int:
        """Requests that are kept one by one."""
        return len(self._known)

    # ---------------------------------------------------------------------------------------------------- adding

    def add(self, told: RequestRows, now: float) -> None:
        """What is told twice counts once (of a request that was left out: twice)."""
        for row in told.rows:
            arrived_s = now - max(0.0, row.age_s)
            if row.model >= len(told.models) or arrived_s < now - self._max_age_s:
                continue
            model = told.models[row.model]
            request = self._known.get(row.number)
            if request is None and (row.outcome == Outcome.PENDING or not self._was_left_out(row.number, arrived_s)):
                request = self._arrive(row, model, arrived_s)
            if row.outcome != Outcome.PENDING:
                self._end(row, model, arrived_s, request)
        self.expire(now)
        if len(self._known) > self._max_requests:
            self._thin()

    def _was_left_out(self, number: int, arrived_s: float) -> bool:
        around = (self._slots.get(slot_index(arrived_s + jitter_s)) for jitter_s in (-JITTER_S, JITTER_S))
        return any(not slot.keeps(number) for slot in around if slot is not None)

    def _slot(self, at_s: float) -> Slot:
        index = slot_index(at_s)
        if index not in self._slots:
            self._slots[index] = Slot(index)
        return self._slots[index]

    def _arrive(self, row: RequestRow, model: str, arrived_s: float) -> LoggedRequest | None:
        slot = self._slot(arrived_s)
        self.began_s = min(self.began_s, arrived_s)
        add_arrival(slot.sums_of(model, row.is_online), row)
        if not slot.keeps(row.number):
            self.num_thinned += 1
            return None
        pending = row if row.outcome == Outcome.PENDING else msgspec.structs.replace(row, outcome=Outcome.PENDING)
        request = LoggedRequest(model, arrived_s, slot, pending)
        slot.arrived[row.number] = self._known[row.number] = request
        if len(slot.arrived) > MAX_SLOT_REQUESTS:
            self._drop_ended(self._halve(slot))
        return request

    def _end(self, row: RequestRow, model: str, arrived_s: float, request: LoggedRequest | None) -> None:
        if request is not None and request.row.outcome != Outcome.PENDING:
            return
        slot = self._slot(arrived_s + row.latency_s)
        add_end(slot.sums_of(model, row.is_online), row)
        if row.outcome == Outcome.FINISHED and row.execution_s > 0:
            merge(self._execution_of(model, row.is_online), Moments(1, row.execution_s))
        if request is not None and request.row.number in self._known:
            request.row = row
            slot.ended.append(request)

    # -------------------------------------------------------------------------------------------------- bounding

    def expire(self, now: float) -> None:
        """Forgets slots that are too old."""
        oldest = slot_index(now - self._max_age_s)
        self._forget([index for index in self._slots if index < oldest])

    def forget_oldest(self, share: float) -> None:
        """Forgets so many of the oldest slots."""
        self._forget(sorted(self._slots)[: max(1, int(share * len(self._slots)))])

    def _forget(self, gone: list[int]) -> None:
        self._gone.update(gone)
        for index in gone:
            slot = self._slots.pop(index)
            self.num_expired += len(slot.arrived)
            for key, sums in slot.sums.items():
                merge(self._execution_of(*key), sums.execution_s, -1)
            for number in slot.arrived:
                del self._known[number]

    def _thin(self) -> None:
        """The fullest slots, one after the other, by half."""
        slots = [(-len(slot.arrived), index) for index, slot in self._slots.items()]
        heapify(slots)
        dropped: list[LoggedRequest] = []
        while len(self._known) > THINNED_SHARE * self._max_requests:
            slot = self._slots[slots[0][1]]
            dropped += self._halve(slot)
            heapreplace(slots, (-len(slot.arrived), slot.index))
        self._drop_ended(dropped)

    def _halve(self, slot: Slot) -> list[LoggedRequest]:
        slot.level += 1
        slot.is_changed = True
        dropped = [request for number, request in slot.arrived.items() if not slot.keeps(number)]
        for request in dropped:
            del slot.arrived[request.row.number], self._known[request.row.number]
        self.num_thinned += len(dropped)
        return dropped

    def _drop_ended(self, dropped: list[LoggedRequest]) -> None:
        ended = {slot_index(r.arrived_s + r.row.latency_s) for r in dropped if r.row.outcome != Outcome.PENDING}
        for slot in (self._slots[index] for index in ended if index in self._slots):
            slot.ended = [request for request in slot.ended if request.row.number in self._known]
            slot.is_changed = True

    # --------------------------------------------------------------------------------------------------- storing

    def take_changed(self, at_s: float) -> dict[str, StoredTraffic]:
        """Parts of the slots that changed since the last call, by key; they are due no more."""
        stored: dict[str, StoredTraffic] = {}
        for slot in self._slots.values():
            if slot.is_changed:
                slot.is_changed = False
                stored |= _stored(slot, at_s, self.began_s)
        return stored

    def keep_changed(self, keys: Iterable[str]) -> None:
        """What was taken could not be stored: it is due again."""
        for key in keys:
            if slot := self._slots.get(int(key.partition(".")[0])):
                slot.is_changed = True

    def next_gone(self) -> int | None:
        """A slot that is to be stored no more, until `purged` says so."""
        return next(iter(self._gone - self._slots.keys()), None)

    def purged(self, slot: int) -> None:
        self._gone.discard(slot)

    def load(self, parts: Iterable[StoredTraffic], now: float) -> None:
        """What was stored, into an empty log."""
        parts = list(parts)
        for part in parts:
            slot = self._slots.setdefault(part.slot, Slot(part.slot))
            slot.level = max(slot.level, part.level)
            slot.num_parts += 1
            for model, is_online, sums in part.sums:
                slot.sums[part.models[model], is_online] = sums
                merge(self._execution_of(part.models[model], is_online), sums.execution_s)
        for part in parts:
            slot = self._slots[part.slot]
            for row in part.arrived:
                if slot.keeps(row.number):
                    request = LoggedRequest(part.models[row.model], part.at_s - row.age_s, slot, row)
                    slot.arrived[row.number] = self._known[row.number] = request
        for part in parts:
            for row in part.ended:
                known = self._known.get(row.number)
                if known is not None and known.row.outcome == Outcome.PENDING:
                    known.row = row
                    self._slots[part.slot].ended.append(known)
        self.began_s = min([self.began_s, *(part.began_s for part in parts)])
        self.expire(now)
        if len(self._known) > self._max_requests:
            self._thin()

    # --------------------------------------------------------------------------------------------------- looking

    def models(self) -> set[str]:
        return {model for slot in self._slots.values() for model, _ in slot.sums}

    def mean_execution_s(self, model: str) -> float:
        """Mean execution time of all its online requests that finished; 0: none has."""
        moments = self._execution_of(model, True)
        return moments.total / moments.count if moments.count else 0.0

    def _execution_of(self, model: str, is_online: bool) -> Moments:
        return self._execution.setdefault((model, is_online), Moments())

    def sums(self, model: str, is_online: bool, since_s: float, until_s: float) -> ClassSums:
        """Sums of all slots that the interval touches."""
        touched = self.slots(since_s, until_s)
        return merged(slot.sums[model, is_online] for slot in touched if (model, is_online) in slot.sums)

    def since_s(self, since_s: float, until_s: float, num: int) -> float:
        """Time from which on hardly more than `num` requests arrived, those too that were left out: `since_s`, or the
        beginning of a later slot."""
        for slot in reversed(list(self.slots(since_s, until_s))):
            num -= sum(sums.arrived for sums in slot.sums.values())
            if num <= 0:
                return max(since_s, slot.index * SLOT_S)
        return since_s

    def arrived(self, since_s: float, until_s: float) -> Iterator[LoggedRequest]:
        """Those that arrived in the interval, slot by slot."""
        for slot in self.slots(since_s, until_s):
            for request in slot.arrived.values():
                if since_s <= request.arrived_s < until_s:
                    yield request

    def ended(self, since_s: float, until_s: float) -> Iterator[LoggedRequest]:
        """Those that ended in the slots that the interval touches."""
        for slot in self.slots(since_s, until_s):
            yield from slot.ended

    def slots(self, since_s: float, until_s: float) -> Iterator[Slot]:
        """Those that the interval touches, in order."""
        first, last = slot_index(max(since_s, self.began_s)), slot_index(until_s)
        if last - first > len(self._slots):
            return (self._slots[index] for index in sorted(self._slots) if first <= index <= last)
        return (self._slots[index] for index in range(first, last + 1) if index in self._slots)

    def traffic(
        self,
        since_s: float,
        until_s: float,
        models: Iterable[str] | None = None,
        bases: Mapping[str, str] | None = None,
    ) -> Traffic:
        """What arrived in the interval, for a search: see `shared.monitor.traffic`."""
        from shared.monitor.traffic import traffic  # whoever only records needs no numpy

        return traffic(self, since_s, until_s, models, bases)


def _stored(slot: Slot, at_s: float, began_s: float) -> dict[str, StoredTraffic]:
    """In parts; those that it had before and needs no more become empty."""
    names = sorted({model for model, _ in slot.sums} | {request.model for request in slot.ended})
    index = {name: number for number, name in enumerate(names)}

    def row(request: LoggedRequest, outcome: Outcome) -> RequestRow:
        age_s = at_s - request.arrived_s
        return msgspec.structs.replace(request.row, model=index[request.model], age_s=age_s, outcome=outcome)

    arrived = [row(request, Outcome.PENDING) for request in slot.arrived.values()]
    ended = [row(request, request.row.outcome) for request in slot.ended]
    sums = [(index[model], is_online, sums) for (model, is_online), sums in slot.sums.items()]
    num_parts = max(1, -(-max(len(arrived), len(ended)) // PART_ROWS))
    parts = {}
    for part in range(max(num_parts, slot.num_parts)):
        rows = slice(part * PART_ROWS, (part + 1) * PART_ROWS)
        parts[f"{slot.index}.{part}"] = StoredTraffic(
            at_s, began_s, slot.index, slot.level, names, arrived[rows], ended[rows], sums if part == 0 else []
        )
    slot.num_parts = max(num_parts, slot.num_parts)
    return parts
