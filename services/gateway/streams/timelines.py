"""The timelines of this gateway's requests: what it saw itself and what schedulers and instances tell it, kept for a while
after a request's end. Its cost is a few microseconds an event, of which a request has about ten; tokens are none."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isfinite

from services.gateway.streams.stream import Stream
from shared.bus.interface import Bus, Subscription
from shared.messages.catalogue import ASK_GATEWAYS, GATEWAY_EVENTS, GATEWAY_TOLD
from shared.messages.console import Move
from shared.messages.requests import FinishReason, GenerationRequest, RequestClass
from shared.messages.timeline import (
    AskGateways,
    EventKind,
    ExplainSlo,
    FindTimeline,
    ListTimelines,
    Objective,
    RequestEvent,
    RequestEvents,
    SequenceTimeline,
    SloExplanation,
    TimelineEvent,
    ToldByGateway,
)
from shared.monitor.timeline import Course, SloBook, event_text, merged, objectives
from shared.runtime.tasks import set_within

SETTLE_S = 1.0
"""After a request's end, for what others still have to tell of it."""
CANCELLED = FinishReason.CANCELLED
ASK_TIMEOUT_S = 0.4
"""Time for other gateways to answer."""
KNOWN_S = 60.0
"""So long after it was last heard of a gateway is waited for."""
ASK_ALL_S = 10.0
"""So often those that are not known yet are given time to answer too."""

MAX_MOVES = 256
MOVES_SHOWN_S = 4.0
_OF_MOVES = (EventKind.MIGRATING, EventKind.MOVED, EventKind.MIGRATION_ABORTED)

Question = FindTimeline | ListTimelines | ExplainSlo


class _Timeline:
    __slots__ = (
        "are_default",
        "course",
        "ended_s",
        "http_request_id",
        "model",
        "num_output",
        "num_prompt",
        "request_class",
        "request_id",
        "settled",
        "state",
    )

    def __init__(self, request: GenerationRequest, http_request_id: str, of_model: tuple[float, float]) -> None:
        """`of_model`: objectives that its model names; 0: none."""
        self.are_default = (
            not (request.ttft_objective_s or of_model[0]),
            not (request.tpot_objective_s or of_model[1]),
        )
        self.request_id = request.request_id
        self.http_request_id = http_request_id
        self.model = request.public_model
        self.request_class: RequestClass = request.request_class
        self.num_prompt = len(request.prompt) // 4
        self.num_output = 0
        self.course = Course()
        self.state = ""
        """How it ended; empty: it has not."""
        self.ended_s = 0.0
        self.settled: list[Objective] | None = None
        """How far it met its objectives; None: others may still have something to tell of it."""

    @property
    def objectives(self) -> list[Objective]:
        """None while it runs."""
        if self.settled is not None or not self.state:
            return self.settled or []
        return objectives(self.course, self.ended_s, self.num_output, self.are_default)

    @property
    def has_missed(self) -> bool:
        return any(not objective.is_met for objective in self.objectives)


@dataclass
class _Move:
    source_id: str
    destination_id: str
    reason: str
    begun_s: float
    outcome: str = ""
    ended_s: float = 0.0


@dataclass
class _Answers:
    told: list[ToldByGateway]
    are_enough: asyncio.Event
    is_enough: Callable[[list[ToldByGateway]], bool]


