"""Timelines of requests: phases follow each other without gaps, whatever is told, and in whichever order."""

from __future__ import annotations

import itertools
from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from shared.messages.timeline import EventKind, Objective, Part, Phase, RequestEvent
from shared.monitor.timeline import Course, SloBook, event_text, merged, objectives, total, words

START_S = 1_700_000_000.0
GATEWAY, SCHEDULER, FIRST, SECOND = "gateway-0", "scheduler-0", "node-0", "node-1"


def event(kind: EventKind, after_s: float, cause: str = "", place: str = "", *numbers: float) -> RequestEvent:
    return RequestEvent("r-0", 0, kind, START_S + after_s, cause, place, numbers)


def course_of(*told: tuple[str, RequestEvent]) -> Course:
    course = Course()
    for teller, one in told:
        course.add(teller, one)
    return course


LATE = (
    (GATEWAY, event(EventKind.RECEIVED, 0.0)),
    (GATEWAY, event(EventKind.SUBMITTED, 0.1, "", "", 50.0)),
    (SCHEDULER, event(EventKind.QUEUED, 0.1, "no instance serves the model", "", 7.0)),
    (SCHEDULER, event(EventKind.DISPATCHED, 1.1, "the freest", FIRST, 3.0, 2.0)),
    (FIRST, event(EventKind.ARRIVED, 1.2, "", "", 1.5, 0.1, 2.0)),
    (FIRST, event(EventKind.ADMITTED, 1.5, "", "", 0.0, 50.0)),
    (FIRST, event(EventKind.PREEMPTED, 1.7, "memory", "", 32.0, 16.0)),
    (FIRST, event(EventKind.RESTORING, 2.0, "", "", 1.0)),
    (FIRST, event(EventKind.RESTORED, 2.1)),
    (FIRST, event(EventKind.ADMITTED, 2.2, "", "", 16.0, 34.0)),
    (FIRST, event(EventKind.FIRST_TOKEN, 2.5, "", "", 0.15)),
    (GATEWAY, event(EventKind.DELIVERED, 2.51)),
    (FIRST, event(EventKind.MIGRATING, 2.8, "balance", SECOND)),
    (FIRST, event(EventKind.DETACHED, 3.0)),
    (SECOND, event(EventKind.MOVED, 3.1, "", FIRST, 60.0)),
    (SECOND, event(EventKind.ADMITTED, 3.15, "", "", 60.0, 1.0)),
    (SECOND, event(EventKind.DECODE_RESUMED, 3.2, "", "", 0.3)),
    (GATEWAY, event(EventKind.LOST, 4.0, "exited", SECOND, 20.0)),
    (SCHEDULER, event(EventKind.DISPATCHED, 4.1, "the freest", FIRST, 3.0, 1.0)),
    (FIRST, event(EventKind.ARRIVED, 4.2, "", "", 1.5, 0.1, 0.0)),
    (FIRST, event(EventKind.ADMITTED, 4.3, "", "", 0.0, 70.0)),
    (FIRST, event(EventKind.DECODE_RESUMED, 5.0, "", "", 0.2)),
    (FIRST, event(EventKind.SUSPENDED, 5.2)),
    (FIRST, event(EventKind.RESUMED, 5.5)),
    (FIRST, event(EventKind.ENDED, 6.0, "length", "", 0.7, 26.0)),
    (GATEWAY, event(EventKind.ENDED, 6.01, "length")),
)


def test_the_time_of_a_request_that_met_with_everything() -> None:
    phases, spent = course_of(*LATE).phases(START_S + 6.01)
    assert [phase.begin_s for phase in phases[1:]] == [phase.end_s for phase in phases[:-1]]
    first = {phase: round(seconds, 3) for phase, seconds in spent.first.items()}
    assert first == {
        Phase.GATEWAY: 0.1,
        Phase.QUEUE: 1.0,
        Phase.DISPATCH: 0.1,
        Phase.INSTANCE_QUEUE: 0.3,
        Phase.PREFILL: 0.2,
        Phase.PREEMPTED: 0.3,
        Phase.RESTORE: 0.2,
        Phase.RECOMPUTE: 0.3,
        Phase.DELIVERY: 0.01,
    }
    later = {phase: round(seconds, 3) for phase, seconds in spent.later.items()}
    assert later == {
        Phase.DECODE: round(0.49 + 0.8 + 0.2 + 0.5, 3),
        Phase.MOVE: 0.2,
        Phase.RESCUE: 1.0,
        Phase.SUSPENDED: 0.3,
        Phase.DELIVERY: 0.01,
    }
    assert {phase.where for phase in phases if phase.phase is Phase.DECODE} == {FIRST, SECOND}


def test_what_missed_objectives_cost() -> None:
    ttft, tpot = objectives(course_of(*LATE), START_S + 6.01, 26)
    assert (ttft.name, ttft.is_met, tpot.name, tpot.is_met) == ("ttft", False, "tpot", False)
    assert isclose(ttft.measured_s, 2.51, abs_tol=1e-6) and isclose(total(ttft.parts), ttft.measured_s, abs_tol=1e-6)
    assert isclose(tpot.measured_s, 3.5 / 25, abs_tol=1e-6) and isclose(total(tpot.parts), 3.5, abs_tol=1e-6)
    assert ttft.parts[0].phase is Phase.QUEUE and tpot.parts[0].phase is Phase.DECODE_WAIT
    parts = {part.phase: part.seconds for part in ttft.parts}
    assert isclose(parts[Phase.PREFILL], 0.15, abs_tol=1e-6) and isclose(parts[Phase.PREFILL_WAIT], 0.05, abs_tol=1e-6)
    assert ttft.text.startswith("time to first token 2.51 s, objective 1.5 s: missed by 1.01 s; queue 1 s (40%)")


