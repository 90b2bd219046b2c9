"""The scheduler's core in this process, fed with encoded messages, each when it is due.

One server with a queue: what has come in since the last look is handled together (as one read of the socket brings many
messages), then the core is asked what is to be done, and what it says is encoded. The clock is the processor time that this
takes, and jumps to the next arrival when there is nothing to do; so the figures are those of a core of one's own, also on a
machine that is shared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from bench.control_plane.fleet import MOST_REPORTS_PER_S, Clients, Fleet, encode
from services.scheduler.active import PICKS_AT_ONCE
from services.scheduler.garbage import collect_rarely
from shared.bus.codec import decoder
from shared.messages.cluster import LoadReport
from shared.messages.requests import GenerationRequest
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Dispatch, Paired, SendRebalance
from shared.scheduling.calls import OnDispatched, OnRegistry, OnReport, OnTime, Submit
from shared.scheduling.core import SchedulerCore

WARM_UP_S = 1.0
MAX_READ = 300
"""Reports that one read of 64 KiB from the socket brings at most."""


@dataclass
class Station:
    """A core with a fleet that has registered."""

    fleet: Fleet
    core: SchedulerCore = field(init=False)
    waits_s: list[float] = field(default_factory=list)
    """From the arrival of each request to its dispatch."""
    num_pairings: int = 0
    num_messages: int = 0
    """Rebalance messages."""
    _arrived_s: dict[str, float] = field(default_factory=dict)
    _index: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now = 0.0
        settings = SchedulerSettings(lost_after_s=1e9, max_queued=10**9)
        self.core = SchedulerCore(settings, term=1, picks_at_once=PICKS_AT_ONCE)
        self._decode_report = decoder(LoadReport).decode
        self._decode_request = decoder(GenerationRequest).decode
        for index, name in enumerate(self.fleet.names):
            self._index[name] = index
            self.core.apply(OnRegistry(name, self.fleet.info(index)), now)
            state = self.core.cluster.get(name)
            assert state is not None
            state.has_answered = True
            self.handle([self.fleet.report(index, now)], [], now)

    def handle(self, reports: list[bytes], requests: list[tuple[float, bytes]], now: float) -> float:
        """What came in together by `now`, and what is to be done then. Returns the processor time that it took."""
        started_s = time.thread_time()
        for body in reports:
            self.core.apply(OnReport(self._decode_report(body)), now)
        for arrived_s, body in requests:
            request = self._decode_request(body)
            self._arrived_s[request.request_id] = arrived_s
            refused = self.core.apply(Submit(request), now)
            assert refused is None
        if (wakeup := self.core.next_wakeup()) is not None and wakeup <= now:
            self.core.apply(OnTime(), now)
        self._act(now, started_s)
        while self.core.has_more:
            self._act(now, started_s)
        return time.thread_time() - started_s

    def _act(self, now: float, started_s: float) -> None:
        for action in self.core.actions(now):
            if isinstance(action, Dispatch):
                encode(action.request)
                request_id = action.request.request_id
                done_s = now + time.thread_time() - started_s
                self.waits_s.append(done_s - self._arrived_s.pop(request_id))
                self.fleet.accept(self._index[action.instance_id], action.request, now)
                self.core.apply(OnDispatched.to(action, None), now)
            elif isinstance(action, SendRebalance):
                encode(action.rebalance)
                self.num_messages += 1
            elif isinstance(action, Paired):
                self.num_pairings += 1


def most_reports_per_s(num_instances: int, seconds: float, requests_per_report: float) -> float:
    """With nothing to wait for: all reports of a batch lie there when the batch before is done. The first second, in which
    every instance is ranked for the first time, is not counted."""
    station, clients = Station(Fleet(num_instances)), Clients()
    fleet = station.fleet
    spent_s, count, num_counted, due, virtual_s = 0.0, 0, 0, 0.0, 0.0
    collect_rarely()  # as its process does; the fleet is no part of it
    while spent_s < seconds:
        virtual_s += MAX_READ / (MOST_REPORTS_PER_S * num_instances)
        fleet.due(virtual_s, 0)
        reports = [fleet.report((count + number) % num_instances, virtual_s) for number in range(MAX_READ)]
        due += MAX_READ * requests_per_report
        requests = [(virtual_s, encode(clients.request())) for _ in range(int(due))]
        due -= len(requests)
        took_s = station.handle(reports, requests, virtual_s)
        count += MAX_READ
        if virtual_s > WARM_UP_S:
            spent_s += took_s
            num_counted += MAX_READ
    return num_counted / spent_s


class Paced(msgspec.Struct, frozen=True, kw_only=True):
    """Times are on a clock of processor time."""

    num_instances: int
    seconds: float
    cpu_share: float
    """Share of one core."""
    reports_per_s: float
    most_reports_per_s: float = 0.0
    num_requests: int
    wait_p50_ms: float
    wait_p99_ms: float
    wait_max_ms: float
    """From the arrival of a request to its dispatch."""
    late_p99_ms: float
    """Lateness of reports: from when it came to when it was taken in."""
    num_pairings: int
    num_rebalance_messages: int


def paced(
    num_instances: int, seconds: float, requests_per_s: float, seed: int = 0, *, is_flat_out: bool = False
) -> Paced:
    """Every instance reports when it would; requests come at random. Counted is what comes after the first second."""
    station, clients = Station(Fleet(num_instances, seed, is_flat_out=is_flat_out)), Clients(seed)
    fleet, random = station.fleet, np.random.default_rng(seed)
    until_s = WARM_UP_S + seconds
    arrivals_s = np.cumsum(random.exponential(1.0 / requests_per_s, int(requests_per_s * until_s))).tolist()
    bodies = [encode(clients.request()) for _ in arrivals_s]
    late_s: list[float] = []
    busy_s, num_reports, num_requests, now = 0.0, 0, 0, 0.0
    before: tuple[int, int, int, int] | None = None
    began_s = 0.0
    collect_rarely()  # as its process does; the fleet is no part of it
    while now < until_s or before is None:
        if before is None and now >= WARM_UP_S:
            before = (num_reports, len(station.waits_s), station.num_pairings, station.num_messages)
            late_s, busy_s, began_s = [], 0.0, now
        first_due_s = fleet.due_s()
        reports = fleet.due(now, MAX_READ)
        requests = []
        while num_requests < len(arrivals_s) and arrivals_s[num_requests] <= now:
            requests.append((arrivals_s[num_requests], bodies[num_requests]))
            num_requests += 1
        if not reports and not requests:
            arrival_s = arrivals_s[num_requests] if num_requests < len(arrivals_s) else until_s
            now = max(now + 1e-9, min(fleet.due_s(), arrival_s))
            continue
        took_s = station.handle(reports, requests, now)
        now += took_s
        busy_s += took_s
        if reports:
            late_s.append(now - first_due_s)
        num_reports += len(reports)
    waits_ms = 1000 * np.array(station.waits_s[before[1] :])
    return Paced(
        num_instances=num_instances,
        seconds=seconds,
        cpu_share=busy_s / (now - began_s),
        reports_per_s=(num_reports - before[0]) / (now - began_s),
        num_requests=len(waits_ms),
        wait_p50_ms=float(np.percentile(waits_ms, 50)),
        wait_p99_ms=float(np.percentile(waits_ms, 99)),
        wait_max_ms=float(waits_ms.max()),
        late_p99_ms=1000 * float(np.percentile(late_s, 99)),
        num_pairings=station.num_pairings - before[2],
        num_rebalance_messages=station.num_messages - before[3],
    )
