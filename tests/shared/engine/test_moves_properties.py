"""Requests move between three engines under random arrivals, cancels, failures and deadlines, given up at any point."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.engine.calls import OnTime, SetCostModel
from shared.engine.engine import Engine
from shared.engine.plan import DraftShape, ModelShape
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import FixedTokenBudget
from tests.seeds import examples, seeds
from tests.shared.costs import SMALL
from tests.shared.engine.cluster import Cluster, Node, classes
from tests.shared.engine.fake_executor import next_token, repeating_token, request
from tests.shared.engine.test_draft_model import Always

SHAPES = [ModelShape("a", 4, 3, 60, draft=DraftShape(9, 50)), ModelShape("b", 2, 2, 24)]
CHANCES = {
    "submit": 10,
    "cancel": 2,
    "place_again": 1,
    "plan": 25,
    "step_returns": 25,
    "copies_start": 8,
    "copy_ends": 8,
    "time_passes": 4,
    "begin_move": 8,
    "go_on": 40,
    "hurry": 15,
    "give_up": 1,
}
"""Chances of the events in a random run."""
WEIGHTS = {"x": 1.0, "y": 2.0, "z": 0.5}
"""Weights of tenants."""
STEPS = ("send_filled", "deliver", "announce_last", "detach", "send_rest", "deliver", "freeze", "commit", "forget")


class Events:
    """The cluster's events with the choices of a `random.Random`."""

    def __init__(self, chooser: random.Random) -> None:
        self.chooser = chooser
        self.guesses = chooser.random() < 0.3
        self.drafts = chooser.random() < 0.3
        self.cluster = Cluster([self._node() for _ in range(3)])

    def _node(self) -> Node:
        choose = self.chooser
        ordering = choose.choice(sorted(ORDERING_POLICIES))
        budget = choose.choice([1, 4, 12, 40])
        engine = Engine(
            choose.choice([2, 4, 8, 12, 24]),
            choose.randint(1, 6),
            ordering_policy(ordering),
            SloTokenBudget(budget) if choose.random() < 0.5 else FixedTokenBudget(budget),
            steps_in_flight=choose.randint(1, 2),
            max_waiting=50,
            interruption=choose.choice(["suspend", "suspend", "discard", "off"]),
            mix_phases=choose.random() < 0.7,
            num_host_merged=choose.choice([0, 2, 6]),
            checkpoint=AdaptiveCheckpoint(choose.choice([0.0, 0.5])),
            prefetch=choose.random() < 0.7,
            ttft_s=1.0,
            tpot_s=0.05,
            migration_cooldown_s=choose.choice([0.0, 0.2]),
            lookup=LookupSettings(choose.choice([0, 2, 6]), 1, 3) if self.guesses else LookupSettings(),
        )
        node = Node(engine, SHAPES, repeating_token if self.guesses else next_token)
        if self.drafts:
            engine.drafting.speculators["a"].gate = lambda num_sequences: Always()
        if choose.random() < 0.6:
            for shape in SHAPES:
                engine.apply(SetCostModel(shape.name, SMALL), 0.0)
        return node

    @property
    def node(self) -> Node:
        return self.chooser.choice(self.cluster.nodes)

    def submit(self) -> None:
        choose = self.chooser
        sent = request(
            f"r{len(self.cluster.sent)}",
            [choose.randrange(4) for _ in range(choose.choice([1, 3, 8, 20]))],
            choose.randint(1, 30),
            min_tokens=choose.choice([0, 0, 3]),
            stop_token_ids=tuple(choose.sample(range(1000), choose.choice([0, 50, 200]))),
            model=choose.choice("aab"),
            timeout_s=choose.choice([1.0, 5.0, 1000.0, 1000.0]),
            tenant=(tenant := choose.choice("xyz")),
            tenant_weight=WEIGHTS[tenant],
            prefix_salt=tenant,
            **classes(choose.random() < 0.4, choose.random() < 0.3),
        )
        self.cluster.submit(self.node, sent)

    def _held(self) -> str | None:
        held = [name for name in self.cluster.sent if name not in self.cluster.ended]
        return self.chooser.choice(held) if held else None

    def cancel(self) -> None:
        if (name := self._held()) is not None:
            self.cluster.cancel(name)

    def place_again(self) -> None:
        if (name := self._held()) is not None:
            self.cluster.replace(name, self.chooser.randint(0, 12))

    def plan(self) -> None:
        node = self.node
        if len(node.in_flight) < node.engine.steps.max_in_flight:
            node.plan(self.cluster.now)

    def step_returns(self) -> None:
        node = self.node
        if node.in_flight:
            node.step_returns(self.cluster.now, self.chooser.random() < 0.05, self.chooser.random() * 0.9)
            self.cluster.collect()

    def copies_start(self) -> None:
        node = self.node
        node.take_copies()

    def copy_ends(self) -> None:
        node = self.node
        if node.copies:
            node.copy_ends(self.cluster.now, self.chooser.random() < 0.85)

    def time_passes(self) -> None:
        self.cluster.now += self.chooser.choice([0.02, 0.1, 1.0])
        for node in self.cluster.nodes:
            node.engine.apply(OnTime(), self.cluster.now)
            wakeup = node.engine.next_wakeup()
            assert wakeup is None or wakeup > self.cluster.now
        self.cluster.collect()

    def begin_move(self) -> None:
        if len(self.cluster.moving) < 4:
            self.cluster.begin_move(self.node, self.node, self.chooser.randrange(4))

    def go_on(self) -> None:
        if self.cluster.moving:
            getattr(self.cluster, self.chooser.choice(STEPS))(self.chooser.choice(self.cluster.moving))

    def hurry(self) -> None:
        """Some steps in the right order, with nothing in between."""
        if self.cluster.moving:
            moving = self.chooser.choice(self.cluster.moving)
            for step in STEPS[: self.chooser.randint(1, len(STEPS))]:
                if moving in self.cluster.moving:
                    getattr(self.cluster, step)(moving)

    def check_tenants(self) -> None:
        """At the end: a tenant, its weight and its salt went with each request, and no more is told of what it had than was
        counted on all instances. (Steps of sequences that had ended meanwhile are counted too.)"""
        counted: dict[str, float] = defaultdict(float)
        for node in self.cluster.nodes:
            assert not list(node.engine.memory.tenants_of(True)) and not list(node.engine.memory.tenants_of(False))
            for tenant, seconds in node.engine.counters.tenant_service_s.items():
                counted[tenant] += seconds
        for name, ended in self.cluster.ended.items():
            sent, here = self.cluster.sent[name], ended.request
            assert (here.tenant, here.tenant_weight, here.prefix_salt) == (
                sent.tenant,
                WEIGHTS[sent.tenant],
                sent.tenant,
            )
            counted[sent.tenant] -= ended.service_s
        assert min(counted.values(), default=0.0) >= -1e-9

    def give_up(self) -> None:
        if self.cluster.moving:
            self.cluster.give_up(self.chooser.choice(self.cluster.moving), self.chooser.random() < 0.5)