def test_one_that_never_got_a_token_missed_by_all_its_time() -> None:
    course = course_of(*LATE[:5])
    [ttft] = objectives(course, START_S + 9.0, 0)
    assert not ttft.is_met and isclose(total(ttft.parts), 9.0, abs_tol=1e-6)
    assert objectives(course_of(*LATE[:5]), START_S + 1.4, 0) == [], "it ended before it was late"
    without = (*LATE[:4], (FIRST, event(EventKind.ARRIVED, 1.2)))
    assert objectives(course_of(*without), START_S + 9.0, 0) == [], "no objective is told"


KINDS = [kind for kind in EventKind if kind not in (EventKind.RECEIVED, EventKind.DELIVERED)]


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.floats(-5.0, 100.0), st.sampled_from([GATEWAY, FIRST, SECOND])),
        max_size=120,
    ),
    st.floats(0.001, 100.0),
    st.booleans(),
    st.integers(8, 64),
)
def test_sums_are_what_was_measured(
    told: list[tuple[EventKind, float, str]], delivered_s: float, is_delivered: bool, max_events: int
) -> None:
    course, whole = Course(max_events), Course(1000)
    for one in (course, whole):
        one.add(GATEWAY, event(EventKind.RECEIVED, 0.0))
        if is_delivered:
            one.add(GATEWAY, event(EventKind.DELIVERED, delivered_s))
        for kind, after_s, teller in told:
            one.add(teller, event(kind, after_s, "", FIRST, 1.0, 2.0, 3.0))
        assert one.told[0][1].kind is EventKind.RECEIVED
    for one in (course, whole):
        phases, spent = one.phases(START_S + 100.0)
        assert isclose(sum(spent.first.values()) + sum(spent.later.values()), 100.0, abs_tol=1e-4)
        assert isclose(sum(spent.first.values()), delivered_s if is_delivered else 100.0, abs_tol=1e-4)
        assert isclose(phases[-1].end_s, 100.0, abs_tol=1e-6)
        assert all(isclose(a.end_s, b.begin_s) for a, b in itertools.pairwise(phases))
    assert len(course.told) <= max_events
    assert len(course.told) + course.num_left_out == len(whole.told)


@given(st.permutations(LATE[1:]))
def test_the_order_in_which_it_is_told_does_not_matter(told: list[tuple[str, RequestEvent]]) -> None:
    assert course_of(LATE[0], *told).phases(START_S + 6.01)[1] == course_of(*LATE).phases(START_S + 6.01)[1]


def test_each_event_has_its_words() -> None:
    texts = {one.kind: event_text(one, 50) for _, one in LATE}
    assert texts[EventKind.QUEUED] == "7 ahead in the queue: no instance serves the model"
    assert texts[EventKind.DISPATCHED] == f"to {FIRST}: the freest (freeness 3.0; 1 instance for the model)"
    assert texts[EventKind.PREEMPTED].startswith("others need its memory; computed 32 tokens so far")
    assert texts[EventKind.LOST] == f"{SECOND} no longer has it (exited), after 20 tokens; placed again"
    idle = event_text(event(EventKind.DISPATCHED, 0.0, "the freest", FIRST, float("inf"), 2.0), 1)
    assert "(idle; 2 instances for the model)" in idle


def judged(missed: bool, queue_s: float = 2.0) -> list[Objective]:
    parts = [Part(Phase.QUEUE, queue_s), Part(Phase.PREFILL, 1.0)] if missed else [Part(Phase.PREFILL, 0.5)]
    measured_s = total(parts)
    return [Objective(name="ttft", objective_s=1.5, measured_s=measured_s, is_met=not missed, parts=parts, text="")]


def test_misses_are_summed_up_over_the_last_minutes() -> None:
    book = SloBook(slot_s=10.0, num_slots=6)
    for number in range(20):
        book.count(f"r{number}", "m", judged(number % 2 == 0), START_S + number)
    book.count("other", "n", judged(True, 4.0), START_S + 20)
    of_m, of_n = book.explain(60.0, START_S + 25)
    assert (of_m.num_judged, of_m.num_missed, of_n.num_missed) == (20, 10, 1)
    assert isclose(of_m.objective_s, 1.5)
    met = SloBook()
    met.count("r", "m", judged(False), START_S)
    assert [one.objective_s for one in met.explain(60.0, START_S)] == [1.5], "also where none missed it"
    assert [part.phase for part in of_m.parts] == [Phase.QUEUE, Phase.PREFILL]
    assert isclose(total(of_m.parts), of_m.measured_s) and of_m.examples[-1] == "r18"
    assert words(of_m.parts) == "queue 2 s (67%), prefill 1 s (33%)"
    assert [one.model for one in book.explain(5.0, START_S + 25)] == ["n"]
    book.count("late", "m", judged(True), START_S + 200)
    assert [one.num_judged for one in book.explain(3600.0, START_S + 200)] == [1], "bounded"
    both = merged([[of_m], [of_m, of_n]])
    assert (both[0].num_judged, both[0].num_missed, len(both)) == (40, 20, 2)
    assert isclose(total(both[0].parts), both[0].measured_s)
