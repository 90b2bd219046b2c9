"""Which models on demand are loaded: single cases, and what holds whatever comes."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import ModelDemand, WhyAsleep
from shared.placement.on_demand import (
    FAILED_S,
    LEAST_RESIDENCY_S,
    STALE_S,
    UNREADY_S,
    Demands,
    OnDemandModel,
    Wake,
    decide,
)

NOW = 1000.0


def awake(name: str, *, used_s: float = 100.0, ready_s: float | None = 200.0, **more) -> OnDemandModel:
    """One that was used so long ago and serves for so long."""
    ready = None if ready_s is None else NOW - ready_s
    return OnDemandModel(
        name=name, **{"idle_s": 300.0, "load_s": 4.0} | more, is_awake=True, used_s=NOW - used_s, ready_s=ready
    )


def asleep(name: str, *, num_online: int = 0, num_offline: int = 0, waited_s: float = 0.0, wanted_s: float = NOW):
    demand = ModelDemand(model=name, num_online=num_online, num_offline=num_offline)
    return OnDemandModel(
        name=name, idle_s=300.0, is_awake=False, demand=demand, waited_s=waited_s, wanted_s=wanted_s, used_s=NOW
    )


def running(num_online: int = 0, num_offline: int = 0, num_queued: int = 0) -> ModelDemand:
    return ModelDemand(model="", num_online=num_queued, num_held_online=num_online, num_held_offline=num_offline)


def at_most(num: int):
    return lambda names: len(names) <= num


def test_a_model_is_put_away_when_it_was_idle_for_its_time():
    models = [awake("old", used_s=301.0), awake("young", used_s=299.0), awake("busy", used_s=400.0, demand=running(1))]
    decision = decide(models, NOW, at_most(9))
    assert decision.put_away == {"old": "idle"} and decision.awake == {"young", "busy"}
    assert decision.asleep == {"old": WhyAsleep.IDLE} and decision.due_s == NOW + 1.0


def test_idle_time_of_zero_leaves_time_for_the_request_that_woke_it():
    model = awake("a", used_s=0.5, ready_s=0.5, idle_s=0.0)
    assert decide([model], NOW, at_most(1)).due_s == NOW - 0.5 + LEAST_RESIDENCY_S
    assert decide([model._replace(ready_s=NOW - 2.5)], NOW, at_most(1)).put_away == {"a": "idle"}


def test_a_model_with_room_is_woken_and_nobody_is_put_away():
    decision = decide([awake("a"), asleep("b", num_online=1)], NOW, at_most(2))
    assert decision.woken == ["b"] and decision.awake == {"a", "b"} and not decision.put_away


def test_the_least_recently_used_makes_room_and_no_more_than_are_needed():
    sizes = {"large": 3, "small": 1, "other": 1, "new": 3}
    models = [awake("small", used_s=90.0), awake("large", used_s=80.0), awake("other", used_s=70.0)]
    models.append(asleep("new", num_online=1, waited_s=5.0))
    decision = decide(models, NOW, lambda names: sum(sizes[name] for name in names) <= 5)
    # The oldest alone does not help, and is in nobody's way once the next one is gone.
    assert decision.put_away == {"large": "room"} and decision.awake == {"small", "other", "new"}


def test_requests_that_have_waited_less_than_a_load_take_do_not_drive_out_a_model_in_use():
    resident = awake("a", used_s=1.0)
    decision = decide([resident, asleep("b", num_online=2, waited_s=1.0)], NOW, at_most(1))
    assert decision.asleep["b"] is WhyAsleep.RECENTLY_USED and decision.due_s == NOW + 1.5
    decision = decide([resident, asleep("b", num_online=2, waited_s=4.0)], NOW, at_most(1))
    assert decision.put_away == {"a": "room"} and decision.woken == ["b"]


def test_a_model_that_serves_only_just_stays_whatever_waits():
    decision = decide([awake("a", used_s=0.0, ready_s=1.5), asleep("b", num_online=9, waited_s=99.0)], NOW, at_most(1))
    assert decision.asleep["b"] is WhyAsleep.RECENTLY_USED and decision.due_s == NOW + 0.5


def test_requests_that_run_or_wait_keep_their_model():
    for demand in (running(1), running(num_queued=1)):
        models = [awake("a", demand=demand), asleep("b", num_online=9, waited_s=99.0)]
        decision = decide(models, NOW, at_most(1))
        assert decision.asleep["b"] is WhyAsleep.ROOM_IN_USE and decision.awake == {"a"}


def test_a_model_that_is_being_loaded_is_not_put_away():
    models = [awake("a", used_s=5.0, ready_s=None), asleep("b", num_online=9, waited_s=99.0)]
    assert decide(models, NOW, at_most(1)).asleep["b"] is WhyAsleep.ROOM_IN_USE


def test_a_model_whose_place_was_lost_does_not_keep_others_out():
    lost, wanted = awake("a", used_s=UNREADY_S, ready_s=None), asleep("b", num_online=1)
    assert decide([lost, wanted], NOW, at_most(1)).put_away == {"a": "room"}
    busy = lost._replace(demand=running(num_queued=1))
    assert decide([busy, wanted], NOW, at_most(1)).asleep["b"] is WhyAsleep.ROOM_IN_USE


def test_batches_wait_for_models_in_use_and_give_way_to_online_requests():
    offline = asleep("b", num_offline=5)
    assert decide([awake("a"), offline], NOW, at_most(1)).asleep["b"] is WhyAsleep.ONLINE_FIRST
    assert decide([offline], NOW, at_most(1)).woken == ["b"]
    decision = decide([awake("a", demand=running(0, 3)), asleep("b", num_online=1, waited_s=5.0)], NOW, at_most(1))
    assert decision.put_away == {"a": "room"} and decision.woken == ["b"]
    # Not for those of another batch.
    assert decide([awake("a", demand=running(0, 3)), offline], NOW, at_most(1)).asleep["b"] is WhyAsleep.ROOM_IN_USE


def test_of_two_that_are_wanted_at_once_the_first_comes_first():
    models = [asleep("a", num_online=1, wanted_s=NOW - 1), asleep("b", num_online=1, wanted_s=NOW - 2)]
    decision = decide(models, NOW, at_most(1))
    assert decision.woken == ["b"] and decision.asleep == {"a": WhyAsleep.ROOM_IN_USE}
    assert decide(models, NOW, at_most(2)).woken == ["b", "a"]


def test_one_that_fits_nowhere_is_told_so_and_puts_nobody_away():
    decision = decide([awake("a"), asleep("b", num_online=1, waited_s=9.0)], NOW, lambda names: "b" not in names)
    assert decision.asleep["b"] is WhyAsleep.NO_ROOM and decision.awake == {"a"} and not decision.put_away


def test_one_that_failed_goes_after_a_while_and_at_once_for_another():
    failed = awake("a", used_s=FAILED_S - 1, ready_s=None, is_failed=True)
    assert decide([failed], NOW, at_most(1)).due_s == NOW + 1
    assert decide([failed._replace(used_s=NOW - FAILED_S)], NOW, at_most(1)).put_away == {"a": "failed"}
    assert decide([failed, asleep("b", num_online=1)], NOW, at_most(1)).put_away == {"a": "room"}


DEMANDS = st.builds(
    ModelDemand, model=st.just(""), num_online=st.integers(0, 2), num_offline=st.integers(0, 2),
    num_held_online=st.integers(0, 2), num_held_offline=st.integers(0, 2),
)  # fmt: skip
TIMES = st.floats(NOW - 400, NOW)


@st.composite
def models_and_sizes(draw):
    models, sizes = [], {}
    for name in "abcde"[: draw(st.integers(1, 5))]:
        is_awake, demand = draw(st.booleans()), draw(DEMANDS)
        is_wanted = demand.num_online + demand.num_offline > 0
        models.append(
            OnDemandModel(
                name=name, idle_s=draw(st.floats(0, 400)), is_awake=is_awake, demand=demand,
                ready_s=draw(st.none() | TIMES) if is_awake else None, is_failed=is_awake and draw(st.booleans()),
                used_s=draw(TIMES), wanted_s=draw(TIMES) if is_wanted else math.inf, waited_s=draw(st.floats(0, 20)),
                load_s=draw(st.floats(0, 20)),
            )
        )  # fmt: skip
        models[-1] = models[-1]._replace(is_failed=models[-1].is_failed and models[-1].ready_s is None)
        sizes[name] = draw(st.integers(1, 4))
    return models, sizes, draw(st.integers(1, 10))


@given(models_and_sizes())
@settings(max_examples=300)
def test_what_holds_of_every_decision(drawn):
    models, sizes, room = drawn
    by_name = {model.name: model for model in models}

    def fits(names: frozenset[str]) -> bool:
        return sum(sizes[name] for name in names) <= room

    decision = decide(models, NOW, fits)
    before = {model.name for model in models if model.is_awake}
    assert decision.awake | decision.asleep.keys() == by_name.keys() and not decision.awake & decision.asleep.keys()
    assert decision.awake == (before - decision.put_away.keys()) | set(decision.woken)
    for name in decision.put_away:
        model = by_name[name]
        assert name in before and not model.has_online
        if model.ready_s is None:
            assert model.is_failed or model.used_s + UNREADY_S <= NOW
        else:
            assert model.ready_s + LEAST_RESIDENCY_S <= NOW
    for name in decision.woken:
        assert by_name[name].is_wanted and name not in before
    # Memory suffices for all of them, unless it did not before.
    assert fits(decision.awake) or not decision.woken
    assert decision.due_s > NOW
    # Nobody was put away for nothing.
    gone = [name for name, cause in decision.put_away.items() if cause == "room"]
    if fits(frozenset(before)):
        for kept in (set(some) for n in range(1, len(gone) + 1) for some in combinations(gone, n)):
            assert len(decision.woken) > 1 or not fits(decision.awake | kept)
    # The same state asks for nothing more.
    after = [
        m._replace(is_awake=m.name in decision.awake, ready_s=m.ready_s if m.name in before else None) for m in models
    ]
    again = decide(after, NOW, fits)
    assert again.awake == decision.awake


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 5.0)), min_size=4, max_size=40), st.floats(0.2, 6.0))
@settings(max_examples=100, deadline=None)
def test_models_that_take_turns_never_thrash(arrivals, load_s):
    """Requests of two models that do not fit together, each of 0.2 s: both are served, and no model is put away sooner than
    it has served for `LEAST_RESIDENCY_S`."""
    demands, now, plan, ready = Demands(), 0.0, set[str](), dict[str, float]()
    demands.configure({"a": 60.0, "b": 60.0}, now)
    due, waiting, held, changes, served = [], {"a": [], "b": []}, {"a": 0.0, "b": 0.0}, [], 0
    for name, gap_s in arrivals:
        now += gap_s
        due.append((now, name))
    now, loading = 0.0, {}
    while served < len(arrivals):
        now += 0.1
        assert now < 1000.0 * len(arrivals)
        while due and due[0][0] <= now:
            waiting[due[0][1]].append(due.pop(0)[0])
        for name in [name for name, at in loading.items() if at <= now]:
            ready[name] = loading.pop(name)
        for name in ready:
            if waiting[name] and held[name] <= now:
                waiting[name].pop(0)
                held[name], served = now + 0.2, served + 1
        demands.hear(
            [
                ModelDemand(model=n, num_online=len(w), num_held_online=held[n] > now, waited_s=sum(now - s for s in w))
                for n, w in waiting.items()
                if w or held[n] > now
            ],
            now,
        )
        demands.see({name: ["ready"] for name in ready}, now)
        decision = decide(demands.models(plan, now), now, at_most(1))
        for name in decision.put_away:
            assert now - ready.pop(name) >= LEAST_RESIDENCY_S - 0.2 and held[name] <= now and not waiting[name]
        for name in decision.woken:
            demands.wake(name, "disk", now)
            loading[name] = now + load_s
            changes.append(now)
        plan = set(decision.awake)
    assert all(later - earlier >= load_s + LEAST_RESIDENCY_S - 0.3 for earlier, later in pairwise(changes))


def test_what_is_known_follows_reports_and_the_registry():
    demands = Demands()
    demands.configure({"a": 10.0}, 0.0)
    assert not demands.is_known(0.0)
    assert demands.hear([ModelDemand(model="a", num_online=2, waited_s=1.0), ModelDemand(model="x", num_online=1)], 5.0)
    assert not demands.hear([ModelDemand(model="a", num_online=2, waited_s=3.0)], 6.0), "it is known already"
    (model,) = demands.models(set(), 7.0)
    assert (model.wanted_s, model.waited_s, model.used_s, model.is_awake) == (5.0, 5.0, 6.0, False)
    demands.wake("a", "host", 7.0)
    assert demands.see({"a": ["loading"]}, 7.5) == []
    assert demands.see({"a": ["ready", "loading"]}, 8.0) == [Wake("a", "host", 3.0)]
    (model,) = demands.models({"a"}, 8.0)
    assert model.ready_s == 8.0 and model.load_s == 1.0
    demands.hear([], 9.0)
    assert demands.models({"a"}, 9.0)[0].is_idle
    assert demands.see({"a": ["failed"]}, 9.5) == [] and demands.models({"a"}, 9.5)[0].is_failed
    assert demands.is_known(9.0 + STALE_S) and not demands.is_known(9.1 + STALE_S)
    demands.configure({}, 10.0)
    assert demands.models({"a"}, 10.0) == []