class ClusterMachine(RuleBasedStateMachine):
    """Hypothesis chooses the order of events and their seeds, and shrinks what fails."""

    @initialize(seed=st.integers(0, 2**20))
    def start(self, seed):
        self.events = Events(random.Random(seed))

    @rule(event=st.sampled_from(sorted(CHANCES)), seed=st.integers(0, 99), times=st.integers(1, 4))
    def happens(self, event, seed, times):
        self.events.chooser.seed(seed)
        for _ in range(times):
            getattr(self.events, event)()

    @invariant()
    def holds(self):
        if hasattr(self, "events"):
            self.events.cluster.check()

    def teardown(self):
        if hasattr(self, "events"):
            self.events.cluster.finish()
            self.events.check_tenants()


ClusterMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=80, deadline=None)
TestMoves = pytest.mark.slow(ClusterMachine.TestCase)


@pytest.mark.parametrize("group", seeds(6, normally=2))
def test_long_random_runs(group):
    num_moved = 0
    for seed in range(4 * group, 4 * group + 4):
        events = Events(random.Random(seed))
        names, weights = list(CHANCES), list(CHANCES.values())
        for number in range(700):
            getattr(events, events.chooser.choices(names, weights)[0])()
            if number % 3 == 0:
                events.cluster.check()
        events.cluster.finish()
        events.check_tenants()
        num_moved += events.cluster.num_moved
    assert num_moved > 10
