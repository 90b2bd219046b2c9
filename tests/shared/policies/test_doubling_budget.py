"""The doubling budget against the paper's text, against all other orders, and against starvation."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import ExecutionStatistics
from shared.policies.doubling_budget import BATCH, SHORT, DoublingBudget
from shared.policies.ordering import ModelView
from shared.policies.silence import URGENT_S
from tests.shared.policies.views import FakeModel, FakeSequence


def policy_with(
    means: dict[str, float], stds: dict[str, float] | None = None, **settings: float | bool
) -> DoublingBudget:
    policy = DoublingBudget(**settings)  # type: ignore[arg-type]
    for model, mean_s in means.items():
        policy.set_statistics(ExecutionStatistics(model, mean_s, (stds or {}).get(model, 0.0), 1))
    return policy


def arrive(policy: DoublingBudget, number: int, model: str, now: float = 0.0) -> FakeSequence:
    sequence = FakeSequence(number, model, arrived_s=now, last_ran_s=now)
    policy.on_arrival(sequence, now)
    return sequence


def test_budget_falls_and_doubles_each_time_it_is_used_up() -> None:
    policy = policy_with({"m": 2.0}, {"m": 1.0})
    sequence = arrive(policy, 0, "m")
    assert policy.budgets([sequence]) == (3.0, 3.0)
    assert policy.key(sequence, 0.0) == (1, 6.0)
    policy.charge([sequence], [1.0], 1.0)
    assert policy.budgets([sequence]) == (2.0, 2.0)
    for doubled in (6.0, 12.0, 24.0):
        policy.charge([sequence], [policy.budgets([sequence])[0] + 0.5], 2.0)
        assert policy.budgets([sequence]) == (doubled, doubled)
        assert policy.key(sequence, 2.0) == (1, 2 * doubled)
    other = arrive(policy, 1, "m")
    assert policy.budgets([sequence, other]) == (27.0, 3.0)
    assert policy.budgets([]) == (0.0, 0.0)


def test_models_without_statistics_use_the_default() -> None:
    policy = DoublingBudget(default_s=4.0)
    sequence = arrive(policy, 0, "unknown")
    assert policy.key(sequence, 0.0) == (1, 16.0)


def test_no_time_at_all_is_no_budget_of_zero() -> None:
    policy = policy_with({"m": 0.0})
    sequence = arrive(policy, 0, "m")
    for _ in range(2000):
        policy.charge([sequence], [0.01], 0.0)
    assert 0 < policy.key(sequence, 0.0)[1] < 1


def test_starving_sequences_go_first_longest_waiting_first() -> None:
    policy = policy_with({"short": 0.1, "long": 10.0})
    short, long, fresh = (
        arrive(policy, 0, "short", 1.5),
        arrive(policy, 1, "long", 1.0),
        arrive(policy, 2, "short", 3.0),
    )
    assert sorted([fresh, long, short], key=lambda s: policy.key(s, 2.4)) == [
        fresh,
        short,
        long,
    ]  # none starves yet, equals keep their place
    assert policy.key(short, 2.6)[0] == 0  # after 1 s, the floor
    assert policy.key(long, 50.9)[0] == 1  # after 5 * L
    assert policy.key(long, 51.1) < policy.key(short, 51.1) < policy.key(fresh, 51.1)
    long.last_ran_s = 51.1
    assert policy.key(long, 51.2)[0] == 1


def test_the_model_is_that_of_the_first_sequence() -> None:
    policy = policy_with({"a": 1.0, "b": 3.0}, shares_turns=False)
    a, b = FakeModel("a"), FakeModel("b")
    a.sequences = [arrive(policy, 0, "a")]
    b.sequences = [arrive(policy, 1, "b"), arrive(policy, 2, "b")]
    assert policy.pick_model([b, a], 0.0) is a
    policy.charge([b.sequences[1]], [2.8], 0.0)  # 0.2 s left: 0.6 < 1
    assert policy.pick_model([a, b], 0.0) is b
    b.sequences = []
    assert policy.pick_model([b, a], 0.0) is a
    same = policy_with({"a": 1.0, "b": 1.0}, shares_turns=False)
    a.sequences, b.sequences = [arrive(same, 5, "a")], [arrive(same, 4, "b")]
    assert same.pick_model([a, b], 0.0) is b, "ties go to the earlier arrival"


def turns(policy: DoublingBudget, models: list[ModelView], num: int) -> Counter[str]:
    """So many, in which nobody's budget changes."""
    taken: Counter[str] = Counter()
    for _ in range(num):
        model = policy.pick_model(models, 0.0)
        policy.on_turn(model)
        taken[model.name] += 1
    return taken


