"""Autoscaling of instances that work off prompts and a batch, with the delays of what the scheduler measures."""

from __future__ import annotations

import math
from collections import deque
from itertools import groupby

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.policies.autoscaling import MOST_WORK, Autoscaling, Fleet, Grow, Keep, Member, ScalingBounds, Shrink
from shared.scheduling.dispatching import BACKLOG_S, WORK_WINDOW_S
from shared.scheduling.harvest import THROUGHPUT_WINDOW_S
from shared.scheduling.queue import Outflow
from tests.seeds import examples

BOUNDS = ScalingBounds(low=160.0, high=960.0, period_s=10.0, settle_s=10.0)
MAX_WAITING = 4
"""Prompts that wait on an instance."""
TTFT_S = 1.5


class Cluster:
    """Instances that compute one second of prompts or of a batch's lines each second, prompts first. Memory is ample."""

    def __init__(self, num_instances: int, start_s: int, drain_s: int, prompt_s: float, line_s: int = 20) -> None:
        self.policy = Autoscaling(BOUNDS)
        self.names = [f"i{number}" for number in range(num_instances)]
        self.changes: list[int] = []
        self.now = 0
        self.batch_s = self.deadline_s = 0.0
        """Instances' time that the batch still needs, and when it is to be done."""
        self._coming: dict[str, int] = {}
        self._going: dict[str, int] = {}
        self._number = num_instances
        self._start_s, self._drain_s, self._prompt_s = start_s, drain_s, prompt_s
        self._queued_s = self._here_s = 0.0
        """Prompts that wait for an instance, and on one."""
        self._sent = Outflow(WORK_WINDOW_S)
        self._done = Outflow(THROUGHPUT_WINDOW_S)
        self._lines: deque[float] = deque([0.0] * line_s)
        """What of the batch was computed in each of the last seconds: counted when the lines end."""

    def run(self, seconds: int, prompts: float) -> None:
        for _ in range(seconds):
            self._work(prompts)
            self._scale()
            self.now += 1

    def _work(self, prompts: float) -> None:
        for name in [name for name, at in self._coming.items() if at <= self.now]:
            del self._coming[name]
            self.names.append(name)
        self._going = {name: at for name, at in self._going.items() if at > self.now}
        num = len(self.names)
        self._queued_s += prompts
        computed_s = min(float(num), self._here_s + self._queued_s)
        sent_s = min(self._queued_s, max(0.0, MAX_WAITING * self._prompt_s * num + computed_s - self._here_s))
        self._queued_s -= sent_s
        self._here_s += sent_s - computed_s
        if sent_s > 0:
            self._sent.count(self.now, sent_s)
        batch_s = min(self.batch_s, num - computed_s)
        self.batch_s -= batch_s
        self._lines.append(batch_s)
        if (ended_s := self._lines.popleft()) > 0:
            self._done.count(self.now, ended_s)

    def _scale(self) -> None:
        late = self._here_s / len(self.names) / TTFT_S
        rate, left_s = self._done.per_second(self.now), self.deadline_s - self.now
        fleet = Fleet(
            [Member(name, frozenset("m"), 1e5, 2, 6, 2e5, late) for name in self.names],
            list(self._coming),
            list(self._going),
            queued={"m": math.ceil(self._queued_s / self._prompt_s)} if self._queued_s > 1e-9 else {},
            work={"m": self._sent.per_second(self.now) + self._queued_s / BACKLOG_S},
            pressure={"m": self.batch_s / rate / left_s} if self.batch_s > 0 and rate > 0 and left_s > 0 else {},
        )
        match self.policy.decide(fleet, float(self.now)):
            case Grow(number):
                for _ in range(number - len(self.names) - len(self._coming)):
                    self._coming[f"i{self._number}"] = self.now + self._start_s
                    self._number += 1
                self.changes.append(1)
            case Shrink(name):
                self.names.remove(name)
                self._going[name] = self.now + self._drain_s
                self.changes.append(-1)
            case Keep(name):
                del self._going[name]
                self._coming[name] = self.now + 1
                self.changes.append(1)

    def turns(self) -> list[int]:
        """Directions of the changes, each run of them once."""
        return [direction for direction, _ in groupby(self.changes)]


@settings(max_examples=examples(8), deadline=None)
@given(st.floats(0.05, 3.0), st.floats(0.05, 8.0), st.integers(0, 10), st.integers(1, 30), st.floats(0.1, 3.0))
@example(0.5, 8.0, 10, 30, 1.0)
@example(3.0, 0.1, 2, 5, 0.3)
@example(1.92, 6.49, 3, 10, 2.3)  # 9 of 10 after a minute, when the work that was sent counted as all of it
def test_a_step_of_prompts_is_met_within_a_minute_and_then_nothing_goes_to_and_fro(
    before: float, after: float, start_s: int, drain_s: int, prompt_s: float
) -> None:
    needed = math.ceil(after / MOST_WORK)
    cluster = Cluster(math.ceil(before / MOST_WORK), start_s, drain_s, prompt_s)
    cluster.run(300, before)
    assert len(cluster.turns()) <= 1, "a constant load"
    cluster.changes.clear()
    may_be_met = needed <= 16 * len(cluster.names)
    cluster.run(60, after)
    assert len(cluster.names) >= needed or not may_be_met
    cluster.run(600, after)
    assert len(cluster.names) >= after and cluster.turns() in ([], [1], [-1], [1, -1])


@settings(max_examples=examples(12), deadline=None)
@given(
    st.floats(0.3, 6.0),
    st.sampled_from([300, 600, 900, 1800]),
    st.floats(0.05, 0.6),
    st.integers(0, 10),
    st.integers(5, 60),
)
@example(2.61, 1800, 0.07, 10, 20)  # 1, 3, 8, 2, 4 instances, when throughput counted as that of the present number
@example(1.11, 900, 0.41, 10, 5)  # what prompts take of the last instance leaves little to the batch
@example(5.09, 300, 0.25, 5, 5)
def test_a_batch_is_in_time_and_the_number_rises_and_falls_once(
    needed: float, window_s: int, prompts: float, start_s: int, line_s: int
) -> None:
    """`needed`: instances that the batch would take for the whole window."""
    cluster = Cluster(1, start_s, 10, 0.3, line_s)
    cluster.run(100, prompts)
    cluster.batch_s, cluster.deadline_s = needed * window_s, cluster.now + window_s
    while cluster.batch_s > 0 and cluster.now < cluster.deadline_s:
        cluster.run(1, prompts)
    assert cluster.batch_s == 0, "in time"
    assert cluster.turns() in ([], [1], [1, -1])
