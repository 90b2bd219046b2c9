"""Those who ask, in virtual time: the requests of a run, their streams (the live gateway's state), and what each user saw.

A request whose owner is lost is placed again with the tokens that came, in the next placement's epochs; a scheduler that is
new is told of every request that has not ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
import numpy as np

from shared.engine.requests import Ended
from shared.messages.cluster import InstanceExited
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    RequestsLost,
    SamplingParams,
    TokenEntry,
)
from shared.simulation.itl import ItlHistogram
from shared.streams import Loss, Outcome, StreamState

NAME = "gateway"
MODEL = "model"
TOKEN, LAST_TOKEN = 5, 2
"""Sampled for a request of no text but at its end, and there."""
OWN, FIRST_TEXT = 7, 16
"""Token ids of prompts: of what is a request's own, and of text 0."""


class RunFailed(Exception):
    """A request did not get its output, or got a wrong one."""


class Job(msgspec.Struct, frozen=True):
    """A request as a user makes it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_high: bool = False
    model: str = MODEL
    max_tokens: int = 0
    """Most tokens that it asks for, more than it gets: the length of its answer is nobody's knowledge, it ends with a
    token. 0: it asks for what it gets."""
    is_open_ended: bool = False
    """It asks for what fits, which `max_tokens` is: see `GenerationRequest`."""
    request_class: RequestClass = RequestClass.ONLINE
    texts: tuple[tuple[int, int], ...] = ()
    """(text, tokens of it) that the prompt begins with; what is left of it is the request's own. Prompts that begin alike
    share their KV blocks. Where nothing is left, the answer goes on with the last text, so that the next prompt of a
    conversation finds the answer in the cache too."""
    timeout_s: float = 1e6
    tenant: str = ""
    tenant_weight: float = 1.0


def prompt_of(job: Job, number: int) -> np.ndarray:
    """Token ids, int32."""
    prompt = np.full(job.prompt_tokens, OWN, np.int32)
    ends = [0, *accumulate(tokens for _, tokens in job.texts)]
    for (text, _), start, end in zip(job.texts, ends, ends[1:], strict=False):
        prompt[start:end] = FIRST_TEXT + text
    if ends[-1] < job.prompt_tokens:
        prompt[ends[-1]] = number  # no prefix is another's
    return prompt


class Record(msgspec.Struct, kw_only=True):
    """One request, as its user saw it. Seconds of the run; below 0: has not happened."""

    arrival_s: float
    is_high: bool
    prompt_tokens: int
    output_tokens: int
    """Output tokens that it is to get."""
    first_s: float = -1.0
    last_s: float = -1.0
    num_tokens: int = 0
    """Output tokens that it has got."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    preempted_s: float = -1.0
    """Since when it lacks what a preemption took; -1: it does not."""
    loss_s: float = 0.0
    """Time from each preemption to the next token."""
    recomputed_tokens: int = 0
    num_migrations: int = 0
    num_placements: int = 0
    longest_gap_s: float = 0.0
    """Between two of its tokens."""
    planned_s: float = -1.0
    """First part of a step, on its last instance."""
    ended_s: float = -1.0
    error: str = ""

    @property
    def start_s(self) -> float:
        """Time from arrival to the first step with a part of it."""
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