def share_of(one: tuple[float, int, float], other: tuple[float, int, float]) -> float:
    """Share of the turns that go to the first model; each model has its gain, number of requests, and mean execution
    time in seconds."""
    mean_s = (one[1] * one[2] + other[1] * other[2]) / (one[1] + other[1])
    weights = [gain + num * num / (BATCH * mean_s * service_s) for gain, num, service_s in (one, other)]
    return weights[0] / sum(weights)


def test_models_have_turns_in_proportion_to_what_they_gain() -> None:
    policy = policy_with({"a": 1.0, "b": 2.0})
    a, b = FakeModel("a"), FakeModel("b")
    a.sequences = [arrive(policy, 0, "a")]
    b.sequences = [arrive(policy, number, "b") for number in range(1, 3)]
    assert turns(policy, [b, a], 300)["a"] == pytest.approx(300 * share_of((1, 1, 1), (2 / 4, 2, 2)), abs=1)
    b.sequences += [arrive(policy, number, "b") for number in range(3, 13)]
    assert turns(policy, [b, a], 300)["b"] == pytest.approx(300 * share_of((12 / 4, 12, 2), (1, 1, 1)), abs=1)
    assert turns(policy, [FakeModel("b"), a], 21)["b"] == 1, "nothing is runnable of it: the least share"


def test_a_budget_that_doubles_makes_turns_rarer() -> None:
    policy = policy_with({"a": 1.0, "b": 1.0})
    a, b = FakeModel("a"), FakeModel("b")
    a.sequences, b.sequences = [arrive(policy, 0, "a")], [arrive(policy, 1, "b")]
    policy.charge([a.sequences[0]], [1.0], 0.0)
    assert turns(policy, [a, b], 300)["b"] == pytest.approx(300 * share_of((1, 1, 1), (1 / 2, 1, 1)), abs=1)


def test_a_nearly_used_budget_counts_as_half_of_what_it_was() -> None:
    policy = policy_with({"a": 1.0, "b": 1.0})
    a, b = FakeModel("a"), FakeModel("b")
    a.sequences, b.sequences = [arrive(policy, 0, "a")], [arrive(policy, 1, "b")]
    policy.charge([b.sequences[0]], [0.99], 0.0)
    assert turns(policy, [a, b], 300)["b"] == pytest.approx(300 * share_of((2, 1, 1), (1, 1, 1)), abs=1)


def test_where_memory_is_short_those_who_hold_it_have_more_turns() -> None:
    policy = policy_with({"a": 1.0, "b": 1.0})
    a, b = FakeModel("a", pool_share=0.8), FakeModel("b", pool_share=0.1)
    a.sequences, b.sequences = [arrive(policy, 0, "a")], [arrive(policy, 1, "b")]
    assert turns(policy, [a, b], 300)["a"] == pytest.approx(150, abs=1), "nobody waits for it"
    b.num_short = 1
    costs = 1 + SHORT * 0.8, 1 + SHORT * 0.1
    assert turns(policy, [a, b], 300)["a"] == pytest.approx(300 * costs[0] / sum(costs), abs=1)


