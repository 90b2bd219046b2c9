"""Long seeded runs with bursts of online requests over an offline backlog, in little memory: every mechanism is used, every
invariant holds after every call, and every output is that of an undisturbed run."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from msgspec.structs import replace

from shared.costs.model import shape_of
from shared.engine.calls import AddModel, Cancel, OnCopy, OnStep, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.engine.requests import Ended, Output
from shared.messages.requests import FinishReason, RequestClass, unpack_tokens
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.slo_budget import SloTokenBudget
from tests.shared.costs import SMALL
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

SHAPES = [ModelShape("a", 4, 3, 80), ModelShape("b", 2, 2, 40)]
COST_MODEL = replace(SMALL, num_layers=16, checkpoint_block_s=0.001, restore_block_s=0.001)


class Run:
    """One engine on the fake executor; `used` sums up what happened."""

    def __init__(self, seed: int, used: Counter, **options) -> None:
        self.random = random.Random(seed)
        ordering = ordering_policy(options.pop("ordering", "doubling_budget"))
        self.tenants = options.pop("tenants", ())
        options = {
            "num_host_merged": 20,
            "checkpoint": AdaptiveCheckpoint(0.3),
            "steps_in_flight": 1 + seed % 2,
            "ttft_s": 0.15,
            "tpot_s": 0.08,
            **options,
        }
        self.engine = Engine(14, 8, ordering, SloTokenBudget(64), max_waiting=500, **options)
        self.limits = {shape.name: self.engine.apply(AddModel(shape), 0.0).max_model_len for shape in SHAPES}
        for shape in SHAPES:
            self.engine.apply(SetCostModel(shape.name, COST_MODEL), 0.0)
        self.executor = FakeExecutor(SHAPES)
        self.arrivals = 0.15 if seed % 3 else 0.05
        self.used = used
        self.now = 0.0
        self.sent = {}
        self.output = {}
        self.ended = {}
        self.in_flight = []
        self.copies = []

    def submit(self, is_online: bool) -> None:
        name = f"r{len(self.sent)}"
        start = self.random.randrange(4)
        prompt = [start] * self.random.randint(1, 12) + [
            self.random.randrange(50) for _ in range(self.random.randint(0, 24))
        ]
        kind = RequestClass.ONLINE if is_online else RequestClass.OFFLINE
        model = self.random.choice("ab")
        tenant = self.random.choice(self.tenants) if self.tenants else ""
        sent = request(
            name,
            prompt,
            self.random.randint(1, 12 if is_online else 40),
            model=model,
            request_class=kind,
            tenant=tenant,
            tenant_weight=2.0 if tenant == "a" else 1.0,
            prefix_salt=tenant,
        )
        if self.engine.apply(Submit(sent), self.now) is None:
            self.sent[name] = sent
            self.output[name] = []

    def step(self, *, may_cancel: bool = True) -> None:
        engine, executor = self.engine, self.executor
        while len(self.in_flight) < engine.steps.max_in_flight and (plan := engine.plan(self.now)):
            self.copies.extend(executor.start(engine.next_copies()))
            self.in_flight.append(plan)
            executor.launch(plan)
            engine.check()
            assert engine.take_interrupt(self.now) is None, "interrupted by what was there when it was planned"
        self.copies.extend(executor.start(engine.next_copies()))
        if self.random.random() < self.arrivals:
            for _ in range(self.random.randint(1, 3)):
                self.submit(is_online=True)
        if may_cancel and self.sent and self.random.random() < 0.03:
            engine.apply(Cancel(self.random.choice(list(self.sent))), self.now)
            engine.check()
        if self.in_flight:
            plan = self.in_flight.pop(0)
            predicted = COST_MODEL.predict(shape_of(plan.starts, plan.counts))
            if engine.take_interrupt(self.now + predicted * 0.2) == plan.step_id:
                self.now += predicted * 0.5
                engine.apply(OnStep(executor.suspend(plan, 0.5)), self.now)
            else:
                self.now += predicted
                engine.apply(OnStep(executor.execute(plan)), self.now)
        else:
            self.now += 0.005
        engine.check()
        while self.copies and self.random.random() < 0.7:
            copy = self.copies.pop(0)
            executor.copy(copy)
            engine.apply(OnCopy(copy.copy_id, True), self.now)
            engine.check()
        self.collect()

    def collect(self) -> None:
        for effect in self.engine.effects():
            if isinstance(effect, Ended):
                assert effect.request.request_id not in self.ended
                self.ended[effect.request.request_id] = effect
            elif isinstance(effect, Output):
                for entry in effect.entries:
                    assert entry.offset == len(self.output[entry.request_id])
                    self.output[entry.request_id].extend(unpack_tokens(entry.tokens))

    def finish(self) -> None:
        for _ in range(20_000):
            if len(self.ended) == len(self.sent):
                break
            self.random.random = lambda: 0.5  # no more arrivals or cancels
            self.step(may_cancel=False)
        assert set(self.ended) == set(self.sent)
        for name, ended in self.ended.items():
            expected = expected_output(self.sent[name], self.limits[self.sent[name].model])
            if ended.reason != FinishReason.CANCELLED:
                assert self.output[name] == expected, name
        counters = self.engine.counters
        for key in ("steps_suspended", "steps_resumed", "steps_discarded", "recomputed_tokens", "harvested_tokens"):
            self.used[key] += getattr(counters, key)
        self.used["discarded_tokens"] += counters.discarded_tokens
        for key in ("checkpointed_blocks", "restored_blocks", "dropped_checkpoint_blocks", "moved_blocks"):
            self.used[key] += getattr(counters, key).total()
        self.used["recomputed_partial_tokens"] += counters.recomputed_partial_tokens
        self.used.update(counters.preemptions)


def go(run: Run, steps: int = 250) -> None:
    for index in range(steps):
        if index % 25 == 0:
            for _ in range(6):
                run.submit(is_online=False)
        run.step()
    run.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ordering",
    [
        "doubling_budget",
        *(pytest.param(name, marks=pytest.mark.long) for name in sorted({*ORDERING_POLICIES} - {"doubling_budget"})),
    ],
)
def test_every_output_is_that_of_an_undisturbed_run(ordering):
    used = Counter()
    for seed in range(3, 7):  # among which suspended steps are resumed by each policy
        go(Run(seed, used, ordering=ordering))
    for what in (
        "steps_suspended",
        "steps_resumed",
        "steps_discarded",
        "checkpointed_blocks",
        "restored_blocks",
        "moved_blocks",
    ):
        assert used[what] > 0, what
    assert used["memory", "checkpointed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"interruption": "off"},
        {"interruption": "discard"},
        {"prefetch": False},
        {"num_host_merged": 0},
        {"num_host_merged": 2},
        {"mix_phases": False},
        {"steps_in_flight": 1},
        {"tenants": ("a", "b", "c")},
        {"tenants": ("a", "b"), "ordering": "fcfs"},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_each_mechanism_can_be_left_out(options):
    used = Counter()
    go(Run(1, used, **options))
    if options.get("interruption") == "off":
        assert used["steps_suspended"] == 0
    if options.get("interruption") == "discard":
        assert used["steps_discarded"] == used["steps_suspended"] > 0
    if options.get("num_host_merged") == 0:
        assert used["checkpointed_blocks"] == 0 and used["memory", "checkpointed"] == 0
    if options.get("num_host_merged") == 2:
        assert used["dropped_checkpoint_blocks"] > 0


def test_online_only_holds_offline_requests_back():
    engine = Engine(14, 8, ordering_policy("fcfs"), SloTokenBudget(64), serves_offline=False)
    engine.apply(AddModel(SHAPES[0]), 0.0)
    engine.apply(Submit(request("offline", [1, 2], 3, request_class=RequestClass.OFFLINE)), 0.0)
    assert engine.plan(0.0) is None
    assert engine.load().models[0].offline_room_tokens == 0
    engine.apply(Submit(request("online", [1, 2], 3)), 0.0)
    plan = engine.plan(0.0)
    assert plan is not None and len(plan.rows) == 1


def test_a_checkpointed_sequence_loses_only_its_partly_filled_block():
    """Offline work fills the pool, one online request takes all of it; nothing but partial blocks is computed again."""
    engine = Engine(
        8,
        8,
        ordering_policy("fcfs"),
        SloTokenBudget(64),
        num_host_merged=8,
        checkpoint=AdaptiveCheckpoint(0.0),
        fits_costs=False,
    )
    engine.apply(AddModel(SHAPES[0]), 0.0)
    executor = FakeExecutor(SHAPES)

    def turn(now: float) -> None:
        plan = engine.plan(now)
        for copy in engine.next_copies():
            executor.copy(copy)
            engine.apply(OnCopy(copy.copy_id, True), now)
        if plan is not None:
            engine.apply(OnStep(executor.execute(plan)), now)
        engine.check()

    for index in range(3):
        engine.apply(Submit(request(f"offline{index}", [index] * 18, 12, request_class=RequestClass.OFFLINE)), 0.0)
    times = itertools.count()
    for _ in range(6):
        turn(float(next(times)))
    engine.apply(Submit(request("online", list(range(75)), 4)), 6.0)
    for _ in range(40):
        turn(float(next(times)))
    counters = engine.counters
    assert counters.preemptions["memory", "checkpointed"] >= 2
    assert counters.preemptions["memory", "recompute"] == 0
    assert counters.recomputed_tokens == counters.recomputed_partial_tokens
    assert counters.restored_blocks["a"] > 0
    assert not engine.all_held()