class Gateway:
    def __init__(
        self,
        now: Callable[[], float],
        after: Callable[..., None],
        submit: Callable[[GenerationRequest], None],
    ) -> None:
        """`after(delay_s, call, *arguments)` calls later."""
        self.jobs: list[Job] = []
        self.records: list[Record] = []
        self.num_left = 0
        """Requests that have not ended."""
        self.is_strict = True
        """A request that ends with an error ends the run."""
        self.has_priorities = True
        """Else all requests are sent as normal ones."""
        self.pauses: list[tuple[int, float, float]] = []
        """Pauses of moves of running requests: the request's tokens, the pause it saw (from its last token at the
        source to its first at the destination), and the source's step time then."""
        self.itl: dict[tuple[str, RequestClass, bool], ItlHistogram] = {}
        """By model, class and whether the request is of high priority."""
        self.itl_of_s = (-math.inf, math.inf)
        """Gaps count of requests that arrive within these times."""
        self._now, self._after, self._submit = now, after, submit
        self._then: dict[int, Callable[[int], None]] = {}
        self._streams: list[StreamState] = []
        self._itl: list[ItlHistogram] = []
        """The histogram of `itl` in which each request's gaps count."""
        self._sent: list[GenerationRequest] = []
        self._paused: dict[int, tuple[int, float, float]] = {}
        self._num_preemptions: dict[str, int] = {}

    def expect(self, job: Job, then: Callable[[int], None] | None = None) -> int:
        """A request that will come. Returns its number; `then` is called with it when the request is over."""
        self.jobs.append(job)
        record = Record(
            arrival_s=job.at_s, is_high=job.is_high, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens
        )
        self.records.append(record)
        number = len(self.jobs) - 1
        if then is not None:
            self._then[number] = then
        sampling = SamplingParams(
            max_tokens=job.max_tokens or job.output_tokens, temperature=0.0, seed=number,
            stop_token_ids=(LAST_TOKEN,) if job.max_tokens else (),
        )  # fmt: skip
        is_high = job.is_high and self.has_priorities
        self._sent.append(
            GenerationRequest(
                request_id=str(number), gateway_id=NAME, model=job.model, prompt=b"", sampling=sampling,
                request_class=job.request_class, timeout_s=job.timeout_s,
                priority=Priority.HIGH if is_high else Priority.NORMAL, is_open_ended=job.is_open_ended,
                tenant=job.tenant, tenant_weight=job.tenant_weight, prefix_salt=job.tenant,
            )
        )  # fmt: skip
        self._streams.append(StreamState(str(number), sampling))
        since_s, until_s = self.itl_of_s
        is_counted = since_s <= job.at_s < until_s
        key = (job.model, job.request_class, job.is_high)
        self._itl.append(self.itl.setdefault(key, ItlHistogram()) if is_counted else ItlHistogram())
        self.num_left += 1
        return number

    def itl_of(
        self, request_class: RequestClass = RequestClass.ONLINE, *, model: str = "", is_high: bool | None = None
    ) -> ItlHistogram:
        """Gaps of requests of a class so far; `model`: "" for all of them; `is_high`: None for both priorities."""
        return ItlHistogram.merged(
            one
            for (name, known_class, priority), one in self.itl.items()
            if known_class is request_class and model in ("", name) and is_high in (None, priority)
        )

    def answer_of(self, number: int) -> tuple[int, int]:
        """What a model says to a request: the tokens of prompt and answer together, and each token but the last."""
        job = self.jobs[number]
        goes_on = job.texts and sum(tokens for _, tokens in job.texts) >= job.prompt_tokens
        return job.prompt_tokens + job.output_tokens, FIRST_TEXT + job.texts[-1][0] if goes_on else TOKEN

    # ------------------------------------------------------------------------------------------------ placing

    def send(self, number: int) -> None:
        """Sends a request to the scheduler, in whatever state the request's stream is."""
        now, job, stream, record = self._now(), self.jobs[number], self._streams[number], self.records[number]
        if not record.num_placements:
            record.num_placements = 1
            prompt = prompt_of(job, number).tobytes()
            self._sent[number] = request = msgspec.structs.replace(self._sent[number], prompt=prompt)
        else:
            first_s = record.first_s if record.first_s >= 0 else None
            request = stream.placed_again(self._sent[number], record.arrival_s, first_s, now)
        self._submit(request)

    def open_streams(self) -> Iterable[int]:
        """Requests that were sent and have not ended."""
        return [
            number
            for number, stream in enumerate(self._streams)
            if self.records[number].num_placements and stream.finish_reason is None
        ]

    def on_lost(self, message: RequestsLost) -> None:
        for lost in message.requests:
            self._lose(int(lost.request_id), lost.epoch)

    def on_gone(self, instance_id: str) -> None:
        """Its entry in the registry has expired: what still streamed from there is placed again, even if the scheduler does
        not know of it because it took over meanwhile."""
        for number in self.open_streams():
            if self._streams[number].owner == instance_id:
                self._lose(number, self._streams[number].epoch)

    def on_exited(self, exited: InstanceExited) -> None:
        """An instance has died, as its node says."""
        for request_id in exited.suspects:
            number = int(request_id)
            if (error := self._streams[number].suspect()) is not None:
                self._streams[number].finish_reason = FinishReason.ERROR
                self._end(number, FinishReason.ERROR, error.message)

    def on_refused(self, request_id: str, error: str) -> None:
        self._end(int(request_id), FinishReason.ERROR, error)

    def _send_paused(self, number: int, epoch: int) -> None:
        stream = self._streams[number]
        if stream.finish_reason is None and stream.epoch == epoch:
            self.send(number)

    def _lose(self, number: int, epoch: int) -> None:
        stream = self._streams[number]
        match stream.lose(epoch):
            case Loss.PLACE:
                self.records[number].num_placements += 1
                if stream.pause_s:
                    self._after(stream.pause_s, self._send_paused, number, stream.epoch)
                else:
                    self.send(number)
            case Loss.COMPLETE if stream.finish_reason is not None:
                self._end(number, stream.finish_reason)

    # ------------------------------------------------------------------------------------------------- tokens

    def on_entries(self, entries: list[TokenEntry], sender: str | None) -> None:
        now, streams, records = self._now(), self._streams, self.records
        for entry in entries:
            number = int(entry.request_id)
            stream = streams[number]
            goes_on = stream.extend(entry, sender)
            if not goes_on and (outcome := stream.accept(entry, sender)) is not Outcome.NEWS:
                if outcome is Outcome.GIVEN_UP:
                    self._lose(number, entry.epoch)
                elif outcome is Outcome.GAP:
                    raise RunFailed(f"request {number}: tokens before {entry.offset} are missing")
                continue
            if tokens := entry.tokens:
                record = records[number]
                if entry.offset != record.num_tokens:
                    raise RunFailed(f"request {number}: tokens at {entry.offset}, {record.num_tokens} were expected")
                record.num_tokens += len(tokens) // 4
                if record.first_s < 0:
                    record.first_s, record.num_cached_tokens = now, entry.num_cached_tokens
                else:
                    gap_s = now - record.last_s
                    self._itl[number].add(gap_s)
                    if gap_s > record.longest_gap_s:
                        record.longest_gap_s = gap_s
                if record.preempted_s >= 0:
                    record.loss_s += now - record.preempted_s
                    record.preempted_s = -1.0
                record.last_s = now
                if self._paused and (pause := self._paused.pop(number, None)) is not None:
                    self.pauses.append((pause[0], now - pause[1], pause[2]))
            if not goes_on and stream.finish_reason is not None:
                self._end(number, stream.finish_reason, entry.error.message if entry.error else "")

    def _end(self, number: int, reason: FinishReason, error: str = "") -> None:
        job, record = self.jobs[number], self.records[number]
        if record.ended_s >= 0:
            raise RunFailed(f"request {number} ended twice")
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            record.error = f"{reason}: {error}"
            if self.is_strict:
                raise RunFailed(f"request {number} ended with {record.error}")
        elif record.num_tokens != job.output_tokens:
            record.error = f"{reason}: {record.num_tokens} of {job.output_tokens} tokens"
            # Where what serves it has less room than it had when it came, it may be cut.
            if self.is_strict or reason is not FinishReason.LENGTH:
                raise RunFailed(f"request {number} ended with {record.error}")
        record.ended_s = self._now()
        self.num_left -= 1
        if (then := self._then.pop(number, None)) is not None:
            then(number)

    # ------------------------------------------------------------------------------- what an instance has seen

    def on_finished(self, ended: Ended) -> None:
        record = self.records[int(ended.request.request_id)]
        if ended.first_planned_s is not None:
            record.planned_s = ended.first_planned_s
        record.num_preemptions = ended.num_preemptions
        record.recomputed_tokens = ended.recomputed_tokens

    def on_preempted(self, request_id: str, num_preemptions: int) -> None:
        """`num_preemptions`: of the request, so far."""
        record = self.records[int(request_id)]
        if num_preemptions > record.num_preemptions:
            record.num_preemptions, record.preempted_s = num_preemptions, self._now()

    def on_detached(self, request_id: str, num_tokens: int, step_s: float) -> None:
        """The request left its source's batch; its next token ends the pause."""
        record = self.records[int(request_id)]
        if record.last_s >= 0:  # else it waits for its first token, wherever it is
            self._paused[int(request_id)] = (num_tokens, record.last_s, step_s)

    def on_moved(self, request_id: str) -> None:
        self.records[int(request_id)].num_migrations += 1