def test_streams_that_are_due_soon_go_first_by_due_time() -> None:
    policy = policy_with({"a": 0.1, "b": 10.0, "c": 10.0})
    a, b, c = FakeModel("a"), FakeModel("b", due_s=1.0, serving_s=0.1), FakeModel("c", due_s=1.1, serving_s=0.2)
    for number, model in enumerate((a, b, c)):
        model.sequences = [arrive(policy, number, model.name)]
    models: list[ModelView] = [a, b, c]
    assert policy.pick_model(models, 1.1 - 0.3 - URGENT_S - 0.01) is a
    assert policy.pick_model(models, 1.1 - 0.3 - URGENT_S + 0.01) is b, "b and then c would be too late else"
    assert policy.pick_model(models, 2.0) is b
    b.due_s = 9.0
    assert policy.pick_model(models, 2.0) is c
    assert policy_with({"a": 0.1}, shares_turns=False).bounds_silence is False


# ------------------------------------------------------------------------------------------------- the paper's text


class PaperRequest:
    def __init__(self, number: int, service: str, mean: float, var: float) -> None:
        self.number, self.service = number, service
        self.mean, self.initial = mean, mean + var
        self.budget = self.initial  # "define the budget as Q = (L + Var)"
        self.next_budget = 2 * self.initial  # "we double its budget, i.e., Q' = 2 (L + Var)"
        self.priority = self.budget * self.mean  # "the priority of a request is O = Q L"

    def execute(self, seconds: float) -> None:
        self.budget -= seconds  # "the budget Q decreases with the request execution"
        if self.budget <= 0:
            self.budget = self.next_budget
            self.next_budget *= 2  # "we repeat to double the budget once the budget is used up"
        self.priority = self.budget * self.mean  # "and reset its priority to Q' L"


@settings(deadline=None)
@given(
    st.tuples(st.floats(0.1, 5), st.floats(0, 5)),
    st.tuples(st.floats(0.1, 5), st.floats(0, 5)),
    st.lists(st.tuples(st.booleans(), st.floats(0.01, 20)), min_size=1, max_size=60),
)
def test_picks_what_the_papers_algorithm_picks(
    of_a: tuple[float, float], of_b: tuple[float, float], events: list[tuple[bool, float]]
) -> None:
    """Each event: maybe an arrival, then the first request runs for some time. Starvation is off in both."""
    services = {"a": of_a, "b": of_b}
    policy = policy_with(
        {name: mean for name, (mean, _) in services.items()},
        {name: std for name, (_, std) in services.items()},
        min_starvation_s=math.inf,
        shares_turns=False,
    )
    models = {name: FakeModel(name) for name in services}
    paper: list[PaperRequest] = []
    for number, (is_a, seconds) in enumerate(events):
        if not paper or number % 3 == 0:
            name = "a" if is_a else "b"
            models[name].sequences.append(arrive(policy, number, name))
            paper.append(PaperRequest(number, name, *services[name]))
        expected = min(paper, key=lambda request: (request.priority, request.number))
        candidates: list[ModelView] = [model for model in models.values() if model.sequences]
        model = models[policy.pick_model(candidates, 0.0).name]
        first = min(model.sequences, key=lambda sequence: (policy.key(sequence, 0.0), sequence.number))
        assert (first.number, model.name) == (expected.number, expected.service)
        policy.charge([first], [seconds], 0.0)
        expected.execute(seconds)
        if seconds < 1:
            model.sequences.remove(first)
            paper.remove(expected)


# ------------------------------------------------------------------------------------------------------- optimality


def cost_under_policy(lengths: dict[str, int], jobs: tuple[tuple[str, int], ...]) -> float:
    """Summed (finish - arrival) / L on one server in slices of 1 s, the policy asked before each."""
    policy = policy_with({name: float(length) for name, length in lengths.items()}, min_starvation_s=math.inf)
    left = {number: lengths[name] for number, (name, _) in enumerate(jobs)}
    sequences: dict[int, FakeSequence] = {}
    cost, now = 0.0, 0
    while left:
        for number, (name, at) in enumerate(jobs):
            if at == now:
                sequences[number] = arrive(policy, number, name, now)
        now += 1
        if sequences:
            first = min(sequences.values(), key=lambda s: (policy.key(s, 0.0), s.number))
            policy.charge([first], [1.0], 0.0)
            left[first.number] -= 1
            if not left[first.number]:
                del left[first.number], sequences[first.number]
                name, at = jobs[first.number]
                cost += (now - at) / lengths[name]
    return cost


