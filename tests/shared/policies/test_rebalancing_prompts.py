"""Prompts that wait and would be too late: who gives them to whom, and that they come to rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import NextMove
from shared.messages.migration import MigrationReason
from shared.policies.rebalancing import LEAST_SOONER_S, Destination, InstanceView, Rebalancer

LOW, HIGH = 64.0, 256.0
OBJECTIVE_S = 1.5
TOKEN_S = 2e-4
M = frozenset({"m"})


@dataclass
class Instance:
    """A queue of prompts, in tokens; those that run hold memory and compute nothing."""

    name: str
    prompts: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    total: int = 100_000
    models: frozenset[str] = M

    @property
    def prompts_s(self) -> float:
        return TOKEN_S * sum(self.prompts)

    def late(self) -> tuple[int, float] | None:
        """Index of the first that ends after its objective, and when it is begun."""
        begins_s = 0.0
        for number, tokens in enumerate(self.prompts):
            if begins_s + TOKEN_S * tokens > OBJECTIVE_S:
                return number, begins_s
            begins_s += TOKEN_S * tokens
        return None

    def view(self) -> InstanceView:
        late = self.late()
        used = sum(self.running) + sum(self.prompts[:1])
        num_running = len(self.running)
        return InstanceView(
            instance_id=self.name,
            freeness=(self.total - used) / max(1, num_running) if used else float("inf"),
            num_running=num_running,
            num_counted=num_running + bool(self.prompts),
            total_tokens=self.total,
            models=self.models,
            can_give=bool(used),
            prompts_s=self.prompts_s,
            late_move=None if late is None else NextMove("m", self.prompts[late[0]]),
            late_starts_s=0.0 if late is None else late[1],
        )


class Cluster:
    def __init__(self, *instances: Instance) -> None:
        self.instances = {instance.name: instance for instance in instances}
        self.policy = Rebalancer(LOW, HIGH, 1e6)
        self.now = 0.0

    def step(self) -> dict[str, tuple[str, ...]]:
        self.now += 0.1
        for view in (instance.view() for instance in self.instances.values()):
            self.policy.touch(view.instance_id, view.freeness, view.late_starts_s)
        self.policy.step(self.now, lambda name: self.instances[name].view(), self._destinations_above)
        return {pair.source: pair.destinations for pair in self.policy.pairs.values()}

    def _destinations_above(self, freeness: float) -> list[Destination]:
        views = [instance.view() for instance in self.instances.values()]
        return [
            Destination(view.instance_id, view.freeness, view.models) for view in views if view.freeness >= freeness
        ]

    def squared_s(self) -> float:
        return sum(instance.prompts_s**2 for instance in self.instances.values())


def test_a_late_prompt_goes_to_where_it_is_begun_soonest() -> None:
    cluster = Cluster(Instance("late", [5000, 5000, 5000]), Instance("busy", [4000]), Instance("idle"))
    assert cluster.step() == {"late": ("idle",)}
    (pair,) = cluster.policy.pairs.values()
    assert pair.reason is MigrationReason.PROMPTS
    cluster.instances["late"].prompts = [5000]
    assert cluster.step() == {} and cluster.policy.is_idle, "what is left is in time"


def test_nothing_moves_for_time_without_enough_of_it_or_memory_or_the_model() -> None:
    def pairs(there: Instance) -> dict[str, tuple[str, ...]]:
        return Cluster(Instance("late", [5000, 5000, 5000]), there).step()

    assert pairs(Instance("there", [3000])) == {"late": ("there",)}
    assert pairs(Instance("there", [4000])) == {}, "0.2 s sooner are not worth a move"
    assert pairs(Instance("there", running=[95_500])) == {}, "it would be full with it"
    assert pairs(Instance("there", models=frozenset({"other"}))) == {}
    in_time = Cluster(Instance("early", [3000, 3000]), Instance("idle"))
    assert in_time.step() == {}


def test_a_source_that_cannot_give_any_more_is_forgotten() -> None:
    cluster = Cluster(Instance("late", [5000, 5000]), Instance("idle"))
    cluster.step()
    cluster.policy.forget("late")
    del cluster.instances["late"]
    cluster.policy.step(1.0, lambda name: cluster.instances[name].view() if name == "idle" else None, lambda _: [])
    assert cluster.policy.is_idle


queues = st.lists(st.lists(st.integers(50, 12_000), max_size=8), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(queues, st.lists(st.integers(0, 80_000), min_size=6, max_size=6))
def test_each_move_lowers_the_sum_of_squared_times_and_helps_who_moves(
    prompts: list[list[int]], held: list[int]
) -> None:
    """Hence at constant load nothing moves for ever, and nothing in a circle."""
    instances = [
        Instance(f"i{n}", list(own), [tokens] * (tokens > 0))
        for n, (own, tokens) in enumerate(zip(prompts, held, strict=False))
    ]
    cluster = Cluster(*instances)
    num_moves, most = 0, 20 * sum(map(len, prompts)) + 1
    while pairs := cluster.step():
        for source, destination in ((cluster.instances[a], cluster.instances[b]) for a, (b,) in pairs.items()):
            late = source.late()
            assert late is not None and source.name not in {b for (b,) in pairs.values()}
            index, starts_s = late
            if destination.prompts_s + LEAST_SOONER_S > starts_s:
                continue  # the destination refuses, as another has come since
            before = cluster.squared_s()
            tokens = source.prompts.pop(index)
            destination.prompts.append(tokens)
            assert cluster.squared_s() < before
            assert destination.prompts_s - TOKEN_S * tokens < starts_s
            num_moves += 1
        assert num_moves < most
    for source in cluster.instances.values():
        view = source.view()
        for other in cluster.instances.values():
            there = other.view()
            late_tokens = 0 if view.late_move is None else view.late_move.num_tokens
            has_memory = there.spare_tokens - late_tokens >= LOW * (there.num_running + 1)
            is_sooner = other.prompts_s + LEAST_SOONER_S < view.late_starts_s
            assert not (has_memory and is_sooner and there.freeness >= LOW), "nobody waits who need not"