class Timelines:
    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        max_ended: int,
        keep_s: float,
        objectives_ms: Callable[[str], tuple[float, float]],
    ) -> None:
        """`max_ended`, `keep_s`: how many requests that are over are kept, and for how long; 0: none has a timeline.
        `objectives_ms`: those that a model names, for the first token and for later ones; 0: none."""
        self._bus = bus
        self._gateway_id = gateway_id
        self._max_ended = max_ended
        self._keep_s = keep_s
        self._objectives_ms = objectives_ms
        self._open: dict[str, _Timeline] = {}
        self._streams: dict[str, Stream] = {}
        self._ended: OrderedDict[str, _Timeline] = OrderedDict()
        self._unjudged: deque[_Timeline] = deque()
        self._http_ids: OrderedDict[str, str] = OrderedDict()
        self._book = SloBook()
        self._subscriptions: list[Subscription] = []
        self._num_asked = 0
        self._asked_at = float("-inf")
        """Time at which all gateways were last given time to answer."""
        self._others: dict[str, float] = {}
        """Gateways that have asked or told something, and when they last did."""
        self._answers: dict[int, _Answers] = {}
        self._moves: OrderedDict[str, _Move] = OrderedDict()
        """The last of each request."""

    async def start(self) -> None:
        bus, ids = self._bus, {"gateway_id": self._gateway_id}
        self._subscriptions = [
            await bus.subscribe(GATEWAY_EVENTS.at(**ids), self._on_events),
            await bus.subscribe(ASK_GATEWAYS, self._on_asked),
            await bus.subscribe(GATEWAY_TOLD.at(**ids), self._on_told),
        ]

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()

    # -------------------------------------------------------------------------------------------- what happens

    def name(self, call_id: str, http_request_id: str) -> None:
        """By which its client knows the request besides."""
        self._http_ids[call_id] = http_request_id
        while len(self._http_ids) > self._max_ended:
            self._http_ids.popitem(last=False)

    def begin(self, stream: Stream, request: GenerationRequest, arrived_at: float) -> None:
        """Before it is placed."""
        if not self._max_ended:
            return
        request_id = request.request_id
        named, of_model = self._http_ids.get(call_of(request_id), ""), self._objectives_ms(request.model)
        timeline = _Timeline(request, named, of_model)
        self._open[request_id], self._streams[request_id] = timeline, stream
        self._note(timeline, EventKind.RECEIVED, arrived_at)
        self._note(timeline, EventKind.SUBMITTED, self._bus.now(), numbers=(timeline.num_prompt,))

    def lose(self, stream: Stream, owner: str | None, reason: str) -> None:
        """It is to be placed again."""
        if (timeline := self._open.get(stream.request_id)) is not None:
            numbers = (len(stream.tokens),)
            self._note(timeline, EventKind.LOST, self._bus.now(), reason, owner or "", numbers)

    def end(self, stream: Stream) -> None:
        """Nobody reads it any more."""
        timeline = self._open.pop(stream.request_id, None)
        if timeline is None:
            return
        del self._streams[stream.request_id]
        now = self._bus.now()
        self._see(timeline, stream)
        if stream.failure is not None:
            timeline.state = f"failed: {stream.failure.code}"
        else:
            timeline.state = stream.finish_reason or (FinishReason.STOP if stream.is_enough else CANCELLED)
        timeline.ended_s = self._unix_s(now)
        self._note(timeline, EventKind.ENDED, now, timeline.state)
        self._ended[timeline.request_id] = timeline
        self._unjudged.append(timeline)
        self._sweep()

    def _on_events(self, message: RequestEvents) -> None:
        for event in message.events:
            timeline = self._open.get(event.request_id) or self._ended.get(event.request_id)
            if timeline is not None:
                if (stream := self._streams.get(event.request_id)) is not None:
                    self._see(timeline, stream)
                    if event.kind is EventKind.BACKED_UP:
                        stream.holder = event.place
                timeline.course.add(message.sender, event)
                if event.kind in _OF_MOVES:
                    self._follow(message.sender, event)
        self._sweep()

    def _follow(self, teller: str, event: RequestEvent) -> None:
        if event.kind is EventKind.MIGRATING:
            self._moves[event.request_id] = _Move(teller, event.place, event.cause, event.at_s)
            while len(self._moves) > MAX_MOVES:
                self._moves.popitem(last=False)
        elif (move := self._moves.get(event.request_id)) is not None and not move.outcome:
            move.outcome = "moved" if event.kind is EventKind.MOVED else event.cause
            move.ended_s = event.at_s

    def moves(self) -> list[Move]:
        """Under way, or over for `MOVES_SHOWN_S` at most."""
        now, shown = time.time(), []
        for request_id, move in self._moves.items():
            is_open = request_id in self._open and not move.outcome
            ended_age_s = None if is_open else now - (move.ended_s or move.begun_s)
            if ended_age_s is None or ended_age_s < MOVES_SHOWN_S:
                place = move.source_id, move.destination_id
                shown.append(Move(request_id, *place, move.reason, now - move.begun_s, move.outcome, ended_age_s))
        return shown

    def _note(
        self,
        timeline: _Timeline,
        kind: EventKind,
        at: float,
        cause: str = "",
        place: str = "",
        numbers: tuple[float, ...] = (),
    ) -> None:
        event = RequestEvent(timeline.request_id, 0, kind, self._unix_s(at), cause, place, numbers)
        timeline.course.add(self._gateway_id, event)

    def _see(self, timeline: _Timeline, stream: Stream) -> None:
        """What the stream knows."""
        timeline.num_output = len(stream.tokens)
        if stream.first_token_at is not None and timeline.course.delivered_s is None:
            self._note(timeline, EventKind.DELIVERED, stream.first_token_at)

    def _unix_s(self, at: float) -> float:
        return time.time() - self._bus.now() + at

    def _sweep(self) -> None:
        unix_s = time.time()
        while self._unjudged and self._unjudged[0].ended_s <= unix_s - SETTLE_S:
            timeline = self._unjudged.popleft()
            timeline.settled = timeline.objectives
            # What was cut off by its client says nothing of how it would have been served.
            if timeline.state != CANCELLED:
                self._book.count(timeline.request_id, timeline.model, timeline.settled, timeline.ended_s)
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= self._max_ended and oldest.ended_s > unix_s - self._keep_s:
                break
            del self._ended[oldest.request_id]

    # ------------------------------------------------------------------------------------------------- answers

    def find(self, request_id: str) -> list[SequenceTimeline]:
        """The sequences of a request, by the id of its answer, of one of its sequences, or of its HTTP request."""
        self._sweep()
        if (timeline := self._open.get(request_id) or self._ended.get(request_id)) is not None:
            return [self._shown(timeline)]
        found = [
            self._shown(timeline)
            for timeline in (*self._ended.values(), *self._open.values())
            if request_id in (call_of(timeline.request_id), timeline.http_request_id)
        ]
        return sorted(found, key=lambda shown: shown.id)

    def latest(
        self, limit: int, model: str = "", is_missed: bool = False, is_open: bool = False
    ) -> list[SequenceTimeline]:
        """Without events, those that run first (of them online ones), then the last that ended. `is_missed`: those alone
        that missed an objective; `is_open`: that run."""
        self._sweep()

        def wanted() -> Iterator[SequenceTimeline]:
            running = sorted(self._open.values(), key=lambda timeline: timeline.request_class)
            for timelines in (reversed(running), () if is_open else reversed(self._ended.values())):
                for timeline in timelines:
                    if model and timeline.model != model:
                        continue
                    # Most have met theirs: nothing more is worked out of these.
                    if not is_missed or timeline.has_missed:
                        yield self._shown(timeline, is_whole=False)

        return list(islice(wanted(), limit))

    def explain(self, interval_s: float) -> SloExplanation:
        self._sweep()
        return SloExplanation(interval_s, self._book.explain(interval_s, time.time()))

    # ---------------------------------------------------------------------------------------- other gateways

    async def find_anywhere(self, request_id: str) -> list[SequenceTimeline]:
        """Finds as `find` does, here or at another gateway."""
        if found := self.find(request_id):
            return found
        told = await self._ask(FindTimeline(request_id), lambda answers: any(each.requests for each in answers))
        return next((each.requests for each in told if each.requests), [])

    async def list_everywhere(self, wanted: ListTimelines) -> list[SequenceTimeline]:
        """Lists what `latest` does, of all gateways."""
        found = self.latest(wanted.limit, wanted.model, wanted.is_missed, wanted.is_open)
        for each in await self._ask_known(wanted):
            found += each.requests
        found.sort(key=_place)
        return found[: wanted.limit]

    async def explain_everywhere(self, interval_s: float) -> SloExplanation:
        """Explains as `explain` does, over all gateways."""
        told = await self._ask_known(ExplainSlo(interval_s))
        own = self.explain(interval_s).objectives
        return SloExplanation(interval_s, merged([own, *(each.objectives for each in told)]))

    async def _ask_known(self, question: ListTimelines | ExplainSlo) -> list[ToldByGateway]:
        since = self._bus.now() - KNOWN_S
        self._others = {gateway_id: heard_at for gateway_id, heard_at in self._others.items() if heard_at > since}
        known = set(self._others)
        is_due = self._bus.now() - self._asked_at >= ASK_ALL_S
        if not known and not is_due:
            return []
        if is_due:
            self._asked_at = self._bus.now()
        return await self._ask(question, lambda answers: not is_due and {each.gateway_id for each in answers} >= known)

    async def _ask(self, question: Question, is_enough: Callable[[list[ToldByGateway]], bool]) -> list[ToldByGateway]:
        """What the others answer within `ASK_TIMEOUT_S`, or until it is enough."""
        self._num_asked += 1
        number = self._num_asked
        answers = self._answers[number] = _Answers([], asyncio.Event(), is_enough)
        try:
            self._bus.publish(ASK_GATEWAYS, AskGateways(self._gateway_id, number, question))
            await set_within(answers.are_enough, ASK_TIMEOUT_S)
        finally:
            del self._answers[number]
        return answers.told

    def _on_asked(self, asked: AskGateways) -> None:
        if asked.asker_id == self._gateway_id:
            return
        self._others[asked.asker_id] = self._bus.now()
        told = ToldByGateway(self._gateway_id, asked.number)
        match asked.question:
            case FindTimeline(request_id):
                told.requests.extend(self.find(request_id))
            case ListTimelines(limit, model, is_missed, is_open):
                told.requests.extend(self.latest(limit, model, is_missed, is_open))
            case ExplainSlo(interval_s):
                told.objectives.extend(self.explain(interval_s).objectives)
        self._bus.publish(GATEWAY_TOLD.at(gateway_id=asked.asker_id), told)

    def _on_told(self, told: ToldByGateway) -> None:
        self._others[told.gateway_id] = self._bus.now()
        if (answers := self._answers.get(told.number)) is not None:
            answers.told.append(told)
            if answers.is_enough(answers.told):
                answers.are_enough.set()

    def events_of(self, request_id: str) -> list[RequestEvent]:
        """Events that this gateway saw itself, with Unix times."""
        timeline = self._open.get(request_id) or self._ended.get(request_id)
        told = [] if timeline is None else timeline.course.told
        return [event for teller, event in told if teller == self._gateway_id]

    def _shown(self, timeline: _Timeline, *, is_whole: bool = True) -> SequenceTimeline:
        if (stream := self._streams.get(timeline.request_id)) is not None:
            self._see(timeline, stream)
        course, is_over = timeline.course, bool(timeline.state)
        until_s = timeline.ended_s if is_over else time.time()
        arrived_s = course.told[0][1].at_s
        phases, _ = course.phases(until_s)
        where = next((phase.where for phase in reversed(phases) if phase.where), "")
        if stream is not None and stream.owner:
            where = stream.owner
        shown = SequenceTimeline(
            id=timeline.request_id,
            request_id=call_of(timeline.request_id),
            http_request_id=timeline.http_request_id,
            model=timeline.model,
            request_class=timeline.request_class,
            gateway_id=self._gateway_id,
            state=timeline.state if is_over else (phases[-1].phase if phases else ""),
            is_over=is_over,
            arrived_s=arrived_s,
            duration_s=max(0.0, until_s - arrived_s),
            ttft_s=None if course.delivered_s is None else course.delivered_s - arrived_s,
            prompt_tokens=timeline.num_prompt,
            output_tokens=timeline.num_output,
            instance_id=where,
            num_preemptions=course.count(EventKind.PREEMPTED),
            num_moves=course.count(EventKind.MOVED),
            num_losses=course.count(EventKind.LOST),
            objectives=timeline.objectives,
            num_left_out=course.num_left_out,
        )
        if is_whole:
            shown.phases = phases
            shown.events = [
                TimelineEvent(
                    kind=event.kind,
                    after_s=max(0.0, event.at_s - arrived_s),
                    teller=teller,
                    text=event_text(event, timeline.num_prompt),
                    cause=event.cause,
                    place=event.place,
                    numbers=tuple(number for number in event.numbers if isfinite(number)),
                )
                for teller, event in course.told
            ]
        return shown


def _place(shown: SequenceTimeline) -> tuple[bool, bool, float]:
    """In a list: running ones first, and of them online ones; the newest first."""
    is_offline = shown.request_class is RequestClass.OFFLINE
    return shown.is_over, is_offline and not shown.is_over, -shown.arrived_s - shown.is_over * shown.duration_s


def call_of(sequence_id: str) -> str:
    """The id of the answer that a sequence belongs to."""
    return sequence_id.rpartition("-")[0]