def least_cost(lengths: dict[str, int], jobs: tuple[tuple[str, int], ...]) -> float:
    """Over all preemptive schedules in slices of 1 s."""

    @cache
    def least(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0.0
        ready = [index for index, (_, at) in enumerate(jobs) if at <= now and left[index]]
        if not ready:
            return least(now + 1, left)
        best = math.inf
        for index in ready:
            after = (*left[:index], left[index] - 1, *left[index + 1 :])
            name, at = jobs[index]
            finished = (now + 1 - at) / lengths[name] if not after[index] else 0.0
            best = min(best, finished + least(now + 1, after))
        return best

    return least(0, tuple(lengths[name] for name, _ in jobs))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8)), min_size=1, max_size=5),
)
def test_no_order_has_a_lower_summed_normalised_latency(a: int, b: int, jobs: list[tuple[str, int]]) -> None:
    """Theorem 1: preemption at any time, all requests of a model take the same time."""
    lengths = {"a": a, "b": b}
    by_arrival = tuple(sorted(jobs, key=lambda job: job[1]))
    assert cost_under_policy(lengths, by_arrival) == pytest.approx(least_cost(lengths, by_arrival))


# ------------------------------------------------------------------------------------------------------- starvation


def num_rescued(step_s: float, num_long: int, load: float) -> int:
    """How often a long request starved and ran, while short ones arrived at `load` per second. Who starves must run after
    those who have waited longer, each of whom takes one step."""
    policy = policy_with({"short": 0.5, "long": 2.0})
    sequences = [arrive(policy, number, "long") for number in range(num_long)]
    left_s = [math.inf] * num_long
    due: dict[int, int] = {}
    """Step by which a starving long sequence must have run."""
    num_due = 0
    for step in range(200):
        now = step * step_s
        while len(left_s) - num_long < load * now:
            sequences.append(arrive(policy, len(left_s), "short", now))
            left_s.append(0.5)
        for sequence in sequences[:num_long]:
            if sequence.number not in due and policy.key(sequence, now)[0] == 0:
                due[sequence.number] = step + sum(other.last_ran_s <= sequence.last_ran_s for other in sequences)
        first = min(sequences, key=lambda sequence: (policy.key(sequence, now), sequence.number))
        num_due += due.pop(first.number, None) is not None
        assert all(step < last for last in due.values())
        policy.charge([first], [step_s], now + step_s)
        first.last_ran_s = now + step_s
        left_s[first.number] -= step_s
        if left_s[first.number] <= 0:
            sequences.remove(first)
    return num_due


@settings(deadline=None)
@given(st.floats(0.1, 0.5), st.integers(1, 6), st.floats(0.5, 4))
def test_the_wait_is_bounded_under_any_load(step_s: float, num_long: int, load: float) -> None:
    num_rescued(step_s, num_long, load)


def test_long_requests_go_on_under_an_overload_of_short_ones() -> None:
    assert num_rescued(0.25, 3, 4.0) >= 6


def test_what_is_left_of_a_budget_travels_with_its_exhaustions() -> None:
    here, there = policy_with({"m": 2.0}), policy_with({"m": 50.0})
    sequence = arrive(here, 0, "m")
    for execution_s in (2.5, 1.0):
        here.charge([sequence], [execution_s], 0.0)
    state = here.export_state(sequence)
    moved = arrive(there, 7, "m")
    there.import_state(moved, state, 9.0)
    assert there.budgets([moved]) == here.budgets([sequence]) == (3.0, 3.0)
    there.charge([moved], [3.0], 9.0)
    assert there.budgets([moved]) == (200.0, 200.0), "the second exhaustion, in the statistics of there"


def test_a_state_of_another_order_is_ignored() -> None:
    policy = policy_with({"m": 2.0})
    sequence = arrive(policy, 0, "m")
    for state in ((), (3.0,), (1.0, 2.0, 3.0)):
        policy.import_state(sequence, state, 0.0)
    assert policy.budgets([sequence]) == (2.0, 2.0)
