"""What happened to each request, in the user's eyes: latencies, pauses, what preemptions cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.rebalance.workloads import Job
from shared.engine.requests import Ended
from shared.messages.requests import FinishReason, TokenEntry

if TYPE_CHECKING:
    from bench.rebalance.instance import Instance


class RunFailed(Exception):
    """A request did not get its output, or got a wrong one."""


class Record(msgspec.Struct):
    """One request. Seconds of the run; below 0: has not happened."""

    arrival_s: float
    is_high: bool
    prompt_tokens: int
    output_tokens: int
    first_s: float = -1.0
    last_s: float = -1.0
    num_tokens: int = 0
    num_preemptions: int = 0
    preempted_s: float = -1.0
    """Since when it lacks what a preemption took; -1: it does not."""
    loss_s: float = 0.0
    """From each preemption to the next token."""
    recomputed_tokens: int = 0
    num_moves: int = 0
    longest_gap_s: float = 0.0
    """Between two of its tokens."""
    planned_s: float = -1.0
    """First part of a step."""
    ended_s: float = -1.0

    @property
    def start_s(self) -> float:
        """From arrival to the first step with a part of it."""
        return self.planned_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def latency_s(self) -> float:
        return self.last_s - self.arrival_s


class Journal:
    def __init__(self, jobs: list[Job]) -> None:
        self.records = [Record(job.at_s, job.is_high, job.prompt_tokens, job.output_tokens) for job in jobs]
        self.num_left = len(jobs)
        self.num_steps = 0
        self.pauses: list[tuple[int, float, float]] = []
        """Of each move of a running request: its tokens, the pause it saw (from its last token at the source to its first at
        the destination), and the source's step time then."""
        self._paused: dict[int, tuple[int, float, float]] = {}
        self._num_preemptions: dict[str, int] = {}

    def total_tokens(self, number: int) -> int:
        """Prompt and output, when a request ends."""
        record = self.records[number]
        return record.prompt_tokens + record.output_tokens

    def on_entries(self, entries: list[TokenEntry], now: float) -> None:
        for entry in entries:
            if not entry.tokens:
                continue
            number = int(entry.request_id)
            record = self.records[number]
            if entry.offset != record.num_tokens:
                raise RunFailed(f"request {number}: tokens at offset {entry.offset}, {record.num_tokens} were expected")
            record.num_tokens += len(entry.tokens) // 4
            if record.first_s < 0:
                record.first_s = now
            else:
                record.longest_gap_s = max(record.longest_gap_s, now - record.last_s)
            if record.preempted_s >= 0:
                record.loss_s += now - record.preempted_s
                record.preempted_s = -1.0
            if (pause := self._paused.pop(number, None)) is not None:
                self.pauses.append((pause[0], now - pause[1], pause[2]))
            record.last_s = now

    def on_ended(self, ended: Ended) -> None:
        record = self.records[int(ended.request.request_id)]
        if ended.reason != FinishReason.STOP or record.num_tokens != record.output_tokens:
            raise RunFailed(
                f"request {ended.request.request_id} ended with {ended.reason} after {record.num_tokens} "
                f"of {record.output_tokens} tokens"
            )
        record.ended_s = ended.ended_s
        if ended.first_planned_s is not None:
            record.planned_s = ended.first_planned_s
        record.num_preemptions = ended.num_preemptions
        record.recomputed_tokens = ended.recomputed_tokens
        self.num_left -= 1

    def on_planned(self, instance: Instance, now: float) -> None:
        """Notices who was preempted by a plan."""
        num_preemptions = instance.engine.counters.num_preemptions
        if num_preemptions == self._num_preemptions.get(instance.instance_id, 0):
            return
        self._num_preemptions[instance.instance_id] = num_preemptions
        for sequence in instance.engine.all_held():
            record = self.records[int(sequence.request.request_id)]
            if sequence.num_preemptions > record.num_preemptions:
                record.num_preemptions = sequence.num_preemptions
                record.preempted_s = now

    def on_taken_out(self, request_id: str, num_tokens: int, step_s: float) -> None:
        """The request left its source's batch; its next token ends the pause."""
        record = self.records[int(request_id)]
        if record.last_s >= 0:  # else it waits for its first token, wherever it is
            self._paused[int(request_id)] = (num_tokens, record.last_s, step_s)

    def on_moved(self, request_id: str) -> None:
        self.records[int(request_id)].num_moves += 1
