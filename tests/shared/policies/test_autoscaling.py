"""Autoscaling: examples with numbers, and a simulated cluster under loads that hypothesis draws."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policies.autoscaling import (
    CARRY_OUT_S,
    HOLD_S,
    RETRY_S,
    Autoscaling,
    Decision,
    Fleet,
    Grow,
    Keep,
    Member,
    ScalingBounds,
    Shrink,
    decodes_of,
    mean_freeness,
    mean_without,
)
from tests.seeds import examples

BOUNDS = ScalingBounds(low=100.0, high=500.0, period_s=10.0, min_instances=1, max_instances=4, settle_s=5.0)
POOL = 10_000.0


def member(
    name: str, freeness: float, *, models: str = "m", num_running: int = 10, num_requests: int | None = None
) -> Member:
    if math.isinf(freeness):
        num_running = 0
    number = num_running if num_requests is None else num_requests
    return Member(name, frozenset(models), freeness, num_running, number, POOL)


def decisions(policy: Autoscaling, fleet: Fleet, begin: int, end: int) -> list[tuple[int, Decision]]:
    """What is decided at each second of [begin, end)."""
    found = ((now, policy.decide(fleet, float(now))) for now in range(begin, end))
    return [(now, decision) for now, decision in found if decision is not None]


def test_one_more_when_the_mean_was_low_for_a_period() -> None:
    policy = Autoscaling(BOUNDS)
    low = Fleet([member("a", 50.0), member("b", 120.0)])
    assert decisions(policy, low, 0, 11) == [(10, Grow(3))]
    assert policy.attempt == Grow(3)
    assert decisions(policy, low, 11, 100) == [], "it is being carried out"


def test_a_moment_between_the_bounds_begins_the_period_anew() -> None:
    policy = Autoscaling(BOUNDS)
    assert decisions(policy, Fleet([member("a", 50.0)]), 0, 9) == []
    assert policy.decide(Fleet([member("a", 150.0)]), 9.0) is None
    assert decisions(policy, Fleet([member("a", 50.0)]), 10, 30)[0] == (20, Grow(2))


def test_an_idle_instance_counts_but_does_not_hide_many_full_ones() -> None:
    two = [member("a", 0.0), member("idle", math.inf)]
    assert mean_freeness(two, 1000.0) == 500.0
    assert decisions(Autoscaling(BOUNDS), Fleet(two), 0, 30) == []
    many = [*(member(f"full-{k}", 0.0) for k in range(12)), member("idle", math.inf)]
    unbounded = ScalingBounds(100.0, 500.0, 10.0)
    assert decisions(Autoscaling(unbounded), Fleet(many), 0, 30)[0] == (10, Grow(14))


def test_each_model_has_its_own_mean() -> None:
    fleet = Fleet([member("a", 20.0, models="x"), member("b", 900.0, models="y"), member("c", 900.0, models="y")])
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 12) == [(10, Grow(4))]


def test_requests_that_no_instance_takes_are_a_demand_whatever_the_freeness() -> None:
    fleet = Fleet([member("a", 400.0)], queued={"m"})
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 12) == [(10, Grow(2))]


def test_the_one_with_the_fewest_requests_leaves() -> None:
    fleet = Fleet([member("a", 900.0), member("b", 4900.0, num_running=2), member("c", 900.0)])
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 12) == [(10, Shrink("b"))]


def test_nothing_leaves_that_would_be_missed() -> None:
    # 10 requests with 9,000 of 10,000 tokens free: both together leave (9,000 - 1,000) / 20 = 400 decode steps.
    fleet = Fleet([member("a", 900.0), member("b", 900.0)])
    assert mean_without(fleet.members, fleet.members[0], 1000.0) == 400.0
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 100) == []
    alone = Fleet([member("a", math.inf, models="x"), member("b", math.inf, models="y")])
    assert decisions(Autoscaling(BOUNDS), alone, 0, 100) == [], "each is the only one with its model"


def test_idle_instances_leave_down_to_the_least_number() -> None:
    idle = [member(name, math.inf) for name in "abc"]
    assert decisions(Autoscaling(BOUNDS), Fleet(idle), 0, 12) == [(10, Shrink("c"))]
    assert decisions(Autoscaling(BOUNDS), Fleet(idle[:1]), 0, 100) == []


def test_a_model_that_nobody_serves_is_not_free() -> None:
    fleet = Fleet([member("a", math.inf), member("b", math.inf)], unserved={"other"})
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 100) == []


def test_the_bounds_hold_even_where_the_freeness_says_otherwise() -> None:
    full = Fleet([member(name, 0.0) for name in "abcd"])
    assert decisions(Autoscaling(BOUNDS), full, 0, 100) == []
    least = ScalingBounds(100.0, 500.0, 10.0, min_instances=3)
    assert decisions(Autoscaling(least), Fleet([member("a", math.inf)]), 0, 12) == [(10, Grow(3))]
    assert decisions(Autoscaling(least), Fleet([]), 0, 12) == [(10, Grow(3))]


def test_a_new_demand_cancels_a_drain_first() -> None:
    policy = Autoscaling(BOUNDS)
    idle = [member("a", math.inf), member("b", math.inf)]
    assert decisions(policy, Fleet(idle), 0, 11) == [(10, Shrink("b"))]
    busy = Fleet([member("a", 10.0)], leaving=["b"])
    assert decisions(policy, busy, 11, 40) == [(21, Keep("b"))]
    again = Fleet([member("a", 10.0), member("b", 300.0)])
    assert decisions(policy, again, 40, 80) == [], "the mean is within the bounds"
    assert policy.attempt is None


def test_a_drain_that_took_another_instance_is_followed_and_cancelled_all_the_same() -> None:
    policy = Autoscaling(BOUNDS)
    assert decisions(policy, Fleet([member("a", math.inf), member("b", math.inf)]), 0, 11) == [(10, Shrink("b"))]
    assert decisions(policy, Fleet([member("b", 10.0)], leaving=["a"]), 11, 40) == [(21, Keep("a"))]


def test_after_the_drain_the_cluster_settles_before_anything_else() -> None:
    policy = Autoscaling(BOUNDS)
    idle = [member(name, math.inf) for name in "abc"]
    assert decisions(policy, Fleet(idle), 0, 11) == [(10, Shrink("c"))]
    assert decisions(policy, Fleet(idle[:2], leaving=["c"]), 11, 31) == []
    # Gone at 31, settled at 36, and a period from there.
    assert decisions(policy, Fleet(idle[:2]), 31, 60) == [(46, Shrink("b"))]


def test_while_an_instance_starts_nothing_is_decided_unless_it_never_gets_there() -> None:
    policy = Autoscaling(BOUNDS)
    fleet = Fleet([member("a", 10.0)], starting=["b"])
    (first, *_) = decisions(policy, fleet, 0, 1000)
    assert first == (CARRY_OUT_S + 10, Grow(3))


def test_an_attempt_that_fails_is_repeated_later() -> None:
    policy = Autoscaling(BOUNDS)
    fleet = Fleet([member("a", 10.0)])
    assert decisions(policy, fleet, 0, 11) == [(10, Grow(2))]
    policy.refused(11.0)
    assert decisions(policy, fleet, 11, 60) == [(11 + RETRY_S + 10, Grow(2))]
    assert decisions(policy, fleet, 60, 1000)[0] == (51 + CARRY_OUT_S + RETRY_S + 10, Grow(2)), "no effect at all"


@pytest.mark.parametrize("bounds", [(5.0, 5.0, 1, 0), (1.0, 5.0, 0, 0), (1.0, 5.0, 3, 2)])
def test_bounds_that_contradict_each_other(bounds: tuple[float, float, int, int]) -> None:
    low, high, least, most = bounds
    with pytest.raises(AssertionError):
        ScalingBounds(low, high, 1.0, least, most)


# ------------------------------------------------------------------------------------------- a simulated cluster


REST_S = CARRY_OUT_S + RETRY_S
"""After so long without any change none will come at a constant load: no time in the policy is longer."""


class Cluster:
    """Instances with equal shares of one load; starting and draining take time."""

    def __init__(self, num_instances: int, bounds: ScalingBounds, start_s: int, drain_s: int) -> None:
        self.policy = Autoscaling(bounds)
        self.names = {f"i{k}" for k in range(num_instances)}
        self.coming: dict[str, int] = {}
        self.going: dict[str, int] = {}
        self.history: list[Decision] = []
        self._number = num_instances
        self._start_s, self._drain_s = start_s, drain_s

    def run(self, seconds: int, used_tokens: float, num_requests: float, begin: int = 0) -> None:
        """Less than `seconds` where it has come to rest."""
        last_change = begin
        for now in range(begin, begin + seconds):
            if self.coming or self.going or self.policy.attempt is not None:
                last_change = now
            if now > last_change + REST_S:
                return
            for name in [n for n, at in self.coming.items() if at <= now]:
                del self.coming[name]
                self.names.add(name)
            for name in [n for n, at in self.going.items() if at <= now]:
                del self.going[name]
            fleet = Fleet(self._members(used_tokens, num_requests), list(self.coming), list(self.going))
            match decision := self.policy.decide(fleet, float(now)):
                case Grow(number):
                    for _ in range(number - len(self.names) - len(self.coming)):
                        self.coming[f"i{self._number}"] = now + self._start_s
                        self._number += 1
                case Shrink(name):
                    self.names.remove(name)
                    self.going[name] = now + self._drain_s
                case Keep(name):
                    del self.going[name]
                    self.coming[name] = now + self._start_s
            if decision is not None:
                self.history.append(decision)
            bounds = self.policy.bounds
            num_active = len(self.names) + len(self.coming)
            assert bounds.min_instances <= num_active
            assert not bounds.max_instances or num_active <= bounds.max_instances

    def _members(self, used_tokens: float, num_requests: float) -> list[Member]:
        used, running = used_tokens / len(self.names), num_requests / len(self.names)
        free = math.inf if not num_requests else (POOL - used) / max(1.0, running)
        # Requests are whole in truth; shares keep the load exactly constant.
        return [Member(n, frozenset("m"), free, running, running, POOL) for n in sorted(self.names)]  # type: ignore[arg-type]


loads = st.tuples(st.floats(0.0, 60_000.0), st.integers(0, 400))
bounds_strategy = st.tuples(
    st.floats(1.0, 400.0),
    st.floats(1.1, 8.0),
    st.integers(1, 15),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 9),
).map(lambda t: ScalingBounds(t[0], t[0] * t[1], float(t[2]), t[3], t[4] and t[3] + t[4], float(t[5])))


def direction(decision: Decision) -> int:
    return -1 if isinstance(decision, Shrink) else 1


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 3), bounds_strategy, loads, st.integers(0, 40), st.integers(0, 40))
def test_a_constant_load_is_met_without_going_to_and_fro(
    more: int, bounds: ScalingBounds, load: tuple[float, int], start_s: int, drain_s: int
) -> None:
    most = bounds.max_instances or 20
    cluster = Cluster(min(bounds.min_instances + more, most), bounds, start_s, drain_s)
    cluster.run(3000, *load)
    assert len({direction(decision) for decision in cluster.history}) <= 1
    assert not any(isinstance(decision, Keep) for decision in cluster.history)


@settings(max_examples=examples(40), deadline=None)
@given(bounds_strategy, st.lists(loads, min_size=2, max_size=6), st.integers(1, 90), st.integers(0, 30))
def test_no_load_whatever_leaves_the_bounds(
    bounds: ScalingBounds, changes: list[tuple[float, int]], every_s: int, takes_s: int
) -> None:
    cluster = Cluster(bounds.min_instances, bounds, takes_s, 2 * takes_s)
    for turn, load in enumerate(changes):
        cluster.run(every_s, *load, begin=turn * every_s)
    cluster.run(4000, 0.0, 0, begin=len(changes) * every_s)
    assert len(cluster.names) == bounds.min_instances, "idle in the end"
    assert not cluster.coming and not cluster.going


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(-2000.0, 5000.0) | st.just(math.inf), st.integers(0, 40)), min_size=2, max_size=9))
def test_one_less_is_never_freer_than_all_were(instances: list[tuple[float, int]]) -> None:
    """With equally loaded instances, where the mean is what a pool of all would have."""
    freeness, num_running = instances[0]
    members = [member(f"i{k}", freeness, num_running=max(1, num_running)) for k in range(len(instances))]
    assert mean_without(members, members[0], 1000.0) <= mean_freeness(members, 1000.0) + 1e-9


def test_one_that_crashes_again_and_again_is_not_waited_for_for_ever() -> None:
    policy, found = Autoscaling(BOUNDS), []
    for now in range(2 * int(CARRY_OUT_S)):
        starting = ["b"] if now % 30 < 20 else []
        if (decision := policy.decide(Fleet([member("a", 10.0)], starting=starting), float(now))) is not None:
            found.append((now, decision))
    assert [decision for _, decision in found] == [Grow(2) if found[0][0] % 30 >= 20 else Grow(3)]
    assert CARRY_OUT_S - 30 < found[0][0] < CARRY_OUT_S + 30


def test_a_settled_model_needs_no_more_and_a_failed_instance_is_no_help() -> None:
    low = Fleet([member("a", 50.0)], settled={"m"}, queued={"m"})
    assert decisions(Autoscaling(BOUNDS), low, 0, 100) == []
    beside = Fleet([member("a", 50.0)], failed=["b"])
    policy = Autoscaling(BOUNDS)
    assert decisions(policy, beside, 0, 11) == [(10, Grow(3))]
    grown = Fleet([member("a", 300.0), member("c", 300.0)], failed=["b"])
    assert decisions(policy, grown, 11, 12) == [] and policy.attempt is None, "that is all that was to come"


def test_a_model_without_any_room_is_short_of_all_of_it() -> None:
    members = [member("a", -math.inf), member("b", 900.0, num_requests=1), member("c", 900.0)]
    assert decisions(Autoscaling(BOUNDS), Fleet(members), 0, 100)[0][1] == Grow(4)
    assert mean_without(members, members[1], 1000.0) == -math.inf


FREE = 150_000.0
"""Decode steps: memory is no matter."""


def busy(names: str, late: float = 0.0) -> list[Member]:
    return [member(name, FREE, num_running=2, num_requests=6)._replace(late=late) for name in names]


def test_prompts_that_wait_for_longer_than_the_objective_ask_for_one_more_whatever_the_freeness() -> None:
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab", late=1.2)), 0, 12) == [(10, Grow(3))]
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab", late=0.4)), 0, 100) == [], "0.8 with one less"
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab", late=0.2)), 0, 12) == [(10, Shrink("b"))]


def test_as_many_come_as_the_prompts_of_a_second_need_time() -> None:
    unbounded = ScalingBounds(100.0, 500.0, 10.0)
    assert decisions(Autoscaling(unbounded), Fleet(busy("ab"), work={"m": 3.4}), 0, 12) == [(10, Grow(6))], (
        "a little more comes than is measured"
    )
    assert decisions(Autoscaling(unbounded), Fleet(busy("ab"), work={"m": 99.0}), 0, 12) == [(10, Grow(8))]
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab"), work={"m": 99.0}), 0, 12) == [(10, Grow(4))], "the bound"
    assert decisions(Autoscaling(unbounded), Fleet(busy("abc"), work={"m": 1.1}), 0, 100) == [], "0.55 with one less"
    assert decisions(Autoscaling(unbounded), Fleet(busy("abc"), work={"m": 0.9}), 0, 12) == [(10, Shrink("c"))]


def test_prompts_of_several_models_share_the_time_of_their_instances() -> None:
    shared = [each._replace(models=frozenset("mn")) for each in busy("ab")]
    fleet = Fleet([*shared, busy("c")[0]], work={"m": 0.9, "n": 0.9})
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 12) == [(10, Grow(4))]


def test_requests_that_wait_ask_for_as_many_as_hold_them() -> None:
    full = [member("a", 0.0)]
    fleet = Fleet(full, queued={"m": 20})
    # 30 requests of 1,000 tokens, and room for 100 steps of each: 33,000 tokens.
    assert decisions(Autoscaling(BOUNDS), fleet, 0, 12) == [(10, Grow(4))]


def test_after_a_refusal_one_more_is_asked_for() -> None:
    unbounded = ScalingBounds(100.0, 500.0, 10.0)
    policy, fleet = Autoscaling(unbounded), Fleet(busy("ab"), work={"m": 3.4})
    assert decisions(policy, fleet, 0, 12) == [(10, Grow(6))]
    policy.refused(12.0)
    assert decisions(policy, fleet, 12, 60)[0][1] == Grow(3)


def test_batches_that_will_be_late_ask_for_more_and_keep_what_there_is() -> None:
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab"), pressure={"m": 1.4}), 0, 12) == [(10, Grow(3))]
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab"), pressure={"m": 0.5}), 0, 100) == [], "late with one less"
    assert decisions(Autoscaling(BOUNDS), Fleet(busy("ab"), pressure={"m": 0.3}), 0, 12) == [(10, Shrink("b"))]


def test_what_was_missed_soon_after_it_had_left_is_kept_for_longer_each_time() -> None:
    """Nothing that is measured says that three are too few, but the queue that forms then."""
    policy = Autoscaling(BOUNDS)
    names, shrunk_s = ["a", "b", "c", "d"], list[int]()
    for now in range(4000):
        match policy.decide(Fleet(busy("".join(names)), queued={"m": 1} if len(names) < 4 else {}), float(now)):
            case Shrink(name):
                names.remove(name)
                shrunk_s.append(now)
            case Grow(number):
                names = ["a", "b", "c", "d", "e"][:number]
    assert len(names) == 4 and [second - first for first, second in pairwise(shrunk_s)] == sorted(
        second - first for first, second in pairwise(shrunk_s)
    )
    assert len(shrunk_s) <= 3 and shrunk_s[1] - shrunk_s[0] >= HOLD_S


def of_models(name: str, num_models: int, num: int) -> Member:
    """With `num` requests of each of the models, whose steps take 12 ms, and 0.2 ms for each more."""
    residents = [(f"m{number}", num, (0.012, 0.0002)) for number in range(num_models)]
    models = frozenset(model for model, _, _ in residents) | {"m"}
    return member(name, FREE, num_running=2, num_requests=6)._replace(models=models, residents=residents, tpot_s=0.11)


def test_streams_of_many_models_that_would_meet_keep_an_instance() -> None:
    three = [of_models(name, 8, 1) for name in "abc"]
    assert decisions(Autoscaling(BOUNDS), Fleet(three), 0, 12) == [], "0.9 of the time for a step of each"
    assert decisions(Autoscaling(BOUNDS), Fleet([of_models(name, 3, 20) for name in "abc"]), 0, 12) == [
        (10, Shrink("c"))
    ]
    prompts = {"m": 0.9}
    assert (
        decisions(Autoscaling(BOUNDS), Fleet([of_models(name, 3, 20) for name in "abc"], work=prompts), 0, 12) == []
    ), "0.43 of the time for steps, and 0.45 for prompts"


def test_what_adds_nothing_to_the_others_steps_may_leave_whatever_they_take() -> None:
    slow = [of_models(name, 9, 1) for name in "ab"]
    idle = of_models("c", 0, 0)._replace(num_requests=0, num_running=0)
    assert decisions(Autoscaling(BOUNDS), Fleet([*slow, idle]), 0, 12) == [(10, Shrink("c"))]


def test_only_who_serves_a_model_takes_its_requests() -> None:
    taker, leaving = of_models("a", 1, 1), of_models("b", 9, 1)
    assert decodes_of(taker, leaving, {f"m{number}": 1.0 for number in range(9)}) == pytest.approx(0.0122 / 0.11)
    unknown = taker._replace(residents=[("m0", 1, (0.0, 0.0))])
    assert decodes_of(unknown, taker, {"m0": 1.0}) == pytest.approx(0.0122 / 0.11)


def test_requests_of_a_model_that_the_leaving_one_serves_no_more_go_nowhere() -> None:
    leaving = of_models("b", 2, 1)._replace(models=frozenset({"m", "m0"}), num_requests=1)
    assert decisions(Autoscaling(BOUNDS), Fleet([of_models("a", 2, 1), leaving]), 0, 12) == [(10, Shrink("b"))]


def test_a_look_at_many_instances_takes_little_time() -> None:
    fleet = Fleet([of_models(f"i{number}", 16, 1)._replace(num_requests=9 + number) for number in range(200)])
    policy = Autoscaling(ScalingBounds(100.0, 500.0, 10.0))
    began_s = time.process_time()
    assert policy.decide(fleet, 0.0) is None
    assert time.process_time() - began_s < 1.0
