"""Timeline of a request: from the events that it met with, the phase that it was in at each moment.

The phases follow each other without gaps, from the request's arrival at its gateway on, so those before the first token make
up the time to first token, and those after it the rest, whatever is missing among the events or told late. Times are Unix
times; those of other machines are as right as their clocks.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from shared.messages.timeline import (
    MAX_SLO_INTERVAL_S,
    EventKind,
    MissedObjective,
    Objective,
    Part,
    Phase,
    RequestEvent,
    TimelinePhase,
)

Told = tuple[str, RequestEvent]
"""Who tells it, and what."""

_PHASES = {
    EventKind.RECEIVED: Phase.GATEWAY,
    EventKind.SUBMITTED: Phase.QUEUE,
    EventKind.QUEUED: Phase.QUEUE,
    EventKind.DISPATCHED: Phase.DISPATCH,
    EventKind.REFUSED: Phase.QUEUE,
    EventKind.ARRIVED: Phase.INSTANCE_QUEUE,
    EventKind.PREEMPTED: Phase.PREEMPTED,
    EventKind.RESTORING: Phase.RESTORE,
    EventKind.SUSPENDED: Phase.SUSPENDED,
    EventKind.DETACHED: Phase.MOVE,
    EventKind.LOST: Phase.RESCUE,
}
"""Phase that each event begins, whatever was before."""
OBJECTIVES = {"ttft": "time to first token", "tpot": "time per output token"}
NUM_EXAMPLES = 5
"""Examples of requests that missed an objective."""

_TOKENS = (EventKind.FIRST_TOKEN, EventKind.DECODE_RESUMED)


class Times(defaultdict[Phase, float]):
    """Seconds in each phase."""

    def __init__(self, times: Mapping[Phase, float] = MappingProxyType({})) -> None:
        super().__init__(float, times)


class _Machine:
    """The phase after each event."""

    def __init__(self) -> None:
        self.phase = Phase.GATEWAY
        self.where = ""
        self._is_delivered = False
        self._is_lost = False
        """Until the next token all is part of the rescue."""
        self._was_preempted = False
        self._before: Phase | None = None
        """A suspension, or a move."""

    def feed(self, teller: str, event: RequestEvent) -> None:
        kind = event.kind
        if kind is EventKind.DISPATCHED:
            self.where = event.place
        elif kind in (EventKind.ARRIVED, EventKind.ADMITTED, EventKind.MOVED):
            self.where = teller
        if kind is EventKind.LOST:
            self._is_lost = True
        elif kind is EventKind.DELIVERED:
            self._is_delivered = True
            if self.phase is Phase.DELIVERY:
                self.phase = Phase.DECODE
        elif kind in _TOKENS:
            self._is_lost = self._was_preempted = False
            self.phase = Phase.DECODE if self._is_delivered else Phase.DELIVERY
            return
        if self._is_lost:
            self.phase = Phase.RESCUE
            return
        if kind in (EventKind.SUSPENDED, EventKind.DETACHED) and self.phase not in (Phase.SUSPENDED, Phase.MOVE):
            self._before = self.phase
        if kind is EventKind.PREEMPTED:
            self._was_preempted = True
        if kind is EventKind.ADMITTED and self.phase is not Phase.MOVE:
            self.phase = Phase.RECOMPUTE if self._was_preempted else Phase.PREFILL
        elif kind is EventKind.RESUMED and self.phase is Phase.SUSPENDED:
            self.phase = self._before or Phase.PREFILL
        elif kind is EventKind.MIGRATION_ABORTED and self.phase is Phase.MOVE:
            self.phase = self._before or Phase.DECODE
        elif kind is EventKind.MOVED and event.numbers[:1] == (0.0,):
            # It came without KV, and waits.
            self.phase = Phase.PREEMPTED if self._was_preempted else Phase.INSTANCE_QUEUE
        elif kind is EventKind.ENDED and teller == self.where:
            self.phase = Phase.DELIVERY
        elif kind in _PHASES:
            self.phase = _PHASES[kind]


class Spent(NamedTuple):
    """Seconds in each phase: until the first token was at the gateway, and from then on."""

    first: Times
    later: Times


class Course:
    """The events of one sequence, in the order of their times. Bounded: of very many those in the middle are left out, when
    they are old, and what they say of phases stays."""

    def __init__(self, max_events: int = 64) -> None:
        assert max_events >= 8
        self._max_events = max_events
        self.told: list[Told] = []
        self.num_left_out = 0
        self._spent = Spent(Times(), Times())
        """Time spent in what was left out, and before it; `_machine` is as it was then."""
        self._machine = _Machine()
        self._num_settled = 0
        """Leading events that are in the two."""
        self._settled_s = 0.0
        self._delivered_s: float | None = None

    def add(self, teller: str, event: RequestEvent) -> None:
        """Adds an event of any time, but not long ago. The first is the request's arrival, and stays so: another's clock
        may be behind."""
        if event.kind is EventKind.DELIVERED:
            self._delivered_s = event.at_s
        insort(self.told, (teller, event), lo=max(1, self._num_settled), key=lambda told: told[1].at_s)
        if len(self.told) > self._max_events:
            self._leave_out()

    @property
    def delivered_s(self) -> float | None:
        """Time at which its first token came."""
        return self._delivered_s

    def _leave_out(self) -> None:
        head, half = self._max_events // 4, self._max_events // 2
        for told in self.told[self._num_settled : half]:
            self._settle(told)
        self.num_left_out += half - head
        del self.told[head:half]
        self._num_settled = head

    def _settle(self, told: Told) -> None:
        at_s = max(told[1].at_s, self._settled_s)
        if self._settled_s:
            self._spend(self._spent, self._machine.phase, self._settled_s, at_s)
        self._settled_s = at_s
        self._machine.feed(*told)

    def _spend(self, spent: Spent, phase: Phase, begin_s: float, end_s: float) -> None:
        limit_s = end_s if self._delivered_s is None else min(max(self._delivered_s, begin_s), end_s)
        if limit_s > begin_s:
            spent.first[phase] += limit_s - begin_s
        if end_s > limit_s:
            spent.later[phase] += end_s - limit_s

    def phases(self, until_s: float) -> tuple[list[TimelinePhase], Spent]:
        """Up to `until_s`. The list begins after what was left out; the sums are of all."""
        spent = Spent(Times(self._spent.first), Times(self._spent.later))
        machine = copy(self._machine)
        arrived_s = self.told[0][1].at_s
        begin_s = self._settled_s or arrived_s
        stretches: list[TimelinePhase] = []

        def stretch(phase: Phase, where: str, end_s: float) -> None:
            if end_s <= begin_s:
                return
            self._spend(spent, phase, begin_s, end_s)
            last = stretches[-1] if stretches else None
            if last is not None and (last.phase, last.where) == (phase, where):
                stretches[-1] = TimelinePhase(phase, last.begin_s, end_s - arrived_s, where)
            else:
                stretches.append(TimelinePhase(phase, begin_s - arrived_s, end_s - arrived_s, where))

        for teller, event in self.told[self._num_settled :]:
            at_s = min(event.at_s, until_s)
            stretch(machine.phase, machine.where, at_s)
            begin_s = max(begin_s, at_s)
            machine.feed(teller, event)
        stretch(machine.phase, machine.where, until_s)
        return stretches, spent

    def last(self, *kinds: EventKind) -> RequestEvent | None:
        return next((event for _, event in reversed(self.told) if event.kind in kinds), None)

    def count(self, kind: EventKind) -> int:
        """How many of the kept events are of this kind."""
        return sum(event.kind is kind for _, event in self.told)


def objectives(
    course: Course, ended_s: float, num_output: int, are_default: tuple[bool, bool] = (False, False)
) -> list[Objective]:
    """How far a request that is over met its objectives, and where its time went. `are_default`: of the first token, and of
    later ones, whether neither it nor its model names an objective."""
    _, spent = course.phases(ended_s)
    arrived_s, first_s = course.told[0][1].at_s, course.delivered_s
    arrived = course.last(EventKind.ARRIVED)
    ttft_objective_s, tpot_objective_s, *_ = (*(arrived.numbers if arrived is not None else ()), 0.0, 0.0)
    _split_execution(course, spent)
    found = []
    ttft_s = (ended_s if first_s is None else first_s) - arrived_s
    # One that ended early without a token, cancelled say, tells nothing.
    if ttft_objective_s > 0 and (first_s is not None or ttft_s > ttft_objective_s):
        found.append(_objective("ttft", ttft_objective_s, ttft_s, spent.first, 1, are_default[0]))
    if tpot_objective_s > 0 and first_s is not None and num_output > 1:
        later_s, num_later = ended_s - first_s, num_output - 1
        found.append(_objective("tpot", tpot_objective_s, later_s, spent.later, num_later, are_default[1]))
    return found


def _split_execution(course: Course, spent: Spent) -> None:
    """Splits the time in steps into the request's own part, as it was charged, and that of others."""
    first = course.last(EventKind.FIRST_TOKEN)
    end = next((event for _, event in course.told if event.kind is EventKind.ENDED and event.numbers), None)
    if first is None or not first.numbers:
        return
    own_first_s = first.numbers[0]
    _split(spent.first, Phase.PREFILL, Phase.PREFILL_WAIT, own_first_s)
    if end is not None:
        _split(spent.later, Phase.DECODE, Phase.DECODE_WAIT, end.numbers[0] - own_first_s)


def _split(spent: Times, own: Phase, others: Phase, own_s: float) -> None:
    if (total_s := spent[own]) > 0:
        spent[own] = min(max(0.0, own_s), total_s)
        spent[others] = total_s - spent[own]


def _objective(name: str, objective_s: float, total_s: float, spent: Times, number: int, is_default: bool) -> Objective:
    parts = parts_of(spent)
    measured_s = total_s / number
    is_met = measured_s <= objective_s
    verdict = "met" if is_met else f"missed by {seconds(measured_s - objective_s)}"
    of = f"{seconds(objective_s)}{' (default)' if is_default else ''}"
    text = f"{OBJECTIVES[name]} {seconds(measured_s)}, objective {of}: {verdict}"
    if not is_met:
        text += f"; {words(parts)}"
    return Objective(
        name=name, objective_s=objective_s, measured_s=measured_s, is_met=is_met, parts=parts, text=text,
        is_default=is_default,
    )  # fmt: skip


def parts_of(spent: Times, divisor: float = 1.0) -> list[Part]:
    """The largest first."""
    parts = [Part(phase, of_phase_s / divisor) for phase, of_phase_s in spent.items() if of_phase_s > 0]
    return sorted(parts, key=lambda part: -part.seconds)


def total(parts: Iterable[Part]) -> float:
    """Seconds."""
    return sum(part.seconds for part in parts)


def words(parts: Sequence[Part]) -> str:
    total_s = total(parts)
    shown = [part for part in parts if part.seconds >= 0.005 * total_s]
    return ", ".join(f"{part.phase} {seconds(part.seconds)} ({part.seconds / total_s:.0%})" for part in shown)


def seconds(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _counted(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}" if round(number) == 1 else f"{number:.0f} {noun}s"


def event_text(event: RequestEvent, prompt_tokens: int) -> str:
    """One line for whoever reads a timeline."""
    numbers, cause, place = event.numbers, event.cause, event.place
    number = numbers[0] if numbers else 0.0
    second = numbers[1] if len(numbers) > 1 else 0.0
    match event.kind:
        case EventKind.SUBMITTED:
            return f"{_counted(prompt_tokens, 'prompt token')}, sent to the scheduler"
        case EventKind.QUEUED:
            return f"{number:.0f} ahead in the queue: {cause}"
        case EventKind.DISPATCHED:
            free = "idle" if number == float("inf") else f"freeness {number:.1f}"
            return f"to {place}: {cause} ({free}; {_counted(second, 'instance')} for the model)"
        case EventKind.REFUSED:
            return f"by {place}: {cause}"
        case EventKind.ARRIVED:
            return f"{numbers[2]:.0f} of its model wait before it" if len(numbers) > 2 else ""
        case EventKind.ADMITTED:
            return f"{_counted(second, 'token')} to compute, {number:.0f} cached"
        case EventKind.PREEMPTED:
            what = {"memory": "others need its memory", "rows": "others need its row", "failure": "its step failed"}
            kept = f", {second:.0f} of them with a checkpoint" if second else ""
            return f"{what.get(cause, cause)}; computed {_counted(number, 'token')} so far{kept}"
        case EventKind.RESTORING:
            return f"{_counted(number, 'KV block')} from host memory"
        case EventKind.SUSPENDED:
            return "its step stopped between two layers, for an online request"
        case EventKind.RESUMED:
            return "its step is computed again" if cause == "discarded" else ""
        case EventKind.FIRST_TOKEN | EventKind.DECODE_RESUMED:
            return f"{seconds(number)} of execution so far" if number else ""
        case EventKind.MIGRATING:
            return f"its KV is copied to {place} while it decodes: {cause}"
        case EventKind.DETACHED:
            return "pauses until the other instance has it"
        case EventKind.MOVED:
            return (
                f"from {place}, with the KV of {_counted(number, 'token')}" if number else f"from {place}, without KV"
            )
        case EventKind.MIGRATION_ABORTED:
            return f"did not move to {place}: {cause}"
        case EventKind.BACKED_UP:
            return f"{place} keeps copies of its KV"
        case EventKind.LOST:
            return (
                f"{place or 'its instance'} no longer has it ({cause}), after {_counted(number, 'token')}; placed again"
            )
        case EventKind.ENDED:
            return f"{cause}; {_counted(second, 'token')}" if numbers else cause
        case _:
            return cause


class _Sums:
    """Sums of one model and objective."""

    __slots__ = ("examples", "measured_s", "num_default", "num_judged", "num_missed", "objective_s", "spent")

    def __init__(self) -> None:
        self.num_judged = self.num_missed = self.num_default = 0
        self.measured_s = self.objective_s = 0.0
        self.spent: Times = Times()
        self.examples: list[str] = []

    def add(self, other: MissedObjective) -> None:
        num = other.num_missed
        self.num_judged += other.num_judged
        self.num_missed += num
        self.num_default += other.num_default
        self.measured_s += num * other.measured_s
        self.objective_s += other.num_judged * other.objective_s
        for part in other.parts:
            self.spent[part.phase] += num * part.seconds
        self.examples = (self.examples + other.examples)[-NUM_EXAMPLES:]

    def told(self, model: str, name: str) -> MissedObjective:
        num = max(1, self.num_missed)
        return MissedObjective(
            model=model,
            name=name,
            num_judged=self.num_judged,
            num_missed=self.num_missed,
            measured_s=self.measured_s / num,
            objective_s=self.objective_s / max(1, self.num_judged),
            parts=parts_of(self.spent, num),
            examples=self.examples,
            num_default=self.num_default,
        )


def merged(explained: Iterable[Iterable[MissedObjective]]) -> list[MissedObjective]:
    """What several gateways, or several times, say."""
    found: defaultdict[tuple[str, str], _Sums] = defaultdict(_Sums)
    for one in chain.from_iterable(explained):
        found[one.model, one.name].add(one)
    return [sums.told(*key) for key, sums in sorted(found.items())]


class SloBook:
    """What requests that ended lately spent their time on, where they missed an objective: sums in slots of time."""

    def __init__(self, slot_s: float = 10.0, num_slots: int = MAX_SLO_INTERVAL_S // 10) -> None:
        self.slot_s = slot_s
        self._num_slots = num_slots
        self._slots: dict[int, defaultdict[tuple[str, str], _Sums]] = {}

    def count(self, request_id: str, model: str, judged: Iterable[Objective], now: float) -> None:
        """A request that has ended, at any time not long ago."""
        number = int(now // self.slot_s)
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = defaultdict(_Sums)
            for old in [other for other in self._slots if other <= number - self._num_slots]:
                del self._slots[old]
        for objective in judged:
            is_missed = not objective.is_met
            slot[model, objective.name].add(
                MissedObjective(
                    model=model,
                    name=objective.name,
                    num_judged=1,
                    num_missed=int(is_missed),
                    measured_s=objective.measured_s,
                    objective_s=objective.objective_s,
                    parts=objective.parts,
                    examples=[request_id] if is_missed else [],
                    num_default=int(objective.is_default),
                )
            )

    def explain(self, interval_s: float, now: float) -> list[MissedObjective]:
        """Explains the slots that the last `interval_s` touch."""
        first = int((now - interval_s) // self.slot_s)
        slots = [slot for number, slot in sorted(self._slots.items()) if number >= first]
        return merged([sums.told(*key) for key, sums in slot.items()] for slot in slots)
